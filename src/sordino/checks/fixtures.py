"""What the contracts share: a small federation, a short plan, and an object to stand in front of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.core import Adjacency, Divisor, Method, Tree, Trust
from sordino.data.records import Records
from sordino.errors import SordinoError
from sordino.models.linear import NUMERIC_LOSSES
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.tree import leaves

CLIENT_SIZES = (1, 2, 5, 7, 8)  # a client of one record, and three of unequal size that share a padded batch


class Space(NamedTuple):
    """The records a model takes: vectors, with a label below `classes`, or any number where there are no classes."""

    features: int
    classes: int

    @staticmethod
    def of(model: Any) -> Space:
        try:
            numbers = getattr(model, "kind", None) in NUMERIC_LOSSES
            return Space(model.features, 0 if numbers else max(2, model.outputs))
        except AttributeError as missing:
            raise SordinoError(f"model: the checks must know what records it takes; {missing}.") from None

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
        x, client = (
            rng.normal(size=(sum(CLIENT_SIZES), self.features)),
            np.repeat(np.arange(len(CLIENT_SIZES)), CLIENT_SIZES),
        )
        return Records.of(x, self.labels(rng, len(x)).clamp(-3, 3), client, dtype=torch.float64)


class Through:
    """An object as it is, but for the methods named: `call(name, method, *args)` answers in their place."""

    def __init__(self, inner: Any, names: Collection[str], call: Callable[..., Any]) -> None:
        self._inner, self._names, self._call = inner, names, call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._call, name, found) if name in self._names else found


def claims(method: Method) -> bool:
    """Every noised query bounds what it releases; a method without privacy does not."""
    noised = [query for stage in method.stages for query in stage.queries if query.noise is not None]
    sensitivities = [query.sensitivity(Adjacency.ADD_REMOVE, method.unit) for query in noised]
    return bool(noised) and all(map(math.isfinite, sensitivities))


def short_plan(
    method: Method,
    adjacency: Adjacency = Adjacency.REPLACE_ONE,
    *,
    epsilon: float = 8.0,
    participation: str = "full",
    divisor: Divisor = Divisor.POOLED,
    trust: Trust = Trust.UNTRUSTED_SERVER,
) -> Plan:
    """A short one; a correlated stream is no longer than its factors."""
    noises = [query.noise for stage in method.stages for query in stage.queries]
    free = min([3, *(len(noise.decoder) for noise in noises if isinstance(noise, core.Correlated))])
    rounds = sum(free if stage.rounds is None else stage.rounds for stage in method.stages)
    privacy = core.Privacy(epsilon if claims(method) else math.inf, unit=method.unit, adjacency=adjacency, trust=trust)
    return Plan(method, rounds, CLIENT_SIZES, privacy, Participation.parse(participation), divisor, uncertified=True)


def bits(tree: Tree) -> tuple[bytes, ...]:
    return tuple(leaf.detach().cpu().numpy().tobytes() for leaf in leaves(tree))


def same(a: Tree, b: Tree) -> bool:
    """Bit for bit."""
    return bits(a) == bits(b)
