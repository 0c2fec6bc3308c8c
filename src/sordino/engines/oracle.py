"""A client's side of a round: every way from data to message goes through here, for every engine.

`Oracle` answers a local rule's questions: it clips, counts and noises, and so it does with the finished message.
The same code serves one client and a batch of them: per-client numbers then carry a leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    SAFETY,
    SAMPLED,
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
    keep,
)
from sordino.privacy import calibration
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.random import Address, Draw, Source, draw, grid_of, settle
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan, continues_stream
from sordino.tree import leaves

MATRICES = (Kind.CURVATURE, Kind.FISHER, Kind.GRAM)
# Query numbers beyond any method's: of minibatches, of dropout, of dither, of the places of records in a minibatch.
SAMPLING, LUCK, ROUNDING, PLACES = 2**16 - 1, 2**16 - 2, 2**16 - 3, 2**16 - 4

Drawing = Callable[[int, int, tuple[int, ...]], Draw]  # (query number, call, shape of one client's draw) -> noise
Pick = Callable[[int], Shard]  # (number of the minibatch) -> its records


class RoundPlan(NamedTuple):
    """The public numbers of a round."""

    t: int
    first: int  # round of its stage
    step: int  # rounds of the stage before this one in which somebody came
    stage: Stage
    facts: Facts
    cohort: np.ndarray
    sizes: np.ndarray  # as declared; at user level only the client itself knows its own
    stds: list[np.ndarray]  # per query, every client's own noise in a cohort of this size
    sums: list[np.ndarray]  # per query, the noise of the aggregate, where it is added once
    sampling: Sampling
    rates: np.ndarray  # at which every client's records are drawn into a minibatch
    slots: np.ndarray  # places in every client's minibatch
    once: bool  # only sums are seen: each answer is noised once, in the aggregate


def round_plans(plan: Plan, model: Model, start: int = 0) -> Iterator[RoundPlan]:
    """The rounds of a plan, in order."""
    t, sizes = 0, np.asarray(plan.sizes)
    for s, (stage, rounds) in enumerate(zip(plan.stages, plan.stage_rounds, strict=True)):
        first, facts = t, replace(calibration.stage_facts(plan, s), shapes=model.shapes, blocks=blocks(model))
        stds, step = [calibration.client_std(plan, s, k) for k in range(len(stage.queries))], 0
        sums = [np.asarray(calibration.aggregate_std(plan, s, k)) for k in range(len(stage.queries))]
        once = noised_once(plan, stage)
        for t in range(first, first + rounds):
            if t >= start:
                cohort = plan.cohorts[t]
                own = [std * calibration.noise_share(plan, len(cohort)) for std in stds]
                drawn = plan.sampling, plan.rates, plan.slots
                yield RoundPlan(t, first, step, stage, facts, cohort, sizes, own, sums, *drawn, once)
            step += bool(len(plan.cohorts[t])) or (once and plan.amplified)
        t = first + rounds


def noised_once(plan: Plan, stage: Stage) -> bool:
    """Where the adversary sees sums alone, noise belongs to the sum. A message must then be made of answers as they are
    (or be noised as a whole), and nothing of it be remembered: what a method proves of sums rests on that."""
    if not plan.only_sums_visible or (plan.privacy.unit, plan.privacy.trust) not in plan.method.proves:
        return False
    if stage.local.update_memory is not keep:
        raise SordinoError(
            f"{plan.method.name}: a client that remembers its message cannot have it noised in the sum alone; leave "
            f"{plan.privacy.trust} out of what the method proves."
        )
    return True


def places(source: Source, at: Address, round_plan: RoundPlan, size: int) -> np.ndarray:
    """A client's minibatch: which record stands in which slot, -1 in those left empty. `size`: records it really has.

    The number of slots is public. Where records come by coin, each takes one of all slots at random: then a record that
    joins takes one that was free, and moves no other, so that it changes how no other is rounded.
    """
    rate, slots = float(round_plan.rates[at.client]), int(round_plan.slots[at.client])
    if rate == 1:
        drawn = order = np.arange(slots)
    else:
        drawn = round_plan.sampling.draw(
            source.uniform(at._replace(query=SAMPLING), (int(round_plan.sizes[at.client]),)), rate
        )
        by_coin = round_plan.sampling.kind == "poisson"
        order = np.argsort(source.uniform(at._replace(query=PLACES), (slots,))) if by_coin else np.arange(slots)
    drawn = drawn[drawn < size][:slots]
    where = np.full(slots, -1)
    where[order[: len(drawn)]] = drawn
    return where


def seed_of(source: Source, client: int, t: int, call: int) -> int:
    """For the chance inside a model, such as dropout."""
    return int(source.uniform(Address(client, t, LUCK, call), (1,))[0] * 2**52)


def check_stream(plan: Plan, t: int, source: Source) -> None:
    """Correlated noise is paid for as one stream, whose draws a new key does not give again."""
    if source.private and continues_stream(plan, t):
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


def standard(source: Source, query: Query, at: Address, first: int, shape: tuple[int, ...]) -> Draw:
    """Standard noise for one release. Correlated noise re-derives its draws at the stage's `first` round."""
    parts = [(1.0, at)]
    if isinstance(query.noise, Correlated):
        row = query.noise.decoder[at.round - first]
        parts = [(row[j], at._replace(round=first, index=int(j))) for j in np.flatnonzero(row)]
    z = draw(source, parts, shape)
    # Symmetric answers get symmetric noise: variance 1 on the diagonal and 1/2 off it is white in the Frobenius norm.
    return z.symmetric() if query.kind in MATRICES else z


