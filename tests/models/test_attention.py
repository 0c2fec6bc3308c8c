"""PyTorch's attention by linear layers: its own outputs, gradients as of a loop over single examples, and the clip."""

import copy
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from sordino import checks
from sordino.checks import suites
from sordino.core import Clipping, Shard, Unit
from sordino.errors import SordinoError
from sordino.models import per_example, watch
from sordino.models.attention import AttentionByLayers, by_linear_layers
from sordino.models.torch_model import TorchModel

sys.path.insert(0, str(Path(__file__).parent))
from test_arithmetic import drifting, moved
from test_per_example import N, naive, read
from test_torch_model import MODES, clipped, flat_theta

STEPS, WIDTH, HEADS = 4, 6, 2
CAUSAL = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)
ALMOST = torch.zeros(STEPS, STEPS).index_fill(1, torch.tensor(2), -3.0)


def on(x, part):
    """A mask where the records are."""
    return part.to(x.device) if isinstance(part, torch.Tensor) else part


class Attends(nn.Module):
    """An attention of rows to themselves, and a linear layer that reads it at all positions."""

    def __init__(self, call=None, **options):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True} | options)
        self.head, self.call = read(STEPS * WIDTH), {"need_weights": False} | (call or {})

    def forward(self, x):
        x = x if self.attend.batch_first else x.transpose(0, 1)
        call = {key: on(x, part) for key, part in self.call.items()}
        out = self.attend(x, x, x, **call)[0]
        return self.head(out if self.attend.batch_first else out.transpose(0, 1))


class Crosses(nn.Module):
    """An attention whose queries, keys and values differ: the first half of a row asks, and the second one answers."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = read(STEPS // 2 * WIDTH)

    def forward(self, x):
        asks, answers = x.chunk(2, 1)
        return self.head(self.attend(asks, answers, answers.tanh(), need_weights=False)[0])


class Hides(nn.Module):
    """Some positions of each record are hidden, and the weights of the attention are read too."""

    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), read(STEPS * WIDTH)

    def forward(self, x):
        hidden = (x[..., 0] > 0.5) & (torch.arange(STEPS, device=x.device) > 0)
        out, weights = self.attend(x, x, x, key_padding_mask=hidden)
        return self.head(out + weights.mean(1).unsqueeze(-1))


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True, **options)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), read(STEPS * WIDTH))


class Decodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
        self.head = read(STEPS * WIDTH)

    def forward(self, x):
        return self.head(self.layer(x, x.tanh(), tgt_mask=on(x, CAUSAL), tgt_is_causal=True))


NETS = {
    "attention": Attends,
    "weights": lambda: Attends({"need_weights": True}),
    "no bias": lambda: Attends(bias=False),
    "positions first": lambda: Attends(batch_first=False),
    "a key of zeros": lambda: Attends({"attn_mask": ALMOST}, add_zero_attn=True),
    "causal": lambda: Attends({"attn_mask": CAUSAL, "is_causal": True}),
    "mask of numbers": lambda: Attends({"attn_mask": ALMOST}),
    "keys of others": Crosses,
    "padding": Hides,
    "encoder": encoder,
    "encoder, norm first": lambda: encoder(norm_first=True),
    "decoder": Decodes,
}


def made(name, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = NETS[name]().double()
        for p in net.parameters():
            p.data += 0.2 * torch.randn_like(p)
        return net.to(dtype), torch.randn(N, STEPS, WIDTH, dtype=dtype), torch.randint(0, 3, (N,))


def converted(net):
    net = copy.deepcopy(net)
    by_linear_layers(net)
    assert any(isinstance(part, AttentionByLayers) for part in net.modules())
    return net


# ------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_outputs_are_those_of_pytorch(name, training):
    net, x, _ = made(name)
    ours = converted(net)
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in net.named_parameters()]
    with torch.set_grad_enabled(training):  # in evaluation an encoder's layer has a fast path of its own
        torch.testing.assert_close(ours.train(training)(x), net.train(training)(x), rtol=1e-10, atol=1e-12)


def layer(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double()
    ours = copy.deepcopy(theirs)
    by_linear_layers(ours)
    return theirs, ours, torch.randn(3, STEPS, WIDTH).double(), torch.randn(3, 5, WIDTH).double()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("mask", ["none", "truths", "numbers", "each head"])
@pytest.mark.parametrize("padding", ["none", "truths", "numbers"])
def test_masks_and_weights_are_those_of_pytorch(mask, padding, needs, zeros):
    theirs, ours, asks, answers = layer(add_zero_attn=zeros)
    hides = torch.zeros(3, 5, dtype=torch.bool)
    hides[1, 3:] = True
    masks = {
        "none": None,
        "truths": torch.eye(STEPS, 5, dtype=torch.bool),
        "numbers": torch.randn(STEPS, 5).double(),
        "each head": torch.randn(3 * HEADS, STEPS, 5).double(),
    }
    paddings = {"none": None, "truths": hides, "numbers": -2.0 * hides.double()}
    how = {"attn_mask": masks[mask], "key_padding_mask": paddings[padding], "need_weights": needs}
    if {mask, padding} & {"truths"} and {mask, padding} & {"numbers", "each head"}:
        pytest.skip("PyTorch warns that the types of masks must match")
    for average in (True, False):
        want = theirs(asks, answers, answers.tanh(), average_attn_weights=average, **how)
        have = ours(asks, answers, answers.tanh(), average_attn_weights=average, **how)
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


def test_what_is_not_served_is_said_or_left_to_torch_func():
    _, ours, asks, answers = layer()
    with pytest.raises(SordinoError, match="keep the axis of records"):
        ours(asks[0], answers[0], answers[0])
    with pytest.raises(SordinoError, match="is_causal=True needs attn_mask"):
        ours(asks, asks, asks, is_causal=True)
    for options in ({"add_bias_kv": True}, {"kdim": WIDTH, "vdim": 5}):
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        by_linear_layers(module)
        assert type(module) is nn.MultiheadAttention
    frozen = nn.MultiheadAttention(WIDTH, HEADS).requires_grad_(False)
    by_linear_layers(frozen)
    assert type(frozen) is nn.MultiheadAttention
    with pytest.raises(SordinoError, match=r"cannot compute gradients in bfloat16.*attend \(MultiheadAttention\)"):
        TorchModel(Attends(add_bias_kv=True), shape=(STEPS, WIDTH), autocast=torch.bfloat16)


class Merged(nn.Linear):
    """A projection whose matrix is the sum of a parameter and a product, as of an adapter."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.base = self.weight
        del self.weight
        self.left, self.right = (nn.Parameter(torch.randn(shape)) for shape in ((WIDTH, 2), (2, WIDTH)))

    @property
    def weight(self):
        return self.base + self.left @ self.right


