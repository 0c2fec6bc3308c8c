"""Metrics of predictions, computed in float64.

Two classes are scored by the log-odds of the second class: a probability of exactly 0 or 1 has lost them, and its log
loss with them. A metric that the records do not define (the AUC of one class only, the slope of separated classes) or
that is not finite (predictions that are NaN) is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from sordino.errors import SordinoError, nearest
from sordino.training import survival

BINS = 10  # of a calibration curve
MARGIN = 1e-9  # relative; above the rounding error of a mean in float64
MOST_STEPS = 100  # of Newton's method
Metrics = dict[str, float | None]


class Task(StrEnum):
    """What the labels are."""

    TWO_CLASSES = "two classes"
    MANY_CLASSES = "many classes"
    QUANTITIES = "quantities"
    COUNTS = "counts"
    SURVIVAL = "survival times"
    SEQUENCES = "sequences of tokens"


OF_A_ROUND: Mapping[Task, tuple[str, ...]] = {
    Task.TWO_CLASSES: ("accuracy", "auc", "log_loss", "brier"),
    Task.MANY_CLASSES: ("accuracy", "balanced_accuracy", "log_loss"),
    Task.QUANTITIES: ("mse", "r2"),
    Task.COUNTS: ("deviance", "d2", "mae"),
    Task.SURVIVAL: ("concordance", "brier"),
    Task.SEQUENCES: ("perplexity",),
}
RANKING: Mapping[Task, tuple[str, ...]] = {  # the first: by default
    **OF_A_ROUND,
    Task.MANY_CLASSES: ("accuracy", "balanced_accuracy", "macro_auc", "log_loss"),
    Task.QUANTITIES: ("r2", "mse", "mae"),
    Task.COUNTS: ("d2", "deviance", "mae"),
}
OF_THE_LAST_ROUND: Mapping[Task, tuple[str, ...]] = {  # an AUC per class sorts all records once per class
    **OF_A_ROUND,
    Task.MANY_CLASSES: RANKING[Task.MANY_CLASSES],
}
SHARES = frozenset(("accuracy", "balanced_accuracy"))  # written in per cent
LOWER_IS_BETTER = frozenset(("log_loss", "brier", "mse", "mae", "deviance", "perplexity"))
NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "macro_auc": "mean AUC of one class against the rest",
    "log_loss": "log loss",
    "brier": "Brier score",
    "r2": "R²",
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "deviance": "mean Poisson deviance",
    "d2": "share of deviance explained",
    "concordance": "concordance index",
    "perplexity": "perplexity",
}
TASKS = {  # by the task of a data set
    "quantity": Task.QUANTITIES,
    "count": Task.COUNTS,
    "survival": Task.SURVIVAL,
    "sequence": Task.SEQUENCES,
}


# --------------------------------------------------------------------------------------------------------- all metrics


def score(
    task: Task,
    y: np.ndarray,
    predicted: np.ndarray,
    wanted: tuple[str, ...] | None = None,
    *,
    edges: Sequence[float] = (),
) -> Metrics:
    """The metrics that fit one line: those of a round, or those that are wanted.

    Args:
      task: what the labels are.
      y: labels: class indices, quantities, counts, or signed times.
      predicted: for two classes the log-odds of the second; for many classes the logits, records by classes; for
        quantities and counts the predictions; for survival the log-odds of hazards, records by intervals; for
        sequences the loss per token and the number of tokens that count, records by two.
      wanted: names out of `RANKING[task]`.
      edges: for survival, the ends of the intervals.

    >>> score(Task.TWO_CLASSES, np.array([0, 0, 1, 1]), np.array([-2.0, 1.0, 0.5, 3.0]), ("accuracy", "auc"))
    {'accuracy': 0.75, 'auc': 0.75}
    """
    y, predicted = np.asarray(y), np.asarray(predicted, np.float64)
    rest = (edges,) if task is Task.SURVIVAL else ()
    with np.errstate(all="ignore"):
        return {name: _finite(_COMPUTE[task][name](y, predicted, *rest)) for name in wanted or OF_A_ROUND[task]}


def full(
    task: Task, y: np.ndarray, predicted: np.ndarray, threshold: float = 0.5, *, edges: Sequence[float] = ()
) -> dict[str, Any]:
    """Every metric of the task. Arguments as of `score`.

    For two classes also calibration, and what a threshold does; for many classes recall and AUC of each; for counts the
    mean predicted and observed; for survival the Brier score at each edge, and mean predicted against observed survival
    there.

    threshold: records whose probability of the second class is above it count as positive.
    """
    y, predicted = np.asarray(y), np.asarray(predicted, np.float64)
    metrics: dict[str, Any] = score(task, y, predicted, RANKING[task], edges=edges)
    if task is Task.COUNTS:
        return {**metrics, "mean_predicted": _finite(_mean(predicted)), "observed": _finite(_mean(y))}
    if task is Task.SURVIVAL:
        return {**metrics, "survival_curve": survival_curve(y, predicted, edges)}
    if task is Task.MANY_CLASSES:
        return {**metrics, "classes": per_class(y, predicted)}
    if task is not Task.TWO_CLASSES:
        return metrics
    with np.errstate(all="ignore"):
        p = _probability(predicted)
        above = predicted > math.log(threshold / (1 - threshold))
        values = {
            "mean_predicted": _mean(p),
            "observed": _mean(y == 1),
            "calibration_slope": calibration_slope(y, predicted),
            "calibration_intercept": calibration_intercept(y, predicted),
            "threshold": threshold,
            "sensitivity": _mean(above[y == 1]),
            "specificity": _mean(~above[y == 0] & ~np.isnan(predicted[y == 0])),
        }
    return {**metrics, **{k: _finite(v) for k, v in values.items()}, "calibration_curve": calibration_curve(y, p)}


def task_of_classes(classes: int) -> Task:
    """What labels of so many classes are; 0 classes are quantities."""
    return Task.QUANTITIES if not classes else Task.TWO_CLASSES if classes == 2 else Task.MANY_CLASSES


def ranking_metric(name: str | None, task: Task) -> str:
    """The metric to rank runs by: `name`, or accuracy for classes and R² for quantities.

    Raises:
      SordinoError: the metric is unknown, or these labels do not have it.

    >>> ranking_metric(None, Task.QUANTITIES)
    'r2'
    """
    known = RANKING[task]
    if name is not None and name not in known:
        if name not in NAMES:
            raise SordinoError(f"--metric: '{name}' is unknown.{nearest(name, known)}")
        raise SordinoError(f"--metric: labels that are {task} have no {name}; use one of {', '.join(known)}.")
    return name or known[0]


def goodness(name: str, value: float | None) -> float:
    """The value of a metric with its sign such that more is better. What is undefined is worst."""
    if value is None or math.isnan(value):
        return -math.inf
    return -value if name in LOWER_IS_BETTER else value


def written(name: str, value: float | None, std: float | None = None) -> str:
    """A value for people: accuracies in per cent, other metrics to four digits."""
    if value is None or math.isnan(value):
        return "not defined"
    form = ".2%" if name in SHARES else ".4g"
    return f"{value:{form}}" + ("" if std is None else f" ± {std:{form}}")


# ------------------------------------------------------------------------------------------------------ one at a time


def log_odds(p: np.ndarray) -> np.ndarray:
    """The log-odds of probabilities. 0 and 1 count as 2^-52 and 1 - 2^-52, so that their log loss is finite."""
    eps = np.finfo(np.float64).eps
    p = np.clip(np.asarray(p, np.float64), eps, 1 - eps)
    return np.asarray(np.log(p) - np.log1p(-p))


def auc(y: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs (one record of each class) that the scores put in order; ties count as one half."""
    if np.isnan(scores).any():
        return math.nan
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    positive = np.bincount(place.reshape(-1), weights=y == 1, minlength=len(count))
    negative = count - positive
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else math.nan


