"""What was released, by whom, at what cost; durable; refuses before, not after.

A charge checks the limit and writes its rows together with the noised release, in one transaction that is on disk
before `charge` returns: whatever leaves a client has been paid for, and after a crash the same bytes are sent again
instead of fresh noise. The file is SQLite in WAL mode with synchronous=FULL, so that a committed row survives a power
cut (as far as the disk keeps what it says it has written).

Rows are only ever appended, and each carries the hash of the one before; beside them the file keeps a witness, the
number of rows and the last hash, so that rows cut from the end are missed. Whoever can write the file can forge chain
and witness together, but not a chain that ends in a hash already written into a certificate: keep `head()` and `len()`
elsewhere and hand them to `audit`.

`mark` notes how many rounds of a plan were stored: a run that was put back to an earlier round is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from sordino.core import Adjacency
from sordino.errors import LedgerError, OverspentError, SordinoError
from sordino.privacy.accounting import concentrated, events, gaussian
from sordino.privacy.accounting.subsampled import Sampler

SCHEMA = 2
GENESIS = hashlib.sha256(f"sordino ledger, schema {SCHEMA}".encode()).hexdigest()  # stands before the first row
MU_TOLERANCE = 1e-9  # relative, on mu squared: rounding may not refuse the last of a number of planned releases
SAMPLERS = ("poisson add-remove", "poisson replace-one", "fixed replace-one")
TIMEOUT = 30.0  # seconds to wait for another process that is writing
_APPLICATION = 0x536F7264  # marks the file as a ledger
_FIELDS = (
    "who, round, query, sensitivity, std, times, plan, rate, sampler, seq, time, key, payload_sha256, previous, hash"
)
_READ = f"SELECT {_FIELDS}"
_LATER = (  # tables that files of an earlier version lack
    "CREATE TABLE IF NOT EXISTS witness (rows INTEGER NOT NULL, head TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS progress (plan TEXT PRIMARY KEY, rounds INTEGER NOT NULL)",
)
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
    *(
        f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} BEGIN SELECT RAISE(ABORT, 'append-only'); END"
        for table in ("entries", "limits")
        for verb in ("UPDATE", "DELETE")
    ),
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
_REMEDIES = {
    "SQLITE_FULL": "free some disk space and try again",
    "SQLITE_BUSY": "another process holds it; let that one finish, or end it, and try again",
    "SQLITE_READONLY": "make the file and its directory writable for this user",
    "SQLITE_CANTOPEN": "check that the directory exists and is writable for this user",
    "SQLITE_NOTADB": "name a file that is a ledger, or one that does not exist yet",
    "SQLITE_CORRUPT": "restore the file from a backup, and audit() it against the last certificate",
}


class Charge(NamedTuple):
    """One Gaussian release, or `times` equal ones, about all of the data: mu² = times (sensitivity/std)². Or about a
    part drawn at `rate`, by the sampler and under the adjacency that `sampler` names, as in 'poisson add-remove'."""

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
        query, sensitivity, std, times, rate, sampler, mechanism = release
        if rate < 1 and mechanism != events.Gaussian.name:
            raise SordinoError(f"mechanism: no account is known of {mechanism} noise on a sample.")
        law = f"{sampler} {adjacency}" if rate < 1 else "" if mechanism == events.Gaussian.name else mechanism
        return Charge(who, round, query, sensitivity, std, times, plan, rate, law)

    @property
    def mechanism(self) -> str:
        """The name of the accounting event of its noise; what is sampled is Gaussian."""
        return self.sampler if self.rate == 1 and self.sampler else events.Gaussian.name


class LedgerRow(NamedTuple):
    """An entry as it was written. The first row of a charge carries its key and the hash of its payload."""

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
    key: str  # JSON of (plan, who, round) under which the payload is stored; "" on the other rows of a charge
    payload_sha256: str  # "" where there is none
    previous: str
    hash: str


class Ledger:
    """An append-only account of every release, with one (epsilon, delta) limit for each `who` over all plans.

    The limit is stored with the file: reopening it can tighten the limit, never loosen it. So is the adjacency, once it
    is named: sensitivities under one say nothing of the other. Processes may share a file; a Ledger belongs to the
    thread that opened it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: Adjacency | None = None,
    ) -> None:
        if (epsilon is None) != (delta is None):
            raise SordinoError("epsilon, delta: a limit needs both; leave out both to keep the stored one.")
        new_limit = None if epsilon is None or delta is None else (_mu(epsilon, delta), epsilon, delta)
        self.path = Path(path).absolute()
        self._spent: defaultdict[str, Spent] = defaultdict(Spent)  # by the rows up to `_seen`
        self._seen = 0
        try:
            # Only a new file is opened here: closing a second descriptor would drop the locks of a ledger in use.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: {error.strerror}; choose a path this user can write.") from error
        with self._explained():
            self._db = sqlite3.connect(self.path, timeout=TIMEOUT, isolation_level=None)
        try:
            self._prepare()
            if new_limit is not None:
                self._restrict(*new_limit)
            if adjacency is not None:
                self._settle(adjacency)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------------------------------------- paying for a release

    def afford(self, entries: Sequence[Charge]) -> None:
        """Raise OverspentError if these would take anyone over the limit; charge nothing."""
        self._affordable([_checked(entry) for entry in entries])

    def charge(
        self, entries: Sequence[Charge], payload: bytes | None = None, *, key: tuple[str, str, int] | None = None
    ) -> None:
        """Check the limit and write the entries with the noised release, all or nothing; then it may leave.

        The payload is stored under `key`, by default (plan, who, round) of the first entry. A (plan, who, round) that
        was charged before, as key or as entry, is refused: it is never counted twice and never noised anew.
        """
        entries = [_checked(entry) for entry in entries]
        if not entries:
            raise SordinoError("entries: there are none; a release that costs nothing is an entry of sensitivity 0.")
        rounds = [(entry.plan, entry.who, entry.round) for entry in entries]
        key = rounds[0] if key is None else key
        with self._transaction():
            for plan, who, round in dict.fromkeys([key, *rounds]):
                if self.charged(plan, who, round):
                    done = f"{who}, round {round} of plan '{plan}'"
                    raise OverspentError(f"{done}: already released; re-send the stored one.")
            self._affordable(entries)
            (seq, previous), now = self._last(), _now()
            if cut := self._cut(seq, previous):
                raise LedgerError(f"ledger {self.path}: {cut} Restore it from a backup before anything is released.")
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

    def mark(self, plan: str, rounds: int) -> None:
        """Note that so many rounds of the plan are stored. The number never falls. A power cut may lose the last ones,
        and then fewer are known to be stored than are: for this the drive is not waited for."""
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
        """How many rounds of the plan are stored, as far as `mark` was told."""
        rows = self._ask("SELECT rounds FROM progress WHERE plan = ?", plan) if self._has("progress") else []
        return int(rows[0][0]) if rows else 0

    def witnessed(self) -> bool:
        """Whether the file keeps a count of its rows; those of an earlier version do not, until they are charged."""
        return self._witness() is not None

    def release(self, plan: str, who: str, round: int) -> bytes | None:
        """The stored payload, to be sent again after a crash; None if there is none."""
        rows = self._ask("SELECT CAST(payload AS BLOB) FROM entries WHERE key = ?", _label(plan, who, round))
        return rows[0][0] if rows else None

    def charged(self, plan: str, who: str, round: int) -> bool:
        """Whether this was charged, as an entry or as the key of a payload."""
        by_round = "SELECT 1 FROM entries WHERE plan = ? AND who = ? AND round = ? LIMIT 1"
        by_key = "SELECT 1 FROM entries WHERE key = ?"
        return bool(self._ask(by_round, plan, who, round) or self._ask(by_key, _label(plan, who, round)))

    # ------------------------------------------------------------------------------------------------ what was written

    def spent(self, who: str) -> float:
        """mu of everything charged to `who`, as if all of it were about all of the data: exact where it was, for
        Gaussian releases compose by adding mu squared."""
        self._catch_up()
        return math.sqrt(self._spent.get(who, Spent()).square)

    def spent_epsilon(self, who: str, delta: float) -> float:
        self._catch_up()
        return self._spent.get(who, Spent()).epsilon(delta)

    def limits(self) -> list[tuple[float, float]]:
        """Every (epsilon, delta) that was ever set; all hold."""
        return [(epsilon, delta) for epsilon, delta in self._ask("SELECT epsilon, delta FROM limits ORDER BY seq")]

    def people(self) -> list[str]:
        return [who for (who,) in self._ask("SELECT DISTINCT who FROM entries ORDER BY who")]

    def rows(self) -> Iterator[LedgerRow]:
        return self._rows_after(0)

    def head(self) -> str:
        """Hash of the last row; GENESIS where there is none."""
        return self._last()[1]

    def __len__(self) -> int:
        return int(self._ask("SELECT count(*) FROM entries")[0][0])

    def __bool__(self) -> bool:
        return True  # `if ledger:` must not skip an empty one

    def audit(self, expect_head: str | None = None, expect_rows: int | None = None) -> list[str]:
        """One sentence for each problem; none if the chain is whole and reaches the head and length expected of it."""
        problems = []
        seq, previous, count, head_seen = 0, GENESIS, 0, expect_head in (None, GENESIS)
        try:
            for *fields, payload in self._db.execute(f"{_READ}, CAST(payload AS BLOB) FROM entries ORDER BY seq"):
                row = LedgerRow(*fields)
                if row.seq != seq + 1:
                    problems.append(f"Row {row.seq} follows row {seq}: the sequence has a gap.")
                if row.previous != previous:
                    problems.append(f"Row {row.seq} does not continue the row before it: the chain is broken.")
                if row.hash != _chained(row):
                    problems.append(f"Row {row.seq} does not match its hash: it was changed.")
                if row.payload_sha256 != _sha256(payload):
                    problems.append(f"Row {row.seq} has a payload that does not match its hash: it was changed.")
                seq, previous, count, head_seen = row.seq, row.hash, count + 1, head_seen or row.hash == expect_head
        except sqlite3.Error as error:
            problems.append(f"The file cannot be read beyond row {seq}: {error}.")
        if cut := self._cut(seq, previous):
            problems.append(cut)
        if expect_rows is not None and count < expect_rows:
            problems.append(f"There are {count} rows where {expect_rows} are expected: rows were cut off.")
        if not head_seen:
            problems.append(f"No row has the expected hash {expect_head}: rows were cut off or rewritten.")
        return problems

    # --------------------------------------------------------------------------------------------------------- within

    def _prepare(self) -> None:
        self._ask("PRAGMA synchronous = FULL")
        self._ask("PRAGMA fullfsync = ON")  # where a plain fsync leaves data in the drive's cache (macOS)
        self._new()  # a file that is no ledger is refused before it is changed
        with suppress(PermissionError):  # a copy may have come with another mode; only its owner can mend that
            os.chmod(self.path, 0o600)  # SQLite gives the same mode to the files beside it
        with self._explained():
            self._write_ahead()
        with self._transaction():
            for statement in _TABLES if self._new() else ():
                self._db.execute(statement)

    def _new(self) -> bool:
        """Whether the file is still empty; a file of another kind or schema is refused."""
        if not self._ask("SELECT 1 FROM sqlite_master LIMIT 1"):
            return True  # asked first: another process may be creating the ledger, all at once, between two questions
        ((application,),), ((version,),) = self._ask("PRAGMA application_id"), self._ask("PRAGMA user_version")
        if application != _APPLICATION:
            raise LedgerError(f"ledger {self.path}: this is a database of another kind; choose another path.")
        if version != SCHEMA:
            raise LedgerError(
                f"ledger {self.path}: it was written by schema {version}, and this version of Sordino reads schema "
                f"{SCHEMA}; open it with the version that wrote it."
            )
        return False

    def _write_ahead(self) -> None:
        # SQLite does not wait for a lock here, so two processes that create the same ledger would trip over each other.
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
                raise LedgerError(f"ledger {self.path}: this file system cannot hold it; choose a local disk.")
            return

    def _restrict(self, mu: float, epsilon: float, delta: float) -> None:
        with self._transaction():
            stored, *was = self._limit()
            if mu > stored * (1 + MU_TOLERANCE):
                raise LedgerError(
                    f"ledger {self.path}: its limit is epsilon {was[0]:g} at delta {was[1]:g}, and epsilon {epsilon:g} "
                    f"at delta {delta:g} is laxer. A limit may only be tightened; leave it out to keep the stored one."
                )
            if mu < stored * (1 - MU_TOLERANCE):
                row = (_now(), epsilon, delta)
                self._db.execute("INSERT INTO limits (time, epsilon, delta) VALUES (?, ?, ?)", row)

    def _settle(self, adjacency: Adjacency) -> None:
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS adjacency (word TEXT NOT NULL)")
            stored = [word for (word,) in self._db.execute("SELECT word FROM adjacency")]
            if not stored:
                self._db.execute("INSERT INTO adjacency VALUES (?)", (str(adjacency),))
            elif stored != [str(adjacency)]:
                raise SordinoError(
                    f"adjacency: ledger {self.path} adds up what is spent under {stored[0]}; {adjacency} is another "
                    "measure. Keep to the first, or to a ledger for each."
                )

    def _limit(self) -> tuple[float, float, float]:
        """(mu, epsilon, delta) of the strictest limit ever set."""
        limits = self._ask("SELECT epsilon, delta FROM limits")
        return min(((_mu(*limit), *limit) for limit in limits), default=(math.inf, math.inf, math.nan))

    def _affordable(self, entries: Sequence[Charge]) -> None:
        limits = [(_mu(*limit), *limit) for limit in self._ask("SELECT epsilon, delta FROM limits")]
        if not limits:
            return
        self._catch_up()
        after: dict[str, Spent] = {}
        for entry in entries:
            if entry.std == 0 and entry.sensitivity > 0:
                raise SordinoError(f"std: query '{entry.query}' of {entry.who} has no noise, and the ledger a limit.")
            after.setdefault(entry.who, self._spent.get(entry.who, Spent()).copy()).add(entry)
        for who, spent in after.items():
            for mu, epsilon, delta in limits:  # all that were ever set: sampled releases know no strictest one
                if not spent.exceeds(mu, epsilon, delta):
                    continue
                raise OverspentError(
                    f"{who}: this would bring epsilon to {spent.epsilon(delta):.6g} at delta "
                    f"{delta:g}; the limit is {epsilon:g}. Nothing was charged."
                )

    def _catch_up(self) -> None:
        """Add the rows that this or another process committed since the last look."""
        for row in self._rows_after(self._seen):
            self._spent[row.who].add(_checked(Charge(*row[:9])))
            self._seen = row.seq

    def _rows_after(self, seq: int) -> Iterator[LedgerRow]:
        # In batches: an unfinished read would pin this connection to an old state, from which it could not write.
        while batch := self._ask(f"{_READ} FROM entries WHERE seq > ? ORDER BY seq LIMIT 1000", seq):
            yield from (LedgerRow(*fields) for fields in batch)
            seq = batch[-1][9]

    def _has(self, table: str) -> bool:
        return bool(self._ask("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", table))

    def _witness(self) -> tuple[int, str] | None:
        stored = self._ask("SELECT rows, head FROM witness") if self._has("witness") else []
        if not stored:
            return None
        rows, head = stored[0]
        return (rows if isinstance(rows, int) else -1, str(head))

    def _cut(self, seq: int, head: str) -> str:
        """What the witness has against these as the last row's number and hash."""
        witness = self._witness()
        if witness is None or witness == (seq, head):
            return ""
        return f"The file counts {witness[0]} rows and ends with row {seq}: rows were cut off or rewritten."

    def _last(self) -> tuple[int, str]:
        last = self._ask("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1")
        return last[0] if last else (0, GENESIS)

    def _ask(self, sql: str, *values: str | int) -> list[Any]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, alone among all processes from the first read on."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            remedy = _REMEDIES.get(_code(error), "mend this before anything is released")
            raise LedgerError(f"ledger {self.path}: {error}; {remedy}.") from error


