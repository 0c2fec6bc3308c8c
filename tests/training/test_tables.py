"""Tables described by a schema, from file to metrics and predictions: quantities in their own unit."""

import json

import numpy as np
import pytest

from sordino.cli import main
from sordino.data.schema import Schema
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.training import run
from sordino.training.predict import load_run
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run

SCHEMA = """
client = "site"
[target]
column = "cost"
task = "quantity"
range = [0, 200]
[columns.age]
type = "number"
range = [18, 100]
[columns.sex]
type = "category"
levels = ["f", "m"]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A table whose target is linear in its columns, and its schema."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    age, sex = rng.integers(20, 90, 1500), rng.choice(["f", "m"], 1500)
    cost = 20 + 1.5 * age + 20 * (sex == "m") + rng.normal(0, 5, 1500)
    rows = [f"{a},{s},{c:.1f},s{i % 3}" for i, (a, s, c) in enumerate(zip(age, sex, cost, strict=True))]
    (tmp_path / "t.csv").write_text("age,sex,cost,site\n" + "\n".join(rows) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


@pytest.mark.parametrize("epsilon", ["2", "inf"])
def test_auto_learns_a_quantity_and_tells_errors_in_its_unit(files, capsys, epsilon):
    words = ["run", "--data", "t.csv", "--schema", "schema.toml", "--epsilon", epsilon, "--json", "--out", "r"]
    assert main([*words, "-"] if words[-1] == "--json" else words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"]["r2"] > 0.8
    assert document["metrics"]["mae"] < 12  # of 0 … 200; in the model's unit it would be 0.1
    assert document["beats_guessing"]
    loaded = load_run("r")
    frame = {"sex": ["m", "f"], "age": [80, 30]}
    np.testing.assert_allclose(loaded.predict(frame), [160, 65], atol=25)
    assert main(["verify", "r"]) == (0 if epsilon == "2" else 1)


def test_labels_are_scaled_by_the_public_range_alone(files):
    data = load("t.csv", schema=Schema.read("schema.toml"))
    assert np.abs(data.y_train).max() <= 1
    assert data.unit == 100
    assert data.classes == ()


def test_a_quantity_without_a_schema_is_refused_by_auto(files):
    (files / "n.csv").write_text("a,y\n" + "".join(f"{i},{i / 7}\n" for i in range(100)))
    with pytest.raises(SordinoError, match="auto learns a quantity within a public range; describe the table"):
        run.prepare(Spec.of({"data": "n.csv", "label": "y", "clients": 2}))


def test_a_schema_and_what_contradicts_it(files):
    for values, problem in (
        ({"label": "age"}, "label: the schema's target is 'cost'"),
        ({"public_stats": "p.npz"}, "public_stats: the schema scales each column already"),
        ({"partition": "by-column:site"}, "partition: the schema names the client column"),
        ({"data": "digits"}, "schema: 'digits' is no table"),
        ({"data": "nothing.csv"}, "data: there is no file 'nothing.csv'"),
        ({"schema": "nothing.toml"}, "schema: there is no file 'nothing.toml'"),
    ):
        with pytest.raises(SordinoError, match=problem):
            run.prepare(Spec.of({"data": "t.csv", "schema": "schema.toml", **values}))


def test_a_run_keeps_its_schema_and_notices_another(files):
    spec = Spec.of({"data": "t.csv", "schema": "schema.toml", "rounds": 6, "seed": 1})
    prepared = run.prepare(spec)
    out = files / "r"
    run.start(prepared, out)
    next(run.rounds(prepared, out))
    (files / "schema.toml").unlink()  # the run has a copy
    again = run.prepare(run.reopen(out))
    history = list(run.rounds(again, out))
    cert = run.finish(again, out, history)
    assert cert["schema_sha256"]
    out = out.rename(files / "moved")
    assert not verify_run(out).problems
    copy = out / "public" / "schema.toml"
    copy.write_text(copy.read_text().replace("18.0", "17.0"))
    assert "schema.toml is not the one that the certificate names" in verify_run(out).problems
    with pytest.raises(SordinoError, match="changed since round"):
        list(run.rounds(run.prepare(run.reopen(out)), out))
