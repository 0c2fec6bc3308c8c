"""Cohorts in turn; the other laws are tested with the plans that draw on them."""

import numpy as np
import pytest

from sordino.core import Privacy, SordinoError
from sordino.methods import build
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan


@pytest.mark.parametrize("text", ["full", "fixed:3", "poisson:0.5", "cyclic:4", "cyclic:1"])
def test_what_is_written_is_read(text):
    chosen = Participation.parse(text)
    assert str(chosen) == text
    assert Participation.parse(str(chosen)) == chosen


def test_a_cycle_is_a_kind_and_a_number():
    assert Participation.parse("cyclic:4") == Participation("cyclic", 4.0)
    assert Participation.parse("cyclic:4") != Participation.parse("fixed:4")


@pytest.mark.parametrize(("rounds", "clients", "cohorts"), [(12, 6, 3), (7, 10, 4), (2, 5, 5), (9, 4, 1), (5, 3, 2)])
def test_every_client_comes_every_so_many_rounds(rounds, clients, cohorts):
    schedule = Participation("cyclic", cohorts).schedule(rounds, clients, seed=0)
    assert len(schedule) == rounds
    for i in range(clients):
        came = [t for t, cohort in enumerate(schedule) if i in cohort]
        assert came == list(range(i % cohorts, rounds, cohorts))
    for t, cohort in enumerate(schedule):
        assert (np.diff(cohort) > 0).all()
        assert len(cohort) in (clients // cohorts, -(-clients // cohorts)), "as equal as may be, and never empty"
        assert np.array_equal(cohort, schedule[t % cohorts])
    whole = np.concatenate([Participation("cyclic", cohorts).schedule(cohorts, clients, 0)[t] for t in range(cohorts)])
    assert sorted(whole) == list(range(clients)), "a cycle calls everyone once"


def test_no_chance_is_in_a_cycle():
    cyclic, fixed = Participation.parse("cyclic:3"), Participation.parse("fixed:2")
    one, other = ([cohort.tolist() for cohort in cyclic.schedule(9, 6, seed)] for seed in (0, 1))
    assert one == other == [[0, 3], [1, 4], [2, 5]] * 3
    drawn = [[cohort.tolist() for cohort in fixed.schedule(9, 6, seed)] for seed in (0, 1)]
    assert drawn[0] != drawn[1]


def test_one_cohort_is_everyone():
    for cohort in Participation.parse("cyclic:1").schedule(3, 4, 0):
        assert cohort.tolist() == [0, 1, 2, 3]
    assert Participation.parse("cyclic:1").rate(4) == 1


@pytest.mark.parametrize(("cohorts", "clients"), [(2, 6), (4, 20), (5, 5)])
def test_the_rate_is_one_in_so_many(cohorts, clients):
    chosen = Participation("cyclic", cohorts)
    assert chosen.rate(clients) == pytest.approx(1 / cohorts)
    sizes = [len(cohort) for cohort in chosen.schedule(cohorts, clients, 0)]
    assert np.mean(sizes) == pytest.approx(chosen.rate(clients) * clients)
    assert chosen.rate(clients) != pytest.approx(Participation("fixed", cohorts).rate(clients)) or cohorts**2 == clients


def test_a_plan_pays_for_every_turn():
    """Twelve rounds in three cohorts are four rounds a client; with one more round, some come five times."""
    privacy = Privacy(1.0)
    cyclic = Plan(build("dp-fedgd"), 12, (5,) * 6, privacy, Participation.parse("cyclic:3"))
    four = Plan(build("dp-fedgd"), 4, (5,) * 6, privacy)
    assert [release.times for group in cyclic.groups() for release in group.releases] == [4]
    np.testing.assert_allclose(cyclic.std(0, 0), four.std(0, 0), rtol=1e-12)
    longer = Plan(build("dp-fedgd"), 13, (5,) * 6, privacy, Participation.parse("cyclic:3"))
    assert {group.clients: group.releases[0].times for group in longer.groups()} == {(0, 3): 5, (1, 2, 4, 5): 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cyclic", "participation: 'cyclic' lacks a number; write fixed:5, poisson:0.5 or cyclic:4."),
        ("cyclic:", "participation: 'cyclic:' lacks a number"),
        ("cyclic:two", "participation: 'cyclic:two' lacks a number"),
        ("cyclic:0", "participation: cyclic:0 needs a whole number of cohorts, at least 1"),
        ("cyclic:-2", "participation: cyclic:-2 needs a whole number of cohorts"),
        ("cyclic:2.5", "participation: cyclic:2.5 needs a whole number of cohorts"),
        ("cyclic:nan", "participation: cyclic:nan needs a whole number of cohorts"),
        ("cyclic:inf", "participation: cyclic:inf needs a whole number of cohorts"),
        ("cycli:4", "participation: 'cycli:4' is unknown. Did you mean 'cyclic:4'?"),
        ("Cyclic:4", "participation: 'Cyclic:4' is unknown. Did you mean 'cyclic:4'?"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(SordinoError) as caught:
        Participation.parse(text)
    assert message in str(caught.value)


def test_more_cohorts_than_clients():
    """Somebody's turn would be nobody's."""
    with pytest.raises(SordinoError, match="participation: cyclic:6 asks for 6 cohorts; there are 5 clients"):
        Participation.parse("cyclic:6").rate(5)
    with pytest.raises(SordinoError, match="cyclic:6 asks for 6 cohorts"):
        Plan(build("dp-fedgd"), 3, (4,) * 5, Privacy(1.0), Participation.parse("cyclic:6"))
