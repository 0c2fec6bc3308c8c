"""Local-step methods: the identities that tie them to their relatives, what they pay, and what is refused."""

import numpy as np
import pytest
import torch

from sordino.core import Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from tests.support import plan_for

MODEL = Linear(3, 3)


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    owner = rng.choice(4, 80, p=[0.1, 0.2, 0.3, 0.4])
    owner[:4] = range(4)
    return Records.of(rng.normal(size=(80, 3)), rng.integers(0, 3, 80), owner, dtype=torch.float64)


def models(plan, records, model=MODEL, seed=3):
    return [this_round.model for this_round in simulate.run(plan, model, records, Seeded(seed), shares=True)]


def same(a, b, tolerance=1e-12):
    return all(float((x - y).abs().max()) < tolerance for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("participation", ["full", "fixed:2"])
def test_one_local_step_is_gradient_descent(records, participation):
    gd = models(plan_for("dp-fedgd", records, participation=participation, lr=0.6), records)
    avg = models(plan_for("dp-fedavg", records, participation=participation, lr=2.0, local_lr=0.3), records)
    assert same(gd, avg)
    assert not same(
        gd, models(plan_for("dp-fedavg", records, participation=participation, lr=2.0, local_lr=0.31), records)
    )


def test_no_smoothing_is_federated_averaging_at_the_same_price(records):
    avg, plain, smoothed = (
        plan_for("dp-fedavg", records, steps=2, local_lr=0.3),
        plan_for("dp-fedavg-ls", records, steps=2, local_lr=0.3, strength=0.0),
        plan_for("dp-fedavg-ls", records, steps=2, local_lr=0.3),
    )
    assert same(models(avg, records), models(plain, records), 1e-9)
    assert not same(models(avg, records), models(smoothed, records), 1e-9)
    assert spending.groups(avg) == spending.groups(smoothed)


@pytest.mark.parametrize("mu", [0.01, 5.0])
def test_one_step_feels_no_pull(records, mu):
    avg = models(plan_for("dp-fedavg", records, local_lr=0.5), records)
    assert same(avg, models(plan_for("dp-adafedprox", records, local_lr=0.5, mu=mu), records))
    several = [plan_for(name, records, local_lr=0.5, steps=3) for name in ("dp-fedavg", "dp-adafedprox")]
    assert not same(*(models(plan, records) for plan in several)), "with three steps it does"


def test_one_corrected_step_is_gradient_descent_when_everyone_comes(records):
    """The controls add up to nothing in the mean: S000's own tables claim otherwise, the algebra does not."""
    gd = models(plan_for("dp-fedgd", records, lr=0.5), records)
    assert same(gd, models(plan_for("dp-scaffold", records, local_lr=0.5), records))
    assert not same(gd, models(plan_for("dp-scaffold", records, local_lr=0.5, participation="fixed:2"), records))


def test_without_controls_it_is_federated_averaging(records):
    """In the first round all controls are zero."""
    avg = models(plan_for("dp-fedavg", records, rounds=1, steps=4, local_lr=0.3), records)
    assert same(avg, models(plan_for("dp-scaffold", records, rounds=1, steps=4, local_lr=0.3), records))


def test_controls_are_the_mean_of_the_noised_local_gradients(records):
    """c_i after a round is zeta / (K lr), the mean of K noised gradients; the server's c is their weighted mean."""
    plan = plan_for("dp-scaffold", records, rounds=3, steps=2, local_lr=0.3)
    for this_round in reference.run(plan, MODEL, records, Seeded(1)):
        c, memory = this_round.checkpoint.state.control, this_round.checkpoint.memory
        mean = sum(w * c_i for w, c_i in zip(plan.weights, memory, strict=True))
        torch.testing.assert_close(c, mean, rtol=1e-10, atol=1e-12)


def test_drift_is_corrected():
    """Least squares, no noise: SCAFFOLD's fixed point is the true minimiser, FedAvg's is not."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 2)) * np.repeat([[3.0, 0.3], [0.3, 1.0], [1.0, 2.0]], 20, axis=0)
    y = x @ [1.0, -2.0] + np.repeat([5.0, -5.0, 0.0], 20) + rng.normal(size=60)
    data = Records.of(x, y, np.repeat(np.arange(3), 20), dtype=torch.float64)
    model = Linear(2, 1, Loss.SQUARES, bias=False)
    best = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0])
    ends = {}
    for name in ("dp-fedavg", "dp-scaffold"):
        plan = plan_for(name, data, rounds=400, epsilon=float("inf"), steps=5, local_lr=0.03, clip=1e9)
        ends[name] = float((models(plan, data, model)[-1] - best).norm())
    assert ends["dp-scaffold"] < 1e-6
    assert ends["dp-fedavg"] > 1e-2


@pytest.mark.parametrize(
    ("name", "options", "releases"),
    [
        ("dp-fedavg", {"steps": 5}, [30]),
        ("dp-fedavg", {"steps": 5, "noise_at": "final"}, [6]),
        ("dp-adafedprox", {"steps": 3}, [18]),
        ("dp-scaffold", {"steps": 2}, [12]),
        ("dp-scaffold", {"steps": 2, "warm_start": True}, [1, 10]),
    ],
)
def test_every_noised_gradient_is_paid_for(records, name, options, releases):
    plan = plan_for(name, records, **options)
    (group,) = spending.groups(plan)
    assert [release.times for release in group.releases] == releases
    assert spending.epsilon(plan) == pytest.approx(8.0, rel=1e-9)
    (client,) = spending.groups(plan_for(name, records, unit=Unit.CLIENT, **options))
    assert sum(release.times for release in client.releases) == 6, "a client pays for messages"


def test_a_warm_start_that_is_not_paid_for_would_show(records):
    cold, warm = (plan_for("dp-scaffold", records, rounds=6, steps=1, warm_start=w) for w in (False, True))
    assert len(calibration.query_noises(warm)) == len(calibration.query_noises(cold)) + 1
    first = next(simulate.run(warm, MODEL, records, Seeded(0)))
    assert torch.equal(first.model, torch.zeros(12, dtype=torch.float64)), "it moves the controls, not the model"


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
def test_what_is_not_proved_is_refused(records, trust):
    for name, options in (("dp-fedavg", {"steps": 2}), ("dp-adafedprox", {"steps": 2}), ("dp-scaffold", {})):
        with pytest.raises(SordinoError, match="is not proved"):
            plan_for(name, records, trust=trust, **options)
    for options in ({"steps": 1}, {"steps": 4, "noise_at": "final"}):
        assert plan_for("dp-fedavg", records, trust=trust, **options).proved


def test_the_pull_follows_from_what_was_released(records):
    """Recomputed by hand from the noised aggregates alone."""
    plan = plan_for("dp-adafedprox", records, rounds=8, steps=2, mu=0.5)
    pull, last = 0.5, None
    for this_round in simulate.run(plan, MODEL, records, Seeded(2)):
        if last is not None:
            pull *= 1.1 if float(this_round.aggregate @ last) < 0 else 0.9
        else:
            pull *= 0.9
        pull, last = min(max(pull, 0.05), 5.0), this_round.aggregate
        assert float(this_round.checkpoint.state.pull) == pytest.approx(pull)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps: 0"), ({"noise_at": "last"}, "noise_at: 'last' is unknown"), ({"clip": 0.0}, "clip: 0.0")],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-fedavg", **options)
