"""DP-FedSOFIM beyond the plain round: whole clients, cohorts, local steps and structures, on both engines."""

import itertools
import math

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Facts, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.rules import fisher
from tests.support import classified, covering, plan_for, tiers

MODEL = Linear(3, 3)
SIZES = (5, 9, 12, 20)
STRUCTURES = ("rank-one", "rank-k", "block", "kronecker")


@pytest.fixture(scope="module")
def records():
    return classified(SIZES)


def run(plan, records, seed=3, **kwargs):
    return list(simulate.run(plan, MODEL, records, Seeded(seed), shares=True, **kwargs))


def models(plan, records):
    return torch.stack([this_round.model for this_round in run(plan, records)])


def replayed(rounds_done, lr, **options):
    """The rule by itself on the aggregates of a run: what the server does with them, and nothing else."""
    theta = torch.zeros(MODEL.size, dtype=torch.float64)
    rule, path, step = fisher(**options), [], 0
    state = rule.init(theta, Facts(4, np.array(SIZES), len(rounds_done), 4.0, 0.1, MODEL.shapes), ())
    for this_round in rounds_done:
        if len(this_round.cohort):
            move, state = rule.update(this_round.aggregate, state, theta, step)
            theta, step = theta - lr * move, step + 1
        path.append(theta)
    return torch.stack(path)


# ------------------------------------------------------------------------------------------------- the server's part


@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.3", "cyclic:2"])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_the_server_post_processes_aggregates(records, unit, participation):
    """Whoever came, record or client level: one rule on one vector a round, silent where nobody came."""
    options = {"rho": 0.3, "beta": 0.8, "bias_correction": True}
    plan = plan_for("dp-fedsofim", records, 8, unit=unit, participation=participation, lr=0.4, **options)
    rounds_done = run(plan, records)
    want = replayed(rounds_done, 0.4, **options)
    torch.testing.assert_close(
        torch.stack([this_round.model for this_round in rounds_done]), want, rtol=1e-10, atol=1e-12
    )
    assert not torch.allclose(want, replayed(rounds_done, 0.4, **{**options, "rho": 0.4}))
    if participation == "poisson:0.3":
        assert any(not len(this_round.cohort) for this_round in rounds_done)


@pytest.mark.parametrize("participation", ["full", "fixed:2"])
@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_it_costs_what_gradient_descent_costs(records, unit, trust, participation):
    """And says the same in the first round."""
    kwargs = {"unit": unit, "trust": trust, "participation": participation, "clip": 0.5}
    ours, gd = (plan_for(name, records, **kwargs) for name in ("dp-fedsofim", "dp-fedgd"))
    assert ours.proved
    assert spending.groups(ours) == spending.groups(gd)
    assert torch.equal(run(ours, records)[0].aggregate, run(gd, records)[0].aggregate)


def test_a_user_sends_its_clipped_mean_gradient(records):
    """Without noise, by hand; every client weighs the same."""
    plan = plan_for("dp-fedsofim", records, unit=Unit.CLIENT, epsilon=math.inf, clip=0.2)
    said = []
    for i in range(4):
        g = MODEL.clipped_sum(torch.zeros(MODEL.size, dtype=torch.float64), records.shard(i), math.inf) / SIZES[i]
        said.append(g * (0.2 * (1 - SAFETY) / g.norm()).clamp_max(1))
    assert max(float(g.norm()) for g in said) == pytest.approx(0.2, rel=1e-4)
    torch.testing.assert_close(run(plan, records)[0].aggregate, torch.stack(said).mean(0), rtol=1e-5, atol=1e-9)
    user = plan_for("dp-fedsofim", records, unit=Unit.CLIENT, clip=0.2)
    (group,) = spending.groups(user)
    assert [(r.sensitivity, r.times) for r in group.releases] == [(0.4, 6)]


