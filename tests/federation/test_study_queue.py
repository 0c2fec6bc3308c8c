"""Several studies at the same sites: one after the other, within one limit, without waiting for each other for ever."""

import json
import threading
import time
from dataclasses import replace

import pytest

from sordino.cli import main
from sordino.errors import SordinoError, StoppedError
from sordino.evidence.ledger import NOTES, Ledger
from sordino.federation import approvals, coordinator, promises, study_queue
from sordino.federation.config import SiteConfig
from sordino.federation.study_queue import StudyQueue

NORTH = "north"
FIRST, SECOND, THIRD = "11" * 16, "22" * 16, "33" * 16


@pytest.fixture
def busy(tiny):
    """Sites with room for one study at a time and for two in all: 8 + 8 compose to less than 13."""
    federation = tiny(rounds=2)
    for name in federation.names:
        federation.configure(name, most_studies=1, epsilon=13.0, delta=1e-5)
    return federation


def run_of(federation, talk, run):
    """The site's answers to a study of its own, through to the end."""
    return talk(federation.site(NORTH), federation.terms(run=run))


def end(study):
    for t in range(study.terms.plan.rounds):
        assert study.round(t).kind == "update"
    fields = {"run": study.terms.run, "terms": study.terms.sha256(), "done": 2}
    assert study.say("finish", fields, {"theta": study.terms.model.init().numpy()}).kind == "finished"


def test_studies_wait_in_their_order_and_a_third_does_not_fit(busy, talk):
    first, second, third = (run_of(busy, talk, run) for run in (FIRST, SECOND, THIRD))
    assert first.propose().kind == "agreed"
    assert second.propose().fields == {
        "code": "queued",
        "reason": "the site is busy with another study",
        "place": 1,
        "ahead": FIRST,
    }
    end(first)
    assert third.propose().fields["place"] == 2  # the free place belongs to the second
    assert second.propose().kind == "agreed"
    refusal = third.propose()  # what the second was promised leaves too little
    assert refusal.fields["code"] == "budget"
    assert "promised to other studies" in refusal.fields["reason"]
    end(second)
    assert third.propose().fields["code"] == "budget"
    with busy.ledger(NORTH) as ledger:
        assert 8 < ledger.spent_epsilon(ledger.account(), 1e-5) <= 13
    assert [line["place"] for line in busy.events(NORTH) if line["what"] == "queued"] == [1, 2]


def test_a_study_that_goes_silent_loses_its_place_but_not_its_agreement(busy, talk, monkeypatch):
    first, second = (run_of(busy, talk, run) for run in (FIRST, SECOND))
    assert first.propose().kind == "agreed"
    assert first.round(0).kind == "update"
    assert second.propose().fields["place"] == 1
    now = time.time()
    monkeypatch.setattr(study_queue.time, "time", lambda: now + 1000)
    assert second.propose().kind == "agreed"
    monkeypatch.setattr(study_queue.time, "time", lambda: now)
    assert first.round(1).kind == "update"


def test_a_coordinator_that_stops_asking_leaves_the_queue(busy, talk, monkeypatch):
    first, second, third = (run_of(busy, talk, run) for run in (FIRST, SECOND, THIRD))
    first.propose()
    assert second.propose().fields["place"] == 1
    assert third.propose().fields["place"] == 2
    now = time.time()
    monkeypatch.setattr(study_queue.time, "time", lambda: now + 121)
    assert third.propose().fields["place"] == 1


def test_a_withdrawn_study_gives_its_place_and_its_approval_back(busy, talk):
    busy.configure(NORTH, most_studies=1, ask=True)
    folder = busy.place(NORTH)
    first, second = (run_of(busy, talk, run) for run in (FIRST, SECOND))
    about = {"run": FIRST, "terms": first.terms.sha256()}
    assert first.propose().fields["code"] == "approval"
    digest = approvals.digest_of(first.terms)
    approvals.answer(folder, digest[:12], approved=True)
    assert first.propose().kind == "agreed"
    assert approvals.studies(folder)[0].state == "used"
    assert first.say("withdraw", about).kind == "withdrawn"
    assert approvals.studies(folder)[0].state == "approved"
    assert not (folder / "runs" / FIRST).exists()
    assert second.propose().kind == "agreed"
    assert second.round(0).kind == "update"
    assert second.say("withdraw", {"run": SECOND, "terms": second.terms.sha256()}).fields["code"] == "order"
    assert busy.charged(NORTH) == [(SECOND, 0)]


