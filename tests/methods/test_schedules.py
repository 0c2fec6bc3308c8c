"""Schedules and weight decay of local steps: a plain loop for each method, what is clipped, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch

from sordino import checks
from sordino.core import Local, Stage, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build
from sordino.methods.adadps import Public
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.rules import chain, scale
from tests.support import classified, plan_for

SIZES = (5, 10, 25)
MODEL = Linear(3, 1, Loss.SQUARES, bias=False)
START = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
MOMENTS = np.array([0.5, 1.0, 2.0])
ROUNDS = 4
CLIENTS = ("dp-fedavg", "dp-fedavg-ls", "dp-adafedprox", "dp-scaffold", "dp-fedsam", "dp-adadps")
METHODS = (*CLIENTS, "fedavg-gdp")
ON = {"schedule": "cosine", "decay": 0.3}
OWN = {"dp-adadps": {"public": Public.statistics({"second_moment": MOMENTS})}, "dp-adafedprox": {"mu": 0.5}}


def steps_of(name, **options):
    """The method's own options and step sizes, as far as it has them."""
    numbers = {"lr": 0.8, "local_lr": 0.2} | OWN.get(name, {}) | options
    return {key: value for key, value in numbers.items() if key in REGISTRY[name].options}


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 3))
    return Records.of(
        x, x @ [1.0, -2.0, 0.5] + rng.normal(size=len(x)), np.repeat(range(3), SIZES), dtype=torch.float64
    )


def gradient(records, i, theta):
    rows = slice(records.starts[i], records.starts[i + 1])
    x, y = records.x[rows].numpy(), records.y[rows].numpy()
    return x.T @ (x @ theta - y) / len(x)


def smoothed(u):
    """(I - L)^-1 u, L the circulant second difference."""
    eye = np.eye(len(u))
    return np.linalg.solve(3 * eye - np.roll(eye, 1, 0) - np.roll(eye, -1, 0), u)


def by_hand(name, records, weights, K, *, schedule="constant", decay=0.0, rounds=ROUNDS):
    """The method in plain numpy, without noise and clips; everybody takes part."""
    theta, lr, local_lr = START.numpy().copy(), 1.0 if name == "fedavg-gdp" else 0.8, 0.2
    c, own, pull, last, models = np.zeros(3), np.zeros((3, 3)), 0.5, np.zeros(3), []
    for t in range(rounds):
        eta = local_lr * ((1 + math.cos(math.pi * t / rounds)) / 2 if schedule == "cosine" else 1)
        updates = []
        for i in range(3):
            y, gradients = theta, []
            for _ in range(K):
                g = gradient(records, i, y)
                if name == "dp-fedsam":
                    g = gradient(records, i, y + 0.05 * g / np.linalg.norm(g))
                gradients.append(g)
                if name == "dp-adadps":
                    g = g / (np.sqrt(MOMENTS) + 0.1)
                if name == "dp-adafedprox":
                    g = g + pull * (y - theta)
                if name == "dp-scaffold":
                    g = g - own[i] + c
                y = (1 - eta * decay) * y - eta * g
            if name == "dp-scaffold":  # the mean of its gradients, as they weigh in the update
                own[i] = np.average(gradients, axis=0, weights=(1 - eta * decay) ** np.arange(K)[::-1])
            updates.append(y - theta)
        u, c = weights @ updates, weights @ own
        pull, last = np.clip(pull * (1.1 if u @ last < 0 else 0.9), 0.05, 5.0), u
        theta = theta + lr * (smoothed(u) if name == "dp-fedavg-ls" else u)
        models.append(theta)
    return torch.tensor(np.array(models))


def path(plan, records, engine=simulate, **how):
    rounds = engine.run(plan, MODEL, records, Seeded(3), theta=START, **how)
    return torch.stack([each.model for each in rounds])


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("options", [{}, {"schedule": "cosine"}, {"decay": 0.3}, ON])
@pytest.mark.parametrize("name", METHODS)
def test_without_noise_it_is_a_plain_loop(records, name, options, K):
    """At both levels, with noise on steps or on the update: the clip is out of reach."""
    for unit in REGISTRY[name].units:
        for final in ({}, {"noise_at": "final"}) if "noise_at" in REGISTRY[name].options else ({},):
            method = build(name, unit, clip=1e9, steps=K, **steps_of(name), **options, **final)
            plan = plan_for(method, records, ROUNDS, epsilon=math.inf)
            expected = by_hand(name, records, plan.weights, K, **options)
            rounding = 1e-7 if name == "dp-adafedprox" else 1e-11  # mu changes by factors of single precision
            torch.testing.assert_close(path(plan, records), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", METHODS)
def test_each_option_changes_the_models(records, name):
    models = [
        path(plan_for(build(name, clip=1e9, **steps_of(name), **options), records, ROUNDS), records)
        for options in ({}, {"schedule": "cosine"}, {"decay": 0.3}, ON)
    ]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(models, 2))


