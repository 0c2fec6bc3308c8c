"""Features that a schema makes of its columns: bins, interactions, random Fourier features."""

import json
import math

import numpy as np
import pytest
from scipy.special import expit

from sordino.cli import main
from sordino.data import expansion
from sordino.data.expansion import Block, Expansion
from sordino.data.preprocess import RADIUS, by_table, preprocess
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.training.export import export
from sordino.training.predict import load_run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run

COLUMNS = {
    "age": {"type": "number", "range": [20, 100]},
    "income": {"type": "number", "range": [0, 999], "log": True, "indicator": False},
    "since": {"type": "date", "range": ["2000-01-01", "2010-01-01"], "indicator": False},
    "ward": {"type": "category", "levels": ["a", "b"], "other": False, "indicator": False},
    "id": {"type": "drop"},
}
FRAME = {
    "age": [20.0, 50.0, None, 200.0],
    "income": [0.0, 999.0, 9.0, 99.0],
    "since": ["2000-01-01", "2010-01-01", "2005-01-01", "1990-01-01"],
    "ward": ["a", "b", "a", "b"],
}
LAWS = [
    {"features": "bins:5"},
    {"features": "interactions"},
    {"features": "interactions", "interactions": [["age", "ward"]]},
    {"features": "rff:32", "rff_seed": 3, "rff_bandwidth": 2},
    {"features": ["bins:3", "interactions", "rff:8"], "interactions": [["age", "ward"], ["ward", "income"]]},
]


def schema_of(**more):
    return Schema.of({"columns": COLUMNS, "target": {"column": "died", "levels": ["no", "yes"]}, **more})


def encoded(**more):
    schema = schema_of(**more)
    return dict(zip(schema.features, schema.encode(FRAME, target=False).x.T, strict=True))


# ------------------------------------------------------------------------------------------------------------- features


def test_bins_are_hats_at_knots_in_the_unit_of_the_table():
    columns = encoded(features="bins:5")
    assert list(columns)[:6] == [*(f"age near {v}" for v in (20, 40, 60, 80, 100)), "age is missing"]
    ages = np.stack([columns[f"age near {v}"] for v in (20, 40, 60, 80, 100)], 1)
    assert np.allclose(ages, [[1, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]], atol=1e-6)
    assert columns["age is missing"].tolist() == [0, 0, 1, 0]
    assert "income near 30.6228" in columns, "even on the logarithmic scale"
    dates = [name for name in columns if name.startswith("since")]
    assert dates == [
        f"since near {day}" for day in ("2000-01-01", "2002-07-02", "2005-01-01", "2007-07-03", "2010-01-01")
    ]
    for column in ("age", "income", "since"):
        assert np.allclose(sum(v for name, v in columns.items() if name.startswith(f"{column} near")), 1)
    assert columns["ward = a"].tolist() == [1, 0, 1, 0], "categories stay"


def test_a_linear_function_of_hats_holds_the_linear_feature():
    plain, hats = encoded(), encoded(features="bins:9")
    knots = np.linspace(-1, 1, 9)
    line = sum(knot * value for knot, (name, value) in zip(knots, hats.items(), strict=False) if "near" in name)
    assert np.allclose(line, plain["age"], atol=1e-6)


def test_interactions_are_products():
    plain, both = encoded(), encoded(features="interactions", interactions=[["age", "ward"]])
    assert list(both)[: len(plain)] == list(plain)
    assert list(both)[len(plain) :] == [
        *("age * ward = a", "age * ward = b", "age is missing * ward = a", "age is missing * ward = b")
    ]
    assert np.array_equal(both["age * ward = b"], plain["age"] * plain["ward = b"])
    every = encoded(features="interactions")
    widths = [2, 1, 1, 2]
    assert len(every) == 6 + sum(a * b for k, a in enumerate(widths) for b in widths[k + 1 :])


def test_random_features_approximate_the_kernel_and_follow_from_a_public_seed():
    rng = np.random.default_rng(0)
    frame = {
        "age": rng.uniform(20, 100, 40),
        "income": rng.uniform(0, 999, 40),
        "since": ["2004-05-06"] * 40,
        "ward": ["a"] * 40,
    }
    schema = schema_of(features="rff:4096", rff_bandwidth=1.5)
    x = schema.encode(frame, target=False).x.astype(float)
    plain, waves = x[:, :6], x[:, 6:] / math.sqrt(4)  # four columns
    distance = ((plain[:, None] - plain[None]) ** 2).sum(-1)
    assert np.abs(waves @ waves.T - np.exp(-distance / (2 * 1.5**2))).max() < 0.07
    again, other = schema, schema_of(features="rff:4096", rff_bandwidth=1.5, rff_seed=1)
    assert np.array_equal(again.encode(frame, target=False).x, x.astype(np.float32))
    assert not np.allclose(other.encode(frame, target=False).x, x)
    first = Expansion(rff=2)._waves(2)
    assert np.allclose(first[0], np.array([[1.7640524, 0.4001572], [0.978738, 2.2408931]]) / 4), "the same everywhere"


