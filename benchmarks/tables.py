"""Hospital tables end to end, by a public schema. Writes results/tables.json and results/tables.md.

    python benchmarks/tables.py TABLES_DIR

Heart Disease over four hospitals, as FLamby's Fed-Heart-Disease: 740 records without slope, ca and thal, two thirds of
each hospital for training, accuracy averaged over hospitals. `all records` keeps the other 180 and the three columns:
missing values are filled by the schema. FLamby's figures are of FedAvg with Opacus, five seeds, whose features are
standardised by statistics of the private records that its account does not pay for.

Adult: the raw table, one site, and a fifth of the records for testing.

TCGA-BRCA over six regions: concordance beside lifelines' Cox model without privacy (pip install 'sordino[rivals]'), on
FLamby's own split, and on 20 random splits of each region.

Calibration: mean predicted against observed risk at ε = 2, on Adult and on readmissions, per unit and trust model.

`--only tcga` (or heart, adult, calibration) computes one part, and keeps the others of results/tables.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track

from provenance import provenance
from sordino.data import tables
from sordino.data.columns import Drop
from sordino.data.preprocess import preprocess
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.training import run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.survival import brier, concordance, constant_survival

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "examples" / "schemas"
EPSILONS = (0.1, 1.0, 5.0, 10.0, float("inf"))
TRUSTS = ("untrusted-server", "secure-aggregation")
ALL_TRUSTS = (*TRUSTS, "trusted-server")
CALIBRATION_EPSILON = 2.0
SEEDS = range(20)
FLAMBY = {0.1: 0.606, 1.0: 0.685, 5.0: 0.704, 10.0: 0.700, float("inf"): 0.712}
SURVIVAL_EPSILONS = (1.0, 5.0, 10.0, float("inf"))
TEST_SHARE = 0.2
PENALTY = 0.1  # of Cox's model: without one, columns that add up to others keep it from converging
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


def calibration(folder: Path) -> list[dict[str, object]]:
    """Predicted over observed risk, on test and on training records, of 20 splits and draws of noise."""
    adult = {"data": str(folder / "adult_train.csv.xz"), "schema": str(SCHEMAS / "adult.toml"), "clients": 10}
    readmissions = {
        "data": str(folder / "readmission_5000.csv.xz"), "schema": str(SCHEMAS / "readmission.toml"), "clients": 4,
    }  # fmt: skip
    settings = [("Adult", adult, "record"), ("readmissions", readmissions, "record")]
    settings.append(("readmissions", readmissions, "person"))
    rows: list[dict[str, object]] = []
    for (table, keys, unit), trust in track([*itertools.product(settings, ALL_TRUSTS)], "calibration"):
        asked = {**keys, "epsilon": CALIBRATION_EPSILON, "unit": unit, "trust": trust}
        test, shares, train, trained_shares = np.array([_risks(asked, seed) for seed in SEEDS]).T
        ratios = {"ratio": test / shares, "exact": trained_shares / shares, "training": train / trained_shares}
        numbers = {name: (float(np.mean(found)), float(np.std(found, ddof=1))) for name, found in ratios.items()}
        row = {"table": table, "unit": unit, "trust": trust, "clients": keys["clients"]}
        means = {"mean_predicted": float(test.mean()), "observed": float(shares.mean())}
        spread = {f"{name}{end}": pair[k] for name, pair in numbers.items() for k, end in enumerate(("", "_std"))}
        rows.append({**row, **{name: round(value, 4) for name, value in (means | spread).items()}})
    return rows


def _risks(keys: dict[str, object], seed: int) -> tuple[float, float, float, float]:
    """Mean predicted and observed risk of test records, then of training records."""
    prepared = run.prepare(Spec.of({**keys, "seed": seed, "split_seed": seed}))
    *_, last = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    data = prepared.dataset
    predicted = [float(prepared.model.scores(last.model, x)[:, 1].mean()) for x in (data.x_test, data.x_train)]
    return predicted[0], float(data.y_test.mean()), predicted[1], float(data.y_train.mean())


def _calibration_report(rows: list[dict[str, object]]) -> list[str]:
    lines = [
        "",
        "## Predicted against observed risk",
        "",
        f"ε = {CALIBRATION_EPSILON:g}, δ = 1e-5, replace-one, `auto` with its defaults, 20 splits and draws of "
        "noise: mean ± standard deviation of one run. *Exact*: the same ratio for a model whose mean risk is that "
        "of the training records, without any noise. What it is away from 1 is the sampling error of the split, "
        "which no calibration removes. *On training*: the ratio on training records, which is what noise and "
        "clipping alone do.",
        "",
        "| table | clients | unit | trust | predicted | observed | predicted / observed | exact | on training |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [f"{100 * float(row[key]):.1f} %" for key in ("mean_predicted", "observed")]  # type: ignore[arg-type]
        ratios = [f"{row[name]:.2f} ± {row[f'{name}_std']:.2f}" for name in ("ratio", "exact", "training")]
        about = [str(row[key]) for key in ("table", "clients", "unit", "trust")]
        lines.append(f"| {' | '.join([*about, *shares, *ratios])} |")
    split = [float(row["ratio"]) / float(row["exact"]) - 1 for row in rows]  # type: ignore[arg-type]
    noisy = max(rows, key=lambda row: float(row["training_std"]))  # type: ignore[arg-type]
    lines += [
        "",
        f"Beside *exact*, the means of all rows are within {100 * max(map(abs, split)):.0f} %. A single run is another "
        f"matter: of {noisy['table']} the split alone moves the ratio by {100 * float(noisy['exact_std']):.0f} %, and "  # type: ignore[arg-type]
        f"per {noisy['unit']} under {noisy['trust']} noise moves it by another "
        f"{100 * float(noisy['training_std']):.0f} %, so that a single run is often more than 10 % away.",  # type: ignore[arg-type]
    ]
    return lines


class Patients(NamedTuple):
    """TCGA-BRCA by its schema, and signed times that do not end at the last edge."""

    schema: Schema
    x: np.ndarray
    y: np.ndarray
    region: np.ndarray
    exact: np.ndarray
    flamby_test: np.ndarray

    def split(self, seed: int | None) -> np.ndarray:
        """The test records: FLamby's, or a fifth of each region by seed."""
        if seed is None:
            return self.flamby_test
        rng, test = np.random.default_rng(seed), np.zeros(len(self.y), bool)
        for name in np.unique(self.region):
            own = rng.permutation(np.flatnonzero(self.region == name))
            test[own[: round(TEST_SHARE * len(own))]] = True
        return test


