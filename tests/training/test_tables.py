"""Tables described by a schema, from file to metrics, predictions and exports: quantities, counts and survival."""

import csv
import json
import math
import re

import numpy as np
import pytest
import torch

from sordino.cli import main
from sordino.data.schema import Schema
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.training import run
from sordino.training.export import torch_module
from sordino.training.predict import load_run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import tiers

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


def with_target(target, *, dropped=()):
    """The schema with another target, and columns that are not used."""
    rest = "".join(f'[columns.{name}]\ntype = "drop"\n' for name in dropped)
    return re.sub(r"\[target\].*?(?=\[columns)", f"[target]\n{target}\n", SCHEMA, count=1, flags=re.DOTALL) + rest


COUNT = with_target('column = "visits"\ntask = "count"\nmaximum = 30', dropped=("days", "died"))
SURVIVAL = with_target(
    'column = "days"\ntask = "survival"\nevent = "died"\nintervals = [0, 100, 200, 400]', dropped=("visits",)
)


@pytest.fixture
def clinic(tmp_path, monkeypatch):
    """A table with a count and a time until an event, both of which depend on age and sex; its two schemas."""
    monkeypatch.chdir(tmp_path)
    rng, n = np.random.default_rng(0), 2000
    age, sex = rng.integers(20, 90, n), rng.choice(["f", "m"], n)
    score = 0.03 * (age - 55) + 0.5 * (sex == "m")
    visits = rng.poisson(2 * np.exp(score))
    time, seen = rng.exponential(900 * np.exp(-score)), rng.uniform(50, 500, n)
    days, died = np.minimum(time, seen).round(1), (time <= seen).astype(int)
    rows = [
        f"{a},{s},{v},{d},{e},s{k % 3}"
        for k, (a, s, v, d, e) in enumerate(zip(age, sex, visits, days, died, strict=True))
    ]
    (tmp_path / "c.csv").write_text("age,sex,visits,days,died,site\n" + "\n".join(rows) + "\n")
    (tmp_path / "count.toml").write_text(COUNT)
    (tmp_path / "survival.toml").write_text(SURVIVAL)
    return tmp_path


