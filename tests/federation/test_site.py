"""The site decides: what it refuses, when, and that nothing but what is listed here ever leaves it."""

import hashlib
import json
import os
import re
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch
from messages import NUMBERS, ROUNDS, SIZE, SPEC, WORDS, put

import sordino
from sordino import secagg, wire
from sordino.cli import main
from sordino.core import Broadcast
from sordino.data.sources import load
from sordino.engines.schedule import round_plans
from sordino.errors import OverspentError, Refused, SordinoError, WireError
from sordino.evidence import ledger as ledgers
from sordino.evidence import public
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger
from sordino.evidence.spent import RESERVED, Charge
from sordino.federation import site as site_module
from sordino.federation import site_data as data_module
from sordino.federation import site_run as run_module
from sordino.federation.policy import agree, check_rules
from sordino.federation.refusal import REASONS
from sordino.federation.run_keys import roster_of_run
from sordino.federation.site_run import SiteRun
from sordino.federation.terms import against_terms
from sordino.operations.doctor import doctor
from sordino.privacy import calibration, spending
from sordino.secagg import Identity, Roster
from sordino.training.verify_run import verify_run
from tests.support import tiers

NORTH, FOUR = "north", tuple("abcd")


@pytest.fixture
def touched(monkeypatch):
    """Who read the records, in order: nobody, where a refusal comes first."""
    seen = []
    oracle = run_module.oracle
    monkeypatch.setattr(data_module, "load", lambda *a, **k: (seen.append("load"), load(*a, **k))[1])
    monkeypatch.setattr(run_module, "oracle", lambda *a, **k: (seen.append("oracle"), oracle(*a, **k))[1])
    return seen


def refused(federation, reply, code, name=NORTH):
    """With a code and a constant text, and a line in the site's own log."""
    assert reply.kind == "refused", reply.kind
    assert reply.fields == {"code": code, "reason": REASONS[code]}
    assert reply.arrays == {}
    last = federation.events(name)[-1]
    assert (last["what"], last["code"]) == ("refused", code)
    return last["detail"]


# --------------------------------------------------------------------------------------------------------------- terms


@pytest.mark.parametrize(("spec", "word"), SPEC, ids=[str(spec) for spec, _ in SPEC])
def test_a_spec_with_what_has_no_place_in_it_is_refused_before_the_data_are_touched(tiny, talk, touched, spec, word):
    federation = tiny()
    terms = federation.terms(spec)
    talk = talk(federation.site(NORTH), terms)
    touched.clear()
    assert word in refused(federation, talk.propose(), "policy")
    assert touched == []
    assert list((federation.place(NORTH) / "runs").iterdir()) == []
    assert federation.charged(NORTH) == []


def test_a_spec_is_a_flat_list_of_keys(tiny, talk, touched):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms({"client_epsilon": {"0": 1e6}}))
    touched.clear()
    refused(federation, talk.propose(), "malformed")
    assert touched == []


@pytest.mark.parametrize("spec", [{"epsilon": float("inf")}, {"epsilon": -1.0}, {"delta": 0.0}, {"rounds": 0}])
def test_a_plan_that_cannot_be_made_is_refused_before_the_data_are_asked_anything(tiny, talk, touched, spec):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms(spec))
    refused(federation, talk.propose(), "policy")
    assert "oracle" not in touched
    assert list((federation.place(NORTH) / "runs").iterdir()) == []
    assert federation.charged(NORTH) == []


def test_a_method_that_takes_a_file_gets_none_from_the_server(tiny, talk, touched):
    federation = tiny("dp-adadps")
    talk = talk(federation.site(NORTH), federation.terms({"public": "/etc/passwd"}))
    touched.clear()
    assert "file" in refused(federation, talk.propose(), "policy")
    assert touched == []


SITE = [  # what the site wrote into site.toml, and what its log says of the terms then
    ({"methods": ["dp-scaffold"]}, {}, "method"),
    ({"trust": ["secure-aggregation"]}, {}, "trust"),
    ({"most_rounds": 2}, {}, "most_rounds"),
    ({"run_epsilon": 7.9}, {}, "requested"),
    ({"run_epsilon": 4.0}, {"requested_epsilons": {"north": 4.1}}, "requested"),
    ({"run_epsilon": 4.0}, {"requested_epsilons": {"south": 4.0}}, "requested"),
    ({"delta": 1e-6}, {}, "delta"),
    ({"text": "body"}, {}, "does not read text"),
    ({}, {"names": ("east", "south", "west")}, "listed"),
]


@pytest.mark.parametrize(("keys", "changes", "word"), SITE)
def test_the_sites_own_rules_come_before_its_data(tiny, talk, touched, keys, changes, word):
    federation = tiny()
    terms = federation.terms(**changes)
    federation.configure(NORTH, **keys)
    talk = talk(federation.site(NORTH), terms)
    touched.clear()
    assert word in refused(federation, talk.propose(), "policy")
    assert touched == []
    assert federation.charged(NORTH) == []


def test_a_record_count_that_is_not_the_sites_own_would_change_its_noise_and_is_refused(tiny, talk, touched):
    federation = tiny()
    terms = federation.terms()
    for sizes in ((terms.sizes[0] + 1, *terms.sizes[1:]), (terms.sizes[0] - 1, *terms.sizes[1:])):
        reply = talk(federation.site(NORTH), replace(terms, sizes=sizes)).propose()
        assert "records" in refused(federation, reply, "policy")
    assert "oracle" not in touched


@pytest.mark.parametrize("changes", [{"features": 5}, {"classes": ("0", "1")}, {"classes": ()}])
def test_data_of_another_form_are_not_bent(tiny, talk, touched, changes):
    federation = tiny()
    refused(federation, talk(federation.site(NORTH), federation.terms(**changes)).propose(), "policy")
    assert "oracle" not in touched


