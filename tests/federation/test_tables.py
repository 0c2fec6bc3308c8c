"""A federation over tables: one schema for all sites, columns in any order; a site with another schema stays out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
from fixtures import Loopback

from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.evidence.verify import verify
from sordino.federation import policy
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.coordinator import Coordinator
from sordino.operations.doctor import doctor
from sordino.training.artifacts import load_model
from sordino.training.predict import load_run, predict
from sordino.training.verify_run import verify_run

NAMES = ("north", "south", "west")
SCHEMA = {
    "client": "site",
    "target": {"column": "sick", "levels": ["no", "yes"]},
    "columns": {
        "age": {"type": "number", "range": [18, 100]},
        "sex": {"type": "category", "levels": ["f", "m"]},
    },
}
ORDERS = (["age", "sex", "sick"], ["sick", "sex", "age"], ["site", "sex", "age", "sick"])


@pytest.fixture
def federation(tiny):
    return tables(tiny("auto", rounds=6))


def tables(places):
    """Three sites whose tables have their columns in different orders; one of them has the client column too."""
    rng = np.random.default_rng(0)
    for name, order in zip(NAMES, ORDERS, strict=True):
        age, sex = rng.integers(20, 90, 60), rng.choice(["f", "m"], 60)
        sick = np.where(age + rng.normal(0, 10, 60) > 55, "yes", "no")
        columns = {"age": age, "sex": sex, "sick": sick, "site": [name] * 60}
        lines = [",".join(order), *(",".join(str(columns[key][i]) for key in order) for i in range(60))]
        (places.place(name) / "data.csv").write_text("\n".join(lines) + "\n")
        (places.place(name) / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
        configure(places, name)
    (places.coordinator / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
    about = {key: value for key, value in places.about.items() if key not in ("features", "classes")}
    (places.coordinator / "federation.toml").write_text(tomli_w.dumps({**about, "schema": "schema.toml"}))
    return places


def configure(places, name, **keys):
    own = {"name": name, "data": "data.csv", "schema": "schema.toml", "epsilon": 50.0, "delta": 1e-3, "seed": 7}
    (places.place(name) / "site.toml").write_text(tomli_w.dumps({**own, **keys}))


def test_a_federation_trains_over_tables_and_its_model_knows_the_schema(federation, tmp_path):
    federation.run()
    run = federation.coordinator / "run"
    about = load_model(run / "model.safetensors").about
    assert Schema.of(about["schema"]) == Schema.of(SCHEMA)
    assert about["normalize"] == "table:2"
    for place in (run, *(federation.place(name) / "runs" for name in NAMES)):
        path = next(place.rglob("certificate.json"))
        assert any("schema of the table" in fact for fact in json.loads(path.read_text())["assumes"])
        from sordino.federation.terms import against_terms

        assert not verify_run(path, against_terms=against_terms).problems
    (tmp_path / "new.csv").write_text("sex,age\nm,85\nf,25\n")
    assert predict(run / "model.safetensors", str(tmp_path / "new.csv")).labels == ["yes", "no"]


def test_a_site_with_another_schema_refuses_the_terms(federation):
    other = json.loads(json.dumps(SCHEMA))
    other["columns"]["age"]["range"] = [0, 100]
    (federation.place("west") / "schema.toml").write_text(tomli_w.dumps(other))
    with pytest.raises(SordinoError, match="west"):
        federation.run()
    refused = [event for event in federation.events("west") if event["what"] == "refused"]
    assert "schema of the terms is not this site's schema.toml: other words in columns.age;" in refused[-1]["detail"]
    assert not federation.charged("north")


def test_a_refusal_names_the_parts_of_the_schema_that_differ():
    agreed = Schema.of(SCHEMA)
    terms = SimpleNamespace(schema=agreed.sha256(), schema_parts=agreed.part_hashes())

    def why(**changes):
        return policy._schema_differs(terms, Schema.of(SCHEMA | changes))

    age, sex = SCHEMA["columns"]["age"], SCHEMA["columns"]["sex"]
    assert why(columns={"sex": sex}) == "only the coordinator has columns.age"
    assert why(columns={"age": age, "sex": sex, "years": age}) == "only this site has columns.years"
    assert why(missing=["-"]) == "other words in missing"
    assert why(columns={"sex": sex, "age": age}) == "the columns have another order"
    assert policy._schema_differs(terms, None).startswith("there is none here")


def test_the_doctor_says_that_a_column_is_missing(federation):
    path = federation.place("south") / "data.csv"
    path.write_text(path.read_text().replace("sick,sex,age", "sick,gender,age", 1))
    checks = list(doctor(federation.place("south") / "site.toml"))
    assert any(not check.fine and "lacks the column 'sex'" in check.says for check in checks)


def test_keys_that_contradict_the_schema_are_refused(federation):
    configure(federation, "north", classes=["a", "b"])
    with pytest.raises(SordinoError, match="classes: the schema says"):
        SiteConfig.read(federation.place("north") / "site.toml")
    config = FederationConfig.read(federation.coordinator / "federation.toml")
    assert (config.features, config.classes) == (6, ("no", "yes"))


def test_no_cell_of_a_table_leaves_in_a_refusal(federation):
    """The error about a cell that does not fit names its column in the site's own log, and quotes it nowhere."""
    path = federation.place("west") / "data.csv"
    lines = path.read_text().splitlines()
    lines[5] = "west,f,secret-93,no"
    path.write_text("\n".join(lines) + "\n")
    transport = Loopback(federation.sites())
    with pytest.raises(SordinoError):
        Coordinator(transport, federation.coordinator).run()
    assert transport.log
    assert all(b"secret-93" not in reply for _, _, reply in transport.log if reply)
    written = [file for file in federation.coordinator.rglob("*") if file.is_file()]
    assert all(b"secret-93" not in file.read_bytes() for file in written)
    log = (federation.place("west") / "events.jsonl").read_text()
    assert "secret-93" not in log
    assert "column 'age' holds a cell that is not a number" in log


