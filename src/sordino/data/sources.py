"""Where records come from: built-in sources, files, and preprocessing that costs no privacy.

Preprocessing is per record, or uses statistics declared public; nothing here computes a statistic of private features
and lets it shape the features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import files
from sordino.data import catalog, tables
from sordino.data.arrays import (
    by_public_classes,
    check_features,
    check_same_length,
    encode_labels,
    numbers_of_pairs,
    quantities,
    unit_numbers,
)
from sordino.data.preprocess import preprocess, read_public_statistics, scaler
from sordino.data.readers import Raw, read_texts, reader_of, suffixes
from sordino.data.schema import Schema
from sordino.data.splits import generator, hold_out, hold_out_clients, hold_out_persons
from sordino.data.synthetic import BUILT_IN, digits, synthetic
from sordino.errors import SordinoError, nearest


class TextColumn(NamedTuple):
    """A column of text, and how its strings become numbers: each by itself, and by public rules."""

    name: str
    encode: Callable[..., np.ndarray]  # (n strings) -> n rows of token ids; with a prompt (n texts, n prompts)
    prompt: str | None = None  # the column of what comes before each text, and is not learned
    labelled: bool = True  # records have a label; False where the text itself is learned


class Dataset(NamedTuple):
    """Records in memory.

    Attributes:
        name: What the source is called.
        x_train: Training records, float32, records by features.
        y_train: Class indices, or float32 numbers where `classes` is empty (regression).
        x_test: Test records. They lie outside the guarantee.
        y_test: Their labels.
        site: Whose each training record is, as the source says; None where it does not.
        classes: The original labels, in the order of their indices.
        features: Column names, where the source has them.
        public: Mean and covariance that x was whitened by, where they were given.
        schema: The public schema by which a table was encoded, where there was one.
        person: Whom each training record is about, as numbers; None where the source does not say.
        person_test: Whom each test record is about, where the test part was held out and the source says it; else None.
        weight: Factors in [0, 1] on the clipped terms of training records; None where all count fully.
        shape: Of one record as the source has it, such as (32, 32, 3); empty where records are plain rows.
        sequences: Records are texts that are learned token by token, and all labels are 0.
        tested: Places in the source of the records that were held out; None where it brings a test part of its own.

    Example:
        >>> import sordino as so
        >>> data = so.load("digits")
        >>> data.x_train.shape, data.classes[:3]
        ((1438, 64), ('0', '1', '2'))
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    site: np.ndarray | None
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    public: tuple[np.ndarray, np.ndarray] | None = None
    schema: Schema | None = None
    person: np.ndarray | None = None
    person_test: np.ndarray | None = None
    weight: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    sequences: bool = False
    tested: np.ndarray | None = None

    @property
    def unit(self) -> float:
        """How much one unit of a number in y is, in the unit of the source."""
        return 1.0 if self.schema is None else self.schema.unit

    @property
    def task(self) -> str:
        """What the labels are: classes, quantity, count, survival, or sequence where the text itself is learned."""
        named = "sequence" if self.sequences else "" if self.schema is None else self.schema.task
        return named or ("classes" if self.classes else "quantity")


