"""The noise of many accounts at once: the curves of `subsampled`, as rows of arrays.

A client of its own size and number of rounds has an account of its own. A curve on a coarse grid is short, so that most
of the time of a single one goes into calls of NumPy. Here accounts with the same samplers are the rows of a batch. Each
row has its own grid; all have the same number of cells. The bounds, and what is added for what is cut off, wrapped
around or lost to rounding, are those of `subsampled._compose`: every result is an upper bound.

Accounts with epochs are evaluated one by one, but share the divergences of their epochs. One epoch by itself needs no
curve: its divergence at the epsilon to keep is all that counts.

The search is a secant in the logarithm of the noise, for many rows together. A few accounts that are far apart are
searched first. What the others need is interpolated (`interpolation`), so that most of them are evaluated once. A row
that is not settled by then is searched by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sordino.core import Adjacency
from sordino.lazy import scipy
from sordino.privacy.accounting import allocation, gaussian, interpolation, subsampled
from sordino.privacy.accounting.samplers import SampledAccount, SampledGaussian, Sampler
from sordino.privacy.accounting.subsampled import COARSE, MIDDLE, MOST_LOSS, MOST_MU, Array, Number

FEWEST = 8  # rows of a batch
STEPS = 12  # of the search, at most
PATIENCE = 3  # steps after which the tolerance is three times as wide
VERSION = 3  # of the search: stored results of other versions are not read
MOST_TOLERANCE = 4e-3  # a result exceeds the smallest factor by about this share at most, and by what its grid adds
LEAST_TOLERANCE = 4e-4  # the same where interpolation is exact
FINE = 2 * MIDDLE  # relative error of epsilon that grids may cause if the tolerance is that of very many accounts
BELOW = -0.3  # excess of log epsilon that is assumed where a grid begins above epsilon
NEAR = 0.05  # excess of log epsilon from which one step is exact enough for a guess
POINTS = 120  # losses of one release that place a grid
LEAST_CELLS, MOST_CELLS = 256, 1 << 15
MOST_SURPLUS = 23.0  # log of the tilted mass over delta: with more, rounding would be a visible part of delta
LONG_CELLS = 1 << 13  # for a grid with more, lower tilts are tried
LOWER_TILTS = (0.8, 0.6, 0.4)  # as parts of the saddle point
MOST_WIDTH, LEAST_PLACES = 16, 128  # cells between two epsilons at which delta is computed; number of these
_DEAD = 1e-60  # more than what a frequency with a power below exp(-200) may add to a mass
AT_ONCE = 1 << 16  # cells of all rows whose curves are computed together
USUAL_RATIO = 0.93  # of the factor of an account with epochs to that of `moments`
_MARGIN = 1e-6  # on log epsilon, for rounding of mu over a factor by the caller, as in `subsampled._search`


class Batch(NamedTuple):
    """Accounts whose releases have the same samplers, one per row.

    Attributes:
      samplers: of each column.
      rate: rows x releases; so are `mu` and `times`.
      mu: of a release, at a factor of 1.
      times: how often it is made.
      beside: per row, mu of the Gaussian releases on all data, at a factor of 1.
      target: the epsilon to keep.
    """

    samplers: tuple[Sampler, ...]
    rate: Array
    mu: Array
    times: Array
    beside: Array
    target: Array

    def rows(self, which: Array) -> Batch:
        """These rows."""
        return Batch(self.samplers, *(each[which] for each in self[1:]))

    def with_noise(self, factors: Array) -> Batch:
        """Every standard deviation of row j multiplied by factors[j]."""
        return self._replace(mu=self.mu / factors[:, None], beside=self.beside / factors)

    def parts(self, row: int) -> tuple[SampledGaussian, ...]:
        """The releases of one row."""
        columns = zip(self.rate[row], self.mu[row], self.times[row], self.samplers, strict=True)
        return tuple(SampledGaussian(float(q), float(m), int(n), sampler) for q, m, n, sampler in columns)


def scales(accounts: Sequence[SampledAccount], delta: float, adjacency: Adjacency) -> list[float]:
    """As `subsampled.scale`, of several accounts. Many accounts are searched on less fine grids (`tolerance`).

    Args:
      accounts: the accounts. Neighbours in this order should be alike.
      delta: the delta.
      adjacency: which data sets are neighbours.

    Returns:
      One factor per account. Each was itself evaluated.

    Raises:
      SordinoError: an argument is out of its range.
    """
    gaussian._check(delta=delta)
    result, tolerance = np.full(len(accounts), np.inf), subsampled.tolerance(accounts)
    searches: list[tuple[list[int], list[object], Callable[[], Array]]] = []
    for places, batch in batches(accounts, delta, adjacency):
        rows: list[object] = [list(batch.samplers), *(each.tolist() for each in batch[1:])]
        searches.append((places, rows, partial(factors, batch, delta, adjacency, tolerance)))
    for places, epochs in _with_epochs(accounts, delta, adjacency):
        described: list[object] = [[subsampled._described(each.parts), *each[1:]] for each in epochs]
        searches.append((places, described, partial(_epoch_factors, epochs, delta, adjacency)))
    for places, facts, search in searches:
        key = json.dumps([VERSION, subsampled.VERSION, facts, delta, str(adjacency), tolerance])
        known = subsampled._stored_text(key)
        if known is None:
            known = ",".join(map(repr, search().tolist()))
            subsampled._store_text(key, known)
        result[places] = [float(number) for number in known.split(",")]
    for n in np.flatnonzero(np.isinf(result)).tolist():
        releases, mu, epsilon = accounts[n]
        result[n] = subsampled.scale(releases, epsilon, delta, adjacency, mu, tolerance=tolerance)
    return [float(factor) for factor in result]


def batches(
    accounts: Sequence[SampledAccount], delta: float, adjacency: Adjacency
) -> Iterator[tuple[list[int], Batch]]:
    """Batches of accounts with the same samplers, each with their places among the accounts. Accounts with epochs or an
    infinite epsilon, and those that few are like, are in none of them.

    Args:
      accounts: the accounts.
      delta: the delta.
      adjacency: which data sets are neighbours.

    Yields:
      The places of the accounts of a batch, and the batch.

    Raises:
      SordinoError: an argument is out of its range.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    folded = [subsampled._fold(account.releases, adjacency, account.gaussian_mu) for account in accounts]
    for n, (parts, beside) in enumerate(folded):
        spans = any(part.span for part in parts)
        if parts and not spans and math.isfinite(accounts[n].epsilon) and subsampled._ever(parts) > delta:
            alike.setdefault((beside > 0, *(part.sampler for part in parts)), []).append(n)
    for places in alike.values():
        if len(places) < FEWEST:
            continue
        of_places = [folded[n][0] for n in places]
        rate = np.array([[part.rate for part in parts] for parts in of_places])
        mu = np.array([[part.mu for part in parts] for parts in of_places])
        times = np.array([[part.times for part in parts] for parts in of_places])
        of_rows = np.array([(folded[n][1], accounts[n].epsilon) for n in places]).T
        yield places, Batch(tuple(part.sampler for part in of_places[0]), rate, mu, times, *of_rows)


