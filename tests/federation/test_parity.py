"""A federation and the simulator, given the same noise, make the same model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.verify import verify
from sordino.federation.coordinator import Coordinator
from sordino.federation.site_run import StoredMemory
from sordino.federation.terms import against_terms
from sordino.privacy.mechanisms.random import Seeded
from sordino.training.artifacts import load_model
from sordino.training.verify_run import verify_run
from sordino.tree import leaves, unpack
from tests.support import tiers


def simulated_rounds(federation, coordinator, engine=reference):
    terms = coordinator.terms
    parts = [federation.site(name).load(terms.resolved.source.normalize) for name in terms.names]
    x, y = (np.concatenate([getattr(part, key) for part in parts]) for key in ("x_train", "y_train"))
    client = np.repeat(np.arange(len(parts)), [len(part.y_train) for part in parts])
    records = Records.of(x, y, client, dtype=terms.number)
    plan = replace(terms.plan, sizes=records.sizes)  # which the terms do not know where whole sites are protected
    return list(engine.run(plan, terms.model, records, Seeded(federation.seed)))


def found_or_refused(place, words):
    """Whether a certificate is told to be wrong with these words."""
    try:
        return any(words in each for each in verify_run(place, against_terms=against_terms).problems)
    except SordinoError as error:
        return words in str(error)


CASES = [
    ("dp-fedsofim", "untrusted-server", {}),
    ("dp-scaffold", "untrusted-server", {}),
    ("dp-scaffold", "untrusted-server", {"steps": 2, "schedule": "cosine", "decay": 0.1}),
    ("dp-fednew-fc", "untrusted-server", {}),
    ("fednewton", "untrusted-server", {"rounds": 6}),
    ("dp-fedsofim", "secure-aggregation", {}),
    ("dp-fedadam", "secure-aggregation", {"names": ("a", "b", "c", "d"), "dropouts": 1}),
]


@pytest.mark.parametrize(("method", "trust", "keys"), tiers(CASES, [case for case in CASES if case[0] != "fednewton"]))
def test_the_model_is_the_simulators(federation, method, trust, keys):
    federation = federation(method, trust, **keys)
    coordinator, _ = federation.run()
    _, theta, *_ = load_model(coordinator.out / "model.safetensors")
    expected = simulated_rounds(federation, coordinator)[-1].model
    assert torch.isfinite(theta).all()
    assert theta.abs().max() > 0
    torch.testing.assert_close(theta, expected, rtol=2e-6, atol=2e-6)
    for name in federation.names:
        (place,) = (federation.place(name) / "runs").iterdir()
        cert = json.loads((place / "certificate.json").read_text())
        assert verify(cert).problems == []
        verdict = verify_run(place, federation.roster.card(name).sign, against_terms=against_terms)
        assert verdict.problems == verdict.assumed == []
        assert verdict.gaps == []
        assert verdict.known
        assert verdict.signed.startswith(f"site {name} ")
        whole = (place / "certificate.json").read_text()
        (place / "certificate.json").write_text(json.dumps({**cert, "certified": True, "reasons": []}))
        assert any(
            "certified: the certificate says true" in each
            for each in verify_run(place, against_terms=against_terms).problems
        )
        for key, value, words in (
            ("execution", "and a university supervised it", "execution: the certificate says"),
            ("site", cert["site"] | {"rounds": cert["rounds"] - 1}, "paid for"),
            ("site", cert["site"] | {"client": len(federation.names)}, "no group of clients has that one"),
        ):
            (place / "certificate.json").write_text(json.dumps({**cert, key: value}))
            assert found_or_refused(place, words), (key, value)
        (place / "certificate.json").write_text(whole)
        assert not cert["certified"]  # seeded
        assert cert["epsilon"] <= 8 * (1 + 1e-9)
        assert (cert["secure"] is not None) == (trust == "secure-aggregation")
        assert not (place / "secret").exists()
    whole = verify_run(coordinator.out, against_terms=against_terms)
    assert whole.problems == []
    assert not any("ledger" in gap for gap in whole.gaps), "a coordinator has none"
    assert any(gap.startswith("the plan of the federation") for gap in verify_run(coordinator.out).gaps)


INVERSE_ROOT = {"mechanism": "inverse-root", "inverse_band": 3}  # what `auto` takes beyond 4,096 rounds
QUICK = [
    ("auto", {}),
    ("dp-fedgd", {"quantile": 0.5}),
    ("dp-fedgd", {"batch": "poisson:8"}),
    ("dp-ftrl", {}),
    ("dp-ftrl", INVERSE_ROOT),
]
MASKED = [
    ("auto", {}),
    ("auto", {"calibrate": 0.1}),
    ("auto", {"model": "mlp", "batch": "poisson:8"}),
    ("dp-fedfc", {}),
    ("dp-boost", {}),
    ("dp-disk", {"optimizer": "adam"}),
    ("dp-fedadam-scaled", {"w": 0.9}),
    ("dp-fedgd", {"quantile": 0.5}),
    ("dp-fedgd", {"batch": "poisson:8"}),
    ("dp-adadps", {}),
    ("dp-fedavg", {"noise_at": "final", "steps": 2}),
    ("dp-fednew-fc", {"duals": False}),
    ("dp-ftrl", {}),
    ("dp-ftrl", {"mechanism": "banded", "band": 3, "momentum": 0.5, "weight_decay": 0.1}),
    ("dp-ftrl", INVERSE_ROOT),
]


@pytest.mark.parametrize(("method", "keys"), tiers(MASKED, QUICK))
def test_opened_sums_are_the_simulators_bit_for_bit(tiny, monkeypatch, method, keys):
    """Under masks the sites send integers, so that a sum has one value whatever the order of its terms."""
    federation = tiny(method, "secure-aggregation", rounds=7, names=("a", "b", "c", "d"), dropouts=1, **keys)
    for name in federation.names if "model" in keys else ():  # a site allows networks by name
        federation.configure(name, models=[keys["model"]])
    compare_sums(federation, monkeypatch)


@pytest.mark.parametrize("method", tiers(["auto", "dp-ftrl", "dp-fedsam", "dp-boost"], 1))
def test_opened_sums_of_sites_that_are_protected_as_a_whole(tiny, monkeypatch, method):
    """The terms state 1 record of every site, and each site divides by its own number."""
    names = ("a", "b", "c", "d")
    federation = tiny(method, "secure-aggregation", rounds=7, names=names, dropouts=1, unit="client")
    for name in names:
        federation.configure(name, unit="client")
    coordinator = compare_sums(federation, monkeypatch)
    assert coordinator.terms.sizes == (1, 1, 1, 1)
    sizes = [len(federation.site(name).load().y_train) for name in names]
    assert len(set(sizes)) > 1
    cert = json.loads((coordinator.out / "certificate.json").read_text())
    assert cert["unit"] == "client"
    assert cert["records"] is None


def test_a_stream_of_any_length_in_the_open_is_the_simulators_bit_for_bit(tiny):
    """Every site derives the draws of its earlier rounds again."""
    federation = tiny("dp-ftrl", "untrusted-server", rounds=7, **INVERSE_ROOT)
    coordinator, _ = federation.run()
    _, theta, *_ = load_model(coordinator.out / "model.safetensors")
    assert torch.equal(theta, simulated_rounds(federation, coordinator)[-1].model)
    for name in federation.names:
        (place,) = (federation.place(name) / "runs").iterdir()
        assert verify_run(place, federation.roster.card(name).sign, against_terms=against_terms).problems == []
        cert = json.loads((place / "certificate.json").read_text())
        assert cert["queries"][0]["factor"] == {"inverse_band": 3, "rounds": 7}
        assert cert["epsilon"] <= 8 * (1 + 1e-9)


def test_a_stream_goes_on_after_the_coordinator_and_the_sites_were_killed(tiny, monkeypatch):
    federation = tiny("dp-ftrl", "secure-aggregation", rounds=7, names=("a", "b", "c", "d"))
    calls = []

    def fault(node, message, answer):
        reply = answer(message)
        calls.append(node)
        if len(calls) == 70:  # some sites have answered the round, and others have not
            raise RuntimeError("killed")
        return reply

    with pytest.raises(RuntimeError, match="killed"):
        federation.run(fault)
    done = len(federation.progress("round"))
    assert 1 < done < 6
    coordinator, _ = federation.run()
    rounds = simulated_rounds(federation, coordinator, simulate)
    _, theta, *_ = load_model(coordinator.out / "model.safetensors")
    torch.testing.assert_close(theta, rounds[-1].model, rtol=2e-6, atol=2e-6)
    assert len(federation.progress("round")) == 7
    assert [t for _, t in federation.charged("a")] == list(range(7))
    for name in federation.names:  # the answers without noise, which later rounds needed, are gone
        (place,) = (federation.place(name) / "runs").iterdir()
        stored = unpack((place / "memory").read_bytes(), StoredMemory(torch.zeros(2), ()))
        assert stored.answers == ()


def compare_sums(federation, monkeypatch):
    opened, step = [], Coordinator._step

    def kept(self, round_plan, aggregate, theta, state):
        opened.append(aggregate)
        return step(self, round_plan, aggregate, theta, state)

    monkeypatch.setattr(Coordinator, "_step", kept)
    coordinator, _ = federation.run()
    rounds = simulated_rounds(federation, coordinator, simulate)
    assert len(opened) == len(rounds) == 7
    for total, simulated_round in zip(opened, rounds, strict=True):
        assert type(total) is type(simulated_round.aggregate)
        for left, right in zip(leaves(total), leaves(simulated_round.aggregate), strict=True):
            assert torch.equal(left, right)
    assert not torch.equal(leaves(opened[0])[0], leaves(opened[-1])[0])
    for cert in (coordinator.out / "certificate.json", *federation.folder.glob("*/runs/*/certificate.json")):
        stated = json.loads(cert.read_text())
        assert verify(stated).problems == []
        assert stated["epsilon"] <= 8 * (1 + 1e-9)
    assert verify_run(coordinator.out, against_terms=against_terms).problems == []
    for name in federation.names:
        (place,) = (federation.place(name) / "runs").iterdir()
        assert verify_run(place, federation.roster.card(name).sign, against_terms=against_terms).problems == []
    return coordinator
