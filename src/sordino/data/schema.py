"""A public schema: what each column of a table means, written by people, without looking at the records.

A schema maps one record to numbers by public rules alone: ranges, levels, fill values. No statistic of the data enters,
so applying it costs no privacy. Every feature it makes is bounded, so one record has a bounded norm.

    client = "hospital"                      # the column that says whose a record is
    missing = ["", "?", "NA"]                # cells that mean that a value is missing

    [target]
    column = "died"
    task = "classes"                         # or quantity, count or survival: docs/how-to/describe-a-table.md
    levels = ["no", "yes"]                   # the last of two is the positive one
    recode = { "0" = "no", "1" = "yes" }     # optional: other spellings of a level

    [columns.age]
    type = "number"
    range = [18, 100]                        # public: clamped, then scaled to -1 … 1. Where none is known:
                                             # within = [0, 1000], and sordino run --private-statistics 0.05
    fill = 60                                # public: stands for a missing value (default: the middle)

    [columns.ward]
    type = "category"
    levels = ["surgery", "medicine"]         # public: anything else is "other"

Types: `number` (range, or mean and std; `log = true` for amounts), `category`, `ordinal` (levels in order), `boolean`,
`date` (range of two dates), `drop`. A column that the schema does not name is an error at every site, so that no id
becomes a feature by accident. `features = "bins:8"` and others make more of them (`data.expansion`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from sordino.data import expansion, tables
from sordino.data.expansion import Block, Expansion
from sordino.data.tables import Dialect
from sordino.errors import SordinoError, check_known, count, listed, nearest
from sordino.settings import read_toml

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null")
TASKS = ("classes", "quantity", "count", "survival")
MOST_INTERVALS, MOST_COUNT = 100, 1_000_000
LEAST_PREVALENCE = 1e-5  # of a class
LEAST_TIME = 2.0**-20  # of the last edge: stands for a time of 0, whose sign could not say whether the event happened
PREVALENCE = "target.prevalence"
CHUNK_RECORDS = 2**16  # that are encoded at once
PART_DIGITS = 16  # of the hash of a part of a schema
BLANK = "FILL IN"  # what a draft leaves to people
MOST_PUBLIC_LEVELS = 200  # of a column, that a draft takes from public records
# Columns that a draft drops: the word id in one of its forms at the end, or something by which people are addressed.
IDENTIFIERS = re.compile(
    r"(?i:(?:^|[\W_])(?:ids?|uuid|guid|mrn|ssn)$)|[a-z]I[Dd]$"
    r"|(?i:^(?:(?:first|last|family|given|full|patient)[\W_]*)?name$|^(?:surname|e-?mail|phone|telephone|address)$)"
)
# Columns whose name is that of a person's id: a person by a word and by what stands for one, or a usual abbreviation.
PERSONS = re.compile(
    r"(?i:^(?:patient|person)$|^(?:patient|person|subject|participant|proband|member)[\W_]*"
    r"(?:id|uid|uuid|nbr|nr|no|num|number|key|code)$|(?:^|[\W_])(?:mrn|ssn)$)"
)
EPOCH = date(1970, 1, 1)
TRUE, FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")


# ------------------------------------------------------------------------------------------------------------- columns


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
            _check_levels(self.levels, where)
            return
        _check_levels(self.candidates, where, key="candidates")
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
        _check_levels(self.levels, where, least=2)
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
MISSING_LEVEL, OTHER_LEVEL = -1, -2


def _missing(number: int, column: str) -> str:
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
    spelt = pa.array([_spelt(level) for level in levels], pa.string())
    whole = pc.replace_substring_regex(text, r"^(-?[0-9]+)[.,]0+$", r"\1")
    places = pc.coalesce(pc.index_in(text, value_set=spelt), pc.index_in(whole, value_set=spelt))
    index = np.asarray(pc.fill_null(places, OTHER_LEVEL).to_numpy(zero_copy_only=False), np.int64)
    blank = np.asarray(pc.is_null(text).to_numpy(zero_copy_only=False), bool)
    return np.where(blank, MISSING_LEVEL, index)


# -------------------------------------------------------------------------------------------------------------- target


@dataclass(frozen=True)
class Target:
    """What is predicted. A record whose target is missing is refused, because nobody can learn from it.

    Args:
        column: The column to predict; of survival, the time until the event or until the record was last seen.
        task: `classes`, `quantity`, `count` or `survival`.
        levels: Of classes, the public levels. Of survival, how the event column spells no and yes (optional).
        recode: Of classes, other spellings of a level.
        range: Of a quantity, the public range.
        maximum: Of a count, the largest that is learnt; larger ones are clamped.
        event: Of survival, the column that says whether the event happened at that time.
        intervals: Of survival, the public edges of intervals of time, from 0, in the unit of the table.
        prevalence: Of classes, the public share of each level, for class_weights = balanced.
        find_prevalence: Of classes, whether noised counts find the shares (`--private-statistics`).
    """

    column: str
    task: str = "classes"
    levels: tuple[str, ...] = ()
    recode: Mapping[str, str] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    maximum: float | None = None
    event: str | None = None
    intervals: tuple[float, ...] = ()
    prevalence: tuple[float, ...] = ()
    find_prevalence: bool = False

    def check(self) -> None:
        check_known("target.task", self.task, TASKS)
        for key, tasks in KEYS_OF_TASKS.items():
            if self.task not in tasks and getattr(self, key) not in (None, (), {}, False):
                raise SordinoError(f"target.{key}: it is for {' and '.join(tasks)}, and the task is {self.task}.")
        if self.task == "count":
            self._check_count()
        elif self.task == "survival":
            self._check_survival()
        elif self.task == "classes":
            _check_levels(self.levels, "target", least=2)
            if wrong := [level for level in self.recode.values() if level not in self.levels]:
                raise SordinoError(f"target.recode: '{wrong[0]}' is none of the levels {', '.join(self.levels)}.")
            if self.prevalence and (
                len(self.prevalence) != len(self.levels)
                or not all(LEAST_PREVALENCE <= share < 1 for share in self.prevalence)
                or not 0.99 <= sum(self.prevalence) <= 1.01
            ):
                raise SordinoError(
                    f"target.prevalence: {list(self.prevalence)} must be one share of at least {LEAST_PREVALENCE:g} "
                    f"for each of the {len(self.levels)} levels, with a sum of 1."
                )
        elif self.range is None or not -math.inf < self.range[0] < self.range[1] < math.inf:
            why = "" if self.range is None else f"; {list(self.range)} is not one"
            if self.range is not None and self.range[0] > self.range[1]:
                why = f"; {list(self.range)} is reversed, write {list(self.range[::-1])}"
            raise SordinoError(f"target.range: a quantity needs a public range = [low, high]{why}.")

    def _check_count(self) -> None:
        if self.maximum is None or not (1 <= self.maximum <= MOST_COUNT and float(self.maximum).is_integer()):
            written = "none is given" if self.maximum is None else f"{self.maximum:g} is given"
            raise SordinoError(
                f"target.maximum: a count needs a public maximum, a whole number from 1 to {MOST_COUNT:,}; {written}."
            )

    def _check_survival(self) -> None:
        if self.event is None:
            raise SordinoError(
                "target.event: survival needs the column that says whether the event happened; `column` is the time."
            )
        if self.levels and (len(self.levels) != 2 or self.levels[0] == self.levels[1]):
            raise SordinoError("target.levels: of survival, give how the event column spells no and yes.")
        edges = self.intervals
        if not 2 <= len(edges) <= MOST_INTERVALS + 1 or edges[0] != 0 or not (np.diff(edges) > 0).all():
            raise SordinoError(
                "target.intervals: survival needs public edges of time that begin with 0 and rise, such as "
                f"[0, 365, 730, 1095], at most {MOST_INTERVALS + 1}."
            )

    @property
    def spelt(self) -> list[str]:
        """Of classes, how a cell may spell a level."""
        return [*self.levels, *self.recode]

    @property
    def unlisted(self) -> str:
        """What a cell that spells no level becomes, for people."""
        return "ends a run"

    @property
    def reads(self) -> dict[str, str]:
        """The columns that are read, each as `number` or `level`."""
        if self.event is not None:
            return {self.column: "number", self.event: "level"}
        return {self.column: "level" if self.task == "classes" else "number"}

    def encode(self, table: Any, missing: Sequence[str]) -> np.ndarray:
        """The target of every record.

        Classes become indices, quantities and counts are clamped to what is public. Survival becomes one number: the
        time, with a minus sign where the event did not happen. Who is still there at the last edge counts as last seen
        then.

        Args:
            table: A table with the columns of `reads`.
            missing: Cells that mean that a value is missing.
        """
        column = table.column(self.column)
        if self.task != "classes":
            values = tables.numbers(column, self.column, missing)
            if blank := int(np.isnan(values).sum()):
                raise self._absent(blank, self.column)
            if self.task == "survival":
                return self._signed(values, table.column(self.event), missing)
            if self.task == "count":
                if wrong := int(((values < 0) | (values != np.floor(values))).sum()):
                    raise SordinoError(
                        f"target: {count(wrong, 'cell')} of column '{self.column}' cannot be a count (0, 1, 2, …); "
                        'correct what is wrong, or use task = "quantity".'
                    )
                return np.asarray(np.minimum(values, self.maximum or 0), np.float32)
            assert self.range is not None
            return np.asarray(np.clip(values, *self.range), np.float32)
        spelt = self.spelt
        index = level_index(column, spelt, missing)
        if blank := int((index == MISSING_LEVEL).sum()):
            raise self._absent(blank, self.column)
        if other := int((index == OTHER_LEVEL).sum()):
            raise SordinoError(
                f"target: {count(other, 'cell')} of column '{self.column}' {'is' if other == 1 else 'are'} none of the "
                f"levels {', '.join(spelt[:8])}; add what is said there to levels, or map it to one with recode "
                "(sordino schema check shows it)."
            )
        position = [*range(len(self.levels)), *(self.levels.index(level) for level in self.recode.values())]
        return np.take(np.asarray(position, np.int64), index)

    def _signed(self, time: np.ndarray, column: Any, missing: Sequence[str]) -> np.ndarray:
        """Times until an event as they are, other times negative."""
        no, yes = ((self.levels[0],), (self.levels[1],)) if self.levels else (FALSE, TRUE)
        index = level_index(column, (*no, *yes), missing, lower=not self.levels)
        if blank := int((index == MISSING_LEVEL).sum()):
            raise self._absent(blank, str(self.event))
        if other := int((index == OTHER_LEVEL).sum()):
            raise SordinoError(
                f"target: {count(other, 'cell')} of column '{self.event}' {'is' if other == 1 else 'are'} neither "
                f"{no[0]} nor {yes[0]}; spell them in levels = [NO, YES]."
            )
        if wrong := int((time < 0).sum()):
            raise SordinoError(f"target: {wrong} times in column '{self.column}' are below 0; drop those records.")
        return signed_times(time, index >= len(no), self.intervals[-1])

    def _absent(self, missing: int, column: str) -> SordinoError:
        return SordinoError(f"target: {_missing(missing, column)}; drop those records.")

    def says(self) -> str:
        """The task, for people."""
        if self.task == "count":
            return f"count, 0 … {self.maximum:g}; larger ones are clamped"
        if self.task == "survival":
            return f"survival: event in {self.event}, {len(self.intervals) - 1} intervals up to {self.intervals[-1]:g}"
        return f"classes: {', '.join(self.levels)}" if self.task == "classes" else self.task


def signed_times(time: np.ndarray, event: np.ndarray, end: float) -> np.ndarray:
    """Survival as one number: the time, negative where no event happened before `end`, at most `end`."""
    happened = event & (time < end)
    return np.asarray(np.where(happened, 1, -1) * np.clip(time, LEAST_TIME * end, end), np.float32)


KEYS_OF_TASKS: Mapping[str, tuple[str, ...]] = {
    "levels": ("classes", "survival"),
    "recode": ("classes",),
    "range": ("quantity",),
    "maximum": ("count",),
    "event": ("survival",),
    "intervals": ("survival",),
    "prevalence": ("classes",),
    "find_prevalence": ("classes",),
}


# -------------------------------------------------------------------------------------------------------------- schema


def assumption(sha256: str) -> str:
    """What a certificate says of the schema with this hash."""
    return (
        f"The schema of the table (sha256 {sha256}) is public: its ranges, levels and fill values were not taken from "
        "the protected records. It is applied to each record by itself, which costs no privacy."
    )


def searched_assumption(
    sha256: str, columns: Sequence[str], prevalence: str | None = None, merged: Sequence[str] = ()
) -> str:
    """The same where noised counts found ranges or levels of some columns, or the shares of the target's levels."""
    parts = [f"the ranges of {', '.join(columns)}"] * bool(columns)
    parts += [f"the levels of {', '.join(merged)} that are kept"] * bool(merged)
    parts += [f"the shares of the levels of {prevalence}"] * bool(prevalence)
    return (
        f"The schema of the table without {' and '.join(parts)} (sha256 {sha256}) is public: its other ranges, levels "
        "and fill values were not taken from the protected records. What it lacks follows from noised counts of the "
        "records, within public limits, which the account pays for. The schema is applied to each record by itself, "
        "which costs no privacy."
    )


