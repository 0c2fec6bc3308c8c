"""Key derivation (HKDF-SHA256), key agreement (X25519) and keystreams (ChaCha20)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sordino.errors import SordinoError

UInt32Array: TypeAlias = NDArray[np.uint32]

_CHUNK = 1 << 14  # words; 64 KiB stay in cache
_ZEROS = bytes(4 * _CHUNK)

FIELD = 2**255 - 19
EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of points of order 8, up to sign
# The points (u, ·) of the curve and of its twist whose order divides 8; u = (1 + y) / (1 - y).
_LOW_ORDER = {0, 1, FIELD - 1, *((1 + y) * pow(1 - y, -1, FIELD) % FIELD for y in (EIGHTH, -EIGHTH))}


def joined(*parts: str | bytes | int) -> bytes:
    """Each part after its length, so that two different lists never give the same bytes."""
    whole = bytearray()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole += len(data).to_bytes(4, "little") + data
    return bytes(whole)


def derive(key: bytes, *purpose: str | bytes | int, salt: bytes = b"", size: int = 32) -> bytes:
    """A key for one purpose. Keys for other purposes reveal nothing about it."""
    info = joined("sordino secagg", *purpose)
    return HKDF(algorithm=SHA256(), length=size, salt=salt or None, info=info).derive(key)


def public(private: bytes) -> bytes:
    """The public key of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, theirs: bytes) -> bytes:
    """The shared secret of two X25519 keys.

    Raises:
      SordinoError: the public key is of low order, which would make the secret a constant.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise SordinoError("X25519: the public key is of low order; its owner must make another.") from None


def low_order(theirs: bytes) -> bool:
    """Whether a public key is of low order. Clamped private keys are multiples of 8, so all agree on zero with it."""
    return int.from_bytes(theirs, "little") % 2**255 % FIELD in _LOW_ORDER


def stream(key: bytes, size: int) -> bytes:
    """The first `size` bytes of the keystream. The nonce is zero because every key is derived for one stream."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def add_stream(total: UInt32Array, key: bytes, sign: int) -> None:
    """Add or subtract the keystream modulo 2^32, in place, chunk by chunk."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    words = np.empty(min(_CHUNK, total.size), dtype="<u4")
    for at in range(0, total.size, _CHUNK):
        part = total[at : at + _CHUNK]
        some = words[: part.size]
        cipher.update_into(memoryview(_ZEROS)[: some.nbytes], some.view(np.uint8).data)
        (np.add if sign > 0 else np.subtract)(part, some, out=part)
