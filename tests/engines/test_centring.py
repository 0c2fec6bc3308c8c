"""Gradients about a centre: what they are, what they may move by, and that every way through the engines agrees."""

import math

import numpy as np
import pytest
import torch

from sordino.checks.search import sensitivity
from sordino.core import Adjacency, Blend, Broadcast, Centre, Kind, Local, Method, Query, Shard, Stage, Trust, Unit
from sordino.data.records import Records, row_norms
from sordino.engines import oracle, reference, simulate
from sordino.engines.oracle import centred_records
from sordino.engines.trace import only_asks_for_the_gradient
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.auto import centred_gradient
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules import scale
from tests.support import plan_for

MODEL, CLIP = Linear(3, 4), 2.0
CENTRE = Centre(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.5]))
EVERY = frozenset((unit, trust) for unit in Unit for trust in Trust)


def federation(n=60, dtype=torch.float64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)) * 2 + [3.0, -4.0, 1.0]
    return Records.of(x, rng.integers(0, 4, n), np.sort(np.arange(n) % 5), dtype=dtype)


def by_hand(theta, x, y, clip=CLIP):
    """The clipped sum over features that were centred beforehand, record by record."""
    total = torch.zeros(MODEL.size, dtype=torch.float64)
    z = CENTRE.factor.double() * (x - CENTRE.mean.double())
    for row, label in zip(z, y, strict=True):
        (g,) = torch.autograd.grad(MODEL.loss(at := theta.clone().requires_grad_(), row, label), at)
        total += g * min(1.0, clip / float(g.norm()))
    return total


def about_centre(centre=CENTRE, rounds=3, clip=CLIP):
    rule = scale(0.3)
    rule = rule._replace(broadcast=lambda state: Centre(*(part.double() for part in centre)))
    return Method("centred", Unit.RECORD, (Stage(Local(centred_gradient), rule, (Query(Kind.GRADIENT, clip),)),), EVERY)


def test_parameters_predict_what_they_predicted_and_steps_lead_back():
    records, theta = federation(), torch.randn(MODEL.size, dtype=torch.float64)
    shard = records.fused(np.arange(5), np.ones(5))
    moved = CENTRE.parameters(theta)
    assert torch.allclose(MODEL.logits(moved, centred_records(shard, CENTRE).x), MODEL.logits(theta, shard.x))
    step = torch.randn_like(theta)
    assert torch.allclose(CENTRE.parameters(theta + CENTRE.step(step)), moved + step)
    runs = Centre(torch.stack([CENTRE.mean, 0 * CENTRE.mean]), torch.tensor([[1.5], [1.0]]))
    both = runs.parameters(torch.stack([theta, theta]))
    assert torch.allclose(both, torch.stack([moved, theta]))


@pytest.mark.parametrize("engine", [reference, simulate])
def test_it_is_the_gradient_of_a_model_of_centred_features(engine):
    records, theta = federation(), torch.randn(MODEL.size, dtype=torch.float64)
    plan = plan_for(about_centre(), records, 1, epsilon=math.inf)
    (round_,) = engine.run(plan, MODEL, records, Noiseless(0), theta=theta)
    expected = by_hand(CENTRE.parameters(theta), records.x, records.y) / len(records.y)
    assert torch.allclose(round_.aggregate, expected, rtol=1e-3)  # a clip is enforced 2^-14 below its value
    plain = MODEL.clipped_sum(theta, records.fused(np.arange(5), np.ones(5)), CLIP) / len(records.y)
    assert not torch.allclose(round_.aggregate, plain, rtol=0.1)  # the mutant: nothing is centred


