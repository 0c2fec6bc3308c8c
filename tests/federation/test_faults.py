"""Faults and attacks over real processes: a few here, all of them by `python benchmarks/faults.py`."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

import fault_trials
import random_faults
import scenarios
import stopped_runs
from fixtures import LocalFolders, Loopback, Talk

from sordino import wire
from sordino.errors import RolledBackError
from sordino.federation import coordinator, handler, site
from sordino.federation.config import SiteConfig


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


def test_looking_at_a_ledger_that_a_site_has_not_made_yet_makes_none(tiny, talk):
    """A first message may be lost, so that a site has no ledger when all of them are compared with what left."""
    federation = tiny(rounds=2)
    path = federation.place("north") / "ledger.db"
    assert random_faults.charged_rounds(path) == set()
    assert not path.exists()
    study = talk(federation.site("north"), federation.terms())
    assert random_faults.charged_rounds(path) == set()
    study.propose()
    study.round(0)
    assert random_faults.charged_rounds(path) == {(study.terms.run, 0)}


def test_every_kind_of_fault_is_among_the_scenarios():
    assert {scenario.do for scenario in scenarios.SCENARIOS.values()} == {
        *scenarios.FAULTS,
        "",
        "attack",
        "kill-link",
        "second",
        "cut",
        "stop",
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


class StoppedHereError(Exception):
    pass


@pytest.fixture
def stopped(fast, monkeypatch):
    """A coordinator's folder and sites with a small limit, in one process: `begin` runs what the scenario does."""
    spec = {"delta": 1e-5, "trust": "secure-aggregation"} | stopped_runs.FIRST
    folder = Path(fast)
    federation = LocalFolders(folder / "f", spec, tiny=True)
    monkeypatch.setattr(stopped_runs, "IDLE", 0.5)
    monkeypatch.setattr(coordinator, "ASKED_AGAIN", 0.5)
    sites = stopped_runs.LimitedSites(folder / "limited").copy(federation)

    def end():
        raise StoppedHereError

    def begin():
        made = [site.Site(SiteConfig.read(sites.place(name) / "site.toml")).answer for name in federation.names]
        stopped_runs.undergo(Loopback(dict(enumerate(made))), federation.coordinator, end)

    return begin, lambda: stopped_runs.problems(sites, federation.coordinator)


def test_a_run_with_minibatches_that_was_stopped_stays_charged_as_a_whole(stopped):
    begin, problems = stopped
    with pytest.raises(StoppedHereError):
        begin()
    begin()
    assert problems() == []


@pytest.mark.soak
def test_a_stopped_run_that_pays_for_its_rounds_alone_would_admit_the_second(stopped, monkeypatch):
    """The mutant: nothing is reserved."""
    begin, _ = stopped
    monkeypatch.setattr(site, "reserve", lambda *args: None)
    with pytest.raises(StoppedHereError):
        begin()
    with pytest.raises(RuntimeError, match="the second run was admitted"):
        begin()
