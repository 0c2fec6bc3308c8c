"""The warning "no better than a constant guess" agrees with exact counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino.models.linear import Linear, Loss
from sordino.training.evaluate import beats_constant_guess, evaluate


def data(y, classes):
    return SimpleNamespace(y_test=y, classes=classes)


def scored(hits, y):
    """Scores of a model that is right on exactly the first `hits` of the records."""
    guess = np.where(np.arange(len(y)) < hits, y, (y + 1) % 3)
    model = Linear(3, 3, bias=False)
    theta = 5 * torch.eye(3).flatten()
    x = torch.nn.functional.one_hot(torch.from_numpy(guess), 3).float()
    assert torch.equal(model.predict(theta, x), torch.from_numpy(guess))
    return evaluate(model, theta, x, torch.from_numpy(y))


@pytest.mark.parametrize("n", [10, 30, 77, 360, 1797])
def test_as_many_hits_as_the_commonest_class_are_no_better_and_one_more_is(n):
    for most in {max(n // 3 + 1, n // 2), (9 * n) // 10, (7 * n) // 11 + 1}:
        y = np.repeat([0, 1, 2], [most, n - most - 1, 1])
        for hits, better in ((most - 1, False), (most, False), (most + 1, True)):
            found = scored(hits, y)
            assert found["accuracy"] == hits / n, "a share in float64"
            assert beats_constant_guess(data(y, ("a", "b", "c")), found) is better, (n, most, hits)


@pytest.mark.parametrize("offset", [0.0, 0.1, 1000.0])
def test_the_mean_itself_is_no_better_than_the_mean(offset):
    rng = np.random.default_rng(0)
    model = Linear(1, 1, Loss.SQUARES, bias=False)
    for n in (7, 100, 999):
        y = (offset + rng.standard_normal(n)).astype(np.float32)
        x = torch.ones(n, 1)
        constant = torch.tensor([float(y.astype(np.float64).mean())], dtype=torch.float64)
        assert not beats_constant_guess(data(y, ()), evaluate(model, constant, x.double(), torch.from_numpy(y)))
        exact = evaluate(model, torch.tensor([1.0]), torch.from_numpy(y)[:, None], torch.from_numpy(y))
        assert beats_constant_guess(data(y, ()), exact)
