"""The registry, and what the methods have in common: one release, post-processed (Prop. 4.40)."""

import ast
import inspect
import math
from pathlib import Path

import pytest
import torch

from sordino import methods
from sordino.core import Broadcast, Privacy, Trust, Unit
from sordino.engines import reference, simulate
from sordino.engines.schedule import round_plans
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build, entry
from sordino.models.linear import Linear
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from tests.support import classified

NAMES = sorted(REGISTRY)
PAIRS = [(name, unit) for name in NAMES for unit in REGISTRY[name].units]
FIRST_ORDER = ["dp-fedgd", "dp-fedsofim", "dp-fedadam", "dp-fedyogi"]  # one release, four server rules
MODEL = Linear(3, 3)
ROUNDS = 6


@pytest.fixture(scope="module")
def records():
    return classified((5, 9, 12, 20))


def plan_for(name, records, unit=Unit.RECORD, trust=Trust.UNTRUSTED_SERVER, participation="full", **options):
    privacy = Privacy(4.0, unit=unit, trust=trust)
    method = build(name, unit, **options)
    return Plan(method, ROUNDS, records.sizes, privacy, Participation.parse(participation))


# ------------------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize(("name", "unit"), PAIRS)
def test_every_method_builds_for_its_units(name, unit):
    method = build(name, unit)
    assert (method.name, method.unit) == (name, unit)
    assert method.stages
    assert method.proves or (method.caveat and name == "fednew")


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_explains_itself(name):
    found = entry(name)
    assert found.family
    assert found.paper
    assert found.summary.endswith(".")
    assert "unit" not in found.options
    assert all(default is not inspect.Parameter.empty for default in found.options.values())
    build(name, **found.options)


def test_unknown_names_options_and_units():
    with pytest.raises(SordinoError, match=r"method: 'dp-fedsofm' is unknown\. Did you mean 'dp-fedsofim'\?"):
        build("dp-fedsofm")
    with pytest.raises(SordinoError, match=r"rhoo: dp-fedsofim has no such option\. Did you mean 'rho'\?"):
        build("dp-fedsofim", rhoo=1.0)
    with pytest.raises(SordinoError, match="rho: dp-fedgd has no such option"):
        build("dp-fedgd", rho=1.0)
    with pytest.raises(SordinoError, match="unit: dp-fedgd exists at record, person and client level, not 'household'"):
        build("dp-fedgd", "household")


def test_a_unit_may_be_a_word():
    method = build("dp-fedgd", "record")
    assert method.unit is Unit.RECORD
    assert method.stages[0].queries == build("dp-fedgd", Unit.RECORD).stages[0].queries


@pytest.mark.parametrize("name", FIRST_ORDER)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": 0.0}, "lr: 0.0 must be above 0"),
        ({"lr": math.nan}, "lr: nan"),
        ({"clip": 0.0}, "clip: 0.0 must be a finite number above 0"),
        ({"clip": math.inf}, "clip: inf must be"),
        ({"clip": math.nan}, "clip: nan must be"),
        ({"tail": 1.5}, "1.5 must lie in"),
        ({"tail": -0.5}, "-0.5 must lie in"),
    ],
)
def test_bad_options_are_named(name, bad, message):
    with pytest.raises(SordinoError, match=message):
        build(name, **bad)


def docstring_lines(node):
    """Lines of the docstring of a module, class or function."""
    first = node.body[0] if node.body else None
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if is_docstring else 0


