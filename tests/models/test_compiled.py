"""Traced passes: the same uses as a pass that runs as it is."""

import pytest
import torch
from torch import nn

from sordino.core import Clipping, Shard
from sordino.models import compiled, outer, per_example
from sordino.models.lora import adapt, dropped_out
from sordino.models.nets import Block
from sordino.models.torch_model import TorchModel
from tests.models.test_outer import images, texts

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.classifier = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.query(x).tanh())


def adapted():
    return adapt(Adapted(), rank=2, dropout=0.0), (6,), torch.randn(12, 6)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def recurrent():
    return Recurrent(), (3, 6), torch.randn(12, 18)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(18, 3)

    def forward(self, x):
        return self.head(self.attend(x, x, x, need_weights=False)[0].flatten(1))


def attends():
    return Attends(), (3, 6), torch.randn(12, 18)


def blocks():
    """Convolutions of 64 channels, as the copy engine serves them: the second one reads every second pixel."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU(), Block(64, 64, 2), nn.Flatten(), nn.Linear(256, 3))
    return net, (3, 4, 4), torch.randn(12, 48)


@pytest.fixture
def traces(monkeypatch):
    """Every sum goes through traces, which run as they are: compiling would take a minute."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph: graph)
    passes, inner = compiled.Passes(), per_example.norms_first
    monkeypatch.setattr(per_example, "norms_first", lambda *given, **named: inner(*given, **named | {"run": passes}))
    return passes


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [images, texts, adapted, recurrent, attends, blocks])
def test_a_trace_gives_the_same_sums(make, autocast, traces, monkeypatch):
    torch.manual_seed(0)
    net, shape, x = make()
    y = torch.arange(12) % 3
    monkeypatch.setattr(outer, "pays", lambda t: True)
    with monkeypatch.context() as without:
        without.setattr(compiled.Passes, "__call__", lambda self, *given: per_example.sweep(*given[:7]))
        flat = TorchModel(net, shape=shape, autocast=autocast)
        theta = flat.init() + 0.01 * torch.randn(flat.size)
        thetas = (theta, 1.1 * theta)
        law = Clipping.parse("per-layer" if make is recurrent else "flat")
        want = [flat.clipped_sum(each, Shard(x, y, torch.ones(12)), 0.3, None, law) for each in thetas]
    have = [flat.clipped_sum(each, Shard(x, y, torch.ones(12)), 0.3, None, law) for each in thetas]
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if autocast else 1e-6, atol=1e-4 if autocast else 1e-7)
    assert len(traces._known) == 1


def test_signs_of_activations_are_read_from_what_convolutions_store(traces, monkeypatch):
    """The ReLUs before convolutions keep nothing; the last one, which no convolution reads, keeps its output."""
    graphs = []
    monkeypatch.setattr(compiled, "compile_graph", lambda graph: graphs.append(graph) or graph)
    monkeypatch.setattr(outer, "boxed", outer._fits)
    torch.manual_seed(0)
    net, shape, x = blocks()
    monkeypatch.setattr(outer, "pays", lambda t: True)
    flat = TorchModel(net, shape=shape, autocast=torch.bfloat16)
    shard, theta = Shard(x, torch.arange(12) % 3, torch.ones(12)), flat.init()
    have = flat.clipped_sum(theta, shard, 0.3)
    assert graphs[-1].code.count("threshold_backward.default") == 1
    assert graphs[-1].code.count("masked_fill.Scalar") == 2
    monkeypatch.setattr(compiled, "without_activations", lambda graph, stored: None)
    traces._known.clear()
    want = flat.clipped_sum(theta, shard, 0.3)
    assert graphs[-1].code.count("threshold_backward.default") == 3
    assert torch.equal(have, want)


def test_a_shape_beyond_the_limit_runs_as_it_is(traces, monkeypatch):
    monkeypatch.setattr(compiled, "MAX_TRACES", 1)
    flat = TorchModel(nn.Linear(4, 3))
    traces._known.clear()
    for n in (3, 4, 5):
        flat.clipped_sum(flat.init(), Shard(torch.randn(n, 4), torch.zeros(n).long(), torch.ones(n)), 1.0)
    assert len(traces._known) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [images, texts, adapted, blocks])
def test_compiled_on_a_gpu(make):
    torch.manual_seed(0)
    net, shape, x = make()
    shard = Shard(x.cuda(), (torch.arange(12) % 3).cuda(), torch.ones(12).cuda())
    flat, fast = (TorchModel(net, shape=shape, autocast=torch.bfloat16, compile=on) for on in (False, True))
    theta = flat.init().cuda()
    want, have = (model.clipped_sum(theta, shard, 0.3) for model in (flat, fast))
    assert fast._passes._known
    assert (have - want).norm() < 0.02 * want.norm()
    one = Shard(*(t[:1] for t in shard[:3]))
    assert fast.clipped_sum(theta, one, 1e-3).norm() <= 1e-3


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.Conv2d(4, 6, (1, 4), (3, 1)), nn.Conv1d(4, 6, 5, 2, 1, 2)]
)
def test_gradients_of_inputs_without_the_inputs(layer):
    """A transposed convolution takes the place of the operator that also reads the input."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *[13, 11][: layer.weight.dim() - 2], dtype=torch.float64)
    layer = layer.double().requires_grad_(False)

    def run(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x).tanh().square().sum(), x)[0]

    graph = compiled.make_fx(run)(x)
    compiled.without_inputs(graph)
    assert "convolution_backward" not in graph.code
    torch.testing.assert_close(graph(x), run(x))


class Deep(nn.Module):
    """Two adapted layers, of which each reads several positions."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.classifier = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.key(self.query(x).tanh()).tanh().mean(1))


def test_rules_drop_what_the_pass_dropped(traces):
    """The mask is computed three times: in the forward pass, for the gradient of the input, and by the rule of A."""
    torch.manual_seed(0)
    net = adapt(Deep(), rank=2, dropout=0.5)
    x, y = torch.randn(5, 4, 6), torch.arange(5) % 3
    flat = TorchModel(net, shape=(4, 6))
    theta, shard = flat.init() + 0.1 * torch.randn(flat.size), Shard(x.flatten(1), y, torch.ones(5))
    drawn = torch.get_rng_state()
    have = flat.clipped_sum(theta, shard, 1e3)
    torch.set_rng_state(drawn)
    seed = torch.zeros(2, dtype=torch.int32).random_(-(2**31), 2**31)
    for number, layer in enumerate((net.query, net.key)):  # a layer counts two parameters
        layer.dropout.register_forward_hook(lambda _, a, out, number=number: dropped_out(*a, seed, 2 * number, 0.5))
    theta.requires_grad_()
    loss = nn.functional.cross_entropy(torch.func.functional_call(net.train(), flat.split(theta), x), y)
    torch.testing.assert_close(have, torch.autograd.grad(5 * loss, theta)[0].double(), rtol=1e-4, atol=1e-6)


def test_a_pass_without_dropout_draws_nothing(traces):
    torch.manual_seed(0)
    for rate in (0.0, 0.5):
        flat = TorchModel(adapt(Adapted(), rank=2, dropout=rate), shape=(6,))
        theta, shard = flat.init(), Shard(torch.randn(12, 6), torch.arange(12) % 3, torch.ones(12))
        before = torch.get_rng_state()
        sums = [flat.clipped_sum(theta + 0.1, shard, 0.3) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before) == torch.equal(*sums) == (not rate)
