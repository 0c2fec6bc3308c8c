"""A server that does not keep to the protocol, over real processes: what it tries, and what sites say to that.

It runs in the coordinator's process, for `scenarios.py`. A message that sites refuse goes to one site each, as many
at once as there are sites. What every site must refuse, or answer once, goes to all.
"""

import hashlib
import json
import secrets
import tomllib
from dataclasses import replace

import numpy as np
import tomli_w
from fixtures import Talk
from messages import NUMBERS, ROUNDS, SPEC, WORDS, put

from sordino import secagg, wire
from sordino.federation.coordinator import Coordinator
from sordino.federation.run_keys import roster_of_run
from sordino.privacy import calibration

RUBBISH = [b"", b"rubbish" * 100, wire.MAGIC, wire.MAGIC + b"\xff" * 64, wire.encode("stranger", {})]
HUGE = 2**23  # numbers: 32 MiB


class Server:
    """tries: what was tried at which site, the answer that it must have, and the one that came."""

    def __init__(self, transport, place):
        self.transport, self.place, self.tries = transport, place, []
        self.coordinator = Coordinator(transport, place)
        self.terms = self.coordinator.enrolment.propose(self.coordinator.enrolment.meet())
        self.nodes = self.coordinator.messenger.nodes
        self.talk = Talk(None, self.terms)

    def send(self, requests):
        """Replies by site; silence is an empty one."""
        found = self.transport.exchange(
            {self.nodes[n]: x for n, x in requests.items()}, self.coordinator.config.deadline
        )
        return {name: found.get(self.nodes[name], b"") for name in requests}

    def each(self, tries):
        """(what, expected answer, message): every message to one site."""
        names = sorted(self.nodes)
        for k in range(0, len(tries), len(names)):
            batch = dict(zip(names, tries[k : k + len(names)], strict=False))
            for name, reply in self.send({name: request for name, (_, _, request) in batch.items()}).items():
                self.note(name, *batch[name][:2], reply)

    def all(self, what, expected, request):
        """The same message, or each its own, to every site."""
        requests = request if isinstance(request, dict) else dict.fromkeys(self.nodes, request)
        replies = self.send(requests)
        for name, reply in replies.items():
            self.note(name, what, expected, reply)
        return replies

    def note(self, name, what, expected, reply):
        found = wire.decode(reply) if reply[:4] == wire.MAGIC else wire.Message("silence", {}, {})
        answer = found.fields["code"] if found.kind == "refused" else found.kind
        self.tries.append({"what": what, "site": name, "expected": expected, "answer": answer})

    def same(self, what, before, request):
        """The message once more: the bytes that it had before."""
        for name, reply in self.send(request if isinstance(request, dict) else dict.fromkeys(before, request)).items():
            answer = "the same bytes" if reply == before[name] else "other bytes"
            self.tries.append({"what": what, "site": name, "expected": "the same bytes", "answer": answer})

    def propose(self, terms):
        return wire.encode("terms", {"terms": terms.json()})

    def changed(self, spec, **changes):
        """Terms of another run, with another spec."""
        values = {k: v for k, v in (tomllib.loads(self.terms.spec) | spec).items() if v is not None}
        return replace(self.terms, **{"run": secrets.token_hex(16), "spec": tomli_w.dumps(values), **changes})

    def finish(self, what, expected, done=None, theta=None):
        fields = {"run": self.terms.run, "terms": self.terms.sha256()}
        fields["done"] = self.terms.plan.rounds if done is None else done
        theta = np.zeros(self.terms.model.size, "f8" if self.terms.secure else "f4") if theta is None else theta
        self.all(what, expected, wire.encode("finish", fields, {"theta": theta}))


def attack(transport, place):
    server = Server(transport, place)
    seen = (under_masks if server.terms.secure else in_the_open)(server)
    (place / "attacks.json").write_text(json.dumps({"tries": server.tries, "seen": seen}))


