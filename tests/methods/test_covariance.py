"""DP-FedFC: what the covariance costs, how it is noised and inverted, and what is left where it is the identity."""

import math

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Adjacency, Kind, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation
from tests.support import classified, plan_for

MODEL = Linear(3, 3)
ADD, SWAP = Adjacency
SIZES = (6, 9, 12, 20)


def federation(sizes=SIZES, seed=0):
    return classified(sizes, seed=seed, scale=[0.2, 1.0, 3.0])


def run(plan, records, seed=3, model=MODEL, **kwargs):
    return list(simulate.run(plan, model, records, Seeded(seed), shares=True, **kwargs))


def models(turns_):
    return torch.stack([this_round.model for this_round in turns_])


# ------------------------------------------------------------------------------------------------- the identity


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_where_the_covariance_is_the_identity_it_is_gradient_descent(unit):
    """A ridge so wide that nothing else is seen beside it, and a step as much longer: without noise, FedGD.

    The preconditioner is then I to |A| / gamma = 1e-8. At client level the clip is on the preconditioned gradient.
    """
    records, gamma = federation(), 1e8
    options = {"unit": unit, "epsilon": math.inf}
    gd = models(run(plan_for("dp-fedgd", records, 5, lr=0.3, clip=0.5, **options), records))
    scaled = {"clip": 0.5 / gamma, "lr": 0.3 * gamma} if unit is Unit.CLIENT else {"clip": 0.5, "lr": 0.3 * gamma}
    fc = run(plan_for("dp-fedfc", records, 6, gamma=gamma, **scaled, **options), records)
    assert torch.equal(fc[0].model, torch.zeros(MODEL.size, dtype=torch.float64)), "its first round is the covariance's"
    torch.testing.assert_close(models(fc[1:]), gd, rtol=1e-6, atol=1e-7)
    near = models(run(plan_for("dp-fedfc", records, 6, gamma=1.0, clip=0.5, lr=0.3, **options), records)[1:])
    assert not torch.allclose(near, gd, rtol=1e-2, atol=1e-4)


def test_whitened_features_need_no_preconditioner():
    """Least squares, no bias, mean of x x^T exactly I, nothing cut: (I + gamma I)^-1 is a number."""
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.normal(size=(60, 3)))[0] * math.sqrt(60)
    records = Records.of(x, rng.normal(size=60), np.repeat(np.arange(3), 20), dtype=torch.float64)
    model = Linear(3, 1, Loss.SQUARES, bias=False)
    options = {"epsilon": math.inf, "clip": 1e6}
    gd = models(run(plan_for("dp-fedgd", records, 5, lr=0.2 / 1.5, **options), records, model=model))
    plan = plan_for("dp-fedfc", records, 6, lr=0.2, gamma=0.5, covariance_clip=1e6, **options)
    torch.testing.assert_close(models(run(plan, records, model=model)[1:]), gd, rtol=1e-10, atol=1e-12)
    skewed = Records(records.x * torch.tensor([1.0, 2.0, 0.5]).double(), records.y, records.starts)
    a, b = (
        models(run(p, skewed, model=model)) for p in (plan, plan_for("dp-fedgd", records, 5, lr=0.2 / 1.5, **options))
    )
    assert not torch.allclose(a[1:], b, rtol=1e-2)


def test_where_nobody_came_to_the_covariance_round_it_is_gradient_descent():
    """Draw for draw and at the same price: the round that nobody came to is free, and A = I + nothing."""
    records = federation()
    who = {"participation": "poisson:0.4"}
    seed = next(s for s in range(99) if not len(Participation.parse("poisson:0.4").schedule(8, 4, s)[0]))
    gd = plan_for("dp-fedgd", records, 8, lr=0.3, schedule_seed=seed, **who)
    fc = plan_for("dp-fedfc", records, 8, lr=0.3, schedule_seed=seed, **who)
    assert [g.mu for g in spending.groups(fc)] == pytest.approx([g.mu for g in spending.groups(gd)])
    assert sum(map(len, fc.cohorts[1:])) > 3
    torch.testing.assert_close(models(run(fc, records)), models(run(gd, records)), rtol=1e-12, atol=1e-12)
    came = next(s for s in range(99) if len(Participation.parse("poisson:0.4").schedule(8, 4, s)[0]))
    a, b = (
        models(run(plan_for(name, records, 8, lr=0.3, schedule_seed=came, **who), records))
        for name in ("dp-fedgd", "dp-fedfc")
    )
    assert not torch.allclose(a, b, rtol=1e-2)


# ----------------------------------------------------------------------------------------------- what it computes


