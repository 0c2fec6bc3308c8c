"""`sordino export`: every format gives the probabilities of `sordino predict` from encoded features."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import sordino
from sordino.cli import main
from sordino.data.preprocess import preprocess
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.training import export as exporting
from sordino.training.export import FORMATS, export
from sordino.training.units import effects
from tests.support import AGE, DIED, WARD, tiers

SCHEMA = DIED + AGE + WARD
RUNS = {
    "table": ["--data", "patients.csv", "--schema", "schema.toml"],
    "logistic": ["--data", "two.npz", "--model", "logistic", "--set", "normalize=clip:1.5"],
    "many": ["--data", "three.npz", "--set", "normalize=l2"],
    "plain": ["--data", "three.npz", "--method", "dp-fedgd"],
    "value": ["--data", "value.npz", "--method", "dp-fedgd"],
    "roots": ["--data", "digits"],
    "signed": ["--data", "wide.npz"],
    "whitened": ["--data", "two.npz", "--method", "dp-fedgd", "--public-stats", "stats.npz"],
    "half": ["--data", "wide.npz", "--public-stats", "wide_stats.npz"],
    "short": ["--data", "two.npz", "--public-stats", "stats.npz"],
    "network": ["--data", "two.npz", "--model", "mlp", "--method", "dp-fedgd", "--set", "normalize=l2"],
    "images": ["--data", "digits", "--model", "cnn", "--method", "dp-fedgd"],
    "trees": ["--data", "patients.csv", "--schema", "schema.toml", "--method", "dp-boost", "--set", "columns=2"],
    "trees of numbers": ["--data", "value.npz", "--method", "dp-boost"],
}
LINEAR = [name for name in RUNS if name.split()[0] not in ("network", "images", "trees")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("export"), np.random.default_rng(0)
    lines = ["age,ward,died"]
    for _ in range(200):
        age = rng.integers(10, 99)
        ward = rng.choice(["surgery", "medicine", "x", ""])
        lines.append(f"{age},{ward},{'yes' if age + 20 * rng.normal() > 55 else 'no'}")
    (place / "patients.csv").write_text("\n".join(lines) + "\n")
    (place / "schema.toml").write_text(SCHEMA)
    x = rng.normal(size=(300, 5)) * (1, 2, 3, 0.1, 1) + 0.3
    np.savez(place / "two.npz", x=x, y=(x[:, 0] + x[:, 1] > 0).astype(int))
    np.savez(place / "three.npz", x=x, y=np.array(["a", "b", "c"])[(x[:, :3] / (1, 2, 3)).argmax(1)])
    np.savez(place / "value.npz", x=x, y=x @ rng.normal(size=5) + 0.01)
    np.savez(place / "stats.npz", mean=x.mean(0), cov=np.cov(x.T))
    wide = rng.normal(size=(300, 20))
    wide[::3] = abs(wide[::3])
    np.savez(place / "wide.npz", x=wide, y=(wide[:, 0] > 0).astype(int))
    np.savez(place / "wide_stats.npz", mean=abs(wide).mean(0), cov=np.cov(wide.T))
    return place


@pytest.fixture(scope="module")
def runs(place):
    made = {}

    def get(name):
        if name not in made:
            words = [str(place / word) if (place / word).is_file() else word for word in RUNS[name]]
            rounds = [] if "--method" in words else ["--rounds", "6"]
            rounds = rounds or ["--rounds", "2"]
            out = place / "runs" / name
            assert main(["run", *words, *rounds, "--out", str(out), "--json", str(place / f"{name}.json")]) == 0
            made[name] = sordino.load_run(out)
        return made[name]

    return get


def records(run):
    """Encoded records of every kind: negative, without negative entries, zero, equal features, large."""
    rng, width = np.random.default_rng(1), int(run.about["features"])
    x = rng.normal(size=(40, width))
    x[10:20] = abs(x[10:20])
    x[20], x[21], x[22:25] = 0, 0.5, 100 * x[22:25]
    return x.astype(np.float32)


def expected(run, x):
    return run.predict_proba(x) if run.classes else run.predict(x)


@pytest.mark.parametrize("name", tiers(RUNS, ["table", "many", "value", "half", "network", "images", "trees"]))
def test_torch_agrees(runs, name, tmp_path):
    run = runs(name)
    x = records(run)
    export(run, "torch", tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    found = loaded(torch.from_numpy(x)).numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(run, x), atol=1e-5, rtol=1e-5)
    one = loaded(torch.from_numpy(x[:1])).numpy()
    np.testing.assert_allclose(one, found[:1], atol=1e-6)


@pytest.mark.parametrize("name", [*LINEAR, "trees", "trees of numbers"])
def test_onnx_agrees(runs, name, tmp_path):
    onnx = pytest.importorskip("onnx")
    run = runs(name)
    x = records(run)
    export(run, "onnx", tmp_path / "model.onnx")
    from onnx.reference import ReferenceEvaluator

    (found,) = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"features": x})
    wanted = expected(run, x).reshape(len(x), -1)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)
    told = {each.key: json.loads(each.value) for each in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert told["classes"] == list(run.classes)
    assert told["model_sha256"] == run.certificate["model_sha256"]
    runtime = pytest.importorskip("onnxruntime")
    (found,) = runtime.InferenceSession(tmp_path / "model.onnx").run(None, {"features": x})
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_sklearn_agrees(runs, name, tmp_path):
    pytest.importorskip("sklearn")
    import joblib

    run = runs(name)
    x = records(run)
    export(run, "sklearn", tmp_path / "model.joblib")
    estimator = joblib.load(tmp_path / "model.joblib")
    if not run.classes:
        np.testing.assert_allclose(estimator.predict(x), run.predict(x), atol=1e-5, rtol=1e-5)
        return
    np.testing.assert_allclose(estimator.predict_proba(x), run.predict_proba(x), atol=1e-5)
    assert list(estimator.classes_) == list(run.classes)
    assert (estimator.predict(x) == run.predict(x)).mean() > 0.9, "ties aside"


def read_coefficients(path):
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    return comments, list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("name", [name for name in LINEAR if name not in ("half", "short")])
def test_coefficients_agree(runs, name, tmp_path):
    run = runs(name)
    x = records(run).astype(np.float64)
    export(run, "coefficients", tmp_path / "c.csv")
    comments, rows = read_coefficients(tmp_path / "c.csv")
    assert list(rows[0])[:3] == ["feature", "class", "weight"]
    features = list(run.features) or [f"x{k}" for k in range(x.shape[1])]
    z = []
    for output in dict.fromkeys(row["class"] for row in rows):
        weights = {row["feature"]: float(row["weight"]) for row in rows if row["class"] == output}
        assert list(weights) == ["(intercept)", *features]
        prepared = x if name == "whitened" else preprocess(x.astype(np.float32), None, run.normalize)
        z.append(weights["(intercept)"] + prepared @ np.array([weights[feature] for feature in features]))
    z = np.stack(z, 1)
    assert z.shape[1] == (len(run.classes) if len(run.classes) > 2 else 1), "two classes have one row per feature"
    if name == "value":
        found = z[:, 0]
    elif len(run.classes) == 2:
        assert rows[0]["class"] == f"{run.classes[1]} against {run.classes[0]}"
        p = 1 / (1 + np.exp(-z))
        found = np.concatenate([1 - p, p], 1)
    else:
        e = np.exp(z - z.max(1, keepdims=True))
        found = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected(run, x.astype(np.float32)), atol=1e-5, rtol=1e-5)
    assert exporting.preparation(run).words in comments[1] or name == "whitened"


def test_leaves_agree(runs, tmp_path):
    """Trees of one column: a record's logit is the intercept plus the value of one leaf per tree."""
    run = runs("trees of numbers")
    export(run, "coefficients", tmp_path / "leaves.csv")
    _, rows = read_coefficients(tmp_path / "leaves.csv")
    x = records(run)
    found = np.zeros(len(x))
    for row in rows:
        leaf, value = row["leaf"], float(row["value"])
        if leaf == "(intercept)":
            found += value
            continue
        parts = leaf.replace("<=", "<").split(" < ")
        place = next(k for k, part in enumerate(parts) if part.startswith("x"))
        column = x[:, int(parts[place][1:])]
        low = float(parts[0]) if place else -np.inf
        high = float(parts[-1]) if place < len(parts) - 1 else np.inf
        found += value * ((low < column) & (column <= high))
    np.testing.assert_allclose(found, run.predict(x), rtol=1e-4, atol=1e-5)


