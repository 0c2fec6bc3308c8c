"""The public numbers of each round: cohort, noise, minibatches, and the addresses of draws that are not noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import SAMPLED, Checkpoint, Facts, Model, Privacy, Stage, Tree, Unit, keep
from sordino.errors import OverspentError, SordinoError
from sordino.models.linear import NUMERIC_LOSSES, Loss
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Address, Source
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan, continues_stream

# Query numbers above those of any method. They address draws that are not noise: which records enter a minibatch,
# dropout, the dither of integer rounding, which slot of the minibatch each drawn record takes, which records are used
# of a person with more, and which minibatch of an epoch each record is in.
SAMPLING, DROPOUT, ROUNDING, SLOT_ORDER, CHOICE, ALLOCATION = (2**16 - k for k in range(1, 7))


class RoundPlan(NamedTuple):
    """The public numbers of one round."""

    t: int
    first: int  # the first round of this round's stage
    step: int  # earlier rounds of the stage that changed the model
    stage: Stage
    facts: Facts
    cohort: np.ndarray
    sizes: np.ndarray  # records of each client as declared; at client level only the client knows its size
    stds: list[np.ndarray]  # per query: the noise that each client adds in a cohort of this size
    sum_stds: list[np.ndarray]  # per query: the noise of the aggregate, where it is added to the sum
    sampling: Sampling
    rates: np.ndarray  # per client: probability that a record enters a minibatch
    slots: np.ndarray  # per client: slots of a minibatch
    noise_on_sum: bool  # the adversary sees only sums, so noise is added once, to the aggregate
    attended: np.ndarray  # per client: earlier rounds of the stage in which it took part


def round_plans(plan: Plan, model: Model, start: int = 0) -> Iterator[RoundPlan]:
    """The rounds of a plan, in order.

    Args:
        plan: The plan of the run.
        model: The model, whose shapes become public facts.
        start: The first round to yield.

    Yields:
        One `RoundPlan` per round from `start` on.
    """
    t, sizes = 0, np.asarray(plan.sizes)
    for s, (stage, rounds) in enumerate(zip(plan.stages, plan.stage_rounds, strict=True)):
        first, facts = t, stage_facts(plan, model, s)
        stds, step = [calibration.client_std(plan, s, k) for k in range(len(stage.queries))], 0
        sum_stds = [np.asarray(calibration.aggregate_std(plan, s, k)) for k in range(len(stage.queries))]
        on_sum, attended = noise_is_added_to_sum(plan, stage), np.zeros(plan.clients, dtype=int)
        for t in range(first, first + rounds):
            if t >= start:
                cohort = plan.cohorts[t]
                client_stds = [std * calibration.noise_share(plan, len(cohort)) for std in stds]
                batches = plan.sampling, plan.rates, plan.slots
                last = on_sum, attended.copy()
                yield RoundPlan(t, first, step, stage, facts, cohort, sizes, client_stds, sum_stds, *batches, *last)
            attended[plan.cohorts[t]] += 1
            step += bool(len(plan.cohorts[t])) or (on_sum and plan.amplified)
        t = first + rounds


def stage_facts(plan: Plan, model: Model, s: int) -> Facts:
    """The public facts of stage s, with the model's shapes, blocks, adapters and kind of labels."""
    kind = getattr(model, "kind", None)
    facts = calibration.stage_facts(plan, s)
    intervals = len(getattr(model, "intervals", (0,))) - 1
    weight = getattr(model, "mean_weight", 1.0)
    facts = replace(facts, shapes=model.shapes, blocks=parameter_blocks(model), mean_weight=weight)
    facts = replace(facts, adapters=getattr(model, "adapters", ()))
    return replace(facts, numeric=kind in NUMERIC_LOSSES, rates=kind is Loss.POISSON, intervals=intervals)


def per_client(theta: Tensor, clients: int) -> Tensor:
    """One copy of theta per client; the axis of clients comes before the last."""
    return theta.unsqueeze(-2).expand(*theta.shape[:-1], clients, theta.shape[-1])


def checkpoint_template(plan: Plan, model: Model, theta: Tensor, start: int) -> Checkpoint:
    """A checkpoint with the NamedTuples that a run of the plan has before round `start`; its numbers mean nothing.

    Args:
        plan: The plan.
        model: The model.
        theta: Parameters, with an axis of runs if there is one.
        start: The round that follows the checkpoint.

    Returns:
        The template, for `tree.rebuild`.
    """
    state: Tree = ()
    memory: Tree = ()
    for s in range(plan.stage_of(start - 1) + 1 if start else 0):
        local, rule = plan.stages[s].local, plan.stages[s].rule
        state = rule.init(theta, stage_facts(plan, model, s), state)
        memory = local.init(per_client(theta, plan.clients), memory)
    return Checkpoint(theta, state, memory)


def round_plans_of_runs(plans: Sequence[Plan], model: Model, start: int) -> Iterator[RoundPlan]:
    """The first plan's rounds with the noise of every plan: all stds get a leading axis of runs.

    Args:
        plans: One plan per run, equal in everything but noise.
        model: The model of all runs.
        start: The first round to yield.

    Yields:
        One `RoundPlan` per round from `start` on.
    """
    stds: dict[int, list[np.ndarray]] = {}
    sum_stds: dict[int, list[np.ndarray]] = {}
    facts: dict[int, Facts] = {}
    for round_plan in round_plans(plans[0], model, start):
        if round_plan.first not in stds:
            s, queries = plans[0].stage_of(round_plan.t), range(len(round_plan.stage.queries))
            stds[round_plan.first] = [np.stack([calibration.client_std(p, s, k) for p in plans]) for k in queries]
            sum_stds[round_plan.first] = [
                np.array([calibration.aggregate_std(p, s, k) for p in plans]) for k in queries
            ]
            each = [calibration.stage_facts(plan, s) for plan in plans]
            facts[round_plan.first] = replace(
                round_plan.facts,
                aggregate_std=_of_runs([own.aggregate_std for own in each]),
                query_stds=tuple(map(_of_runs, zip(*(own.query_stds for own in each), strict=True))),
            )
        client_stds = [
            calibration.noise_share(plans[0], len(round_plan.cohort)) * std for std in stds[round_plan.first]
        ]
        yield round_plan._replace(facts=facts[round_plan.first], stds=client_stds, sum_stds=sum_stds[round_plan.first])


