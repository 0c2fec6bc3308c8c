"""Published files: found on disk, or downloaded once into the cache.

A download is checked against its length, and against the publisher's checksum if there is one. Its SHA-256 is stored
beside it and checked at every later load. Files that you provide yourself are not checked.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from sordino import files
from sordino.data.formats import PACKED, reading, unpack
from sordino.errors import SordinoError

SILENCE_SECONDS = 30.0  # seconds to wait for a server
MAX_SECONDS = 3600.0  # seconds that one file may take
DOWNLOAD_CHUNK_BYTES = 1 << 20
ARCHIVES = (".zip", ".tar.gz")


class Remote(NamedTuple):
    """A file to download from the first URL that works."""

    file: str
    urls: tuple[str, ...]
    checksum: str | None = None  # "md5:…" or "sha256:…", as published


class Published(NamedTuple):
    """A set of files: names, folders, and URLs."""

    name: str
    title: str
    remotes: tuple[Remote, ...]
    folders: tuple[str, ...]  # names of its folder in a data folder; the cache uses the first
    top: str = ""  # the folder inside the archive


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sordino"


# ------------------------------------------------------------------------------------------------------------ on disk


class Folder:
    """Members as plain or compressed files; their names may have a prefix."""

    def __init__(self, where: Path, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix

    def find(self, member: str) -> Path | None:
        paths = (self.where / f"{self.prefix}{member}{suffix}" for suffix in ("", *PACKED))
        return next((path for path in paths if path.is_file()), None)

    def has(self, member: str) -> bool:
        return self.find(member) is not None

    def read(self, member: str) -> bytes:
        path = self.find(member)
        if path is None:
            raise SordinoError(f"data: '{self.where}' lacks {member}; put a complete copy there.")
        verify(path)
        return unpack(path.read_bytes(), str(path))

    def below(self, folder: str) -> list[str]:
        """Members under a folder, sorted."""
        paths = (path for path in (self.where / folder).rglob("*") if path.is_file())
        return sorted(path.relative_to(self.where).as_posix() for path in paths)


class Archive:
    """Members of a .zip or .tar.gz, under its `top` folder; never extracted to disk."""

    def __init__(self, where: Path, top: str) -> None:
        self.where, self.top = where, f"{top}/" if top else ""

    @cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        if self.where.suffix != ".zip":
            return None
        verify(self.where)
        with reading(str(self.where), "a .zip archive"):
            return zipfile.ZipFile(self.where)

    @cached_property
    def _tar(self) -> dict[str, bytes]:
        """All members, read in one pass, because a compressed tar cannot be read backwards."""
        verify(self.where)
        contents = {}
        with reading(str(self.where), "a whole .tar.gz archive"), tarfile.open(self.where, "r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    contents[member.name.removeprefix("./")] = file.read()
        return contents

    @cached_property
    def _names(self) -> frozenset[str]:
        names = self._tar if self._zip is None else self._zip.namelist()
        return frozenset(name.removeprefix(self.top) for name in names if name.startswith(self.top))

    def find(self, member: str) -> str | None:
        return next((member + suffix for suffix in ("", *PACKED) if member + suffix in self._names), None)

    def has(self, member: str) -> bool:
        return self.find(member) is not None

    def read(self, member: str) -> bytes:
        path = self.find(member)
        if path is None:
            raise SordinoError(f"data: '{self.where}' lacks {self.top}{member}; replace it by a complete copy.")
        where = f"{self.where}: {self.top}{path}"
        if self._zip is None:
            return unpack(self._tar[self.top + path], where)
        with reading(where, "a whole member"):
            return unpack(self._zip.read(self.top + path), where)

    def below(self, folder: str) -> list[str]:
        return sorted(name for name in self._names if name.startswith(f"{folder}/") and not name.endswith("/"))


Store = Folder | Archive


def locate(published: Published, members: Sequence[str], data_dir: str | Path | None = None) -> Store:
    """Find all `members` in `data_dir`, $SORDINO_DATA or the cache; else download them into the cache.

    Each folder is searched for names with the set's prefix (`mnist-train-…`), the set's folders, its archive, and the
    official names.
    """
    for root in _roots(data_dir):
        for store in _stores(published, root):
            if all(store.has(member) for member in members):
                return store
    home = cache() / published.folders[0]
    for remote in published.remotes:
        if not (home / remote.file).is_file():
            download(published, remote, home)
    for store in _stores(published, cache()):
        if all(store.has(member) for member in members):
            return store
    raise SordinoError(
        f"data: '{home}' lacks some of {', '.join(members)} of {published.title}; delete it to download it again."
    )


def _roots(data_dir: str | Path | None) -> list[Path]:
    folders = []
    for field, value in (("data_dir", data_dir), ("SORDINO_DATA", os.environ.get("SORDINO_DATA"))):
        if value:
            folder = Path(value).expanduser()
            if not folder.is_dir():
                raise SordinoError(f"{field}: there is no folder '{value}'; check the path.")
            folders.append(folder)
    return [*folders, cache()]


def _stores(published: Published, root: Path) -> Iterator[Store]:
    yield Folder(root, f"{published.name}-")
    yield from (Folder(root / folder) for folder in published.folders)
    for remote in published.remotes:
        if remote.file.endswith(ARCHIVES):
            paths = (root / folder / remote.file for folder in (*published.folders, ""))
            yield from (Archive(path, published.top) for path in paths if path.is_file())
    yield Folder(root)


# ----------------------------------------------------------------------------------------------------------- checked


def verify(path: Path) -> None:
    """Check a file against the SHA-256 that its download stored beside it, if there is one."""
    side = _side(path)
    if not side.is_file():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != side.read_text().strip():
        raise SordinoError(f"data: '{path}' has changed since it was downloaded; delete it to download it again.")


def _side(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


# --------------------------------------------------------------------------------------------------------- downloads


def download(published: Published, remote: Remote, folder: Path) -> Path:
    """Download one file into the folder. It gets its name only when it is complete and checked."""
    from http.client import HTTPException  # here: few commands download, and ssl is slow to import

    reasons = []
    for url in remote.urls:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _download(url, remote, folder)
        except (OSError, HTTPException, ValueError) as error:
            reasons.append(f"{url} ({getattr(error, 'reason', None) or error})")
    files = ", ".join(each.file for each in published.remotes)
    raise SordinoError(
        f"data: {published.title} is not on this machine, and {remote.file} could not be downloaded: "
        f"{'; '.join(reasons)}. Put {files} into '{folder}', or into a folder that data_dir or $SORDINO_DATA names."
    )


def _download(url: str, remote: Remote, folder: Path) -> Path:
    import urllib.request

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    algorithm, _, published = (remote.checksum or "sha256:").partition(":")
    checksum, digest, done = hashlib.new(algorithm, usedforsecurity=False), hashlib.sha256(), 0
    start, path = time.monotonic(), folder / remote.file
    request = urllib.request.Request(url, headers={"User-Agent": "sordino"})
    with files.replacing(path) as part:
        with (
            open(part, "wb") as out,
            urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as answer,
            Progress(*columns, console=Console(stderr=True)) as progress,
        ):
            length = int(answer.headers.get("Content-Length") or 0)
            task = progress.add_task(remote.file, total=length or None)
            while chunk := answer.read(DOWNLOAD_CHUNK_BYTES):
                out.write(chunk)
                checksum.update(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.update(task, completed=done)
                if time.monotonic() - start > MAX_SECONDS:
                    raise TimeoutError(f"not complete after {MAX_SECONDS:.0f} s")
        if length and done != length:
            raise ValueError(f"received {done} of {length} bytes")
        if published and checksum.hexdigest() != published:
            raise ValueError(f"it has {algorithm} {checksum.hexdigest()}, not the published {published}")
        _side(path).write_text(digest.hexdigest() + "\n")
    return path