def tcga(folder: Path) -> list[dict[str, object]]:
    path, schema = folder / "tcga_brca.csv", Schema.read(SCHEMAS / "tcga_brca.toml")
    table = tables.open_table(path, types={**schema.reads(), "fold": "text"}, missing=schema.missing)
    x, y, region, _ = schema.encode(table)
    days, event = (np.asarray(table.column(name).to_pylist(), float) for name in ("days", "event"))
    fold = np.asarray(table.column("fold").to_pylist()) == "test"
    exact = np.where(event == 1, 1, -1) * np.maximum(days, 1e-3)
    patients = Patients(schema, x, np.asarray(y), np.asarray(region), exact, fold)
    rows: list[dict[str, object]] = []
    for split in ("FLamby's split", "20 random splits"):
        seeds = [None if split == "FLamby's split" else seed for seed in SEEDS]
        cox = [_cox(patients, patients.split(seed)) for seed in ([None] if seeds[0] is None else seeds)]
        rows.append({"split": split, "epsilon": "Cox", "trust": None, **_mean_and_std("concordance", cox)})
        for epsilon, trust in track([*itertools.product(SURVIVAL_EPSILONS, TRUSTS)], f"TCGA-BRCA, {split}"):
            noises = SEEDS if epsilon < float("inf") or seeds[0] is not None else [0]
            found = [_tcga_once(patients, patients.split(seeds[k]), epsilon, trust, k) for k in noises]
            index, brier, predicted, observed = zip(*found, strict=True)
            row = {"split": split, "epsilon": _written(epsilon), "trust": trust}
            means = {"brier": brier, "survival_5_years": predicted, "observed_5_years": observed}
            means_of = {key: round(statistics.mean(values), 4) for key, values in means.items()}
            rows.append({**row, **_mean_and_std("concordance", index), **means_of})
    return rows


def _mean_and_std(name: str, values: Sequence[float]) -> dict[str, object]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {name: round(statistics.mean(values), 4), "std": None if std is None else round(std, 4)}


