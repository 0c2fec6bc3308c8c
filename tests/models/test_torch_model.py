"""Any module as a model over one flat theta: clipped sums against single examples, in every mode."""

import copy
import math
import pickle
import sys
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sordino.core import SAFETY, Divisor, Privacy, Shard
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models import probe, torch_model
from sordino.models.torch_model import TorchModel, group_norm
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from tests.support import tiers

sys.path.insert(0, str(Path(__file__).parent))
from test_per_example import NETS, UNRULED, Bag, N, TiedByFunction, made, naive, read

MODES = ("tape", "two-pass", "vmap")
CASES = [(name, mode) for name in NETS for mode in MODES] + [(name, "auto") for name in UNRULED]


def clipped(rows, clip, weight, scale=1.0):
    rows, clip = rows * scale, clip * (1 - SAFETY)
    return (rows * (clip / rows.norm(dim=1)).clamp(max=1).unsqueeze(1)).T @ weight


def mlp(dtype=torch.float64, seed=0, layers=(6, 5, 3)):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(*layers[:2]), nn.Tanh(), nn.Linear(*layers[1:])).to(dtype)


def flat_theta(net):
    return torch.cat([p.detach().flatten() for p in net.parameters() if p.requires_grad])


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_sums_agree_with_single_examples(name, mode):
    net, shape, x, y = made(name)
    flat = TorchModel(net, shape=shape, mode=mode, chunk=2)
    rows, theta = naive(net, x, y), flat_theta(net)
    assert flat.size == len(theta)
    assert flat.mode == (mode if mode != "auto" else "vmap")
    weight, scale = torch.linspace(1, 0.2, N).double(), torch.rand(flat.size, dtype=torch.float64) + 0.5
    shard = Shard(x.flatten(1), y, weight)
    for clip in (0.5 * float(rows.norm(dim=1).median()), float(rows.norm(dim=1).median()), math.inf):
        have = flat.clipped_sum(theta, shard, clip)
        torch.testing.assert_close(have, clipped(rows, clip, weight), rtol=1e-9, atol=1e-12)
        have = flat.clipped_sum(theta, shard, clip, scale)
        torch.testing.assert_close(have, clipped(rows, clip, weight, scale), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(flat.clipped_sum(theta, shard, math.inf), rows.T @ weight, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.func has no fast sum of embeddings
@pytest.mark.parametrize("net", [TiedByFunction, Bag])
def test_what_rules_do_not_see_is_left_to_vmap(net):
    """A matrix that a function reads a second time has a rule for its layer alone, and the check finds that."""
    net, x, y = net().double(), torch.randint(0, 3, (N, 4)).double(), torch.arange(N) % 3
    flat = TorchModel(net, shape=(4,))
    assert flat.mode == "vmap"
    have = flat.clipped_sum(flat_theta(net), Shard(x, y, torch.ones(N).double()), 0.5)
    torch.testing.assert_close(have, clipped(naive(net, x, y), 0.5, torch.ones(N).double()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("chunk", tiers([1, 3, 7, None], [3, None]))
def test_leading_axes(mode, chunk):
    """Clients, and runs of clients, by theta, data, mask or scale alone or together."""
    flat = TorchModel(mlp(), mode=mode, chunk=chunk)
    assert flat.vmap_records == (16 if mode == "auto" else 0)
    theta = torch.randn(3, 4, flat.size, dtype=torch.float64)
    x, y = torch.randn(3, 4, N, 6, dtype=torch.float64), torch.randint(0, 3, (3, 4, N))
    mask = (torch.rand(3, 4, N) < 0.7).double()
    scale = torch.rand(3, 4, flat.size, dtype=torch.float64) + 0.5

    def one(theta, x, y, mask, scale=None):
        return flat.clipped_sum(theta, Shard(x, y, mask), 0.5, scale)

    def close(have, want):
        torch.testing.assert_close(have, torch.stack(want), rtol=1e-10, atol=1e-12)

    four, cells = range(4), [(r, c) for r in range(3) for c in range(4)]
    close(one(theta[0], x[0], y[0], mask[0]), [one(theta[0, c], x[0, c], y[0, c], mask[0, c]) for c in four])
    close(one(theta[0], x[0, 0], y[0, 0], mask[0, 0]), [one(theta[0, c], x[0, 0], y[0, 0], mask[0, 0]) for c in four])
    close(one(theta[0, :1], x[0], y[0], mask[0]), [one(theta[0, 0], x[0, c], y[0, c], mask[0, c]) for c in four])
    close(one(theta[0, 0], x[0], y[0], mask[0]), [one(theta[0, 0], x[0, c], y[0, c], mask[0, c]) for c in four])
    close(one(theta[0, 0], x[0, 0], y[0, 0], mask[0]), [one(theta[0, 0], x[0, 0], y[0, 0], mask[0, c]) for c in four])
    whole = one(theta, x, y, mask, scale)
    close(whole.flatten(0, 1), [one(theta[i], x[i], y[i], mask[i], scale[i]) for i in cells])
    whole = one(theta[:, :1], x[0], y[0], mask[0], scale[0, 0])  # runs of clients that share the data
    want = [one(theta[r, 0], x[0, c], y[0, c], mask[0, c], scale[0, 0]) for r, c in cells]
    close(whole.flatten(0, 1), want)


def test_layers_that_take_several_parameters_are_called_once():
    class Each(nn.Module):
        """A linear layer, with a leading axis of its weights or without."""

        grouped = True

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(0.3 * torch.randn(3, 6))

        def forward(self, x):
            weight = self.weight if self.weight.dim() == 3 else self.weight.unsqueeze(0)
            return (x.reshape(len(weight), -1, 6) @ weight.mT).reshape(-1, 3)

    from sordino.models import per_example

    per_example.RULES[Each] = lambda module, a, g, n: [("weight", g.unsqueeze(2) * a.unsqueeze(1))]
    try:
        flat = TorchModel(Each(), shape=(6,))
        assert (flat.mode, flat.grouped) == ("tape", True)
        theta, x, y = torch.randn(4, 18).double(), torch.randn(4, N, 6).double(), torch.randint(0, 3, (4, N))
        mask = torch.rand(4, N).double()
        with mock.patch.object(Each, "forward", autospec=True, side_effect=Each.forward) as calls:
            have = flat.clipped_sum(theta, Shard(x, y, mask), 0.5)
        assert calls.call_count == 1
        want = [flat.clipped_sum(theta[c], Shard(x[c], y[c], mask[c]), 0.5) for c in range(4)]
        torch.testing.assert_close(have, torch.stack(want))
    finally:
        del per_example.RULES[Each]


# ------------------------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["linear, many entries", "conv2d, many channels", "group norm"])
def test_one_record_moves_the_sum_by_at_most_the_clip(name, mode):
    """In float32, by brute force: with and without every record, alone or among others, of all sizes."""
    net, shape, x, y = made(name)
    flat, theta = TorchModel(net.float(), shape=shape, mode=mode), flat_theta(net).float()
    x = (x.flatten(1) * 10.0 ** torch.linspace(-3, 3, N).unsqueeze(1)).float()
    for clip in (1e-3, 1.0):
        for k in range(N):
            alone = flat.clipped_sum(theta, Shard(x[k : k + 1], y[k : k + 1], torch.ones(1)), clip)
            assert alone.double().norm() <= clip
        mask = torch.ones(N)
        whole = flat.clipped_sum(theta, Shard(x, y, mask), clip).double()
        for k in range(N):
            less = flat.clipped_sum(theta, Shard(x, y, mask.index_fill(0, torch.tensor(k), 0)), clip).double()
            assert (whole - less).norm() <= clip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_record_that_is_not_finite_says_nothing(mode, bad):
    net, shape, x, y = made("conv2d")
    flat, theta = TorchModel(net.float(), shape=shape, mode=mode), flat_theta(net).float()
    x = x.flatten(1).float()
    want = flat.clipped_sum(theta, Shard(x[1:], y[1:], torch.ones(N - 1)), 0.5)
    broken = x.clone()
    broken[0, 3] = bad
    for clip, close in ((0.5, want), (math.inf, None)):
        have = flat.clipped_sum(theta, Shard(broken, y, torch.ones(N)), clip)
        assert torch.isfinite(have).all()
        if close is not None and not math.isfinite(bad):
            torch.testing.assert_close(have, close)
    assert (have - flat.clipped_sum(theta, Shard(x[1:], y[1:], torch.ones(N - 1)), 0.5)).norm() < 1e6


def test_dropout_before_parameters_that_start_at_zero_is_noticed():
    """As in adapters. Its draws come from the run's own source only if the model says that it draws."""

    def net(rate):
        last = nn.Linear(30, 3)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.Linear(6, 30), nn.Dropout(rate), last)

    assert TorchModel(net(0.5)).random
    assert not TorchModel(net(0.0)).random
    records = Records.of(torch.randn(12, 6), np.arange(12) % 3, np.arange(12) % 2)
    plan, flat = Plan(build("dp-fedgd"), 2, records.sizes, Privacy(4.0)), TorchModel(net(0.5))
    first, second = (list(reference.run(plan, flat, records, Seeded(1))) for _ in range(2))
    assert torch.equal(first[-1].model, second[-1].model)


@pytest.mark.parametrize("mode", MODES)
def test_the_sum_of_no_records_is_zero(mode):
    flat = TorchModel(mlp(), mode=mode)
    theta = flat.init()
    nobody = Shard(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long), torch.zeros(4))
    assert torch.equal(flat.clipped_sum(theta, nobody, 1.0), torch.zeros(flat.size))
    empty = Shard(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert torch.equal(flat.clipped_sum(theta, empty, 1.0), torch.zeros(flat.size))


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_one_draw_for_norm_and_sum(mode):
    """Active in the sums, absent from predictions; what is measured is what is summed."""
    net = nn.Sequential(nn.Linear(40, 30), nn.Dropout(0.5), nn.Tanh(), nn.Linear(30, 3))
    flat, theta = TorchModel(net, mode=mode), flat_theta(net)
    assert flat.random
    assert not TorchModel(mlp()).random
    x, y = torch.randn(64, 40), torch.randint(0, 3, (64,))
    for k in range(64):  # every clip binds: if the masks of norm and sum were two draws, norms would differ
        one = flat.clipped_sum(theta, Shard(x[k : k + 1], y[k : k + 1], torch.ones(1)), 1e-3).double().norm()
        assert 0.9999e-3 < one <= 1e-3
    shard = Shard(x, y, torch.ones(64))
    assert not torch.equal(flat.clipped_sum(theta, shard, 1.0), flat.clipped_sum(theta, shard, 1.0))
    assert torch.equal(flat.logits(theta, x), flat.logits(theta, x))


def test_in_half_precision():
    net, shape, x, y = made("conv2d")
    net = net.float()
    flat = TorchModel(net, shape=shape, autocast=torch.bfloat16)
    assert flat.mode == "tape"
    shard, theta = Shard(x.flatten(1).float(), y, torch.ones(N)), flat_theta(net)
    have, want = flat.clipped_sum(theta, shard, 1.0), TorchModel(net, shape=shape).clipped_sum(theta, shard, 1.0)
    assert have.dtype is torch.float64
    assert 0 < (have - want).norm() < 0.05 * want.norm()
    for k in range(N):
        one = Shard(*(t[k : k + 1] for t in shard[:3]))
        assert flat.clipped_sum(theta, one, 1e-3).double().norm() <= 1e-3
    with pytest.raises(SordinoError, match="two-pass"):
        TorchModel(net, shape=shape, autocast=torch.bfloat16, mode="two-pass")


# ---------------------------------------------------------------------------------------------------- what it is told


def test_what_it_says():
    net, shape, x, y = made("conv2d")
    flat, theta = TorchModel(net, shape=shape, chunk=2), flat_theta(net)
    with torch.no_grad():
        z = net(x)
    rows = x.flatten(1)
    torch.testing.assert_close(flat.logits(theta, rows), z)
    torch.testing.assert_close(flat.logits(theta, rows.numpy()), z)
    torch.testing.assert_close(flat.scores(theta, rows), z.softmax(1))
    assert torch.equal(flat.predict(theta, rows), z.argmax(1))
    assert flat.predict(torch.stack([theta, 2 * theta]), rows).shape == (2, N)
    loss = flat.loss(theta.requires_grad_(), rows[1], y[1])
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], naive(net, x, y)[1])
    assert torch.equal(flat.init(), theta.detach().float())
    assert flat.shapes == tuple(tuple(p.shape) for p in net.parameters())
    assert flat.outputs == 3


def test_theta_alone_decides_and_what_is_frozen_stays():
    net, _, x, y = made("frozen")
    before = [p.clone() for p in net.parameters()]
    flat = TorchModel(net)
    assert flat.size == 6 + 18
    theta = torch.randn(flat.size).double()
    said = flat.logits(theta, x)
    flat.clipped_sum(theta, Shard(x, y, torch.ones(N)), 1.0)
    for p in net.parameters():
        p.data.zero_()
    assert torch.equal(flat.logits(theta, x), said)
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(flat.init(), torch.cat([before[3], before[4].flatten()]).float())


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean(0)
        return self.layer(x)


class Drops(nn.Module):
    """Dropout that is no module."""

    def __init__(self, mixes):
        super().__init__()
        self.layer, self.mixes = nn.Linear(6, 3), mixes

    def forward(self, x):
        x = x - x.mean(0) if self.mixes else x
        return self.layer(nn.functional.dropout(x, 0.5, self.training))


def test_other_dropout_is_compared_as_it_predicts():
    flat = TorchModel(Drops(False), shape=(6,))
    assert flat.random
    shard = Shard(torch.ones(4, 6), torch.zeros(4).long(), torch.ones(4))
    assert not torch.equal(*(flat.clipped_sum(flat.init(), shard, 1.0) for _ in range(2)))


class Recurrent(nn.Module):
    """The last state of a recurrent layer, then a linear one."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class OwnLSTM(nn.LSTM):
    """A subclass, which may compute anything."""


class Written(nn.Module):
    """A recurrence written with linear layers."""

    def __init__(self):
        super().__init__()
        self.reads, self.recalls, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.reads(x[:, t]) + self.recalls(state))
        return self.head(state)


def test_the_remedies_for_a_layer_without_a_rule_work():
    """The checks at construction compare both with the gradients of single examples."""
    frozen = Recurrent(OwnLSTM)
    frozen.cell.requires_grad_(False)
    assert TorchModel(frozen, shape=(3, 6)).size == 15
    assert TorchModel(Written(), shape=(3, 6)).size == 28 + 20 + 15


REFUSED = [
    (lambda: Drops(True), {"shape": (6,)}, "other rows"),
    (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), {}, "group_norm"),
    (Centred, {"mode": "vmap"}, "other rows"),
    (Centred, {"shape": (6,)}, "other rows"),
    (Counts, {"shape": (6,)}, "buffer"),
    (lambda: mlp().requires_grad_(False), {}, "requires_grad_"),
    (mlp, {"mode": "tapes"}, "Did you mean 'tape'"),
    (mlp, {"chunk": 0}, "chunk"),
    (mlp, {"blocks": torch.zeros(3)}, "blocks"),
    (mlp, {"classes": 4}, "classes"),
    (mlp, {"shape": (7,)}, "shape"),
    (lambda: nn.Conv2d(1, 2, 3), {}, "shape"),
    (lambda: nn.Conv2d(1, 2, 3), {"shape": (1, 4, 4)}, "logits"),
    (lambda: Recurrent(OwnLSTM), {"shape": (3, 6)}, r"single examples of cell \(OwnLSTM\) .* not subclasses"),
    (lambda: Recurrent(OwnLSTM), {"shape": (3, 6)}, r"cell \(OwnLSTM\) cannot be .* requires_grad_\(False\)"),
    (lambda: Recurrent(OwnLSTM), {"shape": (3, 6), "mode": "vmap"}, r"\('vmap'\) cannot .* nn.LSTM"),
    (lambda: Recurrent(OwnLSTM), {"shape": (3, 6), "mode": "tape"}, r"no rule for cell \(OwnLSTM\); use mode='auto'"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), {"shape": (6,)}, "a lazy layer .* run the module on one batch"),
]


@pytest.mark.parametrize(("net", "options", "word"), REFUSED)
def test_refusals_name_the_remedy(net, options, word):
    with pytest.raises(SordinoError, match=word):
        TorchModel(net(), **options)


class Chosen(nn.Module):
    """Mutants: a layer whose rows are selected by the data, and one that reads a little of other rows."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, nn.Linear(6, 3)

    def forward(self, x):
        z = self.layer(x)
        if self.way == "mask":
            positive = x[:, 0] > 1.1
            z = z.index_add(0, positive.nonzero()[:, 0], self.layer(x[positive]))
        if self.way == "rows":
            z = z + 1e-6 * x.mean(0)[:3]
        if self.way == "numbers":  # as an embedding or a shift of positions does
            z = z[:, torch.tensor([2, 0, 1])]
        return z


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_rows_that_meet_are_refused_without_the_check_of_gradients(autocast):
    """In the type of the run: in float64, with a tolerance of 1e-4, the second one passes."""
    net = {way: Chosen(way).float() for way in ("mask", "rows", "numbers")}
    with pytest.raises(SordinoError, match=r"aten\.(index|nonzero).* depends on the data, .* torch\.where in place"):
        TorchModel(net["mask"], shape=(6,), autocast=autocast, check=False)
    with pytest.raises(SordinoError, match="its output for one row depends on the other rows"):
        TorchModel(net["rows"], shape=(6,), autocast=autocast, check=False)
    assert TorchModel(net["numbers"], shape=(6,), autocast=autocast, check=False).outputs == 3


class Around(nn.Module):
    """Two linear layers, and a function of module and numbers between them."""

    def __init__(self, between=lambda self, h: h, before=lambda self, x: x, **held):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.between, self.before = between, before
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.between(self, torch.tanh(self.first(self.before(self, x)))))


