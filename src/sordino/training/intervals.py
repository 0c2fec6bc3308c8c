"""Intervals of the coefficients of a model of two classes, from the releases of `methods.uncertainty`.

Let w be the difference of the two classes' parameters that the last round was asked at, w* its best value on the
population, B the mean of p (1 - p) u u^T, and g the mean of (p - y) u at w. To first order g = B (w - w*) + s, where s
is the sampling error of n records, with covariance B / n if the model holds. Released are g + e and B + E, with
Gaussian e and E of known variance. So for one Newton step from w,

    w1 = w - (B + E)^-1 (g + e),   w1 - w* = (B + E)^-1 (E (w - w*) - s - e).

The covariance of w1 is that of the three terms between inverses of the released matrix. E moves w1 by what w was wrong
only, which w1 - w estimates. Directions in which the noise hides the curvature are not inverted: w1 keeps w there, and
a coefficient that lies in them has no interval. That holds for all levels of a category together with the intercept,
because they sum to 1, and for indicators that are hardly ever 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

LEAST_RATIO = 2.0  # of an eigenvalue to the largest that noise alone has: smaller ones are hidden
MOST_HIDDEN = 0.02  # of a coefficient's direction, squared, that may lie in hidden directions
INTERCEPT = "(intercept)"


class Estimate(NamedTuple):
    """Coefficients by one Newton step, with standard errors; NaN where the noise hides them."""

    value: np.ndarray
    standard_error: np.ndarray


def estimate(
    theta: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, stds: tuple[float, float], records: int
) -> Estimate:
    """The difference of the two classes' parameters, with standard errors.

    Args:
        theta: Parameters of a softmax model of two classes, features (with 1 as the last) by classes, flat.
        gradient: The released mean gradient.
        hessian: The released mean Hessian.
        stds: Of the noise on an entry of the gradient, and on the diagonal of the Hessian.
        records: Training records.
    """
    size = len(theta) // 2
    w, g = (part.reshape(size, 2) for part in (theta, gradient))
    blocks = hessian.reshape(size, 2, size, 2)
    curvature = (blocks[:, 0, :, 0] + blocks[:, 1, :, 1] - blocks[:, 0, :, 1] - blocks[:, 1, :, 0]) / 4
    noise, matrix_noise = stds[0] / math.sqrt(2), stds[1] / 2  # of g1 - g0 over 2, and of the combined blocks
    start, slope = w[:, 1] - w[:, 0], (g[:, 1] - g[:, 0]) / 2

    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    edge = matrix_noise * math.sqrt(2 * size)
    seen = values > max(LEAST_RATIO * edge, 1e-9 * values.max())
    values = (values + np.sqrt(np.clip(values**2 - edge**2, 0, None))) / 2  # noise raises eigenvalues on average
    inverse = (vectors[:, seen] / values[seen]) @ vectors[:, seen].T
    moved = inverse @ slope
    middle = curvature / records + noise**2 * np.eye(size)
    middle += matrix_noise**2 / 2 * (moved @ moved * np.eye(size) + np.outer(moved, moved))
    variance = np.einsum("ij,jk,ki->i", inverse, middle, inverse)
    hidden = (vectors[:, ~seen] ** 2).sum(1) > MOST_HIDDEN
    error = np.where(hidden, np.nan, np.sqrt(np.clip(variance, 0, None)))
    return Estimate(np.where(hidden, np.nan, start - moved), error)


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
