"""Backups of a site's folder that cannot release a round twice.

A backup holds settings, keys, certificates and a consistent copy of the ledger, also while the site works. It holds no
records, not even in tables that only lie in the folder, and not the secrets of open runs: a restored folder takes part
in new runs only. Where the ledger of the backup
is older than the witness, which is outside of the folder, the restored site refuses every message.
"""

from __future__ import annotations

import os
import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

from sordino import files
from sordino.data.readers import reader_of
from sordino.errors import RolledBackError, SordinoError
from sordino.federation import run_keys
from sordino.federation.config import SiteConfig
from sordino.federation.site_data import SiteData

LEFT_OUT = ("secret", "pending", "memory", run_keys.FILE)  # of runs: they only serve to go on with a run


def backup(folder: Path, out: Path) -> list[str]:
    """Write a backup of a site.

    Args:
      folder: the site's folder, with site.toml.
      out: the file to write, a tar archive that only its owner can read.

    Returns:
      The names of the files in it.

    Raises:
      SordinoError: the file exists, or the site has no ledger yet.
    """
    config = SiteConfig.read(folder / "site.toml")
    ledger, data = config.path(config.ledger), config.path(config.data).resolve()
    if out.exists():
        raise SordinoError(f"--out: '{out}' exists; choose another name, because a backup is not overwritten.")
    if not ledger.is_file():
        raise SordinoError(f"ledger: '{ledger}' does not exist yet; there is nothing to lose before the first run.")
    beside = {ledger.with_name(ledger.name + end) for end in ("", "-wal", "-shm")}
    kept = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in LEFT_OUT
        and not files.is_leftover(path)
        and path.parent.name != run_keys.FOLDER
        and path not in beside
        and path.resolve() != data
        and reader_of(path) is None  # an older table, or predictions
    ]
    with tempfile.TemporaryDirectory() as place, files.replacing(out) as temporary:
        copy = Path(place) / "ledger.db"
        with (
            closing(sqlite3.connect(f"{ledger.as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as to,
        ):
            source.backup(to)
        with tarfile.open(temporary, "w") as archive:
            archive.add(copy, config.ledger)
            for path in kept:
                archive.add(path, str(path.relative_to(folder)))
        os.chmod(temporary, 0o600)
    return [config.ledger, *(str(path.relative_to(folder)) for path in kept)]


def restore(archive: Path, folder: Path) -> str:
    """Unpack a backup into a new folder, and compare its ledger with the witness.

    Args:
      archive: what `backup` wrote.
      folder: the folder to make.

    Returns:
      Why the site refuses to work with it, or an empty text.

    Raises:
      SordinoError: the folder exists, or the file is not a backup.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SordinoError(
            f"'{folder}' is not empty; restore into a new folder, and then put it in the old one's place."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:") as packed:
            packed.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise SordinoError(f"'{archive}': it is not a backup of a site, or damaged ({error}).") from None
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    site = SiteData(SiteConfig.read(folder / "site.toml"))
    try:
        with site.ledger():
            return ""
    except RolledBackError as error:
        return str(error)
