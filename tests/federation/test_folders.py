"""Folders, and the commands that write and use them; no network."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from sordino.cli import main
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.evidence.signing import sha256
from sordino.federation import readmes
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.flower import deploy
from sordino.secagg import Roster

pytest.importorskip("flwr", reason="needs sordino[flower]")


def test_files_with_unknown_or_missing_keys_are_refused(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('name = "a"\ndata = "x"\nepsilon = 1\ndelta = 1e-5\nmethod = ["dp-fedgd"]\n')
    with pytest.raises(ValueError, match="Did you mean 'methods'"):
        SiteConfig.read(path)
    path.write_text('name = "a"\ndata = "x"\n')
    with pytest.raises(ValueError, match="must set it"):
        SiteConfig.read(path)
    path.write_text('name = "a"\ndata = "x"\nepsilon = "much"\ndelta = 1e-5\n')
    with pytest.raises(ValueError, match="must be a number"):
        SiteConfig.read(path)


def test_init_writes_a_folder_and_refuses_what_cannot_be(tmp_path, capsys):
    made = tmp_path / "study"
    words = ["federate", "init", str(made), "--sites", "a,b,c", "--features", "5", "--classes", "0,1"]
    assert main(words) == 0
    assert {path.name for path in made.iterdir()} >= {"spec.toml", "federation.toml", "README.md", "nodes"}
    page = (made / "README.md").read_text()
    steps = ("--data FILE --label COLUMN --classes 0,1 --limit 8", "nodes/NAME.pub", "doctor SITE", "federate coord")
    steps += ("authority.pem`; send", "federate join", "ledger show")
    places = [page.index(step) for step in steps]
    assert sorted(places) == places, "the steps stand in the order in which they are done"
    assert main(words) == 2  # not empty
    for more, why in (
        (
            ["--sites", "a,b"],
            "secure aggregation needs at least 3 sites where 0 may drop out and 1 may collude, and there are 2 sites",
        ),
        (["--sites", "a,b"], "--trust untrusted-server; or `federate init` with --colluders 0, if every site.toml"),
        (["--sites", "a"], "there is 1 site. Use --trust untrusted-server; or add sites."),
        (["--sites", "a,b", "--dropouts", "1"], "--trust untrusted-server; or fewer --dropouts; or add sites."),
        (["--method", "dp-scaffold"], "not proved private"),
        (["--dropouts", "2"], "at least 5 sites where 2 may drop out"),
        (["--epsilon", "-1"], "epsilon"),
        (["--sites", "a,../b,c"], "letters"),
    ):
        assert main([*words[:2], str(tmp_path / "other"), *words[3:], *more]) == 2
        assert why in capsys.readouterr().err
        shutil.rmtree(tmp_path / "other", ignore_errors=True)


def test_init_proposes_auto_where_it_works_and_says_why(tmp_path, capsys):
    words = ["federate", "init", "--sites", "a,b,c"]
    shape, heart = ["--features", "5"], Path(__file__).parents[2] / "examples" / "schemas" / "heart_disease.toml"
    for name, more, method, why in (
        ("numbers", shape, "dp-fedsofim", "learns numbers only within the public range of a schema"),
        ("classes", [*shape, "--classes", "0,1"], "auto", "has nothing to tune"),
        ("table", ["--schema", str(heart)], "auto", "has nothing to tune"),
        ("asked", [*shape, "--classes", "0,1", "--method", "dp-fedgd"], "dp-fedgd", ""),
    ):
        assert main([*words, *more, str(tmp_path / name)]) == 0
        text = (tmp_path / name / "spec.toml").read_text()
        assert tomllib.loads(text)["method"] == method
        assert why in text
        assert ("auto" in text) == bool(why)
    assert main([*words, *shape, "--method", "auto", str(tmp_path / "a")]) == 2
    assert "auto learns a quantity within a public range" in capsys.readouterr().err


def test_two_sites_take_what_init_advises(tmp_path):
    words = ["federate", "init", "--sites", "a,b", "--features", "5", "--classes", "0,1"]
    for name, more in (("open", ["--trust", "untrusted-server"]), ("secure", ["--colluders", "0"])):
        assert main([*words, str(tmp_path / name), *more]) == 0
    assert FederationConfig.read(tmp_path / "secure" / "federation.toml").colluders == 0
    assert "colluders" not in (tmp_path / "open" / "federation.toml").read_text()  # it would have no effect


def test_keys_print_a_card_for_the_roster_and_are_never_overwritten(tmp_path, capsys):
    assert main(["federate", "keys", "north", str(tmp_path / "n"), "--classes", "0,1"]) == 0
    card, note = capsys.readouterr()
    assert Roster.parse(card.encode()).names == ("north",)
    assert "does not exist yet" in note
    assert f"Send the lines above and {tmp_path}/n/node.pub to the coordinator" in note
    for name in ("identity.key", "node"):
        assert (tmp_path / "n" / name).stat().st_mode & 0o077 == 0
    assert main(["federate", "keys", "north", str(tmp_path / "n")]) == 0
    again, note = capsys.readouterr()
    assert again == card  # the same once more
    assert "site.toml were kept as they are; edit" in note
    assert main(["federate", "keys", "north", str(tmp_path / "n"), "--limit", "3"]) == 0
    assert "--limit had no effect; edit" in capsys.readouterr().err
    assert SiteConfig.read(tmp_path / "n" / "site.toml").epsilon == 8.0
    assert main(["federate", "keys", "south", str(tmp_path / "n")]) == 2
    assert main(["federate", "keys", "south", str(tmp_path / "s"), "--limit", "0"]) == 2


def test_a_schema_takes_the_place_of_features_classes_and_label(tmp_path, capsys):
    schema = Path(__file__).parents[2] / "examples" / "schemas" / "heart_disease.toml"
    known, study, site = Schema.read(schema), tmp_path / "study", tmp_path / "north"
    words = ["federate", "init", str(study), "--sites", "north,south,west"]
    assert main([*words, "--schema", str(schema)]) == 0
    config = FederationConfig.read(study / "federation.toml")
    assert (config.features, config.classes) == (len(known.features), known.classes)
    page = (study / "README.md").read_text()
    assert "--data FILE --schema schema.toml --limit 8" in page
    assert "send this page with `spec.toml` and `schema.toml` to the sites" in page
    assert "--label" not in page
    assert main(["federate", "keys", "north", str(site), "--schema", str(schema)]) == 0
    mine = SiteConfig.read(site / "site.toml")
    assert (mine.label, mine.classes) == (known.target.column, known.classes)
    assert sha256(site / "schema.toml") == sha256(study / "schema.toml") == sha256(schema)
    capsys.readouterr()
    for wrong, why in (
        ([*words, "--schema", str(schema), "--features", "3"], "--features: give either"),
        (words, "--features: give either"),
        ([*words, "--feature", "3"], "Did you mean '--features'?"),
        ([*words, "--schema", str(tmp_path / "none.toml")], "none.toml"),
        (
            ["federate", "keys", "s", str(tmp_path / "s"), "--schema", str(schema), "--label", "x"],
            "the schema has them",
        ),
    ):
        wrong[2] = wrong[2] if wrong[1] == "keys" else str(tmp_path / "other")
        assert main(wrong) == 2, wrong
        assert why in capsys.readouterr().err, wrong
    assert not (tmp_path / "other").exists()


def test_a_ledger_is_shown_and_exported(federation, tmp_path, capsys):
    federation = federation(rounds=2)
    federation.run()
    path = str(federation.place("north") / "ledger.db")
    assert main(["ledger", "show", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["whole"]
    assert shown["runs"][0]["rounds"] == 2
    assert 0 < shown["accounts"][0]["epsilon"] <= 8
    assert main(["ledger", "export", path]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + shown["rows"]
    assert main(["ledger", "show", path]) == 0
    assert main(["ledger", "show", str(tmp_path / "nothing.db")]) == 2


def test_every_folder_says_what_may_leave_it(three):
    """And the records are readable by their owner alone."""
    assert "Do not copy or publish this folder as a whole" in (three / "README.txt").read_text()
    told = (three / "sites" / "site1" / "README.txt").read_text()
    assert "The folder of the site site1. Only the files listed here may leave it" in told
    for path in (*(three / "sites").glob("*/data.npz"), three / "coordinator" / "test.npz"):
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_run_says_what_may_leave_it_and_a_wrong_folder_names_the_right_ones(federation, capsys):
    federation = federation(rounds=2)
    coordinator, _ = federation.run()
    place = federation.place("north")
    (run,) = (place / "runs").iterdir()
    for folder, words in ((coordinator.out, "These files may be published"), (run, "NOTHING IN THIS FOLDER MAY LEAVE")):
        assert words in (folder / "README.txt").read_text()  # the sites of this test are seeded
        cert = json.loads((folder / "certificate.json").read_text())
        assert cert["model_sha256"] == sha256(folder / "model.safetensors")
    assert main(["verify", str(coordinator.out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(place)]) == 2
    assert f"holds no certificate.json itself; name one of its folders: {run}." in capsys.readouterr().err
    assert main(["ledger", "show", str(place.parent)]) == 2
    assert str(place) in capsys.readouterr().err
    (coordinator.out / "model.safetensors").write_bytes(b"another")
    assert main(["verify", str(coordinator.out)]) == 1
    assert "model.safetensors is not the one" in capsys.readouterr().out


def test_of_a_run_that_is_not_finished_or_not_certified_nothing_may_leave():
    assert "not finished" in readmes.of_run(None, readmes.SITE_RUN)
    told = readmes.of_run({"certified": False, "reasons": ["seeded: not private"]}, readmes.SITE_RUN)
    assert "NOTHING IN THIS FOLDER MAY LEAVE IT" in told
    assert "seeded: not private" in told
    assert "may be published" not in told


def test_a_step_must_be_named(capsys):
    assert main(["federate"]) == 2
    assert "name a step: up, init" in capsys.readouterr().err


def test_a_join_that_cannot_be_fixes_no_limit(three, tmp_path):
    site = three / "sites" / "site1"
    for words in (("nowhere:8000", tmp_path / "none.pem"), ("no address", tmp_path)):
        with pytest.raises(SordinoError):
            next(deploy.join(site / "site.toml", *words))
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
