"""Hospital tables end to end, by a public schema. Writes results/tables.json and results/tables.md.

    python benchmarks/tables.py TABLES_DIR

Heart Disease over four hospitals, as FLamby's Fed-Heart-Disease: 740 records without slope, ca and thal, two thirds of
each hospital for training, accuracy averaged over hospitals. `all records` keeps the other 180 and the three columns:
missing values are filled by the schema. FLamby's figures are of FedAvg with Opacus, five seeds, whose features are
standardised by statistics of the private records that its account does not pay for.

Adult: the raw table, one site, and a fifth of the records for testing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from provenance import provenance
from sordino.data import tables
from sordino.data.preprocess import preprocess
from sordino.data.schema import Drop, Schema
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.training import run
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "examples" / "schemas"
EPSILONS = (0.1, 1.0, 5.0, 10.0, float("inf"))
TRUSTS = ("untrusted-server", "secure-aggregation")
SEEDS = range(20)
FLAMBY = {0.1: 0.606, 1.0: 0.685, 5.0: 0.704, 10.0: 0.700, float("inf"): 0.712}
INCOMPLETE = ("slope", "ca", "thal")  # columns that FLamby drops


def heart(folder: Path) -> list[dict[str, object]]:
    path = folder / "heart_disease.csv"
    schema = Schema.read(SCHEMAS / "heart_disease.toml")
    dropped = {name: Drop() if name in INCOMPLETE else column for name, column in schema.columns.items()}
    complete = dataclasses.replace(schema, columns=dropped)
    full = tables.open_table(path, types=schema.reads(), missing=schema.missing)
    kept = full.filter(np.logical_and.reduce([full.column(name).is_valid().to_numpy() for name in complete.reads()]))
    rows = []
    for name, described, table in (("as FLamby", complete, kept), ("all records", schema, full)):
        encoded = described.encode(table)
        for epsilon in track(EPSILONS, f"heart disease, {name}"):
            for trust in TRUSTS:
                samples = [_heart_once(described, encoded, epsilon, trust, seed) for seed in SEEDS]
                rows.append(
                    {
                        "records": name,
                        "epsilon": _written(epsilon),
                        "trust": trust,
                        "accuracy": statistics.mean(samples),
                        "std": statistics.stdev(samples),
                        "flamby": FLAMBY[epsilon] if name == "as FLamby" else None,
                    }
                )
    return rows


def _heart_once(schema: Schema, encoded: object, epsilon: float, trust: str, seed: int) -> float:
    """Accuracy averaged over hospitals, for another split and other noise per seed."""
    x, y, hospital, _ = encoded  # type: ignore[misc]
    rng = np.random.default_rng(seed)
    test = np.zeros(len(y), bool)
    for name in np.unique(hospital):
        for label in (0, 1):  # their split is stratified
            own = rng.permutation(np.flatnonzero((hospital == name) & (y == label)))
            test[own[round(0.66 * len(own)) :]] = True
    x = preprocess(x, None, f"table:{schema.used}")
    data = Dataset("heart", x[~test], y[~test], x[test], y[test], hospital[~test], schema.classes, schema=schema)
    spec = Spec.of({"epsilon": epsilon, "delta": 1e-4, "trust": trust, "seed": seed, "partition": "by-site"})
    prepared = run.prepare(spec, data)
    *_, last = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    correct = prepared.model.predict(last.model, torch.from_numpy(x[test])).numpy() == y[test]
    return float(np.mean([correct[hospital[test] == name].mean() for name in np.unique(hospital)]))


def adult(folder: Path) -> list[dict[str, object]]:
    schema = str(SCHEMAS / "adult.toml")
    rows = []
    for epsilon in track((0.5, 1.0, 2.0, 8.0, float("inf")), "Adult"):
        lines = []
        for seed in range(3):
            values = {"data": str(folder / "adult_train.csv.xz"), "schema": schema, "epsilon": epsilon, "seed": seed}
            prepared = run.prepare(Spec.of({**values, "clients": 1, "split_seed": seed, "evaluate_every": 70}))
            *_, last = run.rounds(prepared)
            x = torch.from_numpy(prepared.dataset.x_test)
            *_, result = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
            risk = prepared.model.scores(result.model, x)[:, 1].double().numpy()
            lines.append((last["accuracy"], last["auc"], float(risk.mean()), float(prepared.dataset.y_test.mean())))
        accuracy, auc, predicted, observed = (statistics.mean(column) for column in zip(*lines, strict=True))
        rows.append(
            {
                "epsilon": _written(epsilon),
                "accuracy": accuracy,
                "auc": auc,
                "mean_predicted": predicted,
                "observed": observed,
            }
        )
    return rows


def _written(epsilon: float) -> float | str:
    return "inf" if epsilon == float("inf") else epsilon


def report(document: dict[str, list[dict[str, object]]]) -> str:
    heart_rows, adult_rows = document["heart"], document["adult"]
    lines = [
        "# Hospital tables, by a public schema",
        "",
        "`python benchmarks/tables.py TABLES_DIR`. The method is `auto` with its defaults: nothing is tuned.",
        "",
        "## Heart Disease over four hospitals",
        "",
        "Accuracy averaged over hospitals, mean of 20 splits and draws of noise (standard deviation of one run), "
        "δ = 1e-4, record level, replace-one. *As FLamby*: 740 records, two thirds of each hospital for training. "
        "FLamby: FedAvg with Opacus as published, whose account does not pay for the statistics that scale its "
        "features.",
        "",
        "| ε | FLamby | as FLamby, every message seen | as FLamby, only sums seen | all records, every message seen | "
        "all records, only sums seen |",
        "|---|---|---|---|---|---|",
    ]
    for epsilon in dict.fromkeys(row["epsilon"] for row in heart_rows):
        cells = [row for row in heart_rows if row["epsilon"] == epsilon]
        flamby = next(float(row["flamby"]) for row in cells if row["flamby"])  # type: ignore[arg-type]
        shown = [f"{100 * float(row['accuracy']):.1f} ± {100 * float(row['std']):.1f}" for row in cells]  # type: ignore[arg-type]
        lines.append(f"| {'∞' if epsilon == 'inf' else epsilon} | {100 * flamby:.1f} | {' | '.join(shown)} |")
    lines += [
        "",
        "## Adult, the raw table",
        "",
        "One site, 26,049 training records, mean of three seeds, δ = 1e-5, record level, replace-one.",
        "",
        "| ε | accuracy | AUC | mean predicted risk | observed |",
        "|---|---|---|---|---|",
    ]
    for row in adult_rows:
        numbers = [float(row[key]) for key in ("accuracy", "mean_predicted", "observed")]  # type: ignore[arg-type]
        accuracy, predicted, observed = (f"{100 * number:.1f} %" for number in numbers)
        epsilon = "∞" if row["epsilon"] == "inf" else row["epsilon"]
        lines.append(f"| {epsilon} | {accuracy} | {float(row['auc']):.3f} | {predicted} | {observed} |")  # type: ignore[arg-type]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="TABLES_DIR")
    folder = parser.parse_args().folder
    origin = provenance("python benchmarks/tables.py TABLES_DIR")
    document = {"heart": heart(folder), "adult": adult(folder)}
    out = ROOT / "results"
    (out / "tables.json").write_text(json.dumps({"provenance": origin, **document}, separators=(",", ":")) + "\n")
    (out / "tables.md").write_text(report(document), encoding="utf-8")
    print(report(document))


if __name__ == "__main__":
    main()
