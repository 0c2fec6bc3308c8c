"""What a site remembers of its ledger outside of its folder, so that an older copy of the folder is noticed.

The witness is a small file in the user's state directory, or where site.toml's `witness` says. It holds the number of
rows of the ledger and the hash of the last one, and is written after every charge, before the reply leaves. A ledger
with fewer rows, or with another row in that place, was put back to an older state or rewritten: the site then refuses
every message.

Receipts hold the same, signed by the site. The coordinator keeps the newest one of every site and shows it at the next
hello, so that a site whose witness was lost too notices an older ledger.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sordino import files
from sordino.errors import LedgerError, RolledBackError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.evidence.signing import Signer, canonical
from sordino.evidence.spent import Charge
from sordino.federation.config import SiteConfig
from sordino.secagg import Identity

PURPOSE = b"sordino receipt, format 1\0"  # none of the other messages that a site signs starts with these bytes
RECEIPTS = "receipts.json"  # in the coordinator's folder
MOST_ROWS = 2**53
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Mark(NamedTuple):
    """A state that the ledger has reached: at least `rows` rows, and row `at` has the hash `head`."""

    rows: int
    at: int
    head: str

    @staticmethod
    def read(fields: Any) -> Mark | None:
        """The mark that a JSON document holds; None if it holds none."""
        if not isinstance(fields, Mapping):
            return None
        rows, at, head = (fields.get(key) for key in Mark._fields)
        if type(rows) is not int or type(at) is not int or not (isinstance(head, str) and _HEX.fullmatch(head)):
            return None
        return Mark(rows, at, head) if 0 <= at <= rows < MOST_ROWS else None

    def after(self, rows: int) -> Mark:
        """The state that so many more rows lead to, whose last hash is not known yet."""
        return self._replace(rows=self.rows + rows)

    def within(self, ledger: Ledger) -> bool:
        """Whether the ledger has reached this state."""
        return (self.rows == 0 or ledger.hash_of(self.rows) is not None) and ledger.hash_of(self.at) == self.head


COPIED = (
    "Restore the newest ledger: if this folder is a copy and the original answered since, use the original, or bring "
    "its newest ledger.db here and never start the original again. If none is left, make a new folder with new keys "
    "(`sordino federate keys`), and count what was spent before by hand."
)


class SiteLedger(Ledger):
    """A ledger with a witness: it is compared when it is opened, and moved forward with every charge.

    Raises:
      RolledBackError: the ledger is older than its witness.
    """

    def __init__(self, path: Path, witness: Path, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.witness = witness
        try:
            self._compare()
        except BaseException:
            self.close()
            raise

    def _committed(self) -> None:
        self._compare()

    def note(self, entry: Charge, payload: bytes) -> None:
        """Write a row that releases nothing into the chain, unless it is there already."""
        if not self.charged(entry.plan, entry.who, entry.round):
            self.charge([entry], payload)

    def state(self) -> Mark:
        """The present state of the ledger."""
        rows, head = self._last()
        return Mark(rows, rows, head)

    def _compare(self) -> None:
        """Compare the ledger with the witness, and move the witness forward if the ledger is ahead."""
        if problem := older(self, self.witness):
            raise RolledBackError(problem)
        state = self.state()
        if state.rows and read(self.witness) != state:
            write(self.witness, state)


# -------------------------------------------------------------------------------------------------------- the witness


def witness_path(config: SiteConfig) -> Path:
    """Where the witness of a site lies: `witness` of site.toml, or a file named by the site's key in the state
    directory of this user ($XDG_STATE_HOME, ~/.local/state)."""
    if config.witness is not None:
        return config.path(config.witness)
    try:
        return state_path(bytes.fromhex(Identity.load(config.path(config.identity)).card.sign))
    except (SordinoError, OSError):  # without a key of its own, the site is known by the place of its ledger
        return state_path(str(config.path(config.ledger).resolve()).encode())


def state_path(about: bytes) -> Path:
    """The witness of a site with this key, in the state directory of this user."""
    try:
        folder = files.state_folder()
    except RuntimeError:
        raise LedgerError("witness: this user has no home directory; set witness in site.toml to a file.") from None
    return folder / "witness" / f"{hashlib.sha256(about).hexdigest()[:32]}.json"


def read(path: Path) -> Mark | None:
    """The stored state; None if there is no witness.

    Raises:
      LedgerError: the file is not a witness.
    """
    try:
        mark = Mark.read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LedgerError(f"witness {path}: it cannot be read ({error}); put it back, or mend its mode.") from None
    if mark is None:
        raise LedgerError(f"witness {path}: it does not hold rows, at and head; put it back.")
    return mark


def write(path: Path, mark: Mark) -> None:
    """Store a state, readable by its owner alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write(path, (json.dumps(mark._asdict()) + "\n").encode())
    except OSError as error:
        raise LedgerError(
            f"witness {path}: it cannot be written ({error.strerror}); set witness in site.toml to a file outside of "
            "the site's folder that this user can write."
        ) from None


def older(ledger: Ledger, path: Path) -> str:
    """A sentence if the ledger is older than its witness; otherwise empty."""
    mark = read(path)
    if mark is None or mark.within(ledger):
        return ""
    return (
        f"ledger {ledger.path}: it has {len(ledger)} rows and lacks row {mark.rows}, which the witness {path} has "
        f"seen: it was put back to an older state. {COPIED}"
    )


# ------------------------------------------------------------------------------------------------------------ receipts


def receipt(mark: Mark, signer: Signer) -> dict[str, Any]:
    """A state that the site signs."""
    about = {**mark._asdict(), "key": signer.public}
    return {**about, "signature": signer.sign(PURPOSE + canonical(about)).hex()}


def signed_mark(document: Any, public: str) -> Mark | None:
    """The state in a receipt that the holder of this public key signed; None for anything else."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    mark = Mark.read(document)
    if mark is None or document.get("key") != public:
        return None
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(document["signature"]), PURPOSE + canonical({**mark._asdict(), "key": public}))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return None
    return mark


class Receipts:
    """The newest receipt of every site, in a file of the coordinator.

    Args:
      path: the file. It lies beside run/, because it outlives a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._newest = json.loads(path.read_text(encoding="utf-8"))

    def of(self, name: str) -> dict[str, Any] | None:
        """What this site signed last; None if it signed nothing yet."""
        return self._newest.get(name)

    def keep(self, name: str, document: Any) -> None:
        """Store a receipt if it is signed with the key that it names and newer than the stored one of that key."""
        self.keep_all({name: document})

    def keep_all(self, documents: Mapping[str, Any]) -> None:
        """Store the receipts of several sites, as `keep` does, and write the file once."""
        newer = {name: found for name, document in documents.items() if (found := self._newer(name, document))}
        if newer:
            self._newest |= newer
            files.write(self.path, (json.dumps(self._newest, indent=1) + "\n").encode())

    def _newer(self, name: str, document: Any) -> dict[str, Any] | None:
        key = document.get("key") if isinstance(document, Mapping) else None
        if not (isinstance(key, str) and _HEX.fullmatch(key)):
            return None
        mark, known = signed_mark(document, key), self._newest.get(name)
        if mark is None or (known and known["key"] == key and (known["rows"], known["at"]) >= mark[:2]):
            return None
        return {**mark._asdict(), "key": key, "signature": str(document["signature"])}
