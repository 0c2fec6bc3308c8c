"""DP-Boost: each round fits one tree by damped Newton steps on its leaves."""

import math

import numpy as np
import pytest
import torch

from sordino import Plan, Privacy
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.models.trees import Trees
from sordino.privacy.mechanisms.random import Noiseless, Seeded


def bent(rows=4000, seed=0):
    """Labels that depend on |x|, which no linear model sees."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 2))
    y = (np.abs(x[:, 0]) + 0.1 * rng.normal(size=rows) > 0.5).astype(int)
    return Records.of(x, y, np.arange(rows) % 4, dtype=torch.float64)


def accuracy(records, model, theta):
    return float((model.predict(theta, records.x) == records.y).double().mean())


def trained(model, records, epsilon, method="dp-boost", rounds=20, **options):
    privacy = Privacy(epsilon, trust="secure-aggregation")
    plan = Plan(build(method, **options), rounds, records.sizes, privacy)
    source = Noiseless() if epsilon == math.inf else Seeded(1)
    *_, last = simulate.run(plan, model, records, source)
    return last.model


@pytest.mark.parametrize("epsilon", [math.inf, 1.0])
def test_it_learns_what_a_linear_model_cannot(epsilon):
    records, trees = bent(), Trees(2, 2, trees=20)
    assert accuracy(records, trees, trained(trees, records, epsilon)) > 0.9
    linear = Linear(2, 2)
    assert accuracy(records, linear, trained(linear, records, epsilon, "auto")) < 0.6


def test_two_columns_of_a_tree_interact():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 2))
    records = Records.of(x, (x[:, 0] * x[:, 1] > 0).astype(int), np.zeros(4000, int), dtype=torch.float64)
    found = {}
    for columns in (1, 2):
        trees = Trees(2, 2, trees=20, columns=columns)
        found[columns] = accuracy(records, trees, trained(trees, records, 2.0))
    assert found[1] < 0.6
    assert found[2] > 0.8


@pytest.mark.parametrize(("kind", "least"), [(Loss.SQUARES, 0.8), (Loss.POISSON, 0.5)])
def test_numbers_are_learnt_too(kind, least):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 2))
    mean = np.cos(4 * x[:, 0]) / 2
    y = mean + 0.05 * rng.normal(size=4000) if kind is Loss.SQUARES else rng.poisson(np.exp(2 * mean))
    truth = mean if kind is Loss.SQUARES else np.exp(2 * mean)
    records = Records.of(x, y.astype(float), np.zeros(4000, int), dtype=torch.float64)
    trees = Trees(2, 1, kind, trees=20)
    values = trees.predict(trained(trees, records, 4.0), records.x).numpy()
    assert 1 - np.mean((values - truth) ** 2) / np.var(truth) > least


def test_a_round_moves_one_tree_and_trees_are_fitted_again_after_the_last():
    records, trees = bent(400), Trees(2, 2, trees=3, depth=2)
    plan = Plan(build("dp-boost"), 5, records.sizes, Privacy(1.0))
    before = torch.zeros(trees.size, dtype=torch.float64)
    for this_round in simulate.run(plan, trees, records, Seeded(0)):
        values, intercepts = trees.parts(this_round.model - before)
        assert [bool(tree.any()) for tree in values] == [k == this_round.t % 3 for k in range(3)]
        assert not intercepts.any()
        before = this_round.model


def test_damping_keeps_noise_out_of_leaves_with_few_records():
    records, trees = bent(200), Trees(2, 2, trees=20)
    wild, calm = (trained(trees, records, 0.1, damping=damping).norm() for damping in (0.0, 10.0))
    assert calm < 0.3 * wild


@pytest.mark.parametrize(
    ("options", "message"), [({"clip": 0.0}, "clip: 0"), ({"lr": 0.0}, "lr: 0"), ({"damping": -1.0}, "damping")]
)
def test_wrong_options(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-boost", **options)


def test_other_models_are_refused():
    records = bent(40)
    plan = Plan(build("dp-boost"), 2, records.sizes, Privacy(1.0))
    with pytest.raises(SordinoError, match="model: dp-boost boosts trees, and Linear has none; use model trees"):
        next(simulate.run(plan, Linear(2, 2), records, Seeded(0)))
