"""`sordino evaluate`: noised counts of protected test records, with a certificate and a ledger row of their own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from sordino.cli import main
from sordino.core import Privacy, Trust
from sordino.errors import OverspentError, SordinoError
from sordino.evidence import public
from sordino.evidence.ledger import Ledger
from sordino.evidence.statement import issue
from sordino.privacy import calibration, spending
from sordino.training import metrics, private_evaluation, survival
from sordino.training.evaluation_plan import Settings, choose_bins, plan_of
from sordino.training.metrics import Task
from sordino.training.predict import load_run
from sordino.training.verify_run import verify_run
from tests.support import AGE, DIED

SCHEMA = f"""
client = "hospital"
{DIED}{AGE}
[columns.dose]
type = "number"
range = [0, 10]
"""


def table(path, n, seed, hospital=True):
    rng = np.random.default_rng(seed)
    age, dose = rng.uniform(20, 90, n), rng.uniform(0, 10, n)
    died = rng.random(n) < expit((age - 60) / 8 + (dose - 5) / 3)
    heads = ["age", "dose", "died", *(["hospital"] if hospital else [])]
    rows = [
        f"{a:.2f},{d:.2f},{'yes' if y else 'no'}" + (f",h{k % 3}" if hospital else "")
        for k, (a, d, y) in enumerate(zip(age, dose, died, strict=True))
    ]
    path.write_text("\n".join([",".join(heads), *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trained run, and test records that it did not see."""
    place = tmp_path_factory.mktemp("evaluation")
    (place / "schema.toml").write_text(SCHEMA)
    table(place / "train.csv", 1500, 0)
    table(place / "test.csv", 1200, 1)
    table(place / "site.csv", 400, 2, hospital=False)
    words = ["--data", str(place / "train.csv"), "--schema", str(place / "schema.toml"), "--rounds", "5"]
    assert main(["run", *words, "--epsilon", "4", "--method", "dp-fedadam", "--out", str(place / "run")]) == 0
    return place


def evaluate(place, out, *words, data="test.csv", epsilon="1.0"):
    return main(
        ["evaluate", str(place / "run"), "--data", str(place / data), "--epsilon", epsilon, "--out", str(out), *words]
    )


