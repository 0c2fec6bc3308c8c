"""The contracts every method keeps, shipped so that whoever adds a method can run them: `sordino check`.

- `sensitivity`: no neighbour found by an adversarial search moves a release further than its query claims.
- `asks`: a round asks no more of the data than was declared, and one question more is refused.
- `replay`: server and clients post-process what was said; given the same messages, other data change nothing.
- `engines`: the fast engine computes what the readable one means.

A contract that cannot fail proves nothing: `check` also holds each of them against `WRONG_TWINS` of the very method
under test, and reports a twin that passes. No method is named here; each contract takes any `Method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    Adjacency,
    Batch,
    Correlated,
    Divisor,
    Down,
    Kind,
    Lemma,
    Local,
    Method,
    Model,
    OverspentError,
    Privacy,
    Query,
    Round,
    Rule,
    Shard,
    SordinoError,
    Stage,
    Tree,
    Unit,
)
from sordino.data.shard import Records
from sordino.engines import reference, simulate
from sordino.engines.client import Turn, turns
from sordino.methods import REGISTRY, build, entry
from sordino.models.linear import Linear, Loss
from sordino.privacy.ledger import Ledger
from sordino.privacy.noise import Seeded, Silent
from sordino.privacy.plan import Participation, Plan
from sordino.tree import leaves, tree_map

SIZES = (1, 2, 5, 7, 8)  # a client of one record, and three of unequal size that share a padded batch
REACH = 0.9  # of every claim: a search that comes no nearer says nothing about the rest
SLACK = 1e-9
TOLERANCE = 1e-9  # between engines, relative to max(1, |theta|)
TRIALS = 40  # restarts of the search, for each noised query
STEPS = 10  # of hill climbing after each


class Report(NamedTuple):
    """One noised query of a method, for one unit and adjacency. Problems of the whole method stand in each of them."""

    name: str
    unit: str
    adjacency: str
    query: str
    claimed: float
    worst_found: float
    engines_max_diff: float
    passed: bool
    problems: list[str]


def check(
    name: str, *, trials: int = TRIALS, seed: int = 0, model: Model | None = None, method: Method | None = None
) -> list[Report]:
    """All contracts, and their wrong twins, for each unit of a registered method, or for the `method` given."""
    model = Linear(3, 3) if model is None else model
    subjects = [build(name, unit) for unit in entry(name).units] if method is None else [method]
    return [report for subject in subjects for report in _reports(name, subject, model, trials, seed)]


def check_all(*, trials: int = TRIALS, seed: int = 0) -> list[Report]:
    """Every registered method."""
    return [report for name in REGISTRY for report in check(name, trials=trials, seed=seed)]


def _reports(name: str, method: Method, model: Model, trials: int, seed: int) -> Iterator[Report]:
    if overspent := asks(method, model, seed=seed):  # then no round can be run
        yield Report(name, method.unit, "", "", 0.0, 0.0, 0.0, False, overspent)
        return
    difference = engines(method, model, seed=seed)
    problems = replay(method, model, seed=seed)
    if not difference <= TOLERANCE:
        problems.append(f"engines: they differ by {difference:.2g}, and {TOLERANCE:g} is allowed")
    problems += [
        _passed(twin) for twin in WRONG_TWINS if twin.contract in _REJECTS and not _rejected(twin, method, model)
    ]
    for adjacency in Adjacency:
        blind: dict[str, list[str]] = {}
        for twin in WRONG_TWINS:
            if twin.contract == "sensitivity" and (wrong := twin.make(method, model)) is not None:
                for found in sensitivity(*wrong, adjacency, trials=trials, seed=seed):
                    blind.setdefault(found.query, []).extend([] if found.beyond else [_passed(twin)])
        for found in sensitivity(method, model, adjacency, trials=trials, seed=seed):
            mine = problems + found.problems + blind[found.query]
            numbers = (found.claimed, found.worst, difference)
            yield Report(name, method.unit, adjacency, found.query, *numbers, not mine, mine)


# ----------------------------------------------------------------------------------------------------- 1. sensitivity


class Found(NamedTuple):
    """The neighbours that moved a release furthest, measured by what their client's size lets its query claim."""

    query: str
    claimed: float
    worst: float
    where: str

    @property
    def beyond(self) -> bool:
        return self.worst > self.claimed * (1 + SLACK)

    @property
    def problems(self) -> list[str]:
        if math.isinf(self.worst):
            return [f"sensitivity: {self.query} is not finite, or tells more than its answers, for {self.where}"]
        if self.beyond:
            return [f"sensitivity: {self.query} claims {self.claimed:.6g} and moved by {self.worst:.6g}, {self.where}"]
        if self.worst < REACH * self.claimed:
            return [
                f"sensitivity: the search moved {self.query} by {self.worst:.6g} of {self.claimed:.6g} only; "
                f"it must reach {REACH:.0%}: tighten the bound, or search better"
            ]
        return []


