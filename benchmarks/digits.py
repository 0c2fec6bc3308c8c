"""What the default job costs: accuracy on digits by epsilon and trust model. Writes results/digits.json.

python benchmarks/digits.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from rich.progress import track

from provenance import provenance
from sordino.training import run
from sordino.training.spec import Spec

EPSILONS = (1.0, 2.0, 4.0, 8.0, float("inf"))
TRUSTS = ("untrusted-server", "secure-aggregation")
SEEDS = range(5)


def main() -> None:
    rows, origin = [], provenance("python benchmarks/digits.py")
    for epsilon in track(EPSILONS, "budgets"):
        for trust in TRUSTS:
            samples = []
            for seed in SEEDS:
                spec = Spec.of({"epsilon": epsilon, "trust": trust, "seed": seed})
                *_, last = run.rounds(run.prepare(spec))
                samples.append(last["accuracy"])
            rows.append(
                {
                    "epsilon": "inf" if epsilon == float("inf") else epsilon,
                    "trust": trust,
                    "accuracy": statistics.mean(samples),
                    "samples": samples,
                }
            )
    document = {"provenance": origin, "job": "sordino run --epsilon E --trust T --seed S", "rows": rows}
    out = Path(__file__).parents[1] / "results" / "digits.json"
    out.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['epsilon']!s:>4}  {row['trust']:20} {row['accuracy']:.3f}")


if __name__ == "__main__":
    main()
