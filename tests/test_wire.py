"""Bytes from others: read to the last one or refused, and never believed about how much memory they need."""

import json
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import strategies as st

from sordino import wire
from sordino.errors import SordinoError, WireError
from sordino.federation.config import SiteConfig
from sordino.federation.derived import stated
from sordino.federation.refusal import REASONS
from sordino.federation.site import Site
from sordino.federation.terms import Terms, federated, written
from sordino.tree import leaves
from sordino.wire import MAGIC, MAX_HEAD_BYTES, decode, encode, from_tree, to_tree
from tests.support import fuzzed

MANY, SOME = (120, 500), (80, 250)  # examples of `make test` and of `make soak`
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def raw(head, body=b""):
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    return MAGIC + struct.pack("<I", len(data)) + data + body


def described(*arrays):
    return {"kind": "k", "fields": {}, "arrays": list(arrays)}


# ---------------------------------------------------------------------------------------------------------- round trips

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@fuzzed(*MANY, st.text(max_size=20), st.dictionaries(st.text(max_size=8), st.integers() | st.text()), st.data())
def test_what_was_written_is_read(kind, fields, data):
    names = data.draw(st.lists(st.text(max_size=5), unique=True, max_size=4))
    arrays = {}
    for k, name in enumerate(names):
        dtype, shape = data.draw(st.sampled_from(list(wire.TYPES.values()))), data.draw(SHAPES)
        arrays[name] = (np.random.default_rng(k).normal(0, 50, shape) ** 2).astype(dtype)
    found = decode(encode(kind, fields, arrays))
    assert (found.kind, found.fields, list(found.arrays)) == (kind, fields, names)
    for name in names:
        assert found.arrays[name].dtype == arrays[name].dtype
        np.testing.assert_array_equal(found.arrays[name], arrays[name])
        assert found.arrays[name].flags.writeable


def test_arrays_keep_every_bit_and_forget_their_layout():
    odd = np.array([np.nan, -np.nan, np.inf, -0.0, 5e-324, 2**-1074])
    swapped = np.arange(6, dtype=">f4").reshape(2, 3).T
    found = decode(encode("k", {}, {"odd": odd, "swapped": swapped, "one": np.float32(3), "none": np.zeros((0, 3))}))
    assert found.arrays["odd"].tobytes() == odd.tobytes()
    np.testing.assert_array_equal(found.arrays["swapped"], swapped)
    assert found.arrays["one"].shape == ()
    assert found.arrays["none"].shape == (0, 3)


@pytest.mark.parametrize("array", [np.zeros(2, np.float16), np.zeros(2, bool), np.array(["a"]), np.array([object()])])
def test_arrays_of_other_types_are_not_sent(array):
    with pytest.raises(WireError, match="cannot be sent"):
        encode("k", {}, {"a": array})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_json_does_not_know_are_not_sent(value):
    with pytest.raises(WireError, match="in an array"):
        encode("k", {"x": [value]})


def test_a_head_that_is_too_long_is_not_sent():
    with pytest.raises(WireError, match="head"):
        encode("k", {"x": "y" * MAX_HEAD_BYTES})


TREES = st.recursive(st.just(0), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)


@fuzzed(*SOME, TREES)
def test_trees_come_back(tree):
    filled = _filled(tree, iter(range(100)))
    skeleton, arrays = from_tree(filled, "leaf")
    found = decode(encode("k", {"tree": skeleton}, arrays))
    back = to_tree(found.fields["tree"], found.arrays, "leaf")
    assert _nesting(back) == _nesting(filled)
    assert all(torch.equal(a, b) for a, b in zip(leaves(back), leaves(filled), strict=True))


def _filled(tree, numbers):
    return (
        tuple(_filled(part, numbers) for part in tree) if isinstance(tree, tuple) else torch.full((2,), next(numbers))
    )


def _nesting(tree):
    return tuple(map(_nesting, tree)) if isinstance(tree, tuple) else "leaf"


