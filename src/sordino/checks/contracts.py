"""The other contracts: what is asked is what was declared, what follows is post-processing, records are computed apart
from each other, and the engines agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.checks.fixtures import Space, Through, same, short_plan
from sordino.core import Broadcast, Divisor, Method, Shard, Stage, Tree, Trust
from sordino.engines import reference, simulate
from sordino.errors import OverspentError, SordinoError
from sordino.privacy.evidence.ledger import Ledger
from sordino.privacy.mechanisms.random import Seeded

TOLERANCE = 1e-9  # between engines, relative to max(1, |theta|)


def asks(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """A plan runs on its declared calls, on both engines; one question more in any stage is refused."""
    records = Space.of(model).records(np.random.default_rng(seed))

    def refusals(method: Method) -> list[str]:
        words = []
        for run in (reference.run, simulate.run):
            try:
                list(run(short_plan(method), model, records, Seeded(seed)))
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

    def compute(ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
        asked: list[tuple[str, Callable[[], Tensor]]] = []

        def noted(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            asked.append((name, partial(method, *args, **kwargs)))
            return method(*args, **kwargs)

        message: Tree = stage.local.compute(Through(ask, declared, noted), broadcast, memory, cache)
        for name, again in dict(asked).items():
            for _ in range(declared[name] - sum(other == name for other, _ in asked) + 1):
                again()
        return message

    return stage._replace(local=stage.local._replace(compute=compute))


def replay(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Log a noised run, then run it again on other data with the log: every message comes from there, and so model,
    state and memory are what they were, bit for bit. Twice, for a rule may remember what is not in its state."""
    rng, plan = np.random.default_rng(seed), short_plan(method, participation="fixed:3")
    with TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.db") as ledger:
        runs, rows = [], []
        for n in range(3):
            records = Space.of(model).records(rng)
            runs.append(list(reference.run(plan, model, records, Seeded(seed + n), ledger=ledger, run_id="replay")))
            rows.append(len(ledger))
    problems = ["replay: a message on record was made anew"] if len(set(rows)) > 1 else []
    for rounds in zip(*runs, strict=True):
        first, *again = ((each.model, each.checkpoint) for each in rounds)
        if not all(same(first, other) for other in again):
            problems.append(
                f"replay: round {rounds[0].t} came out otherwise from the same messages; a rule or a client's memory "
                "depends on more than what was said"
            )
            break
    return problems


def apart(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """No record changes how others are computed: whatever a masked one holds, the sum over the rest stays the same.

    The rest are records of which the model is sure, so that nothing is left of them but rounding, and the clip is so
    small that rounding fills it: what would hardly show elsewhere shows in full.
    """
    rng, rows, space = np.random.default_rng(seed), 16, Space.of(model)
    x = torch.from_numpy(rng.uniform(0.1, 1, size=(rows, space.features)))
    mask = torch.ones(rows, dtype=torch.float64)
    mask[0] = 0
    problems = []
    for size in (0.0, 1.0, 20.0):
        theta = torch.zeros(model.size, dtype=torch.float64)
        theta[:: max(1, getattr(model, "outputs", 1))] = size  # towards the first class, or up
        for clip in (1.0, 1e-9, 1e-18):

            def rest(value: float, theta: Tensor = theta, clip: float = clip) -> Tensor:
                held = x.clone()
                held[0] = value
                return model.clipped_sum(theta, Shard(held, torch.zeros(rows).long(), mask), clip)

            for value in (1.0, -1e3, 1e3, 1e200, math.inf, math.nan):
                moved = float((rest(value) - rest(0.0)).norm()) / clip
                if not moved <= 1e-3:
                    problems.append(f"apart: a record of {value:g} moves the sum over others by {moved:.2g} clips")
    return problems[:1]


def engines(method: Method, model: core.Model, *, seed: int = 0) -> float:
    """The largest difference between the engines' models, given the same noise, relative to max(1, |theta|)."""
    return max(0.0, *gaps(method, model, seed=seed))


def gaps(method: Method, model: core.Model, *, seed: int = 0) -> Iterator[float]:
    """The difference after every round, of several plans."""
    records = Space.of(model).records(np.random.default_rng(seed))
    own, sums = Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION
    for participation, divisor, trust in (
        ("full", Divisor.CLIENT_MEAN, own),
        ("fixed:3", Divisor.POOLED, own),
        ("poisson:0.6", Divisor.CLIENT_MEAN, sums),
        ("cyclic:2", Divisor.POOLED, sums),
    ):
        plan = short_plan(method, participation=participation, divisor=divisor, trust=trust)
        slow = reference.run(plan, model, records, Seeded(seed))
        fast = simulate.run(plan, model, records, Seeded(seed), shares=True)
        try:
            for a, b in zip(slow, fast, strict=True):
                gap = float((a.model - b.model).abs().max() / a.model.abs().max().clamp_min(1))
                yield gap if math.isfinite(gap) else math.inf
        except SordinoError:  # it says that sums are proved, and sends something else than answers
            yield math.inf
