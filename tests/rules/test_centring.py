"""The centre of the records, from a noised mean of u u^T. In runs: methods/test_auto.py."""

import numpy as np
import pytest
import torch

from sordino.rules.centring import LEAST_SPREAD, find_centre, shrunk, with_one

RADIUS, CONSTANT = 10.0, 7.0
MOST = RADIUS**2 + CONSTANT**2
ONE, NO_NOISE = torch.ones(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)


def records(seed=0, features=5, rows=400):
    x = np.random.default_rng(seed).normal(size=(rows, features)) + np.linspace(-1, 3, features)
    return torch.from_numpy(RADIUS * x / np.linalg.norm(x, axis=1, keepdims=True))


def gram(x, constant=CONSTANT):
    u = torch.cat([x, torch.full_like(x[:, :1], constant)], 1)
    return u.T @ u / len(u)


def test_without_noise_it_is_the_mean_and_records_about_it_have_the_length_they_had():
    x = records()
    centre, value, V = find_centre(gram(x), NO_NOISE, MOST, CONSTANT, ONE)
    assert torch.allclose(centre.mean, x.mean(0))
    centred = centre.factor * (x - centre.mean)
    assert float(centred.square().sum(1).mean()) == pytest.approx(RADIUS**2)
    assert float(centre.factor) > 1.2
    assert torch.allclose(V * value @ V.T, gram(centred, 1.0), atol=1e-9)
    assert float(value[-1]) == pytest.approx(1)


def test_weights_of_records_do_not_move_it():
    x = records()
    half = 0.5 * ONE
    centre, value, _ = find_centre(0.4 * gram(x), NO_NOISE, MOST, CONSTANT, half)
    assert torch.allclose(centre.mean, x.mean(0))
    assert float(value[-1]) == pytest.approx(0.4)
    assert float(find_centre(0.4 * gram(x), NO_NOISE + 1e6, MOST, CONSTANT, half)[1][-1]) == pytest.approx(0.5)


def test_much_noise_leaves_records_where_they_are():
    x, rng = records(features=30), np.random.default_rng(1)
    for std in (100.0, 1e4):
        z = torch.from_numpy(rng.normal(size=(31, 31)))
        A, noise = gram(x) + std * (z + z.T) / 2, torch.tensor(std, dtype=torch.float64)
        centre, value, _ = find_centre(A, noise, MOST, CONSTANT, ONE)
        assert float(centre.mean.norm()) < 0.5 * RADIUS
        assert 1 <= float(centre.factor) < 1.2
        assert float(value.sum()) == pytest.approx(RADIUS**2 + 1, rel=0.02)
        naive = A[-1, :-1] / CONSTANT
        assert float(naive.norm()) > 2 * RADIUS  # the mutant: the mean as it comes


def test_neither_mean_nor_factor_leaves_its_bounds():
    A = torch.full((4, 4), 1e5, dtype=torch.float64)
    centre, value, _ = find_centre(A, NO_NOISE + 1.0, MOST, CONSTANT, ONE)
    assert float(centre.mean.norm()) <= RADIUS * (1 + 1e-9)
    assert float(centre.factor) <= LEAST_SPREAD**-0.5 * (1 + 1e-9)
    assert (value > 0).all()
    nothing, value, _ = find_centre(0 * A, NO_NOISE, MOST, CONSTANT, ONE)
    assert not nothing.mean.any()
    assert torch.isfinite(value).all()


def test_runs_have_centres_of_their_own():
    both = [records(seed) for seed in (0, 1)]
    A = torch.stack([gram(x) for x in both])
    together = find_centre(A, NO_NOISE, MOST, CONSTANT, ONE)
    for k, x in enumerate(both):
        alone = find_centre(gram(x), NO_NOISE, MOST, CONSTANT, ONE)
        assert torch.allclose(together[0].mean[k], alone[0].mean)
        assert torch.allclose(together[0].factor[k], alone[0].factor)
        assert torch.allclose(together[1][k], alone[1])


def test_another_constant_is_taken_back():
    x = records()
    assert torch.allclose(with_one(gram(x), CONSTANT), gram(x, 1.0))


def test_a_noised_number_is_drawn_to_what_was_expected():
    value, std = torch.tensor(3.0), torch.tensor(1.0)
    assert float(shrunk(value, std, 1.0, 1.0)) == pytest.approx(2.0)
    assert float(shrunk(value, 0 * std, 1.0, 1.0)) == 3.0
    assert float(shrunk(value, 1e6 * std, 1.0, 1.0)) == pytest.approx(1.0)
