"""Traps that published code and papers fell into. Each is built here, and a check of this library must see it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino import checks
from sordino.checks import mutants
from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.attacks import audit
from sordino.core import (
    Adjacency,
    Correlated,
    Kind,
    Lemma,
    Local,
    Method,
    Privacy,
    Query,
    Rule,
    Stage,
    Stream,
    Trust,
    Unit,
)
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.oracle import clipped
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.ledger import Ledger
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.methods.admm import shift
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import correlated, gaussian
from sordino.privacy.mechanisms.random import Address, Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.rules import scale
from sordino.rules.basic import stateless
from sordino.rules.limits import LIMITS
from tests.support import still

PC, SA = Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION
ADD, SWAP = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
EVERY = frozenset((unit, trust) for unit in Unit for trust in Trust)
SOFTMAX, SQUARES = Linear(3, 3), Linear(3, 1, Loss.SQUARES, bias=False)
TENSORS = (9, 3)  # of SOFTMAX: weights and bias
C = 0.05
DELTA = 1e-5
# a Dirichlet(0.5) split of CIFAR-10 over 20 clients (DP-FedSOFIM, Table 14)
TABLE_14 = (1706, 2375, 3498, 2612, 1306, 3015, 3356, 1515, 1939, 2544)
TABLE_14 += (2536, 3396, 3312, 2926, 3329, 2980, 891, 1539, 2025, 3200)


def descend(ask, broadcast, memory, cache):
    return ask.gradient(broadcast.theta)


def method(compute, *queries, unit=Unit.RECORD, rule=None, **local):
    return Method("trap", unit, (Stage(Local(compute, **local), rule or scale(-0.1), queries),), EVERY)


def plan_for(subject, sizes=(4,) * 5, rounds=3, participation="full", trust=PC, adjacency=SWAP, **fields):
    privacy = Privacy(fields.pop("epsilon", 1.0), DELTA, subject.unit, adjacency, trust)
    return Plan(subject, rounds, tuple(sizes), privacy, Participation.parse(participation), **fields)


def searched(subject, model, adjacency=ADD, trials=15):
    """What the search for bad neighbours makes of the only noised query."""
    (found,) = checks.sensitivity(subject, model, adjacency, trials=trials)
    return found


def times(adjacency):
    return 2 if adjacency is SWAP else 1


def claiming(most):
    return Lemma("as claimed", lambda m, adjacency: most * times(adjacency))


# --------------------------------------------------------------- what an engine's noise really hides, to the last digit


class Units:
    """A source whose k-th address holds a one in the k-th place. In a run without gradients coordinates do not mix,
    so that what comes out is the matrix by which draws become messages. `same` says which addresses share a draw."""

    private = False

    def __init__(self, same=lambda at: at, size=1.0):
        self.same, self.size, self.places, self.asked = same, size, {}, []

    def fresh(self):
        return self

    def normal(self, at, shape):
        self.asked.append(at)
        draw = np.zeros(shape)
        draw[self.places.setdefault(self.same(at), len(self.places))] = self.size
        return draw


def shown(plan, source, places=100):
    """Of a run without gradients: {(t, i): message of client i}, [aggregate of round t], as rows over draws."""
    (stage,) = plan.method.stages
    told, alone = plan, not plan.only_sums_visible  # of sums no single message is made
    if alone:
        local = stage.local._replace(
            update_memory=lambda said, broadcast, memory: said, init=lambda theta, _: 0 * theta
        )
        told = replace(plan, method=plan.method._replace(stages=(stage._replace(local=local),)))
    messages, aggregates = {}, []
    for this_round in reference.run(told, *still(plan, places), source):
        aggregates.append(this_round.aggregate.numpy())
        messages |= {
            (this_round.t, int(i)): this_round.checkpoint[2][int(i)].numpy() for i in this_round.cohort if alone
        }
    return messages, np.stack(aggregates)


def true_mu(plan, client, source=None, view=None, places=100, rounds=None):
    """Of one unit that moves each of its client's rounds (or those given) as far as it can, in one direction: exact for
    noise that is Gaussian, whatever the plan says. `view`: what is seen; by default what the trust model shows."""
    messages, aggregates = shown(plan, source or Units(), places)
    (level,) = calibration.query_noises(plan)
    far = level.sensitivity[client] / (1 if level.query.kind is Kind.DELTA else plan.sizes[client])
    if (view or plan.privacy.trust) is PC:
        rows = np.stack(list(messages.values()))
        moved = np.array([far * (i == client and (rounds is None or t in rounds)) for t, i in messages])
    else:
        rows = aggregates
        weight = plan.weights[client] / plan.participation.rate(plan.clients)
        moved = np.array([weight * far * (client in cohort) for cohort in plan.cohorts])
    values, vectors = np.linalg.eigh(rows @ rows.T)
    noisy, told = values > 1e-11 * values.max(), moved @ vectors
    bare = np.abs(told[~noisy]).max(initial=0.0) > 1e-9 * np.abs(moved).max()
    return math.inf if bare else math.sqrt((told[noisy] ** 2 / values[noisy]).sum())


def epsilon_of(mu):
    return gaussian.epsilon(mu, DELTA)


def certified(plan, **changes):
    """The certificate of a plan; `changes` are what somebody wrote over it."""
    cert = json.loads(json.dumps(certificate(plan, Secure(), version="0")))
    return {**cert, **changes}


# ------------------------------------------------------------------------------------------------------------ clipping


def each_tensor(v, most):
    """Each tensor cut to `most` by itself."""
    return torch.cat(
        [part * (most / part.norm(dim=-1, keepdim=True).clamp_min(most)) for part in v.split(TENSORS, -1)], -1
    )


def batch_mean(sums, shard, clip):
    """The batch's mean is clipped, tensor by tensor, and one record is taken to move it by clip / batch."""
    records = shard.y.shape[-1]
    return records * each_tensor(sums(shard, 1e9) / records, clip)


