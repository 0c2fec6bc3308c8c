"""A client's side of a round: every way from data to message goes through here, for every engine.

`Oracle` answers a local rule's questions: it clips, counts and noises, and so it does with the finished message.
The same code serves one client and a batch of them: per-client numbers then carry a leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    SAFETY,
    Batch,
    Correlated,
    Facts,
    Kind,
    Model,
    OverspentError,
    Query,
    Shard,
    SordinoError,
    Stage,
    Tree,
    carries,
)
from sordino.privacy.noise import Address, Source, add
from sordino.privacy.plan import Plan

MATRICES = (Kind.CURVATURE, Kind.FISHER, Kind.GRAM)
SAMPLING = 2**16 - 1  # the query number under which minibatches are drawn

Draw = Callable[[int, int, tuple[int, ...]], Tensor]  # (query number, call, shape of one client's draw) -> normals
Coins = Callable[[int, tuple[int, ...]], Tensor]  # (call, shape of one client's draw) -> uniforms


class Turn(NamedTuple):
    """The public numbers of a round."""

    t: int
    first: int  # round of its stage
    step: int  # rounds of the stage before this one in which somebody came
    stage: Stage
    facts: Facts
    cohort: np.ndarray
    extras: np.ndarray  # clients outside the cohort that send their part of a common noise stream, and nothing else
    sizes: np.ndarray  # as declared; at user level only the client itself knows its own
    stds: list[np.ndarray]  # per query, every client's own noise in a cohort of this size


def turns(plan: Plan, model: Model, start: int = 0) -> Iterator[Turn]:
    """The rounds of a plan, in order."""
    t, sizes, everyone = 0, np.asarray(plan.sizes), np.arange(plan.clients)
    for s, (stage, rounds) in enumerate(zip(plan.stages, plan.stage_rounds, strict=True)):
        first, facts = t, replace(plan.facts(s), shapes=model.shapes, blocks=blocks(model))
        stds, step = [plan.std(s, k) for k in range(len(stage.queries))], 0
        common = plan.sums_only and any(carries(query.noise) for query in stage.queries)
        for t in range(first, first + rounds):
            if t >= start:
                cohort = plan.cohorts[t]
                extras = np.setdiff1d(everyone, cohort) if common else everyone[:0]
                share = plan.share(len(cohort) + len(extras))
                yield Turn(t, first, step, stage, facts, cohort, extras, sizes, [std * share for std in stds])
            step += bool(len(plan.cohorts[t]))
        t = first + rounds


def check_stream(plan: Plan, t: int, source: Source) -> None:
    """Correlated noise is paid for as one stream, whose draws a new key does not give again."""
    if source.private and plan.goes_on(t):
        raise SordinoError(
            f"resume: the correlated noise of {plan.method.name} began with a key that is gone, so that round {t} "
            "cannot be noised to match; start a new run."
        )


def blocks(model: Model) -> Tensor:
    """Which block of parameters each entry of theta belongs to: what the model says, or one a tensor."""
    if (said := getattr(model, "blocks", None)) is not None:
        return torch.as_tensor(said)
    sizes = torch.tensor([math.prod(shape) for shape in model.shapes])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def normals(source: Source, query: Query, at: Address, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Standard noise for one release. Correlated noise re-derives its draws at the stage's `first` round."""
    if isinstance(query.noise, Correlated):
        row = query.noise.decoder[at.round - first]
        draws = (row[j] * source.normal(at._replace(round=first, index=int(j)), shape) for j in np.flatnonzero(row))
        z: np.ndarray = sum(draws, np.zeros(shape))
    else:
        z = source.normal(at, shape)
    # Symmetric answers get symmetric noise: variance 1 on the diagonal and 1/2 off it is white in the Frobenius norm.
    return (z + z.swapaxes(-1, -2)) / 2 if query.kind in MATRICES else z


def clipped(message: Tensor, clip: float) -> Tensor:
    """Rows scaled down to norm `clip` (inf: as they are); a row that is not finite becomes zero, and tells nothing."""
    # In float64: a norm of many float32 numbers would fall short by more than the safety margin.
    norm = torch.linalg.vector_norm(message, dim=-1, keepdim=True, dtype=torch.float64)
    if math.isfinite(clip):
        bound = clip * (1 - SAFETY)
        message = (message.double() * (bound / norm.clamp_min(bound))).to(message.dtype)
    return torch.where(torch.isfinite(norm), message, torch.zeros_like(message))


