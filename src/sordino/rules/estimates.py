"""What Kalman's steps need to know, estimated from public numbers and noised releases (see `kalman`).

noise        `std_of`, `noise_variance`: of a release
curvature    `spectrum`: the eigenvalues and eigenvectors of a noised A
             `grown`: how the curvature of a rate grows with it
             `unmeasured`, `measured`: what differences of released gradients show of it
prior        `raised`: how far theta* may lie from the first theta, where there is much noise
ridge        `pull_of`: what keeps few records from being fitted exactly
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

FLOOR = 1e-3  # of the mean eigenvalue: keeps curvature above zero if features are constant
MOST_RAISED, RAISING_STEPS = 40.0, 50  # of the prior: the logarithm of the largest factor, and steps of its search
SECANT_ERROR, SECANT_MEMORY = 0.1, 0.5  # relative error of a measured curvature; what a round leaves of earlier ones
TRAINED_LOGIT = 4.0  # standard deviation of a logit of a trained model, which the ridge follows from
LABEL = 0.5  # typical size of a label in [-1, 1]
LEAST_LOGIT, MOST_LOGIT = -2.0, 10.0  # of a rate that the curvature is taken at; the model caps it there too
MIN_VARIANCE = 1e-20  # of P, which converges to 0 without noise


class Setting(NamedTuple):
    """Public numbers that the first curvature and prior depend on beside A."""

    covariance_std: Tensor  # of the noise on A
    outputs: Tensor  # columns of theta
    residual: Tensor  # |p - y| at zero
    careful: Tensor  # the part of the edge that hidden eigenvalues are at least: of quantities 1, of classes 0
    numeric: Tensor  # 1 if labels are quantities or counts, else 0
    mean_noise: Tensor  # variance of the noise on the mean of all gradients
    pull: Tensor  # the ridge over |u|^2
    weight: Tensor  # the expected mean weight of a record; 1 where classes have none


class Secant(NamedTuple):
    """The curvature along steps, as a multiple of h, from differences of released gradients."""

    theta: Tensor  # in the round before
    gradient: Tensor  # that was released there
    noise: Tensor  # the variance of its noise
    bias: Tensor  # what that noise adds to the inner product of the step that followed and the next difference
    ratio: Tensor  # the estimate
    information: Tensor  # 1 / its variance


def matrix_of(facts: Facts) -> tuple[int, int]:
    """Rows and columns of the only parameter of a linear model."""
    if len(facts.shapes) != 1 or len(facts.shapes[0]) != 2:
        raise SordinoError("model: these steps need a linear model with one matrix of parameters; use dp-fedadam.")
    rows, outputs = facts.shapes[0]
    return rows, outputs


def std_of(theta: Tensor, facts: Facts, number: int = 0) -> Tensor:
    """The std of the noise on an answer of the stage."""
    std = facts.query_stds[number] if number else facts.aggregate_std
    return torch.as_tensor(std, dtype=torch.float64).to(theta)


def noise_variance(theta: Tensor, facts: Facts, number: int = 0, unit: float = 1.0) -> Tensor:
    """The variance of the noise on a gradient.

    Args:
        theta: Parameters, whose type the result has.
        facts: Of the stage.
        number: Of the gradient among the noised queries of the stage.
        unit: That the gradient is released in.
    """
    return (std_of(theta, facts, number) * unit).square()


def setting_of(theta: Tensor, facts: Facts, clip: float, covariance_std: Tensor, mean_noise: Tensor) -> Setting:
    """The setting of a stage of gradients; `Setting` says what the arguments are."""
    _, outputs = matrix_of(facts)
    one = theta.new_ones(1)
    residual = LABEL if facts.numeric else math.sqrt(1 - 1 / outputs)
    kinds = float(facts.numeric and not facts.rates) * one, float(facts.numeric) * one
    pull = pull_of(theta, facts, clip, mean_noise)
    weight = facts.mean_weight * one
    return Setting(covariance_std, outputs * one, residual * one, *kinds, mean_noise, pull, weight)


def pull_of(theta: Tensor, facts: Facts, clip: float, mean_noise: Tensor) -> Tensor:
    """`pull` of a setting.

    A Gaussian prior of the weights under which a logit has the variance TRAINED_LOGIT^2 is a ridge of
    |u|^2 / (TRAINED_LOGIT^2 N) on the mean loss of N records. It counters what is particular to these records, so it
    fades where noise hides that: `sampling` is the variance of a mean gradient over N records, per parameter. Where
    classes have weights, N is their sum over the records. The largest weight is 1, so the effective number of records,
    (sum w)^2 / sum w^2, is at least that.
    """
    records = float(facts.sizes.sum()) * facts.mean_weight
    if facts.numeric or not records:  # at client level sizes are not public
        return 0 * mean_noise
    sampling = (clip * facts.mean_weight) ** 2 / (theta.shape[-1] * records)
    return sampling / (sampling + mean_noise) / (TRAINED_LOGIT**2 * records)


def spectrum(A: Tensor, std: Tensor, most: float, trace: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a mean of u u^T, |u|^2 at most `most`, estimated from its noised value.

    Symmetric noise of this std (on the diagonal; std / sqrt 2 off it) has eigenvalues up to edge = std sqrt(2 rows),
    and turns an eigenvalue v into v + edge^2 / 4 v. Eigenvalues above the edge are corrected to v. The others cannot be
    distinguished, and share the rest of the trace, which is that of the noised matrix if it is not given.
    """
    rows = A.shape[-1]
    noised, vectors = torch.linalg.eigh((A + A.transpose(-1, -2)).double() / 2)
    std = std.to(noised)
    edge = edge_of(std, rows)
    if trace is None:
        trace = noised.sum(-1, keepdim=True).maximum(std * math.sqrt(rows)).clamp(FLOOR**3 * most, most)
    above = noised > edge
    value = torch.where(above, (noised + (noised.square() - edge.square()).clamp_min(0).sqrt()) / 2, 0.0).minimum(trace)
    rest = (trace - value.sum(-1, keepdim=True)).maximum(std) / (~above).sum(-1, keepdim=True).clamp_min(1)
    value = torch.where(above, value, rest.minimum(trace / rows)).maximum(FLOOR * trace / rows)
    return value.to(A.dtype), vectors.to(A.dtype)


