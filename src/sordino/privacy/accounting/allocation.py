"""The loss of an epoch of random allocation: each record is in exactly one of `bins` minibatches, drawn at random.

A record draws its bin anew for every epoch, uniformly and independently of all others. Let the first `rounds` of the
`bins` minibatches of an epoch be released with Gaussian noise, the record's term being at most mu standard deviations
long. Against the releases without the record, the likelihood ratio is

    A = ((bins - rounds) + W_1 + ... + W_rounds) / bins,    W = exp(mu z - mu² / 2),

where z are independent standard normals without the record. No shorter term, and none that depends on earlier releases,
is worse (docs/proofs.md, "Random allocation"). The law of A is that of a mean of lognormals. B is the same for a record
in its place, with W' = exp(-mu z - mu² / 2). The divergence at alpha is E[(A - alpha)_+] (remove), E[(1 - alpha A)_+]
(add) and E[(A - alpha B)_+] (replace). All are expectations of a convex function of a sum of independent terms

    D = W - alpha,    1 - alpha W',    W - alpha W'.

Spreading a term over the two ends of its cell, with its mean kept, increases such an expectation, and so does raising a
term. A term may be cut at `top` if E[(D - top)_+] is added for each term, because (x + y)_+ is at most x_+ + y_+. That
is an equality if y, the sum of the others, is at least -top; so a `top` that is likely to exceed their shortfall costs
next to nothing, however far a term may reach. The terms then lie on a grid, and one Fourier transform and a power give
the law of their sum. What is wrapped around or lost to rounding is added.

There are two ways to the pair of an epoch. If only one record comes or goes, and one grid can hold A itself in cells
that are small compared with a term, the law of A on it is the answer in both directions (`_leaving`, `_joining`):
spreading A with its mean kept increases every divergence. Otherwise the divergence is computed at some alphas, each on
a grid of its own (`_from_profile`), from tilted masses, so that a small one is not lost in rounding. The chords between
them are above the convex function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sordino.lazy import scipy

Array = np.ndarray
MOST_MU = 3.5  # of a shift: above it an epoch counts as one release on all data
MOST_ALPHAS = 400  # at which a divergence is computed
MOST_LOSS = 300.0  # exp(MOST_LOSS) is the largest alpha
SUM_CELLS, COARSE_SUM_CELLS = 1 << 16, 1 << 15  # of a grid for all alphas, at most; the second one in wide cells
MOST_WIDTH = 0.25  # of a cell of such a grid, in standard deviations of one term
SUM_REACH = 12.0  # standard deviations of the sum, on either side of its mean, that it holds
WIDTH, CELLS = 0.1, 1 << 11  # of the grid for one alpha
SUM_ROUNDING = 2e-13  # about the bound on what rounding adds to all masses of such a grid, per round
MOST_STEP = 0.2  # of a cell of such a grid, as a share of the smallest sum that counts, if the loss grows as it falls
MOST_ROUNDING, MOST_COARSE_ROUNDING = 10.0, 100.0  # of it, as multiples of `cut`; the second one in wide cells
FLAT = 1.5  # a divergence that is not larger than the least one by more counts as the least one
_PLACES = 256  # units in the last place: more than the rounding of a cell's ends, relative to the terms there
_WRAPPED = 16.0  # -log of the tilted mass that may wrap around
_AT_ONCE = 8  # alphas of one epoch that are computed together if the first ones are not enough
MOST_AT_ONCE = 32  # the same of the first ones
_PARTS = np.linspace(0.0, 1.0, 60)  # of the range of a term that places a grid
_ROWS = 128  # alphas of several epochs that are computed together, at most
MOST_PROFILES = 4096  # that are remembered
_LOWER_TILTS = (0.7, 0.4, 0.2)  # as parts of the best one
_STEPS = 9  # of a tilt, to either side
_ENDS = [1, 1 + _STEPS]
_SHORTFALL = 8.0  # standard deviations by which the other terms may fall short of their mean before a cut costs much
_UNIT = 2.0**-52
_LEAST = (
    4.3  # standard deviations: a term that is smaller than here, under the measure that it weighs most in, is raised
)


class Law(NamedTuple):
    """A pair that dominates an epoch: its losses, P's masses on them, and P's mass at an infinite loss."""

    losses: Array
    masses: Array
    infinite: float


class Epoch(NamedTuple):
    """One epoch, and how exactly its pair is computed.

    Attributes:
      bins: minibatches of an epoch.
      rounds: how many of them are released, at most `bins`.
      mu: the largest length of a record's term, in standard deviations of the noise.
      way: `remove`, `add` or `replace`.
      cut: probability that may be counted as an infinite loss.
      spacing: of the losses of the pair, where it is computed loss by loss.
      growth: the same of large losses, as a share of the loss.
      width: of a cell that sums lie in there, in standard deviations of one term.
    """

    bins: int
    rounds: int
    mu: float
    way: str
    cut: float
    spacing: float
    growth: float = 0.025
    width: float = WIDTH

    @property
    def exchanged(self) -> Epoch:
        """The pair in the other order."""
        return self._replace(way={"remove": "add", "add": "remove", "replace": "replace"}[self.way])


@lru_cache(maxsize=64)
def law(epoch: Epoch) -> Law:
    """The pair that dominates one epoch.

    Args:
      epoch: the epoch.

    Returns:
      The pair.
    """
    grid = _usable_grid(epoch)
    if grid is None:
        return _from_profile(epoch)
    return (_leaving if epoch.way == "remove" else _joining)(epoch.bins, epoch.rounds, epoch.mu, grid)


def prepare(epochs: Iterable[Epoch]) -> None:
    """Compute what `law` needs of these epochs, many at once: one by one takes several times as long.

    Args:
      epochs: the epochs.
    """
    needed = [epoch for epoch in epochs if _usable_grid(epoch) is None]
    alike: dict[tuple[str, float], dict[Epoch, None]] = {}
    for either in (either for epoch in needed for either in (epoch, epoch.exchanged)):
        alike.setdefault((either.way, either.width), {})[either] = None
    for together in alike.values():
        _profiles(list(together))


def _usable_grid(epoch: Epoch) -> _SumGrid | None:
    """The grid that holds sums for all alphas, if there is one."""
    if epoch.way == "replace":
        return None
    width = min(epoch.spacing / loss_std(*epoch[:4]) / 5, MOST_WIDTH)
    grid = _sum_grid(epoch.rounds, epoch.mu, epoch.cut, width)
    coarse = epoch.width > WIDTH
    cells, most = (COARSE_SUM_CELLS, MOST_COARSE_ROUNDING) if coarse else (SUM_CELLS, MOST_ROUNDING)
    if grid.cells > cells:  # wider cells are still narrower than the losses of a profile are apart
        grid = _sum_grid(epoch.rounds, epoch.mu, epoch.cut, min(1.02 * width * grid.cells / cells, MOST_WIDTH))
    if grid.cells > cells or SUM_ROUNDING * epoch.rounds > most * epoch.cut:
        return None
    return grid if epoch.way == "remove" or grid.h <= MOST_STEP * _least_sum(epoch, grid) else None


def _least_sum(epoch: Epoch, grid: _SumGrid) -> float:
    """About the smallest sum that counts; a smaller one has at most the probability `cut`, or is not on the grid."""
    largest = float(scipy.special.ndtri(epoch.cut ** (1 / epoch.rounds)))  # of the z of all terms
    of_terms = math.exp(epoch.mu * largest - epoch.mu**2 / 2)  # a sum is at least its largest term
    return epoch.bins - epoch.rounds + max(grid.h * grid.start, of_terms)


def loss_std(bins: int, rounds: int, mu: float, way: str) -> float:
    """About the standard deviation of the loss of an epoch; not a bound."""
    return (1 + (way == "replace")) * math.sqrt(math.log1p(rounds * math.expm1(mu * mu) / bins**2))


# ------------------------------------------------------------------------------------------------- all alphas at once


class _SumGrid(NamedTuple):
    """A circle of cells for sums of terms.

    Attributes:
      h: width of a cell.
      top: number of the cell where a term is cut.
      start: number of the cell where the circle begins.
      cells: on the circle.
      cut: probability that may be counted as an infinite loss.
    """

    h: float
    top: int
    start: int
    cells: int
    cut: float

    @property
    def sums(self) -> Array:
        """The sums on the circle, in order."""
        return self.h * (self.start + np.arange(self.cells))

    def unrolled(self, masses: Array) -> Array:
        """Masses on the circle, which count sums from 0, in the order of `sums`."""
        return np.roll(masses, -(self.start % self.cells))


def _sum_grid(rounds: int, mu: float, cut: float, width: float) -> _SumGrid:
    """The circle for sums of so many terms; a cell has this width in standard deviations of one term."""
    h = width * math.sqrt(math.expm1(mu * mu))
    top = math.exp(mu * (mu - float(scipy.special.ndtri(cut / 4))) - mu * mu / 2)
    spread = SUM_REACH / width * h * math.sqrt(rounds)
    start = math.floor(max(0.0, rounds - spread) / h)
    cells = max(math.ceil((rounds + spread + 1.2 * top) / h) - start, math.ceil(top / h)) + 1
    return _SumGrid(h, math.ceil(top / h), start, scipy.fft.next_fast_len(cells, real=True), cut)


def _terms(mu: float, grid: _SumGrid, sign: float) -> tuple[Array, Array]:
    """The values of a term without the record, and their masses: each cell is split between its ends.

    What lies above the last value is moved to it. The mean is rounded up (sign 1) or down (sign -1).
    """
    values = grid.h * np.arange(grid.top + 1)
    z = np.append(_normal_at(values, mu), np.inf)
    q, q_slack = normal_masses(z)
    p, p_slack = normal_masses(z - mu)
    slack = sign * (p_slack + values * q_slack)
    up = np.clip((p - values * q + slack)[:-1] / grid.h, 0.0, (q + q_slack)[:-1])
    mass = q + q_slack
    mass[:-1] -= up
    mass[1:] += up
    return values, mass


def _normal_at(values: Array, mu: float) -> Array:
    """The z at which a term has these values."""
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(values) + mu * mu / 2) / mu)


def _leaving(bins: int, rounds: int, mu: float, grid: _SumGrid) -> Law:
    """The law of the likelihood ratio under the data set with a record that leaves.

    With the record, a sum has one term from the shifted normal, which by symmetry is the first one, or no such term if
    the record is in a minibatch that is not released. Sums below the circle are raised to its last cells.

    Args:
      bins: minibatches of an epoch.
      rounds: how many of them are released.
      mu: the largest length of a record's term.
      grid: of the sums.

    Returns:
      The pair.
    """
    values, mass = _terms(mu, grid, 1.0)
    size = grid.cells
    others, other_lost = _power(mass, rounds - 1, size)
    first = ((bins - rounds) + rounds * values) / bins * mass
    spectrum = scipy.fft.rfft(first, size)
    norm, c = float(first.sum()), 3 * _UNIT * math.log2(size)
    lost = 2 * float(((np.abs(spectrum) + c * norm) * other_lost + np.abs(others) * c * norm * 2).sum()) / size
    masses = np.maximum(scipy.fft.irfft(spectrum * others, size), 0.0) + lost + 4 * c * norm / size
    cut = rounds / bins * float(scipy.special.ndtr(mu - _normal_at(values[-1:], mu)[0]))
    infinite = cut + _beyond(values, first, mass, rounds, grid, 1.0)
    return _sorted_law((bins - rounds + grid.sums) / bins, grid.unrolled(masses), infinite, 1.0)


def _joining(bins: int, rounds: int, mu: float, grid: _SumGrid) -> Law:
    """The law of the likelihood ratio under the data set without a record that joins.

    A term is nowhere larger than without the cut, and sums above the circle are lowered to its first cells: both
    increase the divergence, which falls with every term. Sums below the circle count as an infinite loss.
    """
    values, mass = _terms(mu, grid, -1.0)
    power, lost = _power(mass, rounds, grid.cells)
    masses = np.maximum(scipy.fft.irfft(power, grid.cells), 0.0) + 2 * float(lost.sum()) / grid.cells
    infinite = _beyond(values, mass, mass, rounds, grid, -1.0) if grid.start else 0.0
    return _sorted_law((bins - rounds + grid.sums) / bins, grid.unrolled(masses), infinite, -1.0)


def _sorted_law(ratios: Array, masses: Array, infinite: float, sign: float) -> Law:
    """The pair with these likelihood ratios, or their inverses (sign -1); a ratio of 0 is an infinite loss there."""
    keep = ratios > 0
    lost = float(masses[~keep].sum()) if sign < 0 else 0.0
    order = slice(None, None, int(sign))
    return Law((sign * np.log(ratios[keep]))[order], masses[keep][order], infinite + lost)


def _beyond(values: Array, first: Array, mass: Array, rounds: int, grid: _SumGrid, sign: float) -> float:
    """The mass of sums above the circle (sign 1) or below it (sign -1), by Chernoff: they would wrap around."""
    end = grid.h * (grid.start + (grid.cells if sign > 0 else 0))
    spread = math.sqrt(rounds * float(mass @ (values - 1) ** 2))
    best, some = 0.0, mass > 0
    values, first, mass = values[some], first[some], mass[some]  # the largest exponential, 1, has a mass
    for several in (_geometric(5.0, 20.0, 3) / spread, _geometric(3.0, 300.0, 12) / end):
        last = math.inf
        for t in sign * several:
            exponent = t * values
            top = float(exponent.max())
            exponential = np.exp(exponent - top)
            weight = math.log(float(first @ exponential)) + (rounds - 1) * math.log(float(mass @ exponential))
            weight += rounds * top - t * end
            best = min(best, weight)
            if weight > last or best < math.log(grid.cut) - 5:  # it is convex in t
                break
            last = weight
    return math.exp(best)


def _geometric(low: float | Array, high: float | Array, number: int) -> Array:
    """Numbers from low to high in equal ratios, along a new last axis. `np.geomspace` takes longer than all else."""
    low, high = np.asarray(low)[..., None], np.asarray(high)[..., None]
    return np.asarray(low * (high / low) ** (np.arange(number) / (number - 1)))


def normal_masses(z: Array) -> tuple[Array, Array]:
    """The standard normal's masses between successive z, each from the smaller tail, and a bound on their rounding."""
    tail = scipy.special.ndtr(-np.abs(z))
    a, b = tail[..., :-1], tail[..., 1:]
    mass, slack = np.abs(a - b), 8 * _UNIT * np.maximum(a, b)
    apart = (z < 0)[..., :-1] & (z > 0)[..., 1:]  # one cell per row, if any
    mass[apart], slack[apart] = 1 - (a[apart] + b[apart]), 4 * _UNIT
    return np.asarray(mass), np.asarray(slack)


