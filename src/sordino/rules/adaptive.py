"""Server optimisers of Reddi et al. (2021): Adam and Yogi on the privatised aggregate.

m = beta1 m + (1 - beta1) G
v = beta2 v + (1 - beta2) G^2                      (Adam)
v = v - (1 - beta2) G^2 sign(v - G^2)              (Yogi: v moves by at most G^2, however large v is)
step = m / (sqrt(v) + tau),  from m = 0, v = tau^2
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sordino.core import Facts, Rule, SordinoError, Tree
from sordino.rules.basic import check_decay, debias, moving

Moment = Callable[[Tensor, Tensor, "float | Tensor"], Tensor]


def _moments(second: Moment, beta1: float, beta2: float, tau: float, bias_correction: bool) -> Rule:
    check_decay("beta1", beta1)
    check_decay("beta2", beta2)
    if not isinstance(tau, Tensor) and not tau > 0:
        raise SordinoError(f"tau: {tau} must be above 0; it bounds the step where v is small.")

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return torch.zeros_like(theta), torch.zeros_like(theta) + tau**2

    def update(g: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        m, v = state
        m, v = moving(m, g, beta1), second(v, g.square(), beta2)
        if bias_correction:
            return debias(m, beta1, t) / (debias(v, beta2, t).sqrt() + tau), (m, v)
        return m / (v.sqrt() + tau), (m, v)

    return Rule(init, update)


def _yogi(v: Tensor, g2: Tensor, beta: float | Tensor) -> Tensor:
    return v - (1 - beta) * g2 * torch.sign(v - g2)


def adam(*, beta1: float = 0.9, beta2: float = 0.999, tau: float = 1e-3, bias_correction: bool = False) -> Rule:
    """Adam; no bias correction by default, as in the federated form."""
    return _moments(moving, beta1, beta2, tau, bias_correction)


def yogi(*, beta1: float = 0.9, beta2: float = 0.999, tau: float = 1e-3, bias_correction: bool = False) -> Rule:
    """Yogi."""
    return _moments(_yogi, beta1, beta2, tau, bias_correction)
