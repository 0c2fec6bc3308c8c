"""The account of persons: that of records with persons as terms, and what several clients per person cost."""

import math

import numpy as np
import pytest
import torch

import sordino as so
from sordino.core import Adjacency, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.verify import verify
from sordino.methods import REGISTRY, build
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.privacy.participation import Participation, Sampling

SIZES = (30, 50, 20)


def plan(unit="person", method="dp-fedgd", rounds=5, batch="full", uncertified=False, **privacy):
    return so.Plan(
        build(method, unit), rounds, SIZES, so.Privacy(2.0, unit=unit, **privacy),
        sampling=Sampling.parse(batch), uncertified=uncertified,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in REGISTRY if Unit.RECORD in REGISTRY[name].units])
def test_every_method_for_records_protects_persons_with_the_same_account(name):
    """A proof for records speaks of bounded terms; with persons as terms every number is the same."""
    record = build(name)
    person = build(name, "person")
    assert {trust for _, trust in person.proves} == {trust for unit, trust in record.proves if unit is Unit.RECORD}
    for before, after in zip(record.stages, person.stages, strict=True):
        for query, same in zip(before.queries, after.queries, strict=True):
            for adjacency in Adjacency:
                assert same.sensitivity(adjacency, Unit.PERSON, 9) == query.sensitivity(adjacency, Unit.RECORD, 9)


@pytest.mark.parametrize("batch", ["full", "poisson:4"])
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_noise_and_epsilon_are_those_of_records(batch, trust):
    person, record = plan(batch=batch, trust=trust), plan("record", batch=batch, trust=trust)
    assert calibration.query_noises(person)[0].std == pytest.approx(calibration.query_noises(record)[0].std, rel=1e-12)
    assert spending.epsilon(person) == pytest.approx(spending.epsilon(record), rel=1e-12)


@pytest.mark.parametrize(("trust", "factor"), [("untrusted-server", math.sqrt(3)), ("secure-aggregation", 3)])
def test_a_person_at_several_clients_costs_noise(trust, factor):
    one, several = plan(trust=trust), plan(trust=trust, person_clients=3)
    ratio = calibration.query_noises(several)[0].std / calibration.query_noises(one)[0].std
    assert ratio == pytest.approx(factor, rel=1e-12)
    assert spending.epsilon(several) == pytest.approx(2.0)


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("claimed", [1, 2])
def test_all_that_is_seen_moves_by_mu_when_a_person_at_two_clients_changes(trust, claimed):
    """The neighbours differ in one person's records at two clients. With person_clients = 1 the account is broken."""
    x = np.zeros((sum(SIZES), 2))
    client = np.repeat(np.arange(3), SIZES)
    person = np.arange(len(x))
    person[30] = person[0]  # the first of client 0 is the first of client 1

    def records(value):
        x[0], x[30] = value, value
        y = np.zeros(len(x))
        y[[0, 30]] = 1e6
        return Records.of(x, y, client, person=person, per_person=4, dtype=torch.float64)

    mine = plan(rounds=1, trust=trust, person_clients=claimed)
    noises = calibration.query_noises(mine)[0]
    model = so.Linear(2, 1, "squares", bias=False)
    shifts = []
    for i in range(3):
        gradients = [
            model.clipped_sum(torch.zeros(2).double(), records(value).shard(i), noises.query.clip)
            for value in (1.0, -1.0)
        ]
        shifts.append(float((gradients[0] - gradients[1]).norm()))
    if trust == "untrusted-server":
        seen = math.sqrt(sum((shift / std) ** 2 for shift, std in zip(shifts, noises.std, strict=True)))
    else:
        seen = (
            sum(w * shift for w, shift in zip(noises.weight, shifts, strict=True)) / (noises.weight * noises.std).max()
        )
    assert bool(seen <= spending.mu(mine)) is (claimed == 2)
    assert seen == pytest.approx(
        spending.mu(mine) * (1 if claimed == 2 else math.sqrt(2) if trust[0] == "u" else 2), rel=1e-3
    )


def test_certificates_of_persons(tmp_path):
    cert = so.certificate(plan(person_clients=2), so.source(None), version="1")
    assert cert["unit"] == "person"
    assert cert["person"] == {"records": 4, "clients": 2, "choice": "first"}
    assert cert["records"] == sum(SIZES)
    assert verify(cert).problems == []
    assert any("at most 2 clients hold records of the same person" in line for line in cert["assumes"])
    text = so.statement(cert)
    for words in (
        "(100 persons)",
        "all records of any single person",
        "Up to 4 records of each person",
        "a person is true",
    ):
        assert words in text, words
    for change in ({"person": {"records": 4, "clients": 1}}, {"person": None}, {"unit": "record"}):
        assert verify({**cert, **change}).problems, change
    assert so.certificate(plan("record"), so.source(None), version="1")["person"] is None