@pytest.mark.parametrize("how", ["another hash", "none", "another order", "a stranger's card", "a threshold too low"])
def test_the_roster_is_the_sites_own(tiny, talk, touched, how):
    names = ("a", "b", "c", "d")
    federation = tiny(trust="secure-aggregation", names=names)
    terms = federation.terms()
    if how == "another hash":
        terms = replace(terms, roster="0" * 64)
    elif how == "none":
        terms = replace(terms, roster="")
    elif how == "another order":
        terms = replace(terms, names=("a", "c", "b", "d"))
    elif how == "a threshold too low":  # of four, two must be honest and there
        terms = replace(terms, dropouts=2)
    else:  # the server's own key in the place of d's
        roster = Roster((*federation.roster.sites[:3], Identity.make("d").card))
        terms = replace(terms, roster=roster.sha256())
    touched.clear()
    refused(federation, talk(federation.site("a"), terms).propose(), "policy", "a")
    assert touched == []


def test_an_unproved_plan_is_refused_though_it_could_be_run(tiny, talk, touched):
    federation = tiny("dp-fednew", limit_by="paper-xi")
    talk = talk(federation.site(NORTH), federation.terms())
    assert "proved" in refused(federation, talk.propose(), "policy")
    assert "oracle" not in touched


def test_terms_that_were_agreed_upon_cannot_be_changed_and_may_be_said_again(tiny, talk):
    federation = tiny()
    terms = federation.terms()
    talk = talk(federation.site(NORTH), terms)
    first = talk.propose()
    assert first.kind == "agreed"
    assert talk.propose().fields == first.fields
    for other in (
        federation.terms({"clip": 2.0}),
        federation.terms({"rounds": 4}),
        replace(terms, requested_epsilons={"south": 1.0}),
    ):
        refused(federation, talk.propose(other), "changed")
    assert json.loads((federation.folder_of(NORTH) / "terms.json").read_text())["spec"] == terms.spec


def test_a_run_that_the_ledger_cannot_pay_to_its_end_is_refused_at_its_beginning(tiny, talk, touched):
    federation = tiny()
    federation.configure(NORTH, epsilon=9.0, delta=1e-5)
    talk = talk(federation.site(NORTH), federation.terms())
    with talk.site.ledger() as ledger:  # enough is left for two of the three rounds
        ledger.charge([Charge(talk.site.account, 0, "elsewhere", 1.0, 1.0, 1, "another run")])
    refused(federation, talk.propose(), "budget")
    assert "oracle" not in touched
    assert list((federation.place(NORTH) / "runs").iterdir()) == []
    assert talk.round(0).fields["code"] == "unknown-run"


def test_a_run_with_minibatches_is_reserved_as_a_whole_before_its_first_answer(tiny, talk, touched):
    """Whoever stops it early and starts another pays for both as wholes; a refusal before the first answer is free."""
    federation = tiny("dp-fedgd", batch="poisson:4")
    federation.configure(NORTH, epsilon=12.0, delta=1e-5)
    site = federation.site(NORTH)
    first = talk(site, federation.terms())
    assert first.propose().kind == "agreed"
    with site.ledger() as ledger:
        assert len(ledger) == 0, "a proposal costs nothing"
    assert first.round(0).kind == "update"
    with site.ledger() as ledger:
        reserved, paid = ledger.rows()
        assert (reserved.round, reserved.times, paid.round, paid.times) == (RESERVED, 3, 0, 1)
        whole = ledger.spent_epsilon(site.account, 1e-5)
        assert whole == pytest.approx(spending.epsilon(first.terms.plan), rel=2e-3)
    first.round(1)
    with site.ledger() as ledger:
        assert ledger.spent_epsilon(site.account, 1e-5) == whole, "its rounds use up what was reserved"
        assert ledger.caveat(site.account) == ""
        assert ledger.audit() == []
    shown = federation.folder / "shown.json"
    assert main(["ledger", "show", str(federation.place(NORTH) / "ledger.db"), "--json", str(shown)]) == 0
    (run,) = json.loads(shown.read_text())["runs"]
    assert (run["rounds"], run["releases"], run["reserved"]) == (2, 2, 3)


def test_any_choice_in_site_toml_lets_minibatches_count_after_a_first_run_without_them(tiny, talk):
    federation = tiny("dp-fedgd", epsilon=3.0)
    federation.configure(NORTH, epsilon=6.0, delta=1e-5, any_choice=True)
    federation.configure("south", epsilon=6.0, delta=1e-5)
    later = federation.terms({"batch": "poisson:4"}, run="cd" * 16)
    for name, answer in ((NORTH, "agreed"), ("south", "refused")):
        first = talk(federation.site(name), federation.terms())
        assert first.propose().kind == "agreed"
        for t in range(3):
            assert first.round(t).kind == "update"
        site = federation.site(name)  # started again: the statement is there once
        assert talk(site, later).propose().kind == answer, name
        with site.ledger() as ledger:
            assert [kind for _, kind, _ in ledger.statements()] == (["any choice"] if name == NORTH else [])
            assert ledger.audit() == []
    told = {check.about: check for check in doctor(federation.place(NORTH) / "site.toml")}
    assert "minibatches of later runs count as such" in told["any_choice"].says
    talk(federation.site(NORTH), later).round(0)
    with federation.site(NORTH).ledger() as ledger:
        assert ledger.caveat(ledger.account()) == "", "it was said beforehand, so no part of delta comes on top"


def test_any_choice_in_site_toml_after_a_first_run_without_minibatches_is_refused(tiny, talk):
    """Said then, limits would hold at a larger delta: a person says that with a command, not a file by the way."""
    federation = tiny("dp-fedgd")
    first = talk(federation.site(NORTH), federation.terms())
    first.propose()
    federation.configure(NORTH, any_choice=True)
    (told,) = (check for check in doctor(federation.place(NORTH) / "site.toml") if check.about == "any_choice")
    assert "`sordino federate join` states" in told.says
    federation.configure(NORTH)
    first.round(0)
    federation.configure(NORTH, any_choice=True)
    with pytest.raises(SordinoError, match=r"too late to say it beforehand.*sordino ledger any-choice.*6\.25%"):
        federation.site(NORTH)
    (told,) = (check for check in doctor(federation.place(NORTH) / "site.toml") if check.about == "any_choice")
    assert not told.fine
    assert "too late" in told.says
    with federation.ledger(NORTH) as ledger:
        assert ledger.statements() == []
        ledger.allow_any_choice()  # as the command does
    assert federation.site(NORTH).config.any_choice


