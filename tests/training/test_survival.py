"""Concordance, Kaplan-Meier and Brier scores: by hand, by brute force, and what censoring does to them."""

import math

import numpy as np
import pytest

from sordino.training import survival
from sordino.training.metrics import Task, full, score

EDGES = (1.0, 2.0, 4.0)


def pairs(y, risk):
    """Harrell's index by its definition."""
    good = total = 0.0
    for i in range(len(y)):
        for j in range(len(y)):
            first = y[i] > 0 and (abs(y[j]) > y[i] or (abs(y[j]) == y[i] and y[j] < 0))
            total += first
            good += first * (1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0)
    return good / total


@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_the_share_of_comparable_pairs_in_order(seed):
    rng = np.random.default_rng(seed)
    y = rng.choice([-1, 1], 60) * rng.integers(1, 12, 60)  # many equal times
    risk = rng.integers(0, 8, 60).astype(float)  # and equal risks
    assert survival.concordance(y.astype(float), risk) == pytest.approx(pairs(y, risk))
    late = -np.abs(y).astype(float)
    everybody = np.abs(y).astype(float)
    assert survival.concordance(everybody, late) == 1
    assert survival.concordance(everybody, -late) == 0


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("ties", [False, True])
def test_the_error_of_chance_is_that_of_risks_in_random_order(share, ties):
    """Over 2,000 orders the variance has a relative standard error of 3.2 %. The sum of all records' errors, as if the
    pairs were independent, is far below it."""
    rng = np.random.default_rng(5)
    y = np.where(rng.random(30) < share, 1, -1) * (rng.integers(1, 8, 30) if ties else rng.permutation(30) + 1.0)
    found = [survival.concordance(y.astype(float), rng.permutation(30).astype(float)) for _ in range(2000)]
    error = survival.chance_error(y.astype(float))
    assert np.var(found) == pytest.approx(error**2, rel=4 * 0.0317)
    assert np.mean(found) == pytest.approx(0.5, abs=4 * error / math.sqrt(2000))
    first = sum(
        a > 0 and (abs(b) > a or (abs(b) == a and b < 0)) for i, a in enumerate(y) for j, b in enumerate(y) if i != j
    )
    assert error**2 > 1.5 / (4 * first)


