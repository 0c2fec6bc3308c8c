"""Minibatches and cohorts as the engines really draw them: measured against the account, and address by address."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from sordino.core import Kind, Local, Method, Privacy, Query, Stage, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.schedule import SAMPLING, SLOT_ORDER, assign_slots, check_stream, round_plans
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Address, Noiseless, Secure, Seeded
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.rules import scale

LINE = Linear(1, 1, Loss.SQUARES, bias=False)  # one parameter: a release is one number
SOFTMAX = Linear(2, 3)
SECRET = 2**120 + 7
EPSILON, DELTA = 1.0, 1e-2  # a delta that a sample can see


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path_factory.getbasetemp() / "noise"))


def world(label, clients=1, size=4):
    """Everybody's gradient is 0 but for the first record's, which is cut to +1 or -1, or is 0 as well."""
    x, y = np.zeros((clients * size, 1)), np.zeros(clients * size)
    x[0], y[0] = abs(label), -1e3 * label
    return Records.of(x, y, np.repeat(np.arange(clients), size), dtype=torch.float64)


def mixed(sizes=(3, 5, 8)):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return Records.of(rng.normal(size=(sum(sizes), 2)), rng.integers(0, 3, sum(sizes)), client, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- the mechanism, measured

RATE, ROUNDS = 0.25, 2  # of the account below; steps of 1e-12 leave the model where it is, so that rounds are alike


def record_plan(adjacency, batch="poisson:0.25"):
    privacy = Privacy(EPSILON, DELTA, adjacency=adjacency)
    return Plan(build("dp-fedgd", lr=1e-12), ROUNDS, (4,), privacy, sampling=Sampling.parse(batch))


def user_plan(adjacency, participation="poisson:0.25"):
    method = build("dp-fedgd", Unit.CLIENT, lr=1e-12)
    privacy, who = Privacy(EPSILON, DELTA, Unit.CLIENT, adjacency, "trusted-server"), Participation.parse(participation)
    return Plan(method, ROUNDS, (4, 4), privacy, who, schedule_seed=SECRET)


def seen_by_the_adversary(plan, label, *, runs, rounds):
    """Every release, in standard deviations of its noise."""
    plan = replace(plan, rounds=rounds, noise=calibration.summed_noise(plan)[0])
    sources = [Seeded(1000 * (label + 2) + s) for s in range(runs)]
    start = torch.zeros(runs, 1, dtype=torch.float64)
    found = [r.aggregate for r in simulate.run(plan, LINE, world(label, plan.clients), sources, theta=start)]
    return (torch.stack(found) / calibration.aggregate_std(plan, 0)).flatten().numpy()


def follows(x, mu, rate=RATE):
    """Is x drawn from (1 - rate) N(0) + rate N(mu)? By its mean and Kolmogorov's test, at one in a thousand each."""
    shape = kstest(x, lambda t: (1 - rate) * norm.cdf(t) + rate * norm.cdf(t - mu)).pvalue > 1e-3
    return shape and abs(x.mean() - rate * mu) < 3.3 * x.std() / math.sqrt(len(x))


def real_delta(mu, adjacency, rate=RATE):
    """At EPSILON, of two releases that follow this law, from their densities on a grid."""
    x = np.arange(-7, 7 + mu, 0.008)
    plus, zero, minus = ((1 - rate) * norm.pdf(x) + rate * norm.pdf(x - k * mu) for k in (1, 0, -1))
    pairs = [(plus, minus)] if adjacency == "replace-one" else [(plus, zero), (zero, plus)]
    both = [np.maximum(np.outer(p, p) - math.exp(EPSILON) * np.outer(q, q), 0).sum() for p, q in pairs]
    return 0.008**2 * max(both)


def moved(plan):
    """One term of a sum, in standard deviations of the noise that arrives beside it."""
    level = calibration.query_noises(plan)[0]
    return (
        level.query.clip
        * level.weight[0]
        / (calibration.aggregate_std(plan, 0) * plan.participation.rate(plan.clients))
    )