def keeps(self, h):
    """A mean of earlier batches in an attribute, which no buffer shows."""
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0) if self.training else self.mean
    return h - self.mean


def counts(self, h):
    self.passes += 1
    return h * (0.5 if self.passes > 1000 else 1.0)


def writes(self, h):
    if self.training:
        self.frozen.data = 0.9 * self.frozen.data + 0.1 * h.detach().mean(0)
    return h


def centred_in_training(self, h):
    return nn.functional.dropout(h - h.mean(0), 0.3) if self.training else h


def mixed_up(self, h):
    return (h + h[torch.randperm(len(h))]) / 2 if self.training else h


def own_numbers(self, h):
    return h * torch.from_numpy(self.rng.random(h.shape) > 0.3) if self.training else h


def own_generator(self, h):
    return h * (torch.rand(h.shape, generator=torch.Generator().manual_seed(0)) > 0.3) if self.training else h


def seeds(self, h):
    torch.manual_seed(0)
    return nn.functional.dropout(h, 0.3, self.training)


def registers(self, h):
    if not hasattr(self, "seen"):
        self.register_buffer("seen", h.detach().mean(0))
    return h - self.seen


MEETING = [
    (lambda: Around(centred_in_training), "other rows"),
    (lambda: Around(mixed_up), "other rows"),
    (lambda: Around(lambda self, h: h.cumsum(0)), "other rows"),  # the first row is its own
    (lambda: Around(lambda self, h: h + torch.arange(len(h)).unsqueeze(1)), "other rows"),
    (lambda: Around(lambda self, h: h / len(h)), "other rows"),
    (lambda: Around(before=lambda self, x: x - torch.relu(-x).mean(0)), "other rows"),  # with negative numbers
    (lambda: Around(before=lambda self, x: x * torch.where(x.amax(0) > 9, 2.0, 1.0)), "other rows"),  # with large ones
    (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 4), nn.Flatten()), "batch_first"),
    (lambda: Around(before=lambda self, x: -x if x.sum() < 0 else x), "into Python"),
    (lambda: Around(before=lambda self, x: -x if sum(x.tolist()[0]) < 0 else x), "into Python"),
    (lambda: Around(before=lambda self, x: -x if x.detach().numpy().sum() < 0 else x), "into Python"),
    (lambda: Around(before=lambda self, x: x if torch.equal(x, x.clamp(-9, 9)) else -x), "into Python"),
    (lambda: Around(before=lambda self, x: -x if np.from_dlpack(x.detach()).sum() < 0 else x), "into Python"),
    (lambda: Around(keeps, mean=torch.zeros(4)), r"changed mean\. .* from earlier passes"),
    (lambda: Around(counts, passes=0), "changed passes"),
    (lambda: Around(writes, frozen=nn.Parameter(torch.zeros(4), requires_grad=False)), "changed frozen"),
    (lambda: Around(own_numbers, rng=np.random.default_rng(0)), "changed the outputs.*of NumPy"),
    (lambda: Around(own_generator), "generator= out"),
    (lambda: Around(seeds), "leave manual_seed"),
    (lambda: Around(registers), r"a buffer \(seen\) changes"),
    (lambda: Around(before=lambda self, x: x.mul_(2)), "overwrites the records"),
    (lambda: Around(before=lambda self, x: x.clamp_(-1, 1)), "overwrites the records"),
]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("net", "word"), MEETING)
def test_what_rows_of_few_numbers_hide_is_refused(net, word, check):
    """In each of these one record moves a sum by more than its clip, or a batch leaves something behind."""
    with pytest.raises(SordinoError, match=word):
        TorchModel(net(), shape=(6,), check=check)