# --------------------------------------------------------------------------------------------------------------- bounds

REFUSED = [
    b"",
    b"SRD1",
    b"SRD2\0\0\0\0",
    MAGIC + struct.pack("<I", 2**32 - 1) + b"{}",
    MAGIC + struct.pack("<I", 3) + b"{}",
    raw(b"\xff\xfe"),
    raw(b"[" * 100_000),
    raw(b'{"a":' * 50_000),
    raw(b"NaN"),
    raw(b"9" * 5000),
    raw(7),
    raw([]),
    raw({}),
    raw({"kind": "k", "fields": {}}),
    raw({"kind": "k", "fields": {}, "arrays": [], "more": 1}),
    raw({"kind": 7, "fields": {}, "arrays": []}),
    raw({"kind": "k", "fields": [], "arrays": []}),
    raw({"kind": "k", "fields": {}, "arrays": {}}),
    raw({"kind": "k", "fields": {"a": [[[[[[[[[]]]]]]]]]}, "arrays": []}),
    raw(b'{"kind":"k","fields":{"a":NaN},"arrays":[]}'),
    raw(b'{"kind":"k","fields":{"a":-Infinity},"arrays":[]}'),
    raw(described(), b"left over"),
    raw(described(["a", "f4", [1]]), b"123"),
    raw(described(["a", "f4", [1]]), b"12345"),
    raw(described(["a", "f4", [1]], ["a", "f4", [1]]), b"12345678"),
    raw(described(["a", "O", [1]]), b"12345678"),
    raw(described(["a", "f2", [1]]), b"12"),
    raw(described(["a", ["f4"], [1]]), b"1234"),
    raw(described(["a", {"f4": 1}, [1]]), b"1234"),
    raw(described([["a"], "f4", [1]]), b"1234"),
    raw(described(["a", "f4"]), b"1234"),
    raw(described(["a", "f4", 1]), b"1234"),
    raw(described(["a", "f4", [-1]])),
    raw(described(["a", "f4", [-1, -1]]), b"1234"),
    raw(described(["a", "f4", [1.0]]), b"1234"),
    raw(described(["a", "f4", [True]]), b"1234"),
    raw(described(["a", "f4", [1, 1, 1, 1, 1]]), b"1234"),
    raw(described(["a", "f4", [2**64]])),
    raw(described(["a", "f8", [2**31]])),
    raw(described(["a", "u1", [2**16, 2**16]])),
    raw(described(["a", "f8", [0, 2**31, 2**31, 2**31]])),  # holds nothing, and numpy cannot make it
    raw(described(["a", "f8", [2**31, 2**31, 2**31, 0]])),
]


@pytest.mark.parametrize("k", range(len(REFUSED)))
def test_bytes_that_do_not_add_up_are_refused_before_anything_is_made(k):
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(REFUSED[k])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24 + 20 * len(REFUSED[k])


def test_a_reader_may_set_a_lower_bound():
    data = encode("k", {}, {"a": np.zeros(1000)})
    assert decode(data, most=len(data)).arrays["a"].size == 1000
    with pytest.raises(WireError, match="the limit is"):
        decode(data, most=len(data) - 1)


def test_a_head_that_a_message_is_too_short_for_is_not_looked_for_elsewhere():
    head = json.dumps(described()).encode()
    with pytest.raises(WireError):
        decode(MAGIC + struct.pack("<I", len(head) + 1) + head)
    too_long = json.dumps({"kind": "k" * MAX_HEAD_BYTES, "fields": {}, "arrays": []}).encode()
    with pytest.raises(WireError):
        decode(raw(too_long))