def in_the_open(server):
    """The messages that were answered, and the answers, for a look at what they tell of a record."""
    talk, terms = server.talk, server.terms
    server.all("a round of a run that nobody agreed to", "unknown-run", talk.request(0))
    server.each([(f"terms with {spec}", "policy", server.propose(server.changed(spec))) for spec, _ in SPEC])
    others = replace(terms, run=secrets.token_hex(16), sizes=tuple(size + 1 for size in terms.sizes))
    server.all("terms that claim more records than there are, for less noise", "policy", server.propose(others))
    server.all("a run that the limit does not allow", "policy", server.propose(server.changed({"epsilon": 2000.0})))
    server.all("honest terms", "agreed", server.propose(terms))
    server.all("a plan changed in the run", "changed", server.propose(server.changed({"clip": 2.0}, run=terms.run)))
    server.all("more rounds than agreed", "changed", server.propose(server.changed({"rounds": 4}, run=terms.run)))
    server.each([(f"a round with {f} {_shapes(a)}", code, talk.request(0, f, a)) for code, f, a in ROUNDS])
    server.each([(f"a word of shape {w.shape}", "malformed", talk.request(0, word=w)) for w in WORDS])
    server.each([("bytes that are no message", "malformed", rubbish) for rubbish in RUBBISH])
    server.each([("half a message", "malformed", talk.request(0)[:-20])])
    server.each([("a message of 32 MiB", "malformed", talk.request(0, arrays={"theta": np.zeros(HUGE, np.float32)}))])
    away = (np.append(np.load(server.place / "victim.npy"), 1)[:, None] * np.array([1, -1, 0])).ravel()
    seen = []
    for t, factor in ((0, 1e3), (2, -1e30)):
        request = talk.request(t, arrays={"theta": (factor * away).astype(np.float32)})
        said = server.all(f"a model made to single out a record, round {t}", "update", request)
        server.same("the same round twice, the same model", said, request)
        server.all("the same round twice, another model", "replayed", talk.request(t, arrays={"theta": put(1)}))
        seen.append([request.hex(), {name: reply.hex() for name, reply in said.items()}])
    server.all("a round that was skipped", "order", talk.request(1))
    server.all(
        "a round before it", "order", talk.request(0, arrays={"theta": NUMBERS, "extras0": NUMBERS}, fields={"t": 1})
    )
    server.finish("an end after more rounds than agreed", "malformed", done=99)
    server.finish("an end with NaN for a model", "malformed", theta=put(np.nan))
    server.finish("an honest end", "finished")
    server.all("another model after the end", "order", talk.request(2, arrays={"theta": put(2)}))
    return {"messages": seen, "charged": [0, 2]}


