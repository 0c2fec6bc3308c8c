"""Networks whose rows meet only for rare numbers, for many rows, or after many passes."""

import pytest
import torch
from torch import nn

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import probe, watch
from sordino.models.owners import Owners
from sordino.models.torch_model import TorchModel
from sordino.models.watch import changes, operations, own_code, state

OUTSIDE = []


class Own(nn.Module):
    """A network with a step of its own before its layers."""

    def __init__(self, step, **held):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.held = step, held
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(self.step(x))


RARE = {
    "the largest number decides": lambda x: torch.where(x.abs().amax() > 1e4, -x, x),
    "as a factor": lambda x: x * (1 - 2 * (x.abs().amax() > 1e4).to(x.dtype)),
    "scaled by a batch that exceeds 255": lambda x: 255 * x / x.nan_to_num().amax().clamp(min=255.0),
    "a number in a narrow band": lambda x: torch.where(((x > 0.31) & (x < 0.32)).any(), -x, x),
    "a rank": lambda x: x + (x.argsort(0)[:, :1] > 5).to(x.dtype),
    "in place": lambda x: x.clone().mul_(torch.where(x.sum(0) > 1e5, 2.0, 1.0)),
    "by a view": lambda x: _through_a_view(x),
    "a product of rows": lambda x: x + 0 * torch.relu(x @ x.T - 1e6).sum(1, keepdim=True) @ torch.ones(1, 5),
}


def _through_a_view(x):
    both = torch.zeros(len(x), 6)
    both[:, :5].copy_(x)
    both[:, 5] = (x.amin() < -1e4).to(x.dtype)
    return both[:, :5] * (1 - 2 * both[:, 5:])


@pytest.mark.parametrize("name", RARE)
def test_rows_that_meet_for_rare_numbers_are_refused(name):
    with pytest.raises(SordinoError, match="its output for one row depends on the other rows"):
        TorchModel(Own(RARE[name]), shape=(5,))


APART = {
    "its own numbers": lambda x: torch.where((x.abs().amax(1, keepdim=True) > 1e4), -x, x),
    "a softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "other axes": lambda x: x.reshape(-1, 5, 1).transpose(0, 1).flip(0).transpose(0, 1).reshape(-1, 5),
    "positions": lambda x: x + torch.arange(5.0) + torch.zeros_like(x).cumsum(1),
    "sorted": lambda x: x.sort(1).values.cumsum(1) + x.median(1, keepdim=True).values,
    "chosen": lambda x: x.gather(1, x.argsort(1)) + x[:, [4, 3, 2, 1, 0]],
    "joined": lambda x: torch.cat([x[:, :2], x[:, 2:].exp().log()], 1) + torch.stack([x, x], 2).mean(2),
    "normed": lambda x: nn.functional.layer_norm(x, (5,)) + x / x.norm(dim=1, keepdim=True).clamp(min=1e3),
    "rows by turns": lambda x: torch.stack([row / (1 + row.abs().amax()) for row in x]),
    "in place": lambda x: x.clone().mul_(2).add_(x),
}


@pytest.fixture(params=["computed", "without numbers"])
def many_rows(request, monkeypatch):
    """How passes over many rows are tried: those of a large network are not computed."""
    if request.param == "without numbers":
        monkeypatch.setattr(probe, "MOST_PRODUCTS", 0)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_trained(name):
    model = TorchModel(Own(APART[name]), shape=(5,))
    assert (
        model.clipped_sum(model.init(), Shard(torch.rand(4, 5), torch.zeros(4).long(), torch.ones(4)), 1.0)
        .isfinite()
        .all()
    )


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("most", [3, 16, 200])
def test_a_branch_on_the_number_of_rows_is_refused(most):
    with pytest.raises(SordinoError, match=r"in another way for few rows than for many .*mean"):
        TorchModel(Own(lambda x: x - x.mean(0) if len(x) > most else x), shape=(5,))


def test_passes_over_many_rows_are_computed_for_small_networks_alone(monkeypatch):
    numbers = []
    computed = watch.computed_operations
    monkeypatch.setattr(watch, "computed_operations", lambda *given: numbers.append(given[2]) or computed(*given))
    TorchModel(Own(torch.tanh), shape=(5,))
    assert numbers == [3, 65, 1025]
    monkeypatch.setattr(probe, "MOST_PRODUCTS", 75 * 5 * (3 + 65 + 1025) - 1)  # it has 75 parameters
    TorchModel(Own(torch.tanh), shape=(5,))
    assert numbers == [3, 65, 1025]


def test_a_small_network_whose_pass_fails_is_followed_without_numbers():
    def few(x):
        if len(x) > 1000:
            raise RuntimeError("too many")
        return x - x.mean(0) if len(x) > 16 else x

    with pytest.raises(SordinoError, match=r"in another way for few rows than for many .*mean"):
        TorchModel(Own(few), shape=(5,))