def factors(batch: Batch, delta: float, adjacency: Adjacency, tolerance: float) -> Array:
    """Per row, the factor on every standard deviation with which it keeps its epsilon; infinite if none was found.

    Args:
      batch: the accounts.
      delta: the delta.
      adjacency: which data sets are neighbours.
      tolerance: as of `subsampled.scale`.

    Returns:
      One factor per row. Each was itself evaluated in all directions.
    """
    grid = FINE if tolerance >= subsampled.WIDE else MIDDLE
    level = delta * (1 - subsampled._overflow(batch.parts(0)))
    allowed = {epsilon: subsampled._allowed(epsilon, delta) for epsilon in set(batch.target.tolist())}
    mu = np.array([allowed[epsilon] for epsilon in batch.target.tolist()])
    most = _unsampled(batch, adjacency) / mu
    guess, slope = _limits(batch, adjacency, most, mu)
    first = subsampled._ways(adjacency)[0]

    def coarse(rows: Array, at: Array) -> tuple[Array, Array]:
        return reached(batch.rows(rows).with_noise(at), level, first, COARSE)

    def fine(rows: Array, at: Array) -> tuple[Array, Array]:
        return _in_all_ways(batch.rows(rows).with_noise(at), level, adjacency, grid)

    def start(rows: Array) -> tuple[Array, Array]:
        return _search(coarse, rows, batch.target, guess, slope, 0.0, 4)[1:]

    columns = np.column_stack([batch.rate, batch.mu, batch.times, batch.target, batch.beside])
    close = min(tolerance, MOST_TOLERANCE)
    found = _in_sets(fine, start, _places(columns), batch.target, guess.copy(), slope, close, 3)
    return np.where(found < most, found, np.inf)


def _places(columns: Array) -> Array:
    """The logarithms of each row's numbers, without columns that are the same in all rows, or 0 in some."""
    return interpolation.rounded_logs(columns[:, (columns > 0).all(0) & (np.ptp(columns, axis=0) > 0)])


