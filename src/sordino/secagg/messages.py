"""The messages of a round, signed: an offer, a masked vector, a confirmation, a reveal.

A confirmation is a signature alone. Each of the others is a wire message whose last array is an Ed25519 signature of
all the bytes before it. Each names its run, plan, roster, threshold, round and sender, so it is valid nowhere else. A
reader returns a message after it has checked every field, or raises SordinoError.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.secagg import shamir
from sordino.secagg.derive import UInt32Array, joined, low_order
from sordino.secagg.session import Member, Session, check_round
from sordino.wire import Message, decode, encode

DIMENSION = 2**28  # numbers of a vector at most: 1 GiB
BOX = 2 * shamir.SIZE + 16  # bytes: two shares, and the tag of ChaCha20-Poly1305

_HEAD = 4096  # bytes that a head needs at most, lists of names apart
_NAME = 64 + 3  # bytes of a name in a list
_HEX = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)


class Offer(NamedTuple):
    """The contents of an offer."""

    public: bytes  # the round's X25519 key
    commitment: bytes  # to the seed of the self-mask
    boxes: NDArray[np.uint8]  # encrypted shares, one row per peer in the roster's order, without the sender

    def box(self, sender: int, receiver: int) -> bytes:
        """The box between two positions in the roster."""
        return bytes(self.boxes[receiver - (receiver > sender)])


class Masked(NamedTuple):
    """The contents of a masked message."""

    vector: UInt32Array
    shown_sha256: str
    seal: str  # a signature over what the site was shown, as hex


class Reveal(NamedTuple):
    """The contents of a reveal."""

    shown_sha256: str
    seeds: dict[str, int]  # shares of survivors' self-mask seeds
    keys: dict[str, int]  # shares of the others' ephemeral keys


def shown_sha256(offers: Mapping[str, bytes], request: str = "") -> str:
    """The hash of what a site was shown in a round: all offers, sorted by name, and the request it answers.

    Args:
      offers: the offers, by name.
      request: a hash of the request, which holds the model; "" where there is none.

    Returns:
      64 hexadecimal digits.
    """
    parts = [part for name in sorted(offers) for part in (name, hashlib.sha256(offers[name]).digest())]
    return hashlib.sha256(joined("shown", request, *parts)).hexdigest()


def commitment(session: Session, round: int, name: str, seed: bytes) -> bytes:
    """A commitment to the seed: it hides the seed, which is 32 random bytes, and binds to it."""
    return hashlib.sha256(joined("seed", session.context, round, name, seed)).digest()


# ----------------------------------------------------------------------------------------------------------- writing


def write_offer(member: Member, round: int, offer: Offer) -> bytes:
    fields = {"public": offer.public.hex(), "commitment": offer.commitment.hex()}
    return _write(member, "secagg-offer", round, fields, {"boxes": offer.boxes})


def write_masked(member: Member, round: int, shown: str, vector: UInt32Array) -> bytes:
    seal = member.identity.sign(_sealed(member.session, round, member.name, shown))
    fields = {"shown_sha256": shown, "dimension": vector.size, "seal": seal.hex()}
    return _write(member, "secagg-masked", round, fields, {"vector": vector})


def write_reveal(member: Member, round: int, reveal: Reveal) -> bytes:
    fields = {"shown_sha256": reveal.shown_sha256, "survivors": list(reveal.seeds), "dropped": list(reveal.keys)}
    arrays = {"seeds": _rows(list(reveal.seeds.values())), "keys": _rows(list(reveal.keys.values()))}
    return _write(member, "secagg-reveal", round, fields, arrays)


# ----------------------------------------------------------------------------------------------------------- reading


def read_offer(session: Session, round: int, sender: str, data: bytes) -> Offer:
    """Read and check an offer.

    Args:
      session: the session.
      round: the number of the round.
      sender: the site that sent it.
      data: the message.

    Returns:
      Its contents.

    Raises:
      SordinoError: a field or the signature is wrong.
    """
    peers = len(session.roster) - 1
    names = ("public", "commitment"), ("boxes",)
    message, refuse = _read(session, "secagg-offer", round, sender, data, _HEAD, BOX * peers, *names)
    public, committed = (_hex(message, key, 32, refuse) for key in names[0])
    boxes = _array(message, "boxes", np.uint8, (peers, BOX), refuse)
    if low_order(public):
        raise refuse("its key is of low order, and would make its masks public")
    _verify(session, sender, data, refuse)
    return Offer(public, committed, boxes)


def read_masked(session: Session, round: int, sender: str, data: bytes, dimension: int | None = None) -> Masked:
    """Read and check a masked message.

    Args:
      session: the session.
      round: the number of the round.
      sender: the site that sent it.
      data: the message.
      dimension: the length of the vector, if known. Longer messages are then not decoded.

    Returns:
      Its contents.

    Raises:
      SordinoError: a field or a signature is wrong.
    """
    most = 4 * (DIMENSION if dimension is None else dimension)
    names = ("shown_sha256", "dimension", "seal"), ("vector",)
    message, refuse = _read(session, "secagg-masked", round, sender, data, _HEAD, most, *names)
    offers, seal = (_hex(message, key, size, refuse).hex() for key, size in (("shown_sha256", 32), ("seal", 64)))
    size = message.fields["dimension"]
    if type(size) is not int or not 1 <= size <= DIMENSION or (dimension is not None and size != dimension):
        raise refuse("its dimension is another" if dimension is not None else "its dimension is out of bounds")
    vector = _array(message, "vector", np.uint32, (size,), refuse)
    _verify(session, sender, data, refuse)
    check_seal(session, round, sender, offers, seal)
    return Masked(vector, offers, seal)


def read_reveal(session: Session, round: int, sender: str, data: bytes) -> Reveal:
    """Read and check a reveal.

    Args:
      session: the session.
      round: the number of the round.
      sender: the site that sent it.
      data: the message.

    Returns:
      Its contents.

    Raises:
      SordinoError: a field or the signature is wrong.
    """
    sites = len(session.roster)
    names = ("shown_sha256", "survivors", "dropped"), ("seeds", "keys")
    head, body = _HEAD + _NAME * sites, shamir.SIZE * sites
    message, refuse = _read(session, "secagg-reveal", round, sender, data, head, body, *names)
    offers = _hex(message, "shown_sha256", 32, refuse).hex()
    shares, listed = list[dict[str, int]](), list[str]()
    for field, array in zip(names[0][1:], names[1], strict=True):
        site_names = message.fields[field]
        valid = isinstance(site_names, list) and len(site_names) <= sites
        if not valid or not all(isinstance(name, str) for name in site_names):
            raise refuse(f"its {field} are not a list of names")
        values = _values(message, array, len(site_names), refuse)
        shares.append(dict(zip(site_names, values, strict=True)))
        listed += site_names
    if not set(listed) <= set(session.roster.names):
        raise refuse("it names sites that are not in the roster")
    if len(set(listed)) != len(listed):
        raise refuse("it names a site twice: of each, one kind of share may be revealed")
    _verify(session, sender, data, refuse)
    return Reveal(offers, *shares)


def check_seal(session: Session, round: int, sender: str, shown: str, seal: object) -> None:
    """Check the sender's signature that it was shown the same."""
    if not _signed_by(session, sender, seal, _sealed(session, round, sender, shown)):
        raise SordinoError(
            f"seal of '{sender}': it did not sign that it masked with the same offers, for the same request; the "
            "server must show all sites the same, and otherwise start a new round."
        )


