"""Tables as people keep them: CSV in its dialects, Parquet, Excel, compressed files, and data frames in memory.

Everything becomes a pyarrow table. The delimiter is read from the heading, which holds column names and no records.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino.errors import SordinoError, closest, count, listed
from sordino.lazy import optional

DELIMITERS = (",", ";", "\t", "|")
COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TEXT_SUFFIXES = (".csv", ".tsv")
WRITTEN_DATES = (
    None,
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%S",
    "%d.%m.%Y",
    "%d.%m.%y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%Y/%m/%d",
)
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".xlsx")
# Texts that pyarrow or pandas read as a missing cell where they guess the type.
MISSING = {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"}
MISSING |= {"NA", "NULL", "NaN", "None", "n/a", "nan", "null"}
BLOCK_BYTES = 2**22
EXACT = 2.0**53  # whole numbers below it are exact as floats
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Dialect(NamedTuple):
    """How a text file is written. None: read the delimiter from the heading."""

    delimiter: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"


class WrongEncodingError(SordinoError):
    """A text file is not in the encoding that its dialect names.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"data: '{path}' is not UTF-8 text ({why}); save it as UTF-8. Where it is Latin-1 (Windows, Western "
            'Europe): iconv -f latin1 -t utf-8 OLD.csv > NEW.csv, or set encoding = "latin-1" under [file] in a schema.'
        )
        self.path = path


def suffix_of(path: Path) -> str:
    """The suffix that says how a file is read, without that of its compression.

    >>> suffix_of(Path("patients.csv.gz"))
    '.csv'
    """
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def open_table(
    path: Path,
    dialect: Dialect | None = None,
    *,
    types: Mapping[str, str] | None = None,
    missing: Sequence[str] | None = None,
    spelt: Sequence[str] = (),
) -> Any:
    """Read a table. No cell decides how the cells of other records are read, unless the table is refused for it.

    Args:
        path: A .csv, .tsv, .parquet or .xlsx file; .csv and .tsv may end in .gz, .bz2 or .xz too.
        dialect: How a text file is written.
        types: Columns to read, each as `number`, `text` or `level` (a text with few distinct values); all others are
            skipped. None reads everything and guesses.
        missing: Cells of a text file that mean that a value is missing.
        spelt: Columns of a text file or workbook whose cells stay texts where types are guessed, because a guess
            depends on all cells: with one 1.5 among long whole numbers, equal ones and others would be the same.

    Returns:
        A pyarrow table.

    Raises:
        SordinoError: The file cannot be read, or lacks a column. The message names the remedy.
    """
    optional("pyarrow", "tables", f"data: '{path}'")  # here, not above: the library itself runs without it
    import pyarrow as pa

    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            names = list(types) if types is not None else None
            levels = [name for name, kind in (types or {}).items() if kind == "level"]
            table = pa.parquet.ParquetFile(path, read_dictionary=levels).read(columns=names)
        elif suffix == ".xlsx":
            table = _excel(path, types, spelt)
        else:
            return _text(path, dialect or Dialect(), types, missing, spelt)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    if types is not None:
        check_columns(table.column_names, list(types), path)
    return table


def column_names(path: Path, dialect: Dialect | None = None) -> list[str]:
    """The names of a file's columns."""
    if suffix_of(path) in TEXT_SUFFIXES:
        return list(heading(path, dialect or Dialect())[0])
    return list(open_table(path, dialect).column_names)


def of_frame(frame: Any) -> Any:
    """A pyarrow table of a pandas or polars frame, a mapping of columns, or a pyarrow table."""
    optional("pyarrow", "tables", "data")
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "to_arrow"):  # polars
        return frame.to_arrow()
    try:
        if hasattr(frame, "iloc"):
            return pa.Table.from_pandas(frame, preserve_index=False)
        if isinstance(frame, Mapping):
            return pa.table({str(name): pa.array(list(values)) for name, values in frame.items()})
    except (pa.ArrowException, TypeError, ValueError) as error:
        named = re.search(r"for column (.+) with type", str(error))  # the rest of the text quotes a cell
        which = f"column '{named.group(1)}'" if named else "a column"
        raise SordinoError(f"data: {which} of the frame has cells of several types; give each column one.") from None
    raise SordinoError(
        f"data: a {type(frame).__name__} is not a table; give a pandas or polars frame, or a dict of columns."
    )


