"""The figures of "Statistical limits" (arXiv 2605.18656): the error of FedSGD, FedAvg, FedHybrid and FedNewton.

The designs are those of `sordino estimate`, which `sordino.studies.estimation` describes: the paper prints the numbers
and sizes of clients, and the numbers of gradients of FedAvg and FedNewton; dimension, true parameter, budgets and steps
are ours. It prints no values, so none stand beside these. The guarantee is mu-GDP for one record of a client against
the server, replace-one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from papers.tables import PaperTable, TableRequest, TableResult, against, of_table, roots
from sordino.data.partition import SIZE_LAWS
from sordino.errors import SordinoError
from sordino.studies import estimation
from sordino.studies.estimation import CLIENTS, LABELS, MUS, POOLED, SPLITS

REPETITIONS, MNIST_REPETITIONS = 200, 10
MNIST_CLIENTS, GRADIENTS = 80, 100
ALL = "all records pooled, no privacy"
FEW_CLIENTS, FEW_GRADIENTS, FEW_METHODS = 4, 4, 2  # of a trial
END = "end"  # in place of a round: errors are those of the last model

NOTES = (
    "no value is printed in the paper; its figures show orders and slopes",
    "FedSGD takes 100 noisy gradients, FedHybrid 50 locally and 50 together, FedAvg two rounds of 50, FedNewton 50 "
    "locally and one Newton step",
    "every client is mu-GDP for one record towards the server, replace-one; runs are simulated, so none is certified",
)
SIMULATED = (
    "squared error of the parameter; ± is over repetitions, of which each has its own data and noise",
    "the paper prints neither dimension, true parameter, budgets, bounds nor steps: ours are five dimensions, mu 0.5, "
    "1 and 3, and the constants of sordino estimate, which makes these points too",
)
MNIST_NOTES = (
    "test accuracy over 80 clients; features are 7 x 7 averages of 4 x 4 pixels, each record less its mean and scaled "
    "to norm 1; benchmarks/mnist_full.py has all pixels, without FedNewton for ten classes",
)


def _repetitions(request: TableRequest, usual: int) -> int:
    if request.rounds is not None:
        return 2
    if request.seeds is not None and request.seeds < 2:
        raise SordinoError(
            f"--seeds: {request.seeds} must be at least 2 for {request.table.name}, because ± needs two repetitions; "
            f"leave it out for {usual}."
        )
    return request.seeds or usual


def _mus(request: TableRequest) -> tuple[float, ...]:
    """Budgets; a trial has one."""
    if request.epsilons is not None and request.rounds is None:
        raise SordinoError(
            f"--epsilons: {request.table.name} has budgets mu = {', '.join(f'{mu:g}' for mu in MUS)}; leave it out, or "
            "name others to sordino estimate --mu."
        )
    return MUS if request.rounds is None else MUS[:1]


# ------------------------------------------------------------------------------------------------------- simulations


def simulated(
    request: TableRequest, model: str, designs: Sequence[tuple[str, str]], clients: Sequence[int] = ()
) -> TableResult:
    """Figures 1 to 6 and 11 to 16.

    Args:
      request: seeds are repetitions.
      model: logistic or poisson.
      designs: names of designs, and for each the law of sizes, as `estimation.cells` takes them.
      clients: the numbers of clients of the designs, if they vary them.
    """
    repetitions, mus = _repetitions(request, REPETITIONS), _mus(request)
    cells = [cell for design, law in designs for cell in estimation.cells(design, [model], mus, law)]
    if clients:
        kept = of_table(request, clients)
        cells = [cell for cell in cells if cell.clients in kept]
    if request.rounds is not None:
        cells = list(dict.fromkeys(replace(cell, iterations=FEW_GRADIENTS) for cell in cells))
    across = "clients" if clients else "gradients"
    points = list(estimation.measure(cells, repetitions, device=request.device, progress=lambda done: request.tick(1)))
    lines = [line for point in points for line in _lines(point, across)]
    return TableResult(lines, across, (*NOTES, *SIMULATED), estimated={"points": points})


def _lines(point: dict[str, Any], across: str) -> list[dict[str, Any]]:
    """The methods at one point."""
    gradients, lines = point["iterations"], []
    for name, found in point["methods"].items():
        x = point["clients"] if across == "clients" else gradients
        labels = {"sizes": point["sizes"], "mu": point["mu"], "method": {**LABELS, POOLED: ALL}[name], across: x}
        settings = {key: point[key] for key in ("model", "records", "clients", "samples")} | {"gradients": gradients}
        figure = {**_figure(found["error"], found["se"], point["samples"]), "digits": 4}
        lines.append({"labels": labels, "rounds": {END: figure}, "settings": settings})
    return lines


def _figure(mean: float, se: float, samples: int) -> dict[str, Any]:
    spread = se * math.sqrt(samples)
    return {**against([mean]), "std": estimation.rounded(spread), "samples": samples}


# ------------------------------------------------------------------------------------------------------------- MNIST


def mnist(request: TableRequest, binary: bool) -> TableResult:
    """Figures 7 and 8: test accuracy of a linear model on MNIST by budget."""
    repetitions, trial = _repetitions(request, MNIST_REPETITIONS), request.rounds is not None
    data = estimation.mnist(_folder(request), binary=binary)
    clients = FEW_CLIENTS if trial else MNIST_CLIENTS
    points, lines = [], []
    for mu in _mus(request):
        accuracies = estimation.mnist_accuracies(
            data,
            mu,
            binary=binary,
            clients=clients,
            repetitions=repetitions,
            device=request.device,
            iterations=FEW_GRADIENTS if trial else GRADIENTS,
            progress=lambda done: request.tick(1),
        )
        points.append(estimation.mnist_point(mu, accuracies))
        for name, found in points[-1]["methods"].items():
            figure = _figure(100 * found["accuracy"], 100 * found["se"], repetitions)
            settings = {"clients": clients, "samples": repetitions}
            lines.append({"labels": {"method": LABELS[name], "mu": mu}, "rounds": {END: figure}, "settings": settings})
    pooled = estimation.mnist_pooled(data, binary=binary, steps=FEW_GRADIENTS if trial else 500)
    notes = (*NOTES, *MNIST_NOTES, f"all records pooled, without privacy: {100 * pooled:.1f} %")
    task = "even or odd" if binary else "ten classes"
    return TableResult(lines, "mu", notes, estimated={"points": points, "pooled": pooled, "task": task})


def _folder(request: TableRequest) -> Path:
    """The folder of MNIST's files."""
    folders = [folder for root in roots(request.data_dir) for folder in (root, root / "mnist")]
    return next(folder for folder in folders if (folder / str(request.table.needs)).is_file())


