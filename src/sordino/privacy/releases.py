"""What the adversary sees of each client: how often, how far one unit moves it, and how much noise is on it.

Units are those of a client's clipped sum. Where every message is visible, these are the client's own sensitivity and
noise. Where only sums are visible, they are those of the sum, relative to the client with the largest weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sordino.core import Adjacency, Kind, Query
from sordino.privacy.accounting import events
from sordino.privacy.accounting.events import Release
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.participation import FULL
from sordino.privacy.plan import Plan, memoised, noised_queries, plan_mechanism, unbounded_sampling, unequal_cohorts

MOST_RATES = 20  # different ones where every message is visible: each has an account of its own
FEW_RATES = 7  # the same for allocation, whose accounts take longer


class QueryNoise(NamedTuple):
    """The noise of one query of one stage, per client."""

    stage: int
    number: int  # of the query within its stage
    query: Query
    scale: float  # the clip, or a lemma's largest bound: noise multipliers are multiples of it
    sensitivity: np.ndarray  # of one release of client i, in the units of its clipped sum
    std: np.ndarray  # of client i's own noise; where only sums are visible, of a cohort of one
    weight: np.ndarray  # w_i / b_i: how far a unit of client i's sum moves the aggregate
    step: float = 0.0  # of integers, in units of the heaviest client's sum; 0 where real numbers are sent
    dimension: int = 0  # integers of one answer; 0 where real numbers are sent

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.number} {self.query.kind}"


class AccountColumns(NamedTuple):
    """The numbers that one query contributes to each client's account, one entry per client."""

    sensitivity: np.ndarray
    std: np.ndarray
    times: np.ndarray
    rate: np.ndarray


def person_factor(plan: Plan) -> float:
    """By how much a person at several clients moves what the adversary sees, compared with a person at one.

    Where sums are visible, the m clients' changes may point in the same direction and add up: m. Where each message is
    visible and has noise of its own, m independent Gaussians with a shift of s each are one with a shift of sqrt(m) s.
    """
    clients = plan.privacy.person_clients
    return float(clients) if plan.only_sums_visible else math.sqrt(clients)


def participation_table(plan: Plan, stage: int, done: int | None = None) -> np.ndarray:
    """Who took part in which of the stage's rounds: a boolean array, rounds x clients.

    Args:
      done: only the first `done` rounds of the plan have taken place (default: all).
    """
    table = np.zeros((plan.stage_rounds[stage], plan.clients), dtype=bool)
    if cohorts := _stage_cohorts(plan, stage, done):
        table[np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts]), np.concatenate(cohorts)] = True
    return table


def _stage_cohorts(plan: Plan, stage: int, done: int | None) -> list[np.ndarray]:
    """The participants of each of the stage's rounds until `done`."""
    start = sum(plan.stage_rounds[:stage])
    stop = plan.rounds if done is None else done
    return plan.cohorts[start : min(start + plan.stage_rounds[stage], stop)]


