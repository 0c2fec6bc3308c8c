"""Weights of single records: factors of at most 1 on clipped terms, the same in both engines."""

import dataclasses

import numpy as np
import pytest
import torch

from sordino.core import Privacy
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan

MODELS = [Linear(3, 3), Linear(3, 1, Loss.LOGISTIC), Linear(3, 1, Loss.SQUARES, bias=False), Linear(3, 1, Loss.POISSON)]
CLIP = 0.1


def table(n=40, seed=0):
    rng = np.random.default_rng(seed)
    return 3 * rng.normal(size=(n, 3)), rng.integers(2, size=n), np.arange(n) % 4, rng.random(n)


def sums(model, theta, shard):
    parts = [model.clipped_sum(theta, shard, CLIP), model.gram_sum(shard, CLIP).flatten()]
    parts += [model.curvature_sum(theta, shard, CLIP).flatten(), model.fisher_sum(theta, shard, CLIP).flatten()]
    if model.kind is Loss.SOFTMAX:
        parts.append(model.calibration_sum(theta, shard, CLIP))
    return parts


def moved(model, weight):
    """How far each record moves each sum."""
    x, y, _, _ = table(12)
    theta = torch.linspace(-1, 1, model.size).double()
    whole = Records.of(x, y, np.zeros(12, int), dtype=torch.float64)
    whole = dataclasses.replace(whole, weight=torch.as_tensor(weight, dtype=torch.float64))
    total = sums(model, theta, whole.shard(0))
    for k in range(12):
        less = dataclasses.replace(whole, weight=whole.weight.clone().index_fill(0, torch.tensor([k]), 0.0))
        yield [float((a - b).norm()) for a, b in zip(total, sums(model, theta, less.shard(0)), strict=True)]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: str(m.kind))
def test_a_weighted_record_stays_within_its_clip(model, monkeypatch):
    weight = table(12)[3]
    for k, norms in enumerate(moved(model, weight)):
        assert max(norms) <= CLIP * weight[k] * (1 + 1e-9)
    with pytest.raises(SordinoError, match=r"a weight is not in \[0, 1\]"):
        list(moved(model, 2 * weight))
    # The mutant: a weight above 1 carries a record out of its clip.
    monkeypatch.setattr("sordino.data.records._check_weights", lambda weight: None)
    assert max(max(norms) for norms in moved(model, 2 * weight)) > 1.2 * CLIP


@pytest.mark.parametrize("method", ["dp-fedgd", "dp-fedsofim", "auto", "dp-fedavg", "fednewton"])
@pytest.mark.parametrize("batch", ["full", "poisson:4"])
def test_both_engines_weigh_alike(method, batch):
    x, y, client, weight = table()
    if method == "fednewton" and batch != "full":
        pytest.skip("its bound is proved for all records")
    records = Records.of(x, y, client, weight=weight, dtype=torch.float64)
    model, privacy = Linear(3, 2), Privacy(8.0, 1e-5)
    plan = Plan(build(method), 8, records.sizes, privacy, sampling=Sampling.parse(batch))
    *_, slow = reference.run(plan, model, records, Seeded(1))
    *_, fast = simulate.run(plan, model, records, Seeded(1), shares=True)
    assert torch.allclose(slow.model, fast.model, rtol=1e-6, atol=1e-9)
    *_, plain = reference.run(plan, model, Records.of(x, y, client, dtype=torch.float64), Seeded(1))
    assert not torch.allclose(slow.model, plain.model, rtol=1e-4), "the weights matter"


def test_records_of_weight_1_are_as_without_weights():
    x, y, client, _ = table()
    plain, ones = Records.of(x, y, client), Records.of(x, y, client, weight=np.ones(40))
    for i in range(4):
        assert all(torch.equal(a, b) for a, b in zip(plain.shard(i)[:4], ones.shard(i)[:4], strict=True))


def test_weights_out_of_their_range_are_refused():
    x, y, client, weight = table()
    for wrong, message in ((2 * np.ones(40), "is not in"), (np.ones(3), "of shape"), (weight - 1, "is not in")):
        with pytest.raises(SordinoError, match=f"^weight: .*{message}"):
            Records.of(x, y, client, weight=wrong)
    with pytest.raises(SordinoError, match=r"^weight: nothing is proved"):
        Records.of(x, y, client, weight=weight, person=np.arange(40), per_person=1)
