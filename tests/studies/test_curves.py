"""Curves on test records, beside closed forms and their definitions."""

import math

import numpy as np
import pytest

from sordino.studies import curves
from sordino.training.metrics import Task, auc


def two_classes(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n)
    return (rng.random(n) < 1 / (1 + np.exp(-z))).astype(int), z


def test_a_calibrated_model_lies_on_the_diagonal():
    found = curves.of_model(Task.TWO_CLASSES, *two_classes())
    predicted, observed, low, high = np.array(found["calibration"]).T
    assert len(predicted) == 10
    assert (np.diff(predicted) > 0).all()
    assert ((low < observed) & (observed < high)).all()
    assert ((low <= predicted) & (predicted <= high)).mean() >= 0.8
    y, z = two_classes()
    high = np.array(curves.of_model(Task.TWO_CLASSES, y, z - 1)["calibration"])[:, 3]
    assert (np.array(curves.of_model(Task.TWO_CLASSES, y, z + 2)["calibration"])[:, 0] > high).sum() >= 7


def test_intervals_of_shares_cover():
    rng = np.random.default_rng(0)
    ends = [curves.wilson(hits / 40, 40) for hits in rng.binomial(40, 0.1, 2000)]
    assert np.mean([low <= 0.1 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.03)
    assert curves.wilson(1.0, 5)[1] == 1.0


def test_numbers_have_intervals_of_means():
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0, 10, 5000)
    points = np.array(curves.of_model(Task.QUANTITIES, predicted + rng.normal(0, 1, 5000), predicted)["calibration"])
    assert np.allclose(points[:, 3] - points[:, 2], 2 * 1.96 / math.sqrt(500), rtol=0.1)
    assert np.allclose(points[:, 0], points[:, 1], atol=0.15)
    assert curves.calibration(np.array([3.0]), np.array([2.0])) == [[2.0, 3.0, 3.0, 3.0]]


def test_the_area_under_the_roc_is_the_auc():
    y, z = two_classes()
    x, sensitivity = np.array(curves.roc(y, z)).T
    assert len(x) <= curves.MOST_POINTS
    assert (x[0], sensitivity[0], x[-1], sensitivity[-1]) == (0, 0, 1, 1)
    assert (np.diff(x) >= 0).all()
    assert (np.diff(sensitivity) >= 0).all()
    assert np.trapezoid(sensitivity, x) == pytest.approx(auc(y, z), abs=2e-3)
    ties = np.round(z)
    x, sensitivity = np.array(curves.roc(y, ties)).T
    assert np.trapezoid(sensitivity, x) == pytest.approx(auc(y, ties), abs=1e-3)
    assert curves.roc(np.ones(4), z[:4]) == []


def test_survival_has_greenwoods_interval():
    time = np.arange(1.0, 101)  # nobody is censored: the share is a plain share, and its variance is binomial
    logits = np.full((100, 2), -1.0)
    points = curves.of_model(Task.SURVIVAL, time, logits, [20.5, 60.5])["survival"]
    assert points[0] == [0, 1, 1, 1, 1]
    for (edge, predicted, observed, low, high), left in zip(points[1:], (0.8, 0.4), strict=True):
        assert observed == pytest.approx(left)
        assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(left * (1 - left) / 100), rel=1e-3), edge
        assert 0 < predicted < 1
    dead = curves.survival_points(np.array([1.0, 2.0]), np.zeros((2, 1)), [3.0])
    assert dead[-1][2:] == [0.0, 0.0, 1.0] or dead[-1][2] == 0.0


def test_what_has_no_curve_has_none():
    assert curves.of_model(Task.MANY_CLASSES, np.array([0, 2]), np.zeros((2, 3))) == {}
    assert curves.of_model(Task.TWO_CLASSES, np.array([], int), np.array([])) == {}
    assert curves.of_model(Task.QUANTITIES, np.ones(2), np.array([1.0, np.nan])) == {}
