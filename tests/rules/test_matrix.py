"""Inverses that survive noise, and conjugate gradients whose error is known beforehand."""

import math

import numpy as np
import pytest
import torch

from sordino.rules.matrix import (
    conjugate_gradients,
    damped,
    floored_inverse,
    floored_solve,
    identity_like,
    steps_for,
)

D = 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_eigenvalues(values, seed=0):
    """Symmetric, with these eigenvalues, in random directions."""
    q = torch.linalg.qr(normal(*values.shape, values.shape[-1], seed=seed))[0]
    return q @ (values.unsqueeze(-1) * q.transpose(-1, -2)), q


# -------------------------------------------------------------------------------------------------------- inverses


def test_eigenvalues_below_the_floor_are_raised():
    values = torch.tensor([[-3.0, -0.1, 0.0, 0.05, 0.2, 4.0], [0.01, 0.3, 0.4, 1.0, 2.0, 9.0]], dtype=torch.float64)
    matrix, q = with_eigenvalues(values)
    want = q @ (1 / values.clamp_min(0.1)).diag_embed() @ q.transpose(-1, -2)
    got = floored_inverse(matrix, 0.1)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, torch.linalg.inv(matrix)), "a plain inverse"
    assert torch.linalg.eigvalsh(got).amax() <= 10 * (1 + 1e-12)
    assert torch.linalg.eigvalsh(got).amin() > 0
    torch.testing.assert_close(floored_inverse(matrix[0], 0.1), got[0])


def test_a_sound_matrix_is_just_inverted():
    matrix, _ = with_eigenvalues(torch.linspace(0.3, 5.0, D, dtype=torch.float64))
    torch.testing.assert_close(floored_inverse(matrix, 0.2), torch.linalg.inv(matrix))


def test_only_the_symmetric_part_counts():
    matrix, _ = with_eigenvalues(torch.linspace(0.3, 5.0, D, dtype=torch.float64))
    lopsided = normal(D, D, seed=1)
    skew = lopsided - lopsided.T
    torch.testing.assert_close(floored_inverse(matrix + skew, 0.1), floored_inverse(matrix, 0.1))


