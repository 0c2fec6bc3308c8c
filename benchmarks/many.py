"""Many runs at once: 64 trainings of 20 clients x 2,500 records, 64 features, 10 classes, as one tensor axis.

    python benchmarks/many.py                   # against one after another; results/many_cpu/ARCHITECTURE.json
    python benchmarks/many.py --device cuda     # microseconds per run and round; results/many_cuda.json

Runs differ in step, budget and seed. Ratios are taken within one run of this script, alternating, best of several. On
the CPU they are compared with the committed ones of the same architecture first; see guard.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import compact
import guard
from provenance import provenance
from sordino.data.sources import Dataset
from sordino.training.batch import run_many
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
RUNS = 64
METHODS = ("dp-fedgd", "dp-fedsofim", "dp-fedadam")


def job() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60_000, 64)).astype(np.float32)
    y = (x @ rng.standard_normal((64, 10)) + rng.standard_normal((60_000, 10))).argmax(1)
    return Dataset("made up", x[:50_000], y[:50_000], x[50_000:], y[50_000:], None, tuple("0123456789"))


def specs(method: str, runs: int, rounds: int) -> list[Spec]:
    common = {"method": method, "clients": 20, "partition": "iid", "rounds": rounds, "clip": 10.0}
    return [
        Spec.of({**common, "lr": 0.05 * 1.05**k, "epsilon": 0.5 + 0.1 * k, "seed": k, "split_seed": 0})
        for k in range(runs)
    ]


def seconds(dataset: Dataset, wanted: list[Spec], device: str, most: int) -> tuple[float, float]:
    """Of everything (plans, partition, laying data on the device), and of the rounds alone."""
    began = time.perf_counter()
    trained = run_many(wanted, dataset, device=device, at=(), most=most)
    return time.perf_counter() - began, sum(each.seconds for each in trained)


def main(device: str, repeats: int, accept: bool) -> int:
    dataset, samples, per = job(), dict[str, list[float]](), dict[str, float]()
    short, long = (80, 2_000) if device == "cuda" else (5, 15)  # on a GPU: whole blocks of 16 rounds
    for method in METHODS:
        for rounds in (short, long):
            wanted = specs(method, RUNS, rounds)
            if device == "cuda" and rounds == short:
                seconds(dataset, wanted, device, RUNS)  # compile
            for _ in range(repeats):
                for how, most in (("together", RUNS), ("one by one", 1)):
                    if most == RUNS or device == "cpu":
                        whole, loop = seconds(dataset, wanted, device, most)
                        samples.setdefault(f"{method} {how}, {rounds} rounds, all", []).append(whole)
                        samples.setdefault(f"{method} {how}, {rounds} rounds, loop", []).append(loop)
        for how in ("together", "one by one") if device == "cpu" else ("together",):
            ends = [min(samples[f"{method} {how}, {rounds} rounds, loop"]) for rounds in (short, long)]
            per[f"{method} {how}"] = 1e6 * (ends[1] - ends[0]) / RUNS / (long - short)
    document = {
        "provenance": provenance(f"python benchmarks/many.py --device {device}") | guard.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "runs": RUNS,
        "how": f"a round more: (loop of {long} rounds - loop of {short}) / {long - short}, best of {repeats}",
        "microseconds_per_run_and_round": per,
        "samples": samples,
    }
    if device == "cpu":
        document["times_faster"] = {name: per[f"{name} one by one"] / per[f"{name} together"] for name in METHODS}
    print(json.dumps({key: value for key, value in document.items() if key != "samples"}, indent=1))
    if device == "cuda":
        (ROOT / "results" / "many_cuda.json").write_text(compact.text(document), encoding="utf-8")
        return 0
    out = guard.place("many_cpu")
    old, new = (guard.together_over_one_by_one(each) for each in (guard.committed(out), document))
    return guard.settle(out, document, old, new, accept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--accept", action="store_true", help="write the new figures whatever grew (cpu)")
    arguments = parser.parse_args()
    sys.exit(main(arguments.device, arguments.repeats, arguments.accept))
