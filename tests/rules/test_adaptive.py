"""Adam and Yogi against a loop written from the formulas."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Facts, Privacy
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan
from sordino.rules import adam, yogi
from sordino.rules.adaptive import Moments
from sordino.tree import leaves

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
    m, v, _ = rule(tau=0.3).init(torch.zeros(4), FACTS, ())
    assert m.tolist() == [0] * 4
    torch.testing.assert_close(v, torch.full((4,), 0.09))


def test_no_correction_by_default():
    np.testing.assert_allclose(walk(adam(beta1=B1, beta2=B2, tau=TAU)), by_hand("adam", False), rtol=1e-12)


def test_yogi_s_second_moment_moves_by_at_most_the_square():
    """However large v is; Adam's falls in proportion to v instead."""
    g, large = torch.full((3,), 0.1, dtype=torch.float64), torch.full((3,), 100.0, dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    _, (_, slow, _) = yogi(beta2=0.9).update(g, Moments(zero, large, ()), zero, 0)
    _, (_, fast, _) = adam(beta2=0.9).update(g, Moments(zero, large, ()), zero, 0)
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


# ---------------------------------------------------------------------------------------- what noise adds to v (AdamBC)

PHI, FLOOR = 0.1**2, 1e-3  # the first is that of FACTS


def corrected_by_hand(kind, unbiased, *, phi=PHI, floor=FLOOR, tau=TAU, decay=0.0, theta=0.0, weighted=True):
    m, v, steps = np.zeros(6), np.full(6, tau**2), []
    for t, g in enumerate(GS, start=1):
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g**2 if kind == "adam" else v - (1 - B2) * g**2 * np.sign(v - g**2)
        top, bottom, noise = m, v, phi * (1 - B2**t if weighted else 1)
        if unbiased:
            top, bottom, noise = m / (1 - B1**t), v / (1 - B2**t), phi
        steps.append(top / (np.sqrt(np.maximum(bottom - noise, floor)) + tau) + decay * theta)
    return np.array(steps)


@BOTH
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("tau", [0.0, TAU])
def test_the_noise_s_variance_is_taken_off(rule, kind, unbiased, tau):
    on = {"correction": "subtract-floor", "floor": FLOOR, "bias_correction": unbiased, "tau": tau}
    got = walk(rule(beta1=B1, beta2=B2, **on))
    np.testing.assert_allclose(got, corrected_by_hand(kind, unbiased, tau=tau), rtol=1e-9)
    mutants = [
        corrected_by_hand(kind, unbiased, tau=tau, phi=0.0),
        corrected_by_hand(kind, unbiased, tau=tau, phi=0.1),  # the deviation
        corrected_by_hand(kind, unbiased, tau=tau, floor=2 * FLOOR),
        corrected_by_hand(kind, not unbiased, tau=tau),
    ]
    if not unbiased:  # v has not gathered all of Phi yet
        mutants.append(corrected_by_hand(kind, unbiased, tau=tau, weighted=False))
    for mutant in mutants:
        assert not np.allclose(got, mutant, rtol=1e-6)


@BOTH
def test_decay_is_decoupled(rule, kind):
    """It is added to the step, and no moment sees it."""
    on = {"beta1": B1, "beta2": B2, "tau": TAU, "correction": "subtract-floor", "floor": FLOOR}
    theta = torch.full((6,), 2.0, dtype=torch.float64)
    plain, decaying = rule(**on), rule(decay=0.3, **on)
    states = [each.init(theta, FACTS, ()) for each in (plain, decaying)]
    for t, g in enumerate(torch.from_numpy(GS)):
        (a, states[0]), (b, states[1]) = (
            each.update(g, s, theta, t) for each, s in zip((plain, decaying), states, strict=True)
        )
        torch.testing.assert_close(b, a + 0.3 * theta)
        assert all(torch.equal(x, y) for x, y in zip(*map(leaves, states), strict=True))


def test_what_is_left_is_the_clean_second_moment():
    """A signal c under noise of variance Phi: v^ - Phi has mean c^2. Its standard error over d independent coordinates:
    squares have variance 2 Phi^2 + 4 Phi c^2, and v^ weighs them by w_j."""
    c, d, steps, beta2 = 0.05, 20_000, 50, 0.9
    rule = adam(beta2=beta2, tau=0, bias_correction=True, correction="subtract-floor", floor=1e-8)
    rng, theta = np.random.default_rng(1), torch.zeros(d, dtype=torch.float64)
    state = rule.init(theta, FACTS, ())
    for t in range(steps):
        _, state = rule.update(torch.from_numpy(c + 0.1 * rng.normal(size=d)), state, theta, t)
    _, v, phi = state
    assert phi.item() == pytest.approx(PHI)
    gathered = 1 - beta2**steps
    weight = (1 - beta2) * beta2 ** np.arange(steps) / gathered
    error = math.sqrt((2 * PHI**2 + 4 * PHI * c**2) * (weight**2).sum() / d)
    left = float((v / gathered - phi).mean())
    assert abs(left - c**2) < 4 * error
    assert abs(float((v / gathered).mean()) - c**2) > 100 * error, "as it is without the correction"
    assert abs(left) > 20 * error, "the signal is still there"


@pytest.mark.parametrize(
    ("rule", "kind"), [(adam, "adam"), pytest.param(yogi, "yogi", marks=pytest.mark.soak)], ids=["adam", "yogi"]
)
def test_pure_noise_gives_no_nan(rule, kind):
    """Over ten thousand steps; what is left of Adam's v is negative half of the time: its root would be no number."""
    on = rule(tau=0, bias_correction=True, correction="subtract-floor", floor=1e-8)
    rng, theta = np.random.default_rng(2), torch.zeros(8, dtype=torch.float64)
    state, negative = on.init(theta, FACTS, ()), 0
    for t in range(10_000):
        step, state = on.update(torch.from_numpy(0.1 * rng.normal(size=8)), state, theta, t)
        assert torch.isfinite(step).all()
        negative += int((state.second / (1 - 0.999 ** (t + 1)) < PHI).sum())
    assert negative > (10_000 if kind == "adam" else 0)


def test_yogi_settles_above_the_noise():
    """Where squares below and above v balance: at the median of a chi-square of three degrees, 2.366 Phi, within four
    standard errors of the mean over independent coordinates. The correction takes Phi of it, and says so."""
    g = torch.from_numpy(0.1 * np.random.default_rng(3).normal(size=(20_000, 64)))
    rule, theta = yogi(tau=0.1, beta2=0.999), torch.zeros(64, dtype=torch.float64)
    state, total = rule.init(theta, FACTS, ()), 0.0
    for t, each in enumerate(g):
        _, state = rule.update(each, state, theta, t)
        total = total + state.second / 10_000 if t >= 10_000 else 0.0
    error = float(total.std()) / math.sqrt(64)
    assert abs(float(total.mean()) - 2.366 * PHI) < 4 * error
    assert abs(float(total.mean()) - PHI) > 20 * error


@BOTH
def test_without_noise_it_is_the_optimiser_with_a_floor(rule, kind):
    noiseless = Facts(3, np.array([4, 5, 6]), 12, 3.0, 0.0)
    on = rule(beta1=B1, beta2=B2, tau=0, bias_correction=True, correction="subtract-floor", floor=FLOOR)
    theta = torch.zeros(6, dtype=torch.float64)
    state, steps = on.init(theta, noiseless, ()), []
    for t, g in enumerate(GS):
        step, state = on.update(torch.from_numpy(g), state, theta, t)
        steps.append(step.numpy())
    np.testing.assert_allclose(steps, corrected_by_hand(kind, True, phi=0.0, tau=0.0), rtol=1e-9)
    assert not np.allclose(steps, corrected_by_hand(kind, True, phi=0.0, tau=0.0, floor=0.0), rtol=1e-6), (
        "the floor counts"
    )


def test_the_method_is_its_rule():
    """dp-adambc: Phi is the variance of the noise on the aggregate, and theta moves against the step."""
    rng = np.random.default_rng(0)
    data = Records.of(
        rng.normal(size=(40, 2)), rng.integers(0, 2, 40), np.repeat([0, 1], [10, 30]), dtype=torch.float64
    )
    plan = Plan(build("dp-adambc", lr=0.3, floor=1e-6, decay=0.1), 6, data.sizes, Privacy(4.0))
    phi, m, v, theta = calibration.aggregate_std(plan, 0) ** 2, 0.0, 0.0, torch.zeros(6, dtype=torch.float64)
    assert phi == pytest.approx(
        sum(
            (w * s / n) ** 2
            for w, s, n in zip(plan.weights, calibration.client_std(plan, 0, 0), plan.sizes, strict=True)
        )
    )
    for t, this_round in enumerate(simulate.run(plan, Linear(2, 2), data, Seeded(1)), start=1):
        g = this_round.aggregate
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        root = (v / (1 - 0.999**t) - phi).clamp_min(1e-6).sqrt()
        theta = theta - 0.3 * (m / (1 - 0.9**t) / root + 0.1 * theta)
        torch.testing.assert_close(this_round.model, theta, rtol=1e-8, atol=1e-10)


@BOTH
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"correction": "subtract"}, r"correction: 'subtract' is unknown\. Did you mean 'subtract-floor'\?"),
        ({"correction": "subtract-floor", "floor": 0.0}, "floor: 0.0 must be above 0"),
        ({"correction": "subtract-floor", "tau": -1.0}, "tau: -1.0"),
        ({"tau": 0.0, "correction": "none"}, "tau: 0.0 must be above 0"),
        ({"decay": -1.0}, "decay: -1.0 must be at least 0"),
    ],
)
def test_bad_corrections_are_named(rule, kind, bad, message):
    with pytest.raises(SordinoError, match=message):
        rule(**bad)
