"""The rule of calibrated intercepts: shifts from noised shares of the classes among labels and predictions.

The noise is known, and what follows from it costs nothing. Both vectors have the same sum, so what noise adds to their
sums is taken out. Predictions move with the intercepts; the more they vary, the less. Where the noise allows, the
second round measures by how much. It weighs its difference of labels and predictions against what the first round
expects to be left of its own. A shift is shortened by the share of noise in it, so that noise which hides the shares
leaves the intercepts nearly as they were.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import CALIBRATION_LEVEL, Facts, Rule, Tree
from sordino.lazy import Tensor, torch

LEAST_CLASS = 1e-6  # of the shares of a class
USUAL_RESPONSE = 0.8  # of mean predictions to a shift, in logarithms: 1 if all predictions are alike and small
RESPONSE = (0.5, 1.0)  # least and largest that is believed
MISFIT = 0.2  # standard deviation of the response around the usual one


class Shares(NamedTuple):
    """Estimates from one round: entries per class, and variances of the noise on one entry."""

    predicted: Tensor  # of the predictions; sums to 1
    difference: Tensor  # labels minus predictions; sums to 0
    predicted_variance: Tensor
    difference_variance: Tensor
    covariance: Tensor  # of the noise on both


class CalibrationState(NamedTuple):
    """What the last round released and did. Shares and shifts have one entry per class."""

    model: Tensor
    predicted: Tensor
    difference: Tensor
    shift: Tensor  # of the intercepts
    std: Tensor  # of the noise on one number of one round


def shift_intercepts(last: Rule, persons: bool, prior: float) -> Rule:
    """Shift each intercept by the logarithm of labels over predictions, of its class.

    Args:
        last: The rule of the stage before.
        persons: Whether one term is a person's, as `Ask.calibration` has it with `differences`.
        prior: Standard deviation of the right shift, before the first round.

    Returns:
        The rule; its state begins anew with every stage.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> CalibrationState:
        model = last.model(theta, before)
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        zeros = model.new_zeros(*model.shape[:-1], facts.shapes[-1][-1])
        return CalibrationState(model, zeros, zeros, zeros, std)

    def update(released: Tensor, state: CalibrationState, theta: Tensor, t: int) -> tuple[Tensor, CalibrationState]:
        before = CalibrationState(*(part.double() for part in state))
        found = estimated(released.double(), before.std, persons)
        level, left, variance = found.predicted, found.difference, found.difference_variance
        response = USUAL_RESPONSE + 0 * variance
        if t:
            response = _measured_response(found, before)
            level, left, variance = _with_last_round(found, before)
        level = level.maximum(found.predicted_variance.sqrt())  # a share below its noise says nothing
        target = (level + left).maximum(found.difference_variance.sqrt())
        whole = before.shift + (target.log() - level.log()) / response
        noise = variance / (level * response).square()
        shift = whole * prior**2 / (prior**2 + noise) - before.shift
        shift = shift - shift.mean(-1, keepdim=True)
        model = before.model + torch.nn.functional.pad(shift, (state.model.shape[-1] - shift.shape[-1], 0))
        after = CalibrationState(model, found.predicted, found.difference, shift, before.std)
        return model.to(theta) - theta, CalibrationState(*(part.to(theta) for part in after))

    return Rule(init, update, broadcast=lambda state: state.model, model=lambda theta, state: state.model)


def estimated(released: Tensor, std: Tensor, persons: bool) -> Shares:
    """Shares from the numbers that a round released.

    Differences sum to 0, and the shares of records to 1: what noise adds to these sums is taken out. A person may have
    several records, so numbers of persons are divided by what their predictions sum to.

    Args:
        released: Shares of the labels and of the predictions; for persons, differences and a part of the predictions.
        std: Of the noise on one of them.
        persons: Whether one term is a person's.
    """
    first, second = released.chunk(2, -1)
    classes, least = first.shape[-1], std.clamp_min(LEAST_CLASS)
    if persons:
        total = second.sum(-1, keepdim=True).maximum(least) / CALIBRATION_LEVEL
        predicted, difference, noise = second / CALIBRATION_LEVEL / total, first / total, (least / total).square()
        variances = (noise / CALIBRATION_LEVEL**2, noise * (1 - 1 / classes), 0 * noise)
    else:
        predicted = second + (1 - second.sum(-1, keepdim=True)) / classes
        difference, noise = first - second, least.square() * (1 - 1 / classes)
        variances = (noise, 2 * noise, -noise)
    return Shares(predicted, difference - difference.mean(-1, keepdim=True), *variances)


def _measured_response(found: Shares, before: CalibrationState) -> Tensor:
    """How far the last shift moved the predictions, per unit of it, in logarithms; by default the usual one."""
    _, _, of_level, of_difference, both = found
    weight = (of_level + both) / (of_level + of_difference + 2 * both)  # of the way that differences moved
    moved = weight * (before.difference - found.difference) + (1 - weight) * (found.predicted - before.predicted)
    variance = weight**2 * of_difference + (1 - weight) ** 2 * of_level - 2 * weight * (1 - weight) * both
    old = before.predicted.maximum(of_level.sqrt())
    new = (old + moved).maximum(variance.sqrt())
    doubt = (variance / new.square() + variance / old.square()).sum(-1, keepdim=True)
    along = ((new / old).log() * before.shift).sum(-1, keepdim=True) + doubt * USUAL_RESPONSE
    return (along / (before.shift.square().sum(-1, keepdim=True) + doubt)).clamp(*RESPONSE)


def _with_last_round(found: Shares, before: CalibrationState) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions and what is left of the difference by both rounds, weighed by variances; the latter's variance."""
    _, _, of_level, of_difference, both = found
    old = before.predicted.maximum(of_level.sqrt())
    moved = old * (USUAL_RESPONSE * before.shift).exp()
    moved = moved / moved.sum(-1, keepdim=True)
    growth, misfit = moved / old, (MISFIT * before.shift * moved).square()
    variance = growth.square() * of_level + misfit
    level = found.predicted + of_level / (of_level + variance) * (moved - found.predicted)
    expected = before.difference + before.predicted - moved
    variance = of_difference + (1 - growth).square() * of_level + 2 * (1 - growth) * both + misfit
    weight = variance / (variance + of_difference)
    return level, expected + weight * (found.difference - expected), weight * of_difference