@pytest.mark.parametrize("trust", list(Trust))
def test_an_evaluation_is_certified_and_verified(place, tmp_path, capsys, trust):
    assert evaluate(place, tmp_path / "e", "--trust", trust, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["certified"]
    assert (found["records"], found["epsilon"], found["unit"], found["trust"]) == (1200, 1.0, "record", trust)
    assert found["sensitivity_of_counts"] == pytest.approx(3**0.5, rel=1e-3)
    cert = json.loads((tmp_path / "e" / "public" / "certificate.json").read_text())
    assert cert["epsilon"] == pytest.approx(1.0)
    assert (cert["method"], cert["clients"], cert["client_names"]) == ("evaluation", 3, ["h0", "h1", "h2"])
    verdict = verify_run(tmp_path / "e")
    assert verdict.problems == []
    assert verdict.gaps == ["model.safetensors, which is not beside it"]
    assert public.unlisted_of_evaluation(tmp_path / "e" / "public") == []
    with Ledger(tmp_path / "e" / "private" / "ledger.db", read_only=True) as ledger:
        (row,) = ledger.rows()
    assert row.query == "0.0 tally"
    assert row.times == 1


def test_every_listed_field_occurs(place, tmp_path):
    assert evaluate(place, tmp_path / "e") == 0
    document = json.loads((tmp_path / "e" / "public" / "evaluation.json").read_text())
    others = ("mae", "mse", "r2", "deviance", "concordance")
    quantities = {f"{name}.{part}" for name in others for part in public.OF_A_METRIC} | {"most_deviance"}
    assert set(public._fields_of_evaluation(document)) == set(public.EVALUATION) - quantities - {"came"}, (
        "came is a federation's"
    )


def test_the_estimates_are_near_the_truth(place, tmp_path):
    out = tmp_path / "e"
    found = private_evaluation.evaluate_privately(place / "run", place / "test.csv", out, epsilon=50.0, seed=1)
    run = load_run(place / "run")
    p = run.predict_proba(str(place / "test.csv"))[:, 1]
    y = np.array([line.split(",")[2] == "yes" for line in (place / "test.csv").read_text().split()[1:]])
    assert found["accuracy"]["estimate"] == pytest.approx(((p > 0.5) == y).mean(), abs=0.01)
    assert found["mean_predicted"]["estimate"] == pytest.approx(p.mean(), abs=0.01)
    assert found["observed"]["estimate"] == pytest.approx(y.mean(), abs=0.01)
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert not cert["certified"], "a seed is not private"
    assert (found["certificate"], found["certified"], found["reasons"]) == (cert, False, cert["reasons"])
    assert "NOTHING IN THIS FOLDER MAY BE PUBLISHED" in (out / "README.txt").read_text()


def test_a_table_of_one_site_needs_no_client_column(place, tmp_path):
    assert evaluate(place, tmp_path / "e", data="site.csv") == 0
    assert json.loads((tmp_path / "e" / "public" / "certificate.json").read_text())["clients"] == 1


def test_the_console_states_sensitivity_unit_adjacency_and_trust(place, tmp_path, capsys):
    assert evaluate(place, tmp_path / "e", "--adjacency", "add-remove") == 0
    out = capsys.readouterr().out
    for words in ("record level, add-remove, untrusted-server", "one record moves the counts by at most 1.323", "AUC"):
        assert words in out
    statement = (tmp_path / "e" / "public" / "statement.md").read_text()
    assert "A model was tested on the data of 3 clients (1,200 records)" in statement
    assert "trained with the method" not in statement


def test_a_useless_model_is_told_loudly(place, tmp_path, capsys):
    """Labels that do not depend on the features: no model is better than a constant on them."""
    lines = (place / "test.csv").read_text().split()
    rng = np.random.default_rng(3)
    for k, line in enumerate(lines[1:], 1):
        age, dose, _, site = line.split(",")
        lines[k] = f"{age},{dose},{'yes' if rng.random() < 0.3 else 'no'},{site}"
    (tmp_path / "random.csv").write_text("\n".join(lines) + "\n")
    assert evaluate(place, tmp_path / "good", epsilon="8") == 0
    assert "WARNING" not in capsys.readouterr().out
    assert evaluate(place, tmp_path / "bad", data=tmp_path / "random.csv", epsilon="8") == 0
    assert "WARNING: the model is no better than a constant guess: " in capsys.readouterr().out
    for name, expected in (("good", "better"), ("bad", "no better")):
        found = json.loads((tmp_path / name / "public" / "evaluation.json").read_text())
        assert found["constant_guess"] == expected
        assert verify_run(tmp_path / name / "public").problems == []
    with pytest.warns(UserWarning, match="no better than a constant guess"):
        private_evaluation.evaluate_privately(place / "run", tmp_path / "random.csv", tmp_path / "x", epsilon=8.0)


def test_the_folder_of_a_run_takes_several_evaluations(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    for k in (1, 2):
        words = ["evaluate", str(tmp_path / "run"), "--data", str(place / "test.csv"), "--epsilon", "1"]
        assert main(words) == 0
        assert verify_run(tmp_path / "run" / f"evaluation-{k}").gaps == [], "the model lies in the run's folder"
    assert verify_run(tmp_path / "run").problems == []


def test_evaluations_of_one_file_add_up_in_a_ledger(place, tmp_path, capsys):
    book = ["--ledger", str(tmp_path / "tests.db"), "--limit", "1.2"]
    assert evaluate(place, tmp_path / "a", *book) == 0
    assert "over 1 uses of this file" in capsys.readouterr().out
    assert evaluate(place, tmp_path / "b", *book) == 2
    assert "Nothing was charged" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert evaluate(place, tmp_path / "c", *book, data="site.csv") == 0, "other records have an account of their own"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["accuracy"].update(estimate=0.99), "do not follow from the noised counts"),
        (lambda d: d["tally"].__setitem__(0, 0.5), "do not follow from the noised counts"),
        (lambda d: d["tally"].pop(), "no plan follows"),
    ],
)
def test_changed_figures_are_found(place, tmp_path, change, complaint):
    assert evaluate(place, tmp_path / "e") == 0
    path = tmp_path / "e" / "public" / "evaluation.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    problems = verify_run(tmp_path / "e").problems
    assert any(complaint in problem for problem in problems)
    assert any("evaluation.json is not the one" in problem for problem in problems)


