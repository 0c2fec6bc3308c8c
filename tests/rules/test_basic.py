"""The plain rules, and what every rule must be: pure, and blind to leading axes."""

import numpy as np
import pytest
import torch

from sordino.core import Facts, Rule
from sordino.errors import SordinoError
from sordino.rules import adam, average, chain, ema, fisher, heavy_ball, scale, shrink, yogi
from sordino.rules.basic import stateless
from sordino.tree import tree_map

D, T = 5, 9
FACTS = Facts(3, np.array([4, 5, 6]), T, 3.0, 0.1)

RULES = {
    "scale": lambda: scale(-0.3),
    "ema": lambda: ema(0.8),
    "ema, corrected": lambda: ema(0.8, bias_correction=True),
    "heavy ball": lambda: heavy_ball(0.8),
    "weight decay": lambda: chain(scale(-0.3), shrink(0.1)),
    "heavy ball, restarted": lambda: heavy_ball(0.8, restart=4),
    "average": lambda: average(0.5),
    "fisher": lambda: fisher(rho=0.5, beta=0.8),
    "fisher, all options": lambda: fisher(
        rho=0.5, beta=0.8, apply_to="momentum", bias_correction=True, warm_start=5, ema_rounds=2
    ),
    "fisher, rank k": lambda: fisher(rho=0.5, beta=0.8, structure="rank-k", rank=3),
    "fisher, block": lambda: fisher(rho=0.5, beta=0.8, structure="block"),
    "fisher, kronecker": lambda: fisher(rho=0.5, beta=0.8, structure="kronecker"),
    "adam": lambda: adam(tau=0.01),
    "yogi": lambda: yogi(tau=0.01, bias_correction=True),
    "chain": lambda: chain(ema(0.5), fisher(), scale(-1.0), average(0.4)),
}
EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def aggregates(*lead, rounds=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rounds, *lead, D, generator=generator, dtype=torch.float64)


def walk(rule, gs, theta=None):
    """(steps, models) of a run over given aggregates."""
    theta = torch.zeros_like(gs[0]) if theta is None else theta
    state, steps, models = rule.init(theta, FACTS, ()), [], []
    for t, g in enumerate(gs):
        step, state = rule.update(g, state, theta, t)
        theta = theta + step
        steps.append(step)
        models.append(rule.model(theta, state))
    return torch.stack(steps), torch.stack(models)


def same(a, b):
    equal = []
    tree_map(lambda x, y: equal.append(torch.equal(x, y)), a, b)
    return all(equal)


def clone(tree):
    return tree_map(torch.clone, tree)


def pure(rule):
    """Twice the same arguments give twice the same result, and the arguments stay as they were."""
    theta, ok = torch.ones(D, dtype=torch.float64), True
    state = rule.init(theta, FACTS, ())
    ok &= same(state, rule.init(theta, FACTS, ()))
    for t, g in enumerate(aggregates()):
        before = clone((g, state, theta))
        first = rule.update(g, state, theta, t)
        kept = clone(first)
        second = rule.update(g, state, theta, t)
        ok &= same((g, state, theta), before) and same(first, second) and same(first, kept)
        handed_out = rule.model(theta, state)
        ok &= same(handed_out, rule.model(theta, state)) and same((g, state, theta), before)
        theta, state = theta + first[0], first[1]
    return ok


@EACH
def test_rules_are_pure(rule):
    assert pure(rule())


def test_purity_is_really_checked():
    def in_place(g, m, theta, t):
        return m.mul_(0.5).add_(g), m

    def counting(g, state, theta, t, calls=[0]):  # noqa: B006
        calls[0] += 1
        return g * calls[0], state

    assert not pure(Rule(lambda theta, facts, before: torch.zeros_like(theta), in_place))
    assert not pure(Rule(stateless, counting))


@EACH
def test_runs_are_a_leading_axis(rule):
    gs = aggregates(3)
    steps, models = walk(rule(), gs)
    for r in range(3):
        alone = walk(rule(), gs[:, r])
        torch.testing.assert_close((steps[:, r], models[:, r]), alone, rtol=1e-12, atol=1e-12)


