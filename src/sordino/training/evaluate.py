"""How good a model is: metrics on test records, comparison with a constant guess, and the curve over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sordino.data.partition import describe
from sordino.data.records import Records
from sordino.data.sources import Dataset
from sordino.models import causal
from sordino.models.hazards import Hazards
from sordino.models.linear import Loss
from sordino.models.registry import BuiltModel
from sordino.models.torch_model import TorchModel
from sordino.training import metrics, survival
from sordino.training.metrics import MARGIN, Task, entropy

LEAST_AREA = 0.6  # a smaller AUC is called hardly better than chance, however many test records show it


def task_of(model: BuiltModel) -> Task:
    """What the model's labels are."""
    kind = getattr(model, "kind", Loss.SOFTMAX)
    if causal.is_causal(model):
        return Task.SEQUENCES
    if isinstance(model, Hazards):
        return Task.SURVIVAL
    if kind is Loss.POISSON:
        return Task.COUNTS
    if kind is Loss.SQUARES:
        return Task.QUANTITIES
    return Task.TWO_CLASSES if kind is Loss.LOGISTIC or model.outputs == 2 else Task.MANY_CLASSES


def task_of_data(dataset: Dataset) -> Task:
    """What the labels of a data set are."""
    return metrics.TASKS.get(dataset.task) or metrics.task_of_classes(len(dataset.classes))


def edges_of(model: BuiltModel) -> tuple[float, ...]:
    """The ends of a survival model's intervals; empty for other models."""
    return model.intervals[1:] if isinstance(model, Hazards) else ()


def predictions(model: BuiltModel, theta: Tensor, x: Tensor) -> np.ndarray:
    """The predictions in float64, as `metrics.score` takes them. A leading axis of theta holds several runs."""
    task = task_of(model)
    if task in (Task.QUANTITIES, Task.COUNTS):
        return np.asarray(model.predict(theta, x).double().cpu().numpy())
    if task is Task.SEQUENCES:
        assert isinstance(model, TorchModel)
        loss = causal.losses(model, theta, x).cpu().numpy()
        return np.stack([loss, np.broadcast_to(causal.counted_tokens(model, x).numpy(), loss.shape)], -1)
    z = model.logits(theta, x).double()
    if task is Task.TWO_CLASSES:  # two float32 numbers that differ have a difference in float64
        z = z[..., 1] - z[..., 0] if model.outputs == 2 else z[..., 0]
    return np.asarray(z.cpu().numpy())


def evaluate(
    model: BuiltModel, theta: Tensor, x: Tensor, y: Tensor, *, unit: float = 1.0, last: bool = False
) -> dict[str, float]:
    """The metrics of a round, on records outside the guarantee.

    Two classes: accuracy, AUC, log loss and Brier score. Many classes: accuracy, balanced accuracy and log loss, and
    after the last round the mean AUC. Quantities: mean squared error and R². Counts: deviance and its share explained,
    and mean absolute error. Survival: concordance and Brier score. Sequences: perplexity. A metric that is not defined
    is left out; only the first is always there, as NaN if need be. `unit` is how much 1 in y is, where labels are
    numbers; `last` says whether it is the last round.
    """
    task = task_of(model)
    labelled = in_units(task, y, predictions(model, theta, x), unit)
    names = metrics.OF_THE_LAST_ROUND[task] if last else metrics.OF_A_ROUND[task]
    scores = metrics.score(task, *labelled, names, edges=edges_of(model))
    first = metrics.OF_A_ROUND[task][0]
    return {k: math.nan if v is None else v for k, v in scores.items() if v is not None or k == first}


