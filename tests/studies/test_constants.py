"""Measured constants: eigenvalues against dense ones and closed forms, a preconditioner's against its own matrix."""

import math

import numpy as np
import pytest
import torch

from sordino.data.records import Records
from sordino.errors import SordinoError
from sordino.models.linear import Linear, Loss
from sordino.studies import constants, theory

# ------------------------------------------------------------------------------------------------------- eigenvalues


@pytest.mark.parametrize("size", [1, 2, 7, 60])
def test_lanczos_finds_the_largest_eigenvalue(size):
    generator = torch.Generator().manual_seed(size)
    a = torch.randn(5, size, size, generator=generator, dtype=torch.float64)
    matrices, start = a + a.mT, torch.randn(5, size, generator=generator, dtype=torch.float64)

    def times(v):
        return (matrices @ v.unsqueeze(-1)).squeeze(-1)

    dense = torch.linalg.eigvalsh(matrices)
    assert torch.allclose(constants.largest_eigenvalues(times, start, 60), dense[:, -1], rtol=1e-9)
    early = constants.largest_eigenvalues(times, start, 3)
    assert (early <= dense[:, -1] + 1e-9).all()  # never above
    if size > 10:
        assert not torch.allclose(early, dense[:, -1], rtol=1e-3)


def test_lanczos_stops_where_the_space_ends():
    """Multiples of the identity and zero: the first vector is an eigenvector."""
    scale = torch.tensor([[3.0], [0.0]], dtype=torch.float64)
    found = constants.largest_eigenvalues(lambda v: scale * v, torch.ones(2, 9, dtype=torch.float64))
    assert found.tolist() == pytest.approx([3.0, 0.0], abs=1e-12)
    with pytest.raises(SordinoError, match="zero"):
        constants.largest_eigenvalues(lambda v: v, torch.zeros(2, 9))


def cohort(sizes=(40, 25, 40, 60)):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(sizes), 6)) + 1
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return Records.of(x, rng.integers(0, 3, len(x)), owner, dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.5, math.inf])
def test_eigenvalues_of_clients_are_those_of_their_hessians(clip):
    model, records = Linear(6, 3), cohort()
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = constants.client_eigenvalues(model, theta, records, clip)
    for client, size in enumerate(records.sizes):
        H = model.curvature_sum(theta, records.shard(client), clip).double() / size
        assert float(found[client]) == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    if math.isfinite(clip):
        assert (found <= clip).all()
        assert (found < constants.client_eigenvalues(model, theta, records)).all()


def test_at_zero_softmax_has_the_covariances_eigenvalue_over_the_classes():
    """diag p - p p^T has the largest eigenvalue 1 / c there, and the Hessian is its product with E u u^T."""
    records, model = cohort(), Linear(6, 3)
    found = constants.client_eigenvalues(model, torch.zeros(model.size), records)
    for client in range(len(records.sizes)):
        x = torch.nn.functional.pad(records.shard(client).x, (0, 1), value=1.0)
        exact = torch.linalg.eigvalsh(x.T @ x / len(x))[-1] / 3
        assert float(found[client]) == pytest.approx(float(exact), rel=1e-6)


def test_least_squares_has_the_covariances_eigenvalue():
    records, model = cohort(), Linear(6, 1, Loss.SQUARES, bias=False)
    x = records.shard(1).x
    found = constants.client_eigenvalues(model, torch.zeros(6), records)
    assert float(found[1]) == pytest.approx(float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1]), rel=1e-9)


# -------------------------------------------------------------------------------------------------- preconditioners


