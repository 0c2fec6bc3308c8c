"""The compiled clipped sum: equal to float64, one record's share independent of everything else, and safe to load."""

import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Shard
from sordino.models import kernel
from sordino.models.linear import Linear, Loss

compiler = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler, and so no kernel")
SIZES = [(1, 1), (5, 2), (16, 10), (33, 3), (54, 1), (64, 11), (100, 5), (7, 64)]  # features, outputs


def lengths(model, x):
    return (x.double().square().sum(-1) + model.bias).sqrt().float()


def fast(model, theta, x, y, mask, clip, length=None):
    total = kernel.clipped_sum(
        theta,
        x,
        y,
        model._weighed(mask, Shard(x, y, mask)),
        lengths(model, x) if length is None else length,
        outputs=model.outputs,
        kind=model.kind,
        bias=model.bias,
        clip_bound=clip * (1 - SAFETY),
        radius=model.radius,
        residual=model.residual,
        cap=model.cap,
    )
    assert total is not None
    assert total.dtype == torch.float64
    return total


def slow(model, theta, x, y, mask, clip):
    return model.clipped_sum(theta.double(), Shard(x.double(), y, mask.double()), clip)


def problem(kind, features, outputs, rows, lead=(), seed=0):
    """A model, theta and records in float32: most masks are 1, lengths vary, and so do the signs of logits."""
    g = torch.Generator().manual_seed(seed)
    model = Linear(features, max(2, outputs) if kind is Loss.SOFTMAX else 1, kind)
    theta = torch.randn(*lead, model.size, generator=g) / features**0.5
    x = torch.randn(*lead, rows, features, generator=g) * torch.rand(*lead, rows, 1, generator=g) * 3
    y = torch.randint(0, max(2, model.outputs), (*lead, rows), generator=g)
    mask = (torch.rand(*lead, rows, generator=g) < 0.9).float()
    return model, theta, x, y, mask


def assert_near(model, theta, x, y, mask, clip):
    """Up to 1e-6 of the sum of the norms of all records' gradients."""
    total, want = fast(model, theta, x, y, mask, clip), slow(model, theta, x, y, mask, clip)
    each = slow(model, theta.unsqueeze(-2), x.unsqueeze(-2), y.unsqueeze(-1), mask.unsqueeze(-1), clip)
    assert total.shape == want.shape
    assert ((total - want).norm(dim=-1) <= 1e-6 * each.norm(dim=-1).sum(-1)).all()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------ the sums


@compiler
@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize(("features", "outputs"), SIZES)
def test_equals_float64(kind, features, outputs):
    for rows in (1, 15, 16, 17, 100, 2500):
        assert_near(*problem(kind, features, outputs, rows, seed=rows), 0.7)


@compiler
@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize("clip", [1e-6, 1.0, math.inf])
def test_every_option(kind, clip):
    model, theta, x, y, mask = problem(kind, 20, 4, 300)
    weights = torch.linspace(0, 3, max(2, model.outputs))
    for changed in (
        replace(model, class_weights=weights),
        replace(model, radius=2.0),
        replace(model, residual=0.3),
        replace(model, cap=0.5),
        replace(model, class_weights=weights, radius=2.0, residual=0.3),
        replace(model, bias=False, radius=2.0),
    ):
        assert_near(changed, theta[: changed.size], x, y, mask, clip)
        if kind is not Loss.SOFTMAX:
            numbers = y.float() * 1.0
            assert torch.equal(
                fast(changed, theta[: changed.size], x, numbers, mask, 1.0),
                fast(changed, theta[: changed.size], x, y, mask, 1.0),
            )


@compiler
def test_groups_and_strides():
    model, theta, x, y, mask = problem(Loss.SOFTMAX, 21, 5, 40, lead=(7,))
    total = fast(model, theta, x, y, mask, 1.0)
    alone = [fast(model, *parts, 1.0) for parts in zip(theta, x, y, mask, strict=True)]
    assert torch.equal(total, torch.stack(alone))
    shared = fast(model, theta[0], x, y, mask, 1.0)
    assert torch.equal(shared[3], fast(model, theta[0], x[3], y[3], mask[3], 1.0))
    runs = fast(model, theta, x[2], y[2], mask[2], 1.0)
    assert torch.equal(runs[4], fast(model, theta[4], x[2], y[2], mask[2], 1.0))
    wide = torch.full((40, 7, 30), math.nan)  # what lies between rows is not read into any sum
    wide[..., :21] = x.transpose(0, 1)
    view = wide.transpose(0, 1)[..., :21]
    assert torch.equal(fast(model, theta, view, y, mask, 1.0), total)