def test_a_withdrawn_run_that_needed_no_approval_gives_none_back(tiny, talk):
    """The reserve is for runs that a person approved: one approval is for one run, and another run cannot return it."""
    federation = tiny(rounds=1)
    cost = []
    with Ledger(federation.folder / "costs.db") as ledger:
        for k in range(4):
            entries = promises.cost(federation.terms(), 0, "account")
            ledger.charge([entry._replace(plan=f"run {k}") for entry in entries])
            cost.append(ledger.spent_epsilon("account", 1e-3))
    free = (cost[1] + cost[2]) / 2  # a third run needs a person
    federation.configure(NORTH, epsilon=cost[3], reserve_epsilon=cost[3] - free)
    folder, site = federation.place(NORTH), federation.site(NORTH)
    runs = [talk(site, federation.terms(run=digits * 16)) for digits in ("d1", "d2", "aa", "bb", "cc")]
    spare, other, approved, third, last = runs

    def withdraw(each):
        return each.say("withdraw", {"run": each.terms.run, "terms": each.terms.sha256()}).kind

    assert spare.propose().kind == other.propose().kind == "agreed"
    assert approved.propose().fields["code"] == "approval"
    approvals.answer(folder, approvals.digest_of(approved.terms)[:12], approved=True)
    assert approved.propose().kind == "agreed"
    assert approved.round(0).kind == "update"
    for each in (spare, other):
        assert withdraw(each) == "withdrawn"
        assert approvals.studies(folder)[0].state == "used"
    assert third.propose().kind == "agreed"
    assert third.round(0).kind == "update"
    assert last.propose().fields["code"] == "approval", "nobody approved a second run"
    with federation.ledger(NORTH) as ledger:
        assert ledger.spent_epsilon(ledger.account(), 1e-3) <= free


def test_a_study_that_waits_is_withdrawn_by_its_own_coordinator_alone(busy, talk):
    first, second, third = (run_of(busy, talk, run) for run in (FIRST, SECOND, THIRD))
    first.propose()
    assert second.propose().fields["place"] == 1
    assert third.propose().fields == {**second.propose().fields, "place": 2}
    foreign = {"run": SECOND, "terms": third.terms.sha256()}  # the third was told the number of the second
    assert third.say("withdraw", foreign).fields["code"] == "unknown-run"
    assert third.propose().fields["place"] == 2
    assert second.say("withdraw", {"run": SECOND, "terms": second.terms.sha256()}).kind == "withdrawn"
    assert third.propose().fields["place"] == 1
    assert [line["run"] for line in busy.events(NORTH) if line["what"] == "withdrawn"] == [SECOND]


def test_terms_that_one_site_refuses_leave_the_queues_of_the_others(busy, talk):
    """Otherwise the next study of the same coordinator would wait behind them for two minutes."""
    assert run_of(busy, talk, FIRST).propose().kind == "agreed"  # north is busy
    busy.configure("south", most_studies=1, epsilon=13.0, delta=1e-5, methods=["dp-fedgd"])
    with pytest.raises(StoppedError, match="refused by"):
        busy.run()
    assert [line["place"] for line in busy.events(NORTH) if line["what"] == "queued"] == [1]
    assert busy.site(NORTH).queue.waiting() == []


def test_the_reserve_is_for_studies_that_a_person_approved(busy, talk):
    busy.configure(NORTH, epsilon=13.0, delta=1e-5, reserve_epsilon=4.0, most_studies=1)
    first, second = (run_of(busy, talk, run) for run in (FIRST, SECOND))
    assert first.propose().kind == "agreed"  # 8 of the 9 that are free for everybody
    end(first)
    assert second.propose().fields["code"] == "approval"
    approvals.answer(busy.place(NORTH), approvals.digest_of(second.terms)[:12], approved=True)
    assert second.propose().kind == "agreed"
    busy.configure(NORTH, epsilon=13.0, reserve_epsilon=13.0)
    with pytest.raises(SordinoError, match="reserve_epsilon: 13"):
        SiteConfig.read(busy.place(NORTH) / "site.toml")


def test_a_queue_has_an_end(busy, monkeypatch):
    monkeypatch.setattr(study_queue, "MOST_WAITING", 1)
    (busy.place(NORTH) / "runs" / FIRST).mkdir(parents=True)
    (busy.place(NORTH) / "runs" / FIRST / "secret").touch()
    queue = StudyQueue(busy.place(NORTH), 1, 900.0)
    queue.heard(FIRST)
    assert queue.enter(SECOND) == (1, FIRST, True)
    assert queue.enter(SECOND) == (1, FIRST, False)
    with pytest.raises(Exception, match="1 studies wait already"):
        queue.enter(THIRD)
    assert queue.leave(FIRST)
    assert queue.enter(SECOND) is None
    assert not queue.leave(SECOND)


class Shared:
    """Messages to the sites of two coordinators; a round takes a moment, as it does over a network."""

    def __init__(self, federation, order):
        self.answers = {100 + k: federation.site(name).answer for k, name in enumerate(federation.names)}
        self.order = order

    def sites(self):
        return list(self.answers)

    def exchange(self, requests, seconds, enough=None):
        time.sleep(0.02)
        return {node: self.answers[node](requests[node]) for node in sorted(requests, reverse=self.order)}


