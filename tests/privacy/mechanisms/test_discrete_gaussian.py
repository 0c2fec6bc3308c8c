"""Integer noise: that it has its law, that the bounds hold by exact computation, and that mutants are caught."""

import itertools
import math

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp
from scipy.special import ndtr
from scipy.stats import binom, chi2, kstest

from sordino.errors import SordinoError
from sordino.privacy.accounting import concentrated, gaussian
from sordino.privacy.accounting.concentrated import FAILURE, epsilon, rho, rho_of
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.discrete_gaussian import (
    MODULUS,
    decode,
    draw,
    encode,
    modular,
    rounded,
    wraps,
)
from sordino.privacy.mechanisms.random import Address, Counted, Noiseless, Secure, Seeded

HERE = Address(client=3, round=5, query=1)
SOURCES = [Secure(bytes(range(32))), Seeded(7), Counted(7)]
SIZE = 300_000


# ------------------------------------------------------------------------------------------------------- sensitivity


def differences(v: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """|floor(u + ξ) - floor(u' + ξ)|² for a random u', u = u' + v, and many ξ."""
    rng = np.random.default_rng(seed)
    other = rng.normal(size=v.size) * 100
    xi = rng.random((count, v.size))
    moved = np.floor(other + v + xi) - np.floor(other + xi)
    return (moved**2).sum(1)


def adversaries(dimension: int):
    half = np.full(dimension, 0.5)
    yield half
    yield -half
    yield half + np.where(np.arange(dimension) < 3, 40, 0)
    yield np.where(np.arange(dimension) < 3, 7.5, 0.01)
    yield np.where(np.arange(dimension) % 2, 1.5, -1.5)
    yield np.where(np.arange(dimension) < 1, 30.5, 0)


@pytest.mark.parametrize("dimension", [1, 5, 60, 400])
def test_a_rounded_difference_is_as_short_as_promised(dimension):
    """At a failure that can be seen, 5 %: never more often, by 4 standard errors; without d/4 it would be."""
    count, fails, naive = 4000, 0.05, 0
    for v in adversaries(dimension):
        squares, s = differences(v, count), float(np.linalg.norm(v))
        assert squares.max() <= rounded(s, dimension) ** 2
        bound = discrete_gaussian._rounded(s, dimension, -math.log(fails))
        assert (squares > bound**2).mean() <= fails + 4 * math.sqrt(fails / count)
        naive = max(naive, (squares > s * s + math.sqrt(-2 * math.log(fails)) * s).mean())
    assert naive > 2 * fails or dimension < 60


@pytest.mark.parametrize("dimension", [1, 10, 100, 1000, 100_000])
@pytest.mark.parametrize("p", [1e-3, 0.03, 0.5, 0.9])
def test_the_tail_of_equal_fractions_is_below_2_to_the_minus_80(dimension, p):
    """|difference|² is binomial where every v_j is p, 0 < p < 1: its tail is known."""
    most = rounded(p * math.sqrt(dimension), dimension) ** 2
    assert binom.logsf(math.floor(most), dimension, p) <= -80 * math.log(2)
    if dimension >= 1000 and p == 0.5:
        mean_alone = p * p * dimension + dimension / 4
        assert binom.logsf(math.floor(mean_alone), dimension, p) > -80 * math.log(2)


def test_the_moments_behind_the_lemma():
    """E exp(t(Δ² - v² - p(1-p))) <= exp(t²(2f+1)²/8), and the two bounds on its parts."""
    for v in np.linspace(-5, 5, 401):
        f = math.floor(v)
        p = v - f
        assert p * (1 - p) <= min(0.25, abs(v)) + 1e-15
        assert abs(f + 0.5) <= abs(v) + 0.5
        for t in (-1, -0.1, 0.01, 0.3, 2):
            centre = v * v + p * (1 - p)
            moment = (1 - p) * math.exp(t * (f * f - centre)) + p * math.exp(t * ((f + 1) ** 2 - centre))
            assert moment <= math.exp(t * t * (2 * f + 1) ** 2 / 8) * (1 + 1e-12)


def test_rounding_at_its_ends():
    assert rounded(0.0, 10) == 0
    assert math.isinf(rounded(math.inf, 10))
    assert 1.5 < rounded(0.5, 1) < 1.5 + 1e-9  # s + sqrt(d)
    assert rounded(1e6, 100) == pytest.approx(1e6, rel=1e-4)
    values = [rounded(s, 1000) for s in np.geomspace(1e-6, 1e6, 100)]
    assert values == sorted(values)
    for bad in ({"sensitivity": -1.0, "dimension": 1}, {"sensitivity": 1.0, "dimension": 0}):
        with pytest.raises(SordinoError):
            rounded(**bad)


# ---------------------------------------------------------------------------------------------------------- sums


def density(variance: float, reach: int) -> np.ndarray:
    k = np.arange(-reach, reach + 1)
    p = np.exp(-(k**2) / (2 * variance))
    return p / p.sum()


def summed(variance: float, terms: int, reach: int) -> np.ndarray:
    p = density(variance, reach)
    total = p
    for _ in range(terms - 1):
        total = np.convolve(total, p)
    return total


def renyi(p: np.ndarray, shift: int, alpha: float) -> float:
    with np.errstate(divide="ignore"):
        a, b = np.log(p[shift:]), np.log(p[:-shift])
    return float(np.logaddexp.reduce(alpha * a + (1 - alpha) * b)) / (alpha - 1)


CASES = list(itertools.product([0.25, 0.3, 0.5, 1.0, 4.0], [1, 2, 3, 5], [1, 2, 3]))


@pytest.mark.parametrize(("variance", "terms", "shift"), CASES)
def test_rho_is_above_every_divergence(variance, terms, shift):
    p = summed(variance, terms, math.ceil(36 * math.sqrt(variance)))  # to the smallest float64
    p = p[p > 1e-290]
    bound = rho(shift, variance, terms, 1)
    for alpha in (1.001, 1.1, 1.5, 2, 3, 5, 8):
        if alpha * shift < 9 * terms * math.sqrt(variance):  # else what counts lies where float64 ends
            assert renyi(p, shift, alpha) <= alpha * bound * (1 + 1e-9)


def test_a_sum_is_no_discrete_gaussian():
    """Paid for as one of terms σ², a sum of small noise would be underpaid; of noise this large it is not."""
    p = summed(0.25, 3, 18)
    p = p[p > 1e-290]
    worst = max(renyi(p, 1, alpha) / alpha for alpha in (1.01, 1.1, 1.3))
    assert worst > 1 / (2 * 3 * 0.25) * 1.02
    assert rho(1.0, 100.0, 10**6, 10**9) == pytest.approx(1 / (2 * 100 * 10**6), rel=1e-9)


@pytest.mark.parametrize("variance", [0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("terms", [2, 3, 6])
def test_a_sum_is_a_discrete_gaussian_to_half_of_tau(variance, terms):
    p = summed(variance, terms, 25)
    q = density(variance * terms, 25 * terms)
    near = np.abs(np.arange(p.size) - p.size // 2) <= 4 * math.sqrt(terms * variance) + 2
    worst = np.abs(np.log(p[near] / q[near])).max()
    assert worst <= concentrated._tau(variance, terms) / 2
    assert worst > concentrated._tau(variance, terms) / 100 or variance == 1.0, "of the right order"


def test_the_constant_ten_covers_the_proof():
    for r in np.linspace(0.125, 5, 500):  # σ² k/(k+1) for σ >= 1/2
        eta = sum(math.exp(-2 * math.pi**2 * r * j * j) for j in range(1, 9))
        assert 2 * (math.log1p(2 * eta) - math.log1p(-2 * eta)) <= 10 * math.exp(-2 * math.pi**2 * r) * (1 + 1e-12)


def test_rho_of_vectors_and_its_ends():
    tau = 10 * (math.exp(-2 * math.pi**2 * 0.5 / 2) + math.exp(-2 * math.pi**2 * 0.5 * 2 / 3))
    expected = min(4 / 1.5 + 2 * tau * 50, (2 / math.sqrt(1.5) + tau * math.sqrt(50)) ** 2) / 2
    assert expected <= rho(2.0, 0.5, 3, 50) <= expected * (1 + 1e-10)
    assert rho(2.0, 0.5, 1, 50) == pytest.approx(4 / 0.5 / 2)
    assert rho(0.0, 1.0, 3, 50) == 0
    assert math.isinf(rho(math.inf, 1.0, 3, 50))
    assert concentrated._tau(0.3, 5000) == pytest.approx(
        10 * sum(math.exp(-2 * math.pi**2 * 0.3 * k / (k + 1)) for k in range(1, 5000)), rel=1e-3
    )
    for variance, terms in ((0.2499, 2), (math.nan, 2), (2.0**61, 2), (1.0, 0), (1.0, 1.5)):
        with pytest.raises(SordinoError):
            rho(1.0, variance, terms, 1)


# -------------------------------------------------------------------------------------------------------- conversion

BUDGETS = list(itertools.product([1e-9, 1e-4, 0.01, 0.3, 2.0, 40.0, 1e4], [1e-15, 1e-10, 1e-5, 1e-2, 0.5]))


@pytest.mark.parametrize(("at", "delta"), BUDGETS)
def test_epsilon_is_the_infimum(at, delta):
    x = np.geomspace(1e-9, 10 / delta, 200_000)
    best = ((1 + x) * at - np.log1p(1 / x) + (-math.log(delta) - np.log1p(x)) / x).min()
    found = epsilon(at, delta)
    assert found <= max(best, 0) * (1 + 1e-12) + 1e-14
    assert found >= max(best, 0) * (1 - 1e-6) - 1e-9


@pytest.mark.parametrize("at", [1e-3, 0.01, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5])
def test_epsilon_against_dp_accounting_and_the_closed_form(at, delta):
    accountant = rdp.RdpAccountant(1 + np.geomspace(1e-2, 1e5, 3000), dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.ZCDpEvent(at))
    theirs, found = accountant.get_epsilon(delta), epsilon(at, delta)
    assert found <= theirs * (1 + 1e-9)
    assert found == pytest.approx(theirs, rel=1e-4)
    exact = gaussian.epsilon(math.sqrt(2 * at), delta)
    assert exact < found < 1.2 * exact


@pytest.mark.parametrize(
    ("budget", "delta"), list(itertools.product([0.0, 1e-6, 0.1, 1.0, 8.0, 100.0], [1e-12, 1e-5, 0.1]))
)
@pytest.mark.parametrize("releases", [0, 1, 10_000])
def test_what_is_calibrated_is_not_overspent(budget, delta, releases):
    at = rho_of(budget, delta, releases)
    assert at > 0
    assert epsilon(at, delta, releases) <= budget
    assert epsilon(at * (1 + 1e-9), delta, releases) > budget, "and nothing is given away"
    each = at / 7
    assert epsilon(sum([each] * 7), delta, releases) <= budget


def test_failures_are_taken_off_delta():
    assert epsilon(0.1, 1e-5, 1) > epsilon(0.1, 1e-5)
    assert epsilon(0.1, 1e-5, 10**14) == pytest.approx(epsilon(0.1, 1e-5 - 10**14 * FAILURE), rel=1e-9)
    assert math.isinf(epsilon(0.1, 1e-15, 10**6))
    assert epsilon(0.0, 1e-5, 3) == 0
    assert math.isinf(epsilon(math.inf, 1e-5))
    assert math.isinf(rho_of(math.inf, 1e-5))
    with pytest.raises(SordinoError, match="delta"):
        rho_of(1.0, 1e-15, 10**6)
    for bad in ({"rho": -1.0, "delta": 1e-5}, {"rho": 1.0, "delta": 0.0}, {"rho": 1.0, "delta": 1e-5, "releases": -1}):
        with pytest.raises(SordinoError):
            epsilon(**bad)


def test_epsilon_grows_with_rho():
    values = [epsilon(r, 1e-6) for r in np.geomspace(1e-14, 1e3, 2000)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))


# ---------------------------------------------------------------------------------------------------------- integers


@pytest.mark.parametrize("variance", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("largest", [0, 3, 6])
def test_wraps_bounds_the_exact_probability(monkeypatch, variance, terms, largest):
    monkeypatch.setattr(discrete_gaussian, "MODULUS", 32)
    p = summed(variance, terms, 40)
    k = np.arange(p.size) - p.size // 2 + largest
    one = p[(k < -16) | (k >= 16)].sum()
    assert one <= wraps(largest, variance, terms, 1)
    assert 1 - (1 - one) ** 5 <= wraps(largest, variance, terms, 5)


def test_wraps_at_its_ends():
    assert wraps(2.0**31, 1.0, 1, 1) == 1
    assert wraps(2.0**31 - 1, 1e6, 10, 100) == 1
    assert 0 < wraps(2.0**30, 1.0, 1, 1) < 1e-300
    assert wraps(2.0**30, 1e16, 10, 100) == pytest.approx(200 * math.exp(-(2.0**60) / 2e17), rel=1e-9)


def test_encoding_is_a_floor_and_its_mean_is_the_value():
    rng = np.random.default_rng(1)
    values, dither = rng.normal(size=1000) * 3, rng.random(1000)
    codes = encode(values, 8.0, dither)
    assert codes.dtype == np.int64
    assert np.array_equal(codes, np.floor(values * 8 + dither))
    many = encode(np.full(SIZE, -0.3), 1.0, Seeded(1).uniform(HERE, (SIZE,)))
    assert abs(many.mean() + 0.3) <= 4.5 * math.sqrt(0.21 / SIZE)
    assert not np.array_equal(codes, np.round(values * 8))


def test_encoding_never_rounds_the_sum():
    """2^30 + 1/4 + ξ needs more than 53 bits; so does -2^-60 + ξ."""
    near = np.nextafter(0.75, 0)
    assert math.floor(2.0**30 + 0.25 + near) == 2**30 + 1, "the sum in float64 is one too large"
    x = np.array([2.0**30 + 0.25, 2.0**30 + 0.25, -(2.0**-60), -(2.0**-60), 5.0, 5.0])
    xi = np.array([near, 0.75, 0.0, 0.9, 0.0, 1 - 2.0**-53])
    assert encode(x, 1.0, xi).tolist() == [2**30, 2**30 + 1, 0, 0, 5, 5]


def test_integers_come_back():
    values = np.array([0, 1, -1, 2**31 - 1, -(2**31), 2**32 + 5, -(2**32) - 5, 2**31])
    words = modular(values)
    assert words.dtype == np.uint32
    assert decode(words, 2.0).tolist() == [v / 2 for v in (0, 1, -1, 2**31 - 1, -(2**31), 5, -5, -(2**31))]
    total = modular(np.array([100])) + modular(np.array([-300]))
    assert decode(total, 1.0) == -200
    with pytest.raises(SordinoError, match="uint32"):
        decode(values, 1.0)


@pytest.mark.parametrize(
    ("values", "scale", "dither", "word"),
    [
        ([np.nan], 1.0, [0.5], "values"),
        ([np.inf], 1.0, [0.5], "values"),
        ([1.0], 0.0, [0.5], "scale"),
        ([1.0], math.nan, [0.5], "scale"),
        ([1.0], 2.0**31, [0.5], "scale"),
        ([1.0], 1.0, [1.0], "dither"),
        ([1.0], 1.0, [-0.1], "dither"),
        ([1.0], 1.0, [np.nan], "dither"),
        ([1.0], 1.0, [0.5, 0.5], "dither"),
    ],
)
def test_what_cannot_be_encoded_is_refused(values, scale, dither, word):
    with pytest.raises(SordinoError, match=word):
        encode(np.array(values), scale, np.array(dither))


# ------------------------------------------------------------------------------------------------------------- noise


def fits(k: np.ndarray, variance: float) -> bool:
    """Chi-square at 1e-5 against the exact law, in bins of at least 30 expected, tails together."""
    reach = math.ceil(12 * math.sqrt(variance))
    edges = np.unique(np.linspace(-reach, reach, 401).astype(int))
    mass = np.concatenate([[0], density(variance, reach).cumsum()])
    expected = np.diff(mass[np.append(edges, reach + 1) + reach]) * k.size
    counted = np.histogram(k, np.append(edges, reach + 1))[0].astype(float)
    keep = expected >= 30
    e = np.append(expected[keep], expected[~keep].sum())
    c = np.append(counted[keep], k.size - counted[keep].sum())
    used = e > 1e-3
    statistic = ((c - e)[used] ** 2 / e[used]).sum()
    return bool(statistic <= chi2.isf(1e-5, max(1, used.sum() - 1)) and c[~used].sum() == 0)


@pytest.mark.parametrize("source", SOURCES, ids=["secure", "seeded", "counted"])
@pytest.mark.parametrize("variance", [0.25, 1.0, 7.3, 300.0, 4095.0, 4096.0, 5000.0, 3e5])
def test_draws_have_the_law(source, variance):
    k = draw(source, HERE, variance, (SIZE,))
    assert k.dtype == np.int64
    assert fits(k, variance)
    for mutant in (
        draw(source, HERE, 1.03 * variance, (SIZE,)),
        k + max(1, round(math.sqrt(variance) / 20)),
        np.abs(k),
    ):
        assert not fits(mutant, variance)


@pytest.mark.parametrize("wrong", ["edge", "minus zero", "no rejection"])
def test_a_wrong_table_is_caught(monkeypatch, wrong):
    variance = 5000.0 if wrong == "no rejection" else 7.3
    law = discrete_gaussian._law(variance)
    if wrong == "edge":
        edges = law.edges.copy()
        edges[3] += np.uint64(2**63 // 200)
        monkeypatch.setattr(discrete_gaussian, "_law", lambda _: law._replace(edges=edges))
    else:
        honest = discrete_gaussian._propose

        def mutant(law, words):
            value, accepted, open_ = honest(law, words)
            return value, accepted | (value == 0) if wrong == "minus zero" else accepted | True, open_

        monkeypatch.setattr(discrete_gaussian, "_propose", mutant)
    assert not fits(draw(SOURCES[1], HERE, variance, (SIZE,)), variance)


@pytest.mark.parametrize("variance", [1e6, 1e9, 1e12, 2.0**60])
def test_large_draws_are_nearly_normal(variance):
    z = draw(SOURCES[0], HERE, variance, (SIZE,)) / math.sqrt(variance)
    for power, mean, var in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(z**power) - mean) <= 4.5 * math.sqrt(var / SIZE)
    assert kstest(z + 0.5 / math.sqrt(variance), ndtr).pvalue > 1e-4
    expected = 2 * ndtr(-3.5) * SIZE
    assert abs((np.abs(z) > 3.5).sum() - expected) <= 4.5 * math.sqrt(expected)
    assert abs((z > 0).sum() - (z < 0).sum()) <= 4.5 * math.sqrt(SIZE)


def test_low_bits_are_uniform():
    """A rest that lost bits, or a cell that lost some of its places, would show here."""
    k = draw(SOURCES[0], HERE, 1e12, (SIZE,))
    for base in (2, 8, 256, 7):
        counts = np.bincount(k % base, minlength=base)
        assert ((counts - SIZE / base) ** 2).sum() * base / SIZE <= chi2.isf(1e-5, base - 1)


@pytest.mark.parametrize("variance", [0.25, 3.0, 5000.0, 1e12])
def test_a_draw_is_a_function_of_its_address(variance):
    source = SOURCES[0]
    whole = draw(source, HERE, variance, (20_000,))
    assert np.array_equal(whole, draw(source, HERE, variance, (20_000,)))
    assert np.array_equal(whole.reshape(100, 200), draw(source, HERE, variance, (100, 200)))
    for size in (0, 1, 63, discrete_gaussian._CHUNK - 1, discrete_gaussian._CHUNK, discrete_gaussian._CHUNK + 1):
        assert np.array_equal(whole[:size], draw(source, HERE, variance, (size,)))
    assert not np.array_equal(whole, draw(source, HERE._replace(index=1), variance, (20_000,)))
    assert not draw(Noiseless(7), HERE, variance, (9, 2)).any()
    assert draw(source, HERE, variance, ()).shape == ()


@pytest.mark.parametrize("variance", [0.25, 3.0, 4096.0, 1e12, 2.0**60])
def test_integers_decide_as_floats_do(monkeypatch, variance):
    fast = draw(SOURCES[1], HERE, variance, (300,))

    def all_open(law, words):
        return np.zeros(len(words), np.int64), np.zeros(len(words), bool), np.ones(len(words), bool)

    monkeypatch.setattr(discrete_gaussian, "_propose", all_open)
    assert np.array_equal(fast, draw(SOURCES[1], HERE, variance, (300,)))


class Told:
    """Gives the words it was told, then zeros."""

    private = False

    def __init__(self, *words):
        self.told = words

    def words(self, at, count):
        words = np.zeros(max(count, len(self.told)), dtype=np.uint64)
        words[: len(self.told)] = np.array(self.told, dtype=np.uint64)
        return words[:count]


ONES = 2**64 - 1


def test_a_word_on_an_edge_is_decided_by_those_that_follow():
    variance = 3.0
    edges = discrete_gaussian._edges(variance, 0, 63)
    finer = discrete_gaussian._edges(variance, 0, 127)
    for cell in (0, 1, 5):
        assert finer[cell] >> 64 == edges[cell]
        last = finer[cell] % 2**64
        for more, expected in (
            ([0], 0),
            ([ONES], 1),
            ([last - 1], 0),
            ([last + 1], 1),
            ([last, 0], 0),
            ([last, ONES], 1),
        ):
            found = draw(Told(2 * edges[cell], *more, 2 * edges[3] + 2), HERE, variance, (2,))
            assert found.tolist() == [cell + expected, 4], "the next number begins after the words that were read"
    far = draw(Told(ONES - 1, ONES, ONES, 7), HERE, variance, (1,)).item()
    assert far > len(edges)
    exact = discrete_gaussian._edges(variance, 0, 191)
    assert exact[far - 1] < (2**63 - 1 << 128) + 2**128 - 1 <= exact[far]


def test_an_acceptance_that_is_close_is_decided_by_the_words_that_follow():
    variance = 5000.0
    law = discrete_gaussian._law(variance)
    first = 2 * (discrete_gaussian._edges(variance, 1, 63)[9] + 1)  # cell 10: 20 and a rest of 1
    mpmath.mp.prec = 300
    exact = int(mpmath.floor(mpmath.exp(-mpmath.mpf(21**2 - 20**2) / 10000) * 2**127))
    second = (1 << 63) + (exact >> 64)
    accepted = draw(Told(first, second, exact % 2**64 - 5, first, 0), HERE, variance, (2,))
    rejected = draw(Told(first, second, exact % 2**64 + 5, first, 0), HERE, variance, (2,))
    assert law.shift == 1
    assert accepted.tolist() == [21, 20]
    assert rejected[0] == 20
    mpmath.mp.prec = 53


@pytest.mark.parametrize("bits", [63, 127, 255])
@pytest.mark.parametrize(
    ("variance", "shift"), [(0.25, 0), (0.7, 0), (31.4, 0), (4095.9, 0), (5000.0, 1), (1e12 / 3, 13)]
)
def test_edges_are_exact(variance, shift, bits):
    edges = discrete_gaussian._edges(variance, shift, bits)
    with mpmath.workprec(bits + 200):
        reach = math.ceil(math.sqrt(2 * variance * (bits + 100) * math.log(2)) / 2**shift) + 2
        weights = [mpmath.exp(-(mpmath.mpf(a << shift) ** 2) / (2 * mpmath.mpf(variance))) for a in range(reach)]
        total, running = mpmath.fsum(weights), mpmath.mpf(0)
        for a, edge in enumerate(edges):
            running += weights[a]
            assert edge == int(mpmath.floor(running / total * 2**bits))
    assert edges[-1] == 2**bits - 1 > edges[-2]


def test_exponentials_are_bounded_on_both_sides():
    rng = np.random.default_rng(5)
    for places in (8, 38, 64, 127, 400):
        with mpmath.workprec(places + 200):
            for x in (1e-9, 0.3, 0.5, 1.0, 2.0, 30.0, 1e3, 1e9, *rng.exponential(size=40)):
                numerator, denominator = float(x).as_integer_ratio()
                n = discrete_gaussian._exp(numerator, denominator, places)
                assert n <= mpmath.exp(-mpmath.mpf(numerator) / denominator) * 2**places <= n + 2
        assert discrete_gaussian._exp(0, 1, places) <= 2**places <= discrete_gaussian._exp(0, 1, places) + 2


def test_a_stream_that_is_too_short_is_read_on():
    class Sparse(Told):
        asked = 0

        def words(self, at, count):
            self.asked += 1
            words = Seeded(1).words(at, count)
            words[: 3 * 10**4] = np.uint64(1)  # -0, over and over
            return words

    source = Sparse()
    assert fits(draw(source, HERE, 2.0, (20_000,)), 2.0)
    assert source.asked > 1


@pytest.mark.parametrize("variance", [0.0, 0.1, -1.0, math.nan, math.inf, 2.0**61])
def test_a_variance_out_of_range_is_refused(variance):
    with pytest.raises(SordinoError, match="variance"):
        draw(SOURCES[0], HERE, variance, (1,))


def test_the_modulus():
    assert MODULUS == 2**32
    assert FAILURE >= 2**-80
