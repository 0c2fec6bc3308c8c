"""Thresholds, and secrets derived anew."""

import itertools

import pytest

from sordino.errors import SordinoError
from sordino.secagg import Identity, Member, Roster, Session

PLAN = "ab" * 32


def sites(n):
    return [Identity(f"s{i}", bytes([i]) * 32, bytes([i, 1]) * 16) for i in range(n)]


ROSTERS = {n: Roster(tuple(each.card for each in sites(n))) for n in range(1, 11)}


def test_thresholds_keep_the_two_kinds_of_shares_apart():
    """By counting: each of n - c honest sites gives one kind, each of c colluders both."""
    for n, dropouts, colluders in itertools.product(range(2, 11), range(10), range(10)):
        t = n - dropouts
        both = any(
            min(first, n - colluders - first) + colluders >= t and max(first, n - colluders - first) + colluders >= t
            for first in range(n - colluders + 1)
        )
        fine = t >= 2 and not both and colluders <= n - 2
        if fine:
            assert Session.of("r", ROSTERS[n], PLAN, dropouts, colluders).threshold == t
        else:
            with pytest.raises(SordinoError, match=r"dropouts|colluders"):
                Session.of("r", ROSTERS[n], PLAN, dropouts, colluders)


def test_the_remedy_is_the_most_dropouts():
    with pytest.raises(SordinoError, match="allow at most 4 dropouts"):
        Session.of("r", ROSTERS[10], PLAN, 5)
    assert Session.of("r", ROSTERS[10], PLAN, 4).threshold == 6


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("", ROSTERS[3], 2, PLAN), "run"),
        (("a b", ROSTERS[3], 2, PLAN), "run"),
        (("r", ROSTERS[3], 2, "AB" * 32), "plan"),
        (("r", ROSTERS[3], 2, "ab"), "plan"),
        (("r", ROSTERS[4], 2, PLAN), "threshold"),
        (("r", ROSTERS[3], 4, PLAN), "threshold"),
        (("r", ROSTERS[1], 1, PLAN), "threshold"),
        (("r", ROSTERS[3], True, PLAN), "threshold"),
    ],
)
def test_bad_sessions_are_refused(args, match):
    with pytest.raises(SordinoError, match=match):
        Session(*args)


def test_negative_numbers_are_refused():
    for wrong in ({"dropouts": -1}, {"colluders": -1}, {"dropouts": 0.5}):
        with pytest.raises(SordinoError, match=next(iter(wrong))):
            Session.of("r", ROSTERS[5], PLAN, **wrong)


def test_secrets_are_derived_and_all_different():
    one, two = sites(2)
    drawn = set()
    for session in (
        Session("r", ROSTERS[2], 2, PLAN),
        Session("q", ROSTERS[2], 2, PLAN),
        Session("r", ROSTERS[2], 2, "cd" * 32),
        Session("r", ROSTERS[3], 2, PLAN),
        Session("r", ROSTERS[3], 3, PLAN),
    ):
        for who, secret, round in itertools.product((one, two), (bytes(32), b"\1" * 32), (0, 1)):
            member = Member(who, session, secret)
            drawn |= {member.ephemeral(round), member.seed(round), *member.shares(round)[0]}
            assert Member(who, session, secret).shares(round) == member.shares(round)
    assert len(drawn) == 4 * 5 * 8


def test_members_are_checked():
    session = Session("r", ROSTERS[2], 2, PLAN)
    with pytest.raises(SordinoError, match="other keys"):
        Member(Identity("s0", bytes(32), bytes(32)), session, bytes(32))
    with pytest.raises(SordinoError, match="not in the roster"):
        Member(Identity.make("t"), session, bytes(32))
    with pytest.raises(SordinoError, match="32 bytes"):
        Member(sites(1)[0], session, bytes(31))
    assert "secret" not in repr(Member(sites(1)[0], session, bytes(32)))


@pytest.mark.parametrize("round", [-1, 2**32, 1.0, True, "1"])
def test_rounds_are_numbers(round):
    with pytest.raises(SordinoError, match="round"):
        Member(sites(1)[0], Session("r", ROSTERS[2], 2, PLAN), bytes(32)).seed(round)
