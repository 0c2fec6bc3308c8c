"""What a plan spends: epsilon and mu, per group of clients and after each round."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sordino.privacy.accounting import events, gaussian, slots
from sordino.privacy.accounting.events import Release
from sordino.privacy.accounting.samplers import SampledGaussian
from sordino.privacy.calibration import query_noises
from sordino.privacy.plan import Plan, memoised, plan_mechanism
from sordino.privacy.releases import (
    account_columns,
    mu_squared_of_round,
    participation_table,
    release_counts,
    releases,
    sampling_rates,
)


class Group(NamedTuple):
    """Clients with the same account."""

    clients: tuple[int, ...]
    records: tuple[int, int]  # smallest and largest
    releases: tuple[Release, ...]
    mu: float  # as if nothing were sampled


def groups(plan: Plan, done: int | None = None) -> tuple[Group, ...]:
    """Clients grouped by equal accounts, after `done` rounds (default: the whole plan)."""
    noises = query_noises(plan)
    columns = [column for noise in noises for column in account_columns(plan, noise, done)]
    accounts, which = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    result = []
    for g, account in enumerate(accounts):
        members = np.flatnonzero(which.reshape(-1) == g)
        group_releases = releases(plan, noises, account)
        sizes = [plan.sizes[i] for i in members]
        result.append(
            Group(tuple(members.tolist()), (min(sizes), max(sizes)), group_releases, events.mu(group_releases))
        )
    return tuple(result)


def epsilon_of(plan: Plan, group: Group, delta: float | None = None) -> float:
    """The group's epsilon, at the plan's delta or at another one.

    Minibatches have places for the plan's delta. The account reserves a share of the delta in question for those that
    overflow, which is too little for a much smaller one; what is missing is taken from it here.
    """
    at = plan.privacy.delta if delta is None else delta - max(0.0, plan.overflow - slots.OVERFLOW * delta)
    return events.epsilon(group.releases, at, plan.privacy.adjacency) if at > 0 else math.inf


def worst(plan: Plan, done: int | None = None) -> Group:
    """The group with the largest epsilon, after `done` rounds."""
    return max(_exceeded_by_none(groups(plan, done)), key=lambda group: epsilon_of(plan, group))


def _exceeded_by_none(candidates: tuple[Group, ...]) -> list[Group]:
    """The groups without those that make the same releases as another one at the same noise, but less often: their
    epsilon is no larger."""
    most: dict[tuple[Release, ...], tuple[tuple[int, ...], Group]] = {}
    kept = []
    for group in candidates:
        alike = tuple(release._replace(times=1) for release in group.releases)
        times = tuple(release.times for release in group.releases)
        if len(times) != 1:
            kept.append(group)
        elif alike not in most or times > most[alike][0]:
            most[alike] = times, group
    return kept + [group for _, group in most.values()]


def epsilon(plan: Plan, done: int | None = None) -> float:
    """The largest epsilon of any client, after `done` rounds (default: the whole plan)."""
    return epsilon_of(plan, worst(plan, done))


def client_epsilon(plan: Plan, client: int) -> float:
    """The epsilon of one client after the whole plan; it may have requested a stricter one than the others."""
    return epsilon_of(plan, next(group for group in groups(plan) if client in group.clients))


def mu(plan: Plan, done: int | None = None) -> float:
    """The largest mu of any client, after `done` rounds (default: the whole plan)."""
    return max(group.mu for group in groups(plan, done))


def epsilon_after(plan: Plan, t: int) -> float:
    """The largest epsilon of any client once round t is over."""
    if samples(plan):
        return float(_epsilon_path(plan)[t])
    squares = _mu_squared_path(plan)
    noises = query_noises(plan)
    kinds = [plan_mechanism(plan, noise.stage, noise.number).event for noise in noises]
    released = sum(release_counts(plan, noise.stage, noise.query, t + 1)[0].max() for noise in noises)
    return events.epsilon_of_mu_squared(kinds, float(squares[t]), plan.privacy.delta, int(released))


def mu_after_each_round(plan: Plan) -> np.ndarray:
    """The largest mu of any client after each round, where nothing is sampled."""
    return np.asarray(np.sqrt(_mu_squared_path(plan)))


@memoised
def samples(plan: Plan) -> bool:
    """Whether some release is about a random part of the data, and is accounted for as such."""
    return any((sampling_rates(plan, noise.query) < 1).any() for noise in query_noises(plan))


@memoised
def _mu_squared_path(plan: Plan) -> np.ndarray:
    squares = np.zeros(plan.clients)
    path = np.zeros(plan.rounds)
    for t, cohort in enumerate(plan.cohorts):
        for noise in query_noises(plan):
            if noise.stage == plan.stage_of(t):
                squares[cohort] += mu_squared_of_round(plan, noise, t)[cohort]
        path[t] = squares.max()
    return path


@memoised
def _epsilon_path(plan: Plan) -> np.ndarray:
    """Epsilon after each round; among clients with equal accounts, the one that took part most often counts."""
    paths = [_group_path(plan, group) for group in groups(plan) if group.releases]
    return np.asarray(np.minimum(np.max(paths, 0), epsilon(plan)))


def _group_path(plan: Plan, group: Group) -> np.ndarray:
    sampled, counts, squares = list[SampledGaussian](), list[np.ndarray](), np.zeros(plan.rounds)
    noises = {noise.name: noise for noise in query_noises(plan)}
    for release in group.releases:
        noise = noises[release.query]
        first, rounds = sum(plan.stage_rounds[: noise.stage]), plan.stage_rounds[noise.stage]
        table = np.ones((rounds, 1), bool)
        if not plan.amplified:
            table = participation_table(plan, noise.stage)[:, list(group.clients)]
        times = np.zeros(plan.rounds, dtype=int)
        times[first : first + rounds] = table.cumsum(0).max(1) * noise.query.calls
        times = np.maximum.accumulate(times)
        parts, mu_of_one = events.split([release._replace(times=1)], plan.privacy.adjacency)
        sampled += parts
        counts += [times // noise.query.joint] * len(parts)
        squares += mu_of_one**2 * times
    delta, adjacency = events.remaining_delta(group.releases, plan.privacy.delta), plan.privacy.adjacency
    if delta <= 0:
        return np.full(plan.rounds, math.inf)
    if not sampled:
        return np.array([gaussian.epsilon(float(each), delta) for each in np.sqrt(squares)])
    from sordino.privacy.accounting import subsampled

    return subsampled.path(sampled, np.stack(counts, 1), delta, adjacency, np.sqrt(squares))
