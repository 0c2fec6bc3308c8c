"""Tallies: one bounded vector per record, added up. Histograms and means that are noised once are made of them.

The vector of a record consists of blocks. A block of cells holds the block's weight in one cell (or a number in [0, 1]
times it) and 0 in all others; a bounded number in [0, 1] times the block's weight is a block of one cell. Blocks do not
overlap, so the vector has norm
at most the root of the sum of squared weights. Hence, for the sum over records:

- one record more or less moves it by at most that norm;
- one record for another moves a block of cells of weight w by at most sqrt(2) w (it leaves one cell and enters another)
  and a number by at most w (both lie between 0 and w): the root of the sum of the squares bounds the whole.

Weights are powers of two and numbers are multiples of 2^-20, so the sum in float64 is exact for up to 2^30 records: the
bound holds for what is computed. What a record's vector is depends on public numbers (theta, edges) and on the record
alone.

Persons. Where a person has several records, the person's vector is the mean of their vectors, rounded down to multiples
of 2^-20. In a block of cells it has no negative entry, and its entries add up to at most w; a number stays between 0
and w. So both bounds above hold for a whole person as they do for one record, however many records it has: such a block
has norm at most w, two of them have an inner product of at least 0, so they differ by at most sqrt(2) w.

Every person then counts once: a share is the probability of a cell for a person who is drawn at random and, of that
person, a record that is drawn at random. The total of a block is the number of persons, which is public. Counting every
record fully instead would need k times the noise for k records per person, have an unknown total, and give the few
persons with many records the most weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sordino.core import SAFETY, Adjacency, Shard
from sordino.errors import SordinoError
from sordino.models.linear import NUMERIC_LOSSES, Loss

GRID = 2.0**-20  # of numbers
CHUNK_NUMBERS = 2**22  # in the vectors of one slice of records
LARGEST_LOGIT = 7.0  # the log-odds where bins that are even on that scale end
LEAST_BINS, MOST_BINS = 4, 1024


class Block(NamedTuple):
    """A part of the vector.

    Attributes:
      name: what it counts.
      cells: number of cells; 1 for a number.
      weight: of a counted record; a power of two.
    """

    name: str
    cells: int
    weight: float


class Contribution(NamedTuple):
    """What one record adds to one block.

    Attributes:
      cell: the cell of each record, from 0; -1 for none; None for a number.
      number: the number of each record, in [0, 1]; None for cells that count. With a cell, the number stands there.
    """

    cell: Tensor | None = None
    number: Tensor | None = None


class Tally(ABC):
    """A sum of bounded vectors. Subclasses say what a record adds to each block.

    Attributes:
      layout: the blocks, in the order of the vector.
    """

    layout: tuple[Block, ...]
    serves_persons: ClassVar[bool] = True

    @abstractmethod
    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        """What each record adds to each block."""

    @property
    def dimension(self) -> int:
        """Numbers in the vector."""
        return sum(block.cells for block in self.layout)

    @property
    def clip(self) -> float:
        """The largest norm of a record's vector, with the margin that every clip has."""
        return self.bound(1, Adjacency.ADD_REMOVE)

    def bound(self, records: float, adjacency: Adjacency) -> float:
        """How far one record, or one person, moves the sum; the module's text has the proof."""
        replaced = adjacency is Adjacency.REPLACE_ONE
        squares = (block.weight**2 * (2 if replaced and block.cells > 1 else 1) for block in self.layout)
        return math.sqrt(sum(squares)) / (1 - SAFETY)

    def tally_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of the records' vectors, each shortened to norm `clip` (a no-op for `self.clip` and above).

        Where a shard has several rows per person, these are persons' vectors: the means over their records.
        """
        rows = shard.x.shape[-2]
        lead = math.prod(shard.x.shape[:-2])
        step = shard.per_person * max(1, CHUNK_NUMBERS // max(1, lead * self.dimension * shard.per_person))
        total: Tensor | float = 0.0
        for start in range(0, max(rows, 1), step):
            part = slice(start, start + step)
            x, y, mask = shard.x[..., part, :], shard.y[..., part], shard.mask[..., part]
            vectors = self._vectors(theta, x, y)
            if shard.per_person > 1:
                vectors, mask = person_means(vectors, mask, shard.per_person)
            norm = torch.linalg.vector_norm(vectors, dim=-1)
            bound = clip * (1 - SAFETY)
            factor = torch.where(norm > bound * (1 + 1e-12), bound / norm.clamp_min(1e-300), 1.0)
            total = total + (vectors * (factor * mask.double()).unsqueeze(-1)).sum(-2)
        assert isinstance(total, Tensor)
        return total

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """The same, under the name that contracts about sums of records use."""
        return self.tally_sum(theta, shard, clip)

    def _vectors(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = []
        for block, given in zip(self.layout, self.contributions(theta, x, y), strict=True):
            if given.cell is not None:
                cell = given.cell.clamp(-1, block.cells - 1)
                # Cell -1 becomes an extra cell, which is dropped.
                counted = torch.nn.functional.one_hot(cell + 1, block.cells + 1)[..., 1:].double()
                counted = counted if given.number is None else counted * _on_grid(given.number).unsqueeze(-1)
                parts.append(block.weight * counted)
            elif given.number is not None:
                parts.append((block.weight * _on_grid(given.number)).unsqueeze(-1))
        return torch.cat(parts, -1)

    def split(self, vector: Any) -> dict[str, Any]:
        """A released vector by block, in units of records: each block divided by its weight."""
        found, at = {}, 0
        for block in self.layout:
            found[block.name] = vector[..., at : at + block.cells] / block.weight
            at += block.cells
        return found


def _on_grid(number: Tensor) -> Tensor:
    """Numbers clamped to [0, 1] and rounded down to the grid; what is not finite counts as 0."""
    return GRID * torch.floor(number.double().nan_to_num(0.0).clamp(0.0, 1.0) / GRID)


def person_means(vectors: Tensor, mask: Tensor, per_person: int) -> tuple[Tensor, Tensor]:
    """The mean vector of each person, rounded down to the grid, and the person's weight.

    The mean of k multiples of the grid is at least 1/k of it away from the multiple above, where it is none itself. A
    quotient in float64 is nearer to the mean than that, so it is never rounded to a larger multiple.

    Args:
      vectors: of each row, in float64, multiples of the grid without negative entries.
      mask: of each row; 0 where a person has no further record.
      per_person: rows per person.
    """
    mask = mask.expand(vectors.shape[:-1])
    weights = mask.double().reshape(*mask.shape[:-1], -1, per_person)
    held = (weights > 0).unsqueeze(-1)
    rows = torch.where(held, vectors.reshape(*weights.shape, vectors.shape[-1]), 0.0)
    mean = rows.sum(-2) / held.sum(-2).clamp_min(1)
    return GRID * torch.floor(mean / GRID), weights.amax(-1)


# ------------------------------------------------------------------------------------------------------ scores by label

CELLS, CONFUSION, PREDICTED, BRIER = "cells", "confusion", "predicted", "brier"
ABSOLUTE, SQUARED, VALUE, SQUARED_VALUE = "absolute error", "squared error", "value", "squared value"
DEVIANCE, SQUARED_DEVIANCE, OUTCOMES = "deviance", "squared deviance", "outcomes"
MOST_DEVIANCE = 10.0  # of one count: more than that counts as that much, because a deviance has no bound


class ModelTally(Tally):
    """A tally of what a model predicts. Engines and contracts ask it what they ask of a model.

    Attributes:
      model: the model.
    """

    model: Any

    features = property(lambda self: int(self.model.features))
    outputs = property(lambda self: int(self.model.outputs))
    kind = property(lambda self: getattr(self.model, "kind", Loss.SOFTMAX))
    size = property(lambda self: int(self.model.size))
    shapes = property(lambda self: self.model.shapes)

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        first: Tensor = self.model.init()
        return first


@dataclass(frozen=True)
class ScoreTally(ModelTally):
    """Scores of a classifier by label, in public bins.

    Two classes: the score is the probability of the second one, and the label says whether it is the record's. Many
    classes: the score is the largest probability, and the label says whether that class is right.

    Blocks: one cell per label and bin; one cell per label and side of the threshold (its totals have less noise than
    sums over many bins); the score; the squared distance of the probabilities from the label.

    Args:
      model: the classifier.
      edges: of the bins, as log-odds, in order; one of them is the threshold's.
      threshold: a probability.
    """

    model: Any
    edges: tuple[float, ...]
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if getattr(self.model, "kind", None) in NUMERIC_LOSSES:
            raise SordinoError("model: it predicts numbers, which have no classes; use ErrorTally.")
        if sorted(set(self.edges)) != list(self.edges) or _log_odds(self.threshold) not in self.edges:
            raise SordinoError("edges: they must increase, and hold the threshold; use score_edges.")

    @property
    def layout(self) -> tuple[Block, ...]:  # type: ignore[override]
        return (
            Block(CELLS, 2 * self.bins, 1.0),
            Block(CONFUSION, 4, 0.5),
            Block(PREDICTED, 1, 0.5),
            Block(BRIER, 1, 0.5),
        )

    @property
    def bins(self) -> int:
        return len(self.edges) + 1

    @property
    def two_classes(self) -> bool:
        return getattr(self.model, "kind", None) is Loss.LOGISTIC or self.model.outputs == 2

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        z = self.model.logits(theta, x).double().nan_to_num(0.0, posinf=1e300, neginf=-1e300)
        y = y.long()
        if self.two_classes:
            odds = z[..., 1] - z[..., 0] if z.shape[-1] == 2 else z[..., 0]
            right = (y == 1).long()
            score = odds.sigmoid()
            distance = (score - right).square()
        else:
            p = z.softmax(-1).nan_to_num(0.0)
            top = p.max(-1)
            score, right = top.values, (top.indices == y).long()
            odds = score.log() - torch.log1p(-score)
            own = torch.nn.functional.one_hot(y.clamp(0, p.shape[-1] - 1), p.shape[-1])
            distance = (p - own).square().sum(-1) / 2
        edges = torch.tensor(self.edges, dtype=torch.float64, device=z.device)
        place = torch.bucketize(odds.nan_to_num(0.0).contiguous(), edges)
        above = (place > self.edges.index(_log_odds(self.threshold))).long()
        return [
            Contribution(cell=right * self.bins + place),
            Contribution(cell=2 * right + above),
            Contribution(number=score),
            Contribution(number=distance),
        ]


def score_edges(bins: int, threshold: float = 0.5) -> tuple[float, ...]:
    """Public edges of the score's bins, as log-odds.

    Half of the bins' density is even in the probability, half in the log-odds between -7 and 7: so neither balanced
    classes nor a prevalence of 1 % put all records into few bins. The edge nearest to the threshold is moved to it.

    Args:
      bins: number of bins.
      threshold: a probability.

    Returns:
      bins - 1 edges, in order.

    Raises:
      SordinoError: an argument is out of its range.

    >>> [round(edge, 2) for edge in score_edges(4)]
    [-1.86, 0.0, 1.86]
    """
    if not LEAST_BINS <= bins <= MOST_BINS:
        raise SordinoError(f"bins: {bins} must lie between {LEAST_BINS} and {MOST_BINS}; 32 is usual.")
    if not 0 < threshold < 1:
        raise SordinoError(f"threshold: {threshold} must lie between 0 and 1, both excluded.")

    def part(odds: float) -> float:
        even = min(max((odds + LARGEST_LOGIT) / (2 * LARGEST_LOGIT), 0.0), 1.0)
        return 0.5 / (1 + math.exp(-odds)) + 0.5 * even

    edges = []
    for k in range(1, bins):
        low, high = -2 * LARGEST_LOGIT, 2 * LARGEST_LOGIT
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if part(middle) < k / bins else (low, middle)
        edges.append(round(high, 9) + 0.0)
    at = _log_odds(threshold)
    if at not in edges:
        edges[min(range(len(edges)), key=lambda k: abs(edges[k] - at))] = at
    return tuple(sorted(set(edges)))


def _log_odds(p: float) -> float:
    return math.log(p / (1 - p)) + 0.0


# ------------------------------------------------------------------------------------------------- errors of quantities


@dataclass(frozen=True)
class ErrorTally(ModelTally):
    """Errors of a model of quantities whose labels lie in -1 … 1, and the labels' first two moments.

    Predictions are clamped to -1 … 1, so every number lies in [0, 1] after division by the range.
    """

    model: Any
    layout = (Block(ABSOLUTE, 1, 1.0), Block(SQUARED, 1, 1.0), Block(VALUE, 1, 0.5), Block(SQUARED_VALUE, 1, 0.5))

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        predicted = self.model.predict(theta, x).double().nan_to_num(0.0).clamp(-1, 1)
        y = y.double().nan_to_num(0.0).clamp(-1, 1)
        error, value = (predicted - y).abs() / 2, (y + 1) / 2
        return [Contribution(number=each) for each in (error, error.square(), value, value.square())]


@dataclass(frozen=True)
class CountTally(ModelTally):
    """Errors and deviance of a model of counts, and first moments of labels and predictions.

    Labels are counts in units of the root of their public maximum (`data.schema.Schema.unit`). Predictions are clamped
    to the maximum, and a deviance above MOST_DEVIANCE counts as that much.

    Args:
      model: the model.
      unit: the root of the public maximum, which is also the largest label.
    """

    model: Any
    unit: float = 1.0
    layout = (
        Block(ABSOLUTE, 1, 1.0),
        Block(SQUARED, 1, 0.5),
        Block(VALUE, 1, 0.5),
        Block(SQUARED_VALUE, 1, 0.5),
        Block(PREDICTED, 1, 0.5),
        Block(DEVIANCE, 1, 1.0),
        Block(SQUARED_DEVIANCE, 1, 0.25),
    )

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        rate = self.model.predict(theta, x).double().nan_to_num(0.0, posinf=self.unit).clamp(0, self.unit)
        y = y.double().nan_to_num(0.0).clamp(0, self.unit)
        error, value = (rate - y).abs() / self.unit, y / self.unit
        least = rate.clamp_min(1e-30)
        half = torch.special.xlogy(y, y / least) - y + rate
        deviance = (2 * self.unit * half).clamp(0, MOST_DEVIANCE) / MOST_DEVIANCE
        numbers = (error, error.square(), value, value.square(), rate / self.unit, deviance, deviance.square())
        return [Contribution(number=each) for each in numbers]


@dataclass(frozen=True)
class SurvivalTally(ModelTally):
    """Records of a survival model by risk and by what their label says of the public intervals of time.

    The risk is the probability of the event before the last edge, in public bins. An outcome is as in
    `Hazards.tally_sum`: censored in interval 0, event in 0, censored in 1, …, beyond the last edge. For each edge, the
    squared error of the predicted survival stands in one cell: that of records without the event by then, or that of
    the interval of the event; who was last seen before the edge adds nothing there.

    Args:
      model: the `Hazards`.
      edges: of the bins of the risk, as log-odds, in order.
    """

    model: Any
    edges: tuple[float, ...]

    @property
    def layout(self) -> tuple[Block, ...]:  # type: ignore[override]
        outcomes = 2 * self.outputs + 1
        return (
            Block(CELLS, self.bins * outcomes, 1.0),
            Block(OUTCOMES, outcomes, 0.5),
            Block(PREDICTED, 1, 0.5),
            *(Block(f"{BRIER} {k + 1}", k + 2, 0.5) for k in range(self.outputs)),
        )

    @property
    def bins(self) -> int:
        return len(self.edges) + 1

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        intervals = self.model.outputs
        survival = self.model.scores(theta.double(), x.double()).double().nan_to_num(0.5).clamp(0, 1)
        risk = 1 - survival[..., -1]
        time = y.double().abs()
        ends = torch.tensor(self.model.intervals[1:], dtype=torch.float64, device=y.device)
        whole = torch.bucketize(time.nan_to_num(0.0), ends, right=True)  # intervals passed
        happened = (y > 0) & (whole < intervals)
        fine = torch.isfinite(time)
        outcome = torch.where(fine, 2 * whole + happened.long(), -1)
        odds = torch.log(risk) - torch.log1p(-risk)
        edges = torch.tensor(self.edges, dtype=torch.float64, device=y.device)
        place = torch.bucketize(odds.nan_to_num(0.0).contiguous(), edges)
        outcomes = 2 * intervals + 1
        given = [
            Contribution(cell=torch.where(fine, place * outcomes + outcome, -1)),
            Contribution(cell=outcome),
            Contribution(number=torch.where(fine, risk, 0.0)),
        ]
        for k in range(intervals):
            alive, dead = whole > k, happened & (whole <= k)
            cell = torch.where(alive, 0, torch.where(dead, whole + 1, -1))
            error = (alive.double() - survival[..., k]).square()
            given.append(Contribution(torch.where(fine, cell, -1), error))
        return given


def weights(layout: Sequence[Block]) -> dict[str, float]:
    """The weight of each block, by name: noise on it, in units of records, is divided by it."""
    return {block.name: block.weight for block in layout}


# ------------------------------------------------------------------------------------------------------ columns in bins


class _OfRecords(Tally):
    """A tally of features and labels alone. It has no model; theta is one number, because it is never empty."""

    classes: int

    size = 1
    shapes = ((1,),)

    @property
    def outputs(self) -> int:
        return max(1, self.classes)

    @property
    def kind(self) -> Any:
        return Loss.SOFTMAX if self.classes else Loss.SQUARES

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(1)


@dataclass(frozen=True)
class CellTally(_OfRecords):
    """The public side of a `ColumnTally`: how many cells each block has. It knows bounds and sizes, and counts nothing.

    Args:
      features: number of features of a record.
      cells: of each block.
      classes: number of classes of the labels; 0 for numbers.
    """

    features: int
    cells: tuple[int, ...]
    classes: int = 0

    @property
    def layout(self) -> tuple[Block, ...]:  # type: ignore[override]
        return tuple(Block(str(k), cells, 1.0) for k, cells in enumerate(self.cells))

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        raise SordinoError("cells: these are only the sizes of blocks; count with ColumnTally.")


LABELS = "[target]"  # the block that counts classes; no column of a schema can be its equal where labels are counted


@dataclass(frozen=True)
class ColumnTally(_OfRecords):
    """Histograms of some columns, each in even bins from -1 to 1 or by level; a missing value is not counted. And of
    the labels.

    Args:
      features: number of features of a record.
      columns: (name, place of the feature, whether the next feature says that the value is missing).
      bins: of each column.
      classes: number of classes of the labels; 0 for numbers.
      labels: whether the classes of the labels are counted too. Otherwise labels are not read.
      levels: of categories: (name, place of the feature of the first level, number of levels). Another level is not
        counted.
    """

    features: int
    columns: tuple[tuple[str, int, bool], ...]
    bins: int = 64
    classes: int = 0
    labels: bool = False
    levels: tuple[tuple[str, int, int], ...] = ()

    @property
    def layout(self) -> tuple[Block, ...]:  # type: ignore[override]
        counted = (Block(LABELS, self.classes, 1.0),) if self.labels else ()
        levels = (Block(name, count, 1.0) for name, _, count in self.levels)
        return (*(Block(name, self.bins, 1.0) for name, _, _ in self.columns), *levels, *counted)

    def contributions(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Contribution]:
        given = []
        for _, place, marked in self.columns:
            value = x[..., place].double().nan_to_num(0.0).clamp(-1, 1)
            cell = ((value + 1) / 2 * self.bins).floor().long().clamp(0, self.bins - 1)
            missing = x[..., place + 1] > 0.5 if marked else torch.zeros_like(cell, dtype=torch.bool)
            given.append(Contribution(cell=torch.where(missing, -1, cell)))
        for _, place, count in self.levels:
            which = x[..., place : place + count].double().nan_to_num(0.0).max(-1)
            given.append(Contribution(cell=torch.where(which.values > 0.5, which.indices, -1)))
        if self.labels:
            given.append(Contribution(cell=y.long().clamp(-1, self.classes - 1)))
        return given
