"""Variants of low-rank adapters: what is sent, clipped, noised and frozen; both engines; what ties them together."""

import pytest
import torch

from sordino import checks
from sordino.checks.mutants import refactors_by_records, sends_the_frozen_factor
from sordino.checks.search import TRIALS
from sordino.checks.suites import small_adapters
from sordino.core import Adjacency, Shard, Unit
from sordino.engines import reference, simulate
from sordino.engines.schedule import stage_facts
from sordino.engines.trace import sent_answers
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.methods.adapters import with_adapters
from sordino.models.lora import adapt
from sordino.models.torch_model import TorchModel
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Noiseless, Seeded
from sordino.rules.adapters import DOWN, UP, pieces, refactored, table, without
from tests import support

ROUNDS = 4


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.head = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.query(x)))


def network(variant="lora"):
    torch.manual_seed(0)
    return TorchModel(adapt(Net(), rank=2, dropout=0.0, variant=variant), shape=(3,))


MODEL = network()
DATA = support.classified((9, 5, 7))


def method_for(name, variant, rounds=ROUNDS, every=1, **options):
    return with_adapters(build(name, **options), variant, rounds, every)


def plan_of(name, variant, rounds=ROUNDS, every=1, options=None, **settings):
    return support.plan_for(method_for(name, variant, rounds, every, **(options or {})), DATA, rounds, **settings)


def tensors_of(plan):
    return pieces(table(stage_facts(plan, MODEL, 0)))


def trained(plan, model=MODEL, source=None, **how):
    return list(simulate.run(plan, model, DATA, source or Seeded(1), theta=model.init().double(), **how))


def product(theta, tensors):
    down, up = (next(p for p in tensors if p.factor == factor) for factor in (DOWN, UP))
    return up.of(theta) @ down.of(theta)


