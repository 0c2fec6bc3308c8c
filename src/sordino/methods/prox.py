"""DP-AdaFedProx: DP-FedAvg with a proximal pull towards the broadcast model, whose strength adapts.

The pull mu (y - theta) contains no data and is added after the noise. mu depends only on noised aggregates: successive
updates in opposite directions increase it, and updates in similar directions decrease it.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import LOCAL_STEPS_CAVEAT, local_steps, sends_gradient
from sordino.methods.local import LocalSteps, Pace, paced, unpaced

RATE = 0.1  # by which mu changes per round
MAX_FACTOR = 10.0  # mu stays within this factor of its start


class ProxState(NamedTuple):
    """The server's state."""

    pull: Tensor  # mu
    last_update: Tensor  # the mean update of the round before
    pace: Pace


def adafedprox(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    mu: float = 0.1,
    steps: int = 1,
    decay: float = 0.0,
    schedule: str = "constant",
    noise_at: str = "per-step",
) -> Method:
    """y <- y - local_lr (g + mu (y - theta) + decay y), K times; mu grows where successive updates disagree.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        mu: Strength of the pull towards theta in the first round, above 0.
        steps: Local steps per round, K.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        noise_at: `per-step` noises every local gradient (record level only); `final` clips and noises the update once.
            At client level the update is always noised once.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level, per-step: the K noised gradients of each round (the update follows from them).
            Otherwise: the clipped update, noised once per round.
        Sensitivity: Per noised gradient: clip if a record joins or leaves, 2 clip if it is replaced. Noised update:
            clip or 2 clip for a client; always 2 clip for a record, which may move the update anywhere in the ball.
        Proved for: untrusted-server at both levels; secure-aggregation and trusted-server too with steps = 1, noise_at
            = final or at client level.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted. The pull holds no data, and mu follows from noised aggregates.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-adafedprox", mu=0.2)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    if not isinstance(mu, Tensor) and not mu > 0:
        raise SordinoError(f"mu: {mu} must be above 0; dp-fedavg has no pull.")

    queries, proves = local_steps(unit, clip, steps, noise_at)
    walk, one = LocalSteps(steps, local_lr, schedule, decay), sends_gradient(queries)

    def compute(ask: Ask, broadcast: Broadcast[Tree], memory: Tree, cache: Tree) -> Tensor:
        theta, (pull, factor) = broadcast.theta, unpaced(broadcast.extras)
        if one:  # the pull is zero at theta
            return ask.gradient(theta)
        return walk.update(theta, factor, lambda y: ask.gradient(y) + pull * (y - theta), pull)

    def init(theta: Tensor, facts: Facts, before: Tree) -> ProxState:
        start = torch.zeros_like(theta[..., :1]) + mu
        return ProxState(start, torch.zeros_like(theta), walk.start(theta, facts))

    def update(u: Tensor, state: ProxState, theta: Tensor, t: int) -> tuple[Tensor, ProxState]:
        u = walk.received(u, theta, state.pace.factor, gradient=one, pull=state.pull)
        against = (u * state.last_update).sum(-1, keepdim=True) < 0
        pull = (state.pull * torch.where(against, 1 + RATE, 1 - RATE)).clamp(mu / MAX_FACTOR, mu * MAX_FACTOR)
        return lr * u, ProxState(pull, u, walk.following(state.pace, t))

    rule = Rule(init, update, broadcast=lambda state: paced(state.pull, () if one else state.pace.factor))
    return Method("dp-adafedprox", unit, (Stage(Local(compute), rule, queries),), proves, LOCAL_STEPS_CAVEAT)