def test_any_choice_after_a_first_run_with_minibatches_changes_nothing(tiny, talk):
    federation = tiny("dp-fedgd", batch="poisson:4")
    first = talk(federation.site(NORTH), federation.terms())
    first.propose()
    first.round(0)
    with federation.ledger(NORTH) as ledger:
        who = ledger.account()
        spent = ledger.spent_epsilon(who, 1e-5)
    federation.configure(NORTH, any_choice=True)
    with federation.site(NORTH).ledger() as ledger:
        assert (ledger.spent_epsilon(who, 1e-5), ledger.caveat(who)) == (spent, "")
        assert first.round(1).kind == "update"
        ledger.charge([Charge(who, 0, "elsewhere", 1.0, 10.0, 1, "another run")])
        assert ledger.caveat(who) == ""


def test_any_choice_contradicts_a_fixed_plan(tiny):
    federation = tiny()
    with federation.site(NORTH).ledger() as ledger:
        ledger.state_fixed_plan("protocol of 3 March")
    federation.configure(NORTH, any_choice=True)
    with pytest.raises(SordinoError, match="fixed beforehand, which cannot be taken back; remove the key"):
        federation.site(NORTH)


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_streams_of_more_rounds_than_dense_factors_have_run_in_the_open_alone(tiny, talk, trust):
    federation = tiny("dp-ftrl", trust, rounds=5000, names=FOUR)
    federation.configure("a", most_rounds=5000)
    site = talk(federation.site("a"), federation.terms())
    reply = site.propose()
    if trust == "secure-aggregation":
        refused(federation, reply, "policy", name="a")
        assert "rounding is accounted for up to 4,096 of them" in federation.events("a")[-1]["detail"]
        return
    assert reply.kind == "agreed"
    assert [site.round(t).kind for t in (0, 1, 4999)] == ["update"] * 3
    assert [t for _, t in federation.charged("a")] == [0, 1, 4999]


def test_a_limit_is_not_loosened_by_editing_site_toml(tiny, talk):
    federation = tiny()
    federation.configure(NORTH, epsilon=2.0)
    federation.site(NORTH)
    federation.configure(NORTH, epsilon=50.0)
    with pytest.raises(SordinoError, match="only be tightened"):
        federation.site(NORTH)
    federation.configure(NORTH, epsilon=1.0)
    refused(federation, talk(federation.site(NORTH), federation.terms()).propose(), "policy")


# -------------------------------------------------------------------------------------------------------------- rounds


def test_a_letter_that_is_not_of_the_agreed_form_is_refused_before_the_data_are_touched(tiny, talk, touched):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    assert talk.propose().kind == "agreed"
    touched.clear()
    for code, fields, arrays in ROUNDS:
        refused(federation, talk.round(0, fields, arrays), code)
    assert touched == []
    assert federation.charged(NORTH) == []
    assert talk.round(0).kind == "update"  # and the site is as well as before
    assert federation.charged(NORTH) == [(talk.terms.run, 0)]


@pytest.mark.parametrize("k", range(len(WORDS)))
def test_a_word_is_a_finite_vector_of_the_models(tiny, talk, touched, k):
    federation = tiny("dp-scaffold", steps=2)
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    touched.clear()
    refused(federation, talk.round(0, word=WORDS[k]), "malformed")
    assert touched == []
    assert federation.charged(NORTH) == []
    assert talk.round(0, word=NUMBERS).arrays["update0"].shape == (SIZE,)


def test_a_round_is_answered_once_and_the_same_letter_gets_the_same_bytes(tiny, talk):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    request = talk.request(1)
    reply = talk.site.answer(request)
    for again in (talk.site, federation.site(NORTH)):  # also after a restart
        assert again.answer(request) == reply
        talk.site = again
        refused(federation, talk.round(1, arrays={"theta": put(1)}), "replayed")
        refused(federation, talk.round(0), "order")  # rounds do not go back
        refused(federation, talk.round(0, arrays={"theta": put(1)}), "order")
    assert federation.charged(NORTH) == [(talk.terms.run, 1)]
    assert talk.round(2).kind == "update"
    refused(federation, talk.round(3), "order")  # more than planned
    assert federation.charged(NORTH) == [(talk.terms.run, 1), (talk.terms.run, 2)]


def test_another_clip_than_agreed_is_another_run(tiny, talk):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    refused(federation, talk.round(0, {"terms": federation.terms({"clip": 100.0}).sha256()}), "changed")
    assert federation.charged(NORTH) == []


def test_a_round_is_refused_when_the_ledger_was_spent_elsewhere_in_between(tiny, talk, touched):
    federation = tiny()
    federation.configure(NORTH, epsilon=9.0, delta=1e-5)
    talk = talk(federation.site(NORTH), federation.terms())
    assert talk.propose().kind == "agreed"
    assert talk.round(0).kind == "update"
    with talk.site.ledger() as ledger:
        ledger.charge([Charge(talk.site.account, 0, "elsewhere", 1.3, 1.0, 1, "another run")])
    touched.clear()
    refused(federation, talk.round(1), "budget")
    assert touched == []
    assert talk.round(0).kind == "update"  # paid for already


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_terms_that_come_to_nothing_leave_few_folders(tiny, talk, monkeypatch, trust):
    monkeypatch.setattr(site_module, "UNUSED_RUNS", 3)
    federation = tiny(trust=trust)
    talk = talk(federation.site(NORTH), federation.terms())
    assert talk.propose().kind == "agreed"
    used = talk.terms
    if trust == "untrusted-server":
        assert talk.round(0).kind == "update"
    proposed = [federation.terms(run=f"{k:032x}") for k in range(8)]
    for terms in proposed:
        assert talk.propose(terms).kind == "agreed"
    left = {path.name for path in talk.site.runs.iterdir()}
    last = {f"{k:032x}" for k in range(5, 8)}
    assert left == (last | {used.run} if trust == "untrusted-server" else last)
    assert talk.propose(proposed[0]).kind == "agreed"  # it is proposed again
    if trust == "untrusted-server":
        assert talk.round(1).kind == "update"  # of the run that had begun


