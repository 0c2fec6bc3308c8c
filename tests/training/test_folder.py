"""What README.txt, console and statement of a run say of publishing it."""

import json

import numpy as np
import pytest

from sordino.cli import main
from sordino.training import run
from sordino.training.folder import tested_on as exposed
from sordino.training.spec import Spec


@pytest.fixture
def patients(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{'ill' if a + b > 0 else 'well'},{'NSW'[k % 3]}"
        for k, (a, b) in enumerate(rng.normal(size=(300, 2)))
    ]
    (tmp_path / "patients.csv").write_text("age,dose,outcome,hospital\n" + "\n".join(rows) + "\n")
    return ["run", "--data", str(tmp_path / "patients.csv"), "--label", "outcome", "--partition", "by-column:hospital"]


NOT_PRIVATE = {
    "inf": ["--epsilon", "inf"],
    "seeded": ["--seed", "1"],
    "unproved": [
        "--method",
        "dp-scaffold",
        "--trust",
        "secure-aggregation",
        "--set",
        "uncertified=true",
        "--set",
        "steps=3",
    ],
}


def test_a_run_that_is_not_certified_says_why_it_may_be_published(tmp_path, capsys):
    assert main(["run", "--rounds", "6", "--seed", "1", "--out", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "NOT certified" in shown
    assert "public/ may be published because its data are public, private/ may not" in shown


@pytest.mark.parametrize("words", list(NOT_PRIVATE.values()), ids=list(NOT_PRIVATE))
def test_of_a_run_that_is_not_certified_nothing_may_be_published(patients, words, tmp_path, capsys):
    out, report = tmp_path / "run", tmp_path / "run.json"
    assert main([*patients, "--rounds", "5", *words, "--out", str(out), "--json", str(report)]) == 0
    shown, told = capsys.readouterr().out, (out / "README.txt").read_text()
    assert "nothing here may be published" in shown
    assert "NOTHING IN THIS FOLDER MAY BE PUBLISHED" in told
    for text in (shown, told):
        assert "public/ may be published" not in text
        assert "public/   may be published" not in text
    assert json.loads(report.read_text())["publishable"] is False
    assert ("holds the seed of the noise" in told) is ("--seed" in words)


def test_of_a_certified_run_or_of_public_data_the_public_part_may_be_published(patients, tmp_path, capsys):
    assert main([*patients, "--rounds", "5", "--out", str(tmp_path / "a")]) == 0
    shown, told = capsys.readouterr().out, (tmp_path / "a" / "README.txt").read_text()
    assert "public/ may be published" in shown
    assert "exposed    the 60 test records (20% of all records): no noise hides them" in shown
    assert told.startswith("public/   may be published. ")
    assert "NOT PROTECTED: the 60 test records (20% of all records)" in told
    assert "docs/" not in told, "a run's folder does not hold the documentation"
    assert main(["run", "--rounds", "5", "--seed", "1", "--out", str(tmp_path / "b")]) == 0
    assert "public/ may be published" in capsys.readouterr().out
    assert "because its data are public" in (tmp_path / "b" / "README.txt").read_text()


def test_an_interrupted_run_says_so(tmp_path):
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 2}))
    run.start(job, tmp_path / "run")
    told = (tmp_path / "run" / "README.txt").read_text()
    assert f"sordino run --resume {tmp_path / 'run'}" in told
    assert "Publish nothing" in told
    assert "model.safetensors" not in told, "a file that does not exist yet"
    run.finish(job, tmp_path / "run", list(run.rounds(job, tmp_path / "run")))
    assert "model.safetensors" in (tmp_path / "run" / "README.txt").read_text()


@pytest.mark.parametrize("words", list(NOT_PRIVATE.values()), ids=list(NOT_PRIVATE))
def test_the_statement_of_a_run_that_is_not_certified_promises_nothing(patients, words, tmp_path):
    assert main([*patients, "--rounds", "5", *words, "--out", str(tmp_path / "run")]) == 0
    told = (tmp_path / "run" / "public" / "statement.md").read_text()
    assert "**Not certified.**" in told
    unproved = "dp-scaffold" in words
    assert (
        "Protected: nothing is certified to be protected." if unproved else "Protected: nothing is protected."
    ) in told
    assert "Against: nobody." in told
    for promise in ("nobody can tell", "Against: anyone", "right in at most", "The guarantee", "Every released number"):
        assert promise not in told, promise


def test_shares_of_test_records_do_not_mix_records_and_persons():
    assert exposed({"test_records": 20, "records": 80, "unit": "record"}) == "the 20 test records (20% of all records)"
    assert exposed({"test_records": 20, "records": 80, "unit": "person"}) == "the 20 test records"
    assert exposed({"test_records": None, "records": None, "unit": "client"}) == "the records held out for testing"
