"""What the tests of several folders share: plans, records and tiers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sordino.core import Adjacency, Divisor, Method, Privacy, Trust, Unit
from sordino.data.records import Records
from sordino.methods import build
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan


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


def tiers(cases: Iterable[Any], quick: Iterable[Any] | int) -> list[Any]:
    """Parameters of a test: the `quick` cases (or the first so many) for `make test`, all others for `make soak`."""
    cases = list(cases)
    kept = cases[:quick] if isinstance(quick, int) else list(quick)
    if not kept or (unknown := [case for case in kept if case not in cases]):
        raise ValueError(f"make test needs at least one of the cases {cases}, got {kept if not kept else unknown}")

    def soaked(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)

    return [case if case in kept else soaked(case) for case in cases]