def test_a_run_refuses_other_data_and_goes_on_when_they_are_put_back(tiny, talk):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    assert talk.propose().kind == "agreed"
    assert talk.round(0).kind == "update"
    account, identity = talk.site.account, talk.site.dataset_id
    before = (federation.place(NORTH) / "data.npz").read_bytes()
    change(federation, NORTH, lambda x, y: x.__setitem__((0, 0), x[0, 0] + 1))
    for site in (talk.site, federation.site(NORTH)):
        talk.site = site
        assert "put them back" in refused(federation, talk.round(1), "changed")
        assert talk.site.dataset_id != identity
        refused(federation, talk.propose(), "changed")
    assert len(federation.charged(NORTH)) == 1
    assert talk.propose(replace(talk.terms, run="cd" * 16)).kind == "agreed"
    (federation.place(NORTH) / "data.npz").write_bytes(before)
    assert talk.round(1).kind == "update"
    assert (talk.site.account, talk.site.dataset_id) == (account, identity)
    assert len(federation.charged(NORTH)) == 2


def change(federation, name, how):
    path = federation.place(name) / "data.npz"
    with np.load(path) as stored:
        x, y = stored["x"], stored["y"]
    how(x, y)
    np.savez(path, x=x, y=y)


def test_secure_rounds_are_revealed_once_and_only_after_they_were_answered(tiny, talk):
    names = ("a", "b", "c", "d")
    federation = tiny(trust="secure-aggregation", names=names, dropouts=1)
    terms = federation.terms()
    talks = {name: talk(federation.site(name), terms) for name in names}
    offers = {f"offer:{name}": each.propose().arrays["offer"] for name, each in talks.items()}
    said = {name: each.round(0, arrays=offers) for name, each in talks.items()}
    masked = {name: reply.arrays["masked"].tobytes() for name, reply in said.items()}
    session = secagg.Session.of(terms.run, roster_of_run(federation.roster, terms), terms.sha256(), 1, 1)
    a = talks["a"]

    def say(kind, t, survivors, by="a", wrong=None):
        fields = {"run": terms.run, "terms": terms.sha256(), "t": t, "survivors": survivors}
        if kind == "confirm":
            fields["seals"] = secagg.seals(session, 0, {n: masked[n] for n in survivors if n in masked})
        else:
            fields["confirmations"] = confirmations
        return talks[by].say(kind, fields | (wrong or {}))

    full, confirmations = sorted(names), {}
    for kind, signed in (("confirm", "seals"), ("reveal", "confirmations")):
        refused(federation, say(kind, 1, full), "order", "a")
        for wrong in (
            {"survivors": full[:2]},  # fewer than the threshold
            {"survivors": full[1:]},  # without this site's own
            {"survivors": ["a", "a", "b", "c"]},
            {"survivors": [*full, "e"]},
            {"survivors": "abcd"},
            {"survivors": [["a"]]},
            {signed: {}},
            {signed: dict.fromkeys(full, "00" * 64)},
            {signed: [["a", "b"]]},
            {signed: None},
            {"stranger": 1},
        ):
            refused(federation, say(kind, 0, full, wrong=wrong), "malformed", "a")
    some = full[:3]  # d is said to have dropped out
    for name in some:
        reply = say("confirm", 0, some, by=name)
        assert reply.kind == "confirmed"
        confirmations[name] = reply.fields["confirmation"]
    refused(federation, say("confirm", 0, full), "replayed", "a")
    lost = confirmations.pop("b")
    refused(federation, say("reveal", 0, some), "malformed", "a")  # two of three that are needed
    confirmations["b"] = lost
    first = say("reveal", 0, some)
    assert first.kind == "revealed"
    again = say("reveal", 0, some)
    assert all((again.arrays[k] == first.arrays[k]).all() for k in ("reveal", "offer"))
    refused(federation, say("reveal", 0, full), "replayed", "a")  # both kinds of d's shares would open its message
    a.site = federation.site("a")
    refused(federation, say("reveal", 0, full), "replayed", "a")
    refused(federation, say("confirm", 0, full), "replayed", "a")
    assert federation.charged("a") == [(terms.run, 0)]


# ---------------------------------------------------------------------------------------------- what a site may request


def test_a_stricter_site_adds_more_noise_and_pays_no_more_than_it_wished(tiny):
    federation = tiny()
    federation.configure(NORTH, run_epsilon=2.0)
    federation.run()
    cert = federation.certificate(NORTH)
    (own,) = (group for group in cert["groups"] if group["clients"] == [0] or group["clients"] == "0")
    others = [group for group in cert["groups"] if group is not own]
    assert own["epsilon"] <= 2.0 * (1 + 1e-9)
    assert all(group["epsilon"] > 4 for group in others)
    (std,), (lax, *_) = own["own_std"].values(), [v for group in others for v in group["own_std"].values()]
    assert std > 2 * lax
    ratios = {}
    for name in federation.names:
        site = federation.site(name)
        with site.ledger() as ledger:
            rows = list(ledger.rows())
            ratios[name] = {row.std / row.sensitivity for row in rows}
            spent = ledger.spent_epsilon(site.account, 1e-5)
        assert spent <= (2.0 if name == NORTH else 8.0) * (1 + 1e-9)
        assert len(rows) == 3
    assert min(ratios[NORTH]) > 2 * max(ratios["south"])


# -------------------------------------------------------------------------------------------------- nothing else leaves

