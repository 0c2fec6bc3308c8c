"""Random plans and neighbours, in the arithmetic that ships: results/fuzz.json.

    python benchmarks/fuzz.py [--seconds 240] [--again]

The command goes on with the case after the last one of results/fuzz.json, and adds to its counts. `--again` begins
anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from provenance import provenance
from sordino.checks.fuzz import fuzz

OUT = Path(__file__).parents[1] / "results" / "fuzz.json"
SEED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    before = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() and not arguments.again else {}
    found = fuzz(arguments.seconds, seed=SEED, first=before.get("cases", 0))
    names = sorted({*before.get("methods", {}), *found.methods})
    total = {
        "provenance": provenance(f"python benchmarks/fuzz.py; sordino check --fuzz SECONDS --seed {SEED}"),
        "seed": SEED,
        "cases": before.get("cases", 0) + found.cases,
        "refused": before.get("refused", 0) + found.refused,
        "pairs": before.get("pairs", 0) + found.pairs,
        "worst": max(before.get("worst", 0.0), found.worst),
        "violations": before.get("violations", []) + [each._asdict() for each in found.violations],
        "methods": {name: before.get("methods", {}).get(name, 0) + found.methods.get(name, 0) for name in names},
    }
    OUT.write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    print(f"{total['pairs']:,} pairs in {total['cases']:,} cases, {len(total['violations'])} violations")
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