# --------------------------------------------------------------------------------------------------------------- CNN


def network(request: TableRequest, data: str) -> TableResult:
    """Figures 9 and 10: the runs of benchmarks/cnn.py, whose steps are chosen on validation records."""
    with _benchmarks() as cnn:
        if request.rounds is None and request.epsilons not in (None, (cnn.EPSILON,)):
            raise SordinoError(f"--epsilons: {request.table.name} has epsilon {cnn.EPSILON:g} alone; leave it out.")
        found = cnn.measured(
            request.data_dir,
            data,
            device=request.device,
            seeds=tuple(range(1, request.seeds + 1)) if request.seeds else cnn.SEEDS,
            methods=tuple(cnn.METHODS)[:FEW_METHODS] if request.rounds else tuple(cnn.METHODS),
            workers=1 if request.rounds is None else 0,
            trial=request.rounds,
            tell=lambda done: request.tick(1),
        )
        about = (
            f"{cnn.ROUNDS} rounds, clip 1, Poisson minibatches of {cnn.BATCH}, Dirichlet 0.5, epsilon {cnn.EPSILON:g}"
        )
        middle = "{} clients with {} samples each".format(*cnn.MIDDLE)
    lines, failed = [], dict[str, None]()
    for key in dict.fromkeys((job["label"], job["clients"], job["samples"]) for job in found["runs"]):
        jobs = [job for job in found["runs"] if (job["label"], job["clients"], job["samples"]) == key]
        failed |= dict.fromkeys(f"{key[0]}: {job['error']}" for job in jobs if "error" in job)
        if scores := [100 * job["scores"][0] for job in jobs if "scores" in job]:
            labels = {"method": key[0], "clients": key[1], "samples of each": key[2]}
            lines.append({"labels": labels, "rounds": {END: against(scores)}, "settings": found["settings"][key[0]]})
    if not lines:
        raise SordinoError(
            f"{request.table.name}: every run failed ({'; '.join(failed)}); python benchmarks/cnn.py run DIR --data "
            f"{data} --quick shows where."
        )
    notes = (
        NOTES[0],
        f"the paper prints no settings; ours: {about}, delta 1e-5, replace-one, untrusted server",
        f"each method's step was chosen on validation records (no test record) with {middle}; nobody paid for that",
        *(f"not run: {each}" for each in failed),
    )
    return TableResult(lines, "clients", notes)


