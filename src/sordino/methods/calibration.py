"""Calibrated risks: last rounds that make predicted probabilities those that were observed.

Intercepts. A clip cuts the gradients of a rare class more often than those of a common one, because its residuals are
larger. That weighs the classes, and weights on classes move the intercepts of a logistic model and hardly anything
else: risks are too low for the rare class, while their order is right. Two rounds release two vectors of class shares,
those of the labels and those of the predictions, and shift each intercept by the logarithm of their quotient. The more
the predictions vary, the less a shift changes their mean; the second round measures that on the shift of the first.

One record adds (one-hot label, probabilities). Its norm is at most sqrt(2), and two such terms have an inner product of
at least 0, so replacing one costs 2. At person level a person's records are added up, and clipped to twice that.

With a slope, one round of `methods.slope` follows, and a third round of shares, which settles the intercepts again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.slope import slope_stage

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


def calibrated(method: Method, share: float, slope: float = 0.0) -> Method:
    """The method, followed by rounds that calibrate the intercepts, and the slope, of its linear model.

    Args:
        method: A method for records or persons.
        share: Part of mu squared for the intercepts; 0 returns the method unchanged.
        slope: Part of mu squared for the slope of two classes; 0 leaves the slope as it is.

    Returns:
        The method with one more stage, or with three for a slope.

    Raises:
        SordinoError: A share is out of range, or the method is at client level.
    """
    if slope and not share:
        raise SordinoError("calibrate_slope: a slope moves the mean risk, so intercepts follow; set calibrate too.")
    if not share:
        return method
    if not 0 < share <= MOST_SHARE:
        raise SordinoError(f"calibrate: {share} must lie in (0, {MOST_SHARE}], a part of the budget; 0.1 is usual.")
    if slope and not 0 < slope <= MOST_SHARE - share:
        raise SordinoError(
            f"calibrate_slope: {slope} must be above 0, and together with calibrate ({share}) at most {MOST_SHARE}."
        )
    if method.unit is Unit.CLIENT:
        raise SordinoError("calibrate: it is proved for records and persons; leave it out at client level.")
    clip = (RECORDS_OF_A_PERSON if method.unit is Unit.PERSON else 1) * math.sqrt(2)
    last = method.stages[-1].rule
    if slope:
        first = _intercepts(last, clip, share * ROUNDS / (ROUNDS + 1), ROUNDS)
        second = slope_stage(first.rule, clip, slope)
        added: tuple[Stage, ...] = first, second, _intercepts(second.rule, clip, share / (ROUNDS + 1), 1)
    else:
        added = (_intercepts(last, clip, share, ROUNDS),)
    stages = (*(stage.with_part(1 - share - slope) for stage in method.stages), *added)
    registered = None if method.by_hand else (stages, method.proves)
    return method._replace(stages=stages, registered=registered)


def added_rounds(share: float, slope: float | None) -> int:
    """Rounds that `calibrated` adds."""
    return (ROUNDS + 2 if slope else ROUNDS) if share else 0


def _intercepts(last: Rule, clip: float, share: float, rounds: int) -> Stage:
    """Shift intercepts until the mean predictions are the observed shares. last: the rule of the stage before."""

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
    return Stage(Local(compute), rule, (Query(Kind.CALIBRATION, clip, share=share, psd=True),), rounds)
