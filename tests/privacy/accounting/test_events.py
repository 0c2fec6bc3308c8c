"""What lists of releases amount to, and that what is sampled is never read by another sampler's rule."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.evidence import second_account
from sordino.privacy.accounting import events, gaussian, subsampled
from sordino.privacy.accounting.events import Release
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler

ADD, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
POISSON, FIXED = Sampler.POISSON, Sampler.FIXED
DELTA = 1e-5


def release(sensitivity, std=1.0, times=5, rate=0.1, sampler=POISSON):
    return Release("0.0 gradient", sensitivity, std, times, rate, sampler)


@pytest.mark.parametrize(("adjacency", "terms"), [(ADD, 1), (REPLACE, 2)])
def test_sampled_releases_are_counted_in_terms_of_a_sum(adjacency, terms):
    """A clip of 1 is a sensitivity of 1 or 2, and the same mu of one term."""
    found = events.epsilon([release(terms * 1.0, 1.3)], DELTA, adjacency)
    assert found == subsampled.epsilon([SampledGaussian(0.1, 1 / 1.3, 5, POISSON)], DELTA, adjacency)
    assert found != events.epsilon([release(3 - terms, 1.3)], DELTA, adjacency)


def test_what_is_not_sampled_is_exact_and_a_rate_of_one_is_not_sampled():
    whole = release(1.0, 2.0, 9, 1.0, Sampler.FULL)
    assert events.epsilon([whole], DELTA, ADD) == gaussian.epsilon(1.5, DELTA)
    assert events.guess([whole], ADD) == pytest.approx(norm.cdf(0.75))
    assert events.split([whole], ADD) == ([], 1.5)
    drawn, mu = events.split([whole, release(2.0)], REPLACE)
    assert (drawn, mu) == ([SampledGaussian(0.1, 1.0, 5, POISSON)], 1.5)


def test_both_kinds_compose():
    """More than either alone, and less than everything as if nothing had been sampled."""
    whole, part = release(1.0, 2.0, 4, 1.0, Sampler.FULL), release(1.0, 0.8, 20)
    alone = [events.epsilon([r], DELTA, ADD) for r in (whole, part)]
    both = events.epsilon([whole, part], DELTA, ADD)
    assert max(alone) < both < gaussian.epsilon(events.mu([whole, part]), DELTA)
    assert both == subsampled.epsilon([SampledGaussian(0.1, 1.25, 20)], DELTA, ADD, gaussian_mu=1.0)


@pytest.mark.parametrize("std", [0.0, 1e-9])
def test_next_to_no_noise_promises_nothing(std):
    assert events.epsilon([release(1.0, std)], DELTA, ADD) > 1e6
    assert events.guess([release(1.0, std)], ADD) > 0.6


def test_samplers_are_never_crossed():
    with pytest.raises(SordinoError, match="rate"):
        events.epsilon([release(2.0, sampler=Sampler.FULL)], DELTA, REPLACE)
    for moved, adjacency in ((1.0, ADD), (2.0, REPLACE)):
        by = {
            sampler: events.epsilon([release(moved, sampler=sampler)], DELTA, adjacency) for sampler in (POISSON, FIXED)
        }
        assert by[FIXED] > 1.2 * by[POISSON]
        both = events.epsilon([release(moved, sampler=sampler) for sampler in (POISSON, FIXED)], DELTA, adjacency)
        assert by[FIXED] < both < by[FIXED] + by[POISSON]


@pytest.mark.parametrize(("sampler", "adjacency"), list(itertools.product([POISSON, FIXED], [ADD, REPLACE])))
def test_more_costs_more(sampler, adjacency):
    base = release(2.0, 1.5, 8, 0.1, sampler)
    found = events.epsilon([base], DELTA, adjacency)
    for worse in ({"sensitivity": 2.2}, {"std": 1.3}, {"times": 12}, {"rate": 0.12}):
        assert events.epsilon([base._replace(**worse)], DELTA, adjacency) > found * (1 + 1e-3)
    assert found < gaussian.epsilon(events.mu([base]), DELTA)


# ------------------------------------------------------------------------------------------------------------- guess


@pytest.mark.parametrize(("adjacency", "sensitivity"), [(ADD, 1.0), (REPLACE, 2.0)])
def test_the_guess_is_the_total_variation(adjacency, sensitivity):
    q, mu = 0.3, 1.4
    x = np.linspace(-12, 12, 200_001)
    with_it, mirrored = ((1 - q) * norm.pdf(x) + q * norm.pdf(x - k * mu) for k in (1, -1))
    other = mirrored if adjacency is REPLACE else norm.pdf(x)
    truth = (1 + np.maximum(with_it - other, 0).sum() * (x[1] - x[0])) / 2
    found = events.guess([release(sensitivity, 1 / mu, 1, q)], adjacency)
    assert truth * (1 - 1e-6) <= found <= truth + 2e-3
    assert events.guess([release(sensitivity, 1 / mu, 1, q / 2)], adjacency) < truth


@pytest.mark.parametrize(("adjacency", "sensitivity", "times"), [(ADD, 1.0, 2), (REPLACE, 2.0, 1)])
def test_the_guess_about_sampled_integers_is_the_total_variation(adjacency, sensitivity, times):
    """From the exact law of discrete Gaussian noise, of one release and of two, and by the second accountant."""
    q, shift, std = 0.3, 360, 256.0
    k = np.arange(-1900, 1901)

    def law(*places):
        weights = sum(w * np.exp(-((k - m) ** 2) / (2 * std**2)) for w, m in places)
        return weights / (std * math.sqrt(2 * math.pi))  # the sum over all integers, up to exp(-2 pi^2 std^2)

    with_it, mirrored, without = law((1 - q, 0), (q, shift)), law((1 - q, 0), (q, -shift)), law((1, 0))
    other = mirrored if adjacency is REPLACE else without
    one, two = (p if times == 1 else np.outer(p, p) for p in (with_it, other))
    truth = (1 + np.maximum(one - two, 0).sum()) / 2
    noised = release(sensitivity * shift, std, times, q)._replace(mechanism="smoothed-discrete-gaussian")
    found = events.guess([noised], adjacency)
    theirs = second_account.right_guess([noised._asdict()], 1e-5, adjacency)
    assert truth - 1e-8 <= found <= truth + 1e-3
    assert truth - 1e-8 <= theirs <= truth + 1e-3
    assert events.guess([noised._replace(rate=0.95 * q)], adjacency) < truth
    assert events.guess([noised._replace(std=1.05 * std)], adjacency) < truth


# ------------------------------------------------------------------------------- several answers about one minibatch


def test_answers_about_one_minibatch_cost_more_than_about_two():
    """... where noise and not chance is what hides: reading joint answers as separate ones promises too much."""
    one = events.epsilon([release(math.sqrt(2), 1.0, 10, 0.05)], DELTA, ADD)
    two = events.epsilon([release(1.0, 1.0, 20, 0.05)], DELTA, ADD)
    assert one > 1.2 * two


def test_answers_about_two_minibatches_may_cost_more_than_about_one():
    """... where chance is: a record has two chances. Neither account stands for the other (see Query.joint)."""
    one, two = (events.guess([release(s, 0.08, n, 0.01)], ADD) for s, n in ((math.sqrt(2), 1), (1.0, 2)))
    assert two > 0.5 + 1.9 * (one - 0.5)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("q", [0.02, 0.3, 0.8])
def test_no_second_answer_tells_more_than_the_opposite_one(q, epsilon):
    """Replace-one, after any first answer: w0 N(0) + w1 N(v) against w0 N(0) + w2 N(v') with |v|, |v'| <= C is told
    apart best for v = C = -v'. So the pair of sqrt(joint) C bounds answers that are chosen one after the other."""
    c, x = 1.3, np.linspace(-9, 9, 6001)
    first = np.linspace(-3, 3, 7)
    for a in first:  # the weights that a first answer a leaves
        w0, w1, w2 = (1 - q) * norm.pdf(a), q * norm.pdf(a - c), q * norm.pdf(a + c)

        def told(v, other, w0=w0, w1=w1, w2=w2):
            gap = w0 * norm.pdf(x) + w1 * norm.pdf(x - v)
            gap = gap - math.exp(epsilon) * (w0 * norm.pdf(x) + w2 * norm.pdf(x - other))
            return np.maximum(gap, 0).sum()

        most = told(c, -c)
        grid = [told(v, other) for v in np.linspace(-c, c, 7) for other in np.linspace(-c, c, 7)]
        assert max(grid) <= most * (1 + 1e-9) + 1e-15
        assert told(1.2 * c, -c) > most or most < 1e-12  # mutant: a longer vector would be seen


# ------------------------------------------------------------------------------------------------------------ coarse


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=60))
def test_coarse_rates_are_few_and_never_too_small(rates):
    rates = np.array(rates)
    found = events.coarse(rates, 8)
    assert (found >= rates).all()
    assert len(np.unique(found)) <= 8
    assert found.max() == rates.max()
    assert (found / rates <= (rates.max() / rates.min()) ** (1 / 8) * (1 + 1e-9)).all()


def test_coarse_rates_of_an_allocation_are_those_of_some_client():
    rates = 1 / np.arange(3, 90)
    found = events.coarse(rates, 8, attained=True)
    assert set(found) <= set(rates)
    assert len(set(found)) == 8
    assert (rates <= found).all()
    assert (found <= events.coarse(rates, 8)).all()


def test_rates_rounded_down_would_be_seen():
    rates = np.linspace(0.01, 0.5, 30)
    low, high = np.digitize(rates, np.unique(events.coarse(rates, 8))), events.coarse(rates, 8)
    assert len(np.unique(low)) > 1
    costs = [events.epsilon([release(1.0, rate=float(r))], DELTA, ADD) for r in (rates[10], high[10], 0.8 * rates[10])]
    assert costs[2] < costs[0] < costs[1]
