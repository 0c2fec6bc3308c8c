"""The meaning of a round: a plain loop over clients. Every other engine must agree with this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import Down, Model, Round, Shard, SordinoError, Tree, nothing
from sordino.data.records import Lazy, Records
from sordino.engines.oracle import (
    SAMPLING,
    Oracle,
    Turn,
    check_stream,
    noised,
    opened,
    places,
    secured,
    seed_of,
    standard,
    turns,
)
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
    for turn in turns(plan, model):
        local, rule = turn.stage.local, turn.stage.rule
        if turn.t == turn.first:
            state = rule.init(theta, turn.facts, state)
            memory = [local.init(theta, memory[i]) for i in clients]
            caches: list[Tree] = [()] * plan.clients
            if local.prepare is not nothing:
                caches = [local.prepare(oracle(model, records, turn, i, source, inside=True)) for i in clients]
        down = Down(theta, rule.say(state))
        cohort = [int(i) for i in turn.cohort]
        # A secret cohort is paid for by all, at the rate of its coins: that a client stayed away is what they hide.
        payers = list(clients) if plan.amplified else cohort
        said = {i: recall(ledger, run_id, i, turn.t, records.x) for i in cohort}
        total = recall(ledger, run_id, SUM, turn.t, records.x)
        recalled |= total is not None or any(message is not None for message in said.values())
        unpaid: list[int] = []
        if ledger is not None and total is None:
            unpaid = [i for i in payers if not ledger.charged(run_id, f"client {i}", turn.t)]
            ledger.afford([entry for i in unpaid for entry in plan.entries(i, turn.t, run_id)])
        if total is None and recalled and any(said[i] is None for i in cohort):
            check_stream(plan, turn.t, source)

        def work(i: int, quiet: bool = False, at: tuple[Any, ...] = (turn, down, memory, caches)) -> Made:
            """Client i's message, and the queries that its parts answer where they are not noised yet."""
            turn, down, memory, caches = at
            ask = oracle(model, records, turn, i, source, quiet=quiet)
            message = turn.stage.local.work(ask, down, memory[i], caches[i])
            return ask.finish(message), ask.released(message) if quiet else []

        aggregate: Tree = ()
        if total is not None:
            aggregate = total
        elif plan.integers is not None:
            wrapped = sum((secured(plan, turn, i, work(i, quiet=True)[0], source) for i in cohort), np.zeros(1, "u4"))
            aggregate = opened(plan, turn, wrapped).to(theta)  # modulo 2^32
        elif turn.once:
            if cohort or plan.amplified:  # that nobody came must not be seen: noise alone is released
                made = [work(i, quiet=True) for i in cohort or [0]]
                weights = [share[i] for i in cohort] or [0.0]
                aggregate = noised_sum(turn, [m for m, _ in made], weights, made[0][1], source, theta)
                if ledger is not None:
                    for i in unpaid:
                        ledger.charge(plan.entries(i, turn.t, run_id))
                    ledger.charge([Entry(SUM, turn.t, "sum", 0.0, 1.0, 1, run_id)], pack(aggregate))
        else:
            for i in cohort:
                if said[i] is None:
                    said[i] = work(i)[0]
                    if ledger is not None:
                        ledger.charge(plan.entries(i, turn.t, run_id), pack(said[i]))
                memory[i] = local.remember(said[i], down, memory[i])
            parts = [tree_map(lambda leaf, w=share[i]: w * leaf, said[i]) for i in cohort]
            aggregate = tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()
        if cohort or (turn.once and plan.amplified):
            step, state = rule.update(aggregate, state, theta, turn.step)
            theta = theta + step
        yield Round(turn.t, rule.model(theta, state), turn.cohort, aggregate, (theta, state, tuple(memory)))


def noised_sum(
    turn: Turn, messages: list[Tree], weights: list[float], numbers: list[int], source: Source, like: Tensor
) -> Tree:
    """The weighted sum of messages, in float64, with noise that is added once. `numbers`: the query of each leaf."""
    number = iter(numbers)

    def released(*parts: Tensor) -> Tensor:
        k = next(number)
        total = torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0)
        if not (std := float(turn.sums[k])):
            return total.to(like)
        noise = standard(source, turn.stage.queries[k], Address(EVERYONE, turn.t, k), turn.first, tuple(total.shape))
        return noised(total, noise, std, secret=source.private).to(like)

    return tree_map(released, *messages)


def recall(ledger: Ledger | None, run_id: str, i: int | str, t: int, like: Tensor) -> Tree | None:
    """What client i already said in round t."""
    stored = ledger.release(run_id, i if isinstance(i, str) else f"client {i}", t) if ledger is not None else None
    return None if stored is None else tree_map(lambda leaf: leaf.to(like), unpack(stored))


def oracle(
    model: Model,
    records: Records | Lazy,
    turn: Turn,
    i: int,
    source: Source,
    *,
    inside: bool = False,
    quiet: bool = False,
) -> Oracle:
    """Client i's own; `quiet`: answers without noise, which is added later."""
    shard = records.shard(i)
    rate = float(turn.rates[i])

    def draw(number: int, call: int, shape: tuple[int, ...]) -> Draw:
        return standard(source, turn.stage.queries[number], Address(i, turn.t, number, call), turn.first, shape)

    def pick(call: int) -> Shard:
        where = torch.from_numpy(places(source, Address(i, turn.t, SAMPLING, call), turn, len(shard.x)))
        at, real = where.clamp_min(0).to(shard.x.device), (where >= 0).to(shard.x.device)
        return Shard(torch.where(real.unsqueeze(-1), shard.x[at], 0), shard.y[at], shard.mask[at] * real)

    return Oracle(
        model,
        lambda: shard,
        turn.stage,
        sizes=shard.x.new_tensor(turn.sizes[i]),  # as declared: what it really holds is private
        stds=[torch.tensor(std[i]) for std in turn.stds],
        draw=draw,
        pick=pick if rate < 1 else None,
        rates=shard.x.new_tensor(rate) if rate < 1 else None,
        luck=lambda call: seed_of(source, i, turn.t, call),
        facts=turn.facts,
        secret=source.private,
        inside=inside,
        quiet=quiet,
    )