@compiler
@pytest.mark.parametrize("kind", list(Loss))
def test_scale_of_logits(kind):
    """Large logits are no NaN, and small residuals are kept."""
    model, theta, x, y, mask = problem(kind, 12, 3, 200)
    for scale in (1e-3, 10.0, 50.0):
        total, want = (f(model, theta * scale, x, y, mask, 1.0) for f in (fast, slow))
        assert (total - want).norm() <= 1e-4 * want.norm()


# ---------------------------------------------------------------------------------------------- one record, bit for bit


@compiler
@pytest.mark.parametrize("kind", list(Loss))
def test_a_record_adds_the_same_everywhere(kind, threads):
    """Whatever the position, the number of records, the threads, and what the masked records hold."""
    for features, outputs in ((54, 1), (33, 3), (64, 10), (7, 64)):
        model, theta, x, y, _ = problem(kind, features, outputs, 3000)
        model = replace(model, radius=4.0, residual=1.5)
        term = fast(model, theta, x[:1], y[:1], torch.ones(1), 0.5)
        assert term.norm() > 0
        for rows in (1, 2, 15, 16, 17, 100, 3000):
            for at in {0, 1, 7, 15, 16, rows // 2, rows - 1} & set(range(rows)):
                others = x[:rows].clone()
                others[::3], others[1::5] = math.nan, 3e38
                others[at] = x[0]
                labels, mask = y[:rows].clone(), torch.zeros(rows)
                labels[at], mask[at] = y[0], 1
                for count in (1, 2):
                    threads(count)
                    assert torch.equal(fast(model, theta, others, labels, mask, 0.5), term)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch has no OpenMP threads here")
def test_torchs_own_threads_are_found():
    """Else the kernel runs in one thread and is slower than two matrix products."""
    assert kernel._parallel() is not None


@compiler
def test_the_default_device_of_the_process_changes_nothing():
    """Memory that the kernel writes to lies on the CPU, also where torch makes tensors elsewhere."""
    case = problem(Loss.SOFTMAX, 5, 3, 40)
    want, length = fast(*case, 0.5), lengths(case[0], case[2])
    torch.set_default_device("meta")
    try:
        have = fast(*case, 0.5, length=length)
    finally:
        torch.set_default_device(None)
    assert torch.equal(have, want)


@compiler
def test_threads_change_nothing(threads):
    for lead, rows in (((), 20_000), ((9,), 2500), ((300,), 20)):
        model, theta, x, y, mask = problem(Loss.SOFTMAX, 40, 10, rows, lead)
        totals = []
        for count in (1, 2, 3, 8):
            threads(count)
            totals.append(fast(model, theta, x, y, mask, 1.0))
        assert all(torch.equal(total, totals[0]) for total in totals)


def drifting(rows, clip=1.0):
    """Records whose gradients, at theta = 0, sum in float32 to one unit more per pair where the first is present."""
    sums = np.cumsum(np.full(rows, clip * (1 - SAFETY), np.float32))
    k = int(np.log2(rows * 0.55))
    full = int(np.searchsorted(sums, clip * 2.0**k)) + 1
    unit = clip * 2.0 ** (k - 23)
    x, y = torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.int64)
    x[:full] = 1e5
    x[full::2] = 1.2 * unit
    x[full + 1 :: 2], y[full + 1 :: 2] = 0.8 * unit, 1
    return x, y


