"""The recipes of one round: their formulas against numpy, their bounds, and what they refuse."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.methods import REGISTRY, build, entry
from sordino.models.linear import Linear, Loss
from sordino.models.nets import build as build_net
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

NAMES = ("dp-class-means", "dp-statistics")
UNITS = (Unit.RECORD, Unit.CLIENT)
FEATURES, CLASSES = 3, 4
SOFTMAX = Linear(FEATURES, CLASSES)
RADIUS = 10.0


@pytest.fixture(scope="module")
def records():
    return drawn(Loss.SOFTMAX)


def drawn(loss):
    """Records of norm RADIUS with labels of the loss, at four clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, FEATURES)) * (3.0, 1.0, 0.3)
    x *= RADIUS / np.linalg.norm(x, axis=1, keepdims=True)
    score = x @ rng.normal(size=(FEATURES, CLASSES)) + rng.normal(size=(60, CLASSES))
    y = {Loss.SOFTMAX: score.argmax(1), Loss.LOGISTIC: score[:, 0] > 0, Loss.SQUARES: score[:, 0]}[loss]
    return Records.of(x, y.astype(float if loss is Loss.SQUARES else int), np.repeat(range(4), 15), dtype=torch.float64)


def plan_for(name, records, unit=Unit.RECORD, epsilon=4.0, rounds=1, trust="untrusted-server", who="full", **options):
    privacy = Privacy(epsilon, unit=unit, trust=trust)
    return Plan(build(name, unit, **options), rounds, records.sizes, privacy, Participation.parse(who))


def trained(plan, records, model=SOFTMAX, source=None, engine=simulate, **more):
    (only,) = engine.run(plan, model, records, source or Seeded(1), **more)
    return only


def moments(records, loss=Loss.SOFTMAX, clip=math.inf):
    """The mean of u u^T, and of the gradients at zero, each cut to norm clip."""
    shards = [records.shard(i) for i in range(4)]
    x, y = (np.concatenate([getattr(s, key)[s.mask > 0].numpy() for s in shards]) for key in "xy")
    u = np.c_[x, np.ones(len(x))]
    if loss is Loss.SOFTMAX:
        residual = 1 / CLASSES - np.eye(CLASSES)[y.astype(int)]
    else:
        residual = (0.5 if loss is Loss.LOGISTIC else 0.0) - y.reshape(-1, 1)
    g = u[:, :, None] * residual[:, None]
    g *= np.minimum(1, clip / np.linalg.norm(g, axis=(1, 2)))[:, None, None]
    return u.T @ u / len(u), g.mean(0)


KINDS = [(Loss.SOFTMAX, CLASSES, 4), (Loss.LOGISTIC, 1, 4), (Loss.SQUARES, 1, 1)]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("loss", "outputs", "K"), KINDS)
def test_without_noise_they_are_numpy_s_formulas(loss, outputs, K, unit):
    records, model = drawn(loss), Linear(FEATURES, outputs, loss)
    clip, ridge = 1e3 if loss is Loss.SQUARES else 50.0, 0.3
    A, G = moments(records, loss)
    options = {"unit": unit, "epsilon": math.inf, "clip": clip}
    means = trained(plan_for("dp-class-means", records, scale=0.5, **options), records, model, Noiseless(1)).model
    assert means.numpy() == pytest.approx(-0.5 * K * G.ravel(), rel=1e-9)
    plan = plan_for("dp-statistics", records, radius=11.0, ridge=ridge, scale=2.0, **options)
    found = trained(plan, records, model, Noiseless(1)).model.numpy()
    assert found == pytest.approx(-2 * K * np.linalg.solve(A + ridge * np.eye(len(A)), G).ravel(), rel=1e-8)
    wrong = -2 * K * np.linalg.solve(A, G).ravel()  # a mutant without the ridge
    assert found != pytest.approx(wrong, rel=1e-3)


def test_statistics_of_a_quantity_are_ridge_regression():
    records = drawn(Loss.SQUARES)
    A, G = moments(records, Loss.SQUARES)
    plan = plan_for("dp-statistics", records, epsilon=math.inf, clip=1e3, radius=11.0, ridge=1e-9)
    found = trained(plan, records, Linear(FEATURES, 1, Loss.SQUARES), Noiseless(1)).model.numpy()
    assert found == pytest.approx(np.linalg.solve(A, -G).ravel(), rel=1e-6)


def test_gradients_longer_than_the_clip_are_cut(records):
    plan = plan_for("dp-class-means", records, epsilon=math.inf, clip=2.0)
    found = trained(plan, records, source=Noiseless(1)).model.numpy()
    assert found == pytest.approx(-CLASSES * moments(records, clip=2.0)[1].ravel(), rel=2.0**-13)
    assert found != pytest.approx(-CLASSES * moments(records)[1].ravel(), rel=0.1)


