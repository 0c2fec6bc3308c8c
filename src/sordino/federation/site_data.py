"""What a site owns: data with an identity, keys, a ledger, and a log that never leaves the site."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files, secagg
from sordino.core import Adjacency, Unit
from sordino.data.identity import file_sha256, records_digest
from sordino.data.sources import Dataset, load
from sordino.errors import Refused, SordinoError
from sordino.evidence.signing import Signer, of_site
from sordino.federation import counting, rotations, votes
from sordino.federation.config import SiteConfig, text_column
from sordino.federation.terms import Terms
from sordino.federation.witness import SiteLedger, witness_path

log = logging.getLogger("sordino.site")
LOG = 2**24  # bytes of the site's own log; an older file of the same size is kept
DETAIL = 400  # characters per text in it


class SiteData:
    """The files that site.toml names."""

    def __init__(self, config: SiteConfig) -> None:
        self.config = config
        self.runs = config.folder / "runs"
        self._identified: tuple[tuple[int, ...], bytes, str] | None = None  # state and bytes of the file, identity
        self._kept_open: tuple[int, ExitStack, list[SiteLedger]] | None = None  # the thread that does, and the ledger

    @contextmanager
    def ledger(self) -> Iterator[SiteLedger]:
        """The site's ledger.

        Raises:
          RolledBackError: it is older than its witness.
        """
        if self._kept_open is None or self._kept_open[0] != threading.get_ident():
            with self._opened() as ledger:
                yield ledger
            return
        _, stack, known = self._kept_open
        if not known:
            known.append(stack.enter_context(self._opened()))
        yield known[0]

    @contextmanager
    def one_ledger(self) -> Iterator[None]:
        """Meanwhile `ledger` opens the file once at most, in this thread: to open and to close it, which waits for the
        disk, takes longer than most messages ask of it."""
        with ExitStack() as stack:
            self._kept_open = threading.get_ident(), stack, []
            try:
                yield
            finally:
                self._kept_open = None

    def _opened(self) -> SiteLedger:
        config = self.config
        return SiteLedger(
            config.path(config.ledger),
            self.witness,
            epsilon=config.epsilon,
            delta=config.delta,
            adjacency=Adjacency(config.adjacency),
            unit=self.unit,
        )

    @cached_property
    def witness(self) -> Path:
        """The file outside of the folder that knows how far the ledger is."""
        return witness_path(self.config)

    @property
    def account(self) -> str:
        """Who pays for the next run. It belongs to the ledger: files, names and keys do not change it."""
        with self.ledger() as ledger:
            return ledger.account()

    @cached_property
    def signer(self) -> Signer | None:
        """The site's own key; None if it has none."""
        with suppress(SordinoError, OSError):
            return of_site(self.identity)
        return None

    def note(self, what: str, **fields: Any) -> None:
        """Append to the site's own log, which is limited in size. Texts of others are cut and escaped."""
        fields = {
            key: ascii(value)[1:-1][:DETAIL] if isinstance(value, str) else value for key, value in fields.items()
        }
        log.info("%s %s", what, fields)
        path = self.config.folder / "events.jsonl"
        try:
            if path.exists() and path.stat().st_size > LOG:
                files.move(path, path.with_suffix(".old.jsonl"))
            files.append(path, json.dumps({"time": _now(), "what": what, **fields}) + "\n")
        except OSError:
            log.exception("the site's log cannot be written")

    @cached_property
    def identity(self) -> secagg.Identity:
        identity = secagg.Identity.load(self.config.path(self.config.identity))
        if identity.name != self.config.name:
            raise SordinoError(
                f"{self.config.identity}: it is the key of {identity.name}, and site.toml names {self.config.name}; "
                "use the key of this site."
            )
        return identity

    @cached_property
    def roster(self) -> secagg.Roster:
        return read_roster(self.config)

    def roster_of(self, terms: Terms) -> secagg.Roster:
        """The roster with the new keys that the terms bring, without the sites that are voted out.

        Raises:
          Refused: a new key is not signed by the old one, or another one was accepted before; a vote is not signed.
        """
        if not (terms.rotations or terms.votes):
            return self.roster
        try:
            base = secagg.Roster.read(self.config.path(self.config.roster))
            links = [*rotations.accepted(self.config.folder), *rotations.parsed(terms.rotations)]
            roster = rotations.applied(base, links)
            return votes.reduced(roster, votes.excluded(roster, votes.parsed(terms.votes)))
        except SordinoError as error:
            raise Refused("policy", str(error)) from None

    # ------------------------------------------------------------------------------------------------- the site's data

    @property
    def dataset_id(self) -> str:
        """The identity of the records, which certificates state and a run keeps to. It does not name an account.

        It is a keyed hash, because others could test records against a plain hash. The file is parsed again only if its
        bytes changed.
        """
        state, known = self._file_state(), self._identified
        if known is not None and known[0] == state:
            return known[2]
        path, key = Path(self._source), self._key()
        read = key + (file_sha256(path) if path.is_file() else b"")
        if known is None or known[1] != read:
            schema = self.config.table_schema
            digest = records_digest(self._source, key, None if schema is None else schema.dialect)
            known = state, read, f"{self.config.name} {digest.hex()[:32]}"
        self._identified = state, *known[1:]
        return known[2]

    def _file_state(self) -> tuple[int, ...]:
        """Numbers that change when the file or its key is written or replaced."""
        return tuple(
            number
            for path in (Path(self._source), self.config.folder / "data.key")
            for number in (_state(path) if path.exists() else (0,))
        )

    def _key(self) -> bytes:
        path = self.config.folder / "data.key"
        if not path.exists():
            files.write(path, secrets.token_bytes(32))
        return path.read_bytes()

    @property
    def _source(self) -> str:
        path = self.config.path(self.config.data)
        return str(path) if path.exists() else self.config.data

    def load(self, normalize: str = "none") -> Dataset:
        """Read the data with the site's own list of classes, never with the coordinator's."""
        config = self.config
        schema = config.table_schema
        readable = counting.filled(schema) if schema is not None and schema.unknown else schema
        dataset = load(
            self._source,
            label=config.label,
            schema=readable and readable.at_site(),
            test_fraction=config.test_fraction,
            normalize=normalize,
            classes=config.classes,
            by_client=False,  # all records are this site's; a client array of an .npz must not decide who is held out
            some_tests=self.unit.sizes_public,
            text=text_column(config, config.length),
        )
        return dataset._replace(schema=schema)

    @property
    def has_persons(self) -> bool:
        """Whether the schema says whom a record is about; runs must then protect persons."""
        schema = self.config.table_schema
        return schema is not None and schema.person is not None

    @property
    def unit(self) -> Unit:
        """What runs on these data must protect."""
        if self.config.unit is not None:
            return Unit(self.config.unit)
        return Unit.PERSON if self.has_persons else Unit.RECORD

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Numbers of training records (or of persons, where the schema names them) and of features: public.

        A site that is protected as a whole tells 1, whatever it has.
        """
        records, features = self._counted[0]
        return (records if self.unit.sizes_public else 1), features

    @cached_property
    def _counted(self) -> tuple[tuple[int, int], int, tuple[str, ...], tuple[int, ...]]:
        """(training records, features), test records, columns and the shape of a record; persons, where the schema
        names them."""
        data = self.load()
        units = len(data.x_train) if data.person is None else len(np.unique(data.person))
        tests = len(data.y_test) if data.person_test is None else len(np.unique(data.person_test))
        return (int(units), int(data.x_train.shape[1])), int(tests), data.features, data.shape

    @property
    def tests(self) -> int:
        """Number of test records, or of persons among them, which is public."""
        return self._counted[1]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the features in the order of the model's, where the file has names."""
        return self._counted[2]

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record as the file has it, such as (32, 32, 3); empty if records are plain rows."""
        return self._counted[3]

    @property
    def records(self) -> int:
        return self.shape[0]


def _state(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_roster(config: SiteConfig) -> secagg.Roster:
    """The cards of all sites, as a site has them: its roster.toml, and the new keys that it has accepted since.

    Raises:
      SordinoError: the file is missing, or is not a roster.
    """
    return rotations.applied(secagg.Roster.read(config.path(config.roster)), rotations.accepted(config.folder))
