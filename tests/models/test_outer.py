"""Products of single examples in half precision: norms and weighted sums of the same float32 matrices."""

import math

import pytest
import torch
from torch import nn

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import outer, per_example
from sordino.models.arithmetic import row_sums
from sordino.models.lora import dropped_out, spread, threshold
from sordino.models.torch_model import TorchModel

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
LAYERS = {
    "linear": (nn.Linear(40, 24), (6, 37, 40), (6, 37, 24)),
    "tiles": (nn.Linear(128, 256), (6, 20, 128), (6, 20, 256)),
    "convolution": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (6, 3, 9, 9), (6, 8, 5, 5)),
    "reflected": (nn.Conv2d(16, 20, 3, padding=1, padding_mode="reflect"), (6, 16, 6, 6), (6, 20, 6, 6)),
    "pointwise": (nn.Conv2d(16, 20, 1, stride=2), (6, 16, 12, 12), (6, 20, 6, 6)),
    "patches": (nn.Conv2d(3, 64, (4, 2), stride=(4, 2)), (6, 3, 21, 9), (6, 64, 5, 4)),
    "boxes": (nn.Conv2d(64, 64, 3, padding=1), (6, 64, 6, 5), (6, 64, 6, 5)),
    "boxes in planes": (nn.Conv2d(64, 128, 3, stride=2, padding=1), (6, 64, 12, 8), (6, 128, 6, 4)),
    "boxes of points": (nn.Conv2d(128, 64, 1, stride=2), (6, 128, 12, 8), (6, 64, 6, 4)),
    "wide boxes": (nn.Conv2d(64, 64, (3, 5), padding=(1, 2)), (6, 64, 4, 7), (6, 64, 4, 7)),
}


def one_by_one(layer, a, g):
    """The gradient of each example by autograd in float64."""
    weight = layer.weight.detach().double().requires_grad_()
    rows = []
    for x, r in zip(a.double(), g.double(), strict=True):
        if isinstance(layer, nn.Linear):
            z = nn.functional.linear(x, weight)
        else:
            z = layer._conv_forward(x.unsqueeze(0), weight, None)[0]
        rows.append(torch.autograd.grad((z * r).sum(), weight)[0].flatten())
    return torch.stack(rows)


def made(name, device, seed=0):
    layer, reads, writes = LAYERS[name]
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in (reads, writes))
    layer = layer.to(device)
    return layer, a, g, prepared(layer, a, g)


def prepared(layer, a, g):
    """The layout of the copy engine also where there is none."""
    if (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size != layer.stride
        and not a.is_cuda
        and outer._fits(layer, a, g)
    ):
        return outer._boxes(layer, a, g)
    return outer.prepare(layer, a, g, len(a))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_are_those_of_autograd(name, device):
    layer, a, g, parts = made(name, device)
    want = one_by_one(layer, a, g)
    found, exact = outer.squares(parts), want.square().sum(1)
    assert (found >= exact * (1 - 1e-6)).all()
    assert (found <= exact * (1 + 5e-5)).all()
    factor = torch.rand(2, 3, device=device)
    factor[0, 1] = 0
    sums, weighted = outer.sums(parts, factor), (factor.double().unsqueeze(2) * want.view(2, 3, -1)).sum(1)
    assert sums.dtype is torch.float64
    torch.testing.assert_close(sums, weighted, rtol=1e-5, atol=1e-4)
    out = torch.ones(2, sums.shape[1] + 3, dtype=torch.float64, device=device)
    outer.sums(parts, factor, out=out[:, 1:-2], add=True)
    torch.testing.assert_close(out[:, 1:-2], 1 + sums, rtol=1e-12, atol=1e-12)
    outer.sums(parts, factor, out=out[:, 1:-2])
    assert torch.equal(out[:, 1:-2], sums)
    assert (out[:, [0, -2, -1]] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["linear", "tiles", "convolution", "boxes", "boxes in planes"])
