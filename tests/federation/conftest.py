"""A federation in one process, for every test beside this file."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what workers and coordinators import by name lies here too
from fixtures import SETTINGS, LocalFolders, Loopback, Talk


@pytest.fixture
def fast():
    """A folder in memory where there is one: syncing a disk is most of what a small federation does."""
    place = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def three(tmp_path):
    """A coordinator and three sites, as `up` makes them."""
    from sordino.operations import demonstration  # needs Flower

    demonstration.prepare(tmp_path / "f", 3, spec={"method": "dp-fedsofim", "rounds": 4})
    return tmp_path / "f"


@pytest.fixture
def talk():
    return Talk


@pytest.fixture
def loopback():
    return Loopback


@pytest.fixture
def tiny(fast):
    """Federations of few records; every call makes another."""
    made = []

    def make(method="dp-fedsofim", trust="untrusted-server", rounds=3, **keys):
        spec = {"method": method, "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        settings = {k: keys.pop(k) for k in (*SETTINGS, "deadline", "patience") if k in keys}
        made.append(Path(fast) / str(len(made)))
        return LocalFolders(made[-1], spec | keys, tiny=True, **settings)

    return make


@pytest.fixture
def federation(tmp_path):
    def make(method="dp-fedsofim", trust="untrusted-server", rounds=4, **keys):
        spec = {"method": method, "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        settings = {k: keys.pop(k) for k in SETTINGS if k in keys}
        return LocalFolders(tmp_path / "federation", spec | keys, **settings)

    return make
