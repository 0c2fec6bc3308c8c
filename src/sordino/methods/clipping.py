"""Laws of clipping, and a clip that follows a quantile of the gradients' norms.

The second is that of Andrew et al. 2021 (arXiv 1905.03871), at record level.

Gradients are measured in units of the broadcast clip C and clipped to norm 1. So the sensitivity of the release is 1
for any C, and C g is post-processing by the server. Each client also releases how many of its gradients are shorter
than C, where each gradient counts as 1/2 or -1/2: one record moves this count by 1/2 (add-remove) or 1 (replace-one).
The count has its own part of the budget. The next C depends only on noised counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from sordino.core import (
    FLAT_CLIPPING,
    Ask,
    Broadcast,
    Clipping,
    Facts,
    Kind,
    Local,
    Method,
    Query,
    Rule,
    Tree,
    Unit,
    itself,
)
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


def with_clipping(method: Method, clipping: Clipping) -> Method:
    """The method, with another law by which gradients are brought within the clip.

    A term has norm at most the clip under every law, so sensitivities and noise stay the same.

    Args:
        method: A method for records or persons that asks for gradients.
        clipping: The law; `flat` returns the method unchanged.

    Returns:
        The method.

    Raises:
        SordinoError: The method clips no gradients of records, or adapts its clip.

    Example:
        >>> from sordino.core import Clipping
        >>> from sordino.methods import build
        >>> with_clipping(build("dp-fedgd"), Clipping.parse("automatic")).stages[0].queries[0].clipping.gamma
        0.01
    """
    if clipping == FLAT_CLIPPING:
        return method
    queries = [query for stage in method.stages for query in stage.queries]
    if method.unit is Unit.CLIENT:
        raise SordinoError(
            f"clipping: {clipping.law} is for gradients of records; at client level the whole message is clipped. "
            "Leave clipping out, or use unit = record."
        )
    if any(query.kind is Kind.COUNT for query in queries):
        raise SordinoError(
            f"clipping: a quantile adapts the clip of whole gradients, and {clipping.law} has none; leave one out."
        )
    if not any(query.kind is Kind.GRADIENT for query in queries):
        raise SordinoError(f"clipping: {method.name} asks for no gradients; leave clipping out.")

    def changed(query: Query) -> Query:
        return replace(query, clipping=clipping) if query.kind is Kind.GRADIENT else query

    stages = tuple(stage._replace(queries=tuple(map(changed, stage.queries))) for stage in method.stages)
    return method._replace(stages=stages, registered=None if method.by_hand else (stages, method.proves))


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

    def model(theta: Tensor, state: ClipState) -> Tensor:
        return inner.model(theta, state.inner)

    whole = itself if inner.model is itself else model
    rule = Rule(init, update, broadcast=lambda state: state.log_clip, model=whole)
    local = Local(compute, message=EMPTY_GRADIENT_AND_COUNT)
    queries = (replace(stage.queries[0], clip=1.0, share=1 - share), Query(Kind.COUNT, 0.5, share=share))
    assumption = "The clip is 1 in units of a length that follows from the noised counts."
    return method._replace(
        stages=(stage._replace(local=local, rule=rule, queries=queries),), assumes=(*method.assumes, assumption)
    )
