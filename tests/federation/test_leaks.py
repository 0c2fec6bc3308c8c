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
from sordino.federation.site_run import Run


def first_terms(world):
    """The terms that a coordinator proposes, as JSON."""
    coordinator = Coordinator(Loopback(world.sites()), world.coordinator)
    return json.loads(coordinator._propose(coordinator._meet()).json())


def asked(site, terms):
    return wire.decode(site.answer(wire.encode("terms", {"terms": json.dumps(terms)})))


def rows(site):
    with site.ledger() as ledger:
        return len(ledger)


def test_a_certificate_does_not_hold_a_hash_of_the_data_that_others_could_try_records_by(world):
    world = world(rounds=2)
    world.run()
    names = []
    for name in world.names:
        data = (world.place(name) / "data.npz").read_bytes()
        (place,) = (world.place(name) / "runs").iterdir()
        text = (place / "certificate.json").read_text() + (place / "statement.md").read_text()
        assert hashlib.sha256(data).hexdigest()[:16] not in text
        names.append(world.site(name).dataset_id)
        assert (world.place(name) / "data.key").stat().st_mode & 0o077 == 0
    north, south = (world.place(name) for name in ("north", "south"))
    (south / "data.npz").write_bytes((north / "data.npz").read_bytes())
    assert world.site("south").dataset_id.split()[1] != names[0].split()[1]  # equal data, other keys


def test_which_labels_a_site_holds_is_not_told(world, monkeypatch):
    world = world(rounds=2)
    terms = first_terms(world)
    site = world.site("north")
    site.shape  # noqa: B018  read at hello already
    monkeypatch.setattr(Site, "load", lambda *a: pytest.fail("the data were touched"))
    for classes in (CLASSES[:9], [*CLASSES, "ten"], []):
        reply = asked(site, {**terms, "classes": classes})
        assert (reply.kind, reply.fields["code"]) == ("refused", "policy")
    assert asked(site, terms).kind == "agreed"
    assert rows(site) == 0


def test_offers_are_checked_before_the_data_are_touched(world, monkeypatch):
    world = world(trust="secure-aggregation", rounds=2)
    touched = []
    compute = Run.compute
    monkeypatch.setattr(Run, "compute", lambda *a: touched.append(1) or compute(*a))

    def spoiled(node, letter, answer):
        message = wire.decode(letter)
        if message.kind == "round":
            arrays = {k: (v[:-1] if k == "offer:west" else v) for k, v in message.arrays.items()}
            letter = wire.encode(message.kind, message.fields, arrays)
        return answer(letter)

    world.run(fault=spoiled)
    assert not touched
    assert rows(world.site("north")) == 0


def test_a_failure_after_the_data_were_touched_is_paid_for_and_stays_the_same(world, monkeypatch):
    world = world(rounds=2)

    def fails(*a):
        raise ArithmeticError("record 17 is odd")

    letters = []
    monkeypatch.setattr(Run, "compute", fails)
    world.run(fault=lambda node, letter, answer: letters.append((node, letter)) or answer(letter))
    site = world.site("north")
    assert rows(site) == 2
    monkeypatch.undo()
    (letter, *_) = (letter for node, letter in letters if node == 100 and wire.decode(letter).kind == "round")
    reply = world.site("north").answer(letter)
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
def test_a_site_does_not_take_part_in_what_its_account_or_machine_is_not_made_for(world, change, seconds):
    world = world(rounds=2)
    terms = first_terms(world)
    lines = [line for line in terms["spec"].splitlines() if line.split(" = ")[0] not in change]
    spec = "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in change.items())])
    site, began = world.site("north"), time.monotonic()
    reply = asked(site, {**terms, "spec": spec, "features": 2**20 if "model" in change else 64})
    assert (reply.kind, reply.fields["code"]) == ("refused", "policy")
    assert time.monotonic() - began < 5 * seconds


@pytest.mark.parametrize("spec", ["a." * 2000 + "k = 1", "x = " + "[" * 3000, "k = 1\n" * 3000, "[table]\nrounds = 1"])
def test_a_spec_that_is_no_list_of_keys_is_not_even_parsed(world, spec):
    world = world(rounds=2)
    reply = asked(world.site("north"), {**first_terms(world), "spec": spec})
    assert (reply.kind, reply.fields["code"]) == ("refused", "malformed")


def test_fewer_colluders_than_a_site_reckons_with_are_refused(world):
    world = world(trust="secure-aggregation", rounds=2)
    reply = asked(world.site("north"), {**first_terms(world), "colluders": 0})
    assert (reply.kind, reply.fields["code"]) == ("refused", "policy")


def test_one_noised_step_is_served_because_it_sends_its_gradient_as_it_is(world):
    coordinator, _ = world("dp-fedavg", "secure-aggregation", rounds=2, steps=1).run()
    assert coordinator.terms.plan.method.name == "dp-fedavg"


def test_sums_for_integers_are_taken_in_float64(world):
    world = world(trust="secure-aggregation", rounds=2)
    coordinator, _ = world.run()
    (place,) = (world.place("north") / "runs").iterdir()
    run = Run(world.site("north"), place.name)
    assert run.data.x.dtype == run.terms.model.init().double().dtype
    assert coordinator.terms.number == run.terms.number
    assert np.isfinite(json.loads((place / "certificate.json").read_text())["epsilon"])