MARK = "SECRET-MARKER-of-a-record"
PLACES = [  # where something fails, and on which message
    ("terms", "sordino.federation.site.Terms.read"),
    ("terms", "sordino.federation.site.Site.load"),
    ("terms", "sordino.federation.site.SiteRun.make"),
    ("terms", "sordino.federation.masks.secagg.offer"),
    ("hello", "sordino.federation.site_data.load"),
    ("round", "sordino.federation.site_run.oracle"),
    ("round", "sordino.federation.site_run.encode_integers"),
    ("round", "sordino.federation.site.SiteRun.vector"),
    ("round", "sordino.federation.site.SiteRun.keep"),
    ("round", "sordino.federation.masks.secagg.masked"),
    ("round", "sordino.federation.site_data.SiteLedger.charge"),
    ("round", "sordino.federation.site_data.SiteLedger.afford"),
    ("round", "sordino.federation.site.wire.encode"),
    ("finish", "sordino.federation.site_run.certificate"),
    ("finish", "sordino.federation.site_run.save_model"),
]
ERRORS = (ValueError, SordinoError, OSError, OverspentError, WireError, sqlite3.OperationalError, MemoryError)


WITHIN = (
    "oracle",
    "encode_integers",
    "SiteRun.keep",
    "secagg.masked",
    "wire.encode",
)  # once the data were asked something


@pytest.mark.parametrize("errors", tiers([2, len(ERRORS)], 1))
@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_what_an_exception_says_stays_at_the_site(tiny, talk, monkeypatch, kind, place, errors):
    within = kind == "round" and place.endswith(WITHIN)
    encode, federation = wire.encode, None
    for error in ERRORS[:errors]:
        if federation is None or within:
            federation = tiny(trust="secure-aggregation", names=FOUR)
            request = request_of(federation, talk, kind)

        def fail(*args, error=error, **keys):
            if place.endswith("wire.encode") and args[0] == "refused":
                return encode(*args, **keys)
            raise error(MARK)

        site = federation.site("a")
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            reply = site.answer(request)
        assert MARK.encode() not in reply
        found = wire.decode(reply)
        assert found.kind == "refused"
        assert found.fields["reason"] == REASONS[found.fields["code"]]
        assert any(MARK in event["detail"] for event in federation.events("a")[-2:] if "detail" in event)
        if within and error is not OSError:  # else a server could ask for nothing which records make a site fail
            assert federation.charged("a") == [("ab" * 16, 0)]
            assert site.answer(request) == federation.site("a").answer(request) == reply
        else:
            assert federation.charged("a") == []


def request_of(federation, talk, kind):
    """A message of that kind to the first site, which is ready for it."""
    terms = federation.terms()
    if kind in ("hello", "terms"):
        return wire.encode(kind, {"terms": terms.json()} if kind == "terms" else {})
    talks = {name: talk(federation.site(name), terms) for name in federation.names}
    offers = {f"offer:{name}": each.propose().arrays["offer"] for name, each in talks.items()}
    if kind == "round":
        return talks["a"].request(0, arrays=offers)
    fields = {"run": terms.run, "terms": terms.sha256(), "done": 3}
    return wire.encode("finish", fields, {"theta": NUMBERS.astype(np.float64)})


def test_a_run_that_is_over_answers_no_more_and_charges_nothing(tiny, talk):
    for seed in (7, None):
        federation = tiny(seed=seed)
        talk_to = talk(federation.site(NORTH), federation.terms())
        talk_to.propose()
        assert talk_to.round(0).kind == "update"
        fields = {"run": talk_to.terms.run, "terms": talk_to.terms.sha256(), "done": 1}
        assert talk_to.say("finish", fields, {"theta": NUMBERS}).kind == "finished"
        refused(federation, talk_to.round(1), "order")
        assert federation.charged(NORTH) == [(talk_to.terms.run, 0)]
        refused(federation, talk_to.round(0), "order")  # the bytes are gone, and nothing is computed again


@pytest.mark.parametrize("answered", [0, 1])
def test_a_certificate_says_that_the_coordinator_names_the_model(tiny, talk, answered):
    """The site signs the hash of numbers that it never computed: any could be sent, even after no round."""
    federation = tiny(seed=None)
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    for t in range(answered):
        assert talk.round(t).kind == "update"
    fields = {"run": talk.terms.run, "terms": talk.terms.sha256(), "done": 3}
    assert talk.say("finish", fields, {"theta": NUMBERS * 7}).kind == "finished"
    words = f"the coordinator says so, and the site cannot check it. The site answered {answered} of 3 rounds"
    cert, path = federation.certificate(NORTH), federation.folder_of(NORTH) / "certificate.json"
    assert sum(words in fact for fact in cert["assumes"]) == 1
    assert words in path.with_name("statement.md").read_text()
    assert verify_run(path, against_terms=against_terms).problems == []
    cert["assumes"] = [fact for fact in cert["assumes"] if words not in fact]
    path.write_text(json.dumps(cert))
    assert any(each.startswith("assumes") for each in verify_run(path, against_terms=against_terms).problems)


