"""The error of four private estimators over all designs: results/estimation.json, docs/*.png; the site shows them.

    python benchmarks/estimation.py                                   # 200 repetitions of every point
    python benchmarks/estimation.py --device cuda --jobs 12 --data ../shared/data

Logistic and Poisson regression, three laws of client sizes, mu = 0.5, 1, 3: 20 to 60 clients with some 400 records
each, 20,000 records over 10 to 200 clients, and 2 to 400 gradients. --data is a folder with MNIST's four files; without
it that part is left out. Finished points are kept in --cache, one line each, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from provenance import provenance
from sordino.data.partition import SIZE_LAWS
from sordino.studies import estimation
from sordino.studies import estimation_report as report
from sordino.studies.estimation import LABELS, MUS, DesignPoint, cells

ROOT = Path(__file__).parents[1]
KINDS = ("logistic", "poisson")
MNIST = {"mnist-binary": "even or odd", "mnist-multiclass": "ten classes"}


def all_cells() -> list[DesignPoint]:
    designs = (
        [(law, law) for law in SIZE_LAWS] + [("fixed-total", law) for law in SIZE_LAWS] + [("iterations", "equal")]
    )
    points = [cell for design, law in designs for cell in cells(design, KINDS, MUS, law)]
    return list(dict.fromkeys(points))


def measured(cell: DesignPoint, repetitions: int, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    (point,) = estimation.measure([cell], repetitions, device=device)
    return {"cell": repr(cell), **point, **_where(device)}


def accuracies(task: str, mu: float, folder: str, device: str) -> dict[str, Any]:
    binary = task == "mnist-binary"
    data = estimation.mnist(folder, binary=binary)
    by_method = estimation.mnist_accuracies(data, mu, binary=binary, device=device)
    pooled = estimation.mnist_pooled(data, binary=binary)
    return {
        "cell": f"{task} {mu:g}",
        "task": task,
        "pooled": pooled,
        **estimation.mnist_point(mu, by_method),
        **_where(device),
    }


def _where(device: str) -> dict[str, str]:
    return {"device": device, "torch": torch.__version__}


def simulate(
    cache: Path, *, repetitions: int, jobs: int, device: str, data: str | None, tell: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Every point, the dearest first; what the cache holds is not done again."""
    done = {p["cell"]: p for p in map(json.loads, cache.read_text().splitlines())} if cache.exists() else {}
    points = [cell for cell in all_cells() if repr(cell) not in done]
    points.sort(key=lambda cell: -sum(cell.sizes) * cell.iterations)
    tasks = [(task, mu) for task in MNIST for mu in MUS if data and f"{task} {mu:g}" not in done]
    total = len(done) + len(points) + len(tasks)
    with (
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
        cache.open("a") as store,
    ):
        waiting = [pool.submit(accuracies, task, mu, data, device) for task, mu in tasks]
        waiting += [pool.submit(measured, cell, repetitions, device) for cell in points]
        for future in as_completed(waiting):
            point = future.result()
            done[point["cell"]] = point
            store.write(json.dumps(point) + "\n")
            store.flush()
            tell(len(done), total)
    measured_points = [done[repr(cell)] | estimation.foretold(cell) for cell in all_cells()]
    return measured_points + [done[name] for name in (f"{task} {mu:g}" for task in MNIST for mu in MUS) if name in done]


# ------------------------------------------------------------------------------------------------------- the page


