"""DP-FedSOFIM: DP-FedGD's release, preconditioned on the server by a rank-one Fisher estimate."""

from __future__ import annotations

from sordino.core import Method, Unit
from sordino.methods.fedgd import served
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
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr H G, H = (rho I + M M^T)^-1, M a moving average of G.

    lr, rho: only lr / rho matters while |M|^2 is far below rho. beta: memory of M. apply_to: what H multiplies,
    gradient (the paper's formula) or momentum. bias_correction: divide M by 1 - beta^(t+1). warm_start: rounds over
    which the rank-one part is faded in. ema_rounds, ema_scale: step along M alone at first. tail: as in dp-fedgd.
    """
    rule = fisher(
        rho=rho,
        beta=beta,
        apply_to=apply_to,
        bias_correction=bias_correction,
        warm_start=warm_start,
        ema_rounds=ema_rounds,
        ema_scale=ema_scale,
    )
    return served("dp-fedsofim", unit, clip, lr, (rule,), tail)
