"""How sure risks are: the clip, the noise and few records each make them too sure, by amounts that are known."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from sordino.core import Centre, Facts
from sordino.rules.confidence import Spread, factor_and_shift, moved, settled, tempered, unclipped, unspread
from sordino.rules.kalman import has_risks
from sordino.training.metrics import calibration_slope

ONE = torch.ones(1, dtype=torch.float64)


def spread(features=4, *, value=1.0, noise=0.0, way=1.0, residual=1.0, records=1e9, std=0.0):
    each = value * torch.ones(features, dtype=torch.float64)
    return Spread(each, each, std * ONE, noise * each, way * torch.ones_like(each), residual * ONE, records * ONE, ONE)


def clipped_solution(z, y, bound):
    """Slope and intercept at which the mean clipped gradient of a logistic model is zero."""
    w, b = 1.0, 0.0
    for _ in range(4000):
        r = np.clip(1 / (1 + np.exp(-(w * z + b))) - y, -bound, bound)
        slopes = (r * z).mean(), r.mean()
        w, b = w - 2 * slopes[0], b - 2 * slopes[1]
        if max(map(abs, slopes)) < 1e-9:
            return w, b
    raise AssertionError("no solution was found")


@pytest.mark.parametrize("bound", [0.35, 0.5])
@pytest.mark.parametrize("rare", [0.0, -1.5])
def test_what_a_clip_does_to_the_slope_is_undone(bound, rare):
    rng = np.random.default_rng(0)
    z = rng.normal(0, 1.5, 40_000)
    y = (rng.random(40_000) < 1 / (1 + np.exp(-(z + rare)))).astype(float)
    w, b = clipped_solution(z, y, bound)
    slope, _ = unclipped(ONE * (1.5 * w) ** 2, ONE * b, ONE * bound)
    wanted = calibration_slope(y, w * z + b)
    assert wanted < 0.9, "the clip makes risks too sure"
    assert float(slope) == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize("rare", [-1.5, -3.0])
def test_what_a_clip_does_to_the_mean_risk_is_undone(rare):
    """Records of the rare class are clipped more often, so that their risks are too small on average."""
    rng = np.random.default_rng(0)
    z = rng.normal(0, 1.5, 40_000)
    y = (rng.random(40_000) < 1 / (1 + np.exp(-(z + rare)))).astype(float)
    w, b = clipped_solution(z, y, 0.35)
    factor, shift = factor_and_shift(ONE * w * 1.5, ONE * b, spread(1, residual=0.35))
    before, after = (np.mean(1 / (1 + np.exp(-each))) for each in (w * z + b, float(factor) * w * z + b + float(shift)))
    assert before < 0.92 * y.mean()
    assert after == pytest.approx(y.mean(), rel=0.03)


def test_without_a_clip_nothing_is_undone():
    slope, per_record = unclipped(2 * ONE, 0.3 * ONE, ONE)
    assert float(slope) == pytest.approx(1, abs=1e-6)
    assert 4 < float(per_record) < 10, "1 / (p (1 - p)), averaged"


def test_without_a_clip_a_factor_keeps_the_mean_risk():
    varied, intercept, factor = 3 * ONE, -2 * ONE, 0.4 * ONE
    shift = settled(varied, intercept, factor, ONE) - intercept
    t = np.random.default_rng(0).normal(0, math.sqrt(3), 400_000)

    def mean(by, extra):
        return float((1 / (1 + np.exp(2 - extra - by * t))).mean())

    exact = brentq(lambda extra: mean(0.4, extra) - mean(1, 0), -3, 3)
    assert float(shift) == pytest.approx(exact, abs=0.01)
    assert float(settled(varied, intercept, ONE, ONE)) == pytest.approx(-2, abs=1e-9)


def test_noise_and_few_records_leave_less_of_the_weights():
    d, b = torch.full((4,), 1.0, dtype=torch.float64), 0 * ONE
    (alone, _), (noisy, _) = factor_and_shift(d, b, spread()), factor_and_shift(d, b, spread(noise=0.2))
    few, _ = factor_and_shift(d, b, spread(records=20))
    assert float(alone) == pytest.approx(1, abs=1e-3)
    assert float(noisy) == pytest.approx(1 - 2 * 0.2, abs=1e-3), "the noise of two classes"
    assert float(few) < 0.9
    half, _ = factor_and_shift(d, b, spread(way=0.5))
    assert float(half) == 1, "risks are never made more sure"


def test_the_noise_of_the_steps_adds_up():
    """As for independent noise in every step of gradient descent on a parabola."""
    rng, h, K, std, runs = np.random.default_rng(0), 0.5, 0.3, 2.0, 20_000
    weight, state = np.zeros(runs), spread(1, way=0.0)
    for _ in range(6):
        weight -= K * (h * weight + rng.normal(0, std, runs))
        gain = torch.tensor([K, K], dtype=torch.float64)
        state = moved(state, gain, gain * h / K, torch.tensor([std**2], dtype=torch.float64))
    assert float(state.noise[0]) == pytest.approx(weight.var(), rel=0.05)
    assert float(state.way[0]) == pytest.approx(1 - (1 - K * h) ** 6)


def test_the_order_of_predictions_stays():
    rng = np.random.default_rng(1)
    theta = torch.from_numpy(rng.normal(size=10))
    centre = Centre(torch.from_numpy(rng.normal(size=4)), 1.3 * ONE)
    V = torch.eye(5, dtype=torch.float64)
    after = tempered(theta, V, spread(noise=0.1, residual=0.4), centre)
    x = torch.from_numpy(rng.normal(size=(50, 4)))

    def log_odds(parameters):
        weight = parameters[:8].reshape(4, 2)
        return x @ (weight[:, 1] - weight[:, 0]) + parameters[9] - parameters[8]

    before, z = log_odds(theta), log_odds(after)
    assert torch.equal(before.argsort(), z.argsort())
    assert float(z.std()) < float(before.std())


def test_only_two_classes_without_weights_have_risks():
    sizes = np.array([10])

    def facts(columns, **more):
        return Facts(1, sizes, 5, 1.0, 1.0, shapes=((5, columns),), **more)

    assert has_risks(facts(2))
    assert not has_risks(facts(3))
    assert not has_risks(facts(2, mean_weight=0.5))


def test_a_person_with_several_records_is_clipped_less_per_record():
    value = torch.ones(5, dtype=torch.float64)
    one = unspread(value, spread(), 1.0, 100)
    three = unspread(value, spread()._replace(weight=3 * ONE), 1.0, 100)
    assert float(three.residual) == pytest.approx(math.sqrt(3) * float(one.residual))
