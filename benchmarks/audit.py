"""Audits of everything that is certified: results/audit.json and results/audit.md.

    python benchmarks/audit.py [--seconds 240] [--again]

The rows are those of `sordino audit --all --seed 1`. They take half an hour on one core, so the command works in
pieces: it goes on where the last one ended, and stops after so many seconds. `--again` begins anew. `--page` only
writes the page. results/black_box.json and results/fuzz.json, where they exist, are shown on the page as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    from sordino.checks.audit import integers

    name, privacy = job.args[0], job.args[-1]
    trust = "secure-aggregation" if job.func is integers.audit else privacy.trust
    return name, str(privacy.unit), str(privacy.adjacency), str(trust), job.keywords.get("batch", "full")


def read() -> dict[tuple[str, ...], list[Any]]:
    """The rows so far, by what they are about."""
    path = RESULTS / "audit.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {tuple(row[: len(NAMES)]): row for row in document["rows"]} if "rows" in document else {}


def write(rows: list[list[Any]]) -> None:
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps({"provenance": provenance(COMMAND), "delta": 1e-5, "confidence": 0.95, "columns": COLUMNS})
    (RESULTS / "audit.json").write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def measure(seconds: float, again: bool) -> int:
    """Audit until the time is over, and return how many rows are missing."""
    known, began, wanted = {} if again else read(), time.perf_counter(), jobs()
    for job in wanted:
        if key(job) in known:
            continue
        if time.perf_counter() - began > seconds:
            break
        start = time.process_time()
        found = job()
        values = [getattr(found, name) for name in NUMBERS]
        rounded = [round(value, 4) if isinstance(value, float) else value for value in values]
        known[key(job)] = [*key(job), *rounded, round(time.process_time() - start, 1)]
        print(*known[key(job)], flush=True)
        write([known[key(each)] for each in wanted if key(each) in known])
    return sum(key(job) not in known for job in wanted)


# ------------------------------------------------------------------------------------------------------------- the page


def page() -> str:
    """results/audit.md."""
    document = json.loads((RESULTS / "audit.json").read_text(encoding="utf-8"))
    rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
    return "\n".join(
        ["# Audits: lower bounds on ε\n", *methods(rows), *one_run(), *finished_runs(), *fuzzed(), *table(rows)]
    )


def lower(row: dict[str, Any]) -> float:
    """The bound under the form of noise that the certificate states."""
    bound = row["lower_gaussian"] if row["lower_account"] is None else row["lower_account"]
    return float(bound)


def methods(rows: list[dict[str, Any]]) -> Iterator[str]:
    above = [row for row in rows if lower(row) >= GOAL * row["certified"]]
    broken = [row for row in rows if max(lower(row), row["lower_thresholds"]) > row["certified"]]
    yield (
        f"`{COMMAND}` (the rows of `sordino audit --all --seed 1`, in {sum(r['seconds'] for r in rows) / 60:.0f} CPU "
        f"minutes, the longest row in {max(r['seconds'] for r in rows):.0f} s). Every row attacks whole runs of a "
        "method with made-up canaries, at ε = 1, δ = 1e-5. The adversary knows everything except the noise, "
        "and bounds ε from "
        "below at 95 % confidence. *By account* assumes the form of noise that the certificate states; *by thresholds* "
        "assumes nothing. *Reach* is the mu of the canary over the certified one. *Least claim* is the same for the "
        "query whose bound is reached least, each with its best canary.\n"
    )
    yield (
        f"{len(rows)} rows: **{len(broken)}** bounds lie above the certified ε. {len(above)} bounds by account are at "
        f"least {GOAL:g} of it; the least claim is reached by {min(r['least_claim'] for r in rows):.1%} or more. Below "
        f"{GOAL:g}:\n"
    )
    yield "| method | unit | adjacency | trust | batch | by account | reach | least claim |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row not in above:
            yield (
                f"| {' | '.join(row[name] for name in NAMES)} | {lower(row):.2f} | {row['reach']:.1%} | "
                f"{row['least_claim']:.1%} |"
            )
    yield (
        "\nWhy these are lower: `calibrate` pays for intercepts, a slope and gradients, and no single record moves all "
        "of them as far as each may move. With minibatches the account of samples is an upper bound for all "
        "pairs of data "
        "sets, and for `fixed` a loose one.\n"
    )


def one_run() -> Iterator[str]:
    """The bounds of a single run, measured here because they take seconds."""
    import numpy as np

    from sordino.checks.audit import attacks
    from sordino.core import Privacy

    yield "## One run with many canaries\n"
    yield (
        "`sordino audit dp-fedgd --one-run --epsilon E --adjacency replace-one`: 2,000 canaries, one run; "
        "median of ten "
        "seeds. *Any DP* is the bound of Steinke, Nasr and Jagielski (2023), *Gaussian DP* that of Mahloujifar, Melis "
        "and Chaudhuri (2024).\n"
    )
    yield "| certified ε | any DP | Gaussian DP |\n|---|---|---|"
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        found = [attacks.one_run("dp-fedgd", Privacy(epsilon, 1e-5), seed=seed, rounds=1) for seed in range(10)]
        medians = (np.median([getattr(each, name) for each in found]) for name in ("lower_dp", "lower_gaussian"))
        yield f"| {epsilon:g} | {' | '.join(f'{median:.2f}' for median in medians)} |"
    yield ""


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


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## All rows\n"
    head = [*NAMES, "by thresholds", "by account", "reach", "least claim", "runs"]
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for row in rows:
        yield (
            f"| {' | '.join(row[name] for name in NAMES)} | {row['lower_thresholds']:.2f} | {lower(row):.2f} | "
            f"{row['reach']:.1%} | {row['least_claim']:.1%} | {row['runs']:,} |"
        )
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so many seconds")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--page", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    missing = 0 if arguments.page else measure(arguments.seconds, arguments.again)
    if missing:
        print(f"{missing} rows are missing; call again")
        return 3
    (RESULTS / "audit.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
