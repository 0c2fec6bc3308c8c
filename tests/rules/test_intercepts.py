"""Shifts of intercepts: estimates from noised shares, their stated variances, and what two rounds reach together."""

import math

import numpy as np
import pytest
import torch

from sordino.methods import build
from sordino.methods.calibration import ROUNDS, calibrated
from sordino.rules import intercepts
from sordino.rules.intercepts import CalibrationState, estimated

LABELS, PREDICTED, NOISE, DRAWS = torch.tensor([0.9, 0.1]), torch.tensor([0.94, 0.06]), 0.005, 4000


def released(predicted, std, persons, seed, records=1.0):
    """Releases of many runs: shares of two classes, per person with so many records each."""
    parts = (LABELS - predicted, predicted / 2) if persons else (LABELS.expand_as(predicted), predicted)
    exact = records * torch.cat(parts, -1).double()
    return exact + std * torch.from_numpy(np.random.default_rng(seed).normal(size=(DRAWS, 4)))


@pytest.mark.parametrize(("persons", "records"), [(False, 1.0), (True, 1.0), (True, 1.7)])
def test_estimated_shares_are_right_and_their_variances_are_as_stated(persons, records):
    found = estimated(released(PREDICTED.expand(DRAWS, 2), NOISE, persons, 0, records), torch.tensor(NOISE), persons)
    five = 5 / math.sqrt(DRAWS)  # standard errors
    for values, truth, variance in (
        (found.predicted, PREDICTED, found.predicted_variance),
        (found.difference, LABELS - PREDICTED, found.difference_variance),
    ):
        stated = float(variance.mean())
        assert (values.mean(0) - truth).abs().max() < five * math.sqrt(stated) + 0.01 * NOISE
        assert (0.75 if persons else 1 - 1.5 * five) < float(values[:, 1].var()) / stated < 1 + 1.5 * five
    both = torch.cov(torch.stack([found.predicted[:, 1], found.difference[:, 1]]))[0, 1]
    assert float(both) == pytest.approx(float(found.covariance.mean()), abs=five * NOISE**2 * 3)


def relative_error(persons, monkeypatch=None, **changed):
    """Root mean square of predicted over observed minus 1, after both rounds, over the noise that one round would have.

    All log-odds are normal with standard deviation 1; before, predictions are half of what is observed.
    """
    for name, value in changed.items():
        monkeypatch.setattr(intercepts, name, value)
    unit = "person" if persons else "record"
    stage = calibrated(build("dp-fedgd", unit), 0.1).stages[-1]
    odds = torch.linspace(-3, 3, 61).double()
    weights = torch.exp(-odds.square() / 2) / torch.exp(-odds.square() / 2).sum()

    def mean_risk(theta):
        risk = (torch.sigmoid(odds - 3.25 + (theta[:, 1] - theta[:, 0]).unsqueeze(-1)) * weights).sum(-1)
        return torch.stack([1 - risk, risk], -1)

    theta = torch.zeros(DRAWS, 2, dtype=torch.float64)
    state = CalibrationState(theta, 0 * theta, 0 * theta, 0 * theta, torch.tensor(NOISE).double())
    for t in range(ROUNDS):
        step, state = stage.rule.update(released(mean_risk(theta), NOISE, persons, t), state, theta, t)
        theta = theta + step
    error = mean_risk(theta)[:, 1] / LABELS[1] - 1
    least = NOISE * (math.sqrt(0.5) if persons else 1.0) / math.sqrt(ROUNDS) / float(LABELS[1])
    return float(error.square().mean().sqrt()) / least


@pytest.mark.parametrize("persons", [False, True])
def test_both_rounds_together_have_little_more_noise_than_their_whole_budget_allows(persons, monkeypatch):
    honest = relative_error(persons)
    assert honest < (1.6 if persons else 1.4)

    def last_alone(found, before):
        return found.predicted, found.difference, found.difference_variance

    assert relative_error(persons, monkeypatch, _with_last_round=last_alone) > 1.05 * honest


def test_noise_that_hides_the_shares_leaves_intercepts_nearly_as_they_were():
    stage = calibrated(build("dp-fedgd"), 0.1).stages[-1]
    theta = torch.zeros(DRAWS, 2, dtype=torch.float64)
    state = CalibrationState(theta, theta, theta, theta, torch.tensor(3.0).double())
    for t in range(ROUNDS):
        step, state = stage.rule.update(released(PREDICTED.expand(DRAWS, 2), 3.0, False, t), state, theta, t)
        theta = theta + step
    assert float((theta[:, 1] - theta[:, 0]).square().mean().sqrt()) < 0.5
