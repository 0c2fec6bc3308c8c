"""What a site owns: data with an identity, keys, a ledger, and a log that never leaves the site."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files, secagg
from sordino.core import Adjacency, Unit
from sordino.data.sources import Dataset, load
from sordino.errors import SordinoError
from sordino.federation import counting
from sordino.federation.config import SiteConfig
from sordino.privacy.evidence.ledger import Ledger

log = logging.getLogger("sordino.site")
LOG = 2**24  # bytes of the site's own log; an older file of the same size is kept
DETAIL = 400  # characters per text in it


class SiteData:
    """The files that site.toml names."""

    def __init__(self, config: SiteConfig) -> None:
        self.config = config
        self.runs = config.folder / "runs"

    def ledger(self) -> Ledger:
        config = self.config
        return Ledger(
            config.path(config.ledger),
            epsilon=config.epsilon,
            delta=config.delta,
            adjacency=Adjacency(config.adjacency),
            unit=Unit.PERSON if self.has_persons else Unit.RECORD,
        )

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
        return secagg.Roster.read(self.config.path(self.config.roster))

    # ------------------------------------------------------------------------------------------------- the site's data

    @cached_property
    def dataset_id(self) -> str:
        """The identity of the data's content, which names their account in the ledger."""
        return self.identify()

    def identify(self) -> str:
        """A keyed hash, because it is printed in certificates: others could test records against a plain hash."""
        path = self.config.folder / "data.key"
        if not path.exists():
            files.write(path, secrets.token_bytes(32))
        return f"{self.config.name} {content(self._source, path.read_bytes())[:32]}"

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
        )
        return dataset._replace(schema=schema)

    @property
    def has_persons(self) -> bool:
        """Whether the schema says whom a record is about; runs must then protect persons."""
        schema = self.config.table_schema
        return schema is not None and schema.person is not None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Numbers of training records (or of persons, where the schema names them) and of features: public."""
        return self._counted[0]

    @cached_property
    def _counted(self) -> tuple[tuple[int, int], int]:
        """(training records, features) and test records; persons, where the schema names them."""
        data = self.load()
        units = len(data.x_train) if data.person is None else len(np.unique(data.person))
        tests = len(data.y_test) if data.person_test is None else len(np.unique(data.person_test))
        return (int(units), int(data.x_train.shape[1])), int(tests)

    @property
    def tests(self) -> int:
        """Number of test records, or of persons among them, which is public."""
        return self._counted[1]

    @property
    def records(self) -> int:
        return self.shape[0]


def content(source: str, key: bytes) -> str:
    """Keyed hash of a data file, or of the name of a built-in data set."""
    digest = hmac.new(key, digestmod="sha256")
    if not Path(source).is_file():
        digest.update(source.encode())
        return digest.hexdigest()
    with open(source, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
