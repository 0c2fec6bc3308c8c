"""Advice: what it recommends follows from the closed forms, and it warns where they stop."""

import json
import math

import pytest

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.studies import estimation, theory
from sordino.studies.advise import advise, best


def call(capsys, *words):
    status = main(["advise", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_safe_regime_is_the_inequality():
    at = estimation.setup("logistic")
    world = theory.population(at.model, 1.0)
    case = theory.Scenario((400,) * 20, 1.0, world, 3.0, 2.25, 3.0)
    smallest = float(world.curvature.min())
    assert theory.needed_records(case) == pytest.approx(8 * math.sqrt(5) * math.sqrt(2) * 2.25 / smallest)
    for mu, n in [(1.0, 405), (1.0, 415), (3.0, 130), (3.0, 140)]:
        here = theory.Scenario((5000, n), mu, world, 3.0, 2.25, 3.0)
        assert theory.safe(here) == (n >= theory.needed_records(case) / mu)


def test_fednewton_is_not_advised_where_it_is_unsafe():
    unsafe = advise((100,) * 200, 5, mu=3.0)
    assert not unsafe["fednewton_safe"]
    assert unsafe["recommended"] != "fednewton"
    assert any("unsafe" in line for line in unsafe["why"])
    poisson = advise((400,) * 20, 5, mu=1.0, model="poisson")
    assert not poisson["fednewton_safe"]
    safe = advise((2000,) * 20, 5, mu=1.0)
    assert safe["fednewton_safe"]
    assert not any("unsafe" in line for line in safe["why"])


def test_the_numbers_are_those_of_the_closed_forms():
    found = advise((900,) * 30, 5, mu=0.7)
    at = estimation.setup("logistic")
    case = theory.Scenario((900,) * 30, 0.7, theory.population(at.model, 1.0), at.clip, at.curvature_clip, at.lr)
    for name, entry in found["methods"].items():
        option = best(case, name)
        assert (entry["error"], entry["rounds"]) == (option.error, option.rounds)
        assert option.error >= option.terms.total
    assert found["methods"]["fedsgd"]["error"] <= theory.fedsgd(case, 100).total
    least = min(entry["error"] for entry in found["methods"].values())
    assert found["expected_error"] <= 1.1 * least
    assert found["expected_error"] > found["information_bound"]


def test_more_of_everything_is_better():
    base = advise((500,) * 20, 5, mu=1.0)["expected_error"]
    assert advise((500,) * 40, 5, mu=1.0)["expected_error"] < base
    assert advise((1000,) * 20, 5, mu=1.0)["expected_error"] < base
    assert advise((500,) * 20, 5, mu=2.0)["expected_error"] < base
    assert advise((500,) * 20, 10, mu=1.0)["expected_error"] > base


def test_advice_is_near_what_is_measured():
    """The recommended numbers of steps, simulated: the error expected is the error seen."""
    found = advise((400,) * 20, 5, mu=3.0)
    name, steps = "fedsgd", found["methods"]["fedsgd"]["rounds"]
    cell = estimation.DesignPoint("logistic", "equal", 20, 3.0, iterations=steps)
    errors = estimation.simulate_cell(cell, 40, methods=[name])[name]
    se = errors.std(ddof=1) / math.sqrt(len(errors))
    assert abs(errors.mean() - found["methods"][name]["error"]) < 4 * se + 0.15 * errors.mean()


def test_nothing_to_learn_is_said(capsys):
    assert not advise((20,) * 3, 50, mu=0.1)["learnt"]
    status, out, _ = call(capsys, "--clients", "3", "--records", "20", "--dim", "50", "--mu", "0.1")
    assert status == 0
    assert "none of them learns" in out


def test_words_and_json(capsys):
    words = ("--clients", "20", "--records", "2000", "--dim", "5", "--epsilon", "4")
    status, out, err = call(capsys, *words)
    said = out
    assert (status, err) == (0, "")
    assert "FedNewton is safe here" in out
    assert "a rate, not a certificate" in out
    _, out, _ = call(capsys, *words, "--json")
    found = json.loads(out)
    assert found["recommended"] in estimation.LABELS
    assert f"use {estimation.LABELS[found['recommended']]}" in said
    assert found["epsilon"] == pytest.approx(4)
    assert found["clients"] == 20
    _, out, _ = call(capsys, "--records", "900,450,1200", "--dim", "8", "--mu", "2", "--model", "poisson", "--json")
    found = json.loads(out)
    assert (found["clients"], found["records"], found["smallest"]) == (3, 2550, 450)
    _, out, _ = call(capsys, "--records", "100", "--dim", "1", "--mu", "1", "--json")
    assert json.loads(out)["clients"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--records", "x", "--dim", "5", "--mu", "1"], "--records"),
        (["--records", "0", "--dim", "5", "--mu", "1"], "--records"),
        (["--records", "5,6", "--clients", "3", "--dim", "5", "--mu", "1"], "--clients"),
        (["--records", "5", "--clients", "0", "--dim", "5", "--mu", "1"], "--clients"),
        (["--records", "5", "--dim", "0", "--mu", "1"], "dim"),
        (["--records", "5", "--dim", "5", "--mu", "0"], "mu"),
        (["--records", "5", "--dim", "5", "--mu", "nan"], "mu"),
        (["--records", "5", "--dim", "5", "--epsilon", "-1"], "epsilon"),
        (["--records", "5", "--dim", "5", "--epsilon", "1", "--delta", "2"], "delta"),
        (["--records", "5", "--dim", "5", "--mu", "1", "--model", "probit"], "model"),
    ],
)
def test_mistakes_get_one_line(capsys, words, says):
    status, out, err = call(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_one_budget_is_asked_for():
    with pytest.raises(SordinoError, match="either"):
        advise((100,), 5)
    with pytest.raises(SordinoError, match="either"):
        advise((100,), 5, mu=1.0, epsilon=1.0)


def test_it_says_why_another_than_the_least_error_is_advised():
    found = advise((400,) * 40, 5, epsilon=4.0)
    least = min(("fedsgd", "fedhybrid", "fedavg-gdp"), key=lambda name: found["methods"][name]["error"])
    assert least != found["recommended"]
    assert any("fewer rounds decide" in line for line in found["why"])
    alone = advise((400,), 5, epsilon=4.0)
    least = min(alone["methods"], key=lambda name: alone["methods"][name]["error"])
    assert (least == alone["recommended"]) == (not any("fewer rounds decide" in line for line in alone["why"]))
