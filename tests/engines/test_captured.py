"""Rounds that are replayed are the rounds one by one. Where there is no GPU, a plain call takes the graph's place."""

import numpy as np
import pytest
import torch

from sordino.core import Facts, Privacy
from sordino.data.records import Records
from sordino.engines import captured, simulate
from sordino.engines.captured import AnyLaterRound, CapturedRounds, RoundMattersError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Counted
from sordino.privacy.plan import Plan
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


def rounds(rule, first=0, block=1):
    """Theta and state after each round, one by one and by a graph of so many rounds."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(RUNS, SIZE, generator=generator)
    noise = torch.randn(ROUNDS + block, RUNS, SIZE, generator=generator)
    plain = graph = (theta, rule.init(theta, FACTS, ()))
    replay, asked = CapturedRounds(noised_sum, rule, *graph, noise[:block], first), []
    for t in range(ROUNDS):
        total = noised_sum(plain[0], noise[t])
        step, state = rule.update(total, plain[1], plain[0], first + t)
        plain = plain[0] + step, state
        aggregate, *graph = replay(*graph, lambda t=t: asked.append(t) or noise[t : t + block])
        yield (total, *plain), (aggregate, *graph)
    assert asked == list(range(0, ROUNDS, block))


@pytest.mark.parametrize(
    "rule",
    [scale(-0.1), adam(), yogi(), fisher(), chain(ema(0.9), scale(-0.1)), chain(adam(), scale(torch.tensor([[0.5]])))],
    ids=["scale", "adam", "yogi", "fisher", "ema", "runs"],
)
@pytest.mark.parametrize("block", [1, 2, ROUNDS])
def test_a_graph_replays_the_rounds(rule, block, monkeypatch):
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    kept = []
    for plain, graph in rounds(rule, block=block):
        assert type(plain[2]) is type(graph[2])
        assert all(torch.equal(a, b) for a, b in zip(leaves(plain), leaves(graph), strict=True))
        kept.append(([each.clone() for each in leaves(graph)], leaves(graph)))
    assert all(torch.equal(a, b) for copies, own in kept for a, b in zip(copies, own, strict=True))  # none reused


@pytest.mark.parametrize("block", [1, 3])
def test_a_state_from_elsewhere_is_taken_up(block, monkeypatch):
    """Rounds that were computed ahead are dropped."""
    monkeypatch.setattr(captured, "CapturedGraph", Graph)
    rule, theta, noise = adam(), torch.ones(RUNS, SIZE), torch.zeros(block, RUNS, SIZE)
    state = rule.init(theta, FACTS, ())
    replay = CapturedRounds(noised_sum, rule, theta, state, noise, 0)
    replay(theta, state, lambda: noise)
    other = state._replace(first=state.first + 1)
    step, after = rule.update(noised_sum(2 * theta, noise[0]), other, 2 * theta, 0)
    _, moved, new = replay(2 * theta, other, lambda: noise)
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


@pytest.fixture
def graphs(monkeypatch):
    """Runs of a linear model as on a GPU; the noise's shape of every replay."""
    replayed = []

    class Counting(Graph):
        def __call__(self, inputs):
            replayed.append(tuple(inputs[1].shape))
            return super().__call__(inputs)

    monkeypatch.setattr(captured, "CapturedGraph", Counting)
    monkeypatch.setattr(simulate, "compiled", lambda f: f)
    monkeypatch.setattr(simulate.BatchedClients, "_many_on_gpu", lambda self, query, theta: theta.dim() == 2)
    return replayed


def trained(method, rounds, *, start=0, checkpoint=(), participation="full", runs=2):
    """The rounds of two runs."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 3)), rng.integers(0, 2, 24)
    records = Records.of(x, y, np.arange(24) % 3, dtype=torch.float64)
    plan = Plan(method, rounds, records.sizes, Privacy(epsilon=8.0), participation=participation)
    theta, sources = torch.zeros(runs, Linear(3, 2).size), [Counted(1 + k) for k in range(runs)]
    return list(simulate.run(plan, Linear(3, 2), records, sources, theta=theta, start=start, checkpoint=checkpoint))


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedadam", "dp-fedsofim"])
@pytest.mark.parametrize(("rounds", "lengths"), [(5, [5]), (16, [16]), (37, [16, 16, 16])])
def test_a_run_by_graphs_is_the_run(name, rounds, lengths, graphs):
    """The last graph may compute rounds that nobody asks for."""
    by_graphs, replayed = trained(build(name), rounds), list(graphs)
    assert [shape[0] for shape in replayed] == lengths
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(simulate.BatchedClients, "captured_round", lambda *args: None)
        plain.setattr(simulate.BatchedClients, "_many_on_gpu", lambda *args: False)
        one_by_one = trained(build(name), rounds)
    for a, b in zip(by_graphs, one_by_one, strict=True):
        for one, other in zip(leaves((a.aggregate, a.checkpoint)), leaves((b.aggregate, b.checkpoint)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_run_by_graphs_resumes(graphs):
    whole = trained(build("dp-fedadam"), 40)
    rest = trained(build("dp-fedadam"), 40, start=7, checkpoint=whole[6].checkpoint)
    assert [each.t for each in rest] == list(range(7, 40))
    torch.testing.assert_close(rest[-1].model, whole[-1].model, rtol=0, atol=0)


def test_large_models_and_changing_cohorts_are_captured_round_by_round(graphs, monkeypatch):
    trained(build("dp-fedgd"), 12, participation="poisson:0.9")
    assert {shape[0] for shape in graphs} == {1}
    graphs.clear()
    monkeypatch.setattr(simulate, "CAPTURED_NUMBERS", 16 * 2 * Linear(3, 2).size - 1)
    trained(build("dp-fedgd"), 3)
    assert [shape[0] for shape in graphs] == [1, 1, 1]


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
