"""A row of a comparison for one trusted party that holds all records: what federation costs.

It is softmax regression by objective perturbation, with the (epsilon, delta) of the other rows and the same records. It
has one round and sends nothing, and it is not certified (`objective` has the bound, and says why). Its one setting,
`share`, is the part of epsilon that pays for the curvature of the losses: a larger share permits a smaller ridge.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from sordino.core import Unit
from sordino.data.preprocess import RADIUS, scaler
from sordino.data.sources import Dataset
from sordino.errors import SordinoError
from sordino.models.linear import Linear, Loss
from sordino.privacy.participation import Participation
from sordino.studies import objective
from sordino.training.batch import Trained
from sordino.training.evaluate import evaluate, task_of
from sordino.training.metrics import goodness, ranking_metric
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.spec import Spec

LABEL = "one party: objective perturbation"
METHOD = "dp-statistics"  # of the same records and one round; the row has its budget, preprocessing and partition
SHARES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SHARE = 0.03  # where nothing is tuned
within = scaler(f"clip:{RADIUS}")  # the bound is for records of at most the norm that `normalize = record` gives them
WHY = (
    "one party: it holds all records and must be trusted with them, and the arithmetic of objective perturbation is "
    "not proved"
)


def check(values: dict[str, Any]) -> ResolvedSpec:
    """Refuse a comparison that has no such row, before anything is trained."""
    resolved = resolve(Spec.of(values))
    if resolved.privacy.unit is not Unit.RECORD:
        raise SordinoError(
            f"--one-party: objective perturbation protects single records, not a {resolved.privacy.unit}; leave it out."
        )
    if resolved.model.name not in ("auto", "softmax") or resolved.model.options:
        raise SordinoError("--one-party: objective perturbation is for softmax regression; leave it out.")
    if resolved.participation != Participation():
        raise SordinoError("--one-party: it holds the records of all clients at once; leave out participation.")
    return resolved


def train(values: dict[str, Any], share: float, dataset: Dataset | None = None, metric: str | None = None) -> Trained:
    """Fit the model of one row.

    Args:
      values: the keys of a run of `METHOD` with the same records and budget; the seed is that of the noise.
      share: part of epsilon for the curvature, in (0, 1).
      dataset: the records; None reads those that the run names.
      metric: what to score by; None for accuracy.

    Returns:
      What a run gives; its one round is the whole fit.

    Raises:
      SordinoError: the labels are no classes, or the minimum was not found.
    """
    resolved = check(values)
    dataset = resolved.read_data() if dataset is None else dataset
    classes, privacy = len(dataset.classes), resolved.privacy
    if not classes:
        raise SordinoError("--one-party: objective perturbation is for classes; leave it out.")
    owner, began, cpu_began = resolved.owners(dataset), time.perf_counter(), time.process_time()
    x, y = within(dataset.x_train[owner >= 0]), dataset.y_train[owner >= 0]
    records = torch.from_numpy(np.c_[x, np.ones(len(x))].astype(np.float64)), torch.eye(classes).double()[y]
    radius = math.hypot(RADIUS, 1)
    ridge = objective.ridge_of(radius, classes, share * (1 - objective.OUTPUT) * privacy.epsilon)
    weights = objective.fitted(*records, privacy.epsilon, privacy.delta, radius, ridge, resolved.seed or 0)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    model, theta = Linear(x.shape[1], classes, Loss.SOFTMAX), torch.from_numpy(weights).flatten().float()
    tests = torch.from_numpy(within(dataset.x_test)), torch.from_numpy(dataset.y_test)
    scores = evaluate(model, theta, *tests)
    wanted = ranking_metric(metric, task_of(model))
    plan = resolved.plan(tuple(np.bincount(owner[owner >= 0]).tolist()))
    return Trained(
        resolved,
        plan,
        model,
        theta,
        {1: scores.get(wanted, math.nan)},
        {1: scores["accuracy"]},
        (),
        (0, 0),
        seconds,
        {1: cpu_seconds},
        {},
    )


def best_share(values: dict[str, Any], dataset: Dataset, metric: str | None) -> tuple[float, float]:
    """The share of `SHARES` that is best on the test records of `dataset`, and its score."""
    scores = {share: next(iter(train(values, share, dataset, metric).scores.values())) for share in SHARES}
    task = task_of(Linear(1, max(len(dataset.classes), 2), Loss.SOFTMAX))
    best = max(SHARES, key=lambda share: goodness(ranking_metric(metric, task), scores[share]))
    return best, scores[best]
