"""Intervals of the coefficients of a linear model, from the releases of `methods.uncertainty`.

Let w be the parameters that the last round was asked at (of two classes, the difference of both classes' parameters),
w* their best value on the population, B the mean Hessian, and g the mean gradient at w. To first order
g = B (w - w*) + s, where s is the sampling error of n records, with covariance B / n if a logistic model holds, and
phi B / n for numbers whose variance is phi times what the loss assumes. Released are g + e and B + E, with Gaussian e
and E of known variance, and for numbers the trace of phi B. So for one Newton step from w,

    w1 = w - (B + E)^-1 (g + e),   w1 - w* = (B + E)^-1 (E (w - w*) - s - e).

The covariance of w1 is that of the three terms between inverses of the released matrix. E moves w1 by what w was wrong
only, which w1 - w estimates. Directions in which the noise hides the curvature are not inverted: w1 keeps w there, and
a coefficient that lies in them has no interval. That holds for all levels of a category together with the intercept,
because they sum to 1, and for indicators that are hardly ever 1.

Persons: n is their number, and B and g are means over persons. The records of one person may be alike in any way. The
square of a sum of k terms is at most k times the sum of their squares, so the covariance of s is at most k B / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sordino.core import Privacy, Unit

if TYPE_CHECKING:
    from sordino.data.schema import Schema

LEAST_RATIO = 2.0  # of an eigenvalue to the largest that noise alone has: smaller ones are hidden
MOST_HIDDEN = 0.02  # of a coefficient's direction, squared, that may lie in hidden directions
TAIL = 5.0  # standard deviations: one of 300 noises is larger with a chance below 1 in 10,000
INTERCEPT = "(intercept)"


class Estimate(NamedTuple):
    """Coefficients by one Newton step, with standard errors; NaN where the noise hides them."""

    value: np.ndarray
    standard_error: np.ndarray

    def in_units(self, schema: Schema) -> Estimate:
        """The same in the unit of the table: of a quantity all coefficients, of a count the intercept."""
        value, error = self.value.copy(), self.standard_error
        if schema.task == "quantity":
            value, error = value * schema.unit, error * schema.unit
            value[-1] += schema.middle
        if schema.task == "count":
            value[-1] += math.log(schema.unit)
        return Estimate(value, error)


def most_records(privacy: Privacy) -> int:
    """The most records of one protected unit, at all clients together."""
    return privacy.person_records * privacy.person_clients if privacy.unit is Unit.PERSON else 1


class Released(NamedTuple):
    """What the last round released, at `point`, and the noise on it."""

    point: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    stds: tuple[float, float]  # on an entry of the gradient, and on the diagonal of the Hessian

    def of_contrast(self) -> Released:
        """The same for the difference of the parameters of two classes, features (with 1 as the last) by classes."""
        size = len(self.point) // 2
        w, g = (part.reshape(size, 2) for part in (self.point, self.gradient))
        blocks = self.hessian.reshape(size, 2, size, 2)
        curvature = (blocks[:, 0, :, 0] + blocks[:, 1, :, 1] - blocks[:, 0, :, 1] - blocks[:, 1, :, 0]) / 4
        stds = self.stds[0] / math.sqrt(2), self.stds[1] / 2  # of g1 - g0 over 2, and of the combined blocks
        return Released(w[:, 1] - w[:, 0], (g[:, 1] - g[:, 0]) / 2, curvature, stds)


def dispersion(spread: float, std: float, hessian: np.ndarray) -> float:
    """The variance of numbers around their predictions, over what the loss assumes.

    Args:
        spread: The released trace of the mean of g g^T.
        std: Of the noise on one entry of its diagonal; a spread below the noise of the trace counts as that noise.
        hessian: The released mean Hessian.
    """
    trace = float(np.trace(hessian))
    return max(spread, std * math.sqrt(len(hessian))) / trace if trace > 0 else math.inf


def estimate(released: Released, units: int, spread: float = 1.0, *, sure: bool = True) -> Estimate:
    """Coefficients with standard errors.

    Args:
        released: The releases of the last round.
        units: Training records, or persons.
        spread: Of the sampling error: `dispersion`, times the most records of a person.
        sure: Whether the intercept is known well enough where the noise hides it: it was calibrated, or predictions are
            linear. Otherwise all curvatures may be those of wrong risks or rates, and nothing has an interval.
    """
    start, slope, curvature, (noise, matrix_noise) = released
    size = len(start)
    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    edge = matrix_noise * math.sqrt(2 * size)
    seen = values > max(LEAST_RATIO * edge, 1e-9 * values.max())
    values = (values + np.sqrt(np.clip(values**2 - edge**2, 0, None))) / 2  # noise raises eigenvalues on average
    inverse = (vectors[:, seen] / values[seen]) @ vectors[:, seen].T
    moved = inverse @ slope
    middle = spread * curvature / units + noise**2 * np.eye(size)
    middle += matrix_noise**2 / 2 * (moved @ moved * np.eye(size) + np.outer(moved, moved))
    variance = np.einsum("ij,jk,ki->i", inverse, middle, inverse)
    hidden = (vectors[:, ~seen] ** 2).sum(1) > MOST_HIDDEN
    hidden |= hidden[-1] and not sure
    error = np.where(hidden, np.nan, np.sqrt(np.clip(variance, 0, None)))
    return Estimate(np.where(hidden, np.nan, start - moved), error)


def hidden_for_sure(bound: float, std: float, size: int) -> bool:
    """Whether the noise hides a coefficient whatever the records are. This needs public facts alone.

    Let M = B + E, and e the direction of the coefficient. If it is not hidden, at least 1 - MOST_HIDDEN of e lies along
    eigenvalues of M above LEAST_RATIO times the edge, and the rest along eigenvalues of at least -(edge + TAIL std),
    because B has no negative ones. So e'Me is large. But e'Me = e'Be + e'Ee is at most bound + TAIL std.

    Args:
        bound: Upper bound of e'Be.
        std: Of the noise on the diagonal of M.
        size: Number of coefficients.

    Returns:
        True if the coefficient has no interval, except with a chance below 1 in 10,000.

    Example:
        >>> hidden_for_sure(0.25, 0.01, 20), hidden_for_sure(0.25, 0.1, 20)
        (False, True)
    """
    edge, tail = std * math.sqrt(2 * size), TAIL * std
    return bound + tail < (1 - MOST_HIDDEN) * LEAST_RATIO * edge - MOST_HIDDEN * (edge + tail)


def table(found: Estimate, names: Sequence[str], level: float = 0.95) -> list[dict[str, Any]]:
    """One row per coefficient, the intercept last; numbers are None where the noise hides them."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    rows = []
    for name, value, error in zip([*names, INTERCEPT], *found, strict=True):
        known = math.isfinite(error)
        numbers = (value, error, value - z * error, value + z * error)
        keys = ("estimate", "standard_error", "low", "high")
        rows.append({"feature": name} | {k: float(v) if known else None for k, v in zip(keys, numbers, strict=True)})
    return rows


def told(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many coefficients have an interval, and, where some have none, why and what would help.

    Args:
        rows: One per coefficient, as `table` writes them.
    """
    known = sum(row["low"] is not None for row in rows)
    count = f"{known} of {len(rows)} coefficients have a 95 % interval"
    if known == len(rows):
        return count
    return (
        f"{count}; the noise is too large for the others, or their columns sum to 1; more records, a larger epsilon or "
        "a larger uncertainty makes it smaller"
    )