@pytest.mark.parametrize(
    ("trust", "how"),
    [
        ("untrusted-server", {"participation": Participation.parse("fixed:2")}),
        ("secure-aggregation", {"divisor": "client-mean"}),
    ],
)
def test_a_client_s_own_epsilon_is_not_that_of_a_person_who_is_also_at_another(trust, how):
    privacy = so.Privacy(4.0, unit="person", trust=trust, person_clients=2)
    mine = so.Plan(build("dp-fedgd", "person"), 7, (10, 100, 1000, 1000), privacy, **how)
    cert = so.certificate(mine, so.source(None), version="1")
    own = [spending.client_epsilon(mine, i) for i in range(4)]
    low, high = int(np.argmin(own)), int(np.argmax(own))
    (noise,) = calibration.query_noises(mine)
    unit, total = noise.query.sensitivity(Adjacency.REPLACE_ONE, Unit.PERSON), 0.0
    for cohort in mine.cohorts:
        there = [i for i in (low, high) if i in cohort]
        if trust == "untrusted-server":
            total += sum((unit / noise.std[i]) ** 2 for i in there)
        else:
            total += (sum(noise.weight[i] * unit for i in there) / (noise.weight * noise.std).max()) ** 2
    both = gaussian.epsilon(math.sqrt(total), privacy.delta)
    assert own[low] * 1.1 < both <= own[high]
    text = so.statement(cert)
    assert "where a person with records at several clients has the largest one of them" in text
    site = {"name": "a", "client": low, "data": "", "epsilon": 8.0, "delta": 1e-5, "spent": 1.0, "rounds": 7}
    assert "For persons with records at this site alone **ε" in so.statement({**cert, "site": site})
    alone = {**cert, "person": {**cert["person"], "clients": 1}}
    assert "the largest one of them" not in so.statement(alone)
    assert "For the data of this site **ε" in so.statement({**alone, "site": site})


def test_what_is_not_proved_is_refused():
    with pytest.raises(SordinoError, match=r"^batch: poisson:4 with person_clients = 2"):
        plan(batch="poisson:4", person_clients=2)
    from sordino.privacy.mechanisms.quantization import Integers

    with pytest.raises(SordinoError, match=r"^person_clients: integers are rounded by each client"):
        so.Plan(
            build("dp-fedgd", "person"), 2, SIZES,
            so.Privacy(2.0, unit="person", trust="secure-aggregation", person_clients=2), integers=Integers(8, 0, 1),
        )  # fmt: skip


@pytest.mark.parametrize("engine", [reference, simulate])
def test_engines_refuse_records_that_are_not_grouped(engine):
    held = Records.of(np.zeros((100, 2)), np.zeros(100, int), np.repeat(np.arange(3), SIZES))
    with pytest.raises(SordinoError, match=r"^person: records are not grouped"):
        next(engine.run(plan(), so.Linear(2, 2), held, Seeded(0)))


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedavg", "dp-fedadamw", "dp-fednew"])
@pytest.mark.parametrize("batch", ["full", "poisson:4"])
def test_engines_agree_on_persons(name, batch):
    rng = np.random.default_rng(1)
    person = np.repeat(np.arange(100), rng.integers(1, 6, size=100))
    client = np.repeat(np.arange(3), SIZES)[person]
    x, y = rng.normal(size=(len(person), 3)), rng.integers(3, size=len(person))
    held = Records.of(x, y, client, person=person, per_person=4, dtype=torch.float64)
    mine = plan(method=name, batch=batch, uncertified=True)
    model = so.Linear(3, 3)
    slow = list(reference.run(mine, model, held, Seeded(3)))
    fast = list(simulate.run(mine, model, held, Seeded(3), shares=True))
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)


def test_minibatches_draw_persons():
    """Every answer holds all records of each drawn person, and of no other."""
    person = np.repeat(np.arange(100), 3)
    client = np.repeat(np.arange(3), SIZES)[person]
    x = np.eye(100)[person]
    held = Records.of(x, np.zeros(len(x), int), client, person=person, per_person=4, dtype=torch.float64)
    seen = []

    class Watching(so.Linear):
        def clipped_sum(self, theta, shard, clip, scale=None):
            seen.append(shard)
            return super().clipped_sum(theta, shard, clip, scale)

    list(reference.run(plan(batch="poisson:4"), Watching(100, 2), held, Noiseless(0)))
    for shard in seen:
        filled = shard.by_person(shard.mask)
        assert set(filled.sum(-1).tolist()) <= {0.0, 3.0}
        used = shard.x[shard.mask > 0].argmax(-1).view(-1, 3)
        assert (used == used[:, :1]).all()


@pytest.mark.parametrize("engine", [reference, simulate])
def test_a_model_that_clips_single_records_is_refused(engine):
    """A model must say that its sums have one term per person; one that does not could clip each record by itself."""

    class Careless(so.Linear):
        serves_persons = False

    client = np.repeat(np.arange(3), SIZES)
    held = Records.of(np.zeros((100, 2)), np.zeros(100, int), client, person=np.arange(100), per_person=4)
    with pytest.raises(SordinoError, match=r"^unit: Careless clips single records, not persons"):
        next(engine.run(plan(), Careless(2, 2), held, Seeded(0)))