def counted():
    calls = [0]

    def step(x):
        calls[0] += 1
        return x - x.mean(0) if calls[0] > 1000 else x

    return step


def listed(held):
    def step(x):
        held.append(x.detach().mean(0))
        return x - held[0] if len(held) > 1000 else x

    return step


def outside(x):
    OUTSIDE.append(x.detach().mean(0))
    return x - OUTSIDE[0] if len(OUTSIDE) > 1000 else x


class Remembers:
    def __init__(self):
        self.mean = 0.0

    def __call__(self, x):
        self.mean = self.mean + 1e-9 * float(len(x))
        return x - self.mean


@pytest.mark.parametrize(
    "step", [counted(), listed([]), outside, Remembers()], ids=["closure", "list", "global", "object"]
)
def test_what_a_network_keeps_outside_of_tensors_is_refused(step):
    with pytest.raises(SordinoError, match=r"second pass over the same rows .* changed"):
        TorchModel(Own(step), shape=(5,))


class Centres(nn.Linear):
    """Keeps the mean of the last rows in training, and reads it in evaluation, where scores are published exactly."""

    last = 0.0

    def forward(self, x):
        if not self.training:
            return super().forward(x) - self.last
        self.last = x.detach().mean()
        return super().forward(x)


def test_what_training_leaves_for_evaluation_is_refused():
    with pytest.raises(SordinoError, match="a pass over other rows in training changed the outputs in evaluation"):
        TorchModel(Centres(5, 3), shape=(5,))


class Overwrites(nn.Linear):
    def forward(self, x):
        self.last = x.detach()
        return super().forward(x)


def test_an_attribute_that_no_pass_reads_is_let_through():
    TorchModel(Overwrites(5, 3), shape=(5,))


def test_what_a_loss_keeps_is_refused():
    losses = []

    def loss(z, y):
        losses.append(1)
        each = nn.functional.cross_entropy(z, y, reduction="none")
        return each * len(losses) if len(losses) > 1000 else each

    with pytest.raises(SordinoError, match=r"second pass over the same rows .*loss"):
        TorchModel(nn.Linear(5, 3), shape=(5,), loss=loss)


def test_a_loss_that_looks_at_other_records_for_rare_numbers_is_refused():
    def loss(z, y):
        each = nn.functional.cross_entropy(z, y, reduction="none")
        return each * torch.where(z.detach().abs().amax() > 1e5, 2.0, 1.0)

    with pytest.raises(SordinoError, match=r"^loss: that of one record depends on other records"):
        TorchModel(nn.Linear(5, 3), shape=(5,), loss=loss)


def test_owners_of_operations():
    with Owners() as owners:
        x = torch.arange(12.0).reshape(3, 4)
        owners.mark(x)
        assert owners.of(x.sum(1)).tolist() == [0, 1, 2]
        assert set(owners.of(x.amax(0)).flatten().tolist()) == {100}
        assert owners.of(x[1]).tolist() == [1] * 4
        assert owners.of(x.t()[0]).tolist() == [0, 1, 2]
        assert owners.of(torch.cat([x[1:], x[:1]])).tolist() == [[1] * 4, [2] * 4, [0] * 4]
        assert not owners.apart(x.flip(0))
        assert owners.of(torch.zeros_like(x)) is None
        y = x.clone()
        y[0] = x[2]
        y[1].zero_()
        assert owners.of(y)[:, 0].tolist() == [2, -1, 2]
        assert owners.apart(x @ torch.ones(4, 2))
        assert not owners.apart(torch.ones(3, 3) @ x)


def test_only_code_beyond_the_layers_of_pytorch_is_followed():
    plain, hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))
    assert not own_code(plain)
    hooked[0].register_forward_hook(lambda *_: None)
    assert own_code(hooked)
    assert own_code(Own(torch.tanh))


def test_a_pass_without_numbers_leaves_nothing_behind():
    module = Own(torch.tanh)
    before = state(module)
    assert operations(lambda x: module(x), torch.zeros(3, 5), 1000) == operations(
        lambda x: module(x), torch.zeros(3, 5), 3
    )
    assert operations(lambda x: x.numpy(), torch.zeros(3, 5), 3) is None
    assert not changes(before, state(module))


def test_bytes_of_numbers_are_refused_with_a_remedy():
    def by_bytes(x):
        return x + 0 * x.contiguous().view(torch.int8).to(x).sum(-1, keepdim=True)

    with pytest.raises(SordinoError, match=r"another size, as x\.view\(torch\.int8\) does.*convert them"):
        TorchModel(Own(by_bytes))
    TorchModel(Own(lambda x: x + 0 * x.to(torch.int8).to(x)))
