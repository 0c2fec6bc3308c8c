"""Many softmax models over the same records: the sums of single runs, and the clip of every record."""

import math

import pytest
import torch

from sordino.core import SAFETY, Shard
from sordino.models import softmax_batched
from sordino.models.linear import Linear
from sordino.models.softmax_batched import PAIRS, clipped_sums, digits

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
RUNS, CLASSES, FEATURES = 5, 4, 7


def records(n=200, device="cpu", size=1.0):
    torch.manual_seed(0)
    x = (size * torch.randn(n, FEATURES)).to(device)
    return Shard(x, torch.randint(CLASSES, (n,)).to(device), torch.rand(n).to(device))


def sums(theta, shard, clip):
    """The wide products, on a CPU as well."""
    model = Linear(FEATURES, CLASSES)
    return clipped_sums(theta, shard, model._length(shard), clip * (1 - SAFETY), CLASSES)


def thetas(device="cpu", size=1.0):
    torch.manual_seed(1)
    return (size * torch.randn(RUNS, (FEATURES + 1) * CLASSES)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [0.3, 1e3, math.inf])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_the_sums_are_those_of_single_runs(device, clip, size, monkeypatch):
    monkeypatch.setitem(softmax_batched.CHUNK_NUMBERS, device, 512 * RUNS * CLASSES)
    shard, theta = records(1100, device, size), thetas(device)
    want = torch.stack([Linear(FEATURES, CLASSES).clipped_sum(each, shard, clip) for each in theta])
    have = sums(theta, shard, clip)
    assert have.dtype is torch.float64
    torch.testing.assert_close(have, want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4, 1e15, 1e30])
def test_one_record_keeps_the_clip(device, size):
    """And reaches it: the bound is enforced, and no more is lost than the margin."""
    shard = records(300, device, size)
    clip, theta, largest = 0.5, thetas(device), 0.0
    for j in range(40):
        one = sums(theta, Shard(*(t[j : j + 1] for t in shard[:2]), torch.ones(1, device=device)), clip)
        largest = max(largest, float(one.norm(dim=1).max()))
    assert largest <= clip
    assert largest > 0.99 * clip


@pytest.mark.parametrize("device", DEVICES)
def test_records_that_are_not_finite_count_for_nothing(device):
    shard, theta = records(50, device), thetas(device)
    want = sums(theta, shard._replace(mask=shard.mask * (torch.arange(50, device=device) > 2)), 1.0)
    for k, value in enumerate((math.nan, math.inf, -math.inf)):
        shard.x[k, k] = value
    torch.testing.assert_close(sums(theta, shard, 1.0), want, rtol=0, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_record_changes_no_other_on_a_gpu():
    """Sums with and without a record differ by its own term, up to rounding in float64."""
    shard, theta = records(5000, "cuda"), thetas("cuda")
    alone = Shard(*(t[7:8] for t in shard[:3]))
    rest = shard._replace(mask=shard.mask * (torch.arange(5000, device="cuda") != 7))
    moved = sums(theta, shard, 0.1) - sums(theta, rest, 0.1)
    torch.testing.assert_close(moved, sums(theta, alone, 0.1), rtol=0, atol=1e-6)
    assert float(moved.norm(dim=1).max()) <= 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_records_that_are_not_held_give_the_same_sums(device, monkeypatch):
    shard, theta = records(700, device), thetas(device)
    want = sums(theta, shard, 0.4)
    monkeypatch.setattr(softmax_batched, "HELD_NUMBERS", 0)
    assert torch.equal(sums(theta, shard, 0.4), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_prepared_records_give_the_same_sums():
    model, shard, theta = Linear(FEATURES, CLASSES), records(300, "cuda"), thetas("cuda")
    f = model.summing(shard, 0.4, RUNS)
    assert torch.equal(f(theta), model.clipped_sum(theta, shard, 0.4))
    assert torch.equal(f(2 * theta), model.clipped_sum(2 * theta, shard, 0.4))


def test_digits_add_up():
    torch.manual_seed(0)
    t = torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    assert torch.equal(sum(part.double() for part in digits(t)), t.double())


def test_products_of_digits_have_the_precision_of_float32():
    """Pairs that are left out are below the last digit; without one that is kept (the mutant), they are not."""
    torch.manual_seed(0)
    a, b = torch.randn(50, 64), torch.randn(64, 30)
    exact, whole = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def error(pairs):
        product = sum(digits(a)[i].double() @ digits(b)[k].double() for i, k in pairs)
        return float(((product - exact).abs() / whole).max())

    assert error(PAIRS) < 2.0**-23
    assert all(error([pair for pair in PAIRS if pair != gone]) > 2.0**-23 for gone in PAIRS)
