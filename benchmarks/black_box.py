"""Finished runs under attack: results/black_box.json.

    python benchmarks/black_box.py [--again]

Trains the runs of `RUNS` on the digits and audits each of them as `sordino audit RUN_DIR --runs 300 --seed 1` does. A
run that is in results/black_box.json already is left out; `--again` begins anew, and `--only K` makes one of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.cli import main as sordino
from sordino.studies.black_box import attack
from sordino.training.run import prepare, reopen

OUT = Path(__file__).parents[1] / "results" / "black_box.json"
COUNT, SEED = 300, 1
RUNS = (
    "--rounds 20 --epsilon 4",
    "--rounds 20 --epsilon 4 --trust secure-aggregation",
    "--method dp-fedgd --rounds 20 --epsilon 4 --trust secure-aggregation",
)


def audited(words: str) -> dict[str, Any]:
    """Train one run, and attack it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if sordino(["run", *words.split(), "--out", str(out)]):
            raise SystemExit(f"sordino run {words} failed")
        found = attack(prepare(reopen(out)), runs=COUNT, seed=SEED)
    attackers = [{k: _short(v) for k, v in each._asdict().items() if k != "roc"} for each in found.attackers]
    kept = ("certified", "delta", "guess", "canary", "runs", "rounds", "confidence", "tries")
    values = {name: _short(getattr(found, name)) for name in kept}
    return {"command": f"sordino run {words}", **values, "attackers": attackers}


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", type=int, choices=range(len(RUNS)))
    arguments = parser.parse_args()
    known = (
        {} if arguments.again or not OUT.exists() else {r["command"]: r for r in json.loads(OUT.read_text())["runs"]}
    )
    for number, words in enumerate(RUNS):
        if f"sordino run {words}" not in known and arguments.only in (None, number):
            known[f"sordino run {words}"] = audited(words)
    runs = [known[f"sordino run {words}"] for words in RUNS if f"sordino run {words}" in known]
    document = {"provenance": provenance("python benchmarks/black_box.py --again"), "runs": runs}
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
