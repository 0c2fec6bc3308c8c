"""How often each client paid, against the rounds and the participation of a certificate; whom its groups name."""

import copy
import itertools
import json
import math
from contextlib import suppress

import numpy as np
import pytest

from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.errors import SordinoError
from sordino.evidence import public, statement
from sordino.evidence import verify as verify_module
from sordino.evidence.certificate import certificate, listed, of_runs
from sordino.evidence.form import FORM
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.privacy import spending
from sordino.privacy.accounting import events
from sordino.privacy.mechanisms.random import Secure
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.studies import private_tuning

SIZES = (40, 10, 25, 25, 30, 12, 60)
METHODS = {
    "one stage": ("dp-fedgd", {}),
    "two calls": ("dp-fedavg", {"steps": 2}),
    "two stages": ("auto", {}),
    "two queries": ("fednewton", {}),
    "tree": ("dp-ftrl", {}),
    "banded": ("dp-ftrl", {"mechanism": "banded", "band": 2}),
    "inverse root": ("dp-ftrl", {"mechanism": "inverse-root"}),
}
WHO = ["full", "cyclic:2", "cyclic:7", "fixed:1", "fixed:3", "fixed:7", "poisson:0.4", "poisson:1e-9", "poisson:1"]


def plan_for(name="one stage", who="full", rounds=9, batch="full", sizes=SIZES, **privacy):
    promise = Privacy(**{"epsilon": 2.0, **privacy})
    method, options = METHODS[name]
    made, drawn = build(method, promise.unit, **options), Sampling.parse(batch)
    return Plan(
        made, rounds, sizes, promise, Participation.parse(who), schedule_seed=2**100, uncertified=True, sampling=drawn
    )


def made(plan, **more):
    return json.loads(json.dumps(certificate(plan, Secure(), version="0", **more)))


def bounds(cert):
    """What is found without the accounts."""
    problems = []
    verify_module._check_bounds(cert, problems)
    return problems


def again(cert):
    """Every figure of a changed certificate as it follows from the releases."""
    adjacency, by_group = Adjacency(cert["adjacency"]), [listed(g["releases"]) for g in cert["groups"]]
    for group, each in zip(cert["groups"], by_group, strict=True):
        group["epsilon"], group["mu"] = events.epsilon(each, cert["delta"], adjacency), events.mu(each)
    worst = max(cert["groups"], key=lambda group: group["epsilon"])
    cert["epsilon"], cert["mu"] = worst["epsilon"], worst["mu"]
    cert["worst_client"] = int(worst["clients"].split(",")[0].split("-")[0])
    cert["epsilon_at"] = {k: max(events.epsilon(r, float(k), adjacency) for r in by_group) for k in cert["epsilon_at"]}
    cert["guess"] = max(events.guess(r, adjacency) for r in by_group)
    return cert


def changed(cert, change):
    forged = copy.deepcopy(cert)
    change(forged)
    return forged


@pytest.fixture
def no_accounts(monkeypatch):
    """Certificates without their epsilons, which take longest: `bounds` does not read them."""
    monkeypatch.setattr(spending, "epsilon_of", lambda *_: 1.0)
    monkeypatch.setattr(events, "guess", lambda *_: 0.5)


HOW = [("record", "untrusted-server"), ("record", "secure-aggregation"), ("person", "trusted-server")]
HOW += [("client", "untrusted-server"), ("client", "trusted-server")]


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize(("unit", "trust"), HOW)
def test_no_honest_schedule_is_called_too_cheap(name, unit, trust, no_accounts):
    """Of whole runs and of those that stopped early, with clients that never came; test_certificate has accounts."""
    if name in ("two stages", "two queries") and unit == "client":
        return  # answers cannot be noised at client level
    seen = 0
    for who, batch in itertools.product(WHO, ["full", "poisson:4"] if unit == "record" else ["full"]):
        plan = plan_for(name, who, 9, batch, unit=Unit(unit), trust=Trust(trust))
        for done in (None, 0, 4):
            assert bounds(made(plan, done=done)) == [], (who, batch, done)
            seen += 1
    assert seen >= 24


def test_honest_schedules_of_many_seeds_are_not_called_too_cheap(no_accounts):
    for seed in range(40):
        for who in ("fixed:2", "poisson:0.1", "poisson:0.9"):
            plan = Plan(build("dp-fedgd"), 60, (9,) * 12, Privacy(), Participation.parse(who), schedule_seed=seed)
            assert bounds(made(plan)) == []


