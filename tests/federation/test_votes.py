"""Votes to leave a site out: enough of them count, and a coordinator can neither hide nor invent one."""

import json

import pytest

from sordino import wire
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation import votes
from sordino.federation.votes import Vote, excluded, parsed, reduced, signed
from sordino.secagg import Identity, Roster

FOUR = tuple("abcd")


def vote(federation, name, *words):
    assert main(["federate", "vote", str(federation.place(name)), *words]) == 0


def terms_of(federation):
    return json.loads((federation.coordinator / "run" / "terms.json").read_text())


@pytest.fixture
def four():
    identities = {name: Identity.make(name) for name in FOUR}
    return identities, Roster(tuple(each.card for each in identities.values()))


def test_more_than_half_of_the_others(four):
    identities, roster = four
    assert votes.needed(roster) == 2
    a, b = (signed(identities[name], "d") for name in "ab")
    assert excluded(roster, [a]) == {}
    assert excluded(roster, [a, a]) == {}
    assert excluded(roster, [a, b]) == {"d": ["a", "b"]}
    assert reduced(roster, ["d"]).names == ("a", "b", "c")
    assert [votes.needed(Roster(roster.sites[:n])) for n in (2, 3, 4)] == [1, 2, 2]
    assert parsed([a.text()]) == [a]


def test_a_forged_vote_is_refused(four):
    identities, roster = four
    right = signed(identities["a"], "d")
    for wrong in (
        right._replace(against="c"),
        right._replace(voter="b"),
        right._replace(signature="zz"),
        signed(identities["d"], "d"),
        signed(Identity.make("z"), "d"),
        signed(identities["a"], "nobody"),
    ):
        with pytest.raises(SordinoError, match="is not signed"):
            excluded(roster, [wrong])
    for text in ("", "[]", '{"voter": 1}', "x" * 600):
        with pytest.raises(SordinoError, match="votes: they are not"):
            parsed([text])


@pytest.mark.parametrize("trust", ["secure-aggregation", "untrusted-server"])
def test_a_site_is_left_out(tiny, trust, capsys):
    """One vote changes nothing; two of three others leave it out, and the noise is planned for those who remain."""
    federation = tiny("dp-fedgd", trust=trust, names=FOUR, rounds=1)
    vote(federation, "a", "--against", "d")
    assert "2 of 3 other sites" in capsys.readouterr().out
    federation.run()
    assert terms_of(federation)["names"] == list(FOUR)
    before = json.loads((federation.coordinator / "run" / "certificate.json").read_text())
    (federation.coordinator / "run").rename(federation.coordinator / "first")
    vote(federation, "b", "--against", "d")
    federation.run()
    assert terms_of(federation)["names"] == ["a", "b", "c"]
    assert federation.progress("excluded")[0]["votes"] == ["a", "b"]
    assert federation.progress("round")[0]["came"] == ["a", "b", "c"]
    cert = json.loads((federation.coordinator / "run" / "certificate.json").read_text())
    assert (before["clients"], cert["clients"]) == (4, 3)
    if trust == "secure-aggregation":
        assert (before["secure"]["honest"], cert["secure"]["honest"]) == (3, 2)
    (federation.coordinator / "run").rename(federation.coordinator / "second")
    vote(federation, "b", "--withdraw", "d")
    federation.run()
    assert terms_of(federation)["names"] == list(FOUR)


@pytest.mark.parametrize("trust", ["secure-aggregation", "untrusted-server"])
def test_a_coordinator_that_cheats(tiny, trust):
    """It hides a vote, keeps one that was withdrawn, keeps a site that is voted out, or leaves one out by itself."""
    federation = tiny("dp-fedgd", trust=trust, names=FOUR, rounds=1)
    cards = {name: Identity.load(federation.place(name) / "identity.key") for name in FOUR}
    for name in "ab":
        vote(federation, name, "--against", "d")
    both = tuple(signed(cards[name], "d").text() for name in "ab")
    numbers = iter("123456789")

    def refusal(of, **changes):
        terms = federation.terms(run=next(numbers) * 32, **changes)
        reply = wire.decode(federation.site(of).answer(wire.encode("terms", {"terms": terms.json()})))
        assert reply.kind == "refused", of
        return federation.events(of)[-1]["detail"]

    assert "leave out a vote" in refusal("a", votes=both[1:])
    assert "leave out a vote" in refusal("a")
    vote(federation, "b", "--withdraw", "d")
    assert "withdrawn" in refusal("b", votes=both)
    vote(federation, "b", "--against", "d")
    assert "not signed" in refusal("c", votes=(both[0], Vote("b", "d", "00" * 64).text()))
    assert "voted out" in refusal("c", votes=both)
    if trust == "secure-aggregation":
        keys = federation.terms().run_keys[:3]
        sizes = federation.terms().sizes[:3]
        less = {"names": FOUR[:3], "sizes": sizes, "run_keys": keys}
        assert "roster" in refusal("c", roster=reduced(federation.roster, "d").sha256(), **less)


def test_cli_refuses_strangers(tiny, capsys):
    federation = tiny("dp-fedgd", trust="secure-aggregation", names=FOUR)
    for name in ("z", "a"):
        assert main(["federate", "vote", str(federation.place("a")), "--against", name]) == 2
        assert "not another site" in capsys.readouterr().err
