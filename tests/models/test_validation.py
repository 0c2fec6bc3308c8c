"""Losses by `torch.distributions`: single examples, and records outside the support, which must not end a run."""

import math
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import (
    Beta,
    Categorical,
    Distribution,
    Gamma,
    MixtureSameFamily,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
)
from torch.nn.functional import gaussian_nll_loss

from sordino.core import Blend, Shard
from sordino.errors import SordinoError
from sordino.models import probe, torch_model
from sordino.models.torch_model import TorchModel
from sordino.models.validation import unvalidated

sys.path.insert(0, str(Path(__file__).parent))
from test_torch_model import MODES, clipped, flat_theta

N = 6


@pytest.fixture(autouse=True)
def validating():
    """Distributions validate by default, which `torch.compile` ends for a whole process."""
    usual = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(usual)


def normal(z, y):
    return -Normal(z[:, 0], z[:, 1].exp()).log_prob(y)


def gamma(z, y):
    return -Gamma(z[:, 0].exp(), z[:, 1].exp()).log_prob(y)


def counts(z, y):
    return -Poisson(z[:, 0].exp()).log_prob(y)


def spread_counts(z, y):
    return -NegativeBinomial(z[:, 0].exp(), logits=z[:, 1]).log_prob(y)


def mixture(z, y):
    weights, means, scales = z.chunk(3, -1)
    return -MixtureSameFamily(Categorical(logits=weights), Normal(means, scales.exp())).log_prob(y)


def shares(z, y):
    return -Beta(z[:, 0].exp(), z[:, 1].exp()).log_prob(y)


LOSSES = {"normal": normal, "gamma": gamma, "counts": counts, "spread counts": spread_counts, "mixture": mixture}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)).double()


def records():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, generator=draw).double(), torch.randint(1, 5, (N,), generator=draw).double()


def naive(module, loss, x, y):
    """Gradients of one example after another, with the validation of `torch.distributions`."""
    rows, parameters = [], list(module.parameters())
    for k in range(len(x)):
        found = torch.autograd.grad(loss(module(x[k : k + 1]), y[k : k + 1]).sum(), parameters)
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("name", LOSSES)
def test_sums_agree_with_single_examples(name, mode):
    module, (x, y), weight = net(), records(), torch.linspace(1, 0.2, N).double()
    model, rows = TorchModel(module, loss=LOSSES[name], labels="numbers", mode=mode), naive(module, LOSSES[name], x, y)
    clip = 0.5 * float(rows.norm(dim=1).median())
    have = model.clipped_sum(flat_theta(module), Shard(x, y, weight), clip)
    torch.testing.assert_close(have, clipped(rows, clip, weight), rtol=1e-9, atol=1e-12)


def test_a_loss_of_shares_is_compared_with_shares():
    """Labels 0 and 1 have an infinite loss: the checks of a model take others."""
    model, (x, y) = TorchModel(net(), loss=shares, labels="numbers"), records()
    shard = Shard(x, y / 10, torch.ones(N).double())
    want = clipped(naive(net(), shares, x, y / 10), 0.1, torch.ones(N).double())
    torch.testing.assert_close(model.clipped_sum(flat_theta(net()), shard, 0.1), want, rtol=1e-9, atol=1e-12)


def test_a_loss_that_mixes_records_is_refused_outside_of_labels_zero_and_one():
    def mixed(z, y):
        return shares(z, y) + z.mean()

    with pytest.raises(SordinoError, match="depends on other records"):
        TorchModel(net(), loss=mixed, labels="numbers")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gamma", "counts", "spread counts"])
def test_a_record_outside_the_support_ends_nothing_and_keeps_the_clip(name, mode):
    module, (x, y) = net(), records()
    model, theta = TorchModel(module, loss=LOSSES[name], labels="numbers", mode=mode), flat_theta(module)
    without = torch.ones(N).double().index_fill(0, torch.tensor(2), 0)
    want = model.clipped_sum(theta, Shard(x, y, without), 0.1)
    for bad in (-3.0, 0.5, float("nan"), float("inf")):
        y[2] = bad
        assert torch.equal(model.clipped_sum(theta, Shard(x, y, without), 0.1), want)
        assert (model.clipped_sum(theta, Shard(x, y, torch.ones(N).double()), 0.1) - want).norm() <= 0.1
        model.loss(theta, x[2], y[2])
    y[2] = -3.0
    with pytest.raises(ValueError, match="support"):
        LOSSES[name](module(x), y)


@pytest.mark.parametrize("mode", MODES)
def test_a_record_outside_the_support_ends_no_sum_of_two_gradients(mode):
    module, (x, y) = net(), records()
    model, theta = TorchModel(module, loss=gamma, labels="numbers", mode=mode), flat_theta(module)
    blend, mask = Blend(0.9 * theta, (1.0, -0.5)), torch.ones(N).double()
    want = model.clipped_sum(theta, Shard(x, y, mask.index_fill(0, torch.tensor(2), 0)), 0.1, blend=blend)
    y[2] = -3.0
    assert (model.clipped_sum(theta, Shard(x, y, mask), 0.1, blend=blend) - want).norm() <= 0.1