def test_clipping_the_batch_mean():
    """One record turns the whole mean around: with noise sigma C / B the multiplier is sigma / (2 B sqrt(L))."""
    subject, wrong = build("dp-fedgd", clip=C), mutants.careless(SOFTMAX, batch_mean)
    for adjacency in Adjacency:
        assert searched(subject, wrong, adjacency).beyond
        assert searched(subject, SOFTMAX, adjacency).problems == []
    rows = 7
    x, y = torch.zeros(rows, 3, dtype=torch.float64), torch.tensor([0, 1, 2] * 2 + [0])
    x[-1, 0] = 1e6
    either = []
    for direction in (1, -1):
        record = Records(direction * x, y, np.array([0, rows]))
        either.append([m.clipped_sum(torch.zeros(12).double(), record.shard(0), C) for m in (wrong, SOFTMAX)])
    moved = [float((one - other).norm()) for one, other in zip(*either, strict=True)]
    assert moved[0] == pytest.approx(2 * C * rows, rel=1e-3), "and the bias, were it turned too, the root of two more"
    assert moved[1] <= 2 * C
    claimed = gaussian.mu(1.0, DELTA)
    assert epsilon_of(claimed * moved[0] / (2 * C)) > 9


def test_clipping_each_tensor():
    """C a tensor is C sqrt(L) in all, which may be claimed, and C may not."""

    def compute(ask, broadcast, memory, cache):
        return each_tensor(ask.gradient(broadcast.theta), C)

    def user(claim):
        queries = Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, bound=claiming(claim))
        return method(compute, *queries, unit=Unit.CLIENT)

    for adjacency in Adjacency:
        found = searched(user(C), SOFTMAX, adjacency)
        assert found.beyond
        assert found.worst <= C * math.sqrt(2) * times(adjacency) * (1 + 1e-9)
    assert searched(user(C * math.sqrt(2)), SOFTMAX).problems == []
    whole = Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, C)
    assert searched(method(descend, *whole, unit=Unit.CLIENT), SOFTMAX).problems == []


def test_clipping_at_a_private_median():
    """min(median norm, C) moves every record's share with one record."""

    def at_the_median(sums, shard, clip):
        alone = torch.eye(len(shard.y), dtype=shard.mask.dtype) * shard.mask
        norms = torch.stack([sums(shard._replace(mask=mask), 1e6 * clip).norm() for mask in alone])
        return sums(shard, float(norms.median().clamp(1e-6 * clip, clip)))

    subject = build("dp-fedgd")
    for adjacency in Adjacency:
        assert searched(subject, mutants.careless(SQUARES, at_the_median), adjacency).beyond
    assert searched(subject, SQUARES).problems == []


def test_a_sensitivity_apart_from_the_clip():
    """There is no such number to set: it follows from the clip, and so does the noise. A lemma that claims less than
    is true is found."""
    with pytest.raises(TypeError):
        Query(Kind.GRADIENT, 1.0, sensitivity=0.5)
    for adjacency in Adjacency:
        assert Query(Kind.GRADIENT, 3.0).sensitivity(adjacency, Unit.RECORD) == 3.0 * times(adjacency)
    one, three = (plan_for(build("dp-fedgd", clip=clip)) for clip in (1.0, 3.0))
    np.testing.assert_allclose(calibration.client_std(three, 0, 0), 3 * calibration.client_std(one, 0, 0))
    right, wrong = Query(Kind.GRADIENT, 1.0), Query(Kind.GRADIENT, 1.0, bound=claiming(0.9))
    assert searched(method(descend, wrong), SOFTMAX).beyond
    assert searched(method(descend, right), SOFTMAX).problems == []


