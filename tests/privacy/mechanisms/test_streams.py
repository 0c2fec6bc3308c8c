"""What a stream of correlated noise must be before it is paid for as one release."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Correlated, Privacy, Trust
from sordino.data.records import Records
from sordino.engines import reference
from sordino.engines.schedule import round_plans
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.ledger import Ledger
from sordino.evidence.statement import statement
from sordino.evidence.verify import NOT_SIGNED, verify
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan, continues_stream

MODEL = Linear(2, 1, Loss.SQUARES, bias=False)


@pytest.fixture
def records():
    rng = np.random.default_rng(0)
    return Records.of(rng.normal(size=(12, 2)), rng.normal(size=12), np.repeat(np.arange(6), 2), dtype=torch.float64)


def plan_for(records, trust="secure-aggregation", participation="cyclic:3", **more):
    method = build("dp-ftrl", mechanism="banded", band=3)
    return Plan(method, 6, records.sizes, Privacy(2.0, trust=trust), Participation.parse(participation), **more)


def test_a_sum_on_record_is_not_noised_again(records, tmp_path):
    """Said again with a new key, its noise would be averaged out. Part of a stream cannot be gone on with."""
    plan = plan_for(records)
    with Ledger(tmp_path / "ledger.db") as ledger:
        once = list(reference.run(plan, MODEL, records, Secure(), ledger=ledger, run_id="r"))
        again = list(reference.run(plan, MODEL, records, Secure(), ledger=ledger, run_id="r"))
        assert all(torch.equal(a.aggregate, b.aggregate) for a, b in zip(once, again, strict=True))
    with Ledger(tmp_path / "part.db") as ledger:
        begun = reference.run(plan, MODEL, records, Secure(), ledger=ledger, run_id="r")
        next(begun), next(begun)
        with pytest.raises(SordinoError, match="resume"):
            list(reference.run(plan, MODEL, records, Secure(), ledger=ledger, run_id="r"))
    with Ledger(tmp_path / "seeded.db") as ledger:
        runs = [list(reference.run(plan, MODEL, records, Seeded(1), ledger=ledger, run_id="r")) for _ in range(2)]
    for once, again in zip(*runs, strict=True):
        assert torch.equal(once.aggregate, again.aggregate)


def test_factors_that_promise_more_than_they_hold_are_refused(records):
    eye = np.eye(6)
    late = np.linalg.inv(np.eye(6) + np.diag(np.ones(5), 1))
    for factors, word in (
        (Correlated(0.01 * eye, eye), "identity"),
        (Correlated(np.linalg.inv(late), late), "causal"),
        (Correlated(eye[:4, :4], eye[:4, :4]), "rounds"),
    ):
        method = build("dp-fedgd")
        (stage,) = method.stages
        stage = stage._replace(queries=(replace(stage.queries[0], noise=factors),))
        with pytest.raises(SordinoError, match=word):
            Plan(method._replace(stages=(stage,)), 6, records.sizes, Privacy(2.0))


def test_clients_that_come_by_coin_are_not_certified(records):
    with pytest.raises(SordinoError, match="participation"):
        plan_for(records, participation="poisson:0.5")
    plan = plan_for(records, participation="poisson:0.5", uncertified=True)
    cert = certificate(plan, Secure(), version="0")
    assert not cert["certified"]
    assert "poisson" in cert["reasons"][0]


def test_the_certificate_tells_the_noise_that_clients_add(records):
    plan = plan_for(records)
    cert = certificate(plan, Secure(), version="0")
    (round_plan, *_) = round_plans(plan, MODEL)
    level, rate = calibration.query_noises(plan)[0], plan.participation.rate(plan.clients)
    # Every client's part, of those in the cohort and those outside it, adds up to the noise of the sum.
    parts = calibration.own_std(plan, level) * plan.weights / np.asarray(plan.sizes) / rate
    assert math.sqrt((parts**2).sum()) == pytest.approx(float(round_plan.sum_stds[0]))
    verdict = verify(cert)
    assert not verdict.problems
    assert verdict.assumed == []  # `verify` computes the sensitivity of banded noise itself
    assert verdict.gaps == [NOT_SIGNED]
    assert any("outside a round's cohort" in line for line in cert["assumes"])


def test_a_statement_tells_the_bound_of_its_adjacency(records):
    for adjacency in ("add-remove", "replace-one"):
        plan = Plan(build("dp-fednew"), 3, records.sizes, Privacy(2.0, adjacency=adjacency))
        moved = calibration.query_noises(plan)[0].sensitivity.max()
        assert f"at most {moved:.4g} when" in statement(certificate(plan, Secure(), version="0"))


def test_a_bound_that_rounding_would_break_is_refused():
    with pytest.raises(SordinoError, match="curvature_clip"):
        build("dp-fednew", curvature_clip=1e4, alpha=5e-4, rho=5e-4)
    with pytest.raises(SordinoError, match="curvature_clip"):
        build("dp-fednew-fc", covariance_clip=1e4, alpha=5e-4, rho=5e-4)
    with pytest.raises(SordinoError, match="class_weights"):
        Linear(2, 3, class_weights=torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.5", "cyclic:2"])
def test_noise_that_is_not_carried_on_is_paid_round_by_round(participation, trust):
    """A schedule's rounds have noise of different sizes, each its own: mu squared adds up over the rounds a client came
    to, nobody sends noise for others, and a run may go on with another key."""
    sizes, rounds = (40, 30, 20), 7
    plan = Plan(
        build("dp-ftrl", mechanism="schedule"),
        rounds,
        sizes,
        Privacy(3.0, trust=trust),
        Participation.parse(participation),
    )
    assert not plan.random_participation
    assert not any(continues_stream(plan, t) for t in range(rounds))
    (level,) = calibration.query_noises(plan)
    stream = plan.stages[0].queries[0].noise
    for i in range(len(sizes)):
        mu2 = 0.0
        for t, cohort in enumerate(plan.cohorts):
            if i not in cohort:
                continue
            weight, std = level.weight, level.std * stream.decoder[t, t]
            if trust is Trust.UNTRUSTED_SERVER:
                mu2 += (level.sensitivity[i] / std[i]) ** 2
            else:  # the participants' shares, as they arrive in the sum
                arriving = (weight * std)[cohort] * calibration.noise_share(plan, len(cohort))
                mu2 += (level.sensitivity[i] * weight[i]) ** 2 / (arriving**2).sum()
        (group,) = [g for g in spending.groups(plan) if i in g.clients]
        assert group.mu**2 == pytest.approx(mu2, rel=1e-9)
    assert spending.mu(plan) <= gaussian.mu(3.0, 1e-5) * (1 + 1e-9)
    assert not any("outside a round's cohort" in line for line in certificate(plan, Secure(), version="0")["assumes"])
