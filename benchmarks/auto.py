"""`auto`, untuned, beside tuned rivals on the same records; an ablation of its parts, and constants halved and doubled.

    python benchmarks/auto.py DATA_DIR                                     # results/auto.json and .md
    python benchmarks/auto.py DATA_DIR --device cuda                       # minutes instead of hours
    python benchmarks/auto.py DATA_DIR --only settings --data "digits"     # renew one part, for one data set

DATA_DIR holds the frozen features, their public statistics, and the files of MNIST and Adult. The 1,280 features of
EfficientNet-Lite0, which learned ImageNet, are those of `sordino features --module FILE --size 224 --mean 0.498 --std
0.502`; no constant was chosen on them. 70 rounds, delta 1e-5,
replace-one, Dirichlet 0.5. Rivals see the records as `auto` does (`normalize = record`). For each budget, trust model
and round, the settings of a rival are those that are best on the test records with seed 0, which favours the rival;
figures are means of seeds 1 to 10 (1 to 3: other settings than a rare class, and the later parts). The
best rival is the best of all after that.

The parts: `auto` (its rows), `rivals`, `centred` (two rivals on records about their exact mean, which nobody pays for),
`ablation`, `settings` (other clients, labels and budgets; without noise beside logistic regression), `short` (runs of
1, 3 and 10 rounds beside recipes that need one, which are tuned alike), `objective` (objective perturbation beside
them, whose server must hold all records) and `corrections` (the ridge and the measured curvature, each alone).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import sordino as so
from provenance import provenance
from sordino.data.preprocess import RADIUS, by_record
from sordino.data.sources import Dataset
from sordino.methods.few_rounds import SHARE_OF_ONE_ROUND
from sordino.privacy import calibration
from sordino.rules import estimates
from sordino.studies import objective, one_party
from sordino.training.batch import run_many
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "auto.json"
EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
ENDS = (0.5, 10.0)  # of the ablation
TRUSTS = ("untrusted-server", "secure-aggregation")
SEEDS, FEW_SEEDS, TUNING_SEED = tuple(range(1, 11)), (1, 2, 3), 0
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
KALMAN = importlib.import_module("sordino.rules.kalman")  # the name also means the rule
PLAIN = "auto"
PARTS = ("auto", "rivals", "centred", "ablation", "settings", "short", "objective", "corrections")
ABLATED = ("CIFAR-10, ResNet-20", "Adult")
LEVERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "equal weight per client (client-mean)": {"divisor": "client-mean"},
    "no square roots": {"records": "no square roots"},
    "record's mean not subtracted": {"records": "no mean"},
    "raw records": {"records": "none"},
    "not about the mean of the records": {"centred": False},
    "no covariance": {"covariance_share": 1e-9},
    "no doubt factor": {"doubt": 0.0},
    "same budget in all rounds": {"early_share": 0.0},
}
SCAN = {"clip": 5.0, "prior": 1.0, "doubt": 10.0, "early_share": 0.3, "covariance_share": 0.05}
VARIANTS = LEVERS | {f"{key} {factor:g}": {key: factor} for key, v in SCAN.items() for factor in (v / 2, v * 2)}


HUNDRED = "CIFAR-10 and Fashion-MNIST, 100 classes"
UNSEEN = "CIFAR-10, EfficientNet, 10,000 records"
RARE, RARE_RIVALS = "Adult, 1 % of class 1", ("dp-fedgd", "dp-fedadam")
CENTRED, CENTRED_SETS = ", centred for free", ("Fashion-MNIST, ResNet-44", "Adult", "digits", "MNIST, pixels")
OTHER_FILES = {  # of `settings` alone
    HUNDRED: ("cifar10_resnet44.npz", None, "pairs fashion_mnist_resnet44.npz", 20),
    RARE: ("a9a", None, "rare 0.01", 20),
    UNSEEN: ("cifar10_efficientnet.npz", None, "first 10000", 20),
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # data, keys of the spec
    "100 clients": ("CIFAR-10, ResNet-20", {"clients": 100}),
    "1,000 clients": ("CIFAR-10, ResNet-20", {"clients": 1000}),
    "Dirichlet 0.1": ("CIFAR-10, ResNet-20", {"partition": "dirichlet:0.1"}),
    f"{RARE}, prevalence declared": (RARE, {"class_weights": "balanced", "prevalence": [0.99, 0.01]}),
} | {name: (name, {}) for name in (*OTHER_FILES, *FILES)}
SETTING_EPSILONS = (0.5, 2.0, 10.0, math.inf)
REGRESSION = "logistic regression"  # of scikit-learn: C = 1, the same records, no noise
SHORT_ROUNDS = (1, 3, 10)
SHORT = ("CIFAR-10, ResNet-20", "CIFAR-10, ResNet-20, 1,000 records", "Fashion-MNIST, ResNet-44", "Adult", "digits")
MEANS, STATISTICS = "noisy class means", "noised statistics"
OBJECTIVE = "objective perturbation"
SHARES, RIDGES = (0.05, 0.2, 0.5), tuple(10.0**k for k in np.arange(-3, 2.5, 0.5))  # tried for `STATISTICS`


CORRECTED = (
    "digits",
    "CIFAR-10, ResNet-20, 1,000 records",
    "Fashion-MNIST, ResNet-44, 1,000 records",
    "synthetic(1,1)",
    "Adult",
    "CIFAR-10, ResNet-44",
    HUNDRED,
)
CORRECTIONS = {  # is there a ridge, and is the curvature measured?
    "neither": (False, False),
    "ridge": (True, False),
    "measured curvature": (False, True),
    "both": (True, True),
}


class Cell(NamedTuple):
    """One row of a table under one budget and trust model: accuracy after each of ROUNDS, and its standard error."""

    data: str
    row: str
    trust: str
    epsilon: float
    accuracy: tuple[float, ...]
    error: tuple[float, ...] = ()


def read(name: str, folder: Path, records: str = "record") -> Dataset:
    file, stats, change, _ = (FILES | OTHER_FILES)[name]
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
    elif change.startswith("pairs"):  # one record of each set: as many classes as pairs of labels
        dataset = paired(dataset, so.load(str(folder / change.split()[1]), normalize="none"))
    elif change.startswith("rare"):  # class 1 keeps this share of the training records
        ones = np.flatnonzero(dataset.y_train == 1)
        kept = rng.permutation(ones)[: round(float(change.split()[1]) * (len(x) - len(ones)))]
        kept = np.sort(np.concatenate([np.flatnonzero(dataset.y_train != 1), kept]))
        dataset = dataset._replace(x_train=by_record(x[kept]), y_train=dataset.y_train[kept], x_test=by_record(test))
    elif records in ("no mean", "no square roots"):
        dataset = dataset._replace(x_train=scaled(x, records), x_test=scaled(test, records))
    return dataset


def paired(one: Dataset, other: Dataset, records: int = 25_000) -> Dataset:
    """Records of both side by side, and their labels as one."""
    parts = {}
    for part in ("train", "test"):
        x, y = ([getattr(each, f"{key}_{part}")[:records] for each in (one, other)] for key in "xy")
        count = min(map(len, y))
        parts[f"x_{part}"] = by_record(np.concatenate([each[:count] for each in x], 1))
        parts[f"y_{part}"] = len(other.classes) * y[0][:count] + y[1][:count]
    return one._replace(**parts, classes=tuple(f"{a}, {b}" for a in one.classes for b in other.classes))


def scaled(x: np.ndarray, records: str) -> np.ndarray:
    """Records of norm RADIUS without one of the steps of `by_record`."""
    if records == "no mean" and (x >= 0).all():
        x = np.sqrt(x)
    if records == "no square roots":
        x = x - x.mean(1, keepdims=True)
    return x * (RADIUS / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-9)).astype(np.float32)


def about_mean(dataset: Dataset) -> Dataset:
    """Records about the exact mean of the training records, each scaled to norm RADIUS."""
    mean = dataset.x_train.mean(0)
    about = [scaled(x - mean, "none") for x in (dataset.x_train, dataset.x_test)]
    return dataset._replace(x_train=about[0], x_test=about[1])


class Job(NamedTuple):
    """One run to do: options of a method, budget and seed."""

    options: Mapping[str, Any]
    epsilon: float
    seed: int


def trained(
    dataset: Dataset, name: str, device: str, jobs: Sequence[Job], at: Sequence[int] = ROUNDS, **keys: Any
) -> list[tuple[float, ...]]:
    """The accuracy, or the AUC of a rare class, of every run after each of the rounds `at`."""
    clients, metric = (FILES | OTHER_FILES)[name][3], "auc" if "1 %" in name else "accuracy"
    split = {"partition": "dirichlet:0.5", "clients": clients} if clients else {"partition": "by-site"}
    common = {"rounds": at[-1], "normalize": "none", "calibrate": 0.0, **split, **keys}
    specs = [
        Spec.of({**common, **job.options, "epsilon": job.epsilon, "seed": job.seed, "split_seed": job.seed})
        for job in jobs
    ]
    results = run_many(specs, dataset, device=device, at=at, metric=metric)
    return [tuple(each.scores[t] for t in at) for each in results]


def mean(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(round(statistics.mean(each), 4) for each in zip(*samples, strict=True))


def error(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The standard error of each mean; none where seeds are few."""
    if len(samples) < len(SEEDS):
        return ()
    return tuple(round(statistics.stdev(each) / math.sqrt(len(samples)), 4) for each in zip(*samples, strict=True))


