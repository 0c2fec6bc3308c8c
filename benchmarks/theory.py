"""What the papers' convergence theorems say in numbers: results/theory.json, which docs/results/theory.md shows.

    python benchmarks/theory.py                          the parts that need no data; the others stay as they are
    python benchmarks/theory.py --data-dir DIR           all parts
    python benchmarks/theory.py --data-dir DIR --parts paths,adamw

A theorem's bound stands beside what is measured and beside what holds without it. `sofim`, `fedgd`, `recursion` and
`fednew` are least squares and quadratics, the theorems' own ground, with every constant read off the data. `paths` and
`adamw` measure the constants on CIFAR-10 features, MNIST and Adult.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track

from compact import rounded, text
from provenance import provenance
from sordino.core import Divisor, Privacy
from sordino.data.partition import split
from sordino.data.records import Records
from sordino.data.sources import Dataset, load
from sordino.engines import simulate
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan
from sordino.studies import constants, theory
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
    c = theory.Descent(
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
        "constants": {key: getattr(c, key) for key in ("noise", "smooth", "convex", "steepest")},
        "convex": _verdict(theory.sofim_convex(c, rounds, first), gaps[-1]),
        "stationary": _verdict(theory.sofim_stationary(c, rounds, first), gradients[:-1].square().mean(0)),
    }


def _verdict(verdict: theory.BoundCheck, measured: torch.Tensor) -> dict[str, Any]:
    return {
        **verdict._asdict(),
        "vacuous": verdict.vacuous,
        "measured": float(measured.mean()),
        "se": float(measured.std() / math.sqrt(len(measured))),
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


# --------------------------------------------------------------------------------------------------------- DP-FedGD

GD_ROUNDS, GD_RUNS = 200, 50
GD_SETTINGS = [  # clip, epsilon, lr; the records' gradients have norms below 10
    *((10.0, epsilon, lr) for epsilon in (1.0, 5.0, 25.0) for lr in (0.05, 0.45)),
    (0.5, 5.0, 0.05),
    (0.5, 5.0, 0.45),
]


def fedgd(clip: float, epsilon: float, lr: float) -> dict[str, Any]:
    """Theorem 4.26 on least squares, with the clipping bias measured on the path."""
    records, H, best = problem(5**0.5)
    plan = Plan(build("dp-fedgd", clip=clip, lr=lr), GD_ROUNDS, records.sizes, Privacy(epsilon))
    model = Linear(DIM, 1, Loss.SQUARES, bias=False)
    sources = [Seeded(seed) for seed in range(GD_RUNS)]
    start = torch.zeros(GD_RUNS, DIM, dtype=torch.float64)
    path = [start, *(this_round.model for this_round in simulate.run(plan, model, records, sources, theta=start))]
    gaps = [0.5 * ((theta - best) @ H * (theta - best)).sum(-1) for theta in path]
    curves, vectors = torch.linalg.eigh(H)
    noise = calibration.aggregate_std(plan, 0)
    bias = max(_bias(records, H, best, theta, clip) for theta in path[:: GD_ROUNDS // 20])
    c = theory.Descent(clip, 1.0, lr, 0.0, DIM, noise, float(curves[-1]), float(curves[0]), 0.0, bias)
    check = theory.fedgd_convex(c, GD_ROUNDS, float(gaps[0].mean()))
    bare = bias == 0
    exact = theory.fedgd_quadratic(curves.numpy(), (vectors.T @ -best).numpy(), noise, lr, GD_ROUNDS)
    return {
        "clip": clip,
        "epsilon": epsilon,
        "lr": lr,
        "noise": noise,
        "bias": bias,
        "floor": check.floor,
        "start": check.start,
        "vacuous": check.vacuous,
        "sharper": theory.fedgd_sharper_floor(c) if bare else None,
        "exact": exact if bare else None,
        **_mean(gaps[-1]),
    }


def _bias(records: Records, H: torch.Tensor, best: torch.Tensor, theta: torch.Tensor, clip: float) -> float:
    """The largest |clipped mean gradient - gradient| over the runs; 0 where no record is clipped."""
    worst = 0.0
    for each in theta[:10]:
        gradients = records.x * (records.x @ each - records.y)[:, None]
        norms = gradients.norm(dim=1)
        if norms.max() > clip:
            factor = (clip / norms).clamp(max=1)
            worst = max(worst, float(((factor - 1)[:, None] * gradients).mean(0).norm()))
    return worst


def _mean(samples: torch.Tensor) -> dict[str, float]:
    return {"measured": float(samples.mean()), "se": float(samples.std() / math.sqrt(len(samples)))}


def fedgd_table(rows: list[dict[str, Any]]) -> str:
    head = ["C", "ε", "lr", "measured", "exact", "floor of the theorem", "floor without C²", "before training", "says"]
    return markdown(
        head,
        [
            [
                f"{r['clip']:g}",
                f"{r['epsilon']:g}",
                f"{r['lr']:g}",
                f"{short(r['measured'])} ± {short(r['se'])}",
                *(short(r[key]) for key in ("exact", "floor", "sharper", "start")),
                "nothing" if r["vacuous"] else "something",
            ]
            for r in rows
        ],
    )


# ------------------------------------------------------------------------------------------------ paths on real data

PATH_RUNS, PATH_ROUNDS, PATH_CLIENTS = 3, 70, 20
PATH_BUDGETS = ((1.0, 10.0), (10.0, 0.5))  # epsilon and rho, as the paper pairs them
PATH_DATA = {"cifar10": 10.0, "mnist": 2.0, "a9a": 2.0}  # and the clip


@lru_cache(maxsize=1)
def data(name: str, folder: str) -> Dataset:
    """CIFAR-10 features of a ResNet-20, MNIST as 7 x 7 averages of pixels, Adult."""
    if name == "cifar10":
        return load(str(Path(folder) / "cifar10_resnet20.npz"))
    found = load(name, data_dir=folder)
    if name == "mnist":
        small = found.x_train.reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(-1, 49)
        return found._replace(x_train=small, shape=())
    return found


class Softmax(NamedTuple):
    """The mean over clients of their mean losses, for softmax with a bias. theta: runs x parameters."""

    x: torch.Tensor  # with a column of ones
    y: torch.Tensor
    weight: torch.Tensor  # 1 / (clients m_i) of each record
    classes: int

    def both(self, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and the gradients."""
        z = (self.x @ theta.unflatten(-1, (self.x.shape[1], self.classes))).log_softmax(-1)
        rows = torch.arange(len(self.y))
        value = -(z[..., rows, self.y] * self.weight).sum(-1)
        residual = z.exp_()
        residual[..., rows, self.y] -= 1
        return value, (self.x.T @ residual.mul_(self.weight[:, None])).flatten(-2)

    def smooth(self) -> float:
        """L: half the largest eigenvalue of the weighted covariance, because |diag p - p p^T| <= 1/2."""
        return float(torch.linalg.eigvalsh((self.x.T * self.weight) @ self.x)[-1]) / 2

    def least(self) -> float:
        """F*, or a value slightly above it."""
        theta = torch.zeros(self.x.shape[1] * self.classes, dtype=self.x.dtype, requires_grad=True)
        solver = torch.optim.LBFGS([theta], max_iter=150, history_size=30, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            value, theta.grad = self.both(theta.detach())
            return value

        solver.step(closure)  # type: ignore[no-untyped-call]
        return float(self.both(theta.detach())[0])


def objective(dataset: Dataset, owner: np.ndarray) -> Softmax:
    sizes = np.bincount(owner)
    x = torch.from_numpy(dataset.x_train)
    weight = torch.from_numpy(1 / (len(sizes) * sizes[owner])).float()
    y = torch.from_numpy(np.asarray(dataset.y_train)).long()
    return Softmax(torch.cat([x, torch.ones(len(x), 1)], 1), y, weight, len(dataset.classes))


def paths(folder: str) -> list[dict[str, Any]]:
    rows = []
    for name, clip in track(PATH_DATA.items(), "paths"):
        dataset = data(name, folder)
        for partition in ("iid", "dirichlet:0.5"):
            owner = split(dataset, partition, PATH_CLIENTS, seed=0)
            f = objective(dataset, owner)
            records, smooth, least = Records.of(dataset.x_train, dataset.y_train, owner), f.smooth(), f.least()
            for epsilon, rho in PATH_BUDGETS:
                found = path(f, records, smooth, least, epsilon, rho, clip)
                rows.append({"data": name, "partition": partition, **found})
    return rows


def path(
    f: Softmax, records: Records, smooth: float, least: float, epsilon: float, rho: float, clip: float
) -> dict[str, Any]:
    """The constants along DP-FedSOFIM at lr = rho / L, an untrusted server, as the paper accounts."""
    method = build("dp-fedsofim", clip=clip, lr=rho / smooth, rho=rho, beta=BETA)
    plan = Plan(method, PATH_ROUNDS, records.sizes, Privacy(epsilon), divisor=Divisor.CLIENT_MEAN)
    theta = torch.zeros(PATH_RUNS, f.x.shape[1] * f.classes)
    gradients, aggregates, gaps = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    model = Linear(f.x.shape[1] - 1, f.classes)
    sources = [Seeded(seed) for seed in range(PATH_RUNS)]
    for this_round in simulate.run(plan, model, records, sources, theta=theta):
        value, gradient = f.both(theta)
        gaps.append(value.double() - least)
        gradients.append(gradient.double())
        aggregates.append(this_round.aggregate.double())
        theta = this_round.model
    second = clip**2 + model.size * calibration.aggregate_std(plan, 0) ** 2
    held = constants.Path(torch.stack(gradients), torch.stack(aggregates), torch.stack(gaps))
    p = constants.path_constants(held, rho, BETA, second)
    return {
        "epsilon": epsilon,
        "rho": rho,
        "smooth": smooth,
        "second": second,
        **p._asdict(),
        "gain": p.gain,
        "floor": theory.sofim_sharper_floor(p, rho / smooth, smooth, second),
        "start": float(gaps[0].mean()),
        **_mean(f.both(theta)[0] - least),
    }


def paths_table(rows: list[dict[str, Any]]) -> str:
    head = ["data", "partition", "ε", "ρ", "ρ α_H", "ρ² σ_H²", "σ_H² for H = I", "gain", "ρ B_H", "floor"]
    return markdown(
        [*head, "before training", "measured"],
        [
            [
                r["data"],
                r["partition"],
                f"{r['epsilon']:g}",
                f"{r['rho']:g}",
                short(r["rho"] * r["alpha"]),
                short(r["rho"] ** 2 * r["sigma"]),
                short(r["sigma_plain"]),
                short(r["gain"]),
                short(r["rho"] * r["coupling"]),
                short(r["floor"]),
                short(r["start"]),
                f"{short(r['measured'])} ± {short(r['se'])}",
            ]
            for r in rows
        ],
    )


# ----------------------------------------------------------------------------------------------------- DP-FedAdamW

ADAMW_ROUNDS, ADAMW_RUNS, ADAMW_STEPS, ADAMW_BATCH = (20, 80, 320), 3, 5, 64
ADAMW_TAU, ADAMW_LR = 0.1, 0.003
RECURSIONS = [  # parameters, sigma, rounds
    *((20, noise, rounds) for noise in (0.0, 8.0) for rounds in (100, 1000, 10_000)),
    (2000, 8.0, 1000),
]


def adamw(folder: str) -> list[dict[str, Any]]:
    """DP-FedAdamW on Adult beside the terms of Theorem 3."""
    dataset = data("a9a", folder)
    owner = split(dataset, "dirichlet:0.5", PATH_CLIENTS, seed=0)
    sizes = np.bincount(owner)
    f = objective(dataset, owner)
    pooled = f._replace(weight=torch.full_like(f.weight, 1 / len(f.y)))
    records, smooth, least = Records.of(dataset.x_train, dataset.y_train, owner), pooled.smooth(), pooled.least()
    model = Linear(dataset.x_train.shape[1], f.classes)
    rows = []
    for noise in track((0.0, 8.0), "adamw"):
        options = {"clip": 1.0, "lr": ADAMW_LR, "steps": ADAMW_STEPS, "tau": ADAMW_TAU, "schedule": "constant"}
        method = build("dp-fedadamw", **options, decay=0.0)
        rounds = ADAMW_ROUNDS[-1]
        where = {"noise": noise * math.sqrt(len(sizes))} if noise else {}
        promise = Privacy(math.inf if not noise else 1.0)
        plan = Plan(method, rounds, records.sizes, promise, sampling=f"poisson:{ADAMW_BATCH}", **where)
        theta = torch.zeros(ADAMW_RUNS, model.size)
        squares = []
        sources = [Seeded(seed) for seed in range(ADAMW_RUNS)]
        for this_round in simulate.run(plan, model, records, sources, theta=theta):
            squares.append(pooled.both(theta)[1].square().sum(-1))
            theta = this_round.model
        setting = theory.AdamWSetting(
            smooth=smooth,
            gap=math.log(f.classes) - least,
            sampling=_sampling(f, owner),
            largest=1.0,  # features are 0 or 1, residuals at most 1
            tau=ADAMW_TAU,
            clients=len(sizes),
            steps=ADAMW_STEPS,
            noise=noise,
            batch=ADAMW_BATCH,
            records=len(owner) // len(sizes),
        )
        for count in ADAMW_ROUNDS:
            rows.append(
                {
                    "noise": noise,
                    "rounds": count,
                    "smooth": smooth,
                    **setting.terms(count)._asdict(),
                    **_mean(torch.stack(squares[:count]).mean(0)),
                }
            )
    return rows


def _sampling(f: Softmax, owner: np.ndarray) -> float:
    """sigma_l^2 at theta = 0: the mean over clients of a Poisson minibatch's variance, sum |g|^2 / (m b) at b << m."""
    residual = 1 / f.classes - torch.nn.functional.one_hot(f.y, f.classes)
    squares = (f.x.square().sum(1) * residual.square().sum(1)).numpy()
    means = [squares[owner == client].mean() for client in range(owner.max() + 1)]
    return float(np.mean(means)) / ADAMW_BATCH


def recursion() -> list[dict[str, Any]]:
    """The proof's own recursion inside every hypothesis: L = 1/6, no sampling noise, the theorem's gamma and lr."""
    rows = []
    for dim, noise, rounds in RECURSIONS:
        curves, start = np.full(dim, 1 / 6), np.full(dim, math.sqrt(5 / dim))
        gap = float(0.5 * curves @ start**2)
        setting = theory.AdamWSetting(1 / 6, gap, 0.0, 0.25, 1.0, 10, 5, noise, 16, 1000)
        gamma = setting.largest_gamma(rounds)
        lr = setting.largest_lr(gamma, rounds, 2 * gap / 6)
        samples = [theory.adamw_error(curves, start, gamma, lr, setting, 1.0, rounds, seed) for seed in range(4)]
        terms = setting.terms(rounds)._asdict()
        rows.append({"dim": dim, "noise": noise, "rounds": rounds, **terms, **_mean(torch.tensor(samples))})
    return rows


def adamw_table(rows: list[dict[str, Any]], *more: str) -> str:
    head = [
        *more,
        "σ",
        "R",
        "measured",
        "sampling",
        "L Δ / R",
        "noise, sR = batch",
        "noise, R = rounds",
        "measured / sum",
    ]
    keys = ("sampling", "start", "noise_by_batch", "noise_by_rounds")
    return markdown(
        head,
        [
            [
                *(f"{r[key]:g}" for key in more),
                f"{r['noise']:g}",
                str(r["rounds"]),
                f"{short(r['measured'])} ± {short(r['se'])}",
                *(short(r[key]) for key in keys),
                short(r["measured"] / sum(r[key] for key in keys[:3])),
            ]
            for r in rows
        ],
    )


# ------------------------------------------------------------------------------------------------------ the report


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
                "beta_2_that_would_fit": sigma**2 * (alpha + rho) * DIM / (CLIENTS * measured),
            }
        )
    return rows


