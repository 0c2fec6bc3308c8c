"""The client's side of a round: what leaves is clipped, noised with care, and counted."""

import math
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino.core import Batch, Kind, Lemma, Local, Method, Privacy, Query, Rule, Stage, Trust, Unit
from sordino.data.records import Records
from sordino.engines import oracle, reference, simulate
from sordino.engines.oracle import clipped, noised
from sordino.errors import OverspentError, SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.models.torch_model import TorchModel
from sordino.privacy import calibration
from sordino.privacy.mechanisms.gaussian import GRID_BITS, Draw
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan
from sordino.rules import scale

EVERY = frozenset((unit, trust) for unit in Unit for trust in Trust)


def small(dtype=torch.float32, seed=0, n=40):
    rng = np.random.default_rng(seed)
    return Records.of(rng.normal(size=(n, 3)), rng.integers(0, 2, n), np.arange(n) % 4, dtype=dtype)


def plan_for(records, method=None, **privacy):
    return Plan(method or build("dp-fedgd"), 3, records.sizes, Privacy(**{"epsilon": 8.0, **privacy}))


# ----------------------------------------------------------------------------------------------------- the grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_bits_do_not_tell_whether_a_sum_was_zero(dtype):
    """Mironov's attack: `0 + noise` reaches only numbers that noise itself can be, `c + noise` others as well."""
    torch.manual_seed(0)
    std = torch.tensor(10.04, dtype=torch.float64)
    z = torch.randn(20_000, dtype=torch.float64)
    zero, one = torch.zeros(len(z), dtype=dtype), torch.full((len(z),), 0.7310585, dtype=dtype)

    def tells(add):
        """Is a release one that noise alone, scaled in that precision, can make? The bits below the grid decide."""
        step = float(torch.exp2(torch.floor(torch.log2(std)) - GRID_BITS))
        return [float(((add(v) / step).frac().abs() > 1e-9).double().mean()) for v in (zero, one)]

    naive = tells(lambda v: v + (std.to(dtype) * z.to(dtype)))
    assert min(naive) > 0.5, "the naive sum has bits below the grid: the test can fail"
    assert tells(lambda v: noised(v, Draw.plain(z), std, secret=True)) == [0.0, 0.0]


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("unit", ["record", "client"])
def test_whatever_leaves_lies_on_the_grid(engine, unit):
    records = small()
    plan = plan_for(records, build("dp-fedgd", unit), unit=unit, trust="secure-aggregation")
    number = 0 if unit == "record" else 1
    grid = 2 ** (
        math.floor(math.log2(calibration.aggregate_std(plan, 0, number))) - GRID_BITS
    )  # of the sum, whoever came
    for this_round in engine.run(plan, Linear(3, 2), records, Secure()):
        ticks = this_round.aggregate.double() / grid
        assert float((ticks - ticks.round()).abs().max()) < 0.05


def test_rounding_is_lost_in_the_noise():
    z = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    std = torch.tensor(3.0)
    rounded = noised(torch.zeros_like(z), Draw.plain(z), std, secret=True)
    assert float((rounded - 3.0 * z).abs().max()) <= 3.0 / 2**GRID_BITS
    assert torch.equal(noised(torch.zeros_like(z), Draw.plain(z), std, secret=False), 3.0 * z)


# --------------------------------------------------------------------------------------------------- one use of noise


@pytest.mark.parametrize("engine", [reference, simulate])
def test_one_source_in_two_runs_does_not_cancel(engine):
    """With the same noise twice, the difference of two runs would be bare."""
    source, a, b = Secure(), small(torch.float64, 0), small(torch.float64, 1)
    plan = plan_for(a)
    first, second = (next(engine.run(plan, Linear(3, 2), records, source)).aggregate for records in (a, b))
    bare = plan_for(a, epsilon=math.inf)
    clear = [next(engine.run(bare, Linear(3, 2), records, source)).aggregate for records in (a, b)]
    left = (first - second) - (clear[0] - clear[1])
    assert float(left.norm()) > 0.1 * calibration.aggregate_std(plan, 0)
    seeded = [next(engine.run(plan, Linear(3, 2), records, Seeded(1))).aggregate for records in (a, b)]
    assert float(((seeded[0] - seeded[1]) - (clear[0] - clear[1])).norm()) < 1e-9, "a seed repeats: not private"


