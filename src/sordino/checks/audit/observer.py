"""Runs of a method under observation: what was released, and what either of two worlds would have released.

A method is watched by putting an observer in front of its local rules; the engine that runs it is the one that ships,
and so are its clips, its minibatches and its noise, in the dtype of the records. The observer itself computes in
float64. Nothing here knows a method by name.

Minibatches: the observer asks what all records together would have answered. That is enough where the canary's gradient
is the only one that is not zero: an answer about a minibatch is then that, or zero, by the coin of the canary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.fixtures import Through
from sordino.core import SAMPLED, Broadcast, Correlated, Kind, Local, Method, Shard, Stage, Tree, keep
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.engines.oracle import Oracle
from sordino.errors import SordinoError
from sordino.privacy import calibration
from sordino.privacy.mechanisms.gaussian import Draw
from sordino.privacy.mechanisms.random import Address, Source, is_exact
from sordino.privacy.plan import Plan
from sordino.tree import leaves, tree_map

VICTIM = 0  # the client in whose data the worlds differ


@dataclass(frozen=True)
class AttackedRecords(Records):
    """A federation in which some of the victim's records may be absent; the sizes stay as declared."""

    present: Tensor | None = None  # 1 or 0 for each of the victim's records

    def buckets(self, cohort: np.ndarray) -> list[tuple[np.ndarray, Shard]]:
        found = super().buckets(cohort)
        if self.present is not None:
            for clients, shard in found:
                for row in np.flatnonzero(clients == VICTIM):
                    shard.mask[row, : len(self.present)] *= self.present.to(shard.mask)
        return found

    def picked(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> Shard:
        """A record that is absent leaves its place in a minibatch empty."""
        if self.present is not None:
            gone = np.flatnonzero(self.present.numpy() == 0)
            mine = zip(clients, rows, strict=True)
            rows = [np.where(np.isin(at, gone), -1, at) if client == VICTIM else at for client, at in mine]
        return super().picked(clients, rows)


class Attack(NamedTuple):
    """A plan, and two worlds to tell apart."""

    name: str
    plan: Plan
    model: core.Model
    worlds: tuple[AttackedRecords, AttackedRecords]
    leaves: bool = False  # in world 0 the whole victim is gone: it sends noise alone


class Seen(NamedTuple):
    """One release: what came, what the worlds would have sent without noise, and the noise's variance. All float64."""

    said: Tensor
    zero: Tensor
    one: Tensor
    variance: float

    @property
    def residual(self) -> Tensor:
        return self.said - (self.zero + self.one) / 2

    @property
    def gap(self) -> Tensor:
        return self.one - self.zero

    def drawn(self, rate: float) -> Tensor:
        """The log likelihood ratio of an answer that is noise alone but with chance `rate`, in either world."""
        logs = []
        for sent in (self.zero, self.one):
            tilt = (self.said * sent - sent.square() / 2).flatten(1).sum(-1) / self.variance
            logs.append(torch.logaddexp(tilt + math.log(rate), torch.full_like(tilt, math.log1p(-rate))))
        return logs[1] - logs[0]


def watched(
    attack: Attack,
    world: int,
    source: Source,
    runs: int,
    noise_factor: float = 1.0,
    *,
    records: AttackedRecords | None = None,
) -> Watch:
    """Play `runs` runs of one world under observation, or of `records` that lie between the two."""
    watch, common = Watch(attack, world), Common(source.fresh(), runs, noise_factor)
    records = attack.worlds[world] if records is None else records
    theta = attack.model.init().to(records.x).expand(runs, -1).clone()
    plan = replace(attack.plan, method=watch.method())
    sources = [Row(common, r) for r in range(runs)]
    for round_plan in simulate.run(plan, attack.model, records, sources, theta=theta, shares=True):
        watch.hear(plan.stage_of(round_plan.t), round_plan.aggregate)
    return watch


class WatchedMemory(NamedTuple):
    """A client's memory, with the client's number beside it."""

    inner: Tree
    number: Tensor


class Watch:
    """Sees what is released in one world, and works out what either world would have released, before noise."""

    def __init__(self, attack: Attack, world: int) -> None:
        self.attack, self.plan, self.world = attack, attack.plan, world
        self.streams: dict[tuple[int, int], list[Seen]] = {}
        self._caches: dict[tuple[int, int, bytes], Tree] = {}
        self._counts: dict[tuple[int, int, bytes], int] = {}
        self._sums: dict[int, Tensor] = {}  # per query of this round: what the worlds would have summed up to
        self._heard: list[int] = []  # the queries that the parts of a sum answer
        alone = np.arange(self.plan.clients) == VICTIM
        self.weights = self.plan.weights if self.plan.only_sums_visible else alone.astype(float)

    def method(self) -> Method:
        """The method, with this in front of its local rules."""
        method = self.plan.method
        return method._replace(stages=tuple(self._stage(s, stage) for s, stage in enumerate(method.stages)))

    def score(self) -> Tensor:
        """The log likelihood ratio of each run."""
        whole = {key: stream for key, stream in self.streams.items() if self._rate(*key) == 1}
        parts = [terms.flatten(1).sum(-1) for terms, _ in self.terms(whole)]
        parts += [seen.drawn(self._rate(*key)) for key in self.streams.keys() - whole for seen in self.streams[key]]
        return torch.stack(parts).sum(0)

    def information(self) -> Tensor:
        """The square of mu of each run, as it went; of minibatches, as if each had held all records."""
        return torch.stack(list(self.informations().values())).sum(0)

    def informations(self) -> dict[tuple[int, int], Tensor]:
        """The same of every noised query by itself: (stage, number of the query) -> one per run."""
        squares = [squares.flatten(1).sum(-1) for _, squares in self.terms()]
        return dict(zip(self.streams, squares, strict=True))

    def terms(self, streams: Mapping[tuple[int, int], list[Seen]] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every stream of releases, entry by entry and summed over its rounds: residual x gap, and gap x gap, over
        the variance. Correlated noise is whitened first, by a triangular matrix: a round never needs a later one."""
        for (s, number), stream in (self.streams if streams is None else streams).items():
            residual, gap = torch.stack([seen.residual for seen in stream]), torch.stack([seen.gap for seen in stream])
            noise = self.plan.stages[s].queries[number].noise
            if isinstance(noise, Correlated):
                decoder = torch.from_numpy(noise.decoder[: len(stream)])
                factor = torch.linalg.inv(torch.linalg.cholesky(decoder @ decoder.T))
                residual, gap = (torch.tensordot(factor, part, 1) for part in (residual, gap))
            weighed = gap / gap.new_tensor([seen.variance for seen in stream]).view(-1, *[1] * (gap.dim() - 1))
            yield (residual * weighed).sum(0), (gap * weighed).sum(0)

    def hear(self, s: int, aggregate: Tree) -> None:
        """The sum of a round, where that is what the adversary sees: noised once."""
        for number, leaf in zip(self._heard, leaves(aggregate), strict=False):
            zero, one = self._sums[number]
            variance = calibration.aggregate_std(self.plan, s, number) ** 2
            self.streams.setdefault((s, number), []).append(Seen(leaf.double(), zero, one, variance))
        self._sums, self._heard = {}, []

    # ------------------------------------------------------------------------------------------------------- inside

    def _rate(self, s: int, number: int) -> float:
        """The chance of the canary to be in a minibatch that this query is asked about; 1 where there is none."""
        sampled = self.plan.stages[s].queries[number].kind in SAMPLED
        return float(self.plan.rates[VICTIM]) if sampled else 1.0

    def _divisor(self, s: int, number: int, clients: np.ndarray) -> np.ndarray:
        """Of the clients' sums: the records that an answer is about, or is expected to be."""
        sizes, sampled = np.asarray(self.plan.sizes, dtype=float), self.plan.stages[s].queries[number].kind in SAMPLED
        return np.asarray((sizes * self.plan.rates if sampled else sizes)[clients])

    def _stage(self, s: int, stage: Stage) -> Stage:
        """Clients remember their number besides, so that the observer knows whom it sees."""
        local = stage.local

        def init(theta: Tensor, before: Tree) -> WatchedMemory:
            number = torch.arange(self.plan.clients).to(theta).view(1, -1, 1).expand(*theta.shape[:-1], 1)
            inner = before.inner if isinstance(before, WatchedMemory) else ()
            return WatchedMemory(local.init(theta, inner), number)

        def update_memory(message: Tree, broadcast: Broadcast, memory: WatchedMemory) -> WatchedMemory:
            return memory._replace(inner=local.update_memory(message, broadcast, memory.inner))

        def compute(ask: Any, broadcast: Broadcast, memory: WatchedMemory, cache: Tree) -> Tree:
            clients = memory.number[0, :, 0].long().cpu().numpy()
            return self._work(s, local, clients, ask, broadcast, memory.inner, cache)

        kept = keep if local.update_memory is keep else update_memory
        return stage._replace(local=local._replace(compute=compute, update_memory=kept, init=init))

    def _work(
        self, s: int, local: Local, clients: np.ndarray, ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree
    ) -> Tree:
        released = {
            str(query.kind): k for k, query in enumerate(self.plan.stages[s].queries) if query.noise is not None
        }
        if not self.weights[clients].any():
            unweighted: Tree = local.compute(ask, broadcast, memory, cache)
            return unweighted
        if Kind.DELTA in released:
            return self._message(s, released[Kind.DELTA], local, clients, ask, broadcast, memory, cache)
        noiseless = [self._noiseless(s, clients, ask, world) for world in (0, 1)]

        def heard(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            answer = method(*args, **kwargs)
            for other in noiseless if kwargs.get("on") is not None else ():
                other.sample()  # all records
            either = [getattr(other, name)(*args, **kwargs) for other in noiseless]
            self._note(s, released[name], clients, answer, either, self._divisor(s, released[name], clients))
            return answer

        message: Tree = local.compute(Through(ask, released, heard), broadcast, memory, cache)
        self._heard = ask.released(message) if self.plan.only_sums_visible else []
        return message

    def _message(
        self,
        s: int,
        number: int,
        local: Local,
        clients: np.ndarray,
        ask: Any,
        broadcast: Broadcast,
        memory: Tree,
        cache: Tree,
    ) -> Tensor:
        """A message that is noised as a whole, by the oracle once the rule has made it: overheard there."""
        message: Tensor = local.compute(ask, broadcast, memory, cache)
        either = []
        extras, kept = broadcast.extras, memory
        if any(query.bound is not None for query in self.plan.stages[s].queries):  # answers of a lemma are float64
            extras, kept = tree_map(lambda leaf: leaf.double(), (extras, kept))
        for world in (0, 1):
            noiseless = self._noiseless(s, clients, ask, world)
            hushed = Through(noiseless, ("std",), lambda name, _, *args: ask.std(*args))
            said = local.compute(
                hushed, broadcast._replace(extras=extras), kept, self._cache(s, local, clients, ask, world)
            )
            finished: Any = noiseless.finish(said)
            either.append(self._there(finished, clients, world))
        if self.plan.only_sums_visible:
            finish, self._heard = ask.finish, [number]
            ask.finish = lambda message: self._there(finish(message), clients, self.world)
            self._note(s, number, clients, message, either, np.ones(len(clients)))
            return message
        noised = ask._noised

        def overheard(message: Tensor, *where: int) -> Tensor:
            said: Tensor = noised(self._there(message, clients, self.world), *where)
            self._note(s, number, clients, said, either, np.ones(len(clients)))
            return said

        ask._noised = overheard
        return message

    def _there(self, message: Tensor, clients: np.ndarray, world: int) -> Tensor:
        """A victim that has left sends nothing."""
        gone = torch.from_numpy(clients == VICTIM) & (self.attack.leaves and world == 0)
        return message.masked_fill(gone.to(message.device).unsqueeze(-1), 0)

    def _noiseless(self, s: int, clients: np.ndarray, ask: Any, world: int, *, preparing: bool = False) -> Oracle:
        """The same clients' oracle in one of the worlds, without noise."""
        ((_, shard),) = self.attack.worlds[world].buckets(clients)
        stage = self.plan.stages[s]

        def never(*_: Any) -> Draw:
            raise SordinoError("audit: a rule draws in a way that the observer cannot repeat.")

        return Oracle(
            self.attack.model,
            lambda: shard,
            stage,
            sizes=shard.x.new_tensor(np.asarray(self.plan.sizes)[clients]),
            stds=[torch.zeros(len(clients), dtype=torch.float64) for _ in stage.queries],
            draw=never,
            rates=shard.x.new_tensor(self.plan.rates[clients]) if (self.plan.rates[clients] < 1).any() else None,
            facts=ask.facts,
            secret=False,
            runs=ask.runs,
            preparing=preparing,
            add_noise=False,
        )

    def _cache(self, s: int, local: Local, clients: np.ndarray, ask: Any, world: int) -> Tree:
        key = (s, world, clients.tobytes())
        if key not in self._caches:
            self._caches[key] = local.prepare(self._noiseless(s, clients, ask, world, preparing=True))
        return self._caches[key]

    def _note(
        self, s: int, number: int, clients: np.ndarray, said: Tensor, either: list[Tensor], divisor: np.ndarray
    ) -> None:
        """What the adversary sees of one release: the victim's, or the weighted sum of all."""
        weight = self.weights[clients]
        std = (calibration.client_std(self.plan, s, number) * calibration.noise_share(self.plan, self.plan.clients))[
            clients
        ] / divisor
        shaped = torch.from_numpy(weight).to(said.device).view(-1, *[1] * (said.dim() - 2))
        came, zero, one = ((shaped * part.double().expand_as(said)).sum(1) for part in (said, *either))
        if self.plan.only_sums_visible:
            sums = torch.stack([zero, one])
            self._sums[number] = self._sums[number] + sums if number in self._sums else sums
            return
        seen = Seen(came, zero, one, float(((weight * std) ** 2).sum()))
        key, stream = (s, number, clients.tobytes()), self.streams.setdefault((s, number), [])
        round_plan = self._counts[key] = self._counts.get(key, -1) + 1
        if round_plan < len(stream):  # another batch of clients in the same round
            past = stream[round_plan]
            joined = past.said + seen.said, past.zero + seen.zero, past.one + seen.one
            stream[round_plan] = Seen(*joined, past.variance + seen.variance)
        else:
            stream.append(seen)


class Common:
    """One draw of a source for all runs, cut into rows: as independent as draws of their own, and much faster."""

    def __init__(self, source: Source, runs: int, factor: float) -> None:
        self._source, self._runs, self._factor = source, runs, factor
        self._drawn: dict[Any, np.ndarray] = {}
        self._sizes: dict[Address, int] = {}
        self.private = source.private

    def rows(self, name: str, at: Address, shape: tuple[int, ...]) -> np.ndarray:
        key = (name, at, shape)
        if key not in self._drawn:
            whole = getattr(self._source, name)(at, (self._runs, *shape))
            self._sizes[at] = math.prod(shape)
            self._drawn[key] = self._factor * whole if name == "normal" else whole
        return self._drawn[key]

    def bounds(self, run: int, at: Address, element: int, words: int) -> tuple[Fraction, Fraction]:
        """Of one run's ideal normal."""
        assert is_exact(self._source)
        low, high = self._source.bounds(at, run * self._sizes[at] + element, words)
        return Fraction(self._factor) * low, Fraction(self._factor) * high

    def words(self, at: Address, count: int) -> np.ndarray:
        """A column a run, so that a longer draw of a run begins with the shorter one."""
        return self._source.words(at, self._runs * count).reshape(count, self._runs)


class Row(NamedTuple):
    """One run's part of a common source."""

    common: Common
    run: int

    @property
    def private(self) -> bool:
        return self.common.private

    def normal(self, at: Address, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.common.rows("normal", at, shape)[self.run])

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        return self.common.bounds(self.run, at, element, words)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.common.rows("uniform", at, shape)[self.run])

    def words(self, at: Address, count: int) -> np.ndarray:
        return self.common.words(at, count)[:, self.run]

    def fresh(self) -> Row:
        return self
