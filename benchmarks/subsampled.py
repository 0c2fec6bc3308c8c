"""Does subsampling help DP-FedSOFIM? Minibatches and more rounds compared with all records, at the same epsilon.

    OMP_NUM_THREADS=1 python benchmarks/subsampled.py DATA_DIR     # results/subsampled.json; the site shows it

CIFAR-10 features (50,000 x 64) on 20 clients, delta 1e-5, replace-one. The step of every row is tuned on
validation records (10 % of the training records, seed 0), around the step in results/table3 for 70 rounds of all
records; rho and beta are those of results/table3. If the best of four steps is at an end, one or two more are tried
beyond it. Then three seeds train on all training records, each with its own partition, minibatches and noise, and are
tested once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.data.sources import Dataset
from sordino.privacy import calibration, spending
from sordino.studies.tune import validated
from sordino.training.batch import Trained, run_many
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

ROOT = Path(__file__).parents[1]
EPSILONS, SEEDS = (0.5, 1.0, 5.0, 10.0), (1, 2, 3)
BASE = {"clients": 20, "partition": "dirichlet:0.5", "delta": 1e-5, "adjacency": "replace-one", "clip": 10.0}
TRUSTS = {
    "untrusted-server": ({"divisor": "client-mean"}, "settings_client-mean.json"),
    "secure-aggregation": ({"divisor": "pooled"}, "settings_sa.json"),
}
GD, GRADIENT, MOMENTUM = "dp-fedgd", "dp-fedsofim", "dp-fedsofim (momentum)"
FULL, TENTH, FIFTIETH = "full", "poisson:0.1", "poisson:0.02"
STEPS = {  # by rounds: times the step that was chosen for 70 rounds
    7: (1.0, 2.0, 4.0, 8.0),
    35: (0.5, 1.0, 2.0, 4.0),
    70: (0.5, 1.0, 2.0, 4.0),
    350: (0.2, 0.4, 0.8, 1.6),
    1400: (0.05, 0.15, 0.45, 1.35),
}
BATCHES = {FULL: (7, 35, 70), TENTH: (70, 350), FIFTIETH: (70, 350, 1400)}
ALL = [(batch, rounds) for batch, many in BATCHES.items() for rounds in many]
FEW = [(FULL, 70), (TENTH, 70), (FIFTIETH, 70), (FIFTIETH, 350)]  # that form moves as DP-FedGD does (results/table3)
SHAPES = {GD: ALL, GRADIENT: FEW, MOMENTUM: ALL}
HEAD = """CIFAR-10 features of ResNet-20, 20 clients (dirichlet:0.5), clip 10, δ = 1e-5, replace-one, record level.
Test accuracy in %, mean ± standard deviation of 3 seeds at equal ε; steps tuned on validation records, not paid for.
Gradients: per-record gradients in millions. Noise: standard deviation of one coordinate of the mean gradient; in
brackets the largest noise multiplier of a client (standard deviation / clip)."""
ANSWER = """At equal ε subsampling does not help DP-FedSOFIM. With the same number of rounds and the same step,
minibatches of one tenth are within 0.1 points of all records, because the noise on the mean gradient is the
same. Under secure aggregation, five or twenty times the rounds change the momentum form by at most 0.3
points. The gradient form and DP-FedGD gain 1.2 points there at ε = 5 and 10, which comes from the rounds and
not from the sampling.

Subsampling saves work. One tenth of the gradients (poisson:0.1, 70 rounds) costs at most 0.3 points. Compared
with 7 rounds of all records, which need as many gradients, the momentum form gains 2.5 to 4.7 points under
secure aggregation; compared with 35 rounds, half of the gradients, at most 0.4.

