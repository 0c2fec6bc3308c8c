"""Sums of Gram, Hessian and Fisher matrices against autograd, record by record, and at the edges of floating point."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import grad, jacrev, vmap

from sordino.core import SAFETY, Shard
from sordino.models import linear
from sordino.models.linear import NUMERIC_LOSSES, Linear, Loss

CLIP = 0.6
OPTIONS = {
    "plain": {},
    "class weights": {"class_weights": torch.tensor([0.3, 2.0, 1.1])},
    "radius": {"radius": 1.4},
    "residual": {"residual": 0.4},
    "all": {"class_weights": torch.tensor([0.3, 2.0, 1.1]), "radius": 1.4, "residual": 0.4},
}
EACH = pytest.mark.parametrize(("kind", "bias"), [(k, b) for k in Loss for b in (True, False)])


def problem(kind, bias, *, m=6, lead=(), seed=0, **options):
    """A model, a theta and records of moderate length, in float64."""
    g = torch.Generator().manual_seed(seed)
    outputs = 3 if kind is Loss.SOFTMAX else 1
    if kind is Loss.LOGISTIC and options.get("class_weights") is not None:
        options["class_weights"] = options["class_weights"][:2]
    model = Linear(3, outputs, kind, bias, **options)
    theta = 0.7 * torch.randn(model.size, generator=g, dtype=torch.float64)
    x = torch.randn(*lead, m, 3, generator=g, dtype=torch.float64)
    x = x * 10 ** (0.3 * torch.randn(*lead, m, 1, generator=g, dtype=torch.float64))
    if kind is Loss.SQUARES:
        y = torch.randn(*lead, m, generator=g, dtype=torch.float64)
    else:
        y = torch.randint(max(outputs, 2), (*lead, m), generator=g)
    return model, theta, Shard(x, y, torch.ones(*lead, m, dtype=torch.float64))


def long(model, x):
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) if model.bias else x


def outer(rows):
    return rows.unsqueeze(-1) * rows.unsqueeze(-2)


def terms(name, model, theta, shard):
    """One matrix per record, by automatic differentiation of the loss without class weights; Mallows' weight is a
    function of x alone."""
    u = long(model, shard.x)
    if name == "gram":
        return outer(u)
    if name == "fisher":
        return outer(slopes(model, theta, shard))
    model = replace(model, class_weights=None)
    mallows = (model.radius / u.norm(dim=-1)).clamp_max(1).square()
    return vmap(jacrev(grad(model.loss)), (None, 0, 0))(theta, shard.x, shard.y) * mallows[:, None, None]


def relative(model, y):
    """The weight of each record's class over the largest weight."""
    if model.class_weights is None or model.kind in NUMERIC_LOSSES:
        return torch.ones(y.shape, dtype=torch.float64)
    return (model.class_weights.double() / model.class_weights.double().max())[y]


def total(matrices, clip, weights=1.0):
    """Each cut to Frobenius norm `clip`, then weighed by its class and added up."""
    norm = matrices.flatten(1).norm(dim=-1)
    factor = (clip * (1 - SAFETY) / norm).clamp_max(1) if math.isfinite(clip) else torch.ones_like(norm)
    return ((factor * weights)[:, None, None] * matrices).sum(0)


def summed(name, model, theta, shard, clip):
    if name == "gram":
        return model.gram_sum(shard, clip)
    return (model.curvature_sum if name == "curvature" else model.fisher_sum)(theta, shard, clip)


