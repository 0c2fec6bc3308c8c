"""Steps that follow from public numbers alone: the noise, the rounds, the model's shape, and one noised mean of u u^T.

Near zero the gradient of a softmax over c classes is linear in theta: G = H (theta - theta*) + noise of variance nu^2,
H = A (x) (I - 1 1^T / c) / c, A the mean of u u^T. Where theta* is known to within a variance P along an eigenvector
of A, of curvature h, the best linear step is Kalman's:

    theta <- theta - K G,   K = P h / (h^2 P + nu^2),   P <- P - (P h)^2 / ((1 + doubt) h^2 P + nu^2)

Without noise it is Newton's, 1 / h; in much noise it is gradient descent by P h / nu^2, and what it averages is every
release so far. `doubt` is for the curvature, which falls as the model fits: it keeps P, and so the steps, from vanishing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sordino.core import Facts, Rule, SordinoError, Tree

FLOOR = 1e-3  # of the mean eigenvalue: keeps the curvature above zero where features are constant


def spectrum(A: Tensor, std: Tensor | float, most: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a mean of u u^T, |u|^2 at most `most`, seen through symmetric noise.

    Noise of this std (on the diagonal; 1 / sqrt 2 of it beside) has eigenvalues up to edge = std sqrt(2 rows), and shows
    an eigenvalue v as v + edge^2 / 4 v. What stands above the edge is brought back to v; what does not is not to be told
    apart, and shares what is left of the trace.
    """
    rows = A.shape[-1]
    seen, vectors = torch.linalg.eigh((A + A.transpose(-1, -2)).double() / 2)
    std = torch.as_tensor(std).to(seen)
    edge = std * math.sqrt(2 * rows)
    trace = seen.sum(-1, keepdim=True).maximum(std * math.sqrt(rows)).clamp(FLOOR * most, most)
    above = seen > edge
    value = torch.where(above, (seen + (seen.square() - edge.square()).clamp_min(0).sqrt()) / 2, 0.0).minimum(trace)
    rest = (trace - value.sum(-1, keepdim=True)).maximum(std) / (~above).sum(-1, keepdim=True).clamp_min(1)
    value = torch.where(above, value, rest.minimum(trace / rows))
    return value.maximum(FLOOR * trace / rows).to(A.dtype), vectors.to(A.dtype)


def kalman(*, clip: float, most: float, prior: float, doubt: float, noise: Callable[[int], Tensor]) -> Rule:
    """The steps above, for one matrix of parameters; the stage before leaves (A, std of its noise).

    prior: what a logit is expected to be (std), before anything is known. It is spread evenly over theta, but no
    direction is expected to say more for being longer than the average; nor is a logit expected to be smaller than what
    the noise of the whole run moves it by, for a model's choice does not depend on its scale. noise: std of the rounds,
    in units of the stage's.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        (A, std), (rows, outputs) = before, one_matrix(facts)
        value, V = spectrum(A.reshape(*theta.shape[:-1], rows, rows).to(theta), std, most)
        length = value.sum(-1, keepdim=True)  # mean of |u|^2
        residual = math.sqrt(1 - 1 / outputs) if outputs > 1 else 0.0  # |p - y| at zero
        cut = clip / (residual * length.sqrt()).clamp_min(clip)  # what the clip leaves of a gradient there
        h = value * cut / outputs
        nu = facts.aggregate_std * noise(facts.rounds).to(theta)
        moved = (
            (nu.square().reciprocal().sum().rsqrt() if facts.aggregate_std else 0.0)
            * length.sqrt()
            / h.mean(-1, keepdim=True)
        )
        P = prior**2 / length * moved.clamp_min(1) / (value / value.mean(-1, keepdim=True)).clamp_min(1)
        return V, h, P, nu.square()

    def update(g: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        V, h, P, variance = state
        signal, nu2 = h.square() * P, variance[t]
        K = P * h / (signal + nu2)
        step = V @ (K.unsqueeze(-1) * (V.transpose(-1, -2) @ g.reshape(*g.shape[:-1], V.shape[-1], -1)))
        return -step.flatten(-2), (V, h, P * (1 - signal / ((1 + doubt) * signal + nu2)), variance)

    return Rule(init, update)


def one_matrix(facts: Facts) -> tuple[int, int]:
    if len(facts.shapes) != 1 or len(facts.shapes[0]) != 2:
        raise SordinoError("model: steps are derived for linear models only, of one matrix of parameters.")
    rows, outputs = facts.shapes[0]
    return rows, outputs