@compiler
@pytest.mark.parametrize("rows", [100_000, 1_000_000])
@pytest.mark.parametrize("outputs", [1, 2])
def test_one_record_moves_the_sum_by_one_clip(rows, outputs):
    model = Linear(1, outputs, Loss.LOGISTIC if outputs == 1 else Loss.SOFTMAX)
    x, y = drifting(rows)
    clip = float(outputs) ** 0.5
    theta, mask = torch.zeros(model.size), torch.ones(rows)
    total = fast(model, theta, x, y, mask, clip)
    absent, gone, other = mask.clone(), x.clone(), y.clone()
    absent[0], gone[0], other[0] = 0, 0, 1
    assert 0.99 * clip < (total - fast(model, theta, gone, y, absent, clip)).norm() <= clip
    assert 1.98 * clip < (total - fast(model, theta, x, other, mask, clip)).norm() <= 2 * clip


@compiler
@pytest.mark.parametrize("kind", list(Loss))
def test_the_clip_holds_at_every_scale(kind):
    model, theta, x, y, _ = problem(kind, 30, 6, 16)
    for exponent in range(-44, 39):
        for clip in (1e-6, 1.0, 1e6):
            row = (x[:1].double().sign() * 10.0**exponent / 2).float()
            for at in (theta, theta * 1e10, theta * 1e-20):
                assert fast(model, at, row, y[:1], torch.ones(1), clip).norm() <= clip


@compiler
@pytest.mark.parametrize("kind", list(Loss))
def test_unusable_records_add_exactly_zero(kind):
    model, theta, x, y, mask = problem(kind, 30, 6, 40)
    length, bad = lengths(model, x), 18
    mask[bad] = 0
    want = fast(model, theta, x, y, mask, 1.0, length)
    mask[bad] = 1

    def changed(row=None, label=None, weight=1.0, size=None):
        x2, y2, mask2, length2 = x.clone(), y.float(), mask.clone(), length.clone()
        x2[bad] = x[bad] if row is None else row
        y2[bad] = y[bad] if label is None else label
        mask2[bad], length2[bad] = weight, length[bad] if size is None else size
        return fast(model, theta, x2, y2, mask2, 1.0, length2)

    assert not torch.equal(changed(), want)
    for value in (math.nan, math.inf, -math.inf):
        one = x[bad].clone()
        one[29] = value
        assert torch.equal(changed(one), want)
        assert torch.equal(changed(torch.full_like(one, value)), want)
        assert torch.equal(changed(size=value), want)
        assert torch.equal(changed(label=value), want)
        assert torch.equal(changed(weight=value), want)
    huge = torch.full_like(x[bad], 3e38)  # finite, but the factor is below the normal range
    assert torch.equal(changed(huge, size=math.inf), want)
    assert torch.equal(changed(huge, size=3.4e38), want)
    assert torch.equal(changed(size=-1.0), want)
    if kind is Loss.SOFTMAX:
        for label in (-1, 6, 0.5, 1e30):
            assert torch.equal(changed(label=label), want)


@compiler
def test_empty_values():
    model, theta, x, y, mask = problem(Loss.SOFTMAX, 30, 6, 40)
    assert torch.equal(fast(model, theta, x, y, mask * 0, 1.0), torch.zeros(model.size).double())
    zero = fast(replace(model, bias=False), theta[:180], x * 0, y, mask, 1.0)
    assert torch.equal(zero, torch.zeros(180).double())
    never = fast(model, theta * math.nan, x, y, mask, 1.0)
    assert torch.equal(never, torch.zeros(model.size).double())


@compiler
def test_subnormal_numbers_stay_with_the_caller():
    model, theta, x, y, mask = problem(Loss.SOFTMAX, 30, 6, 40)
    assert torch.isfinite(fast(model, theta, x * 1e-42, y, mask, 1.0)).all()
    assert float(torch.tensor(1e-30) * torch.tensor(1e-10)) > 0


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, before and after which the kernel is loaded anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel._library.cache_clear()
    yield tmp_path / "sordino"
    kernel._library.cache_clear()


def attempt():
    model, theta, x, y, mask = problem(Loss.SOFTMAX, 5, 3, 10)
    options = {"outputs": 3, "kind": "softmax", "bias": True, "clip_bound": 1.0}
    return kernel.clipped_sum(theta, x, y, mask, lengths(model, x), **options)


