"""The masks of one vector: a site adds them, and the server removes from the sum those that do not cancel.

Both kinds of round use them, `round` between all pairs of sites and `sparse` along a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sordino.errors import SordinoError, WrongShareError
from sordino.secagg import shamir
from sordino.secagg.derive import UInt32Array, add_stream, agree, derive, public
from sordino.secagg.messages import DIMENSION, commitment
from sordino.secagg.session import Member, Session


def add_masks(member: Member, round: int, vector: UInt32Array, peers: Mapping[str, bytes]) -> UInt32Array:
    """The vector plus this site's self-mask and one mask per peer, modulo 2^32.

    Args:
      member: the site.
      round: the number of the round.
      vector: the site's vector.
      peers: the public keys of the round, of the sites that share a mask with this one.

    Returns:
      The masked vector.

    Raises:
      SordinoError: the vector is of another type or size.
    """
    if not isinstance(vector, np.ndarray) or vector.dtype != np.uint32 or vector.ndim != 1:
        raise SordinoError("vector: it must be an array of uint32 with one axis.")
    if not 1 <= vector.size <= DIMENSION:
        raise SordinoError(f"vector: {vector.size:,} numbers; 1 to {DIMENSION:,} can be masked.")
    session, total = member.session, vector.copy()
    add_stream(total, _self_key(session, round, member.name, member.seed(round)), 1)
    for peer, theirs in peers.items():
        key, sign = _pair(session, round, member.name, peer, member.ephemeral(round), theirs)
        add_stream(total, key, sign)
    return total


def remove_self_mask(
    total: UInt32Array, session: Session, round: int, name: str, committed: bytes, needed: int, shares: dict[str, int]
) -> None:
    """Subtract a survivor's self-mask from the sum, in place.

    Args:
      total: the sum.
      session: the session.
      round: the number of the round.
      name: the survivor.
      committed: the commitment to its seed, from its offer.
      needed: the number of shares that give a secret.
      shares: shares of its seed, by the site that revealed them.

    Raises:
      WrongShareError: the share of one site is wrong; try again without it.
      SordinoError: the shares do not give the seed.
    """

    def is_seed(secret: bytes) -> bool:
        return commitment(session, round, name, secret) == committed

    seed = _recover(session, needed, f"the seed of '{name}'", shares, is_seed)
    add_stream(total, _self_key(session, round, name, seed), -1)


def remove_pair_masks(
    total: UInt32Array,
    session: Session,
    round: int,
    dropped: str,
    offered: bytes,
    needed: int,
    shares: dict[str, int],
    peers: Mapping[str, bytes],
) -> None:
    """Remove the masks between a site that dropped out and the survivors from the sum, in place.

    Args:
      total: the sum.
      session: the session.
      round: the number of the round.
      dropped: the site that dropped out.
      offered: its public key of the round.
      needed: the number of shares that give a secret.
      shares: shares of its private key, by the site that revealed them.
      peers: the public keys of the survivors that share a mask with it.

    Raises:
      WrongShareError: the share of one site is wrong; try again without it.
      SordinoError: the shares do not give the key.
    """

    def is_key(secret: bytes) -> bool:
        return public(secret) == offered  # up to the bits that X25519 sets itself

    private = _recover(session, needed, f"the key of '{dropped}'", shares, is_key)
    for name, theirs in peers.items():
        key, sign = _pair(session, round, dropped, name, private, theirs)
        add_stream(total, key, sign)  # its own sign: the opposite of the one that the survivor used


def _recover(session: Session, t: int, what: str, shares: dict[str, int], right: Callable[[bytes], bool]) -> bytes:
    """The secret from t shares. If they do not fit and there is one more, each is left out in turn."""

    def tried(names: Sequence[str]) -> bytes | None:
        value = shamir.join([(session.roster.position(name) + 1, shares[name]) for name in names])
        secret = value.to_bytes(32, "little") if value < 2**256 else b""
        return secret if secret and right(secret) else None

    names = list(shares)
    if (secret := tried(names[:t])) is not None:
        return secret
    for bad in names[:t] if len(names) > t else ():
        if tried([name for name in names[: t + 1] if name != bad]) is not None:
            raise WrongShareError(
                bad,
                f"reveal of '{bad}': its share of {what} is wrong, or was wrong from the start; open again without it.",
            )
    raise SordinoError(
        f"reveals: the shares do not give {what}; the site that dealt it, or some that revealed it, sent wrong shares. "
        "The round is lost; start the next."
    )


def _self_key(session: Session, round: int, name: str, seed: bytes) -> bytes:
    return derive(seed, "self mask", session.context, round, name)


def _pair(session: Session, round: int, site: str, peer: str, private: bytes, theirs: bytes) -> tuple[bytes, int]:
    """The key of a pair's mask, equal for both, and the sign for `site`: + for the earlier site in the roster."""
    first, second = sorted((site, peer), key=session.roster.position)
    key = derive(agree(private, theirs), "pair mask", session.context, round, first, second)
    return key, 1 if site == first else -1
