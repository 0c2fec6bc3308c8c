"""Partitions of the training records into clients."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sordino import files
from sordino.data.arrays import unit_numbers
from sordino.data.splits import apportion, by_appearance, generator, parse_number
from sordino.errors import SordinoError, nearest

if TYPE_CHECKING:
    from sordino.data.sources import Dataset

PARTITIONS = ("iid", "dirichlet", "classes", "by-column", "by-site", "counts")
SIZE_LAWS = ("equal", "uniform", "lognormal")
MAX_REDRAWS = 1000  # redraws of a Dirichlet partition that leaves a client without records,
DRAWS = 2_000_000  # and a limit on all proportions drawn, because with very many clients no redraw succeeds


_ARGUMENT = {"dirichlet": "a number above 0", "classes": "a number", "by-column": "a column", "counts": "a CSV file"}


@dataclass(frozen=True)
class Partition:
    """How training records are divided into clients; `parse` reads the texts that `split` documents."""

    law: str
    argument: float | int | str | None = None  # concentration, classes per client, column or CSV file
    sizes: str = "equal"  # law of the sizes of iid clients
    spread: float = 0.5  # standard deviation of the logarithm of lognormal sizes

    @staticmethod
    def parse(text: str, sizes: str = "equal") -> Partition:
        law, colon, argument = text.partition(":")
        if law not in PARTITIONS:
            raise SordinoError(f"partition: '{text}' is unknown.{nearest(law, PARTITIONS)}")
        if colon and law not in _ARGUMENT:
            raise SordinoError(f"partition: '{law}' takes no argument; write '{law}' alone.")
        if law in _ARGUMENT and not argument and (colon or law != "dirichlet"):
            wanted = _ARGUMENT[law]
            raise SordinoError(f"partition: '{text}' lacks {wanted}; write '{law}:' and then {wanted}.")
        if sizes != "equal" and law != "iid":
            raise SordinoError(f"sizes: '{sizes}' needs partition iid; '{law}' determines the sizes itself.")
        size_law, spread = _parse_sizes(sizes)
        if law == "dirichlet":
            concentration = parse_number(argument or "0.5", "partition", f"'{text}' is malformed; write dirichlet:0.5")
            if concentration <= 0:
                raise SordinoError(f"partition: '{text}' needs a concentration above 0; write dirichlet:0.5.")
            return Partition(law, concentration)
        if law == "classes":
            classes = parse_number(argument, "partition", f"'{text}' is malformed; write classes:2", whole=True)
            return Partition(law, int(classes))
        return Partition(law, argument or None, size_law, spread)

    @property
    def brings_clients(self) -> bool:
        """Whether the data or a file determine the number of clients."""
        return self.law in ("by-column", "by-site", "counts")

    @property
    def by_site(self) -> bool:
        """Whether clients are the sites that the data name."""
        return self.law in ("by-column", "by-site")

    @property
    def reads_labels(self) -> bool:
        """Whether labels decide who holds a record. Then the sizes of clients depend on the records."""
        return self.law in ("dirichlet", "classes", "counts")

    @property
    def column(self) -> str | None:
        """The column that names each record's site."""
        return str(self.argument) if self.law == "by-column" else None