def test_replacing_a_record_costs_two_clips():
    """A claim of one clip holds if a record joins or leaves, and not if it is replaced."""
    careless = method(descend, Query(Kind.GRADIENT, 1.0, bound=Lemma("one clip", lambda m, adjacency: 1.0)))
    assert searched(careless, SOFTMAX, ADD).problems == []
    assert searched(careless, SOFTMAX, SWAP).beyond
    right = searched(build("dp-fedgd"), SOFTMAX, SWAP)
    assert (right.claimed, right.problems) == (2.0, [])
    swap, add = (plan_for(build("dp-fedgd"), adjacency=adjacency) for adjacency in (SWAP, ADD))
    np.testing.assert_allclose(calibration.client_std(swap, 0, 0), 2 * calibration.client_std(add, 0, 0))
    exposed = replace(swap, noise=calibration.summed_noise(add)[0])
    assert spending.mu(exposed) == pytest.approx(2 * spending.mu(add), rel=1e-9)


def test_what_is_not_finite_and_what_is_nothing():
    """v min(1, C / |v|) lets NaN pass, v C / |v| divides nothing by nothing. From a model that is found; from a rule it
    does not leave the client."""
    nan, nothing = torch.tensor([1.0, math.nan]), torch.zeros(2)

    def plain(v):
        return v * (1 / v.norm(dim=-1, keepdim=True)).clamp(max=1.0)

    def direction(v):
        return v / v.norm(dim=-1, keepdim=True)

    for wrong, v in ((plain, nan), (direction, nothing)):
        assert torch.isnan(wrong(v)).any()
    for v in (nan, nothing, torch.tensor([math.inf, 1.0])):
        assert torch.equal(clipped(v, 1.0), nothing)

    def user(finish):
        def compute(ask, broadcast, memory, cache):
            return finish(ask.gradient(broadcast.theta))

        return method(
            compute, Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, bound=claiming(1.0)), unit=Unit.CLIENT
        )

    def through(sums, shard, clip):
        return sums(shard, clip) + 0 * shard.x.sum()

    found = searched(build("dp-fedgd"), mutants.careless(SOFTMAX, through))
    assert math.isinf(found.worst)
    assert "is not finite" in found.problems[0]
    assert searched(build("dp-fedgd"), SOFTMAX).problems == []
    records = still(plan_for(build("dp-fedgd")), 3)[1]
    broken = Records(torch.full_like(records.x, math.nan), records.y, records.starts)
    for subject in (user(plain), user(direction), build("dp-fedgd"), build("dp-fedgd", Unit.CLIENT)):
        for data in (records, broken):
            for this_round in reference.run(plan_for(subject, epsilon=math.inf), SQUARES, data, Seeded(0)):
                assert torch.equal(this_round.model, torch.zeros(3, dtype=torch.float64))


def test_the_covariance_of_features():
    """Two positive semi-definite matrices differ by sqrt(2) C at most: 2 C is out of reach, C is not enough."""

    def once(**bound):
        def compute(ask, broadcast, memory, cache):
            return ask.gram()

        rule = Rule(stateless, lambda A, state, theta, t: (torch.zeros_like(theta), state))
        return method(compute, Query(Kind.GRAM, 1.0, **bound), rule=rule)

    right = searched(once(psd=True), SQUARES, SWAP)
    assert right.problems == []
    assert 1.4 < right.worst <= math.sqrt(2)
    careless = searched(once(), SQUARES, SWAP)
    assert careless.claimed == 2.0
    assert not careless.beyond
    assert "must reach 90%" in careless.problems[0]
    assert searched(once(bound=Lemma("one clip", lambda m, adjacency: 1.0)), SQUARES, SWAP).beyond
    shipped = build("dp-fedfc").stages[0].queries[0]
    assert shipped.sensitivity(SWAP, Unit.RECORD) == pytest.approx(math.sqrt(2))


def test_a_realised_count_for_a_divisor():
    """Over the records that are there instead of the number that was declared."""

    def realised(sums, shard, clip):
        return sums(shard, clip) * len(shard.y) / shard.mask.sum().clamp_min(1)

    assert searched(build("dp-fedgd"), mutants.careless(SOFTMAX, realised)).beyond
    assert searched(build("dp-fedgd"), SOFTMAX).problems == []


# --------------------------------------------------------------------------------------------------------------- noise


def test_the_clip_twice_in_the_noise():
    """Noise sigma C^2 for sigma C, at C = 0.1 (DP-FedAdamW, algorithm 2, line 11): an attack wins, and the certificate
    of such numbers does not hold."""
    clip = 0.1
    plan = plan_for(build("dp-fedgd", clip=clip))
    assert true_mu(plan, 0) == pytest.approx(spending.mu(plan), rel=1e-9)
    twice = true_mu(plan, 0, Units(size=clip))
    assert twice == pytest.approx(spending.mu(plan) / clip, rel=1e-9)
    assert epsilon_of(twice) == pytest.approx(14.5, abs=0.5)
    subject, promise = build("dp-fedgd", clip=clip), Privacy(1.0)
    assert audit("dp-fedgd", promise, runs=500, rounds=3, seed=0, method=subject, noise_factor=clip).broken
    assert not audit("dp-fedgd", promise, runs=500, rounds=3, seed=0, method=subject).broken
    cert = certified(plan)
    assert verify(cert).problems == []
    cert["groups"][0]["releases"][0]["std"] *= clip
    assert any("is claimed, but the raw numbers give" in problem for problem in verify(cert).problems)


