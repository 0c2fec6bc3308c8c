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

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from sordino.errors import SordinoError, WrongShareError
from sordino.secagg import shamir
from sordino.secagg.derive import UInt32Array, add_stream, agree, derive, joined, public
from sordino.secagg.messages import (
    BOX,
    DIMENSION,
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
from sordino.secagg.session import Member, Session

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
    return write_offer(member, round, Offer(ephemeral, committed, _boxes(member, round, ephemeral + committed, pairs)))


def _boxes(member: Member, round: int, offered: bytes, shares: Mapping[str, tuple[int, int]]) -> NDArray[np.uint8]:
    """The encrypted shares, one row per receiver."""
    session, boxes = member.session, bytearray()
    for name, pair in shares.items():
        common = agree(member.identity.box_key, bytes.fromhex(session.roster.card(name).box))
        cipher, nonce, about = _box(session, round, common, member.name, name, offered)
        boxes += cipher.encrypt(nonce, b"".join(share.to_bytes(shamir.SIZE, "little") for share in pair), about)
    return np.frombuffer(bytes(boxes), np.uint8).reshape(len(shares), BOX)


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
    session, verified = member.session, check(member, round, offers)
    check_vector(vector)
    total = vector.copy()
    add_stream(total, _self_key(session, round, member.name, member.seed(round)), 1)
    for peer, theirs in verified.items():
        if peer != member.name:
            key, sign = _pair(session, round, member.name, peer, member.ephemeral(round), theirs.public)
            add_stream(total, key, sign)
    return total


def check_vector(vector: UInt32Array) -> None:
    """Raise SordinoError unless the vector can be masked."""
    if not isinstance(vector, np.ndarray) or vector.dtype != np.uint32 or vector.ndim != 1:
        raise SordinoError("vector: it must be an array of uint32 with one axis.")
    if not 1 <= vector.size <= DIMENSION:
        raise SordinoError(f"vector: {vector.size:,} numbers; 1 to {DIMENSION:,} can be masked.")


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
    _alive(member, round, _verified(member, round, offers), survivors, before)
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
    alive = _alive(member, round, verified, survivors, before)
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
        seed = _recover(
            session,
            session.threshold,
            f"the seed of '{name}'",
            shares,
            partial(_is_seed, session, round, name, verified[name].commitment),
        )
        add_stream(total, _self_key(session, round, name, seed), -1)
    for dropped in verified.keys() - vectors.keys():
        shares = {by: each.keys[dropped] for by, each in revealed.items()}
        right = partial(_is_key, verified[dropped].public)
        key = _recover(session, session.threshold, f"the key of '{dropped}'", shares, right)
        for name in vectors:
            pair, sign = _pair(session, round, dropped, name, key, verified[name].public)
            add_stream(total, pair, sign)  # its own sign: the opposite of the one that the survivor used
    return total


def _is_seed(session: Session, round: int, name: str, committed: bytes, seed: bytes) -> bool:
    return commitment(session, round, name, seed) == committed


def _is_key(offered: bytes, key: bytes) -> bool:
    return public(key) == offered  # up to the bits that X25519 sets itself


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


def _alive(
    member: Member, round: int, verified: Mapping[str, Offer], survivors: Sequence[str], before: Sequence[str] | None
) -> set[str]:
    """The survivors, after checking the list."""
    alive = {name for name in survivors if isinstance(name, str)}
    if len(alive) != len(survivors) or not alive <= set(verified):
        raise SordinoError("survivors: each must have sent an offer and be named once.")
    if member.name not in alive:
        raise SordinoError(
            f"survivors: '{member.name}' is not among them; it does not open a sum without its own vector."
        )
    if len(alive) < member.session.threshold:
        raise SordinoError(
            f"survivors: {len(alive)} are too few, {member.session.threshold} are needed; the round is lost, start the "
            "next."
        )
    if before is not None and set(before) != alive:
        raise SordinoError(
            f"survivors: '{member.name}' agreed to other survivors in round {round} before; show that list again, "
            "because a second one would open single vectors."
        )
    return alive


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


def _box(
    session: Session, round: int, common: bytes, sender: str, receiver: str, offered: bytes
) -> tuple[ChaCha20Poly1305, bytes, bytes]:
    """Cipher, nonce and associated data of one box.

    There is no randomness, so a box encrypted twice is the same. A key and nonce never encrypt two texts: both are
    derived for one run, plan, round, sender, receiver and offered key, and the secret of that key determines the text.
    A site that lost its secret and drew another one offers another key.
    """
    about = joined("box", session.context, round, sender, receiver)
    both = derive(common, about, salt=offered, size=32 + 12)
    return ChaCha20Poly1305(both[:32]), both[32:], about


def _shares(member: Member, round: int, dealer: str, theirs: Offer) -> tuple[int, int]:
    """This site's shares of a dealer's ephemeral key and seed."""
    session = member.session
    if dealer == member.name:
        return member.shares(round)[member.position]
    box = theirs.box(session.roster.position(dealer), member.position)
    return _unboxed(member, round, dealer, theirs.public + theirs.commitment, box)


def _unboxed(member: Member, round: int, dealer: str, offered: bytes, box: bytes) -> tuple[int, int]:
    """The shares in a dealer's box."""
    session, card = member.session, member.session.roster.card(dealer)
    common = agree(member.identity.box_key, bytes.fromhex(card.box))
    cipher, nonce, about = _box(session, round, common, dealer, member.name, offered)
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


def _self_key(session: Session, round: int, name: str, seed: bytes) -> bytes:
    return derive(seed, "self mask", session.context, round, name)


def _pair(session: Session, round: int, site: str, peer: str, private: bytes, theirs: bytes) -> tuple[bytes, int]:
    """The key of a pair's mask, equal for both, and the sign for `site`: + for the earlier site in the roster."""
    first, second = sorted((site, peer), key=session.roster.position)
    key = derive(agree(private, theirs), "pair mask", session.context, round, first, second)
    return key, 1 if site == first else -1
