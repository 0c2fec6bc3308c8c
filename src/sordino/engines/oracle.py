"""A client's side of a round: every path from data to message goes through `Oracle`, in every engine.

`Oracle` answers the questions of a local rule. It clips and noises each answer and counts the calls, and does the same
with the finished message. One code serves one client and a batch of clients: per-client numbers then carry a leading
axis.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    FLAT_CLIPPING,
    SAFETY,
    SAMPLED,
    Batch,
    Blend,
    Broadcast,
    Centre,
    Correlated,
    Facts,
    Kind,
    Local,
    Query,
    Shard,
    Stage,
    Tree,
    serves,
)
from sordino.data.records import row_norms
from sordino.engines.preconditions import MATRICES, check_message
from sordino.engines.schedule import ROUNDING, RoundPlan
from sordino.errors import OverspentError, SordinoError
from sordino.privacy import calibration
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.mechanisms.gaussian import Draw, grid_of, settle
from sordino.privacy.mechanisms.laws import DiscreteGaussianNoise, mechanism_of
from sordino.privacy.mechanisms.quantization import Answer
from sordino.privacy.mechanisms.random import Address, Source
from sordino.privacy.plan import Plan, plan_mechanism, sent_answers
from sordino.privacy.releases import QueryNoise
from sordino.tree import leaves, rebuild, tree_map

SEALED = (
    "compute: it computes with an answer, and here noise is added to the sum of answers alone. An answer has no noise "
    "yet, so what follows from it, such as the point of the next question, would tell of records beyond its bound. "
    "Send answers as they are, and ask at points that follow from the broadcast; or leave this trust model out of "
    "`proves`."
)
ONE_BATCH = "the bound of this stage is about one minibatch per round; ask all questions about it, with on=batch"
_generator = threading.RLock()
DrawNoise = Callable[[int, int, tuple[int, ...]], Draw]  # (query number, call, shape of one client's draw) -> noise
PickBatch = Callable[[int], Shard]  # (number of the minibatch) -> its records


def standard_noise(
    source: Source, query: Query, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> Draw:
    """Noise of variance 1 for one release.

    Args:
        source: The run's randomness.
        query: The query whose answer is released; it says whether noise is correlated or symmetric.
        at: Client, round, query and call of the release.
        first: First round of the stage; correlated noise derives its draws there.
        shape: Shape of the answer.
        device: Where the answer is.

    Returns:
        The draw.
    """
    z = mechanism_of(query.noise).standard_noise(source, at, first, shape, device)
    # Symmetric answers get symmetric noise: variance 1 on the diagonal and 1/2 off it is white in the Frobenius norm.
    return z.symmetric() if query.kind in MATRICES else z


def noised(total: Tensor, noise: Draw, std: Tensor | float, *, secret: bool) -> Tensor:
    """total + std * noise, in float64.

    Where the noise is secret, the result is the exactly rounded value of the real-number sum on a public grid, so
    rounding is post-processing of the Gaussian mechanism.
    """
    noise = noise.to(total.device).scaled(std)
    return settle(total.double(), noise, grid_of(std)) if secret else total.double() + noise.z


def clipped(message: Tensor, clip: float) -> Tensor:
    """Rows in float64, scaled down to norm `clip` (inf: unchanged); a row that is not finite becomes zero."""
    # The norm is summed in float64 because a float32 sum over a long row falls short by more than the safety margin.
    norm = torch.linalg.vector_norm(message, dim=-1, keepdim=True, dtype=torch.float64)
    message = message.double()
    if math.isfinite(clip):
        bound = clip * (1 - SAFETY)
        message = message * torch.div(bound, norm.clamp_min(bound))  # the factor is exactly 1 for a row within the clip
    return torch.where(torch.isfinite(norm), message, 0.0)


def gradient_sum(
    model: Any, query: Query, theta: Tensor, shard: Shard, *scale: Tensor, blend: Blend | None = None
) -> Tensor:
    """The clipped sum that a GRADIENT query asks for. Only models that serve another law of clipping are told of it."""
    how: dict[str, Any] = {} if query.clipping == FLAT_CLIPPING else {"clipping": query.clipping}
    if blend is not None:
        if not serves(model, "blends"):
            raise SordinoError(
                "model: its terms are of one gradient each, and the method asks for two gradients in one term; use a "
                "linear model, a network, or a method such as dp-fedadam."
            )
        how["blend"] = blend
    total: Tensor = model.clipped_sum(theta, shard, query.clip, *scale, **how)
    return total


def centred_records(shard: Shard, centre: Centre) -> Shard:
    """The records with factor (x - mean) for x, each a function of the record itself and of public numbers.

    They are rounded to the type of x before anything is computed from them, so sums over them have the sensitivity of
    sums over any other records.
    """
    mean, factor = (part.to(shard.x).unsqueeze(-2) for part in centre)
    x = (shard.x - mean).mul_(factor)
    length = row_norms(x)
    return shard._replace(x=x, y=shard.y.expand(length.shape), mask=shard.mask.expand(length.shape), length=length)


@contextmanager
def seeded_dropout(model: Any, like: Tensor, seed: Callable[[], int] | None) -> Iterator[None]:
    """Meanwhile dropout is drawn from the run's own source, because a mask that others can predict from a record's
    position in the batch would reveal who is in the batch.

    Args:
        model: The model; one without randomness is left alone.
        like: A tensor on the device of the sums.
        seed: Draws the seed; None leaves torch's own.
    """
    if not getattr(model, "random", False) or seed is None:
        yield
        return
    # All threads draw from one generator of torch: another one would restore or seed it in the middle of this sum.
    with _generator, torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(seed())
        yield


class Unchanged:
    """Notices whether somebody writes to a tensor, as `g.mul_(2)` and `g /= 2` do.

    Args:
        tree: The tensor, or several of them.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._marks = [_mark(leaf) for leaf in leaves(tree)]

    @property
    def holds(self) -> bool:
        """Whether nobody did."""
        return all(
            mark == leaf._version if isinstance(mark, int) else torch.equal(mark, leaf)
            for mark, leaf in zip(self._marks, leaves(self.tree), strict=True)
        )