@contextlib.contextmanager
def _benchmarks() -> Iterator[Any]:
    """The script, in whose folder its worker processes find it too."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("cnn")
    finally:
        sys.path.remove(folder)


# ------------------------------------------------------------------------------------------------------------ tables

DIGITS = (
    "mnist-train-images-idx3-ubyte.gz",
    "the first of MNIST's four gzipped idx files, whose names begin with mnist-, in DIR or DIR/mnist",
)


def _simulation(
    name: str, figures: str, model: str, designs: Sequence[tuple[str, str]], clients: Sequence[int], about: str
) -> PaperTable:
    make = partial(simulated, model=model, designs=designs, clients=clients)
    return PaperTable(name, f"{about}, {model} regression ({figures})", make)


EQUAL, ALL_LAWS = [("equal", "equal")], [(law, law) for law in SIZE_LAWS]
UNEQUAL, FIXED = ALL_LAWS[1:], [("fixed-total", law) for law in SIZE_LAWS]
STEPS = [("iterations", "equal")]
MANY, TOTAL = "error, about 400 records per client", "error, 20,000 records in all"

TABLES = (
    _simulation("limits-1", "figures 1 and 2", "logistic", EQUAL, CLIENTS, f"{MANY}, equal sizes"),
    _simulation("limits-3", "figure 3", "logistic", ALL_LAWS, CLIENTS, f"{MANY}, by law of sizes"),
    _simulation("limits-4", "figure 4", "logistic", STEPS, (), "error by number of gradients"),
    _simulation("limits-5", "figure 5", "logistic", FIXED, SPLITS, TOTAL),
    _simulation("limits-6", "figure 6", "poisson", EQUAL, CLIENTS, f"{MANY}, equal sizes"),
    PaperTable("limits-7", "accuracy on MNIST, even or odd (figure 7)", partial(mnist, binary=True), *DIGITS),
    PaperTable("limits-8", "accuracy on MNIST, ten classes (figure 8)", partial(mnist, binary=False), *DIGITS),
    PaperTable(
        "limits-9",
        "accuracy of a CNN on MNIST, end to end (figure 9)",
        partial(network, data="mnist"),
        "mnist",
        "MNIST's four gzipped idx files (downloaded by sordino run --data mnist)",
    ),
    PaperTable(
        "limits-10",
        "accuracy of a CNN on CIFAR-10, end to end (figure 10)",
        partial(network, data="cifar10"),
        "cifar10",
        "cifar-10-python.tar.gz (downloaded by sordino run --data cifar10)",
    ),
    _simulation("limits-11", "figures 11 and 12", "logistic", UNEQUAL, CLIENTS, f"{MANY}, unequal sizes"),
    _simulation("limits-13", "figures 13 and 14", "poisson", UNEQUAL, CLIENTS, f"{MANY}, unequal sizes"),
    _simulation("limits-15", "figure 15", "poisson", STEPS, (), "error by number of gradients"),
    _simulation("limits-16", "figure 16", "poisson", FIXED, SPLITS, TOTAL),
)