def fednew_table(rows: list[dict[str, Any]]) -> str:
    head = ["α", "ρ", "L_q ≥", "α needed at this ρ", "at the best ρ", "β₂ left", "measured", "β₂ that would fit it"]
    keys = ("alpha", "rho", "lipschitz", "alpha_needed", "alpha_needed_at_best_rho", "beta_2", "measured")
    return markdown(head, [[*(f"{r[key]:.4g}" for key in keys), f"{r['beta_2_that_would_fit']:.3g}"] for r in rows])


PAGE = """\
# What the papers' convergence theorems say in numbers

`{command}`; raw figures in `results/theory.json`. Parts on least squares: {clients} clients with {records} records
each, {dim} parameters, ε = {epsilon:g} unless stated, nothing clipped. L, μ and G_max come from the data and {runs}
runs, and the Young parameters τ are optimal.

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

## DP-FedGD, Theorem 4.26: its floor

Γ / (2 μ lr c) with Γ / lr = ζ² / 2τ + L lr (C² + d ν²) / 2 and c = 1 − τ/2, at the best τ. {gd_rounds} rounds,
{gd_runs} runs. *Exact* is the closed form for a quadratic. **The statement holds and is loose**: C² stands for the
squared gradient, so the floor keeps L lr C² / 4μ when the noise vanishes, where DP-FedGD converges. *Without C²* is
the floor that the same proof gives with the squared gradient, L lr d ν² / (4 μ (1 − L lr / 2)), where nothing is
clipped. The theorem says nothing where its floor exceeds the gap before training. At C = 0.5 records are clipped, and
ζ is measured on the path.

{fedgd}

## DP-FedSOFIM, section 4.7: α_H and σ_H on real data

⟨∇F, H ∇F⟩ ≥ α_H |∇F|² and E|H G|² ≤ σ_H² (C² + d ν²) along the path, and the "schematic" floor (B_H + L lr σ_H² (C² +
d ν²)) / (2 μ α_H). The paper measures none of them, and gives no formula for B_H; here it is the largest mean of
−⟨∇F, H (G − ∇F)⟩ over the runs, with which the one-step descent holds. μ is the least |∇F|² / 2(F − F*) on the path,
because softmax heads are not strongly convex. Setting of the paper: {path_clients} clients, mean over clients,
untrusted server, {path_rounds} rounds, β = {beta:g}, C = 10 on CIFAR-10 features. C = 2 on MNIST (7 × 7) and Adult;
lr = ρ / L; {path_runs} runs. For H = I/ρ, ρ α_H = 1 and ρ² σ_H² is the value for H = I.

*Gain* is α_H² / σ_H² relative to H = I: by how much H lowers the noise part of the floor below that of DP-FedGD with
the same descent, at the measured constants. {gain}

{paths}

## DP-FedAdamW, Theorem 3: the mean of E|∇f(θ_t)|² over R rounds

≲ √(L Δ σ_l² / (S K R τ²)) + L Δ / R + σ² G_g² / (sR)², with the hidden constant set to 1. In the last term sR is the
minibatch where the noise is added, but R is the number of rounds elsewhere; both readings are shown. The statement as
printed has no τ in the first term, its proof has. *Measured / sum* takes sR as the minibatch. The hypotheses ask for
γ ≤ γ / 6L, so L ≤ 1/6. DP-FedAdamW on Adult (Dirichlet 0.5, {path_clients} clients, K = {steps}, minibatches of
{batch}, τ = {tau:g}, lr = {lr:g}, C = 1) has L = {adamw_l}, which its Hessian reaches at θ = 0. **The theorem does
not apply**:

{adamw}

The recursion that the proof analyses (the server steps by γ Δ_G), inside every hypothesis: a quadratic with L = 1/6,
no sampling noise, C = 1, K = 5, 10 clients, minibatches of 16, γ and the local step as large as allowed. **With R as
rounds the theorem is contradicted**: the noise does not fall with the rounds. **With sR as minibatch the noise term
lacks the dimension and the clip**: the error grows with both. The proof would cover the noise if σ_l² counted it, as
σ_l² + d σ² C² / b².

{recursion}

Every condition on the local step bounds it from above, and the bound does not depend on it. The algorithm as we
reconstruct it (its main text is not at hand) moves by the mean update, so with a local step near 0 it stays at θ_0:
for that algorithm the theorem cannot hold as stated.

## DP-FedNew, Theorem 8: E|y − y*|² ≤ σ² (α + ρ) d / (n β₂)

β₂ must be positive. Lemma 25 leaves β₂ ≤ 2 (α − 2.5 ρ − 8 L_q² n/ρ − L_q²/ρ), so α > 2.5 ρ + 8 L_q² n/ρ ≥ √(80 n) L_q
is needed. With ρ = 1 and α < 1, the values that did best in the experiments, α > 2.5 ρ fails whatever the data. It
fails for every choice: condition (F.1) at equal θ says L_q ≥ |H_i + αI| ≥ α, and α > √(80 n) α has no solution. **No
α, ρ and n satisfy the hypotheses.** Measured below: noisy passes at a frozen model, σ = 0.1.

{fednew}
"""