def auto_cells(
    dataset: Dataset,
    name: str,
    trust: str,
    device: str,
    row: str,
    epsilons: Sequence[float],
    at: Sequence[int] = ROUNDS,
    setting: str | None = None,
) -> list[Cell]:
    options = {key: value for key, value in VARIANTS.get(row, {}).items() if key != "records"}
    options |= SETTINGS[setting][1] if setting else {}
    many = SEEDS if row == PLAIN and (setting is None or name == RARE) else FEW_SEEDS
    seeds = many[:1] if name == HUNDRED else many
    jobs = [Job(options, e, s) for e in epsilons for s in seeds]
    found = trained(dataset, name, device, jobs, at, method="auto", trust=trust)
    cells = []
    for epsilon in epsilons:
        samples = [each for job, each in zip(jobs, found, strict=True) if job.epsilon == epsilon]
        cells.append(Cell(setting or name, row, trust, epsilon, mean(samples), error(samples)))
    return cells


def rival_cells(
    dataset: Dataset,
    name: str,
    trust: str,
    device: str,
    method: str,
    epsilons: Sequence[float] = EPSILONS,
    setting: str | None = None,
) -> list[Cell]:
    """The rival with the settings that are best at each round with the tuning seed."""
    keys = SETTINGS[setting][1] if setting else {}
    options = [each | keys for each in RIVALS[method]]
    seeds = FEW_SEEDS if name == UNSEEN else SEEDS

    def accuracies(jobs: Sequence[Job]) -> list[tuple[float, ...]]:
        return trained(dataset, name, device, jobs, method=method, clip=5.0, trust=trust)

    tried = [Job(each, e, TUNING_SEED) for e in epsilons for each in options]
    scores = list(zip(tried, accuracies(tried), strict=True))
    tuned = [
        max((pair for pair in scores if pair[0].epsilon == e), key=lambda pair: pair[1][k])[0]
        for e in epsilons
        for k in range(len(ROUNDS))
    ]
    found = iter(accuracies([job._replace(seed=seed) for job in tuned for seed in seeds]))
    cells = []
    for epsilon in epsilons:
        # The settings that are best at round k are judged at round k alone.
        samples = list(zip(*([next(found)[k] for _ in seeds] for k in range(len(ROUNDS))), strict=True))
        cells.append(Cell(setting or name, method, trust, epsilon, mean(samples), error(samples)))
    return cells


