"""The meaning of a round: a plain loop over clients. Every other engine must agree with this one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sordino.core import Down, Model, Round, Shard, SordinoError, Tree, nothing
from sordino.data.shard import Lazy, Records
from sordino.engines.client import SAMPLING, Oracle, Turn, check_stream, normals, opened, secured, seed_of, turns
from sordino.privacy.ledger import Entry, Ledger
from sordino.privacy.noise import Address, Source
from sordino.privacy.plan import Plan
from sordino.tree import pack, tree_map, unpack

NOBODY = "an empty cohort"


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
    """Yield after every round. With a ledger, a message is stored before it leaves, and one already stored is sent
    again as it was, without touching the data: to resume, run again."""
    if plan.integers is not None and ledger is not None:
        raise SordinoError("ledger: a simulation of secure aggregation keeps none; every site has its own.")
    theta, source = (model.init() if theta is None else theta).to(records.x), source.fresh()
    share = torch.as_tensor(plan.weights / plan.participation.rate(plan.clients)).to(records.x)
    clients = range(plan.clients)
    state: Tree = ()
    memory: list[Tree] = [() for _ in clients]
    said_before = False
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
        said = {i: recall(ledger, run_id, i, turn.t, records.x) for i in cohort}
        known = any(message is not None for message in said.values())
        said_before |= known
        if known and len(turn.extras) and source.private:  # what they said is not on record; two draws would average
            raise SordinoError(f"resume: the noise of absent clients in round {turn.t} is not on record; begin anew.")
        if ledger is not None:
            new = [i for i in cohort if said[i] is None]
            # A secret cohort is paid for by all, at the rate of its coins: that a client stayed away is what they hide.
            away = [i for i in clients if i not in said] if plan.amplified else []
            away = [i for i in away if not ledger.charged(run_id, f"client {i}", turn.t)]
            ledger.afford([entry for i in (*new, *away) for entry in plan.entries(i, turn.t, run_id)])
            for i in away:
                ledger.charge(plan.entries(i, turn.t, run_id))
        parts, total = [], np.zeros(1, np.uint32)
        for i in cohort:
            message = said[i]
            if message is None:
                if said_before:
                    check_stream(plan, turn.t, source)
                ask = oracle(model, records, turn, i, source, quiet=plan.integers is not None)
                message = ask.finish(local.work(ask, down, memory[i], caches[i]))
                if ledger is not None:
                    ledger.charge(plan.entries(i, turn.t, run_id), pack(message))
            if plan.integers is not None:
                total = total + secured(plan, turn, i, message, source)  # modulo 2^32
                continue
            memory[i] = local.remember(message, down, memory[i])
            parts.append(tree_map(lambda leaf, w=share[i]: w * leaf, message))
        for i in turn.extras if parts or plan.amplified else ():
            noise = recall(ledger, run_id, NOBODY, turn.t, records.x) if plan.amplified else None
            if noise is None:
                ask = oracle(model, records, turn, int(i), source, empty=True)
                message = local.work(ask, down, memory[i], caches[i])
                noise = ask.finish(tree_map(torch.zeros_like, message) if plan.amplified else message)
                if ledger is not None and plan.amplified:  # sent again as it was: else a repetition shows who came
                    ledger.charge([Entry(NOBODY, turn.t, "noise", 0.0, 1.0, 1, run_id)], pack(noise))
            parts.append(tree_map(lambda leaf, w=share[i]: w * leaf, noise))
        if plan.integers is not None:
            parts = [opened(plan, turn, total).to(theta)]
        aggregate: Tree = tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()
        if parts:
            step, state = rule.update(aggregate, state, theta, turn.step)
            theta = theta + step
        yield Round(turn.t, rule.model(theta, state), turn.cohort, aggregate, (theta, state, tuple(memory)))


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
    empty: bool = False,
    quiet: bool = False,
) -> Oracle:
    """Client i's own; `empty`: as if it held no record; `quiet`: answers without noise."""
    shard = records.shard(i)
    shard = shard._replace(mask=0 * shard.mask) if empty else shard
    rate = float(turn.rates[i])

    def draw(number: int, call: int, shape: tuple[int, ...]) -> Tensor:
        query = turn.stage.queries[number]
        return torch.from_numpy(normals(source, query, Address(i, turn.t, number, call), turn.first, shape))

    def pick(call: int) -> Shard:
        coins = source.uniform(Address(i, turn.t, SAMPLING, call), (int(turn.sizes[i]),))  # at the declared rate
        drawn = turn.sampling.draw(coins, rate)
        rows = torch.from_numpy(drawn[drawn < len(shard.x)]).to(shard.x.device)
        if not len(rows):  # a minibatch may be empty: one record that does not count
            return Shard(shard.x[:1], shard.y[:1], 0 * shard.mask[:1])
        return Shard(shard.x[rows], shard.y[rows], shard.mask[rows])

    return Oracle(
        model,
        lambda: shard,
        turn.stage,
        sizes=shard.x.new_tensor(turn.sizes[i]),  # as declared: what it really holds is private
        stds=[torch.tensor(std[i]) for std in turn.stds],
        grids=[torch.tensor(grid[i]) for grid in turn.grids],
        draw=draw,
        pick=pick if rate < 1 else None,
        rates=shard.x.new_tensor(rate) if rate < 1 else None,
        luck=lambda call: seed_of(source, i, turn.t, call),
        facts=turn.facts,
        secret=source.private,
        inside=inside,
        quiet=quiet,
    )
