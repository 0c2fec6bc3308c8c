"""A clip that follows a quantile of the gradients' norms (Andrew et al. 2021, arXiv 1905.03871), at record level.

Gradients are measured in units of the broadcast clip C and cut to norm 1, so that what is released moves by 1 whatever
C is, and C g is post-processing by the server. Beside it each client releases how many of its gradients are shorter
than C, every one counted as 1/2 or -1/2: one record moves that by 1/2 (add-remove) or 1 (replace-one), and it has its
own part of the budget. The next C is a function of noised counts alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

FARTHEST = 20.0  # of log C from where it began


def adaptive_clip(method: Method, clip: float, quantile: float, *, pace: float = 0.2, share: float = 0.05) -> Method:
    """The same method of one gradient a round; C <- C exp(-pace (part below C - quantile)). quantile 0: as it was."""
    if not quantile:
        return method
    if not 0 < quantile < 1:
        raise SordinoError(
            f"quantile: {quantile} must lie in (0, 1), the part of gradients left whole; 0: a fixed clip."
        )
    if method.unit is Unit.USER:
        raise SordinoError("quantile: the clip of a user's message is fixed; leave quantile at 0.")
    (stage,) = method.stages
    inner = stage.rule
    within = math.log(clip) - FARTHEST, math.log(clip) + FARTHEST

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
        unit = (-broadcast.extras.clamp(*within)).exp().expand_as(broadcast.theta)
        return ask.gradient(broadcast.theta, scale=unit), ask.count(broadcast.theta, unit)

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return torch.full_like(theta[..., :1], math.log(clip)), inner.init(theta, facts, before)

    def update(said: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        (g, below), (C, own) = said, state
        step, own = inner.update(C.exp() * g, own, theta, t)
        C = C - pace * (below + 0.5 - quantile)
        return step, (C.clamp(*within), own)

    rule = Rule(init, update, broadcast=lambda state: state[0], model=lambda theta, state: inner.model(theta, state[1]))
    queries = (replace(stage.queries[0], clip=1.0, share=1 - share), Query(Kind.COUNT, 0.5, share=share))
    told = "The clip, 1 in its own units, is multiplied by a length that follows the noised counts."
    return method._replace(
        stages=(stage._replace(local=Local(compute), rule=rule, queries=queries),), assumes=(*method.assumes, told)
    )