def noised(total: Tensor, noise: Draw, std: Tensor | float, *, secret: bool) -> Tensor:
    """total + std * noise, in float64. Where the noise is secret, what leaves is rounded to a public grid, as exactly
    as if all had been real numbers: rounding is then post-processing of the Gaussian mechanism."""
    noise = noise.to(total.device).scaled(std)
    return settle(total.double(), noise, grid_of(std)) if secret else total.double() + noise.z


def clipped(message: Tensor, clip: float) -> Tensor:
    """Rows in float64, scaled down to norm `clip` (inf: as they are); a row that is not finite becomes zero."""
    # In float64: a norm of many float32 numbers would fall short by more than the safety margin.
    norm = torch.linalg.vector_norm(message, dim=-1, keepdim=True, dtype=torch.float64)
    message = message.double()
    if math.isfinite(clip):
        bound = clip * (1 - SAFETY)
        message = message * torch.div(bound, norm.clamp_min(bound))  # exactly 1 for a short one
    return torch.where(torch.isfinite(norm), message, 0.0)


class Oracle:
    """`ask`: the only way from a local rule to its data."""

    def __init__(
        self,
        model: Any,
        shard: Callable[[], Shard],
        stage: Stage,
        *,
        sizes: Tensor,
        stds: list[Tensor],
        draw: Drawing,
        pick: Pick | None = None,
        rates: Tensor | None = None,
        dropout_seed: Callable[[int], int] | None = None,
        facts: Facts,
        secret: bool,
        runs: tuple[int, ...] = (),
        preparing: bool = False,
        quiet: bool = False,
    ) -> None:
        self._model, self._all, self._stage = model, cache(shard), stage
        self._sizes, self._stds, self._draw = sizes, stds, draw
        self._pick, self._rates, self._luck = pick, rates, dropout_seed  # rates: None where no minibatches are drawn
        self._secret, self.runs = secret, runs
        self._axes = sizes.dim() + len(runs) + 1  # of a message: clients, runs, and its own
        self._quiet = quiet  # the noise comes later, in the sum or as integers (`secured`)
        # The bound of a lemma counts on answers with the digits of float64.
        self._wide = any(query.bound is not None for query in stage.queries)
        self._preparing = (
            preparing  # building a cache: what is released may not be asked here, its noise is the round's
        )
        self._spent = [0] * len(stage.queries)
        self._answers: list[tuple[int, Tensor]] = []  # (number of the query, answer)
        self._batches: list[Shard] = []
        self._uses: list[int] = []
        self.facts = facts
        self.records = sizes.unsqueeze(-1) if sizes.dim() else sizes

    def gradient(self, theta: Tensor, on: Batch | None = None, scale: Tensor | None = None) -> Tensor:
        number, rest = (self.sample() if on is None else on).number, () if scale is None else (scale,)
        if not 0 <= number < len(self._batches):
            raise OverspentError("this minibatch was not drawn here; take one from ask.sample()")
        self._uses[number] += 1
        place = self._number(Kind.GRADIENT)
        query = self._stage.queries[place]
        if self._uses[number] > query.joint:
            raise OverspentError("a minibatch was asked about more often than the query's `joint` declares")
        if sum(map(bool, self._uses)) > query.calls // query.joint and self._spent[place] < query.calls:
            raise OverspentError("more minibatches were asked about than the query's `calls` over `joint`")

        batch = self._batches[number]
        return self._answer(Kind.GRADIENT, 1, lambda clip: self._model.clipped_sum(theta, batch, clip, *rest))

    def count(self, theta: Tensor, scale: Tensor) -> Tensor:
        batch = self._batches[self.sample().number]
        return self._answer(Kind.COUNT, 1, lambda clip: self._model.count_sum(theta, batch, scale))

    def curvature(self, theta: Tensor) -> Tensor:
        return self._answer(Kind.CURVATURE, 2, lambda clip: self._model.curvature_sum(theta, self._all(), clip))

    def curvature_times(self, theta: Tensor, v: Tensor) -> Tensor:
        if any(query.kind is Kind.CURVATURE and query.noise is not None for query in self._stage.queries):
            raise OverspentError("the curvature is released here: ask for the whole of it, which is noised once")
        return self._answer(Kind.CURVATURE, 1, lambda clip: self._model.curvature_times(theta, self._all(), clip, v))

    def fisher(self, theta: Tensor) -> Tensor:
        return self._answer(Kind.FISHER, 2, lambda clip: self._model.fisher_sum(theta, self._all(), clip))

    def gram(self) -> Tensor:
        return self._answer(Kind.GRAM, 2, lambda clip: self._of_each_run(self._model.gram_sum(self._all(), clip)))

    def std(self, kind: Kind) -> Tensor:
        number = self._number(kind)
        return along(self._stds[number].to(self._sizes) / self._divisor(kind), 1)

    def sample(self) -> Batch:
        number = len(self._batches)
        self._batches.append(self._all() if self._pick is None else self._pick(number))
        self._uses.append(0)
        return Batch(number)

    def finish(self, message: Tree) -> Tree:
        """Clip and noise the finished message, where that is what the stage releases."""
        for number, query in enumerate(self._stage.queries):
            if query.kind is Kind.DELTA:
                if not isinstance(message, Tensor) or message.dim() != self._axes:
                    raise SordinoError("message: what is noised as a whole must be one vector per client; flatten it.")
                message = clipped(message, query.clip)
                message = message if self._quiet else self._noised(message, number, 0, 1).to(self._sizes.dtype)
        return message

    def released(self, message: Tree) -> list[int]:
        """The number of the query whose answer (or, for DELTA, whose message) each leaf of a quiet message is."""
        delta = [number for number, query in enumerate(self._stage.queries) if query.kind is Kind.DELTA]
        if delta:
            return delta
        known = {id(answer): number for number, answer in self._answers}
        if not all(id(leaf) in known for leaf in leaves(message)):  # what was made of one has another sensitivity
            raise SordinoError("message: noise is added to the sum of answers, so each must be sent as it is.")
        return [known[id(leaf)] for leaf in leaves(message)]

    def _answer(self, kind: Kind, axes: int, total: Callable[[float], Tensor]) -> Tensor:
        number = self._number(kind)
        query, call = self._stage.queries[number], self._spent[number]
        if self._preparing and query.noise is not None:
            raise OverspentError(f"prepare asked the {kind} query, whose answers are released; only work may")
        if call >= query.calls:
            raise OverspentError(f"the {kind} query was declared for {query.calls} calls a round and asked once more")
        self._spent[number] += 1
        with self._chance():
            answer = total(query.clip).double()
        if answer.dim() > self._axes - 1 + axes:  # all would carry the same noise, and differ without any
            raise OverspentError(f"the {kind} query was asked about several models at once")
        if query.noise is not None and not self._quiet:
            answer = self._noised(answer, number, call, axes)
        answer = answer / along(self._divisor(kind), axes)
        wide = self._wide or (self._quiet and query.noise is not None)
        answer = answer if wide else answer.to(self._sizes.dtype)
        self._answers.append((number, answer))
        return answer

    def _divisor(self, kind: Kind) -> Tensor:
        """The number of records an answer is about: all, or those a minibatch is expected to hold."""
        return self._sizes * self._rates if kind in SAMPLED and self._rates is not None else self._sizes

    def _of_each_run(self, answer: Tensor) -> Tensor:
        """An answer that knows no theta, and so no runs, said once for each; a cache is the same for all."""
        worlds = self._all().x.dim() - 2 > self._sizes.dim()
        return answer if worlds or self._preparing else answer.expand(*self.runs, *answer.shape)

    @contextmanager
    def _chance(self) -> Iterator[None]:
        """Dropout and the like, from the source's own randomness: a mask that others knew by its place in the batch
        would tell who is in it."""
        if not getattr(self._model, "random", False) or self._luck is None:
            yield
            return
        devices = [self._sizes.device] if self._sizes.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self._luck(sum(self._spent)))
            yield

    def _number(self, kind: Kind) -> int:
        for number, query in enumerate(self._stage.queries):
            if query.kind is kind:
                return number
        raise OverspentError(f"this stage declares no {kind} query; add Query(Kind.{kind.name}, clip) to it")

    def _noised(self, answer: Tensor, number: int, call: int, axes: int) -> Tensor:
        std = along(self._stds[number], axes)
        if not std.any():
            return answer
        return noised(answer, self._draw(number, call, tuple(answer.shape[-axes:])), std, secret=self._secret)