def test_the_step_by_hand():
    """From the aggregates of a noised run: A of the first round, symmetrised, its eigenvalues floored."""
    records, lr, gamma = federation(), 0.3, 0.2
    walk = run(plan_for("dp-fedfc", records, lr=lr, gamma=gamma), records)
    A = walk[0].aggregate
    assert A.shape == (4, 4)
    torch.testing.assert_close(A, A.T, rtol=0, atol=1e-14)
    values, vectors = torch.linalg.eigh(A + gamma * torch.eye(4, dtype=A.dtype))
    P = vectors @ (1 / values.clamp_min(gamma)).diag() @ vectors.T
    theta = torch.zeros(MODEL.size, dtype=torch.float64)
    for this_round in walk[1:]:
        theta = theta - lr * (P @ this_round.aggregate.view(4, 3)).flatten()
        torch.testing.assert_close(this_round.model, theta, rtol=1e-9, atol=1e-12)
    wrong = -lr * (this_round.aggregate.view(3, 4) @ P).flatten()
    assert not torch.allclose(wrong, walk[-1].model - walk[-2].model, rtol=1e-3), "rows for columns"


def test_the_covariance_is_the_clipped_mean_of_outer_products():
    """Without noise; weighted by records, the bias counting as a feature."""
    records = federation()
    (first, *_) = run(plan_for("dp-fedfc", records, epsilon=math.inf, covariance_clip=2.0), records)
    u = torch.cat([records.x, torch.ones(47, 1, dtype=torch.float64)], 1)
    cut = (2.0 * (1 - SAFETY) / u.square().sum(1)).clamp_max(1)
    torch.testing.assert_close(
        first.aggregate, (cut[:, None, None] * u[:, :, None] * u[:, None, :]).mean(0), rtol=0, atol=3e-6
    )
    assert 0.1 < (cut < 1).double().mean() < 0.95
    (user, *_) = run(plan_for("dp-fedfc", records, unit=Unit.CLIENT, epsilon=math.inf, covariance_clip=2.0), records)
    means = torch.stack([(rows[:, :, None] * rows[:, None, :]).mean(0) for rows in torch.split(u, SIZES)])
    norms = means.flatten(1).norm(dim=1)
    assert (norms > 2).any()
    want = ((2.0 * (1 - SAFETY) / norms).clamp_max(1)[:, None, None] * means).mean(0)
    torch.testing.assert_close(user.aggregate.view(4, 4), want, rtol=0, atol=3e-6)  # 1e-6 of the clip, and of its root


def test_a_user_clips_its_preconditioned_gradient():
    records, gamma = federation(), 0.2
    plan = plan_for(
        "dp-fedfc", records, unit=Unit.CLIENT, gamma=gamma, clip=0.05, epsilon=math.inf, covariance_clip=1e6
    )
    walk = run(plan, records)
    P = torch.linalg.inv(walk[0].aggregate.view(4, 4) + gamma * torch.eye(4, dtype=torch.float64))
    said = []
    for i in range(4):
        g = MODEL.clipped_sum(torch.zeros(MODEL.size, dtype=torch.float64), records.shard(i), math.inf) / SIZES[i]
        y = (P @ g.view(4, 3)).flatten()
        said.append(y * (0.05 * (1 - SAFETY) / y.norm()).clamp_max(1))
    assert max(float(y.norm()) for y in said) == pytest.approx(0.05, rel=1e-4)
    torch.testing.assert_close(walk[1].aggregate, torch.stack(said).mean(0), rtol=1e-5, atol=1e-9)


def test_noise_is_symmetric_and_white_in_the_frobenius_norm():
    """No data: variance 1 on the diagonal and 1/2 off it, in units of the promised noise; 5 standard errors."""
    d, draws = 100, 15
    model, sizes = Linear(d, 2, bias=False), (5, 7)
    empty = Records.of(np.zeros((12, d)), np.zeros(12, int), np.repeat([0, 1], sizes), dtype=torch.float64)
    plan = plan_for("dp-fedfc", empty)
    std = calibration.aggregate_std(plan, 0)
    noise = torch.stack([next(simulate.run(plan, model, empty, Seeded(s))).aggregate for s in range(draws)]) / std
    torch.testing.assert_close(noise, noise.transpose(1, 2), rtol=0, atol=1e-12)
    rows, columns = torch.triu_indices(d, d, 1)
    for entries, variance in ((noise.diagonal(dim1=1, dim2=2), 1.0), (noise[:, rows, columns], 0.5)):
        found, error = float(entries.square().mean()), 5 * math.sqrt(2 / entries.numel()) * variance
        assert abs(found - variance) < error
        assert abs(found - 0.75) > error, "one variance everywhere would show"


# --------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize(("adjacency", "matrix", "vector"), [(ADD, 1.0, 1.0), (SWAP, math.sqrt(2), 2.0)])
def test_sensitivities(adjacency, matrix, vector, unit):
    """Positive semi-definite: sqrt(2) where something is replaced, not 2."""
    plan = plan_for("dp-fedfc", federation(), unit=unit, adjacency=adjacency, clip=0.7, covariance_clip=3.0)
    (group,) = spending.groups(plan)
    gram, gradient = group.releases
    assert gram.sensitivity == pytest.approx(3.0 * matrix, rel=1e-12)
    assert gradient.sensitivity == pytest.approx(0.7 * vector, rel=1e-12)
    assert (gram.times, gradient.times) == (1, 5)