def with_persons(federation, names=NAMES):
    """Every site's table gets patients with two records each, and the schema names their column."""
    schema = {**SCHEMA, "person": "patient"}
    for name in NAMES:
        path = federation.place(name) / "data.csv"
        header, *rows = path.read_text().splitlines()
        rows = [f"{row},{name}{i // 2}" for i, row in enumerate(rows)]
        path.write_text("\n".join([f"{header},patient", *rows]) + "\n")
        (federation.place(name) / "schema.toml").write_text(tomli_w.dumps(schema if name in names else SCHEMA))
    (federation.coordinator / "schema.toml").write_text(tomli_w.dumps(schema))


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_a_federation_protects_persons(tiny, trust):
    federation = tables(tiny("dp-fedgd", trust, normalize="table:2"))
    with_persons(federation)
    federation.run()
    for place in (federation.coordinator / "run", *(federation.place(name) / "runs" for name in NAMES)):
        path = next(place.rglob("certificate.json"))
        cert = json.loads(path.read_text())
        assert (cert["unit"], cert["person"]["records"]) == ("person", 4)
        assert cert["records"] == 3 * 24  # persons: 30 per site, a fifth held out
        from sordino.federation.terms import against_terms

        assert not verify_run(path, against_terms=against_terms).problems


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_a_federation_of_persons_is_evaluated_and_may_draw_their_records(tiny, trust):
    federation = tables(tiny("dp-fedgd", trust, normalize="table:2", person_choice="random", person_records=1))
    with_persons(federation)
    path = federation.coordinator / "federation.toml"
    path.write_text("evaluation_epsilon = 20.0\n" + path.read_text())
    for name in NAMES:
        configure(federation, name, evaluation_epsilon=30.0)
    federation.run()
    out = federation.coordinator / "run" / "evaluation"
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["unit"], found["records"]) == ("person", 3 * 6)
    assert not [problem for problem in verify_run(out).problems if "signed" not in problem]
    cert = json.loads((out / "certificate.json").read_text())
    assert cert["person"] == {"records": 1, "clients": 1, "choice": "random"}


