"""Kalman's steps, where the curvature is not what it was at zero, and with a ridge. In `auto`: methods/test_auto.py."""

import importlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.engines.oracle import centred_records
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Noiseless
from sordino.rules import estimate_covariance, kalman
from sordino.rules.estimates import TRAINED_LOGIT
from sordino.rules.kalman import weights_of
from tests.support import plan_for

KALMAN = importlib.import_module("sordino.rules.kalman")  # the name also means the rule
ROWS, OUTPUTS = 4, 3


def learning(noise, true, rounds=12, scale=1.0, records=10**9, **changes):
    """`kalman` on a quadratic of curvature true h, from a state with exact A, which weights of classes scale."""
    rule = kalman(clip=1e6, most=1e6, prior=1.0, doubt=10.0)
    theta = torch.zeros(ROWS * OUTPUTS, dtype=torch.float64)
    facts = Facts(1, np.array([records]), rounds, 1.0, noise, ((ROWS, OUTPUTS),), **changes)
    A = scale * torch.diag(torch.tensor([0.1, 0.3, 1.0, 4.0], dtype=torch.float64))
    first = estimate_covariance(1e6)
    _, before = first.update(A, first.init(theta, replace(facts, aggregate_std=0.0), ()), theta, 0)
    state, wanted = rule.init(theta, facts, before), torch.ones_like(theta)
    V, h = state.vectors, state.curvature
    distance = []
    for t in range(rounds):
        g = true * (V @ (h.unsqueeze(-1) * (V.T @ (theta - wanted).view(ROWS, OUTPUTS)))).flatten()
        step, state = rule.update(g, state, theta, t)
        theta = theta + step
        distance.append(float((theta - wanted).norm()))
    return distance


def test_steps_do_not_oscillate_where_the_curvature_is_larger_than_it_was_at_zero():
    assert learning(0.0, 5.0)[-1] < 1e-3
    assert learning(0.0, 5.0, same_records=False)[-1] > 1e3  # the mutant: nothing is measured
    assert learning(0.0, 1.0)[0] < 1e-6  # Newton's step stays what it is


def test_under_much_noise_nothing_changes(monkeypatch):
    monkeypatch.setattr(KALMAN, "TRAINED", 1.0)
    assert learning(10.0, 5.0) == pytest.approx(learning(10.0, 5.0, same_records=False), rel=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2])
def test_records_of_weight_w_are_w_records(noise):
    """One weight for all classes scales A, gradients and noise; neither steps nor the ridge may change."""
    plain = learning(noise, 3.0, records=200)
    weighted = learning(noise / 50, 3.0, scale=1 / 50, mean_weight=1 / 50, records=200 * 50)
    assert weighted == pytest.approx(plain, rel=1e-6)
    unaware = learning(noise / 50, 3.0, scale=1 / 50, records=200 * 50)  # the mutant: weights are not known
    assert unaware != pytest.approx(plain, rel=1e-3)


def test_without_noise_training_ends_at_the_optimum_of_the_ridge_loss():
    """Few records, which a model without the ridge fits better and better."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 6))
    x, model = 10 * x / np.linalg.norm(x, axis=1, keepdims=True), Linear(6, 4)
    records = Records.of(x, rng.integers(0, 4, 60), np.zeros(60, int), dtype=torch.float64)
    plan = plan_for("auto", records, 200, epsilon=math.inf, clip=1e6)
    last = list(simulate.run(plan, model, records, Noiseless(0)))[-1]
    centre = last.checkpoint.state.centre
    theta = centre.parameters(last.model)
    shard = centred_records(records.fused(np.arange(1), np.ones(1)), centre)
    g = model.clipped_sum(theta, shard, math.inf) / 60
    weights = weights_of(theta, torch.eye(7))
    ridge = 101 / (TRAINED_LOGIT**2 * 60)
    assert float((g + ridge * weights).norm()) < 1e-5  # A is enforced 2^-14 below its bound
    assert float(g.norm()) > 1e-2  # the mutant: no ridge
    assert not weights[-4:].any()  # intercepts are free
