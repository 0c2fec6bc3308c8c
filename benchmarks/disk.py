"""DP-DiSK beside DP-FedGD and DP-FedAdam, which are DP-DiSK with kappa = 1. Writes results/disk.json.

    python benchmarks/disk.py ../shared/data

Digits, softmax: six settings per method and epsilon, chosen on validation records; mean accuracy of three seeds.
MNIST, a CNN of 14 x 14 pixels, Poisson minibatches: two settings per method, chosen on validation records at epsilon 8
and used at 2 as well; one seed. A first try with steps of 0.01 and 0.03 ended far lower for
both methods with Adam, so their steps were raised. About five minutes on one core.
"""

from __future__ import annotations

import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from compact import text
from provenance import provenance
from sordino.data.sources import load
from sordino.studies.tune import validated
from sordino.training.batch import run_many
from sordino.training.spec import Spec

OUT = Path(__file__).parents[1] / "results" / "disk.json"
EPSILONS, ROUNDS, TUNING_SEED = (2, 8), 40, 100
MOST_TESTED = 2000  # test records of MNIST
Options = dict[str, Any]


def settings(lrs: tuple[float, ...], **options: tuple[Any, ...]) -> list[Options]:
    """Every step size with every value of the other options."""
    return [dict(zip(("lr", *options), values, strict=True)) for values in product(lrs, *options.values())]


DIGITS = {
    "dp-fedgd": settings((0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "dp-disk": settings((1.0, 2.0, 4.0), kappa=(0.5, 0.7)),
    "dp-fedadam": settings((0.01, 0.02, 0.05, 0.1, 0.2, 0.4)),
    "dp-disk adam": settings((0.05, 0.1, 0.2), kappa=(0.5, 0.7), optimizer=("adam",)),
}
MNIST = {
    "dp-fedgd": settings((1.0, 3.0)),
    "dp-disk": settings((1.0, 3.0)),
    "dp-fedadam": settings((0.03, 0.1)),
    "dp-disk adam": settings((0.03, 0.1), optimizer=("adam",)),
}
CNN = {"data": "mnist", "model": "cnn", "side": 14, "batch": "poisson:64"}


def accuracies(data: Any, keys: Options, method: str, epsilon: float, settings: list[Options]) -> list[float]:
    """The accuracy in percent at the end of a run per setting."""
    shared = {"method": method.split()[0], "epsilon": epsilon, "rounds": ROUNDS, "clients": 5, **keys}
    runs = run_many([Spec.of({**shared, **setting}) for setting in settings], data, at=[ROUNDS])
    return [100 * run.accuracy[ROUNDS] for run in runs]


def best(data: Any, keys: Options, method: str, epsilon: float, grid: list[Options]) -> Options:
    """The setting that predicts the validation records best."""
    scores = accuracies(validated(data), keys, method, epsilon, [{**each, "seed": TUNING_SEED} for each in grid])
    return grid[scores.index(max(scores))]


def row(name: str, data: Any, keys: Options, method: str, epsilon: float, chosen: Options, seeds: int) -> list[Any]:
    """Data, method, epsilon, mean accuracy, its standard deviation over seeds (None for one) and what was chosen."""
    scores = accuracies(data, keys, method, epsilon, [{**chosen, "seed": seed} for seed in range(seeds)])
    shown = {key: value for key, value in chosen.items() if key != "optimizer"}
    print(name, method, epsilon, [round(score, 1) for score in scores], shown, flush=True)
    std = round(statistics.stdev(scores), 2) if seeds > 1 else None
    return [name, method, epsilon, round(statistics.mean(scores), 2), std, shown]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    origin, rows = provenance("python benchmarks/disk.py ../shared/data"), []
    data = load("digits")
    for method, grid in DIGITS.items():
        for epsilon in EPSILONS:
            rows.append(row("digits", data, {}, method, epsilon, best(data, {}, method, epsilon, grid), 3))
    data = load("mnist", data_dir=folder)
    data = data._replace(x_test=data.x_test[:MOST_TESTED], y_test=data.y_test[:MOST_TESTED])
    for method, grid in MNIST.items():
        chosen = best(data, CNN, method, max(EPSILONS), grid)
        rows += [row("mnist", data, CNN, method, epsilon, chosen, 1) for epsilon in EPSILONS]
    OUT.write_text(text({"provenance": origin, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
