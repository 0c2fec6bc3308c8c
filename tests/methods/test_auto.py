"""auto: its steps against linear algebra done by hand, its noise against what was promised, its records one by one."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from sordino.core import Facts, Trust, Unit
from sordino.data.preprocess import FEATURES_THRESHOLD, RADIUS, by_record, of_roots, preprocess
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.auto import EARLY_ROUNDS
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules import estimate_covariance, estimates, kalman
from sordino.rules.estimates import spectrum
from sordino.rules.kalman import TRAINED, KalmanState
from tests import support

MODEL = Linear(3, 4)
SIZES = (40, 60, 100)


def federation(seed=0, features=3, classes=4, kind=None):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(SIZES), features)) * np.linspace(0.3, 2.0, features) + 0.5
    y = rng.integers(0, classes, len(x)) if kind is None else x.sum(1)
    return Records.of(x, y, np.repeat(np.arange(3), SIZES), dtype=torch.float64)


plan_for = partial(support.plan_for, "auto")


def last(plan, records, model=MODEL, seed=3, **kwargs):
    source = Noiseless(0) if plan.noiseless else Seeded(seed)
    return list(simulate.run(plan, model, records, source, **kwargs))[-1].model


def moments(records):
    u = torch.cat([records.x, torch.ones_like(records.x[:, :1])], 1)
    return u.T @ u / len(u)


def taken_in(A, theta, std=0.0):
    rule = estimate_covariance(1e6)
    return rule.update(A, rule.init(theta, facts_of(1, std), ()), theta, 0)[1]


def facts_of(rounds, std):
    return Facts(3, np.array(SIZES), rounds, 3.0, std, MODEL.shapes)


# ------------------------------------------------------------------------------------------------------ the spectrum


def noised(A, std, seed):
    z = np.random.default_rng(seed).normal(size=A.shape)
    return A + std * torch.from_numpy((z + z.T) / 2)


def test_without_noise_the_spectrum_is_the_matrix():
    A = moments(federation())
    value, V = spectrum(A, torch.tensor(0.0), 100.0)
    assert torch.allclose(V * value @ V.T, A)


def test_noise_is_told_from_what_stands_above_it_and_the_rest_shares_the_trace():
    rows, std, v = 60, 0.002, 0.3
    A = torch.diag(torch.cat([torch.full((rows - 1,), (1 - v) / (rows - 1)), torch.tensor([v])])).double()
    found = [spectrum(noised(A, 8 * std, seed), torch.tensor(8 * std), 1.0)[0] for seed in range(200)]
    top = torch.stack([value.max() for value in found])
    error = float(top.std()) / math.sqrt(len(top))
    raw = torch.stack([torch.linalg.eigvalsh(noised(A, 8 * std, seed)).max() for seed in range(200)])
    shift = (8 * std) ** 2 * 2 * rows / 4 / v  # by which noise lifts it
    assert abs(float(top.mean()) - v) < 5 * error + shift / 5
    assert abs(float(raw.mean()) - v) > 5 * error + shift / 2  # the mutant: eigenvalues as they come
    whole = torch.stack([value.sum() for value in found])
    assert whole.max() < 1.02
    assert abs(float(whole.mean()) - 1) < 8 * std * math.sqrt(rows)


def test_under_pure_noise_all_directions_are_alike():
    rows = 40
    A = torch.eye(rows).double() / rows
    value, _ = spectrum(noised(A, 0.05, 1), torch.tensor(0.05), 1.0)
    assert value.max() < 12 * value.min()  # the largest noise may just pass the edge
    value, _ = spectrum(noised(A, 50.0, 3), torch.tensor(50.0), 1.0)
    assert value.sum() <= 1 + 1e-12
    assert value.min() > 0


# --------------------------------------------------------------------------------------------------------- the steps


@pytest.fixture
def no_ridge(monkeypatch):
    monkeypatch.setattr(estimates, "TRAINED_LOGIT", math.inf)


def test_without_noise_and_clip_the_first_step_is_newtons_over_the_curvature_that_is_expected(no_ridge):
    records = federation()
    plan = plan_for(records, 2, epsilon=math.inf, clip=1e6, early_share=0.0)
    shard, zero = records.fused(np.arange(3), np.ones(3)), torch.zeros(MODEL.size, dtype=torch.float64)
    H = MODEL.curvature_sum(zero, shard, math.inf) / len(records.y)
    c = MODEL.outputs
    closed = torch.kron(moments(records), (torch.eye(c) - 1 / c).double() / c)
    assert torch.allclose(H, closed)
    g = MODEL.clipped_sum(zero, shard, math.inf) / len(records.y)
    newton = -torch.linalg.pinv(H) @ g
    assert torch.allclose(TRAINED * last(plan, records), newton, atol=1e-9)
    assert not torch.allclose(last(plan, records), newton, atol=1e-3)  # the mutant


@pytest.mark.parametrize("doubt", [0.0, 10.0])
def test_without_doubt_theta_is_the_posterior_mean_of_a_linear_model(doubt, no_ridge):
    """Over two stages of unequal noise."""
    rng, A = np.random.default_rng(0), moments(federation())
    rows, c = MODEL.shapes[0]
    rule = kalman(clip=1e6, most=1e6, prior=1.0, doubt=doubt)
    theta = torch.zeros(rows * c, dtype=torch.float64)
    state = rule.init(theta, facts_of(4, 0.1), taken_in(A, theta))
    V, h, P, *_ = state
    H, information = (V * h) @ V.T, torch.linalg.inv((V * P) @ V.T)
    wanted, weighted = torch.from_numpy(rng.normal(size=(rows, c))), torch.zeros(rows, c, dtype=torch.float64)
    for t in range(12):
        std = 0.1 if t < 4 else 0.3
        if t == 4:
            later = kalman(clip=1e6, most=1e6, prior=1.0, doubt=doubt, part=None)
            state = later.init(theta, facts_of(8, std), state)
        g = H @ (theta.view(rows, c) - wanted) + std * torch.from_numpy(rng.normal(size=(rows, c)))
        weighted = weighted + H @ (H @ theta.view(rows, c) - g) / std**2
        information = information + H @ H / std**2
        step, state = rule.update(g.flatten(), state, theta, t)
        theta = theta + step
    by_hand = torch.linalg.solve(information, weighted).flatten()
    assert torch.allclose(theta, by_hand) == (doubt == 0)  # with doubt early rounds count less


def test_the_prior_is_one_logit_or_what_the_noise_moves():
    """Noise that later gradients have not corrected moves a logit by half of the variance of the prior."""
    rule = kalman(clip=5.0, most=101.0, prior=1.0, doubt=10.0)
    A, theta = moments(federation()), torch.zeros(MODEL.size, dtype=torch.float64)
    value = torch.linalg.eigvalsh(A)
    for std in (0.0, 1e-4, 10.0):
        _, h, P, *_ = rule.init(theta, facts_of(25, std), taken_in(A, theta))
        total = 25 * P * h / max(std**2, 1e-30)  # of all steps, in much noise
        left = P * h * (1 - torch.exp(-2 * h * total)) / (2 * h)
        assert math.isclose(float((value * left).sum()), 0.5, rel_tol=1e-6)
        assert (std > 1) == (float((P * value).sum()) > 1 + 1e-6)


def test_a_clip_that_cuts_makes_gradients_flatter():
    A, theta = moments(federation()), torch.zeros(MODEL.size, dtype=torch.float64)
    length = float(torch.trace(A).sqrt()) * math.sqrt(1 - 1 / 4)
    curvature = []
    for clip in (length, length / 2, 10 * length):
        rule = kalman(clip=clip, most=101.0, prior=1.0, doubt=10.0)
        curvature.append(rule.init(theta, facts_of(5, 0.1), taken_in(A, theta))[1])
    assert torch.allclose(curvature[1], curvature[0] / 2)
    assert torch.allclose(curvature[2], curvature[0])


def test_runs_side_by_side_are_the_runs_one_by_one():
    records = federation()
    plan = plan_for(records)
    theta = torch.zeros(2, MODEL.size, dtype=torch.float64)
    both = list(simulate.run(plan, MODEL, records, [Seeded(3), Seeded(4)], theta=theta))[-1].model
    assert torch.allclose(both, torch.stack([last(plan, records, seed=s) for s in (3, 4)]))


@pytest.mark.parametrize(
    ("unit", "trust"),
    support.tiers(
        itertools.product([Unit.RECORD, Unit.CLIENT], Trust),
        [(Unit.RECORD, Trust.UNTRUSTED_SERVER), (Unit.CLIENT, Trust.SECURE_AGGREGATION)],
    ),
)
def test_pure_noise_does_not_blow_up(unit, trust):
    records = federation()
    for epsilon in (0.01, 0.5, math.inf):
        theta = last(plan_for(records, 70, unit=unit, trust=trust, epsilon=epsilon), records)
        assert torch.isfinite(theta).all()
        u = torch.cat([records.x, torch.ones_like(records.x[:, :1])], 1)
        assert (u @ theta.view(4, 4)).std() < 40  # labels are random: a logit of 2 for noise, and some room


def test_it_fits_quantities_and_two_classes():
    records = federation(kind="sum")
    model = Linear(3, 1, Loss.SQUARES)
    theta = last(plan_for(records, 30, epsilon=math.inf), records, model)
    assert (model.predict(theta, records.x) - records.y).square().mean() < 0.01 * records.y.var()
    rng = np.random.default_rng(1)
    y = (records.x @ torch.tensor([1.0, -1.0, 1.0]).double() + 0.1 * torch.from_numpy(rng.normal(size=200)) > 1).long()
    two, model = Records(records.x, y, records.starts), Linear(3, 2)
    assert (model.predict(last(plan_for(two, 30, epsilon=math.inf), two, model), two.x) == y).double().mean() > 0.9


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
def test_quantities_do_not_overshoot_where_the_covariance_is_noise(epsilon):
    """The constant has a small eigenvalue beside records of norm 10, and two columns are always 0."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, (2, 2400))
    x = preprocess(np.stack([a, 0 * a, b, 0 * b], 1).astype(np.float32), None, "table:2")
    y = 0.5 * a + rng.normal(0, 0.15, 2400)
    records, model = Records.of(x, y, np.arange(2400) % 4), Linear(4, 1, Loss.SQUARES)
    for seed in range(6):
        theta = last(plan_for(records, 30, epsilon=epsilon), records, model, seed=seed)
        assert (model.predict(theta, records.x) - records.y).square().mean() < 0.35 * records.y.var(), seed


