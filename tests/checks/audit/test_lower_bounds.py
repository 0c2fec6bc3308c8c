"""Lower bounds hold as often as they say. Rates of failure are held against 5 % plus 4 standard errors."""

import math
from functools import partial

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from sordino.checks.audit.lower_bounds import (
    best_guesses,
    best_threshold,
    by_gaussian,
    by_one_run,
    by_one_run_gaussian,
    by_thresholds,
    one_run_mu,
    one_run_p_value,
    upper,
)
from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian

DELTA = 1e-5


def allowed(rate, repetitions):
    return rate + 4 * math.sqrt(rate * (1 - rate) / repetitions)


def two_samples(rng, mu, runs):
    """Log likelihood ratios of a mu-GDP pair."""
    return [mu * rng.normal(size=runs) + sign * mu**2 / 2 for sign in (-1, 1)]


def ideal(mu, runs):
    """The same without chance: quantiles."""
    grid = ndtri((np.arange(runs) + 0.5) / runs)
    grid = np.random.default_rng(0).permutation(grid)
    return [mu * grid + sign * mu**2 / 2 for sign in (-1, 1)]


# ------------------------------------------------------------------------------------------------------------ coverage


@pytest.mark.parametrize("threshold", [0.0, 0.1, None])
def test_the_gaussian_bound_exceeds_the_truth_in_one_of_twenty(threshold):
    rng, mu, repetitions = np.random.default_rng(1), 0.4, 1500
    bounds = [by_gaussian(*two_samples(rng, mu, 400), delta=DELTA, threshold=threshold) for _ in range(repetitions)]
    failures = np.mean([bound.mu > mu for bound in bounds])
    assert failures <= allowed(0.05, repetitions)
    if threshold == 0.0:
        assert failures > 0.02, "at the best threshold the bound is nearly exact"


def test_a_bound_of_less_confidence_would_be_caught():
    rng, mu, repetitions = np.random.default_rng(2), 0.4, 1500
    bounds = [
        by_gaussian(*two_samples(rng, mu, 400), delta=DELTA, threshold=0, confidence=0.8) for _ in range(repetitions)
    ]
    assert np.mean([bound.mu > mu for bound in bounds]) > allowed(0.05, repetitions)


def test_errors_of_two_kinds_are_as_good_as_errors_of_one():
    """Hoeffding: with unequal rates too the pooled count is safe. Worlds told apart by one point mass."""
    rng, repetitions, runs, rate = np.random.default_rng(3), 2000, 200, 0.3
    mu = -2 * float(ndtri((1 - rate) / 2))  # false negatives 1 - rate, false positives none
    failures = 0
    for _ in range(repetitions):
        one = (rng.random(runs) < rate).astype(float)
        failures += by_gaussian(np.zeros(runs), one, delta=DELTA, threshold=0.5).mu > mu
    assert failures / repetitions <= allowed(0.05, repetitions)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_threshold_bound_holds_for_randomised_response(epsilon):
    """The pair for which it is tight."""
    rng, repetitions = np.random.default_rng(4), 1500
    q = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(repetitions):
        zero, one = rng.random(400) < 1 - q, rng.random(400) < q
        bounds.append(by_thresholds(zero, one, delta=0.0).epsilon)
    assert np.mean(np.array(bounds) > epsilon) <= allowed(0.05, repetitions)
    assert np.median(bounds) > 0.4 * epsilon


def test_scores_may_not_choose_their_own_threshold():
    """Equal data sets: with an honest threshold one in twenty finds something; with the best of all, many do."""
    rng, repetitions, honest, greedy = np.random.default_rng(5), 1000, 0, 0
    for _ in range(repetitions):
        zero, one = rng.normal(size=(2, 300))
        honest += by_gaussian(zero, one, delta=DELTA).mu > 0
        greedy += max(by_gaussian(zero, one, delta=DELTA, threshold=t).mu for t in np.linspace(-1, 1, 9)) > 0
    assert honest / repetitions <= allowed(0.05, repetitions)
    assert greedy / repetitions > allowed(0.05, repetitions)


def test_one_run_holds_for_randomised_response():
    rng, repetitions, epsilon, canaries = np.random.default_rng(6), 2000, 1.0, 500
    right = rng.binomial(canaries, 1 / (1 + math.exp(-epsilon)), size=repetitions)
    known = {v: by_one_run(canaries, canaries, v, delta=0.0) for v in set(right.tolist())}
    bounds = np.array([known[v] for v in right.tolist()])
    assert (bounds > epsilon).mean() <= allowed(0.05, repetitions)
    assert np.median(bounds) > 0.7 * epsilon