def walk(rounds=6, runs=3, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    gradients = torch.from_numpy(rng.standard_normal((rounds, runs, dim)))
    aggregates = gradients + 0.5 * torch.from_numpy(rng.standard_normal((rounds, runs, dim)))
    return constants.Path(gradients, aggregates, torch.from_numpy(rng.uniform(0.5, 2.0, (rounds, runs))))


def test_path_constants_are_those_of_the_dense_preconditioner():
    path, rho, beta, second = walk(), 0.7, 0.9, 9.0
    found = constants.path_constants(path, rho, beta, second)
    m = np.zeros((3, 4))
    alpha, sigma, plain, coupling = [], [], [], []
    for gradient, aggregate in zip(path.gradients.numpy(), path.aggregates.numpy(), strict=True):
        m = beta * m + (1 - beta) * aggregate
        H = np.linalg.inv(rho * np.eye(4) + m[:, :, None] * m[:, None, :])
        stepped = np.einsum("rij,rj->ri", H, aggregate)
        alpha += list(np.einsum("ri,rij,rj->r", gradient, H, gradient) / (gradient**2).sum(1))
        sigma.append((stepped**2).sum(1).mean() / second)
        plain.append((aggregate**2).sum(1).mean() / second)
        coupling.append(-np.einsum("ri,rij,rj->r", gradient, H, aggregate - gradient).mean())
    assert found.alpha == pytest.approx(min(alpha))
    assert found.sigma == pytest.approx(max(sigma))
    assert found.sigma_plain == pytest.approx(max(plain))
    assert found.coupling == pytest.approx(max(0.0, *coupling))
    assert found.flatness == pytest.approx(float((path.gradients.square().sum(-1) / (2 * path.gaps)).min()))


def test_a_large_rho_is_gradient_descent():
    """H = I / rho: alpha_H = 1 / rho, sigma_H^2 = sigma_I^2 / rho^2, and no gain."""
    found = constants.path_constants(walk(), 1e9, 0.9, 9.0)
    assert found.alpha == pytest.approx(1e-9)
    assert found.sigma == pytest.approx(found.sigma_plain * 1e-18)
    assert found.gain == pytest.approx(1)


def test_alpha_stays_between_its_bounds():
    path, rho = walk(), 0.1
    found = constants.path_constants(path, rho, 0.5, 9.0)
    assert 1 / (rho + path.aggregates.square().sum(-1).max()) <= found.alpha < 1 / rho


def test_a_noiseless_path_gains_nothing():
    """G = grad F: H shortens the step along M by more than the root of what it costs in descent."""
    gradients = walk().gradients
    for rho in (0.01, 1.0, 100.0):
        path = constants.Path(gradients, gradients, torch.ones(6, 3, dtype=torch.float64))
        found = constants.path_constants(path, rho, 0.3, 9.0)
        assert found.coupling == 0
        assert found.gain <= 1 + 1e-12


def test_noise_along_m_gains():
    """Noise along M alone, orthogonal to the gradient: H cuts the noise and none of the descent."""
    gradients = torch.zeros(6, 3, 4, dtype=torch.float64)
    gradients[..., 0] = 0.1
    aggregates = gradients.clone()
    aggregates[..., 1] = torch.arange(1.0, 4.0).double()  # the same in every round, so M follows it
    found = constants.path_constants(constants.Path(gradients, aggregates, torch.ones(6, 3)), 0.1, 0.5, 9.0)
    assert found.gain > 10


def test_the_descent_that_the_constants_promise_holds_on_a_quadratic():
    """E F(next) <= F - lr alpha |grad F|^2 + lr B_H + L lr^2 sigma_H^2 (C^2 + d nu^2) / 2, round by round."""
    rng = np.random.default_rng(5)
    curves, rho, beta, lr, runs = np.array([0.2, 1.0, 3.0]), 0.5, 0.8, 0.05, 200
    theta, m = np.full((runs, 3), 2.0), np.zeros((runs, 3))
    gradients, aggregates, gaps = [], [], []
    for _ in range(40):
        gradients.append(theta * curves)
        aggregates.append(gradients[-1] + 0.3 * rng.standard_normal((runs, 3)))
        gaps.append(0.5 * (theta**2 @ curves))
        m = beta * m + (1 - beta) * aggregates[-1]
        step = (aggregates[-1] - m * ((m * aggregates[-1]).sum(1) / (rho + (m**2).sum(1)))[:, None]) / rho
        theta = theta - lr * step
    path = constants.Path(*(torch.from_numpy(np.stack(each)) for each in (gradients, aggregates, gaps)))
    p = constants.path_constants(path, rho, beta, 1.0)
    slack = lr * p.coupling + 3.0 * lr**2 * p.sigma / 2
    for t in range(39):
        descent = lr * p.alpha * (gradients[t] ** 2).sum(1).mean()
        assert gaps[t + 1].mean() <= gaps[t].mean() - descent + slack
    assert p.flatness >= 0.2  # the least curvature
    assert gaps[-1].mean() < theory.sofim_sharper_floor(p, lr, 3.0, 1.0)


def test_without_descent_the_floor_is_infinite():
    p = theory.PathConstants(0.0, 1.0, 1.0, 0.0, 1.0)
    assert theory.sofim_sharper_floor(p, 0.1, 1.0, 1.0) == math.inf
    assert theory.sofim_sharper_floor(p._replace(alpha=1.0, flatness=0.0), 0.1, 1.0, 1.0) == math.inf
    whole = theory.sofim_sharper_floor(p._replace(alpha=0.5, coupling=0.2), 0.1, 2.0, 3.0)
    assert whole == pytest.approx((0.1 * 0.2 + 2.0 * 0.01 * 1.0 * 3.0) / (2 * 1.0 * 0.1 * 0.5))
