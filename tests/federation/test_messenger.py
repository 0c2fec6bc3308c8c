"""Messages to sites that leave the link and come back."""

import pytest
from fixtures import Loopback

from sordino import wire
from sordino.errors import StoppedError
from sordino.federation import messenger
from sordino.federation.coordinator import serve
from sordino.federation.messenger import Messenger

LETTER, REPLY = wire.encode("round", {}), wire.encode("update", {})


class Comings:
    """Node 1 always answers; node 2 is connected, and answers, when `here(looks)` says so."""

    def __init__(self, here):
        self.here, self.looks, self.asked = here, 0, []

    def sites(self):
        self.looks += 1
        return [1, 2] if self.here(self.looks) else [1]

    def exchange(self, requests, seconds, enough=None):
        assert seconds > 0
        self.asked.append(sorted(requests))
        return {node: REPLY for node in requests if node == 1 or self.here(self.looks)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(messenger, "POLL", 0.01)


def ask(transport, deadline=0.3):
    told = []
    made = Messenger(transport, deadline, lambda what, **fields: told.append((what, fields["site"])))
    made.nodes = {"a": 1, "b": 2}
    return sorted(made.ask(dict.fromkeys("ab", LETTER), "update")), told, made


def test_a_site_that_left_is_asked_again_when_it_is_back():
    transport = Comings(lambda looks: looks >= 4)
    assert ask(transport)[:2] == (["a", "b"], [("away", "b")])
    assert transport.asked == [[1, 2], [2]]  # who answered is not asked twice


def test_it_is_waited_for_until_the_deadline_and_no_longer():
    transport = Comings(lambda looks: False)
    found, told, _ = ask(transport)
    assert (found, told) == (["a"], [("away", "b"), ("missing", "b")])
    assert transport.asked == [[1, 2]]
    assert 5 < transport.looks < 70


def test_one_that_is_there_and_silent_is_not_asked_again():
    class Noiseless(Comings):
        def exchange(self, requests, seconds, enough=None):
            return {node: reply for node, reply in super().exchange(requests, seconds).items() if node == 1}

    transport = Noiseless(lambda looks: True)
    assert ask(transport)[0] == ["a"]
    assert transport.asked == [[1, 2]]


@pytest.mark.parametrize(("reply", "strange"), [
    (wire.encode("refused", {"code": "unknown-run", "reason": "?"}), {"b"}),
    (wire.encode("refused", {"code": "order", "reason": "?"}), set()),
    (wire.encode("offered", {}), set()),
    (b"rubbish", set()),
])  # fmt: skip
def test_who_does_not_know_the_run_is_remembered(reply, strange):
    transport = Comings(lambda looks: True)
    transport.exchange = lambda requests, seconds, enough=None: {1: REPLY, 2: reply}
    found, _, made = ask(transport)
    assert (found, made.unknown_sites) == (["a"], strange)


def test_texts_of_a_site_neither_steer_the_terminal_nor_fill_the_log(tiny):
    """A site refuses the terms with escape sequences, and with 300 kB of text."""
    federation = tiny()
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e" + "x" * 300_000

    def fault(node, request, answer):
        if node == 100 and wire.decode(request).kind == "terms":
            return wire.encode("refused", {"code": "policy", "reason": hostile})
        return answer(request)

    with pytest.raises(StoppedError) as stopped:
        federation.run(fault)
    with pytest.raises(StoppedError):
        serve(Loopback(federation.sites(), fault), federation.coordinator)
    texts = [str(stopped.value), *(str(line) for line in federation.progress())]
    assert any("x1b" in text for text in texts)
    for text in [*texts, *(value for line in federation.progress() for value in line.values())]:
        assert "\x1b" not in str(text)
        assert "\u202e" not in str(text)
        assert "\x07" not in str(text)
        assert len(str(text)) < 3000
