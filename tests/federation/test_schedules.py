"""Random faults, many at once: whatever happens to messages, sites and the coordinator, what left is paid for, once."""

import random
import sqlite3
from collections import Counter

import pytest
import torch
from random_faults import ATTEMPTS, FAULTS, KILLED, RATES, corrupted

from sordino import wire
from sordino.errors import StoppedError
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger
from sordino.federation import messenger
from sordino.federation.coordinator import Coordinator
from sordino.training.artifacts import load_model

TOTAL = Counter()


class Kill(BaseException):
    pass


class RandomFaults:
    """A transport in which each message may meet a fault, and which looks into every ledger after each exchange."""

    def __init__(self, federation, rng, rate):
        self.federation, self.rng, self.rate = federation, rng, rate
        self.sites_by_node = {100 + k: federation.site(name) for k, name in enumerate(federation.names)}
        self.late, self.said, self.seen = [], {}, Counter()
        self.books = {}
        self.terms = None

    def sites(self):
        return list(self.sites_by_node)

    def exchange(self, requests, seconds, enough=None):
        dies = self.rng.random() < KILLED * bool(self.rate)
        before = dies and self.rng.random() < 0.5
        found = {}
        try:
            if before:
                raise Kill
            nodes = list(requests)
            self.rng.shuffle(nodes)
            for node in nodes:
                reply = self.deliver(node, requests[node])
                if reply is not None:
                    found[node] = reply
            if dies:
                raise Kill
            return found
        except Kill:
            self.seen["coordinator killed"] += 1
            raise
        finally:
            self.look()

    def deliver(self, node, request):
        for other, old in [late for late in self.late if self.rng.random() < 0.3]:
            self.late.remove((other, old))
            self.ask(other, old)
        fault = None
        if self.rng.random() < self.rate:
            (fault,) = self.rng.choices(list(FAULTS), FAULTS.values())
            self.seen[fault] += 1
        if fault == "message lost":
            return None
        if fault == "late duplicate":
            self.late.append((node, request))
        if fault == "site restarted":
            self.restart(node)
        if fault == "message corrupted":
            request = corrupted(self.rng, request)
        reply = self.ask(node, request, fault if fault and fault.startswith("killed") else None)
        if fault == "duplicate":
            reply = self.ask(node, request)
        if fault == "reply lost":
            return None
        return corrupted(self.rng, reply) if fault == "reply corrupted" and reply else reply

    def restart(self, node):
        self.sites_by_node[node] = self.federation.site(self.federation.names[node - 100])

    def ask(self, node, request, kill=None):
        """The site's answer; what it says has left it, whoever hears it."""
        DYING[0] = kill
        try:
            reply = self.sites_by_node[node].answer(request)
        except Kill:
            self.restart(node)
            return None
        finally:
            DYING[0] = None
        found = wire.decode(reply)
        if found.kind == "update":
            about = node, found.fields["run"], found.fields["t"]
            self.said.setdefault(about, set()).add(reply)
        return reply

    def look(self):
        """Spent >= released: of all that was said, exactly the plan's entries, and each round at most once."""
        for about, replies in self.said.items():
            assert len(replies) == 1, about
        for node, name in enumerate(self.federation.names, 100):
            if node not in self.books:
                self.books[node] = sqlite3.connect(self.federation.place(name) / "ledger.db")
            rows = self.books[node].execute(
                "SELECT plan, round, query, sensitivity, std, times, who, key <> '' FROM entries "
                "WHERE query <> 'survivors' ORDER BY seq"  # such a row releases nothing
            )
            rounds, plans = {}, {}
            for plan, t, *entry, keyed in rows.fetchall():
                rounds.setdefault((plan, t), []).append(entry)
                plans[plan, t] = plans.get((plan, t), 0) + keyed
            assert all(count == 1 for count in plans.values()), name
            for run, t in ((run, t) for who, run, t in self.said if who == node):
                assert (run, t) in rounds, (name, t)
            if not rounds:
                continue
            terms = self.terms or self.sites_by_node[node]._run(next(iter(rounds))[0]).terms
            self.terms = terms
            for (run, t), entries in rounds.items():
                assert run == terms.run
                site = self.sites_by_node[node]
                planned = [e._replace(who=site.account) for e in charges(terms.plan, node - 100, t, run)]
                assert entries == [[e.query, e.sensitivity, e.std, e.times, e.who] for e in planned], (name, t)

    def close(self):
        for book in self.books.values():
            book.close()


