"""Boosted trees with public splits: which leaf a record falls into follows from the record and public numbers alone.

A tree divides one column of the table, or a few, at public edges: each of its `columns` columns has the same number of
bins, and a leaf is one bin per column. A number is divided at edges drawn between -1 and 1, where a schema puts it; the
levels of a category are dealt out to the bins. Edges and deals follow from a public seed, so no record decides how the
others are divided, and the structure of all trees is known before the first round. What is learnt is one value per leaf
and output. So the model is linear in its parameters:

    logits of a record = intercepts + sum over trees of the values of its leaf

and a sum of clipped gradients is that of a linear model of leaf indicators. `leaves_sum` is what boosting asks for: per
leaf of one tree, the sum of residuals and of curvatures. A record adds one vector of at most the clip's norm, in one
leaf, whatever its features are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Shard, leaf_curvature_unit
from sordino.errors import SordinoError
from sordino.models.arithmetic import exact_arithmetic, product_rows
from sordino.models.linear import MIN_NORM, NUMERIC_LOSSES, Linear, Loss, bounded, sum_over

MOST_DEPTH, MOST_TREES = 6, 10_000
CHUNK_RECORDS = 4096  # whose leaf indicators are held at once
CHUNK_NUMBERS = 2**20  # values of leaves that are held at once
MISSING = 4.0  # what the indicator of a missing value adds to a number, whose range is -1 … 1
LOSSES = (Loss.SOFTMAX, Loss.SQUARES, Loss.POISSON)


class Split(NamedTuple):
    """How one column of the table is divided: at `edges` of the sum of `key` times its features.

    Attributes:
        first: The column's first feature.
        key: One number per feature of the column.
        edges: In order; bins lie between them.
    """

    first: int
    key: tuple[float, ...]
    edges: tuple[float, ...]

    def words_of(self, place: int, names: Sequence[str], written: Callable[[float], str] = "{:.6g}".format) -> str:
        """Which records lie in a bin: levels of a category, or an interval of a number, whose ends are `written`."""
        own = names[self.first : self.first + len(self.key)]
        if len(self.key) > 2:
            return " or ".join(name for name, key in zip(own, self.key, strict=True) if key == place) or "none"
        if len(self.key) == 2 and place == len(self.edges):
            return own[1]
        low = f"{written(self.edges[place - 1])} < " if place else ""
        last = place == len(self.edges) - (len(self.key) == 2)
        return f"{low}{own[0]}" + ("" if last else f" <= {written(self.edges[place])}")


@dataclass(frozen=True)
class Trees:
    """A sum of trees with public splits.

    The parameters `theta` are the values of the leaves (trees x leaves x outputs), then one intercept per output.

    Args:
        features: Number of features.
        outputs: Number of outputs: classes, or 1.
        kind: The loss: softmax, squares or poisson.
        trees: Number of trees.
        depth: A tree has at most 2^depth leaves.
        columns: Number of columns that one tree divides; 2 or more let columns interact.
        widths: Number of features of each column of the table, in order; None: one per column.
        seed: Public seed of the splits.

    Raises:
        SordinoError: An argument is out of its range.

    Example:
        >>> model = Trees(features=3, outputs=2, trees=10, depth=2)
        >>> model.leaves, model.size
        (4, 82)
    """

    features: int
    outputs: int = 1
    kind: Loss = Loss.SOFTMAX
    trees: int = 60
    depth: int = 4
    columns: int = 1
    widths: tuple[int, ...] | None = None
    seed: int = 0

    serves_persons: ClassVar[bool] = True
    bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        widths = self.column_widths
        if not 1 <= self.trees <= MOST_TREES:
            raise SordinoError(f"trees: {self.trees} must lie between 1 and {MOST_TREES}.")
        if not 1 <= self.depth <= MOST_DEPTH:
            raise SordinoError(f"depth: {self.depth} must lie between 1 and {MOST_DEPTH}; 4 is usual.")
        if not 1 <= self.columns <= min(self.depth, len(widths)):
            raise SordinoError(
                f"columns: {self.columns} must lie between 1 and {min(self.depth, len(widths))}, the smaller of the "
                "depth and the number of columns in the table."
            )
        if sum(widths) != self.features or min(widths) < 1:
            raise SordinoError(f"widths: {list(widths)} must be numbers of at least 1 that add up to {self.features}.")
        if self.kind not in LOSSES:
            raise SordinoError(f"loss: trees have no {self.kind} loss; use {', '.join(LOSSES)}.")

    @property
    def column_widths(self) -> Sequence[int]:
        return (1,) * self.features if self.widths is None else self.widths

    @property
    def bins(self) -> int:
        """Bins of one column in one tree."""
        return int(2 ** (self.depth // self.columns))

    @property
    def leaves(self) -> int:
        """Leaves of one tree."""
        return int(self.bins**self.columns)

    @property
    def linear(self) -> Linear:
        """The same model as a linear one of leaf indicators."""
        return Linear(self.trees * self.leaves, self.outputs, self.kind)

    @property
    def size(self) -> int:
        return self.linear.size

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.linear.shapes

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """The first parameters: zeros."""
        return torch.zeros(self.size)

    @cached_property
    def splits(self) -> tuple[tuple[Split, ...], ...]:
        """The splits of each tree. Columns take turns in random order, so that each is divided about as often."""
        rng = np.random.default_rng(self.seed)
        firsts = np.cumsum([0, *self.column_widths[:-1]])
        turns: list[int] = []
        trees = []
        for _ in range(self.trees):
            chosen: list[int] = []
            while len(chosen) < self.columns:
                turns = turns or rng.permutation(len(firsts)).tolist()
                at = next((k for k, column in enumerate(turns) if column not in chosen), None)
                if at is None:  # only columns of this tree are left in this turn
                    turns += rng.permutation(len(firsts)).tolist()
                    continue
                chosen.append(turns.pop(at))
            trees.append(
                tuple(draw_split(rng, int(firsts[c]), self.column_widths[c], self.bins) for c in sorted(chosen))
            )
        return tuple(trees)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The splits as arrays: keys (features x trees x columns) and edges (trees x columns x bins - 1)."""
        keys = np.zeros((self.features, self.trees, self.columns))
        edges = np.zeros((self.trees, self.columns, self.bins - 1))
        for t, tree in enumerate(self.splits):
            for c, split in enumerate(tree):
                keys[split.first : split.first + len(split.key), t, c] = split.key
                edges[t, c] = split.edges
        return keys, edges

    def words_of(
        self,
        tree: int,
        leaf: int,
        names: Sequence[str],
        written: Mapping[int, Callable[[float], str]] = MappingProxyType({}),
    ) -> str:
        """Where a leaf lies, in terms of the features' names.

        written: by the first feature of a column, how an edge is written in the unit of the table.
        """
        words = []
        for split in reversed(self.splits[tree]):
            leaf, place = divmod(leaf, self.bins)
            words.append(split.words_of(place, names, written.get(split.first, "{:.6g}".format)))
        return " and ".join(reversed(words))

    # ------------------------------------------------------------------------------------------------- predictions

    def leaf(self, x: Tensor, trees: Sequence[int]) -> Tensor:
        """The leaf of each record in some trees, from 0: trees x records, with the leading axes of x."""
        keys, edges = self.arrays
        chosen = np.asarray(trees, int)
        key = torch.from_numpy(keys[:, chosen].reshape(self.features, -1)).to(x)
        edge = torch.from_numpy(edges[chosen].reshape(key.shape[-1], -1)).to(x)
        score = (x @ key).reshape(-1, key.shape[-1]).T.contiguous()  # tree and column x records
        place = torch.searchsorted(edge, score).reshape(len(chosen), self.columns, -1)
        leaf = place[:, 0]
        for k in range(1, self.columns):
            leaf = leaf * self.bins + place[:, k]
        return leaf.reshape(len(chosen), *x.shape[:-1]).movedim(0, -2)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        values, intercepts = self.parts(theta)
        lead = np.broadcast_shapes(theta.shape[:-1], x.shape[:-2])
        used = values.flatten(-2).any(-1).reshape(-1, self.trees).any(0).nonzero().flatten().tolist()  # others add 0
        if not used:
            return intercepts.unsqueeze(-2).expand(*lead, x.shape[-2], self.outputs)
        values = values[..., used, :, :].expand(*lead, -1, -1, -1)

        def of_chunk(x: Tensor) -> Tensor:
            leaf = self.leaf(x, used).unsqueeze(-1)
            found = values.gather(-2, leaf.expand(*lead, *leaf.shape[-3:-1], self.outputs))
            return found.sum(-3)

        step = max(1, CHUNK_NUMBERS // (max(1, math.prod(lead)) * len(used) * self.outputs))
        chunks = [of_chunk(x[..., k : k + step, :]) for k in range(0, max(1, x.shape[-2]), step)]
        return torch.cat(chunks, -2) + intercepts.unsqueeze(-2)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one example."""
        return self.linear.loss(theta, self._indicators(x.unsqueeze(0))[0].to(theta), y)

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Predicted classes as indices, or values for least squares, or rates."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        return self._value(z)[..., 0] if self.kind in NUMERIC_LOSSES else z.argmax(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The probabilities of the classes; for numeric labels, the predictions."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        return self._value(z)[..., 0] if self.kind in NUMERIC_LOSSES else z.softmax(-1)

    # -------------------------------------------------------------------------------------------------------- sums

    @exact_arithmetic()
    def leaves_sum(self, theta: Tensor, shard: Shard, clip: float, tree: int) -> Tensor:
        """Per leaf of one tree, the sum of residuals, then that of curvatures in their unit; see `Ask.leaves`.

        A record's vector is clipped to norm `clip`; at person level that of a person, the sum over its records.
        """
        theta, unit = theta.to(shard.x), leaf_curvature_unit(self.kind in NUMERIC_LOSSES)

        def total(part: Shard) -> Tensor:
            x, fine = self._usable(part)
            leaf = torch.nn.functional.one_hot(self.leaf(x, [tree])[..., 0, :], self.leaves).double()
            residual, curvature = self._terms(self.logits(theta, x).double(), part.y)
            terms = torch.cat([residual, unit * curvature], -1)
            terms = torch.where(terms.abs() < MIN_NORM, 0.0, terms)  # a norm of such numbers lacks digits
            fine = fine & torch.isfinite(terms).all(-1)
            terms = torch.where(fine.unsqueeze(-1), terms, 0.0)
            if part.per_person > 1:
                return self._persons(leaf, terms, part, clip)
            factor = bounded(torch.linalg.vector_norm(terms, dim=-1), clip) * part.mask
            sums: Tensor = leaf.transpose(-1, -2) @ (terms * factor.unsqueeze(-1))
            return sums

        sums = sum_over(shard, total, product_rows(shard.x.shape[-2], CHUNK_RECORDS))
        return torch.cat([part.flatten(-2) for part in sums.chunk(2, -1)], -1)

    def _persons(self, leaf: Tensor, terms: Tensor, part: Shard, clip: float) -> Tensor:
        """Leaves x terms, summed over persons, each clipped as a whole."""
        lead = np.broadcast_shapes(leaf.shape[:-2], terms.shape[:-2])
        terms = terms * (part.mask > 0).unsqueeze(-1)
        persons = (leaf.shape[-2] // part.per_person, part.per_person)
        leaf, terms = (t.expand(*lead, *t.shape[-2:]).reshape(*lead, *persons, t.shape[-1]) for t in (leaf, terms))
        vectors = leaf.transpose(-1, -2) @ terms  # persons x leaves x terms
        norm = torch.linalg.vector_norm(vectors.flatten(-2), dim=-1)
        # Finite terms may have a sum that is not, and 0 times it would be NaN.
        vectors = torch.where(torch.isfinite(norm)[..., None, None], vectors, 0.0)
        factor = bounded(norm, clip) * part.person_weights()
        return (vectors * factor[..., None, None]).sum(-3)

    @exact_arithmetic()
    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """The sum of gradients (times `scale`), each clipped to norm `clip`: one record moves it by at most `clip`."""
        return self._linear_sum(shard, lambda part: self.linear.clipped_sum(theta, part, clip, scale))

    @exact_arithmetic()
    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """Add 1/2 for every record whose gradient times `scale` has norm at most 1, and -1/2 for every other."""
        return self._linear_sum(shard, lambda part: self.linear.count_sum(theta, part, scale))

    @exact_arithmetic()
    def calibration_sum(self, theta: Tensor, shard: Shard, clip: float, differences: bool = False) -> Tensor:
        """The sum of (one-hot label, probabilities of the classes), each clipped to norm `clip`; see `Linear`."""
        return self._linear_sum(shard, lambda part: self.linear.calibration_sum(theta, part, clip, differences))

    @exact_arithmetic()
    def slope_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of the eight numbers that `Ask.slope` lists, each record's clipped to norm `clip`."""
        return self._linear_sum(shard, lambda part: self.linear.slope_sum(theta, part, clip))

    # --------------------------------------------------------------------------------------------------- internals

    def _linear_sum(self, shard: Shard, of_part: Callable[[Shard], Tensor]) -> Tensor:
        """A sum of the linear model over records as leaf indicators; one that is not finite counts as absent."""

        def total(part: Shard) -> Tensor:
            x, fine = self._usable(part)
            indicators = self._indicators(x).to(part.x)
            return of_part(part._replace(x=indicators, mask=part.mask * fine, length=None))

        return sum_over(shard, total, product_rows(shard.x.shape[-2], CHUNK_RECORDS))

    def _indicators(self, x: Tensor) -> Tensor:
        """One number per tree and leaf: 1 for the leaf that a record falls into."""
        places = torch.nn.functional.one_hot(self.leaf(x, range(self.trees)), self.leaves)
        return places.movedim(-2, -3).flatten(-2)

    def _usable(self, part: Shard) -> tuple[Tensor, Tensor]:
        """Features, zero where one of a record is not finite, and whether all are finite."""
        fine = torch.isfinite(part.x.abs().amax(-1))
        return torch.where(fine.unsqueeze(-1), part.x, part.x.new_zeros(())), fine

    def parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The values (trees x leaves x outputs) and the intercepts."""
        values, intercepts = theta[..., : -self.outputs], theta[..., -self.outputs :]
        return values.reshape(*theta.shape[:-1], self.trees, self.leaves, self.outputs), intercepts

    def _value(self, z: Tensor) -> Tensor:
        return z.clamp(max=self.linear.cap).exp() if self.kind is Loss.POISSON else z

    def _terms(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivatives of the loss by the outputs."""
        if self.kind is Loss.SOFTMAX:
            p = z.softmax(-1)
            label = torch.nn.functional.one_hot(y.long().clamp(0, self.outputs - 1), self.outputs)
            return p - label, p * (1 - p)
        value = self._value(z)
        curvature = torch.ones_like(value) if self.kind is Loss.SQUARES else value
        return value - y.unsqueeze(-1).double(), curvature


def draw_split(rng: np.random.Generator, first: int, width: int, bins: int) -> Split:
    """A public division of one column.

    A column of one or two features is a number, perhaps with the indicator of a missing value, which gets a bin of its
    own if there are more than two. The features of a wider column are the levels of a category.
    """
    if width > 2:
        deal = rng.permutation(np.arange(width) % bins)
        return Split(first, tuple(map(float, deal)), tuple(k + 0.5 for k in range(bins - 1)))
    own_bin = width == 2 and bins > 2
    edges = np.sort(rng.uniform(-1, 1, size=bins - 1 - own_bin)).tolist()
    return Split(first, (1.0, MISSING) if own_bin else (1.0,), tuple([*edges, MISSING / 2] if own_bin else edges))
