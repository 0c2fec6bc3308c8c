"""What a round costs against the number of simulated clients, of whom 100 are drawn for it.

    OMP_NUM_THREADS=1 python benchmarks/scale.py     # results/scale.json and results/scale.md

Each client holds 20 images of 28 x 28, made from a seed when it is drawn (`Lazy`); the model is the CNN of 26,010
parameters; minibatches are poisson:8. Every line is a process of its own, so that its memory is its own. Set-up is
apart: the plan's figures, with the calibration of the noise not yet on disk and again from there. Seconds are the
processor's, in one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from provenance import provenance
from sordino.core import Privacy, Trust, Unit
from sordino.data.records import Lazy
from sordino.engines import simulate
from sordino.methods import build
from sordino.models.nets import build as net
from sordino.privacy import calibration, releases, spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan

ROOT = Path(__file__).parents[1]
CLIENTS, COHORT, RECORDS = (100, 1_000, 10_000, 100_000), 100, 20
ROUNDS, WARM, TIMED = 100, 1, 5
HEAD = """Set-up: schedule and noise, with a cold cache of the calibration (in brackets: from the cache). Memory: growth
of the maximum resident size during set-up and during rounds; torch, the model and the sizes take 399 MiB before.
`spent`: epsilon by round, computed after the rounds; a plain simulation does not need it."""
CASES: dict[str, tuple[str, Unit, Trust, dict[str, Any]]] = {
    "dp-fedgd, record": ("dp-fedgd", Unit.RECORD, Trust.SECURE_AGGREGATION, {}),
    "dp-fedavg, 1 step, record": ("dp-fedavg", Unit.RECORD, Trust.SECURE_AGGREGATION, {"steps": 1, "local_lr": 0.1}),
    "dp-fedavg, 2 steps, record": ("dp-fedavg", Unit.RECORD, Trust.UNTRUSTED_SERVER, {"steps": 2, "local_lr": 0.1}),
    "dp-fedavg, 2 steps, client": ("dp-fedavg", Unit.CLIENT, Trust.SECURE_AGGREGATION, {"steps": 2, "local_lr": 0.1}),
}


def load(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(i)
    x = rng.standard_normal((RECORDS, 784), dtype=np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 10, RECORDS))


def resident() -> float:
    """The most so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(compute: Callable[[], Any]) -> float:
    begun = time.process_time()
    compute()
    return time.process_time() - begun


def one(case: str, clients: int) -> dict[str, Any]:
    """In this process: memory before, set-up, rounds, and what of a round is there for clients that stay at home."""
    name, unit, trust, options = CASES[case]
    model, method = net("cnn", 784, 10), build(name, unit, **options)
    records = Lazy.of((RECORDS,) * clients, load)
    memory = {"before": resident()}

    def new_plan() -> Plan:
        who, which = Participation("fixed", COHORT), Sampling("poisson", 8)
        privacy = Privacy(8.0, unit=unit, trust=trust)
        return Plan(method, ROUNDS, records.sizes, privacy, who, sampling=which)

    plan = new_plan()
    schedule = timed(lambda: plan.cohorts)
    cold = timed(lambda: calibration.query_noises(plan))
    again = new_plan()
    cached = timed(lambda: (again.cohorts, calibration.query_noises(again)))
    table, groups = timed(lambda: releases.participation_table(plan, 0)), timed(lambda: spending.groups(plan))
    memory["plan"] = resident()
    seconds, begun = [], time.process_time()
    for _ in simulate.run(plan, model, records, Seeded(1)):
        seconds.append(time.process_time() - begun)
        if len(seconds) == WARM + TIMED:
            break
        begun = time.process_time()
    memory["rounds"] = resident()
    spent = timed(lambda: spending.epsilon_after(plan, 0))
    memory["spent"] = resident()
    row = {"case": case, "trust": str(trust), "clients": clients, "rounds_planned": ROUNDS}
    row |= {
        "seconds_per_round": statistics.median(seconds[WARM:]),
        "first_round": seconds[0],
        "samples": seconds[WARM:],
    }
    row |= {"setup": {"schedule": schedule, "levels_cold": cold, "schedule_and_levels_cached": cached}}
    row["setup"] |= {"one_table_of_who_came": table, "groups": groups, "spent_by_round": spent}
    row |= {"peak_mib": memory, "home": at_home(plan, clients)}
    return row