_mu = lru_cache(gaussian.mu)


def _code(error: sqlite3.Error) -> str:
    """SQLITE_BUSY and the like, without the extended part."""
    return "_".join(str(getattr(error, "sqlite_errorname", "")).split("_")[:2])


def _checked(entry: Charge) -> Charge:
    """The entry in plain Python numbers, or an error that names what is wrong with it."""
    try:
        entry = entry._replace(
            round=operator.index(entry.round),
            sensitivity=float(entry.sensitivity) + 0.0,  # SQLite does not keep the sign of -0.0, the hash would
            std=float(entry.std) + 0.0,
            times=operator.index(entry.times),
            rate=float(entry.rate),
        )
    except (TypeError, ValueError) as error:
        raise SordinoError(f"entry {tuple(entry)}: {error}.") from error
    for name, fine, rule in (
        ("who", isinstance(entry.who, str) and entry.who != "", "must name somebody"),
        ("sensitivity", entry.sensitivity >= 0, "must be a number, 0 or more"),
        ("std", 0 <= entry.std < math.inf, "must be a finite number, 0 or more"),
        ("times", entry.times >= 1, "must be 1 or more"),
        ("rate", 0 < entry.rate <= 1, "must lie in (0, 1]"),
        (
            "sampler",
            entry.sampler in SAMPLERS if entry.rate < 1 else entry.sampler in ("", *events.EVENTS),
            "must name a sampler and an adjacency it is bounded for, or a registered mechanism",
        ),
    ):
        if not fine:
            raise SordinoError(f"{name}: {getattr(entry, name)!r} {rule} (query '{entry.query}' of '{entry.who}').")
    return entry


