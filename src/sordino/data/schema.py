"""A public schema: what each column of a table means, written by people, without looking at the records.

A schema maps one record to numbers by public rules alone: ranges, levels, fill values. No statistic of the data enters,
so applying it costs no privacy. Every feature it makes is bounded, so one record has a bounded norm.

    client = "hospital"                      # the column that says whose a record is
    missing = ["", "?", "NA"]                # cells that mean that a value is missing

    [target]
    column = "died"
    task = "classes"                         # or quantity, with a public range
    levels = ["no", "yes"]                   # the last of two is the positive one
    recode = { "0" = "no", "1" = "yes" }     # optional: other spellings of a level

    [columns.age]
    type = "number"
    range = [18, 100]                        # public: clamped, then scaled to -1 … 1
    fill = 60                                # public: stands for a missing value (default: the middle)

    [columns.ward]
    type = "category"
    levels = ["surgery", "medicine"]         # public: anything else is "other"

Types: `number` (range, or mean and std; `log = true` for amounts), `category`, `ordinal` (levels in order), `boolean`,
`date` (range of two dates), `drop`. A column that the schema does not name is an error at every site, so that no id
becomes a feature by accident.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from sordino.data import tables
from sordino.data.tables import Dialect
from sordino.errors import SordinoError, nearest
from sordino.settings import read_toml

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null")
TASKS = ("classes", "quantity")
BLANK = "FILL IN"  # what a draft leaves to people
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

    reads: ClassVar[str] = "number"

    def check(self, where: str) -> None:
        moments = [number is not None for number in (self.mean, self.std)]
        if not (all(moments) if self.range is None else not any(moments)):
            raise SordinoError(f"{where}: give either a public range = [low, high], or a public mean and std.")
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise SordinoError(f"{where}.range: {list(self.range)} must be two numbers, the lower one first.")
        if self.std is not None and not 0 < self.std < math.inf:
            raise SordinoError(f"{where}.std: {self.std} must be above 0.")
        if not 0 < self.limit < math.inf:
            raise SordinoError(f"{where}.limit: {self.limit} must be above 0.")
        if self.log and self.range is None:
            raise SordinoError(f"{where}.log: it needs a range.")

    def features(self, name: str) -> list[str]:
        return [name, *([f"{name} is missing"] if self.indicator else [])]

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        values = tables.numbers(column, name, missing)
        self.place(values, out)

    def place(self, values: np.ndarray, out: np.ndarray) -> None:
        """Clamp, scale and fill."""
        blank = np.isnan(values)
        out[:, 0] = self._scaled(np.where(blank, self._filling, values))
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

    def says(self) -> str:
        """What a value becomes, for people."""
        if self.range is None:
            return f"(value - {self.mean:g}) / {self.std:g}, clamped at {self.limit:g} and divided by it"
        low, high = self.range
        return f"{low:g} … {high:g} becomes -1 … 1{' on a logarithmic scale' if self.log else ''}; beyond is clamped"


@dataclass(frozen=True)
class Category:
    """One feature per public level, one for any other level, one for a missing value."""

    levels: tuple[Any, ...] = ()
    other: bool = True
    indicator: bool = True

    reads: ClassVar[str] = "text"

    def check(self, where: str) -> None:
        _check_levels(self.levels, where)

    def features(self, name: str) -> list[str]:
        extra = ["other"] * self.other + ["missing"] * self.indicator
        return [f"{name} = {level}" for level in (*self.levels, *extra)]

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        index = level_index(column, self.levels, missing)
        width = out.shape[1]
        unknown = len(self.levels) if self.other else width  # a column beyond the last: nothing is set
        index = np.where(index == MISSING_LEVEL, width - 1 if self.indicator else width, index)
        index = np.where(index == OTHER_LEVEL, unknown, index)
        inside = np.flatnonzero(index < width)
        out[:] = 0
        out[inside, index[inside]] = 1

    def says(self) -> str:
        rest = " or other" if self.other else ""
        return f"0 or 1 for each of {', '.join(map(str, self.levels[:6]))}{' …' if len(self.levels) > 6 else ''}{rest}"


@dataclass(frozen=True)
class Ordinal:
    """Levels in their order, evenly spaced from -1 to 1; unknown ones count as missing."""

    levels: tuple[Any, ...] = ()
    fill: Any = None
    indicator: bool = True

    reads: ClassVar[str] = "text"

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
        return f"{self.levels[0]} … {self.levels[-1]} becomes -1 … 1, in {len(self.levels)} steps"


@dataclass(frozen=True)
class Boolean:
    """Yes or no as 1 or 0."""

    true: tuple[str, ...] = TRUE
    false: tuple[str, ...] = FALSE
    fill: bool | None = None
    indicator: bool = True

    reads: ClassVar[str] = "text"

    def check(self, where: str) -> None:
        if set(self.true) & set(self.false):
            raise SordinoError(f"{where}: a word stands under both true and false.")

    def features(self, name: str) -> list[str]:
        return Number(range=(0, 1), indicator=self.indicator).features(name)

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        import pyarrow.compute as pc

        lower = pc.utf8_lower(tables.texts(column, missing))
        index = level_index(lower, (*self.false, *self.true), ())
        values = np.where(index < 0, np.nan, (index >= len(self.false)).astype(np.float64))
        fill = 0.5 if self.fill is None else float(self.fill)
        Number(range=(0, 1), fill=fill, indicator=self.indicator).place(values, out)
        out[:, 0] = (out[:, 0] + 1) / 2

    def says(self) -> str:
        return "yes becomes 1, no becomes 0"


@dataclass(frozen=True)
class Date:
    """A date as the part of a public range that has passed, from -1 to 1."""

    range: tuple[str, str] = ("", "")
    fill: str | None = None
    indicator: bool = True

    reads: ClassVar[str] = "text"

    def check(self, where: str) -> None:
        first, last = (_day(text, f"{where}.range") for text in self.range)
        if not first < last:
            raise SordinoError(f"{where}.range: {list(self.range)} must be two dates, the earlier one first.")
        if self.fill is not None:
            _day(self.fill, f"{where}.fill")

    def features(self, name: str) -> list[str]:
        return Number(range=(0, 1), indicator=self.indicator).features(name)

    def encode(self, column: Any, name: str, missing: Sequence[str], out: np.ndarray) -> None:
        first, last = (_day(text, name) for text in self.range)
        fill = None if self.fill is None else _day(self.fill, name)
        Number(range=(first, last), fill=fill, indicator=self.indicator).place(tables.dates(column, name, missing), out)

    def says(self) -> str:
        return f"{self.range[0]} … {self.range[1]} becomes -1 … 1; beyond is clamped"


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


def level_index(column: Any, levels: Sequence[Any], missing: Sequence[str]) -> np.ndarray:
    """The index of each cell's level; -1 where it is missing, -2 where it is none of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = tables.texts(column, missing)
    found = pc.index_in(text, value_set=pa.array([_spelt(level) for level in levels], pa.string()))
    index = np.asarray(pc.fill_null(found, OTHER_LEVEL).to_numpy(zero_copy_only=False), np.int64)
    blank = np.asarray(pc.is_null(text).to_numpy(zero_copy_only=False), bool)
    return np.where(blank, MISSING_LEVEL, index)


