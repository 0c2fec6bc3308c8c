"""How good a model is: metrics on test records, comparison with a constant guess, and the curve over rounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sordino.data.partition import describe
from sordino.data.sources import Dataset
from sordino.models.linear import Loss
from sordino.models.registry import BuiltModel


def evaluate(model: BuiltModel, theta: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    """Metrics on records outside the guarantee: accuracy and, for two classes, AUC; the mean squared error of
    quantities."""
    kind = getattr(model, "kind", Loss.SOFTMAX)
    if kind is Loss.SQUARES:
        return {"mse": float((model.predict(theta, x).double() - y.double()).square().mean())}
    z = model.logits(theta, x)
    guess = (z[..., 0] > 0).long() if kind is Loss.LOGISTIC else z.argmax(-1)
    # Counted, then divided once in float64: a mean in float32 differs from the share of the most common class.
    scores = {"accuracy": int((guess == y).sum()) / y.numel() if y.numel() else math.nan}
    classes = 2 if kind is Loss.LOGISTIC else model.outputs
    if classes == 2 and 0 < int(y.sum()) < len(y):
        from scipy.stats import rankdata

        ranks = rankdata((z[:, -1] - z[:, 0] if model.outputs == 2 else z[:, 0]).cpu().numpy())
        positive = y.cpu().numpy() == 1
        k = int(positive.sum())
        scores["auc"] = float((ranks[positive].sum() - k * (k + 1) / 2) / (k * (len(y) - k)))
    return scores


def beats_constant_guess(dataset: Dataset, metrics: dict[str, Any]) -> bool:
    """Whether the model is better than always predicting the most common class (or the mean) of the test records.

    Classes are compared by the number of correct records. Squared errors are compared in float64 with a margin of 1e-9,
    which is above its rounding error, so that the mean never counts as better than itself.
    """
    y = dataset.y_test
    if not dataset.classes:
        return bool(metrics["mse"] < (1 - 1e-9) * y.astype(np.float64).var())
    return bool(round(metrics["accuracy"] * len(y)) > np.bincount(y).max())


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


def draw_curve(path: Path, title: str, delta: float, history: list[dict[str, Any]]) -> bool:
    """Draw the metrics by round, with the epsilon spent so far. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    key = "mse" if "mse" in history[-1] else "accuracy"
    history = [line for line in history if key in line]
    t = [line["round"] for line in history]
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    left = figure.subplots()
    left.plot(t, [line[key] for line in history], color="#1f5fa8", lw=2)
    left.set_xlabel("round")
    left.set_ylabel("mean squared error" if key == "mse" else "test accuracy", color="#1f5fa8")
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
