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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.core import Adjacency, Divisor, Down, Kind, Method, OverspentError, Query, Shard, Stage, Tree, Unit
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
TRIALS, STEPS = 40, 10  # of the search for one query: restarts, and hill climbing after each
ODD = (math.nan, math.inf, -math.inf, 1e200)  # the square of the last is infinite

Call = tuple[int, int]  # (number of the query, which of its calls)


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
    name: str, *, trials: int = TRIALS, seed: int = 0, model: core.Model | None = None, method: Method | None = None
) -> list[Report]:
    """All contracts, and their wrong twins, for each unit of a registered method, or for the `method` given."""
    model = Linear(3, 3) if model is None else model
    subjects = [build(name, unit) for unit in entry(name).units] if method is None else [method]
    return [report for subject in subjects for report in _reports(name, subject, model, trials, seed)]


def check_all(*, trials: int = TRIALS, seed: int = 0) -> list[Report]:
    """Every registered method."""
    return [report for name in REGISTRY for report in check(name, trials=trials, seed=seed)]


def _reports(name: str, method: Method, model: Any, trials: int, seed: int) -> Iterator[Report]:
    if problems := asks(method, model, seed=seed):  # then there may be no round to look at
        yield Report(name, method.unit, "", "", 0.0, 0.0, 0.0, False, problems)
        return
    problems = replay(method, model, seed=seed)
    difference = engines(method, model, seed=seed)
    if not difference <= TOLERANCE:
        problems.append(f"engines: they differ by {difference:.2g}, and {TOLERANCE:g} is allowed")
    rejects: dict[str, Callable[..., bool]] = {
        "asks": lambda *wrong: bool(asks(*wrong, seed=seed)),
        "replay": lambda *wrong: bool(replay(*wrong, seed=seed)),
        "engines": lambda *wrong: not engines(*wrong, seed=seed) <= TOLERANCE,
    }
    for contract, reject in rejects.items():
        problems += [_unseen(contract, twin) for twin in WRONG_TWINS[contract] if not reject(*twin(method, model))]
    for adjacency in Adjacency:
        search = partial(sensitivity, adjacency=adjacency, trials=trials, seed=seed)
        twins = {twin: search(*twin(method, model)) for twin in WRONG_TWINS["sensitivity"] if _breaks(twin, method)}
        for k, found in enumerate(search(method, model)):
            mine = [*problems, *found.problems]
            mine += [_unseen("sensitivity", twin) for twin, wrong in twins.items() if not wrong[k].beyond]
            numbers = (found.claimed, found.worst, difference)
            yield Report(name, method.unit, adjacency, found.query, *numbers, not mine, mine)


def _unseen(contract: str, twin: Callable[..., Any]) -> str:
    return f"{contract}: the contract did not see that its wrong twin '{twin.__name__}' is wrong"


# ----------------------------------------------------------------------------------------------------- 1. sensitivity


class Found(NamedTuple):
    """The neighbours that moved a release furthest, measured by what a client of their size claims."""

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
            return [f"sensitivity: {self.query} is not finite, or the message tells more than it, with {self.where}"]
        if self.beyond:
            return [f"sensitivity: {self.query} claims {self.claimed:.6g}, moved by {self.worst:.6g} with {self.where}"]
        if self.worst < REACH * self.claimed:
            return [
                f"sensitivity: the search moved {self.query} by {self.worst:.6g} of {self.claimed:.6g} only, and must "
                f"reach {REACH:.0%} of it; tighten the bound, or improve the search"
            ]
        return []


