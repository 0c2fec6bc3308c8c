"""The meaning of a round: a plain loop over clients. Every other engine must agree with this one.

Example:
    >>> import sordino as so
    >>> data = so.load("digits")
    >>> records = so.Records.of(data.x_train, data.y_train, so.split(data, "iid", 4))
    >>> plan = so.Plan(so.build("dp-fedgd"), rounds=2, sizes=records.sizes, privacy=so.Privacy(epsilon=8.0))
    >>> for result in so.reference.run(plan, so.Linear(64, 10), records, so.source(None)):
    ...     pass
    >>> result.t
    1
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sordino.core import Broadcast, Checkpoint, Local, Model, Round, Shard, Tree, nothing
from sordino.data.records import Lazy, Records, rows_of
from sordino.engines import preconditions
from sordino.engines.oracle import (
    IntegerStream,
    Oracle,
    combined,
    compute,
    decode_sum,
    encode_integers,
    masked_size,
    noised,
    standard_noise,
    stream_factors,
)
from sordino.engines.schedule import SAMPLING, RoundPlan, assign_slots, check_stream, dropout_seed, round_plans
from sordino.errors import SordinoError
from sordino.evidence.charges import charges, reserve
from sordino.evidence.ledger import Lease, Ledger
from sordino.evidence.spent import Charge
from sordino.privacy.mechanisms.gaussian import Draw
from sordino.privacy.mechanisms.random import COHORT, Address, Source
from sordino.privacy.plan import Plan
from sordino.tree import leaves, pack, tree_map, unpack

SUM = "the sum"  # the ledger's name for the sum of a round's messages, where only the sum is released


def run(
    plan: Plan,
    model: Model,
    records: Records | Lazy,
    source: Source,
    *,
    theta: Tensor | None = None,
    ledger: Ledger | None = None,
    run_id: str = "",
    stop: int | None = None,
) -> Iterator[Round]:
    """Train round by round.

    With a ledger, each release is stored before it leaves, and a stored release is sent again unchanged without reading
    the data. To resume, run again with the same ledger and run_id.

    Args:
        plan: The plan of the run.
        model: The model to train.
        records: The clients' records.
        source: Randomness; a fresh stream of it serves this run.
        theta: Starting parameters; None for the model's own.
        ledger: Where releases and their cost are stored.
        run_id: Name of this run in the ledger.
        stop: End before this round; the model need not answer what later stages ask.

    Yields:
        One `Round` per round.

    Raises:
        SordinoError: The plan, the records and the ledger do not fit together.
        OverspentError: A local rule asks more than its queries declare, or a client's budget does not cover a round.
    """
    if plan.integers is not None and ledger is not None:
        raise SordinoError("ledger: a simulation of secure aggregation keeps no ledger; every site has its own.")
    preconditions.check(plan, model, records, stop=stop)
    if ledger is not None and plan.amplified:
        claim_cohorts(ledger, plan, run_id)
    theta, source = (model.init() if theta is None else theta).to(records.x), source.fresh()
    share = plan.weights / plan.participation.rate(plan.clients)
    clients = range(plan.clients)
    state: Tree = ()
    memory: list[Tree] = [() for _ in clients]
    resumed = False
    for round_plan in round_plans(plan, model):
        if round_plan.t == stop:
            return
        preconditions.check_unchanged(model, records)
        local, rule = round_plan.stage.local, round_plan.stage.rule
        if round_plan.t == round_plan.first:
            state = rule.init(theta, round_plan.facts, state)
            memory = [local.init(theta, memory[i]) for i in clients]
            caches: list[Tree] = [()] * plan.clients
            stream = IntegerStream()
            if local.prepare is not nothing:
                caches = [local.prepare(oracle(model, records, round_plan, i, source, preparing=True)) for i in clients]
        broadcast = Broadcast(theta, rule.broadcast(state))
        cohort = [int(i) for i in round_plan.cohort]
        # A secret cohort hides who was absent, so every client pays at the sampling rate.
        payers = list(clients) if plan.amplified else cohort
        recalled = {i: recall(ledger, run_id, i, round_plan.t, records.x, local.message) for i in cohort}
        messages = {i: message for i, message in recalled.items() if message is not None}
        total = recall(ledger, run_id, SUM, round_plan.t, records.x, local.message)
        resumed |= total is not None or bool(messages)
        unpaid: list[int] = []
        if ledger is not None and total is None:
            for i in payers:
                reserve(ledger, plan, i, run_id, f"client {i}")
            unpaid = [i for i in payers if not ledger.charged(run_id, f"client {i}", round_plan.t)]
            ledger.afford([entry for i in unpaid for entry in charges(plan, i, round_plan.t, run_id)])
        if total is None and resumed and len(messages) < len(cohort):
            check_stream(plan, round_plan.t, source)
        aggregate: Tree = ()
        if total is not None:
            aggregate = total
        elif plan.integers is not None:
            aggregate = integer_sum(plan, model, records, round_plan, broadcast, memory, caches, source, stream)
        elif round_plan.noise_on_sum:
            if cohort or plan.amplified:  # an empty secret cohort releases noise alone, so that nobody can tell
                weights, computed = [share[i] for i in cohort] or [0.0], []
                for i in cohort or [0]:
                    ask = oracle(model, records, round_plan, i, source, add_noise=False, sealed=True)
                    computed.append(without_noise(ask, local, broadcast, memory[i], caches[i]))
                aggregate = noised_sum(round_plan, [m for m, _ in computed], weights, computed[0][1], source, theta)
                if ledger is not None:
                    for i in unpaid:
                        ledger.charge(charges(plan, i, round_plan.t, run_id))
                    ledger.charge([Charge(SUM, round_plan.t, "sum", 0.0, 1.0, 1, run_id)], pack(aggregate))
        else:
            for i in cohort:
                if i not in messages:
                    ask = oracle(model, records, round_plan, i, source)
                    messages[i] = ask.finish(compute(local, ask, broadcast, memory[i], caches[i]))
                    if ledger is not None:
                        ledger.charge(charges(plan, i, round_plan.t, run_id), pack(messages[i]))
                memory[i] = local.update_memory(messages[i], broadcast, memory[i])
            parts = [tree_map(lambda leaf, w=share[i]: w * leaf, messages[i]) for i in cohort]
            aggregate = tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()
        if cohort or (round_plan.noise_on_sum and plan.amplified):
            step, state = preconditions.update(rule, aggregate, state, theta, round_plan.step)
            theta = theta + step
        checkpoint = Checkpoint(theta, state, tuple(memory))
        yield Round(round_plan.t, rule.model(theta, state), round_plan.cohort, aggregate, checkpoint)


def claim_cohorts(ledger: Ledger, plan: Plan, run_id: str) -> None:
    """Refuse the secret cohorts of another run in the ledger, which adds up runs as if each drew cohorts of its own.

    Args:
        ledger: Where the cost of the run is stored.
        plan: A plan whose cohorts are secret.
        run_id: Name of this run in the ledger; a resumed run keeps its name and its cohorts.

    Raises:
        SordinoError: Another run had these cohorts.
    """
    seed = hashlib.blake2b(str(plan.schedule_seed).encode(), person=b"sordino cohorts", digest_size=16).hexdigest()
    if not ledger.pass_lease(f"cohorts {seed}", [run_id], Lease(run_id, 0)):
        raise SordinoError(
            "schedule_seed: another run in this ledger had the same secret cohorts, and both reveal more than their "
            "sum; give each plan a seed of its own, such as secrets.randbits(126)."
        )


def without_noise(ask: Oracle, local: Local, broadcast: Broadcast, memory: Tree, cache: Tree) -> tuple[Tree, list[int]]:
    """A client's message before noise is added to it, and the query that each of its leaves answers."""
    message = compute(local, ask, broadcast, memory, cache)
    return ask.finish(message), ask.released(message)


