"""DP-FedAdam, DP-FedYogi and DP-AdamBC: DP-FedGD's release under an adaptive server optimiser."""

from __future__ import annotations

from sordino.core import Method, Unit
from sordino.methods.clipping import adaptive_clip
from sordino.methods.fedgd import server_gradient
from sordino.rules import adam, yogi


def fedadam(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.05,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.01,
    bias_correction: bool = False,
    tail: float = 0.0,
    quantile: float = 0.0,
) -> Method:
    """theta <- theta - lr m / (sqrt(v) + tau), Adam's moments of G.

    lr: the step. beta1, beta2: memories of the moments. tau: floor of the root, and its start. bias_correction: as in
    Adam. tail, quantile: as in dp-fedgd.
    """
    rule = adam(beta1=beta1, beta2=beta2, tau=tau, bias_correction=bias_correction)
    return adaptive_clip(server_gradient("dp-fedadam", unit, clip, lr, (rule,), tail), clip, quantile)


def fedyogi(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.05,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.01,
    bias_correction: bool = False,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr m / (sqrt(v) + tau), Yogi's moments of G. Options as in dp-fedadam."""
    rule = yogi(beta1=beta1, beta2=beta2, tau=tau, bias_correction=bias_correction)
    return server_gradient("dp-fedyogi", unit, clip, lr, (rule,), tail)


def adambc(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.999,
    floor: float = 1e-3,
    decay: float = 0.0,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr (m^ / sqrt(max(v^ - Phi, floor)) + decay theta), Phi the variance of the noise on G.

    m^, v^: Adam's moments, bias-corrected. floor: of what is left of v^, which noise alone takes below zero more often
    than not. decay: decoupled. Others as in dp-fedadam.
    """
    rule = adam(
        beta1=beta1, beta2=beta2, tau=0, bias_correction=True, correction="subtract-floor", floor=floor, decay=decay
    )
    return server_gradient("dp-adambc", unit, clip, lr, (rule,), tail)
