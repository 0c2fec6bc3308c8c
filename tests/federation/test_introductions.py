"""Whoever says a site's name has that site's key."""

import pytest
from fixtures import Loopback
from test_coordinator import altered

from sordino import wire
from sordino.errors import SordinoError
from sordino.evidence.signing import of_site
from sordino.federation import introductions, messenger
from sordino.federation.coordinator import Coordinator
from sordino.secagg import Identity

NONCE = "0" * 64


def impostor(federation):
    """A registered node that says what south says, with a key of its own."""
    other = of_site(Identity.make("south"))

    def answer(request):
        fields = {"name": "south", "records": 20}
        nonce = wire.decode(request).fields.get("nonce", NONCE)
        return wire.encode("hello", fields | {"signature": introductions.signed(fields, nonce, other)})

    return answer


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_a_node_that_says_the_name_of_another_does_not_take_its_place(tiny, trust):
    federation = tiny(trust=trust)
    coordinator, transport = federation.run(answers={**federation.sites(), 200: impostor(federation)})
    assert coordinator.messenger.nodes == {"north": 100, "south": 101, "west": 102}
    asked = {wire.decode(request).kind for node, request, _ in transport.log if node == 200}
    assert asked == {"hello"}
    (told,) = (line for line in federation.progress("misfit") if line.get("node") == "200")
    assert "did not sign with the key that the roster has for south" in told["why"]


def test_a_hello_that_was_changed_on_its_way_or_repeated_is_not_believed(tiny, monkeypatch):
    monkeypatch.setattr(messenger, "POLL", 1e-3)
    federation, first = tiny(patience=0.01), []

    def changed(node, request, answer):
        reply = answer(request)
        first.append(reply)
        return altered(reply, {"records": 21}) if node == 101 else reply

    def repeated(node, request, answer):
        return first[1] if node == 101 else answer(request)

    for fault in (changed, repeated):
        with pytest.raises(SordinoError, match="south did not connect"):
            federation.run(fault)


def test_the_transport_s_keys_bind_names_where_there_is_no_roster(tiny):
    federation = tiny()
    (federation.coordinator / "roster.toml").unlink()
    answers = {**federation.sites(), 200: impostor(federation)}

    class Keyed(Loopback):
        names = {100: "north", 101: "south", 102: "west", 200: "somebody"}  # noqa: RUF012

    coordinator = Coordinator(Keyed(answers), federation.coordinator)
    coordinator.run()
    assert coordinator.messenger.nodes == {"north": 100, "south": 101, "west": 102}
    (told,) = (line for line in federation.progress("misfit") if line.get("node") == "200")
    assert "does not have the node key of south" in told["why"]


def test_a_site_that_refuses_or_babbles_before_its_hello_is_told_once_by_its_name(tiny, monkeypatch):
    monkeypatch.setattr(messenger, "POLL", 1e-3)
    federation, asked = tiny(patience=0.1), []

    def refuses(request):
        asked.append(request)
        return wire.encode("refused", {"code": "storage", "reason": "the disk is full"})

    class Keyed(Loopback):
        names = {100: "north", 101: "south", 102: "west"}  # noqa: RUF012

    answers = {**federation.sites(), 101: refuses, 102: lambda request: wire.encode("hello", {}), 200: refuses}
    with pytest.raises(SordinoError, match="south, west did not connect"):
        Coordinator(Keyed(answers), federation.coordinator).run()
    assert len(asked) > 4
    assert [line["site"] for line in federation.progress("refused")] == ["south", "node 200"]
    assert [line["site"] for line in federation.progress("misfit")] == ["west"]


def test_a_wrong_nonce_is_not_signed(tiny, talk):
    federation = tiny()
    site = talk(federation.site("north"), federation.terms())
    for wrong in ("", 7, "x" * 64, None):
        assert site.say("hello", {"nonce": wrong}).fields["code"] == "malformed"
    fields = site.say("hello", {"nonce": NONCE}).fields
    public = federation.roster.card("north").sign
    assert introductions.proves(fields, NONCE, public)
    for changed in ({"records": 1}, {"name": "south"}, {"epsilon": 1.0}, {"signature": "00"}, {"signature": None}):
        assert not introductions.proves(fields | changed, NONCE, public)
    assert not introductions.proves(fields, "1" * 64, public)