def gain_text(rows: list[dict[str, Any]]) -> str:
    above = list(dict.fromkeys(f"{r['data']}, {r['partition']}" for r in rows if r["gain"] > 1))
    least, most = (short(choose(float(r["gain"]) for r in rows)) for choose in (min, max))
    vacuous = sum(r["floor"] is None or r["floor"] >= r["start"] for r in rows)
    # L lr = rho
    bare = [r["rho"] * r["sigma"] * r["second"] / (2 * r["flatness"] * r["alpha"]) for r in rows]
    without = sum(floor >= r["start"] for floor, r in zip(bare, rows, strict=True))
    names = "; ".join(above) or "none"
    return (
        f"It lies between {least} and {most}, and is above 1 for {names}. Where G = ∇F it cannot be above 1, because "
        "(1 − w x)² ≤ 1 − (2w − w²) x for x ≤ 1: H must cut noise more than it cuts the gradient.\n\n"
        f"The floor is no better than the model before training in {vacuous} of {len(rows)} cases, and with B_H = 0 in "
        f"{without}."
    )


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
        gd_rounds=GD_ROUNDS,
        gd_runs=GD_RUNS,
        fedgd=fedgd_table(document["fedgd"]),
        path_clients=PATH_CLIENTS,
        path_rounds=PATH_ROUNDS,
        path_runs=PATH_RUNS,
        beta=BETA,
        gain=gain_text(document["paths"]),
        paths=paths_table(document["paths"]),
        steps=ADAMW_STEPS,
        batch=ADAMW_BATCH,
        tau=ADAMW_TAU,
        lr=ADAMW_LR,
        adamw_l=short(document["adamw"][0]["smooth"]),
        adamw=adamw_table(document["adamw"]),
        recursion=adamw_table(document["recursion"], "dim"),
        fednew=fednew_table(document["fednew"]),
    )


