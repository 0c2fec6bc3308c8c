"""The identity of records: a hash of what a table says, not of how it is written.

Line ends, blank lines, the order of columns, spaces around a text, the file's format, and the spelling of numbers (1,
1.0, 1e0; 3.5, 3,5), of truth values (true, 1), of dates (2024-12-31, with or without midnight) and of missing cells do
not matter. Numbers that are not whole count to the precision of float32, because some formats keep no more. Where no
schema says how a text file is encoded, characters beyond ASCII count by their number alone: as single bytes they may be
of any alphabet.

The order of records does matter: it decides which of them are held out for testing. So does every record and every
column: without one of them, a table is another one here, although it tells of the same people.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from re import fullmatch
from typing import Any

import numpy as np

from sordino.data import tables
from sordino.data.readers import read_arrays
from sordino.data.tables import MISSING, Dialect, WrongEncodingError
from sordino.errors import SordinoError

EXACT = 2**53  # integers below it are exact as float64
TRUTH = {"true": "1", "false": "0"}
NOT_UTF_8 = ("cp1252", "latin-1")  # the first has signs where the second has none, but not for each byte
COMMA = r"([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)"  # a number whose decimals a comma separates


def records_digest(source: str, key: bytes = b"", dialect: Dialect | None = None) -> bytes:
    """The keyed hash of the records of a file, or of the name of a data set that is not a file.

    Args:
      source: a file, or the name of a built-in or published data set.
      key: without a key, anybody who guesses records can compare; never publish such a hash.
      dialect: how a text file is written. None: as its own bytes say, whatever a schema says of them. A ledger needs
        that, because two schemas of one file would otherwise be two accounts. What is not UTF-8 is read as one byte
        per character.

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
    spelt = str if dialect is not None else _folded
    digest.update(b"bytes " + file_sha256(path) if columns is None else _table(columns, spelt))
    return digest.digest()


def frame_digest(table: Any) -> bytes:
    """The hash of a pyarrow table in memory. It is that of a file with the same records. Not keyed: never write it.

    Args:
      table: the table, with its target.

    Returns:
      32 bytes.
    """
    columns = _of_table(table)
    if columns is None:  # the reader refuses names that are there twice
        columns = {str(number): _values(table.column(number)) for number in range(table.num_columns)}
    return hmac.new(b"", _table(columns, _folded), "sha256").digest()


def arrays_digest(x: np.ndarray, y: np.ndarray) -> bytes:
    """The hash of features without names and of their targets. Not keyed: never write it.

    The order of the features does not matter, nor do the types of x and y: labels count by their names.

    Args:
      x: numbers, records by features.
      y: the target of each record: a number, or the name of its class.

    Returns:
      32 bytes.
    """
    with np.errstate(over="ignore"):  # what overflows float32 counts as infinite
        features = sorted(_column(column) for column in np.asarray(x, np.float32).T)
    return hashlib.sha256(b"arrays " + b"".join(features) + _column(np.asarray(y))).digest()


def file_sha256(path: Path) -> bytes:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _table(columns: Mapping[str, np.ndarray], spelt: Callable[[str], str]) -> bytes:
    """What a table says, its columns sorted by name. `spelt`: how texts count."""
    parts = sorted((spelt(name), _column(values, spelt)) for name, values in columns.items())
    hashes = (hashlib.sha256(name.encode()).digest() + column for name, column in parts)
    return f"records {len(columns)}\n".encode() + b"".join(hashes)


def _folded(text: str) -> str:
    """A text with one sign for every character beyond ASCII."""
    return text if text.isascii() else re.sub(r"[^\x00-\x7f]", "\ufffd", unicodedata.normalize("NFC", text))


def _columns(path: Path, dialect: Dialect | None) -> Mapping[str, np.ndarray] | None:
    """The columns of a table or the arrays of an .npz; None for files of other formats."""
    suffix = tables.suffix_of(path)
    if suffix == ".npz":
        return read_arrays(path, "data")
    return _of_table(_opened(path, dialect)) if suffix in tables.SUFFIXES else None


def _opened(path: Path, dialect: Dialect | None) -> Any:
    """The table in a file."""
    if dialect is not None:
        return tables.open_table(path, dialect)
    try:
        table = tables.open_table(path)
        tables.check_encoding(table, table.column_names, path)
    except WrongEncodingError:
        try:
            return tables.open_table(path, Dialect(encoding=NOT_UTF_8[0]))
        except (SordinoError, UnicodeError):
            return tables.open_table(path, Dialect(encoding=NOT_UTF_8[1]))
    return table


