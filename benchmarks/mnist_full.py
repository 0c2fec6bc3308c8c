"""Four private estimators on MNIST with all 784 pixels: results/mnist_full.json; the site shows it under estimation.

    python benchmarks/mnist_full.py --data ../shared/data --repetitions 3

Even against odd digits for all four methods. With ten classes FedNewton is left out: a client's Hessian is
7,840 x 7,840. `benchmarks/estimation.py` has the same experiment on 7 x 7 averages, where FedNewton fits. Budgets are
written as they finish, and a second call with the same --repetitions goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from compact import text
from provenance import provenance
from sordino.studies import estimation
from sordino.studies import estimation_report as report
from sordino.studies.estimation import LABELS, MUS

OUT = Path(__file__).parents[1] / "results" / "mnist_full.json"
POOLED_STEPS = 500  # gradients of the model without privacy
TASKS = {"mnist-binary": "even or odd", "mnist-multiclass": "ten classes"}


def measured(task: str, data: estimation.Digits, mu: float, repetitions: int) -> dict[str, Any]:
    """Accuracy by method, and the CPU seconds of one repetition."""
    binary, accuracies, seconds = task == "mnist-binary", {}, {}
    for name in LABELS:
        if binary or name != "fednewton":
            began = time.process_time()
            accuracies |= estimation.mnist_accuracies(data, mu, binary=binary, repetitions=repetitions, methods=(name,))
            seconds[name] = estimation.rounded((time.process_time() - began) / repetitions)
    return {"task": task, **estimation.mnist_point(mu, accuracies), "seconds": seconds}


def page(document: dict[str, Any]) -> str:
    """The section of the site."""
    points = document["points"]
    counts = " or ".join(map(str, sorted({p["samples"] for p in points})))
    lines = [
        "## MNIST, all pixels",
        f"`{document['provenance']['command']}`; raw figures in `results/mnist_full.json`. As above, with 784 pixels "
        f"in place of 49 averages; ± the standard error over the noise of {counts} runs. Step and number of "
        "gradients are those of the averages, so they are not tuned for more features.",
    ]
    for task, title in TASKS.items():
        some = [p for p in points if p["task"] == task]
        if some:
            lines += [f"### {title.capitalize()}, all pixels", report.mnist_table(some, document["pooled"][task])]
    slow = [p["seconds"]["fednewton"] for p in points if "fednewton" in p["seconds"]]
    if slow:
        lines.append(
            f"FedNewton took up to {max(slow):.0f} CPU seconds per run with 784 parameters. With ten classes it has "
            f"7,840, and a Hessian takes 1,000 times as long to invert: some {max(slow) / 3.6:.0f} hours per run. It "
            f"was not run. The pooled models took {POOLED_STEPS} gradients."
        )
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder with MNIST's four files")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python benchmarks/mnist_full.py --data {options.data} --repetitions {options.repetitions}"
    old = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"pooled": {}, "points": []}
    points = [p for p in old["points"] if p["samples"] == options.repetitions]
    document = {"provenance": provenance(command), "pooled": old["pooled"], "points": points}
    for task in TASKS:
        data = estimation.mnist(options.data, binary=task == "mnist-binary", pool=1)
        if task not in document["pooled"]:
            document["pooled"][task] = estimation.mnist_pooled(data, binary=task == "mnist-binary", steps=POOLED_STEPS)
            OUT.write_text(text(document), encoding="utf-8")
        for mu in MUS:
            if all((p["task"], p["mu"]) != (task, mu) for p in points):
                points.append(measured(task, data, mu, options.repetitions))
                print(json.dumps(points[-1]), flush=True)
                OUT.write_text(text(document), encoding="utf-8")


if __name__ == "__main__":
    main()
