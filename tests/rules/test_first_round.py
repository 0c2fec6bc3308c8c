"""A and a gradient in one round: the first step by hand, its noise, and a survival model after one round."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.trace import sent_answers
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.few_rounds import covariance_share
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.privacy import spending
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules import estimates, first_round
from sordino.rules.life_table import of_cells
from sordino.training import survival
from tests.support import plan_for

SIZES = (300, 500, 700)
SURVIVAL = Hazards(4, (0.0, 1.0, 2.0, 4.0))
WEIGHTS = np.array([0.25, -0.25, 0.1, 0.0])


def records_of(model, seed=0):
    """Records of norm 10 and a bit, with labels that depend on them."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    x = rng.normal(size=(n, 4))
    x = 10 * x / np.linalg.norm(x, axis=1, keepdims=True) + 0.5
    score = x @ WEIGHTS
    if isinstance(model, Hazards):
        time, seen = rng.exponential(4 * np.exp(-score)), rng.exponential(4, n)
        y = np.where(time < seen, time, -seen)
    elif model.outputs == 1:
        y = score / 5 + 0.1 * rng.normal(size=n)
    else:
        y = np.digitize(score + rng.normal(size=n), (-1.0, 1.0))
    return Records.of(x, y, np.repeat(np.arange(3), SIZES), dtype=torch.float64)


def trained(model, rounds, epsilon=math.inf, engine=simulate, seed=1, method="auto", **options):
    records = records_of(model)
    intervals = {"intervals": model.outputs} if isinstance(model, Hazards) else {}
    plan = plan_for(method, records, rounds, epsilon=epsilon, few_rounds=rounds, radius=11.0, **intervals, **options)
    source = Noiseless(0) if plan.noiseless else Seeded(seed)
    return plan, records, list(engine.run(plan, model, records, source))[-1].model


def moments(records):
    u = torch.cat([records.x, torch.ones_like(records.x[:, :1])], 1)
    return u, u.T @ u / len(u)


def test_one_round_without_noise_is_regression_from_sufficient_statistics(monkeypatch):
    monkeypatch.setattr(estimates, "TRAINED_LOGIT", math.inf)  # no ridge
    model = Linear(4, 1, Loss.SQUARES)
    _, records, theta = trained(model, 1, clip=1e6)
    u, A = moments(records)
    regression = torch.linalg.solve(A, u.T @ records.y.double() / len(u))
    assert torch.allclose(theta, regression, atol=1e-8)
    model = Linear(4, 3)
    _, records, theta = trained(model, 1, clip=1e6)
    one_hot = torch.nn.functional.one_hot(records.y, 3).double()
    wanted = 3 * torch.linalg.solve(A, u.T @ (one_hot - 1 / 3) / len(u))
    assert torch.allclose(theta.view(5, 3), wanted, atol=1e-8)
    assert not torch.allclose(theta.view(5, 3), wanted / 3, atol=1e-3)  # the mutant


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize("trust", list(Trust))
def test_all_that_is_promised_is_spent(unit, trust):
    for rounds in (1, 2, 4):
        plan = plan_for("auto", SIZES, rounds, unit=unit, trust=trust, epsilon=2.0, few_rounds=rounds)
        assert math.isclose(spending.epsilon(plan), 2.0, rel_tol=1e-6)
        part = np.diff(spending.mu_after_each_round(plan) ** 2, prepend=0) / spending.mu(plan) ** 2
        share = covariance_share(rounds)
        later = (1 - share) / rounds
        assert np.allclose(part, [later + share] + [later] * (rounds - 1))


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize("rounds", [1, 3])
def test_engines_agree(unit, rounds):
    for trust in (Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION):
        both = {"epsilon": 4.0, "unit": unit, "trust": trust}
        _, records, slow = trained(Linear(4, 3), rounds, engine=reference, **both)
        plan = plan_for("auto", records, rounds, few_rounds=rounds, radius=11.0, **both)
        fast = list(simulate.run(plan, Linear(4, 3), records, Seeded(1), shares=True))[-1].model
        assert torch.allclose(slow, fast, rtol=1e-9)
        theta = torch.zeros(2, fast.shape[-1], dtype=torch.float64)
        together = list(simulate.run(plan, Linear(4, 3), records, [Seeded(1), Seeded(2)], theta=theta))[-1].model
        assert torch.allclose(together[0], list(simulate.run(plan, Linear(4, 3), records, Seeded(1)))[-1].model)
    if unit is Unit.RECORD:
        _, _, slow = trained(SURVIVAL, rounds, epsilon=4.0, engine=reference)
        assert torch.isfinite(slow).all()


