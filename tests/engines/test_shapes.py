"""Every shape a method may take, in miniature, on both engines: the nouns must hold them all without bending.

The toys are least squares without bias, so that a Gram matrix, a Hessian and a covariance are the same thing.
"""

import math

import numpy as np
import pytest
import torch

from sordino.core import Correlated, Kind, Lemma, Local, Method, Privacy, Query, Rule, Stage, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.charges import charges
from sordino.models.linear import Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.rules import chain, ema, scale
from sordino.rules.basic import stateless
from tests.support import Squares, descend, solve, walk

PC = frozenset({(Unit.RECORD, Trust.UNTRUSTED_SERVER), (Unit.CLIENT, Trust.UNTRUSTED_SERVER)})
D = 4


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(90, D)), rng.choice(5, 90, p=[0.1, 0.1, 0.2, 0.2, 0.4])
    client[:5] = range(5)
    return Records.of(x, x @ np.arange(D) + rng.normal(size=90), client, dtype=torch.float64)


MODEL = Squares(D, 1, Loss.SQUARES, bias=False)


def sgd(lr=0.1):
    return chain(scale(-lr))


def two_stages():
    """FedHybrid: one round of local steps with half the budget, then gradients with the other half."""
    one = Stage(Local(walk(3)), Rule(stateless, lambda g, s, th, t: (g, s)), (Query(Kind.GRADIENT, 1.0, 3, 0.5),), 1)
    two = Stage(Local(descend), sgd(), (Query(Kind.GRADIENT, 1.0, share=0.5),))
    return Method("hybrid", Unit.RECORD, (one, two), PC)


def covariance_once():
    """FedFC: the covariance is one release in a round of its own; the next stage's rule inherits it."""

    def look(ask, broadcast, memory, cache):
        return ask.gram()

    def remember_matrix(aggregate, state, theta, t):
        return torch.zeros_like(theta), aggregate

    one = Stage(Local(look), Rule(stateless, remember_matrix), (Query(Kind.GRAM, 1.0, psd=True),), 1)
    ridge = 5.0 * torch.eye(D, dtype=torch.float64)
    newton = Rule(lambda theta, facts, before: before, lambda g, A, th, t: (-solve(A + ridge, g), A))
    two = Stage(Local(descend), newton, (Query(Kind.GRADIENT, 1.0),))
    return Method("fc", Unit.RECORD, (one, two), PC)


def warm_start_and_memory():
    """SCAFFOLD: control variates live at the clients, start from a paid release, and follow what was said."""

    def compute(ask, broadcast, c_i, cache):
        theta, c = broadcast.theta, broadcast.extras
        y = theta
        for _ in range(2):
            y = y - 0.1 * (ask.gradient(y) - c_i + c)
        return theta - y

    def start(aggregate, state, theta, t):
        return torch.zeros_like(theta), aggregate

    def update(zeta, c, theta, t):
        return -zeta, zeta / 0.2 - c + c

    one = Stage(
        Local(
            descend,
            update_memory=lambda message, broadcast, memory: message,
            init=lambda theta, before: torch.zeros_like(theta),
        ),
        Rule(stateless, start),
        (Query(Kind.GRADIENT, 1.0),),
        1,
    )
    two = Stage(
        Local(compute, lambda zeta, broadcast, c_i: c_i - broadcast.extras + zeta / 0.2, lambda theta, before: before),
        Rule(lambda theta, facts, before: before, update, broadcast=lambda c: c),
        (Query(Kind.GRADIENT, 1.0, calls=2),),
    )
    return Method("scaffold", Unit.RECORD, (one, two), PC)


def correlated():
    """DP-FTRL: prefix sums noised by a factorisation; the engine re-derives earlier draws."""
    prefix = np.tril(np.ones((6, 6)))
    encoder = np.linalg.cholesky(prefix @ prefix.T + np.eye(6))
    encoder = np.abs(encoder) / np.abs(encoder).max()
    noise = Correlated(encoder, np.linalg.inv(encoder))
    return Method("ftrl", Unit.RECORD, (Stage(Local(descend), sgd(), (Query(Kind.GRADIENT, 1.0, noise=noise),)),), PC)


def newton():
    """FedNewton: gradient and Hessian noised on the client, the quotient sent."""

    def compute(ask, broadcast, memory, cache):
        g, H = ask.gradient(broadcast.theta), ask.curvature(broadcast.theta)
        return solve(H + 20 * torch.eye(D, dtype=H.dtype), g)

    queries = (Query(Kind.GRADIENT, 1.0, share=0.7), Query(Kind.CURVATURE, 1.0, share=0.3, psd=True))
    return Method("newton", Unit.RECORD, (Stage(Local(compute), sgd(1.0), queries),), PC)


