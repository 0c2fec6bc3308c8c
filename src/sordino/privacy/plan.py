"""A method, its rounds and participants, and the noise that pays for them.

One rule covers every trust model. A round adds up w_i / b_i times client i's clipped sum (w_i: public weight, b_i:
public divisor of its answers), so a record of client i moves the observed quantity by (w_i / b_i) * sensitivity.

- `untrusted-server`: every message is seen, so each client's own noise must cover its own sensitivity.
- `secure-aggregation`, `trusted-server`: only the weighted sum is seen. Its noise must cover the client that moves it
  most, and each participant contributes an equal part of that noise *as it arrives in the sum*. Hence no small client
  pays more than was promised, whatever the weights. Correlated noise is one stream over all rounds, so that there every
  client sends its part in every round, and those outside the cohort send nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sordino.core import (
    SAMPLED,
    Adjacency,
    Correlated,
    Divisor,
    Facts,
    Kind,
    Method,
    Privacy,
    Query,
    Stage,
    Stream,
    Trust,
    Unit,
    carries,
    nothing,
)
from sordino.errors import SordinoError, nearest
from sordino.privacy.accounting import events as account_of
from sordino.privacy.accounting import gaussian, slots, subsampled
from sordino.privacy.accounting.events import Release
from sordino.privacy.accounting.subsampled import Sampled, Sampler
from sordino.privacy.evidence.ledger import DISCRETE, Entry
from sordino.privacy.mechanisms import discrete_gaussian, quantization
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.participation import EVERYONE, Participation, Sampling

MOST_ROUNDS = 1_000_000


class QueryNoise(NamedTuple):
    """The noise of one query of one stage, per client."""

    stage: int
    number: int  # of the query within its stage
    query: Query
    scale: float  # the clip, or a lemma's largest bound: what noise multipliers are multiples of
    sensitivity: np.ndarray  # of one release of client i, in the units of its clipped sum
    std: np.ndarray  # of client i's own noise; where only sums are seen, of a cohort of one (see Plan.share)
    weight: np.ndarray  # w_i / b_i: how far a unit of client i's sum moves the aggregate
    step: float = 0.0  # of integers, in units of the heaviest client's sum; 0 where real numbers are sent

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.number} {self.query.kind}"


class Group(NamedTuple):
    """Clients with the same account."""

    clients: tuple[int, ...]
    records: tuple[int, int]  # smallest and largest
    releases: tuple[Release, ...]
    mu: float  # as if nothing had been sampled; exact where nothing was


@dataclass(frozen=True)
class Plan:
    """What will be released, and the noise that pays for it. All figures follow from these fields.

    Args:
        method: What is asked of the clients, and what the server does with it.
        rounds: Number of rounds.
        sizes: Number of records of each client; public at record level.
        privacy: The promise.
        participation: Who takes part in which round.
        divisor: How clients of unequal size are averaged.
        schedule_seed: Seed of the schedule of participants.
        noise: Standard deviation of the summed client noise over the clip; None: what epsilon needs.
        uncertified: Accept a plan that no proof covers; its certificate says "not certified".
        sampling: Which records a gradient is asked of.
        integers: Sums are of integers, added up by secure aggregation.

    Raises:
        SordinoError: A field is out of its range, or no proof covers the plan.

    Example:
        >>> import sordino as so
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=70, sizes=(2500,) * 20, privacy=so.Privacy(epsilon=1.0))
        >>> round(plan.epsilon(), 3)
        1.0
    """

    method: Method
    rounds: int
    sizes: tuple[int, ...]
    privacy: Privacy
    participation: Participation = field(default_factory=Participation)
    divisor: Divisor = Divisor.POOLED
    schedule_seed: int = 0
    noise: float | None = None  # std of the summed client noise over the clip; None: what epsilon asks for
    uncertified: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    integers: Integers | None = None  # sums are of integers, added up by secure aggregation

    def __post_init__(self) -> None:
        if str(self.divisor) not in list(Divisor):
            raise SordinoError(f"divisor: '{self.divisor}' is unknown.{nearest(str(self.divisor), Divisor)}")
        object.__setattr__(self, "divisor", Divisor(str(self.divisor)))
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise SordinoError(f"rounds: {self.rounds} must lie between 1 and {MOST_ROUNDS:,}.")
        if self.schedule_seed < 0:
            raise SordinoError(f"schedule_seed: {self.schedule_seed} must be 0 or more.")
        if not self.sizes or min(self.sizes) < 1:
            raise SordinoError("clients: every client needs at least one record.")
        if unknown := [i for i in self.privacy.client_epsilon if not 0 <= i < len(self.sizes)]:
            raise SordinoError(f"client_epsilon: there is no client {unknown[0]}; they run 0 to {len(self.sizes) - 1}.")
        if self.method.unit is not self.privacy.unit:
            raise SordinoError(f"unit: {self.method.name} was built for {self.method.unit}, not {self.privacy.unit}.")
        for stage in self.method.stages:
            _check_stage(self.method.name, stage, self.privacy.unit)
        if self.noise is not None and not 1e-6 <= self.noise <= 1e12:
            raise SordinoError(f"noise: {self.noise} must lie between 1e-6 and 1e12; epsilon = inf runs without noise.")
        if self.noise is not None and self.privacy.client_epsilon:
            raise SordinoError("client_epsilon: with a fixed noise no client can ask for more; leave one of them out.")
        noised = [q for stage in self.method.stages for q in stage.queries if q.noise is not None]
        if not self.noiseless and any(
            math.isinf(q.sensitivity(self.privacy.adjacency, self.privacy.unit)) for q in noised
        ):
            raise SordinoError(
                f"epsilon: {self.method.name} bounds nothing. {self.method.caveat or 'Set clip, or epsilon = inf.'}"
            )
        pair = (self.privacy.unit, self.privacy.trust)
        if not (pair in self.method.proves or self.uncertified or self.noiseless):
            pairs = ", ".join(sorted(f"{unit} level under {trust}" for unit, trust in self.method.proves))
            raise SordinoError(
                f"trust: {self.method.name} is not proved private at {self.privacy.unit} level under "
                f"{self.privacy.trust}. {self.method.caveat} "
                + (f"Proved: {pairs}. Choose one of these, or set" if pairs else "With these options nothing is. Set")
                + " uncertified = true and read the statement, which then begins with 'not certified'."
            )
        self.participation.rate(len(self.sizes))
        if self.random_participation and not (self.uncertified or self.noiseless):
            raise SordinoError(
                f"participation: the correlated noise of {self.method.name} is certified for full, fixed:K or cyclic:K "
                f"participation, where each client's rounds are few by design; {self.participation} is not."
            )
        if self.unbounded and not (self.uncertified or self.noiseless):
            raise SordinoError(f"batch: {self.unbounded}")
        if self.integers is not None:
            self._check_integers(self.integers)

    def _check_integers(self, how: Integers) -> None:
        how.honest(self.clients)
        quantization.check(self.method)
        if self.privacy.trust is not Trust.SECURE_AGGREGATION:
            raise SordinoError(f"trust: integers are added up under secure-aggregation, not {self.privacy.trust}.")
        if self.participation.kind != EVERYONE:
            raise SordinoError(f"participation: secure aggregation is over all sites here, not {self.participation}.")
        if self.sampling.kind != EVERYONE:
            raise SordinoError(f"batch: discrete noise has no account of {self.sampling}; leave batch at full.")
        if self.noiseless:
            raise SordinoError("epsilon: secure aggregation without noise is not offered; give epsilon.")

    # ------------------------------------------------------------------------------------------------ structure

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def proved(self) -> bool:
        known = (self.privacy.unit, self.privacy.trust) in self.method.proves
        return known and not self.random_participation and not self.unbounded

    @property
    def random_participation(self) -> bool:
        """A stream of noise whose clients come by coin: any of them may come in every round."""
        streams = any(carries(q.noise) for stage in self.stages for q in stage.queries)
        return streams and self.participation.kind == "poisson"

    @property
    def unbounded(self) -> str:
        """Why nothing is proved of this plan's minibatches; empty where something is, or none are drawn."""
        queries = [q for stage in self.method.stages for q in stage.queries]
        # At user level sizes are private, and must not decide what is refused.
        if self.sampling.kind == EVERYONE or (self.privacy.unit is Unit.RECORD and not (self.rates < 1).any()):
            return ""
        if any(q.bound is not None or isinstance(q.noise, Correlated | Stream) for q in queries):
            return f"{self.method.name}'s bound or noise speaks of all of a client's records; leave batch at full."
        noised = any(q.kind in SAMPLED and q.noise is not None for q in queries)
        if noised and self.sampling.kind == "fixed" and self.privacy.adjacency is Adjacency.ADD_REMOVE:
            return (
                f"{self.sampling} under add-remove: one record more changes which others are drawn, and no bound for "
                "that is known here. Use poisson, or adjacency = replace-one."
            )
        return ""

    @cached_property
    def rates(self) -> np.ndarray:
        """At which each client's records are drawn whenever a gradient is asked for."""
        return self.sampling.rates(np.asarray(self.sizes, dtype=float))

    @cached_property
    def slots(self) -> np.ndarray:
        """Places in each client's minibatch: a public number."""
        sizes = np.asarray(self.sizes)
        if self.sampling.kind != "poisson" or not (self.rates < 1).any():
            return np.asarray(np.rint(sizes * self.rates).astype(int))
        calls = sum(q.calls for stage in self.method.stages for q in stage.queries if q.kind in SAMPLED)
        tail = slots.tail(self.privacy.epsilon, self.privacy.delta, self.rounds * max(calls, 1))
        return slots.slots(sizes, self.rates, tail)

    @property
    def amplified(self) -> bool:
        """Who takes part is drawn by chance and stays with the server, and whole clients are what is protected.

        At record level it helps nobody: the other records of a client show whether it came.
        """
        if self.privacy.unit is not Unit.USER or self.privacy.trust is not Trust.TRUSTED_SERVER:
            return False
        if any(isinstance(q.noise, Correlated) for stage in self.stages for q in stage.queries):
            return False
        fixed = self.participation.kind == "fixed" and self.privacy.adjacency is Adjacency.REPLACE_ONE
        return (fixed or self.participation.kind == "poisson") and self.participation.rate(self.clients) < 1

    @property
    def noiseless(self) -> bool:
        """Runs without noise, and so without privacy."""
        return self.privacy.epsilon == math.inf and self.noise is None

    @property
    def only_sums_visible(self) -> bool:
        """The adversary sees no single client's message."""
        return self.privacy.trust is not Trust.UNTRUSTED_SERVER

    @cached_property
    def stage_rounds(self) -> tuple[int, ...]:
        fixed = sum(stage.rounds or 0 for stage in self.method.stages)
        open_ended = sum(stage.rounds is None for stage in self.method.stages)
        if open_ended > 1 or fixed + open_ended > self.rounds or (not open_ended and fixed != self.rounds):
            raise SordinoError(f"rounds: {self.method.name} needs {'more than ' * bool(open_ended)}{fixed} rounds.")
        return tuple(self.rounds - fixed if stage.rounds is None else stage.rounds for stage in self.method.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The method's, with the factors of correlated noise worked out for their rounds."""
        return tuple(_over(stage, rounds) for stage, rounds in zip(self.method.stages, self.stage_rounds, strict=True))

    def goes_on(self, t: int) -> bool:
        """Round t adds to a stream of noise that began before it, and so needs the draws it began with."""
        stage = self.stage_of(t)
        streams = any(carries(query.noise) for query in self.stages[stage].queries)
        return streams and t > sum(self.stage_rounds[:stage]) and not self.noiseless

    def stage_of(self, t: int) -> int:
        """The stage that round t belongs to."""
        return int(np.searchsorted(np.cumsum(self.stage_rounds), t, side="right"))

    @cached_property
    def cohorts(self) -> list[np.ndarray]:
        return self.participation.schedule(self.rounds, self.clients, self.schedule_seed)

    def taken(self, stage: int, done: int | None = None) -> np.ndarray:
        """A rounds x clients table of who took part in the stage's rounds, of those done."""
        start = sum(self.stage_rounds[:stage])
        table = np.zeros((self.stage_rounds[stage], self.clients), dtype=bool)
        stop = self.rounds if done is None else done
        for row, t in enumerate(range(start, min(start + len(table), stop))):
            table[row, self.cohorts[t]] = True
        return table

    @cached_property
    def weights(self) -> np.ndarray:
        """Client i's weight in the aggregate of *means*; they sum to one. All users weigh the same."""
        sizes = np.asarray(self.sizes, dtype=float)
        if self.divisor is Divisor.POOLED and self.privacy.unit is Unit.RECORD:
            return np.asarray(sizes / sizes.sum())
        return np.full(self.clients, 1 / self.clients)

    def queries(self) -> Iterator[tuple[int, int, Query]]:
        """(stage, number, query) of everything that is noised."""
        for s, stage in enumerate(self.stages):
            for k, query in enumerate(stage.queries):
                if query.noise is not None:
                    yield s, k, query

    # ---------------------------------------------------------------------------------------------------- noise

    def _counts(self, stage: int, query: Query, done: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Per client: the number of releases, and the factor by which a stream multiplies their sensitivity."""
        if (self.participation.kind == EVERYONE or self.amplified) and not isinstance(query.noise, Correlated):
            before = sum(self.stage_rounds[:stage])
            rounds = min(max((self.rounds if done is None else done) - before, 0), self.stage_rounds[stage])
            return np.full(self.clients, rounds * query.calls), np.ones(self.clients)
        taken = self.taken(stage, done)
        if not isinstance(query.noise, Correlated):
            return taken.sum(0) * query.calls, np.ones(self.clients)
        patterns, which = np.unique(taken, axis=1, return_inverse=True)
        factors = np.array([query.noise.sensitivity(np.flatnonzero(column)) for column in patterns.T])
        return taken.any(0).astype(int), factors[which.reshape(-1)]

    @cached_property
    def levels(self) -> tuple[QueryNoise, ...]:
        """The noise of every query: what epsilon asks for, or what `noise` fixes."""
        found = list(self.queries())
        releases = np.array([self._counts(s, q)[0].max() for s, _, q in found], dtype=float)
        shares = _shares([q.share for *_, q in found], releases)
        requested_epsilons = np.full(self.clients, self.privacy.epsilon)
        for client, epsilon in self.privacy.client_epsilon.items():
            requested_epsilons[client] = epsilon
        distinct, which = np.unique(requested_epsilons, return_inverse=True)
        mu = np.array([self._allowed(e, int(releases.sum())) for e in distinct])[which]
        sizes, position = np.unique(self.sizes, return_inverse=True)
        levels = []
        for (s, k, query), share, count in zip(found, shares, releases, strict=True):
            if not count:  # the schedule left this stage empty: nobody will use its noise, and it takes no budget
                share, count = 1.0, 1.0
            unit, adjacency = self.privacy.unit, self.privacy.adjacency
            claims = np.array([query.sensitivity(adjacency, unit, int(m)) for m in sizes])[position]
            if not np.isfinite(claims).all() and not self.noiseless:
                raise SordinoError(f"clip: {self.method.name}'s {query.kind} needs a finite clip; set clip.")
            lemma = query.bound
            scale = query.clip if lemma is None else max(lemma.bound(int(m), Adjacency.ADD_REMOVE) for m in sizes)
            factor = self._counts(s, query)[1].max()
            divisor = 1.0 if query.kind is Kind.DELTA else np.asarray(self.sizes, dtype=float)
            divisor = divisor * self.rates if query.kind in SAMPLED else divisor
            weight = self.weights / divisor
            # Each client's own std; without a promise there is none, bounded or not.
            needed = claims * factor * np.sqrt(count / share) / mu if not self.noiseless else np.zeros(self.clients)
            std = (weight * needed).max() / weight if self.only_sums_visible else needed
            if self.noise is not None:  # the caller fixes the noise of a cohort's sum; its shape over clients stays
                spread = (weight * claims).max() / weight if self.only_sums_visible else claims
                parties = 1.0 if self.only_sums_visible else self.participation.rate(self.clients) * self.clients
                std = spread * self.noise * scale / math.sqrt(parties * (spread**2).mean())
            level = QueryNoise(s, k, query, scale, claims, std, weight)
            levels.append(level if self.integers is None else self._in_steps(level, self.integers, needed))
        if self.integers is not None:
            return tuple(levels)
        if self.noise is None and not self.noiseless:
            subsampling_factor = self._relief(levels, requested_epsilons)
            levels = [level._replace(std=level.std * subsampling_factor) for level in levels]
        return tuple(levels)

    def _allowed(self, epsilon: float, releases: int) -> float:
        """mu of all releases together; of discrete noise what concentrated DP proves, rho = mu^2 / 2."""
        if self.integers is None:
            return gaussian.mu(epsilon, self.privacy.delta)
        return math.sqrt(2 * discrete_gaussian.rho_of(epsilon, self.privacy.delta, releases)) * (1 - 1e-11)

    def _in_steps(self, level: QueryNoise, how: Integers, needed: np.ndarray) -> QueryNoise:
        """The same level in integers: as fine as they can be, with noise that covers the rounding too. `needed`: what
        each client's own promise asks for without rounding, which lengthens a short step more than a long one."""
        records = 1.0 if level.query.kind is Kind.DELTA else np.asarray(self.sizes, dtype=float)
        reach = float((level.weight * records * level.query.clip).sum())
        total = float((level.weight * level.std).max())
        steps = how.steps(reach, total, self.clients)
        own = steps * level.weight * level.sensitivity
        factor = how.lengthened(own, level.weight * needed) if self.noise is None else 1.0
        level = level._replace(std=level.std * factor, step=1 / (steps * level.weight.max()))
        variance = self.variance(level)
        if variance < quantization.LEAST:
            raise SordinoError(
                f"noise: its variance is {variance:.3g} in integer steps; {quantization.LEAST:g} are needed."
            )
        if (
            discrete_gaussian.wraps(reach * steps + self.clients, variance, self.clients, how.dimension)
            > quantization.WRAPS
        ):
            raise SordinoError("noise: the sums leave the range of integers too often; use untrusted-server.")
        return level

    def variance(self, level: QueryNoise) -> float:
        """Of the discrete noise that each client adds, in integer steps."""
        how = self.integers
        assert how is not None
        return float((level.weight * level.std).max() / level.weight.max() / level.step) ** 2 / how.honest(self.clients)

    def _relief(self, levels: list[QueryNoise], requested_epsilons: np.ndarray) -> np.ndarray:
        """What sampling leaves of the noise that the same releases of all data would need, for each client."""
        columns = [part for level in levels for part in self._columns(level)]
        accounts, which = np.unique(np.stack([*columns, requested_epsilons], 1), axis=0, return_inverse=True)
        found = np.ones(len(accounts))
        parts = [account_of.split(self._releases(levels, row[:-1]), self.privacy.adjacency) for row in accounts]
        if any(drawn for drawn, _ in parts):
            for n, (drawn, whole) in enumerate(parts):
                found[n] = subsampled.scale(drawn, accounts[n, -1], self.privacy.delta, self.privacy.adjacency, whole)
        subsampling_factor = np.minimum(found, 1.0)[which.reshape(-1)]
        return np.full(self.clients, subsampling_factor.max()) if self.only_sums_visible else subsampling_factor

    def _columns(self, level: QueryNoise, done: int | None = None) -> list[np.ndarray]:
        """Per client: how far it moves what is seen, the noise on it, the number of releases, and their rate."""
        count, factor = self._counts(level.stage, level.query, done)
        moved, seen = self._seen(level)
        rate = np.ones(self.clients)
        if self.unbounded:
            pass
        elif level.query.kind in SAMPLED and self.privacy.unit is Unit.RECORD:
            rate = account_of.coarse(self.rates)
        elif self.amplified:
            rate = np.full(self.clients, self.participation.rate(self.clients))
        return [moved * factor, seen, count, rate]

    def _releases(self, levels: Sequence[QueryNoise], account: np.ndarray) -> tuple[Release, ...]:
        kind = Sampler(self.participation.kind if self.amplified else self.sampling.kind)
        found = []
        for level, (moved, seen, count, rate) in zip(levels, account.reshape(-1, 4), strict=True):
            release = Release(level.name, float(moved), float(seen), int(count), integers=self.integers is not None)
            if count and rate < 1:  # answers about one minibatch are one release of all of them
                times, far = int(count) // level.query.joint, float(moved) * self._drawn(level.query, kind)
                release = release._replace(sensitivity=far, times=times, rate=float(rate), sampler=kind)
            found += [release] * bool(count)
        return tuple(found)

    def _drawn(self, query: Query, sampler: str) -> float:
        """The factor on a sampled release's sensitivity. By coins, a replaced term is also told from none at all: two
        terms of length C, semi-definite or not."""
        apart = query.psd and sampler == Sampler.POISSON and self.privacy.adjacency is Adjacency.REPLACE_ONE
        return math.sqrt(query.joint * (2 if apart else 1))

    def share(self, cohort: int) -> float:
        """The factor on a participant's std: its part of the summed noise, where only sums are seen."""
        return 1 / math.sqrt(max(cohort, 1)) if self.only_sums_visible else 1.0

    def std(self, stage: int, number: int) -> np.ndarray:
        """Per client, before `share`; zeros for a query that carries no noise."""
        for level in self.levels:
            if (level.stage, level.number) == (stage, number):
                return level.std
        return np.zeros(self.clients)

    def aggregate_std(self, stage: int, number: int | None = None) -> float:
        """Expected noise per coordinate on the aggregate of one query, or of the stage's first noised one."""
        mine = (level for level in self.levels if level.stage == stage and number in (None, level.number))
        level = next(mine, None)
        if level is None:
            return 0.0
        rate = self.participation.rate(self.clients)
        arriving = (level.weight * level.std) ** 2
        total = arriving.max() if self.only_sums_visible else arriving.sum() * rate
        if self.integers is not None:  # all of it, not only what is counted on
            total *= self.clients / self.integers.honest(self.clients)
        return float(math.sqrt(total)) / rate

    def summed_noise(self) -> tuple[float, float]:
        """(std of a cohort's summed noise, largest std of one client), over the clip of the first noised query."""
        level = self.levels[0]
        own = self.own_std(level) / level.scale
        return float(math.sqrt(self.senders(level.query) * (own**2).mean())), float(own.max())

    def senders(self, query: Query) -> float:
        """Expected number of clients whose noise a round adds up: the cohort, or everyone for a common stream; under
        secure aggregation those whose noise is counted on."""
        if self.integers is not None:
            return self.integers.honest(self.clients)
        common = self.only_sums_visible and carries(query.noise)
        return self.clients * (1.0 if common else self.participation.rate(self.clients))

    def own_std(self, level: QueryNoise) -> np.ndarray:
        """What each client itself adds, in a cohort of the expected size; of a stream, to one number of it."""
        return np.asarray(level.std / (math.sqrt(self.senders(level.query)) if self.only_sums_visible else 1.0))

    def facts(self, stage: int) -> Facts:
        rate = self.participation.rate(self.clients)
        return Facts(
            clients=self.clients,
            sizes=np.asarray(self.sizes if self.privacy.unit is Unit.RECORD else ()),
            rounds=self.stage_rounds[stage],
            cohort=rate * self.clients,
            aggregate_std=self.aggregate_std(stage),
        )

    # ------------------------------------------------------------------------------------------------ the account

    def _seen(self, level: QueryNoise) -> tuple[np.ndarray, np.ndarray]:
        """(sensitivity, std) of what the adversary sees of each client, in units of a clipped sum."""
        if not self.only_sums_visible:
            return level.sensitivity, level.std
        heaviest = level.weight.max()
        std = (level.weight * level.std).max() / heaviest
        moved = level.sensitivity * level.weight / heaviest
        if self.integers is not None:
            moved = level.step * self.integers.rounded(moved / level.step)
        return moved, np.full(self.clients, std)

    def groups(self, done: int | None = None) -> tuple[Group, ...]:
        """Clients with equal accounts, after `done` rounds (default: the whole plan)."""
        columns = [part for level in self.levels for part in self._columns(level, done)]
        accounts, which = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
        groups = []
        for g, account in enumerate(accounts):
            members = np.flatnonzero(which.reshape(-1) == g)
            releases = self._releases(self.levels, account)
            sizes = [self.sizes[i] for i in members]
            groups.append(Group(tuple(members.tolist()), (min(sizes), max(sizes)), releases, account_of.mu(releases)))
        return tuple(groups)

    def epsilon_of(self, group: Group, delta: float | None = None) -> float:
        return account_of.epsilon(group.releases, delta or self.privacy.delta, self.privacy.adjacency)

    def worst(self, done: int | None = None) -> Group:
        """Of the clients worst off."""
        return max(self.groups(done), key=self.epsilon_of)

    def spending(self) -> np.ndarray:
        """mu of the client worst off after each round, where nothing is sampled."""
        return np.asarray(np.sqrt(self._squares))

    @cached_property
    def _squares(self) -> np.ndarray:
        squares = np.zeros(self.clients)
        path = np.zeros(self.rounds)
        for t, cohort in enumerate(self.cohorts):
            for level in self.levels:
                if level.stage == self.stage_of(t):
                    squares[cohort] += self._increment(level, t)[cohort]
            path[t] = squares.max()
        return path

    def _increment(self, level: QueryNoise, t: int) -> np.ndarray:
        """What round t adds to a participant's mu squared. A stream pays for what each round adds to it."""
        moved, seen = self._seen(level)
        with np.errstate(divide="ignore"):
            ratio = (moved / seen) ** 2
        if not isinstance(level.query.noise, Correlated):
            return np.asarray(ratio * level.query.calls)
        before, after = (self._counts(level.stage, level.query, done)[1] for done in (t, t + 1))
        return np.asarray(ratio * np.maximum(after**2 - before**2, 0))

    def mu(self, done: int | None = None) -> float:
        """Of the client worst off, after `done` rounds."""
        return max(group.mu for group in self.groups(done))

    def epsilon(self, done: int | None = None) -> float:
        return self.epsilon_of(self.worst(done))

    def spent(self, t: int) -> float:
        """Epsilon of the client worst off once round t is over."""
        if self.samples:
            return float(self._path[t])
        if self.integers is not None:
            return discrete_gaussian.epsilon(float(self._squares[t]) / 2, self.privacy.delta, t + 1)
        return gaussian.epsilon(float(self._squares[t]) ** 0.5, self.privacy.delta)

    @cached_property
    def samples(self) -> bool:
        """Some release is about a random part of the data, and paid for as such."""
        return any((self._columns(level)[3] < 1).any() for level in self.levels)

    @cached_property
    def _path(self) -> np.ndarray:
        """Epsilon after each round of the clients worst off: of equal clients, those that came most often so far."""
        whole = [self._path_of(group) for group in self.groups() if group.releases]
        return np.asarray(np.minimum(np.max(whole, 0), self.epsilon()))

    def _path_of(self, group: Group) -> np.ndarray:
        drawn, counts, squares = list[Sampled](), list[np.ndarray](), np.zeros(self.rounds)
        levels = {level.name: level for level in self.levels}
        for release in group.releases:
            level = levels[release.query]
            first, rounds = sum(self.stage_rounds[: level.stage]), self.stage_rounds[level.stage]
            came = np.ones((rounds, 1), bool) if self.amplified else self.taken(level.stage)[:, list(group.clients)]
            times = np.zeros(self.rounds, dtype=int)
            times[first : first + rounds] = came.cumsum(0).max(1) * level.query.calls
            times = np.maximum.accumulate(times)
            more, mu = account_of.split([release._replace(times=1)], self.privacy.adjacency)
            drawn += more
            counts += [times // level.query.joint] * len(more)
            squares += mu**2 * times
        if not drawn:
            return np.array([gaussian.epsilon(float(mu), self.privacy.delta) for mu in np.sqrt(squares)])
        return subsampled.path(drawn, np.stack(counts, 1), self.privacy.delta, self.privacy.adjacency, np.sqrt(squares))

    def entries(self, client: int, t: int, run_id: str) -> list[Entry]:
        """What client pays for round t, one ledger row a query."""
        stage = self.stage_of(t)
        rows = []
        for level in self.levels:
            if level.stage != stage:
                continue
            moved, std = (float(value[client]) for value in self._seen(level))
            calls, joint = level.query.calls, level.query.joint
            rate = float(self._columns(level)[3][client])
            if rate < 1:
                kind = Sampler(self.participation.kind if self.amplified else self.sampling.kind)
                release = Release(level.name, moved * self._drawn(level.query, kind), std, calls // joint, rate, kind)
                rows.append(Entry.of(release, f"client {client}", t, run_id, self.privacy.adjacency))
                continue
            sensitivity = std * math.sqrt(self._increment(level, t)[client] / calls) if std else moved
            drawn = DISCRETE if self.integers is not None else ""
            rows.append(Entry(f"client {client}", t, level.name, sensitivity, std, calls, run_id, sampler=drawn))
        return rows


def _check_stage(name: str, stage: Stage, unit: Unit) -> None:
    """An answer that is not noised must end in a message that is: otherwise data would leave in the clear."""
    delta = [q for q in stage.queries if q.kind is Kind.DELTA]
    if len(delta) > 1 or any(q.noise is None or q.calls != 1 for q in delta):
        raise SordinoError(f"{name}: a stage has at most one DELTA query; it is noised, and called once.")
    if not delta and any(q.noise is None for q in stage.queries):
        raise SordinoError(f"{name}: an answer without noise needs a noised DELTA query for the message built from it.")
    if delta and any(q.noise is not None for q in stage.queries if q.kind is not Kind.DELTA):
        raise SordinoError(f"{name}: noise the answers or the message, not both.")
    if unit is Unit.USER and not delta:
        raise SordinoError(f"{name}: a user moves an answer once a record; noise the message (DELTA) instead.")
    if len({q.kind for q in stage.queries}) < len(stage.queries):
        raise SordinoError(f"{name}: one query of a kind per stage; raise its calls instead.")
    streams = [q for q in stage.queries if isinstance(q.noise, Correlated | Stream)]
    if any(q.joint < 1 or q.calls % q.joint for q in stage.queries):
        raise SordinoError(f"{name}: a query's calls must be a multiple of those that share a minibatch (joint).")
    if any(q.calls != 1 for q in streams) or (streams and stage.local.prepare is not nothing):
        raise SordinoError(f"{name}: a correlated query is called once a round, by clients without a cache of data.")


def _over(stage: Stage, rounds: int) -> Stage:
    queries = tuple(replace(q, noise=q.noise.over(rounds)) if isinstance(q.noise, Stream) else q for q in stage.queries)
    for query in queries:
        if isinstance(query.noise, Correlated):
            _check_factors(query.noise, rounds)
    return stage._replace(queries=queries)


def _check_factors(noise: Correlated, rounds: int) -> None:
    """The stream is a function of `encoder @ x + z`, and each release of what is known by then: else it is not paid."""
    if min(noise.encoder.shape[1], len(noise.decoder)) < rounds:
        raise SordinoError(f"rounds: the noise was factorised for {len(noise.decoder)} rounds, not {rounds}.")
    encoder, decoder = noise.encoder[:, :rounds], noise.decoder[:rounds]
    if not np.allclose(decoder @ encoder, np.eye(rounds), atol=1e-8):
        raise SordinoError("noise: decoder @ encoder must be the identity, or the stream costs more than is counted.")
    uses, holds = ((np.abs(factor) > 1e-9).astype(float) for factor in (decoder, encoder))
    if np.triu(uses @ holds, 1).any():
        raise SordinoError("noise: a release uses noise of rounds that come after it; make the factors causal.")


def _shares(given: list[float | None], releases: np.ndarray) -> np.ndarray:
    """Parts of mu squared; what is not given divides the rest in proportion to releases.

    The method's declaration is checked as it stands, whatever the schedule drew. A query without releases (the schedule
    drew nobody for its stage) spends nothing: its part goes to the others, so that the parts spent add up to one.
    """
    total = sum(share for share in given if share is not None)
    left_open = any(share is None for share in given)
    if total > 1 + 1e-9 or (left_open and total >= 1) or (given and not left_open and abs(total - 1) > 1e-9):
        raise SordinoError(f"share: the parts of the budget add up to {total:g}; they must add up to 1.")
    if not releases.any():
        return np.ones(len(given))
    free = np.array([count if share is None else 0.0 for share, count in zip(given, releases, strict=True)])
    rest = (1 - total) * free / max(free.sum(), 1)
    shares = np.array([share if share is not None else rest[i] for i, share in enumerate(given)])
    spent = releases > 0
    if shares[spent].sum() < 1 - 1e-9:
        shares = np.where(spent, shares / shares[spent].sum(), 0.0)
    return shares
