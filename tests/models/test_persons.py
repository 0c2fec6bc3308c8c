"""Sums over persons: one clipped gradient per person, whatever the model, the padding and the layout."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

from sordino import Linear
from sordino.core import SAFETY, Shard
from sordino.data.records import Records
from sordino.models.linear import Loss
from sordino.models.torch_model import TorchModel

RNG = np.random.default_rng(0)
MODELS = {
    "softmax": Linear(3, 3),
    "many classes": Linear(3, 12),
    "logistic": Linear(3, 1, Loss.LOGISTIC, bias=False),
    "squares": Linear(3, 1, Loss.SQUARES),
    "bounded": Linear(3, 3, radius=1.0, residual=0.5),
}
CLIP = 0.8


def records(model, persons=9, most=3, dtype=torch.float64):
    """Persons with one to four records, in a mixed order."""
    counts = 1 + np.arange(persons) % 4
    person = RNG.permutation(np.repeat(np.arange(persons), counts))
    x = RNG.normal(size=(len(person), 3)) * 10 ** RNG.uniform(-1, 1, size=(len(person), 1))
    y = RNG.integers(2 if model.outputs == 1 else model.outputs, size=len(person))
    return x, y, person, Records.of(x, y, np.zeros(len(person), int), person=person, per_person=most, dtype=dtype)


def by_hand(model, theta, x, y, person, most, scale=None):
    """The clipped gradients, person by person, from the model's own loss."""
    terms = []
    for who in np.unique(person):
        rows = np.flatnonzero(person == who)[:most]
        each = [grad(model.loss)(theta, torch.from_numpy(x[k]), torch.tensor(y[k])) for k in rows]
        g = torch.stack(each).sum(0) * (1.0 if scale is None else scale)
        terms.append(g * min(1.0, CLIP * (1 - SAFETY) / float(g.norm())))
    return torch.stack(terms)


@pytest.mark.parametrize("name", ["softmax", "many classes", "logistic", "squares"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_sum_has_one_clipped_gradient_per_person(name, scaled):
    model = MODELS[name]
    x, y, person, held = records(model)
    theta = torch.from_numpy(RNG.normal(size=model.size))
    scale = torch.from_numpy(RNG.uniform(0.1, 3, size=model.size)) if scaled else None
    want = by_hand(model, theta, x, y, person, 3, scale)
    torch.testing.assert_close(model.clipped_sum(theta, held.shard(0), CLIP, scale), want.sum(0))


def test_records_that_cancel_within_a_person_are_not_clipped():
    """Two opposite gradients of length 100 add up to zero, so that nothing of either is cut."""
    model = Linear(1, 1, Loss.SQUARES, bias=False)
    x, y = torch.tensor([[1.0], [1.0]]).double(), torch.tensor([100.0, -100.0]).double()
    total = model.clipped_sum(torch.zeros(1).double(), Shard(x, y, torch.ones(2).double(), None, 2), 1.0)
    assert float(total) == 0.0


def test_counts_are_of_persons():
    model = MODELS["softmax"]
    x, y, person, held = records(model)
    theta, scale = torch.from_numpy(RNG.normal(size=model.size)), torch.full((model.size,), 0.5, dtype=torch.float64)
    norms = []
    for who in np.unique(person):
        rows = np.flatnonzero(person == who)[:3]
        each = [grad(model.loss)(theta, torch.from_numpy(x[k]), torch.tensor(y[k])) for k in rows]
        norms.append(float(torch.stack(each).sum(0).norm()) / 2)
    want = sum(0.5 if norm <= 1 else -0.5 for norm in norms)
    assert float(model.count_sum(theta, held.shard(0), scale)) == want


def test_matrices_are_bounded_per_person():
    model = MODELS["softmax"]
    x, y, person, held = records(model)
    theta = torch.from_numpy(RNG.normal(size=model.size))
    u = np.concatenate([x, np.ones((len(x), 1))], 1)
    used = np.concatenate([np.flatnonzero(person == who)[:3] for who in np.unique(person)])
    torch.testing.assert_close(model.gram_sum(held.shard(0), 1e9), torch.from_numpy(u[used].T @ u[used]))
    for kind in ("gram", "curvature", "fisher"):
        sums = getattr(model, f"{kind}_sum")
        arguments = () if kind == "gram" else (theta,)
        for who in range(9):
            alone = Records.of(
                x[person == who], y[person == who], np.zeros((person == who).sum(), int),
                person=person[person == who], per_person=3, dtype=torch.float64,
            ).shard(0)  # fmt: skip
            size = float(sums(*arguments, alone, 0.1).norm())
            assert size <= 0.1, (kind, who)
            assert size >= 0.1 / math.sqrt(3) * 0.99 or float(sums(*arguments, alone, 1e9).norm()) < 0.1, (kind, who)


def test_what_stands_in_padding_does_not_matter():
    for model in (MODELS["softmax"], network()):
        _, _, _, held = records(model, dtype=torch.float32)
        shard, theta = held.shard(0), model.init() + 0.1
        want = model.clipped_sum(theta, shard, CLIP)
        empty = shard.mask == 0
        assert empty.any()
        spoilt = shard._replace(x=shard.x.masked_fill(empty.unsqueeze(-1), 7.0), length=None)
        torch.testing.assert_close(model.clipped_sum(theta, spoilt, CLIP), want)


def test_one_person_moves_a_sum_by_at_most_the_clip_in_float32():
    """Persons with many equal records, some of them not finite, and a tiny clip that makes rounding visible."""
    model = MODELS["softmax"]
    for clip in (1.0, 1e-9):
        x = torch.from_numpy(RNG.normal(size=(4000, 3))).float() * 1e3
        x[8] = math.nan
        y, mask = torch.from_numpy(RNG.integers(3, size=4000)), torch.ones(4000)
        theta = torch.from_numpy(RNG.normal(size=model.size)).float()
        whole = model.clipped_sum(theta, Shard(x, y, mask, None, 8), clip)
        for who in (0, 1, 499):
            rows = slice(8 * who, 8 * who + 8)
            less_x, less = x.clone(), mask.clone()
            less_x[rows], less[rows] = 0, 0
            moved = float((whole - model.clipped_sum(theta, Shard(less_x, y, less, None, 8), clip)).norm())
            assert moved <= clip, (clip, who)


def network():
    torch.manual_seed(0)
    return TorchModel(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)))


@pytest.mark.parametrize("mode", ["tape", "vmap", "two-pass"])
def test_a_network_clips_one_term_per_person(mode):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    model = TorchModel(module, mode=mode)
    x, y, person, held = records(model)
    theta = model.init().double()
    have = model.clipped_sum(theta, held.shard(0), CLIP)
    torch.testing.assert_close(have, by_hand(model, theta, x, y, person, 3).sum(0), rtol=1e-6, atol=1e-9)
    few = TorchModel(module, mode=mode, chunk=2)  # a chunk never divides a person
    torch.testing.assert_close(
        few.clipped_sum(theta, held.shard(0), CLIP), model.clipped_sum(theta, held.shard(0), CLIP)
    )


def test_a_network_has_no_fisher_sum_of_persons():
    from sordino.errors import SordinoError

    model = network()
    with pytest.raises(SordinoError, match="not proved per person"):
        model.fisher_sum(model.init(), records(model, dtype=torch.float32)[3].shard(0), 1.0)
