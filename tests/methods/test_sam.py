"""DP-FedSAM: what it is without ascent, what two gradients a step cost, and what is clipped at client level."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Broadcast, Kind, Local, Stage, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.oracle import clipped
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from tests import support

MODEL = Linear(3, 3)
SIZES = (5, 15, 20, 40)


@pytest.fixture(scope="module")
def records():
    return support.classified(SIZES)


plan_for = partial(support.plan_for, rounds=5)


def path(method, records, model=MODEL, **plan):
    rounds = simulate.run(plan_for(method, records, **plan), model, records, Seeded(3), shares=True)
    return torch.stack([this_round.model for this_round in rounds])


# --------------------------------------------------------------------------------------------------------- the ascent


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_without_ascent_it_is_federated_averaging(unit, records):
    """At the same price: the first gradient is not asked for."""
    sam, avg = (
        build(name, unit, steps=2, local_lr=0.5, **rho)
        for name, rho in (("dp-fedsam", {"rho": 0.0}), ("dp-fedavg", {}))
    )
    assert torch.equal(path(sam, records), path(avg, records))
    assert spending.groups(plan_for(sam, records)) == spending.groups(plan_for(avg, records))
    assert not torch.allclose(path(build("dp-fedsam", unit, steps=2, local_lr=0.5), records), path(avg, records))


def second_of_two(steps, local_lr):
    """Federated averaging that asks twice and steps along the second answer."""
    method = build("dp-fedsam", steps=steps)
    (stage,) = method.stages

    def compute(ask, broadcast, memory, cache):
        y = broadcast.theta
        for _ in range(steps):
            batch = ask.sample()
            ask.gradient(y, on=batch)
            y = y - local_lr * ask.gradient(y, on=batch)
        return y - broadcast.theta

    return method._replace(stages=(Stage(Local(compute), stage.rule, stage.queries),))


def test_a_short_ascent_is_federated_averaging_along_the_second_gradient(records):
    """Draw for draw; the gap shrinks with rho."""
    avg = path(second_of_two(3, 0.5), records)
    gaps = [
        float((path(build("dp-fedsam", steps=3, local_lr=0.5, rho=rho), records) - avg).abs().max())
        for rho in (1e-9, 1e-6, 0.5)
    ]
    assert gaps[0] < 1e-8
    assert gaps[0] < gaps[1] < 1e-5
    assert gaps[2] > 1e-3


@pytest.mark.parametrize("mistake", [None, "descent", "no norm", "growth"])
def test_one_step_by_hand(mistake):
    """Least squares without noise: the gradient is taken rho uphill, along a unit vector."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 2)), rng.normal(size=12)
    data = Records.of(x, y, np.zeros(12, int), dtype=torch.float64)
    model, theta = Linear(2, 1, Loss.SQUARES, bias=False), torch.tensor([0.5, -1.0], dtype=torch.float64)
    method = build("dp-fedsam", rho=0.3, decay=0.2, local_lr=0.1, lr=2.0, clip=1e9)
    got = next(
        simulate.run(plan_for(method, data, rounds=1, epsilon=math.inf), model, data, Seeded(0), theta=theta)
    ).model

    def gradient(at):
        return x.T @ (x @ at - y) / 12

    start = theta.numpy()
    g = gradient(start)
    up = 0.3 * g / (1 if mistake == "no norm" else np.linalg.norm(g)) * (-1 if mistake == "descent" else 1)
    step = gradient(start + up) + (-0.2 if mistake == "growth" else 0.2) * start
    assert np.allclose(got.numpy(), start - 2.0 * 0.1 * step, atol=1e-12) == (mistake is None)


def test_no_gradient_no_ascent():
    """|g| = 0 is divided by a number above 0: the second question, too, is put at the model itself."""
    asked = []

    class TorchModel:
        def sample(self):
            return None

        def gradient(self, at, on):
            asked.append(at)
            return torch.zeros_like(at)

    theta = torch.arange(6.0).view(2, 3)
    (stage,) = build("dp-fedsam", steps=2).stages
    assert torch.equal(stage.local.compute(TorchModel(), Broadcast(theta), (), ()), torch.zeros(2, 3))
    assert len(asked) == 4
    assert all(torch.equal(at, theta) for at in asked)
    assert torch.isnan(0 * theta / (0 * theta).norm()).all(), "as it would be"


