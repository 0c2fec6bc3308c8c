"""Federations whose masks are shared along a graph: the same sums as along all pairs, with dropouts and lies."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from sordino import wire
from sordino.errors import SordinoError
from sordino.evidence import public
from sordino.evidence.verify import verify
from sordino.federation import masks
from sordino.federation.derived import check_derived
from sordino.privacy.mechanisms import mask_graph
from sordino.privacy.mechanisms.mask_graph import PARTS, Parameters
from sordino.training.artifacts import load_model

NAMES = tuple("abcdefgh")
FOUND = Parameters(edge=int(0.97 * PARTS), shares=3, near=1, committee=6, quorum=4)
SECURE = {"trust": "secure-aggregation", "names": NAMES, "dropouts": 2, "rounds": 2}


@pytest.fixture
def along_a_graph(monkeypatch):
    """As if 8 sites were too many for all pairs; the parameters hold for no proof."""

    def begin():
        monkeypatch.setattr(mask_graph, "ALL_PAIRS", 4)
        monkeypatch.setattr(mask_graph, "parameters", lambda *_: FOUND)

    return begin


def model_of(federation):
    return load_model(federation.coordinator / "run" / "model.safetensors")[1]


def test_same_model_as_with_all_pairs(tiny, along_a_graph):
    """Seeded noise makes the same integers; masks of either kind cancel."""
    whole = tiny(**SECURE)
    whole.run()
    along_a_graph()
    federation = tiny(**SECURE)
    coordinator, transport = federation.run()
    assert coordinator.secure_sum.sparse
    assert (model_of(whole) == model_of(federation)).all()
    sizes = [len(reply) for _, request, reply in transport.log if wire.decode(request).kind == "round"]
    assert len(sizes) == 2 * len(NAMES)
    cert = json.loads((federation.folder_of("a") / "certificate.json").read_text())
    assert cert["secure"]["masks"] == dataclasses.asdict(FOUND)
    told = set(public.fields(cert))
    assert told <= {*public.CERTIFICATE, *public.SECURE, *public.OF_MANY_SITES, *public.SITE}
    assert told >= set(public.OF_MANY_SITES)
    assert not verify(cert).problems
    cert["secure"]["masks"]["shares"] -= 1
    assert any("graph of masks" in problem for problem in verify(cert).problems)


def test_a_round_survives_sites_that_fail_at_either_step(tiny, along_a_graph):
    """One site sends no vector and another reveals nothing."""
    along_a_graph()
    federation = tiny(**SECURE)

    def fault(node, request, answer):
        kind = wire.decode(request).kind
        return None if (node, kind) in ((101, "round"), (103, "reveal")) else answer(request)

    federation.run(fault)
    assert not federation.progress("abandoned")
    assert [line["came"] for line in federation.progress("round")] == [[n for n in NAMES if n != "b"]] * 2


def test_lies_are_refused(tiny, along_a_graph):
    """The server shows one site other present sites, drops a slip, or names other survivors."""
    along_a_graph()

    def broken(change, kind):
        federation = tiny(**SECURE)

        def fault(node, request, answer):
            message = wire.decode(request)
            if node == 100 and message.kind == kind:
                fields, arrays = change(dict(message.fields), dict(message.arrays))
                request = wire.encode(kind, fields, arrays)
            return answer(request)

        federation.run(fault)
        return [line for line in federation.progress("refused") if line["site"] == "a" and line["kind"] != "agreed"]

    def no_slips(fields, arrays):
        return fields, {name: array for name, array in arrays.items() if name != masks.SLIPS}

    def fewer_slips(fields, arrays):
        return fields, arrays | {masks.SLIPS: arrays[masks.SLIPS][:-1]}

    def others(fields, arrays):
        return fields | {"survivors": fields["survivors"][:-1]}, arrays

    for change, kind in ((no_slips, "round"), (fewer_slips, "round"), (others, "reveal")):
        assert len(broken(change, kind)) == 2


def test_hash_of_a_request_leaves_slips_out():
    """The coordinator hashes what is common; a site computes the same from its own message."""
    common = {"theta": np.arange(3.0), masks.PRESENT: np.packbits([1, 0, 1])}
    fields = {"t": 1, "extras": [0, []], "x": 0.1}
    alone = wire.encode("round", fields, common)
    for slips in (np.zeros(3, np.uint8), np.ones(9, np.uint8)):
        request = wire.encode("round", fields, {**common, masks.SLIPS: slips})
        assert masks.request_hash(wire.decode(request), request) == hashlib.sha256(alone).hexdigest()
    assert masks.request_hash(wire.decode(alone), alone) == hashlib.sha256(alone).hexdigest()


def test_terms_state_the_graph(tiny, along_a_graph, monkeypatch):
    along_a_graph()
    terms = tiny(**SECURE).terms()
    assert terms.derived["masks shares"] == 3.0
    check_derived(terms)
    monkeypatch.setattr(mask_graph, "parameters", lambda *_: dataclasses.replace(FOUND, shares=2))
    with pytest.raises(SordinoError, match="masks shares"):
        check_derived(terms)


@pytest.mark.soak
def test_three_hundred_sites(tiny):
    """With the real parameters, sites in one process."""
    names = tuple(f"s{i}" for i in range(300))
    federation = tiny(trust="secure-aggregation", names=names, dropouts=6, colluders=2, rounds=1, deadline=600.0)

    def fault(node, request, answer):
        return None if node < 103 and wire.decode(request).kind == "round" else answer(request)

    federation.run(fault)
    assert federation.progress("round")[0]["came"] == sorted(names[3:])
