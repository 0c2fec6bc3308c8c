"""Minibatches of persons' records: which draw needs the least noise? Writes results/group_sampling.{json,md}.

    python benchmarks/group_sampling.py TABLES_DIR

Three ways to draw the same expected number of records per round, where a person has at most k of them and a record's
gradient has norm c at most. Add-remove, delta = 1e-5.

persons     each person at rate q, with all records; the person's sum is clipped to C. Sampled Gaussian with bound C.
records     each record at rate q. The number of a person's drawn records is Binomial(k, q), and j of them move the
            sum by j c: a mixture of Gaussians (Choquette-Choo, Ganesh, Steinke, Thakurta, arXiv 2310.15526, corollary
            4.7: the pair of norms dominates vectors; Ganesh, arXiv 2401.10294: groups under Poisson sampling).
one record  each person at rate k q, with one of its records at random. Sampled Gaussian with bound c.

All noise is in units of c. The last never needs more noise than the second: each integer Rényi moment of a mixture
with multiplicities j is a sum, with positive weights, of products of moments E[j^n], and E[j^n] >= E[j] = k q because j
is an integer, with equality if j is 0 or 1.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from rich.progress import track
from scipy.stats import binom

from provenance import provenance
from sordino.core import Adjacency
from sordino.privacy.accounting.subsampled import multiplier
from sordino.training import run
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
DELTA = 1e-5
PLANS = ((0.01, 1000), (0.05, 200), (0.2, 70))  # rate, rounds
EPSILONS, RECORDS = (1.0, 4.0, 8.0), (2, 4)


def of_records(rate: float, rounds: int, most: int, epsilon: float) -> float:
    """The least noise, in units of a record's clip, for records that are drawn one by one."""
    drawn = np.arange(most + 1)
    chances = binom.pmf(drawn, most, rate)
    step = max(min(1e-2, epsilon / (40 * math.sqrt(rounds))), 2e-4)

    def spent(std: float) -> float:
        one = pld.from_mixture_gaussian_mechanism(
            std,
            [float(j) for j in drawn],
            [float(p) for p in chances / chances.sum()],
            value_discretization_interval=step,
            log_mass_truncation_bound=-40,
        )
        return float(one.self_compose(rounds).get_epsilon_for_delta(DELTA))

    high = most * multiplier(rate, rounds, epsilon, DELTA, Adjacency.ADD_REMOVE) * 1.01
    low = high / most / 1.2
    for _ in range(9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def sums_of_persons(folder: Path) -> float:
    """Readmissions: the root mean square of persons' summed gradients over that of records', at the first model."""
    spec = {"data": str(folder / "readmission_5000.csv.xz"), "clients": 4, "unit": "person", "epsilon": 2.0}
    job = run.prepare(Spec.of({**spec, "schema": str(ROOT / "examples" / "schemas" / "readmission.toml"), "seed": 0}))
    squares, people, rows = 0.0, 0, 0.0
    total = 0.0
    for i in range(len(job.records.sizes)):
        shard = job.records.shard(i)
        filled = (shard.mask > 0).double()
        terms = ((0.5 - shard.y.double()) * filled)[:, None] * torch.cat([shard.x.double(), filled[:, None]], 1)
        people += len(terms) // shard.per_person
        sums = terms.reshape(-1, shard.per_person, terms.shape[1]).sum(1)
        squares, total = squares + float(sums.square().sum()), total + float(terms.square().sum())
        rows += float(filled.sum())
    return math.sqrt((squares / people) / (total / rows))


def page(rows: list[dict[str, float]], sums: float) -> str:
    lines = [
        "# Minibatches where persons have several records",
        "",
        "`python benchmarks/group_sampling.py TABLES_DIR`. Three ways to draw the same expected number of records per "
        "round, for persons of at most k records; noise in units of a record's clip c, δ = 1e-5, add-remove.",
        "",
        "*Persons*: each person at rate q with all records, whose summed gradient is clipped to C; here C = k c, which "
        "cuts nothing. *Records*: each record at rate q, with the account of the group (a mixture of Gaussians). *One "
        "record*: each person at rate k q with one of its records at random, clipped to c.",
        "",
        "| ε | q | rounds | k | persons, C = k c | records | one record | records beat persons if C / c is above |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['epsilon']:g} | {r['rate']:g} | {r['rounds']} | {r['most']} | {r['persons']:.2f} | "
            f"{r['records']:.2f} | {r['one_record']:.2f} | {r['records'] / r['persons'] * r['most']:.2f} |"
        )
    worst = max(r["one_record"] / r["records"] for r in rows)
    lines += [
        "",
        f"Drawing records one by one is never the tightest: one record per drawn person needs {worst:.3f} times its "
        "noise at most (the calibration of the mixture is good to 1 %), because no person is then drawn twice. "
        "Against clipped sums of persons it wins only if a person's gradients add up to more than the last column "
        f"allows. On the readmission data with k = 4, persons' sums are {sums:.2f} times as long as single gradients, "
        "because most patients have one encounter and gradients of one patient partly cancel.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    sums = sums_of_persons(parser.parse_args().tables)
    cells = [(epsilon, *plan, most) for epsilon in EPSILONS for plan in PLANS for most in RECORDS]
    rows = []
    for epsilon, rate, rounds, most in track(cells, "calibrating"):
        persons = most * multiplier(rate, rounds, epsilon, DELTA, Adjacency.ADD_REMOVE)
        one = multiplier(most * rate, rounds, epsilon, DELTA, Adjacency.ADD_REMOVE)
        found = {"persons": persons, "records": of_records(rate, rounds, most, epsilon), "one_record": one}
        about = {"epsilon": epsilon, "rate": rate, "rounds": rounds, "most": most}
        rows.append(about | {key: round(value, 4) for key, value in found.items()})
        print(rows[-1], flush=True)
    made = provenance("python benchmarks/group_sampling.py TABLES_DIR")
    document = {"provenance": made, "sums_of_persons": round(sums, 4), "rows": rows}
    (ROOT / "results" / "group_sampling.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (ROOT / "results" / "group_sampling.md").write_text(page(rows, sums))


if __name__ == "__main__":
    main()
