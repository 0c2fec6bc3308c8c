"""How sure the risks of two classes should be, from public numbers and what was released anyway.

The weights that Kalman's steps end with make risks too sure, for three reasons:

- *The clip.* It bounds a record's |p - y| by c = clip / (sqrt 2 |u|). A record that is far on the wrong side pulls no
  harder than one that is less far, and so weights grow longer than those of a logistic model: a risk of 90 % becomes
  one of 96 % at c = 0.35.
- *Noise* that the steps left in the weights, which follows from the noise of every step.
- *Few records.* Weights that fit N records fit others less well.

All weights about the centre of the records are multiplied by one factor, and intercepts are moved, so that the order of
predictions does not change. Let v be the variance of the log-odds, N of it noise and S sampling error, and m the share
of the way that the steps have gone. If log-odds z are normal and the true ones are a + s z, then the mean clipped
gradient is zero where the risk at z is q(z) = p0 / (p0 + p1), p0 = min(p, c), p1 = min(1 - p, c). So s is the slope of
a logistic regression of q on z with weights p0 + p1 over the normal distribution, which needs no record. The factor
is s (1 - (N + S) / v) / m, at most 1: risks are never made more sure. Its m-th power is taken, because a model that has
gone a small part of the way is less like the solution.

The intercept is the one of that regression for this factor, as far as steps went and noise does not hide the log-odds;
otherwise it is the one that keeps the mean risk. A clip cuts what records of the rare class pull, so that their risks
were too small on average: by 2 points on Adult.

v is d^T A d for the weights d: the noised A gives it without bias, and A as it was estimated takes its place where that
is too noisy.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from sordino.core import Centre
from sordino.lazy import Tensor, torch

LEAST_SHARE = 0.2  # of the weights, that is left in any noise
LEAST_WAY = 0.1  # of the way to the solution, that the steps are taken to have gone at least
NODES, FIT_STEPS = 24, 8  # of the quadrature over log-odds, and of Newton's method on it
LEAST_VARIANCE, MOST_VARIANCE = 1e-2, 50.0  # of log-odds
LEAST_SLOPE = 0.3  # that undoes the clip
LEAST_PART = 0.1  # of the variance by A as it was estimated, that log-odds have at least
SMALL = 0.05  # an eigenvalue below this part of the mean one says little about a weight
TINY = 1e-18


class Spread(NamedTuple):
    """What is known of the errors in the weights, along the eigenvectors of A but the last, the constant feature's."""

    value: Tensor  # the eigenvalues of A, as estimated
    noised: Tensor  # the diagonal of the noised A there
    std: Tensor  # of the noise on it
    noise: Tensor  # variance of what the noise left in a weight of one class
    way: Tensor  # share of the way to the solution that the steps went
    residual: Tensor  # c, the bound on |p - y|
    records: Tensor  # number of records, or persons
    weight: Tensor  # of the records of one person in A, at least 1


def unspread(value: Tensor, seen: Spread, clip: float, records: float) -> Spread:
    """Before the first step.

    Args:
        value: Eigenvalues of A; the last is that of the constant feature.
        seen: With what the noised A tells: `noised`, `std` and `weight`.
        clip: Clip of a record's gradient.
        records: Number of records, or persons.
    """
    length = (value.sum(-1, keepdim=True) / seen.weight).sqrt()
    value = value[..., :-1]
    zero, one = torch.zeros_like(value), torch.ones_like(length)
    residual = clip / (math.sqrt(2) * length)
    return seen._replace(value=value, noise=zero, way=zero, residual=residual, records=records * one)


def moved(spread: Spread, K: Tensor, h: Tensor, variance: Tensor) -> Spread:
    """After a step of -K G, G with noise of this variance and curvature h."""
    K = K[..., :-1]
    left = (1 - K * h[..., :-1]).clamp(0, 1)
    noise = left.square() * spread.noise + K.square() * variance
    return spread._replace(noise=noise, way=1 - left * (1 - spread.way))


def tempered(theta: Tensor, V: Tensor, spread: Spread, centre: Centre) -> Tensor:
    """The model with risks as sure as they should be.

    Args:
        theta: Weights of two classes, and their intercepts.
        V: Eigenvectors of A; the last is that of the constant feature.
        spread: The errors.
        centre: Of the records.

    Returns:
        Parameters like theta.
    """
    about = centre.parameters(theta).double()
    rows = about.reshape(*about.shape[:-1], V.shape[-1], 2)
    d = (V.double().transpose(-1, -2) @ (rows[..., 1:] - rows[..., :1]))[..., 0]
    factor, shift = factor_and_shift(d[..., :-1], d[..., -1:], spread)
    weights = rows[..., :-1, :] * factor.unsqueeze(-1)
    constants = rows[..., -1, :] + torch.cat([-shift, shift], -1) / 2
    after = torch.cat([weights.flatten(-2), constants], -1)
    return (theta.double() + centre.step(after - about)).to(theta)


