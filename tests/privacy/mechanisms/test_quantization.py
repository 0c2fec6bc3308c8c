"""Plans whose sums are of integers: calibration, sensitivity, noise, account, ledger and certificate."""

import contextlib
import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sordino.privacy.plan
from sordino.core import Adjacency, Broadcast, Divisor, Local, Privacy, Trust
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.oracle import combined, decode_sum, encode_integers, stream_factors
from sordino.engines.schedule import round_plans
from sordino.engines.trace import sent_answers
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger, Spent
from sordino.evidence.statement import statement
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import concentrated, gaussian
from sordino.privacy.accounting.correlated import tree
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.laws import CorrelatedNoise
from sordino.privacy.mechanisms.quantization import Answer, Integers
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan, plan_mechanism
from sordino.tree import leaves
from tests.support import tiers

SIZES = (40, 50, 60, 70)


def made(method="dp-fedsofim", sizes=SIZES, rounds=5, dimension=None, dropouts=1, colluders=1, **keys):
    privacy = Privacy(
        keys.pop("epsilon", 4.0),
        1e-5,
        adjacency=keys.pop("adjacency", Adjacency.REPLACE_ONE),
        trust=keys.pop("trust", Trust.SECURE_AGGREGATION),
        client_epsilon=keys.pop("requested_epsilons", {}),
    )
    integers = Integers(dimension or 3 * 6 + 3, dropouts, colluders)
    return Plan(build(method, **keys.pop("options", {})), rounds, sizes, privacy, integers=integers, **keys)


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize("divisor", Divisor)
def test_the_promise_is_kept_and_not_by_much(adjacency, divisor):
    plan = made(adjacency=adjacency, divisor=divisor)
    assert 4 * (1 - 1e-6) < spending.epsilon(plan) <= 4
    assert spending.epsilon_after(plan, plan.rounds - 1) == pytest.approx(spending.epsilon(plan), rel=1e-9)
    gaussian = replace(plan, integers=None)
    dearer = calibration.query_noises(plan)[0].std / calibration.query_noises(gaussian)[0].std
    assert concentrated.SMOOTHING < dearer.max() < 1.01  # and a little for rounding
    rho = concentrated.rho_of(4.0, plan.privacy.delta, plan.rounds)
    assert spending.mu(plan) > 1.05 * math.sqrt(2 * rho)  # concentrated DP would need more noise


def test_a_requested_epsilon_holds_for_a_client_that_moves_few_steps():
    """Rounding lengthens its short steps more than the long ones of others (found by review)."""
    for requested_epsilon, dimension in ((0.004, 10**6), (0.02, 10**6)):
        plan = made(
            sizes=(200, 200, 200_000),
            dimension=dimension,
            dropouts=0,
            divisor=Divisor.CLIENT_MEAN,
            requested_epsilons={2: requested_epsilon},
            rounds=3,
        )
        (own,) = (group for group in spending.groups(plan) if 2 in group.clients)
        assert spending.epsilon_of(plan, own) <= requested_epsilon * (1 + 1e-9)


def drawn(plan, theta, x, y, client, source, round_plan):
    """Integers of one client, as the reference engine makes them."""
    model = Linear(6, 3)
    records = Records.of(x, y, client, dtype=torch.float64)
    ask = reference.oracle(model, records, round_plan, 0, source, add_noise=False)
    message = round_plan.stage.local.compute(ask, Broadcast(theta, ()), (), ())
    return encode_integers(plan, round_plan, 0, ask.finish(message), ask.released(message), source)