def lemma_duals_cache():
    """FedNew-FC: un-noised answers inside, a lemma's bound on the message, duals as memory, a factor as cache."""

    def prepare(ask):
        return torch.linalg.cholesky(ask.gram() + 2.0 * torch.eye(D, dtype=torch.float64))

    def compute(ask, broadcast, dual, cache):
        v = ask.gradient(broadcast.theta) - dual
        return torch.cholesky_solve(v.unsqueeze(-1), cache).squeeze(-1)

    queries = (
        Query(Kind.GRADIENT, 1.0, noise=None),
        Query(Kind.GRAM, 1.0, noise=None),
        Query(Kind.DELTA, bound=Lemma("toy", lambda m, adjacency: 1 * (1 + (adjacency == "replace-one")) / m)),
    )
    local = Local(
        compute, lambda y, broadcast, dual: dual + 0.1 * y, lambda theta, before: torch.zeros_like(theta), prepare
    )
    return Method("fednew", Unit.RECORD, (Stage(local, sgd(), queries),), PC)


def minibatches():
    return Method("mini", Unit.RECORD, (Stage(Local(walk(2)), sgd(-1.0), (Query(Kind.GRADIENT, 1.0, 2),)),), PC)


def client_level():
    queries = (Query(Kind.GRADIENT, noise=None, calls=2), Query(Kind.DELTA, 0.3))
    return Method("client", Unit.CLIENT, (Stage(Local(walk(2)), chain(ema(0.5), scale(1.0)), queries),), PC)


def pair_of_tensors():
    """FedAdamW: a message of two tensors."""

    def compute(ask, broadcast, memory, cache):
        g = ask.gradient(broadcast.theta)
        return g, g.square().mean(-1, keepdim=True)

    rule = Rule(stateless, lambda message, s, th, t: (-0.1 * message[0] / (1 + message[1]), s))
    return Method("pair", Unit.RECORD, (Stage(Local(compute), rule, (Query(Kind.GRADIENT, 1.0),)),), PC)


SHAPES = [
    two_stages,
    covariance_once,
    warm_start_and_memory,
    correlated,
    newton,
    lemma_duals_cache,
    minibatches,
    client_level,
    pair_of_tensors,
]


def plan_for(method, records, participation="full", epsilon=8.0):
    privacy = Privacy(epsilon, unit=method.unit)
    batch = Sampling("poisson", 0.5) if method.name == "mini" else Sampling()
    who = Participation.parse(participation)
    return Plan(method, 6, records.sizes, privacy, who, schedule_seed=3, sampling=batch)


@pytest.mark.parametrize("participation", ["full", "fixed:3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_engines_agree_and_the_budget_is_met(shape, participation, records):
    plan = plan_for(shape(), records, participation)
    slow = list(reference.run(plan, MODEL, records, Seeded(1)))
    fast = list(simulate.run(plan, MODEL, records, Seeded(1), shares=True))
    assert len(slow) == len(fast) == 6
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)
    assert spending.epsilon(plan) == pytest.approx(8.0, rel=5e-3 if spending.samples(plan) else 1e-6)
    noisier = [r.model for r in simulate.run(plan_for(shape(), records, participation, 1.0), MODEL, records, Seeded(1))]
    assert not torch.allclose(noisier[-1], fast[-1].model)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_resumes_from_any_round(shape, records):
    plan = plan_for(shape(), records)
    whole = list(simulate.run(plan, MODEL, records, Seeded(2)))
    for t in range(5):
        rest = list(simulate.run(plan, MODEL, records, Seeded(2), start=t + 1, checkpoint=whole[t].checkpoint))
        torch.testing.assert_close(rest[-1].model, whole[-1].model, rtol=0, atol=0)


def test_stages_have_their_own_budgets(records):
    plan = plan_for(two_stages(), records)
    (group,) = spending.groups(plan)
    mu = gaussian.mu(8.0, 1e-5)
    for release in group.releases:
        assert release.times * (release.sensitivity / release.std) ** 2 == pytest.approx(mu**2 / 2)
    assert [release.times for release in group.releases] == [3, 5]


def test_one_off_and_repeated_releases_share_equally_by_default(records):
    (group,) = spending.groups(plan_for(covariance_once(), records))
    gram, gradient = group.releases
    assert (gram.times, gradient.times) == (1, 5)
    assert gram.sensitivity == pytest.approx(math.sqrt(2))
    assert gram.sensitivity / gram.std == pytest.approx(gradient.sensitivity / gradient.std)


def test_a_stream_is_paid_for_round_by_round(records):
    """The increments charged to a ledger add up to the sensitivity of the whole stream."""
    plan = plan_for(correlated(), records, "fixed:3")
    for client in range(5):
        charged = [e for t in range(6) if client in plan.cohorts[t] for e in charges(plan, client, t, "r")]
        total = gaussian.mu_of((e.sensitivity, e.std, e.times) for e in charged)
        (mine,) = (g for g in spending.groups(plan) if client in g.clients)
        assert total == pytest.approx(mine.mu)


def test_correlated_noise_is_the_decoder_times_independent_draws(records):
    """With zero gradients the aggregate is the noise: its covariance over rounds is decoder decoder^T."""
    method = correlated()
    decoder = method.stages[0].queries[0].noise.decoder
    plan = plan_for(method, records)
    still = Records(torch.zeros_like(records.x), torch.zeros_like(records.y), records.starts)
    theta = torch.zeros(400, MODEL.size, dtype=torch.float64)
    draws = simulate.run(plan, MODEL, still, [Seeded(s) for s in range(400)], theta=theta)
    z = torch.stack([r.aggregate.flatten() for r in draws]).numpy() / calibration.aggregate_std(plan, 0)
    observed, expected = z @ z.T / z.shape[1], decoder @ decoder.T
    se = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / z.shape[1])
    assert (np.abs(observed - expected) < 4.5 * se).all()
    assert not (np.abs(observed - np.eye(6)) < 4.5 * se).all(), "independent noise would pass: the test cannot fail"


