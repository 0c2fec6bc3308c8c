"""The estimate of the loss after a first step: by simulation, and what it chooses."""

import functools
import math

import numpy as np
import pytest
import torch

from sordino.rules.caution import CAUTIONS, expected_loss, noised_eigenvalues
from sordino.rules.estimates import spectrum

ROWS, OUTPUTS, SCALE = 12, 3, 0.4
RULES = {
    "ridge": lambda a: 1 / (a.clamp_min(0) + 4),
    "smooth": lambda a: 1 / (torch.nn.functional.softplus(a) + 1),
    "plain": lambda a: torch.full_like(a, 0.3),
}


def problem(seed=0):
    rng = np.random.default_rng(seed)
    V, _ = np.linalg.qr(rng.normal(size=(ROWS, ROWS)))
    A = V @ np.diag(10 * 0.6 ** np.arange(ROWS)) @ V.T
    G = rng.normal(size=(ROWS, OUTPUTS)) * (A @ rng.normal(size=(ROWS, 1)))
    return torch.from_numpy(A), torch.from_numpy(G)


@functools.lru_cache(maxsize=1)  # rules change faster than problems
def noised_problems(std, noise, draws, seed=1):
    """The noised problem of each draw: eigenvalues, vectors and slopes, which serve every rule."""
    A, G = problem()
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(draws, ROWS, ROWS, generator=generator, dtype=torch.float64)
    noisy = A + std * (z + z.mT) / 2
    g = G + noise * torch.randn(draws, ROWS, OUTPUTS, generator=generator, dtype=torch.float64)
    return *torch.linalg.eigh(noisy), g


def losses(rule, std, noise, draws):
    """(true, estimated) loss without its constant, for each draw of the noise."""
    A, G = problem()
    noised, V, g = noised_problems(std, noise, draws)
    K, along = rule(noised), V.mT @ g
    theta = -V @ (K.unsqueeze(-1) * along)
    true = SCALE * (theta * (A @ theta)).sum((-1, -2)) / 2 + (G * theta).sum((-1, -2))
    scale, stds, variance = (torch.full((draws, 1), v, dtype=torch.float64) for v in (SCALE, std, noise**2))
    return true, expected_loss(K, noised, along, scale.expand(draws, ROWS), stds, variance)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("std", "noise"), [(0.0, 2.0), (1.0, 0.0), (1.0, 2.0), (4.0, 1.0)])
def test_the_estimate_is_unbiased(name, std, noise):
    true, estimated = losses(RULES[name], std, noise, draws=20_000)
    gap = (estimated - true).numpy()
    # On the diagonal the slope is that of neighbours, which is not exact: two per cent of the loss are left for that.
    assert abs(gap.mean()) < 5 * gap.std() / math.sqrt(len(gap)) + 0.02 * float(true.abs().mean())


def test_without_the_correction_noise_would_look_like_a_gain():
    true, estimated = losses(RULES["smooth"], 4.0, 1.0, draws=20_000)
    _, plain = (part.mean() for part in (true, estimated))
    A, G = problem()
    assert float(true.mean()) == pytest.approx(float(plain), rel=0.05)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(20_000, ROWS, ROWS, generator=generator, dtype=torch.float64)
    noised, V = torch.linalg.eigh(A + 4.0 * (z + z.mT) / 2)
    K = RULES["smooth"](noised)
    energy = (V.mT @ G).square().sum(-1)
    naive = (SCALE * noised * K.square() / 2 - K).mul(energy).sum(-1).mean()
    assert float(naive) < 1.2 * float(plain), "losses are negative: it promises at least a fifth more"


def test_eigenvalues_of_the_noised_matrix_in_the_order_of_its_vectors():
    A, _ = problem()
    V = torch.linalg.eigh(A)[1]
    assert torch.allclose(noised_eigenvalues(A.float(), V.float()), torch.linalg.eigvalsh(A), atol=1e-5)
    _, vectors = spectrum(A, torch.tensor([0.5]).double(), 101.0)
    assert torch.allclose(noised_eigenvalues(A, vectors), torch.linalg.eigvalsh(A))


def test_a_matrix_of_zeros_gives_finite_losses():
    zero = torch.zeros(ROWS, dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    K, G = torch.full_like(zero, 0.2), torch.ones(ROWS, OUTPUTS, dtype=torch.float64)
    assert torch.isfinite(expected_loss(K, zero, G, zero + 1, ones, ones))
    assert torch.isfinite(expected_loss(K[:1], zero[:1], G[:1], ones, ones, ones))


def test_cautions_fall_from_the_edge_to_nothing():
    assert CAUTIONS[0] == 1.0
    assert CAUTIONS[-1] == 0.0
    assert list(CAUTIONS) == sorted(CAUTIONS, reverse=True)
