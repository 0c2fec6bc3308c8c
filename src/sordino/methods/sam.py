"""DP-FedSAM: local steps along the gradient at the worst point nearby (sharpness-aware minimisation).

Record level: both gradients of a step are about the same minibatch, both are noised and both are paid for, 2 K releases
a round: the noise grows by the root of two. Without ascent (rho = 0) the first is not asked for. User level, the
published form: local steps without noise, then the update is clipped as one vector (each of L tensors on its own would
let a user reach clip sqrt(L)) and released once, so that there the second gradient is free.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Local, Method, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import CAVEAT, local_steps
from sordino.rules import scale

SMALLEST = 1e-12  # norm that the ascent is divided by


def fedsam(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    rho: float = 0.05,
    decay: float = 0.0,
    steps: int = 1,
    noise_at: str = "per-step",
) -> Method:
    """y <- y - local_lr (g(y + rho g / |g|) + decay y), K times from theta; theta <- theta + lr mean(y - theta).

    rho: length of the ascent; 0 is dp-fedavg. decay: of the weights. steps: K. noise_at: as in dp-fedavg.
    """
    for name, value in (("rho", rho), ("decay", decay)):
        if not 0 <= value < math.inf:
            raise SordinoError(f"{name}: {value} must be a finite number, 0 or more.")

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        y = broadcast.theta
        for _ in range(steps):
            worst, batch = y, ask.sample()
            if rho:
                g = ask.gradient(y, on=batch)
                worst = y + rho * g / torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(SMALLEST)
            y = y - local_lr * (ask.gradient(worst, on=batch) + decay * y)
        return y - broadcast.theta

    queries, proves = local_steps(unit, clip, steps, noise_at, joint=2 if rho else 1)
    return Method("dp-fedsam", unit, (Stage(Local(compute), scale(lr), queries),), proves, CAVEAT)
