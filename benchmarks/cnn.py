"""A CNN end to end with unlike clients: does Fisher preconditioning on the server help without convexity?

`run DATA_DIR --device cuda`: samples per client and number of clients varied at one epsilon; each method's step chosen
on validation records in the middle cell, then three seeds everywhere; median accuracy. `report` writes results/cnn.md.
With `--data cifar10` the pictures are those of CIFAR-10, and the files cnn_cifar10.json and .md. What the file --out
holds already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleet import train
from provenance import provenance

RESULTS = Path(__file__).resolve().parents[1] / "results"
EPSILON, ROUNDS, STEPS, BATCH, SEEDS = 8.0, 40, 5, 128, (1, 2, 3)
MIDDLE = (20, 1000)  # clients, samples of each
CELLS = (*((20, m) for m in (250, 1000, 2500)), *((n, 20_000 // n) for n in (5, 10, 40)))
LRS = (0.1, 0.3, 1.0, 3.0, 10.0)
FEW = {"clients": 2, "batch": "poisson:4", "partition": "iid"}  # of a trial
K = {"steps": STEPS}
METHODS: dict[str, tuple[dict[str, Any], str, tuple[float | None, ...]]] = {
    # name: keys, the option that is tuned, its values (None: its default)
    "auto, not tuned": ({"method": "auto"}, "lr", (None,)),
    "FedSGD": ({"method": "fedsgd"}, "lr", LRS),
    "DP-FedAdam": ({"method": "dp-fedadam"}, "lr", (0.003, 0.01, 0.03, 0.1)),
    "DP-FedAdam, scaled": ({"method": "dp-fedadam-scaled"}, "lr", (0.003, 0.01, 0.03, 0.1)),
    "DP-FedAvg, K = 5": ({"method": "dp-fedavg", **K}, "local_lr", LRS),
    "FedHybrid": ({"method": "fedhybrid", "local_steps": STEPS, "local_lr": 0.3}, "lr", LRS),
    "FedNewton-head": (
        {"method": "fednewton-head", "local_steps": STEPS, "blocks": 10, "rounds": 20},
        "local_lr",
        LRS,
    ),
    "DP-FedSOFIM (gradient), K = 1": ({"method": "dp-fedsofim", "rho": 1.0}, "lr", LRS),
    "DP-FedSOFIM (momentum), K = 1": ({"method": "dp-fedsofim", "rho": 1.0, "apply_to": "momentum"}, "lr", LRS),
    "DP-FedSOFIM (gradient), K = 5": ({"method": "dp-fedsofim", "rho": 1.0, "local_lr": 0.3, **K}, "lr", LRS),
    "DP-FedSOFIM (momentum), K = 5": (
        {"method": "dp-fedsofim", "rho": 1.0, "local_lr": 0.3, "apply_to": "momentum", **K},
        "lr",
        LRS,
    ),
    "DP-FedAdamW, K = 5": ({"method": "dp-fedadamw", "tau": 0.01, **K}, "lr", (0.003, 0.01, 0.03, 0.1)),
}

READING = (
    "Fisher preconditioning on the server hardly helps this non-convex model. FedSGD uses the same gradients",
    "without it. Compared with FedSGD, DP-FedSOFIM with K = 1 gains two points if clients have 250 records each,",
    "and is equal otherwise (differences of medians are below the spread of seeds). Its momentum form is five to",
    "eight points behind. With K = 5 it loses to plain averaging of the same local steps (DP-FedAvg), except at the",
    "largest noise (250 records). Local steps help if clients have many records: DP-FedAdamW leads with at least",
    "2,500 records per client or at most ten clients, and DP-FedAvg follows; both fall behind if records are few.",
    "FedNewton-head pays for its curvature and is far behind. Tuning chose the largest step of the grid for FedSGD,",
    "FedHybrid and DP-FedSOFIM, so a wider grid might improve them.",
)

READING_CIFAR = (
    "Untuned `auto` has the highest median in four of six cells, is level with the best tuned method in one (2,500",
    "records per client), and four points behind in one (1,000 records), where its three seeds differ by ten points.",
    "One of its 18 runs ended at 21 %. It takes five minibatches per round and the other methods one, or K. Its",
    "longest step and the spectrum of its steps were chosen on part of these records and this network, so it had an",
    "advantage here; MNIST and the sentences of [networks](networks.md) had no part in that choice. Before that",
    "change it ended at chance in most runs with 1,000 records or more. Preconditioning helps this network: the",
    "momentum form of DP-FedSOFIM with K = 1 and scaled DP-FedAdam lead the tuned methods, five to ten points ahead",
    "of FedSGD. Local steps gain little. No method comes near what a network learns without privacy.",
)


def load(part: str, data_dir: str | None, name: str) -> Any:
    """The pictures; `tuning`: a tenth of the training records in place of the test records."""
    from sordino.data.sources import load
    from sordino.studies.tune import validated

    data = load(name, data_dir=data_dir)
    if part.startswith("tuning"):
        data = validated(data)
    clients, samples = map(int, part.split()[1:])
    keep = np.random.default_rng(0).permutation(len(data.y_train))[: clients * samples]
    return data._replace(x_train=data.x_train[keep], y_train=data.y_train[keep])


def values(data: str, clients: int, options: dict[str, Any], option: str, value: float | None) -> dict[str, Any]:
    shared = {"data": data, "model": "cnn", "clients": clients, "partition": "dirichlet:0.5", "epsilon": EPSILON}
    shared |= {"batch": f"poisson:{BATCH}"}
    clip = {} if options["method"] == "auto" else {"clip": 1.0}
    return {**shared, "rounds": ROUNDS, **clip, **options} | ({} if value is None else {option: value})


def run(arguments: argparse.Namespace) -> None:
    began, path = time.perf_counter(), arguments.out
    before = json.loads(path.read_text()) if path.exists() and not arguments.quick else {}
    out = {"provenance": provenance(command(arguments.data, arguments.device)), "data": arguments.data}

    def save(found: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(out | found, indent=1) + "\n")

    found = measured(
        arguments.folder,
        arguments.data,
        device=arguments.device,
        workers=arguments.workers,
        trial=2 if arguments.quick else None,
        save=(lambda found: None) if arguments.quick else save,
        before=before,
    )
    if not arguments.quick:
        save(found | {"seconds": time.perf_counter() - began + before.get("seconds", 0.0)})


def measured(
    folder: str | None,
    data: str,
    *,
    device: str = "cpu",
    workers: int = 1,
    seeds: Sequence[int] = SEEDS,
    methods: Sequence[str] = tuple(METHODS),
    trial: int | None = None,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
    tell: Callable[[str], None] = print,
    before: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """The step of each method, chosen in the middle cell, and then the runs of all cells.

    Args:
      folder: where the pictures are; None for where they are looked for.
      data: mnist or cifar10.
      device: cpu or cuda.
      workers: processes, as `fleet.train` takes them.
      seeds: of the runs of the cells.
      methods: names in METHODS.
      trial: so many rounds of one step, one cell, one seed and two clients, to see that it runs.
      save: called with what there is so far, every ten runs of the cells.
      tell: called with a line for each run that ends.
      before: what an earlier call found, which is not trained again; failed runs are.
    """
    began, known = time.perf_counter(), {label: METHODS[label] for label in methods}

    def fill(jobs: list[Any], found: dict[str, Any], part: str) -> dict[str, Any]:
        for job in jobs if trial is not None else ():
            short = trial if "blocks" not in job["values"] else job["values"]["rounds"]
            job["values"] |= {**FEW, "rounds": short}
            job["at"] = [short]
        names = [_about(job) for job in jobs]
        done = [old for old in one_by_one(before.get(part, ())) if _about(old) in names]
        wanted = [k for k, name in enumerate(names) if name not in [_about(old) for old in done]]
        lacking = [jobs[k] for k in wanted]
        for number, result in train(lacking, load, (folder, data), device=device, workers=workers):
            job = names[wanted[number]]
            if "scores" in result:
                result["scores"] = [list(scores.values())[-1] for scores in result["scores"]]
            done.append(job | result)
            tell(f"{time.perf_counter() - began:6.0f} s {job} {result.get('scores', result)}")
            if part == "runs" and len(done) % 10 == 0:
                save(found | {part: done})
        return found | {part: done}

    def keys(label: str, clients: int, value: float) -> dict[str, Any]:
        options, option, _ = METHODS[label]
        return values(data, clients, options, option, value)

    jobs = [
        {"label": label, "value": value, "values": keys(label, MIDDLE[0], value), "seeds": [0]}
        | {"at": [options.get("rounds", ROUNDS)], "part": f"tuning {MIDDLE[0]} {MIDDLE[1]}"}
        for label, (options, _, grid) in known.items()
        for value in (grid if trial is None else grid[:1])
    ]
    found = fill(jobs, {}, "tuning")
    chosen = {}
    for label, (_, _, grid) in known.items():
        mine = [job for job in found["tuning"] if job["label"] == label and "scores" in job]
        chosen[label] = max(mine, key=lambda job: job["scores"][0])["value"] if mine else grid[0]
    jobs = [
        {"label": label, "clients": n, "samples": m, "seeds": [seed], "part": f"final {n} {m}"}
        | {"values": {**keys(label, n, chosen[label]), "split_seed": seed}, "at": [options.get("rounds", ROUNDS)]}
        for n, m in (CELLS if trial is None else CELLS[:1])
        for label, (options, _, _) in known.items()
        for seed in (seeds if trial is None else seeds[:1])
    ]
    settings = {
        label: METHODS[label][0] | ({} if value is None else {METHODS[label][1]: value})
        for label, value in chosen.items()
    }
    return fill(jobs, found | {"chosen": chosen, "settings": settings}, "runs")


def one_by_one(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs that succeeded, with one seed each: a file of results joins the seeds of a cell (`compact.cells`)."""
    return [
        {**run, "seeds": [seed], "scores": [score]}
        for run in runs
        for seed, score in zip(run["seeds"], run.get("scores", ()), strict=False)
    ]