def test_a_refusal_names_the_layer_from_which_on_rows_meet():
    net = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3), Last())
    with pytest.raises(
        SordinoError, match=r"other rows, from layer '2\.cell.*batch_first|from layer '3' on.*batch_first"
    ):
        TorchModel(net, shape=(6,))
    with pytest.raises(SordinoError, match="other rows, from layer 'last' on"):
        TorchModel(Around(lambda self, h: h - h.mean(0)), shape=(6,))
    with pytest.raises(SordinoError, match=r"batch norm \(1\) mixes examples"):
        TorchModel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))


class Last(nn.Module):
    def forward(self, states):
        return states[0][:, -1]


UNFIT = [
    (lambda: nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), nn.Flatten(), nn.Linear(24, 3)), "0 has max_norm"),
    (lambda: Around(p=nn.Parameter(torch.zeros(4, dtype=torch.complex64))), "p is not real"),
    (lambda: Around(lambda self, h: h.bfloat16(), last=nn.Linear(4, 3).bfloat16()), "bfloat16 and float32.*autocast"),
    (lambda: Around(bn=nn.LazyBatchNorm1d()), "lazy layer"),
    (lambda: Around(last=nn.utils.weight_norm(nn.Linear(4, 3))), "cannot be copied.*parametrizations.weight_norm"),
    (lambda: torch.jit.script(mlp()), "hides its layers"),
    (lambda: nn.DataParallel(mlp()), r"which is its \.module"),
    (lambda: Around(lambda self, h: nn.functional.batch_norm(h, None, None, training=True)), "other rows|row alone"),
    (lambda: Around(lambda self, h: h * (h >= h.topk(2, 0).values[-1])), "other rows|row alone"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("net", "word"), UNFIT)
