import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.rules import smooth


def apply(strength, u):
    return smooth(strength).update(u, (), u, 0)[0]


def matrix(d, s):
    """I - s L for the circulant second difference L, written out."""
    shift = np.roll(np.eye(d), 1, axis=0)
    return np.eye(d) - s * (shift + shift.T - 2 * np.eye(d))


@pytest.mark.parametrize("d", [1, 2, 3, 64, 65])
def test_it_is_the_inverse_written_out(d):
    u = np.random.default_rng(d).normal(size=d)
    for s in (0.0, 0.5, 3.0):
        ours = apply(s, torch.from_numpy(u)).numpy()
        np.testing.assert_allclose(matrix(d, s) @ ours, u, atol=1e-12)
        assert ours.sum() == pytest.approx(u.sum())
        if d > 2 and s:
            assert not np.allclose(matrix(d, -s) @ ours, u, atol=1e-3), "the wrong sign would be seen"


@pytest.mark.parametrize(("s", "factor"), [(1.0, 0.268328), (2.0, 0.185185), (3.0, 0.149342)])
def test_white_noise_keeps_this_much_of_its_variance(s, factor):
    assert factor == pytest.approx((1 + 2 * s) / (1 + 4 * s) ** 1.5, rel=1e-5)
    d, draws = 512, 200
    z = torch.randn(draws, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = float(apply(s, z).var())
    se = factor * np.sqrt(2 / (draws * d)) * (1 + 4 * s)  # correlated coordinates count for fewer
    assert abs(found - factor) < 4 * se
    assert not abs(found - factor**0.5) < 4 * se


def test_it_helps_a_smooth_signal_and_harms_a_shuffled_one():
    d = 256
    wave = torch.sin(2 * torch.pi * torch.arange(d, dtype=torch.float64) / d)
    shuffled = wave[torch.randperm(d, generator=torch.Generator().manual_seed(0))]
    assert float((apply(1.0, wave) - wave).norm() / wave.norm()) < 0.01
    assert float((apply(1.0, shuffled) - shuffled).norm() / wave.norm()) > 0.4


def test_runs_are_smoothed_one_by_one():
    u = torch.randn(3, 10, dtype=torch.float64)
    torch.testing.assert_close(apply(1.0, u)[1], apply(1.0, u[1]))


def test_bad_strengths_are_refused():
    for strength in (-1.0, float("inf")):
        with pytest.raises(SordinoError, match="strength: "):
            smooth(strength)