class Encoded(NamedTuple):
    """A table as numbers."""

    x: np.ndarray  # float32, records by features
    y: np.ndarray | None
    client: np.ndarray | None
    person: np.ndarray | None


@dataclass(frozen=True)
class Schema:
    """The columns of a table and what they mean. `Schema.read` reads a TOML file, `Schema.of` a dict.

    Args:
        columns: Each column's type and public rule, by name; their order is the order of features.
        target: What is predicted; None where only features are encoded.
        client: The column that says whose a record is.
        person: The column that says whom a record is about.
        missing: Cells that mean that a value is missing.
        dialect: How a text file is written.
        expansion: Which features are made of the columns, beyond those that each column has.

    Example:
        >>> schema = Schema.of({
        ...     "target": {"column": "died", "levels": ["no", "yes"]},
        ...     "columns": {"age": {"type": "number", "range": [0, 100]}, "id": {"type": "drop"}},
        ... })
        >>> schema.features
        ['age', 'age is missing']
        >>> schema.encode({"age": [50, None], "id": [1, 2], "died": ["no", "yes"]}).x.tolist()
        [[0.0, 0.0], [0.0, 1.0]]
    """

    columns: Mapping[str, Column]
    target: Target | None = None
    client: str | None = None
    person: str | None = None
    missing: tuple[str, ...] = MISSING
    dialect: Dialect = field(default_factory=Dialect)
    expansion: Expansion = field(default_factory=Expansion)

    # ------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def read(path: str | Path) -> Schema:
        """Read a TOML file."""
        return Schema.of(read_toml(path, "schema"))

    @staticmethod
    def given(schema: str | Path | Mapping[str, Any] | Schema) -> Schema:
        """A schema as people name it in Python: itself, the dict that `of` reads, or the path that `read` reads."""
        if isinstance(schema, str | Path):
            return Schema.read(schema)
        if isinstance(schema, Mapping):
            return Schema.of(schema)
        if isinstance(schema, Schema):
            return schema
        raise SordinoError(f"schema: {schema!r} must be the path of a schema.toml, a dict, or a Schema.")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Schema:
        """Read a dict with the keys of the file.

        Raises:
            SordinoError: A key is unknown, absent, or out of its range; the message begins with it.
        """
        keys = ("columns", "target", "client", "person", "missing", "file", *expansion.KEYS)
        _check_keys(values, keys, "schema")
        described = values.get("columns") or {}
        if not isinstance(described, Mapping) or not described:
            raise SordinoError("schema: there are no columns; describe each one under [columns.NAME].")
        _check_roles(values, described)
        _check_filled(values)
        columns = {str(name): _column(str(name), about) for name, about in described.items()}
        target = None
        if (about := values.get("target")) is not None:
            target = _built(Target, about, "target")
            target.check()
        special = {"client": values.get("client"), "person": values.get("person")}
        for role, name in special.items():
            if name is not None and not isinstance(name, str):
                raise SordinoError(f"{role}: '{name}' must be the name of a column.")
        used = [name for name in (*(target.reads if target else ()), *special.values()) if name]
        if len(set(used)) < len(used) or (target is not None and target.event == target.column):
            raise SordinoError("schema: target, client and person must be three different columns.")
        missing = values.get("missing", MISSING)
        if not isinstance(missing, list | tuple) or not all(isinstance(cell, str) for cell in missing):
            raise SordinoError('missing: give a list of texts, such as ["", "?", "NA"].')
        file = values.get("file", {})
        _check_keys(file, Dialect._fields, "file")
        expanded = Expansion.of(values, [name for name, column in columns.items() if column.features(name)])
        schema = Schema(
            columns, target, special["client"], special["person"], tuple(missing), Dialect(**file), expanded
        )
        expanded.check_width(schema.blocks)
        return schema

    # ------------------------------------------------------------------------------------------------------- writing

    def values(self) -> dict[str, Any]:
        """The same as a dict, complete, for files and hashes."""
        document: dict[str, Any] = {key: value for key in ("client", "person") if (value := getattr(self, key))}
        document["missing"] = list(self.missing)
        document |= self.expansion.values()
        if self.dialect != Dialect():
            document["file"] = {key: value for key, value in self.dialect._asdict().items() if value is not None}
        if self.target is not None:
            document["target"] = _values(self.target)
        kinds = {kind: name for name, kind in TYPES.items()}
        document["columns"] = {
            name: {"type": kinds[type(column)], **_values(column)} for name, column in self.columns.items()
        }
        return document

    def toml(self) -> str:
        """The content of a schema.toml."""
        import tomli_w

        return tomli_w.dumps(self.values())

    def sha256(self) -> str:
        """Hash of what the schema says, whatever the order of keys in its file; the order of columns counts."""
        values = self._meaning()
        values["columns"] = list(values["columns"].items())
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def part_hashes(self) -> dict[str, str]:
        """The first digits of a hash of each part, such as `columns.age`, to tell in which parts two schemas differ."""
        values = self._meaning()
        values |= {f"columns.{name}": column for name, column in values.pop("columns").items()}
        return {
            name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:PART_DIGITS]
            for name, part in values.items()
        }

    def _meaning(self) -> dict[str, Any]:
        """The values without how a file is written, which is not part of what its columns mean."""
        return {key: value for key, value in self.values().items() if key != "file"}

    # ------------------------------------------------------------------------------------------------------ encoding

    @property
    def features(self) -> list[str]:
        """Names of the features, in order."""
        return self.expansion.features(self.blocks)

    @property
    def blocks(self) -> list[Block]:
        """The columns that have features, before these are expanded."""
        return [
            Block(name, features, getattr(column, "knot", None))
            for name, column in self.columns.items()
            if (features := column.features(name))
        ]

    @property
    def unexpanded(self) -> Schema:
        """The same with the features of the columns alone."""
        return dataclasses.replace(self, expansion=Expansion())

    @property
    def searched(self) -> dict[str, int]:
        """Number columns with `within`, whose range noised counts find; each with its first feature's place.

        The place is that in records that are encoded with all candidates (`at_its_widest`).
        """
        return self._places(lambda column: isinstance(column, Number) and column.within is not None)

    @property
    def merged(self) -> dict[str, int]:
        """Category columns with `candidates`, of which noised counts keep some; each with its first feature's place.

        The place is that in records that are encoded with all candidates (`at_its_widest`).
        """
        return self._places(lambda column: isinstance(column, Category) and bool(column.candidates))

    def _places(self, chosen: Callable[[Column], bool]) -> dict[str, int]:
        """The place of the first feature of some columns."""
        places, at = {}, 0
        for name, column in self.at_its_widest.columns.items():
            if chosen(column):
                places[name] = at
            at += len(column.features(name))
        return places

    def with_levels(self, levels: Mapping[str, Sequence[Any]]) -> Schema:
        """The same with other levels of some columns that have candidates; empty: none yet."""
        columns = {
            name: dataclasses.replace(column, levels=tuple(levels[name]))
            if name in levels and isinstance(column, Category)
            else column
            for name, column in self.columns.items()
        }
        return dataclasses.replace(self, columns=columns)

    @property
    def _candidates(self) -> dict[str, tuple[Any, ...]]:
        columns = self.columns.items()
        return {name: each.candidates for name, each in columns if isinstance(each, Category) and each.candidates}

    @property
    def unknown(self) -> list[str]:
        """Columns without range or levels yet, and `target.prevalence` where noised counts are to find it."""
        columns = [name for name, column in self.columns.items() if getattr(column, "unknown", False)]
        return [*columns, *([PREVALENCE] if self.counted and self.target and not self.target.prevalence else [])]

    @property
    def counted(self) -> bool:
        """Whether noised counts find the shares of the target's levels."""
        return self.target is not None and self.target.find_prevalence

    def with_prevalence(self, prevalence: Sequence[float]) -> Schema:
        """The same with other shares of the target's levels; empty: none."""
        assert self.target is not None
        return dataclasses.replace(self, target=dataclasses.replace(self.target, prevalence=tuple(prevalence)))

    def with_ranges(self, ranges: Mapping[str, tuple[float, float] | None]) -> Schema:
        """The same with other ranges of some columns; None: no range."""
        columns = {
            name: dataclasses.replace(column, range=ranges[name])
            if name in ranges and isinstance(column, Number)
            else column
            for name, column in self.columns.items()
        }
        return dataclasses.replace(self, columns=columns)

    @property
    def without_ranges(self) -> Schema:
        """What people wrote: without the ranges, levels and shares that noised counts found."""
        written = self.with_ranges(dict.fromkeys(self.searched)).with_levels(dict.fromkeys(self._candidates, ()))
        return written.with_prevalence(()) if self.counted else written

    @property
    def at_its_widest(self) -> Schema:
        """Searched columns scaled by the whole of `within`, all candidates as levels, features of columns alone."""
        columns = self.columns.items()
        widest = {name: each.within for name, each in columns if isinstance(each, Number) and each.within is not None}
        return self.with_ranges(widest).with_levels(self._candidates).unexpanded

    @property
    def used(self) -> int:
        """Number of columns that become features; what is made of them counts as the columns that its norm is worth."""
        return self.expansion.extent(sum(not isinstance(column, Drop) for column in self.columns.values()))

    @property
    def classes(self) -> tuple[str, ...]:
        """The public levels of the target; empty where it is a number."""
        return self.target.levels if self.target is not None and self.target.task == "classes" else ()

    @property
    def task(self) -> str:
        """The task of the target; empty where there is none."""
        return "" if self.target is None else self.target.task

    @property
    def unit(self) -> float:
        """How much one unit of the model's output is.

        Of a quantity: half of the public range. Of a count: the root of the public maximum, which is the standard
        deviation of a Poisson count that large. 1 for classes and survival.
        """
        if self.target is None:
            return 1.0
        if self.target.maximum is not None:
            return math.sqrt(self.target.maximum)
        span = self.target.range
        return 1.0 if span is None else (span[1] - span[0]) / 2

    def to_model(self, y: np.ndarray) -> np.ndarray:
        """Labels as the model learns them: a quantity's public range becomes -1 … 1, and a count's unit 1."""
        return y if self.classes else np.asarray((y - self.middle) / self.unit, np.float32)

    def to_people(self, y: np.ndarray) -> np.ndarray:
        """A quantity or count that the model predicted, in its own unit, within what is public. A risk as it is."""
        if self.target is not None and self.target.maximum is not None:
            return np.clip(np.asarray(y, np.float64) * self.unit, 0, self.target.maximum)
        if self.task == "survival":
            return np.asarray(y, np.float64)
        middle, unit = self.middle, self.unit
        return np.clip(np.asarray(y, np.float64) * unit + middle, middle - unit, middle + unit)

    @property
    def middle(self) -> float:
        """The middle of the public range of a quantity, which is 0 for the model; 0 for other tasks."""
        return sum(self.target.range) / 2 if self.target is not None and self.target.range is not None else 0.0

    def at_site(self) -> Schema:
        """The same for a table of one site, which need not have the client column."""
        if self.client is None:
            return self
        return dataclasses.replace(self, client=None, columns={**self.columns, self.client: Drop()})

    def reads(self, *, target: bool = True) -> dict[str, str]:
        """The columns that a file must have, each read as `number`, `text` or `level`."""
        needed = {name: column.reads for name, column in self.columns.items() if column.reads}
        if target:
            if self.target is None:
                raise SordinoError("target: the schema names none; add [target] with its column and task.")
            needed |= self.target.reads
            needed |= {name: "text" for name in (self.client, self.person) if name}
        return needed

    def open(self, path: Path, *, target: bool = True) -> Encoded:
        """Read a file and encode it. Columns are found by name, whatever their order."""
        if target:
            self.check_complete(path)
        table = tables.open_table(path, self.dialect, types=self.reads(target=target), missing=self.missing)
        tables.release_memory()  # what the reader held beside the table
        if target and not table.num_rows:
            raise tables.no_records(path)
        encoded = self.encode(table, target=target)
        del table
        tables.release_memory()
        return encoded

    def check_complete(self, path: Path) -> None:
        """Refuse a text file with a column that the schema does not mention."""
        if tables.suffix_of(path) not in tables.TEXT_SUFFIXES:
            return
        names, _ = tables.heading(path, self.dialect)
        tables.check_columns(names, list(self.reads()), path)
        known = {*self.columns, self.client, self.person, *(self.target.reads if self.target else ())}
        if unknown := [name for name in names if name not in known]:
            raise SordinoError(
                f"schema: '{path}' has the column '{unknown[0]}', which the schema does not mention; describe it under "
                f'[columns.{json.dumps(unknown[0])}], with type = "drop" if it is not to be used.'
            )

    def encode(self, frame: Any, *, target: bool = True) -> Encoded:
        """Apply the schema to a table in memory, record by record.

        Args:
            frame: A pandas or polars frame, a pyarrow table, or a dict of columns.
            target: Whether the target, client and person are read too; prediction needs none of them.

        Returns:
            Features, target, clients and persons; columns are found by name, whatever their order.

        Raises:
            SordinoError: A column is absent, or a cell does not fit its type.
        """
        table = tables.of_frame(frame)
        needed = self.reads(target=target)
        tables.check_columns(table.column_names, list(needed), "data")
        for name, kind in needed.items():
            if kind != "number":
                tables.check_digits(table.column(name), name)
        blocks = self.blocks
        x = np.empty((table.num_rows, sum(len(block.features) for block in blocks)), np.float32)
        for start in range(0, table.num_rows, CHUNK_RECORDS):  # temporary arrays stay small
            part, at = table.slice(start, CHUNK_RECORDS), 0
            for block in blocks:
                out = x[start : start + CHUNK_RECORDS, at : at + len(block.features)]
                self.columns[block.name].encode(part.column(block.name), block.name, self.missing, out)
                at += len(block.features)
        x = self.expansion.apply(x, blocks)
        if not target or self.target is None:
            return Encoded(x, None, None, None)
        y = self.target.encode(table, self.missing)
        return Encoded(x, y, self._named(table, self.client, "client"), self._named(table, self.person, "person"))

    def _named(self, table: Any, name: str | None, role: str) -> np.ndarray | None:
        if name is None:
            return None
        text = tables.texts(table.column(name), self.missing)
        if text.null_count:
            raise SordinoError(f"{role}: {_missing(text.null_count, name)}; drop those records.")
        return np.asarray(text.to_numpy(zero_copy_only=False)).astype(str)

    def constant(self, encoded: Encoded) -> list[str]:
        """The columns that are the same in every record: often a wrong range, or levels that no cell has.

        Args:
            encoded: Records by this schema.

        Returns:
            Their names. They say something about the records, so they are for the owner of the records alone.
        """
        features = list(self.features)
        varies = {name for name, column in zip(features, np.ptp(encoded.x, axis=0) > 0, strict=True) if column}
        by_column = {name: column.features(name) for name, column in self.columns.items()}
        return [name for name, own in by_column.items() if own and not varies & {*own}]

    def unlisted(self, path: Path) -> dict[str, dict[str, int]]:
        """Per column with levels or words, the cells of a file that are none of these, the most frequent first.

        Args:
            path: The table.

        Returns:
            The number of records by cell, of columns that have such cells. It says something about the records, so it
            is for the owner of the records alone.
        """
        import pyarrow.compute as pc

        spelt: dict[str, tuple[Sequence[Any], bool]] = {}
        for name, column in self.columns.items():
            if isinstance(column, Category | Ordinal):
                spelt[name] = column.levels, False
            elif isinstance(column, Boolean):
                spelt[name] = column.words, True
        if self.target is not None and self.target.task == "classes":
            spelt[self.target.column] = self.target.spelt, False
        if not spelt:
            return {}
        table = tables.open_table(path, self.dialect, types=dict.fromkeys(spelt, "level"), missing=self.missing)
        found = {}
        for name, (levels, lower) in spelt.items():
            counted = pc.value_counts(tables.texts(table.column(name), self.missing))
            cells, counts = counted.field("values"), counted.field("counts").to_pylist()
            other = level_index(cells, levels, self.missing, lower) == OTHER_LEVEL
            if others := {
                cell: n for cell, n, is_other in zip(cells.to_pylist(), counts, other, strict=True) if is_other
            }:
                found[name] = dict(sorted(others.items(), key=lambda each: (-each[1], each[0])))
        return found

    def explain(self) -> list[tuple[str, str, list[str]]]:
        """For people: each column, what its values become, and its features; then what is made of these."""
        blank = "; one more feature is 1 where the cell is missing"
        return [
            (name, column.says() + blank * getattr(column, "indicator", False), column.features(name))
            for name, column in self.columns.items()
        ] + self.expansion.says(self.blocks)