@pytest.mark.parametrize("name", ["weight norm", "property"])
def test_a_projection_of_another_class_is_left_to_torch_func(name):
    torch.manual_seed(0)
    net = Attends()
    if name == "property":
        net.attend.out_proj = Merged()
    else:
        nn.utils.parametrizations.weight_norm(net.attend.out_proj)
    net, x, y = net.double(), torch.randn(N, STEPS, WIDTH).double(), torch.randint(0, 3, (N,))
    model, weight = TorchModel(net, shape=(STEPS, WIDTH)), torch.ones(N).double()
    assert model.mode == "vmap"
    have = model.clipped_sum(flat_theta(net), Shard(x.flatten(1), y, weight), 0.1)
    torch.testing.assert_close(have, clipped(naive(net, x, y), 0.1, weight), rtol=1e-9, atol=1e-12)


class Pads(nn.Module):
    """An encoder as PyTorch makes it, which reads that some positions of each record are hidden."""

    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=dropout, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), read(STEPS * WIDTH)

    def forward(self, x):
        hidden = (x[..., 0] > 1) & (torch.arange(STEPS, device=x.device) > 0)
        return self.head(self.encoder(x, src_key_padding_mask=hidden))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_an_encoder_computes_hidden_positions_in_evaluation_too():
    """Nested tensors would leave them out, so that evaluation differs from training, and shapes depend on data."""
    torch.manual_seed(0)
    model, x = TorchModel(Pads(), shape=(STEPS, WIDTH)), 2 * torch.randn(N, STEPS, WIDTH)
    assert model.mode != "vmap"
    torch.testing.assert_close(model.logits(model.init(), x.flatten(1)), model.module.train()(x))


