"""The public step against a loop written from its formula."""

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules import public_step
from sordino.rules.public_step import BETA, STEP

GS = np.random.default_rng(0).normal(size=(8, 6))
CLIP, STD = 2.0, 0.3


def facts(std):
    return Facts(3, np.array([4, 5, 6]), len(GS), 3.0, std)


def walk(rule, std, gs=GS):
    theta = torch.zeros(gs.shape[1:], dtype=torch.float64)
    state, steps = rule.init(theta, facts(std), ()), []
    for t, g in enumerate(gs):
        step, state = rule.update(torch.from_numpy(g), state, theta, t)
        steps.append(step)
    return torch.stack(steps).numpy()


def by_hand(*, clip=CLIP, unbiased=True, squared=True):
    m, steps, d = np.zeros(6), [], 6
    for t, g in enumerate(GS, start=1):
        m = BETA * m + (1 - BETA) * g / clip
        top = m / (1 - BETA**t) if unbiased else m
        steps.append(-STEP / (1 + d * (STD / clip) ** (2 if squared else 1)) * top)
    return np.array(steps)


def test_against_the_formula():
    got = walk(public_step(CLIP), STD)
    np.testing.assert_allclose(got, by_hand(), rtol=1e-12)
    for mutant in (by_hand(clip=1.0), by_hand(unbiased=False), by_hand(squared=False)):
        assert not np.allclose(got, mutant, rtol=1e-3)


def test_the_clip_is_a_unit():
    np.testing.assert_allclose(walk(public_step(7 * CLIP), 7 * STD, 7 * GS), walk(public_step(CLIP), STD), rtol=1e-12)


def test_runs_with_other_noise_take_their_own_steps():
    both = walk(public_step(CLIP), torch.tensor([[STD], [3 * STD]]), np.stack([GS, GS], 1))
    for k, std in enumerate((STD, 3 * STD)):
        np.testing.assert_allclose(both[:, k], walk(public_step(CLIP), std), rtol=1e-6)


@pytest.mark.parametrize("std", [0.0, 1.0, 100.0])
def test_noise_alone_moves_the_model_by_no_more_than_it_says(std):
    d, rounds = 400, 200
    noise = std * CLIP * np.random.default_rng(1).normal(size=(rounds, d))
    moved = np.linalg.norm(walk(public_step(CLIP), std * CLIP, noise).sum(0))
    assert moved <= (1.1 * STEP * np.sqrt(rounds / d) / std if std else 0)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_a_clip_that_is_none_is_refused(clip):
    with pytest.raises(SordinoError, match="clip"):
        public_step(clip)
