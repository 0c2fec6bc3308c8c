"""DP-FedSOFIM's rule: a rank-one Fisher estimate from the privatised aggregate, inverted in O(d).

    M = beta M + (1 - beta) G,  M^ = M / (1 - beta^(t+1)) with bias correction
    H = (rho I + M^ M^T)^-1,    H v = v / rho - M^ (M^ . v) / (rho^2 + rho |M^|^2)       (Sherman-Morrison)

`gradient` applies H to G (the paper's formula), `momentum` to M^ (which behaves as its experiments do): H M^ =
M^ / (rho + |M^|^2). The estimate is rebuilt every round from M alone; nothing accumulates.
"""

from __future__ import annotations

from torch import Tensor

from sordino.core import Rule, SordinoError, Tree, nearest
from sordino.rules.basic import check_decay, debias, moving, zeros

APPLY_TO = ("gradient", "momentum")
EMA_SCALE = ("rho", "unit")


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def fisher(
    *,
    rho: float | Tensor = 1.0,
    beta: float | Tensor = 0.9,
    apply_to: str = "gradient",
    bias_correction: bool = False,
    warm_start: int = 0,
    ema_rounds: int = 0,
    ema_scale: str = "rho",
) -> Rule:
    """Precondition by the inverse of rho I + M^ M^T.

    - `warm_start` W > 0: the rank-one part is faded in by lambda_t = min(1, t / W); lambda = 0 is plain G / rho.
    - `ema_rounds` R: the first R rounds step along M^ alone, scaled by 1 / rho (`ema_scale="rho"`, continuous with H)
      or by 1 (`"unit"`).
    """
    for name, value, known in (("apply_to", apply_to, APPLY_TO), ("ema_scale", ema_scale, EMA_SCALE)):
        if value not in known:
            raise SordinoError(f"{name}: '{value}' is unknown.{nearest(value, known)}")
    if not isinstance(rho, Tensor) and not rho > 0:
        raise SordinoError(f"rho: {rho} must be above 0; it is what keeps the inverse finite.")
    check_decay("beta", beta)
    for name, rounds in (("warm_start", warm_start), ("ema_rounds", ema_rounds)):
        if rounds < 0:
            raise SordinoError(f"{name}: {rounds} rounds; it must be 0 or more.")

    def update(g: Tree, m: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        m = moving(m, g, beta)
        mhat = debias(m, beta, t) if bias_correction else m
        if t < ema_rounds:
            return (mhat / rho if ema_scale == "rho" else mhat), m
        v = g if apply_to == "gradient" else mhat
        fade = min(1.0, t / warm_start) if warm_start else 1.0
        return v / rho - fade * mhat * dot(mhat, v) / (rho**2 + rho * dot(mhat, mhat)), m

    return Rule(zeros, update)