def test_the_cuts_of_trees_are_in_the_unit_of_the_table(runs, tmp_path):
    run = runs("trees")
    export(run, "coefficients", tmp_path / "leaves.csv")
    comments, rows = read_coefficients(tmp_path / "leaves.csv")
    assert "in the unit of the table" in comments[0]
    cuts = set()
    for row in rows:
        for part in row["leaf"].split(" and "):
            if " age" in f" {part}" and "missing" not in part:
                cuts |= {float(word) for word in part.replace("<=", "<").split(" < ") if word != "age"}
    assert len(cuts) >= 3
    assert all(20 <= cut <= 90 for cut in cuts)
    assert max(cuts) > 60
    # Records just above and below a cut differ, others do not.
    cut = sorted(cuts)[len(cuts) // 2]
    risk = [run.predict_proba({"age": [age], "ward": ["surgery"]})[0, 1] for age in (cut - 1e-3, cut + 1e-3)]
    assert risk[0] != risk[1]


def test_the_json_beside_it(runs, tmp_path):
    run = runs("table")
    assert export(run, "torch", tmp_path / "m.pt2") == [tmp_path / "m.pt2", tmp_path / "m.pt2.json"]
    told = json.loads((tmp_path / "m.pt2.json").read_text())
    assert told["features"] == list(run.features)
    assert sordino.load_run  # the schema is enough to encode a table
    from sordino.data.schema import Schema

    frame = {"ward": ["surgery", ""], "age": [30, 70]}
    x = Schema.of(told["schema"]).encode(frame, target=False).x
    found = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, run.predict_proba(frame), atol=1e-5)
    assert (told["certified"], told["epsilon"]) == (True, run.certificate["epsilon"])
    assert told["normalize"].startswith("each record multiplied by 10 / max(its norm, 1.414")


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("network", "coefficients", "coefficients is for linear models, and this is a network (mlp); use --to torch"),
        ("network", "onnx", "onnx is for linear models, and this is a network (mlp); use --to torch"),
        ("network", "sklearn", "sklearn is for linear models, and this is a network (mlp); use --to torch"),
        ("trees", "sklearn", "sklearn is for linear models, and this is a model of trees; use --to torch or onnx"),
        ("half", "coefficients", "a weight belongs to no single feature; use --to torch or --to onnx"),
        ("short", "coefficients", "a weight belongs to no single feature; use --to torch or --to onnx"),
        ("plain", "onx", "'onx' is unknown. Did you mean 'onnx'?"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(runs, place, name, to, why, tmp_path, capsys):
    runs(name)
    capsys.readouterr()
    assert main(["export", str(place / "runs" / name), "--to", to, "--out", str(tmp_path / "file")]) == 2
    shown = capsys.readouterr().err
    assert why in shown
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


TABLE = """
[target]
column = "died"
levels = ["no", "yes"]
[columns.age]
type = "number"
range = [20, 90]
[columns.cost]
type = "number"
range = [10, 5000]
log = true
[columns.pulse]
type = "number"
mean = 70
std = 12
[columns.sex]
type = "boolean"
[columns.stage]
type = "ordinal"
levels = ["I", "II", "III"]
[columns.since]
type = "date"
range = ["2020-01-01", "2024-01-01"]
[columns.ward]
type = "category"
levels = ["a", "b"]
"""
ROWS = {
    "age": [20, 55, 90], "cost": [10, 700, 5000], "pulse": [60, 70, 95], "sex": ["no", "yes", "yes"],
    "stage": ["I", "II", "III"], "since": ["2020-01-01", "2021-07-01", "2024-01-01"], "ward": ["a", "b", "c"],
}  # fmt: skip


def test_effects_are_per_unit_of_the_table(tmp_path):
    """The log odds of a record follow by hand from its cells, in their own units."""
    (tmp_path / "schema.toml").write_text(TABLE)
    schema = Schema.read(tmp_path / "schema.toml")
    rng = np.random.default_rng(0)
    weight, intercept = rng.normal(size=len(schema.features)), 0.3
    scale = 10 / math.sqrt(schema.used)
    found = effects(weight, intercept, schema, scale)
    encoded = schema.encode(ROWS, target=False).x
    assert (np.linalg.norm(encoded, axis=1) <= math.sqrt(schema.used) + 1e-6).all(), "complete records have one scale"
    effect = dict(zip(schema.features, found.effect, strict=True))
    days = [(np.datetime64(day) - np.datetime64("2020-01-01")).astype(int) for day in ROWS["since"]]
    for k in range(3):
        by_hand = (
            found.intercept
            + effect["age"] * ROWS["age"][k]
            + effect["cost"] * math.log1p(ROWS["cost"][k] - 10)
            + effect["pulse"] * ROWS["pulse"][k]
            + effect["sex"] * (ROWS["sex"][k] == "yes")
            + effect["stage"] * k
            + effect["since"] * days[k] / 365.25
            + effect[f"ward = {('a', 'b', 'other')[k]}"]
        )
        assert by_hand == pytest.approx(intercept + scale * float(encoded[k] @ weight), abs=1e-5)
    assert found.per[schema.features.index("stage")] == "1 level up from the first"
    assert found.per[schema.features.index("since")] == "1 year after 2020-01-01"
    assert effects(weight, intercept, schema, None) is None, "each record has its own scale"


def test_a_record_with_blank_cells_follows_by_hand_from_fills(tmp_path):
    """What the comments of the file say of missing cells."""
    (tmp_path / "schema.toml").write_text(TABLE)
    schema = Schema.read(tmp_path / "schema.toml")
    weight = np.random.default_rng(0).normal(size=len(schema.features))
    found = effects(weight, 0.3, schema, 2.0)
    blank = {
        **{name: values[:1] for name, values in ROWS.items()},
        "age": [None],
        "sex": [""],
        "stage": [""],
        "ward": [""],
    }
    filled = {**{name: values[:1] for name, values in ROWS.items()}, "age": [55], "ward": ["a"]}
    effect = dict(zip(schema.features, found.effect, strict=True))
    added = sum(effect.get(f"{name} is missing", 0.0) for name in ("age", "sex", "stage"))
    added += effect["sex"] * 0.5 + effect["stage"] * 1 + effect.get("ward = missing", 0.0) - effect["ward = a"]
    z = [0.3 + 2.0 * float(schema.encode(rows, target=False).x[0] @ weight) for rows in (blank, filled)]
    assert z[0] - z[1] == pytest.approx(added, abs=1e-5)


def test_a_file_of_two_classes_has_odds_ratios(runs, tmp_path):
    run = runs("table")
    export(run, "coefficients", tmp_path / "c.csv")
    comments, rows = read_coefficients(tmp_path / "c.csv")
    assert list(rows[0]) == ["feature", "class", "weight", "per", "log_odds", "odds_ratio"]
    for row in rows[1:]:
        assert float(row["odds_ratio"]) == pytest.approx(math.exp(float(row["log_odds"])), rel=1e-4)
    assert rows[0]["odds_ratio"] == "", "the odds at 0 of everything are no ratio"
    assert any("odds_ratio = exp(log_odds)" in line for line in comments)
    assert any("counts as its fill in the schema" in line for line in comments)


def test_an_unknown_format_names_the_formats_once(runs, tmp_path):
    with pytest.raises(SordinoError) as raised:
        export(runs("table"), "excel", tmp_path / "x")
    assert str(raised.value).count("sklearn") == 1


def test_the_command(runs, place, tmp_path, capsys):
    runs("table")
    capsys.readouterr()
    words = ["export", str(place / "runs" / "table"), "--out", str(tmp_path / "c.csv"), "--to", "coefficients"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "6 encoded features; each record multiplied by" in " ".join(shown.split())
    assert main(words) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert main([*words[:3], str(tmp_path / "no" / "c.csv"), *words[4:]]) == 2
    assert "there is no folder for" in capsys.readouterr().err
    assert main(["export", str(place / "runs" / "nothing"), "--to", "torch", "--out", str(tmp_path / "x")]) == 2


@pytest.mark.parametrize(("to", "module"), [("onnx", "onnx"), ("sklearn", "sklearn")])
def test_a_missing_package_is_named(runs, to, module, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SordinoError, match=rf"pip install 'sordino\[{to}\]'"):
        export(runs("plain"), to, tmp_path / "file")
    assert list(FORMATS) == ["coefficients", "torch", "sklearn", "onnx"]


def test_without_a_name_the_file_gets_the_usual_one(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runs("plain")
    assert export(run, "coefficients") == [Path("coefficients.csv")]
    with pytest.raises(SordinoError, match=r"'coefficients.csv' exists; name another file"):
        export(run, "coefficients")