def test_runs_are_an_axis(records):
    """Learning rates and seeds as one tensor axis give what single runs give."""
    rates = torch.tensor([0.05, 0.2, 0.1], dtype=torch.float64)

    def method(lr):
        stage = Stage(Local(descend), chain(ema(0.5), scale(-lr)), (Query(Kind.GRADIENT, 1.0),))
        return Method("many", Unit.RECORD, (stage,), PC)

    def steps(lr):
        stage = Stage(Local(walk(2)), scale(1.0 * (lr > 0) * lr), (Query(Kind.GRADIENT, 1.0, 2),))
        return Method("many", Unit.RECORD, (stage,), PC)

    for build in (method, steps):
        together = plan_for(build(rates.unsqueeze(-1)), records)
        sources = [Seeded(s) for s in range(3)]
        theta = torch.zeros(3, D, dtype=torch.float64)
        *_, last = simulate.run(together, MODEL, records, sources, theta=theta)
        for r in range(3):
            *_, one = simulate.run(plan_for(build(float(rates[r])), records), MODEL, records, Seeded(r))
            torch.testing.assert_close(last.model[r], one.model, rtol=1e-10, atol=1e-12)


def test_asking_more_than_declared_raises(records):
    greedy = Method("greedy", Unit.RECORD, (Stage(Local(walk(3)), sgd(), (Query(Kind.GRADIENT, 1.0, 2),)),), PC)
    for engine in (reference, simulate):
        with pytest.raises(OverspentError, match="declares 2 calls"):
            next(engine.run(plan_for(greedy, records), MODEL, records, Seeded(0)))


def test_asking_for_something_else_raises(records):
    def compute(ask, broadcast, memory, cache):
        return ask.gram()[..., 0]

    curious = Method("curious", Unit.RECORD, (Stage(Local(compute), sgd(), (Query(Kind.GRADIENT, 1.0),)),), PC)
    for engine in (reference, simulate):
        with pytest.raises(OverspentError, match="declares no gram query"):
            next(engine.run(plan_for(curious, records), MODEL, records, Seeded(0)))


def test_a_cache_may_not_use_up_the_round_s_noise(records):
    local = Local(descend, prepare=lambda ask: ask.gradient(torch.zeros(D, dtype=torch.float64)))
    sly = Method("sly", Unit.RECORD, (Stage(local, sgd(), (Query(Kind.GRADIENT, 1.0),)),), PC)
    for engine in (reference, simulate):
        with pytest.raises(OverspentError, match="prepare asked"):
            next(engine.run(plan_for(sly, records), MODEL, records, Seeded(0)))


@pytest.mark.parametrize(
    "queries",
    [
        (Query(Kind.GRADIENT, 1.0, noise=None),),
        (Query(Kind.GRADIENT, 1.0), Query(Kind.GRAM, 1.0, noise=None)),
        (Query(Kind.GRADIENT, 1.0), Query(Kind.DELTA, 1.0)),
        (Query(Kind.DELTA, 1.0, noise=None),),
        (Query(Kind.GRADIENT, 1.0), Query(Kind.GRADIENT, 2.0)),
    ],
)
def test_a_stage_that_lets_data_out_in_the_clear_is_refused(queries, records):
    with pytest.raises(SordinoError, match="leaky"):
        plan_for(Method("leaky", Unit.RECORD, (Stage(Local(descend), sgd(), queries),), PC), records)