def _of_runs(stds: Sequence[float | Tensor]) -> Tensor:
    """One number per run, as a column."""
    return torch.tensor(stds, dtype=torch.float64).unsqueeze(-1)


def noise_is_added_to_sum(plan: Plan, stage: Stage) -> bool:
    """Whether noise is added once, to the sum of the messages.

    This is so where the adversary sees only sums and the method proves its promise for sums. That proof needs messages
    that are unchanged answers (or are noised as a whole) and clients that store nothing of them.

    Raises:
        SordinoError: The stage's clients store their message, which carries no noise of its own here.
    """
    if not plan.only_sums_visible or (plan.privacy.unit, plan.privacy.trust) not in plan.method.proves:
        return False
    if stage.local.update_memory is not keep:
        raise SordinoError(
            f"{plan.method.name}: a client that stores its message cannot have it noised in the sum alone; leave "
            f"{plan.privacy.trust} out of `proves`."
        )
    return True


def assign_slots(source: Source, at: Address, round_plan: RoundPlan, size: int) -> np.ndarray:
    """Draw a client's minibatch: the record in each slot, or -1 for an empty slot.

    The number of slots is public. Each drawn record takes a random free slot, so a record that joins the minibatch, or
    takes the place of another one, moves no other record and does not change how another record is rounded.

    Args:
        source: The run's randomness.
        at: Client, round and call of the draw.
        round_plan: The round, which knows the rates and the slots.
        size: Records the client really has, which may be fewer than it declared.

    Returns:
        One record number per slot.
    """
    rate, slots = float(round_plan.rates[at.client]), int(round_plan.slots[at.client])
    if rate == 1:
        drawn = order = np.arange(slots)
    else:
        drawn = _drawn(source, at, round_plan, rate)
        order = np.argsort(source.uniform(at._replace(query=SLOT_ORDER), (slots,)))
    drawn = drawn[drawn < size][:slots]
    record_in_slot = np.full(slots, -1)
    record_in_slot[order[: len(drawn)]] = drawn
    return record_in_slot


def _drawn(source: Source, at: Address, round_plan: RoundPlan, rate: float) -> np.ndarray:
    """The records of a minibatch. Under allocation the minibatches of a client's stage are counted one after the other,
    and the records draw theirs once per epoch."""
    size = (int(round_plan.sizes[at.client]),)
    if round_plan.sampling.kind != "allocation":
        return round_plan.sampling.draw(source.uniform(at._replace(query=SAMPLING), size), rate)
    each = sum(query.calls // query.joint for query in round_plan.stage.queries if query.kind in SAMPLED)
    if at.index >= each:
        raise OverspentError(f"a round has {each} minibatches under {round_plan.sampling}, and one more was drawn")
    epoch, place = divmod(int(round_plan.attended[at.client]) * each + at.index, round(1 / rate))
    uniforms = source.uniform(Address(at.client, round_plan.first, ALLOCATION, epoch), size)
    return round_plan.sampling.draw(uniforms, rate, place)


def dropout_seed(source: Source, client: int, t: int, call: int) -> int:
    """The seed of the randomness inside a model, such as dropout."""
    return int(source.uniform(Address(client, t, DROPOUT, call), (1,))[0] * 2**52)


def record_choice(source: Source, privacy: Privacy) -> Callable[[int], np.ndarray] | None:
    """What draws the records that are used of persons with more, for `Records.of`; None where the first ones are."""
    if privacy.unit is not Unit.PERSON or privacy.person_choice != "random":
        return None
    return lambda count: source.uniform(Address(0, 0, CHOICE), (count,))


def check_stream(plan: Plan, t: int, source: Source) -> None:
    """Refuse to continue correlated noise, or an epoch of an allocation, in round t with a new key.

    Correlated noise is accounted for as one stream, and an epoch as one draw; a new key cannot reproduce the draws of
    earlier rounds.

    Raises:
        SordinoError: Round t would need draws of a key that was not stored.
    """
    if source.private and continues_stream(plan, t):
        raise SordinoError(
            f"resume: the correlated noise of {plan.method.name} started with a key that is not stored, so round {t} "
            "cannot continue it; start a new run."
        )
    begun = t > sum(plan.stage_rounds[: plan.stage_of(t)])
    if source.private and plan.sampling.kind == "allocation" and begun and (plan.rates < 1).any():
        raise SordinoError(
            f"resume: {plan.sampling} draws once per epoch which record is in which minibatch, with a key that is not "
            f"stored, so round {t} cannot continue it; start a new run."
        )


def parameter_blocks(model: Model) -> Tensor:
    """The block of each entry of theta: the model's own `blocks`, or one block per parameter tensor."""
    if (blocks := getattr(model, "blocks", None)) is not None:
        return torch.as_tensor(blocks)
    sizes = torch.tensor([math.prod(shape) for shape in model.shapes])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)