def guessed(rng, mu, canaries, guesses):
    """The right ones among the surest guesses about a Gaussian mechanism with a coordinate for each canary."""
    coins = rng.integers(2, size=canaries)
    score = mu * (2 * coins - 1) / 2 + rng.normal(size=canaries)
    sure = np.argsort(-np.abs(score))[:guesses]
    return int(((score[sure] > 0) == coins[sure]).sum())


def repeated(rng, mu, canaries, guesses, repetitions, bound):
    """The bounds of many single runs."""
    right = [guessed(rng, mu, canaries, guesses) for _ in range(repetitions)]
    known = {v: bound(canaries, guesses, v) for v in set(right)}
    return np.array([known[v] for v in right])


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_one_run_holds_for_the_gaussian_mechanism(epsilon):
    rng, mu, canaries = np.random.default_rng(7), gaussian.mu(epsilon, DELTA), 1000
    guesses = best_guesses(canaries, mu, delta=DELTA)
    bounds = repeated(rng, mu, canaries, guesses, 300, partial(by_one_run, delta=DELTA))
    assert np.mean(bounds > epsilon) <= allowed(0.05, 300)
    assert np.median(bounds) > 0.15 * epsilon


@pytest.mark.parametrize("epsilon", [0.25, 4.0])
def test_one_run_under_gaussian_dp_holds_and_is_tighter(epsilon):
    rng, mu, canaries = np.random.default_rng(8), gaussian.mu(epsilon, DELTA), 1000
    guesses = best_guesses(canaries, mu, delta=DELTA, gaussian_dp=True)
    bounds = repeated(rng, mu, canaries, guesses, 1000, partial(by_one_run_gaussian, delta=DELTA))
    assert np.mean(bounds > epsilon) <= allowed(0.05, 1000)
    if epsilon == 4.0:
        plain = repeated(
            rng, mu, canaries, best_guesses(canaries, mu, delta=DELTA), 300, partial(by_one_run, delta=DELTA)
        )
        assert np.median(bounds) > 1.3 * np.median(plain)


def test_a_one_run_bound_of_less_confidence_would_be_caught():
    """At small mu the bound is nearly exact: at a confidence of 0.8 it exceeds the truth in 8 to 20 % of the runs."""
    rng, mu, canaries = np.random.default_rng(9), 0.05, 60
    bounds = repeated(rng, mu, canaries, canaries, 2000, partial(one_run_mu, confidence=0.8))
    failures = np.mean(bounds > mu)
    assert 0.08 < failures <= allowed(0.2, 2000)
    assert failures > allowed(0.05, 2000), "a bound of too little confidence would be caught"


def test_a_one_run_bound_that_forgets_the_abstentions_would_be_caught():
    """The surest guesses are right more often than a guess about any one canary: all canaries count."""
    rng, mu, canaries, guesses = np.random.default_rng(10), 1.0, 4000, 60
    bounds = repeated(rng, mu, canaries, guesses, 300, lambda _, guesses, right: one_run_mu(guesses, guesses, right))
    assert np.mean(bounds > mu) > allowed(0.05, 300)


def test_the_inequality_of_one_run_holds_for_the_gaussian_mechanism():
    """E[X; X >= t] / m <= F(E[k - X; X >= t - 1] / m), where every canary is guessed, so that X is binomial."""
    mu, m = 1.0, 200
    values = np.arange(m + 1)
    chances = binom.pmf(values, m, ndtr(mu / 2))
    upper_tails = np.cumsum((values * chances)[::-1])[::-1][1:] / m
    lower_tails = np.cumsum(((m - values) * chances)[::-1])[::-1][:-1] / m

    def excess(mu):
        return (upper_tails - ndtr(ndtri(lower_tails) + mu)).max()

    assert excess(mu) <= 1e-12
    assert excess(0.8 * mu) > 0.01, "a smaller mu would pass: the inequality says nothing"


def test_without_leak_one_run_is_a_binomial_test():
    """At mu = 0 the recursion refutes what a test of fair coins refutes, up to one guess."""
    for guesses in (20, 100, 400):
        critical = int(binom.isf(0.05, guesses, 0.5)) + 1  # the first number of right guesses with chance <= 5 %
        assert one_run_mu(1000, guesses, critical - 1) == 0
        assert one_run_mu(1000, guesses, critical + 1) > 0


# ------------------------------------------------------------------------------------------------------ known numbers


def test_the_published_value_of_one_run():
    """arXiv 2305.08846, appendix D."""
    assert by_one_run(1000, 100, 75, delta=1e-4) == pytest.approx(0.673, abs=5e-4)


def test_without_delta_one_run_is_clopper_and_pearson():
    low = beta.ppf(0.05, 80, 100 - 80 + 1)
    assert by_one_run(1000, 100, 80, delta=0.0) == pytest.approx(math.log(low / (1 - low)), abs=1e-9)
    assert one_run_p_value(100, 10, 0, epsilon=1.0, delta=0.1) == 1.0
    assert one_run_p_value(100, 10, 8, epsilon=1.0, delta=0.0) < one_run_p_value(100, 10, 8, epsilon=1.0, delta=1e-4)


