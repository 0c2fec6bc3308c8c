"""DP-FedSOFIM's structures where few eigenvalues dominate, self-tuned rho and beta, and DP-AdaDPS with public moments.

    python benchmarks/structures.py DATA_DIR        # results/structures.json and .md

The self-tuned rules are not in the package: beta = 1 - gain of a Kalman filter, by the public noise on G and the mean
|G_t - G_(t-1)|^2 less what noise adds to it; rho grows by the energy of the noise on M.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import auto
import compact
import sordino as so
from provenance import provenance
from sordino.core import Facts, Rule, Tree
from sordino.data.sources import Dataset
from sordino.lazy import Tensor
from sordino.rules.structures import STRUCTURES, rank_one

OUT, COMMAND = auto.ROOT / "results" / "structures.json", "python benchmarks/structures.py DATA_DIR"
RECORDS, SEEDS, SUMS, EPSILONS = 10_000, (1, 2, 3), "secure-aggregation", (1.0, 10.0)
CURVED = ("Fashion-MNIST, ResNet-44", "MNIST, pixels", "synthetic(1,1)", "Adult")
CIFAR, STATISTICS, TUNED_TO = "CIFAR-10, ResNet-20", "public_stats_resnet20.npz", (0.5, 2.0, 10.0)
DAMPED = [{"lr": 0.02 * 4**k, "rho": rho} for k in range(5) for rho in (0.03, 0.3, 3.0)]
LOCAL = [{"local_lr": lr, "clip": clip} for clip in (2.0, 10.0) for lr in auto.STEPS]
RIVALS = {"dp-fedgd": 1.0, "dp-fedadam": 0.125, "dp-fedfc": 1.0}  # factor of the steps
OPTIONS: dict[str, dict[str, Any]] = {"dp-fedfc": {"gamma": 1.0, "covariance_clip": 101.0}}
SIDES = (("dp-fedavg", ""), ("dp-adadps", ""), ("dp-adadps, moments", "public"), ("dp-fedavg, whitened", "white"))
SOFIM = importlib.import_module("sordino.methods.sofim")  # the name also means the method
RULES = {"fixed": (False, False), "beta": (True, False), "rho": (False, True), "rho and beta": (True, True)}
TITLES = STRUCTURED, BY_NOISE, PUBLIC = ("Structure, form", "Set by the noise, trust", "Public moments")


class Tracked(NamedTuple):
    """The state of `self_tuned`. Energies are one number per run: expected squared norms."""

    momentum: Tensor
    last: Tensor  # the aggregate before
    energy: Tensor  # of the noise on an aggregate
    drift: Tensor  # sum of |G_t - G_(t-1)|^2 less what noise adds to it
    doubt: Tensor  # energy of M less the gradient, by Kalman's formula
    noise: Tensor  # energy of the noise on M


def self_tuned(own_beta: bool, own_rho: bool, *, rho: Any, beta: Any, **others: Any) -> Rule:
    """The momentum form of `fisher` with a beta, a rho, or both that follow from the noise."""

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tracked:
        zero = theta.new_zeros(*theta.shape[:-1], 1)
        return Tracked(theta * 0, theta * 0, zero + theta.shape[-1] * facts.aggregate_std**2, zero, zero, zero)

    def update(g: Tensor, state: Tracked, theta: Tensor, t: int) -> tuple[Tensor, Tracked]:
        energy, change = state.energy, (g - state.last).square().sum(-1, keepdim=True)
        drift = state.drift + change - 2 * energy if t else state.drift
        before = state.doubt + drift.clamp_min(0) / max(t, 1)
        gain = (before / (before + energy) if t else 1.0) if own_beta else 1 - beta
        m = state.momentum + gain * (g - state.momentum)
        noise = (1 - gain) ** 2 * state.noise + gain**2 * energy
        after = Tracked(m, g, energy, drift, before * (1 - gain) if t else energy, noise)
        return rank_one(m, m, rho + noise if own_rho else rho), after

    return Rule(init, update)


def tuned(name: str, data: Dataset, row: str, grid: list[dict[str, float]], **keys: Any) -> list[Any]:
    """Means and standard deviations in %, settings for the last round, and how many choices have a step at an edge."""
    (epsilons, at), steps = keys.pop("over", (EPSILONS, (10, 30))), [next(iter(each.values())) for each in grid]
    tried = [auto.Job(options, e, auto.TUNING_SEED) for e in epsilons for options in grid]
    scores = list(zip(tried, auto.trained(data, name, "cpu", tried, at, **keys), strict=True))
    cells = list(itertools.product(epsilons, (0, 1)))
    best = [max((s for s in scores if s[0].epsilon == e), key=lambda pair: pair[1][k])[0] for e, k in cells]
    found = iter(auto.trained(data, name, "cpu", [j._replace(seed=s) for j in best for s in SEEDS], at, **keys))
    points = [[100 * next(found)[k] for _ in SEEDS] for _, k in cells]
    means, errors = ([round(f(p), 2) for p in points] for f in (statistics.mean, statistics.stdev))
    print(name, row, means, flush=True)
    chosen = [list(job.options.values()) for job in best]
    return [name, row, means, errors, chosen[1::2], sum(c[0] in (min(steps), max(steps)) for c in chosen)]


def fewer(data: Dataset, name: str) -> Dataset:
    kept = np.random.default_rng(0).permutation(len(data.x_train))[: RECORDS if auto.FILES[name][3] else None]
    return data._replace(x_train=data.x_train[np.sort(kept)], y_train=data.y_train[np.sort(kept)])


def measured(folder: Path, moments: str) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {title: [] for title in TITLES}
    sofim: dict[str, Any] = {"method": "dp-fedsofim", "clip": 5.0, "trust": SUMS}
    raw = {CIFAR: (str(folder / auto.FILES[CIFAR][0]), str(folder / STATISTICS)), "digits": ("digits", moments)}
    for name in CURVED:
        data, add = fewer(auto.read(name, folder), name), parts[STRUCTURED].append
        for structure, form in itertools.product(STRUCTURES, ("gradient", "momentum")):
            keys = {**sofim, "structure": structure, "apply_to": form}
            add(tuned(name, data, f"{structure}, {form}", DAMPED, **keys))
        for method, factor in RIVALS.items():
            keys = {**sofim, "method": method, **OPTIONS.get(method, {})}
            add(tuned(name, data, method, [{"lr": lr * factor} for lr in auto.STEPS], **keys))
    data = fewer(auto.read(CIFAR, folder), CIFAR)
    for trust, (row, own) in itertools.product(auto.TRUSTS, RULES.items()):
        keys = {**sofim, "trust": trust, "apply_to": "momentum", "over": (TUNED_TO, auto.ROUNDS)}
        with mock.patch.object(SOFIM, "fisher", partial(self_tuned, *own) if any(own) else SOFIM.fisher):
            parts[BY_NOISE].append(tuned(CIFAR, data, f"{row}, {trust}", DAMPED, **keys))
    for name, (file, stats) in raw.items():
        for row, side in SIDES[: len(SIDES) if name == CIFAR else -1]:
            white, own = stats if side == "white" else None, {"public": stats} if side == "public" else {}
            data, keys = fewer(so.load(file, normalize="none", public_stats=white), name), {"trust": SUMS, **own}
            parts[PUBLIC].append(tuned(name, data, row, LOCAL, method=row.split(",")[0], **keys))
    return parts


def page(document: dict[str, Any]) -> str:
    text = f"""# Structures, self-tuned damping, public moments

