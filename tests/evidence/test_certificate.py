"""Certificates of every kind of plan: complete, in JSON, confirmed by the second accountant, and put into words."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sordino.cli import main
from sordino.core import Correlated, Divisor, Kind, Lemma, Local, Method, Privacy, Query, Stage, Trust, Unit
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate, group_of_site, ranges, sizes_of
from sordino.evidence.signing import RunKey, fingerprint, of_site, signed
from sordino.evidence.statement import RELEASED, statement
from sordino.evidence.verify import NOT_SIGNED, verify
from sordino.methods import build
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian, normal
from sordino.privacy.mechanisms.laws import carries
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.rules import scale
from sordino.secagg.keys import Identity
from tests.support import tiers

SIZES = (40, 10, 25, 25)
EVERY = frozenset((unit, trust) for unit in Unit for trust in Trust)


def made(plan, source=None, **more):
    return json.loads(json.dumps(certificate(plan, source or Secure(), version="0", **more), allow_nan=False))


def plan_for(method=None, participation="full", divisor="pooled", rounds=6, **privacy):
    method = method or build("dp-fedgd", privacy.get("unit", "record"))
    promise = Privacy(**{"epsilon": 2.0, **privacy})
    return Plan(
        method, rounds, SIZES, promise, Participation.parse(participation), Divisor(divisor), schedule_seed=2**100
    )


WHO = ["full", "fixed:2", "poisson:0.4", "poisson:1e-9"]
ACCOUNTS = list(itertools.product([Unit.RECORD, Unit.CLIENT], Trust, WHO))  # divisors take turns


@pytest.mark.parametrize(
    ("unit", "trust", "participation", "divisor"),
    tiers(
        [(*account, divisor) for account in ACCOUNTS for divisor in Divisor],
        [(*account, list(Divisor)[k % 5 % 2]) for k, account in enumerate(ACCOUNTS)],
    ),
)
def test_no_honest_certificate_is_rejected(unit, trust, participation, divisor):
    plan = plan_for(None, participation, divisor, unit=unit, trust=trust)
    for done in (None, 3):
        cert = made(plan, done=done)
        assert verify(cert).problems == []
        assert cert["certified"]
        assert "Certified: ε = " in statement(cert)


UNCHECKED = "claims of its author and were not checked here"


def test_a_method_that_was_not_built_by_name_is_called_its_authors_claim():
    built = build("dp-fedgd")
    by_hand = Method("dp-fedgd", built.unit, built.stages, built.proves)
    (stage,) = built.stages
    louder = built._replace(stages=(stage._replace(queries=(replace(stage.queries[0], clip=0.5),)),))
    bolder = build("fedavg-gdp", steps=3)._replace(proves=EVERY)
    for method in (by_hand, louder, bolder):
        cert = made(plan_for(method))
        assert any(UNCHECKED in fact for fact in cert["assumes"])
        assert UNCHECKED in statement(cert)
        assert verify(cert).problems == []
    for method in (built, built._replace(assumes=("This is public.",)), build("auto")):
        assert UNCHECKED not in statement(made(plan_for(method)))


def test_a_site_that_missed_rounds_reads_why_its_ledger_shows_less():
    cert = made(plan_for())
    told = statement(cert | {"site": {"rounds": 4}})
    assert "This site answered 4 of 6 rounds, and its ledger charges only these." in told
    assert "its ledger charges only" not in statement(cert | {"site": {"rounds": 6}})
    assert "its ledger charges only" not in statement(cert)


@pytest.mark.parametrize(
    ("participation", "trust", "computed"),
    [
        ("full", "untrusted-server", True),
        ("cyclic:2", "secure-aggregation", True),
        ("cyclic:2", "untrusted-server", False),
    ],
)
def test_the_sensitivity_of_an_inverse_root_is_computed_again(participation, trust, computed):
    """Mutants: a smaller sensitivity with the mu that follows from it, and another number of bands."""
    method = build("dp-ftrl", mechanism="inverse-root", inverse_band=3)
    cert = made(plan_for(method, participation, trust=Trust(trust)))
    assert verify(cert).problems == []
    assert bool(verify(cert).assumed) != computed
    for key, value in (("inverse_band", 4), ("inverse_band", 1)):
        forged = json.loads(json.dumps(cert))
        forged["queries"][0]["factor"][key] = value
        assert any("sensitivity" in problem for problem in verify(forged).problems) == computed
    forged = json.loads(json.dumps(cert))
    for group in forged["groups"]:
        for release in group["releases"]:
            release["sensitivity"] *= 0.99
    assert any("the sensitivity is" in problem for problem in verify(forged).problems) == computed


def test_stages_streams_and_lemmas_are_told_and_confirmed():
    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta)

    encoder = np.tril(np.ones((5, 5)))
    once = Stage(Local(compute), scale(1.0), (Query(Kind.GRADIENT, 1.0, share=0.3),), 1)
    stream = Query(Kind.GRADIENT, 2.0, share=0.7, noise=Correlated(encoder, np.linalg.inv(encoder)))
    method = Method("two", Unit.RECORD, (once, Stage(Local(compute), scale(1.0), (stream,))), EVERY)
    cert = made(plan_for(method))
    assert verify(cert).problems == []
    assert [query["stream"] for query in cert["queries"]] == [False, True]
    bounded = (
        Query(Kind.GRADIENT, noise=None),
        Query(Kind.DELTA, bound=Lemma("a small step", lambda m, adjacency: 1 * (1 + (adjacency == "replace-one")) / m)),
    )
    lemma = Method("lemma", Unit.RECORD, (Stage(Local(compute), scale(1.0), bounded),), EVERY)
    for trust in Trust:
        cert = made(plan_for(lemma, trust=trust))
        assert verify(cert).problems == []
        assert cert["queries"][0]["bound"] == "by lemma: a small step"
        assert "by lemma: a small step" in statement(cert)


FITTED = {"mechanism": "banded", "band": 2, "momentum": 0.9, "weight_decay": 0.1}
STREAMS = [
    ("record", "untrusted-server", "full", {}, None),
    ("record", "untrusted-server", "cyclic:2", {"restart": 2, "honaker": "none"}, None),
    ("record", "secure-aggregation", "cyclic:2", FITTED, 3),
    ("client", "secure-aggregation", "cyclic:4", {"mechanism": "banded", "band": 2}, None),
    ("client", "trusted-server", "fixed:2", {"mechanism": "schedule", "momentum": 0.5}, 4),
]


def streamed(unit, trust, participation, options):
    """A plan of correlated noise."""
    return plan_for(build("dp-ftrl", unit, **options), participation, unit=Unit(unit), trust=trust)


def verified(cert, folder):
    """By the command line."""
    path = folder / "certificate.json"
    path.write_text(json.dumps(cert))
    return main(["verify", str(path)])


@pytest.mark.parametrize(("unit", "trust", "participation", "options", "done"), STREAMS)
def test_a_certificate_of_correlated_noise_holds(unit, trust, participation, options, done, tmp_path, capsys):
    plan = streamed(unit, trust, participation, options)
    cert = made(plan, done=done)
    assert cert["certified"]
    assert cert["epsilon"] == pytest.approx(spending.epsilon(plan, done))
    assert cert["epsilon"] <= 2.0
    assert [query["stream"] for query in cert["queries"]] == [True]
    assert {release["times"] for group in cert["groups"] for release in group["releases"]} == {1}
    outside = any("outside a round's cohort" in line for line in cert["assumes"])
    carried = any(carries(query.noise) for query in plan.stages[0].queries)
    assert outside == (trust != "untrusted-server" and participation != "full" and carried)
    assert verified(cert, tmp_path) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "claims certified" in words
    assert "holds, but " in words
    assert "things were not compared: the numbers agree" in words


def as_if_once(cert, release, plan):
    """The stream's sensitivity is that of a unit that comes once."""
    noise = next(query.noise for query in plan.stages[0].queries if query.noise is not None)
    release["sensitivity"] = calibration.query_noises(plan)[0].sensitivity[0] * max(
        noise.sensitivity(np.array([t])) for t in range(6)
    )


