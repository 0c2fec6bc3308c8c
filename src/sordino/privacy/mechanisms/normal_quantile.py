"""Quantiles of the normal distribution, approximately in float64 and proved in integer arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from sordino.lazy import scipy


def approximate_quantile(tail: int, bits: int) -> float:
    """x with Q(x) = (tail + 1/2) / 2^bits for the normal's upper tail Q, computed from its logarithm."""
    return max(0.0, -float(scipy.special.ndtri_exp(math.log(2 * tail + 1) - (bits + 1) * math.log(2))))


def quantile(tail: int, bits: int) -> tuple[Fraction, Fraction]:
    """Bounds on every x with tail / 2^bits <= Q(x) <= (tail + 1) / 2^bits, for the normal's upper tail Q.

    Newton's method finds the middle from scipy's float64 value and slope. Neither is trusted: `_upper_tail` proves the
    result, Q(low) >= (tail + 1) / 2^bits and Q(high) <= tail / 2^bits. Here tail >= 1.
    """
    fraction = bits + 8  # x counts 2^-fraction, and Q counts 2^-(bits + 16)
    middle = (2 * tail + 1) << 15
    start = approximate_quantile(tail, bits)
    mills = int(
        math.sqrt(math.pi / 2) * float(scipy.special.erfcx(start / math.sqrt(2))) * 2**60
    )  # Q / density, as 2^-60

    def width(change: int) -> int:
        """The change of x for this change of Q."""
        return ((change * mills) << fraction) // (middle << 60)

    x = int(Fraction(start) * 2**fraction)
    while abs(miss := sum(_upper_tail(x, fraction, bits + 16)) // 2 - middle) >= 1 << 12:
        x = max(0, x + width(miss))
    reach = width((1 << 15) + (1 << 13)) + 1
    low = high = x
    while low > 0 and _upper_tail(low, fraction, bits + 16)[0] < (tail + 1) << 16:
        low, reach = max(0, low - reach), 2 * reach
    while _upper_tail(high, fraction, bits + 16)[1] > tail << 16:
        high, reach = high + reach, 2 * reach
    return Fraction(low, 1 << fraction), Fraction(high, 1 << fraction)


def _upper_tail(x: int, fraction: int, bits: int) -> tuple[int, int]:
    """Integers low <= 2^bits Q(x / 2^fraction) <= high, for x >= 0.

    Q(x) = 1/2 - S / sqrt(2 pi), and S is the alternating sum of a_n / (2 n + 1) with a_n = x y^n / n!, y = x^2 / 2. In
    units of 2^-scale, t is a_n rounded down. Its error grows from e to at most e y / n + 1 in step n and is therefore
    at most e^y <= 2^growth throughout. Every term adds this and 1 for its own division. The remainder of the series
    is at most its first term, because terms decrease once n > y; with t = 0 this is at most 2^growth as well.
    """
    square = x * x
    growth = (3 * square >> (2 * fraction + 2)) + 1  # 3/2 > 1 / ln 2
    scale = bits + 16 + growth
    t, n, total = x << max(0, scale - fraction) >> max(0, fraction - scale), 0, 0
    while t or n <= growth:
        total += -(t // (2 * n + 1)) if n % 2 else t // (2 * n + 1)
        n += 1
        t = (t * square >> (2 * fraction + 1)) // n
    error = (n + 2) << (growth + 1)
    low, high = max(0, total - error), total + error
    root = bits + 16
    least, most = _root_of_two_pi(root)
    half = 1 << (bits - 1)
    return half + (-high << (bits + root)) // (least << scale), half - (low << (bits + root)) // (most << scale)


@lru_cache(maxsize=64)
def _root_of_two_pi(bits: int) -> tuple[int, int]:
    """Integers low <= 2^bits sqrt(2 pi) <= high, by Machin's pi / 4 = 4 arctan(1 / 5) - arctan(1 / 239)."""
    scale = 2 * bits

    def arctan(k: int) -> int:
        """arctan(1 / k) in units of 2^-scale: the errors of every term and of the remainder are below 2."""
        t, n, total = (1 << scale) // k, 0, 0
        while t:
            total += -(t // (2 * n + 1)) if n % 2 else t // (2 * n + 1)
            n += 1
            t //= k * k
        return total

    pi, error = (
        16 * arctan(5) - 4 * arctan(239),
        64 * scale,
    )  # at most scale / 4.6 + 1 terms, with errors of 2, times 20
    return math.isqrt(2 * (pi - error)), math.isqrt(2 * (pi + error)) + 1
