"""The account of random allocation: against quadrature, against `verify`'s own route, and against wrong samplers."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.evidence import verify
from sordino.privacy.accounting import allocation, events, subsampled
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler

STEP = 0.02
Z = np.arange(-9.0, 9.0, STEP) + STEP / 2
PLANE = np.outer(norm.pdf(Z), norm.pdf(Z)) * STEP**2  # of two standard normals


def ratio(mu, sign, bins, rounds):
    """The likelihood ratio of an epoch of two minibatches, or of the first of `bins`, on the plane."""
    w = np.exp(sign * mu * Z - mu * mu / 2)
    released = w[:, None] + w[None, :] if rounds == 2 else w[:, None] + 0 * w[None, :]
    return (bins - rounds + released) / bins


def exact(mu, way, alpha, bins, rounds):
    a, b = ratio(mu, 1, bins, rounds), ratio(mu, -1, bins, rounds)
    inside = {"remove": a - alpha, "add": 1 - alpha * a, "replace": a - alpha * b}[way]
    return float((PLANE * np.maximum(inside, 0)).sum())


def divergence(law, alpha):
    return float((law.masses * np.maximum(1 - alpha * np.exp(-law.losses), 0)).sum()) + law.infinite


@pytest.mark.parametrize(("bins", "rounds"), [(2, 2), (7, 2), (5, 1)])
@pytest.mark.parametrize("way", ["remove", "add", "replace"])
def test_the_pair_of_an_epoch_dominates_it_closely(bins, rounds, way):
    for mu in (0.3, 1.2) if way != "replace" else (0.9,):
        law = allocation.law(bins, rounds, mu, way, 1e-9, 0.03 if way != "replace" else 0.1, 1 << 16)
        for epsilon in (-1.0, -0.3, 0.0, 0.2, 0.7, 1.5):
            truth = exact(mu, way, math.exp(epsilon), bins, rounds)
            found = divergence(law, math.exp(epsilon))
            assert truth - 2e-6 <= found <= 1.03 * truth + 2e-4
        less = allocation.law(bins, rounds, 0.95 * mu, way, 1e-9, 0.03, 1 << 13)
        assert divergence(less, 1.0) < exact(mu, way, 1.0, bins, rounds) - 1e-5, "a shorter term is found out"


@pytest.mark.parametrize("adjacency", Adjacency)
def test_verify_finds_the_same(adjacency):
    twice = 1 + (adjacency is Adjacency.REPLACE_ONE)
    release = events.Release("x", 1.0 * twice, 1.5, 24, 0.1, Sampler.ALLOCATION)
    ours = events.epsilon([release], 1e-5, adjacency)
    (theirs,) = verify._epsilons([{**release._asdict(), "sampler": "allocation"}], (1e-5,), adjacency)
    assert 0.998 * theirs < ours < 1.01 * theirs


def test_the_same_draw_in_two_epochs_exceeds_the_account_of_two():
    """The wrong sampler: a record's minibatch is drawn once and for all. Two epochs are then one of sqrt(2) mu."""
    mu, epsilon = 0.8, 0.7
    account = subsampled.delta([SampledGaussian(0.5, mu, 4, Sampler.ALLOCATION)], epsilon, Adjacency.ADD_REMOVE)
    stuck = max(exact(math.sqrt(2) * mu, way, math.exp(epsilon), 2, 2) for way in ("remove", "add"))
    assert stuck > 1.05 * account


def test_allocation_needs_less_noise_than_poisson_under_add_remove():
    for bins, times, epsilon in ((10, 10, 1.0), (20, 100, 2.0)):
        poisson, allocated = (
            subsampled.multiplier(1 / bins, times, epsilon, 1e-5, Adjacency.ADD_REMOVE, sampler)
            for sampler in (Sampler.POISSON, Sampler.ALLOCATION)
        )
        assert allocated < 0.95 * poisson


def test_epochs_of_two_runs_are_not_one_epoch():
    """Half an epoch twice leaves a record in two releases, or in none; a whole one has it in one."""
    half = SampledGaussian(0.25, 1.0, 2, Sampler.ALLOCATION)
    parts, _ = subsampled._fold([half, half], Adjacency.ADD_REMOVE, 0.0)
    assert parts == (SampledGaussian(0.25, 1.0, 2, Sampler.ALLOCATION, 2),)
    parts, _ = subsampled._fold([half._replace(times=9)], Adjacency.ADD_REMOVE, 0.0)
    assert [(part.span, part.times) for part in parts] == [(1, 1), (4, 2)]


def test_an_epoch_costs_at_most_one_release_on_all_data():
    for mu in (0.5, 2.5, 6.0):
        release = [SampledGaussian(0.2, mu, 5, Sampler.ALLOCATION)]
        whole = subsampled.epsilon([SampledGaussian(1.0, mu, 1, Sampler.FULL)], 1e-5, Adjacency.ADD_REMOVE)
        assert subsampled.epsilon(release, 1e-5, Adjacency.ADD_REMOVE) <= whole * (1 + 1e-6)


def test_a_rate_that_is_no_number_of_minibatches_is_refused():
    with pytest.raises(SordinoError, match="whole number of minibatches"):
        subsampled.epsilon([SampledGaussian(0.3, 1.0, 2, Sampler.ALLOCATION)], 1e-5, Adjacency.ADD_REMOVE)
