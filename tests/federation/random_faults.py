"""Random faults, many at once: what may befall a message, a site or the coordinator, and how often."""

import json
import os
import random
import signal
import sqlite3
from collections import Counter
from pathlib import Path

from sordino import wire
from sordino.errors import StoppedError
from sordino.federation.coordinator import Coordinator

FAULTS = {
    "message lost": 4,
    "reply lost": 4,
    "duplicate": 4,
    "late duplicate": 4,
    "site restarted": 4,
    "killed before its charge": 2,
    "killed after its charge": 2,
    "message corrupted": 3,
    "reply corrupted": 3,
}
RATES = (0.05, 0.15, 0.3)  # of a message to meet a fault, one for each schedule
KILLED = 0.04  # of an exchange, before or after it: the coordinator's end
ATTEMPTS = 12  # to come to an end; the last is calm


def corrupted(rng, data):
    at = rng.randrange(len(data))
    # Terms that were changed and still read are other terms, and another number of records another site's word:
    # those are cut.
    alone = b'"kind":"terms"' in data or b'"kind":"hello"' in data
    how = 0 if alone else rng.randrange(3)
    if how == 0:
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + (how == 1) :]


class RandomFaults:
    """A transport over a real link in which each message may meet a fault; sites are told when to die by a file, and
    after each exchange every ledger is held against what left its site."""

    def __init__(self, transport, seed, rate, notes, sites, count, terms):
        self.transport, self.rate, self.notes, self.places, self.terms = transport, rate, notes, sites, terms
        self.rng = random.Random(f"{seed} {count}")  # other faults after each restart
        self.seen, self.late, self.names = Counter(), [], {}

    def sites(self):
        return self.transport.sites()

    def exchange(self, requests, seconds, enough=None):
        rng = self.rng
        dies = rng.random() < KILLED * bool(self.rate)
        before = dies and rng.random() < 0.5
        fates = {node: self.fate() for node in sorted(requests)}
        if before:
            self.die()
        for node, old in [late for late in self.late if rng.random() < 0.3]:
            self.late.remove((node, old))
            self.transport.exchange({node: old}, seconds)
        self.late += [(node, request) for node, request in requests.items() if fates[node] == "late duplicate"]
        sent = {}
        for node, request in requests.items():
            if fates[node] in ("site restarted", "killed before its charge", "killed after its charge"):
                (self.notes / f"dying-{self.names.get(node)}").write_text(fates[node])
            if fates[node] != "message lost":
                sent[node] = corrupted(rng, request) if fates[node] == "message corrupted" else request
        replies = self.transport.exchange(sent, seconds) if sent else {}
        if again := {node: request for node, request in sent.items() if fates[node] == "duplicate"}:
            replies |= self.transport.exchange(again, seconds)
        self.learn(replies)
        self.look()
        if dies:
            self.die()
        found = {node: reply for node, reply in replies.items() if fates[node] != "reply lost"}
        return {n: corrupted(rng, r) if r and fates[n] == "reply corrupted" else r for n, r in found.items()}

    def fate(self):
        if self.rng.random() >= self.rate:
            return ""
        (fault,) = self.rng.choices(list(FAULTS), FAULTS.values())
        self.seen[fault] += 1
        return fault

    def learn(self, replies):
        for node, reply in replies.items():
            found = wire.decode(reply) if reply[:4] == wire.MAGIC else None
            if found and found.kind == "hello":
                self.names[node] = found.fields["name"]

    def die(self):
        self.seen["coordinator killed"] += 1
        self.keep()
        os.kill(os.getpid(), signal.SIGKILL)

    def keep(self):
        with open(self.notes / "random_faults.jsonl", "a") as file:
            file.write(json.dumps(self.seen) + "\n")
        self.seen.clear()

    def look(self):
        """Spent >= released: what left a site in this run stands in its ledger, and no round has two answers."""
        run = json.loads(self.terms.read_text())["run"] if self.terms.exists() else None
        for place in self.places:
            path = self.notes / f"left-{place.name}.jsonl"
            left = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            mine = [line for line in left if line["kind"] == "update" and line["run"] == run]
            said = {(line["run"], line["t"], line["digest"]) for line in mine}
            paid = charged_rounds(place / "ledger.db")
            bad = [(run, t) for run, t, _ in said if (run, t) not in paid]
            bad += [about for about, times in Counter((run, t) for run, t, _ in said).items() if times > 1]
            if bad:
                with open(self.notes / "violations.jsonl", "a") as file:
                    file.write(json.dumps({"site": place.name, "rounds": bad}) + "\n")


def charged_rounds(path):
    """(run, round) of every row of a ledger; none where the site has made none yet, and none is made here."""
    if not path.exists():
        return set()
    book = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        made = book.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchall()
        return set(book.execute("SELECT plan, round FROM entries")) if made else set()
    finally:
        book.close()


def run_with_faults(transport, place, name, notes, sites):
    """The run in `place`, begun again as often as it fails."""
    rng = random.Random(name)
    rate, tries, terms = rng.choice(RATES), Path(notes / f"tries-{name}"), place / "run" / "terms.json"
    while not (place / "run" / "certificate.json").exists():
        count = int(tries.read_text()) if tries.exists() else 0
        tries.write_text(str(count + 1))
        faults = RandomFaults(transport, name, rate if count < ATTEMPTS - 1 else 0, notes, sites, count, terms)
        try:
            Coordinator(faults, place).run()
        except StoppedError:  # sites that did not connect, rounds without a result, terms that could not be read
            faults.seen["begun again"] += 1
        faults.keep()
