"""Locks and atomic writes, once for the whole library.

Every file that is written here is readable by its owner alone (mode 0600). A reader sees the old content or the new
content, never a part: the new content goes to a hidden temporary file in the same folder, is flushed to disk, and takes
the name in one step. A process that is killed in between leaves the old file and a file `.NAME.*.tmp`, which nobody
reads: `is_leftover`. A file with `durable=False` is not flushed: a cache may lose it in a power cut.

A lock belongs to an open file and ends with its process, however that ends. On systems without `fcntl` (Windows) there
are no locks, so two processes must not share a folder there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sordino.errors import SordinoError, StoppedError, closest

SPELT_ALIKE = 0.75  # how similar the name of another file must be to be suggested


def absent(field: str, path: str | Path) -> SordinoError:
    """The error for a file that is not there: it names one beside it that is spelt alike.

    Args:
      field: what the error begins with.
      path: as the user wrote it.

    Returns:
      The error, to be raised.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write(folder / "patients.csv", b"")
    >>> str(absent("data", folder / "patient.csv")).split("file ")[1].replace(str(folder), "DIR")
    "'DIR/patient.csv'. Did you mean 'DIR/patients.csv'?"
    """
    wanted = Path(path).expanduser()
    try:
        beside = [other.name for other in wanted.parent.iterdir()]
    except OSError:
        beside = []
    begin = f"{field}: there is no file '{path}'"
    if meant := closest(wanted.name, beside, cutoff=SPELT_ALIKE):
        return SordinoError(f"{begin}. Did you mean '{wanted.with_name(meant)}'?")
    return SordinoError(f"{begin}; check the path.")


def write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace or create a file in one step.

    Args:
      path: the file; its folder must exist.
      data: its whole new content.
      durable: flush to disk before returning, so that a power cut cannot undo it.

    Raises:
      OSError: the folder cannot be written. The old file is then unchanged.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write(folder / "note", b"whole")
    >>> (folder / "note").read_bytes(), oct((folder / "note").stat().st_mode & 0o777), len(list(folder.iterdir()))
    (b'whole', '0o600', 1)
    """
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file that takes the name `path` when the block ends, and is deleted if the block raises.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "table") as temporary:
    ...     _ = temporary.write_text("rows")
    >>> (folder / "table").read_text()
    'rows'
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")  # mode 0600
    except PermissionError as error:  # of the file that is meant, not of the temporary one
        raise PermissionError(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o600)  # a compiler may have made the file anew
        if durable:
            _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def is_leftover(path: Path) -> bool:
    """Whether the file is what a process was writing when it was killed. It may hold all that the file would have held.

    >>> is_leftover(Path("runs/.secret.x7.tmp")), is_leftover(Path("runs/secret"))
    (True, False)
    """
    return path.name.startswith(".") and path.name.endswith(".tmp")


def check_writable(out: Path) -> None:
    """Refuse a file of --out that this user cannot write.

    Raises:
      SordinoError: its folder exists and is closed to this user.
    """
    folder = out.absolute().parent
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise SordinoError(f"--out: '{out}': no permission to write in '{folder}'; choose another with --out.")


def create(path: Path, data: bytes) -> None:
    """A new file, on disk when this returns.

    Raises:
      FileExistsError: the file exists. It is never overwritten.
      OSError: the folder cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync(Path(path).parent)


def append(path: Path, text: str) -> None:
    """Add text to a file, and create it if it is missing."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
        file.write(text)


def move(source: Path, target: Path) -> None:
    """Rename a file or a new folder in one step, on disk when this returns. A file at `target` is replaced."""
    os.replace(source, target)
    sync(target.parent)


@contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing.

    Args:
      path: the lock file. It stays behind, empty.
      wait: wait for the process that holds the lock.

    Raises:
      BlockingIOError: another process holds the lock, and `wait` is False.
      OSError: the file cannot be created.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        if os.name == "posix" and os.fstat(file.fileno()).st_uid == os.getuid():
            os.fchmod(file.fileno(), 0o600)  # who may read the file may hold its lock
        try:
            import fcntl
        except ImportError:  # not a POSIX system
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def held(path: Path) -> bool:
    """Whether a process holds the lock on this file; False where there is no file. Nothing is written."""
    try:
        import fcntl

        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


@contextmanager
def alone(path: Path, otherwise: str, seconds: float = 10.0) -> Iterator[None]:
    """Hold a lock that no other process holds, and wait a little for one that is just ending.

    Args:
      path: the lock file.
      otherwise: what to say if another process has it.
      seconds: how long to wait.

    Raises:
      StoppedError: another process has the lock.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with alone(folder / "lock", "in use"), alone(folder / "lock", "in use", seconds=0):
    ...     pass
    Traceback (most recent call last):
    sordino.errors.StoppedError: in use
    """
    end = time.monotonic() + seconds
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(lock(path, wait=False))
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise StoppedError(otherwise) from None
                time.sleep(0.1)
        yield


def state_folder() -> Path:
    """Where this user's programs keep what they remember: sordino/ in $XDG_STATE_HOME or ~/.local/state.

    Returns:
      The folder. It may not exist yet.

    Raises:
      RuntimeError: this user has no home directory.
    """
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "sordino"


def is_private(path: Path) -> bool:
    """Whether nobody but the owner may read the file. Always true on systems without POSIX modes."""
    return os.name != "posix" or not os.stat(path).st_mode & 0o077


def sync(folder: Path) -> None:
    """Flush a folder, so that what was renamed in it stays renamed after a power cut."""
    if os.name == "posix":
        _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
