"""DP-AdaFedProx: DP-FedAvg with a proximal pull towards the broadcast model, whose strength adapts.

The pull mu (y - theta) holds no data and is added after the noise. mu adapts to noised aggregates alone: successive
updates that point against each other raise it, agreeing ones lower it.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import CAVEAT, local_steps, sends_gradient

RATE, REACH = 0.1, 10.0  # mu changes by a tenth a round, and stays within a factor of ten of where it began


def adafedprox(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    mu: float = 0.1,
    steps: int = 1,
    noise_at: str = "per-step",
) -> Method:
    """y <- y - local_lr (g + mu (y - theta)), K times; mu grows where successive updates disagree.

    mu: its start. steps, noise_at: as in dp-fedavg.
    """
    if not isinstance(mu, Tensor) and not mu > 0:
        raise SordinoError(f"mu: {mu} must be above 0; dp-fedavg has no pull.")

    queries, proves = local_steps(unit, clip, steps, noise_at)
    one = sends_gradient(queries)

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        if one:  # at theta nothing pulls
            return ask.gradient(broadcast.theta)
        y, pull = broadcast.theta, broadcast.extras
        for _ in range(steps):
            y = y - local_lr * (ask.gradient(y) + pull * (y - broadcast.theta))
        return y - broadcast.theta

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return torch.zeros_like(theta[..., :1]) + mu, torch.zeros_like(theta)

    def update(u: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        pull, last = state
        u = -local_lr * u if one else u
        against = (u * last).sum(-1, keepdim=True) < 0
        pull = (pull * torch.where(against, 1 + RATE, 1 - RATE)).clamp(mu / REACH, mu * REACH)
        return lr * u, (pull, u)

    rule = Rule(init, update, broadcast=lambda state: state[0])
    return Method("dp-adafedprox", unit, (Stage(Local(compute), rule, queries),), proves, CAVEAT)