def check_encoding(table: Any, names: Sequence[str], path: Path) -> None:
    """Refuse columns that are not UTF-8, which pyarrow reads as bytes where it guesses the type."""
    import pyarrow as pa

    for name in names:
        if suffix_of(path) in TEXT_SUFFIXES and pa.types.is_binary(table.column(name).type):
            raise WrongEncodingError(path, f"column '{name}' has other bytes")


def check_columns(names: Sequence[str], needed: Sequence[str], where: object) -> None:
    """Refuse a table that lacks a column or has one twice."""
    if absent := [name for name in needed if name not in names]:
        others = [name for name in names if name not in needed]
        hint = f" Did you mean '{meant}'?" if (meant := closest(absent[0], others)) else ""
        lacks = listed(f"'{name}'" for name in absent)
        raise SordinoError(f"data: '{where}' lacks the column{'s' if len(absent) > 1 else ''} {lacks}.{hint}")
    if twice := [name for name in needed if list(names).count(name) > 1]:
        raise SordinoError(f"data: '{where}' has the column '{twice[0]}' twice; rename one of them.")


# ------------------------------------------------------------------------------------------------------------- columns


def numbers(column: Any, name: str, missing: Sequence[str] = ()) -> np.ndarray:
    """A column as float64; missing cells are NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        column = texts(column, missing)
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            raise SordinoError(
                _no_number(name, count(_count_other(column), "cell that is not a number", "cells that are not numbers"))
            ) from None
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) and not (
        pa.types.is_decimal(kind) or pa.types.is_null(kind)
    ):
        raise SordinoError(f"data: column '{name}' holds {kind}, not numbers; set its type in the schema.")
    values = np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy(), np.float64)
    if np.isinf(values).any():
        raise SordinoError(f"data: column '{name}' holds an infinite number; replace it, or leave the cell blank.")
    return values


def texts(column: Any, missing: Sequence[str] = ()) -> Any:
    """A column as a pyarrow array of trimmed strings; missing cells are null. Whole numbers are spelt as such, because
    a data frame turns them into floats where another cell is missing: 1000000000000000, and not 1e+15."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_boolean(column.type):
        column = pc.if_else(column, "true", "false")
    if pa.types.is_floating(column.type):
        whole = pc.and_(pc.equal(pc.trunc(column), column), pc.less(pc.abs(column), EXACT))
        column = pc.if_else(
            whole, pc.if_else(whole, column, 0.0).cast(pa.int64()).cast(pa.string()), column.cast(pa.string())
        )
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    if missing:
        text = pc.if_else(pc.is_in(text, value_set=pa.array(list(missing), pa.string())), None, text)
    return text


