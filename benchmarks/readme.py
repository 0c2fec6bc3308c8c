"""Bring README.md and docs/methods.md up to date with results/.

    python benchmarks/readme.py          # rewrite every quoted figure
    python benchmarks/readme.py --demo   # run the demo anew first

A figure in either is followed by an invisible `<!--name-->`; `figures` computes it from the raw samples. The test
`tests/test_readme.py` fails where README and results differ.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scipy.special import ndtr

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/methods.md")
FIGURE = re.compile(r"([\d.,]+)<!--([^-]+)-->")
DEMO = re.compile(r"(<!--demo-->\n```\n).*?(\n```)", re.DOTALL)


def load(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def figures() -> dict[str, str]:
    """Every figure by its name, from the raw samples."""
    bench, digits = load("bench.json")["raw"], load("digits.json")
    found = {
        "round": f"{statistics.median(bench['round_over_two_matmuls']['samples']):.2f}",
        "many": f"{statistics.median(bench['many_clients_over_few']['samples']):.2f}",
        "peak": f"{statistics.median(s['peak_over_data'] for s in bench['peak_over_data']['samples']):.1f}",
        "normals": f"{statistics.median(bench['secure_normals_per_second']['samples']) / 1e6:.0f}",
        "run": f"{statistics.median(bench['run_seconds']['samples']):.1f}",
        "import": f"{statistics.median(bench['import_torch_seconds']['samples']):.1f}",
        "local": f"{statistics.median(bench['five_local_steps_over_round']['samples']):.1f}",
        "fc": f"{statistics.median(bench['fednew_fc_over_round']['samples']):.1f}",
        "fednew": f"{statistics.median(bench['fednew_over_product']['samples']):.1f}",
        "hooks": f"{load('deep_cpu.json')['auto_over_opacus_hooks']:.1f}",
        "bet": f"{100 * ndtr(load('demo_certificate.json')['mu'] / 2):.0f}",
    }
    for row in digits["rows"]:
        found[f"digits {row['trust']} {row['epsilon']}"] = f"{100 * statistics.mean(row['samples']):.0f}"
    for trust in ("untrusted-server", "secure-aggregation"):
        rivals, own = scores(f"table3/{trust}.json"), scores(f"table3/{trust}_auto.json")
        for epsilon, t in itertools.product((0.5, 1.0, 5.0, 10.0), (10, 70)):
            found[f"{trust} auto {epsilon:g} {t}"] = f"{own['auto', epsilon, t]:.1f}"
            best = max(score for (_, e, r), score in rivals.items() if (e, r) == (epsilon, t))
            found[f"{trust} best {epsilon:g} {t}"] = f"{best:.1f}"
    for which in ("client-mean", "untrusted-server"):
        for (label, epsilon, t), score in scores(f"table3/{which}.json").items():
            found[f"cifar {'c' if which == 'client-mean' else 'p'} {label} {epsilon:g} {t}"] = f"{score:.1f}"
    many = {device: load(f"many_{device}.json") for device in ("cpu", "cuda")}
    found["together"] = f"{min(many['cpu']['times_faster'].values()):.1f}"
    found["microseconds"] = f"{max(many['cuda']['microseconds_per_run_and_round'].values()):.1f}"
    return {name.replace("-", " "): value for name, value in found.items()}


def scores(name: str) -> dict[tuple[str, float, int], float]:
    """Mean accuracy in percent by (label, epsilon, round), of a comparison."""
    samples: dict[tuple[str, float, int], list[float]] = {}
    for run in load(name)["runs"]:
        if run["group"] == "comparison":
            for t in (10, 70):
                samples.setdefault((run["label"], run["epsilon"], t), []).append(run["accuracy"][t - 1])
    return {key: 100 * statistics.mean(values) for key, values in samples.items()}


def rewritten(text: str) -> str:
    known = figures()
    text = FIGURE.sub(lambda match: f"{known[match[2]]}<!--{match[2]}-->", text)
    demo = (ROOT / "results" / "demo.txt").read_text().strip()
    return DEMO.sub(lambda match: match[1] + demo + match[2], text)


def demo() -> None:
    """Run what `make demo` runs; keep its output, certificate, statement and curve."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sordino.cli", "run"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        (out,) = Path(folder, "runs").iterdir()
        (ROOT / "results" / "demo.txt").write_text("$ sordino run\n" + done.stdout)
        shutil.copy(out / "public" / "certificate.json", ROOT / "results" / "demo_certificate.json")
        shutil.copy(out / "public" / "statement.md", ROOT / "docs" / "statement.md")
        shutil.copy(out / "public" / "curve.png", ROOT / "docs" / "curve.png")


if __name__ == "__main__":
    if "--demo" in sys.argv:
        demo()
    for page in PAGES:
        (ROOT / page).write_text(rewritten((ROOT / page).read_text()))
