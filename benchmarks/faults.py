"""Faults and attacks over real processes (tests/federation/trial.py): every scenario, into results/faults.json."""

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
    import trial

    import faults

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(faults.SCENARIOS), default=list(faults.SCENARIOS))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults.json")
    parser.add_argument("--keep", type=Path, help="where to leave everything, for a look")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = trial.run(words.keep or Path(place), tuple(words.only), lambda text: print(text, flush=True))
    wrong = {name: bad for name, run in found["runs"].items() if (bad := trial.problems(name, run))}
    for name, run in found["runs"].items():
        run["expected"] = list(faults.SCENARIOS[name].came)
        told = f"{run['tries']} tries" if "tries" in run else f"{run['came']}, {run['seconds']:.0f} s"
        print(f"{'NOT' if name in wrong else 'ok '} {name}: {told} {wrong.get(name, '')}")
    out = {"provenance": provenance("python benchmarks/faults.py"), **found, "not_as_expected": wrong}
    words.out.write_text(json.dumps(out, indent=1) + "\n")
    sys.exit(bool(wrong or found["violations"]))


if __name__ == "__main__":
    main()
