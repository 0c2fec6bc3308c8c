"""New keys without a new roster: chains of signatures, and what thieves of an old key cannot do."""

import pytest

from sordino import wire
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation import rotations, witness
from sordino.federation.rotations import Link, applied, link, parsed
from sordino.secagg import Identity, Roster

SECURE = {"trust": "secure-aggregation", "rounds": 1}


@pytest.fixture
def sites():
    identities = [Identity.make(name) for name in ("north", "south")]
    return identities, Roster(tuple(each.card for each in identities))


def test_links_are_followed_from_the_key_of_the_roster(sites):
    (north, _), roster = sites
    second, third = Identity.make("north"), Identity.make("north")
    chain = [link(north, second), link(second, third)]
    assert applied(roster, chain).card("north") == third.card
    assert applied(roster, chain[::-1]).card("north") == third.card
    assert applied(roster, chain[1:]) == roster  # it leads on from a key that the roster does not have
    assert applied(Roster((second.card, roster.sites[1])), chain).card("north") == third.card
    assert parsed([each.text() for each in chain]) == chain


def test_a_forged_link_is_refused(sites):
    (north, south), roster = sites
    new = Identity.make("north")
    right = link(north, new)
    other = Link("north", north.card.sign, new.card.sign, south.card.box)
    for wrong in (
        right._replace(box=Identity.make("x").card.box),
        right._replace(signature="00" * 64),
        right._replace(signature="zz"),
        other._replace(signature=south.sign(other.content).hex()),
    ):
        with pytest.raises(SordinoError, match="not signed by its old one"):
            applied(roster, [wrong])
    with pytest.raises(SordinoError, match="two successors"):
        applied(roster, [right, link(north, Identity.make("north"))])
    taken = Link("north", north.card.sign, south.card.sign, new.card.box)
    with pytest.raises(SordinoError, match="two sites have the sign"):
        applied(roster, [taken._replace(signature=north.sign(taken.content).hex())])
    loop = [right, link(new, north)]
    with pytest.raises(SordinoError, match="more than 64"):
        applied(roster, loop)
    for text in ("", "[]", '{"name": 1}', "x" * 2000, '{"name":1,"old":"","sign":"","box":"","signature":""}'):
        with pytest.raises(SordinoError, match="rotations: they are not"):
            parsed([text])


def test_a_federation_goes_on_with_new_keys(tiny, capsys):
    """A run, new keys twice, another run: no roster is changed, and every site's log says what it accepted."""
    federation = tiny(**SECURE)
    rosters = [path.read_bytes() for path in federation.folder.rglob("roster.toml")]
    federation.run()
    old = Identity.load(federation.place("north") / "identity.key").card
    for _ in range(2):
        assert main(["federate", "rotate", str(federation.place("north"))]) == 0
    assert old.sign in capsys.readouterr().out
    new = Identity.load(federation.place("north") / "identity.key").card
    assert len({old.sign, new.sign}) == 2
    assert witness.read(witness.witness_path(federation.site("north").config)) is not None
    (federation.coordinator / "run").rename(federation.coordinator / "first")
    federation.run()
    assert federation.progress("finished")
    for name in ("south", "west"):
        lines = [line for line in federation.events(name) if line["what"] == "rotated"]
        assert [line["site"] for line in lines] == ["north", "north"]
        assert {line["new"] for line in lines} >= {new.sign}
        assert federation.site(name).roster.card("north") == new
    assert [path.read_bytes() for path in federation.folder.rglob("roster.toml")] == rosters
    (federation.coordinator / "run").rename(federation.coordinator / "second")
    federation.run()  # and nothing is told twice
    assert len([line for line in federation.events("west") if line["what"] == "rotated"]) == 2


def test_a_thief_of_the_old_key(tiny):
    """It can neither speak for the site, nor lead the others to a key of its own, nor bring the old key back."""
    federation = tiny(**SECURE)
    thief = Identity.load(federation.place("north") / "identity.key")
    main(["federate", "rotate", str(federation.place("north"))])
    federation.run()
    site = federation.site("south")

    def refusal(links, roster, run):
        keys = federation.terms().run_keys
        terms = federation.terms(
            rotations=tuple(each.text() for each in links), roster=roster.sha256(), run=run * 32, run_keys=keys
        )
        assert wire.decode(site.answer(wire.encode("terms", {"terms": terms.json()}))).fields["code"] == "policy"
        return federation.events("south")[-1]["detail"]

    fork = link(thief, Identity.make("north"))
    assert "two successors" in refusal([fork], applied(federation.roster, [fork]), "1")
    assert "roster" in refusal([], federation.roster, "2")


def test_receipts_of_the_old_key_still_count(tiny):
    """A ledger that is put back is noticed after a rotation too, by what the old key has signed."""
    federation = tiny(**SECURE)
    ledger = federation.place("north") / "ledger.db"
    coordinator, _ = federation.run()
    receipt = coordinator.messenger.receipts.of("north")
    main(["federate", "rotate", str(federation.place("north"))])
    for path in federation.place("north").glob("ledger.db*"):
        path.unlink()
    witness.witness_path(federation.site_config("north")).unlink()
    for path in (federation.place("north") / "runs").glob("*/certificate.json"):
        path.unlink()
    reply = federation.site("north").answer(wire.encode("hello", {"receipt": receipt}))
    assert wire.decode(reply).fields["code"] == "rolled-back"
    assert ledger.exists()


def test_a_kill_between(tiny, monkeypatch):
    """The link is written, and the new key is not in its place yet: the next call ends it with the same key."""
    federation = tiny(**SECURE)
    config = federation.site("north").config

    class Kill(BaseException):
        pass

    def killed(*_):
        raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(rotations.files, "move", killed)
        with pytest.raises(Kill):
            rotations.rotate(config)
    (made,) = rotations.accepted(config.folder)
    assert rotations.rotate(config) == made
    assert Identity.load(federation.place("north") / "identity.key").card.sign == made.sign
    federation.run()
