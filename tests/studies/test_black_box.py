"""Attacks on the models of a finished run: they stay below its certificate, and find out where there is less noise."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from sordino.cli import main
from sordino.cli.audit import _effort, about
from sordino.core import Unit
from sordino.data.sources import Dataset
from sordino.errors import SordinoError
from sordino.privacy import calibration, spending
from sordino.studies import black_box
from sordino.studies.black_box import attack, choose_canary
from sordino.studies.black_box_picture import draw, most_true_positives
from sordino.training.run import prepare
from sordino.training.spec import Spec

RECORDS, FEATURES = 60, 4


def dataset(rng, *, persons=False, numbers=False):
    x = rng.normal(size=(RECORDS, FEATURES)).astype("float32")
    y = x.sum(1) > 0 if not numbers else x.sum(1)
    person = np.repeat(np.arange(RECORDS // 2), 2) if persons else None
    labels = y.astype("float32") if numbers else y.astype("int64")
    classes = () if numbers else ("no", "yes")
    return Dataset("toy", x, labels, x[:10], labels[:10], None, classes, person=person)


def prepared(data=None, **settings):
    rng = np.random.default_rng(0)
    keys = {"method": "dp-fedgd", "rounds": 2, "clients": 2, "epsilon": 4.0, "partition": "iid", "normalize": "none"}
    keys |= {"trust": "secure-aggregation", "seed": 1, "model": "softmax", **settings}
    return prepare(Spec.of(keys), dataset(rng) if data is None else data)


@pytest.fixture(autouse=True)
def _small_pilot(monkeypatch):
    monkeypatch.setattr(black_box, "PILOT_RUNS", 32)


def test_the_attackers_stay_below_the_certificate_and_find_too_little_noise():
    honest = attack(prepared(), runs=100, seed=1)
    assert not honest.broken
    assert [each.sees for each in honest.attackers] == ["final model", "every model"]
    assert honest.certified == pytest.approx(4.0, rel=1e-6)
    assert 0.5 < honest.guess < 0.75
    weak = attack(prepared(), runs=100, seed=1, noise_factor=0.1)
    assert weak.broken
    assert weak.tries == 3
    assert all(each.auc > 0.9 for each in weak.attackers)


@pytest.mark.soak  # long statistics
def test_who_sees_every_model_of_gradient_descent_has_the_best_score():
    """One round under sums: the model is one Gaussian vector, and the AUC follows from the canary's mu."""
    run = prepared(rounds=1)
    zero, one = choose_canary(run).finals
    lr = run.resolved.options["lr"]
    mu = float((one.double() - zero.double()).norm()) / (lr * calibration.aggregate_std(run.plan, 0))
    assert 0.3 * spending.mu(run.plan) < mu <= spending.mu(run.plan) * (1 + 1e-6)
    runs = 200
    found = attack(run, runs=runs, seed=2).attackers[1].auc
    expected = float(ndtr(mu / math.sqrt(2)))
    error = math.sqrt(expected * (1 - expected) / runs)  # an upper bound
    assert found == pytest.approx(expected, abs=4 * error)
    halved = attack(run, runs=runs, seed=2, noise_factor=0.4).attackers[1].auc
    assert halved > expected + 4 * error, "less noise would pass: the test cannot fail"


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_neighbours_differ_in_the_canary_alone(adjacency):
    run = prepared(adjacency=adjacency)
    canary = choose_canary(run)
    zero, one = canary.neighbours
    others = np.setdiff1d(np.arange(RECORDS), canary.rows)
    assert len(canary.rows) == 1
    assert torch.equal(zero.x[others], one.x[others])
    assert torch.equal(zero.y[others], one.y[others])
    assert float(run.records.length[canary.rows[0]]) == float(run.records.length[: run.plan.sizes[0]].max())
    assert one.y[canary.rows] != run.records.y[canary.rows]
    if adjacency == "add-remove":
        assert zero.weight is not None
        assert float(zero.weight[canary.rows]) == 0
        assert float(zero.weight.sum()) == RECORDS - 1