STREAMS = {
    "all clients alike": lambda at: at._replace(client=0),
    "all rounds alike": lambda at: at._replace(round=0),
    "all steps alike": lambda at: at._replace(index=0),
}


@pytest.mark.parametrize("engine", ["reference", "simulate"])
@pytest.mark.parametrize("name", ["dp-fedavg", "dp-scaffold"])
def test_every_draw_has_its_own_address(name, engine):
    """Two stages, two steps, three rounds, five clients: no address is asked twice; in the traps many are."""
    options = {"warm_start": True} if name == "dp-scaffold" else {}
    plan, source = plan_for(build(name, steps=2, **options)), Units()
    run = reference.run if engine == "reference" else lambda *args: simulate.run(*args, shares=True)
    for _ in run(plan, *still(plan, 60), source):
        pass
    releases = 5 * (2 * 3 if name == "dp-fedavg" else 1 + 2 * 2)
    assert len(source.asked) == len(set(source.asked)) == releases
    for alike in STREAMS.values():
        assert len({alike(at) for at in source.asked}) < releases
    packed = {at.pack() for at in source.asked}
    assert len(packed) == releases, "and no two addresses share a nonce"


@pytest.mark.parametrize("alike", ["all clients alike", "all rounds alike"])
def test_one_stream_for_all(alike):
    """The difference of two messages is then bare, and there is no bound; with streams of their own, it is as claimed.
    A source told apart by its addresses gives other draws for each of them."""
    plan = plan_for(build("dp-fedgd"))
    assert true_mu(plan, 0) == pytest.approx(spending.mu(plan), rel=1e-9)
    assert true_mu(plan, 0, rounds=[0]) == pytest.approx(spending.mu(plan, done=1), rel=1e-9)
    assert math.isinf(true_mu(plan, 0, Units(STREAMS[alike]), rounds=[0]))
    for source in (Seeded(1), Secure()):
        one = source.normal(Address(1, 2, 0), (4,))
        for other in (Address(0, 2, 0), Address(1, 0, 0), Address(1, 2, 1), Address(1, 2, 0, 1)):
            assert not np.allclose(source.normal(other, (4,)), one)


def for_everybody(plan, *place, right=calibration.aggregate_std):
    """Each participant adds its part of a noise to which all clients were to contribute."""
    return right(plan, *place) * math.sqrt(plan.participation.rate(plan.clients))


def with_noise(monkeypatch, wrong_plan, std):
    """The engines noise the sums of this one plan with another std."""
    right = calibration.aggregate_std
    patched = lambda plan, *place: std(plan, *place) if plan is wrong_plan else right(plan, *place)  # noqa: E731
    monkeypatch.setattr(calibration, "aggregate_std", patched)


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_noise_for_a_bigger_cohort_than_came(unit, monkeypatch):
    subject = build("dp-fedgd", unit)
    chosen = {"participation": "fixed:2", "trust": SA, "rounds": 6}
    right, wrong = (plan_for(subject, **chosen) for _ in range(2))
    with_noise(monkeypatch, wrong, for_everybody)
    assert spending.epsilon(right) == spending.epsilon(wrong) == pytest.approx(1.0)
    worst = max(range(5), key=lambda i: sum(i in cohort for cohort in right.cohorts))
    assert true_mu(right, worst) == pytest.approx(spending.mu(right), rel=1e-9)
    assert true_mu(wrong, worst) == pytest.approx(math.sqrt(5 / 2) * spending.mu(wrong), rel=1e-9)
    came = plan_for(subject, participation="poisson:0.5", trust=SA, rounds=6, schedule_seed=1)
    assert len({len(cohort) for cohort in came.cohorts}) > 2
    worst = max(range(5), key=lambda i: sum(i in cohort for cohort in came.cohorts))
    assert true_mu(came, worst) == pytest.approx(spending.mu(came), rel=1e-9), (
        "whoever came, the sum is noised as planned"
    )


def equal_noise(plan, *place):
    """Under sums every client draws the same noise, though a small client's record weighs more (DP-FedSOFIM)."""
    (noise,) = calibration.query_noises(plan)
    own = (noise.weight * noise.std).max() / noise.weight.max()  # what one client would need, were all alike
    return math.sqrt(((noise.weight * own) ** 2).mean())