@pytest.mark.parametrize("adjacency", Adjacency)
def test_one_record_moves_the_integers_by_what_is_claimed_and_nearly_reaches_it(adjacency):
    plan, rng = made("dp-fedgd", adjacency=adjacency), np.random.default_rng(1)
    round_plan = next(round_plans(plan, Linear(6, 3)))
    level, worst = calibration.query_noises(plan)[0], 0.0
    claim = charges(plan, 0, 0, "run")[0].sensitivity / level.step
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    client = np.repeat(np.arange(4), SIZES)
    for trial in range(40):
        theta = torch.from_numpy(rng.normal(0, 3 * (trial % 2), 21))
        other_x, other_y = x.copy(), y.copy()
        x[0], y[0] = 50 * rng.normal(size=6), trial % 3
        if adjacency is Adjacency.REPLACE_ONE:
            other_x[0], other_y[0] = -x[0], y[0]
        else:
            other_x[0] = x[0]
        quiet = Noiseless(trial)  # the same dither, and no noise
        first = drawn(plan, theta, x, y, client, quiet, round_plan)
        if adjacency is Adjacency.ADD_REMOVE:
            keep = np.arange(len(x)) != 0
            second = drawn(plan, theta, other_x[keep], other_y[keep], client[keep], quiet, round_plan)
        else:
            second = drawn(plan, theta, other_x, other_y, client, quiet, round_plan)
        moved = np.linalg.norm((first - second).view(np.int32).astype(float))
        assert moved <= claim
        worst = max(worst, moved / claim)
    assert worst > 0.95


def test_the_noise_of_a_sum_is_what_the_plan_says():
    plan, rng = made("dp-fedgd", rounds=1), np.random.default_rng(2)
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    records = Records.of(x, y, np.repeat(np.arange(4), SIZES), dtype=torch.float64)

    def aggregate(source):
        (round_plan,) = reference.run(plan, Linear(6, 3), records, source)
        return round_plan.aggregate

    still = aggregate(Noiseless(0))
    noise = torch.stack([aggregate(Seeded(seed)) - still for seed in range(200)])
    claimed = calibration.aggregate_std(plan, 0)
    count = noise.numel()
    assert noise.std() / claimed == pytest.approx(1, abs=5 / math.sqrt(2 * count))
    # What is counted on is the noise of two of the four.
    level = calibration.query_noises(plan)[0]
    counted_on = math.sqrt(2 * calibration.integer_variance(plan, level)) * level.step * level.weight.max()
    assert counted_on == pytest.approx(float((level.weight * level.std).max()), rel=1e-9)
    assert claimed == pytest.approx(counted_on * math.sqrt(2), rel=1e-9)


def test_integers_come_back_as_the_aggregate():
    plan = made("dp-fedgd", rounds=1)
    round_plan = next(round_plans(plan, Linear(6, 3)))
    level, message = calibration.query_noises(plan)[0], torch.linspace(-1, 1, 21, dtype=torch.float64)
    total = np.zeros(21, np.uint32)
    for i in range(4):
        total += encode_integers(plan, round_plan, i, message, [0], Noiseless(i))
    step = level.step * level.weight.max()
    assert (decode_sum(plan, round_plan, total) - message).abs().max() < 4 * step


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"method": "dp-scaffold", "uncertified": True}, "clients that store their own message"),
        ({"method": "dp-fedavg", "options": {"steps": 3}, "uncertified": True}, "asks 3 times per round"),
        ({"method": "dp-fednew-fc", "uncertified": True}, "clients that store their own message"),
        ({"method": "dp-fedgd", "options": {"quantile": 0.5}}, "every noised answer exactly once"),
        ({"trust": Trust.UNTRUSTED_SERVER}, "secure-aggregation"),
        ({"dropouts": 2}, "no better than untrusted-server"),
        ({"sizes": (40, 50)}, "no better than untrusted-server"),
        ({"epsilon": math.inf}, "without noise"),
        ({"sizes": (10**9, 10**9, 10**9, 10**9), "dimension": 10**6}, "rounding would multiply the noise"),
    ],
)
def test_what_cannot_be_is_refused(keys, why):
    with pytest.raises(SordinoError, match=why):
        calibration.query_noises(made(**keys))


def test_an_encoder_with_more_rows_than_rounds_has_no_integers():
    """Nodes of a tree; `NodeTree`, with as many rows as rounds, has the same noise."""
    with pytest.raises(SordinoError, match="more rows than rounds"):
        CorrelatedNoise(tree(6)).with_integers(Integers(10))
    for honaker in ("below", "none"):
        found = made(method="dp-ftrl", options={"honaker": honaker})
        assert calibration.query_noises(found)[0].std.min() > 0


# ------------------------------------------------------------------------------------- several answers, and matrices