def sensitivity(
    method: Method, model: Model, adjacency: Adjacency, *, trials: int = TRIALS, steps: int = STEPS, seed: int = 0
) -> list[Found]:
    """Search, noise off, for neighbours that move a release further than claimed; one result for each noised query.

    Releases compose adaptively: both worlds have the same past (theta, words, memory, earlier answers of the round),
    and differ in the data of one client, from which each builds its own cache. All answers come from the engine's own
    client code, so the clip that is tested is the clip that ships.
    """
    rng = np.random.default_rng(seed)
    space = Space.of(model)
    pasts = [
        scene
        for epsilon in (8.0, 0.05)  # little noise, and so much that model and memory are thrown about
        for scene in _scenes(_plan(method, adjacency, epsilon=epsilon), model, space.records(rng), seed)
    ]
    found = []
    for s, stage in enumerate(method.stages):
        here = [scene for scene in pasts if scene.turn.stage is stage]
        for number, query in enumerate(stage.queries):
            if query.noise is None:
                continue
            worst = Found(f"{s}.{number} {query.kind}", query.sensitivity(adjacency, SIZES[0]), 0.0, "")
            for trial in range(trials):
                client = trial % len(SIZES)
                claimed = query.sensitivity(adjacency, SIZES[client])
                scene = here[rng.integers(len(here))].at(trial, rng)
                moved, where = _climb(method.unit, model, adjacency, space, scene, client, number, steps, rng)
                if moved / claimed > worst.worst / worst.claimed:
                    worst = Found(worst.query, claimed, moved, where)
                if worst.beyond:  # conclusive
                    break
            found.append(worst)
    return found


class Scene(NamedTuple):
    """What both worlds share at the start of a round."""

    turn: Turn
    down: Down
    memory: tuple[Tree, ...]

    def at(self, trial: int, rng: np.random.Generator) -> Scene:
        """With another model, which noise could have led to: none, a small one, a large one, the one that came."""
        size = (0.0, 0.1, 100.0, None)[trial % 4]
        theta = self.down.theta
        if size is not None:
            theta = size * torch.from_numpy(rng.normal(size=theta.shape)).to(theta)
        return self._replace(down=self.down._replace(theta=theta))


def _scenes(plan: Plan, model: Model, records: Records, seed: int) -> Iterator[Scene]:
    """The start of each round of a noised run."""
    theta, state, memory = model.init().to(records.x), (), ((),) * plan.clients
    for turn, after in zip(turns(plan), reference.run(plan, model, records, Seeded(seed)), strict=True):
        if turn.t == turn.first:
            state = turn.stage.rule.init(theta, turn.facts, state)
            memory = tuple(turn.stage.local.init(theta, mine) for mine in memory)
        yield Scene(turn, Down(theta, turn.stage.rule.say(state)), memory)
        theta, state, memory = after.checkpoint


class Space(NamedTuple):
    """The records a model takes: vectors, with a label below `classes`, or any number where there are no classes."""

    features: int
    classes: int

    @staticmethod
    def of(model: Any) -> Space:
        try:
            return Space(model.features, 0 if model.kind is Loss.SQUARES else max(2, model.outputs))
        except AttributeError as missing:
            raise SordinoError(f"model: the checks must know its records; {missing}.") from None

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[Tensor, Tensor]:
        """Rows of any length from 1e-3 to 1e6, in any direction."""
        x = rng.normal(size=(rows, self.features))
        length = 10 ** rng.uniform(-3, 6, size=(rows, 1))
        return torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True) * length), self.labels(rng, rows)

    def labels(self, rng: np.random.Generator, rows: int) -> Tensor:
        if self.classes:
            return torch.from_numpy(rng.integers(self.classes, size=rows))
        return torch.from_numpy(rng.normal(size=rows) * 10 ** rng.uniform(-3, 6, size=rows))

    def records(self, rng: np.random.Generator) -> Records:
        """A federation of moderate records."""
        x, y = rng.normal(size=(sum(SIZES), self.features)), self.labels(rng, sum(SIZES)).clamp(-3, 3)
        return Records.of(x, y, np.repeat(np.arange(len(SIZES)), SIZES), dtype=torch.float64)


