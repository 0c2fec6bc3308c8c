"""Coverage of the intervals of coefficients: results/coverage.json and results/coverage.md.

    python benchmarks/coverage.py [--repetitions 200]

Data are drawn from a logistic model, so the true coefficients are known. Each repetition draws records and noise anew,
trains `auto` for 30 rounds with calibrated intercepts and a fifth of the budget for `uncertainty`, and counts how
often the 95 % interval of a coefficient holds the true one.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from provenance import provenance
from sordino.data.preprocess import RADIUS, by_table
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.training import run
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
ROUNDS, SHARE, WIDTH = 30, 0.2, 1.96


class Setting(NamedTuple):
    """One line of the table."""

    records: int
    epsilon: float
    features: int
    strength: float = 1.5  # coefficients lie evenly between minus this and this, of features in -1 … 1
    intercept: float = -0.5


SETTINGS = (
    Setting(20_000, 1.0, 5),
    Setting(20_000, 8.0, 5),
    Setting(2_000, 1.0, 5),
    Setting(2_000, 8.0, 5),
    Setting(20_000, 2.0, 15),
    Setting(20_000, 8.0, 5, strength=4.0),
    Setting(20_000, 8.0, 5, intercept=-3.0),
)


def once(setting: Setting, seed: int) -> tuple[list[dict[str, Any]], np.ndarray, np.ndarray]:
    """Intervals, true coefficients, and those of the trained model."""
    rng, d = np.random.default_rng(seed), setting.features
    x = rng.uniform(-1, 1, (setting.records, d)).astype(np.float32)
    w = np.linspace(-setting.strength, setting.strength, d)
    y = (rng.random(setting.records) < expit(x @ w + setting.intercept)).astype(np.int64)
    names, test = tuple(f"x{k}" for k in range(d)), by_table(x[:10], d)
    data = Dataset("simulated", by_table(x, d), y, test, y[:10], None, ("no", "yes"), names)
    values = {"data": "simulated.csv", "epsilon": setting.epsilon, "delta": 1e-6, "seed": seed, "clients": 1}
    values |= {"normalize": f"table:{d}", "rounds": ROUNDS, "uncertainty": SHARE, "calibrate": 0.1, "partition": "iid"}
    prepared = run.prepare(Spec.of(values), data)
    *_, last = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    theta = last.model.double().numpy().reshape(-1, 2)
    rows = run.coefficient_intervals(prepared, last.checkpoint)
    assert rows is not None
    return rows, np.append(w * math.sqrt(d) / RADIUS, setting.intercept), theta[:, 1] - theta[:, 0]


def study(setting: Setting, repetitions: int) -> dict[str, Any]:
    held, trained, known, errors, stated = [], [], [], [], []
    for seed in range(repetitions):
        for row, truth, weight in zip(*once(setting, seed), strict=True):
            known.append(row["low"] is not None)
            if known[-1]:
                held.append(row["low"] <= truth <= row["high"])
                trained.append(abs(weight - truth) <= WIDTH * row["standard_error"])
                errors.append(row["estimate"] - truth)
                stated.append(row["standard_error"])
    line = {**setting._asdict(), "repetitions": repetitions, "with_interval": round(float(np.mean(known)), 4)}
    if not held:
        return line
    share = float(np.mean(held))
    return {
        **line,
        "coverage": round(share, 4),
        "coverage_error": round(math.sqrt(share * (1 - share) / len(held)), 4),
        "coverage_around_trained": round(float(np.mean(trained)), 4),
        "root_mean_square_error": round(float(np.sqrt(np.mean(np.square(errors)))), 5),
        "standard_error": round(float(np.sqrt(np.mean(np.square(stated)))), 5),
    }


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Intervals of coefficients: coverage",
        "",
        "`python benchmarks/coverage.py`. Records of a logistic model with known coefficients; `auto`, 30 rounds, 20 % "
        "of the budget for `uncertainty`, δ = 1e-6, one client, record level, replace-one. Coverage of 95 % intervals "
        f"over all coefficients and {rows[0]['repetitions']} draws of records and noise (± standard error, as if "
        "coefficients of a draw were independent). *Strength*: the largest coefficient of a feature in -1 … 1. *Around "
        "the trained weights*: the same widths around the model itself, which clipping biases. *Error* and *stated*: "
        "root mean squares of estimate minus truth, and of standard errors.",
        "",
        "| records | ε | features | strength | intercept | coverage | have an interval | around the trained weights | "
        "error | stated |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        first = f"| {r['records']:,} | {r['epsilon']:g} | {r['features']} | {r['strength']:g} | {r['intercept']:g} | "
        if "coverage" not in r:
            lines.append(f"{first}| {r['with_interval']:.0%} | | | |")
            continue
        lines.append(
            f"{first}{r['coverage']:.1%} ± {r['coverage_error']:.1%} | {r['with_interval']:.0%} | "
            f"{r['coverage_around_trained']:.1%} | {r['root_mean_square_error']:.4f} | {r['standard_error']:.4f} |"
        )
    lines += [
        "",
        "Intervals hold what they state where the curvature is well above the noise. They are a few points too short "
        "where most directions are hidden (15 features at ε = 2: three of four coefficients get no interval, and those "
        "that do keep a part of the trained model's error). With 2,000 records at ε = 1 no coefficient gets one.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    repetitions = parser.parse_args().repetitions
    rows = []
    for setting in SETTINGS:
        rows.append(study(setting, repetitions))
        print(rows[-1], flush=True)
    document = {"provenance": provenance("python benchmarks/coverage.py"), "rows": rows}
    (ROOT / "results" / "coverage.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (ROOT / "results" / "coverage.md").write_text(page(rows))


if __name__ == "__main__":
    main()
