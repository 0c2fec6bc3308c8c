"""Gradients of single examples from one backward pass against autograd, an example at a time."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import per_example
from sordino.models.nets import cnn, resnet18
from sordino.models.per_example import summed
from sordino.models.torch_model import TorchModel

N = 5


class Attention(nn.Module):
    """Of one head, from linear layers."""

    def __init__(self, width=6):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        return self.out((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))


class Tokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(3, 6, **options)

    def forward(self, x):
        return self.words(x.long())


class Windows(nn.Module):
    """Folds windows of positions into the first axis, and back."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.reshape(2 * len(x), -1, x.shape[-1])).reshape(len(x), -1)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()))


class Tied(nn.Module):
    """One matrix that embeds tokens and reads them out again."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(3, 6), nn.Linear(6, 3)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x.long()).mean(1).tanh())


class Whole(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.layer((x + self.shift).tanh())


class TiedByFunction(nn.Module):
    """An embedding whose matrix a function reads a second time."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3, 6)

    def forward(self, x):
        return nn.functional.linear(self.words(x.long()).mean(1).tanh(), self.words.weight)


class SelfAttention(nn.Module):
    """With a key and a value of its own, which all records read."""

    def __init__(self):
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True), read(24)

    def forward(self, x):
        return self.out(self.attend(x, x, x, need_weights=False)[0])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(3, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.words(x.long()))


def read(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 3))


def frozen():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for part in (net[0], net[2].weight, net[4].bias):
        part.requires_grad_(False)
    return net


NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (6,)),
    "linear, no bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "linear, positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), read(20)), (4, 6)),
    "linear, many entries": (lambda: nn.Sequential(nn.Linear(40, 30), nn.Tanh(), read(60)), (2, 40)),
    "windows": (lambda: nn.Sequential(Windows(nn.Linear(6, 5)), nn.Tanh(), read(20)), (4, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.Tanh(), read(16)), (2, 8)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2), read(27)), (2, 6, 6)),
    "conv2d, stride": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, (2, 1), (1, 2)), nn.Tanh(), read(96)), (2, 5, 6)),
    "conv2d, dilation": (lambda: nn.Sequential(nn.Conv2d(2, 4, (3, 2), 2, 1, 2), nn.Tanh(), read(36)), (2, 7, 6)),
    "conv2d, groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), read(54)), (4, 5, 5)),
    "conv2d, same": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Tanh(), read(75)), (2, 5, 5)),
    "conv2d, circular": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(), read(75)),
        (2, 5, 5),
    ),
    "conv2d, many channels": (lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.Tanh(), read(128)), (16, 4, 4)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.Tanh(), nn.Conv3d(4, 3, 2), read(3)), (2, 4, 4, 4)),
    "conv3d, stride": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, (2, 1, 3), (2, 1, 2), (0, 1, 1), groups=2), nn.Tanh(), read(144)),
        (2, 4, 4, 6),
    ),
    "conv3d, many channels": (lambda: nn.Sequential(nn.Conv3d(16, 32, 2), nn.Tanh(), read(32)), (16, 2, 2, 2)),
    "embedding": (lambda: nn.Sequential(Tokens(), nn.Tanh(), read(24)), (4,)),
    "embedding, padding": (lambda: nn.Sequential(Tokens(padding_idx=1), nn.Tanh(), read(24)), (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), read(24)), (4, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), read(36)), (2, 5, 5)),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(), read(36)),
        (2, 5, 5),
    ),
    "instance norm, three axes": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.InstanceNorm3d(4, affine=True), nn.Tanh(), read(32)),
        (2, 3, 3, 3),
    ),
    "attention": (lambda: nn.Sequential(Attention(), read(24)), (4, 6)),
    "used twice": (Twice, (6,)),
    "tied": (Tied, (4,)),
    "frozen": (frozen, (6,)),
}
UNRULED = {
    "a parameter of its own": (Whole, (6,)),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3), nn.PReLU(), read(144)),
        (2, 4, 4),
    ),
    "attention with a key of its own": (SelfAttention, (4, 6)),
}


