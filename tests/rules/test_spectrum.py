"""The flatter spectrum against its definition by singular values."""

import math

import pytest
import torch

from sordino.rules.spectrum import NOISE, flatten, shapes_of

SHAPES = ((4, 3), (5,), (3, 2, 2), (4, 3), (), (2, 6))
SIZE = sum(math.prod(shape) for shape in SHAPES)
STD = 0.3


def vectors(runs=None, scale=1.0):
    shape = (SIZE,) if runs is None else (runs, SIZE)
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(m, std, noise=NOISE, root=0.5, scaled=True, mean=1.0):
    out, start = m.clone(), 0
    for shape in SHAPES:
        size = math.prod(shape)
        if len(shape) > 1:
            matrix = m[start : start + size].reshape(shape[0], -1)
            u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
            edge = std * (math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1]))
            new = s / (s.square() + mean * s.square().mean() + noise * edge**2) ** root
            part = u @ torch.diag(new * (s.norm() / new.norm() if scaled else 1)) @ vt
            out[start : start + size] = part.flatten()
        start += size
    return out


def test_against_singular_values():
    m = vectors()
    got = flatten(m, torch.tensor(STD, dtype=torch.float64), shapes_of(SHAPES))
    torch.testing.assert_close(got, by_hand(m, STD), rtol=1e-9, atol=1e-9)
    for mutant in ({"noise": 0}, {"root": 1.0}, {"scaled": False}, {"mean": 0.0}):
        assert not torch.allclose(got, by_hand(m, STD, **mutant), rtol=1e-3)


def test_every_run_has_its_own_noise():
    m, stds = vectors(3), torch.tensor([[0.0], [STD], [10.0]], dtype=torch.float64)
    got = flatten(m, stds, shapes_of(SHAPES))
    for k in range(3):
        torch.testing.assert_close(got[k], by_hand(m[k], float(stds[k])), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e12])
def test_only_proportions_count(scale):
    one, other = (flatten(vectors(scale=s), torch.tensor(s * STD), shapes_of(SHAPES)) for s in (1.0, scale))
    torch.testing.assert_close(other / scale, one, rtol=1e-6, atol=1e-6)


def test_much_noise_leaves_everything_as_it_is_and_none_makes_singular_values_alike():
    m = torch.cat([torch.tensor([100.0, 0.0, 0.0, 1.0]), torch.ones(3)])
    shapes = shapes_of(((2, 2), (3,)))
    torch.testing.assert_close(flatten(m, torch.tensor(1e4), shapes), m, rtol=1e-3, atol=1e-6)
    flat = flatten(m, torch.tensor(0.0), shapes)
    assert flat[0] / flat[3] < 60
    torch.testing.assert_close(flat[:4].norm(), m[:4].norm())


def test_zeros_stay_zeros_and_a_vector_without_shapes_stays_as_it_is():
    assert flatten(torch.zeros(SIZE), torch.tensor(0.0), shapes_of(SHAPES)).abs().max() == 0
    assert torch.equal(flatten(vectors(), torch.tensor(1.0), shapes_of(())), vectors())
