"""The meaning of a round: a plain loop over clients. Every other engine must agree with this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import Broadcast, Model, Round, Shard, SordinoError, Tree, nothing
from sordino.data.records import Lazy, Records
from sordino.engines.oracle import (
    SAMPLING,
    Oracle,
    RoundPlan,
    check_stream,
    decode_sum,
    encode_integers,
    noised,
    places,
    round_plans,
    seed_of,
    standard,
)
from sordino.privacy.evidence.charges import charges
from sordino.privacy.evidence.ledger import Entry, Ledger
from sordino.privacy.mechanisms.random import EVERYONE, Address, Draw, Source
from sordino.privacy.plan import Plan
from sordino.tree import pack, tree_map, unpack

Made = tuple[Tree, list[int]]
SUM = "the sum"  # in a ledger: of a round's messages, where the sum is all that is released


def run(
    plan: Plan,
    model: Model,
    records: Records | Lazy,
    source: Source,
    *,
    theta: Tensor | None = None,
    ledger: Ledger | None = None,
    run_id: str = "",
) -> Iterator[Round]:
    """Yield after every round. With a ledger, what is released is stored before it leaves, and what is already stored
    is sent again as it was, without touching the data: to resume, run again."""
    if plan.integers is not None and ledger is not None:
        raise SordinoError("ledger: a simulation of secure aggregation keeps none; every site has its own.")
    records.check_fits(model)
    theta, source = (model.init() if theta is None else theta).to(records.x), source.fresh()
    share = plan.weights / plan.participation.rate(plan.clients)
    clients = range(plan.clients)
    state: Tree = ()
    memory: list[Tree] = [() for _ in clients]
    recalled = False
    for round_plan in round_plans(plan, model):
        local, rule = round_plan.stage.local, round_plan.stage.rule
        if round_plan.t == round_plan.first:
            state = rule.init(theta, round_plan.facts, state)
            memory = [local.init(theta, memory[i]) for i in clients]
            caches: list[Tree] = [()] * plan.clients
            if local.prepare is not nothing:
                caches = [local.prepare(oracle(model, records, round_plan, i, source, preparing=True)) for i in clients]
        broadcast = Broadcast(theta, rule.broadcast(state))
        cohort = [int(i) for i in round_plan.cohort]
        # A secret cohort is paid for by all, at the rate of its coins: that a client stayed away is what they hide.
        payers = list(clients) if plan.amplified else cohort
        said = {i: recall(ledger, run_id, i, round_plan.t, records.x) for i in cohort}
        total = recall(ledger, run_id, SUM, round_plan.t, records.x)
        recalled |= total is not None or any(message is not None for message in said.values())
        unpaid: list[int] = []
        if ledger is not None and total is None:
            unpaid = [i for i in payers if not ledger.charged(run_id, f"client {i}", round_plan.t)]
            ledger.afford([entry for i in unpaid for entry in charges(plan, i, round_plan.t, run_id)])
        if total is None and recalled and any(said[i] is None for i in cohort):
            check_stream(plan, round_plan.t, source)

        def compute(i: int, quiet: bool = False, at: tuple[Any, ...] = (round_plan, broadcast, memory, caches)) -> Made:
            """Client i's message, and the queries that its parts answer where they are not noised yet."""
            round_plan, broadcast, memory, caches = at
            ask = oracle(model, records, round_plan, i, source, quiet=quiet)
            message = round_plan.stage.local.compute(ask, broadcast, memory[i], caches[i])
            return ask.finish(message), ask.released(message) if quiet else []

        aggregate: Tree = ()
        if total is not None:
            aggregate = total
        elif plan.integers is not None:
            wrapped = sum(
                (encode_integers(plan, round_plan, i, compute(i, quiet=True)[0], source) for i in cohort),
                np.zeros(1, "u4"),
            )
            aggregate = decode_sum(plan, round_plan, wrapped).to(theta)  # modulo 2^32
        elif round_plan.once:
            if cohort or plan.amplified:  # that nobody came must not be seen: noise alone is released
                made = [compute(i, quiet=True) for i in cohort or [0]]
                weights = [share[i] for i in cohort] or [0.0]
                aggregate = noised_sum(round_plan, [m for m, _ in made], weights, made[0][1], source, theta)
                if ledger is not None:
                    for i in unpaid:
                        ledger.charge(charges(plan, i, round_plan.t, run_id))
                    ledger.charge([Entry(SUM, round_plan.t, "sum", 0.0, 1.0, 1, run_id)], pack(aggregate))
        else:
            for i in cohort:
                if said[i] is None:
                    said[i] = compute(i)[0]
                    if ledger is not None:
                        ledger.charge(charges(plan, i, round_plan.t, run_id), pack(said[i]))
                memory[i] = local.update_memory(said[i], broadcast, memory[i])
            parts = [tree_map(lambda leaf, w=share[i]: w * leaf, said[i]) for i in cohort]
            aggregate = tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()
        if cohort or (round_plan.once and plan.amplified):
            step, state = rule.update(aggregate, state, theta, round_plan.step)
            theta = theta + step
        yield Round(round_plan.t, rule.model(theta, state), round_plan.cohort, aggregate, (theta, state, tuple(memory)))


