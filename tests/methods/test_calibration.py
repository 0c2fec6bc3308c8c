"""Calibrated intercepts: what they release, what they repair, and what is refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sordino as so
from sordino.checks import LEAST_TRIALS, check_calibration
from sordino.checks.search import TRIALS
from sordino.core import Adjacency, Kind, Shard, Unit
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.methods.calibration import PERSON_CLIP, ROUNDS, calibrated
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules.intercepts import CalibrationState
from sordino.training import run
from sordino.training.spec import Spec
from tests.support import tiers


def rare(n=6000, clients=3):
    """A class of 8 %, which the features tell a little."""
    rng = np.random.default_rng(0)
    y = (rng.random(n) < 0.08).astype(int)
    x = rng.normal(size=(n, 4))
    x[:, 0] += 1.5 * y
    x = 10 * x / np.linalg.norm(x, axis=1, keepdims=True)
    return Records.of(x, y, np.arange(n) % clients)


def risk(records, share, epsilon=2.0, name="auto", **options):
    """Mean predicted risk of the rare class, and its observed share."""
    method = calibrated(build(name, **options), share)
    privacy = so.Privacy(epsilon, trust="secure-aggregation")
    plan = so.Plan(method, 40, records.sizes, privacy)
    source = Noiseless(0) if epsilon == math.inf else Seeded(1)
    model = so.Linear(4, 2)
    *_, last = simulate.run(plan, model, records, source)
    return float(model.scores(last.model, records.x)[:, 1].mean()), float(records.y.double().mean())


def test_clipping_makes_risks_too_low_and_calibration_repairs_them():
    records, adam = rare(), {"name": "dp-fedadam", "clip": 5.0, "lr": 0.2}
    predicted, observed = risk(records, 0.0, **adam)
    assert predicted < 0.8 * observed
    for epsilon in (2.0, math.inf):
        assert risk(records, 0.0, epsilon)[0] == pytest.approx(observed, rel=0.15), "auto undoes what its clip did"
        for method in ({}, adam):
            assert risk(records, 0.1, epsilon, **method)[0] == pytest.approx(observed, rel=0.1)


def test_the_order_of_predictions_stays():
    """Only intercepts move: two classes keep their order among records."""
    records, model = rare(), so.Linear(4, 2)
    plain, shifted = (
        [*simulate.run(so.Plan(calibrated(build("auto"), share), rounds, records.sizes, so.Privacy(math.inf)), model,
                       records, Noiseless(0))][-1].model for share, rounds in ((0.0, 30), (0.1, 30 + ROUNDS))
    )  # fmt: skip
    assert torch.equal(plain[:-2], shifted[:-2])
    assert not torch.equal(plain[-2:], shifted[-2:])


@pytest.mark.parametrize(("unit", "trials"), tiers([("record", LEAST_TRIALS), ("person", TRIALS)], 1))
def test_every_contract_holds_and_mutants_are_rejected(unit, trials):
    reports = check_calibration(trials=trials, units=[Unit(unit)])
    assert {report.query.split()[-1] for report in reports} == {"gradient", "calibration", "slope"}
    assert all(report.passed for report in reports), [report.problems for report in reports]


def test_the_account_is_exact_and_verified():
    plan = so.Plan(calibrated(build("auto"), 0.1), 40, (500, 700), so.Privacy(2.0))
    assert spending.epsilon(plan) == pytest.approx(2.0)
    cert = so.certificate(plan, so.source(None), version="1")
    assert verify(cert).problems == []
    (noise,) = [each for each in calibration.query_noises(plan) if each.query.kind is Kind.CALIBRATION]
    part = ROUNDS * float((noise.sensitivity / noise.std)[0]) ** 2 / spending.mu(plan) ** 2
    assert part == pytest.approx(0.1)
    assert noise.query.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == pytest.approx(2.0)
    assert noise.query.sensitivity(Adjacency.ADD_REMOVE, Unit.RECORD) == pytest.approx(math.sqrt(2))
    assert not plan.method.by_hand
    (query,) = calibrated(build("auto", "person"), 0.1).stages[-1].queries
    assert query.sensitivity(Adjacency.REPLACE_ONE, Unit.PERSON) == 2 * PERSON_CLIP
    assert query.sensitivity(Adjacency.ADD_REMOVE, Unit.PERSON) == PERSON_CLIP


def test_differences_of_a_person_are_added_before_they_are_clipped():
    """Two records whose differences cancel count fully; the vector of a person with many wrong ones has norm `clip`."""
    model, theta = so.Linear(1, 2, bias=False), torch.tensor([-20.0, 20.0], dtype=torch.float64)
    x = torch.ones(4, 1, dtype=torch.float64)

    def total(labels, clip):
        shard = Shard(x, torch.tensor(labels), torch.ones(4).double(), per_person=4)
        return model.calibration_sum(theta, shard, clip, True)

    assert total([0, 0, 1, 1], math.inf).tolist() == pytest.approx([2.0, -2.0, 0.0, 2.0])
    wrong = total([0, 0, 0, 0], PERSON_CLIP)
    assert float(wrong.norm()) == pytest.approx(PERSON_CLIP, rel=1e-3)
    assert float(wrong.norm()) <= PERSON_CLIP
    trusting = model.calibration_sum(theta, Shard(x, torch.zeros(4).long(), torch.ones(4).double()), PERSON_CLIP, True)
    assert float(trusting.norm()) > 2 * PERSON_CLIP, "records of nobody are clipped one by one"


def test_nothing_changes_without_a_share():
    method = build("auto")
    assert calibrated(method, 0.0) is method


@pytest.mark.parametrize("share", [-0.1, 0.6, math.nan])
def test_wrong_shares(share):
    with pytest.raises(SordinoError, match=r"^calibrate: "):
        calibrated(build("auto"), share)


def test_what_is_refused():
    with pytest.raises(SordinoError, match=r"^calibrate: it is proved for records and persons"):
        calibrated(build("auto", "client"), 0.1)
    model = so.Linear(2, 1, "squares")
    with pytest.raises(SordinoError, match=r"^calibrate: intercepts are calibrated for classes, not for squares"):
        model.calibration_sum(torch.zeros(3), Records.of(np.zeros((2, 2)), np.zeros(2), np.zeros(2, int)).shard(0), 1.0)


# -------------------------------------------------------------------------------------------------------------- slopes


def sloped(slope, std=0.0, seed=0):
    """The slope after one step from log-odds slope (x - 1) + constant, where x - 1 is right, and the ratio of means."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(20_000, 1))
    y = (rng.random(len(x)) < 1 / (1 + np.exp(1 - x[:, 0]))).astype(int)
    low, high = -9.0, 9.0
    for _ in range(60):  # the constant with which the mean risk is right, as rounds of shares leave it
        constant = (low + high) / 2
        above = np.mean(1 / (1 + np.exp(-slope * x[:, 0] - constant))) > y.mean()
        low, high = (low, constant) if above else (constant, high)
    model, records = so.Linear(1, 2), Records.of(x, y, np.zeros(len(x), int), dtype=torch.float64)
    theta = torch.tensor([-slope / 2, slope / 2, -constant / 2, constant / 2], dtype=torch.float64)
    stage = calibrated(build("dp-fedgd"), 0.1, 0.1).stages[-2]
    means = model.slope_sum(theta, records.shard(0), math.inf) / len(x)
    means = means + std * torch.from_numpy(rng.normal(size=8))
    facts = SimpleNamespace(aggregate_std=std, shapes=model.shapes)
    before = CalibrationState(theta, theta[:2], theta[:2], theta[:2], theta[0])
    step, _ = stage.rule.update(means, stage.rule.init(theta, facts, before), theta, 0)
    found = (theta + step).numpy()
    odds = (found[1] - found[0]) * x[:, 0] + found[3] - found[2]
    return float(found[1] - found[0]), float(np.mean(1 / (1 + np.exp(-odds))) / y.mean())