def under_masks(server):
    talk, terms = server.talk, server.terms
    offers = _arrays(server.all("honest terms", "agreed", server.propose(terms)), "offer")
    ask = {"run": terms.run, "terms": terms.sha256(), "t": 1}
    later = _arrays(server.all("offers for a round to come", "offered", wire.encode("offer", ask)), "offer")
    names = sorted(offers)
    first, own = {f"offer:{n}": offers[n] for n in names}, {n: f"offer:{n}" for n in names}
    forged = {**first, own[names[0]]: _flipped(offers[names[0]])}
    swapped = {**first, own[names[0]]: offers[names[1]], own[names[1]]: offers[names[0]]}
    fields = ask | {"t": 0, "survivors": names, "seals": dict.fromkeys(names, "00" * 64)}
    server.all("a list for a round that was not answered", "order", wire.encode("confirm", fields))
    for what, arrays in {
        "no offers": {},
        "two offers, below the threshold": {own[n]: offers[n] for n in names[:2]},
        "an offer that its site did not sign": forged,
        "two offers under each other's names": swapped,
        "offers of another round": {own[n]: later[n] for n in names},
        "an offer of a stranger": {**first, "offer:mallory": offers[names[0]]},
    }.items():
        server.all(f"a round with {what}", "malformed", talk.request(0, arrays=arrays))
    own_left_out = {n: talk.request(0, arrays={k: v for k, v in first.items() if k != own[n]}) for n in names}
    server.all("a round without the site's own offer", "malformed", own_left_out)
    request = talk.request(0, arrays=first)
    said = server.all("an honest round", "update", request)
    server.same("the same round twice", said, request)
    theta = np.ones(terms.model.size)
    server.all("another model under the same masks", "replayed", talk.request(0, arrays={**first, "theta": theta}))
    fewer = {key: offer for key, offer in first.items() if key != own[names[-1]]}
    last_left_out = {n: talk.request(0, arrays=fewer) for n in names[:-1]}
    server.all("other masks for the same round", "replayed", last_left_out)
    masked = {n: part.tobytes() for n, part in _arrays(said, "masked").items()}
    session = secagg.Session.of(
        terms.run,
        roster_of_run(server.coordinator.enrolment.roster, terms),
        terms.sha256(),
        terms.dropouts,
        terms.colluders,
    )
    fields["seals"] = secagg.seals(session, 0, masked)
    for what, wrong in {
        "too few survivors": {"survivors": names[:2]},
        "a survivor twice": {"survivors": [names[0], *names]},
        "a survivor who is a stranger": {"survivors": [*names, "mallory"]},
        "no word of the survivors'": {"seals": {}},
        "false words of the survivors": {"seals": dict.fromkeys(names, "00" * 64)},
    }.items():
        server.all(f"a list with {what}", "malformed", wire.encode("confirm", fields | wrong))
    some = fields | {"survivors": names[:-1], "seals": {n: fields["seals"][n] for n in names[:-1]}}
    told = dict.fromkeys(names[:-1], wire.encode("confirm", some))
    agreed = server.all("a list, where one site is said to have dropped out", "confirmed", told)
    server.same("the same list again", agreed, told)
    signed = {name: wire.decode(reply).fields["confirmation"] for name, reply in agreed.items()}
    server.all("another list", "replayed", dict.fromkeys(names[:-1], wire.encode("confirm", fields)))
    reveal = {key: value for key, value in some.items() if key != "seals"}
    few = dict(list(signed.items())[: session.threshold - 1])
    for what, given in {"no confirmations": {}, "too few confirmations": few}.items():
        asked = dict.fromkeys(names[:-1], wire.encode("reveal", reveal | {"confirmations": given}))
        server.all(f"shares with {what}", "malformed", asked)
    told = dict.fromkeys(names[:-1], wire.encode("reveal", reveal | {"confirmations": signed}))
    shares = server.all("shares, where one site is said to have dropped out", "revealed", told)
    server.same("the same shares again", shares, told)
    both = wire.encode("reveal", reveal | {"survivors": names, "confirmations": signed})
    server.all("both kinds of shares of that site", "replayed", dict.fromkeys(names[:-1], both))
    server.finish("an honest end", "finished")
    late = reveal | {"t": 1, "confirmations": signed}
    server.all("shares after the end", "order", wire.encode("reveal", late))
    return {"messages": [], "charged": [0]}


def _arrays(replies, key):
    return {name: wire.decode(reply).arrays[key] for name, reply in replies.items()}


def _flipped(data):
    data = data.copy()
    data[-1] ^= 1
    return data


def _shapes(arrays):
    return {key: None if value is None else f"{value.dtype}{list(value.shape)}" for key, value in arrays.items()}


def singled_out(federation, name, terms, requests, answers, neighbour):
    """How far the answers move with one record, in units of the sensitivity: the same messages to `neighbour`, whose
    records differ in one and whose noise is the same."""
    talk = Talk(neighbour, terms)
    assert talk.propose().kind == "agreed"
    (level,) = calibration.query_noises(terms.plan)
    moved = []
    for request, answer in zip(requests, answers, strict=True):
        one, two = wire.decode(answer), wire.decode(neighbour.answer(request))
        assert two.fields["asked"] == one.fields["asked"] == hashlib.sha256(request).hexdigest()
        left, right = (each.arrays["update0"].astype(float) for each in (one, two))
        moved.append(np.linalg.norm(left - right) * terms.sizes[terms.names.index(name)] / level.sensitivity[0])
    return moved
