"""A federation finds what its schema leaves open, by noised counts in a run of its own, and then trains with it."""

import json
import shutil

import numpy as np
import pytest
import tomli_w

from sordino.core import Adjacency
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.evidence.ledger import NOTES
from sordino.federation import counting
from sordino.federation.config import FederationConfig
from sordino.federation.sentences import of_coordinator
from sordino.federation.terms import Terms, against_terms
from sordino.operations.doctor import doctor
from sordino.privacy import spending
from sordino.training.predict import load_run
from sordino.training.verify_run import verify_run
from tests.support import tiers

NAMES = ("north", "south", "west")
OPEN = {
    "client": "site",
    "target": {"column": "sick", "levels": ["no", "yes"], "find_prevalence": True},
    "columns": {
        "age": {"type": "number", "within": [-1000, 1000]},
        "ward": {"type": "category", "candidates": ["a", "b", "c", "d"]},
    },
}


@pytest.fixture
def places(tiny):
    def make(trust="untrusted-server", persons=False, **keys):
        made = tiny("auto", trust, rounds=6, **keys)
        schema = {**OPEN, **({"person": "patient"} if persons else {})}
        rng = np.random.default_rng(0)
        for name in NAMES:
            age, ward = rng.integers(20, 90, 300), rng.choice(["a", "b", "c"], 300, p=[0.6, 0.39, 0.01])
            sick = np.where(age + rng.normal(0, 10, 300) > 70, "yes", "no")
            rows = [f"{a},{w},{s},p{k // 2}" for k, (a, w, s) in enumerate(zip(age, ward, sick, strict=True))]
            heads = "age,ward,sick,patient"
            if not persons:
                heads, rows = "age,ward,sick", [row.rpartition(",")[0] for row in rows]
            (made.place(name) / "data.csv").write_text("\n".join([heads, *rows]) + "\n")
            own = {"name": name, "data": "data.csv", "schema": "schema.toml", "epsilon": 50.0, "delta": 1e-3}
            (made.place(name) / "site.toml").write_text(tomli_w.dumps({**own, "seed": 7}))
        give(made, schema)
        return made

    return make


def give(made, schema, **keys):
    """Write the schema to every folder, and federation.toml with these keys."""
    for folder in (made.coordinator, *map(made.place, NAMES)):
        (folder / "schema.toml").write_text(tomli_w.dumps(schema))
    about = {key: value for key, value in made.about.items() if key not in ("features", "classes")}
    keys = {"statistics_epsilon": 8.0} | keys
    keys = {key: value for key, value in keys.items() if value is not None}
    (made.coordinator / "federation.toml").write_text(tomli_w.dumps({**about, "schema": "schema.toml", **keys}))


def train_next(made):
    """Use the schema that was found, and train: what people do between the two runs."""
    for name in NAMES:
        (path,) = (made.place(name) / "runs").rglob("schema.toml")
        shutil.copy(path, made.place(name) / "schema.toml")
    shutil.copy(made.coordinator / "run" / "schema.toml", made.coordinator / "schema.toml")
    shutil.move(made.coordinator / "run", made.coordinator / "found")
    path = made.coordinator / "federation.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "statistics_epsilon" not in line))
    made.run()


@pytest.mark.parametrize(("epsilon", "warned"), [(0.5, True), (45.0, False)])
def test_rough_ranges_are_told_to_the_coordinator_and_to_the_sites(places, epsilon, warned):
    made = places()
    give(made, OPEN, statistics_epsilon=epsilon)
    made.run()
    (line,) = made.progress("finished")
    told = of_coordinator(line, None)
    assert f"the completed schema is {made.coordinator / 'run' / 'schema.toml'}" in told
    assert ("WARNING: the found ranges are rough (age)" in told) is warned
    assert ("raise statistics_epsilon in federation.toml" in told) is warned
    assert ("are rough" in made.events("north")[-1].get("hint", "")) is warned


FOUND = [
    ("untrusted-server", False),
    ("secure-aggregation", True),
    ("untrusted-server", True),
    ("secure-aggregation", False),
]


