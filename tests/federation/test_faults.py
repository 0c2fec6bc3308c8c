"""Faults and attacks over real processes: a few here, all of them by `python benchmarks/faults.py`."""

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

import fault_trials
import scenarios


@pytest.mark.soak
def test_faults_cost_no_privacy(tmp_path):
    """One federation runs all scenarios, because it takes half a minute to start."""
    found = fault_trials.run(tmp_path, fault_trials.QUICK)
    assert found["violations"] == []
    for name, run in found["runs"].items():
        assert fault_trials.problems(name, run) == [], name
    # A coordinator that was killed ends as one that was not.
    whole, killed = (found["runs"][name] for name in ("uninterrupted", "coordinator-killed-mid-round"))
    assert (killed["epsilon"], killed["model"]) == (whole["epsilon"], whole["model"])
    assert found["restarts"]["server"] >= 1
    assert found["restarts"]["worker"] >= 1
    hostile = found["runs"]["open-hostile-server"]
    assert hostile["kinds"] > 80
    assert max(hostile["moved_of_sensitivity"]) > 0.1  # the record was there to be seen


def test_every_kind_of_fault_is_among_the_scenarios():
    assert {scenario.do for scenario in scenarios.SCENARIOS.values()} == {
        *scenarios.FAULTS,
        "",
        "attack",
        "kill-link",
        "random-faults",
    }
    assert len(scenarios.STORMS) == 100
