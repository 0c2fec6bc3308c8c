"""A whole federation on this machine, with real processes: `sordino federate up`."""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import files
from sordino.core import Unit
from sordino.data import tables
from sordino.data.arrays import numbers_of_pairs, unit_numbers
from sordino.data.partition import split
from sordino.data.readers import reader_of
from sordino.data.schema import Schema
from sordino.data.sources import Dataset, load
from sordino.data.tables import Dialect
from sordino.errors import SordinoError
from sordino.federation import readmes
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.folders import init, make_site, proposed
from sordino.federation.handler import HANDLER
from sordino.federation.limits import request_bytes
from sordino.federation.progress import count_lines, follow
from sordino.federation.terms import SITE_NAME, federated
from sordino.secagg import Roster
from sordino.training.folder import SCHEMA
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

DEFAULTS = {"method": "auto", "rounds": 10, "epsilon": 8.0, "trust": "secure-aggregation"}
SITES = 3  # where neither the caller nor a schema says how many
MOST_SITES = 20  # processes on one machine
TEST_FRACTION = 0.2  # of a table: the coordinator's own test records


def prepare(
    folder: Path,
    count: int | None = None,
    *,
    spec: dict[str, Any],
    data: str = "digits",
    label: str | None = None,
    schema: Path | None = None,
    person: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
    dropouts: int = 0,
    evaluation: float | None = None,
) -> Path:
    """Write the folders of a coordinator and of its sites, each with its part of the data.

    Args:
      folder: where they go.
      count: number of sites. None: one site per client where a schema names their column, else 3.
      spec: keys of spec.toml that differ from `DEFAULTS`; and `weights`, a folder that all parties then name.
      data: a data set, as in `sordino run`.
      label: the label's column, if data is a table.
      schema: the schema.toml of the table, in place of label; every site gets it.
      person: the column that says whom a record is about, if the schema does not name it.
      text: the column of text of a table, for models that read text.
      prompt: the column of what comes before each text, for causal language models.
      dropouts: sites that may fail in a round.
      evaluation: epsilon of the evaluation on the sites' test records at the end; None for none.

    Returns:
      The coordinator's folder.

    Raises:
      SordinoError: the spec cannot be run. Nothing is written then.
    """
    columns = _Columns(label, text, prompt)
    if person is None:
        return _prepare(folder, count, spec, data, columns, schema, dropouts, evaluation)
    if schema is None:
        raise SordinoError(
            f"person: '{person}' needs a schema, by which every site reads its table; write one with `sordino schema "
            "draft` and give --schema."
        )
    with tempfile.TemporaryDirectory() as place:
        named = Path(place) / SCHEMA
        files.write(named, _with_person(Schema.read(schema), person).toml().encode())
        return _prepare(folder, count, spec, data, columns, named, dropouts, evaluation)


class _Columns(NamedTuple):
    """What some columns of a table without a schema are."""

    label: str | None
    text: str | None
    prompt: str | None

    @property
    def named(self) -> dict[str, str]:
        return {key: value for key, value in self._asdict().items() if value is not None}


def _with_person(schema: Schema, person: str) -> Schema:
    """The same schema, in which this column says whom a record is about."""
    if schema.person not in (None, person):
        raise SordinoError(f"person: the schema names '{schema.person}', not '{person}'; leave --person out.")
    rest = {key: about for key, about in schema.values()["columns"].items() if key != person}
    return Schema.of({**schema.values(), "columns": rest, "person": person})


