"""A site whose computation fails sends noise around zero: the reply looks as any other, and does not depend on data."""

import numpy as np
import pytest

from sordino import wire
from sordino.errors import SordinoError
from sordino.federation import site_run
from sordino.federation.site_run import SiteRun

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


def test_under_masks_the_sum_opens(tiny, failing):
    federation = tiny("dp-fedgd", trust="secure-aggregation", names=FOUR, rounds=1)
    failing()
    federation.run()
    assert federation.progress("round")[0]["came"] == list(FOUR)
    assert not federation.progress("refused")


def test_persons_still_say_failed(tiny, talk, failing, monkeypatch):
    """Nothing is proved for weights of persons' records, so noise alone cannot be made in this way."""
    federation = tiny("dp-fedgd", names=FOUR)

    def refused(*_):
        raise SordinoError("weight: nothing is proved for weights of the records of a person; leave them out.")

    failing()
    monkeypatch.setattr(SiteRun, "compute_nothing", refused)
    reply = update_of(federation, talk, federation.terms())
    assert (reply.kind, reply.fields["code"]) == ("refused", "failed")
    assert [t for _, t in federation.charged("a")] == [0]
    assert wire.decode(wire.encode("x", reply.fields)).fields == reply.fields
