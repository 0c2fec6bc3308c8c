"""`auto` on networks beside every other method at its defaults. Writes results/networks.{json,md}.

    python benchmarks/networks.py prepare DATA_DIR FOLDER          # 46 MiB: MNIST, token ids of SST-2, MiniLM's weights
    python benchmarks/networks.py run FOLDER --device cuda --workers 8
    python benchmarks/networks.py run FOLDER --device cuda --methods auto      # renew these rows, keep the others
    python benchmarks/networks.py report                           # the page alone
    python benchmarks/networks.py run FOLDER --smoke --out FILE.json           # two rounds of few methods, on a CPU

A CNN on MNIST (10 clients) and adapters of MiniLM on SST-2 (4 clients), at epsilon 2 and 8 with an untrusted server,
Poisson minibatches of 64 per client and 100 rounds for all. Nothing is tuned: every method has its defaults. A method
that refuses the run is listed with the reason. For honesty, DP-FedAdam and DP-FedAdamW also have a grid of step sizes,
whose best mean on the test records is shown: 'tuned on the test records'. A run that is stopped goes on where it was:
finished jobs are in OUT.runs.json (beside --out).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sst2
from compact import text
from fleet import train
from provenance import provenance
from sordino.data.sources import load as load_data
from sordino.errors import SordinoError
from sordino.methods import REGISTRY
from sordino.methods.network import USUAL_MINIBATCHES
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

OUT = Path(__file__).resolve().parents[1] / "results" / "networks.json"
MNIST = "mnist-{}-{}-ubyte.gz"
EPSILONS, SEEDS, ROUNDS, BATCH = (2, 8), (1, 2, 3), 100, 64
OURS, TUNED = "auto", " (tuned)"
GRIDS = {"dp-fedadam": (0.003, 0.01, 0.03, 0.1), "dp-fedadamw": (0.001, 0.003, 0.01, 0.03)}
NAMES = {"mnist": "MNIST, CNN", "sst2": "SST-2, MiniLM with LoRA"}
UNFIT = ("fednew", "dp-boost")  # without privacy; trees
FORMS: dict[str, dict[str, Any]] = {"dp-fednew": {"curvature": "fisher"}}  # for networks
SINGLE = ("dp-disk",)  # refuse bfloat16


def prepare(source: str, folder: Path) -> None:
    """What a machine without a network needs."""
    sst2.prepare(source, folder)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            shutil.copy(Path(source) / MNIST.format(part, kind), folder)


def values(data: str, words: argparse.Namespace) -> dict[str, Any]:
    """The keys of a run that all methods share."""
    batch = 4 if words.smoke else BATCH
    shared = {"data": data, "rounds": words.rounds, "batch": f"poisson:{batch}", "delta": 1e-5}
    if data == "mnist":
        return {**shared, "model": "cnn", "clients": 10, "data_dir": words.folder}
    weights = str(Path(words.folder) / "minilm.safetensors")
    dtype = "bfloat16" if words.device == "cuda" else "float32"
    return {**shared, "model": "minilm-lora", "clients": 4, "weights": weights, "dtype": dtype}


def load(part: str, folder: str, rows: int | None) -> Any:
    if part == "sst2":
        return sst2.load("final", folder, rows)
    data = load_data("mnist", data_dir=folder)
    return data._replace(x_test=data.x_test[:rows], y_test=data.y_test[:rows])


def judge(run: Any, folder: str, rows: int | None, device: str) -> float:
    """Accuracy after the last round; of SST-2 on sentences in full length."""
    return (
        sst2.judge(run, folder, rows, device) if run.resolved.source.name == "sst2" else list(run.scores.values())[-1]
    )


def jobs(words: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """What is to be trained, the untuned first; and the methods that refuse it."""
    refused: set[str] = set()
    found, grids = [], []
    for data in words.data:
        for method in (OURS, *sorted(set(REGISTRY) - {OURS, *UNFIT})):
            if method not in (words.methods or ((OURS, "dp-fedadam") if words.smoke else REGISTRY)):
                continue
            shared = {**values(data, words), "method": method, **FORMS.get(method, {})}
            if method in SINGLE and "dtype" in shared:
                shared["dtype"] = "float32"
            if why := refusal({**shared, "epsilon": EPSILONS[0]}):
                print("refused:", why, flush=True)
                refused.add(method)
                continue
            for epsilon in EPSILONS:
                spec = {**shared, "epsilon": epsilon}
                job = {"data": data, "method": method, "epsilon": epsilon, "lr": None, "values": spec, "part": data}
                found.append(job)
                for lr in GRIDS.get(method, ())[: 1 if words.smoke else None]:
                    grids.append({**job, "lr": lr, "values": {**spec, "lr": lr}})
    return found + grids, sorted(refused)


def refusal(spec: dict[str, Any]) -> str:
    """Why a method does not train the network under these keys; empty if it does."""
    try:
        resolved = resolve(Spec.of(spec))
        resolved.plan((1000,) * int(spec["clients"]))
        resolved.build_model(*((784, 10) if spec["data"] == "mnist" else (sst2.SHORT, 2)))
    except SordinoError as error:
        return str(error)
    return ""


def about(job: dict[str, Any]) -> tuple[Any, ...]:
    return job["data"], job["method"], job["epsilon"], job["lr"], job["rounds"]


def run(words: argparse.Namespace) -> None:
    """Train what the store lacks. `earlier` in the file names the rows of calls before this one."""
    began, store = time.perf_counter(), words.out.with_suffix(".runs.json")
    only = f" --methods {' '.join(words.methods)}" if words.methods else ""
    origin = provenance(f"python benchmarks/networks.py run FOLDER --device {words.device}{only}")
    before = json.loads(words.out.read_text(encoding="utf-8")) if words.out.exists() else {}
    if not words.methods or before.get("rounds") != words.rounds:
        before = {"refused": []} | {data: {} for data in NAMES}
    done: list[dict[str, Any]] = json.loads(store.read_text()) if store.exists() else []
    wanted, refused = jobs(words)
    known = {about(job) for job in done}
    seeds = list(SEEDS[: 1 if words.smoke else None])
    wanted = [{**job, "rounds": words.rounds, "seeds": seeds, "at": [words.rounds]} for job in wanted]
    wanted = [job for job in wanted if about(job) not in known]
    earlier = {f"{job['data']} {job['method']}" for job in done if job["rounds"] == words.rounds}
    kept = {f"{data} {row.removesuffix(TUNED)}" for data in NAMES for row in before[data]}
    refused = sorted({*refused, *before["refused"]})

    def save() -> None:
        mine = [job for job in done if job["rounds"] == words.rounds]
        new = cells(mine)
        rows = {data: before[data] | new[data] for data in NAMES}
        known = sorted(earlier | kept - {f"{data} {row}" for data in NAMES for row in new[data]})
        document = {"provenance": origin, "rounds": words.rounds, "refused": refused, "earlier": known, **rows}
        words.out.write_text(text(document), encoding="utf-8")

    save()
    how: dict[str, Any] = {"device": words.device, "workers": words.workers, "judge": judge}
    for number, result in train(wanted, load, (words.folder, 100 if words.smoke else None), **how) if wanted else ():
        job = {key: wanted[number][key] for key in ("data", "method", "epsilon", "lr", "rounds")}
        if "error" in result:
            print("failed:", job, result["error"], flush=True)
            continue
        job["scores"] = [round(100 * score, 2) for scores in result["scores"] for score in scores.values()]
        done.append(job)
        print(f"{time.perf_counter() - began:5.0f} s", *about(job)[:4], job["scores"], flush=True)
        store.write_text(json.dumps(done))
        save()


def cells(done: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """By data and method: mean and standard deviation at each epsilon, and of tuned methods the chosen step (None: the
    default, which is a candidate too)."""
    table: dict[str, dict[str, list[float | None]]] = {data: {} for data in NAMES}
    for data in NAMES:
        for tuned in (False, True):
            for method in (OURS, *sorted({job["method"] for job in done if job["data"] == data} - {OURS})):
                row: list[float | None] = []
                for epsilon in EPSILONS:
                    mine = [job for job in done if about(job)[:3] == (data, method, epsilon)]
                    if not tuned:
                        mine = [job for job in mine if job["lr"] is None]
                    elif all(job["lr"] is None for job in mine):
                        continue
                    if mine:
                        best = max(mine, key=lambda job: statistics.mean(job["scores"]))
                        row += summary(best["scores"]) + ([best["lr"]] if tuned else [])
                if row:
                    table[data][method + TUNED * tuned] = row
    return table


def summary(scores: list[float]) -> list[float]:
    return [round(statistics.mean(scores), 1), round(statistics.stdev(scores) if len(scores) > 1 else 0.0, 1)]


def page(document: dict[str, Any]) -> str:
    """The page, from the JSON alone."""
    head = [f"ε = {epsilon:g}" for epsilon in EPSILONS]
    lines = [
        "# `auto` on networks",
        "",
        f"`{document['provenance']['command']}`. No setting is tuned: every method has its defaults. Record level, "
        f"untrusted server, Poisson minibatches of {BATCH} per client, {document['rounds']} rounds for all. `auto` "
        f"takes {USUAL_MINIBATCHES} minibatches per round, a method with local steps one per step, others one: they "
        "see different numbers of records. Accuracy in % on the test records: "
        f"mean ± standard deviation of {len(SEEDS)} seeds. The rows *tuned* show the best of four step sizes and "
        "the default on the test records: no untuned method could know it, and the search was not paid for. "
        f"{named(FORMS)} has the Fisher matrix of the last layer for its Hessian, and {named(SINGLE)} computes in "
        "float32 where others take bfloat16.",
    ]
    for data, name in NAMES.items():
        rows = document[data]
        if not rows:
            continue
        lines += ["", f"## {name}", "", "| method | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
        for method, row in sorted(rows.items(), key=lambda item: (TUNED in item[0], item[0] != OURS, -item[1][0])):
            wide = 3 if TUNED in method else 2
            parts = [row[k : k + wide] for k in range(0, len(row), wide)]
            steps = [f" (step {part[2] or 'by default'})" if wide == 3 else "" for part in parts]
            shown = [f"{part[0]:.1f} ± {part[1]:.1f}{step}" for part, step in zip(parts, steps, strict=True)]
            lines.append(f"| `{method.removesuffix(TUNED)}`{', tuned' * (wide == 3)} | " + " | ".join(shown) + " |")
        others = {method: row for method, row in rows.items() if method != OURS and TUNED not in method}
        if OURS in rows and others:
            lines += ["", *(sentence(rows, others, k) for k in range(len(EPSILONS)))]
        if missing := named({method for other in NAMES for method in document[other]} - set(rows)):
            lines += ["", f"No figure here, because they failed or the time was over: {missing}."]
    if document["earlier"]:
        new = {f"{data} {row}" for data in NAMES for row in document[data] if TUNED not in row}
        rows = named(new - set(document["earlier"])) or "none"
        lines += ["", f"The call that the file names computed these rows, earlier calls the others: {rows}."]
    shown = {method.removesuffix(TUNED) for data in NAMES for method in document[data]}
    lines += ["", f"Not run, because they refuse these networks or minibatches: {named(document['refused'])}."]
    if newer := set(REGISTRY) - shown - {*UNFIT, *document["refused"]}:
        lines += ["", f"Not run, because they are newer than these runs: {named(newer)}."]
    return "\n".join([*lines, ""])


def named(methods: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(methods))


def sentence(rows: dict[str, list[float]], others: dict[str, list[float]], k: int) -> str:
    best = max(others, key=lambda method: others[method][2 * k])
    gap = rows[OURS][2 * k] - others[best][2 * k]
    return f"At ε = {EPSILONS[k]:g} the best other untuned method is `{best}`; `auto` differs by {gap:+.1f} points."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare")
    making.add_argument("data_dir")
    making.add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder")
    running.add_argument("--device", default="cpu")
    running.add_argument("--workers", type=int, default=1)
    running.add_argument("--data", nargs="+", choices=tuple(NAMES), default=tuple(NAMES))
    running.add_argument("--methods", nargs="+", metavar="METHOD", help="these alone; rows of others stay as they are")
    running.add_argument("--smoke", action="store_true", help="two rounds of two methods, to see that it runs")
    running.add_argument("--out", type=Path, default=OUT)
    commands.add_parser("report").add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    if words.command == "prepare":
        prepare(words.data_dir, words.folder)
        return
    if words.command == "run":
        words.rounds = 2 if words.smoke else ROUNDS
        run(words)
    words.out.with_suffix(".md").write_text(page(json.loads(words.out.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
