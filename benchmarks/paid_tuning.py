"""Untuned `auto` beside rivals that are tuned for free and within the budget. Writes results/paid_tuning.{json,md}.

    python benchmarks/paid_tuning.py

Each comparison is the `sordino compare` command that the results hold, on digits. The rivals try five step sizes around
their default (`--preset steps`). Tuned for free, that grid is also extended where its best value lies on an edge.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.cli import main as sordino

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "paid_tuning.json"
PAID = {
    "untrusted-server": "--charge-tuning count --paid-runs 5",
    "secure-aggregation": "--charge-tuning count --paid-runs 5",
    "trusted-server": "--charge-tuning stopping --paid-runs 8",
}
COMPARED = "sordino compare --clients 10 --methods dp-fedgd,dp-fedadam,auto --epsilons 1,4 --tune --preset steps"
WITHIN = ", tuned within the budget"


def measure(trust: str) -> dict[str, Any]:
    """The accuracy of every row at the last round, by seed."""
    command = f"{COMPARED} --trust {trust} {PAID[trust]}"
    with tempfile.TemporaryDirectory() as out:
        if sordino([*shlex.split(command)[1:], "--out", out]):
            raise SystemExit(f"failed: {command}")
        document = json.loads(Path(out, "compare.json").read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for run in document["runs"]:
        row = rows.setdefault(run["label"], {"spent": {}, "accuracy": {}})
        paid = run.get("tuned_within_budget", {})
        row["accuracy"].setdefault(f"{run['epsilon']:g}", []).append(round(run["accuracy"][-1], 4))
        row["spent"][f"{run['epsilon']:g}"] = round(paid.get("epsilon", run["certificate"]["epsilon"]), 6)
        if paid:
            row["how"] = paid["sentence"]
    return {"trust": trust, "command": command, "rows": rows}


def page(parts: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    epsilons = list(parts[0]["rows"]["auto"]["accuracy"])
    lines = [["trust", "row", *(f"ε = {epsilon}" for epsilon in epsilons)], ["---"] * (len(epsilons) + 2)]
    for part in parts:
        by = "random stopping" if part["trust"] == "trusted-server" else "noisy counts"
        for label in ("auto", "dp-fedgd", "dp-fedgd" + WITHIN, "dp-fedadam", "dp-fedadam" + WITHIN):
            tuned = f"tuned within the budget ({by})" if label.endswith(WITHIN) else "tuned for free"
            name = f"`{label.removesuffix(WITHIN)}`, {'untuned' if label == 'auto' else tuned}"
            figures = part["rows"][label]["accuracy"].values()
            cells = [f"{100 * statistics.mean(each):.1f} ± {100 * statistics.pstdev(each):.1f}" for each in figures]
            lines.append([f"`{part['trust']}`", name, *cells])
    return (
        "Digits, 10 clients, record level, replace-one, δ = 1e-5: test accuracy in % after the last round, mean ± "
        "standard deviation of three seeds. All rows have the ε of their column, which covers the search only where "
        "the row says so. `python benchmarks/paid_tuning.py` writes it.\n\n"
    ) + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    origin = provenance("python benchmarks/paid_tuning.py")
    parts = []
    for trust in PAID:
        parts.append(measure(trust))
        document = json.dumps({"provenance": origin, "parts": parts}, separators=(",", ":"))
        OUT.write_text(document + "\n", encoding="utf-8")
        OUT.with_suffix(".md").write_text(page(parts), encoding="utf-8")
    print(page(parts))


if __name__ == "__main__":
    main()
