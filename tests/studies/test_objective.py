"""Objective perturbation: its bound against exact densities, and its minimum."""

import math

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian
from sordino.studies import objective

RADIUS = 1.5


def density(w, records, ridge, sigma):
    """Of w = theta_1 - theta_0 for one feature and two classes; theta_0 + theta_1 does not depend on the records."""
    slope, curve = ridge / 2 * w, np.full_like(w, ridge / 2)
    for x, y in records:
        p = 1 / (1 + np.exp(np.clip(-w * x, -700, 700)))
        slope, curve = slope + x * (p - y), curve + x * x * p * (1 - p)
    std = sigma / math.sqrt(2)
    return np.exp(-0.5 * (slope / std) ** 2) / (std * math.sqrt(2 * math.pi)) * curve


def delta_between(one, other, epsilon, ridge, sigma):
    wide = 2 / ridge * (6 * sigma + 10)
    w = np.linspace(-wide, wide, 40_001)
    p, q = (density(w, records, ridge, sigma) for records in (one, other))
    assert np.trapezoid(p, w) == pytest.approx(1, abs=1e-4)
    return np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), w)


PAIRS = [((RADIUS, 1), (RADIUS, 0)), ((RADIUS, 1), (-RADIUS, 1)), ((RADIUS, 1), (0.0, 1)), ((RADIUS, 0), (0.3, 1))]


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_the_bound_covers_the_exact_divergence(epsilon, share):
    rest, delta = [(0.7, 1), (-1.0, 0), (0.2, 0)], 1e-3
    ridge = objective.ridge_of(RADIUS, 2, share * epsilon)
    assert objective.curvature(RADIUS, 2, ridge) == pytest.approx(share * epsilon)
    sigma = objective.sigma_of(epsilon, delta, RADIUS, 2, ridge)
    worst = {
        factor: max(
            delta_between([*rest, a], [*rest, b], epsilon, ridge, factor * sigma)
            for pair in PAIRS
            for a, b in (pair, pair[::-1])
        )
        for factor in (1.0, 0.3)
    }
    assert worst[1.0] <= delta
    if share < 0.1:  # the determinants of these records stay far below their bound
        assert worst[0.3] > delta, "the mutant: less than a third of the noise"


def test_without_curvature_and_with_one_direction_it_is_a_gaussian_of_both_signs():
    """chi with one degree is |Z|, so delta lies between that of the Gaussian mechanism and twice as much."""
    for a, epsilon in ((0.2, 0.5), (0.5, 1.0), (1.0, 4.0)):
        exact = gaussian.delta(a, epsilon)
        assert exact <= objective.delta_of(epsilon, a, 1) <= 2 * exact * (1 + 1e-6)


def test_the_rank_bound_limits_the_determinants():
    """Random softmax Hessians of one record beside a ridge."""
    rng, classes, ridge = np.random.default_rng(0), 5, 0.3
    most = objective.curvature(RADIUS, classes, ridge)
    found = []
    for scale in (0.0, 0.0, 1.0, 5.0):
        x = rng.normal(size=3)
        x *= RADIUS / np.linalg.norm(x)
        p = np.exp(scale * rng.normal(size=classes))
        p /= p.sum()
        hessian = np.kron(np.diag(p) - np.outer(p, p), np.outer(x, x))
        found.append(np.linalg.slogdet(np.eye(len(hessian)) + hessian / ridge)[1])
    assert max(found) <= most * (1 + 1e-12)
    assert found[0] == pytest.approx(most), "equal probabilities reach it"


def test_the_minimum_is_one():
    torch.manual_seed(1)
    x, labels = torch.randn(200, 4).double(), torch.eye(3).double()[torch.randint(3, (200,))]
    x /= x.norm(dim=1, keepdim=True)
    B = torch.randn(4, 3).double()
    theta = objective.minimum(x, labels, 2.0, B)
    gradient = x.T @ (torch.softmax(x @ theta, 1) - labels) + 2.0 * theta + B
    assert gradient.norm() <= objective.TOLERANCE
    with pytest.raises(SordinoError, match="longer than the radius"):
        objective.fitted(2 * x, labels, 1.0, 1e-5, 1.0, 100.0, 0)
    with pytest.raises(SordinoError, match="leaves nothing"):
        objective.sigma_of(1.0, 1e-5, 1.0, 3, 0.01)
