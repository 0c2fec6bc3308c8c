"""The evaluation at the end of a federation: noised counts of the sites' test records, paid from their own account."""

import json

import numpy as np
import pytest

from sordino import wire
from sordino.errors import SordinoError, StoppedError
from sordino.evidence import public
from sordino.federation import testing
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.sentences import of_coordinator
from sordino.federation.terms import EVALUATED, Terms
from sordino.operations import demonstration
from sordino.training import noised_metrics
from sordino.training.verify_run import verify_run
from tests.federation.fixtures import LocalFolders, Talk

SPEC = {"method": "dp-fedgd", "rounds": 2, "epsilon": 20.0, "delta": 1e-4}
TRUST = ("untrusted-server", "secure-aggregation")


def folders(tmp_path, trust="untrusted-server", limit=30.0, **settings):
    made = LocalFolders(tmp_path, {**SPEC, "trust": trust}, tiny=True, evaluation_epsilon=20.0, **settings)
    for name in made.names:
        made.configure(name, evaluation_epsilon=limit)
    return made


def rows(federation, name):
    with federation.ledger(name) as ledger:
        return [row for row in ledger.rows() if row.who.endswith(testing.ACCOUNT)]


@pytest.mark.parametrize("trust", TRUST)
def test_the_coordinator_learns_how_good_the_model_is(tmp_path, trust):
    federation = folders(tmp_path, trust)
    coordinator, _ = federation.run()
    (line,) = federation.progress("evaluation")
    assert line["came"] == sorted(federation.names)
    found = json.loads((coordinator.out / "evaluation" / "evaluation.json").read_text())
    assert found["records"] == sum(coordinator.terms.tests) == line["records"]
    assert found["epsilon"] == 20.0
    right = total = 0
    for name in federation.names:
        run = federation.site(name)._run(coordinator.terms.run)
        x, y = run._test
        theta = coordinator._last_model(*coordinator._restore()[1:])
        right += int((coordinator.model.predict(theta, x) == y).sum())
        total += len(y)
    assert line["constant_guess"] == found["constant_guess"] == noised_metrics.against_constant(found)
    assert line["doubt"] == noised_metrics.doubt(found)
    assert found["accuracy"]["low"] <= right / total <= found["accuracy"]["high"]
    verdict = verify_run(coordinator.out / "evaluation")
    assert [problem for problem in verdict.problems if "signed" not in problem] == []
    assert json.loads((coordinator.out / "evaluation" / "certificate.json").read_text())["trust"] == trust
    assert not any("model.safetensors" in gap for gap in verdict.gaps), "the model lies in the folder above"
    known = {f"certificate.json: {field}" for field in public.SECURE}
    assert set(public.unlisted_of_evaluation(coordinator.out / "evaluation")) <= known


@pytest.mark.parametrize("trust", TRUST)
def test_sites_pay_once_from_an_account_of_their_own(tmp_path, trust):
    federation = folders(tmp_path, trust)
    coordinator, _ = federation.run()
    for name in federation.names:
        (row,) = rows(federation, name)
        assert row.plan == testing.plan_name(coordinator.terms.run)
        cert = federation.certificate(name)
        assert cert["site"]["rounds"] == 2, "the evaluation is no round of the training"
        assert verify_run(federation.folder_of(name)).problems == []


@pytest.mark.parametrize("trust", TRUST)
def test_every_site_has_a_certificate_of_its_own_about_the_evaluation(tmp_path, trust):
    federation = folders(tmp_path, trust)
    federation.run()
    for name in federation.names:
        out = federation.folder_of(name) / "evaluation"
        cert = json.loads((out / "certificate.json").read_text())
        assert (cert["method"], cert["trust"], cert["certified"]) == ("evaluation", trust, cert["reasons"] == [])
        assert cert["site"]["rounds"] == 1
        assert cert["site"]["epsilon"] == 30.0
        assert cert["site"]["spent"] <= 20.0 * (1 + 1e-6)
        assert cert["model_sha256"] == federation.certificate(name)["model_sha256"]
        verdict = verify_run(out)
        assert verdict.problems == []
        assert not any("ledger" in gap or "model" in gap for gap in verdict.gaps), "both were found and compared"
        assert "this is what" in (out / "statement.md").read_text()
        assert EVALUATED in cert["assumes"]
    spec = federation.folder_of("north") / "evaluation" / "spec.toml"
    spec.write_text(spec.read_text().replace("epsilon = 20.0", "epsilon = 19.0"))
    assert any("spec.toml" in problem for problem in verify_run(spec.parent).problems)