def encode_integers(plan: Plan, round_plan: RoundPlan, i: int, message: Tree, source: Source) -> np.ndarray:
    """Client i's message as integers modulo 2^32: weighted, randomly rounded, and noised."""
    level = next(level for level in calibration.query_noises(plan) if level.stage == plan.stage_of(round_plan.t))
    if not isinstance(message, Tensor) or plan.integers is None or tuple(message.shape) != (plan.integers.dimension,):
        raise SordinoError("message: secure aggregation adds up one vector of the model's size.")
    shape, at = (message.numel(),), Address(i, round_plan.t, level.number)
    steps = 1 / (level.step * level.weight.max())
    dither = source.uniform(at._replace(query=ROUNDING), shape)
    whole = discrete_gaussian.encode(plan.weights[i] * message.double().numpy(), steps, dither)
    whole += discrete_gaussian.draw(source, at, calibration.integer_variance(plan, level), shape)
    return discrete_gaussian.modular(whole)


def decode_sum(plan: Plan, round_plan: RoundPlan, total: np.ndarray) -> Tensor:
    """The aggregate, from the sum of integers modulo 2^32."""
    level = next(level for level in calibration.query_noises(plan) if level.stage == plan.stage_of(round_plan.t))
    return torch.from_numpy(discrete_gaussian.decode(total, 1 / (level.step * level.weight.max())))


def along(value: Tensor, axes: int) -> Tensor:
    """A per-client number, shaped to multiply an answer with that many axes of its own."""
    return value.reshape(value.shape + (1,) * axes)
