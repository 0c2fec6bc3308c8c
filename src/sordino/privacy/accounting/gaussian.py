"""Closed-form composition of Gaussian releases.

A release of L2 sensitivity s with Gaussian noise of standard deviation t is (s/t)-Gaussian-DP, and releases chosen
adaptively from earlier *released* values compose exactly (Dong, Roth, Su 2022, Corollary 3.3): a whole run is one
Gaussian mechanism,

    mu^2 = sum_k (s_k / t_k)^2,      delta(epsilon) = Φ(-epsilon/mu + mu/2) - e^epsilon Φ(-epsilon/mu - mu/2),

the second being Balle and Wang (2018), Theorem 8. It is exact: no bound is lost, and none is to be had below it.

Every inverse is rounded towards more noise, so that what is calibrated here is never found overspent here.

Example:
    >>> from sordino import gaussian
    >>> mu = gaussian.mu(epsilon=1.0, delta=1e-5)
    >>> round(mu, 3), round(gaussian.epsilon(mu, 1e-5), 3)
    (0.268, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from scipy.special import erfcx, ndtr

from sordino.errors import SordinoError
from sordino.privacy.accounting import roots

SLACK = 1e-12  # calibrated mu is this much (relative) below the root: far more than rounding, far less than matters
_ROUNDING = 1e-14  # relative error allowed to one root; below SLACK, so that round trips keep their direction
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_NODES, _WEIGHTS = 0.5 * (_NODES + 1), 0.5 * _WEIGHTS  # on [0, 1]


def mu_of(releases: Iterable[tuple[float, float] | tuple[float, float, float]]) -> float:
    """Of releases given as (sensitivity, std) or (sensitivity, std, count): sqrt(sum count (sensitivity/std)²).

    Exact under adaptive composition, for each ratio is fixed before the release it belongs to.
    """
    ratios = []
    for release in releases:
        sensitivity, std, count = release if len(release) == 3 else (*release, 1.0)
        for name, value in (("sensitivity", sensitivity), ("std", std), ("count", count)):
            if not value >= 0:
                raise SordinoError(f"releases: a {name} of {value} must not be negative.")
        if sensitivity == 0 or count == 0:
            continue
        # No noise, or no bound, is no privacy: written out, since inf/inf would not say so.
        bounded = std > 0 and math.isfinite(sensitivity)
        ratios.append(sensitivity / std * math.sqrt(count) if bounded else math.inf)
    return math.hypot(*ratios)


def delta(mu: float, epsilon: float) -> float:
    """The least delta for which a mu-Gaussian-DP mechanism is (epsilon, delta)-DP."""
    _check(mu=mu, epsilon=epsilon)
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    return 1.0 if math.isinf(mu) else math.exp(_log_delta(mu, epsilon))


def epsilon(mu: float, delta: float) -> float:
    """The least epsilon for which a mu-Gaussian-DP mechanism is (epsilon, delta)-DP; 0 where none is needed."""
    _check(mu=mu, delta=delta)
    if math.isinf(mu):
        return math.inf
    target = math.log(delta)
    if mu == 0 or _log_delta(mu, 0.0) <= target:
        return 0.0
    # delta(epsilon) <= Φ(a) <= exp(-a²/2) / 2 for a = mu/2 - epsilon/mu <= 0; this epsilon makes that delta / 2.
    most = mu * (mu / 2 + math.sqrt(-2 * target))
    if math.isinf(most):
        return math.inf
    root = _root(lambda x: _log_delta(mu, x) - target, 0.0, most)
    return _push(root, +1, lambda x: _log_delta(mu, x) <= target)


def mu(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-DP, less a part in 1e12."""
    _check(epsilon=epsilon, delta=delta)
    if math.isinf(epsilon):
        return math.inf
    target = math.log(delta)
    # Two lower bounds: the one in `epsilon` turned around, and delta(epsilon) <= delta(0) <= mu / sqrt(2 pi).
    c = math.sqrt(-2 * target)
    low = max(2 * epsilon / (c + math.sqrt(c * c + 2 * epsilon)), delta * math.sqrt(2 * math.pi))
    high = 2 * low
    while _log_delta(high, epsilon) < target:
        low, high = high, 2 * high
    low /= 2  # the second bound is an equality to rounding for small delta and epsilon = 0
    root = _root(lambda x: _log_delta(x, epsilon) - target, low, high)
    return _push(root * (1 - SLACK), -1, lambda x: _log_delta(x, epsilon) <= target)


def sigma(epsilon: float, delta: float, *, sensitivity: float = 1.0, releases: int = 1) -> float:
    """Standard deviation of each of `releases` equal releases that together are (epsilon, delta)-DP."""
    _check(sensitivity=sensitivity)
    if not releases >= 1:
        raise SordinoError(f"releases: {releases} must be at least 1.")
    allowed = mu(epsilon, delta)
    if math.isinf(allowed):
        return 0.0  # even of an unbounded release: no privacy was asked for
    if math.isinf(sensitivity):
        raise SordinoError("sensitivity: inf cannot be hidden by any noise; set a clip.")
    return sensitivity * math.sqrt(releases) / allowed


def _log_delta(mu: float, epsilon: float) -> float:
    """log delta for finite mu > 0 and finite epsilon >= 0, to about x² · 1e-16 absolute, x as below.

    With x = epsilon/mu - mu/2 both terms share a factor, e^epsilon φ(x + mu) = φ(x), so that
    delta = φ(x) (R(x) - R(x + mu)) for Mills' ratio R(x) = Φ(-x)/φ(x): nothing overflows, and the only cancellation
    is that of two nearby R. Where it would cost more than two bits, the difference is integrated instead:
    R(x) - R(x + mu) = ∫_0^∞ exp(-xt - t²/2) (1 - e^(-mu t)) dt, an integrand without sign changes.
    """
    x = epsilon / mu - mu / 2
    log_density = -0.5 * x * x - _LOG_SQRT_2PI
    after = _mills(epsilon / mu + mu / 2)
    if x < 0:  # then Φ(-x) is of order 1, and R(x) itself may overflow
        rest = float(ndtr(x)) + math.exp(log_density) * after
        if rest < 0.75:
            return math.log1p(-rest)
    elif math.isinf(log_density):
        return -math.inf
    else:
        before = _mills(x)
        if after < 0.75 * before:
            return log_density + math.log(before - after)
    # Here mu is small against max(1, x), so x > -1/2. Beyond `end` the exponent -xt - t²/2 is below -40.
    end = 80 / (x + math.sqrt(x * x + 80))
    t = end * _NODES
    integral = end * float(_WEIGHTS @ (np.exp(-t * (x + t / 2)) * -np.expm1(-mu * t)))
    return log_density + math.log(integral) if integral > 0 else -math.inf


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    return roots.root(f, low, high, _ROUNDING)


def _push(value: float, direction: int, safe: Callable[[float], bool]) -> float:
    """The value, moved by as few roundings as make it safe."""
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
            raise SordinoError(f"{name}: {value} must not be negative.")