def sensitivity(
    method: Method, model: core.Model, adjacency: Adjacency, *, trials: int = TRIALS, steps: int = STEPS, seed: int = 0
) -> list[Found]:
    """Search, noise off, for neighbours that move a release further than claimed; one result for each noised query.

    Releases compose adaptively: both worlds have the same past (theta, words, memory, earlier answers of the round),
    and differ in the data of one client, from which each builds its own cache. All answers come from the engine's own
    client code, so the clip that is tested is the clip that ships.
    """
    search = Search(method.unit, adjacency, model, Space.of(model), np.random.default_rng(seed))
    scenes: list[Scene] = []
    for epsilon in (8.0, 0.05):  # little noise, and so much of it that model and memory are thrown about
        scenes += _scenes(_plan(method, adjacency, epsilon=epsilon), model, search.space.records(search.rng), seed)
    results = []
    for s, stage in enumerate(method.stages):
        pasts = [scene for scene in scenes if scene.turn.stage is stage]
        for number, query in enumerate(stage.queries):
            if query.noise is None:
                continue
            worst = Found(f"{s}.{number} {query.kind}", query.sensitivity(adjacency, SIZES[0]), 0.0, "")
            for trial in range(trials):
                client = trial % len(SIZES)
                claimed = query.sensitivity(adjacency, SIZES[client])
                scene = pasts[search.rng.integers(len(pasts))]
                size = (0.0, 0.1, 100.0, None)[trial % 4]  # of theta, wherever noise may have led it; None: as it came
                if size is not None:
                    theta = size * torch.from_numpy(search.rng.normal(size=model.size))
                    scene = scene._replace(down=scene.down._replace(theta=theta))
                moved, where = search.climb(scene, client, number, steps)
                if moved / claimed > worst.worst / worst.claimed:
                    worst = Found(worst.query, claimed, moved, where)
                if worst.beyond:  # conclusive
                    break
            results.append(worst)
    return results


class Scene(NamedTuple):
    """What both worlds share at the start of a round."""

    turn: Turn
    down: Down
    memory: tuple[Tree, ...]


def _scenes(plan: Plan, model: core.Model, records: Records, seed: int) -> Iterator[Scene]:
    """Of each round of a noised run."""
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
            numbers = getattr(model, "kind", None) is Loss.SQUARES
            return Space(model.features, 0 if numbers else max(2, model.outputs))
        except AttributeError as missing:
            raise core.SordinoError(f"model: the checks must know what records it takes; {missing}.") from None

    def draw(self, rng: np.random.Generator, rows: int) -> list[Tensor]:
        """x of any length from 1e-3 to 1e6, in any direction, and y."""
        x, length = rng.normal(size=(rows, self.features)), 10 ** rng.uniform(-3, 6, size=(rows, 1))
        return [torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True) * length), self.labels(rng, rows)]

    def labels(self, rng: np.random.Generator, rows: int) -> Tensor:
        if self.classes:
            return torch.from_numpy(rng.integers(self.classes, size=rows))
        return torch.from_numpy(rng.normal(size=rows) * 10 ** rng.uniform(-3, 6, size=rows))

    def records(self, rng: np.random.Generator) -> Records:
        """A federation of moderate records."""
        x, client = rng.normal(size=(sum(SIZES), self.features)), np.repeat(np.arange(len(SIZES)), SIZES)
        return Records.of(x, self.labels(rng, len(x)).clamp(-3, 3), client, dtype=torch.float64)


@dataclass(frozen=True)
class World(Records):
    """The data of the one client that is looked at. A record may be absent; the public size stays."""

    absent: int | None = None

    def shard(self, i: int) -> Shard:
        shard = super().shard(0)
        if self.absent is not None:
            shard.mask[self.absent] = 0
        return shard


