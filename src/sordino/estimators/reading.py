"""What `fit` is given, checked: schemas, frames with a target beside them, clients and persons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data import tables
from sordino.data.schema import Schema
from sordino.errors import SordinoError

ESTIMATORS = {
    "classes": "FederatedClassifier",
    "quantity": "FederatedRegressor",
    "count": "FederatedRegressor",
    "survival": "FederatedCox",
}


def read_schema(given: str | Path | Mapping[str, Any] | Schema, kind: str, tasks: tuple[str, ...]) -> Schema:
    """The schema that an estimator of this kind was given, whose target it must be able to learn."""
    if isinstance(given, str | Path):
        schema = Schema.read(given)
    elif isinstance(given, Mapping):
        schema = Schema.of(given)
    elif isinstance(given, Schema):
        schema = given
    else:
        raise SordinoError(f"schema: {given!r} must be the path of a schema.toml, a dict, or a Schema.")
    if schema.target is None:
        raise SordinoError("schema: it names no target; add [target] with its column and task.")
    if schema.task not in tasks:
        raise SordinoError(
            f"schema: its target has the task {schema.task}, and {kind} learns {' or '.join(tasks)}; "
            f"use {ESTIMATORS[schema.task]}."
        )
    return schema


def with_target(frame: Any, columns: Mapping[str, np.ndarray]) -> Any:
    """The frame as a table with these target columns, in place of its own where it has them."""
    table = tables.of_frame(frame)
    for name, entries in columns.items():
        if entries.shape != (table.num_rows,):
            raise SordinoError(f"y: shape {entries.shape} for {table.num_rows} records; give one entry per record.")
        column = tables.of_frame({name: entries.tolist()}).column(name)
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    return table


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Refuse what `fit` does not take. Weights of single records are not proved: see `FederatedClassifier`."""
    if unknown.get("sample_weight") is not None:
        raise SordinoError(
            "sample_weight: no bound is proved for weights of single records; weigh whole classes by options = "
            '{"class_weights": [1.0, 4.0]}, or drop the records that are not to count.'
        )
    if extra := [name for name in unknown if name != "sample_weight"]:
        raise TypeError(f"fit() got an unexpected keyword argument '{extra[0]}'")


def check_roles(schema: Schema | None, groups: Any, persons: Any) -> None:
    """Refuse clients or persons that are given twice."""
    if schema is None:
        return
    for field, given, column in (("groups", groups, schema.client), ("persons", persons, schema.person)):
        if given is not None and column is not None:
            raise SordinoError(f"{field}: the schema names the column '{column}' for it; leave {field} out.")


def entries(given: Any, records: int, field: str = "groups") -> np.ndarray:
    """One entry per record, none of them missing."""
    array = np.asarray(given)
    if array.shape != (records,):
        raise SordinoError(f"{field}: shape {array.shape} for {records} records; give one entry per record.")
    missing = sum(each is None or each != each for each in array.tolist())
    if missing:
        raise SordinoError(f"{field}: {missing} entries are missing; fill them or drop those records.")
    return array.astype(str) if array.dtype == object else array
