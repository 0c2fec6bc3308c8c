"""DP-AdaDPS: what the public scale does, what it is where there is none, and that it must be declared public."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Shard, Unit
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.adadps import Public
from sordino.models.linear import Linear
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Seeded
from tests import support

MODEL = Linear(3, 3)
SIZES = (5, 15, 20, 40)


@pytest.fixture(scope="module")
def records():
    return support.classified(SIZES, scale=[0.1, 1.0, 10.0])


plan_for = partial(support.plan_for, rounds=5)


def path(method, records, model=MODEL, **plan):
    rounds = simulate.run(plan_for(method, records, **plan), model, records, Seeded(3), shares=True)
    return torch.stack([this_round.model for this_round in rounds])


def by(a):
    """Options for which A is `a`, and 1 for the bias."""
    return {"public": Public.statistics({"second_moment": np.asarray(a) ** 2}), "eps": 1e-12}


# --------------------------------------------------------------------------------------------------------- its scale


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_a_scale_of_one_is_federated_averaging(unit, records):
    options = {"steps": 3, "local_lr": 0.5}
    avg = path(build("dp-fedavg", unit, **options), records)
    assert torch.equal(path(build("dp-adadps", unit, **options), records), avg), "no side information"
    ones = path(build("dp-adadps", unit, **by(np.ones(3)), **options), records)
    torch.testing.assert_close(ones, avg, rtol=0, atol=1e-9)
    other = path(build("dp-adadps", unit, **by([1.0, 1.0, 2.0]), **options), records)
    assert not torch.allclose(other, avg, rtol=0, atol=1e-6)


def test_the_price_is_that_of_federated_averaging(records):
    sided, avg = (build(name, steps=3, **o) for name, o in (("dp-adadps", by([1, 2, 3])), ("dp-fedavg", {})))
    assert spending.groups(plan_for(sided, records)) == spending.groups(plan_for(avg, records))
    assert sided.proves == avg.proves


def test_gradients_are_divided_before_the_clip_and_not_multiplied_back():
    """One record, no noise: what is sent has the clip for its norm, whatever the scale, and the direction of g / A."""
    x = torch.tensor([[1.0, -2.0, 4.0]], dtype=torch.float64)
    data = Records.of(x, torch.tensor([1]), np.zeros(1, int), dtype=torch.float64)
    scale = torch.tensor([0.2, 1.0, 5.0, 1.0], dtype=torch.float64)  # the last is the bias
    method = build("dp-adadps", **by(scale[:3].numpy()), clip=0.3, local_lr=1.0)
    (sent,) = path(method, data, rounds=1, epsilon=math.inf)
    g = MODEL.clipped_sum(torch.zeros(12, dtype=torch.float64), data.shard(0), math.inf).view(4, 3)
    divided = (g / scale[:, None]).flatten()
    torch.testing.assert_close(sent, -0.3 * (1 - SAFETY) * divided / divided.norm())
    late = 0.3 * g / g.norm() / scale[:, None]
    assert late.norm() > 0.31, "divided after the clip, a record would exceed it"


class Quadratic:
    """h / 2 (theta - x)^2 in every coordinate; a record is its minimiser. Notes the longest gradient asked of it."""

    def __init__(self, h):
        self.h, self.size, self.shapes, self.longest = torch.from_numpy(h), len(h), ((len(h), 1),), 0.0

    def init(self, generator=None):
        return torch.zeros(self.size, dtype=torch.float64)

    def clipped_sum(self, theta, shard, clip, scale=None):
        g = self.h * (theta.unsqueeze(-2) - shard.x)
        g = g if scale is None else g * scale.unsqueeze(-2)
        norm = g.norm(dim=-1, keepdim=True)
        self.longest = max(self.longest, float(norm.max()))
        return (g * (clip / norm.clamp_min(clip)) * shard.mask.unsqueeze(-1)).sum(-2)


H = np.array([1.0, 0.1, 0.01, 0.001])
ROUNDS, CLIP, RECORDS, RUNS = 60, 2.0, 200, 400


def loss_of(a, rate, noise, start=1.0):
    """Expected loss after ROUNDS steps e <- e - rate (a e + noise z), from e = start."""
    keep = (1 - rate * a) ** (2 * ROUNDS)
    return float((H * (keep * start**2 + (rate * noise) ** 2 * (1 - keep) / (1 - (1 - rate * a) ** 2))).sum() / 2)


def losses(rate, **options):
    data = Records.of(np.ones((RECORDS, 4)), np.zeros(RECORDS), np.zeros(RECORDS, int), dtype=torch.float64)
    model, method = Quadratic(H), build("dp-adadps", clip=CLIP, local_lr=rate, **options)
    plan = plan_for(method, data, rounds=ROUNDS, noise=1.0)
    theta = torch.zeros(RUNS, 4, dtype=torch.float64)
    *_, last = simulate.run(plan, model, data, [Seeded(s) for s in range(RUNS)], theta=theta)
    assert model.longest < CLIP, "the closed form has no clip"
    loss = (torch.from_numpy(H) * (last.model - 1) ** 2).sum(-1).numpy() / 2
    return loss.mean(), loss.std() / math.sqrt(RUNS), spending.groups(plan)[0].mu


@pytest.mark.soak
def test_a_badly_conditioned_quadratic():
    """Condition 1000, A the root of the curvature: the loss is the closed form's within four standard errors, mostly
    noise, and far below what dp-fedavg reaches at the same mu with any step."""
    noise = 1.0 * CLIP / RECORDS
    mean, error, mu = losses(1.0, **by(np.sqrt(H)))
    assert abs(mean - loss_of(np.sqrt(H), 1.0, noise)) < 4 * error
    assert loss_of(np.sqrt(H), 1.0, noise) > 3 * loss_of(np.sqrt(H), 1.0, 0.0), "noise is most of it"
    for mutant in (
        loss_of(np.sqrt(H), 1.0, noise / np.sqrt(H)),  # the noise divided, too
        loss_of(np.sqrt(H), 1.0, noise * np.sqrt(2)),
        loss_of(H, 1.0, noise * np.sqrt(H)),  # multiplied back
        loss_of(np.ones(4), 1.0, noise),  # divided by the curvature itself
    ):
        assert abs(mean - mutant) > 4 * error
    plain, plain_error, plain_mu = losses(1.9)
    assert mu == plain_mu
    assert abs(plain - loss_of(H, 1.9, noise)) < 4 * plain_error
    best = min(loss_of(H, rate, noise) for rate in np.linspace(0.05, 1.95, 39))
    assert mean + 4 * error < best / 2


def test_gradients_of_public_records_are_averaged(records):
    """v begins with the squared mean gradient at the start and goes on by the models that were broadcast."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(9, 3)), rng.integers(0, 3, 9)
    method = build("dp-adadps", public=Public.records(MODEL, x, y), beta=0.7, eps=0.2)

    def squares(theta):
        return (sum(MODEL.clipped_sum(theta, Shard(*each), 1e9) for each in rows) / 9) ** 2

    rows = [(torch.from_numpy(x[[i]]), torch.from_numpy(y[[i]]), torch.ones(1).double()) for i in range(9)]
    v = squares(torch.zeros(12, dtype=torch.float64))
    for this_round in simulate.run(plan_for(method, records), MODEL, records, Seeded(0)):
        v = 0.7 * v + 0.3 * squares(this_round.model)
        torch.testing.assert_close(this_round.checkpoint.state[1], v)
    said = method.stages[0].rule.broadcast(this_round.checkpoint.state)
    torch.testing.assert_close(said, v.sqrt() + 0.2)


