"""Run `sordino check --all` (17 minutes) and write its reports to results/checks.json.

    python benchmarks/checks.py

The file names the commit of the sources that were checked. If a contract fails, it is written all the same, and the
script ends with status 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import compact
from provenance import provenance

OUT = Path(__file__).resolve().parents[1] / "results" / "checks.json"


def main() -> int:
    origin = provenance("python benchmarks/checks.py")  # before the checks: sources may change while they run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checks.json"
        done = subprocess.run([sys.executable, "-m", "sordino", "check", "--all", "--json", str(path)], check=False)
        reports = json.loads(path.read_text(encoding="utf-8"))
    OUT.write_text(compact.text({"provenance": origin, **compact.checks(reports)}), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
