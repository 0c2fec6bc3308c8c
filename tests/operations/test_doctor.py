"""The checks of a site before it joins."""

import json
import re
import shutil

import numpy as np
import pytest

from sordino.cli import main
from sordino.federation.config import FederationConfig
from sordino.operations.doctor import doctor
from sordino.operations.status import of_site
from sordino.secagg import Roster

pytest.importorskip("flwr", reason="needs sordino[flower]")


def problems(path, **keys):
    return [f"{check.about}: {check.says}" for check in doctor(path, **keys) if not check.fine]


def test_the_doctor_says_how_many_records_are_held_out(three):
    site = three / "sites" / "site1" / "site.toml"
    told = [check.says for check in doctor(site) if check.about == "data"]
    train, held = (int(number) for number in re.findall(r"(\d+) (?:training|more)", told[0]))
    assert "held out for testing" in told[0]
    with np.load(site.with_name("data.npz")) as arrays:
        assert train + held == sum(len(arrays[name]) for name in arrays if name.startswith("y"))
    assert held == round(0.2 * (train + held))


def test_what_up_makes_passes_the_doctor(three):
    for name in ("site1", "site2", "site3"):
        assert problems(three / "sites" / name / "site.toml", coordinator=three / "coordinator") == []
    roster = Roster.read(three / "coordinator" / "roster.toml")
    assert roster.names == FederationConfig.read(three / "coordinator" / "federation.toml").sites


def test_the_doctor_takes_a_folder_and_names_what_the_coordinator_must_send(three, capsys):
    site = three / "sites" / "site1"
    assert main(["federate", "doctor", str(site)]) == 0
    assert "ready to join" in capsys.readouterr().out
    (site / "roster.toml").unlink()
    (site / "authority.pem").write_text("garbage")
    assert main(["federate", "doctor", str(site), "--json", "-"]) == 1
    told = {check["about"]: check["what"] for check in json.loads(capsys.readouterr().out)}
    assert "the coordinator collects them in it and sends it to all sites" in told["roster.toml"]
    assert "is not a certificate in PEM form" in told["authority.pem"]
    assert "cryptography" not in told["authority.pem"]
    assert main(["federate", "join", str(site), "--link", "127.0.0.1:1", "--authority", str(site / "none.pem")]) != 0
    assert "none.pem' does not exist" in capsys.readouterr().err


def test_advice_has_its_own_word(three, capsys):
    site = three / "sites" / "site1"
    assert main(["federate", "doctor", str(site), "--federation", str(three / "coordinator")]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "note any_choice" in lines
    assert "set any_choice = true in site.toml before it" in lines
    assert "ok any_choice" not in lines


def test_the_hash_of_the_roster_is_printed_in_full(three):
    site = three / "sites" / "site1"
    (says,) = (check.says for check in doctor(site / "site.toml") if check.about == "roster.toml")
    assert Roster.read(site / "roster.toml").sha256() in says.replace(" ", "")


def test_a_sites_folder_belongs_to_its_owner_alone(three):
    site = three / "sites" / "site1"
    assert site.stat().st_mode & 0o777 == 0o700
    site.chmod(0o755)
    assert any("chmod 700" in check.says for check in doctor(site / "site.toml"))


def test_the_doctor_finds_what_is_amiss(three):
    site = three / "sites" / "site1"
    keep = (site / "site.toml").read_text()

    def with_text(old, new):
        (site / "site.toml").write_text(keep.replace(old, new))
        found = problems(site / "site.toml", coordinator=three / "coordinator")
        (site / "site.toml").write_text(keep)
        return " ".join(found)

    assert "none of the public ones" in with_text('"9"]', '"nine"]')
    assert "others.npz" in with_text("data.npz", "others.npz")
    assert "seed" in with_text("delta = 1e-5", "delta = 1e-5\nseed = 3")
    shutil.copy(three / "sites" / "site2" / "identity.key", site / "identity.key")
    assert any("site2" in problem for problem in problems(site / "site.toml"))


def test_the_doctor_sees_that_a_run_cannot_be_afforded(three):
    site = three / "sites" / "site1"
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text(text.replace("epsilon = 16.0", "epsilon = 2.0"))
    (problem,) = (p for p in problems(site / "site.toml", coordinator=three / "coordinator") if "2 is allowed" in p)
    assert "run_epsilon = 2.0 in site.toml requests that ε" in problem
    (site / "site.toml").write_text(text.replace("epsilon = 16.0", "epsilon = 2.0\nrun_epsilon = 2.0"))
    assert problems(site / "site.toml", coordinator=three / "coordinator") == []


def test_the_doctor_counts_an_open_study_once_and_what_is_promised_to_others(tiny, talk):
    federation = tiny(rounds=3)
    federation.configure("north", epsilon=9.0, delta=1e-5)
    study = talk(federation.site("north"), federation.terms())
    assert study.propose().kind == "agreed"
    assert study.round(0).kind == "update"
    site, run = federation.place("north") / "site.toml", federation.coordinator / "run"

    run.mkdir()
    (run / "terms.json").write_text(study.terms.json())
    (own,) = [c for c in doctor(site, coordinator=federation.coordinator) if "the run has begun here" in c.says]
    assert (own.about, own.fine) == ("budget", True)
    (run / "terms.json").unlink()  # another study: both do not fit
    told = [c for c in doctor(site, coordinator=federation.coordinator) if c.about == "budget" and not c.fine]
    assert len(told) == 1
    left = re.search(r"a run of up to ε = ([\d.]+) fits", told[0].says)
    assert left, told[0].says
    assert float(left[1]) == pytest.approx(of_site(site.parent).left, rel=1e-3)


def test_the_doctor_lists_all_rules_that_the_terms_break(three):
    path = three / "sites" / "site1" / "site.toml"
    path.write_text(path.read_text() + '\nmethods = ["dp-fedgd"]\nmost_rounds = 1\nmodels = ["squares"]\n')
    told = " ".join(problems(path, coordinator=three / "coordinator"))
    for rule in ("method dp-fedsofim; site.toml allows dp-fedgd", "most_rounds is 1", "site.toml allows squares"):
        assert rule in told


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("# methods = [", "methods = ['dp-fedgd']\n# [", "method dp-fedsofim; site.toml allows dp-fedgd"),
        (
            "# trust = [",
            "trust = ['untrusted-server']\n# [",
            "trust secure-aggregation; site.toml allows untrusted-server",
        ),
        ("# most_rounds = 1000", "most_rounds = 3", "most_rounds is 3"),
        ('"8", "9"]', '"9", "8"]', "classes of the terms are not those of site.toml"),
    ],
)
def test_the_doctor_tells_what_the_site_would_refuse(three, old, new, why):
    site = three / "sites" / "site1" / "site.toml"
    text = site.read_text()
    assert old in text
    site.write_text(text.replace(old, new))
    assert any(why in problem for problem in problems(site, coordinator=three / "coordinator"))
    assert not (site.parent / "ledger.db").exists()  # only looking: no limit is set


def test_the_doctor_compares_rosters(three):
    site = three / "sites" / "site1"
    roster = Roster.read(site / "roster.toml")
    Roster((roster.sites[0], *roster.sites[:0:-1])).write(site / "roster2.toml")
    shutil.copy(site / "roster2.toml", site / "roster.toml")
    told = problems(site / "site.toml", coordinator=three / "coordinator")
    assert any("a key or the order differs" in problem for problem in told)