def half_the_noise(cert, release, plan):
    release["std"] /= 2


def more_often(cert, release, plan):
    release["times"] = 7


def half_of_epsilon(cert, release, plan):
    cert["epsilon"] /= 2


def half_of_mu(cert, release, plan):
    cert["groups"][0]["mu"] /= 2


@pytest.mark.parametrize("tamper", [as_if_once, half_the_noise, more_often, half_of_epsilon, half_of_mu])
@pytest.mark.parametrize("stream", [0, 2])
def test_a_stream_that_was_tampered_with_is_caught(stream, tamper, tmp_path, capsys):
    plan = streamed(*STREAMS[stream][:4])
    cert = made(plan)
    tamper(cert, cert["groups"][0]["releases"][0], plan)
    assert verified(cert, tmp_path) == 1
    assert "mismatch" in capsys.readouterr().out


def forged(plan, factor):
    """Every figure as it would follow from a smaller sensitivity."""
    cert = made(plan)
    (group,) = cert["groups"]
    (release,) = group["releases"]
    release["sensitivity"] *= factor
    group["mu"] = cert["mu"] = factor * cert["mu"]
    group["epsilon"] = cert["epsilon"] = gaussian.epsilon(cert["mu"], cert["delta"])
    cert["epsilon_at"] = {at: gaussian.epsilon(cert["mu"], float(at)) for at in cert["epsilon_at"]}
    return cert