def _mark(leaf: Tensor) -> int | Tensor:
    """How often a tensor was written to; a copy where PyTorch does not count that."""
    return leaf.clone() if leaf.is_inference() else leaf._version


def compute(local: Local, ask: Any, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
    """A client's message.

    Args:
        local: The local rule.
        ask: What it may ask.
        broadcast: What the server sends.
        memory: What the client remembers.
        cache: What it prepared.

    Returns:
        The message.

    Raises:
        SordinoError: The rule writes to what the server sent, or to its memory. So answers without noise could leave
            the client beside the message. Or it computes with an answer whose noise is added to the sum.
    """
    held = Unchanged((broadcast.theta, broadcast.extras, memory))
    try:
        message: Tree = local.compute(ask, broadcast, memory, cache)
    except (RuntimeError, TypeError, ValueError) as error:
        told = isinstance(error, SordinoError) or not getattr(ask, "sealed", False)
        if told or not re.search("meta|same device", str(error), re.IGNORECASE):
            raise
        raise SordinoError(SEALED) from None  # PyTorch refused a tensor without numbers
    if not held.holds:
        raise SordinoError(
            "compute: it writes to the broadcast, or to its memory, in place, as theta -= g does; what it writes would "
            "leave the client beside its message. Make a new tensor, as in theta = theta - g."
        )
    return message


class Oracle:
    """`ask`: the only way from a local rule to its data.

    Args:
        model: The model, which computes clipped sums.
        shard: Returns the records; called at most once.
        stage: The stage, whose queries say what may be asked.
        sizes: Public number of records per client.
        stds: Per query, the noise of each client's sum.
        draw: Draws the noise of one answer.
        pick: Draws a minibatch; None if all records are used.
        rates: Probability that a record enters a minibatch; None if all records are used.
        dropout_seed: Seed of the model's own randomness, by call.
        facts: Public numbers of the run.
        secret: The noise comes from a secret source, so releases are rounded to a public grid.
        runs: Number of runs that are trained together, as a shape; () for one.
        preparing: The rule builds a cache: released queries may not be asked, because their noise belongs to rounds.
        add_noise: False if the noise is added later, to the sum or to integers (`encode_integers`).
        sealed: The noise is added later, and so the rule gets the form of an answer in place of its numbers. `finish`
            puts the numbers into the message. A message that is noised as a whole needs the numbers, and gets them.
    """

    def __init__(
        self,
        model: Any,
        shard: Callable[[], Shard],
        stage: Stage,
        *,
        sizes: Tensor,
        stds: list[Tensor],
        draw: DrawNoise,
        pick: PickBatch | None = None,
        rates: Tensor | None = None,
        dropout_seed: Callable[[int], int] | None = None,
        facts: Facts,
        secret: bool,
        runs: tuple[int, ...] = (),
        preparing: bool = False,
        add_noise: bool = True,
        sealed: bool = False,
    ) -> None:
        self.sealed = sealed and all(query.kind is not Kind.DELTA for query in stage.queries)
        self._inside: dict[int, Tensor] = {}  # numbers of sealed answers, by the identity of their form
        self._model, self._all, self._stage = model, cache(shard), stage
        self._sizes, self._stds, self._draw = sizes, stds, draw
        self._pick, self._rates, self._dropout_seed = pick, rates, dropout_seed
        self._secret, self.runs = secret, runs
        self._axes = sizes.dim() + len(runs) + 1  # axes of a message: clients, runs, and its own
        self._add_noise, self._preparing = add_noise, preparing
        # A lemma's bound relies on answers with the precision of float64.
        self._wide = any(query.bound is not None for query in stage.queries)
        lemmas = [query.bound for query in stage.queries if query.bound is not None]
        self._one_batch = pick is not None and any(lemma.sampled for lemma in lemmas)
        self._calls = [0] * len(stage.queries)
        self._answers: list[tuple[int, Unchanged]] = []  # (query number, answer)
        self._batches: list[Shard] = []
        self._batch_uses: list[int] = []
        self.facts = facts
        self.records = (sizes.unsqueeze(-1) if sizes.dim() else sizes).clone()  # a rule may write to it

    def gradient(
        self,
        theta: Tensor,
        on: Batch | None = None,
        scale: Tensor | None = None,
        part: Tensor | None = None,
        blend: Blend | None = None,
        centre: Centre | None = None,
    ) -> Tensor:
        """The clipped, noised mean gradient at theta; see `Ask.gradient`.

        Entries outside of a `part` are multiplied by 0 before the clip, so a term within the clip loses nothing by
        leaving them out: its sensitivity is that of the clip, and no noise is drawn for them.
        """
        if blend is not None and blend.theta.shape != theta.shape:
            raise SordinoError(
                f"blend: its theta has shape {tuple(blend.theta.shape)}, and must have {tuple(theta.shape)}."
            )
        if part is not None:
            inside = torch.zeros_like(theta).index_fill(-1, part, 1.0)
            scale = inside if scale is None else inside * scale
        number, rest = (self.sample() if on is None else on).number, () if scale is None else (scale,)
        batch = self._drawn(number)
        if centre is not None:
            if scale is not None or blend is not None or not serves(self._model, "centres"):
                raise SordinoError(
                    "centre: features are centred for plain gradients of linear models with a bias; use such a model, "
                    "or leave it out (auto: centred = false)."
                )
            theta, batch = centre.parameters(theta), centred_records(batch, centre)
        self._batch_uses[number] += 1
        place = self._number(Kind.GRADIENT)
        query = self._stage.queries[place]
        if self._batch_uses[number] > query.joint:
            raise OverspentError(f"a minibatch was asked about more often than joint={query.joint} of the query allows")
        if sum(map(bool, self._batch_uses)) > query.calls // query.joint and self._calls[place] < query.calls:
            raise OverspentError("more minibatches were asked about than the query's `calls` over `joint`")

        def total(clip: float) -> Tensor:
            whole = gradient_sum(self._model, query, theta, batch, *rest, blend=blend)
            return whole if part is None else whole.index_select(-1, part)

        return self._answer(Kind.GRADIENT, 1, total)

    def count(self, theta: Tensor, scale: Tensor) -> Tensor:
        """The noised count of short gradients; see `Ask.count`."""
        batch = self._batches[self.sample().number]
        return self._answer(Kind.COUNT, 1, lambda clip: self._model.count_sum(theta, batch, scale))

    def calibration(self, theta: Tensor, differences: bool = False) -> Tensor:
        """The noised class shares of labels and of predictions; see `Ask.calibration`."""
        shard = self._whole()
        return self._answer(
            Kind.CALIBRATION, 1, lambda clip: self._model.calibration_sum(theta, shard, clip, differences)
        )

    def slope(self, theta: Tensor) -> Tensor:
        """The noised means that a slope is calibrated by; see `Ask.slope`."""
        return self._answer(Kind.SLOPE, 1, lambda clip: self._model.slope_sum(theta, self._whole(), clip))

    def curvature(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        """The mean Hessian at theta."""
        shard = self._about(Kind.CURVATURE, on)
        return self._answer(Kind.CURVATURE, 2, lambda clip: self._model.curvature_sum(theta, shard, clip), on)

    def curvature_times(self, theta: Tensor, v: Tensor, on: Batch | None = None) -> Tensor:
        """The mean Hessian at theta times v, without building the Hessian."""
        if any(query.kind is Kind.CURVATURE and query.noise is not None for query in self._stage.queries):
            raise OverspentError("the curvature query is released here: ask for the whole matrix, which is noised once")
        shard = self._about(Kind.CURVATURE, on)
        return self._answer(Kind.CURVATURE, 1, lambda clip: self._model.curvature_times(theta, shard, clip, v), on)

    def fisher(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        """The mean of g g^T over the clipped gradients at theta."""
        shard = self._about(Kind.FISHER, on)
        return self._answer(Kind.FISHER, 2, lambda clip: self._model.fisher_sum(theta, shard, clip), on)

    def gram(self, constant: float = 1.0) -> Tensor:
        """The mean of u u^T over clipped records; see `Ask.gram`."""
        how = {} if constant == 1 else {"constant": constant}  # only models that serve another constant are told of it

        def total(clip: float) -> Tensor:
            return self._of_each_run(self._model.gram_sum(self._whole(), clip, **how))

        return self._answer(Kind.GRAM, 2, total)

    def leaves(self, theta: Tensor, tree: Tensor) -> Tensor:
        """The noised residuals and curvatures by leaf of one tree; see `Ask.leaves`."""
        number = int(tree.flatten()[0]) % int(self._model.trees)
        batch = self._batches[self.sample().number]
        return self._answer(Kind.LEAVES, 1, lambda clip: self._model.leaves_sum(theta, batch, clip, number))

    def tally(self, theta: Tensor) -> Tensor:
        """The mean of one bounded vector per record; see `Ask.tally`."""
        return self._answer(Kind.TALLY, 1, lambda clip: self._model.tally_sum(theta, self._whole(), clip))

    def std(self, kind: Kind) -> Tensor:
        """The standard deviation of the noise on one number of an answer; public."""
        number = self._number(kind)
        return along(self._stds[number].to(self._sizes) / self._divisor(kind), 1)

    def sample(self) -> Batch:
        """Draw a minibatch, or take all records where the plan draws none."""
        number = len(self._batches)
        if self._one_batch and (number or self._preparing):  # a cache would carry one sample into other rounds
            raise OverspentError(ONE_BATCH)
        batch = self._all() if self._pick is None else self._pick(number)
        self._batches.append(batch)
        self._batch_uses.append(0)
        if self._rates is None:
            return Batch(number)
        slots = batch.mask.shape[-1] // batch.per_person  # public, as is the expected number
        return Batch(number, slots / float((self._sizes * self._rates).min()))

    def finish(self, message: Tree) -> Tree:
        """Clip and noise the finished message, if the stage has a DELTA query.

        Raises:
            SordinoError: The message is not one vector per client.
        """
        check_message(message)
        for number, query in enumerate(self._stage.queries):
            if query.kind is Kind.DELTA:
                if not isinstance(message, Tensor) or message.dim() != self._axes:
                    raise SordinoError("message: what is noised as a whole must be one vector per client; flatten it.")
                message = clipped(message, query.clip)
                message = self._noised(message, number, 0, 1).to(self._sizes.dtype) if self._add_noise else message
        if not self._inside:
            return message

        def opened(leaf: Tensor) -> Tensor:
            return self._inside.get(id(leaf), leaf)

        return tree_map(opened, message)

    def released(self, message: Tree) -> list[int]:
        """The query that each leaf of a message without noise answers (for DELTA: the query of the message).

        Raises:
            SordinoError: A leaf is not an unchanged answer, so its sensitivity is not known.
        """
        check_message(message)
        delta = [number for number, query in enumerate(self._stage.queries) if query.kind is Kind.DELTA]
        if delta:
            return delta
        known = {id(answer.tree): number for number, answer in self._answers if answer.holds}
        if not all(id(leaf) in known for leaf in leaves(message)):
            raise SordinoError(
                "message: it is not one of the answers. Noise is added to the sum of answers, so each answer must be "
                "sent unchanged; return g, not 2 * g."
            )
        numbers = [known[id(leaf)] for leaf in leaves(message)]
        if len(set(numbers)) < len(numbers):  # both would get the same noise, which their difference cancels
            raise SordinoError(
                "message: it holds two answers of one query, and the sum has one noise for it; send one."
            )
        return numbers

    def _drawn(self, number: int) -> Shard:
        """The records of a minibatch of this round."""
        if not 0 <= number < len(self._batches):
            raise OverspentError(f"minibatch {number} was not drawn in this round; take one from ask.sample()")
        return self._batches[number]

    def _whole(self) -> Shard:
        """All records, which may not be asked about where a lemma speaks of one minibatch."""
        if self._one_batch:
            raise OverspentError(ONE_BATCH)
        return self._all()

    def _about(self, kind: Kind, on: Batch | None) -> Shard:
        """The records that a matrix is about: all, or those of a minibatch if the matrix stays at the client."""
        if on is None:
            return self._whole()
        if self._stage.queries[self._number(kind)].noise is not None:
            raise OverspentError(f"the {kind} query is released and accounted for with all records; leave `on` out")
        return self._drawn(on.number)

    def _answer(self, kind: Kind, axes: int, total: Callable[[float], Tensor], on: Batch | None = None) -> Tensor:
        number = self._number(kind)
        query, call = self._stage.queries[number], self._calls[number]
        if self._preparing and query.noise is not None:
            raise OverspentError(
                f"prepare asked the {kind} query, whose answers are released; only `compute` may ask it"
            )
        if call >= query.calls:
            calls = "1 call" if query.calls == 1 else f"{query.calls} calls"
            raise OverspentError(
                f"the {kind} query declares {calls} per round and was asked once more; declare all of them, as in "
                f"Query(…, calls={query.calls + 1}), which costs more noise, or ask less often"
            )
        self._calls[number] += 1
        draw = self._dropout_seed
        with seeded_dropout(self._model, self._sizes, None if draw is None else lambda: draw(sum(self._calls))):
            answer = total(query.clip).double()
        if axes == 2:
            # Noise is symmetric, so what two equal entries differ by in the last bit would be released without any.
            answer = answer.triu() + answer.triu(1).mT
        if answer.dim() > self._axes - 1 + axes:  # all would carry the same noise, which their difference cancels
            raise OverspentError(f"the {kind} query was asked about several models at once; ask about one")
        released = query.noise is not None
        if released and self._add_noise:
            answer = self._noised(answer, number, call, axes)
        answer = answer / along(self._divisor(kind, on), axes)
        if not (self._wide or (released and not self._add_noise)):
            answer = answer.to(self._sizes.dtype)
        given = answer
        if released and self.sealed:
            with torch.inference_mode(False):  # whether it is written to is not counted there
                given = torch.empty_like(answer, device="meta")
            self._inside[id(given)] = answer
        self._answers.append((number, Unchanged(given)))
        return given

    def _divisor(self, kind: Kind, on: Batch | None = None) -> Tensor:
        """The number of records an answer is about: all of them, or the expected size of a minibatch."""
        drawn = kind in SAMPLED or on is not None
        return self._sizes * self._rates if drawn and self._rates is not None else self._sizes

    def _of_each_run(self, answer: Tensor) -> Tensor:
        """Repeat an answer that does not depend on theta for each run; a cache is shared by all runs."""
        data_per_run = self._all().x.dim() - 2 > self._sizes.dim()
        return answer if data_per_run or self._preparing else answer.expand(*self.runs, *answer.shape)

    def _number(self, kind: Kind) -> int:
        for number, query in enumerate(self._stage.queries):
            if query.kind is kind:
                return number
        raise OverspentError(f"this stage declares no {kind} query; add Query(Kind.{kind.name}, clip) to it")

    def _noised(self, answer: Tensor, number: int, call: int, axes: int) -> Tensor:
        std = along(self._stds[number], axes)
        if not std.any():
            return answer
        return noised(answer, self._draw(number, call, tuple(answer.shape[-axes:])), std, secret=self._secret)


def encode_integers(
    plan: Plan, round_plan: RoundPlan, i: int, message: Tree, numbers: list[int], source: Source
) -> np.ndarray:
    """Client i's message as integers modulo 2^32: weighted, randomly rounded, and noised, answer after answer.

    Args:
        plan: A plan with integers.
        round_plan: The round.
        i: The client.
        message: Its message without noise.
        numbers: The query that each leaf of the message answers (`Oracle.released`).
        source: The client's randomness.

    Returns:
        One uint32 per number of the plan's answers.

    Raises:
        SordinoError: The message does not hold the plan's answers.
    """
    stage, parts = plan.stage_of(round_plan.t), leaves(message)
    sent = sent_answers(plan, stage)
    described = [(answer.query, answer.shape) for answer in sent]
    held = [(number, tuple(part.shape)) for number, part in zip(numbers, parts, strict=True)]
    if held != described:
        raise SordinoError(f"message: it holds answers {held} (query, shape), and the plan describes {described}.")
    encoded = []
    for place, (answer, part) in enumerate(zip(sent, parts, strict=True)):
        noise, mechanism = _integer_noise(plan, stage, answer)
        at = Address(i, round_plan.t, answer.query)
        dither_at = Address(i, round_plan.t, ROUNDING, place)
        values = plan.weights[i] * answer.flat(part.double().numpy())
        variance, steps = calibration.integer_variance(plan, noise), 1 / (noise.step * noise.weight.max())
        encoded.append(mechanism.encode(values, steps, variance, source, at, dither_at))
    return np.concatenate(encoded)


def decode_sum(plan: Plan, round_plan: RoundPlan, total: np.ndarray) -> Tree:
    """The aggregate, from the sum of integers modulo 2^32: a tree of the messages' form."""
    stage = plan.stage_of(round_plan.t)
    sent, parts = sent_answers(plan, stage), list[Tensor]()
    ends = np.cumsum([answer.dimension for answer in sent])
    if total.shape != (ends[-1],):
        raise SordinoError(f"total: it has shape {total.shape}, and the plan's answers have {ends[-1]} numbers.")
    for answer, integers in zip(sent, np.split(total, ends[:-1]), strict=True):
        noise, mechanism = _integer_noise(plan, stage, answer)
        values = mechanism.decode(integers, 1 / (noise.step * noise.weight.max()))
        parts.append(torch.from_numpy(answer.unflat(values)))
    return parts[0] if len(parts) == 1 else rebuild(tuple(parts), round_plan.stage.local.message)


class IntegerStream:
    """What a stage with correlated noise needs of its earlier rounds where integers are added up.

    Round t sends row t of `encoder @ x` with fresh noise, so a client needs its earlier answers x. The decoder's row t
    gives the aggregate of the round, so the server needs the earlier sums.

    Attributes:
        answers: Of each client, its answers by round.
        sums: The opened sums by round.
    """

    def __init__(self) -> None:
        self.answers: dict[int, dict[int, Tensor]] = {}
        self.sums: dict[int, Tensor] = {}


def rows_of_stream(by_round: Mapping[int, Tensor]) -> Tensor:
    """One row per round, its number first: a tree that can be stored."""
    return torch.stack([torch.cat([x.new_tensor([float(t)]), x]) for t, x in sorted(by_round.items())])


def stream_of_rows(rows: Tree) -> dict[int, Tensor]:
    """What `rows_of_stream` stored; nothing if it is ()."""
    return {} if isinstance(rows, tuple) else {int(row[0]): row[1:] for row in rows}


def stream_factors(plan: Plan, round_plan: RoundPlan) -> Correlated | None:
    """The factors of the stage's stream; None if its noise is not correlated."""
    if plan.integers is None:
        return None
    for query in round_plan.stage.queries:
        if isinstance(query.noise, Correlated):
            return query.noise
        if isinstance(query.noise, InverseRoot):
            return Correlated(query.noise.encoder, query.noise.decoder)
    return None


def combined(factor: np.ndarray, round_plan: RoundPlan, by_round: Mapping[int, Tensor]) -> Tensor:
    """The factor's row of this round times what earlier rounds of the stage and this one gave; absent ones are 0."""
    row = factor[round_plan.t - round_plan.first]
    parts = [float(row[s - round_plan.first]) * by_round[s].double() for s in sorted(by_round)]
    return torch.stack(parts).sum(0)


def masked_size(plan: Plan, t: int) -> int:
    """Integers of one message of round t."""
    return sum(answer.dimension for answer in sent_answers(plan, plan.stage_of(t)))


def _integer_noise(plan: Plan, stage: int, answer: Answer) -> tuple[QueryNoise, DiscreteGaussianNoise]:
    """The noise of an answer, and its mechanism."""
    place = stage, answer.query
    noise = next(noise for noise in calibration.query_noises(plan) if (noise.stage, noise.number) == place)
    mechanism = plan_mechanism(plan, *place)
    if not isinstance(mechanism, DiscreteGaussianNoise):
        raise SordinoError("integers: the plan has none; set Plan.integers.")
    return noise, mechanism


def along(value: Tensor, axes: int) -> Tensor:
    """A per-client number, reshaped to multiply an answer with that many axes of its own."""
    return value.reshape(value.shape + (1,) * axes)