@pytest.mark.parametrize("law", LAWS)
def test_every_record_is_bounded_whatever_its_cells_are(law):
    rng = np.random.default_rng(1)
    n, schema = 500, schema_of(**law)
    frame = {
        "age": np.where(rng.random(n) < 0.3, np.nan, rng.normal(0, 1e6, n)),
        "income": rng.normal(0, 1e30, n),
        "since": rng.choice(["1000-01-01", "2005-06-07", "2999-12-31"], n),
        "ward": rng.choice(["a", "b", "c", ""], n),
    }
    x = schema.encode(frame, target=False).x
    assert x.shape == (n, len(schema.features))
    assert np.isfinite(x).all()
    norm = np.linalg.norm(x.astype(float), axis=1).max()
    assert norm <= math.sqrt(2) * math.sqrt(2 * schema.used)
    assert np.linalg.norm(by_table(x, schema.used).astype(float), axis=1).max() <= RADIUS * (1 + 1e-6)


@pytest.mark.parametrize("law", LAWS)
def test_a_record_is_encoded_by_itself_and_slices_change_nothing(law, monkeypatch):
    schema = schema_of(**law)
    whole = schema.encode(FRAME, target=False).x
    alone = [schema.encode({name: cells[k : k + 1] for name, cells in FRAME.items()}, target=False).x for k in range(4)]
    assert np.allclose(np.concatenate(alone), whole, atol=1e-5)
    monkeypatch.setattr("sordino.data.expansion.CHUNK_NUMBERS", 1)
    assert np.allclose(schema.encode(FRAME, target=False).x, whole, atol=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_they_are_part_of_the_schema_and_its_hash(law):
    schema = schema_of(**law)
    assert Schema.of(schema.values()) == schema
    assert schema.sha256() != schema_of().sha256()
    assert schema.unexpanded == schema_of()
    assert [name for name, _, _ in schema.explain()][: len(COLUMNS)] == list(COLUMNS)
    made = {name: len(names) for name, _, names in schema.explain()[len(COLUMNS) :]}
    assert set(made) == {f"({word.partition(':')[0]})" for word in np.atleast_1d(law["features"])}
    other = {**law, "rff_seed": 4} if "rff" in str(law) else {**law, "features": "bins:6"}
    other = {key: value for key, value in other.items() if key != "interactions" or "interactions" in other["features"]}
    assert schema_of(**other).sha256() != schema.sha256()


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    age, dose = rng.uniform(20, 100, 3000), rng.uniform(-1, 1, 3000)
    died = rng.random(3000) < expit(3 - 4 * np.abs(age - 60) / 20 + dose)
    rows = [f"{a:.1f},{b:.3f},{'yes' if c else 'no'}" for a, b, c in zip(age, dose, died, strict=True)]
    (place / "data.csv").write_text("\n".join(["age,dose,died", *rows]) + "\n")
    columns = {"age": {"type": "number", "range": [20, 100]}, "dose": {"type": "number", "range": [-1, 1]}}
    for name, law in {"plain": {}, "bins": {"features": "bins:8"}, "rff": {"features": "rff:64"}}.items():
        schema = Schema.of({"target": {"column": "died", "levels": ["no", "yes"]}, "columns": columns, **law})
        (place / f"{name}.toml").write_text(schema.toml())
    return place


def trained(place, name, out, *more):
    words = ["run", "--data", str(place / "data.csv"), "--schema", str(place / f"{name}.toml"), "--clients", "2"]
    assert main([*words, "--epsilon", "8", "--out", str(out), "--json", *more]) == 0
    return load_run(out)


def test_a_linear_model_of_bins_or_random_features_learns_a_hump(place, tmp_path, capsys):
    auc = {}
    for name in ("plain", "bins", "rff"):
        trained(place, name, tmp_path / name)
        auc[name] = json.loads(capsys.readouterr().out)["metrics"]["auc"]
        assert not verify_run(tmp_path / name).problems
    assert auc["plain"] < 0.7
    assert auc["bins"] > 0.8
    assert auc["rff"] > auc["plain"] + 0.05
    certificate = json.loads((tmp_path / "rff" / "public" / "certificate.json").read_text())
    assert "Random features are drawn from the public seed 0." in certificate["assumes"]
    run = load_run(tmp_path / "bins")
    frame = {"dose": [0.0, 0.0], "age": [60.0, 21.0]}
    risks = run.predict_proba(frame)[:, 1]
    assert risks[0] > risks[1] + 0.3, "columns are found by name, and features are made of them"
    export(run, "coefficients", tmp_path / "coefficients.csv")
    assert "\nage near 54.2857,yes against no," in (tmp_path / "coefficients.csv").read_text()
    export(run, "sklearn", tmp_path / "model.joblib")
    import joblib

    served = joblib.load(tmp_path / "model.joblib").predict_proba(run.encode(frame))[:, 1]
    assert np.allclose(served, risks, atol=1e-5)
    assert "8 hats at even knots" in (tmp_path / "bins" / "public" / "MODEL_CARD.md").read_text()


def test_ranges_that_noised_counts_find_are_binned_afterwards(place, tmp_path):
    text = (place / "bins.toml").read_text().replace("range = [\n    20.0,\n    100.0,\n]", "within = [-500, 500]")
    assert "within" in text
    (place / "found.toml").write_text(text)
    run = trained(place, "found", tmp_path / "run", "--private-statistics", "0.1")
    assert run.schema.columns["age"].range is not None
    assert len(run.features) == 18
    assert not verify_run(tmp_path / "run").problems


def test_schema_check_explains_them(place, capsys):
    assert main(["schema", "check", str(place / "bins.toml"), str(place / "data.csv")]) == 0
    shown = capsys.readouterr().out
    assert "(bins)" in shown
    assert "18 numbers per record, each between -1 and 1" in shown


# --------------------------------------------------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"features": "bins"}, r"features: 'bins' needs a whole number from 2 to 64"),
        ({"features": "bins:1"}, r"features: 'bins:1' needs a whole number"),
        ({"features": "rff:0"}, r"features: 'rff:0' needs"),
        ({"features": "rff:x"}, r"features: 'rff:x' needs"),
        ({"features": "splines"}, r"features: 'splines' is unknown"),
        ({"features": 3}, r"features: 3 must be a text or a list"),
        ({"features": ["bins:3", "bins:4"]}, r"features: .* one law twice"),
        ({"interactions": [["age", "ward"]]}, r"interactions: pairs of columns are for"),
        ({"features": "interactions", "interactions": []}, r"interactions: \[\]; write pairs"),
        ({"features": "interactions", "interactions": [["age"]]}, r"interactions: \['age'\] is not a pair"),
        (
            {"features": "interactions", "interactions": [["age", "wart"]]},
            r"interactions: 'wart' .* Did you mean 'ward'",
        ),
        (
            {"features": "interactions", "interactions": [["age", "id"]]},
            r"interactions: 'id' is not a column with features",
        ),
        ({"features": "interactions", "interactions": [["age", "age"]]}, r"one column with itself"),
        (
            {"features": "interactions", "interactions": [["age", "ward"], ["ward", "age"]]},
            r"a pair stands there twice",
        ),
        ({"rff_seed": 1}, r"rff_seed: it is for"),
        ({"features": "rff:8", "rff_seed": -1}, r"rff_seed: -1 must be"),
        ({"features": "rff:8", "rff_bandwidth": 0}, r"rff_bandwidth: 0 must be"),
    ],
)
def test_wrong_keys_of_features_are_refused(values, message):
    with pytest.raises(SordinoError, match=message):
        schema_of(**values)


