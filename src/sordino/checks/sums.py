"""The contract of sums: in the arithmetic that ships, one record moves a sum by no more than its query claims.

The search for neighbours (`search`) works on small clients in float64. It cannot find the effect of rounding on long
sums. A sum in one float32 accumulator has no bounded sensitivity: one more record can lift it over a power of two, and
then all later records are rounded differently. The pairs of neighbours here provoke this, with up to a million float32
records, for every kind of sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Adjacency, Blend, Centre, Shard
from sordino.engines.oracle import centred_records
from sordino.models import cuda_graphs
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.trees import Trees

ROWS = (10_000, 100_000, 1_000_000)
BLOCKS = (1, 384)  # records per nonzero record: kernels that add up blocks of records round between blocks
SUM_CLIP = 1.0
LONG_RECORD = 1e4  # length of a record that is clipped
SHORT_RECORD = 1e-3  # length of a record that is not clipped

ShardSum = Callable[[Shard], Tensor]


class SumFinding(NamedTuple):
    """How far the worst pair of neighbours moved one kind of sum, relative to the claim of its query."""

    query: str
    adjacency: str
    rows: int
    reached: float

    @property
    def problems(self) -> list[str]:
        if self.reached > 1:
            return [
                f"sums: one of {self.rows:,} records moves the {self.query} sum by {self.reached:.6g} of its "
                f"sensitivity under {self.adjacency}"
            ]
        return []


def kinds(model: Callable[[Any], Any], device: str) -> Iterator[tuple[str, bool, ShardSum]]:
    """Every kind of sum at theta = 0: its name, whether its terms are semi-definite, and the sum of a shard."""
    logistic, softmax, pair = (
        model(linear) for linear in (Linear(1, 1, Loss.LOGISTIC), Linear(1, 2), Linear(2, 1, Loss.LOGISTIC))
    )
    two, four, three = (torch.zeros(size, device=device) for size in (2, 4, 3))
    yield "logistic gradient", False, lambda shard: logistic.clipped_sum(two, shard, SUM_CLIP)
    yield "softmax gradient", False, lambda shard: softmax.clipped_sum(four, shard, SUM_CLIP)
    yield "scaled gradient", False, lambda shard: logistic.clipped_sum(two, shard, SUM_CLIP, torch.ones_like(two))
    blend = Blend(two, (-0.5, 1.5))
    yield "blended gradient", False, lambda shard: logistic.clipped_sum(two, shard, SUM_CLIP, blend=blend)
    yield "gradient of two runs", False, lambda shard: softmax.clipped_sum(four.expand(2, -1), shard, SUM_CLIP)[0]
    yield "gradient of persons", False, lambda shard: logistic.clipped_sum(two, repeated(shard), SUM_CLIP)
    centre = Centre(torch.zeros(1, device=device), torch.full((1,), 2.0, device=device))  # the pairs lie about 0
    about = centre.parameters(four)
    yield "centred gradient", False, lambda shard: softmax.clipped_sum(about, centred_records(shard, centre), SUM_CLIP)
    if device == "cuda":
        yield from graph_kinds(softmax, four, centre)
    yield "gram", True, lambda shard: pair.gram_sum(doubled(shard), SUM_CLIP)
    yield "gram, constant 7", True, lambda shard: pair.gram_sum(doubled(shard), SUM_CLIP, 7.0)
    yield "gram of persons", True, lambda shard: pair.gram_sum(repeated(doubled(shard)), SUM_CLIP)
    yield "curvature", True, lambda shard: pair.curvature_sum(three, doubled(shard), SUM_CLIP)
    yield "fisher", True, lambda shard: pair.fisher_sum(three, doubled(shard), SUM_CLIP)
    hazards = model(Hazards(1, (0.0, 1.0)))
    yield "hazards gradient", False, lambda shard: hazards.clipped_sum(two, timed(shard), SUM_CLIP)
    trees = model(Trees(1, 1, Loss.SQUARES, trees=1, depth=1))
    yield "leaves", False, lambda shard: trees.leaves_sum(three, in_first_leaf(shard), SUM_CLIP, 0)


def graph_kinds(softmax: Any, theta: Tensor, centre: Centre) -> Iterator[tuple[str, bool, ShardSum]]:
    """The sums that simulation replays as CUDA graphs. A mutant's sum is on the CPU, so none is captured."""

    def replayed(total: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        if not isinstance(softmax, Linear):
            return total(at)
        return cuda_graphs.CapturedGraph(total, [at], autograd=False)([at])

    def centred(shard: Shard, at: Tensor, own: Centre) -> Tensor:
        records = centred_records(shard, own)
        return replayed(lambda now: softmax.clipped_sum(now, records, SUM_CLIP), own.parameters(at))

    two, each = theta.expand(2, -1), Centre(*(part.expand(2, -1) for part in centre))
    yield "gradient of two runs, CUDA graph", False, lambda shard: replayed(softmax.summing(shard, SUM_CLIP, 2), two)[0]
    yield "centred gradient, CUDA graph", False, lambda shard: centred(shard, theta, centre)
    yield "centred gradient of two runs, CUDA graph", False, lambda shard: centred(shard, two, each)[0]


def timed(shard: Shard) -> Shard:
    """Labels of survival: an event for 0, none for 1. Their gradients have opposite signs."""
    return shard._replace(y=0.5 - 1.5 * shard.y.to(shard.x))


def in_first_leaf(shard: Shard) -> Shard:
    """Numbers as labels: the feature with the sign that the label chooses; all features lie below every edge."""
    sign = 1.0 - 2.0 * shard.y.to(shard.x)
    return shard._replace(x=torch.full_like(shard.x, -2.0), y=sign * shard.x[..., 0])


def doubled(shard: Shard) -> Shard:
    """Records (a, ±a), so that entry (0, 1) of a matrix has the sign that the label chooses."""
    sign = 1.0 - 2.0 * shard.y.to(shard.x)
    return Shard(torch.cat([shard.x, sign.unsqueeze(-1) * shard.x], -1), shard.y, shard.mask)


def repeated(shard: Shard) -> Shard:
    """Persons with two equal records each, in place of records."""
    x, y, mask = (part.repeat_interleave(2, 0) for part in shard[:3])
    return Shard(x, y, mask, None, 2)


def _one_record(size: float, device: str) -> Shard:
    x, y, mask = (torch.tensor(part, device=device) for part in ([[size]], [0], [1.0]))
    return Shard(x, y, mask)


def pair(rows: int, term: float, gain: float, root: bool, block: int, device: str) -> Shard:
    """Records whose sum, in one float32 accumulator, depends strongly on the first record.

    The first records have length LONG_RECORD and bring the sum just above a power of two. The others come in pairs of
    0.6 and -0.4 units in the last place. Below the power of two a pair adds nothing; above it, a pair adds one unit.

    Args:
      rows: number of records.
      term: what a long record adds to the entry under test.
      gain: the term of a short record, divided by its length (or its square).
      root: terms are squares of records.
      block: only the first record of each block is nonzero.
      device: where the tensors are.

    Returns:
      The records.
    """
    power = 2.0 ** math.floor(math.log2(0.55 * rows * term))
    path = np.cumsum(np.full(rows, term, np.float32), dtype=np.float32)  # in order, as one accumulator would
    first = int(np.searchsorted(path, power)) + 1
    unit = power * 2.0**-23
    x, y = np.zeros((rows, 1), np.float32), np.zeros(rows, np.int64)
    x[:first] = LONG_RECORD
    heads = np.arange(-(-first // block) * block, rows, block)
    for chosen, size, label in ((heads[0::2], 0.6 * unit, 0), (heads[1::2], 0.4 * unit, 1)):
        x[chosen, 0], y[chosen] = math.sqrt(size / gain) if root else size / gain, label
    return Shard(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), torch.ones(rows, device=device))


def sums(
    model: Callable[[Any], Any] = lambda linear: linear,
    *,
    rows: tuple[int, ...] = ROWS,
    device: str = "cpu",
) -> Iterator[SumFinding]:
    """The worst pair of neighbours for each kind of sum and adjacency, in float32.

    Args:
      model: wraps each linear model; a mutant wraps it in `OneAccumulator`.
      rows: numbers of records to try.
      device: `cpu` or `cuda`.

    Yields:
      One finding per kind of sum and adjacency.
    """
    for name, semidefinite, total in kinds(model, device):
        yield from findings(name, semidefinite, total, rows, device)


def findings(
    name: str, semidefinite: bool, total: ShardSum, rows: tuple[int, ...], device: str = "cpu"
) -> Iterator[SumFinding]:
    """The worst pair of neighbours for one kind of sum, per adjacency."""
    entry = 1 if semidefinite else 0
    worst = dict.fromkeys(Adjacency, (0.0, 0))
    term, short = (float(total(_one_record(size, device)).flatten()[entry]) for size in (LONG_RECORD, SHORT_RECORD))
    gain = short / (SHORT_RECORD**2 if semidefinite else SHORT_RECORD)
    for n, block in itertools.product(rows, BLOCKS):
        here = pair(n, abs(term), abs(gain), semidefinite, block, device)
        before = total(here).double()
        for adjacency, there in neighbours(here, 0):
            claim = SUM_CLIP if adjacency is Adjacency.ADD_REMOVE else (2**0.5 if semidefinite else 2) * SUM_CLIP
            moved = float((before - total(there).double()).norm()) / claim
            worst[adjacency] = max(worst[adjacency], (moved, n))
    yield from (SumFinding(name, adjacency, n, moved) for adjacency, (moved, n) in worst.items())


def neighbours(shard: Shard, row: int) -> Iterator[tuple[Adjacency, Shard]]:
    """The neighbours of a shard: without one record, and with that record replaced."""
    x, y, mask = shard.x.clone(), shard.y.clone(), shard.mask.clone()
    x[row], mask[row] = 0, 0
    yield Adjacency.ADD_REMOVE, Shard(x, y, mask)
    y[row] = 1 - y[row]
    yield Adjacency.REPLACE_ONE, Shard(shard.x, y, shard.mask)


class OneAccumulator:
    """Mutant: a linear model that adds up records one by one in one float32 accumulator."""

    def __init__(self, model: Linear | Hazards | Trees) -> None:
        self._model = model

    def summing(self, shard: Shard, clip: float, runs: int) -> Callable[[Tensor], Tensor]:
        return lambda theta: self.clipped_sum(theta, shard, clip)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        def total(*arguments: Any, **how: Any) -> Tensor:
            at = next(k for k, part in enumerate(arguments) if isinstance(part, Shard))
            shard = arguments[at]
            per_person, runs = shard.per_person, shard.x.dim() - 2  # 1 where runs have records of their own
            x, y, mask = (t.reshape(*t.shape[:runs], -1, per_person, *t.shape[runs + 1 :]) for t in shard[:3])
            one = Shard(x, y, mask, None, per_person)  # one client per record, or per person
            parts = [part.unsqueeze(-2) if isinstance(part, Tensor) and part.dim() > 1 else part for part in arguments]
            each = getattr(self._model, name)(*parts[:at], one, *arguments[at + 1 :], **how).float()
            axis = each.dim() - (1 if name in ("clipped_sum", "leaves_sum") else 2) - 1
            path = np.cumsum(each.cpu().numpy(), axis, dtype=np.float32)  # torch would keep a float64 accumulator
            return torch.from_numpy(path.take(-1, axis))

        return total
