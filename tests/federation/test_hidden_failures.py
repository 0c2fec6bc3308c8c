"""A site whose computation fails sends noise around zero: the reply looks as any other, and does not depend on data."""

import json

import numpy as np
import pytest

from sordino import wire
from sordino.errors import SordinoError
from sordino.federation import site_run
from sordino.federation.site_run import SiteRun
from sordino.federation.testing import AgreedEvaluation
from tests.federation.messages import NUMBERS
from tests.federation.test_tables import NAMES, configure, tables, with_persons

FOUR = tuple("abcd")


@pytest.fixture
def failing(monkeypatch):
    """Every question to the real records of a site fails."""
    real = site_run.oracle

    def failed(model, data, *rest, **more):
        if data.records.weight is None and data.records.sizes[0] > 1:
            raise SordinoError("update: it is not finite, and noise does not hide that.")
        return real(model, data, *rest, **more)

    return lambda: monkeypatch.setattr(site_run, "oracle", failed)


def update_of(federation, talk, terms):
    talk = talk(federation.site("a"), terms)
    assert talk.propose().kind == "agreed"
    return talk.round(0)


@pytest.mark.parametrize("method", ["dp-fedgd", "dp-fedsofim", "dp-fedadam"])
def test_in_the_open(tiny, talk, failing, method):
    """With the same seed, sites with other records send the same: it is the noise that a right answer has too."""
    federations = [tiny(method, names=FOUR) for _ in range(3)]
    path = federations[1].place("a") / "data.npz"
    with np.load(path) as stored:
        np.savez(path, x=-3 * stored["x"], y=(stored["y"] + 1) % 3)
    right = update_of(federations[2], talk, federations[2].terms())
    failing()
    one, two = (update_of(each, talk, each.terms()) for each in federations[:2])
    for found in (one, two):
        assert found.kind == "update"
        assert found.fields.keys() == right.fields.keys()
        assert {k: v.shape for k, v in found.arrays.items()} == {k: v.shape for k, v in right.arrays.items()}
    for name, array in one.arrays.items():
        assert np.array_equal(array, two.arrays[name])
        assert not np.array_equal(array, right.arrays[name])
    # The right answer less the noise is what the data say; noise alone has none of it.
    assert federations[0].events("a")[-1]["what"] == "failed"
    assert "noise alone was sent" in federations[0].events("a")[-1]["detail"]
    assert [t for _, t in federations[0].charged("a")] == [0]


def test_noise_alone_is_noise_around_zero(tiny, talk, failing, monkeypatch):
    """Without noise nothing is left."""
    federation = tiny("dp-fedgd", names=FOUR)
    failing()
    found = []
    real = site_run.SiteRun.compute_nothing

    def looked(self, round_plan, broadcast, asked=""):
        with monkeypatch.context() as patch:
            bare = site_run.oracle
            patch.setattr(site_run, "oracle", lambda *a, **k: bare(*a, **{**k, "add_noise": False}))
            found.append(real(self, round_plan, broadcast, asked))
        return real(self, round_plan, broadcast, asked)

    monkeypatch.setattr(SiteRun, "compute_nothing", looked)
    update = update_of(federation, talk, federation.terms())
    assert not found[0].any()
    assert update.arrays["update0"].any()


