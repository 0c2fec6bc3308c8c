"""Runs that protect persons: from a table with several records per person to the certificate."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from sordino import FederatedClassifier
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.training import run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run

SCHEMA = """
client = "site"
person = "patient"
[target]
column = "sick"
levels = ["no", "yes"]
[columns.age]
type = "number"
range = [18, 100]
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """300 patients at three sites, with one to six records each; some of them are at two sites."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(300), rng.integers(1, 7, 300))
    site = patient % 3
    for who in range(30):
        site[np.flatnonzero(patient == who)[-1]] = (who + 1) % 3
    age = rng.integers(20, 90, len(patient))
    sick = np.where(age + rng.normal(0, 10, len(patient)) > 55, "yes", "no")
    rows = [f"p{p},s{s},{a},{y}" for p, s, a, y in zip(patient, site, age, sick, strict=True)]
    (tmp_path / "t.csv").write_text("patient,site,age,sick\n" + "\n".join(rows) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


WORDS = ["run", "--data", "t.csv", "--schema", "schema.toml", "--rounds", "6", "--epsilon", "4"]


def test_a_schema_with_a_person_column_protects_persons(table, capsys):
    assert main([*WORDS, "--set", "person_clients=2", "--out", "r", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cert = json.loads((table / "r" / "public" / "certificate.json").read_text())
    assert (cert["unit"], cert["person"]) == ("person", {"records": 4, "clients": 2, "choice": "first"})
    assert 240 <= cert["records"] <= 270
    assert document["records"] == cert["records"]
    assert not verify_run(table / "r").problems
    assert "persons" in (table / "r" / "public" / "statement.md").read_text()
    assert "person" in (table / "r" / "public" / "MODEL_CARD.md").read_text()
    assert main(["ledger", "show", "r/private/ledger.db"]) == 0


def test_a_person_at_two_clients_must_be_declared(table, capsys):
    assert main([*WORDS, "--out", "r"]) == 2
    assert re.search("persons? ha(s|ve) records at more than 1 client, one at 2", capsys.readouterr().err)
    assert main([*WORDS, "--set", "person_ids=per-client", "--out", "r"]) == 0
    cert = json.loads((table / "r" / "public" / "certificate.json").read_text())
    assert any("equal numbers at two clients are two persons" in line for line in cert["assumes"])


def test_record_level_can_still_be_asked_for_and_says_so(table, capsys):
    assert main([*WORDS, "--unit", "record", "--out", "r"]) == 0
    cert = json.loads((table / "r" / "public" / "certificate.json").read_text())
    assert cert["unit"] == "record"
    assert cert["person"] is None
    assert "A person with several records" in (table / "r" / "public" / "statement.md").read_text()


def test_a_person_column_without_a_schema(table, capsys):
    text = (table / "t.csv").read_text().replace("yes", "1").replace("no\n", "0\n")
    (table / "plain.csv").write_text(text)
    words = ["run", "--data", "plain.csv", "--label", "sick", "--person", "patient", "--rounds", "6", "--clients", "3"]
    (table / "plain.csv").write_text(
        "\n".join(",".join(line.split(",")[::2] + line.split(",")[3:]) for line in text.splitlines())
    )
    assert main([*words, "--out", "r"]) == 0
    cert = json.loads((table / "r" / "public" / "certificate.json").read_text())
    assert cert["unit"] == "person"
    assert cert["clients"] == 3


def test_records_of_a_person_may_be_drawn_at_random(table, capsys):
    """The cap takes other records in every run; noise, sizes and epsilon are those of the first records."""
    keys = ["--set", "person_clients=2", "--set", "person_records=2"]
    assert main([*WORDS, *keys, "--out", "first"]) == 0
    assert main([*WORDS, *keys, "--set", "person_choice=random", "--out", "random"]) == 0
    certs = [json.loads((table / out / "public" / "certificate.json").read_text()) for out in ("first", "random")]
    assert [cert["person"]["choice"] for cert in certs] == ["first", "random"]
    for key in ("epsilon", "mu", "records", "groups", "queries", "noise", "certified"):
        assert certs[0][key] == certs[1][key], key
    assert not verify_run(table / "random").problems
    assert "drawn at random" in (table / "random" / "public" / "statement.md").read_text()
    spec = Spec.of({"data": "t.csv", "schema": "schema.toml", "rounds": 6, "person_clients": 2, "person_records": 2})
    spec = dataclasses.replace(spec, schedule_seed=1)
    drawn = [run.prepare(dataclasses.replace(spec, person_choice="random")) for _ in range(2)]
    assert not torch.equal(drawn[0].records.x, drawn[1].records.x)
    assert drawn[0].identity(b"key") == drawn[1].identity(b"key"), "a resumed run draws again from the same data"
    again = [run.prepare(dataclasses.replace(spec, person_choice="random", seed=3)).records for _ in range(2)]
    assert torch.equal(again[0].x, again[1].x)


def test_no_person_is_in_both_parts(table):
    job = run.prepare(Spec.of({"data": "t.csv", "schema": "schema.toml", "rounds": 6, "person_clients": 2}))
    used = len(np.unique(job.dataset.person))
    assert used < sum(job.records.sizes) <= used + 30  # a person at two clients is one unit at each
    assert used < 300


def test_other_persons_are_other_data(table):
    """The identity that a resumed run is held to depends on who is who."""
    spec = Spec.of({"data": "t.csv", "schema": "schema.toml", "rounds": 6, "person_clients": 2})
    job = run.prepare(spec)
    other = run.prepare(spec, job.dataset._replace(person=np.where(job.dataset.person == 100, 103, job.dataset.person)))
    assert job.identity(b"key") != other.identity(b"key")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"unit": "person"}, r"^person: unit = person needs the column"),
        ({"schema": "schema.toml", "person": "site"}, r"^person: 'site', but the schema names 'patient'"),
        ({"schema": "schema.toml", "person_ids": "local"}, r"^person_ids: 'local' is unknown"),
        ({"schema": "schema.toml", "person_choice": "last"}, r"^person_choice: 'last' is unknown"),
        ({"schema": "schema.toml", "person_records": 0}, r"^person_records: 0 must lie"),
        ({"schema": "schema.toml", "person_clients": 0}, r"^person_clients: 0 must lie"),
        ({"schema": "schema.toml", "unit": "record", "person_clients": 2}, r"^person_clients: 2 clients per person"),
    ],
)
def test_wrong_settings(table, keys, message):
    with pytest.raises(SordinoError, match=message):
        resolve(Spec.of({"data": "t.csv", **keys}))


def test_settings_are_tuned_for_persons(table, capsys):
    words = ["--data", "t.csv", "--schema", "schema.toml", "--set", "person_clients=2", "--rounds", "3"]
    assert main(["sweep", *words, "--method", "dp-fedgd", "--grid", "lr=1,2", "--epsilon", "4"]) == 0
    assert "best: lr" in capsys.readouterr().out


def test_methods_are_paired_although_each_seed_tests_on_another_number_of_records(table):
    words = ["--data", "t.csv", "--schema", "schema.toml", "--set", "person_clients=2", "--rounds", "2"]
    words += ["--set", "public_data=true"]  # all seeds test on the same private records
    words += ["--methods", "dp-fedgd,dp-fedavg", "--epsilons", "4", "--seeds", "3", "--pairs", "dp-fedavg/dp-fedgd"]
    assert main(["compare", *words, "--out", "c"]) == 0
    document = json.loads((table / "c" / "compare.json").read_text())
    keys = {"data": "t.csv", "schema": "schema.toml", "person_clients": 2, "public_data": True}
    tested = [len(resolve(Spec.of({**keys, "split_seed": seed})).read_data().y_test) for seed in (1, 3)]
    assert -(-tested[0] // 8) != -(-tested[1] // 8), "or this tests nothing"
    assert [(pair["seed"], pair["tested"]) for pair in document["pairs"]] == [(1, tested[0])]


def test_private_tuning_is_refused_for_persons(table, capsys):
    words = ["sweep", "--data", "t.csv", "--set", "schema=schema.toml", "--set", "person_clients=2"]
    assert main([*words, "--grid", "clip=1,2", "--charge-tuning", "count"]) == 2
    assert "unit: noisy counts of correct records are calibrated for single records" in capsys.readouterr().err


def test_a_ledger_does_not_add_persons_and_records(table, capsys):
    words = [*WORDS, "--ledger", "mine.db", "--limit", "20", "--set", "person_ids=per-client"]
    assert main([*words, "--out", "r"]) == 0
    assert re.search(r"clients +3 with \d+ persons \(", capsys.readouterr().out), "sizes count persons"
    assert main([*words, "--out", "r2"]) == 0
    assert main([*words, "--unit", "record", "--out", "r3"]) == 2
    assert "unit: " in capsys.readouterr().err


def test_estimators_take_persons():
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(200), 3)
    x = rng.normal(size=(600, 3))
    y = (x[:, 0] > 0).astype(int)
    model = FederatedClassifier(epsilon=8.0, rounds=8, clients=4, options={"person_records": 3})
    model.fit(x, y, persons=person.astype(str))
    cert = model.certificate_
    assert (cert["unit"], cert["records"]) == ("person", 200)
    assert cert["person"] == {"records": 3, "clients": 1, "choice": "first"}
    assert model.score(x, y) > 0.8
    with pytest.raises(SordinoError, match=r"^persons: shape \(3,\) for 600 records"):
        model.fit(x, y, persons=[1, 2, 3])
    with pytest.raises(SordinoError, match=r"^person_clients: "):
        model.set_params(clients=None).fit(x, y, groups=np.arange(600) % 2, persons=person)
