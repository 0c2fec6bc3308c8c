"""DP-FedSAM: local steps along the gradient at the worst point nearby (sharpness-aware minimisation).

Record level: both gradients of a step are about the same minibatch, both are noised and both are paid for: 2 K releases
per round, so the noise grows by the root of two. Without ascent (rho = 0) the first gradient is not computed. Client
level, the published form: local steps have no noise; then the update is clipped as one vector (clipping each of L
tensors separately would let a client reach clip sqrt(L)) and released once, so the second gradient costs nothing.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Local, Method, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import LOCAL_STEPS_CAVEAT, local_steps
from sordino.methods.local import LocalSteps
from sordino.rules import chain, scale

MIN_GRADIENT_NORM = 1e-12  # smallest divisor of the ascent


def fedsam(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    rho: float = 0.05,
    decay: float = 0.0,
    schedule: str = "constant",
    steps: int = 1,
    noise_at: str = "per-step",
) -> Method:
    """y <- y - local_lr (g(y + rho g / |g|) + decay y), K times from theta; theta <- theta + lr mean(y - theta).

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        rho: Length of the ascent; 0 is dp-fedavg.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        steps: Local steps per round, K.
        noise_at: `per-step` noises every local gradient (record level only); `final` clips and noises the update once.
            At client level the update is always noised once.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level, per-step: the 2 K noised gradients of each round (K with rho = 0). Otherwise: the
            clipped update, noised once per round.
        Sensitivity: Per noised gradient: clip if a record joins or leaves, 2 clip if it is replaced. Noised update:
            clip or 2 clip for a client; always 2 clip for a record.
        Proved for: untrusted-server at both levels; secure-aggregation and trusted-server too with noise_at = final, at
            client level, or with steps = 1 and rho = 0.
        Reason: Both gradients of a step are about the same minibatch and are counted as one joint release. Noised steps
            are not linear in the noise, so sums are not counted for them.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedsam", rho=0.1)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    if not 0 <= rho < math.inf:
        raise SordinoError(f"rho: {rho} must be a finite number, 0 or more.")
    queries, proves = local_steps(unit, clip, steps, noise_at, joint=2 if rho else 1)
    walk = LocalSteps(steps, local_lr, schedule, decay)

    def compute(ask: Ask, broadcast: Broadcast[Tree], memory: Tree, cache: Tree) -> Tensor:
        def direction(y: Tensor) -> Tensor:
            batch = ask.sample()
            if not rho:
                return ask.gradient(y, on=batch)
            g = ask.gradient(y, on=batch)
            ascent = rho * g / torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(MIN_GRADIENT_NORM)
            return ask.gradient(y + ascent, on=batch)

        return walk.update(broadcast.theta, broadcast.extras, direction)

    rule = chain(walk.rule(gradient=False), scale(lr))._replace(broadcast=lambda states: states[0].factor)
    return Method("dp-fedsam", unit, (Stage(Local(compute), rule, queries),), proves, LOCAL_STEPS_CAVEAT)