def _power(mass: Array, times: int | Array, size: int) -> tuple[Array, Array]:
    """The transform of `times` equal terms on a circle, and a bound on the rounding of each entry.

    `times` may be a column, one number per row of `mass`. A row of `mass` adds up to 1, up to rounding, and has at most
    `size` entries. The bounds are those of `subsampled._compose`, and cover the transform back as well.
    """
    z = scipy.fft.rfft(mass, size)
    c = 3 * _UNIT * math.log2(size)
    bound = np.abs(z) + c
    most = np.exp(times * np.log(bound))
    result, base, left = np.ones_like(z), np.where(most > 1e-80, z, 0.0), np.asarray(times, int)
    if left.size and left.min() == left.max():
        left = left.reshape(-1)[:1]  # the same number for all rows
    while left.any():
        odd = left % 2 == 1
        if odd.all():
            result = result * base
        elif odd.any():
            result = result * np.where(odd, base, 1.0)
        left = left // 2
        if left.any():
            base = base * base
    return result, most * (times * (c / bound + 8 * _UNIT) + 8 * _UNIT + c)


# ------------------------------------------------------------------------------------------- divergence by divergence


def _from_profile(epoch: Epoch) -> Law:
    """The pair whose divergence is the chords between divergences at some alpha, which are above the convex function.

    Those at alpha < 1 follow from those of the exchanged pair above: add for remove, and the reverse. The pair of a
    replaced record is symmetric.
    """
    (above, at), (other, other_at) = _profiles([epoch])[0], _profiles([epoch.exchanged])[0]
    below = 1 - 1 / other[:0:-1] + other_at[:0:-1] / other[:0:-1]
    alphas = np.concatenate([[0.0], 1 / other[:0:-1], above])
    values = np.concatenate([[1.0], below, at]) * (1 + 4 * _UNIT)
    kept = _hull(alphas, values)
    alphas, values = alphas[kept], values[kept]
    # -slope is Q's mass above alpha. P's mass on a corner is alpha times the change of the slope.
    slopes = np.append(np.diff(values) / np.diff(alphas), 0.0)
    slack = 8 * _UNIT * (np.append(values[:-1] / np.diff(alphas), 0.0))
    masses = alphas[1:] * (np.maximum(np.diff(slopes), 0.0) + slack[1:] + slack[:-1])
    return Law(np.log(alphas[1:]), masses, float(values[-1]))