def test_what_a_site_says_of_itself_is_compared_with_ledger_and_terms(tiny, talk):
    """Nothing of this enters the numbers of the plan. An account that spent less, a stricter limit, or the number of a
    site with a smaller epsilon, promise more than is true."""
    federation = tiny(seed=None)
    for number in range(2):
        again = talk(federation.site(NORTH), federation.terms(run=f"{number}" * 32))
        again.propose()
        assert again.round(0).kind == "update"
        fields = {"run": again.terms.run, "terms": again.terms.sha256(), "done": 3}
        assert again.say("finish", fields, {"theta": NUMBERS * 7}).kind == "finished"
    paths = [federation.place(NORTH) / "runs" / (f"{number}" * 32) / "certificate.json" for number in range(2)]
    first, second = (json.loads(path.read_text()) for path in paths)
    assert first["site"]["spent"] < second["site"]["spent"]  # each says what was spent when it was written
    for path in paths:
        assert verify_run(path, against_terms=against_terms).problems == []

    def problems(**changed):
        cert = json.loads(json.dumps(second))
        del cert["signature"]
        for key, value in changed.items():
            where, _, field = key.partition("__")
            if field:
                cert[where][field] = value
            else:
                cert[key] = value
        paths[1].write_text(json.dumps(cert))
        return " ".join(verify_run(paths[1], against_terms=against_terms).problems)

    assert "the site's account had spent" in problems(site__spent=first["site"]["spent"])
    assert "the site's account had spent" in problems(ledger=first["ledger"], site__spent=first["site"]["spent"])
    assert "has not the hash" in problems(ledger__rows=1)
    assert "the ledger never had the limit" in problems(site__epsilon=0.5 * second["site"]["epsilon"])
    assert "another number than 1" in problems(site__client=1, client_names=[])
    assert "client_names" in problems(client_names=[])
    assert "test_records" in problems(test_records=0)


def test_a_disk_that_is_full_refuses_and_nothing_leaves(tiny, talk, monkeypatch):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    execute = sqlite3.Connection.execute

    class Full(sqlite3.Connection):
        def execute(self, sql, *values):
            if sql.startswith("INSERT INTO entries"):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            return execute(self, sql, *values)

    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(ledgers.sqlite3, "connect", lambda *a, **k: connect(*a, factory=Full, **k))
        for _ in range(2):
            assert "free some disk space" in refused(federation, talk.round(0), "storage")
    assert federation.charged(NORTH) == []
    with monkeypatch.context() as patch:

        def no_space(*args):
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", no_space)  # the site's own files
        refused(federation, talk.round(0), "storage")
    assert federation.charged(NORTH) == []
    assert talk.round(0).kind == "update"
    assert federation.charged(NORTH) == [(talk.terms.run, 0)]


def test_a_look_at_the_model_that_fails_does_not_hold_back_what_was_paid_for(tiny, talk, monkeypatch):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    monkeypatch.setattr(run_module, "evaluate", lambda *args: 1 / 0)
    assert talk.round(0).kind == "update"


def test_a_clock_that_jumps_back_a_year_allows_nothing_more(tiny, talk, monkeypatch):
    federation = tiny()
    federation.configure(NORTH, epsilon=9.0, delta=1e-5)
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    request = talk.request(0)
    reply = talk.site.answer(request)
    monkeypatch.setattr(ledgers, "_now", lambda: "1999-01-01T00:00:00.000000+00:00")
    monkeypatch.setattr(data_module, "_now", lambda: "1999-01-01T00:00:00+00:00")
    talk.site = federation.site(NORTH)
    assert talk.site.answer(request) == reply
    refused(federation, talk.round(0, arrays={"theta": put(1)}), "replayed")
    assert talk.round(1).kind == "update"
    refused(federation, talk.propose(replace(talk.terms, run="cd" * 16)), "budget")
    federation.configure(NORTH, epsilon=10.0, delta=1e-5)
    with pytest.raises(SordinoError, match="tightened"):
        federation.site(NORTH)
    assert federation.charged(NORTH) == [(talk.terms.run, 0), (talk.terms.run, 1)]


# Everything that a site says, by kind, and why it may. What is not here must not leave.
FIELDS = {
    "hello": {
        "name": "the site's own name, which the coordinator waits for",
        "records": "the number of training records, public: noise and weights are computed from it",
        "sordino": "the version of this program",
        "epsilon": "a stricter epsilon for a single run: a rule of the site's, not of its data",
        "receipt": "how far the ledger is: public.RECEIPT",
        "run_key": "a fresh random key for one run, and the site's signature over it",
        "rotations": "keys that the site has given up and taken, and signatures over them",
        "signature": "the site's, over name, records, epsilon and the server's own random digits",
    },
    "agreed": {
        "run": "the server's own word",
        "terms": "the hash of the server's own words",
        "next": "how many rounds were answered: the server saw them",
        "receipt": "as in hello",
    },
    "update": {
        "run": "the server's own word",
        "t": "the server's own word",
        "asked": "the hash of the server's own message",
        "tree": "how the arrays are nested: a fact about the method",
        "receipt": "as in hello",
    },
    "confirmed": {
        "run": "the server's own word",
        "t": "the server's own word",
        "confirmation": "a signature over the list of survivors that the server sent",
    },
    "revealed": {"run": "the server's own word", "t": "the server's own word"},
    "offered": {"run": "the server's own word", "t": "the server's own word"},
    "finished": {"run": "the server's own word", "receipt": "as in hello"},
    "refused": {"code": "one of a few words", "reason": "the constant text of that word", "asked": "as in said"},
}
ARRAYS = {
    "hello": {},
    "agreed": {"offer": "a fresh public key and encrypted shares of keys: made without the data"},
    "update": {
        "update0": "the message: clipped, noised and paid for",
        "masked": "the message: clipped, noised, paid for, and under masks",
    },
    "revealed": {
        "reveal": "shares of mask keys and seeds, of which the sum alone comes out",
        "offer": "keys of the next round, as above",
    },
    "offered": {"offer": "as above"},
    "confirmed": {},
    "finished": {},
    "refused": {},
}