class Search(NamedTuple):
    """For the worst neighbours of one query. A pair of them is (x, y) of a client, and (x, y) to take from for the
    other world: one row at record level, all at user level."""

    unit: Unit
    adjacency: Adjacency
    model: core.Model
    space: Space
    rng: np.random.Generator

    def climb(self, scene: Scene, client: int, number: int, steps: int) -> tuple[float, str]:
        """How far a release moves, from random neighbours uphill; and a word on where."""
        rows = SIZES[client]
        row = int(self.rng.integers(rows))
        pair = [*self.space.draw(self.rng, rows), *self.space.draw(self.rng, rows)]
        if self.rng.random() < 0.2:
            pair[0][self.rng.integers(rows), self.rng.integers(self.space.features)] = self.rng.choice(ODD)
        past: dict[Call, Tensor] = {}
        release = partial(_release, self.model, scene, client, past)
        release(self.worlds(pair, row)[0], Seeded(int(self.rng.integers(2**32))))  # puts its noised answers on record

        def moved(pair: list[Tensor]) -> float:
            here, there = self.worlds(pair, row)
            sums, message = release(here)
            others, other = ({}, message) if there is None else release(there)
            if past and not _same(message, other):  # made of the same noised answers, yet not the same
                return math.inf
            gaps = [float((total - others.get(call, 0.0)).norm()) for call, total in sums.items() if call[0] == number]
            return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)

        best = moved(pair)
        for _ in range(steps):
            near = self.nudged(pair, row)
            if (gap := moved(near)) >= best:
                best, pair = gap, near
        return best, f"a client of {rows}, x = {pair[0][row].tolist()}, y = {pair[1][row].item()}"

    def worlds(self, pair: list[Tensor], row: int) -> tuple[World, World | None]:
        x, y, other_x, other_y = (part.clone() for part in pair)
        ends = np.array([0, len(y)])
        here = World(pair[0], pair[1], ends)
        if self.unit is Unit.USER:
            return here, None if self.adjacency is Adjacency.ADD_REMOVE else World(other_x, other_y, ends)
        if self.adjacency is Adjacency.ADD_REMOVE:
            x[row], y[row] = 0, 0  # as padding is: nothing of the record may be left, not even behind the mask
            return here, World(x, y, ends, absent=row)
        x[row], y[row] = other_x[row], other_y[row]
        return here, World(x, y, ends)

    def nudged(self, pair: list[Tensor], row: int) -> list[Tensor]:
        """A record longer or shorter, turned, relabelled, mirrored in the other world, or copied all over its own."""
        pair, rng = [part.clone() for part in pair], self.rng
        x, y = pair[:2] if rng.random() < 0.5 else pair[2:]
        row = row if rng.random() < 0.7 else int(rng.integers(len(y)))
        match rng.integers(5):
            case 0:
                x[row] *= 10 ** rng.normal()
            case 1:
                x[row] += x[row].norm() * 10 ** rng.uniform(-3, 0) * torch.from_numpy(rng.normal(size=x.shape[-1]))
            case 2:
                y[row] = self.space.labels(rng, 1)[0]
            case 3:
                pair[2][row], pair[3][row] = -pair[0][row], pair[1][row]
            case _:
                x[:], y[:] = x[row].clone(), y[row].clone()
        return pair