def test_every_run_of_an_axis_needs_its_own_source():
    records = small()
    with pytest.raises(SordinoError, match="give one per run"):
        next(simulate.run(plan_for(records), Linear(3, 2), records, Secure(), theta=torch.zeros(3, 8)))


# ------------------------------------------------------------------------------------------------ sizes and messages


def test_declared_sizes_divide_on_both_engines():
    """Where whole clients are hidden, a client may declare another size than it has; the declared one divides."""
    records, unit = small(torch.float64), Unit.CLIENT
    plan = plan_for(records, build("dp-fedgd", unit), unit=unit, trust="secure-aggregation")
    plan = replace(plan, sizes=(20, 10, 30, 10))
    slow = [r.model for r in reference.run(plan, Linear(3, 2), records, Seeded(0))]
    fast = [r.model for r in simulate.run(plan, Linear(3, 2), records, Seeded(0), shares=True)]
    torch.testing.assert_close(slow[-1], fast[-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_rules_that_return_something_else_are_told_what_to_return(engine, trust):
    records, built = small(), build("dp-fedgd")
    (stage,) = built.stages
    silent = stage._replace(local=Local(lambda *_: None))
    stepping = stage._replace(rule=stage.rule._replace(update=lambda g, state, theta, t: -g))
    short = stage._replace(rule=stage.rule._replace(update=lambda g, state, theta, t: (-g[..., :1], state)))
    for wrong, why in (
        (silent, "message: compute returned None"),
        (stepping, r"update: .* must return \(step, state\)"),
        (short, r"update: the step has the shape \(1,\), and the model \(8,\)"),
    ):
        plan = plan_for(records, built._replace(stages=(wrong,)), trust=trust)
        with pytest.raises(SordinoError, match=why):
            next(engine.run(plan, Linear(3, 2), records, Secure()))


def test_a_message_noised_as_a_whole_must_be_a_vector():
    queries = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, 1.0))

    def compute(ask, broadcast, memory, cache):
        g = ask.gradient(broadcast.theta)
        return g.reshape(*g.shape[:-1], 4, 2)

    records = small()
    method = Method("matrix", Unit.CLIENT, (Stage(Local(compute), scale(-1.0), queries),), EVERY)
    for engine in (reference, simulate):
        with pytest.raises(SordinoError, match="must be one vector"):
            next(engine.run(plan_for(records, method, unit="client"), Linear(3, 2), records, Seeded(0)))


def test_a_minibatch_is_asked_about_no_more_often_than_declared():
    def compute(ask, broadcast, memory, cache):
        batch = ask.sample()
        return ask.gradient(broadcast.theta, on=batch) + ask.gradient(broadcast.theta, on=batch)

    records = small(torch.float64)
    for joint, fine in ((1, False), (2, True)):
        query = Query(Kind.GRADIENT, 1.0, calls=2, joint=joint)
        method = Method("toy", Unit.RECORD, (Stage(Local(compute), scale(-1.0), (query,)),), EVERY)
        for engine in (reference, simulate):
            run = engine.run(plan_for(records, method), Linear(3, 2), records, Seeded(0))
            if fine:
                next(run)
            else:
                with pytest.raises(OverspentError, match="minibatch"):
                    next(run)


