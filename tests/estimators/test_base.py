"""Frames with a schema, for every estimator: columns by name, target, clients and persons from the frame."""

import json
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import sordino
from sordino import FederatedClassifier, FederatedCox, FederatedRegressor, Schema, SordinoError
from sordino.data import tables
from sordino.data.arrays import unit_numbers
from sordino.errors import OverspentError
from sordino.estimators.pipelines import PREPARED
from sordino.estimators.reading import WEIGHTED, entries
from sordino.evidence.ledger import Ledger

SCHEMA = {
    "client": "hospital",
    "person": "patient",
    "target": {"column": "died", "levels": ["no", "yes"]},
    "columns": {
        "age": {"type": "number", "range": [20, 90]},
        "sex": {"type": "category", "levels": ["f", "m"]},
        "id": {"type": "drop"},
    },
}


def table(n=300, seed=0):
    rng = np.random.default_rng(seed)
    age, sex = rng.uniform(20, 90, n), rng.choice(["f", "m"], n)
    risk = 1 / (1 + np.exp(-(age - 55) / 8))
    age[::17] = np.nan
    return pd.DataFrame(
        {
            "id": np.arange(n),
            "hospital": rng.choice(["north", "south", "west"], n),
            "patient": [f"p{k // 2:04}" for k in range(n)],
            "age": age,
            "sex": sex,
            "died": np.where(rng.random(n) < risk, "yes", "no"),
        }
    )


def without(*keys, **target):
    """The schema without these roles, whose columns are then dropped, or with another target."""
    unused = [SCHEMA[key] for key in keys if isinstance(SCHEMA[key], str)]
    unused += ["died"] if "target" in keys or target.get("column", "died") != "died" else []
    return {
        **{key: value for key, value in SCHEMA.items() if key not in keys},
        "columns": SCHEMA["columns"] | {name: {"type": "drop"} for name in unused},
        **({"target": target} if target else {}),
    }


def fast(schema=None, kind=FederatedClassifier, **settings):
    schema = without("person") if schema is None else schema
    usual = {"method": "dp-fedgd", "epsilon": 50.0, "rounds": 10, "random_state": 0, "options": {"lr": 1.0}}
    return kind(schema=schema, **{**usual, **settings})


def test_a_frame_says_everything():
    frame = table()
    model = FederatedClassifier(epsilon=8.0, schema=SCHEMA, options={"person_records": 2})
    cert = model.fit(frame.drop(columns="hospital").assign(hospital="one")).certificate_
    assert (cert["unit"], cert["clients"], cert["client_names"]) == ("person", 1, ["one"])
    assert cert["certified"]
    assert (cert["person"]["records"], cert["person"]["clients"]) == (2, 1)
    assert any(f"sha256 {Schema.of(SCHEMA).sha256()}" in fact for fact in cert["assumes"])
    assert PREPARED not in cert["assumes"], "the schema says how features were made"
    assert sordino.verify(json.loads(json.dumps(cert))).problems == []
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.feature_names_in_.tolist() == ["age", "sex"]
    assert model.n_features_in_ == 2
    assert model.features_.tolist() == Schema.of(SCHEMA).features
    assert model.coef_.shape == (1, 6)
    assert model.score(table(seed=1)) > 0.7


def test_frames_of_all_kinds_are_one():
    frame = table()
    forms = [
        frame,
        pa.Table.from_pandas(frame),
        frame.to_dict("list"),
        frame[frame.columns[::-1]],
    ]
    first, *others = [fast().fit(form) for form in forms]
    for model, form in zip(others, forms[1:], strict=True):
        assert (model.coef_ == first.coef_).all()
        assert (model.predict(form) == first.predict(frame)).all()


def test_a_polars_frame_trains_the_same_model_as_pandas():
    polars = pytest.importorskip("polars")
    frame = table()
    other, model = polars.from_pandas(frame), fast().fit(frame)
    assert (fast().fit(other).coef_ == model.coef_).all()
    assert (model.predict(other.select("sex", "age")) == model.predict(frame)).all()


