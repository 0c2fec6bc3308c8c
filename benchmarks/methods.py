"""Every method with its default options, untuned, on digits and on CIFAR-10 features. Writes results/methods.{json,md}.

    python benchmarks/methods.py ../shared/data [--jobs 8]

Finished rows are kept in runs/methods.jsonl, so that it can be stopped, and go on.
Defaults were chosen on digits: read this as "it runs and learns", not as a contest. Tuned comparisons are elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import track

from provenance import provenance
from sordino.methods import REGISTRY, build
from sordino.training import run
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "methods.jsonl"
SEEDS = (1, 2, 3)


def command(method: str, keys: dict[str, Any]) -> str:
    flags = {"data": "--data", "public_stats": "--public-stats", "clients": "--clients", "epsilon": "--epsilon"}
    words = [f"{flags[k]} {v}" if k in flags else f"--set {k}={v}" for k, v in keys.items()]
    return " ".join(["sordino run --method", method, *words, "--seed S"])


def measure(method: str, keys: dict[str, Any], folder: str) -> dict[str, Any]:
    """Mean accuracy over seeds after the method's own number of rounds."""
    keys = dict(keys) if build(method).proves else {**keys, "epsilon": float("inf")}
    named = {k: v.replace("FOLDER", folder) if isinstance(v, str) else v for k, v in keys.items()}
    accuracies = []
    for seed in SEEDS:
        job = run.prepare(Spec.of({**named, "method": method, "seed": seed}))
        *_, last = run.rounds(job)
        accuracies.append(last["accuracy"])
    return {
        "method": method,
        "data": keys.get("data", "digits"),
        "epsilon": "inf" if not build(method).proves else 8.0,
        "rounds": job.plan.rounds,
        "accuracy": statistics.mean(accuracies),
        "std": statistics.stdev(accuracies),
        "samples": accuracies,
        "command": command(method, keys).replace("FOLDER", "../shared/data"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where cifar10_resnet20.npz and public_stats_resnet20.npz are")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args()
    folder = options.folder
    KEPT.parent.mkdir(exist_ok=True)
    cifar = {
        "data": "FOLDER/cifar10_resnet20.npz",
        "public_stats": "FOLDER/public_stats_resnet20.npz",
        "normalize": "l2",
        "clients": 20,
    }
    origin = provenance("python benchmarks/methods.py ../shared/data")
    jobs = [(name, keys) for name in REGISTRY for keys in ({}, cifar)]
    done = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    known = {(row["method"], row["data"]) for row in done}
    left = [(name, keys) for name, keys in jobs if (name, keys.get("data", "digits")) not in known]
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(measure, name, keys, folder) for name, keys in left]
        for each in track(as_completed(waiting), "methods", total=len(left)):
            done.append(each.result())
            with KEPT.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    rows = sorted(done, key=lambda row: list(REGISTRY).index(row["method"]))
    (ROOT / "results" / "methods.json").write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    (ROOT / "results" / "methods.md").write_text(page(rows))
    print(page(rows))


def page(rows: list[dict[str, Any]]) -> str:
    def cell(name: str, digits: bool) -> str:
        (row,) = (r for r in rows if r["method"] == name and (r["data"] == "digits") == digits)
        return f"{100 * row['accuracy']:.1f} ± {100 * row['std']:.1f}"

    lines = [
        "# Every method, untuned",
        "",
        f"`python benchmarks/methods.py ../shared/data`. Test accuracy in %, mean ± std of {len(SEEDS)} seeds:",
        "record level, ε = 8, δ = 1e-5, replace-one, untrusted server, default rounds of each method.",
        "Digits: 10 clients. CIFAR-10 ResNet-20 features: 20 clients, Dirichlet 0.5, centred and whitened by public",
        "statistics, each record scaled to length 1. **Options are defaults, chosen by hand on digits**: this shows",
        "that each method runs and learns, and does not rank them. `fednew` adds no noise.",
        "",
        "| method | rounds | digits | CIFAR-10 |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["method"] for row in rows):
        rounds = next(row["rounds"] for row in rows if row["method"] == name)
        lines.append(f"| `{name}` | {rounds} | {cell(name, True)} | {cell(name, False)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
