"""Coverage of the intervals of coefficients: results/coverage.json and results/coverage.md.

    python benchmarks/coverage.py [--repetitions 200]

Data are drawn from a logistic, linear or Poisson model, so the true coefficients are known. Each repetition draws
records and noise anew, trains `auto` for 30 rounds (for classes with calibrated intercepts) and a fifth of the budget
for `uncertainty`, and counts how often the 95 % interval of a coefficient holds the true one. Records of one person are
copies of each other, which is the worst case, or independent.
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
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.training import run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
ROUNDS, SHARE, WIDTH = 30, 0.2, 1.96
FEW_INTERVALS = 100  # the coverage of fewer says little


class Setting(NamedTuple):
    """One line of the table."""

    records: int
    epsilon: float
    features: int
    strength: float = 1.5  # coefficients lie evenly between minus this and this, of features in -1 … 1
    intercept: float = -0.5
    task: str = "classes"
    persons: int = 0  # records of each; 0 protects records
    copies: bool = False  # whether the records of a person are copies


SETTINGS = (
    Setting(20_000, 1.0, 5),
    Setting(20_000, 8.0, 5),
    Setting(2_000, 1.0, 5),
    Setting(2_000, 8.0, 5),
    Setting(20_000, 2.0, 15),
    Setting(20_000, 8.0, 5, strength=4.0),
    Setting(20_000, 8.0, 5, intercept=-3.0),
    Setting(20_000, 2.0, 5, intercept=-1.5),
    Setting(20_000, 8.0, 5, persons=2, copies=True),
    Setting(20_000, 8.0, 5, persons=2),
    Setting(20_000, 1.0, 5, 0.25, 0.1, "quantity"),
    Setting(20_000, 8.0, 5, 0.25, 0.1, "quantity"),
    Setting(20_000, 8.0, 5, 0.25, 0.1, "quantity", persons=2, copies=True),
    Setting(20_000, 8.0, 5, 0.8, 0.5, "count"),
    Setting(100_000, 8.0, 5, 0.8, 0.5, "count"),
    Setting(100_000, 8.0, 5, 1.5, -1.0, "count"),
    Setting(100_000, 8.0, 5, 0.8, -3.0, "count"),
)
SPREAD, MOST_COUNT = 0.2, 16  # standard deviation of a quantity in -1 … 1 around its mean; largest count
TARGETS = {"quantity": {"range": [-1, 1]}, "count": {"maximum": MOST_COUNT}}


def once(setting: Setting, seed: int) -> tuple[list[dict[str, Any]], np.ndarray, np.ndarray]:
    """Intervals, true coefficients, and those of the trained model."""
    rng, d = np.random.default_rng(seed), setting.features
    each = setting.persons if setting.copies else 1
    x = rng.uniform(-1, 1, (setting.records // each, d)).astype(np.float32)
    w = np.linspace(-setting.strength, setting.strength, d)
    y = drawn(setting, x @ w + setting.intercept, rng)
    x, y = x.repeat(each, 0), y.repeat(each, 0)
    person = np.arange(len(x)) // setting.persons if setting.persons else None
    names, test = tuple(f"x{k}" for k in range(d)), by_table(x[:10], d)
    classes = ("no", "yes") if setting.task == "classes" else ()
    data = Dataset("simulated", by_table(x, d), y, test, y[:10], None, classes, names, person=person)
    values = {"data": "simulated.csv", "epsilon": setting.epsilon, "delta": 1e-6, "seed": seed, "clients": 1}
    values |= {"normalize": f"table:{d}", "rounds": ROUNDS, "uncertainty": SHARE, "partition": "iid"}
    values |= {"calibrate": 0.1} if classes else {}
    values |= {"unit": "person", "person": "who", "person_records": setting.persons} if setting.persons else {}
    schema = None
    if setting.task in TARGETS:
        columns = {name: {"type": "number", "range": [-1, 1], "indicator": False} for name in names}
        target = {"column": "y", "task": setting.task, **TARGETS[setting.task]}
        named = {"person": "who"} if setting.persons else {}
        schema = Schema.of({"columns": columns, "target": target, **named})
        values |= {"normalize": None, "person": None}
        data = data._replace(schema=schema, y_train=schema.to_model(y), y_test=schema.to_model(y[:10]))
    given = {key: value for key, value in values.items() if value is not None}
    prepared = run.prepare_resolved(resolve(Spec.of(given), schema=schema), data)
    *_, last = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    theta = last.model.double().numpy().reshape(d + 1, -1)
    trained = theta[:, -1] - (theta[:, 0] if classes else 0)
    trained[-1] += math.log(schema.unit) if setting.task == "count" and schema is not None else 0
    rows = run.coefficient_intervals(prepared, last.checkpoint)
    assert rows is not None
    return rows, np.append(w * math.sqrt(d) / RADIUS, setting.intercept), trained


def drawn(setting: Setting, score: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels of a model that is right."""
    if setting.task == "quantity":
        return np.clip(score + SPREAD * rng.normal(size=len(score)), -1, 1)
    if setting.task == "count":
        return np.minimum(rng.poisson(np.exp(score)), MOST_COUNT).astype(float)
    return (rng.random(len(score)) < expit(score)).astype(np.int64)


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
        "`python benchmarks/coverage.py`. Records of a logistic, linear or Poisson model with known coefficients; "
        "`auto`, 30 rounds, 20 % of the budget for `uncertainty`, δ = 1e-6, one client, replace-one. Coverage of 95 % "
        "intervals over all coefficients and so many draws of records and noise (± standard error, as if coefficients "
        "of a draw were independent). *Strength*: the largest coefficient of a feature in -1 … 1. *Around the trained "
        "weights*: the same widths around the model itself, which clipping biases. *Error* and *stated*: root mean "
        "squares of estimate minus truth, and of standard errors. *Persons*: the protected unit is a person with two "
        "records, which are copies of each other or independent.",
        "",
        "| task | unit | records | ε | features | strength | intercept | draws | coverage | have an interval | "
        "around the trained weights | error | stated |",
        "|---" * 13 + "|",
    ]
    for r in rows:
        unit = f"person, {'copies' if r['copies'] else 'independent'}" if r["persons"] else "record"
        first = f"| {r['task']} | {unit} | {r['records']:,} | {r['epsilon']:g} | {r['features']} | "
        first += f"{r['strength']:g} | {r['intercept']:g} | {r['repetitions']} | "
        if "coverage" not in r:
            lines.append(f"{first}| {r['with_interval']:.0%} | | | |")
            continue
        lines.append(
            f"{first}{r['coverage']:.1%} ± {r['coverage_error']:.1%} | {r['with_interval']:.0%} | "
            f"{r['coverage_around_trained']:.1%} | {r['root_mean_square_error']:.4f} | {r['standard_error']:.4f} |"
        )
    many = [r for r in rows if r["repetitions"] * (r["features"] + 1) * r["with_interval"] >= FEW_INTERVALS]
    shares = [r["coverage"] for r in many if r["copies"] or not r["persons"]]
    least, most = min(shares), max(shares)
    lines += [
        "",
        f"Coverage lies between {least:.1%} and {most:.1%} in the rows with at least {FEW_INTERVALS} intervals, those "
        "of persons with independent records apart. "
        "It is lower where the noise hides some directions, because coefficients beside them keep a part of the "
        "trained model's error. Counts have no interval where the noise hides the intercept. "
        "Intervals of persons allow for records that are copies, and are too wide if they are not.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
