"""Folders, the doctor, and the commands around them; no network."""

import json
import shutil
import sys
from subprocess import Popen
from types import SimpleNamespace

import pytest

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation import folder
from sordino.federation.config import Federation, SiteConfig
from sordino.federation.flower import deploy
from sordino.secagg import Roster

pytest.importorskip("flwr", reason="needs sordino[flower]")


@pytest.fixture
def three(tmp_path):
    """A coordinator and three sites, as `up` makes them."""
    folder.demonstration(tmp_path / "f", 3, spec={"rounds": 4})
    return tmp_path / "f"


def said(path, **keys):
    return [what for fine, what in folder.doctor(path, **keys) if not fine]


def test_what_up_makes_passes_the_doctor(three):
    for name in ("site1", "site2", "site3"):
        assert said(three / "sites" / name / "site.toml", coordinator=three / "coordinator") == []
    roster = Roster.read(three / "coordinator" / "roster.toml")
    assert roster.names == Federation.read(three / "coordinator" / "federation.toml").sites


def test_the_doctor_finds_what_is_amiss(three):
    site = three / "sites" / "site1"
    keep = (site / "site.toml").read_text()

    def with_text(old, new):
        (site / "site.toml").write_text(keep.replace(old, new))
        found = said(site / "site.toml", coordinator=three / "coordinator")
        (site / "site.toml").write_text(keep)
        return " ".join(found)

    assert "none of the public ones" in with_text('"9"]', '"nine"]')
    assert "others.npz" in with_text("data.npz", "others.npz")
    assert "seed" in with_text("delta = 1e-5", "delta = 1e-5\nseed = 3")
    shutil.copy(three / "sites" / "site2" / "identity.key", site / "identity.key")
    assert any("site2" in what for what in said(site / "site.toml"))


def test_the_doctor_sees_that_a_run_cannot_be_afforded(three):
    site = three / "sites" / "site1"
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text(text.replace("epsilon = 16.0", "epsilon = 2.0"))
    assert any("2 is allowed" in what for what in said(site / "site.toml", coordinator=three / "coordinator"))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("# methods = [", "methods = ['dp-fedgd']\n# [", "not among those allowed"),
        ("# trust = [", "trust = ['untrusted-server']\n# [", "is not allowed"),
        ("# most_rounds = 1000", "most_rounds = 3", "most_rounds is 3"),
        ('"8", "9"]', '"9", "8"]', "classes are not those"),
    ],
)
def test_the_doctor_tells_what_the_site_would_refuse(three, old, new, why):
    site = three / "sites" / "site1" / "site.toml"
    text = site.read_text()
    assert old in text
    site.write_text(text.replace(old, new))
    assert any(why in what for what in said(site, coordinator=three / "coordinator"))
    assert not (site.parent / "ledger.db").exists()  # only looking: no limit is set


def test_the_doctor_compares_rosters(three):
    site = three / "sites" / "site1"
    roster = Roster.read(site / "roster.toml")
    Roster((roster.sites[0], *roster.sites[:0:-1])).write(site / "roster2.toml")
    shutil.copy(site / "roster2.toml", site / "roster.toml")
    assert any("another" in what for what in said(site / "site.toml", coordinator=three / "coordinator"))


