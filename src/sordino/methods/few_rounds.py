"""The stages of `auto` in a run of few rounds: A and a gradient are released together, in the first round.

At record level these are two noised queries (three with the life table of a survival model), each with its part of the
budget. At client level a client sends one vector: its gradient in units of `clip` and its A in units of its bound, each
times the root of its part, and clipped as a whole to norm 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Kind, Local, Query, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedgd import gradient
from sordino.rules import kalman
from sordino.rules.first_round import (
    EMPTY_ANSWERS,
    EMPTY_SURVIVAL_ANSWERS,
    FirstAnswers,
    SurvivalAnswers,
    first_step,
    first_survival_step,
)
from sordino.rules.life_table import first_hazard

SHARE, SHARE_OF_ONE_ROUND = 0.1, 0.15  # of mu squared, for A; of survival, as much again for the life table


def covariance_share(rounds: int) -> float:
    """The part of mu squared for A in a run of few rounds that has no life table."""
    return SHARE_OF_ONE_ROUND if rounds == 1 else SHARE


class Steps(NamedTuple):
    """Options of Kalman's steps; `few_round_stages` says what they are."""

    clip: float
    most: float
    prior: float
    doubt: float


class Release(NamedTuple):
    """How a gradient and A are released together.

    Attributes:
        local: The clients' rule.
        queries: What it asks.
        units: Of the gradient and of A, if a client sends both as one vector in these units.
    """

    local: Local
    queries: tuple[Query, ...]
    units: tuple[float, float] | None = None


def few_round_stages(
    unit: Unit, rounds: int, intervals: int, *, clip: float, most: float, prior: float, doubt: float
) -> tuple[Stage, ...]:
    """One round of A and a gradient, then rounds of gradients.

    Args:
        unit: Whose data are protected, one record or one whole client.
        rounds: Of all stages.
        intervals: Of survival, the number of public intervals; else 0.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        most: Bound on |u|^2.
        prior: Standard deviation of a logit before training.
        doubt: Doubt about the curvature.

    Returns:
        One stage, or two.

    Raises:
        SordinoError: Survival is asked for at client level.
    """
    share = covariance_share(rounds)
    spent = 2 * SHARE if intervals else share
    own, steps = (1 - spent) / rounds, Steps(clip, most, prior, doubt)
    later: tuple[Query, ...] = (Query(Kind.GRADIENT, clip),)
    if unit is Unit.CLIENT:
        if intervals:
            raise SordinoError("few_rounds: a survival model at client level needs six rounds or more.")
        later = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, clip))
    if intervals:
        stage = _survival_stage(own, intervals, steps)
    else:
        local, queries, units = gradient_and_gram(unit, clip, most, own, share)
        rule = first_step(part=1 / rounds, units=units, **steps._asdict())
        stage = Stage(local, rule, queries, rounds=1)
    if rounds == 1:
        return (stage,)
    return stage, Stage(Local(gradient), kalman(part=None, **steps._asdict()), later)


def gradient_and_gram(unit: Unit, clip: float, most: float, own: float, share: float) -> Release:
    """A gradient and A, released together.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, and its unit in a client's message.
        most: The same for u u^T.
        own: The gradient's part of mu squared.
        share: Part of mu squared for A. A client's one message has both parts.

    Returns:
        The clients' rule and what it asks.
    """
    if unit is not Unit.CLIENT:
        queries = Query(Kind.GRADIENT, clip, share=own), Query(Kind.GRAM, most, share=share, psd=True)
        return Release(Local(_ask_both, message=EMPTY_ANSWERS), queries)
    part = own / (own + share)
    units = clip / math.sqrt(part), most / math.sqrt(1 - part)

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return torch.cat([ask.gradient(broadcast.theta) / units[0], ask.gram().flatten(-2) / units[1]], -1)

    inside = Query(Kind.GRADIENT, noise=None), Query(Kind.GRAM, noise=None)
    return Release(Local(compute), (*inside, Query(Kind.DELTA, 1.0, share=own + share)), units)


def _ask_both(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> FirstAnswers:
    return FirstAnswers(ask.gradient(broadcast.theta), ask.gram())


def _survival_stage(own: float, intervals: int, steps: Steps) -> Stage:
    """own: the gradient's part of mu squared."""

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> SurvivalAnswers:
        return SurvivalAnswers(ask.tally(broadcast.theta), ask.gradient(broadcast.theta), ask.gram())

    _, queries, _ = gradient_and_gram(Unit.RECORD, steps.clip, steps.most, own, SHARE)
    table = Query(Kind.TALLY, 1.0, share=SHARE, psd=True)
    rule = first_survival_step(intervals=intervals, first=first_hazard(intervals), **steps._asdict())
    return Stage(Local(compute, message=EMPTY_SURVIVAL_ANSWERS), rule, (table, *queries), rounds=1)
