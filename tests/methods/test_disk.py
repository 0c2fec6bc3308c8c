"""DP-DiSK, and blends: two gradients of a record in one clipped term."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from sordino import checks
from sordino.checks import report
from sordino.checks.mutants import breaks, clips_each_gradient, concerns, noticed_stages
from sordino.checks.suites import small_adapters
from sordino.core import Adjacency, Blend, Local, Privacy, Shard, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.adapters import with_adapters
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.torch_model import TorchModel
from sordino.privacy.mechanisms.random import source
from sordino.privacy.plan import Plan

CLIP, WEIGHTS = 0.7, (-1.5, 2.5)
SQUARES = Linear(3, 1, Loss.SQUARES, bias=False)


def network(mode="auto"):
    torch.manual_seed(0)
    return TorchModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), mode=mode, check=False)


MODELS = {
    "softmax": Linear(4, 3),
    "no bias": Linear(4, 3, bias=False),
    "weighted": Linear(4, 3, class_weights=torch.tensor([1.0, 2.0, 0.5])),
    **{mode: network(mode) for mode in ("vmap", "tape", "two-pass")},
}


def records(count=12, size=1.0, per_person=1):
    rng = torch.Generator().manual_seed(1)
    x = size * torch.randn(count, 4, generator=rng)
    mask = torch.ones(count)
    mask[per_person : 2 * per_person] = 0
    return Shard(x, torch.randint(3, (count,), generator=rng), mask, None, per_person)


def points(model):
    rng = torch.Generator().manual_seed(2)
    return torch.randn(2, model.size, generator=rng)


def expected(model, shard):
    """One gradient by autograd per record and point, added, clipped and summed, in plain words."""
    weights = getattr(model, "relative_weights", None)
    loss = model.loss if weights is None else Linear(4, 3).loss
    first, second = points(model)
    total, each = torch.zeros(model.size, dtype=torch.float64), shard.per_person
    for person in range(len(shard.x) // each):
        term, most = torch.zeros(model.size, dtype=torch.float64), 1.0
        for k in range(person * each, (person + 1) * each):
            if not shard.mask[k]:
                continue
            for theta, weight in zip((first, second), WEIGHTS, strict=True):
                theta = theta.double().requires_grad_()
                own = loss(theta, shard.x[k].double(), shard.y[k])
                term += weight * torch.autograd.grad(own, theta)[0]
            most = 1.0 if weights is None else float(weights[shard.y[k]])
        total += most * term * min(1.0, CLIP / float(term.norm().clamp_min(1e-30)))
    return total


@pytest.mark.parametrize("name", list(MODELS))
def test_a_blend_is_clipped_as_one_vector(name):
    model, shard = MODELS[name], records()
    first, second = points(model)
    found = model.clipped_sum(first, shard, CLIP, blend=Blend(second, WEIGHTS))
    torch.testing.assert_close(found, expected(model, shard), rtol=2e-4, atol=2e-4)
    same = model.clipped_sum(first, shard, CLIP, blend=Blend(first, WEIGHTS))
    torch.testing.assert_close(same, model.clipped_sum(first, shard, CLIP), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "tape", "vmap"])
def test_a_person_has_one_term(name):
    model, shard = MODELS[name], records(per_person=2)
    first, second = points(model)
    found = model.clipped_sum(first, shard, CLIP, blend=Blend(second, WEIGHTS))
    torch.testing.assert_close(found, expected(model, shard), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", list(MODELS))
def test_several_clients_and_thetas_at_once(name):
    model, shard = MODELS[name], records()
    two = Shard(*(torch.stack([part, part.flip(0)]) for part in shard[:3]))
    thetas = points(model)
    found = model.clipped_sum(thetas, two, CLIP, blend=Blend(thetas.flip(0), WEIGHTS))
    for k in range(2):
        alone = Shard(*(part[k] for part in two[:3]))
        want = model.clipped_sum(thetas[k], alone, CLIP, blend=Blend(thetas[1 - k], WEIGHTS))
        torch.testing.assert_close(found[k], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_no_record_exceeds_the_clip_and_one_that_is_not_finite_counts_as_nothing(name):
    model = MODELS[name]
    first, second = points(model)
    for size in (1.0, 1e6, 1e30, math.inf):
        shard = records(1, 1.0 if math.isinf(size) else size)
        shard = shard._replace(x=shard.x * size)
        for there in (second, 1e20 * second, math.inf * second):
            moved = model.clipped_sum(first, shard, CLIP, blend=Blend(there, WEIGHTS)).norm()
            assert moved <= CLIP
            assert not (math.isinf(size) and moved)


@pytest.mark.parametrize("name", ["softmax", "tape", "vmap"])
def test_a_masked_record_does_not_change_how_the_others_are_computed(name):
    model, shard, clip = MODELS[name], records(), 1e-9
    first, second = points(model)

    def total(value):
        x = shard.x.clone()
        x[1] = value
        return model.clipped_sum(first, shard._replace(x=x), clip, blend=Blend(second, WEIGHTS))

    for value in (-1e3, 1e30, math.inf, math.nan):
        assert (total(value) - total(0.0)).norm() <= 1e-3 * clip


def test_the_search_finds_no_more_than_is_claimed_and_rejects_gradients_clipped_one_by_one():
    """With kappa = 0.3 one of the weights is negative."""
    model, search = SQUARES, partial(checks.sensitivity, trials=2)
    for kappa in (0.3, 0.7):
        method = build("dp-disk", kappa=kappa)
        assert not any(found.beyond for found in search(method, model, Adjacency.ADD_REMOVE))
    assert all(found.beyond for found in search(*clips_each_gradient(method, model), Adjacency.ADD_REMOVE))


def test_sordino_check_tries_that_mutant_where_terms_are_clipped():
    assert [name for name in ("dp-disk", "dp-fedgd", "dp-fedadam") if noticed_stages(build(name), SQUARES).blended] == [
        "dp-disk"
    ]
    assert not breaks(clips_each_gradient, build("dp-disk", Unit.CLIENT)), "a message is clipped as a whole"
    assert not noticed_stages(build("dp-disk", kappa=1.0), Linear(3, 3)).blended, "one gradient, as in dp-fedgd"


def of_others():
    """A method of two stages from elsewhere, of which the second extrapolates gradients."""

    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta, None, None, None, Blend(1.1 * broadcast.theta + 0.1, (2.0, -1.0)))

    plain = build("dp-fedgd").stages[0]._replace(rounds=1)
    return build("dp-fedgd")._replace(name="extrapolated", stages=(plain, plain._replace(local=Local(compute))))


def test_a_blend_of_another_method_is_noticed_by_what_it_asks():
    blended = noticed_stages(of_others(), Linear(3, 3)).blended
    assert blended == {1}
    concerned = [
        query
        for query in ("0.0 gradient", "1.0 gradient", "1.1 fisher")
        if concerns(clips_each_gradient, query, blended)
    ]
    assert concerned == ["1.0 gradient"]


def test_a_check_of_another_method_tries_that_mutant(monkeypatch):
    tried, search = [], checks.sensitivity

    def watched(method, model, *args, **options):
        tried.append(options.get("rejects"))
        return search(method, model, *args, **options)

    monkeypatch.setattr(report, "sensitivity", watched)
    monkeypatch.setitem(checks.MUTANTS, "sensitivity", (clips_each_gradient,))
    reports = checks.check("extrapolated", method=of_others(), models=[SQUARES], trials=checks.LEAST_TRIALS)
    assert [report.problems for report in reports] == [[]] * 4
    assert tried.count([1]) == 2, "under both adjacencies, for the query of the second stage"


@pytest.mark.soak
@pytest.mark.parametrize("variant", ["alternating", "fedsvd"])
def test_a_part_of_adapters_is_blended_within_the_clip(variant):
    method = with_adapters(build("dp-disk"), variant, rounds=2)
    model = small_adapters(variant)
    assert not any(found.beyond for found in checks.sensitivity(method, model, Adjacency.ADD_REMOVE, trials=1))
    assert checks.engines(method, model) <= checks.TOLERANCE


def trained(method, model, engine=simulate, rounds=4):
    rng = torch.Generator().manual_seed(3)
    x, y = torch.randn(30, 4, generator=rng), torch.randint(3, (30,), generator=rng)
    data = Records.of(x.numpy(), y.numpy(), torch.arange(30).numpy() % 3, dtype=torch.float64)
    plan = Plan(method, rounds, data.sizes, Privacy(8.0))
    return [done.model for done in engine.run(plan, model, data, source(5))]


@pytest.mark.parametrize(("optimizer", "other"), [("sgd", "dp-fedgd"), ("adam", "dp-fedadam")])
def test_without_a_past_it_is_the_method_without_a_filter(optimizer, other):
    model = MODELS["softmax"]
    mine = trained(build("dp-disk", kappa=1.0, lr=0.5, optimizer=optimizer), model)
    torch.testing.assert_close(mine, trained(build(other, lr=0.5), model))
    mutant = trained(build("dp-disk", kappa=0.9, lr=0.5, optimizer=optimizer), model)
    assert not torch.allclose(mine[-1], mutant[-1])


@pytest.mark.parametrize("name", ["softmax", "tape"])
def test_both_engines_agree_and_follow_the_pseudocode(name):
    model, kappa, gamma, lr = MODELS[name], 0.6, 0.5, 0.3
    (stage,) = build("dp-disk", kappa=kappa, gamma=gamma, lr=lr).stages
    mine, theirs = trained(build("dp-disk"), model), trained(build("dp-disk"), model, reference)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    theta, filtered, step = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    state = stage.rule.init(theta, None, ())
    for t, g in enumerate(torch.tensor([[1.0, -2.0], [0.5, 1.0], [3.0, 0.0]])):
        torch.testing.assert_close(stage.rule.broadcast(state)[1], step)
        moved, state = stage.rule.update(g, state, theta, t)
        filtered = (1 - kappa) * filtered + kappa * g
        step = -lr * filtered
        torch.testing.assert_close(moved, step)


def test_options_and_models_that_are_not_served_are_refused():
    for options, match in (
        ({"kappa": 0.0}, "kappa: 0.0 must lie in"),
        ({"gamma": math.inf}, "gamma: inf must lie in"),
        ({"kappa": 1.5}, "kappa: 1.5 must lie in"),
        ({"gamma": 0.0}, "gamma: 0.0 must lie in"),
        ({"optimizer": "sofim"}, "optimizer"),
    ):
        with pytest.raises(SordinoError, match=match):
            build("dp-disk", **options)
    model = Hazards(4, (0.0, 1.0, 2.0))
    data = Records.of(torch.ones(4, 4).numpy(), torch.ones(4).numpy(), torch.zeros(4).int().numpy())
    with pytest.raises(SordinoError, match="asks for two gradients in one term"):
        list(simulate.run(Plan(build("dp-disk"), 2, data.sizes, Privacy(8.0)), model, data, source(0)))


def test_a_second_point_of_another_shape_is_refused():
    def compute(ask, broadcast, memory, cache):
        return ask.gradient(broadcast.theta, blend=Blend(broadcast.theta.expand(2, -1), WEIGHTS))

    method = build("dp-disk")
    stage = method.stages[0]._replace(local=Local(compute))
    with pytest.raises(SordinoError, match=r"blend: its theta has shape \(2, 15\), and must have \(15,\)"):
        trained(method._replace(stages=(stage,)), MODELS["softmax"], reference)


def test_half_precision_is_refused():
    model = TorchModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), autocast=torch.bfloat16)
    first, second = points(model)
    with pytest.raises(SordinoError, match="dtype: the sum of gradients at two points is computed in float32"):
        model.clipped_sum(first, records(), CLIP, blend=Blend(second, WEIGHTS))