def test_the_norm_is_that_of_what_is_summed(name, device):
    """Both calls compute the same float32 matrix, also where the terms of an example cancel."""
    layer, a, g, _ = made(name, device)
    half = g.shape[1] // 2 if isinstance(layer, nn.Linear) else None
    if half:
        a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
        a[:, half] *= 1.01
        a[:, 2 * half :] = 0
    parts = prepared(layer, a, g)
    summed = torch.stack([outer.sums(parts, row.view(1, -1))[0] for row in torch.eye(len(a), device=device)])
    norms, found = summed.square().sum(1), outer.squares(parts)
    assert (norms <= found).all()
    assert (found <= norms * (1 + 5e-5)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_shape_is_checked_for_the_order_of_additions(name, device, monkeypatch):
    """Mutant: sums go through the positions in reverse, which `same_twice` must find."""
    *_, parts = made(name, device)
    assert outer.same_twice(parts)
    true = outer.sums

    def reversed_sums(parts, factor):
        a = parts.a if parts.channels else parts.a.flip(1)  # all positions read the same a, so only g matters
        return true(parts._replace(a=a, g=parts.g.flip(1).contiguous()), factor)

    monkeypatch.setattr(outer, "sums", reversed_sums)
    assert not outer.same_twice(parts)
    monkeypatch.setattr(outer, "by_kernel", lambda t: True)
    monkeypatch.setattr(outer, "_checked", set())
    monkeypatch.setattr(outer, "same_twice", lambda parts: False)
    with pytest.raises(SordinoError, match="another order"):
        outer.squares(parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["linear", "tiles", "convolution", "boxes", "boxes in planes"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_examples_that_are_not_finite_are_left_out(name, device, bad):
    layer, a, g, parts = made(name, device)
    factor = torch.ones(1, len(a), device=device)
    factor[0, 2] = 0
    want = outer.sums(parts, factor)
    g[2].view(-1)[3] = bad
    parts = prepared(layer, a, g)
    assert not torch.isfinite(outer.squares(parts)[2])
    assert torch.equal(outer.sums(parts, factor), want)
    out = torch.full_like(want, 7)
    assert torch.equal(outer.sums(parts, factor, out=out), want)
    assert torch.equal(out, want)


# ------------------------------------------------------------------------------------------------------------ networks


class Tokens(nn.Module):
    """A small transformer: embeddings, a class token, attention from linear layers, a norm and a head."""

    def __init__(self, words=50, width=16, length=6):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.first = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.1 * torch.randn(1, length + 1, width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        h = self.words(x.long())
        h = torch.cat([self.first.expand(len(h), -1, -1), h], 1) + self.places
        h = h + (self.q(h) @ self.k(h).mT).softmax(-1) @ self.v(h)
        return self.head(self.norm(h)[:, 0])


def images():
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 6, 3, 2),
        nn.Flatten(),
        nn.Linear(54, 3),
    )
    return net, (2, 8, 8), torch.randn(12, 128)


def texts():
    x = torch.randint(0, 50, (12, 6)).float()
    x[:, 3] = x[:, 1]  # a token that comes twice
    return Tokens(), (6,), x


@pytest.fixture(params=[images, texts], ids=["images", "texts"])
def network(request, monkeypatch):
    torch.manual_seed(0)
    net, shape, x = request.param()
    return net, shape, x, torch.arange(12) % 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_in_half_precision(network, device, monkeypatch):
    """Close to float32, and to stored gradients in half precision."""
    net, shape, x, y = network
    x, y = x.to(device), y.to(device)
    shard = Shard(x, y, torch.ones(12, device=device))
    exact, flat = TorchModel(net, shape=shape), TorchModel(net, shape=shape, autocast=torch.bfloat16)
    assert flat.mode == "tape"
    theta = flat.init().to(device)
    want, stored = exact.clipped_sum(theta, shard, 0.5), flat.clipped_sum(theta, shard, 0.5)
    monkeypatch.setattr(outer, "pays", lambda t: True)
    have = flat.clipped_sum(theta, shard, 0.5)
    assert 0 < (have - want).norm() < 0.03 * want.norm()
    assert (have - stored).norm() < 0.02 * want.norm()
    assert flat._rows(theta, "tape") >= 12


@pytest.mark.parametrize("device", DEVICES)
def test_one_record_moves_the_sum_by_at_most_the_clip(network, device, monkeypatch):
    net, shape, x, y = network
    monkeypatch.setattr(outer, "pays", lambda t: True)
    flat = TorchModel(net, shape=shape, autocast=torch.bfloat16)
    theta, worst = flat.init().to(device), 0.0
    for clip in (1e-4, 1e-2, 0.3):
        for value in (1.0, 1e3, 1e30, math.nan, math.inf) if x.is_floating_point() and len(shape) > 1 else (1.0,):
            held = x.clone()
            held[0] *= value
            rows = [t.to(device) for t in (held, y)]
            mask = torch.ones(12, device=device)
            whole = flat.clipped_sum(theta, Shard(*rows, mask), clip)
            mask[0] = 0
            moved = float((whole - flat.clipped_sum(theta, Shard(*rows, mask), clip)).norm())
            assert moved <= clip
            worst = max(worst, moved / clip)
    assert worst > 0.999


def test_a_norm_that_is_too_small_is_found(network, monkeypatch):
    """Mutant: the norm of another matrix than the one that is summed."""
    net, shape, x, y = network
    monkeypatch.setattr(outer, "pays", lambda t: True)
    true = outer.squares
    monkeypatch.setattr(outer, "squares", lambda parts: 0.9 * true(parts))
    flat = TorchModel(net, shape=shape, autocast=torch.bfloat16)
    one = Shard(x[:1], y[:1], torch.ones(1))
    assert flat.clipped_sum(flat.init(), one, 1e-4).norm() > 1e-4


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_class_tokens_and_embeddings_agree_with_single_examples(kind):
    """In full precision too: parameters that no rule covers are spread, and rows of an embedding are stored alone."""
    torch.manual_seed(1)
    net, shape, x = texts()
    y, net = torch.arange(12) % 3, net.to(kind)
    assert per_example.supported(net)
    assert per_example.supported(net, spread=True) == []
    flat, slow = TorchModel(net, shape=shape), TorchModel(net, shape=shape, mode="vmap")
    assert (flat.mode, slow.mode) == ("two-pass", "vmap")
    theta, shard = flat.init().to(kind), Shard(x.to(kind), y, torch.ones(12).to(kind))
    close = {"rtol": 1e-9, "atol": 1e-9} if kind is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for clip in (0.2, 100.0):
        torch.testing.assert_close(flat.clipped_sum(theta, shard, clip), slow.clipped_sum(theta, shard, clip), **close)


def test_rows_of_an_embedding_are_stored_alone():
    torch.manual_seed(0)
    module, ids = nn.Embedding(40, 4, padding_idx=0), torch.tensor([[3, 0, 3, 7], [5, 5, 5, 5]])
    g = torch.randn(2, 4, 4)
    use = per_example.Use(module, {"weight": "w"}, ids, g, True)
    assert per_example.tokens(use, 2)
    stored = per_example.prepared(use, 2)
    assert stored.g.shape == (2, 4, 4)
    module.weight = nn.Parameter(module.weight.detach())
    dense = dict(per_example.embedding(module, ids, g, 2))["weight"]
    torch.testing.assert_close(per_example.squares(stored, 2), dense.double().square().sum((1, 2)), rtol=1e-4, atol=0)
    factor = torch.tensor([[0.5, 2.0]])
    ((name, total),) = per_example.total(stored, factor)
    assert name == "w"
    torch.testing.assert_close(total.view(40, 4), (factor.view(2, 1, 1) * dense).sum(0).double())


class Shared(nn.Module):
    """A parameter whose first axis has length 1, but does not stand for examples."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Parameter(torch.ones(1, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.einsum("oi,nj->nj", self.mix, x))


def test_a_parameter_that_is_read_otherwise_is_not_spread():
    flat = TorchModel(Shared(), shape=(4,))
    assert flat.mode == "vmap"


class Scaled(nn.Module):
    """A scale of its own, which no rule covers, after a norm that `torch.func` cannot differentiate in bfloat16."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm, self.head = nn.Parameter(torch.ones(4)), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(nn.functional.linear(x, torch.eye(4, dtype=x.dtype)) * self.scale))


def test_a_module_that_half_precision_does_not_serve_is_refused_or_runs():
    """A sentence at once instead of an error of torch in the first round."""
    try:
        flat = TorchModel(Scaled(), shape=(4,), autocast=torch.bfloat16)
    except SordinoError as error:
        assert "Scaled" in str(error)  # noqa: PT017
        assert "float32" in str(error)  # noqa: PT017
        return
    shard = Shard(torch.randn(3, 4), torch.arange(3), torch.ones(3))
    assert flat.clipped_sum(flat.init(), shard, 1.0).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "n", "width"), [(1, 1, 5), (2, 33, 1000), (1, 256, 4096)])
