"""The slope of risks, of two classes: one round that multiplies all log-odds by one factor.

Noise in the weights makes risks vary more than the features justify: high ones are too high, low ones too low. One
round releases eight means (`Ask.slope`), none of them negative and of norm at most sqrt(2), so they cost what the
shares of `methods.calibration` cost. They hold the score and the information of a factor on all log-odds, next to which
the intercept is free: one step of Newton's method for its root, shortened by the share of noise in it.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import MOST_LOG_ODDS, Ask, Broadcast, Facts, Kind, Local, Query, Rule, Stage, Tree
from sordino.lazy import Tensor, torch

LEAST = 1e-6  # of variances and information
SLOPES, ROOT_PRIOR = (0.1, 1.5), 0.3  # least and largest factor on log-odds; standard deviation of its root around 1


class SlopeState(NamedTuple):
    """The model, and the noise on one mean."""

    model: Tensor
    std: Tensor


def slope_stage(last: Rule, clip: float, share: float) -> Stage:
    """Multiply all log-odds by one factor.

    Args:
        last: The rule of the stage before, which leaves the mean risk right.
        clip: Bound on the norm of a record's eight numbers, or of a person's sum of them.
        share: Part of mu squared.

    Returns:
        The stage, of one round.
    """

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Tensor:
        return ask.slope(broadcast.extras)

    def init(theta: Tensor, facts: Facts, before: Tree) -> SlopeState:
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        return SlopeState(last.model(theta, before), std)

    def update(means: Tensor, state: SlopeState, theta: Tensor, t: int) -> tuple[Tensor, SlopeState]:
        label_up, up, label_down, down, w, w_up, w_down, w_square = means.double().unsqueeze(-1).unbind(-2)
        std = state.std.double()
        score = (up - label_up) + (down - label_down)  # the mean of (p - y) t, because t = t+ - t-
        w = w.clamp(min=LEAST, max=0.25).maximum(std)
        information = (w_square - (w_up - w_down).square() / w).maximum(std).clamp_min(LEAST)
        # Newton's step for the root of the factor: a step for the factor itself goes too far where risks are too sure.
        curve = MOST_LOG_ODDS * information
        step = -score / (2 * curve + score).maximum(curve)
        variance = (std / curve).square()  # of the four means in the score
        factor = (1 + step * ROOT_PRIOR**2 / (ROOT_PRIOR**2 + variance)).square().clamp(*SLOPES)
        # The intercept that keeps the mean risk, to first order: half of the shift for each of the two classes.
        shift = -MOST_LOG_ODDS * (w_up - w_down) / w * (factor - 1) / 2
        model = state.model.double() * factor
        model = torch.cat([model[..., :-2], model[..., -2:] + torch.cat([-shift, shift], -1)], -1).to(theta)
        return model - theta, SlopeState(model, state.std)

    rule = Rule(init, update, broadcast=lambda state: state.model, model=lambda theta, state: state.model)
    return Stage(Local(compute), rule, (Query(Kind.SLOPE, clip, share=share, psd=True),), rounds=1)
