"""The ledger: a durable record of what was released, by whom and at what cost.

`charge` checks the limit first. Then it writes its rows together with the noised release, in one transaction that is on
disk before `charge` returns. So everything that leaves a client is paid for, and after a crash the same bytes are sent
again instead of fresh noise. The file is SQLite in WAL mode with synchronous=FULL: a committed row survives a power cut
if the disk keeps what it confirms.

Rows are only appended, and each row holds the hash of the row before it. The file also keeps a witness (the number of
rows and the last hash), so that `audit` notices rows that were cut off at the end. Somebody who can write the file can
forge chain and witness together, but cannot forge a chain that ends in a hash that a certificate already states. So
store `head()` and `len()` elsewhere and pass them to `audit`.

`compact` deletes the bytes of the releases of runs that have ended; their hashes stay in the chain.

`mark` stores how many rounds of a plan are done, so that a run that was reset to an earlier round is refused.

A site's ledger has one account, which pays for all of the site's data: `account`. It does not depend on the data, so no
edit of a file opens a budget. `new_account` opens another one, with a reason that stays in the chain.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from sordino.core import Adjacency, Unit
from sordino.errors import LedgerError, OverspentError, SordinoError
from sordino.privacy.accounting import concentrated, events, gaussian
from sordino.privacy.accounting.slots import MOST_OVERFLOW
from sordino.privacy.accounting.subsampled import Sampler

SCHEMA = 2
GENESIS = hashlib.sha256(f"sordino ledger, schema {SCHEMA}".encode()).hexdigest()  # the hash before the first row
FIXED_BEFOREHAND = ", if the rates, noise and rounds of all runs were fixed before the first result was seen"
MU_TOLERANCE = 1e-9  # relative, on mu squared, so that rounding does not refuse the last planned release
SAMPLERS = (
    "poisson add-remove",
    "poisson replace-one",
    "fixed add-remove",
    "fixed replace-one",
    "allocation add-remove",
    "allocation replace-one",
    "poisson add-remove smoothed-discrete-gaussian",
    "poisson replace-one smoothed-discrete-gaussian",
)
NEW_ACCOUNT = "new account"  # the query of the row that opens an account
SURVIVORS = "survivors"  # the query of the row that holds the survivors of a masked round
NOTES = (NEW_ACCOUNT, SURVIVORS)  # queries of rows that release nothing
ACCOUNTS = "accounts"  # the plan of the rows that open accounts
TIMEOUT = 30.0  # seconds to wait for another process that is writing
_APPLICATION = 0x536F7264  # marks the file as a ledger
_FIELDS = (
    "who, round, query, sensitivity, std, times, plan, rate, sampler, seq, time, key, payload_sha256, previous, hash"
)
_READ = f"SELECT {_FIELDS}"
_LATER = (  # tables that files of earlier versions do not have
    "CREATE TABLE IF NOT EXISTS witness (rows INTEGER NOT NULL, head TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS progress (plan TEXT PRIMARY KEY, rounds INTEGER NOT NULL)",
)


def _append_only(table: str, verb: str) -> str:
    """The trigger that refuses this kind of change."""
    return f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} BEGIN SELECT RAISE(ABORT, 'append-only'); END"


_TABLES = (
    """CREATE TABLE entries (
        who TEXT NOT NULL, round INTEGER NOT NULL, query TEXT NOT NULL, sensitivity REAL NOT NULL, std REAL NOT NULL,
        times INTEGER NOT NULL, plan TEXT NOT NULL, rate REAL NOT NULL, sampler TEXT NOT NULL,
        seq INTEGER PRIMARY KEY, time TEXT NOT NULL, key TEXT NOT NULL,
        payload_sha256 TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL, payload BLOB)""",
    "CREATE INDEX entries_by_round ON entries (plan, who, round)",
    "CREATE UNIQUE INDEX entries_by_key ON entries (key) WHERE key <> ''",
    "CREATE TABLE limits (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL)",
    *_LATER,
    *(_append_only(table, verb) for table in ("entries", "limits") for verb in ("UPDATE", "DELETE")),
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
_REMEDIES = {
    "SQLITE_FULL": "free some disk space and try again",
    "SQLITE_BUSY": "another process has locked it; wait for that process, or end it, and try again",
    "SQLITE_READONLY": "make the file and its directory writable for this user",
    "SQLITE_CANTOPEN": "check that the directory exists and that this user can read and write it",
    "SQLITE_NOTADB": "name a file that is a ledger, or one that does not exist yet",
    "SQLITE_CORRUPT": "restore the file from a backup, and audit() it against the last certificate",
}


class Charge(NamedTuple):
    """The cost of `times` equal releases. About all of the data it is mu² = times (sensitivity/std)².

    Attributes:
      who: who pays, a client or a person.
      round: the round of the plan.
      query: the name of the query.
      sensitivity: how far one unit moves the release.
      std: standard deviation of the noise.
      times: number of equal releases.
      plan: the plan to which the round belongs.
      rate: the chance of a record to be in the sample; 1 for all of the data.
      sampler: if the rate is below 1, the sampler and the adjacency, as in 'poisson add-remove', and a noise law that
        is not Gaussian. At rate 1, such a law, or an empty string.
    """

    who: str
    round: int
    query: str
    sensitivity: float
    std: float
    times: int
    plan: str
    rate: float = 1.0
    sampler: str = ""

    @staticmethod
    def of(release: events.Release, who: str, round: int, plan: str, adjacency: Adjacency) -> Charge:
        """The charge for a release of the plan."""
        query, sensitivity, std, times, rate, sampler, mechanism = release
        law = "" if mechanism == events.Gaussian.name else mechanism
        law = f"{sampler} {adjacency} {law}".strip() if rate < 1 else law
        if rate < 1 and law not in SAMPLERS:
            raise SordinoError(f"mechanism: there is no account of {mechanism} noise on a {sampler} sample.")
        return Charge(who, round, query, sensitivity, std, times, plan, rate, law)

    @property
    def mechanism(self) -> str:
        """The name of the accounting event of the noise."""
        law = self.sampler if self.rate == 1 else " ".join(self.sampler.split()[2:])
        return law or events.Gaussian.name


class LedgerRow(NamedTuple):
    """A row as it was written. The first row of a call to `charge` has the key and the hash of the payload."""

    who: str
    round: int
    query: str
    sensitivity: float
    std: float
    times: int
    plan: str
    rate: float
    sampler: str
    seq: int
    time: str  # ISO 8601, UTC
    key: str  # JSON of (plan, who, round) under which the payload is stored; "" on the other rows of the call
    payload_sha256: str  # "" without a payload
    previous: str
    hash: str


class Account(NamedTuple):
    """Who pays, since when, and why the account was opened."""

    who: str
    time: str  # ISO 8601, UTC
    why: str


class Ledger:
    """An append-only account of every release, with one (epsilon, delta) limit per `who` over all plans.

    The file stores the limit. Opening it again can tighten the limit but never loosen it. The file also stores the
    adjacency when it is first named, because costs under different adjacencies do not add up. Several processes may
    share a file. A `Ledger` object belongs to the thread that opened it.

    Args:
      path: the file; it is created if it does not exist.
      epsilon: epsilon of the limit; give both epsilon and delta, or neither.
      delta: delta of the limit.
      adjacency: which data sets are neighbours.
      unit: whose data are protected.
      read_only: only look. Nothing is created or changed, and the file and its folder need not be writable.

    Raises:
      SordinoError: the limit is incomplete, or the file has another adjacency or unit.
      LedgerError: the file cannot be opened or is no ledger, or the new limit is weaker than the stored one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: Adjacency | None = None,
        unit: Unit | None = None,
        read_only: bool = False,
    ) -> None:
        if (epsilon is None) != (delta is None):
            raise SordinoError("epsilon, delta: a limit needs both; leave out both to keep the stored one.")
        new_limit = None if epsilon is None or delta is None else (_mu(epsilon, delta), epsilon, delta)
        self.path = Path(path).absolute()
        self._spent: defaultdict[str, SpentByRuns] = defaultdict(SpentByRuns)  # the sum of the rows up to `_last_read`
        self._last_read = 0
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        if read_only:
            self._open_to_read()
            return
        try:
            # Only a new file is opened here, because closing a second descriptor drops the locks of an open ledger.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            raise LedgerError(
                f"ledger {self.path}: {error.strerror}; choose a path that this user can write."
            ) from error
        with self._explained():
            self._db = sqlite3.connect(self.path, timeout=TIMEOUT, isolation_level=None)
        try:
            self._prepare()
            if new_limit is not None:
                self._restrict(*new_limit)
            if adjacency is not None:
                self._settle("adjacency", adjacency)
            if unit is not None:
                self._settle("unit", unit)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()

    # ------------------------------------------------------------------------------------------- paying for a release

    def afford(self, entries: Sequence[Charge], limit: tuple[float, float] | None = None) -> None:
        """Check charges against the limit without writing them.

        Args:
          entries: the charges.
          limit: a further (epsilon, delta), which is not stored.

        Raises:
          OverspentError: somebody would exceed the limit.
        """
        self._affordable([_checked(entry) for entry in entries], limit)

    def charge(
        self, entries: Sequence[Charge], payload: bytes | None = None, *, key: tuple[str, str, int] | None = None
    ) -> None:
        """Check the limit, and write the charges and the noised release in one transaction. Then it may be sent.

        Args:
          entries: the charges.
          payload: the noised release, to be sent again after a crash.
          key: (plan, who, round) under which the payload is stored; by default that of the first charge.

        Raises:
          OverspentError: somebody would exceed the limit, or a (plan, who, round) was charged before. So nothing is
            counted twice or noised again.
          SordinoError: there are no charges, or one is malformed.
          LedgerError: rows of the file are missing, or it cannot be written.
        """
        entries = [_checked(entry) for entry in entries]
        if not entries:
            raise SordinoError("entries: the list is empty; charge sensitivity 0 for a release that costs nothing.")
        rounds = [(entry.plan, entry.who, entry.round) for entry in entries]
        key = rounds[0] if key is None else key
        with self._transaction():
            for plan, who, round in dict.fromkeys([key, *rounds]):
                if self.charged(plan, who, round):
                    released = f"{who}, round {round} of plan '{plan}'"
                    raise OverspentError(f"{released}: already released; re-send the stored one.")
            self._affordable(entries)
            (seq, previous), now = self._last(), _now()
            if cut := self._cut(seq, previous):
                raise LedgerError(f"ledger {self.path}: {cut} Restore it from a backup before the next release.")
            label, body = _label(*key), payload
            for entry in entries:
                seq += 1
                row = LedgerRow(*entry, seq, now, label, _sha256(body), previous, "")
                row = row._replace(hash=_chained(row))
                self._db.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 16)})", (*row, body))
                previous, label, body = row.hash, "", None
            for statement in _LATER:
                self._db.execute(statement)
            self._db.execute("DELETE FROM witness")
            self._db.execute("INSERT INTO witness VALUES (?, ?)", (seq, previous))
        self._committed()

    def _committed(self) -> None:
        """Called when charges are on disk, before `charge` returns."""

    def mark(self, plan: str, rounds: int) -> None:
        """Store how many rounds of the plan are done. The number never decreases.

        This does not wait for the disk, so a power cut may lose the last numbers; the stored one is then too small.

        Args:
          plan: the plan.
          rounds: how many of its rounds are done.
        """
        self._ask("PRAGMA synchronous = NORMAL")
        try:
            self._mark(plan, rounds)
        finally:
            self._ask("PRAGMA synchronous = FULL")

    def _mark(self, plan: str, rounds: int) -> None:
        with self._transaction():
            for statement in _LATER:
                self._db.execute(statement)
            most = "rounds = max(rounds, excluded.rounds)"
            self._db.execute(
                f"INSERT INTO progress VALUES (?, ?) ON CONFLICT (plan) DO UPDATE SET {most}", (plan, rounds)
            )

    def marked(self, plan: str) -> int:
        """How many rounds of the plan are done, according to `mark`."""
        rows = self._ask("SELECT rounds FROM progress WHERE plan = ?", plan) if self._has("progress") else []
        return int(rows[0][0]) if rows else 0

    def witnessed(self) -> bool:
        """Whether the file has a witness. Files of earlier versions get one with the next charge."""
        return self._witness() is not None

    def release(self, plan: str, who: str, round: int) -> bytes | None:
        """The stored payload, to send again after a crash; None if there is none."""
        rows = self._ask("SELECT CAST(payload AS BLOB) FROM entries WHERE key = ?", _label(plan, who, round))
        return rows[0][0] if rows else None

    def compact(self, plans: Sequence[str]) -> int:
        """Delete the stored releases of plans that have ended, because nobody asks for them again.

        Charges, hashes and notes stay, so the chain does, and a round that was charged is still not released again.
        The file keeps its size and reuses the space; `shrink` gives it back.

        Args:
          plans: the plans that have ended.

        Returns:
          How many releases were deleted.
        """
        marks = ", ".join("?" * len(NOTES))
        found = [
            seq
            for plan in plans
            for (seq,) in self._ask(
                f"SELECT seq FROM entries WHERE plan = ? AND payload IS NOT NULL AND query NOT IN ({marks})",
                plan,
                *NOTES,
            )
        ]
        if found:
            with self._transaction():
                self._db.execute("CREATE TABLE IF NOT EXISTS compacted (seq INTEGER PRIMARY KEY, time TEXT NOT NULL)")
                self._db.executemany("INSERT INTO compacted VALUES (?, ?)", [(seq, _now()) for seq in found])
                self._db.execute("DROP TRIGGER entries_no_UPDATE")
                self._db.executemany("UPDATE entries SET payload = NULL WHERE seq = ?", [(seq,) for seq in found])
                self._db.execute(_append_only("entries", "UPDATE"))
        return len(found)

    def shrink(self) -> None:
        """Give the space of deleted releases back to the disk. It needs as much free space as the file will have."""
        self._ask("VACUUM")
        self._ask("PRAGMA wal_checkpoint(TRUNCATE)")

    def charged(self, plan: str, who: str, round: int) -> bool:
        """Whether this round was charged, as a charge or as the key of a payload."""
        by_round = "SELECT 1 FROM entries WHERE plan = ? AND who = ? AND round = ? LIMIT 1"
        by_key = "SELECT 1 FROM entries WHERE key = ?"
        return bool(self._ask(by_round, plan, who, round) or self._ask(by_key, _label(plan, who, round)))

    # ------------------------------------------------------------------------------------------------- a site's account

    def account(self) -> str:
        """The account that pays for all data of a site: the one opened last. A new ledger gets its first one here.

        Its name holds 128 random bits, so that the hashes of the chain can be published.

        Raises:
          LedgerError: the ledger has charges, but no account; they would not count against a new one.
        """
        if known := self.accounts():
            return known[-1].who
        if len(self):
            raise LedgerError(
                f"ledger {self.path}: its charges belong to no account of a site, so a new account would forget them; "
                "put the site's own ledger back, or open an account with `sordino ledger new-account`."
            )
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS account (who TEXT NOT NULL, time TEXT NOT NULL)")
            if not self._ask("SELECT 1 FROM account"):
                self._db.execute("INSERT INTO account VALUES (?, ?)", (_account_name(1), _now()))
        return self.accounts()[-1].who

    def accounts(self) -> list[Account]:
        """The accounts of a site in the order in which they were opened; empty in a ledger of another kind."""
        first = self._ask("SELECT who, time, 'the first account' FROM account") if self._has("account") else []
        later = "SELECT who, time, CAST(payload AS TEXT) FROM entries WHERE plan = ? AND query = ? ORDER BY seq"
        return [Account(*row) for row in (*first, *self._ask(later, ACCOUNTS, NEW_ACCOUNT))]

    def new_account(self, why: str) -> str:
        """Open another account with the full limit, and write the reason into the chain. Only a person decides this.

        Records that both accounts paid for are protected by neither limit alone.

        Args:
          why: the reason, such as 'all patients of 2027, none of them in earlier data'.

        Raises:
          SordinoError: there is no reason.
          LedgerError: this is not the ledger of a site.
        """
        if not why.strip():
            raise SordinoError("why: it is empty; say why these data may spend a budget of their own.")
        if not self._has("unit"):  # only a site stores it
            raise LedgerError(
                f"ledger {self.path}: it is not the ledger of a site; a ledger of local runs names accounts by data."
            )
        number = len(self.accounts()) + 1
        who = _account_name(number)
        self.charge([Charge(who, number, NEW_ACCOUNT, 0.0, 1.0, 1, ACCOUNTS)], why.strip().encode())
        return who

    def hash_of(self, row: int) -> str | None:
        """The hash of a row, counted from 1; GENESIS for 0, None if there is no such row."""
        rows = self._ask("SELECT hash FROM entries WHERE seq = ?", row) if row else [(GENESIS,)]
        return str(rows[0][0]) if rows else None

    # ------------------------------------------------------------------------------------------------ what was written

    def spent(self, who: str) -> float:
        """mu of everything charged to `who`, as if no release were sampled.

        Without sampling it is exact, because Gaussian releases compose by adding mu squared.
        """
        self._catch_up()
        return math.sqrt(self._spent_by(who).square)

    def spent_epsilon(self, who: str, delta: float) -> float:
        """Epsilon of everything charged to `who`, at a delta."""
        self._catch_up()
        return self._spent_by(who).epsilon(delta)

    def adaptive_epsilon(self, who: str, delta: float) -> float:
        """The same, however the numbers of later runs were chosen: an upper bound (`SpentByRuns`)."""
        self._catch_up()
        return self._spent_by(who).adaptive_epsilon(delta)

    def covers_choice(self, who: str) -> bool:
        """Whether `spent_epsilon` also holds if later runs were chosen after looking at earlier results."""
        self._catch_up()
        return self.allows_any_choice() or self._spent_by(who).covers_choice

    def caveat(self, who: str) -> str:
        """What follows `spent_epsilon` in a sentence where it does not hold for any choice; otherwise empty."""
        return "" if self.covers_choice(who) else FIXED_BEFOREHAND

    def allow_any_choice(self) -> None:
        """From now on, count runs such that limits hold however the numbers of later runs were chosen.

        It costs more, and cannot be taken back. Without it, limits hold if all noise is Gaussian and nothing is
        sampled, or if the numbers of all runs were fixed before the first result was seen.
        """
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS any_choice (time TEXT NOT NULL)")
            if not self._ask("SELECT 1 FROM any_choice"):
                self._db.execute("INSERT INTO any_choice VALUES (?)", (_now(),))

    def allows_any_choice(self) -> bool:
        """Whether `allow_any_choice` was called."""
        return self._has("any_choice")

    def left(self, who: str, limit: tuple[float, float] | None = None) -> float | None:
        """The largest epsilon, at the delta of the limit, of one more release without sampling that fits into every
        limit and into `limit`, which is not stored; 0 if none fits, None if there is no limit."""
        self._catch_up()
        spent = self._spent_by(who)
        limits = [*self.limits(), *([limit] if limit else [])]
        return min((spent.left(*each) for each in limits), default=None)

    def limits(self) -> list[tuple[float, float]]:
        """Every (epsilon, delta) that was ever set; all of them hold."""
        return [(epsilon, delta) for epsilon, delta in self._ask("SELECT epsilon, delta FROM limits ORDER BY seq")]

    def people(self) -> list[str]:
        """Everybody who was charged, sorted."""
        return [who for (who,) in self._ask("SELECT DISTINCT who FROM entries ORDER BY who")]

    def rows(self) -> Iterator[LedgerRow]:
        """All rows in their order."""
        return self._rows_after(0)

    def head(self) -> str:
        """The hash of the last row; GENESIS if there are no rows."""
        return self._last()[1]

    def __len__(self) -> int:
        return int(self._ask("SELECT count(*) FROM entries")[0][0])

    def __bool__(self) -> bool:
        return True  # an empty ledger is still a ledger

    def audit(self, expect_head: str | None = None, expect_rows: int | None = None) -> list[str]:
        """Check the chain of hashes.

        Args:
          expect_head: a hash that some row must have, from a certificate.
          expect_rows: how many rows there must be at least.

        Returns:
          One sentence per problem; empty if the chain is intact.
        """
        problems = []
        seq, previous, count, head_seen = 0, GENESIS, 0, expect_head in (None, GENESIS)
        compacted = {row for (row,) in self._ask("SELECT seq FROM compacted")} if self._has("compacted") else set()
        try:
            for *fields, payload in self._db.execute(f"{_READ}, CAST(payload AS BLOB) FROM entries ORDER BY seq"):
                row = LedgerRow(*fields)
                if row.seq != seq + 1:
                    problems.append(f"Row {row.seq} follows row {seq}: the sequence has a gap.")
                if row.previous != previous:
                    problems.append(f"Row {row.seq} does not continue the row before it: the chain is broken.")
                if row.hash != _chained(row):
                    problems.append(f"Row {row.seq} does not match its hash: it was changed.")
                deleted = payload is None and row.seq in compacted
                if row.payload_sha256 != _sha256(payload) and not deleted:
                    problems.append(f"Row {row.seq} has a payload that does not match its hash: it was changed.")
                seq, previous, count, head_seen = row.seq, row.hash, count + 1, head_seen or row.hash == expect_head
        except sqlite3.Error as error:
            problems.append(f"The file cannot be read beyond row {seq}: {error}.")
        if cut := self._cut(seq, previous):
            problems.append(cut)
        if expect_rows is not None and count < expect_rows:
            problems.append(f"There are {count} rows, but {expect_rows} are expected: rows were cut off.")
        if not head_seen:
            problems.append(f"No row has the expected hash {expect_head}: rows were cut off or rewritten.")
        return problems

    # ------------------------------------------------------------------------------------------------------ internals

    def _prepare(self) -> None:
        self._ask("PRAGMA synchronous = FULL")
        self._ask("PRAGMA fullfsync = ON")  # on macOS a plain fsync leaves data in the drive's cache
        self._new()  # refuses a file that is no ledger before anything changes it
        with suppress(PermissionError):  # a copied file may have another mode; only its owner can change it
            os.chmod(self.path, 0o600)  # SQLite gives the same mode to the files beside it
        with self._explained():
            self._write_ahead()
        with self._transaction():
            for statement in _TABLES if self._new() else ():
                self._db.execute(statement)

    def _open_to_read(self) -> None:
        """Open the file without changing it or its folder.

        SQLite keeps what was not yet moved into the file in `-wal`, and needs `-shm` beside it to read that. Without a
        `-wal` the file is whole, and `immutable` makes SQLite create neither. With one, `-shm` is there as well while
        another process has the ledger open. A read-only copy of a run that was killed has only the `-wal`; SQLite then
        reads a temporary copy of both.
        """
        journal = self.path.with_name(self.path.name + "-wal")
        whole = not (journal.exists() and journal.stat().st_size)
        with self._explained():
            try:
                self._connect_to_read(self.path, "&immutable=1" if whole else "")
            except sqlite3.OperationalError:
                if whole or not journal.exists():
                    raise
                self._copy = tempfile.TemporaryDirectory()
                for path in (self.path, journal):
                    shutil.copy(path, self._copy.name)
                self._connect_to_read(Path(self._copy.name) / self.path.name)
        try:
            if self._new():
                raise LedgerError(f"ledger {self.path}: the file is empty; name a file that is a ledger.")
        except BaseException:
            self.close()
            raise

    def _connect_to_read(self, path: Path, more: str = "") -> None:
        db = sqlite3.connect(f"{path.as_uri()}?mode=ro{more}", uri=True, timeout=TIMEOUT, isolation_level=None)
        try:
            db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except BaseException:
            db.close()
            raise
        self._db = db

    def _new(self) -> bool:
        """Whether the file is still empty. A file of another kind or schema is refused."""
        if not self._ask("SELECT 1 FROM sqlite_master LIMIT 1"):
            return True  # asked first, because another process may create the ledger between two queries
        ((application,),), ((version,),) = self._ask("PRAGMA application_id"), self._ask("PRAGMA user_version")
        if application != _APPLICATION:
            raise LedgerError(f"ledger {self.path}: this is a database of another kind; choose another path.")
        if version != SCHEMA:
            raise LedgerError(
                f"ledger {self.path}: the file has schema {version}, but this version of Sordino reads schema "
                f"{SCHEMA}; open it with the version that wrote it."
            )
        return False

    def _write_ahead(self) -> None:
        # SQLite does not wait for a lock here, so two processes that create the same ledger would conflict.
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if _code(error) != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            if mode != "wal":
                raise LedgerError(
                    f"ledger {self.path}: this file system does not support WAL mode; choose a local disk."
                )
            return

    def _restrict(self, mu: float, epsilon: float, delta: float) -> None:
        with self._transaction():
            stored, *limit = self._limit()
            if mu > stored * (1 + MU_TOLERANCE):
                raise LedgerError(
                    f"ledger {self.path}: the limit is epsilon {limit[0]:g} at delta {limit[1]:g}; epsilon {epsilon:g} "
                    f"at delta {delta:g} is weaker. Limits can only be tightened; omit it to keep the stored one."
                )
            if mu < stored * (1 - MU_TOLERANCE):
                row = (_now(), epsilon, delta)
                self._db.execute("INSERT INTO limits (time, epsilon, delta) VALUES (?, ?, ?)", row)

    def _settle(self, what: Literal["adjacency", "unit"], word: Adjacency | Unit) -> None:
        """Store the adjacency or the unit of all costs, or refuse another than the stored one."""
        with self._transaction():
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {what} (word TEXT NOT NULL)")
            stored = [word for (word,) in self._db.execute(f"SELECT word FROM {what}")]
            if not stored:
                self._db.execute(f"INSERT INTO {what} VALUES (?)", (str(word),))
            elif stored != [str(word)]:
                raise SordinoError(
                    f"{what}: ledger {self.path} counts costs under {stored[0]}, which do not add up with costs under "
                    f"{word}. Use {stored[0]}, or another ledger."
                )

    def _limit(self) -> tuple[float, float, float]:
        """(mu, epsilon, delta) of the strictest limit ever set."""
        limits = self._ask("SELECT epsilon, delta FROM limits")
        return min(((_mu(*limit), *limit) for limit in limits), default=(math.inf, math.inf, math.nan))

    def _affordable(self, entries: Sequence[Charge], further: tuple[float, float] | None = None) -> None:
        """Raise OverspentError if the charges exceed a limit."""
        limits = [(_mu(*limit), *limit) for limit in (*self.limits(), *([further] if further else []))]
        if not limits:
            return
        self._catch_up()
        after: dict[str, SpentByRuns] = {}
        for entry in entries:
            if entry.std == 0 and entry.sensitivity > 0:
                raise SordinoError(
                    f"std: query '{entry.query}' of {entry.who} has no noise, but the ledger has a limit."
                )
            after.setdefault(entry.who, self._spent_by(entry.who).copy()).add(entry)
        for who, spent in after.items():
            for mu, epsilon, delta in limits:  # all limits, because none is strictest for sampled releases
                if not spent.exceeds(mu, epsilon, delta):
                    continue
                raise OverspentError(
                    f"{who}: this would bring epsilon to {spent.epsilon(delta):.6g} at delta "
                    f"{delta:g}; the limit is {epsilon:g}. Nothing was charged."
                )

    def _spent_by(self, who: str) -> SpentByRuns:
        """What the rows read so far cost, without an entry for somebody who was never charged."""
        kind = self._spent.default_factory
        assert kind is not None
        return self._spent[who] if who in self._spent else kind()

    def _catch_up(self) -> None:
        """Add up the rows that any process committed since the last call."""
        if self._spent.default_factory is not AdaptivelySpent and self.allows_any_choice():
            self._spent, self._last_read = defaultdict(AdaptivelySpent), 0
        for row in self._rows_after(self._last_read):
            self._spent[row.who].add(_checked(Charge(*row[:9])))
            self._last_read = row.seq

    def _rows_after(self, seq: int) -> Iterator[LedgerRow]:
        # In batches, because an unfinished read keeps this connection at an old state, from which it cannot write.
        while batch := self._ask(f"{_READ} FROM entries WHERE seq > ? ORDER BY seq LIMIT 1000", seq):
            yield from (LedgerRow(*fields) for fields in batch)
            seq = batch[-1][9]

    def _has(self, table: str) -> bool:
        return bool(self._ask("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", table))

    def _witness(self) -> tuple[int, str] | None:
        """The stored number of rows and last hash."""
        stored = self._ask("SELECT rows, head FROM witness") if self._has("witness") else []
        if not stored:
            return None
        rows, head = stored[0]
        return (rows if isinstance(rows, int) else -1, str(head))

    def _cut(self, seq: int, head: str) -> str:
        """A sentence if the witness contradicts this number and hash of the last row; otherwise empty."""
        witness = self._witness()
        if witness is None or witness == (seq, head):
            return ""
        return f"The witness counts {witness[0]} rows, but row {seq} is the last: rows were cut off or rewritten."

    def _last(self) -> tuple[int, str]:
        last = self._ask("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1")
        return last[0] if last else (0, GENESIS)

    def _ask(self, sql: str, *values: str | int) -> list[Any]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction that excludes all other processes from its first read on."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # after some errors SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite into `LedgerError` with a remedy."""
        try:
            yield
        except sqlite3.Error as error:
            remedy = _REMEDIES.get(_code(error), "repair it before the next release")
            raise LedgerError(f"ledger {self.path}: {error}; {remedy}.") from error