def _about(job: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key in ("label", "value", "clients", "samples", "seeds")}


def command(data: str, device: str) -> str:
    return f"python benchmarks/cnn.py run DATA_DIR --device {device}" + ("" if data == "mnist" else f" --data {data}")


def report(path: Path) -> str:
    document = json.loads(path.read_text())
    data = document.get("data", "mnist")
    size, reading = ("26,010 parameters, ", READING) if data == "mnist" else ("", READING_CIFAR)
    runs = document["runs"] + document.get("tried", [])
    labels = dict.fromkeys([*(label for label in METHODS if label in document["chosen"]), *(j["label"] for j in runs)])

    def line(*cells: str) -> str:
        return "| " + " | ".join(cells) + " |"

    def table(cells: list[tuple[int, int]], head: list[str]) -> list[str]:
        lines = [line("", *head), line("---", *["---"] * len(head))]
        for label in labels:
            row = []
            for n, m in cells:
                mine = [job for job in runs if (job["label"], job["clients"], job["samples"]) == (label, n, m)]
                scores = [100 * score for job in mine for score in job.get("scores", ())]
                row.append(f"{statistics.median(scores):.1f} ({min(scores):.1f}–{max(scores):.1f})" if scores else "–")
            lines.append(line(label, *row))
        return lines

    by_samples = [cell for cell in CELLS if cell[0] == MIDDLE[0]]
    by_clients = sorted({*(cell for cell in CELLS if cell[0] * cell[1] == 20_000)})
    steps = {name: value for name, value in document["chosen"].items() if value is not None}
    chosen = "; ".join(f"{name} {value:g}" for name, value in steps.items())
    return "\n".join(
        [
            f"# CNN on {'MNIST' if data == 'mnist' else 'CIFAR-10'}, end to end",
            "",
            f"`{command(data, 'cuda')}`: {size}Dirichlet 0.5, ε = "
            f"{EPSILON:g} (δ = 1e-5, replace-one, untrusted server), {ROUNDS} rounds, clip 1, Poisson minibatches "
            f"of {BATCH}. Test accuracy in percent: median (lowest to highest) of three seeds, which change partition, "
            "start and noise.",
            "",
            *reading,
            "",
            f"Samples of each of {MIDDLE[0]} clients:",
            "",
            *table(by_samples, [str(m) for _, m in by_samples]),
            "",
            "Number of clients that share 20,000 records:",
            "",
            *table(by_clients, [str(n) for n, _ in by_clients]),
            "",
            f"Chosen on validation records in the cell {MIDDLE[0]} × {MIDDLE[1]} (not paid for): {chosen}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("folder", nargs="?", help="where the files of the pictures are")
    parser.add_argument("--data", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few rounds of each method, to see that it runs")
    parser.add_argument("--out", type=Path, help="results/cnn.json, or results/cnn_cifar10.json")
    words = parser.parse_args()
    words.out = words.out or RESULTS / ("cnn.json" if words.data == "mnist" else f"cnn_{words.data}.json")
    if words.what == "run":
        run(words)
    if not words.quick:
        words.out.with_suffix(".md").write_text(report(words.out))
        print(report(words.out))


if __name__ == "__main__":
    main()