@dataclass(frozen=True)
class World(Records):
    """The data of the one client that is looked at. A record may be absent; the public size stays."""

    absent: int | None = None

    @staticmethod
    def holding(x: Tensor, y: Tensor, absent: int | None = None) -> World:
        if absent is not None:
            x, y = x.index_fill(0, torch.tensor(absent), 0), y.index_fill(0, torch.tensor(absent), 0)
        return World(x, y, np.array([0, len(y)]), absent)

    def shard(self, i: int) -> Shard:
        shard = super().shard(0)
        return (
            shard
            if self.absent is None
            else shard._replace(mask=shard.mask.index_fill(0, torch.tensor(self.absent), 0))
        )


class Pair(NamedTuple):
    """A client's records, and those that replace the protected ones in the other world."""

    x: Tensor
    y: Tensor
    other_x: Tensor
    other_y: Tensor
    row: int  # of the protected record; at user level all are

    def worlds(self, unit: Unit, adjacency: Adjacency) -> tuple[World, World | None]:
        here = World.holding(self.x, self.y)
        if adjacency is Adjacency.ADD_REMOVE:
            return here, None if unit is Unit.USER else World.holding(self.x, self.y, self.row)
        if unit is Unit.USER:
            return here, World.holding(self.other_x, self.other_y)
        x, y = self.x.clone(), self.y.clone()
        x[self.row], y[self.row] = self.other_x[self.row], self.other_y[self.row]
        return here, World.holding(x, y)

    def nudged(self, space: Space, rng: np.random.Generator) -> Pair:
        """One step: a record longer or shorter, turned, relabelled, mirrored in the other world, or copied all over."""
        pair = Pair(self.x.clone(), self.y.clone(), self.other_x.clone(), self.other_y.clone(), self.row)
        row = self.row if rng.random() < 0.7 else int(rng.integers(len(self.y)))
        x, y = (pair.x, pair.y) if rng.random() < 0.5 else (pair.other_x, pair.other_y)
        step = rng.integers(5)
        if step == 0:
            x[row] *= 10 ** rng.normal()
        elif step == 1:
            x[row] += x[row].norm() * 10 ** rng.uniform(-3, 0) * torch.from_numpy(rng.normal(size=space.features))
        elif step == 2:
            y[row] = space.labels(rng, 1)[0]
        elif step == 3:
            pair.other_x[row], pair.other_y[row] = -pair.x[row], pair.y[row]
        else:
            x[:], y[:] = x[row].clone(), y[row].clone()
        return pair


ODD = (math.nan, math.inf, -math.inf, 1e200)  # the last one's square is infinite


def _climb(
    unit: Unit,
    model: Model,
    adjacency: Adjacency,
    space: Space,
    scene: Scene,
    client: int,
    number: int,
    steps: int,
    rng: np.random.Generator,
) -> tuple[float, str]:
    """How far a release moves, from a random pair of neighbours uphill; and a word on where."""
    rows = SIZES[client]
    pair = Pair(*space.draw(rng, rows), *space.draw(rng, rows), int(rng.integers(rows)))
    if rng.random() < 0.15:
        pair.x[pair.row, rng.integers(space.features)] = ODD[rng.integers(len(ODD))]
    past: dict[tuple[int, int], Tensor] = {}
    _release(model, pair.worlds(unit, adjacency)[0], scene, client, past, noise=Seeded(int(rng.integers(2**32))))

    def moved(pair: Pair) -> float:
        here, there = pair.worlds(unit, adjacency)
        a, message = _release(model, here, scene, client, past)
        b, other = ({}, message) if there is None else _release(model, there, scene, client, past)
        if past and not _same(message, other):  # every noised answer was the same: so must be what is made of them
            return math.inf
        gaps = [float((sums - b.get(call, 0.0)).norm()) for call, sums in a.items() if call[0] == number]
        return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)

    best = moved(pair)
    for _ in range(steps):
        nearby = pair.nudged(space, rng)
        if (there := moved(nearby)) >= best:
            best, pair = there, nearby
    return best, f"client of {rows} records, x = {pair.x[pair.row].tolist()}, y = {pair.y[pair.row].item()}"


