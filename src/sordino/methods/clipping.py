"""A clip that follows a quantile of the gradients' norms (Andrew et al. 2021, arXiv 1905.03871), at record level.

Gradients are measured in units of the broadcast clip C and clipped to norm 1. So the sensitivity of the release is 1
for any C, and C g is post-processing by the server. Each client also releases how many of its gradients are shorter
than C, where each gradient counts as 1/2 or -1/2: one record moves this count by 1/2 (add-remove) or 1 (replace-one).
The count has its own part of the budget. The next C depends only on noised counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

MAX_LOG_CHANGE = 20.0  # log C stays this close to its start


class GradientAndCount(NamedTuple):
    """What a client sends."""

    gradient: Tensor  # in units of C
    below: Tensor  # part of its gradients up to C, less 1/2


class ClipState(NamedTuple):
    """The server's state."""

    log_clip: Tensor  # log C
    inner: Tree  # the state of the method's own rule


EMPTY_GRADIENT_AND_COUNT = GradientAndCount((), ())  # type: ignore[arg-type]


def adaptive_clip(method: Method, clip: float, quantile: float, *, pace: float = 0.2, share: float = 0.05) -> Method:
    """Let the clip C of a method with one gradient per round follow a quantile of the gradients' norms.

    C <- C exp(-pace (part of norms below C - quantile)).

    Args:
        method: The method, at record level.
        clip: C in the first round.
        quantile: Part of the gradients that stays unclipped, in (0, 1); 0 returns the method unchanged.
        pace: Step size of log C.
        share: Part of mu squared for the counts.

    Returns:
        The method with a clip that adapts.

    Raises:
        SordinoError: The quantile is out of range, or the method is at client level.
    """
    if not quantile:
        return method
    if not 0 < quantile < 1:
        raise SordinoError(
            f"quantile: {quantile} must lie in (0, 1), the part of gradients left whole; 0: a fixed clip."
        )
    if method.unit is Unit.CLIENT:
        raise SordinoError("quantile: the clip of a client's message is fixed; leave quantile at 0.")
    (stage,) = method.stages
    inner = stage.rule
    within = math.log(clip) - MAX_LOG_CHANGE, math.log(clip) + MAX_LOG_CHANGE

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> GradientAndCount:
        unit = (-broadcast.extras.clamp(*within)).exp().expand_as(broadcast.theta)
        return GradientAndCount(ask.gradient(broadcast.theta, scale=unit), ask.count(broadcast.theta, unit))

    def init(theta: Tensor, facts: Facts, before: Tree) -> ClipState:
        return ClipState(torch.full_like(theta[..., :1], math.log(clip)), inner.init(theta, facts, before))

    def update(mean: GradientAndCount, state: ClipState, theta: Tensor, t: int) -> tuple[Tensor, ClipState]:
        step, inner_state = inner.update(state.log_clip.exp() * mean.gradient, state.inner, theta, t)
        log_clip = state.log_clip - pace * (mean.below + 0.5 - quantile)
        return step, ClipState(log_clip.clamp(*within), inner_state)

    rule = Rule(
        init, update, broadcast=lambda state: state.log_clip, model=lambda theta, state: inner.model(theta, state.inner)
    )
    local = Local(compute, message=EMPTY_GRADIENT_AND_COUNT)
    queries = (replace(stage.queries[0], clip=1.0, share=1 - share), Query(Kind.COUNT, 0.5, share=share))
    assumption = "The clip is 1 in units of a length that follows from the noised counts."
    return method._replace(
        stages=(stage._replace(local=local, rule=rule, queries=queries),), assumes=(*method.assumes, assumption)
    )