def load(
    source: str,
    *,
    label: str | None = None,
    client: str | None = None,
    person: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    public_stats: str | Path | None = None,
    normalize: str = "none",
    data_dir: str | Path | None = None,
    classes: Sequence[str] | None = None,
    whole_clients: bool = False,
    whole_persons: bool = True,
    own_ids: bool = False,
    by_client: bool = True,
    some_tests: bool = True,
    schema: str | Path | Mapping[str, Any] | Schema | None = None,
    text: TextColumn | None = None,
) -> Dataset:
    """Read a source, hold out a test part where it brings none, and preprocess.

    Args:
        source: `digits`; `synthetic`, `synthetic(alpha,beta,clients=..,features=..,classes=..,records=..,spread=..)`;
          a published set (`mnist`, `cifar10`, `a9a`, … : `sordino.data.catalog.NAMES`);
          or a path to an .npz (`x_train, y_train, x_test, y_test`, or `x, y`; `client` optional), .csv or .parquet.
        label: the label's column; by default the one column named `label`, `y`, `target` or `class`.
        client: the column (or .npz array) that says whose each record is.
        person: the column (or .npz array) that says whom each record is about.
        test_fraction: the part held out, client by client, where the source has no test part of its own.
        seed: of the records held out.
        public_stats: an .npz with `mean`, and `cov` or `std`, of *public* features, to centre and whiten by, before
          `normalize`.
        normalize: `none`, `l2` (every record to norm 1) or `clip:R` (norms at most R).
        data_dir: a folder with files of published sets; then $SORDINO_DATA and the cache are searched, and what is
          nowhere is downloaded.
        classes: the public list of labels, where these records alone may not hold all of them; an empty one says that
          they are quantities.
        whole_clients: hold out all records of some clients, and none of the others.
        whole_persons: hold out all records of some persons, where the source says whose they are. Where single records
          are protected, whose one of them is must not decide which others are held out.
        own_ids: equal ids of persons at two clients are two persons.
        by_client: hold out a part of each client. Where the client of a record is not fixed, or a person may be at
          several, a part of all records together: else whose a record is would decide about others.
        some_tests: refuse records that are too few to hold out one. Where their number is private, a refusal tells it.
        schema: what the columns of a table mean, or the path of a schema.toml; it names label, clients and classes, and
          encodes each record alone.
        text: the column of a table whose text becomes the features; all other columns without a role are ignored.

    Returns:
        The records, with their labels as class indices.

    Raises:
        SordinoError: the source cannot be read, or an argument does not fit it.

    Example:
        >>> load("digits").x_test.shape
        (359, 64)
    """
    scaler(normalize)  # refuse a bad word before reading anything
    schema = None if schema is None else Schema.given(schema)
    if not 0 < test_fraction < 1:
        raise SordinoError(
            f"test_fraction: {test_fraction:g} must lie above 0 and below 1. It cannot be 0, because every run scores "
            "its model on records that it set aside; 0.2 is usual, and 0.01 sets aside one record in a hundred."
        )
    if text is not None:
        raw = _read_by_text(str(source), text, label, client, person, schema, normalize)
    elif schema is None:
        raw = _read(str(source), label, client, person, test_fraction, seed, data_dir)
    else:
        raw = _read_by_schema(str(source), schema, label)
        classes = schema.classes
        raw = raw._replace(y=schema.to_model(raw.y))

    if raw.x.ndim and not len(raw.x):
        raise SordinoError(f"x: there are no records in '{source}'; check the file.")
    shape = raw.shape or (raw.x.shape[1:] if raw.x.ndim > 2 else ())
    x, x_test = check_features(raw.x, "x", raw.features), raw.x_test
    raw = raw._replace(x=np.zeros(0))  # so that the whole table does not stay in memory beside its two parts
    check_same_length(x, "x", raw.y, "y")
    sequences = text is not None and not text.labelled
    y, y_test, found = _labels(raw, classes, sequences)
    site = raw.site
    if site is not None:
        check_same_length(x, "x", site, "client")
    if raw.person is not None:
        check_same_length(x, "x", raw.person, "person")
    who = None if raw.person is None else unit_numbers(raw.person)
    if own_ids and who is not None and site is not None:
        who = numbers_of_pairs(np.unique(site, return_inverse=True)[1], who)
    who_test: np.ndarray | None = None
    tested: np.ndarray | None = None
    if x_test is None or y_test is None:
        parts = site if by_client or whole_clients else None
        persons = who if whole_persons else None
        out = _held_out(len(y), parts, persons, test_fraction, seed, whole_clients, some_tests)
        tested = np.flatnonzero(out)
        x, x_test, y, y_test = x[~out], x[out], y[~out], y[out]
        who_test = None if who is None else who[out]
        site, who = (None if part is None else part[~out] for part in (site, who))
    else:
        x_test = check_features(x_test, "x_test", raw.features)
        check_same_length(x_test, "x_test", y_test, "y_test")
        if raw.x_test is not None and raw.x_test.ndim > 2 and shape and raw.x_test.shape[1:] != shape:
            raise SordinoError(f"x_test: records of shape {raw.x_test.shape[1:]}, but x_train has {shape}.")
        if x.shape[1] != x_test.shape[1]:
            raise SordinoError(f"x_test: {x_test.shape[1]} features, but x_train has {x.shape[1]}; they must agree.")
    if classes is None and found and len(np.unique(y)) < 2:
        raise SordinoError(
            "y: all training records have one label; there is nothing to learn. Check the labels or take more data."
        )

    public = None if public_stats is None else read_public_statistics(Path(public_stats).expanduser(), x.shape[1])
    apart = raw.person is not None or whole_clients
    x, x_test = (preprocess(part, public, normalize, apart=apart) for part in (x, x_test))
    names, public_classes = tuple(raw.features or ()), tuple(found if classes is None else classes)
    return Dataset(
        *(_name(str(source)), x, y, x_test, y_test, site, public_classes, names, public, schema, who, who_test),
        shape=shape,
        sequences=sequences,
        tested=tested,
    )