def test_a_forgery_that_is_consistent_is_caught_or_not_vouched_for():
    """A clip tells what a release moves. What a stream moves follows from who came when, which is not in the
    certificate: there the reader is told that it was not compared."""
    clip, stream = plan_for(), plan_for(build("dp-ftrl"))
    for plan in (clip, stream):
        assert verify(forged(plan, 1.0)).problems == []
    assert any("the sensitivity is" in problem for problem in verify(forged(clip, 0.1)).problems)
    assert verify(made(clip)).gaps == [NOT_SIGNED]
    assert verify(signed(made(clip), RunKey(bytes(32)))).gaps == []
    verdict = verify(forged(stream, 0.1))
    assert verdict.problems == []
    assert verdict.assumed == ["the sensitivity of query 0.0 gradient, which follows from a schedule"]
    assert verdict.gaps == [NOT_SIGNED]


def test_a_stricter_client_is_told_apart():
    cert = made(plan_for(client_epsilon={1: 0.5}))
    assert {group["clients"]: round(group["epsilon"], 6) for group in cert["groups"]} == {"0, 2-3": 2.0, "1": 0.5}
    assert verify(cert).problems == []
    assert "the client with the largest ε, client 0" in statement({**cert, "client_names": []})


@pytest.mark.parametrize(
    ("plan", "source", "words"),
    [
        (plan_for(), Seeded(1), "seeded: not private"),
        (plan_for(epsilon=math.inf), Noiseless(), "not private: no noise was added"),
        (
            Plan(build("dp-scaffold"), 3, SIZES, Privacy(trust="secure-aggregation"), uncertified=True),
            Secure(),
            "not proved: dp-scaffold at record level under secure-aggregation",
        ),
    ],
)
def test_what_is_not_certified_says_so_first(plan, source, words):
    cert = made(plan, source)
    assert not cert["certified"]
    first = statement(cert).split("\n\n")[1]
    assert first.startswith("**Not certified.**")
    assert words in first
    assert verify(cert).problems == []


def test_the_statement_says_who_against_whom_and_what_not():
    told = statement(made(plan_for(trust="secure-aggregation"), tested=77, names=["Ulm", "Bonn", "Jena", "Köln"]))
    for words in (
        "the content of any single record",
        "but not the message of a single client",
        "Secure aggregation was assumed, not carried out",
        "The 77 records that the model was tested on",
        "0: Ulm; 1: Bonn",
        "shortened to length at most 1",
    ):
        assert words in told, words
    user = statement(made(plan_for(unit="client", adjacency="add-remove", trust="trusted-server")))
    assert "whether its data were used at all" in user
    assert "records) in" not in user