def check_digits(column: Any, name: str) -> None:
    """Refuse floats that may have been other whole numbers, from 2^53 on.

    A data frame makes floats of all codes of a column where one is missing, so that a missing cell of one record would
    change the levels of others.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if (
        pa.types.is_floating(column.type)
        and pc.any(pc.and_(pc.is_finite(column), pc.greater_equal(pc.abs(column), EXACT))).as_py()
    ):
        raise SordinoError(
            f"data: column '{name}' holds whole numbers of 16 digits and more as floats, which cannot keep all digits; "
            "give it as text, or in pandas as Int64."
        )


def are_numbers(column: Any) -> bool:
    """Whether all cells of a column of texts are numbers."""
    import pyarrow as pa

    if pa.types.is_temporal(column.type) or pa.types.is_nested(column.type):
        return False
    try:
        return bool(len(texts(column).cast(pa.float64())))
    except pa.ArrowInvalid:
        return False


def _date(cell: str, form: str | None) -> date | None:
    """The date that a text names; None where it names none."""
    try:
        return date.fromisoformat(cell) if form is None else datetime.strptime(cell, form).date()
    except ValueError:
        return None


def _count_other(column: Any) -> int:
    """How many texts are not numbers."""

    def other(cell: str) -> bool:
        try:
            float(cell)
        except ValueError:
            return True
        return False

    return max(1, sum(other(cell) for cell in column.to_pylist() if cell is not None))


def dates(column: Any, name: str, missing: Sequence[str] = (), form: str | None = None) -> np.ndarray:
    """A column of dates as days since 1970, float64; missing cells are NaN.

    Args:
        column: Dates, times or texts.
        name: Of the column.
        missing: Texts that mean that a value is missing.
        form: How texts are written, such as `%d.%m.%Y`; None for 2024-12-31, with or without a time.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_temporal(column.type):
        text = texts(column, missing)
        text = pc.utf8_slice_codeunits(text, 0, 10) if form is None else text
        coded = text.dictionary_encode()  # each distinct date is read once
        known = pa.array([_date(cell, form) for cell in coded.dictionary.to_pylist()], pa.date32())
        column = known.take(coded.indices)
        if wrong := column.null_count - text.null_count:
            found = count(wrong, f"cell of column '{name}' is not a date", f"cells of column '{name}' are not dates")
            like = date(2024, 12, 31).strftime(form or "%Y-%m-%d")
            other = '. Where they are written as 31.12.2024, set format = "%d.%m.%Y" in the schema' * (form is None)
            raise SordinoError(f"data: {found} like {like}{other}; list what means a missing value under `missing`.")
    try:
        days = column.cast(pa.date32()).cast(pa.int32())
    except pa.ArrowException:
        raise SordinoError(
            f"data: column '{name}' holds {column.type}, not dates; set its type in the schema."
        ) from None
    return np.asarray(pc.fill_null(days.cast(pa.float64()), np.nan).to_numpy(), np.float64)


# --------------------------------------------------------------------------------------------------------------- files


def heading(path: Path, dialect: Dialect) -> tuple[list[str], str]:
    """The column names of a text file, and its delimiter."""
    try:
        with _stream(path) as stream:
            first = stream.readline(1 << 20)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(path, error) from None
    if not first.strip():
        raise SordinoError(f"data: '{path}' is empty; it needs a heading with column names, and records.")
    if first.startswith(BYTE_ORDER_MARKS):
        raise WrongEncodingError(path, "it begins as UTF-16 does")
    try:
        line = first.decode("utf-8-sig" if dialect.encoding == "utf-8" else dialect.encoding).strip("\r\n")
    except (UnicodeDecodeError, LookupError):
        raise WrongEncodingError(path, "a column's name has other bytes") from None
    delimiter = dialect.delimiter
    if delimiter is None:
        bare = re.sub(r'"[^"]*"', "", line)
        delimiter = max(DELIMITERS, key=bare.count)
    names = next(csv.reader([line], delimiter=delimiter), [])
    return [name.strip() for name in names], delimiter


def unlikely_names(path: Path, names: Sequence[str]) -> int:
    """How many names of columns look like cells of a record: a file without a heading gives away its first record.

    Args:
        path: The table. Only text files and workbooks take names from a line that may be a record.
        names: The names of its columns.

    Returns:
        The number of names that are empty, numbers or dates.

    >>> unlikely_names(Path("patients.csv"), ["79", "3,5", "2020-01-01", "31.12.2024", "", "age", "crp 24h"])
    5
    """
    if suffix_of(path) == ".parquet":
        return 0
    return sum(not name or _is_number(name) or any(_date(name, form) for form in WRITTEN_DATES) for name in names)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True