@pytest.mark.parametrize(
    ("method", "rounds", "keys"), [("auto", 8, {"calibrate": 0.1}), ("dp-fedadam", 3, {"batch": "poisson:8"})]
)
def test_persons_under_masks_with_a_covariance_a_calibration_and_minibatches(tiny, method, rounds, keys):
    federation = tables(tiny(method, "secure-aggregation", rounds, **keys))
    with_persons(federation)
    coordinator, _ = federation.run()
    cert = json.loads((coordinator.out / "certificate.json").read_text())
    kinds = [query["query"].split()[-1] for query in cert["queries"]]
    assert kinds == (["gram", "gradient", "gradient", "calibration"] if method == "auto" else ["gradient"])
    assert cert["unit"] == "person"
    assert cert["epsilon"] <= 8 * (1 + 1e-9)
    assert verify(cert).problems == []
    assert len(federation.progress("round")) == coordinator.plan.rounds


def test_a_site_whose_schema_names_persons_refuses_a_run_for_records(federation):
    with_persons(federation)
    about = federation.coordinator / "federation.toml"
    spec = federation.coordinator / "spec.toml"
    assert about.exists()
    assert spec.exists()
    spec.write_text(spec.read_text() + '\nunit = "record"\n')
    with pytest.raises(SordinoError):
        federation.run()
    refused = [event for event in federation.events("north") if event["what"] == "refused"]
    assert "this site needs unit = person" in refused[-1]["detail"]
    assert not federation.charged("north")


DAYS = {"column": "days", "task": "survival", "event": "died", "intervals": [0, 100, 200]}


@pytest.mark.parametrize(
    "target",
    [
        DAYS,
        {"column": "days", "task": "count", "maximum": 400},
        {"column": "days", "task": "quantity", "range": [0, 400]},
    ],
    ids=["survival", "count", "quantity"],
)
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_a_federation_learns_survival_counts_and_quantities(tiny, tmp_path, target, trust):
    federation = tables(tiny("auto", trust, rounds=6))
    schema = {**SCHEMA, "target": target}
    schema["columns"] = {**SCHEMA["columns"], **({} if "event" in target else {"died": {"type": "drop"}})}
    rng = np.random.default_rng(1)
    for name in NAMES:
        age = rng.integers(20, 90, 60)
        days = np.ceil(rng.exponential(300 * np.exp(-(age - 55) / 20))).clip(max=300)
        lines = [f"{a},f,{int(d)},{int(d < 300)}" for a, d in zip(age, days, strict=True)]
        (federation.place(name) / "data.csv").write_text("\n".join(["age,sex,days,died", *lines]) + "\n")
        (federation.place(name) / "schema.toml").write_text(tomli_w.dumps(schema))
        assert all(check.fine for check in doctor(federation.place(name) / "site.toml") if check.about == "data")
        configure(federation, name, evaluation_epsilon=30.0)
    (federation.coordinator / "schema.toml").write_text(tomli_w.dumps(schema))
    path = federation.coordinator / "federation.toml"
    path.write_text("evaluation_epsilon = 20.0\n" + path.read_text())
    federation.run()
    out = federation.coordinator / "run" / "evaluation"
    found = json.loads((out / "evaluation.json").read_text())
    assert ("concordance" if target is DAYS else "mae") in found
    assert not [problem for problem in verify_run(out).problems if "signed" not in problem]
    loaded = load_run(federation.coordinator / "run" / "model.safetensors")
    frame = {"sex": ["f", "f"], "age": [85, 25]}
    if target is DAYS:
        assert loaded.predict_survival(frame).shape == (2, 2)
        assert loaded.about["life_table"] is None, "the coordinator publishes the model alone"
    assert np.isfinite(loaded.predict(frame)).all()
    for name in NAMES:
        certificates = list((federation.place(name) / "runs").rglob("certificate.json"))
        assert {json.loads(path.read_text())["method"] for path in certificates} == {"auto", "evaluation"}
