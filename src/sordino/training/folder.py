"""The directory of a run: `public/` may be published, `private/` may not."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


class RunKeys(NamedTuple):
    """The secret keys of one run. `identity` keys every hash of the data; `sign` signs the certificate."""

    identity: bytes
    sign: RunKey


class RunFolder(NamedTuple):
    """Where the files of a run are. A folder without public/ and private/, such as a site's, holds them all."""

    root: Path
    public: Path
    private: Path

    @staticmethod
    def of(root: Path) -> RunFolder:
        return RunFolder(root, root / "public", root / "private")

    @staticmethod
    def find(path: Path) -> RunFolder:
        """The run that a path belongs to: its directory, public/ or private/ in it, or a file of either."""
        folder = path if path.is_dir() else path.parent
        if (folder / "public").is_dir():
            return RunFolder.of(folder)
        if folder.absolute().name in ("public", "private"):
            return RunFolder.of(folder.absolute().parent if folder.parent == folder else folder.parent)
        return RunFolder(folder, folder, folder)

    def named(self, path: Path, name: str) -> Path:
        """The public file `name` of the run that `path` is: a directory, or another file of the run."""
        other = path.is_file() and path.suffix != Path(name).suffix and (self.public / name).is_file()
        return self.public / name if path.is_dir() or other else path

    def make(self, spec: str, secret: str) -> None:
        """Create the directory: README.txt, the spec, its secret part, and fresh keys."""
        self.public.mkdir(parents=True)
        self.private.mkdir(mode=0o700)
        os.chmod(self.private, 0o700)
        (self.root / "README.txt").write_text(README, encoding="utf-8")
        text = (
            "# secret: it stays on this machine\n"
            f'identity = "{secrets.token_hex(32)}"  # keys every hash of the data\n'
            f'sign = "{secrets.token_hex(32)}"  # signs the certificate\n'
        )
        self.write_private("run.key", text)
        if secret:
            self.write_private("secret.toml", secret)
        (self.public / "spec.toml").write_text(spec, encoding="utf-8")

    def write_private(self, name: str, text: str) -> None:
        """Write a new private file."""
        files.create(self.private / name, text.encode())

    def keys(self) -> RunKeys:
        """The keys of the run, from private/run.key."""
        path = self.private / "run.key"
        try:
            text = path.read_text(encoding="utf-8")
            keys = dict(re.findall(r'^(identity|sign) = "([0-9a-f]{64})"', text, re.MULTILINE))
            return RunKeys(bytes.fromhex(keys["identity"]), RunKey(bytes.fromhex(keys["sign"])))
        except (OSError, UnicodeDecodeError, KeyError):
            raise SordinoError(
                f"resume: '{path}' is missing or damaged, and without it nobody can tell whether the data are those "
                "that the run began with; start a new run."
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out, because two would release a round twice. The lock ends with its process."""
        with ExitStack() as stack:
            try:
                stack.enter_context(files.lock(self.private / "lock", wait=False))
            except BlockingIOError:
                raise SordinoError(
                    f"resume: another process is training in '{self.root}'; wait for it or stop it."
                ) from None
            yield

    def level_times(self) -> None:
        """Give all public files the time at which the run began, because other times tell how long it took, and the
        same mode."""
        first = (self.public / "spec.toml").stat()
        for path in (*self.public.rglob("*"), self.public):
            if path.is_file():
                os.chmod(path, first.st_mode & 0o777)
            os.utime(path, (first.st_mtime, first.st_mtime))
