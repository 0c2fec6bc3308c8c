"""Where records come from: built-in sources, files, and preprocessing that costs no privacy.

Preprocessing is per record, or uses statistics declared public; nothing here computes a statistic of private features
and lets it shape the features.
"""

from __future__ import annotations

import codecs
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino.core import SAFETY
from sordino.data import catalog
from sordino.errors import SordinoError, nearest
from sordino.lazy import optional

BUILT_IN = ("digits", "synthetic")
SUFFIXES = (".npz", ".csv", ".parquet")
LABELS = ("label", "y", "target", "class")  # columns taken for the label where the caller names none
RADIUS = 10.0  # norm of a record under `record`: beside it the bias, a feature of 1, is small
FEW = 16  # features: with fewer, a record's own mean and norm are too much of it to be taken away
RIDGE = 1e-3  # of the mean eigenvalue: keeps whitening bounded where the public covariance is singular
REGRESSION_VALUES = 50  # more distinct fractional labels than this are a quantity, not classes


class Dataset(NamedTuple):
    """Records in memory. `y` holds class indices, or float32 where `classes` is empty (regression)."""

    name: str
    x_train: np.ndarray  # float32, records by features
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    site: np.ndarray | None  # whose each training record is, as given
    classes: tuple[str, ...]  # the original labels, in the order of their indices
    features: tuple[str, ...] = ()  # column names, where the source has them
    public: tuple[np.ndarray, np.ndarray] | None = None  # mean and cov that x was whitened by


class _Raw(NamedTuple):
    """What a reader hands over: nothing is checked yet, and the test part may be missing."""

    x: np.ndarray
    y: np.ndarray
    site: np.ndarray | None = None
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    classes: tuple[str, ...] | None = None  # given: the labels are class indices already
    features: Sequence[str] | None = None


def load(
    source: str,
    *,
    label: str | None = None,
    client: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    public_stats: str | Path | None = None,
    normalize: str = "none",
    data_dir: str | Path | None = None,
    classes: Sequence[str] | None = None,
    whole_clients: bool = False,
) -> Dataset:
    """Read a source, hold out a test part where it brings none, and preprocess.

    Args:
      source: `digits`; `synthetic`, `synthetic(alpha,beta,clients=..,features=..,classes=..,records=..,spread=..)`;
        a published set (`mnist`, `cifar10`, `a9a`, … : `sordino.data.catalog.NAMES`);
        or a path to an .npz (`x_train, y_train, x_test, y_test`, or `x, y`; `client` optional), .csv or .parquet file.
      label: the label's column; by default the one column named `label`, `y`, `target` or `class`.
      client: the column (or .npz array) that says whose each record is.
      test_fraction: the part held out, client by client, where the source has no test part of its own.
      public_stats: an .npz with `mean`, and `cov` or `std`, of *public* features, to centre and whiten by, before
        `normalize`.
      normalize: `none`, `l2` (every record to norm 1) or `clip:R` (norms at most R).
      data_dir: a folder with files of published sets; then $SORDINO_DATA and the cache are searched, and what is
        nowhere is downloaded.
      classes: the public list of labels, where these records alone may not hold all of them; an empty one says that
        they are quantities.
      whole_clients: hold out all records of some clients, and none of the others.
    """
    _scaler(normalize)  # refuse a bad word before reading anything
    if not 0 < test_fraction < 1:
        raise SordinoError(f"test_fraction: {test_fraction} must lie between 0 and 1; 0.2 is usual.")
    raw = _read(str(source), label, client, test_fraction, seed, data_dir)

    x, x_test = _features(raw.x, "x", raw.features), raw.x_test
    _same_length(x, "x", raw.y, "y")
    y, y_test, found = (raw.y, raw.y_test, raw.classes) if raw.classes else _encode(raw.y, raw.y_test)
    if classes is not None and not classes:
        found, y = (), _quantity(raw.y)
        y_test = None if raw.y_test is None else _quantity(raw.y_test)
    elif classes:
        y, y_test = _known(y, found, classes), None if y_test is None else _known(y_test, found, classes)
    public_classes = tuple(found if classes is None else classes)
    site = raw.site
    if site is not None:
        _same_length(x, "x", site, "client")
    if x_test is None or y_test is None:
        # By position, never by label: which records are for testing must not depend on what a record says.
        whose = np.zeros(len(y), np.int64) if site is None else np.unique(site, return_inverse=True)[1]
        rng = generator(seed, "hold out")
        whole = whole_clients and site is not None
        out = hold_out_clients(whose, test_fraction, rng) if whole else hold_out(whose, test_fraction, rng)
        x, x_test, y, y_test, site = x[~out], x[out], y[~out], y[out], None if site is None else site[~out]
    else:
        x_test = _features(x_test, "x_test", raw.features)
        _same_length(x_test, "x_test", y_test, "y_test")
        if x.shape[1] != x_test.shape[1]:
            raise SordinoError(f"x_test: {x_test.shape[1]} features, but x_train has {x.shape[1]}; they must agree.")
    if classes is None and found and len(np.unique(y)) < 2:
        raise SordinoError(
            "y: all training records have one label; there is nothing to learn. Check the labels or take more data."
        )

    public = None if public_stats is None else _public(Path(public_stats).expanduser(), x.shape[1])
    x, x_test = preprocess(x, public, normalize), preprocess(x_test, public, normalize)
    return Dataset(_name(str(source)), x, y, x_test, y_test, site, public_classes, tuple(raw.features or ()), public)


