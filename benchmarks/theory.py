"""What the convergence theorems of DP-FedSOFIM and DP-FedNew say in numbers: results/theory.json and results/theory.md.

    python benchmarks/theory.py

A theorem's bound stands beside what is measured and beside what holds without it. Least squares over 20 clients with
500 records each and 5 parameters, no record clipped: the theorems' own ground, with every constant read off the data.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from provenance import provenance
from sordino.core import Privacy
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan
from sordino.studies import theory
from sordino.studies.estimation_report import markdown, short

ROOT = Path(__file__).parents[1]
CLIENTS, RECORDS, DIM, RUNS = 20, 500, 5, 100
BETA, EPSILON = 0.9, 5.0


def problem(radius: float) -> tuple[Records, torch.Tensor, torch.Tensor]:
    """Records with |x| = radius and |theta_0| = 1, the Hessian of their mean loss, and its minimiser."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((CLIENTS * RECORDS, DIM))
    x *= radius / np.linalg.norm(x, axis=1, keepdims=True)
    y = x @ np.full(DIM, DIM**-0.5) + 0.1 * radius * rng.uniform(-1, 1, len(x))
    records = Records.of(x, y, np.repeat(np.arange(CLIENTS), RECORDS), dtype=torch.float64)
    H = records.x.T @ records.x / len(x)
    return records, H, torch.linalg.solve(H, records.x.T @ records.y / len(x))


def sofim(radius: float, clip: float, rho: float, step: float, rounds: int) -> dict[str, Any]:
    """Both theorems for one setting: `step` is lr / rho, what a gradient is multiplied by where M is small."""
    records, H, best = problem(radius)
    method = build("dp-fedsofim", clip=clip, lr=step * rho, rho=rho, beta=BETA)
    plan = Plan(method, rounds, records.sizes, Privacy(EPSILON))
    model = Linear(DIM, 1, Loss.SQUARES, bias=False)
    sources = [Seeded(seed) for seed in range(RUNS)]
    start = torch.zeros(RUNS, DIM, dtype=torch.float64)
    path = [start, *(this_round.model for this_round in simulate.run(plan, model, records, sources, theta=start))]
    gradients = torch.stack([(theta - best) @ H for theta in path]).norm(dim=-1)
    gaps = [0.5 * ((theta - best) @ H * (theta - best)).sum(-1) for theta in path]
    curves = torch.linalg.eigvalsh(H)
    constants = theory.Descent(
        clip=clip,
        rho=rho,
        lr=step * rho,
        beta=BETA,
        dim=DIM,
        noise=calibration.aggregate_std(plan, 0),
        smooth=float(curves[-1]),
        convex=float(curves[0]),
        steepest=float(gradients.max()),
    )
    first = float(gaps[0].mean())
    return {
        "clip": clip,
        "rho": rho,
        "step": step,
        "rounds": rounds,
        "constants": constants._asdict(),
        "convex": _verdict(theory.sofim_convex(constants, rounds, first), gaps[-1]),
        "stationary": _verdict(theory.sofim_stationary(constants, rounds, first), gradients[:-1].square().mean(0)),
    }


def _verdict(verdict: theory.BoundCheck, measured: torch.Tensor) -> dict[str, Any]:
    return {
        **verdict._asdict(),
        "vacuous": verdict.vacuous,
        "measured": float(measured.mean()),
        "se": float(measured.std() / math.sqrt(len(measured))),
        "runs": len(measured),
    }


SETTINGS = [
    # radius, clip, rho, lr / rho, rounds: first the clip of the paper's experiments, then milder and milder ones
    (5**0.5, 10.0, 0.5, 0.3, 70),
    (5**0.5, 10.0, 1.0, 0.3, 70),
    (5**0.5, 10.0, 10.0, 0.3, 70),
    (5**0.5, 10.0, 100.0, 0.3, 70),
    (5**0.5, 10.0, 1000.0, 0.3, 70),
    (1.0, 2.0, 10.0, 0.02, 500),
    (1.0, 2.0, 1000.0, 0.02, 500),
]


def sofim_table(rows: list[dict[str, Any]], name: str) -> str:
    head = ["C", "ρ", "lr/ρ", "rounds", "measured", "theorem", "known without it", "C²/ρ and more", "theorem says"]
    return markdown(
        head,
        [
            [
                f"{r['clip']:g}",
                f"{r['rho']:g}",
                f"{r['step']:g}",
                str(r["rounds"]),
                f"{short(r[name]['measured'])} ± {short(r[name]['se'])}",
                short(r[name]["bound"]),
                short(r[name]["trivial"]),
                short(r[name]["coupling"]),
                "nothing" if r[name]["vacuous"] else "something",
            ]
            for r in rows
        ],
    )


