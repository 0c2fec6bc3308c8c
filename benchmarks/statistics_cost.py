"""What it costs to find the ranges of columns by noised counts: results/statistics.json and results/statistics.md.

    python benchmarks/statistics_cost.py TABLES_DIR

Every number column of a public schema is taken to be known only within ten times its public range. Compared, at the
same total epsilon: the public ranges; the wide ranges as they are; and private statistics with a share of the budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from provenance import provenance
from sordino.data.columns import Number
from sordino.data.schema import Schema
from sordino.training import run
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "examples" / "schemas"
SHARES = (0.02, 0.05, 0.1)
WIDER = 10


def widened(schema: Schema, found: bool) -> Schema:
    """The schema with ranges ten times as wide: to be searched (`found`), or used as they are."""
    columns = {}
    for name, column in schema.columns.items():
        if isinstance(column, Number) and column.range is not None:
            low, high = column.range
            width = high - low
            within = (low, low + WIDER * width) if column.log or low == 0 else (low - 4 * width, high + 5 * width)
            wide = {"range": None, "within": within} if found else {"range": within}
            columns[name] = dataclasses.replace(column, fill=None, **wide)
        else:
            columns[name] = column
    return dataclasses.replace(schema, columns=columns)


def once(
    data: Path, schema: Schema, epsilon: float, delta: float, share: float | None, seed: int
) -> tuple[float, float]:
    """Accuracy and AUC of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schema.toml"
        path.write_text(schema.toml())
        values = {"data": str(data), "schema": str(path), "epsilon": epsilon, "delta": delta, "seed": seed}
        values |= {"split_seed": seed, "evaluate_every": 100} | ({} if schema.client else {"clients": 1})
        values |= {} if share is None else {"private_statistics": share}
        prepared = run.prepare(Spec.of(values))
        out = Path(folder) / "run"
        run.start(prepared, out)
        prepared = run.release_statistics(prepared, out)
        *_, last = run.rounds(prepared, out)
        return last["accuracy"], last["auc"]


def study(name: str, data: Path, schema: Schema, epsilons: tuple[float, ...], delta: float, seeds: int) -> list[dict]:
    rows = []
    variants = [("public ranges", schema, None), ("wide ranges", widened(schema, False), None)]
    variants += [(f"private statistics, {share:g}", widened(schema, True), share) for share in SHARES]
    for epsilon in epsilons:
        for text, described, share in variants:
            results = [once(data, described, epsilon, delta, share, seed) for seed in range(seeds)]
            accuracy, auc = zip(*results, strict=True)
            error = statistics.stdev(auc) / seeds**0.5
            rows.append(
                {
                    "data": name,
                    "epsilon": epsilon,
                    "delta": delta,
                    "ranges": text,
                    "accuracy": statistics.mean(accuracy),
                    "auc": statistics.mean(auc),
                    "auc_standard_error": error,
                    "seeds": seeds,
                }
            )
            print(rows[-1], flush=True)
    return rows


def page(rows: list[dict]) -> str:
    lines = [
        "# Private statistics: what finding the ranges costs",
        "",
        "Made by `python benchmarks/statistics_cost.py TABLES_DIR`. Number columns are known within ten times their "
        "public range only; `private statistics, 0.05` spends 5 % of μ² on finding the ranges, the total ε is the same "
        "in every row. Method `auto`, untrusted server, runs with seeds; mean over seeds ± standard error.",
        "",
        "| data | ε | ranges | accuracy | AUC |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['data']} | {r['epsilon']:g} | {r['ranges']} | {r['accuracy']:.1%} | "
        f"{r['auc']:.3f} ± {r['auc_standard_error']:.3f} |"
        for r in rows
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    heart, adult = (Schema.read(SCHEMAS / f"{name}.toml") for name in ("heart_disease", "adult"))
    rows = study("Heart Disease", folder / "heart_disease.csv", heart, (1.0, 10.0), 1e-4, 10)
    rows += study("Adult", folder / "adult_train.csv.xz", adult, (1.0, 8.0), 1e-5, 3)
    document = {"provenance": provenance("python benchmarks/statistics_cost.py TABLES_DIR"), "rows": rows}
    (ROOT / "results" / "statistics.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (ROOT / "results" / "statistics.md").write_text(page(rows))


if __name__ == "__main__":
    main()
