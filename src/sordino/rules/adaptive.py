"""Server optimisers of Reddi et al. (2021): Adam and Yogi on the privatised aggregate.

m = beta1 m + (1 - beta1) G
v = beta2 v + (1 - beta2) G^2                      (Adam)
v = v - (1 - beta2) G^2 sign(v - G^2)              (Yogi: v decreases by at most this amount)
step = m / (sqrt(v) + tau),  from m = 0, v = tau^2

Noise of variance Phi adds Phi to every G^2, and so a weighted sum of Phi to Adam's v. `subtract-floor` subtracts it and
keeps the rest above a floor (DP-AdamBC: Tang, Shpilevskiy, Lecuyer 2024). Yogi's v is not a mean of squares: in pure
noise it settles near 2.4 Phi, of which the correction subtracts Phi.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor, torch
from sordino.rules.basic import check_decay, debias, moving

Moment = Callable[[Tensor, Tensor, "float | Tensor"], Tensor]
CORRECTION = ("none", "subtract-floor")


class Moments(NamedTuple):
    """The state of Adam and Yogi."""

    first: Tensor
    second: Tensor
    noise: Tree  # the variance of the noise if it is subtracted from the second moment; otherwise ()


def denoised(v: Tensor, phi: Tensor, floor: float | Tensor) -> Tensor:
    """A second moment minus the part of the noise. Without the floor more than half could be negative."""
    return torch.clamp(v - phi, min=floor)


def _moments(
    second: Moment,
    beta1: float,
    beta2: float,
    tau: float,
    bias_correction: bool,
    correction: str,
    floor: float,
    decay: float,
) -> Rule:
    check_decay("beta1", beta1)
    check_decay("beta2", beta2)
    check_known("correction", correction, CORRECTION)
    subtract = correction != "none"
    if subtract and not floor > 0:
        raise SordinoError(f"floor: {floor} must be above 0, because v minus the noise may be negative.")
    if not isinstance(tau, Tensor) and not (tau > 0 or (subtract and tau == 0)):
        raise SordinoError(f"tau: {tau} must be above 0; it bounds the step where v is small.")
    if not decay >= 0:
        raise SordinoError(f"decay: {decay} must be at least 0.")

    def init(theta: Tensor, facts: Facts, before: Tree) -> Moments:
        variance = torch.as_tensor(facts.aggregate_std**2, dtype=torch.float64).to(theta) if subtract else ()
        return Moments(torch.zeros_like(theta), torch.zeros_like(theta) + tau**2, variance)

    def update(g: Tensor, state: Moments, theta: Tensor, t: int) -> tuple[Tensor, Moments]:
        m, v, noise = moving(state.first, g, beta1), second(state.second, g.square(), beta2), state.noise
        top, bottom = (debias(m, beta1, t), debias(v, beta2, t)) if bias_correction else (m, v)
        if isinstance(noise, Tensor):
            bottom = denoised(bottom, noise if bias_correction else noise * (1 - beta2 ** (t + 1)), floor)
        step = top / (bottom.sqrt() + tau)
        return step + decay * theta if decay else step, Moments(m, v, noise)

    return Rule(init, update)


def _yogi(v: Tensor, g2: Tensor, beta: float | Tensor) -> Tensor:
    return v - (1 - beta) * g2 * torch.sign(v - g2)


def adam(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 1e-3,
    bias_correction: bool = False,
    correction: str = "none",
    floor: float = 1e-8,
    decay: float = 0.0,
) -> Rule:
    """Adam on the server, by default without bias correction, as in its federated form.

    Args:
      beta1: decay of the first moment, in [0, 1).
      beta2: decay of the second moment, in [0, 1).
      tau: added to the root of the second moment; above 0.
      bias_correction: divide the moments by 1 - beta^(t+1).
      correction: `none`, or `subtract-floor`, which takes the root of max(v - Phi, floor).
      floor: the smallest corrected second moment.
      decay: decoupled weight decay, added to the step.

    Returns:
      The rule.

    Raises:
      SordinoError: an argument is out of its range.
    """
    return _moments(moving, beta1, beta2, tau, bias_correction, correction, floor, decay)


def yogi(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 1e-3,
    bias_correction: bool = False,
    correction: str = "none",
    floor: float = 1e-8,
    decay: float = 0.0,
) -> Rule:
    """Yogi on the server.

    Args:
      beta1, beta2, tau, bias_correction, correction, floor, decay: as in `adam`.

    Returns:
      The rule.

    Raises:
      SordinoError: an argument is out of its range.
    """
    return _moments(_yogi, beta1, beta2, tau, bias_correction, correction, floor, decay)
