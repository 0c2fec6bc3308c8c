"""Attacks on tallies: the same attack as on methods, with the canary that moves a tally furthest.

The two neighbouring data sets differ in one record of one client, the victim, or in all records of one of its persons:
a search over extreme records chooses the pair whose tallies, before noise, lie furthest apart. The engine's own client
code answers, with the noise that ships. The release is one Gaussian vector, so the log likelihood ratio is the best
score there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.attacks import MAX_TRIES, RUNS, Audit, check_arguments
from sordino.checks.fixtures import Space
from sordino.checks.tallies import CheckedTally
from sordino.core import Adjacency, Broadcast, Privacy, Shard, Unit
from sordino.data.records import Records
from sordino.engines import reference
from sordino.engines.schedule import RoundPlan, round_plans
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Secure, Seeded, Source
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
    noisy = round_plan._replace(
        stds=[noise_factor * each for each in round_plan.stds],
        sum_stds=[noise_factor * each for each in round_plan.sum_stds],
    )
    information = float((gap / std).norm()) ** 2
    sources = _sources(seed)
    certified, delta = spending.epsilon(plan), privacy.delta
    threshold = statistics.best_threshold(math.sqrt(information), runs, delta=delta, confidence=confidence)
    tries: list[tuple[float, float, statistics.LowerBound]] = []
    while len(tries) < MAX_TRIES and (not tries or max(tries[-1][:2]) > certified):
        scores = []
        for records in (zero, one):
            source = next(sources)
            released = (_released(plan, noisy, tally, theta, records, source, k) for k in range(runs))
            middle = (means[0] + means[1]) / 2
            scores.append(np.array([float((each - middle) @ gap) / std**2 for each in released]))
            tick(runs)
        plain = statistics.by_thresholds(*scores, delta=delta, confidence=confidence, threshold=threshold)
        sharp = statistics.by_gaussian(*scores, delta=delta, confidence=confidence, threshold=0.0)
        tries.append((plain.epsilon, sharp.epsilon, sharp))
    _, model_based, sharp = min(tries, key=lambda bounds: bounds[1])
    reach = math.sqrt(information) / spending.mu(plan)
    return Audit(
        method=name,
        unit=str(privacy.unit),
        adjacency=str(privacy.adjacency),
        trust=str(privacy.trust),
        certified=certified,
        delta=delta,
        lower_thresholds=min(bounds[0] for bounds in tries),
        lower_gaussian=model_based,
        lower_account=None,
        mu_certified=spending.mu(plan),
        mu_lower=sharp.mu or 0.0,
        false_positive_rate=sharp.false_positive_rate,
        false_negative_rate=sharp.false_negative_rate,
        reach=reach,
        least_claim=reach,
        canary=f"one {privacy.unit} of another cell",
        runs=runs,
        rounds=1,
        confidence=confidence,
        tries=len(tries),
        noise_factor=noise_factor,
        batch="full",
        dtype="float64",
    )


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


def _released(
    plan: Plan, round_plan: RoundPlan, tally: Any, theta: Tensor, records: Records, source: Source, run: int
) -> Tensor:
    """One release, with its noise. Every run has an address of its own: it is the number of a round."""
    round_plan = round_plan._replace(t=run, first=run)
    if not plan.only_sums_visible:
        victim: Tensor = _answer(round_plan, tally, theta, records, VICTIM, source)
        return victim.double()
    messages = [_answer(round_plan, tally, theta, records, i, None) for i in range(plan.clients)]
    total = reference.noised_sum(round_plan, messages, list(plan.weights), [0], source, theta)
    assert isinstance(total, Tensor)
    return total


def _sources(seed: int | None) -> Iterator[Source]:
    count = 0
    while True:
        yield Secure() if seed is None else Seeded(1000 * seed + count)
        count += 1
