"""Roots of functions of one number.

`scipy.optimize` has several root finders, but importing it takes 0.4 s, more than everything else that
`sordino privacy` and `sordino ledger` do together.
"""

from __future__ import annotations

from collections.abc import Callable

from sordino.errors import SordinoError

STEPS = 2_000  # bisection alone needs about 1,100 steps from 1e-300 to 1


def root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Find where a continuous function changes its sign, by Chandrupatla's method.

    Each step takes the inverse quadratic interpolation of the last three points where that is safe, and bisects
    otherwise.

    Args:
        f: The function; f(low) and f(high) must not have the same sign.
        low: One end of the interval.
        high: The other end.
        tolerance: Relative width of the interval at which the search ends.

    Returns:
        The end of the last interval where |f| is smaller.

    Raises:
        SordinoError: f has the same sign at both ends.
    """
    new, old = float(low), float(high)
    f_new, f_old = f(new), f(old)
    if f_new * f_old > 0:
        raise SordinoError(f"root: f({low:g}) = {f_new:g} and f({high:g}) = {f_old:g} must differ in sign.")
    before, f_before = old, f_old
    part = 0.5  # of the way from `new` to `old`
    for _ in range(STEPS):
        best, f_best = (new, f_new) if abs(f_new) < abs(f_old) else (old, f_old)
        width = abs(old - new)
        least = 2 * tolerance * abs(best)
        if f_best == 0 or width <= least or new + 0.5 * (old - new) in (new, old):
            return best
        part = min(max(part, 0.5 * least / width), 1 - 0.5 * least / width)
        point = new + part * (old - new)
        f_point = f(point)
        if (f_point > 0) == (f_new > 0):
            before, f_before = new, f_new
        else:
            before, f_before, old, f_old = old, f_old, new, f_new
        new, f_new = point, f_point
        part = _interpolated(new, old, before, f_new, f_old, f_before)
    return best


def _interpolated(a: float, b: float, c: float, f_a: float, f_b: float, f_c: float) -> float:
    """The part of the way from a to b at which the inverse parabola through three points is 0; 0.5 where unsafe."""
    if f_b == f_a or f_c in (f_a, f_b) or c == b:
        return 0.5
    x, y = (a - b) / (c - b), (f_a - f_b) / (f_c - f_b)
    if not (y * y < x and (1 - y) ** 2 < 1 - x):
        return 0.5
    return f_a / (f_b - f_a) * f_c / (f_b - f_c) + (c - a) / (b - a) * f_a / (f_c - f_a) * f_b / (f_c - f_b)
