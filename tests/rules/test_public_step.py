"""The public step against a loop written from its formula."""

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules import public_step
from sordino.rules.public_step import BETA, DISTANCE, FALLING, GROWING, LONGEST, noise_kept
from sordino.rules.spectrum import flatten, shapes_of

GS = np.random.default_rng(0).normal(size=(24, 6))
CLIP, STD = 2.0, 0.3


def facts(std, rounds, shapes=()):
    return Facts(3, np.array([4, 5, 6]), rounds, 3.0, std, shapes=shapes)


def walk(rule, std, gs=GS, shapes=()):
    theta = torch.zeros(gs.shape[1:], dtype=torch.float64)
    state, steps = rule.init(theta, facts(std, len(gs), shapes), ()), []
    for t, g in enumerate(gs):
        step, state = rule.update(torch.from_numpy(g), state, theta, t)
        steps.append(step)
    return torch.stack(steps).numpy()


def by_hand(*, clip=CLIP, unbiased=True, squared=True, grows=True, falls=True, releases=1):
    m, steps, d, rounds = np.zeros(6), [], 6, len(GS)
    energy = d * (STD / clip) ** (2 if squared else 1) / releases
    size = 1 / np.sqrt(rounds * energy / DISTANCE**2 + 1 / LONGEST**2)
    for t, g in enumerate(GS):
        m = BETA * m + (1 - BETA) * g / clip
        top = m / (1 - BETA ** (t + 1)) if unbiased else m
        first = min(1, (t + 1) / (GROWING * rounds)) if grows else 1
        last = min(1, (rounds - t) / (FALLING * rounds)) if falls else 1
        steps.append(-size * first * last * top)
    return np.array(steps)


@pytest.mark.parametrize("releases", [1, 5])
def test_against_the_formula(releases):
    got = walk(public_step(CLIP, releases), STD)
    np.testing.assert_allclose(got, by_hand(releases=releases), rtol=1e-12)
    for mutant in (
        {"clip": 1.0},
        {"releases": 3},
        *({key: False} for key in ("unbiased", "squared", "grows", "falls")),
    ):
        assert not np.allclose(got, by_hand(**{"releases": releases, **mutant}), rtol=1e-3)


def test_matrices_get_a_flatter_spectrum_by_the_noise_that_the_mean_keeps():
    plain, got = (walk(public_step(CLIP, 5), STD, shapes=shapes) for shapes in ((), ((2, 2), (2,))))
    for t in range(len(GS)):
        noise = torch.tensor(STD / CLIP / np.sqrt(5) * noise_kept(t))
        scale = np.abs(plain[t]).max()  # of the step, by which alone the two differ
        m = np.zeros(6)
        for s, g in enumerate(GS[: t + 1]):
            m += (1 - BETA) * BETA ** (t - s) * g / CLIP / (1 - BETA ** (t + 1))
        expected = flatten(torch.from_numpy(m), noise, shapes_of(((2, 2), (2,)))).numpy()
        np.testing.assert_allclose(got[t] / scale, -expected / np.abs(m).max(), rtol=1e-9)
    assert not np.allclose(got, plain, rtol=1e-2)


def test_the_noise_of_a_mean_is_that_of_its_weights():
    for t in (0, 1, 5, 200):
        weights = (1 - BETA) * BETA ** np.arange(t + 1) / (1 - BETA ** (t + 1))
        assert noise_kept(t) == pytest.approx(np.linalg.norm(weights), rel=1e-12)


def test_the_clip_is_a_unit():
    np.testing.assert_allclose(walk(public_step(7 * CLIP), 7 * STD, 7 * GS), walk(public_step(CLIP), STD), rtol=1e-12)


def test_runs_with_other_noise_take_their_own_steps():
    both = walk(public_step(CLIP), torch.tensor([[STD], [3 * STD]]), np.stack([GS, GS], 1))
    for k, std in enumerate((STD, 3 * STD)):
        np.testing.assert_allclose(both[:, k], walk(public_step(CLIP), std), rtol=1e-6)


@pytest.mark.parametrize("std", [0.0, 1.0, 100.0])
def test_noise_alone_moves_the_model_by_no_more_than_the_distance(std):
    noise = std * CLIP * np.random.default_rng(1).normal(size=(200, 400))
    steps = walk(public_step(CLIP), std * CLIP, noise)
    assert np.linalg.norm(steps.sum(0)) <= (1.1 * DISTANCE if std else 0)


def test_no_step_is_longer_than_the_longest():
    g = np.tile(CLIP * np.eye(6)[0], (40, 1))
    lengths = np.linalg.norm(walk(public_step(CLIP), 0.0, g), axis=1)
    np.testing.assert_allclose(lengths[:4], LONGEST * np.array([1, 2, 3, 4]) / 4, rtol=1e-12)
    np.testing.assert_allclose(lengths[3:31], LONGEST, rtol=1e-12)
    assert (np.diff(lengths[30:]) < 0).all()
    assert lengths[-1] == pytest.approx(LONGEST / 10)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_a_clip_that_is_none_is_refused(clip):
    with pytest.raises(SordinoError, match="clip"):
        public_step(clip)