_mu = lru_cache(gaussian.mu)


def _code(error: sqlite3.Error) -> str:
    """The name of an error, such as SQLITE_BUSY, without its extended part."""
    return "_".join(str(getattr(error, "sqlite_errorname", "")).split("_")[:2])


def _checked(entry: Charge) -> Charge:
    """The charge with plain Python numbers; an error names what is wrong with it."""
    try:
        entry = entry._replace(
            round=operator.index(entry.round),
            sensitivity=float(entry.sensitivity)
            + 0.0,  # SQLite does not store the sign of -0.0, but the hash would include it
            std=float(entry.std) + 0.0,
            times=operator.index(entry.times),
            rate=float(entry.rate),
        )
    except (TypeError, ValueError) as error:
        raise SordinoError(f"entry {tuple(entry)}: {error}.") from error
    for name, fine, rule in (
        ("who", isinstance(entry.who, str) and entry.who != "", "must not be empty"),
        ("sensitivity", entry.sensitivity >= 0, "must be a number, 0 or more"),
        ("std", 0 <= entry.std < math.inf, "must be a finite number, 0 or more"),
        ("times", entry.times >= 1, "must be 1 or more"),
        ("rate", 0 < entry.rate <= 1, "must lie in (0, 1]"),
        (
            "sampler",
            entry.sampler in SAMPLERS if entry.rate < 1 else entry.sampler in ("", *events.EVENTS),
            "must name a sampler and an adjacency for which there is an account, or a registered mechanism",
        ),
    ):
        if not fine:
            raise SordinoError(f"{name}: {getattr(entry, name)!r} {rule} (query '{entry.query}' of '{entry.who}').")
    return entry