_remembered: dict[Epoch, tuple[Array, Array]] = {}


def _profiles(epochs: Sequence[Epoch]) -> list[tuple[Array, Array]]:
    """Per epoch, alphas from 1 on and upper bounds on the divergence there, which never increase; the last is at most
    `cut`. All epochs have the same way and width.

    A record that joins reduces no probability below a factor of (bins - rounds) / bins, so its divergence ends there.
    """
    if len(_remembered) > MOST_PROFILES:
        _remembered.clear()
    epsilons = {epoch: [0.0] for epoch in epochs if epoch not in _remembered}
    deltas = {epoch: np.ones(0) for epoch in epsilons}
    wanted = {epoch: _usual_number(epoch) for epoch in epsilons}
    pending = list(epsilons)
    while pending:
        for epoch in pending:
            losses = epsilons[epoch]
            while len(losses) < len(deltas[epoch]) + wanted[epoch]:
                losses.append(min(losses[-1] + max(epoch.spacing, epoch.growth * losses[-1]), MOST_LOSS))
        found = at_losses([(epoch, epsilons[epoch][-wanted[epoch] :]) for epoch in pending])
        wanted = dict.fromkeys(pending, _AT_ONCE)
        still = []
        for epoch, new in zip(pending, found, strict=True):
            falls = not len(deltas[epoch]) or bool(new.min() < 0.9 * deltas[epoch].min())
            deltas[epoch] = known = np.append(deltas[epoch], new)
            if falls and not (known <= epoch.cut).any() and len(known) < MOST_ALPHAS:
                still.append(epoch)
        pending = still
    for epoch, known in deltas.items():
        least = max(epoch.cut, FLAT * float(known.min()))  # what follows is rounding, and would misplace a grid
        kept = int(np.flatnonzero(known <= least)[0]) + 1
        alphas = np.exp(np.minimum(epsilons[epoch][:kept], _most_loss(epoch)))
        _remembered[epoch] = alphas, np.minimum.accumulate(known[:kept])
    return [_remembered[epoch] for epoch in epochs]


