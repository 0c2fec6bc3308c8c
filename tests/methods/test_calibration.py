"""Calibrated intercepts: what they release, what they repair, and what is refused."""

import math

import numpy as np
import pytest
import torch

import sordino as so
from sordino.checks import check_calibration
from sordino.core import Adjacency, Kind, Unit
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.calibration import ROUNDS, calibrated
from sordino.privacy import calibration, spending
from sordino.privacy.evidence.verify import verify
from sordino.privacy.mechanisms.random import Noiseless, Seeded


def rare(n=6000, clients=3):
    """A class of 8 %, which the features tell a little."""
    rng = np.random.default_rng(0)
    y = (rng.random(n) < 0.08).astype(int)
    x = rng.normal(size=(n, 4))
    x[:, 0] += 1.5 * y
    x = 10 * x / np.linalg.norm(x, axis=1, keepdims=True)
    return Records.of(x, y, np.arange(n) % clients)


def risk(records, share, epsilon=2.0):
    """Mean predicted risk of the rare class, and its observed share."""
    method = calibrated(build("auto"), share)
    privacy = so.Privacy(epsilon, trust="secure-aggregation")
    plan = so.Plan(method, 40, records.sizes, privacy)
    source = Noiseless(0) if epsilon == math.inf else Seeded(1)
    model = so.Linear(4, 2)
    *_, last = simulate.run(plan, model, records, source)
    return float(model.scores(last.model, records.x)[:, 1].mean()), float(records.y.double().mean())


def test_clipping_makes_risks_too_low_and_calibration_repairs_them():
    records = rare()
    predicted, observed = risk(records, 0.0)
    assert predicted < 0.8 * observed
    for epsilon in (2.0, math.inf):
        predicted, observed = risk(records, 0.1, epsilon)
        assert predicted == pytest.approx(observed, rel=0.1)


def test_the_order_of_predictions_stays():
    """Only intercepts move: two classes keep their order among records."""
    records, model = rare(), so.Linear(4, 2)
    plain, shifted = (
        [*simulate.run(so.Plan(calibrated(build("auto"), share), rounds, records.sizes, so.Privacy(math.inf)), model,
                       records, Noiseless(0))][-1].model for share, rounds in ((0.0, 30), (0.1, 30 + ROUNDS))
    )  # fmt: skip
    assert torch.equal(plain[:-2], shifted[:-2])
    assert not torch.equal(plain[-2:], shifted[-2:])


@pytest.mark.parametrize("unit", ["record", "person"])
def test_every_contract_holds_and_mutants_are_rejected(unit):
    reports = check_calibration(trials=8, units=[Unit(unit)])
    assert {report.query.split()[-1] for report in reports} == {"gradient", "calibration"}
    assert all(report.passed for report in reports), [report.problems for report in reports]


def test_the_account_is_exact_and_verified():
    plan = so.Plan(calibrated(build("auto"), 0.1), 40, (500, 700), so.Privacy(2.0))
    assert spending.epsilon(plan) == pytest.approx(2.0)
    cert = so.certificate(plan, so.source(None), version="1")
    assert verify(cert).problems == []
    (noise,) = [each for each in calibration.query_noises(plan) if each.query.kind is Kind.CALIBRATION]
    part = ROUNDS * float((noise.sensitivity / noise.std)[0]) ** 2 / spending.mu(plan) ** 2
    assert part == pytest.approx(0.1)
    assert noise.query.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == pytest.approx(2.0)
    assert noise.query.sensitivity(Adjacency.ADD_REMOVE, Unit.RECORD) == pytest.approx(math.sqrt(2))
    assert not plan.method.by_hand


def test_nothing_changes_without_a_share():
    method = build("auto")
    assert calibrated(method, 0.0) is method


@pytest.mark.parametrize("share", [-0.1, 0.6, math.nan])
def test_wrong_shares(share):
    with pytest.raises(SordinoError, match=r"^calibrate: "):
        calibrated(build("auto"), share)


def test_what_is_refused():
    with pytest.raises(SordinoError, match=r"^calibrate: it is proved for records and persons"):
        calibrated(build("auto", "client"), 0.1)
    model = so.Linear(2, 1, "squares")
    with pytest.raises(SordinoError, match=r"^calibrate: intercepts are calibrated for classes, not for squares"):
        model.calibration_sum(torch.zeros(3), Records.of(np.zeros((2, 2)), np.zeros(2), np.zeros(2, int)).shard(0), 1.0)