def write_confirmation(member: Member, round: int, shown: str, survivors: Iterable[str]) -> str:
    """The signature of a site that agrees on the survivors of a round, as hex."""
    return member.identity.sign(_confirmed(member.session, round, member.name, shown, survivors)).hex()


def confirms(
    session: Session, round: int, sender: str, shown: str, survivors: Iterable[str], confirmation: object
) -> bool:
    """Whether a site has signed that it was shown the same and that these are the survivors."""
    session.roster.position(sender)
    return _signed_by(session, sender, confirmation, _confirmed(session, round, sender, shown, survivors))


# ------------------------------------------------------------------------------------------------- along a graph


class SparseOffer(NamedTuple):
    """The contents of an offer to neighbours."""

    public: bytes
    commitment: bytes
    signature: bytes  # over the two above: neighbours see no boxes but their own
    boxes: NDArray[np.uint8]  # encrypted shares, one row per neighbour in the roster's order


class SparseReveal(NamedTuple):
    """The contents of a reveal to neighbours: shares in the roster's order."""

    shown_sha256: str
    seeds: list[int]  # of the neighbours that survived
    keys: list[int]  # of the other neighbours with an offer


def shown_present(present: Iterable[str], request: str = "") -> str:
    """The hash of what a site was shown where masks are shared along a graph: who made an offer, and the request.

    An honest site makes one offer per round, and signs it. So sites that agree on who made an offer agree on the offers
    of all honest sites.
    """
    return hashlib.sha256(joined("shown along a graph", request, *sorted(present))).hexdigest()


