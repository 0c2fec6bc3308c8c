"""The public step against a loop written from its formula."""

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules import public_step
from sordino.rules.public_step import BETA, CONFIDENCE, DISTANCE, FALLING, GROWING, KEPT, LONGEST, RECOVERY

GS = np.random.default_rng(0).normal(size=(24, 6))
CLIP, STD = 2.0, 0.3


def facts(std, rounds):
    return Facts(3, np.array([4, 5, 6]), rounds, 3.0, std)


def walk(rule, std, gs=GS):
    theta = torch.zeros(gs.shape[1:], dtype=torch.float64)
    state, steps = rule.init(theta, facts(std, len(gs)), ()), []
    for t, g in enumerate(gs):
        step, state = rule.update(torch.from_numpy(g), state, theta, t)
        steps.append(step)
    return torch.stack(steps).numpy()


def by_hand(*, clip=CLIP, unbiased=True, squared=True, grows=True, falls=True, releases=1, turns=True, confidence=2.0):
    m, moved, limit, steps, d, rounds = np.zeros(6), np.zeros(6), 1.0, [], 6, len(GS)
    energy = d * (STD / clip) ** (2 if squared else 1) / releases
    size = 1 / np.sqrt(rounds * energy / DISTANCE**2 + 1 / LONGEST**2)
    for t, g in enumerate(GS):
        doubt = confidence * STD / clip / np.sqrt(releases) * np.linalg.norm(moved)
        if turns and g @ moved / clip > doubt:  # half of the last step is taken back
            steps.append(-moved / 2)
            moved, limit = moved / 2, limit / 2
            continue
        limit = min(1, RECOVERY * limit)
        m = BETA * m + (1 - BETA) * g / clip
        top = m / (1 - BETA ** (t + 1)) if unbiased else m
        first = min(1, (t + 1) / (GROWING * rounds)) if grows else 1
        last = min(1, (rounds - t) / (FALLING * rounds)) if falls else 1
        moved = -size * min(first, limit) * last * top
        steps.append(moved)
    return np.array(steps)


@pytest.mark.parametrize("releases", [1, 5])
def test_against_the_formula(releases):
    got = walk(public_step(CLIP, releases), STD)
    np.testing.assert_allclose(got, by_hand(releases=releases), rtol=1e-12)
    for mutant in (
        {"clip": 1.0},
        {"releases": 3},
        *({key: False} for key in ("unbiased", "squared", "grows", "falls", "turns")),
        {"confidence": 0.0},
    ):
        assert not np.allclose(got, by_hand(**{"releases": releases, **mutant}), rtol=1e-3)


def test_a_step_along_which_the_loss_rises_is_taken_back_and_its_successors_are_shorter():
    """A parabola whose steps would double the distance each time, without noise and with noise that hides it."""
    curvature, start = 0.5, torch.tensor([1.0, 0.0], dtype=torch.float64)

    def farthest(std, sign=1.0):
        rule, theta = public_step(1.0), start
        state, far = rule.init(theta, facts(std, 40), ()), 0.0
        for t in range(40):
            step, state = rule.update(sign * curvature * theta, state, theta, t)
            theta = theta + step
            far = max(far, float(theta.norm()))
        return far, float(theta.norm()), float(state.limit.min())

    far, end, limit = farthest(0.0)
    assert far < 15
    assert end < 0.1
    assert limit < 1
    assert farthest(0.0, sign=-1.0)[2] == 1.0  # nothing is taken back while the loss falls


def test_noise_alone_is_seldom_taken_for_a_rise():
    noise = np.random.default_rng(3).normal(size=(300, 400))
    rule, theta = public_step(CLIP), torch.zeros(400, dtype=torch.float64)
    state, taken = rule.init(theta, facts(CLIP, 300), ()), 0
    for t, g in enumerate(noise):
        before = state.moved
        step, state = rule.update(torch.from_numpy(CLIP * g), state, theta, t)
        taken += bool(torch.equal(step, (KEPT - 1) * before) and before.any())
    assert taken < 300 * 0.05  # two standard deviations: 2.3 %
    assert CONFIDENCE == 2.0


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
