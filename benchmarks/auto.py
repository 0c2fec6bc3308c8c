"""`auto`, untuned, beside tuned rivals on the same records; an ablation of its parts, and constants halved and doubled.

    python benchmarks/auto.py DATA_DIR                   # results/auto.json and .md
    python benchmarks/auto.py DATA_DIR --device cuda     # minutes instead of hours

DATA_DIR holds the frozen features, their public statistics, and the files of MNIST and Adult. 70 rounds, delta 1e-5,
replace-one, Dirichlet 0.5. Rivals see the records as `auto` does (`normalize = record`). For each budget, trust model
and round, the settings of a rival are those that are best on the test records with seed 0, which favours the rival;
figures are means of seeds 1 to 3. The best rival is the best of all after that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

import sordino as so
from provenance import provenance
from sordino.data.preprocess import RADIUS, by_record
from sordino.data.sources import Dataset
from sordino.training.batch import run_many
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "auto.json"
EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
ENDS = (0.5, 10.0)  # of the ablation
TRUSTS = ("untrusted-server", "secure-aggregation")
SEEDS, TUNING_SEED = (1, 2, 3), 0
ROUNDS = (10, 70)
FILES = {  # file, public statistics, what is made of it, clients
    "CIFAR-10, ResNet-20": ("cifar10_resnet20.npz", None, "", 20),
    "CIFAR-10, ResNet-20, public statistics": ("cifar10_resnet20.npz", "public_stats_resnet20.npz", "", 20),
    "CIFAR-10, ResNet-20, 1,000 records": ("cifar10_resnet20.npz", None, "first 1000", 10),
    "CIFAR-10, ResNet-20, 512 random features": ("cifar10_resnet20.npz", None, "random 512", 20),
    "CIFAR-10, ResNet-44": ("cifar10_resnet44.npz", None, "", 20),
    "Fashion-MNIST, ResNet-44": ("fashion_mnist_resnet44.npz", None, "", 20),
    "Fashion-MNIST, ResNet-44, 1,000 records": ("fashion_mnist_resnet44.npz", None, "first 1000", 10),
    "Adult": ("a9a", None, "", 20),
    "synthetic(1,1)": ("synthetic(1,1)", None, "", None),
    "digits": ("digits", None, "", 10),
    "MNIST, pixels": ("mnist", None, "", 20),
}
STEPS = tuple(0.02 * 2**k for k in range(10))
RIVALS: dict[str, list[dict[str, Any]]] = {
    "dp-fedgd": [{"lr": lr, "tail": tail} for lr in STEPS for tail in (0.0, 0.5)],
    "dp-fedadam": [{"lr": lr, "tail": tail} for lr in STEPS[:7] for tail in (0.0, 0.5)]
    + [{"lr": 0.005, "tail": tail} for tail in (0.0, 0.5)],
    "dp-fedsofim": [{"lr": lr, "rho": rho} for lr in STEPS[1:9] for rho in (0.5, 5.0)],
    "dp-fedfc": [{"lr": lr, "gamma": 1.0, "covariance_clip": 101.0} for lr in STEPS[1:9:2]],
}
PLAIN = "auto"
PARTS = ("data", "ablation")
ABLATED = ("CIFAR-10, ResNet-20", "Adult")
LEVERS: dict[str, dict[str, Any]] = {
    "equal weight per client (client-mean)": {"divisor": "client-mean"},
    "no square roots": {"records": "no square roots"},
    "record's mean not subtracted": {"records": "no mean"},
    "raw records": {"records": "none"},
    "no covariance": {"covariance_share": 1e-9},
    "no doubt factor": {"doubt": 0.0},
    "same budget in all rounds": {"early_share": 0.0},
}
SCAN = {"clip": 5.0, "prior": 1.0, "doubt": 10.0, "early_share": 0.3, "covariance_share": 0.05}
VARIANTS = LEVERS | {f"{key} {factor:g}": {key: factor} for key, v in SCAN.items() for factor in (v / 2, v * 2)}


class Cell(NamedTuple):
    """One row of a table under one budget and trust model: accuracy after each of ROUNDS."""

    data: str
    row: str
    trust: str
    epsilon: float
    accuracy: tuple[float, ...]


def read(name: str, folder: Path, records: str = "record") -> Dataset:
    file, stats, change, _ = FILES[name]
    path = str(folder / file) if file.endswith(".npz") else file
    public = None if stats is None else folder / stats
    plain = "record" if records == "record" and not change else "none"
    dataset = so.load(path, public_stats=public, normalize=plain, data_dir=folder)
    x, test, rng = dataset.x_train, dataset.x_test, np.random.default_rng(0)
    if change.startswith("first"):
        kept = rng.permutation(len(x))[: int(change.split()[1])]
        dataset = dataset._replace(x_train=by_record(x[kept]), y_train=dataset.y_train[kept], x_test=by_record(test))
    elif change.startswith("random"):  # non-negative, as activations are
        weights = 0.2 * rng.standard_normal((x.shape[1], int(change.split()[1]))).astype(np.float32)
        made = (by_record(np.maximum(by_record(part) @ weights - 1, 0)) for part in (x, test))
        dataset = dataset._replace(x_train=next(made), x_test=next(made))
    elif records in ("no mean", "no square roots"):
        dataset = dataset._replace(x_train=scaled(x, records), x_test=scaled(test, records))
    return dataset


def scaled(x: np.ndarray, records: str) -> np.ndarray:
    """Records of norm RADIUS without one of the steps of `by_record`."""
    if records == "no mean" and (x >= 0).all():
        x = np.sqrt(x)
    if records == "no square roots":
        x = x - x.mean(1, keepdims=True)
    return x * (RADIUS / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-9)).astype(np.float32)


class Run(NamedTuple):
    """Options of a method (their number), budget, seed, and the accuracy after each of ROUNDS."""

    option: int
    epsilon: float
    seed: int
    accuracy: tuple[float, ...]


def trained(
    dataset: Dataset,
    name: str,
    device: str,
    options: Sequence[dict[str, Any]],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    **keys: Any,
) -> list[Run]:
    """One run per option, budget and seed of a method."""
    clients = FILES[name][3]
    split = {"partition": "dirichlet:0.5", "clients": clients} if clients else {"partition": "by-site"}
    common = {"rounds": ROUNDS[-1], "normalize": "none", "calibrate": 0.0, **split, **keys}
    wanted = list(itertools.product(range(len(options)), epsilons, seeds))
    specs = [Spec.of({**common, **options[k], "epsilon": e, "seed": s, "split_seed": s}) for k, e, s in wanted]
    results = run_many(specs, dataset, device=device, at=ROUNDS)
    return [Run(*job, tuple(each.accuracy[t] for t in ROUNDS)) for job, each in zip(wanted, results, strict=True)]


def mean(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(round(statistics.mean(each), 5) for each in zip(*samples, strict=True))


def auto_cells(dataset: Dataset, name: str, trust: str, device: str, row: str, epsilons: Sequence[float]) -> list[Cell]:
    options = {key: value for key, value in VARIANTS.get(row, {}).items() if key != "records"}
    seeds = SEEDS if row == PLAIN else SEEDS[:1]
    runs = trained(dataset, name, device, [options], epsilons, seeds, method="auto", trust=trust)
    return [Cell(name, row, trust, e, mean([run.accuracy for run in runs if run.epsilon == e])) for e in epsilons]


def rival_cells(dataset: Dataset, name: str, trust: str, device: str, method: str) -> list[Cell]:
    """The rival with the settings that are best at each round with the tuning seed."""
    seeds = (TUNING_SEED, *SEEDS)
    runs = trained(dataset, name, device, RIVALS[method], EPSILONS, seeds, method=method, clip=5.0, trust=trust)
    cells = []
    for epsilon in EPSILONS:
        own, figures = [run for run in runs if run.epsilon == epsilon], []
        for k in range(len(ROUNDS)):
            tuned = max((run for run in own if run.seed == TUNING_SEED), key=lambda run: run.accuracy[k]).option
            samples = [run.accuracy for run in own if run.option == tuned and run.seed in SEEDS]
            figures.append(mean(samples)[k])
        cells.append(Cell(name, method, trust, epsilon, tuple(figures)))
    return cells


def main(folder: Path, device: str, only: str | None) -> None:
    """Write both parts; with `only`, keep the figures of the other."""
    old = json.loads(OUT.read_text()) if only else {"cells": [], "parts": {}}
    cells = [cell for each in old["cells"] if ((cell := Cell(*each)).row in VARIANTS) == (only == "data")]
    rows = [(name, row) for name in ABLATED for row in VARIANTS] if only != "data" else []
    names = FILES if only != "ablation" else ()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(TRUSTS) * (len(names) * (1 + len(RIVALS)) + len(rows)))
        for name in names:
            dataset = read(name, folder)
            for trust in TRUSTS:
                cells += auto_cells(dataset, name, trust, device, PLAIN, EPSILONS)
                progress.advance(task)
                for method in RIVALS:
                    cells += rival_cells(dataset, name, trust, device, method)
                    progress.advance(task)
        for (name, row), trust in itertools.product(rows, TRUSTS):
            dataset = read(name, folder, VARIANTS[row].get("records", "record"))
            cells += auto_cells(dataset, name, trust, device, row, ENDS)
            progress.advance(task)
    command = f"python benchmarks/auto.py DATA_DIR --device {device}"
    parts = old["parts"] | {part: f"{command} --only {part}" for part in PARTS if only in (part, None)}
    document = {"provenance": provenance(command), "parts": parts, "columns": Cell._fields, "cells": cells}
    OUT.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    OUT.with_suffix(".md").write_text(table(list(parts.values()), cells))


def shown(accuracy: Sequence[float] | None) -> str:
    return "" if accuracy is None else " → ".join(f"{100 * each:.1f}" for each in accuracy)


def table(commands: Sequence[str], cells: Sequence[Cell]) -> str:
    figures = {cell[:4]: cell.accuracy for cell in cells}
    lines = [
        "# auto, untuned: accuracy in % at round 10 → round 70",
        "",
        ", ".join(f"`{each}`" for each in commands)
        + ". 70 rounds, δ = 1e-5, replace-one, Dirichlet 0.5 over 20 clients (10 for digits and "
        "1,000 records, 30 sites for synthetic), pooled divisor. Means of three seeds.",
        "",
        f"The rival is, at each round, the best of {', '.join(RIVALS)} with the same records, each tuned for each cell "
        f"over {', '.join(str(len(each)) for each in RIVALS.values())} settings on the test records with another seed. "
        "Nobody pays for that tuning.",
    ]
    for trust in TRUSTS:
        lines += ["", f"## {trust}", "", "| data | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"]
        lines.append("|---" * (len(EPSILONS) + 1) + "|")
        for name in FILES:
            own = [figures[name, PLAIN, trust, epsilon] for epsilon in EPSILONS]
            best = [
                [max(figures[name, method, trust, epsilon][k] for method in RIVALS) for k in range(len(ROUNDS))]
                for epsilon in EPSILONS
            ]
            lines.append(f"| {name} | " + " | ".join(map(shown, own)) + " |")
            lines.append("| *best tuned rival at each round* | " + " | ".join(map(shown, best)) + " |")
    ends = list(itertools.product(ENDS, TRUSTS))
    for name in ABLATED:
        lines += [
            "",
            f"## {name}: ablation, and sensitivity to each constant",
            "",
            "Seed 1; the first row has three seeds.",
            "",
        ]
        lines += ["| | " + " | ".join(f"ε = {e:g}, {t}" for e, t in ends) + " |", "|---" * (len(ends) + 1) + "|"]
        for row in (PLAIN, *VARIANTS):
            lines.append(f"| {row} | " + " | ".join(shown(figures.get((name, row, t, e))) for e, t in ends) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=PARTS, help="renew this part, and keep the other")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.device, arguments.only)