def release_counts(plan: Plan, stage: int, query: Query, done: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Per client: the number of releases, and the factor by which correlated noise multiplies their sensitivity.

    Correlated noise makes one release of all rounds. With minibatches every round is one, which `unbounded_sampling`
    allows only where the rounds of a client move separate parts of the stream.
    """
    mechanism = mechanism_of(query.noise)
    if (plan.participation.kind == FULL or plan.amplified) and not mechanism.spans_rounds:
        before = sum(plan.stage_rounds[:stage])
        rounds = min(max((plan.rounds if done is None else done) - before, 0), plan.stage_rounds[stage])
        return np.full(plan.clients, rounds * query.calls), np.ones(plan.clients)
    if paths := _stream_paths(plan).get((stage, query.kind)):
        stop = (plan.rounds if done is None else done) - sum(plan.stage_rounds[:stage])
        over = [int(np.searchsorted(path.attended, stop)) for path in paths]
        squares = [path.squares[k] for path, k in zip(paths, over, strict=True)]
        return np.array(over).clip(max=1), np.sqrt(squares)
    if not mechanism.spans_rounds:
        rounds_of = _rounds_of_clients(plan)[stage] if done is None else _times_drawn(plan, stage, done)
        return rounds_of * query.calls, np.ones(plan.clients)
    patterns, which = _attendances(plan, stage, done)
    drawn, own = bool((sampling_rates(plan, query) < 1).any()), not plan.only_sums_visible
    factors = []
    for attended in patterns:  # clients that took part in the same rounds share one
        factor = mechanism.separate_factor(attended) if drawn else None
        factors.append(mechanism.sensitivity_factor(attended, own) if factor is None else factor)
    counts = np.array([len(attended) for attended in patterns])[which]
    return counts if drawn else counts.clip(max=1), np.array(factors)[which]


@memoised
def _rounds_of_clients(plan: Plan) -> list[np.ndarray]:
    """Per stage, the number of rounds of each client."""
    return [_times_drawn(plan, stage, None) for stage in range(len(plan.stages))]


def _times_drawn(plan: Plan, stage: int, done: int | None) -> np.ndarray:
    """In how many of the stage's rounds until `done` each client took part."""
    came = np.concatenate([np.zeros(0, dtype=int), *_stage_cohorts(plan, stage, done)])
    return np.bincount(came, minlength=plan.clients)


def _attendances(plan: Plan, stage: int, done: int | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """The different sets of rounds of the stage in which clients took part until `done`, and which set is whose."""
    cohorts = _stage_cohorts(plan, stage, done)
    if plan.participation.kind == FULL:
        return [np.arange(len(cohorts))], np.zeros(plan.clients, dtype=int)
    if plan.participation.kind == "cyclic" and len(cohorts) >= plan.participation.amount:
        turns, start = int(plan.participation.amount), sum(plan.stage_rounds[:stage])
        patterns = [np.arange((k - start) % turns, len(cohorts), turns) for k in range(turns)]
        return patterns, np.arange(plan.clients) % turns
    came = np.concatenate([np.zeros(0, dtype=int), *cohorts])
    rounds = np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts])
    ends = np.cumsum(np.bincount(came, minlength=plan.clients))[:-1]
    # Integers of 16 bits are sorted in a tenth of the time.
    order = np.argsort(came.astype(np.min_scalar_type(plan.clients)), kind="stable")
    of_clients = np.split(rounds[order], ends)
    places: dict[bytes, int] = {}
    which = np.array([places.setdefault(attended.tobytes(), len(places)) for attended in of_clients])
    of_places = dict(zip(which.tolist(), of_clients, strict=True))
    return [of_places[place] for place in range(len(places))], which


class StreamPath(NamedTuple):
    """What a stream of noise costs one client, round by round."""

    attended: np.ndarray  # its rounds of the stage
    squares: np.ndarray  # squared factors on its sensitivity: entry k after the first k of them


@memoised
def _stream_paths(plan: Plan) -> dict[tuple[int, Kind], list[StreamPath]]:
    """By stage and query, one path per client, for streams that give all prefixes at once and have no minibatches."""
    paths: dict[tuple[int, Kind], list[StreamPath]] = {}
    for stage, _, query in noised_queries(plan):
        mechanism = mechanism_of(query.noise)
        if not mechanism.spans_rounds or (sampling_rates(plan, query) < 1).any():
            continue
        known, (patterns, which) = list[StreamPath](), _attendances(plan, stage)
        for attended in patterns:  # clients that take part in the same rounds share one
            squares = mechanism.squared_factors(attended, own=not plan.only_sums_visible)
            if squares is None:
                break
            known.append(StreamPath(attended, squares))
        else:
            paths[stage, query.kind] = [known[place] for place in which]
    return paths


def visible(plan: Plan, noise: QueryNoise) -> tuple[np.ndarray, np.ndarray]:
    """(sensitivity, std) of what the adversary sees of each client, in units of a clipped sum."""
    if not plan.only_sums_visible:
        return noise.sensitivity, noise.std
    heaviest = noise.weight.max()
    std = (noise.weight * noise.std).max() / heaviest
    sensitivity = noise.sensitivity * noise.weight / heaviest
    mechanism = plan_mechanism(plan, noise.stage, noise.number)
    sensitivity = mechanism.visible_sensitivity(sensitivity, noise.step, sampled_terms(plan, noise.query))
    return sensitivity, np.full(plan.clients, std)


