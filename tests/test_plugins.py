"""A method of another package: found, checked, and refused as uncertified until the check has passed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# `sordino check` with the fewest trials that it allows.
SHORT_SEARCH = """
from functools import partial
from sordino import checks
checks.check, checks.check_model = (partial(f, trials=checks.LEAST_TRIALS) for f in (checks.check, checks.check_model))
from sordino.cli import main
exit(main())
"""


@pytest.fixture
def outside(tmp_path):
    """Run the command line where the example package is installed; its state directory is empty at first."""
    spec = importlib.util.spec_from_file_location("sordino_example", ROOT / "tests" / "plugin" / "sordino_example.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = module.install(tmp_path / "packages")
    path = os.pathsep.join([str(ROOT / "src"), str(place)])
    environment = {**os.environ, "PYTHONPATH": path, "SORDINO_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    def sordino(*words):
        return subprocess.run(
            [
                sys.executable,
                "-c",
                SHORT_SEARCH if words[0] == "check" else "from sordino.cli import main; exit(main())",
                *words,
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )

    sordino.folder = tmp_path
    return sordino


def listed(sordino, kind="method"):
    done = sordino("methods", "--json")
    assert done.returncode == 0, done.stderr
    assert "'dp-broken' of sordino-example 1.0 cannot be imported (AttributeError" in done.stderr
    return {row["name"]: row for row in json.loads(done.stdout) if row["package"] and row["kind"] == kind}


def test_an_external_method_is_found_checked_and_refused_until_then(outside):
    rows = listed(outside)
    assert set(rows) == {"dp-halved", "dp-overclaims"}
    assert rows["dp-halved"]["certified"] == {"record": [], "person": []}
    assert not rows["dp-halved"]["checked"]
    assert rows["dp-halved"]["options"] == {"clip": 1.0, "lr": 0.5}

    run = ("run", "--method", "dp-halved", "--set", "rounds=2", "--out")
    refused = outside(*run, "refused")
    assert refused.returncode == 2
    assert "no passed check is on record here: run `sordino check dp-halved` first" in refused.stderr

    checked = outside("check", "dp-halved")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert listed(outside)["dp-halved"]["certified"]["record"] == [
        "secure-aggregation",
        "trusted-server",
        "untrusted-server",
    ]
    done = outside(*run, "mine")
    assert done.returncode == 0, done.stderr
    cert = json.loads((outside.folder / "mine" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("sordino-example 1.0 (sha256 " in fact for fact in cert["assumes"])

    code = outside.folder / "packages" / "sordino_example.py"  # another content of the same version: checked anew
    code.write_text(code.read_text() + "\n# changed\n")
    assert not listed(outside)["dp-halved"]["checked"]
    assert outside(*run, "again").returncode == 2


def test_a_failed_check_leaves_no_record(outside):
    failed = outside("check", "dp-overclaims")
    assert failed.returncode == 1
    assert not list((outside.folder / "state").rglob("*.json"))
    assert not listed(outside)["dp-overclaims"]["checked"]


@pytest.mark.soak  # the external method above takes the same way
def test_an_external_model_is_found_checked_and_refused_until_then(outside):
    rows = listed(outside, "model")
    assert set(rows) == {"narrow", "mixing"}
    assert rows["narrow"]["options"] == {"width": 4}
    run = ("run", "--method", "dp-fedgd", "--set", "model=narrow", "--set", "width=3", "--set", "rounds=2", "--out")
    refused = outside(*run, "refused")
    assert refused.returncode == 2
    assert "no passed check is on record here: run `sordino check narrow` first" in refused.stderr

    checked = outside("check", "narrow")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert listed(outside, "model")["narrow"]["checked"]
    done = outside(*run, "mine")
    assert done.returncode == 0, done.stderr
    cert = json.loads((outside.folder / "mine" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("The model narrow comes from the package sordino-example 1.0" in fact for fact in cert["assumes"])
    assert outside("verify", "mine").returncode == 0


def test_a_model_that_mixes_records_fails_the_check(outside):
    failed = outside("check", "mixing")
    assert failed.returncode in (1, 2)
    assert not list((outside.folder / "state").rglob("*.json"))
    assert not listed(outside, "model")["mixing"]["checked"]


def test_an_external_transport_is_used(outside):
    done = outside("federate", "coordinate", "study", "--transport", "example", "--port", "8123")
    assert done.returncode == 2
    assert "example transport, port 8123" in done.stderr
    unknown = outside("federate", "coordinate", "study", "--transport", "exampel")
    assert unknown.returncode == 2
    assert "'exampel' is unknown. Did you mean 'example'?" in unknown.stderr