def _most_loss(epoch: Epoch) -> float:
    """The epsilon from which on the divergence is 0."""
    joins = epoch.way == "add" and epoch.rounds < epoch.bins
    return math.log(epoch.bins / (epoch.bins - epoch.rounds)) if joins else math.inf


def epsilon_near(epoch: Epoch, delta: float, near: float, spacing: float) -> float:
    """An epsilon of one epoch by itself: divergences at some losses around one of them, and chords, which are bounds.

    Args:
      epoch: the epoch; `spacing` and `growth` are not used.
      delta: the delta.
      near: the epsilon around which the losses lie.
      spacing: of the nearest losses, as a share of epsilon.

    Returns:
      An upper bound on epsilon, tight if it is near; infinite if it lies far above, and the first loss if far below.
    """
    steps = np.concatenate([spacing * (0.5 + np.arange(4)), _geometric(6 * spacing, 1.5, 5)])
    losses = np.minimum(near * np.exp(np.concatenate([-steps[::-1], steps])), MOST_LOSS)
    (deltas,) = at_losses([(epoch, losses.tolist())])
    enough = np.flatnonzero(deltas <= delta)
    if not len(enough):
        return math.inf
    last = int(enough[0])
    if not last:
        return float(losses[0])
    (left, right), (above, below) = losses[last - 1 : last + 1], deltas[last - 1 : last + 1]
    return float(left + math.log1p((above - delta) / (above - below) * math.expm1(right - left))) * (1 + 1e-14)