def _prepare(
    folder: Path,
    count: int | None,
    spec: dict[str, Any],
    data: str,
    columns: _Columns,
    schema: Path | None,
    dropouts: int,
    evaluation: float | None,
) -> Path:
    """As `prepare`, with a schema that is complete."""
    from sordino.federation.flower.keys import ensure_node_key

    values: dict[str, Any] = DEFAULTS | {key: value for key, value in spec.items() if key != "weights"}
    weights = str(Path(spec["weights"]).expanduser().resolve()) if spec.get("weights") else ""
    federated(values)  # refuses a wrong key or value before anything is written
    parts = _divided(data, columns, schema, count, values | ({"weights": weights} if weights else {}))
    names, suffix = parts.names, parts.suffix
    coordinator = folder / "coordinator"
    rest = {key: value for key, value in values.items() if key not in DEFAULTS}
    how = {**parts.shape, **{key: values[key] for key in DEFAULTS}, "weights": weights}
    init(coordinator, names, **how, dropouts=dropouts, more=rest)
    files.write(folder / "README.txt", readmes.FEDERATION.format(suffix=suffix).encode())
    parts.save(coordinator / f"test{suffix}", None)
    with open(coordinator / "federation.toml", "a", encoding="utf-8") as file:
        file.write(f'test = "test{suffix}"   # the coordinator\'s own test records\n')
        file.writelines(f"{key} = {json.dumps(name)}\n" for key, name in parts.columns.items())
        if evaluation is not None:
            file.write(f"evaluation_epsilon = {evaluation!r}\n")
    FederationConfig.read(coordinator / "federation.toml")  # refuses a wrong epsilon
    limit, model = 2 * float(values["epsilon"]), str(values.get("model", "auto"))
    own = {**parts.described, "weights": weights, "model": "" if model in SiteConfig.models else model}
    cards = []
    for k, name in enumerate(names):
        place = folder / "sites" / name
        cards.append(make_site(place, name, data=f"data{suffix}", **own, epsilon=limit).card)
        with open(place / "site.toml", "a", encoding="utf-8") as file:
            file.write(f'witness = "../../witness/{name}.json"   # by default in the state directory of this user\n')
            if values.get("unit") == Unit.CLIENT:
                file.write('unit = "client"   # runs must protect this site as a whole\n')
        if evaluation is not None:
            with open(place / "site.toml", "a", encoding="utf-8") as file:
                file.write(f"evaluation_epsilon = {2 * evaluation!r}   # limit over all evaluations on test records\n")
        ensure_node_key(place / "node")
        shutil.copy(place / "node.pub", coordinator / "nodes" / f"{name}.pub")
        parts.save(place / f"data{suffix}", k)
    roster = Roster(tuple(cards))
    for place in (coordinator, *(folder / "sites" / name for name in names)):
        roster.write(place / "roster.toml")
    return coordinator


def _divided(
    data: str, columns: _Columns, schema: Path | None, count: int | None, values: dict[str, Any]
) -> _ArrayParts | _SchemaParts | _TextParts:
    """The records, divided among the sites."""
    if schema is not None and columns.named:
        raise SordinoError(f"{next(iter(columns.named))}: the schema says what every column is; leave it out.")
    if schema is not None:
        return _SchemaParts(Path(data).expanduser(), schema, count, values.get("person_clients", 1) == 1)
    if columns.text is not None or columns.prompt is not None:
        return _TextParts(data, columns, values, _checked(SITES if count is None else count))
    return _ArrayParts(data, columns.label, _checked(SITES if count is None else count))


class _ArrayParts:
    """Features and labels of a data set, divided among the sites."""

    suffix = ".npz"

    def __init__(self, data: str, label: str | None, count: int) -> None:
        whole = load(data, label=label, by_client=False)
        self.whole = whole
        self.names, self.columns = _numbered(count), dict[str, str]()  # federation.toml names none
        # The sites' sizes are public: in a file, no label may decide them.
        law = "dirichlet:5" if whole.classes and reader_of(Path(data)) is None else "iid"
        self.owner = split(whole, law, count, sizes="equal", seed=0)
        self.shape: dict[str, Any] = {"features": whole.x_train.shape[1], "classes": whole.classes}
        self.described: dict[str, Any] = {"classes": whole.classes}

    def save(self, path: Path, site: int | None) -> None:
        """Write the records of a site; None: the coordinator's test records."""
        whole = self.whole
        if site is None:
            _save(path, whole.x_test, _labels(whole, whole.y_test))
        else:
            mine = self.owner == site
            _save(path, whole.x_train[mine], _labels(whole, whole.y_train[mine]))


class _Rows:
    """Rows of a table, each at one site or among the coordinator's test records. Cells stay as they are spelt."""

    owner: np.ndarray  # the site of each row
    tested: np.ndarray  # whether the coordinator tests on it

    def __init__(self, path: Path, dialect: Dialect) -> None:
        self.encoding, self.columns = dialect.encoding, dict[str, str]()
        self.suffix = ".csv" if tables.suffix_of(path) in tables.TEXT_SUFFIXES else ".parquet"
        if self.suffix == ".csv":  # the sites read the cells by the same rules
            names, self.delimiter = tables.heading(path, dialect)
            self.table = tables.open_table(path, dialect, types=dict.fromkeys(names, "text"), missing=())
        else:
            self.table = tables.open_table(path)

    def save(self, path: Path, site: int | None) -> None:
        """Write the rows of a site; None: the coordinator's test records."""
        mine = self.tested if site is None else (self.owner == site) & ~self.tested
        part = self.table.filter(mine)
        with files.replacing(path) as temporary:
            if self.suffix == ".parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(part, temporary)
                return
            with open(temporary, "w", newline="", encoding=self.encoding) as file:
                writer = csv.writer(file, delimiter=self.delimiter)
                writer.writerow(part.column_names)
                writer.writerows(zip(*(column.to_pylist() for column in part.columns), strict=True))


