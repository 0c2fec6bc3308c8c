"""SumFinding in the arithmetic that ships: float32 records, neighbours built against one float32 accumulator."""

import pytest
import torch

from sordino.checks import check_sums
from sordino.checks.sums import OneAccumulator, SumFinding, findings, graph_kinds, kinds, pair, sums
from sordino.core import Centre, Shard
from sordino.models import cuda_graphs, kernel
from sordino.models.linear import Linear, Loss

QUERIES = 14
COMPILED = {"logistic gradient", "softmax gradient", "gradient of two runs", "centred gradient"}


ROWS = (10_000, 100_000)


def test_one_record_moves_no_sum_further_than_claimed():
    found = list(sums(rows=ROWS))
    assert len(found) == 2 * QUERIES
    for each in found:
        assert 0.99 < each.reached <= 1, each


def test_nor_without_the_compiled_kernel(monkeypatch):
    """The sums that ask for it; the others are the same without it."""
    asked, found = [], []
    monkeypatch.setattr(kernel, "clipped_sum", lambda *args, **kwargs: asked.append(args))
    for name, semidefinite, total in kinds(lambda linear: linear, "cpu"):
        asked.clear()
        total(pair(1_000, 1.0, 1.0, semidefinite, 1, "cpu"))
        if asked:
            found += findings(name, semidefinite, total, ROWS)
    assert len(found) == 2 * len(COMPILED)
    assert {each.query for each in found} == COMPILED
    for each in found:
        assert 0.99 < each.reached <= 1, each


def test_the_twin_with_one_float32_accumulator_is_rejected():
    found = {each.query: each.reached for each in sums(OneAccumulator, rows=(10_000,))}
    assert len(found) == QUERIES
    assert min(found.values()) > 1.5
    assert SumFinding("gram", "add-remove", 10, 1.5).problems


@pytest.mark.parametrize("model", [Linear(1, 2), OneAccumulator(Linear(1, 2))])
def test_sums_that_a_gpu_replays_are_searched_and_their_mutant_is_found(model, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CapturedGraph", lambda f, inputs, **how: lambda at: f(*at))  # needs a GPU
    centre = Centre(torch.zeros(1), torch.full((1,), 2.0))
    for kind in graph_kinds(model, torch.zeros(4), centre):
        for found in findings(*kind, rows=(10_000,)):
            assert 0.99 < found.reached <= 1 if isinstance(model, Linear) else found.reached > 1.5, found


def test_reports_name_what_was_checked():
    reports = check_sums(rows=(1_000,))
    assert len(reports) == 2 * 2 * QUERIES, "one thread and two"
    assert all(report.passed for report in reports)


@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1e10, 1e20, 1e38, 1e200])
def test_a_record_of_zeros_says_nothing_whatever_its_weight(kind, dtype, weight):
    """Without a bias its gradient is zero; an overflow beside it made the whole sum NaN."""
    outputs = 2 if kind is Loss.SOFTMAX else 1
    x = torch.randn(5, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    classes = kind in (Loss.SOFTMAX, Loss.LOGISTIC)
    y = torch.tensor([0, 1, 0, 1, 0])
    model = Linear(3, outputs, kind, bias=False)
    if classes:
        model = Linear(3, outputs, kind, bias=False, class_weights=torch.tensor([weight, weight], dtype=torch.float64))
    else:
        y = y.to(dtype)
        y[2] = min(weight, torch.finfo(dtype).max)
    x[2] = 0
    theta, mask = torch.zeros(model.size, dtype=dtype), torch.ones(5, dtype=dtype)
    for scale in (None, torch.ones(model.size, dtype=dtype)):
        whole = model.clipped_sum(theta, Shard(x, y, mask), 1.0, scale)
        mask_two = mask.clone()
        mask_two[2] = 0
        assert torch.isfinite(whole).all()
        assert torch.equal(whole, model.clipped_sum(theta, Shard(x, y, mask_two), 1.0, scale))
