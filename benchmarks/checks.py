"""Run the checks of `sordino check --all` and write their reports to results/checks.json.

    python benchmarks/checks.py                # 17 minutes, one after the other
    python benchmarks/checks.py --workers 16   # so many at a time, on a machine with as many cores

The file names the commit of the sources that were checked. If a contract fails, it is written all the same, and the
script ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compact
from provenance import provenance

OUT = Path(__file__).resolve().parents[1] / "results" / "checks.json"


def names() -> list[str]:
    """What `sordino check --all` checks, but the sums."""
    from sordino import methods
    from sordino.checks.suites import SUITES
    from sordino.checks.tallies import tallies

    return [*methods.REGISTRY, *SUITES, "hazards", *tallies()]


def check(*words: str) -> tuple[int, list[dict[str, Any]]]:
    """The status and the reports of one call of `sordino check`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checks.json"
        done = subprocess.run([sys.executable, "-m", "sordino", "check", *words, "--json", str(path)], check=False)
        reports = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return done.returncode if reports else 1, reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    origin = provenance("python benchmarks/checks.py")  # before the checks: sources may change while they run
    if words.workers > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        with ThreadPoolExecutor(words.workers) as pool:
            found = list(pool.map(check, ("--sums", *names())))
    else:
        found = [check("--all")]
    reports = [report for _, part in found for report in part]
    words.out.write_text(compact.text({"provenance": origin, **compact.checks(reports)}), encoding="utf-8")
    return max(status for status, _ in found)


if __name__ == "__main__":
    sys.exit(main())