# -------------------------------------------------------------------------------------------------------------- drafts


def draft(
    path: Path, public: Path | None = None, dialect: Dialect | None = None, *, any_names: bool = False
) -> tuple[str, list[str]]:
    """A schema to be completed by people.

    Of the file only the column names and their types are used. Ranges and levels would tell something of the records,
    so they are left blank; or they are taken from a second file with *public* records of the same columns. The types
    come from the cells: one cell that is not a number makes its column a category. So the draft is private until people
    have reviewed it.

    Args:
        path: The table to describe.
        public: A table of public records, whose ranges and levels may be used.
        dialect: How the text file is written.
        any_names: Accept names of columns that are empty, numbers or dates.

    Returns:
        The content of a schema.toml, and what was looked at, for people.

    Raises:
        SordinoError: The file cannot be read, it is `public` itself, or names of its columns look like cells of a
            record.
    """
    import pyarrow as pa
    import tomli_w

    dialect = dialect or Dialect()
    table = tables.open_table(path, dialect)
    tables.check_encoding(table, table.column_names, path)
    if not any_names and (unlikely := tables.unlikely_names(path, table.column_names)):
        raise SordinoError(  # no name is quoted: it may be the cell of a person
            f"data: in the first line of '{path}', {unlikely} of {len(table.column_names)} cells are unlikely names "
            "of columns (empty, a number or a date), so the draft might hold a record; put a line with the names "
            "above the records, or give --any-names if the columns are really called so."
        )
    if public is not None and public.samefile(path):
        raise SordinoError(
            f"--from-public: '{public}' is the table itself, whose cells would stand in the schema; name a file of "
            "public records, or leave it out."
        )
    known = None if public is None else tables.open_table(public, dialect)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        kind = table.column(name).type
        if IDENTIFIERS.search(name) or PERSONS.search(name):
            columns[name] = {"type": "drop"}
        elif pa.types.is_boolean(kind):
            columns[name] = {"type": "boolean"}
        elif pa.types.is_temporal(kind):
            columns[name] = {"type": "date", "range": [BLANK, BLANK]}
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            columns[name] = {"type": "number", "range": [BLANK, BLANK], "fill": BLANK}
        else:
            columns[name] = {"type": "category", "levels": [BLANK]}
        if known is not None and name in known.column_names and columns[name]["type"] != "drop":
            columns[name] |= _from_public(columns[name]["type"], known.column(name), name)
    document: dict[str, Any] = {"client": BLANK, "missing": list(MISSING)}
    if dialect != Dialect():
        document["file"] = {key: value for key, value in dialect._asdict().items() if value is not None}
    document["target"] = {"column": BLANK, "task": "classes", "levels": [BLANK, BLANK]}
    document["columns"] = columns
    looked = [
        f"names and types of the {len(columns)} columns of {path.name}; its first line was taken for the names, and no "
        "cell below it is in the draft. Types come from the cells, so the draft is private until people have reviewed "
        "it"
    ]
    if dropped := [name for name in columns if columns[name]["type"] == "drop"]:
        looked.append(
            f'which names are those of ids or persons: {", ".join(dropped)}, so type = "drop"; make one a category '
            "if it is a code with a meaning"
        )
    person = next(filter(PERSONS.search, columns), None)
    if person is not None:
        looked.append(_repeated(person, table.column(person)))
    if dialect.decimal == "." and (commas := [name for name in table.column_names if _commas(table.column(name))]):
        looked.append(
            f"how numbers are spelt: {', '.join(commas)} would be categories, because a comma separates their "
            "decimals; use --decimal ,"
        )
    if public is not None:
        looked.append(f"ranges and levels of {public.name}, which is declared public")
        if cut := [name for name in columns if len(columns[name].get("levels", ())) == MOST_PUBLIC_LEVELS]:
            looked.append(
                f"of {', '.join(cut)} no more than the {MOST_PUBLIC_LEVELS} levels that are most frequent in "
                f"{public.name}: all others are encoded as one; groups of codes may say more"
            )
    notes = (
        "# A draft: replace every FILL IN by what is publicly known, and remove what is not needed.\n"
        "# Remove [columns.NAME] of the target, the client and the person: they are not features.\n"
        "# client: the column that says which site a record is of; remove the line if all records are of one site.\n"
        '# Ids and names get type = "drop".\n'
        '# If several rows belong to one person, write person = "COLUMN" below the client.\n'
        "# target: task is classes (levels), quantity (range), count (maximum) or survival (column is the time, event\n"
        "# the column that says whether it happened, intervals are edges of time from 0).\n"
        f"# Types of a column: {', '.join(TYPES)}; docs/how-to/describe-a-table.md describes them.\n"
        "# Take ranges and levels from a code book or the literature, never from the records.\n"
        "# Types come from the cells: one cell that is not a number makes its column a category. So this draft is\n"
        "# private until every name and type was compared with the code book.\n\n"
    )
    client, rest = tomli_w.dumps(document).split("\n", 1)
    proposal = "" if person is None else f"# {tomli_w.dumps({'person': person})}"
    return f"{notes}{client}\n{proposal}{rest}", looked