def chosen(points: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [p for p in points if all(p.get(key) == value for key, value in wanted.items())]


def groups(points: list[dict[str, Any]], kind: str) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(title, figure's name, points) of one model."""
    mine = [p for p in points if p.get("model") == kind]
    yield "About 400 records per client", "clients", chosen(mine, total="grows", iterations=100)
    yield "20,000 records in all", "fixed_total", chosen(mine, total="fixed")
    steps = [p for p in mine if p["total"] == "grows" and p["clients"] == 40 and p["sizes"] == "equal"]
    yield (
        "Number of gradients: 40 clients, 400 records each",
        "iterations",
        sorted(steps, key=lambda p: (p["mu"], p["iterations"])),
    )


def failures(points: list[dict[str, Any]]) -> str:
    """Where FedNewton is worse than FedSGD."""
    rows = []
    wanted = [
        (
            "20,000 records over 200 clients, logistic",
            {"model": "logistic", "total": "fixed", "clients": 200, "mu": 3.0},
        ),
        *(
            (
                f"about 400 records at each of {m} clients, Poisson",
                {"model": "poisson", "total": "grows", "clients": m, "mu": 1.0},
            )
            for m in (20, 40, 60)
        ),
    ]
    for title, where in wanted:
        for p in chosen(points, iterations=100, **where):
            a, b = p["methods"]["fednewton"], p["methods"]["fedsgd"]
            rows.append(
                [
                    title,
                    p["sizes"],
                    f"{p['mu']:g}",
                    f"{report.short(a['error'])} ± {report.short(a['se'])}",
                    f"{report.short(b['error'])} ± {report.short(b['se'])}",
                    f"{a['error'] / b['error']:.1f}",
                    "yes" if p["fednewton_safe"] else "no",
                ]
            )
    return report.markdown(["design", "sizes", "μ", "FedNewton", "FedSGD", "ratio", "said to be safe"], rows)


def agreement(points: list[dict[str, Any]]) -> str:
    """Measured over predicted, by method."""
    rows = []
    for name, label in LABELS.items():
        for kind in KINDS:
            for iterations in ("100", "all"):
                here = [
                    p
                    for p in chosen(points, model=kind)
                    if (name != "fednewton" or p["fednewton_safe"]) and (iterations == "all" or p["iterations"] == 100)
                ]
                ratios = [p["methods"][name]["error"] / p["predicted"][name]["total"] for p in here]
                if ratios:
                    middle = f"{statistics.median(ratios):.2f}"
                    rows.append(
                        [label, kind, iterations, str(len(ratios)), middle, f"{min(ratios):.2f} – {max(ratios):.2f}"]
                    )
    return report.markdown(["method", "model", "gradients", "points", "median", "range"], rows)


def wins(points: list[dict[str, Any]]) -> str:
    """At how many points each method had the least error."""
    rows = []
    for kind in KINDS:
        for mu in MUS:
            here = chosen(points, model=kind, mu=mu, iterations=100)
            best = [min(LABELS, key=lambda name, p=p: p["methods"][name]["error"]) for p in here]
            rows.append([kind, f"{mu:g}", str(len(here)), *(str(best.count(name)) for name in LABELS)])
    return report.markdown(["model", "μ", "points", *LABELS.values()], rows)


def best_steps(points: list[dict[str, Any]]) -> str:
    """Every method at the number of gradients that served it best."""
    rows = []
    for kind in KINDS:
        for mu in MUS:
            here = chosen(points, model=kind, mu=mu, total="grows", clients=40, sizes="equal")
            row = [kind, f"{mu:g}"]
            for name in LABELS:
                p = min(here, key=lambda p, name=name: p["methods"][name]["error"])
                entry = p["methods"][name]
                row.append(f"{report.short(entry['error'])} ± {report.short(entry['se'])} at {p['iterations']}")
            rows.append(row)
    return report.markdown(["model", "μ", *LABELS.values()], rows)


def points_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of results/estimation.json, which `benchmarks/compact.py` keeps as rows under common columns."""
    if "points" in document:
        return document["points"]
    points = []
    for row in document["rows"]:
        point: dict[str, Any] = {}
        for column, value in zip(document["columns"], row, strict=True):
            *parts, last = column.split(" ")
            inner = point
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[last] = value
        points.append(point)
    return points + document["mnist"]


def page(document: dict[str, Any]) -> str:
    points = points_of(document)
    lines = [
        "# Private federated estimation: measured and predicted",
        f"`{document['provenance']['command']}`; raw figures in `results/estimation.json`. "
        f"Points come from the cache of finished ones, measured with {document['provenance']['measured_with']}; "
        "predictions and this page were made anew at the commit given there.",
        report.NOTES,
        "FedSGD takes 100 noisy gradients, FedHybrid 50 locally and 50 together, FedAvg two rounds of 50, FedNewton 50 "
        "locally and one Newton step; under *number of gradients* the 100 varies. Every client is mu-GDP towards the "
        "server.",
        "## Who had the least error (100 gradients)",
        wins(points),
        "## The best number of gradients (40 clients, 400 records each)",
        "A hundred gradients are far too many where each costs budget: FedNewton's lead over FedSGD is then mostly "
        "that it asks for one. Stopped in time, the four are close wherever FedNewton is safe. (The best number is "
        "read off the errors, which nobody can do with private data; the closed forms find it beforehand.)",
        best_steps(points),
        "## Where FedNewton fails",
        "A client's Hessian carries noise of size s_H = 2 √2 C_H / (μ n_i). Where that is not small against its "
        "eigenvalues, inverting it multiplies errors. `sordino advise` warns by n_i ≥ 8 √d Δ_H / (μ λ_min).",
        failures(points),
        "## Measured over predicted",
        agreement(points),
    ]
    for kind in KINDS:
        for title, name, here in groups(points, kind):
            if not here:
                continue
            lines += [
                f"## {kind.capitalize()}: {title[0].lower() + title[1:]}",
                f"![{title}](../docs/{_figure(kind, name)})",
            ]
            for law in dict.fromkeys(p["sizes"] for p in here):
                some = chosen(here, sizes=law)
                lines += [f"### Sizes {law}", report.errors_table(some), "Error over the rate:", report.gap_table(some)]
    tasks = mnist(points)
    if tasks:
        lines += [
            "## MNIST",
            "Test accuracy in percent over 80 clients of 750 records, dealt out at random; ± the standard error over "
            "the noise of 10 runs. Features are 7 × 7 averages of 4 × 4 pixels, each record less its own mean, scaled "
            "to norm 1: no record meets another, and FedNewton's Hessians stay at 49 × 49 (binary) and 490 × 490. The "
            "step (12) was chosen by hand, once for all methods and budgets, and is not paid for; FedNewton's eigen"
            "value floor is the size of its Hessian's noise. Here the features' smallest eigenvalues are near 0, so no "
            "number of records makes an undamped Newton step safe.",
            "![MNIST](../docs/estimation_mnist.png)",
        ]
        for title, (some, pooled) in tasks.items():
            lines += [f"### {title.capitalize()}", report.mnist_table(some, pooled)]
    return "\n\n".join(lines) + "\n"


def _figure(kind: str, name: str) -> str:
    return f"estimation_{kind}_{name}.png"


def mnist(points: list[dict[str, Any]]) -> dict[str, tuple[list[dict[str, Any]], float]]:
    by_title = {title: chosen(points, task=task) for task, title in MNIST.items()}
    return {title: (some, some[0]["pooled"]) for title, some in by_title.items() if some}


def write(points: list[dict[str, Any]], command: str) -> None:
    used = sorted({f"torch {p['torch']} on {p['device']}" for p in points})
    document = {
        "provenance": {**provenance(command), "measured_with": " and ".join(used)},
        "points": [{key: value for key, value in p.items() if key != "cell"} for p in points],
    }
    rows = ",\n".join("  " + json.dumps(p) for p in document["points"])
    head = json.dumps({"provenance": document["provenance"]}, indent=1)[:-2]
    (ROOT / "results" / "estimation.json").write_text(f'{head},\n "points": [\n{rows}\n ]\n}}\n')
    for kind in KINDS:
        for _, name, here in groups(points, kind):
            if here:
                report.draw(here, ROOT / "docs" / _figure(kind, name))
    if tasks := mnist(points):
        report.draw_mnist(tasks, ROOT / "docs" / "estimation_mnist.png")


def main() -> None:
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "estimation.jsonl")
    options = parser.parse_args()
    options.cache.parent.mkdir(parents=True, exist_ok=True)
    words = [f"--{name} {value}" for name, value in vars(options).items() if name != "cache" and value is not None]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("points", total=math.inf)
        points = simulate(
            options.cache,
            repetitions=options.repetitions,
            jobs=options.jobs,
            device=options.device,
            data=options.data,
            tell=lambda done, total: progress.update(task, completed=done, total=total),
        )
    write(points, " ".join(["python benchmarks/estimation.py", *words]))


if __name__ == "__main__":
    main()
