"""The rank-one preconditioner against the dense inverse (Lemma 4.14), and its noise (Lemma C.1)."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.core import Facts
from sordino.errors import SordinoError
from sordino.rules import chain, ema, fisher, scale
from sordino.rules.fisher import FisherState

FACTS = Facts(3, np.array([4, 5, 6]), 50, 3.0, 0.1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(rule, gs):
    """The steps over given aggregates, theta at zero."""
    theta = torch.zeros_like(gs[0])
    state, steps = rule.init(theta, FACTS, ()), []
    for t, g in enumerate(gs):
        step, state = rule.update(g, state, theta, t)
        steps.append(step)
    return torch.stack(steps)


# ------------------------------------------------------------------------------------------------------ Lemma 4.14


@dataclass
class Case:
    """H applied to v by the rule: with beta = 1/2 and m = 2 M - v before, the average after is M."""

    m: torch.Tensor
    rho: float

    def h(self, v):
        rule, theta = fisher(rho=self.rho, beta=0.5), torch.zeros_like(v)
        _, *rest = rule.init(theta, FACTS, ())
        step, (after, *_) = rule.update(v, FisherState(2 * self.m - v, *rest), theta, 3)
        torch.testing.assert_close(after, self.m)
        return step

    @property
    def dense(self):
        return torch.linalg.inv(self.rho * torch.eye(len(self.m), dtype=self.m.dtype) + torch.outer(self.m, self.m))


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


cases = st.builds(
    lambda d, seed, size, rho: (Case(10**size * normal(d, seed=seed), 10**rho), normal(d, seed=seed + 1)),
    d=st.integers(2, 12),
    seed=st.integers(0, 1000),
    size=st.floats(-2, 1),
    rho=st.floats(-1, 2),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(cases)
def test_the_inverse(case_and_vector):
    case, v = case_and_vector
    m2 = case.m.dot(case.m)
    hv = case.h(v)
    assert torch.allclose(hv, case.dense @ v, rtol=1e-7, atol=1e-9 * float(v.norm()) / case.rho)
    slack = 1 + 1e-9
    assert hv.norm() <= v.norm() / case.rho * slack
    assert v.dot(v) / (case.rho + m2) <= v.dot(hv) * slack
    assert v.dot(hv) <= v.dot(v) / case.rho * slack
    assert torch.allclose(case.h(case.m), case.m / (case.rho + m2), rtol=1e-7, atol=1e-12)


def test_its_eigenvalues():
    case = Case(normal(6), 0.7)
    matrix = torch.stack([case.h(e) for e in torch.eye(6, dtype=torch.float64)])
    torch.testing.assert_close(matrix, matrix.T)
    found = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(found[0], 1 / (0.7 + case.m.dot(case.m)))
    torch.testing.assert_close(found[1:], torch.full((5,), 1 / 0.7, dtype=torch.float64))


def test_other_inverses_are_told_apart():
    case, v = Case(normal(6), 0.7), normal(6, seed=1)
    want, m, rho = case.dense @ v, case.m, case.rho
    assert close(case.h(v), want)
    dot, m2 = m.dot(v), m.dot(m)
    for mutant in (
        v / rho + m * dot / (rho**2 + rho * m2),  # wrong sign
        v / rho - m * dot / (rho + m2),  # rho for rho squared
        v / rho - m * dot / (rho**2 + rho * m2.sqrt()),  # norm for its square
        v / rho - m * dot / (rho**2 + m2),
        rho * want,
    ):
        assert not close(mutant, want)


def test_without_memory_the_step_has_a_closed_form():
    """beta = 0: M = G, and H G = G / (rho + |G|^2)."""
    gs = normal(7, 5)
    want = gs / (0.4 + gs.square().sum(-1, keepdim=True))
    for apply_to in ("gradient", "momentum"):
        torch.testing.assert_close(walk(fisher(rho=0.4, beta=0.0, apply_to=apply_to), gs), want)


def test_a_large_rho_is_gradient_descent():
    gs = normal(7, 5)
    rho, lr = 1e9, 0.3
    torch.testing.assert_close(walk(chain(fisher(rho=rho), scale(-rho * lr)), gs), -lr * gs, rtol=1e-7, atol=1e-7)
    assert not torch.allclose(walk(chain(fisher(rho=1.0), scale(-lr)), gs), -lr * gs, rtol=1e-7, atol=1e-7)


def test_momentum_is_the_average_over_rho_plus_its_square():
    gs = normal(9, 5)
    for corrected in (False, True):
        m = walk(ema(0.8, bias_correction=corrected), gs)
        want = m / (0.5 + m.square().sum(-1, keepdim=True))
        got = walk(fisher(rho=0.5, beta=0.8, apply_to="momentum", bias_correction=corrected), gs)
        torch.testing.assert_close(got, want)
        assert not torch.allclose(walk(fisher(rho=0.5, beta=0.8, bias_correction=corrected), gs), want)


def test_a_whole_run_against_dense_inverses():
    gs, rho, beta = normal(9, 5), 0.5, 0.8
    for corrected in (False, True):
        m, want = torch.zeros(5, dtype=torch.float64), []
        for t, g in enumerate(gs):
            m = beta * m + (1 - beta) * g
            want.append(Case(m / (1 - beta ** (t + 1)) if corrected else m, rho).dense @ g)
        torch.testing.assert_close(walk(fisher(rho=rho, beta=beta, bias_correction=corrected), gs), torch.stack(want))


# ----------------------------------------------------------------------------------------------- warm start, warm-up


def test_warm_start_goes_from_plain_to_full():
    gs = normal(9, 5)
    plain, full = gs / 0.5, walk(fisher(rho=0.5), gs)
    faded = walk(fisher(rho=0.5, warm_start=4), gs)
    for t in range(9):
        part = min(1.0, t / 4)
        torch.testing.assert_close(faded[t], (1 - part) * plain[t] + part * full[t])
    torch.testing.assert_close(faded[0], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(faded[4:], full[4:], rtol=0, atol=0)
    assert not torch.allclose(faded[1:4], full[1:4])
    torch.testing.assert_close(walk(fisher(rho=0.5, warm_start=10**12), gs), plain)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("ema_scale", "factor"), [("rho", 4.0), ("unit", 1.0)])
def test_the_first_rounds_may_follow_the_average(corrected, ema_scale, factor):
    gs = normal(9, 5)
    options = {"rho": 0.25, "beta": 0.8, "bias_correction": corrected}
    got = walk(fisher(**options, ema_rounds=4, ema_scale=ema_scale), gs)
    torch.testing.assert_close(got[:4], factor * walk(ema(0.8, bias_correction=corrected), gs)[:4])
    torch.testing.assert_close(got[4:], walk(fisher(**options), gs)[4:], rtol=0, atol=0)
    assert not torch.allclose(got[:4], walk(fisher(**options), gs)[:4])


# ------------------------------------------------------------------------------------------------------- Lemma C.1

DRAWS = 40_000


def local_sgd(beta, corrected, rounds, std=1.0):
    """The variance of M, fed pure noise, after each round."""
    noise = std * normal(rounds, DRAWS, seed=5)
    rule = ema(beta, bias_correction=corrected)
    return walk(rule, noise).square().mean(-1).numpy()


def finite(beta, t):
    return (1 - beta) ** 2 * (1 - beta ** (2 * (t + 1))) / (1 - beta**2)


def within(found, expected):
    """Five standard errors of a variance of DRAWS normals."""
    return bool((np.abs(found / expected - 1) <= 5 * math.sqrt(2 / DRAWS)).all())


@pytest.mark.parametrize(("beta", "limit"), [(0.8, 0.1111), (0.9, 0.0526), (0.95, 0.0256), (0.99, 0.0050)])
def test_the_average_quietens_noise(beta, limit):
    assert (1 - beta) / (1 + beta) == pytest.approx(limit, abs=5e-5)
    rounds = 70
    t = np.arange(rounds)
    found = local_sgd(beta, False, rounds)
    assert within(found, finite(beta, t))
    assert not within(local_sgd(beta, False, rounds, std=1.1), finite(beta, t)), "ten per cent more noise"
    assert not within(found, (1 - beta) ** 2 * (1 - beta ** (t + 1)) / (1 - beta)), "betas not squared"
    if beta < 0.99:
        assert within(found[-1:], np.array([(1 - beta) / (1 + beta)]))
    else:
        assert finite(beta, 69) == pytest.approx(0.0038, abs=5e-5), "not yet at its limit"
        assert not within(found[-1:], np.array([(1 - beta) / (1 + beta)]))


@pytest.mark.parametrize(("beta", "after"), [(0.8, 0.114), (0.9, 0.067), (0.95, 0.054), (0.99, 0.050)])
def test_bias_correction_pays_for_an_early_start(beta, after):
    rounds = 20
    t = np.arange(rounds)
    expected = finite(beta, t) / (1 - beta ** (t + 1)) ** 2
    assert expected[0] == pytest.approx(1)
    assert expected[-1] == pytest.approx(after, abs=6e-4)
    found = local_sgd(beta, True, rounds)
    assert within(found, expected)
    assert not within(local_sgd(beta, False, rounds), expected), "no correction"


def test_the_fisher_rule_keeps_the_same_average():
    gs = normal(9, 5)
    rule, theta = fisher(beta=0.7), torch.zeros(5, dtype=torch.float64)
    state = rule.init(theta, FACTS, ())
    for t, g in enumerate(gs):
        _, state = rule.update(g, state, theta, t)
    torch.testing.assert_close(state.momentum, walk(ema(0.7), gs)[-1])


# -------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rho": 0.0}, "rho: 0.0 must be above 0"),
        ({"rho": -1.0}, "rho: -1.0"),
        ({"rho": math.nan}, "rho: nan"),
        ({"beta": 1.0}, r"beta: 1.0 must lie in \[0, 1\)"),
        ({"beta": -0.1}, "beta: -0.1"),
        ({"apply_to": "gradients"}, "apply_to: 'gradients' is unknown. Did you mean 'gradient'?"),
        ({"ema_scale": "units"}, "ema_scale: 'units' is unknown. Did you mean 'unit'?"),
    ],
)
def test_bad_options_are_named(bad, message):
    with pytest.raises(SordinoError, match=message.replace("?", r"\?")):
        fisher(**bad)


@pytest.mark.parametrize("bad", [{"warm_start": -3}, {"ema_rounds": -1}])
def test_negative_counts_are_named(bad):
    (name,) = bad
    with pytest.raises(SordinoError, match=name):
        fisher(**bad)
