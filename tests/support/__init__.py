"""What the tests of several folders share: plans, records, toy rules and tiers."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from sordino.checks.report import Report
from sordino.core import Adjacency, Divisor, Method, Privacy, Trust, Unit
from sordino.data.records import Records
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan

# Parts of a schema: the target and two columns of a small table of patients.
DIED = """
[target]
column = "died"
levels = ["no", "yes"]
"""
AGE = """
[columns.age]
type = "number"
range = [20, 90]
"""
WARD = """
[columns.ward]
type = "category"
levels = ["surgery", "medicine"]
"""


def plan_for(
    method: str | Method,
    records: Records | Sequence[int],
    rounds: int = 6,
    *,
    unit: Unit | str | None = None,
    trust: Trust | str = Trust.UNTRUSTED_SERVER,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    epsilon: float = 8.0,
    participation: str = "full",
    batch: str = "full",
    divisor: Divisor | str = Divisor.POOLED,
    schedule_seed: int = 0,
    uncertified: bool = False,
    noise: float | None = None,
    **options: object,
) -> Plan:
    """A plan for a method (or for a registered name, built with the options) on records or on public sizes."""
    if isinstance(method, str):
        method = build(method, unit or Unit.RECORD, **options)
    elif options:
        raise TypeError(f"options {sorted(options)} need a method's name, got a built method")
    sizes = records.sizes if isinstance(records, Records) else tuple(records)
    privacy = Privacy(epsilon, unit=unit or method.unit, trust=trust, adjacency=adjacency)
    return Plan(
        method,
        rounds,
        sizes,
        privacy,
        Participation.parse(participation),
        Divisor(divisor),
        schedule_seed=schedule_seed,
        noise=noise,
        uncertified=uncertified,
        sampling=Sampling.parse(batch),
    )


def classified(sizes, features=3, classes=3, seed=0, scale=1.0):
    """Clients of these sizes: Gaussian features (times `scale`), labels drawn evenly."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(sum(sizes), features)) * scale, rng.integers(0, classes, sum(sizes))
    return Records.of(x, y, np.repeat(np.arange(len(sizes)), sizes), dtype=torch.float64)


def still(plan, features):
    """A model, and records of a plan's clients that have no gradient."""
    owner = np.repeat(np.arange(plan.clients), plan.sizes)
    records = Records.of(np.zeros((len(owner), features)), np.zeros(len(owner)), owner, dtype=torch.float64)
    return Linear(features, 1, Loss.SQUARES, bias=False), records


def tiers(cases: Iterable[Any], quick: Iterable[Any] | int) -> list[Any]:
    """Parameters of a test: the `quick` cases (or the first so many) for `make test`, all others for `make soak`."""
    cases = list(cases)
    kept = cases[:quick] if isinstance(quick, int) else list(quick)
    if not kept or (unknown := [case for case in kept if case not in cases]):
        raise ValueError(f"make test needs at least one of the cases {cases}, got {kept if not kept else unknown}")

    def soaked(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)

    return [case if case in kept else soaked(case) for case in cases]


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few combinations of the axes' values that hold every pair of values of any two axes, for `tiers`.

    Greedy: of all combinations the one with the most new pairs comes next, and the first of several.
    """

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    left = list(itertools.product(*axes))
    wanted, chosen = set().union(*map(pairs, left)), []
    while wanted:
        best = max(left, key=lambda case: len(pairs(case) & wanted))
        wanted -= pairs(best)
        chosen.append(best)
    return chosen


def fuzzed(
    quick: int, whole: int, *strategies: Any, **named: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`hypothesis.given` with these strategies: `quick` examples in `make test`, and `whole` in `make soak`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = [p for p in inspect.signature(test).parameters.values() if p.name not in named]
        fixtures = parameters[: len(parameters) - len(strategies)]

        def run(examples: int, **values: Any) -> None:
            limits = hypothesis.settings(
                max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            limits(hypothesis.given(*strategies, **named)(test))(**values)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([examples, *fixtures])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("examples", tiers([quick, whole], 1))(run)

    return decorate


def passing(name: str, method: Method, *_: object) -> Iterator[Report]:
    """What `checks.report.reports_of` says of a method that passed, for tests of what is checked beside that."""
    for adjacency in Adjacency:
        yield Report(name, method.unit, adjacency, "0.0 gradient", 1.0, 1.0, 0.0, True, [])


class Squares(Linear):
    """Least squares without bias: Gram matrix, Hessian and covariance are the same thing."""

    def gram_sum(self, shard, clip):
        usable = torch.isfinite(shard.x).all(-1, keepdim=True)
        x = shard.x.masked_fill(~usable, 0)
        x = x * (math.sqrt(clip) / x.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(clip)))
        return x.transpose(-1, -2) @ (x * shard.mask.unsqueeze(-1))

    def curvature_sum(self, theta, shard, clip):
        return self.gram_sum(shard, clip)


def descend(ask, broadcast, memory, cache):
    """A local rule: one gradient at the broadcast model."""
    return ask.gradient(broadcast.theta)


def walk(steps, lr=0.1):
    """A local rule: gradient steps, each on a minibatch; the message is the difference of models."""

    def compute(ask, broadcast, memory, cache):
        y = broadcast.theta
        for _ in range(steps):
            y = y - lr * ask.gradient(y, on=ask.sample())
        return y - broadcast.theta

    return compute


def solve(matrix, vector):
    """The solution of a linear system, along leading axes."""
    return torch.linalg.solve(matrix, vector.unsqueeze(-1)).squeeze(-1)