@pytest.mark.parametrize(("declared", "said"), [(1, "1 call per round"), (2, "2 calls per round")])
def test_one_call_too_many_names_the_remedy(declared, said):
    def compute(ask, broadcast, memory, cache):
        return sum(ask.gradient(broadcast.theta) for _ in range(declared + 1))

    records, query = small(torch.float64), Query(Kind.GRADIENT, 1.0, calls=declared)
    method = Method("toy", Unit.RECORD, (Stage(Local(compute), scale(-1.0), (query,)),), EVERY)
    with pytest.raises(OverspentError, match=rf"declares {said} .*asked once more; .* calls={declared + 1}\)"):
        next(reference.run(plan_for(records, method), Linear(3, 2), records, Seeded(0)))


def test_a_batch_made_by_hand_gains_nothing():
    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta, on=Batch(0))

    records = small(torch.float64)
    method = Method("toy", Unit.RECORD, (Stage(Local(compute), scale(-1.0), (Query(Kind.GRADIENT, 1.0),)),), EVERY)
    with pytest.raises(OverspentError, match="sample"):
        next(reference.run(plan_for(records, method), Linear(3, 2), records, Seeded(0)))


@pytest.mark.parametrize("engine", [reference, simulate])
def test_a_bound_about_one_minibatch_allows_no_other_question(engine):
    """A matrix of other records than the gradient's is no part of the account."""
    seen, asked, records = [], [], small(torch.float64)

    def compute(ask, broadcast, memory, cache):
        batch = ask.sample()
        seen.append(batch)
        g = ask.gradient(broadcast.theta, on=batch)
        matrix = asked[-1](ask, broadcast.theta, batch)
        return g + 0 * matrix.sum((-1, -2)).unsqueeze(-1)

    lemma = Lemma("toy", lambda b, adjacency: 1.0, sampled=True)
    inside = Query(Kind.GRADIENT, 1.0, noise=None), Query(Kind.FISHER, 1.0, noise=None)
    stage = Stage(Local(compute), scale(-1.0), (*inside, Query(Kind.DELTA, 1.0, bound=lemma)))
    plan = replace(plan_for(records, Method("toy", Unit.RECORD, (stage,), EVERY)), sampling=Sampling.parse("poisson:3"))
    for question, fine in (
        (lambda ask, theta, batch: ask.fisher(theta, on=batch), True),
        (lambda ask, theta, batch: ask.fisher(theta), False),
        (lambda ask, theta, batch: ask.fisher(theta, on=ask.sample()), False),
        (lambda ask, theta, batch: ask.fisher(theta, on=Batch(1)), False),
    ):
        asked.append(question)
        run = engine.run(plan, Linear(3, 2), records, Seeded(0))
        if fine:
            next(run)
            assert all(batch.crowding > 1 for batch in seen)
            next(engine.run(replace(plan, sampling=Sampling()), Linear(3, 2), records, Seeded(0)))
            assert seen[-1].crowding == 1
        else:
            with pytest.raises(OverspentError, match="minibatch"):
                next(run)
    keeps = stage._replace(local=Local(compute, prepare=lambda ask: ask.gradient(torch.zeros(8))))
    with pytest.raises(OverspentError, match="minibatch"):
        next(engine.run(replace(plan, method=plan.method._replace(stages=(keeps,))), Linear(3, 2), records, Seeded(0)))


def test_a_released_matrix_is_about_all_records():
    def compute(ask, broadcast, memory, cache):
        return ask.fisher(broadcast.theta, on=ask.sample())

    records, query = small(torch.float64), Query(Kind.FISHER, 1.0, psd=True)
    method = Method("toy", Unit.RECORD, (Stage(Local(compute), scale(-1.0), (query,)),), EVERY)
    with pytest.raises(OverspentError, match="leave `on` out"):
        next(reference.run(plan_for(records, method), Linear(3, 2), records, Seeded(0)))