@pytest.mark.parametrize("batch", ["full", "poisson:4"])
@pytest.mark.parametrize("name", ["dp-fedadam", "dp-fedadamw"])
@pytest.mark.parametrize("variant", ["alternating", "fedsvd"])
def test_engines_agree(variant, name, batch):
    plan = plan_of(name, variant, batch=batch)
    theta = MODEL.init().double()
    slow = list(reference.run(plan, MODEL, DATA, Seeded(1), theta=theta))
    for a, b in zip(slow, trained(plan, shares=True), strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedadamw"])
def test_alternating_rounds_send_and_change_one_factor(name):
    plan = plan_of(name, "alternating", rounds=5, every=2, options={"quantile": 0.5} if name == "dp-fedgd" else {})
    assert plan.stage_rounds == (2, 2, 1)
    tensors, before = tensors_of(plan), MODEL.init().double()
    for result in trained(plan):
        frozen = UP if result.t in (2, 3) else DOWN
        part = without(tensors, frozen)
        sent = result.aggregate[0] if isinstance(result.aggregate, tuple) else result.aggregate
        assert len(sent) == len(part) < MODEL.size
        changed = (result.model != before).nonzero().flatten()
        assert torch.equal(changed, part)
        before = result.model


def test_the_clip_is_that_of_the_part():
    """Against the gradient of each record, by autograd. The clip of the whole gradient gives another sum."""
    plan = plan_of("dp-fedgd", "fedsvd", rounds=1, epsilon=float("inf"), options={"clip": 0.3, "lr": 1.0})
    part, theta = without(tensors_of(plan), DOWN), MODEL.init().double() + 0.3
    (result,) = simulate.run(plan, MODEL, DATA, Noiseless(0), theta=theta)
    each = torch.stack([torch.func.grad(MODEL.loss)(theta, x, y) for x, y in zip(DATA.x, DATA.y, strict=True)])
    right, wrong = (0.3 / norms.norm(dim=1, keepdim=True).clamp_min(0.3) for norms in (each[:, part], each))
    expected, other = ((factor * each[:, part]).mean(0) for factor in (right, wrong))
    torch.testing.assert_close(result.aggregate, expected, rtol=1e-4, atol=1e-8)  # the clip keeps a margin of 6e-5
    assert (result.aggregate - other).norm() > 0.01 * other.norm()


def test_the_account_is_that_of_the_method():
    for variant in ("alternating", "fedsvd"):
        plan = plan_of("dp-fedadam", variant, epsilon=2.0)
        assert spending.epsilon(plan) == pytest.approx(2.0, rel=1e-6)
        assert not plan.method.by_hand
        plain = support.plan_for("dp-fedadam", DATA, ROUNDS, epsilon=2.0)
        assert stage_facts(plan, MODEL, 0).aggregate_std == pytest.approx(stage_facts(plain, MODEL, 0).aggregate_std)


def test_with_gradient_steps_fedsvd_is_freeze_a_with_an_orthonormal_start():
    """The steps of B A are G A^T A, and A^T A does not change while A keeps its row space and is orthonormal."""
    plan = plan_of("dp-fedgd", "fedsvd", epsilon=float("inf"), options={"clip": 1e3, "lr": 0.3})
    tensors = tensors_of(plan)
    start = refactored(MODEL.init().double(), tensors)
    *_, ours = simulate.run(plan, MODEL, DATA, Noiseless(0), theta=start)
    frozen = network("freeze-a")
    with torch.no_grad():
        next(p for name, p in frozen.module.named_parameters() if name.endswith("lora_A")).copy_(tensors[0].of(start))
    settled = TorchModel(frozen.module, shape=(3,))
    plain = support.plan_for("dp-fedgd", DATA, ROUNDS, epsilon=float("inf"), clip=1e3, lr=0.3)
    theta = start[without(tensors, DOWN)]
    *_, theirs = simulate.run(plain, settled, DATA, Noiseless(0), theta=theta)
    mine = ours.model[without(tensors, DOWN)]
    assert not torch.allclose(mine[:10], theirs.model[:10], atol=1e-3)  # another basis
    up = theirs.model[:10].reshape(5, 2)
    torch.testing.assert_close(product(ours.model, tensors), up @ tensors[0].of(start), rtol=0, atol=1e-6)
    torch.testing.assert_close(mine[10:], theirs.model[10:], rtol=0, atol=1e-6)


def test_alternating_continues_the_state_of_each_factor():
    """Two stages of B around one of A: the moments of B go on, and the step knows how many rounds B had."""
    plan = plan_of("dp-fedadam", "alternating", rounds=3, options={"bias_correction": True})
    first, second, third = trained(plan)
    assert second.checkpoint.state.other[0].first.shape == first.checkpoint.state.inner[0].first.shape
    torch.testing.assert_close(second.checkpoint.state.other[0].first, first.checkpoint.state.inner[0].first)
    moved = 0.9 * first.checkpoint.state.inner[0].first + 0.1 * third.aggregate
    torch.testing.assert_close(third.checkpoint.state.inner[0].first, moved)


@pytest.mark.parametrize("variant", ["alternating", "fedsvd"])
def test_runs_side_by_side_and_resumed_runs_are_the_same(variant):
    plan = plan_of("dp-fedadam", variant)
    single = [trained(plan, source=Seeded(seed))[-1].model for seed in (1, 2)]
    theta = MODEL.init().double().expand(2, -1)
    *_, both = simulate.run(plan, MODEL, DATA, [Seeded(1), Seeded(2)], theta=theta)
    torch.testing.assert_close(both.model, torch.stack(single), rtol=1e-9, atol=1e-9)
    stopped = trained(plan)[1].checkpoint
    *_, resumed = simulate.run(plan, MODEL, DATA, Seeded(1), start=2, checkpoint=tuple(stopped))
    torch.testing.assert_close(resumed.model, single[0], rtol=1e-9, atol=1e-9)


def test_sums_of_integers_hold_the_part_alone():
    plan = plan_of("dp-fedgd", "alternating", trust="secure-aggregation")
    answers = sent_answers(plan, MODEL, 3, torch.int64)
    tensors = tensors_of(plan)
    sizes = [len(without(tensors, frozen)) for frozen in (DOWN, UP, DOWN, UP)]
    assert [each.shape for (each,) in answers] == [(size,) for size in sizes]


def test_what_does_not_serve_a_part_is_refused():
    for name, why in (("dp-scaffold", "store"), ("dp-ftrl", "noise that goes on"), ("dp-fedfc", "several stages")):
        with pytest.raises(SordinoError, match=why):
            method_for(name, "alternating")
    with pytest.raises(SordinoError, match="mean of models"):
        method_for("dp-fedgd", "fedsvd", tail=0.5)
    for every in (0, -1):
        with pytest.raises(SordinoError, match="lora_every"):
            method_for("dp-fedgd", "alternating", every=every)
    with pytest.raises(SordinoError, match="256 stages"):
        method_for("dp-fedgd", "alternating", rounds=1000)
    with pytest.raises(SordinoError, match="lora_variant"):
        method_for("dp-fedgd", "freeze-b")
    with pytest.raises(SordinoError, match="no low-rank adapters"):
        trained(plan_of("dp-fedgd", "fedsvd"), network("freeze-a"))
    method = build("dp-fedgd")
    assert with_adapters(method, "freeze-a", ROUNDS) is method


def test_a_part_of_a_gradient_holds_no_other_entry():
    """The wrong twin: entries that are left out stay in the norm, or stay in the answer."""
    plan = plan_of("dp-fedgd", "fedsvd", rounds=1, epsilon=float("inf"))
    part = without(tensors_of(plan), DOWN)
    theta = MODEL.init().double() + 0.3
    shard = Shard(DATA.x, DATA.y, torch.ones(len(DATA.x)).double())
    inside = torch.zeros_like(theta).index_fill(-1, part, 1.0)
    masked, whole = MODEL.clipped_sum(theta, shard, 0.1, inside), MODEL.clipped_sum(theta, shard, 0.1)
    outside = (inside == 0).nonzero().flatten()
    assert not masked[outside].any()
    assert whole[outside].abs().max() > 1e-3
    assert (masked[part] - whole[part]).abs().max() > 1e-3  # the whole gradient is longer, so it is cut more


@pytest.mark.soak  # the search below reaches the claim of each variant, too
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.PERSON])
def test_contracts_hold(unit):
    reports = checks.check_adapters(trials=TRIALS, units=[unit])
    assert [report.problems for report in reports if not report.passed] == []
    assert len(reports) == 2 * (1 + 2 + 1)


@pytest.mark.parametrize("variant", ["alternating", "fedsvd"])
def test_wrong_twins_are_rejected(variant):
    method, model = method_for("dp-fedgd", variant, rounds=2), small_adapters(variant)
    found = checks.sensitivity(method, model, Adjacency.ADD_REMOVE, trials=8)
    assert all(each.reached >= 0.9 and not each.beyond for each in found), found
    wrong = sends_the_frozen_factor(method, model)
    assert all(each.beyond for each in checks.sensitivity(*wrong, adjacency=Adjacency.ADD_REMOVE, trials=8))
    assert checks.replay(method, model) == []
    assert checks.replay(*refactors_by_records(method, model))