@pytest.mark.parametrize(
    ("make", "size", "adjacency"),
    [
        (record_plan, (60, 60), "replace-one"),
        pytest.param(user_plan, (1, 1200), "add-remove", marks=pytest.mark.soak),
        pytest.param(record_plan, (60, 60), "add-remove", marks=pytest.mark.soak),
        pytest.param(user_plan, (1, 3600), "add-remove", marks=pytest.mark.soak),
        pytest.param(user_plan, (1, 3600), "replace-one", marks=pytest.mark.soak),
    ],
)
def test_what_is_released_keeps_delta(make, size, adjacency):
    """The engine's releases follow a law, by a test; the delta of that law is no larger than promised, by quadrature.

    At client level more than half of the rounds have nobody, and must look like those without the client in question.
    """
    plan = make(adjacency)
    mu = moved(plan)
    for label in (1, -1) if adjacency == "replace-one" else (1, 0):
        x = seen_by_the_adversary(plan, label, runs=size[0], rounds=size[1])
        assert follows(x, label * mu)
        assert abs(np.corrcoef(x[:-1:2], x[1::2])[0, 1]) < 5 / math.sqrt(len(x) / 2)
        if label:
            assert not follows(x, label * mu, RATE / 2)
            assert not follows(x, label * mu / 2)
            assert not follows(x, -label * mu)
    assert 0.97 * DELTA < real_delta(mu, adjacency) <= DELTA
    assert real_delta(moved(make(adjacency, "poisson:0.125")), adjacency) > 1.5 * DELTA, "noise for half the rate"


def banded_plan(batch="poisson:0.25"):
    method = build("dp-ftrl", mechanism="banded", band=2, lr=1e-12)
    privacy = Privacy(EPSILON, DELTA, trust=Trust.SECURE_AGGREGATION)
    return Plan(method, 4, (4, 4), privacy, Participation.parse("cyclic:2"), sampling=Sampling.parse(batch))


def test_minibatches_with_banded_noise_are_paid_for_as_sampled_releases():
    """Two rounds of each client, as far apart as the band: the delta is that of two sampled Gaussian releases."""
    plan = banded_plan()
    ours, theirs = (
        torch.stack([r.aggregate.reshape(-1) for r in engine.run(plan, LINE, world(1, 2), Seeded(1))])
        for engine in (reference, simulate)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0.0)
    assert 0.97 * DELTA < real_delta(moved(plan), "replace-one") <= DELTA
    assert real_delta(moved(banded_plan("poisson:0.125")), "replace-one") > 1.5 * DELTA, "noise for half the rate"


@pytest.mark.soak
def test_minibatches_with_banded_noise_follow_that_law():
    """Each of a client's rounds moves two rows of the encoded stream, and no other of its rounds moves them.

    Along the encoder's column they follow the law of a sampled Gaussian release, and rounds are independent.
    """
    plan, runs, rounds = banded_plan(), 90, 90
    mu = moved(plan)
    long = replace(plan, rounds=rounds, noise=calibration.summed_noise(plan)[0])
    encoder = long.stages[0].queries[0].noise.encoder
    first = next(t for t, cohort in enumerate(long.cohorts) if 0 in cohort)
    for label in (1, -1):
        sources = [Seeded(1000 * (label + 2) + s) for s in range(runs)]
        start = torch.zeros(runs, 1, dtype=torch.float64)
        found = [r.aggregate for r in simulate.run(long, LINE, world(label, 2), sources, theta=start)]
        encoded = encoder @ (torch.stack(found) / calibration.aggregate_std(plan, 0)).reshape(rounds, runs).numpy()
        x = (encoder.T @ encoded)[first::2][:-1]  # the last column is cut off
        assert follows(x.flatten(), label * mu)
        assert not follows(x.flatten(), label * mu, RATE / 2)
        assert not follows(x.flatten(), label * mu / 2)
        assert abs(np.corrcoef(x[:-1].flatten(), x[1:].flatten())[0, 1]) < 5 / math.sqrt(x.size)


@pytest.mark.parametrize(
    "change",
    [{"mechanism": "tree"}, {"band": 3}, {"participation": "full"}, {"batch": "fixed:2"}, {"participation": "fixed:1"}],
    ids=str,
)
def test_minibatches_are_refused_where_rounds_share_rows_of_a_stream(change):
    chosen = {"mechanism": "banded", "band": 2, "participation": "cyclic:2", "batch": "poisson:0.25"} | change
    method = build("dp-ftrl", mechanism=chosen["mechanism"], band=chosen["band"])
    participation, sampling = Participation.parse(chosen["participation"]), Sampling.parse(chosen["batch"])
    with pytest.raises(SordinoError, match="separate part of the stream"):
        Plan(method, 8, (4, 4), Privacy(1.0, trust="secure-aggregation"), participation, sampling=sampling)