def per_class(y: np.ndarray, logits: np.ndarray) -> list[dict[str, Any]]:
    """For each class: the share of its records that are predicted as it (recall, sensitivity), the AUC of its
    probability against all other classes, and its records. What a class without records does not define is None.

    >>> per_class(np.array([0, 0, 2]), np.array([[2.0, 0, 0], [0, 1, 0], [0, 0, 1]]))[0]
    {'class': 0, 'recall': 0.5, 'auc': 0.75, 'records': 2}
    """
    recalls, areas = _recalls(y, logits), _areas(y, logits)
    return [
        {"class": k, "recall": _finite(recall), "auc": _finite(area), "records": int((y == k).sum())}
        for k, (recall, area) in enumerate(zip(recalls, areas, strict=True))
    ]


def entropy(y: np.ndarray) -> float:
    """The log loss of the constant prediction with the prevalence of each class among the labels."""
    counts = np.unique(y, return_counts=True)[1] / max(len(y), 1)
    return float(-(counts * np.log(counts)).sum()) + 0.0


def calibration_slope(y: np.ndarray, z: np.ndarray) -> float:
    """The slope b of the logistic regression of y on a + b z. Below 1: predictions are too extreme; above: too timid.

    NaN where it is not finite: one class only, predictions that are all equal, or classes that they separate.
    """
    ones, zeros = z[y == 1], z[y == 0]
    if not (len(ones) and len(zeros) and np.isfinite(z).all()):
        return math.nan
    if zeros.max() <= ones.min() or ones.max() <= zeros.min():
        return math.nan
    centre, scale = z.mean(), z.std()
    s = (z - centre) / scale
    a, b, value = 0.0, 0.0, math.log(2)
    for _ in range(MOST_STEPS):
        p = _probability(a + b * s)
        w, r = p * (1 - p), y - p
        gradient = np.array([r.mean(), (r * s).mean()])
        cross = (w * s).mean()
        step = np.linalg.lstsq(np.array([[w.mean(), cross], [cross, (w * s * s).mean()]]), gradient, rcond=None)[0]
        size = 1.0
        while (next_value := _log_loss_of_two(y, (a + size * step[0]) + (b + size * step[1]) * s)) > value + 1e-15:
            size /= 2
            if size < 1e-9:
                return float(b / scale)
        a, b, value = a + size * step[0], b + size * step[1], next_value
        if np.abs(step).max() < 1e-10 * max(1.0, abs(a), abs(b)):
            return float(b / scale)
    return math.nan