def masked_plan(method, rounds=6, model=None, sizes=SIZES, dropouts=0, adjacency=Adjacency.REPLACE_ONE, **options):
    """A plan whose messages are what the method sends of this model."""
    privacy = Privacy(8.0, 1e-5, adjacency=adjacency, trust=Trust.SECURE_AGGREGATION)
    plan = Plan(build(method, **options), rounds, sizes, privacy)
    messages = sent_answers(plan, model or Linear(6, 3), 6, torch.int64)
    return replace(plan, integers=Integers(messages, dropouts, 1))


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_symmetric_matrix_becomes_a_vector_of_its_norm_and_comes_back(rows, seed):
    rng = np.random.default_rng(seed)
    a, b = (m + m.T for m in rng.normal(size=(2, rows, rows)))
    answer = Answer(0, (rows, rows))
    assert answer.flat(a).shape == (answer.dimension,) == (rows * (rows + 1) // 2,)
    np.testing.assert_allclose(np.linalg.norm(answer.flat(a) - answer.flat(b)), np.linalg.norm(a - b), rtol=1e-12)
    np.testing.assert_allclose(answer.unflat(answer.flat(a)), a, rtol=1e-12)


class WithoutRoot(Answer):
    """A wrong twin: it sends the upper triangle as it is, so equal noise is too small off the diagonal of A."""

    def flat(self, values):
        return values[np.triu_indices(self.shape[0])]


def grams(plan, x, source):
    """The first stage's integers of client 0 in `auto`."""
    records = Records.of(x, np.zeros(len(x), int), np.repeat(np.arange(4), SIZES), dtype=torch.float64)
    round_plan = next(round_plans(plan, Linear(6, 3)))
    ask = reference.oracle(Linear(6, 3), records, round_plan, 0, source, add_noise=False)
    message = round_plan.stage.local.compute(ask, Broadcast(torch.zeros(21), ()), (), ())
    return encode_integers(plan, round_plan, 0, message, ask.released(message), source)


def test_one_record_moves_the_matrix_in_steps_by_what_is_claimed_and_nearly_reaches_it():
    plan, rng, worst = masked_plan("auto"), np.random.default_rng(3), 0.0
    level = calibration.query_noises(plan)[0]
    claim = charges(plan, 0, 0, "run")[0].sensitivity / level.step
    assert level.dimension == 28
    for trial in range(60):
        x = rng.normal(size=(sum(SIZES), 6)) * 10.0 ** rng.integers(-1, 3)
        # u u^T of orthogonal u: far apart in the Frobenius norm, though their inner product is 0
        one, other = np.linalg.qr(rng.normal(size=(6, 6)))[0][:2] * 10.0 ** rng.integers(0, 4)
        x[0] = one
        first = grams(plan, x, Noiseless(trial))
        x[0] = other if trial % 3 else -other * 1e6
        moved = np.linalg.norm((first - grams(plan, x, Noiseless(trial))).view(np.int32).astype(float))
        assert moved <= claim
        worst = max(worst, moved / claim)
    assert worst > 0.95


def test_a_matrix_without_the_root_of_two_moves_less_and_gets_other_noise(monkeypatch):
    """The wrong twin is found: its matrix comes back with the wrong entries, and its noise is not white."""
    rows = 5
    right, wrong = Answer(0, (rows, rows)), WithoutRoot(0, (rows, rows))
    a = np.ones((rows, rows))
    assert np.linalg.norm(wrong.flat(a)) < np.linalg.norm(a) - 1
    assert not np.allclose(right.unflat(wrong.flat(a)), a)


def test_the_noise_of_a_matrix_is_white_in_the_frobenius_norm():
    plan = masked_plan("auto")
    x, rng = np.zeros((sum(SIZES), 6)), np.random.default_rng(0)
    round_plan = next(round_plans(plan, Linear(6, 3)))
    x += rng.normal(size=x.shape)
    still = grams(plan, x, Noiseless(0))
    draws = np.array([(grams(plan, x, Seeded(k)) - still).view(np.int32).astype(float) for k in range(400)])
    variance = calibration.integer_variance(plan, calibration.query_noises(plan)[0])
    tolerance = 5 * math.sqrt(2 / draws.size)
    assert (draws**2).mean() / variance == pytest.approx(1, abs=tolerance + 1e-3)
    matrix = decode_sum(plan, round_plan, np.zeros(28, np.uint32))
    assert matrix.shape == (7, 7)
    ones = decode_sum(plan, round_plan, np.full(28, 2**20, np.uint32))
    assert torch.equal(ones, ones.T)
    assert float(ones[0, 0] / ones[0, 1]) == pytest.approx(math.sqrt(2))


def test_each_answer_of_a_round_has_its_own_steps_noise_and_rounding():
    plan = masked_plan("dp-fedgd", quantile=0.5)
    gradient, count = calibration.query_noises(plan)
    assert (gradient.dimension, count.dimension) == (21, 1)
    assert gradient.step != count.step
    assert spending.epsilon(plan) <= 8
    assert spending.epsilon_after(plan, 5) == pytest.approx(spending.epsilon(plan), rel=1e-9)
    round_plan, message = next(round_plans(plan, Linear(6, 3))), (torch.zeros(21), torch.zeros(1))
    asked = []

    class Noting(Seeded):
        def uniform(self, at, shape):
            asked.append(("dither", at))
            return super().uniform(at, shape)

        def words(self, at, count):
            asked.append(("noise", at))
            return super().words(at, count)

    integers = encode_integers(plan, round_plan, 0, message, [0, 1], Noting(1))
    assert integers.shape == (22,)
    assert len({at for what, at in asked if what == "dither"}) == 2
    assert len({at for what, at in asked if what == "noise"}) >= 2
    total = decode_sum(plan, round_plan, integers)
    assert type(total).__name__ == "GradientAndCount"


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        ((torch.zeros(21), torch.zeros(1)), [1, 0]),
        ((torch.zeros(1), torch.zeros(21)), [0, 1]),
        ((torch.zeros(21), torch.zeros(1), torch.zeros(1)), [0, 1, 1]),  # a second count, which nobody pays for
        (torch.zeros(21), [0]),
    ],
)
def test_a_message_of_other_answers_than_the_plan_has_is_refused(message, numbers):
    plan = masked_plan("dp-fedgd", quantile=0.5)
    with pytest.raises(SordinoError, match="the plan describes"):
        encode_integers(plan, next(round_plans(plan, Linear(6, 3))), 0, message, numbers, Seeded(0))


