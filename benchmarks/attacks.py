"""Attacks that once worked, against the installed package: results/attacks.md and results/attacks.json.

Each class of attack is one function. It returns what was measured on earlier code (2026-11-15), what is measured now,
the bound, and whether the attack failed. Where an attack could fail by its own fault, a mutant (the old arithmetic,
or the secret that the attacker lacks) shows that it still finds what it looks for. Exit status 1: an attack
succeeded, or was too weak to tell.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import chi2_contingency, kstest, norm
from torch import Tensor

from guard import machine
from provenance import provenance
from sordino.checks.audit import attacks as audits
from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.sums import ROWS, OneAccumulator, neighbours, pair, sums
from sordino.cli import main as sordino
from sordino.core import SAFETY, Adjacency, Privacy, Shard, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.schedule import SAMPLING, assign_slots, round_plans
from sordino.errors import SordinoError
from sordino.evidence.ledger import GENESIS, Ledger, _chained, _label
from sordino.evidence.signing import signed
from sordino.evidence.verify import NOT_SIGNED
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms import random
from sordino.privacy.mechanisms.gaussian import grid_of
from sordino.privacy.mechanisms.random import Address, Noiseless, Secure, Seeded, Source
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.training import run as runs
from sordino.training.folder import RunFolder
from sordino.training.predict import predict
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run

ROOT = Path(__file__).resolve().parents[1]
END = float(norm.isf(2.0**-64))  # the furthest draw of a sampler that inverts 64 bits: 9.08
UNLIKELY = 1e-5  # of a test that a sound release fails
FAILED, SUCCEEDED, TOO_WEAK = "failed", "SUCCEEDED", "too weak to tell"


class Finding(NamedTuple):
    """One row of the table."""

    attack: str
    what: str
    before: str
    now: str
    bound: str
    verdict: str  # of the attack: FAILED, or something worse
    details: dict[str, Any]


def verdict(fine: bool, able: bool = True) -> str:
    """`able`: the attack found what it looks for where it is known to be."""
    return SUCCEEDED if not fine else FAILED if able else TOO_WEAK


@contextlib.contextmanager
def compiled(on: bool) -> Iterator[None]:
    """With the compiled kernel, or without."""
    before = os.environ.get("SORDINO_KERNEL")
    os.environ["SORDINO_KERNEL"] = "1" if on else "0"
    try:
        yield
    finally:
        os.environ.pop("SORDINO_KERNEL") if before is None else os.environ.update(SORDINO_KERNEL=before)


def command(*arguments: str | Path) -> tuple[int, str]:
    """`sordino ...`: its exit status, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = sordino([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, printed.getvalue()


def listed(numbers: dict[Any, float], form: str = ".3g") -> str:
    return ", ".join(f"{name}: {value:{form}}" for name, value in numbers.items())


# ------------------------------------------------------------------------------------------------------ arithmetic


def drift(quick: bool) -> Iterator[Finding]:
    """A record lifts a float32 accumulator over a power of two, and all later records are rounded otherwise."""
    rows = (10_000,) if quick else ROWS
    worst: dict[str, float] = {}
    reached = []
    for on in (True, False):
        with compiled(on):
            for result in sums(rows=rows):
                worst[result.query] = max(worst.get(result.query, 0.0), result.reached)
                reached.append(result._asdict() | {"kernel": on})
    mutant: dict[str, float] = {}
    for result in sums(OneAccumulator, rows=rows[:2]):
        mutant[result.query] = max(mutant.get(result.query, 0.0), result.reached)
    yield Finding(
        "drift",
        f"one of {rows[0]:,} to {rows[-1]:,} float32 records moves a sum; kernel on and off",
        "132 × the sensitivity (logistic, 100,000), 40 (softmax, 1,000,000), 1.6 (Gram)",
        f"{max(worst.values()):.5f} at most; the same pairs move one float32 accumulator by {listed(mutant)}",
        "1",
        verdict(max(worst.values()) <= 1, able=min(mutant.values()) > 1),
        {"reached": reached, "one_accumulator": mutant},
    )


class Drifting(Linear):
    """Mutant: its sum of clipped gradients is kept in one float32 accumulator."""

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        plain = Linear(self.features, self.outputs, self.kind)
        total: Tensor = OneAccumulator(plain).clipped_sum(theta, Shard(*shard[:3]), clip)
        return total.double()


def lower_bound(quick: bool) -> Iterator[Finding]:
    """The pair of `drift` against the shipped engine with secret noise: how much epsilon is there, at least?"""
    rows, repeats = 100_000, 100 if quick else 2_000
    plain, mutant = Linear(1, 1, Loss.LOGISTIC), Drifting(1, 1, Loss.LOGISTIC)
    plan = Plan(build("dp-fedgd", lr=1.0), 1, (rows,), Privacy(1.0, 1e-5))
    noiseless = replace(plan, privacy=Privacy(math.inf))
    here = pair(rows, 1 - SAFETY, 0.5, False, 1, "cpu")
    there = dict(neighbours(here, 0))[Adjacency.REPLACE_ONE]
    neighbouring = [Records.of(shard.x, shard.y, np.zeros(rows, int)) for shard in (there, here)]

    def release(model: Linear, records: Records, plan: Plan, source: Source) -> float:
        (only,) = simulate.run(plan, model, records, source)
        return -rows * float(only.model[0])

    def bounds(model: Linear, repeats: int) -> tuple[float, float]:
        """By thresholds alone, and under Gaussian DP; the threshold is halfway between the sums."""
        middle = sum(release(model, records, noiseless, Noiseless()) for records in neighbouring) / 2
        scores = [
            [release(model, records, plan, Secure()) - middle for _ in range(repeats)] for records in neighbouring
        ]
        at = {"delta": 1e-5, "confidence": 0.99, "threshold": 0.0}
        return statistics.by_thresholds(*scores, **at).epsilon, statistics.by_gaussian(*scores, **at).epsilon

    certified, tries = spending.epsilon(plan), []
    while len(tries) < audits.MAX_TRIES and (not tries or max(tries[-1]) > certified):  # one in a hundred is chance
        tries.append(bounds(plain, repeats))
    best, wrong = min(tries, key=max), bounds(mutant, 60)
    yield Finding(
        "lower-bound",
        f"ε from below: dp-fedgd, one round, {rows:,} float32 records, secret noise, {repeats} runs per world",
        "ε ≥ 6.0 by thresholds, 44 under Gaussian DP",
        f"ε ≥ {best[0]:.3f} by thresholds, {best[1]:.3f} under Gaussian DP; "
        f"with one float32 accumulator {wrong[0]:.2f} and {wrong[1]:.1f}",
        f"{certified:.4g} (certified)",
        verdict(max(best) <= certified, able=max(wrong) > certified),
        {"runs": repeats, "tries": tries, "mutant": wrong},
    )


CLIPS: tuple[tuple[float, tuple[float, float] | None], ...] = (
    (1.0, None),
    (1e-3, None),
    (1e-5, None),
    (1e-7, None),
    (1.0, (1.0, 1e5)),
    (1.0, (1.0, 1e7)),
)
FEATURES = 64
VICTIMS = {"sure": 1.0, "zero": 0.0, "long": 1e6, "longest": math.inf}  # times the record that stands there


def toggled(model: Linear, clip: float, seed: int, records: int = 300) -> float:
    """How many clips a record moves the sum of a Poisson minibatch, in its slot or absent, the others where they are.

    All others are sure: each logit lies at the edge where the residual of its record rounds to 0, so that the last bit
    decides between nothing and, with a small clip or a large weight, a whole clip.
    """
    chance = np.random.default_rng(seed)
    theta = torch.from_numpy(np.abs(chance.normal(size=model.size)) * 0.1).float()
    method, privacy = build("dp-fedgd", clip=clip), Privacy(1.0, 1e-5, adjacency=Adjacency.ADD_REMOVE)
    plan = Plan(method, 1, (records,), privacy, sampling=Sampling.parse("poisson:0.3"))
    where = assign_slots(Seeded(seed), Address(0, 0, SAMPLING, 0), next(round_plans(plan, model)), records)
    rows = Records.of(np.abs(chance.normal(size=(records, FEATURES))), np.ones(records, int), np.zeros(records, int))
    x, y, mask = (part[0] for part in rows.picked(np.zeros(1, int), [where])[:3])
    x = at_the_edge(model, theta, x)
    slot = int(chance.choice(np.flatnonzero(where >= 0)))
    without_x, without_mask = x.clone(), mask.clone()
    without_x[slot], without_mask[slot] = 0, 0
    without = model.clipped_sum(theta, Shard(without_x, y, without_mask), clip)
    moved, victim = [], x[slot].clone()
    for length in VICTIMS.values():
        x[slot] = 3e38 if math.isinf(length) else length * victim
        moved.append(float((model.clipped_sum(theta, Shard(x, y, mask), clip) - without).norm()) / clip)
    return max(moved) if np.isfinite(moved).all() else math.inf


def at_the_edge(model: Linear, theta: Tensor, x: Tensor) -> Tensor:
    """Records scaled to the least length at which their residual is 0, in a batch of this shape; zeros stay."""
    y = torch.ones(len(x), dtype=torch.long)
    logit = model.logits(theta, x)[:, 0]
    x = x * (120 / logit.abs().clamp_min(1)).unsqueeze(-1)
    each = Linear(FEATURES, 1, Loss.LOGISTIC)
    low, high = torch.zeros(len(x)), torch.ones(len(x))
    for _ in range(40):
        middle = (low + high) / 2
        rows = x * middle.unsqueeze(-1)
        if os.environ.get("SORDINO_KERNEL") == "0":
            zero = model.logits(theta, rows)[:, 0].sigmoid() == 1
        else:  # a record's term is the same in every batch
            one = Shard(rows.unsqueeze(1), y.unsqueeze(1), torch.ones(len(x), 1))
            zero = (each.clipped_sum(theta, one, 1.0) == 0).all(-1)
        low, high = torch.where(zero, low, middle), torch.where(zero, middle, high)
    return x * high.unsqueeze(-1)


def one_more_row(model: Linear, clip: float, seed: int) -> float:
    """The old attack: the batch has as many rows as records were drawn, and one more joins. In clips."""
    chance = np.random.default_rng(seed)
    theta = torch.from_numpy(np.abs(chance.normal(size=model.size)) * 0.1).float()
    rows = int(chance.integers(2, 200))
    x = at_the_edge(model, theta, torch.from_numpy(np.abs(chance.normal(size=(rows, FEATURES)))).float())
    x = torch.cat([x, torch.zeros(1, FEATURES)])
    y, mask = torch.ones(rows + 1, dtype=torch.long), torch.ones(rows + 1)
    more, less = (model.clipped_sum(theta, Shard(x[:n], y[:n], mask[:n]), clip) for n in (rows + 1, rows))
    return float((more - less).norm()) / clip


def minibatch(quick: bool) -> Iterator[Finding]:
    """Records that join a minibatch change how the others are rounded."""
    tries = 3 if quick else 30
    moved: dict[str, float] = {}
    by_shape: dict[str, float] = {}
    details = []
    for on in (True, False):
        kernel = f"kernel {'on' if on else 'off'}"
        with compiled(on):
            for clip, weights in CLIPS:
                heavy = None if weights is None else torch.tensor(weights)
                model = Linear(FEATURES, 1, Loss.LOGISTIC, class_weights=heavy)
                fixed = max(toggled(model, clip, seed) for seed in range(tries))
                grown = max(one_more_row(model, clip, seed) for seed in range(tries))
                moved[kernel], by_shape[kernel] = max(moved.get(kernel, 0), fixed), max(by_shape.get(kernel, 0), grown)
                details.append({"clip": clip, "weights": weights, "kernel": on, "slot": fixed, "one_more_row": grown})
    yield Finding(
        "minibatch",
        "a record joins a Poisson minibatch of sure records, float32; clips 1e-7 to 1, class weights up to 1e7",
        "2.9 clips (one row more)",
        f"{listed(moved, '.5f')}. A batch of one row more, which no engine makes: {listed(by_shape, '.3f')}",
        "1 clip",
        verdict(max(moved.values()) <= 1 and by_shape["kernel on"] <= 1),
        {"samples": details},
    )


WEIGHTS = (1e20, 1.0, 1e10, 1e38, 1e18, 1e30, 1e200, 1e155)
LENGTHS = (0.0, 1e-42, 1e-30, 1e-15, 1.0, 1e15, 1e30, 3e38)


def zero_record(quick: bool) -> Iterator[Finding]:
    """A record of zeros, without a bias: its gradient is 0, and an overflow beside it made the sum NaN. The class:
    records of any length with class weights (or labels) of any size, in every kind of sum."""
    worst, wrong, cases = 0.0, [], 0
    for on, dtype, kind, bias in itertools.product((True, False), (torch.float32, torch.float64), Loss, (False, True)):
        for weight, length in itertools.product(WEIGHTS[:: 1 + 2 * quick], LENGTHS[:: 1 + 2 * quick]):
            with compiled(on):
                for name, moved in moved_by_third(kind, dtype, bias, weight, length).items():
                    cases, worst = cases + 1, max(worst, moved)
                    if not moved <= 1 or (moved and not length and not bias):
                        wrong.append((name, str(kind), str(dtype)[6:], f"kernel {on}", weight, length, moved))
    yield Finding(
        "zero-record",
        "a record of zeros, or of any length up to 3e38, with class weights or labels up to 1e200; every loss and sum",
        "NaN: the whole release is lost (softmax, weight 1e20, no bias)",
        f"{len(wrong)} of {cases} cases are not finite or move a sum by more than a clip"
        + (f", e.g. {', '.join(map(str, wrong[0]))}" if wrong else f"; {worst:.5f} clips at most"),
        "0 cases; 1 clip",
        verdict(not wrong),
        {"cases": cases, "wrong": wrong, "samples": {"weights": WEIGHTS, "lengths": LENGTHS}},
    )


def moved_by_third(
    kind: Loss, dtype: torch.dtype, bias: bool, weight: float, length: float, model: type[Linear] = Linear
) -> dict[str, float]:
    """How many clips the third of five records moves each sum; infinite where a sum is not finite."""
    outputs, classes = 2 if kind is Loss.SOFTMAX else 1, kind in (Loss.SOFTMAX, Loss.LOGISTIC)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.tensor([0, 1, 0, 1, 0])
    linear = model(3, outputs, kind, bias=bias)
    if classes:
        linear = replace(linear, class_weights=torch.tensor([weight, weight], dtype=torch.float64))
    else:
        y = y.to(dtype)
        y[2] = min(weight, torch.finfo(dtype).max)
    x[2] = length / math.sqrt(3)
    theta, scale = torch.zeros(linear.size, dtype=dtype), torch.ones(linear.size, dtype=dtype)
    mask = torch.ones(5, dtype=dtype)
    absent = mask.clone()
    absent[2] = 0
    here, there = Shard(x, y, mask), Shard(x, y, absent)
    totals: dict[str, Callable[[Shard], Tensor]] = {
        "gradient": lambda shard: linear.clipped_sum(theta, shard, 1.0),
        "scaled gradient": lambda shard: linear.clipped_sum(theta, shard, 1.0, scale),
        "gram": lambda shard: linear.gram_sum(shard, 1.0),
        "curvature": lambda shard: linear.curvature_sum(theta, shard, 1.0),
        "curvature times a unit vector": lambda shard: linear.curvature_times(theta, shard, 1.0, scale / scale.norm()),
        "fisher": lambda shard: linear.fisher_sum(theta, shard, 1.0),
    }
    moved = {name: float((total(here) - total(there)).norm()) for name, total in totals.items()}
    return {name: value if math.isfinite(value) else math.inf for name, value in moved.items()}


def terms(quick: bool) -> Iterator[Finding]:
    """Records, labels, class weights and clips of every size that float32 and float64 have: is any term of a sum longer
    than the clip? A length or a product below the normal range has few digits, or one."""
    rows, tries = 2_000, 40 if quick else 400
    worst: dict[str, tuple[float, dict[str, Any]]] = {}
    chance = np.random.default_rng(11)
    for number in range(tries):
        for dtype, on, bias in itertools.product((torch.float32, torch.float64), (True, False), (False, True)):
            kind = list(Loss)[number % len(Loss)]
            with compiled(on):
                for name, (length, record) in longest_terms(kind, dtype, bias, rows, chance).items():
                    label = f"{name}, {str(dtype)[6:]}, {'bias' if bias else 'no bias'}"
                    if length > worst.get(label, (0.0,))[0]:
                        worst[label] = length, record | {"loss": str(kind), "kernel": on}
    wrong = {label: length for label, (length, _) in worst.items() if length > 1}
    yield Finding(
        "terms",
        f"the longest term of {tries * 8 * rows:,} single records of any size, in clips; every loss and sum",
        "not tried",
        f"{listed(wrong, '.4f')}" if wrong else f"{max(length for length, _ in worst.values()):.5f} at most",
        "1 clip",
        verdict(not wrong),
        {"samples": worst},
    )


def longest_terms(
    kind: Loss, dtype: torch.dtype, bias: bool, rows: int, chance: np.random.Generator
) -> dict[str, tuple[float, dict[str, Any]]]:
    """By sum: the longest term, in clips, and the record that it belongs to. Each record is a client of its own."""
    features, outputs = int(chance.integers(1, 4)), 3 if kind is Loss.SOFTMAX else 1
    weight, clip = 10.0 ** chance.uniform(-38, 38), 10.0 ** chance.uniform(-11, 6)
    model = Linear(features, outputs, kind, bias=bias)
    x = chance.normal(size=(rows, 1, features)) * 10.0 ** chance.uniform(-45, 38.4, size=(rows, 1, 1))
    theta = chance.normal(size=model.size) * 10.0 ** chance.uniform(-20, 20) * (chance.random() < 0.7)
    if kind in (Loss.SOFTMAX, Loss.LOGISTIC):
        labels = torch.from_numpy(chance.integers(0, max(2, outputs), (rows, 1)))
        model = replace(model, class_weights=torch.full((max(2, outputs),), weight))
    else:
        labels = torch.from_numpy(chance.normal(size=(rows, 1)) * 10.0 ** chance.uniform(-45, 38, size=(rows, 1)))
        labels = labels.to(dtype)
    shard = Shard(torch.from_numpy(x).to(dtype), labels, torch.ones(rows, 1, dtype=dtype))
    at, scale = torch.from_numpy(theta).to(dtype), torch.from_numpy(chance.normal(size=model.size)).to(dtype)
    totals = {
        "gradient": model.clipped_sum(at, shard, clip),
        "scaled gradient": model.clipped_sum(at, shard, clip, scale),
        "gram": model.gram_sum(shard, clip),
        "curvature": model.curvature_sum(at, shard, clip),
        "fisher": model.fisher_sum(at, shard, clip),
    }
    longest = {}
    for name, total in totals.items():
        lengths = (total.flatten(1).norm(dim=-1) / clip).nan_to_num(math.inf, math.inf)
        k = int(lengths.argmax())
        record = {"x": shard.x[k, 0].tolist(), "y": float(labels[k, 0]), "clip": clip, "class_weight": weight}
        longest[name] = float(lengths[k]), record
    return longest


# ----------------------------------------------------------------------------------------------------------- noise


class Deep(Secure):
    """A secret source, given that every draw lies beyond 9.08 standard deviations, on the negative side: the first 64
    bits of each are as they are once in 2^64 draws, and all further bits are its own."""

    MARK = bytes(32)

    def __init__(self, key: bytes | None = None) -> None:
        super().__init__(key)
        self._normal_key = self.MARK

    def fresh(self) -> Deep:
        return Deep()


@contextlib.contextmanager
def extreme_first_words() -> Iterator[None]:
    """The keystream of `Deep.MARK` is all ones."""
    chacha20 = random._chacha20

    class Ones:
        def update_into(self, data: Any, out: Any) -> None:
            np.frombuffer(out, dtype=np.uint8)[:] = 255

    def patched() -> Callable[..., Any]:
        begin = chacha20()
        return lambda key, *rest: Ones() if key == Deep.MARK else begin(key, *rest)

    random._chacha20 = patched
    try:
        yield
    finally:
        random._chacha20 = chacha20


def tail(quick: bool) -> Iterator[Finding]:
    """Noise that ends at 9.08 standard deviations: what world D releases beyond is impossible in world D'."""
    model, repeats = Linear(1, 1, Loss.SQUARES, bias=False), 60 if quick else 2_000
    one = torch.ones(1, 1, dtype=torch.float64)
    for epsilon in (40.0, 100.0):
        plan = Plan(build("dp-fedgd"), 1, (1,), Privacy(epsilon, 1e-5))
        std, far = calibration.aggregate_std(plan, 0), 1 - SAFETY
        worlds = [Records.of(one, one[0] * label, np.zeros(1, int), dtype=torch.float64) for label in (-1e6, 1e6)]

        def releases(records: Records, kind: type[Secure], engine: Any, plan: Plan = plan) -> np.ndarray:
            released = [next(iter(engine.run(plan, model, records, kind()))).aggregate[0] for _ in range(repeats)]
            return np.array([float(number) for number in released])

        # Gradients: +far in D', -far in D. S: what the truncated noise never brought about in D'.
        edge = far - END * std
        other, this = (
            np.concatenate([releases(r, Secure, engine) for engine in (reference, simulate)]) for r in worlds
        )
        seen = float((this < edge).mean())
        with extreme_first_words():  # D', given its draw is one of those that come once in 2^64 and were cut off
            rare = np.concatenate([releases(worlds[0], Deep, engine) for engine in (reference, simulate)])
        there = bool((rare <= edge + std * 2.0**-14).all())
        shape = float(kstest(norm.sf((far - rare) / std) * 2.0**64, "uniform").pvalue)
        allowed = min(1.0, math.exp(epsilon) * float(norm.sf(END)) + 1e-5)
        lower = statistics.by_gaussian(-other, -this, delta=1e-5, confidence=1 - UNLIKELY, threshold=0.0).epsilon
        count = statistics.upper(np.array([(this >= edge).sum()]), len(this), UNLIKELY)  # of the complement
        least = 1 - float(count[0])
        yield Finding(
            "tail",
            f"ε = {epsilon:g}, one release: outputs of D beyond 9.08 σ of D', {2 * repeats} runs per world",
            {40.0: "0.0010 of D, never of D' (1e-5 allowed)", 100.0: "0.93 of D, never of D' (1e-5 allowed)"}[epsilon],
            f"{seen:.4f} of D; of D' with probability 2⁻⁶⁴, and all {len(rare)} such draws lie there "
            f"(law of the tail: p = {shape:.2g}); ε ≥ {lower:.1f} by the best test",
            f"e^ε 2⁻⁶⁴ + δ = {allowed:.3g}; ε = {spending.epsilon(plan):.4g}",
            verdict(there and shape > UNLIKELY and least <= allowed and lower <= spending.epsilon(plan)),
            {"runs": 2 * repeats, "seen": seen, "p": shape, "furthest": float((far - rare).max() / std)},
        )


def cohort(quick: bool) -> Iterator[Finding]:
    """Low bits of a release under amplified trusted-server tell how many clients came."""
    clients, rate, repeats = 7, 0.3, 100 if quick else 1_000
    model, chance = Linear(20, 5), np.random.default_rng(0)
    x, y = chance.normal(size=(4 * clients, 20)), chance.integers(0, 5, 4 * clients)
    who, privacy = Participation("poisson", rate), Privacy(1.0, 1e-5, Unit.CLIENT, Adjacency.ADD_REMOVE)
    privacy = replace(privacy, trust=Trust.TRUSTED_SERVER)
    p_values: dict[str, float] = {}
    off, details = 0, {}
    for name in ("dp-fedgd", "dp-fedavg"):
        method = build(name, Unit.CLIENT, lr=1.0)
        plan = Plan(method, repeats, (4,) * clients, privacy, who, schedule_seed=2**100 + 7)
        assert plan.amplified
        grid = float(grid_of(calibration.aggregate_std(plan, 0)))
        for engine in (reference, simulate):
            for dtype in (torch.float32, torch.float64):
                records = Records.of(x, y, np.repeat(np.arange(clients), 4), dtype=dtype)
                rounds = list(engine.run(plan, model, records, Secure()))
                cohorts = [len(each.cohort) for each in rounds]
                released = [each.aggregate.double().numpy() for each in rounds]
                label = f"{name}, {engine.__name__.rpartition('.')[2]}, {str(dtype)[6:]}"
                away, p_values[label] = low_bits(released, cohorts, grid)
                off += away
                details[label] = {"cohorts": np.bincount(cohorts).tolist(), "off_the_grid": away, "p": p_values[label]}
    yield Finding(
        "cohort",
        f"Poisson participation, client level: {repeats} rounds per engine and type, cohorts of 0 to {clients}",
        "one client: every number on the grid; two: 0.64 of them; four: 0.50 (reference engine)",
        f"{off} numbers off the public grid; low bits do not depend on the size of the cohort: "
        f"p ≥ {min(p_values.values()):.2g}",
        f"0; p ≥ {UNLIKELY:g}",
        verdict(off == 0 and min(p_values.values()) > UNLIKELY),
        {"runs": details},
    )


def low_bits(released: list[np.ndarray], cohorts: list[int], grid: float) -> tuple[int, float]:
    """How many numbers lie off the grid, and how likely low bits so different between sizes of cohorts are by chance.

    The statistic: of each number in units of the grid, its last three bits, and, where it is off, that it is.
    """
    table: dict[int, np.ndarray] = {}
    off = 0
    for numbers, size in zip(released, cohorts, strict=True):
        points = numbers / grid
        on = points == np.round(points)
        off += int((~on).sum())
        bits = np.where(on, np.mod(np.round(points), 8), 8).astype(int)
        group = min(size, 4)  # enough of each
        table[group] = table.get(group, np.zeros(9)) + np.bincount(bits, minlength=9)
    counts = np.stack(list(table.values()))
    return off, float(chi2_contingency(counts[:, counts.sum(0) > 0]).pvalue)


# ----------------------------------------------------------------------------------------------------------- files


def private_table(folder: Path, name: str, last: int, extreme: bool = False) -> Path:
    """A file of records that nobody may see; worlds differ in one label, or in one extreme record."""
    chance = np.random.default_rng(5)
    x, y = chance.normal(size=(240, 3)).astype(np.float32), chance.integers(0, 2, 240)
    y[-1] = last
    if extreme:
        x[-1] = 3e38
    path = folder / name / "records.npz"
    path.parent.mkdir()
    np.savez(path, x_train=x, y_train=y, x_test=chance.normal(size=(40, 3)), y_test=np.arange(40) % 2)
    return path


def head(quick: bool) -> Iterator[Finding]:
    """The attacker has public/ and knows all records but one label, and even the ledger's exact time stamps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        worlds = [private_table(folder, name, last) for last, name in enumerate("ab")]
        out = folder / "run"
        flags = ["--method", "dp-fedgd", "--epsilon", "1", "--rounds", "3", "--clients", "4", "--out", out]
        status, printed_text = command("run", "--data", worlds[1], *flags)
        assert status == 0, printed_text
        spec = Spec.read(out / "public" / "spec.toml")
        jobs = [runs.prepare(spec, resolve(replace(spec, data=str(world))).read_data()) for world in worlds]
        place = RunFolder.find(out)
        cert = json.loads((place.public / "certificate.json").read_text())
        with Ledger(place.private / "ledger.db") as ledger:
            rows = list(ledger.rows())
        matches = [(w, name) for w, job in enumerate(jobs) for name, who in identities(job, cert).items()
                   if chained(rows, who) == cert["ledger"]["head"]]  # fmt: skip
        public = b"".join(path.read_bytes() for path in place.public.rglob("*") if path.is_file())
        printed = [(w, name) for w, job in enumerate(jobs) for name, who in identities(job, cert).items()
                   if who.encode() in public or bytes.fromhex(who) in public]  # fmt: skip
        key = place.keys().identity
        with_key = [chained(rows, job.identity(key)) == cert["ledger"]["head"] for job in jobs]
        guesses = len(identities(jobs[0], cert))
    yield Finding(
        "ledger-head",
        "confirm a guess of one label by certificate.json, knowing all other records and the ledger's time stamps",
        "recovered in 10 to 32 s, without the time stamps",
        f"{len(matches)} of {2 * guesses} guesses match, {len(printed)} hashes are in public files; "
        f"with private/run.key the right world matches: {with_key}",
        "0",
        verdict(not matches and not printed, able=with_key == [False, True]),
        {"samples": {"matches": matches, "printed": printed, "with_the_key": with_key}},
    )


def identities(job: runs.PreparedRun, cert: dict[str, Any]) -> dict[str, str]:
    """Hashes of the data that somebody without the key can compute: plain ones, and keyed by what is public."""
    digest = job._digest
    parts = [part.contiguous().cpu().numpy().tobytes() for part in (job.records.x, job.records.y)]
    keys = {
        "no key": b"",
        "zeros": bytes(32),
        "the public key": bytes.fromhex(cert["signature"]["key"]),
        "the spec": bytes.fromhex(cert["spec_sha256"]),
        "the model": bytes.fromhex(cert["model_sha256"]),
    }
    hashes = {f"keyed by {name}": job.identity(key) for name, key in keys.items()}
    hashes |= {"digest": digest.hex(), "sha256 of it": hashlib.sha256(digest).hexdigest()}
    hashes |= {"sha256 of the records": hashlib.sha256(b"".join(parts)).hexdigest()}
    return hashes | {"sha256 of the labels": hashlib.sha256(parts[1]).hexdigest()}


def chained(rows: list[Any], who: str) -> str:
    """The head of the ledger, if this were the identity of the data."""
    previous = GENESIS
    for row in rows:
        key = _label(who, row.who, row.round) if row.key else ""
        previous = _chained(row._replace(plan=who, key=key, previous=previous))
    return previous


def timing(quick: bool) -> Iterator[Finding]:
    """How long a run took tells of one extreme record."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds_shown, stamps, fields = [], [], []
        for name, extreme in (("plain", False), ("extreme", True)):
            data, out = private_table(folder, name, 0, extreme), folder / name / "run"
            flags = ["--method", "dp-fedgd", "--epsilon", "1", "--rounds", "3", "--clients", "4"]
            status, printed = command("run", "--data", data, *flags, "--out", out)
            assert status == 0, printed
            public = [path for path in (out / "public").rglob("*") if path.is_file()]
            stamps.append(len({path.stat().st_mtime_ns for path in (*public, out / "public")}))
            lines = (out / "public" / "metrics.jsonl").read_text().splitlines()
            fields.append(sorted({key for line in lines for key in json.loads(line)}))
            text = "".join(path.read_text(errors="replace") for path in public if path.suffix != ".png")
            seconds_shown.append("seconds" in text or " s\n" in printed)
    yield Finding(
        "timing-files",
        "seconds and time stamps in public files and on the console, with and without a record of 3e38",
        "`seconds` in every line of metrics.jsonl",
        f"seconds shown: {any(seconds_shown)}; time stamps of public files: {max(stamps)}; "
        f"fields: {', '.join(fields[0])}",
        "no seconds; one time stamp; the same fields",
        verdict(not any(seconds_shown) and max(stamps) == 1 and fields[0] == fields[1]),
        {"samples": {"stamps": stamps, "fields": fields}},
    )


def timing_rounds(quick: bool) -> Iterator[Finding]:
    """Private as they are, times of rounds should not tell of one extreme record either."""
    rounds, rows = 30 if quick else 300, 20_000
    auc: dict[str, float] = {}
    details = {}
    for on, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.float64)):
        label = f"{str(dtype)[6:]}, kernel {'on' if on else 'off'}" if dtype == torch.float32 else "float64"
        with compiled(on):
            took = round_times(rounds, rows, dtype)
        a, b = took
        auc[label] = float((b[:, None] > a[None]).mean() + (b[:, None] == a[None]).mean() / 2)
        details[label] = {"median_milliseconds": [1e3 * float(np.median(w)) for w in took], "auc": auc[label]}
    yield Finding(
        "timing-rounds",
        f"times of {rounds} rounds each, with and without a record of 3e38, {rows:,} records, interleaved",
        "AUC 0.80 of a run's seconds",
        f"AUC {listed(auc)}; medians (ms) "
        + "; ".join("{:.2f} and {:.2f}".format(*each["median_milliseconds"]) for each in details.values()),
        "0.5 ± 0.1",
        verdict(quick or all(abs(value - 0.5) <= 0.1 for value in auc.values())),
        {"samples": details},
    )