def test_masks_of_attention_are_constants_where_rows_are_compared():
    class Fused(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(2, HEADS, STEPS, 3)
    for still in (False, True):
        seen = []
        with torch.no_grad(), Fused(), watch.Still() if still else nullcontext():
            nn.functional.scaled_dot_product_attention(q, q, q)
        assert any("_scaled_dot_product" in name for name in seen) is not still


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_dropout_of_an_attention_is_served_on_a_gpu(autocast):
    model = TorchModel(Pads(dropout=0.3).cuda(), shape=(STEPS, WIDTH), autocast=autocast)
    assert model.random
    x, theta = torch.randn(N, STEPS * WIDTH).cuda(), model.init().cuda()
    one = torch.ones(N).cuda().index_fill(0, torch.arange(1, N).cuda(), 0)
    assert 0.999e-3 < model.clipped_sum(theta, Shard(x, torch.zeros(N).cuda(), one), 1e-3).norm() <= 1e-3


# --------------------------------------------------------------------------------------------- gradients of examples


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("name", NETS)
def test_sums_agree_with_single_examples(name, mode):
    net, x, y = made(name)
    model = TorchModel(net, shape=(STEPS, WIDTH), mode=mode, chunk=2)
    if mode == "auto":
        assert model.mode in ("tape", "two-pass"), "and the sums of these are compared below"
        return
    assert model.mode == mode
    rows, weight = naive(net, x, y), torch.linspace(1, 0.2, N).double()
    assert model.size == len(flat_theta(net))
    for clip in (0.5 * float(rows.norm(dim=1).median()), math.inf):
        have = model.clipped_sum(flat_theta(net), Shard(x.flatten(1), y, weight), clip)
        torch.testing.assert_close(have, clipped(rows, clip, weight), rtol=1e-9, atol=1e-12)


def test_a_part_is_trained_and_the_rest_is_frozen():
    net, x, y = made("encoder")
    for key, p in net.named_parameters():
        p.requires_grad_("in_proj_weight" in key or "out_proj.bias" in key)
    model, weight = TorchModel(net, shape=(STEPS, WIDTH)), torch.ones(N).double()
    assert model.mode != "vmap"
    have = model.clipped_sum(flat_theta(net), Shard(x.flatten(1), y, weight), 0.1)
    torch.testing.assert_close(have, clipped(naive(net, x, y), 0.1, weight), rtol=1e-9, atol=1e-12)


def test_a_wrong_rule_is_found_out(monkeypatch):
    """Mutant: positions of the input are mixed up before they meet their gradients."""

    def mixed(module, a, g, n):
        yield from linear(module, a.reshape(n, -1, a.shape[-1]).flip(1), g, n)

    linear = per_example.linear
    monkeypatch.setitem(per_example.RULES, nn.Linear, mixed)
    net, _, _ = made("attention")
    with pytest.raises(SordinoError, match="differ from those of single examples"):
        TorchModel(net, shape=(STEPS, WIDTH), mode="tape")


# ------------------------------------------------------------------------------------------------------------- bounds

halves = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16


@halves
@pytest.mark.parametrize("name", NETS)
def test_half_precision_stays_near(name):
    net, x, y = made(name, torch.float32)
    exact, half = (TorchModel(net, shape=(STEPS, WIDTH), autocast=kind) for kind in (None, torch.bfloat16))
    assert half.mode == "tape"
    shard = Shard(x.flatten(1), y, torch.ones(N))
    one, other = (model.clipped_sum(model.init(), shard, 1.0) for model in (exact, half))
    assert 0 < (one - other).norm() / one.norm() < 0.05


@halves
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("law", ["flat", "per-layer", "automatic"])
@pytest.mark.parametrize("name", ["attention", "encoder", "keys of others"])
def test_one_record_moves_the_sum_by_at_most_the_clip(name, law, autocast):
    net, x, y = made(name, torch.float32)
    model, theta = TorchModel(net, shape=(STEPS, WIDTH), autocast=autocast), flat_theta(net)
    x, mask = x.flatten(1) * 10.0 ** torch.linspace(-2, 2, N).unsqueeze(1), torch.ones(N)
    for clip in (1e-3, 0.1):
        whole = model.clipped_sum(theta, Shard(x, y, mask), clip, clipping=Clipping.parse(law))
        gaps = []
        for k in range(N):
            less = Shard(x, y, mask.index_fill(0, torch.tensor(k), 0))
            gaps.append(float((whole - model.clipped_sum(theta, less, clip, clipping=Clipping.parse(law))).norm()))
            alone = Shard(x[k : k + 1], y[k : k + 1], torch.ones(1))
            assert model.clipped_sum(theta, alone, clip, clipping=Clipping.parse(law)).norm() <= clip
        assert 0.5 * clip < max(gaps) <= clip


@halves
def test_a_norm_of_something_else_is_found_out(monkeypatch):
    """Mutant: squared norms of half their size."""
    net, x, y = made("attention", torch.float32)
    model = TorchModel(net, shape=(STEPS, WIDTH), autocast=torch.bfloat16)
    one = Shard(x[:1].flatten(1), y[:1], torch.ones(1))
    assert model.clipped_sum(flat_theta(net), one, 1e-3).norm() <= 1e-3
    bound = per_example.bound
    import sordino.models.torch_model as within

    monkeypatch.setattr(within, "bound", lambda rows: bound(rows) / 2)
    assert model.clipped_sum(flat_theta(net), one, 1e-3).norm() > 1e-3


class Weighs(nn.Module):
    """Two logits of one number, by an attention over one position. The matrix of V is zero, and so are the logits."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(1, 1, bias=False, batch_first=True)
        self.attend.in_proj_weight.data.copy_(torch.tensor([[1.0], [1.0], [0.0]]))
        self.attend.out_proj.weight.data.fill_(1.0).requires_grad_(False)
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight.data.copy_(torch.tensor([[0.5], [-0.5]]))
        self.head.requires_grad_(False)

    def forward(self, x):
        x = x.unsqueeze(-1)
        return self.head(self.attend(x, x, x, need_weights=False)[0][:, 0])


@halves
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_rounding_of_later_rows_moves_nothing(autocast):
    """Only the matrix of V has a gradient here, x / 2 or its reverse for a record of x, as in `test_arithmetic`."""
    model, clip = TorchModel(Weighs(), shape=(1,), autocast=autocast), 1.0

    def total(*rows):
        return model.clipped_sum(model.init(), Shard(*rows), clip)[2:]

    x, y = drifting(10_000, total, term=lambda value: 2 * value)
    leaves, changes = moved(total, x, y)
    assert 0.999 * clip < leaves <= clip
    assert 1.998 * clip < changes <= 2 * clip


@halves
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_sums_on_a_gpu(name, autocast):
    net, x, y = made(name, torch.float32)
    model = TorchModel(net, shape=(STEPS, WIDTH), autocast=autocast)
    shard = Shard(x.flatten(1), y, torch.ones(N))
    want, theta = model.clipped_sum(flat_theta(net), shard, 0.1), flat_theta(net).cuda()
    records = [part.cuda() for part in shard[:3]]
    for _ in range(3):  # the later ones replay a graph
        have = model.clipped_sum(theta, Shard(*records), 0.1).cpu()
        assert (have - want).norm() < (1e-4 if autocast is None else 0.05) * want.norm()
    for k in range(N):
        alone = Shard(*(part[k : k + 1] for part in records))
        assert model.clipped_sum(theta, alone, 1e-3).norm() <= 1e-3


def test_groups_with_thetas_of_their_own_run_in_half_precision():
    """They go one after another: torch.func does not serve this attention in bfloat16."""
    net, x, y = made("attention", torch.float32)
    model = TorchModel(net, shape=(STEPS, WIDTH), autocast=torch.bfloat16)
    theta = model.init() + 0.1 * torch.randn(3, model.size)
    both = model.clipped_sum(theta, Shard(x.flatten(1), y, torch.ones(N)), 0.1)
    for k in range(3):
        torch.testing.assert_close(both[k], model.clipped_sum(theta[k], Shard(x.flatten(1), y, torch.ones(N)), 0.1))


@halves
def test_contracts_hold_and_reject_wrong_bounds():
    reports = suites.check_attention(trials=checks.LEAST_TRIALS, units=[Unit.RECORD])
    assert [report.name for report in reports] == 2 * ["attention"] + 2 * ["attention bfloat16"]
    assert [problem for report in reports for problem in report.problems] == []


@halves
@pytest.mark.soak
def test_a_mutant_that_passes_is_reported(monkeypatch):
    monkeypatch.setattr(suites, "clips_by_the_last_layer", lambda method, model: (method, model))
    for report in suites.check_attention(trials=checks.LEAST_TRIALS, units=[Unit.RECORD]):
        assert not report.passed