def _in_sets(
    spent: Callable[[Array, Array], tuple[Array, Array]],
    start: Callable[[Array], tuple[Array, Array]],
    places: Array,
    target: Array,
    limits: Array,
    slope: Array,
    close: float,
    growth: int,
) -> Array:
    """Search a few rows, and the others from where those point.

    Args:
      spent: as of `_search`.
      start: a guess and the derivative for these rows, if nothing is known yet.
      places: of each row, for interpolation.
      target: epsilons.
      limits: about the factors; what they are wrong by is interpolated.
      slope: about the derivatives; those of searched rows are put in their place.
      close: the tolerance; narrower where interpolation is exact.
      growth: as of `interpolation.spread_out`: 1 if rows are evaluated one by one, and more if together is faster.

    Returns:
      As `factors`.
    """
    found, guess, known, narrow = np.full(len(target), np.inf), limits.copy(), np.zeros(0, int), close
    for rows in interpolation.spread_out(places, growth):
        interpolates = len(known) > places.shape[1]
        if interpolates:
            values = np.column_stack([np.log(guess / limits), slope])[known]
            ratios, slope[rows] = interpolation.interpolated(places[known], values, places[rows]).T
            guess[rows] = limits[rows] * np.exp(ratios)
        else:
            guess[rows], slope[rows] = start(rows)
        before = np.log(guess[rows])
        found[rows], guess[rows], slope[rows] = _search(spent, rows, target, guess, slope, narrow, STEPS)
        if interpolates:
            error = float(np.quantile(np.abs(np.log(guess[rows]) - before), 0.9))
            narrow = min(max(2 * error, LEAST_TOLERANCE), close)
        known = np.append(known, rows[np.isfinite(found[rows])])
    return found


def _search(
    spent: Callable[[Array, Array], tuple[Array, Array]],
    rows: Array,
    target: Array,
    guess: Array,
    slope: Array,
    tolerance: float,
    steps: int,
) -> tuple[Array, Array, Array]:
    """Secants of log epsilon in log factor, for these rows, each by itself.

    Args:
      spent: the epsilons of these rows at these factors, and whether they may be much smaller.
      rows: those to search.
      target: epsilons; here and below, one per row of the batch.
      guess: about the smallest factors that keep it.
      slope: about the derivative.
      tolerance: of the factor of a row that keeps its target; 0 if the next guess is what is asked for.
      steps: at most.

    Returns:
      The smallest factor that kept the target, infinite if none is within the tolerance; the guess; the slope.
    """
    searched, best, guess, slope = rows, np.full(len(guess), np.inf), guess.copy(), slope.copy()
    before = np.full((2, len(guess)), np.nan)  # the last log factor, and its excess
    settled = np.zeros(0, int)
    for step in range(steps):
        at = guess[rows] * math.exp(0.5 * tolerance)
        with np.errstate(divide="ignore", invalid="ignore"):
            epsilons, below = spent(rows, at)
            fits = ~np.isnan(epsilons)
            rows, at, epsilons, below = (each[fits] for each in (rows, at, epsilons, below))
            excess = np.log(np.clip(epsilons / target[rows], 1e-9, 1e9)) + _MARGIN
            excess = np.where(below & (excess <= 0), np.minimum(excess, BELOW), excess)
            secant = (excess - before[1, rows]) / (np.log(at) - before[0, rows])
        known = np.isfinite(secant) & (np.abs(excess - before[1, rows]) > 1e-4)
        slope[rows] = np.where(known, np.clip(secant, -8.0, -0.3), slope[rows])
        best[rows] = np.where(excess <= 0, np.minimum(best[rows], at), best[rows])
        before[:, rows] = np.log(at), excess
        guess[rows] = at * np.exp(np.clip(-excess / slope[rows], -0.7, np.where(np.isinf(epsilons), 0.2, 0.7)))
        wide = tolerance * (1.0 if step < PATIENCE else 3.0)  # an epsilon of epochs is not smooth on coarse grids
        open_ = (excess > 0) | (excess < wide * slope[rows]) if tolerance else np.abs(excess) > NEAR
        settled = np.append(settled, rows[~open_])
        rows = rows[open_]
        if not len(rows):
            break
    unsettled = np.setdiff1d(searched, settled)
    best[unsettled] = np.inf
    return best[searched], guess[searched], slope[searched]


class _Epochs(NamedTuple):
    """An account with epochs.

    Attributes:
      parts: its releases, folded.
      beside: mu of the Gaussian releases on all data.
      epsilon: to keep.
      columns: its numbers, for interpolation.
    """

    parts: tuple[SampledGaussian, ...]
    beside: float
    epsilon: float
    columns: tuple[float, ...]

    @property
    def alone(self) -> bool:
        """Whether one epoch is all that is released."""
        return subsampled._is_one_epoch(self.parts, self.beside)