def calibration_intercept(y: np.ndarray, z: np.ndarray) -> float:
    """The a for which the mean of the probabilities of a + z is the observed share (calibration in the large).

    Above 0: predicted risks are too low; below 0: too high. NaN with one class only.
    """
    share = _mean(y == 1)
    if not (0 < share < 1 and np.isfinite(z).all()):
        return math.nan
    centre = math.log(share / (1 - share))
    low, high = centre - float(z.max()), centre - float(z.min())
    while high - low > 1e-13 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _mean(_probability(middle + z)) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def calibration_curve(y: np.ndarray, p: np.ndarray) -> list[dict[str, float]]:
    """Mean predicted and observed share in ten groups of records, by deciles of the prediction.

    Groups have about equally many records. Equal predictions stay together, so there may be fewer groups.
    """
    if not len(y) or np.isnan(p).any():
        return []
    edges = np.percentile(p, np.linspace(0, 100, BINS + 1))
    group = np.searchsorted(edges[1:-1], p)
    count = np.bincount(group, minlength=BINS)
    predicted = np.bincount(group, weights=p, minlength=BINS)
    observed = np.bincount(group, weights=y == 1, minlength=BINS)
    return [
        {"predicted": float(predicted[k] / n), "observed": float(observed[k] / n), "records": int(n)}
        for k, n in enumerate(count)
        if n
    ]


def survival_curve(y: np.ndarray, logits: np.ndarray, edges: Sequence[float]) -> list[dict[str, float | None]]:
    """At each edge: mean predicted survival, Kaplan-Meier survival of the records, and the Brier score."""
    if not len(y):
        return []
    with np.errstate(all="ignore"):
        share = survival.survival_of(logits)
        observed, scores = survival.constant_survival(y, edges), survival.brier_by_edge(y, share, edges)
    return [
        {
            "time": float(edge),
            "predicted": _finite(float(share[:, k].mean())),
            "observed": float(observed[k]),
            "brier": _finite(scores[k]),
        }
        for k, edge in enumerate(edges)
    ]


def deviance(y: np.ndarray, rate: np.ndarray) -> float:
    """The mean Poisson deviance: 2 (y log(y / rate) - y + rate). NaN where a rate is not above 0 and y is."""
    from scipy.special import xlogy

    y = y.astype(np.float64)
    return _mean(2 * (xlogy(y, y / np.where(y > 0, rate, 1)) - y + rate))


def _explained(y: np.ndarray, rate: np.ndarray) -> float:
    """1 less the deviance relative to that of the mean count."""
    whole = deviance(y, np.full(len(y), _mean(y)))
    return 1 - deviance(y, rate) / whole if whole > 0 else math.nan