class Spent:
    """What somebody's entries amount to."""

    def __init__(self) -> None:
        self.square = 0.0  # mu squared, of all as if nothing had been sampled
        self.parts: dict[tuple[str, float, float, float], int] = {}  # (sampler, rate, sensitivity, std) -> times
        self.gaussian = True  # all noise is Gaussian
        self.may_fail = 0  # releases whose bound may fail

    def copy(self) -> Spent:
        other = Spent()
        other.square, other.parts = self.square, dict(self.parts)
        other.gaussian, other.may_fail = self.gaussian, self.may_fail
        return other

    def add(self, entry: Charge) -> None:
        noise = events.noise_event(entry.mechanism, entry.sensitivity, entry.std)
        self.square += gaussian.mu_of([(noise.mu, 1.0, entry.times)]) ** 2
        self.gaussian &= noise.is_gaussian
        self.may_fail += entry.times * noise.may_fail
        sampler = entry.sampler if entry.rate < 1 else ""
        key = (sampler, entry.rate, entry.sensitivity, entry.std)
        self.parts[key] = self.parts.get(key, 0) + entry.times

    def epsilon(self, delta: float) -> float:
        """The least that follows when one sampler's entries count as sampled, and all others as if they were not."""
        if not self.gaussian:  # all of it as concentrated DP, as if nothing had been sampled
            return concentrated.epsilon(self.square / 2, delta, self.may_fail) if self.square < math.inf else math.inf
        plain = gaussian.epsilon(math.sqrt(self.square), delta)
        return min([plain, *(self._with(name, delta) for name in {key[0] for key in self.parts} - {""})])

    def exceeds(self, mu: float, epsilon: float, delta: float) -> bool:
        # Where all noise is Gaussian, a small enough mu needs no further check.
        fits = self.gaussian and self.square <= mu * mu * (1 + MU_TOLERANCE)
        return not fits and self.epsilon(delta) > epsilon * (1 + MU_TOLERANCE)

    def _with(self, name: str, delta: float) -> float:
        sampler, adjacency = name.split()
        releases = [
            events.Release("", moved, std, times, *((rate, Sampler(sampler)) if its == name else ()))
            for (its, rate, moved, std), times in self.parts.items()
        ]
        return events.epsilon(releases, delta, Adjacency(adjacency))


def _chained(row: LedgerRow) -> str:
    """sha256 over the previous hash and every other field; floats exactly, types kept apart."""
    fields = [["float", x.hex()] if isinstance(x, float) else x for x in row[:-1]]
    return hashlib.sha256(json.dumps(fields, default=lambda x: [repr(x)]).encode()).hexdigest()


def _sha256(payload: bytes | None) -> str:
    return "" if payload is None else hashlib.sha256(payload).hexdigest()


def _label(plan: str, who: str, round: int) -> str:
    return json.dumps([plan, who, operator.index(round)])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