def made(name):
    """The network, its parameters, and rows for it; all the same every time."""
    build, shape = (NETS | UNRULED)[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = build().double()
        for p in net.parameters():
            p.data += 0.1 * torch.randn_like(p)
        tokens = "embedding" in name or "tied" in name
        x = torch.randint(0, 3, (N, *shape)).double() if tokens else torch.randn(N, *shape).double()
        return net, shape, x, torch.randint(0, 3, (N,))


def naive(net, x, y):
    """Examples x parameters by autograd, an example at a time."""
    params = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for k in range(len(x)):
        found = torch.autograd.grad(summed(net(x[k : k + 1]), y[k : k + 1]), params)
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


def swept(net, x, y):
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    buffer = x.new_full((len(x), sum(p.numel() for p in params.values())), torch.nan)
    return per_example.per_example(net, params, x, y, summed, buffer=buffer)


@pytest.mark.parametrize("name", NETS)
def test_rules_agree_with_autograd(name):
    net, _, x, y = made(name)
    assert per_example.supported(net) == []
    if name == "linear":
        net[1].inplace = False
    want = naive(net, x, y)
    torch.testing.assert_close(swept(net, x, y), want, rtol=1e-10, atol=1e-12)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    squares = per_example.squared_norms(net, params, x, y, summed)
    torch.testing.assert_close(squares, want.square().sum(1), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", UNRULED)
def test_what_has_no_rule_is_named(name):
    net, *_ = made(name)
    assert per_example.supported(net)
    with pytest.raises(SordinoError, match="no rule"):
        TorchModel(net, shape=made(name)[1], mode="tape")


def test_layers_that_look_across_examples_have_no_rule():
    assert per_example.supported(nn.Embedding(3, 2, max_norm=1.0))
    assert per_example.supported(nn.Embedding(3, 2, scale_grad_by_freq=True))
    assert per_example.supported(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert not per_example.supported(nn.Embedding(3, 2, max_norm=1.0).requires_grad_(False))


def no_bias(module, a, g, n):
    return [pair for pair in per_example.linear(module, a, g, n) if pair[0] != "bias"]


def sums_first(module, a, g, n):
    a, g = a.reshape(n, -1, a.shape[-1]), g.reshape(n, -1, g.shape[-1])
    return [("weight", g.sum(1).unsqueeze(2) * a.sum(1).unsqueeze(1)), ("bias", g.sum(1))]


def other_order(module, a, g, n):
    return [(name, part.flip(0)) for name, part in per_example.linear(module, a, g, n)]


def whole_batch(module, a, g, n):
    return [(name, part.mean(0, keepdim=True).expand_as(part)) for name, part in per_example.linear(module, a, g, n)]


@pytest.mark.parametrize("mutant", [no_bias, sums_first, other_order, whole_batch])
def test_a_wrong_rule_is_caught(mutant, monkeypatch):
    net, shape, x, y = made("linear, positions")
    want = naive(net, x, y)
    assert TorchModel(net, shape=shape, mode="tape").mode == "tape"
    monkeypatch.setitem(per_example.RULES, nn.Linear, mutant)
    assert not torch.allclose(swept(net, x, y), want, rtol=1e-3)
    with pytest.raises(SordinoError, match="differ"):
        TorchModel(net, shape=shape, mode="tape")
    flat = TorchModel(net, shape=shape, mode="auto")  # falls back to what needs no rule
    assert flat.mode == "vmap"
    have = flat.clipped_sum(flat.init().double(), Shard(x.flatten(1), y, torch.ones(N)), torch.inf)
    torch.testing.assert_close(have, want.sum(0), rtol=1e-5, atol=1e-6)


def test_rules_see_the_parameters_of_the_call():
    """A rule may read them, as that of an adapter must; and frozen ones can be told from those that are trained."""
    seen = []

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            return x * self.weight + self.bias

    def rule(module, a, g, n):
        seen.append((module.weight.clone(), per_example.trained(module.weight), per_example.trained(module.bias)))
        yield "weight", a * g

    per_example.RULES[Scaled] = rule
    try:
        net, theta, x = Scaled(), torch.randn(3), torch.randn(2, 3)
        got = per_example.gradients(net, {"weight": theta}, x, torch.tensor([0, 1]), summed)
        assert torch.equal(seen[0][0], theta)
        assert seen[0][1:] == (True, False)
        probs = functional_call(net, {"weight": theta}, (x,)).softmax(1)
        torch.testing.assert_close(got["weight"], x * (probs - torch.eye(3)[:2]))
    finally:
        del per_example.RULES[Scaled]


def test_an_input_that_is_overwritten_is_noticed():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = x * 1
            h += self.first(h)
            return self.second(h)

    net, x, y = Overwrites(), torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(SordinoError, match="in place"):
        swept(net, x, y)


def test_the_ghost_norm_is_an_upper_bound_where_terms_cancel():
    """The norm is then far below |a| |g|, and float32 Gram matrices may not undercut it."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Flatten(), nn.Linear(128, 2, bias=False))
    row = torch.randn(64, 1, 64)
    x = torch.cat([row, row + 1e-4 * torch.randn(64, 1, 64)], 1)
    with torch.no_grad():
        net[2].weight[:, 64:] = -net[2].weight[:, :64]
    net[2].requires_grad_(False)
    params = {"0.weight": net[0].weight.detach()}
    y = torch.zeros(64, dtype=torch.long)
    found = per_example.norms_first(net, params, x, y, summed)
    assert len(found.later) == 1
    use = found.later[0]
    exact = torch.bmm(use.g.double().mT, use.a.double()).square().sum((1, 2))
    assert (found.squares >= exact).all()


def test_channels_last_change_the_speed_alone(monkeypatch):
    """Small networks that pool have them on a CPU, also of one channel, whose layout `contiguous` cannot tell."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 64), torch.arange(12) % 10
    model = TorchModel(cnn((1, 8, 8), 10), shape=(1, 8, 8))
    seen = []

    def record(module, args, out):
        seen.append(out.stride(1))

    model.module[3].register_forward_hook(record)
    shard = Shard(x, y, torch.ones(12))
    last = model.clipped_sum(model.init(), shard, 0.5)
    assert set(seen) == {1}
    monkeypatch.setattr(per_example, "last_channels", lambda module, like: False)
    first = model.clipped_sum(model.init(), shard, 0.5)
    assert set(seen) != {1}
    assert torch.allclose(last, first, rtol=1e-5, atol=1e-6)


def test_large_networks_and_those_without_pools_keep_channels_first():
    like = torch.zeros(1)
    assert per_example.last_channels(cnn((1, 8, 8), 10), like)
    assert not per_example.last_channels(resnet18(3, 10), like)
    assert not per_example.last_channels(nn.Sequential(nn.Conv2d(1, 65, 3), nn.MaxPool2d(2)), like)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("records", [2, 256])
def test_one_record_moves_a_sum_with_channels_last_by_no_more_than_the_clip(shape, records):
    """Left out, emptied or replaced, at sizes that run; and by nearly as much."""
    torch.manual_seed(0)
    model, clip = TorchModel(cnn(shape, 10), shape=shape), 0.5
    assert per_example.last_channels(model.module, torch.zeros(1))
    theta, x, y = 30 * model.init(), 30 * torch.randn(records, model.features), torch.arange(records) % 10
    y[0] = model.logits(theta, x[:1]).argmin()  # a long gradient
    there = torch.ones(records)
    gone, other = there.clone(), x.clone()
    gone[0], other[0] = 0, -3 * x[0]
    whole = model.clipped_sum(theta, Shard(x, y, there), clip)
    for rest in (Shard(x[1:], y[1:], there[1:]), Shard(x, y, gone)):
        moved = float((whole - model.clipped_sum(theta, rest, clip)).norm())
        assert 0.99 * clip < moved <= clip
    assert float((whole - model.clipped_sum(theta, Shard(other, y, there), clip)).norm()) <= 2 * clip
