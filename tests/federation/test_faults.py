"""Faults over real processes: a few here, all by `python benchmarks/faults.py`."""

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")


import faults


def test_faults_cost_no_privacy(tmp_path):
    """One test for all: two workers of the suite would otherwise start two federations."""
    found = faults.run(tmp_path, faults.QUICK)
    for name, run in found["runs"].items():
        assert faults.as_expected(name, run["came"]), (name, run)
        assert run["unpaid"] == 0, (name, run)
        assert run["site_certificates"] == 4, (name, run)
    # A coordinator that was killed ends as one that was not.
    whole, killed = (found["runs"][name] for name in ("uninterrupted", "coordinator-killed-mid-round"))
    assert killed["epsilon"] == whole["epsilon"]
    assert "server" in found["restarts"]
