"""Concentrated DP: what discrete Gaussian noise amounts to, and its conversion to (epsilon, delta).

`rho` is that of one release under a sum of discrete Gaussians, `epsilon` converts the rho of a whole run, and `rho_of`
inverts it. Releases may fail with probability FAILURE each, which is subtracted from delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sordino.errors import SordinoError
from sordino.privacy.accounting import roots
from sordino.privacy.accounting.gaussian import SLACK

FAILURE = 2.0**-64  # of one release, at most: see mechanisms/discrete_gaussian.py
LEAST_VARIANCE, MOST_VARIANCE = 0.25, 2.0**60  # below, nothing is proved of sums; above, nothing fits the modulus
ROUND_UP = 1 + 2.0**-38  # more than the rounding errors of any one formula here, e^-x for x < 746 included

_EXPLICIT = 4096  # terms of tau that are summed one by one


def rho(sensitivity: float, variance: float, terms: int, dimension: int) -> float:
    """Of one release under `terms` discrete Gaussians of this variance each: it is rho-concentrated DP, rho = ε²/2 in

        ε² = min(s²/v + 2τd, (s/√v + τ√d)²),    v = terms σ²,    τ = 10 Σ_{k=1}^{terms-1} exp(-2π² σ² k/(k+1))

    (Kairouz, Liu, Steinke 2021, Proposition 14; σ >= 1/2). Their argument in brief. The sum of discrete Gaussians of
    variances kσ² and σ² has a density that is N_Z(0, (k+1)σ²)'s times Σ_x exp(-(x - c)²/2r²) for r² = σ² k/(k+1) and
    a c that depends on the place; by Poisson's formula that is constant to a factor of 1 ± 2η, η = Σ_j exp(-2π²r²j²).
    Adding up, the whole sum's density is N_Z(0, v)'s to a factor of e^±T, T = Σ_k log((1 + 2η)/(1 - 2η)) <= τ/2.

    - Its loss is at most that of N_Z(0, v), linear in the place, plus 2T per coordinate, and of a linear function the
      sum's moments are sub-Gaussian of variance v: Rényi divergence <= α s²/2v + τd.
    - Or: the sum is T²/2-concentrated from N_Z(0, v), N_Z(0, v) is s²/2v from itself moved, and roots add up (Bun and
      Steinke 2016): α (s_j/√v + τ)²/2 in coordinate j, and Cauchy and Schwarz over coordinates.
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
    """The least epsilon for which rho-concentrated DP is proved (epsilon, delta)-DP here, after `releases` that may
    fail; infinite where their failures take all of delta.

    For every α > 1, log δ = (α-1)(αρ - ε) + (α-1) log(1 - 1/α) - log α (Canonne, Kamath, Steinke 2020). It is
    convex in α, and least where ε = (2α-1)ρ + log(1 - 1/α); there log δ = -(α-1)²ρ - log α, whence α for a given δ. As
    every α is valid, an error in it is one on the safe side.
    """
    check(rho=rho, delta=delta, releases=releases)
    return _epsilon(rho, _nats(delta, releases))


def rho_of(epsilon: float, delta: float, releases: int = 0) -> float:
    """The largest rho that is (epsilon, delta)-DP after `releases` that may fail, less a part in 1e12."""
    check(epsilon=epsilon, delta=delta, releases=releases)
    nats = _nats(delta, releases)
    if nats <= 0:
        raise SordinoError(f"delta: {delta} is less than {releases} releases may fail with; {FAILURE} each is needed.")
    if math.isinf(epsilon):
        return math.inf
    # Both equations of `epsilon`, solved for ρ: ε falls as x = α - 1 grows.
    x = _root(
        lambda x: epsilon - (2 * x + 1) * (nats - math.log1p(x)) / (x * x) + math.log1p(1 / x),
        math.expm1(min(nats, 700.0)),
        math.inf,
    )
    value, step = (nats - math.log1p(x)) / (x * x) * (1 - SLACK), 2.0**-52
    while _epsilon(value, nats) > epsilon:
        value, step = value * (1 - step), 2 * step
    return value


def _nats(delta: float, releases: int) -> float:
    """log(1/δ) of what the failures leave; -1 where that is nothing."""
    left = math.nextafter(delta - releases * FAILURE * ROUND_UP, 0.0) if releases else delta
    return -math.log(left) * (1 + 2.0**-52) if left > 0 else -1.0


def _epsilon(rho: float, nats: float) -> float:
    """Rounded up by more than the roundings of its parts; α = 1 + x."""
    if math.isinf(rho) or nats <= 0:
        return math.inf
    if rho == 0:
        return 0.0
    x = _root(lambda x: x * x * rho + math.log1p(x) - nats, math.expm1(min(nats, 700.0)), math.sqrt(nats / rho))
    up, down, rest = (1 + x) * rho, -math.log1p(1 / x), (nats - math.log1p(x)) / x
    error = 2.0**-49 * (up - down + (nats + math.log1p(x)) / x)
    return max(0.0, up + down + rest + error)


def _root(f: Callable[[float], float], *above: float) -> float:
    """Of a growing function, f < 0 near 0 and f >= 0 at the least of `above`, to rounding."""
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
            raise SordinoError(f"{name}: {value} must be a whole number, at least 1.")
        if not value >= 0:
            raise SordinoError(f"{name}: {value} must not be negative.")
