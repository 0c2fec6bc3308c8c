"""A whole federation on this machine, with real processes: `sordino federate up`."""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files
from sordino.core import Unit
from sordino.data import tables
from sordino.data.partition import split
from sordino.data.schema import Schema
from sordino.data.sources import Dataset, load
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
    dropouts: int = 0,
    evaluation: float | None = None,
) -> Path:
    """Write the folders of a coordinator and of its sites, each with its part of the data.

    Args:
      folder: where they go.
      count: number of sites. None: one site per client where a schema names their column, else 3.
      spec: keys of spec.toml that differ from `DEFAULTS`.
      data: a data set, as in `sordino run`.
      label: the label's column, if data is a table.
      schema: the schema.toml of the table, in place of label; every site gets it.
      person: the column that says whom a record is about, if the schema does not name it.
      dropouts: sites that may fail in a round.
      evaluation: epsilon of the evaluation on the sites' test records at the end; None for none.

    Returns:
      The coordinator's folder.

    Raises:
      SordinoError: the spec cannot be run. Nothing is written then.
    """
    if person is None:
        return _prepare(folder, count, spec, data, label, schema, dropouts, evaluation)
    if schema is None:
        raise SordinoError(
            f"person: '{person}' needs a schema, by which every site reads its table; write one with `sordino schema "
            "draft` and give --schema."
        )
    with tempfile.TemporaryDirectory() as place:
        named = Path(place) / SCHEMA
        files.write(named, _with_person(Schema.read(schema), person).toml().encode())
        return _prepare(folder, count, spec, data, label, named, dropouts, evaluation)


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
    label: str | None,
    schema: Path | None,
    dropouts: int,
    evaluation: float | None,
) -> Path:
    """As `prepare`, with a schema that is complete."""
    from sordino.federation.flower.keys import ensure_node_key

    if schema is not None and label is not None:
        raise SordinoError("label: the schema names the target; leave label out.")
    parts: _ArrayParts | _TableParts
    if schema is None:
        parts = _ArrayParts(data, label, _checked(SITES if count is None else count))
    else:
        parts = _TableParts(Path(data).expanduser(), schema, count)
    names, suffix = parts.names, parts.suffix
    coordinator = folder / "coordinator"
    values: dict[str, Any] = DEFAULTS | spec
    federated(values)  # refuses a wrong key or value before anything is written
    rest = {key: value for key, value in values.items() if key not in DEFAULTS}
    init(coordinator, names, **parts.shape, **{key: values[key] for key in DEFAULTS}, dropouts=dropouts, more=rest)
    files.write(folder / "README.txt", readmes.FEDERATION.format(suffix=suffix).encode())
    parts.save(coordinator / f"test{suffix}", None)
    with open(coordinator / "federation.toml", "a", encoding="utf-8") as file:
        file.write(f'test = "test{suffix}"   # the coordinator\'s own test records\n')
        if evaluation is not None:
            file.write(f"evaluation_epsilon = {evaluation!r}\n")
    FederationConfig.read(coordinator / "federation.toml")  # refuses a wrong epsilon
    limit = 2 * float(values["epsilon"])
    cards = []
    for k, name in enumerate(names):
        place = folder / "sites" / name
        cards.append(make_site(place, name, data=f"data{suffix}", **parts.described, epsilon=limit).card)
        with open(place / "site.toml", "a", encoding="utf-8") as file:
            file.write(f'witness = "../../witness/{name}.json"   # by default in the state directory of this user\n')
            if (model := str(values.get("model", "auto"))) not in SiteConfig.models:
                file.write(f'models = ["{model}"]   # networks must be named\n')
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


class _ArrayParts:
    """Features and labels of a data set, divided among the sites."""

    suffix = ".npz"

    def __init__(self, data: str, label: str | None, count: int) -> None:
        whole = load(data, label=label)
        self.whole = whole
        self.names = [f"site{k + 1}" for k in range(count)]
        self.owner = split(whole, "dirichlet:5" if whole.classes else "iid", count, sizes="equal", seed=0)
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


class _TableParts:
    """Rows of a table with a schema, divided by its client column, or at random."""

    def __init__(self, path: Path, schema: Path, count: int | None) -> None:
        self.schema = Schema.read(schema)
        if tables.suffix_of(path) not in tables.SUFFIXES or not path.is_file():
            raise SordinoError(f"data: '{path}' is no table; a schema describes {', '.join(tables.SUFFIXES)} files.")
        encoded = self.schema.open(path)  # refuses a table that does not fit before anything is written
        rows = len(encoded.x)
        rng = np.random.default_rng(0)
        whom = np.arange(rows) if encoded.person is None else np.unique(encoded.person, return_inverse=True)[1]
        if count is None and encoded.client is not None:
            clients, self.owner = np.unique(encoded.client, return_inverse=True)
            self.names = [str(client) for client in clients]
            if not 2 <= len(clients) <= MOST_SITES:
                raise SordinoError(
                    f"sites: column '{self.schema.client}' names {len(clients)} clients, and a demonstration has 2 to "
                    f"{MOST_SITES} sites; give --sites N to divide the records at random."
                )
            if not all(SITE_NAME.fullmatch(name) for name in self.names):
                self.names = [f"site{k + 1}" for k in range(len(clients))]
        else:
            count = _checked(SITES if count is None else count)
            self.names = [f"site{k + 1}" for k in range(count)]
            self.owner = (rng.permutation(whom.max() + 1) % count)[whom]  # all records of a person at one site
        held = np.zeros(whom.max() + 1, bool)
        held[rng.permutation(len(held))[: round(TEST_FRACTION * len(held))]] = True
        self.tested = held[whom]
        self.shape: dict[str, Any] = {"schema": schema}
        self.described: dict[str, Any] = {"schema": schema}
        dialect = self.schema.dialect
        self.suffix = ".csv" if tables.suffix_of(path) in tables.TEXT_SUFFIXES else ".parquet"
        if self.suffix == ".csv":  # cells as they are spelt: the sites read them by the same schema
            columns, self.delimiter = tables.heading(path, dialect)
            self.table = tables.open_table(path, dialect, types=dict.fromkeys(columns, "text"), missing=())
        else:
            self.table = tables.open_table(path)
        if self.table.num_rows != rows:
            raise SordinoError(f"data: '{path}' changed while it was read; try again.")

    def save(self, path: Path, site: int | None) -> None:
        """Write the rows of a site; None: the coordinator's test records."""
        mine = self.tested if site is None else (self.owner == site) & ~self.tested
        part = self.table.filter(mine)
        with files.replacing(path) as temporary:
            if self.suffix == ".parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(part, temporary)
                return
            with open(temporary, "w", newline="", encoding=self.schema.dialect.encoding) as file:
                writer = csv.writer(file, delimiter=self.delimiter)
                writer.writerow(part.column_names)
                writer.writerows(zip(*(column.to_pylist() for column in part.columns), strict=True))


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
