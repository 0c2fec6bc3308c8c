"""DP-FedSOFIM: DP-FedGD's release, preconditioned on the server by a Fisher estimate.

With K local steps the release is the mean local gradient (theta - y) / (K local_lr): K noised gradients at record
level, one clipped message at client level.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Local, Method, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.fedavg import LOCAL_STEPS_CAVEAT, local_steps
from sordino.methods.fedgd import server_gradient
from sordino.rules import fisher


def sofim(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 2.0,
    rho: float = 1.0,
    beta: float = 0.9,
    apply_to: str = "gradient",
    bias_correction: bool = False,
    warm_start: int = 0,
    ema_rounds: int = 0,
    ema_scale: str = "rho",
    structure: str = "rank-one",
    rank: int = 4,
    steps: int = 1,
    local_lr: float = 1.0,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr H G, H = (rho I + M M^T)^-1, M a moving average of G.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server; only lr / rho matters while |M|^2 is far below rho.
        rho: Damping of the Fisher estimate, above 0.
        beta: Decay of M, in [0, 1).
        apply_to: What H multiplies: `gradient` (the formula of the paper) or `momentum` (M).
        bias_correction: Divide M by 1 - beta^(t+1).
        warm_start: Rounds over which the rank-one part is faded in; 0 for none.
        ema_rounds: First rounds that step along M alone.
        ema_scale: Scale of these steps: `rho` (M / rho) or `unit` (M).
        structure: Fisher estimate: `rank-one`, `rank-k`, `block` or `kronecker`.
        rank: k of `rank-k`.
        steps: Local steps before each release.
        local_lr: Step size of the local steps.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: As dp-fedgd: one noised gradient per round and client. With K > 1 local steps, the K noised gradients
            of the round (record level) or the clipped mean local gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server. With K > 1 at
            record level, untrusted-server only.
        Reason: The Fisher estimate is computed from the noised aggregate, which is post-processing. K > 1 noised steps
            are not linear in a client's noise, so sums are not counted there.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedsofim", rho=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    if not isinstance(local_lr, Tensor) and not local_lr > 0:
        raise SordinoError(f"local_lr: {local_lr} must be above 0.")
    rule = fisher(
        rho=rho,
        beta=beta,
        apply_to=apply_to,
        bias_correction=bias_correction,
        warm_start=warm_start,
        ema_rounds=ema_rounds,
        ema_scale=ema_scale,
        structure=structure,
        rank=rank,
    )
    method = server_gradient("dp-fedsofim", unit, clip, lr, (rule,), tail)
    queries, proves = local_steps(unit, clip, steps, "per-step")
    if steps == 1:
        return method

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        y = broadcast.theta
        for _ in range(steps):
            y = y - local_lr * ask.gradient(y)
        return (broadcast.theta - y) / (steps * local_lr)

    (stage,) = method.stages
    return method._replace(
        stages=(stage._replace(local=Local(compute), queries=queries),), proves=proves, caveat=LOCAL_STEPS_CAVEAT
    )
