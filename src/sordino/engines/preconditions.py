"""What must agree before an engine reads a record: plan, model and records. And what the rules must return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sordino.core import FLAT_CLIPPING, Kind, Method, Rule, Tree, answers, serves
from sordino.data.records import Lazy, Records, check_serves
from sordino.errors import SordinoError, count
from sordino.privacy.plan import Plan

MATRICES = (Kind.CURVATURE, Kind.FISHER, Kind.GRAM)


def check(plan: Plan, model: Any, records: Records | Lazy, start: int = 0, stop: int | None = None) -> None:
    """Refuse a run whose plan, model and records do not belong together.

    Args:
        plan: The plan, which calibrates the noise for `plan.sizes`.
        model: The model to train.
        records: The clients' records.
        start, stop: The rounds that the model serves; by default all.

    Raises:
        SordinoError: Names what differs, and the remedy.
    """
    if not answers(model, Kind.GRADIENT):
        raise SordinoError(
            f"model: a {type(model).__name__} has no per-example gradients; wrap a torch module as TorchModel(module)."
        )
    if not hasattr(records, "check_fits"):
        raise SordinoError(
            f"records: a {type(records).__name__} is not Records; write Records.of(x, y, client), as in "
            "Records.of(data.x_train, data.y_train, split(data, 'iid', clients=4))."
        )
    last = plan.rounds if stop is None else min(stop, plan.rounds)
    stages = plan.method.stages[plan.stage_of(start) : plan.stage_of(last - 1) + 1]
    check_kinds(plan.method._replace(stages=stages), model)
    records.check_fits(model)
    check_unchanged(model, records)
    records.check_unit(plan.privacy)
    check_serves(plan.privacy, model)
    check_sizes(plan, records.sizes)


def check_unchanged(model: Any, records: Records | Lazy) -> None:
    """Refuse records that changed after they were measured, and check a network again that changed after it was built.

    Args:
        model: The model to train.
        records: The clients' records.

    Raises:
        SordinoError: The records changed, or the network no longer passes its checks.
    """
    records.check_unchanged()
    if hasattr(model, "check_unchanged"):
        model.check_unchanged()


def check_sizes(plan: Plan, sizes: tuple[int, ...]) -> None:
    """Refuse records of other clients than the plan's: noise, sampling rates and weights follow from `plan.sizes`.

    At client level a client's size is private, so only the number of clients must agree.
    """
    remedy = "build the plan with sizes=records.sizes"
    if plan.clients != len(sizes):
        raise SordinoError(f"sizes: the plan has {plan.clients} clients, but the records have {len(sizes)}; {remedy}.")
    if not plan.privacy.unit.sizes_public:
        return
    differing = [i for i, (declared, held) in enumerate(zip(plan.sizes, sizes, strict=True)) if declared != held]
    if differing:
        i = differing[0]
        others = f", and so for {count(len(differing) - 1, 'more client')}" if len(differing) > 1 else ""
        raise SordinoError(
            f"sizes: the plan declares {plan.sizes[i]} {plan.privacy.unit}s of client {i}, but it holds "
            f"{sizes[i]}{others}. "
            f"The noise is calibrated for the declared sizes; {remedy}."
        )


def check_kinds(method: Method, model: Any, name: str | None = None) -> None:
    """Refuse a method that asks for a sum which the model cannot compute.

    Args:
        method: The method.
        model: The model.
        name: The model's name in messages; None: its class.
    """
    check_clipping(method, model, name)
    kinds = {query.kind for stage in method.stages for query in stage.queries} - {Kind.GRADIENT, Kind.DELTA}
    lacking = sorted(str(kind) for kind in kinds if not answers(model, kind))
    if not lacking:
        return
    name = name or type(model).__name__
    if lacking[0] == Kind.TALLY:
        raise SordinoError(f"intervals: model {name} has none; leave the option out.")
    if lacking[0] == Kind.LEAVES:
        raise SordinoError(f"model: {method.name} boosts trees, and {name} has none; use model trees.")
    what = f"{lacking[0]} matrix" if lacking[0] in list(MATRICES) else lacking[0]
    last_layer = ", dp-fednew with curvature = fisher" if answers(model, Kind.FISHER) else ""
    raise SordinoError(
        f"method: {method.name} asks for a {what}, which {name} cannot compute; use a linear model{last_layer}, or a "
        "method such as dp-fedadam, dp-fedavg or dp-fedadamw."
    )


def check_clipping(method: Method, model: Any, name: str | None = None) -> None:
    """Refuse a law of clipping that the model does not serve."""
    laws = {query.clipping for stage in method.stages for query in stage.queries} - {FLAT_CLIPPING}
    for clipping in laws:
        if not serves(model, "clipping"):
            raise SordinoError(
                f"clipping: {clipping.law} is for networks, and {name or type(model).__name__} clips each gradient as "
                "a whole; leave clipping out, or use a network such as mlp."
            )
        model.check_clipping(clipping)


def update(rule: Rule, aggregate: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
    """The rule's (step, state), or an error that says what `update` must return."""
    result = rule.update(aggregate, state, theta, t)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise SordinoError(
            f"update: a rule's update must return (step, state), not a {type(result).__name__}; without a state return "
            "(step, ())."
        )
    if result[0].shape[-1:] != theta.shape[-1:]:
        raise SordinoError(
            f"update: the step has the shape {tuple(result[0].shape)}, and the model {tuple(theta.shape)}; return one "
            "number for each of the model's."
        )
    return result


def check_message(message: Any) -> None:
    """Refuse what is not a message, such as the None of a `compute` without a return."""
    if not isinstance(message, Tensor | tuple):
        raise SordinoError(
            f"message: compute returned {message if message is None else type(message).__name__}; return a tensor, or "
            "a NamedTuple of tensors."
        )
