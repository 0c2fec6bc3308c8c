"""Plans whose sums are of integers: calibration, sensitivity, noise, account, ledger and certificate."""

import contextlib
import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Adjacency, Broadcast, Divisor, Privacy, Trust
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.oracle import decode_sum, encode_integers
from sordino.engines.schedule import round_plans
from sordino.errors import OverspentError, SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import concentrated
from sordino.privacy.evidence.certificate import certificate
from sordino.privacy.evidence.charges import charges
from sordino.privacy.evidence.ledger import Ledger
from sordino.privacy.evidence.statement import statement
from sordino.privacy.evidence.verify import verify
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.plan import Plan

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
    assert 1.03 < dearer.max() < 1.12  # concentrated DP, and a little for rounding


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
    message = ask.finish(round_plan.stage.local.compute(ask, Broadcast(theta, ()), (), ()))
    return encode_integers(plan, round_plan, 0, message, source)


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
        total += encode_integers(plan, round_plan, i, message, Noiseless(i))
    step = level.step * level.weight.max()
    assert (decode_sum(plan, round_plan, total) - message).abs().max() < 4 * step


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"method": "dp-scaffold", "uncertified": True}, "one noised vector"),
        ({"method": "dp-fedavg", "options": {"steps": 3}, "uncertified": True}, "one noised vector"),
        ({"method": "dp-fednew-fc", "uncertified": True}, "one noised vector"),
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


def test_the_fast_engine_does_not_pretend():
    plan = made()
    records = Records.of(np.zeros((220, 6)), np.zeros(220, int), np.repeat(np.arange(4), SIZES))
    with pytest.raises(SordinoError, match="reference engine"):
        next(simulate.run(plan, Linear(6, 3), records, Secure()))


# ------------------------------------------------------------------------------------------------------ the account


def test_a_ledger_counts_discrete_and_gaussian_releases_together(tmp_path):
    plan = made(epsilon=2.0)
    plain = replace(plan, integers=None, privacy=replace(plan.privacy, epsilon=1.0))
    with Ledger(tmp_path / "ledger.db", epsilon=2.15, delta=1e-5) as ledger:
        for t in range(plan.rounds):
            ledger.charge([e._replace(who="data") for e in charges(plan, 3, t, "first")])
        assert ledger.spent_epsilon("data", 1e-5) == pytest.approx(2.0, rel=1e-3)
        paid = 0
        with contextlib.suppress(OverspentError):
            for t in range(plain.rounds):
                ledger.charge([e._replace(who="data") for e in charges(plain, 3, t, "second")])
                paid += 1
        spent = ledger.spent_epsilon("data", 1e-5)
    rho = sum((e.sensitivity / e.std) ** 2 / 2 for t in range(plan.rounds) for e in charges(plan, 3, t, ""))
    rho += sum((e.sensitivity / e.std) ** 2 / 2 for t in range(paid) for e in charges(plain, 3, t, ""))
    assert 0 < paid < plain.rounds
    assert spent == pytest.approx(concentrated.epsilon(rho, 1e-5, plan.rounds), rel=1e-9)
    assert spent <= 2.15


@pytest.fixture(scope="module")
def cert():
    return json.loads(json.dumps(certificate(made(), Secure(), version="1")))


def test_a_certificate_verifies_and_tells_both_epsilons(cert):
    assert verify(cert).problems == []
    assert cert["secure"]["epsilon_server"] < cert["epsilon"]
    page = statement(cert)
    assert "even if one site cooperates" in page
    assert "Discrete Gaussian" in page
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
        lambda c: c["secure"].update(dimension=1),
        lambda c: c.update(trust="trusted-server"),
        lambda c: [r.update(mechanism="gaussian") for g in c["groups"] for r in g["releases"]],
        lambda c: [q.update(step=q["step"] * 1e6) for q in c["queries"]],
        lambda c: [r.update(std=2 * r["std"]) for g in c["groups"] for r in g["releases"]],
    ],
)
def test_a_forged_certificate_is_refused(cert, change):
    with contextlib.suppress(SordinoError):
        assert forge(cert, change)