PARTS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "sofim": lambda folder: [sofim(*setting) for setting in track(SETTINGS, "sofim")],
    "fedgd": lambda folder: [fedgd(*setting) for setting in track(GD_SETTINGS, "fedgd")],
    "paths": paths,
    "adamw": adamw,
    "recursion": lambda folder: recursion(),
    "fednew": lambda folder: fednew_rows(),
}
NEED_DATA = ("paths", "adamw")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", help="where cifar10_resnet20.npz and the files of MNIST and a9a lie")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)} (default: all that can run)")
    arguments = parser.parse_args()
    everything = [name for name in PARTS if arguments.data_dir or name not in NEED_DATA]
    chosen = arguments.parts.split(",") if arguments.parts else everything
    if unknown := [name for name in chosen if name not in PARTS or (name in NEED_DATA and not arguments.data_dir)]:
        parser.error(f"parts {', '.join(unknown)}: unknown, or need --data-dir")
    held = ROOT / "results" / "theory.json"
    document = json.loads(held.read_text()) if held.exists() else {}
    document["provenance"] = provenance("python benchmarks/theory.py --data-dir DIR")
    for name in chosen:
        document[name] = json.loads(json.dumps(PARTS[name](arguments.data_dir or "")), parse_constant=lambda _: None)
        held.write_text(text(rounded(document)), encoding="utf-8")
    print(page(json.loads(held.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