def regression_cell(dataset: Dataset, name: str) -> Cell:
    """The test accuracy, or AUC, of logistic regression without privacy."""
    fitted = LogisticRegression(C=1.0, max_iter=1000).fit(dataset.x_train, dataset.y_train)
    score = float(fitted.score(dataset.x_test, dataset.y_test))
    if "1 %" in name:
        score = float(roc_auc_score(dataset.y_test, fitted.decision_function(dataset.x_test)))
    return Cell(name, REGRESSION, "", math.inf, (round(score, 5),))


def recipe_cells(dataset: Dataset, name: str, trust: str, epsilons: Sequence[float]) -> list[Cell]:
    """Recipes of one round: class means, and regression on indicators of the classes from noised moments.

    These are the methods dp-class-means and dp-statistics with the same noise law, computed from one pair of moments.
    All records have one norm, so every gradient at zero is cut by the same factor, and the clip only sets a scale. The
    share of the budget for A and the ridge are those that are best on the test records with the tuning seed.
    """
    x, test = ((np.c_[part, np.ones(len(part))]).astype(np.float64) for part in (dataset.x_train, dataset.x_test))
    classes = len(dataset.classes)
    labels = np.eye(classes)[dataset.y_train] - 1 / classes
    A, G = x.T @ x / len(x), x.T @ labels / len(x)
    G *= 5.0 / max(5.0, math.sqrt((1 - 1 / classes) * np.trace(A)))
    clients, cells = FILES[name][3], []
    for epsilon in epsilons:
        keys = {"epsilon": epsilon, "trust": trust, "clients": clients, "partition": "dirichlet:0.5", "split_seed": 1}
        run = resolve(Spec.of({"method": "auto", "rounds": 1, "normalize": "none", **keys}))
        plan = run.plan(run.records(dataset).sizes)
        stds = [calibration.aggregate_std(plan, 0, k) for k in (0, 1)]
        means, found = dict[int, float](), dict[tuple[int, float, float], float]()
        for seed in (TUNING_SEED, *FEW_SEEDS):
            rng = np.random.default_rng(seed)
            z, noise = rng.normal(size=A.shape), rng.normal(size=G.shape)
            g = G + stds[0] * math.sqrt(1 - SHARE_OF_ONE_ROUND) * noise
            means[seed] = float(((test @ g).argmax(1) == dataset.y_test).mean())
            for share in SHARES:
                g = G + stds[0] * math.sqrt((1 - SHARE_OF_ONE_ROUND) / (1 - share)) * noise
                values, V = np.linalg.eigh(A + stds[1] * math.sqrt(SHARE_OF_ONE_ROUND / share) * (z + z.T) / 2)
                for ridge in RIDGES:
                    theta = V @ ((V.T @ g) / (values.clip(0) + ridge)[:, None])
                    found[seed, share, ridge] = float(((test @ theta).argmax(1) == dataset.y_test).mean())
        best = max(itertools.product(SHARES, RIDGES), key=lambda pair: found[TUNING_SEED, *pair])
        for row, samples in (
            (MEANS, [means[s] for s in FEW_SEEDS]),
            (STATISTICS, [found[s, *best] for s in FEW_SEEDS]),
        ):
            cells.append(Cell(name, row, trust, epsilon, (round(statistics.mean(samples), 5),)))
    return cells


