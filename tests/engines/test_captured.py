"""Rounds that are replayed are the rounds one by one. Where there is no GPU, a plain call takes the graph's place."""

import numpy as np
import pytest
import torch

from sordino.core import Facts
from sordino.engines import captured
from sordino.engines.captured import AnyLaterRound, CapturedRound, RoundMattersError
from sordino.rules import adam, average, chain, ema, fisher, heavy_ball, scale, yogi
from sordino.tree import leaves

RUNS, SIZE, ROUNDS = 3, 6, 5
FACTS = Facts(2, np.array([4, 4]), 8, 2.0, 0.1, shapes=((3, 2),))


class Graph:
    """Like `CapturedGraph`: it works on copies of its inputs and returns a copy of its output."""

    def __init__(self, f, inputs, pool=None, *, autograd=True):
        self.f = f

    def __call__(self, inputs):
        return self.f(*(each.clone() for each in inputs)).clone()


def noised_sum(theta, noise):
    return theta.sin() + 0.1 * noise


def rounds(rule, first=0):
    """Theta and state after each round, one by one and by a graph."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(RUNS, SIZE, generator=generator)
    noise = torch.randn(ROUNDS, RUNS, SIZE, generator=generator)
    plain = graph = (theta, rule.init(theta, FACTS, ()))
    replay = CapturedRound(noised_sum, rule, *graph, noise[0], first)
    for t in range(ROUNDS):
        total = noised_sum(plain[0], noise[t])
        step, state = rule.update(total, plain[1], plain[0], first + t)
        plain = plain[0] + step, state
        aggregate, *graph = replay(*graph, noise[t])
        yield (total, *plain), (aggregate, *graph)


@pytest.mark.parametrize(
    "rule",
    [scale(-0.1), adam(), yogi(), fisher(), chain(ema(0.9), scale(-0.1)), chain(adam(), scale(torch.tensor([[0.5]])))],
    ids=["scale", "adam", "yogi", "fisher", "ema", "runs"],
)
def test_a_graph_replays_the_rounds(rule, monkeypatch):
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    kept = []
    for plain, graph in rounds(rule):
        assert type(plain[2]) is type(graph[2])
        assert all(torch.equal(a, b) for a, b in zip(leaves(plain), leaves(graph), strict=True))
        kept.append(([each.clone() for each in leaves(graph)], leaves(graph)))
    assert all(torch.equal(a, b) for copies, own in kept for a, b in zip(copies, own, strict=True))  # none reused


def test_a_state_from_elsewhere_is_taken_up(monkeypatch):
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    rule, theta, noise = adam(), torch.ones(RUNS, SIZE), torch.zeros(RUNS, SIZE)
    state = rule.init(theta, FACTS, ())
    replay = CapturedRound(noised_sum, rule, theta, state, noise, 0)
    replay(theta, state, noise)
    other = state._replace(first=state.first + 1)
    step, after = rule.update(noised_sum(2 * theta, noise), other, 2 * theta, 0)
    _, moved, new = replay(2 * theta, other, noise)
    assert torch.equal(moved, 2 * theta + step)
    assert torch.equal(new.first, after.first)


@pytest.mark.parametrize(
    "rule",
    [
        adam(bias_correction=True),
        fisher(warm_start=3),
        fisher(ema_rounds=2),
        heavy_ball(0.9, restart=4),
        average(0.5),
    ],
    ids=["bias correction", "warm start", "other first rounds", "restart", "tail"],
)
def test_a_step_that_depends_on_the_round_is_not_captured(rule, monkeypatch):
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    with pytest.raises((RoundMattersError, TypeError)):
        list(rounds(rule))


def test_after_the_first_rounds_it_is(monkeypatch):
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    for plain, graph in rounds(fisher(ema_rounds=2), first=2):
        assert torch.equal(plain[1], graph[1])


def test_only_what_holds_for_all_later_rounds_is_answered():
    later = AnyLaterRound(3)
    assert (later >= 3, later > 2, later < 3, later <= 2) == (True, True, False, False)
    for ask in (
        lambda: later >= 4,
        lambda: later < 4,
        lambda: later > 3,
        lambda: later <= 3,
        lambda: later == 3,
        lambda: later != 3,
        lambda: bool(later),
        lambda: later + 1,
        lambda: later % 2,
        lambda: 0.9**later,
        lambda: int(later),
        lambda: {later},
        lambda: torch.ones(2) * later,
    ):
        with pytest.raises((RoundMattersError, TypeError)):
            ask()