def integer_sum(
    plan: Plan,
    model: Model,
    records: Records | Lazy,
    round_plan: RoundPlan,
    broadcast: Broadcast,
    memory: Sequence[Tree],
    caches: Sequence[Tree],
    source: Source,
    stream: IntegerStream,
) -> Tree:
    """The aggregate of a round of integers, modulo 2^32, as a federation's secure sum opens it bit for bit.

    Args:
        plan: A plan with integers.
        model: The model.
        records: All clients' records.
        round_plan: The round.
        broadcast: What the server sends.
        memory: The memory of each client.
        caches: The cache of each client.
        source: The run's randomness.
        stream: What earlier rounds of the stage gave; this round is added to it.

    Returns:
        The aggregate, a tree of the messages' form.
    """
    factors = stream_factors(plan, round_plan)
    total = np.zeros(masked_size(plan, round_plan.t), np.uint32)
    for i in map(int, round_plan.cohort):
        ask = oracle(model, records, round_plan, i, source, add_noise=False, sealed=True)
        message, numbers = without_noise(ask, round_plan.stage.local, broadcast, memory[i], caches[i])
        if factors is not None:
            mine = stream.answers.setdefault(i, {})
            mine[round_plan.t] = leaves(message)[0]
            message = combined(factors.encoder, round_plan, mine)
        total += encode_integers(plan, round_plan, i, message, numbers, source)
    aggregate = decode_sum(plan, round_plan, total)
    if factors is not None:
        stream.sums[round_plan.t] = leaves(aggregate)[0]
        aggregate = combined(factors.decoder, round_plan, stream.sums)
    return tree_map(lambda leaf: leaf.to(records.x), aggregate)