def slip_signature(member: Member, round: int, public: bytes, committed: bytes) -> bytes:
    """The signature over an offer without its boxes, which are authenticated each by its own key."""
    return member.identity.sign(_slip(member.session, round, member.name, public, committed))


def check_slip(session: Session, round: int, sender: str, public: bytes, committed: bytes, signature: bytes) -> None:
    """Check a neighbour's signature over its key and its commitment.

    Raises:
      SordinoError: it is not signed, or the key is of low order.
    """
    if low_order(public):
        raise SordinoError(f"offer of '{sender}': its key is of low order, and would make its masks public.")
    if not _signed_by(session, sender, signature.hex(), _slip(session, round, sender, public, committed)):
        raise SordinoError(
            f"offer of '{sender}': its signature is not by the key in the roster; do not trust whoever carried it."
        )


def write_sparse_offer(member: Member, round: int, offer: SparseOffer) -> bytes:
    fields = {key: getattr(offer, key).hex() for key in ("public", "commitment", "signature")}
    return _write(member, "secagg-sparse-offer", round, fields, {"boxes": offer.boxes})


def read_sparse_offer(session: Session, round: int, sender: str, data: bytes) -> SparseOffer:
    """Read and check an offer to neighbours.

    Raises:
      SordinoError: a field or a signature is wrong.
    """
    peers = int(session.adjacency[session.roster.position(sender)].sum())
    names = ("public", "commitment", "signature"), ("boxes",)
    message, refuse = _read(session, "secagg-sparse-offer", round, sender, data, _HEAD, BOX * peers, *names)
    sizes = zip(names[0], (32, 32, 64), strict=True)
    public, committed, signature = (_hex(message, key, size, refuse) for key, size in sizes)
    boxes = _array(message, "boxes", np.uint8, (peers, BOX), refuse)
    _verify(session, sender, data, refuse)
    check_slip(session, round, sender, public, committed, signature)
    return SparseOffer(public, committed, signature, boxes)


def write_sparse_reveal(member: Member, round: int, reveal: SparseReveal) -> bytes:
    arrays = {"seeds": _rows(reveal.seeds), "keys": _rows(reveal.keys)}
    return _write(member, "secagg-sparse-reveal", round, {"shown_sha256": reveal.shown_sha256}, arrays)


def read_sparse_reveal(session: Session, round: int, sender: str, data: bytes, counts: tuple[int, int]) -> SparseReveal:
    """Read and check a reveal to neighbours, of so many seeds and keys.

    Raises:
      SordinoError: a field or the signature is wrong.
    """
    names = ("shown_sha256",), ("seeds", "keys")
    message, refuse = _read(
        session, "secagg-sparse-reveal", round, sender, data, _HEAD, shamir.SIZE * sum(counts), *names
    )
    shares = [_values(message, array, count, refuse) for array, count in zip(names[1], counts, strict=True)]
    _verify(session, sender, data, refuse)
    return SparseReveal(_hex(message, "shown_sha256", 32, refuse).hex(), *shares)


# ------------------------------------------------------------------------------------------------------------- parts


class _Refuse(NamedTuple):
    kind: str
    sender: str

    def __call__(self, why: str) -> SordinoError:
        return SordinoError(
            f"{self.kind} of '{self.sender}': {why}. Ask it to send the message again; if it sent another message, "
            "do not trust whoever carried it."
        )


def _common(session: Session, round: int, sender: str) -> dict[str, str | int]:
    return {
        "run": session.run,
        "plan": session.plan,
        "roster": session.roster.sha256(),
        "threshold": session.threshold,
        "round": round,
        "sender": sender,
    }


