"""A fuzzer of plans: random methods, options, models, units, adjacencies, data and arithmetic, many neighbours at once.

A case draws all of these from a seed and its number. It runs a short noised training to get a past (model, broadcast
state, memory), and then answers the questions of one round for many pairs of neighbouring clients, which lie in one
batch as the fast engine lays clients. Both neighbours of a pair see the same past and the same noised answers. Then

- no release, before its noise, may move further than its query claims,
- what the client sends may depend on its data only through the noised answers, and
- noise that is correlated over rounds must hide what the account of all rounds claims (`checks.streams`).

The arithmetic is the one that ships: the oracle and the model's own clipped sums, in float32 or float64.

A case is reproduced by `run_case(seed, number)`, or `sordino check --fuzz 1 --seed SEED --case NUMBER`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.fixtures import CLIENT_SIZES, Space, Through, claims, rows_per_unit, short_plan
from sordino.checks.search import ROUNDING_SLACK, Scene, scenes
from sordino.checks.streams import streams
from sordino.core import FLAT_CLIPPING, Adjacency, Broadcast, Clipping, Kind, Method, Shard, Stream, Tree, Unit, nothing
from sordino.data.records import row_norms
from sordino.engines.oracle import Oracle
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, bounds
from sordino.methods.clipping import with_clipping
from sordino.methods.ftrl import ESTIMATES, MECHANISMS
from sordino.models.linear import Linear, Loss
from sordino.models.torch_model import TorchModel
from sordino.models.trees import Trees
from sordino.tree import leaves, tree_map

PAIRS = 500  # of neighbours in one case
LONGEST = {torch.float32: 1e30, torch.float64: 1e200}  # the squares overflow: such a record must count as zero
SHARE_OF_EXTREMES = 0.02
SHARE_OF_NETWORKS = 0.25  # of the cases of methods that ask for gradients
OF_NETWORKS = {Kind.GRADIENT, Kind.COUNT, Kind.DELTA}  # what a network answers
SAME = {torch.float32: 1e-3, torch.float64: 1e-8}  # relative: equal messages may be rounded by their place in a batch
DTYPES = (torch.float32, torch.float64)

Mutant = Callable[[Method, Any], tuple[Method, Any]]  # as in `checks.mutants`


class Violation(NamedTuple):
    """A pair of neighbours that breaks a claim, and what reproduces it."""

    seed: int
    case: int
    pair: int
    query: str
    ratio: float | None  # how far the release moved over the claim; None if it is infinite
    where: str


class Outcome(NamedTuple):
    """The result of one case.

    Attributes:
      pairs: how many pairs of neighbours were tried; 0 if the plan was refused.
      worst: the furthest that a release moved, over its claim.
      violations: the worst pair of each broken claim.
      where: the case in words.
    """

    pairs: int
    worst: float
    violations: list[Violation]
    where: str


class Fuzzed(NamedTuple):
    """The result of a time budget.

    Attributes:
      seed: of all cases.
      cases: how many were tried; `refused`: how many of them were plans that the library refuses.
      pairs: of neighbours, over all cases.
      worst: the furthest that a release moved, over its claim.
      violations: what broke, with what reproduces it.
      methods: pairs by method.
    """

    seed: int
    cases: int
    refused: int
    pairs: int
    worst: float
    violations: list[Violation]
    methods: dict[str, int]


def fuzz(
    seconds: float,
    *,
    seed: int = 0,
    first: int = 0,
    pairs: int = PAIRS,
    most: int | None = None,
    mutant: Mutant = lambda method, model: (method, model),
    tick: Callable[[int], None] = lambda pairs: None,
) -> Fuzzed:
    """Try random cases until the time is over.

    Args:
      seconds: the time.
      seed: of all cases.
      first: the number of the first case.
      pairs: of neighbours in one case.
      most: cases at most.
      mutant: makes every method or model wrong on purpose, and must be found out.
      tick: called with the number of pairs that were tried.

    Returns:
      The counts, and every violation.
    """
    end = time.monotonic() + seconds
    cases = refused = total = 0
    worst, violations, methods = 0.0, list[Violation](), dict[str, int]()
    for number in itertools.count(first):
        if time.monotonic() >= end or (most is not None and cases >= most):
            break
        outcome = run_case(seed, number, pairs=pairs, mutant=mutant)
        cases, refused, total = cases + 1, refused + (outcome.pairs == 0), total + outcome.pairs
        worst = max(worst, outcome.worst)
        violations += outcome.violations
        name = outcome.where.split(" ", 1)[0]
        methods[name] = methods.get(name, 0) + outcome.pairs
        tick(outcome.pairs)
    return Fuzzed(seed, cases, refused, total, worst, violations, methods)


def run_case(
    seed: int,
    number: int,
    *,
    pairs: int = PAIRS,
    mutant: Mutant = lambda method, model: (method, model),
) -> Outcome:
    """One random case.

    Args:
      seed: of all cases.
      number: of the case.
      pairs: of neighbours.
      mutant: makes the method or the model wrong on purpose.

    Returns:
      How far the releases moved.
    """
    rng, further = np.random.default_rng([seed, number]), np.random.default_rng([seed, number, 1])
    name = str(rng.choice(list(REGISTRY)))
    unit = Unit(str(rng.choice([str(each) for each in REGISTRY[name].protects])))
    adjacency = Adjacency(str(rng.choice([str(each) for each in Adjacency])))
    options = _options(rng, REGISTRY[name].options, REGISTRY[name].bounds)
    options |= _stream_options(further) if "inverse_band" in REGISTRY[name].options else {}
    dtype = DTYPES[rng.integers(2)]
    words = f"{name} {unit} {adjacency} {options} {str(dtype).removeprefix('torch.')}"
    try:
        method = REGISTRY[name].at(unit, **options)
        if not claims(method):
            return Outcome(0, 0.0, [], words)
        method, model = _network(further, method) or (method, _model(rng, method))
        laws = {str(query.clipping) for stage in method.stages for query in stage.queries}
        words = f"{words} {model} {'/'.join(sorted(laws))}"
        plan = short_plan(method, adjacency, epsilon=float(rng.choice([8.0, 0.05])))
        records = Space.of(model).records(rng, unit)
        known = scenes(plan, model, records, int(rng.integers(2**31)))
        at, scene = known[rng.integers(len(known))]
        past, (method, model) = scene(), mutant(method, model)
        past = past._replace(round_plan=past.round_plan._replace(stage=method.stages[at]))
        outcome = _tried(rng, (seed, number), past, method, model, adjacency, dtype, pairs, words)
        if not any(isinstance(query.noise, Stream) for stage in method.stages for query in stage.queries):
            return outcome
        broken = [Violation(seed, number, 0, "stream", None, f"{words}: {each}") for each in streams(method).broken]
        return outcome._replace(violations=outcome.violations + broken)
    except SordinoError:  # a plan that the library refuses
        return Outcome(0, 0.0, [], words)


# --------------------------------------------------------------------------------------------------------- internals


def _tried(
    rng: np.random.Generator,
    origin: tuple[int, int],
    scene: Scene,
    method: Method,
    model: core.Model,
    adjacency: Adjacency,
    dtype: torch.dtype,
    pairs: int,
    words: str,
) -> Outcome:
    """Answer one round for many pairs of neighbours, and compare."""
    client = int(rng.integers(len(CLIENT_SIZES)))
    size, stage, unit = CLIENT_SIZES[client], scene.round_plan.stage, method.unit
    theta = scene.broadcast.theta
    if rng.random() < 0.7:
        theta = 10 ** rng.uniform(-3, 2) * torch.from_numpy(rng.normal(size=model.size))
    leaves_whole = unit is Unit.CLIENT and adjacency is Adjacency.ADD_REMOVE
    shard = _neighbours(rng, Space.of(model), unit, adjacency, size, pairs, dtype)

    def oracle(preparing: bool = False) -> Oracle:
        def never(*_: Any) -> Any:
            raise SordinoError("fuzz: a local rule draws random numbers of its own.")

        return Oracle(
            model,
            lambda: shard,
            stage,
            sizes=torch.full((2 * pairs,), float(size), dtype=dtype),
            stds=[torch.zeros(2 * pairs, dtype=torch.float64) for _ in stage.queries],
            draw=never,
            facts=scene.round_plan.facts,
            secret=False,
            preparing=preparing,
            add_noise=False,
        )

    ask, sums = oracle(), dict[tuple[int, int], Tensor]()
    numbers = {str(query.kind): k for k, query in enumerate(stage.queries) if query.noise is not None}
    wide = any(query.bound is not None for query in stage.queries)

    def record_answer(kind: str, question: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Note the sums of all clients; both neighbours of a pair get the same noised answer."""
        answer = question(*args, **kwargs)
        number = numbers[kind]
        sums[number, sum(k == number for k, _ in sums)] = answer * size
        std = float(scene.round_plan.stds[number][client]) / size
        common = answer[:pairs] + std * torch.from_numpy(rng.normal(size=tuple(answer[:pairs].shape)))
        return torch.cat([common, common]).to(torch.float64 if wide else dtype)

    def spread(leaf: Tensor) -> Tensor:
        return leaf.to(torch.float64 if wide else dtype).expand(2 * pairs, *leaf.shape)

    broadcast: Broadcast[Any] = tree_map(
        lambda leaf: leaf.to(torch.float64 if wide else dtype).unsqueeze(0), scene.broadcast._replace(theta=theta)
    )
    broadcast = broadcast._replace(theta=broadcast.theta.to(dtype))
    local, memory = stage.local, tree_map(spread, scene.memory[client])
    cache: Tree = () if local.prepare is nothing else local.prepare(oracle(preparing=True))
    message = ask.finish(local.compute(Through(ask, numbers, record_answer), broadcast, memory, cache))
    violations = list[Violation]()
    if Kind.DELTA in numbers:
        assert isinstance(message, Tensor)
        sums = {(numbers[Kind.DELTA], 0): message.double()}
    elif not leaves_whole:
        for leaf in leaves(message):
            scale = SAME[dtype] * (1 + leaf[:pairs].abs())
            differ = ~((leaf[:pairs] - leaf[pairs:]).abs() <= scale) & ~(leaf[:pairs].isnan() & leaf[pairs:].isnan())
            if bool(differ.any()):
                pair = int(differ.reshape(pairs, -1).any(-1).nonzero()[0])
                violations.append(Violation(*origin, pair, "message", None, words))
    worst = 0.0
    for (number, _), total in sums.items():
        claimed = stage.queries[number].sensitivity(adjacency, unit, size)
        gap = total[:pairs] if leaves_whole else total[:pairs] - total[pairs:]
        ratios = gap.reshape(pairs, -1).double().norm(dim=-1) / claimed
        ratios = torch.where(torch.isfinite(ratios), ratios, math.inf)
        pair = int(ratios.argmax())
        ratio = float(ratios[pair])
        worst = max(worst, ratio)
        if ratio > 1 + ROUNDING_SLACK:
            query = f"{number} {stage.queries[number].kind}"
            shown = ratio if math.isfinite(ratio) else None
            violations.append(Violation(*origin, pair, query, shown, f"{words}, a client of {size}"))
    return Outcome(pairs * max(1, len(sums)), worst, violations, words)


