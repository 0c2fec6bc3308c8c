"""Shrink documents in results/ to what pages show: provenance, command and aggregates stay.

    python benchmarks/compact.py results/table3/untrusted-server.json results/paper/*.json

A comparison (`sordino compare`) keeps each run's accuracy at rounds 10 and 70. A paper's table (`python -m papers`)
keeps mean and standard deviation of each line, ours and published, and the settings it was tuned to, or their file.
Estimation keeps the sum of a prediction, no medians, and nothing that is null, and names its columns once; subsampling
leaves out what was tried, times, and the work and noise multiplier of rows other than epsilon 1; the study of a CNN
joins the seeds of a cell and leaves out times; audits keep bounds and
how near the attack came; checks name their columns once; the table of methods leaves out the command of each run. Other
documents only lose white space and digits. What is dropped is made again by the command in the document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROUNDS = (10, 70)
RUN = ("label", "method", "epsilon", "seed")
AUDIT = ("method", "unit", "adjacency", "trust", "batch", "certified", "lower_thresholds", "lower_gaussian")
AUDIT = (*AUDIT, "lower_account", "reach", "least_claim", "runs", "broken")
CHECK = ("name", "unit", "adjacency", "query", "claimed", "worst_found", "passed")
UNSHOWN = ("device", "torch", "smallest")  # of a point of estimation
UNSHOWN_OF_ROWS = ("options", "validation", "epsilon_accounted", "milliseconds_per_round")  # of subsampling
SHOWN_AT_ONE = ("noise_multiplier", "record_gradients")  # of subsampling, at epsilon 1
CELL_OF_RUN = ("label", "value", "clients", "samples")
CELL = ("ours", "std", "published", "published_std", "digits", "mark", "published_mark")


def comparison(document: dict[str, Any]) -> dict[str, Any]:
    runs = [
        {**{key: run[key] for key in RUN}, "accuracy": {str(t): run["accuracy"][t - 1] for t in ROUNDS}}
        for run in document["runs"]
        if run["group"] == "comparison"
    ]
    return {**{key: document[key] for key in ("sordino", "command", "host", "setting", "data")}, "runs": runs}


def table(document: dict[str, Any]) -> dict[str, Any]:
    lines = [
        {
            "labels": line["labels"],
            "rounds": {
                t: {key: digits(cell, key) for key in CELL if cell.get(key) is not None}
                for t, cell in line["rounds"].items()
            },
        }
        for line in document["lines"]
    ]
    return {**document, "lines": lines, "tuning": settings(document["tuning"])}


def digits(cell: dict[str, Any], key: str) -> Any:
    """Accuracies in percent to 0.01, unless a page, which shows 0.1, would then differ; other measures as they are."""
    if key not in ("ours", "std") or "digits" in cell:
        return cell[key]

    def shown(value: float) -> tuple[str, str]:
        return f"{value:.1f}", f"{round(value - (cell.get('published') or 0.0), 4):.1f}"

    short = round(cell[key], 2)
    return short if shown(short) == shown(cell[key]) else cell[key]


def settings(tuning: dict[str, Any] | None) -> dict[str, Any] | None:
    """Settings that papers/published holds, or a larger table of results/paper, are named and not repeated."""
    root = Path(__file__).parents[1]
    if not tuning or "settings" not in tuning:
        return tuning
    for path in sorted([*root.glob("papers/published/*settings_*.json"), *root.glob("results/paper/*.json")]):
        held = json.loads(path.read_text(encoding="utf-8"))
        held = (held.get("tuning") or {}).get("settings", []) if "lines" in held else held["settings"]
        more = len(held) > len(tuning["settings"]) and all(each in held for each in tuning["settings"])
        if (held == tuning["settings"] and path.parent.name == "published") or more:
            rest = {key: value for key, value in tuning.items() if key != "settings"}
            return {**rest, "file": path.relative_to(root).as_posix()}
    return tuning


def estimation(document: dict[str, Any]) -> dict[str, Any]:
    """Points as rows under columns that are named once; those of MNIST, which have other fields, stay as they are.

    `points_of` of benchmarks/estimation.py reads both. A document in this form stays as it is.
    """
    if "columns" in document:
        return document
    simulated = [flat(shown_of_point(point)) for point in document["points"] if "model" in point]
    columns = list(dict.fromkeys(name for point in simulated for name in point))
    rest = {key: value for key, value in document.items() if key != "points"}
    rows = [[point.get(name) for name in columns] for point in simulated]
    mnist = [shown_of_point(point) for point in document["points"] if "model" not in point]
    return {**rest, "columns": columns, "rows": rows, "mnist": mnist}


def shown_of_point(point: dict[str, Any]) -> dict[str, Any]:
    """A point without what no page shows: medians, parts of a prediction, more than two digits of a standard error."""

    def measured(values: dict[str, float]) -> dict[str, float]:
        kept = {key: value for key, value in values.items() if key != "median"}
        return {**kept, "se": float(f"{values['se']:.2g}")}

    kept = {key: value for key, value in point.items() if key not in UNSHOWN and value is not None}
    kept["methods"] = {name: measured(values) for name, values in point["methods"].items()}
    if "predicted" in point:
        kept["predicted"] = {name: {"total": parts["total"]} for name, parts in point["predicted"].items()}
    return kept


def flat(point: dict[str, Any]) -> dict[str, Any]:
    """A point with names such as "methods fedsgd error" in place of tables inside tables."""
    values = {key: value for key, value in point.items() if key not in ("methods", "predicted")}
    for part in ("methods", "predicted"):
        for name, figures in point.get(part, {}).items():
            values |= {f"{part} {name} {key}": value for key, value in figures.items()}
    return values


def subsampled(document: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a row: its work and its noise multiplier stand beside the row of epsilon 1 alone."""

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        left_out = UNSHOWN_OF_ROWS if row["epsilon"] == 1 else (*UNSHOWN_OF_ROWS, *SHOWN_AT_ONE)
        return {key: value for key, value in row.items() if key not in left_out}

    return {**document, "rows": list(map(kept, document["rows"]))}


