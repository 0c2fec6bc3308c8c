"""DP-FedSOFIM: DP-FedGD's release, preconditioned on the server by a Fisher estimate.

With K local steps the release is the mean local gradient (theta - y) / (K local_lr): K noised gradients at record
level, one clipped message at user level.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Local, Method, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.fedavg import CAVEAT, local_steps
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

    lr, rho: only lr / rho matters while |M|^2 is far below rho. beta: memory of M. apply_to: what H multiplies,
    gradient (the paper's formula) or momentum. bias_correction: divide M by 1 - beta^(t+1). warm_start: rounds over
    which the rank-one part is faded in. ema_rounds, ema_scale: step along M alone at first. structure: rank-one, rank-k
    (of `rank`), block or kronecker. steps, local_lr: local steps before each release. tail: as in dp-fedgd.
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
        stages=(stage._replace(local=Local(compute), queries=queries),), proves=proves, caveat=CAVEAT
    )