def _usual_number(epoch: Epoch) -> int:
    """About the number of losses until the divergence falls below `cut`, so that few of them are computed in vain."""
    reach = -float(scipy.special.ndtri(epoch.cut))
    usual = reach * loss_std(*epoch[:4])
    if epoch.way != "add":  # one large term among others
        usual = max(usual, math.log1p(math.exp(min(epoch.mu * (epoch.mu / 2 + reach), MOST_LOSS)) / epoch.bins))
    usual, number, loss = min(usual, _most_loss(epoch), MOST_LOSS), 2, 0.0
    while loss < usual and number < MOST_AT_ONCE:
        loss, number = loss + max(epoch.spacing, epoch.growth * loss), number + 1
    return number


def at_losses(losses: Sequence[tuple[Epoch, Sequence[float]]]) -> list[Array]:
    """Per epoch, upper bounds on the divergence at its losses. All epochs have the same way and width."""
    results = [np.zeros(len(each)) for _, each in losses]  # 0 from `_most_loss` on
    rows = [
        (n, k, epoch, loss)
        for n, (epoch, each) in enumerate(losses)
        for most in (_most_loss(epoch),)
        for k, loss in enumerate(each)
        if loss < most
    ]
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        bins, rounds, mu, cut = np.array([(e.bins, e.rounds, e.mu, e.cut) for _, _, e, _ in some]).T
        way, width = some[0][2].way, some[0][2].width
        cells = int(CELLS * WIDTH / width) // (1 + (way == "remove"))
        alphas = np.exp([loss for *_, loss in some])
        found = divergences(alphas, bins.astype(int), rounds.astype(int), mu, way, cut / 4, width, cells)
        for (n, k, *_), bound in zip(some, found.tolist(), strict=True):
            results[n][k] = bound
    return results


