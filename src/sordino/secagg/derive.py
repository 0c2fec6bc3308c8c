"""Keys from keys (HKDF-SHA256, X25519), and keystream from keys (ChaCha20)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sordino.errors import SordinoError

Words: TypeAlias = NDArray[np.uint32]

_CHUNK = 1 << 14  # words; 64 KiB stay in cache
_ZEROS = bytes(4 * _CHUNK)


def joined(*parts: str | bytes | int) -> bytes:
    """Each part behind its length: two lists of parts never give the same bytes."""
    whole = bytearray()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole += len(data).to_bytes(4, "little") + data
    return bytes(whole)


def derive(key: bytes, *purpose: str | bytes | int, salt: bytes = b"", size: int = 32) -> bytes:
    """A key for one purpose; those of other purposes tell nothing of it."""
    info = joined("sordino secagg", *purpose)
    return HKDF(algorithm=SHA256(), length=size, salt=salt or None, info=info).derive(key)


def public(private: bytes) -> bytes:
    """Of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, theirs: bytes) -> bytes:
    """What two X25519 keys have in common. A low-order public key would make that a constant: refused."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise SordinoError("X25519: the public key is of low order; its owner must make another.") from None


def low_order(theirs: bytes) -> bool:
    """Private keys are multiples of 8 once clamped, so any one of them finds out."""
    try:
        agree(bytes(32), theirs)
    except SordinoError:
        return True
    return False


def stream(key: bytes, size: int) -> bytes:
    """The first bytes of the keystream. The nonce is zero: every key here is derived for a single stream."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def add_stream(total: Words, key: bytes, sign: int) -> None:
    """total ± keystream modulo 2^32, in place, chunk by chunk."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    words = np.empty(min(_CHUNK, total.size), dtype="<u4")
    for at in range(0, total.size, _CHUNK):
        part = total[at : at + _CHUNK]
        some = words[: part.size]
        cipher.update_into(memoryview(_ZEROS)[: some.nbytes], some.view(np.uint8).data)
        (np.add if sign > 0 else np.subtract)(part, some, out=part)
