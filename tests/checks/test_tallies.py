"""Tallies under the contracts and under attack: claims hold, and each wrong twin is found."""

import pytest

from sordino.checks import check, check_tally
from sordino.checks.audit.tallies import audit
from sordino.checks.mutants import clips_records_not_persons, counted_twice, weighted_by_a_feature
from sordino.checks.search import sensitivity
from sordino.checks.tallies import tallies
from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.errors import SordinoError
from sordino.methods import build
from tests.support import tiers

QUICK = ["statistics", "evaluation"]


@pytest.mark.parametrize("name", tiers(tallies(), QUICK))
def test_every_tally_passes(name):
    reports = check_tally(name, trials=8 if name in QUICK else 40)
    assert [str(report.unit) for report in reports] == ["record", "record", "person", "person"]
    for report in reports:
        assert report.passed, report.problems
        exact = 0.95 if name.endswith(("counts", "survival")) else 0.98  # numbers that exclude each other; many blocks
        assert report.worst_found > exact * report.claimed, "the bound is nearly reached"


@pytest.mark.parametrize("mutant", [counted_twice, weighted_by_a_feature])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_the_search_rejects_a_tally_that_counts_wrongly(mutant, adjacency):
    checked = tallies()["evaluation"]
    (found,) = sensitivity(*mutant(checked.method, checked.models[0]), adjacency, trials=10)
    assert found.beyond


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_the_search_rejects_a_tally_that_counts_every_record_of_a_person(adjacency):
    checked = tallies()["statistics"]
    wrong = clips_records_not_persons(checked.at(Unit.PERSON), checked.models[0])
    (found,) = sensitivity(*wrong, adjacency, trials=10)
    assert found.beyond
    assert found.worst > 1.9 * found.claimed, "three records count three times"


def test_the_attack_finds_a_tally_that_counts_every_record_of_a_person():
    checked, privacy = tallies()["evaluation"], Privacy(1.0, 1e-5, unit="person")
    honest = audit("evaluation", checked, privacy, runs=500, seed=1)
    assert not honest.broken
    assert honest.reach == pytest.approx(1.0, abs=1e-3)
    _, wrong = clips_records_not_persons(checked.method, checked.models[0])
    assert audit("evaluation", checked._replace(models=(wrong,)), privacy, runs=500, seed=1).broken


def test_a_mutant_of_tallies_does_not_apply_to_gradients():
    assert all(report.passed for report in check("dp-fedgd", trials=10, method=build("dp-fedgd")))


@pytest.mark.parametrize(
    ("trust", "runs", "least"),
    tiers([(Trust.UNTRUSTED_SERVER, 1200, 0.3), *((trust, 3000, 0.5) for trust in Trust)], 1),
)
def test_an_attack_does_not_break_the_promise_and_finds_halved_noise(trust, runs, least):
    name, checked = "evaluation", tallies()["evaluation"]
    privacy = Privacy(1.0, 1e-5, trust=trust)
    honest = audit(name, checked, privacy, runs=runs, seed=1)
    assert not honest.broken
    assert honest.reach == pytest.approx(1.0, abs=1e-3)
    assert honest.lower > least
    halved = audit(name, checked, privacy, runs=runs, seed=1, noise_factor=0.5)
    assert halved.broken


@pytest.mark.soak
def test_secret_noise_and_add_remove_are_attacked_too():
    name = "evaluation of quantities"
    privacy = Privacy(1.0, 1e-5, adjacency="add-remove")
    assert not audit(name, tallies()[name], privacy, runs=200).broken
    assert audit(name, tallies()[name], privacy, runs=1500, noise_factor=0.5).broken


def test_an_unknown_tally_is_refused():
    with pytest.raises(SordinoError, match="is not a tally"):
        check_tally("evaluatoin")
