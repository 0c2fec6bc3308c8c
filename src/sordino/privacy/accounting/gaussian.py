"""Closed-form composition of Gaussian releases.

A release of L2 sensitivity s with Gaussian noise of standard deviation t is (s/t)-Gaussian-DP. Releases that depend
only on earlier *released* values compose exactly (Dong, Roth, Su 2022, Corollary 3.3). So a whole run is one Gaussian
mechanism,

    mu^2 = sum_k (s_k / t_k)^2,      delta(epsilon) = Φ(-epsilon/mu + mu/2) - e^epsilon Φ(-epsilon/mu - mu/2),

where the second formula is Theorem 8 of Balle and Wang (2018). Both are exact, so no smaller bound exists.

Every inverse is rounded towards more noise, so that noise calibrated here always passes the checks here.

Example:
    >>> from sordino import gaussian
    >>> mu = gaussian.mu(epsilon=1.0, delta=1e-5)
    >>> round(mu, 3), round(gaussian.epsilon(mu, 1e-5), 3)
    (0.268, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, lru_cache

import numpy as np

from sordino.errors import SordinoError
from sordino.privacy.accounting import normal, roots

SLACK = 1e-12  # relative: calibrated mu lies this far below the root, which is much more than rounding
NEWTON_STEPS = 12
_NEAR = 1e-8  # of a step of Newton's
_ROUNDING = 1e-14  # relative error of a root; below SLACK, so that round trips keep their direction
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def mu_of(releases: Iterable[tuple[float, float] | tuple[float, float, float]]) -> float:
    """mu of several releases: sqrt(sum of count * (sensitivity/std)²).

    It is exact under adaptive composition, because each ratio is fixed before its release.

    Args:
      releases: tuples (sensitivity, std) or (sensitivity, std, count).

    Returns:
      mu of all releases together; inf if one has no noise or no bound.

    Raises:
      SordinoError: a number is negative.

    >>> mu_of([(1.0, 2.0), (1.0, 4.0, 4)])
    0.7071067811865476
    """
    ratios = []
    for release in releases:
        sensitivity, std, count = release if len(release) == 3 else (*release, 1.0)
        for name, value in (("sensitivity", sensitivity), ("std", std), ("count", count)):
            if not value >= 0:
                raise SordinoError(f"releases: {name} is {value}; it must be at least 0.")
        if sensitivity == 0 or count == 0:
            continue
        # Without noise or without a bound there is no privacy. This is explicit because inf/inf is NaN.
        bounded = std > 0 and math.isfinite(sensitivity)
        ratios.append(sensitivity / std * math.sqrt(count) if bounded else math.inf)
    return math.hypot(*ratios)


def delta(mu: float, epsilon: float) -> float:
    """The smallest delta for which a mu-Gaussian-DP mechanism is (epsilon, delta)-DP.

    Args:
      mu: of the mechanism.
      epsilon: the epsilon.

    Returns:
      The delta.

    Raises:
      SordinoError: an argument is negative.

    >>> round(delta(mu=1.0, epsilon=1.0), 4)
    0.1269
    """
    _check(mu=mu, epsilon=epsilon)
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    return 1.0 if math.isinf(mu) else math.exp(_log_delta(mu, epsilon))


def epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon for which a mu-Gaussian-DP mechanism is (epsilon, delta)-DP.

    Args:
      mu: of the mechanism.
      delta: the delta.

    Returns:
      The epsilon; 0 if delta alone is enough.

    Raises:
      SordinoError: an argument is out of its range.

    >>> round(epsilon(mu=1.0, delta=1e-5), 3)
    4.377
    """
    _check(mu=mu, delta=delta)
    return _epsilon(float(mu), float(delta))


@lru_cache(maxsize=4096)  # fits with the same privacy spend the same after each round
def _epsilon(mu: float, delta: float) -> float:
    if math.isinf(mu):
        return math.inf
    target = math.log(delta)
    if mu == 0 or _log_delta(mu, 0.0) <= target:
        return 0.0
    # delta(epsilon) <= Φ(a) <= exp(-a²/2) / 2 for a = mu/2 - epsilon/mu <= 0. At this epsilon it is delta / 2.
    most = mu * (mu / 2 + math.sqrt(-2 * target))
    if math.isinf(most):
        return math.inf
    if _log_delta(mu, most) > target:  # mu is so large that the rounding of epsilon / mu - mu / 2 hides the answer
        return most * (1 + 1e-12)
    root = _root(lambda x: _log_delta(mu, x) - target, 0.0, most)
    return _push(root, +1, lambda x: _log_delta(mu, x) <= target)


