"""One ledger over several runs on the same data: `sordino run --ledger mine.db --limit 4`.

Every run has a ledger of its own. A shared ledger adds up the runs on the same data, and refuses a run that would
exceed its limit before anything is spent. Its accounts are named by a keyed hash of the data. The key lies beside the
ledger (`mine.db.key`, readable by its owner alone), so nobody without it can compare the ledger with data that they
guess.

The same data are the same records, however they are written (`data.identity`): a file, its copy in another format and
the same table as a frame in memory have one account, whatever a schema makes of their columns; so have the same arrays,
whatever their types. What this does not catch: a table with one record or one column more or less, with its records in
another order, or with other names of columns or labels is other data here and gets an account with the full limit,
although it tells of the same people. So does a table beside the same numbers as arrays, and the same ledger cannot tell
that `mine.db` and its key were put back to an older state. Add such runs up yourself, or name one ledger per population
and compare its total.

Scores on the records that a run held out for testing have no noise. If each run held out others, most records would be
exposed by one of them, whatever their account says. So all runs on the same data must hold out the same records.

A record may be at another client in another run. So a run is charged by a bound on every client: query by query the
largest sensitivity per noise, the largest sampling rate and the largest number of releases of any client. Where clients
have equal accounts, as without minibatches, this is exact. With minibatches and clients of very different sizes it is
well above what any client spends. The total bounds what all charged runs together reveal of one record (or of one
whole client, at client level), each to those whom its trust model names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import files
from sordino.core import Adjacency, Unit
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.evidence.spent import Charge
from sordino.privacy import spending
from sordino.privacy.accounting.events import Release
from sordino.privacy.plan import Plan

KEY_BYTES = 32


class SharedLedger(NamedTuple):
    """The account of some data in a ledger of several runs. `join` makes it."""

    path: Path
    who: str
    adjacency: Adjacency
    releases: tuple[Release, ...]  # of this run
    schedule: str = ""  # keyed hash of what its secret cohorts follow from; empty where cohorts are not secret
    tested: str = ""  # keyed hash of which records it held out for testing; empty where it publishes no score on any

    def charge(self, plan: str, *, must_exist: bool = False) -> None:
        """Charge this run, once.

        Args:
          plan: names the run; a run that was charged under this name is not charged again.
          must_exist: the run released something already, so that it must have been charged.

        Raises:
          OverspentError: the data would exceed the limit. Nothing was charged.
          SordinoError: a run that must have been charged was not, or an earlier run had the same secret cohorts.
        """
        with self.open() as ledger:
            if ledger.charged(plan, self.who, 0):
                return
            self._check_schedule(ledger)
            self._check_tested(ledger)
            if must_exist:
                raise SordinoError(
                    f"ledger: '{self.path}' does not hold the charge of this run, which has begun; put the ledger "
                    "that it began with back."
                )
            try:
                key = (f"schedule {self.schedule}", self.who, 0) if self.schedule else None
                ledger.charge(self._charges(plan), self.tested.encode() or None, key=key)
            except OverspentError as error:
                raise self._refusal(ledger, error) from None

    def open(self) -> Ledger:
        """The ledger, which also keeps the lease of each run (`training.leases`).

        Returns:
          The open ledger; the caller closes it.

        Raises:
          SordinoError: the ledger cannot be opened, or counts another adjacency.
        """
        return Ledger(self.path, adjacency=self.adjacency)

    def check(self, limit: tuple[float, float] | None = None) -> None:
        """Raise OverspentError if the ledger, with this further limit, cannot pay for this run."""
        with self.open() as ledger:
            self._check_schedule(ledger)
            self._check_tested(ledger)
            try:
                ledger.afford(self._charges("this run"), limit)
            except OverspentError as error:
                raise self._refusal(ledger, error, limit) from None

    def summary(self) -> dict[str, Any]:
        """What the data spent over all runs: epsilon, delta, the number of runs, and the limit (None without one).

        `caveat` is what epsilon assumes of how later runs were chosen; empty if nothing.
        """
        with self.open() as ledger:
            limits = ledger.limits()
            epsilon, delta = min(limits, default=(None, 1e-5))
            runs = len({row.plan for row in ledger.rows() if row.who == self.who})
            spent = ledger.spent_epsilon(self.who, delta)
            caveat = ledger.caveat(self.who)
            return {"epsilon": spent, "delta": delta, "runs": runs, "limit": epsilon, "caveat": caveat}

    def _check_schedule(self, ledger: Ledger) -> None:
        """Refuse the secret cohorts of an earlier run. Costs of runs add up as if each drew cohorts of its own: who was
        in the cohorts of one run would otherwise be in those of all."""
        if self.schedule and ledger.charged(f"schedule {self.schedule}", self.who, 0):
            raise SordinoError(
                f"schedule_seed: another run in '{self.path}' had the same secret cohorts, and both reveal more than "
                "their sum; leave schedule_seed out, and each run draws its own."
            )

    def _check_tested(self, ledger: Ledger) -> None:
        """Refuse other test records than those of earlier runs."""
        if self.tested and any(other != self.tested.encode() for other in ledger.payloads(self.who)):
            raise SordinoError(
                f"test_fraction, split_seed: runs in '{self.path}' held out other records of these data for testing, "
                "and no noise hides those in their scores; hold out the same ones, by the same test_fraction, "
                "split_seed, client column and person column. Another ledger would not count what was spent here."
            )

    def _charges(self, plan: str) -> list[Charge]:
        return [Charge.of(release, self.who, 0, plan, self.adjacency) for release in self.releases]

    def _refusal(
        self, ledger: Ledger, error: OverspentError, limit: tuple[float, float] | None = None
    ) -> OverspentError:
        left = ledger.left(self.who, limit)
        remedy = "no run fits into what is left" if not left else f"a run of ε = {_down(left)} still fits"
        return OverspentError(f"ledger {self.path}: {error} Without sampling, {remedy}.")


def join(
    plan: Plan,
    path: str | Path,
    limit: float | None = None,
    *,
    data: bytes,
    units: bytes = b"",
    tested: np.ndarray | None = None,
    reasons: list[str] | None = None,
    releases: tuple[Release, ...] | None = None,
) -> SharedLedger:
    """The account of a run's data in a shared ledger, which is created if it does not exist. Charges nothing.

    Args:
      plan: the plan of the run.
      path: the ledger.
      limit: the most epsilon that the runs on the same data may spend together, at the delta of the ledger's first
        limit, or else of the plan. A ledger keeps its limit, which can only be tightened.
      data: `records_digest`, `frame_digest` or `arrays_digest` of the data. It is keyed before it is written.
      units: what says which records are those of one person, or of one client, where these are protected: the name of
        a column, or `grouping`. It is keyed too. Epsilons of patients and of their visits do not add up.
      tested: places of the records that the run holds out of these data, and publishes scores on. It is keyed too.
      reasons: why the run is not certified; such a run has no cost that adds up.
      releases: what is charged (default: those of the plan, `worst_case`).

    Raises:
      SordinoError: the run is not certified, the limit is not a number above 0, the key of the ledger is missing, or
        the data were charged for another unit of privacy, for other persons or clients, or by runs that held out other
        records.
      OverspentError: the ledger cannot pay for the run.
    """
    path = Path(path).expanduser().absolute()
    if reasons:
        raise SordinoError(
            f"ledger: the run is not certified ({reasons[0]}), so that its cost is unknown; mend that, or leave the "
            "ledger out."
        )
    if limit is not None and not 0 < limit < float("inf"):
        raise SordinoError(f"limit: {limit} must be a number above 0, such as 4.")
    if path.is_dir():
        raise SordinoError(f"ledger: '{path}' is a folder; name a file, such as {path / 'mine.db'}.")
    with Ledger(path) as ledger:
        key = _key(path, new=not ledger.people())
        stored = ledger.limits()
        identity = hmac.new(key, data, "sha256").hexdigest()[:32]
        others = [who for who in ledger.people() if who.startswith(f"data {identity} ")]
    unit = str(plan.privacy.unit)
    who = f"data {identity} per {unit}"
    if units and plan.privacy.unit is not Unit.RECORD and who not in others:  # it is there in ledgers of before
        who += f" {hmac.new(key, units, 'sha256').hexdigest()[:16]}"
        if others and who not in others and others[0].startswith(f"data {identity} per {unit} "):
            raise SordinoError(
                f"unit: '{path}' counts other {unit}s of these data, by another column or other groups, and what one "
                f"{unit} spends does not add up with that; protect the same {unit}s. Another ledger would not count "
                "what was spent here."
            )
    if others and who not in others:
        level = others[0].partition(" per ")[2].split()[0]
        raise SordinoError(
            f"unit: '{path}' counts these data at {level} level, which does not add up with {unit} level; run with "
            f"--unit {level}. Another ledger would not count what was spent here."
        )
    charged = worst_case(plan) if releases is None else releases
    adjacency = plan.privacy.adjacency
    shared = SharedLedger(path, who, adjacency, charged, _schedule(plan, key), _tested(tested, key))
    if limit is None:
        shared.check()
    else:  # stored only if the run fits, because a stored limit cannot be loosened
        delta = stored[0][1] if stored else plan.privacy.delta
        shared.check((limit, delta))
        Ledger(path, epsilon=limit, delta=delta).close()
    return shared


def _schedule(plan: Plan, key: bytes) -> str:
    """The keyed hash of the seed of secret cohorts; empty where they are not secret."""
    if not plan.amplified:
        return ""
    return hmac.new(key, f"schedule {plan.schedule_seed}".encode(), "sha256").hexdigest()[:32]


def _tested(places: np.ndarray | None, key: bytes) -> str:
    """The keyed hash of the places of test records; empty where there are none."""
    if places is None:
        return ""
    return hmac.new(key, b"tested " + np.ascontiguousarray(places, "<i8").tobytes(), "sha256").hexdigest()[:32]


def grouping(numbers: np.ndarray) -> bytes:
    """What `join` is told of persons or clients that are given as numbers, one per record."""
    return hashlib.sha256(np.ascontiguousarray(numbers, "<i8").tobytes()).digest()


def persons_of(person: str | None, client: str, own_ids: bool) -> str:
    """Which persons a ledger counts: those of a column, or those whom each client of another column numbers itself."""
    return f"{person} per-client {client}" if own_ids else f"{person} global"


def worst_case(plan: Plan) -> tuple[Release, ...]:
    """Releases that cost at least what those of any client cost. With equal accounts they are those of a client.

    The cost of a release grows with sensitivity / std, with the rate and with the number of releases, so the largest of
    each, query by query, bounds every client.
    """
    worst: dict[str, Release] = {}
    for group in spending.groups(plan):
        for release in group.releases:
            known = worst.setdefault(release.query, release)
            std = min(known.std, release.std)
            ratio = max((r.sensitivity / r.std if r.std else float("inf")) for r in (known, release))
            larger = known if known.rate >= release.rate else release
            worst[release.query] = larger._replace(
                sensitivity=known.sensitivity if known[1:3] == release[1:3] else ratio * std,
                std=std,
                times=max(known.times, release.times),
            )
    return tuple(worst.values())


# ------------------------------------------------------------------------------------------------------- for resuming


def store(shared: SharedLedger) -> str:
    """What a run's directory keeps of its shared ledger."""
    return json.dumps({"ledger": str(shared.path), "who": shared.who}) + "\n"