class Skewed(Linear):
    """Some matrix products differ across the diagonal in the last bit; here they differ by more, to be seen."""

    def _skewed(self, total):
        return total + torch.ones_like(total).triu(1)

    def gram_sum(self, *arguments, **how):
        return self._skewed(super().gram_sum(*arguments, **how))

    def curvature_sum(self, *arguments, **how):
        return self._skewed(super().curvature_sum(*arguments, **how))

    def fisher_sum(self, *arguments, **how):
        return self._skewed(super().fisher_sum(*arguments, **how))


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("kind", [Kind.GRAM, Kind.CURVATURE, Kind.FISHER])
def test_a_released_matrix_has_no_part_without_noise(engine, trust, kind):
    """Noise on entries (i, j) and (j, i) is one number, so their difference would be released as it is."""

    def ask_for_matrix(ask, broadcast, memory, cache):
        return ask.gram() if kind is Kind.GRAM else getattr(ask, str(kind))(broadcast.theta)

    def init(theta, facts, before):
        return ()

    rule = Rule(init, lambda matrix, state, theta, t: (torch.zeros_like(theta), state))
    stage = Stage(Local(ask_for_matrix), rule, (Query(kind, 5.0, psd=True),))
    method, records = Method("matrices", Unit.RECORD, (stage,), EVERY), small()
    plan = Plan(method, 2, records.sizes, Privacy(epsilon=8.0, trust=trust))
    for result in engine.run(plan, Skewed(3, 1, Loss.LOGISTIC), records, Secure()):
        matrix = result.aggregate
        assert matrix.shape[-2:] == (4, 4)
        assert torch.equal(matrix, matrix.mT)


def test_a_message_that_is_not_finite_tells_nothing():
    for clip in (1.0, math.inf):
        for bad in (math.nan, math.inf):
            message = torch.tensor([[1.0, bad], [0.6, 0.0]])
            assert clipped(message, clip)[0].tolist() == [0.0, 0.0]
            assert clipped(message, clip)[1].tolist() == pytest.approx([0.6, 0.0])


def test_rules_do_not_learn_the_sizes_of_whole_clients():
    records = small()
    assert len(calibration.stage_facts(plan_for(records), 0).sizes) == 4
    assert len(calibration.stage_facts(plan_for(records, build("dp-fedgd", "client"), unit="client"), 0).sizes) == 0


@pytest.mark.parametrize("clip", [1e-6, 1e-4, 1e-3, 1.0])
def test_a_long_message_is_clipped_at_every_magnitude(clip):
    for size in (1.0, 1e10, 1e30, 3e37):
        message = torch.randn(50, generator=torch.Generator().manual_seed(0)) * size
        assert float(clipped(message, clip).double().norm()) <= clip


def test_chance_inside_a_model_comes_from_the_source_for_every_kind_of_answer():
    """A dropout mask that others knew by its place in the batch would tell who is in it."""
    seeds = []

    class Dropping(Linear):
        random = True

        def clipped_sum(self, *args):
            seeds.append(torch.initial_seed())
            return super().clipped_sum(*args)

        def count_sum(self, *args):
            seeds.append(torch.initial_seed())
            return super().count_sum(*args)

        def fisher_sum(self, *args):
            seeds.append(torch.initial_seed())
            return super().fisher_sum(*args)

    def compute(ask, broadcast, memory, cache):
        ask.count(broadcast.theta, torch.ones_like(broadcast.theta))
        ask.fisher(broadcast.theta)
        return ask.gradient(broadcast.theta)

    queries = (Query(Kind.GRADIENT, 1.0), Query(Kind.COUNT, 0.5), Query(Kind.FISHER, 1.0, psd=True))
    method = Method("toy", Unit.RECORD, (Stage(Local(compute), scale(-1.0), queries),), EVERY)
    records, before, state = small(torch.float64), torch.initial_seed(), torch.get_rng_state()
    for engine in (reference, simulate):
        for source in (Seeded(0), Seeded(1)):
            next(engine.run(plan_for(records, method), Dropping(3, 2), records, source))
    assert before not in seeds
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (
        {*part} for part in (seeds[: len(records.sizes) * 3], seeds[len(records.sizes) * 3 :][: len(records.sizes) * 3])
    )
    assert len(first) == len(second) == 3 * len(records.sizes)  # one for each client and answer
    assert not first & second


