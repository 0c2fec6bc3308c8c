"""The tail of the normal distribution: beside scipy and 60-digit arithmetic, with the truncation proved exactly."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import scipy.special

from sordino.privacy.accounting import normal
from sordino.privacy.accounting.normal import FRACTION_FROM, levels, mills, upper_tail

UNIT = 2.0**-53
GRID = sorted(
    {
        *np.linspace(0, 8, 1601).tolist(),
        *np.geomspace(8, 1e8, 300).tolist(),
        *np.geomspace(1e-300, 1, 200).tolist(),
        *(math.nextafter(FRACTION_FROM, end) for end in (0, 9)),
    }
)


def exact_tail(x: float) -> mpmath.mpf:
    return mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2


def exact_mills(x: float) -> mpmath.mpf:
    """By the definition up to 1e3; beyond, by the asymptotic series, whose error is below its first omitted term."""
    x = mpmath.mpf(x)
    if x < 1000:
        return exact_tail(x) * mpmath.exp(x * x / 2) * mpmath.sqrt(2 * mpmath.pi)
    terms = [(-1) ** k * mpmath.fac2(2 * k - 1) / x ** (2 * k) for k in range(12)]
    return mpmath.fsum(terms) / x


def error(value: float, truth: mpmath.mpf) -> float:
    """Relative, in units of 2^-53."""
    return float(abs(mpmath.mpf(value) / truth - 1)) / UNIT


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def test_mills_ratio_is_as_accurate_as_it_says():
    errors = {x: error(mills(x), exact_mills(x)) for x in GRID}
    assert max(errors.values()) <= 16
    assert max(e for x, e in errors.items() if x >= FRACTION_FROM) <= 4, "the fraction keeps almost every bit"


def test_mills_ratio_is_scipys():
    x = np.array(GRID)
    expected = math.sqrt(math.pi / 2) * scipy.special.erfcx(x / math.sqrt(2))
    np.testing.assert_allclose([mills(each) for each in GRID], expected, rtol=30 * UNIT)


def test_a_fraction_with_too_few_levels_is_found(monkeypatch):
    monkeypatch.setattr(normal, "levels", lambda x: levels(x) // 2)
    assert max(error(mills(x), exact_mills(x)) for x in GRID) > 16


def test_extreme_arguments():
    assert mills(0.0) == pytest.approx(math.sqrt(math.pi / 2), rel=4 * UNIT)
    for x in (1e9, 1e155, 1e300, 1.7e308):  # x * x overflows beyond 1e154
        assert mills(x) == pytest.approx(1 / x, rel=1e-15)
    assert mills(math.inf) == 0.0
    assert (upper_tail(-math.inf), upper_tail(math.inf)) == (1.0, 0.0)


def test_mills_ratio_falls_across_the_place_where_the_formula_changes():
    step = 1e-12
    around = [mills(FRACTION_FROM + k * step) for k in range(-5, 6)]
    slope = mills(FRACTION_FROM) * FRACTION_FROM - 1  # R' = x R - 1
    for k, value in zip(range(-5, 6), around, strict=True):
        assert value == pytest.approx(mills(FRACTION_FROM) + k * step * slope, rel=16 * UNIT)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tail_is_as_accurate_as_it_says(sign):
    for x in (sign * each for each in GRID if each < 37):
        assert error(upper_tail(x), exact_tail(x)) <= 10 + (2 * x * x if x > 0 else 0), x
        assert upper_tail(x) == pytest.approx(scipy.special.ndtr(-x), rel=1e-12)


# ------------------------------------------------------------------------------------------- the truncation, exactly


def convergents(x: Fraction, n: int) -> list[Fraction]:
    """The convergents n and n + 1 of 1/(x + 1/(x + 2/(x + …))), in order. Mills' ratio lies between them."""
    before, now = (Fraction(0), Fraction(1)), (Fraction(1), x)  # numerator and denominator
    for k in range(1, n + 1):
        before, now = now, (x * now[0] + k * before[0], x * now[1] + k * before[1])
    return sorted(p / q for p, q in (before, now))


def distance(x: Fraction, n: int) -> Fraction:
    """The relative distance of these convergents.

    With their numerators P and denominators Q it is n! / (Q_n P_(n+1)) or n! / (Q_(n+1) P_n). These are polynomials in
    x with positive coefficients, so it falls with x.
    """
    low, high = convergents(x, n)
    return (high - low) / low


def test_the_truncation_is_smaller_than_rounding_at_every_argument():
    most = levels(FRACTION_FROM)
    for n in range(12, most + 1):
        # `levels` gives n only where 480 / x^2 < n - 11; the smallest such x, rounded down, is the worst.
        least = max(Fraction(FRACTION_FROM), Fraction(math.isqrt(480 * 10**12 // (n - 11)), 10**6))
        assert levels(float(least) * 0.999) >= n or least == FRACTION_FROM
        assert distance(least, n) < Fraction(1, 2**58)
    assert distance(Fraction(FRACTION_FROM), most // 2) > Fraction(1, 2**53), "half as many levels are too few"


@pytest.mark.parametrize("x", [2, Fraction(5, 2), 7, 40])
def test_the_convergents_enclose_the_ratio(x):
    for n in (1, 2, 5, 12):
        low, high = (mpmath.mpf(each.numerator) / each.denominator for each in convergents(Fraction(x), n))
        assert low < exact_mills(float(x)) < high
