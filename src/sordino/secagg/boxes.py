"""The encrypted shares of an offer: one box per receiver, which holds a share of a key and one of a seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.secagg import shamir
from sordino.secagg.derive import derive, joined
from sordino.secagg.messages import BOX
from sordino.secagg.session import Member


def encrypt_shares(
    member: Member, round: int, offered: bytes, shares: Mapping[str, tuple[int, int]]
) -> NDArray[np.uint8]:
    """The encrypted shares of this site's key and seed, one row per receiver.

    Args:
      member: the site.
      round: the number of the round.
      offered: the public key and the commitment of its offer.
      shares: a share of the key and one of the seed, by receiver.

    Returns:
      The boxes, in the order of `shares`.
    """
    boxes = bytearray()
    for name, pair in shares.items():
        cipher, nonce, about = _box(member, round, name, member.name, name, offered)
        boxes += cipher.encrypt(nonce, b"".join(share.to_bytes(shamir.SIZE, "little") for share in pair), about)
    return np.frombuffer(bytes(boxes), np.uint8).reshape(len(shares), BOX)


def decrypt_shares(member: Member, round: int, dealer: str, offered: bytes, box: bytes) -> tuple[int, int]:
    """This site's shares of a dealer's key and seed.

    Args:
      member: the site.
      round: the number of the round.
      dealer: the site that dealt the shares.
      offered: the public key and the commitment of the dealer's offer.
      box: the dealer's box for this site.

    Returns:
      The share of the key and that of the seed.

    Raises:
      SordinoError: the box is not for this site and this offer, or holds no shares.
    """
    cipher, nonce, about = _box(member, round, dealer, dealer, member.name, offered)
    try:
        text = cipher.decrypt(nonce, box, about)
    except InvalidTag:
        text = b""
    key, seed = (int.from_bytes(half, "little") for half in (text[: shamir.SIZE], text[shamir.SIZE :]))
    if len(text) != 2 * shamir.SIZE or not (key < shamir.PRIME and seed < shamir.PRIME):
        raise SordinoError(
            f"offer of '{dealer}': the shares it holds for '{member.name}' cannot be read; start the next round "
            f"without '{dealer}'."
        )
    return key, seed


def _box(
    member: Member, round: int, peer: str, sender: str, receiver: str, offered: bytes
) -> tuple[ChaCha20Poly1305, bytes, bytes]:
    """Cipher, nonce and associated data of one box between this site and a peer.

    There is no randomness, so a box encrypted twice is the same. A key and nonce never encrypt two texts: both are
    derived for one run, plan, round, sender, receiver and offered key, and the secret of that key determines the text.
    A site that lost its secret and drew another one offers another key.
    """
    session = member.session
    common = member.identity.agree(bytes.fromhex(session.roster.card(peer).box))
    about = joined("box", session.context, round, sender, receiver)
    both = derive(common, about, salt=offered, size=32 + 12)
    return ChaCha20Poly1305(both[:32]), both[32:], about
