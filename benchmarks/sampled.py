"""Noise for sampled releases: seconds of `multiplier`, cold and from the cache, and its distance to dp-accounting.

Seconds are the processor's, in one thread, so that other work on the machine does not count.

OMP_NUM_THREADS=1 python benchmarks/sampled.py --out results/sampled.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import pld

from provenance import provenance
from sordino.core import Adjacency
from sordino.privacy.accounting import subsampled
from sordino.privacy.accounting.samplers import SampledGaussian, Sampler

EPSILON, DELTA = 1.0, 1e-5
RATES, TIMES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0), (1, 100, 10_000, 100_000)
FIXED = [(0.01, 100), (0.01, 10_000), (0.1, 1000)]
RELATION = {
    Adjacency.ADD_REMOVE: dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE_ONE: dp.NeighboringRelation.REPLACE_ONE,
}
PEERS = [  # rate, mu, times, dp-accounting's interval
    (1e-4, 0.5, 100_000, 1e-6),
    (1e-3, 0.8, 10_000, 1e-5),
    (0.01, 0.5, 1000, 1e-5),
    (0.016, 1.0, 2000, 2e-5),
    (0.2, 0.2, 500, 1e-5),
    (0.5, 1.0, 10, 5e-5),
]
NAIVE = (0.016, 200, Adjacency.REPLACE_ONE)  # calibrated the way dp-accounting documents, at its default interval


def seconds(compute: Any) -> tuple[float, Any]:
    begun = time.process_time()
    result = compute()
    return time.process_time() - begun, result


def accountant(adjacency: Adjacency, interval: float = 1e-4) -> pld.PLDAccountant:
    return pld.PLDAccountant(RELATION[adjacency], interval)


def event(rate: float, multiplier: float, times: int) -> dp.DpEvent:
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), times)


def timings() -> list[dict[str, Any]]:
    questions = [(q, t, a, Sampler.POISSON) for q, t, a in itertools.product(RATES, TIMES, Adjacency)]
    questions += [(q, t, Adjacency.REPLACE_ONE, Sampler.FIXED) for q, t in FIXED]
    rows = []
    for rate, times, adjacency, sampler in questions:

        def ask(q: float = rate, t: int = times, a: Adjacency = adjacency, s: Sampler = sampler) -> float:
            return subsampled.multiplier(q, t, EPSILON, DELTA, a, s)

        cold, multiplier = seconds(ask)
        cached = statistics.median(seconds(ask)[0] for _ in range(5))
        releases = [SampledGaussian(rate, 1 / multiplier, times, sampler)]
        subsampled._epsilon.cache_clear()
        once, spent = seconds(lambda r=releases, a=adjacency: subsampled.epsilon(r, DELTA, a))
        row = {"rate": rate, "times": times, "adjacency": str(adjacency), "sampler": str(sampler)}
        row |= {"multiplier": multiplier, "cold_s": cold, "cached_s": cached, "epsilon_s": once, "epsilon": spent}
        rows.append(row)
        print(f"{sampler:8} {adjacency:12} q {rate:<7g} T {times:<7} multiplier {multiplier:9.4f}", end="")
        print(f"  cold {cold:6.3f} s  cached {1e3 * cached:6.3f} ms  one epsilon {1e3 * once:7.1f} ms")
    return rows


def peers() -> list[dict[str, Any]]:
    rows = []
    for (rate, mu, times, interval), adjacency in itertools.product(PEERS, Adjacency):
        our_s, ours = seconds(
            lambda r=rate, m=mu, t=times, a=adjacency: subsampled.epsilon([SampledGaussian(r, m, t)], DELTA, a)
        )
        their_s, theirs = seconds(
            lambda r=rate, m=mu, t=times, a=adjacency, i=interval: (
                accountant(a, i).compose(event(r, 1 / m, t)).get_epsilon(DELTA)
            )
        )
        row = {"rate": rate, "mu": mu, "times": times, "adjacency": str(adjacency), "interval": interval}
        rows.append(row | {"epsilon": ours, "dp_accounting": theirs, "own_s": our_s, "dp_accounting_s": their_s})
        print(f"{adjacency:12} q {rate:<7g} mu {mu:<4g} T {times:<7} epsilon {ours:.5f} ({our_s:.3f} s)", end="")
        print(f"  dp-accounting {theirs:.5f} ({their_s:.1f} s)  {100 * (ours / theirs - 1):+.3f} %")
    return rows


def naive() -> dict[str, Any]:
    rate, times, adjacency = NAIVE
    their_s, theirs = seconds(
        lambda: dp.calibrate_dp_mechanism(
            lambda: accountant(adjacency), lambda x: event(rate, x, times), EPSILON, DELTA, tol=1e-3
        )
    )
    subsampled._epsilon.cache_clear()
    ours = subsampled.multiplier(rate, times, EPSILON * (1 - 1e-12), DELTA, adjacency)
    print(f"q {rate} T {times} {adjacency}: {ours:.4f}; dp-accounting calibrates {theirs:.4f} in {their_s:.1f} s")
    return {
        "rate": rate,
        "times": times,
        "adjacency": str(adjacency),
        "own": ours,
        "theirs": theirs,
        "theirs_s": their_s,
    }


def whole_path() -> dict[str, Any]:
    rounds = np.arange(1, 3001)
    rows = {}
    for adjacency in Adjacency:
        took, epsilons = seconds(
            lambda a=adjacency: subsampled.path(
                [SampledGaussian(0.016, 1.0, 1)], rounds[:, None], DELTA, a, 0.0 * rounds
            )
        )
        rows[str(adjacency)] = {"rounds": len(rounds), "seconds": took, "last": float(epsilons[-1])}
        print(f"path of {len(rounds)} rounds, {adjacency}: {took:.2f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SORDINO_CACHE"] = folder  # so that cold is cold
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        result = {"epsilon": EPSILON, "delta": DELTA, "load_at_start": load, "multiplier": timings()}
        result |= {"path": whole_path(), "peers": peers(), "naive": naive()}
    if out:
        command = f"OMP_NUM_THREADS=1 python benchmarks/sampled.py --out {out}"
        out.write_text(json.dumps({"provenance": provenance(command), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