def test_models_of_several_parameters_are_refused():
    rule = kalman(clip=5.0, most=101.0, prior=1.0, doubt=10.0)
    with pytest.raises(SordinoError, match="linear"):
        rule.init(
            torch.zeros(5),
            Facts(3, np.array(SIZES), 5, 3.0, 0.1, ((2, 2), (1,))),
            KalmanState(torch.eye(2), torch.ones(2), torch.ones(2), *torch.ones(4, 1), torch.ones(0)),
        )


# ---------------------------------------------------------------------------------------------------------- the noise


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("early", [0.0, 0.3])
def test_what_is_promised_is_spent_and_early_rounds_get_more(early, trust):
    plan = plan_for(federation(), 71, trust=trust, epsilon=2.0, early_share=early)
    assert math.isclose(spending.epsilon(plan), 2.0, rel_tol=1e-6)
    part = np.diff(spending.mu_after_each_round(plan) ** 2, prepend=0) / spending.mu(plan) ** 2
    late = [(0.95 - early) / (70 - EARLY_ROUNDS)] * (70 - EARLY_ROUNDS)
    assert np.allclose(part, [0.05] + ([early / EARLY_ROUNDS] * EARLY_ROUNDS + late if early else [0.95 / 70] * 70))
    first, last_ = calibration.stage_facts(plan, 1), calibration.stage_facts(plan, len(plan.stages) - 1)
    whole = first.aggregate_std**-2 * first.rounds + last_.aggregate_std**-2 * last_.rounds * bool(early)
    said = first.aggregate_std * math.sqrt((early or 0.95) / 0.95 / first.rounds)
    assert math.isclose(said, whole**-0.5, rel_tol=1e-6)  # the noise of the mean of all gradients, as the rule has it


