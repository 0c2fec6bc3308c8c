"""The row of a party that holds all records: the same budget and records, tuned alike, and never certified."""

import json

import numpy as np
import pytest

from sordino.cli import main
from sordino.data.preprocess import RADIUS
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.studies import compare, one_party, report

BASE = {"data": "digits", "clients": 4, "rounds": 2, "trust": "secure-aggregation"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("one-party") / "out"
    words = "compare --clients 4 --rounds 2 --trust secure-aggregation --methods dp-fedgd --epsilons 8,inf --seeds 2"
    assert main([*words.split(), "--tune", "--preset", "steps", "--one-party", "--out", str(out)]) == 0
    return json.loads((out / "compare.json").read_text())


def rows(document):
    return [run for run in document["runs"] if run["label"] == one_party.LABEL]


def test_it_has_a_row_at_every_finite_budget_and_is_not_certified(made):
    assert [(run["epsilon"], run["seed"]) for run in rows(made)] == [(8.0, 1), (8.0, 2)]
    for run in rows(made):
        assert not run["certificate"]["certified"]
        assert run["certificate"]["reasons"] == [one_party.WHY]
        assert run["client_epsilon"] == [8.0] * 4
        assert (run["bytes_up"], run["bytes_down"]) == (None, None)
        assert len(run["accuracy"]) == 1
        assert run["accuracy"][0] > 0.8
    assert made["rounds"] == [1, 2]


def test_its_share_is_chosen_on_validation_records(made):
    (setting,) = [each for each in made["tuning"]["settings"] if each["method"] == one_party.LABEL]
    assert setting["options"]["share"] in one_party.SHARES
    assert setting["tried"] == len(one_party.SHARES)
    assert {run["options"]["share"] for run in rows(made)} == {setting["options"]["share"]}


def test_the_report_names_it_and_why_it_is_not_certified(made, tmp_path):
    report.write(made, tmp_path)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert one_party.LABEL in text
        assert "must be trusted with them" in text


def test_less_noise_is_better_and_the_seed_decides():
    low, high = (compare.one_party_lineup(BASE, [epsilon], [1])[0].values for epsilon in (0.5, 8.0))
    first, again, little = (one_party.train(values, 0.03) for values in (high, high, low))
    assert (first.theta == again.theta).all()
    assert first.accuracy[1] > little.accuracy[1] + 0.2
    assert first.accuracy[1] != one_party.train({**high, "seed": 2}, 0.03).accuracy[1]


def test_records_are_shortened_to_the_radius_of_the_bound():
    x = np.float32([[3, 4], [30, 40], [0, 0]])
    assert np.linalg.norm(one_party.within(x), axis=1) == pytest.approx([5, RADIUS, 0], rel=1e-4)


@pytest.mark.parametrize(
    ("base", "epsilon", "words"),
    [
        ({**BASE, "unit": "client"}, 1.0, "protects single records"),
        ({**BASE, "model": "mlp"}, 1.0, "softmax regression"),
        ({**BASE, "participation": "poisson:0.5"}, 1.0, "leave out participation"),
        (BASE, float("inf"), "name a finite epsilon"),
    ],
)
def test_what_has_no_such_row_is_refused(base, epsilon, words):
    with pytest.raises(SordinoError, match=words):
        compare.one_party_lineup(base, [epsilon], [1])


def test_labels_that_are_numbers_are_refused():
    values = compare.one_party_lineup(BASE, [1.0], [1])[0].values
    with pytest.raises(SordinoError, match="is for classes"):
        one_party.train(values, 0.03, load("digits")._replace(classes=()))
