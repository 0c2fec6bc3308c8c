"""Faults and attacks over real processes: a few here, all of them by `python benchmarks/faults.py`."""

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

import fault_trials
import scenarios
from fixtures import Talk

from sordino import wire
from sordino.errors import RolledBackError
from sordino.federation import handler


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
        "second",
        "cut",
        "random-faults",
    }
    assert len(scenarios.STORMS) == 100


def test_a_restored_backup_is_refused_until_the_newest_files_are_back(tiny, tmp_path, monkeypatch):
    federation = tiny(rounds=3)
    federation.configure("north", witness="../witness-of-north.json")
    monkeypatch.setenv("FAULTS", str(tmp_path))
    monkeypatch.setenv("SORDINO_SITE", "north")
    monkeypatch.setenv("SORDINO_SITE_FILE", str(federation.place("north") / "site.toml"))
    study = Talk(None, federation.terms())

    def asked(request):
        return wire.decode(handler.handle(request)).kind

    assert asked(wire.encode("terms", {"terms": study.terms.json()})) == "agreed"
    assert asked(study.request(0)) == "update"
    reply = scenarios.restore_old(lambda: handler.handle(study.request(1)))
    assert wire.decode(reply).kind == "update"
    with pytest.raises(RolledBackError):
        asked(study.request(2))
    with pytest.raises(RolledBackError):
        scenarios.restore_old(lambda: handler.handle(study.request(2)))
    assert asked(study.request(2)) == "update"
    assert [t for _, t in federation.charged("north")] == [0, 1, 2]
