"""Which folder of a run may continue it: one, however often the folder is copied or put back.

A copy of an unfinished run could be continued beside the original. Each would release the rounds that follow with
noise of its own, and the run is charged once. So a register outside of the folder keeps a lease per run: a random
token, which changes at every start, and the number of rounds done. It is the shared ledger where the run has one,
otherwise a file in the user's state directory. The folder keeps the token too (`private/lease.json`).

- A folder that does not know the token of the register, or has done fewer rounds than the register counts, is refused.
- Before a round is shown, the register is asked again. A process whose lease was taken meanwhile stops, so that two
  copies never show the same round.
- The folder stores the next token before the register does, beside the present one, and either is accepted. So a kill
  between the two locks nobody out.

The register in the state directory is known to this user on this machine alone. A folder that is copied to another
machine and continued at both is not noticed, unless both charge one shared ledger. A run on data that everybody may see
has no lease, unless it is charged to a shared ledger.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from sordino import files
from sordino.errors import LedgerError, RolledBackError
from sordino.evidence.ledger import Lease, Ledger
from sordino.training.folder import RunFolder

FILE = "lease.json"  # in private/


class Register(Protocol):
    """Keeps the lease of each run outside of its folder. `Ledger` is one."""

    path: Path

    def lease(self, plan: str) -> Lease | None:
        """The lease of a run; None if there is none."""

    def pass_lease(self, plan: str, known: Collection[str], lease: Lease, *, durable: bool = True) -> bool:
        """Store a lease, in one step, if the stored one admits it."""


class StateRegister:
    """The register of one run, a file in the user's state directory.

    Args:
      plan: names the run.

    Raises:
      LedgerError: this user has no state directory, or it cannot be written.
    """

    def __init__(self, plan: str) -> None:
        name = hashlib.sha256(plan.encode()).hexdigest()[:32]
        try:
            self.path = files.state_folder() / "runs" / f"{name}.json"
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (RuntimeError, OSError) as error:
            raise _unwritable(error) from None

    def lease(self, plan: str) -> Lease | None:
        """The lease of the run; None if the file does not exist.

        Args:
          plan: the run that this register was made for.

        Raises:
          LedgerError: the file holds no lease.
        """
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return Lease(str(stored["token"]), int(stored["rounds"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"lease: '{self.path}' cannot be read ({error}); put it back, or mend its mode."
            ) from None

    def pass_lease(self, plan: str, known: Collection[str], lease: Lease, *, durable: bool = True) -> bool:
        """Store a lease if the stored one admits it.

        Args:
          plan: the run that this register was made for.
          known: tokens that the folder of the run knows.
          lease: the new lease.
          durable: wait for the disk.

        Returns:
          Whether it was stored.

        Raises:
          LedgerError: the file cannot be read or written.
        """
        try:
            with files.lock(self.path.parent / "lock"):
                stored = self.lease(plan)
                if stored is not None and not stored.admits(known, lease.rounds):
                    return False
                files.write(self.path, (json.dumps(lease._asdict()) + "\n").encode(), durable=durable)
        except OSError as error:
            raise _unwritable(error) from None
        return True


class HeldLease(NamedTuple):
    """The lease of a run that this process holds. `take` makes it."""

    register: Register
    plan: str
    token: str
    folder: RunFolder

    def keep(self, rounds: int) -> None:
        """Count rounds as done, before anything about the last one is shown.

        Args:
          rounds: how many rounds are done.

        Raises:
          RolledBackError: another folder took the lease.
        """
        if not self.register.pass_lease(self.plan, [self.token], Lease(self.token, rounds), durable=False):
            raise RolledBackError(
                f"lease: a copy of '{self.folder.root}' was resumed while this one was training, so this one stops; "
                f"round {rounds} of it was not shown. Continue the other copy, and delete this one."
            )


def take(folder: RunFolder, plan: str, rounds: int, register: Register) -> HeldLease:
    """Take the lease of a run for this folder. The caller holds the lock of the folder.

    Args:
      folder: the run's.
      plan: names the run.
      rounds: how many rounds the folder has done.
      register: where the lease is kept.

    Returns:
      The lease, under a new token, so that copies of the folder no longer have it.

    Raises:
      RolledBackError: the folder is a copy of one that was resumed since, or an older state of it.
      LedgerError: a file of the lease cannot be read or written.
    """
    known, stored = _known(folder), register.lease(plan)
    if stored is None and known and rounds and isinstance(register, Ledger):
        raise RolledBackError(
            f"resume: the ledger '{register.path}' knows no lease of '{folder.root}', which has done {rounds} rounds: "
            "it was put back to an older state. Put the newest ledger back."
        )
    if stored is not None and not stored.admits(known, rounds):
        raise _stale(folder, rounds, stored, register)
    token = secrets.token_hex(16)
    kept = known if stored is None else [stored.token]
    files.write(folder.private / FILE, (json.dumps([*kept, token]) + "\n").encode())
    if not register.pass_lease(plan, kept, Lease(token, rounds)):
        raise _stale(folder, rounds, register.lease(plan), register)
    return HeldLease(register, plan, token, folder)


def _known(folder: RunFolder) -> list[str]:
    """The tokens that the folder knows: the last one, and the next one that it meant to store."""
    path = folder.private / FILE
    try:
        return [str(token) for token in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise LedgerError(f"lease: '{path}' cannot be read ({error}); put it back, or start a new run.") from None


def _stale(folder: RunFolder, rounds: int, stored: Lease | None, register: Register) -> RolledBackError:
    done = rounds if stored is None else stored.rounds
    remedy = "Continue the folder that was resumed last, or start a new run."
    if not isinstance(register, Ledger):
        remedy += f" If this folder is that one, and was continued on another machine, delete '{register.path}'."
    return RolledBackError(
        f"resume: '{folder.root}' has done {rounds} rounds, and '{register.path}' counts {done} rounds of this run: "
        "the folder is a copy of one that was resumed since, or was put back to an older state. Its next rounds would "
        f"be released a second time, with other noise, on one charge. {remedy}"
    )


def _unwritable(error: Exception) -> LedgerError:
    return LedgerError(
        f"lease: the state directory of this user cannot be written ({error}); it tells copies of a run apart. Set "
        "XDG_STATE_HOME to a folder outside of the run that this user can write."
    )
