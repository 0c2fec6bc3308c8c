"""DP-FedAdam, scaled: gradients are divided by Adam's earlier root of v before the clip."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sordino import checks
from sordino.checks.fixtures import Through
from sordino.checks.mutants import breaks, clips_before_the_scale, concerns, noticed_stages
from sordino.core import Adjacency, Divisor, Facts, Trust, Unit
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build
from sordino.methods.scaled import relative_scale
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from tests.support import classified, covering, plan_for, tiers

NAME = "dp-fedadam-scaled"
OPTIONS = {"clip": 0.3, "lr": 0.2, "beta1": 0.8, "beta2": 0.7, "tau": 0.01, "w": 0.8}
MODEL, SQUARES = Linear(3, 3), Linear(3, 1, Loss.SQUARES, bias=False)
SIZES = (5, 9, 12, 20)


@pytest.fixture(scope="module")
def records():
    """The last feature is a hundred times as large as the others."""
    plain = classified(SIZES)
    return replace(plain, x=plain.x * torch.tensor([1.0, 1.0, 100.0]))


def gradients(theta, records):
    """One gradient of softmax regression per record, in numpy."""
    x = np.hstack([records.x.numpy(), np.ones((len(records.y), 1))])
    scores = x @ theta.reshape(4, 3)
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(3)[records.y.numpy()]
    return np.einsum("nf,no->nfo", x, p).reshape(len(x), -1)


def by_hand(records, unit, rounds, noise, *, clip, lr, beta1, beta2, tau, w, clip_first=False):
    """The pseudocode, record by record; `noise` has one vector per round, added to the mean of scaled gradients.

    The engines enforce a clip that is a few parts in 100,000 smaller.
    """
    theta, m, path = np.zeros(12), np.zeros(12), []
    v = np.full(12, tau**2)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)

    def clipped(term):
        return term * min(1.0, clip / np.linalg.norm(term))

    for t in range(rounds):
        s = np.sqrt(1 - w + w * v / v.mean())
        g = gradients(theta, records)
        if unit is Unit.RECORD:
            mean = sum(clipped(row) / s if clip_first else clipped(row / s) for row in g) / len(g)
        else:
            messages = [clipped(np.mean(g[owners == i] / s, axis=0)) for i in range(len(SIZES))]
            mean = sum(messages) / len(SIZES)
        back = s * (mean + noise[t])
        m, v = beta1 * m + (1 - beta1) * back, beta2 * v + (1 - beta2) * back**2
        theta = theta - lr * m / (np.sqrt(v) + tau)
        path.append(theta)
    return np.array(path)


def path(
    records, unit=Unit.RECORD, engine=simulate, rounds=3, epsilon=math.inf, seed=1, trust="untrusted-server", **more
):
    divisor = Divisor.POOLED if unit is Unit.RECORD else Divisor.CLIENT_MEAN
    plan = plan_for(build(NAME, unit, **OPTIONS | more), records, rounds, epsilon=epsilon, trust=trust, divisor=divisor)
    return np.array([done.model.numpy() for done in engine.run(plan, MODEL, records, Seeded(seed))])


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_three_rounds_without_noise_follow_the_pseudocode(records, unit, engine):
    found, quiet = path(records, unit, engine), np.zeros((3, 12))
    np.testing.assert_allclose(found, by_hand(records, unit, 3, quiet, **OPTIONS), rtol=1e-3, atol=1e-6)
    unscaled = by_hand(records, unit, 3, quiet, **OPTIONS | {"w": 0.0})
    np.testing.assert_allclose(found[0], unscaled[0], rtol=1e-3, atol=1e-6, err_msg="the first scale is 1")
    assert not np.allclose(found[1:], unscaled[1:], rtol=1e-2)
    if unit is Unit.RECORD:
        mutant = by_hand(records, unit, 3, quiet, clip_first=True, **OPTIONS)
        assert not np.allclose(found[1:], mutant[1:], rtol=1e-2)


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_three_rounds_with_known_noise_follow_the_pseudocode(records, unit):
    """The noise is read off the same rule on clients that answer zero: the server then has the noise alone."""
    noise = []

    def heard(stage):
        def update(mean, *args):
            noise.append(mean.numpy().copy())
            return stage.rule.update(mean, *args)

        return stage._replace(rule=stage.rule._replace(update=update))

    silent = Through(MODEL, ("clipped_sum",), lambda name, inner, *args, **how: 0 * inner(*args, **how))
    method = build(NAME, unit, **OPTIONS)
    (stage,) = method.stages
    divisor = Divisor.POOLED if unit is Unit.RECORD else Divisor.CLIENT_MEAN
    plan = plan_for(method._replace(stages=(heard(stage),)), records, 3, divisor=divisor)
    list(reference.run(plan, silent, records, Seeded(1)))
    assert np.std(noise) > 0
    found = path(records, unit, reference, epsilon=8.0)
    np.testing.assert_allclose(found, by_hand(records, unit, 3, noise, **OPTIONS), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_without_the_part_that_follows_v_it_is_dp_fedadam(records, unit):
    shared = {key: value for key, value in OPTIONS.items() if key != "w"}
    adam = plan_for(build("dp-fedadam", unit, **shared), records, 3, divisor=Divisor.POOLED)
    mine = plan_for(build(NAME, unit, w=0.0, **shared), records, 3, divisor=Divisor.POOLED)
    theirs, found = ([r.model for r in reference.run(plan, MODEL, records, Seeded(1))] for plan in (adam, mine))
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-9)
    other = plan_for(build(NAME, unit, w=0.5, **shared), records, 3, divisor=Divisor.POOLED)
    found = [r.model for r in reference.run(other, MODEL, records, Seeded(1))]
    torch.testing.assert_close(found[0], theirs[0], rtol=1e-6, atol=1e-9, msg="the first step is DP-FedAdam's")
    assert not torch.allclose(found[1], theirs[1])


def test_the_scale_has_mean_square_one_and_a_floor():
    v = torch.tensor([[1e-8, 1e-4, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    for w in (0.0, 0.5, 0.9, 0.999):
        s = relative_scale(v, w)
        torch.testing.assert_close(s.square().mean(-1), torch.ones(2, dtype=torch.float64))
        assert s.min() >= math.sqrt(1 - w) * (1 - 1e-12)
        torch.testing.assert_close(s[1], torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(relative_scale(100 * v, w), s, msg="only ratios count")
    assert torch.isfinite(relative_scale(torch.zeros(3), 0.9)).all()


def test_runs_side_by_side_have_scales_of_their_own():
    """Options may be tensors, with one row per run."""
    options = {"lr": 0.1, "beta1": 0.9, "beta2": torch.tensor([[0.5], [0.9]]), "tau": torch.tensor([[0.1], [0.01]])}
    (stage,) = build(NAME, **options).stages
    state = stage.rule.init(torch.zeros(2, 3), Facts(1, np.ones(1), 3, 1.0, 0.0), ())
    g = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, -1)
    _, state = stage.rule.update(g, state, torch.zeros(2, 3), 0)
    both = stage.rule.broadcast(state)[0]
    for k, (beta2, tau) in enumerate(((0.5, 0.1), (0.9, 0.01))):
        (alone,) = build(NAME, lr=0.1, beta2=beta2, tau=tau).stages
        mine = alone.rule.init(torch.zeros(3), Facts(1, np.ones(1), 3, 1.0, 0.0), ())
        _, mine = alone.rule.update(g[k], mine, torch.zeros(3), 0)
        torch.testing.assert_close(both[k], alone.rule.broadcast(mine)[0])


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("unit", REGISTRY[NAME].protects)
def test_the_account_is_that_of_dp_fedadam(trust, unit):
    plans = [plan_for(REGISTRY[name].at(unit), SIZES, 5, trust=trust, unit=unit) for name in (NAME, "dp-fedadam")]
    assert spending.epsilon(plans[0]) == spending.epsilon(plans[1])
    assert np.array_equal(calibration.summed_noise(plans[0]), calibration.summed_noise(plans[1]))


CASES = (["record", "client"], list(Trust), ["full", "poisson:4", "fixed:4"], ["full", "poisson:0.6"])
SERVED = [case for case in itertools.product(*CASES) if case[0] == "record" or case[2] == "full"]
QUICK = [case for case in covering(*CASES) if case in SERVED]


@pytest.mark.parametrize(("unit", "trust", "batch", "participation"), tiers(SERVED, QUICK))
def test_both_engines_agree(records, unit, trust, batch, participation):
    plan = plan_for(NAME, records, 4, unit=unit, trust=trust, batch=batch, participation=participation, **OPTIONS)
    slow = [r.model for r in reference.run(plan, MODEL, records, Seeded(1))]
    fast = [r.model for r in simulate.run(plan, MODEL, records, Seeded(1), shares=True)]
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    other = [r.model for r in simulate.run(plan, MODEL, records, Seeded(2), shares=True)]
    assert not torch.allclose(other[-1], slow[-1])


@pytest.mark.parametrize("adjacency", Adjacency)
def test_the_search_rejects_a_clip_before_the_scale(adjacency):
    method, search = build(NAME), partial(checks.sensitivity, adjacency=adjacency)
    assert not any(found.beyond for found in search(method, SQUARES, trials=2))
    assert all(found.beyond for found in search(*clips_before_the_scale(method, SQUARES), trials=40, rejects=[0]))


def test_sordino_check_tries_that_mutant_where_gradients_are_scaled():
    assert [name for name in (NAME, "dp-fedgd", "dp-adadps") if noticed_stages(build(name), SQUARES).scaled] == [NAME]
    assert not breaks(clips_before_the_scale, build(NAME, Unit.CLIENT)), "a message is clipped as a whole"
    asked = [q for q in ("0.0 gradient", "1.0 gradient", "0.1 fisher") if concerns(clips_before_the_scale, q, (), {0})]
    assert asked == ["0.0 gradient"]


def test_a_scale_of_gradients_that_were_not_released_is_rejected():
    """The scale must follow from releases: a replay on other data finds one that follows from sums without noise."""
    seen = []

    def total(name, inner, *args, **how):
        seen[:] = [inner(*args, **how)]
        return seen[0]

    method = build(NAME)
    (stage,) = method.stages

    def update(mean, states, theta, t):
        step, (moments, *rest) = stage.rule.update(mean, states, theta, t)
        private = relative_scale(seen[0].to(theta).square(), 0.9)
        return step, (moments._replace(scale=private), *rest)

    assert not checks.replay(method, MODEL)
    mutant = method._replace(stages=(stage._replace(rule=stage.rule._replace(update=update)),))
    assert checks.replay(mutant, Through(MODEL, ("clipped_sum",), total))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"w": 1.0}, "w: 1.0 must lie in"),
        ({"w": -0.1}, "w: -0.1 must lie in"),
        ({"tau": 0.0}, "tau: 0.0 must be a finite number above 0"),
        ({"beta1": 1.0}, "beta1: 1.0 must lie in"),
        ({"beta2": 1.0}, "beta2: 1.0 must lie in"),
        ({"clip": 0.0}, "clip: 0.0 must be a finite number above 0"),
        ({"lr": 0.0}, "lr: 0.0 must be above 0"),
        ({"tail": 2.0}, "tail: 2.0 must lie in"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(SordinoError, match=match):
        build(NAME, **options)
