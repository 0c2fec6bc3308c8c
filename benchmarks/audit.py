"""Audits of everything that is certified: results/audit.json and results/audit.md.

    python benchmarks/audit.py [--seconds 240] [--again] [--renew METHOD]

The rows are those of `sordino audit --all --seed 1`. They take 55 minutes on one core, so the command works in
pieces: it goes on where the last one ended, and stops after so many seconds. `--again` begins anew, and `--renew` drops
the rows of one method, which were all measured at the first commit that is named, so that they are measured now.
`--page` only writes the page. results/black_box.json and results/fuzz.json, where they exist, are shown on the page as
well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
COMMAND = "python benchmarks/audit.py --again --seconds 3600"
NAMES = ("method", "unit", "adjacency", "trust", "batch")
NUMBERS = ("certified", "lower_thresholds", "lower_gaussian", "lower_account", "reach", "least_claim", "runs")
COLUMNS = (*NAMES, *NUMBERS, "seconds")
GOAL = 0.8  # of the certified epsilon


def jobs() -> list[Any]:
    """The audits of `sordino audit --all --seed 1`."""
    from sordino.cli import audit

    parser = argparse.ArgumentParser()
    audit.add(parser.add_subparsers())
    return list(audit._jobs(parser.parse_args(["audit", "--all", "--seed", "1"])))


def key(job: Any) -> tuple[str, ...]:
    """What a row is about."""
    from sordino.checks.audit import adapters, integers

    name, privacy = job.args[0], job.args[-1]
    if job.func is adapters.audit:
        name = f"{adapters.METHOD} adapters={name}"
    trust = "secure-aggregation" if job.func is integers.audit else privacy.trust
    return name, str(privacy.unit), str(privacy.adjacency), str(trust), job.keywords.get("batch", "full")


def read() -> dict[tuple[str, ...], list[Any]]:
    """The rows so far, by what they are about."""
    path = RESULTS / "audit.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {tuple(row[: len(NAMES)]): row for row in document["rows"]} if "rows" in document else {}


def write(rows: list[list[Any]], one_run: list[list[float]] | None = None, again: bool = False) -> None:
    """Write the rows, and how many of them are of which commit: pieces of the work may lie between changes."""
    path = RESULTS / "audit.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = one_run or (before.get("one_run") if isinstance(before, dict) else None)
    found = provenance(COMMAND)
    commits = {} if again else dict(before.get("rows_of_commits", {}))
    commits[found["commit"]] = commits.get(found["commit"], 0) + len(rows) - sum(commits.values())
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps(
        {
            "provenance": found,
            "rows_of_commits": commits,
            "delta": 1e-5,
            "confidence": 0.95,
            "columns": COLUMNS,
            "one_run": kept,
        }
    )
    (RESULTS / "audit.json").write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def drop(method: str) -> None:
    """Leave the rows of a method out, and out of the count of the first commit."""
    path = RESULTS / "audit.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in document["rows"] if row[0] != method]
    first = next(iter(document["rows_of_commits"]))
    document["rows_of_commits"][first] -= len(document["rows"]) - len(rows)
    path.write_text(json.dumps(document | {"rows": rows}), encoding="utf-8")


def _late(job: Any) -> int:
    """Rows that take long come last: sums, calibration, lemmas."""
    from sordino.checks.audit import attacks
    from sordino.cli.audit import CALIBRATE

    name, trust = key(job)[0], key(job)[3]
    if name in (CALIBRATE, "dp-fednew", "dp-fednew-fc"):
        return 2 if name == CALIBRATE else 3
    return int(trust != "untrusted-server" and job.func is attacks.audit)


def row_of(number: int) -> list[Any]:
    """The row of one of `jobs`."""
    job, start = jobs()[number], time.process_time()
    found = job()
    values = [getattr(found, name) for name in NUMBERS]
    rounded = [round(value, 4) if isinstance(value, float) else value for value in values]
    return [*key(job), *rounded, round(time.process_time() - start, 1)]


def rows_of(missing: list[int], workers: int, end: float) -> Iterator[tuple[int, list[Any]]]:
    """Rows as they are measured, of jobs that begin before the time is over: the longest last, or first by workers."""
    if workers == 1:
        for number in missing:
            if time.perf_counter() > end:
                return
            yield number, row_of(number)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(row_of, number): number for number in reversed(missing)}
        for future in as_completed(futures):
            yield futures[future], future.result()
            if time.perf_counter() > end:
                pool.shutdown(cancel_futures=True)
                return


def measure(seconds: float, again: bool, workers: int = 1) -> int:
    """Audit until the time is over, and return how many rows are missing."""
    known, began, wanted = {} if again else read(), time.perf_counter(), jobs()
    order = sorted(range(len(wanted)), key=lambda number: _late(wanted[number]))
    missing = [number for number in order if key(wanted[number]) not in known]
    for number, row in rows_of(missing, workers, began + seconds):
        known[key(wanted[number])] = row
        print(*row, flush=True)
        write([known[key(each)] for each in wanted if key(each) in known], again=again)
        again = False
    write([known[key(each)] for each in wanted if key(each) in known])
    return sum(key(job) not in known for job in wanted)


# ------------------------------------------------------------------------------------------------------------- the page


def page() -> str:
    """results/audit.md. Rows of `sordino audit --all` that were not measured yet are counted."""
    document = json.loads((RESULTS / "audit.json").read_text(encoding="utf-8"))
    rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
    parts = (
        summary(rows, len(jobs()) - len(rows)),
        commits(document),
        by_method(rows),
        below(rows),
        one_run(document),
        finished_runs(),
        fuzzed(),
    )
    return "\n".join(["# Audits: lower bounds on ε\n", *(line for part in parts for line in part)])


def lower(row: dict[str, Any]) -> float:
    """The bound under the form of noise that the certificate states."""
    bound = row["lower_gaussian"] if row["lower_account"] is None else row["lower_account"]
    return float(bound)


def summary(rows: list[dict[str, Any]], missing: int) -> Iterator[str]:
    broken = [row for row in rows if max(lower(row), row["lower_thresholds"]) > row["certified"]]
    new = [row for row in rows if row["seconds"] is not None]
    above = [row for row in new if lower(row) >= GOAL * row["certified"]]
    seconds = [row["seconds"] for row in new]
    yield (
        f"`{COMMAND}`: the rows of `sordino audit --all --seed 1`. Every row attacks whole runs of a method with "
        "made-up canaries, at ε = 1, δ = 1e-5. The adversary knows everything except the noise, and bounds ε from "
        "below "
        "at 95 % confidence. *By account* assumes the form of noise that the certificate states; *by thresholds* "
        "assumes nothing. *Reach* is the mu of the canary over the certified one. *Least claim* is the same for the "
        "query whose bound is reached least, each with its best canary.\n"
    )
    yield (
        f"{len(rows)} rows: **{len(broken)}** bounds lie above the certified ε. Of {len(new)} rows measured for "
        "this page, "
        f"{len(above)} bounds by account are at least {GOAL:g} of it; a row takes {max(seconds):.0f} CPU seconds "
        "at most, "
        f"and {sum(seconds) / len(seconds):.1f} on average."
    )
    if len(new) < len(rows):
        yield (
            f"The other {len(rows) - len(new)} rows are of an earlier measurement with 10,000 runs per data set. Its "
            "rows "
            f"below {GOAL:g} were measured again, and are among those of this page: so it says nothing that the rest "
            "of "
            "them lie above."
        )
    if missing:
        yield f"{missing} more rows of `--all` are not measured here."
    yield (
        "\nBounds scatter. If the canary reaches everything, a bound under Gaussian DP has a mean of 0.88 and a "
        "standard "
        "deviation of 0.07 with 10,000 runs per data set, 0.93 and 0.04 with 30,000, and 0.96 and 0.02 with 90,000.\n"
    )


def by_method(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line per method, trust model and minibatch: the least of all units and adjacencies."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["trust"], row["batch"]), []).append(row)
    yield "The least over units and adjacencies:\n"
    yield "| method | trust | batch | rows | by thresholds | by account | reach | least claim | runs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for names, group in groups.items():
        least = [min(row[name] for row in group) for name in ("lower_thresholds", "reach", "least_claim", "runs")]
        yield (
            f"| {' | '.join(names)} | {len(group)} | {least[0]:.2f} | {min(map(lower, group)):.2f} | {least[1]:.1%} | "
            f"{least[2]:.1%} | {least[3]:,} |"
        )
    yield ""


def commits(document: dict[str, Any]) -> Iterator[str]:
    told = [f"{count} of commit {commit[:7]}" for commit, count in document["rows_of_commits"].items()]
    yield f"Rows: {', '.join(told)}.\n"


def below(rows: list[dict[str, Any]]) -> Iterator[str]:
    weak = [row for row in rows if lower(row) < GOAL * row["certified"]]
    if not weak:
        return
    yield f"## Below {GOAL:g}\n"
    yield "| method | unit | adjacency | trust | batch | by account | reach | least claim | runs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in weak:
        yield (
            f"| {' | '.join(row[name] for name in NAMES)} | {lower(row):.2f} | {row['reach']:.1%} | "
            f"{row['least_claim']:.1%} | {row['runs']:,} |"
        )
    yield ""


def one_run(document: dict[str, Any]) -> Iterator[str]:
    if not document.get("one_run"):
        return
    yield "## One run with many canaries\n"
    yield (
        "`sordino audit dp-fedgd --one-run --epsilon E --rounds 1`: 2,000 canaries in one run, replace-one; "
        "median of fifteen "
        "seeds. *Any DP* is the bound of Steinke, Nasr and Jagielski (2023), *Gaussian DP* that of Mahloujifar, Melis "
        "and Chaudhuri (2024).\n"
    )
    yield "| certified ε | any DP | Gaussian DP |\n|---|---|---|"
    for epsilon, plain, sharp in document["one_run"]:
        yield f"| {epsilon:g} | {plain:.2f} | {sharp:.2f} |"
    yield ""


def measure_one_run() -> list[list[float]]:
    """Certified epsilon, and the medians of both bounds of a single run."""
    from sordino.checks.audit import attacks
    from sordino.core import Privacy

    rows = []
    for epsilon in (1.0, 4.0, 8.0):
        found = [attacks.one_run("dp-fedgd", Privacy(epsilon, 1e-5), seed=seed, rounds=1) for seed in range(15)]
        medians = [float(np.median([getattr(each, name) for each in found])) for name in ("lower_dp", "lower_gaussian")]
        rows.append([epsilon, *(round(median, 4) for median in medians)])
    return rows


def finished_runs() -> Iterator[str]:
    path = RESULTS / "black_box.json"
    if not path.exists():
        return
    document = json.loads(path.read_text(encoding="utf-8"))
    yield "## Finished runs: what models reveal\n"
    yield (
        "`sordino audit RUN_DIR` repeats a run on its own data, here the digits. One attacker sees the final "
        "model, one "
        "sees every model. These are results of two attacks on one mislabelled record, and not statements "
        "about privacy "
        "in general: only the certificate covers every attack.\n"
    )
    yield (
        "| run | certified ε | sees | right guesses | allowed | AUC | ε by thresholds | ε under Gaussian DP |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for run in document["runs"]:
        for each in run["attackers"]:
            yield (
                f"| `{run['command']}` | {run['certified']:.2f} | {each['sees']} | {each['right']:.1%} | "
                f"{run['guess']:.1%} | {each['auc']:.3f} | {each['lower_thresholds']:.2f} | "
                f"{each['lower_gaussian']:.2f} |"
            )
    yield f"\n{document['runs'][0]['runs']:,} runs per data set.\n"


def fuzzed() -> Iterator[str]:
    path = RESULTS / "fuzz.json"
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    yield "## Random plans\n"
    yield (
        f"`{found['provenance']['command']}`: {found['pairs']:,} pairs of neighbours in {found['cases']:,} random "
        "cases (method, options, unit, adjacency, model, arithmetic, data), in the arithmetic that ships. Violations: "
        f"**{len(found['violations'])}**. The furthest that a pair moved a release was {found['worst']:.6f} of its "
        "bound.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so many seconds")
    parser.add_argument("--workers", type=int, default=1, help="so many rows at a time, in processes of their own")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--renew", metavar="METHOD", help="measure the rows of this method again")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--one-run", action="store_true", help="only measure the bounds of single runs")
    arguments = parser.parse_args()
    if arguments.one_run:
        document = json.loads((RESULTS / "audit.json").read_text(encoding="utf-8"))
        write(document["rows"], measure_one_run())
        return 0
    if arguments.renew:
        drop(arguments.renew)
    missing = 0 if arguments.page else measure(arguments.seconds, arguments.again, arguments.workers)
    if missing:
        print(f"{missing} rows are missing; call again")
        return 3
    (RESULTS / "audit.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
