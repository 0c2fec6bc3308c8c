"""Integer noise: numbers a second, and how far concentrated DP lies above the closed form.

Seconds are the processor's, in one thread; of several draws the fastest counts.

OMP_NUM_THREADS=1 python benchmarks/discrete.py --out results/discrete.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.privacy.accounting import concentrated, gaussian
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.random import Address, Secure, Seeded, Source

VARIANCES = (1.0, 30.0, 1e3, 1e4, 1e6, 1e9, 1e12)
SIZE, TIMES = 1_000_000, 5
BUDGETS = [(epsilon, delta) for delta in (1e-5, 1e-8) for epsilon in (0.1, 1.0, 3.0, 8.0)]


def seconds(compute: Any, times: int = TIMES) -> float:
    best = math.inf
    for _ in range(times):
        begun = time.process_time()
        compute()
        best = min(best, time.process_time() - begun)
    return best


def speed(source: Source, variance: float) -> dict[str, Any]:
    discrete_gaussian._law.cache_clear()
    discrete_gaussian._edges.cache_clear()
    table = seconds(lambda: discrete_gaussian._law(variance), 1)
    drawn = seconds(lambda: discrete_gaussian.draw(source, Address(1, 2, 3), variance, (SIZE,)))
    row = {"source": type(source).__name__, "variance": variance, "samples_per_second": round(SIZE / drawn)}
    return row | {"table_seconds": table, "table_cells": len(discrete_gaussian._law(variance).edges)}


def price(epsilon: float, delta: float) -> dict[str, Any]:
    """Of the same promise: epsilon found for a Gaussian that just keeps it, and the noise that it takes."""
    mu = gaussian.mu(epsilon, delta)
    rho = concentrated.rho_of(epsilon, delta)
    return {
        "epsilon": epsilon,
        "delta": delta,
        "epsilon_over_closed_form": concentrated.epsilon(mu**2 / 2, delta) / epsilon,
        "std_over_closed_form": mu / math.sqrt(2 * rho),
        "epsilon_seconds": seconds(lambda: concentrated.epsilon(rho, delta, 10)),
        "rho_seconds": seconds(lambda: concentrated.rho_of(epsilon, delta, 10)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/discrete.json"))
    out = parser.parse_args().out
    origin = provenance(f"OMP_NUM_THREADS=1 python benchmarks/discrete.py --out {out}")
    draws = [speed(source, variance) for source in (Secure(), Seeded(0)) for variance in VARIANCES]
    least = min(row["samples_per_second"] for row in draws)
    document = {
        "provenance": origin,
        "samples": SIZE,
        "least_samples_per_second": least,
        "draws": draws,
        "prices": [price(*budget) for budget in BUDGETS],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