def mu(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-DP, reduced by one part in 1e12.

    Args:
      epsilon: the epsilon.
      delta: the delta.

    Returns:
      The mu; inf if epsilon is infinite.

    Raises:
      SordinoError: an argument is out of its range.

    >>> round(mu(epsilon=1.0, delta=1e-5), 3)
    0.268
    """
    _check(epsilon=epsilon, delta=delta)
    return _mu(float(epsilon), float(delta))


@lru_cache(maxsize=4096)
def _mu(epsilon: float, delta: float) -> float:
    if math.isinf(epsilon):
        return math.inf
    target = math.log(delta)
    # Two lower bounds: the inverse of the one in `epsilon`, and delta(epsilon) <= delta(0) <= mu / sqrt(2 pi).
    c = math.sqrt(-2 * target)
    low = max(2 * epsilon / (c + math.sqrt(c * c + 2 * epsilon)), delta * math.sqrt(2 * math.pi))
    near = _newton(_about_log_delta, low, epsilon, target) or low
    root = _newton(_log_delta, near, epsilon, target)
    if root is None:
        high = 2 * low
        while _log_delta(high, epsilon) < target:
            low, high = high, 2 * high
        low /= 2  # for small delta and epsilon = 0 the second bound is an equality up to rounding
        root = _root(lambda x: _log_delta(x, epsilon) - target, low, high)
    return _push(root * (1 - SLACK), -1, lambda x: _log_delta(x, epsilon) <= target)


def _newton(log_delta_of: Callable[[float, float], float], mu: float, epsilon: float, target: float) -> float | None:
    """The mu with this log delta, by Newton's steps in log mu; None if they do not end.

    The derivative of delta in mu is the density of a standard normal at epsilon/mu - mu/2.
    """
    for _ in range(NEWTON_STEPS):
        log_delta, x = log_delta_of(mu, epsilon), epsilon / mu - mu / 2
        log_slope = math.log(mu) - 0.5 * x * x - _LOG_SQRT_2PI - log_delta
        if not abs(log_slope) < 100:
            return None
        step = (target - log_delta) * math.exp(-log_slope)
        if not abs(step) < 1:
            return None
        mu *= math.exp(step)
        if abs(step) < _NEAR:  # the next step would be about the square of this one
            return mu
    return None


def _about_log_delta(mu: float, epsilon: float) -> float:
    """About `_log_delta`, with an approximation of Mills' ratio (Birnbaum 1942); where x is negative it is far off."""
    x = epsilon / mu - mu / 2
    before, after = (4 / (3 * each + math.sqrt(each * each + 8)) for each in (x, x + mu))
    return -0.5 * x * x - _LOG_SQRT_2PI + math.log(before - after) if before > after else -math.inf


def sigma(epsilon: float, delta: float, *, sensitivity: float = 1.0, releases: int = 1) -> float:
    """The standard deviation of each of several equal releases that together are (epsilon, delta)-DP.

    Args:
      epsilon: the epsilon.
      delta: the delta.
      sensitivity: L2 sensitivity of each release.
      releases: number of releases.

    Returns:
      The standard deviation; 0 if epsilon is infinite.

    Raises:
      SordinoError: an argument is out of its range, or the sensitivity is infinite.

    >>> round(sigma(epsilon=1.0, delta=1e-5, releases=4), 2)
    7.46
    """
    _check(sensitivity=sensitivity)
    if not releases >= 1:
        raise SordinoError(f"releases: {releases} must be at least 1.")
    allowed = mu(epsilon, delta)
    if math.isinf(allowed):
        return 0.0  # also for an unbounded release, because no privacy was requested
    if math.isinf(sensitivity):
        raise SordinoError("sensitivity: no noise hides a sensitivity of inf; set a clip.")
    return sensitivity * math.sqrt(releases) / allowed


def _log_delta(mu: float, epsilon: float) -> float:
    """log delta for finite mu > 0 and finite epsilon >= 0. The absolute error is at most about (10 + x²) · 4e-16.

    With x = epsilon/mu - mu/2 both terms share a factor, e^epsilon φ(x + mu) = φ(x). So delta = φ(x) (R(x) - R(x + mu))
    with Mills' ratio R(x) = Φ(-x)/φ(x). Nothing overflows, and only two nearby values of R cancel. If that would cost
    more than two bits, the difference is integrated instead: R(x) - R(x + mu) = ∫_0^∞ exp(-xt - t²/2) (1 - e^(-mu t))
    dt, whose integrand does not change its sign.
    """
    x = epsilon / mu - mu / 2
    log_density = -0.5 * x * x - _LOG_SQRT_2PI
    if math.isinf(log_density):
        return -math.inf if x > 0 else 0.0
    if x < 0:  # then Φ(-x) is of order 1, and R(x) itself may overflow
        rest = normal.upper_tail(-x) + math.exp(log_density) * normal.mills(epsilon / mu + mu / 2)
        if rest < 0.75:
            return math.log1p(-rest)
    elif mu > 0.28 * max(1.0, x):  # otherwise R(x + mu) >= 0.75 R(x), because -R'/R is at most 0.8 and at most 1 / x
        before, after = normal.mills(x), normal.mills(epsilon / mu + mu / 2)
        if after < 0.75 * before:
            return log_density + math.log(before - after)
    # Here mu is small compared with max(1, x), so x > -1/2. Beyond `end` the exponent -xt - t²/2 is below -40.
    end = 80 / (x + math.sqrt(x * x + 80))
    nodes, weights = _gauss()
    t = end * nodes
    integral = end * float(weights @ (np.exp(-t * (x + t / 2)) * -np.expm1(-mu * t)))
    return log_density + math.log(integral) if integral > 0 else -math.inf


@cache
def _gauss() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss and Legendre's rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(48)
    return 0.5 * (nodes + 1), 0.5 * weights


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    return roots.root(f, low, high, _ROUNDING)


def _push(value: float, direction: int, safe: Callable[[float], bool]) -> float:
    """The value, moved in the direction by as little as makes it safe."""
    step = 2.0**-52
    while not safe(value):
        value *= 1 + direction * step
        step *= 2
    return value


def _check(**arguments: float) -> None:
    for name, value in arguments.items():
        if name == "delta" and not 0 < value < 1:
            raise SordinoError(f"delta: {value} must lie between 0 and 1; 1e-5 is usual.")
        if not value >= 0:
            raise SordinoError(f"{name}: {value} must be at least 0.")