def _of_table(table: Any) -> dict[str, np.ndarray] | None:
    """The columns of a table; None if two have one name. The saved index of a data frame is not a column."""
    names = [str(name).strip() for name in table.column_names]
    kept = {name: number for number, name in enumerate(names) if not fullmatch(r"__index_level_\d+__", name)}
    if len(set(names)) < len(names):
        return None
    return {name: _values(table.column(number)) for name, number in kept.items()}


def _values(column: Any) -> np.ndarray:
    """A column of a table as numbers, or as texts if a cell is not an exact number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if pa.types.is_integer(kind) and column.null_count and not _beyond(*pc.min_max(column).as_py().values()):
        column, kind = column.cast(pa.float64()), pa.float64()
    if pa.types.is_null(kind) or pa.types.is_decimal(kind):
        column, kind = column.cast(pa.float64()), pa.float64()
    if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and not column.null_count):
        return np.asarray(column.to_numpy())
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = column.cast(pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None), safe=False)
    if pa.types.is_nested(kind):
        return np.array([_cell(cell) for cell in column.to_pylist()], dtype=object)
    coded = column.dictionary_encode().combine_chunks()  # each distinct cell is read once
    cells = np.array([*map(_cell, coded.dictionary.to_pylist()), ""], dtype=object)
    return np.asarray(cells[np.asarray(pc.fill_null(coded.indices, len(cells) - 1))])


def _cell(cell: object) -> str:
    """The one spelling of a cell; empty where it is missing."""
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return ""
    if isinstance(cell, date):
        return _moment(cell)
    text = str(cell).strip()
    if text in MISSING:
        return ""
    text = TRUTH.get(text.lower(), text)
    try:
        return _number(text if (comma := fullmatch(COMMA, text)) is None else f"{comma[1]}.{comma[2]}")
    except ValueError:
        pass
    try:
        return _moment(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return text


def _number(text: str) -> str:
    """The one spelling of a number: whole ones exactly, others to the precision of float32.

    Raises:
      ValueError: the text is not a number.
    """
    if "_" in text:  # Python reads 1_000
        raise ValueError
    try:
        return str(int(text))
    except ValueError:
        number = float(text)
    if abs(number) < EXACT and number.is_integer():
        return str(int(number))
    if number.is_integer():
        return repr(number)
    with np.errstate(over="ignore"):
        return repr(float(np.float32(number)))


def _moment(when: date) -> str:
    """The one spelling of a date, or of a date and a time in UTC."""
    if not isinstance(when, datetime):
        return f"{when.isoformat()}T00:00:00"
    if when.tzinfo is not None:
        when = when.astimezone(UTC).replace(tzinfo=None)
    return when.isoformat()


def _beyond(*numbers: int) -> bool:
    """Whether one of these integers is not exact as float64."""
    return any(abs(number) >= EXACT for number in numbers)


def _column(values: np.ndarray, spelt: Callable[[str], str] = str) -> bytes:
    """Hash of an array: its shape, and its numbers as float64, or its cells if one is not an exact number."""
    digest = hashlib.sha256(f"{values.shape} ".encode())
    numbers = _numbers(values)
    if numbers is None:
        for cell in values.ravel().tolist():
            text = spelt(_cell(cell)).encode()
            digest.update(f"{len(text)} ".encode() + text)
        return digest.digest()
    numbers[np.isnan(numbers)] = np.nan  # one NaN
    digest.update(b"numbers " + numbers.astype("<f8").tobytes())
    return digest.digest()


def _numbers(values: np.ndarray) -> np.ndarray | None:
    """An array as float64, with every number that is not whole rounded to float32; None where that is not exact."""
    if values.dtype.kind in "iu" and values.size and _beyond(int(values.max()), int(values.min())):
        return None
    if values.dtype.kind not in "biuf":
        cells = {cell: _cell(cell) for cell in set(values.ravel().tolist())}
        try:
            known = {cell: float(text) if text else np.nan for cell, text in cells.items()}
        except ValueError:
            return None
        if _beyond(*(int(text) for text in cells.values() if fullmatch(r"-?\d+", text))):
            return None
        values = np.array([known[cell] for cell in values.ravel().tolist()], np.float64).reshape(values.shape)
    numbers = np.ascontiguousarray(values, np.float64) + 0.0  # -0.0 is 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(numbers == np.trunc(numbers), numbers, numbers.astype(np.float32).astype(np.float64))
