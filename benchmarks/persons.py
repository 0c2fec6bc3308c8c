"""What the protection of persons costs, and what calibrated intercepts bring. Writes results/persons.{json,md}.

    python benchmarks/persons.py TABLES_DIR [--slopes]

With --slopes only the rows about calibrated slopes are computed, and all others are kept.

Readmissions within 30 days: 4,999 encounters of 4,259 patients, divided among four clients by patient; a fifth of the
patients is for testing. Every setting runs with unit = record and unit = person on the same split. Adult: the raw
table, one site. `auto` with its defaults: nothing is tuned.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from provenance import provenance
from sordino.engines import simulate
from sordino.training import run
from sordino.training.evaluate import evaluate_fully
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "examples" / "schemas"
INF = float("inf")
SEEDS = range(10)
METRICS = ("auc", "log_loss", "mean_predicted", "observed", "calibration_slope")


def once(keys: dict[str, object], seed: int) -> dict[str, float]:
    job = run.prepare(Spec.of({**keys, "seed": seed, "split_seed": seed}))
    *_, last = simulate.run(job.plan, job.model, job.records, job.source)
    x, y = torch.from_numpy(job.dataset.x_test), torch.from_numpy(job.dataset.y_test)
    scores = evaluate_fully(job.model, last.model, x.to(job.records.x), y, 0.5, counts=True, unit=1.0)
    return {name: float(scores[name]) for name in METRICS}


def row(keys: dict[str, object], about: dict[str, object], seeds: range) -> dict[str, object]:
    found = [once({**keys, **about}, seed) for seed in seeds]
    means = {name: round(statistics.fmean(each[name] for each in found), 5) for name in METRICS}
    ratio = [each["mean_predicted"] / each["observed"] for each in found]
    written = {key: "inf" if value == INF else value for key, value in about.items()}
    return {**written, **means, "ratio": round(means["mean_predicted"] / means["observed"], 4),
            "ratio_sd": round(float(np.std(ratio)), 4)}  # fmt: skip


def table(rows: list[dict[str, object]], first: tuple[str, ...]) -> list[str]:
    lines = [f"| {' | '.join(first)} | AUC | log loss | mean predicted | observed | predicted / observed |"]
    lines.append("|---" * (len(first) + 5) + "|")
    for each in rows:
        cells = [str(each[key]).replace("inf", "∞") for key in first]
        lines.append(
            f"| {' | '.join(cells)} | {each['auc']:.3f} | {each['log_loss']:.4f} | {each['mean_predicted']:.2%} | "
            f"{each['observed']:.2%} | {each['ratio']:.2f} ± {each['ratio_sd']:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--slopes", action="store_true")
    folder, only = (arguments := parser.parse_args()).tables, arguments.slopes
    torch.set_num_threads(1)
    readmissions = {
        "data": str(folder / "readmission_5000.csv.xz"), "schema": str(SCHEMAS / "readmission.toml"), "clients": 4,
    }  # fmt: skip
    stored = json.loads((ROOT / "results" / "persons.json").read_text()) if only else {}
    rows = stored["readmissions"] if only else [
        row(readmissions, {"epsilon": epsilon, "trust": trust, "unit": unit}, SEEDS)
        for epsilon, trust in track(
            [(2.0, "untrusted-server"), *((epsilon, "secure-aggregation") for epsilon in (2.0, 8.0, INF))],
            "readmissions",
        )
        for unit in ("record", "person")
    ]  # fmt: skip
    calibration = stored.get("calibration", [])
    slopes = []
    adult = {"data": str(folder / "adult_train.csv.xz"), "schema": str(SCHEMAS / "adult.toml"), "clients": 1,
             "epsilon": 2.0}  # fmt: skip
    record = {**readmissions, "epsilon": 2.0, "unit": "record", "trust": "secure-aggregation"}
    for name, keys, seeds in (("Adult", adult, range(3)), ("readmissions", record, SEEDS)):
        for share in () if only else track((0.0, 0.05, 0.1), name):
            calibration.append({"table": name, **row(keys, {"calibrate": share}, seeds)})
        for slope in track((0.0, 0.05), f"{name}, slopes"):
            about = {"calibrate": 0.1, "calibrate_slope": slope}
            slopes.append({"table": name, **row(keys, about, seeds)})
    made = provenance(f"python benchmarks/persons.py TABLES_DIR{' --slopes' if only else ''}")
    document = {
        "provenance": {**stored.get("provenance", made), "slopes": {key: made[key] for key in ("command", "commit")}},
        "readmissions": rows,
        "calibration": calibration,
        "slopes": slopes,
    }
    (ROOT / "results" / "persons.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    lines = [
        "# Persons, and calibrated risks",
        "",
        "`python benchmarks/persons.py TABLES_DIR`. The method is `auto` with its defaults: nothing is tuned.",
        "",
        "## Readmissions within 30 days, per record and per person",
        "",
        "4,999 encounters of 4,259 patients at four clients, a fifth of the patients for testing; mean of ten splits "
        "and draws of noise, δ = 1e-5, replace-one. Predicted and observed risks are of test *records*; ± is the "
        "standard deviation of one run, in which the test part's own observed risk varies by 9 %.",
        "",
        *table(rows, ("epsilon", "trust", "unit")),
        "",
        "## What calibrated intercepts bring",
        "",
        "ε = 2, record level. `calibrate` is the part of the budget that two last rounds spend on it; 0.1 is the "
        "default of `auto` with a schema. Readmissions: only sums visible; Adult: one site, mean of three seeds.",
        "",
        *table(calibration, ("table", "calibrate")),
        "",
        "## What a calibrated slope brings",
        "",
        "The same runs with `calibrate = 0.1`; `calibrate_slope` is the part of the budget of one more round. Slope is "
        "the calibration slope on test records: below 1, high risks are too high and low ones too low.",
        "",
        "| table | calibrate_slope | log loss | slope | predicted / observed |",
        "|---|---|---|---|---|",
        *(
            f"| {each['table']} | {each['calibrate_slope']} | {each['log_loss']:.4f} | "
            f"{each['calibration_slope']:.2f} | {each['ratio']:.2f} ± {each['ratio_sd']:.2f} |"
            for each in slopes
        ),
        "",
    ]
    (ROOT / "results" / "persons.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
