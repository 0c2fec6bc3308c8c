"""Mutants: methods and models with a deliberate mistake that a contract must reject."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.contracts import greedy
from sordino.checks.fixtures import Space, Through, short_plan
from sordino.core import Blend, Broadcast, Kind, Lemma, Method, Query, Shard, Stage, Tree, Unit
from sordino.engines import reference
from sordino.privacy.mechanisms.random import Seeded
from sordino.tree import tree_map

SUMS = (
    "clipped_sum",
    "curvature_sum",
    "curvature_times",
    "fisher_sum",
    "gram_sum",
    "calibration_sum",
    "slope_sum",
    "leaves_sum",
    "tally_sum",
)
UNCLIPPED = 1e12
MUTANT_RATE = 0.5  # of the minibatches for which `bounded_by_all_records` is wrong
ClippedSum = Callable[[Shard, float], Tensor]  # (shard, clip) -> sum over its records


def half_claimed(method: Method, model: Any) -> tuple[Method, Any]:
    """Every query claims half of its sensitivity."""

    def half(query: Query) -> Query:
        return replace(
            query, bound=Lemma("half", lambda m, adjacency: query.sensitivity(adjacency, method.unit, m) / 2)
        )

    return _every(method, lambda stage: stage._replace(queries=tuple(map(half, stage.queries)))), model


def bounded_by_all_records(method: Method, model: Any) -> tuple[Method, Any]:
    """A bound about minibatches takes the number of all records for the expected number of those drawn."""

    def wrong(query: Query) -> Query:
        lemma = query.bound
        if lemma is None or not lemma.sampled:
            return query
        return replace(query, bound=replace(lemma, bound=lambda b, adjacency: lemma.bound(b / MUTANT_RATE, adjacency)))

    return _every(method, lambda stage: stage._replace(queries=tuple(map(wrong, stage.queries)))), model


def some_unclipped(method: Method, model: Any) -> tuple[Method, Any]:
    """Records with a positive label are clipped at ten times the clip."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        late = (shard.y > 0).to(shard.mask)
        in_time = sums(shard._replace(mask=shard.mask * (1 - late)), clip)
        return in_time + sums(shard._replace(mask=shard.mask * late), 10 * clip)

    return method, careless(model, total)


def weighs_beyond_the_clip(method: Method, model: Any) -> tuple[Method, Any]:
    """Clipped terms are multiplied by the weights of their classes as they are written, the largest of which is 2."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        return sums(shard._replace(mask=2 * shard.mask), clip)

    return method, careless(model, total)


def weighed_records(model: Any) -> Any:
    """No mutant: a model whose records have weights in [0, 1], a function of the record, as `sample_weight` may be."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        weight = (shard.x.sum(-1).cos() + 1).clamp_max(1.0).nan_to_num(1.0)
        return sums(shard._replace(mask=shard.mask * weight), clip)

    return careless(model, total)


def clips_each_gradient(method: Method, model: Any) -> tuple[Method, Any]:
    """Each of the two weighted gradients of a blend is clipped by itself; their sum may be two clips long."""

    def total(
        name: str,
        inner: Callable[..., Tensor],
        theta: Tensor,
        shard: Shard,
        clip: float,
        *scale: Tensor,
        blend: Blend | None = None,
        **how: Any,
    ) -> Tensor:
        if blend is None:
            return inner(theta, shard, clip, *scale, **how)
        points = zip((theta, blend.theta), blend.weights, strict=True)
        return sum(
            (inner(at, shard, clip, *scale, blend=Blend(at, (weight, 0.0)), **how) for at, weight in points),
            start=torch.zeros(()),
        )

    return method, Through(model, ("clipped_sum",), total)


def clips_before_the_scale(method: Method, model: Any) -> tuple[Method, Any]:
    """A gradient is clipped first and multiplied by the scale of its entries afterwards, which may lengthen it."""

    def total(
        name: str, inner: Callable[..., Tensor], theta: Tensor, shard: Shard, clip: float, *scale: Tensor, **how: Any
    ) -> Tensor:
        clipped = inner(theta, shard, clip, **how)
        return clipped * scale[0].double() if scale else clipped

    return method, Through(model, ("clipped_sum",), total)


