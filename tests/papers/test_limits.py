"""The figures of "Statistical limits" are made of the points of `sordino estimate`."""

import json

import pytest

from papers import catalog, limits, smoke, tables
from papers.__main__ import main
from sordino.errors import SordinoError
from sordino.studies import estimation


@pytest.fixture
def small(monkeypatch):
    """Few records, which two repetitions and a table of one number of clients can afford."""
    monkeypatch.setattr(estimation, "MEAN", 60)
    monkeypatch.setattr(estimation, "STEPS", (2, 4))
    monkeypatch.setattr(limits, "MUS", (1.0, 3.0))


def test_lines_are_the_points_of_the_library(small, tmp_path, capsys):
    words = ["limits-1", "--clients", "20", "--seeds", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    found = json.loads((tmp_path / "limits-1.json").read_text())
    points = estimation.measure(estimation.cells("equal", ["logistic"], (1.0, 3.0))[::5], 2)
    for point in points:
        assert (point["clients"], point["samples"]) == (20, 2)
        for name, each in point["methods"].items():
            label = estimation.LABELS.get(name, limits.ALL)
            (line,) = [
                line
                for line in found["lines"]
                if line["labels"] == {"sizes": "equal", "mu": point["mu"], "method": label, "clients": 20}
            ]
            cell = line["rounds"][limits.END]
            assert cell["ours"] == pytest.approx(each["error"], abs=1e-4)
            assert cell["std"] == pytest.approx(each["se"] * 2**0.5, rel=1e-3)
            assert cell["published"] is None, "the paper prints no values"
    assert len(found["lines"]) == 2 * 5
    assert len(found["estimated"]["points"]) == 2


@pytest.mark.draws
def test_the_picture_is_that_of_the_estimate(small, tmp_path, capsys):
    assert main(["limits-4", "--seeds", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "limits-4.json").read_text())
    assert {line["labels"]["gradients"] for line in found["lines"]} == {2, 4}
    svg = (tmp_path / "limits-4.svg").read_text()
    for words in ("information bound", "gradients per client", "sizes equal, μ = 3"):
        assert words in svg


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "1"), "--seeds: 1 must be at least 2 for limits-1"),
        (("--epsilons", "1"), "--epsilons: limits-1 has budgets mu = 0.5, 1, 3; leave it out"),
        (("--clients", "7"), "clients: 7, but the table has 20, 30, 40, 50, 60"),
    ],
)
def test_what_a_figure_does_not_have_is_refused(words, message, capsys):
    assert main(["limits-1", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_cnn_has_one_budget(tmp_path):
    table = catalog.tables()["limits-9"]
    with pytest.raises(SordinoError, match="--epsilons: limits-9 has epsilon 8 alone; leave it out"):
        table.make(tables.TableRequest(table, str(tmp_path), epsilons=(1.0,)))


def test_mnist_is_looked_for_and_its_accuracy_is_that_of_the_library(tmp_path):
    table = catalog.tables()["limits-7"]
    assert table.where(tmp_path) is None
    smoke.prepare(table, tmp_path)
    request = tables.TableRequest(table, str(tmp_path), rounds=2)
    found = table.make(request)
    assert [line["labels"]["method"] for line in found.lines] == list(estimation.LABELS.values())
    data = estimation.mnist(tmp_path, binary=True)
    known = estimation.mnist_accuracies(
        data, 0.5, binary=True, clients=limits.FEW_CLIENTS, repetitions=2, iterations=limits.FEW_GRADIENTS
    )
    means = [100 * values.mean() for values in known.values()]
    assert [line["rounds"][limits.END]["ours"] for line in found.lines] == pytest.approx(means, abs=0.01)


def test_the_cnn_has_the_runs_of_its_script_and_steps_of_their_own(tmp_path, monkeypatch):
    """A failed run is told; the others make lines."""
    with limits._benchmarks() as cnn:
        pass
    table = catalog.tables()["limits-9"]
    asked = {}

    def train(jobs, load, words, **how):
        asked.setdefault("jobs", []).append(jobs)
        for number, job in enumerate(jobs):
            if job["label"] == "FedHybrid" and job["part"].startswith("final"):
                yield number, {"error": "ValueError: no"}
            else:
                yield number, {"scores": [{40: job.get("value") or 0.5}], "seconds": 1.0}

    monkeypatch.setattr(cnn, "train", train)
    found = table.make(tables.TableRequest(table, str(tmp_path), seeds=2))
    tuned, final = asked["jobs"]
    assert {job["part"] for job in tuned} == {"tuning 20 1000"}
    assert len(tuned) == sum(len(values) for *_, values in cnn.METHODS.values())
    assert len(final) == 2 * len(cnn.CELLS) * len(cnn.METHODS)
    assert all(job["values"]["lr"] == max(cnn.LRS) for job in final if job["label"] == "FedSGD"), (
        "the best on validation records"
    )
    assert len(found.lines) == len(cnn.CELLS) * (len(cnn.METHODS) - 1)
    assert "not run: FedHybrid: ValueError: no" in found.notes
    (line,) = [
        line for line in found.lines if line["labels"] == {"method": "FedSGD", "clients": 20, "samples of each": 250}
    ]
    assert line["rounds"][limits.END]["ours"] == 50.0
    assert line["settings"] == {"method": "fedsgd", "lr": max(cnn.LRS)}