@pytest.mark.parametrize(
    "messages", [((Answer(0, (21,)),),), ((Answer(0, (21,)), Answer(1, (1,)), Answer(1, (1,))),), ((), ())]
)
def test_a_plan_needs_every_noised_answer_once(messages):
    with pytest.raises(SordinoError, match=r"exactly once|stages|dimension"):
        replace(masked_plan("dp-fedgd", quantile=0.5), integers=Integers(messages))


def test_rounding_costs_each_answer_by_its_own_length():
    """A wrong twin that rounds the matrix as if it were as short as the count claims less than the records reach."""
    plan = masked_plan("auto")
    level = calibration.query_noises(plan)[0]
    short = replace(plan, integers=replace(plan.integers, messages=((Answer(0, (1,)),), *plan.integers.messages[1:])))
    steps = 20 * level.step  # coarse steps, where rounding is most of it
    honest = plan_mechanism(plan, 0, 0).visible_sensitivity(np.full(4, 3 * steps), steps, np.ones(4))
    twin = plan_mechanism(short, 0, 0).visible_sensitivity(np.full(4, 3 * steps), steps, np.ones(4))
    assert (twin < honest).all()


# ----------------------------------------------------------------------------------------------------- minibatches


@pytest.fixture(scope="module", params=tiers(list(Adjacency), [Adjacency.REPLACE_ONE]))
def sampled(request):
    return sampled_plan(request.param)


def sampled_plan(adjacency, batch="poisson:16", epsilon=4.0):
    privacy = Privacy(epsilon, 1e-5, adjacency=adjacency, trust=Trust.SECURE_AGGREGATION)
    return Plan(
        build("dp-fedgd"), 8, (60,) * 4, privacy, sampling=Sampling.parse(batch), integers=Integers(21, dropouts=1)
    )


def test_minibatches_keep_the_promise_and_cost_little_more_than_real_numbers(sampled):
    assert 4 * (1 - 5e-3) < spending.epsilon(sampled) <= 4
    assert spending.epsilon_after(sampled, 7) == pytest.approx(spending.epsilon(sampled), rel=1e-9)
    (level,), (plain,) = (calibration.query_noises(p) for p in (sampled, replace(sampled, integers=None)))
    assert 1 < (level.std / plain.std).max() < 1.001
    assert (
        calibration.query_noises(sampled)[0].std
        < calibration.query_noises(replace(sampled, sampling=Sampling()))[0].std
    ).all()


