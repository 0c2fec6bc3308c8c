"""The accountant for sampled releases against pinned figures, quadrature, and dp-accounting."""

import itertools
import math
import multiprocessing

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import pld, rdp

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.evidence import second_account
from sordino.privacy.accounting import gaussian, subsampled
from sordino.privacy.accounting.slots import OVERFLOW
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler
from tests.support import tiers

ADD, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
POISSON, FIXED = Sampler.POISSON, Sampler.FIXED
RELATION = {ADD: dp.NeighboringRelation.ADD_OR_REMOVE_ONE, REPLACE: dp.NeighboringRelation.REPLACE_ONE}
PINNED = [  # q = 0.016, multiplier 1, delta 1e-5: sampler, adjacency, steps, epsilon, half a unit of its last digit
    (POISSON, ADD, 200, 1.476, 5e-4),
    (POISSON, ADD, 2000, 4.363, 5e-4),
    (POISSON, REPLACE, 200, 2.03, 5e-3),
    (POISSON, REPLACE, 2000, 7.22, 5e-3),
    (FIXED, ADD, 200, 7.872, 5e-4),
    (FIXED, ADD, 2000, 20.80, 5e-3),
    (FIXED, REPLACE, 200, 11.05, 5e-3),
    (FIXED, REPLACE, 2000, 33.35, 5e-3),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    return tmp_path


def pessimistic(releases, delta, adjacency, interval, gaussian_mu=0.0):
    """dp-accounting's PLD epsilon, an upper bound too; its multiplier is std/clip whatever the adjacency.

    Its plain Gaussian doubles under REPLACE_ONE as its sampled one does, so an unsampled mu is given as half.
    """
    accountant = pld.PLDAccountant(RELATION[adjacency], interval)
    for rate, mu, times, *_ in releases:
        event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1 / mu))
        accountant.compose(dp.SelfComposedDpEvent(event, times))
    if gaussian_mu:
        accountant.compose(dp.GaussianDpEvent((1 + (adjacency is REPLACE)) / gaussian_mu))
    return accountant.get_epsilon(delta)


