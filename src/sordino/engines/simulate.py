"""The fast engine: clients and runs are tensor axes. It agrees with the reference to rounding, given the same noise.

Two paths, chosen once per stage by tracing the local rule:

- *fused*: every client sends its noised gradient at the broadcast theta and nothing else. Then the cohort is one
  matrix and a round is two matrix products, whatever the number of clients.
- *batched*: anything else. Clients of like size are padded into a batch and the local rule runs once for all. At user
  level clients are served one by one: what one holds must not decide the shapes in which others are computed.

Where only sums are seen, noise is added once, to the sum. Elsewhere every client's message has its own; the sum of
independent Gaussians is one Gaussian, so where nobody reads the messages their summed noise is drawn once.
`shares=True` draws every client's own instead: slower, equal to the reference draw for draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    SAMPLED,
    Broadcast,
    Correlated,
    Facts,
    Kind,
    Model,
    Query,
    Round,
    Shard,
    SordinoError,
    Stage,
    Tree,
    Unit,
    carries,
    forget,
    keep,
    nothing,
)
from sordino.data.records import Lazy, Records
from sordino.engines.oracle import (
    MATRICES,
    SAMPLING,
    Oracle,
    RoundPlan,
    along,
    check_stream,
    noised,
    places,
    round_plans,
    seed_of,
    standard,
)
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import EVERYONE, Address, Counted, Draw, Source, counted, stack
from sordino.privacy.plan import Plan
from sordino.tree import tree_map

AHEAD = 16  # rounds whose noise is drawn at once, where a source can


def run(
    plan: Plan | Sequence[Plan],
    model: Model,
    records: Records | Lazy,
    source: Source | Sequence[Source],
    *,
    theta: Tensor | None = None,
    shares: bool = False,
    start: int = 0,
    checkpoint: Tree = (),
) -> Iterator[Round]:
    """Yield after every round. To resume, pass the next round's number and the last round's checkpoint.

    A leading axis of `theta` holds runs, several trainings at once, each with its own source; they share the data, or
    have their own where the records too have that axis. They also share the plan, or have one each, alike in all but
    noise; what differs in their methods is in the first plan's method, as tensors with that axis (see `many`).
    """
    plans, plan = (list(plan), plan[0]) if isinstance(plan, Sequence) else ([plan], plan)
    if plan.integers is not None:
        raise SordinoError("integers: the reference engine adds them up; this one knows real numbers alone.")
    records.check_fits(model)
    theta = (model.init() if theta is None else theta).to(records.x)
    state: Tree = ()
    memory: Tree = ()
    if checkpoint:
        theta, state, memory = tree_map(lambda leaf: leaf.to(records.x), checkpoint)
    sources = [each.fresh() for each in (source if isinstance(source, Sequence) else [source])]
    if len(sources) != (len(theta) if theta.dim() > 1 else 1):
        raise SordinoError(f"source: {len(sources)} for theta of shape {tuple(theta.shape)}; every run needs its own.")
    if 0 < start < plan.rounds:
        for each in sources:
            check_stream(plan, start, each)
    batched_clients = BatchedClients(plan, model, records, sources, theta.dim() - 1)
    for round_plan in round_plans(plan, model, start) if len(plans) == 1 else together(plans, model, start):
        local, rule = round_plan.stage.local, round_plan.stage.rule
        if round_plan.t == round_plan.first:
            state = rule.init(theta, round_plan.facts, state)
            memory = local.init(batched_clients.spread(theta), memory)
        if round_plan.t in (round_plan.first, start):
            fused = only_asks_for_the_gradient(round_plan.stage, Broadcast(theta, rule.broadcast(state)))
            caches = batched_clients.prepare(round_plan)
        aggregate: Tree = ()
        if len(round_plan.cohort) or (round_plan.once and plan.amplified):
            broadcast = Broadcast(theta, rule.broadcast(state))
            records.keep(round_plan.cohort)
            if fused:
                aggregate = batched_clients.fused(round_plan, theta, shares)
            else:
                aggregate, memory = batched_clients.batched(round_plan, broadcast, memory, caches, shares)
            step, state = rule.update(aggregate, state, theta, round_plan.step)
            theta = theta + step
        yield Round(round_plan.t, rule.model(theta, state), round_plan.cohort, aggregate, (theta, state, memory))


def together(plans: Sequence[Plan], model: Model, start: int) -> Iterator[RoundPlan]:
    """The first plan's rounds, with the noise of each: stds and the aggregate's get a leading axis of runs."""
    stds: dict[int, list[np.ndarray]] = {}
    sums: dict[int, list[np.ndarray]] = {}
    facts: dict[int, Facts] = {}
    for round_plan in round_plans(plans[0], model, start):
        if round_plan.first not in stds:
            s, queries = plans[0].stage_of(round_plan.t), range(len(round_plan.stage.queries))
            stds[round_plan.first] = [np.stack([calibration.client_std(p, s, k) for p in plans]) for k in queries]
            sums[round_plan.first] = [np.array([calibration.aggregate_std(p, s, k) for p in plans]) for k in queries]
            width = torch.tensor([[calibration.aggregate_std(plan, s)] for plan in plans], dtype=torch.float64)
            facts[round_plan.first] = replace(round_plan.facts, aggregate_std=width)
        own = [calibration.noise_share(plans[0], len(round_plan.cohort)) * std for std in stds[round_plan.first]]
        yield round_plan._replace(facts=facts[round_plan.first], stds=own, sums=sums[round_plan.first])


def only_asks_for_the_gradient(stage: Stage, broadcast: Broadcast) -> bool:
    """Trace the rule with a stand-in for its data: does it send the noised gradient at the broadcast theta as it is?"""
    local, answer, asked = stage.local, torch.zeros_like(broadcast.theta), list[Tensor]()

    class Elsewhere(Exception):  # noqa: N818
        pass

    class Probe:
        def gradient(self, at: Tensor, on: Any = None, scale: Any = None) -> Tensor:
            if at is not broadcast.theta or on is not None or scale is not None or asked:
                raise Elsewhere
            asked.append(at)
            return answer

        def __getattr__(self, name: str) -> Any:
            raise Elsewhere

    if local.init is not forget or local.update_memory is not keep or local.prepare is not nothing:
        return False
    if [query.kind for query in stage.queries] != [Kind.GRADIENT]:
        return False
    try:
        return local.compute(Probe(), broadcast, (), ()) is answer
    except Elsewhere:
        return False


class BatchedClients:
    """All clients at once. The client axis comes after the run axis, if there is one."""

    def __init__(self, plan: Plan, model: Model, records: Records | Lazy, sources: list[Source], lead: int) -> None:
        self.plan, self.model, self.records, self.sources, self.lead = plan, model, records, sources, lead
        self.secret = any(source.private for source in sources)
        self.worlds = records.x.dim() - 2  # axes of the data before its clients: 1 where every run has its own
        self.everyone = np.arange(plan.clients)
        self.influence = plan.weights / plan.participation.rate(plan.clients)  # of a client's message
        self._known: dict[bytes, Tensor] = {}
        self._captured: dict[float, Captured] = {}
        self._ahead: tuple[tuple[int, ...], Tensor] = ((), torch.zeros(0))

    @cached_property
    def _whole(self) -> list[tuple[np.ndarray, Any]]:
        return self._held(self.everyone)

    @cached_property
    def _matrix(self) -> Any:
        return self.records.fused(self.everyone, self._per_record / self._per_record.max())

    @cached_property
    def _per_record(self) -> np.ndarray:
        """How far one record's clipped gradient moves the aggregate."""
        return np.asarray(self.influence / (np.asarray(self.plan.sizes) * self.plan.rates))

    def spread(self, theta: Tensor) -> Tensor:
        """One copy of theta a client."""
        return theta.unsqueeze(-2).expand(*theta.shape[:-1], self.plan.clients, theta.shape[-1])

    def prepare(self, round_plan: RoundPlan) -> Tree:
        """Every client's cache, stacked in order of clients."""
        if round_plan.stage.local.prepare is nothing:
            return ()
        parts = [round_plan.stage.local.prepare(self._oracle(round_plan, c, s, preparing=True)) for c, s in self._whole]
        order = torch.from_numpy(np.argsort(np.concatenate([clients for clients, _ in self._whole])))
        order, axis = order.to(self.records.x.device), self.worlds
        return tree_map(lambda *leaf: torch.cat(leaf, axis).index_select(axis, order), *parts)

    def fused(self, round_plan: RoundPlan, theta: Tensor, shares: bool) -> Tensor:
        """The weighted sum of all noised gradients, from one matrix."""
        if not len(round_plan.cohort):
            return self._noised(theta.new_zeros(theta.shape), round_plan, 0, self._per_record, shares)
        heaviest = self._per_record.max()
        full = len(round_plan.cohort) == self.plan.clients and not self._samples(round_plan.cohort)
        if self._samples(round_plan.cohort):
            shard = self._strung(round_plan, round_plan.cohort, self._per_record / heaviest)
        else:
            shard = self._matrix if full else self.records.fused(round_plan.cohort, self._per_record / heaviest)
        clip = round_plan.stage.queries[0].clip
        if full and theta.is_cuda and theta.dim() == 2 and not self.worlds and getattr(self.model, "plain", False):
            if clip not in self._captured:
                self._captured[clip] = Captured(lambda at: self.model.clipped_sum(at, shard, clip), theta)
            total: Tensor = heaviest * self._captured[clip](theta)
        else:
            total = heaviest * self.model.clipped_sum(theta, shard, clip)
        return self._noised(total, round_plan, 0, self._per_record, shares)

    def batched(
        self, round_plan: RoundPlan, broadcast: Broadcast, memory: Tree, caches: Tree, shares: bool
    ) -> tuple[Tree, Tree]:
        """The weighted sum of messages, from padded batches of clients."""
        local, lead = round_plan.stage.local, self.lead
        near = tree_map(lambda leaf: leaf.unsqueeze(lead), tuple(broadcast))
        delta = any(query.kind is Kind.DELTA for query in round_plan.stage.queries)
        once = round_plan.once or (delta and local.update_memory is keep and not shares)
        empty = not len(round_plan.cohort)  # that nobody came must not be seen: noise alone is released
        buckets = self._buckets(round_plan) if not empty else self.records.buckets(self.everyone[:1])
        parts, numbers = [], list[int]()
        for clients, shard in buckets:
            chosen = torch.from_numpy(clients).to(self.records.x.device)
            ask = self._oracle(round_plan, clients, shard, quiet=once)
            mine = tree_map(lambda leaf, rows=chosen: leaf.index_select(lead, rows), memory)
            cache = tree_map(lambda leaf, rows=chosen: leaf.index_select(self.worlds, rows), caches)
            message = local.compute(ask, Broadcast(*near), mine, cache)
            numbers = ask.released(message) if once else numbers
            message = ask.finish(message)
            if not once:
                after = local.update_memory(message, Broadcast(*near), mine)
                memory = tree_map(lambda old, new, rows=chosen: old.index_copy(lead, rows, new), memory, after)
            weight = self._laid(0 * self.influence[clients] if empty else self.influence[clients])
            parts.append(tree_map(lambda leaf, w=weight: _weighted(leaf, w, lead), message))
        aggregate: Tree = tree_map(lambda *leaf: sum(leaf[1:], leaf[0]), *parts)
        if once:
            number = iter(numbers)
            aggregate = tree_map(
                lambda leaf: self._noised(leaf, round_plan, next(number), self.influence, False), aggregate
            )
        return tree_map(lambda leaf: leaf.to(self.records.x), aggregate), memory

    def _buckets(self, round_plan: RoundPlan) -> list[tuple[np.ndarray, Any]]:
        """The cohort in batches of clients; what they hold only where it is not drawn anew for every question."""
        if self._only_gradients(round_plan.stage) and self._samples(round_plan.cohort):
            batches = self._batches(round_plan.cohort)
            drawn = [[(clients, None)] if self._samples(clients) else self._held(clients) for clients in batches]
            return [bucket for each in drawn for bucket in each]
        return self._whole if len(round_plan.cohort) == self.plan.clients else self._held(round_plan.cohort)

    def _batches(self, clients: np.ndarray) -> list[np.ndarray]:
        """All at once, or at user level one by one: there a client's size is its own affair."""
        return list(clients.reshape(-1, 1)) if self.plan.privacy.unit is Unit.USER else [clients]

    def _held(self, clients: np.ndarray) -> list[tuple[np.ndarray, Any]]:
        return [bucket for batch in self._batches(clients) for bucket in self.records.buckets(batch)]

    def _only_gradients(self, stage: Stage) -> bool:
        return {query.kind for query in stage.queries} <= {*SAMPLED, Kind.DELTA} and stage.local.prepare is nothing

    def _samples(self, clients: np.ndarray) -> bool:
        return bool((self.plan.rates[clients] < 1).any())

    def _picked(self, round_plan: RoundPlan, clients: np.ndarray, call: int) -> Any:
        """A minibatch of each client, runs (if any) x clients x records."""
        if self.worlds:
            raise SordinoError("batch: runs on data of their own take all records; leave batch at full.")
        rows = [
            places(source, Address(int(i), round_plan.t, SAMPLING, call), round_plan, self.records.sizes[i])
            for source in self.sources
            for i in clients
        ]
        shard = self.records.picked(np.tile(clients, len(self.sources)), rows)
        if not self.lead:
            return shard
        runs = len(self.sources)
        x, y, mask = (part.view(runs, -1, *part.shape[1:]) for part in (shard.x, shard.y, shard.mask))
        return Shard(x, y, mask, None if shard.length is None else shard.length.view(mask.shape))

    def _strung(self, round_plan: RoundPlan, clients: np.ndarray, weight: np.ndarray) -> Any:
        """Minibatches of all clients as one, each record weighted by its owner's."""
        x, y, mask, length = self._picked(round_plan, clients, 0)
        mask = mask * self._laid(weight[clients]).to(mask).unsqueeze(-1)
        return Shard(x.flatten(-3, -2), y.flatten(-2), mask.flatten(-2), None if length is None else length.flatten(-2))

    def _noised(self, total: Tensor, round_plan: RoundPlan, number: int, moved: np.ndarray, shares: bool) -> Tensor:
        """A cohort's sum with its noise: that of the sum itself, or `moved` times each client's own, drawn as one."""
        query, axes = round_plan.stage.queries[number], 2 if round_plan.stage.queries[number].kind in MATRICES else 1
        scale = (moved * round_plan.stds[number])[..., round_plan.cohort]
        std = round_plan.sums[number] if round_plan.once else np.sqrt((scale**2).sum(-1))
        if not std.any():
            return total.to(self.records.x)
        shape = tuple(total.shape[-axes:])
        width = self._width(std, axes)
        # Streams of single clients that come and go do not add up to one stream.
        apart = carries(query.noise) and round_plan.facts.cohort < len(round_plan.sizes)
        if round_plan.once or not (shares or apart):
            noise = self._standard(round_plan, number, shape)
        else:  # each client's part of the noise, in units of all of it
            part = self._laid(scale / np.expand_dims(std, -1))
            noise = (
                self._draw(round_plan, number, 0, round_plan.cohort, shape).scaled(along(part, axes)).summed(self.lead)
            )
        return noised(total, noise, width, secret=self.secret).to(self.records.x)

    def _laid(self, numbers: np.ndarray) -> Tensor:
        """On the device, once: to ask for the same again does not stop its queue."""
        key = numbers.tobytes()
        if key not in self._known:
            self._known[key] = torch.from_numpy(np.ascontiguousarray(numbers)).to(self.records.x.device)
        return self._known[key].view(numbers.shape)

    def _width(self, std: np.ndarray, axes: int) -> float | Tensor:
        """One for all runs, or one for each."""
        return along(self._laid(std), axes) if std.ndim else float(std)

    def _standard(self, round_plan: RoundPlan, number: int, shape: tuple[int, ...]) -> Draw:
        """Standard noise for a cohort's sum, runs (if any) x shape."""
        query = round_plan.stage.queries[number]
        if not self._at_once(query):
            return self._draw(round_plan, number, 0, np.array([EVERYONE]), shape).summed(self.lead)
        block, here = round_plan.t // AHEAD, (round_plan.t // AHEAD, number, *shape)  # stages differ in shape
        if self._ahead[0] != here:
            at = [Address(EVERYONE, t, number) for t in range(block * AHEAD, (block + 1) * AHEAD)]
            self._ahead = here, self._counted(at, shape)
        noise = self._ahead[1][round_plan.t % AHEAD]
        return Draw.plain(noise if self.lead else noise[0])

    def _at_once(self, query: Query) -> bool:
        plain = not isinstance(query.noise, Correlated) and query.kind not in MATRICES
        return plain and all(isinstance(source, Counted) for source in self.sources)

    def _counted(self, at: list[Address], shape: tuple[int, ...]) -> Tensor:
        """Addresses x runs x shape."""
        sources = [source for source in self.sources if isinstance(source, Counted)]
        drawn = counted(sources, at, math.prod(shape), str(self.records.x.device))
        return drawn.view(len(at), len(sources), *shape)

    def _draw(self, round_plan: RoundPlan, number: int, call: int, clients: np.ndarray, shape: tuple[int, ...]) -> Draw:
        """Runs (if any) x clients x shape."""
        query = round_plan.stage.queries[number]
        at = [Address(int(i), round_plan.t, number, call) for i in clients]
        if self._at_once(query):
            drawn = self._counted(at, shape).transpose(0, 1)
            return Draw.plain(drawn if self.lead else drawn[0])
        draws = [stack([standard(source, query, a, round_plan.first, shape) for a in at]) for source in self.sources]
        return (stack(draws) if self.lead else draws[0]).to(self.records.x.device)

    def _oracle(
        self, round_plan: RoundPlan, clients: np.ndarray, shard: Any, *, preparing: bool = False, quiet: bool = False
    ) -> Oracle:
        def draw(number: int, call: int, shape: tuple[int, ...]) -> Draw:
            return self._draw(round_plan, number, call, clients, shape)

        like, drawn = self.records.x, self._samples(clients)
        return Oracle(
            self.model,
            lambda: shard,
            round_plan.stage,
            sizes=self._laid(round_plan.sizes[clients].astype(float)).to(like),
            stds=[self._laid(std[..., clients]) for std in round_plan.stds],
            draw=draw,
            pick=(lambda call: self._picked(round_plan, clients, call)) if drawn else None,
            rates=self._laid(round_plan.rates[clients]).to(like) if drawn else None,
            dropout_seed=lambda call: seed_of(self.sources[0], int(clients[0]), round_plan.t, call),
            facts=round_plan.facts,
            secret=self.secret,
            runs=(len(self.sources),) * self.lead,
            preparing=preparing,
            quiet=quiet,
        )


def _weighted(leaf: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The sum over clients, which stand at `axis`, in float64. `weight`: of clients, or of runs and clients."""
    weight = weight.double().reshape(*weight.shape, *[1] * (leaf.dim() - axis - 1))
    return (weight * leaf).sum(axis)


class Captured:
    """A function of one tensor on a GPU as a graph of kernels, launched as one: it must not look at any number."""

    def __init__(self, f: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self.given = like.clone()
        self.graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            f(self.given)  # compiling and choosing kernels must be over
            self.graph.capture_begin()
            self.found = f(self.given)
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(aside)

    def __call__(self, at: Tensor) -> Tensor:
        self.given.copy_(at)
        self.graph.replay()
        return self.found.clone()