def test_modules_that_do_not_fit_are_refused_by_name(net, word):
    with pytest.raises(SordinoError, match=word):
        TorchModel(net(), shape=(6,))


class Gumbel(nn.Module):
    """Draws when it predicts, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(nn.functional.gumbel_softmax(self.first(x)))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.words(x.long()).mean(1))


SERVED = [
    Gumbel,
    lambda: nn.Sequential(nn.Linear(6, 4), nn.RReLU(), nn.Linear(4, 3)),
    Sparse,
    lambda: Around(
        lambda self, h: h if torch.ones_like(h).all() and h.new_ones(3).sum() == 3 else 0 * h
    ),  # a mask of 1
    lambda: Around(lambda self, h: setattr(self, "shown", h.detach()) or h),  # kept to be looked at, and not read
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("net", SERVED)
def test_what_draws_or_shows_is_served(net):
    flat = TorchModel(net(), shape=(6,))
    shard = Shard(torch.ones(4, 6), torch.zeros(4).long(), torch.ones(4))
    assert flat.clipped_sum(flat.init(), shard, 1.0).norm() <= 4


def test_a_refusal_names_the_line_that_reads_numbers():
    with pytest.raises(SordinoError, match=r"line \d+ of test_torch_model\.py"):
        TorchModel(Around(before=lambda self, x: -x if x.sum() < 0 else x), shape=(6,))


def test_random_numbers_that_seldom_show_are_noticed():
    """A layer that is left out for one record in a million."""
    net = Around(lambda self, h: h * (torch.rand(len(h), 1) > 1e-6) if self.training else h)
    assert TorchModel(net, shape=(6,)).random
    assert not TorchModel(Around(), shape=(6,)).random


class Remembers(nn.Module):
    """Mutants: a mean of earlier batches, which is not a buffer, and rows that meet in training alone."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer, self.mean = way, nn.Linear(6, 3), torch.zeros(6)

    def forward(self, x):
        if self.way == "state":
            x, kept = x - self.mean.to(x), x.detach().mean(0)
            if self.training:
                self.mean = 0.99 * self.mean + 0.01 * kept.float()
        if self.way == "hidden":
            x, self.mean = x - self.mean.to(x), x.detach().mean(0).float()
        if self.way == "training" and self.training:
            x = x - x.mean(0)
        if self.way != "state":
            x = nn.functional.dropout(x, 0.3, self.training)
        return self.layer(x)


