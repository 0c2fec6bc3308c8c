"""Check features and labels, and encode labels as class indices."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from sordino.data.splits import by_appearance
from sordino.errors import SordinoError

REGRESSION_VALUES = 50  # more distinct fractional labels than this are a quantity, not classes


def check_features(x: np.ndarray, field: str, names: Sequence[str] | None = None) -> np.ndarray:
    """float32, records by features, all finite. Images are flattened; those of bytes become pixels in [0, 1]."""
    if x.dtype.kind not in "fiub":
        raise SordinoError(f"{field}: features of type {x.dtype} are not numeric; encode them as numbers.")
    if x.ndim == 0 or len(x) == 0:
        raise SordinoError(f"{field}: there are no records; check the source.")
    if x.size == 0:
        raise SordinoError(f"{field}: there are no features beside the label; check the source.")
    with np.errstate(over="ignore"):
        bytes_of_images = x.ndim > 2 and x.dtype == np.uint8
        x = x.reshape(len(x), -1).astype(np.float32, copy=False)
        x = x / np.float32(255) if bytes_of_images else x
    with np.errstate(all="ignore"):  # a sum is finite only if every term is; a mask of the whole would cost memory
        if np.isfinite(x.sum(dtype=np.float64)):
            return x
    bad = ~np.isfinite(x)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise SordinoError(
            f"{field}: NaN, infinite or too large for float32 in {bad.sum()} places, the first in row {row} (from 0), "
            f"column {names[column] if names else column}; clean them, drop those records, or describe a table by a "
            "schema, which says what a missing value becomes (sordino schema draft)."
        )
    return x


def each_times(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Every row times a matrix of the same type, by itself.

    A product of all rows rounds each by its place and by how many there are, so the last bits of a record would tell
    how many records came before it, which is hidden where persons or clients are protected.
    """
    out = np.empty((len(x), matrix.shape[1]), matrix.dtype)
    row, product = np.empty(x.shape[1], matrix.dtype), np.empty(matrix.shape[1], matrix.dtype)
    for k in range(len(x)):
        row[:] = x[k]
        out[k] = np.dot(row, matrix, out=product)
    return out


def check_same_length(a: np.ndarray, name: str, b: np.ndarray, other: str) -> None:
    if len(a) != (len(b) if b.ndim else 1):
        raise SordinoError(f"{other}: {b.size} entries for {len(a)} records in {name}; there must be one for each.")