def once(cert):
    """One release of each query, whoever came how often."""
    for group in cert["groups"]:
        for release in group["releases"]:
            release["times"] = 1


@pytest.mark.parametrize("who", ["full", "cyclic:2", "fixed:19", "fixed:1", "poisson:0.5"])
def test_a_run_whose_clients_paid_once_is_rejected(who):
    """With all figures as they follow from it: the only contradiction is the schedule."""
    plan = plan_for(who=who, rounds=100, sizes=(100,) * 20, epsilon=20.0)
    cert = made(plan)
    assert verify(again(copy.deepcopy(cert))).problems == []
    forged = again(changed(cert, once))
    assert forged["epsilon"] < cert["epsilon"] / 3
    problems = verify(forged).problems
    assert problems
    assert all("paid for 1 rounds of 100" in each or "together paid for 20 places" in each for each in problems)


def test_a_drawn_minibatch_does_not_hide_rounds_that_were_not_paid():
    cert = made(plan_for(who="cyclic:2", batch="poisson:4"))
    assert any("paid for 1 rounds of 9" in each for each in bounds(changed(cert, once)))
    secret = made(plan_for(who="poisson:0.4", unit=Unit.CLIENT, trust=Trust.TRUSTED_SERVER, adjacency="add-remove"))
    assert any("paid for 1 rounds of 9" in each for each in bounds(changed(secret, once)))


def test_one_client_of_a_drawn_schedule_that_paid_too_little_is_found():
    """The others pay its rounds, so that the sum is right."""

    def moves(cert):
        first, *rest = (group["releases"][0] for group in cert["groups"])
        taken, first["times"] = first["times"] - 1, 1
        for release in rest:
            release["times"] += taken // len(rest)

    cert = made(plan_for(who="fixed:3", rounds=400))
    assert "too few for fixed:3 participation" in bounds(changed(cert, moves))[0]


def test_a_sum_of_rounds_that_is_one_too_small_is_found():
    def one_less(cert):
        cert["groups"][0]["releases"][0]["times"] -= 1

    for who in ("fixed:3", "cyclic:3"):
        assert bounds(changed(made(plan_for(who=who, rounds=30)), one_less))


def test_queries_of_one_stage_are_paid_alike():
    """Mutants: the first of two queries is paid once, or left out, and a whole stream is left out."""
    cert = made(plan_for("two queries", rounds=12))
    first = "1.0 gradient"  # after ten rounds of gradients alone
    assert {first, "1.1 curvature"} <= {query["query"] for query in cert["queries"]}

    def first_once(cert):
        next(r for r in cert["groups"][0]["releases"] if r["query"] == first)["times"] = 1

    def left_out(cert):
        group = cert["groups"][0]
        group["releases"] = [r for r in group["releases"] if r["query"] != first]

    for change in (first_once, left_out):
        assert any("did not pay alike for all queries" in each for each in bounds(changed(cert, change)))
    for who in ("full", "cyclic:2", "fixed:7"):
        stream = made(plan_for("tree", who))
        assert bounds(changed(stream, lambda cert: [group["releases"].clear() for group in cert["groups"]]))


def test_several_visible_runs_pay_for_the_same_schedule_each_time():
    """As a search for settings counts them: five rounds of two cohorts, ten times, are thirty and twenty."""
    told = private_tuning._sentence("public", 10, 10)
    for who, paid in (("cyclic:2", {30, 20}), ("poisson:0.4", None), ("full", {50}), ("fixed:3", None)):
        cert = of_runs(made(plan_for(who=who, rounds=5), tuning=told), 10)
        assert bounds(cert) == []
        if paid:
            assert {r["times"] for g in cert["groups"] for r in g["releases"]} == paid
        assert bounds(changed(cert, once))
    without = of_runs(made(plan_for(who="cyclic:2", rounds=5)), 10)
    assert any("but cyclic:2 participation makes it 25" in each for each in bounds(without))


def test_a_number_is_called_unlikely_only_if_it_is():
    from scipy.stats import binom

    for draws, rate in ((1, 0.5), (20, 0.5), (400, 0.01), (400, 0.99), (10**6, 1e-3), (30, 1.0)):
        for chance in (1e-3, 1e-12):
            found = [verify_module._unlikely(k, draws, rate, chance) for k in range(min(draws, 2000) + 1)]
            exact = binom.cdf(np.arange(len(found)), draws, rate)
            assert all(probability < chance for called, probability in zip(found, exact, strict=True) if called)
            if exact[0] < chance**2:
                assert found[0]
    assert not verify_module._unlikely(0, 0, 0.5, 1e-3)


