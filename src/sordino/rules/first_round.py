"""A model after one round, for runs of fewer rounds than `auto` has otherwise: A and a gradient are released together.

The gradient at the first theta does not depend on A, so nothing is lost by releasing both in one round; A then says how
far to step, as carefully as is expected to be best (`caution`). For least squares this is regression from noised
sufficient statistics. For classes it is the same on indicators of the classes, and where noise hides A it is noisy
class means. Later rounds take `kalman` steps.

A survival model needs its life table too, and all three are released at its first constants, which are public. At the
constants of the table the gradient of the constants is about 0. If features and time at risk are independent, moving
there subtracts from the gradient of the weights the mean of the features times the sum of the constants' gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.lazy import Tensor, torch
from sordino.rules.caution import CAUTIONS, expected_loss, noised_eigenvalues
from sordino.rules.estimates import (
    Setting,
    along,
    matrix_of,
    noise_variance,
    setting_of,
    spectrum,
    std_of,
    unmeasured,
)
from sordino.rules.kalman import KalmanState, SurvivalSetting, begun, growth_of, kalman, noise_over_signal
from sordino.rules.life_table import CurvatureState, LifeTableState, estimate_hazard_curvature, release_life_table


class FirstAnswers(NamedTuple):
    """What a client sends."""

    gradient: Tensor
    gram: Tensor


class SurvivalAnswers(NamedTuple):
    """What a client sends where a survival model is trained."""

    cells: Tensor
    gradient: Tensor
    gram: Tensor


EMPTY_ANSWERS = FirstAnswers((), ())  # type: ignore[arg-type]
EMPTY_SURVIVAL_ANSWERS = SurvivalAnswers((), (), ())  # type: ignore[arg-type]


def unpacked(answers: FirstAnswers | Tensor, theta: Tensor, units: tuple[float, float] | None) -> FirstAnswers:
    """The gradient, and A as a square matrix.

    Args:
        answers: The mean of what clients sent.
        theta: Parameters, whose leading axes the result has.
        units: Of the gradient and of A, if a client sends both as one vector in these units.

    Returns:
        Both answers.
    """
    if isinstance(answers, Tensor):
        assert units is not None
        size = theta.shape[-1]
        answers = FirstAnswers(units[0] * answers[..., :size], units[1] * answers[..., size:])
    rows = math.isqrt(answers.gram[(0,) * (theta.dim() - 1)].numel())
    return answers._replace(gram=answers.gram.reshape(*theta.shape[:-1], rows, rows))


def first_step(
    *, clip: float, most: float, prior: float, doubt: float, part: float, units: tuple[float, float] | None = None
) -> Rule:
    """The first of Kalman's steps, from A and a gradient of the same round.

    Args:
        clip: Clip of a record's gradient.
        most: Bound on |u|^2.
        prior: Standard deviation of a logit before training.
        doubt: Uncertainty of the curvature.
        part: This gradient's part of the budget of all gradients.
        units: Of the gradient and of A, if a client sends both as one vector in these units.

    Returns:
        The rule.
    """
    steps = kalman(clip=clip, most=most, prior=prior, doubt=doubt, part=part)
    gradient_unit, gram_unit = units or (1.0, 1.0)

    def init(theta: Tensor, facts: Facts, before: Tree) -> KalmanState:
        rows, _ = matrix_of(facts)
        std = std_of(theta, facts, 0 if units else 1) * gram_unit
        variance = noise_variance(theta, facts, unit=gradient_unit)
        setting = setting_of(theta, facts, clip, std, variance * part)
        # Of rates nothing is careful: later steps correct the first.
        setting = setting if facts.rates else setting._replace(careful=torch.ones_like(setting.careful))
        one = theta.new_ones(1)
        growth = growth_of(theta, facts)
        state = KalmanState(one, one, one, variance, *growth, 0 * one, one[:0], secant=unmeasured(theta, facts))
        value, V = spectrum(theta.new_zeros(*theta.shape[:-1], rows, rows), std, most)  # if no client takes part
        return begun(state, value, V, setting, clip=clip, prior=prior)._replace(setting=setting)

    def update(answers: FirstAnswers | Tensor, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        setting = state.setting
        assert isinstance(setting, Setting)
        gradient, A = unpacked(answers, theta, units)
        value, V = spectrum(A, setting.covariance_std, most)

        def start(careful: Tensor) -> KalmanState:
            return begun(state, value, V, setting._replace(careful=careful), clip=clip, prior=prior)

        scale = start(0 * setting.careful).curvature / value
        noised, G = noised_eigenvalues(A, V), along(V, gradient)
        best, least = setting.careful, torch.full_like(noised[..., :1], math.inf)
        for caution in CAUTIONS:
            tried = start(caution * setting.careful)
            h = tried.curvature
            damped = h * (1 + noise_over_signal(h, tried.variance, tried.noise))
            K = 1 / (damped + tried.ridge if isinstance(tried.ridge, Tensor) else damped)
            loss = expected_loss(K, noised, G, scale, setting.covariance_std, tried.noise).unsqueeze(-1)
            best = torch.where(loss < least, caution * setting.careful, best)
            least = least.minimum(loss)
        return steps.update(gradient, start(best), theta, t)

    return Rule(init, update)


def first_survival_step(*, intervals: int, first: float, clip: float, most: float, prior: float, doubt: float) -> Rule:
    """The constants of a noised life table, and the first of Kalman's steps, from answers of one round.

    Args:
        intervals: Number of public intervals.
        first: The hazard before any data.
        clip: Clip of a record's gradient.
        most: Bound on |u|^2.
        prior: Standard deviation of a logit before training.
        doubt: Uncertainty of the curvature.

    Returns:
        The rule.
    """
    life_table = release_life_table(intervals, first)
    curvature = estimate_hazard_curvature(clip, most, prior)
    steps = kalman(clip=clip, most=most, prior=prior, doubt=doubt)

    def init(theta: Tensor, facts: Facts, before: Tree) -> KalmanState:
        table, std = life_table.init(theta, facts, ()), std_of(theta, facts, 2)
        state: KalmanState = curvature.init(theta, replace(facts, aggregate_std=std), table).kalman
        setting = SurvivalSetting(table.std, std)
        return state._replace(noise=noise_variance(theta, facts, 1), setting=setting)

    def update(answers: SurvivalAnswers, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        setting = state.setting
        assert isinstance(setting, SurvivalSetting)
        table = LifeTableState(answers.cells, setting.cells_std, torch.ones_like(theta[..., -intervals:]))
        to_table, table = life_table.update(answers.cells, table, theta, t)
        known = CurvatureState(table, state._replace(noise=setting.covariance_std))
        shift, (_, after) = curvature.update(answers.gram, known, theta + to_table, t)
        after = after._replace(noise=state.noise, setting=setting)
        weights, constants = answers.gradient[..., :-intervals], answers.gradient[..., -intervals:]
        weights = weights - after.baseline.mean * constants.sum(-1, keepdim=True)
        moved = torch.cat([weights, torch.zeros_like(constants)], -1)
        step, after = steps.update(moved, after, theta + to_table + shift, t)
        return to_table + shift + step, after

    return Rule(init, update, model=steps.model)
