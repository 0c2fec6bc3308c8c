"""Newton steps from released gradients and Hessians, beside a model that stays as it is.

Risks that are too sure have a small Hessian, and a whole step from them goes too far. So a step is multiplied by
log(1 + c) / c, with c the root mean square of what it changes in the log-odds. Along directions in which the noise
hides the curvature, steps are shorter as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.lazy import Tensor, torch

USUAL_CURVATURE = 0.2  # of p (1 - p), where c is estimated from H
TINY = 1e-9  # of the eigenvalues of H: smaller ones are not inverted


class Curve(NamedTuple):
    """The message of a client: mean gradient and Hessian of its records."""

    gradient: Tensor
    hessian: Tensor


class SpreadCurve(NamedTuple):
    """The last message of a client about numbers: also the mean of g g^T."""

    gradient: Tensor
    hessian: Tensor
    spread: Tensor


class UncertaintyState(NamedTuple):
    """The trained model, and what the last round released, at the point that it was asked at."""

    model: Tensor
    point: Tensor
    gradient: Tensor
    hessian: Tensor
    spread: Tensor  # the trace of what was released; empty for classes


def newton_steps(last: Rule | None, factor: float, damped: bool) -> Rule:
    """Keep what a round releases at a point: at the model, or one step on from the round before.

    Args:
        last: The rule of the stage before, in the first round; None in later ones.
        factor: The noise on the Hessian of the round before over that on the gradient of this one, or more.
        damped: Whether the step is shortened where it is long.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> UncertaintyState:
        if last is not None:
            model = point = last.model(theta, before)
        else:
            std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta) * factor
            model, point = UncertaintyState(*before).model, stepped(UncertaintyState(*before), std, damped)
        return UncertaintyState(model, point, *[model.new_zeros(0)] * 3)

    def update(
        total: Curve | SpreadCurve, state: UncertaintyState, theta: Tensor, t: int
    ) -> tuple[Tensor, UncertaintyState]:
        gradient, hessian, *spread = total  # a message that was stored comes back as a plain tuple
        traces = [each.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) for each in spread] or [state.spread]
        return state.model - theta, UncertaintyState(state.model, state.point, gradient, hessian, *traces)

    return Rule(init, update, broadcast=lambda state: state.point, model=lambda theta, state: state.model)


def stepped(state: UncertaintyState, std: Tensor, damped: bool) -> Tensor:
    """One Newton step from the point of the last releases, shorter along directions that the noise on H hides.

    Args:
        state: The state after a round.
        std: Upper bound of the noise on the diagonal of H.
        damped: Whether the step is shortened.
    """
    _, point, gradient, hessian, _ = state
    if not gradient.numel():  # nobody took part
        return point
    values, vectors = torch.linalg.eigh((hessian + hessian.transpose(-1, -2)).double() / 2)
    edge = std.double() * math.sqrt(2 * values.shape[-1])
    along = (vectors.transpose(-1, -2) @ gradient.double().unsqueeze(-1)).squeeze(-1)
    curved, least = values.clamp_min(0), TINY * values.amax(-1, keepdim=True).clamp_min(TINY)
    step = along * curved / (curved.square() + edge.maximum(least).square())
    if damped:
        changed = (((step * step * curved).sum(-1, keepdim=True)) / USUAL_CURVATURE).sqrt().clamp_min(TINY)
        step = step * changed.log1p() / changed
    result: Tensor = point - (vectors @ step.unsqueeze(-1)).squeeze(-1).to(point)
    return result
