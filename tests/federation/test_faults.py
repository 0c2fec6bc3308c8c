"""Faults over real processes: a few here, all by `python benchmarks/faults.py`."""

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")


import faults


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return faults.run(tmp_path_factory.mktemp("faults"), faults.QUICK)


@pytest.mark.parametrize("name", faults.QUICK)
def test_a_fault_costs_no_privacy(found, name):
    run = found["runs"][name]
    assert faults.as_expected(name, run["came"])
    assert run["unpaid"] == 0
    assert run["site_certificates"] == 4


def test_a_coordinator_that_was_killed_ends_as_one_that_was_not(found):
    whole, killed = (found["runs"][name] for name in ("uninterrupted", "coordinator-killed-mid-round"))
    assert killed["epsilon"] == whole["epsilon"]
    assert "server" in found["restarts"]