def _with_epochs(
    accounts: Sequence[SampledAccount], delta: float, adjacency: Adjacency
) -> Iterator[tuple[list[int], list[_Epochs]]]:
    """Groups of accounts with epochs whose releases have the same samplers, each with their places; those of one epoch
    are in groups of their own. Accounts are in none of them if there are few, or if any noise would do."""
    groups: dict[tuple[object, ...], list[tuple[int, _Epochs]]] = {}
    for n, (releases, mu, epsilon) in enumerate(accounts if len(accounts) > subsampled.FEW else ()):
        gaussian._check(epsilon=epsilon)
        parts, beside = subsampled._fold(releases, adjacency, mu)
        if not any(part.span for part in parts) or not 0 < epsilon < allocation.MOST_LOSS:
            continue
        if subsampled._ever(parts) > delta:
            numbers = [number for each in releases for number in each[:3]]
            account = _Epochs(parts, beside, epsilon, (*numbers, mu, epsilon))
            groups.setdefault((account.alone, *(each.sampler for each in releases)), []).append((n, account))
    for group in groups.values():
        yield [n for n, _ in group], [account for _, account in group]


def _epoch_factors(accounts: Sequence[_Epochs], delta: float, adjacency: Adjacency) -> Array:
    """As `factors`, of a group of accounts with epochs, on coarse grids."""
    level = delta * (1 - subsampled._overflow(accounts[0].parts))
    target = np.array([account.epsilon for account in accounts]) * (1 - subsampled.SURE)
    allowed = [subsampled._allowed(account.epsilon, delta) for account in accounts]
    pairs = list(zip(accounts, allowed, strict=True))
    most = np.array([subsampled._unsampled(each.parts, adjacency, each.beside) / mu for each, mu in pairs])
    limits = np.array([subsampled._limit_guess(each.parts, each.beside, adjacency, mu) for each, mu in pairs])

    def with_noise(rows: Array, at: Array) -> list[tuple[tuple[SampledGaussian, ...], float]]:
        return [
            (tuple(part._replace(mu=part.mu / s) for part in accounts[n].parts), accounts[n].beside / s)
            for n, s in zip(rows.tolist(), at.tolist(), strict=True)
        ]

    def alone(rows: Array, at: Array) -> tuple[Array, Array]:
        parts = [part for (part,), _ in with_noise(rows, at)]
        return subsampled._of_one_epoch(parts, target[rows], level, adjacency), np.zeros(len(rows), bool)

    def together(rows: Array, at: Array) -> tuple[Array, Array]:
        scaled = with_noise(rows, at)
        fits = [parts for parts, _ in scaled if not subsampled._too_far(parts, adjacency)]
        way = subsampled._ways(adjacency)[0]
        allocation.prepare(epoch for parts in fits for epoch in subsampled._epochs(parts, way, level, COARSE))
        spent = [
            subsampled._grid_epsilon(parts, mu, level, adjacency, near, COARSE) if parts in fits else math.inf
            for (parts, mu), near in zip(scaled, target[rows].tolist(), strict=True)
        ]
        return np.array(spent), np.zeros(len(rows), bool)

    def start(rows: Array) -> tuple[Array, Array]:
        some = [accounts[n] for n in rows.tolist()]
        found = [subsampled._expected(each.parts, each.beside, each.epsilon, delta, adjacency) for each in some]
        guesses = [each.factor * (USUAL_RATIO if each.slope else 1.0) for each in found]
        return np.minimum(guesses, most[rows]), np.array([each.slope or -1.5 for each in found])

    spent = alone if accounts[0].alone else together
    places = _places(np.array([account.columns for account in accounts]))
    found = _in_sets(spent, start, places, target, limits, np.full(len(target), -1.5), subsampled.EPOCH_TOLERANCE, 1)
    return np.where(found < most, found, np.inf)


def _in_all_ways(batch: Batch, level: float, adjacency: Adjacency, fine: float) -> tuple[Array, Array]:
    """As `reached`, the largest of all directions. After the first one, a coarse grid is often enough."""
    first, *others = subsampled._ways(adjacency)
    worst, below = reached(batch, level, first, fine)
    for way in others:
        left = np.flatnonzero(worst <= batch.target)  # the others are too large already
        epsilons, small = _most_loss(batch.rows(left), way), np.zeros(len(left), bool)
        for grid in (10 * COARSE, COARSE, fine):
            rows = np.flatnonzero(~(epsilons <= batch.target[left]))
            if len(rows):
                epsilons[rows], small[rows] = reached(batch.rows(left[rows]), level, way, grid)
        larger = (epsilons > worst[left]) & ~small | ~(epsilons <= batch.target[left])
        worst[left] = np.where(larger, epsilons, worst[left])
        below[left] &= ~larger
    return worst, below


