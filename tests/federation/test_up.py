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

from sordino.errors import SordinoError
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.demonstration import prepare
from sordino.federation.site_data import SiteData
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


@pytest.mark.soak  # over a minute of real processes; resuming in one process is in test_coordinator.py
def test_a_federation_that_was_stopped_goes_on(tmp_path):
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    progress = out / "coordinator" / "run" / "progress.jsonl"
    first = subprocess.Popen(
        [*UP, "--sites", "3", "--set", "rounds=6", "--out", str(out)],
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
    assert document["rounds"] == 6 - before < 6
    assert [site["verified"] for site in document["sites"]] == [True] * 3
    assert all(site["certified"] and site["epsilon"] <= 8 for site in document["sites"])
    for name in ("site1", "site2", "site3"):
        with Ledger(out / "sites" / name / "ledger.db") as ledger:
            assert [row.round for row in ledger.rows() if row.key and row.query not in NOTES] == list(range(6))
    assert left_over(out) == []


SCHEMA = """
client = "hospital"
[file]
delimiter = ";"
decimal = ","
encoding = "latin-1"
[target]
column = "sick"
levels = ["no", "yes"]
[columns.age]
type = "number"
range = [0, 100]
[columns.sex]
type = "category"
levels = ["m", "ü"]
"""


@pytest.mark.parametrize("count", [None, 2])
def test_a_table_with_a_schema_is_divided_among_the_sites(tmp_path, count):
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    rows = [f"{'mü'[k % 2]};{k % 90},5;{['north', 'south', 'west'][k % 3]};{['no', 'yes'][k % 2]}" for k in range(150)]
    text = "\n".join(["sex;age;hospital;sick", *rows]) + "\n"
    (tmp_path / "data.csv").write_text(text, encoding="latin-1")
    out = tmp_path / "federation"
    about = {"data": str(tmp_path / "data.csv"), "schema": tmp_path / "schema.toml"}
    prepare(out, count, spec={"method": "dp-fedsofim", "rounds": 2, "trust": "untrusted-server"}, **about)
    config = FederationConfig.read(out / "coordinator" / "federation.toml")
    assert list(config.sites) == (["north", "south", "west"] if count is None else ["site1", "site2"])
    held = (out / "coordinator" / "test.csv").read_text(encoding="latin-1").splitlines()[1:]
    assert len(held) == 30
    found = list(held)
    for name in config.sites:
        place = out / "sites" / name
        mine = (place / "data.csv").read_text(encoding="latin-1").splitlines()[1:]
        found += mine
        if count is None:
            assert {row.split(";")[2] for row in mine} == {name}
        data = SiteData(SiteConfig.read(place / "site.toml"))
        assert data.shape[1] == config.features
        assert data.records + data.tests == len(mine)
    assert sorted(found) == sorted(rows), "every row is in one place"


def test_a_table_that_does_not_fit_leaves_no_folder(tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "data.csv").write_text("sex;age;hospital;sick\nm;old;north;no\nm;3;south;yes\n")
    with pytest.raises(SordinoError, match="age"):
        prepare(tmp_path / "out", spec={}, data=str(tmp_path / "data.csv"), schema=tmp_path / "schema.toml")
    with pytest.raises(SordinoError, match="label"):
        prepare(tmp_path / "out", spec={}, data="x.csv", label="sick", schema=tmp_path / "schema.toml")
    assert not (tmp_path / "out").exists()
