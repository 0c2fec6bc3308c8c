"""Calibrated intercepts: two more rounds, which make the mean predicted probabilities those that were observed.

A clip cuts the gradients of a rare class more often than those of a common one, because its residuals are larger. That
weighs the classes, and weights on classes move the intercepts of a logistic model and hardly anything else: risks are
too low for the rare class, while their order is right. The last rounds release two vectors of class shares, those of
the labels and those of the predictions, and shift each intercept by the logarithm of their quotient. The more the
predictions vary, the less a shift changes their mean; the second round measures that on the shift of the first.

One record adds (one-hot label, probabilities). Its norm is at most sqrt(2), and two such terms have an inner product of
at least 0, so replacing one costs 2. At person level a person's records are added up, and clipped to twice that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

ROUNDS = 2
MOST_SHARE = 0.5
RECORDS_OF_A_PERSON = 2  # that count fully; a person with more counts as two, because more would need more noise
LEAST_CLASS = 1e-6  # of the shares of a class
RESPONSE = (0.3, 1.0)  # of mean predictions to a shift, in logarithms: 1 if all predictions are alike and small


class CalibrationState(NamedTuple):
    """What the rounds have released and done so far."""

    model: Tensor
    labels: Tensor  # sum of the labels' shares of all rounds
    predicted: Tensor  # logarithm of the predictions' shares of the last round
    shift: Tensor  # of the intercepts, in the last round
    std: Tensor  # of the noise on one share of one round


def calibrated(method: Method, share: float) -> Method:
    """The method, followed by two rounds that calibrate the intercepts of its linear model.

    Args:
        method: A method for records or persons.
        share: Part of mu squared for these rounds; 0 returns the method unchanged.

    Returns:
        The method with one more stage.

    Raises:
        SordinoError: The share is out of range, or the method is at client level.
    """
    if not share:
        return method
    if not 0 < share <= MOST_SHARE:
        raise SordinoError(f"calibrate: {share} must lie in (0, {MOST_SHARE}], a part of the budget; 0.1 is usual.")
    if method.unit is Unit.CLIENT:
        raise SordinoError("calibrate: it is proved for records and persons; leave it out at client level.")
    last = method.stages[-1].rule

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Tensor:
        return ask.calibration(broadcast.extras)

    def init(theta: Tensor, facts: Facts, before: Tree) -> CalibrationState:
        model = last.model(theta, before)
        outputs = facts.shapes[-1][-1]
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        zeros = model.new_zeros(*model.shape[:-1], outputs)
        return CalibrationState(model, zeros, zeros, zeros, std)

    def update(shares: Tensor, state: CalibrationState, theta: Tensor, t: int) -> tuple[Tensor, CalibrationState]:
        label, predicted = shares.chunk(2, -1)
        labels, least = state.labels + label, state.std.clamp_min(LEAST_CLASS)  # a share below its noise says nothing
        predicted = predicted.clamp_min(least).log()
        shift = (labels / (t + 1)).clamp_min(least).log() - predicted
        if t:  # how far the last shift moved the predictions, per unit of it
            moved, last_shift = predicted - state.predicted, state.shift
            doubt = 8 * (state.std / predicted.exp()).square().sum(-1, keepdim=True) + LEAST_CLASS
            size = last_shift.square().sum(-1, keepdim=True)
            shift = shift / (((moved * last_shift).sum(-1, keepdim=True) + doubt) / (size + doubt)).clamp(*RESPONSE)
        shift = shift - shift.mean(-1, keepdim=True)
        outputs = shift.shape[-1]
        model = torch.cat([state.model[..., :-outputs], state.model[..., -outputs:] + shift], -1)
        return model - theta, CalibrationState(model, labels, predicted, shift, state.std)

    rule = Rule(init, update, broadcast=lambda state: state.model, model=lambda theta, state: state.model)
    whole = RECORDS_OF_A_PERSON if method.unit is Unit.PERSON else 1
    query = Query(Kind.CALIBRATION, whole * math.sqrt(2), share=share, psd=True)
    stages = (*(stage.with_part(1 - share) for stage in method.stages), Stage(Local(compute), rule, (query,), ROUNDS))
    registered = None if method.by_hand else (stages, method.proves)
    return method._replace(stages=stages, registered=registered)