def fednew_rows() -> list[dict[str, Any]]:
    """Noisy passes of FedNew on quadratic clients, and what Lemma 25 asks for."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((CLIENTS, DIM, 2 * DIM))
    hessians, gradients = a @ a.swapaxes(1, 2) / (2 * DIM), rng.standard_normal((CLIENTS, DIM))
    largest = float(np.linalg.eigvalsh(hessians).max())
    rows = []
    for alpha, rho in [(0.01, 1.0), (0.1, 1.0), (1.0, 1.0), (0.1, 10.0), (0.1, 100.0), (100.0, 1.0), (1e4, 1e3)]:
        lipschitz, sigma = largest + alpha, 0.1
        samples = [theory.fednew_error(sigma, alpha, rho, hessians, gradients, 4000, seed) for seed in range(10)]
        measured = float(np.mean(samples))
        rows.append(
            {
                "alpha": alpha,
                "rho": rho,
                "clients": CLIENTS,
                "lipschitz": lipschitz,
                "alpha_needed": 2.5 * rho + 8 * lipschitz**2 * CLIENTS / rho,
                "alpha_needed_at_best_rho": theory.fednew_least_alpha(CLIENTS, lipschitz),
                "beta_2": theory.fednew_rate(alpha, rho, CLIENTS, lipschitz),
                "bound": theory.fednew_bound(sigma, alpha, rho, DIM, CLIENTS, lipschitz),
                "measured": measured,
                "samples": samples,
                "beta_2_that_would_fit": sigma**2 * (alpha + rho) * DIM / (CLIENTS * measured),
            }
        )
    return rows


def fednew_table(rows: list[dict[str, Any]]) -> str:
    head = ["α", "ρ", "L_q ≥", "α needed at this ρ", "at the best ρ", "β₂ left", "measured", "β₂ that would fit it"]
    keys = ("alpha", "rho", "lipschitz", "alpha_needed", "alpha_needed_at_best_rho", "beta_2", "measured")
    return markdown(head, [[*(f"{r[key]:.4g}" for key in keys), f"{r['beta_2_that_would_fit']:.3g}"] for r in rows])


PAGE = """\
# What two convergence theorems say in numbers

`{command}`; raw figures in `results/theory.json`. Least squares, {clients} clients with {records} records
each, {dim} parameters, ε = {epsilon:g}, nothing clipped. L, μ and G_max come from the data and {runs} runs, and
the Young parameters τ are optimal.

## DP-FedSOFIM, Theorem 4.21: E F(θ_T) − F*

Strong convexity alone gives F(θ) − F* ≤ G_max² / 2μ wherever |∇F| ≤ G_max, which the theorem assumes of every
iterate. One of its terms, the coupling G_max² M² / ρ² with M² ≥ C², tends to at least C²/ρ times that bound: **if C²
≥ ρ the theorem is weaker than its own assumptions.** The experiments of the paper have C = 10 and ρ from 0.5 to 10.
Its smoothness term has C² instead of the squared gradient, which alone makes the bound vacuous at lr/ρ = 0.3 for any
ρ. If ρ is much larger than C², H_t is I/ρ and the method is DP-FedGD.

{convex}

## DP-FedSOFIM, Theorem 4.31: the mean of E|∇F(θ_t)|²

Trivial bound: G_max², by assumption. The coupling term is again C²/ρ times as large.

{stationary}

## DP-FedNew, Theorem 8: E|y − y*|² ≤ σ² (α + ρ) d / (n β₂)

β₂ must be positive. Lemma 25 leaves β₂ ≤ 2 (α − 2.5 ρ − 8 L_q² n/ρ − L_q²/ρ), so α > 2.5 ρ + 8 L_q² n/ρ ≥ √(80 n) L_q
is needed. With ρ = 1 and α < 1, the values that did best in the experiments, α > 2.5 ρ fails whatever the data. It
fails for every choice: condition (F.1) at equal θ says L_q ≥ |H_i + αI| ≥ α, and α > √(80 n) α has no solution. **No
α, ρ and n satisfy the hypotheses.** Measured below: noisy passes at a frozen model, σ = 0.1.

{fednew}
"""


def page(document: dict[str, Any]) -> str:
    return PAGE.format(
        command=document["provenance"]["command"],
        clients=CLIENTS,
        records=RECORDS,
        dim=DIM,
        epsilon=EPSILON,
        runs=RUNS,
        convex=sofim_table(document["sofim"], "convex"),
        stationary=sofim_table(document["sofim"], "stationary"),
        fednew=fednew_table(document["fednew"]),
    )


def main() -> None:
    document = {
        "provenance": provenance("python benchmarks/theory.py"),
        "sofim": [sofim(*setting) for setting in track(SETTINGS, "settings")],
        "fednew": fednew_rows(),
    }
    clean = json.loads(json.dumps(document), parse_constant=lambda _: None)
    (ROOT / "results" / "theory.json").write_text(json.dumps(clean, indent=1) + "\n")
    (ROOT / "results" / "theory.md").write_text(page(document))
    print(page(document))


if __name__ == "__main__":
    main()
