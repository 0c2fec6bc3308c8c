"""`sordino predict`: a trained model on new records."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, emit
from sordino.errors import SordinoError


def add(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        act,
        "apply a trained model to a file",
        "sordino predict runs/mine new.csv",
    )
    parser.add_argument("model", metavar="MODEL", help="a run's directory, its public/, or a model.safetensors")
    parser.add_argument(
        "file",
        metavar="FILE",
        help=".csv or .parquet with the training columns, .npz with x, or (text models) .txt, one sentence per line",
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.training.folder import RunFolder
    from sordino.training.predict import predict

    if Path(arguments.model).exists() and not Path(arguments.file).expanduser().is_file():
        raise SordinoError(f"data: there is no file '{arguments.file}'; check the path.")
    predictions = predict(arguments.model, arguments.file)
    if not (RunFolder.find(Path(arguments.model)).public / "certificate.json").is_file():
        print(
            "WARNING: there is no certificate beside the model, so nobody can tell whether it was exchanged.",
            file=sys.stderr,
        )
    document = {"predictions": predictions.labels}
    if predictions.classes:
        document |= {"classes": predictions.classes, "probabilities": predictions.probabilities}
    if not emit(arguments, document):
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(["row", "prediction", *(f"p({name})" for name in predictions.classes)])
        for row, label in enumerate(predictions.labels):
            chances = [f"{p:.4f}" for p in predictions.probabilities[row]] if predictions.classes else []
            out.writerow([row, label, *chances])
    return 0