def test_chance_inside_a_model_comes_from_the_source_where_a_cohort_is_one_matrix():
    """Two runs from one source are equal, whatever torch's own generator does; another source draws other masks."""
    records = small(torch.float64)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))
    model, plan = TorchModel(layers), plan_for(records, build("dp-fedgd"))

    def trained(source):
        return next(simulate.run(plan, model, records, source)).model

    state = torch.get_rng_state()
    first = trained(Noiseless(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, trained(Noiseless(1)))
    assert not torch.equal(first, trained(Noiseless(2)))


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("trust", [Trust.SECURE_AGGREGATION, Trust.TRUSTED_SERVER])
def test_two_answers_of_one_query_do_not_share_the_noise_of_a_sum(engine, trust):
    """The noise of a sum belongs to a query: the difference of two such answers would have none."""

    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta), ask.gradient(broadcast.theta + 1)

    def update(mean, state, theta, t):
        return mean[0] - mean[1], state

    rule = scale(1.0)._replace(update=update)
    stage = Stage(Local(compute), rule, (Query(Kind.GRADIENT, 1.0, calls=2),))
    method = Method("twice", Unit.RECORD, (stage,), frozenset((Unit.RECORD, each) for each in Trust))
    records = small()
    with pytest.raises(SordinoError, match="two answers of one query"):
        list(engine.run(plan_for(records, method, trust=trust), Linear(3, 2), records, Seeded(0)))


@pytest.mark.parametrize("mutant", [False, True])
def test_dropout_of_two_threads_is_drawn_in_turn(mutant, monkeypatch):
    """They share torch's generator: a mutant without turns draws from what the process had before, which others may
    know."""
    if mutant:
        monkeypatch.setattr(oracle, "_generator", nullcontext())
    entered, left, model = threading.Event(), threading.Event(), SimpleNamespace(random=True)

    def other():
        with oracle.seeded_dropout(model, torch.zeros(1), lambda: 2):
            entered.set()
            left.wait(0.3)

    with torch.random.fork_rng():
        torch.manual_seed(7)
        public = torch.rand(3)
        torch.manual_seed(7)
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        # The other thread began first and ends first, and puts back what it found.
        with oracle.seeded_dropout(model, torch.zeros(1), lambda: 1):
            left.set()
            thread.join()
            drawn = torch.rand(3)
    assert torch.equal(drawn, public) == mutant


def unseal(monkeypatch):
    """From now on a rule gets the numbers of its answers, whatever the engine says."""
    never = property(lambda ask: False, lambda ask, sealed: None)
    monkeypatch.setattr(oracle.Oracle, "sealed", never, raising=False)


def sends(ask, broadcast, memory, cache):
    return ask.gradient(broadcast.theta)


def grows(ask, broadcast, memory, cache):
    answer = ask.gradient(broadcast.theta)
    answer *= 1000
    return answer


def writes(ask, broadcast, memory, cache):
    answer = ask.gradient(broadcast.theta)
    broadcast.theta.sub_(answer.reshape(-1, broadcast.theta.shape[-1]).sum(0).view_as(broadcast.theta))
    return answer


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize(
    ("rule", "word"), [(grows, "must be sent unchanged"), (writes, "compute: it writes to the broad")]
)
def test_a_rule_that_writes_in_place_is_refused(engine, rule, word, monkeypatch):
    """Where noise is added to the sum, answers have none yet: the first is a thousand times as long as its noise is
    for, and the second moves theta by it. A mutant that does not look sums both."""
    records, query = small(), Query(Kind.GRADIENT, 1.0)
    method = Method("toy", Unit.RECORD, (Stage(Local(rule), scale(-0.1), (query,)),), EVERY)
    plan = plan_for(records, method, trust="secure-aggregation")
    # PyTorch does not count writes to theta in inference mode; the answer has no numbers that could be written there.
    for context in (torch.no_grad, torch.inference_mode) if rule is grows else (torch.no_grad,):
        with pytest.raises(SordinoError, match=word), context():
            next(engine.run(plan, Linear(3, 2), records, Seeded(0)))
    if engine is reference:
        monkeypatch.setattr(oracle.Unchanged, "holds", True)
        monkeypatch.setattr(
            oracle.Oracle, "sealed", property(lambda ask: False, lambda ask, sealed: None), raising=False
        )
        plain = Method("toy", Unit.RECORD, (Stage(Local(sends), scale(-0.1), (query,)),), EVERY)
        honest, mutant = (
            next(engine.run(replace(plan, method=each), Linear(3, 2), records, Noiseless())) for each in (plain, method)
        )
        assert float((mutant.model - honest.model).norm()) > 10 * float(honest.model.norm())