def test_a_skeleton_that_names_one_array_many_times_is_refused():
    """Four megabytes of head would otherwise ask for terabytes."""
    arrays = {"leaf0": np.zeros(2**16, np.float32), "leaf1": np.zeros(1, np.float32)}
    for skeleton in ([0] * 100, [0, 0], [1, 0], [0, [0]], 1, -1, True, 0.0, "0", None, {"0": 0}, [None], 2**70):
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match="missing array"):
                to_tree(skeleton, arrays, "leaf")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2**21
    assert to_tree([], arrays, "leaf") == ()
    assert to_tree([0, [1, []]], arrays, "leaf")[1][1] == ()


# ----------------------------------------------------------------------------------------------------------------- fuzz


@fuzzed(*MANY, st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    for each in (data, MAGIC + data, raw(data)):
        with suppress(WireError):
            decode(each)


@fuzzed(*MANY, JSON, JSON, JSON, st.binary(max_size=40))
def test_any_head_is_read_or_refused(kind, fields, arrays, body):
    for head in (
        {"kind": kind, "fields": fields, "arrays": arrays},
        described(kind, fields),
        described([kind, "u1", fields]),
    ):
        with suppress(WireError):
            decode(raw(head, body))


@fuzzed(*MANY, JSON)
def test_any_skeleton_makes_a_tree_or_is_refused(skeleton):
    with suppress(WireError):
        to_tree(skeleton, {"leaf0": np.zeros(1, np.float32)}, "leaf")


SPEC = {"method": "dp-fedsofim", "rounds": 3, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
TERMS = stated(Terms("ab" * 16, written(federated(SPEC)), ("north", "south"), (20, 20), {}, 4, ("0", "1", "2")))
VALUES = json.loads(TERMS.json())


@fuzzed(*MANY, st.text(max_size=50) | JSON.map(json.dumps))
def test_any_text_is_terms_or_refused(text):
    with suppress(SordinoError):
        Terms.read(text)


@fuzzed(*MANY, st.dictionaries(st.sampled_from(sorted(VALUES)), JSON, min_size=1, max_size=3), st.data())
def test_terms_with_anything_in_any_place_are_terms_or_refused(changes, data):
    values = VALUES | changes
    if data.draw(st.booleans()):
        values.pop(data.draw(st.sampled_from(sorted(VALUES))))
    with suppress(SordinoError):
        found = Terms.read(json.dumps(values))
        own = {key: value for key, value in asdict(found).items() if key != "weights_folder"}  # it is never sent
        assert found.json() == json.dumps(own, sort_keys=True, separators=(",", ":"))


def test_terms_come_back_as_they_were():
    assert Terms.read(TERMS.json()) == TERMS
    assert Terms.read(TERMS.json()).sha256() == TERMS.sha256()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """One that agreed, and answered round 0."""
    folder = tmp_path_factory.mktemp("site")
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=rng.normal(size=(25, 4)).astype(np.float32), y=np.arange(25) % 3)
    own = {"name": "north", "data": "data.npz", "epsilon": 50.0, "delta": 1e-3, "classes": ["0", "1", "2"]}
    (folder / "site.toml").write_text(tomli_w.dumps(own))
    made = Site(SiteConfig.read(folder / "site.toml"))
    assert made.records == 20
    for request in REQUESTS[:3]:
        assert decode(made.answer(request)).kind != "refused"
    return made


ABOUT = {"run": TERMS.run, "terms": TERMS.sha256()}
THETA = {"theta": np.zeros(15, np.float32)}
REQUESTS = [
    encode("hello", {}),
    encode("terms", {"terms": TERMS.json()}),
    encode("round", ABOUT | {"t": 0, "extras": []}, THETA),
    encode("round", ABOUT | {"t": 1, "extras": []}, THETA),
    encode("offer", ABOUT | {"t": 1}),
    encode("confirm", ABOUT | {"t": 0, "survivors": ["north"], "seals": {}}),
    encode("reveal", ABOUT | {"t": 0, "survivors": ["north"], "confirmations": {}}),
    encode("finish", ABOUT | {"done": 3}, THETA | {"more": np.zeros(1)}),
]
KINDS = ("hello", "terms", "round", "offer", "confirm", "reveal", "finish")
WORDS = (
    "run",
    "terms",
    "t",
    "extras",
    "survivors",
    "seals",
    "confirmations",
    "done",
    "theta",
    "extras0",
    "offer:north",
)
REPLIES = {"hello", "agreed", "update", "offered", "confirmed", "revealed", "finished", "refused"}


def answered(site, request):
    """A reply that reads, and a refusal is one of the constant ones."""
    reply = decode(site.answer(request))
    assert reply.kind in REPLIES
    if reply.kind == "refused":
        waits = {"place", "ahead"} if reply.fields["code"] == "queued" else set()
        assert reply.fields.keys() <= {"code", "reason", "asked", *waits}
        assert reply.fields["reason"] == REASONS[reply.fields["code"]]
    with site.ledger() as ledger:
        rows = [(row.plan, row.round) for row in ledger.rows()]
    assert len(rows) == len(set(rows)) <= 3
    return reply


@fuzzed(*SOME, body=st.binary(max_size=100))
def test_a_site_answers_any_bytes(site, body):
    for each in (body, MAGIC + body, raw(body)):
        assert answered(site, each).fields.get("code") == "malformed"


@fuzzed(*SOME, data=st.data())
def test_a_site_answers_messages_with_bytes_changed(site, data):
    request = bytearray(data.draw(st.sampled_from(REQUESTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(request) - 1))
        how = data.draw(st.sampled_from(("set", "cut", "insert", "double")))
        if how == "set":
            request[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            request[at:at] = data.draw(st.binary(max_size=8))
        elif how == "double":
            request[at:at] = request[at : at + 16]
        elif at > 0:
            del request[at:]
    answered(site, bytes(request))


@fuzzed(
    *SOME,
    kind=st.sampled_from(KINDS),
    about=st.sampled_from(({}, ABOUT)),
    fields=st.dictionaries(st.sampled_from(WORDS), JSON, max_size=4),
    arrays=st.dictionaries(st.sampled_from(WORDS), SHAPES, max_size=3),
    dtype=st.sampled_from(list(wire.TYPES.values())),
)
def test_a_site_answers_messages_with_anything_in_any_place(site, kind, about, fields, arrays, dtype):
    with suppress(WireError):  # NaN is not written
        request = encode(kind, about | fields, {k: np.ones(shape, dtype) for k, shape in arrays.items()})
        answered(site, request)


@fuzzed(*SOME, changes=st.dictionaries(st.sampled_from(sorted(VALUES)), JSON, max_size=2), spec=JSON)
def test_a_site_answers_terms_with_anything_in_any_place(site, changes, spec):
    values = VALUES | {"run": "cd" * 16} | changes
    changes = {key: value for key, value in changes.items() if value != VALUES.get(key)}
    for text in (json.dumps(values), json.dumps(values | {"spec": str(spec)}), json.dumps(spec)):
        reply = answered(site, encode("terms", {"terms": text}))
        assert reply.kind == "refused" or changes.keys() <= {
            "requested_epsilons",
            "dropouts",
            "colluders",
            "format",
            "roster",
            "run",
        }


@pytest.mark.parametrize("spec", ["a = " + "[" * 30_000, "a" * 2**15, "[" * 2**15, "x.y.z = 1\n" * 3000, "\ud800"])
def test_a_spec_made_to_exhaust_its_reader_is_refused(site, spec):
    terms = json.dumps(VALUES | {"run": "ef" * 16, "spec": spec})
    assert answered(site, encode("terms", {"terms": terms})).kind == "refused"


def test_the_sites_log_has_an_end(site, monkeypatch):
    monkeypatch.setattr("sordino.federation.site_data.LOG", 10_000)
    for _ in range(300):
        site.answer(b"x" * 100)
    sizes = [(site.config.folder / name).stat().st_size for name in ("events.jsonl", "events.old.jsonl")]
    assert 0 < max(sizes) < 11_000
    assert len(list(site.config.folder.glob("events*"))) == 2