def cohort(cert):
    """More senders, whose noise would add up."""
    root = math.sqrt(100)
    cert["cohort"] *= 100
    cert["noise"] *= root
    for group in cert["groups"]:
        for release in group["releases"]:
            release["std"] *= root


def influence(cert):
    """Everybody counts for a hundredth, and adds a hundred times the noise."""
    cert["noise"], cert["client_noise"] = 100 * cert["noise"], 100 * cert["client_noise"]
    for group in cert["groups"]:
        for name in group["influence"]:
            group["influence"][name] /= 100
            group["own_std"][name] *= 100
        for release in group["releases"]:
            release["sensitivity"] /= 100


def records(cert):
    """Larger clients, of which minibatches are a smaller part."""
    for group in cert["groups"]:
        group["records"] = [10 * size for size in group["records"]]
        for release in group["releases"]:
            release["rate"] /= 10
    cert["records"] *= 10


def names(cert):
    cert["groups"][0]["clients"] = "0-5"


def worst(cert):
    cert["worst_client"] = 7


OTHERS = [
    (cohort, {"trust": Trust.SECURE_AGGREGATION}, "a cohort of 700 is claimed, but full makes it 7"),
    (influence, {"trust": Trust.SECURE_AGGREGATION}, "no client has the influence 1"),
    (records, {"batch": "poisson:4", "sizes": (40, 40)}, "records do not follow from their sizes"),
    (names, {}, "the groups do not name each of 7 clients once"),
    (worst, {}, "client 7 is called the worst one"),
]


@pytest.mark.parametrize(("change", "options", "words"), OTHERS)
def test_other_numbers_that_follow_from_stated_ones_are_compared(change, options, words):
    """All figures follow from the changed ones, so that nothing else gives these away."""
    cert = made(plan_for(**options))
    assert bounds(cert) == []
    forged = changed(cert, change)
    if change in (cohort, influence, records):
        assert again(forged)["epsilon"] < cert["epsilon"] / 2
    found = bounds(forged)
    assert any(words in each for each in found), found
    if change in (cohort, influence):
        assert len(found) == len([each for each in found if words in each])


# ------------------------------------------------------------ fields and sentences that no account is computed from


def smaller(cert):
    """A thirtieth of the sensitivity, and a bound that neither is a clip nor was told as an assumption."""
    cert["queries"][0]["bound"] = "clip"
    for group in cert["groups"]:
        for release in group["releases"]:
            release["sensitivity"] /= 30


def without_the_worst(cert):
    """The client that took part most often pays for nothing."""
    max(cert["groups"], key=lambda group: group["epsilon"])["releases"] = []


BANDED = ("banded", "fixed:2", {"unit": Unit.CLIENT, "trust": Trust.SECURE_AGGREGATION, "sizes": (9,) * 4})


@pytest.mark.parametrize(
    ("change", "name", "who", "privacy", "words"),
    [
        (smaller, "one stage", "full", {}, "a bound is 'by clip' or 'by lemma: ' and its name, not 'clip'"),
        (without_the_worst, *BANDED, "they took part in 0.1 delta and paid nothing for it"),
    ],
)
def test_a_smaller_epsilon_is_found_although_all_figures_follow(change, name, who, privacy, words):
    cert = made(plan_for(name, who, 6, **privacy))
    assert verify(again(copy.deepcopy(cert))).problems == []
    forged = again(changed(cert, change))
    assert forged["epsilon"] < 0.9 * cert["epsilon"]
    (problem,) = verify(forged).problems
    assert words in problem