def test_runs_side_by_side_have_their_own_scale(records):
    rng = np.random.default_rng(5)
    public = Public.records(MODEL, rng.normal(size=(9, 3)), rng.integers(0, 3, 9))
    for side in ({"public": public}, by([1.0, 2.0, 3.0])):
        plan = plan_for(build("dp-adadps", steps=2, **side), records)
        theta = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        *_, many = simulate.run(plan, MODEL, records, [Seeded(0), Seeded(1)], theta=theta)
        *_, one = simulate.run(plan, MODEL, records, Seeded(1), theta=theta[1])
        torch.testing.assert_close(many.model[1], one.model)


# ----------------------------------------------------------------------------------------------------- declared public


def test_private_data_are_no_side_information(records):
    for private in (records, records.shard(0), records.x, records.x.numpy(), {"mean": 1}, None):
        with pytest.raises(SordinoError, match=r"is not declared public; .*Public\.statistics.*Public\.records"):
            build("dp-adadps", public=private)
    with pytest.raises(SordinoError, match="clients' records are private"):
        Public.records(MODEL, records, records.y)
    with pytest.raises(SordinoError, match="clients' records are private"):
        Public.records(MODEL, records.shard(0), records.shard(0))
    for bare in (records, records.shard(0), records.x, records.x.numpy()):
        with pytest.raises(SordinoError, match=r"public: no statistics .*; give an \.npz or a dict"):
            Public.statistics(bare)