def test_unequal_clients_under_secure_aggregation(monkeypatch):
    """A mean of client means: the smallest of 20 clients would get 2.23 times the mu that was promised."""
    right, wrong = (plan_for(build("dp-fedgd"), TABLE_14, 1, trust=SA, divisor="client-mean") for _ in range(2))
    with_noise(monkeypatch, wrong, equal_noise)
    smallest, largest = int(np.argmin(TABLE_14)), int(np.argmax(TABLE_14))
    promised = gaussian.mu(1.0, DELTA)
    found = {i: true_mu(wrong, i, places=20) / promised for i in (smallest, largest)}
    assert found[smallest] == pytest.approx(2.23, abs=5e-3)
    assert found[largest] == pytest.approx(0.57, abs=5e-3)
    assert epsilon_of(found[smallest] * promised) == pytest.approx(2.43, rel=5e-3)
    assert true_mu(right, smallest, places=20) == pytest.approx(promised, rel=1e-9)
    for divisor in ("pooled", "client-mean"):
        plan = replace(right, divisor=divisor)
        assert max(true_mu(plan, i, places=20) for i in (smallest, largest)) <= promised * (1 + 1e-9)


@pytest.mark.parametrize(("promised", "seen"), [(0.5, 2.61), (1.0, 5.41), (5.0, 33.2), (10.0, 77.4)])
def test_the_server_s_view_of_noise_for_sums(promised, seen):
    """20 clients' shares of one noise, read one by one."""
    plan = plan_for(build("dp-fedgd"), (3,) * 20, 2, trust=SA, adjacency=ADD, epsilon=promised)
    assert epsilon_of(true_mu(plan, 0)) == pytest.approx(promised, rel=1e-9)
    (level,) = calibration.query_noises(plan)
    alone = level.sensitivity[0] / calibration.own_std(plan, level)[0] * math.sqrt(2)  # of one client's share, twice
    assert epsilon_of(alone) == pytest.approx(seen, rel=5e-3)
    against = plan_for(build("dp-fedgd"), (3,) * 20, 2, trust=PC, adjacency=ADD, epsilon=promised)
    assert epsilon_of(true_mu(against, 0)) == pytest.approx(promised, rel=1e-9)
    assert calibration.summed_noise(against)[0] == pytest.approx(
        math.sqrt(20) * calibration.summed_noise(plan)[0], rel=1e-9
    )


# ---------------------------------------------------------------------------------------------------------- accounting


