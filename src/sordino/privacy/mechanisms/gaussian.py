"""Gaussian noise that is added and rounded exactly.

`settle` releases

    grid * round((value + ideal noise) / grid)

with the sum and the rounding as in real arithmetic: in float64 if the error bounds decide the rounding, and by
`Exact.bounds` otherwise. A release is therefore the Gaussian mechanism of real arithmetic, rounded to a public
grid. Rounding is post-processing: the account of the Gaussian mechanism holds unchanged, with no truncated tail and no
condition on low bits.

Assumption, in addition to those of `random`: the time that a release takes is not observed. A sum close to the middle
between two grid points takes longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.privacy.mechanisms.random import ERROR, Address, Exact, Secure, Source, is_exact

GRID_BITS = 14  # a rounding error of std / 2^15 is negligible beside the noise
_FAR = 2.0**51  # grid points: up to there float64 holds the halves between them


class Term(NamedTuple):
    """coefficient * N, for the ideal normal N of one element of the (flat) draw at an address."""

    coefficient: Fraction
    source: Exact
    at: Address
    element: int


@dataclass(frozen=True, eq=False)
class Draw:
    """Computed noise, a bound on its error, and the ideal noise.

    The ideal noise of (flat) number i is the sum of `terms(i)`; `error`, broadcast, bounds its distance from `z`.
    Always error >= ERROR |z|. So one rounding in float64, an error of at most 2^-53 |z|, adds less than 2^-12 of
    `error`; the methods below use this to keep the bound. `terms` is None if the source is not private.
    """

    z: Tensor
    error: Tensor
    terms: Callable[[int], list[Term]] | None

    @classmethod
    def plain(cls, z: Tensor) -> Draw:
        """Noise of a source that is not private."""
        return cls(z, z.new_zeros((1,) * z.dim()), None)

    def to(self, device: torch.device | str) -> Draw:
        return Draw(self.z.to(device), self.error.to(device), self.terms)

    def scaled(self, std: Tensor | float) -> Draw:
        """std * z; a tensor broadcasts over z."""
        width = torch.as_tensor(std, dtype=torch.float64, device=self.z.device)
        each = width.expand(self.z.shape)
        terms = self.terms

        def scaled(i: int) -> list[Term]:
            assert terms is not None
            factor = Fraction(float(each[tuple(int(k) for k in np.unravel_index(i, each.shape))]))
            return [term._replace(coefficient=factor * term.coefficient) for term in terms(i)]

        error = self.error * width.abs() * (1 + 2.0**-12)
        return Draw(self.z * width, error, None if terms is None else scaled)

    def symmetric(self) -> Draw:
        """(z + z^T) / 2, in the last two axes."""
        shape, terms = self.z.shape, self.terms

        def symmetric(i: int) -> list[Term]:
            assert terms is not None
            *lead, row, column = np.unravel_index(i, shape)
            j = int(np.ravel_multi_index((*lead, column, row), shape))
            return [term._replace(coefficient=term.coefficient / 2) for term in terms(i) + terms(j)]

        error = (self.error + self.error.mT) / 2 * (1 + 2.0**-12)
        return Draw((self.z + self.z.mT) / 2, error, None if terms is None else symmetric)

    def summed(self, axis: int) -> Draw:
        """The sum over one axis."""
        shape, terms = list(self.z.shape), self.terms
        axis %= len(shape)
        count = shape.pop(axis)
        if count == 1:
            return Draw(self.z.squeeze(axis), self.error.squeeze(axis), self.terms)

        def summed(i: int) -> list[Term]:
            assert terms is not None
            place = [int(k) for k in np.unravel_index(i, shape)]
            parts = ((*place[:axis], k, *place[axis:]) for k in range(count))
            return [term for part in parts for term in terms(int(np.ravel_multi_index(part, self.z.shape)))]

        each = self.error.expand(*(count if k == axis else n for k, n in enumerate(self.error.shape)))
        error = each.sum(axis) * (1 + count * 2.0**-12)
        return Draw(self.z.sum(axis), error, None if terms is None else summed)


def draw(
    source: Source,
    parts: Sequence[tuple[float, Address]],
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> Draw:
    """The sum of coefficient * normal(address), as correlated noise needs it; [(1.0, at)] is one normal per number."""
    if source.private and not is_exact(source):
        raise SordinoError(f"source: {source!r} is private but has no `bounds`; use one that has, such as Secure().")
    parts = [(float(coefficient), at) for coefficient, at in parts]
    z, error = torch.zeros((), dtype=torch.float64, device=device), 0.0
    for coefficient, at in parts:
        normal = _normals(source, at, shape, device)
        low, high = map(float, normal.aminmax()) if normal.numel() else (0.0, 0.0)
        error += abs(coefficient) * ERROR * max(high, -low, 1.0)
        z = normal if len(parts) == 1 and coefficient == 1 else z + coefficient * normal
    z = z.expand(shape)
    if not is_exact(source):
        return Draw.plain(z)
    exact = source

    def terms(i: int) -> list[Term]:
        return [Term(Fraction(coefficient), exact, at, i) for coefficient, at in parts]

    # |N| is at most 1 + ERROR times the largest |normal|. One product and one addition per part are rounded.
    error *= 1 + (len(parts) + 2) * 2.0**-12
    return Draw(z, z.new_full((1,) * len(shape), error), terms)


def _normals(source: Source, at: Address, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    if isinstance(source, Secure):
        return source.normal_on(at, shape, device)
    return torch.from_numpy(np.asarray(source.normal(at, shape))).to(device)


def stack(draws: Sequence[Draw], axis: int = 0) -> Draw:
    """Draws of equal shape along a new axis, for example one row per client.

    Args:
        draws: what to stack.
        axis: 0 for a new first axis; 1 for an axis after the first one, which holds runs.

    Returns:
        All of them as one draw.

    Raises:
        SordinoError: some sources are private and some are not.
    """
    each = [one.terms for one in draws]
    if len({terms is None for terms in each}) > 1:
        raise SordinoError("draws: some sources are private and some are not; settle them separately.")
    if len(draws) == 1:
        return Draw(draws[0].z.unsqueeze(axis), draws[0].error.unsqueeze(axis), draws[0].terms)
    size = math.prod(draws[0].z.shape[axis:])

    def stacked(i: int) -> list[Term]:
        row, place = divmod(i, size)
        before, row = divmod(row, len(each))
        terms = each[row]
        assert terms is not None
        return terms(before * size + place)

    common = np.broadcast_shapes(*(tuple(one.error.shape) for one in draws))
    error = torch.stack([one.error.expand(common) for one in draws], axis)
    return Draw(torch.stack([one.z for one in draws], axis), error, None if each[0] is None else stacked)


def grid_of(std: Tensor | float) -> Tensor:
    """The public grid of a release: the power of two above std / 2^15 and at most std / 2^14."""
    width = torch.as_tensor(std, dtype=torch.float64)
    if not bool(((width >= 2.0**-880) & (width <= 2.0**880)).all()):
        raise SordinoError(f"std: {std!r} must be a number from 2^-880 to 2^880 to give a grid.")
    return width / torch.frexp(width).mantissa * 2.0 ** -(GRID_BITS + 1)  # x / mantissa is a power of two, exactly


def settle(value: Tensor, noise: Draw, grid: Tensor | float) -> Tensor:
    """grid * round((value + ideal noise) / grid) in float64, rounded as in real arithmetic.

    `value` counts as an exact number. `grid` is a public power of two and broadcasts. In float64 the error of t =
    (value + z) / grid is at most error / grid + 2^-53 |t|. If t is closer than that to the middle of two integers, the
    rounding is not decided, and the sum is computed exactly. With the grid `grid_of(std)` and a value of the size of
    the noise, this happens for about one number in 2^22.
    """
    if value.shape != noise.z.shape:
        raise SordinoError(f"noise: its shape is {tuple(noise.z.shape)}, but value has {tuple(value.shape)}.")
    step = torch.as_tensor(grid, dtype=torch.float64, device=value.device)
    if not bool(((torch.frexp(step).mantissa == 0.5) & (step >= 2.0**-900) & (step <= 2.0**900)).all()):
        raise SordinoError(f"grid: {grid!r} must be a power of two from 2^-900 to 2^900; use grid_of(std).")
    noise = noise.to(value.device)
    t = (value.double() + noise.z).div_(step)
    points = t.round()
    size = points.abs()
    if points.numel() and not float(size.amax()) < _FAR:  # also if one is NaN
        raise SordinoError(f"value: it is not finite, or exceeds {_FAR:g} grid points; clip it, or use a coarser grid.")
    if noise.terms is not None and points.numel():
        # |t| <= size + 1/2. The factor 1.001 and 2^-51 cover the rounding of these lines themselves.
        reach = t.sub_(points).abs_().add_(size, alpha=2.0**-52).add_(noise.error / step * 1.001)
        middle = 0.5 - 2.0**-51
        if float(reach.amax()) >= middle:
            for i in (reach >= middle).reshape(-1).nonzero().reshape(-1).tolist():
                place = tuple(int(k) for k in np.unravel_index(i, value.shape))
                width = float(step.expand(value.shape)[place])
                points[place] = _round_exactly(float(value[place]), noise.terms(i), width)
    return points.mul_(step)


def _round_exactly(value: float, terms: Sequence[Term], grid: float) -> int:
    """round((value + sum of the terms) / grid), from intervals that are narrowed until both ends agree."""
    factors: dict[tuple[Exact, Address, int], Fraction] = {}  # the same normal may occur twice
    for term in terms:
        normal = (term.source, term.at, term.element)
        factors[normal] = factors.get(normal, Fraction(0)) + term.coefficient
    for words in itertools.count(1):
        low = high = Fraction(value)
        for (source, at, element), factor in factors.items():
            ends = sorted(factor * end for end in source.bounds(at, element, words))
            low, high = low + ends[0], high + ends[1]
        point = math.floor(low / Fraction(grid) + Fraction(1, 2))
        if point == math.floor(high / Fraction(grid) + Fraction(1, 2)):
            return point
    raise AssertionError("unreachable")