def perplexity(loss: np.ndarray, tokens: np.ndarray) -> float:
    """exp of the mean loss per token, each token counted once. NaN where no token counts.

    Args:
      loss: nats per token of each sequence.
      tokens: how many tokens of each sequence count.
    """
    total = float(tokens.sum())
    return float(np.exp((loss * tokens).sum() / total)) if total else math.nan


def _probability(z: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return np.asarray(expit(z))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _share(right: np.ndarray) -> float:
    # Counted, then divided once: a mean in float32 differs from the share of the most common class.
    return int(right.sum()) / len(right) if len(right) else math.nan


def _log_loss_of_two(y: np.ndarray, z: np.ndarray) -> float:
    return _mean(np.logaddexp(0.0, np.where(y == 1, -z, z)))


def _log_loss_of_many(y: np.ndarray, z: np.ndarray) -> float:
    top = z.max(-1, keepdims=True)
    rest = np.log(np.exp(z - top).sum(-1))
    return _mean(rest - np.take_along_axis(z - top, y.astype(np.int64)[:, None], -1)[:, 0])


def _accuracy_of_many(y: np.ndarray, z: np.ndarray) -> float:
    return _share((z.argmax(-1) == y) & ~np.isnan(z).any(-1))


def _recalls(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    right = (z.argmax(-1) == y) & ~np.isnan(z).any(-1)
    labels = y.astype(np.int64)
    of_class = np.bincount(labels, minlength=z.shape[-1])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(labels, weights=right, minlength=z.shape[-1]) / of_class)


def _areas(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        odds = _log_odds_of_each(z)
    return np.array([auc(np.where(y == k, 1, 0), odds[:, k]) for k in range(z.shape[-1])])


def _log_odds_of_each(z: np.ndarray) -> np.ndarray:
    """The log-odds of each class's probability. They order records whose probability rounds to 1, too."""
    top = z.argmax(-1)[:, None]
    best = np.take_along_axis(z, top, -1)
    others = z.copy()
    np.put_along_axis(others, top, -np.inf, -1)
    rest = np.logaddexp.reduce(others, -1, keepdims=True)
    share = z - np.logaddexp(best, rest)  # the logarithm of the probability
    odds: np.ndarray = share - np.log1p(-np.exp(share))
    np.put_along_axis(odds, top, best - rest, -1)
    return odds


def _mean_of_defined(values: np.ndarray) -> float:
    """The mean over the classes that have records; NaN if there are none."""
    return _mean(values[~np.isnan(values)])


def _r2(y: np.ndarray, predicted: np.ndarray) -> float:
    y = y.astype(np.float64)
    spread = np.square(y - y.mean()).sum() if len(y) else 0.0
    return float(1 - np.square(y - predicted).sum() / spread) if spread > 0 else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_COMPUTE: Mapping[Task, Mapping[str, Any]] = {
    Task.TWO_CLASSES: {
        "accuracy": lambda y, z: _share(((z > 0) == (y == 1)) & ~np.isnan(z)),
        "auc": auc,
        "log_loss": _log_loss_of_two,
        "brier": lambda y, z: _mean(np.square(_probability(z) - y)),
    },
    Task.MANY_CLASSES: {
        "accuracy": _accuracy_of_many,
        "balanced_accuracy": lambda y, z: _mean_of_defined(_recalls(y, z)),
        "macro_auc": lambda y, z: _mean_of_defined(_areas(y, z)),
        "log_loss": _log_loss_of_many,
    },
    Task.QUANTITIES: {
        "mse": lambda y, p: _mean(np.square(y.astype(np.float64) - p)),
        "mae": lambda y, p: _mean(np.abs(y.astype(np.float64) - p)),
        "r2": _r2,
    },
    Task.COUNTS: {
        "deviance": deviance,
        "d2": _explained,
        "mae": lambda y, p: _mean(np.abs(y.astype(np.float64) - p)),
    },
    Task.SURVIVAL: {
        "concordance": lambda y, z, edges: survival.concordance(y, z[:, 0]),
        "brier": lambda y, z, edges: survival.brier(y, survival.survival_of(z), edges),
    },
    Task.SEQUENCES: {"perplexity": lambda y, z: perplexity(z[:, 0], z[:, 1])},
}