def hockey_stick(q, mu, epsilon, way):
    """∫ max(p - e^epsilon r, 0) by the trapezoidal rule, fine enough that the kink costs a part in 1e9."""
    x = np.linspace(-12, 2 * mu + 12, 400_001)

    def normal(shift):
        return np.exp(-((x - shift) ** 2) / 2) / math.sqrt(2 * math.pi)

    plus, minus, far = ((1 - q) * normal(0) + q * normal(shift) for shift in (mu, -mu, 2 * mu))
    pairs = {"remove": (plus, normal(0)), "add": (normal(0), plus), "replace": (plus, minus), "vacate": (far, plus)}
    p, r = pairs[way]
    return float(np.maximum(p - math.exp(epsilon) * r, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(("sampler", "adjacency", "times", "epsilon", "digit"), PINNED)
def test_epsilon_agrees_with_pinned_figures(sampler, adjacency, times, epsilon, digit):
    found = subsampled.epsilon([SampledGaussian(0.016, 1.0, times, sampler)], 1e-5, adjacency)
    assert abs(found - epsilon) <= 1.1 * digit + 1e-3 * epsilon


@pytest.mark.parametrize(("sampler", "adjacency", "times", "epsilon", "digit"), PINNED)
def test_halved_sigma_is_not_the_pinned_figure(sampler, adjacency, times, epsilon, digit):
    """What reading std/(2 clip) for std/clip, or the other way round, would give."""
    for factor in (0.5, 2.0):
        found = subsampled.epsilon([SampledGaussian(0.016, factor, times, sampler)], 1e-5, adjacency)
        assert abs(found - epsilon) > 0.2 * epsilon


def test_one_direction_is_not_enough():
    """Removing a record costs more than adding one: an accountant of the latter alone misses the pinned figure."""
    parts = (SampledGaussian(0.016, 1.0, 200),)
    remove, add = (subsampled._refined(parts, 0.0, way, 1e-5 * (1 - OVERFLOW)) for way in ("remove", "add"))
    assert add < 0.9 * remove
    assert subsampled.epsilon(parts, 1e-5, ADD) == remove


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_conventions_at_rate_one(adjacency):
    """dp-accounting's PLD reads std/clip under REPLACE_ONE with the sampled event, its RDP reads std/(2 clip)."""
    mu, times, delta = 0.1, 25, 1e-5
    twice = 1 + (adjacency is REPLACE)
    exact = gaussian.epsilon(twice * mu * math.sqrt(times), delta)
    for sampler in Sampler:
        assert subsampled.epsilon([SampledGaussian(1.0, mu, times, sampler)], delta, adjacency) == exact
    assert subsampled.delta([SampledGaussian(1.0, mu, times)], exact, adjacency) == pytest.approx(delta, rel=1e-9)
    # A rate next to 1 is accounted on the grid, and must come out next to the closed form.
    for sampler in (POISSON, FIXED):
        near = subsampled.epsilon([SampledGaussian(1 - 1e-9, mu, times, sampler)], delta, adjacency)
        assert near == pytest.approx(exact, rel=1e-3)
    assert pessimistic([SampledGaussian(1.0, mu, times, POISSON)], delta, adjacency, 1e-4) == pytest.approx(
        exact, rel=5e-3
    )
    if adjacency is REPLACE:
        loose = rdp.RdpAccountant(neighboring_relation=RELATION[REPLACE])
        event = dp.SampledWithoutReplacementDpEvent(10, 10, dp.GaussianDpEvent(1 / (2 * mu)))
        renyi = loose.compose(dp.SelfComposedDpEvent(event, times)).get_epsilon(delta)
        assert exact < renyi < 1.2 * exact


@pytest.mark.parametrize(("q", "mu"), [(0.01, 1.0), (0.2, 0.7), (0.5, 2.0), (0.9, 0.3), (1e-4, 2.0)])
@pytest.mark.parametrize("way", ["remove", "add", "replace"])
def test_one_release_by_quadrature(q, mu, way):
    most = -math.log1p(-q) if way == "add" else math.inf
    for epsilon in (0.3 * min(most, 1.0), 0.9 * min(most, 2.0)):
        truth = hockey_stick(q, mu, epsilon, way)
        if truth < 1e-14:
            continue
        found = subsampled._delta_at(subsampled._curve((SampledGaussian(q, mu, 1),), 0.0, way, truth, epsilon), epsilon)
        assert truth * (1 - 1e-8) <= found <= truth * 1.005


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_delta_of_one_release_by_quadrature(adjacency):
    for q, mu, epsilon in ((0.1, 1.0, 1.0), (0.5, 2.0, 5.0), (0.02, 1.5, 3.0)):
        ways = ("replace",) if adjacency is REPLACE else ("remove", "add")
        truth = max(hockey_stick(q, mu, epsilon, way) for way in ways)
        found = subsampled.delta([SampledGaussian(q, mu, 1)], epsilon, adjacency)
        assert truth * (1 - 1e-8) <= found <= truth * 1.005
        assert (
            epsilon * (1 - 1e-9) <= subsampled.epsilon([SampledGaussian(q, mu, 1)], truth, adjacency) <= epsilon * 1.005
        )


# The interval is what dp-accounting needs for its own error to be well below one percent. It is itself an upper bound
# by the same construction, so the truth lies at most T interval² (theta + 1) / 8 below it: under a part in a thousand.
CASES = [
    ([SampledGaussian(1e-4, 0.5, 100_000)], 0.0, 1e-5, 2e-6),
    ([SampledGaussian(1e-4, 1 / 0.65283, 100)], 0.0, 1e-9, 1e-4),  # rare large losses
    ([SampledGaussian(0.5, 1.0, 10)], 0.0, 1e-5, 5e-4),
    ([SampledGaussian(0.5, 0.1, 10)], 0.0, 1e-9, 5e-5),
    ([SampledGaussian(0.01, 0.5, 1000)], 0.0, 1e-6, 5e-5),
    ([SampledGaussian(0.2, 0.2, 500)], 0.0, 1e-5, 1e-4),
    ([SampledGaussian(1e-3, 0.8, 10_000)], 0.0, 1e-8, 3e-5),
    ([SampledGaussian(0.016, 1.0, 2000)], 0.0, 1e-5, 1e-4),
    ([SampledGaussian(0.02, 0.8, 300), SampledGaussian(0.1, 0.3, 50)], 0.0, 1e-5, 1e-4),
    ([SampledGaussian(0.01, 0.7, 400)], 0.3, 1e-6, 1e-4),
    ([SampledGaussian(0.05, 0.4, 100), SampledGaussian(0.3, 0.1, 20)], 1.0, 1e-7, 1e-4),
]


@pytest.mark.parametrize(
    ("case", "adjacency"),
    tiers(
        itertools.product(range(len(CASES)), [ADD, REPLACE]),
        [(k, (ADD, REPLACE)[k // 2 % 2]) for k in range(0, len(CASES), 2)],
    ),
)
def test_against_dp_accounting(case, adjacency):
    releases, mu, delta, interval = CASES[case]
    other = pessimistic(releases, delta, adjacency, interval, mu)
    found = subsampled.epsilon(releases, delta, adjacency, mu)
    assert other * 0.997 <= found <= other * 1.01
    assert subsampled.delta(releases, found, adjacency, mu) == pytest.approx(delta, rel=0.02)


@pytest.mark.parametrize(("q", "times", "epsilon", "adjacency"), [(0.01, 500, 1.0, ADD), (0.1, 50, 3.0, REPLACE)])
def test_multiplier_against_dp_accounting(q, times, epsilon, adjacency):
    found = subsampled.multiplier(q, times, epsilon, 1e-5, adjacency, POISSON)
    assert subsampled.epsilon([SampledGaussian(q, 1 / found, times)], 1e-5, adjacency) <= epsilon
    interval = 1e-4
    assert pessimistic([SampledGaussian(q, 1 / (found * 1.005), times)], 1e-5, adjacency, interval) <= epsilon
    assert pessimistic([SampledGaussian(q, 1 / (found * 0.99), times)], 1e-5, adjacency, interval) > epsilon


@pytest.mark.parametrize(
    ("q", "times", "epsilon", "delta"),
    [(1e-4, 100_000, 0.1, 1e-9), (1e-4, 100, 20.0, 1e-3), (0.3, 1, 0.1, 1e-9), (0.99, 100, 20.0, 1e-9)],
)
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_multiplier_at_the_ends(q, times, epsilon, delta, adjacency):
    found = subsampled.multiplier(q, times, epsilon, delta, adjacency, POISSON)
    assert subsampled.epsilon([SampledGaussian(q, 1 / found, times)], delta, adjacency) <= epsilon
    assert subsampled.epsilon([SampledGaussian(q, 1.002 / found, times)], delta, adjacency) > epsilon


def test_scale_covers_the_gaussian_part():
    releases, mu = [SampledGaussian(0.05, 1.0, 100), SampledGaussian(0.2, 0.3, 10)], 0.8
    for adjacency in (ADD, REPLACE):
        s = subsampled.scale(releases, 1.0, 1e-5, adjacency, mu)

        def spent(s, adjacency=adjacency):
            return subsampled.epsilon([r._replace(mu=r.mu / s) for r in releases], 1e-5, adjacency, mu / s)

        assert spent(s) <= 1.0 < spent(s / 1.002)
    assert subsampled.scale([], 1.0, 1e-5, ADD, mu) == mu / gaussian.mu(1.0, 1e-5)
    assert subsampled.scale([SampledGaussian(1.0, 0.5, 16)], 1.0, 1e-5, REPLACE) == 4.0 / gaussian.mu(1.0, 1e-5)


@pytest.mark.parametrize(("sampler", "adjacency"), list(itertools.product([POISSON, FIXED], [ADD, REPLACE])))
def test_epsilon_grows_with_rate_mu_and_releases(sampler, adjacency):
    def spent(q=0.05, mu=0.5, times=50, delta=1e-6):
        return subsampled.epsilon([SampledGaussian(q, mu, times, sampler)], delta, adjacency)

    for name, values in {
        "q": (0.001, 0.01, 0.1, 0.5, 0.9, 1.0),
        "mu": (0.05, 0.2, 0.6, 1.5, 4.0),
        "times": (1, 2, 10, 200, 5000),
    }.items():
        found = [spent(**{name: value}) for value in values]
        assert found == sorted(found)
        assert len(set(found)) == len(found)
    assert spent(delta=1e-4) < spent(delta=1e-8)


# ------------------------------------------------------------------------------------------- samples of a fixed size

FIXED_CASES = [(0.016, 1.0, 200, 0.0), (0.01, 0.2, 1000, 0.0), (0.1, 0.1, 50, 0.3), (0.6, 0.5, 10, 0.0)]


@pytest.mark.parametrize(("q", "mu", "times", "beside"), FIXED_CASES)
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_fixed_against_dp_accounting(q, mu, times, beside, adjacency):
    """The second account finds the profile of one release by bisection; dp-accounting discretizes and composes it."""
    releases, delta, terms = [SampledGaussian(q, mu, times, FIXED)], 1e-5, 1 + (adjacency is REPLACE)
    steps = [second_account.Step(1.0, terms * mu, times, q, FIXED, "gaussian")]
    steps += [second_account.Step(1.0, beside, 1, 1.0, Sampler.FULL, "gaussian")] if beside else []
    found = subsampled.epsilon(releases, delta, adjacency, beside)
    other = second_account._by_profiles(steps, found * 2e-4, adjacency).epsilon(delta)
    assert found == pytest.approx(other, rel=5e-4)
    assert subsampled.delta(releases, found, adjacency, beside) == pytest.approx(delta, rel=0.01)
    # Poisson figures for fixed-size samples would be too low.
    assert subsampled.epsilon([SampledGaussian(q, mu, times)], delta, adjacency, beside) < 0.996 * found


@pytest.mark.parametrize(
    ("q", "mu", "times"), [(0.016, 1.0, 200), (0.01, 0.2, 1000), (0.1, 0.1, 50), (1e-3, 0.5, 9000)]
)
def test_fixed_is_better_than_the_renyi_bound(q, mu, times):
    """Wang, Balle and Kasiviswanathan (2019), by dp-accounting, which takes std over the sensitivity of replacing."""
    accountant = rdp.RdpAccountant(orders=[*range(2, 24), *range(24, 120, 8)], neighboring_relation=RELATION[REPLACE])
    event = dp.SampledWithoutReplacementDpEvent(1000, round(1000 * q), dp.GaussianDpEvent(1 / (2 * mu)))
    renyi = accountant.compose(dp.SelfComposedDpEvent(event, times)).get_epsilon(1e-5)
    assert subsampled.epsilon([SampledGaussian(q, mu, times, FIXED)], 1e-5, REPLACE) < 0.9 * renyi


def release_of(records, m, x):
    """The density at x of a release about m of the records, drawn at random; None is an absent record."""
    sums = [sum(r for r in chosen if r is not None) for chosen in itertools.combinations(records, m)]
    return np.mean([np.exp(-((x - total) ** 2) / 2) for total in sums], 0) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("n", "m", "mu"), [(2, 1, 0.5), (5, 2, 1.0), (5, 4, 0.3), (4, 3, 2.0)])
def test_no_neighbours_exceed_the_account_of_a_fixed_size(n, m, mu):
    """Every minibatch of small data sets is enumerated; the worst data set reaches the account, and Poisson's fails."""
    rng, x = np.random.default_rng(5), np.arange(-m * mu - 9, m * mu + 9, 0.004)
    others = [
        np.full(n - 1, -mu),
        np.full(n - 1, mu),
        *rng.uniform(-mu, mu, (6, n - 1)),
        *rng.choice([-mu, mu], (6, n - 1)),
    ]
    ends = {REPLACE: [(mu, -mu), (mu, 0.3 * mu)], ADD: [(mu, None), (-0.5 * mu, None)]}
    for adjacency, epsilon in itertools.product(ends, (0.0, 0.1, 0.5, 1.5)):
        largest = 0.0
        for rest, pair in itertools.product(others, ends[adjacency]):
            densities = [release_of([one, *rest], m, x) for one in pair]
            for p, r in (densities, densities[::-1]):
                largest = max(largest, float(np.maximum(p - math.exp(epsilon) * r, 0).sum() * 0.004))
        bound, poisson = (
            subsampled.delta([SampledGaussian(m / n, mu, 1, sampler)], epsilon, adjacency)
            for sampler in (FIXED, POISSON)
        )
        assert largest <= bound * (1 + 1e-5)
        assert largest > 0.99 * bound or bound < 1e-9
        if epsilon == 1.5:
            assert poisson < 0.99 * largest  # mutant: at epsilon 0 both are the same


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_vectors_are_no_worse_than_numbers(adjacency):
    """Records anywhere in a disc, by quadrature in the plane: the pair on a line dominates them in both orders."""
    q, mu, h = 0.3, 1.2, 0.08
    axis = np.arange(-mu - 6.5, mu + 6.5, h)
    rng = np.random.default_rng(7)
    angles, lengths = rng.uniform(0, 2 * math.pi, (25, 3)), mu * np.sqrt(rng.uniform(0, 1, (25, 3)))
    lengths[::2] = mu  # on the circle
    angles[0] = 0, math.pi, math.pi  # the worst: y and x' are opposite to x

    def normal(point):
        one, two = (np.exp(-((axis - p) ** 2) / 2) for p in point)
        return np.outer(one, two) / (2 * math.pi)

    for epsilon in (0.0, 0.2, 1.0):
        bound = subsampled.delta([SampledGaussian(q, mu, 1, FIXED)], epsilon, adjacency)
        reached = []
        for angle, length in zip(angles, lengths, strict=True):
            x, y, other = np.stack([length * np.cos(angle), length * np.sin(angle)], 1)
            densities = [(1 - q) * normal(y) + q * normal(p) for p in (x, other if adjacency is REPLACE else (0, 0))]
            for p, r in (densities, densities[::-1]):
                reached.append(float(np.maximum(p - math.exp(epsilon) * r, 0).sum() * h * h))
        assert max(reached) <= bound * 1.001
        assert reached[0] > 0.998 * bound
    poisson = subsampled.delta([SampledGaussian(q, mu, 1, POISSON)], 1.0, adjacency)
    assert poisson < 0.9 * reached[0]  # mutant, at the last epsilon


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_fixed_by_monte_carlo(adjacency):
    """The attack on minibatches whose other records are opposite to the canary: it stays within delta, and is near."""
    q, mu, times, runs, epsilon = 0.05, 0.5, 40, 200_000, 1.0
    rng = np.random.default_rng(11)
    drawn = rng.random((runs, times)) < q
    x = rng.standard_normal((runs, times)) + 2 * mu * drawn  # from the sum of the others
    loss = np.logaddexp(math.log1p(-q), math.log(q) + 2 * mu * x - 2 * mu * mu)
    if adjacency is ADD:
        loss -= np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu * mu / 2)
    terms = np.maximum(-np.expm1(epsilon - loss.sum(1)), 0.0)
    estimate, error = terms.mean(), terms.std() / math.sqrt(runs)
    bound = subsampled.delta([SampledGaussian(q, mu, times, FIXED)], epsilon, adjacency)
    poisson = subsampled.delta([SampledGaussian(q, mu, times, POISSON)], epsilon, adjacency)
    assert estimate - 4 * error <= bound <= 2 * estimate
    assert poisson < 0.9 * (estimate - 4 * error)  # mutant


@pytest.mark.parametrize("way", ["remove", "add", "replace"])
def test_a_spliced_pair_is_a_pair(way):
    """P and Q have mass 1, and the parts above and below 0 are those of their pairs."""
    q, mu, h = 0.3, 0.8, 1e-3
    pair = subsampled._pair(SampledGaussian(q, mu, 1, FIXED), way)
    mass, beyond = subsampled._discrete(q, pair, h, -9000, 9000)
    losses = h * np.arange(-9000, 9001)
    assert mass.sum() + beyond == pytest.approx(1, abs=1e-9)
    assert (mass * np.exp(-losses)).sum() == pytest.approx(1, abs=1e-6)
    for epsilon in (0.05, 0.4, 1.5):
        above = (mass * -np.expm1(epsilon - losses))[losses > epsilon].sum() + beyond
        below = (mass * (np.exp(-losses) - math.exp(epsilon)))[losses < -epsilon].sum()
        for found, (name, shift) in ((above, pair[:2]), (below, pair[2:])):
            truth = hockey_stick(q, shift, epsilon, {"add": "remove", "fill": "vacate"}.get(name, name))
            assert truth * (1 - 1e-6) <= found <= truth * 1.001


def test_samplers_compose():
    """Poisson and fixed-size releases together cost more than either, and less than the sum of both."""
    for adjacency in (ADD, REPLACE):
        parts = [SampledGaussian(0.1, 0.5, 20, sampler) for sampler in (POISSON, FIXED)]
        each = [subsampled.epsilon([part], 1e-5, adjacency) for part in parts]
        assert max(each) < subsampled.epsilon(parts, 1e-5, adjacency) < sum(each)


def test_fixed_is_never_worse_than_no_sampling():
    for adjacency in (ADD, REPLACE):
        full = subsampled.epsilon([SampledGaussian(1.0, 0.2, 10, FIXED)], 1e-5, adjacency)
        assert subsampled.epsilon([SampledGaussian(0.99, 0.2, 10, FIXED)], 1e-5, adjacency) <= full


def test_a_path_lies_just_above_the_epsilon_of_each_round():
    release = SampledGaussian(0.02, 0.8, 1)
    rounds = np.arange(1, 121)
    mus = 0.01 * np.sqrt(rounds)
    found = subsampled.path([release], 2 * rounds[:, None], 1e-5, REPLACE, mus)
    assert (np.diff(found) >= 0).all()
    for i in (0, 1, 7, 62, 119):
        exact = subsampled.epsilon([release._replace(times=2 * int(rounds[i]))], 1e-5, REPLACE, float(mus[i]))
        assert exact * (1 - 1e-4) <= found[i] <= exact * 1.02
    with pytest.raises(SordinoError, match="cumulative"):
        subsampled.path([release], rounds[::-1, None], 1e-5, REPLACE, mus)


def test_releases_out_of_range_are_refused():
    with pytest.raises(SordinoError, match="rate"):
        subsampled.epsilon([SampledGaussian(0.5, 1.0, 10, Sampler.FULL)], 1e-5, ADD)
    for bad in (
        SampledGaussian(0.0, 1.0, 1),
        SampledGaussian(1.5, 1.0, 1),
        SampledGaussian(0.5, -1.0, 1),
        SampledGaussian(math.nan, 1.0, 1),
    ):
        with pytest.raises(SordinoError):
            subsampled.epsilon([bad], 1e-5, ADD)
    assert subsampled.epsilon([], 1e-5, ADD) == 0.0
    assert subsampled.epsilon([SampledGaussian(0.5, math.inf, 1)], 1e-5, ADD) == math.inf
    assert subsampled.scale([SampledGaussian(0.5, 1.0, 1)], math.inf, 1e-5, ADD) == 0.0


# -------------------------------------------------------------------------------------------------------- the cache

QUESTION = (0.01, 100, 1.0, 1e-5, REPLACE, POISSON)


def test_a_direction_without_a_loss_above_the_target_needs_no_grid(own_cache, monkeypatch):
    plain, ways = subsampled._curve, []
    monkeypatch.setattr(subsampled, "_curve", lambda *args, **named: ways.append(args[2]) or plain(*args, **named))
    rare = [SampledGaussian(0.0044, 1.0, 200)]  # who joins: losses of at most -200 log(1 - 0.0044) = 0.88
    subsampled.scale(rare, 8.0, 1e-5, Adjacency.ADD_REMOVE, tolerance=subsampled.SHARED)
    assert subsampled.suffices(rare, 8.0, 1e-5, Adjacency.ADD_REMOVE)
    assert set(ways) == {"remove"}
    subsampled.scale(rare, 0.5, 1e-5, Adjacency.ADD_REMOVE, tolerance=subsampled.SHARED)
    assert set(ways) == {"remove", "add"}


def test_stored_noise_is_read_only_if_whole_and_of_this_version(own_cache, monkeypatch):
    first = subsampled.multiplier(*QUESTION)
    (file,) = (own_cache / "noise").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(subsampled, "_search", None)  # an answer from the file does not search
        assert subsampled.multiplier(*QUESTION) == first
        patch.setattr(subsampled, "VERSION", subsampled.VERSION + 1)
        with pytest.raises(TypeError):
            subsampled.multiplier(*QUESTION)
    good = file.read_text()
    value, seal = good.split()
    for damaged in ("", "garbage", good[:20], f"{value.replace('.', '.0')} {seal}", value, "\x00" * 100):
        file.write_text(damaged)
        assert subsampled.multiplier(*QUESTION) == first
        assert file.read_text() == good
    # The answer to one question is no answer to another.
    other = subsampled.multiplier(0.02, *QUESTION[1:])
    key = next(f for f in (own_cache / "noise").iterdir() if f != file)
    key.write_text(good)
    assert subsampled.multiplier(0.02, *QUESTION[1:]) == other != first


def test_cache_that_cannot_be_written(own_cache, monkeypatch):
    blocked = own_cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("SORDINO_CACHE", str(blocked))
    assert subsampled.multiplier(*QUESTION) > 0


def test_where_the_cache_lies(own_cache, monkeypatch):
    monkeypatch.delenv("SORDINO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "xdg"))
    assert subsampled._place("x").is_relative_to(own_cache / "xdg" / "sordino")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(own_cache / "home"))
    assert subsampled._place("x").is_relative_to(own_cache / "home" / ".cache" / "sordino")


def _write_and_read(seed):
    wrong = 0
    for i in range(200):
        key = str((seed + i) % 3)
        subsampled._store(key, float(key) + 0.5)
        wrong += subsampled._stored(key) != float(key) + 0.5
    return wrong


def test_concurrent_writes(own_cache):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_write_and_read, range(4)) == [0, 0, 0, 0]
    assert len(list((own_cache / "noise").iterdir())) == 3
