"""Closed forms against the engine, on problems where they are exact; bounds against what is measured."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Divisor, Privacy
from sordino.data.partition import SIZE_LAWS
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan
from sordino.studies import estimation, theory
from tests.support import tiers

DIM, CLIENTS, RECORDS, MU = 5, 4, 1000, 5.0
SLOPE = np.array([0.3, 0.8])  # along theta_0 = e_1, across
TIMES = np.array([1.0, DIM - 1.0])
CLIP = 6.0
SQUARES = Linear(DIM, 1, Loss.SQUARES, bias=False)


def quadratic(slope=SLOPE, length=1.0):
    """Every client's Hessian is diag(h_1, h_2, ..., h_2) and its minimiser e_1 * length: no client differs."""
    h = np.array([slope[0], *[slope[1]] * (DIM - 1)])
    x = np.tile(np.diag(np.sqrt(DIM * h)), (CLIENTS * RECORDS // DIM, 1))
    world = theory.quadratic(np.asarray(slope, float), TIMES, np.zeros(2), length)
    records = Records.of(x, length * x[:, 0], np.repeat(np.arange(CLIENTS), RECORDS), dtype=torch.float64)
    return records, world


def case(world, lr, sizes=(RECORDS,) * CLIENTS, mu=MU):
    return theory.Scenario(tuple(sizes), mu, world, CLIP, DIM * float(world.slope.max()), lr)


def errors(method, rounds, records, length=1.0, runs=1000, mu=MU):
    plan = Plan(method, rounds, records.sizes, estimation.promise(mu))
    start = torch.zeros(runs, DIM, dtype=torch.float64)
    sources = [estimation.NormalRows(seed, CLIENTS) for seed in range(runs)]
    *_, last = simulate.run(plan, SQUARES, records, sources, theta=start)
    e = last.model.clone()
    e[:, 0] -= length
    return e.square().sum(-1).numpy()


def agrees(sample, value, other=0.0):
    """Within 4 standard errors."""
    return abs(sample.mean() - value) < 4 * math.hypot(sample.std() / math.sqrt(len(sample)), other)


# ------------------------------------------------------------------------------------------------------- populations


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_populations_are_those_of_the_models_own_sums(kind):
    at = estimation.setup(kind)
    records = estimation.worlds(kind, (20_000,), range(20), seed=5)
    u = (at.truth / at.length).float()
    shard, theta = records.shard(0), at.truth.float().expand(20, DIM)
    H = at.model.curvature_sum(theta, shard, math.inf) / 20_000
    V = at.model.fisher_sum(theta, shard, math.inf) / 20_000
    g = at.model.clipped_sum(theta, shard, math.inf) / 20_000
    moved = at.model.clipped_sum(theta + 0.02 * u, shard, math.inf) / 20_000
    back = at.model.clipped_sum(theta - 0.02 * u, shard, math.inf) / 20_000

    def off(value, samples):
        samples = samples.double().numpy()
        return abs(samples.mean() - value) / (samples.std(ddof=1) / math.sqrt(20))

    def along(M):
        return torch.einsum("i,rij,j->r", u.double(), M, u.double())

    def across(M):
        return (torch.einsum("rii->r", M) - along(M)) / (DIM - 1)

    world = theory.population(at.model, at.length)
    checks = [
        (world.curvature, (along(H), across(H))),
        (world.spread, (along(V), across(V))),
        (world.slope[:1], ((moved - back) @ u.double() / 0.04,)),
        (np.interp(at.length, *world.score)[None], (g @ u.double(),)),
    ]
    for values, samples in checks:
        for value, sample in zip(values, samples, strict=True):
            assert off(value, sample) < 4.5
    unweighted = theory.population(Linear(DIM, 1, at.model.kind, bias=False, residual=at.model.residual), at.length)
    assert off(unweighted.spread[1], across(V)) > 8


def test_bounds_move_the_root_of_poisson_and_not_of_logistic():
    at = estimation.setup("logistic")
    assert theory.population(at.model, 1.0).root == pytest.approx(1.0, abs=1e-9)
    at = estimation.setup("poisson")
    assert 0.47 < theory.population(at.model, 0.5).root < 0.498


def test_other_models_have_no_prediction():
    with pytest.raises(SordinoError, match="logistic and Poisson"):
        theory.population(Linear(5, 3), 1.0)


def test_one_dimension_has_nothing_across():
    world = theory.population(estimation.setup("logistic", 1).model, 1.0)
    terms = theory.fednewton(theory.Scenario((500,) * 10, 3.0, world, 1.4, 0.5, 3.0), 20)
    assert world.dim == 1
    assert 0 < terms.total < 0.1


# ------------------------------------------------------------------------------------------------- noise and methods


@pytest.mark.parametrize("law", SIZE_LAWS)
def test_aggregate_noise_is_free_of_the_sizes(law):
    sizes, steps, mu = estimation.sizes(law, 30), 7, 0.8
    m, N = len(sizes), sum(sizes)
    plan = Plan(build("fedsgd", clip=CLIP), steps, sizes, estimation.promise(mu))
    formula = 4 * CLIP**2 * steps * m / (mu**2 * N**2)
    assert calibration.aggregate_std(plan, 0) ** 2 == pytest.approx(formula, rel=1e-9)
    assert case(theory.quadratic(SLOPE, TIMES, SLOPE), 1.0, sizes, mu).noise(steps) == pytest.approx(formula)
    other = Plan(build("fedsgd", clip=CLIP), steps, sizes, estimation.promise(mu), divisor=Divisor.CLIENT_MEAN)
    assert (calibration.aggregate_std(other, 0) ** 2 == pytest.approx(formula, rel=1e-3)) == (law == "equal")


@pytest.mark.parametrize("law", SIZE_LAWS)
def test_noise_drawn_client_by_client_has_that_variance(law):
    sizes, mu, wide, runs = estimation.sizes(law, 20), 1.0, 100, 150
    records = Records(torch.zeros(sum(sizes), wide), torch.zeros(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    plan = Plan(build("fedsgd", clip=1.0, lr=1.0), 1, sizes, estimation.promise(mu))
    sources = [Seeded(seed) for seed in range(runs)]
    model = Linear(wide, 1, Loss.SQUARES, bias=False)
    (this_round,) = simulate.run(plan, model, records, sources, theta=torch.zeros(runs, wide), shares=True)
    expected, count = 4 * 20 / (mu**2 * sum(sizes) ** 2), runs * wide
    found = this_round.model.double().square().mean().item()
    assert abs(found / expected - 1) < 4 * math.sqrt(2 / count)
    assert abs(found / (expected / 4) - 1) > 4 * math.sqrt(2 / count)  # add-remove, or a forgotten 2


@pytest.mark.parametrize(("steps", "lr"), tiers([(3, 0.5), (20, 1.0), (7, 2.0)], [(3, 0.5)]))
def test_fedsgd_is_as_predicted_on_a_quadratic(steps, lr):
    records, world = quadratic(length=0.0)
    found = errors(build("fedsgd", clip=CLIP, lr=lr), steps, records, length=0.0)
    terms = theory.fedsgd(case(world, lr), steps)
    assert terms.total == pytest.approx(terms.privacy)
    assert agrees(found, terms.total)
    assert not agrees(found, theory.fedsgd(case(world, lr, mu=MU / math.sqrt(2)), steps).total)


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.5), (6, 1.0)])
def test_the_way_left_is_as_predicted(steps, lr):
    records, world = quadratic()
    left = errors(build("fedsgd", clip=CLIP, lr=lr), steps, records, runs=1, mu=math.inf)[0]
    terms = theory.fedsgd(case(world, lr, mu=math.inf), steps)
    assert terms.optimisation == pytest.approx((1 - lr * SLOPE[0]) ** (2 * steps))
    assert terms.total == pytest.approx(left)


@pytest.mark.soak
def test_fedhybrid_pays_two_k2_over_k():
    records, world = quadratic((0.5, 0.5))
    steps, local, later = 12, 5, 3
    lr = 1 / 0.5  # each step forgets all before it
    sgd = errors(build("fedsgd", clip=CLIP, lr=lr), steps, records, runs=500)
    method = build("fedhybrid", clip=CLIP, lr=lr, local_lr=lr, local_steps=local)
    hybrid = errors(method, 1 + later, records, runs=500)
    ratio = theory.fedhybrid(case(world, lr), local, later).privacy / theory.fedsgd(case(world, lr), steps).privacy
    assert ratio == pytest.approx(2 * later / steps)
    noisy = ratio * sgd.std() / math.sqrt(len(sgd))
    assert agrees(hybrid, ratio * sgd.mean(), noisy)
    assert not agrees(hybrid, later / steps * sgd.mean(), noisy)  # the whole budget spent twice


@pytest.mark.soak  # of FedHybrid, whose budget is split in the same way, above
def test_fednewton_pays_a_quarter_of_k():
    """Little noise on the Hessian: its record's norm is small against what the gradient's clip hides."""
    records, world = quadratic((0.5, 0.5))
    steps, lr = 40, 1 / 0.5
    sgd = errors(build("fedsgd", clip=CLIP, lr=lr), steps, records, runs=500)
    newton = errors(build("fednewton", clip=CLIP, curvature_clip=2.5, local_lr=lr, local_steps=2), 2, records, runs=500)
    terms = theory.fednewton(case(world, lr), 2)
    assert terms.privacy == pytest.approx(16 * CLIP**2 * DIM / (CLIENTS * (MU * RECORDS * 0.5) ** 2), rel=0.01)
    noisy = 4 / steps * sgd.std() / math.sqrt(len(sgd))
    assert agrees(newton, 4 / steps * sgd.mean(), noisy)
    assert not agrees(newton, 2 / steps * sgd.mean(), noisy)


def test_fedavg_of_one_step_is_fedsgd_draw_for_draw():
    records, _ = quadratic()
    start = torch.zeros(3, DIM, dtype=torch.float64)
    ends = []
    for method in (build("fedsgd", clip=CLIP, lr=0.7), build("fedavg-gdp", clip=CLIP, local_lr=0.7, steps=1)):
        plan = Plan(method, 6, records.sizes, estimation.promise(MU))
        rounds_done = simulate.run(plan, SQUARES, records, [Seeded(s) for s in range(3)], theta=start, shares=True)
        ends.append([this_round.model for this_round in rounds_done][-1])
    assert torch.allclose(*ends, rtol=0, atol=1e-12)
    assert (ends[0] - ends[0].mean(0)).abs().max() > 1e-4


def test_budgets_of_the_stages_add_up():
    for name, rounds in (("fedhybrid", 9), ("fednewton", 2)):
        plan = Plan(build(name, local_steps=5), rounds, (100, 300), estimation.promise(1.3))
        assert spending.mu(plan) == pytest.approx(1.3, rel=1e-9)


# --------------------------------------------------------------------------------------------------- lower bounds


def test_the_rate_adds_sampling_and_privacy():
    assert theory.rate(5, (400,) * 20, 1.0) == 5 / 8000
    assert theory.rate(5, (10,) * 20, 0.1) == pytest.approx(5 / (20 * 100 * 0.01 / 5))
    assert theory.rate(5, (10,), 0.1, log=True) == pytest.approx(theory.rate(5, (10,), 0.1) / math.log(10))
    with pytest.raises(SordinoError, match="below 1"):
        theory.rate(5, (10,), 1.0, log=True)


def test_the_information_bound_is_the_rate_of_a_gaussian_mean():
    one = np.ones(2)
    for mu, n in [(0.01, 7), (0.05, 20)]:
        found = theory.information_bound((n,) * 9, mu, one, TIMES)
        assert found == pytest.approx(theory.rate(DIM, (n,) * 9, math.sqrt(math.expm1(mu**2))), rel=1e-12)
    assert theory.information_bound((100,), 50.0, one, TIMES) == DIM / 100
    assert theory.information_bound((100,), math.inf, 2 * one, TIMES) == DIM / 200


def gaussian_mean(name, mu, options, rounds, runs=300, clients=8, n=25):
    """Squared errors for the mean of N(0.3, 1), where all constants of the bound are known."""
    rng = np.random.default_rng(3)
    y = torch.from_numpy(0.3 + rng.standard_normal((runs, clients * n)))
    records = Records(torch.ones(runs, clients * n, 1, dtype=torch.float64), y, np.arange(clients + 1) * n)
    plan = Plan(build(name, clip=3.0, **options), rounds, records.sizes, estimation.promise(mu))
    model = Linear(1, 1, Loss.SQUARES, bias=False, residual=3.0)
    sources = [estimation.NormalRows(seed, clients) for seed in range(runs)]
    start = torch.zeros(runs, 1, dtype=torch.float64)
    *_, last = simulate.run(plan, model, records, sources, theta=start)
    return (last.model[:, 0] - 0.3).square().numpy()


@pytest.mark.parametrize(
    ("name", "options", "rounds"),
    [
        ("fedsgd", {"lr": 1.0}, 1),
        ("fedavg-gdp", {"local_lr": 1.0, "steps": 1}, 1),
        ("fedhybrid", {"lr": 1.0, "local_lr": 1.0, "local_steps": 1}, 2),
        ("fednewton", {"local_lr": 1.0, "local_steps": 1, "curvature_clip": 1.0, "floor": 0.5}, 2),
    ],
)
@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_no_method_falls_below_the_bound_of_the_gaussian_mean(name, options, rounds, mu):
    found = gaussian_mean(name, mu, options, rounds)
    bound = theory.information_bound((25,) * 8, mu, np.ones(1), np.ones(1))
    assert found.mean() + 4 * found.std() / math.sqrt(len(found)) > bound
    if mu == 0.1:  # what spends more than it says would be found
        assert gaussian_mean(name, 30.0, options, rounds).mean() < bound / 2


# ------------------------------------------------------------------------------------------------- two theorems


def descent(**changed):
    given = {
        "clip": 10.0,
        "rho": 1.0,
        "lr": 0.1,
        "beta": 0.9,
        "dim": 650,
        "noise": 0.0075,
        "smooth": 1.0,
        "convex": 0.1,
        "steepest": 1.0,
    }
    return theory.Descent(**{**given, **changed})


@pytest.mark.parametrize("rho", [0.5, 1.0, 10.0, 100.0])
def test_sofims_theorems_are_empty_where_the_clips_square_exceeds_rho(rho):
    c = descent(rho=rho, lr=0.01 * rho)
    for verdict in (theory.sofim_convex(c, 10_000, 1.0), theory.sofim_stationary(c, 10_000, 1.0)):
        assert verdict.vacuous
        assert verdict.bound >= verdict.coupling * verdict.trivial >= c.clip**2 / rho * verdict.trivial


def test_sofims_theorems_say_something_under_small_clips():
    c = descent(clip=1.0, rho=100.0, lr=1.0, noise=1e-3, dim=5)
    assert not theory.sofim_convex(c, 5000, 1.0).vacuous
    assert not theory.sofim_stationary(c, 5000, 1.0).vacuous
    with pytest.raises(SordinoError, match="lr"):
        theory.sofim_convex(descent(lr=100.0), 10, 1.0)


def test_the_young_parameters_are_the_best():
    c = descent(clipping=0.3)
    least = theory.sofim_stationary(c, 10**9, 1.0).bound
    variance = c.dim * c.noise**2
    fixed = c.steepest**2 * c.momentum / c.rho**2 + c.smooth * c.lr * (c.clip**2 + variance) / (2 * c.rho**2)
    rng = np.random.default_rng(0)
    for a, b in rng.uniform(0.001, 0.99, (2000, 2)):
        gamma = fixed + c.clipping**2 / (2 * a * c.rho**2) + variance / (2 * b * c.rho**2)
        assert gamma / (1 / c.rho - (a + b) / 2) > least * (1 - 1e-6)


@pytest.mark.soak  # long statistics
def test_fedsofim_stays_below_its_theorem():
    """Least squares without clipping, every constant known."""
    records, world = quadratic((0.2, 0.2))
    rho, step, rounds, runs = 1000.0, 0.05, 200, 30
    method = build("dp-fedsofim", clip=2.0, lr=step * rho, rho=rho)
    plan = Plan(method, rounds, records.sizes, Privacy(gaussian.epsilon(MU, 1e-5)))
    sources = [Seeded(seed) for seed in range(runs)]
    start = torch.zeros(runs, DIM, dtype=torch.float64)
    *_, last = simulate.run(plan, SQUARES, records, sources, theta=start)
    gap = 0.1 * (last.model - torch.eye(DIM, dtype=torch.float64)[0]).square().sum(-1)
    h = float(world.slope[0])
    c = theory.Descent(2.0, rho, step * rho, 0.9, DIM, calibration.aggregate_std(plan, 0), h, h, h)
    verdict = theory.sofim_convex(c, rounds, h / 2)
    assert not verdict.vacuous
    assert float(gap.mean()) + 4 * float(gap.std()) / math.sqrt(runs) < verdict.bound


# ---------------------------------------------------------------------------------------------- DP-FedGD's floor


def gd(**changed):
    return descent(**{"rho": 1.0, "beta": 0.0, "steepest": 0.0, **changed})


def test_fedgds_young_parameter_is_the_best():
    c = gd(clip=0.5, clipping=0.3, lr=0.2)
    least = theory.fedgd_convex(c, 1000, 1.0).floor
    b = c.smooth * c.lr * (c.clip**2 + c.dim * c.noise**2) / 2
    grid = [(c.clipping**2 / (2 * t) + b) / (2 * c.convex * (1 - t / 2)) for t in np.linspace(1e-4, 1.9999, 20_001)]
    assert least == pytest.approx(min(grid), rel=1e-6)
    assert theory.fedgd_convex(gd(clipping=1e-9), 1000, 1.0).floor == pytest.approx(
        theory.fedgd_convex(gd(), 1000, 1.0).floor, rel=1e-6
    )


def test_fedgds_theorem_is_a_recursion_that_ends_at_the_floor():
    c = gd(clipping=0.3, clip=2.0)
    check, gap = theory.fedgd_convex(c, 25, 3.0), 3.0
    tau = 0.7  # any other parameter gives a floor that is no lower
    b = c.smooth * c.lr**2 * (c.clip**2 + c.dim * c.noise**2) / 2
    for _ in range(20_000):
        gap = (1 - 2 * c.convex * c.lr * (1 - tau / 2)) * gap + c.lr * c.clipping**2 / (2 * tau) + b
    assert check.floor <= gap
    far = theory.fedgd_convex(c, 100_000, 3.0)
    assert far.bound == pytest.approx(far.floor)
    assert check.floor < check.bound < check.floor + 3.0
    with pytest.raises(SordinoError, match="outside the theorem's range"):
        theory.fedgd_convex(gd(lr=6.0), 10, 1.0)


def test_fedgds_floor_keeps_the_clip_without_noise():
    """Nothing clipped and no noise: gradient steps converge, and the theorem's floor does not."""
    c = gd(noise=0.0, clip=2.0, lr=1.0)
    assert theory.fedgd_convex(c, 10**6, 1.0).floor == pytest.approx(c.lr * c.smooth * 4.0 / (4 * c.convex))
    assert theory.fedgd_sharper_floor(c) == 0
    for wrong in (gd(clipping=0.1), gd(lr=2.1)):
        with pytest.raises(SordinoError, match="2 / L"):
            theory.fedgd_sharper_floor(wrong)


@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_fedgd_on_a_quadratic_is_exact_and_below_both_floors(lr):
    records, _ = quadratic()
    rounds, runs = 60, 150
    plan = Plan(build("dp-fedgd", clip=CLIP, lr=lr), rounds, records.sizes, Privacy(2.0))
    start = torch.zeros(runs, DIM, dtype=torch.float64)
    *_, last = simulate.run(plan, SQUARES, records, [Seeded(s) for s in range(runs)], theta=start)
    h = np.array([SLOPE[0], *[SLOPE[1]] * (DIM - 1)])
    gaps = 0.5 * ((last.model.numpy() - np.eye(DIM)[0]) ** 2 @ h)
    noise = calibration.aggregate_std(plan, 0)
    exact = theory.fedgd_quadratic(h, -np.eye(DIM)[0], noise, lr, rounds)
    assert agrees(gaps, exact)
    assert not agrees(gaps, theory.fedgd_quadratic(h, -np.eye(DIM)[0], 2 * noise, lr, rounds))
    c = gd(clip=CLIP, lr=lr, dim=DIM, noise=noise, smooth=SLOPE[1], convex=SLOPE[0])
    limit = theory.fedgd_quadratic(h, -np.eye(DIM)[0], noise, lr, 10_000)
    assert limit < theory.fedgd_sharper_floor(c) < theory.fedgd_convex(c, rounds, 0.15).floor


def test_the_sharper_floor_is_exact_for_one_curvature():
    c = gd(dim=3, smooth=0.4, convex=0.4, noise=0.2, lr=0.7)
    exact = theory.fedgd_quadratic(np.full(3, 0.4), np.zeros(3), 0.2, 0.7, 10_000)
    assert theory.fedgd_sharper_floor(c) == pytest.approx(exact)


# ------------------------------------------------------------------------------------------- DP-FedAdamW's theorem


def adamw(**changed):
    given = {"smooth": 1 / 6, "gap": 1.0, "sampling": 0.5, "largest": 0.25, "tau": 0.1, "clients": 10, "steps": 5}
    return theory.AdamWSetting(**{**given, "noise": 2.0, "batch": 16.0, "records": 1600, **changed})


def test_fedadamws_terms_scale_as_printed():
    terms, later = adamw().terms(100), adamw().terms(400)
    assert terms.sampling == pytest.approx(math.sqrt(1 / 6 * 0.5 / (10 * 5 * 100 * 0.01)))
    assert terms.noise_by_batch == pytest.approx((2.0 * 0.25 / 16) ** 2)
    assert terms.noise_by_rounds == pytest.approx((2.0 * 0.25 / (0.01 * 100)) ** 2)
    ratios = [old / new for old, new in zip(terms, later, strict=True)]
    assert ratios == pytest.approx([2, 4, 1, 16])
    assert terms.total == pytest.approx(terms.sampling + terms.start + terms.noise_by_batch)


def test_fedadamws_hypotheses_need_a_smoothness_of_a_sixth():
    assert adamw(smooth=0.17).largest_gamma(10) == 0
    assert adamw(sampling=0.0).largest_gamma(10) == 1  # 1 / (24 L G_g)
    assert adamw(sampling=0.0, largest=1.0).largest_gamma(10) == pytest.approx(0.25)
    far = adamw().largest_gamma(10**6)
    assert far == pytest.approx(math.sqrt(10 * 5 / 6 * 0.01 / (0.5 * 10**6)))
    # Every limit on the local step is an upper one, and they fall with the rounds.
    assert adamw().largest_lr(1.0, 1000, 0.0) == pytest.approx(10 * adamw().largest_lr(1.0, 10_000, 0.0))


def test_the_proofs_recursion_has_the_noise_floor_of_its_closed_form():
    setting = adamw(steps=1, tau=1.0, noise=0.05, clients=4)
    dim, gamma, runs = 2000, 0.5, 1500
    exact = dim * theory.adamw_noise_floor(1 / 6, gamma, setting, 1.0)
    curves = np.full(dim, 1 / 6)
    # From 0 the mean over rounds is lower, so the burn-in is taken out by a difference of two lengths.
    whole, first = (theory.adamw_error(curves, np.zeros(dim), gamma, 0.1, setting, 1.0, n, 0) for n in (runs, 300))
    late = (runs * whole - 300 * first) / (runs - 300)
    assert late == pytest.approx(exact, rel=0.06)
    assert late != pytest.approx(exact * 4, rel=0.5)  # K = 1 averaged as if clients shared their noise


def test_fedadamws_bound_misses_the_dimension_and_the_clip():
    """Inside every hypothesis, started at the minimiser: the error grows with both, the terms do not."""
    setting = adamw(sampling=0.0, tau=1.0, noise=8.0)
    gamma = setting.largest_gamma(500)
    lr = setting.largest_lr(gamma, 500, 0.0)

    def error(dim, clip):
        return theory.adamw_error(np.full(dim, 1 / 6), np.zeros(dim), gamma, lr, setting, clip, 500, 0)

    base = error(20, 0.1)
    assert error(2000, 0.1) > 50 * base
    assert error(20, 1.0) > 20 * base
    assert error(2000, 1.0) > 10 * setting.terms(500).total


def test_fedadamws_terms_do_not_know_the_local_step():
    """The algorithm moves by the mean update, so without local steps worth the name it stays where it starts."""
    records, _ = quadratic()
    plan = Plan(build("dp-fedadamw", lr=1e-9, clip=CLIP, decay=0.0), 50, records.sizes, Privacy(math.inf))
    *_, last = simulate.run(plan, SQUARES, records, Seeded(0), theta=torch.zeros(DIM, dtype=torch.float64))
    assert last.model.norm() < 1e-5


@pytest.mark.parametrize("clients", [1, 20, 500])
def test_fednews_theorem_has_no_ground(clients):
    for alpha in (0.01, 0.1, 1.0, 100.0):
        lipschitz = alpha  # the least that its condition (F.1) allows, with Hessians of zero
        assert theory.fednew_least_alpha(clients, lipschitz) > 8.9 * math.sqrt(clients) * alpha
        for rho in np.geomspace(1e-4, 1e6, 60):
            assert theory.fednew_rate(alpha, rho, clients, lipschitz) < 0
            assert theory.fednew_bound(0.1, alpha, rho, 5, clients, lipschitz) == math.inf
    rho = math.sqrt(8 * clients / 2.5)
    assert 2.5 * rho + 8 * clients / rho == pytest.approx(theory.fednew_least_alpha(clients, 1.0))
    assert theory.fednew_bound(0.1, 100.0, 1.0, 5, 1, 1.0) > 0  # were L_q small


def test_fednews_passes_reach_the_damped_newton_step():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((6, 3, 8))
    hessians, gradients = a @ a.swapaxes(1, 2) / 8, rng.standard_normal((6, 3))
    assert theory.fednew_error(0.0, 0.1, 1.0, hessians, gradients, 400, 0) < 1e-12
    small, large = (theory.fednew_error(s, 0.1, 1.0, hessians, gradients, 2000, 0) for s in (0.1, 0.2))
    assert large / small == pytest.approx(4, rel=0.02)