class Spent:
    """The total cost of somebody's charges, if their numbers were fixed before the first result was seen."""

    def __init__(self) -> None:
        self.square = 0.0  # mu squared, as if nothing were sampled
        # (sampler and adjacency, rate, sensitivity, std, mechanism, whose minibatches are counted together) -> times
        self.parts: dict[tuple[str, float, float, float, str, str], int] = {}
        self.gaussian = True  # all noise is Gaussian
        self.may_fail = 0  # releases whose bound may fail

    def copy(self) -> Self:
        other = type(self)()
        other.square, other.parts = self.square, dict(self.parts)
        other.gaussian, other.may_fail = self.gaussian, self.may_fail
        return other

    def add(self, entry: Charge) -> None:
        noise = events.noise_event(entry.mechanism, entry.sensitivity, entry.std)
        self.square += gaussian.mu_of([(noise.mu, 1.0, entry.times)]) ** 2
        self.gaussian &= noise.is_gaussian
        self.may_fail += entry.times * noise.may_fail
        sampler = " ".join(entry.sampler.split()[:2]) if entry.rate < 1 else ""
        # Epochs of an allocation begin with a run, so the minibatches of two runs, or of two queries, are no epoch.
        together = f"{entry.plan} {entry.query}" if sampler.startswith(Sampler.ALLOCATION) else ""
        key = (sampler, entry.rate, entry.sensitivity, entry.std, entry.mechanism, together)
        self.parts[key] = self.parts.get(key, 0) + entry.times

    def repeated(self, times: int) -> Spent:
        """The cost of the same charges so many times."""
        other = Spent()
        other.square, other.gaussian, other.may_fail = times * self.square, self.gaussian, times * self.may_fail
        for key, count in self.parts.items():
            if key[-1]:
                other.parts |= {(*key[:-1], f"{key[-1]} {copy}"): count for copy in range(times)}
            else:
                other.parts[key] = times * count
        return other

    def epsilon(self, delta: float) -> float:
        """The smallest bound on epsilon: for each adjacency, what was sampled under it counts as such."""
        adjacencies = {key[0].partition(" ")[2] for key in self.parts}
        if self.gaussian:
            adjacencies -= {""}
        return min([self._plain(delta), *(self._under(adjacency, delta) for adjacency in adjacencies)])

    def exceeds(self, mu: float, epsilon: float, delta: float) -> bool:
        """Whether the total exceeds a limit, which has this mu."""
        # If all noise is Gaussian, a small enough mu needs no further check.
        fits = self.gaussian and self.square <= mu * mu * (1 + MU_TOLERANCE)
        return not fits and self.epsilon(delta) > epsilon * (1 + MU_TOLERANCE)

    def left(self, epsilon: float, delta: float) -> float:
        """The largest epsilon of one more Gaussian release on all of the data within the limit; 0 if none fits."""
        whole = _mu(epsilon, delta)
        low, high = 0.0, whole  # mu of the release
        if self._closed_form:
            low = math.sqrt(max(0.0, whole * whole - self.square))
        elif self.epsilon(delta) <= epsilon:
            for _ in range(12):
                middle = (low + high) / 2
                after = self.copy()
                after.add(Charge("", 0, "", middle, 1.0, 1, ""))
                low, high = (low, middle) if after.exceeds(whole, epsilon, delta) else (middle, high)
        return gaussian.epsilon(low, delta) if low > 0 else 0.0

    @property
    def _closed_form(self) -> bool:
        """Whether the mu squared of releases add up to the total."""
        return self.gaussian and not self.sampled

    @property
    def sampled(self) -> bool:
        """Whether some release is about a sample."""
        return any(key[0] for key in self.parts)

    def is_part_of(self, other: Spent) -> bool:
        """Whether the other total holds each of these releases as often, or more often."""
        return all(times <= other.parts.get(key, 0) for key, times in self.parts.items())

    def _plain(self, delta: float) -> float:
        """Epsilon as if nothing were sampled: Gaussian DP, or concentrated DP where some noise is not Gaussian."""
        if self.gaussian:
            return gaussian.epsilon(math.sqrt(self.square), delta)
        return concentrated.epsilon(self.square / 2, delta, self.may_fail) if self.square < math.inf else math.inf

    def _under(self, adjacency: str, delta: float) -> float:
        """Epsilon with what was sampled under this adjacency as sampled; none of it if the adjacency is empty."""
        releases = []
        for (sampler_and_adjacency, rate, moved, std, mechanism, _), times in self.parts.items():
            sampler, _, its_adjacency = sampler_and_adjacency.partition(" ")
            sampled = (rate, Sampler(sampler)) if sampler and its_adjacency == adjacency else (1.0, Sampler.FULL)
            releases.append(events.Release("", moved, std, times, *sampled, mechanism=mechanism))
        # Each run reserves a share of its own delta for minibatches of random size that overflow their slots. All runs
        # together may need more than that share of this delta.
        may_overflow = (Sampler.POISSON, Sampler.ALLOCATION)
        drawn = sum(times for (name, *_), times in self.parts.items() if name.startswith(may_overflow))
        left = delta - drawn * MOST_OVERFLOW
        return events.epsilon(releases, left, Adjacency(adjacency or Adjacency.REPLACE_ONE)) if left > 0 else math.inf