@compiler
def test_what_is_not_covered(monkeypatch):
    model, theta, x, y, mask = problem(Loss.SOFTMAX, 6, 3, 10)
    length, options = lengths(model, x), {"outputs": 3, "kind": "softmax", "bias": True, "clip_bound": 1.0}
    usual = (theta, x, y, mask, length)
    assert kernel.clipped_sum(*usual, **options) is not None
    assert kernel.clipped_sum(*usual, **options, cap=89.0) is None
    assert kernel.clipped_sum(*usual, **options | {"kind": "hinge"}) is None
    assert kernel.clipped_sum(*usual, **options | {"bias": False}) is None  # theta has another size
    for i in (0, 1, 3, 4):
        assert kernel.clipped_sum(*(t.double() if i == j else t for j, t in enumerate(usual)), **options) is None
    assert kernel.clipped_sum(theta, x.T.contiguous().T, y, mask, length, **options) is None
    assert kernel.clipped_sum(theta.clone().requires_grad_(), *usual[1:], **options) is None
    assert kernel.clipped_sum(theta, x[:0], y[:0], mask[:0], length[:0], **options) is None
    many = torch.zeros(7 * 65)
    assert kernel.clipped_sum(many, *usual[1:], **options | {"outputs": 65}) is None
    monkeypatch.setenv("SORDINO_KERNEL", "0")
    assert kernel.clipped_sum(*usual, **options) is None


def test_without_a_compiler(fresh, monkeypatch, logged):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert attempt() is None
    assert attempt() is None
    [(level, text)] = logged  # said once
    assert level == "DEBUG"
    assert "compiler" in text
    kernel._library.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh.parent))
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert attempt() is None
    assert not list(fresh.glob("*")) if fresh.exists() else True


@compiler
def test_a_library_is_compiled_once_and_trusted_only_if_its_own(fresh):
    """A library is compiled once, and one that others could have written is not loaded."""
    assert attempt() is not None
    (path,) = fresh.iterdir()
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    made = path.stat().st_mtime_ns

    def again():
        kernel._library.cache_clear()
        return attempt()

    assert again() is not None
    assert path.stat().st_mtime_ns == made
    path.chmod(0o620)
    assert again() is None
    path.chmod(0o602)
    assert again() is None
    path.chmod(0o600)
    fresh.chmod(0o770)
    assert again() is None
    fresh.chmod(0o700)
    assert again() is not None
    path.rename(fresh.parent / "elsewhere.so")
    path.symlink_to(fresh.parent / "elsewhere.so")
    assert again() is None
    path.unlink()
    assert again() is not None


@compiler
def test_a_damaged_library_is_not_used(fresh):
    kernel._compiled().write_bytes(b"no library")
    assert attempt() is None


@compiler
def test_a_library_that_computes_something_else_is_refused(fresh, monkeypatch, tmp_path):
    source, path = tmp_path / "wrong.c", tmp_path / "wrong.so"
    source.write_text("void clipped_sum(void *job) { (void)job; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    monkeypatch.setattr(kernel, "_compiled", lambda: path)
    assert attempt() is None


def test_both_sources_agree_on_sizes():
    """kernel.c has arrays of these sizes, and kernel.py decides what reaches them."""
    source = Path(kernel.__file__).with_name("kernel.c").read_text()
    for name, value in (("TILE", kernel.TILE), ("MOST", kernel.MOST_OUTPUTS)):
        assert re.search(rf"enum {{.*\b{name} = {value}[,; ]", source), name
    assert f"#define FAR {kernel.FAR:.0e} ".replace("+", "") in source
    vectors = re.findall(r"LANES = (\d+), VECTORS = (\d+)", source)
    assert len(vectors) == 3
    for lanes, count in vectors:  # few outputs: two blocks at once
        assert kernel.WIDEST_BLOCK % (int(lanes) // 2 * int(count) * 2) == 0


@compiler
@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vectors(fresh, monkeypatch, lanes):
    """What a processor with shorter vectors runs (4 lanes: aarch64)."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -DLANES_{lanes}")
    for kind in Loss:
        for features, outputs in SIZES:
            assert_near(*problem(kind, features, outputs, 100), 0.7)
    test_a_record_adds_the_same_everywhere(Loss.SOFTMAX, lambda count: None)
