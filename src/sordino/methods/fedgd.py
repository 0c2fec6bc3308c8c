"""DP-FedGD: one clipped, noised gradient per client and round. Also the release every server optimiser shares.

Record level: a client sends the noised sum of its clipped per-record gradients; one record moves that sum by at most
the clip (add-remove) or twice the clip (replace-one).
Client level: a client sends its clipped mean gradient, noised; a whole client moves the sum of messages by the clip.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.clipping import adaptive_clip
from sordino.rules import average, chain, scale, shrink
from sordino.rules.basic import check_above_zero


def gradient(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
    return ask.gradient(broadcast.theta)


def server_gradient(
    name: str,
    unit: Unit,
    clip: float,
    lr: float | Tensor,
    rules: tuple[Rule, ...],
    tail: float,
    weight_decay: float = 0.0,
) -> Method:
    """Gradients in, `rules`, a step of `lr` and weight decay on the server. Proved under every trust model: a round's
    release depends on the past through broadcast models alone, and rules only post-process it."""
    if not isinstance(lr, Tensor) and not lr > 0:
        raise SordinoError(f"lr: {lr} must be above 0.")
    check_above_zero(clip=clip)
    if not 0 <= tail <= 1:
        raise SordinoError(f"tail: {tail} must lie in [0, 1], the part of the rounds whose iterates are averaged.")
    answers = (
        (Query(Kind.GRADIENT, clip),)
        if unit is Unit.RECORD
        else (Query(Kind.GRADIENT, math.inf, noise=None), Query(Kind.DELTA, clip))
    )
    last = ([shrink(weight_decay)] if weight_decay else []) + ([average(tail)] if tail else [])
    rule = chain(*rules, scale(-lr), *last)
    return Method(name, unit, (Stage(Local(gradient), rule, answers),), frozenset((unit, trust) for trust in Trust))


def fedgd(
    *, unit: Unit = Unit.RECORD, clip: float = 1.0, lr: float = 2.0, tail: float = 0.0, quantile: float = 0.0
) -> Method:
    """theta <- theta - lr G, G the noised mean gradient.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.
        quantile: Part of the gradients that an adaptive clip leaves unclipped (record level; it takes 5 % of mu
            squared); 0 keeps the clip fixed.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of clipped per-record gradients (record level), or the client's
            clipped mean gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced. With a quantile, 1 or 2 in units of the
            clip, and 1/2 or 1 for the count of short gradients.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model, and the server only post-processes
            sums of releases.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedgd", clip=1.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        3.0
    """
    return adaptive_clip(server_gradient("dp-fedgd", unit, clip, lr, (), tail), clip, quantile)