def test_runs_of_a_batch_have_their_own_noise():
    """Plans that differ in epsilon, side by side: A and the gradient have other noise in each."""
    model, records = Linear(4, 3), records_of(Linear(4, 3))
    plans = [plan_for("auto", records, 2, epsilon=e, few_rounds=2, radius=11.0) for e in (0.5, 8.0)]
    theta = torch.zeros(2, model.size, dtype=torch.float64)
    together = list(simulate.run(plans, model, records, [Seeded(1), Seeded(1)], theta=theta))[-1].model
    for plan, found in zip(plans, together, strict=True):
        assert torch.allclose(found, list(simulate.run(plan, model, records, Seeded(1)))[-1].model)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_survival_model_after_one_round_is_nearly_the_last_one(rounds):
    _, records, theta = trained(SURVIVAL, rounds)
    y, score = records.y.numpy(), (records.x @ theta[:4]).numpy()
    assert survival.concordance(y, score) > survival.concordance(y, records.x.numpy() @ WEIGHTS) - 0.01
    table = of_cells(SURVIVAL.tally_sum(theta, records.fused(np.arange(3), np.ones(3)), 1.0) / len(y))
    survived = (1 - table.events / table.at_risk).cumprod(-1)
    assert torch.allclose(SURVIVAL.scores(theta, records.x).mean(0), survived.double(), atol=0.02)


@pytest.mark.parametrize("model", [Linear(4, 3), SURVIVAL])
def test_several_answers_of_one_round_are_added_up_as_integers(model):
    plan, records, theta = trained(model, 1, epsilon=8.0, trust=Trust.SECURE_AGGREGATION)
    messages = sent_answers(plan, model, 4, records.y.dtype)
    masked = replace(plan, integers=Integers(messages, 0, 1))
    found = list(simulate.run(masked, model, records, Seeded(1)))[-1].model
    assert torch.isfinite(found).all()
    _, _, exact = trained(model, 1)
    assert float((found - exact).norm()) < 3 * float((theta - exact).norm()) + 1e-3  # noise of the same size


def test_what_cannot_run_is_refused():
    with pytest.raises(
        SordinoError, match=r"auto needs more than 4 rounds. For fewer: build\('auto', few_rounds=ROUNDS"
    ):
        assert plan_for("auto", SIZES, 3).stage_rounds
    with pytest.raises(SordinoError, match="few_rounds: 11"):
        build("auto", few_rounds=11)
    with pytest.raises(SordinoError, match="few_rounds: a survival model at client level"):
        build("auto", "client", few_rounds=1, intervals=3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_first_step_takes_the_caution_with_the_least_expected_loss(monkeypatch, rounds):
    """With one value tried, it is the step of that value; with all, the loss on the records falls."""
    model, engine = Linear(4, 3, Loss.SOFTMAX), reference
    found = {}
    for cautions in ((1.0,), (0.0,), first_round.CAUTIONS):
        monkeypatch.setattr(first_round, "CAUTIONS", cautions)
        found[cautions] = trained(model, rounds, epsilon=3.0, engine=engine)[2]
    careful, careless, best = found.values()
    assert not torch.allclose(careful, careless)
    records = records_of(model)
    logits = [records.x @ theta.view(5, 3)[:4] + theta.view(5, 3)[4] for theta in (careful, careless, best)]
    losses = [float(torch.nn.functional.cross_entropy(each, records.y)) for each in logits]
    assert losses[2] <= min(losses[:2]) + 0.05
