"""The directory of a run: `public/` may be published if the run is certified, `private/` may not."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sordino import files
from sordino.errors import SordinoError, count
from sordino.evidence.signing import RunKey
from sordino.settings import read_toml

EVALUATION_FILE = "evaluation.json"  # what a private evaluation found
SCHEMA = "schema.toml"  # the schema of a table: in private/ the one that a run goes on with, in public/ its copy

UNFINISHED = """This run is not finished. Continue it with: sordino run --resume {root}
Publish nothing of it before it is finished. This file then says what may be published.
"""
PUBLIC = """public/   may be published{why}. It holds the model (model.safetensors), the certificate for machines
          (certificate.json) and in words (statement.md), the settings (spec.toml), what the model is for
          (MODEL_CARD.md), and the test results (metrics.jsonl, curve.png). All of it is computed from noised
          releases, public settings and test records.
"""
NOTHING = """NOTHING IN THIS FOLDER MAY BE PUBLISHED: the run is not certified.
Reason: {reasons}.

public/   must not be published, whatever its name says. Keep it as confidential as the training data.
"""
SEED = """          spec.toml in it holds the seed of the noise. Whoever knows the seed can subtract the noise.
"""
TESTED = """          NOT PROTECTED: {whose}. The model does not learn from
          them, but no noise hides them, and public/ shows how accurate the model is on them.
"""
PRIVATE = """private/  must not be published, and only its owner can read it. It holds the keys of the run, the
          ledger, the checkpoint, the timings and, where who takes part is secret, the seed of the schedule. Keep
          it: without run.key and ledger.db the run cannot be resumed, and its certificate cannot be compared with
          its ledger.
"""
NAMED = "In ledgers the name of this run is {name} (sordino ledger show FILE.db).\n"
SHOWN_NAME = 16  # characters

# Where the files of runs are in the folder of a federation, of a site, of a coordinator, and of many runs.
PLACES = ("run", "coordinator/run", "runs/*", "sites/*", "sites/*/runs/*", "*", "*/runs/*", "*/public", "*/private")


def publishable(cert: Mapping[str, Any], data_public: bool) -> bool:
    """Whether public/ may be published: the run is certified, or everybody may see its data anyway."""
    return bool(cert["certified"]) or data_public


def tested_on(cert: Mapping[str, Any]) -> str:
    """The records that no guarantee covers, in words."""
    tested, trained = cert["test_records"], cert["records"]
    if tested is None or trained is None:
        return "the records held out for testing"
    if cert.get("unit") == "person":  # then `records` counts persons
        return f"the {count(tested, 'test record')}"
    return f"the {count(tested, 'test record')} ({tested / max(1, tested + trained):.0%} of all records)"


def readme(cert: Mapping[str, Any], *, data_public: bool, name: str) -> str:
    """README.txt of a finished run: what may be published, what is not protected, and how ledgers call it.

    Args:
      cert: the certificate.
      data_public: everybody may see the records, as those of a benchmark.
      name: of the run in ledgers.
    """
    return _readme(cert, data_public) + NAMED.format(name=shown_name(name))


def shown_name(name: str) -> str:
    """The name of a run in ledgers, as people see it."""
    return name[:SHOWN_NAME]


def _readme(cert: Mapping[str, Any], data_public: bool) -> str:
    if not publishable(cert, data_public):
        reasons = "; ".join(cert["reasons"])
        seed = SEED if cert["noise_source"] == "seeded" else ""
        return NOTHING.format(reasons=reasons) + seed + PRIVATE
    if not cert["certified"]:
        return PUBLIC.format(why=", because its data are public; the run is not certified") + PRIVATE
    return PUBLIC.format(why="") + TESTED.format(whose=tested_on(cert)) + PRIVATE


def missing(path: Path, field: str) -> SordinoError:
    """The error for a file of a run that does not exist: it names the folders that hold one, or says how to make it.

    Args:
      path: the file.
      field: what the error begins with.
    """
    root, name = path.parent, path.name
    run = RunFolder.find(root)
    if (run.private / "run.key").is_file() and not (run.public / "certificate.json").is_file():
        return SordinoError(
            f"{field}: the run in '{run.root}' is not finished, so it has no {name} yet; continue it with sordino run "
            f"--resume {run.root}."
        )
    below = [p for pattern in PLACES for p in sorted(root.glob(f"{pattern}/{name}"))] if root.is_dir() else []
    below = list(dict.fromkeys(below))
    if below:
        folders = ", ".join(str(p.parent) for p in below[:4]) + (" …" if len(below) > 4 else "")
        return SordinoError(f"{field}: '{root}' holds no {name} itself; name one of its folders: {folders}.")
    return files.absent(field, path)


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
        self.write_readme(UNFINISHED.format(root=self.root))
        text = (
            "# secret: it stays on this machine\n"
            f'identity = "{secrets.token_hex(32)}"  # keys every hash of the data\n'
            f'sign = "{secrets.token_hex(32)}"  # signs the certificate\n'
        )
        self.write_private("run.key", text)
        if secret:
            self.write_private("secret.toml", secret)
        (self.public / "spec.toml").write_text(spec, encoding="utf-8")

    def write_readme(self, text: str) -> None:
        """Replace README.txt."""
        (self.root / "README.txt").write_text(text, encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """The keys of the run's spec: public/spec.toml, with private/secret.toml where that is at hand. The schema is
        the copy beside it, so that a run is resumed and verified wherever its folder lies."""
        values = read_toml(self.public / "spec.toml") | self.secret()
        if "schema" in values:
            values["schema"] = str((self.public / SCHEMA).absolute())
        return values

    def secret(self) -> dict[str, Any]:
        """The keys of the spec that stay private: whole paths, and the seed of a secret schedule. Empty where
        private/secret.toml is not at hand."""
        secret = self.private / "secret.toml"
        return read_toml(secret) if secret.is_file() else {}

    def kept_schema(self) -> Path:
        """The schema that a resumed run goes on with, with what noised counts found.

        Returns:
          private/schema.toml.

        Raises:
          SordinoError: the file is missing.
        """
        path = self.private / SCHEMA
        if not path.is_file():
            raise SordinoError(
                f"resume: '{path}' is missing, and without it nobody can tell which schema the run began with, and "
                "what its counts found; put it back, or start a new run."
            )
        return path

    def check_schema(self) -> None:
        """Refuse a public copy of the schema that is not the run's own. It may be missing, or still lack what noised
        counts found, because a kill may have come before it was written.

        Raises:
          SordinoError: the copy is another one, or private/schema.toml is missing.
        """
        from sordino.data.schema import Schema

        kept, copy = self.kept_schema(), self.public / SCHEMA
        own = (kept.read_bytes(), Schema.read(kept).without_ranges.toml().encode())
        if copy.is_file() and copy.read_bytes() not in own:
            raise SordinoError(
                f"resume: '{copy}' changed since the run wrote it, and the run goes on with '{kept}'; delete the "
                "changed file, and the resumed run writes it again, or start a new run with another schema."
            )

    def show_schema(self) -> None:
        """Write the public copy of the schema, as private/ has it.

        Raises:
          SordinoError: private/schema.toml is missing.
        """
        kept = self.kept_schema().read_bytes()
        copy = self.public / SCHEMA
        if not copy.is_file() or copy.read_bytes() != kept:
            files.write(copy, kept)

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