def test_a_cohort_is_divided_by_its_expected_size(records):
    """Without noise: a fixed cohort of two of four clients weighs twice; the mean over cohorts is the full gradient."""
    full = run(plan_for("dp-fedsofim", records, 1, epsilon=math.inf), records)[0].aggregate
    half = [
        run(plan_for("dp-fedsofim", records, 2, epsilon=math.inf, participation="cyclic:2", lr=1e-12), records)[t]
        for t in range(2)
    ]
    torch.testing.assert_close((half[0].aggregate + half[1].aggregate) / 2, full, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(half[0].aggregate, full)


# ------------------------------------------------------------------------------------------------------ local steps


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_one_local_step_is_the_plain_method(records, unit):
    """For any local_lr: (theta - y) / local_lr is the gradient; FedAvg's own update says so too."""
    plain = models(plan_for("dp-fedsofim", records, unit=unit, lr=0.4), records)
    for local_lr in (0.1, 7.0):
        one = models(plan_for("dp-fedsofim", records, unit=unit, lr=0.4, steps=1, local_lr=local_lr), records)
        assert torch.equal(one, plain)
    if unit is Unit.RECORD:
        several, avg = (
            run(plan_for("dp-fedsofim", records, lr=0.4, steps=3, local_lr=0.2), records)[0],
            run(plan_for("dp-fedavg", records, steps=3, local_lr=0.2), records)[0],
        )
        torch.testing.assert_close(several.aggregate, -avg.aggregate / (3 * 0.2), rtol=1e-10, atol=1e-12)
        assert not torch.allclose(several.aggregate, run(plan_for("dp-fedsofim", records), records)[0].aggregate)


@pytest.mark.parametrize("participation", ["full", "fixed:2"])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_local_steps_without_a_preconditioner_are_federated_averaging(records, unit, participation):
    """rho so large that H = I / rho: theta moves by lr / (rho K local_lr) of FedAvg's update, noise and all.

    A user's clip and noise are on the message: FedAvg's is K local_lr times longer and of the other sign, so that no
    draw is the same; there, without noise.
    """
    K, local_lr, rho = 3, 0.2, 1e9
    kwargs = {"unit": unit, "participation": participation, "epsilon": math.inf if unit is Unit.CLIENT else 8.0}
    clips = (0.1, 0.1 * K * local_lr) if unit is Unit.CLIENT else (0.5, 0.5)
    ours = plan_for("dp-fedsofim", records, steps=K, local_lr=local_lr, rho=rho, lr=0.3 * rho, clip=clips[0], **kwargs)
    avg = plan_for("dp-fedavg", records, steps=K, local_lr=local_lr, lr=0.3 / (K * local_lr), clip=clips[1], **kwargs)
    torch.testing.assert_close(models(ours, records), models(avg, records), rtol=1e-6, atol=1e-7)
    near = plan_for("dp-fedsofim", records, steps=K, local_lr=local_lr, rho=0.01, lr=0.003, clip=clips[0], **kwargs)
    assert not torch.allclose(models(near, records), models(avg, records), rtol=1e-3, atol=1e-5)


def test_local_steps_are_paid_for(records):
    for steps in (1, 4):
        (group,) = spending.groups(plan_for("dp-fedsofim", records, steps=steps))
        assert [release.times for release in group.releases] == [6 * steps]
        (client,) = spending.groups(plan_for("dp-fedsofim", records, unit=Unit.CLIENT, steps=steps))
        assert [release.times for release in client.releases] == [6], "a client pays for messages"
        assert spending.epsilon(plan_for("dp-fedsofim", records, steps=steps)) == pytest.approx(8.0, rel=1e-9)


def test_the_mean_local_gradient_is_preconditioned(records):
    options = {"rho": 0.3, "beta": 0.8}
    rounds_done = run(plan_for("dp-fedsofim", records, steps=3, local_lr=0.2, lr=0.4, **options), records)
    path = torch.stack([this_round.model for this_round in rounds_done])
    torch.testing.assert_close(path, replayed(rounds_done, 0.4, **options), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------- structures and engines


PLANS = ([Unit.RECORD, Unit.CLIENT], [1, 3], list(STRUCTURES), ["full", "fixed:2"])


@pytest.mark.parametrize(
    ("unit", "steps", "structure", "participation"), tiers(itertools.product(*PLANS), covering(*PLANS))
)
def test_engines_agree(records, unit, steps, structure, participation):
    options = {"structure": structure, "rank": 3, "steps": steps, "local_lr": 0.2, "rho": 0.3, "lr": 0.3}
    plan = plan_for("dp-fedsofim", records, unit=unit, participation=participation, **options)
    slow = torch.stack([this_round.model for this_round in reference.run(plan, MODEL, records, Seeded(3))])
    torch.testing.assert_close(models(plan, records), slow, rtol=1e-9, atol=1e-9)
    rounds_done = run(plan, records)
    want = replayed(rounds_done, 0.3, rho=0.3, structure=structure, rank=3)
    torch.testing.assert_close(models(plan, records), want, rtol=1e-9, atol=1e-9)


def test_structures_do_different_things(records):
    ends = [models(plan_for("dp-fedsofim", records, structure=s, rho=0.1), records)[-1] for s in STRUCTURES]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(ends[i], ends[j], rtol=1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_runs_are_an_axis_and_a_run_resumes(records, structure):
    plan = plan_for("dp-fedsofim", records, structure=structure, steps=2, local_lr=0.2)
    theta = torch.zeros(2, MODEL.size, dtype=torch.float64)
    *_, last = simulate.run(plan, MODEL, records, [Seeded(s) for s in range(2)], theta=theta, shares=True)
    for r in range(2):
        torch.testing.assert_close(last.model[r], run(plan, records, seed=r)[-1].model, rtol=1e-9, atol=1e-9)
    whole = run(plan, records)
    for t in (0, 3):
        rest = run(plan, records, start=t + 1, checkpoint=whole[t].checkpoint)
        assert torch.equal(rest[-1].model, whole[-1].model)


def test_a_run_in_float32_stays_in_float32(records):
    single = Records(records.x.float(), records.y, records.starts)
    for structure in STRUCTURES:
        plan = plan_for("dp-fedsofim", records, structure=structure)
        path = models(plan, single)
        assert path.dtype is torch.float32
        torch.testing.assert_close(path.double(), models(plan, records), rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
def test_what_is_not_proved_is_refused(records, trust):
    with pytest.raises(SordinoError, match="nothing is proved about sums of messages"):
        plan_for("dp-fedsofim", records, trust=trust, steps=2)
    for unit, steps in ((Unit.RECORD, 1), (Unit.CLIENT, 3)):
        assert plan_for("dp-fedsofim", records, trust=trust, unit=unit, steps=steps).proved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: 0 must be at least 1"),
        ({"structure": "kroneker"}, r"structure: 'kroneker' is unknown\. Did you mean 'kronecker'\?"),
        ({"rank": 0, "structure": "rank-k"}, "rank: 0 must be at least 1"),
        ({"rho": 0.0}, "rho: 0.0 must be above 0"),
        ({"beta": 1.0}, "beta: 1.0 must lie in"),
        ({"local_lr": 0.0, "steps": 2}, "local_lr: 0.0 must be"),
        ({"local_lr": -1.0, "steps": 2}, "local_lr: -1.0 must be"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-fedsofim", **options)