def test_rows_are_added_by_one_kernel(groups, n, width, kind):
    """As `row_sums` does; a row with factor zero may hold anything."""
    torch.manual_seed(0)
    rows, factor = torch.randn(groups, n, width, device="cuda").to(kind), torch.rand(groups, n, device="cuda")
    want = row_sums(factor, rows.float())
    torch.testing.assert_close(outer.weighted_rows(factor, rows), want, rtol=0, atol=1e-5)
    factor[0, 0], rows[0, 0] = 0, torch.nan
    have, rows[0, 0] = outer.weighted_rows(factor, rows), 0
    torch.testing.assert_close(have, row_sums(factor, rows.float()), rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "positions", "inputs", "rank"), [(3, 5, 20, 2), (4, 197, 768, 16), (2, 1, 100, 24)])
def test_products_with_dropout(n, positions, inputs, rank, kind):
    """The kernel has the mask of the forward pass, and writes between gradients of other layers."""
    torch.manual_seed(0)
    up, x = (torch.randn(n, positions, k, device="cuda").to(kind) for k in (rank, inputs))
    seed = torch.tensor([-123456789, 987654321], dtype=torch.int32, device="cuda")
    room = torch.zeros(n, 7 + rank * inputs, device="cuda", dtype=kind)
    out = room[:, 7:].view(n, rank, inputs)
    outer.dropped_products(up, x, seed, spread(4), threshold(0.1), 1 / 0.9, out)
    want = torch.bmm(up.mT.float(), dropped_out(x, seed, 4, 0.1).float())
    torch.testing.assert_close(out.float(), want, rtol=0.01, atol=0.01 * want.abs().max().item())
    assert (out.float() - want).norm() < 0.005 * want.norm()
    assert not room[:, :7].any()