def test_a_site_that_answered_no_evaluation_certifies_none(tmp_path):
    federation = folders(tmp_path, "secure-aggregation")

    def fault(node, request, answer):
        return None if wire.decode(request).kind == "evaluate" else answer(request)

    federation.run(fault)
    assert not (federation.folder_of("north") / "evaluation").exists()


def test_only_noised_counts_leave_under_masks(tmp_path):
    federation = folders(tmp_path, "secure-aggregation")
    _, transport = federation.run()
    replies = [wire.decode(reply) for _, request, reply in transport.log if wire.decode(request).kind == "evaluate"]
    assert len(replies) == 3
    for reply in replies:
        assert set(reply.fields) == {"run", "asked", "tree", "receipt"}
        assert set(reply.arrays) == {"masked"}


def test_an_evaluation_with_a_missing_site_counts_the_others(tmp_path):
    federation = folders(tmp_path, "secure-aggregation", names=("a", "b", "c", "d"), dropouts=1)

    def fault(node, request, answer):
        return None if node == 103 and wire.decode(request).kind == "evaluate" else answer(request)

    coordinator, _ = federation.run(fault)
    (line,) = federation.progress("evaluation")
    assert line["came"] == ["a", "b", "c"]
    assert line["records"] == sum(coordinator.terms.tests[:3])


def test_too_few_sites_leave_no_evaluation_but_a_model(tmp_path):
    federation = folders(tmp_path, "secure-aggregation")

    def fault(node, request, answer):
        return None if wire.decode(request).kind == "evaluate" else answer(request)

    coordinator, _ = federation.run(fault)
    (line,) = federation.progress("evaluation")
    assert line["why"] == "too few sites answered"
    assert (coordinator.out / "certificate.json").exists()


def test_without_the_key_nothing_is_evaluated(tmp_path):
    federation = LocalFolders(tmp_path, {**SPEC, "trust": "untrusted-server"}, tiny=True)
    coordinator, transport = federation.run()
    assert coordinator.terms.evaluation == 0
    assert "evaluate" not in {wire.decode(request).kind for _, request, _ in transport.log}
    assert not (coordinator.out / "evaluation").exists()


def test_a_site_that_answers_no_evaluation_stops_the_proposal(tmp_path):
    federation = folders(tmp_path)
    federation.configure("south")
    with pytest.raises(StoppedError, match="south answers no evaluation"):
        federation.run()


def agreed(federation, **changes):
    tests = tuple(federation.site(name).tests for name in federation.names)
    terms = federation.terms(**{"evaluation": 20.0, "tests": tests, **changes})
    talk = Talk(federation.site("north"), terms)
    return talk, terms, {"run": terms.run, "terms": terms.sha256()}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"evaluation": 40.0}, "policy"), ({"tests": (1, 1, 1)}, "policy"), ({"tests": (1,)}, "malformed")],
)
def test_terms_beyond_the_sites_rules_are_refused(tmp_path, changes, code):
    talk, _, _ = agreed(folders(tmp_path), **changes)
    reply = talk.propose()
    assert (reply.kind, reply.fields["code"]) == ("refused", code)


def test_a_spent_budget_is_refused_before_the_run(tmp_path):
    federation = folders(tmp_path, limit=25.0)
    federation.run()
    talk, _, _ = agreed(federation)
    assert talk.propose().fields["code"] == "budget"


def test_the_same_message_gets_the_same_bytes_and_another_one_none(tmp_path):
    federation = folders(tmp_path)
    talk, terms, about = agreed(federation)
    assert talk.propose().kind == "agreed"
    theta = np.zeros(terms.model.size, np.float32)
    first, again = (talk.say("evaluate", about, {"theta": theta}) for _ in range(2))
    assert first.kind == "update"
    assert (first.arrays["update0"] == again.arrays["update0"]).all()
    other = talk.say("evaluate", about, {"theta": theta + 1})
    assert (other.kind, other.fields["code"]) == ("refused", "replayed")
    assert len(rows(federation, "north")) == 1


