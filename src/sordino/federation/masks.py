"""Masks at a site: between all pairs, or along a graph where a run has many sites.

A site stores what it was shown of the others' offers as named arrays of bytes: `NAME` of each offer, or `present` (one
bit per site of the roster) and `slips` (of its neighbours' offers) along a graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sordino import secagg, wire
from sordino.errors import SordinoError
from sordino.secagg import Member, Session, sparse

PREFIX = "offer:"
PRESENT, SLIPS = "present", "slips"


def is_sparse(session: Session) -> bool:
    """Whether masks are shared along a graph."""
    return session.graph is not None


def is_about_masks(array: str) -> bool:
    """Whether an array of a message is about offers."""
    return array.startswith(PREFIX) or array in (PRESENT, SLIPS)


def shown_in(message: wire.Message) -> dict[str, bytes]:
    """What a message shows of the offers."""
    return {k.removeprefix(PREFIX): v.tobytes() for k, v in message.arrays.items() if is_about_masks(k)}


def request_hash(message: wire.Message, request: bytes) -> str:
    """The hash of what all sites are asked alike: along a graph, each has slips of its own, which are left out."""
    if SLIPS in message.arrays:
        same = {name: array for name, array in message.arrays.items() if name != SLIPS}
        request = wire.encode(message.kind, message.fields, same)
    return hashlib.sha256(request).hexdigest()


def present_bits(session: Session, names: Sequence[str] | Mapping[str, object]) -> NDArray[np.uint8]:
    """Who made an offer, one bit per site in the roster's order."""
    return np.packbits([name in names for name in session.roster.names])


def check(member: Member, t: int, shown: Mapping[str, bytes]) -> None:
    """Check the offers before the data are touched.

    Raises:
      SordinoError: they are too few, or one is invalid.
    """
    if is_sparse(member.session):
        sparse.check(member, t, *_read(member.session, shown))
    else:
        secagg.check(member, t, shown)


def masked(member: Member, t: int, shown: Mapping[str, bytes], vector: NDArray[np.uint32], asked: str) -> bytes:
    """The message with the masked vector."""
    if is_sparse(member.session):
        return sparse.masked(member, t, *_read(member.session, shown), vector, asked)
    return secagg.masked(member, t, shown, vector, request=asked)


def offer(member: Member, t: int) -> bytes:
    """This site's offer."""
    return sparse.offer(member, t) if is_sparse(member.session) else secagg.offer(member, t)


def confirm(
    member: Member,
    t: int,
    shown: Mapping[str, bytes],
    survivors: Sequence[str],
    seals: Mapping[str, str],
    before: Sequence[str] | None,
    asked: str,
) -> str:
    """This site's signature over the survivors."""
    if is_sparse(member.session):
        present, _ = _read(member.session, shown)
        return sparse.confirm(member, t, present, survivors, before, asked)
    return secagg.confirm(member, t, shown, survivors, seals, before, asked)


def reveal(
    member: Member,
    t: int,
    shown: Mapping[str, bytes],
    survivors: Sequence[str],
    seals: Mapping[str, str],
    confirmations: Mapping[str, str],
    before: Sequence[str] | None,
    asked: str,
) -> bytes:
    """This site's shares, for survivors that enough sites confirmed."""
    if is_sparse(member.session):
        present, slips = _read(member.session, shown)
        return sparse.reveal(member, t, present, slips, survivors, seals, confirmations, before, asked)
    return secagg.reveal(member, t, shown, survivors, confirmations, before, asked)


def _read(session: Session, shown: Mapping[str, bytes]) -> tuple[list[str], NDArray[np.uint8]]:
    """Who made an offer, and the neighbours' slips."""
    names, bits = session.roster.names, shown.get(PRESENT, b"")
    marks = np.unpackbits(np.frombuffer(bits, np.uint8))
    slips = shown.get(SLIPS, b"")
    fits = len(bits) == (len(names) + 7) // 8 and not marks[len(names) :].any() and len(slips) % sparse.SLIP == 0
    if shown.keys() != {PRESENT, SLIPS} or not fits:
        raise SordinoError("offers: the message must hold who made one, and the slips of this site's neighbours.")
    present = [name for name, mark in zip(names, marks, strict=False) if mark]
    return present, np.frombuffer(slips, np.uint8).reshape(-1, sparse.SLIP)
