"""Attacks on tallies: the same attack as on methods, with the canary that moves a tally furthest.

The two neighbouring data sets differ in one record of one client, the victim, or in all records of one of its persons:
a search over extreme records chooses the pair whose tallies, before noise, lie furthest apart. The engine's own client
code answers once, because an answer does not depend on noise; the engine's own function adds noise to it many times.
The release is one Gaussian vector, so the log likelihood ratio is the best score there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.attacks import RUNS, Audit, check_arguments, one_release, sources_of
from sordino.checks.fixtures import Space
from sordino.checks.tallies import CheckedTally
from sordino.core import Adjacency, Broadcast, Privacy, Shard, Unit
from sordino.data.records import Records
from sordino.engines import reference
from sordino.engines.oracle import noised, standard_noise
from sordino.engines.schedule import RoundPlan, round_plans
from sordino.privacy.mechanisms.random import COHORT, Address, Seeded, Source
from sordino.privacy.plan import Plan

SIZES, VICTIM = (4, 3, 3), 0
CANARIES = 64  # records to choose the canary and its replacement from


def audit(
    name: str,
    checked: CheckedTally,
    privacy: Privacy | None = None,
    *,
    runs: int = RUNS,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    tick: Callable[[int], None] = lambda runs: None,
) -> Audit:
    """Attack a tally with many releases of each of two neighbouring data sets.

    Args:
      name: as the result shows it.
      checked: the tally.
      privacy: the promise to attack.
      runs: releases per data set.
      confidence: with which each bound holds.
      noise_factor: multiplies the noise without telling the certificate; below 1 the attack should win.
      seed: makes the noise reproducible. Without it, noise is secret and fresh.
      tick: called with the number of releases that finished.

    Returns:
      The lower bounds, beside the certified epsilon.
    """
    privacy = Privacy() if privacy is None else privacy
    check_arguments("runs", runs, noise_factor, seed)
    tally: Any = checked.models[0]
    plan = Plan(checked.at(privacy.unit), 1, SIZES, privacy)
    round_plan = next(round_plans(plan, tally))
    theta = tally.init().double()
    theta = theta + torch.linspace(1.0, 2.0, len(theta), dtype=torch.float64)
    zero, one = _neighbours(tally, theta, privacy)
    means = [_before_noise(plan, round_plan, tally, theta, records) for records in (zero, one)]
    gap = means[1] - means[0]
    std = _std(plan, round_plan)
    information = float((gap / std).norm()) ** 2
    sources = sources_of(seed, plan)

    def scored(side: int) -> np.ndarray:
        released = released_often(plan, round_plan, means[side], noise_factor * std, next(sources), runs)
        tick(runs)
        return np.asarray(((released - (means[0] + means[1]) / 2) @ gap / std**2).numpy())

    return one_release(
        name,
        plan,
        scored,
        information,
        canary=f"one {privacy.unit} of another cell",
        runs=runs,
        confidence=confidence,
        noise_factor=noise_factor,
        dtype="float64",
    )


def released_often(plan: Plan, round_plan: RoundPlan, mean: Tensor, std: float, source: Source, runs: int) -> Tensor:
    """Many releases of one tally, each with its noise, as the engines add it: runs x numbers."""
    at = Address(COHORT if plan.only_sums_visible else VICTIM, round_plan.t, 0)
    shape = runs, len(mean)
    noise = standard_noise(source.fresh(), round_plan.stage.queries[0], at, round_plan.first, shape)
    return noised(mean.expand(shape), noise, std, secret=source.private)


def _neighbours(tally: Any, theta: Tensor, privacy: Privacy) -> tuple[Records, Records]:
    """Two data sets that differ in the victim's first record, or in all records of its first person."""
    rng, space = np.random.default_rng(0), Space.of(tally)
    most = privacy.person_records if privacy.unit is Unit.PERSON else None
    person = np.repeat(np.arange(sum(SIZES)), most or 1)
    client = np.repeat(np.arange(len(SIZES)), SIZES)[person]
    x, y = torch.from_numpy(rng.normal(size=(len(client), space.features))), space.labels(rng, len(client)).clamp(-3, 3)
    many, labels = space.draw(rng, CANARIES)
    vectors = torch.stack(
        [
            tally.tally_sum(theta, Shard(many[k : k + 1], labels[k : k + 1], torch.ones(1).double()), tally.clip)
            for k in range(CANARIES)
        ]
    )

    def data(k: int) -> Records:
        mine, own = x.clone(), y.clone()
        mine[: most or 1], own[: most or 1] = many[k], labels[k]  # every record of a person lies in the same cells
        who = None if most is None else person
        return Records.of(mine, own, client, person=who, per_person=most or 1, dtype=torch.float64)

    if privacy.adjacency is Adjacency.ADD_REMOVE:
        there = data(int(vectors.norm(dim=-1).argmax()))
        return _Absent(there.x, there.y, there.starts, there.filled, there.per_person), there
    a, b = divmod(int(torch.cdist(vectors, vectors).argmax()), CANARIES)
    return data(a), data(b)


class _Absent(Records):
    """Without the victim's first record or person; its place is masked."""

    def shard(self, i: int) -> Shard:
        shard = super().shard(i)
        if i != VICTIM:
            return shard
        mask = shard.mask.clone()
        mask[: self.per_person] = 0
        return shard._replace(mask=mask)


def _answer(round_plan: RoundPlan, tally: Any, theta: Tensor, records: Records, i: int, source: Source | None) -> Any:
    """The message of client i, by the engine's own client code; without a source, without noise."""
    ask = reference.oracle(tally, records, round_plan, i, source or Seeded(0), add_noise=source is not None)
    return round_plan.stage.local.compute(ask, Broadcast(theta), (), ())


def _before_noise(plan: Plan, round_plan: RoundPlan, tally: Any, theta: Tensor, records: Records) -> Tensor:
    """What is released, before noise: the victim's answer, or the weighted sum of all answers."""
    if not plan.only_sums_visible:
        victim: Tensor = _answer(round_plan, tally, theta, records, VICTIM, None)
        return victim
    answers = [plan.weights[i] * _answer(round_plan, tally, theta, records, i, None) for i in range(plan.clients)]
    return torch.stack(answers).sum(0)


def _std(plan: Plan, round_plan: RoundPlan) -> float:
    if plan.only_sums_visible:
        return float(round_plan.sum_stds[0])
    return float(round_plan.stds[0][VICTIM]) / plan.sizes[VICTIM]