@pytest.mark.parametrize(("trust", "persons"), tiers(FOUND, 2))
def test_a_federation_finds_ranges_levels_and_shares_and_trains_with_them(places, trust, persons):

    made = places(trust, persons)
    assert all(check.fine for check in doctor(made.place("north") / "site.toml") if check.about == "data")
    made.run()
    run = made.coordinator / "run"
    found = Schema.read(run / "schema.toml")
    assert found.unknown == []
    low, high = found.columns["age"].range
    assert -150 <= low <= 25
    assert 80 <= high <= 250
    assert {"a", "b"} <= set(found.columns["ward"].levels) <= {"a", "b", "c"}
    assert found.target.prevalence[1] == pytest.approx(0.28, abs=0.1)
    for place in (run, *(made.place(name) / "runs" for name in NAMES)):
        (path,) = place.rglob("certificate.json")
        cert = json.loads(path.read_text())
        assert (cert["method"], cert["unit"], cert["rounds"]) == ("statistics", "person" if persons else "record", 1)
        assert cert["epsilon"] <= 8.0 * (1 + 1e-9)
        assert not verify_run(path, against_terms=against_terms).problems
        assert Schema.read(path.with_name("schema.toml")) == found, "every party writes the same schema"
        assert "They complete the schema of the table" in path.with_name("statement.md").read_text()
    for name in NAMES:
        with made.ledger(name) as ledger:
            (row,) = (row for row in ledger.rows() if row.query not in NOTES)
        assert row.query == "0.0 tally"
    train_next(made)
    assert load_run(made.coordinator / "run").schema == found
    for place in (made.coordinator / "run", made.place("west") / "runs"):
        newest = max(place.rglob("certificate.json"), key=lambda path: json.loads(path.read_text())["rounds"])
        assumed = json.loads(newest.read_text())["assumes"]
        assert any("age, ward, target.prevalence, which follow from noised counts" in fact for fact in assumed)
        assert not verify_run(newest, against_terms=against_terms).problems
    with made.ledger("west") as ledger:
        paid = [row for row in ledger.rows() if row.query not in NOTES]
        assert len({row.plan for row in paid}) == 2
        assert len({row.who for row in paid}) == 1, "both runs are in one account"


def test_a_training_with_an_open_schema_is_not_proposed(places):
    made = places()
    give(made, OPEN, statistics_epsilon=None)
    with pytest.raises(SordinoError, match=r"schema: 'age' is left open; find it first.*statistics_epsilon"):
        made.run()
    assert not made.charged("north")


def test_a_complete_schema_leaves_nothing_to_find(places):
    made = places()
    closed = {**OPEN, "target": {"column": "sick", "levels": ["no", "yes"]}}
    closed["columns"] = {
        "age": {"type": "number", "range": [0, 100]},
        "ward": {"type": "category", "levels": ["a", "b"]},
    }
    give(made, closed)
    with pytest.raises(SordinoError, match="the schema leaves none open"):
        made.run()


def test_a_site_refuses_counts_of_other_cells_and_a_schema_found_by_nobody(places):
    made = places()
    other = json.loads(json.dumps(OPEN))
    other["columns"]["ward"]["candidates"].append("e")
    (made.place("south") / "schema.toml").write_text(tomli_w.dumps(other))
    with pytest.raises(SordinoError, match="south"):
        made.run()
    assert not made.charged("south")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"statistics_epsilon": 0.0}, "statistics_epsilon: 0.0 must lie in"),
        ({"evaluation_epsilon": 1.0}, "a run that finds statistics trains no model"),
    ],
)
def test_wrong_keys_are_refused(places, keys, complaint):
    made = places()
    give(made, OPEN, **keys)
    with pytest.raises(SordinoError, match=complaint):
        FederationConfig.read(made.coordinator / "federation.toml")


def test_terms_of_counts_give_the_plan_without_the_schema(places):
    made = places()
    made.run()
    text = (made.coordinator / "run" / "terms.json").read_text()
    terms = Terms.read(text)
    assert terms.cells == (64, 4, 2) == counting.cells_of(Schema.of(OPEN))
    assert spending.epsilon(terms.plan) == pytest.approx(8.0)
    (query,) = terms.plan.stages[0].queries
    assert query.bound.bound(1, Adjacency.REPLACE_ONE) == pytest.approx(6**0.5, rel=1e-3)
    for change in ({"cells": [0]}, {"cells": "64"}, {"evaluation": 1.0, "tests": [1, 1, 1]}, {"found": [1]}):
        with pytest.raises(SordinoError, match="terms: "):
            Terms.read(json.dumps({**json.loads(text), **change}))