def test_a_schema_is_a_file_a_dict_or_a_schema(tmp_path):
    schema = Schema.of(without("person"))
    (tmp_path / "schema.toml").write_text(schema.toml())
    forms = [schema, schema.values(), tmp_path / "schema.toml", str(tmp_path / "schema.toml")]
    first, *others = [fast(form).fit(table()) for form in forms]
    assert all((each.coef_ == first.coef_).all() for each in others)
    assert (clone(first).fit(table()).coef_ == first.coef_).all()
    assert (pickle.loads(pickle.dumps(first)).predict(table()) == first.predict(table())).all()


def test_the_schema_encodes_as_everywhere():
    """The same records, encoded by hand, give the same model."""
    frame, schema = table(), Schema.of(without("person"))
    encoded = schema.encode(frame)
    by_hand = fast(model="auto").set_params(schema=None, normalize="table:2", method="auto", options=None)
    by_schema = clone(by_hand).set_params(schema=schema, normalize=None, options={"calibrate": 0.0})
    by_hand.fit(encoded.x, np.array(schema.classes)[encoded.y], groups=encoded.client)
    assert np.allclose(by_schema.fit(frame).coef_, by_hand.coef_)
    assert by_schema.normalize_ == "table:2"


def test_tables_of_classes_are_calibrated():
    queries = [
        {query["query"] for query in model.fit(table()).certificate_["queries"]}
        for model in (fast(method="auto", rounds=30, options=calibrate) for calibrate in (None, {"calibrate": 0.0}))
    ]
    assert len(queries[0]) > len(queries[1])


def test_predictions_need_the_columns_alone():
    frame = table()
    model = fast().fit(frame)
    assert (model.predict(frame[["sex", "age"]]) == model.predict(frame)).all(), "found by name, whatever their order"
    assert (model.predict_proba(frame.assign(more=1)) == model.predict_proba(frame)).all()
    with pytest.raises(SordinoError, match=r"lacks the column 'sex'"):
        model.predict(frame[["age"]])
    with pytest.raises(SordinoError, match=r"^data: a ndarray is not a table; give a pandas or polars frame"):
        model.predict(frame[["age"]].to_numpy())


def test_a_given_target_replaces_the_column():
    frame = table()
    in_frame = fast().fit(frame)
    for y in (frame["died"], frame["died"].tolist(), frame["died"].to_numpy()):
        assert (fast().fit(frame.drop(columns="died"), y).coef_ == in_frame.coef_).all()
        assert (fast().fit(frame.assign(died="no"), y).coef_ == in_frame.coef_).all()
    assert in_frame.score(frame) == in_frame.score(frame.drop(columns="died"), frame["died"])
    numbers = without("person", column="died", levels=["0", "1"])
    zero_or_one = (frame["died"] == "yes").astype(int)
    model = fast(numbers).fit(frame, zero_or_one)
    assert (model.coef_ == in_frame.coef_).all()
    assert model.score(frame, zero_or_one) == in_frame.score(frame)


def test_groups_and_persons_fill_what_the_schema_lacks():
    frame = table()
    named = fast().fit(frame)
    given = fast(without("person", "client")).fit(frame, groups=frame["hospital"])
    assert (given.coef_ == named.coef_).all()
    assert given.certificate_["client_names"] == ["north", "south", "west"]
    options = {"person_records": 2, "person_clients": 3, "lr": 1.0}
    by_column = fast(SCHEMA, options=options).fit(frame)
    by_argument = fast(options=options).fit(frame, persons=frame["patient"])
    assert (by_column.coef_ == by_argument.coef_).all()
    assert by_column.certificate_["unit"] == by_argument.certificate_["unit"] == "person"
    sha = Schema.of(without("person")).sha256()
    assert any(sha in fact for fact in by_argument.certificate_["assumes"]), "the schema as it was written"
    assert fast(SCHEMA, unit="record").fit(frame).certificate_["unit"] == "record"
    arrays = FederatedClassifier(method="dp-fedgd", rounds=2, options={"person_ids": "per-client"}, epsilon=50.0)
    cert = arrays.fit(frame[["age"]].fillna(50) / 90, frame["died"], persons=frame["patient"]).certificate_
    assert any("Persons are numbered by each client" in fact for fact in cert["assumes"])


