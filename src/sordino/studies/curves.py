"""Curves of one model on test records: predicted against observed, ROC, and survival, with 95 % intervals.

The intervals tell what the number of test records leaves open, not what noise did. Test records lie outside the
guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sordino.training import survival
from sordino.training.metrics import BINS, Task

SIGMAS = 1.959963984540054  # of a normal distribution, for 95 %
MOST_POINTS = 60  # of a ROC curve
Curve = list[list[float]]


def of_model(task: Task, y: np.ndarray, predicted: np.ndarray, edges: Sequence[float] = ()) -> dict[str, Any]:
    """The curves that a task has, by name; each is a list of points. Arguments as of `metrics.score`.

    - `calibration` (two classes, quantities, counts): predicted, observed, and the interval of the observed.
    - `roc` (two classes): one minus specificity, sensitivity.
    - `survival`: time, mean predicted survival, that of Kaplan and Meier, and its interval.
    """
    y, predicted = np.asarray(y), np.asarray(predicted, np.float64)
    if not len(y) or np.isnan(predicted).any():
        return {}
    if task is Task.TWO_CLASSES:
        p = np.exp(-np.logaddexp(0.0, -predicted))
        return {"calibration": calibration(y == 1, p, shares=True), "roc": roc(y, predicted)}
    if task in (Task.QUANTITIES, Task.COUNTS):
        return {"calibration": calibration(y, predicted)}
    return {"survival": survival_points(y, predicted, edges)} if task is Task.SURVIVAL else {}


def calibration(y: np.ndarray, predicted: np.ndarray, *, shares: bool = False) -> Curve:
    """Mean predicted and mean observed in ten groups of records, by deciles of the prediction, with an interval.

    The interval of a share is Wilson's; of other means it is that of Student's normal approximation.

    >>> calibration(np.array([0, 1, 1, 1]), np.array([0.5, 0.5, 0.5, 0.5]), shares=True)
    [[0.5, 0.75, 0.3006, 0.9544]]
    """
    group = np.searchsorted(np.percentile(predicted, np.linspace(0, 100, BINS + 1))[1:-1], predicted)
    points = []
    for k in np.unique(group):
        seen, guess = y[group == k].astype(np.float64), predicted[group == k]
        low, high = wilson(float(seen.mean()), len(seen)) if shares else _around(seen)
        points.append(_short(float(guess.mean()), float(seen.mean()), low, high))
    return points


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share among `count` records.

    >>> tuple(round(end, 3) for end in wilson(0.0, 10))
    (0.0, 0.278)
    """
    z = SIGMAS**2 / count
    centre = (share + z / 2) / (1 + z)
    half = SIGMAS / (1 + z) * math.sqrt(share * (1 - share) / count + z / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _around(values: np.ndarray) -> tuple[float, float]:
    mean = float(values.mean())
    half = SIGMAS * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half


def roc(y: np.ndarray, z: np.ndarray) -> Curve:
    """One minus specificity, and sensitivity, at falling thresholds; empty with one class only.

    >>> roc(np.array([0, 1, 0, 1]), np.array([0.1, 0.2, 0.3, 0.4]))
    [[0.0, 0.0], [0.0, 0.5], [0.5, 0.5], [0.5, 1.0], [1.0, 1.0]]
    """
    positive = y == 1
    if positive.all() or not positive.any():
        return []
    order = np.argsort(-z, kind="stable")
    last = np.flatnonzero(np.append(np.diff(z[order]) != 0, True))  # of equal scores
    right, wrong = (np.append(0, np.cumsum(each[order])[last]) / each.sum() for each in (positive, ~positive))
    way = right + wrong  # from 0 to 2 along the curve
    kept = np.unique(np.searchsorted(way, np.linspace(0, 2, MOST_POINTS), side="left").clip(max=len(way) - 1))
    kept = np.arange(len(way)) if len(way) <= MOST_POINTS else kept
    return [_short(float(wrong[k]), float(right[k])) for k in kept]


def survival_points(y: np.ndarray, logits: np.ndarray, edges: Sequence[float]) -> Curve:
    """At time 0 and at each edge: mean predicted and Kaplan-Meier survival, with Greenwood's interval of the latter."""
    time, event = np.abs(y).astype(np.float64), y > 0
    predicted = survival.survival_of(logits).mean(0)
    observed = survival.constant_survival(y, edges)
    points = [[0.0, 1.0, 1.0, 1.0, 1.0]]
    times, place = np.unique(time, return_inverse=True)
    leaving = np.bincount(place, minlength=len(times)).astype(np.float64)
    events = np.bincount(place, weights=event, minlength=len(times))
    at_risk = leaving[::-1].cumsum()[::-1]
    with np.errstate(divide="ignore"):
        terms = np.cumsum(np.where(events > 0, events / (at_risk * (at_risk - events)), 0.0))
    for k, edge in enumerate(edges):
        before = np.searchsorted(times, edge * (1 - 1e-12), side="right")
        variance = float(terms[before - 1]) if before else 0.0
        half = SIGMAS * float(observed[k]) * math.sqrt(variance) if math.isfinite(variance) else 1.0
        low, high = max(0.0, float(observed[k]) - half), min(1.0, float(observed[k]) + half)
        points.append(_short(float(edge), float(predicted[k]), float(observed[k]), low, high))
    return points


def _short(*numbers: float) -> list[float]:
    return [float(f"{number:.4g}") for number in numbers]
