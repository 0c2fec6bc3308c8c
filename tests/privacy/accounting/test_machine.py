"""Figures that do not depend on the machine, and coins that nobody can recompute."""

import hashlib
import io
import math
import tokenize
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import scipy.special

import sordino
from sordino.core import Adjacency
from sordino.privacy.accounting import double_double, gaussian, subsampled
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler

ADD, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE

# ------------------------------------------------------------------------------------------------------- the sources

FORBIDDEN = {
    "longdouble": "its width depends on the machine: 64 bits on x86-64, 113 on aarch64, 53 elsewhere",
    "clongdouble": "its width depends on the machine",
    "longcomplex": "its width depends on the machine",
    "float128": "it exists on some machines only",
    "complex256": "it exists on some machines only",
    "default_rng": "PCG64 is not cryptographic: its state follows from a few outputs",
    "PCG64": "it is not cryptographic: its state follows from a few outputs",
    "RandomState": "MT19937 is not cryptographic: its state follows from its outputs",
    "MT19937": "it is not cryptographic: its state follows from its outputs",
    "SFC64": "it is not cryptographic",
}
ALLOWED = {  # (file, word): why
    ("privacy/mechanisms/random.py", "SFC64"): "`Seeded` alone, which says of itself that it is not private",
}


def names(text):
    """Every name of a Python source, without comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def findings(root):
    for folder in ("privacy", "engines"):
        for path in sorted((root / folder).rglob("*.py")):
            for word in sorted(names(path.read_text(encoding="utf-8")) & set(FORBIDDEN)):
                yield path.relative_to(root).as_posix(), word


def test_no_source_uses_what_depends_on_the_machine_or_can_be_guessed():
    found = list(findings(Path(sordino.__file__).parent))
    assert [f"{file}: {word} ({FORBIDDEN[word]})" for file, word in found if (file, word) not in ALLOWED] == []
    assert set(ALLOWED) <= set(found), "an exception that is no longer needed"


@pytest.mark.parametrize("word", FORBIDDEN)
def test_the_walk_sees_what_it_looks_for(word, tmp_path):
    (tmp_path / "engines").mkdir()
    file = tmp_path / "engines" / "deep.py"
    file.write_text(f'"""{word}"""\n# {word}\n')
    assert list(findings(tmp_path)) == []
    file.write_text(f"import numpy as np\nx = np.{word}\n")
    assert list(findings(tmp_path)) == [("engines/deep.py", word)]


# ------------------------------------------------------------------------------------------- double-double arithmetic


def exact(number, k=...):
    return [Fraction(float(a)) + Fraction(float(b)) for a, b in zip(number.high[k], number.low[k], strict=True)]


def random_real(rng, size=400):
    high = rng.standard_normal(size) * 2.0 ** rng.integers(-40, 40, size)
    return double_double.Real(high, high * rng.uniform(-1, 1, size) * 2.0**-54)


def test_operations_err_by_less_than_they_say():
    rng = np.random.default_rng(1)
    a, b = random_real(rng), random_real(rng)
    xs, ys = exact(a), exact(b)
    pairs = list(zip(xs, ys, strict=True))
    sizes = [abs(x) + abs(y) for x, y in pairs]
    for found, truth, scale in (
        (a.plus(b), [x + y for x, y in pairs], sizes),
        (a.minus(b), [x - y for x, y in pairs], sizes),
        (a.times(b), [x * y for x, y in pairs], [abs(x * y) for x, y in pairs]),
    ):
        errors = [abs(f - t) / s for f, t, s in zip(exact(found), truth, scale, strict=True)]
        assert max(errors) <= 8 * Fraction(1, 2**106)
        assert max(abs(Fraction(float(h)) - t) / s for h, t, s in zip(found.high, truth, scale, strict=True)) > 2**-56
    positive = double_double.Real(np.abs(a.high), np.copysign(a.low, a.high * a.low))
    root = positive.root()
    assert max(abs(r * r - x) / x for r, x in zip(exact(root), exact(positive), strict=True)) <= Fraction(1, 2**100)


def test_roots_of_unity():
    """Their products close the circle, and they agree with float64's."""
    for size in (4, 8, 64, 1 << 12):
        roots = double_double._roots(size)
        angle = -2 * math.pi * np.arange(size // 2) / size
        np.testing.assert_allclose(roots.real.high, np.cos(angle), atol=1e-15)
        np.testing.assert_allclose(roots.imag.high, np.sin(angle), atol=1e-15)
        real, imag = exact(roots.real), exact(roots.imag)
        assert max(abs(x * x + y * y - 1) for x, y in zip(real, imag, strict=True)) < 2**-97
        if size > 4:  # the generator's power is the quarter turn, -i
            this_round = roots.at(slice(1, 2)).power(size // 4)
            assert abs(exact(this_round.real)[0]) < size * 2**-97
            assert abs(exact(this_round.imag)[0] + 1) < size * 2**-97


def test_a_transform_to_a_hundred_bits():
    """Against exact sums with the roots that the test above confirmed."""
    rng, size = np.random.default_rng(2), 32
    values = rng.random(size) * 2.0 ** -rng.integers(0, 60, size)
    found = double_double.rfft(values)
    roots = double_double._roots(size)
    wr, wi = exact(roots.real), exact(roots.imag)
    wr, wi = wr + [-x for x in wr], wi + [-x for x in wi]
    norm = sum(Fraction(float(v)) for v in values)
    for k, (x, y) in enumerate(zip(exact(found.real), exact(found.imag), strict=True)):
        for part, w in ((x, wr), (y, wi)):
            truth = sum(Fraction(float(v)) * w[j * k % size] for j, v in enumerate(values))
            assert abs(part - truth) <= norm * Fraction(double_double.UNIT) * 5
    np.testing.assert_array_equal(double_double.irfft(found), values)  # to the last bit, over 60 binades
    assert np.abs(np.fft.irfft(np.fft.rfft(values)) - values).max() > 0
    with pytest.raises(ValueError, match="power of two"):
        double_double.rfft(np.ones(12))


def test_a_power_is_a_repeated_convolution():
    law = np.zeros(64)
    law[[0, 1, 3]] = 1 - 2.0**-60, 2.0**-61, 2.0**-61  # the float64 transform loses the small ones
    found = double_double.irfft(double_double.rfft(law).power(3))
    assert found[9] == pytest.approx(2.0**-183, rel=1e-3, abs=2.0**-96)
    assert found[3] == pytest.approx(3 * 2.0**-61, rel=1e-12)
    assert abs(np.fft.irfft(np.fft.rfft(law) ** 3)[3] / (3 * 2.0**-61) - 1) > 0.1


# ----------------------------------------------------------------------------------------------------------- figures

# Epsilons of x86-64 (NumPy 2). Under NumPy 1.24 and SciPy 1.10 on aarch64 none differed by more than 4e-9, relatively.
FIGURES = [
    (SampledGaussian(0.016, 1.0, 2000), REPLACE, 1e-5, 7.220201567074502),
    (SampledGaussian(0.016, 1.0, 200), ADD, 1e-5, 1.4763796997953593),
    (SampledGaussian(0.3, 0.5, 50), ADD, 1e-6, 6.103599538137691),
    (SampledGaussian(1e-4, 0.5, 100_000), ADD, 1e-5, 0.048694323854887825),
    (SampledGaussian(0.9, 0.3, 100), REPLACE, 1e-9, 45.99219437597305),
    (SampledGaussian(0.016, 1.0, 200, Sampler.FIXED), REPLACE, 1e-5, 11.05316717841428),
    (SampledGaussian(1e-4, 1.0, 300), ADD, 1e-12, 0.07975557351241497),  # from here on by double-double arithmetic
    (SampledGaussian(1e-4, 1.0, 10_000), REPLACE, 1e-12, 0.14715194854530958),
    (SampledGaussian(1e-6, 1.0, 10_000), ADD, 1e-12, 0.0008112911888315414),
    (SampledGaussian(1e-9, 3.0, 300), REPLACE, 1e-12, 0.03554817887962141),
    (SampledGaussian(1e-9, 24.985795698968722, 3), REPLACE, 1e-8, 0.0),  # a record is hardly ever sampled
]
NAMES = [f"{release.rate:g}-{release.mu:.3g}-{release.times}-{adjacency}" for release, adjacency, *_ in FIGURES]


@pytest.mark.parametrize(("release", "adjacency", "delta", "epsilon"), FIGURES, ids=NAMES)
def test_the_same_figures_on_every_machine(release, adjacency, delta, epsilon):
    assert subsampled.epsilon([release], delta, adjacency) == pytest.approx(epsilon, rel=2e-8)


@pytest.mark.parametrize(("release", "adjacency", "delta", "epsilon"), FIGURES, ids=NAMES)
def test_another_libm_and_another_transform_hardly_move_a_figure(release, adjacency, delta, epsilon, monkeypatch):
    """As on a machine whose functions err in the last bits otherwise."""
    rng = np.random.default_rng(3)

    def shaken(function):
        def other(*arguments, **options):
            found = function(*arguments, **options)
            return found * (1 + 2.0**-52 * rng.choice([-1, 0, 1], np.shape(found)))

        return other

    monkeypatch.setattr(scipy.special, "ndtr", shaken(scipy.special.ndtr))
    for name in ("rfft", "irfft"):
        monkeypatch.setattr(scipy.fft, name, shaken(getattr(scipy.fft, name)))
    subsampled._epsilon.cache_clear()
    assert subsampled.epsilon([release], delta, adjacency) == pytest.approx(epsilon, rel=2e-8)
    subsampled._epsilon.cache_clear()


def test_the_bits_of_a_transform():
    """Nothing but IEEE additions, products and roots: the same bits on x86-64 and aarch64."""
    values = np.frombuffer(hashlib.shake_256(b"x").digest(8 * 4096), "<u8").astype(float) * 2.0**-64
    power = double_double.rfft(values / 4096).power(7)
    parts = [*power.real, *power.imag, double_double.irfft(power)]
    bits = b"".join(np.ascontiguousarray(part).astype("<f8").tobytes() for part in parts)
    assert hashlib.sha256(bits).hexdigest()[:16] == "905066388d7f33a2"


# ------------------------------------------------------------------------------------------------ records hardly drawn


def test_precise_arithmetic_agrees_where_float64_is_enough():
    parts = (SampledGaussian(0.05, 0.8, 40),)
    plain, precise = (subsampled._curve(parts, 0.2, "replace", 1e-6, precise=precise) for precise in (False, True))
    assert subsampled._epsilon_at(precise, 1e-6) == pytest.approx(subsampled._epsilon_at(plain, 1e-6), rel=1e-5)
    assert precise.lost.max() < 1e-9 * plain.lost.max()


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_a_chance_below_delta_costs_nothing(adjacency):
    for rate, times, mu in ((1e-9, 3, 24.9), (1e-7, 90, 10.0)):
        ever = -math.expm1(times * math.log1p(-rate))
        releases = [SampledGaussian(rate, mu, times)]
        assert subsampled.epsilon(releases, 1.001 * ever, adjacency) == 0
        assert subsampled.delta(releases, 0.0, adjacency) <= ever * (1 + 1e-5)
        # Beside a Gaussian release, what is left of delta is that one's.
        both = subsampled.epsilon(releases, 2 * ever, adjacency, 0.5)
        assert gaussian.epsilon(0.5, 2 * ever) * (1 - 1e-9) <= both <= gaussian.epsilon(0.5, ever) * (1 + 1e-5)
    # With a chance above delta, and hardly any noise, the record shows: nothing is given away.
    assert subsampled.epsilon([SampledGaussian(1e-9, 20.0, 30)], 1e-8, adjacency) > 10


@pytest.mark.parametrize("way", ["remove", "replace"])
def test_one_rare_release_by_quadrature(way):
    """A delta of 1e-12, where float64 alone overstated epsilon."""
    q, mu, delta = 1e-4, 1.0, 1e-12
    found = subsampled._refined((SampledGaussian(q, mu, 1),), 0.0, way, delta)
    x = np.linspace(0, mu + 14, 400_001)

    def divergence(epsilon):
        plus, minus = ((1 - q) * np.exp(-(x**2) / 2) + q * np.exp(-((x - m) ** 2) / 2) for m in (mu, -mu))
        other = minus if way == "replace" else np.exp(-(x**2) / 2)
        return float(np.maximum(plus - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0])) / math.sqrt(2 * math.pi)

    assert divergence(found) <= delta * (1 + 1e-6)
    assert divergence(0.995 * found) > delta
