"""Ranges, levels and shares from noised counts: the first round of a run with `--private-statistics`.

Every client counts its training records in 64 even bins of each column's wide public range (`within`; bins are even on
a logarithmic scale where the column has `log = true`). From the noised counts follows the shortest interval that holds
nearly all records; it is extended outwards where the counts beside it exceed their noise, and becomes the column's
range. Of a category with `candidates`, records are counted by candidate,
and those with a share above 0.5 % and above three standard deviations of the noise become its levels. Where the target
has `find_prevalence = true`, the classes of the records are counted too, and their shares become its prevalence. From
there on the schema is one as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sordino.data.columns import Category, Number
from sordino.data.schema import Schema
from sordino.models.tally import LABELS, ColumnTally

COVERAGE = 0.98  # of the records that a range should hold
LEAST_SHARE = 1e-4  # of a class
LEAST_LEVEL, LEVEL_SIGNAL = 0.005, 3.0  # a level is kept above this share, and so many standard deviations of the noise
OUTSIDE_NOISE = 1.5  # standard deviations of the noise outside of the shortest interval that are forgiven
TAIL_SIGNAL = 2.0  # standard deviations by which the counts beside a range must exceed 0 to extend it
MOST_OUTSIDE = 0.3  # of the records: a range that may leave out more is too uncertain


def found_schema(schema: Schema, tally: ColumnTally, aggregate: np.ndarray, std: float) -> Schema:
    """The schema with the ranges that the noised counts show.

    Args:
      schema: what people wrote.
      tally: what was counted.
      aggregate: the noised counts, as shares of the records.
      std: of the noise on one share.
    """
    ranges: dict[str, tuple[float, float] | None] = {}
    counts: Mapping[str, np.ndarray] = tally.split(np.asarray(aggregate, float))
    for name, _, _ in tally.columns:
        column = schema.columns[name]
        assert isinstance(column, Number)
        assert column.within is not None
        low, high = covering(counts[name], std)
        ranges[name] = (edge(column, low, tally.bins), edge(column, high, tally.bins))
    levels: dict[str, tuple[Any, ...]] = {}
    for name, _, _ in tally.levels:
        category = schema.columns[name]
        assert isinstance(category, Category)
        levels[name] = frequent(category.candidates, counts[name], std)
    found = schema.with_ranges(ranges).with_levels(levels)
    return found.with_prevalence(shares(counts[LABELS], std)) if tally.labels else found


def statistics_tally(schema: Schema) -> ColumnTally:
    """What private statistics count: columns with `within` or `candidates`, and the classes if the schema says so."""
    widest = schema.at_its_widest
    columns = tuple(
        (name, place, bool(getattr(schema.columns[name], "indicator", False)))
        for name, place in schema.searched.items()
    )
    levels = tuple((name, place, len(widest.columns[name].levels)) for name, place in schema.merged.items())  # type: ignore[union-attr]
    return ColumnTally(len(widest.features), columns, classes=len(schema.classes), labels=schema.counted, levels=levels)


def frequent(candidates: Sequence[Any], counts: np.ndarray, std: float) -> tuple[Any, ...]:
    """The candidates that are not rare, in their order; the most frequent one where all are.

    >>> frequent(("a", "b", "c"), np.array([0.6, 0.001, 0.3]), 0.001)
    ('a', 'c')
    """
    least = max(LEAST_LEVEL, LEVEL_SIGNAL * std)
    kept = tuple(level for level, share in zip(candidates, counts, strict=True) if share >= least)
    return kept or (candidates[int(np.argmax(counts))],)


def shares(counts: np.ndarray, std: float) -> tuple[float, ...]:
    """Shares of classes from noised counts. One below its noise is taken as large as its noise.

    >>> shares(np.array([0.75, 0.25]), 0.001)
    (0.75, 0.25)
    """
    least = max(std, LEAST_SHARE)
    held = np.clip(counts, least, None)
    held = np.clip(held / held.sum(), LEAST_SHARE, None)
    return tuple(float(f"{share:.6g}") for share in held / held.sum())


def shortest(shares: np.ndarray, std: float) -> tuple[int, int]:
    """The shortest run of bins that holds nearly all counted records, as (first, one past the last).

    A run of k of B bins counts if at most 2 % of the records lie outside, up to 1.5 standard deviations of the noise on
    the sum of the B - k bins outside. (With one standard deviation, up to every tenth range is far too wide; `covering`
    looks at the tails again.) A run for which that would forgive more than 30 % does not count. Where no run counts,
    all bins are kept.

    >>> shortest(np.array([0.0, 0.01, 0.5, 0.48, 0.01, 0.0]), 0.001)
    (2, 4)
    """
    bins = len(shares)
    whole = float(shares.sum())
    running = np.concatenate([[0.0], np.cumsum(shares)])
    for k in range(1, bins):
        forgiven = (1 - COVERAGE) * whole + OUTSIDE_NOISE * std * math.sqrt(bins - k)
        if whole > 0 and forgiven <= MOST_OUTSIDE * whole:
            held = running[k:] - running[:-k]
            if whole - held.max() <= forgiven:
                first = int(held.argmax())
                return first, first + k
    return 0, bins


def covering(shares: np.ndarray, std: float) -> tuple[int, int]:
    """The run of bins that becomes the range: `shortest`, extended on both sides while records are seen beside it.

    A side is extended over its next n bins if they hold more than 1 % of the records, and more than two standard
    deviations of the noise on their sum; the smallest such n is taken, again and again. A side grows by at most as many
    bins as the shortest run has, because among many bins some sum exceeds its noise by chance.

    >>> covering(np.array([0.0, 0.0, 0.5, 0.44, 0.03, 0.03]), 0.01)
    (2, 6)
    """
    low, high = shortest(shares, std)
    least, most = (1 - COVERAGE) / 2 * float(shares.sum()), high - low
    above, below = shares[high:][:most], shares[:low][::-1][:most]
    return low - _seen(below, std, least), high + _seen(above, std, least)


def _seen(tail: np.ndarray, std: float, least: float) -> int:
    """How many bins of a tail, counted from the range outwards, show records."""
    done = 0
    while len(rest := tail[done:]):
        noise = TAIL_SIGNAL * std * np.sqrt(np.arange(1, len(rest) + 1))
        above = np.flatnonzero(np.cumsum(rest) > np.maximum(noise, least))
        if not len(above):
            break
        done += int(above[0]) + 1
    return done


LARGER_SHARE = "spend a larger share (--private-statistics)"
LARGER_EPSILON = "raise statistics_epsilon in federation.toml"


def rough(tally: ColumnTally, std: float, units: int, remedy: str = LARGER_SHARE) -> str | None:
    """Why the ranges that were found are rough, for people; None where the noise lets 2 % of the records be seen.

    Args:
      tally: what was counted.
      std: of the noise on one share.
      units: number of records, or of persons, whose shares were noised: public.
      remedy: how this run could spend more on the counts.
    """
    noise = std * math.sqrt(tally.bins)
    if not tally.columns or noise <= 1 - COVERAGE:
        return None
    names = ", ".join(name for name, _, _ in tally.columns)
    return (
        f"the found ranges are rough ({names}): the noise on the records outside of a range has a standard deviation "
        f"of up to {noise:.1%} ({noise * units:.0f} of {units:,}), so {1 - COVERAGE:.0%} outside cannot be seen. Give "
        f"public ranges, leave within only where needed, or {remedy}."
    )


def edge(column: Number, k: int, bins: int) -> float:
    """The value at which bin k of a column begins, rounded to six digits inside `within`."""
    assert column.within is not None
    low, high = column.within
    part = k / bins
    value = low + math.expm1(part * math.log1p(high - low)) if column.log else low + part * (high - low)
    return min(max(float(f"{value:.6g}"), low), high)
