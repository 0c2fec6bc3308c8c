"""Standard errors of coefficients: two more rounds, which release gradients and Hessians near the trained model.

Training clips gradients, which biases a model, and its steps end before they converge. So intervals are not centred on
the trained coefficients w but on Newton steps from them, w - H^-1 g, with gradients g and Hessians H of their own.
Records have norm at most `radius`, so the bounds of these rounds cut nothing: g and H are unbiased, and their noise is
known. The first step removes what the clip did, and the second, from w1, what the first left. `training.intervals`
makes standard errors of the second round's releases; the trained model stays as it is.

One record adds a gradient of norm at most sqrt(2 (1 + radius^2)) (softmax: |p - y| <= sqrt 2) and a positive
semi-definite Hessian of Frobenius norm at most (1 + radius^2) / 2 (|diag p - p p^T| <= 1/2). Both are clipped there, so
the bounds hold for any record. Replacing a record costs 2 times the first and sqrt 2 times the second.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

MOST_SHARE, FIRST_SHARE = 0.5, 0.3  # the second of both rounds' budget, for the first of them
HIDDEN, TINY = 2.0, 1e-9  # of the largest eigenvalue that noise alone has, and of H: smaller ones are not inverted
GRADIENT, HESSIAN = 0, 1  # queries of the stage
UNCERTAINTY_ROUNDS = 2


class Curve(NamedTuple):
    """The message of a client: mean gradient and Hessian of its records."""

    gradient: Tensor
    hessian: Tensor


class UncertaintyState(NamedTuple):
    """The trained model, and what the last round released, at the point that it was asked at."""

    model: Tensor
    point: Tensor
    gradient: Tensor
    hessian: Tensor


def with_uncertainty(method: Method, share: float, radius: float) -> Method:
    """The method, followed by two rounds that each release a gradient and a Hessian, at its model and one step on.

    Args:
        method: A method for records.
        share: Part of mu squared for these rounds; 0 returns the method unchanged.
        radius: Bound on the norm of a record.

    Returns:
        The method with two more stages.

    Raises:
        SordinoError: The share is out of range, or the method does not protect records.
    """
    if not share:
        return method
    if not 0 < share <= MOST_SHARE:
        raise SordinoError(f"uncertainty: {share} must lie in (0, {MOST_SHARE}], a part of the budget; 0.2 is usual.")
    if method.unit is not Unit.RECORD:
        raise SordinoError(f"uncertainty: it is derived for records, not for unit = {method.unit}; leave it out.")
    last, squared = method.stages[-1].rule, 1 + radius**2
    bounds = (math.sqrt(2 * squared), squared / 2)

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Curve:
        return Curve(ask.gradient(broadcast.extras), ask.curvature(broadcast.extras))

    def rule(first: bool) -> Rule:
        def init(theta: Tensor, facts: Facts, before: Tree) -> UncertaintyState:
            model = point = last.model(theta, before) if first else UncertaintyState(*before).model
            if not first:
                std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta) * (bounds[1] / bounds[0])
                point = stepped(UncertaintyState(*before), std * math.sqrt((1 - FIRST_SHARE) / FIRST_SHARE))
            return UncertaintyState(model, point, model.new_zeros(0), model.new_zeros(0))

        def update(total: Curve, state: UncertaintyState, theta: Tensor, t: int) -> tuple[Tensor, UncertaintyState]:
            gradient, hessian = total  # a message that was stored comes back as a plain tuple
            return state.model - theta, UncertaintyState(state.model, state.point, gradient, hessian)

        return Rule(init, update, broadcast=lambda state: state.point, model=lambda theta, state: state.model)

    def stage(first: bool) -> Stage:
        part = share * (FIRST_SHARE if first else 1 - FIRST_SHARE) / 2
        queries = (
            Query(Kind.GRADIENT, bounds[GRADIENT], share=part),
            Query(Kind.CURVATURE, bounds[HESSIAN], share=part, psd=True),
        )
        return Stage(Local(compute), rule(first), queries, rounds=1)

    stages = (*(each.with_part(1 - share) for each in method.stages), stage(True), stage(False))
    registered = None if method.by_hand else (stages, method.proves)
    return method._replace(stages=stages, registered=registered)


def stepped(state: UncertaintyState, std: Tensor) -> Tensor:
    """One Newton step from the point of the last releases, along directions that the noise on H does not hide.

    Args:
        state: The state after a round.
        std: Upper bound of the noise on the diagonal of H.
    """
    _, point, gradient, hessian = state
    if not gradient.numel():  # nobody took part
        return point
    values, vectors = torch.linalg.eigh((hessian + hessian.transpose(-1, -2)).double() / 2)
    edge = std.double() * math.sqrt(2 * values.shape[-1])
    seen = values > (HIDDEN * edge).maximum(TINY * values.amax(-1, keepdim=True))
    along = (vectors.transpose(-1, -2) @ gradient.double().unsqueeze(-1)).squeeze(-1)
    step = torch.where(seen, along / torch.where(seen, values, 1.0), 0.0)
    result: Tensor = point - (vectors @ step.unsqueeze(-1)).squeeze(-1).to(point)
    return result
