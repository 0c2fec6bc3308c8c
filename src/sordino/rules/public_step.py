"""A step for any network that follows from public numbers: the noise and the number of parameters.

In units of the clip a record's term has norm at most 1, so the mean g of all terms has one too, and the aggregate
G = g + noise has the energy |g|^2 + d s^2, with d parameters and s the standard deviation of the noise. On a loss of
curvature L, the step along G that lowers the loss most on average is

    |g|^2 / (|g|^2 + d s^2) / L.

`public_step` takes 1 for |g|^2, which is its bound, and STEP for 1 / L: STEP / (1 + d s^2). Without noise this is
normalised gradient descent. In much noise, what noise adds to the model in T rounds is STEP sqrt(T / (d s^2)) long at
most. G is averaged over the last rounds (momentum with bias correction), because the gradient changes more slowly than
the noise.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.lazy import Tensor, torch
from sordino.rules.basic import check_above_zero, debias, moving

STEP = 5.0
BETA = 0.9


class StepState(NamedTuple):
    """The state of `public_step`."""

    mean: Tensor  # moving average of G, in units of the clip
    step_size: Tensor


def public_step(clip: float) -> Rule:
    """theta - STEP / (1 + d s^2) M, M the mean of the last aggregates in units of the clip.

    Args:
      clip: bound on the norm of a record's term.

    Returns:
      The rule.

    Raises:
      SordinoError: the clip is not above 0.

    Example:
      >>> import numpy as np
      >>> rule, theta = public_step(clip=1.0), torch.zeros(4)
      >>> state = rule.init(theta, Facts(1, np.array([9]), 25, 1.0, aggregate_std=0.5), ())
      >>> rule.update(torch.tensor([0.5, 0.0, 0.0, -0.5]), state, theta, 0)[0]
      tensor([-1.2500, -0.0000, -0.0000,  1.2500])
    """
    check_above_zero(clip=clip)

    def init(theta: Tensor, facts: Facts, before: Tree) -> StepState:
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64) / clip
        size = STEP / (1 + theta.shape[-1] * std.square())
        return StepState(torch.zeros_like(theta), size.to(theta))

    def update(g: Tensor, state: StepState, theta: Tensor, t: int) -> tuple[Tensor, StepState]:
        m = moving(state.mean, g / clip, BETA)
        return -state.step_size * debias(m, BETA, t), state._replace(mean=m)

    return Rule(init, update)