def round_times(rounds: int, rows: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of single rounds without and with the record; which world goes first changes by chance."""
    chance = np.random.default_rng(3)
    x, y = chance.normal(size=(rows, 64)).astype(np.float32), chance.integers(0, 10, rows)
    other = x.copy()
    other[rows // 2] = 3e38
    warm = 5
    plan = Plan(build("dp-fedgd", lr=0.1), rounds + warm, (rows // 20,) * 20, Privacy(1.0, 1e-5))
    client = np.repeat(np.arange(20), rows // 20)
    worlds = [
        simulate.run(plan, Linear(64, 10), Records.of(data, y, client, dtype=dtype), Secure()) for data in (x, other)
    ]
    took = np.zeros((2, rounds + warm))
    for t in range(rounds + warm):
        for world in chance.permutation(2):
            began = time.perf_counter()
            next(worlds[world])
            took[world, t] = time.perf_counter() - began
    return took[0, warm:], took[1, warm:]


# ---------------------------------------------------------------------------------------------------- certificates


def forgeries(quick: bool) -> Iterator[Finding]:
    """Run directories changed after the fact (tests/training/test_forgeries.py has the forgers)."""
    sys.path.insert(0, str(ROOT / "tests" / "training"))
    import test_forgeries as forgers

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        honest: dict[str, Path] = {}
        for name, spec in forgers.RUNS.items():
            honest[name] = folder / name
            settings = [text for key, value in spec.items() for text in ("--set", f"{key}={_toml(value)}")]
            status, printed = command(
                "run", "--set", "epsilon=1.0", "--set", "rounds=5", *settings, "--out", honest[name]
            )
            assert status == 0, printed
            assert not verify_run(honest[name]).problems, "an honest run passes"

        def forge(base: str, change: Callable[..., None], how: str) -> Path:
            out = folder / "forged"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(honest[base], out)
            path = out / "public" / "certificate.json"
            cert = json.loads(path.read_text())
            change(cert, out)
            if how != "kept":
                del cert["signature"]
            path.write_text(json.dumps(signed(cert, forgers.FORGER) if how == "replaced" else cert, indent=2))
            return out

        def swapped(cert: dict[str, Any], out: Path) -> None:
            shutil.copy(honest["seeded"] / "public" / "model.safetensors", out / "public" / "model.safetensors")

        def bare(cert: dict[str, Any], out: Path) -> None:
            forgers.relabelled(cert, out)
            (out / "private" / "ledger.db").unlink()
            (out / "public" / "spec.toml").unlink()

        forged = {f"{change.__name__} ({base})": (base, change) for base, change, _ in forgers.CAUGHT}
        forged |= {"swapped model (plain)": ("plain", swapped)}
        table, accepted = {}, []
        for name, (base, change) in forged.items():
            reported = {
                how: bool(verify_run(forge(base, change, how)).problems) for how in ("kept", "stripped", "replaced")
            }
            table[name] = "reported, whatever the signature" if all(reported.values()) else f"accepted: {reported}"
            accepted += [name] * (not all(reported.values()))
        np.savez(folder / "new.npz", x=np.zeros((2, 64), np.float32))
        try:
            predict(forge("plain", swapped, "stripped"), str(folder / "new.npz"))
            accepted.append("predict with a swapped model")
        except SordinoError:
            table["predict with a swapped model"] = "refused"
        alone = [(f"{change.__name__} ({base})", base, change) for base, change in forgers.CONSISTENT]
        for name, base, change in [*alone, ("no spec, no ledger (seeded)", "seeded", bare)]:
            key = RunFolder.find(honest[base]).keys().sign.public
            kept = verify_run(forge(base, change, "kept")).problems
            stripped = verify_run(forge(base, change, "stripped"))
            by_key = command("verify", forge(base, change, "stripped"), "--key", key)[0]
            by_key_replaced = command("verify", forge(base, change, "replaced"), "--key", key)[0]
            fine = bool(kept) and NOT_SIGNED in stripped.gaps and by_key == by_key_replaced == 1
            table[name] = "only the signature shows it: reported if kept or with --key, 'not signed' if removed"
            accepted += [name] * (not fine)
        for name in accepted:
            table[name] = "accepted"
    yield Finding(
        "forgeries",
        f"{len(table)} forgeries, each with the signature kept, removed and replaced",
        "6 kinds pass `verify`: seeded called secret, unproved called proved, small schedule seed, swapped model, "
        "erased assumptions, ten times the noise",
        f"{len(accepted)} accepted; {sum('only' in text for text in table.values())} are visible only by the "
        "signature, and `verify --key` refuses them",
        "0",
        verdict(not accepted),
        {"samples": table},
    )


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def checkpoint(quick: bool) -> Iterator[Finding]:
    """`rm checkpoint.npz; run --resume` trained a second model on one charge."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        status, printed = command("run", "--method", "dp-fedgd", "--rounds", "3", "--out", out)
        assert status == 0, printed
        model = (out / "public" / "model.safetensors").read_bytes()
        answers = []
        for gone in (("private/checkpoint.npz",), ("public/model.safetensors", "public/metrics.jsonl")):
            for name in gone:
                (out / name).unlink()
            answers.append(command("run", "--resume", out))
        again = (out / "public" / "model.safetensors").exists()
    refused = all(
        status != 0 and "second model on one charge" in " ".join(printed.split()) for status, printed in answers
    )
    yield Finding(
        "checkpoint",
        "rm private/checkpoint.npz (then model and metrics too); run --resume",
        "a second model on one row of the ledger",
        f"exit status {' and '.join(str(status) for status, _ in answers)}: {'refused' if refused else 'NOT refused'}",
        "refused",
        verdict(refused and not again),
        {"runs": [status for status, _ in answers], "model_bytes": len(model)},
    )


def fednew(quick: bool) -> Iterator[Finding]:
    """A canary in hostile company against DP-FedNew's lemma."""
    repeats = 200 if quick else 10_000
    for adjacency in (Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE):
        audit = audits.audit("dp-fednew", Privacy(1.0, 1e-5, adjacency=adjacency), runs=repeats)
        yield Finding(
            "fednew",
            f"audit of DP-FedNew, {adjacency}, {repeats} runs per world (canary: {audit.canary})",
            "reach 0.60; a stronger canary 0.99",
            f"reach {audit.reach:.3f}; ε ≥ {audit.lower_thresholds:.3f} by thresholds, {audit.lower_gaussian:.3f} "
            "under Gaussian DP",
            f"reach ≥ 0.9; ε = {audit.certified:.4g} (certified)",
            verdict(not audit.broken, able=audit.reach >= 0.9),
            {"runs": repeats, **audit._asdict()},
        )


ATTACKS: dict[str, Callable[[bool], Iterator[Finding]]] = {
    "drift": drift,
    "lower-bound": lower_bound,
    "minibatch": minibatch,
    "zero-record": zero_record,
    "terms": terms,
    "tail": tail,
    "cohort": cohort,
    "ledger-head": head,
    "timing-files": timing,
    "timing-rounds": timing_rounds,
    "forgeries": forgeries,
    "checkpoint": checkpoint,
    "fednew": fednew,
}

HEAD = """# Attacks that once worked

`python benchmarks/attacks.py`: attacks that learned more than a certificate allows on the code of 2026-11-15, repeated
on the present code. *Before* is the result at that time. Each attack should end as *failed*. `benchmarks/attacks.py`
describes every attack; `results/attacks.json` holds all figures.

| attack | what is tried | before | now | bound | attack |
|---|---|---|---|---|---|
"""


def page(findings: list[Finding], origin: dict[str, Any]) -> str:
    rows = [
        f"| {each.attack} | {each.what} | {each.before} | {each.now} | {each.bound} | "
        f"{each.verdict if each.verdict == FAILED else f'**{each.verdict}**'} |\n"
        for each in findings
    ]
    where = f"\nMeasured at commit `{origin['commit'][:12]}` on {origin['machine']} ({origin['cpu']})"
    return HEAD + "".join(rows) + where + f", {origin['seconds'] / 60:.1f} minutes.\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME",
                        help=", ".join(ATTACKS))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes; times of rounds are not judged")
    parser.add_argument("--out", type=Path, help="where to write (default: results/attacks.json if all are run)")
    options = parser.parse_args(argv)
    began, findings = time.perf_counter(), list[Finding]()
    for name in options.only:
        for finding in ATTACKS[name](options.quick):
            findings.append(finding)
            print(
                f"{finding.verdict:9} {name}: {finding.now} (bound: {finding.bound})",
                flush=True,
            )
        print(f"          {time.perf_counter() - began:.0f} s", flush=True)
    whole = options.only == list(ATTACKS) and not options.quick
    if out := options.out or (ROOT / "results" / "attacks.json" if whole else None):
        line = "python benchmarks/attacks.py" + " --quick" * options.quick
        origin = provenance(line) | machine() | {"seconds": round(time.perf_counter() - began, 1)}
        out.write_text(json.dumps({"provenance": origin, "attacks": [f._asdict() for f in findings]}, indent=1) + "\n")
        out.with_suffix(".md").write_text(page(findings, origin))
    return int(any(finding.verdict != FAILED for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