@pytest.mark.parametrize(
    ("arrays", "code"),
    [
        ({}, "malformed"),
        ({"theta": np.zeros(3, np.float32)}, "malformed"),
        ({"theta": np.full(15, np.nan, np.float32)}, "malformed"),
        ({"theta": np.zeros(15, np.float32), "more": np.zeros(1)}, "malformed"),
    ],
)
def test_wrong_messages_cost_nothing(tmp_path, arrays, code):
    federation = folders(tmp_path)
    talk, _, about = agreed(federation)
    talk.propose()
    reply = talk.say("evaluate", about, arrays)
    assert (reply.kind, reply.fields["code"]) == ("refused", code)
    assert rows(federation, "north") == []


def test_a_run_without_an_evaluation_answers_none(tmp_path):
    federation = folders(tmp_path)
    talk, terms, about = agreed(federation, evaluation=0.0, tests=())
    talk.propose()
    reply = talk.say("evaluate", about, {"theta": np.zeros(terms.model.size, np.float32)})
    assert reply.fields["code"] == "malformed"


def test_a_stricter_site_refuses_later(tmp_path):
    federation = folders(tmp_path)
    talk, terms, about = agreed(federation)
    talk.propose()
    federation.configure("north", evaluation_epsilon=1.0)
    talk.site = federation.site("north")
    reply = talk.say("evaluate", about, {"theta": np.zeros(terms.model.size, np.float32)})
    assert reply.fields["code"] in ("policy", "budget")
    assert rows(federation, "north") == []


def test_terms_are_read_again(tmp_path):
    _, terms, _ = agreed(folders(tmp_path))
    assert Terms.read(terms.json()) == terms


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9])
def test_a_wrong_epsilon_is_refused_at_both_sides(tmp_path, value):
    federation = folders(tmp_path)
    federation.configure("north", evaluation_epsilon=value)
    with pytest.raises(SordinoError, match=r"evaluation_epsilon: .* must lie in"):
        federation.site("north")
    text = (federation.coordinator / "federation.toml").read_text()
    wrong = text.replace("evaluation_epsilon = 20.0", f"evaluation_epsilon = {value}")
    (federation.coordinator / "federation.toml").write_text(wrong)
    with pytest.raises(SordinoError, match=r"evaluation_epsilon: .* must lie in"):
        FederationConfig.read(federation.coordinator / "federation.toml")


def test_the_console_shows_what_the_counts_say(tmp_path):
    federation = folders(tmp_path)
    federation.run()
    (line,) = federation.progress("evaluation")
    sentence = of_coordinator(line, None)
    assert "evaluation on 15 test records of 3 sites, ε = 20: accuracy" in sentence
    assert of_coordinator({"what": "evaluation", "came": [], "why": "too few sites answered"}, None).startswith(
        "no evaluation: too few"
    )


def test_the_demonstration_turns_the_evaluation_on_at_both_sides(tmp_path):
    coordinator = demonstration.prepare(tmp_path, 3, spec={}, evaluation=2.0)
    assert FederationConfig.read(coordinator / "federation.toml").evaluation_epsilon == 2.0
    assert SiteConfig.read(tmp_path / "sites" / "site1" / "site.toml").evaluation_epsilon == 4.0


def test_a_model_that_is_not_shown_to_be_better_than_a_constant_is_told_loudly():
    metric = {"estimate": 0.52, "low": 0.4, "high": 0.6}
    found = {"task": "survival times", "concordance": metric}
    line = {"what": "evaluation", "came": ["a", "b"], "epsilon": 1.0, "records": 90, **found}
    told = of_coordinator({**line, "doubt": noised_metrics.doubt(found)}, None)
    assert "concordance 0.52 (0.4 to 0.6). note: these counts do not show that the model is better" in told
    useless = {**found, "concordance": {"estimate": 0.45, "low": 0.4, "high": 0.49}}
    told = of_coordinator({**line, "doubt": noised_metrics.doubt(useless)}, None)
    assert "WARNING: the model is no better than a constant guess: its concordance is 0.45" in told
    assert "constant guess" not in of_coordinator({**line, "doubt": ""}, None)
