"""Certified rounds on a GPU: what is added to a private step by secure noise, exact rounding and the engine.

    PYTHONPATH=src python benchmarks/certified_rounds.py --out results/certified_rounds.json
    PYTHONPATH=src python benchmarks/certified_rounds.py --device cpu --tiny      # does it run at all?

The networks, batches and autocast of `gpu.py`, with random weights and records. One client trains with DP-FedAdam at
record level. Each row is a run of the product's engine; the milliseconds are those of a round after the first ones:

- host: noise of the secure source, drawn on the host and copied.
- gpu: the same noise, computed on the GPU.
- insecure: noise of a seeded generator of the GPU (`Counted`), added without exact rounding; not certified.

A step is the clipped sum of the same batch alone, replayed as a CUDA graph, without noise and optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu import TINY, Bench
from gpu_works import CLIP, WORKS, Work
from provenance import provenance
from sordino.core import Privacy, Shard
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.methods import build
from sordino.privacy.mechanisms import random
from sordino.privacy.plan import Plan

WARM = 6  # rounds that are not timed: they compile and capture
KINDS = ("insecure", "gpu", "host")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_rounds(bench: Bench, kind: str, rounds: int) -> list[float]:
    """Seconds of each timed round."""
    device = bench.device
    x, y = bench.x.cpu().numpy(), bench.y.cpu().numpy()
    records = Records.of(x, y, np.zeros(bench.batch, int), device=str(device))
    plan = Plan(build("dp-fedadam", lr=1e-4, clip=CLIP), WARM + rounds, records.sizes, Privacy(8.0))
    source = random.Counted(1) if kind == "insecure" else random.Secure()
    found, draws = [], random.gpu_draws
    if kind == "host":
        random.gpu_draws = lambda where: False  # type: ignore[assignment]
    try:
        wait(device)
        before = time.perf_counter()
        for _ in simulate.run(plan, bench.flat, records, source, every_model=False):
            wait(device)
            found.append(time.perf_counter() - before)
            before = time.perf_counter()
    finally:
        random.gpu_draws = draws
    return found[WARM:]


def seconds_of_step(bench: Bench, repetitions: int) -> list[float]:
    """Seconds of a clipped sum alone."""
    theta = bench.flat.init().to(bench.device)
    shard = Shard(bench.x, bench.y, torch.ones(bench.batch, device=bench.device))

    def step() -> Tensor:
        total: Tensor = bench.flat.clipped_sum(theta, shard, CLIP)
        return total

    found = []
    for _ in range(WARM + repetitions):
        wait(bench.device)
        began = time.perf_counter()
        step()
        wait(bench.device)
        found.append(time.perf_counter() - began)
    return found[WARM:]


def one_work(work: Work, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(work, device, options.tiny)
    if device.type == "cuda":
        bench.flat.accelerate()
    row: dict[str, Any] = {"trained": bench.flat.size, "step": seconds_of_step(bench, options.rounds)}
    for kind in KINDS:
        slow = kind == "host" and bench.flat.size > 5_000_000
        row[kind] = seconds_of_rounds(bench, kind, 2 if slow else options.rounds)
    row = {key: [float(f"{s:.4g}") for s in value] if isinstance(value, list) else value for key, value in row.items()}
    shown = {key: f"{1e3 * statistics.median(value):.2f} ms" for key, value in row.items() if isinstance(value, list)}
    print(work.name, shown, flush=True)
    return row


def table(works: dict[str, Any]) -> str:
    lines = [
        "| network | numbers | step, ms | insecure noise | secure noise, GPU | secure noise, host | host / GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in works.items():
        step, *rounds = (1e3 * statistics.median(row[key]) for key in ("step", *KINDS))
        cells = " | ".join(f"{value:.1f}" for value in (step, *rounds))
        lines.append(f"| {name} | {row['trained']:,} | {cells} | {rounds[2] / rounds[1]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few rounds")
    parser.add_argument("--works", help=f"some of {', '.join(work.name for work in WORKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of a file of results")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())["works"]))
        return
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    asked = [work for work in WORKS if options.works is None or work.name in options.works.split(",")]
    shown = f" --works {options.works}" if options.works else ""
    results: dict[str, Any] = {
        "provenance": provenance(f"python benchmarks/certified_rounds.py{shown}"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "works": {},
    }
    for work in asked:
        if options.tiny and work.network not in TINY and work.batch > 32:
            continue
        results["works"][work.name] = one_work(work, device, options)
        if options.out:
            options.out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print(table(results["works"]))


if __name__ == "__main__":
    main()