class Overheard:
    """`ask`, with every noised answer noted as the sum it was, and answered by what is on record."""

    def __init__(self, ask: Any, queries: tuple[Query, ...], past: dict[tuple[int, int], Tensor]) -> None:
        self._ask, self._queries, self._past = ask, queries, past
        self.sums: dict[tuple[int, int], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        number = next((k for k, query in enumerate(self._queries) if query.kind == name), None)
        if number is None or self._queries[number].noise is None:
            return getattr(self._ask, name)

        def answer(*args: Any, **kwargs: Any) -> Tensor:
            said: Tensor = getattr(self._ask, name)(*args, **kwargs)
            rate = next((a.rate for a in (*args, *kwargs.values()) if isinstance(a, Batch)), 1.0)
            call = (number, sum(n == number for n, _ in self.sums))
            self.sums[call] = said * self._ask.records * rate
            return self._past.setdefault(call, said)

        return answer


def _release(
    model: Model, world: World, scene: Scene, i: int, past: dict[tuple[int, int], Tensor], noise: Seeded | None = None
) -> tuple[dict[tuple[int, int], Tensor], Tree]:
    """Client i's noised sums by (query, call), before their noise, and its message. With `noise`, to put on record."""
    turn = scene.turn if noise is not None else scene.turn._replace(stds=[0 * std for std in scene.turn.stds])
    source = Silent() if noise is None else noise
    local, queries = turn.stage.local, turn.stage.queries
    oracle = reference.oracle(model, world, turn, i, source)
    ask: Any = Overheard(oracle, queries, past)
    try:
        cache = local.prepare(reference.oracle(model, world, turn, i, source, inside=True))
        message = oracle.finish(local.work(ask, scene.down, scene.memory[i], cache))
    except torch.linalg.LinAlgError:  # a client that stops tells something
        message = scene.down.theta * math.nan
    sums = {(k, 0): message for k, query in enumerate(queries) if query.kind is Kind.DELTA}
    return sums or ask.sums, message


# ------------------------------------------------------------------------------------------------------------ 2. asks


def asks(method: Method, model: Model, *, seed: int = 0) -> list[str]:
    """A plan runs on its declared calls, on both engines; one question more in any stage is refused."""
    records = Space.of(model).records(np.random.default_rng(seed))

    def refused(method: Method) -> list[str]:
        engines: dict[str, Callable[..., Iterator[Round]]] = {"reference": reference.run, "simulate": simulate.run}
        words = []
        for name, run in engines.items():
            try:
                list(run(_plan(method), model, records, Seeded(seed)))
            except OverspentError as error:
                words.append(f"asks: the {name} engine refused: {error}")
        return words

    if problems := refused(method):
        return problems
    for s, stage in enumerate(method.stages):
        stages = (*method.stages[:s], greedy(stage), *method.stages[s + 1 :])
        if len(refused(method._replace(stages=stages))) < 2:
            problems.append(f"asks: stage {s} asked once more than declared, and was answered")
    return problems


def greedy(stage: Stage) -> Stage:
    """The same stage, asking each of its questions until one more than was declared."""
    declared = {str(query.kind): query.calls for query in stage.queries}

    class Noted:
        def __init__(self, ask: Any) -> None:
            self.ask, self.asked = ask, list[tuple[str, Callable[[], Any]]]()

        def __getattr__(self, name: str) -> Any:
            if name not in declared:
                return getattr(self.ask, name)

            def answer(*args: Any, **kwargs: Any) -> Any:
                self.asked.append((name, lambda: getattr(self.ask, name)(*args, **kwargs)))
                return self.asked[-1][1]()

            return answer

    def work(ask: Any, down: Down, memory: Tree, cache: Tree) -> Tree:
        noted: Any = Noted(ask)
        message = stage.local.work(noted, down, memory, cache)
        for name, again in dict(noted.asked).items():
            for _ in range(declared[name] - sum(n == name for n, _ in noted.asked) + 1):
                again()
        return tree_map(torch.clone, message)

    return stage._replace(local=stage.local._replace(work=work))


# ---------------------------------------------------------------------------------------------------------- 3. replay


def replay(method: Method, model: Model, *, seed: int = 0) -> list[str]:
    """Log a noised run, then run it again on other data with the log: every message comes from there, and so model,
    state and memory are what they were, bit for bit. Twice, for a rule may remember what is not in its state."""
    rng = np.random.default_rng(seed)
    plan, problems = _plan(method, participation="fixed:3"), []
    with TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.db") as ledger:

        def run(n: int) -> list[Round]:
            records = Space.of(model).records(rng)
            return list(reference.run(plan, model, records, Seeded(seed + n), ledger=ledger, run_id="replay"))

        first, charged = run(0), len(ledger)
        for n in (1, 2):
            for before, after in zip(first, run(n), strict=True):
                if not _same((before.model, before.checkpoint), (after.model, after.checkpoint)):
                    problems.append(
                        f"replay: round {before.t} came out otherwise from the same messages; a rule or a client's "
                        "memory depends on more than what was said"
                    )
                    break
        if len(ledger) != charged:
            problems.append("replay: a message on record was made anew")
    return list(dict.fromkeys(problems))


# --------------------------------------------------------------------------------------------------------- 4. engines


def engines(method: Method, model: Model, *, seed: int = 0) -> float:
    """The largest difference between the engines' models, given the same noise, relative to max(1, |theta|)."""
    records = Space.of(model).records(np.random.default_rng(seed))
    worst = 0.0
    for who, divisor in (
        ("full", Divisor.CLIENT_MEAN),
        ("fixed:3", Divisor.POOLED),
        ("poisson:0.6", Divisor.CLIENT_MEAN),
    ):
        plan = _plan(method, participation=who, divisor=divisor)
        slow = reference.run(plan, model, records, Seeded(seed))
        fast = simulate.run(plan, model, records, Seeded(seed), shares=True)
        for a, b in zip(slow, fast, strict=True):
            gap = float((a.model - b.model).abs().max() / a.model.abs().max().clamp_min(1))
            worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


# -------------------------------------------------------------------------------------------------------- wrong twins


class Twin(NamedTuple):
    """A mistake a contract must reject. `make` gives None where it would not be one."""

    contract: str
    name: str
    make: Callable[[Method, Model], tuple[Method, Any] | None]


def _every(method: Method, change: Callable[[Stage], Stage]) -> Method:
    return method._replace(stages=tuple(change(stage) for stage in method.stages))


def half_claimed(method: Method, model: Model) -> tuple[Method, Any]:
    """Every query claims half of what it did."""

    def half(query: Query) -> Query:
        return replace(query, bound=Lemma("half", lambda m: query.sensitivity(Adjacency.ADD_REMOVE, m) / 2))

    return _every(method, lambda stage: stage._replace(queries=tuple(map(half, stage.queries)))), model


class Careless:
    """A model whose sums over records come from `total(sum by (shard, clip), shard, clip)`."""

    def __init__(self, model: Any, total: Callable[[Callable[[Shard, float], Tensor], Shard, float], Tensor]) -> None:
        self._model, self._total = model, total

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if not name.endswith("_sum"):
            return found
        return lambda *args: self._total(lambda shard, clip: found(*args[:-2], shard, clip), args[-2], args[-1])


def clips_some(method: Method, model: Model) -> tuple[Method, Any] | None:
    """Records with a positive label are clipped ten times too late."""

    def total(sums: Callable[[Shard, float], Tensor], shard: Shard, clip: float) -> Tensor:
        loose = (shard.y > 0).to(shard.mask)
        parts = ((loose, 10 * clip), (1 - loose, clip))
        return torch.stack([sums(shard._replace(mask=shard.mask * part), bound) for part, bound in parts]).sum(0)

    return None if _finished(method) else (method, Careless(model, total))


def clips_the_mean(method: Method, model: Model) -> tuple[Method, Any] | None:
    """The mean over records is clipped, not each of them."""

    def total(sums: Callable[[Shard, float], Tensor], shard: Shard, clip: float) -> Tensor:
        whole, most = sums(shard, 1e6 * clip), clip * shard.y.shape[-1]
        return whole * (most / whole.norm().clamp_min(most))

    return None if _finished(method) else (method, Careless(model, total))


def _finished(method: Method) -> bool:
    """Does the engine noise finished messages somewhere? It bounds them itself then, or a lemma does."""
    return any(query.kind is Kind.DELTA for stage in method.stages for query in stage.queries)


def asks_once_more(method: Method, model: Model) -> tuple[Method, Any]:
    return _every(method, greedy), model


def has_moods(method: Method, model: Model) -> tuple[Method, Any]:
    """The server draws random numbers that are not in its state."""
    hidden = torch.Generator().manual_seed(0)

    def change(stage: Stage) -> Stage:
        def update(aggregate: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
            step, state = stage.rule.update(aggregate, state, theta, t)
            return step + torch.randn(step.shape, generator=hidden).to(step), state

        return stage._replace(rule=stage.rule._replace(update=update))

    return _every(method, change), model


def remembers_the_unsaid(method: Method, model: Model) -> tuple[Method, Any]:
    """Clients keep the message as it was before the engine noised it, in a corner of their own."""

    def change(stage: Stage) -> Stage:
        local, corner = stage.local, [()]

        def work(ask: Any, down: Down, memory: Tree, cache: Tree) -> Tree:
            corner[0] = local.work(ask, down, memory[0], cache)
            return corner[0]

        def remember(message: Tree, down: Down, memory: Tree) -> Tree:
            return local.remember(message, down, memory[0]), corner[0]

        def init(theta: Tensor, before: Tree) -> Tree:
            return local.init(theta, before[0] if before else ()), ()

        return stage._replace(local=Local(work, remember, init, local.prepare))

    return _every(method, change), model


def mixes_clients(method: Method, model: Model) -> tuple[Method, Any]:
    """A client's rule takes a norm over all axes, so that a batch of clients is not a loop over them."""

    def change(stage: Stage) -> Stage:
        def work(ask: Any, down: Down, memory: Tree, cache: Tree) -> Tree:
            message = stage.local.work(ask, down, memory, cache)
            return tree_map(lambda leaf: leaf / (1 + leaf.norm()), message)

        return stage._replace(local=stage.local._replace(work=work))

    return _every(method, change), model


def looks_around(method: Method, model: Model) -> tuple[Method, Any]:
    """The model scales by the longest record it is handed, and the fast engine hands it several clients' at once."""

    def total(sums: Callable[[Shard, float], Tensor], shard: Shard, clip: float) -> Tensor:
        return sums(shard, clip) / shard.x.abs().max()

    return method, Careless(model, total)


WRONG_TWINS = (
    Twin("sensitivity", "half_claimed", half_claimed),
    Twin("sensitivity", "clips_some", clips_some),
    Twin("sensitivity", "clips_the_mean", clips_the_mean),
    Twin("asks", "asks_once_more", asks_once_more),
    Twin("replay", "has_moods", has_moods),
    Twin("replay", "remembers_the_unsaid", remembers_the_unsaid),
    Twin("engines", "mixes_clients", mixes_clients),
    Twin("engines", "looks_around", looks_around),
)

_REJECTS: dict[str, Callable[[Method, Any], bool]] = {
    "asks": lambda method, model: bool(asks(method, model)),
    "replay": lambda method, model: bool(replay(method, model)),
    "engines": lambda method, model: not engines(method, model) <= TOLERANCE,
}


def _rejected(twin: Twin, method: Method, model: Model) -> bool:
    wrong = twin.make(method, model)
    return wrong is None or _REJECTS[twin.contract](*wrong)


def _passed(twin: Twin) -> str:
    return f"{twin.contract}: the contract did not see that its wrong twin '{twin.name}' is wrong"


# ------------------------------------------------------------------------------------------------------------- shared


def _plan(
    method: Method,
    adjacency: Adjacency = Adjacency.REPLACE_ONE,
    *,
    epsilon: float = 8.0,
    participation: str = "full",
    divisor: Divisor = Divisor.POOLED,
) -> Plan:
    """A short one. A correlated stream is no longer than its factors."""
    streams = [
        len(q.noise.decoder) for stage in method.stages for q in stage.queries if isinstance(q.noise, Correlated)
    ]
    open_ended = any(stage.rounds is None for stage in method.stages)
    rounds = sum(stage.rounds or 0 for stage in method.stages) + open_ended * min([3, *streams])
    privacy = Privacy(epsilon, unit=method.unit, adjacency=adjacency)
    return Plan(method, rounds, SIZES, privacy, Participation.parse(participation), divisor, uncertified=True)


def _same(a: Tree, b: Tree) -> bool:
    """Bit for bit."""
    ours, theirs = ([leaf.detach().cpu().numpy().tobytes() for leaf in leaves(tree)] for tree in (a, b))
    return ours == theirs
