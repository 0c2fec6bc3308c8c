"""`sordino federate up`, as a user runs it: stopped in the middle as a service would be, and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino.privacy.evidence.ledger import NOTES, Ledger

UP = [sys.executable, "-m", "sordino.cli", "federate", "up"]


def told(path, what):
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["what"] == what]


def left_over(out):
    """Processes that still name the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(out).encode() in words:
            found.append(words)
    return found


def test_a_federation_that_was_stopped_goes_on(tmp_path):
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    progress = out / "coordinator" / "run" / "progress.jsonl"
    first = subprocess.Popen(
        [*UP, "--sites", "3", "--set", "rounds=4", "--out", str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 240
    while not told(progress, "round"):
        assert first.poll() is None, first.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode not in (0, None)
    assert b"Traceback" not in said
    assert left_over(out) == []
    before = len(told(progress, "round"))
    done = subprocess.run([*UP, "--resume", str(out), "--json"], env=env, capture_output=True, timeout=240, check=True)
    document = json.loads(done.stdout)
    assert document["rounds"] == 4 - before < 4
    assert [site["verified"] for site in document["sites"]] == [True] * 3
    assert all(site["certified"] and site["epsilon"] <= 8 for site in document["sites"])
    for name in ("site1", "site2", "site3"):
        with Ledger(out / "sites" / name / "ledger.db") as ledger:
            assert [row.round for row in ledger.rows() if row.key and row.query not in NOTES] == [0, 1, 2, 3]
    assert left_over(out) == []