def preprocess(x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None, normalize: str) -> np.ndarray:
    """Centre and whiten by public (mean, cov), then normalise each record by itself: neither costs privacy."""
    if normalize == "record":
        return by_record(x, public)
    return _scaler(normalize)(x if public is None else whiten(x, *public))


def read_features(source: str, columns: Sequence[str], count: int) -> np.ndarray:
    """Features alone, to predict from: the named columns of a table (others are ignored), or `x` of an .npz."""
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise SordinoError(f"data: '{source}' is not a file ending in {', '.join(SUFFIXES)}; check the path.")
    if path.suffix.lower() == ".npz":
        arrays = _arrays(path, "data")
        found = next((arrays[name] for name in ("x", "x_test") if name in arrays), None)
        if found is None:
            raise SordinoError(f"data: '{path}' holds {sorted(arrays)}; it needs x or x_test.")
        x = _features(found, "x")
    else:
        table = _open_table(path)
        names = list(columns) or table.column_names[:count]
        if missing := [name for name in names if name not in table.column_names]:
            raise SordinoError(f"data: '{path}' lacks the columns {missing} that the model was trained on.")
        _check_text(path, table, names)
        numeric = [_numeric(table.column(name)) for name in names]
        if any(values is None for values in numeric):
            raise SordinoError(f"data: columns of '{path}' that the model needs are not numeric.")
        x = _features(np.stack([np.asarray(values, np.float32) for values in numeric], 1), "x", names)
    if x.shape[1] != count:
        raise SordinoError(f"data: '{path}' has {x.shape[1]} features, the model was trained on {count}.")
    return x


# ------------------------------------------------------------------------------------------------------- the sources


def _name(source: str) -> str:
    return Path(source).stem if Path(source).suffix.lower() in SUFFIXES else source


def _read(
    source: str,
    label: str | None,
    client: str | None,
    test_fraction: float,
    seed: int,
    data_dir: str | Path | None,
) -> _Raw:
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    word = re.split(r"[(:]", source, maxsplit=1)[0].strip()
    if (word in BUILT_IN or source in catalog.NAMES) and suffix not in SUFFIXES:
        for field, value in (("label", label), ("client", client)):
            if value is not None:
                raise SordinoError(f"{field}: '{word}' has no columns to name; leave it out (by-site uses its sites).")
        if source in catalog.NAMES:
            found = catalog.read(source, data_dir)
            x, x_test = catalog.flat(found.x_train), catalog.flat(found.x_test)
            return _Raw(x, found.y_train, None, x_test, found.y_test, found.classes)
        if word == "synthetic":
            return _synthetic(source, test_fraction, seed)
        if source == "digits":
            with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
                return _Raw(arrays["x"] / np.float32(16), arrays["y"])
    if suffix not in SUFFIXES:
        if suffix or path.exists():
            raise SordinoError(f"data: '{source}' is not a file of a known kind; use {', '.join(SUFFIXES)}.")
        files = f"A file ends in {', '.join(SUFFIXES)}."
        raise SordinoError(f"data: '{source}' is unknown.{nearest(source, (*BUILT_IN, *catalog.NAMES))} {files}")
    if not path.is_file():
        raise SordinoError(f"data: there is no file '{source}'; check the path.")
    return _npz(path, label, client) if suffix == ".npz" else _table(path, label, client)


