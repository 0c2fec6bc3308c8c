"""Steps that follow from public numbers alone: the noise, the rounds, the model's shape, and one noised mean of u u^T.

Near zero the gradient of a softmax over c classes is linear in theta: G = H (theta - theta*) + noise of variance nu^2,
H = A (x) (I - 1 1^T / c) / c, A the mean of u u^T. Where theta* is known to within a variance P along an eigenvector of
A, and h is the curvature there, the best linear step is Kalman's:

    theta <- theta - K G,   K = P h / (h^2 P + nu^2),   P <- P - (P h)^2 / ((1 + doubt) h^2 P + nu^2)

Without noise this is Newton's step, 1 / h; in much noise it is gradient descent by P h / nu^2, which P brings down as
releases are averaged. `doubt` is about h, which falls as the model fits: it keeps P from vanishing, and the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sordino.core import Facts, Rule, SordinoError, Tree

FLOOR = 1e-3  # of the mean eigenvalue: keeps curvature above zero where features are constant
REACH = 2.0  # a logit at which softmax is about to saturate
LEAST = 1e-20  # of P, which without noise falls for ever


def spectrum(A: Tensor, std: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a mean of u u^T, |u|^2 at most `most`, seen through symmetric noise.

    Noise of this std (on the diagonal; beside it, 1 / sqrt 2 of that) has eigenvalues up to edge = std sqrt(2 rows),
    and shows an eigenvalue v as v + edge^2 / 4 v. What stands above the edge is brought back to v; the others cannot be
    told apart, and share what is left of the trace.
    """
    rows = A.shape[-1]
    seen, vectors = torch.linalg.eigh((A + A.transpose(-1, -2)).double() / 2)
    std = std.to(seen)
    edge = std * math.sqrt(2 * rows)
    trace = seen.sum(-1, keepdim=True).maximum(std * math.sqrt(rows)).clamp(FLOOR * most, most)
    above = seen > edge
    value = torch.where(above, (seen + (seen.square() - edge.square()).clamp_min(0).sqrt()) / 2, 0.0).minimum(trace)
    rest = (trace - value.sum(-1, keepdim=True)).maximum(std) / (~above).sum(-1, keepdim=True).clamp_min(1)
    value = torch.where(above, value, rest.minimum(trace / rows)).maximum(FLOOR * trace / rows)
    return value.to(A.dtype), vectors.to(A.dtype)


def kalman(*, clip: float, most: float, prior: float, doubt: float, over: Callable[[int], np.ndarray]) -> Rule:
    """The steps above, for a model of one matrix. The stage before leaves (A, the std of its noise).

    most: of |u|^2. prior: std of a logit before anything is known, to which every eigenvector adds alike. It is raised
    until the noise of the whole run would carry a logit to REACH: the class that is chosen does not depend on the
    scale, so steps that keep the model nearer to zero gain nothing. over: the noise of each of so many rounds, in units
    of the stage's.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        (A, error), (rows, outputs) = before, matrix_of(facts)
        value, V = spectrum(A.reshape(*theta.shape[:-1], rows, rows).to(theta), error, most)
        length = value.sum(-1, keepdim=True).sqrt()  # of u, in the square mean
        residual = math.sqrt(1 - 1 / outputs)  # |p - y| at zero
        h = value / outputs * (clip / (residual * length).clamp_min(clip))  # a gradient that is cut is curved less
        std = facts.aggregate_std * over(facts.rounds)
        whole = facts.aggregate_std / math.sqrt((over(facts.rounds) ** -2.0).sum())  # noise of all rounds' mean
        moved = whole * length / h.mean(-1, keepdim=True)  # by which it moves a logit
        P = (REACH * moved).clamp_min(prior**2) / (rows * value)
        return V, h, P, torch.from_numpy(std**2).to(theta)

    def update(g: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        V, h, P, variance = state
        noise = variance[t] / (h.square() * P.clamp_min(LEAST))  # over signal
        K = 1 / (h * (1 + noise))
        along = V.transpose(-1, -2) @ g.reshape(*g.shape[:-1], V.shape[-1], -1)
        return -(V @ (K.unsqueeze(-1) * along)).flatten(-2), (V, h, P * (1 - 1 / (1 + doubt + noise)), variance)

    return Rule(init, update)


def matrix_of(facts: Facts) -> tuple[int, int]:
    if len(facts.shapes) != 1 or len(facts.shapes[0]) != 2:
        raise SordinoError("model: steps are derived for linear models, of one matrix of parameters; use dp-fedadam.")
    rows, outputs = facts.shapes[0]
    return rows, outputs
