"""The clip that follows a quantile: paid for, found, and the same in both engines."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from sordino import checks
from sordino.core import Adjacency, Kind, Shard
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.models.torch_model import TorchModel
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from tests import support

MODEL = Linear(3, 3)


def records(n=60):
    return support.classified((n // 3,) * 3)


plan_for = partial(support.plan_for, "dp-fedgd", epsilon=4.0, rounds=4, quantile=0.5)


def linear():
    return MODEL


def network():
    torch.manual_seed(0)
    return TorchModel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double())


@pytest.mark.parametrize("batch", ["full", "poisson:8"])
@pytest.mark.parametrize("make", [linear, network])
def test_engines_agree(make, batch):
    model, data = make(), records()
    plan = plan_for(data, batch=batch)
    theta = model.init().double()
    slow = list(reference.run(plan, model, data, Seeded(1), theta=theta))
    fast = list(simulate.run(plan, model, data, Seeded(1), theta=theta, shares=True))
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a.checkpoint.state.log_clip, b.checkpoint.state.log_clip, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", support.tiers([linear, network], 1))
def test_the_clip_finds_the_median(make):
    model, data = make(), records(300)
    plan = plan_for(data, epsilon=float("inf"), rounds=300, clip=50.0, lr=1e-9)
    theta = model.init().double()
    *_, last = simulate.run(plan, model, data, Noiseless(0), theta=theta)
    found = float(last.checkpoint.state.log_clip.exp())
    grads = torch.stack([torch.func.grad(model.loss)(theta, x, y) for x, y in zip(data.x, data.y, strict=True)])
    assert abs(float((grads.norm(dim=1) <= found).double().mean()) - 0.5) < 0.02


def test_counts_are_paid_for_with_their_share():
    plan = plan_for(records())
    squares = {r.query.split()[-1]: r.times * (r.sensitivity / r.std) ** 2 for r in spending.groups(plan)[0].releases}
    assert squares["count"] / sum(squares.values()) == pytest.approx(0.05)
    assert spending.epsilon(plan) == pytest.approx(4.0)
    (count,) = (r for r in spending.groups(plan)[0].releases if r.query.endswith("count"))
    assert count.sensitivity == 1.0  # one record for another: from -1/2 to 1/2


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_no_pair_of_neighbours_exceeds_the_claims(adjacency):
    for found in checks.sensitivity(build("dp-fedgd", quantile=0.5), MODEL, adjacency, trials=16):
        assert not found.beyond, found
        assert found.reached >= 0.9, found


def test_a_count_that_moves_too_far_is_found_out():
    method = build("dp-fedgd", quantile=0.5)
    (stage,) = method.stages
    halved = tuple(replace(q, clip=0.25) if q.kind is Kind.COUNT else q for q in stage.queries)
    wrong = method._replace(stages=(stage._replace(queries=halved),))
    assert any(found.beyond for found in checks.sensitivity(wrong, MODEL, Adjacency.ADD_REMOVE, trials=16))


def test_a_network_of_one_parameter_counts_too():
    class Slope(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return torch.cat([self.line(x), 0 * x], -1)

    model = TorchModel(Slope().double())
    x = torch.tensor([[0.1], [8.0], [9.0]], dtype=torch.float64)
    shard = Shard(x, torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.float64))
    theta = torch.zeros(1, dtype=torch.float64)
    assert model.count_sum(theta, shard, torch.ones(1)).tolist() == [-0.5]  # one below, two beyond


def test_what_cannot_be_is_refused():
    with pytest.raises(SordinoError, match="quantile"):
        build("dp-fedgd", "client", quantile=0.5)
    with pytest.raises(SordinoError, match="quantile"):
        build("dp-fedadam", quantile=1.5)
