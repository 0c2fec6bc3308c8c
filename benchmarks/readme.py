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

sys.path.insert(0, str(Path(__file__).parent))
from guard import GROWTH

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/methods.md")
FIGURE = re.compile(r"([\d.,]+)<!--([^-]+)-->")
SPEED = re.compile(r"(<!--speed-->\n).*?(?=\n\n)", re.DOTALL)
SPEEDS = (  # rows of the table "How fast": what, the figure's name, the unit
    ("a private round over 20 clients × 2,500 records, over the two bare matrix products it needs", "round", "×"),
    ("10,000 clients, over 20 clients with the same records", "many", "×"),
    ("five local steps, over a DP-FedGD round", "local", "×"),
    ("a DP-FedNew-FC round, over a DP-FedGD round", "fc", "×"),
    ("a DP-FedNew round with Hessians of 650 by 650, over the one product per client that builds them", "fednew", "×"),
    ("peak memory, over the data", "peak", "×"),
    ("64 runs one after another, over 64 at once on the same cores, at least", "together", "×"),
    ("cryptographic normals per second", "normals", "million"),
)
MIDDLES = {  # medians of the raw samples: the figure's name, and its digits
    "round_over_two_matmuls": ("round", 2),
    "many_clients_over_few": ("many", 2),
    "run_seconds": ("run", 1),
    "import_torch_seconds": ("import", 1),
    "five_local_steps_over_round": ("local", 1),
    "fednew_fc_over_round": ("fc", 1),
    "fednew_over_product": ("fednew", 1),
}
DEMO = re.compile(r"(<!--demo-->\n```\n).*?(\n```)", re.DOTALL)


def load(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def figures() -> dict[str, str]:
    """Every figure by its name, from the raw samples."""
    digits = load("digits.json")
    found = {
        **{f"{name} {arch}": value for arch in architectures() for name, value in speeds(arch).items()},
        "growth": f"{100 * GROWTH:.0f}",
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
    found["microseconds"] = f"{max(load('many_cuda.json')['microseconds_per_run_and_round'].values()):.1f}"
    return {name.replace("-", " "): value for name, value in found.items()}


def architectures() -> list[str]:
    """Those that `make bench` was run on."""
    return sorted({path.stem for name in ("bench", "many_cpu") for path in (ROOT / "results" / name).glob("*.json")})


def speeds(arch: str) -> dict[str, str]:
    """Figures of one architecture, from the raw samples."""
    found = {}
    if (ROOT / "results" / "bench" / f"{arch}.json").exists():
        raw = load(f"bench/{arch}.json")["raw"]
        middle = {name: statistics.median(raw[name]["samples"]) for name in raw if name in MIDDLES}
        found = {short: f"{middle[name]:.{digits}f}" for name, (short, digits) in MIDDLES.items()}
        found["peak"] = f"{statistics.median(s['peak_over_data'] for s in raw['peak_over_data']['samples']):.1f}"
        found["normals"] = f"{statistics.median(raw['secure_normals_per_second']['samples']) / 1e6:.0f}"
    if (ROOT / "results" / "many_cpu" / f"{arch}.json").exists():
        found["together"] = f"{min(load(f'many_cpu/{arch}.json')['times_faster'].values()):.1f}"
    return found


def speed_table() -> str:
    """One column per architecture; every cell names its figure."""
    known = {arch: speeds(arch) for arch in architectures()}
    lines = [["", *(headed(arch) for arch in known)], ["---"] * (1 + len(known))]
    for what, name, unit in SPEEDS:
        cells = [f"{found[name]}<!--{name} {arch}--> {unit}" if name in found else "" for arch, found in known.items()]
        lines.append([what, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headed(arch: str) -> str:
    """An architecture, its CPU where the results name it, and their file."""
    path = f"results/bench/{arch}.json"
    if not (ROOT / path).exists():
        return arch
    origin = load(f"bench/{arch}.json")["provenance"]
    about = [origin[key] for key in ("cpu",) if key in origin] + [f"{origin['threads']} threads"]
    return f"[{arch}]({path}), {', '.join(about)}"


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
    text = SPEED.sub(lambda match: match[1] + speed_table(), text)
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