def test_a_certificate_with_less_noise_than_its_spec_is_found(place, tmp_path):
    assert evaluate(place, tmp_path / "e") == 0
    spec = tmp_path / "e" / "public" / "spec.toml"
    spec.write_text(spec.read_text().replace("epsilon = 1.0", "epsilon = 0.5"))
    assert any("the plan of spec.toml gives" in problem for problem in verify_run(tmp_path / "e").problems)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--epsilon", "inf"], "an evaluation needs noise"),
        (["--epsilon", "-1"], "epsilon: -1.0 must lie in"),
        (["--delta", "0.5"], "delta: 0.5 must lie in"),
        (["--bins", "2"], "bins: 2 must lie between"),
        (["--threshold", "1"], "threshold: 1.0 must lie between"),
        (["--confidence", "95"], "confidence: 95.0 must lie between"),
        (["--trust", "nobody"], "trust: 'nobody' is unknown"),
        (["--adjacency", "near"], "adjacency: 'near' is unknown"),
        (["--label", "died"], "schema names them"),
        (["--limit", "2"], "--limit: it is the limit of a ledger"),
        (["--data", "no.csv"], "there is no file 'no.csv'"),
    ],
)
def test_wrong_inputs_get_one_line(place, tmp_path, capsys, words, complaint):
    assert evaluate(place, tmp_path / "e", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not (tmp_path / "e").exists()


def test_a_folder_with_files_is_refused(place, tmp_path, capsys):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "mine.txt").write_text("x")
    assert evaluate(place, tmp_path / "e") == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_label_that_the_model_does_not_know_is_refused(place, tmp_path, capsys):
    text = (place / "test.csv").read_text().replace(",yes", ",perhaps", 1)
    (tmp_path / "t.csv").write_text(text)
    assert evaluate(place, tmp_path / "e", "--data", str(tmp_path / "t.csv")) == 2
    assert "none of the levels" in capsys.readouterr().err


def test_units_that_are_not_proved_are_refused():
    settings = Settings(Task.TWO_CLASSES, 32, 0.5, Privacy(1.0, 1e-6, unit="client"))
    with pytest.raises(SordinoError, match="protects records or persons"):
        plan_of(settings, (100, 100))


def persons_table(path, seed, persons=900):
    """One to five records per patient; patients with more records are sicker."""
    rng = np.random.default_rng(seed)
    patient = np.repeat(np.arange(persons), rng.integers(1, 6, persons))
    often = np.bincount(patient)[patient]
    age, dose = rng.uniform(20, 90, len(patient)), rng.uniform(0, 10, len(patient))
    died = rng.random(len(patient)) < expit((age - 60) / 8 + (often - 4) / 1.5)
    rows = [
        f"{a:.2f},{d:.2f},{'yes' if y else 'no'},h{p % 3},p{p}"
        for a, d, y, p in zip(age, dose, died, patient, strict=True)
    ]
    path.write_text("\n".join(["age,dose,died,hospital,patient", *rows]) + "\n")
    return patient, died


@pytest.fixture(scope="module")
def persons(tmp_path_factory):
    """A run that protects persons, and test records of other persons."""
    place = tmp_path_factory.mktemp("persons")
    (place / "schema.toml").write_text('person = "patient"\n' + SCHEMA)
    persons_table(place / "train.csv", 0)
    words = ["--data", str(place / "train.csv"), "--schema", str(place / "schema.toml"), "--rounds", "5"]
    assert main(["run", *words, "--epsilon", "4", "--method", "dp-fedadam", "--out", str(place / "run")]) == 0
    return place, persons_table(place / "test.csv", 1)