def encode_labels(y: np.ndarray, y_test: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Labels as indices into the sorted distinct training labels; or, for regression, float32 and no classes."""
    y = check_labels(y, "y")
    y_test = None if y_test is None else check_labels(y_test, "y_test")
    if y_test is not None and (y.dtype.kind == "U") != (y_test.dtype.kind == "U"):
        raise SordinoError(f"y_test: labels of type {y_test.dtype}, but those of y_train are {y.dtype}; use one type.")
    values, index = np.unique(y, return_inverse=True)
    fractional = values.dtype.kind == "f" and np.count_nonzero(values != np.floor(values))
    if fractional > REGRESSION_VALUES:
        return y.astype(np.float32), None if y_test is None else y_test.astype(np.float32), ()
    whole = values.dtype.kind == "f" and not fractional
    names = tuple(str(int(value) if whole else value) for value in values)  # a class is '1', not '1.0'
    if y_test is None:
        return index.astype(np.int64), None, names
    place = np.searchsorted(values, y_test).clip(max=len(values) - 1)
    unseen = values[place] != y_test
    if unseen.any():
        raise SordinoError(
            f"y_test: label '{y_test[unseen][0]}' never occurs in y_train, so no model can learn it; "
            "drop those records or split anew."
        )
    return index.astype(np.int64), place.astype(np.int64), names


def unit_numbers(names: np.ndarray) -> np.ndarray:
    """A number per record, equal for all records of a person or client, in the order in which these appear first.

    Names that differ in case, spaces, invisible characters, the code points of a letter or digit, or the spelling of a
    number (7, 007, 7.0; 100000 and 1e+05, as R writes it; 0 and -0.0) are one unit. Where that takes two persons for
    one, both are protected, as one unit; a person taken for two would be protected half.

    >>> unit_numbers(np.array(["p7", "P7 ", "p8"])).tolist(), unit_numbers(np.array(["7", "007", "8.0"])).tolist()
    ([0, 0, 1], [0, 0, 1])
    """
    if names.dtype.kind not in "iub":
        distinct, index = np.unique(names.astype(str), return_inverse=True)
        names = np.array([_one_spelling(str(name)) for name in distinct])[index.reshape(-1)]
    return by_appearance(names)


def numbers_of_pairs(clients: np.ndarray, persons: np.ndarray) -> np.ndarray:
    """Numbers of persons whom each client numbers by itself, in the order in which they appear first.

    Taken for one, two persons with one id would be held out together, and another id of one of them would change how
    many persons there are, and with it which others are held out.

    >>> numbers_of_pairs(np.array([0, 0, 1, 1]), np.array([5, 6, 5, 5])).tolist()
    [0, 1, 2, 2]
    """
    pairs = np.stack([clients.reshape(-1), persons], 1)
    return by_appearance(np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1))


def _one_spelling(name: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    kept = (c for c in folded if unicodedata.category(c) not in ("Cc", "Cf", "Zs", "Zl", "Zp"))
    text = "".join(str(unicodedata.decimal(c, c)) for c in kept)  # ٧ is 7
    number = re.fullmatch(r"([+-]?)(\d+)(?:\.(\d*))?(?:e\+(\d{1,4}))?", text)  # 12e5 may be a name
    return text if number is None else _one_number(*number.groups(default=""))


def _one_number(sign: str, whole: str, fraction: str, exponent: str) -> str:
    """The one spelling of a decimal number: its digits without zeros at either end, and a power of ten."""
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return "0"
    significant = digits.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(digits) - len(significant)
    return f"{'-' if sign == '-' else ''}{significant}e+{power}"


def plain_name(name: str) -> str:
    """A name without spaces around it; a whole number has one spelling, whatever the other names are.

    >>> plain_name(" 007 "), plain_name("7.0"), plain_name("P7")
    ('7', '7', 'P7')
    """
    text = name.strip()
    if whole := re.fullmatch(r"\+?([0-9]+)(?:\.0*)?", text):
        return whole[1].lstrip("0") or "0"
    return text


def by_public_classes(y: np.ndarray, found: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Class indices by a public list."""
    if not found:
        raise SordinoError("classes: the labels are quantities, and were said to be classes.")
    if unknown := sorted(set(found) - set(classes)):
        raise SordinoError(f"y: the label '{unknown[0]}' is none of the public ones ({', '.join(classes[:10])} …).")
    return np.asarray([list(classes).index(name) for name in found])[y]  # type: ignore[no-any-return]


def quantities(y: np.ndarray) -> np.ndarray:
    try:
        numbers = np.asarray(y, dtype=np.float32)
    except (TypeError, ValueError):
        raise SordinoError("y: the labels are not numbers; name the classes.") from None
    if not np.isfinite(numbers).all():
        raise SordinoError("y: a label is missing or infinite.")
    return numbers


def check_labels(y: np.ndarray, field: str) -> np.ndarray:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise SordinoError(f"{field}: labels of shape {y.shape}; give one label a record (class names or indices).")
    if y.dtype.kind in "SM":
        y = y.astype(str)
    if y.dtype.kind not in "fiubU":
        raise SordinoError(f"{field}: labels of type {y.dtype} are not understood; use numbers or strings.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        missing = np.count_nonzero(~np.isfinite(y))
        raise SordinoError(f"{field}: {missing} labels are NaN or infinite; fill or drop those records.")
    return y
