"""`raised`: how large the prior is where there is much noise. What `auto` makes of it: tests/methods/test_auto.py."""

import math

import pytest
import torch

from sordino.rules.kalman import raised

H = torch.tensor([0.02, 0.1, 0.5, 3.0], dtype=torch.float64)
P = 1 / (4 * H)  # as of four eigenvectors, whose curvature is their eigenvalue


def moved(s, noise):
    """Variance of a logit by noise, in units of the prior's, times 2."""
    return float(s * (1 - torch.exp(-2 * s * H.square() * P / noise)).mean())


@pytest.mark.parametrize("noise", [0.0, 1e-12])
def test_without_noise_the_prior_stays(noise):
    assert torch.allclose(raised(H, P, torch.tensor(noise)), P, rtol=1e-9)


def test_the_factor_is_the_root_and_grows_with_the_noise():
    factors = [float((raised(H, P, torch.tensor(noise)) / P)[0]) for noise in (1e-4, 1e-2, 1.0, 1e4)]
    assert factors == sorted(factors)
    assert factors[-1] > 100
    for factor, noise in zip(factors, (1e-4, 1e-2, 1.0, 1e4), strict=True):
        assert math.isclose(moved(factor, noise), 1.0, rel_tol=1e-6)


def test_runs_of_a_batch_are_computed_as_alone():
    noises = torch.tensor([[0.0], [0.1], [50.0]], dtype=torch.float64)
    together = raised(H.expand(3, -1), P.expand(3, -1), noises)
    assert torch.equal(together, torch.stack([raised(H, P, noise) for noise in noises]))


def test_steps_of_pure_noise_move_logits_as_far_as_is_said():
    """Gradient descent by steps of P h / nu^2 on h theta^2 / 2 with noise alone: half of the prior's variance."""
    generator, rounds, noise = torch.Generator().manual_seed(0), 200, 2.0
    per_round = noise * rounds
    step = raised(H, P, torch.tensor(noise)) * H / per_round
    theta = torch.zeros(4000, 4, dtype=torch.float64)
    for _ in range(rounds):
        g = H * theta + math.sqrt(per_round) * torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        theta = theta - step * g
    logit = float((theta.square() * H).sum(-1).mean())  # |u|^2 along an eigenvector is its eigenvalue
    assert math.isclose(logit, 0.5, rel_tol=0.1)
