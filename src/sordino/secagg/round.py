"""One round of secure aggregation: sites mask their vectors so that the masks cancel only in the sum.

    site     offer      a fresh public key, and for every peer an encrypted share of its private key and of a seed
    site     masked     vector + PRG(seed) ± PRG(shared key of two sites), for every peer with an offer
    site     confirm    a signature over the survivors, those whose masked vectors the server has
    site     reveal     for each survivor a share of its seed, for each dropped site a share of its key
    server   open_sum   subtracts the streams of the seeds, and the masks between survivors and dropped sites

An offer may travel with the reply of the previous round, so a round takes three exchanges. What a site sends depends
on its secret, the round and the messages it received: after a crash it sends the same again. Before it sends them, the
site must store the bytes of `masked` and the survivors of `confirm` or `reveal`, because two of either in one round
reveal too much: two vectors under one mask give their difference, and two lists of survivors give both kinds of shares.
For the same reason a failed round is not repeated: the next round has other keys.

A server that tells sites of different survivors opens nothing. A site reveals only if `threshold` survivors confirmed
its list, an honest site confirms one list per round, and 2 * threshold exceeds the number of sites and colluders
(`Session.of`): two lists never get enough confirmations. So the sum that opens has at least `threshold` vectors, and
all of its sites were shown the same offers and the same request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sordino.errors import SordinoError
from sordino.secagg.boxes import decrypt_shares, encrypt_shares
from sordino.secagg.derive import UInt32Array, public
from sordino.secagg.masking import add_masks, remove_pair_masks, remove_self_mask
from sordino.secagg.messages import (
    Masked,
    Offer,
    Reveal,
    check_seal,
    commitment,
    confirms,
    read_masked,
    read_offer,
    read_reveal,
    shown_sha256,
    write_confirmation,
    write_masked,
    write_offer,
    write_reveal,
)
from sordino.secagg.session import Member, Session, check_survivors

# ------------------------------------------------------------------------------------------------------- at the sites


def offer(member: Member, round: int) -> bytes:
    """The first message of a round: a fresh public key, and encrypted shares for every peer.

    Args:
      member: the site.
      round: the number of the round.

    Returns:
      The signed message.
    """
    session, shares = member.session, member.shares(round)
    ephemeral = public(member.ephemeral(round))
    committed = commitment(session, round, member.name, member.seed(round))
    pairs = {card.name: pair for card, pair in zip(session.roster.sites, shares, strict=True)}
    del pairs[member.name]
    return write_offer(
        member, round, Offer(ephemeral, committed, encrypt_shares(member, round, ephemeral + committed, pairs))
    )


def check(member: Member, round: int, offers: Mapping[str, bytes]) -> dict[str, Offer]:
    """Check that every offer is complete and holds shares that this site can decrypt, and so reveal later.

    Args:
      member: the site.
      round: the number of the round.
      offers: the offers of all sites, by name.

    Returns:
      The verified offers.

    Raises:
      SordinoError: an offer is invalid, or there are too few.
    """
    verified = _verified(member, round, offers)
    for peer in verified:
        _shares(member, round, peer, verified[peer])
    return verified


def mask(member: Member, round: int, offers: Mapping[str, bytes], vector: UInt32Array) -> UInt32Array:
    """The masked vector, modulo 2^32.

    Use `masked` unless the message is written elsewhere: a second vector under the same masks would reveal the
    difference of both.

    Args:
      member: the site.
      round: the number of the round.
      offers: the offers of all sites, by name.
      vector: the site's vector.

    Returns:
      The vector plus the self-mask and one mask per peer.

    Raises:
      SordinoError: an offer or the vector is invalid.
    """
    verified = check(member, round, offers)
    peers = {name: theirs.public for name, theirs in verified.items() if name != member.name}
    return add_masks(member, round, vector, peers)


def masked(
    member: Member,
    round: int,
    offers: Mapping[str, bytes],
    vector: UInt32Array,
    before: bytes | None = None,
    request: str = "",
) -> bytes:
    """The message with the masked vector.

    Args:
      member: the site.
      round: the number of the round.
      offers: the offers of all sites, by name.
      vector: the site's vector.
      before: the message that this site stored in this round, if any. The result is then the same bytes.
      request: a hash of the request that the vector answers. All sites of a sum must answer the same one.

    Returns:
      The signed message.

    Raises:
      SordinoError: an offer or the vector is invalid, or the message would differ from `before`.
    """
    hidden = mask(member, round, offers, vector)
    message = write_masked(member, round, shown_sha256(offers, request), hidden)
    if before is not None and before != message:
        raise SordinoError(
            f"round: '{member.name}' masked another vector, or with other offers, in round {round} before; send "
            "those bytes again, because two vectors under one mask reveal their difference."
        )
    return message


def seals(session: Session, round: int, masked: Mapping[str, bytes]) -> dict[str, str]:
    """The survivors' signatures over what they were shown, for the server to pass on.

    Args:
      session: the session.
      round: the number of the round.
      masked: the masked messages of the survivors, by name.

    Returns:
      The signatures as hex, by name.

    Raises:
      SordinoError: a message is invalid.
    """
    return {name: read_masked(session, round, name, data).seal for name, data in masked.items()}


def confirm(
    member: Member,
    round: int,
    offers: Mapping[str, bytes],
    survivors: Sequence[str],
    seals: Mapping[str, str],
    before: Sequence[str] | None = None,
    request: str = "",
) -> str:
    """This site's signature over the list of survivors.

    Args:
      member: the site.
      round: the number of the round.
      offers: the offers of all sites, by name.
      survivors: the sites whose masked vectors the server has.
      seals: the signatures of `seals`. They prove that all survivors were shown the same offers and the same request;
        a server that shows them different ones could otherwise isolate one.
      before: the survivors that this site confirmed or revealed for in this round before, if any.
      request: a hash of the request that this site answered.

    Returns:
      The signature as hex.

    Raises:
      SordinoError: the survivors are too few or do not fit the offers, a seal is wrong, or the list differs from
        `before`.
    """
    check_survivors(member, round, _verified(member, round, offers), survivors, before)
    shown = shown_sha256(offers, request)
    for name in sorted(survivors):
        check_seal(member.session, round, name, shown, seals.get(name))
    return write_confirmation(member, round, shown, survivors)


def reveal(
    member: Member,
    round: int,
    offers: Mapping[str, bytes],
    survivors: Sequence[str],
    confirmations: Mapping[str, str],
    before: Sequence[str] | None = None,
    request: str = "",
) -> bytes:
    """One share for each peer in `offers`: of its seed if it survived, otherwise of its key.

    Args:
      member: the site.
      round: the number of the round.
      offers: the offers of all sites, by name.
      survivors: the sites whose masked vectors the server has.
      confirmations: the survivors' signatures of `confirm` over the same list, at least as many as the threshold.
      before: the survivors that this site confirmed or revealed for in this round before, if any. Another list is
        refused, because it would give both kinds of shares of one peer.
      request: a hash of the request that this site answered.

    Returns:
      The signed message.

    Raises:
      SordinoError: the survivors are too few or do not fit the offers, too few of them confirmed the list, or the list
        differs from `before`.
    """
    session, verified = member.session, _verified(member, round, offers)
    alive = check_survivors(member, round, verified, survivors, before)
    seeds, keys = dict[str, int](), dict[str, int]()
    for name, theirs in verified.items():
        key, seed = _shares(member, round, name, theirs)
        if name in alive:
            seeds[name] = seed
        else:
            keys[name] = key
    shown = shown_sha256(offers, request)
    agreed = [name for name in alive if confirms(session, round, name, shown, alive, confirmations.get(name))]
    if len(agreed) < session.threshold:
        raise SordinoError(
            f"confirmations: {len(agreed)} sites confirmed this list of survivors, {session.threshold} are needed; the "
            "server must show all sites the same list, and otherwise start a new round."
        )
    return write_reveal(member, round, Reveal(shown, seeds, keys))


# ------------------------------------------------------------------------------------------------------ at the server


def open_sum(
    session: Session,
    round: int,
    offers: Mapping[str, bytes],
    masked: Mapping[str, bytes],
    reveals: Mapping[str, bytes],
    request: str = "",
) -> UInt32Array:
    """The sum of the survivors' vectors modulo 2^32. The survivors are the sites in `masked`.

    Each reconstructed secret is compared with its offer, so a wrong share cannot change the sum unnoticed.

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
    verified, digest = _offers(session, round, offers), shown_sha256(offers, request)
    _enough(session, "masked", masked, verified)
    _enough(session, "reveals", reveals, masked)
    vectors = {name: read_masked(session, round, name, masked[name]) for name in _sorted(session, masked)}
    _agree(vectors, digest)
    revealed = {name: read_reveal(session, round, name, reveals[name]) for name in _sorted(session, reveals)}
    for name, each in revealed.items():
        if each.shown_sha256 != digest:
            raise SordinoError(f"reveal of '{name}': it is for other offers, or another request; leave it out.")
        if each.seeds.keys() != vectors.keys() or each.keys.keys() != verified.keys() - vectors.keys():
            raise SordinoError(f"reveal of '{name}': it is for other survivors; leave it out.")

    total = np.zeros_like(next(iter(vectors.values())).vector)
    for name, sent in vectors.items():
        np.add(total, sent.vector, out=total)
        shares = {by: each.seeds[name] for by, each in revealed.items()}
        remove_self_mask(total, session, round, name, verified[name].commitment, session.threshold, shares)
    peers = {name: verified[name].public for name in vectors}
    for dropped in verified.keys() - vectors.keys():
        shares, offered = {by: each.keys[dropped] for by, each in revealed.items()}, verified[dropped].public
        remove_pair_masks(total, session, round, dropped, offered, session.threshold, shares, peers)
    return total


