"""`auto`, untuned, on all available data; an ablation of each part, and each constant halved and doubled.

    python benchmarks/auto.py DATA_DIR     # results/auto.json and .md

DATA_DIR holds the frozen features, their public statistics, and the files of MNIST and Adult. 70 rounds, delta 1e-5,
replace-one, Dirichlet 0.5; seeds change partition and noise. The best tuned rivals come from results/table3 (five
seeds) and results/auto (two). Runs that results/auto.json holds already are not run again, if the code is the same.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import statistics
import sys
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import sordino as so
from provenance import provenance
from sordino.data.preprocess import RADIUS, by_record, of_roots, whiten
from sordino.data.sources import Dataset
from sordino.methods.auto import auto
from sordino.rules import kalman

ROOT = Path(__file__).parents[1]
KALMAN_MODULE = import_module("sordino.rules.kalman")  # `sordino.rules` exports the function of the same name
OUT = ROOT / "results" / "auto.json"
EPSILONS = (0.5, 1.0, 5.0, 10.0)
TRUSTS = ("untrusted-server", "secure-aggregation")
SEEDS = (1, 2)
ROUNDS = (10, 70)
FILES = {  # file, public statistics, clients
    "CIFAR-10, ResNet-20": ("cifar10_resnet20.npz", None, 20),
    "CIFAR-10, ResNet-20, public statistics": ("cifar10_resnet20.npz", "public_stats_resnet20.npz", 20),
    "CIFAR-10, ResNet-44": ("cifar10_resnet44.npz", None, 20),
    "CIFAR-10, ResNet-44, public statistics": ("cifar10_resnet44.npz", "public_stats_resnet44.npz", 20),
    "Fashion-MNIST, ResNet-44": ("fashion_mnist_resnet44.npz", None, 20),
    "Fashion-MNIST, ResNet-44, public statistics": ("fashion_mnist_resnet44.npz", "public_stats_resnet44.npz", 20),
    "Adult": ("a9a", None, 20),
    "synthetic(1,1)": ("synthetic(1,1)", None, None),
    "digits": ("digits", None, 10),
    "MNIST, pixels": ("mnist", None, 10),
}
SLOW = "MNIST, pixels"  # of seeds 1 and 2 alone, and after all others
LEVERS: dict[str, dict[str, Any]] = {
    "all": {},
    "equal weight per client (client-mean)": {"divisor": "client-mean"},
    "no square roots": {"records": "no square roots"},
    "record's mean not subtracted": {"records": "no mean"},
    "raw records": {"records": "none"},
    "no covariance": {"covariance_share": 1e-9},
    "no doubt factor": {"doubt": 0.0},
    "same budget in all rounds": {"early_share": 0.0},
    "steps limited by the prior": {"reach": 0.0},
}
SCAN = {"clip": 5.0, "prior": 1.0, "doubt": 10.0, "early_share": 0.3, "covariance_share": 0.05, "reach": 2.0}
VARIANTS = LEVERS | {f"{key} {factor:g}": {key: factor} for key, v in SCAN.items() for factor in (v / 2, v * 2)}
FOLDER = Path()


@lru_cache(maxsize=1)
def read(name: str, records: str) -> Dataset:
    file, stats, _ = FILES[name]
    path = str(FOLDER / file) if file.endswith(".npz") else file
    public = None if stats is None else FOLDER / stats
    dataset = so.load(path, public_stats=public, normalize="record" if records == "record" else "none", data_dir=FOLDER)
    if records in ("record", "none"):
        return dataset

    def scaled(x: np.ndarray) -> np.ndarray:
        if records == "no mean" and (x >= 0).all():
            x = np.sqrt(x)
        if records == "no square roots":
            x = x - x.mean(1, keepdims=True)
        return x * (RADIUS / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-9)).astype(np.float32)

    return dataset._replace(x_train=scaled(dataset.x_train), x_test=scaled(dataset.x_test))


def one(job: tuple[str, str, float, str, int]) -> dict[str, float]:
    name, variant, epsilon, trust, seed = job
    options = dict(VARIANTS[variant])
    dataset, divisor = read(name, options.pop("records", "record")), options.pop("divisor", "pooled")
    KALMAN_MODULE.SATURATING_LOGIT = options.pop("reach", SCAN["reach"])
    clients = FILES[name][2]
    which = so.split(dataset, "dirichlet:0.5" if clients else "by-site", clients=clients, seed=seed)
    records = so.Records.of(dataset.x_train, dataset.y_train, which)
    model = so.Linear(dataset.x_train.shape[1], len(dataset.classes))
    privacy = so.Privacy(epsilon, trust=trust)
    plan = so.Plan(so.build("auto", **options), 70, records.sizes, privacy, divisor=divisor)
    accuracies = {}
    for this_round in so.simulate.run(plan, model, records, so.source(seed)):
        if this_round.t + 1 in ROUNDS:
            right = model.predict(this_round.model, dataset.x_test).numpy() == dataset.y_test
            accuracies[str(this_round.t + 1)] = float(right.mean())
    return accuracies


def begin(folder: str) -> None:
    global FOLDER
    FOLDER = Path(folder)
    torch.set_num_threads(1)


def jobs() -> list[tuple[str, str, float, str, int]]:
    main = [(name, "all", *rest) for name, *rest in itertools.product(FILES, EPSILONS, TRUSTS, SEEDS)]
    ends = list(itertools.product((0.5, 10.0), TRUSTS, (1,)))
    varied = [(n, v, *e) for n in ("CIFAR-10, ResNet-20", "Adult") for v in VARIANTS if v != "all" for e in ends]
    return [j for j in main if j[0] != SLOW] + varied + [j for j in main if j[0] == SLOW and j[4] == 1]


def main(folder: str) -> None:
    origin = provenance("python benchmarks/auto.py DATA_DIR")  # of the code that is loaded now
    parts = [auto, kalman, by_record, of_roots, whiten]
    code = hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()
    old = json.loads(OUT.read_text()) if OUT.exists() else {}
    runs: dict[str, dict[str, float]] = old.get("runs", {}) if old.get("code") == code else {}
    todo = [job for job in jobs() if json.dumps(job) not in runs]
    with get_context("spawn").Pool(2, begin, (folder,)) as pool:
        for k, accuracies in enumerate(track(pool.imap(one, todo, 8), total=len(todo), console=Console(stderr=True))):
            runs[json.dumps(todo[k])] = accuracies
            if k % 20 == 0 or k == len(todo) - 1:
                OUT.write_text(json.dumps({"provenance": origin, "code": code, "runs": runs}, indent=1) + "\n")
    best = {(n, t): best_of(ROOT / "results" / file.format(t)) for n, file in RIVALS.items() for t in TRUSTS}
    OUT.with_suffix(".md").write_text(table(origin, {tuple(json.loads(k)): v for k, v in runs.items()}, best))


RIVALS = {  # comparisons of the tuned methods
    "CIFAR-10, ResNet-20": "table3/{}.json",
    "Fashion-MNIST, ResNet-44": "auto/fashion_{}.json",
    "Adult": "auto/adult_{}.json",
}


def best_of(path: Path) -> dict[tuple[float, int], float]:
    """Of each budget and round: the best mean of any method but auto."""
    samples: dict[tuple[float, int, str], list[float]] = {}
    for run in json.loads(path.read_text())["runs"] if path.exists() else []:
        for t in ROUNDS:
            if run["method"] != "auto":
                samples.setdefault((run["epsilon"], t, run["label"]), []).append(run["accuracy"][str(t)])
    best: dict[tuple[float, int], float] = {}
    for (epsilon, t, _), values in samples.items():
        best[epsilon, t] = max(best.get((epsilon, t), 0.0), statistics.mean(values))
    return best


def cell(runs: dict, name: str, variant: str, epsilon: float, trust: str) -> str:
    accuracies = [v for k, v in runs.items() if k[:4] == (name, variant, epsilon, trust)]
    return " → ".join(f"{100 * statistics.mean(f[str(t)] for f in accuracies):.1f}" for t in ROUNDS)


def table(origin: dict, runs: dict, best: dict) -> str:
    lines = [
        "# auto, untuned: accuracy in % at round 10 → round 70",
        "",
        f"`{origin['command']}`. 70 rounds, δ = 1e-5, replace-one, Dirichlet 0.5 over 20 clients (10 for MNIST and "
        "digits, 30 sites for synthetic), pooled divisor. Means of two to five seeds (MNIST: one), "
        "each in results/auto.json.",
    ]
    for trust in TRUSTS:
        lines += [
            "",
            f"## {trust}",
            "",
            "| data | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
            "|---" * 5 + "|",
        ]
        for name in FILES:
            lines.append(f"| {name} | " + " | ".join(cell(runs, name, "all", e, trust) for e in EPSILONS) + " |")
            if rival := best.get((name, trust)):
                cells = (" → ".join(f"{100 * rival[e, t]:.1f}" for t in ROUNDS) for e in EPSILONS)
                lines.append("| *best tuned rival at each round* | " + " | ".join(cells) + " |")
    ends = list(itertools.product((0.5, 10.0), TRUSTS))
    tried = sorted({k[0] for k in runs if k[1] != "all"}, key=list(FILES).index)
    for name in tried:
        lines += ["", f"## {name}: ablation, and sensitivity to each constant", ""]
        lines += ["Seed 1.", "", "| | " + " | ".join(f"ε = {e:g}, {t}" for e, t in ends) + " |"]
        lines.append("|---" * (len(ends) + 1) + "|")
        once = {k: v for k, v in runs.items() if k[4] == 1}
        lines += [f"| {v} | " + " | ".join(cell(once, name, v, *end) for end in ends) + " |" for v in VARIANTS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