def agree(a, b, tolerance=1e-7):
    """The guard against rounding takes 2e-12 over |diag p - p p^T| off a cut softmax Hessian: 1e-8 at the most here."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


NAMES = ("gram", "curvature", "fisher")


# -------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@EACH
def test_sums_are_of_matrices_cut_one_by_one(kind, bias, options, name):
    model, theta, shard = problem(kind, bias, **options)
    matrices = terms(name, model, theta, shard)
    norms = matrices.flatten(1).norm(dim=-1)
    clip = float(norms.median())  # some are cut, some are not
    assert (norms < 0.99 * clip).any()
    for bound in (clip, math.inf):
        want = total(matrices, bound, relative(model, shard.y))
        assert agree(summed(name, model, theta, shard, bound), want)
        known = shard._replace(length=shard.x.norm(dim=-1))
        assert agree(summed(name, model, theta, known, bound), want), "a length computed beforehand changes nothing"
    cut = total(matrices, clip, relative(model, shard.y))
    assert not agree(summed(name, model, theta, shard, 2 * clip), cut), "doubled clip"
    whole = total(matrices, math.inf, relative(model, shard.y))
    assert not agree(whole * (clip * len(matrices) / whole.norm()).clamp_max(1), cut), "the sum cut as one"
    if options and name != "gram" and not (kind in NUMERIC_LOSSES and set(options) == {"class_weights"}):
        plain = summed(name, Linear(3, model.outputs, kind, bias), theta, shard, math.inf)
        unmoved = name == "curvature" and set(options) == {"residual"}  # a Hessian knows no bound on the residual
        assert agree(plain, whole) is unmoved


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@EACH
def test_products_build_no_hessian(kind, bias, options):
    model, theta, shard = problem(kind, bias, m=9, seed=1, **options)
    v = torch.randn(model.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for clip in (0.1, math.inf):
        want = model.curvature_sum(theta, shard, clip) @ v
        assert agree(model.curvature_times(theta, shard, clip, v), want, 1e-12)
    assert not agree(model.curvature_times(theta, shard, 0.1, v), want, 1e-12), "cut or not"


def test_a_poisson_hessian_beyond_the_cap_is_that_at_the_cap():
    """The loss goes on as a line there; e^cap is kept in its place, so that Newton steps stay short."""
    model = Linear(2, 1, Loss.POISSON, bias=False, cap=1.5)
    shard = Shard(torch.tensor([[3.0, 1.0]]).double(), torch.tensor([2.0]).double(), torch.ones(1).double())
    theta = torch.ones(2, dtype=torch.float64)
    want = math.exp(1.5) * outer(shard.x)[0]
    torch.testing.assert_close(model.curvature_sum(theta, shard, math.inf), want)
    below = model.curvature_sum(theta / 4, shard, math.inf)
    torch.testing.assert_close(below, math.exp(1.0) * outer(shard.x)[0])


# ------------------------------------------------------------------------------------------- leading axes and masks


def parts(shard, i):
    return Shard(shard.x[i], shard.y[i], shard.mask[i])


@pytest.mark.parametrize("name", [*NAMES, "times"])
@EACH
def test_clients_runs_and_worlds(kind, bias, name):
    options = OPTIONS["all"]
    model, one, shard = problem(kind, bias, lead=(4,), **options)
    _, _, worlds = problem(kind, bias, lead=(2, 4), **options)
    thetas = torch.stack([one, -one])
    v = torch.randn(2, 4, model.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value(theta, shard, direction):
        if name == "times":
            return model.curvature_times(theta, shard, CLIP, direction)
        return summed(name, model, theta, shard, CLIP)

    apart = [value(one, parts(shard, i), v[0, i]) for i in range(4)]
    assert agree(value(one, shard, v[0]), torch.stack(apart), 1e-12), "clients, one theta"
    own = torch.stack([one, -one, 2 * one, 0 * one])
    apart = [value(own[i], parts(shard, i), v[0, i]) for i in range(4)]
    assert agree(value(own, shard, v[0]), torch.stack(apart), 1e-12), "clients, each its own theta"
    if name != "gram":
        constant = kind is Loss.SQUARES and name != "fisher"  # a Hessian that knows no theta
        assert agree(value(own.flip(0), shard, v[0]), torch.stack(apart), 1e-12) is constant
        runs = torch.stack([value(thetas[r], shard, v[r]) for r in range(2)])
        assert agree(value(thetas.unsqueeze(1), shard, v), runs, 1e-12), "runs over the same clients"
    apart = torch.stack([value(thetas[r], parts(worlds, r), v[r]) for r in range(2)])
    assert agree(value(thetas.unsqueeze(1), worlds, v), apart, 1e-12), "every run its own data"


@pytest.mark.parametrize("name", [*NAMES, "times"])
@EACH
def test_masked_records_are_absent(kind, bias, name):
    model, theta, shard = problem(kind, bias, m=8)
    v = torch.randn(model.size, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    here = torch.tensor([0, 2, 3, 7])

    def value(shard):
        if name == "times":
            return model.curvature_times(theta, shard, CLIP, v)
        return summed(name, model, theta, shard, CLIP)

    mask = torch.zeros(8, dtype=torch.float64)
    mask[here] = 1
    few = Shard(shard.x[here], shard.y[here], mask[here])
    assert agree(value(shard._replace(mask=mask)), value(few), 1e-12)
    assert not agree(value(shard), value(few), 1e-12)
    padded = Shard(shard.x * mask[:, None], shard.y * mask.long(), mask, shard.x.norm(dim=-1) * mask)
    assert agree(value(padded), value(few), 1e-12), "with a bias, a row of zeros is not nothing"
    assert not value(shard._replace(mask=0 * mask)).any()


# ----------------------------------------------------------------------------------------------------- the bound

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
COUNT = 300


def alone(kind, bias, low, high, dtype, *, features=4, outputs=5, seed=0):
    """Clients of one record each, of length 10^low to 10^high, with logits from nothing to saturation."""
    g = torch.Generator().manual_seed(seed)
    model = Linear(features, outputs if kind is Loss.SOFTMAX else 1, kind, bias)
    x = torch.randn(COUNT, 1, features, generator=g, dtype=torch.float64)
    size = 10 ** (low + (high - low) * torch.rand(COUNT, 1, 1, generator=g, dtype=torch.float64))
    x = x / x.norm(dim=-1, keepdim=True) * size
    theta = torch.randn(COUNT, model.size, generator=g, dtype=torch.float64)
    z = model.logits(theta, x).abs().amax(-1)
    theta = theta * 10 ** (-2 + 4 * torch.rand(COUNT, 1, generator=g, dtype=torch.float64)) / z
    if kind is Loss.SQUARES:
        y = 10 ** (low + (high - low) * torch.rand(COUNT, 1, generator=g, dtype=torch.float64))
    else:
        y = torch.randint(max(model.outputs, 2), (COUNT, 1), generator=g)
    y = y.to(dtype) if y.is_floating_point() else y
    return model, theta.to(dtype), Shard(x.to(dtype), y, torch.ones(COUNT, 1, dtype=dtype))


def norms(sums):
    return sums.double().flatten(1).norm(dim=-1)


@DTYPES
@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e3])
@EACH
def test_no_record_exceeds_the_clip(kind, bias, clip, dtype):
    """|x| from 1e-6 to 1e8 and sure softmaxes: rounding of p - p^2 is amplified by |u|^2, and the guard covers it."""
    model, theta, shard = alone(kind, bias, -6, 8, dtype)
    for name in NAMES:
        found = norms(summed(name, model, theta, shard, clip))
        assert found.max() <= clip * (1 + 1e-4), name
        # The guard costs a float32 softmax 1e4 eps / |diag p - p p^T|, a part in 300 where p is even.
        assert found.max() >= clip * 0.99, f"{name}: the search came nowhere near the bound"
        assert norms(summed(name, model, theta, shard, 2 * clip)).max() > clip * (1 + 1e-4), "a doubled clip would show"
    v = torch.randn(COUNT, model.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    product = norms(model.curvature_times(theta, shard, clip, v))
    assert (product <= clip * (1 + 1e-4) * v.double().norm(dim=-1)).all()


def test_a_record_is_not_blurred_by_a_crowd_of_sure_ones():
    """float32: rounding in the sum of a thousand sure and long records must not add to what one more record moves."""
    m, worst = 1000, 0.0
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        model = Linear(4, 3, bias=False)
        u = torch.randn(4, generator=g)
        x = u / u.norm() * 10 ** (3 * torch.rand(1, generator=g)) * (1 + 0.1 * torch.rand(m, 1, generator=g))
        W = torch.randn(4, 3, generator=g)
        top = (x[0] @ W).sort().values
        W = W * (8 + 10 * torch.rand(1, generator=g)) / (top[-1] - top[-2])
        q = torch.linalg.qr(W)[0]
        x[-1] = u - q @ (q.T @ u)  # even odds, and so a Hessian of full norm
        x[-1] *= 1e3 / x[-1].norm()
        mask = torch.ones(m)
        whole = model.curvature_sum(W.flatten(), Shard(x, torch.zeros(m, dtype=torch.long), mask), 1.0)
        mask[-1] = 0
        fewer = model.curvature_sum(W.flatten(), Shard(x, torch.zeros(m, dtype=torch.long), mask), 1.0)
        worst = max(worst, float((whole.double() - fewer.double()).norm()))
    assert 0.99 < worst <= 1 + 1e-4


@pytest.mark.parametrize("clip", [1e-6, 1.0])
@EACH
def test_no_record_exceeds_the_clip_however_long(kind, bias, clip):
    """To the end of float32, where factors become subnormal and lose their digits."""
    for low in range(8, 37, 4):
        model, theta, shard = alone(kind, bias, low, min(low + 4, 37), torch.float32, seed=low)
        for name in NAMES:
            assert norms(summed(name, model, theta, shard, clip)).max() <= clip * (1 + 1e-4), (name, low)


@DTYPES
@EACH
def test_hessians_stay_positive_semi_definite(kind, bias, dtype):
    """sqrt(2) instead of 2 for a replaced record rests on it. Rounding is kept to a part in 1e4 of the clip."""
    model, theta, shard = alone(kind, bias, -6, 8, dtype)
    values = torch.linalg.eigvalsh(model.curvature_sum(theta, shard, 1.0).double())
    assert values.amin() >= -1e-4
    assert values.amax() > 0.5


@DTYPES
@pytest.mark.parametrize("clip", [CLIP, math.inf])
@EACH
def test_records_that_are_not_finite_say_nothing(kind, bias, clip, dtype):
    model, theta, shard = problem(kind, bias, m=8)
    x, theta = shard.x.to(dtype), theta.to(dtype)
    y = shard.y.to(dtype) if kind is Loss.SQUARES else shard.y
    good = Shard(x[3:], y[3:], torch.ones(5, dtype=dtype))
    x = x.clone()
    x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    v = torch.ones(model.size, dtype=dtype)
    for length in (None, x.norm(dim=-1)):
        bad = Shard(x, y, torch.ones(8, dtype=dtype), length)
        few = Shard(x[:3], y[:3], torch.ones(3, dtype=dtype), None if length is None else length[:3])
        for name in NAMES:
            assert agree(summed(name, model, theta, bad, clip), summed(name, model, theta, good, clip), tolerance), name
            assert not summed(name, model, theta, few, clip).any(), "exactly zero"
        products = (model.curvature_times(theta, each, clip, v) for each in (bad, good))
        assert agree(*products, tolerance)
        assert not model.curvature_times(theta, few, clip, v).any()


def test_labels_that_are_not_finite_say_nothing():
    model, theta, shard = problem(Loss.SQUARES, True)
    y = shard.y.clone()
    y[0], y[1] = math.nan, math.inf
    want = model.fisher_sum(theta, Shard(shard.x[2:], y[2:], shard.mask[2:]), CLIP)
    assert agree(model.fisher_sum(theta, shard._replace(y=y), CLIP), want, 1e-12)


def test_overflowing_logits_say_nothing():
    """float32, theta of 1e30: the logits of the first record overflow, those of the second do not."""
    for kind in Loss:
        model = Linear(2, 2 if kind is Loss.SOFTMAX else 1, kind, bias=False)
        theta = torch.full((model.size,), 1e30)
        x = torch.tensor([[1e10, 1e10], [1e-30, 2e-30]])
        shard = Shard(x, torch.tensor([0, 1]), torch.ones(2))
        second = Shard(x[1:], shard.y[1:], torch.ones(1))
        for name in ("curvature", "fisher"):
            got, want = (summed(name, model, theta, each, 1.0) for each in (shard, second))
            assert torch.isfinite(got).all()
            extra = (got - want).double().norm()
            assert extra <= 1 + 1e-4, "a bounded part, or none"


# ------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("name", NAMES)
@EACH
def test_sums_are_streamed(kind, bias, name, monkeypatch):
    """A chunk of records at a time: another chunk makes no difference, and no more than a chunk is ever held."""
    model, theta, shard = problem(kind, bias, m=50, **OPTIONS["all"])
    whole = summed(name, model, theta, shard, CLIP)
    held = []
    for helper in ("outer", "weighted_outer"):
        plain = getattr(linear, helper)
        monkeypatch.setattr(linear, helper, lambda rows, *a, f=plain: held.append(rows.shape[-2]) or f(rows, *a))
    for chunk in (1, 7, 25, 64):
        held.clear()
        monkeypatch.setattr(linear, "MATRIX_CHUNK_RECORDS", chunk)
        for each in (shard, shard._replace(length=shard.x.norm(dim=-1))):
            assert agree(summed(name, model, theta, each, CLIP), whole, 1e-12)
        assert max(held) == min(chunk, 50)
        assert len(held) == 2 * math.ceil(50 / chunk)


# --------------------------------------------------------------------------- gradients, weighted, bounded and scaled


def slopes(model, theta, shard):
    """One gradient per record without class weights: the residual is bounded first, then Mallows' weight."""
    model = replace(model, class_weights=None)
    g, length = vmap(grad(model.loss), (None, 0, 0))(theta, shard.x, shard.y), long(model, shard.x).norm(dim=-1)
    r = g.norm(dim=-1) / length  # a gradient is u (x) r
    return g * ((model.residual / r).clamp_max(1) * (model.radius / length).clamp_max(1).square()).unsqueeze(-1)