def objective_cells(dataset: Dataset, name: str, device: str, epsilons: Sequence[float]) -> list[Cell]:
    """Objective perturbation by one party that holds all records. Its ridge is tuned as those of `recipe_cells`."""
    x, test = ((np.c_[part, np.ones(len(part))]).astype(np.float64) for part in (dataset.x_train, dataset.x_test))
    classes, radius = len(dataset.classes), math.hypot(RADIUS, 1)
    records = [torch.as_tensor(part, device=device) for part in (x, np.eye(classes)[dataset.y_train])]
    cells = []

    def accuracy(epsilon: float, share: float, seed: int) -> float:
        ridge = objective.ridge_of(radius, classes, share * (1 - objective.OUTPUT) * epsilon)
        theta = objective.fitted(*records, epsilon, 1e-5, radius, ridge, seed)
        return float(((test @ theta).argmax(1) == dataset.y_test).mean())

    for epsilon in epsilons:
        best = max(one_party.SHARES, key=lambda share: accuracy(epsilon, share, TUNING_SEED))
        samples = [accuracy(epsilon, best, seed) for seed in FEW_SEEDS]
        cells.append(Cell(name, OBJECTIVE, TRUSTS[1], epsilon, (round(statistics.mean(samples), 5),)))
    return cells


def measured(part: str, folder: Path, device: str, only: str | None) -> Iterator[list[Cell]]:
    """The cells of a part, in pieces; `only`: of one data set or setting."""

    def chosen(names: Iterable[str]) -> list[str]:
        return [name for name in names if only in (None, name)]

    if part in ("auto", "rivals"):
        for name in chosen(FILES):
            dataset = read(name, folder)
            for trust in TRUSTS:
                if part == "auto":
                    yield auto_cells(dataset, name, trust, device, PLAIN, EPSILONS)
                for method in RIVALS if part == "rivals" else ():
                    yield rival_cells(dataset, name, trust, device, method)
    elif part == "ablation":
        for name, row in itertools.product(chosen(ABLATED), VARIANTS):
            dataset = read(name, folder, VARIANTS[row].get("records", "record"))
            for trust in TRUSTS:
                yield auto_cells(dataset, name, trust, device, row, ENDS)
    elif part == "settings":
        for setting in chosen(SETTINGS):
            name = SETTINGS[setting][0]
            dataset = read(name, folder)
            if setting == name:
                yield [regression_cell(dataset, name)]
            epsilons = (math.inf,) if setting in FILES else SETTING_EPSILONS
            for trust in TRUSTS if epsilons != (math.inf,) else TRUSTS[1:]:
                yield auto_cells(dataset, name, trust, device, PLAIN, epsilons, setting=setting)
                for method in RARE_RIVALS if name in (RARE, UNSEEN) else ():
                    yield rival_cells(dataset, name, trust, device, method, epsilons[:-1], setting)
    elif part == "centred":
        for name in chosen(CENTRED_SETS):
            dataset = about_mean(read(name, folder))
            for trust, method in itertools.product(TRUSTS, RARE_RIVALS):
                cells = rival_cells(dataset, name, trust, device, method)
                yield [cell._replace(row=method + CENTRED) for cell in cells]
    elif part == "objective":
        for name in chosen(SHORT):
            yield objective_cells(read(name, folder), name, device, EPSILONS)
    elif part == "corrections":
        for name, row in itertools.product(chosen(CORRECTED), CORRECTIONS):
            with corrected(*CORRECTIONS[row]):
                epsilons = SETTING_EPSILONS[-1:] if name == HUNDRED else SETTING_EPSILONS
                yield auto_cells(read(name, folder), name, TRUSTS[1], device, row, epsilons)
    else:
        for name, trust in itertools.product(chosen(SHORT), TRUSTS):
            dataset = read(name, folder)
            yield recipe_cells(dataset, name, trust, EPSILONS)
            for rounds in SHORT_ROUNDS:
                yield auto_cells(dataset, name, trust, device, of_rounds(rounds), EPSILONS, at=(rounds,))