def _options(
    rng: np.random.Generator, known: Mapping[str, Any], declared: Mapping[str, bounds.Bound]
) -> dict[str, Any]:
    """Random values of some options; the library refuses combinations that make no sense."""
    chosen: dict[str, Any] = {}
    for name, default in known.items():
        bound = declared.get(name)
        if bound is None or rng.random() < 0.6:
            continue
        if bound == bounds.CLIP:
            chosen[name] = float(10 ** rng.uniform(-3, 3))
        elif bound == bounds.STEP_SIZE and default:
            chosen[name] = float(default * 10 ** rng.uniform(-2, 1))
        elif bound == bounds.WEIGHT:
            chosen[name] = float(rng.uniform(0, 1) if default <= 1 else default * 10 ** rng.uniform(-1, 1))
        elif bound == bounds.COUNT and 0 < default <= 5:
            chosen[name] = int(rng.integers(1, 4))
        elif isinstance(default, bool):
            chosen[name] = bool(rng.integers(2))
    return chosen


def _stream_options(rng: np.random.Generator) -> dict[str, Any]:
    """A random mechanism of correlated noise."""
    return {
        "mechanism": str(rng.choice(MECHANISMS)),
        "honaker": str(rng.choice(ESTIMATES)),
        "restart": int(rng.integers(0, 5)),
        "band": int(rng.integers(1, 9)),
        "inverse_band": int(rng.integers(1, 9)),
    }