def unlike(clients: int) -> dict[str, Any]:
    """The noise of clients of 10 to 60 records, no two accounts of which need be alike: as many searches."""
    sizes = tuple(np.random.default_rng(0).integers(10, 61, clients).tolist())
    name, unit, trust, options = CASES["dp-fedavg, 2 steps, record"]
    who, which = Participation("fixed", COHORT), Sampling("poisson", 8)
    plan = Plan(build(name, unit, **options), ROUNDS, sizes, Privacy(8.0, unit=unit, trust=trust), who, sampling=which)
    cold = timed(lambda: calibration.query_noises(plan))
    accounts = np.unique(np.stack(releases.account_columns(plan, calibration.query_noises(plan)[0])[2:], 1), axis=0)
    return {"clients": clients, "levels_cold": cold, "accounts": len(accounts)}


def at_home(plan: Plan, clients: int) -> dict[str, float]:
    """Seconds of those parts of a round that go over all clients, each the median of 20."""
    stds = calibration.query_noises(plan)[0].std
    cohort, sizes = plan.cohorts[0], plan.sizes
    influence = plan.weights / plan.participation.rate(clients)
    parts = {
        "sizes, a tuple, as an array": lambda: np.asarray(sizes, float)[cohort],
        "stds of all clients times the share": lambda: stds * 0.1,
        "noise of all clients, of whom the cohort is taken": lambda: (influence * stds)[..., cohort],
    }
    return {name: statistics.median(timed(part) for _ in range(20)) for name, part in parts.items()}


def apart(*arguments: str) -> dict[str, Any]:
    """What a process of its own finds, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--one", *arguments]
        environment = {**os.environ, "SORDINO_CACHE": cache, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(process.stderr)
    measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(*arguments, measured, flush=True)
    return measured


def main() -> None:
    document = {
        "provenance": provenance("OMP_NUM_THREADS=1 python benchmarks/scale.py"),
        "how": f"CPU time in one thread, median of {TIMED} rounds after the first; cohort {COHORT}, "
        f"{RECORDS} records per client, CNN of 26,010 parameters, poisson:8; a plan of {ROUNDS} rounds",
        "rows": [apart(case, str(clients)) for case in CASES for clients in CLIENTS],
        "unlike": [apart("unlike", str(clients)) for clients in CLIENTS],
    }
    (ROOT / "results" / "scale.json").write_text(json.dumps(document, indent=1) + "\n")
    write()


def write() -> None:
    document = json.loads((ROOT / "results" / "scale.json").read_text())
    (ROOT / "results" / "scale.md").write_text(report(document))


def report(document: dict[str, Any]) -> str:
    lines = ["# Cost of a round by the number of clients", "", f"Seconds: {document['how']}.", ""]
    lines += [HEAD, ""]
    names = ("method", "clients", "s per round", "set-up, s", "set-up, MiB", "rounds, MiB", "`groups`, s", "`spent`, s")
    lines += [f"| {' | '.join(names)} | `spent`, MiB |", "|---" * (len(names) + 1) + "|"]
    for row in document["rows"]:
        setup, memory = row["setup"], row["peak_mib"]
        whole = f"{setup['schedule'] + setup['levels_cold']:.2f} ({setup['schedule_and_levels_cached']:.3f})"
        lines.append(
            f"| {row['case']} | {row['clients']:,} | {row['seconds_per_round']:.3f} | {whole} | "
            f"{memory['plan'] - memory['before']:.0f} | {memory['rounds'] - memory['plan']:.0f} | "
            f"{setup['groups']:.3f} | {setup['spent_by_round']:.2f} | {memory['spent'] - memory['rounds']:.0f} |"
        )
    lines += ["", "Parts of a round, over all clients (milliseconds, `dp-fedgd, record`):", ""]
    first_case = [row for row in document["rows"] if row["case"] == document["rows"][0]["case"]]
    lines += [
        "| part | " + " | ".join(f"{row['clients']:,}" for row in first_case) + " |",
        "|---|" + "---|" * len(first_case),
    ]
    for part in first_case[0]["home"]:
        lines.append(f"| {part} | " + " | ".join(f"{1000 * row['home'][part]:.3f}" for row in first_case) + " |")
    lines += ["", "Calibration for clients with 10 to 60 records (`dp-fedavg, 2 steps, record`), cold:", ""]
    lines += ["| clients | accounts | s |", "|---|---|---|"]
    lines += [f"| {row['clients']:,} | {row['accounts']} | {row['levels_cold']:.1f} |" for row in document["unlike"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "CLIENTS"))
    parser.add_argument("--table", action="store_true", help="from results/scale.json alone")
    arguments = parser.parse_args()
    words = arguments.one
    if words:
        torch.set_num_threads(1)
        print(json.dumps(unlike(int(words[1])) if words[0] == "unlike" else one(words[0], int(words[1]))))
    else:
        write() if arguments.table else main()