def _text(
    path: Path,
    dialect: Dialect,
    types: Mapping[str, str] | None,
    missing: Sequence[str] | None,
    spelt: Sequence[str],
) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    names, delimiter = heading(path, dialect)
    several_lines = _check_quotes(path, delimiter)
    if types is not None:
        check_columns(names, list(types), path)
    kinds = {"number": pa.float64(), "text": pa.string(), "level": pa.dictionary(pa.int32(), pa.string())}
    convert = pa.csv.ConvertOptions(
        column_types={name: kinds[kind] for name, kind in (types or dict.fromkeys(spelt, "text")).items()},
        include_columns=list(types) if types is not None else None,
        decimal_point=dialect.decimal,
        strings_can_be_null=types is not None,
        **({"null_values": list(missing)} if missing is not None else {}),
    )
    packed, encoding = path.suffix.lower() in COMPRESSED, {"utf-8": "utf8"}.get(dialect.encoding, dialect.encoding)
    # Python unpacks and decodes, and a thread of pyarrow that still holds a Python object aborts a process that ends.
    threads = not packed and encoding == "utf8"
    read = pa.csv.ReadOptions(encoding=encoding, column_names=names or None, skip_rows=1, use_threads=threads)
    try:
        with _stream(path) if packed else pa.OSFile(str(path)) as stream:
            parse = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=several_lines)
            return pa.csv.read_csv(stream, read, parse, convert)
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise _explained(path, str(error), names, dialect) from None


def _check_quotes(path: Path, delimiter: str) -> bool:
    """Refuse a quote that belongs to no quoted cell: up to the next quote it could hide the records that follow.

    Args:
        path: The text file.
        delimiter: What separates its cells.

    Returns:
        Whether a quoted cell holds line ends.

    Raises:
        SordinoError: A quote stands within a cell that is not quoted, or a quoted cell does not end.
    """
    ends = (delimiter.encode(), b"\r", b"\n")
    number, opened, inside, several_lines = 1, 1, False, False
    try:
        with _stream(path) as stream:
            if not any(b'"' in block for block in iter(lambda: stream.read(BLOCK_BYTES), b"")):
                return False
        with _stream(path) as stream:
            stream.readline(1 << 20)  # the heading
            for line in stream:
                number, several_lines = number + 1, several_lines or inside
                parts = line.split(b'"')
                for k, (before, after) in enumerate(itertools.pairwise(parts)):  # beside a quote; empty beside another
                    fits = not after or after.startswith(ends) if inside else not before or before.endswith(ends)
                    if not fits:
                        raise _loose_quote(path, number, opened if inside else number)
                    if not inside and (before or not k):  # else it is the second quote of two, which stand for one
                        opened = number
                    inside = not inside
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(path, error) from None
    if inside:
        raise _open_quote(path, opened)
    return several_lines


def _open_quote(path: Path, line: int, more: str = "") -> SordinoError:
    return SordinoError(
        f"data: line {line} of '{path}' begins a quoted cell that does not end{more}; end it with a quote, and write a "
        "quote in it twice."
    )


def _loose_quote(path: Path, line: int, opened: int) -> SordinoError:
    """opened: the line in which the quoted cell around the quote begins."""
    if opened < line:
        return _open_quote(path, opened, f", or line {line} has a quote in the middle of it")
    return SordinoError(
        f"data: line {line} of '{path}' has a quote that neither begins nor ends a cell; write a cell with a quote in "
        "quotes, and the quote in it twice."
    )