@pytest.mark.filterwarnings("ignore")
def test_a_search_over_a_frame():
    frame = table()
    for given in ((frame,), (frame, frame["died"])):
        search = GridSearchCV(fast(), {"epsilon": [20.0, 50.0]}, cv=2).fit(*given)
        assert search.best_score_ > 0.6


@pytest.mark.filterwarnings("ignore:columns. .* are not in the schema")
def test_quantities_counts_and_survival_of_a_frame():
    frame = table(600)
    age = frame["age"].fillna(55)
    rng = np.random.default_rng(0)
    frame["days"] = age / 10 + rng.normal(0, 0.5, len(age))
    frame["visits"] = rng.poisson(np.exp(age / 40))
    frame["time"], frame["dead"] = rng.exponential(100 / age), rng.choice(["Y", "N"], len(age))
    quantity = without("person", column="days", task="quantity", range=[0, 12])
    model = fast(quantity, FederatedRegressor, method="auto", options=None).fit(frame)
    assert model.score(frame) > 0.7
    assert model.score(frame, frame["days"]) == pytest.approx(model.score(frame))
    assert ((model.predict(frame) >= 0) & (model.predict(frame) <= 12)).all()
    count = without("person", column="visits", task="count", maximum=40)
    assert fast(count, FederatedRegressor, method="auto", options=None).fit(frame).score(frame) > 0.2
    lives = without("person", column="time", task="survival", event="dead", levels=["N", "Y"], intervals=[0, 1, 2, 4])
    cox = fast(lives, FederatedCox, method="auto", options=None).fit(frame)
    y = np.stack([frame["time"], frame["dead"] == "Y"], 1)
    assert cox.score(frame) == cox.score(frame.drop(columns=["time", "dead"]), y) > 0.5
    again = fast(lives, FederatedCox, method="auto", options=None).fit(frame.drop(columns=["time", "dead"]), y)
    assert (again.coef_ == cox.coef_).all()
    assert cox.edges_.tolist() == [1, 2, 4]


