"""`sordino predict`: a trained model on new records."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sordino import files
from sordino.cli.show import add_json, add_weights, check_json, command, emit, facts
from sordino.errors import SordinoError
from sordino.foreign import cell

DIGITS = 6  # significant ones, of a predicted number or risk in a table


def add(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        act,
        "apply a trained model to a file",
        "sordino predict runs/mine new.csv\nsordino predict runs/mine new.csv --keep patient_id --out risks.csv\n"
        'sordino predict runs/language --prompt "The film was" --most 20 --temperature 0.7',
    )
    parser.add_argument("model", metavar="MODEL", help="a run's directory, its public/, or a model.safetensors")
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help=".csv or .parquet with the training columns, .npz with x, or (text models) .txt, one sentence per line",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy this column of FILE beside the predictions, such as an id; may be repeated",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="of causal-lora, in place of FILE: write what comes after it")
    parser.add_argument("--most", type=int, metavar="N", help="of causal-lora: new tokens at most (default: 40)")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="of causal-lora: above 0 tokens are drawn (default: 0)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of causal-lora: seed of the draws (default: 0)")
    add_weights(parser)
    parser.add_argument("--out", metavar="FILE", help="write the table to this CSV file, which must not exist")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.training.folder import RunFolder

    if (arguments.file is None) is (arguments.prompt is None):
        raise SordinoError("FILE: name a file of records, or write --prompt TEXT; one of them.")
    named = arguments.file is not None and not Path(arguments.file).expanduser().is_file()
    if Path(arguments.model).exists() and named:
        raise files.absent("data", arguments.file)
    target = None if arguments.out is None else Path(arguments.out)
    if target is not None and arguments.json:
        raise SordinoError("--out: it writes a table, and --json prints a document; use one of them.")
    if target is not None and target.exists():
        raise SordinoError(f"--out: '{target}' exists; name another file.")
    if target is not None and not target.absolute().parent.is_dir():
        raise SordinoError(f"--out: there is no folder for '{target}'; make it first.")
    if target is not None:
        files.check_writable(target)
    predictions = _predictions(arguments)
    kept = _kept(arguments, len(predictions.labels))
    if not (RunFolder.find(Path(arguments.model)).public / "certificate.json").is_file():
        print(
            "WARNING: there is no certificate beside the model, so nobody can tell whether it was exchanged.",
            file=sys.stderr,
        )
    document = {"predictions": predictions.labels}
    if predictions.classes:
        document |= {"classes": predictions.classes, "probabilities": predictions.probabilities}
    if kept:
        document["kept"] = kept
    if target is not None:
        with files.replacing(target) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            write(predictions, file, kept)
        facts([("files", str(target)), ("records", f"{len(predictions.labels):,}")])
    elif not emit(arguments, document):
        write(predictions, sys.stdout, kept)
    return 0


def _kept(arguments: argparse.Namespace, records: int) -> dict[str, list[str | None]]:
    """The columns of the file that --keep names, as texts."""
    if not arguments.keep:
        return {}
    from sordino.data import tables
    from sordino.training.predict import load_run

    if arguments.file is None or tables.suffix_of(Path(arguments.file)) not in tables.SUFFIXES:
        raise SordinoError("--keep: only tables have columns; leave it out.")
    schema, path = load_run(arguments.model, weights=arguments.weights).schema, Path(arguments.file).expanduser()
    names = list(dict.fromkeys(arguments.keep))
    table = tables.open_table(path, None if schema is None else schema.dialect, types=dict.fromkeys(names, "text"))
    if table.num_rows != records:
        raise SordinoError(f"--keep: '{path}' has {table.num_rows} rows for {records} predictions; leave it out.")
    return {name: tables.texts(table.column(name)).to_pylist() for name in names}


def _predictions(arguments: argparse.Namespace) -> Any:
    """Labels and probabilities, or what a causal language model writes."""
    from sordino.training.predict import Predictions, load_run

    run = load_run(arguments.model, weights=arguments.weights)
    how = {key: getattr(arguments, key) for key in ("most", "temperature", "seed")}
    how = {key: value for key, value in how.items() if value is not None}
    if run.writes:
        prompts = arguments.file if arguments.prompt is None else [arguments.prompt]
        return Predictions(run.generate(prompts, **how), [], [])
    if given := [*how, *(["prompt"] if arguments.prompt is not None else [])]:
        raise SordinoError(
            f"--{given[0]}: {run.about['kind']} predicts labels and writes no text; leave it out, and name a file."
        )
    return run.predictions(arguments.file)


def write(predictions: Any, file: IO[str], kept: Mapping[str, Sequence[str | None]]) -> None:
    """One row per record: its number from 0, columns that are kept, the prediction, and the probabilities. For people,
    so numbers are rounded; --json has all digits."""
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["row", *map(cell, kept), "prediction", *(f"p({name})" for name in predictions.classes)])
    for row, label in enumerate(predictions.labels):
        chances = [f"{p:.4f}" for p in predictions.probabilities[row]] if predictions.classes else []
        told = cell(label) if isinstance(label, str) else rounded(label)
        copied = [cell(column[row] or "") for column in kept.values()]
        out.writerow([row, *copied, told, *chances])


def rounded(value: float) -> str:
    """A number with six significant digits.

    >>> rounded(0.313819111470364), rounded(1234567.8), rounded(12.0)
    ('0.313819', '1234570', '12')
    """
    return f"{float(f'{value:.{DIGITS}g}'):.15g}"