def factor_and_shift(d: Tensor, intercept: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """What weights are multiplied by, and what is added to the intercept.

    Args:
        d: Weights of the log-odds along the eigenvectors.
        intercept: Of the log-odds, where records are centred.
        spread: The errors.
    """
    value, noised, std, noise, way, residual, records, weight = (part.double() for part in spread)

    def variance(squares: Tensor) -> Tensor:
        """The variance of a record's log-odds, if weights have these squares."""
        expected = (value * squares).sum(-1, keepdim=True).clamp_min(TINY)
        doubt = (std * squares.sum(-1, keepdim=True) / expected).square()
        found = ((noised * squares).sum(-1, keepdim=True) + doubt * expected) / (1 + doubt)
        return found.maximum(LEAST_PART * expected) / weight

    varied = variance(d.square()).clamp_min(LEAST_VARIANCE)
    from_noise = variance(2 * noise)
    way_gone = way.square().mean(-1, keepdim=True).sqrt().clamp_min(LEAST_WAY)
    signal = (varied - from_noise).maximum(LEAST_SHARE * varied)
    slope, per_record = unclipped(signal / way_gone.square(), intercept, residual)
    weights = (value / (value + SMALL * value.mean(-1, keepdim=True)) * way.square()).sum(-1, keepdim=True)
    share = (1 - (from_noise + weights * per_record / records) / varied).clamp_min(LEAST_SHARE)
    factor = (slope * share / way_gone).clamp_max(1) ** way_gone
    there = settled(varied, intercept, factor, residual)
    kept = settled(varied, intercept, factor, torch.ones_like(residual))
    known = way_gone.square() * signal / varied
    return factor, known * there + (1 - known) * kept - intercept


def settled(varied: Tensor, intercept: Tensor, factor: Tensor, residual: Tensor) -> Tensor:
    """The intercept at which clipped gradients have mean zero, if deviations from it are multiplied by a factor.

    If nothing is clipped (`residual` 1), it keeps the mean risk.

    Args:
        varied: Variance of the log-odds.
        intercept: Their mean.
        factor: By which their deviations are multiplied.
        residual: The bound on |p - y|.
    """
    t, mass = quadrature(varied)
    weight, risk = clipped_risk(intercept + t, residual)
    found = intercept.clone()
    for _ in range(FIT_STEPS):
        q = torch.sigmoid(found + factor * t)
        error = (mass * weight * (q - risk)).sum(-1, keepdim=True)
        curve = (mass * weight * q * (1 - q)).sum(-1, keepdim=True).clamp_min(TINY)
        found = found - (error / curve).clamp(-1, 1)
    return found


def clipped_risk(z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and risk of records with these log-odds for which the mean clipped gradient is zero."""
    p = torch.sigmoid(z)
    low, high = p.minimum(residual), (1 - p).minimum(residual)
    return low + high, low / (low + high)


def quadrature(varied: Tensor) -> tuple[Tensor, Tensor]:
    """Points of a normal distribution of this variance about 0, and their weights."""
    nodes, weights = _nodes()
    spread = varied.clamp(LEAST_VARIANCE, MOST_VARIANCE).sqrt()
    return spread * torch.as_tensor(nodes, device=varied.device), torch.as_tensor(weights, device=varied.device)


@functools.cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Of the standard normal distribution; finding them takes longer than a step of the server."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()


def unclipped(varied: Tensor, intercept: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What undoes a clip of residuals, if log-odds are normal.

    Args:
        varied: Variance of the log-odds.
        intercept: Their mean.
        residual: The bound on |p - y|.

    Returns:
        The factor on log-odds, at most 1; and the variance of log-odds that the sampling error of one record adds per
        weight.
    """
    t, mass = quadrature(varied)
    p = torch.sigmoid(intercept + t)
    weight, risk = clipped_risk(intercept + t, residual)
    slope, mean = torch.ones_like(varied), intercept.clone()

    def total(part: Tensor) -> Tensor:
        return (mass * part).sum(-1, keepdim=True)

    for _ in range(FIT_STEPS):
        q = torch.sigmoid(mean + slope * t)
        error, curve = weight * (q - risk), weight * q * (1 - q)
        first, second = total(error), total(error * t)
        one, both, two = total(curve), total(curve * t), total(curve * t.square())
        det = (one * two - both.square()).clamp_min(TINY)
        mean = mean - ((two * first - both * second) / det).clamp(-1, 1)
        slope = (slope - ((one * second - both * first) / det).clamp(-0.3, 0.3)).clamp(LEAST_SLOPE, 1)
    q = torch.sigmoid(mean + slope * t)
    curved = p * (1 - p) * ((1 - q) * (p < residual) + q * (1 - p < residual))
    pulls = (1 - q) * p.minimum(residual).square() + q * (1 - p).minimum(residual).square()
    per_record = total(pulls) / total(curved).clamp_min(1e-4).square()
    return slope, per_record
