"""A run's directory: `public/` may be published, `private/` may not."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from sordino import files
from sordino.errors import SordinoError
from sordino.privacy.evidence.signing import RunKey

README = """public/   may be published. Its files are computed from the noised releases, from public settings, and from
          test records, which lie outside the guarantee: model, certificate, statement, metrics, curve, spec.
          docs/files.md lists every field of every file, and why it is safe.
private/  must not be published, and only its owner can read it. It holds the keys of the run, the ledger, the
          checkpoint, the timings and, where who takes part is secret, the seed of the schedule. Keep it: without
          run.key and ledger.db the run cannot be resumed, and its certificate cannot be compared with its ledger.
"""


class Keys(NamedTuple):
    """Of one run. `identity` keys every hash of the data; `sign` signs the certificate."""

    identity: bytes
    sign: RunKey


class Place(NamedTuple):
    """Where a run's files are. A folder without public/ and private/, such as a site's, holds all of them itself."""

    root: Path
    public: Path
    private: Path

    @staticmethod
    def of(root: Path) -> Place:
        return Place(root, root / "public", root / "private")

    @staticmethod
    def find(path: Path) -> Place:
        """The run that a path belongs to: its directory, public/ or private/ in it, or a file of either."""
        folder = path if path.is_dir() else path.parent
        if (folder / "public").is_dir():
            return Place.of(folder)
        if folder.absolute().name in ("public", "private"):
            return Place.of(folder.absolute().parent if folder.parent == folder else folder.parent)
        return Place(folder, folder, folder)

    def named(self, path: Path, name: str) -> Path:
        """The public file `name` of the run that `path` stands for: a directory, or another file of the run."""
        other = path.is_file() and path.suffix != Path(name).suffix and (self.public / name).is_file()
        return self.public / name if path.is_dir() or other else path

    def make(self, spec: str, secret: str) -> None:
        """A new run's directory: README.txt, the spec, what is secret in it, and fresh keys."""
        self.public.mkdir(parents=True)
        self.private.mkdir(mode=0o700)
        os.chmod(self.private, 0o700)
        (self.root / "README.txt").write_text(README, encoding="utf-8")
        text = (
            "# secret: it stays on this machine\n"
            f'identity = "{secrets.token_hex(32)}"  # keys every hash of the data\n'
            f'sign = "{secrets.token_hex(32)}"  # signs the certificate\n'
        )
        self.keep("run.key", text)
        if secret:
            self.keep("secret.toml", secret)
        (self.public / "spec.toml").write_text(spec, encoding="utf-8")

    def keep(self, name: str, text: str) -> None:
        """A new private file."""
        files.create(self.private / name, text.encode())

    def keys(self) -> Keys:
        path = self.private / "run.key"
        try:
            found = dict(
                re.findall(r'^(identity|sign) = "([0-9a-f]{64})"', path.read_text(encoding="utf-8"), re.MULTILINE)
            )
            return Keys(bytes.fromhex(found["identity"]), RunKey(bytes.fromhex(found["sign"])))
        except (OSError, UnicodeDecodeError, KeyError):
            raise SordinoError(
                f"resume: '{path}' is gone or damaged, and without it nobody can tell whether the data are those that "
                "the run began with; start a new run."
            ) from None