def test_fixed_cohorts_are_no_coins():
    """Each client pays for the rounds it came to, as who comes is public. An accountant of Poisson sampling would say
    less than is told, and its figure does not survive a second look at the certificate."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    plan = plan_for(build("dp-fedgd"), (4,) * 10, 20, "fixed:2", adjacency=ADD, epsilon=2.0)
    attended = np.bincount(np.concatenate(plan.cohorts), minlength=10)
    ratio = calibration.query_noises(plan)[0].sensitivity[0] / calibration.query_noises(plan)[0].std[0]
    worst = int(attended.argmax())
    assert spending.mu(plan) == pytest.approx(ratio * math.sqrt(attended.max()), rel=1e-9)
    assert true_mu(plan, worst) == pytest.approx(spending.mu(plan), rel=1e-9)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    amplified = accountant.compose(PoissonSampledDpEvent(0.2, GaussianDpEvent(1 / ratio)), 20).get_epsilon(DELTA)
    assert amplified < 0.7 * spending.epsilon(plan)
    cert = certified(plan)
    assert cert["sampler"]["amplification"] == "none claimed"
    assert verify(cert).problems == []
    assert verify(certified(plan, epsilon=amplified)).problems


def test_two_noised_queries_are_not_two_epsilon():
    """They are the root of two in mu: 1.46 for an epsilon of 1. A certificate that says 2 does not hold, and one of the
    two gradients of a sharpness-aware step cannot go unpaid."""
    once = plan_for(build("dp-fedavg"))
    both = replace(plan_for(build("dp-fedsam")), noise=calibration.summed_noise(once)[0])
    assert spending.mu(both) == pytest.approx(math.sqrt(2) * spending.mu(once), rel=1e-9)
    assert spending.epsilon(both) == pytest.approx(epsilon_of(math.sqrt(2) * spending.mu(once)), rel=1e-9)
    assert spending.epsilon(both) == pytest.approx(1.46, abs=0.01)
    cert = certified(both)
    assert verify(cert).problems == []
    assert verify(cert).recomputed == pytest.approx(spending.epsilon(both), rel=5e-3)
    assert any("is claimed" in problem for problem in verify(certified(both, epsilon=2.0)).problems)
    half = build("dp-fedsam")
    (stage,) = half.stages
    careless = half._replace(stages=(stage._replace(queries=(replace(stage.queries[0], calls=1, joint=1),)),))
    assert "more often" in checks.asks(careless, SOFTMAX)[0]
    assert checks.asks(half, SOFTMAX) == []


class Once(Correlated):
    """Accounted for as if each unit took part in one round."""

    def sensitivity(self, rounds):
        return max((super(Once, self).sensitivity(np.array([t])) for t in rounds), default=0.0)

    released_sensitivity = sensitivity


def test_a_tree_for_one_participation():
    """70 rounds, everybody in every one: 2.646 clips are claimed, 90.34 are moved. The attack on the engine's own noise
    refutes the claim; against the right account it is as good as the account allows."""

    def over(rounds):
        found = correlated.least_squares(correlated.tree(rounds, honaker=False))
        return Once(found.encoder, found.decoder)

    right = plan_for(build("dp-ftrl"), (4,), 70)
    (stage,) = right.method.stages
    query = replace(stage.queries[0], noise=Stream("tree", over))
    wrong = replace(right, method=right.method._replace(stages=(stage._replace(queries=(query,)),)))
    assert wrong.stages[0].queries[0].noise.sensitivity(np.arange(70)) == pytest.approx(2.646, abs=5e-4)
    assert right.stages[0].queries[0].noise.sensitivity(np.arange(70)) == pytest.approx(90.34, abs=5e-3)
    assert spending.epsilon(right) == spending.epsilon(wrong) == pytest.approx(1.0)
    for plan, far in ((right, 1.0), (wrong, 90.34 / 2.646)):
        assert true_mu(plan, 0) == pytest.approx(far * spending.mu(plan), rel=1e-3)
        zero, one = likelihoods(plan, 500)
        bound = statistics.by_gaussian(zero, one, delta=DELTA, threshold=0.0)
        assert (bound.epsilon > spending.epsilon(plan)) == (far > 1)
    assert bound.epsilon > 30


def likelihoods(plan, runs):
    """log p_1 / p_0 of runs of the only client's stream, for a unit that moves it in every round by all it can. Each
    coordinate of a run without gradients is a run of its own."""
    (level,) = calibration.query_noises(plan)
    noise = plan.stages[0].queries[0].noise.decoder * level.std[0]
    rounds = reference.run(plan, *still(plan, 2 * runs), Seeded(1))
    seen = plan.sizes[0] * np.stack([this_round.aggregate.numpy() for this_round in rounds])
    gap = np.full(plan.rounds, level.sensitivity[0])
    weights = np.linalg.solve(noise @ noise.T, gap)
    score = weights @ (seen - gap[:, None] / 2)
    return score[:runs], score[runs:] + weights @ gap


def test_an_uncharged_warm_start(tmp_path):
    """The first control variates are a release: T K + 1 of them are in the account and in the ledger. Built from the
    data on the side, they are refused."""
    cold, warm = (plan_for(build("dp-scaffold", warm_start=w), rounds=4 + w) for w in (False, True))
    level = calibration.query_noises(warm)[1]
    unpaid = replace(cold, noise=calibration.summed_noise(warm)[0])
    assert spending.mu(warm) == pytest.approx(math.sqrt(5 / 4) * spending.mu(unpaid), rel=1e-9)
    _, records = still(warm, 3)
    for plan, rows in ((cold, 4), (warm, 5)):
        with Ledger(tmp_path / f"{rows}.db") as ledger:
            for _ in reference.run(plan, SQUARES, records, Seeded(0), ledger=ledger, run_id="r"):
                pass
            mine = [row for row in ledger.rows() if row.who == "client 0"]
            assert [row.round for row in mine] == list(range(rows))
            assert ledger.spent("client 0") == pytest.approx(spending.mu(plan), rel=1e-9)
            assert ledger.spent_epsilon("client 0", DELTA) == pytest.approx(1.0, rel=1e-6)
    assert [row.query for row in mine] == ["0.0 gradient", *[level.name] * 4]
    assert gaussian.mu_of((r.sensitivity, r.std, r.times) for r in mine[1:]) < 0.9 * spending.mu(warm)

    method = build("dp-scaffold")
    (stage,) = method.stages

    def peek(ask):
        return ask.gradient(torch.zeros(12, dtype=torch.float64))

    def compute(ask, broadcast, c_i, cache):
        return stage.local.compute(ask, broadcast, c_i + cache, ())

    sly = method._replace(stages=(stage._replace(local=stage.local._replace(compute=compute, prepare=peek)),))
    assert "prepare asked the gradient query" in checks.asks(sly, SOFTMAX)[0]
    assert checks.asks(method, SOFTMAX) == []


def test_local_steps_that_are_not_counted():
    """K noised gradients a round are K releases: T of them for T K are not enough, and more are not answered."""

    def steps(count):
        def compute(ask, broadcast, memory, cache):
            y = broadcast.theta
            for _ in range(5):
                y = y - 0.1 * ask.gradient(y)
            return y - broadcast.theta

        return method(compute, Query(Kind.GRADIENT, 1.0, calls=count), rule=scale(1.0))

    assert "declares 1 call per round" in checks.asks(steps(1), SOFTMAX)[0]
    assert checks.asks(steps(5), SOFTMAX) == []
    few, all_of_them = (plan_for(steps(count)) for count in (1, 5))
    np.testing.assert_allclose(
        calibration.client_std(all_of_them, 0, 0), math.sqrt(5) * calibration.client_std(few, 0, 0)
    )
    with pytest.raises(OverspentError):
        next(simulate.run(few, SQUARES, still(few, 3)[1], Seeded(0)))


def test_a_delta_of_one_in_as_many_persons():
    """1 / N is no small chance where N counts 47 clients."""
    with pytest.raises(SordinoError, match="delta"):
        Privacy(1.0, 1 / 47, Unit.CLIENT)
    assert Privacy(1.0, 1 / 47**3, Unit.CLIENT).delta < 1e-4


# ----------------------------------------------------------------------------------------------- what is said, and seen


def counted(ask):
    """How many records have label 0: an integer, straight from the data."""
    return (ask._all().y == 0).sum(-1, keepdim=True)


def summed(ask):
    """Of all features: the stuff that losses are made of."""
    return ask._all().x.nan_to_num(0, 0, 0).clamp(-1, 1).sum((-1, -2)).unsqueeze(-1)


@pytest.mark.parametrize("metric", [counted, summed])
def test_metrics_sent_home(metric):
    """Beside the noised gradient: the message is made of more than noised answers, and that is found."""

    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta), metric(ask)

    rule = Rule(stateless, lambda said, state, theta, t: (-0.1 * said[0], state))
    found = searched(method(compute, Query(Kind.GRADIENT, 1.0), rule=rule), SOFTMAX, SWAP)
    assert math.isinf(found.worst)
    assert "its message reveals more" in found.problems[0]

    def honest(ask, broadcast, memory, cache):
        g = ask.gradient(broadcast.theta)
        return g, g.norm(dim=-1, keepdim=True)

    assert searched(method(honest, Query(Kind.GRADIENT, 1.0), rule=rule), SOFTMAX, SWAP).problems == []
    with pytest.raises(SordinoError, match="an answer without noise needs a noised DELTA"):
        plan_for(method(descend, Query(Kind.GRADIENT, 1.0), Query(Kind.COUNT, 1.0, noise=None)))
    whole = method(compute, Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, 1.0), rule=rule)
    with pytest.raises(SordinoError, match="message: what is noised as a whole must be one vector"):
        list(reference.run(plan_for(whole), SQUARES, still(plan_for(whole), 3)[1], Seeded(0)))


def bare_gradient(ask, theta):
    return ask._model.clipped_sum(theta, ask._all(), 1.0) / ask.records


def test_moments_of_bare_gradients():
    """DP-FedAdamW sends moments. Made of noised gradients they cost nothing; made of bare ones, or kept from them at
    the client, they are found."""
    adamw = build("dp-fedadamw", steps=2)
    (stage,) = adamw.stages

    def sends(ask, broadcast, memory, cache):
        message = stage.local.compute(ask, broadcast, memory, cache)
        bare = bare_gradient(ask, broadcast.theta).square().mean(-1, keepdim=True)
        return message._replace(moments=message.moments + bare)

    kept = [()]

    def keeps(ask, broadcast, v, cache):
        message = stage.local.compute(ask, broadcast, (), cache)
        kept[0] = 0.9 * v + 0.1 * bare_gradient(ask, broadcast.theta).square()
        return message._replace(delta=message.delta / (v.sqrt() + 1))

    sent = stage._replace(local=stage.local._replace(compute=sends))
    hidden = stage._replace(
        local=stage.local._replace(
            compute=keeps,
            update_memory=lambda message, broadcast, v: kept[0],
            init=lambda theta, _: torch.zeros_like(theta),
        )
    )
    found = searched(adamw._replace(stages=(sent,)), SOFTMAX)
    assert "its message reveals more" in found.problems[0]
    assert "differs although its messages are the same" in checks.replay(adamw._replace(stages=(hidden,)), SOFTMAX)[0]
    assert searched(adamw, SOFTMAX, trials=12).problems == []
    assert checks.replay(adamw, SOFTMAX) == []


def test_rescaling_by_xi():
    """DP-FedNew, algorithm 2: kept on a sphere along a fixed direction, a mean of gradients that are as long as the
    sphere's radius moves by sqrt(2 / m) when one of m leaves: up to 37 times what is claimed. A projection does not."""
    gamma = 1.1
    for m, ratio in ((20, 3.2), (100, 7.4), (500, 16.6), (2500, 37.0)):
        published, lemma = 1 / (gamma * m) + 1 / (gamma**2 * m - gamma), shift(1.0, 1.0, 1.0, gamma).bound(m, ADD)
        u, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 5.0]).double()
        moved = {
            name: float((limit(u, b, 1.0) - limit(u * (m - 1) / m, b, 1.0)).norm() / gamma)
            for name, limit in LIMITS.items()
        }
        assert moved["paper-xi"] / published == pytest.approx(ratio, rel=0.02)
        assert moved["paper-xi"] > 3 * lemma
        assert moved["projection"] <= lemma
    wrong, right = (build("dp-fednew", limit=1.0, limit_by=by) for by in ("paper-xi", "projection"))
    for adjacency in Adjacency:
        assert searched(wrong, SQUARES, adjacency, trials=40).beyond
    assert not searched(right, SQUARES, trials=5).beyond
    with pytest.raises(SordinoError, match="changes without bound with the data near"):
        plan_for(wrong)
    assert plan_for(right).proved


