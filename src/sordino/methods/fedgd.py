"""DP-FedGD: one clipped, noised gradient per client and round. Also the release every server optimiser shares.

Record level: a client sends the noised sum of its clipped per-record gradients; one record moves that sum by at most
the clip (add-remove) or twice the clip (replace-one).
User level: a client sends its clipped mean gradient, noised; a whole client moves the sum of messages by the clip.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.clipping import adaptive_clip
from sordino.rules import average, chain, scale


def gradient(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
    return ask.gradient(broadcast.theta)


def server_gradient(
    name: str, unit: Unit, clip: float, lr: float | Tensor, rules: tuple[Rule, ...], tail: float
) -> Method:
    """Gradients in, `rules` and a step of `lr` on the server. Proved under every trust model: each round's release
    depends on the past through broadcast models alone, and rules only post-process it."""
    if not isinstance(lr, Tensor) and not lr > 0:
        raise SordinoError(f"lr: {lr} must be above 0.")
    if not 0 < clip < math.inf:
        raise SordinoError(f"clip: {clip} must be a finite number above 0.")
    if not 0 <= tail <= 1:
        raise SordinoError(f"tail: {tail} must lie in [0, 1], the part of the rounds whose iterates are averaged.")
    answers = (
        (Query(Kind.GRADIENT, clip),)
        if unit is Unit.RECORD
        else (Query(Kind.GRADIENT, math.inf, noise=None), Query(Kind.DELTA, clip))
    )
    rule = chain(*rules, scale(-lr), *([average(tail)] if tail else []))
    return Method(name, unit, (Stage(Local(gradient), rule, answers),), frozenset((unit, trust) for trust in Trust))


def fedgd(
    *, unit: Unit = Unit.RECORD, clip: float = 1.0, lr: float = 2.0, tail: float = 0.0, quantile: float = 0.0
) -> Method:
    """theta <- theta - lr G.

    lr: the step. tail: the part of the rounds whose iterates are averaged into the model handed out (0: none).
    quantile: of the gradients' norms, which the clip then follows from where it begins; paid for (0: it stays).
    """
    return adaptive_clip(server_gradient("dp-fedgd", unit, clip, lr, (), tail), clip, quantile)
