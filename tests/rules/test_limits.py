"""Keeping g + b within a ball: a projection moves no further than g does; the paper's rescaling moves without bound."""

import math

import numpy as np
import pytest
import torch

from sordino.core import SAFETY
from sordino.rules.limits import LIMITS, projected, rescaled


def pairs(count=4000, d=3, seed=0):
    """g, a neighbour of it, and b, of many sizes."""
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(-2, 2, size=(3, count, 1))
    g, b = (torch.from_numpy(rng.normal(size=(count, d)) * s) for s in size[:2])
    return g, g + torch.from_numpy(rng.normal(size=(count, d)) * size[2]), b


def test_what_is_too_long_is_shortened():
    g, _, b = pairs()
    limit = 1.5
    v, got = g + b, projected(g, b, limit)
    inside = v.norm(dim=-1) <= limit * (1 - SAFETY)
    assert 0 < inside.double().mean() < 1
    torch.testing.assert_close(got[inside], v[inside], rtol=0, atol=0)
    assert got.norm(dim=-1).max() <= limit
    torch.testing.assert_close(
        got[~inside], limit * (1 - SAFETY) * v[~inside] / v[~inside].norm(dim=-1, keepdim=True), rtol=2e-6, atol=0
    )
    assert torch.equal(projected(g, b, math.inf), v)


def test_float32_keeps_the_limit():
    g, _, b = pairs(d=1000)
    for dtype in (torch.float32, torch.float64):
        got = projected(g.to(dtype), b.to(dtype), 0.7)
        assert got.double().norm(dim=-1).max() <= 0.7


def slope(limiter, limit, draws):
    """The largest |change of the limited vector| / |change of g|."""
    g, other, b = draws
    moved = (limiter(g, b, limit) - limiter(other, b, limit)).norm(dim=-1)
    return float((moved / (g - other).norm(dim=-1)).max())


def test_only_a_projection_is_lipschitz():
    """To 1e-6 of its radius: the ball that is projected on is that much smaller."""
    draws = pairs()
    for limit in (0.1, 1.5, 30.0):
        assert slope(projected, limit, draws) <= 1 + 1e-12
        assert slope(projected, limit, draws) > 0.99
        assert slope(rescaled, limit, draws) > 1.1


def test_rescaling_is_the_papers():
    """Lemma 4: |g + xi b| = limit, where g is shorter than that and g + b longer."""
    g, _, b = pairs()
    limit = 1.5
    usable = (g.norm(dim=-1) < limit) & ((g + b).norm(dim=-1) > limit)
    got = rescaled(g[usable], b[usable], limit)
    assert usable.sum() > 100
    torch.testing.assert_close(got.norm(dim=-1), torch.full_like(got[:, 0], limit))
    along = (got - g[usable]) / b[usable]  # xi, once a coordinate
    torch.testing.assert_close(along, along[:, :1].expand_as(along))
    assert ((along > 0) & (along < 1)).all()
    short = (g + b).norm(dim=-1) <= limit
    torch.testing.assert_close(rescaled(g[short], b[short], limit), (g + b)[short])
    worked = rescaled(torch.tensor([0.3, -0.2, 0.1]).double(), torch.tensor([2.0, 1.0, -1.0]).double(), 1.0)
    assert float(worked.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(("m", "ratio"), [(20, 3.24), (100, 7.38), (500, 16.55), (2500, 37.03)])
def test_the_counter_example(m, ratio):
    """All gradients the same unit vector, across b; one of m records leaves (clip, limit and curvature 1, gamma 1.1).

    The lemma promises C = 1 / (gamma m) + 1 / (gamma^2 m - gamma), in the paper's form. The ratios were worked out
    apart from this code, to two decimals.
    """
    gamma = 1.1
    b = torch.tensor([0.0, 10.0], dtype=torch.float64)
    g, fewer = torch.tensor([[1.0, 0.0], [(m - 1) / m, 0.0]], dtype=torch.float64)
    claim = 1 / (gamma * m) + 1 / (gamma**2 * m - gamma)
    moved = {name: float((f(g, b, 1.0) - f(fewer, b, 1.0)).norm()) / gamma / claim for name, f in LIMITS.items()}
    assert moved["paper-xi"] == pytest.approx(ratio, abs=0.01)
    assert moved["projection"] < 0.1


def test_one_row_a_client():
    g, _, b = pairs(count=6)
    for limiter in LIMITS.values():
        whole = limiter(g.view(2, 3, 3), b.view(2, 3, 3), 1.0)
        torch.testing.assert_close(
            whole.view(6, 3), torch.stack([limiter(*row, 1.0) for row in zip(g, b, strict=True)])
        )
