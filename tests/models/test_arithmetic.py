"""The sensitivity of clipped sums in the arithmetic that runs: neighbours built so that rounding works against it."""

import math
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import arithmetic, per_example
from sordino.models.arithmetic import FLOAT32_TERMS, FLOAT64_TERMS, blank, exact_arithmetic, in_chunks, row_sums
from sordino.models.torch_model import TorchModel
from tests.support import tiers

CHUNK = 256  # rows that a CPU takes at once
LARGE = 1e5  # a record that is clipped


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def two_classes():
    """At theta = 0 the gradient of a record x, y is x / 2 (1, -1) or the reverse."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(net.weight)
    return net


def drifting(n, total, term=lambda value: 2 * value, step=CHUNK):
    """Records whose sum is 2^k + 1/2 with record 0 and 2^k - 1/2 without it, and then one small record per chunk.

    Small records add 0.6 u and -0.4 u in turn, where u is the spacing of float32 above 2^k: these round to 1/2 u and
    -1/2 u below 2^k, to u and 0 above it.

    total: the sum that is attacked; a large record adds about 1 to each coordinate.
    term: the x of a record that adds a given value, below the clip.
    """
    k = int(math.log2(0.55 * n))
    u = 2.0 ** (k - 23)
    x, y = torch.zeros(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    x[0] = LARGE
    each = abs(float(total(x.float(), y, torch.ones(n)).flatten()[0]))
    large = int((2**k + 0.5) / each)
    x[:large] = LARGE
    x[large] = term(2**k + 0.5 - large * each)
    heads = torch.arange(-(-(large + 1) // step) * step, n, step)
    x[heads[0::2]], x[heads[1::2]], y[heads[1::2]] = term(0.6 * u), term(0.4 * u), 1
    return x.float(), y


def moved(total, x, y):
    """How far the sum moves if record 0 leaves, and if its label changes."""
    mask = torch.ones(len(x))
    whole = total(x, y, mask).double()
    without, other = mask.clone(), y.clone()
    without[0], other[0] = 0, 1
    return float((whole - total(x, y, without).double()).norm()), float((whole - total(x, other, mask).double()).norm())


@pytest.mark.parametrize(
    ("n", "mode"),
    tiers(
        [(10_000, "tape"), (10_000, "two-pass"), (10_000, "vmap"), (100_000, "tape"), (100_000, "two-pass")],
        quick=3,
    ),
)
def test_rounding_of_later_rows_moves_nothing(n, mode, threads):
    flat, clip = TorchModel(two_classes(), mode=mode), math.sqrt(2)

    def total(*rows):
        return flat.clipped_sum(flat.init(), Shard(*rows), clip)

    leaves, changes = moved(total, *drifting(n, total))
    assert 0.999 * clip < leaves <= clip
    assert 1.998 * clip < changes <= 2 * clip


@pytest.mark.parametrize("scaled", [False, True])  # the head's own product, and the matrix of gradients
@pytest.mark.parametrize("n", tiers([10_000, 100_000], quick=1))
def test_nor_in_half_precision(n, scaled, threads):
    flat, clip = TorchModel(two_classes(), autocast=torch.bfloat16), math.sqrt(2)
    scale = torch.ones(2) if scaled else None

    def total(*rows):
        return flat.clipped_sum(flat.init(), Shard(*rows), clip, scale)

    leaves, changes = moved(total, *drifting(n, total))
    assert 0.99 * clip < leaves <= clip
    assert 1.98 * clip < changes <= 2 * clip


@pytest.mark.parametrize("n", tiers([10_000, 100_000], quick=1))
def test_nor_in_a_sum_of_outer_products(n, threads):
    """Terms g g^T are positive: small ones add 0.6 u, rounded to 1/2 u below 2^k and to u above it."""
    flat, clip = TorchModel(two_classes()), 2.0

    def total(*rows):
        return flat.fisher_sum(flat.init(), Shard(*rows), clip)

    x, y = drifting(n, total, term=lambda value: 2 * math.sqrt(value))
    heads = torch.arange(len(x) - len(x) % CHUNK, 0, -CHUNK)
    heads = heads[x[heads, 0] < 1]
    x[heads] = x[heads].max()
    leaves, _ = moved(total, x, y)
    assert 0.999 * clip < leaves <= clip


def test_nor_within_a_block(threads):
    """Within the rows of one float32 block, rounding does move the sum: by more than 1e-6, and less than SAFETY."""
    net, clip = two_classes(), math.sqrt(2)
    flat, worst = TorchModel(net, mode="tape"), 0.0
    for first in range(2, FLOAT32_TERMS):
        for u in (2.0**-23, 2.0**-22, 2.0**-21, 2.0**-20):
            x, y = torch.full((FLOAT32_TERMS, 1), 1e5), torch.zeros(FLOAT32_TERMS, dtype=torch.long)
            x[first::2], x[first + 1 :: 2], y[first + 1 :: 2] = 1.2 * u, 0.8 * u, 1
            worst = max(worst, moved(lambda *rows: flat.clipped_sum(flat.init(), Shard(*rows), clip), x, y)[0])
    assert worst <= clip


class Cancelling(nn.Module):
    """Two positions whose output gradients are opposite: a record adds the difference of two outer products."""

    def __init__(self, width=2):
        super().__init__()
        self.layer, self.read = nn.Linear(width, width, bias=False), nn.Linear(width, 2, bias=False)
        self.read.requires_grad_(False)

    def forward(self, x):
        z = self.layer(x)
        return self.read(z[:, 0] - z[:, 1])


@pytest.mark.parametrize("seed", range(4))
def test_positions_that_cancel(seed, threads):
    """The terms of one record are a thousand times as large as their sum, and as large as the clip times as many."""
    torch.manual_seed(seed)
    flat = TorchModel(Cancelling(), shape=(2, 2), mode="two-pass")
    theta, n, worst = torch.zeros(flat.size), 256, 0.0
    a = 1 + torch.rand(n, 1, 2)
    x = torch.cat([a, a * (1 + 1e-4 * torch.rand(n, 1, 2))], 1)
    x[0, 1] = 0  # this one does not cancel
    y, mask = torch.randint(0, 2, (n,)), torch.ones(n)
    for clip in (1e-3, 1e-4):
        for value in (1.0, 3.0, 7.0, 100.0):
            x[0, 0] = value * a[0, 0]
            leaves, changes = moved(
                lambda x, y, mask, clip=clip: flat.clipped_sum(theta, Shard(x, y, mask), clip), x.flatten(1), y
            )
            y[0] = 0
            worst = max(worst, leaves / clip, changes / clip / 2)
    assert 0.999 < worst <= 1
    assert mask.all()


def test_ghost_norms_hold_where_numbers_are_too_small_to_square():
    module, a, g = nn.Linear(3, 4), torch.full((2, 2, 3), 1e-23), torch.full((2, 2, 4), 1e18)
    a[1], g[1] = 1e-5, 1e-22
    use = per_example.Use(module, {"weight": "weight"}, a, g, True)
    exact = torch.bmm(g.double().mT, a.double()).square().sum((1, 2))
    assert (per_example.squares(use, 2) >= exact).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [100_003, 1_000_000])
def test_the_norm_of_a_long_row_is_an_upper_bound(kind, width):
    rows = torch.stack([torch.full((width,), v) for v in (1.0, 1 + 2**-7, 0.1, 1e-4, 1e-21, 3e-39)]).to(kind)
    exact, found = rows.double().square().sum(1), per_example.bound(rows)
    assert (found >= exact).all()
    assert (found[:4] <= exact[:4] * (1 + 1e-4)).all()


# ---------------------------------------------------------------------------------------------- the same for any data


@pytest.mark.parametrize("mode", ["tape", "two-pass", "vmap"])
def test_shapes_do_not_depend_on_the_mask(mode, monkeypatch):
    flat, shapes = TorchModel(two_classes(), mode=mode), []
    inner = flat._add
    monkeypatch.setattr(flat, "_add", lambda *given: (shapes.append(given[3].x.shape), inner(*given))[1])
    x, y = torch.randn(300, 1), torch.zeros(300, dtype=torch.long)
    for mask in (torch.ones(300), (torch.arange(300) % 3 == 0).float(), torch.zeros(300)):
        flat.clipped_sum(flat.init(), Shard(x, y, mask), 1.0)
    assert shapes == [(1, 256, 1), (1, 44, 1)] * 3


@pytest.mark.parametrize("mode", ["tape", "two-pass", "vmap"])
def test_masked_rows_say_nothing_and_data_stay_as_they_are(mode):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    flat = TorchModel(net, mode=mode)
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    mask = (torch.arange(40) % 2).float()
    want = flat.clipped_sum(flat.init(), Shard(x, y, mask), 0.5)
    for value in (0.0, 1e3, 1e30, math.inf, math.nan):
        held = torch.where(mask.bool().unsqueeze(1), x, value)
        kept = held.clone()
        assert torch.equal(flat.clipped_sum(flat.init(), Shard(held, y, mask), 0.5), want)
        assert torch.equal(held.nan_to_num(7), kept.nan_to_num(7))


def test_blank_keeps_every_bit_of_the_others():
    for kind in (torch.bfloat16, torch.float32, torch.float64):
        rows = torch.randn(6, 5).to(kind)
        rows[1], rows[4, 2] = math.nan, -math.inf
        kept = torch.tensor([True, False, True, True, False, True])
        want = rows.clone()
        want[~kept] = 0
        assert torch.equal(blank(rows, kept), want)
    wide = torch.ones(6, 1).expand(6, 5)
    assert torch.equal(blank(wide, kept).sum(1), 5.0 * kept)
    assert wide.all()


# ----------------------------------------------------------------------------------------------------- sums in blocks


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 48, 50])
def test_row_sums_agree_with_float64(groups, n):
    factor, rows = torch.rand(groups, n), torch.randn(groups, n, 7)
    have = row_sums(factor, rows)
    assert have.dtype is torch.float64
    torch.testing.assert_close(have, (factor.double().unsqueeze(2) * rows.double()).sum(1), rtol=0, atol=2e-5)


def test_many_chunks_are_added_in_two_levels(monkeypatch):
    seen, sums = [], torch.zeros(1, dtype=torch.float64)

    def total():
        return sums

    def add(into, rows):
        seen.append((into is total, rows.start, rows.stop))
        into().add_(rows.stop - rows.start)

    in_chunks(total, 10, 4, add)
    assert seen == [(True, 0, 4), (True, 4, 8), (True, 8, 10)]
    in_chunks(total, 2 * FLOAT64_TERMS + 1, 1, add)
    assert float(sums) == 10 + 2 * FLOAT64_TERMS + 1
    assert not any(direct for direct, *_ in seen[3:])
    in_chunks(total, 10**6, 2**14, lambda *_: None)
    for n, step in ((2**23, 1), (2**26, 2**14)):
        with pytest.raises(SordinoError, match="larger chunks"):
            in_chunks(total, n, step, add)


# ---------------------------------------------------------------------------------------------- settings of a process


def settings():
    matmul, names = torch.backends.cuda.matmul, ("bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction")
    newer = [torch.backends.mkldnn.matmul.fp32_precision, matmul.fp32_precision] if arithmetic._OWNERS else []
    return [torch.get_float32_matmul_precision(), *newer, *(getattr(matmul, f"allow_{name}") for name in names)]


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("mode", ["tape", "two-pass", "vmap"])
def test_settings_of_the_process_do_not_matter(precision, mode):
    torch.manual_seed(0)
    flat, seen = TorchModel(nn.Sequential(nn.Linear(64, 2)), shape=(64,), mode=mode), []

    def watched(*_):  # only now: a module that notes anything while it is checked is refused
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))

    flat.module.register_forward_pre_hook(watched)
    x, y, theta = torch.randn(64, 64), torch.randint(0, 2, (64,)), flat.init()
    shard = Shard(x, y, torch.ones(64))

    def results():
        seen.clear()
        found = (
            flat.clipped_sum(theta, shard, 0.1),
            flat.clipped_sum(theta, shard, 0.1, torch.ones_like(theta)),
            flat.fisher_sum(theta, shard, 0.1),
            flat.count_sum(theta, shard, torch.ones_like(theta)),
        )
        assert seen
        assert set(seen) == {("highest", False)}
        return found

    want, default = results(), settings()
    try:
        torch.set_float32_matmul_precision(precision)
        before = settings()
        assert before != default
        with torch.autocast("cpu", torch.bfloat16):
            have = results()
            assert torch.is_autocast_enabled("cpu")
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_settings_are_restored_by_the_last_to_leave():
    torch.set_float32_matmul_precision("medium")
    try:
        inside, leave = threading.Event(), threading.Event()

        def hold():
            with exact_arithmetic():
                inside.set()
                leave.wait(10)

        other = threading.Thread(target=hold)
        with exact_arithmetic():
            other.start()
            assert inside.wait(10)
        assert torch.get_float32_matmul_precision() == "highest"
        leave.set()
        other.join()
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(ValueError, match="fails"), exact_arithmetic():
            raise ValueError("fails")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_code_that_changes_settings_within_a_sum_is_refused():
    def set_autocast(on):
        torch.set_autocast_enabled("cpu", on)

    for change, undo in (
        (partial(torch.set_float32_matmul_precision, "medium"), partial(torch.set_float32_matmul_precision, "highest")),
        (partial(set_autocast, True), partial(set_autocast, False)),
    ):
        try:
            with pytest.raises(SordinoError, match="changed while a sum was computed"), exact_arithmetic(own_code=True):
                change()
            undo()
            with exact_arithmetic(own_code=True), exact_arithmetic():
                change()
                undo()
                torch.set_float32_matmul_precision("highest")
        finally:
            undo()


@pytest.mark.skipif(not arithmetic._OWNERS, reason="PyTorch before 2.9 has one interface only")
def test_settings_of_both_interfaces_at_once_are_restored():
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # `get_float32_matmul_precision` now fails
        with exact_arithmetic():
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", arithmetic.PRECISION_VARIABLES)
def test_variables_that_lower_precision_are_refused(name, monkeypatch):
    for value in ("", "0" if name.isupper() and "MODE" not in name else "STRICT"):
        monkeypatch.setenv(name, value)
        with exact_arithmetic():
            pass
    monkeypatch.setenv(name, "BF16" if "MODE" in name else "1")
    with pytest.raises(SordinoError, match=f"{name}: .* unset it"), exact_arithmetic():
        pass


# ----------------------------------------------------------------------------------------------------------- on a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@on_gpu
@pytest.mark.parametrize("mode", ["tape", "two-pass", "vmap"])
@pytest.mark.parametrize("step", [1, FLOAT32_TERMS, 256, 2**14])
@pytest.mark.parametrize("tf32", [False, True])
def test_rounding_moves_nothing_on_a_gpu(mode, step, tf32):
    flat, clip = TorchModel(two_classes(), mode=mode), math.sqrt(2)
    theta = flat.init().cuda()

    def total(*rows):
        return flat.clipped_sum(theta, Shard(*(t.cuda() for t in rows)), clip).cpu()

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        leaves, changes = moved(total, *drifting(300_000, total, step=step))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 0.999 * clip < leaves <= clip
    assert 1.998 * clip < changes <= 2 * clip


@on_gpu
@pytest.mark.parametrize("mode", ["tape", "two-pass", "vmap"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_processor_does_not_wait_for_the_gpu(mode, autocast):
    if mode == "two-pass" and autocast is not None:
        pytest.skip("two-pass does not serve autocast")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    flat = TorchModel(net, shape=(1, 8, 8), mode=mode, autocast=autocast)
    shard = Shard(torch.randn(50, 64).cuda(), torch.randint(0, 3, (50,)).cuda(), torch.ones(50).cuda())
    theta = flat.init().cuda()
    scale = torch.ones_like(theta)
    want = flat.clipped_sum(theta, shard, 0.1), flat.clipped_sum(theta, shard, 0.1, scale)  # compiles kernels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        have = flat.clipped_sum(theta, shard, 0.1), flat.clipped_sum(theta, shard, 0.1, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(have, want, strict=True))
