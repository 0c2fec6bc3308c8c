"""Readers of data files, by suffix. To add a format, write a `Reader` and register its suffix."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino.data import tables
from sordino.data.arrays import check_features, plain_name
from sordino.data.tables import open_table
from sordino.errors import SordinoError, listed, nearest

LABEL_COLUMNS = ("label", "y", "target", "class")  # columns taken for the label if the caller names none


class Raw(NamedTuple):
    """What a reader hands over: nothing is checked yet, and the test part may be missing."""

    x: np.ndarray
    y: np.ndarray
    site: np.ndarray | None = None
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    classes: tuple[str, ...] | None = None  # given: the labels are class indices already
    features: Sequence[str] | None = None
    person: np.ndarray | None = None
    shape: tuple[int, ...] = ()  # of one record, where x is flat and the source knows it


class Reader(NamedTuple):
    """How files of one format are read.

    Attributes:
        records: (path, label column, client column, person column) -> records, labels, clients and persons.
        features: (path, column names, number of features) -> features alone, to predict from. The names are empty if
            the model was trained without any.
    """

    records: Callable[[Path, str | None, str | None, str | None], Raw]
    features: Callable[[Path, Sequence[str], int], np.ndarray]


READERS: dict[str, Reader] = {}


def register(suffix: str, reader: Reader) -> None:
    """Let `load`, `predict` and the command line read files with this suffix.

    Args:
        suffix: The file name's end, such as `.csv`.
        reader: The reader.

    Raises:
        SordinoError: The suffix does not start with a dot, or has a reader already.
    """
    if not suffix.startswith(".") or suffix != suffix.lower():
        raise SordinoError(f"suffix: '{suffix}' must start with a dot and be lower case, such as .csv.")
    if suffix in READERS:
        raise SordinoError(f"suffix: '{suffix}' has a reader already; choose another suffix.")
    READERS[suffix] = reader


def reader_of(path: Path) -> Reader | None:
    """The reader of a file, by its suffix; None if there is none."""
    return READERS.get(tables.suffix_of(path))


def suffixes() -> str:
    """The registered suffixes, for messages.

    >>> suffixes()
    '.npz, .csv, .tsv, .parquet, .xlsx'
    """
    return ", ".join(READERS)


def read_arrays(path: Path, field: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz; never unpickles."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except PermissionError:
        raise SordinoError(f"{field}: this user cannot read '{path}'; change its permissions.") from None
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        plain = "save plain arrays with numpy.savez (pickled objects are not read)"
        raise SordinoError(f"{field}: '{path}' cannot be read as .npz ({error}); {plain}.") from None


def read_npz(path: Path, label: str | None, client: str | None, person: str | None = None) -> Raw:
    arrays = read_arrays(path, "data")
    if label is not None:
        raise SordinoError("label: an .npz names its labels `y` or `y_train` and `y_test`; leave label out.")
    for role, name in (("client", client), ("person", person)):
        if name is not None and name not in arrays:
            raise SordinoError(f"{role}: '{path}' has no array '{name}'.{nearest(name, arrays)}")
    site, who = arrays.get(client or "client"), None if person is None else arrays[person]
    for role, values in (("client", site), ("person", who)):
        if values is not None and values.ndim != 1:
            raise SordinoError(f"{role}: the array has shape {values.shape}; give one {role} per training record.")
    split = ("x_train", "y_train", "x_test", "y_test")
    if all(name in arrays for name in split):
        return Raw(arrays["x_train"], arrays["y_train"], site, arrays["x_test"], arrays["y_test"], person=who)
    if "x" in arrays and "y" in arrays:
        return Raw(arrays["x"], arrays["y"], site, person=who)
    raise SordinoError(f"data: '{path}' holds {sorted(arrays)}; it needs {', '.join(split)}, or x, y.")


def npz_features(path: Path, columns: Sequence[str], count: int) -> np.ndarray:
    """`x` or `x_test` of an .npz."""
    arrays = read_arrays(path, "data")
    x = next((arrays[name] for name in ("x", "x_test") if name in arrays), None)
    if x is None:
        raise SordinoError(f"data: '{path}' holds {sorted(arrays)}; it needs x or x_test.")
    return check_features(x, "x")


def _open_with_roles(
    path: Path, label: str | None, others: Mapping[str, str | None], *, labelled: bool = True
) -> tuple[Any, list[str], dict[str, str | None]]:
    """A table, its columns, and which of them have a role. The label's, if any, may be found by its usual name."""
    table = open_table(path, spelt=[name for name in others.values() if name is not None])
    # A data frame's saved index is a name of the row, not a feature of it.
    names = [name for name in table.column_names if not re.fullmatch(r"__index_level_\d+__", name)]
    if len(set(names)) < len(names) or "" in names:
        twice = sorted({name for name in names if names.count(name) > 1 or not name})
        raise SordinoError(f"data: column names {twice} in '{path}' are empty or repeated; name each column once.")
    if label is None and labelled:
        found = [name for name in LABEL_COLUMNS if name in names]
        if len(found) != 1:
            why = f"columns {found} could each be it" if found else f"no column is called {', '.join(LABEL_COLUMNS)}"
            raise SordinoError(
                f"label: {why}; name the label column of '{path}' (--label), or describe the table by a schema "
                f"(sordino schema draft {path.name}). Columns: {listed(names)}."
            )
        label = found[0]
    roles = {"label": label, **others}
    for field, name in roles.items():
        if name is not None and name not in names:
            raise SordinoError(f"{field}: '{path}' has no column '{name}'.{nearest(name, names)}")
        if name is not None and (other := next(role for role, column in roles.items() if column == name)) != field:
            raise SordinoError(f"{field}: '{name}' is the {other} column already; name another.")
    return table, names, roles