def test_persons_clients_and_numbers_have_canaries():
    rng = np.random.default_rng(3)
    run = prepared(dataset(rng, persons=True), unit="person", person="id", person_records=2, adjacency="add-remove")
    canary = choose_canary(run)
    assert len(canary.rows) == 2
    assert not canary.neighbours[0].filled[canary.rows].any()
    whole = choose_canary(prepared(unit="client"))
    assert len(whole.rows) == prepared(unit="client").plan.sizes[0]
    numbers = prepared(dataset(rng, numbers=True), model="squares")
    row = choose_canary(numbers).rows[0]
    assert choose_canary(numbers).neighbours[1].y[row] in (numbers.records.y.min(), numbers.records.y.max())


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "auto", "rounds": 6},
        {"method": "dp-fedadam", "batch": "poisson:8"},
        {"method": "dp-ftrl"},
        {"unit": Unit.CLIENT, "trust": "untrusted-server"},
    ],
)
def test_other_plans_are_attacked(settings):
    found = attack(
        prepared(**{key: str(value) if key == "unit" else value for key, value in settings.items()}), runs=20
    )
    assert not found.broken
    assert (found.mu is None) == ("batch" in settings)
    assert all((each.lower_gaussian is None) == ("batch" in settings) for each in found.attackers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": "inf"}, "epsilon: inf promises nothing"),
        ({"integers": True, "clients": 4}, "integers: runs that add up integers"),
    ],
)
def test_what_cannot_be_repeated_is_refused(settings, message):
    with pytest.raises(SordinoError, match=message):
        attack(prepared(**settings), runs=20)


def test_the_picture_shows_the_limit(tmp_path):
    found = attack(prepared(), runs=20, seed=1)
    assert draw(found, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_mode & 0o777 == 0o600
    rates = np.array([0.0, 0.1, 0.5, 1.0])
    for limit in (most_true_positives(found, rates), most_true_positives(found._replace(mu=None), rates)):
        assert (limit >= rates).all()
        assert limit[-1] == 1
    assert most_true_positives(found._replace(mu=None), rates)[0] == pytest.approx(found.delta)


def test_repetitions_are_as_many_as_the_time_allows():
    quick, slow, hopeless = black_box.Pace(0.01), black_box.Pace(1.0), black_box.Pace(1000.0)
    assert quick.runs() == black_box.RUNS
    assert black_box.LEAST_RUNS < slow.runs() < black_box.RUNS
    assert slow.seconds(slow.runs()) <= black_box.SECONDS < slow.seconds(slow.runs() + 10)
    assert hopeless.runs() == black_box.LEAST_RUNS
    assert black_box.steps(50) == 2 * (50 + 25)
    assert black_box.pilot_runs(10) == black_box.LEAST_PILOT_RUNS
    assert black_box.measure(prepared(rounds=6)).seconds_per_run > 0
    assert black_box.measure(prepared(rounds=1)).seconds_per_run > 0


def test_ticks_count_every_repetition():
    ticks = []
    attack(prepared(), runs=70, seed=1, tick=ticks.append)
    assert sum(ticks) == black_box.steps(70)


def test_the_effort_is_said_before_it_is_made(capsys):
    slow = black_box.Pace(4.0)
    line = _effort(slow, 50, 70, asked=False)
    assert line.startswith("repeats the run 150 times, 70 rounds each: 50 per data set for the bounds, 25 for")
    told = "That is more than five minutes, because fewer than 50 per data set give hardly a bound"
    assert f"takes about 10 minutes. {told}. More are sharper: --runs 500 takes about 71 minutes" in line
    assert "five minutes" not in _effort(slow, 50, 70, asked=True)
    fits = black_box.Pace(1.0)
    assert "five minutes" not in _effort(fits, fits.runs(), 70, asked=False)
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    assert "as many as five minutes allow, but 50 at least, however long" in " ".join(capsys.readouterr().out.split())
    assert "--runs" not in _effort(slow, 80, 70, asked=True)
    assert [about(seconds) for seconds in (5, 90, 7200)] == ["less than a minute", "about 2 minutes", "about 2 hours"]


def test_the_command_audits_a_folder(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--method", "dp-fedgd", "--rounds", "1", "--clients", "2", "--epsilon", "2", "--out", str(out)]
    assert main(["run", *words]) == 0
    before = {path: path.read_bytes() for path in (out / "public").iterdir()}
    assert main(["audit", str(out), "--runs", "20", "--seed", "1", "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr()
    assert "repeats the run 72 times, 1 round each: 20 per data set for the bounds, 16" in shown.err
    printed = " ".join(shown.out.split())
    assert "as confidential as the records" in printed
    assert "two attacks on one canary" in printed
    assert {path: path.read_bytes() for path in (out / "public").iterdir()} == before, "nothing of it is published"
    document = json.loads((out / "private" / "audit.json").read_text())
    assert document == json.loads((tmp_path / "found.json").read_text())
    assert [each["sees"] for each in document["attackers"]] == ["final model", "every model"]
    assert (out / "private" / "audit.png").is_file()
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    for wrong, message in (
        (["audit", str(out), "--unit", "client"], "--unit: a finished run is audited with its own settings"),
        (["audit", str(out), "dp-fedgd"], "name one folder"),
        (["audit", str(tmp_path)], "holds no certificate.json"),
        (["audit", str(out), "--runs", "3"], "runs: 3 are too few"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