class SpentByRuns(Spent):
    """The same, and the cost of each run by itself.

    If the numbers of a later run (rate, noise, number of releases) were chosen after looking at earlier results, the
    composition of samples by privacy loss distributions is not proved. `adaptive_epsilon` is: docs/proofs.md, "The
    ledger".
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, Spent] = {}  # in the order in which they were first charged

    def copy(self) -> Self:
        other = super().copy()
        other.runs = {plan: run.copy() for plan, run in self.runs.items()}
        return other

    def add(self, entry: Charge) -> None:
        super().add(entry)
        if entry.sensitivity > 0:  # what costs nothing is no run
            self.runs.setdefault(entry.plan, Spent()).add(entry._replace(plan=""))

    @property
    def covers_choice(self) -> bool:
        """Whether `epsilon` also holds if the numbers of later runs were chosen after looking at earlier results.

        It does if nothing is sampled, if only the first run is about samples, or if all runs are equal (the last one
        may not have ended).
        """
        first, *later = self.runs.values() or [Spent()]
        equal = all(run.parts == first.parts for run in later[:-1]) and all(run.is_part_of(first) for run in later[-1:])
        return equal or not any(run.sampled for run in later)

    def adaptive_epsilon(self, delta: float) -> float:
        """An epsilon that holds however the numbers of later runs were chosen.

        It is the smallest of four, each with a quarter of delta:

        - everything as if nothing were sampled;
        - `epsilon`, if only the first run is about samples;
        - as many copies of the first run as there are runs, if each run is a part of the first;
        - the sum over runs of their epsilons, run j with a part 1 / (j (j + 1)) of this delta.
        """
        part = delta / 4
        first, *later = self.runs.values() or [Spent()]
        bounds = [self._plain(part)]
        if not any(run.sampled for run in later):
            bounds.append(super().epsilon(part))
        if all(run.is_part_of(first) for run in later):
            bounds.append(first.repeated(len(self.runs)).epsilon(part))
        bounds.append(sum(run.epsilon(part / (j * (j + 1))) for j, run in enumerate(self.runs.values(), 1)))
        return min(bounds)


class AdaptivelySpent(SpentByRuns):
    """The cost in a ledger that allows for any choice of later runs (`Ledger.allow_any_choice`)."""

    def epsilon(self, delta: float) -> float:
        return self.adaptive_epsilon(delta)

    def exceeds(self, mu: float, epsilon: float, delta: float) -> bool:
        return self.epsilon(delta) > epsilon * (1 + MU_TOLERANCE)

    @property
    def _closed_form(self) -> bool:
        return False


def _chained(row: LedgerRow) -> str:
    """sha256 of the previous hash and every other field. Floats enter exactly, and types are distinguished."""
    fields = [["float", x.hex()] if isinstance(x, float) else x for x in row[:-1]]
    return hashlib.sha256(json.dumps(fields, default=lambda x: [repr(x)]).encode()).hexdigest()


def _sha256(payload: bytes | None) -> str:
    return "" if payload is None else hashlib.sha256(payload).hexdigest()


def _account_name(number: int) -> str:
    return f"account {number} {secrets.token_hex(16)}"


def _label(plan: str, who: str, round: int) -> str:
    return json.dumps([plan, who, operator.index(round)])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
