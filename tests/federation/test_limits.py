"""How long messages may be."""

import numpy as np
import pytest
from fixtures import Loopback

from sordino import wire
from sordino.federation import limits, messenger
from sordino.federation.messenger import Messenger, read


def test_the_terms_say_how_long_a_message_may_be(tiny):
    terms = tiny().terms()
    assert limits.message_bytes(terms) < 2**21
    wider = tiny().terms(features=10**6)
    assert 64 * 8 * 3 * 10**6 < limits.message_bytes(wider) < 2**31
    matrices = tiny("fednewton").terms()
    assert limits.message_bytes(matrices) > limits.message_bytes(terms)


def test_a_reply_that_is_too_long_is_not_decoded(monkeypatch):
    long = wire.encode("hello", {"name": "north"}, {"x": np.zeros(limits.SMALL, np.uint8)})
    decoded = []
    plain = wire._head
    monkeypatch.setattr(wire, "_head", lambda data: (decoded.append(len(data)), plain(data))[1])
    assert read(long, "hello") is None
    assert decoded == []
    told = []
    post = Messenger(Loopback({1: lambda _: long}), 1.0, lambda what, **fields: told.append((what, fields["site"])))
    post.nodes = {"north": 1}
    assert post.ask({"north": b""}, "update") == {}
    assert told == [("missing", "north")]
    post.most = 2 * limits.SMALL
    assert messenger.read(long, "hello", post.most).kind == "hello"


@pytest.mark.parametrize("run", ["", "00" * 16, None, 7])
def test_a_site_reads_no_long_message_that_belongs_to_none_of_its_runs(tiny, monkeypatch, run):
    federation = tiny()
    site = federation.site("north")
    monkeypatch.setattr(limits, "UNKNOWN", 10_000)
    monkeypatch.setattr(wire, "_array_header", lambda item: pytest.fail("an array was read"))
    fields = {} if run is None else {"run": run}
    reply = wire.decode(site.answer(wire.encode("round", fields, {"x": np.zeros(20_000, np.uint8)})))
    assert (reply.kind, reply.fields["code"]) == ("refused", "malformed")
    assert "the limit is 10,000" in federation.events("north")[-1]["detail"]


def test_a_long_message_of_a_run_is_read_up_to_what_the_terms_allow(tiny, talk, monkeypatch):
    federation = tiny()
    known = talk(federation.site("north"), federation.terms())
    assert known.propose().kind == "agreed"
    monkeypatch.setattr(limits, "UNKNOWN", 10)
    assert known.round(0).kind == "update"
    more = np.zeros(limits.message_bytes(known.terms), np.uint8)
    assert known.round(1, arrays={"more": more}).fields["code"] == "malformed"
    assert "the limit is" in federation.events("north")[-1]["detail"]