def sampled_terms(plan: Plan, query: Query) -> np.ndarray:
    """The terms of a sum that make up a client's change, where they are bounded one by one; else 1.

    The account of a Poisson sample bounds every term by itself: a replaced one is also compared with none. Two terms of
    length C differ by 2C, or by sqrt(2) C if they are semi-definite.
    """
    if plan.privacy.adjacency is Adjacency.ADD_REMOVE:
        return np.ones(plan.clients)
    return np.where(sampling_rates(plan, query) < 1, math.sqrt(2) if query.psd else 2.0, 1.0)


def sampling_rates(plan: Plan, query: Query) -> np.ndarray:
    """The rate at which a unit takes part in one release of the query, per client; 1 where sampling hides nothing."""
    if unbounded_sampling(plan) or unequal_cohorts(plan):
        return np.ones(plan.clients)
    if query.sampled and plan.privacy.unit.sizes_public:
        if plan.only_sums_visible:  # `calibration` compares the clients, and needs no few rates
            return plan.rates
        # Under allocation a rate decides where epochs end: it must be that of some whole number of minibatches.
        allocation = plan.sampling.kind == Sampler.ALLOCATION
        return events.coarse(plan.rates, FEW_RATES if allocation else MOST_RATES, attained=allocation)
    return np.full(plan.clients, plan.participation.rate(plan.clients) if plan.amplified else 1.0)


def account_columns(plan: Plan, noise: QueryNoise, done: int | None = None) -> AccountColumns:
    """What one query contributes to each client's account, after `done` rounds (default: all)."""
    times, factor = release_counts(plan, noise.stage, noise.query, done)
    sensitivity, std = visible(plan, noise)
    return AccountColumns(sensitivity * factor, std, times, sampling_rates(plan, noise.query))


def sampler_of(plan: Plan) -> Sampler:
    """The sampler whose randomness hides who or what took part."""
    return Sampler(plan.participation.kind if plan.amplified else plan.sampling.kind)


def sampled_factor(plan: Plan, query: Query, sampler: Sampler) -> float:
    """The factor on a sampled release's sensitivity.

    Answers about one minibatch (`joint`) are one release of all of them. Under Poisson sampling and allocation a
    replaced term is also compared with no term at all, so that two terms of length C count whether they are
    semi-definite or not.
    """
    apart = (
        query.psd
        and sampler in (Sampler.POISSON, Sampler.ALLOCATION)
        and plan.privacy.adjacency is Adjacency.REPLACE_ONE
    )
    return math.sqrt(query.joint * (2 if apart else 1))


def releases(plan: Plan, noises: Sequence[QueryNoise], account: np.ndarray) -> tuple[Release, ...]:
    """The releases of one client. `account`: its entries of `account_columns`, query after query."""
    sampler = sampler_of(plan)
    result = []
    for noise, (sensitivity, std, count, rate) in zip(noises, account.reshape(-1, 4), strict=True):
        if not count:
            continue
        event = plan_mechanism(plan, noise.stage, noise.number).event
        release = Release(noise.name, float(sensitivity), float(std), int(count), mechanism=event.name)
        if rate < 1:
            release = release._replace(
                sensitivity=float(sensitivity) * sampled_factor(plan, noise.query, sampler),
                times=int(count) // noise.query.joint,
                rate=float(rate),
                sampler=sampler,
            )
        result.append(release)
    return tuple(result)


def mu_squared_of_round(plan: Plan, noise: QueryNoise, t: int) -> np.ndarray:
    """What round t adds to a participant's mu squared; correlated noise pays for what the round adds to the stream."""
    sensitivity, std = visible(plan, noise)
    with np.errstate(divide="ignore"):
        ratio = (sensitivity / std) ** 2
    if not mechanism_of(noise.query.noise).spans_rounds:
        return np.asarray(ratio * noise.query.calls)
    before, after = (release_counts(plan, noise.stage, noise.query, done)[1] for done in (t, t + 1))
    return np.asarray(ratio * np.maximum(after**2 - before**2, 0))