@pytest.mark.parametrize("kind", ["range", "task", "edges"])
def test_what_is_made_of_the_target_opens_no_other_account(tmp_path, kind):
    """Three fits of epsilon 1 passed a limit of 1, each with another range of the target, or other edges of time."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (60, 2)), rng.poisson(4, 60)
    ways = {
        "range": [FederatedRegressor(target_range=(0, high)) for high in (2, 5, 8.5)],
        "task": [FederatedRegressor(target_range=(0, 9), task=task) for task in ("quantity", "count")],
        "edges": [FederatedCox(edges=(0, *edges)) for edges in ((2, 5), (3, 5), (1, 2, 3, 9))],
    }[kind]
    target = np.c_[y, y % 2] if kind == "edges" else y
    book = tmp_path / "mine.db"
    ways[0].set_params(ledger=book, limit=1.0).fit(x, target)
    for other in ways[1:]:
        with pytest.raises(OverspentError):
            other.set_params(ledger=book).fit(x, target)
    with Ledger(book) as ledger:
        assert len(ledger.people()) == 1


@pytest.mark.parametrize("more", [0, 1, 7])
def test_the_number_of_simulated_clients_follows_from_persons(more):
    """It followed from their records, whose number is hidden: six persons with six records were fitted, others not."""
    who = np.r_[np.arange(6), np.zeros(more, int)]
    model = FederatedClassifier(method="dp-fedgd", rounds=1, classes=[0, 1])
    assert model.fit(np.eye(len(who), 2), who % 2, persons=who).certificate_["clients"] == 6
    with pytest.raises(SordinoError, match="clients: 7 must be at most the number of persons, 6"):
        model.set_params(clients=7).fit(np.eye(len(who), 2), who % 2, persons=who)


def test_persons_whom_each_client_numbers_are_other_persons_to_a_ledger(tmp_path):
    """In one account with persons at five clients: 1.47 was stated for two runs, where 6.3 was true."""
    rng = np.random.default_rng(0)
    x, who, site = rng.normal(size=(100, 2)), np.arange(100) // 5, np.arange(100) % 5
    words = {"epsilon": 1.0, "method": "dp-fedgd", "rounds": 1, "trust": "secure-aggregation", "ledger": tmp_path / "b"}

    def fit(groups, **options):
        model = FederatedClassifier(**words, options={"person_records": 1, **options})
        return model.fit(x, site % 2, groups=groups, persons=who)

    assert fit(site, person_ids="per-client").certificate_["certified"]
    assert fit(site, person_ids="per-client").certificate_["certified"]
    for groups, options in [(site, {"person_clients": 5}), (site // 2, {"person_ids": "per-client"})]:
        with pytest.raises(SordinoError, match=r"^unit: .* counts other persons of these data"):
            fit(groups, **options)


@pytest.mark.parametrize("inside", [True, False])
def test_a_schema_names_no_target_of_its_own_to_a_ledger(tmp_path, inside):
    """A target beside the frame had the name that the schema gave it: each name was an account with the full limit."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(0, 1, (40, 1)), columns=["dose"])
    y = np.where(frame.dose > 0.5, "yes", "no")
    columns = {"dose": {"type": "number", "range": [0, 1]}}
    schema = {"target": {"column": "died", "levels": ["no", "yes"]}, "columns": columns}
    model = FederatedClassifier(schema=schema, method="dp-fedgd", rounds=1, ledger=tmp_path / "mine.db")
    if inside:
        assert model.fit(frame.assign(died=y)).certificate_["certified"]
    else:
        for target in (y, pd.Series(y), pd.Series(y, name="dead")):
            with pytest.raises(SordinoError, match=r"^ledger: y must have the names of the target's columns itself"):
                model.fit(frame, target)
        model.fit(frame, pd.Series(y, name="died"))


def test_the_same_frame_shares_a_ledger(tmp_path):
    frame = table()
    settings = {"ledger": tmp_path / "mine.db", "random_state": None, "epsilon": 1.0}
    fast(**settings, limit=1.2).fit(frame)
    with pytest.raises(sordino.OverspentError):
        fast(**settings).fit(frame[frame.columns[::-1]])


def test_an_edited_schema_opens_no_account(tmp_path):
    """Nor does a target beside the frame, another library, or the file that the frame is read from."""
    frame, book = table(), tmp_path / "mine.db"
    settings = {"ledger": book, "random_state": None, "epsilon": 1.0}
    given = without("person")
    edited = {**given, "columns": given["columns"] | {"age": {"type": "number", "range": [20, 91]}}}
    fast(**settings).fit(frame)
    fast(edited, **settings).fit(frame)
    fast(**settings).fit(frame.drop(columns="died"), frame["died"])
    fast(**settings).fit({each: frame[each].tolist() for each in frame.columns})
    frame.to_csv(tmp_path / "a.csv", index=False)
    fast(**settings).fit(tables.open_table(tmp_path / "a.csv"))
    with Ledger(book) as ledger:
        assert len(ledger.people()) == 1
    fast(**settings).fit(frame.iloc[1:])
    with Ledger(book) as ledger:
        assert len(ledger.people()) == 2, "a record less is another table, as the docs say"