# -------------------------------------------------------------------------------------------------------------- parts


def _offers(session: Session, round: int, offers: Mapping[str, bytes]) -> dict[str, Offer]:
    """The verified offers, in the roster's order."""
    _enough(session, "offers", offers, session.roster.names)
    return {name: read_offer(session, round, name, offers[name]) for name in _sorted(session, offers)}


def _verified(member: Member, round: int, offers: Mapping[str, bytes]) -> dict[str, Offer]:
    """The verified offers. This site's offer must be unchanged."""
    if offers.get(member.name) != offer(member, round):
        raise SordinoError(f"offer of '{member.name}': it is missing or changed; the server must show it unchanged.")
    return _offers(member.session, round, offers)


def _enough(
    session: Session, what: str, messages: Mapping[str, bytes], expected: Sequence[str] | Mapping[str, object]
) -> None:
    """Check that all senders are expected and that there are enough of them."""
    for name in messages:
        if name not in expected:
            session.roster.position(name)
            raise SordinoError(f"{what}: '{name}' took no part in the previous step; leave it out.")
    if len(messages) < session.threshold:
        raise SordinoError(
            f"{what}: there are {len(messages)}, but {session.threshold} are needed; wait, or start the next round."
        )


def _sorted(session: Session, names: Mapping[str, object]) -> list[str]:
    return [name for name in session.roster.names if name in names]


def _agree(vectors: Mapping[str, Masked], digest: str) -> None:
    size = next(iter(vectors.values())).vector.size
    for name, each in vectors.items():
        if each.shown_sha256 != digest:
            raise SordinoError(
                f"masked of '{name}': it is masked with other offers, or for another request; leave it out."
            )
        if each.vector.size != size:
            raise SordinoError(f"masked of '{name}': it has {each.vector.size} numbers, others {size}; leave it out.")


def _shares(member: Member, round: int, dealer: str, theirs: Offer) -> tuple[int, int]:
    """This site's shares of a dealer's ephemeral key and seed."""
    session = member.session
    if dealer == member.name:
        return member.shares(round)[member.position]
    box = theirs.box(session.roster.position(dealer), member.position)
    return decrypt_shares(member, round, dealer, theirs.public + theirs.commitment, box)
