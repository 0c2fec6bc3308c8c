"""Rare classes: what the first gradient says of them, and what that changes in a run."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from sordino.core import Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules import rare_classes
from sordino.rules.rare_classes import intercepts_of
from tests.support import plan_for

FACTOR = torch.tensor([0.7], dtype=torch.float64)


def found(shares, std=0.0, noise=0.0):
    shares = torch.tensor(shares, dtype=torch.float64)
    gradient = FACTOR * (1 / len(shares) - shares) + torch.as_tensor(noise)
    return intercepts_of(gradient, torch.tensor([std], dtype=torch.float64), FACTOR)


@pytest.mark.parametrize("shares", [(0.99, 0.01), (0.8, 0.2), (0.9, 0.06, 0.04)])
def test_without_noise_the_intercepts_predict_the_shares(shares):
    shift, impurity = found(shares)
    assert torch.softmax(shift, -1).tolist() == pytest.approx(shares)
    gini = sum(share * (1 - share) for share in shares)
    assert float(impurity) == pytest.approx(gini / (1 - 1 / len(shares)))


def test_an_absent_class_has_a_finite_intercept():
    shift, impurity = found((1.0, 0.0))
    assert torch.isfinite(shift).all()
    assert 0 < float(impurity) < 1e-4


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.1,) * 10, (0.3,) + (0.1,) * 7])
def test_classes_that_are_not_rare_change_nothing(shares):
    shift, impurity = found(shares)
    assert not shift.any()
    assert float(impurity) == 1


def test_noise_that_may_explain_the_shares_changes_nothing():
    assert not found((0.76, 0.24), std=0.05).shift.any()
    assert found((0.76, 0.24), std=0.03).shift.any()


def test_a_share_below_its_noise_counts_as_that():
    std = 0.035  # of a share, 0.05
    shift, _ = found((0.99, 0.01), std=std, noise=(-0.01, 0.01))
    logit = float(shift[0] - shift[1])
    assert 0.5 * np.log(0.95 / 0.05) < logit < np.log(0.99 / 0.05)


def rare_records(clients=2):
    rng = np.random.default_rng(0)
    y = (rng.random(4000) < 0.03).astype(np.int64)
    x = rng.normal(size=(4000, 12)) + 1.5 * y[:, None] * (np.arange(12) < 6) + 1.0
    x = 10 * x / np.linalg.norm(x, axis=1, keepdims=True)
    return x, y, Records.of(x, y, np.arange(4000) % clients, dtype=torch.float64)


def test_a_run_ranks_records_of_a_rare_class_better(monkeypatch):
    x, y, records = rare_records()
    plan = plan_for("auto", records, 10, epsilon=4.0, centred=False)

    def auc():
        theta = list(simulate.run(plan, Linear(12, 2), records, Seeded(1)))[-1].model.view(13, 2).numpy()
        return roc_auc_score(y, x @ (theta[:-1, 1] - theta[:-1, 0]))

    better = auc()
    monkeypatch.setattr(rare_classes, "RARE", 0.0)
    assert better > auc() + 0.03


def test_both_engines_agree(monkeypatch):
    _, _, records = rare_records()
    plan = plan_for("auto", records, 8, epsilon=4.0)
    one, other = (
        list(engine.run(plan, Linear(12, 2), records, Noiseless(0)))[-1].model for engine in (reference, simulate)
    )
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(rare_classes, "RARE", 0.0)
    assert not torch.allclose(one, list(simulate.run(plan, Linear(12, 2), records, Noiseless(0)))[-1].model, atol=1e-3)


def test_whole_clients_keep_their_steps(monkeypatch):
    """Their messages are clipped as a whole, so the factor is not known."""
    _, _, records = rare_records(clients=40)
    plan = plan_for("auto", records, 6, epsilon=8.0, unit=Unit.CLIENT)
    one = list(simulate.run(plan, Linear(12, 2), records, Seeded(1)))[-1].model
    monkeypatch.setattr(rare_classes, "RARE", 0.0)
    assert torch.equal(one, list(simulate.run(plan, Linear(12, 2), records, Seeded(1)))[-1].model)


def last_model(records, rounds=6, theta=None, **keys):
    plan = plan_for("auto", records, rounds, epsilon=8.0, **keys)
    return list(simulate.run(plan, Linear(12, 2), records, Seeded(1), theta=theta))[-1].model


@pytest.mark.parametrize("keys", [{"participation": "fixed:1"}, {"batch": "poisson:64"}])
def test_cohorts_and_minibatches_say_nothing_of_all_records(keys, monkeypatch):
    """The first cohort may be one client, which has its own shares."""
    _, _, records = rare_records()
    one = last_model(records, **keys)
    monkeypatch.setattr(rare_classes, "RARE", 0.0)
    assert torch.equal(one, last_model(records, **keys))


def test_a_model_that_is_not_zero_keeps_its_intercepts(monkeypatch):
    _, _, records = rare_records()
    start = torch.full((26,), 0.01, dtype=torch.float64)
    one, zero = last_model(records, theta=start), last_model(records)
    monkeypatch.setattr(rare_classes, "RARE", 0.0)
    assert torch.equal(one, last_model(records, theta=start))
    assert not torch.equal(zero, last_model(records))
