"""`sordino estimate`: the error of four private estimators, simulated and predicted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sordino.cli.show import Bar, add_device, add_json, bar, check_json, command, console, emit, numbers, plain, table
from sordino.cli.sweep import check_device
from sordino.errors import SordinoError, check_known

ABOUT = """
The command measures the squared error of FedSGD, FedHybrid, FedAvg and FedNewton over simulated federations. It
compares them with closed forms and with the pooled estimate without privacy. The guarantee is mu-GDP for one record of
a client, against a server that sees every message.

Designs:
  equal, uniform, lognormal  20 to 60 clients with about 400 records each
  fixed-total                20,000 records over 10 to 200 clients
  iterations                 40 clients, 2 to 400 gradients
  mnist-binary, mnist-multiclass
                             test accuracy over 80 clients; needs --data
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "estimate",
        act,
        "simulate private estimates and compare them with predictions",
        "sordino estimate\n"
        "sordino estimate --design fixed-total --mu 3 --repetitions 100\n"
        "sordino estimate --design lognormal --model poisson --mu 1 --out runs/poisson\n"
        "sordino estimate --design mnist-binary --data ../mnist --mu 0.5,1,3",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument(
        "--design", default="equal", metavar="X", help="design of the simulation, see above (default: equal)"
    )
    parser.add_argument("--model", default="logistic", help="logistic or poisson (default: logistic)")
    parser.add_argument(
        "--sizes", default="equal", help="law of client sizes in fixed-total and iterations (default: equal)"
    )
    parser.add_argument(
        "--mu", default="1", metavar="MU", help="privacy budget as Gaussian DP, or several: 0.5,1,3 (default: 1)"
    )
    parser.add_argument("--repetitions", type=int, metavar="N", help="simulations per point (default: 10; mnist: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and noise (default: 0)")
    parser.add_argument("--data", metavar="DIR", help="folder of MNIST's four gzipped idx files")
    add_device(parser)
    parser.add_argument("--out", metavar="DIR", help="folder for estimation.json, .md and .png")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    check_device(arguments.device)
    from sordino.data.partition import SIZE_LAWS
    from sordino.studies import estimation

    check_known("--design", arguments.design, estimation.DESIGNS)
    check_known("--sizes", arguments.sizes, SIZE_LAWS)
    mus, seed = _mus(arguments.mu), arguments.seed
    if seed < 0:
        raise SordinoError(f"--seed: {seed} must be 0 or more.")
    mnist = arguments.design.startswith("mnist")
    repetitions = (3 if mnist else 10) if arguments.repetitions is None else arguments.repetitions
    if not 2 <= repetitions <= 100_000:
        raise SordinoError(f"--repetitions: {repetitions} must lie between 2 and 100,000.")
    document = (_mnist if mnist else _simulate)(arguments, mus, repetitions)
    if arguments.out:
        _write(Path(arguments.out), document)
    if not emit(arguments, document):
        _tell(document)
        if arguments.out:
            console().print(f"written to {arguments.out}: estimation.json, estimation.md, estimation.png", markup=False)
    return 0


def _mus(text: str) -> list[float]:
    mus = numbers("--mu", text, "0.5,1,3")
    if not all(0.01 <= mu <= 100 for mu in mus):
        raise SordinoError(f"--mu: {text} must lie between 0.01 and 100.")
    return mus


def _simulate(arguments: argparse.Namespace, mus: list[float], repetitions: int) -> dict[str, Any]:
    from sordino.studies import estimation

    points = estimation.cells(arguments.design, [arguments.model], mus, arguments.sizes)
    estimation.setup(arguments.model), points[0].sizes  # an unknown value fails before any work
    total = sum(estimation.pieces(cell, repetitions) for cell in points)
    with bar("estimating", total) as progress:
        options = {"seed": arguments.seed, "device": arguments.device, "progress": _advance(progress)}
        results = list(estimation.measure(points, repetitions, **options))
    return {**_about(arguments, repetitions), "points": results}


def _mnist(arguments: argparse.Namespace, mus: list[float], repetitions: int) -> dict[str, Any]:
    from sordino.studies import estimation

    if arguments.data is None:
        raise SordinoError(
            "--data: name the folder that holds MNIST's four files (mnist-train-images-idx3-ubyte.gz …)."
        )
    binary = arguments.design == "mnist-binary"
    data = estimation.mnist(arguments.data, binary=binary)
    options: dict[str, Any] = {"binary": binary, "repetitions": repetitions, "seed": arguments.seed}
    results = []
    with bar("estimating", len(mus) * len(estimation.LABELS)) as progress:
        for mu in mus:
            accuracies = estimation.mnist_accuracies(
                data, mu, device=arguments.device, progress=_advance(progress), **options
            )
            results.append(estimation.mnist_point(mu, accuracies))
    pooled = estimation.mnist_pooled(data, binary=binary, steps=500)
    return {**_about(arguments, repetitions), "pooled": pooled, "points": results}


def _about(arguments: argparse.Namespace, repetitions: int) -> dict[str, Any]:
    from sordino.version import __version__

    command = shlex.join(["sordino", *sys.argv[1:]])
    return {"command": command, "version": __version__, "design": arguments.design, "samples": repetitions}


def _advance(progress: Bar) -> Callable[[str], None]:
    """One step of the bar, which shows what was done last."""

    def advance(done: str) -> None:
        progress()
        progress.update(shown=done)

    return advance


def _write(out: Path, document: dict[str, Any]) -> None:
    from sordino.studies import estimation_report as report

    report.pyplot()
    out.mkdir(parents=True, exist_ok=True)
    (out / "estimation.json").write_text(json.dumps(plain(document), indent=1) + "\n", encoding="utf-8")
    points = document["points"]
    if "pooled" in document:
        body = report.mnist_table(points, document["pooled"])
        report.draw_mnist({document["design"]: (points, document["pooled"])}, out / "estimation.png")
    else:
        tables = report.errors_table(points), "## Gap: error over the rate", report.gap_table(points)
        body = "\n\n".join((report.NOTES, *tables))
        report.draw(points, out / "estimation.png")
    title = f"# {document['design']}\n\n`{document['command']}`, {document['samples']} repetitions."
    (out / "estimation.md").write_text(f"{title}\n\n{body}\n", encoding="utf-8")


def _tell(document: dict[str, Any]) -> None:
    from sordino.studies import estimation_report as report
    from sordino.studies.estimation import LABELS, POOLED

    points = document["points"]
    if "pooled" in document:
        rows = [
            (
                f"{p['mu']:g}",
                *(f"{100 * p['methods'][m]['accuracy']:.1f} ± {100 * p['methods'][m]['se']:.1f}" for m in LABELS),
            )
            for p in points
        ]
        table(("mu", *LABELS.values()), rows)
        console().print(f"test accuracy in %; without privacy, from all records: {100 * document['pooled']:.1f}")
        return
    x = report.varying(points)
    rows = []
    for p in points:
        cells = (report.error_text(p, name, markdown=False) for name in (*LABELS, POOLED))
        rows.append((f"{p['mu']:g}", str(p[x]), *cells, report.short(p["rate"])))
    table(("mu", x, *LABELS.values(), POOLED, "rate"), rows)
    console().print("squared error ± standard error (predicted); the rate has constant 1; it is not a certificate")