def test_too_many_features_are_refused():
    wide = {f"c{k}": {"type": "category", "levels": [str(v) for v in range(40)]} for k in range(8)}
    with pytest.raises(SordinoError, match=r"features: they are 49,728 per record, and at most 20,000"):
        Schema.of({"columns": wide, "features": "interactions"})
    fewer = Schema.of(
        {
            "columns": wide,
            "features": "interactions",
            "interactions": [["c0", "c1"]],
            "target": {"column": "y", "levels": ["a", "b"]},
        }
    )
    resolved = resolve(Spec.of({"data": "t.csv"}), schema=fewer)
    with pytest.raises(SordinoError, match=r"features: the schema makes 2,100 of them, and auto releases their covar"):
        resolved.build_model(len(fewer.features), 2)
    assert resolve(Spec.of({"data": "t.csv", "method": "dp-fedgd"}), schema=fewer).build_model(2100, 2).features == 2100


def test_random_features_of_a_record_do_not_depend_on_the_number_of_records(monkeypatch):
    """The mutant: a matrix product rounds a record by its place in a slice; the one that is alone in it by 8e-7."""
    blocks = [Block(f"c{k}", [f"c{k}"]) for k in range(100)]
    monkeypatch.setattr(expansion, "CHUNK_NUMBERS", 10 * 164)
    x = np.random.default_rng(0).uniform(-1, 1, (51, 100)).astype(np.float32)
    law = Expansion(rff=64)
    assert np.array_equal(law.apply(x, blocks)[1:], law.apply(x[1:], blocks))


@pytest.mark.parametrize("normalize", ["none", "l2", "record"])
def test_public_statistics_whiten_each_record_by_itself(normalize):
    rng = np.random.default_rng(0)
    x, cov = rng.normal(size=(30, 20)).astype(np.float32), np.cov(rng.normal(size=(20, 50)))
    together = preprocess(x, (np.zeros(20), cov), normalize)
    apart = preprocess(x, (np.zeros(20), cov), normalize, apart=True)
    np.testing.assert_allclose(apart, together, rtol=1e-5, atol=1e-6)
    assert np.array_equal(apart[29:], preprocess(x[29:], (np.zeros(20), cov), normalize, apart=True))