def by_autograd(model, theta, shard, clip, scale):
    rows = scale * slopes(model, theta, shard)
    bound = clip * (1 - SAFETY)
    factor = (bound / rows.norm(dim=-1, keepdim=True)).clamp_max(1) if math.isfinite(clip) else 1.0
    return ((shard.mask * relative(model, shard.y)).unsqueeze(-1) * factor * rows).sum(0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@EACH
def test_bounds_come_before_the_clip_and_weights_after_it(kind, bias, options):
    model, theta, shard = problem(kind, bias, m=9, **options)
    plain = Linear(3, model.outputs, kind, bias)
    same = not options or (kind in NUMERIC_LOSSES and set(options) == {"class_weights"})
    for clip in (CLIP, math.inf):
        want = by_autograd(model, theta, shard, clip, 1.0)
        assert agree(model.clipped_sum(theta, shard, clip), want, 1e-10)
        assert agree(plain.clipped_sum(theta, shard, clip), want, 1e-10) is same


@pytest.mark.parametrize("clip", [CLIP, math.inf])
@EACH
def test_gradients_are_scaled_before_they_are_clipped(kind, bias, clip):
    model, theta, shard = problem(kind, bias, m=9)
    shard = shard._replace(mask=(torch.arange(9) % 3 > 0).double())
    g = torch.Generator().manual_seed(4)
    scale = 10 ** torch.randn(model.size, generator=g, dtype=torch.float64)
    want = by_autograd(model, theta, shard, clip, scale)
    assert agree(model.clipped_sum(theta, shard, clip, scale), want, 1e-10)
    late = scale * model.clipped_sum(theta, shard, clip)
    assert agree(late, want, 1e-10) is (clip == math.inf), "clipped first, then scaled"
    ones = torch.ones_like(scale)
    assert agree(model.clipped_sum(theta, shard, clip, ones), model.clipped_sum(theta, shard, clip), 1e-12)
    clients = Shard(*(leaf.expand(3, *leaf.shape) for leaf in shard[:3]))
    scales = torch.stack([scale, ones, 1 / scale])
    apart = torch.stack([model.clipped_sum(theta, shard, clip, each) for each in scales])
    assert agree(model.clipped_sum(theta.expand(3, -1), clients, clip, scales), apart, 1e-10), "one scale a client"


@DTYPES
@EACH
def test_no_scaled_record_exceeds_the_clip(kind, bias, dtype):
    model, theta, shard = alone(kind, bias, -6, 8, dtype)
    g = torch.Generator().manual_seed(5)
    scale = (10 ** (2 * torch.randn(COUNT, model.size, generator=g, dtype=torch.float64))).to(dtype)
    scale = scale * (torch.rand(scale.shape, generator=g) < 0.8)
    for clip in (1e-3, 1.0, 1e3):
        found = norms(model.clipped_sum(theta, shard, clip, scale))
        assert 0.9 * clip <= found.max() <= clip
        assert norms(scale * model.clipped_sum(theta, shard, clip)).max() > clip


@pytest.mark.parametrize("clip", [CLIP, math.inf])
def test_a_record_too_long_that_says_nothing_harms_nobody(clip):
    """The square of 1e200 is infinite; times a residual of 0 it would be not a number."""
    model = Linear(2, 1, Loss.LOGISTIC, bias=False)
    x = torch.tensor([[1e200, 1e200], [0.5, -0.2]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64))
    theta = torch.tensor([1.0, 2.0], dtype=torch.float64)
    second = Shard(x[1:], shard.y[1:], shard.mask[1:])
    for scale in (torch.tensor([2.0, 0.3]), torch.tensor([2.0, 0.0])):
        scale = scale.double()
        want = model.clipped_sum(theta, second, clip, scale)
        assert want.any()
        torch.testing.assert_close(model.clipped_sum(theta, shard, clip, scale), want, rtol=1e-12, atol=0)
    squares = replace(model, kind=Loss.SQUARES)
    for y in (1e200, 0.0):  # a residual of zero, and one that overflows
        at = torch.tensor([1.0, 0.0], dtype=torch.float64)
        data = Shard(x, torch.tensor([y, 3.0], dtype=torch.float64), shard.mask)
        want = squares.clipped_sum(at, Shard(x[1:], data.y[1:], shard.mask[1:]), clip, scale)
        torch.testing.assert_close(squares.clipped_sum(at, data, clip, scale), want, rtol=1e-12, atol=0)