def test_the_add_remove_pair_does_not_cover_replacement():
    for make in (record_plan, user_plan):
        assert real_delta(moved(make("add-remove")), "replace-one") > 1.3 * DELTA


# ------------------------------------------------------------------------------------------------ coins and addresses


class Spy(Seeded):
    """Remembers every address it was asked for."""

    def __init__(self, seed):
        super().__init__(seed)
        self.normals, self.uniforms = [], []

    def normal(self, at, shape):
        self.normals.append(at)
        return super().normal(at, shape)

    def uniform(self, at, shape):
        self.uniforms.append(at)
        return super().uniform(at, shape)


CASES = [  # name, options, minibatches a client draws in a run of 4 rounds
    ("dp-fedgd", {}, 4),
    ("dp-fedavg", {"steps": 3}, 12),
    ("dp-fedavg", {"steps": 3, "noise_at": "final"}, 12),
    ("dp-fedsam", {"steps": 2}, 8),
    ("dp-scaffold", {"steps": 2, "warm_start": True}, 7),
    ("fedhybrid", {"local_steps": 3}, 6),
    ("fednewton", {"local_steps": 3}, 6),
    ("dp-fednew", {}, 4),  # gradient and curvature are about one minibatch
]


@pytest.mark.parametrize(("name", "options", "drawn"), CASES)
def test_no_stream_serves_two_purposes(name, options, drawn):
    records = mixed((6, 7, 9))
    plan = Plan(build(name, **options), 4, records.sizes, Privacy(4.0), sampling=Sampling.parse("poisson:3"))
    for engine, extra in ((reference, {}), (simulate, {"shares": True}), (simulate, {})):
        spy = Spy(1)
        list(engine.run(plan, SOFTMAX, records, spy, **extra))
        assert len(set(spy.normals)) == len(spy.normals)
        assert len(set(spy.uniforms)) == len(spy.uniforms) == 2 * 3 * drawn  # who is drawn, and where it stands
        assert {at.query for at in spy.uniforms} == {SAMPLING, SLOT_ORDER}
        assert not {SAMPLING, SLOT_ORDER} & {at.query for at in spy.normals}


class Watched(Linear):
    """Remembers the records it was asked about."""

    def clipped_sum(self, theta, shard, clip, *rest):
        seen.append(shard.x[shard.mask > 0].clone())
        return super().clipped_sum(theta, shard, clip, *rest)


seen: list[torch.Tensor] = []


def test_both_gradients_of_a_step_are_about_one_minibatch_and_no_others():
    records = mixed((40,))
    for name, pairs in (("dp-fedsam", True), ("dp-fedavg", False)):
        options = {"steps": 3} if pairs else {"steps": 6}
        plan = Plan(build(name, **options), 2, (40,), Privacy(4.0), sampling=Sampling.parse("poisson:10"))
        for engine in (reference, simulate):
            seen.clear()
            list(engine.run(plan, Watched(2, 3), records, Seeded(1)))
            assert len(seen) == 12
            same = [len(a) == len(b) and torch.equal(a, b) for a, b in itertools.pairwise(seen)]
            assert same == [pairs and k % 2 == 0 for k in range(11)]


def test_runs_side_by_side_are_the_runs_alone():
    records = mixed((6, 7, 9))
    for name in ("dp-fedsam", "fednewton", "dp-fedgd"):
        plans = [
            Plan(build(name), 3, records.sizes, Privacy(epsilon), sampling=Sampling.parse("poisson:3"))
            for epsilon in (2.0, 6.0)
        ]
        theta = torch.zeros(2, SOFTMAX.size, dtype=torch.float64)
        *_, both = simulate.run(plans, SOFTMAX, records, [Seeded(3), Seeded(4)], theta=theta, shares=True)
        for k, plan in enumerate(plans):
            *_, alone = reference.run(plan, SOFTMAX, records, Seeded(3 + k))
            torch.testing.assert_close(both.model[k], alone.model, rtol=1e-9, atol=1e-12)
        *_, other = reference.run(plans[1], SOFTMAX, records, Seeded(3))
        assert not torch.allclose(both.model[1], other.model)


# ----------------------------------------------------------------------------------------------------- secret cohorts


def hidden(name="dp-fedgd", rounds=30, epsilon=2.0, participation="poisson:0.2", records=None, **options):
    privacy = Privacy(epsilon, unit="client", adjacency="add-remove", trust="trusted-server")
    sizes, who = (mixed() if records is None else records).sizes, Participation.parse(participation)
    return Plan(build(name, Unit.CLIENT, **options), rounds, sizes, privacy, who, schedule_seed=SECRET)