def clips_every_layer_to_the_clip(method: Method, model: Any) -> tuple[Method, Any]:
    """Every layer has the whole clip as its bound, so that the squares of L bounds add up to L clip^2."""
    layers = len(model.layers)
    return method, careless(model, lambda sums, shard, clip: sums(shard, math.sqrt(layers) * clip))


def normalises_by_the_last_layer(method: Method, model: Any) -> tuple[Method, Any]:
    """A gradient is divided by the norm of its part in the last layer alone, plus gamma."""
    gamma = method.stages[0].queries[0].clipping.gamma
    return method, _measured_in_the_last_layer(model, lambda clip, norm: clip / (norm + gamma))


def clips_by_the_last_layer(method: Method, model: Any) -> tuple[Method, Any]:
    """A gradient is clipped by the norm of its part in the last layer alone."""
    return method, _measured_in_the_last_layer(model, lambda clip, norm: (clip / norm).clamp(max=1))


def _measured_in_the_last_layer(model: Any, factor: Callable[[float, Tensor], Tensor]) -> Any:
    """A model that multiplies each gradient by a factor that follows from the norm of its last layer."""
    last = slice(model.size - sum(model.trained[name].numel() for name in model.layers[-1]), None)

    def total(name: str, inner: Callable[..., Tensor], theta: Tensor, shard: Shard, clip: float, **how: Any) -> Tensor:
        terms = []
        for first in range(0, shard.mask.shape[-1], shard.per_person):
            rows = slice(first, first + shard.per_person)
            x, y, mask = shard.x[..., rows, :], shard.y[..., rows], shard.mask[..., rows]
            g = inner(theta, Shard(x, y, mask, None, shard.per_person), UNCLIPPED)
            terms.append(g * factor(clip, g[..., last].norm(dim=-1, keepdim=True)))
        return torch.stack(terms).sum(0)

    return Through(model, ("clipped_sum",), total)


def leaves_the_fisher_matrix_unclipped(method: Method, model: Any) -> tuple[Method, Any]:
    """The gradients of the last layer, whose products make the Fisher matrix, are as long as they are."""

    def total(name: str, inner: Callable[..., Tensor], theta: Tensor, shard: Shard, clip: float) -> Tensor:
        return inner(theta, shard, UNCLIPPED)

    return method, Through(model, ("fisher_sum",), total)


