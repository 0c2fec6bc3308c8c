"""Adam and Yogi against a loop written from the formulas."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Facts, SordinoError
from sordino.rules import adam, yogi

FACTS = Facts(3, np.array([4, 5, 6]), 12, 3.0, 0.1)
GS = np.random.default_rng(0).normal(size=(12, 6)) * np.array([1e-3, 0.1, 1, 1, 10, 100])
B1, B2, TAU = 0.8, 0.95, 0.05


def walk(rule):
    theta = torch.zeros(6, dtype=torch.float64)
    state, steps = rule.init(theta, FACTS, ()), []
    for t, g in enumerate(GS):
        step, state = rule.update(torch.from_numpy(g), state, theta, t)
        steps.append(step)
    return torch.stack(steps).numpy()


def by_hand(kind, corrected, *, v0=TAU**2, b2=B2, sign=1, root=True):
    m, v, steps = np.zeros(6), np.full(6, v0), []
    for t, g in enumerate(GS, start=1):
        m = B1 * m + (1 - B1) * g
        v = b2 * v + (1 - b2) * g**2 if kind == "adam" else v - sign * (1 - b2) * g**2 * np.sign(v - g**2)
        top, bottom = (m / (1 - B1**t), v / (1 - b2**t)) if corrected else (m, v)
        steps.append(top / ((np.sqrt(np.abs(bottom)) if root else bottom) + TAU))
    return np.array(steps)


BOTH = pytest.mark.parametrize(("rule", "kind"), [(adam, "adam"), (yogi, "yogi")])


@BOTH
@pytest.mark.parametrize("corrected", [False, True])
def test_against_the_formulas(rule, kind, corrected):
    got = walk(rule(beta1=B1, beta2=B2, tau=TAU, bias_correction=corrected))
    np.testing.assert_allclose(got, by_hand(kind, corrected), rtol=1e-12)
    for mutant in (
        by_hand(kind, not corrected),
        by_hand(kind, corrected, v0=0.0),
        by_hand(kind, corrected, v0=TAU),
        by_hand(kind, corrected, b2=B1),
        by_hand(kind, corrected, root=False),
        by_hand("yogi", corrected, sign=-1),
        by_hand("adam" if kind == "yogi" else "yogi", corrected),
    ):
        assert not np.allclose(got, mutant, rtol=1e-6)


@BOTH
def test_the_second_moment_starts_at_tau_squared(rule, kind):
    m, v = rule(tau=0.3).init(torch.zeros(4), FACTS, ())
    assert m.tolist() == [0] * 4
    torch.testing.assert_close(v, torch.full((4,), 0.09))


def test_no_correction_by_default():
    np.testing.assert_allclose(walk(adam(beta1=B1, beta2=B2, tau=TAU)), by_hand("adam", False), rtol=1e-12)


def test_yogi_s_second_moment_moves_by_at_most_the_square():
    """However large v is; Adam's falls in proportion to v instead."""
    g, large = torch.full((3,), 0.1, dtype=torch.float64), torch.full((3,), 100.0, dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    _, (_, slow) = yogi(beta2=0.9).update(g, (zero, large), zero, 0)
    _, (_, fast) = adam(beta2=0.9).update(g, (zero, large), zero, 0)
    torch.testing.assert_close(slow, large - 0.1 * g**2)
    torch.testing.assert_close(fast, 0.9 * large + 0.1 * g**2)


@BOTH
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"beta1": 1.0}, "beta1: 1.0 must lie in"),
        ({"beta2": -0.1}, "beta2: -0.1 must lie in"),
        ({"beta2": math.nan}, "beta2: nan"),
        ({"tau": 0.0}, "tau: 0.0 must be above 0"),
        ({"tau": -1.0}, "tau: -1.0"),
    ],
)
def test_bad_options_are_named(rule, kind, bad, message):
    with pytest.raises(SordinoError, match=message):
        rule(**bad)
