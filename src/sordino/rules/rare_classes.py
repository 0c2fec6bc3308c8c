"""The intercepts and the curvature where some classes are rare, from the first gradient.

At zero every class has the probability 1/c, so the gradient of the intercepts is 1/c minus the shares of the classes,
times the factor by which the clip cuts every record. Where most records are of one class, the intercepts are far from
zero, and the curvature at the right ones is far below that at zero: by the `impurity` of the shares, which is 1 if they
are equal. Steps with the curvature at zero would then be too short along what is known and too long along what is not.
So the first gradient sets the intercepts alone, and later ones take steps at them.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.lazy import Tensor, torch

RARE = 0.8  # largest impurity at which this is done: of two classes, the smaller one has 28 % of the records
CERTAIN = 4.0  # how far the largest share must lie above 1/c, in standard deviations of its noise
LEAST_SHARE = 1e-6
PRIOR_INTERCEPT = 2.0  # standard deviation, before the first round


class Intercepts(NamedTuple):
    """What `intercepts_of` finds."""

    shift: Tensor  # of the intercepts; 0 where no class is rare
    impurity: Tensor  # of the classes; 1 where none is rare


def intercepts_of(gradient: Tensor, std: Tensor, factor: Tensor) -> Intercepts:
    """The intercepts of rare classes.

    Args:
        gradient: Of the intercepts at zero, noised.
        std: Of the noise on each entry.
        factor: By which the clip cuts the gradient of every record.

    Returns:
        What was found.
    """
    classes, std = gradient.shape[-1], std / factor
    share = 1 / classes - gradient / factor
    share = share + (1 - share.sum(-1, keepdim=True)) / classes  # noise changes the sum
    level = share.maximum(std).clamp_min(LEAST_SHARE)  # a share below its noise says nothing
    logit = level.log() - level.log().mean(-1, keepdim=True)
    logit = logit * PRIOR_INTERCEPT**2 / (PRIOR_INTERCEPT**2 + (std / level).square())
    p = torch.softmax(logit, -1)
    impurity = (p * (1 - p)).sum(-1, keepdim=True) / (1 - 1 / classes)
    clear = share.amax(-1, keepdim=True) - 1 / classes > CERTAIN * std
    rare = (impurity < RARE) & clear
    return Intercepts(torch.where(rare, logit, 0.0), torch.where(rare, impurity, 1.0))
