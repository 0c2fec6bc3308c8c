"""What a review found: ways in which data, or their labels, could leave without being paid for."""

import hashlib
import json
import time

import numpy as np
import pytest
from fixtures import CLASSES, Loopback

from sordino import wire
from sordino.federation.coordinator import Coordinator
from sordino.federation.site import Site
from sordino.federation.site_run import SiteRun


def first_terms(federation):
    """The terms that a coordinator proposes, as JSON."""
    coordinator = Coordinator(Loopback(federation.sites()), federation.coordinator)
    return json.loads(coordinator.enrolment.propose(coordinator.enrolment.meet()).json())


def asked(site, terms):
    return wire.decode(site.answer(wire.encode("terms", {"terms": json.dumps(terms)})))


def rows(site):
    with site.ledger() as ledger:
        return len(ledger)


def test_a_certificate_does_not_hold_a_hash_of_the_data_that_others_could_try_records_by(federation):
    federation = federation(rounds=2)
    federation.run()
    names = []
    for name in federation.names:
        data = (federation.place(name) / "data.npz").read_bytes()
        (place,) = (federation.place(name) / "runs").iterdir()
        text = (place / "certificate.json").read_text() + (place / "statement.md").read_text()
        assert hashlib.sha256(data).hexdigest()[:16] not in text
        names.append(federation.site(name).dataset_id)
        assert (federation.place(name) / "data.key").stat().st_mode & 0o077 == 0
    north, south = (federation.place(name) for name in ("north", "south"))
    (south / "data.npz").write_bytes((north / "data.npz").read_bytes())
    assert federation.site("south").dataset_id.split()[1] != names[0].split()[1]  # equal data, other keys


def test_which_labels_a_site_holds_is_not_told(federation, monkeypatch):
    federation = federation(rounds=2)
    terms = first_terms(federation)
    site = federation.site("north")
    site.shape  # noqa: B018  read at hello already
    monkeypatch.setattr(Site, "load", lambda *a: pytest.fail("the data were touched"))
    for classes in (CLASSES[:9], [*CLASSES, "ten"], []):
        reply = asked(site, {**terms, "classes": classes})
        assert (reply.kind, reply.fields["code"]) == ("refused", "policy")
    assert asked(site, terms).kind == "agreed"
    assert rows(site) == 0


def test_offers_are_checked_before_the_data_are_touched(federation, monkeypatch):
    federation = federation(trust="secure-aggregation", rounds=2)
    touched = []
    compute = SiteRun.compute
    monkeypatch.setattr(SiteRun, "compute", lambda *a: touched.append(1) or compute(*a))

    def spoiled(node, request, answer):
        message = wire.decode(request)
        if message.kind == "round":
            arrays = {k: (v[:-1] if k == "offer:west" else v) for k, v in message.arrays.items()}
            request = wire.encode(message.kind, message.fields, arrays)
        return answer(request)

    federation.run(fault=spoiled)
    assert not touched
    assert rows(federation.site("north")) == 0


def test_a_failure_after_the_data_were_touched_is_paid_for_and_stays_the_same(federation, monkeypatch):
    federation = federation(rounds=2)

    def fails(*a):
        raise ArithmeticError("record 17 is odd")

    requests = []
    monkeypatch.setattr(SiteRun, "compute", fails)
    federation.run(fault=lambda node, request, answer: requests.append((node, request)) or answer(request))
    site = federation.site("north")
    assert rows(site) == 2
    monkeypatch.undo()
    (request, *_) = (request for node, request in requests if node == 100 and wire.decode(request).kind == "round")
    reply = federation.site("north").answer(request)
    assert wire.decode(reply).kind == "refused"  # though it could answer now
    assert b"odd" not in reply
    assert rows(site) == 2


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({"adjacency": "add-remove"}, 2),
        ({"model": "vit-base-lora"}, 2),
        ({"model": "mlp"}, 2),
        ({"clip": 3e38}, 2),
    ],
)
def test_a_site_does_not_take_part_in_what_its_account_or_machine_is_not_made_for(federation, change, seconds):
    federation = federation(rounds=2)
    terms = first_terms(federation)
    lines = [line for line in terms["spec"].splitlines() if line.split(" = ")[0] not in change]
    spec = "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in change.items())])
    site, began = federation.site("north"), time.monotonic()
    reply = asked(site, {**terms, "spec": spec, "features": 2**20 if "model" in change else 64})
    assert (reply.kind, reply.fields["code"]) == ("refused", "policy")
    assert time.monotonic() - began < 5 * seconds


@pytest.mark.parametrize("spec", ["a." * 2000 + "k = 1", "x = " + "[" * 3000, "k = 1\n" * 3000, "[table]\nrounds = 1"])
def test_a_spec_that_is_no_list_of_keys_is_not_even_parsed(federation, spec):
    federation = federation(rounds=2)
    reply = asked(federation.site("north"), {**first_terms(federation), "spec": spec})
    assert (reply.kind, reply.fields["code"]) == ("refused", "malformed")


def test_fewer_colluders_than_a_site_reckons_with_are_refused(federation):
    federation = federation(trust="secure-aggregation", rounds=2)
    reply = asked(federation.site("north"), {**first_terms(federation), "colluders": 0})
    assert (reply.kind, reply.fields["code"]) == ("refused", "policy")


def test_one_noised_step_is_served_because_it_sends_its_gradient_as_it_is(federation):
    coordinator, _ = federation("dp-fedavg", "secure-aggregation", rounds=2, steps=1).run()
    assert coordinator.terms.plan.method.name == "dp-fedavg"


def test_sums_for_integers_are_taken_in_float64(federation):
    federation = federation(trust="secure-aggregation", rounds=2)
    coordinator, _ = federation.run()
    (place,) = (federation.place("north") / "runs").iterdir()
    run = SiteRun(federation.site("north"), place.name)
    assert run.data.x.dtype == run.terms.model.init().double().dtype
    assert coordinator.terms.number == run.terms.number
    assert np.isfinite(json.loads((place / "certificate.json").read_text())["epsilon"])