def release_memory() -> None:
    """Give back what pyarrow keeps of tables that are no longer used."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _stream(path: Path) -> Any:
    opener = COMPRESSED.get(path.suffix.lower())
    return opener(path, "rb") if opener else open(path, "rb")


def _excel(path: Path, types: Mapping[str, str] | None, spelt: Sequence[str]) -> Any:
    """The first sheet of a workbook; its first row names the columns."""
    import pyarrow as pa

    openpyxl = optional("openpyxl", "excel", f"data: '{path}'")
    try:
        sheet = openpyxl.load_workbook(io.BytesIO(path.read_bytes()), read_only=True, data_only=True).worksheets[0]
        rows = list(sheet.iter_rows(values_only=True))
    except Exception as error:  # a damaged archive fails in many ways
        raise _unreadable(path, error) from None
    if not rows:
        raise SordinoError(f"data: the first sheet of '{path}' is empty; put a heading and records there.")
    names = ["" if name is None else str(name).strip() for name in rows[0]]
    columns = [list(cells) for cells in zip(*rows[1:], strict=False)] or [[] for _ in names]
    kinds = dict.fromkeys(spelt, "text") if types is None else types
    arrays = [_sheet_column(cells, kinds.get(name)) for name, cells in zip(names, columns, strict=True)]
    return pa.Table.from_arrays(arrays, names=names)


def _sheet_column(cells: Sequence[Any], kind: str | None) -> Any:
    """A column of a workbook. Where its cells are of several types, each is spelt by itself.

    kind: `number`, `text` or `level`; None guesses.
    """
    import pyarrow as pa

    present = [cell for cell in cells if cell is not None]
    if not present:
        return pa.nulls(len(cells))
    if kind in (None, "text") and all(type(cell) is datetime for cell in present):
        return pa.array(cells, pa.timestamp("us"))
    if kind in (None, "number") and all(isinstance(cell, int | float) for cell in present):
        if kind is None and all(type(cell) is bool for cell in present):
            return pa.array(cells, pa.bool_())
        if kind is None and all(isinstance(cell, int) and abs(cell) < 2**63 for cell in present):
            return pa.array([None if cell is None else int(cell) for cell in cells], pa.int64())
        return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())
    return pa.array([None if cell is None else _spelt_cell(cell, kind) for cell in cells], pa.string())


def _spelt_cell(cell: Any, kind: str | None) -> str:
    """The text that stands for a cell of a workbook, whatever the other cells are."""
    if isinstance(cell, bool):
        return str(int(cell)) if kind == "number" else str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime) and not (cell.hour or cell.minute or cell.second or cell.microsecond):
        return cell.date().isoformat()
    return str(cell)


def _explained(path: Path, why: str, names: Sequence[str], dialect: Dialect) -> SordinoError:
    """What pyarrow's message means, and the remedy."""
    if "UTF8" in why or "utf8" in why or "codec can't decode" in why:
        number = re.search(r"In CSV column #(\d+)", why)
        where = f"column '{names[int(number.group(1))]}' has" if number else "some cells have"
        return WrongEncodingError(path, f"{where} other bytes")
    if wrong := re.search(
        r"In CSV column #(\d+): .*?(?:Row #(\d+): )?CSV conversion error to \w+: invalid value '(.*)'", why, re.DOTALL
    ):
        column, row, cell = names[int(wrong.group(1))], wrong.group(2), wrong.group(3)
        where = f", line {row}" if row else ""
        if "," in cell and dialect.decimal == ".":
            return SordinoError(
                f"data: column '{column}' of '{path}'{where} holds a number with a comma; where a comma separates "
                'decimals, set decimal = "," under [file] in the schema.'
            )
        return SordinoError(f"{_no_number(column, 'a cell that is not a number')} It is in '{path}'{where}.")
    if wrong := re.search(r"(?:Row #\d+: )?Expected \d+ columns, got \d+", why):  # the rest quotes the row
        return SordinoError(
            f"data: a row of '{path}' has more or fewer cells than the heading ({wrong.group()}); check the "
            "delimiter, or quote cells that contain it."
        )
    if "Empty CSV" in why:
        return no_records(path)
    return _unreadable(path, why)


def no_records(path: Path) -> SordinoError:
    """The error about a file with a heading alone."""
    return SordinoError(f"data: '{path}' holds a heading and no records; check the file.")


def _no_number(name: str, what: str) -> str:
    """No cell is quoted: messages are copied into logs and mails."""
    return (
        f"data: column '{name}' holds {what}; list such texts under `missing` in the schema, or give the "
        "column the type category."
    )


def _unreadable(path: Path, why: object) -> SordinoError:
    if isinstance(why, PermissionError):
        return SordinoError(f"data: this user cannot read '{path}'; change its permissions.")
    return SordinoError(f"data: '{path}' cannot be read ({why}); check that it is a true {suffix_of(path)} file.")
