"""Effects in the unit of the table: what one more year, or one more mm Hg, adds to the log odds.

A model multiplies encoded features: 20 … 90 years are -1 … 1 there, and a record is scaled as a whole. People ask for
the effect of one year. A column's encoding is a line, and the scale is one number for every complete record, so each
effect is a weight times a public factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sordino.data.columns import Boolean, Category, Date, Number, Ordinal, days_of
from sordino.data.schema import Schema

YEAR = 365.25


class Step(NamedTuple):
    """One unit of a feature.

    Attributes:
      per: in words.
      slope: by how much the encoded feature grows with it.
      start: the encoded feature where the value is 0.
    """

    per: str
    slope: float
    start: float = 0.0


def steps(schema: Schema) -> list[Step] | None:
    """The unit of every feature; None if features are made of several columns, or a range is not known."""
    if schema.features != schema.unexpanded.features or schema.unknown:
        return None
    found: list[Step] = []
    for name, column in schema.columns.items():
        features = column.features(name)
        if not features:
            continue
        if isinstance(column, Category):
            found += [Step("if so", 1.0)] * len(features)
        else:
            found += [_of(column), *[Step("if so", 1.0)] * (len(features) - 1)]
    return found


def _of(column: Any) -> Step:
    if isinstance(column, Boolean):
        return Step("yes against no", 1.0)
    if isinstance(column, Ordinal):
        return Step("1 level up from the first", 2 / (len(column.levels) - 1), -1.0)
    if isinstance(column, Date):
        first, last = (days_of(text, "range") for text in column.range)
        return Step(f"1 year after {column.range[0]}", 2 * YEAR / (last - first), -1.0)
    assert isinstance(column, Number)
    if column.range is None:
        assert column.mean is not None and column.std is not None  # noqa: PT018 - `check` did
        slope = 1 / (column.std * column.limit)
        return Step("1 more", slope, -column.mean * slope)
    low, high = column.range
    if column.log:
        return Step(f"1 more of log(1 + value - {low:g})", 2 / math.log1p(high - low), -1.0)
    return Step("1 more", 2 / (high - low), -1 - 2 * low / (high - low))


class Effects(NamedTuple):
    """Effects per unit of the table.

    Attributes:
      per: the unit of every feature.
      factor: what a weight is multiplied by to be an effect per unit.
      effect: of every feature.
      intercept: where every number of the table is 0.
    """

    per: Sequence[str]
    factor: np.ndarray
    effect: np.ndarray
    intercept: float


def effects(weight: np.ndarray, intercept: float, schema: Schema | None, scale: float | None) -> Effects | None:
    """Weights of encoded features as effects per unit of the table.

    Args:
      weight: of every feature.
      intercept: of the model.
      schema: of the table; None where features are numbers already.
      scale: what every complete record is multiplied by; None if each record has its own.

    Returns:
      The effects; None where a feature has no effect of its own.
    """
    if scale is None:
        return None
    units = [Step("1 more", 1.0)] * len(weight) if schema is None else steps(schema)
    if units is None:
        return None
    factor = np.array([scale * step.slope for step in units])
    shift = scale * float(weight @ np.array([step.start for step in units]))
    return Effects([step.per for step in units], factor, weight * factor, intercept + shift)