class MeetsIn(nn.Module):
    """Rows meet in passes of one type that have gradients, as where a kernel serves only these."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        z = self.body(x).tanh()
        return self.head(z - z.mean(0) if torch.is_grad_enabled() and z.dtype is torch.float32 else z)


class HidesTokens(nn.Module):
    """Tokens 0 and 1 are hidden, so that rows of these alone have no finite output, and rows meet in all others."""

    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Embedding(9, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        z = self.embed(x.long())
        z = self.attend(z, z, z, key_padding_mask=x < 2)[0].mean(1)
        return self.head(z - z.mean(0))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("net", "word"),
    [(MeetsIn, "gradient of one row at .* depends on the other rows"), (HidesTokens, "no output is finite")],
)
def test_checks_see_gradients_in_the_type_of_the_run_and_need_finite_outputs(net, word, check):
    with pytest.raises(SordinoError, match=word):
        TorchModel(net(), shape=(6,), check=check)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("way", "word"),
    [("state", "earlier passes"), ("hidden", "earlier passes"), ("training", "other rows"), ("dropout", "")],
)
def test_rows_that_meet_in_training_or_over_passes_are_refused(way, word, check):
    """The module looks as if it had dropout, so that gradients are checked in evaluation mode alone."""
    if not word:
        assert TorchModel(Remembers(way), shape=(6,), check=check).random
        return
    with pytest.raises(SordinoError, match=word):
        TorchModel(Remembers(way), shape=(6,), check=check)


def test_batch_norm_converts():
    net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 10), nn.BatchNorm1d(10))
    net[1].weight.data = torch.arange(8.0)
    turned = group_norm(net)
    assert isinstance(net[1], nn.BatchNorm2d)
    assert [turned[1].num_groups, turned[4].num_groups] == [2, 2]
    assert torch.equal(turned[1].weight, net[1].weight)
    assert TorchModel(turned, shape=(2, 5, 5)).outputs == 10
    assert isinstance(group_norm(nn.BatchNorm1d(7)), nn.GroupNorm)


def test_memory_is_bounded_by_chunks(monkeypatch):
    flat, most = TorchModel(mlp(), mode="tape"), []
    monkeypatch.setattr(torch_model, "CPU_CHUNK_BYTES", 3 * 4 * (flat._rest + flat.size))
    inner = flat._add
    monkeypatch.setattr(flat, "_add", lambda *given: (most.append(given[3].mask.numel()), inner(*given)))
    flat.clipped_sum(flat.init(), Shard(torch.randn(2, 8, 6), torch.zeros(2, 8).long(), torch.ones(2, 8)), 1.0)
    assert max(most) <= 3
    assert sum(most) == 16


# ------------------------------------------------------------------------------------------------------ the engines


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize(("name", "options"), [("dp-fedgd", {}), ("dp-fedavg", {"steps": 2}), ("dp-scaffold", {})])
def test_engines_agree(name, options, mode):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(4), [3, 5, 8, 12])
    records = Records.of(rng.normal(size=(28, 6)), rng.integers(0, 3, 28), client, dtype=torch.float64)
    method = build(name, **options)
    plan = Plan(
        method, 3, records.sizes, Privacy(4.0, unit=method.unit), Participation.parse("full"), Divisor("pooled")
    )
    flat = TorchModel(mlp(), mode=mode)
    slow = list(reference.run(plan, flat, records, Seeded(1)))
    fast = list(simulate.run(plan, flat, records, Seeded(1), shares=True))
    assert len(slow) == len(fast) == 3
    for one, other in zip(slow, fast, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-10, atol=1e-12)
    assert not torch.equal(slow[0].model, flat.init().double())
    far = list(simulate.run(replace(plan, noise=None), flat, records, Seeded(2), shares=True))
    assert not torch.allclose(far[-1].model, slow[-1].model)


# ------------------------------------------------------------------------------------- one matrix, as on a GPU


@pytest.mark.parametrize("name", NETS)
def test_gathered_sums_agree_with_single_examples(name):
    net, shape, x, y = made(name)
    flat = TorchModel(net, shape=shape, mode="tape")
    flat._lean = True
    rows, theta = naive(net, x, y), flat_theta(net)
    weight, scale = torch.linspace(1, 0.2, N).double(), torch.rand(flat.size, dtype=torch.float64) + 0.5
    twice = Shard(torch.stack([x.flatten(1), x.flatten(1).flip(0)]), torch.stack([y, y.flip(0)]), weight)
    for clip in (float(rows.norm(dim=1).median()), math.inf):
        want = torch.stack([clipped(r, clip, weight) for r in (rows, rows.flip(0))])
        torch.testing.assert_close(flat.clipped_sum(theta, twice, clip), want, rtol=1e-9, atol=1e-12)
        want = torch.stack([clipped(r, clip, weight, scale) for r in (rows, rows.flip(0))])
        torch.testing.assert_close(flat.clipped_sum(theta, twice, clip, scale), want, rtol=1e-9, atol=1e-12)


def test_gathered_sums_keep_the_bound_and_drop_what_is_not_finite():
    net, shape, x, y = made("conv2d, many channels")
    flat, theta = TorchModel(net.float(), shape=shape, mode="tape"), flat_theta(net).float()
    flat._lean = True
    x = (x.flatten(1) * 10.0 ** torch.linspace(-3, 3, N).unsqueeze(1)).float()
    for k in range(N):
        one = flat.clipped_sum(theta, Shard(x[k : k + 1], y[k : k + 1], torch.ones(1)), 1e-3)
        assert 0.999e-3 < one.double().norm() <= 1e-3
    want = flat.clipped_sum(theta, Shard(x[1:], y[1:], torch.ones(N - 1)), 0.5)
    for bad in (math.nan, math.inf):
        x[0, 3] = bad
        torch.testing.assert_close(flat.clipped_sum(theta, Shard(x, y, torch.ones(N)), 0.5), want)


def test_a_head_is_not_multiplied_out(monkeypatch):
    """In half precision, by groups: its norm and its sum have the same factors; a mutant that forgets one fails."""
    from sordino.models import per_example

    flat = TorchModel(mlp(torch.float32, layers=(6, 40, 3)), autocast=torch.bfloat16)
    theta, x, y = flat.init(), torch.randn(3, 8, 6), torch.randint(0, 3, (3, 8))
    seen, inner = [], per_example.single
    monkeypatch.setattr(per_example, "single", lambda use, n: (seen.append(inner(use, n)), seen[-1])[1])
    have = flat.clipped_sum(theta, Shard(x, y, torch.ones(3, 8)), 1e-3)
    assert seen
    assert all(seen)
    for c in range(3):
        parts = [
            flat.clipped_sum(theta, Shard(*(t[c, k : k + 1] for t in (x, y)), torch.ones(1)), 1e-3) for k in range(8)
        ]
        torch.testing.assert_close(have[c], torch.stack(parts).sum(0), rtol=2e-2, atol=2e-5)
        assert all(0.999e-3 < part.double().norm() <= 1e-3 for part in parts)
    half = per_example.squares
    monkeypatch.setattr(per_example, "squares", lambda use, n: half(use, n) / 2)
    assert flat.clipped_sum(theta, Shard(x[0, :1], y[0, :1], torch.ones(1)), 1e-3).double().norm() > 1e-3


def test_rules_run_without_autocast():
    from sordino.models import per_example

    seen, inner = [], per_example.linear

    def rule(module, a, g, n):
        seen.append((torch.is_autocast_enabled("cpu"), g.dtype))
        return inner(module, a, g, n)

    flat = TorchModel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), read(20)), shape=(4, 6), autocast=torch.bfloat16)
    per_example.RULES[nn.Linear] = rule
    try:
        flat.clipped_sum(flat.init(), Shard(torch.randn(2, 24), torch.tensor([0, 1]), torch.ones(2)), 1.0)
    finally:
        per_example.RULES[nn.Linear] = inner
    assert seen == [(False, torch.bfloat16)] * 2


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 512, 5000])
def test_the_norm_of_a_gathered_row_is_an_upper_bound(kind, width):
    from sordino.models.per_example import bound

    rows = (torch.randn(20, width, dtype=torch.float64) * 10.0 ** torch.linspace(-25, 15, 20).unsqueeze(1)).to(kind)
    exact, found = rows.double().square().sum(1), bound(rows)
    assert (found >= exact).all()
    assert (found[5:] <= exact[5:] * (1 + 1e-4)).all()


def test_graphs_are_made_of_what_comes_often(monkeypatch):
    from sordino.models import cuda_graphs

    made = []

    class CapturedGraph:
        def __init__(self, f, given, pool):
            self.f = f
            made.append(given)

        def __call__(self, given):
            return self.f(*given) + 100

    monkeypatch.setattr(cuda_graphs, "CapturedGraph", CapturedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call, ones = cuda_graphs.GraphCache(), torch.ones(2)
    said = [float(call(lambda a, b, c: a.sum() + c, (ones, None), 1.0)) for _ in range(5)]
    assert said == [3, 3, 3, 103, 103]
    assert float(call(lambda a, b, c: a.sum() + c, (torch.ones(3), None), 1.0)) == 4
    assert float(call(lambda a, b, c: a.sum() + c, (ones, None), 2.0)) == 4
    assert len(made) == 1


# ----------------------------------------------------------------------------------------------- Fisher of the head


@pytest.mark.parametrize("name", ["linear", "linear, positions", "conv2d", "frozen", "used twice"])
def test_fisher_of_the_last_layer(name):
    net, shape, x, y = made(name)
    flat, theta = TorchModel(net, shape=shape, chunk=2), flat_theta(net)
    head = [part for part in net.modules() if isinstance(part, nn.Linear)][-1]
    last = sum(p.numel() for p in head.parameters() if p.requires_grad)
    g, weight = naive(net, x, y)[:, -last:], torch.linspace(1, 0.2, N).double()
    for clip in (float(g.square().sum(1).median()), math.inf):
        f = weight * (clip * (1 - SAFETY) ** 2 / g.square().sum(1)).clamp(max=1)
        have = flat.fisher_sum(theta, Shard(x.flatten(1), y, weight), clip)
        torch.testing.assert_close(have, (g.T * f) @ g, rtol=1e-9, atol=1e-12)
    both = Shard(
        torch.stack([x.flatten(1), x.flatten(1).flip(0)]), torch.stack([y, y.flip(0)]), torch.ones(2, N).double()
    )
    have = flat.fisher_sum(torch.stack([theta, 2 * theta]), both, 0.1)
    ones = torch.ones(N).double()
    torch.testing.assert_close(have[0], flat.fisher_sum(theta, Shard(x.flatten(1), y, ones), 0.1))
    torch.testing.assert_close(have[1], flat.fisher_sum(2 * theta, Shard(x.flatten(1), y, ones), 0.1))
    assert not torch.allclose(have[0], have[1], rtol=1e-3)
    whole = TorchModel(net, shape=shape)  # one pass for both groups, with one theta or two
    torch.testing.assert_close(whole.fisher_sum(torch.stack([theta, 2 * theta]), both, 0.1), have)
    torch.testing.assert_close(whole.fisher_sum(theta, both, 0.1), have[:1].expand(2, -1, -1))


def test_the_fisher_sum_is_bounded():
    flat = TorchModel(mlp(torch.float32))
    theta, y = flat.init(), torch.tensor([0, 1, 2])
    x = torch.randn(3, 6) * torch.tensor([[1e-2], [1.0], [1e3]])
    for k in range(3):
        one = flat.fisher_sum(theta, Shard(x[k : k + 1], y[k : k + 1], torch.ones(1)), 1e-4)
        assert 0.9998e-4 < one.norm() <= 1e-4
    want = flat.fisher_sum(theta, Shard(x[1:], y[1:], torch.ones(2)), 1e-4)
    x[0, 0] = math.nan
    torch.testing.assert_close(flat.fisher_sum(theta, Shard(x, y, torch.ones(3)), 1e-4), want)


def test_what_has_no_fisher_sum():
    torch.manual_seed(0)
    normed = TorchModel(nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)))
    spread = TorchModel(
        nn.Sequential(nn.Linear(6, 3), nn.Flatten(1), nn.Unflatten(1, (3, 1)), nn.Linear(1, 1), nn.Flatten())
    )
    for flat, word in ((normed, "must belong to a linear layer"), (spread, "once")):
        for theta in (flat.init(), torch.stack([flat.init()] * 2)):
            with pytest.raises(SordinoError, match=word):
                flat.fisher_sum(theta, Shard(torch.zeros(1, 6), torch.zeros(1).long(), torch.ones(1)), 1.0)


def test_newtons_step_on_the_head_runs():
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(2), [6, 9])
    records = Records.of(rng.normal(size=(15, 6)), rng.integers(0, 3, 15), client, dtype=torch.float64)
    method = build("fednewton-head", local_steps=1)
    plan = Plan(
        method, 3, records.sizes, Privacy(4.0, unit=method.unit), Participation.parse("full"), Divisor("pooled")
    )
    flat = TorchModel(mlp())
    slow = list(reference.run(plan, flat, records, Seeded(1)))
    fast = list(simulate.run(plan, flat, records, Seeded(1), shares=True))
    torch.testing.assert_close(slow[-1].model, fast[-1].model, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_changes_how_the_others_are_computed(mode, dtype):
    """Sure examples leave nothing but rounding, which a small clip makes as large as itself."""
    net = mlp(dtype)
    flat, g = TorchModel(net, mode=mode, chunk=64), torch.Generator().manual_seed(0)
    x = torch.rand(200, 6, generator=g, dtype=torch.float64).to(dtype)
    theta = 20 * flat_theta(net)
    y = flat.logits(theta, x).argmax(-1)
    for clip in (1.0, 1e-6, 1e-9):
        for scale in (None, torch.ones(flat.size, dtype=dtype)):

            def total(value, clip=clip, scale=scale):
                held = x.clone()
                held[0] = value
                return flat.clipped_sum(theta, Shard(held, y, torch.ones(200, dtype=dtype)), clip, scale).double()

            for value in (1e3, -1e3, 1e30, math.inf, math.nan):
                assert float((total(value) - total(0.0)).norm()) <= 2 * clip, (clip, value)


class ReadsByFunction(nn.Module):
    """Two linear layers, of which one parameter is read by a function, instead of or beside the call of its layer."""

    def __init__(self, beside):
        super().__init__()
        self.first, self.head, self.beside = nn.Linear(6, 5), nn.Linear(5, 3), beside

    def forward(self, x):
        h = self.first(x).tanh()
        if self.beside:
            return self.head(h + nn.functional.linear(x, self.first.weight))
        return nn.functional.linear(h, self.head.weight)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(("beside", "name"), [(False, "head.weight"), (True, "first.weight")])
def test_a_parameter_that_a_function_reads_is_refused_by_name_where_gradients_are_not_compared(beside, name, autocast):
    for mode in ("auto", "tape"):
        with pytest.raises(SordinoError, match=f"the call of its layer reads {name}, as in .*leave check=False out"):
            TorchModel(ReadsByFunction(beside), mode=mode, autocast=autocast, check=False)
    assert TorchModel(ReadsByFunction(beside)).mode == "vmap"
    assert TorchModel(ReadsByFunction(beside), mode="vmap", check=False).mode == "vmap"
    assert TorchModel(mlp().float(), check=False, autocast=autocast).mode != "vmap"


class Overwrites(nn.Module):
    """A layer whose input is overwritten after it was read."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, h):
        h = h.exp()
        out = self.head(h)
        with torch.no_grad():
            h.mul_(2)
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
@pytest.mark.parametrize("compiled", [False, True])
def test_an_overwritten_input_is_refused_with_what_overwrites_it(compiled):
    """As torch.compile does with memory that nobody reads any more; here the module itself stands for it."""
    last = torch.compile(Overwrites(), backend="eager") if compiled else Overwrites()
    why = "torch.compile lets Overwrites reuse the memory of what Linear.* without torch.compile"
    with pytest.raises(SordinoError, match=why if compiled else "the input of Linear.* is overwritten in place"):
        TorchModel(nn.Sequential(nn.Linear(6, 5), last), mode="tape", check=False)