def _network(rng: np.random.Generator, method: Method) -> tuple[Method, core.Model] | None:
    """Sometimes, and for a law that only networks serve always: a small network, and a random law of clipping. None if
    the method asks for no gradients of records."""
    queries = [query for stage in method.stages for query in stage.queries]
    kinds, needed = {query.kind for query in queries}, any(query.clipping != FLAT_CLIPPING for query in queries)
    seldom = rng.random() >= SHARE_OF_NETWORKS and not needed
    if seldom or method.unit is Unit.CLIENT or not kinds <= OF_NETWORKS:
        return None
    low, high = 10 ** rng.uniform(-2, 2, size=2)
    gamma = 10 ** rng.uniform(-5, 2)
    law = rng.choice(["flat", "per-layer", f"per-layer:{low:.4g},{high:.4g}", "automatic", f"automatic:{gamma:.4g}"])
    features, width, outputs = (int(each) for each in rng.integers(2, 6, size=3))
    try:
        clipped = with_clipping(method, Clipping.parse(str(law)))
    except SordinoError:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        layers = torch.nn.Linear(features, width), torch.nn.Tanh(), torch.nn.Linear(width, outputs)
        return clipped, TorchModel(torch.nn.Sequential(*layers))


def _model(rng: np.random.Generator, method: Method) -> core.Model:
    """A random small model that the method can train."""
    kinds = {query.kind for stage in method.stages for query in stage.queries}
    features = int(rng.integers(1, 7))
    if Kind.LEAVES in kinds:
        classes = int(rng.integers(1, 4))
        loss = Loss.SQUARES if classes == 1 else Loss.SOFTMAX
        return Trees(features, classes, loss, trees=int(rng.integers(1, 4)), depth=int(rng.integers(1, 3)))
    kind = rng.integers(4)
    if kind == 0:
        return Linear(features, 1, Loss.SQUARES, bias=bool(rng.integers(2)))
    if kind == 1:
        return Linear(features, 1, Loss.LOGISTIC, bias=bool(rng.integers(2)))
    return Linear(features, int(rng.integers(2, 6)), bias=bool(rng.integers(2)))