@pytest.mark.parametrize(
    ("method", "trust", "keys"),
    [
        ("dp-fedsofim", "untrusted-server", {}),
        ("dp-scaffold", "untrusted-server", {"steps": 2}),
        ("dp-fedsofim", "secure-aggregation", {"names": ("a", "b", "c", "d"), "dropouts": 1}),
    ],
)
def test_nothing_leaves_but_what_is_listed_here(tiny, method, trust, keys):
    federation = tiny(method, trust, **keys)
    first = federation.names[0]
    federation.configure(first, run_epsilon=7.0)
    lost = iter([True])

    def fault(node, request, answer):
        reply = answer(request)
        return None if node == 100 and wire.decode(request).kind == "reveal" and next(lost, False) else reply

    coordinator, transport = federation.run(fault)
    terms, secure, seen = coordinator.terms, trust == "secure-aggregation", {}
    for node, request, reply in transport.log:
        if reply is None:
            continue
        asked, found = wire.decode(request), wire.decode(reply)
        seen.setdefault(found.kind, set()).update(found.fields, found.arrays)
        assert found.fields.keys() <= FIELDS[found.kind].keys(), found.kind
        assert found.arrays.keys() <= ARRAYS[found.kind].keys(), found.kind
        # And each is what it is said to be.
        name = federation.names[node - 100]
        known = {
            "name": name,
            "records": len(federation.site(name).load().y_train),
            "sordino": sordino.__version__,
            "epsilon": 7.0,
            "run": terms.run,
            "terms": terms.sha256(),
            "next": 0,
            "t": asked.fields.get("t"),
            "asked": hashlib.sha256(request).hexdigest(),
            "tree": [] if secure else 0,
        }
        for field, value in found.fields.items():
            if field == "receipt":
                assert value.keys() == public.RECEIPT.keys()
            elif field == "run_key":
                assert re.fullmatch("[0-9a-f]{192}", value)
            elif field in ("confirmation", "signature"):
                assert re.fullmatch("[0-9a-f]{128}", value)
            else:
                assert value == known[field], (found.kind, field)
        for key, array in found.arrays.items():
            if key == "update0":
                assert (array.dtype, array.shape) == (np.float32, (SIZE,))
            else:  # its size depends on nothing but the model and the number of sites
                assert (array.dtype, array.ndim) == (np.uint8, 1)
    wanted = {"hello", "agreed", "update", "finished"} | ({"confirmed", "revealed", "offered"} if secure else set())
    assert seen.keys() == wanted
    assert ("masked" in seen["update"], "update0" in seen["update"]) == (secure, not secure)
    for name in federation.names:  # each site looked at the models, and told nobody
        scores = [json.loads(line) for line in (federation.folder_of(name) / "metrics.jsonl").read_text().splitlines()]
        assert len(scores) == 3
        told = b"".join(reply for _, _, reply in transport.log if reply)
        for line in scores:
            for word, value in line.items():
                if word != "round":
                    assert word.encode() not in told
                    assert len(repr(value)) < 5 or repr(value).encode() not in told


# ----------------------------------------------------------------------------------------- models that single one out


def answered(federation, talk, terms, requests):
    talk = talk(federation.site(NORTH), terms)
    assert talk.propose().kind == "agreed"
    return [wire.decode(talk.site.answer(request)) for request in requests(talk)]


METHODS = [  # method, options, the number of words
    ("dp-fedsofim", {}, 0),
    ("dp-scaffold", {}, 1),
    ("dp-fedgd", {"quantile": 0.5}, 1),
    ("dp-fednew", {}, 1),
    ("dp-fedavg", {"steps": 1}, 0),
]


@pytest.mark.parametrize(("method", "options", "words"), METHODS, ids=[m for m, *_ in METHODS])
def test_a_model_made_to_single_out_a_record_learns_no_more_of_it_than_the_clip(tiny, talk, method, options, words):
    """Two sites that differ in one record, and the same draw of noise: messages differ by the sensitivity at most."""
    federations = [tiny(method, rounds=12, **options) for _ in range(2)]
    out = load(str(federations[0].place(NORTH) / "data.npz")).x_train[0]
    with np.load(federations[0].place(NORTH) / "data.npz") as stored:
        row = int(np.flatnonzero((stored["x"] == out).all(1))[0])

    def other(x, y):
        x[row], y[row] = -100 * x[row], (y[row] + 1) % 3

    change(federations[1], NORTH, other)
    terms = federations[0].terms()
    assert federations[1].terms() == terms
    away = np.append(out, 1)[:, None] * np.array([1, -1, 0])
    thetas = [np.zeros(SIZE), away.ravel(), 1e3 * away.ravel(), 1e30 * away.ravel(), -1e6 * away.ravel()]
    thetas += [np.full(SIZE, 3e38), np.random.default_rng(0).normal(0, 1e20, SIZE), 1e-30 * away.ravel()]
    told = {0: [None], 1: [0.0, 1e3, 1.0, -1e30]}[words]

    def requests(talk):
        for t, theta in enumerate(thetas):
            length = 1 if "quantile" in options else SIZE
            word = None if told[0] is None else np.full(length, told[t % len(told)], np.float32)
            if "quantile" in options:
                word = np.full(1, [0.0, 3.0, -3.0][t % 3], np.float32)
            yield talk.request(t, arrays={"theta": theta.astype(np.float32)}, word=word)

    one, two = (answered(federation, talk, terms, requests) for federation in federations)
    plan, moved = terms.plan, []
    level = calibration.query_noises(plan)[0]
    n = terms.sizes[0]
    per = n if level.query.kind == "gradient" else 1  # answers are means, and messages themselves
    local_lr = {"dp-scaffold": 2.0, "dp-fedavg": entry_default("dp-fedavg", "local_lr")}.get(method, 1.0)
    for a, b in zip(one, two, strict=True):
        assert (a.kind, b.kind) == ("update", "update")
        assert {**a.fields, "receipt": 0} == {**b.fields, "receipt": 0}  # each site signs with its own key
        left, right = (m.arrays["update0"].astype(float) / local_lr for m in (a, b))
        assert np.isfinite(left).all() or method != "dp-fedsofim"
        moved.append(np.linalg.norm(left - right) * per / level.sensitivity[0])
    slack = 1e-3  # float32 around a large word
    assert max(moved) <= 1 + slack
    assert max(moved) > 0.1  # and the record was there to be seen
    for federation in federations:
        assert len(federation.charged(NORTH)) == len(thetas)


def entry_default(method, option):
    return sordino.methods.entry(method).options[option]