def test_the_error_of_chance_is_known_by_hand():
    """Two groups at two times are those of Mann and Whitney. Without pairs there is none."""
    y = np.array([1.0] * 7 + [-2.0] * 5)
    assert survival.chance_error(y) == pytest.approx(math.sqrt(13 / (12 * 7 * 5)))
    assert survival.chance_error(y, np.arange(12) // 3) == pytest.approx(math.sqrt(3 * 13 / (12 * 7 * 5)))
    assert math.isnan(survival.chance_error(np.array([-1.0, -2.0])))
    assert math.isnan(survival.chance_error(np.array([])))


def test_concordance_agrees_with_lifelines():
    lifelines = pytest.importorskip("lifelines.utils")
    rng = np.random.default_rng(1)
    y = rng.choice([-1, 1], 300) * rng.integers(1, 60, 300).astype(float)
    risk = np.round(rng.normal(size=300), 1)
    assert survival.concordance(y, risk) == pytest.approx(lifelines.concordance_index(np.abs(y), -risk, y > 0))


def test_what_has_no_concordance():
    assert math.isnan(survival.concordance(np.array([-1.0, -2.0]), np.array([1.0, 2.0])))
    assert math.isnan(survival.concordance(np.array([1.0, -2.0]), np.array([math.nan, 2.0])))
    assert math.isnan(survival.concordance(np.array([]), np.array([])))


def test_kaplan_meier_by_hand():
    """Five records: events at 1 and 3, one censored at 3 after that event, one at 2 and one at 5."""
    curve = survival.kaplan_meier(np.array([1.0, 2, 3, 3, 5]), np.array([True, False, True, False, False]))
    np.testing.assert_allclose(curve.values, [0.8, 0.8, 0.8 * 2 / 3, 0.8 * 2 / 3])
    assert curve.at(np.array([0.5, 1.0, 3.0, 99.0])).tolist() == pytest.approx([1, 0.8, 1.6 / 3, 1.6 / 3])
    assert curve.before(np.array([1.0, 3.0])).tolist() == pytest.approx([1, 0.8])


def test_without_censoring_the_brier_score_is_the_plain_one():
    rng = np.random.default_rng(2)
    y, predicted = rng.uniform(0.1, 6, 200), rng.uniform(0, 1, (200, 3))
    found = survival.brier_by_edge(y, predicted, EDGES)
    plain = [np.square((y > edge) - predicted[:, k]).mean() for k, edge in enumerate(EDGES)]
    assert found == pytest.approx(plain)
    assert survival.brier(y, predicted, EDGES) == pytest.approx(np.mean(plain))


def test_weights_repair_what_censoring_hides():
    """The score of the truth is that without censoring; leaving records out without weights is not."""
    rng, n = np.random.default_rng(3), 40_000
    time, seen = rng.exponential(3, n), rng.exponential(3, n)
    y = np.where(time <= seen, time, -seen)
    truth = np.exp(-np.array(EDGES) / 3)
    predicted = np.tile(truth, (n, 1))
    found = survival.brier_by_edge(y, predicted, EDGES)
    for k, edge in enumerate(EDGES):
        spread = 4 * 0.5 / math.sqrt(n)  # a weighted square has a standard deviation below 0.5
        assert abs(found[k] - truth[k] * (1 - truth[k])) < spread
        known = (y > 0) | (-y >= edge)
        unweighted = np.square((np.abs(y) > edge) - predicted[:, k])[known].mean()
        if k == 2:
            assert abs(unweighted - truth[k] * (1 - truth[k])) > 3 * spread  # the mutant: no weights


def test_an_edge_that_hardly_anybody_reaches_has_no_score():
    y = np.array([-0.5] * 99 + [3.0])
    scores = survival.brier_by_edge(y, np.full((100, 3), 0.5), EDGES)
    assert all(map(math.isnan, scores))
    assert math.isnan(survival.brier(y, np.full((100, 3), 0.5), EDGES))
    assert all(map(math.isnan, survival.brier_by_edge(np.array([]), np.zeros((0, 3)), EDGES)))


def test_metrics_of_survival():
    y = np.array([0.5, 1.5, -3.0, -4.0, 3.0])
    logits = np.array([2.0, 1.0, -1.0, -2.0, 0.0])[:, None] + np.array([-1.0, -0.5, 0.0])
    found = full(Task.SURVIVAL, y, logits, edges=EDGES)
    assert found["concordance"] == 1
    share = survival.survival_of(logits)
    np.testing.assert_allclose(share[:, 1], 1 / (1 + np.exp(logits[:, 0])) / (1 + np.exp(logits[:, 1])))
    assert found["brier"] == pytest.approx(survival.brier(y, share, EDGES))
    curve = found["survival_curve"]
    assert [row["time"] for row in curve] == list(EDGES)
    assert curve[0]["observed"] == pytest.approx(0.8)
    assert curve[1]["predicted"] == pytest.approx(share[:, 1].mean())
    diverged = score(Task.SURVIVAL, y, logits * math.nan, edges=EDGES)
    assert diverged == {"concordance": None, "brier": None}
    assert full(Task.SURVIVAL, y[:0], logits[:0], edges=EDGES)["survival_curve"] == []


def test_metrics_of_counts():
    sk = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    rate = rng.uniform(0.5, 6, 100)
    y = rng.poisson(rate)
    found = full(Task.COUNTS, y, rate)
    assert found["deviance"] == pytest.approx(sk.mean_poisson_deviance(y, rate))
    assert found["d2"] == pytest.approx(sk.d2_tweedie_score(y, rate, power=1))
    assert found["mae"] == pytest.approx(np.abs(y - rate).mean())
    assert (found["mean_predicted"], found["observed"]) == (pytest.approx(rate.mean()), pytest.approx(y.mean()))
    assert full(Task.COUNTS, np.zeros(3), np.ones(3))["d2"] is None, "a constant has no deviance to explain"
    assert full(Task.COUNTS, np.ones(3), np.zeros(3))["deviance"] is None