def test_the_noise_and_the_steps_do_not_tell_how_many_came():
    plan = hidden(rounds=60)
    came = {len(cohort) for cohort in plan.cohorts}
    assert {0, 1, 2} <= came
    widths, steps = set(), []
    for this_round in round_plans(plan, SOFTMAX):
        widths.add(float(this_round.sum_stds[1]))
        steps.append(this_round.step)
        assert this_round.noise_on_sum
    assert len(widths) == 1
    assert steps == list(range(60))
    # Counterexample: where everybody sees the cohorts, a round without participants is no round.
    public = replace(plan, privacy=replace(plan.privacy, trust="secure-aggregation"))
    assert [this_round.step for this_round in round_plans(public, SOFTMAX)] != steps


@pytest.mark.parametrize("engine", [reference, simulate])
def test_an_empty_cohort_releases_noise(engine):
    """As much as any other, and a new draw each time."""
    plan = hidden(rounds=400)
    empty = [r.aggregate for r in engine.run(plan, SOFTMAX, mixed(), Seeded(1)) if not len(r.cohort)]
    assert len(empty) > 100
    drawn = torch.stack(empty)
    assert len(drawn.unique(dim=0)) == len(drawn)
    assert abs(float(drawn.std()) / calibration.aggregate_std(plan, 0) - 1) < 4.5 / math.sqrt(2 * drawn.numel())
    assert abs(float(drawn.std()) / (2 * calibration.aggregate_std(plan, 0)) - 1) > 0.4


@pytest.mark.parametrize(("name", "options"), [("dp-fednew", {"duals": False}), ("dp-fedsam", {"decay": 0.1})])
@pytest.mark.parametrize("engine", [reference, simulate])
def test_an_empty_cohort_says_nothing(engine, name, options):
    """Otherwise a lone participant changes that into its own message: up to twice the clip."""
    plan = hidden(name, **options)
    plan = replace(plan, privacy=replace(plan.privacy, epsilon=math.inf))
    rounds = list(engine.run(plan, SOFTMAX, mixed(), Noiseless(1)))
    assert any(float(r.aggregate.norm()) > 0 for r in rounds if len(r.cohort))
    assert all(float(r.aggregate.norm()) == 0 for r in rounds if not len(r.cohort))


def spacing(values):
    """log2 of the widest grid of powers of two that holds all values."""
    grids = range(10, -60, -1)
    return next(e for e in grids if np.abs(values / 2.0**e - np.round(values / 2.0**e)).max() < 1e-6)


@pytest.mark.parametrize("engine", [reference, simulate])
def test_the_grid_of_a_release_does_not_tell_how_many_came(engine):
    """What is rounded to a share of the noise shows how many shares there were."""
    records = mixed((2,) * 16)
    plan = hidden(rounds=12, participation="poisson:0.25", records=records)
    assert min(map(len, plan.cohorts)) < 4 < max(map(len, plan.cohorts))
    influence = plan.weights[0] / 0.25
    released = list(engine.run(plan, SOFTMAX, records, Secure()))
    few, many = ([r for r in released if (len(r.cohort) < 4) == small] for small in (True, False))
    assert min(len(few), len(many)) >= 3
    # Of rounds together: the numbers of a single one may all be even by chance.
    grids = [spacing(np.concatenate([(r.aggregate / influence).numpy() for r in rounds])) for rounds in (few, many)]
    assert grids[0] == grids[1]


def test_a_run_sent_again_does_not_tell_which_cohorts_were_empty(tmp_path):
    plan = hidden(rounds=10)
    assert not all(map(len, plan.cohorts))
    with Ledger(tmp_path / "ledger.db") as ledger:
        first, again = (list(reference.run(plan, SOFTMAX, mixed(), Secure(), ledger=ledger, run_id="r")) for _ in "12")
    assert all(torch.equal(a.aggregate, b.aggregate) for a, b in zip(first, again, strict=True) if len(a.cohort))
    assert all(torch.equal(a.aggregate, b.aggregate) for a, b in zip(first, again, strict=True))