def run_on(schema, epsilon, out, capsys, *more):
    words = ["run", "--data", "c.csv", "--schema", schema, "--epsilon", epsilon, "--out", out, *more]
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("epsilon", ["2", "inf"])
def test_auto_learns_a_count_untuned(clinic, capsys, epsilon):
    document = run_on("count.toml", epsilon, "r", capsys, "--seed", "1")
    metrics = document["metrics"]
    assert metrics["d2"] > 0.3
    assert metrics["mean_predicted"] == pytest.approx(metrics["observed"], rel=0.1)
    assert document["beats_guessing"]
    loaded = load_run("r")
    frame = {"sex": ["m", "f"], "age": [80, 25]}
    np.testing.assert_allclose(loaded.predict(frame), [2 * np.exp(1.25), 2 * np.exp(-0.9)], rtol=0.4)
    assert loaded.predict({"sex": ["m"], "age": [100]}).max() <= 30
    assert "a count" in (clinic / "r" / "public" / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize("epsilon", ["2", "inf"])
def test_auto_learns_survival_untuned(clinic, capsys, epsilon):
    document = run_on("survival.toml", epsilon, "r", capsys, "--seed", "1")
    metrics = document["metrics"]
    assert metrics["concordance"] > 0.65
    for row in metrics["survival_curve"]:
        assert row["predicted"] == pytest.approx(row["observed"], abs=0.1)
    assert document["beats_guessing"]
    loaded = load_run("r")
    frame = {"sex": ["m", "f"], "age": [80, 25]}
    curves = loaded.predict_survival(frame)
    assert curves.shape == (2, 3)
    assert (np.diff(curves, axis=1) < 0).all()
    assert (curves[0] < curves[1]).all()
    np.testing.assert_allclose(loaded.predict(frame), 1 - curves[:, -1])
    assert loaded.edges == (100, 200, 400)
    table = loaded.about["life_table"]
    assert [row["end"] for row in table] == [100, 200, 400]
    survivals = [row["survival"] for row in table]
    for row, at in zip(metrics["survival_curve"], survivals, strict=True):
        assert at == pytest.approx(row["observed"], abs=0.1)
    assert "## Life table" in (clinic / "r" / "public" / "MODEL_CARD.md").read_text()
    with pytest.raises(SordinoError, match="predicts survival, not classes; use predict_survival"):
        loaded.predict_proba(frame)
    (clinic / "new.csv").write_text("sex,age\nm,80\nf,25\n")
    assert main(["predict", "r", "new.csv"]) == 0
    head, *lines = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["row", "prediction", "p(no event by 100)", "p(no event by 200)", "p(no event by 400)"]
    np.testing.assert_allclose([float(cell) for cell in lines[0][2:]], curves[0], atol=1e-4)


@pytest.mark.parametrize("schema", ["count.toml", "survival.toml"])
def test_runs_on_counts_and_survival_are_certified_verified_and_resumed(clinic, capsys, schema):
    spec = Spec.of({"data": "c.csv", "schema": schema, "rounds": 8, "epsilon": 2.0})
    prepared, out = run.prepare(spec), clinic / "r"
    run.start(prepared, out)
    rounds = run.rounds(prepared, out)
    for _ in range(4):
        next(rounds)
    rounds.close()
    again = run.prepare(run.reopen(out))
    cert = run.finish(again, out, list(run.rounds(again, out)))
    assert cert["certified"]
    assert main(["verify", "r"]) == 0
    assert ("tally" in json.dumps(cert["queries"])) is (schema == "survival.toml")


@pytest.mark.parametrize("method", tiers(["dp-fedgd", "dp-fedavg", "dp-fedadam"], 2))
def test_other_methods_train_survival_and_counts(clinic, capsys, method):
    document = run_on("survival.toml", "8", "s", capsys, "--method", method, "--rounds", "30", "--seed", "1")
    assert document["metrics"]["concordance"] > 0.55
    assert load_run("s").about["life_table"] is None
    assert run_on("count.toml", "8", "c", capsys, "--method", method, "--rounds", "5")["certified"]


def test_exports_of_counts_quantities_and_survival_give_the_predictions(clinic, files, capsys):
    frame = {"sex": ["m", "f", "m"], "age": [70, 30, 45]}
    for out, words in {
        "c": ["--data", "c.csv", "--schema", "count.toml"],
        "q": ["--data", "t.csv", "--schema", "schema.toml"],
        "s": ["--data", "c.csv", "--schema", "survival.toml"],
    }.items():
        assert main(["run", *words, "--epsilon", "inf", "--rounds", "10", "--out", out]) == 0
        loaded = load_run(out)
        x = loaded.encode(frame)
        expected = loaded.predict_survival(frame) if out == "s" else loaded.predict(frame)
        np.testing.assert_allclose(torch_module(loaded)(torch.from_numpy(x)).numpy(), expected, rtol=1e-4)
        assert main(["export", out, "--to", "coefficients", "--out", f"{out}.weights.csv"]) == 0
        weights = [
            row for row in csv.reader((clinic / f"{out}.weights.csv").read_text().splitlines()) if row[0][0] != "#"
        ][1:]
        scaled = x * (10 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), math.sqrt(loaded.schema.used)))
        first = "(baseline)" if out == "s" else "(intercept)"
        constant = np.array([float(w) for name, _, w, *_ in weights if name == first])
        z = scaled @ np.array([float(w) for name, _, w, *_ in weights if name != first])[:, None] + constant
        by_hand = {"c": np.exp(z)[:, 0], "q": z[:, 0], "s": np.cumprod(1 - 1 / (1 + np.exp(-z)), 1)}[out]
        np.testing.assert_allclose(by_hand, expected, rtol=1e-3)
    # A survival model has no intercept. Its baselines and effects in the unit of the table give the same risks.
    text = (clinic / "s.weights.csv").read_text()
    assert "there is no intercept" in text.splitlines()[0]
    assert "The baseline of log_hazard is that of a record with 0 in every number." in text
    assert "(intercept)" not in text
    table = list(csv.DictReader(line for line in text.splitlines() if line[0] != "#"))
    at_zero = np.array([float(row["log_hazard"]) for row in table if row["feature"] == "(baseline)"])
    effect = {row["feature"]: float(row["log_hazard"]) for row in table if row["interval"] == ""}
    moved = [effect["age"] * age + effect[f"sex = {sex}"] for sex, age in zip(*frame.values(), strict=True)]
    hazard = 1 / (1 + np.exp(-(np.array(moved)[:, None] + at_zero)))
    np.testing.assert_allclose(np.cumprod(1 - hazard, 1), loaded.predict_survival(frame), rtol=1e-3)
    (clinic / "new.csv").write_text("sex,age\nm,70\nf,30\n")
    capsys.readouterr()
    assert main(["predict", "s", "new.csv"]) == 0
    told = [row["prediction"] for row in csv.DictReader(capsys.readouterr().out.splitlines())]
    assert all(len(risk) <= len("0.") + 6 for risk in told)
    np.testing.assert_allclose([float(risk) for risk in told], loaded.predict("new.csv"), rtol=1e-5)
    assert main(["export", "s", "--to", "sklearn", "--out", "s.joblib"]) == 2
    assert "sklearn is for linear models, and this is a survival model" in capsys.readouterr().err
    with pytest.raises(SordinoError, match="the model does not predict survival; use predict"):
        load_run("c").predict_survival(frame)


def test_onnx_and_sklearn_hold_them_too(clinic, capsys):
    onnxruntime, joblib = pytest.importorskip("onnxruntime"), pytest.importorskip("joblib")
    for schema, out in (("count.toml", "c"), ("survival.toml", "s")):
        run_on(schema, "inf", out, capsys, "--rounds", "10")
        assert main(["export", out, "--to", "onnx", "--out", f"{out}.onnx"]) == 0
        loaded = load_run(out)
        x = loaded.encode({"sex": ["m", "f"], "age": [70, 30]})
        (found,) = onnxruntime.InferenceSession(f"{out}.onnx").run(None, {"features": x})
        expected = loaded.predict_survival(x) if out == "s" else loaded.predict(x)[:, None]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert main(["export", "c", "--to", "sklearn", "--out", "c.joblib"]) == 0
    x = load_run("c").encode({"sex": ["m", "f"], "age": [70, 30]})
    np.testing.assert_allclose(joblib.load("c.joblib").predict(x), load_run("c").predict(x), rtol=1e-4)


