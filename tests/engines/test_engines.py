"""Both engines run the registered methods alike: draw for draw, and in law where the summed noise is one draw."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Broadcast, Divisor, Kind, Local, Method, Privacy, Query, Stage, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.schedule import stage_facts
from sordino.engines.trace import only_asks_for_the_gradient
from sordino.errors import SordinoError
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger
from sordino.methods import REGISTRY, build
from sordino.models.linear import Linear, Loss
from sordino.models.trees import Trees
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.rules import scale
from sordino.tree import pack, unpack
from tests.support import tiers

MODEL = Linear(2, 3)
TREES = Trees(2, 3, trees=3, depth=2)
ROUNDS = 5
ONE_ROUND = {name for name, known in REGISTRY.items() if known.fixed}
SOFTMAX, LOGISTIC, SQUARES = (Linear(2, 3), Linear(2, 1, Loss.LOGISTIC), Linear(2, 1, Loss.SQUARES))


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(5), [3, 5, 8, 13, 21])
    return Records.of(rng.normal(size=(50, 2)), rng.integers(0, 3, 50), client, dtype=torch.float64)


def plan_for(
    method, records, trust="untrusted-server", divisor="pooled", participation="full", epsilon=4.0, batch="full"
):
    privacy, who = Privacy(epsilon, unit=method.unit, trust=trust), Participation.parse(participation)
    chance = method.name == "dp-ftrl" and who.kind == "poisson"  # runs, and is not certified
    return Plan(
        method,
        1 if method.name in ONE_ROUND else ROUNDS,
        records.sizes,
        privacy,
        who,
        Divisor(divisor),
        schedule_seed=2,
        uncertified=chance,
        sampling=Sampling.parse(batch),
    )


def model_of(name):
    return TREES if REGISTRY[name].model == "trees" else MODEL


def alike(a, b):
    """The same rounds, cohorts, aggregates, iterates and models."""
    for one, other in itertools.zip_longest(a, b):
        if one is None or other is None or one.t != other.t or not np.array_equal(one.cohort, other.cohort):
            return False
        if isinstance(one.aggregate, tuple) != isinstance(other.aggregate, tuple):
            return False
        if not isinstance(one.aggregate, tuple) and not torch.allclose(one.aggregate, other.aggregate, rtol=1e-9):
            return False
        for x, y in ((one.model, other.model), (one.checkpoint[0], other.checkpoint[0])):
            if not torch.allclose(x, y, rtol=1e-9, atol=1e-12):
                return False
    return True


# ---------------------------------------------------------------------------------------------------- draw for draw

METHODS = [(name, unit) for name in sorted(REGISTRY) for unit in REGISTRY[name].units if build(name, unit).proves]
PROVED = [(name, unit, trust) for name, unit in METHODS for trust in Trust if (unit, trust) in build(name, unit).proves]


PARTICIPATIONS = ["full", "fixed:2", "poisson:0.4"]


SEVERAL_ROUNDS = [(name, unit) for name, unit in METHODS if name not in ONE_ROUND]


def once(methods):
    """Every method once, each at the next unit that it protects, and so all units over the methods."""
    names, turn = dict.fromkeys(name for name, _ in methods), itertools.count()
    units = {name: [unit for each, unit in methods if each == name] for name in names}
    return [(name, units[name][next(turn) % len(units[name])]) for name in names]


def test_every_unit_is_that_of_some_method():
    for methods in (METHODS, SEVERAL_ROUNDS):
        assert {unit for _, unit in once(methods)} == {unit for _, unit in methods}


def few_plans(name, unit):
    """Three plans of a method: every trust model it is proved for, every participation and every divisor. Over the
    methods, every two of these meet."""
    trusts = [trust for trust in Trust if (name, unit, trust) in PROVED]
    at = METHODS.index((name, unit))
    for k in range(3):
        trust = trusts[k % len(trusts)]
        yield name, unit, trust, list(Divisor)[(k + at) % len(Divisor)], PARTICIPATIONS[(k + at // 2) % 3]


EVERY_PLAN = [(*proved, *rest) for proved in PROVED for rest in itertools.product(Divisor, PARTICIPATIONS)]
FEW_PLANS = [plan for name, unit in METHODS for plan in few_plans(name, unit)]


def test_few_plans_hold_every_method_trust_and_pair():
    assert {plan[:3] for plan in FEW_PLANS} == set(PROVED)
    assert {plan[:2] + plan[4:] for plan in FEW_PLANS} == {(*method, p) for method in METHODS for p in PARTICIPATIONS}
    assert {plan[:2] + plan[3:4] for plan in FEW_PLANS} == {(*method, d) for method in METHODS for d in Divisor}
    assert {plan[1:] for plan in FEW_PLANS} == {plan[1:] for plan in EVERY_PLAN}


@pytest.mark.parametrize(("name", "unit", "trust", "divisor", "participation"), tiers(EVERY_PLAN, FEW_PLANS))
def test_engines_agree(name, unit, trust, divisor, participation, records):
    model = model_of(name)
    plan = plan_for(build(name, unit), records, trust, divisor, participation)
    slow = list(reference.run(plan, model, records, Seeded(1)))
    assert [r.t for r in slow] == list(range(plan.rounds))
    assert alike(slow, list(simulate.run(plan, model, records, Seeded(1), shares=True)))


@pytest.mark.parametrize(("name", "unit"), tiers(METHODS, once(METHODS)))
def test_a_difference_would_be_seen(name, unit, records):
    model = model_of(name)
    plan = plan_for(build(name, unit), records, "untrusted-server", "client-mean", "fixed:2")
    slow = list(reference.run(plan, model, records, Seeded(1)))
    assert alike(slow, slow)
    assert not alike(slow, slow[:-1])
    assert not alike(slow, list(simulate.run(plan, model, records, Seeded(2), shares=True)))
    stage, theta = plan.method.stages[0], torch.zeros(model.size)
    broadcast = Broadcast(theta, stage.rule.broadcast(stage.rule.init(theta, stage_facts(plan, model, 0), ())))
    if only_asks_for_the_gradient(stage, broadcast) and name != "dp-ftrl":  # clients that come and go: own draws
        assert not alike(slow, list(simulate.run(plan, model, records, Seeded(1), shares=False)))
    louder = replace(plan, noise=1.001 * calibration.summed_noise(plan)[0])
    assert not alike(slow, list(simulate.run(louder, model, records, Seeded(1), shares=True)))


OPTIONS = [
    ("dp-fedgd", {"tail": 0.5, "clip": 0.2}),
    ("dp-fedsofim", {"apply_to": "momentum", "bias_correction": True, "rho": 0.1}),
    ("dp-fedsofim", {"warm_start": 3, "beta": 0.5, "tail": 0.4}),
    ("dp-fedsofim", {"ema_rounds": 2, "ema_scale": "unit", "clip": 5.0}),
    ("dp-fedadam", {"bias_correction": True, "beta2": 0.9}),
    ("dp-fedadam-scaled", {"clip": 0.1, "w": 0.9, "tail": 0.5}),
    ("dp-fedyogi", {"tau": 0.1, "tail": 1.0, "beta1": 0.0}),
]


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_engines_agree_on_options(name, options, unit, records):
    model = model_of(name)
    for participation in ("full", "poisson:0.4"):
        plan = plan_for(build(name, unit, **options), records, "secure-aggregation", participation=participation)
        slow = list(reference.run(plan, model, records, Seeded(1)))
        assert alike(slow, list(simulate.run(plan, model, records, Seeded(1), shares=True)))


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize("model", [SOFTMAX, LOGISTIC, SQUARES, replace(SOFTMAX, bias=False)])
def test_engines_agree_on_models(model, unit, records):
    labels = records.y if model.kind is Loss.SOFTMAX else (records.y > 0).double()
    mine = replace(records, y=labels)
    plan = plan_for(build("dp-fedsofim", unit), mine, divisor="client-mean")
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slow = list(reference.run(plan, model, mine, Seeded(1), theta=theta))
    assert alike(slow, list(simulate.run(plan, model, mine, Seeded(1), theta=theta, shares=True)))
    assert not alike(slow, list(simulate.run(plan, model, mine, Seeded(1), shares=True))), "another start"


def test_a_broken_record_says_nothing_in_either_engine(records):
    x = records.x.clone()
    x[4, 0], x[20, 1] = math.nan, math.inf
    broken = replace(records, x=x)
    for unit, divisor in itertools.product((Unit.RECORD, Unit.CLIENT), Divisor):
        plan = plan_for(build("dp-fedgd", unit), records, divisor=divisor)
        slow = list(reference.run(plan, MODEL, broken, Seeded(1)))
        assert torch.isfinite(slow[-1].model).all()
        assert alike(slow, list(simulate.run(plan, MODEL, broken, Seeded(1), shares=True)))


# ---------------------------------------------------------------------------------------------------------- in law

DRAWS = [500, pytest.param(2000, marks=pytest.mark.soak)]


def same_law(a, b):
    """Means, covariances and total variances of two samples within five standard errors."""
    share = 1 / len(a) + 1 / len(b)
    one, other = np.cov(a.T), np.cov(b.T)
    c = (one + other) / 2
    v = np.diag(c)
    means = np.abs(a.mean(0) - b.mean(0)) <= 5 * np.sqrt(v * share)
    covariances = np.abs(one - other) <= 5 * np.sqrt((c**2 + np.outer(v, v)) * share)
    total = abs(np.trace(one - other)) <= 5 * math.sqrt(2 * (c**2).sum() * share)
    return bool(means.all() and covariances.all() and total)


def sample(plan, records, draws, *, shares, first=0):
    """The aggregates of the first two rounds, side by side; one row per seed."""
    sources = [Seeded(s) for s in range(first, first + draws)]
    theta = torch.zeros(draws, MODEL.size, dtype=torch.float64)
    rounds = simulate.run(plan, MODEL, records, sources, theta=theta, shares=shares)
    return torch.cat([r.aggregate for r in itertools.islice(rounds, 2)], -1).numpy()


@pytest.mark.parametrize(
    ("unit", "trust", "divisor", "participation"),
    [
        pytest.param("record", "untrusted-server", "pooled", "full", marks=pytest.mark.soak),
        pytest.param("record", "secure-aggregation", "pooled", "fixed:2", marks=pytest.mark.soak),
        pytest.param("record", "untrusted-server", "client-mean", "fixed:2", marks=pytest.mark.soak),
        ("record", "secure-aggregation", "client-mean", "full"),
        pytest.param("client", "untrusted-server", "pooled", "full", marks=pytest.mark.soak),
        pytest.param("client", "trusted-server", "pooled", "fixed:2", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("draws", DRAWS)
def test_the_summed_noise_has_the_law_of_the_shares(draws, unit, trust, divisor, participation, records):
    plan = plan_for(build("dp-fedgd", Unit(unit), lr=0.1), records, trust, divisor, participation)
    fast, slow = sample(plan, records, draws, shares=False), sample(plan, records, draws, shares=True, first=10_000)
    assert same_law(fast, slow)
    louder = replace(plan, noise=1.1 * calibration.summed_noise(plan)[0])
    assert not same_law(sample(louder, records, draws, shares=False), slow)


@pytest.mark.soak  # long statistics
@pytest.mark.parametrize("draws", [2000])
@pytest.mark.parametrize(
    ("unit", "trust"),
    [("record", "secure-aggregation"), ("client", "untrusted-server")],
)
def test_the_summed_noise_has_the_law_of_the_reference(draws, unit, trust, records):
    two = Records(records.x[:8], records.y[:8], records.starts[:3])
    plan = plan_for(build("dp-fedgd", Unit(unit)), two, trust)
    slow = np.stack([next(reference.run(plan, MODEL, two, Seeded(s))).aggregate for s in range(10_000, 10_000 + draws)])
    fast = sample(plan, two, draws, shares=False)[:, : MODEL.size]
    assert same_law(fast, slow)
    for factor in (0.9, 1.1, math.sqrt(2)):
        louder = replace(plan, noise=factor * calibration.summed_noise(plan)[0])
        assert not same_law(sample(louder, two, draws, shares=False)[:, : MODEL.size], slow)
    assert not same_law(fast + 9 / math.sqrt(draws) * fast.std(0), slow), "biased by 6 standard errors"


# ---------------------------------------------------------------------------------------------------- participation


@pytest.mark.parametrize("participation", ["fixed:2", "poisson:0.4"])
@pytest.mark.parametrize(
    ("unit", "divisor"), [("record", "pooled"), ("record", "client-mean"), ("client", "client-mean")]
)
def test_the_divisor_is_the_expected_number_of_participants(unit, divisor, participation, records):
    """A public constant: over rounds, the aggregate is on average that of everyone."""
    plan = plan_for(
        build("dp-fedgd", Unit(unit), clip=100.0, lr=0.1), records, "untrusted-server", divisor, participation
    )
    sizes = np.array(records.sizes)
    weights = sizes / sizes.sum() if (unit, divisor) == ("record", "pooled") else np.full(5, 1 / 5)
    means = [MODEL.clipped_sum(torch.zeros(9).double(), records.shard(i), 100.0) / sizes[i] for i in range(5)]
    realised = []
    for engine in (reference, simulate):
        for this_round in engine.run(plan, MODEL, records, Noiseless()):
            if not len(this_round.cohort):
                continue
            start = sum(weights[i] * means[i] for i in this_round.cohort)
            torch.testing.assert_close(this_round.aggregate, start / 0.4)
            if len(this_round.cohort) != 2:
                realised.append(torch.allclose(this_round.aggregate, start / (len(this_round.cohort) / 5)))
            break  # theta moves from here on
    assert not any(realised)


def test_a_realised_cohort_differs_from_the_expected_one(records):
    """Else the test above could not tell the two divisors apart."""
    plan = plan_for(build("dp-fedgd"), records, participation="poisson:0.4")
    first = next(cohort for cohort in plan.cohorts if len(cohort))
    assert len(first) != 2


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize(("name", "unit"), SEVERAL_ROUNDS)
def test_nobody_came(engine, name, unit, records):
    """An empty cohort leaves everything as it was, though noise and momentum would have moved it."""
    model = model_of(name)
    plan = replace(plan_for(build(name, unit), records, participation="poisson:0.1"), rounds=12)
    plans = (replace(plan, schedule_seed=seed) for seed in range(99))
    plan = next(plan for plan in plans if not len(plan.cohorts[0]))  # a first round may send covariances only
    rounds_done = list(engine.run(plan, model, records, Seeded(1)))
    empty = [t for t, cohort in enumerate(plan.cohorts) if not len(cohort)]
    assert 0 < len(empty) < 12
    for t in range(12):
        before = rounds_done[t - 1].checkpoint[0] if t else torch.zeros(model.size, dtype=torch.float64)
        assert torch.equal(rounds_done[t].checkpoint[0], before) == (t in empty)
        assert (rounds_done[t].aggregate == ()) if t in empty else len(rounds_done[t].aggregate)


@pytest.mark.parametrize("engine", [reference, simulate])
def test_nobody_came_to_the_warm_start(engine, records):
    """Control variates are then zero, as without a warm start."""
    plan = replace(plan_for(build("dp-scaffold", warm_start=True), records, participation="poisson:0.3"), rounds=6)
    plans = (replace(plan, schedule_seed=seed) for seed in range(99))
    plan = next(plan for plan in plans if not len(plan.cohorts[0]) and len(plan.cohorts[1]))
    first, second, *_ = engine.run(plan, MODEL, records, Seeded(1))
    assert torch.equal(first.model, torch.zeros(9, dtype=torch.float64))
    assert torch.isfinite(second.model).all()
    assert not torch.equal(second.model, first.model)


# ----------------------------------------------------------------------------------------------------------- resume


WHO = ["full", "poisson:0.4"]


@pytest.mark.parametrize(
    ("name", "unit", "participation"),
    tiers(
        [(*method, who) for method in SEVERAL_ROUNDS for who in WHO],
        [(*method, WHO[k % 2]) for k, method in enumerate(once(SEVERAL_ROUNDS))],
    ),
)
def test_a_simulation_resumes_where_it_stopped(name, unit, participation, records):
    model = model_of(name)
    options = {"tail": 0.6} if "tail" in REGISTRY[name].options else {}
    plan = plan_for(build(name, unit, **options), records, participation=participation)
    whole = list(simulate.run(plan, model, records, Seeded(1)))
    for t in range(ROUNDS - 1):
        kept = unpack(pack(whole[t].checkpoint))
        rest = list(simulate.run(plan, model, records, Seeded(1), start=t + 1, checkpoint=kept))
        assert [r.t for r in rest] == list(range(t + 1, ROUNDS))
        for a, b in zip(rest, whole[t + 1 :], strict=True):
            assert torch.equal(a.model, b.model)
            assert torch.equal(a.checkpoint[0], b.checkpoint[0])
    stale = whole[0].checkpoint[0], *whole[1].checkpoint[1:]
    forgetful = list(simulate.run(plan, model, records, Seeded(1), start=2, checkpoint=stale))
    assert not torch.equal(forgetful[-1].model, whole[-1].model)


@pytest.mark.parametrize(("name", "unit"), tiers(SEVERAL_ROUNDS, once(SEVERAL_ROUNDS)))
def test_a_run_with_a_ledger_says_again_what_it_said(name, unit, records, tmp_path):
    """Stopped after three rounds and begun anew with another noise: what was said stays, and is paid for once."""
    model = model_of(name)
    plan = plan_for(build(name, unit), records)
    with Ledger(tmp_path / "ledger", epsilon=4.0, delta=1e-5) as ledger:
        first = list(itertools.islice(reference.run(plan, model, records, Seeded(1), ledger=ledger, run_id="r"), 3))
        paid = [len(charges(plan, 0, t, "r")) * plan.clients for t in range(ROUNDS)]
        assert len(ledger) == sum(paid[:3])
        second = list(reference.run(plan, model, records, Seeded(2), ledger=ledger, run_id="r"))
        third = list(reference.run(plan, model, records, Seeded(3), ledger=ledger, run_id="r"))
        assert len(ledger) == sum(paid)
    assert alike(first, second[:3])
    assert alike(second, third)
    assert not alike(second, list(reference.run(plan, model, records, Seeded(1)))), "later rounds had new noise"


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("name", "unit", "shares"),
    tiers(
        [(*method, shares) for method in METHODS for shares in (True, False)],
        [(*method, k % 2 == 0) for k, method in enumerate(once(METHODS))],
    ),
)
def test_runs_side_by_side_are_single_runs(name, unit, shares, records):
    model = model_of(name)
    plan = plan_for(build(name, unit), records, participation="poisson:0.4")
    theta = torch.randn(3, model.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sources = [Seeded(s) for s in range(3)]
    many = list(simulate.run(plan, model, records, sources, theta=theta, shares=shares))
    for r in range(3):
        one = list(simulate.run(plan, model, records, Seeded(r), theta=theta[r], shares=shares))
        for a, b in zip(many, one, strict=True):
            torch.testing.assert_close(a.model[r], b.model, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(many[-1].model[0] - theta[0], many[-1].model[1] - theta[1])


BATCHES = ["poisson:4", "poisson:0.3", "fixed:4"]


@pytest.mark.parametrize(
    ("name", "batch"),
    tiers(
        itertools.product(REGISTRY, BATCHES),
        [(name, BATCHES[k % 3]) for k, name in enumerate(REGISTRY)]
        + [(name, batch) for name in ("auto", "dp-fednew") for batch in BATCHES],  # fixed sizes refuse the second one
    ),
)
def test_engines_agree_on_minibatches(name, batch, records):
    """Every method that is proved for them, the fused and the batched path, clients smaller than a minibatch too."""
    model = model_of(name)
    method = build(name)
    if name in ("dp-ftrl", "fednew", "dp-fednew-fc") or (name == "dp-fednew" and batch.startswith("fixed")):
        with pytest.raises(SordinoError, match=r"batch:|bounds nothing"):
            plan_for(method, records, batch=batch)
        return
    plan = plan_for(method, records, batch=batch)
    slow = list(reference.run(plan, model, records, Seeded(1)))
    assert alike(slow, simulate.run(plan, model, records, Seeded(1), shares=True))
    whole = plan_for(method, records)
    assert not alike(slow, simulate.run(whole, model, records, Seeded(1), shares=True))


def test_a_minibatch_is_divided_by_its_expected_size(records):
    """Without noise, and averaged over many rounds at one point, it is the gradient of all records."""
    method = build("dp-fedgd", clip=1e6, lr=1e-12)
    plan = replace(plan_for(method, records, epsilon=math.inf, batch="poisson:3"), rounds=600)
    mean = torch.stack([r.aggregate for r in simulate.run(plan, MODEL, records, Noiseless(3))]).mean(0)
    (whole,) = simulate.run(replace(plan, rounds=1, sampling=Sampling()), MODEL, records, Noiseless(3))
    each = torch.stack([r.aggregate for r in simulate.run(plan, MODEL, records, Noiseless(4))])
    error = each.std(0) / math.sqrt(len(each))
    assert ((mean - whole.aggregate).abs() < 5 * error + 1e-9).all()


def test_runs_side_by_side_draw_their_own_minibatches(records):
    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta, on=ask.sample())

    stages = (Stage(Local(compute), scale(-0.1), (Query(Kind.GRADIENT, 1.0),)),)
    plan = plan_for(Method("mini", Unit.RECORD, stages, build("dp-fedgd").proves), records, batch="poisson:0.5")
    theta = torch.zeros(2, MODEL.size, dtype=torch.float64)
    *_, many = simulate.run(plan, MODEL, records, [Seeded(0), Seeded(1)], theta=theta)
    *_, one = simulate.run(plan, MODEL, records, Seeded(1))
    torch.testing.assert_close(many.model[1], one.model)


@pytest.mark.parametrize("name", ["auto", "dp-fedfc"])
@pytest.mark.parametrize("trust", [Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION])
def test_matrices_of_many_clients_are_computed_in_small_batches(name, trust, records, monkeypatch):
    """The same draws and sums, whatever fits into memory; one or two of five clients at a time."""
    plan = plan_for(build(name), records, trust)
    theta = torch.zeros(2, MODEL.size, dtype=torch.float64)
    *_, whole = simulate.run(plan, MODEL, records, [Seeded(0), Seeded(1)], theta=theta)
    for most in (1, 2 * 2 * 3**2):
        monkeypatch.setattr(simulate, "MATRIX_BATCH_NUMBERS", most)
        *_, few = simulate.run(plan, MODEL, records, [Seeded(0), Seeded(1)], theta=theta)
        torch.testing.assert_close(few.model, whole.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_whose_last_model_alone_is_wanted_is_the_same_run(runs):
    """A model of two classes is derived from the server's parameters (`rules.confidence`), after each round or once."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    data = Records.of(x, (x[:, 0] > 0).astype(int), np.repeat([0, 1, 2], 20))
    model, plan = Linear(3, 2), Plan(build("auto"), 9, data.sizes, Privacy(epsilon=8.0))
    sources = [Seeded(k) for k in range(runs)]
    about = {"theta": model.init().expand(runs, -1).clone()} if runs > 1 else {}
    given = (plan, model, data, sources if runs > 1 else sources[0])
    every = list(simulate.run(*given, **about))
    last = list(simulate.run(*given, **about, every_model=False))
    for one, other in zip(every, last, strict=True):
        assert pack(one.checkpoint) == pack(other.checkpoint)
        derived = not torch.equal(one.model, one.checkpoint.theta)
        assert torch.equal(one.model, other.model) == (not derived or one.t + 1 == plan.rounds)
        assert torch.equal(other.model, other.checkpoint.theta) == (not derived or one.t + 1 < plan.rounds)
    assert not torch.equal(every[-1].model, every[-1].checkpoint.theta), "the last model is derived"
