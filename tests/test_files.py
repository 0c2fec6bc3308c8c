"""Files are whole or absent, private, and locked by one process at a time."""

import os
import subprocess
import sys

import pytest

from sordino import files
from sordino.errors import SordinoError


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path, durable):
    path = tmp_path / "note"
    for data in (b"first", b"second", b""):
        files.write(path, data, durable=durable)
        assert (path.read_bytes(), mode(path)) == (data, 0o600)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "note"
    files.write(path, b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="No space"):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_write_flushes_the_file_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (steps.append(name), real(*args))[1])
    files.write(tmp_path / "a", b"x")
    assert steps == ["fsync", "replace", "fsync"]
    steps.clear()
    files.write(tmp_path / "a", b"x", durable=False)
    assert steps == ["replace"]


def test_a_block_that_raises_leaves_no_file(tmp_path):
    def half():
        with files.replacing(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        half()
    assert list(tmp_path.iterdir()) == []


def test_a_file_made_anew_by_another_program_is_private_too(tmp_path):
    with files.replacing(tmp_path / "a") as temporary:
        temporary.unlink()
        temporary.write_text("whole")
        temporary.chmod(0o644)
    assert mode(tmp_path / "a") == 0o600


def test_a_closed_folder_is_named_with_the_file_that_is_meant(tmp_path, monkeypatch):
    """Not with the name of a temporary file. Root may write everywhere, so that the system's answer is put in."""
    monkeypatch.setattr("sordino.files.os.access", lambda path, mode: False)
    with pytest.raises(SordinoError) as caught:
        files.check_writable(tmp_path / "p.csv")
    said = f"'{tmp_path / 'p.csv'}': no permission to write in '{tmp_path}'; choose another with --out."
    assert str(caught.value) == f"--out: {said}"

    def closed(**_):
        raise PermissionError(13, "Permission denied", ".p.csv.x.tmp")

    monkeypatch.setattr("sordino.files.tempfile.mkstemp", closed)
    with pytest.raises(PermissionError) as refused:
        files.write(tmp_path / "p.csv", b"")
    assert refused.value.filename == str(tmp_path / "p.csv")


def test_a_new_file_is_never_overwritten(tmp_path):
    files.create(tmp_path / "key", b"one")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "key", b"two")
    assert ((tmp_path / "key").read_bytes(), mode(tmp_path / "key")) == (b"one", 0o600)


def test_lines_are_appended_to_a_private_file(tmp_path):
    for line in ("a\n", "ε\n"):
        files.append(tmp_path / "log", line)
    assert ((tmp_path / "log").read_text(encoding="utf-8"), mode(tmp_path / "log")) == ("a\nε\n", 0o600)


def test_who_else_may_read_a_file(tmp_path):
    files.create(tmp_path / "key", b"")
    assert files.is_private(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    assert not files.is_private(tmp_path / "key")


def test_one_process_holds_a_lock_until_it_ends(tmp_path):
    path = tmp_path / "lock"
    code = f"""
import sys
from pathlib import Path
from sordino import files
with files.lock(Path({str(path)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError), files.lock(path, wait=False):
            pass
        other.kill()  # the lock ends with its process, however that ends
        other.wait()
        with files.lock(path, wait=False):
            pass


def test_nothing_else_locks_or_replaces_files():
    """Locks and atomic writes exist once: in files.py."""
    from pathlib import Path

    source = Path(files.__file__).parent
    words = ("fcntl", "os.replace(", "os.rename(", "mkstemp", "NamedTemporaryFile", "os.fsync(", "O_EXCL")
    found = {
        (str(path.relative_to(source)), word)
        for path in source.rglob("*.py")
        for word in words
        if path.name != "files.py" and word in path.read_text(encoding="utf-8")
    }
    # A ledger creates its empty file itself: a second descriptor would drop SQLite's own locks when it is closed.
    assert found == {("evidence/ledger.py", "O_EXCL")}


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes")
def test_a_lock_file_of_an_earlier_version_becomes_private(tmp_path):
    """Whoever may read a file may hold its lock."""
    (tmp_path / "lock").touch(mode=0o644)
    with files.lock(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_the_state_folder_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert files.state_folder() == tmp_path / "sordino"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.state_folder() == tmp_path / ".local" / "state" / "sordino"