class _TextParts(_Rows):
    """Rows of a table with a column of text, divided at random."""

    def __init__(self, data: str, columns: _Columns, values: dict[str, Any], count: int) -> None:
        resolved = resolve(Spec.of({**values, **columns.named, "data": data}))
        whole = resolved.read_data()  # refuses a table or a model that does not fit before anything is written
        super().__init__(Path(data).expanduser(), Dialect())
        self.names, rng = _numbered(count), np.random.default_rng(0)
        self.owner = rng.permutation(self.table.num_rows) % count
        self.tested = _held(self.table.num_rows, rng)
        self.columns = columns.named
        self.shape: dict[str, Any] = {"features": resolved.source.length, "classes": whole.classes}
        self.described: dict[str, Any] = {**columns.named, "length": resolved.source.length, "classes": whole.classes}


class _SchemaParts(_Rows):
    """Rows of a table with a schema, divided by its client column, or at random."""

    def __init__(self, path: Path, schema: Path, count: int | None, own_ids: bool) -> None:
        """own_ids: equal ids of persons at two clients are two persons."""
        self.schema = Schema.read(schema)
        if tables.suffix_of(path) not in tables.SUFFIXES or not path.is_file():
            raise SordinoError(f"data: '{path}' is not a table; a schema describes {', '.join(tables.SUFFIXES)} files.")
        encoded = self.schema.open(path)  # refuses a table that does not fit before anything is written
        rows = len(encoded.x)
        rng = np.random.default_rng(0)
        whom = np.arange(rows) if encoded.person is None else unit_numbers(encoded.person)
        if count is None and encoded.client is not None:
            clients, self.owner = np.unique(encoded.client, return_inverse=True)
            self.names = [str(client) for client in clients]
            if not 2 <= len(clients) <= MOST_SITES:
                raise SordinoError(
                    f"sites: column '{self.schema.client}' names {len(clients)} clients, and a demonstration has 2 to "
                    f"{MOST_SITES} sites; give --sites N to divide the records at random."
                )
            if not all(SITE_NAME.fullmatch(name) for name in self.names):
                self.names = _numbered(len(clients))
            if own_ids and encoded.person is not None:  # else an id of one client would decide who is tested at others
                whom = numbers_of_pairs(self.owner, whom)
        else:
            count = _checked(SITES if count is None else count)
            self.names = _numbered(count)
            self.owner = (rng.permutation(whom.max() + 1) % count)[whom]  # all records of a person at one site
        self.tested = _held(whom.max() + 1, rng)[whom]
        self.shape: dict[str, Any] = {"schema": schema}
        self.described: dict[str, Any] = {"schema": schema}
        super().__init__(path, self.schema.dialect)
        if self.table.num_rows != rows:
            raise SordinoError(f"data: '{path}' changed while it was read; try again.")


def _numbered(count: int) -> list[str]:
    """Names of sites."""
    return [f"site{k + 1}" for k in range(count)]


def _held(units: int, rng: np.random.Generator) -> np.ndarray:
    """Which of so many records or persons are the coordinator's, to test on."""
    held = np.zeros(units, bool)
    held[rng.permutation(units)[: round(TEST_FRACTION * units)]] = True
    return held


def _checked(count: int) -> int:
    if count < 2:
        raise SordinoError(f"sites: {count}; a federation needs at least 2, and 3 for secure aggregation.")
    return count


def _save(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write records into a file that only its owner can read."""
    with files.replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, x=x, y=y)


def _labels(whole: Dataset, y: np.ndarray) -> np.ndarray:
    """Labels as in the source: names of classes, or numbers."""
    return np.array(whole.classes)[y] if whole.classes else y


def up(folder: Path, seconds: float = 1800.0) -> Iterator[dict[str, Any]]:
    """Start link, coordinator and sites on loopback, over TLS.

    Yields:
      The lines of the coordinator's progress, until the run finished or failed.

    Raises:
      SordinoError: a process ended, or the run took more than `seconds`.
    """
    from sordino.federation.flower.processes import LocalFederation

    coordinator = folder / "coordinator"
    names = FederationConfig.read(coordinator / "federation.toml").sites
    threads = {"OMP_NUM_THREADS": "1"}
    server = {"SORDINO_FOLDER": str(coordinator.resolve()), **threads}
    site = {"SORDINO_SITES": str((folder / "sites").resolve()), **threads}
    progress = coordinator / "run" / "progress.jsonl"
    seen = count_lines(progress)
    place = next(p for k in range(10_000) if not (p := folder / f"flower{k or ''}").exists())
    own: dict[str, Any] = {"handler": HANDLER, "server": server, "site": site, "once": True}
    own["most"] = request_bytes(proposed(coordinator, [1000] * len(names)))
    with LocalFederation(place, names, **own) as running:
        running.run()
        yield from follow(progress, running, seconds, seen)