def _repeated(name: str, column: Any) -> str:
    """How many records repeat the id of a person, for the screen of the owner of the records."""
    import pyarrow.compute as pc

    ids = pc.drop_null(tables.texts(column, MISSING))
    again = len(ids) - len(pc.unique(ids))
    if not again:
        return f"the ids in {name}, which is called like a person's: none of {len(ids):,} stands twice"
    return (
        f"the ids in {name}, which is called like a person's: {again:,} of {len(ids):,} records repeat one, so that "
        f"the records of a person should be protected together: remove the # before person = {json.dumps(name)} in "
        "the draft. The two figures come from the records and are not in the draft; do not publish them"
    )


def _commas(column: Any) -> bool:
    """Whether all cells of a column of texts are numbers with decimal commas."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return False
    text = pc.drop_null(tables.texts(column, MISSING))
    plain = pc.all(pc.match_substring_regex(text, r"^[-+]?\d+(,\d+)?$")).as_py()
    return bool(plain and pc.any(pc.match_substring(text, ",")).as_py())


def _from_public(kind: str, column: Any, name: str) -> dict[str, Any]:
    """Ranges and levels of public records."""
    import pyarrow.compute as pc

    if kind == "number":
        values = tables.numbers(column, name, MISSING)
        values = values[~np.isnan(values)]
        if not len(values) or values.min() == values.max():
            return {}
        return {"range": [float(values.min()), float(values.max())], "fill": float(np.median(values))}
    if kind == "category":
        levels = Counter(pc.drop_null(tables.texts(column, MISSING)).to_pylist())
        often = sorted(levels, key=lambda level: (-levels[level], level))[:MOST_PUBLIC_LEVELS]
        return {"levels": sorted(often)} if levels else {}
    return {}


# ------------------------------------------------------------------------------------------------------------- parsing


def _check_roles(values: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Refuse columns that are described as features, and are the target, client or person."""
    target = values.get("target") or {}
    roles = {"target": target.get("column"), "event": target.get("event")} if isinstance(target, Mapping) else {}
    roles |= {role: values.get(role) for role in ("client", "person")}
    both = [
        (name, role)
        for role, name in roles.items()
        if isinstance(name, str) and isinstance(about := described.get(name), Mapping) and about.get("type") != "drop"
    ]
    if both:
        what = " and ".join(f"{name} is the {role}" for name, role in both)
        tables = " and ".join(f"[columns.{name}]" for name, _ in both)
        raise SordinoError(f"columns.{both[0][0]}: {what}, so it is not a feature; remove {tables}.")