@pytest.mark.parametrize(
    "keys", [{}, {"participation": "fixed:3"}, {"participation": "poisson:0.8"}, {"batch": "poisson:4"}]
)
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_engines_agree(keys, trust):
    records = federation()
    plan = plan_for(about_centre(), records, 6, trust=trust, **keys)
    slow, fast = (
        list(engine.run(plan, MODEL, records, Seeded(3), **how))
        for engine, how in ((reference, {}), (simulate, {"shares": True}))
    )
    for one, other in zip(slow, fast, strict=True):
        assert torch.allclose(one.model, other.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("most", [1, 2**27])
def test_runs_together_are_runs_apart(most, monkeypatch):
    """With room for the records of all runs, and run by run."""
    monkeypatch.setattr(simulate, "CENTRED_NUMBERS", most)
    records, plan = federation(), plan_for("auto", federation(), 9)
    apart = [list(simulate.run(plan, MODEL, records, Seeded(seed)))[-1].model for seed in (1, 2)]
    theta = torch.zeros(2, MODEL.size, dtype=torch.float64)
    together = list(simulate.run(plan, MODEL, records, [Seeded(1), Seeded(2)], theta=theta))[-1].model
    assert torch.allclose(together, torch.stack(apart), rtol=1e-9, atol=1e-12)


def test_the_fast_engine_makes_one_sum_of_it():
    stage, theta = about_centre().stages[0], torch.zeros(MODEL.size)
    assert only_asks_for_the_gradient(stage, Broadcast(theta, CENTRE))
    other = stage._replace(local=Local(lambda ask, broadcast, memory, cache: ask.gradient(broadcast.theta)))
    assert not only_asks_for_the_gradient(other, Broadcast(theta, CENTRE))


def test_it_is_refused_with_a_scale_with_a_blend_and_for_other_models():
    records = federation()

    def asking(**how):
        def compute(ask, broadcast, memory, cache):
            return ask.gradient(broadcast.theta, centre=CENTRE, **{k: v(broadcast.theta) for k, v in how.items()})

        stage = about_centre().stages[0]._replace(local=Local(compute))
        return plan_for(about_centre()._replace(stages=(stage,)), records, 1)

    for plan, model in (
        (asking(scale=torch.ones_like), MODEL),
        (asking(blend=lambda theta: Blend(theta, (1.0, 0.0))), MODEL),
        (asking(), Linear(3, 4, bias=False)),
    ):
        with pytest.raises(SordinoError, match="centre: features are centred for plain gradients"):
            list(reference.run(plan, model, records, Seeded(1)))


# ------------------------------------------------------------------------------------------------- what it may move by


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3, 1e12, -1e30, math.inf, math.nan])
def test_one_record_moves_the_sum_by_the_clip_whatever_the_server_sends(mean, dtype):
    """A server that sends a centre far away, near one record, or no number at all."""
    rng = np.random.default_rng(1)
    for factor in (1e-20, 1.0, 1e20, -3.0, 0.0):
        x = torch.from_numpy(rng.normal(size=(50, 3)) * 10).to(dtype)
        x[0], x[1] = mean, x[1] * 1e10
        y, mask = torch.from_numpy(rng.integers(0, 4, 50)), torch.ones(50, dtype=dtype)
        centre = Centre(torch.full((3,), mean, dtype=dtype), torch.tensor([factor], dtype=dtype))
        theta = centre.parameters(torch.randn(MODEL.size, dtype=dtype))

        def total(mask, centre=centre, theta=theta, x=x, y=y):
            return MODEL.clipped_sum(theta, centred_records(Shard(x, y, mask), centre), CLIP)

        whole = total(mask)
        assert torch.isfinite(whole).all()
        for k in (0, 1, 2):
            without = mask.clone()
            without[k] = 0
            assert float((total(without) - whole).norm()) <= CLIP


def test_a_clip_by_the_old_lengths_is_found_out(monkeypatch):
    """The mutant clips centred gradients as if the records had the norms that they had before."""
    (fine,) = sensitivity(about_centre(), MODEL, Adjacency.ADD_REMOVE, trials=8)
    assert not fine.problems
    assert fine.worst >= 0.99 * CLIP
    monkeypatch.setattr(
        oracle,
        "centred_records",
        lambda shard, centre: centred_records(shard, centre)._replace(length=row_norms(shard.x)),
    )
    (found,) = sensitivity(about_centre(), MODEL, Adjacency.ADD_REMOVE, trials=8)
    assert found.beyond


def test_the_gram_matrix_with_another_constant_moves_by_its_clip():
    method = build("auto")
    (query,) = method.stages[0].queries
    assert query.clip == pytest.approx(149.0)
    x = torch.tensor([[10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    model, zero, mask = Linear(2, 2), torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.float64)
    for first in (0, 1):
        only = mask.clone()
        only[first] = 0
        total = model.gram_sum(Shard(x, zero, only), query.clip, 7.0)
        assert float(total.norm()) == pytest.approx(149.0, rel=1e-4)
        assert float(total.norm()) <= 149.0
        assert float(model.gram_sum(Shard(x, zero, only), 50.0, 7.0).norm()) <= 50.0
