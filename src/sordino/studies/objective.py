"""Objective perturbation (Kifer, Smith, Thakurta 2012) for softmax regression by one party that holds all records.

It draws B with independent N(0, sigma²) entries and minimises

    F(theta) = sum_i loss(theta; x_i, y_i) + (ridge / 2) |theta|² + <B, theta>,   |x_i| <= radius, K classes.

**Guarantee** (replace-one, and so add-remove, in real arithmetic). The loss is convex and smooth, so theta <-> B is one
to one, with B = -(gradient of the rest), and the density of theta is that of B times det(H + ridge I), H the Hessian of
the losses. Let D' have z' in place of z.

- Curvature: the Hessian of one record is (diag p - p pᵀ) ⊗ x xᵀ. Its rank is at most K - 1 and its trace at most
  t = (1 - 1/K) radius². So the logarithm of the ratio of determinants is at most (K - 1) log(1 + t / ((K - 1) ridge)).
- Noise: B' = B + h, where h = gradient(z) - gradient(z'). Each gradient is (p - e_y) ⊗ x, of length at most
  √2 radius, so |h| <= c = 2 √2 radius. Both lie in span{x, x'} ⊗ 1^⊥, of at most 2 (K - 1) dimensions, which does
  not depend on B, although h does. So <h, B> <= c sigma chi, where chi has the chi law of 2 (K - 1) degrees.

The privacy loss is at most `curvature` + a²/2 + a chi with a = c / sigma, and delta(epsilon) at most
E (1 - exp(epsilon - loss))_+ of that bound. Without the rank bound both terms would grow with the dimension.

**Approximate minimum** (Iyengar et al. 2019): at a gradient of at most `TOLERANCE` the result is within
TOLERANCE / ridge of the minimum. Gaussian noise on the result hides that error: its sensitivity, given the minimum, is
2 TOLERANCE / ridge, and it has the share `OUTPUT` of epsilon and delta.

Nothing here is certified: sums in floating point and the noise of numpy are not proved, and one party must be trusted
with the records.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.integrate
import scipy.optimize
import scipy.sparse.linalg
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian

OUTPUT = 0.01  # share of epsilon and of delta that hides the error of the minimum
TOLERANCE = 1e-6  # of the gradient of F
NEWTON_STEPS = 50


def curvature(radius: float, classes: int, ridge: float) -> float:
    """The bound on the logarithm of the ratio of determinants."""
    rank = classes - 1
    return rank * math.log1p((1 - 1 / classes) * radius**2 / (rank * ridge))


def ridge_of(radius: float, classes: int, most: float) -> float:
    """The least ridge whose `curvature` is at most this."""
    rank = classes - 1
    return (1 - 1 / classes) * radius**2 / (rank * math.expm1(most / rank))


def delta_of(epsilon: float, a: float, degrees: int) -> float:
    """E (1 - exp(epsilon - a²/2 - a chi))_+, integrated by parts: a e^(epsilon - a²/2 - a t) P[chi > t] over t."""
    rest = epsilon - a * a / 2
    start = max(rest / a, 0.0)
    tail, _ = scipy.integrate.quad(
        lambda t: a * math.exp(rest - a * (start + t)) * scipy.stats.chi.sf(start + t, degrees),
        0,
        math.inf,
        epsabs=1e-14,
    )
    return float(tail + (1 - math.exp(rest) if rest < 0 else 0.0))


def sigma_of(epsilon: float, delta: float, radius: float, classes: int, ridge: float) -> float:
    """The least noise on the objective with which the minimum has this budget."""
    left = epsilon - curvature(radius, classes, ridge)
    if left <= 0:
        raise SordinoError(f"ridge: {ridge} leaves nothing of epsilon = {epsilon}; use a larger one.")
    degrees = 2 * (classes - 1)

    def excess(log_a: float) -> float:
        return math.log(max(delta_of(left, math.exp(log_a), degrees), 1e-300) / delta)

    a = math.exp(scipy.optimize.brentq(excess, math.log(1e-3 * left), math.log(10 * left + 10)))
    return 2 * math.sqrt(2) * radius / a * (1 + 1e-6)


def minimum(x: Tensor, labels: Tensor, ridge: float, B: Tensor) -> Tensor:
    """Newton's method with conjugate gradients and backtracking from zero, down to `TOLERANCE`."""
    theta = torch.zeros_like(B)

    def value(theta: Tensor) -> float:
        z = x @ theta
        fit = torch.logsumexp(z, 1).sum() - (z * labels).sum()
        return float(fit + ridge / 2 * (theta**2).sum() + (B * theta).sum())

    for _ in range(NEWTON_STEPS):
        p = torch.softmax(x @ theta, 1)
        gradient = x.T @ (p - labels) + ridge * theta + B
        if gradient.norm() <= TOLERANCE:
            return theta

        def curve(flat: np.ndarray, p: Tensor = p) -> np.ndarray:
            direction = torch.as_tensor(flat, device=x.device).reshape(B.shape)
            z = p * (x @ direction)
            found = x.T @ (z - p * z.sum(1, keepdim=True)) + ridge * direction
            return found.flatten().numpy(force=True)

        hessian = scipy.sparse.linalg.LinearOperator((B.numel(), B.numel()), matvec=curve, dtype=np.float64)
        solved, _ = scipy.sparse.linalg.cg(hessian, -gradient.flatten().numpy(force=True), rtol=1e-4, maxiter=300)
        step, scale, before = torch.as_tensor(solved, device=x.device).reshape(B.shape), 1.0, value(theta)
        while gradient.norm() > 1e-2 and value(theta + scale * step) > before and scale > 1e-6:
            scale /= 2
        theta = theta + scale * step
    raise SordinoError("objective perturbation: the minimum was not found; use a larger ridge.")


def fitted(
    x: Tensor, labels: Tensor, epsilon: float, delta: float, radius: float, ridge: float, seed: int
) -> np.ndarray:
    """The model of one draw.

    Args:
      x: the records in float64, each within `radius`.
      labels: one indicator column per class, in float64 and on the same device.
      epsilon: of the model, at `delta`.
      delta: of the model.
      radius: bound on the norm of a record.
      ridge: of the objective; `ridge_of` gives the least one for a share of epsilon.
      seed: of the noise.

    Returns:
      The weights, features by classes.

    Raises:
      SordinoError: a record is longer than the radius, the ridge is too small, or the minimum was not found.
    """
    classes, rng = labels.shape[1], np.random.default_rng(seed)
    if x.norm(dim=1).max() > radius * (1 + 1e-6):
        raise SordinoError(f"x: a record is longer than the radius, {radius}; scale records to at most this norm.")
    sigma = sigma_of((1 - OUTPUT) * epsilon, (1 - OUTPUT) * delta, radius, classes, ridge)
    B = sigma * rng.normal(size=(x.shape[1], classes))
    theta = minimum(x, labels, ridge, torch.as_tensor(B, device=x.device)).numpy(force=True)
    hidden = 2 * TOLERANCE / ridge / gaussian.mu(OUTPUT * epsilon, OUTPUT * delta)
    return np.asarray(theta + hidden * rng.normal(size=theta.shape))