def read_table(path: Path, label: str | None, client: str | None, person: str | None = None) -> Raw:
    table, names, roles = _open_with_roles(path, label, {"client": client, "person": person})
    tables.check_encoding(table, names, path)
    features = [name for name in names if name not in roles.values()]
    numeric = {name: _numeric(table.column(name)) for name in features}
    words = [name for name, values in numeric.items() if values is None]
    if words:
        quoted = listed(f"'{name}'" for name in words)
        raise SordinoError(
            f"data: feature columns of '{path}' are not numeric: {quoted}. Describe the table by a schema "
            f"(sordino schema draft {path.name}), which encodes them, or drop them, or name the column of the label "
            f"(--label), of the client (--partition by-column:{words[0]}), of the person (--person) or, for a model "
            "that reads text, of the text (--text)."
        )
    x = np.empty((table.num_rows, len(features)), np.float32)
    with np.errstate(over="ignore"):  # what overflows is reported with the other non-finite values
        for j, name in enumerate(features):
            x[:, j] = np.asarray(numeric[name], np.float64)  # whole numbers round as in a column with fractions
    y, site, who = _roles(table, roles)
    return Raw(x, y, site, features=features, person=who)


def _roles(table: Any, roles: Mapping[str, str | None]) -> list[Any]:
    """Labels, clients and persons; None where no column has the role."""
    named = {role: roles[role] for role in ("label", "client", "person")}
    return [None if name is None else _words(table.column(name), role, name) for role, name in named.items()]


def read_texts(
    path: Path,
    text: str,
    label: str | None,
    client: str | None,
    person: str | None = None,
    prompt: str | None = None,
    *,
    labelled: bool = True,
) -> Raw:
    """A table with a column of text: `x` holds its strings, records by one column, or by two with a prompt.

    Other columns are ignored. Where records are not labelled, all labels are 0.

    Raises:
        SordinoError: A column is absent, or a text is missing.
    """
    others = {"text": text, "prompt": prompt, "client": client, "person": person}
    table, _, roles = _open_with_roles(path, label, others, labelled=labelled)
    columns = [text_column(table, text, path)]
    if prompt is not None:
        columns.append(text_column(table, prompt, path, "prompt"))
    y, site, who = _roles(table, roles)
    return Raw(np.asarray(columns, object).T, np.zeros(len(columns[0]), int) if y is None else y, site, person=who)


def text_column(table: Any, name: str, path: Path, field: str = "text") -> list[str]:
    """The strings of a column. field: the setting that named it, for errors.

    Raises:
        SordinoError: The column is absent, does not hold text, or lacks an entry.
    """
    if name not in table.column_names:
        raise SordinoError(f"{field}: '{path}' has no column '{name}'.{nearest(name, table.column_names)}")
    tables.check_encoding(table, [name], path)
    if _numeric(table.column(name)) is not None or tables.are_numbers(table.column(name)):
        raise SordinoError(f"{field}: column '{name}' of '{path}' holds numbers; name a column of text.")
    cells = tables.texts(table.column(name)).to_pylist()
    if absent := sum(cell is None or cell == "" for cell in cells):
        raise SordinoError(f"{field}: {absent} entries of column '{name}' are missing; fill or drop those records.")
    return [str(cell) for cell in cells]


def table_features(path: Path, columns: Sequence[str], count: int) -> np.ndarray:
    """The named columns of a table, or its first `count`; other columns are ignored."""
    table = open_table(path)
    tables.check_encoding(table, [name for name in columns if name in table.column_names], path)
    return columns_of(table, columns, count, f"'{path}'")


def columns_of(table: Any, columns: Sequence[str], count: int, where: str) -> np.ndarray:
    """The same of a pyarrow table in memory. where: its name in messages."""
    names = list(columns) or table.column_names[:count]
    if missing := [name for name in names if name not in table.column_names]:
        raise SordinoError(f"data: {where} lacks the columns {listed(missing)} that the model was trained on.")
    numeric = [_numeric(table.column(name)) for name in names]
    if any(values is None for values in numeric):
        raise SordinoError(f"data: columns of {where} that the model needs are not numeric.")
    return check_features(
        np.stack([np.asarray(values, np.float64).astype(np.float32) for values in numeric], 1), "x", names
    )


def _numeric(column: Any) -> np.ndarray | None:
    """A column as numbers, missing ones as NaN; None where it is not numeric."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    return np.asarray(column.to_numpy())


def _words(column: Any, field: str, name: str) -> np.ndarray:
    """A label, client or person column, as numbers or strings; a missing entry is an error."""
    missing, values = column.null_count, _numeric(column)
    if values is None:
        values = column.to_numpy()
        named = field != "label"
        blank = tables.MISSING if named else {""}
        missing = missing or sum(value in blank for value in values)
    if missing:
        raise SordinoError(f"{field}: {missing} entries of column '{name}' are missing; fill or drop those records.")
    if values.dtype != object:
        return np.asarray(values)
    return _names(values.astype(str)) if named else values.astype(str)


def _names(values: np.ndarray) -> np.ndarray:
    """Names of clients or persons: each is spelt by itself, and if all are whole numbers they are sorted as these."""
    distinct, index = np.unique(values, return_inverse=True)
    plain = np.array([plain_name(str(name)) for name in distinct])
    if all(re.fullmatch(r"[0-9]{1,18}", name) for name in plain):
        plain = plain.astype(np.int64)
    return plain[index.reshape(-1)]


register(".npz", Reader(read_npz, npz_features))
for _suffix in tables.SUFFIXES:
    register(_suffix, Reader(read_table, table_features))
