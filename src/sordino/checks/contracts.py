"""Contracts 2 to 4: what is asked is what was declared, what follows is post-processing, and the engines agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from sordino import core
from sordino.checks.worlds import Space, Through, same, short_plan
from sordino.core import Divisor, Down, Method, OverspentError, Stage, Tree, Trust
from sordino.engines import reference, simulate
from sordino.privacy.ledger import Ledger
from sordino.privacy.noise import Seeded

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

    def work(ask: Any, down: Down, memory: Tree, cache: Tree) -> Tree:
        asked: list[tuple[str, Callable[[], Tensor]]] = []

        def noted(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            asked.append((name, partial(method, *args, **kwargs)))
            return method(*args, **kwargs)

        message = stage.local.work(Through(ask, declared, noted), down, memory, cache)
        for name, again in dict(asked).items():
            for _ in range(declared[name] - sum(other == name for other, _ in asked) + 1):
                again()
        return message

    return stage._replace(local=stage.local._replace(work=work))


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


def engines(method: Method, model: core.Model, *, seed: int = 0) -> float:
    """The largest difference between the engines' models, given the same noise, relative to max(1, |theta|)."""
    records = Space.of(model).records(np.random.default_rng(seed))
    worst = 0.0
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
        for a, b in zip(slow, fast, strict=True):
            gap = float((a.model - b.model).abs().max() / a.model.abs().max().clamp_min(1))
            worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst
