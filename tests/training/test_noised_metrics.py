"""Metrics from noised tallies: right without noise, and honest intervals with it."""

import math

import numpy as np
import pytest
import torch
from scipy.special import expit

from sordino.core import Privacy
from sordino.data.records import Records
from sordino.models.linear import Linear, Loss
from sordino.models.tally import ErrorTally, ScoreTally, score_edges
from sordino.privacy.mechanisms.random import Seeded
from sordino.training import metrics, noised_metrics
from sordino.training.evaluation_plan import Settings, measure, plan_of, release, tally_of
from sordino.training.metrics import Task
from sordino.training.noised_metrics import Released, of_errors, of_scores
from tests.support import tiers

MODEL = Linear(1, 1, Loss.LOGISTIC, bias=False)
EDGES = score_edges(32)
ONE = torch.ones(1)


def draw(n, rng, shift=-1.0):
    z = 1.5 * rng.normal(size=n) + shift
    return z, (rng.random(n) < expit(0.9 * z)).astype(np.int64)


def released(z, y, std=0.0, rng=None):
    counted = ScoreTally(MODEL, EDGES)
    records = Records.of(z[:, None], y, np.zeros(len(y), int), dtype=torch.float64)
    total = counted.tally_sum(ONE.double(), records.shard(0), counted.clip).numpy() / len(y)
    if rng is not None:
        total = total + std * rng.normal(size=total.shape)
    widths = {block.name: std / block.weight for block in counted.layout}
    return Released(counted.split(total), widths, len(y))


def test_without_noise_the_estimates_are_the_metrics():
    z, y = draw(5000, np.random.default_rng(0))
    found, exact = of_scores(released(z, y), EDGES, 0.5, two_classes=True), metrics.full(Task.TWO_CLASSES, y, z)
    for name in ("accuracy", "sensitivity", "specificity", "brier", "mean_predicted", "observed"):
        assert found[name]["estimate"] == pytest.approx(exact[name], abs=1e-5), name
        assert found[name]["low"] < found[name]["estimate"] < found[name]["high"]
    assert abs(found["auc"]["estimate"] - exact["auc"]) <= found["auc"]["binning"]
    assert abs(found["auc"]["estimate"] - exact["auc"]) < 0.003
    assert found["predicted_minus_observed"]["estimate"] == pytest.approx(
        exact["mean_predicted"] - exact["observed"], abs=1e-5
    )
    assert 5 <= len(found["calibration_curve"]) <= 10
    for group in found["calibration_curve"]:
        inside = (expit(z) > group["from"]) & (expit(z) <= group["to"])
        assert group["observed"] == pytest.approx(y[inside].mean(), abs=1e-9)
        assert group["share"] == pytest.approx(inside.mean(), abs=1e-9)
        assert group["predicted"] == pytest.approx(expit(z[inside]).mean(), abs=0.02)


def test_totals_beside_the_cells_lower_the_noise():
    z, y = draw(2000, np.random.default_rng(1))
    shares = noised_metrics.estimate_shares(released(z, y, 0.01), below=16)
    everyone = np.repeat([0.0, 1.0], 32)
    alone = 0.01**2 * 32  # a sum of 32 noised cells
    assert shares.total(everyone)[1] < 0.15 * alone
    assert shares.f.sum() == pytest.approx(1.0)
    assert np.ones(64) @ shares.noise @ np.ones(64) == pytest.approx(0.0, abs=1e-12), "the number of records is public"


@pytest.mark.parametrize(("n", "std"), tiers([(1500, 0.008), (1500, 0.0), (6000, 0.002)], 2))
def test_intervals_cover_the_population(n, std):
    rng = np.random.default_rng(2)
    z, y = draw(400_000, rng)
    true = metrics.full(Task.TWO_CLASSES, y, z)
    true["brier_gain"] = y.mean() * (1 - y.mean()) - true["brier"]
    names = "accuracy", "auc", "sensitivity", "specificity", "brier", "brier_gain", "mean_predicted", "observed"
    repetitions = 200
    held = dict.fromkeys(names, 0)
    for _ in range(repetitions):
        rows = rng.integers(len(z), size=n)
        found = of_scores(released(z[rows], y[rows], std, rng), EDGES, 0.5, two_classes=True)
        for name in names:
            held[name] += found[name]["low"] <= true[name] <= found[name]["high"]
    # Of 200 intervals of 95 % fewer than 179 hold with a chance below 1 in 1,000.
    assert min(held.values()) >= 179, held
    assert held["accuracy"] < 200, "intervals that always hold are too wide"


