"""A site with `ask = true` takes part in what a person approved, once, and in nothing else."""

import json
import tomllib
from dataclasses import replace

import pytest
import tomli_w

from sordino.cli import main
from sordino.errors import SordinoError, StoppedError
from sordino.federation import approvals
from sordino.federation.approvals import digest_of, studies

NORTH, SOUTH = "north", "south"


@pytest.fixture
def asking(tiny):
    federation = tiny(rounds=2)
    federation.configure(NORTH, ask=True, epsilon=40.0)
    return federation


def test_a_study_waits_until_a_person_approves_it(asking, capsys):
    site = asking.place(NORTH) / "site.toml"
    with pytest.raises(StoppedError, match="a person at the site has to approve this study first"):
        asking.run()
    assert asking.charged(NORTH) == []
    (study,) = studies(site.parent)
    assert study.state == "asked"
    assert study.facts["epsilon"] == 8.0
    assert main(["federate", "approve", str(site)]) == 0
    shown = capsys.readouterr().out
    assert study.digest[:12] in shown
    assert "asked" in shown
    assert main(["federate", "approve", str(site), "--yes", study.digest[:12]]) == 0
    capsys.readouterr()
    coordinator, _ = asking.run()  # proposes the same study under another name of the run
    assert len(asking.charged(NORTH)) == 2
    assert studies(site.parent)[0].state == "used"
    assert main(["federate", "approve", str(site), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "used"
    again = replace(coordinator.terms, run="cd" * 16)
    with pytest.raises(Exception, match="waits for a person"):
        approvals.check(site.parent, again)  # an approval is for one run
    assert studies(site.parent)[0].state == "asked"


def test_a_declined_study_stays_refused_until_it_is_approved(asking, talk):
    folder, terms = asking.place(NORTH), asking.terms()
    site = talk(asking.site(NORTH), terms)
    assert site.propose().fields["code"] == "approval"
    approvals.answer(folder, digest_of(terms)[:8], approved=False)
    assert site.propose().fields["code"] == "approval"
    assert asking.events(NORTH)[-1]["detail"].endswith("was declined by a person of this site")
    approvals.answer(folder, digest_of(terms)[:8], approved=True)
    assert site.propose().kind == "agreed"
    assert site.propose().kind == "agreed"  # the same run, asked again


def test_what_a_person_approved_is_what_runs(asking):
    terms = asking.terms()
    assert digest_of(terms) == digest_of(replace(terms, run="cd" * 16, derived={}, version="9"))
    values = tomllib.loads(terms.spec)
    for changed in (
        replace(terms, spec=tomli_w.dumps(values | {"epsilon": 8.5})),
        replace(terms, sizes=(terms.sizes[0] + 1, *terms.sizes[1:])),
        replace(terms, dropouts=1),
        replace(terms, evaluation=1.0, tests=(5,) * len(terms.names)),
    ):
        assert digest_of(changed) != digest_of(terms)


def test_answers_that_fit_no_study_are_refused(asking, talk):
    folder, terms = asking.place(NORTH), asking.terms()
    with pytest.raises(SordinoError, match="no study that waits begins so"):
        approvals.answer(folder, "0" * 12, approved=True)
    talk(asking.site(NORTH), terms).propose()
    with pytest.raises(SordinoError, match="at least 8 digits"):
        approvals.answer(folder, digest_of(terms)[:4], approved=True)
    assert studies(folder)[0].state == "asked"


def test_a_coordinator_cannot_fill_the_disk_with_questions(asking, monkeypatch):
    monkeypatch.setattr(approvals, "MOST_ASKED", 3)
    folder, terms = asking.place(NORTH), asking.terms()
    for k in range(6):
        with pytest.raises(Exception, match=r"waits for a person|studies wait"):
            approvals.check(folder, replace(terms, sizes=(k + 1, *terms.sizes[1:])))
    assert len(studies(folder)) == 3


def test_a_site_that_begins_to_ask_asks_about_runs_it_agreed_to_before(asking, talk):
    asking.configure(NORTH, ask=False)
    study = talk(asking.site(NORTH), asking.terms())
    assert study.propose().kind == "agreed"
    assert study.round(0).kind == "update"
    asking.configure(NORTH, ask=True)
    study.site = asking.site(NORTH)
    assert study.round(1).fields["code"] == "approval"
    approvals.answer(asking.place(NORTH), digest_of(study.terms)[:12], approved=True)
    assert study.round(1).kind == "update"
    assert [each.state for each in studies(asking.place(NORTH))] == ["used"]
    study.site = asking.site(NORTH)
    assert study.say("evaluate", {"run": study.terms.run, "terms": study.terms.sha256()}).fields["code"] == "malformed"


@pytest.mark.parametrize("batch", ["full", "poisson:4"])
def test_runs_that_wait_for_nobody_leave_the_reserve(tiny, talk, batch):
    """Each fits into the budget without the reserve, as long as the other, which lost its place, spends nothing."""
    federation = tiny(rounds=2, batch=batch)
    federation.configure(NORTH, epsilon=13.0, delta=1e-5, reserve_epsilon=4.0, study_idle=1e-9, most_studies=1)
    runs = [talk(federation.site(NORTH), federation.terms(run=2 * letter * 8)) for letter in ("ab", "cd")]
    assert [run.propose().kind for run in runs] == ["agreed", "agreed"]
    replies = [run.round(t) for run in runs for t in range(2)]
    assert [reply.kind for reply in replies[:2]] == ["update", "update"]
    assert replies[-1].fields["code"] == "approval"
    with federation.ledger(NORTH) as ledger:
        assert ledger.spent_epsilon(ledger.account(), 1e-5) <= 9.0
    approvals.answer(federation.place(NORTH), digest_of(runs[1].terms)[:12], approved=True)
    assert runs[1].round(1).kind == "update"


def test_a_reserve_that_is_set_later_counts_at_once(tiny, talk):
    federation = tiny(rounds=2)
    federation.configure(NORTH, epsilon=8.5, delta=1e-5)
    study = talk(federation.site(NORTH), federation.terms())
    assert [study.propose().kind, study.round(0).kind] == ["agreed", "update"]
    federation.configure(NORTH, epsilon=8.5, delta=1e-5, reserve_epsilon=2.0)
    study.site = federation.site(NORTH)
    assert study.round(1).fields["code"] == "approval"
    approvals.answer(federation.place(NORTH), digest_of(study.terms)[:12], approved=True)
    assert study.round(1).kind == "update"


def test_a_run_keeps_what_it_was_promised_while_another_uses_the_reserve(tiny, talk):
    federation = tiny(rounds=2)
    federation.configure(NORTH, epsilon=13.0, delta=1e-5, reserve_epsilon=4.0, most_studies=2)
    first, second = (talk(federation.site(NORTH), federation.terms(run=2 * letter * 8)) for letter in ("ab", "cd"))
    assert [first.propose().kind, first.round(0).kind] == ["agreed", "update"]
    assert second.propose().fields["code"] == "approval"
    approvals.answer(federation.place(NORTH), digest_of(second.terms)[:12], approved=True)
    assert [second.propose().kind, second.round(0).kind, second.round(1).kind] == ["agreed", "update", "update"]
    assert first.round(1).kind == "update"


def test_a_site_that_does_not_ask_is_as_before(asking):
    asking.configure(NORTH, ask=False)
    asking.run()
    assert studies(asking.place(NORTH)) == []