def split(
    dataset: Dataset,
    partition: str | Partition,
    clients: int | None,
    *,
    sizes: str = "equal",
    seed: int = 0,
    by_person: bool = False,
    by_client: bool = False,
) -> np.ndarray:
    """Divide the training records among clients.

    Args:
        dataset: The data.
        partition: `iid`; `dirichlet:A` (each class divided by proportions ~ Dir(A); 0.5 by default); `classes:K` (each
            client holds K classes); `by-site` or `by-column:NAME` (the sites that the data name, in sorted order;
            `clients` is ignored); `counts:FILE` (a CSV of `client, class_0, class_1, ..`: how many records of each
            class); or a parsed `Partition`, which holds its sizes.
        clients: Number of clients; None if the partition determines it.
        sizes: Sizes of iid clients: `equal`, `uniform` (0.5 to 1.5 of the mean) or `lognormal:S` (log-sd S, 0.5 by
            default).
        seed: Seed of the partition.
        by_person: Keep all records of a person together; `iid` deals persons, and laws that read labels are refused.
        by_client: Number the sites that the data name in the order in which they appear, so that the name of one of
            them, which client level hides, says nothing about the numbers of others.

    Returns:
        The client index (0..clients-1) of each training record; -1: left out, only with `counts:FILE`.

    Raises:
        SordinoError: The partition is unknown, or does not fit the data.

    Example:
        >>> import sordino as so
        >>> client = split(so.load("digits"), "iid", 4)
        >>> len(client), int(client.max())
        (1438, 3)
    """
    from sordino.data.sources import Dataset  # here: a plan needs the name of a partition, and no data

    if not isinstance(dataset, Dataset):
        raise SordinoError(
            f"dataset: split divides a Dataset, as load() returns it, not a {type(dataset).__name__}. For arrays of "
            "your own give Records.of one client number per record, as in np.arange(len(y)) % clients."
        )
    how = partition if isinstance(partition, Partition) else Partition.parse(partition, sizes)
    if by_person:
        return _of_persons(dataset, how, clients, seed)
    if by_client and how.by_site:
        return unit_numbers(_sites(dataset, how.law))
    if how.reads_labels and not dataset.classes:
        raise SordinoError(
            f"partition: '{how.law}' needs classes, but this is a regression; use iid or by-column:NAME."
        )
    if how.by_site:
        return _by_site(dataset, how.law)
    if how.law == "counts":
        counts = _read_counts(Path(str(how.argument)).expanduser(), len(dataset.classes), clients)
        return _deal(dataset.y_train, counts, generator(seed, "partition"))

    records = len(dataset.y_train)
    if clients is None or clients < 1:
        raise SordinoError(f"clients: {clients} must be at least 1 with partition '{how.law}'; set clients.")
    if records < clients:
        raise SordinoError(f"clients: {clients} clients cannot share {records} records; use at most {records}.")
    rng = generator(seed, "partition")
    if how.law == "iid":
        weights = _weights(how.sizes, how.spread, clients, rng)
        return _deal(np.zeros(records, np.int64), apportion(weights, records)[:, None], rng)
    totals = np.bincount(dataset.y_train, minlength=len(dataset.classes))
    if how.law == "dirichlet":
        return _deal(dataset.y_train, _dirichlet(totals, clients, float(how.argument or 0), rng), rng)
    return _deal(dataset.y_train, _classes(totals, clients, int(how.argument or 0), rng), rng)


def _of_persons(dataset: Dataset, how: Partition, clients: int | None, seed: int) -> np.ndarray:
    """The client of every record, so that no person is divided among clients by chance."""
    if dataset.person is None:
        raise SordinoError("person: the data do not say whom a record is about; name the person column.")
    if how.by_site:
        return _by_site(dataset, how.law)
    if how.law != "iid":
        raise SordinoError(f"partition: '{how.law}' deals records, not persons; use iid or by-column:NAME.")
    index = by_appearance(dataset.person)
    _, first = np.unique(index, return_index=True)
    persons = dataset._replace(y_train=dataset.y_train[first], person=None, site=None)
    return np.asarray(split(persons, how, clients, seed=seed)[index])