HIDDEN = [
    ("dp-fedavg", {"steps": 2}, {"steps": 1}, "only a client's own noise protects it"),
    ("dp-scaffold", {}, None, "Control variates are hidden client state"),
    ("dp-fednew", {}, {"duals": False}, "Duals are hidden client state"),
    ("dp-fednew-fc", {}, {"duals": False}, "Duals are hidden client state"),
    ("dp-fedadamw", {}, None, "not linear in a client's noise"),
]


@pytest.mark.parametrize(("name", "options", "instead", "reason"), HIDDEN, ids=[row[0] for row in HIDDEN])
def test_what_sums_do_not_hide_is_refused_with_the_reason(name, options, instead, reason):
    for trust in (SA, Trust.TRUSTED_SERVER):
        with pytest.raises(SordinoError) as caught:
            plan_for(build(name, **options), trust=trust)
        assert reason in str(caught.value)
        assert "Proved: record level under untrusted-server" in str(caught.value)
        if instead is not None:
            assert plan_for(build(name, **instead), trust=trust).proved
        loud = plan_for(build(name, **options), trust=trust, uncertified=True)
        assert not certified(loud)["certified"]
    assert plan_for(build(name, **options)).proved


def test_why_noised_local_steps_are_not_proved_under_sums():
    """Nine clients take two steps, each noised by its share. Eight have losses whose second gradient takes back what
    the first one's noise did: half of the noise is gone from the sum. The ninth's record, which moves both steps, then
    tells 1.34 times the mu that T K releases of the sum would; its own noise covers it."""
    n, lr, tiny = 9, 0.5, 1e-6
    features = rows = 2 * n
    subject = build("dp-fedavg", steps=2, local_lr=lr)
    plan = plan_for(subject, (rows,) * n, 1, trust=SA, uncertified=True)
    x = math.sqrt(rows / lr) * torch.eye(rows, dtype=torch.float64).repeat(n, 1)
    x[:rows] = 0
    records = Records(x, torch.zeros(n * rows), np.arange(0, n * rows + 1, rows))
    (this_round,) = reference.run(plan, Linear(features, 1, Loss.SQUARES, bias=False), records, Units(size=tiny))
    std = float(this_round.aggregate.norm()) / tiny
    told = 2 * lr * plan.weights[0] * calibration.query_noises(plan)[0].sensitivity[0] / rows / std
    assert told / spending.mu(plan) == pytest.approx(math.sqrt(2 / (1 + 1 / n)), rel=1e-6)
    assert told > 1.3 * spending.mu(plan)
    own = plan_for(subject, (rows,) * n, 1)
    said = shown(own, Units())[0][0, 0]
    told = 2 * lr * calibration.query_noises(own)[0].sensitivity[0] / rows / float(np.linalg.norm(said))
    assert told == pytest.approx(spending.mu(own), rel=1e-9)


# --------------------------------------------------------------------------------------------------------------- resume


def test_a_correlated_stream_with_a_new_key(tmp_path):
    """What cancels against draws of a key that is gone is refused, in either engine; with a seed it goes on."""
    rng = np.random.default_rng(0)
    records = Records.of(rng.normal(size=(20, 3)), rng.integers(0, 3, 20), np.arange(20) % 5, dtype=torch.float64)
    for name, goes_on in (("dp-ftrl", False), ("dp-fedgd", True)):
        plan = plan_for(build(name), records.sizes, 4)
        first = next(simulate.run(plan, SOFTMAX, records, Secure()))
        rest = simulate.run(plan, SOFTMAX, records, Secure(), start=1, checkpoint=first.checkpoint)
        with Ledger(tmp_path / name) as ledger:
            next(reference.run(plan, SOFTMAX, records, Secure(), ledger=ledger, run_id="r"))
            again = reference.run(plan, SOFTMAX, records, Secure(), ledger=ledger, run_id="r")
            for run, left in ((rest, 3), (again, 4)):
                if goes_on:
                    assert len(list(run)) == left
                else:
                    with pytest.raises(SordinoError, match="key that is not stored, so round 1"):
                        list(run)
        whole = list(simulate.run(plan, SOFTMAX, records, Seeded(3)))
        rest = list(simulate.run(plan, SOFTMAX, records, Seeded(3), start=2, checkpoint=whole[1].checkpoint))
        assert torch.equal(rest[-1].model, whole[-1].model)