def _tcga_once(
    patients: Patients, test: np.ndarray, epsilon: float, trust: str, seed: int
) -> tuple[float, float, float, float]:
    """Concordance on exact times, Brier score, and survival at five years, predicted and observed."""
    x, y, schema = preprocess(patients.x, None, f"table:{patients.schema.used}"), patients.y, patients.schema
    data = Dataset("tcga", x[~test], y[~test], x[test], y[test], patients.region[~test], (), schema=schema)
    spec = Spec.of({"epsilon": epsilon, "delta": 1e-4, "trust": trust, "seed": seed, "partition": "by-site"})
    prepared = run.prepare_resolved(resolve(spec, schema=schema), data)
    *_, last = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    model, here = prepared.model, torch.from_numpy(x[test])
    risk = model.predict(last.model, here).numpy()
    edges = prepared.model.intervals[1:]  # type: ignore[union-attr]
    survival = model.scores(last.model, here).numpy()
    five = edges.index(1825.0)
    observed = constant_survival(y[test], edges)[five]
    index = concordance(patients.exact[test], risk)
    return index, brier(y[test], survival, edges), float(survival[:, five].mean()), float(observed)


def _cox(patients: Patients, test: np.ndarray) -> float:
    """The concordance of lifelines' Cox model without privacy, on the same encoded features and split."""
    from lifelines import CoxPHFitter
    from lifelines.utils import concordance_index
    from pandas import DataFrame

    time, event = np.abs(patients.exact), patients.exact > 0
    columns = [f"x{k}" for k in range(patients.x.shape[1])]
    frame = DataFrame(patients.x.astype(float), columns=columns).assign(time=time, event=event)
    train = frame[~test]
    varied = [name for name in columns if train[name].std() > 0]
    fitted = CoxPHFitter(penalizer=PENALTY).fit(train[[*varied, "time", "event"]], "time", "event")
    risk = fitted.predict_partial_hazard(frame[test])
    return float(concordance_index(time[test], -risk, event[test]))


def _written(epsilon: float) -> float | str:
    return "inf" if epsilon == float("inf") else epsilon


def _tcga_report(rows: list[dict[str, object]]) -> list[str]:
    splits = list(dict.fromkeys(row["split"] for row in rows))
    lines = [
        "",
        "## TCGA-BRCA over six regions: survival",
        "",
        "1,088 patients, 151 deaths, a fifth for testing. Harrell's concordance index on exact times, mean of 20 draws "
        "of noise (and of the split) ± standard deviation of one run; δ = 1e-4, record level, replace-one. Cox: "
        f"lifelines' CoxPHFitter (penalizer {PENALTY:g}) without privacy, on the same features and records.",
        "",
        "| | "
        + " | ".join(f"{split}, {seen}" for split in splits for seen in ("every message seen", "only sums seen"))
        + " |",
        "|---|" + "---|" * (2 * len(splits)),
    ]
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
        cells = []
        for split in splits:
            own = [row for row in rows if row["split"] == split and row["epsilon"] == epsilon]
            cells += [_index(row) for row in (own if len(own) > 1 else own * 2)]
        name = "Cox, no privacy" if epsilon == "Cox" else f"ε = {'∞' if epsilon == 'inf' else f'{epsilon:g}'}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Calibration on the random splits: Brier score (mean over edges, weighted for censoring) and survival at five "
        "years, mean predicted against Kaplan-Meier of the test records.",
        "",
        "| ε | trust | Brier score | predicted | observed |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["split"] == splits[-1] and row["epsilon"] != "Cox":
            epsilon = "∞" if row["epsilon"] == "inf" else f"{row['epsilon']:g}"
            shares = [f"{100 * float(row[key]):.1f} %" for key in ("survival_5_years", "observed_5_years")]  # type: ignore[arg-type]
            lines.append(f"| {epsilon} | {row['trust']} | {row['brier']:.3f} | {' | '.join(shares)} |")
    return lines


def _index(row: dict[str, object]) -> str:
    return f"{row['concordance']:.3f}" + ("" if row["std"] is None else f" ± {row['std']:.3f}")


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
    return "\n".join([*lines, *_calibration_report(document["calibration"]), *_tcga_report(document["tcga"])]) + "\n"


PARTS = {"heart": heart, "adult": adult, "tcga": tcga, "calibration": calibration}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="TABLES_DIR")
    parser.add_argument("--only", choices=PARTS, help="compute one part, and keep the others")
    arguments = parser.parse_args()
    out = ROOT / "results"
    document = json.loads((out / "tables.json").read_text()) if arguments.only else {}
    if not arguments.only:
        document["provenance"] = provenance("python benchmarks/tables.py TABLES_DIR")
    else:
        document[f"{arguments.only}_provenance"] = provenance(
            f"python benchmarks/tables.py TABLES_DIR --only {arguments.only}"
        )
    for name, compute in PARTS.items():
        if arguments.only in (None, name):
            document[name] = compute(arguments.folder)
    (out / "tables.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (out / "tables.md").write_text(report(document), encoding="utf-8")
    print(report(document))


if __name__ == "__main__":
    main()