def test_files_with_unknown_or_missing_keys_are_refused(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('name = "a"\ndata = "x"\nepsilon = 1\ndelta = 1e-5\nmethod = ["dp-fedgd"]\n')
    with pytest.raises(ValueError, match="Did you mean 'methods'"):
        SiteConfig.read(path)
    path.write_text('name = "a"\ndata = "x"\n')
    with pytest.raises(ValueError, match="must name it"):
        SiteConfig.read(path)
    path.write_text('name = "a"\ndata = "x"\nepsilon = "much"\ndelta = 1e-5\n')
    with pytest.raises(ValueError, match="must be a number"):
        SiteConfig.read(path)


def test_init_writes_an_app_and_refuses_what_cannot_be(tmp_path, capsys):
    made = tmp_path / "study"
    words = ["federate", "init", str(made), "--sites", "a,b,c", "--features", "5", "--classes", "0,1"]
    assert main(words) == 0
    assert {path.name for path in made.iterdir()} >= {"spec.toml", "federation.toml", "README.md", "app", "nodes"}
    assert "sordino federate coordinate" in (made / "README.md").read_text()
    assert main(words) == 2  # not empty
    for more, why in (
        (["--sites", "a,b"], "no better than untrusted-server"),
        (["--method", "dp-scaffold"], "not proved private"),
        (["--dropouts", "2"], "Allow fewer"),
        (["--epsilon", "-1"], "epsilon"),
        (["--sites", "a,../b,c"], "letters"),
    ):
        assert main([*words[:2], str(tmp_path / "other"), *words[3:], *more]) == 2
        assert why in capsys.readouterr().err
        shutil.rmtree(tmp_path / "other", ignore_errors=True)


def test_keys_print_a_card_for_the_roster_and_are_never_overwritten(tmp_path, capsys):
    assert main(["federate", "keys", "north", str(tmp_path / "n"), "--classes", "0,1"]) == 0
    card, note = capsys.readouterr()
    assert Roster.parse(card.encode()).names == ("north",)
    assert "there is no file 'data" in note
    for name in ("identity.key", "node"):
        assert (tmp_path / "n" / name).stat().st_mode & 0o077 == 0
    assert main(["federate", "keys", "north", str(tmp_path / "n")]) == 0
    assert capsys.readouterr().out == card  # the same once more
    assert main(["federate", "keys", "south", str(tmp_path / "n")]) == 2
    assert main(["federate", "keys", "south", str(tmp_path / "s"), "--limit", "0"]) == 2


def test_a_ledger_is_shown_and_exported(world, tmp_path, capsys):
    world = world(rounds=2)
    world.run()
    path = str(world.place("north") / "ledger.db")
    assert main(["ledger", "show", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["whole"]
    assert shown["runs"][0]["rounds"] == 2
    assert 0 < shown["accounts"][0]["epsilon"] <= 8
    assert main(["ledger", "export", path]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + shown["rows"]
    assert main(["ledger", "show", path]) == 0
    assert main(["ledger", "show", str(tmp_path / "nothing.db")]) == 2


def test_a_step_must_be_named(capsys):
    assert main(["federate"]) == 2
    assert "name a step: up, init" in capsys.readouterr().err


def test_a_join_that_cannot_be_fixes_no_limit(three, tmp_path):
    site = three / "sites" / "site1"
    for words in (("nowhere:8000", tmp_path / "none.pem"), ("no address", tmp_path)):
        with pytest.raises(SordinoError):
            deploy.join(site / "site.toml", *words)
    assert not (site / "ledger.db").exists()


@pytest.mark.parametrize("how", ["an unknown method", "no roster"])
def test_a_coordinator_tells_what_cannot_be_before_it_waits(three, how):
    place = three / "coordinator"
    if how == "no roster":
        (place / "roster.toml").unlink()
    else:
        (place / "spec.toml").write_text((place / "spec.toml").read_text().replace("dp-fedsofim", "dp-fedsofi"))
    with pytest.raises(SordinoError, match=r"dp-fedsofim|roster"):
        next(deploy.coordinate(place, port=1))


# --------------------------------------------------------------------------------------------- following a coordinator


@pytest.fixture
def running(tmp_path):
    """What `follow` looks at: processes by name, and their logs."""
    sleepers = {name: Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for name in ("server", "link")}
    yield SimpleNamespace(processes=sleepers, log=lambda name: tmp_path / f"{name}.log")
    for process in sleepers.values():
        process.kill()
        process.wait()


def progress(path, *whats):
    path.write_text("".join(json.dumps({"what": what}) + "\n" for what in whats))
    return path


def test_a_coordinator_that_failed_before_is_followed_from_its_next_word_on(tmp_path, running):
    path = progress(tmp_path / "p", "waiting", "failed", "waiting", "round", "finished")
    assert [line["what"] for line in folder.follow(path, running, 5.0)] == ["waiting", "failed"]
    seen = folder.count_lines(progress(tmp_path / "q", "waiting", "failed"))
    assert [line["what"] for line in folder.follow(path, running, 5.0, seen)] == ["waiting", "round", "finished"]


@pytest.mark.parametrize("name", ["server", "link"])
def test_a_process_that_dies_is_told_and_not_waited_for(tmp_path, running, name):
    running.processes[name].kill()
    running.processes[name].wait()
    with pytest.raises(SordinoError, match=rf"ended with status -9; see .*{name}.log.*goes on"):
        list(folder.follow(progress(tmp_path / "p", "waiting"), running, 30.0))


def test_it_is_not_followed_for_ever(tmp_path, running):
    with pytest.raises(SordinoError, match=r"more than 0\.3 s"):
        list(folder.follow(tmp_path / "none", running, 0.3))