Limits of these figures: one validation run per setting chose the steps. For an untrusted server at ε = 0.5
this changes a row by about one point (table `sofim-3` has 63.7 for DP-FedGD and 63.4 for the momentum form
with 70 rounds, this table 62.2 and 62.7), so differences of that size may come from the choice of the step. Rows of 7
rounds are tuned less well than the others, which favours minibatches: rho is that of 70 rounds; for the
momentum form with an untrusted server at ε = 0.5 and 1 the best step is the largest one tried; for DP-FedGD
at ε = 5 and 10 the grid has no 0.2."""
MORE = 2  # times that a grid is extended


def settings(trust: str) -> dict[tuple[str, float], dict[str, Any]]:
    rows = json.loads((ROOT / "results" / "table3" / TRUSTS[trust][1]).read_text())["settings"]
    return {(row["method"], row["epsilon"]): row["options"] for row in rows}


def keys(trust: str, label: str, batch: str, rounds: int, epsilon: float, options: dict[str, Any]) -> dict[str, Any]:
    method, _, form = label.partition(" ")
    form_options = {"apply_to": "momentum"} if form else {}
    run = {"method": method, "trust": trust, "batch": batch, "rounds": rounds, "epsilon": epsilon}
    return {**BASE, **TRUSTS[trust][0], **run, **form_options, **options}


def last(trained: Trained) -> float:
    return trained.scores[max(trained.scores)]


def choose(
    data: Dataset, trust: str, label: str, batch: str, rounds: int
) -> dict[float, tuple[dict[str, Any], dict[float, float]]]:
    """By epsilon: the best options, and the validation accuracy of every step tried."""
    start, tried = settings(trust), {epsilon: dict[float, float]() for epsilon in EPSILONS}
    todo = [(epsilon, factor) for epsilon in EPSILONS for factor in STEPS[rounds]]
    for _ in range(1 + MORE):
        specs = []
        for epsilon, factor in todo:
            options = start[label, epsilon]
            options = {**options, "lr": options["lr"] * factor}
            specs.append(Spec.of({**keys(trust, label, batch, rounds, epsilon, options), "seed": 0, "split_seed": 0}))
        for (epsilon, factor), trained in zip(todo, run_many(specs, data, at=()), strict=True):
            tried[epsilon][factor] = last(trained)
        todo = []
        for epsilon, scores in tried.items():
            best, ends = max(scores, key=scores.__getitem__), (min(scores), max(scores))
            todo += [(epsilon, best / 2.5)] * (best == ends[0]) + [(epsilon, best * 2.5)] * (best == ends[1])
        if not todo:
            break
    answer = {}
    for epsilon, scores in tried.items():
        options = start[label, epsilon]
        best = max(scores, key=scores.__getitem__)
        answer[epsilon] = ({**options, "lr": options["lr"] * best}, {options["lr"] * f: s for f, s in scores.items()})
    return answer


Chosen = dict[float, tuple[dict[str, Any], dict[float, float]]]


def tested(
    data: Dataset, trust: str, label: str, batch: str, rounds: int, chosen: Chosen, how: str
) -> list[dict[str, Any]]:
    specs = [
        Spec.of({**keys(trust, label, batch, rounds, epsilon, chosen[epsilon][0]), "seed": seed, "split_seed": seed})
        for seed in SEEDS
        for epsilon in EPSILONS
    ]
    trained, rows = run_many(specs, data, at=()), []
    for epsilon in EPSILONS:
        mine = [each for each in trained if each.resolved.privacy.epsilon == epsilon]
        scores, plan, (options, tried) = [last(each) for each in mine], mine[0].plan, chosen[epsilon]
        part = float(plan.rates.max())
        row = {"trust": trust, "method": label, "batch": batch, "rounds": rounds, "epsilon": epsilon, "step": how}
        row |= {"options": options, "validation": {f"{lr:g}": score for lr, score in tried.items()}}
        row |= {"accuracy": scores, "mean": statistics.mean(scores), "std": statistics.stdev(scores)}
        row |= {
            "noise_multiplier": calibration.summed_noise(plan)[1],
            "aggregate_std": calibration.aggregate_std(plan, 0),
        }
        row |= {"epsilon_accounted": spending.epsilon(plan), "record_gradients": int(part * sum(plan.sizes) * rounds)}
        row |= {"milliseconds_per_round": 1000 * statistics.mean(each.seconds for each in mine) / rounds}
        rows.append(row)
    return rows


def compute(task: tuple[str, str, str]) -> list[dict[str, Any]]:
    folder, trust, label = task
    data = resolve(Spec.of({**BASE, "data": f"{folder}/cifar10_resnet20.npz", "method": GD})).read_data()
    validation, rows = validated(data), []
    for batch, rounds in SHAPES[label]:
        begun = time.process_time()
        chosen = choose(validation, trust, label, batch, rounds)
        rows += tested(data, trust, label, batch, rounds, chosen, "chosen for this row")
        print(trust, label, batch, rounds, f"{time.process_time() - begun:.0f} s", flush=True)
        print("   ", [f"{row['mean']:.4f}" for row in rows[-len(EPSILONS) :]], flush=True)
        if (batch, rounds) == (TENTH, 350):  # as many rounds of all records: what is left to the sampling alone
            rows += tested(data, trust, label, FULL, rounds, chosen, f"that of {TENTH}")
            print("    all records", [f"{row['mean']:.4f}" for row in rows[-len(EPSILONS) :]], flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    return f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}"


AGAINST = [  # batch and rounds of the one and the other
    *(((batch, rounds), (FULL, 70)) for batch, rounds in ALL if batch != FULL),
    ((TENTH, 350), (FULL, 350)),  # as many rounds, at the same step
    ((TENTH, 70), (FULL, 7)),  # as many gradients
    ((FIFTIETH, 350), (FULL, 7)),
    ((TENTH, 350), (FULL, 35)),
    ((FIFTIETH, 1400), (FULL, 35)),  # or a fifth fewer
]


def differences(rows: list[dict[str, Any]]) -> list[str]:
    """Points of accuracy, seed against seed, by epsilon; and the noise that the mean gradient carries."""
    row_of = {(r["trust"], r["method"], r["batch"], r["rounds"], r["epsilon"]): r for r in rows}
    names = " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS)
    lines = ["## Differences", "", "Points of accuracy at equal ε, mean of 3 seeds ± its standard error, seed by seed."]
    lines += ["Noise: standard deviation on the mean gradient over that of the other row, at ε = 0.5 and 10.", ""]
    lines += [f"| method | trust | minibatches | against | noise | {names} |", "|---" * 9 + "|"]
    for label, trust, (one, other) in itertools.product(SHAPES, TRUSTS, AGAINST):
        both = [[row_of.get((trust, label, *shape, epsilon)) for shape in (one, other)] for epsilon in EPSILONS]
        if not all(a and b for a, b in both):
            continue
        cells = []
        for a, b in both:
            gaps = [100 * (x - y) for x, y in zip(a["accuracy"], b["accuracy"], strict=True)]
            cells.append(f"{statistics.mean(gaps):+.1f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.1f}")
        noise = ", ".join(f"{a['aggregate_std'] / b['aggregate_std']:.3f}" for a, b in (both[0], both[-1]))
        shapes = f"{one[0]}, {one[1]} rounds | {other[0]}, {other[1]} rounds"
        lines.append(f"| {label} | {trust} | {shapes} | {noise} | {' | '.join(cells)} |")
    return [*lines, ""]


def report(rows: list[dict[str, Any]]) -> str:
    lines = ["# Does subsampling help DP-FedSOFIM?", "", ANSWER, ""]
    lines += [HEAD, ""]
    for trust in TRUSTS:
        for label in SHAPES:
            mine = [row for row in rows if (row["trust"], row["method"]) == (trust, label)]
            lines += [f"## {label}, {trust}", ""]
            names = " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS)
            lines += [f"| batch | rounds | gradients | noise at ε = 1 | {names} |", "|---|---|---|---|---|---|---|---|"]
            done = dict.fromkeys((row["batch"], row["rounds"], row["step"]) for row in mine)
            for batch, rounds, step in done:
                by = {r["epsilon"]: r for r in mine if (r["batch"], r["rounds"], r["step"]) == (batch, rounds, step)}
                one = by[1.0]
                noise = f"{one['aggregate_std']:.3g} ({one['noise_multiplier']:.3g})"
                cells = " | ".join(shown(by[epsilon]) for epsilon in EPSILONS)
                name = batch if step.startswith("chosen") else f"{batch}, step {step}"
                lines.append(f"| {name} | {rounds} | {one['record_gradients'] / 1e6:.3g} | {noise} | {cells} |")
            lines.append("")
    return "\n".join([*lines, *differences(rows)])


def main(folder: str, workers: int) -> None:
    tasks = [(folder, trust, label) for label in (MOMENTUM, GD, GRADIENT) for trust in TRUSTS]
    begun = time.perf_counter()
    with ProcessPoolExecutor(workers) as pool:
        rows = [row for part in pool.map(compute, tasks) for row in part]
    document = {
        "provenance": provenance(f"OMP_NUM_THREADS=1 python benchmarks/subsampled.py DATA_DIR --workers {workers}"),
        "seconds": time.perf_counter() - begun,
        "base": BASE,
        "seeds": SEEDS,
        "rows": rows,
    }
    (ROOT / "results" / "subsampled.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.workers)