DYING = [None]


@pytest.fixture(autouse=True)
def killable(monkeypatch):
    monkeypatch.setattr(messenger, "POLL", 1e-4)
    charge = Ledger.charge

    def charged(self, entries, payload=None):
        dying, DYING[0] = DYING[0], None
        if dying == "killed before its charge":
            raise Kill
        charge(self, entries, payload)
        if dying == "killed after its charge":
            raise Kill

    monkeypatch.setattr(Ledger, "charge", charged)


def schedule(tiny, seed):
    rng = random.Random(seed)
    secure = rng.random() < 0.2
    count = rng.choice((3, 4) if secure else (3, 4, 5))
    keys = {"names": tuple("abcde")[:count], "rounds": 3 if secure else rng.choice((3, 3, 4))}
    keys |= {"deadline": 1e-3, "patience": 0.02}
    if secure:
        keys |= {"trust": "secure-aggregation", "dropouts": int(count > 3)}
    federation = tiny(rng.choice(("dp-fedsofim", "dp-scaffold")) if not secure else "dp-fedsofim", **keys)
    faults = RandomFaults(federation, rng, rng.choice(RATES))
    finished = False
    for attempt in range(ATTEMPTS):
        if attempt == ATTEMPTS - 1:
            faults.rate, TOTAL["calmed"] = 0, TOTAL["calmed"] + 1
        try:
            Coordinator(faults, federation.coordinator).run()
            finished = True
            break
        except Kill:
            TOTAL["resumed"] += 1
        except StoppedError:  # sites that did not connect, or that could not read the terms
            TOTAL["begun again"] += 1
    faults.look()
    faults.close()
    assert finished
    for name in federation.names:
        rounds = [t for _, t in federation.charged(name)]
        assert rounds == sorted(set(rounds))  # in order, each at most once
        assert set(rounds) <= set(range(keys["rounds"]))
        site = federation.site(name)
        with site.ledger() as ledger:
            assert ledger.spent_epsilon(site.account, 1e-5) <= 8 * (1 + 1e-6)
    model = load_model(federation.coordinator / "run" / "model.safetensors")[1]
    assert torch.isfinite(model).all()
    TOTAL.update(faults.seen)
    TOTAL["schedules"] += 1
    TOTAL["secure"] += secure
    TOTAL["rounds"] += keys["rounds"]
    TOTAL["abandoned"] += len({line["t"] for line in federation.progress("abandoned")})
    TOTAL["moved"] += bool(model.abs().max() > 0)
    TOTAL["update"] += len(faults.said)


def test_what_left_is_paid_for_once_whatever_fails(tiny):
    for seed in range(6):
        schedule(tiny, seed)


@pytest.mark.soak
def test_many_schedules_have_every_fault(tiny):
    """One test for all of them: their faults are counted together."""
    TOTAL.clear()
    for seed in range(160):
        schedule(tiny, seed)
    for fault, weight in FAULTS.items():
        assert TOTAL[fault] > 10 * weight, (fault, TOTAL)
    assert TOTAL["coordinator killed"] > 30
    assert TOTAL["resumed"] > 30
    assert TOTAL["secure"] > 10
    assert TOTAL["abandoned"] > 3
    assert TOTAL["moved"] > 90  # most runs came to something
    assert TOTAL["calmed"] < 20  # and most without a pause in the random faults
