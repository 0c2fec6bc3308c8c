"""A step for any network that follows from public numbers: the noise, the number of parameters and the rounds.

In units of the clip a record's term has norm at most 1, and the noise of a round's aggregate G has the energy n = d
s^2, with d parameters and s its standard deviation. Where noise rules, T steps of stochastic gradient descent over a
distance D have the smallest bound on their loss at the step size D / sqrt(T n). Where there is little noise, the
curvature of the loss limits the step. `public_step` has a smooth minimum of both:

    1 / sqrt(T n / DISTANCE^2 + 1 / LONGEST^2).

The step grows over the first tenth of the rounds, because long steps from random weights can ruin them. In the last
quarter it falls to 0, so that less noise remains in the model. G is averaged over the last rounds (momentum with bias
correction), because the gradient changes more slowly than the noise. Matrices of that average get a flatter spectrum
(`rules.spectrum`), because otherwise a long step overshoots along their first singular vectors.

DISTANCE was chosen on pictures of clothes (Fashion-MNIST) by a CNN and on sentences from reviews, news and short
messages by adapters of MiniLM, LONGEST and the spectrum on CIFAR-10, Fashion-MNIST and digits by CNNs and on phrases of
SST-2 held out of its training records, the others on Fashion-MNIST and digits by CNNs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.lazy import Tensor, torch
from sordino.rules.basic import check_above_zero, debias, moving
from sordino.rules.spectrum import flatten, shapes_of

DISTANCE, LONGEST = 36.0, 10.0
BETA, GROWING, FALLING = 0.8, 0.1, 0.25  # the last two: parts of the rounds


class StepState(NamedTuple):
    """The state of `public_step`."""

    mean: Tensor  # moving average of G, in units of the clip
    step_size: Tensor  # the largest
    rounds: Tensor
    std: Tensor  # of the aggregate's noise per coordinate, in units of the clip
    shapes: Tensor


def public_step(clip: float, releases: int = 1) -> Rule:
    """theta - step_size P, P the mean of the last aggregates in units of the clip, with flatter spectra.

    Args:
      clip: bound on the norm of a record's term.
      releases: releases per round, of which the aggregate is the mean.

    Returns:
      The rule.

    Raises:
      SordinoError: the clip is not above 0.

    Example:
      >>> import numpy as np
      >>> rule, theta = public_step(clip=1.0), torch.zeros(4)
      >>> state = rule.init(theta, Facts(1, np.array([9]), 25, 1.0, aggregate_std=1.2), ())
      >>> rule.update(torch.tensor([0.5, 0.0, 0.0, -0.5]), state, theta, 0)[0]
      tensor([-0.5747, -0.0000, -0.0000,  0.5747])
    """
    check_above_zero(clip=clip)

    def init(theta: Tensor, facts: Facts, before: Tree) -> StepState:
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64, device=theta.device) / clip / releases**0.5
        energy = theta.shape[-1] * std.square()
        size = (facts.rounds * energy / DISTANCE**2 + 1 / LONGEST**2).rsqrt()
        rounds, shapes = torch.as_tensor(facts.rounds).to(theta), shapes_of(facts.shapes).to(theta.device)
        return StepState(torch.zeros_like(theta), size.to(theta), rounds, std.to(theta), shapes)

    def update(g: Tensor, state: StepState, theta: Tensor, t: int) -> tuple[Tensor, StepState]:
        m = moving(state.mean, g / clip, BETA)
        growing = ((t + 1) / (GROWING * state.rounds)).clamp(max=1)
        falling = ((1 - t / state.rounds) / FALLING).clamp(max=1)
        p = flatten(debias(m, BETA, t), state.std * noise_kept(t), state.shapes)
        return -state.step_size * growing * falling * p, state._replace(mean=m)

    return Rule(init, update)


def noise_kept(t: int) -> float:
    """The part of the noise's standard deviation that a moving average of t + 1 aggregates keeps, its bias removed."""
    last = BETA ** (t + 1)
    return math.sqrt((1 - BETA) / (1 + BETA) * (1 + last) / (1 - last))
