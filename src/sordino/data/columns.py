"""The types of a schema's columns: how one cell becomes numbers, by public rules alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, ClassVar, TypeAlias

import numpy as np

from sordino.data import tables
from sordino.errors import SordinoError, count

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null")
PREVALENCE = "target.prevalence"
EPOCH = date(1970, 1, 1)
TRUE, FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")
MISSING_LEVEL, OTHER_LEVEL = -1, -2


@dataclass(frozen=True)
class Number:
    """A number, clamped to a public range and scaled to -1 … 1; or centred and scaled by a public mean and std."""

    range: tuple[float, float] | None = None
    mean: float | None = None
    std: float | None = None
    limit: float = 3.0  # standard deviations at which (value - mean) / std is clamped
    log: bool = False  # amounts: the logarithm of 1 + (value - low) is scaled instead
    fill: float | None = None
    indicator: bool = True  # whether a missing value gets a feature of its own
    within: tuple[float, float] | None = None  # a wide public range, in which noised counts find the range

    reads: ClassVar[str] = "number"

    def check(self, where: str) -> None:
        moments = [number is not None for number in (self.mean, self.std)]
        if self.within is not None:
            if any(moments):
                raise SordinoError(
                    f"{where}.within: with a public mean and std nothing is left to find; remove within."
                )
            low, high = self.within
            if not -math.inf < low < high < math.inf:
                raise SordinoError(f"{where}.within: {list(self.within)} must be two numbers, the lower one first.")
            if self.range is None:
                return self._check_rest(where)
            if not low <= self.range[0] < self.range[1] <= high:
                raise SordinoError(f"{where}.range: {list(self.range)} must lie within {list(self.within)}.")
        if not (all(moments) if self.range is None else not any(moments)):
            raise SordinoError(f"{where}: give either a public range = [low, high], or a public mean and std.")
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise SordinoError(f"{where}.range: {list(self.range)} must be two numbers, the lower one first.")
        if self.std is not None and not 0 < self.std < math.inf:
            raise SordinoError(f"{where}.std: {self.std} must be above 0.")
        self._check_rest(where)

    def _check_rest(self, where: str) -> None:
        if not 0 < self.limit < math.inf:
            raise SordinoError(f"{where}.limit: {self.limit} must be above 0.")
        if self.log and self.range is None and self.within is None:
            raise SordinoError(f"{where}.log: it needs a range.")

    @property
    def unknown(self) -> bool:
        """Whether it has no range yet: noised counts must find one."""
        return self.range is None and self.within is not None

    def features(self, name: str) -> list[str]:
        return [name, *([f"{name} is missing"] if self.indicator else [])]

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        if self.unknown:
            raise no_range(name)
        values = tables.numbers(column, name, missing)
        self.place(values, out)

    def place(self, values: np.ndarray, out: np.ndarray) -> None:
        """Clamp, scale and fill."""
        blank = np.isnan(values)
        out[:, 0] = self._scaled(np.where(blank, self._filling, values) if blank.any() else values)
        if self.indicator:
            out[:, 1] = blank

    @property
    def _filling(self) -> float:
        if self.fill is not None:
            return self.fill
        return float(np.mean(self.range)) if self.range is not None else float(self.mean or 0.0)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        if self.range is None:
            assert self.mean is not None and self.std is not None  # noqa: PT018 - `check` did
            return np.clip((values - self.mean) / self.std, -self.limit, self.limit) / self.limit
        low, high = self.range
        values = np.clip(values, low, high) - low
        part = np.log1p(values) / math.log1p(high - low) if self.log else values / (high - low)
        return 2 * part - 1

    def knot(self, part: float) -> str:
        """The value at this part of the range, in the unit of the table."""
        if self.unknown:
            return f"{part:.0%} of its range"
        if self.range is None:
            assert self.mean is not None and self.std is not None  # noqa: PT018 - `check` did
            return f"{self.mean + (2 * part - 1) * self.limit * self.std:.6g}"
        low, high = self.range
        value = math.expm1(part * math.log1p(high - low)) if self.log else part * (high - low)
        return f"{low + value:.6g}"

    def says(self) -> str:
        """What a value becomes, for people."""
        if self.unknown and self.within is not None:
            return f"a range within {self.within[0]:g} … {self.within[1]:g}, from noised counts, becomes -1 … 1"
        if self.range is None:
            return f"(value - {self.mean:g}) / {self.std:g}, clamped at {self.limit:g} and divided by it"
        low, high = self.range
        return f"{low:g} … {high:g} becomes -1 … 1{' on a logarithmic scale' if self.log else ''}; beyond is clamped"


def no_range(name: str) -> SordinoError:
    """The error for a column whose range, or a target whose prevalence, nobody knows yet."""
    if name == PREVALENCE:
        return SordinoError(
            f"{PREVALENCE}: the shares of the levels are to be found; spend a part of the budget on it by sordino run "
            "--private-statistics 0.05, or give public ones and remove find_prevalence."
        )
    return SordinoError(
        f"columns.{name}: it has no public range or levels yet, only within or candidates; give range = [low, high] or "
        "levels, or spend a part of the budget on finding them: sordino run --private-statistics 0.05."
    )


@dataclass(frozen=True)
class Category:
    """One feature per public level, one for any other level, one for a missing value."""

    levels: tuple[Any, ...] = ()
    other: bool = True
    indicator: bool = True
    candidates: tuple[Any, ...] = ()  # public levels, of which noised counts keep those that are not rare

    reads: ClassVar[str] = "level"

    def check(self, where: str) -> None:
        if not self.candidates:
            check_levels(self.levels, where)
            return
        check_levels(self.candidates, where, key="candidates")
        if unlisted := [level for level in self.levels if level not in self.candidates]:
            raise SordinoError(f"{where}.levels: '{unlisted[0]}' is none of the candidates; leave levels out.")

    @property
    def unknown(self) -> bool:
        """Whether noised counts must find its levels."""
        return bool(self.candidates) and not self.levels

    def features(self, name: str) -> list[str]:
        extra = ["other"] * self.other + ["missing"] * self.indicator
        return [f"{name} = {level}" for level in (*(self.levels or self.candidates), *extra)]

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        if self.unknown:
            raise no_range(name)
        index = level_index(column, self.levels, missing)
        width = out.shape[1]
        unknown = len(self.levels) if self.other else width  # a column beyond the last: nothing is set
        index = np.where(index == MISSING_LEVEL, width - 1 if self.indicator else width, index)
        index = np.where(index == OTHER_LEVEL, unknown, index)
        inside = np.flatnonzero(index < width)
        out[:] = 0
        out[inside, index[inside]] = 1

    def says(self) -> str:
        rest = " or other" if self.other else f"; any other level {self.unlisted}"
        if self.unknown:
            return f"0 or 1 for those of {len(self.candidates)} candidates that noised counts do not find rare{rest}"
        return f"0 or 1 for each of {', '.join(map(str, self.levels[:6]))}{' …' if len(self.levels) > 6 else ''}{rest}"

    @property
    def unlisted(self) -> str:
        """What a cell that is none of the levels becomes, for people."""
        return "counts as other" if self.other else "sets none of them"


@dataclass(frozen=True)
class Ordinal:
    """Levels in their order, evenly spaced from -1 to 1. A cell that is none of them has no place in the order and
    counts as missing, as that of a category counts as other: neither ends a run (`Schema.unlisted` counts them)."""

    levels: tuple[Any, ...] = ()
    fill: Any = None
    indicator: bool = True

    reads: ClassVar[str] = "level"

    def check(self, where: str) -> None:
        check_levels(self.levels, where, least=2)
        if self.fill is not None and self.fill not in self.levels:
            raise SordinoError(f"{where}.fill: '{self.fill}' is none of the levels.")

    def features(self, name: str) -> list[str]:
        return Number(range=(0, 1), indicator=self.indicator).features(name)

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        index = level_index(column, self.levels, missing)
        last = len(self.levels) - 1
        fill = last / 2 if self.fill is None else float(self.levels.index(self.fill))
        values = np.where(index < 0, np.nan, index.astype(np.float64))
        Number(range=(0, last), fill=fill, indicator=self.indicator).place(values, out)

    def says(self) -> str:
        steps = f"{self.levels[0]} … {self.levels[-1]} becomes -1 … 1, in {len(self.levels)} steps"
        return f"{steps}; any other level {self.unlisted}"

    @property
    def unlisted(self) -> str:
        """What a cell that is none of the levels becomes, for people."""
        return "counts as missing"


@dataclass(frozen=True)
class Boolean:
    """Yes or no as 1 or 0."""

    true: tuple[str, ...] = TRUE
    false: tuple[str, ...] = FALSE
    fill: bool | None = None
    indicator: bool = True

    reads: ClassVar[str] = "level"

    def check(self, where: str) -> None:
        if set(self.true) & set(self.false):
            raise SordinoError(f"{where}: a word stands under both true and false.")
        if not (self.true and self.false):
            raise SordinoError(f"{where}: true and false each need a word.")

    def features(self, name: str) -> list[str]:
        return Number(range=(0, 1), indicator=self.indicator).features(name)

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        index = level_index(column, self.words, missing, lower=True)
        if (index == OTHER_LEVEL).any():
            raise SordinoError(
                f"data: column '{name}' holds a cell that is neither among its words for true and false nor missing; "
                "add the word to true or false of the column in the schema, or to missing "
                "(sordino schema check shows it)."
            )
        values = np.where(index < 0, np.nan, (index >= len(self.false)).astype(np.float64))
        fill = 0.5 if self.fill is None else float(self.fill)
        Number(range=(0, 1), fill=fill, indicator=self.indicator).place(values, out)
        out[:, 0] = (out[:, 0] + 1) / 2

    def says(self) -> str:
        return f"{self.true[0]} becomes 1, {self.false[0]} becomes 0"

    @property
    def words(self) -> list[str]:
        """The words for false, then those for true, in lower case."""
        return [word.lower() for word in (*self.false, *self.true)]

    @property
    def unlisted(self) -> str:
        """What a cell that is none of the words becomes, for people."""
        return "ends a run"


@dataclass(frozen=True)
class Date:
    """A date as the part of a public range that has passed, from -1 to 1."""

    range: tuple[str, str] = ("", "")
    fill: str | None = None
    indicator: bool = True
    format: str | None = None  # how the cells are written, such as %d.%m.%Y; the range is always as 2024-12-31

    reads: ClassVar[str] = "text"

    def check(self, where: str) -> None:
        first, last = (days_of(text, f"{where}.range") for text in self.range)
        if not first < last:
            raise SordinoError(f"{where}.range: {list(self.range)} must be two dates, the earlier one first.")
        if self.fill is not None:
            days_of(self.fill, f"{where}.fill")
        if self.format is not None:
            day = date(2021, 12, 31)
            try:
                same = datetime.strptime(day.strftime(self.format), self.format).date() == day
            except ValueError:
                same = False
            if not same:
                raise SordinoError(f"{where}.format: '{self.format}' must name day, month and year: \"%d.%m.%Y\".")

    def features(self, name: str) -> list[str]:
        return Number(range=(0, 1), indicator=self.indicator).features(name)

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        first, last = (days_of(text, name) for text in self.range)
        fill = None if self.fill is None else days_of(self.fill, name)
        days = tables.dates(column, name, missing, self.format)
        Number(range=(first, last), fill=fill, indicator=self.indicator).place(days, out)

    def says(self) -> str:
        return f"{self.range[0]} … {self.range[1]} becomes -1 … 1; beyond is clamped"

    def knot(self, part: float) -> str:
        """The date at this part of the range."""
        first, last = (days_of(text, "range") for text in self.range)
        return (EPOCH + timedelta(days=round(first + part * (last - first)))).isoformat()


@dataclass(frozen=True)
class Drop:
    """A column that is not used."""

    reads: ClassVar[str] = ""

    def check(self, where: str) -> None:
        return

    def features(self, name: str) -> list[str]:
        return []

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        return

    def says(self) -> str:
        return "not used"


Column: TypeAlias = Number | Category | Ordinal | Boolean | Date | Drop
TYPES: dict[str, type[Column]] = {
    "number": Number,
    "category": Category,
    "ordinal": Ordinal,
    "boolean": Boolean,
    "date": Date,
    "drop": Drop,
}


def missing_cell(number: int, column: str) -> str:
    return f"{count(number, 'cell')} of column '{column}' {'is' if number == 1 else 'are'} missing"


def level_index(column: Any, levels: Sequence[Any], missing: Sequence[str], lower: bool = False) -> np.ndarray:
    """The index of each cell's level; -1 where it is missing, -2 where it is none of them.

    A cell like 3.0 or 3,0 that is no level itself is the level 3: a frame with a missing cell writes its codes so.

    lower: compare in lower case.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):  # decide once per distinct text
        parts = [
            np.append(level_index(part.dictionary, levels, missing, lower), MISSING_LEVEL)[
                np.asarray(pc.fill_null(part.indices.cast(pa.int64()), len(part.dictionary)))
            ]
            for part in (column.chunks if hasattr(column, "chunks") else [column])
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    text = tables.texts(column, missing)
    text = pc.utf8_lower(text) if lower else text
    spelt = pa.array([spelling(level) for level in levels], pa.string())
    whole = pc.replace_substring_regex(text, r"^(-?[0-9]+)[.,]0+$", r"\1")
    places = pc.coalesce(pc.index_in(text, value_set=spelt), pc.index_in(whole, value_set=spelt))
    index = np.asarray(pc.fill_null(places, OTHER_LEVEL).to_numpy(zero_copy_only=False), np.int64)
    blank = np.asarray(pc.is_null(text).to_numpy(zero_copy_only=False), bool)
    return np.where(blank, MISSING_LEVEL, index)


def check_levels(levels: Sequence[Any], where: str, least: int = 1, key: str = "levels") -> None:
    if len(levels) < least:
        raise SordinoError(f"{where}.{key}: list at least {least} public level{'s' if least > 1 else ''}.")
    if len(set(levels)) < len(levels):
        raise SordinoError(f"{where}.{key}: a level stands there twice.")


def spelling(value: Any) -> str:
    """A level as its cells are spelt: 3.0 is '3', and a date is as ISO has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def days_of(text: str, where: str) -> float:
    try:
        return float((date.fromisoformat(text) - EPOCH).days)
    except ValueError:
        raise SordinoError(f"{where}: '{text}' is not a date like 2024-12-31.") from None