def test_a_replaced_term_of_a_sample_is_rounded_by_itself():
    """Half of what rounding makes of the difference, the wrong twin, is less than what it makes of one term."""
    plan, plan_ar = sampled_plan(Adjacency.REPLACE_ONE), sampled_plan(Adjacency.ADD_REMOVE)
    (level,) = calibration.query_noises(plan)
    claim = charges(plan, 0, 0, "run")[0].sensitivity / level.step
    moved = level.sensitivity[0] * level.weight[0] / level.weight.max() / level.step
    assert claim == pytest.approx(2 * discrete_gaussian.rounded(moved / 2, 21), rel=1e-6)
    assert claim > discrete_gaussian.rounded(moved, 21)
    assert charges(plan, 0, 0, "run")[0].mechanism == "smoothed-discrete-gaussian"
    assert charges(plan_ar, 0, 0, "run")[0].rate < 1


def test_the_ledger_and_the_certificate_agree_with_the_plan(sampled):
    spent = Spent()
    for t in range(8):
        for entry in charges(sampled, 3, t, "run"):
            spent.add(entry)
    cert = json.loads(json.dumps(certificate(sampled, Secure(), version="1")))
    assert verify(cert).problems == []
    assert spent.epsilon(1e-5) <= spending.epsilon(sampled) * (1 + 1e-9)
    assert spent.epsilon(1e-5) > 0.95 * spending.epsilon(sampled)
    assert "function" in " ".join(cert["numerics"])
    for wrong in ("gaussian", "discrete-gaussian"):
        forged = copy.deepcopy(cert)
        for release in (r for g in forged["groups"] for r in g["releases"]):
            release["mechanism"] = wrong
        with contextlib.suppress(SordinoError):
            assert verify(forged).problems


@pytest.mark.parametrize("batch", ["poisson:45", "poisson:1000"])
def test_clients_that_use_all_their_records_keep_the_promise_too(batch):
    plan = replace(sampled_plan(Adjacency.REPLACE_ONE, batch), sizes=(40, 40, 60, 60))
    for group in spending.groups(plan):
        assert spending.epsilon_of(plan, group) <= 4


def test_samples_of_a_fixed_size_are_refused():
    with pytest.raises(SordinoError, match="not for all pairs at once"):
        sampled_plan(Adjacency.REPLACE_ONE, "fixed:16")


# --------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("options", [{}, {"mechanism": "banded", "band": 3}, {"mechanism": "schedule"}])
def test_one_record_moves_a_stream_of_integers_by_what_is_claimed_and_nearly_reaches_it(options):
    """The record pulls into one direction in every round, and its client encodes all that it answered."""
    rounds, rng = 6, np.random.default_rng(4)
    plan = masked_plan("dp-ftrl", rounds, **options)
    (level,), model = calibration.query_noises(plan), Linear(6, 3)
    claim = math.sqrt(sum(charges(plan, 0, t, "run")[0].sensitivity ** 2 for t in range(rounds))) / level.step
    factors = stream_factors(plan, next(round_plans(plan, model)))
    own_rounds = math.sqrt((np.diag(factors.encoder) ** 2).sum()) * claim / factors.sensitivity(np.arange(rounds))
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    thetas = [torch.full((21,), float(t), dtype=torch.float64) for t in range(rounds)]  # all classes stay alike
    x[0], y[0] = 50, 0

    def encoded(x):
        records = Records.of(x, y, np.repeat(np.arange(4), SIZES), dtype=torch.float64)
        answers, sent = {}, []
        for round_plan, theta in zip(round_plans(plan, model), thetas, strict=True):
            ask = reference.oracle(model, records, round_plan, 0, Noiseless(1), add_noise=False)
            answers[round_plan.t] = round_plan.stage.local.compute(ask, Broadcast(theta, ()), (), ())
            row = combined(factors.encoder, round_plan, answers)
            sent.append(encode_integers(plan, round_plan, 0, row, [0], Noiseless(1)).view(np.int32).astype(float))
        return np.concatenate(sent)

    first = encoded(x)
    x[0] = -x[0]
    moved = np.linalg.norm(first - encoded(x))
    assert 0.9 * claim < moved <= claim
    assert options.get("mechanism") == "schedule" or moved > 1.1 * own_rounds  # the twin that forgets earlier answers


