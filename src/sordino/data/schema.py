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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino.data import expansion, tables
from sordino.data.columns import (
    MISSING,
    OTHER_LEVEL,
    PREVALENCE,
    TYPES,
    Boolean,
    Category,
    Column,
    Drop,
    Number,
    Ordinal,
    level_index,
    missing_cell,
    spelling,
)
from sordino.data.expansion import Block, Expansion
from sordino.data.tables import Dialect
from sordino.data.target import Target
from sordino.errors import SordinoError, count, listed, nearest
from sordino.settings import read_toml

CHUNK_RECORDS = 2**16  # that are encoded at once
PART_DIGITS = 16  # of the hash of a part of a schema
BLANK = "FILL IN"  # what a draft leaves to people


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
            raise SordinoError(f"{role}: {missing_cell(text.null_count, name)}; drop those records.")
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
        return tuple(spelling(each) for each in value)
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
    return spelling(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