def test_an_interval_without_the_noise_would_not_cover():
    """The mutant: the noise is not told to the estimates."""
    rng = np.random.default_rng(3)
    z, y = draw(400_000, rng)
    true, held = metrics.full(Task.TWO_CLASSES, y, z)["accuracy"], 0
    for _ in range(100):
        rows = rng.integers(len(z), size=6000)
        noisy = released(z[rows], y[rows], 0.01, rng)
        found = of_scores(noisy._replace(std=dict.fromkeys(noisy.std, 1e-12)), EDGES, 0.5, two_classes=True)
        held += found["accuracy"]["low"] <= true <= found["accuracy"]["high"]
    assert held < 80


def test_too_much_noise_leaves_a_ratio_open_instead_of_wrong():
    z, y = draw(100, np.random.default_rng(4), shift=-4.0)
    found = of_scores(released(z, y, 0.5, np.random.default_rng(5)), EDGES, 0.5, two_classes=True)
    assert found["auc"]["estimate"] is None
    assert (found["auc"]["low"], found["auc"]["high"]) == (0.0, 1.0)
    assert found["sensitivity"]["estimate"] is None
    for name in ("accuracy", "brier", "observed"):
        assert 0 <= found[name]["low"] <= found[name]["high"] <= 1
    assert len(found["calibration_curve"]) <= 1, "no group of bins stands out from the noise"


def test_scores_of_one_label_have_no_auc():
    z, _ = draw(500, np.random.default_rng(6))
    found = of_scores(released(z, np.zeros(500, np.int64)), EDGES, 0.5, two_classes=True)
    assert found["auc"]["estimate"] is None
    assert found["sensitivity"]["estimate"] is None
    assert found["observed"]["estimate"] == pytest.approx(0.0, abs=1e-12)


def test_quantities_have_errors_and_r2_in_their_unit():
    rng, n, unit = np.random.default_rng(7), 4000, 25.0
    y = rng.uniform(-1, 1, n)
    x = np.clip(y + 0.2 * rng.normal(size=n), -1, 1)
    counted = ErrorTally(Linear(1, 1, Loss.SQUARES, bias=False))
    records = Records.of(x[:, None], y, np.zeros(n, int), dtype=torch.float64)
    total = counted.tally_sum(ONE.double(), records.shard(0), counted.clip).numpy() / n
    found = of_errors(Released(counted.split(total), {b.name: 0.0 for b in counted.layout}, n), unit)
    exact = metrics.full(Task.QUANTITIES, unit * y, unit * x)
    for name in ("mae", "mse", "r2"):
        assert found[name]["estimate"] == pytest.approx(exact[name], rel=1e-3), name
        assert found[name]["low"] < found[name]["estimate"] < found[name]["high"]
    noisy = of_errors(Released(counted.split(total), {b.name: 0.02 for b in counted.layout}, n), unit)
    assert noisy["mae"]["high"] - noisy["mae"]["low"] > found["mae"]["high"] - found["mae"]["low"]


def test_many_classes_have_accuracy_and_confidence():
    settings = Settings(Task.MANY_CLASSES, 16, 0.5, Privacy(1e4, 1e-6))
    model, rng = Linear(4, 4, bias=False), np.random.default_rng(8)
    x, y = rng.normal(size=(900, 4)), rng.integers(4, size=900)
    theta = 2 * torch.eye(4).reshape(-1)
    records = Records.of(x, y, np.repeat([0, 1, 2], 300))
    plan = plan_of(settings, records.sizes)
    found = measure(settings, plan, release(plan, tally_of(settings, model), theta, records, Seeded(1)))
    right = x.argmax(1) == y
    assert found["accuracy"]["estimate"] == pytest.approx(right.mean(), abs=0.01)
    p = np.exp(2 * x.astype(np.float32))
    assert found["mean_predicted"]["estimate"] == pytest.approx((p.max(1) / p.sum(1)).mean(), abs=0.01)
    assert "auc" not in found


