"""Streams: what they look like, that none is shared, and that the secure one is ChaCha20."""

import itertools
import math
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri, ndtri_exp
from scipy.stats import binomtest, chisquare, kstest

from sordino.errors import SordinoError
from sordino.privacy.mechanisms import gaussian, normal_quantile, random
from sordino.privacy.mechanisms.gaussian import Draw, draw, grid_of, settle, stack
from sordino.privacy.mechanisms.random import (
    COHORT,
    ERROR,
    Address,
    Noiseless,
    Secure,
    Seeded,
    SharedDraws,
    joint_source,
    source,
)

KEY = bytes(range(32))
HERE = Address(client=3, round=5, query=1)
BOTH = pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7)], ids=["secure", "seeded"])
SIZE = 200_000


# --------------------------------------------------------------------------------------------------------- the law


def looks_normal(z: np.ndarray) -> bool:
    """Four moments within 4.5 standard errors of a standard normal's, and Kolmogorov–Smirnov at p > 1e-4."""
    # Var(z) = 1, Var(z²) = 2, Var(z³) = 15, Var(z⁴) = 96
    powers = [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
    moments = all(abs(np.mean(z**p) - mean) <= 4.5 * math.sqrt(var / z.size) for p, mean, var in powers)
    return bool(moments and kstest(z, ndtr).pvalue > 1e-4)


def looks_uniform(u: np.ndarray) -> bool:
    mean = abs(u.mean() - 0.5) <= 4.5 * math.sqrt(1 / 12 / u.size)
    square = abs((u**2).mean() - 1 / 3) <= 4.5 * math.sqrt(4 / 45 / u.size)
    return bool(mean and square and u.min() > 0 and u.max() < 1 and kstest(u, "uniform").pvalue > 1e-4)


@BOTH
def test_normals_are_normal(stream):
    z = stream.normal(HERE, (SIZE,))
    assert looks_normal(z)
    u = stream.uniform(HERE, (SIZE,))
    for mutant in (1.02 * z, z + 0.02, z**2, np.abs(z), np.sqrt(12) * (u - 0.5), ndtri(0.98 * u), np.clip(z, -2, 2)):
        assert not looks_normal(mutant)


@BOTH
def test_uniforms_are_uniform(stream):
    u = stream.uniform(HERE, (SIZE,))
    assert looks_uniform(u)
    for mutant in (0.98 * u, u**1.02, 2 * u - 0.5, 1 - 0.5 * u):
        assert not looks_uniform(mutant)


def test_every_word_gives_a_finite_normal_of_the_right_law():
    words = np.array([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**62, 3 * 2**62], dtype=np.uint64)
    z = np.empty(words.size)
    assert random._to_normal(words.copy(), z).tolist() == [0, 1, 5], "where 63 bits are too few"
    assert np.isfinite(z).all()
    assert z[1] == -z[5], "the law is symmetric to the bit"
    assert z[6] == pytest.approx(-z[7])
    assert z[6] == pytest.approx(-ndtri(0.25))


def test_no_word_gives_a_uniform_of_zero_or_one():
    words = np.array([0, 2**63, 2**64 - 1], dtype=np.uint64)
    u = np.empty(words.size)
    random._to_uniform(words.copy(), u)
    assert 0 < u[0] == 1 - u[2] < u[1] < u[2] < 1
    top = float(np.uint64(2**64 - 1) >> np.uint64(11))
    assert (top + 0.5) * 2.0**-53 == 1.0, "which is why 53 bits would be one too many"


def test_four_million_normals_have_the_law_in_the_middle_and_in_the_tails():
    z = Secure(KEY).normal(HERE, (4_000_000,))

    def chance(z: np.ndarray) -> float:
        """The least p-value, of 1,000 cells of equal probability and of counts in the tails."""
        p = ndtr(z)
        cells = chisquare(np.bincount(np.minimum(p * 1000, 999).astype(int), minlength=1000)).pvalue
        tails = [
            binomtest(int((side > edge).sum()), len(z), chances * ndtr(-edge)).pvalue
            for side, chances in ((z, 1), (-z, 1), (np.abs(z), 2))
            for edge in (3.0, 4.0, 4.5, 5.0)
        ]
        return float(min(cells, *tails))

    assert chance(z) > 1e-5
    assert kstest(z, ndtr).pvalue > 1e-4
    assert chance(z * 1.006) < 1e-5
    assert chance(np.clip(z, -4.4, 4.4)) < 1e-5, "a tail cut off at 4.4 is seen"


# ------------------------------------------------------------------------------------------------ the ideal normals


def ideal(secure_key: bytes, at: Address, element: int, words: int = 3) -> mpmath.mpf:
    """Phi^-1 of the uniform's first bits, by mpmath from the raw keystreams: nothing of the module but its layout."""
    more = random._derive(secure_key, b"sordino more")
    keys = [random._derive(secure_key, b"sordino normal")]
    keys += [random._derive(more, b"sordino level", level.to_bytes(8, "little")) for level in range(1, words + 1)]
    bits = [int.from_bytes(keystream(key, at.pack(), 8 * element + 8)[-8:], "little") for key in keys]
    sign, bits[0] = (1, bits[0]) if bits[0] < 2**63 else (-1, 2**64 - 1 - bits[0])
    with mpmath.workprec(64 * words + 200):
        tail = mpmath.mpf(sum(word << (64 * (words - k)) for k, word in enumerate(bits))) / mpmath.mpf(2) ** (
            64 + 64 * words
        )
        return sign * isf(tail)


def isf(tail: mpmath.mpf) -> mpmath.mpf:
    """x with Q(x) = tail, at the present precision."""
    x = mpmath.mpf(-float(ndtri_exp(float(mpmath.log(tail)))))
    for _ in range(2 + mpmath.mp.prec // 64):
        x += (mpmath.erfc(x / mpmath.sqrt(2)) / 2 - tail) * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(x * x / 2)
    return x


def real(number: Fraction) -> mpmath.mpf:
    return mpmath.mpf(number.numerator) / number.denominator


def test_scipys_quantiles_are_a_thousand_times_more_accurate_than_assumed():
    """The assumption behind ERROR, on all branches of the code: the centre, the tails, and the seam between them."""
    rng = np.random.default_rng(0)
    centre = np.concatenate([rng.uniform(0, 0.5, 1000), 0.5 - 2.0 ** -rng.uniform(2, 53, 200)])
    tails = 2.0 ** -rng.uniform(1, 64, 1000)
    seams = np.concatenate(
        [math.exp(-2) * (1 + 1e-6 * rng.uniform(-1, 1, 200)), math.exp(-32) * rng.uniform(0.9, 1.1, 200)]
    )
    with mpmath.workprec(200):
        for p in np.concatenate([centre, tails, seams]):
            x = isf(mpmath.mpf(float(p)))
            assert abs(x + float(ndtri(p))) <= ERROR / 500 * max(1, x)
        for y in -np.concatenate([rng.uniform(13.8, 100, 200), rng.uniform(13.8, random._DEEP * math.log(2), 300)]):
            z = mpmath.mpf(float(ndtri_exp(y)))
            x = -z + (mpmath.log(mpmath.erfc(-z / mpmath.sqrt(2)) / 2) - float(y)) / -z  # one step of Newton's method
            assert abs(x + z) <= ERROR / 500 * x


def test_the_upper_tail_is_enclosed():
    with mpmath.workprec(2000):
        for bits in (80, 144, 400, 1000):
            low, high = normal_quantile._root_of_two_pi(bits)
            assert low <= mpmath.sqrt(2 * mpmath.pi) * 2**bits <= high <= low + 2 + 64 * bits
            for x in (0, 1, 2**bits // 1000, 2**bits - 1, 3 * 2**bits + 12345, 9 * 2**bits, 20 * 2**bits):
                low, high = normal_quantile._upper_tail(x, bits, bits)
                q = mpmath.erfc(mpmath.mpf(x) / 2**bits / mpmath.sqrt(2)) / 2 * mpmath.mpf(2) ** bits
                assert low <= q <= high <= low + 3


def test_bounds_enclose_the_ideal_normal_and_close_in():
    stream = Secure(KEY)
    for element in range(40):
        x, outer = ideal(KEY, HERE, element, 4), (-math.inf, math.inf)
        for words in range(4):
            low, high = stream.bounds(HERE, element, words)
            with mpmath.workprec(500):
                assert real(low) < x < real(high)
            assert outer[0] < high, "all intervals meet"
            assert low < outer[1]
            scale = math.exp(float(x) ** 2 / 2) * math.sqrt(2 * math.pi) * 2.0 ** -(64 + 64 * words)
            assert scale <= high - low <= 3 * scale, "as wide as the bits leave it, and not much wider"
            outer = low, high
    with pytest.raises(SordinoError, match="element"):
        stream.bounds(HERE, -1)


class Scripted:
    """An encryptor whose stream is a constant for each key: `levels[k]` for the k-th further stream."""

    def __init__(self, first: int, levels: list[int]) -> None:
        more = random._derive(KEY, b"sordino more")
        self.words = {random._derive(KEY, b"sordino normal"): first}
        for k, word in enumerate(levels, start=1):
            self.words[random._derive(more, b"sordino level", k.to_bytes(8, "little"))] = word

    def __call__(self):
        return lambda key, nonce, block=0: Constant(self.words[key])


class Constant:
    def __init__(self, word: int) -> None:
        self.word = word

    def update_into(self, data, out) -> None:
        np.frombuffer(out, dtype="<u8")[:] = self.word


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    ("first", "levels", "log2"),
    [
        (2**44 - 1, [2**63], -20),
        (2**20, [2**63], math.log2(2**20 + 0.5) - 64),
        (1, [2**63], math.log2(1.5) - 64),
        (0, [2**63], -65),
        (0, [1, 2**63], math.log2(1.5) - 128),
        (0, [0] * 12 + [2**63], -64 * 13 - 1),
    ],
)
def test_no_draw_is_the_largest(monkeypatch, negative, first, levels, log2):
    """Words of zeros, which used to end at 9.08: the draw lies as far out as the bits behind them say."""
    monkeypatch.setattr(random, "_chacha20", Scripted(2**64 - 1 - first if negative else first, levels))
    stream = Secure(KEY)
    z = stream.normal(HERE, (5,))
    monkeypatch.setattr(random, "_DEEP", 64)  # and so do those so deep that scipy is not asked
    assert stream.normal(HERE, (1,)).item() == pytest.approx(z[0], rel=1e-12)
    with mpmath.workprec(2000):
        tail = mpmath.mpf(first) / 2**64 + sum(mpmath.mpf(w) / 2 ** (64 * (k + 2)) for k, w in enumerate(levels))
        assert float(mpmath.log(tail, 2)) == pytest.approx(log2, abs=1e-9)
        x = mpmath.mpf(abs(float(z[0])))
        for _ in range(6):
            x += (mpmath.erfc(x / mpmath.sqrt(2)) / 2 - tail) * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(x * x / 2)
        assert np.array_equal(z, np.full(5, z[0]))
        assert abs(x - abs(float(z[0]))) <= ERROR * x
        low, high = stream.bounds(HERE, 3, len(levels))
        assert real(low) < (-x if negative else x) < real(high)
    if log2 <= -64:
        assert abs(z[0]) > 9.08
    assert (z[0] < 0) == negative


def test_normals_are_within_their_error_of_the_ideal(monkeypatch):
    """Also where further words are read, here for one draw in 16; both ways agree."""
    expected = [ideal(KEY, HERE, i) for i in range(300)]
    plain = Secure(KEY).normal(HERE, (300,))
    monkeypatch.setattr(random, "_RARE", 2**59)
    refined = Secure(KEY).normal(HERE, (300,))
    assert 3 < (plain != refined).sum() < 60
    for z in (plain, refined):
        assert all(abs(x - float(a)) <= ERROR / 100 * max(1, abs(x)) for x, a in zip(expected, z, strict=True))


def test_a_refined_number_depends_on_its_place_alone(monkeypatch):
    monkeypatch.setattr(random, "_RARE", 2**60)
    stream = Secure(KEY)
    long = stream.normal(HERE, (1000,))
    assert not np.array_equal(long, stream.normal(HERE._replace(index=1), (1000,)))
    assert np.array_equal(long, Secure(KEY).normal(HERE, (1000,)))
    for size in (1, 7, 8, 9, 500):
        assert np.array_equal(stream.normal(HERE, (size,)), long[:size])
    monkeypatch.setattr(random, "_CHUNK", 13)
    assert np.array_equal(stream.normal(HERE, (1000,)), long)


def test_further_words_are_a_stream_of_their_own():
    stream = Secure(KEY)
    tails = [stream._tail(at, i, 3, 1)[1] for at in (HERE, HERE._replace(index=1)) for i in range(20)]
    words = [(tail >> shift) % 2**64 for tail in tails for shift in (128, 64, 0)]
    others = Secure(KEY).words(HERE, 20).tolist()
    assert all_distinct(words + others + [tail >> 192 for tail in tails])


# ---------------------------------------------------------------------------------------------------------- releases


def rounded(value: torch.Tensor, exact: list[mpmath.mpf], grid: torch.Tensor | float) -> torch.Tensor:
    """grid * round((value + noise) / grid), number by number in mpmath."""
    steps = torch.as_tensor(grid, dtype=torch.float64).expand(value.shape).reshape(-1).tolist()
    with mpmath.workprec(300):
        ticks = [
            mpmath.nint((mpmath.mpf(v) + x) / g) * g
            for v, x, g in zip(value.reshape(-1).tolist(), exact, steps, strict=True)
        ]
    return torch.tensor([float(t) for t in ticks], dtype=torch.float64).view(value.shape)


def sloppy(noise_: Draw, grid: torch.Tensor | float, share: float) -> Draw:
    """Computed so badly that it is off by up to `share` of the grid, and says so."""
    off = share * torch.as_tensor(grid, dtype=torch.float64).expand(noise_.z.shape)
    sign = torch.rand(noise_.z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return replace(noise_, z=noise_.z + 0.999 * off * sign, error=off)


def cases() -> dict[str, tuple[torch.Tensor, Draw, list[mpmath.mpf], torch.Tensor | float]]:
    """name -> (value, noise, the ideal noise, grid)"""
    stream, rng = Secure(KEY), torch.Generator().manual_seed(0)
    at = [HERE._replace(client=c) for c in range(4)]
    n = {a: [ideal(KEY, a, i) for i in range(24)] for a in at}
    mpf = mpmath.mpf

    def values(*shape: int) -> torch.Tensor:
        return 5 * torch.randn(*shape, dtype=torch.float64, generator=rng)

    out = {}
    std = 0.7
    out["one normal"] = (
        values(24),
        draw(stream, [(1.0, at[0])], (24,)).scaled(std),
        [mpf(std) * x for x in n[at[0]]],
        grid_of(std),
    )
    row = [0.3, -1.7, 0.0, 1e-3]
    combined = [mpmath.fsum(mpf(c) * n[a][i] for c, a in zip(row, at, strict=True)) for i in range(24)]
    parts = list(zip(row, at, strict=True))
    out["correlated"] = (
        values(24),
        draw(stream, parts, (24,)).scaled(std),
        [mpf(std) * x for x in combined],
        grid_of(std),
    )

    def mirrored(x: list[mpmath.mpf]) -> list[mpmath.mpf]:
        return [(x[4 * i + j] + x[4 * j + i]) / 2 for i in range(4) for j in range(4)]

    square = values(4, 4)
    exact = [mpf(std) * x for x in mirrored(combined)]
    out["symmetric"] = square + square.T, draw(stream, parts, (4, 4)).symmetric().scaled(std), exact, grid_of(std)
    stds = torch.tensor([0.1, 3.0, 0.7, 1000.0], dtype=torch.float64)
    batch = stack([draw(stream, [(1.0, a)], (2, 5)) for a in at])
    exact = [mpf(float(s)) * n[a][i] for s, a in zip(stds, at, strict=True) for i in range(10)]
    out["batch"] = values(4, 2, 5), batch.scaled(stds.view(4, 1, 1)), exact, grid_of(stds).view(4, 1, 1)
    matrices = stack([draw(stream, [(1.0, a)], (4, 4)) for a in at]).symmetric().scaled(stds.view(4, 1, 1))
    exact = [mpf(float(s)) * x for s, a in zip(stds, at, strict=True) for x in mirrored(n[a])]
    out["batch of matrices"] = values(4, 4, 4), matrices, exact, grid_of(stds).view(4, 1, 1)
    each = [mpf(float(s)) * n[a][i] for s, a in zip(stds, at, strict=True) for i in range(10)]
    total = [mpmath.fsum(each[i::10]) for i in range(10)]
    wide = float(stds.square().sum().sqrt())
    out["sum of clients"] = values(2, 5), batch.scaled(stds.view(4, 1, 1)).summed(0), total, grid_of(wide)
    inner = stack([batch, batch.scaled(-2.0)]).scaled(stds.view(4, 1, 1)).summed(1)
    out["sum of clients, by run"] = values(2, 2, 5), inner, total + [-2 * x for x in total], grid_of(wide)
    out["float32"] = values(24).float(), *out["one normal"][1:]
    out["transposed"] = values(5, 2, 4).permute(2, 1, 0), *out["batch"][1:]
    out["one number"] = (
        values(1)[0],
        draw(stream, [(1.0, at[0])], ()).scaled(std),
        [mpf(std) * n[at[0]][0]],
        grid_of(std),
    )
    return out


@pytest.fixture(scope="module")
def releases():
    with mpmath.workprec(300):
        return cases()


NAMES = ["one normal", "correlated", "symmetric", "batch", "batch of matrices", "sum of clients"]
NAMES += ["sum of clients, by run", "float32", "transposed", "one number"]


@pytest.mark.parametrize("name", NAMES)
def test_a_release_is_the_rounded_ideal_sum(releases, name, monkeypatch):
    """However badly the noise was computed, as long as its error is bounded: in doubt the exact sum decides."""
    value, noised, exact, grid = releases[name]
    expected = rounded(value, exact, grid)
    assert torch.equal(settle(value, noised, grid), expected)
    bad = sloppy(noised, grid, 0.4)
    assert torch.equal(settle(value, bad, grid), expected)
    assert torch.equal(settle(value, sloppy(noised, grid, 40.0), grid), expected)
    if value.numel() > 1:
        monkeypatch.setattr(gaussian, "_round_exactly", lambda value, terms, grid: round((value + 0.3 * grid) / grid))
        assert not torch.equal(settle(value, bad, grid), expected), "the exact sum was needed"
        assert not torch.equal(settle(value, replace(bad, terms=None), grid), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_draw_is_bounded(releases, name):
    _, noised, exact, _ = releases[name]
    error = noised.error.expand(noised.z.shape).reshape(-1).tolist()
    for z, x, most in zip(noised.z.reshape(-1).tolist(), exact, error, strict=True):
        assert abs(mpmath.mpf(z) - x) <= most / 50
        assert ERROR * abs(z) <= most <= 10_000 * ERROR, "and the invariant by which roundings are counted"


def test_a_sum_next_to_the_middle_is_rounded_the_right_way(monkeypatch):
    """Values chosen so that value + noise is the middle of two grid points to the last bit of float64."""
    size, grid = 60, 2.0**-14
    noised = draw(Secure(KEY), [(1.0, HERE)], (size,))
    middle = (torch.arange(size, dtype=torch.float64) + 0.5) * grid
    for value in (middle - noised.z, middle - noised.z + 1e-16, middle - noised.z - 1e-16):
        expected = rounded(value, [ideal(KEY, HERE, i) for i in range(size)], grid)
        calls = []
        exactly = gaussian._round_exactly
        monkeypatch.setattr(gaussian, "_round_exactly", lambda *a, c=calls, e=exactly: c.append(a) or e(*a))
        assert torch.equal(settle(value, noised, grid), expected)
        monkeypatch.setattr(gaussian, "_round_exactly", exactly)
        assert len(calls) == size
        ups = int((expected > middle).sum())
        assert 5 < ups < size - 5, "both ways"


def test_the_rounding_of_a_large_sum_is_counted():
    """At 2^44 grid points float64 resolves 2^-8 of them: together with an error of 0.6 * 2^-8 in the noise, the sum
    rounds to 2^-8 beyond the middle where the ideal one lies before it."""
    grid, points, size = 2.0**-14, 1.5 * 2.0**44, 200
    unit = 2.0**-8 * grid
    noised = draw(Secure(KEY), [(1.0, HERE)], (size,))
    whole = torch.floor(noised.z / unit)
    value = (points + 0.5) * grid - (whole + 1) * unit  # ideal sum: the middle - (1 - part) units
    off = replace(noised, z=noised.z + 0.59 * unit, error=torch.tensor([0.6 * unit], dtype=torch.float64))
    pick = (noised.z / unit - whole > 0.93) & (noised.z / unit - whole < 0.99)
    assert int(pick.sum()) > 3
    ticks = settle(value, off, grid) / grid
    assert torch.equal(ticks[pick], torch.full_like(ticks[pick], points))
    naive = (value + off.z) / grid
    beyond = torch.full_like(naive[pick], points + 0.5 + 2.0**-8)
    assert torch.equal(naive[pick], beyond), "further from the middle than the noise's error reaches"


def test_intervals_are_narrowed_until_they_decide():
    class Slow:
        private, asked = True, []

        def bounds(self, at, element, words=1):
            self.asked.append(words)
            return Fraction(-1, 10**words), Fraction(3, 10**words)

    slow = Slow()
    terms = [gaussian.Term(Fraction(-1), slow, HERE, 0)]
    assert gaussian._round_exactly(0.499755859375, terms, 1.0) == 0
    assert slow.asked == [1, 2, 3, 4]
    slow.asked.clear()
    apart = [gaussian.Term(Fraction(1), slow, HERE, 0), gaussian.Term(Fraction(-1), slow, HERE, 1)]
    assert gaussian._round_exactly(0.499755859375, apart, 1.0) == 0
    assert slow.asked == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "of opposite signs: both widths count"
    both = [gaussian.Term(Fraction(1), slow, HERE, 0), gaussian.Term(Fraction(-1), slow, HERE, 0)]
    assert gaussian._round_exactly(2.5, both, 1.0) == 3, "terms that cancel leave nothing to wait for"


def test_the_exact_sum_is_rarely_needed(monkeypatch):
    calls = []
    exactly = gaussian._round_exactly
    monkeypatch.setattr(gaussian, "_round_exactly", lambda *a: calls.append(a) or exactly(*a))
    size = 2_000_000
    noised = draw(Secure(KEY), [(1.0, HERE)], (size,)).scaled(3.0)
    value = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = settle(value, noised, grid_of(3.0))
    assert len(calls) <= 12, "about 1 is expected"
    assert float((out - value - noised.z).abs().max()) <= float(grid_of(3.0)) / 2 * (1 + 1e-6)
    settle(
        value[:20_000], replace(draw(Secure(KEY), [(1.0, HERE)], (20_000,)), error=torch.tensor([2.0**-26])), 2.0**-14
    )
    assert len(calls) > 1, "and a coarser bound asks for it: the count can fail"


def test_noise_without_a_promise_is_rounded_plainly():
    value = torch.linspace(-3, 3, 7, dtype=torch.float64)
    for stream in (Seeded(7), random.Counted(7), Noiseless(7)):
        noised = draw(stream, [(1.0, HERE), (2.0, HERE._replace(index=1))], (7,)).scaled(2.0)
        z = 2 * (stream.normal(HERE, (7,)) + 2 * stream.normal(HERE._replace(index=1), (7,)))
        assert noised.terms is None
        assert torch.equal(settle(value, noised, 0.25), ((value + torch.from_numpy(z)) * 4).round() / 4)
    plain = Draw.plain(torch.ones(2, 3, 3, dtype=torch.float64))
    assert torch.equal(stack([plain, plain]).symmetric().summed(0).z, 2 * plain.z)
    assert torch.equal(settle(plain.z, plain, 0.5), 2 * plain.z)
    assert settle(torch.zeros(0, 3), draw(Secure(KEY), [(1.0, HERE)], (0, 3)), 0.5).shape == (0, 3)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_of_one_is_that_one(axis):
    one = draw(Secure(KEY), [(1.0, HERE), (0.5, HERE._replace(round=6))], (3, 4))
    stacked = stack([one], axis)
    assert stacked.z.shape == ((1, 3, 4) if axis == 0 else (3, 1, 4))
    for each in (stacked, stacked.summed(axis)):
        assert torch.equal(each.z.reshape(3, 4), one.z)
        assert [each.terms(i) for i in range(12)] == [one.terms(i) for i in range(12)]
        released = settle(torch.zeros_like(each.z), each, 2.0**-14)
        assert torch.equal(released.reshape(3, 4), settle(torch.zeros_like(one.z), one, 2.0**-14))


def test_what_cannot_be_settled_is_refused():
    noised = draw(Secure(KEY), [(1.0, HERE)], (3,))
    for value in (math.nan, math.inf, -math.inf, 2.0**51, -(2.0**52)):
        with pytest.raises(SordinoError, match="value: it is not finite, or exceeds") as refused:
            settle(torch.tensor([0.0, value, 0.0], dtype=torch.float64), noised, 1.0)
        assert str(value) not in str(refused.value), "a value that is protected is not told"
    for grid in (0.0, 0.3, -0.5, math.inf, math.nan, 2.0**-1000, torch.tensor([1.0, 3.0, 1.0])):
        with pytest.raises(SordinoError, match="grid"):
            settle(torch.zeros(3), noised, grid)
    with pytest.raises(SordinoError, match="shape"):
        settle(torch.zeros(2, 3), noised, 1.0)
    with pytest.raises(SordinoError, match="private"):
        stack([noised, Draw.plain(noised.z)])

    class Inexact(Seeded):
        private = True

    with pytest.raises(SordinoError, match="bounds"):
        draw(Inexact(3), [(1.0, HERE)], (3,))


def test_grids_are_powers_of_two():
    stds = torch.tensor([1.0, 1.5, 2.0, math.nextafter(8.0, 0), 1e-200, 3e200], dtype=torch.float64)
    grids = grid_of(stds)
    assert grids[:4].tolist() == [2.0**-14, 2.0**-14, 2.0**-13, 2.0**-12]
    assert torch.frexp(grids).mantissa.tolist() == [0.5] * 6
    assert bool(((grids * 2**14 <= stds) & (stds < grids * 2**15)).all())
    assert float(grid_of(1.5)) == 2.0**-14
    for std in (0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0])):
        with pytest.raises(SordinoError, match="std"):
            grid_of(std)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_release_is_the_same_on_a_device(releases, name):
    value, noised, exact, grid = releases[name]
    for one in (noised, sloppy(noised, grid, 0.4)):
        out = settle(value.cuda(), one, grid)
        assert out.is_cuda
        assert torch.equal(out.cpu(), rounded(value, exact, grid))
    moved = draw(Secure(KEY), [(1.0, HERE)], (24,)).to("cuda").scaled(torch.full((24,), 0.7, device="cuda"))
    assert torch.equal(settle(torch.zeros(24, device="cuda"), moved, 1.0).cpu(), moved.z.round().cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 3_000_001])
def test_a_gpu_draws_the_normals_of_the_host(size):
    secure, device = Secure(KEY), torch.device("cuda", torch.cuda.current_device())
    assert random.gpu_draws(device)
    for at in (HERE, Address(COHORT, 2**32 - 1, 2**16 - 1, 2**16 - 1)):
        host, there = torch.from_numpy(secure.normal(at, (size,))), secure.normal_on(at, (size,), device)
        assert there.is_cuda
        assert there.dtype == torch.float64
        distance = (there.cpu() - host).abs() / host.abs().clamp_min(1.0)
        assert float(distance.max()) <= ERROR / 2**6, "both are within ERROR of the ideal one, with room"
        far = host.abs() > 4.8
        assert torch.equal(there.cpu()[far], host[far]), "far out, both read further bits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_release_is_the_same_whether_a_gpu_or_the_host_draws():
    secure, shape = Secure(KEY), (1_000_003,)
    at, later = HERE, HERE._replace(round=6)
    value = torch.linspace(-3, 3, shape[0], dtype=torch.float64)
    for parts in ([(1.0, at)], [(0.3, at), (-1.7, later)]):
        host, there = draw(secure, parts, shape), draw(secure, parts, shape, "cuda")
        assert there.z.is_cuda
        assert there.error.is_cuda
        for std in (1.0, 0.037):
            on_host = settle(value, host.scaled(std), grid_of(std))
            on_gpu = settle(value.cuda(), there.scaled(std), grid_of(std))
            assert torch.equal(on_gpu.cpu(), on_host)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_with_other_normals_does_not_draw(monkeypatch):
    right = random._normals_on_gpu
    for wrong in (lambda z: z + 2.0**-38, lambda z: z.clamp(-4, 4), lambda z: z.roll(1)):
        refuses_to_draw(monkeypatch, lambda *at, wrong=wrong: wrong(right(*at)), "cuda", "computes other normals")


def test_a_gpu_that_cannot_draw_does_not(monkeypatch):
    """The comparison itself, with a device that is stood in for."""
    monkeypatch.setattr(random.importlib.util, "find_spec", lambda name: name)

    def fails(*at):
        raise RuntimeError("no C compiler")

    host = torch.from_numpy(Secure(bytes(32)).normal(Address(0, 0, 0), (1 << 17,)))
    refuses_to_draw(monkeypatch, fails, "cuda:7", "cannot compute normals .RuntimeError.")
    for wrong in (host + 2.0**-41, host.clamp(-4, 4), host.roll(1), -host, torch.where(host == host.max(), 0.0, host)):
        refuses_to_draw(monkeypatch, lambda *at, wrong=wrong: wrong, "cuda:7", "computes other normals")
    monkeypatch.setattr(random, "_normals_on_gpu", lambda *at: host + 2.0**-43)
    assert random.gpu_draws(torch.device("cuda:7"))
    random.gpu_draws.cache_clear()


def refuses_to_draw(monkeypatch, normals, device, reason):
    random.gpu_draws.cache_clear()
    monkeypatch.setattr(random, "_normals_on_gpu", normals)
    with pytest.warns(UserWarning, match=f"{reason}.*host draws all noise"):
        assert not random.gpu_draws(torch.device(device))
    random.gpu_draws.cache_clear()


# ---------------------------------------------------------------------------------------------------------- addresses

GRID = [Address(*at) for at in itertools.product([0, 1, 2, 3, 255, 256, 65536, COHORT - 1, COHORT], *[range(7)] * 3)]
GRID += [Address(0, r, 0) for r in (256, 65536, 2**32 - 1)] + [Address(0, 0, 256), Address(0, 0, 0, 256)]


def all_distinct(draws: list[float]) -> bool:
    return len(set(draws)) == len(draws)


@BOTH
def test_no_two_addresses_share_a_stream(stream):
    normals = np.array([stream.normal(at, (2,)) for at in GRID])
    uniforms = np.array([stream.uniform(at, (2,)) for at in GRID])
    # Also between kinds: mapped back to uniforms, and folded or mirrored, no first draw is another's.
    back = ndtr(normals)
    draws = np.concatenate([back, 1 - back, uniforms, 1 - uniforms]).round(12)
    assert all_distinct(draws.ravel().tolist())
    forgetful = [stream.normal(at._replace(index=0), (1,)).item() for at in GRID]
    assert not all_distinct(forgetful), "a source that ignored the index must be caught"


@BOTH
def test_neighbouring_streams_are_uncorrelated(stream):
    size = 20_000
    neighbours = [HERE, *(HERE._replace(**{name: getattr(HERE, name) + 1}) for name in Address._fields)]
    rows = [stream.normal(at, (size,)) for at in neighbours] + [ndtri(stream.uniform(at, (size,))) for at in neighbours]

    def uncorrelated(rows: list[np.ndarray]) -> bool:
        off = np.corrcoef(rows) - np.eye(len(rows))
        return bool(np.abs(off).max() <= 4.5 / math.sqrt(size))

    assert uncorrelated(rows)
    assert not uncorrelated([*rows, rows[0] + 20 * rows[1]])


@BOTH
def test_the_same_address_gives_the_same_draw(stream):
    first = stream.normal(HERE, (1000,)), stream.uniform(HERE, (1000,))
    stream.normal(Address(0, 0, 0), (17,))  # nothing is remembered between draws
    assert np.array_equal(first[0], stream.normal(HERE, (1000,)))
    assert np.array_equal(first[1], stream.uniform(HERE, (1000,)))


@BOTH
@pytest.mark.parametrize("size", [1, 7, random._CHUNK - 1, random._CHUNK, random._CHUNK + 1, 2 * random._CHUNK + 3])
def test_a_longer_draw_begins_with_the_shorter(stream, size):
    for numbers in (stream.normal, stream.uniform):
        long = numbers(HERE, (3 * random._CHUNK,))
        assert np.array_equal(numbers(HERE, (size,)), long[:size])
        assert all_distinct(long.tolist())


def test_the_size_of_a_chunk_does_not_matter(monkeypatch):
    expected = Secure(KEY).normal(HERE, (1000,))
    for chunk in (1, 3, 64, 999, 1000):
        monkeypatch.setattr(random, "_CHUNK", chunk)
        assert np.array_equal(Secure(KEY).normal(HERE, (1000,)), expected)


@pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7), Noiseless(7)], ids=["secure", "seeded", "silent"])
def test_a_shape_only_arranges_the_draws(stream):
    for shape in ((), (0,), (5,), (2, 3), (2, 0, 3), (4, 1, 2)):
        for numbers in (stream.normal, stream.uniform):
            out = numbers(HERE, shape)
            assert out.shape == shape
            assert out.dtype == np.float64
            assert out.flags.writeable
            assert np.array_equal(out.ravel(), numbers(HERE, (out.size,)))


@pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7), Noiseless(7)], ids=["secure", "seeded", "silent"])
@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, top in zip(Address._fields, (2**32, 2**32, 2**16, 2**16), strict=True) for v in (-1, top, 0.5)],
)
def test_an_address_out_of_range_is_refused(stream, field, value):
    at = HERE._replace(**{field: value})
    for numbers in (stream.normal, stream.uniform):
        with pytest.raises(SordinoError, match=field):
            numbers(at, (1,))


def test_an_address_is_a_nonce():
    assert len({at.pack() for at in GRID}) == len(GRID)
    assert {len(at.pack()) for at in GRID} == {12}
    assert Address(np.int64(3), np.int64(5), 1).pack() == HERE.pack()


# ------------------------------------------------------------------------------------------------------------ sources


def keystream(key: bytes, nonce: bytes, size: int) -> bytes:
    words = np.empty(size // 8, dtype="<u8")
    random._keystream(random._chacha20()(key, nonce), words)
    return words.tobytes()


def test_the_keystream_is_rfc_8439():
    """Section 2.3.2 (the block with counter 1 is the second here), and appendix A.1, vectors 1 and 2."""
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert keystream(KEY, nonce, 128)[64:] == expected
    assert keystream(KEY, nonce, 128)[:64] != expected
    assert keystream(bytes(32), bytes(12), 128) == bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def test_draws_come_from_that_keystream():
    stream = Secure(KEY)
    words = np.frombuffer(keystream(random._derive(KEY, b"sordino normal"), HERE.pack(), 800), dtype="<i8")
    z = stream.normal(HERE, (100,))
    assert np.allclose(np.sign(words) * ndtr(-np.abs(z)), words / 2.0**64, rtol=1e-12)
    words = np.frombuffer(keystream(random._derive(KEY, b"sordino uniform"), HERE.pack(), 800), dtype="<u8")
    assert np.allclose(stream.uniform(HERE, (100,)), words / 2.0**64, rtol=0, atol=2.0**-52)


def test_fresh_secure_sources_differ():
    draws = np.array([Secure().normal(HERE, (4,)) for _ in range(8)])
    assert all_distinct(draws.ravel().tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("mutant", [False, True])
def test_a_copy_of_the_process_draws_nothing(mutant, monkeypatch):
    """Both would draw the same noise, which the difference of their releases does not have. A mutant draws it."""
    if mutant:
        monkeypatch.setattr(Secure, "_check_process", lambda self: None)
    stream = Secure()
    draws = [
        lambda one: one.normal(HERE, (2,)),
        lambda one: one.uniform(HERE, (2,)),
        lambda one: one.words(HERE, 2),
        lambda one: one.word_rows([HERE], 2),
        lambda one: one.bounds(HERE, 0),
    ]

    def drawn(one):
        found = []
        for each in draws:
            with suppress(SordinoError):
                found.append(each(one))
        return found

    def in_a_copy(one):
        out, into = os.pipe()
        if (child := os.fork()) == 0:
            os.write(into, pickle.dumps(drawn(one)))
            os._exit(0)
        os.waitpid(child, 0)
        os.close(into)
        with os.fdopen(out, "rb") as file:
            return pickle.load(file)

    here, there = drawn(stream), in_a_copy(stream)
    assert len(here) == len(draws)
    assert len(there) == len(draws) * mutant
    assert not mutant or (here[0] == there[0]).all()
    begun = [in_a_copy(_Begins(stream))[0].tolist() for _ in range(2)]
    assert begun[0] != begun[1]


class _Begins:
    """A run that begins in the copy."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream.fresh(), name)


def test_seeds_differ_also_in_their_high_bits():
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**33, 2**64 - 1]
    assert all_distinct([Seeded(s).normal(HERE, (1,)).item() for s in seeds])


def test_a_key_is_hidden_and_checked():
    stream = Secure(KEY)
    assert repr(stream) == "Secure(key=<hidden>)"
    assert KEY not in vars(stream).values()
    with pytest.raises(SordinoError, match="key"):
        Secure(b"short")


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1"])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(SordinoError, match="seed"):
        Seeded(seed)


def test_who_may_promise():
    assert Secure().private is True
    assert Seeded(1).private is False
    assert Noiseless().private is False
    assert isinstance(source(None), Secure)
    assert isinstance(source(0), Seeded)
    assert np.array_equal(source(4).normal(HERE, (3,)), Seeded(4).normal(HERE, (3,)))


def test_noiseless_draws_no_normals_but_uniforms():
    assert not Noiseless().normal(HERE, (3, 4)).any()
    assert np.array_equal(Noiseless(5).uniform(HERE, (9,)), Seeded(5).uniform(HERE, (9,)))


def test_words_are_fair_bits_of_a_stream_of_their_own():
    """Of 64 fair bits, and from a stream of their own."""
    for stream in (Secure(KEY), Seeded(7), random.Counted(7), Noiseless(7)):
        words = stream.words(HERE, SIZE)
        assert words.dtype == np.uint64
        assert words.shape == (SIZE,)
        assert words.flags.writeable
        assert all_distinct(words.tolist())
        bits = np.unpackbits(words.view(np.uint8)).reshape(SIZE, 64)
        assert np.abs(bits.mean(0) - 0.5).max() <= 4.5 * math.sqrt(0.25 / SIZE)
        for size in (0, 1, 7, random._CHUNK + 1):
            assert np.array_equal(stream.words(HERE, size), words[:size])
        firsts = [stream.words(at, 1).item() for at in GRID]
        assert all_distinct(firsts)
        tops = (words[:1000] >> np.uint64(12)).tolist()
        uniforms = stream.uniform(HERE, (1000,)) * 2.0**52 - 0.5
        assert not {*tops} & {*uniforms.astype(np.uint64).tolist()}
        with pytest.raises(SordinoError, match="round"):
            stream.words(HERE._replace(round=-1), 1)
    raw = keystream(random._derive(KEY, b"sordino words"), HERE.pack(), 800)
    assert Secure(KEY).words(HERE, 100).tobytes() == raw
    assert raw != keystream(random._derive(KEY, b"sordino normal"), HERE.pack(), 800)
    assert np.array_equal(Noiseless(7).words(HERE, 9), Seeded(7).words(HERE, 9))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(SordinoError, match=r"pip install cryptography.*seed"):
        Secure()
    with pytest.raises(SordinoError, match="cryptography"):
        source(None)
    assert Seeded(1).normal(HERE, (2,)).shape == (2,)


def test_a_stream_that_would_wrap_is_refused(monkeypatch):
    monkeypatch.setattr(random, "_MOST", 10)
    assert Secure(KEY).normal(HERE, (10,)).size == 10
    with pytest.raises(SordinoError, match="shape"):
        Secure(KEY).normal(HERE, (11,))


def test_counted_streams_differ_between_seeds_and_clients():
    """A key made like a place would let client 2 of seed 1 draw what client 1 of seed 2 draws."""
    from sordino.privacy.mechanisms.random import Counted

    draws = [
        Counted(seed).normal(Address(client, 0, query, index), (4,))
        for seed, client, query, index in itertools.product(range(5), range(5), range(2), range(2))
    ]
    draws += [
        Counted(seed).uniform(Address(client, 0, 0), (4,)) for seed, client in itertools.product(range(5), repeat=2)
    ]
    assert len({tuple(draw) for draw in draws}) == len(draws)


def test_counted_normals_are_standard_and_begin_alike():
    from sordino.privacy.mechanisms.random import Counted, counted

    z = counted([Counted(seed) for seed in range(4)], [Address(0, t, 0) for t in range(10)], 20_000)
    assert z.shape == (10, 4, 20_000)
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / z.numel())
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / z.numel())
    assert abs(float((z[..., 1:] * z[..., :-1]).mean())) < 4 / math.sqrt(z.numel())
    assert abs(float((z[1:] * z[:-1]).mean())) < 4.5 / math.sqrt(z.numel())
    short = Counted(2).normal(Address(0, 3, 0), (5,))
    assert np.array_equal(short, z[3, 2, :5].numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler
@pytest.mark.parametrize("size", [650, 33])
def test_a_compiled_draw_on_a_gpu_is_the_draw(size):
    """The words are equal, so that only the logarithm and the cosine may round differently."""
    from sordino.models.softmax_batched import compiled
    from sordino.privacy.mechanisms.random import Counted, counted

    sources, at = [Counted(seed) for seed in range(7)], [Address(0, t, 0) for t in range(16)]
    plain = counted(sources, at, size)
    torch.testing.assert_close(counted(sources, at, size, "cuda", compiled).cpu(), plain, rtol=1e-10, atol=1e-13)


def test_shared_draws_are_rows_of_one_draw_and_settle_alike():
    """Drawn together or row by row, runs x clients get the same numbers, and the same ideal numbers behind them."""
    common = SharedDraws(Secure(bytes(32)), runs := 3, 0.5)
    at = [Address(client, 0, 0) for client in range(2)]
    rows = stack([stack([draw(row, [(1.0, a)], (4,)) for a in at]) for row in common.rows()])
    joint = stack([draw(common, [(1.0, a)], (runs, 4)) for a in at], 1)
    assert torch.equal(rows.z, joint.z)
    for i in range(rows.z.numel()):
        (one,), (other,) = rows.terms(i), joint.terms(i)
        assert one.source.bounds(one.at, one.element) == other.source.bounds(other.at, other.element)


def test_rows_are_drawn_together_only_if_they_are_all_rows_in_order():
    rows = SharedDraws(Seeded(0), 3).rows()
    assert joint_source(rows) is rows[0].common
    assert joint_source(rows[::-1]) is None
    assert joint_source([*rows[:2], Seeded(0)]) is None
    assert joint_source([*rows[:2], SharedDraws(Seeded(0), 3).rows()[2]]) is None