def checks(document: list[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
    """Reports of `sordino check --json` with their columns once, and the problems of failures; no page shows how near
    engines are. A document in this form stays as it is."""
    if isinstance(document, dict):
        return document
    problems = sorted({problem for row in document for problem in row.get("problems", ())})
    rows = [[row[key] for key in CHECK] for row in document]
    return {"columns": list(CHECK), **({"problems": problems} if problems else {}), "rows": rows}


def cells(document: dict[str, Any]) -> dict[str, Any]:
    """Runs that differ in their seeds alone become one entry; `cnn.one_by_one` takes them apart."""

    def joined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_cell: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for run in sorted(runs, key=lambda run: run["seeds"]):
            if "scores" in run:
                by_cell.setdefault(tuple(run[key] for key in CELL_OF_RUN if key in run), []).append(run)
        return [
            {key: value for key, value in mine[0].items() if key in CELL_OF_RUN}
            | {key: [each for run in mine for each in run[key]] for key in ("seeds", "scores")}
            for mine in by_cell.values()
        ]

    return document | {part: joined(document[part]) for part in ("tuning", "runs", "tried") if part in document}


def without_commands(document: dict[str, Any]) -> dict[str, Any]:
    """The command of a row follows from its method and data, and is in benchmarks/methods.py."""
    rows = [{key: value for key, value in row.items() if key != "command"} for row in document["rows"]]
    return {**document, "rows": rows}


def shrunk(path: Path, document: Any) -> Any:
    if path.stem.startswith("audit") and isinstance(document, list):
        return [{key: row[key] for key in AUDIT} for row in document]
    if path.stem.startswith("checks"):
        return checks(document)
    if isinstance(document, list):
        return document
    own = {"estimation": estimation, "subsampled": subsampled, "methods": without_commands}
    own |= {"cnn": cells, "cnn_cifar10": cells}
    if path.stem in own:
        return own[path.stem](document)
    if "lines" in document:
        return table(document)
    return comparison(document) if "pairs" in document else document


def rounded(value: Any) -> Any:
    """Floats to five significant digits; pages show four at most."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def text(document: dict[str, Any] | list[Any]) -> str:
    """One line for each entry of a list or table: readable in a difference, short on disk."""

    def short(value: Any) -> str:
        return json.dumps(rounded(value), ensure_ascii=False, separators=(",", ":"))

    if isinstance(document, list):
        return "[\n" + ",\n".join(map(short, document)) + "\n]\n"
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            parts.append(f"{short(key)}:[\n" + ",\n".join(map(short, value)) + "\n]")
        elif isinstance(value, dict) and value and key != "provenance":
            parts.append(f"{short(key)}:{{\n" + ",\n".join(f"{short(k)}:{short(v)}" for k, v in value.items()) + "\n}")
        else:
            parts.append(f"{short(key)}:{short(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(text(shrunk(path, document)), encoding="utf-8")
