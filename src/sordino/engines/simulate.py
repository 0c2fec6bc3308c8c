"""The fast engine: clients and runs are tensor axes. It agrees with the reference to rounding, given the same noise.

Two paths, chosen once per stage by tracing the local rule:

- *fused*: every client sends its noised gradient at the broadcast theta and nothing else. Then the cohort is one
  matrix and a round is two matrix products, whatever the number of clients.
- *batched*: anything else. Clients of similar size are padded into a batch and the local rule runs once for all. At
  client level clients are computed one by one, because the size of one must not decide the shapes used for others.

A plan with integers (`Plan.integers`) takes neither path: its sums are those of the reference, bit for bit.

Several processes compute one run together if `team` names them: see `distributed`.

Where only sums are seen, noise is added once, to the sum. Elsewhere every client's message has its own; the sum of
independent Gaussians is one Gaussian, so where nobody reads the messages their summed noise is drawn once.
`shares=True` draws every client's own instead: slower, equal to the reference draw for draw.

Example:
    >>> import sordino as so
    >>> data = so.load("digits")
    >>> records = so.Records.of(data.x_train, data.y_train, so.split(data, "iid", 4))
    >>> plan = so.Plan(so.build("dp-fedgd"), rounds=3, sizes=records.sizes, privacy=so.Privacy(epsilon=8.0))
    >>> for result in so.simulate.run(plan, so.Linear(64, 10), records, so.source(None)):
    ...     pass
    >>> result.t, tuple(result.model.shape)
    (2, (650,))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    FLAT_CLIPPING,
    SAMPLED,
    Broadcast,
    Centre,
    Checkpoint,
    Kind,
    Model,
    Query,
    Round,
    Shard,
    Stage,
    Tree,
    Unit,
    keep,
    nothing,
)
from sordino.data.records import Lazy, Records
from sordino.engines import preconditions, reference
from sordino.engines.captured import CapturedRounds, RoundMattersError
from sordino.engines.distributed import ALONE, SplitRows, Team, some_clients
from sordino.engines.oracle import (
    IntegerStream,
    Oracle,
    along,
    centred_records,
    compute,
    gradient_sum,
    noised,
    seeded_dropout,
    standard_noise,
)
from sordino.engines.preconditions import MATRICES
from sordino.engines.schedule import (
    SAMPLING,
    RoundPlan,
    assign_slots,
    check_stream,
    checkpoint_template,
    dropout_seed,
    per_client,
    round_plans,
    round_plans_of_runs,
)
from sordino.engines.trace import centre_of, only_asks_for_the_gradient
from sordino.errors import SordinoError
from sordino.models.cuda_graphs import CapturedGraph
from sordino.models.softmax_batched import compiled
from sordino.privacy.mechanisms.gaussian import Draw, stack
from sordino.privacy.mechanisms.laws import carries, mechanism_of
from sordino.privacy.mechanisms.random import COHORT, Address, Counted, Source, counted, joint_source
from sordino.privacy.plan import Plan, continues_stream
from sordino.tree import rebuild, tree_map

MATRIX_BATCH_NUMBERS = 2**24  # numbers of the matrices that a batch of clients sends, which bounds memory
NOISE_BLOCK = 16  # rounds whose noise is drawn by one call, if the source allows it; a CUDA graph holds as many
BLOCK_NUMBERS = 1 << 24  # the most numbers of such a block, unless one round has more
CENTRED_NUMBERS, CENTRED_ON_GPU = 2**27, 2**29  # of records about the centres of several runs, which bounds memory
CAPTURED_NUMBERS = 2**22  # parameters of all runs in the rounds of one CUDA graph, which bounds memory


def run(
    plan: Plan | Sequence[Plan],
    model: Model,
    records: Records | Lazy,
    source: Source | Sequence[Source],
    *,
    theta: Tensor | None = None,
    shares: bool = False,
    start: int = 0,
    checkpoint: Tree = (),
    team: Team = ALONE,
    every_model: bool = True,
) -> Iterator[Round]:
    """Train round by round.

    Several runs are trained together if theta has a leading axis of runs. Each run has its own source. Runs share the
    records, or have their own if the records carry that axis too. They share the plan, or have one plan each that
    differs only in noise; options that differ are tensors in the first plan's method (see `training.batch`).

    Args:
        plan: The plan, or one per run.
        model: The model to train.
        records: The clients' records.
        source: Randomness, or one source per run; fresh streams serve this call.
        theta: Starting parameters; None for the model's own.
        shares: Draw every client's own noise, as the reference does, also where only the sum of the noise is needed.
        start: First round to run; to resume, the number of the next round.
        checkpoint: The last round's checkpoint, to resume from.
        team: The processes that compute the run together (`distributed.join`). Each of them calls this function with
            the same arguments, and gets the same rounds.
        every_model: Compute the model that each round would hand out. False for the last round alone, which saves time
            where a method derives it from the server's parameters; in other rounds these stand in its place.

    Yields:
        One `Round` per round from `start` on.

    Raises:
        SordinoError: The plan, the records, theta and the sources do not fit together.
        OverspentError: A local rule asks more than its queries declare.
    """
    plans, plan = (list(plan), plan[0]) if isinstance(plan, Sequence) else ([plan], plan)
    if plan.integers is not None and (len(plans) > 1 or (theta is not None and theta.dim() > 1)):
        raise SordinoError("integers: runs that add up integers are simulated one by one; give one plan and one theta.")
    preconditions.check(plan, model, records, start=start)
    theta = (model.init() if theta is None else theta).to(records.x)
    state: Tree = ()
    memory: Tree = ()
    if checkpoint:
        stored = tree_map(lambda leaf: leaf.to(records.x), checkpoint)
        theta, state, memory = rebuild(stored, checkpoint_template(plan, model, theta, start))
    given = source if isinstance(source, Sequence) else [source]
    team.check(plan, model, records, theta, runs=max(len(given), len(theta) if theta.dim() > 1 else 1))
    sources = [team.joint(each) for each in given]
    if len(sources) != (len(theta) if theta.dim() > 1 else 1):
        raise SordinoError(f"source: got {len(sources)} for theta of shape {tuple(theta.shape)}; give one per run.")
    if plan.integers is not None and 0 < start < plan.rounds and continues_stream(plan, start):
        raise SordinoError(
            f"resume: round {start} of {plan.method.name} needs the clients' answers of earlier rounds, which are not "
            "stored; start a new run."
        )
    if 0 < start < plan.rounds:
        for each in sources:
            check_stream(plan, start, each)
    batched_clients = BatchedClients(plan, model, records, sources, theta.dim() - 1, team)
    for round_plan in round_plans(plan, model, start) if len(plans) == 1 else round_plans_of_runs(plans, model, start):
        local, rule = round_plan.stage.local, round_plan.stage.rule
        if round_plan.t == round_plan.first:
            state = rule.init(theta, round_plan.facts, state)
            memory = local.init(batched_clients.spread(theta), memory)
        if round_plan.t in (round_plan.first, start):
            fused = only_asks_for_the_gradient(round_plan.stage, Broadcast(theta, rule.broadcast(state)))
            caches = batched_clients.prepare(round_plan) if plan.integers is None else ()
            own_caches = batched_clients.prepare_alone(round_plan) if plan.integers is not None else []
            stream = IntegerStream()
        aggregate: Tree = ()
        if len(round_plan.cohort) or (round_plan.noise_on_sum and plan.amplified):
            preconditions.check_unchanged(model, records)
            records.keep(round_plan.cohort)
            broadcast = Broadcast(theta, rule.broadcast(state))
            centre = centre_of(broadcast)
            plain = fused and centre is None
            done = batched_clients.captured_round(round_plan, theta, state, shares) if plain else None
            if done is not None:
                aggregate, theta, state = done
            else:
                if plan.integers is not None:
                    aggregate = batched_clients.integers(round_plan, broadcast, memory, own_caches, stream)
                elif fused:
                    aggregate = batched_clients.fused(round_plan, theta, centre, shares)
                else:
                    aggregate, memory = batched_clients.batched(round_plan, broadcast, memory, caches, shares)
                step, state = preconditions.update(rule, aggregate, state, theta, round_plan.step)
                theta = theta + step
            team.check_same(theta, round_plan.t)
        handed_out = rule.model(theta, state) if every_model or round_plan.t + 1 == plan.rounds else theta
        yield Round(round_plan.t, handed_out, round_plan.cohort, aggregate, Checkpoint(theta, state, memory))


class BatchedClients:
    """All clients at once. The client axis comes after the run axis, if there is one."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        records: Records | Lazy,
        sources: list[Source],
        lead: int,
        team: Team = ALONE,
    ) -> None:
        self.plan, self.model, self.records, self.sources, self.lead = plan, model, records, sources, lead
        self.team = team
        self.split: Any = model if team.size == 1 else SplitRows(model, team)  # sums whose rows the ranks share out
        self.secret = any(source.private for source in sources)
        self.data_axes = records.x.dim() - 2  # leading axes of the records: 1 if every run has its own data
        self.everyone = np.arange(plan.clients)
        self.influence = plan.weights / plan.participation.rate(plan.clients)  # of a client's message
        self._known: dict[bytes, Tensor] = {}
        self._graphs: dict[float, CapturedGraph] = {}  # of sums, by clip
        self._rounds: dict[int, CapturedRounds | None] = {}  # by the first round of the stage
        self._ahead: tuple[tuple[int, ...], int, Tensor] = ((), 0, torch.zeros(0))
        self._about: tuple[Centre, float | None, Callable[[Tensor], Tensor]] | None = None  # centre, clip, their sum

    @cached_property
    def _whole(self) -> list[tuple[np.ndarray, Any]]:
        return self._held(self.everyone)

    @cached_property
    def _matrix(self) -> Any:
        return self.records.fused(self.everyone, self._per_record / self._per_record.max())

    @cached_property
    def _per_record(self) -> np.ndarray:
        """How far one record's clipped gradient moves the aggregate."""
        return np.asarray(self.influence / (np.asarray(self.plan.sizes) * self.plan.rates))

    def spread(self, theta: Tensor) -> Tensor:
        """One copy of theta per client."""
        return per_client(theta, self.plan.clients)

    def prepare(self, round_plan: RoundPlan) -> Tree:
        """Every client's cache, stacked in order of clients."""
        if round_plan.stage.local.prepare is nothing:
            return ()

        def cache(clients: np.ndarray, shard: Any) -> Tree:
            built: Tree = round_plan.stage.local.prepare(self._oracle(round_plan, clients, shard, preparing=True))
            return built

        team = self.team if self.plan.clients >= self.team.size else ALONE
        parts = [part for _, part in team.spread(self._whole, cache, at_once=False)]
        order = torch.from_numpy(np.argsort(np.concatenate([clients for clients, _ in self._whole])))
        order, axis = order.to(self.records.x.device), self.data_axes
        return tree_map(lambda *leaf: torch.cat(leaf, axis).index_select(axis, order), *parts)

    def prepare_alone(self, round_plan: RoundPlan) -> list[Tree]:
        """Every client's cache, computed by itself as a site does."""
        if round_plan.stage.local.prepare is nothing:
            return [()] * self.plan.clients
        return [
            round_plan.stage.local.prepare(
                reference.oracle(self.model, self.records, round_plan, i, self.sources[0], preparing=True)
            )
            for i in range(self.plan.clients)
        ]

    def integers(
        self, round_plan: RoundPlan, broadcast: Broadcast, memory: Tree, caches: list[Tree], stream: IntegerStream
    ) -> Tree:
        """The sum of integers, client by client: a batch would round the clients' sums in other places."""
        own = [tree_map(lambda leaf, k=i: leaf[k], memory) for i in range(self.plan.clients)]
        return reference.integer_sum(
            self.plan, self.model, self.records, round_plan, broadcast, own, caches, self.sources[0], stream
        )

    def fused(self, round_plan: RoundPlan, theta: Tensor, centre: Centre | None, shares: bool) -> Tensor:
        """The weighted sum of all noised gradients, from one matrix. centre: that they are about; None for no other."""
        if not len(round_plan.cohort):
            return self._noised(theta.new_zeros(theta.shape), round_plan, 0, self._per_record, shares)
        heaviest = self._per_record.max()
        full = len(round_plan.cohort) == self.plan.clients and not self._samples(round_plan.cohort)
        if self._samples(round_plan.cohort):
            shard = self._strung(round_plan, round_plan.cohort, self._per_record / heaviest)
        else:
            shard = self._matrix if full else self.records.fused(round_plan.cohort, self._per_record / heaviest)
        query = round_plan.stage.queries[0]
        if centre is not None:
            total = heaviest * self._centred_sum(query, theta, shard, centre, keep=full)
            return self._noised(total, round_plan, 0, self._per_record, shares)
        if full and self._many_on_gpu(query, theta):
            return self._noised(heaviest * self._sums(round_plan, theta), round_plan, 0, self._per_record, shares)
        with seeded_dropout(self.model, theta, lambda: dropout_seed(self.sources[0], COHORT, round_plan.t, 0)):
            total = heaviest * gradient_sum(self.split, query, theta, shard)
        return self._noised(total, round_plan, 0, self._per_record, shares)

    def _centred_sum(self, query: Query, theta: Tensor, shard: Shard, centre: Centre, *, keep: bool) -> Tensor:
        """The clipped sum about a centre. Runs have centres of their own, so a few of them are summed at a time.

        keep: hold the centred records until the centre is another one.
        """
        few = max(1, (CENTRED_ON_GPU if theta.is_cuda else CENTRED_NUMBERS) // (shard.x.shape[-2] * shard.x.shape[-1]))
        if not self.lead or len(theta) <= few:
            about, at = self._about, centre.parameters(theta)
            if about is None or not keep or about[0] is not centre or about[1] != query.clip:
                self._about = about = None  # frees its records first
                total: Callable[[Tensor], Tensor]
                total = partial(gradient_sum, self.split, query, shard=centred_records(shard, centre))
                if not keep:
                    return total(at)
                if theta.is_cuda and self.team.size == 1 and self._one_softmax(shard):
                    total = partial(_replayed, CapturedGraph(total, [at], autograd=False))
                about = self._about = centre, query.clip, total
            return about[2](at)
        rows, sums = shard.x.shape[:-1], []
        for first in range(0, len(theta), few):
            here = slice(first, first + few)
            part, own = shard, Centre(centre.mean[here], centre.factor[here])
            if shard.x.dim() > 2:  # runs have records of their own
                part = shard._replace(x=shard.x[here], y=shard.y.expand(rows)[here], mask=shard.mask.expand(rows)[here])
            sums.append(gradient_sum(self.split, query, own.parameters(theta[here]), centred_records(part, own)))
        return torch.cat(sums)

    def captured_round(
        self, round_plan: RoundPlan, theta: Tensor, state: Tree, shares: bool
    ) -> tuple[Tensor, Tensor, Tree] | None:
        """A round of runs of one linear model on a GPU: the aggregate, theta, and the state. One CUDA graph computes
        it and the rounds that follow.

        Returns:
            None where that is not possible: the noise is secret, or the rule looks at the number of the round.
        """
        query, first = round_plan.stage.queries[0], round_plan.first
        full = len(round_plan.cohort) == self.plan.clients and not self._samples(round_plan.cohort)
        if self.secret or not full or not self._many_on_gpu(query, theta) or not self._at_once(query):
            return None
        if shares and not round_plan.noise_on_sum:
            return None
        if first not in self._rounds:
            left = first + round_plan.facts.rounds - round_plan.t
            together = round_plan.facts.same_records and NOISE_BLOCK * theta.numel() <= CAPTURED_NUMBERS
            noise = self._ahead_of(round_plan, 0, theta.shape[-1:], min(NOISE_BLOCK, left) if together else 1)
            std = np.atleast_1d(self._spread_of(round_plan, 0, self._per_record))  # equal in all rounds of the stage
            width, heaviest = along(self._laid(std), 1), float(self._per_record.max())
            sums = cast(Any, self.model).summing(self._matrix, query.clip, len(theta))

            def noised_sum(at: Tensor, noise: Tensor) -> Tensor:
                return compiled(_plus_noise)(sums(at), heaviest, noise, width, self.records.x.dtype)

            try:
                rule = round_plan.stage.rule
                self._rounds[first] = CapturedRounds(noised_sum, rule, theta, state, noise, round_plan.step)
            except (RoundMattersError, TypeError):
                self._rounds[first] = None
        captured = self._rounds[first]
        if captured is None:
            return None
        return captured(theta, state, lambda: self._ahead_of(round_plan, 0, theta.shape[-1:], captured.rounds))

    def _one_softmax(self, shard: Shard) -> bool:
        """Whether the sum is of one softmax per record without class weights, which wait in the CPU's memory and so
        cannot be part of a CUDA graph. `check_sums` searches the graphs of just these sums."""
        return getattr(self.model, "plain", False) and shard.per_person == 1

    def _many_on_gpu(self, query: Query, theta: Tensor) -> bool:
        """Whether these are runs of one linear model over the same records on a GPU."""
        wide = theta.is_cuda and theta.dim() == 2 and not self.data_axes and getattr(self.model, "plain", False)
        return wide and query.clipping == FLAT_CLIPPING

    def _sums(self, round_plan: RoundPlan, theta: Tensor) -> Tensor:
        """The clipped sums of all records for each run, as one CUDA graph."""
        query = round_plan.stage.queries[0]
        if query.clip not in self._graphs:
            sums = cast(Any, self.model).summing(self._matrix, query.clip, len(theta))
            self._graphs[query.clip] = CapturedGraph(sums, [theta], autograd=False)
        return self._graphs[query.clip]([theta])

    def _spread_of(self, round_plan: RoundPlan, number: int, moved: np.ndarray) -> np.ndarray:
        """The standard deviation of the noise of a cohort's sum; one per run, if runs differ."""
        if round_plan.noise_on_sum:
            return round_plan.sum_stds[number]
        scale = (moved * round_plan.stds[number])[..., round_plan.cohort]
        return np.asarray(np.sqrt((scale**2).sum(-1)))

    def batched(
        self, round_plan: RoundPlan, broadcast: Broadcast, memory: Tree, caches: Tree, shares: bool
    ) -> tuple[Tree, Tree]:
        """The weighted sum of messages, from padded batches of clients."""
        local, lead = round_plan.stage.local, self.lead
        broadcast = tree_map(lambda leaf: leaf.unsqueeze(lead), broadcast)
        delta = any(query.kind is Kind.DELTA for query in round_plan.stage.queries)
        noise_on_sum = round_plan.noise_on_sum or (delta and local.update_memory is keep and not shares)
        empty = not len(round_plan.cohort)  # an empty secret cohort releases noise alone, so that nobody can tell
        buckets = self._buckets(round_plan) if not empty else self.records.buckets(self.everyone[:1])
        # The ranks share out the clients, or the rows of each sum if there are fewer clients than ranks.
        few = len(round_plan.cohort) < self.team.size
        team = ALONE if few else self.team
        at_once = not any(query.kind in MATRICES for query in round_plan.stage.queries)
        parts, numbers, before = [], list[int](), memory

        def message_of(clients: np.ndarray, shard: Any) -> Tree:
            ask = self._oracle(round_plan, clients, shard, add_noise=not noise_on_sum, sealed=noise_on_sum, split=few)
            mine, cache = self._of(clients, before, lead), self._of(clients, caches, self.data_axes)
            message = compute(local, ask, broadcast, mine, cache)
            numbers[:] = ask.released(message) if noise_on_sum else []
            return ask.finish(message)

        for clients, message in team.spread(buckets, message_of, at_once=at_once):
            if not noise_on_sum:
                after = local.update_memory(message, broadcast, self._of(clients, before, lead))
                chosen = torch.from_numpy(clients).to(self.records.x.device)
                memory = tree_map(lambda old, new, rows=chosen: old.index_copy(lead, rows, new), memory, after)
            weight = self._laid(0 * self.influence[clients] if empty else self.influence[clients])
            parts.append(tree_map(lambda leaf, w=weight: _weighted(leaf, w, lead), message))
        aggregate: Tree = tree_map(lambda *leaf: sum(leaf[1:], leaf[0]), *parts)
        if noise_on_sum:
            number = iter(numbers)
            aggregate = tree_map(
                lambda leaf: self._noised(leaf, round_plan, next(number), self.influence, False), aggregate
            )
        return tree_map(lambda leaf: leaf.to(self.records.x), aggregate), memory

    def _of(self, clients: np.ndarray, tree: Tree, axis: int) -> Tree:
        """The part of these clients, which stand at `axis`."""
        if isinstance(tree, tuple) and not tree:
            return tree
        chosen = torch.from_numpy(clients).to(self.records.x.device)
        return tree_map(lambda leaf: leaf.index_select(axis, chosen), tree)

    def _buckets(self, round_plan: RoundPlan) -> list[tuple[np.ndarray, Any]]:
        """The cohort in batches of clients; what they hold only where it is not drawn anew for every question."""
        if self._only_gradients(round_plan.stage) and self._samples(round_plan.cohort):
            batches = self._batches(round_plan.cohort)
            drawn = [[(clients, None)] if self._samples(clients) else self._held(clients) for clients in batches]
            return [bucket for each in drawn for bucket in each]
        held = self._whole if len(round_plan.cohort) == self.plan.clients else self._held(round_plan.cohort)
        return [part for bucket in held for part in self._parts(round_plan.stage, *bucket)]

    def _parts(self, stage: Stage, clients: np.ndarray, shard: Any) -> Iterator[tuple[np.ndarray, Any]]:
        """A bucket in batches of so few clients that their matrices fit into memory."""
        kinds = {query.kind for query in stage.queries if query.kind in MATRICES}
        rows = shard.x.shape[-1] + 1 if kinds == {Kind.GRAM} else self.model.size
        most = max(1, MATRIX_BATCH_NUMBERS // (len(self.sources) * rows**2)) if kinds else len(clients)
        if most >= len(clients):
            yield clients, shard
            return
        for first in range(0, len(clients), most):
            few = slice(first, first + most)
            yield clients[few], some_clients(shard, few)

    def _batches(self, clients: np.ndarray) -> list[np.ndarray]:
        """All clients in one batch; at client level one by one, because a client's size is private there."""
        return list(clients.reshape(-1, 1)) if self.plan.privacy.unit is Unit.CLIENT else [clients]

    def _held(self, clients: np.ndarray) -> list[tuple[np.ndarray, Any]]:
        return [bucket for batch in self._batches(clients) for bucket in self.records.buckets(batch)]

    def _only_gradients(self, stage: Stage) -> bool:
        return {query.kind for query in stage.queries} <= {*SAMPLED, Kind.DELTA} and stage.local.prepare is nothing

    def _samples(self, clients: np.ndarray) -> bool:
        return bool((self.plan.rates[clients] < 1).any())

    def _picked(self, round_plan: RoundPlan, clients: np.ndarray, call: int) -> Any:
        """A minibatch of each client, runs (if any) x clients x records."""
        if self.data_axes:
            raise SordinoError("batch: runs on data of their own take all records; leave batch at full.")
        rows = [
            assign_slots(source, Address(int(i), round_plan.t, SAMPLING, call), round_plan, self.records.sizes[i])
            for source in self.sources
            for i in clients
        ]
        shard = self.records.picked(np.tile(clients, len(self.sources)), rows)
        if not self.lead:
            return shard
        runs = len(self.sources)
        x, y, mask = (part.view(runs, -1, *part.shape[1:]) for part in (shard.x, shard.y, shard.mask))
        length = None if shard.length is None else shard.length.view(mask.shape)
        return Shard(x, y, mask, length, shard.per_person)

    def _strung(self, round_plan: RoundPlan, clients: np.ndarray, weight: np.ndarray) -> Any:
        """Minibatches of all clients as one, each record weighted by its owner's."""
        x, y, mask, length, per_person = self._picked(round_plan, clients, 0)
        mask = mask * self._laid(weight[clients]).to(mask).unsqueeze(-1)
        length = None if length is None else length.flatten(-2)
        return Shard(x.flatten(-3, -2), y.flatten(-2), mask.flatten(-2), length, per_person)

    def _noised(self, total: Tensor, round_plan: RoundPlan, number: int, moved: np.ndarray, shares: bool) -> Tensor:
        """A cohort's sum with its noise: that of the sum itself, or `moved` times each client's own, drawn as one."""
        query, axes = round_plan.stage.queries[number], 2 if round_plan.stage.queries[number].kind in MATRICES else 1
        std = self._spread_of(round_plan, number, moved)
        if not std.any():
            return total.to(self.records.x)
        shape = tuple(total.shape[-axes:])
        width = self._width(std, axes)
        # Streams of single clients that come and go do not add up to one stream.
        apart = carries(query.noise) and round_plan.facts.cohort < len(round_plan.sizes)
        if round_plan.noise_on_sum or not (shares or apart):
            noise = self._standard(round_plan, number, shape)
        else:  # each client's part of the noise, in units of all of it
            scale = (moved * round_plan.stds[number])[..., round_plan.cohort]
            part = self._laid(scale / np.expand_dims(std, -1))
            noise = (
                self._draw(round_plan, number, 0, round_plan.cohort, shape).scaled(along(part, axes)).summed(self.lead)
            )
        return noised(total, noise, width, secret=self.secret).to(self.records.x)

    def _laid(self, numbers: np.ndarray) -> Tensor:
        """The numbers on the device, copied once: a repeated copy would stall the device's queue."""
        key = numbers.tobytes()
        if key not in self._known:
            self._known[key] = torch.from_numpy(np.ascontiguousarray(numbers)).to(self.records.x.device)
        return self._known[key].view(numbers.shape)

    def _width(self, std: np.ndarray, axes: int) -> float | Tensor:
        """One for all runs, or one for each."""
        return along(self._laid(std), axes) if std.ndim else float(std)

    def _standard(self, round_plan: RoundPlan, number: int, shape: tuple[int, ...]) -> Draw:
        """Standard noise for a cohort's sum, runs (if any) x shape."""
        query = round_plan.stage.queries[number]
        if not self._at_once(query):
            return self._draw(round_plan, number, 0, np.array([COHORT]), shape).summed(self.lead)
        (noise,) = self._ahead_of(round_plan, number, shape)
        return Draw.plain(noise if self.lead else noise[0])

    def _ahead_of(self, round_plan: RoundPlan, number: int, shape: tuple[int, ...], rounds: int = 1) -> Tensor:
        """Standard noise of this round and the next ones, rounds x runs x shape, from a block drawn at once."""
        key = (number, *shape)  # stages differ in shape
        known, first, drawn = self._ahead
        if known != key or not first <= round_plan.t <= first + len(drawn) - rounds:
            first, fitting = round_plan.t, BLOCK_NUMBERS // (math.prod(shape) * len(self.sources))
            block = max(rounds, min(NOISE_BLOCK, fitting))
            at = [Address(COHORT, t, number) for t in range(first, first + block)]
            self._ahead = key, first, self._counted(at, shape)
        return self._ahead[2][round_plan.t - first :][:rounds]

    @cached_property
    def _joint(self) -> Source | None:
        """A source that draws for all runs by one call, if the runs' sources are its rows; None otherwise."""
        return joint_source(self.sources) if self.lead else None

    @cached_property
    def _all_counted(self) -> bool:
        return all(isinstance(source, Counted) for source in self.sources)

    def _at_once(self, query: Query) -> bool:
        return self._all_counted and mechanism_of(query.noise).is_plain and query.kind not in MATRICES

    def _counted(self, at: list[Address], shape: tuple[int, ...]) -> Tensor:
        """Addresses x runs x shape."""
        sources = [source for source in self.sources if isinstance(source, Counted)]
        device = self.records.x.device
        one_kernel = bool(self.lead) and device.type == "cuda"
        drawn = counted(sources, at, math.prod(shape), str(device), compiled if one_kernel else lambda f: f)
        return drawn.view(len(at), len(sources), *shape)

    def _draw(self, round_plan: RoundPlan, number: int, call: int, clients: np.ndarray, shape: tuple[int, ...]) -> Draw:
        """Runs (if any) x clients x shape."""
        query = round_plan.stage.queries[number]
        at = [Address(int(i), round_plan.t, number, call) for i in clients]
        if self._at_once(query):
            drawn = self._counted(at, shape).transpose(0, 1)
            return Draw.plain(drawn if self.lead else drawn[0])
        device = self.records.x.device
        if self._joint is not None:
            runs = (len(self.sources), *shape)
            return stack([standard_noise(self._joint, query, a, round_plan.first, runs, device) for a in at], 1)
        draws = [
            stack([standard_noise(source, query, a, round_plan.first, shape, device) for a in at])
            for source in self.sources
        ]
        return stack(draws) if self.lead else draws[0]

    def _oracle(
        self,
        round_plan: RoundPlan,
        clients: np.ndarray,
        shard: Any,
        *,
        preparing: bool = False,
        add_noise: bool = True,
        sealed: bool = False,
        split: bool = False,
    ) -> Oracle:
        def draw(number: int, call: int, shape: tuple[int, ...]) -> Draw:
            return self._draw(round_plan, number, call, clients, shape)

        # A rank may hold only those clients of a batch whose minibatches are all of their records.
        like, drawn = self.records.x, shard is None or self._samples(clients)
        return Oracle(
            self.split if split else self.model,
            lambda: shard,
            round_plan.stage,
            sizes=self._laid(round_plan.sizes[clients].astype(float)).to(like),
            stds=[self._laid(std[..., clients]) for std in round_plan.stds],
            draw=draw,
            pick=(lambda call: self._picked(round_plan, clients, call)) if drawn else None,
            rates=self._laid(round_plan.rates[clients]).to(like) if drawn else None,
            dropout_seed=lambda call: dropout_seed(self.sources[0], int(clients[0]), round_plan.t, call),
            facts=round_plan.facts,
            secret=self.secret,
            runs=(len(self.sources),) * self.lead,
            preparing=preparing,
            add_noise=add_noise,
            sealed=sealed,
        )


def _replayed(graph: CapturedGraph, theta: Tensor) -> Tensor:
    return graph([theta])


def _plus_noise(total: Tensor, factor: float, noise: Tensor, width: Tensor, dtype: torch.dtype) -> Tensor:
    return (factor * total + width * noise).to(dtype)


def _weighted(leaf: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The sum over clients, which stand at `axis`, in float64. `weight`: of clients, or of runs and clients."""
    weight = weight.double().reshape(*weight.shape, *[1] * (leaf.dim() - axis - 1))
    return (weight * leaf).sum(axis)
