"""The price of a search against exact laws of small mechanisms and against another accountant."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp, ndtr

from sordino.core import Privacy, Trust
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian, selection
from sordino.privacy.accounting.selection import NegativeBinomial, Poisson
from sordino.studies import private_tuning
from sordino.studies.tune import validated

DELTA = 1e-5
LAWS = [
    NegativeBinomial(0.02),
    NegativeBinomial(0.3),
    NegativeBinomial(0.01, 0.0),
    NegativeBinomial(0.002, -0.5),
    NegativeBinomial(0.1, 2.5),
    Poisson(0.2),
    Poisson(1.0),
    Poisson(20.0),
]
ORDERS = np.array([1.05, 1.5, 2, 4, 8, 16, 30, 60, 120])


def weights(law):
    """P[K = k] for k = 0, 1, .., written as the papers write it, until nothing is left."""
    k = np.arange(1, 20_000 if isinstance(law, NegativeBinomial) else 200)
    if isinstance(law, Poisson):
        logs = k * math.log(law.mean) - law.mean - np.array([math.lgamma(n + 1) for n in k])
        return np.concatenate([[math.exp(-law.mean)], np.exp(logs)])
    if law.eta == 0:
        p = (1 - law.gamma) ** k / (k * math.log(1 / law.gamma))
    else:
        p = (1 - law.gamma) ** k / (law.gamma**-law.eta - 1) * np.cumprod((k - 1 + law.eta) / k)
    return np.concatenate([[0.0], p])


def worlds():
    """(mu, Q, Q'): a normal at 0 or mu, seen through bins in any order of merit: mu-Gaussian-DP by construction.

    Selection costs most where the bulk is worst, one tail better and the other best.
    """
    for mu, cuts in itertools.product((0.1, 0.5, 1.5), ([-2.5], [-1.0], [0.0], [1.0], [2.5], [-3.0, 1.5], [-2.0, 2.0])):
        edges = np.array([-np.inf, *cuts, np.inf])
        q, other = np.diff(ndtr(edges)), np.diff(ndtr(edges - mu))
        for order in map(list, itertools.permutations(range(len(q)))):
            yield mu, q[order], other[order]
            yield mu, other[order], q[order]


def best_of(q, chance):
    """The exact law of the best of K draws, outcomes from worst to best; last, that of no run at all."""
    below = np.concatenate([[0.0], q.cumsum()])
    below[-1] = 1.0
    reached = below[:, None] ** np.arange(len(chance)) @ chance
    return np.concatenate([np.diff(reached), chance[:1]])


def renyi(p, q, order):
    p, q = np.log(p[p > 0]), np.log(q[p > 0])
    return logsumexp(order * p + (1 - order) * q) / (order - 1)


def hockey_stick(p, q, epsilon):
    return np.maximum(p - math.exp(epsilon) * q, 0).sum()


@pytest.fixture(scope="module")
def exact():
    """For every law: (mu, law of the best under the one data set, under the other)."""
    found = {}
    for law in LAWS:
        chance = weights(law)
        found[law] = [(mu, best_of(q, chance), best_of(other, chance)) for mu, q, other in worlds()]
    return found


def broken(pairs, bound):
    """How many exact divergences exceed the bound."""
    return sum(
        renyi(p, q, order) > bound(mu, order) + 1e-9
        for mu, p, q in pairs
        for order in ORDERS
        if min(p[p > 0].min(), q[q > 0].min()) > 1e-12
    )


# ------------------------------------------------------------------------------------------------ every run is seen


def test_runs_that_are_seen_compose_and_a_budget_is_divided():
    assert selection.visible(0.3, 0.1, 4) == pytest.approx(0.6)
    assert selection.visible(0.1, 0.3, 4) == pytest.approx(0.6), "a record trains or validates, never both"
    assert selection.visible(0.3, 0.3, 4, refit=0.8) == pytest.approx(1.0)
    for runs, refit in itertools.product((1, 2, 7, 1000), (0.0, 0.3)):
        share = selection.each(0.5, runs, refit=refit)
        total = selection.visible(share, share, runs, refit=refit)
        assert 0.5 * (1 - 1e-9) < total <= 0.5
    assert selection.each(0.5, 4) == pytest.approx(
        gaussian.mu_of([(1, selection.score_std(selection.each(0.5, 4)), 1)])
    )


def test_a_noisy_count_is_private_and_half_its_noise_is_not():
    mu = 0.4
    seen = gaussian.mu_of([(1.0, selection.score_std(mu))])
    assert seen == pytest.approx(mu)
    assert gaussian.mu_of([(1.0, selection.score_std(mu) / 2)]) > 1.9 * mu
    assert selection.score_std(0) == math.inf


# -------------------------------------------------------------------------------------------------- random stopping


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws_are_what_they_say(law):
    chance = weights(law)
    assert chance.sum() == pytest.approx(1, abs=1e-9)
    assert (chance * np.arange(len(chance))).sum() == pytest.approx(law.mean, rel=1e-9)
    p = law.first
    for k in range(law.least, law.least + 20):
        assert p == pytest.approx(chance[k], rel=1e-9)
        p *= law.ratio(k)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draws_follow_the_law(law):
    rng, n = np.random.default_rng(5), 20_000
    drawn = np.array([selection.draw(law, rng) for _ in range(n)])
    chance = weights(law)
    k = np.arange(len(chance))
    assert abs(drawn.mean() - law.mean) < 5 * math.sqrt((chance * (k - law.mean) ** 2).sum() / n)

    def furthest(drawn):
        """Of the empirical law from the true one, in standard errors."""
        cdf = np.clip(chance.cumsum(), 0, 1)
        at = np.flatnonzero((cdf > 1e-3) & (cdf < 1 - 1e-3))
        found = np.searchsorted(np.sort(drawn), at, side="right") / n
        return (np.abs(found - cdf[at]) / np.sqrt(cdf[at] * (1 - cdf[at]) / n)).max()

    assert furthest(drawn) < 5
    assert furthest(drawn + 1) > 5
    assert furthest(np.maximum(drawn - 1, 0)) > 5
    assert drawn.min() >= law.least


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_secret_draws_invert_the_exact_law(law, monkeypatch):
    """At every edge between k and k + 1, to all bits; `law` in mpmath. The mutant is the law in float64."""
    with mpmath.workprec(600):
        gamma, eta = (mpmath.mpf(getattr(law, name, 1.0)) for name in ("gamma", "eta"))
        if law.least == 0:
            first = mpmath.exp(-mpmath.mpf(law.mean))
        else:
            first = (1 - gamma) * (eta / (gamma**-eta - 1) if eta else -1 / mpmath.log(gamma))
        rounded, below, weight = list[bool](), first, first
        for k in range(law.least, law.least + 6):
            edge = int(mpmath.floor(below * 2**192))
            for bits, drawn in ((edge - 1, k), (edge + 1, k + 1)):
                monkeypatch.setattr("secrets.randbits", lambda count, bits=bits: bits)
                assert selection.draw(law) == drawn
            rounded.append(edge != int(float(below) * 2**192))
            weight *= mpmath.mpf(law.mean) / (k + 1) if law.least == 0 else (1 - gamma) * (k + eta) / (k + 1)
            below += weight
    assert sum(rounded) >= 5, "float64 has too few bits"


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_no_exact_divergence_exceeds_the_bound(law, exact):
    assert broken(exact[law], law.rdp) == 0
    assert broken(exact[law], lambda mu, order: law.rdp(mu, order) / 2) > 0


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_no_exact_delta_exceeds_the_bound(law, exact):
    caught = 0
    for delta, (mu, p, q) in itertools.product((1e-5, 1e-3, 1e-2), exact[law]):
        epsilon = selection.epsilon(law, mu, delta)
        assert hockey_stick(p, q, epsilon) <= delta * (1 + 1e-9)
        caught += hockey_stick(p, q, epsilon / 2) > delta
    assert caught, "half of epsilon must be found too little"


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_largest_ratio_of_slopes_is_found_from_above(law):
    """On a fine grid of events that Gaussian DP just allows; the bound is at most 1e-3 larger. Mutant: 1 % less."""
    z = np.linspace(-30, 10, 400_001)
    for mu in (0.05, 0.5, 3.0):
        q, other = ndtr(-z), ndtr(-(z + mu))
        if isinstance(law, Poisson):
            found = (law.mean * (q - other)).max()
        else:
            slopes = [-(1 + law.eta) * np.log(law.gamma + (1 - law.gamma) * ndtr(x)) for x in (z, z + mu)]
            found = (slopes[0] - slopes[1]).max()
        assert found <= law.log_slopes(mu) <= found * (1 + 1e-3) + 1e-4
        assert found > 0.99 * law.log_slopes(mu) - 1e-4


def test_every_term_of_the_bound_is_needed(exact):
    rare = Poisson(0.2)

    def without_gamma(law):
        """As if selection cost nothing but the mean number of runs."""
        return lambda mu, order: order * mu**2 / 2 + math.log(law.mean) / (order - 1)

    def without_zero(mu, order):
        """As printed: log(mean) < 0 would then pay for what was never at stake."""
        d = gaussian.delta(mu, math.log1p(1 / (order - 1)))
        return order * mu**2 / 2 + rare.mean * d + math.log(rare.mean) / (order - 1)

    for law in LAWS[:3]:
        assert broken(exact[law], without_gamma(law)) > 0
    assert broken(exact[rare], without_zero) > 0


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0])
def test_one_run_costs_no_less_than_the_run(mu):
    alone = gaussian.epsilon(mu, DELTA)
    one = selection.epsilon(NegativeBinomial(1 - 1e-9), mu, DELTA)
    assert alone <= one < 1.2 * alone  # a fifth at most is lost by way of Renyi divergences
    for eta in (-0.5, 0.0, 1.0, 3.0):
        costs = [selection.epsilon(NegativeBinomial.of(mean, eta), mu, DELTA) for mean in (1.01, 2, 10, 100, 1000)]
        assert alone <= one <= costs[0]
        assert costs == sorted(costs)
    costs = [selection.epsilon(Poisson(mean), mu, DELTA) for mean in (0.1, 1, 2, 10, 100, 500)]
    assert costs == sorted(costs)
    assert costs[1] >= alone


def test_secrecy_of_the_other_runs_is_what_makes_many_runs_cheap():
    mu = gaussian.mu(1.0, DELTA)
    seen = gaussian.epsilon(selection.visible(mu, mu, 100), DELTA)
    for law in (NegativeBinomial.of(100.0), NegativeBinomial.of(100.0, 0.0), Poisson(100.0)):
        assert selection.epsilon(law, mu, DELTA) < seen / 2


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
def test_calibration_spends_the_budget_and_no_more(law, target):
    mu = selection.calibrate(law, target, DELTA)
    assert target * (1 - 1e-6) < selection.epsilon(law, mu, DELTA) <= target
    assert selection.epsilon(law, 1.001 * mu, DELTA) > target


@pytest.mark.parametrize(
    ("law", "shape"),
    [(NegativeBinomial.of(10.0), 1), (NegativeBinomial.of(30.0, 0.0), 0), (NegativeBinomial.of(5.0, 2.5), 2.5)],
    ids=str,
)
@pytest.mark.parametrize("mu", [0.1, 0.5, 2.0])
def test_agrees_with_another_accountant(law, shape, mu):
    orders = list(1 + np.geomspace(1e-4, 1e4, 900))
    accountant = RdpAccountant(orders).compose(RepeatAndSelectDpEvent(GaussianDpEvent(1 / mu), law.mean, shape))
    assert selection._by_renyi(law, mu, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert selection.epsilon(law, mu, DELTA) < accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("mu", [0.1, 0.5])
def test_poisson_agrees_with_another_accountant_but_for_no_run_at_all(mu):
    """The other takes delta from Renyi orders, which is loose, and leaves out e^-20."""
    orders = list(1 + np.geomspace(1e-2, 1e4, 600))
    accountant = RdpAccountant(orders).compose(RepeatAndSelectDpEvent(GaussianDpEvent(1 / mu), 20.0, math.inf))
    there = accountant.get_epsilon(DELTA)
    assert 0.7 * there < selection.epsilon(Poisson(20.0), mu, DELTA) <= there * (1 + 1e-3)


def test_a_mean_is_met():
    for mean, eta in itertools.product((1.001, 3.0, 500.0), (-0.5, 0.0, 1.0, 4.0)):
        assert NegativeBinomial.of(mean, eta).mean == pytest.approx(mean, rel=1e-9)
    assert NegativeBinomial.of(8.0).gamma == pytest.approx(1 / 8)


def test_selection_at_zero_and_infinite_cost():
    law = NegativeBinomial(0.1)
    assert selection.epsilon(law, 0.0, DELTA) == 0
    assert selection.epsilon(law, math.inf, DELTA) == math.inf
    assert selection.calibrate(law, math.inf, DELTA) == math.inf
    assert 0 < selection.epsilon(law, 1e-6, DELTA) < 1e-3


def test_only_where_the_other_runs_stay_hidden():
    assert "Only the best of all runs was shown" in selection.assumption(Trust.TRUSTED_SERVER)
    for trust in (Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION):
        with pytest.raises(SordinoError, match=rf"trust: under {trust} .*charge-tuning count"):
            selection.assumption(trust)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: NegativeBinomial(0.0), "gamma"),
        (lambda: NegativeBinomial(1.0), "gamma"),
        (lambda: NegativeBinomial(0.5, -1.0), "eta"),
        (lambda: NegativeBinomial.of(1.0), "mean"),
        (lambda: NegativeBinomial.of(1e9, -0.9), "mean"),
        (lambda: Poisson(0.0), "mean"),
        (lambda: Poisson(1e4), "mean"),
        (lambda: selection.visible(0.1, -0.1, 3), "score"),
        (lambda: selection.visible(0.1, 0.1, 0), "runs"),
        (lambda: selection.each(0.1, 2.5), "runs"),
        (lambda: selection.each(0.1, 2, refit=0.1), "refit"),
        (lambda: selection.epsilon(Poisson(2.0), math.nan, DELTA), "mu"),
        (lambda: selection.epsilon(Poisson(2.0), 1.0, 0.0), "delta"),
        (lambda: selection.calibrate(Poisson(2.0), 0.0, DELTA), "epsilon"),
    ],
)
def test_refusals_name_the_field(wrong, field):
    with pytest.raises(SordinoError, match=f"^{field}: "):
        wrong()


# ------------------------------------------------------------------------------------------------------ secret choices


def test_secret_choices_come_from_the_system_s_randomness(monkeypatch):
    """How many runs, and which: neither from a generator that can be recomputed, without a seed."""
    settings = [{"lr": lr} for lr in (1, 2, 3)]
    privacy = Privacy(2.0, 1e-5, trust=Trust.TRUSTED_SERVER)
    bits, picks = iter([0, 2**192 - 1, 2**191]), itertools.cycle([2, 0])
    monkeypatch.setattr(np.random, "default_rng", None)
    monkeypatch.setattr("secrets.randbits", lambda count: next(bits) if count == 192 else pytest.fail("as documented"))
    monkeypatch.setattr("secrets.randbelow", lambda below: next(picks) if below == 3 else pytest.fail("3 settings"))
    assert private_tuning._random(settings, privacy, 4.0, None)[0] == [{"lr": 3}]
    assert private_tuning._random(settings, privacy, 4.0, None)[0][:4] == [{"lr": 1}, {"lr": 3}, {"lr": 1}, {"lr": 3}]
    assert len(private_tuning._random(settings, privacy, 4.0, None)[0]) == 3  # the median of a geometric law of mean 4


@pytest.mark.soak  # long statistics
def test_every_setting_is_as_likely():
    settings = [{"lr": lr} for lr in range(4)]
    privacy = Privacy(2.0, 1e-5, trust=Trust.TRUSTED_SERVER)
    chosen = [s["lr"] for _ in range(120) for s in private_tuning._random(settings, privacy, 8.0, None)[0]]
    counts = np.bincount(chosen, minlength=4)
    assert (abs(counts - len(chosen) / 4) < 5.5 * math.sqrt(len(chosen) * 3 / 16)).all()


@pytest.mark.parametrize("how", ["public", "count", "stopping"])
def test_a_search_from_a_seed_says_that_it_is_not_private(how):
    whole = load("digits", normalize="l2")
    small = whole._replace(x_train=whole.x_train[:200], y_train=whole.y_train[:200])
    base = {
        "data": "digits",
        "clients": 2,
        "rounds": 1,
        "method": "dp-fedgd",
        "epsilon": 8.0,
        "trust": "trusted-server",
    }
    for seed, private in ((1, False), ("none", True)):
        found = private_tuning.search({**base, "seed": seed}, {"lr": (0.5, 1.0)}, validated(small), how, runs=2).account
        assert found["private"] is private
        assert ("why_not_private" in found) is not private
