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
`pass_lease` does so in a ledger of several runs, and also stores which copy of the run may do the next ones.

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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from sordino.core import Adjacency, Unit
from sordino.errors import LedgerError, OverspentError, SordinoError
from sordino.evidence.spent import (
    MU_TOLERANCE,
    RESERVED,
    REST,
    SAMPLERS,
    Charge,
    Choice,
    Spent,
    SpentByRuns,
    limit_mu,
)
from sordino.privacy.accounting import events

SCHEMA = 2
GENESIS = hashlib.sha256(f"sordino ledger, schema {SCHEMA}".encode()).hexdigest()  # the hash before the first row
NEW_ACCOUNT = "new account"  # the query of the row that opens an account
SURVIVORS = "survivors"  # the query of the row that holds the survivors of a masked round
ANY_CHOICE = "any choice"  # the query of the row that lets minibatches count after a first run without them
FIXED_PLAN = "fixed plan"  # the query of the row that states that the numbers of all runs were fixed beforehand
STATEMENTS = (ANY_CHOICE, FIXED_PLAN)  # queries of rows about the whole ledger
NOTES = (NEW_ACCOUNT, SURVIVORS, *STATEMENTS)  # queries of rows that release nothing
ACCOUNTS = "accounts"  # the plan of the rows that open accounts
EVERYBODY = "everybody"  # who the rows about the whole ledger speak of
TIMEOUT = 30.0  # seconds to wait for another process that is writing
_APPLICATION = 0x536F7264  # marks the file as a ledger
_FIELDS = (
    "who, round, query, sensitivity, std, times, plan, rate, sampler, seq, time, key, payload_sha256, previous, hash"
)
_READ = f"SELECT {_FIELDS}"
_LATER = (  # tables that files of earlier versions do not have
    "CREATE TABLE IF NOT EXISTS witness (rows INTEGER NOT NULL, head TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS progress (plan TEXT PRIMARY KEY, rounds INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS leases (plan TEXT PRIMARY KEY, token TEXT NOT NULL, rounds INTEGER NOT NULL)",
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

    @property
    def is_release(self) -> bool:
        """Whether the row belongs to a release, and is neither a note nor the reservation of a whole run."""
        return self.query not in NOTES and self.round != RESERVED


class Account(NamedTuple):
    """Who pays, since when, and why the account was opened."""

    who: str
    time: str  # ISO 8601, UTC
    why: str


class Lease(NamedTuple):
    """The right to do the next rounds of a plan, which whoever knows the token has."""

    token: str
    rounds: int  # done so far

    def admits(self, known: Collection[str], rounds: int) -> bool:
        """Whether one who knows these tokens and has done so many rounds may go on."""
        return self.token in known and rounds >= self.rounds


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
        new_limit = None if epsilon is None or delta is None else (limit_mu(epsilon, delta), epsilon, delta)
        self.path = Path(path).absolute()
        self._spent: dict[str, SpentByRuns] = {}  # the sum of the rows up to `_last_read`
        self._last_read, self._choice = 0, Choice.ANY
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

    def reserve(self, entries: Sequence[Charge]) -> bool:
        """Charge a whole run with minibatches when it starts, before its first release. Its rounds then use this up.

        So a run that is stopped early, because of its own results or not, costs as much as the whole run. Nothing is
        written for a run without minibatches, which pays round by round, or for one that has begun.

        Args:
          entries: the charges of all rounds of the run.

        Returns:
          Whether something was written.

        Raises:
          OverspentError: the whole run does not fit into a limit.
        """
        whole: dict[Charge, int] = {}
        for entry in (_checked(entry) for entry in entries if entry.sensitivity > 0):
            if self._ask("SELECT 1 FROM entries WHERE plan = ? AND who = ? LIMIT 1", entry.plan, entry.who):
                return False
            kind = entry._replace(round=RESERVED, times=1)
            whole[kind] = whole.get(kind, 0) + entry.times
        if not any(kind.rate < 1 for kind in whole):
            return False
        self.charge([kind._replace(times=times) for kind, times in whole.items()])
        return True

    def reserved(self, plan: str, who: str) -> bool:
        """Whether the whole run was charged when it started."""
        return bool(
            self._ask("SELECT 1 FROM entries WHERE plan = ? AND who = ? AND round = ? LIMIT 1", plan, who, RESERVED)
        )

    def _committed(self) -> None:
        """Called when charges are on disk, before `charge` returns."""

    def mark(self, plan: str, rounds: int) -> None:
        """Store how many rounds of the plan are done. The number never decreases.

        This does not wait for the disk, so a power cut may lose the last numbers; the stored one is then too small.

        Args:
          plan: the plan.
          rounds: how many of its rounds are done.
        """
        with self._transaction(durable=False):
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

    def pass_lease(self, plan: str, known: Collection[str], lease: Lease, *, durable: bool = True) -> bool:
        """Store who may do the next rounds of a plan, in one step, if the stored lease admits it.

        Args:
          plan: the plan.
          known: the tokens that the caller knows. The first lease of a plan needs none.
          lease: the new lease.
          durable: wait for the disk. Without that, a power cut may bring the lease before this one back.

        Returns:
          Whether it was stored.

        Raises:
          LedgerError: the file cannot be written.
        """
        with self._transaction(durable=durable):
            for statement in _LATER:
                self._db.execute(statement)
            stored = self.lease(plan)
            if stored is not None and not stored.admits(known, lease.rounds):
                return False
            self._db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (plan, *lease))
        return True

    def lease(self, plan: str) -> Lease | None:
        """Who may do the next rounds of the plan, according to `pass_lease`; None if nobody took it.

        Args:
          plan: the plan.

        Returns:
          The lease.

        Raises:
          LedgerError: the file cannot be read.
        """
        rows = self._ask("SELECT token, rounds FROM leases WHERE plan = ?", plan) if self._has("leases") else []
        return Lease(*rows[0]) if rows else None

    def witnessed(self) -> bool:
        """Whether the file has a witness. Files of earlier versions get one with the next charge."""
        return self._witness() is not None

    def release(self, plan: str, who: str, round: int) -> bytes | None:
        """The stored payload, to send again after a crash; None if there is none."""
        rows = self._ask("SELECT CAST(payload AS BLOB) FROM entries WHERE key = ?", _label(plan, who, round))
        return rows[0][0] if rows else None

    def payloads(self, who: str) -> list[bytes]:
        """What was stored with the charges of somebody, in their order."""
        rows = self._ask("SELECT CAST(payload AS BLOB) FROM entries WHERE who = ? AND payload IS NOT NULL", who)
        return [payload for (payload,) in rows]

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

    def unpaid(self, entries: Sequence[Charge]) -> list[Charge]:
        """Those of the charges whose (plan, who, round) was not charged yet."""
        return [entry for entry in entries if not self.charged(entry.plan, entry.who, entry.round)]

    # ------------------------------------------------------------------------------------------------- a site's account

    def account(self) -> str:
        """The account that pays for all data of a site: the one opened last. A new ledger gets its first one here.

        Its name holds 128 random bits, so that the hashes of the chain can be published.

        Raises:
          LedgerError: the ledger has charges, but no account; they would not count against a new one.
        """
        if known := self.accounts():
            return known[-1].who
        if self.people():
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

    def spent_epsilon(
        self, who: str, delta: float, promised: Sequence[Charge] = (), *, rows: int | None = None
    ) -> float:
        """Epsilon of everything charged to `who`, at a delta, and of charges that were promised.

        rows: of the first so many rows alone, as it was when the ledger had no more; None for all.
        """
        if rows is not None:
            with Ledger(self.path, read_only=True) as before:
                before._catch_up(rows)
                return before._after(who, promised).epsilon(delta)
        self._catch_up()
        return self._after(who, promised).epsilon(delta)

    def adaptive_epsilon(self, who: str, delta: float) -> float:
        """The same without a statement that all runs were fixed beforehand: however later runs were chosen."""
        self._catch_up()
        spent = self._spent_by(who).copy()
        spent.choice = Choice.ANY if spent.choice is Choice.FIXED else spent.choice
        return spent.epsilon(delta)

    def caveat(self, who: str) -> str:
        """What follows `spent_epsilon` in a sentence where it does not hold for any choice; otherwise empty."""
        self._catch_up()
        return "".join(self._spent_by(who).caveats)

    def choice(self, who: str) -> Choice:
        """What the account of `who` assumes of how later runs are chosen."""
        self._catch_up()
        return self._spent_by(who).choice

    def allow_any_choice(self, *, beforehand: bool = False) -> None:
        """From now on, count minibatches as such also where the first run has none.

        Said before the first run of an account, limits hold as they stand. Said later, that is itself a choice made
        after looking, and the limits of accounts whose first run has no minibatches hold at a delta that is larger by
        a share REST. It cannot be taken back.

        Args:
          beforehand: say it only if no limit then holds at a larger delta.

        Raises:
          SordinoError: a person stated that the numbers of all runs are fixed beforehand, or `beforehand` is asked for
            and it is too late.
        """
        if beforehand and (problem := self.too_late_for_any_choice()):
            raise SordinoError(problem)
        self._state(ANY_CHOICE, ANY_CHOICE)

    def too_late_for_any_choice(self) -> str:
        """Why `allow_any_choice` cannot be said beforehand; empty if it can, or if it was said."""
        stated = [kind for _, kind, _ in self.statements()]
        if FIXED_PLAN in stated:
            return (
                f"any_choice: in ledger {self.path} a person stated that the numbers of all runs are fixed beforehand, "
                "which cannot be taken back; remove the key."
            )
        self._catch_up()
        if not any(spent.as_if_unsampled for spent in self._spent.values()):
            return ""
        return (
            f"any_choice: ledger {self.path} has a first run without minibatches, so it is too late to say it "
            f"beforehand. Remove the key; or say it with `sordino ledger any-choice {self.path}`, and limits hold at a "
            f"delta that is larger by {REST:.2%}."
        )

    def state_fixed_plan(self, why: str) -> None:
        """State that the numbers of all runs were fixed before the first result was seen. Only a person knows that.

        From now on, runs with minibatches are composed by privacy loss distributions, which costs less and is proved
        only under this assumption. The reason stays in the chain.

        Args:
          why: where the numbers are written down, such as 'protocol of 3 March, section 2'.

        Raises:
          SordinoError: there is no reason, or limits were promised to hold for any choice.
        """
        if not why.strip():
            raise SordinoError("reason: it is empty; say where the numbers of all runs were fixed.")
        self._state(FIXED_PLAN, f"{FIXED_PLAN}: {why.strip()}")

    def statements(self) -> list[tuple[str, str, str]]:
        """(time, kind, text) of what persons stated about the whole ledger."""
        marks = ", ".join("?" * len(STATEMENTS))
        rows = self._ask(f"SELECT time, query, plan FROM entries WHERE query IN ({marks}) ORDER BY seq", *STATEMENTS)
        earlier = self._ask("SELECT time FROM any_choice") if self._has("any_choice") else []
        return [*((time, ANY_CHOICE, ANY_CHOICE) for (time,) in earlier), *rows]

    def _state(self, kind: str, text: str) -> None:
        """Write a statement about the whole ledger into the chain, once."""
        known = {kind for _, kind, _ in self.statements()}
        if kind in known:
            return
        if known:
            raise SordinoError(
                f"ledger {self.path}: a person stated '{known.pop()}' before, which cannot be taken back; use another "
                "ledger for other data."
            )
        self.charge([Charge(EVERYBODY, 0, kind, 0.0, 1.0, 1, text)])

    def left(
        self,
        who: str,
        limit: tuple[float, float] | None = None,
        shares: Sequence[float] = (1.0,),
        promised: Sequence[Charge] = (),
    ) -> float | None:
        """The largest epsilon of further releases without sampling that fit into every limit.

        Args:
          who: who pays.
          limit: a further (epsilon, delta), which is not stored.
          shares: one further run per number, its part of mu squared; by default one run.
          promised: charges that come before the further runs, and are not written yet.

        Returns:
          The epsilon of all further runs together, at the delta of the limit; 0 if none fits, None without a limit.
        """
        self._catch_up()
        spent = self._after(who, promised)
        limits = [*self.limits(), *([limit] if limit else [])]
        return min((spent.left(*each, shares) for each in limits), default=None)

    def limits(self) -> list[tuple[float, float]]:
        """Every (epsilon, delta) that was ever set; all of them hold."""
        return [(epsilon, delta) for epsilon, delta in self._ask("SELECT epsilon, delta FROM limits ORDER BY seq")]

    def people(self) -> list[str]:
        """Everybody who was charged, sorted."""
        marks = ", ".join("?" * len(STATEMENTS))
        people = f"SELECT DISTINCT who FROM entries WHERE query NOT IN ({marks}) ORDER BY who"
        return [who for (who,) in self._ask(people, *STATEMENTS)]

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
        new = self._new()  # refuses a file that is no ledger before anything changes it
        with suppress(PermissionError):  # a copied file may have another mode; only its owner can change it
            os.chmod(self.path, 0o600)  # SQLite gives the same mode to the files beside it
        with self._explained():
            self._write_ahead()
        if not new:
            return
        with self._transaction():
            for statement in _TABLES if self._new() else ():  # another process may have been faster
                self._db.execute(statement)

    def _open_to_read(self) -> None:
        """Open the file without changing it or its folder.

        SQLite keeps what was not yet moved into the file in `-wal`, and needs `-shm` beside it to read that. Without a
        `-wal` nobody writes and the file is whole, and `immutable` makes SQLite create neither. While another process
        has the ledger open both are there, and `-wal` may be empty. A read-only copy of a run that was killed has only
        the `-wal`; SQLite then reads a temporary copy of both.
        """
        journal = self.path.with_name(self.path.name + "-wal")
        whole = not journal.exists()
        with self._explained():
            try:
                self._connect_to_read(self.path, "&immutable=1" if whole else "")
            except sqlite3.OperationalError:
                if whole or not journal.exists():
                    raise
                self._copy = tempfile.TemporaryDirectory()
                for path in (self.path, journal):
                    with suppress(FileNotFoundError):  # whoever wrote has just closed the ledger
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
        stored = self._limit()[0]
        if stored * (1 - MU_TOLERANCE) <= mu <= stored * (1 + MU_TOLERANCE):
            return  # nothing to write: other processes need not wait
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
        if not (stored := self._settled(what)):
            with self._transaction():
                self._db.execute(f"CREATE TABLE IF NOT EXISTS {what} (word TEXT NOT NULL)")
                if not (stored := self._settled(what)):  # another process may have been faster
                    self._db.execute(f"INSERT INTO {what} VALUES (?)", (str(word),))
                    return
        if stored != [str(word)]:
            raise SordinoError(
                f"{what}: ledger {self.path} counts costs under {stored[0]}, which do not add up with costs under "
                f"{word}. Use {stored[0]}, or another ledger."
            )

    def _settled(self, what: Literal["adjacency", "unit"]) -> list[str]:
        return [word for (word,) in self._ask(f"SELECT word FROM {what}")] if self._has(what) else []

    def _limit(self) -> tuple[float, float, float]:
        """(mu, epsilon, delta) of the strictest limit ever set."""
        limits = self._ask("SELECT epsilon, delta FROM limits")
        return min(((limit_mu(*limit), *limit) for limit in limits), default=(math.inf, math.inf, math.nan))

    def _affordable(self, entries: Sequence[Charge], further: tuple[float, float] | None = None) -> None:
        """Raise OverspentError if the charges exceed a limit."""
        limits = [(limit_mu(*limit), *limit) for limit in (*self.limits(), *([further] if further else []))]
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
            if spent.overused:
                raise OverspentError(
                    f"{who}: run '{min(spent.overused)}' would release more than it reserved at its start. Nothing was "
                    "charged. Start another run for further rounds."
                )
            for mu, epsilon, delta in limits:  # all limits, because none is strictest for sampled releases
                if not spent.exceeds(mu, epsilon, delta):
                    continue
                raise OverspentError(
                    f"{who}: this would bring epsilon to {spent.epsilon(delta):.6g} at delta "
                    f"{delta:g}; the limit is {epsilon:g}. Nothing was charged.{_remedy(spent, delta)}"
                )

    def _spent_by(self, who: str) -> SpentByRuns:
        """What the rows read so far cost, without an entry for somebody who was never charged."""
        return self._spent[who] if who in self._spent else SpentByRuns(self._choice)

    def _after(self, who: str, entries: Sequence[Charge]) -> SpentByRuns:
        """What the rows read so far cost, together with the charges of `who` among `entries`."""
        spent = self._spent_by(who).copy()
        for entry in entries:
            if entry.who == who:
                spent.add(_checked(entry))
        return spent

    def _catch_up(self, until: float = math.inf) -> None:
        """Add up the rows that any process committed since the last call, up to number `until`."""
        earlier = [time for (time,) in self._ask("SELECT time FROM any_choice")] if self._has("any_choice") else []
        for row in self._rows_after(self._last_read):
            if row.seq > until:
                break
            if row.query in STATEMENTS:
                self._hear(row.query)
            elif earlier and self._choice is Choice.ANY and row.time > earlier[0]:  # said in a file of before
                self._hear(ANY_CHOICE)
            if row.query not in STATEMENTS:
                self._spent.setdefault(row.who, SpentByRuns(self._choice)).add(_checked(Charge(*row[:9])))
            self._last_read = row.seq
        if earlier and self._choice is Choice.ANY:
            self._hear(ANY_CHOICE)

    def _hear(self, statement: str) -> None:
        """Count accounts as a person stated."""
        self._choice = Choice.FIXED if statement == FIXED_PLAN else Choice.MIXED
        for spent in self._spent.values():
            late = self._choice is Choice.MIXED and spent.runs
            spent.choice = Choice.LATE if late else self._choice

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
    def _transaction(self, *, durable: bool = True) -> Iterator[None]:
        """A transaction that excludes all other processes from its first read on. durable: it waits for the disk."""
        with self._explained():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # after some errors SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._db.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite into `LedgerError` with a remedy."""
        try:
            yield
        except sqlite3.Error as error:
            remedy = _REMEDIES.get(_code(error), "repair it before the next release")
            raise LedgerError(f"ledger {self.path}: {error}; {remedy}.") from error


def _remedy(spent: SpentByRuns, delta: float) -> str:
    """What may be done about a refusal, if it is due to how runs with minibatches or with other noise count."""
    if spent.unproved:
        return (
            " Noise that is accounted for as concentrated DP and is no function of Gaussian noise must be in the first "
            "round of a ledger, because the account may not change after results were seen."
        )
    if not spent.sampled or spent.choice is Choice.FIXED:
        return ""
    fixed = (
        f" If the rate, noise and rounds of all runs were fixed before the first result was seen, state that with "
        f"`sordino ledger fixed-plan`: epsilon is then {Spent.epsilon(spent, delta):.4g}."
    )
    if not spent.as_if_unsampled:
        return fixed if len(spent.runs) > 1 else ""
    return (
        " Minibatches count as if they held all records, because the first run had none. `sordino ledger any-choice` "
        f"counts them as minibatches, at a delta that is larger by {REST:.2%}; before the first run it costs nothing."
        f"{fixed}"
    )


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