def reached(batch: Batch, level: float, way: str, grid: float) -> tuple[Array, Array]:
    """Per row, an epsilon at delta = level in one direction, by one grid around the target.

    It is infinite where no grid is needed to see that it is large, and not a number where none has few enough cells.

    Args:
      batch: the accounts.
      level: the delta.
      way: `remove`, `add` or `replace`.
      grid: relative error of epsilon that the grid may cause.

    Returns:
      Upper bounds on epsilon; and whether the first cell of the grid is one, so that epsilon may be much smaller.
    """
    result, below = np.full(len(batch.target), np.inf), np.zeros(len(batch.target), bool)
    pairs = [subsampled._pair_of(sampler, mu, way) for sampler, mu in zip(batch.samplers, batch.mu.T, strict=True)]
    largest = np.max([np.maximum(pair.upper_mu, pair.lower_mu) for pair in pairs], axis=0)
    rows = np.flatnonzero((largest <= MOST_MU) & (batch.beside <= MOST_MU))
    if not len(rows):
        return result, below
    grids = _placed(batch.rows(rows), level, way, grid)
    result[rows[grids.cells == 0]] = np.nan
    for cells in sorted(set(grids.cells.tolist()) - {0}):
        group = np.flatnonzero(grids.cells == cells)
        for some in np.array_split(group, math.ceil(len(group) * cells / AT_ONCE)):
            found = _on_grids(batch.rows(rows[some]), level, way, grids.rows(some), cells)
            result[rows[some]], below[rows[some]] = found
    return result, below


class _Grids(NamedTuple):
    """Where each row's grid lies; columns of one number per row, except `cells`."""

    cells: Array  # its number of cells; 0 where none fits
    h: Array
    start: Array  # the first cell
    theta: Array
    t: Array  # of Chernoff's bound on what lies beyond the grid
    reach: Array

    def rows(self, which: Array) -> _Grids:
        return _Grids(*(each[which] for each in self))


def _pieces(batch: Batch, way: str) -> Iterator[tuple[Number, subsampled._Pair, Array]]:
    """(rate, pair, times) of every column, as columns of one number per row; the Gaussian releases come last."""
    for k, sampler in enumerate(batch.samplers):
        yield batch.rate[:, k : k + 1], subsampled._pair_of(sampler, batch.mu[:, k : k + 1], way), batch.times[:, k]
    if batch.beside.any():
        mu = batch.beside[:, None]
        yield 1.0, subsampled._Pair("remove", mu, "remove", mu), np.ones(len(mu), int)


