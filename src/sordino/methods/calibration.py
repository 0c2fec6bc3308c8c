"""Calibrated risks: last rounds that make predicted probabilities those that were observed.

Intercepts. A clip cuts the gradients of a rare class more often than those of a common one, because its residuals are
larger. That weighs the classes, and weights on classes move the intercepts of a logistic model and hardly anything
else: risks are too low for the rare class, while their order is right. Two rounds release two vectors of class shares,
those of the labels and those of the predictions, and shift each intercept by the logarithm of their quotient.

What the rounds do with the noised shares is `rules.intercepts`.

One record adds (one-hot label, probabilities). Its norm is at most sqrt(2), and two such terms have an inner product of
at least 0, so replacing one costs 2. One person adds the sum of (one-hot label - probabilities, probabilities / 2) over
its records, clipped to norm 2; replacing one costs 4. Differences of one person's records cancel in part, so a person
with several records is seldom clipped, and half of the probabilities is enough to tell how large they are.

With a slope, one round of `methods.slope` follows, and a third round of shares, which settles the intercepts again.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.slope import slope_stage
from sordino.rules.intercepts import shift_intercepts

ROUNDS = 2
MOST_SHARE = 0.5
PRIOR, PRIOR_AFTER_SLOPE = 1.2, 0.3  # standard deviation of the right shift, before the first round of a stage
PERSON_CLIP = 2.0  # of a person's sum; one record has norm at most sqrt(2 + 1/4)
RECORDS_OF_A_PERSON = 2  # that count fully for a slope; a person with more counts as two


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
    persons, last = method.unit is Unit.PERSON, method.stages[-1].rule
    if slope:
        clip = (RECORDS_OF_A_PERSON if persons else 1) * math.sqrt(2)
        first = _intercepts(last, persons, share * ROUNDS / (ROUNDS + 1), ROUNDS)
        second = slope_stage(first.rule, clip, slope)
        third = _intercepts(second.rule, persons, share / (ROUNDS + 1), 1, PRIOR_AFTER_SLOPE)
        added: tuple[Stage, ...] = first, second, third
    else:
        added = (_intercepts(last, persons, share, ROUNDS),)
    stages = (*(stage.with_part(1 - share - slope) for stage in method.stages), *added)
    registered = None if method.by_hand else (stages, method.proves)
    return method._replace(stages=stages, registered=registered)


def added_rounds(share: float, slope: float | None) -> int:
    """Rounds that `calibrated` adds."""
    return (ROUNDS + 2 if slope else ROUNDS) if share else 0


def _intercepts(last: Rule, persons: bool, share: float, rounds: int, prior: float = PRIOR) -> Stage:
    """Shift intercepts until the mean predictions are the observed shares. last: the rule of the stage before."""

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Tensor:
        return ask.calibration(broadcast.extras, differences=persons)

    clip = PERSON_CLIP if persons else math.sqrt(2)
    query = Query(Kind.CALIBRATION, clip, share=share, psd=not persons)
    return Stage(Local(compute), shift_intercepts(last, persons, prior), (query,), rounds)
