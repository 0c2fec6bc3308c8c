"""Federated M-estimation: budgets and noise by formula, Newton steps against dense algebra, and what is refused."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from sordino.core import SAFETY, Adjacency, Kind
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.schedule import round_plans
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan
from tests import support

ADD, SWAP = Adjacency
SQUARES, SOFTMAX = Linear(3, 1, Loss.SQUARES, bias=False), Linear(3, 3)
SIZES = (8, 12, 20)
MU = gaussian.mu(4.0, 1e-5)


def federation(model=SQUARES, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(sum(sizes), 3)) * 10 ** rng.uniform(-0.2, 0.2, size=(len(sizes), 3))[owner]
    y = rng.normal(size=len(x)) + x.sum(1) if model is SQUARES else rng.integers(0, 3, len(x))
    return Records.of(x, y, owner, dtype=torch.float64)


plan_for = partial(support.plan_for, epsilon=4.0)


def run(plan, model, records, seed=3, **kwargs):
    return list(simulate.run(plan, model, records, Seeded(seed), shares=True, **kwargs))


def spent(plan):
    """(releases, part of mu squared) of each noised query."""
    (group,) = spending.groups(plan)
    return [(r.times, r.times * (r.sensitivity / r.std) ** 2 / MU**2) for r in group.releases]


# --------------------------------------------------------------------------------------------------------- budgets


def test_fedhybrid_spends_half_on_either_stage():
    """mu^2 / 2 on K1 local steps, mu^2 / 2 on K2 gradients: b = 2 B sqrt(2 K) / (mu n_i) for each."""
    records, clip = federation(), 0.7
    plan = plan_for("fedhybrid", records, 8, clip=clip, local_steps=5)
    assert spent(plan) == [(5, pytest.approx(0.5)), (7, pytest.approx(0.5))]
    assert spending.mu(plan) == pytest.approx(MU, rel=1e-9)
    for stage, steps in ((0, 5), (1, 7)):
        want = 2 * clip * math.sqrt(2 * steps) / MU
        np.testing.assert_allclose(
            calibration.client_std(plan, stage, 0), want, rtol=1e-9
        )  # of the sum: the mean's is that over n_i
    uneven = plan_for("fedhybrid", records, 8, local_steps=5, local_share=0.2)
    assert spent(uneven) == [(5, pytest.approx(0.2)), (7, pytest.approx(0.8))]


def test_fedhybrid_is_its_two_halves():
    """Without noise: FedAvg for one round, then FedSGD from there."""
    records = federation()
    options = {"epsilon": math.inf, "clip": 5.0}
    whole = run(plan_for("fedhybrid", records, 6, lr=0.2, local_lr=0.1, local_steps=4, **options), SQUARES, records)
    (first,) = run(plan_for("fedavg-gdp", records, 1, local_lr=0.1, steps=4, **options), SQUARES, records)
    rest = run(plan_for("fedsgd", records, 5, lr=0.2, **options), SQUARES, records, theta=first.model)
    for a, b in zip(whole, [first, *rest], strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-12, atol=1e-12)
    wrong = run(plan_for("fedsgd", records, 5, lr=0.1, **options), SQUARES, records, theta=first.model)
    assert not torch.allclose(whole[-1].model, wrong[-1].model)


def test_fednewton_spends_a_half_and_two_quarters():
    records = federation()
    plan = plan_for("fednewton", records, 2, local_steps=6)
    assert spent(plan) == [(6, pytest.approx(0.5)), (1, pytest.approx(0.25)), (1, pytest.approx(0.25))]
    assert spending.mu(plan) == pytest.approx(MU, rel=1e-9)
    more = plan_for("fednewton", records, 4, local_steps=6, local_share=0.3, curvature_share=0.6)
    assert spent(more) == [(6, pytest.approx(0.3)), (3, pytest.approx(0.1)), (3, pytest.approx(0.6))]


@pytest.mark.parametrize(("adjacency", "vector", "matrix"), [(ADD, 1.0, 1.0), (SWAP, 2.0, math.sqrt(2))])
def test_fednewton_s_noise(adjacency, vector, matrix):
    """Replace-one: s_g = 4 B / (mu n_i) and s_H = 2 sqrt(2) C_H / (mu n_i), as the client is told them."""
    records, B, C_H = federation(), 0.7, 3.0
    plan = plan_for("fednewton", records, 2, adjacency=adjacency, clip=B, curvature_clip=C_H)
    (group,) = spending.groups(plan)
    _, gradient, curvature = group.releases
    assert gradient.sensitivity == pytest.approx(vector * B, rel=1e-12)
    assert curvature.sensitivity == pytest.approx(matrix * C_H, rel=1e-12)
    *_, this_round = round_plans(plan, SQUARES)
    for i, n in enumerate(SIZES):
        ask = reference.oracle(SQUARES, records, this_round, i, Seeded(0))
        s_g, s_H = float(ask.std(Kind.GRADIENT)), float(ask.std(Kind.CURVATURE))
        assert s_g == pytest.approx(vector * 2 * B / (MU * n), rel=1e-9)
        assert s_H == pytest.approx(matrix * 2 * C_H / (MU * n), rel=1e-9)


def test_the_curvature_s_noise_is_symmetric():
    """No data: variance s_H^2 on the diagonal and half of it off; 5 standard errors."""
    d = 120
    model = Linear(d, 1, Loss.SQUARES, bias=False)
    empty = Records.of(np.zeros((6, d)), np.zeros(6), np.zeros(6, int), dtype=torch.float64)
    plan = plan_for("fednewton", empty, 2, curvature_clip=3.0)
    *_, this_round = round_plans(plan, model)
    theta, found = torch.zeros(d, dtype=torch.float64), []
    for seed in range(16):
        ask = reference.oracle(model, empty, this_round, 0, Seeded(seed))
        found.append(ask.curvature(theta) / ask.std(Kind.CURVATURE))
    noise = torch.stack(found)
    assert torch.equal(noise, noise.transpose(1, 2))
    rows, columns = torch.triu_indices(d, d, 1)
    for entries, variance in ((noise.diagonal(dim1=1, dim2=2), 1.0), (noise[:, rows, columns], 0.5)):
        error = 5 * math.sqrt(2 / entries.numel()) * variance
        assert abs(float(entries.square().mean()) - variance) < error
        assert abs(float(entries.square().mean()) - 0.75) > error, "one variance everywhere would show"


# ------------------------------------------------------------------------------------------------------ Newton steps

EXACT = {"epsilon": math.inf, "clip": 1e9, "curvature_clip": 1e9, "floor": 1e-9}


def local_solutions(records):
    """H_i^-1 c_i of least squares, one row a client."""
    shards = [records.shard(i) for i in range(len(records.sizes))]
    return torch.stack([torch.linalg.lstsq(s.x, s.y.unsqueeze(-1)).solution[:, 0] for s in shards])


@pytest.mark.parametrize("seed", range(3))
def test_on_least_squares_one_step_is_enough(seed):
    """From anywhere: sum_i w_i H_i^-1 c_i, which is not the pooled solution."""
    records = federation()
    plan = plan_for("fednewton", records, 2, local_lr=0.05, local_steps=3, **EXACT)
    theta = 10 * torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first, last = run(plan, SQUARES, records, theta=theta)
    want = (torch.from_numpy(plan.weights).unsqueeze(-1) * local_solutions(records)).sum(0)
    torch.testing.assert_close(last.model, want, rtol=1e-9, atol=1e-9)
    assert float((first.model - want).norm()) > 0.1, "it was elsewhere before"
    pooled = torch.linalg.lstsq(records.x, records.y.unsqueeze(-1)).solution[:, 0]
    assert float((pooled - want).norm()) > 0.01
    plain = local_solutions(records).mean(0)
    assert float((plain - want).norm()) > 0.01, "unweighted"


def test_equal_hessians_give_the_pooled_solution():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3))
    data = np.concatenate([x, x, x])
    records = Records.of(data, rng.normal(size=24), np.repeat([0, 1, 1], 8), dtype=torch.float64)
    *_, last = run(plan_for("fednewton", records, 2, local_lr=0.05, local_steps=3, **EXACT), SQUARES, records)
    pooled = torch.linalg.lstsq(records.x, records.y.unsqueeze(-1)).solution[:, 0]
    torch.testing.assert_close(last.model, pooled, rtol=1e-9, atol=1e-9)


class Ear:
    """Puts every answer on record."""

    def __init__(self, ask, log):
        self._ask, self._log = ask, log

    def __getattr__(self, name):
        inner = getattr(self._ask, name)
        if name not in ("gradient", "curvature", "fisher"):
            return inner

        def answer(*args):
            self._log.append(inner(*args))
            return self._log[-1]

        return answer


def overheard(method, log):
    """The method, the answers of its last stage on record."""
    *early, stage = method.stages
    compute = stage.local.compute
    local = stage.local._replace(compute=lambda ask, *rest: compute(Ear(ask, log), *rest))
    return method._replace(stages=(*early, stage._replace(local=local)))


@pytest.mark.parametrize("step_cap", [0.0, 0.1])
def test_a_noised_step_by_hand(step_cap):
    """From the noised answers: symmetric, eigenvalues below the floor raised to it, the step capped, the mean taken."""
    records, floor, log = federation(), 0.3, []
    plan = plan_for("fednewton", records, 2, local_lr=0.1, floor=floor, step_cap=step_cap)
    plan = Plan(overheard(plan.method, log), 2, plan.sizes, plan.privacy)
    first, last = reference.run(plan, SQUARES, records, Seeded(5))
    step, raised, capped = 0.0, 0, 0
    for w, g, H in zip(plan.weights, log[::2], log[1::2], strict=True):
        values, vectors = torch.linalg.eigh(H)
        raised += int((values < floor).sum())
        mine = vectors @ ((vectors.T @ g) / values.clamp_min(floor))
        capped += bool(step_cap) and float(mine.norm()) > step_cap
        step = step + w * (mine * (step_cap / mine.norm()).clamp_max(1) if step_cap else mine)
    torch.testing.assert_close(last.model, first.model - step, rtol=1e-9, atol=1e-12)
    assert raised > 0, "the floor was needed"
    assert bool(capped) is bool(step_cap)


def test_the_floor_bounds_the_step():
    """|H^-1 g| <= |g| / floor, however the noise turned H; without it a step blows up."""
    records = federation()
    lengths = {}
    for floor in (0.5, 1e-12):
        longest = 0.0
        for seed in range(12):
            log = []
            plan = plan_for("fednewton", records, 2, epsilon=1.0, floor=floor)
            plan = Plan(overheard(plan.method, log), 2, plan.sizes, plan.privacy)
            first, last = reference.run(plan, SQUARES, records, Seeded(seed))
            norms = [float(g.norm()) for g in log[::2]]
            longest = max(longest, float((last.model - first.model).norm()) / max(norms))
        lengths[floor] = longest
    assert lengths[0.5] <= 1 / 0.5
    assert lengths[1e-12] > 10 / 0.5


@pytest.mark.parametrize("steps", [1, 40])
def test_a_newton_step_pays_once_and_gradient_descent_k_times(steps):
    """Noise on the aggregate gradient: 16 B^2 m / (mu N)^2 whatever K, against FedSGD's 4 B^2 K m / (mu N)^2.

    Free of how records are spread over clients. What it does to the estimate is measured in tests/experiments.
    """
    records, B = federation(), 0.7
    newton = plan_for("fednewton", records, 2, clip=B, local_steps=steps)
    sgd = plan_for("fedsgd", records, steps, clip=B)
    unit = B**2 * len(SIZES) / (MU * sum(SIZES)) ** 2
    assert calibration.aggregate_std(newton, 1) ** 2 == pytest.approx(16 * unit, rel=1e-9)
    assert calibration.aggregate_std(sgd, 0) ** 2 == pytest.approx(4 * steps * unit, rel=1e-9)


# ---------------------------------------------------------------------------------------------------- the last layer


def fisher_step(records, theta, i, clip, ridge, damping):
    """Densely, from per-record gradients by automatic differentiation, each cut to the clip."""
    shard, bound = records.shard(i), clip * (1 - SAFETY)
    g = vmap(grad(SOFTMAX.loss), (None, 0, 0))(theta, shard.x, shard.y)
    short = g * (bound / g.norm(dim=-1, keepdim=True)).clamp_max(1)
    norm = g.square().sum(-1)
    root = (clip**2 * (1 - SAFETY) / norm).clamp_max(1).sqrt().unsqueeze(-1) * g
    F = root.T @ root / len(g)
    eye = torch.eye(len(F), dtype=F.dtype)
    return damping * torch.linalg.solve(F + ridge * eye, short.mean(0))


def test_the_head_takes_a_damped_fisher_step():
    records, clip, ridge, damping = federation(SOFTMAX), 0.8, 0.05, 0.6
    options = {"epsilon": math.inf, "clip": clip, "local_lr": 0.3, "local_steps": 3}
    plan = plan_for("fednewton-head", records, 3, ridge=ridge, damping=damping, **options)
    first, *rest = run(plan, SOFTMAX, records)
    (start,) = run(
        plan_for("fedavg-gdp", records, 1, clip=clip, local_lr=0.3, steps=3, epsilon=math.inf), SOFTMAX, records
    )
    torch.testing.assert_close(first.model, start.model, rtol=1e-12, atol=1e-12)
    theta = first.model
    for this_round in rest:
        steps = [w * fisher_step(records, theta, i, clip, ridge, damping) for i, w in enumerate(plan.weights)]
        theta = theta - sum(steps)
        torch.testing.assert_close(this_round.model, theta, rtol=1e-9, atol=1e-9)
    loose = [w * fisher_step(records, first.model, i, 10 * clip, ridge, damping) for i, w in enumerate(plan.weights)]
    assert not torch.allclose(rest[0].model, first.model - sum(loose), rtol=1e-3), "the clip matters"


def test_blocks_alternate_and_each_is_paid_for():
    records = federation(SOFTMAX)
    plan = plan_for("fednewton-head", records, 7, local_steps=4, blocks=3)
    kinds = [tuple(query.kind for query in stage.queries) for stage in plan.stages]
    assert kinds == [(Kind.GRADIENT,), (Kind.GRADIENT, Kind.FISHER)] * 3
    assert plan.stage_rounds == (1, 1, 1, 1, 1, 2)
    parts = spent(plan)
    assert [times for times, _ in parts] == [4, 1, 1, 4, 1, 1, 4, 2, 2]
    assert [part for _, part in parts] == pytest.approx([1 / 6, 1 / 12, 1 / 12] * 3)
    assert spending.mu(plan) == pytest.approx(MU, rel=1e-9)


def test_two_blocks_are_the_steps_in_turn():
    """Without noise: local steps, a Fisher step, local steps, a Fisher step."""
    records = federation(SOFTMAX)
    options = {"epsilon": math.inf, "clip": 0.8, "local_lr": 0.3}
    whole = run(plan_for("fednewton-head", records, 4, local_steps=3, blocks=2, **options), SOFTMAX, records)
    theta = torch.zeros(SOFTMAX.size, dtype=torch.float64)
    by_hand = []
    for _ in range(2):
        one = run(plan_for("fednewton-head", records, 2, local_steps=3, **options), SOFTMAX, records, theta=theta)
        by_hand += one
        theta = one[-1].model
    for a, b in zip(whole, by_hand, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("adjacency", "vector", "matrix"), [(ADD, 1.0, 1.0), (SWAP, 2.0, math.sqrt(2))])
def test_the_fisher_matrix_s_clip_is_the_gradient_s_squared(adjacency, vector, matrix):
    plan = plan_for("fednewton-head", federation(SOFTMAX), 2, adjacency=adjacency, clip=0.3)
    (group,) = spending.groups(plan)
    assert [r.sensitivity for r in group.releases] == pytest.approx([0.3 * vector, 0.3 * vector, 0.09 * matrix])


class Deep(Linear):
    """A body of two parameters that does nothing stands before the head."""

    @property
    def size(self):
        return 2 + super().size

    @property
    def shapes(self):
        return ((2,), *super().shapes)

    def _head(self, sums):
        return torch.cat([torch.full_like(sums[..., :2], 0.25), sums], -1)

    def clipped_sum(self, theta, shard, clip, scale=None):
        return self._head(Linear(3, 3).clipped_sum(theta[..., 2:], shard, clip))

    def fisher_sum(self, theta, shard, clip):
        return Linear(3, 3).fisher_sum(theta[..., 2:], shard, clip)


def test_only_the_head_takes_newton_steps():
    records = federation(SOFTMAX)
    options = {"epsilon": math.inf, "local_steps": 2, "local_lr": 0.3, "clip": 0.8}
    plan = plan_for("fednewton-head", records, 2, **options)
    deep, plain = (run(plan, model, records) for model in (Deep(3, 3), SOFTMAX))
    for a, b in zip(deep, plain, strict=True):
        torch.testing.assert_close(a.model[2:], b.model, rtol=1e-12, atol=1e-12)
    assert deep[0].model[:2].all(), "local steps move the body"
    assert torch.equal(deep[1].model[:2], deep[0].model[:2]), "the Newton step does not"


# ------------------------------------------------------------------------------------------------- engines, refusals

CASES = [
    ("fedsgd", 4, {"lr": 0.2, "tail": 0.5}),
    ("fedavg-gdp", 3, {"steps": 3, "local_lr": 0.1}),
    ("fedhybrid", 4, {"local_steps": 3}),
    ("fednewton", 3, {"local_steps": 3, "step_cap": 1.0}),
    ("fednewton-head", 5, {"local_steps": 3, "blocks": 2}),
]


@pytest.mark.parametrize("participation", ["full", "fixed:2"])
@pytest.mark.parametrize(("name", "rounds", "options"), CASES)
def test_engines_agree(name, rounds, options, participation):
    records = federation(SOFTMAX)
    plan = plan_for(name, records, rounds, participation=participation, **options)
    slow = [this_round.model for this_round in reference.run(plan, SOFTMAX, records, Seeded(3))]
    for a, b in zip(slow, run(plan, SOFTMAX, records), strict=True):
        torch.testing.assert_close(b.model, a, rtol=1e-8, atol=1e-8)
    assert spending.epsilon(plan) <= 4.0 * (1 + 1e-9)
    assert spending.mu(plan) == pytest.approx(MU, rel=1e-9) or participation != "full"


@pytest.mark.parametrize("name", ["fednewton", "fednewton-head"])
def test_runs_are_an_axis(name):
    records = federation(SOFTMAX)
    plan = plan_for(name, records, 3, local_steps=3)
    theta = torch.zeros(2, SOFTMAX.size, dtype=torch.float64)
    *_, last = simulate.run(plan, SOFTMAX, records, [Seeded(s) for s in range(2)], theta=theta)
    for r in range(2):
        *_, one = simulate.run(plan, SOFTMAX, records, Seeded(r))
        torch.testing.assert_close(last.model[r], one.model, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
def test_what_is_not_linear_is_refused_under_sums(trust):
    records = federation(SOFTMAX)
    for name in ("fednewton", "fednewton-head"):
        with pytest.raises(SordinoError, match="local Newton steps are not linear in their noise"):
            plan_for(name, records, 2, trust=trust, local_steps=1)
    for name, options in (("fedhybrid", {"local_steps": 2}), ("fedavg-gdp", {"steps": 2})):
        with pytest.raises(SordinoError, match="is not proved"):
            plan_for(name, records, 4, trust=trust, **options)
    for name, options in (("fedhybrid", {"local_steps": 1}), ("fedavg-gdp", {"steps": 1}), ("fedsgd", {})):
        assert plan_for(name, records, 4, trust=trust, **options).proved


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fednewton", {"local_share": 0.75, "curvature_share": 0.25}, "leave 0 of mu squared for g"),
        ("fednewton", {"curvature_share": 0.0}, "curvature_share: 0.0"),
        ("fednewton", {"floor": 0.0}, "floor, curvature_clip: must be above 0"),
        ("fednewton", {"step_cap": -1.0}, "step_cap 0 or more"),
        ("fednewton", {"local_share": 0.0}, r"local_share: 0.0 must lie in \(0, 1\)"),
        ("fedhybrid", {"local_share": 1.0}, r"local_share: 1.0 must lie in \(0, 1\)"),
        ("fednewton-head", {"ridge": 0.0}, "ridge, damping: must be above 0"),
        ("fednewton-head", {"blocks": 0}, "blocks at least 1"),
        ("fednewton-head", {"local_share": 0.9, "curvature_share": 0.2}, "of mu squared for g"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(SordinoError, match=message):
        build(name, **options)


def test_whole_clients_are_refused():
    for name in ("fedsgd", "fedavg-gdp", "fedhybrid", "fednewton", "fednewton-head"):
        with pytest.raises(SordinoError, match="exists at record and person level"):
            build(name, "client")


def test_too_few_rounds_are_named():
    with pytest.raises(SordinoError, match="rounds: fednewton-head needs more than 5 rounds"):
        plan_for("fednewton-head", federation(SOFTMAX), 5, blocks=3).stage_rounds  # noqa: B018