@pytest.mark.parametrize(
    ("kind", "schema", "settings", "message"),
    [
        (FederatedClassifier, 3, {}, r"^schema: 3 must be the path"),
        (FederatedClassifier, "absent.toml", {}, r"absent.toml"),
        (FederatedClassifier, without("target"), {}, r"^schema: it names no target"),
        (FederatedRegressor, SCHEMA, {}, r"^schema: its target has the task classes, .* use FederatedClassifier"),
        (FederatedCox, SCHEMA, {}, r"^schema: its target has the task classes, and FederatedCox learns survival"),
        (
            FederatedClassifier,
            without("person", column="died", task="count", maximum=3),
            {},
            r"^schema: its target has the task count, .* use FederatedRegressor",
        ),
        (FederatedClassifier, without("person"), {"classes": ["no"]}, r"^classes: the target of the schema"),
        (
            FederatedRegressor,
            without("person", column="age", task="quantity", range=[0, 1]),
            {"target_range": (0, 1)},
            r"^columns.age: age is the target|^target_range: the target of the schema",
        ),
        (
            FederatedClassifier,
            without("person"),
            {"options": {"private_statistics": 0.1}},
            r"^private_statistics: .* the schema has none",
        ),
        (
            FederatedClassifier,
            {**without("person"), "columns": {"age": {"type": "number", "within": [0, 200]}}},
            {},
            r"^columns.age: it has no public range",
        ),
    ],
)
def test_bad_schemas_are_named(kind, schema, settings, message):
    with pytest.raises(SordinoError, match=message):
        fast(schema, kind, **settings).fit(table(40))


def test_bad_frames_are_named():
    frame = table(40)
    for wrong, message in [
        (frame.drop(columns="died"), r"lacks the column 'died'"),
        (frame.drop(columns="hospital"), r"lacks the column 'hospital'"),
        (frame.assign(died="perhaps"), r"^target: \d+ cells of column 'died' are none of the levels"),
        (frame.assign(died=None), r"^target: 40 cells of column 'died' are missing"),
        (frame.assign(hospital=None), r"^client: 40 cells"),
        (frame.assign(age="old"), r"column 'age' holds \d+ cells that are not numbers"),
        (frame[:0], r"^X: the frame has no records"),
        (frame.to_numpy(), r"^data: a ndarray is not a table"),
    ]:
        with pytest.raises(SordinoError, match=message):
            fast().fit(wrong)
    with pytest.raises(SordinoError, match=r"^y: shape \(3,\) for 40 records"):
        fast().fit(frame, ["no", "yes", "no"])
    with pytest.raises(SordinoError, match=r"^groups: the schema names the column 'hospital' for it"):
        fast().fit(frame, groups=frame["hospital"])
    with pytest.raises(SordinoError, match=r"^persons: the schema names the column 'patient' for it"):
        fast(SCHEMA).fit(frame, persons=frame["patient"])
    with pytest.raises(SordinoError, match=r"^groups: shape \(3,\)"):
        fast(without("client", "person")).fit(frame, groups=[1, 2, 3])


@pytest.mark.parametrize(
    ("kind", "y"),
    [
        (FederatedClassifier(), ["no", "yes"] * 20),
        (FederatedRegressor(target_range=(0, 9)), list(range(40))),
        (FederatedCox(edges=[0, 5, 9]), [[3.0, 1]] * 40),
    ],
)
def test_text_and_missing_values_without_a_schema_point_to_schema(kind, y):
    frame = table(40)[["age", "sex", "hospital"]].fillna(50.0)
    for given, columns in [(frame, "'sex', 'hospital'"), (frame.to_numpy(), "1, 2")]:
        with pytest.raises(SordinoError, match=rf"^X: column {columns} holds text.* schema="):
            clone(kind).fit(given, y)
    missing = frame[["age"]].assign(height=1.0, weight=np.nan)
    for given, column in [(missing, "'weight'"), (missing.to_numpy(), "2")]:
        with pytest.raises(SordinoError, match=rf"^X: column {column} has missing values \(NaN\).* schema="):
            clone(kind).fit(given, y)
    with pytest.raises(ValueError, match="infinity") as caught:
        clone(kind).fit(frame[["age"]].assign(age=np.inf), y)
    assert not isinstance(caught.value, SordinoError), "other mistakes are told as scikit-learn tells them"