def test_ranges_join_consecutive_numbers():
    assert ranges([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8"
    assert ranges([]) == ""


def test_a_statement_tells_the_least_noise_where_it_differs():
    """Of the demo's certificate: two kinds of messages, each with noise of its own."""
    cert = json.loads((Path(__file__).parents[2] / "results" / "demo_certificate.json").read_text())
    clips = {query["query"]: query["clip"] for query in cert["queries"]}
    own = [r["std"] / clips[r["query"]] for group in cert["groups"] for r in group["releases"]]
    assert max(own) > 1.1 * min(own)
    text = statement(cert)
    assert f"at least {min(own):.4g} and at most {max(own):.4g} (certificate.json lists them)" in text
    assert verify(cert).problems == []


@pytest.mark.parametrize("trust", list(Trust))
def test_a_statement_says_whose_noise_a_figure_is_and_what_it_is_for(trust):
    """Clients that differ in epsilon: the ratio of noise and sensitivity is told for the least and most protected."""
    names = ["Ulm", "Bonn", "Jena", "Köln"]
    cert = made(plan_for(trust=trust, client_epsilon={1: 0.5}), names=names)
    ratios = {g["clients"]: g["releases"][0]["std"] / g["releases"][0]["sensitivity"] for g in cert["groups"]}
    least, most = min(ratios.values()), ratios["1"]
    assert most > 2 * least
    text = statement(cert)
    seen = "message" if trust is Trust.UNTRUSTED_SERVER else "sum"
    assert (
        f"at least {least:.4g} (for clients 0, 2-3) and at most {most:.4g} (for client 1 (Bonn)) "
        f"times the most by which one record that is replaced can change the {seen}."
    ) in text
    assert ("no client's protection rests on it" in text) is (trust is Trust.UNTRUSTED_SERVER)
    site = statement(cert | {"site": {"name": "Bonn", "client": 1, "rounds": None}})
    assert f"(at least {most:.4g} for this site)" in site
    assert "protects" not in statement({**cert, "certified": False, "reasons": ["not proved"]}).split("How it was")[1]


def test_a_statement_says_from_which_account_the_betting_chance_comes():
    """Of the same promise: exact for real-valued noise, hardly larger for integers, looser for streams, and why."""
    simulated = plan_for(trust="secure-aggregation", epsilon=8.0)
    federated = made(replace(simulated, integers=Integers(4)))
    assert made(simulated)["guess"] == pytest.approx(0.798, abs=1e-3)
    assert federated["guess"] == pytest.approx(made(simulated)["guess"], abs=1e-6)
    assert "exact for Gaussian noise" in statement(made(simulated))
    assert "The noise that was added, in whole numbers, is a function of it" in statement(federated)
    stream = made(replace(simulated, method=build("dp-ftrl"), integers=Integers(4)))
    assert stream["guess"] == pytest.approx(0.892, abs=1e-3)
    text, exact = statement(stream), 100 * normal.upper_tail(-stream["mu"] / 2)
    assert "by concentrated DP, because the noise is correlated over rounds and consists of whole numbers" in text
    assert f"known exactly: {exact:.3g} of 100 with this much noise" in text
    batch = Plan(build("dp-fedgd"), 6, SIZES, Privacy(2.0), sampling="poisson:2")
    assert "numerically from the Gaussian noise and from what was drawn" in statement(made(batch))


def test_a_signature_holds_for_these_very_numbers_and_this_key(tmp_path):
    cert, key = made(plan_for()), RunKey(bytes(range(32)))
    whole = json.loads(json.dumps(signed(cert, key)))
    assert verify(whole).problems == []
    assert verify(whole).signed == f"run key {fingerprint(key.public)}"
    assert not verify(whole).known
    card = tmp_path / "card.toml"
    card.write_text(f'name = "north"\nsign = "{key.public}"\nbox = "{"0" * 64}"\n')
    for name in (key.public, key.public.upper(), fingerprint(key.public), str(card)):
        assert verify(whole, name).problems == []
        assert verify(whole, name).known
    other = RunKey(bytes(32)).public
    assert "--key names another key" in verify(whole, other).problems[0]
    assert "it is not signed" in verify(cert, other).problems[0]
    for change in (
        {"test_records": 5},
        {"extra": 1},
        {"code_sha256": "0" * 64},
        {"signature": whole["signature"] | {"signer": "me"}},
    ):
        assert "changed after it was signed" in " ".join(verify({**whole, **change}).problems)
    again = signed(cert, RunKey(bytes(32)))["signature"]
    assert "changed after it was signed" in verify({**whole, "signature": {**again, "key": key.public}}).problems[0]


def test_a_site_signs_with_the_key_of_its_card():
    site = Identity.make("north")
    whole = signed(made(plan_for()), of_site(site))
    assert verify(whole, site.card.sign).problems == []
    assert verify(whole).signed == f"site north {fingerprint(site.card.sign)}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is no public key"),
        ("# secret: x\nsign = 'ab'", "holds a secret key"),
        ("nothing", "holds no public key"),
    ],
)
def test_a_key_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SordinoError, match=words):
        verify(signed(made(plan_for()), RunKey(bytes(32))), str(path))