def test_the_defaults_are_the_plain_steps_bit_for_bit(records):
    def compute(ask, broadcast, memory, cache):
        y = broadcast.theta
        for _ in range(3):
            y = y - 0.2 * ask.gradient(y)
        return y - broadcast.theta

    method = build("dp-fedavg", steps=3, local_lr=0.2, lr=0.7)
    plain = method._replace(stages=(Stage(Local(compute), chain(scale(0.7)), method.stages[0].queries),))
    assert torch.equal(*(path(plan_for(each, records, ROUNDS), records, shares=True) for each in (method, plain)))
    for name in METHODS:
        assert REGISTRY[name].options["schedule"] == "constant"
        assert REGISTRY[name].options["decay"] == 0


@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.4"])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_and_the_price_is_the_same(records, name, K, participation):
    for unit in REGISTRY[name].units:
        plan, bare = (
            plan_for(build(name, unit, steps=K, **steps_of(name), **options), records, 5, participation=participation)
            for options in (ON, {})
        )
        slow, fast = path(plan, records, reference), path(plan, records, shares=True)
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)
        assert spending.groups(plan) == spending.groups(bare)
        np.testing.assert_equal(calibration.query_noises(plan), calibration.query_noises(bare))


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-adafedprox", "dp-adadps", "dp-fedavg-ls"])
def test_one_step_stays_a_sum_of_gradients(records, name):
    """The server takes the factor and the decay, so that only sums need be seen."""
    method = build(name, **steps_of(name), **ON)
    plan = plan_for(method, records, 5, trust=Trust.SECURE_AGGREGATION)
    assert plan.proved
    torch.testing.assert_close(path(plan, records), path(plan, records, reference), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", CLIENTS)
def test_decay_is_outside_of_what_is_clipped(name):
    """Without gradients the model shrinks by (1 - lr decay)^K, far beyond the clip; lr is the round's."""
    x = classified(SIZES)
    blank = Records(0 * x.x, x.y, x.starts)
    model, start = Linear(3, 3, bias=False), torch.arange(1.0, 10.0, dtype=torch.float64)
    own = {"lr": 1.0} | ({"strength": 0.0} if name == "dp-fedavg-ls" else {})
    for unit, K, schedule in itertools.product(REGISTRY[name].units, (1, 3), ("constant", "cosine")):
        if name == "dp-adafedprox" and K > 1:
            continue  # the pull counteracts decay
        options = {"local_lr": 0.5, "decay": 0.4, "schedule": schedule, "steps": K, "clip": 1e-6, **own}
        plan = plan_for(build(name, unit, **options), blank, 2, epsilon=math.inf)
        first, second = (each.model for each in simulate.run(plan, model, blank, Seeded(0), theta=start))
        torch.testing.assert_close(first, start * 0.8**K)
        torch.testing.assert_close(second, first * (1 - 0.5 * 0.4 * (0.5 if schedule == "cosine" else 1)) ** K)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_clip_bounds_updates_in_units_of_the_round_s_step(records, name):
    """So that noise on an update shrinks with it: with everybody at the clip, a round moves by factor times clip."""
    clip, own = 1e-3, {"strength": 0.0} if name == "dp-fedavg-ls" else {}
    method = build(name, Unit.CLIENT, clip=clip, steps=2, **steps_of(name, lr=1.0, **own), schedule="cosine")
    if name == "dp-scaffold":
        method = build(name, Unit.CLIENT, clip=clip, steps=2, lr=1.0, local_lr=2.0, schedule="cosine")
    same = classified((6, 6, 6), classes=1)
    same = Records(same.x[:6].repeat(3, 1), 100.0 + 0 * same.y[:6].repeat(3).double(), same.starts)
    models = [START, *path(plan_for(method, same, 4, epsilon=math.inf), same)]
    lengths = [float((b - a).norm()) / clip for a, b in itertools.pairwise(models)]
    np.testing.assert_allclose(lengths, [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)], rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosinus"}, r"schedule: 'cosinus' is unknown\. Did you mean 'cosine'\?"),
        ({"decay": -0.1}, "decay: -0.1 must be a finite number, 0 or more"),
        ({"decay": math.inf}, "decay: inf must be"),
        ({"decay": math.nan}, "decay: nan must be"),
        ({"decay": 1.0, "local_lr": 2.0}, "decay: 1.0 times a step size of 2 must be at most 1"),
        ({"decay": "much"}, "decay: 'much' is a text"),
    ],
)
def test_bad_values_are_named(name, options, message):
    with pytest.raises(SordinoError, match=message):
        build(name, **options)


def test_a_check_of_a_method_with_local_steps_turns_both_on():
    forms = [(form, method.unit) for form, method in checks.scheduled("dp-fedavg")]
    assert forms == [
        ("cosine, decay, K = 1", Unit.RECORD),
        ("cosine, decay, K = 2", Unit.RECORD),
        ("cosine, decay, K = 2", Unit.CLIENT),
    ]
    assert not checks.scheduled("dp-fedadamw"), "its defaults have them"
    assert not checks.scheduled("dp-fedgd")
