"""What `fit` is given, checked: schemas, frames with a target beside them, clients and persons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sordino.core import Unit
from sordino.data import tables
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.training.resolved import ResolvedSpec

WEIGHED_MODELS = ("auto", "softmax", "logistic", "squares", "poisson")  # one clipped term per record
ESTIMATORS = {
    "classes": "FederatedClassifier",
    "quantity": "FederatedRegressor",
    "count": "FederatedRegressor",
    "survival": "FederatedCox",
}


def read_schema(given: str | Path | Mapping[str, Any] | Schema, kind: str, tasks: tuple[str, ...]) -> Schema:
    """The schema that an estimator of this kind was given, whose target it must be able to learn."""
    schema = Schema.given(given)
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


def named_target(y: Any, schema: Schema) -> dict[str, np.ndarray]:
    """The columns of y under names of its own, which a ledger needs; {} if y is None.

    The names of the schema would not do: another schema would open another account of the same records.
    """
    if y is None:
        return {}
    names = [str(name) for name in (y.columns if hasattr(y, "columns") else [getattr(y, "name", "")])]
    wanted = schema.target.reads if schema.target else ()
    if {*names} != {*wanted}:
        raise SordinoError(
            f"ledger: y must have the names of the target's columns itself ({', '.join(wanted)}), as a column of a "
            "frame has; or leave y out, and have them in the frame. Names from a schema would open another account."
        )
    return {name: np.asarray(y[name] if hasattr(y, "columns") else y) for name in names}


WEIGHTED = (
    "Each weight of a record (sample_weight) is a function of that record alone, or public; weights that were computed "
    "from several records are a release that no budget pays for."
)


def weight_of(unknown: Mapping[str, Any]) -> Any:
    """`sample_weight` out of what `fit` is given beside its parameters; everything else is refused.

    It is not a parameter by name, because scikit-learn's meta-estimators (AdaBoost, Voting) would pass weights of their
    own, which they compute from all records.
    """
    if extra := [name for name in unknown if name != "sample_weight"]:
        raise TypeError(f"fit() got an unexpected keyword argument '{extra[0]}'")
    return unknown.get("sample_weight")


def read_weights(given: Any, records: int, resolved: ResolvedSpec) -> np.ndarray | None:
    """The weights of records, where the run has a proof for them.

    A record's clipped term is multiplied by its weight. The factor is at most 1, so the term stays within the clip,
    whatever the weight depends on within the record; divisors are numbers of records, so no weight enters them.

    Raises:
      SordinoError: a weight is not in [0, 1], or nothing is proved for weights in this run.
    """
    if given is None:
        return None
    rules = (
        (resolved.privacy.unit is Unit.RECORD, f"unit = {resolved.privacy.unit}"),
        (resolved.model.name in WEIGHED_MODELS, f"model = {resolved.model.name}"),
        (
            all(query.bound is None for stage in resolved.method.stages for query in stage.queries),
            f"method = {resolved.method_name}, whose bound is a lemma about records that count equally",
        ),
    )
    if wrong := [what for fine, what in rules if not fine]:
        raise SordinoError(
            "sample_weight: it is proved for unit = record and linear models, whose clipped terms it multiplies, and "
            f"here {wrong[0]}; leave it out, or weigh whole classes by options = {{'class_weights': [1.0, 4.0]}}."
        )
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise SordinoError("sample_weight: it must hold numbers, one per record.") from None
    weights = np.full(records, float(weights)) if weights.ndim == 0 else weights
    if weights.shape != (records,):
        raise SordinoError(f"sample_weight: shape {weights.shape} for {records} records; give one number per record.")
    if not ((weights >= 0) & (weights <= 1)).all():  # false for NaN
        raise SordinoError(
            "sample_weight: a weight is not in [0, 1]; divide all weights by a public number that none exceeds (not by "
            "their maximum, which is private), because a larger factor would carry a record's term out of its clip."
        )
    return weights


def warn_of_unused(schema: Schema | None, frame: Any) -> None:
    """Name the columns of a frame that the schema does not mention."""
    if schema is None or not hasattr(frame, "columns"):
        return
    known = {*schema.columns, schema.client, schema.person, *(schema.target.reads if schema.target else ())}
    names = getattr(frame, "column_names", frame.columns)  # of pyarrow, or of pandas and polars
    if unused := [str(name) for name in names if name not in known]:
        warnings.warn(
            f"columns: {', '.join(unused)} are not in the schema, so they are not used; describe them, or give them "
            'type = "drop".',
            stacklevel=3,
        )


def check_roles(schema: Schema | None, groups: Any, persons: Any) -> None:
    """Refuse clients or persons that are given twice."""
    if schema is None:
        return
    for field, given, column in (("groups", groups, schema.client), ("persons", persons, schema.person)):
        if given is not None and column is not None:
            raise SordinoError(f"{field}: the schema names the column '{column}' for it; leave {field} out.")


def entries(given: Any, records: int, field: str = "groups") -> np.ndarray:
    """One entry per record, none of them missing."""
    array = np.asarray(given, object if isinstance(given, list | tuple) else None)  # one type for all would round ids
    if array.shape != (records,):
        raise SordinoError(f"{field}: shape {array.shape} for {records} records; give one entry per record.")
    missing = sum(each is None or each != each for each in array.tolist())
    if missing:
        raise SordinoError(f"{field}: {missing} entries are missing; fill them or drop those records.")
    if array.dtype != object:
        return array
    whole = all(isinstance(each, int | np.integer) and abs(int(each)) < 2**63 for each in array.tolist())
    return array.astype(np.int64 if whole else str)


def column_error(given: Any) -> SordinoError | None:
    """The error for an array or a frame with text or missing values, which no schema explains; None if it has none."""
    if hasattr(given, "columns") and hasattr(given, "dtypes"):  # pandas, polars
        columns = {f"'{name}'": np.asarray(given[name]) for name in given.columns}
    elif isinstance(given, np.ndarray) and given.ndim == 2:
        columns = {str(k): given[:, k] for k in range(given.shape[1])}
    else:
        return None
    names = [name for name, cells in columns.items() if cells.dtype.kind in "OUST" and any(map(_text, cells.tolist()))]
    if names:
        return SordinoError(
            f"X: column {_some(names)} holds text, and a model reads numbers; describe the columns by schema= "
            "(docs/how-to/describe-a-table.md), which makes a feature of each level."
        )
    names = [name for name, cells in columns.items() if any(cell != cell for cell in cells.tolist())]
    if names:
        return SordinoError(
            f"X: column {_some(names)} has missing values (NaN); describe the columns by schema= "
            "(docs/how-to/describe-a-table.md), which counts them as a public value. An imputer that is fitted to the "
            "records is not private."
        )
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _text(cell: object) -> bool:
    if not isinstance(cell, str):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