PERSONS = {"unit": Unit.PERSON, "person_records": 3, "person_clients": 2}
SECRET = {"unit": Unit.CLIENT, "trust": Trust.TRUSTED_SERVER, "adjacency": "add-remove", "sizes": (9,) * 10}
FORGED_WORDS = [
    ("assumes", ["None."], {}, "an assumption that follows from the other fields is missing"),
    ("numerics", ["Exact."], {}, "an assumption that follows from the other fields is missing"),
    ("sampler.amplification", "by records; a factor of ten", {}, "amplification by sampling is claimed"),
    ("sampler.schedule", "secret", {"who": "fixed:2"}, "the schedule is called 'secret', and it is public"),
    ("sampler.schedule", "guessable", {"who": "poisson:0.4", **SECRET}, "schedule that hides clients can be guessed"),
    ("guess", 0.4, {}, "does not lie between 1/2 and 1"),
    ("epsilon_asked", 0.1, {}, "more than the 0.1 that was asked for"),
    ("epsilon_at", {"1e-05": 2.0}, {}, "the usual deltas"),
    ("divisor", "honest", {}, "the divisor 'honest'"),
    ("records", None, {}, "the numbers of records are missing at record level"),
    ("client_names", ["Bonn"], {}, "1 clients are named, and there are 7"),
    ("person.choice", "the healthy ones", PERSONS, "which is unknown"),
    ("queries.0.mechanism", "discrete-gaussian", {}, "its releases are not of the mechanism"),
    ("queries.0.calls", 1.9, {}, "queries[].calls: it must be a whole number, not '1.9'"),
    ("groups.0.releases.0.times", True, {"rounds": 1}, "it must be a whole number, not 'True'"),
    ("rounds", "9", {}, "rounds: it must be a whole number, not '9'"),
    ("queries.0.step", math.nan, {}, "queries[].step: it must be a finite number"),
    ("queries.0.clip", math.inf, {}, "although a clip or a sensitivity is infinite"),
    ("noise", math.inf, {}, "noise: it must be a finite number"),
    ("audited", "by a university", {}, "audited: no certificate of this format has that field"),
    ("queries.0.carried", False, {"name": "banded"}, "its noise is carried over 2 rounds"),
    ("queries.0.carried", False, {"name": "inverse root"}, "and it says that none is"),
    ("site", {"name": "a", "client": 7, "rounds": 9, "data": ""}, {}, "site 7 is none of 7 clients"),
    ("site", {"name": "a", "client": 0, "rounds": 10, "data": ""}, {}, "the site answered 10 of 9 rounds"),
]


@pytest.mark.parametrize(("path", "value", "options", "words"), FORGED_WORDS, ids=[case[0] for case in FORGED_WORDS])
def test_a_field_that_says_more_than_the_others_is_found(path, value, options, words):
    """Without these checks a statement promises more, or a program reads another certificate than a person."""
    cert = made(plan_for(**options))
    assert verify(cert).problems == []
    *parents, last = path.split(".")
    part = cert
    for key in parents:
        part = part[int(key) if isinstance(part, list) else key]
    part[last] = value
    assert any(words in problem for problem in verify(cert).problems), verify(cert).problems


def test_several_runs_of_integers_are_not_certified_as_one():
    """Their epsilon against the server alone would be that of one run."""
    with pytest.raises(SordinoError, match="runs that add up integers"):
        of_runs({**made(plan_for()), "secure": {"epsilon_server": 1.0}}, 10)


@pytest.mark.parametrize("done", [None, 0, 2])
def test_a_run_without_noise_may_have_an_infinite_clip(done):
    cert = made(Plan(build("fednew"), 5, SIZES, Privacy(epsilon=math.inf)), done=done)
    assert cert["clip"] is None
    assert not cert["certified"]
    assert verify(cert).problems == []
    text = json.dumps(cert, allow_nan=False)  # as a signature needs it
    forged = {**json.loads(text), "certified": True}
    assert "it says certified, although a clip or a sensitivity is infinite" in verify(forged).problems
    assert "was not shortened: there is no clip." in statement.statement(cert)


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("who", ["full", "cyclic:2", "fixed:3", "poisson:0.4"])
def test_every_assumption_that_follows_from_other_fields_is_needed(name, who):
    cert = made(plan_for(name, who, trust=Trust.SECURE_AGGREGATION))
    problems, gaps = [], []
    verify_module._check_words(cert | {"certified": False}, problems, gaps)
    assert problems == []
    verify_module._check_words(cert | {"certified": False, "assumes": [], "numerics": []}, problems, gaps)
    needed = {*cert["assumes"], *cert["numerics"]} - {*build(METHODS[name][0], "record", **METHODS[name][1]).assumes}
    assert len(problems) == len(needed)
    verify_module._check_words(cert | {"assumes": [], "code_sha256": "older"}, [], gaps)
    assert gaps == ["the words of the assumptions: sordino with other sources wrote them"]


