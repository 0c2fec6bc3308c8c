"""Concentrated DP: the account of discrete Gaussian noise, and its conversion to (epsilon, delta).

`rho` gives the rho of one release with a sum of discrete Gaussians, `epsilon` converts the rho of a whole run, and
`rho_of` inverts it. The bound of each release may fail with probability FAILURE, which is subtracted from delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sordino.errors import SordinoError
from sordino.privacy.accounting import roots
from sordino.privacy.accounting.gaussian import SLACK

FAILURE = 2.0**-64  # largest failure probability of one release: see mechanisms/discrete_gaussian.py
LEAST_VARIANCE, MOST_VARIANCE = 0.25, 2.0**60  # the proof for sums needs the first; the modulus needs the second
ROUND_UP = 1 + 2.0**-38  # covers the rounding errors of every formula here, including e^-x for x < 746

# By which factor the standard deviation of integer noise is reduced to that of the Gaussian noise it is a function of.
#
# Let m be an integer vector, σ = SMOOTHING τ and ρ² = σ² - τ². Draw y from N(m, τ² I), then each integer k_j with
# probability proportional to exp(-(k_j - y_j)²/2ρ²). The law of k is that of m + N_Z(0, σ²) up to a factor of e^±T per
# coordinate, T = 4 η/(1 - 2η), η = Σ_{j>=1} exp(-2π²ρ²j²) (docs/proofs.md, "Integers").
#
# So if the Gaussian releases are (ε, δ)-DP, also about samples, these are (ε + 2kdT, e^kdT δ)-DP after k releases in d
# dimensions. The noise of the sum has a variance of at least LEAST_SMOOTHED_VARIANCE, so ρ² >= 31, η < e^-600 and
# kdT < e^-500, less than any rounding error here. A sum of discrete Gaussians is a discrete Gaussian up to the e^±T of
# `rho`, which is smaller still.
SMOOTHING = 1 + 2.0**-12
LEAST_SMOOTHED_VARIANCE = 2.0**16

_EXPLICIT = 4096  # terms of tau that are added one by one


def rho(sensitivity: float, variance: float, terms: int, dimension: int) -> float:
    """rho of one release with a sum of `terms` discrete Gaussians: it is rho-concentrated DP with rho = ε²/2 and

        ε² = min(s²/v + 2τd, (s/√v + τ√d)²),    v = terms σ²,    τ = 10 Σ_{k=1}^{terms-1} exp(-2π² σ² k/(k+1))

    (Kairouz, Liu, Steinke 2021, Proposition 14; σ >= 1/2). Their argument in brief: the density of the sum of discrete
    Gaussians of variances kσ² and σ² is that of N_Z(0, (k+1)σ²) times Σ_x exp(-(x - c)²/2r²), where r² = σ² k/(k+1) and
    c depends on the place. By Poisson's formula this factor is constant up to 1 ± 2η, η = Σ_j exp(-2π²r²j²). So the
    density of the whole sum is that of N_Z(0, v) up to a factor of e^±T, T = Σ_k log((1 + 2η)/(1 - 2η)) <= τ/2.

    - The loss is at most that of N_Z(0, v), which is linear in the place, plus 2T per coordinate. The moments of a
      linear function of the sum are sub-Gaussian with variance v, so the Rényi divergence is at most α s²/2v + τd.
    - Alternatively, the sum is T²/2-concentrated relative to N_Z(0, v), and N_Z(0, v) is s²/2v-concentrated relative to
      its shift. Square roots add up (Bun and Steinke 2016): α (s_j/√v + τ)²/2 in coordinate j, and by Cauchy-Schwarz
      over all coordinates.

    Args:
      sensitivity: L2 sensitivity of the sum of integers.
      variance: of each discrete Gaussian.
      terms: number of discrete Gaussians.
      dimension: number of coordinates.

    Returns:
      The rho.

    Raises:
      SordinoError: an argument is out of its range.
    """
    check(sensitivity=sensitivity, variance=variance, terms=terms, dimension=dimension)
    if sensitivity == 0:
        return 0.0
    ratio, tau = sensitivity / math.sqrt(terms * variance), _tau(variance, terms) if terms > 1 else 0.0
    square = min(ratio * ratio + 2 * tau * dimension, (ratio + tau * math.sqrt(dimension)) ** 2)
    return square / 2 * ROUND_UP


def _tau(variance: float, terms: int) -> float:
    k = np.arange(1, min(terms, _EXPLICIT))
    total = float(np.exp(-2 * math.pi**2 * variance * k / (k + 1)).sum())
    rest = terms - _EXPLICIT  # k >= 4096, and exp(-x k/(k+1)) falls with k
    if rest > 0:
        total += rest * math.exp(-2 * math.pi**2 * variance * _EXPLICIT / (_EXPLICIT + 1))
    return 10 * (total * ROUND_UP + terms * 5e-324)  # the second for what is too small for float64


def epsilon(rho: float, delta: float, releases: int = 0) -> float:
    """An epsilon for which rho-concentrated DP is (epsilon, delta)-DP.

    For every α > 1, log δ = (α-1)(αρ - ε) + (α-1) log(1 - 1/α) - log α (Canonne, Kamath, Steinke 2020). This is convex
    in α, and smallest at ε = (2α-1)ρ + log(1 - 1/α). There log δ = -(α-1)²ρ - log α, which determines α for a given δ.
    Every α is valid, so an error in α is on the safe side.

    Args:
      rho: of the whole run.
      delta: the delta.
      releases: number of releases that may fail.

    Returns:
      The epsilon; inf if the failure probabilities use all of delta.

    Raises:
      SordinoError: an argument is out of its range.
    """
    check(rho=rho, delta=delta, releases=releases)
    return _epsilon(rho, _nats(delta, releases))


def rho_of(epsilon: float, delta: float, releases: int = 0) -> float:
    """The largest rho that is (epsilon, delta)-DP, reduced by one part in 1e12.

    Args:
      epsilon: the epsilon.
      delta: the delta.
      releases: number of releases that may fail.

    Returns:
      The rho.

    Raises:
      SordinoError: an argument is out of its range, or the failure probabilities use all of delta.
    """
    check(epsilon=epsilon, delta=delta, releases=releases)
    nats = _nats(delta, releases)
    if nats <= 0:
        raise SordinoError(f"delta: {delta} is too small for {releases} releases; each needs more than {FAILURE}.")
    if math.isinf(epsilon):
        return math.inf
    # Both equations of `epsilon`, solved for ρ: ε decreases as x = α - 1 increases.
    x = _root(
        lambda x: epsilon - (2 * x + 1) * (nats - math.log1p(x)) / (x * x) + math.log1p(1 / x),
        math.expm1(min(nats, 700.0)),
        math.inf,
    )
    value, step = (nats - math.log1p(x)) / (x * x) * (1 - SLACK), 2.0**-52
    while _epsilon(value, nats) > epsilon:
        value, step = value * (1 - step), 2 * step
    return value


def remaining(delta: float, releases: int) -> float:
    """What is left of delta if each of so many releases may fail; 0 or less if nothing is."""
    return math.nextafter(delta - releases * FAILURE * ROUND_UP, 0.0) if releases else delta


def _nats(delta: float, releases: int) -> float:
    """log(1/δ) of the delta that remains after the failures; -1 if nothing remains."""
    left = remaining(delta, releases)
    return -math.log(left) * (1 + 2.0**-52) if left > 0 else -1.0


def _epsilon(rho: float, nats: float) -> float:
    """Epsilon, rounded up by more than the rounding errors of its parts; α = 1 + x."""
    if math.isinf(rho) or nats <= 0:
        return math.inf
    if rho == 0:
        return 0.0
    x = _root(lambda x: x * x * rho + math.log1p(x) - nats, math.expm1(min(nats, 700.0)), math.sqrt(nats / rho))
    up, down, rest = (1 + x) * rho, -math.log1p(1 / x), (nats - math.log1p(x)) / x
    error = 2.0**-49 * (up - down + (nats + math.log1p(x)) / x)
    return max(0.0, up + down + rest + error)


def _root(f: Callable[[float], float], *above: float) -> float:
    """The root of an increasing function with f < 0 near 0 and f >= 0 at the smallest of `above`."""
    high = min(above)
    low = high / 2
    while f(low) > 0:
        high, low = low, low / 2
    return roots.root(f, low, high, 1e-14) if f(high) > 0 else high


def check(**arguments: float) -> None:
    """Raise SordinoError for the first argument that is out of its range."""
    for name, value in arguments.items():
        if name == "delta" and not 0 < value < 1:
            raise SordinoError(f"delta: {value} must lie between 0 and 1; 1e-5 is usual.")
        if name == "variance" and not LEAST_VARIANCE <= value <= MOST_VARIANCE:
            raise SordinoError(f"variance: {value} must lie between 1/4 and 2**60; choose another scale.")
        if name in ("terms", "dimension") and not (value >= 1 and value % 1 == 0):
            raise SordinoError(f"{name}: {value} must be a whole number of at least 1.")
        if not value >= 0:
            raise SordinoError(f"{name}: {value} must be at least 0.")