def extragradient(ask, theta, seen):
    return ask.gradient(theta - 1e4 * ask.gradient(theta))


def branches(ask, theta, seen):
    return ask.gradient(theta + 1e4 if ask.gradient(theta).sum() > 0 else theta)


def reads(ask, theta, seen):
    return ask.gradient(theta + 1e4 * torch.from_numpy(ask.gradient(theta).numpy()))


def scales(ask, theta, seen):
    return ask.gradient(theta, scale=1e4 * ask.gradient(theta).abs())


def keeps(ask, theta, seen):
    seen.append(ask.gradient(theta - sum(1e4 * g for g in seen)))
    return seen[-1]


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
@pytest.mark.parametrize("rule", [extragradient, branches, reads, scales, keeps])
@pytest.mark.parametrize("engine", [reference, simulate])
def test_no_answer_steers_a_question_where_noise_is_added_to_the_sum(engine, rule, trust, monkeypatch):
    """One record in the first answer moves the gradients of all other records in the second one. A mutant that hands
    out the numbers runs, and one record moves its sum by several bounds."""
    seen = []
    method = Method(
        "toy",
        Unit.RECORD,
        (
            Stage(
                Local(lambda ask, broadcast, memory, cache: rule(ask, broadcast.theta, seen)),
                scale(-0.1),
                (Query(Kind.GRADIENT, 1.0, calls=1 if rule is keeps else 2),),
            ),
        ),
        EVERY,
    )
    x, labels, clients = np.ones((41, 1)), np.arange(41) % 2, np.arange(41) // 2 % 2
    records = Records.of(x, labels, clients)
    plan = plan_for(records, method, trust=trust)
    with pytest.raises(SordinoError, match="compute: it computes with an answer"):
        list(engine.run(plan, Linear(1, 2), records, Seeded(0)))
    if rule is extragradient and engine is reference:
        monkeypatch.setattr(
            oracle.Oracle, "sealed", property(lambda ask: False, lambda ask, sealed: None), raising=False
        )
        other = Records.of(x, np.where(np.arange(41) == 40, 1, labels), clients)
        sums = [next(reference.run(plan, Linear(1, 2), each, Noiseless())).aggregate for each in (records, other)]
        assert float((sums[0] - sums[1]).norm()) * 41 > 5 * 2 * 1.0


def test_a_rule_that_writes_to_the_numbers_of_records_changes_no_divisor():
    def divides(ask, broadcast, memory, cache):
        weight = ask.records
        weight /= 1000
        return ask.gradient(broadcast.theta)

    records, query = small(), Query(Kind.GRADIENT, 1.0)
    for engine in (reference, simulate):
        first, second = (
            next(
                engine.run(
                    plan_for(records, Method("toy", Unit.RECORD, (Stage(rule, scale(-0.1), (query,)),), EVERY)),
                    Linear(3, 2),
                    records,
                    Noiseless(),
                )
            )
            for rule in (Local(sends), Local(divides))
        )
        torch.testing.assert_close(first.aggregate, second.aggregate)