def _neighbours(
    rng: np.random.Generator, space: Space, unit: Unit, adjacency: Adjacency, size: int, pairs: int, dtype: torch.dtype
) -> Shard:
    """Clients in one batch: first one neighbour of every pair, then the other ones.

    The pairs are of several kinds: random, mirrored, mirrored among zeros, mirrored among copies, relabelled, rescaled.
    """
    per_person = rows_per_unit(unit)
    rows, everyone = size * per_person, np.arange(pairs)
    x, y = _drawn(rng, space, pairs, rows, dtype)
    other_x, other_y = _drawn(rng, space, pairs, rows, dtype)
    filled = np.ones((pairs, rows), dtype=bool)
    other_filled = filled.copy()
    if unit is Unit.PERSON:
        for rows_filled in (filled, other_filled):
            counts = rng.integers(1, per_person + 1, size=(pairs, size, 1))
            rows_filled[:] = (np.arange(per_person) < counts).reshape(pairs, rows)
    at = rng.integers(size, size=pairs)  # the unit in which neighbours differ
    mine = np.arange(rows) // per_person == at[:, None]
    if unit is Unit.CLIENT:
        mine[:] = True
    kind = rng.integers(7, size=(pairs, 1))
    first = x[everyone, at * per_person][:, None]
    label = y[everyone, at * per_person][:, None]
    x = np.where(((kind == 2) & ~mine)[..., None], 0, np.where((kind == 3)[..., None], first, x))
    y = np.where((kind == 2) & ~mine, 0, np.where(kind == 3, label, y))
    length = 10 ** rng.uniform(-4, 0, size=(pairs, 1))
    length = np.where((kind == 1) & (space.classes == 0) & (rng.random((pairs, 1)) < 0.5), length, 1.0)
    mirrored = (kind >= 1) & (kind <= 3)
    other_x = np.where(mirrored[..., None], -length[..., None] * x, other_x)
    other_x = np.where((kind == 4)[..., None], x, other_x)
    other_x = np.where((kind == 5)[..., None], 10 ** rng.uniform(-6, 6, size=(pairs, 1, 1)) * x, other_x)
    kept = np.where(mirrored, y if space.classes else y / length, other_y)
    other_y = np.where(kind == 5, y, kept)
    if adjacency is Adjacency.ADD_REMOVE:
        other_filled = np.zeros_like(filled)
    neighbour_filled = np.where(mine, other_filled, filled)
    neighbour_x, neighbour_y = np.where(mine[..., None], other_x, x), np.where(mine, other_y, y)
    mask = torch.from_numpy(np.concatenate([filled, neighbour_filled]))
    both_x = torch.from_numpy(np.concatenate([x, neighbour_x])).to(dtype).masked_fill(~mask.unsqueeze(-1), 0)
    both_y = torch.from_numpy(np.concatenate([y, neighbour_y])).masked_fill(~mask, 0)
    both_y = both_y.long() if space.classes else both_y.to(dtype)
    return Shard(both_x, both_y, mask.to(dtype), row_norms(both_x), per_person)


def _drawn(
    rng: np.random.Generator, space: Space, pairs: int, rows: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Features of norm 1e-3 to 1e6 in any direction, some of them so long that squares overflow; labels."""
    x = rng.normal(size=(pairs, rows, space.features))
    x *= 10 ** rng.uniform(-3, 6, size=(pairs, rows, 1)) / np.linalg.norm(x, axis=-1, keepdims=True)
    extreme = rng.random((pairs, rows, 1)) < SHARE_OF_EXTREMES
    x = np.where(extreme, x * (LONGEST[dtype] / 1e6), x)
    if space.classes:
        return x, rng.integers(space.classes, size=(pairs, rows)).astype(float)
    return x, rng.normal(size=(pairs, rows)) * 10 ** rng.uniform(-3, 6, size=(pairs, rows))
