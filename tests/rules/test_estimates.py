"""The prior in much noise, and what gradients show of the curvature."""

import math

import pytest
import torch

from sordino.rules.estimates import SECANT_ERROR, Secant, measured, raised

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


@pytest.mark.parametrize("noise", [0.0, 1e-2, 1.0, 1e4])
def test_weights_of_classes_leave_less_to_raise(noise):
    weight = 0.1
    factor = float((raised(H, P, torch.tensor(noise), torch.tensor(weight)) / P)[0])
    plain = float((raised(H, P, torch.tensor(noise)) / P)[0])
    assert 1 <= factor <= plain
    assert math.isclose(moved(factor, noise), weight, rel_tol=1e-6) if factor > 1.001 else moved(factor, noise) > weight


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


# ---------------------------------------------------------------------------------------------- measured curvature

ROWS, OUTPUTS, TRUE = 4, 3, 3.0  # H = 3 h


def walked(noise, rounds, seed, shorter=0.1, bias=True):
    """Gradient steps of `shorter` / h on a quadratic of curvature 3 h, measured in each round."""
    generator, V = torch.Generator().manual_seed(seed), torch.eye(ROWS, dtype=torch.float64)
    theta, zero = torch.ones(ROWS * OUTPUTS, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    secant = Secant(theta, torch.zeros_like(theta), zero, zero, zero + 1, zero)
    variance, K = torch.tensor([noise**2], dtype=torch.float64), shorter / H
    for _ in range(rounds):
        z = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        g = TRUE * (H.unsqueeze(-1) * theta.view(ROWS, OUTPUTS)).flatten() + noise * z
        secant = measured(secant, g, theta, V, H, variance)
        secant = secant._replace(bias=OUTPUTS * variance * K.sum(-1, keepdim=True) * bias)
        theta = theta - (K.unsqueeze(-1) * g.view(ROWS, OUTPUTS)).flatten()
    return float(secant.ratio), float(secant.information) ** -0.5


def test_differences_of_gradients_show_the_curvature():
    ratio, error = walked(0.0, 3, 0)
    assert math.isclose(ratio, TRUE, rel_tol=1e-9)
    assert error < SECANT_ERROR
    assert walked(0.0, 1, 0)[1] > 1e6  # the first gradient shows nothing


@pytest.mark.parametrize(("bias", "right"), [(True, True), (False, False)])
def test_noise_that_is_in_the_step_too_is_taken_off(bias, right):
    """The mutant leaves it in, and sees a curvature that is not there."""
    runs = [walked(0.05, 2, seed, bias=bias) for seed in range(400)]
    ratio, error = (torch.tensor(column) for column in zip(*runs, strict=True))
    weight = error**-2
    mean = float((weight * ratio).sum() / weight.sum())
    assert (abs(mean - TRUE) < 5 * float(ratio.std()) / math.sqrt(len(runs))) == right