def test_a_model_of_noise_is_told(clinic, capsys):
    """At ε = 0.001 nothing is learnt, and the console says so."""
    for schema, told in (("count", "its mean Poisson deviance is"), ("survival", "its concordance index is 0.4")):
        for seed in range(4):
            words = [
                "run",
                "--data",
                "c.csv",
                "--schema",
                f"{schema}.toml",
                "--epsilon",
                "0.001",
                "--seed",
                str(seed),
                "--rounds",
                "20",
            ]
            assert main([*words, "--out", f"{schema}{seed}"]) == 0
            if told in capsys.readouterr().out:
                break
        else:
            pytest.fail(f"of four models of noise, none is told by '{told}'")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"schema": "survival.toml", "model": "softmax"}, "model: softmax does not learn a survival; use hazards, or"),
        ({"schema": "survival.toml", "model": "squares"}, "model: squares does not learn a survival"),
        ({"schema": "survival.toml", "model": "mlp"}, "model: mlp does not learn a survival"),
        ({"schema": "count.toml", "model": "squares"}, "model: squares does not learn a count; use poisson, or auto"),
        ({"schema": "count.toml", "intervals": 3}, "intervals: model poisson has none; leave the option out"),
        ({"schema": "survival.toml", "intervals": 0}, "intervals: 0, and the target is survival; leave the option out"),
        ({"schema": "survival.toml", "intervals": 5}, "intervals: 5 of the method and 3 of the model must be equal"),
        ({"schema": "survival.toml", "intervals": -1}, "intervals: -1 must lie in"),
        ({"schema": "survival.toml", "method": "dp-fedfc"}, "dp-fedfc divides by the covariance of features"),
        ({"schema": "survival.toml", "method": "dp-fednew-fc"}, "dp-fednew-fc divides by the covariance of features"),
        ({"schema": "survival.toml", "covariance_share": 0.4}, "covariance_share: 0.4 leaves nothing for gradients"),
        ({"schema": "survival.toml", "partition": "dirichlet"}, "partition"),
        ({"schema": "count.toml", "partition": "classes:2"}, "partition"),
    ],
)
def test_what_does_not_fit_a_count_or_survival_is_refused(clinic, values, problem):
    def begin():
        return next(run.rounds(run.prepare(Spec.of({"data": "c.csv", "rounds": 8, "uncertified": True, **values}))))

    with pytest.raises(SordinoError, match=problem):
        begin()


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


def test_a_model_of_counts_does_not_learn_a_quantity(files):
    with pytest.raises(SordinoError, match="model: poisson does not learn a quantity; use squares, or auto"):
        run.prepare(Spec.of({"data": "t.csv", "schema": "schema.toml", "model": "poisson"}))


def test_a_quantity_without_a_schema_is_refused_by_auto(files):
    (files / "n.csv").write_text("a,y\n" + "".join(f"{i},{i / 7}\n" for i in range(100)))
    with pytest.raises(SordinoError, match="auto learns a quantity within a public range; describe the table"):
        run.prepare(Spec.of({"data": "n.csv", "label": "y", "clients": 2}))


def test_a_schema_and_what_contradicts_it(files):
    for values, problem in (
        ({"label": "age"}, "label: the schema's target is 'cost'"),
        ({"public_stats": "p.npz"}, "public_stats: the schema scales each column already"),
        ({"partition": "by-column:site"}, "partition: the schema names the client column"),
        ({"data": "digits"}, "schema: 'digits' is not a table"),
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
    with pytest.raises(SordinoError, match=r"public/schema.toml' changed since the run wrote it"):
        list(run.rounds(run.prepare(run.reopen(out)), out))
    kept = out / "private" / "schema.toml"
    kept.write_text(copy.read_text())
    with pytest.raises(SordinoError, match="changed since round"):
        list(run.rounds(run.prepare(run.reopen(out)), out))


def test_a_described_table_is_of_one_client_unless_somebody_names_more(tmp_path):
    rows = "".join(f"{k % 7},{'yes' if k % 3 else 'no'}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("age,outcome\n" + rows)
    target = {"column": "outcome", "task": "classes", "levels": ["no", "yes"]}
    schema = Schema.of({"target": target, "columns": {"age": {"type": "number", "range": [0, 9]}}})
    (tmp_path / "schema.toml").write_text(schema.toml())
    given = {"data": str(tmp_path / "t.csv"), "schema": str(tmp_path / "schema.toml")}

    def clients(**keys):
        resolved = resolve(Spec.of({**given, **keys}))
        return int(resolved.owners(resolved.read_data()).max()) + 1

    assert clients() == 1
    assert clients(clients=3) == 3
    assert clients(partition="iid") == 10
    assert clients(schema=None, label="outcome") == 10