def test_sqrt_two_is_reached_and_not_exceeded():
    """By pairs of records; 2 would be too much."""
    rng = np.random.default_rng(0)
    model, worst = Linear(3, 1, Loss.SQUARES, bias=False), 0.0
    for _ in range(300):
        x = torch.from_numpy(rng.normal(size=(2, 1, 3)) * 10 ** rng.uniform(-1, 2, size=(2, 1, 1)))
        data = Records.of(x[:, 0], np.zeros(2), np.arange(2), dtype=torch.float64)
        a, b = (model.gram_sum(data.shard(i), 1.0) for i in range(2))
        worst = max(worst, float((a - b).norm()))
    assert 0.99 * math.sqrt(2) < worst <= math.sqrt(2)


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_the_budget_is_split(share, unit):
    plan = plan_for("dp-fedfc", federation(), 9, unit=unit, covariance_share=share)
    (group,) = spending.groups(plan)
    mu = gaussian.mu(8.0, 1e-5)
    gram, gradient = (r.times * (r.sensitivity / r.std) ** 2 / mu**2 for r in group.releases)
    assert gram == pytest.approx(share or 1 / 9, rel=1e-9)
    assert gram + gradient == pytest.approx(1, rel=1e-9)
    assert spending.epsilon(plan) == pytest.approx(8.0, rel=1e-9)


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_every_trust_model_is_proved(trust, unit):
    plan = plan_for("dp-fedfc", federation(), unit=unit, trust=trust)
    assert plan.proved
    assert spending.epsilon(plan) == pytest.approx(8.0, rel=1e-9)


# ------------------------------------------------------------------------------------------------- engines and axes


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.4"])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_engines_agree(unit, participation, trust):
    records = federation()
    plan = plan_for("dp-fedfc", records, unit=unit, participation=participation, trust=trust, gamma=0.5)
    slow = torch.stack([this_round.model for this_round in reference.run(plan, MODEL, records, Seeded(3))])
    torch.testing.assert_close(models(run(plan, records)), slow, rtol=1e-9, atol=1e-9)
    assert slow[-1].norm() > 1e-3


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_runs_are_an_axis(unit):
    records = federation()
    plan = plan_for("dp-fedfc", records, unit=unit, participation="fixed:2")
    theta = torch.zeros(3, MODEL.size, dtype=torch.float64)
    *_, last = simulate.run(plan, MODEL, records, [Seeded(s) for s in range(3)], theta=theta)
    for r in range(3):
        *_, one = simulate.run(plan, MODEL, records, Seeded(r))
        torch.testing.assert_close(last.model[r], one.model, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(last.model[0], last.model[1])


def test_it_resumes_from_any_round():
    records = federation()
    plan = plan_for("dp-fedfc", records)
    whole = run(plan, records)
    for t in range(5):
        rest = run(plan, records, start=t + 1, checkpoint=whole[t].checkpoint)
        torch.testing.assert_close(rest[-1].model, whole[-1].model, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------- what is refused


class TwoLayers(Linear):
    @property
    def shapes(self):
        return ((3, 3), (3,))


def test_it_needs_a_linear_model():
    records = federation()
    with pytest.raises(SordinoError, match="linear model only"):
        run(plan_for("dp-fedfc", records), records, model=TwoLayers(3, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma: 0.0 must be"),
        ({"covariance_clip": math.inf}, "covariance_clip: inf must be"),
        ({"covariance_share": 1.0}, r"covariance_share: 1.0 must lie in \[0, 1\)"),
        ({"lr": -1.0}, "lr: -1.0 must be"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-fedfc", **options)


def test_the_clients_own_covariance_never_leaves():
    """FedNew-FC declares no noised Gram matrix, and nothing is spent on it: six rounds, six messages."""
    plan = plan_for("dp-fednew-fc", federation())
    for group in spending.groups(plan):
        assert [(release.query, release.times) for release in group.releases] == [("0.2 delta", 6)]
    assert [query.kind for query in plan.stages[0].queries if query.noise is None] == [Kind.GRADIENT, Kind.GRAM]


def test_two_rounds_are_a_regression_from_noised_statistics():
    """On indicators of the classes, with the ridge gamma: the recipe of one round, up to a factor."""
    records = federation()
    plan = plan_for("dp-fedfc", records, 2, epsilon=math.inf, clip=1e6, covariance_clip=1e6, gamma=0.5, lr=1.0)
    u = torch.cat([records.x, torch.ones_like(records.x[:, :1])], 1)
    labels = torch.nn.functional.one_hot(records.y, 3).double() - 1 / 3
    A = u.T @ u / len(u)
    wanted = torch.linalg.solve(A + 0.5 * torch.eye(4).double(), u.T @ labels / len(u))
    found = run(plan, records)[-1].model.view(4, 3)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, torch.linalg.solve(A + torch.eye(4).double(), u.T @ labels / len(u)))  # the mutant