def _arrays(path: Path, field: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz; never unpickles."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        plain = "save plain arrays with numpy.savez (pickled objects are not read)"
        raise SordinoError(f"{field}: '{path}' cannot be read as .npz ({error}); {plain}.") from None


def _npz(path: Path, label: str | None, client: str | None) -> _Raw:
    arrays = _arrays(path, "data")
    if label is not None:
        raise SordinoError("label: an .npz names its labels `y` or `y_train` and `y_test`; leave label out.")
    if client is not None and client not in arrays:
        raise SordinoError(f"client: '{path}' has no array '{client}'.{nearest(client, arrays)}")
    site = arrays.get(client or "client")
    if site is not None and site.ndim != 1:
        raise SordinoError(f"client: the array has shape {site.shape}; give one client per training record.")
    split = ("x_train", "y_train", "x_test", "y_test")
    if all(name in arrays for name in split):
        return _Raw(arrays["x_train"], arrays["y_train"], site, arrays["x_test"], arrays["y_test"])
    if "x" in arrays and "y" in arrays:
        return _Raw(arrays["x"], arrays["y"], site)
    raise SordinoError(f"data: '{path}' holds {sorted(arrays)}; it needs {', '.join(split)}, or x, y.")


def _table(path: Path, label: str | None, client: str | None) -> _Raw:
    table = _open_table(path)
    # A data frame's saved index is a name of the row, not a feature of it.
    names = [name for name in table.column_names if not re.fullmatch(r"__index_level_\d+__", name)]
    if len(set(names)) < len(names) or "" in names:
        twice = sorted({name for name in names if names.count(name) > 1 or not name})
        raise SordinoError(f"data: column names {twice} in '{path}' are empty or repeated; name each column once.")
    if label is None:
        found = [name for name in LABELS if name in names]
        if len(found) != 1:
            why = f"columns {found} could each be it" if found else f"no column is called {', '.join(LABELS)}"
            raise SordinoError(f"label: {why}; name the label column of '{path}'. Columns: {', '.join(names)}.")
        label = found[0]
    for field, name in (("label", label), ("client", client)):
        if name is not None and name not in names:
            raise SordinoError(f"{field}: '{path}' has no column '{name}'.{nearest(name, names)}")
    if label == client:
        raise SordinoError(f"client: '{client}' is the label column already; name another.")
    _check_text(path, table, names)
    features = [name for name in names if name not in (label, client)]
    numeric = {name: _numeric(table.column(name)) for name in features}
    words = [name for name, values in numeric.items() if values is None]
    if words:
        raise SordinoError(
            f"data: feature columns {words} of '{path}' are not numeric; encode or drop them "
            "(or name one as the label or the client column)."
        )
    x = np.empty((table.num_rows, len(features)), np.float32)
    with np.errstate(over="ignore"):  # what overflows is reported with the other non-finite values
        for j, name in enumerate(features):
            x[:, j] = numeric[name]
    site = None if client is None else _words(table.column(client), "client", client)
    return _Raw(x, _words(table.column(label), "label", label), site, features=features)


def _open_table(path: Path) -> Any:
    pa = optional("pyarrow", "tables", f"data: '{path}'")  # here, not above: the library itself runs without it
    import pyarrow.csv
    import pyarrow.parquet  # noqa: F401

    try:
        if path.suffix.lower() == ".csv":
            with open(path, "rb") as file:
                if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise _not_utf8(path, "it begins as UTF-16 does")
            table = pa.csv.read_csv(path)
        else:
            table = pa.parquet.ParquetFile(path).read()  # one file: no columns made up from folder names
    except (pa.ArrowException, OSError) as error:
        raise SordinoError(f"data: '{path}' cannot be read ({error}); check that it is a true {path.suffix}.") from None
    try:
        table.column_names  # noqa: B018
    except UnicodeDecodeError:
        raise _not_utf8(path, "a column's name has other bytes") from None
    return table


def _check_text(path: Path, table: Any, names: Sequence[str]) -> None:
    """pyarrow reads a column of a .csv that is not UTF-8 as bytes."""
    import pyarrow as pa

    for name in names:
        if path.suffix.lower() == ".csv" and pa.types.is_binary(table.column(name).type):
            raise _not_utf8(path, f"column '{name}' has other bytes")


def _not_utf8(path: Path, why: str) -> SordinoError:
    return SordinoError(
        f"data: '{path}' is not UTF-8 text ({why}); save it as UTF-8. Where it is Latin-1 (Windows, Western Europe): "
        "iconv -f latin1 -t utf-8 OLD.csv > NEW.csv"
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
    """A label or client column, as numbers or strings; a missing entry is an error."""
    missing, values = column.null_count, _numeric(column)
    if values is None:
        values = column.to_numpy()
        missing = missing or np.count_nonzero(values == "")
    if missing:
        raise SordinoError(f"{field}: {missing} entries of column '{name}' are missing; fill or drop those records.")
    return values.astype(str) if values.dtype == object else np.asarray(values)


def _synthetic(source: str, test_fraction: float, seed: int) -> _Raw:
    """The heterogeneous generator of FedProx (Li et al. 2020, arXiv 1812.06127, section 5.1).

    Device k labels by argmax(W_k x + b_k), with W_k, b_k ~ N(u_k, 1) and u_k ~ N(0, alpha). Its x ~ N(v_k, Sigma), with
    v_k ~ N(B_k, 1), B_k ~ N(0, beta) and Sigma_jj = j^-1.2: beta is how much the data differ. The second argument of N
    is a variance. Sizes follow 50 + lognormal(4, spread), rescaled to `records` in all (test part included).

    As published, alpha is without effect on the labels: u_k adds the same u_k (sum_j x_j + 1) to every logit, and
    argmax does not see it. Devices disagree because W_k is drawn anew for each.
    """
    alpha, beta, sizes = _synthetic_arguments(source)
    clients, features, classes = int(sizes["clients"]), int(sizes["features"]), int(sizes["classes"])
    rng = generator(seed, "synthetic")
    records = apportion(50 + np.exp(4 + sizes["spread"] * rng.standard_normal(clients)), int(sizes["records"]))
    deviation = np.arange(1, features + 1) ** -0.6
    x = np.empty((records.sum(), features), np.float32)
    y = np.empty(len(x), np.int64)
    for end, size in zip(records.cumsum(), records, strict=True):
        u, B = rng.normal(0, math.sqrt(alpha)), rng.normal(0, math.sqrt(beta))
        W, b = rng.normal(u, 1, (features, classes)), rng.normal(u, 1, classes)
        v = rng.normal(B, 1, features)
        own = v + deviation * rng.standard_normal((size, features))
        x[end - size : end], y[end - size : end] = own, (own @ W + b).argmax(1)
    site = np.repeat(np.arange(clients), records)
    out = hold_out(site, test_fraction, rng)
    return _Raw(x[~out], y[~out], site[~out], x[out], y[out], tuple(map(str, range(classes))))


def _synthetic_arguments(source: str) -> tuple[float, float, dict[str, float]]:
    sizes: dict[str, float] = {"clients": 30, "features": 60, "classes": 10, "records": 20_000, "spread": 2.0}
    least = {"clients": 1, "features": 1, "classes": 2, "records": 2}
    example = "write for example synthetic(1,1) or synthetic(0.5,0.5,clients=30,records=20000)"
    form = re.fullmatch(r"synthetic\s*(?:\((.*)\)|:(.*))?", source)
    if form is None:
        raise SordinoError(f"data: '{source}' is malformed; {example}.")
    words = [word.strip() for word in (form[1] or form[2] or "").split(",") if word.strip()]
    level = []
    for word in words:
        key, given, value = word.rpartition("=")
        key = key.strip()
        if given and key not in sizes:
            raise SordinoError(f"data: synthetic has no setting '{key}'.{nearest(key, sizes)}")
        number = parse_number(
            value, "source", f"'{word}' in '{source}' is malformed; {example}", whole=isinstance(sizes.get(key), int)
        )
        if number < least.get(key, 0):
            raise SordinoError(f"data: '{word}' in '{source}' is too small; the least is {least.get(key, 0)}.")
        if key == "spread" and number > 10:
            raise SordinoError(f"data: '{word}' in '{source}' is too large; the most is 10.")
        if given:
            sizes[key] = number
        else:
            level.append(number)
    if len(level) not in (0, 2):
        raise SordinoError(f"data: '{source}' needs both alpha and beta, or neither; {example}.")
    if sizes["records"] < 2 * sizes["clients"]:
        raise SordinoError(f"data: '{source}' has fewer than two records a client; raise records or lower clients.")
    alpha, beta = level or (1.0, 1.0)
    return alpha, beta, sizes


# ---------------------------------------------------------------------------------------------------------- checking


def _features(x: np.ndarray, field: str, names: Sequence[str] | None = None) -> np.ndarray:
    """float32, records by features, all finite. Images are flattened."""
    if x.dtype.kind not in "fiub":
        raise SordinoError(f"{field}: features of type {x.dtype} are not numeric; encode them as numbers.")
    if x.ndim == 0 or len(x) == 0:
        raise SordinoError(f"{field}: there are no records; check the source.")
    if x.size == 0:
        raise SordinoError(f"{field}: there are no features beside the label; check the source.")
    with np.errstate(over="ignore"):
        x = x.reshape(len(x), -1).astype(np.float32, copy=False)
    bad = ~np.isfinite(x)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise SordinoError(
            f"{field}: NaN, infinite or too large for float32 in {bad.sum()} places, the first in row {row} (from 0), "
            f"column {names[column] if names else column}; clean them or drop those records."
        )
    return x


def _same_length(a: np.ndarray, name: str, b: np.ndarray, other: str) -> None:
    if len(a) != (len(b) if b.ndim else 1):
        raise SordinoError(f"{other}: {b.size} entries for {len(a)} records in {name}; there must be one for each.")


def _encode(y: np.ndarray, y_test: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Labels as indices into the sorted distinct training labels; or, for regression, float32 and no classes."""
    y = _label(y, "y")
    y_test = None if y_test is None else _label(y_test, "y_test")
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


def _known(y: np.ndarray, found: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Class indices by a public list."""
    if not found:
        raise SordinoError("classes: the labels are quantities, and were said to be classes.")
    if unknown := sorted(set(found) - set(classes)):
        raise SordinoError(f"y: the label '{unknown[0]}' is none of the public ones ({', '.join(classes[:10])} …).")
    return np.asarray([list(classes).index(name) for name in found])[y]  # type: ignore[no-any-return]


def _quantity(y: np.ndarray) -> np.ndarray:
    try:
        numbers = np.asarray(y, dtype=np.float32)
    except (TypeError, ValueError):
        raise SordinoError("y: the labels are no numbers; name the classes.") from None
    if not np.isfinite(numbers).all():
        raise SordinoError("y: a label is missing or infinite.")
    return numbers


def _label(y: np.ndarray, field: str) -> np.ndarray:
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


# ----------------------------------------------------------------------------------------------------- preprocessing


def _scaler(normalize: str) -> Callable[[np.ndarray], np.ndarray]:
    """The per-record map that `normalize` names."""
    word, given, radius = normalize.partition(":")
    if word in ("standardize", "standardise", "zscore", "minmax", "whiten", "pca"):
        raise SordinoError(
            f"normalize: '{word}' needs statistics of the private data, and these are themselves a release that "
            "nothing here pays for. Use --public-stats FILE (centre and whiten by public statistics), or normalize l2."
        )
    if word == "clip":
        limit = parse_number(radius, "normalize", f"'{normalize}' needs a radius; write clip:1.0")
        if limit <= 0:
            raise SordinoError(f"normalize: '{normalize}' needs a radius above 0; write clip:1.0.")
        limit *= 1 - SAFETY
        return lambda x: x * np.minimum(1, limit / np.maximum(_norm(x), np.finfo(float).tiny)).astype(np.float32)
    if given or word not in ("none", "l2", "record"):
        known = ("none", "l2", "clip:R", "record")
        raise SordinoError(f"normalize: '{normalize}' is unknown.{nearest(normalize, known)}")
    if word == "record":
        return by_record
    if word == "none":
        return lambda x: x
    return lambda x: (x / np.where((norm := _norm(x)) > 0, norm, 1)).astype(np.float32)  # a zero record stays zero


def _norm(x: np.ndarray) -> np.ndarray:
    """Of each record, in float64: the squares of large float32 values overflow."""
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64)))[:, None]