def test_sizes_are_told_exactly_at_record_level_and_not_at_client_level():
    for participation in ("full", "fixed:2"):
        assert sizes_of(made(plan_for(participation=participation))) == SIZES
    equal = Plan(build("dp-fedgd"), 3, (7,) * 50, Privacy())
    assert made(equal)["groups"][0]["sizes"] == [7]
    assert sizes_of(made(equal)) == (7,) * 50
    assert sizes_of(made(plan_for(unit="client"))) is None
    cert = made(plan_for())
    cert["groups"][0]["clients"] = "0-999999999999"
    with pytest.raises(SordinoError, match="are not among 0 to 3"):
        sizes_of(cert)


def test_the_schedule_is_told_to_be_secret_where_it_hides_something():
    told = {
        ("full", "client", "trusted-server"): "all take part",
        ("poisson:0.5", "client", "trusted-server"): "secret",
        ("poisson:0.5", "client", "untrusted-server"): "public",
        ("poisson:0.5", "record", "trusted-server"): "public",
    }
    for (participation, unit, trust), words in told.items():
        plan = plan_for(participation=participation, unit=unit, trust=trust, adjacency="add-remove")
        assert made(plan)["sampler"]["schedule"] == words
    assert (
        made(replace(plan_for(participation="poisson:0.5", unit="client", trust="trusted-server"), schedule_seed=1))[
            "sampler"
        ]["schedule"]
        == "guessable"
    )


def test_clients_whose_epsilons_look_alike_are_not_told_apart():
    """Several groups may round to one epsilon; then no client has "the largest"."""
    cert = made(plan_for(build("dp-fedgd")))
    group = cert["groups"][0]
    alike = {**cert, "groups": [group, {**group, "epsilon": group["epsilon"] * (1 - 1e-9)}]}
    assert "All clients have the same ε:\n\n| clients | records of each | ε |\n|---|---|---|\n| all |" in statement(
        alike
    )
    other = {**cert, "groups": [group, {**group, "epsilon": group["epsilon"] / 2}]}
    assert "the client with the largest ε" in statement(other)
    assert "All clients have the same ε:" in statement({**cert, "groups": [group]})


@pytest.mark.parametrize("done", [-1, 6, 2.5, True, "3"])
def test_done_is_a_number_of_rounds(done):
    with pytest.raises(SordinoError, match=r"done: .* must be a number of rounds, 0 to 5"):
        certificate(plan_for(rounds=5), Secure(), version="1", done=done)


def test_a_gradient_that_is_called_semidefinite_is_found():
    cert = certificate(plan_for(rounds=5), Secure(), version="1")
    cert["queries"][0]["semidefinite"] = True
    assert any("terms of kind gradient are not semi-definite" in problem for problem in verify(cert).problems)


def test_every_kind_of_answer_has_words_that_a_reader_knows():
    assert {*RELEASED, Kind.COUNT, Kind.DELTA} == set(Kind), "counts and whole messages have sentences of their own"


@pytest.mark.parametrize("client", [0, 1, 2])
def test_the_statement_of_a_site_tells_its_own_epsilon(client):
    privacy = Privacy(8.0, trust=Trust.SECURE_AGGREGATION, client_epsilon={1: 2.0})
    cert = certificate(Plan(build("dp-fedgd"), 3, (50, 60, 70), privacy), Secure(), version="0")
    cert["site"] = {"name": "b", "client": client, "rounds": None}
    own = group_of_site(cert)["epsilon"]
    assert (own == pytest.approx(2.0)) is (client == 1)
    assert ("**ε = 2** holds" in statement(cert).split("##")[0]) is (client == 1)