def _hull(x: Array, y: Array) -> list[int]:
    """The corners of the largest convex function that is nowhere above the points: it is above any convex function
    that is nowhere above them."""
    kept: list[int] = []
    for n in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[n] - x[a]) < (y[n] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(n)
    return kept


class _Terms(NamedTuple):
    """What is random in a term, as an increasing function of a standard normal z: W, -alpha W' or W - alpha W'.

    E[W; cell] is the mass of the cell under a normal with mean mu, and E[W'; cell] that with mean -mu. One row per
    alpha.
    """

    alpha: Array
    mu: Array
    ahead: bool  # there is a W
    behind: bool  # there is a W'

    @property
    def std(self) -> Array:
        """The standard deviation."""
        one, both = np.expm1(self.mu**2), -np.expm1(-(self.mu**2))
        variance = one * self.ahead + one * self.alpha**2 * self.behind
        return np.asarray(np.sqrt(variance + 2 * self.alpha * both * (self.ahead and self.behind)))

    def mean(self, with_w: Array, with_other: Array) -> Array:
        """The mean from the masses under both normals."""
        if self.ahead and self.behind:
            return np.asarray(with_w - self.alpha * with_other)
        return np.asarray(with_w if self.ahead else -self.alpha * with_other)

    def at(self, z: Array) -> Array:
        """The term at z."""
        return self.mean(np.exp(self.mu * z - self.mu**2 / 2), np.exp(-self.mu * z - self.mu**2 / 2))

    def where(self, value: Array) -> Array:
        """The z at which the term has this value; infinite outside its range."""
        alpha, half = self.alpha, self.mu**2 / 2
        if self.ahead and self.behind:
            return np.asarray((np.log(alpha) / 2 + np.arcsinh(value * (np.exp(half) / 2 / np.sqrt(alpha)))) / self.mu)
        with np.errstate(divide="ignore"):
            if self.ahead:
                return np.asarray((np.log(np.maximum(value, 0.0)) + half) / self.mu)
            return np.asarray((np.log(alpha) - np.log(np.maximum(-value, 0.0)) - half) / self.mu)


def divergences(
    alphas: Array,
    bins: int | Array,
    rounds: int | Array,
    mu: float | Array,
    way: str,
    cut: float | Array,
    width: float = WIDTH,
    cells: int = CELLS,
) -> Array:
    """Upper bounds on E[(A - alpha)_+], E[(1 - alpha A)_+] or E[(A - alpha B)_+], for some alpha >= 1.

    Args:
      alphas: the factors, exp(epsilon).
      bins: minibatches of an epoch; here and below, one number or one per alpha.
      rounds: how many of them are released.
      mu: the largest length of a record's term, in standard deviations of the noise.
      way: `remove`, `add` or `replace`.
      cut: what may be added to a divergence.
      width: of a cell, in standard deviations of one term.
      cells: at most, for each alpha.

    Returns:
      One bound per alpha.
    """
    bins, rounds, mu, cut = (np.broadcast_to(each, alphas.shape)[:, None] for each in (bins, rounds, mu, cut))
    terms = _Terms(alphas[:, None], mu, way != "add", way != "remove")
    alpha, std = terms.alpha, terms.std
    constant = (bins - rounds * terms.ahead) - alpha * (bins - rounds * terms.behind)
    scale = (
        std if way == "remove" else np.minimum(std, 3 * alpha)
    )  # of what counts: rare large W' leave no positive sum
    if way == "add":  # a sum is positive only if no term is below -constant
        scale = np.minimum(scale, np.maximum(constant, 1e-6 * scale) / 2)
    spread = scale * np.sqrt(rounds)
    first = -mu * terms.behind - _LEAST
    z = first + (mu * terms.ahead - scipy.special.ndtri(cut) - first) * _PARTS
    log_p = -z * z / 2 + np.log((z[:, 1:2] - z[:, :1]) / math.sqrt(2 * math.pi))  # only places the grid
    enough = (bins - 1) * (alpha - 1) + _SHORTFALL * spread
    usual = 1 - alpha - (constant - (bins - rounds) * (1 - alpha)) / rounds  # the mean of a term
    enough = -constant if way == "remove" else enough  # no W is negative, so one of this length makes the sum positive
    d = terms.at(z)
    low, top = np.maximum(d[:, :1], usual - enough), np.minimum(d[:, -1:], usual + enough)
    if way == "add":  # a term below -constant leaves no positive sum, nor does one that is raised to it
        low = np.where((-constant < top) & (constant > 0), np.maximum(low, -constant), low)
    d = np.clip(d, low, top)

    def log_moments(t: Array, some: Array | slice = slice(None)) -> Array:
        exponents = log_p[some, None, :] + t[:, :, None] * d[some, None, :]
        return np.asarray(rounds[some] * _log_sum(exponents)[..., 0] + t * constant[some])

    tilts = _geometric((4e-3 / enough)[:, 0], (40.0 / spread)[:, 0], 14)
    moments = log_moments(tilts)
    row = np.arange(len(alphas))[:, None]
    best = moments.argmin(1)[:, None]
    theta, least = tilts[row, best], moments[row, best]
    last, goal = np.maximum(top, 2 * scale), np.log(cut * bins)
    for _ in range(2):
        lasts = (moments - goal + np.log(last)) / tilts
        last = np.maximum(lasts.min(1, keepdims=True), 2 * scale)
    t_last = tilts[row, lasts.argmin(1)[:, None]]
    # Under the tilt, little mass may wrap around from below to the last sums, or from above to the positive ones.
    steps = _geometric((0.4 / enough)[:, 0], (10.0 / spread)[:, 0], _STEPS)

    def window(theta: Array, some: Array | slice = slice(None)) -> tuple[Array, Array]:
        own = steps[some]
        k, below, above = np.split(log_moments(np.concatenate([theta, theta - own, theta + own], 1), some), _ENDS, 1)
        wrapped = k - least[some] + _WRAPPED
        start = np.minimum(((k - below - wrapped) / own).max(1, keepdims=True), -scale[some])
        return start, np.maximum(last[some], start + ((above - k + wrapped) / own).min(1, keepdims=True))

    best, (start, end) = theta.copy(), window(theta)
    # Where rare large terms weigh so much at the best tilt that the window grows, a lower one helps.
    long = np.flatnonzero(end - start > np.maximum(1.2 * (last - start), 1.5 * cells * width * scale))
    for part in _LOWER_TILTS if len(long) else ():
        lower = part * best[long]
        first, beyond = window(lower, long)
        shorter = (beyond - first < (end - start)[long])[:, 0]
        for kept, found in ((theta, lower), (start, first), (end, beyond)):
            kept[long[shorter]] = found[shorter]
    last = end
    extent = np.maximum(last - start, top - low)
    h = np.clip(width * scale, extent / cells, 2 * extent / cells)
    return _on_grids(terms, constant, bins, rounds, (low, top), (start, last), h, theta, t_last)


def _on_grids(
    terms: _Terms, constant: Array, bins: Array, rounds: Array, term: tuple[Array, Array], window: tuple[Array, Array],
    h: Array, theta: Array, t_last: Array,
) -> Array:  # fmt: skip
    """The divergences, from tilted masses on circles of cells that hold the sums in `window`.

    All circles have as many cells as the largest needs.
    """
    low = np.floor(term[0] / h)
    cells = (np.ceil(term[1] / h) - low).astype(int)
    values = h * (low + np.arange(int(cells.max()) + 1))
    mass, beyond = _spread(terms, values, h, cells)
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    tilted = log_mass + theta * values
    k = _log_sum(tilted)
    start = np.floor((window[0] - constant) / h)
    needed = max(int(np.ceil((window[1] - window[0]) / h).max()) + 2, values.shape[1])
    size = scipy.fft.next_fast_len(needed, real=True)
    power, errors = _power(np.exp(tilted - k), rounds, size)
    lost = 2 * errors.sum(1, keepdims=True) / size
    sums = np.maximum(scipy.fft.irfft(power, size), 0.0) + lost
    place = (rounds * low - start) % size + np.arange(size)
    place = h * (start + np.where(place < size, place, place - size))
    above = place + constant + 8 * _UNIT * (np.abs(place) + np.abs(constant))
    weights = np.exp(np.minimum(rounds * k + theta * (constant - above), 600.0)) * np.maximum(above, 0.0)
    # Sums beyond the window: E[S; S > last] is at most last exp(K(t) - t last) for t >= 1 / last.
    end = h * (start + size)
    last = end + constant - 8 * _UNIT * (np.abs(end) + np.abs(constant))
    known = last > 0  # not if the window is lost in the rounding of a huge alpha; then only 1 is proved
    last = np.where(known, last, 1.0)
    t = np.maximum(t_last, 1 / last)
    wrapped = last * np.exp(np.minimum(rounds * _log_sum(log_mass + t * values) + t * (constant - last), 600.0))
    total = (sums * weights).sum(1, keepdims=True) * (1 + 1e-9 + 1e-12 * rounds) + wrapped
    bound = (total + rounds * beyond) / bins
    return np.asarray(np.where(known & (bound < 1), bound, 1.0)[:, 0])  # also if it is not a number


def _spread(terms: _Terms, values: Array, h: Array, cells: Array) -> tuple[Array, Array]:
    """The masses of terms on the values, and E[(D - top)_+], both rounded up; row k ends with the value `cells[k]`.

    Each cell is split between its ends with its mean kept. What lies below the first value is raised to it.
    """
    alpha, z, left = terms.alpha, terms.where(values), values[:, :-1]
    z[:, 0] = -np.inf
    (m, m_slack), (p, p_slack), (q, q_slack) = (
        normal_masses(z - shift) if used else (np.zeros(left.shape),) * 2
        for shift, used in ((0.0, True), (terms.mu, terms.ahead), (-terms.mu, terms.behind))
    )
    slack = p_slack + alpha * q_slack + np.abs(left) * m_slack + _PLACES * _UNIT * (p + alpha * q)
    whole = np.where(np.arange(left.shape[1]) < cells, m + m_slack, 0.0)
    up = np.clip((terms.mean(p, q) - left * m + slack) / h, 0.0, whole)
    mass = np.zeros(values.shape)
    mass[:, :-1] += whole - up
    mass[:, 1:] += up
    row = np.arange(len(values))[:, None]
    top, end = values[row, cells], z[row, cells]
    cut, ahead, behind = (scipy.special.ndtr(shift - end) for shift in (0.0, terms.mu, -terms.mu))
    mass[row, cells] += cut
    rounding = _PLACES * _UNIT * (ahead + alpha * behind + np.abs(top) * cut)
    return mass, np.maximum(0.0, terms.mean(ahead, behind) - top * cut) + rounding


def _log_sum(exponents: Array) -> Array:
    """The logarithm of the sum of exponentials, row by row."""
    top = exponents.max(-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(exponents - top).sum(-1, keepdims=True)))