@pytest.mark.parametrize("slope", [0.8, 1.0, 1.5, 2.0])
def test_one_step_repairs_a_slope_and_nearly_keeps_the_mean(slope):
    found, ratio = sloped(slope)
    assert found == pytest.approx(1.0, abs=0.12)
    assert ratio == pytest.approx(1.0, abs=0.05)


def test_noise_shortens_the_step():
    """Noise that hides everything moves the slope by less than what is repaired without it, and never far."""
    steps = [abs(sloped(2.0, std, seed)[0] - 2.0) for std in (1e-4, 1e-2, 1.0) for seed in range(3)]
    assert min(steps[:3]) > 0.8
    assert max(steps[6:]) < 0.5
    assert max(steps) < 1.5


def test_a_slope_is_one_more_release_with_its_own_share():
    method = calibrated(build("dp-fedgd"), 0.1, 0.05)
    assert [stage.queries[0].kind for stage in method.stages] == [
        Kind.GRADIENT,
        Kind.CALIBRATION,
        Kind.SLOPE,
        Kind.CALIBRATION,
    ]
    plan = so.Plan(method, 10, (100, 200), so.Privacy(2.0))
    assert spending.epsilon(plan) == pytest.approx(2.0)
    (group, *_) = spending.groups(plan)
    parts = {r.query: r.times * (r.sensitivity / r.std) ** 2 for r in group.releases}
    whole = sum(parts.values())
    assert parts["2.0 slope"] / whole == pytest.approx(0.05)
    assert (parts["1.0 calibration"] + parts["3.0 calibration"]) / whole == pytest.approx(0.1)


def test_the_numbers_of_a_slope_have_norm_at_most_root_two():
    model = so.Linear(1, 2, bias=False)
    theta = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for y in (0, 1):
        for odds in (*np.linspace(-12, 12, 97), 1e300, -1e300):
            x = torch.tensor([[odds]], dtype=torch.float64)
            one = model.slope_sum(theta, Shard(x, torch.tensor([y]), torch.ones(1).double()), math.inf)
            assert (one >= 0).all()
            assert float(one.norm()) <= math.sqrt(2)


@pytest.mark.parametrize(
    ("shares", "complaint"),
    [((0.0, 0.1), "set calibrate too"), ((0.1, 0.9), "together with calibrate"), ((0.1, -0.1), "must be above 0")],
)
def test_wrong_shares_of_a_slope_are_refused(shares, complaint):
    with pytest.raises(SordinoError, match=complaint):
        calibrated(build("dp-fedgd"), *shares)


def test_a_slope_needs_two_classes():
    with pytest.raises(
        SordinoError, match="calibrate_slope: it changes the slope of a linear model or of trees for two classes"
    ):
        run.prepare(Spec.of({"data": "digits", "method": "dp-fedgd", "calibrate": 0.1, "calibrate_slope": 0.1}))