def _column(name: str, about: Any) -> Column:
    where = f"columns.{name}"
    if not isinstance(about, Mapping):
        raise SordinoError(f'{where}: write a table with a type, such as type = "number".')
    kind = about.get("type")
    if kind not in TYPES:
        raise SordinoError(f"{where}.type: '{kind}' is unknown.{nearest(str(kind), TYPES)} One of {', '.join(TYPES)}.")
    column: Column = _built(TYPES[kind], {key: value for key, value in about.items() if key != "type"}, where)
    column.check(where)
    return column


def _check_filled(values: Mapping[str, Any]) -> None:
    """Check that people replaced everything that a draft leaves to them."""

    def blank(value: Any, where: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from blank(part, f"{where}.{key}" if where else str(key))
        elif BLANK in (value if isinstance(value, list | tuple) else [value]):
            yield where

    if places := list(blank(values, "")):
        grouped: dict[str, list[str]] = {}
        for place in places[1:]:
            column, _, key = place.rpartition(".")
            grouped.setdefault(column.removeprefix("columns."), []).append(key)
        others = listed(f"{name} ({', '.join(keys)})" if name else ", ".join(keys) for name, keys in grouped.items())
        rest = f", as {count(len(places) - 1, 'further place does', 'further places do')}: {others}" * bool(others)
        raise SordinoError(
            f"{places[0]}: it still says {BLANK!r}{rest}. Write what is publicly known; a column that is not a feature "
            'has type = "drop" alone.'
        )


def _built(kind: Callable[..., Any], about: Any, where: str) -> Any:
    """One part of a schema from its keys, each of the declared type."""
    if not isinstance(about, Mapping):
        raise SordinoError(f"{where}: write a table of keys.")
    fields = {f.name: str(f.type) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _check_keys(about, tuple(fields), where)
    values = {}
    for key, value in about.items():
        values[key] = _typed(value, fields[key], f"{where}.{key}")
    try:
        return kind(**values)
    except TypeError:
        required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory]  # type: ignore[arg-type]
        raise SordinoError(f"{where}: it lacks {', '.join(set(required) - set(values))}.") from None


def _typed(value: Any, annotation: str, where: str) -> Any:
    if annotation.startswith("tuple[float, ...]"):
        if not (isinstance(value, list | tuple) and all(map(_is_number, value))):
            raise SordinoError(f"{where}: {value!r} must be a list of numbers, such as [0, 365, 730].")
        return tuple(map(float, value))
    if annotation.startswith("tuple[float"):
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))):
            raise SordinoError(f"{where}: {value!r} must be two numbers, such as [0, 100].")
        return float(value[0]), float(value[1])
    if annotation.startswith("tuple[str, str]"):
        if not (isinstance(value, list | tuple) and len(value) == 2):
            raise SordinoError(f'{where}: {value!r} must be two dates, such as ["2000-01-01", "2024-12-31"].')
        return tuple(map(str, value))
    if annotation.startswith("tuple"):
        if not isinstance(value, list | tuple):
            raise SordinoError(f'{where}: {value!r} must be a list, such as ["a", "b"].')
        return tuple(_spelt(each) for each in value)
    if annotation.startswith("float"):
        if not _is_number(value):
            raise SordinoError(f"{where}: {value!r} must be a number.")
        return float(value)
    if annotation.startswith("bool"):
        if not isinstance(value, bool):
            raise SordinoError(f"{where}: {value!r} must be true or false.")
        return value
    if annotation.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise SordinoError(f'{where}: {value!r} must be a table, such as {{ "1" = "yes" }}.')
        return {str(key): str(each) for key, each in value.items()}
    return _spelt(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spelt(value: Any) -> str:
    """A level as its cells are spelt: 3.0 is '3', and a date is as ISO has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _values(part: Any) -> dict[str, Any]:
    """The keys that differ from their defaults."""
    document = {}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value != f.default and value not in (None, {}):
            document[f.name] = list(value) if isinstance(value, tuple) else value
    return document


def _check_keys(values: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(values, Mapping):
        raise SordinoError(f"{where}: write a table of keys.")
    if unknown := [str(key) for key in values if key not in known]:
        raise SordinoError(f"{where}: the key '{unknown[0]}' is unknown.{nearest(unknown[0], known)}")


def _check_levels(levels: Sequence[Any], where: str, least: int = 1, key: str = "levels") -> None:
    if len(levels) < least:
        raise SordinoError(f"{where}.{key}: list at least {least} public level{'s' if least > 1 else ''}.")
    if len(set(levels)) < len(levels):
        raise SordinoError(f"{where}.{key}: a level stands there twice.")


def days_of(text: str, where: str) -> float:
    try:
        return float((date.fromisoformat(text) - EPOCH).days)
    except ValueError:
        raise SordinoError(f"{where}: '{text}' is not a date like 2024-12-31.") from None