def test_sites_that_did_not_come_are_left_out():
    settings = Settings(Task.TWO_CLASSES, 16, 0.5, Privacy(2.0, 1e-6))
    plan, counted = plan_of(settings, (100, 300)), tally_of(settings)
    vector = np.zeros(counted.dimension)
    vector[:32] = 1 / 32
    vector[32:36] = 0.5 * 0.25
    whole = measure(settings, plan, vector)
    half = measure(settings, plan, 0.75 * vector, came=[1])
    assert (whole["records"], half["records"]) == (400, 300)
    assert half["accuracy"]["estimate"] == pytest.approx(whole["accuracy"]["estimate"])
    noise = plan_of(settings, (300,))
    assert half["noise"] == pytest.approx(measure(settings, noise, vector)["noise"])
    assert math.isfinite(half["auc"]["high"])


def verdict(z, y, std=0.0, rng=None):
    found = {"task": "two classes"} | of_scores(released(z, y, std, rng), EDGES, 0.5, two_classes=True)
    return noised_metrics.against_constant(found), noised_metrics.doubt(found)


def test_a_model_is_compared_with_a_constant_guess():
    rng = np.random.default_rng(20)
    z, y = draw(4000, rng)
    assert verdict(z, y) == (noised_metrics.BETTER, "")
    prior = np.log(y.mean() / (1 - y.mean()))
    told = verdict(np.full(4000, prior), y)
    assert told[0] != noised_metrics.BETTER, "the prevalence itself"
    assert "no better than a constant guess: its AUC is 0.5" in verdict(np.full(4000, 6.0), y)[1]
    backwards, why = verdict(prior - 0.3 * (z - z.mean()), y)
    assert backwards == noised_metrics.NO_BETTER
    assert "slightly better" not in why, "the interval excludes it"
    ranks, why = verdict(z - 5.0, y)
    assert ranks == noised_metrics.NO_BETTER
    assert "Brier score of the prevalence less that of the model is -0." in why, "in order, but risks are far too low"
    assert "AUC" not in why


def test_noise_leaves_the_comparison_open_and_says_so():
    rng = np.random.default_rng(21)
    z, y = draw(300, rng)
    found, why = verdict(z, y, 0.06, rng)
    assert found == noised_metrics.OPEN
    assert "do not show that the model is better" in why
    assert "narrow the interval" in why


def test_a_useless_model_is_rarely_called_better():
    """The wrong claim has at most the chance that one side of an interval misses."""
    rng, wrong = np.random.default_rng(23), 0
    for _ in range(200):
        z = 0.5 * rng.normal(size=1000) - 1
        wrong += verdict(z, (rng.random(1000) < 0.3).astype(np.int64), 0.004, rng)[0] == noised_metrics.BETTER
    assert wrong <= 5


@pytest.mark.parametrize(("task", "key"), [("quantities", "r2"), ("counts", "r2"), ("survival times", "concordance")])
def test_other_tasks_are_compared_by_one_metric(task, key):
    chance = noised_metrics.CHANCE[task][0][1]

    def told(value, low, high):
        found = {"task": task, key: {"estimate": value, "low": low, "high": high}}
        return noised_metrics.against_constant(found), noised_metrics.doubt(found)

    assert told(chance + 0.2, chance + 0.1, chance + 0.3) == (noised_metrics.BETTER, "")
    assert told(chance + 0.2, chance - 0.1, chance + 0.3)[0] == noised_metrics.OPEN
    assert told(None, chance - 0.1, chance + 0.3)[0] == noised_metrics.OPEN
    found, why = told(chance, chance - 0.1, chance + 0.1)
    assert found == noised_metrics.NO_BETTER
    assert "does not exclude" in why
    assert "does not exclude" not in told(chance - 0.2, chance - 0.3, chance - 0.1)[1]
    assert noised_metrics.against_constant({"task": "many classes"}) == noised_metrics.NOT_COMPARED