def _deal(y: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Hand `counts[client, class]` records to each client, at random within a class; what is left over gets -1."""
    clients, classes = counts.shape
    left = np.bincount(y, minlength=classes) - counts.sum(0)
    if (left < 0).any():
        short = int(left.argmin())
        raise SordinoError(
            f"partition: the counts need {counts[:, short].sum()} records of class {short}, but the data have "
            f"{counts[:, short].sum() + left[short]}; lower the counts."
        )
    order = np.lexsort((rng.random(len(y)), y))
    owner = np.empty(len(y), np.int64)
    owner[order] = np.repeat(np.tile(np.append(np.arange(clients), -1), classes), np.vstack((counts, left)).T.ravel())
    return owner


def _parse_sizes(text: str) -> tuple[str, float]:
    """The law of client sizes, and the spread of lognormal ones."""
    law, colon, spread = text.partition(":")
    if law not in SIZE_LAWS or (colon and law != "lognormal"):
        raise SordinoError(f"sizes: '{text}' is unknown.{nearest(text, SIZE_LAWS)}")
    deviation = parse_number(spread if colon else "0.5", "sizes", f"'{text}' is malformed; write lognormal:0.5")
    if not 0 <= deviation <= 10:
        raise SordinoError(f"sizes: '{text}' needs a log-sd from 0 to 10; write lognormal:0.5.")
    return law, deviation


def _weights(law: str, spread: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    if law == "equal":
        return np.ones(clients)
    if law == "uniform":
        return rng.uniform(0.5, 1.5, clients)
    return np.exp(spread * rng.standard_normal(clients))


def _dirichlet(totals: np.ndarray, clients: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Counts by client and class, redrawn while a client is empty. If that fails, single records are moved."""
    for _ in range(max(1, min(MAX_REDRAWS, DRAWS // (clients * len(totals))))):
        share = rng.dirichlet(np.full(clients, concentration), size=len(totals))
        ends = np.rint(share.cumsum(1) * totals[:, None]).astype(np.int64)
        ends[:, -1] = totals  # rounding may leave the sum of shares different from 1
        counts: np.ndarray = np.diff(ends, axis=1, prepend=0).T
        if counts.sum(1).all():
            return counts
    sizes = counts.sum(1)
    for empty in np.flatnonzero(sizes == 0):
        largest = sizes.argmax()
        kind = counts[largest].argmax()
        counts[largest, kind] -= 1
        counts[empty, kind] = sizes[empty] = 1
        sizes[largest] -= 1
    return counts


def _classes(totals: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Counts by client and class: `per_client` classes per client, and an equal number of clients per class."""
    present = np.flatnonzero(totals)
    if not 1 <= per_client <= len(present):
        raise SordinoError(
            f"partition: classes:{per_client} is impossible with {len(present)} classes; use 1 to {len(present)}."
        )
    if clients * per_client < len(present):
        raise SordinoError(
            f"partition: {clients} clients of {per_client} classes cannot hold all {len(present)} classes; "
            "use more clients, or more classes per client."
        )
    holds = np.zeros((clients, len(totals)), bool)
    holders = np.zeros(len(present), np.int64)
    for client in range(clients):  # each takes the classes with the fewest holders so far; ties are random
        chosen = np.argsort(holders + rng.random(len(present)))[:per_client]
        holders[chosen] += 1
        holds[client, present[chosen]] = True
    for kind, many in zip(present, holders, strict=True):
        if totals[kind] < many:
            raise SordinoError(
                f"partition: class {kind} has {totals[kind]} records for {many} clients; "
                "use fewer clients, or fewer classes per client."
            )
    rank = holds.cumsum(0) - 1  # rank of a client among the holders of a class; the first ones take the remainder
    many = np.maximum(holds.sum(0), 1)
    return np.asarray(np.where(holds, totals // many + (rank < totals % many), 0))


def _by_site(dataset: Dataset, partition: str) -> np.ndarray:
    return np.unique(_sites(dataset, partition), return_inverse=True)[1].astype(np.int64)


def _sites(dataset: Dataset, partition: str) -> np.ndarray:
    if dataset.site is None:
        raise SordinoError(f"partition: '{partition}' needs data with a client column; name it when loading (client).")
    return dataset.site


def _read_counts(path: Path, classes: int, clients: int | None) -> np.ndarray:
    if not path.is_file():
        raise files.absent("partition", path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        rows = list(reader)
    for name in ("client", *(f"class_{k}" for k in range(classes))):
        if name not in columns:
            raise SordinoError(f"partition: '{path}' has no column '{name}'.{nearest(name, columns)}")
    extra = [name for name in columns if (m := re.fullmatch(r"class_(\d+)", name)) and int(m[1]) >= classes]
    if extra:
        raise SordinoError(f"partition: '{path}' has columns {extra}, but the data has only {classes} classes.")

    def number(row: int, name: str) -> int:
        text = (rows[row][name] or "").strip()
        if not text.isdecimal():
            raise SordinoError(f"partition: '{text}' in row {row + 1}, column '{name}' of '{path}' is not a count.")
        return int(text)

    order = [number(row, "client") for row in range(len(rows))]
    if not rows or sorted(order) != list(range(len(rows))):
        raise SordinoError(f"partition: the client column of '{path}' must hold 0, 1, 2, .. once each.")
    if clients is not None and clients != len(rows):
        raise SordinoError(f"clients: {clients} requested, but '{path}' has {len(rows)}; leave clients out.")
    counts = np.empty((len(rows), classes), np.int64)
    for row, client in enumerate(order):
        counts[client] = [number(row, f"class_{k}") for k in range(classes)]
    if not counts.sum(1).all():
        raise SordinoError(f"partition: client {counts.sum(1).argmin()} of '{path}' has no records; drop its row.")
    return counts


class ClientSummary(NamedTuple):
    """Summary of one client's records."""

    client: int
    records: int
    counts: tuple[int, ...]  # by class
    kl_from_uniform: float  # KL(the client's class distribution || uniform), in nats
    absent: int  # classes without a record


def describe(y: np.ndarray, client: np.ndarray, classes: int) -> list[ClientSummary]:
    """One summary per client, in order. Regression (`classes` 0) has only counts; records of client -1 are skipped."""
    used = client >= 0
    y, client = y[used], client[used]
    records = np.bincount(client)
    if classes:
        counts = np.bincount(client * classes + y, minlength=len(records) * classes).reshape(-1, classes)
    else:
        counts = np.zeros((len(records), 0), np.int64)
    share = counts / np.maximum(records, 1)[:, None]
    kl = (share * np.log(np.where(share > 0, share * classes, 1))).sum(1)
    columns = zip(records.tolist(), counts.tolist(), kl.tolist(), (counts == 0).sum(1).tolist(), strict=True)
    return [ClientSummary(k, n, tuple(row), max(0.0, far), none) for k, (n, row, far, none) in enumerate(columns)]