def covariances(z):
    return z[:, :2].unsqueeze(-1) * z[:, :2].unsqueeze(-2) + torch.eye(2).to(z)


RAISING = {
    "covariances": lambda z, y: -MultivariateNormal(z[:, :2], covariance_matrix=covariances(z)).log_prob(z[:, 2:4]),
    "cholesky": lambda z, y: torch.linalg.cholesky(covariances(z)).sum((1, 2)),
    "inverse": lambda z, y: torch.linalg.inv(covariances(z)).sum((1, 2)),
    "solve": lambda z, y: torch.linalg.solve(covariances(z), z[:, :2]).sum(1),
    "eigenvalues": lambda z, y: torch.linalg.eigvalsh(covariances(z)).sum(1),
    "singular values": lambda z, y: torch.linalg.svdvals(covariances(z)).sum(1),
    "probabilities": lambda z, y: torch.nn.functional.binary_cross_entropy(
        z.sigmoid(), torch.ones_like(z), reduction="none"
    ).sum(1),
    "coins": lambda z, y: (torch.bernoulli(z.sigmoid()) * z).sum(1),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_fails_for_the_numbers_of_one_record_is_refused(name):
    if name in ("cholesky", "probabilities", "coins"):  # others fail for other numbers, or in other libraries
        with pytest.raises(RuntimeError):
            RAISING[name](torch.ones(3, 6).index_fill(0, torch.tensor(1), math.nan), torch.zeros(3))
    with pytest.raises(SordinoError, match=r"numbers of one row .*line \d+ of .*torch.linalg.cholesky_ex"):
        TorchModel(net(), loss=RAISING[name], labels="numbers")


def test_the_remedies_of_what_fails_are_served():
    def triangular(z, y):
        return -MultivariateNormal(z[:, :2], scale_tril=torch.linalg.cholesky_ex(covariances(z))[0]).log_prob(z[:, 2:4])

    def inverse(z, y):
        return torch.linalg.inv_ex(covariances(z))[0].sum((1, 2))

    for loss in (triangular, inverse):
        module, (x, y) = net(), records()
        model, theta, mask = TorchModel(module, loss=loss, labels="numbers"), flat_theta(module), torch.ones(N).double()
        want = model.clipped_sum(theta, Shard(x, y, mask.index_fill(0, torch.tensor(2), 0)), 0.1)
        x[2] = math.nan
        assert torch.equal(model.clipped_sum(theta, Shard(x, y, mask), 0.1), want)


def test_with_validation_a_loss_would_be_refused(monkeypatch):
    """Mutant: validation is left on, so that all records together decide whether the run goes on."""

    @contextmanager
    def nothing():
        yield

    monkeypatch.setattr(torch_model, "unvalidated", nothing)
    with pytest.raises(SordinoError, match="reads a number of its rows into Python"):
        TorchModel(net(), loss=normal, labels="numbers")


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: -Normal(z[:, 0], z[:, 1].exp(), validate_args=True).log_prob(y),
        lambda z, y: gaussian_nll_loss(z[:, 0], y, z[:, 1].exp(), reduction="none"),
    ],
)
def test_what_validates_all_the_same_is_refused_with_the_remedy(loss):
    remedy = r"validate_args=True of a distribution out.*gaussian_nll_loss, take -torch.distributions.Normal"
    with pytest.raises(SordinoError, match=remedy):
        TorchModel(net(), loss=loss, labels="numbers")


def test_the_remedy_has_the_gradients_of_the_loss_that_it_replaces():
    z, y = net()(records()[0]), records()[1]
    mean, var = z[:, 0], z[:, 1].exp()
    one = gaussian_nll_loss(mean, y, var, reduction="sum")
    other = -Normal(mean, var.sqrt()).log_prob(y).sum()
    for a, b in zip(*(torch.autograd.grad(each, (mean, var), retain_graph=True) for each in (one, other)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_module_may_draw_from_a_distribution():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(2, 2)

        def forward(self, x):
            mean, scale = self.body(x).chunk(2, -1)
            return self.head(Normal(mean, scale.exp()).rsample())

    model = TorchModel(Draws())
    assert model.random
    one = Shard(torch.randn(1, 4), torch.zeros(1), torch.ones(1))
    assert 0.999e-3 < model.clipped_sum(model.init(), one, 1e-3).norm() <= 1e-3


@pytest.mark.parametrize("before", [True, False])
def test_the_default_of_the_process_comes_back(before):
    usual = Distribution._validate_args
    Distribution.set_default_validate_args(before)
    try:
        seen = []

        @unvalidated()
        def fails():
            seen.append(Distribution._validate_args)
            raise KeyError

        with pytest.raises(KeyError):
            fails()
        assert seen == [False]
        assert Distribution._validate_args is before
        inside, leave = threading.Event(), threading.Event()

        def other():
            with unvalidated():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        with unvalidated():
            pass
        assert not Distribution._validate_args, "another thread is still inside"
        leave.set()
        thread.join()
        assert Distribution._validate_args is before
        probe.agrees(TorchModel(nn.Linear(4, 2)))
        assert Distribution._validate_args is before
    finally:
        Distribution.set_default_validate_args(usual)