def test_bad_options_are_refused():
    shares = ({"early_share": 0.99}, {"covariance_share": 0.0})
    for options in ({"clip": 0.0}, {"radius": -1.0}, {"prior": math.inf}, {"doubt": -1.0}, *shares):
        with pytest.raises(SordinoError, match=next(iter(options))):
            build("auto", **options)


# -------------------------------------------------------------------------------------------------------- the records


def test_records_say_all_that_is_known_of_them():
    x = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    x[::2] = abs(x[::2])
    whole = by_record(x)
    assert np.allclose(np.linalg.norm(whole, axis=1), RADIUS, rtol=1e-5)
    assert np.array_equal(whole[7:8], by_record(x[7:8]))  # nothing is learnt from others
    assert np.allclose(by_record(3 * x), whole, atol=1e-4)
    signed = x[1::2]
    assert np.allclose(by_record(signed - 0.25), whole[1::2], atol=1e-4) == bool((signed < 0).any(1).all())
    roots = np.sqrt(x[::2]) - np.sqrt(x[::2]).mean(1, keepdims=True)
    assert np.allclose(whole[::2], RADIUS * roots / np.linalg.norm(roots, axis=1, keepdims=True), atol=1e-4)
    assert not by_record(np.full((2, 20), 0.1, np.float32)).any()  # all alike: no direction


def test_few_features_keep_their_scale():
    x = np.array([[0.5, -0.5], [30.0, 40.0]], np.float32)
    assert x.shape[1] < FEATURES_THRESHOLD
    assert np.allclose(by_record(x), [[0.5 * RADIUS / math.sqrt(2), -0.5 * RADIUS / math.sqrt(2)], [6, 8]])


def test_public_statistics_of_roots_are_those_of_a_log_normal():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200_000, FEATURES_THRESHOLD)) @ (np.eye(FEATURES_THRESHOLD) + 0.1) * 0.3
    x = np.exp(z).astype(np.float32)
    mean, cov = of_roots(x.mean(0), np.cov(x.T))
    assert np.allclose(mean, np.sqrt(x).mean(0), rtol=0.01)
    assert np.allclose(np.diag(cov), np.sqrt(x).var(0), rtol=0.3)
    found = preprocess(x, (x.mean(0), np.cov(x.T)), "record")
    assert np.abs(found.mean(0)).max() < 0.1 < np.abs(preprocess(x, None, "record").mean(0)).max() + 0.1