def _labels(
    raw: Raw, classes: Sequence[str] | None, sequences: bool
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Training and test labels as the model learns them, and the classes that were found; () where labels are numbers.

    `classes` is the public list of labels, or empty where they are quantities; see `load`.
    """
    y, y_test, found = (raw.y, raw.y_test, raw.classes) if raw.classes else encode_labels(raw.y, raw.y_test)
    if sequences:
        return y, y_test, ()
    if classes is None:
        return y, y_test, found
    if not classes:
        return quantities(raw.y), None if raw.y_test is None else quantities(raw.y_test), ()
    public = by_public_classes(y, found, classes)
    return public, None if y_test is None else by_public_classes(y_test, found, classes), found


def _held_out(
    records: int,
    site: np.ndarray | None,
    who: np.ndarray | None,
    fraction: float,
    seed: int,
    whole_clients: bool,
    some: bool,
) -> np.ndarray:
    """Which records are for testing: by position, never by label, so that it does not depend on what a record says."""
    rng = generator(seed, "hold out")
    if whole_clients and site is not None:  # no name of a client decides about others
        return hold_out_clients(unit_numbers(site), fraction, rng)
    whose = np.zeros(records, np.int64) if site is None else np.unique(site, return_inverse=True)[1]
    if who is not None:  # a person in both parts would make the test easier than the use of the model
        return hold_out_persons(whose, who, fraction, rng, some=some)
    return hold_out(whose, fraction, rng, some=some)


def read_features(source: str, columns: Sequence[str], count: int) -> np.ndarray:
    """Features alone, to predict from.

    Args:
        source: Path of the file.
        columns: Names of the columns that the model was trained on; empty if it was trained without names.
        count: Number of features that the model was trained on.

    Returns:
        Records by features, float32.

    Raises:
        SordinoError: The file cannot be read or has other features.
    """
    path = Path(source).expanduser()
    reader = reader_of(path)
    if reader is None or not path.is_file():
        raise SordinoError(f"data: '{source}' is not a file ending in {suffixes()}; check the path.")
    x = reader.features(path, columns, count)
    if x.shape[1] != count:
        raise SordinoError(f"data: '{path}' has {x.shape[1]} features, the model was trained on {count}.")
    return x


class Labelled(NamedTuple):
    """Records of a file, to test a model on."""

    x: np.ndarray
    y: np.ndarray
    site: np.ndarray | None
    person: np.ndarray | None


def labelled(
    source: str,
    classes: Sequence[str],
    columns: Sequence[str],
    count: int,
    schema: Schema | None = None,
    label: str | None = None,
    client: str | None = None,
    person: str | None = None,
) -> Labelled:
    """All records of a file with their labels and clients, to test a model on; nothing is held out or scaled.

    Args:
        source: Path of the file, or a data set with a test part, which is then taken.
        classes: The model's labels, in order; empty where they are numbers.
        columns: Names of the columns that the model was trained on; empty if it was trained without names.
        count: Number of features that the model was trained on.
        schema: What the columns mean; it names label, clients and classes.
        label: The label's column, where there is no schema.
        client: The column that says whose a record is, where there is no schema.
        person: The column that says whom a record is about, where there is no schema.

    Returns:
        Features, labels as the model learns them, clients and persons (None where nothing says).

    Raises:
        SordinoError: The file cannot be read, or does not fit the model.
    """
    if schema is not None:
        if label is not None or client is not None or person is not None:
            raise SordinoError("label, client, person: the model's schema names them; leave them out.")
        path = _table_path(source)
        if schema.client is not None and schema.client not in tables.column_names(path, schema.dialect):
            schema = schema.at_site()
        x, y, site, who = schema.open(path)
        return Labelled(x, schema.to_model(np.asarray(y)), site, who)
    raw = _read(source, label, client, person, 0.2, 0, None)
    if raw.x_test is not None and raw.y_test is not None:
        if person is not None:
            raise SordinoError(f"person: '{source}' does not say whom its test records are about; give a table.")
        raw = raw._replace(x=raw.x_test, y=raw.y_test, site=None)
    elif reader_of(Path(source)) is None:
        raise SordinoError(f"data: '{source}' has no test part of its own; save its test records in a file.")
    x = check_features(raw.x, "x", raw.features)
    names = list(raw.features or ())
    if columns and names:
        if absent := [name for name in columns if name not in names]:
            raise SordinoError(f"data: '{source}' has no column '{absent[0]}', which the model was trained on.")
        x = x[:, [names.index(name) for name in columns]]
    if x.shape[1] != count:
        raise SordinoError(f"data: '{source}' has {x.shape[1]} features, the model was trained on {count}.")
    check_same_length(x, "x", raw.y, "y")
    y, _, found = (raw.y, None, raw.classes) if raw.classes else encode_labels(raw.y, None)
    y = by_public_classes(y, found, classes) if classes else quantities(raw.y)
    return Labelled(x, y, raw.site, raw.person)


def encode_file(source: str, schema: Schema) -> np.ndarray:
    """Features alone, to predict from, by the schema that the model was trained with; columns are found by name."""
    return schema.open(_table_path(source), target=False).x


def _table_path(source: str, field: str = "schema") -> Path:
    path = Path(source).expanduser()
    if tables.suffix_of(path) not in tables.SUFFIXES:
        raise SordinoError(f"{field}: '{source}' is not a table; a {field} describes {', '.join(tables.SUFFIXES)}.")
    if not path.is_file():
        raise files.absent("data", source)
    return path


def _read_by_schema(source: str, schema: Schema, label: str | None) -> Raw:
    path = _table_path(source)
    if schema.target is not None and label not in (None, schema.target.column):
        raise SordinoError(f"label: the schema's target is '{schema.target.column}', not '{label}'; leave label out.")
    x, y, site, who = schema.open(path)
    return Raw(x, np.asarray(y), site, None, None, schema.classes or None, schema.features, who)


def _read_by_text(
    source: str,
    text: TextColumn,
    label: str | None,
    client: str | None,
    person: str | None,
    schema: Schema | None,
    normalize: str,
) -> Raw:
    if schema is not None:
        raise SordinoError("text: a schema encodes columns of its own; leave text or schema out.")
    if normalize != "none":
        raise SordinoError(
            f"normalize: {normalize}, but the features are token ids, which are not amounts; leave it out."
        )
    if label is not None and not text.labelled:
        raise SordinoError(f"label: '{label}', but the text itself is learned, without labels; leave label out.")
    roles = (label, client, person, text.prompt)
    raw = read_texts(_table_path(source, "text"), text.name, *roles, labelled=text.labelled)
    return raw._replace(x=text.encode(*raw.x.T.tolist()))


def _name(source: str) -> str:
    path = Path(source)
    return source if reader_of(path) is None else path.name.removesuffix("".join(path.suffixes[-2:])) or path.stem


def _read(
    source: str,
    label: str | None,
    client: str | None,
    person: str | None,
    test_fraction: float,
    seed: int,
    data_dir: str | Path | None,
) -> Raw:
    path = Path(source).expanduser()
    reader = reader_of(path)
    word = re.split(r"[(:]", source, maxsplit=1)[0].strip()
    if (word in BUILT_IN or source in catalog.NAMES) and reader is None:
        for field, value in (("label", label), ("client", client), ("person", person)):
            if value is not None:
                raise SordinoError(f"{field}: '{word}' has no columns to name; leave it out (by-site uses its sites).")
        if source in catalog.NAMES:
            published = catalog.read(source, data_dir)
            x, x_test = catalog.flat(published.x_train), catalog.flat(published.x_test)
            whole = published.x_train.shape[1:]
            shape = whole if len(whole) > 1 else ()
            return Raw(x, published.y_train, None, x_test, published.y_test, published.classes, shape=shape)
        if word == "synthetic":
            return synthetic(source, test_fraction, seed)
        if source == "digits":
            return digits()
    if reader is None:
        if (path / "public").is_dir():
            raise SordinoError(f"data: '{source}' is a finished run, not data; sordino.load_run reads it.")
        if path.suffix or path.exists():
            raise SordinoError(f"data: '{source}' is not a file of a known kind; use {suffixes()}.")
        known = nearest(source, (*BUILT_IN, *catalog.NAMES))
        raise SordinoError(f"data: '{source}' is unknown.{known} A file ends in {suffixes()}.")
    if not path.is_file():
        raise files.absent("data", source)
    return reader.records(path, label, client, person)
