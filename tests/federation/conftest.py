"""A federation in one process, for every test beside this file."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what workers and coordinators import by name lies here too
from fixtures import FEDERATION, Loopback, Talk, World


@pytest.fixture
def fast():
    """A folder in memory where there is one: syncing a disk is most of what a small federation does."""
    place = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def talk():
    return Talk


@pytest.fixture
def loopback():
    return Loopback


@pytest.fixture
def tiny(fast):
    """Worlds of few records; every call makes another."""
    made = []

    def make(method="dp-fedsofim", trust="untrusted-server", rounds=3, **keys):
        spec = {"method": method, "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        federation = {k: keys.pop(k) for k in (*FEDERATION, "deadline", "patience") if k in keys}
        made.append(Path(fast) / str(len(made)))
        return World(made[-1], spec | keys, tiny=True, **federation)

    return make


@pytest.fixture
def world(tmp_path):
    def make(method="dp-fedsofim", trust="untrusted-server", rounds=4, **keys):
        spec = {"method": method, "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        federation = {k: keys.pop(k) for k in FEDERATION if k in keys}
        return World(tmp_path / "world", spec | keys, **federation)

    return make