@pytest.mark.parametrize("unit", list(Unit))
def test_the_numerics_name_what_is_protected_and_earlier_words_hold(unit):
    """Earlier versions wrote of one record, whatever is protected. Their certificates have other sources."""
    persons = {"person_records": 3, "person_clients": 1} if unit is Unit.PERSON else {}
    batch = "full" if unit is Unit.CLIENT else "poisson:4"
    cert = made(plan_for(batch=batch, unit=unit, sizes=SIZES[:1] * 3, **persons))  # one account: only words differ
    numerics = " ".join(cert["numerics"])
    assert f"one {unit} moves them" in numerics
    assert ("more persons than places" in numerics) is (unit is Unit.PERSON)
    assert "{" not in numerics
    before = [
        words.replace(f"one {unit} moves", "one record moves").replace("more persons than", "more records than")
        for words in cert["numerics"]
    ]
    older = {**cert, "numerics": before, "code_sha256": "0" * 64}
    words_gap = "the words of the assumptions: sordino with other sources wrote them"
    found = verify(older)
    assert found.problems == []
    assert words_gap not in found.gaps
    assert words_gap in verify({**older, "numerics": before[1:]}).gaps
    assert (verify({**cert, "numerics": before}).problems == []) is (unit is Unit.RECORD)
    for other in set(Unit) - {unit}:
        false = [words.replace(f"one {unit} moves", f"one {other} moves") for words in cert["numerics"]]
        for numerics in (false, [*cert["numerics"], *false]):
            wrong = f"it protects a {unit}, and says: "
            assert any(problem.startswith(wrong) for problem in verify({**cert, "numerics": numerics}).problems)
            found = verify({**older, "numerics": numerics}).problems
            assert any(problem.startswith(wrong) for problem in found) is (other is not Unit.RECORD)


@pytest.mark.parametrize("trust", list(Trust))
def test_words_are_made_from_the_fields_alone(trust):
    """A certificate of no rounds, of one and of all have the assumptions that their fields have."""
    for who, batch, done in itertools.product(("full", "fixed:3"), ("full", "poisson:4", "fixed:4"), (0, 1, None)):
        cert = made(plan_for(who=who, batch=batch, trust=trust), done=done)
        problems = []
        verify_module._check_words(cert, problems, [])
        assert problems == []


def test_that_a_schedule_was_drawn_is_told():
    """Who took part more often than others cannot be computed again without the seed, which spec.toml has."""
    for who, told in (("full", False), ("cyclic:2", False), ("fixed:3", True), ("poisson:0.4", True)):
        assert any("participation was drawn" in each for each in verify(made(plan_for(who=who))).assumed) == told


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("delta", 0.0),
        ("clients", 0),
        ("clients", math.inf),
        ("queries", []),
        ("groups", []),
        ("queries.0.query", ""),
        ("groups.0.records", []),
        ("queries.0.clip", 0.0),
        ("epsilon_at", []),
    ],
)
def test_numbers_that_nothing_follows_from_are_an_error_of_the_certificate(path, value):
    """And not a traceback."""
    cert = made(plan_for())
    *parents, last = path.split(".")
    part = cert
    for key in parents:
        part = part[int(key) if isinstance(part, list) else key]
    part[last] = value
    with suppress(SordinoError):
        assert verify(cert).problems


def test_the_form_names_every_public_field():
    listed = {*public.CERTIFICATE, *public.SECURE, *public.OF_MANY_SITES, *public.SITE}
    assert {*FORM} - {"groups[].releases"} == listed - {"groups[].releases (none)"}


def of_stream(cert, rounds):
    cert["rounds"] = cert["queries"][0]["factor"]["rounds"] = rounds


def of_releases(cert, times):
    cert["groups"][0]["releases"][0]["times"] = times


@pytest.mark.parametrize(
    ("name", "who", "change", "words"),
    [
        ("inverse root", "full", lambda cert: of_stream(cert, 10**8), "100,000,000 rounds of a stream; at most"),
        ("banded", "full", lambda cert: of_stream(cert, 10**12), "1,000,000,000,000 rounds; at most"),
        ("banded", "fixed:2", lambda cert: of_stream(cert, 10**6), "7,000,000 clients times rounds; at most"),
        ("banded", "cyclic:2", lambda cert: cert.update(clients=10**9), "1,000,000,000 clients; at most"),
        ("one stage", "full", lambda cert: of_releases(cert, 10**12), "releases of one kind; at most"),
    ],
)
def test_a_short_text_does_not_keep_a_reader_busy(name, who, change, words):
    """To compute these again takes all memory, or days."""
    with pytest.raises(SordinoError, match=words):
        verify(changed(made(plan_for(name, who)), change))
