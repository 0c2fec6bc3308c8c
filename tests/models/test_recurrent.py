"""Recurrent layers step by step: the same outputs as PyTorch's, and gradients as of a loop over single examples."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from sordino import checks
from sordino.core import Clipping, Shard
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models import per_example, recurrent
from sordino.models.torch_model import TorchModel

sys.path.insert(0, str(Path(__file__).parent))
from test_per_example import N, naive
from test_torch_model import MODES, clipped, flat_theta

STEPS = 4


class Reads(nn.Module):
    """A recurrent layer, and a linear one that reads its outputs at all steps and its last states."""

    def __init__(self, kind, batch_first=True, start=False, **options):
        super().__init__()
        self.cell = kind(6, 5, batch_first=batch_first, **options)
        width = options.get("proj_size", 5) * (1 + options.get("bidirectional", False))
        self.start = nn.Parameter(0.3 * torch.randn(1, 5)) if start else None
        self.head = nn.Linear(STEPS * width + 5 * (kind is not nn.LSTM), 3)

    def forward(self, x):
        x = x if self.cell.batch_first else x.transpose(0, 1)
        first = None if self.start is None else self.start.expand(x.shape[0], 5).unsqueeze(0)
        out, last = self.cell(x, first)
        out = out if self.cell.batch_first else out.transpose(0, 1)
        rest = [] if isinstance(last, tuple) else [last[-1]]
        return self.head(torch.cat([out.flatten(1), *rest], 1))


class Called(nn.Module):
    """A cell that is called at every step."""

    def __init__(self, kind, **options):
        super().__init__()
        self.cell, self.head = kind(6, 5, **options), nn.Linear(5, 3)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


NETS = {
    "rnn": lambda: Reads(nn.RNN),
    "rnn, relu": lambda: Reads(nn.RNN, nonlinearity="relu"),
    "rnn, no bias": lambda: Reads(nn.RNN, bias=False),
    "lstm": lambda: Reads(nn.LSTM),
    "lstm, two layers, both directions": lambda: Reads(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, projection": lambda: Reads(nn.LSTM, proj_size=3, num_layers=2),
    "gru": lambda: Reads(nn.GRU),
    "gru, steps first": lambda: Reads(nn.GRU, batch_first=False, num_layers=2),
    "gru, learned start": lambda: Reads(nn.GRU, start=True),
    "rnn cell": lambda: Called(nn.RNNCell),
    "rnn cell, relu": lambda: Called(nn.RNNCell, nonlinearity="relu"),
    "lstm cell": lambda: Called(nn.LSTMCell),
    "gru cell": lambda: Called(nn.GRUCell, bias=False),
}


def made(name):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = NETS[name]().double()
        return net, torch.randn(N, STEPS, 6).double(), torch.randint(0, 3, (N,))


@pytest.mark.parametrize("name", NETS)
def test_outputs_and_names_are_those_of_pytorch(name):
    net, x, _ = made(name)
    unrolled = copy.deepcopy(net)
    recurrent.unroll(unrolled)
    torch.testing.assert_close(unrolled(x), net(x), rtol=1e-12, atol=1e-12)
    assert [key for key, _ in unrolled.named_parameters()] == [key for key, _ in net.named_parameters()]
    for have, want in zip(_returned(unrolled, x), _returned(net, x), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def _returned(net, x):
    """Outputs and last states of the layer, in one list."""
    if isinstance(net, Called):
        return [net(x)]
    out, last = net.cell(x if net.cell.batch_first else x.transpose(0, 1))
    return [out, *(last if isinstance(last, tuple) else [last])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in NETS if name != "gru, learned start"])
def test_sums_agree_with_single_examples(name, mode):
    net, x, y = made(name)
    model = TorchModel(net, shape=(STEPS, 6), mode=mode, chunk=2)
    rows, theta, weight = naive(net, x, y), flat_theta(net), torch.linspace(1, 0.2, N).double()
    assert (model.mode, model.size) == (mode, len(theta))
    clip, shard = 0.7 * float(rows.norm(dim=1).median()), Shard(x.flatten(1), y, weight)
    have = model.clipped_sum(theta, shard, clip)
    torch.testing.assert_close(have, clipped(rows, clip, weight), rtol=1e-9, atol=1e-12)
    scale = torch.linspace(0.5, 2, model.size).double()
    have = model.clipped_sum(theta, shard, clip, scale)
    torch.testing.assert_close(have, clipped(rows, clip, weight, scale), rtol=1e-9, atol=1e-12)


def test_a_learned_start_is_spread_over_the_records():
    net, x, y = made("gru, learned start")
    model = TorchModel(net, shape=(STEPS, 6))
    have = model.clipped_sum(flat_theta(net), Shard(x.flatten(1), y, torch.ones(N).double()), 0.5)
    assert model.mode != "vmap"
    torch.testing.assert_close(have, clipped(naive(net, x, y), 0.5, torch.ones(N).double()), rtol=1e-9, atol=1e-12)


def test_some_matrices_may_be_frozen_and_all_of_them():
    net, x, y = made("lstm")
    for name, p in net.cell.named_parameters():
        p.requires_grad_("hh" in name)
    model = TorchModel(net, shape=(STEPS, 6))
    have = model.clipped_sum(flat_theta(net), Shard(x.flatten(1), y, torch.ones(N).double()), 0.5)
    torch.testing.assert_close(have, clipped(naive(net, x, y), 0.5, torch.ones(N).double()), rtol=1e-9, atol=1e-12)
    net.cell.requires_grad_(False)
    assert type(TorchModel(net, shape=(STEPS, 6)).module.cell) is nn.LSTM, "a frozen layer keeps its fast kernel"


def test_steps_are_positions_of_one_use():
    """The matrix of the states is used once per pass, and its norm is cheaper than its gradient if it is large."""
    uses = []
    net = nn.LSTM(6, 40, batch_first=True)
    recurrent.unroll(net)
    params = {name: p.detach() for name, p in net.named_parameters()}
    x, y = torch.randn(2, 3, 6), torch.zeros(2).long()
    per_example.sweep(net, params, x, y, lambda out, y: out[0].square().sum(), uses.append)
    assert sorted(use.names["weight"] for use in uses) == ["weight_hh_l0", "weight_ih_l0"]
    assert all(use.once and use.g.shape[:2] == (2, 3) for use in uses)
    assert [per_example.short(use, 2) for use in uses if "hh" in use.names["weight"]] == [True]


def test_a_wrong_step_is_caught(monkeypatch):
    """Mutant: states are reported one step late."""

    class Late(recurrent.EachStep):
        def finish(self):
            self.inputs = [torch.zeros_like(h) for h in self.inputs[:1]] + self.inputs[:-1]
            super().finish()

    monkeypatch.setattr(recurrent, "EachStep", Late)
    net, _, _ = made("lstm")
    assert TorchModel(net, shape=(STEPS, 6)).mode == "vmap", "the check at construction found the difference"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("law", ["flat", "per-layer", "automatic"])
def test_one_record_moves_the_sum_by_at_most_the_clip(law, autocast):
    net, x, y = made("lstm, two layers, both directions")
    model, theta = TorchModel(net.float(), shape=(STEPS, 6), autocast=autocast), flat_theta(net).float()
    x, mask = (x.flatten(1) * 10.0 ** torch.linspace(-2, 2, N).unsqueeze(1)).float(), torch.ones(N)
    assert len(model.layers) == 9
    for clip in (1e-3, 0.1):
        whole = model.clipped_sum(theta, Shard(x, y, mask), clip, clipping=Clipping.parse(law))
        for k in range(N):
            less = Shard(x, y, mask.index_fill(0, torch.tensor(k), 0))
            gap = (whole - model.clipped_sum(theta, less, clip, clipping=Clipping.parse(law))).norm()
            assert 0.3 * clip < gap <= clip


def test_contracts_hold():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    torch.manual_seed(0)
    reports = checks.check(
        "small lstm", method=build("dp-fedgd"), models=[TorchModel(Small(), shape=(2, 2))], trials=checks.LEAST_TRIALS
    )
    assert [problem for report in reports for problem in report.problems] == []


def test_dropout_between_layers_is_drawn_and_not_compared():
    net = Reads(nn.GRU, num_layers=2, dropout=0.5)
    assert TorchModel(net, shape=(STEPS, 6)).random


def test_what_is_not_served_is_said():
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.cell(pack_sequence(list(x)))[1][0])

    with pytest.raises(SordinoError, match=r"nn.GRU must read one padded tensor"):
        TorchModel(Packs(), shape=(STEPS, 6))

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.stack([self.cell(row) for row in x]))

    with pytest.raises(SordinoError, match=r"nn.RNNCell must read one row per record"):
        TorchModel(Single(), shape=(6,))
