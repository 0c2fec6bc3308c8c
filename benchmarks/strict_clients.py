"""What clients that request a stricter epsilon cost: digits, 20 unequal clients, epsilon 2, of which some request 0.25.

    python benchmarks/strict_clients.py      # writes results/strict_clients.json and .md, in about three minutes

Where all 20 are strict, the noise is what one strict client would cost if everybody paid for the strictest.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance
from sordino.cli import main as sordino

RESULTS = Path(__file__).parent.parent / "results"
METHODS, TRUSTS = ("auto", "dp-fedgd"), ("secure-aggregation", "untrusted-server")
CLIENTS, EPSILON, STRICT_EPSILON, SEEDS = 20, 2.0, 0.25, (1, 2, 3, 4)
STRICT = (0, 1, 10, 19, CLIENTS)


def accuracy(trust: str, method: str, strict: int, seed: int) -> float:
    requested = ", ".join(f"{client} = {STRICT_EPSILON}" for client in range(strict))
    settings = {"clients": CLIENTS, "rounds": 30, "partition": "dirichlet:0.5", "client_epsilon": f"{{ {requested} }}"}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        words = ["run", "--method", method, "--trust", trust, "--epsilon", str(EPSILON), "--seed", str(seed), "--json"]
        words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = sordino([*words, "--out", str(Path(folder) / "run")])
    if status:
        raise SystemExit(errors.getvalue())
    return float(json.loads(out.getvalue())["metrics"]["accuracy"])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for trust, method, strict in track(list(itertools.product(TRUSTS, METHODS, STRICT)), "runs"):
        samples = [round(accuracy(trust, method, strict, seed), 4) for seed in SEEDS]
        rows.append({"trust": trust, "method": method, "strict": strict, "samples": samples})
    document = {"provenance": provenance("python benchmarks/strict_clients.py"), "rows": rows}
    (RESULTS / "strict_clients.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    lines = [
        "# Clients that request a stricter ε",
        "",
        f"`python benchmarks/strict_clients.py`: digits, {CLIENTS} clients (Dirichlet 0.5), 30 rounds, "
        f"ε = {EPSILON:g}, of whom some request {STRICT_EPSILON}. Accuracy in percent, mean of {len(SEEDS)} splits and "
        "draws of noise. A strict client counts less, so the others do not pay for it. Where only sums are visible, "
        "the last column is what everybody would get if the strictest client decided the noise.",
        "",
        "| trust model | method | " + " | ".join(f"{n} strict" for n in STRICT) + " |",
        "|---|---|" + "---|" * len(STRICT),
    ]
    for trust, method in itertools.product(TRUSTS, METHODS):
        cells = [100 * statistics.mean(r["samples"]) for r in rows if (r["trust"], r["method"]) == (trust, method)]
        lines.append(f"| {trust} | {method} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    (RESULTS / "strict_clients.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