def test_weights_of_records_mean_what_those_of_scikit_learn_do():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = (rng.random(600) < 1 / (1 + np.exp(-x[:, 0]))).astype(int)
    weight = np.where(x[:, 1] > 0, 1.0, 0.2)
    options = {"lr": 4.0, "clip": 1e6}
    without_noise = {"epsilon": np.inf, "method": "dp-fedgd", "rounds": 600, "normalize": "none", "random_state": 0}
    model = FederatedClassifier(**without_noise, options=options).fit(x, y, sample_weight=weight)
    other = FederatedClassifier(**without_noise, options=options).fit(x, y)
    exact = LogisticRegression(C=np.inf, tol=1e-8).fit(x, y, sample_weight=weight)
    assert model.coef_ == pytest.approx(exact.coef_, abs=2e-3)
    assert model.intercept_ == pytest.approx(exact.intercept_, abs=2e-3)
    assert np.abs(other.coef_ - exact.coef_).max() > 0.02, "the weights matter"
    absent = FederatedClassifier(**without_noise, options=options).fit(x, y, sample_weight=(weight > 0.5).astype(float))
    part = LogisticRegression(C=np.inf, tol=1e-8).fit(x[weight > 0.5], y[weight > 0.5])
    assert absent.coef_ == pytest.approx(part.coef_, abs=2e-2), "a weight of 0 leaves a record out"


def test_weights_of_records_cost_no_more_and_are_named_in_the_certificate():
    x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2
    model = FederatedClassifier(epsilon=2.0, rounds=6, clients=4)
    plain = model.fit(x, y).certificate_
    weighted = model.fit(x, y, sample_weight=np.linspace(0, 1, 80)).certificate_
    assert weighted["certified"]
    assert weighted["epsilon"] == plain["epsilon"]
    assert WEIGHTED in weighted["assumes"]
    assert WEIGHTED not in plain["assumes"]