def reopen(text: str, plan: Plan, tested: np.ndarray | None = None) -> SharedLedger:
    """The account that a run began with. tested: as in `join`."""
    stored = json.loads(text)
    path = Path(stored["ledger"])
    if not path.is_file():
        raise SordinoError(f"resume: the ledger '{path}' of this run is missing; put it back to where it was.")
    key = _key(path, new=False) if plan.amplified or tested is not None else b""
    hashes = _schedule(plan, key), _tested(tested, key)
    return SharedLedger(path, str(stored["who"]), plan.privacy.adjacency, worst_case(plan), *hashes)


# ------------------------------------------------------------------------------------------------ identity of the data


def file_digest(source: str) -> bytes:
    """Hash of a file's bytes, or of the name of a built-in or published data set. Not keyed: never write it."""
    path = Path(source).expanduser()
    if not path.is_file():
        return hashlib.sha256(b"name " + source.encode()).digest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _key(path: Path, *, new: bool) -> bytes:
    """The key of a ledger; a ledger without rows gets one."""
    file = path.with_name(path.name + ".key")
    if new and not file.exists():
        try:
            files.create(file, secrets.token_bytes(KEY_BYTES))
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise SordinoError(
                f"ledger: '{file}' cannot be written ({error.strerror}); choose another place."
            ) from None
    try:
        key = file.read_bytes()
    except OSError as error:
        raise SordinoError(
            f"ledger: the key '{file}' cannot be read ({error.strerror}), and without it nobody can tell which data "
            "were counted; put it back beside the ledger."
        ) from None
    if len(key) != KEY_BYTES:
        raise SordinoError(f"ledger: the key '{file}' has {len(key)} bytes, not {KEY_BYTES}; put the right one back.")
    if not files.is_private(file):
        raise SordinoError(f"ledger: others can read the key '{file}'; chmod 600 it.")
    return key


def _down(epsilon: float) -> str:
    """Rounded down to two digits behind the point, so that a run of this epsilon fits."""
    return f"{int(epsilon * (1 + 1e-9) * 100) / 100:g}" if epsilon >= 0.01 else f"{epsilon:.1g}"
