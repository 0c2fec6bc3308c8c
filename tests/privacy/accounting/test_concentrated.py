"""Integer noise as a function of Gaussian noise: the lemma of `concentrated.SMOOTHING`, by exact sums."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from sordino.core import Adjacency
from sordino.privacy.accounting import concentrated, events, gaussian, subsampled
from sordino.privacy.accounting.concentrated import LEAST_SMOOTHED_VARIANCE, SMOOTHING
from sordino.privacy.accounting.events import Release
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler


def integers(variance):
    reach = int(40 * math.sqrt(variance)) + 20
    return np.arange(-reach, reach + 1)


def law(mean, variance, k):
    weight = np.exp(-((k - mean) ** 2) / (2 * variance))
    return weight / weight.sum()


def smoothed(mean, tau2, rho2, k):
    """The law of k: y from N(mean, tau2), then an integer near y."""
    y = np.arange(k[0] - 15, k[-1] + 15, 0.01)
    every = np.arange(k[0] - 30, k[-1] + 31)
    kernel = np.exp(-((every[:, None] - y) ** 2) / (2 * rho2))
    density = np.exp(-((y - mean) ** 2) / (2 * tau2)) / math.sqrt(2 * math.pi * tau2) * 0.01
    return (kernel @ (density / kernel.sum(0)))[30:-30]


@pytest.mark.parametrize(("tau2", "rho2"), [(0.05, 0.2), (2.0, 0.6), (9.0, 0.4), (9.0, 1.0)])
@pytest.mark.parametrize("mean", [0, 3])
def test_integer_noise_is_a_function_of_gaussian_noise_up_to_the_factor_of_the_lemma(tau2, rho2, mean):
    k = np.arange(-12, 13)
    eta = sum(math.exp(-2 * math.pi**2 * rho2 * j * j) for j in range(1, 9))
    wide = integers(tau2 + rho2)
    exact = dict(zip(wide.tolist(), law(mean, tau2 + rho2, wide), strict=True))
    ratio = np.log(smoothed(mean, tau2, rho2, k) / np.array([exact[int(j)] for j in k]))
    bound = 4 * eta / (1 - 2 * eta)
    assert np.abs(ratio).max() <= bound + 1e-9
    assert tau2 > 1 or np.abs(ratio).max() > bound / 10  # the bound is not idle


def hockey_stick(p, q, epsilon):
    return float(np.clip(p - math.exp(epsilon) * q, 0, None).sum())


def exact_delta(variance, shift, rate, epsilon, adjacency):
    """Of one release about a Poisson sample; a term moves the integers by `shift`, another one to the other side."""
    k = integers(variance)
    none = law(0, variance, k)
    one, other = ((1 - rate) * none + rate * law(s * shift, variance, k) for s in (1, -1))
    pair = (one, none) if adjacency is Adjacency.ADD_REMOVE else (one, other)
    return max(hockey_stick(*pair, epsilon), hockey_stick(*pair[::-1], epsilon))


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize("rate", [0.05, 0.4])
@pytest.mark.parametrize("mu", [0.4, 1.5])
def test_the_account_of_a_sample_holds_for_integer_noise(adjacency, rate, mu):
    variance = LEAST_SMOOTHED_VARIANCE
    shift = round(mu * math.sqrt(variance))
    ratio = SMOOTHING * shift / math.sqrt(variance)
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        exact = exact_delta(variance, shift, rate, epsilon, adjacency)
        claimed = subsampled.delta([SampledGaussian(rate, ratio, 1)], epsilon, adjacency)
        assert exact <= claimed
        assert exact > 0.9 * claimed or exact < 1e-7


def gaussian_delta(mu, rate, epsilon):
    """Of one Gaussian release about a sample, add-remove, in closed form."""

    def over(p):  # (1 - rate) N(0) + rate N(mu) against N(0), and the reverse
        grid = np.linspace(-12, 12 + mu, 60_001)
        cells = np.diff(ndtr(grid)), np.diff(ndtr(grid - mu))
        mixed = (1 - rate) * cells[0] + rate * cells[1]
        return hockey_stick(mixed, cells[0], p), hockey_stick(cells[0], mixed, p)

    return max(over(epsilon))


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_without_smoothing_the_account_is_broken(variance):
    """The wrong twin: integer noise accounted for as Gaussian noise of its own standard deviation."""
    shift, rate = 1, 0.4
    found = [
        exact_delta(variance, shift, rate, epsilon, Adjacency.ADD_REMOVE)
        / gaussian_delta(shift / math.sqrt(variance), rate, epsilon)
        for epsilon in np.linspace(0.01, 1.5, 40)
    ]
    assert max(found) > 1.1
    # With a kernel of variance 0.7 beneath, T is below 1e-5 and the account holds again.
    tau = math.sqrt(max(variance - 0.7, 0.25))
    fixed = [
        exact_delta(variance, shift, rate, epsilon, Adjacency.ADD_REMOVE)
        / gaussian_delta(shift / tau, rate, epsilon - 1e-5)
        for epsilon in np.linspace(0.01, 1.5, 40)
    ]
    assert max(fixed) <= 1 + 1e-4


def test_the_kernel_is_wide_enough_for_what_the_lemma_neglects():
    rho2 = LEAST_SMOOTHED_VARIANCE * (1 - SMOOTHING**-2)
    assert rho2 > 31
    nats = math.log(4) - 2 * math.pi**2 * rho2 + math.log(2.0**28 * 1e6 * 100)  # dimensions, rounds, answers
    assert nats < -500


def test_integers_beside_samples_count_as_gaussian_and_lose_what_may_fail():
    release = Release("g", 2.0, 3.0, 10, 0.1, Sampler.POISSON, events.SmoothedDiscreteGaussian.name)
    whole = Release("A", 1.0, 3.0, 1, mechanism=events.SmoothedDiscreteGaussian.name)
    both = events.epsilon([release, whole], 1e-6, Adjacency.REPLACE_ONE)
    plain = [r._replace(sensitivity=SMOOTHING * r.sensitivity, mechanism="gaussian") for r in (release, whole)]
    assert both == pytest.approx(events.epsilon(plain, 1e-6 - 11 * 2.0**-64, Adjacency.REPLACE_ONE), rel=1e-9)
    assert both > events.epsilon([r._replace(mechanism="gaussian") for r in (release, whole)], 1e-6, "replace-one")
    assert events.epsilon([release], 2.0**-61, Adjacency.REPLACE_ONE) == math.inf  # ten releases may fail
    alone = events.epsilon([whole], 1e-6, Adjacency.REPLACE_ONE)
    assert alone == pytest.approx(gaussian.epsilon(SMOOTHING / 3, concentrated.remaining(1e-6, 1)), rel=1e-12)
    assert alone < events.epsilon([whole._replace(mechanism="discrete-gaussian")], 1e-6, Adjacency.REPLACE_ONE)


def test_integers_on_a_sample_of_fixed_size_have_no_account():
    from sordino.errors import SordinoError

    release = Release("g", 2.0, 3.0, 10, 0.1, Sampler.FIXED, events.SmoothedDiscreteGaussian.name)
    with pytest.raises(SordinoError, match="no account of smoothed-discrete-gaussian noise on a fixed sample"):
        events.epsilon([release], 1e-6, Adjacency.REPLACE_ONE)
