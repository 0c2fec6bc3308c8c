"""A round along a graph of masks, for more sites than can share masks with all others (see `graph`).

    site     offer      a fresh public key, and for every neighbour an encrypted share of its private key and of a seed
    server   slips      for each site what it needs of its neighbours' offers: key, commitment, signature and its box
    site     masked     vector + PRG(seed) ± PRG(shared key), for every neighbour with an offer
    server   survivors  those with a masked vector, less sites with too few neighbours among them
    site     confirm    a member of the committee signs the list of survivors
    site     reveal     for each neighbour that survived a share of its seed, for each other one a share of its key
    server   open_sum   subtracts the streams of the seeds, and the masks between survivors and dropped sites

It differs from `round` in this: a site sees only its neighbours' offers; what it signs with its vector is who made an
offer, and the request; a committee confirms the survivors; and every survivor must have `shares` neighbours among the
survivors. A site reveals nothing about a list without that, nor if a surviving neighbour was shown anything else.

What a server with `near` colluders near every honest site learns of the honest survivors' vectors is their sum, or
nothing. The list is unique (2 quorum > committee + its colluders), so of every honest site it gets `shares` shares of
one kind, and of the other kind only the colluders' `near` < `shares`. The key of an honest survivor stays hidden, and
so does its mask with every honest neighbour that survived. Those neighbours, if its seed opens, were shown the same, so
they added the same mask. Along a connected graph such masks leave only the sum (tests/secagg/test_sparse.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.privacy.mechanisms.mask_graph import Parameters
from sordino.secagg import graph
from sordino.secagg.boxes import decrypt_shares, encrypt_shares
from sordino.secagg.derive import UInt32Array, public
from sordino.secagg.masking import add_masks, remove_pair_masks, remove_self_mask
from sordino.secagg.messages import (
    BOX,
    SparseOffer,
    SparseReveal,
    check_seal,
    check_slip,
    commitment,
    confirms,
    read_masked,
    read_sparse_offer,
    read_sparse_reveal,
    shown_present,
    slip_signature,
    write_confirmation,
    write_masked,
    write_sparse_offer,
    write_sparse_reveal,
)
from sordino.secagg.session import Member, Session, check_listed, check_survivors

SLIP = 32 + 32 + 64 + BOX  # bytes of a neighbour's offer as one site sees it


def offer(member: Member, round: int) -> bytes:
    """The first message of a round: a fresh public key, and encrypted shares for every neighbour."""
    ephemeral, committed = _own(member, round)
    signature = slip_signature(member, round, ephemeral, committed)
    boxes = encrypt_shares(member, round, ephemeral + committed, member.neighbours_shares(round))
    return write_sparse_offer(member, round, SparseOffer(ephemeral, committed, signature, boxes))


def slips(session: Session, round: int, offers: Mapping[str, SparseOffer], receiver: str) -> NDArray[np.uint8]:
    """What a site is shown of its neighbours' offers: one row per neighbour with an offer, in the roster's order."""
    position, graph = session.roster.position(receiver), session.adjacency
    rows = bytearray()
    names = [name for name in session.neighbours(receiver) if name in offers]
    for name in names:
        offered = offers[name]
        number = int(graph[session.roster.position(name), :position].sum())  # of the receiver among its neighbours
        rows += offered.public + offered.commitment + offered.signature + offered.boxes[number].tobytes()
    return np.frombuffer(bytes(rows), np.uint8).reshape(len(names), SLIP)


def check(
    member: Member, round: int, present: Sequence[str], shown: NDArray[np.uint8]
) -> dict[str, tuple[bytes, tuple[int, int]]]:
    """Check what this site is shown: who made an offer, and its neighbours' slips.

    Args:
      member: the site.
      round: the number of the round.
      present: the sites that made an offer.
      shown: the rows of `slips`.

    Returns:
      Of every neighbour with an offer, its public key and this site's shares of its key and its seed.

    Raises:
      SordinoError: there are too few offers, or one is invalid.
    """
    session = member.session
    there = check_listed(member, "offers", present)
    _check_neighbours(session, "offers", there)
    names = [name for name in session.neighbours(member.name) if name in there]
    if shown.dtype != np.uint8 or shown.shape != (len(names), SLIP):
        raise SordinoError(f"offers: {len(names)} neighbours of '{member.name}' made one; the server must show those.")
    for name, row in zip(names, shown, strict=True):
        data = row.tobytes()
        check_slip(session, round, name, data[:32], data[32:64], data[64:128])
    return _opened(member, round, names, shown)


def masked(
    member: Member,
    round: int,
    present: Sequence[str],
    shown: NDArray[np.uint8],
    vector: UInt32Array,
    request: str = "",
) -> bytes:
    """The message with the masked vector. Store it before it is sent: a second vector under its masks reveals both.

    Args:
      member: the site.
      round: the number of the round.
      present: the sites that made an offer.
      shown: the rows of `slips`.
      vector: the site's vector.
      request: a hash of the request that the vector answers.

    Returns:
      The signed message.

    Raises:
      SordinoError: an offer or the vector is invalid.
    """
    known = check(member, round, present, shown)
    hidden = add_masks(member, round, vector, {peer: theirs for peer, (theirs, _) in known.items()})
    return write_masked(member, round, shown_present(present, request), hidden)


def survivors(session: Session, names: Iterable[str]) -> list[str]:
    """The largest list of survivors that sites accept, of those with masked vectors; it may be too short."""
    there = _marked(session, names)
    part = graph.core(session.adjacency, there, _parameters(session).shares)
    return [session.roster.names[i] for i in np.flatnonzero(part)]


def confirm(
    member: Member,
    round: int,
    present: Sequence[str],
    survivors: Sequence[str],
    before: Sequence[str] | None = None,
    request: str = "",
) -> str:
    """The signature of a member of the committee over the survivors. Store the list before it is sent.

    Args:
      member: the site.
      round: the number of the round.
      present: the sites that made an offer, as this site was shown.
      survivors: the sites whose masked vectors the server has.
      before: the survivors that this site confirmed or revealed for in this round before, if any.
      request: a hash of the request that this site answered.

    Returns:
      The signature as hex.

    Raises:
      SordinoError: the list does not keep to the rules, or differs from `before`.
    """
    if member.name not in member.session.committee:
        raise SordinoError(f"confirm: '{member.name}' is not in this run's committee; ask those who are.")
    _check_survivors(member, round, present, survivors, before)
    return write_confirmation(member, round, shown_present(present, request), survivors)


def reveal(
    member: Member,
    round: int,
    present: Sequence[str],
    shown: NDArray[np.uint8],
    survivors: Sequence[str],
    seals: Mapping[str, str],
    confirmations: Mapping[str, str],
    before: Sequence[str] | None = None,
    request: str = "",
) -> bytes:
    """One share for each neighbour with an offer: of its seed if it survived, otherwise of its key.

    Args:
      member: the site.
      round: the number of the round.
      present: the sites that made an offer, as this site was shown.
      shown: the rows of `slips` that `masked` accepted; this site stored them.
      survivors: the sites whose masked vectors the server has.
      seals: the surviving neighbours' signatures over what they were shown.
      confirmations: the committee's signatures over the same list.
      before: the survivors that this site confirmed or revealed for in this round before, if any.
      request: a hash of the request that this site answered.

    Returns:
      The signed message.

    Raises:
      SordinoError: the list does not keep to the rules or differs from `before`, a neighbour was shown something else,
        or too few of the committee confirmed the list.
    """
    session, there = member.session, set(present)
    names = [name for name in session.neighbours(member.name) if name in there]
    known = _opened(member, round, names, shown)
    alive = _check_survivors(member, round, present, survivors, before)
    digest = shown_present(present, request)
    for name in known.keys() & alive:
        check_seal(session, round, name, digest, seals.get(name))
    agreed = sum(
        confirms(session, round, name, digest, survivors, confirmations[name])
        for name in sorted(session.committee & alive)
        if name in confirmations
    )
    if agreed < _parameters(session).quorum:
        raise SordinoError(
            f"confirmations: {agreed} of the committee confirmed this list of survivors, "
            f"{_parameters(session).quorum} are needed; the server must show all sites the same list, and otherwise "
            "start a new round."
        )
    seeds = [seed for name, (_, (_, seed)) in known.items() if name in alive]
    keys = [key for name, (_, (key, _)) in known.items() if name not in alive]
    return write_sparse_reveal(member, round, SparseReveal(digest, seeds, keys))


def read_reveal(
    session: Session, round: int, sender: str, data: bytes, present: Iterable[str], survivors: Iterable[str]
) -> SparseReveal:
    """Read a reveal about these offers and survivors.

    Raises:
      SordinoError: it is malformed, not signed, or about others.
    """
    seeds, keys = _dealers(session, sender, set(present), set(survivors))
    return read_sparse_reveal(session, round, sender, data, (len(seeds), len(keys)))


def open_sum(
    session: Session,
    round: int,
    offers: Mapping[str, bytes],
    masked: Mapping[str, bytes],
    reveals: Mapping[str, bytes],
    request: str = "",
) -> UInt32Array:
    """The sum of the survivors' vectors modulo 2^32. The survivors are the sites in `masked`.

    Args:
      session: the session.
      round: the number of the round.
      offers: the offers of all sites, by name.
      masked: the masked messages of the survivors, by name.
      reveals: the reveals, by name.
      request: a hash of the request that the sites answered.

    Returns:
      The sum.

    Raises:
      WrongShareError: the share of one site is wrong; try again without it.
      SordinoError: a message is invalid, or there are too few.
    """
    few, digest = _parameters(session).shares, shown_present(offers, request)
    verified = {name: read_sparse_offer(session, round, name, data) for name, data in offers.items()}
    seeds: dict[str, dict[str, int]] = {name: {} for name in masked}
    keys: dict[str, dict[str, int]] = {name: {} for name in offers.keys() - masked.keys()}
    for by, data in reveals.items():
        told = read_reveal(session, round, by, data, offers, masked)
        if told.shown_sha256 != digest:
            raise SordinoError(f"reveal of '{by}': it is for other offers, or another request; leave it out.")
        of_seeds, of_keys = _dealers(session, by, offers.keys(), masked.keys())
        for name, share in zip(of_seeds, told.seeds, strict=True):
            seeds[name][by] = share
        for name, share in zip(of_keys, told.keys, strict=True):
            keys[name][by] = share

    total: UInt32Array | None = None
    for name, data in masked.items():
        sent = read_masked(session, round, name, data, None if total is None else total.size)
        if sent.shown_sha256 != digest:
            raise SordinoError(f"masked of '{name}': it is for other offers, or another request; leave it out.")
        total = sent.vector.copy() if total is None else np.add(total, sent.vector, out=total)
        remove_self_mask(total, session, round, name, verified[name].commitment, few, seeds[name])
    if total is None:
        raise SordinoError("masked: there are none; the round is lost, start the next.")
    for dropped in sorted(keys):
        peers = {name: verified[name].public for name in session.neighbours(dropped) if name in masked}
        if peers:
            offered = verified[dropped].public
            remove_pair_masks(total, session, round, dropped, offered, few, keys[dropped], peers)
    return total


# -------------------------------------------------------------------------------------------------------------- parts


def _parameters(session: Session) -> Parameters:
    if session.graph is None:
        raise SordinoError(f"session: its {len(session.roster)} sites share masks with all others; use `round`.")
    return session.graph


def _opened(
    member: Member, round: int, names: Sequence[str], shown: NDArray[np.uint8]
) -> dict[str, tuple[bytes, tuple[int, int]]]:
    """The neighbours' public keys, and this site's shares of their keys and seeds."""
    known = {}
    for name, row in zip(names, shown, strict=True):
        data = row.tobytes()
        known[name] = data[:32], decrypt_shares(member, round, name, data[:64], data[128:])
    return known


def _own(member: Member, round: int) -> tuple[bytes, bytes]:
    seed = member.seed(round)
    return public(member.ephemeral(round)), commitment(member.session, round, member.name, seed)


def _marked(session: Session, names: Iterable[str]) -> NDArray[np.bool_]:
    marks = np.zeros(len(session.roster), np.bool_)
    marks[[session.roster.position(name) for name in names]] = True
    return marks


def _check_neighbours(session: Session, what: str, names: Iterable[str]) -> None:
    """The rule for who made an offer and for who survived: each of them has enough neighbours among them."""
    marks, few = _marked(session, names), _parameters(session).shares
    thin = marks & (session.adjacency[:, marks].sum(1) < few)
    if thin.any():
        poor = session.roster.names[int(np.flatnonzero(thin)[0])]
        raise SordinoError(
            f"{what}: '{poor}' has fewer than {few} neighbours among them; the server must leave it out, because "
            "otherwise parts of the sum could be opened."
        )


def _check_survivors(
    member: Member, round: int, present: Sequence[str], survivors: Sequence[str], before: Sequence[str] | None
) -> set[str]:
    alive = check_survivors(member, round, present, survivors, before)
    _check_neighbours(member.session, "survivors", alive)
    return alive


def _dealers(session: Session, by: str, present: Iterable[str], alive: Iterable[str]) -> tuple[list[str], list[str]]:
    """The sites of whose seeds this one reveals shares, and those of whose keys it does, in the roster's order."""
    there, alive = set(present), set(alive)
    neighbours = [name for name in session.neighbours(by) if name in there]
    return [name for name in neighbours if name in alive], [name for name in neighbours if name not in alive]
