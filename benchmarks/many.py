"""Many runs at once: 64 trainings of 20 clients x 2,500 records, 64 features, 10 classes, as one tensor axis.

    python benchmarks/many.py                   # two cores: against one after another; results/many_cpu.json
    python benchmarks/many.py --device cuda     # microseconds per run and round; results/many_cuda.json

Runs differ in step, budget and seed. Ratios are taken within one run of this script, alternating, best of several.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from sordino.data.sources import Dataset
from sordino.experiments.many import run_many
from sordino.experiments.spec import Spec

ROOT = Path(__file__).parents[1]
RUNS, ROUNDS = 64, 70


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


def seconds(dataset: Dataset, wanted: list[Spec], device: str, most: int) -> float:
    began = time.perf_counter()
    run_many(wanted, dataset, device=device, at=(), most=most)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(device: str, repeats: int) -> None:
    dataset = job()
    rounds = ROUNDS if device == "cuda" else 10
    samples: dict[str, list[float]] = {}
    for method in ("dp-fedgd", "dp-fedsofim", "dp-fedadam"):
        wanted = specs(method, RUNS, rounds)
        seconds(dataset, wanted, device, RUNS)  # compile, and lay the data on the device
        for _ in range(repeats):
            samples.setdefault(f"{method} together", []).append(seconds(dataset, wanted, device, RUNS))
            if device == "cpu":
                samples.setdefault(f"{method} one by one", []).append(seconds(dataset, wanted, device, 1))
    per = {name: 1e6 * min(times) / RUNS / rounds for name, times in samples.items()}
    found = {
        "command": f"python benchmarks/many.py --device {device}",
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "runs": RUNS,
        "rounds": rounds,
        "microseconds_per_run_and_round": per,
        "seconds": samples,
    }
    if device == "cpu":
        found["times_faster"] = {
            method: per[f"{method} one by one"] / per[f"{method} together"]
            for method in ("dp-fedgd", "dp-fedsofim", "dp-fedadam")
        }
    (ROOT / "results" / f"many_{device}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.device, arguments.repeats)
