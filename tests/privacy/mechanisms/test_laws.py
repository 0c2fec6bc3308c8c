"""A noise law is added by registration alone; what is not registered is refused."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sordino.core import Independent, Noise, Privacy, Query, Trust
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate, listed
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import events
from sordino.privacy.accounting.events import Composed, Gaussian, NoiseEvent, Release, Repeated, register_event
from sordino.privacy.accounting.events import Sampled as SampledEvent
from sordino.privacy.accounting.subsampled import Sampler
from sordino.privacy.mechanisms import laws
from sordino.privacy.mechanisms.laws import mechanism_of, register
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.plan import Plan

DELTA = 1e-5
SIZES = (30, 40, 50)


@dataclass(frozen=True)
class Doubled(Noise):
    """Gaussian noise of twice the standard deviation that is needed."""


@dataclass(frozen=True)
class Unknown(Noise):
    """A law that nobody registered."""


class DoubledGaussian(Mechanism):
    name = "doubled-gaussian"

    def std(self, sensitivity, mu):
        return 2 * sensitivity / mu


@pytest.fixture(autouse=True)
def doubled():
    """The toy law, for the time of one test."""
    before = [(registry, dict(registry)) for registry in (laws.NOISE_LAWS, events.EVENTS)]
    register(Doubled)(DoubledGaussian)
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def method(noise):
    base = build("dp-fedgd")
    (stage,) = base.stages
    query = replace(stage.queries[0], noise=noise)
    return base._replace(stages=(stage._replace(queries=(query,)),))


def plan(law, trust=Trust.UNTRUSTED_SERVER, **fields):
    return Plan(method(law), 4, SIZES, Privacy(2.0, DELTA, trust=trust), **fields)


@pytest.mark.parametrize("trust", list(Trust))
def test_a_registered_law_is_calibrated_and_accounted(trust):
    usual, toy = plan(Independent(), trust), plan(Doubled(), trust)
    np.testing.assert_allclose(calibration.client_std(toy, 0, 0), 2 * calibration.client_std(usual, 0, 0))
    assert spending.epsilon(usual) == pytest.approx(2.0)
    assert spending.mu(toy) == pytest.approx(spending.mu(usual) / 2)
    assert spending.epsilon_after(toy, 3) == pytest.approx(spending.epsilon(toy))


@pytest.mark.parametrize("trust", list(Trust))
def test_it_runs_in_both_engines_with_the_noise_that_is_accounted_for(trust):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)).astype(np.float32), rng.integers(0, 2, sum(SIZES))
    records = Records.of(x, y, np.repeat(np.arange(3), SIZES))
    model = Linear(4, 2)
    aggregates = {}
    for noise in (Independent(), Doubled()):
        found = plan(noise, trust)
        slow = [each.aggregate for each in reference.run(found, model, records, Seeded(1))]
        fast = [each.aggregate for each in simulate.run(found, model, records, Seeded(1), shares=True)]
        for one, other in zip(slow, fast, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        aggregates[type(noise)] = slow[0]
    bare = next(reference.run(plan(Doubled(), trust, noise=1e-6), model, records, Seeded(1))).aggregate
    torch.testing.assert_close(aggregates[Doubled] - bare, 2 * (aggregates[Independent] - bare), rtol=1e-3, atol=1e-5)


def test_it_is_charged_certified_and_verified(tmp_path):
    toy = plan(Doubled())
    cert = certificate(toy, Secure(), version="x")
    assert cert["certified"]
    assert cert["queries"][0]["mechanism"] == "doubled-gaussian"
    assert {r["mechanism"] for group in cert["groups"] for r in group["releases"]} == {"gaussian"}
    assert cert["epsilon"] == pytest.approx(spending.epsilon(toy))
    verdict = verify(cert)
    assert verdict.problems == []
    assert verdict.recomputed == pytest.approx(cert["epsilon"], rel=5e-3)
    with Ledger(tmp_path / "ledger.db", epsilon=2.0, delta=DELTA) as ledger:
        for t in range(4):
            ledger.charge(charges(toy, 0, t, "run"))
        assert ledger.spent_epsilon("client 0", DELTA) == pytest.approx(cert["epsilon"])


def test_it_has_no_integer_form_unless_it_says_so():
    with pytest.raises(SordinoError, match="doubled-gaussian noise has no integer form"):
        plan(Doubled(), Trust.SECURE_AGGREGATION, integers=Integers(10))


@pytest.mark.parametrize("noise", [Unknown(), "gaussian"])
def test_an_unregistered_law_is_refused(noise):
    with pytest.raises(SordinoError, match=f"no mechanism is registered for {type(noise).__name__}"):
        plan(noise)
    with pytest.raises(SordinoError, match="no mechanism is registered"):
        mechanism_of(noise)


def test_a_law_is_registered_once_and_with_a_known_event():
    with pytest.raises(SordinoError, match="Doubled has a mechanism already"):
        register(Doubled)(DoubledGaussian)

    class Strange(NoiseEvent):
        name = "strange"

    class StrangeNoise(Mechanism):
        event = Strange

    with pytest.raises(SordinoError, match="no account of strange"):
        register(Unknown)(StrangeNoise)
    register_event(Strange)
    register(Unknown)(StrangeNoise)
    assert isinstance(mechanism_of(Unknown()), StrangeNoise)


# ----------------------------------------------------------------------------------------------------------- events


class PureDP(NoiseEvent):
    """Noise that is epsilon-DP at delta 0, epsilon being the ratio: it is epsilon^2 / 2-concentrated DP."""

    name = "pure-dp"


def test_an_event_of_another_law_is_accounted_once_it_is_registered():
    event = Repeated(3, PureDP(0.2))
    with pytest.raises(SordinoError, match="no account of PureDP"):
        events.epsilon([event], DELTA, Privacy().adjacency)
    register_event(PureDP)
    assert events.mu([event]) == pytest.approx(0.2 * 3**0.5)
    alone = events.epsilon([event], DELTA, Privacy().adjacency)
    both = events.epsilon([Composed((event, Gaussian(0.3)))], DELTA, Privacy().adjacency)
    assert 0 < alone < both
    sampled = SampledEvent(Sampler.POISSON, 0.1, PureDP(0.2))
    assert events.epsilon([sampled], DELTA, Privacy().adjacency) == np.inf


def test_nested_events_amount_to_the_flat_release():
    flat = Release("0.0 gradient", 2.0, 3.0, 12, 0.1, Sampler.POISSON)
    nested = Repeated(3, Composed((Repeated(4, SampledEvent(Sampler.POISSON, 0.1, Gaussian(2.0 / 3.0))),)))
    adjacency = Privacy().adjacency
    assert events.epsilon([nested], DELTA, adjacency) == events.epsilon([flat], DELTA, adjacency)
    assert events.mu([nested]) == pytest.approx(events.mu([flat]))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mechanism": "laplace"}, "no independent account of mechanism"),
        ({"integers": True}, "integers: no certificate"),
    ],
)
def test_a_certificate_of_an_unknown_mechanism_is_refused(change, word):
    cert = certificate(plan(Independent()), Secure(), version="x")
    cert["groups"][0]["releases"][0].update(change)
    with pytest.raises(SordinoError, match=word):
        verify(cert)
    with pytest.raises(SordinoError, match="mechanism"):
        listed(cert["groups"][0]["releases"])


def test_a_query_has_gaussian_noise_unless_it_says_otherwise():
    noise = Query.__dataclass_fields__["noise"].default
    assert mechanism_of(noise).name == "gaussian"
    assert mechanism_of(noise).with_integers(Integers(10)).name == "smoothed-discrete-gaussian"