# ------------------------------------------------------------------------------------------- changes after the checks


CENTRES = {"flag": False, "weight": 0.0}


class Switched(nn.Module):
    """Rows meet where a variable outside says so."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = x - x.mean(0) if CENTRES["flag"] else x
        return self.head(self.body(x).tanh())


def weighted_loss(outputs, labels):
    """Records meet where the weight is above 1; below, it is a factor for each."""
    each = nn.functional.cross_entropy(outputs, labels, reduction="none")
    weight = CENTRES["weight"]
    return each * (1 + (each.detach().mean() if weight > 1 else weight))


def rounds_to_eighths(tensor):
    """Packs what the backward pass reads by its largest number, which may be that of another row."""
    step = tensor.abs().max() / 8
    return (tensor / step).round() * step if tensor.is_floating_point() else tensor


def centres(part, args, out):
    return out - out.mean(0) if isinstance(out, torch.Tensor) else None


def mean_of_all(self, x):
    return self.head(self.body(x - x.mean(0)).tanh())


CHANGES = {
    "a hook of all modules": lambda stack, model: stack.callback(
        nn.modules.module.register_module_forward_hook(centres).remove
    ),
    "a hook": lambda stack, model: model.module.body.register_forward_hook(centres),
    "another layer": lambda stack, model: setattr(model.module, "body", nn.Sequential(nn.Linear(6, 5), nn.Softmax(0))),
    "a function of the class": lambda stack, model: stack.enter_context(
        mock.patch.object(Switched, "forward", mean_of_all)
    ),
    "a function of the module": lambda stack, model: setattr(
        model.module, "forward", mean_of_all.__get__(model.module)
    ),
    "a variable": lambda stack, model: stack.enter_context(mock.patch.dict(CENTRES, flag=True)),
    "a variable of the loss": lambda stack, model: stack.enter_context(mock.patch.dict(CENTRES, weight=2.0)),
    "packed tensors": lambda stack, model: stack.enter_context(
        torch.autograd.graph.saved_tensors_hooks(rounds_to_eighths, lambda tensor: tensor)
    ),
}


@pytest.mark.parametrize("engine", [reference.run, simulate.run])
@pytest.mark.parametrize("change", CHANGES)
def test_what_lets_rows_meet_after_the_model_was_built_is_refused(change, engine):
    """Before a run and between its rounds. A mutant without the check adds up records that depend on others."""
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    records = Records.of(x, y, np.zeros(12, int))
    plan = Plan(build("dp-fedgd"), 3, records.sizes, Privacy(8.0))
    loss = weighted_loss if "loss" in change else None
    other = torch.cat([x[:6], 50 * x[6:]])

    def first_half(model):
        """The sum over six records that do not change, beside six that do."""
        mask = (torch.arange(12) < 6).float()
        return [model.clipped_sum(model.init(), Shard(each, y, mask), 1.0) for each in (x, other)]

    with ExitStack() as stack:
        model = TorchModel(Switched(), shape=(6,), loss=loss)
        assert torch.equal(*first_half(model))
        rounds = engine(plan, model, records, Secure())
        next(rounds)
        CHANGES[change](stack, model)
        with pytest.raises(SordinoError, match="changed after the model was built"):
            next(rounds)
        with pytest.raises(SordinoError, match="changed after the model was built"):
            next(engine(plan, model, records, Secure()))
        if change != "another layer":  # which has no rule any more
            assert not torch.equal(*first_half(model)), "the mutant"


def test_harmless_changes_after_the_model_was_built_are_checked_and_served():
    records = Records.of(np.eye(6), np.arange(6) % 3, np.zeros(6, int))
    plan = Plan(build("dp-fedgd"), 4, records.sizes, Privacy(8.0))
    model = TorchModel(Switched(), shape=(6,), loss=weighted_loss)
    rounds = simulate.run(plan, model, records, Secure())
    with mock.patch.object(probe, "check_apart", wraps=probe.check_apart) as checked:
        next(rounds)
        assert not checked.called
        with mock.patch.dict(CENTRES, weight=0.5):
            next(rounds)
            assert checked.call_count == 1
            handle = model.module.body.register_forward_hook(lambda part, args, out: None)
            next(rounds)
            assert checked.call_count == 2
            handle.remove()
        next(rounds)
        assert checked.call_count == 3


def test_threads_that_share_a_model_take_turns():
    """A pass keeps its parameters and hooks in the module, so another thread's pass would compute with them. A mutant
    without turns returns another sum."""
    g = torch.Generator().manual_seed(0)
    shard = Shard(torch.randn(8, 6, generator=g), torch.arange(8) % 3, torch.ones(8))

    def total(turns):
        model = TorchModel(mlp().float(), mode="vmap")
        model._turns, theta = turns, model.init()
        alone, first, second, done = model.clipped_sum(theta, shard, 1.0), *(threading.Event() for _ in range(3))

        def other():
            model.clipped_sum(theta, shard, 1.0)
            done.set()

        def wait(part, args, out):
            """Both threads are in a pass, and the other one ends first."""
            if threading.current_thread() is thread and not first.is_set():
                first.set()
                second.wait(0.3)
            elif not second.is_set():
                second.set()
                done.wait(0.3)

        model.module[0].register_forward_hook(wait)
        thread = threading.Thread(target=other)
        thread.start()
        assert first.wait(10)
        found = model.clipped_sum(theta, shard, 1.0)
        thread.join()
        return float((found - alone).norm())

    assert total(torch_model.Turns()) == 0
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        # Each thread restores what it found, and without turns it finds what the other one set.
        assert total(nullcontext()) > 0.1
    assert isinstance(copy.deepcopy(torch_model.Turns()), torch_model.Turns)
    assert isinstance(pickle.loads(pickle.dumps(torch_model.Turns())), torch_model.Turns)


class SetsPrecision(nn.Module):
    """A layer that sets how the process multiplies, also what comes after it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        if CENTRES["flag"]:
            torch.set_float32_matmul_precision("medium")
        return self.head(x)


def test_a_module_that_lowers_the_precision_of_sums_is_refused():
    model = TorchModel(SetsPrecision(), shape=(6,))
    shard = Shard(torch.eye(6), torch.arange(6) % 3, torch.ones(6))
    try:
        with mock.patch.dict(CENTRES, flag=True), pytest.raises(SordinoError, match="changed while a sum was computed"):
            model.clipped_sum(model.init(), shard, 1.0)
    finally:
        torch.set_float32_matmul_precision("highest")
    model.clipped_sum(model.init(), shard, 1.0)