@pytest.mark.parametrize("kind", ["round", "evaluate"])
def test_noise_alone_is_not_the_noise_of_the_answer_that_failed(tiny, talk, monkeypatch, kind):
    """A server can ask so that the noise of an answer decides whether it fails. If the site then sends that very noise,
    the server knows for which records the answer fails: with a step of dp-localadamw that overflows above a number, 5 %
    of the replies excluded a neighbour, where delta = 1e-5 was certified."""
    federation, answers = tiny("dp-fedgd", names=FOUR, rounds=1, seed=None, epsilon=0.01), []
    federation.configure("a", evaluation_epsilon=1.0)
    tests = tuple(federation.site(name).tests for name in FOUR)
    talk = talk(federation.site("a"), federation.terms(evaluation=0.01, tests=tests))
    assert talk.propose().kind == "agreed"
    place, name = (SiteRun, "compute") if kind == "round" else (AgreedEvaluation, "answer")
    real = getattr(place, name)

    def failed_once(*arguments, **keys):
        answers.append(real(*arguments, **keys))
        if len(answers) == 1:
            raise SordinoError("update: it is not finite, and noise does not hide that.")
        return answers[-1]

    monkeypatch.setattr(place, name, failed_once)
    fields = {"run": talk.terms.run, "terms": talk.terms.sha256()} | ({"t": 0, "extras": []} if kind == "round" else {})
    reply = talk.say(kind, fields, {"theta": NUMBERS})
    assert "noise alone was sent" in str(federation.events("a"))
    difference = np.abs(answers[0].numpy() - reply.arrays["update0"]).max()
    assert difference > 5, "the answer without its noise: a mean of terms that are at most 1 long"


def test_under_masks_the_sum_opens(tiny, failing):
    federation = tiny("dp-fedgd", trust="secure-aggregation", names=FOUR, rounds=1)
    failing()
    federation.run()
    assert federation.progress("round")[0]["came"] == list(FOUR)
    assert not federation.progress("refused")


def test_that_the_test_records_cannot_be_scored_is_not_told(tiny, talk, monkeypatch):
    """A model of the coordinator's choice may be one that a site's own test records do not fit."""
    federation = tiny("dp-fedgd", names=FOUR, rounds=1)

    def failed(*_, **__):
        raise IndexError("index out of range in self")

    monkeypatch.setattr(site_run, "scores_to_compare", failed)
    monkeypatch.setattr(site_run, "evaluate", failed)
    talk = talk(federation.site("a"), federation.terms())
    assert [talk.propose().kind, talk.round(0).kind] == ["agreed", "update"]
    fields = {"run": talk.terms.run, "terms": talk.terms.sha256(), "done": 1}
    assert talk.say("finish", fields, {"theta": NUMBERS}).kind == "finished"
    assert federation.events("a")[-1]["what"] == "finished"


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_of_persons(tiny, talk, failing, trust):
    """As one person without records."""
    federation = tables(tiny("dp-fedgd", trust, normalize="table:2", person_records=3, rounds=1))
    with_persons(federation)
    failing()
    federation.run()
    assert not federation.progress("refused")
    assert federation.progress("round")[0]["came"] == list(NAMES)
    assert "noise alone was sent" in str(federation.events("north"))


def test_a_failure_to_send_noise_is_told(tiny, talk, failing, monkeypatch):
    federation = tiny("dp-fedgd", names=FOUR)

    def refused(*_):
        raise SordinoError("no noise")

    failing()
    monkeypatch.setattr(SiteRun, "compute_nothing", refused)
    reply = update_of(federation, talk, federation.terms())
    assert (reply.kind, reply.fields["code"]) == ("refused", "failed")
    assert [t for _, t in federation.charged("a")] == [0]
    assert wire.decode(wire.encode("x", reply.fields)).fields == reply.fields


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("persons", [False, True])
def test_of_an_evaluation(tiny, monkeypatch, trust, persons):
    """The counts of a site that fails are noise around zero, and no word of a failure leaves it."""
    made = tiny("dp-fedgd", trust, normalize="table:2", rounds=1, **({"person_records": 2} if persons else {}))
    federation = tables(made)
    if persons:
        with_persons(federation)
    path = federation.coordinator / "federation.toml"
    path.write_text("evaluation_epsilon = 20.0\n" + path.read_text())
    for name in NAMES:
        configure(federation, name, evaluation_epsilon=30.0)

    def failed(*_):
        raise SordinoError("records of one site")

    monkeypatch.setattr(AgreedEvaluation, "answer", failed)
    federation.run()
    assert not federation.progress("refused")
    found = json.loads((federation.coordinator / "run" / "evaluation" / "evaluation.json").read_text())
    counts = np.abs(found["tally"])
    assert 0 < counts.max() < 0.9, "noise alone: there is one share above it, that of all records, where they count"
    assert "noise alone was sent" in str(federation.events("north"))