def by_record(x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """Every record freed of skew, offset and scale, and brought to norm RADIUS, by what it says itself.

    A record without negative entries (amounts, intensities, activations) is replaced by its square roots, which tame
    large entries. Then its own mean is taken off; or, where there are public statistics, their mean, and it is whitened
    half-way. With few features a record is only scaled to norm RADIUS where its features are 1, and cut there.
    """
    features = x.shape[1]
    if features < FEW:
        x = x if public is None else whiten(x, *public)
        return np.asarray(x * (RADIUS / np.maximum(_norm(x), math.sqrt(features))), np.float32)
    amounts = (x >= 0).all(1, keepdims=True)
    if public is None:
        z = np.where(amounts, np.sqrt(np.abs(x)), x).astype(np.float64)
        z -= z.mean(1, keepdims=True)
    else:
        z = np.where(amounts, whiten(np.sqrt(np.abs(x)), *of_roots(*public), 0.25), whiten(x, *public, 0.25))
    norm = _norm(z)
    real = norm > 1e-6 * _norm(x)  # else the features are all alike, and what is left of them is rounding
    return np.asarray(np.where(real, z * (RADIUS / np.where(real, norm, 1)), 0), np.float32)


def of_roots(mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of square roots, about: as of a log-normal, and to first order."""
    mean = mean.clip(min=max(RIDGE * mean.mean(), np.finfo(np.float32).tiny))
    half = np.sqrt(mean) / 2 / mean
    return np.sqrt(mean) * (1 + np.diag(cov) / mean**2) ** -0.125, cov * np.outer(half, half)


def whiten(x: np.ndarray, mean: np.ndarray, cov: np.ndarray, power: float = 0.5) -> np.ndarray:
    """(x - mean) V diag((lambda + ridge)^-power) V^T, for cov = V diag(lambda) V^T."""
    eigenvalue, V = np.linalg.eigh((cov + cov.T) / 2)
    eigenvalue = eigenvalue.clip(min=0)
    this_round = V / (eigenvalue + RIDGE * eigenvalue.mean()) ** power @ V.T
    return np.asarray((x - mean) @ this_round, np.float32)


def _public(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise SordinoError(f"public_stats: there is no file '{path}'; check the path.")
    arrays = _arrays(path, "public_stats")
    if "std" in arrays and "cov" not in arrays and arrays["std"].ndim == 1:
        arrays["cov"] = np.diag(arrays["std"].astype(float) ** 2)
    if not {"mean", "cov"} <= arrays.keys():
        raise SordinoError(f"public_stats: '{path}' holds {sorted(arrays)}; it needs mean, and cov or std.")
    mean, cov = arrays["mean"], arrays["cov"]
    if mean.shape != (features,) or cov.shape != (features, features):
        raise SordinoError(
            f"public_stats: mean {mean.shape} and cov {cov.shape} do not fit data of {features} features; "
            "use statistics of the same features."
        )
    if not (np.isfinite(mean).all() and np.isfinite(cov).all() and np.trace(cov) > 0):
        raise SordinoError(f"public_stats: mean and cov in '{path}' must be finite, and cov not zero.")
    return mean.astype(np.float64), cov.astype(np.float64)


# ----------------------------------------------------------------------------------------------------- small helpers


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A stream of its own for each purpose, so that one seed serves them all without repeating draws."""
    if seed < 0:
        raise SordinoError(f"seed: {seed} must not be negative.")
    return np.random.default_rng([seed, *purpose.encode()])


def parse_number(text: str, field: str, otherwise: str, *, whole: bool = False) -> float:
    """A finite number (`whole`: an int), or the error `field: otherwise`."""
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SordinoError(f"{field}: {otherwise}.")
    return number


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """`total` divided in proportion to `weights`, by largest remainders; at least one each."""
    exact = total * (weights / weights.sum())
    sizes: np.ndarray = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    for empty in np.flatnonzero(sizes == 0):
        sizes[sizes.argmax()] -= 1
        sizes[empty] = 1
    return sizes


def hold_out(strata: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Which records are for testing: `fraction` of each stratum to within one, and never all of it."""
    sizes = np.bincount(strata)
    ends = sizes.cumsum()
    # The running total is rounded, for many small strata would each round to nothing.
    quota = np.minimum(np.diff(np.rint(ends * fraction), prepend=0), np.maximum(sizes - 1, 0))
    order = np.lexsort((rng.random(len(strata)), strata))
    chosen = np.zeros(len(strata), bool)
    chosen[order] = np.arange(len(strata)) - np.repeat(ends - sizes, sizes) < np.repeat(quota, sizes)
    if not chosen.any():
        raise SordinoError(f"test_fraction: {fraction} of {len(strata)} records leaves no test part; raise it.")
    return chosen


def hold_out_clients(whose: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Which records are for testing: all of some clients, `fraction` of their number to within one, at least one."""
    clients = len(np.bincount(whose))
    chosen = max(1, round(fraction * clients))
    if clients - chosen < 2:
        raise SordinoError(
            f"test_fraction: {fraction:g} of {clients} clients, held out as a whole, leaves {clients - chosen} to "
            "train on, and 2 are needed; lower it, bring more clients, or bring a test part (x_test, y_test)."
        )
    return np.isin(whose, rng.permutation(clients)[:chosen])