def test_parameters_may_differ_from_run_to_run():
    gs = aggregates(3)
    values = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    for build in (
        lambda v: scale(-v),
        lambda v: ema(v),
        lambda v: ema(v, bias_correction=True),
        lambda v: heavy_ball(v),
        lambda v: fisher(rho=v, beta=0.5),
        lambda v: fisher(rho=v, beta=v, structure="rank-k", rank=2),
        lambda v: fisher(rho=2.0, beta=v, bias_correction=True),
        lambda v: fisher(rho=v, beta=v, apply_to="momentum", ema_rounds=3),
        lambda v: adam(beta1=v, beta2=v, tau=v),
        lambda v: yogi(beta1=v, beta2=v, tau=v, bias_correction=True),
    ):
        steps, _ = walk(build(values.unsqueeze(-1)), gs)
        for r in range(3):
            torch.testing.assert_close(steps[:, r], walk(build(float(values[r])), gs[:, r])[0], rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- one by one


def test_scale_multiplies_the_aggregate():
    gs = aggregates()
    assert torch.equal(walk(scale(-0.3), gs)[0], -0.3 * gs)


def test_ema_by_hand():
    gs = aggregates()
    m, by_hand = torch.zeros(D, dtype=torch.float64), []
    for g in gs:
        m = 0.8 * m + 0.2 * g
        by_hand.append(m)
    torch.testing.assert_close(walk(ema(0.8), gs)[0], torch.stack(by_hand))
    weights = 1 - 0.8 ** torch.arange(1, T + 1, dtype=torch.float64)
    torch.testing.assert_close(walk(ema(0.8, bias_correction=True), gs)[0], torch.stack(by_hand) / weights[:, None])


def test_bias_correction_leaves_a_constant_alone():
    gs = aggregates()[:1].expand(T, D)
    torch.testing.assert_close(walk(ema(0.9, bias_correction=True), gs)[0], gs)
    assert not torch.allclose(walk(ema(0.9), gs)[0], gs)


@pytest.mark.parametrize("restart", [0, 1, 4])
def test_heavy_ball_by_hand(restart):
    gs = aggregates()
    m, by_hand = torch.zeros(D, dtype=torch.float64), []
    for t, g in enumerate(gs):
        m = 0.8 * (0 * m if restart and t % restart == 0 else m) + g
        by_hand.append(m)
    got = walk(heavy_ball(0.8, restart), gs)[0]
    torch.testing.assert_close(got, torch.stack(by_hand))
    if restart == 1:
        assert torch.equal(got, gs), "forgotten every round"
    else:
        assert not torch.allclose(got, walk(heavy_ball(0.8, 5), gs)[0]), "another restart would show"


def test_a_heavy_ball_is_an_average_times_a_constant():
    gs = aggregates()
    torch.testing.assert_close(walk(heavy_ball(0.8), gs)[0], walk(ema(0.8), gs)[0] / (1 - 0.8))


def test_chain_applies_in_order():
    gs = aggregates()
    torch.testing.assert_close(walk(chain(ema(0.5), scale(-2.0)), gs)[0], -2 * walk(ema(0.5), gs)[0])
    assert torch.equal(walk(chain(), gs)[0], gs)
    squared = Rule(stateless, lambda g, state, theta, t: (g.square(), state))
    torch.testing.assert_close(walk(chain(scale(-3.0), squared), gs)[0], 9 * gs.square())
    assert not torch.allclose(walk(chain(squared, scale(-3.0)), gs)[0], 9 * gs.square())


def test_a_chain_says_what_its_rules_say():
    loud = Rule(stateless, lambda g, state, theta, t: (g, state), broadcast=lambda state: torch.ones(1))
    rule = chain(scale(1.0), loud)
    assert same(rule.broadcast(rule.init(torch.zeros(D), FACTS, ())), ((), torch.ones(1)))


def test_a_chain_passes_the_stage_before_to_every_rule():
    heir = Rule(lambda theta, facts, before: before, lambda g, state, theta, t: (g, state))
    assert chain(heir, heir).init(torch.zeros(D), FACTS, "old") == ("old", "old")


@pytest.mark.parametrize(("last", "kept"), [(0.1, 1), (0.5, 4), (1.0, 9), (0.01, 1)])
def test_the_average_is_of_the_last_iterates(last, kept):
    gs = aggregates()
    steps, models = walk(chain(scale(-0.1), average(last)), gs)
    assert torch.equal(steps, -0.1 * gs), "the walk itself is unchanged"
    iterates = steps.cumsum(0)  # theta after each round, from zero
    torch.testing.assert_close(models[-1], iterates[-kept:].mean(0))
    if kept < T:
        assert not torch.allclose(models[-1], iterates[-kept - 1 :].mean(0)), "one iterate too many"
        torch.testing.assert_close(models[0], iterates[0])  # before the tail begins: the last iterate


@pytest.mark.parametrize("last", [0.0, -0.5, 1.5, float("nan")])
def test_an_average_of_nothing_is_refused(last):
    with pytest.raises(SordinoError, match="average"):
        average(last)


def test_an_ema_that_forgets_nothing_is_refused():
    with pytest.raises(SordinoError, match="beta"):
        ema(1.0)
    with pytest.raises(SordinoError, match=r"momentum: 1.0 must lie in \[0, 1\)"):
        heavy_ball(1.0)
    with pytest.raises(SordinoError, match=r"weight_decay: 1.0 must lie in \[0, 1\)"):
        shrink(1.0)