def test_the_same_holds_of_integers_under_their_masks(tiny, talk, monkeypatch):
    names = ("north", "b", "c", "d")
    federations = [tiny(trust="secure-aggregation", names=names, rounds=6) for _ in range(2)]

    def other(x, y):
        x[row], y[row] = -100 * x[row], (y[row] + 1) % 3

    out = load(str(federations[0].place(NORTH) / "data.npz")).x_train[0]
    with np.load(federations[0].place(NORTH) / "data.npz") as stored:
        row = int(np.flatnonzero((stored["x"] == out).all(1))[0])
    change(federations[1], NORTH, other)
    terms = federations[0].terms()
    vectors = ([], [])
    for k, federation in enumerate(federations):
        keyed = replace(terms, run_keys=tuple(map(federation.run_key, federation.names)))
        run = SiteRun.make(federation.site(NORTH), keyed, "account 1")
        for t, factor in enumerate((0, 1, 1e3, -1e6, 1e30)):
            theta = (factor * np.append(out, 1)[:, None] * np.array([1, -1, 0])).ravel()
            this_round = next(round_plans(run.plan, run.model, t))
            broadcast = Broadcast(torch.from_numpy(theta), ())
            vectors[k].append(run.compute(this_round, broadcast))
    plan = terms.plan
    (level,) = calibration.query_noises(plan)
    (entry,) = charges(plan, 0, 0, terms.run)
    noise = np.sqrt(float(calibration.integer_variance(plan, level)) * plan.integers.honest(plan.clients))
    moved = [
        np.linalg.norm((a - b).view(np.int32).astype(float)) / noise / (entry.sensitivity / entry.std)
        for a, b in zip(*vectors, strict=True)
    ]
    assert max(moved) <= 1 + 1e-9
    assert max(moved) > 0.2


def test_a_ledger_is_asked_before_the_message_is_made_and_holds_it_before_it_leaves(tiny, talk, monkeypatch):
    federation = tiny()
    talk = talk(federation.site(NORTH), federation.terms())
    talk.propose()
    order = []
    for owner, name in (
        (Ledger, "afford"),
        (SiteRun, "compute"),
        (SiteRun, "keep"),
        (Ledger, "charge"),
        (SiteRun, "settle"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *a, real=real, name=name: (order.append(name), real(self, *a))[1])
    reply = talk.site.answer(talk.request(0))
    assert order == ["settle", "afford", "compute", "keep", "charge", "settle"]
    with talk.site.ledger() as ledger:
        assert ledger.release(talk.terms.run, talk.site.account, 0) == reply


def test_a_site_that_is_protected_as_a_whole_tells_no_number_and_answers_no_other_run(tiny, talk):
    federation = tiny(trust="secure-aggregation", names=FOUR, unit="client")
    for name in FOUR:
        federation.configure(name, unit="client")
    told = [wire.decode(federation.site(name).answer(wire.encode("hello", {}))).fields for name in FOUR]
    assert {fields["records"] for fields in told} == {1}
    assert len({len(federation.site(name).load().y_train) for name in FOUR}) > 1
    talk_to = talk(federation.site(FOUR[0]), federation.terms())
    assert talk_to.propose().kind == "agreed"
    for spec, why in (
        ({"unit": "record"}, "unit"),
        ({"unit": "client", "adjacency": "add-remove"}, "none joins or leaves unseen"),
        ({"unit": "client", "batch": "poisson:4"}, "minibatches"),
    ):
        with pytest.raises(Refused, match=why):
            agree(federation.site(FOUR[0]), federation.terms(spec, run="cd" * 16))
    with pytest.raises(Refused, match="state 1 of each"):
        check_rules(federation.site(FOUR[0]), federation.terms(sizes=(24,) * 4, run="cd" * 16))


@pytest.mark.parametrize("records", [1, 2])
def test_a_whole_site_with_few_records_answers_as_any_other(tiny, talk, records):
    """A refusal told that they are too few to hold out one, which was exact."""
    federation = tiny("dp-fedgd", names=FOUR, unit="client", rounds=1)
    path = federation.place("a") / "data.npz"
    for name in FOUR:
        federation.configure(name, unit="client")
    with np.load(path) as stored:
        x, y = stored["x"], stored["y"]
    np.savez(path, x=x[:records], y=y[:records])
    federation.run()
    assert federation.progress("round")[0]["came"] == list(FOUR)
    assert not [event for event in federation.events("a") if event["what"] in ("refused", "failed")]


def test_a_whole_site_moves_the_integers_by_what_is_claimed(tiny):
    """All records of a site are replaced, and their number changes too."""
    federations = [tiny("dp-fedgd", trust="secure-aggregation", names=FOUR, unit="client") for _ in range(2)]
    for federation in federations:
        for name in FOUR:
            federation.configure(name, unit="client")
    with np.load(federations[1].place(FOUR[0]) / "data.npz") as stored:
        x, y = stored["x"], stored["y"]
    np.savez(federations[1].place(FOUR[0]) / "data.npz", x=np.concatenate([-50 * x, 9 * x]), y=np.tile((y + 1) % 3, 2))
    terms, vectors = federations[0].terms(), ([], [])
    for k, federation in enumerate(federations):
        keyed = replace(terms, run_keys=tuple(map(federation.run_key, federation.names)))
        run = SiteRun.make(federation.site(FOUR[0]), keyed, "account 1")
        for t, factor in enumerate((0, 1, -30)):
            theta = torch.from_numpy(factor * np.linspace(-1, 1, run.model.size))
            vectors[k].append(run.compute(next(round_plans(run.plan, run.model, t)), Broadcast(theta, ())))
    (level,), (entry,) = calibration.query_noises(terms.plan), charges(terms.plan, 0, 0, terms.run)
    noise = np.sqrt(float(calibration.integer_variance(terms.plan, level)) * terms.plan.integers.honest(4))
    moved = [
        np.linalg.norm((a - b).view(np.int32).astype(float)) / noise / (entry.sensitivity / entry.std)
        for a, b in zip(*vectors, strict=True)
    ]
    assert 0.2 < max(moved) <= 1 + 1e-9
