"""Messages are read whole and checked, or refused with SordinoError, whatever the bytes."""

import dataclasses
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import SordinoError
from sordino.secagg import read_masked, read_offer, read_reveal, shown_sha256
from sordino.secagg.messages import _signed
from sordino.wire import decode
from tests.support import tiers

READERS = {"offer": read_offer, "masked": read_masked, "reveal": read_reveal}


@pytest.fixture
def sent(party):
    p = party(4, dropouts=1)
    alive = p.names[:3]
    made = {"offer": p.offers(), "masked": p.masked(alive), "reveal": p.reveals(alive)}
    return p, {kind: messages["site-1"] for kind, messages in made.items()}


def parts(data):
    (size,) = struct.unpack("<I", data[4:8])
    return json.loads(data[8 : 8 + size]), data[8 + size : -64]


def forged(member, data, change, body=None):
    """With another head, signed by the site itself: what a site that does not keep to the rules could send."""
    head, rest = parts(data)
    change(head)
    text = json.dumps(head, separators=(",", ":")).encode()
    whole = b"SRD1" + struct.pack("<I", len(text)) + text + (rest if body is None else body)
    return whole + member.identity.sign(_signed(whole))


@pytest.mark.parametrize("kind", READERS)
def test_what_was_sent_is_read(sent, kind):
    p, data = sent
    assert READERS[kind](p.session, 3, "site-1", data[kind])
    assert forged(p.members["site-1"], data[kind], lambda head: None) == data[kind]
    assert decode(data[kind]).kind == f"secagg-{kind}"  # an ordinary message to everyone else


def test_fields_are_those_sent(sent):
    p, data = sent
    assert read_masked(p.session, 3, "site-1", data["masked"], 7).shown_sha256 == shown_sha256(p.offers())
    found = read_reveal(p.session, 3, "site-1", data["reveal"])
    assert (list(found.seeds), list(found.keys)) == (p.names[:3], p.names[3:])
    with pytest.raises(SordinoError, match="dimension"):
        read_masked(p.session, 3, "site-1", data["masked"], 8)
    with pytest.raises(SordinoError, match="the limit is"):
        read_masked(p.session, 3, "site-1", data["masked"] + bytes(5000), 7)


@pytest.mark.parametrize("kind", READERS)
def test_messages_of_elsewhere_are_refused(sent, kind):
    p, data = sent
    read, session = READERS[kind], p.session
    others = {
        "run": dataclasses.replace(session, run="run-2"),
        "plan": dataclasses.replace(session, plan="cd" * 32),
        "threshold": dataclasses.replace(session, threshold=4),
    }
    for field, other in others.items():
        with pytest.raises(SordinoError, match=f"{kind} of 'site-1': its {field} is another"):
            read(other, 3, "site-1", data[kind])
    with pytest.raises(SordinoError, match="of 'site-1': its round is another"):
        read(session, 4, "site-1", data[kind])
    with pytest.raises(SordinoError, match="of 'site-2': its sender is another"):
        read(session, 3, "site-2", data[kind])
    with pytest.raises(SordinoError, match="not in the roster"):
        read(session, 3, "eve", data[kind])
    for wrong in READERS.keys() - {kind}:
        with pytest.raises(SordinoError, match=r"another kind|most"):
            READERS[wrong](session, 3, "site-1", data[kind])