def test_the_model_follows_from_the_noised_answers(records):
    """Negative eigenvalues, which noise causes, count as 0."""
    round_done = trained(plan_for("dp-statistics", records, epsilon=0.5, ridge=2.0), records)
    G, A = (part.numpy() for part in round_done.aggregate)
    rows = FEATURES + 1
    A = A.reshape(rows, rows)
    values, V = np.linalg.eigh((A + A.T) / 2)
    assert values.min() < -1
    theta = -CLASSES * V @ np.diag(1 / (values.clip(0) + 2.0)) @ V.T @ G.reshape(rows, CLASSES)
    assert round_done.model.numpy() == pytest.approx(theta.ravel(), rel=1e-9)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("trust", list(Trust))
def test_the_budget_is_spent_once(records, unit, trust):
    for name, share in (("dp-class-means", 0.0), ("dp-statistics", 0.3)):
        options = {"share": share} if share else {}
        plan = plan_for(name, records, unit, trust=trust, **options)
        assert plan.proved
        assert plan.stage_rounds == (1,)
        assert spending.epsilon(plan) == pytest.approx(4.0, rel=1e-9)
        if share and unit is Unit.RECORD:
            gradient, gram = calibration.query_noises(plan)
            ratio = gram.std / gradient.std / (math.sqrt(2) * 101 / (2 * 5))
            assert ratio == pytest.approx(math.sqrt(0.7 / 0.3), rel=1e-9)


def test_a_client_s_message_has_norm_one_at_most(records):
    """Its parts in their units; with many outliers it is cut as a whole."""
    plan = plan_for("dp-statistics", records, Unit.CLIENT, epsilon=math.inf, radius=1.0, share=0.5)
    message = trained(plan, records, source=Noiseless(1)).aggregate
    assert message.norm() <= 1
    (query,) = (q for q in plan.stages[0].queries if q.noise is not None)
    assert query.sensitivity(Adjacency.REPLACE_ONE, Unit.CLIENT) == 2.0
    assert query.sensitivity(Adjacency.ADD_REMOVE, Unit.CLIENT) == 1.0


@pytest.mark.parametrize("who", ["full", "fixed:2"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_engines_agree(name, unit, who, records):
    plan = plan_for(name, records, unit, who=who)
    slow, fast = trained(plan, records, engine=reference), trained(plan, records, shares=True)
    torch.testing.assert_close(fast.model, slow.model, rtol=1e-9, atol=1e-12)
    other = trained(plan, records, source=Seeded(2), shares=True)
    assert not torch.allclose(other.model, slow.model)


@pytest.mark.parametrize("name", NAMES)
def test_more_rounds_are_refused(name, records):
    with pytest.raises(
        SordinoError, match=rf"^rounds: {name} needs 1 round and .* got 7; leave rounds out .* or set 1"
    ):
        plan_for(name, records, rounds=7).stage_rounds  # noqa: B018
    with pytest.raises(SordinoError, match=rf"^rounds: {name} needs 1 round"):
        resolve(Spec.of({"method": name, "rounds": 70})).plan((10, 10))
    known = entry(name)
    assert known.fixed
    assert known.rounds == sum(stage.rounds for stage in known.at(Unit.RECORD).stages)
    fixed = {each for each, other in REGISTRY.items() if None not in [s.rounds for s in other.at(Unit.RECORD).stages]}
    assert fixed == set(NAMES)


def test_calibration_takes_rounds_of_its_own():
    resolved = resolve(Spec.of({"method": "dp-statistics", "calibrate": 0.1}))
    assert resolved.rounds == 3
    assert resolved.plan((10, 10)).stage_rounds == (1, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dp-class-means", {"clip": 0.0}, "clip: 0.0 must be a finite number above 0"),
        ("dp-class-means", {"scale": -1.0}, "scale: -1.0 must be"),
        ("dp-statistics", {"radius": math.inf}, "radius: inf must be"),
        ("dp-statistics", {"ridge": 0.0}, "ridge: 0.0 must be"),
        ("dp-statistics", {"share": 1.0}, r"share: 1.0 must lie in \(0, 1\)"),
        ("dp-statistics", {"share": 0.0}, r"share: 0.0 must lie in \(0, 1\)"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(SordinoError, match=message):
        build(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_other_models_are_refused(name, records):
    with pytest.raises(SordinoError, match=r"model: these steps need a linear model|asks for a gram matrix"):
        trained(plan_for(name, records), records, build_net("mlp", FEATURES, CLASSES))
    with pytest.raises(SordinoError, match="method: a model of rates has no such step"):
        trained(plan_for(name, records), records, Linear(FEATURES, 1, Loss.POISSON))
    resolved = resolve(Spec.of({"method": name, "model": "squares"}))
    with pytest.raises(SordinoError, match=f"method: {name} derives its steps for classes, and these labels are numb"):
        resolved.build_model(FEATURES, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_a_seed_is_certified(name, records):
    plan = plan_for(name, records, trust="secure-aggregation")
    cert = certificate(plan, Secure(), version="0")
    assert cert["certified"]
    assert not certificate(plan, Seeded(1), version="0")["certified"]