@pytest.mark.parametrize(
    ("weight", "settings", "more", "message"),
    [
        (np.full(40, 1.5), {}, {}, "a weight is not in"),
        (np.full(40, -0.1), {}, {}, "a weight is not in"),
        (np.full(40, np.nan), {}, {}, "a weight is not in"),
        (np.ones(3), {}, {}, r"shape \(3,\) for 40 records"),
        (["a"] * 40, {}, {}, "it must hold numbers"),
        (np.ones(40), {}, {"persons": np.arange(40) // 2}, "here unit = person"),
        (np.ones(40), {"model": "mlp", "method": "dp-fedadam"}, {}, "here model = mlp"),
        (np.ones(40), {"method": "dp-fednew"}, {}, "here method = dp-fednew"),
    ],
)
def test_weights_without_a_proof_are_refused(weight, settings, more, message):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    with pytest.raises(SordinoError, match=rf"^sample_weight: .*{message}"):
        FederatedClassifier(**settings).fit(x, y, sample_weight=weight, **more)


def test_unknown_arguments_of_fit_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'weights'"):
        FederatedClassifier().fit(np.eye(4), [0, 1, 0, 1], weights=np.ones(4))


def test_balanced_weights_from_public_shares():
    frame = table()
    weights = {"class_weights": "balanced", "prevalence": [0.8, 0.2], "lr": 1.0}
    plain, balanced = fast().fit(frame), fast(options=weights).fit(frame)
    assert balanced.predict_proba(frame)[:, 1].mean() > plain.predict_proba(frame)[:, 1].mean()
    with pytest.raises(SordinoError, match=r"^class_weights: balanced needs the share"):
        fast(options={"class_weights": "balanced"}).fit(frame)


def test_trees_learn_classes_quantities_and_counts():
    frame = table(1000)
    model = fast(method="dp-boost", options={"trees": 20}, rounds=None).fit(frame)
    assert model.score(frame) > 0.7
    assert not hasattr(model, "coef_")
    assert (pickle.loads(pickle.dumps(model)).predict_proba(frame) == model.predict_proba(frame)).all()
    x = frame[["age"]].fillna(55).to_numpy() / 45 - 1
    for task, y, most in (("quantity", 5 + 3 * x[:, 0], 10), ("count", np.floor(3 + 2 * x[:, 0]), 10)):
        trees = FederatedRegressor(method="dp-boost", target_range=(0, most), task=task, epsilon=50.0, random_state=0)
        assert trees.set_params(options={"trees": 20}).fit(x, y).score(x, y) > 0.5


def test_a_network_learns_what_no_line_separates():
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)  # no line separates them
    model = FederatedClassifier(
        model="mlp", method="dp-fedadam", rounds=60, clients=2, epsilon=1e4, random_state=0, options={"lr": 0.05}
    ).fit(x, y)
    assert model.score(x, y) > 0.85
    assert not hasattr(model, "coef_")
    assert model.predict_proba(x).shape == (200, 2)
    assert (pickle.loads(pickle.dumps(model)).predict(x) == model.predict(x)).all()
    assert hasattr(model.set_params(model="auto", method="auto", options=None, rounds=10).fit(x, y), "coef_")


def test_balanced_weights_from_counts_that_are_paid_for():
    frame = table(4000)
    frame = frame[(frame["died"] == "no") | (np.arange(4000) % 4 == 0)]
    share = (frame["died"] == "yes").mean()
    schema = without("person", column="died", levels=["no", "yes"], find_prevalence=True)
    options = {"class_weights": "balanced", "private_statistics": 0.1, "lr": 1.0}
    model = fast(schema, random_state=None, epsilon=8.0, options=options).fit(frame)
    assert model.schema_.target.prevalence[1] == pytest.approx(share, abs=0.03)
    assert model.certificate_["certified"]
    assert model.certificate_["epsilon"] == pytest.approx(8.0, rel=1e-3)
    assert any("tally" in str(query) for query in model.certificate_["queries"])
    assert len(model.history_) == 11, "one round counts"
    public = fast(
        without("person", column="died", levels=["no", "yes"], prevalence=[1 - share, share]),
        options={"class_weights": "balanced", "lr": 1.0},
    ).fit(frame)
    risk, known = (each.predict_proba(frame)[:, 1].mean() for each in (model, public))
    assert risk == pytest.approx(known, abs=0.05)
    with pytest.raises(SordinoError, match=r"find_prevalence"):
        fast(schema, options={"class_weights": "balanced"}).fit(frame)


def test_balanced_weights_of_arrays_from_counts_that_are_paid_for():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3000, 2))
    y = np.where(rng.random(3000) < 1 / (1 + np.exp(3 - x[:, 0])), "yes", "no")
    options = {"class_weights": "balanced", "private_statistics": 0.1, "lr": 1.0}
    usual = {"method": "dp-fedgd", "epsilon": 8.0, "rounds": 20, "normalize": "clip:3"}
    with pytest.raises(SordinoError, match=r"^private_statistics: .*must be declared"):
        FederatedClassifier(**usual, options=options).fit(x, y)
    model = FederatedClassifier(**usual, options=options, classes=["no", "yes"]).fit(x, y)
    assert model.certificate_["certified"]
    assert list(model.classes_) == ["no", "yes"]
    assert 0.35 < model.predict_proba(x)[:, 1].mean() < 0.65, "as if both classes were equally common"


def test_ranges_that_noised_counts_find_are_part_of_the_estimator():
    frame = table(3000)
    schema = without("person")
    schema["columns"] = {**schema["columns"], "age": {"type": "number", "within": [0, 1000]}}
    model = fast(schema, epsilon=20.0, options={"private_statistics": 0.2, "lr": 1.0}).fit(frame)
    low, high = model.schema_.columns["age"].range
    assert 0 <= low <= 40
    assert 80 <= high <= 130
    assert model.score(frame) > 0.7
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(frame), model.predict_proba(frame))


def test_columns_that_the_schema_does_not_mention_are_named():
    frame = table(60).assign(note="x")
    with pytest.warns(UserWarning, match=r"^columns: note are not in the schema, so they are not used"):
        fast().fit(frame)


def test_no_id_in_a_list_changes_those_of_others():
    """The mutant: with one 1.5 in the list, NumPy makes floats of all ids, and 20 persons become 2."""
    ids = [2**60 + k // 2 for k in range(40)]
    before = unit_numbers(entries([*ids, 2**60], 41))
    assert before.max() == 19
    for other in (1.5, "x", 2**70, True):
        assert np.array_equal(unit_numbers(entries([*ids, other], 41))[:40], before[:40])
