"""DP-FedSOFIM's rule: a Fisher estimate from the privatised aggregate, rank-one in the paper, inverted in O(d).

    M = beta M + (1 - beta) G,  M^ = M / (1 - beta^(t+1)) with bias correction
    H = (rho I + M^ M^T)^-1,    H v = (v - M^ (M^ . v) / (rho + |M^|^2)) / rho       (Sherman-Morrison)

`gradient` applies H to G (the formula of the paper). `momentum` applies H to M^, which behaves like the experiments of
the paper: H M^ = M^ / (rho + |M^|^2). Every round computes the estimate from M alone; nothing accumulates. `structures`
has the other structures.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor, torch
from sordino.rules.basic import check_decay, debias, moving
from sordino.rules.structures import STRUCTURES, block, by_parameter, kronecker, matrices, rank_k, rank_one

APPLY_TO = ("gradient", "momentum")
EMA_SCALE = ("rho", "unit")


class FisherState(NamedTuple):
    """The state of `fisher`."""

    momentum: Tensor  # M, the moving average of aggregates
    past: Tensor  # the last momenta, for rank-k
    shapes: Tensor  # rows and columns of each parameter


def fisher(
    *,
    rho: float | Tensor = 1.0,
    beta: float | Tensor = 0.9,
    apply_to: str = "gradient",
    bias_correction: bool = False,
    warm_start: int = 0,
    ema_rounds: int = 0,
    ema_scale: str = "rho",
    structure: str = "rank-one",
    rank: int = 4,
) -> Rule:
    """Precondition by the inverse of rho I + M^ M^T, or of another structure.

    Args:
      rho: damping, above 0.
      beta: decay of M, in [0, 1).
      apply_to: what is preconditioned, `gradient` or `momentum`.
      bias_correction: divide M by 1 - beta^(t+1).
      warm_start: W > 0 fades in the rank-one part by min(1, t / W); at 0 it is plain G / rho.
      ema_rounds: the first rounds, which step along M^ alone.
      ema_scale: scale of these steps, `rho` (1 / rho, continuous with H) or `unit` (1).
      structure: of the Fisher estimate: `rank-one`, `rank-k`, `block` or `kronecker`.
      rank: k of `rank-k`.

    Returns:
      The rule.

    Raises:
      SordinoError: an argument is out of its range.
    """
    choices = (
        ("apply_to", apply_to, APPLY_TO),
        ("ema_scale", ema_scale, EMA_SCALE),
        ("structure", structure, STRUCTURES),
    )
    for name, value, allowed in choices:
        check_known(name, value, allowed)
    if not isinstance(rho, Tensor) and not rho > 0:
        raise SordinoError(f"rho: {rho} must be above 0, so that the inverse is finite.")
    check_decay("beta", beta)
    for name, rounds in (("warm_start", warm_start), ("ema_rounds", ema_rounds)):
        if rounds < 0:
            raise SordinoError(f"{name}: {rounds} must be at least 0.")

    if rank < 1:
        raise SordinoError(f"rank: {rank} must be at least 1.")

    def init(theta: Tensor, facts: Facts, before: Tree) -> FisherState:
        past = theta.new_zeros(*theta.shape[:-1], rank if structure == "rank-k" else 0, theta.shape[-1])
        return FisherState(torch.zeros_like(theta), past, matrices(facts.shapes, theta.shape[-1]))

    def update(g: Tensor, state: FisherState, theta: Tensor, t: int) -> tuple[Tensor, FisherState]:
        m, past, shapes = moving(state.momentum, g, beta), state.past, state.shapes
        mhat = debias(m, beta, t) if bias_correction else m
        if structure == "rank-k":
            past = torch.cat([past[..., 1:, :], mhat.unsqueeze(-2)], -2)
        if t < ema_rounds:
            return (mhat / rho if ema_scale == "rho" else mhat), FisherState(m, past, shapes)
        v = g if apply_to == "gradient" else mhat
        fade = min(1.0, t / warm_start) if warm_start else 1.0
        if structure == "rank-k":
            step = rank_k(past, v, rho)
        elif structure == "rank-one":
            step = rank_one(mhat, v, rho)
        else:
            step = by_parameter(block if structure == "block" else kronecker, shapes)(mhat, v, rho)
        return (step if fade == 1 else torch.lerp(v / rho, step, fade)), FisherState(m, past, shapes)

    return Rule(init, update)