@contextmanager
def corrected(ridge: bool, curvature: bool) -> Iterator[None]:
    """Train without a ridge, or without measuring the curvature."""
    with ExitStack() as changes:
        if not ridge:
            changes.enter_context(mock.patch.object(estimates, "TRAINED_LOGIT", math.inf))
        if not curvature:
            changes.enter_context(mock.patch.object(KALMAN, "unmeasured", return_value=()))
        yield


def of_rounds(rounds: int) -> str:
    """The row of runs that have so many rounds in all."""
    return f"auto, T = {rounds}"


def main(folder: Path, device: str, parts: Sequence[str], only: str | None) -> None:
    """Measure parts, and keep all other figures. The file is written after each piece."""
    old = json.loads(OUT.read_text()) if OUT.exists() else {"parts": {}, "rows": []}
    cells = {cell[:4]: cell for cell in read_rows(old["rows"])}
    command = f"python benchmarks/auto.py DATA_DIR --device {device}"
    commands = old["parts"] | {part: f"{command} --only {part}" for part in parts}
    with Progress(console=Console(stderr=True)) as progress:
        for part in parts:
            task = progress.add_task(part, total=None)
            for new in measured(part, folder, device, only):
                cells |= {cell[:4]: cell for cell in new}
                rows = written_rows(list(cells.values()))
                document = {"provenance": provenance(command), "parts": commands, "rows": rows}
                OUT.write_text(json.dumps(document, separators=(",", ":")) + "\n")
                progress.advance(task)
    OUT.with_suffix(".md").write_text(table(commands, list(cells.values())))