def test_a_secret_cohort_is_paid_for_by_all(tmp_path):
    plan = hidden(rounds=12)
    with Ledger(tmp_path / "ledger.db") as ledger:
        list(reference.run(plan, SOFTMAX, mixed(), Seeded(1), ledger=ledger, run_id="r"))
        for i in range(plan.clients):
            assert ledger.spent_epsilon(f"client {i}", 1e-5) >= spending.epsilon(plan) * (1 - 1e-3)


# ------------------------------------------------------------------------------------------------------ what is asked


WHOLE_CLIENTS = Unit.CLIENT  # there the true size is private


def test_a_minibatch_holds_its_client_s_records_only():
    """The first client declares six records, holds three, and their gradient is 0; the other's is 1 per record."""
    x, y = np.repeat([0.0, 1.0], 3)[:, None], np.repeat([0.0, -1e3], 3)
    records = Records.of(x, y, np.repeat([0, 1], 3), dtype=torch.float64)
    law, who = Sampling.parse("poisson:0.5"), Participation.parse("cyclic:2")
    method, privacy = build("dp-fedgd", WHOLE_CLIENTS, lr=1e-12), Privacy(math.inf, unit=WHOLE_CLIENTS)
    plan = Plan(method, 40, (6, 3), privacy, who, sampling=law)
    for engine in (reference, simulate):
        this_round = [r for r in engine.run(plan, LINE, records, Noiseless(1)) if 0 in r.cohort]
        assert all(abs(float(r.aggregate)) < 1e-6 for r in this_round)


def test_a_declared_size_gives_the_rate_that_is_drawn():
    records = Records.of(np.ones((3, 1)), np.full(3, -0.1), np.zeros(3, int), dtype=torch.float64)
    method, privacy = build("dp-fedgd", WHOLE_CLIENTS, lr=1e-12), Privacy(math.inf, unit=WHOLE_CLIENTS)
    plan = Plan(method, 300, (6,), privacy, sampling=Sampling.parse("fixed:2"))
    drawn = np.mean([20 * float(r.aggregate) for r in reference.run(plan, LINE, records, Noiseless(1))])
    assert drawn == pytest.approx(3 * plan.rates[0], abs=0.2)  # three records, each at the rate of the declared size


@pytest.mark.parametrize("engine", [reference, simulate])
def test_what_is_paid_for_as_joint_is_asked_jointly(engine):
    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta) + ask.gradient(broadcast.theta)  # two minibatches

    query = Query(Kind.GRADIENT, 1.0, calls=2, joint=2)
    stages = (Stage(Local(compute), scale(-1.0), (query,)),)
    method = Method("toy", Unit.RECORD, stages, frozenset({(Unit.RECORD, Trust.UNTRUSTED_SERVER)}))
    plan = Plan(method, 2, mixed().sizes, Privacy(4.0), sampling=Sampling.parse("poisson:2"))
    with pytest.raises(OverspentError):
        list(engine.run(plan, SOFTMAX, mixed(), Seeded(1)))


class Shapes(Linear):
    """Remembers the shapes it was asked about."""

    def clipped_sum(self, theta, shard, clip, *rest):
        shapes.add(tuple(shard.x.shape[-2:]))
        return super().clipped_sum(theta, shard, clip, *rest)


shapes: set[tuple[int, ...]] = set()


@pytest.mark.parametrize("engine", [reference, simulate])
@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedavg"])
def test_shapes_do_not_tell_who_was_drawn(engine, name):
    """A matrix product rounds its rows by its shape: a batch one record longer moved sums by up to 2.8 clips."""
    records = mixed((40,))
    plan = Plan(build(name), 30, (40,), Privacy(4.0), sampling=Sampling.parse("poisson:10"))
    shapes.clear()
    list(engine.run(plan, Shapes(2, 3), records, Seeded(1)))
    assert shapes == {(int(plan.slots[0]), 2)}


def test_records_take_any_slot_with_the_same_chance():
    plan = Plan(build("dp-fedgd"), 2000, (6,), Privacy(4.0), sampling=Sampling.parse("poisson:0.5"))
    counts = np.zeros((6, int(plan.slots[0])))
    for this_round in round_plans(plan, SOFTMAX):
        where = assign_slots(Seeded(1), Address(0, this_round.t, SAMPLING, 0), this_round, 6)
        drawn = where[where >= 0]
        assert len(set(drawn)) == len(drawn)
        counts[drawn, np.flatnonzero(where >= 0)] += 1
    expected = counts.sum() / counts.size
    assert (np.abs(counts - expected) < 5 * math.sqrt(expected)).all()
    assert abs(counts.sum() / (6 * 2000) - 0.5) < 0.02