# -------------------------------------------------------------------------------------------------------------- target


@dataclass(frozen=True)
class Target:
    """What is predicted. A record whose target is missing is refused, because nobody can learn from it."""

    column: str
    task: str = "classes"
    levels: tuple[str, ...] = ()
    recode: Mapping[str, str] = field(default_factory=dict)
    range: tuple[float, float] | None = None

    def check(self) -> None:
        if self.task not in TASKS:
            raise SordinoError(f"target.task: '{self.task}' is unknown.{nearest(self.task, TASKS)}")
        if self.task == "classes":
            _check_levels(self.levels, "target", least=2)
            if wrong := [level for level in self.recode.values() if level not in self.levels]:
                raise SordinoError(f"target.recode: '{wrong[0]}' is none of the levels {', '.join(self.levels)}.")
        elif self.range is None or not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise SordinoError("target.range: a quantity needs a public range = [low, high].")

    @property
    def reads(self) -> str:
        return "text" if self.task == "classes" else "number"

    def encode(self, column: Any, missing: Sequence[str]) -> np.ndarray:
        """Class indices; or numbers, clamped to the public range."""
        if self.task != "classes":
            values = tables.numbers(column, self.column, missing)
            if blank := int(np.isnan(values).sum()):
                raise self._absent(blank)
            assert self.range is not None
            return np.asarray(np.clip(values, *self.range), np.float32)
        spelt = [*self.levels, *self.recode]
        index = level_index(column, spelt, missing)
        if blank := int((index == MISSING_LEVEL).sum()):
            raise self._absent(blank)
        if (index == OTHER_LEVEL).any():
            row = int(np.flatnonzero(index == OTHER_LEVEL)[0])
            cell = tables.texts(column, missing)[row].as_py()
            raise SordinoError(
                f"target: '{cell}' in column '{self.column}' is none of the levels {', '.join(spelt[:8])}; add it to "
                "levels, or map it to one with recode."
            )
        position = [*range(len(self.levels)), *(self.levels.index(level) for level in self.recode.values())]
        return np.take(np.asarray(position, np.int64), index)

    def _absent(self, count: int) -> SordinoError:
        return SordinoError(f"target: {count} cells of column '{self.column}' are missing; drop those records.")


