"""What the contracts share: a small federation, a short plan, and a proxy that intercepts methods of an object."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.core import Adjacency, Divisor, Method, Tree, Trust, Unit
from sordino.data.records import LOSSES_OF_NUMBERS, Records
from sordino.errors import SordinoError
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.participation import FULL, Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.tree import leaves

CLIENT_SIZES = (1, 2, 5, 7, 8)  # a client of one record, and three of unequal size that share a padded batch
PERSON_RECORDS = 3  # at person level, the most records of one person


def rows_per_unit(unit: Unit) -> int:
    """Rows that a record, or a person, takes."""
    return PERSON_RECORDS if unit is Unit.PERSON else 1


class Space(NamedTuple):
    """The records that a model takes: vectors with a label below `classes`; classes = 0 means numeric labels."""

    features: int
    classes: int

    @staticmethod
    def of(model: Any) -> Space:
        try:
            numbers = str(getattr(model, "kind", "")) in LOSSES_OF_NUMBERS
            return Space(model.features, 0 if numbers else max(2, model.outputs))
        except AttributeError as missing:
            raise SordinoError(f"model: the checks need its attributes features and outputs; {missing}.") from None

    def draw(self, rng: np.random.Generator, rows: int) -> list[Tensor]:
        """Random x, of norm 1e-3 to 1e6 and in any direction, and labels y."""
        x, length = rng.normal(size=(rows, self.features)), 10 ** rng.uniform(-3, 6, size=(rows, 1))
        return [torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True) * length), self.labels(rng, rows)]

    def labels(self, rng: np.random.Generator, rows: int) -> Tensor:
        if self.classes:
            return torch.from_numpy(rng.integers(self.classes, size=rows))
        return torch.from_numpy(rng.normal(size=rows) * 10 ** rng.uniform(-3, 6, size=rows))

    def records(self, rng: np.random.Generator, unit: Unit = Unit.RECORD) -> Records:
        """A federation of moderate records; at person level each person has one or more."""
        counts = np.ones(sum(CLIENT_SIZES), int)
        if unit is Unit.PERSON:
            counts = rng.integers(1, PERSON_RECORDS + 2, size=len(counts))  # some have more than are used
        person = np.repeat(np.arange(len(counts)), counts)
        client = np.repeat(np.arange(len(CLIENT_SIZES)), CLIENT_SIZES)[person]
        x = rng.normal(size=(len(person), self.features))
        y = self.labels(rng, len(x)).clamp(-3, 3)
        if unit is not Unit.PERSON:
            return Records.of(x, y, client, dtype=torch.float64)
        return Records.of(x, y, client, person=person, per_person=PERSON_RECORDS, dtype=torch.float64)


class Through:
    """A proxy of an object. For the named methods, `call(name, method, *args)` answers instead."""

    def __init__(self, inner: Any, names: Collection[str], call: Callable[..., Any]) -> None:
        self._inner, self._names, self._call = inner, names, call

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return partial(self._call, name, attribute) if name in self._names else attribute


def claims(method: Method) -> bool:
    """Whether every noised query bounds what it releases. A method without privacy bounds nothing."""
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
    sampling: str = FULL,
) -> Plan:
    """A plan of three rounds, or of fewer if the noise law of a query serves fewer."""
    free = int(min(3, most_rounds(method)))
    rounds = sum(free if stage.rounds is None else stage.rounds for stage in method.stages)
    privacy = core.Privacy(
        epsilon if claims(method) else math.inf,
        unit=method.unit,
        adjacency=adjacency,
        trust=trust,
        person_records=PERSON_RECORDS,
    )
    who = Participation.parse(participation)
    return Plan(
        method, rounds, CLIENT_SIZES, privacy, who, divisor, uncertified=True, sampling=Sampling.parse(sampling)
    )


def most_rounds(method: Method) -> float:
    """The longest stage that the noise laws of a method can serve; inf if there is no limit."""
    noises = [query.noise for stage in method.stages for query in stage.queries if query.noise is not None]
    return min((mechanism_of(noise).most_rounds for noise in noises), default=math.inf)


def bits(tree: Tree) -> tuple[bytes, ...]:
    """The bytes of every leaf."""
    return tuple(leaf.detach().cpu().numpy().tobytes() for leaf in leaves(tree))


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal bit for bit."""
    return bits(a) == bits(b)