def edge_of(std: Tensor, rows: int) -> Tensor:
    """The largest eigenvalue of symmetric noise with this std on its diagonal."""
    return std * math.sqrt(2 * rows)


def raised(h: Tensor, P: Tensor, noise: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """P times the factor at which the noise of all steps moves a logit as far as it does without much noise.

    The predicted class does not depend on the scale of the logits, so a small model gains nothing where the gradients
    are mostly noise, and larger steps learn more. Steps of P h / nu^2 add up to P h / noise. Later gradients correct
    earlier noise, so along an eigenvector it keeps P h (1 - exp(-2 h^2 P / noise)) / 2 h of variance. With P = s P_0 it
    moves a logit by s mean(1 - exp(-2 s h^2 P_0 / noise)) / 2 of variance, in units of the prior's. Without much noise
    that is s / 2, and s is 1. With more noise s is the root of s mean(1 - exp(…)) = 1. Where classes have weights, 1 on
    the right is replaced by their mean, `weight`, because fewer records count; s is at least 1.

    Args:
        h: Curvature along the eigenvectors of A.
        P: Variance of theta* along them, before training.
        noise: Variance of the noise on the mean of all gradients.
        weight: The expected mean weight of a record.

    Returns:
        s P.
    """
    rate = 2 * h.double().square() * P.double() / noise.double()
    low = torch.zeros_like(rate[..., :1])
    high = low + MOST_RAISED
    for _ in range(RAISING_STEPS):  # bisect log s
        middle = (low + high) / 2
        s = middle.exp()
        enough = s * -torch.expm1(-s * rate).mean(-1, keepdim=True) >= weight
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (high.exp() * P.double()).to(P)


def grown(V: Tensor, h: Tensor, theta: Tensor, growth: Tensor) -> Tensor:
    """How much larger the curvature of a rate model is than at zero: exp of the mean logit.

    The last feature of u is 1. So the last row of A, whose last entry is 1, is the mean of u.
    """
    last = V[..., -1, :] * h
    mean = last / (last * V[..., -1, :]).sum(-1, keepdim=True).clamp_min(MIN_VARIANCE)
    logit = (mean * (V.transpose(-1, -2) @ theta.reshape(*theta.shape[:-1], V.shape[-1], -1))[..., 0]).sum(-1)
    return (growth * logit.unsqueeze(-1).clamp(LEAST_LOGIT, MOST_LOGIT)).exp()


def unmeasured(theta: Tensor, facts: Facts) -> Secant | tuple[()]:
    """`secant` before the first step. () if labels are numbers, or where gradients are about different records."""
    if facts.numeric or not facts.same_records:
        return ()
    zero = torch.zeros_like(theta[..., :1])
    return Secant(theta, torch.zeros_like(theta), zero, zero, zero + 1, zero)


def measured(secant: Secant, g: Tensor, theta: Tensor, V: Tensor, h: Tensor, noise: Tensor) -> Secant:
    """What the gradient of this round shows of the curvature.

    The difference of two gradients is H times the step between them, and noise. The inner product of both with the
    step, over that of h times the step, is the mean of H / h along the step. The noise of the earlier gradient is in
    the step too, which adds `bias`.
    """
    step = along(V, theta - secant.theta)
    predicted = (h.unsqueeze(-1) * step.square()).sum((-1, -2)).unsqueeze(-1)
    seen = (step * along(V, g - secant.gradient)).sum((-1, -2)).unsqueeze(-1) - secant.bias
    variance = step.square().sum((-1, -2)).unsqueeze(-1) * (noise + secant.noise)
    moved = predicted > MIN_VARIANCE
    predicted = torch.where(moved, predicted, 1.0)
    new = torch.where(moved, 1 / (variance / predicted.square() + SECANT_ERROR**2), 0.0)
    old = secant.information * SECANT_MEMORY
    information = (old + new).clamp_min(MIN_VARIANCE)
    ratio = (old * secant.ratio + new * seen / predicted) / information
    return secant._replace(theta=theta, gradient=g, noise=noise, ratio=ratio, information=information)


def along(V: Tensor, g: Tensor) -> Tensor:
    """A vector of parameters along the eigenvectors: rows by outputs."""
    return V.transpose(-1, -2) @ g.reshape(*g.shape[:-1], V.shape[-1], -1)
