"""`sordino export`: a trained model in a format that other programs read."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.cli.show import add_weights, command, console, facts


def add(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        act,
        "write a trained model as coefficients, or for torch, scikit-learn or ONNX",
        "sordino export runs/mine --to coefficients\nsordino export runs/mine --to onnx --out risk.onnx",
    )
    parser.add_argument("model", metavar="RUN", help="a run's directory, its public/, or a model.safetensors")
    add_weights(parser)
    parser.add_argument("--to", required=True, metavar="FORMAT", help="coefficients, torch, sklearn or onnx")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write; it must not exist (default: coefficients.csv, model.pt2, model.joblib or model.onnx)",
    )


def act(arguments: argparse.Namespace) -> int:
    from sordino.training.export import export, output_of, preparation
    from sordino.training.intervals import told
    from sordino.training.predict import load_run

    run = load_run(arguments.model, weights=arguments.weights)
    written = export(run, arguments.to, arguments.out)
    rows = run.about.get("intervals")
    facts(
        [
            ("files", ", ".join(map(str, written))),
            ("input", f"{run.about['features']} encoded features; {preparation(run).words}"),
            ("output", f"probabilities of {', '.join(run.classes[:10])}" if run.classes else output_of(run)),
            *([("intervals", told(rows))] if arguments.to == "coefficients" and rows else []),
        ]
    )
    if run.certificate is not None and not run.certificate["certified"]:
        console().print("note: the run is not certified; publish the file only if its data are public", markup=False)
    return 0
