"""DP-FedAdam, scaled: gradients are divided by Adam's earlier root of v before the clip, and multiplied back after it.

Scale-then-privatize (Ganesh, McMahan, Thakurta 2025). Noise then follows the size of the coordinates, and one large
coordinate no longer uses up the clip. The scale s has mean square 1, so that the clip keeps its unit and the noise its
total size; s^2 = (1 - w) + w v / mean(v) spreads the part w of the noise's variance as v, and the rest evenly.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Tree, Unit
from sordino.lazy import Tensor, torch
from sordino.methods.fedgd import server_gradient
from sordino.rules.basic import check_above_zero, check_decay, moving


class ScaledMoments(NamedTuple):
    """The server's state."""

    first: Tensor  # m, of gradients in their own units
    second: Tensor  # v
    scale: Tensor  # s, by which clients divide in the next round; a function of v


def relative_scale(v: Tensor, w: float) -> Tensor:
    """The root of (1 - w) + w v / mean(v); its mean square is 1."""
    mean = v.mean(-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    return ((1 - w) + w * (v / mean)).sqrt()


def fedadam_scaled(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.9,
    tau: float = 0.001,
    w: float = 0.5,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr m / (sqrt(v) + tau), Adam's moments of s G, G the noised mean of clip(g / s), s^2 ~ v.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient divided by s, or of a client's message of such gradients.
        lr: Step size of the server.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Start of the root of v, added to the root in the step, above 0.
        w: Part of the noise's variance that is spread as v, in [0, 1); 0 is DP-FedAdam.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of per-record gradients divided by s and clipped (record level),
            or the client's clipped mean of gradients divided by s, with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: s is broadcast and follows from earlier sums of releases alone, and the clip comes after the division,
            so it bounds a record's term for any s. Multiplying by s and Adam's step are post-processing.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedadam-scaled", clip=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.0
    """
    check_decay("beta1", beta1)
    check_decay("beta2", beta2)
    check_decay("w", w)
    check_above_zero(tau=tau)

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        theta, (s, *_) = broadcast
        return ask.gradient(theta, scale=1 / s)

    def init(theta: Tensor, facts: Facts, before: Tree) -> ScaledMoments:
        v = torch.zeros_like(theta) + tau**2
        return ScaledMoments(torch.zeros_like(theta), v, torch.ones_like(theta))

    def update(mean: Tensor, state: ScaledMoments, theta: Tensor, t: int) -> tuple[Tensor, ScaledMoments]:
        g = state.scale * mean
        m, v = moving(state.first, g, beta1), moving(state.second, g.square(), beta2)
        return m / (v.sqrt() + tau), ScaledMoments(m, v, relative_scale(v, w))

    rule = Rule(init, update, broadcast=lambda state: state.scale)
    method = server_gradient("dp-fedadam-scaled", unit, clip, lr, (rule,), tail)
    (stage,) = method.stages
    return method._replace(stages=(stage._replace(local=Local(compute)),))