def _placed(batch: Batch, level: float, way: str, grid: float) -> _Grids:
    """Where grids lie, as in `subsampled._curve` near an epsilon. Nothing here needs to be a bound."""
    n = (batch.times.sum(1) + (batch.beside > 0))[:, None]
    reach = np.sqrt(2 * np.log(n / (subsampled._CUT * level)))
    shapes = [
        (times[:, None], *_losses(q, pair, reach))
        for q, pair, times in _pieces(batch._replace(beside=np.zeros(len(n))), way)
    ]
    beside, centre = batch.beside[:, None] ** 2, batch.target[:, None]

    def tilted(theta: Array, rows: Array | slice = slice(None)) -> tuple[Array, Array]:
        """Mean and variance of the tilted losses, one theta per row."""
        mean, variance = (theta + 0.5) * beside[rows], beside[rows].copy()
        for times, loss, log_p in ((each[rows] for each in shape) for shape in shapes):
            exponent = theta * loss + log_p
            weight = np.exp(exponent - exponent.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            of_one = (weight * loss).sum(1, keepdims=True)
            mean = mean + times * of_one
            variance = variance + times * (weight * (loss - of_one) ** 2).sum(1, keepdims=True)
        return mean, variance

    low, high = np.full(n.shape, math.log(1e-4)), np.full(n.shape, math.log(1e7))
    for _ in range(10):
        middle = (low + high) / 2
        small = tilted(np.exp(middle))[0] < centre
        low, high = np.where(small, middle, low), np.where(small, high, middle)
    theta = np.exp((low + high) / 2)
    std = np.maximum(np.sqrt(tilted(theta)[1]), 1e-12)
    fine = np.sqrt(8 * grid * np.maximum(centre, 0.1 * std) / (n * (theta + 1)))

    def windows(theta: Array, std: Array, rows: Array) -> Array:
        """First, last, surplus, theta and t of these rows, as in `subsampled._curve`."""
        around = centre[rows]

        def log_moments(thetas: Array) -> Array:
            """log E_P exp(theta L), several theta per row."""
            total = thetas * (thetas + 1) / 2 * beside[rows]
            for times, loss, log_p in shapes:
                exponent = thetas[:, :, None] * loss[rows, None, :] + log_p[rows, None, :]
                total = total + times[rows] * _log_sum(exponent)[..., 0]
            return np.asarray(total)

        steps = np.geomspace(0.3, 30.0, 10)
        up = np.concatenate([steps[:4] / 8, steps]) / std
        down = np.concatenate([steps[2:8] / std, theta * np.array([0.25, 0.5, 1.0])], axis=1)
        values = log_moments(np.concatenate([np.zeros(theta.shape), up, -down], axis=1) + theta)
        k, above, below = values[:, :1], values[:, 1 : 1 + up.shape[1]], values[:, 1 + up.shape[1] :]
        surplus = k - theta * around - math.log(level)
        wrapped = 9.0 + np.maximum(0.0, surplus)
        lasts = (above - math.log(subsampled._CUT * level)) / (theta + up)
        t = theta + np.take_along_axis(up, lasts.argmin(1)[:, None], 1)
        top = ((above - k + wrapped) / up).min(1, keepdims=True)
        first = np.minimum(((k - below - wrapped) / down).max(1, keepdims=True), around - std)
        last = np.maximum(np.maximum(lasts.min(1, keepdims=True), around + std), first + top - around)
        return np.concatenate([first, last, surplus, theta, t], axis=1)

    found = windows(theta, std, np.arange(len(n)))
    # If rare large losses dominate, the saddle point weighs them so much that the window grows; a lower tilt helps.
    long = np.flatnonzero((found[:, 1] - found[:, 0] > LONG_CELLS * fine[:, 0]) & np.isfinite(found).all(1))
    for part in LOWER_TILTS if len(long) else ():
        lower = part * theta[long]
        other = windows(lower, np.maximum(np.sqrt(tilted(lower, long)[1]), 1e-12), long)
        shorter = (other[:, 1] - other[:, 0] < found[long, 1] - found[long, 0]) & (other[:, 2] <= MOST_SURPLUS)
        found[long[shorter]] = other[shorter]
    first, last, surplus, theta, t = found.T[:, :, None]
    # The number of cells: a power of two, or 3/2 of one, so that few batches of curves are needed.
    length = np.maximum((last - first) / fine + 3, LEAST_CELLS)
    power = np.exp2(np.floor(np.log2(length)))
    cells = np.where(length <= power, power, np.where(length <= 1.5 * power, 1.5 * power, 2 * power))
    fits = (cells <= MOST_CELLS) & (surplus <= MOST_SURPLUS) & np.isfinite(length)
    h = (last - first) / (cells - 3)
    cells = np.where(fits, cells, 0)[:, 0].astype(int)
    return _Grids(cells, h, np.floor(first / h).astype(int), theta, t, reach)


def _losses(q: Number, pair: subsampled._Pair, reach: Array) -> tuple[Array, Array]:
    """Losses of one release, and the logarithms of P's masses on them, row by row; not a bound."""
    losses, masses = [], []
    for way, mu, sign in ((pair.upper, pair.upper_mu, 1.0), (pair.lower, pair.lower_mu, -1.0)):
        low, high = subsampled._ends(mu, way, reach)
        x = low + (high - low) * np.linspace(0.0, 1.0, POINTS)
        density = sum(w * np.exp(-((x - m * mu) ** 2) / 2) for w, m in subsampled._mixtures(q, way)[0])
        loss, mass = subsampled._loss(x, q, mu, way), density * (x[:, 1:2] - x[:, :1]) * 0.3989422804
        if pair.upper == pair.lower:
            return loss, np.log(mass + 1e-300)
        losses.append(np.where(sign * loss > 0, loss, 0.0))
        masses.append(np.where(sign * loss > 0, mass, 0.0))
    mass = np.concatenate(masses, axis=1)
    rest = np.maximum(0.0, 1 - mass.sum(1, keepdims=True))
    return np.concatenate([*losses, np.zeros(rest.shape)], 1), np.log(np.concatenate([mass, rest], 1) + 1e-300)


def _discrete(q: Number, pair: subsampled._Pair, h: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """Per row, multiples of h, P's masses on these losses, and its mass at infinity: a dominating pair.

    All rows have as many places as the longest. The further places of a row repeat its end, with no mass but rounding.
    """
    if pair.upper == pair.lower:
        places = np.minimum(low + np.arange(int((high - low).max()) + 1), high)
        below, mass, beyond = subsampled._cells(q, pair.upper_mu, pair.upper, h, h * places)
        mass[:, :1] += below
        return places, mass, beyond
    above = np.minimum(np.arange(int(high.max()) + 1), high)
    behind = np.minimum(low + np.arange(-int(low.min()) + 1), 0)
    not_above, up, beyond = subsampled._cells(q, pair.upper_mu, pair.upper, h, h * above)
    below, down, not_below = subsampled._cells(q, pair.lower_mu, pair.lower, h, h * behind)
    up[:, :1] += subsampled._left_at_zero(not_above, not_below)
    down[:, :1] += below
    return np.concatenate([behind, above], axis=1), np.concatenate([down, up], axis=1), beyond


def _on_grids(batch: Batch, level: float, way: str, grids: _Grids, size: int) -> tuple[Array, Array]:
    """As `reached`, on circles of `size` cells and with the bounds of `subsampled._compose`.

    Only the low frequencies of a sum of many losses are not lost in rounding. The others are left out; the bound on
    what each of them may add is below `_DEAD`, for any number of releases and cells that occurs.
    """
    rows = len(batch.target)
    _, h, start, theta, t, reach = grids
    last = h * (start + size)
    log_k, log_top, infinite, slack = (np.zeros((rows, 1)) for _ in range(4))
    shift = np.zeros((rows, 1), int)
    kept = size // 2 + 1
    spectrum = np.ones((rows, kept), complex)
    log_most, errors, n = np.zeros(spectrum.shape), np.zeros(spectrum.shape), np.zeros((rows, 1))
    unit = subsampled._UNIT
    c = 3 * unit * math.log2(size)
    of_row = size * np.arange(rows)[:, None]
    for q, pair, counts in _pieces(batch, way):
        times = counts[:, None]
        x = subsampled._ends(pair.lower_mu, pair.lower, reach)[0], subsampled._ends(pair.upper_mu, pair.upper, reach)[1]
        if isinstance(q, float):
            least, most = (mu_x * (mu_x / 2 + side * reach) for mu_x, side in ((pair.upper_mu, -1), (pair.upper_mu, 1)))
        else:
            least = subsampled._loss(np.asarray(x[0]), q, pair.lower_mu, pair.lower)
            most = subsampled._loss(np.asarray(x[1]), q, pair.upper_mu, pair.upper)
        high = np.maximum(1, np.ceil(np.minimum(np.minimum(most, last), MOST_LOSS) / h)).astype(int)
        low = np.maximum(np.floor(np.maximum(least, -MOST_LOSS) / h).astype(int), high - 2 * size)
        low = np.minimum(low, high - 1 if pair.upper == pair.lower else -1)
        places, mass, beyond = _discrete(q, pair, h, low, high)
        losses = h * places
        infinite += times * beyond
        largest = np.abs(losses).max(1, keepdims=True)
        if pair.upper == "vacate" or pair.lower == "fill":
            largest = largest + 4 * pair.upper_mu**2  # terms of `subsampled._where`
        slack += times * 1e-14 * (1 + largest)
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        tilted = log_mass + theta * losses
        piece_k = _log_sum(tilted)
        log_k += times * piece_k
        log_top += times * _log_sum(log_mass + t * losses)
        weights = np.exp(tilted - piece_k)
        folded = np.bincount(((places - low) % size + of_row).ravel(), weights.ravel(), rows * size)
        shift += times * low
        z = scipy.fft.rfft(folded.reshape(rows, size))[:, :kept]
        bound = np.abs(z) + c
        log_bound = times * np.log(bound)
        live = log_bound > -200
        kept = int(np.flatnonzero(live.any(0))[-1]) + 1
        z, bound, log_bound, live = (each[:, :kept] for each in (z, bound, log_bound, live))
        spectrum = _multiplied(spectrum[:, :kept], z, times, live)
        log_most = log_most[:, :kept] + log_bound
        errors = errors[:, :kept] + times * (c / bound + 8 * unit) + 8 * unit
        n += times
    masses = scipy.fft.irfft(spectrum, size)
    turns = ((start - shift) % size)[:, 0].tolist()
    masses = np.concatenate([each for row, k in zip(masses, turns, strict=True) for each in (row[k:], row[:k])])
    masses = masses.reshape(rows, size)
    lost = 2 * (np.exp(log_most) * (errors + c)).sum(1, keepdims=True) / size + _DEAD
    masses = np.maximum(masses, 0.0) + lost
    # delta at the first of every `width` cells: sums of the masses in them, and of these times exp(-loss).
    width = 1 << int(math.log2(max(1.0, min(MOST_WIDTH, size / LEAST_PLACES, math.sqrt(n.min()) / 4))))
    within, groups = h * np.arange(width), masses.reshape(rows, -1, width)
    offset = h * width * (np.arange(size // width) - size // width // 2)
    place = offset + h * (start + width * (size // width // 2))
    scales = np.exp(np.minimum(log_k - theta * place, 700.0))
    sums, decayed = (np.matmul(groups, np.exp(-tilt * within)[:, :, None])[:, :, 0] for tilt in (theta, theta + 1))
    sums, decayed = (np.minimum(each * scales, 1e30) for each in (sums, decayed))
    after = np.cumsum(sums[:, ::-1], axis=1)[:, ::-1]
    clipped = np.clip(offset, -600, 600)
    growth = np.exp(clipped)
    decay = np.where(offset < 600, 1 / growth, 0.0)  # too small a value is safe
    before = np.cumsum((decayed * decay)[:, ::-1], axis=1)[:, ::-1] * growth
    missing = infinite + np.exp(np.minimum(0.0, log_top - t * last))
    deltas = (after - before) * (1 + 1e-9 + 2e-13 * n) + 1e-13 * after + missing
    deltas = np.where(offset < -600, 1.0, np.minimum(np.maximum(deltas, missing), 1.0))
    curves = zip(deltas, (h * start)[:, 0], width * h[:, 0], slack[:, 0], strict=True)
    below = (deltas[:, :1] <= level) & (start > 0)
    return np.array([subsampled._epsilon_at(_curve_of(*curve), level) for curve in curves]), below[:, 0]


def _curve_of(deltas: Array, start: float, h: float, slack: float) -> subsampled._Curve:
    return subsampled._Curve(float(start), float(h), deltas, float(slack), np.zeros(0), 0.0)


def _multiplied(spectrum: Array, z: Array, times: Array, live: Array) -> Array:
    """spectrum * z^times, with one exponent per row, by repeated squaring as in `subsampled._multiplied`."""
    result, base, left = np.where(live, spectrum, 0.0), np.where(live, z, 0.0), times.copy()
    while left.any():
        odd = np.flatnonzero(left[:, 0] & 1)
        result[odd] *= base[odd]
        left >>= 1
        if left.any():
            base *= base
    return np.asarray(result)


def _log_sum(exponents: Array) -> Array:
    """The logarithm of the sum of exponentials along the last axis, which stays."""
    top = exponents.max(-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(exponents - top).sum(-1, keepdims=True)))


def _most_loss(batch: Batch, way: str) -> Array:
    """Per row, the epsilon at which delta is 0 (`subsampled._most_loss`); infinite if there is none."""
    if batch.beside.any() or any(subsampled._pair_of(s, 1.0, way).upper != "add" for s in batch.samplers):
        return np.full(len(batch.target), np.inf)
    return np.asarray(-(batch.times * np.log1p(-batch.rate)).sum(1) * (1 + 1e-12))


def _unsampled(batch: Batch, adjacency: Adjacency) -> Array:
    """Per row, mu of the same releases on all data."""
    twice = 1 + (adjacency == Adjacency.REPLACE_ONE)
    return np.asarray(np.sqrt(batch.beside**2 + (twice**2 * batch.mu**2 * batch.times).sum(1)))


def _limits(batch: Batch, adjacency: Adjacency, most: Array, allowed: Array) -> tuple[Array, Array]:
    """Per row, about the factor by the central limit, as in `subsampled._limit_guess`, and about the derivative of log
    epsilon in its logarithm; not bounds."""
    twice = 1 + (adjacency == Adjacency.REPLACE_ONE)
    fixed = np.array([sampler is Sampler.FIXED for sampler in batch.samplers])

    def total(s: Array) -> Array:
        """About mu squared at these factors."""
        square = np.minimum((batch.mu / s[:, None]) ** 2, 100.0)
        vacated = 0.0 if twice == 2 else np.expm1(square) - 2 * np.expm1(2 * square)
        of_one = np.where(fixed, np.expm1(4 * square) + vacated, twice**2 * np.expm1(square))
        return np.asarray((batch.beside / s) ** 2 + (batch.times * batch.rate**2 * of_one).sum(1))

    low, high = most * 1e-6, most * (1 + 1e-5)
    for _ in range(14):
        s = np.sqrt(low * high)
        large = total(s) > allowed**2
        low, high = np.where(large, s, low), np.where(large, high, s)
    factor = np.clip(high, most * 1e-3, most * (1 - 1e-6))
    slope = 1.1 * np.log(total(1.02 * factor) / total(factor)) / (2 * math.log(1.02))
    return factor, np.clip(slope, -4.0, -0.5)