def test_a_stream_of_so_many_terms_that_rounding_exceeds_the_margin_is_refused(monkeypatch):
    masked_plan("dp-ftrl", 6)
    monkeypatch.setattr(sordino.privacy.plan, "MOST_STREAM_TERMS", max(SIZES) * 8 - 1)
    masked_plan("dp-ftrl", 5)
    with pytest.raises(SordinoError, match="margin of the clip"):
        masked_plan("dp-ftrl", 6)


def test_a_stream_without_noise_is_the_plain_sum_and_its_noise_is_mixed_by_the_decoder():
    plan, rng, model = masked_plan("dp-ftrl", lr=0.001), np.random.default_rng(5), Linear(6, 3)
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    records = Records.of(x, y, np.repeat(np.arange(4), SIZES), dtype=torch.float64)
    still = [each.aggregate for each in reference.run(plan, model, records, Noiseless(0))]
    gradient = masked_plan("dp-fedgd", lr=0.001)
    plain = [each.aggregate for each in reference.run(gradient, model, records, Noiseless(0))]
    for one, other in zip(still, plain, strict=True):
        assert (one - other).abs().max() < 1e-5
    runs = [[each.aggregate for each in reference.run(plan, model, records, Seeded(k))] for k in range(25)]
    noise = torch.stack([torch.stack([a - b for a, b in zip(run, still, strict=True)]) for run in runs])
    decoder = stream_factors(plan, next(round_plans(plan, model))).decoder
    claimed = calibration.aggregate_std(plan, 0) * np.sqrt((decoder**2).sum(1))
    count = noise[:, 0].numel()
    for t in range(6):
        assert float(noise[:, t].square().mean().sqrt()) / claimed[t] == pytest.approx(1, abs=5 / math.sqrt(2 * count))


def test_a_stream_of_integers_is_not_resumed_without_the_clients_answers():
    plan, rng = masked_plan("dp-ftrl"), np.random.default_rng(5)
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    records = Records.of(x, y, np.repeat(np.arange(4), SIZES), dtype=torch.float64)
    rounds = list(simulate.run(plan, Linear(6, 3), records, Seeded(0)))
    with pytest.raises(SordinoError, match="answers of earlier rounds"):
        next(simulate.run(plan, Linear(6, 3), records, Seeded(0), start=3, checkpoint=rounds[2].checkpoint))


def test_a_method_that_changes_its_answers_is_refused():
    def compute(ask, broadcast, memory, cache):
        return 2 * ask.gradient(broadcast.theta)

    method = build("dp-fedgd")
    (stage,) = method.stages
    privacy = Privacy(8.0, trust=Trust.SECURE_AGGREGATION)
    plan = Plan(method._replace(stages=(stage._replace(local=Local(compute)),)), 3, SIZES, privacy)
    with pytest.raises(SordinoError, match="changes its answers"):
        sent_answers(plan, Linear(6, 3), 6, torch.int64)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("auto", {}),
        ("dp-fedgd", {"quantile": 0.5}),
        ("dp-fednew-fc", {"duals": False}),
        ("dp-fedavg", {"noise_at": "final"}),
    ],
)
def test_the_fast_engine_adds_up_the_integers_of_the_reference(method, options):
    plan, rng = masked_plan(method, **options), np.random.default_rng(5)
    x, y = rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 3, sum(SIZES))
    records = Records.of(x, y, np.repeat(np.arange(4), SIZES), dtype=torch.float64)
    runs = [list(engine.run(plan, Linear(6, 3), records, Seeded(3))) for engine in (reference, simulate)]
    for left, right in zip(*runs, strict=True):
        assert torch.equal(left.model, right.model)
        for one, other in zip(leaves(left.aggregate), leaves(right.aggregate), strict=True):
            assert torch.equal(one, other)
    later = simulate.run(plan, Linear(6, 3), records, Seeded(3), start=4, checkpoint=runs[1][3].checkpoint)
    assert torch.equal(list(later)[-1].model, runs[0][-1].model)