# ------------------------------------------------------------------------------------------------- random allocation


def allocated_plan(rounds=7, sizes=(9, 12), batch="allocation:4", method=None, **privacy):
    method = method or build("dp-fedgd", lr=1e-12)
    return Plan(method, rounds, sizes, Privacy(EPSILON, DELTA, **privacy), sampling=Sampling.parse(batch))


def minibatches(plan, client, source):
    """The records in each round's minibatch of a client."""
    rounds = round_plans(plan, LINE)
    drawn = [assign_slots(source, Address(client, r.t, SAMPLING), r, plan.sizes[client]) for r in rounds]
    return [sorted(each[each >= 0].tolist()) for each in drawn]


class DrawnTwice(Sampling):
    """A mutant: a record is also in the minibatch after its own."""

    def draw(self, uniforms, rate, place=0):
        before = (place - 1) % round(1 / rate)
        return np.union1d(super().draw(uniforms, rate, place), super().draw(uniforms, rate, before))


def epochs_hold_all(drawn, bins, size):
    """Does every whole epoch hold each record exactly once?"""
    epochs = [drawn[k : k + bins] for k in range(0, len(drawn) - bins + 1, bins)]
    return all(sorted(itertools.chain(*epoch)) == list(range(size)) for epoch in epochs)


def test_each_record_is_in_one_minibatch_of_an_epoch():
    plan = allocated_plan(rounds=60)
    assert plan.rates.tolist() == [1 / 2, 1 / 3]
    for client, bins in ((0, 2), (1, 3)):
        drawn = minibatches(plan, client, Secure(b"k" * 32))
        assert epochs_hold_all(drawn, bins, plan.sizes[client])
        first = drawn[::bins]
        assert len(set(map(tuple, first))) > 3, "every epoch draws anew"
        sizes = np.array([len(each) for each in drawn])
        assert sizes.std() > 0.5, "sizes are random, so no record makes room for another"
        share = np.mean([0 in each for each in first])
        assert abs(share - 1 / bins) < 4.5 * math.sqrt((1 / bins) * (1 - 1 / bins) / len(first))
    poisson, twice = Sampling.parse("poisson:4"), DrawnTwice("allocation", 4.0)
    for mutant, client, bins in ((poisson, 0, 2), (poisson, 1, 3), (twice, 1, 3)):
        drawn = minibatches(replace(plan, sampling=mutant), client, Secure(b"k" * 32))
        assert not epochs_hold_all(drawn, bins, plan.sizes[client]), mutant


def test_a_client_continues_its_epoch_after_rounds_without_it():
    method, privacy = build("dp-fedgd", lr=1e-12), Privacy(EPSILON, DELTA)
    plan = Plan(method, 12, (8, 8), privacy, Participation.parse("cyclic:2"), sampling=Sampling.parse("allocation:4"))
    drawn = minibatches(plan, 1, Secure(b"k" * 32))
    assert epochs_hold_all(drawn[1::2], 2, 8)


@pytest.mark.parametrize("trust", [Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION])
def test_both_engines_draw_the_same_allocation(trust):
    plan = allocated_plan(sizes=(3, 5, 8), batch="allocation:2", trust=trust, adjacency="add-remove")
    ours = [r.aggregate for r in reference.run(plan, SOFTMAX, mixed(), Seeded(3))]
    theirs = [r.aggregate for r in simulate.run(plan, SOFTMAX, mixed(), Seeded(3), shares=True)]
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-9, atol=1e-12)


def test_what_an_allocation_needs_is_checked():
    plan = allocated_plan(adjacency="add-remove")
    round_plan = next(iter(round_plans(plan, LINE)))
    with pytest.raises(OverspentError, match="one more was drawn"):
        assign_slots(Seeded(1), Address(0, 0, SAMPLING, 1), round_plan, 9)
    with pytest.raises(SordinoError, match="cannot continue it"):
        check_stream(plan, 1, Secure(b"k" * 32))
    check_stream(plan, 0, Secure(b"k" * 32))
    with pytest.raises(SordinoError, match="two kinds of questions"):
        allocated_plan(method=build("dp-fedgd", quantile=0.5))
    with pytest.raises(SordinoError, match="separate part of the stream"):
        allocated_plan(method=build("dp-ftrl"))
    with pytest.raises(SordinoError, match="whole number of records"):
        Sampling.parse("allocation:0.5")