@pytest.mark.parametrize("kind", READERS)
def test_no_byte_may_change(sent, kind):
    p, data = sent
    whole = data[kind]
    for i in range(len(whole)):
        with pytest.raises(SordinoError, match="site-1"):
            READERS[kind](p.session, 3, "site-1", whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
    for cut in (whole[:-1], whole + b"\0", whole[:100], b""):
        with pytest.raises(SordinoError, match="site-1"):
            READERS[kind](p.session, 3, "site-1", cut)
    with pytest.raises(SordinoError, match="not bytes"):
        READERS[kind](p.session, 3, "site-1", whole.hex())


@pytest.mark.parametrize("kind", READERS)
def test_another_sites_signature_is_refused(sent, kind):
    p, data = sent
    with pytest.raises(SordinoError, match="signature is not by the key in the roster"):
        READERS[kind](p.session, 3, "site-1", forged(p.members["site-2"], data[kind], lambda head: None))


def put(field, value):
    return lambda head: head["fields"].__setitem__(field, value)


BAD = [
    ("offer", put("public", bytes(32).hex()), "low order"),
    ("offer", put("public", "00"), "hexadecimal"),
    ("offer", put("public", "zz" * 32), "hexadecimal"),
    ("offer", put("public", " " + "00" * 31 + "0"), "hexadecimal"),
    ("offer", put("commitment", 3), "hexadecimal"),
    ("offer", put("round", 3.0), "round"),
    ("offer", put("round", "3"), "round"),
    ("offer", put("threshold", True), "threshold"),
    ("offer", put("more", 1), "kind"),
    ("offer", lambda head: head["fields"].pop("plan"), "kind"),
    ("offer", lambda head: head["arrays"][0].__setitem__(2, [82, 3]), "shape"),
    ("offer", lambda head: head["arrays"][0].__setitem__(0, "bxs"), "arrays"),
    ("offer", lambda head: head["arrays"].insert(0, ["x", "u1", [0]]), "arrays"),
    ("offer", lambda head: head["arrays"].insert(0, ["x", "u1", [2**31, 2**31, 2**31, 0]]), "offer of"),
    ("offer", lambda head: head["arrays"].reverse(), "arrays"),
    ("masked", put("dimension", 6), "shape"),
    ("masked", put("dimension", 0), "dimension"),
    ("masked", put("dimension", 2**40), "dimension"),
    ("masked", put("dimension", "7"), "dimension"),
    ("masked", put("seal", "00" * 64), "seal"),
    ("masked", put("shown_sha256", "00" * 32), "seal"),
    ("masked", lambda head: head["arrays"][0].__setitem__(1, "f4"), "type"),
    ("reveal", put("survivors", ["site-0", "site-0", "site-1"]), "twice"),
    ("reveal", put("dropped", ["site-0"]), "twice"),
    ("reveal", put("survivors", ["site-0", "site-1", "eve"]), "not in the roster"),
    ("reveal", put("survivors", ["site-0", "site-1"]), "shape"),
    ("reveal", put("survivors", ["site-0", "site-1", {}]), "names"),
    ("reveal", put("survivors", {"site-0": 1}), "names"),
    ("reveal", put("survivors", None), "names"),
    ("reveal", put("survivors", ["a"] * 5), "names"),
]


@pytest.mark.parametrize(("kind", "change", "match"), BAD)
def test_a_site_that_breaks_the_rules_is_named(sent, kind, change, match):
    p, data = sent
    with pytest.raises(SordinoError, match=match) as caught:
        READERS[kind](p.session, 3, "site-1", forged(p.members["site-1"], data[kind], change))
    assert "site-1" in str(caught.value)


def test_numbers_beyond_the_field_are_no_shares(sent):
    p, data = sent
    _, body = parts(data["reveal"])
    with pytest.raises(SordinoError, match="are not shares"):
        read_reveal(
            p.session, 3, "site-1", forged(p.members["site-1"], data["reveal"], lambda _: None, b"\xff" * len(body))
        )


def test_the_hash_of_offers_tells_them_apart():
    one = shown_sha256({"a": b"1", "b": b"2"})
    assert one == shown_sha256({"b": b"2", "a": b"1"})
    assert len({one, shown_sha256({"a": b"2", "b": b"1"}), shown_sha256({"a": b"1"}), shown_sha256({})}) == 4


# ------------------------------------------------------------------------------------------------------- any bytes


def mutations(data):
    """Bytes replaced, cut out and put in, at a few places; some remain as they were."""
    place = st.tuples(st.integers(0, len(data)), st.integers(0, 4), st.binary(max_size=4))

    def apply(places):
        out = data
        for at, cut, new in places:
            out = out[:at] + new + out[at + cut :]
        return out

    return st.lists(place, max_size=4).map(apply)


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["a", "00" * 32])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.parametrize("examples", tiers([150, 700], 1))
@pytest.mark.parametrize("kind", READERS)
def test_any_bytes_are_refused(party, kind, examples):
    p = party(3, dropouts=1)
    alive = p.names[:2]
    data = {"offer": p.offers(), "masked": p.masked(alive), "reveal": p.reveals(alive)}[kind]["site-1"]
    fields = list(parts(data)[0]["fields"])
    member = p.members["site-1"]

    def check(bad, by_itself=False):
        try:
            READERS[kind](p.session, 3, "site-1", bad)
        except SordinoError:
            return
        assert bad == data or by_itself  # what a site signs may be another message that is well formed

    @settings(deadline=None, max_examples=examples, derandomize=True, database=None)
    @given(st.one_of(st.binary(max_size=300), mutations(data)))
    def bytes_of_any_kind(bad):
        check(bad)

    @settings(deadline=None, max_examples=examples, derandomize=True, database=None)
    @given(st.sampled_from(fields), values, st.booleans(), values)
    def heads_of_any_kind(field, value, other, shape):
        def change(head):
            head["fields"][field] = value
            if other:
                head["arrays"][0][2] = shape

        check(forged(member, data, change), by_itself=True)

    bytes_of_any_kind()
    heads_of_any_kind()
