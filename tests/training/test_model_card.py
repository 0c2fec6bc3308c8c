"""MODEL_CARD.md: written from the public files of a run, and from nothing else."""

import json
import shutil

import numpy as np
import pytest

from sordino.cli import main
from sordino.training import model_card
from sordino.training.verify_run import verify_run
from tests.support import AGE, DIED, WARD

SCHEMA = f"""
{DIED}{AGE}{WARD.replace("ward", '"ward | floor"')}

[columns.name]
type = "drop"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("card"), np.random.default_rng(0)
    rows = ["age,ward | floor,name,died"]
    for k in range(200):
        age = rng.integers(20, 90)
        rows.append(f"{age},{rng.choice(['surgery', 'secret-ward'])},patient-{k},{'yes' if age > 55 else 'no'}")
    (place / "patients.csv").write_text("\n".join(rows) + "\n")
    (place / "schema.toml").write_text(SCHEMA)
    (place / "clients.toml").write_text('client = "name"\n' + SCHEMA)
    for name, schema, words in (
        ("run", "schema.toml", []),
        ("seeded", "schema.toml", ["--seed", "1"]),
        ("client", "clients.toml", ["--unit", "client", "--method", "dp-fedgd"]),
    ):
        words += ["--data", str(place / "patients.csv"), "--schema", str(place / schema), "--rounds", "6"]
        assert main(["run", *words, "--out", str(place / name), "--json", str(place / f"{name}.json")]) == 0
    return place


def read(place, name):
    public = place / name / "public"
    metrics = [json.loads(line) for line in (public / "metrics.jsonl").read_text().splitlines()]
    return (public / "MODEL_CARD.md").read_text(), json.loads((public / "certificate.json").read_text()), metrics[-1]


def test_it_says_what_the_run_says(place):
    card, cert, metrics = read(place, "run")
    for head in ("Intended use", "Not intended", "Metrics", "Privacy", "Data", "How to verify"):
        assert f"\n## {head}\n" in card
    assert "It predicts the column `died`: the classes no, yes." in card
    assert f"| accuracy | {metrics['accuracy']:.4g} |" in card
    assert "**ε = 8 at δ = 1e-05**, record level, replace-one, untrusted-server." in card
    assert "the content of any single record" in card
    assert cert["model_sha256"] in card
    assert "| age | number | 20 … 90 becomes -1 … 1; beyond is clamped |" in card
    assert r"| ward \| floor | category | 0 or 1 for each of surgery, medicine or other |" in card
    assert "Columns that are not used: 1." in card
    assert "On 40 test records" in card


def test_it_holds_nothing_of_the_records(place):
    card, _, _ = read(place, "run")
    assert "secret-ward" not in card
    assert "patient-" not in card
    _, cert, metrics = read(place, "run")
    header = model_card.read_header(place / "run" / "public" / "model.safetensors")
    assert card == model_card.card(cert, metrics, header), "a function of public files"


def test_a_run_that_is_not_certified_says_so(place):
    card, _, _ = read(place, "seeded")
    assert "**Not certified**: seeded: not private" in card
    assert "Publication, unless the training data are public" in card
    assert "**ε" not in card


def test_at_client_level_it_counts_no_records(place):
    card, cert, _ = read(place, "client")
    assert cert["test_records"] is None
    assert "On test records that were held out" in card
    assert "all data of any one client" in card


def test_verify_compares_it(place, tmp_path):
    assert verify_run(place / "run").problems == []
    for name, change in (("words", ("8 at", "1 at")), ("metrics", ("| accuracy | ", "| accuracy | 9"))):
        shutil.copytree(place / "run", tmp_path / name)
        path = tmp_path / name / "public" / "MODEL_CARD.md"
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change))
        problems = [
            "MODEL_CARD.md is not the one that the certificate names",
            "MODEL_CARD.md does not say what certificate, metrics and model say",
        ]
        assert verify_run(tmp_path / name).problems == problems
    shutil.copytree(place / "run", tmp_path / "alone")
    (tmp_path / "alone" / "public" / "model.safetensors").unlink()
    verdict = verify_run(tmp_path / "alone")
    assert verdict.problems == []
    assert "MODEL_CARD.md, because the metrics or the model are not beside it" in verdict.gaps


def test_without_a_schema(tmp_path):
    words = ["run", "--method", "dp-fedgd", "--rounds", "2", "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "o.json")]) == 0
    card = (tmp_path / "run" / "public" / "MODEL_CARD.md").read_text()
    assert "The model reads 64 numbers, which have no names." in card
    assert "It predicts the classes 0, 1, 2" in card
