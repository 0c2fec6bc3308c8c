"""More features from the columns of a schema: bins of numbers, products of columns, random Fourier features.

Each is a public rule for one record by itself, so it costs no privacy, as the schema does not. A linear model of such
features is not linear in the columns:

- `bins:8` replaces a number by 8 hat functions at even public knots between the ends of its range: a value lies between
  two knots, whose features sum to 1. A linear model of hats is a broken line per column: a generalised additive model.
- `interactions` adds the products of the features of two columns, for all pairs of columns or for those that are named.
- `rff:256` adds 256 random cosines of all features (Rahimi and Recht 2007), which approximate a Gaussian kernel. They
  are drawn from a public seed, which is a part of the schema.

A block of features that stands for one column has norm at most sqrt(2), with or without hats. The block of a product
has the product of two such norms, and random features have norm at most sqrt(2) times the root of the columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sordino.data.arrays import each_times
from sordino.errors import SordinoError, nearest

LINEAR, BINS, INTERACTIONS, RFF = "linear", "bins", "interactions", "rff"
LAWS = (LINEAR, f"{BINS}:8", INTERACTIONS, f"{RFF}:256")
LEAST_BINS, MOST_BINS = 2, 64
LEAST_RFF, MOST_RFF = 1, 4096
MOST_FEATURES = 20_000
MOST_SEED = 2**32 - 1
KEYS = ("features", "interactions", "rff_bandwidth", "rff_seed")  # of a schema
CHUNK_NUMBERS = 2**22  # in the temporary arrays of one slice of records


class Block(NamedTuple):
    """The features of one column, before they are expanded.

    Attributes:
        name: The column.
        features: The names of its features.
        knot: Of a number or date, the value that a part of its range (0 to 1) stands for, in words; else None.
    """

    name: str
    features: Sequence[str]
    knot: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Expansion:
    """Which features are made of the columns.

    Args:
        bins: Knots per number; 0 keeps numbers as they are.
        pairs: Whether products of columns are added.
        interactions: The pairs of columns; empty for all of them.
        rff: Number of random Fourier features.
        rff_bandwidth: The distance of two encoded records at which the kernel has fallen to exp(-1/2).
        rff_seed: Public seed of the random features.
    """

    bins: int = 0
    pairs: bool = False
    interactions: tuple[tuple[str, str], ...] = ()
    rff: int = 0
    rff_bandwidth: float = 4.0
    rff_seed: int = 0

    @staticmethod
    def of(values: Mapping[str, Any], columns: Sequence[str]) -> Expansion:
        """From the keys of a schema.

        Args:
            values: The keys; those of `KEYS` are read.
            columns: Names of the columns that have features.

        Raises:
            SordinoError: A key does not fit.
        """
        laws = values.get("features", LINEAR)
        laws = [laws] if isinstance(laws, str) else laws
        if not isinstance(laws, list | tuple) or not all(isinstance(law, str) for law in laws):
            raise SordinoError(f'features: {laws!r} must be a text or a list of texts, such as "bins:8".')
        names = [law.partition(":")[0].strip() for law in laws]
        if len(set(names)) < len(names):
            raise SordinoError(f"features: {list(laws)} names one law twice; remove one.")
        found: dict[str, Any] = {}
        for law, name in zip(laws, names, strict=True):
            if name == BINS:
                found["bins"] = _whole(law, LEAST_BINS, MOST_BINS)
            elif name == RFF:
                found["rff"] = _whole(law, LEAST_RFF, MOST_RFF)
            elif law.strip() == INTERACTIONS:
                found["pairs"] = True
            elif law.strip() != LINEAR:
                raise SordinoError(
                    f"features: '{law}' is unknown.{nearest(law, LAWS)} Write linear, bins:8, interactions or rff:256, "
                    "or a list of them."
                )
        if "interactions" in values:
            if not found.get("pairs"):
                raise SordinoError('interactions: pairs of columns are for features = "interactions"; add it.')
            found["interactions"] = _pairs(values["interactions"], columns)
        for key in ("rff_bandwidth", "rff_seed"):
            if key in values and not found.get("rff"):
                raise SordinoError(f'{key}: it is for features = "rff:256"; add it, or remove {key}.')
        if "rff_bandwidth" in values:
            width = values["rff_bandwidth"]
            if isinstance(width, bool) or not isinstance(width, int | float) or not 1e-3 <= width <= 1e3:
                raise SordinoError(f"rff_bandwidth: {width!r} must be a number from 0.001 to 1000; 4 is usual.")
            found["rff_bandwidth"] = float(width)
        if "rff_seed" in values:
            seed = values["rff_seed"]
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
                raise SordinoError(f"rff_seed: {seed!r} must be a whole number from 0 to {MOST_SEED}.")
            found["rff_seed"] = seed
        return Expansion(**found)

    def values(self) -> dict[str, Any]:
        """The same as keys of a schema; nothing for plain features."""
        if not self:
            return {}
        laws = (
            [f"{BINS}:{self.bins}"] * bool(self.bins)
            + [INTERACTIONS] * self.pairs
            + [f"{RFF}:{self.rff}"] * bool(self.rff)
        )
        document: dict[str, Any] = {"features": laws[0] if len(laws) == 1 else laws}
        if self.interactions:
            document["interactions"] = [list(pair) for pair in self.interactions]
        if self.rff:
            document |= {"rff_bandwidth": self.rff_bandwidth, "rff_seed": self.rff_seed}
        return document

    def __bool__(self) -> bool:
        return bool(self.bins or self.pairs or self.rff)

    def chosen(self, blocks: Sequence[Block]) -> list[tuple[int, int]]:
        """The pairs of blocks whose products are added, by number."""
        if not self.pairs:
            return []
        place = {block.name: k for k, block in enumerate(blocks)}
        named = [(place[a], place[b]) for a, b in self.interactions]
        return named or list(itertools.combinations(range(len(blocks)), 2))

    def extent(self, columns: int) -> int:
        """How many columns the features count as, where a column has norm 1: for scaling records."""
        pairs = (len(self.interactions) or columns * (columns - 1) // 2) if self.pairs else 0
        return columns + pairs + (columns if self.rff else 0)

    def features(self, blocks: Sequence[Block]) -> list[str]:
        """Names of the features, in order."""
        names = [name for block in blocks for name in self._own(block)]
        names += [
            f"{a} * {b}"
            for first, second in self.chosen(blocks)
            for a in blocks[first].features
            for b in blocks[second].features
        ]
        return names + [f"random cosine {k + 1}" for k in range(self.rff)]

    def _own(self, block: Block) -> list[str]:
        if not self.bins or block.knot is None:
            return list(block.features)
        return [*(f"{block.name} near {block.knot(part)}" for part in self._parts), *block.features[1:]]

    @property
    def _parts(self) -> list[float]:
        return [k / (self.bins - 1) for k in range(self.bins)]

    def check_width(self, blocks: Sequence[Block]) -> None:
        """Refuse more features than memory is made for."""
        if (width := len(self.features(blocks))) > MOST_FEATURES:
            raise SordinoError(
                f"features: they are {width:,} per record, and at most {MOST_FEATURES:,} are served; name the pairs of "
                'columns, as in interactions = [["age", "sex"]].'
            )

    def apply(self, x: np.ndarray, blocks: Sequence[Block]) -> np.ndarray:
        """The features of encoded records, slice by slice.

        Args:
            x: Records by the features of all blocks, float32.
            blocks: The columns.

        Returns:
            Records by `features`, float32.
        """
        if not self:
            return x
        out = np.empty((len(x), len(self.features(blocks))), np.float32)
        matrix, phase = self._waves(x.shape[1])
        rows = max(1, CHUNK_NUMBERS // max(1, out.shape[1]))
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            self._fill(x[part], out[part], blocks, matrix, phase)
        return out

    def _fill(self, x: np.ndarray, out: np.ndarray, blocks: Sequence[Block], matrix: Any, phase: Any) -> None:
        starts = [0, *itertools.accumulate(len(block.features) for block in blocks)]
        own = [x[:, starts[k] : starts[k + 1]] for k in range(len(blocks))]
        at = 0
        for block, values in zip(blocks, own, strict=True):
            if self.bins and block.knot is not None:
                self._hats(values[:, 0], out[:, at : at + self.bins])
                at, values = at + self.bins, values[:, 1:]
            out[:, at : at + values.shape[1]] = values
            at += values.shape[1]
        for first, second in self.chosen(blocks):
            width = own[first].shape[1] * own[second].shape[1]
            products = own[first][:, :, None] * own[second][:, None, :]
            out[:, at : at + width] = products.reshape(len(x), width)
            at += width
        if self.rff:
            waves = each_times(x, matrix)
            waves += phase
            np.cos(waves, out=waves)
            np.multiply(waves, math.sqrt(2 * len(blocks) / self.rff), out=out[:, at:])

    def _hats(self, value: np.ndarray, out: np.ndarray) -> None:
        """Hat functions at even knots from -1 to 1."""
        place = (value + 1) * ((self.bins - 1) / 2)
        low = np.clip(place.astype(np.int64), 0, self.bins - 2)
        rest = (place - low).astype(np.float32)
        rows = np.arange(len(value))
        out[:] = 0
        out[rows, low] = 1 - rest
        out[rows, low + 1] = rest

    def _waves(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Directions and phases of the random features. The stream of this generator is the same in every version."""
        draws = np.random.RandomState(self.rff_seed)
        matrix = draws.standard_normal((width, self.rff)) / self.rff_bandwidth
        return matrix.astype(np.float32), draws.uniform(0, 2 * math.pi, self.rff).astype(np.float32)

    def says(self, blocks: Sequence[Block]) -> list[tuple[str, str, list[str]]]:
        """For people: each law, what it adds, and the names of its features."""
        lines = []
        if self.bins:
            numbers = [block for block in blocks if block.knot is not None]
            what = f"each of {len(numbers)} numbers becomes {self.bins} hats at even knots; those next to it sum to 1"
            made = [name for block in numbers for name in self._own(block)[: self.bins]]
            lines.append((f"({BINS})", what, made))
        if chosen := self.chosen(blocks):
            made = self.features(blocks)[-sum(len(blocks[a].features) * len(blocks[b].features) for a, b in chosen) :]
            if self.rff:
                made = self.features(blocks)[-len(made) - self.rff : -self.rff]
            what = f"products of the features of {len(chosen)} pairs of columns"
            lines.append((f"({INTERACTIONS})", what, made))
        if self.rff:
            what = f"cosines of random sums of all features; bandwidth {self.rff_bandwidth:g}, seed {self.rff_seed}"
            lines.append((f"({RFF})", what, self.features(blocks)[-self.rff :]))
        return lines


def _whole(law: str, least: int, most: int) -> int:
    """The number behind the colon."""
    name, _, number = law.partition(":")
    if not number.strip().isdecimal() or not least <= int(number) <= most:
        raise SordinoError(f"features: '{law}' needs a whole number from {least} to {most}; write {name.strip()}:8.")
    return int(number)


def _pairs(values: Any, columns: Sequence[str]) -> tuple[tuple[str, str], ...]:
    example = 'write pairs of columns, such as interactions = [["age", "sex"]]'
    if not isinstance(values, list | tuple) or not values:
        raise SordinoError(f"interactions: {values!r}; {example}, or leave it out for all pairs.")
    pairs = []
    for pair in values:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise SordinoError(f"interactions: {pair!r} is not a pair; {example}.")
        if unknown := [name for name in pair if name not in columns]:
            raise SordinoError(
                f"interactions: '{unknown[0]}' is not a column with features.{nearest(unknown[0], columns)}"
            )
        if pair[0] == pair[1]:
            raise SordinoError(
                f'interactions: {list(pair)} is one column with itself; use features = "bins:8" instead.'
            )
        pairs.append((str(pair[0]), str(pair[1])))
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        raise SordinoError("interactions: a pair stands there twice; remove one.")
    return tuple(pairs)