def test_a_method_reads_like_its_paper():
    """One short file per family and one short function per method, docstrings not counted."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for file in Path(methods.__file__).parent.glob("*.py"):
        text = file.read_text()
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        if file.name not in ("__init__.py", "bounds.py"):
            assert len(text.splitlines()) - sum(map(docstring_lines, nodes)) <= 110, file.name
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                body = node.end_lineno - node.lineno - docstring_lines(node)
                assert body < 80, f"{file.name}: {node.name}"


# --------------------------------------------------------------------------------------- one release (Prop. 4.40)


def messages(plan, records, thetas, seed=1):
    """What every client says in every round, theta being forced."""
    said = []
    for this_round in round_plans(plan, MODEL):
        for i in this_round.cohort:
            ask = reference.oracle(MODEL, records, this_round, int(i), Seeded(seed))
            said.append(ask.finish(this_round.stage.local.compute(ask, Broadcast(thetas[this_round.t]), (), ())))
    return torch.stack(said)


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_all_say_the_same_given_the_same_theta(unit, trust, records):
    thetas = torch.randn(ROUNDS, MODEL.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plans = {name: plan_for(name, records, unit, trust) for name in FIRST_ORDER}
    said = {name: messages(plan, records, thetas) for name, plan in plans.items()}
    first = said["dp-fedgd"]
    for name in FIRST_ORDER:
        assert torch.equal(said[name], first), name
        aggregate = next(reference.run(plans[name], MODEL, records, Seeded(1))).aggregate
        assert torch.equal(aggregate, next(reference.run(plans["dp-fedgd"], MODEL, records, Seeded(1))).aggregate)
    assert not torch.equal(messages(plans["dp-fedgd"], records, thetas, seed=2), first)
    assert not torch.equal(messages(plan_for("dp-fedgd", records, unit, trust, clip=2.0), records, thetas), first)


@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.6"])
@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_all_cost_the_same(unit, trust, participation, records):
    accounts = [spending.groups(plan_for(name, records, unit, trust, participation)) for name in FIRST_ORDER]
    assert all(account == accounts[0] for account in accounts)
    assert spending.groups(plan_for("dp-fedgd", records, unit, trust, "full")) != accounts[0] or participation == "full"


def test_they_do_different_things_with_it(records):
    last = [list(simulate.run(plan_for(name, records), MODEL, records, Seeded(1)))[-1].model for name in FIRST_ORDER]
    for i in range(len(last)):
        for j in range(i):
            assert not torch.allclose(last[i], last[j])


# -------------------------------------------------------------------------------------------------- special cases


def path(plan, records):
    return torch.stack([r.model for r in simulate.run(plan, MODEL, records, Seeded(3))])


def test_a_warm_start_that_never_begins_is_gradient_descent(records):
    """lambda = 0 throughout: DP-FedGD with a step of lr / rho."""
    gd = path(plan_for("dp-fedgd", records, lr=0.5 / 4.0), records)
    cold = path(plan_for("dp-fedsofim", records, lr=0.5, rho=4.0, warm_start=10**12), records)
    torch.testing.assert_close(cold, gd, rtol=1e-9, atol=1e-9)
    full = path(plan_for("dp-fedsofim", records, lr=0.5, rho=4.0), records)
    assert not torch.allclose(full, gd, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(path(plan_for("dp-fedsofim", records, lr=0.5, rho=4.0, warm_start=0), records), full)
    one = path(plan_for("dp-fedsofim", records, lr=0.5, rho=4.0, warm_start=1), records)
    torch.testing.assert_close(one[0], gd[0], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(one[1:], gd[1:], rtol=1e-9, atol=1e-9)


def test_a_large_rho_is_gradient_descent(records):
    gd = path(plan_for("dp-fedgd", records, lr=0.3), records)
    for rho in (1e6, 1e9):
        far = path(plan_for("dp-fedsofim", records, lr=0.3 * rho, rho=rho), records)
        torch.testing.assert_close(far, gd, rtol=100 / rho, atol=100 / rho)
    assert not torch.allclose(path(plan_for("dp-fedsofim", records, lr=0.3), records), gd, rtol=1e-4, atol=1e-4)


def test_gradient_descent_by_hand(records):
    lr, theta = 0.3, MODEL.init().double()
    for this_round in simulate.run(plan_for("dp-fedgd", records, lr=lr), MODEL, records, Seeded(3)):
        theta = theta - lr * this_round.aggregate
        torch.testing.assert_close(this_round.model, theta)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_the_tail_average_leaves_the_walk_alone(name, records):
    plain = list(simulate.run(plan_for(name, records), MODEL, records, Seeded(3)))
    tail = list(simulate.run(plan_for(name, records, tail=0.5), MODEL, records, Seeded(3)))
    torch.testing.assert_close(tail[-1].checkpoint[0], plain[-1].model, rtol=0, atol=0)
    torch.testing.assert_close(tail[-1].model, torch.stack([r.model for r in plain[-3:]]).mean(0))
