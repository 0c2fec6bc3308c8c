"""The contracts `asks`, `replay`, `apart` and `engines`; `sordino.checks` describes them."""

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
from sordino.checks.fixtures import Space, Through, rows_per_unit, same, short_plan
from sordino.core import FLAT_CLIPPING, Broadcast, Divisor, Kind, Method, Shard, Stage, Tree, Trust
from sordino.engines import reference, simulate
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.models.arithmetic import exact_arithmetic
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import FULL

TOLERANCE = 1e-9  # between engines, relative to max(1, |theta|)


@exact_arithmetic()  # held once for all sums
def asks(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Check that a plan runs with its declared calls on both engines, and that one more call in any stage is refused.

    Args:
      method: the method to check.
      model: the model on which it runs.
      seed: seed of records and noise.

    Returns:
      What is broken, one sentence per problem; empty if the contract holds.
    """
    records = Space.of(model).records(np.random.default_rng(seed), method.unit)

    def refusals(method: Method) -> list[str]:
        messages = []
        for run in (reference.run, simulate.run):
            try:
                list(run(short_plan(method), model, records, Seeded(seed)))
            except OverspentError as error:
                messages.append(f"asks: {error}")
        return messages

    problems = refusals(method)
    for s, stage in enumerate(() if problems else method.stages):
        stages = (*method.stages[:s], greedy(stage), *method.stages[s + 1 :])
        if len(refusals(method._replace(stages=stages))) < 2:
            problems.append(f"asks: an engine answered although stage {s} asked once more than declared")
    return problems


@exact_arithmetic()  # held once for all sums
def unasked(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Check that some round asks each noised query as often as declared: every declared call is paid for.

    Args:
      method: the method to check.
      model: the model on which it runs.
      seed: seed of records and noise.

    Returns:
      What is paid for and never asked, one sentence per query.
    """
    most: dict[tuple[int, str], int] = {}

    def watched(s: int, stage: Stage) -> Stage:
        def compute(ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
            calls: dict[str, int] = {}

            def count(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
                calls[name] = calls.get(name, 0) + 1
                most[s, name] = max(most.get((s, name), 0), calls[name])
                return method(*args, **kwargs)

            names = {str(query.kind) for query in stage.queries}
            message: Tree = stage.local.compute(Through(ask, names, count), broadcast, memory, cache)
            return message

        return stage._replace(local=stage.local._replace(compute=compute))

    watching = method._replace(stages=tuple(watched(s, stage) for s, stage in enumerate(method.stages)))
    records = Space.of(model).records(np.random.default_rng(seed), method.unit)
    list(reference.run(short_plan(watching), model, records, Seeded(seed)))
    return [
        f"asks: stage {s} declares {query.calls} calls of the {query.kind} query and asks "
        f"{most.get((s, query.kind), 0)}; all declared calls are paid for, so declare fewer"
        for s, stage in enumerate(method.stages)
        for query in stage.queries
        if query.noise is not None and query.kind is not Kind.DELTA and most.get((s, query.kind), 0) < query.calls
    ]


def greedy(stage: Stage) -> Stage:
    """The same stage, which asks each of its queries once more than declared."""
    declared = {str(query.kind): query.calls for query in stage.queries}

    def compute(ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
        calls: list[tuple[str, Callable[[], Tensor]]] = []

        def record_call(name: str, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            calls.append((name, partial(method, *args, **kwargs)))
            return method(*args, **kwargs)

        message: Tree = stage.local.compute(Through(ask, declared, record_call), broadcast, memory, cache)
        for name, ask_again in dict(calls).items():
            for _ in range(declared[name] - sum(other == name for other, _ in calls) + 1):
                ask_again()
        return message

    return stage._replace(local=stage.local._replace(compute=compute))


@exact_arithmetic()  # held once for all sums
def replay(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Run a method with a ledger, then twice more on other data with the same ledger.

    Every message comes from the ledger, so model, state and memory must be equal bit for bit. The second repetition
    finds rules that remember something outside their state.

    Args:
      method: the method to check.
      model: the model on which it runs.
      seed: seed of records and noise.

    Returns:
      What is broken, one sentence per problem; empty if the contract holds.
    """
    rng, plan = np.random.default_rng(seed), short_plan(method, participation="fixed:3")
    with TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.db") as ledger:
        runs, rows = [], []
        for n in range(3):
            records = Space.of(model).records(rng, method.unit)
            runs.append(list(reference.run(plan, model, records, Seeded(seed + n), ledger=ledger, run_id="replay")))
            rows.append(len(ledger))
    problems = ["replay: an engine computed a message that the ledger already holds"] if len(set(rows)) > 1 else []
    for rounds in zip(*runs, strict=True):
        first, *again = ((each.model, each.checkpoint) for each in rounds)
        if not all(same(first, other) for other in again):
            problems.append(
                f"replay: round {rounds[0].t} differs although its messages are the same; a rule or a client's memory "
                "depends on more than the messages"
            )
            break
    return problems


@exact_arithmetic()  # held once for all sums
def apart(method: Method, model: core.Model, *, seed: int = 0) -> list[str]:
    """Check that no record changes how others are computed: the values of a masked record never change the sum.

    At person level a masked person stands for the record.

    The model is certain about the other records, so their gradients are rounding errors alone. The clip is so small
    that rounding errors reach it, which makes even a small influence visible.

    Args:
      method: the method; every method must keep this contract.
      model: the model whose sums are checked.
      seed: seed of the records.

    Returns:
      What is broken, one sentence at most; empty if the contract holds.
    """
    rng, per_person, space = np.random.default_rng(seed), rows_per_unit(method.unit), Space.of(model)
    rows, laws = 16 * per_person, {query.clipping for stage in method.stages for query in stage.queries}
    how: dict[str, Any] = next(({"clipping": law} for law in laws - {FLAT_CLIPPING}), {})
    x = torch.from_numpy(rng.uniform(0.1, 1, size=(rows, space.features)))
    mask = torch.ones(rows, dtype=torch.float64)
    mask[:per_person] = 0

    def sum_of_others(value: float, theta: Tensor, clip: float) -> Tensor:
        features = x.clone()
        features[:per_person] = value
        return model.clipped_sum(theta, Shard(features, torch.zeros(rows).long(), mask, None, per_person), clip, **how)

    problems = []
    for size in (0.0, 1.0, 20.0):
        theta = torch.zeros(model.size, dtype=torch.float64)
        theta[:: max(1, getattr(model, "outputs", 1))] = size  # towards the first class, or towards larger outputs
        for clip in (1.0, 1e-9, 1e-18):
            usual = sum_of_others(0.0, theta, clip)
            for value in (1.0, -1e3, 1e3, 1e200, math.inf, math.nan):
                moved = float((sum_of_others(value, theta, clip) - usual).norm()) / clip
                if not moved <= 1e-3:
                    problems.append(
                        f"apart: a masked record of {value:g} moves the sum of the others by {moved:.2g} clips"
                    )
    return problems[:1]


@exact_arithmetic()  # held once for all sums
def engines(
    method: Method, model: core.Model, *, seed: int = 0, refusals: list[str] | None = None, sampling: str = FULL
) -> float:
    """The largest difference between the models of the two engines with the same noise.

    Args:
      method: the method to check.
      model: the model on which it runs.
      seed: seed of records and noise.
      refusals: receives why an engine refused the method; the difference is then infinite.
      sampling: the minibatches of the plans.

    Returns:
      The difference relative to max(1, |theta|); at most `TOLERANCE` if the contract holds.
    """
    return max(0.0, *gaps(method, model, seed=seed, refusals=refusals, sampling=sampling))


def gaps(
    method: Method, model: core.Model, *, seed: int = 0, refusals: list[str] | None = None, sampling: str = FULL
) -> Iterator[float]:
    """The difference between the engines after every round, for several plans."""
    records = Space.of(model).records(np.random.default_rng(seed), method.unit)
    every_message, only_sums = Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION
    for participation, divisor, trust in (
        ("full", Divisor.CLIENT_MEAN, every_message),
        ("fixed:3", Divisor.POOLED, every_message),
        ("poisson:0.6", Divisor.CLIENT_MEAN, only_sums),
        ("cyclic:2", Divisor.POOLED, only_sums),
    ):
        plan = short_plan(method, participation=participation, divisor=divisor, trust=trust, sampling=sampling)
        slow = reference.run(plan, model, records, Seeded(seed))
        fast = simulate.run(plan, model, records, Seeded(seed), shares=True)
        try:
            for a, b in zip(slow, fast, strict=True):
                gap = float((a.model - b.model).abs().max() / a.model.abs().max().clamp_min(1))
                yield gap if math.isfinite(gap) else math.inf
        except SordinoError as error:  # for example: proved for sums, but its messages are not plain answers
            if refusals is not None:
                refusals.append(f"{trust}: {error}")
            yield math.inf