def test_the_fast_engine_adds_up_the_integers_of_one_run_at_a_time():
    plan = made()
    records = Records.of(np.zeros((220, 6)), np.zeros(220, int), np.repeat(np.arange(4), SIZES))
    with pytest.raises(SordinoError, match="one by one"):
        next(simulate.run([plan, plan], Linear(6, 3), records, [Secure(), Secure()], theta=torch.zeros(2, 21)))


# ------------------------------------------------------------------------------------------------------ the account


@pytest.mark.parametrize(
    ("law", "first", "limit"), [("smoothed-discrete-gaussian", 2.0, 2.15), ("discrete-gaussian", 2.15, 2.3)]
)
def test_a_ledger_counts_discrete_and_gaussian_releases_together(law, first, limit, tmp_path):
    """Integer noise counts as Gaussian noise; that of streams, and of ledgers of before, as concentrated DP."""
    plan = made(epsilon=2.0)
    plain = replace(plan, integers=None, privacy=replace(plan.privacy, epsilon=1.0))
    with Ledger(tmp_path / "ledger.db", epsilon=limit, delta=1e-5) as ledger:
        for t in range(plan.rounds):
            entries = charges(plan, 3, t, "first")
            assert {e.mechanism for e in entries} == {"smoothed-discrete-gaussian"}
            ledger.charge([e._replace(who="data", sampler=law) for e in entries])
        assert first * (1 - 1e-3) <= ledger.spent_epsilon("data", 1e-5) <= first * 1.02
        paid = 0
        with contextlib.suppress(OverspentError):
            for t in range(plain.rounds):
                ledger.charge([e._replace(who="data") for e in charges(plain, 3, t, "second")])
                paid += 1
        spent = ledger.spent_epsilon("data", 1e-5)
    discrete = sum((e.sensitivity / e.std) ** 2 for t in range(plan.rounds) for e in charges(plan, 3, t, ""))
    real = sum((e.sensitivity / e.std) ** 2 for t in range(paid) for e in charges(plain, 3, t, ""))
    assert 0 < paid < plain.rounds
    if law == "discrete-gaussian":
        want = concentrated.epsilon((discrete + real) / 2, 1e-5, plan.rounds)
    else:
        mu = math.sqrt(discrete * concentrated.SMOOTHING**2 + real)
        want = gaussian.epsilon(mu, concentrated.remaining(1e-5, plan.rounds))
    assert spent == pytest.approx(want, rel=1e-9)
    assert spent <= limit


@pytest.fixture(scope="module")
def cert():
    return json.loads(json.dumps(certificate(made(), Secure(), version="1")))


def test_a_certificate_verifies_and_tells_both_epsilons(cert):
    assert verify(cert).problems == []
    assert cert["secure"]["epsilon_server"] < cert["epsilon"]
    page = statement(cert)
    assert "even if one site cooperates" in page
    assert "discrete Gaussian" in page
    several = [
        float(part.split(" %")[0].split()[-1]) for part in page.split("with probability up to")[1].split(",")[:1]
    ]
    assert several[0] > 100 * cert["guess"]


def forge(cert, change):
    forged = copy.deepcopy(cert)
    change(forged)
    return verify(forged).problems


def drop_marks(c):
    c["secure"] = None
    for group in c["groups"]:
        for release in group["releases"]:
            release["mechanism"] = "gaussian"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["secure"].update(epsilon_server=0.001),
        lambda c: c.update(guess=0.5),
        lambda c: c.update(secure=None),
        drop_marks,
        lambda c: c["secure"].update(colluders=0),
        lambda c: c["secure"].update(colluders=0, honest=3),
        lambda c: [q.update(dimension=1) for q in c["queries"]],
        lambda c: c.update(trust="trusted-server"),
        lambda c: [r.update(mechanism="gaussian") for g in c["groups"] for r in g["releases"]],
        lambda c: [q.update(step=q["step"] * 1e6) for q in c["queries"]],
        lambda c: [r.update(std=2 * r["std"]) for g in c["groups"] for r in g["releases"]],
    ],
)
def test_a_forged_certificate_is_refused(cert, change):
    with contextlib.suppress(SordinoError):
        assert forge(cert, change)