class Oracle:
    """`ask`: the only way from a local rule to its data."""

    def __init__(
        self,
        model: Any,
        shard: Shard,
        stage: Stage,
        *,
        sizes: Tensor,
        stds: list[Tensor],
        draw: Draw,
        coins: Coins,
        facts: Facts,
        secret: bool,
        runs: tuple[int, ...] = (),
        inside: bool = False,
    ) -> None:
        self._model, self._shard, self._stage = model, shard, stage
        self._sizes, self._stds, self._draw, self._coins = sizes, stds, draw, coins
        self._secret, self.runs = secret, runs
        self._axes = sizes.dim() + len(runs) + 1  # of a message: clients, runs, and its own
        self._inside = inside  # building a cache: what is released may not be asked here, its noise is the round's
        self._spent = [0] * len(stage.queries)
        self._samples = 0
        self.facts = facts
        self.records = sizes.unsqueeze(-1) if sizes.dim() else sizes

    def gradient(self, theta: Tensor, on: Batch | None = None, scale: Tensor | None = None) -> Tensor:
        rest = () if scale is None else (scale,)
        return self._answer(
            Kind.GRADIENT, 1, on, lambda shard, clip: self._model.clipped_sum(theta, shard, clip, *rest)
        )

    def curvature(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        return self._answer(Kind.CURVATURE, 2, on, lambda shard, clip: self._model.curvature_sum(theta, shard, clip))

    def curvature_times(self, theta: Tensor, v: Tensor) -> Tensor:
        if any(query.kind is Kind.CURVATURE and query.noise is not None for query in self._stage.queries):
            raise OverspentError("the curvature is released here: ask for the whole of it, which is noised once")
        return self._answer(
            Kind.CURVATURE, 1, None, lambda shard, clip: self._model.curvature_times(theta, shard, clip, v)
        )

    def fisher(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        return self._answer(Kind.FISHER, 2, on, lambda shard, clip: self._model.fisher_sum(theta, shard, clip))

    def gram(self, on: Batch | None = None) -> Tensor:
        return self._answer(Kind.GRAM, 2, on, lambda shard, clip: self._of_each_run(self._model.gram_sum(shard, clip)))

    def std(self, kind: Kind) -> Tensor:
        number = self._number(kind)
        return along(self._stds[number].to(self._sizes) / self._sizes, 1)

    def sample(self, rate: float) -> Batch:
        mask = self._shard.mask
        self._samples += 1
        return Batch((self._coins(self._samples, tuple(mask.shape[-1:])) < rate).to(mask), rate)

    def finish(self, message: Tree, *, noise: bool = True) -> Tree:
        """Clip and noise the finished message, where that is what the stage releases."""
        for number, query in enumerate(self._stage.queries):
            if query.kind is Kind.DELTA:
                if not isinstance(message, Tensor) or message.dim() != self._axes:
                    raise SordinoError("message: what is noised as a whole must be one vector a client; flatten it.")
                message = clipped(message, query.clip)
                message = self._noised(message, number, 0, 1) if noise else message
        return message

    def _answer(self, kind: Kind, axes: int, on: Batch | None, total: Callable[[Shard, float], Tensor]) -> Tensor:
        number = self._number(kind)
        query, call = self._stage.queries[number], self._spent[number]
        if self._inside and query.noise is not None:
            raise OverspentError(f"prepare asked the {kind} query, whose answers are released; only work may")
        if call >= query.calls:
            raise OverspentError(f"the {kind} query was declared for {query.calls} calls a round and asked once more")
        self._spent[number] += 1
        shard = self._shard if on is None else self._shard._replace(mask=self._shard.mask * on.mask.clamp(0, 1))
        answer = total(shard, query.clip)
        if query.noise is not None:
            answer = self._noised(answer, number, call, axes)
        return answer / along(self._sizes * (1.0 if on is None else on.rate), axes)

    def _of_each_run(self, answer: Tensor) -> Tensor:
        """An answer that knows no theta, and so no runs, said once for each; a cache is the same for all."""
        worlds = self._shard.x.dim() - 2 > self._sizes.dim()
        return answer if worlds or self._inside else answer.expand(*self.runs, *answer.shape)

    def _number(self, kind: Kind) -> int:
        for number, query in enumerate(self._stage.queries):
            if query.kind is kind:
                return number
        raise OverspentError(f"this stage declares no {kind} query; add Query(Kind.{kind.name}, clip) to it")

    def _noised(self, answer: Tensor, number: int, call: int, axes: int) -> Tensor:
        std = along(self._stds[number], axes)
        if not std.any():
            return answer
        return add(answer, std * self._draw(number, call, tuple(answer.shape[-axes:])), std, secret=self._secret)


def along(value: Tensor, axes: int) -> Tensor:
    """A per-client number, shaped to multiply an answer with that many axes of its own."""
    return value.reshape(value.shape + (1,) * axes)
