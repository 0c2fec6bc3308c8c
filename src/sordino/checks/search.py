"""Contract 1: no neighbour found by an adversarial search moves a release further than its query claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.fixtures import CLIENT_SIZES, Space, Through, bits, rows_per_unit, same, short_plan
from sordino.core import Adjacency, Broadcast, Kind, Method, Query, Shard, Tree, Unit, nothing
from sordino.data.records import Records
from sordino.engines import reference
from sordino.engines.schedule import RoundPlan, round_plans
from sordino.models.arithmetic import exact_arithmetic
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Address, Noiseless, Seeded
from sordino.privacy.participation import FULL, Sampling
from sordino.privacy.plan import Plan
from sordino.tree import leaves, tree_map

REQUIRED_SHARE = 0.9  # of every claim: the search must reach it, or it says nothing about the claim
ROUNDING_SLACK = 1e-9
TRIALS, CLIMB_STEPS = 40, 10  # for one query: restarts, and steps of hill climbing after each restart
SIZES = (0.0, 0.1, 100.0, None)  # scales of a random theta; None: the theta of a run
OTHER_SIZES = (1.0, 3.0, None, 0.3)  # for a further search: deep networks with many classes are worst in between
MORE_STEPS = 6  # times as many for a lemma, whose worst case is not just one long record, and in a further search
EXTREME_VALUES = (math.nan, math.inf, -math.inf, 1e200)  # the square of the last is infinite

Call = tuple[int, int]  # (number of the query, number of the call)


def exceeds(moved: float, claimed: float) -> bool:
    """Whether a release moved further than claimed, rounding apart."""
    return moved > claimed * (1 + ROUNDING_SLACK)


class Found(NamedTuple):
    """The neighbours that moved a release furthest, relative to the claim for a client of their size."""

    query: str
    claimed: float
    worst: float
    where: str

    @property
    def reached(self) -> float:
        return self.worst / self.claimed

    @property
    def beyond(self) -> bool:
        return exceeds(self.worst, self.claimed)

    @property
    def problems(self) -> list[str]:
        if math.isinf(self.worst):
            return [f"sensitivity: {self.query} is not finite, or its message reveals more, with {self.where}"]
        if self.beyond:
            return [
                f"sensitivity: {self.query} claims {self.claimed:.6g} but moves by {self.worst:.6g} with {self.where}"
            ]
        if self.worst < REQUIRED_SHARE * self.claimed:
            return [
                f"sensitivity: the search moved {self.query} by only {self.worst:.6g} of {self.claimed:.6g}; it must "
                f"reach {REQUIRED_SHARE:.0%}; tighten the bound, or improve the search"
            ]
        return []


def sensitivity(
    method: Method,
    model: core.Model,
    adjacency: Adjacency,
    *,
    trials: int = TRIALS,
    steps: int = CLIMB_STEPS,
    seed: int = 0,
    further: bool = False,
    rejects: Collection[int] | None = None,
    sampling: str = FULL,
) -> list[Found]:
    """Search for neighbours that move a release, before noise, further than its query claims.

    Releases compose adaptively. So both neighbours have the same past (theta, extras, memory, earlier answers of the
    round). They differ in the data of one client, from which each builds its own cache. The engine's own client code
    computes all answers, so the search tests the clip that ships.

    Args:
      method: the method to check.
      model: the model on which it runs.
      adjacency: which data sets are neighbours.
      trials: restarts of the search for one query.
      steps: steps of hill climbing after each restart.
      seed: seed of the search.
      further: another search, with more steps, other thetas and neighbours that differ in a label alone.
      rejects: numbers of noised queries that a mutant breaks. Only these are searched, each until it moves further
        than claimed. None searches all of them to the end.
      sampling: the minibatches that claims are about. Those of the search hold all records: a sample that holds fewer
        is that of a client with fewer.

    Returns:
      The worst case of each noised query.
    """
    with exact_arithmetic(), torch.inference_mode(without_autograd(model)):  # held once for all sums
        search = Search(method.unit, adjacency, model, Space.of(model), np.random.default_rng(seed), further)
        sizes = OTHER_SIZES if further else SIZES
        claims = [
            partial(Query.sensitivity, adjacency=adjacency, unit=method.unit, records=m, rate=float(rate))
            for m, rate in zip(CLIENT_SIZES, Sampling.parse(sampling).rates(np.array(CLIENT_SIZES, float)), strict=True)
        ]
        known: list[tuple[int, Callable[[], Scene]]] = []
        for epsilon in (8.0, 0.05):  # little noise; then so much that model and memory take extreme values
            records = search.space.records(search.rng, method.unit)
            known += scenes(short_plan(method, adjacency, epsilon=epsilon, sampling=sampling), model, records, seed)
        results: list[Found] = []
        for s, stage in enumerate(method.stages):
            pasts = [scene for in_stage, scene in known if in_stage == s]
            for number, query in enumerate(stage.queries):
                if query.noise is None:
                    continue
                patience = steps * (MORE_STEPS if query.bound is not None or further else 1)
                worst = Found(f"{s}.{number} {query.kind}", claims[0](query), 0.0, "")
                for trial in range(trials if rejects is None or len(results) in rejects else 0):
                    client = trial % len(CLIENT_SIZES)
                    claimed = claims[client](query)
                    scene = pasts[search.rng.integers(len(pasts))]()
                    size = sizes[trial % len(sizes)]
                    if size is not None:
                        theta = size * torch.from_numpy(search.rng.normal(size=model.size))
                        scene = scene._replace(broadcast=scene.broadcast._replace(theta=theta))
                    enough = math.inf if rejects is None else claimed
                    moved, where = search.climb(scene, client, number, patience, enough, query.bound is not None)
                    if moved / claimed > worst.reached:
                        worst = Found(worst.query, claimed, moved, where)
                    if worst.beyond:  # conclusive
                        break
                results.append(worst)
        return results


def without_autograd(model: core.Model) -> bool:
    """Whether the model computes its gradients by formulas of this package. Tensors then need no bookkeeping."""
    return isinstance(model, Linear) and type(model).__module__.startswith("sordino.")


class Scene(NamedTuple):
    """What both neighbours share at the start of a round."""

    round_plan: RoundPlan
    broadcast: Broadcast
    memory: tuple[Tree, ...]


def scenes(plan: Plan, model: core.Model, records: Records, seed: int) -> list[tuple[int, Callable[[], Scene]]]:
    """The stage of each round of a noised run, and a function that returns its scene. The run goes on when it must."""
    known: list[Scene] = []
    later = _run(plan, model, records, seed)

    def scene(t: int) -> Scene:
        known.extend(itertools.islice(later, max(0, t + 1 - len(known))))
        return known[t]

    return [(plan.stage_of(t), partial(scene, t)) for t in range(plan.rounds)]


def _run(plan: Plan, model: core.Model, records: Records, seed: int) -> Iterator[Scene]:
    """The scene of each round of a noised run, from the end of the round before it."""
    theta = model.init().to(records.x)
    state: Tree = ()
    memory: tuple[Tree, ...] = ((),) * plan.clients
    rounds = reference.run(plan, model, records, Seeded(seed))
    for round_plan in round_plans(plan, model):
        if round_plan.t == round_plan.first:
            state = round_plan.stage.rule.init(theta, round_plan.facts, state)
            memory = tuple(round_plan.stage.local.init(theta, mine) for mine in memory)
        yield Scene(round_plan, Broadcast(theta, round_plan.stage.rule.broadcast(state)), memory)
        after = next(rounds)
        theta, state = after.checkpoint.theta, after.checkpoint.state
        memory = tuple(after.checkpoint.memory)


@dataclass(frozen=True)
class ClientRecords(Records):
    """The data of the client under test. A row that is not filled is absent; the public size stays the same."""

    def shard(self, i: int) -> Shard:
        return super().shard(0)


class Pair(NamedTuple):
    """A client and its replacement. The neighbour takes one record, one person or all rows of the replacement."""

    x: Tensor
    y: Tensor
    filled: Tensor
    other_x: Tensor
    other_y: Tensor
    other_filled: Tensor

    def copy(self) -> Pair:
        return Pair(*(part.clone() for part in self))


class Search(NamedTuple):
    """A search for the worst neighbours of one query."""

    unit: Unit
    adjacency: Adjacency
    model: core.Model
    space: Space
    rng: np.random.Generator
    relabels: bool = False  # a step may make the neighbour the same record with another label

    def climb(
        self, scene: Scene, client: int, number: int, steps: int, enough: float, lemma: bool = False
    ) -> tuple[float, str]:
        """Hill climbing from random neighbours: how far a release moves, and a description of where.

        It ends at the first step that exceeds `enough`.
        """
        rows = CLIENT_SIZES[client] * rows_per_unit(self.unit)
        row = int(self.rng.integers(rows))
        x, y = self.space.draw(self.rng, rows)
        other_x, other_y = self.space.draw(self.rng, rows)
        pair = Pair(x, y, self.fill(rows), other_x, other_y, self.fill(rows))
        if lemma and self.rng.random() < 0.5:
            pair.x[torch.arange(rows) != row] = 0
        if self.rng.random() < 0.2:
            pair.x[self.rng.integers(rows), self.rng.integers(self.space.features)] = self.rng.choice(EXTREME_VALUES)
        past: dict[Call, Tensor] = {}
        first = self.neighbours(pair, row)[0]  # its noised answers become the common past
        _release(self.model, scene, client, past, first, Seeded(int(self.rng.integers(2**32))))

        releases: dict[Any, tuple[dict[Call, Tensor], Tree]] = {}

        def release(records: ClientRecords, scene: Scene) -> tuple[dict[Call, Tensor], Tree]:
            """Cached, because many steps leave one or both neighbours unchanged."""
            assert records.filled is not None
            key = bits((records.x, records.y, records.filled, scene.memory[client]))
            if key not in releases:
                releases[key] = _release(self.model, scene, client, past, records)
            return releases[key]

        def moved(pair: Pair, scene: Scene) -> tuple[float, Tensor | None]:
            """How far the release moves, and the difference itself."""
            here, there = self.neighbours(pair, row)
            sums, message = release(here, scene)
            others, other = ({}, message) if there is None else release(there, scene)
            if past and not same(message, other):  # the noised answers are the same, but the messages differ
                return math.inf, None
            gaps = [total - others.get(call, 0.0) for call, total in sums.items() if call[0] == number]
            sizes = [float(gap.norm()) for gap in gaps]
            return max(
                ((s if math.isfinite(s) else math.inf, g) for s, g in zip(sizes, gaps, strict=True)),
                key=lambda pair: pair[0],
            )

        best, gap = moved(pair, scene)
        for _ in range(steps):
            if exceeds(best, enough):
                break
            near, past_scene = pair, scene
            if gap is not None and leaves(scene.memory[client]) and self.rng.random() < 0.4:
                past_scene = self.leaning(scene, client, gap)
            else:
                near = self.nudged(pair, row)
            size, where = moved(near, past_scene)
            if size >= best:
                best, gap, pair, scene = size, where, near, past_scene
        at = self.unit_rows(row)
        return best, f"a client of {CLIENT_SIZES[client]}, x = {pair.x[at].tolist()}, y = {pair.y[at].tolist()}"

    def leaning(self, scene: Scene, client: int, gap: Tensor) -> Scene:
        """The scene with another memory of the client: along the direction in which its release moved, or rescaled.

        Any memory is possible.
        """
        aim, length = self.rng.random() < 0.5, self.rng.choice([-1, 1]) * 10 ** self.rng.uniform(-1, 1)
        factor = 10 ** (0.2 * self.rng.normal())

        def lean(leaf: Tensor) -> Tensor:
            along = aim and leaf.shape == gap.shape
            return length * gap / gap.norm().clamp_min(1e-30) if along else factor * leaf

        changed = tree_map(lean, scene.memory[client])
        return scene._replace(memory=(*scene.memory[:client], changed, *scene.memory[client + 1 :]))

    def fill(self, rows: int) -> Tensor:
        """Which rows hold a record: all, or at person level any number of each person's, but one at least."""
        filled = torch.ones(rows, dtype=torch.bool)
        if self.unit is Unit.PERSON:
            per_person = rows_per_unit(self.unit)
            counts = torch.from_numpy(self.rng.integers(1, per_person + 1, size=rows // per_person))
            filled = (torch.arange(per_person) < counts.unsqueeze(-1)).flatten()
        return filled

    def unit_rows(self, row: int) -> slice:
        """The rows of the unit that a row belongs to."""
        if self.unit is Unit.CLIENT:
            return slice(None)
        per_person = rows_per_unit(self.unit)
        first = row // per_person * per_person
        return slice(first, first + per_person)

    def neighbours(self, pair: Pair, row: int) -> tuple[ClientRecords, ClientRecords | None]:
        """The client's data and the neighbouring data; None if the whole client is absent."""
        ends, per_person = np.array([0, len(pair.y)]), rows_per_unit(self.unit)

        def client(x: Tensor, y: Tensor, filled: Tensor) -> ClientRecords:
            # As in padding: nothing of an absent record remains, not even behind the mask.
            x, y = x.masked_fill(~filled.unsqueeze(-1), 0), y.masked_fill(~filled, 0)
            return ClientRecords(x, y, ends, filled, per_person)

        here = client(*pair[:3])
        joins = self.adjacency is Adjacency.ADD_REMOVE
        if self.unit is Unit.CLIENT and joins:
            return here, None
        at, near = self.unit_rows(row), pair.copy()
        for mine, other in zip(near[:3], near[3:], strict=True):
            mine[at] = 0 if joins else other[at]
        return here, client(*near[:3])

    def nudged(self, pair: Pair, row: int) -> Pair:
        """The pair after one random change.

        A record is rescaled, turned, relabelled, mirrored in the neighbour (perhaps shorter and with a larger label),
        copied to all rows, or kept while all other rows become zero. At person level the rows of a person may also
        become copies of one of them, or hold another number of records.
        """
        pair, rng = pair.copy(), self.rng
        x, y, filled = pair[:3] if rng.random() < 0.5 else pair[3:]
        row = row if rng.random() < 0.7 else int(rng.integers(len(y)))
        at = self.unit_rows(row)
        match rng.integers(8 if self.unit is Unit.PERSON else 6):
            case 0:
                x[row] *= 10 ** rng.normal()
            case 1:
                x[row] += x[row].norm() * 10 ** rng.uniform(-3, 0) * torch.from_numpy(rng.normal(size=x.shape[-1]))
            case 2:
                y[row] = self.space.labels(rng, 1)[0]
            case 3 if self.relabels and self.space.classes and rng.random() < 0.5:
                pair.other_x[at], pair.other_y[at] = pair.x[at], self.space.labels(rng, 1)[0]
                pair.other_filled[at] = pair.filled[at]
            case 3:
                length = 1.0 if self.space.classes or rng.random() < 0.5 else 10 ** rng.uniform(-4, 0)
                pair.other_x[at], pair.other_y[at] = -length * pair.x[at], pair.y[at] / length
                pair.other_filled[at] = pair.filled[at]
            case 4:
                x[:], y[:] = x[row].clone(), y[row].clone()
            case 6:
                x[at], y[at], filled[at] = x[row].clone(), y[row].clone(), True
            case 7:
                filled[at] = self.fill(at.stop - at.start)
            case _:
                record = x[row].clone()
                x[:], y[:] = 0, 0
                x[row] = record
        return pair


class DrawsAll(Noiseless):
    """A source without noise; minibatches hold all records."""

    def uniform(self, at: Address, shape: tuple[int, ...]) -> np.ndarray:
        """Uniforms of the smallest cell, for every record."""
        return np.full(shape, 2.0**-53)


def _release(
    model: core.Model,
    scene: Scene,
    i: int,
    past: dict[Call, Tensor],
    records: ClientRecords,
    noise: Seeded | None = None,
) -> tuple[dict[Call, Tensor], Tree]:
    """The answers that client i would release, before noise, and its message.

    The client's rule receives noised answers from `past`. Answers that are not in `past` are added to it, with `noise`
    if it is given.
    """
    round_plan = (
        scene.round_plan
        if noise is not None
        else scene.round_plan._replace(stds=[0 * std for std in scene.round_plan.stds])
    )
    source = noise or DrawsAll()
    ask = reference.oracle(model, records, round_plan, i, source)
    numbers = {str(query.kind): k for k, query in enumerate(round_plan.stage.queries) if query.noise is not None}
    sums: dict[Call, Tensor] = {}

    def record_answer(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        answer = method(*args, **kwargs)
        call = (numbers[name], sum(number == numbers[name] for number, _ in sums))
        sums[call] = answer * ask.records
        return past.setdefault(call, answer)

    local, recorder = round_plan.stage.local, Through(ask, numbers, record_answer)
    try:
        cache: Tree = ()
        if local.prepare is not nothing:
            cache = local.prepare(reference.oracle(model, records, round_plan, i, source, preparing=True))
        message = ask.finish(local.compute(recorder, scene.broadcast, scene.memory[i], cache))
    except RuntimeError:  # a client that stops reveals something
        message = scene.broadcast.theta * math.nan
    return {(numbers[Kind.DELTA], 0): message} if isinstance(
        message, Tensor
    ) and Kind.DELTA in numbers else sums, message