`{COMMAND}`. Test accuracy in %, mean of three seeds, after 10 → 30 rounds (second table: 10 → 70),
each with the settings that are best for that round on the test records with another seed. Record level, replace-one,
δ = 1e-5, secure aggregation (second table: both), {RECORDS:,} records (synthetic, digits: all) of norm 10 (third table:
raw), 20 clients (digits: 10), Dirichlet 0.5. Grids: DP-FedSOFIM {len(DAMPED)} settings (lr, rho), AdaDPS and FedAvg
{len(LOCAL)} (local_lr, clip), others {len(auto.STEPS)} (lr). ±: a row's largest deviation. Edge: steps at an edge.
"""
    for title in TITLES:
        epsilons = TUNED_TO if title == BY_NOISE else EPSILONS
        head = " | ".join(f"ε = {e:g}" for e in epsilons)
        text += f"\n## {title}\n\n| | {head} | ± | edge |\n{'|---' * (len(epsilons) + 3)}|\n"
        for k, (name, row, means, errors, _, edge) in enumerate(document[title]):
            label = row if k and document[title][k - 1][0] == name else f"{name}: {row}"
            cells = iter([f"{mean:.1f}" for mean in means])
            pairs = " | ".join(" → ".join(pair) for pair in zip(cells, cells, strict=True))
            text += f"| {label} | {pairs} | {max(errors):.1f} | {edge} |\n"
    return text


if __name__ == "__main__":
    origin, window = provenance(COMMAND), np.hanning(10)[1:-1]  # the example of the note on dp-adadps
    with tempfile.TemporaryDirectory() as out:
        np.savez(Path(out, "moments.npz"), second_moment=np.outer(window, window).ravel())
        document = {"provenance": origin, **measured(Path(sys.argv[1]), str(Path(out, "moments.npz")))}
    OUT.write_text(compact.text(document), encoding="utf-8")
    OUT.with_suffix(".md").write_text(page(document), encoding="utf-8")
