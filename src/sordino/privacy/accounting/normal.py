"""The upper tail of the standard normal distribution, by Python's own `math`.

`scipy.special` has the same functions, but importing it takes longer than everything else that `sordino privacy`,
`sordino verify` and `sordino ledger` do together.
"""

from __future__ import annotations

import math

FRACTION_FROM = 2.0  # below it, math.exp and math.erfc are accurate enough


def upper_tail(x: float) -> float:
    """Φ(-x), the probability that a standard normal exceeds x.

    The relative error is at most (10 + 2 x²) · 2⁻⁵³ for x > 0, and 10 · 2⁻⁵³ elsewhere, down to 1e-300.

    >>> upper_tail(0.0)
    0.5
    """
    return math.erfc(x / math.sqrt(2)) / 2


def mills(x: float) -> float:
    """Mills' ratio Φ(-x) / φ(x) for x >= 0, with a relative error of at most 16 · 2⁻⁵³.

    From 2 on it is Laplace's continued fraction 1/(x + 1/(x + 2/(x + 3/(x + …)))), evaluated from `levels(x)` upwards.
    All its terms are positive, so every step reduces the relative rounding error of the one before, and the ratio lies
    between any two neighbouring convergents. Their relative distance falls with x, and is below 2⁻⁵⁸ (a test computes
    it exactly for each number of levels).

    >>> round(mills(0.0), 6), round(mills(10.0), 6)
    (1.253314, 0.099028)
    """
    if x < FRACTION_FROM:
        return math.sqrt(math.pi / 2) * math.exp(x * x / 2) * math.erfc(x / math.sqrt(2))
    rest = x
    for k in range(levels(x), 0, -1):
        rest = x + k / rest
    return 1 / rest


def levels(x: float) -> int:
    """How many levels of the continued fraction are enough at x >= 2."""
    return 12 + int(480 / (x * x))