def _release(
    model: core.Model, scene: Scene, i: int, past: dict[Call, Tensor], world: World, noise: Seeded | None = None
) -> tuple[dict[Call, Tensor], Tree]:
    """What client i would release, before its noise, and its message. Answers that are noised, it hears as they are on
    record; those that are not yet on it are put there (with `noise`, as they would be heard)."""
    turn = scene.turn if noise is not None else scene.turn._replace(stds=[0 * std for std in scene.turn.stds])
    ask, inside = (reference.oracle(model, world, turn, i, noise or Silent(), inside=cache) for cache in (False, True))
    numbers = {str(query.kind): k for k, query in enumerate(turn.stage.queries) if query.noise is not None}
    sums: dict[Call, Tensor] = {}

    def overheard(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        answer = method(*args, **kwargs)
        rate = next((a.rate for a in (*args, *kwargs.values()) if isinstance(a, core.Batch)), 1.0)
        call = (numbers[name], sum(number == numbers[name] for number, _ in sums))
        sums[call] = answer * ask.records * rate
        return past.setdefault(call, answer)

    local, listening = turn.stage.local, Through(ask, numbers, overheard)
    try:
        message = ask.finish(local.work(listening, scene.down, scene.memory[i], local.prepare(inside)))
    except RuntimeError:  # a client that stops has told something
        message = scene.down.theta * math.nan
    return {(numbers[Kind.DELTA], 0): message} if Kind.DELTA in numbers else sums, message


# ------------------------------------------------------------------------------------------------------------ 2. asks


def asks(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """A plan runs on its declared calls, on both engines; one question more in any stage is refused."""
    records = Space.of(model).records(np.random.default_rng(seed))

    def refusals(method: Method) -> list[str]:
        words = []
        for run in (reference.run, simulate.run):
            try:
                list(run(_plan(method), model, records, Seeded(seed)))
            except OverspentError as error:
                words.append(f"asks: {error}")
        return words

    problems = refusals(method)
    for s, stage in enumerate(() if problems else method.stages):
        stages = (*method.stages[:s], greedy(stage), *method.stages[s + 1 :])
        if len(refusals(method._replace(stages=stages))) < 2:
            problems.append(f"asks: stage {s} asked once more than declared, and an engine answered")
    return problems


def greedy(stage: Stage) -> Stage:
    """The same stage, asking each of its questions until one more than was declared."""
    declared = {str(query.kind): query.calls for query in stage.queries}

    def work(ask: Any, down: Down, memory: Tree, cache: Tree) -> Tree:
        asked: list[tuple[str, Callable[[], Tensor]]] = []

        def noted(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            asked.append((name, partial(method, *args, **kwargs)))
            return method(*args, **kwargs)

        message = stage.local.work(Through(ask, declared, noted), down, memory, cache)
        for name, again in dict(asked).items():
            for _ in range(declared[name] - sum(other == name for other, _ in asked) + 1):
                again()
        return tree_map(torch.clone, message)  # not the answer itself: an engine may take a short cut there

    return stage._replace(local=stage.local._replace(work=work))


# ---------------------------------------------------------------------------------------------------------- 3. replay


def replay(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Log a noised run, then run it again on other data with the log: every message comes from there, and so model,
    state and memory are what they were, bit for bit. Twice, for a rule may remember what is not in its state."""
    rng, plan = np.random.default_rng(seed), _plan(method, participation="fixed:3")
    with TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.db") as ledger:
        runs, rows = [], []
        for n in range(3):
            records = Space.of(model).records(rng)
            runs.append(list(reference.run(plan, model, records, Seeded(seed + n), ledger=ledger, run_id="replay")))
            rows.append(len(ledger))
    problems = ["replay: a message on record was made anew"] if len(set(rows)) > 1 else []
    for rounds in zip(*runs, strict=True):
        first, *again = ((each.model, each.checkpoint) for each in rounds)
        if not all(_same(first, other) for other in again):
            problems.append(
                f"replay: round {rounds[0].t} came out otherwise from the same messages; a rule or a client's memory "
                "depends on more than what was said"
            )
            break
    return problems


# --------------------------------------------------------------------------------------------------------- 4. engines


def engines(method: Method, model: core.Model, *, seed: int = 0) -> float:
    """The largest difference between the engines' models, given the same noise, relative to max(1, |theta|)."""
    records = Space.of(model).records(np.random.default_rng(seed))
    worst = 0.0
    for participation, divisor in (("full", "client-mean"), ("fixed:3", "pooled"), ("poisson:0.6", "client-mean")):
        plan = _plan(method, participation=participation, divisor=Divisor(divisor))
        slow = reference.run(plan, model, records, Seeded(seed))
        fast = simulate.run(plan, model, records, Seeded(seed), shares=True)
        for a, b in zip(slow, fast, strict=True):
            gap = float((a.model - b.model).abs().max() / a.model.abs().max().clamp_min(1))
            worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


# ------------------------------------------------------------------- wrong twins: mistakes that a contract must reject

Sums = Callable[[Shard, float], Tensor]  # (shard, clip) -> sum over its records


def half_claimed(method: Method, model: Any) -> tuple[Method, Any]:
    """Every query claims half of what it did."""

    def half(query: Query) -> Query:
        return replace(query, bound=core.Lemma("half", lambda m: query.sensitivity(Adjacency.ADD_REMOVE, m) / 2))

    return _every(method, lambda stage: stage._replace(queries=tuple(map(half, stage.queries)))), model


def some_unclipped(method: Method, model: Any) -> tuple[Method, Any]:
    """Records with a positive label are clipped ten times too late."""

    def total(sums: Sums, shard: Shard, clip: float) -> Tensor:
        late = (shard.y > 0).to(shard.mask)
        in_time = sums(shard._replace(mask=shard.mask * (1 - late)), clip)
        return in_time + sums(shard._replace(mask=shard.mask * late), 10 * clip)

    return method, _careless(model, total)


def mean_clipped(method: Method, model: Any) -> tuple[Method, Any]:
    """The mean over records is clipped, not each of them."""

    def total(sums: Sums, shard: Shard, clip: float) -> Tensor:
        whole, most = sums(shard, 1e6 * clip), clip * shard.y.shape[-1]
        return torch.mul(whole, most / whole.norm().clamp_min(most))

    return method, _careless(model, total)


def asks_once_more(method: Method, model: Any) -> tuple[Method, Any]:
    return _every(method, greedy), model


def has_moods(method: Method, model: Any) -> tuple[Method, Any]:
    """The server draws random numbers that are not in its state."""
    hidden = torch.Generator().manual_seed(0)

    def change(stage: Stage) -> Stage:
        def update(*args: Any) -> tuple[Tensor, Tree]:
            step, state = stage.rule.update(*args)
            return step + torch.randn(step.shape, generator=hidden).to(step), state

        return stage._replace(rule=stage.rule._replace(update=update))

    return _every(method, change), model


def remembers_the_unsaid(method: Method, model: Any) -> tuple[Method, Any]:
    """Clients keep the message as it was before the engine noised it, in a corner of their own."""

    def change(stage: Stage) -> Stage:
        local = stage.local
        corner: list[Tree] = [()]

        def work(ask: core.Ask, down: Down, memory: Tree, cache: Tree) -> Tree:
            corner[0] = local.work(ask, down, memory[0], cache)
            return corner[0]

        def remember(message: Tree, down: Down, memory: Tree) -> Tree:
            return local.remember(message, down, memory[0]), corner[0]

        def init(theta: Tensor, before: Tree) -> Tree:
            return local.init(theta, before[0] if before else ()), ()

        return stage._replace(local=core.Local(work, remember, init, local.prepare))

    return _every(method, change), model


def mixes_clients(method: Method, model: Any) -> tuple[Method, Any]:
    """A client's rule takes a norm over all axes, so that a batch of clients is not a loop over them."""

    def change(stage: Stage) -> Stage:
        def work(*args: Any) -> Tree:
            return tree_map(lambda leaf: leaf / (1 + leaf.norm()), stage.local.work(*args))

        return stage._replace(local=stage.local._replace(work=work))

    return _every(method, change), model


def looks_around(method: Method, model: Any) -> tuple[Method, Any]:
    """The model scales by the largest entry it is handed, and the fast engine hands it several clients' at once."""
    return method, _careless(model, lambda sums, shard, clip: sums(shard, clip) / shard.x.abs().max())


WRONG_TWINS: dict[str, tuple[Callable[[Method, Any], tuple[Method, Any]], ...]] = {
    "sensitivity": (half_claimed, some_unclipped, mean_clipped),
    "asks": (asks_once_more,),
    "replay": (has_moods, remembers_the_unsaid),
    "engines": (mixes_clients, looks_around),
}


def _breaks(twin: Callable[..., Any], method: Method) -> bool:
    """A careless model harms no method whose finished messages are bounded, by the engine or a lemma."""
    return twin is half_claimed or not any(q.kind is Kind.DELTA for stage in method.stages for q in stage.queries)


def _every(method: Method, change: Callable[[Stage], Stage]) -> Method:
    return method._replace(stages=tuple(change(stage) for stage in method.stages))


def _careless(model: Any, total: Callable[[Sums, Shard, float], Tensor]) -> Any:
    """A model whose sums over records are made from right ones by `total`."""

    def summed(name: str, method: Callable[..., Tensor], *args: Any) -> Tensor:
        *rest, shard, clip = args
        return total(lambda shard, clip: method(*rest, shard, clip), shard, clip)

    return Through(model, ("clipped_sum", "curvature_sum", "gram_sum"), summed)


# ------------------------------------------------------------------------------------------------------------- shared


class Through:
    """An object as it is, but for the methods named: `call(name, method, *args)` answers in their place."""

    def __init__(self, inner: Any, names: Collection[str], call: Callable[..., Any]) -> None:
        self._inner, self._names, self._call = inner, names, call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._call, name, found) if name in self._names else found


def _plan(
    method: Method,
    adjacency: Adjacency = Adjacency.REPLACE_ONE,
    *,
    epsilon: float = 8.0,
    participation: str = "full",
    divisor: Divisor = Divisor.POOLED,
) -> Plan:
    """A short one; a correlated stream is no longer than its factors."""
    noises = [query.noise for stage in method.stages for query in stage.queries]
    free = min([3, *(len(noise.decoder) for noise in noises if isinstance(noise, core.Correlated))])
    rounds = sum(free if stage.rounds is None else stage.rounds for stage in method.stages)
    privacy = core.Privacy(epsilon, unit=method.unit, adjacency=adjacency)
    return Plan(method, rounds, SIZES, privacy, Participation.parse(participation), divisor, uncertified=True)


def _same(a: Tree, b: Tree) -> bool:
    """Bit for bit."""
    ours, theirs = ([leaf.detach().cpu().numpy().tobytes() for leaf in leaves(tree)] for tree in (a, b))
    return ours == theirs
