"""Faults and attacks over real processes (tests/federation/faults.py): every scenario, into results/faults.json."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "federation"))


def main() -> None:
    import faults

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(faults.SCENARIOS), default=list(faults.SCENARIOS))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults.json")
    parser.add_argument("--keep", type=Path, help="where to leave everything, for a look")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = faults.run(words.keep or Path(place), tuple(words.only), lambda text: print(text, flush=True))
    wrong = []
    for name, run in found["runs"].items():
        run["expected"] = list(faults.SCENARIOS[name].came)
        fine = faults.as_expected(name, run["came"]) and run["unpaid"] == 0
        wrong += [] if fine else [name]
        print(f"{'ok ' if fine else 'NOT'} {name}: {run['came']}, {run['unpaid']} unpaid, {run['seconds']:.0f} s")
    out = {"provenance": provenance("python benchmarks/faults.py"), **found, "not_as_expected": wrong}
    words.out.write_text(json.dumps(out, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
