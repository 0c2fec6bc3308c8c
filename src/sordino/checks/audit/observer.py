"""Runs of a method under observation: what was released, and what either of two neighbours would have released.

The observer wraps the local rules of any method. Engine, clips, minibatches and noise are those that ship, in the dtype
of the records. The observer itself computes in float64.

Minibatches: the observer computes the answer about all records. That is enough if the canary has the only gradient that
is not zero: the answer about a minibatch is then the same if the canary is in it, and zero otherwise. It is also enough
for minibatches of a fixed size if all other records have one and the same gradient, and data set 0 holds no others
(`Attack.opposed`): then that gradient follows from the answer about data set 0. A finished message is not zero without
the canary, so the observer computes it for the data without it as well (`Attack.without`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.fixtures import Through
from sordino.core import SAMPLED, Adjacency, Broadcast, Kind, Local, Method, Shard, Stage, Tree, keep
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.engines.oracle import Oracle
from sordino.errors import SordinoError
from sordino.privacy import calibration
from sordino.privacy.mechanisms.gaussian import Draw
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.mechanisms.random import SharedDraws, Source
from sordino.privacy.plan import Plan
from sordino.tree import leaves, tree_map

VICTIM = 0  # the client in whose data the neighbours differ


@dataclass(frozen=True)
class AttackedRecords(Records):
    """A federation in which some of the victim's records may be absent. The declared sizes stay the same."""

    present: Tensor | None = None  # 1 or 0 for each of the victim's records

    def buckets(self, cohort: np.ndarray) -> list[tuple[np.ndarray, Shard]]:
        buckets = super().buckets(cohort)
        if self.present is not None:
            for clients, shard in buckets:
                for row in np.flatnonzero(clients == VICTIM):
                    shard.mask[row, : len(self.present)] *= self.present.to(shard.mask)
        return buckets

    def picked(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> Shard:
        """An absent record leaves an empty slot in a minibatch."""
        if self.present is not None:
            absent = np.flatnonzero(self.present.numpy() == 0)
            drawn = zip(clients, rows, strict=True)
            rows = [np.where(np.isin(at, absent), -1, at) if client == VICTIM else at for client, at in drawn]
        return super().picked(clients, rows)


class Attack(NamedTuple):
    """A plan, and two neighbouring data sets to tell apart."""

    name: str
    plan: Plan
    model: core.Model
    neighbours: tuple[AttackedRecords, AttackedRecords]
    leaves: bool = False  # in data set 0 the whole victim is absent: it sends noise alone
    opposed: bool = False  # all records except the canary have one gradient, which is not zero
    without: AttackedRecords | None = None  # the data without the canary, of messages about minibatches


class ObservedRelease(NamedTuple):
    """One release, in float64."""

    released: Tensor
    zero: Tensor  # what data set 0 would release without noise
    one: Tensor  # the same for data set 1
    variance: float  # of the noise
    without: Tensor | None = None  # what would be released without noise if the canary is not in the minibatch

    @property
    def residual(self) -> Tensor:
        return self.released - (self.zero + self.one) / 2

    @property
    def gap(self) -> Tensor:
        return self.one - self.zero

    def sampled_score(self, rate: float, drawn: Tensor | float = 0.0, everything: Tensor | float = 0.0) -> Tensor:
        """The log likelihood ratio if the canary is in the minibatch with chance `rate`.

        Args:
          rate: the chance.
          drawn: the answer about a minibatch without the canary.
          everything: the answer about all records if the canary were like the others.
        """
        logs = []
        for answer in (self.zero, self.one):
            sent = answer - everything  # what the canary, or its empty place, changes
            tilt = ((self.released - drawn) * sent - sent.square() / 2).flatten(1).sum(-1) / self.variance
            logs.append(torch.logaddexp(tilt + math.log(rate), torch.full_like(tilt, math.log1p(-rate))))
        return logs[1] - logs[0]


def watched(
    attack: Attack,
    side: int,
    source: Source,
    runs: int,
    noise_factor: float = 1.0,
    *,
    records: AttackedRecords | None = None,
) -> Watch:
    """Observe runs of data set `side`, or of `records` between the two neighbours."""
    watch, sources = Watch(attack, side), SharedDraws(source.fresh(), runs, noise_factor).rows()
    records = attack.neighbours[side] if records is None else records
    theta = attack.model.init().to(records.x).expand(runs, -1).clone()
    plan = replace(attack.plan, method=watch.method())
    for round_plan in simulate.run(plan, attack.model, records, sources, theta=theta, shares=True):
        watch.observe_sum(plan.stage_of(round_plan.t), round_plan.aggregate)
    return watch


class WatchedMemory(NamedTuple):
    """A client's memory, with the client's number beside it."""

    inner: Tree
    number: Tensor


class Watch:
    """Observes the releases of one data set, and computes what either neighbour would release before noise."""

    def __init__(self, attack: Attack, side: int) -> None:
        self.attack, self.plan, self.side = attack, attack.plan, side
        self.streams: dict[tuple[int, int], list[ObservedRelease]] = {}
        self._caches: dict[tuple[int, int, bytes], Tree] = {}
        self._counts: dict[tuple[int, int, bytes], int] = {}
        self._sums: dict[int, Tensor] = {}  # per query of this round: the sums of both neighbours before noise
        self._summed: list[int] = []  # the queries that the parts of a sum answer
        alone = np.arange(self.plan.clients) == VICTIM
        self.weights = self.plan.weights if self.plan.only_sums_visible else alone.astype(float)

    def method(self) -> Method:
        """The method with observed local rules."""
        method = self.plan.method
        return method._replace(stages=tuple(self._stage(s, stage) for s, stage in enumerate(method.stages)))

    def score(self) -> Tensor:
        """The log likelihood ratio of each run."""
        whole = {key: stream for key, stream in self.streams.items() if self._rate(*key) == 1}
        parts = [terms.flatten(1).sum(-1) for terms, _ in self.terms(whole)]
        parts += [
            release.sampled_score(self._rate(*key), *self._others(*key, release))
            for key in self.streams.keys() - whole
            for release in self.streams[key]
        ]
        return torch.stack(parts).sum(0)

    def information(self) -> Tensor:
        """The mu² of each run; with minibatches, as if each held all records."""
        return torch.stack(list(self.informations().values())).sum(0)

    def informations(self) -> dict[tuple[int, int], Tensor]:
        """The mu² by noised query: (stage, number of the query) -> one value per run."""
        squares = [squares.flatten(1).sum(-1) for _, squares in self.terms()]
        return dict(zip(self.streams, squares, strict=True))

    def terms(
        self, streams: Mapping[tuple[int, int], list[ObservedRelease]] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For every stream of releases: residual * gap / variance and gap * gap / variance.

        Both are summed over rounds, entry by entry. Correlated noise is whitened first, by a triangular matrix, so that
        no round depends on a later one.
        """
        for (s, number), stream in (self.streams if streams is None else streams).items():
            residual, gap = (torch.stack(parts) for parts in zip(*((r.residual, r.gap) for r in stream), strict=True))
            noise = self.plan.stages[s].queries[number].noise
            if (mixing := mechanism_of(noise).mixing(len(stream))) is not None:
                matrix = torch.from_numpy(mixing)
                factor = torch.linalg.inv(torch.linalg.cholesky(matrix @ matrix.T))
                residual, gap = (torch.tensordot(factor, part, 1) for part in (residual, gap))
            weighed = gap / gap.new_tensor([release.variance for release in stream]).view(-1, *[1] * (gap.dim() - 1))
            yield (residual * weighed).sum(0), (gap * weighed).sum(0)

    def observe_sum(self, s: int, aggregate: Tree) -> None:
        """Observe the noised sum of a round, if the adversary sees only sums."""
        for number, leaf in zip(self._summed, leaves(aggregate), strict=False):
            zero, one, *without = self._sums[number]
            variance = calibration.aggregate_std(self.plan, s, number) ** 2
            release = ObservedRelease(leaf.double(), zero, one, variance, *without)
            self.streams.setdefault((s, number), []).append(release)
        self._sums, self._summed = {}, []

    # ---------------------------------------------------------------------------------------------------- internals

    def _rate(self, s: int, number: int) -> float:
        """The chance that the canary is in the minibatch of this query; 1 without minibatches."""
        return float(self.plan.rates[VICTIM]) if self.plan.stages[s].queries[number].sampled else 1.0

    def _others(self, s: int, number: int, release: ObservedRelease) -> tuple[Tensor | float, Tensor | float]:
        """The answers about a minibatch and about all records, if all of them are like those beside the canary."""
        if release.without is not None:
            return release.without, release.without
        if not self.attack.opposed:
            return 0.0, 0.0
        sizes = np.asarray(self.plan.sizes, dtype=float)
        weights = self.weights / self._divisor(s, number, np.arange(self.plan.clients))
        absent = self.plan.privacy.adjacency is Adjacency.ADD_REMOVE
        one = release.zero / float((weights * sizes).sum() - absent * weights[VICTIM])  # a record of weight 1
        return one * float((weights * sizes * self.plan.rates).sum()), one * float((weights * sizes).sum())

    def _divisor(self, s: int, number: int, clients: np.ndarray) -> np.ndarray:
        """The divisor of the clients' sums: the actual or expected number of records of an answer."""
        sizes, sampled = np.asarray(self.plan.sizes, dtype=float), self.plan.stages[s].queries[number].kind in SAMPLED
        return np.asarray((sizes * self.plan.rates if sampled else sizes)[clients])

    def _stage(self, s: int, stage: Stage) -> Stage:
        """The stage with observed rules. Clients also remember their number, so that the observer knows them."""
        local = stage.local

        def init(theta: Tensor, before: Tree) -> WatchedMemory:
            number = torch.arange(self.plan.clients).to(theta).view(1, -1, 1).expand(*theta.shape[:-1], 1)
            inner = before.inner if isinstance(before, WatchedMemory) else ()
            return WatchedMemory(local.init(theta, inner), number)

        def update_memory(message: Tree, broadcast: Broadcast, memory: WatchedMemory) -> WatchedMemory:
            return memory._replace(inner=local.update_memory(message, broadcast, memory.inner))

        def compute(ask: Any, broadcast: Broadcast, memory: WatchedMemory, cache: Tree) -> Tree:
            clients = memory.number[0, :, 0].long().cpu().numpy()
            return self._compute(s, local, clients, ask, broadcast, memory.inner, cache)

        update = keep if local.update_memory is keep else update_memory
        return stage._replace(local=local._replace(compute=compute, update_memory=update, init=init))

    def _compute(
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
        noiseless = [self._noiseless(s, clients, ask, side) for side in (0, 1)]

        def observe(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            answer = method(*args, **kwargs)
            for other in noiseless if kwargs.get("on") is not None else ():
                other.sample()  # all records
            either = [getattr(other, name)(*args, **kwargs) for other in noiseless]
            self._note(s, released[name], clients, answer, either, self._divisor(s, released[name], clients))
            return answer

        message: Tree = local.compute(Through(ask, released, observe), broadcast, memory, cache)
        self._summed = ask.released(message) if self.plan.only_sums_visible else []
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
        """Observe a finished message, which the oracle noises as a whole."""
        message: Tensor = local.compute(ask, broadcast, memory, cache)
        either = []
        extras, stored = broadcast.extras, memory
        if any(query.bound is not None for query in self.plan.stages[s].queries):  # answers of a lemma are float64
            extras, stored = tree_map(lambda leaf: leaf.double(), (extras, stored))
        for side in range(2 if self.attack.without is None else 3):
            noiseless = self._noiseless(s, clients, ask, side)
            with_std = Through(noiseless, ("std",), lambda name, _, *args: ask.std(*args))
            unnoised = local.compute(
                with_std, broadcast._replace(extras=extras), stored, self._cache(s, local, clients, ask, side)
            )
            finished: Any = noiseless.finish(unnoised)
            either.append(self._without_absent(finished, clients, side))
        if self.plan.only_sums_visible:
            finish, self._summed = ask.finish, [number]
            ask.finish = lambda message: self._without_absent(finish(message), clients, self.side)
            self._note(s, number, clients, message, either, np.ones(len(clients)))
            return message
        noised = ask._noised

        def observe(message: Tensor, *where: int) -> Tensor:
            sent: Tensor = noised(self._without_absent(message, clients, self.side), *where)
            self._note(s, number, clients, sent, either, np.ones(len(clients)))
            return sent

        ask._noised = observe
        return message

    def _without_absent(self, message: Tensor, clients: np.ndarray, side: int) -> Tensor:
        """The messages, with zeros for a victim that is absent."""
        absent = torch.from_numpy(clients == VICTIM) & (self.attack.leaves and side == 0)
        return message.masked_fill(absent.to(message.device).unsqueeze(-1), 0)

    def _noiseless(self, s: int, clients: np.ndarray, ask: Any, side: int, *, preparing: bool = False) -> Oracle:
        """The oracle of the same clients without noise, with the data of side 0 or 1, or (2) without the canary."""
        records = self.attack.without if side == 2 and self.attack.without else self.attack.neighbours[side]
        ((_, shard),) = records.buckets(clients)
        stage = self.plan.stages[s]

        def never(*_: Any) -> Draw:
            raise SordinoError("audit: a local rule draws random numbers that the observer cannot repeat.")

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

    def _cache(self, s: int, local: Local, clients: np.ndarray, ask: Any, side: int) -> Tree:
        key = (s, side, clients.tobytes())
        if key not in self._caches:
            self._caches[key] = local.prepare(self._noiseless(s, clients, ask, side, preparing=True))
        return self._caches[key]

    def _note(
        self, s: int, number: int, clients: np.ndarray, sent: Tensor, either: list[Tensor], divisor: np.ndarray
    ) -> None:
        """Store what the adversary sees of one release: the victim's part, or the weighted sum of all clients."""
        weight = self.weights[clients]
        std = (calibration.client_std(self.plan, s, number) * calibration.noise_share(self.plan, self.plan.clients))[
            clients
        ] / divisor
        shaped = torch.from_numpy(weight).to(either[0].device).view(-1, *[1] * (sent.dim() - 2))

        def seen(part: Tensor) -> Tensor:
            return (shaped * part.double().expand(sent.shape)).sum(1)

        each = [seen(part) for part in either]
        if self.plan.only_sums_visible:  # what is sent may be the form of an answer
            sums = torch.stack(each)
            self._sums[number] = self._sums[number] + sums if number in self._sums else sums
            return
        zero, one, *without = each
        release = ObservedRelease(seen(sent), zero, one, float(((weight * std) ** 2).sum()), *without)
        key, stream = (s, number, clients.tobytes()), self.streams.setdefault((s, number), [])
        number_of_call = self._counts[key] = self._counts.get(key, -1) + 1
        if number_of_call < len(stream):  # another batch of clients in the same round
            past = stream[number_of_call]
            together = None if past.without is None or release.without is None else past.without + release.without
            joined = past.released + release.released, past.zero + release.zero, past.one + release.one
            stream[number_of_call] = ObservedRelease(*joined, past.variance + release.variance, together)
        else:
            stream.append(release)