@pytest.mark.parametrize("choice", ["first", "random"])
def test_persons_are_protected_where_the_schema_names_them(persons, tmp_path, capsys, choice):
    place, _ = persons
    assert evaluate(place, tmp_path / "e", "--person-records", "3", "--person-choice", choice) == 0
    out = capsys.readouterr().out
    for words in ("900 persons, whose records share one count", "one person moves the counts by at most 1.732"):
        assert words in out
    cert = json.loads((tmp_path / "e" / "public" / "certificate.json").read_text())
    assert (cert["unit"], cert["records"], cert["certified"]) == ("person", 900, True)
    assert cert["person"] == {"records": 3, "clients": 1, "choice": choice}
    verdict = verify_run(tmp_path / "e")
    assert verdict.problems == []
    assert public.unlisted_of_evaluation(tmp_path / "e" / "public") == []
    assert "share one count" in (tmp_path / "e" / "public" / "statement.md").read_text()


def test_the_figures_are_those_of_a_person_drawn_at_random(persons, tmp_path):
    place, (patient, died) = persons
    found = private_evaluation.evaluate_privately(
        place / "run", place / "test.csv", tmp_path / "e", epsilon=50.0, seed=1, person_records=5
    )
    by_person = np.bincount(patient, died) / np.bincount(patient)
    assert found["observed"]["estimate"] == pytest.approx(by_person.mean(), abs=0.01)
    assert abs(by_person.mean() - died.mean()) > 0.03, "those with many records do not weigh more"


def test_a_person_at_two_clients_must_be_declared_in_an_evaluation(persons, tmp_path):
    place, _ = persons
    text = (place / "test.csv").read_text()
    (tmp_path / "t.csv").write_text(text + "50,5,yes,h1,p0\n")
    with pytest.raises(SordinoError, match="more than 1 client, one at"):
        private_evaluation.prepare(place / "run", tmp_path / "t.csv", epsilon=1.0)
    two = private_evaluation.prepare(place / "run", tmp_path / "t.csv", epsilon=1.0, person_clients=2)
    one = private_evaluation.prepare(place / "run", tmp_path / "t.csv", epsilon=1.0, person_ids="per-client")
    noises = [calibration.aggregate_std(prepared.plan, 0) for prepared in (one, two)]
    assert noises[1] == pytest.approx(2**0.5 * noises[0]), "two releases see the person"
    assert (one.units, two.units) == ("patient per-client hospital", "patient global"), "other persons to a ledger"
    said = "equal numbers at two clients are two persons"
    assert [any(said in fact for fact in prepared.assumptions) for prepared in (one, two)] == [True, False]


def test_an_id_that_another_client_has_too_moves_no_rows_of_others(persons, tmp_path):
    """The place of a record rounds its score, and the last bit of a score may be another bin."""
    place, _ = persons

    def rows(last):
        people = [("h0", "a"), ("h0", "b"), ("h1", "c"), ("h1", last)]
        lines = [f"{30 + k},5,yes,{hospital},{who}" for k, (hospital, who) in enumerate(people)]
        (tmp_path / "t.csv").write_text("\n".join(["age,dose,died,hospital,patient", *lines]) + "\n")
        prepared = private_evaluation.prepare(place / "run", tmp_path / "t.csv", epsilon=1.0, person_ids="per-client")
        return prepared.records.x.tolist()

    assert rows("a") == rows("d")


def test_a_certificate_without_an_assumption_of_an_evaluation_is_found(persons, tmp_path):
    place, _ = persons
    assert evaluate(place, tmp_path / "e", "--person-ids", "per-client") == 0
    assert public.unlisted_of_evaluation(tmp_path / "e" / "public") == []
    path = tmp_path / "e" / "public" / "certificate.json"
    whole = json.loads(path.read_text())
    for words in whole["assumes"]:
        cert, text = issue({**whole, "assumes": [each for each in whole["assumes"] if each != words]})
        path.write_text(json.dumps(cert))
        (path.parent / "statement.md").write_bytes(text.encode())
        start = "Tuning: " if words.startswith("Tuning") else words
        problems = verify_run(tmp_path / "e").problems
        assert any("is missing: " + start in problem for problem in problems), words