def test_upper_is_the_clopper_pearson_bound_up_to_its_ends():
    counts = np.array([0, 1, 7, 99, 100])
    assert upper(counts, 100, 0.025)[:4] == pytest.approx(beta.ppf(0.975, counts[:4] + 1, 100 - counts[:4]))
    assert upper(counts, 100, 0.025)[4] == 1.0
    assert upper(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))


def test_many_runs_come_near_the_truth():
    mu = gaussian.mu(1.0, DELTA)
    bound = by_gaussian(*ideal(mu, 200_000), delta=DELTA, threshold=0.0)
    assert 0.95 < bound.epsilon < 1.0
    assert bound.false_positive_rate == pytest.approx(float(ndtr(-mu / 2)), abs=1e-4)


# ----------------------------------------------------------------------------------------------------------- order


def test_more_is_more():
    for bound in (by_gaussian, by_thresholds):
        apart = [bound(*ideal(mu, 4000), delta=DELTA).epsilon for mu in (0.2, 0.4, 0.8, 1.6)]
        assert apart == sorted(apart)
        assert apart[-1] > 1
        runs = [bound(*ideal(0.8, n), delta=DELTA).epsilon for n in (400, 4000, 40_000)]
        assert runs == sorted(runs)
        sure = [bound(*ideal(0.8, 4000), delta=DELTA, confidence=c).epsilon for c in (0.99, 0.95, 0.8)]
        assert sure == sorted(sure)
    right = [by_one_run(1000, 200, v, delta=DELTA) for v in range(0, 201, 10)]
    assert right == sorted(right)
    assert by_one_run(1000, 200, 150, delta=1e-3) < by_one_run(1000, 200, 150, delta=1e-6)
    right = [one_run_mu(1000, 200, v) for v in range(0, 201, 20)]
    assert right == sorted(right)
    assert one_run_mu(2000, 200, 180) < one_run_mu(200, 200, 180)
    assert one_run_mu(200, 200, 180) > one_run_mu(200, 200, 180, confidence=0.99)


def test_a_planned_threshold_moves_outward_with_the_runs():
    found = [best_threshold(0.27, runs, delta=DELTA) / 0.27 for runs in (1000, 10_000, 100_000)]
    assert 0 < found[0] < found[1] < found[2] < 4
    assert best_guesses(1000, 3.0, delta=DELTA) < 1000


# ------------------------------------------------------------------------------------------------------------ the ends


def test_scores_that_tell_nothing():
    for bound in (by_gaussian, by_thresholds):
        assert bound(np.ones(100), np.ones(100), delta=DELTA).epsilon == 0
        assert bound(np.zeros(100), np.zeros(5000), delta=DELTA).runs <= 100, "as many of one data set as of the other"
    assert by_gaussian(np.ones(100), np.zeros(100), delta=DELTA, threshold=0.5).epsilon == 0, "wrong is not right"
    assert by_one_run(100, 0, 0, delta=DELTA) == by_one_run_gaussian(100, 0, 0, delta=DELTA) == 0
    assert by_one_run(100, 100, 50, delta=DELTA) == 0


def test_scores_that_tell_all():
    for bound in (by_gaussian, by_thresholds):
        found = bound(np.zeros(1000), np.ones(1000), delta=DELTA)
        assert 2 < found.epsilon < math.inf
        assert found.false_positive_rate == found.false_negative_rate == 0
    assert 3 < by_one_run(1000, 1000, 1000, delta=0.0) < math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_gaussian(np.zeros(5), np.ones(5), delta=DELTA), "runs: 5 per data set"),
        (lambda: by_thresholds([math.nan] * 50, np.ones(50), delta=DELTA), "scores: some are not finite"),
        (lambda: by_gaussian(np.zeros(50), np.ones(50), delta=DELTA, confidence=1.0), "confidence: 1.0"),
        (lambda: by_gaussian(np.zeros(50), np.ones(50), delta=DELTA, confidence=0.5), "confidence: 0.5"),
        (lambda: by_thresholds(np.zeros(50), np.ones(50), delta=2.0), "delta: 2.0"),
        (lambda: by_one_run(10, 5, 6, delta=DELTA), "guesses: 6 right of 5"),
        (lambda: by_one_run(10, 5, 5, delta=-1), "delta: -1"),
        (lambda: one_run_mu(10, 5, 6), "guesses: 6 right of 5"),
        (lambda: by_one_run_gaussian(10, 5, 5, delta=DELTA, confidence=1.0), "confidence: 1.0"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(SordinoError, match=message):
        call()
