"""The identity of records: a hash of what a file says, not of how it is written.

Line ends, blank lines, the order of columns, the spelling of numbers (1, 1.0, 1e0) and the file's format do not matter.
The order of records does: it decides which of them are held out for testing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data import tables
from sordino.data.readers import read_arrays
from sordino.data.tables import Dialect
from sordino.errors import SordinoError

EXACT = 2**53  # integers below it are exact as float64


def records_digest(source: str, key: bytes = b"", dialect: Dialect | None = None) -> bytes:
    """The keyed hash of the records of a file, or of the name of a data set that is no file.

    Args:
      source: a file, or the name of a built-in or published data set.
      key: without a key, anybody who guesses records can compare; never publish such a hash.
      dialect: how a text file is written.

    Returns:
      32 bytes. A file that cannot be parsed has the hash of its bytes.
    """
    path = Path(source).expanduser()
    digest = hmac.new(key, digestmod="sha256")
    if not path.is_file():
        digest.update(b"name " + source.encode())
        return digest.digest()
    try:
        columns = _columns(path, dialect)
    except (SordinoError, UnicodeError):
        columns = None
    if columns is None:
        digest.update(b"bytes " + file_sha256(path))
        return digest.digest()
    digest.update(f"records {len(columns)}\n".encode())
    for name, values in sorted(columns.items()):
        digest.update(hashlib.sha256(name.encode()).digest() + _column(values))
    return digest.digest()


def file_sha256(path: Path) -> bytes:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _columns(path: Path, dialect: Dialect | None) -> Mapping[str, Any] | None:
    """The columns of a table or the arrays of an .npz; None for files of other formats."""
    suffix = tables.suffix_of(path)
    if suffix == ".npz":
        return read_arrays(path, "data")
    if suffix not in tables.SUFFIXES:
        return None
    table = tables.open_table(path, dialect)
    if len(set(table.column_names)) < len(table.column_names):
        return None
    return {name: _values(table.column(name)) for name in table.column_names}


def _values(column: Any) -> np.ndarray:
    """A column of a table as float64 where that is exact, otherwise as texts. Missing cells are NaN, or empty."""
    import pyarrow as pa

    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            column = column.cast(pa.float64())
        return np.asarray(column.to_numpy())
    return np.array(["" if cell is None else str(cell) for cell in column.to_pylist()], dtype=object)


def _column(values: np.ndarray) -> bytes:
    """Hash of an array: shape, kind, and numbers as float64 where that is exact."""
    digest = hashlib.sha256(f"{values.shape} ".encode())
    if values.dtype.kind in "iu" and values.size and (values.max() >= EXACT or values.min() <= -EXACT):
        digest.update(b"integers " + ",".join(map(str, values.ravel().tolist())).encode())
    elif values.dtype.kind in "biuf":
        numbers = np.ascontiguousarray(values, np.float64) + 0.0  # -0.0 is 0.0
        numbers[np.isnan(numbers)] = np.nan  # one NaN
        digest.update(b"numbers " + numbers.astype("<f8").tobytes())
    else:
        for cell in values.ravel().tolist():
            text = str(cell).encode()
            digest.update(f"{len(text)} ".encode() + text)
    return digest.digest()