# -------------------------------------------------------------------------------------------------------------- schema


def assumption(sha256: str) -> str:
    """What a certificate says of the schema with this hash."""
    return (
        f"The schema of the table (sha256 {sha256}) is public: its ranges, levels and fill values were not taken from "
        "the protected records. It is applied to each record by itself, which costs no privacy."
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

    # ------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def read(path: str | Path) -> Schema:
        """From a TOML file."""
        return Schema.of(read_toml(path, "schema"))

    @staticmethod
    def of(values: Mapping[str, Any]) -> Schema:
        """From a dict with the keys of the file.

        Raises:
            SordinoError: A key is unknown, absent, or out of its range; the message begins with it.
        """
        _check_keys(values, ("columns", "target", "client", "person", "missing", "file"), "schema")
        described = values.get("columns") or {}
        if not isinstance(described, Mapping) or not described:
            raise SordinoError("schema: there are no columns; describe each one under [columns.NAME].")
        columns = {str(name): _column(str(name), about) for name, about in described.items()}
        target = None
        if (about := values.get("target")) is not None:
            target = _built(Target, about, "target")
            target.check()
        special = {"client": values.get("client"), "person": values.get("person")}
        for role, name in special.items():
            if name is not None and not isinstance(name, str):
                raise SordinoError(f"{role}: '{name}' must be the name of a column.")
        used = [name for name in (target.column if target else None, *special.values()) if name]
        if len(set(used)) < len(used):
            raise SordinoError("schema: target, client and person must be three different columns.")
        if both := [name for name in used if not isinstance(columns.get(name, Drop()), Drop)]:
            raise SordinoError(f"columns.{both[0]}: it is the target, client or person already, so it is no feature.")
        missing = values.get("missing", MISSING)
        if not isinstance(missing, list | tuple) or not all(isinstance(cell, str) for cell in missing):
            raise SordinoError('missing: give a list of texts, such as ["", "?", "NA"].')
        file = values.get("file", {})
        _check_keys(file, Dialect._fields, "file")
        return Schema(columns, target, special["client"], special["person"], tuple(missing), Dialect(**file))

    # ------------------------------------------------------------------------------------------------------- writing

    def values(self) -> dict[str, Any]:
        """The same as a dict, complete, for files and hashes."""
        document: dict[str, Any] = {key: value for key in ("client", "person") if (value := getattr(self, key))}
        document["missing"] = list(self.missing)
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
        values = self.values()
        values["columns"] = list(values["columns"].items())
        values.pop("file", None)  # how a file is written is no part of what its columns mean
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------------ encoding

    @property
    def features(self) -> list[str]:
        """Names of the features, in order."""
        return [feature for name, column in self.columns.items() for feature in column.features(name)]

    @property
    def used(self) -> int:
        """Number of columns that become features."""
        return sum(not isinstance(column, Drop) for column in self.columns.values())

    @property
    def classes(self) -> tuple[str, ...]:
        """The public levels of the target; empty where it is a number."""
        return self.target.levels if self.target is not None and self.target.task == "classes" else ()

    @property
    def unit(self) -> float:
        """Of a quantity, how much one unit of the model's output is: half of the public range. 1 for classes."""
        span = self.target.range if self.target is not None else None
        return 1.0 if span is None or self.classes else (span[1] - span[0]) / 2

    def to_model(self, y: np.ndarray) -> np.ndarray:
        """Labels as the model learns them: a quantity's public range becomes -1 … 1."""
        return y if self.classes else np.asarray((y - self._middle) / self.unit, np.float32)

    def to_people(self, y: np.ndarray) -> np.ndarray:
        """A quantity that the model predicted, in its own unit, within its public range."""
        middle, unit = self._middle, self.unit
        return np.clip(np.asarray(y, np.float64) * unit + middle, middle - unit, middle + unit)

    @property
    def _middle(self) -> float:
        return sum(self.target.range) / 2 if self.target is not None and self.target.range is not None else 0.0

    def at_site(self) -> Schema:
        """The same for a table of one site, which need not have the client column."""
        if self.client is None:
            return self
        return dataclasses.replace(self, client=None, columns={**self.columns, self.client: Drop()})

    def reads(self, *, target: bool = True) -> dict[str, str]:
        """The columns that a file must have, each read as `number` or `text`."""
        needed = {name: column.reads for name, column in self.columns.items() if column.reads}
        if target:
            if self.target is None:
                raise SordinoError("target: the schema names none; add [target] with its column and task.")
            needed[self.target.column] = self.target.reads
            needed |= {name: "text" for name in (self.client, self.person) if name}
        return needed

    def open(self, path: Path, *, target: bool = True) -> Encoded:
        """Read a file and encode it. Columns are found by name, whatever their order."""
        if target:
            self.check_complete(path)
        table = tables.open_table(path, self.dialect, types=self.reads(target=target), missing=self.missing)
        return self.encode(table, target=target)

    def check_complete(self, path: Path) -> None:
        """Refuse a text file with a column that the schema does not mention."""
        if tables.suffix_of(path) not in tables.TEXT_SUFFIXES:
            return
        names, _ = tables.heading(path, self.dialect)
        tables.check_columns(names, list(self.reads()), path)
        known = {*self.columns, self.client, self.person, self.target.column if self.target else None}
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
        x = np.empty((table.num_rows, len(self.features)), np.float32)
        at = 0
        for name, column in self.columns.items():
            if width := len(column.features(name)):
                column.encode(table.column(name), name, self.missing, x[:, at : at + width])
                at += width
        if not target or self.target is None:
            return Encoded(x, None, None, None)
        y = self.target.encode(table.column(self.target.column), self.missing)
        return Encoded(x, y, self._named(table, self.client, "client"), self._named(table, self.person, "person"))

    def _named(self, table: Any, name: str | None, role: str) -> np.ndarray | None:
        if name is None:
            return None
        text = tables.texts(table.column(name), self.missing)
        if text.null_count:
            raise SordinoError(f"{role}: {text.null_count} cells of column '{name}' are missing; drop those records.")
        return np.asarray(text.to_numpy(zero_copy_only=False)).astype(str)

    def explain(self) -> list[tuple[str, str, list[str]]]:
        """For people: each column, what its values become, and the names of its features."""
        return [(name, column.says(), column.features(name)) for name, column in self.columns.items()]


# -------------------------------------------------------------------------------------------------------------- drafts


def draft(path: Path, public: Path | None = None, dialect: Dialect | None = None) -> tuple[str, list[str]]:
    """A schema to be completed by people.

    Of the file only the column names and their types are used. Ranges and levels would tell something of the records,
    so they are left blank; or they are taken from a second file with *public* records of the same columns.

    Args:
        path: The table to describe.
        public: A table of public records, whose ranges and levels may be used.
        dialect: How the text file is written.

    Returns:
        The content of a schema.toml, and what was looked at, for people.
    """
    import pyarrow as pa
    import tomli_w

    dialect = dialect or Dialect()
    table = tables.open_table(path, dialect)
    known = None if public is None else tables.open_table(public, dialect)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        kind = table.column(name).type
        if pa.types.is_boolean(kind):
            columns[name] = {"type": "boolean"}
        elif pa.types.is_temporal(kind):
            columns[name] = {"type": "date", "range": [BLANK, BLANK]}
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            columns[name] = {"type": "number", "range": [BLANK, BLANK], "fill": BLANK}
        else:
            columns[name] = {"type": "category", "levels": [BLANK]}
        if known is not None and name in known.column_names:
            columns[name] |= _from_public(columns[name]["type"], known.column(name), name)
    document: dict[str, Any] = {"client": BLANK, "missing": list(MISSING)}
    if dialect != Dialect():
        document["file"] = {key: value for key, value in dialect._asdict().items() if value is not None}
    document["target"] = {"column": BLANK, "task": "classes", "levels": [BLANK, BLANK]}
    document["columns"] = columns
    looked = [f"names and types of the {len(columns)} columns of {path.name}; no value of it is in the draft"]
    if public is not None:
        looked.append(f"ranges and levels of {public.name}, which is declared public")
    notes = (
        "# A draft: replace every FILL IN by what is publicly known, and remove what is not needed.\n"
        '# client: the column that says which site a record is of. Ids and names get type = "drop".\n'
        "# Take ranges and levels from a code book or the literature, never from the records.\n\n"
    )
    return notes + tomli_w.dumps(document), looked


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
        levels = [level for level in pc.unique(tables.texts(column, MISSING)).to_pylist() if level is not None]
        return {"levels": sorted(levels)[:200]}
    return {}


# ------------------------------------------------------------------------------------------------------------- parsing


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


def _built(kind: Callable[..., Any], about: Any, where: str) -> Any:
    """One part of a schema from its keys, each of the declared type."""
    if not isinstance(about, Mapping):
        raise SordinoError(f"{where}: write a table of keys.")
    fields = {f.name: str(f.type) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _check_keys(about, tuple(fields), where)
    values = {}
    for key, value in about.items():
        if BLANK in (value if isinstance(value, list | tuple) else [value]):
            raise SordinoError(f"{where}.{key}: it still says {BLANK!r}; write what is publicly known.")
        values[key] = _typed(value, fields[key], f"{where}.{key}")
    try:
        return kind(**values)
    except TypeError:
        required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory]  # type: ignore[arg-type]
        raise SordinoError(f"{where}: it lacks {', '.join(set(required) - set(values))}.") from None


def _typed(value: Any, annotation: str, where: str) -> Any:
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


def _check_levels(levels: Sequence[Any], where: str, least: int = 1) -> None:
    if len(levels) < least:
        raise SordinoError(f"{where}.levels: list at least {least} public level{'s' if least > 1 else ''}.")
    if len(set(levels)) < len(levels):
        raise SordinoError(f"{where}.levels: a level stands there twice.")


def _day(text: str, where: str) -> float:
    try:
        return float((date.fromisoformat(text) - EPOCH).days)
    except ValueError:
        raise SordinoError(f"{where}: '{text}' is no date like 2024-12-31.") from None