def coordinate(federation, name, number, problems):
    """Run a study of its own from another coordinator's folder, in a thread."""
    place = federation.folder / name
    if not place.exists():
        place.mkdir()
        for file in ("spec.toml", "federation.toml", "roster.toml"):
            (place / file).write_bytes((federation.coordinator / file).read_bytes())

    def work():
        try:
            coordinator.serve(Shared(federation, bool(number % 2)), place)
        except SordinoError as error:
            problems[name] = str(error)

    return threading.Thread(target=work)


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_two_coordinators_finish_one_after_the_other_and_a_third_is_refused(tiny, monkeypatch, trust):
    monkeypatch.setattr(coordinator, "ASKED_AGAIN", 0.05)
    federation = tiny(rounds=2, trust=trust)
    for name in federation.names:
        federation.configure(name, most_studies=1, epsilon=13.0, delta=1e-5)
    problems = {}
    studies = [coordinate(federation, f"study{k}", k, problems) for k in range(2)]
    for study in studies:
        study.start()
    for study in studies:
        study.join(60)
        assert not study.is_alive(), "they wait for each other"
    assert problems == {}
    for name in federation.names:
        rounds = federation.charged(name)
        runs = list(dict.fromkeys(run for run, _ in rounds))
        assert rounds == [(run, t) for run in runs for t in range(2)], "one after the other"
        with federation.ledger(name) as ledger:
            assert 8 < ledger.spent_epsilon(ledger.account(), 1e-5) <= 13
    third = coordinate(federation, "study2", 2, problems)
    third.start()
    third.join(60)
    assert "the site's own limit does not allow it, with what it spent" in problems["study2"]
    assert all(len(federation.charged(name)) == 4 for name in federation.names)


def test_a_study_with_a_larger_number_gives_its_places_back(tiny, talk, monkeypatch):
    monkeypatch.setattr(coordinator, "ASKED_AGAIN", 0.05)
    federation = tiny(rounds=2)
    for name in federation.names:
        federation.configure(name, most_studies=1)
    other = federation.terms(run="00" * 16)
    holder = talk(federation.site("west"), other)
    assert holder.propose().kind == "agreed"
    problems = {}
    study = coordinate(federation, "study0", 0, problems)
    study.start()
    until = time.monotonic() + 20
    while not any(line["what"] == "withdrawn" for line in federation.events(NORTH)):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert StudyQueue(federation.place(NORTH), 1, 900.0).open_studies() == []
    assert holder.say("withdraw", {"run": other.run, "terms": other.sha256()}).kind == "withdrawn"
    study.join(60)
    assert problems == {}
    assert len(federation.charged(NORTH)) == 2


def test_a_coordinator_does_not_wait_for_ever(busy, talk, monkeypatch):
    monkeypatch.setattr(coordinator, "ASKED_AGAIN", 0.05)
    assert run_of(busy, talk, FIRST).propose().kind == "agreed"
    path = busy.coordinator / "federation.toml"
    path.write_text(path.read_text() + "queue_patience = 0.1\n")
    with pytest.raises(StoppedError, match="refused by north: the site is busy with another study"):
        busy.run()
    (line,) = busy.progress("queued")
    assert (line["site"], line["place"]) == (NORTH, 1)
    assert busy.charged("south") == []
    assert not [path for path in (busy.place("south") / "runs").iterdir() if not path.name.startswith(".")]


def test_an_operator_sees_the_studies_and_takes_a_place_away(busy, talk, capsys):
    first, second = (run_of(busy, talk, run) for run in (FIRST, SECOND))
    first.propose()
    second.propose()
    site = str(busy.place(NORTH) / "site.toml")
    assert main(["federate", "studies", site, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["run"], each["state"]) for each in shown] == [(FIRST, "open"), (SECOND, "place 1")]
    assert main(["federate", "studies", site, "--drop", FIRST[:8]]) == 0
    assert "loses its place" in capsys.readouterr().out
    assert second.propose().kind == "agreed"
    assert main(["federate", "studies", site, "--drop", "ffffffff"]) == 2
    assert "no study" in capsys.readouterr().err


def test_changed_terms_of_a_waiting_study_are_another_question(busy, talk):
    first, second = (run_of(busy, talk, run) for run in (FIRST, SECOND))
    first.propose()
    assert second.propose().fields["place"] == 1
    assert second.propose(replace(second.terms, run=THIRD)).fields["place"] == 2
    with busy.ledger(NORTH) as ledger:
        assert not [row for row in ledger.rows() if row.query not in NOTES]