def noised_sum(
    round_plan: RoundPlan, messages: list[Tree], weights: list[float], numbers: list[int], source: Source, like: Tensor
) -> Tree:
    """The weighted sum of messages, in float64, with noise that is added once. `numbers`: the query of each leaf."""
    number = iter(numbers)

    def released(*parts: Tensor) -> Tensor:
        k = next(number)
        total = torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0)
        if not (std := float(round_plan.sums[k])):
            return total.to(like)
        noise = standard(
            source,
            round_plan.stage.queries[k],
            Address(EVERYONE, round_plan.t, k),
            round_plan.first,
            tuple(total.shape),
        )
        return noised(total, noise, std, secret=source.private).to(like)

    return tree_map(released, *messages)


def recall(ledger: Ledger | None, run_id: str, i: int | str, t: int, like: Tensor) -> Tree | None:
    """What client i already said in round t."""
    stored = ledger.release(run_id, i if isinstance(i, str) else f"client {i}", t) if ledger is not None else None
    return None if stored is None else tree_map(lambda leaf: leaf.to(like), unpack(stored))


def oracle(
    model: Model,
    records: Records | Lazy,
    round_plan: RoundPlan,
    i: int,
    source: Source,
    *,
    preparing: bool = False,
    quiet: bool = False,
) -> Oracle:
    """Client i's own; `quiet`: answers without noise, which is added later."""
    shard = records.shard(i)
    rate = float(round_plan.rates[i])

    def draw(number: int, call: int, shape: tuple[int, ...]) -> Draw:
        return standard(
            source, round_plan.stage.queries[number], Address(i, round_plan.t, number, call), round_plan.first, shape
        )

    def pick(call: int) -> Shard:
        where = torch.from_numpy(places(source, Address(i, round_plan.t, SAMPLING, call), round_plan, len(shard.x)))
        at, real = where.clamp_min(0).to(shard.x.device), (where >= 0).to(shard.x.device)
        return Shard(torch.where(real.unsqueeze(-1), shard.x[at], 0), shard.y[at], shard.mask[at] * real)

    return Oracle(
        model,
        lambda: shard,
        round_plan.stage,
        sizes=shard.x.new_tensor(round_plan.sizes[i]),  # as declared: what it really holds is private
        stds=[torch.tensor(std[i]) for std in round_plan.stds],
        draw=draw,
        pick=pick if rate < 1 else None,
        rates=shard.x.new_tensor(rate) if rate < 1 else None,
        dropout_seed=lambda call: seed_of(source, i, round_plan.t, call),
        facts=round_plan.facts,
        secret=source.private,
        preparing=preparing,
        quiet=quiet,
    )
