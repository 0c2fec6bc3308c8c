"""Cohorts in turn; the other laws are tested with the plans that draw on them."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from sordino.core import Privacy
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.privacy import calibration, participation, spending
from sordino.privacy.mechanisms import random
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation, Sampling
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
    assert [release.times for group in spending.groups(cyclic) for release in group.releases] == [4]
    np.testing.assert_allclose(calibration.client_std(cyclic, 0, 0), calibration.client_std(four, 0, 0), rtol=1e-12)
    longer = Plan(build("dp-fedgd"), 13, (5,) * 6, privacy, Participation.parse("cyclic:3"))
    assert {group.clients: group.releases[0].times for group in spending.groups(longer)} == {(0, 3): 5, (1, 2, 4, 5): 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cyclic", "participation: 'cyclic' has no number; write fixed:5, poisson:0.5 or cyclic:4."),
        ("cyclic:", "participation: 'cyclic:' has no number"),
        ("cyclic:two", "participation: 'cyclic:two' has no number"),
        ("cyclic:0", "participation: cyclic:0 needs a whole number of cohorts of at least 1"),
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


# ------------------------------------------------------------------------------------------------- coins of a schedule


class Words:
    """In place of ChaCha20: these words, one row per round and attempt."""

    def __init__(self, *rows):
        self.rows = {(t, attempt): row for t, attempt, row in rows}

    def words(self, at, count):
        row = np.array(self.rows[at.round, at.index], dtype=np.uint64)
        assert len(row) == count
        return row


def drawn(text, seed, rounds=200, clients=40):
    return [cohort.tolist() for cohort in Participation.parse(text).schedule(rounds, clients, seed)]


@pytest.mark.parametrize("text", ["fixed:7", "poisson:0.3"])
def test_every_bit_of_a_seed_counts(text):
    seeds = [0, 1, 256, 2**64, 2**64 + 1, 2**100, 2**100 + 1, 2**100 + 2**64, 2**200]
    schedules = [drawn(text, seed, 8) for seed in seeds]
    assert all(a != b for i, a in enumerate(schedules) for b in schedules[:i])
    assert drawn(text, np.int64(7)) == drawn(text, 7)
    assert drawn(text, 7, 3) == drawn(text, 7, 9)[:3]
    with pytest.raises(SordinoError, match=r"^seed: -1 "):
        drawn(text, -1)


@pytest.mark.parametrize("text", ["fixed:7", "poisson:0.3"])
def test_a_schedule_is_not_numpy_s(text, monkeypatch):
    """Its coins are those of the secure source, so that without the seed nobody can go on from what was seen."""
    before = drawn(text, 2**100)
    monkeypatch.setattr(np.random, "default_rng", None)
    monkeypatch.setattr(np.random, "Generator", None)
    assert drawn(text, 2**100) == before
    monkeypatch.setattr(participation.Secure, "words", Seeded(1).words)
    monkeypatch.setattr(
        participation.Secure, "word_rows", lambda _, at, count: np.stack([Seeded(1).words(each, count) for each in at])
    )
    assert drawn(text, 2**100, 5) != before[:5]


def test_a_fixed_cohort_is_a_uniform_subset():
    """Every one of the 10 pairs of 5 is as frequent, to within 4.5 standard errors, and rounds are unlike."""
    rounds = 5000
    pairs = Counter(map(tuple, drawn("fixed:2", 11, rounds, 5)))
    assert len(pairs) == 10
    assert max(abs(count - rounds / 10) for count in pairs.values()) < 4.5 * np.sqrt(rounds * 0.09)
    cohorts = drawn("fixed:2", 11, rounds, 5)
    repeated = sum(a == b for a, b in pairwise(cohorts))
    assert abs(repeated - rounds / 10) < 4.5 * np.sqrt(rounds * 0.09)


def test_equal_words_are_drawn_anew():
    """A tie broken by place would favour the first clients."""
    uniforms = Words((0, 0, [5, 1, 1, 9]), (0, 1, [9, 9, 1, 1]), (0, 2, [8, 2**64 - 1, 3, 2**63]))
    assert participation._subset(uniforms, 0, 4, 2).tolist() == [0, 2]


@pytest.mark.parametrize("fresh", [False, True])
def test_cohorts_of_many_rounds_are_those_of_each_round(fresh, monkeypatch):
    """Rounds are drawn together, also where a cipher cannot be set back. A tie has all of them drawn one by one."""
    uniforms = participation.Secure(b"k" * 32)
    monkeypatch.setattr(participation, "WORDS", 7 * 40)
    if fresh:
        begin = random._chacha20()
        monkeypatch.setattr(random, "_chacha20", lambda: lambda *given: Encryptor(begin(*given)))
    together = participation._subsets(uniforms, 30, 40, 9)
    one_by_one = [participation._subset(uniforms, t, 40, 9) for t in range(30)]
    np.testing.assert_array_equal(together, one_by_one)
    assert participation._subsets(uniforms, 2, 5, 5)[1].tolist() == [0, 1, 2, 3, 4]


class Encryptor:
    """Without `reset_nonce`, as before cryptography 43."""

    def __init__(self, stream):
        self.update_into = stream.update_into


def test_a_tie_in_a_round_does_not_change_the_others(monkeypatch):
    uniforms = Words((0, 0, [5, 1, 1, 9]), (0, 1, [9, 8, 2, 1]), (1, 0, [8, 2**64 - 1, 3, 2**63]))
    uniforms.word_rows = lambda addresses, count: np.stack([uniforms.words(at, count) for at in addresses])
    assert [cohort.tolist() for cohort in participation._subsets(uniforms, 2, 4, 2)] == [[2, 3], [0, 2]]


def test_a_coin_falls_below_its_rate_to_the_last_bit():
    rate = 0.3 * 2.0**-30
    top, low = divmod(int(Fraction(rate) * 2**128), 2**64)
    uniforms = Words((0, 0, [top, low - 1, top, low, top - 1, 2**64 - 1, top + 1, 0]))
    assert participation._independent(uniforms, 0, 4, rate).tolist() == [0, 2]
    # A rate far below what 52 bits resolve keeps its chance, and is not rounded up: 2^-60 is 2^68 of 2^128.
    uniforms = Words((0, 0, [15, 2**64 - 1, 16, 0, 0, 0, 17, 0]))
    assert participation._independent(uniforms, 0, 4, 2.0**-60).tolist() == [
        0,
        2,
    ]  # uniforms of the form (k + 1/2) / 2^52 never would
    uniforms = Words((0, 0, [0, 0, 0, 1]))
    assert participation._independent(uniforms, 0, 2, 1e-300).tolist() == []


def test_coins_of_a_rate():
    cohorts = drawn("poisson:0.3", 5, 2000, 20)
    counts = np.bincount([i for cohort in cohorts for i in cohort], minlength=20)
    assert (abs(counts - 600) < 4.5 * np.sqrt(2000 * 0.21)).all()
    assert abs(np.var([len(cohort) for cohort in cohorts]) / (20 * 0.21) - 1) < 0.2  # independent: a binomial size
    assert drawn("poisson:1", 5, 2, 4) == [[0, 1, 2, 3]] * 2


def test_no_record_is_drawn_with_a_greater_chance_than_its_rate():
    """Of the 2^52 coins (k + 1/2) / 2^52, so many lie below the rate; rounded to nearest there were too many."""
    for rate in (1.5 * 2.0**-53, 1.7 * 2.0**-40, 1e-9, 0.1, 0.3, np.nextafter(1.0, 0)):
        cells = int(Fraction(rate) * 2**52)
        around = [k for k in range(cells - 2, cells + 3) if 0 <= k < 2**52]
        uniforms = np.array([(k + 0.5) * 2.0**-52 for k in around])
        drawn = Sampling("poisson", 1.0).draw(uniforms, rate)
        assert [around[i] for i in drawn] == [k for k in around if k < cells]


def test_equal_coins_are_ordered_alike_on_every_machine():
    uniforms = np.full(1000, 0.5)
    uniforms[500:] = 0.25
    assert Sampling("fixed", 600.0).draw(uniforms, 0.6).tolist() == [*range(100), *range(500, 1000)]