def noised_sum(
    round_plan: RoundPlan, messages: list[Tree], weights: list[float], numbers: list[int], source: Source, like: Tensor
) -> Tree:
    """The weighted sum of messages, in float64, with noise added once.

    Args:
        round_plan: The round.
        messages: One message per client, without noise.
        weights: One public weight per message.
        numbers: The query that each leaf of a message answers.
        source: The run's randomness.
        like: A tensor of the result's type and device.

    Returns:
        The aggregate, a tree of the messages' shape.
    """
    number = iter(numbers)

    def released(*parts: Tensor) -> Tensor:
        k = next(number)
        total = torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0)
        if not (std := float(round_plan.sum_stds[k])):
            return total.to(like)
        noise = standard_noise(
            source,
            round_plan.stage.queries[k],
            Address(COHORT, round_plan.t, k),
            round_plan.first,
            tuple(total.shape),
            total.device,
        )
        return noised(total, noise, std, secret=source.private).to(like)

    return tree_map(released, *messages)


def recall(ledger: Ledger | None, run_id: str, i: int | str, t: int, like: Tensor, template: Tree) -> Tree | None:
    """The message that client i (or the sum, by name) already released in round t; None if there is none."""
    stored = ledger.release(run_id, i if isinstance(i, str) else f"client {i}", t) if ledger is not None else None
    return None if stored is None else tree_map(lambda leaf: leaf.to(like), unpack(stored, template))


def oracle(
    model: Model,
    records: Records | Lazy,
    round_plan: RoundPlan,
    i: int,
    source: Source,
    *,
    preparing: bool = False,
    add_noise: bool = True,
    sealed: bool = False,
) -> Oracle:
    """The oracle of client i in one round.

    Args:
        model: The model.
        records: All clients' records.
        round_plan: The round.
        i: The client.
        source: The client's randomness.
        preparing: For building a cache; see `Oracle`.
        add_noise: False if noise is added later; see `Oracle`.
        sealed: The rule does not get the numbers of its answers; see `Oracle`.

    Returns:
        The oracle.
    """
    shard = records.shard(i)
    rate = float(round_plan.rates[i])

    def draw(number: int, call: int, shape: tuple[int, ...]) -> Draw:
        at = Address(i, round_plan.t, number, call)
        return standard_noise(source, round_plan.stage.queries[number], at, round_plan.first, shape, shard.x.device)

    def pick(call: int) -> Shard:
        at = Address(i, round_plan.t, SAMPLING, call)
        slots = rows_of(assign_slots(source, at, round_plan, len(shard.x) // shard.per_person), shard.per_person)
        taken = torch.from_numpy(slots).to(shard.x.device)
        rows, filled = taken.clamp_min(0), taken >= 0
        x = torch.where(filled.unsqueeze(-1), shard.x[rows], 0)
        return Shard(x, shard.y[rows], shard.mask[rows] * filled, None, shard.per_person)

    return Oracle(
        model,
        lambda: shard,
        round_plan.stage,
        sizes=shard.x.new_tensor(round_plan.sizes[i]),  # as declared; the real number is private
        stds=[torch.tensor(std[i]) for std in round_plan.stds],
        draw=draw,
        pick=pick if rate < 1 else None,
        rates=shard.x.new_tensor(rate) if rate < 1 else None,
        dropout_seed=lambda call: dropout_seed(source, i, round_plan.t, call),
        facts=round_plan.facts,
        secret=source.private,
        preparing=preparing,
        add_noise=add_noise,
        sealed=sealed,
    )