def evaluate_fully(
    model: BuiltModel,
    theta: Tensor,
    x: Tensor,
    y: Tensor,
    threshold: float = 0.5,
    *,
    counts: bool = True,
    unit: float = 1.0,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Every metric, on records outside the guarantee: for two classes also calibration, sensitivity and specificity;
    for many classes recall and AUC of each; for sequences also the perplexity before training.

    Args:
      model: the model.
      theta: its parameters.
      x: features.
      y: labels.
      threshold: records whose probability of the second class is above it count as positive.
      counts: whether the calibration curve may tell how many records each of its groups holds, and the classes how
        many they have.
      unit: how much 1 in y is, where labels are numbers.
      classes: names of the classes; without them they are numbered.
    """
    task = task_of(model)
    labelled = in_units(task, y, predictions(model, theta, x), unit)
    found = metrics.full(task, *labelled, threshold, edges=edges_of(model))
    if task is Task.SEQUENCES:
        before = metrics.score(task, labelled[0], predictions(model, model.init().to(theta), x))
        found["perplexity_before"] = before["perplexity"]
    if classes and "classes" in found:
        found["classes"] = [{**row, "class": name} for row, name in zip(found["classes"], classes, strict=True)]
    for name in ("calibration_curve", "classes"):
        if not counts and name in found:
            found[name] = [{k: v for k, v in group.items() if k != "records"} for group in found[name]]
    return found


def scores_to_compare(model: BuiltModel, theta: Tensor, x: Tensor, y: Tensor, *, unit: float = 1.0) -> dict[str, Any]:
    """The metrics that `no_better` reads: those of a round, and of sequences the perplexity before training too."""
    whole = evaluate_fully if task_of(model) is Task.SEQUENCES else evaluate
    return whole(model, theta, x, y, unit=unit)


def in_units(task: Task, y: Tensor, predicted: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions in the unit of the source, where they are quantities or counts."""
    labels = y.cpu().numpy()
    return (labels * unit, predicted * unit) if task in (Task.QUANTITIES, Task.COUNTS) else (labels, predicted)


def evaluate_clients(model: BuiltModel, theta: Tensor, records: Records, unit: float = 1.0) -> list[dict[str, Any]]:
    """The metrics of a round on each client's own training records. Only a simulation on open data may compute them."""
    table = []
    for i, (start, stop) in enumerate(zip(records.starts[:-1], records.starts[1:], strict=True)):
        scores = evaluate(model, theta.to(records.x), records.x[start:stop], records.y[start:stop], unit=unit)
        table.append({"client": i, "records": int(stop - start), **scores})
    return table


def beats_constant_guess(dataset: Dataset, metrics: dict[str, Any]) -> bool:
    """Whether the model is better than a constant guess that knows the labels of the test records.

    - Two classes: its log loss is below that of the constant prediction with the test records' prevalence, and its AUC
      is above 0.5.
    - Many classes: it is right on more records than the most common class has.
    - Quantities: its mean squared error is below that of the mean.
    - Counts: its deviance is below that of the mean.
    - Sequences: its perplexity is below that of the model before training, which `evaluate_fully` measures.
    - Survival: its concordance is above 0.5. Its Brier score is not compared, because the Kaplan-Meier curve of the
      test records themselves, a constant that knows them, is hard to beat where few have the event.

    Losses are compared in float64 with a margin of 1e-9, which is above their rounding error, so that a constant never
    counts as better than itself.

    Args:
      dataset: its `y_test` and `classes` are read.
      metrics: what `evaluate` returned for its test records; of sequences, what `evaluate_fully` returned.
    """
    return not no_better(dataset, metrics)


def no_better(dataset: Dataset, scores: dict[str, Any]) -> str:
    """Why the model is no better than a constant guess (`beats_constant_guess`); empty if it is better."""
    y = dataset.y_test
    if not len(y):
        return "there are no test records to compare on"
    if dataset.task == "survival":
        index = scores.get("concordance")
        return "" if index is not None and index > 0.5 else f"its concordance index is {_number(index)}, chance is 0.5"
    if dataset.task == "sequence":
        now, before = scores.get("perplexity"), scores.get("perplexity_before")
        better = now is not None and before is not None and now < (1 - MARGIN) * before
        return "" if better else f"its perplexity is {_number(now)}, that before training is {_number(before)}"
    if dataset.task == "count":
        loss, constant = scores.get("deviance"), deviance_of_mean(dataset)
        if loss is not None and loss < (1 - MARGIN) * constant:
            return ""
        return f"its mean Poisson deviance is {_number(loss)}, that of the mean count is {constant:.4g}"
    if not dataset.classes:
        error, constant = scores.get("mse"), float((y.astype(np.float64) * dataset.unit).var())
        if error is not None and error < (1 - MARGIN) * constant:
            return ""
        return f"its mean squared error is {_number(error)}, that of the mean is {constant:.4g}"
    if len(dataset.classes) > 2:
        most = int(np.bincount(y).max())
        if round(scores["accuracy"] * len(y)) > most:
            return ""
        return f"its accuracy is {scores['accuracy']:.2%}, and {most / len(y):.2%} have the most common class"
    loss, area, constant = scores.get("log_loss"), scores.get("auc"), entropy(y)
    ranks = area is not None and area > 0.5
    if loss is None or not loss < (1 - MARGIN) * constant:
        return f"its log loss is {_number(loss)}, that of the prevalence is {constant:.4g}{_ranking(area, y)}"
    return "" if ranks else f"its AUC is {_number(area)}"


def hardly_better(dataset: Dataset, scores: dict[str, Any]) -> str:
    """Why the test records do not show that a survival model is better than equal risks, although its concordance is
    above 0.5: it lies within two standard errors of chance (`survival.chance_error`). Empty for other models."""
    index = scores.get("concordance")
    if dataset.task != "survival" or index is None or not index > 0.5:
        return ""
    error = survival.chance_error(dataset.y_test, dataset.person_test)
    if index > 0.5 + survival.LEAST_ERRORS * error:
        return ""
    return f"its concordance index is {_number(index)}, {survival.BY_CHANCE}"


def _ranking(area: float | None, y: np.ndarray) -> str:
    """What an AUC says beside a log loss that is no better than a constant's; empty up to 0.5.

    A model ranks if its AUC is at least 0.6 and two standard errors above one half: the error is that of the rank
    statistic of Mann and Whitney for scores that do not depend on the labels.
    """
    if area is None or not area > 0.5:
        return ""
    positive = int(np.count_nonzero(y))
    error = math.sqrt((len(y) + 1) / (12 * max(1, positive) * max(1, len(y) - positive)))
    if area < max(LEAST_AREA, 0.5 + 2 * error):
        return f" (it ranks hardly better than chance, with an AUC of {area:.4g})"
    return f" (it ranks, with an AUC of {area:.4g}, but its risks are off)"


def deviance_of_mean(dataset: Dataset) -> float:
    """The mean Poisson deviance of the mean count of the test records."""
    value = of_constant(Task.COUNTS, dataset.y_test.astype(np.float64) * dataset.unit)
    assert value is not None
    return value


def of_constant(task: Task, y: np.ndarray) -> float | None:
    """The log loss, or the deviance, of a constant guess that knows these labels, in their unit; None for others."""
    if task in (Task.TWO_CLASSES, Task.MANY_CLASSES):
        return metrics.entropy(y)
    return metrics.deviance(y.astype(np.float64), np.full(len(y), y.mean())) if task is Task.COUNTS else None


def _number(value: float | None) -> str:
    return "not a number" if value is None or math.isnan(value) else f"{value:.4g}"


def heterogeneity(y: np.ndarray, sizes: tuple[int, ...], classes: int) -> dict[str, float]:
    """How much clients differ, on average: KL divergence of their labels from uniform, and classes that they lack.

    An exact function of the labels: for records that everybody may see only.

    Args:
      y: labels, sorted by client.
      sizes: records per client.
      classes: number of classes.
    """
    clients = describe(y, np.repeat(np.arange(len(sizes)), sizes), classes)
    return {
        "kl_from_uniform": sum(c.kl_from_uniform for c in clients) / len(clients),
        "absent_classes": sum(c.absent for c in clients) / len(clients),
    }


def shown_metric(line: dict[str, Any]) -> str:
    """The metric of a round that is shown first: the first of its task."""
    firsts = (names[0] for names in metrics.OF_A_ROUND.values())
    return next((name for name in firsts if name in line), "accuracy")


def draw_curve(path: Path, title: str, delta: float, history: list[dict[str, Any]]) -> bool:
    """Draw the metrics by round, with the epsilon spent so far. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    key = shown_metric(history[-1])
    history = [line for line in history if key in line]
    t = [line["round"] for line in history]
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    left = figure.subplots()
    left.plot(t, [line[key] for line in history], color="#1f5fa8", lw=2)
    left.set_xlabel("round")
    left.set_ylabel("test accuracy" if key == "accuracy" else metrics.NAMES[key], color="#1f5fa8")
    left.grid(alpha=0.25)
    spent = [line["epsilon"] for line in history]
    if None not in spent:
        right = left.twinx()
        right.plot(t, spent, color="#b3541e", lw=1.5, ls="--")
        right.set_ylabel(f"ε spent (δ = {delta:g})", color="#b3541e")
        right.set_ylim(bottom=0)
    left.set_title(title, fontsize=11)
    figure.savefig(path)
    return True
