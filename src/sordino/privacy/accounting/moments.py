"""Where the search for the noise of epochs starts: Rényi divergences of whole orders. Nothing here needs to be a bound.

The central limit is far off where a few rare large terms decide, as for few epochs or large epsilons. With rounds of
bins minibatches, the likelihood ratio without the record is A = ((bins - rounds) + W_1 + ... + W_rounds) / bins, and
E[W^k] = exp(mu² k (k-1) / 2) (`allocation`). So the exponential generating function of A's moments is a product of
truncated power series. Between whole orders the logarithm of a moment is interpolated.

For a replaced record, B is taken to add what its variance and covariance with A add to that of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sordino.core import Adjacency
from sordino.privacy.accounting.samplers import SampledGaussian

Array = np.ndarray
MOST_ORDER, LEAST_ORDER = 48, 3
MOST_EXPONENT = 500.0  # of the largest moment: exp of twice this is still a float
_PARTS = 8  # of an order, between which moments are interpolated
_STEPS = 8  # of the search, at most
_CLOSE = 1e-3  # on log epsilon
_NEXT = 0.02  # log of the factor between two places whose epsilons give a derivative
_LOG_FACTORIALS = np.array([math.lgamma(k + 1) for k in range(MOST_ORDER + 1)])


class Guess(NamedTuple):
    """About the factor on every standard deviation that keeps an epsilon.

    Attributes:
      factor: usually 5 to 30 percent too large, and more alike for like accounts.
      slope: about the derivative of log epsilon in its logarithm.
      close: whether the search ended; if not, the factor may be far off.
    """

    factor: float
    slope: float
    close: bool


def guess(
    parts: Sequence[SampledGaussian],
    mu: float,
    target: float,
    delta: float,
    adjacency: Adjacency,
    start: float,
    slope: float = -1.5,
) -> Guess:
    """About the factor on every standard deviation that keeps epsilon.

    Args:
      parts: the sampled releases, folded.
      mu: of a Gaussian-DP release beside them.
      target: the epsilon to keep.
      delta: the delta.
      adjacency: which data sets are neighbours.
      start: where the search starts.
      slope: the derivative that it starts with.

    Returns:
      The guess.
    """

    def excess(place: float) -> float:
        return math.log(_epsilon(parts, mu, math.exp(place), delta, adjacency) / target)

    place, before = math.log(start), (math.nan, math.nan)
    now = excess(place)
    for _ in range(_STEPS):
        if abs(now) < _CLOSE:
            break
        before, place = (place, now), place - min(max(now / slope, -0.7), 0.7)
        now = excess(place)
        if place != before[0]:
            slope = min(max((now - before[1]) / (place - before[0]), -5.0), -0.5)
    return Guess(math.exp(place), _slope(now, excess(place + _NEXT)), abs(now) < _CLOSE)


def derivative(parts: Sequence[SampledGaussian], mu: float, delta: float, adjacency: Adjacency, factor: float) -> float:
    """About the derivative of log epsilon in the logarithm of the factor.

    Args:
      parts: the sampled releases, folded.
      mu: of a Gaussian-DP release beside them.
      delta: the delta.
      adjacency: which data sets are neighbours.
      factor: on every standard deviation.

    Returns:
      The derivative.
    """
    here, next_ = (_epsilon(parts, mu, each, delta, adjacency) for each in (factor, factor * math.exp(_NEXT)))
    return _slope(math.log(here), math.log(next_))


def _slope(here: float, next_: float) -> float:
    return min(max((next_ - here) / _NEXT, -4.0), -0.5)


def _epsilon(parts: Sequence[SampledGaussian], mu: float, factor: float, delta: float, adjacency: Adjacency) -> float:
    """About the smallest epsilon that a Rényi divergence shows (Canonne, Kamath, Steinke 2020)."""
    largest = max(part.mu for part in parts) / factor
    most = int(min(MOST_ORDER, max(LEAST_ORDER, 1 + math.sqrt(2 * MOST_EXPONENT) / largest)))
    k, orders = _orders(most)
    normal = orders * (orders - 1) / 2
    total = normal * (mu / factor) ** 2
    for part in parts:
        span, square = max(part.span, 1), (part.mu / factor) ** 2
        series = np.exp(square * k * (k - 1) / 2 + k * math.log(part.rate) - _LOG_FACTORIALS[: most + 1])
        series = _power(series, span)
        rest = 1 - part.chance
        if rest > 0:
            series = np.convolve(series, np.exp(k * math.log(rest) - _LOG_FACTORIALS[: most + 1]))[: most + 1]
        total += part.times * np.interp(orders, k, np.log(series) + _LOG_FACTORIALS[: most + 1])
        if adjacency == Adjacency.REPLACE_ONE:
            total += part.times * normal * 3 * span * part.rate**2 * -math.expm1(-square)
    epsilons = (total - math.log(delta) - np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    return max(float(epsilons.min()), 1e-6)


@lru_cache(maxsize=MOST_ORDER)
def _orders(most: int) -> tuple[Array, Array]:
    """The whole orders of moments, and those of divergences."""
    return np.arange(most + 1), np.linspace(1.0, most, _PARTS * (most - 1) + 1)[1:]


def _power(series: Array, times: int) -> Array:
    """A power of a truncated series."""
    result: Array | None = None
    while True:
        if times & 1:
            result = series if result is None else np.convolve(result, series)[: len(series)]
        times >>= 1
        if not times:
            assert result is not None
            return result
        series = np.convolve(series, series)[: len(series)]