def sends_the_frozen_factor(method: Method, model: Any) -> tuple[Method, Any]:
    """Where a part of theta is trained, the whole gradient is sent; only the norm of the part is within the clip."""

    def change(stage: Stage) -> Stage:
        parts: list[Tensor] = []

        def whole(name: str, inner: Callable[..., Tensor], theta: Tensor, *args: Any, **how: Any) -> Tensor:
            parts[:] = [args[-1]]
            return inner(theta, scale=torch.zeros_like(theta).index_fill(-1, args[-1], 1.0))

        def compute(ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
            message: Tree = stage.local.compute(Through(ask, ("gradient",), whole), broadcast, memory, cache)
            return message

        def update(mean: Tensor, *args: Any) -> tuple[Tensor, Tree]:
            result: tuple[Tensor, Tree] = stage.rule.update(mean.index_select(-1, parts[0]), *args)
            return result

        rule, local = stage.rule._replace(update=update), stage.local._replace(compute=compute)
        return stage._replace(local=local, rule=rule)

    def total(name: str, inner: Callable[..., Tensor], theta: Tensor, shard: Shard, clip: float, *args: Any) -> Tensor:
        terms = []
        for first in range(0, shard.mask.shape[-1], shard.per_person):
            rows = slice(first, first + shard.per_person)
            x, y, mask = shard.x[..., rows, :], shard.y[..., rows], shard.mask[..., rows]
            g = inner(theta, Shard(x, y, mask, None, shard.per_person), UNCLIPPED)
            terms.append(g * (clip / (g * args[0]).norm(dim=-1, keepdim=True).clamp_min(clip)))
        return torch.stack(terms).sum(0)

    return _every(method, change), Through(model, ("clipped_sum",), total)


def refactors_by_records(method: Method, model: Any) -> tuple[Method, Any]:
    """The server turns its step towards the last sum of records, which it sees without noise."""
    seen: list[Tensor] = []

    def total(name: str, inner: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        seen[:] = [inner(*args, **options)]
        return seen[0]

    def change(stage: Stage) -> Stage:
        def update(*args: Any) -> tuple[Tensor, Tree]:
            step, state = stage.rule.update(*args)
            return step + seen[0].sum().to(step), state

        return stage._replace(rule=stage.rule._replace(update=update))

    return _every(method, change), Through(model, ("clipped_sum",), total)


def mean_clipped(method: Method, model: Any) -> tuple[Method, Any]:
    """The mean over records is clipped instead of each record."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        whole, most = sums(shard, 1e6 * clip), clip * shard.y.shape[-1]
        return torch.mul(whole, most / whole.norm().clamp_min(most))

    return method, careless(model, total)


def clips_records_not_persons(method: Method, model: Any) -> tuple[Method, Any]:
    """Every record of a person is clipped by itself, and the person counts as often as it has records."""
    return method, careless(model, lambda sums, shard, clip: sums(shard._replace(per_person=1), clip))


def allows_a_clip_per_record(method: Method, model: Any) -> tuple[Method, Any]:
    """A person may contribute as many clips as records are used of it."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        return sums(shard, shard.per_person * clip)

    return method, careless(model, total)


def counted_twice(method: Method, model: Any) -> tuple[Method, Any]:
    """Every record of a tally is counted in a second cell, the next one."""
    return method, careless(model, lambda sums, shard, clip: sums(shard, clip) + sums(shard, clip).roll(1, -1))


def weighted_by_a_feature(method: Method, model: Any) -> tuple[Method, Any]:
    """A record counts in a tally as often as its first feature says, which has no bound."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        weight = shard.x[..., 0].abs().nan_to_num(1.0, posinf=1.0).to(shard.mask)
        return sums(shard._replace(mask=shard.mask * weight), clip)

    return method, careless(model, total)


def asks_once_more(method: Method, model: Any) -> tuple[Method, Any]:
    """Every stage asks each of its queries once more than declared."""
    return _every(method, greedy), model


def declares_a_call_less(method: Method, model: Any) -> tuple[Method, Any]:
    """Every noised query that is asked several times per round declares, and pays for, one call less."""

    def less(query: Query) -> Query:
        return replace(query, calls=query.calls - 1) if repeats(query) else query

    return _every(method, lambda stage: stage._replace(queries=tuple(map(less, stage.queries)))), model


def asks_one_minibatch_again(method: Method, model: Any) -> tuple[Method, Any]:
    """All gradients of a round are those of its first minibatch, though each is paid for as one of its own."""

    def change(stage: Stage) -> Stage:
        def compute(ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
            first: list[core.Batch] = []

            def again(name: str, inner: Callable[..., Tensor], theta: Tensor, *args: Any, **how: Any) -> Tensor:
                first[:] = first or [ask.sample()]
                how.pop("on", None)
                return inner(theta, first[0], *args[1:], **how)

            message: Tree = stage.local.compute(Through(ask, ("gradient",), again), broadcast, memory, cache)
            return message

        return stage._replace(local=stage.local._replace(compute=compute))

    return _every(method, change), model


def repeats(query: Query) -> bool:
    """Whether a round asks for several noised gradients, each of a minibatch of its own."""
    return query.kind is Kind.GRADIENT and query.noise is not None and query.calls > query.joint == 1


def adds_hidden_randomness(method: Method, model: Any) -> tuple[Method, Any]:
    """The server draws random numbers that are not in its state."""
    hidden = torch.Generator().manual_seed(0)

    def change(stage: Stage) -> Stage:
        def update(*args: Any) -> tuple[Tensor, Tree]:
            step, state = stage.rule.update(*args)
            return step + torch.randn(step.shape, generator=hidden).to(step), state

        return stage._replace(rule=stage.rule._replace(update=update))

    return _every(method, change), model


class TwoMemories(NamedTuple):
    """The memory of the method, and the message that the mutant stores without noise."""

    inner: Tree
    unnoised: Tree


def stores_unnoised_message(method: Method, model: Any) -> tuple[Method, Any]:
    """Clients store the message before the engine adds noise to it."""

    def change(stage: Stage) -> Stage:
        local = stage.local
        unnoised: list[Tree] = [()]

        def compute(ask: core.Ask, broadcast: Broadcast, memory: TwoMemories, cache: Tree) -> Tree:
            unnoised[0] = local.compute(ask, broadcast, memory.inner, cache)
            return unnoised[0]

        def update_memory(message: Tree, broadcast: Broadcast, memory: TwoMemories) -> TwoMemories:
            return TwoMemories(local.update_memory(message, broadcast, memory.inner), unnoised[0])

        def init(theta: Tensor, before: Tree) -> TwoMemories:
            return TwoMemories(local.init(theta, before.inner if isinstance(before, TwoMemories) else ()), ())

        return stage._replace(local=local._replace(compute=compute, update_memory=update_memory, init=init))

    return _every(method, change), model


def mixes_clients(method: Method, model: Any) -> tuple[Method, Any]:
    """A client's rule takes a norm over all axes, so that a batch of clients is not a loop over them."""

    def change(stage: Stage) -> Stage:
        def compute(*args: Any) -> Tree:
            message: Tree = stage.local.compute(*args)
            return tree_map(lambda leaf: leaf / (1 + leaf.norm()), message)

        return stage._replace(local=stage.local._replace(compute=compute))

    return _every(method, change), model


def scales_by_batch_maximum(method: Method, model: Any) -> tuple[Method, Any]:
    """The model scales by the largest entry of its batch, and the fast engine batches several clients."""
    return method, careless(model, lambda sums, shard, clip: sums(shard, clip) / shard.x.abs().max())


def clips_all_shorter_if_one_is_long(method: Method, model: Any) -> tuple[Method, Any]:
    """If one record is long, all records are clipped to a smaller norm."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        return sums(shard, 0.9 * clip if bool(shard.x.abs().max() > 10) else clip)

    return method, careless(model, total)


def counts_axes(method: Method, model: Any) -> tuple[Method, Any]:
    """A client's rule divides by the number of axes of theta; the fast engine adds axes."""

    def change(stage: Stage) -> Stage:
        def compute(ask: core.Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
            message: Tree = stage.local.compute(ask, broadcast, memory, cache)
            return tree_map(lambda leaf: leaf / broadcast.theta.dim(), message)

        return stage._replace(local=stage.local._replace(compute=compute))

    return _every(method, change), model


MUTANTS: dict[str, tuple[Callable[[Method, Any], tuple[Method, Any]], ...]] = {
    "sensitivity": (
        half_claimed,
        some_unclipped,
        mean_clipped,
        clips_records_not_persons,
        allows_a_clip_per_record,
        counted_twice,
        weighted_by_a_feature,
        clips_each_gradient,
        clips_before_the_scale,
    ),
    "apart": (clips_all_shorter_if_one_is_long,),
    "asks": (asks_once_more, declares_a_call_less, asks_one_minibatch_again),
    "replay": (adds_hidden_randomness, stores_unnoised_message),
    "engines": (mixes_clients, scales_by_batch_maximum, counts_axes),
}


OF_CLIPPINGS: dict[str, Callable[[Method, Any], tuple[Method, Any]]] = {
    "per-layer": clips_every_layer_to_the_clip,
    "automatic": normalises_by_the_last_layer,
}
OF_MINIBATCHES = (bounded_by_all_records,)
OF_TALLIES = (counted_twice, weighted_by_a_feature)
OF_CALLS = (declares_a_call_less, asks_one_minibatch_again)
OF_PERSONS = (clips_records_not_persons, allows_a_clip_per_record)
SHORT = (Kind.TALLY, Kind.CALIBRATION, Kind.SLOPE)  # a record's vector is short before it is clipped


def breaks(mutant: Callable[..., Any], method: Method) -> bool:
    """Whether a mutant makes this method wrong.

    A model that clips wrongly does no harm to a method whose finished messages are clipped. At client level the engines
    serve clients one by one, so a mutant that mixes clients has nothing to mix. `concerns` says which queries a
    mutant of sensitivity changes, if any.
    """
    if mutant in (mixes_clients, scales_by_batch_maximum):
        return method.unit is not Unit.CLIENT
    if mutant in OF_PERSONS and method.unit is not Unit.PERSON:
        return False
    if mutant in OF_CALLS:
        return any(repeats(query) for stage in method.stages for query in stage.queries)
    if mutant not in MUTANTS["sensitivity"]:
        return True
    queries = [query for stage in method.stages for query in stage.queries]
    if mutant in OF_TALLIES:
        return any(query.kind in SHORT and query.noise is not None for query in queries)
    if all(query.kind is Kind.TALLY for query in queries):
        return mutant in (half_claimed, clips_records_not_persons)
    return mutant is half_claimed or not any(query.kind is Kind.DELTA and query.bound is None for query in queries)


def network_form(method: Method) -> tuple[str, Callable[[Method, Any], tuple[Method, Any]] | None]:
    """What makes a method one for networks, in words, and the mutant of sensitivity that it has because of that.

    Args:
      method: the method.

    Returns:
      The words, empty if the method is checked on other models, and the mutant. At client level a Fisher matrix has
      none: the finished message is clipped, whatever it was computed from. At person level networks have no such
      matrix.
    """
    for query in (query for stage in method.stages for query in stage.queries):
        if query.clipping.law in OF_CLIPPINGS:
            several = f", {query.calls} minibatches" if query.calls > 1 else ""
            return f"{query.clipping.law}{several}", OF_CLIPPINGS[query.clipping.law]
        if query.kind is Kind.FISHER and query.noise is None and method.unit is not Unit.PERSON:
            return str(query.kind), None if method.unit is Unit.CLIENT else leaves_the_fisher_matrix_unclipped
    return "", None


class Noticed(NamedTuple):
    """The stages that ask for special sums of gradients, by number; mutants of sensitivity change these alone."""

    blended: set[int]  # they ask for two gradients in one clipped term
    scaled: set[int]  # they lengthen entries of gradients before the clip


def noticed_stages(method: Method, model: Any, *, seed: int = 0) -> Noticed:
    """The stages that ask for special sums of gradients, as a short run of the method shows.

    Args:
      method: the method, which keeps the contract `asks` on this model.
      model: the model on which it runs.
      seed: seed of records and noise.

    Returns:
      The numbers of these stages.
    """
    running, noticed = [0], Noticed(set(), set())
    if not any(query.kind is Kind.GRADIENT for stage in method.stages for query in stage.queries):
        return noticed

    def watched(s: int, stage: Stage) -> Stage:
        def compute(*args: Any) -> Tree:
            running[0] = s
            message: Tree = stage.local.compute(*args)
            return message

        return stage._replace(local=stage.local._replace(compute=compute))

    def total(
        name: str, inner: Callable[..., Tensor], theta: Tensor, shard: Shard, clip: float, *scale: Tensor, **how: Any
    ) -> Tensor:
        if how.get("blend") is not None:  # as the engines hand it on, however the rule asked for it
            noticed.blended.add(running[0])
        if scale and bool((scale[0] > 1.01).any()):
            noticed.scaled.add(running[0])
        return inner(theta, shard, clip, *scale, **how)

    watching = method._replace(stages=tuple(watched(s, stage) for s, stage in enumerate(method.stages)))
    records = Space.of(model).records(np.random.default_rng(seed), method.unit)
    list(reference.run(short_plan(watching), Through(model, ("clipped_sum",), total), records, Seeded(seed)))
    return noticed


def concerns(
    mutant: Callable[..., Any], query: str, blended: Collection[int] = (), scaled: Collection[int] = ()
) -> bool:
    """Whether a mutant of sensitivity changes the answers to a query.

    Args:
      mutant: the mutant.
      query: the stage, the number and the kind of the query, as reports have them.
      blended: the stages whose terms are sums of two gradients.
      scaled: the stages that lengthen entries of gradients before the clip.
    """
    stage, kind = int(query.split(".")[0]), query.split()[-1]
    if mutant is clips_each_gradient:
        return stage in blended and kind in (Kind.GRADIENT, Kind.DELTA)
    if mutant is clips_before_the_scale:
        return stage in scaled and kind == Kind.GRADIENT
    if mutant is allows_a_clip_per_record:  # the mean of a person's vectors in a tally is short before it is clipped
        return kind != Kind.TALLY
    return mutant in (half_claimed, clips_records_not_persons) or (mutant in OF_TALLIES) == (kind in list(SHORT))


def _every(method: Method, change: Callable[[Stage], Stage]) -> Method:
    return method._replace(stages=tuple(change(stage) for stage in method.stages))


def careless(model: Any, total: Callable[[ClippedSum, Shard, float], Tensor]) -> Any:
    """A model whose sums over records are computed by `total` from the correct ones."""

    def summed(name: str, method: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        at = next(k for k, part in enumerate(args) if isinstance(part, Shard))
        before, shard, clip, after = args[:at], args[at], args[at + 1], args[at + 2 :]
        return total(lambda shard, clip: method(*before, shard, clip, *after, **options), shard, clip)

    return Through(model, SUMS, summed)