def _write(member: Member, kind: str, round: int, fields: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    check_round(round)
    common = _common(member.session, round, member.name)
    body = encode(kind, {**common, **fields}, {**arrays, "signature": np.zeros(64, np.uint8)})[:-64]
    return body + member.identity.sign(_signed(body))


def _read(
    session: Session,
    kind: str,
    round: int,
    sender: str,
    data: bytes,
    head: int,
    body: int,
    fields: Sequence[str],
    arrays: Sequence[str],
) -> tuple[Message, _Refuse]:
    """Check everything except the signature and the fields of each kind. A head of a few kilobytes is cheap to read."""
    check_round(round)
    session.roster.position(sender)
    refuse = _Refuse(kind.removeprefix("secagg-"), sender)
    if not isinstance(data, bytes):
        raise refuse("it is not bytes")
    if int.from_bytes(data[4:8], "little") > head:
        raise refuse(f"its head is longer than the {head:,} bytes that it needs at most")
    try:
        message = decode(data, 8 + head + body + 64)
    except ValueError as error:  # a WireError, or an error of numpy about an impossible shape
        raise refuse(str(error).removeprefix("message: ").rstrip(".")) from None
    common = _common(session, round, sender)
    if message.kind != kind or message.fields.keys() != {*common, *fields}:
        raise refuse("it is of another kind")
    if list(message.arrays) != [*arrays, "signature"]:
        raise refuse("its arrays are others")
    _array(message, "signature", np.uint8, (64,), refuse)
    for name, expected in common.items():
        if type(message.fields[name]) is not type(expected) or message.fields[name] != expected:
            raise refuse(f"its {name} is another")
    return message, refuse


def _verify(session: Session, sender: str, data: bytes, refuse: _Refuse) -> None:
    try:
        _key(session, sender).verify(data[-64:], _signed(data[:-64]))
    except InvalidSignature:
        raise refuse("its signature is not by the key in the roster") from None


def _key(session: Session, sender: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(session.roster.card(sender).sign))


def _signed(body: bytes) -> bytes:
    return joined("sordino secagg message") + body


def _sealed(session: Session, round: int, sender: str, shown: str) -> bytes:
    return joined("sordino secagg seal", session.context, round, sender, shown)


def _slip(session: Session, round: int, sender: str, public: bytes, committed: bytes) -> bytes:
    return joined("sordino secagg slip", session.context, round, sender, public, committed)


def _confirmed(session: Session, round: int, sender: str, shown: str, survivors: Iterable[str]) -> bytes:
    return joined("sordino secagg confirmation", session.context, round, sender, shown, *sorted(survivors))


def _signed_by(session: Session, sender: str, signature: object, text: bytes) -> bool:
    whole = isinstance(signature, str) and len(signature) == 128 and _HEX.fullmatch(signature)
    try:
        _key(session, sender).verify(bytes.fromhex(str(signature)) if whole else b"", text)
    except InvalidSignature:
        return False
    return True


def _hex(message: Message, field: str, size: int, refuse: _Refuse) -> bytes:
    value = message.fields[field]
    if not isinstance(value, str) or len(value) != 2 * size or not _HEX.fullmatch(value):
        raise refuse(f"its {field} is not {2 * size} hexadecimal digits")
    return bytes.fromhex(value)


def _array(message: Message, name: str, dtype: Any, shape: tuple[int, ...], refuse: _Refuse) -> NDArray[Any]:
    array = message.arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise refuse(f"its {name} have another type or shape")
    return array


def _rows(values: Sequence[int]) -> NDArray[np.uint8]:
    data = b"".join(value.to_bytes(shamir.SIZE, "little") for value in values)
    return np.frombuffer(data, np.uint8).reshape(len(values), shamir.SIZE)


def _values(message: Message, name: str, count: int, refuse: _Refuse) -> list[int]:
    """The shares that `_rows` wrote."""
    rows = _array(message, name, np.uint8, (count, shamir.SIZE), refuse)
    values = [int.from_bytes(row.tobytes(), "little") for row in rows]
    if not all(value < shamir.PRIME for value in values):
        raise refuse(f"its {name} are not shares")
    return values
