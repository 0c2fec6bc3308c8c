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

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

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
    trace = seen.sum(-1, keepdim=True).maximum(std * math.sqrt(rows)).clamp(FLOOR**3 * most, most)
    above = seen > edge
    value = torch.where(above, (seen + (seen.square() - edge.square()).clamp_min(0).sqrt()) / 2, 0.0).minimum(trace)
    rest = (trace - value.sum(-1, keepdim=True)).maximum(std) / (~above).sum(-1, keepdim=True).clamp_min(1)
    value = torch.where(above, value, rest.minimum(trace / rows)).maximum(FLOOR * trace / rows)
    return value.to(A.dtype), vectors.to(A.dtype)


def estimate_covariance(most: float) -> Rule:
    """Take in A. The state is what `kalman` goes on from, and of length one until somebody came."""

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        one = theta.new_ones(1)
        return one.view(1, 1), one, one, torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)

    def update(A: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        rows = math.isqrt(A[(0,) * (theta.dim() - 1)].numel())
        value, V = spectrum(A.reshape(*theta.shape[:-1], rows, rows), state[3], most)
        return torch.zeros_like(theta), (V, value, value.reciprocal(), state[3])

    return Rule(init, update)


def kalman(*, clip: float, most: float, prior: float, doubt: float, part: float | None = 1.0) -> Rule:
    """The steps above, for a model of one matrix, after a stage of `curved`.

    most: of |u|^2. prior: std of a logit before anything is known, to which every eigenvector adds alike. It is raised
    until the noise of all steps would carry a logit to REACH: the class that is chosen does not depend on the scale, so
    steps that keep the model nearer to zero gain nothing. part: that this stage has of all gradients' budget; None for
    one that goes on from another.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        (V, value, P, error), (rows, outputs) = before, matrix_of(facts)
        nu = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        if part is None:
            return V, value, P, nu.square()
        if V.shape[-1] != rows:  # nobody came
            value, V = spectrum(theta.new_zeros(*theta.shape[:-1], rows, rows), error, most)
        length = value.sum(-1, keepdim=True).sqrt()  # of u, in the square mean
        residual = math.sqrt(1 - 1 / outputs)  # |p - y| at zero
        h = value / outputs * (clip / (residual * length).clamp_min(clip))  # a gradient that is cut is curved less
        whole = nu * math.sqrt(part / facts.rounds)  # noise of the mean of all gradients
        moved = whole * length / h.mean(-1, keepdim=True)  # by which it moves a logit
        return V, h, (REACH * moved).clamp_min(prior**2) / (rows * value), nu.square()

    def update(g: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        V, h, P, variance = state
        noise = variance / (h.square() * P.clamp_min(LEAST))  # over signal
        K = 1 / (h * (1 + noise))
        along = V.transpose(-1, -2) @ g.reshape(*g.shape[:-1], V.shape[-1], -1)
        return -(V @ (K.unsqueeze(-1) * along)).flatten(-2), (V, h, P * (1 - 1 / (1 + doubt + noise)), variance)

    return Rule(init, update)


def matrix_of(facts: Facts) -> tuple[int, int]:
    if len(facts.shapes) != 1 or len(facts.shapes[0]) != 2:
        raise SordinoError("model: steps are derived for linear models, of one matrix of parameters; use dp-fedadam.")
    rows, outputs = facts.shapes[0]
    return rows, outputs