def written_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Cells of one data set, row and trust model together: [data, row, trust, epsilons, means, errors], in percent."""
    rows: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell[:3], []).append(cell)

    def listed(figures: Iterable[Sequence[float]]) -> str:
        return ",".join(" ".join(f"{100 * each:.2f}" for each in cell) for cell in figures)

    return [
        [*key, ",".join(f"{c.epsilon:g}" for c in row), listed(c.accuracy for c in row), listed(c.error for c in row)]
        for key, row in rows.items()
    ]


def read_rows(rows: Sequence[Sequence[str]]) -> list[Cell]:
    return [
        Cell(data, row, trust, float(epsilon), *(tuple(float(each) / 100 for each in part.split()) for part in parts))
        for data, row, trust, *lists in rows
        for epsilon, *parts in zip(*(each.split(",") for each in lists), strict=True)
    ]


def shown(accuracy: Sequence[float] | None) -> str:
    return "" if accuracy is None else " → ".join(f"{100 * each:.1f}" for each in accuracy)


def heading(title: str, columns: Sequence[str], *text: str) -> list[str]:
    return ["", f"## {title}", "", *(line for each in text for line in (each, "")), *head(columns)]


def head(columns: Sequence[str]) -> list[str]:
    return ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]


def line(row: str, figures: Iterable[Sequence[float] | None]) -> str:
    return f"| {row} | " + " | ".join(map(shown, figures)) + " |"


def table(commands: Mapping[str, str], cells: Sequence[Cell]) -> str:
    figures = {cell[:4]: cell.accuracy for cell in cells}
    lines = [
        "# auto, untuned: accuracy in % at round 10 → round 70",
        "",
        ", ".join(f"`{each}`" for each in commands.values())
        + ". 70 rounds, δ = 1e-5, replace-one, Dirichlet 0.5 over 20 clients (10 for digits and "
        '1,000 records, 30 sites for synthetic), pooled divisor. Means of ten seeds; from "Few rounds" on '
        "of three, but for the rare class.",
        "",
        f"The rival is, at each round, the best of {', '.join(RIVALS)} with the same records, each tuned for each cell "
        f"over {', '.join(str(len(each)) for each in RIVALS.values())} settings on the test records with another seed. "
        "Nobody pays for that tuning. `auto` and rivals have the same budget; `auto` pays from it for the mean of the "
        "records, by which it centres them, and rivals do not centre.",
    ]
    lines += mean_table(figures, {cell[:4]: cell.error for cell in cells})
    columns = [f"ε = {e:g}" for e in EPSILONS]
    for trust in TRUSTS:
        lines += heading(trust, columns)
        for name in FILES:
            best = [
                [max(figures[name, method, trust, epsilon][k] for method in RIVALS) for k in range(len(ROUNDS))]
                for epsilon in EPSILONS
            ]
            lines += [line(name, (figures[name, PLAIN, trust, epsilon] for epsilon in EPSILONS))]
            lines += [line("*best tuned rival at each round*", best)]
    lines += centred_table(figures) + short_tables(figures) + setting_tables(figures) + correction_table(figures)
    ends = list(itertools.product(ENDS, TRUSTS))
    for name in ABLATED:
        title = f"{name}: ablation, and sensitivity to each constant"
        lines += heading(title, [f"ε = {e:g}, {trust}" for e, trust in ends], "Three seeds, the same for all rows.")
        for row in VARIANTS:
            lines.append(line(row, (figures.get((name, row, trust, e)) for e, trust in ends)))
    return "\n".join(lines) + "\n"


def mean_table(
    figures: Mapping[tuple[str, str, str, float], Sequence[float]],
    errors: Mapping[tuple[str, str, str, float], Sequence[float]],
) -> list[str]:
    """How far `auto` is ahead of each rival, and of the best one of each cell, on average over the data sets."""

    def gap(name: str, trust: str, epsilon: float, k: int, methods: Sequence[str]) -> tuple[float, float]:
        """The points by which `auto` is ahead of the best of the methods, and their standard error."""
        best = max(methods, key=lambda method: figures[name, method, trust, epsilon][k])
        own, other = (name, PLAIN, trust, epsilon), (name, best, trust, epsilon)
        return 100 * (figures[own][k] - figures[other][k]), 100 * math.hypot(errors[own][k], errors[other][k])

    def shown_means(trust: str, methods: Sequence[str]) -> Iterator[str]:
        for epsilon in EPSILONS:
            means = [statistics.mean(gap(n, trust, epsilon, k, methods)[0] for n in FILES) for k in range(len(ROUNDS))]
            yield " → ".join(f"{each:+.1f}" for each in means)

    counts = []
    for k, number in enumerate(ROUNDS):
        gaps = [gap(*cell, k, list(RIVALS)) for cell in itertools.product(FILES, TRUSTS, EPSILONS)]
        ahead = sum(points > 0 for points, _ in gaps), sum(points > 2 * doubt for points, doubt in gaps)
        behind = [points for points, doubt in gaps if points < -2 * doubt]
        counts.append(
            f"At round {number} it is ahead of the best rival of a cell in {ahead[0]} of {len(gaps)} cells, in "
            f"{ahead[1]} by more than two standard errors. It is more than two standard errors behind in "
            f"{len(behind)}, and in {sum(points < -0.3 for points in behind)} of these by more than 0.3 points "
            f"({statistics.mean(points for points, _ in gaps):+.1f} on average)."
        )
    text = f"Points by which `auto` is ahead, mean over {len(FILES)} data sets. {' '.join(counts)}"
    lines = heading("Mean over the data sets", [f"ε = {e:g}" for e in EPSILONS], text)
    for trust in TRUSTS:
        for method in RIVALS:
            lines.append(f"| of {method}, {trust} | " + " | ".join(shown_means(trust, [method])) + " |")
        lines.append(f"| of the best of each cell, {trust} | " + " | ".join(shown_means(trust, list(RIVALS))) + " |")
    return lines


def centred_table(figures: Mapping[tuple[str, str, str, float], Sequence[float]]) -> list[str]:
    """What rivals have with records about their mean."""
    text = (
        f"The better one of {' and '.join(RARE_RIVALS)}, tuned alike, on records about the exact mean of all training "
        "records, for which they pay nothing: how much of the lead of `auto` is its centre."
    )
    lines = heading("Rivals on centred records", [f"ε = {e:g}" for e in EPSILONS], text)
    for name, trust in itertools.product(CENTRED_SETS, TRUSTS):
        rows = [[figures.get((name, method + CENTRED, trust, e)) for e in EPSILONS] for method in RARE_RIVALS]
        best = [
            None if None in pair else [max(each) for each in zip(*pair, strict=True)]  # type: ignore[misc]
            for pair in zip(*rows, strict=True)
        ]
        lines.append(line(f"{name}, {trust}", (figures[name, PLAIN, trust, e] for e in EPSILONS)))
        lines.append(line("*better rival, centred for free*", best))
    return lines


def short_tables(figures: Mapping[tuple[str, str, str, float], Sequence[float]]) -> list[str]:
    """Runs of few rounds, at their end."""
    text = (
        "Accuracy after the last round of runs of T rounds in all. The recipes have one round: class means are the "
        "noised gradient at zero; noised statistics are a regression on indicators of the classes from A and that "
        f"gradient, with the best of {len(SHARES)} shares for A and {len(RIDGES)} ridges on the test records."
    )
    central = (
        "Objective perturbation (Kifer, Smith, Thakurta 2012; Iyengar et al. 2019) needs more than sums: one trusted "
        "party holds all records. It stands here as the central recipe, is not certified (`sordino.studies.objective` "
        f"has the bound), and has the best of {len(one_party.SHARES)} ridges on the test records."
    )
    lines: list[str] = []
    for trust in TRUSTS:
        texts = (text, central) if trust == TRUSTS[1] else (text,)
        lines += heading(f"Few rounds, {trust}", [f"ε = {e:g}" for e in EPSILONS], *texts)
        for name in SHORT:
            for row in (*map(of_rounds, SHORT_ROUNDS), MEANS, STATISTICS):
                lines.append(line(f"{name}: {row}", (figures.get((name, row, trust, e)) for e in EPSILONS)))
            if any((name, OBJECTIVE, trust, e) in figures for e in EPSILONS):
                found = (figures.get((name, OBJECTIVE, trust, e)) for e in EPSILONS)
                lines.append(line(f"{name}: {OBJECTIVE}", found))
    return lines


def setting_tables(figures: Mapping[tuple[str, str, str, float], Sequence[float]]) -> list[str]:
    """Other settings, and runs without noise beside logistic regression."""
    text = (
        "CIFAR-10, ResNet-20, unless another set is named. Of the rare class the figures are AUC in %. Prevalence "
        "declared: classes have balanced weights, which follow from a public prevalence. 100 classes: records "
        "of both sets side by side, 25,000 pairs, seed 1. EfficientNet: 1,280 features that no choice has seen; three "
        "seeds for all."
    )
    lines = heading("Other settings", [f"ε = {e:g}" for e in SETTING_EPSILONS], text)
    for setting, trust in itertools.product((s for s in SETTINGS if s not in FILES), TRUSTS):
        for row in (PLAIN, *(RARE_RIVALS if SETTINGS[setting][0] in (RARE, UNSEEN) else ())):
            found = [figures.get((setting, row, trust, e)) for e in SETTING_EPSILONS]
            label = f"{setting}, {trust}" + (f": {row}, tuned" if row != PLAIN else "")
            lines += [line(label, found)] if any(found) else []
    text = "Logistic regression is scikit-learn's optimum with C = 1 on the same records."
    lines += heading("Without noise", [PLAIN, REGRESSION], text)
    for name in (name for name, (data, _) in SETTINGS.items() if name == data):
        own, other = figures.get((name, PLAIN, TRUSTS[1], math.inf)), figures.get((name, REGRESSION, "", math.inf))
        lines += [line(name, (own, other))] if own and other else []
    return lines


def correction_table(figures: Mapping[tuple[str, str, str, float], Sequence[float]]) -> list[str]:
    """The ridge and the measured curvature, each alone, with the same noise."""
    text = (
        f"{TRUSTS[1]}, the same noise in all rows of a data set. The last four sets had no part in the choice of the "
        "constants."
    )
    lines = heading("Ridge and measured curvature", [f"ε = {e:g}" for e in SETTING_EPSILONS], text)
    for name, row in itertools.product(CORRECTED, CORRECTIONS):
        found = (figures.get((name, row, TRUSTS[1], e)) for e in SETTING_EPSILONS)
        lines.append(line(f"{name}: {row}", found))
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=PARTS, help="renew this part, and keep the others")
    parser.add_argument("--data", help="renew the rows of this data set or setting, and keep the others")
    arguments = parser.parse_args()
    parts = PARTS if arguments.only is None else (arguments.only,)
    main(arguments.folder, arguments.device, parts, arguments.data)