def test_statistics_of_three_kinds_say_the_same(tmp_path, records):
    rng = np.random.default_rng(2)
    mean, root = rng.normal(size=3), rng.normal(size=(3, 3))
    cov = root @ root.T
    forms = [
        {"mean": mean, "cov": cov, "n": np.array(100)},
        {"mean": mean, "std": np.sqrt(np.diag(cov))},
        {"second_moment": mean**2 + np.diag(cov)},
    ]
    paths = []
    for k, form in enumerate(forms):
        np.savez(tmp_path / f"{k}.npz", **form)
        paths += [path(build("dp-adadps", public=str(tmp_path / f"{k}.npz")), records)]
        paths += [path(build("dp-adadps", public=Public.statistics(form)), records)]
    for other in paths[1:]:
        torch.testing.assert_close(other, paths[0])
    assert not torch.allclose(
        path(build("dp-adadps", public=Public.statistics({"mean": mean, "cov": 4 * cov})), records), paths[0]
    )


def test_a_feature_s_scale_is_that_of_all_its_weights():
    theta, moments = torch.zeros(2, 6, dtype=torch.float64), Public.statistics({"second_moment": [4.0, 9.0]})
    assert moments.squares(theta, ((3, 2),)).tolist() == [[4, 4, 9, 9, 1, 1]] * 2, "and 1 for the bias"
    assert moments.squares(theta[:, :4], ((2, 2),)).tolist() == [[4, 4, 9, 9]] * 2


@pytest.mark.parametrize("shapes", [((4, 2),), ((1, 2),), ((3, 2), (2,)), ((6,),)])
def test_statistics_must_fit_the_model(shapes):
    with pytest.raises(SordinoError, match=r"public: 2 features do not fit this model; use Public\.records"):
        Public.statistics({"second_moment": [4.0, 9.0]}).squares(torch.zeros(6), shapes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"second_moment": [1.0, math.nan]}, "finite numbers"),
        ({"second_moment": [1.0, -1.0]}, "0 or more"),
        ({"second_moment": [[1.0]]}, "a vector"),
        ({"mean": [1.0]}, "no statistics"),
        ({}, "no statistics"),
    ],
)
def test_bad_statistics_are_named(given, message):
    with pytest.raises(SordinoError, match=message):
        Public.statistics(given)


def test_bad_files_and_options_are_named(tmp_path):
    (tmp_path / "not.npz").write_text("nothing")
    np.save(tmp_path / "one.npy", np.ones(3))
    for file in ("missing.npz", "not.npz", "one.npy"):
        with pytest.raises(SordinoError, match="public: no statistics"):
            build("dp-adadps", public=str(tmp_path / file))
    with pytest.raises(SordinoError, match="eps: 0"):
        build("dp-adadps", eps=0.0)
    with pytest.raises(SordinoError, match="beta: 1"):
        build("dp-adadps", beta=1.0)