def test_every_client_climbs_by_its_own_gradient(records):
    """Clients of one size are a batch; a norm over all of it would be seen, for the reference has them one by one."""
    alike = Records(records.x, records.y, np.arange(0, 81, 20))
    method = build("dp-fedsam", steps=2, rho=0.5)
    slow = [this_round.model for this_round in reference.run(plan_for(method, alike), MODEL, alike, Seeded(3))]
    torch.testing.assert_close(path(method, alike), torch.stack(slow), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- its price


@pytest.mark.parametrize("steps", [1, 4])
def test_both_gradients_of_a_step_are_paid_for(steps, records):
    """2 T K releases, and at equal epsilon exactly sqrt(2) times the noise of dp-fedavg: not twice."""
    sam, avg = (plan_for(build(name, steps=steps), records) for name in ("dp-fedsam", "dp-fedavg"))
    assert [release.times for release in spending.groups(sam)[0].releases] == [2 * 5 * steps]
    assert spending.epsilon(sam) == pytest.approx(spending.epsilon(avg), rel=1e-12)
    np.testing.assert_allclose(
        calibration.client_std(sam, 0, 0), math.sqrt(2) * calibration.client_std(avg, 0, 0), rtol=1e-12
    )


def test_a_user_pays_for_one_message(records):
    plan = plan_for(build("dp-fedsam", Unit.CLIENT, steps=4), records)
    assert [release.times for release in spending.groups(plan)[0].releases] == [5]
    gradients, delta = plan.stages[0].queries
    assert (gradients.kind, gradients.calls, gradients.noise) == (Kind.GRADIENT, 8, None)
    assert (delta.kind, delta.calls) == (Kind.DELTA, 1)
    final = plan_for(build("dp-fedsam", steps=4, noise_at="final"), records)
    assert [release.times for release in spending.groups(final)[0].releases] == [5]


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
def test_sums_are_proved_where_they_are_for_averaging(trust, records):
    for options in ({"steps": 1}, {"steps": 2, "rho": 0.0}):  # one step is two gradients, the second at a noised point
        with pytest.raises(SordinoError, match="is not proved"):
            plan_for(build("dp-fedsam", **options), records, trust=trust)
    assert plan_for(build("dp-fedsam", steps=1, rho=0.0), records, trust=trust).proved
    assert plan_for(build("dp-fedsam", Unit.CLIENT, steps=3), records, trust=trust).proved


def test_an_update_is_clipped_as_one_vector(records):
    """Each of L tensors cut to C by itself would reach C sqrt(L)."""
    method, raw = build("dp-fedsam", Unit.CLIENT, steps=2, local_lr=1e3, clip=0.7), []
    (stage,) = method.stages
    compute = stage.local.compute

    def noting(*args):
        raw.append(compute(*args))
        return raw[-1]

    method = method._replace(stages=(stage._replace(local=Local(noting)),))
    plan = plan_for(method, records, rounds=1, epsilon=math.inf)
    this_round = next(reference.run(plan, MODEL, records, Seeded(0)))
    messages = [clipped(update, 0.7) for update in raw]
    torch.testing.assert_close(this_round.aggregate, sum(messages) / 4)
    tensors = 4  # rows of the weights, and the bias
    for update, message in zip(raw, messages, strict=True):
        assert float(message.norm()) == pytest.approx(0.7 * (1 - SAFETY), rel=1e-9)
        separately = clipped(update.view(tensors, -1), 0.7)
        assert float(separately.norm()) == pytest.approx(0.7 * math.sqrt(tensors) * (1 - SAFETY), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": -0.1}, "rho: -0.1"),
        ({"rho": math.nan}, "rho: nan"),
        ({"decay": -1.0}, "decay: -1"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-fedsam", **options)