def test_a_model_of_numbers_without_a_range_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    np.savez(tmp_path / "d.npz", x=x, y=x[:, 0] + 0.01 * rng.normal(size=200))
    words = ["--data", str(tmp_path / "d.npz"), "--method", "dp-fedgd", "--rounds", "2", "--clients", "2"]
    assert main(["run", *words, "--out", str(tmp_path / "r")]) == 0
    with pytest.raises(SordinoError, match="without a public range"):
        private_evaluation.prepare(tmp_path / "r", tmp_path / "d.npz", epsilon=1.0)


OTHER_TARGETS = {
    "counts": '[target]\ncolumn = "visits"\ntask = "count"\nmaximum = 30\n',
    "survival": '[target]\ncolumn = "days"\ntask = "survival"\nevent = "died"\nintervals = [0, 100, 200, 300]\n',
}


@pytest.mark.parametrize("name", list(OTHER_TARGETS))
def test_counts_and_survival_are_evaluated(tmp_path, capsys, name):
    rng = np.random.default_rng(0)
    columns = '[columns.age]\ntype = "number"\nrange = [20, 90]\n'
    (tmp_path / "schema.toml").write_text(OTHER_TARGETS[name] + columns)
    for file, n in (("train.csv", 1500), ("test.csv", 3000)):
        age = rng.uniform(20, 90, n)
        if name == "counts":
            rows = [f"{a:.1f},{min(c, 30)}" for a, c in zip(age, rng.poisson(np.exp((age - 40) / 30)), strict=True)]
            (tmp_path / file).write_text("\n".join(["age,visits", *rows]) + "\n")
        else:
            days = rng.exponential(300 * np.exp(-(age - 55) / 20))
            last = rng.uniform(50, 500, n)
            seen = np.minimum(days, last)
            rows = [f"{a:.1f},{d:.1f},{int(e)}" for a, d, e in zip(age, seen, days < last, strict=True)]
            (tmp_path / file).write_text("\n".join(["age,days,died", *rows]) + "\n")
    words = ["--data", str(tmp_path / "train.csv"), "--schema", str(tmp_path / "schema.toml"), "--rounds", "12"]
    assert main(["run", *words, "--clients", "3", "--epsilon", "8", "--out", str(tmp_path / "run")]) == 0
    assert evaluate(tmp_path, tmp_path / "e", "--trust", "secure-aggregation", epsilon="8") == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "e" / "public" / "evaluation.json").read_text())
    assert verify_run(tmp_path / "e").problems == []
    assert public.unlisted_of_evaluation(tmp_path / "e" / "public") == []
    run = load_run(tmp_path / "run")
    lines = [line.split(",") for line in (tmp_path / "test.csv").read_text().split()[1:]]
    frame = {"age": [float(line[0]) for line in lines]}
    if name == "counts":
        y, rate = np.array([float(line[1]) for line in lines]), run.predict(frame)
        assert found["mae"]["low"] <= np.abs(y - rate).mean() <= found["mae"]["high"]
        assert found["observed"]["estimate"] == pytest.approx(y.mean(), abs=0.3)
        assert found["mean_predicted"]["estimate"] == pytest.approx(rate.mean(), abs=0.3)
        assert found["deviance"]["low"] <= metrics.deviance(y, rate) <= found["deviance"]["high"]
    else:
        y = np.array([float(line[1]) * (1 if line[2] == "1" else -1) for line in lines])
        interval = np.minimum(np.abs(y) // 100, 3)
        happened = (y > 0) & (interval < 3)
        grouped = np.where(
            happened, interval + 0.5, -interval - 0.25
        )  # who is last seen in an interval leaves it early
        true = survival.concordance(grouped, run.predict(frame))
        assert found["concordance"]["estimate"] == pytest.approx(true, abs=0.03)
        true = survival.brier(y, run.predict_survival(frame), run.edges)
        assert found["brier"]["estimate"] == pytest.approx(true, abs=0.02)
        dead = 1 - survival.constant_survival(y, [300.0])[0]
        assert found["observed"]["estimate"] == pytest.approx(dead, abs=0.04)


def test_a_survival_evaluation_needs_intervals():
    with pytest.raises(SordinoError, match="intervals: 0 must lie between"):
        plan_of(Settings(Task.SURVIVAL, 8, 0.5, Privacy(1.0, 1e-6)), (100, 100))


def test_a_model_without_a_schema_is_tested_by_column_names(tmp_path):
    table(tmp_path / "train.csv", 300, 0)
    words = ["--data", str(tmp_path / "train.csv"), "--label", "died", "--partition", "by-column:hospital"]
    assert main(["run", *words, "--method", "dp-fedgd", "--rounds", "2", "--out", str(tmp_path / "r")]) == 0
    lines = [line.split(",") for line in table(tmp_path / "test.csv", 200, 1).read_text().split()]
    swapped = "\n".join(",".join([dose, age, died, site]) for age, dose, died, site in lines) + "\n"
    (tmp_path / "swapped.csv").write_text(swapped)
    found = [
        private_evaluation.prepare(tmp_path / "r", tmp_path / name, epsilon=1.0, label="died", client="hospital")
        for name in ("test.csv", "swapped.csv")
    ]
    assert found[0].plan.clients == 3
    assert (found[0].records.x == found[1].records.x).all()


def test_bins_follow_from_public_numbers():
    privacy = Privacy(1.0, 1e-6, trust="secure-aggregation")
    assert [choose_bins(Task.TWO_CLASSES, (n,) * 4, privacy) for n in (50, 2_000, 50_000)] == [16, 32, 64]


def test_the_plan_costs_exactly_what_was_asked_for():
    for trust in Trust:
        settings = Settings(Task.TWO_CLASSES, 32, 0.5, Privacy(0.7, 1e-6, trust=trust))
        assert spending.epsilon(plan_of(settings, (50, 500))) == pytest.approx(0.7)


def test_an_overspent_ledger_is_refused_before_anything_is_read(place, tmp_path):
    prepared = private_evaluation.prepare(place / "run", place / "test.csv", epsilon=2.0)
    with pytest.raises(OverspentError):
        private_evaluation.join_ledger(prepared, tmp_path / "l.db", 1.0)
    assert Path(prepared.data).is_file()


def test_the_table_that_the_run_was_trained_on_is_no_test(place, tmp_path, capsys):
    assert evaluate(place, tmp_path / "same", data="train.csv") == 0
    assert "the run was trained on" in capsys.readouterr().err
    shutil.copy(place / "train.csv", tmp_path / "renamed.csv")
    assert evaluate(place, tmp_path / "renamed", data=tmp_path / "renamed.csv") == 0
    assert "the run was trained on" in capsys.readouterr().err
    assert evaluate(place, tmp_path / "other") == 0
    assert "the run was trained on" not in capsys.readouterr().err


def test_defaults_that_differ_from_the_run_are_told(place, tmp_path, capsys):
    assert evaluate(place, tmp_path / "a") == 0
    told = capsys.readouterr().err
    assert "note: δ is 1e-06 (the default), and that of the run is 1e-05; --delta sets it." in told
    assert "--trust" not in told, "the run and the evaluation assume untrusted-server"
    shutil.copytree(place / "run", tmp_path / "run")
    spec = tmp_path / "run" / "public" / "spec.toml"
    spec.write_text(spec.read_text().replace('trust = "untrusted-server"', 'trust = "secure-aggregation"'))
    assert evaluate(tmp_path, tmp_path / "b", "--delta", "1e-6", data=place / "test.csv") == 0
    told = capsys.readouterr().err
    assert "the run assumed secure-aggregation, this evaluation assumes untrusted-server (the default)" in told
    assert "δ" not in told
    given = ["--delta", "1e-6", "--trust", "secure-aggregation"]
    assert evaluate(tmp_path, tmp_path / "c", *given, data=place / "test.csv") == 0
    assert "note:" not in capsys.readouterr().err
