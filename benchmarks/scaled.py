"""DP-FedAdam, scaled, beside DP-FedAdam, which it is with w = 0. Writes results/scaled.json.

    python benchmarks/scaled.py ../shared/data

Softmax, five clients, 40 rounds, record level, an untrusted server. Sixteen settings per method, data set and epsilon,
chosen on validation records; mean accuracy of five seeds. Adult has columns of very different size: ages and hours as
they are, beside indicators of categories; then the same with numbers divided by public maxima. Adult and CIFAR-10
(features of a ResNet-20) are cut to 10,000 training records. About six minutes on one core.
"""

from __future__ import annotations

import csv
import lzma
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compact import text
from provenance import provenance
from sordino.data.sources import Dataset, load
from sordino.studies.tune import validated
from sordino.training.batch import run_many
from sordino.training.spec import Spec

OUT = Path(__file__).parents[1] / "results" / "scaled.json"
EPSILONS, ROUNDS, TUNING_SEED, SEEDS, MOST_RECORDS = (1, 8), 40, 100, 5, 10_000
NUMBERS = {"age": 90, "education-num": 16, "hours-per-week": 99}  # and their public maxima
CATEGORIES = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country")
STEPS, TAUS = (0.03, 0.1, 0.3, 1.0), (0.001, 0.01)
GRIDS = {
    "dp-fedadam": [{"lr": lr, "beta2": b, "tau": tau} for lr, b, tau in product(STEPS, (0.9, 0.99), TAUS)],
    "dp-fedadam-scaled": [{"lr": lr, "w": w, "tau": tau} for lr, w, tau in product(STEPS, (0.5, 0.9), TAUS)],
}
Options = dict[str, Any]


def adult(folder: Path, divided: bool) -> Dataset:
    """Adult's numbers as they are, or divided by public maxima, and one column for each category."""

    def rows(part: str) -> list[dict[str, str]]:
        with lzma.open(folder / "tables" / f"adult_{part}.csv.xz", "rt") as file:
            return list(csv.DictReader(file))

    train, test = rows("train")[:MOST_RECORDS], rows("test")
    levels = [(name, level) for name in CATEGORIES for level in sorted({row[name].strip() for row in train})]

    def encoded(part: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        numbers = [[float(row[name]) / (most if divided else 1) for name, most in NUMBERS.items()] for row in part]
        indicators = [[row[name].strip() == level for name, level in levels] for row in part]
        labels = np.array([row["classification"].strip().startswith(">") for row in part], int)
        return np.hstack([numbers, indicators]).astype(np.float32), labels

    return Dataset("adult", *encoded(train), *encoded(test), None, ("<=50K", ">50K"))


def accuracies(data: Dataset, method: str, epsilon: float, settings: list[Options]) -> list[float]:
    """The accuracy in percent at the end of a run per setting."""
    shared = {"method": method, "epsilon": epsilon, "rounds": ROUNDS, "clients": 5}
    runs = run_many([Spec.of({**shared, **setting}) for setting in settings], data, at=[ROUNDS])
    return [100 * run.accuracy[ROUNDS] for run in runs]


def row(name: str, data: Dataset, method: str, epsilon: float) -> list[Any]:
    """Data, method, epsilon, mean accuracy, its standard deviation over seeds, and what tuning chose."""
    grid = GRIDS[method]
    tuning = accuracies(validated(data), method, epsilon, [{**each, "seed": TUNING_SEED} for each in grid])
    chosen = grid[tuning.index(max(tuning))]
    scores = accuracies(data, method, epsilon, [{**chosen, "seed": seed} for seed in range(SEEDS)])
    print(name, method, epsilon, [round(score, 1) for score in scores], chosen, flush=True)
    return [name, method, epsilon, round(statistics.mean(scores), 2), round(statistics.stdev(scores), 2), chosen]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    origin, rows = provenance("python benchmarks/scaled.py ../shared/data"), []
    cifar = load(str(folder / "cifar10_resnet20.npz"))
    sets = {
        "digits": load("digits"),
        "adult raw": adult(folder, divided=False),
        "adult divided": adult(folder, divided=True),
        "cifar": cifar._replace(x_train=cifar.x_train[:MOST_RECORDS], y_train=cifar.y_train[:MOST_RECORDS]),
    }
    for name, data in sets.items():
        rows += [row(name, data, method, epsilon) for method in GRIDS for epsilon in EPSILONS]
    OUT.write_text(text({"provenance": origin, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