def test_solving_is_multiplying_by_the_inverse():
    matrix, v = normal(3, 2, D, D), normal(3, 2, D, seed=1)
    want = (floored_inverse(matrix, 0.3) @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(floored_solve(matrix, v, 0.3), want, rtol=0, atol=0)
    assert (floored_solve(matrix, v, 0.3).norm(dim=-1) <= v.norm(dim=-1) / 0.3 * (1 + 1e-12)).all()


def test_damped_is_a_cholesky_factor():
    values = torch.tensor([[0.0, 0.0, 0.1, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    matrix, _ = with_eigenvalues(values)
    factor = damped(matrix.clone(), 0.7)
    eye = torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(factor @ factor.transpose(-1, -2), matrix + 0.7 * eye)
    assert torch.equal(factor, factor.tril())
    v = normal(2, D, seed=2)
    got = torch.cholesky_solve(v.unsqueeze(-1), factor).squeeze(-1)
    torch.testing.assert_close(got, torch.linalg.solve(matrix + 0.7 * eye, v))


def test_what_cannot_be_factorised_is_not_a_number():
    """For that client alone: a client that stopped would tell something, and so would one that stopped the others."""
    good, bad = torch.eye(D, dtype=torch.float64), -torch.eye(D, dtype=torch.float64)
    factor = damped(torch.stack([good, bad, good]), 0.5)
    assert torch.isnan(torch.cholesky_solve(normal(D, 1, seed=1), factor[1])).all()
    torch.testing.assert_close(factor[0], math.sqrt(1.5) * good)
    torch.testing.assert_close(factor[2], factor[0], rtol=0, atol=0)


def test_the_identity_is_like_its_matrix():
    for dtype in (torch.float32, torch.float64):
        eye = identity_like(torch.zeros(5, 2, 2, dtype=dtype))
        assert eye.dtype is dtype
        assert torch.equal(eye, torch.eye(2, dtype=dtype))


# --------------------------------------------------------------------------------------------- conjugate gradients


def test_as_many_steps_as_eigenvalues_solve_it():
    """Three eigenvalues, however often: three steps are exact, two are not."""
    matrix, _ = with_eigenvalues(torch.tensor([1.0, 1.0, 2.0, 2.0, 7.0, 7.0], dtype=torch.float64))
    v = normal(D)
    want = torch.linalg.solve(matrix, v)
    torch.testing.assert_close(conjugate_gradients(lambda p: matrix @ p, v, 3), want, rtol=1e-12, atol=1e-12)
    assert (conjugate_gradients(lambda p: matrix @ p, v, 2) - want).norm() > 1e-3


def errors(condition, steps, *, gamma=0.3, count=200, seed=0):
    """|y - y*| over |v| / gamma, for matrices gamma I + H with condition number exactly `condition`."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.choice([0.0, 1.0, 0.5, 0.01], size=(count, 8)) * (condition - 1))
    cosines = (1 - np.cos(np.pi * (np.arange(8) + 0.5) / 8)) / 2  # the hardest spectrum: Chebyshev's nodes
    values[: count // 2] = torch.from_numpy(cosines) * (condition - 1)
    values[:, 0], values[:, 1] = 0.0, condition - 1
    matrix, _ = with_eigenvalues(gamma * (1 + values), seed=seed)
    v = normal(count, 8, seed=seed + 1)
    got = conjugate_gradients(lambda p: (matrix @ p.unsqueeze(-1)).squeeze(-1), v, steps)
    want = torch.linalg.solve(matrix, v)
    return float(((got - want).norm(dim=-1) / (v.norm(dim=-1) / gamma)).max())


@pytest.mark.parametrize("accuracy", [1e-2, 1e-4, 1e-9])
@pytest.mark.parametrize("condition", [1.5, 3.0, 20.0, 400.0])
def test_the_error_is_within_what_was_asked(condition, accuracy):
    """|e|_A <= accuracy |y|_A, hence |e| <= accuracy |v| / gamma: the form in which a lemma uses it."""
    steps = steps_for(condition, accuracy)
    root = math.sqrt(condition)
    assert 2 * ((root - 1) / (root + 1)) ** steps <= accuracy * (1 + 1e-9)
    assert 2 * ((root - 1) / (root + 1)) ** (steps - 1) > accuracy, "no step too many"
    assert errors(condition, steps) <= accuracy
    assert errors(condition, max(1, min(steps // 4, 6))) > accuracy, "a quarter of the steps is not enough"


def test_at_least_one_step():
    assert steps_for(1.0, 1e-9) == steps_for(1 + 1e-16, 1e-9) == 1, "a multiple of the identity"
    assert steps_for(1 + 1e-9, 1e-3) == 1
    assert steps_for(2.0, 1.9) == 1


def test_clients_are_a_leading_axis():
    matrix, _ = with_eigenvalues(1 + normal(3, 2, D, seed=3).square())
    v = normal(3, 2, D)
    together = conjugate_gradients(lambda p: (matrix @ p.unsqueeze(-1)).squeeze(-1), v, 4)
    for i in range(3):
        for j in range(2):
            alone = conjugate_gradients(lambda p, a=matrix[i, j]: a @ p, v[i, j], 4)
            torch.testing.assert_close(together[i, j], alone, rtol=1e-10, atol=1e-12)


def test_nothing_to_solve_and_steps_to_spare():
    matrix, _ = with_eigenvalues(torch.linspace(1.0, 3.0, D, dtype=torch.float64))
    assert not conjugate_gradients(lambda p: matrix @ p, torch.zeros(D, dtype=torch.float64), 9).any()
    v = normal(D)
    got = conjugate_gradients(lambda p: matrix @ p, v, 200)
    torch.testing.assert_close(got, torch.linalg.solve(matrix, v), rtol=1e-12, atol=1e-12)
