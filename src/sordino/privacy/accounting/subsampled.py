"""Composition of Gaussian releases on random parts of the data: an upper bound, tight to one part in a thousand.

Poisson sampling: each record takes part with probability q, independently for every record and every release. The pair
(P, Q) on the real line dominates one release, in units of the noise's standard deviation:

    add-remove   (1-q) N(0) + q N(mu)  against  N(0), and the reverse: both are composed, and the worse one counts
    replace-one  (1-q) N(0) + q N(mu)  against  (1-q) N(0) + q N(-mu)

Samples of a fixed size m out of n, without replacement, where n is public: a subset T of m other records is drawn, and
a member y of T. With chance q = m / n the record x takes the place of y. An absent record leaves its place empty. The
terms of all records have the same bound: next to a longer y, x would tell more. Given T and y, whose weights are the
same for both neighbours, one release compares, up to a common shift,

    add-remove   (1-q) N(y) + q N(x)  against  (1-q) N(y) + q N(0), and the reverse
    replace-one  (1-q) N(y) + q N(x)  against  (1-q) N(y) + q N(x'),     where |x|, |x'|, |y| <= mu.

For alpha >= 1 the hockey-stick divergence of the last pair is the largest value, over sets S, of

    q N(x)(S) - (alpha - 1) (1-q) N(y)(S) - alpha q N(x')(S).

If N(x)(S) = Phi(z), then N(y)(S) >= Phi(z - |x - y|) and N(x')(S) >= Phi(z - |x - x'|) (Neyman and Pearson). Half-lines
have equality in both if y and x' lie 2 mu behind x on a line. So the pair

    remove(2 mu):  (1-q) N(0) + q N(2 mu)  against  N(0)

dominates for alpha >= 1; advanced joint convexity gives the same (Balle, Barthe, Gaboardi 2018). With an empty place
instead of x' the same argument gives, for a record that leaves and for one that joins,

    vacate(mu):    (1-q) N(0) + q N(2 mu)  against  (1-q) N(0) + q N(mu)
    remove(mu):    (1-q) N(0) + q N(mu)    against  N(0).

For alpha < 1 the divergence is 1 - alpha + alpha times that of the exchanged pair at 1 / alpha. So one release is
dominated by a pair whose losses above 0 are those of one of these pairs (remove(2 mu); vacate; remove), whose losses
below 0 are those of another one exchanged (remove(2 mu); remove; vacate), and which has all other mass at a loss of 0.
The parts fit: both have the same divergence at alpha = 1, because that one is symmetric.

Random allocation: each record is in exactly one of the 1 / q minibatches of an epoch. `allocation` has the pair that
dominates one epoch; epochs are independent.

Independent draws of the pairs, all in one direction, dominate the composition (Zhu, Dong, Wang 2022):

    delta(epsilon) = E_P[(1 - exp(epsilon - L))_+],   where L is the sum of the losses log dP/dQ.

A loss in the cell [e, e + h] is split between the two ends of the cell such that P(cell) and Q(cell) do not change
(Doroshenko et al. 2022). This spreads the likelihood ratio and keeps its mean, so the new pair dominates. Multiples of
h compose by one Fourier transform and a power. All computations use the tilted measure dP exp(theta L). It moves the
mean loss to where the answer lies, so that a delta of 1e-12 keeps its leading digits. Bounds on everything that is cut
off, wrapped around or lost to rounding are added.

Every number is a float64, or a pair of float64 (`double_double`) where the rounding of float64 would cost too much. The
width of `long double` does not matter. Machines differ in the last bits of exp, log and the Fourier transform. These
differences are within the added bounds, and move an epsilon by a few parts in 1e9 at most (usually in 1e14).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sordino import files
from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.lazy import scipy
from sordino.privacy.accounting import allocation, double_double, gaussian, moments
from sordino.privacy.accounting.samplers import SampledAccount, SampledGaussian, Sampler
from sordino.privacy.accounting.slots import OVERFLOW

VERSION = 15  # of the algorithm: cached results of other versions are not read
EXCESS = 2e-4  # relative error of epsilon that the grid may cause, if the number of cells allows
MIDDLE, COARSE = 5 * EXCESS, 20 * EXCESS  # the same of less fine grids
LEAST_CELLS, MOST_CELLS = 1 << 13, 1 << 20
COARSE_CELLS = 1 << 11  # at least, of a coarse grid
PRECISE_CELLS = 1 << 18  # at most, with double-double arithmetic
MOST_MU = 25.0  # of a shift: above it sampling helps too little to need a grid; no sampling is assumed
MOST_LOSS = 600.0  # of one release: a larger loss counts as infinite
_UNIT = 2.0**-52
# Share of delta. If the bound on the transform's rounding exceeds it, double-double arithmetic is used.
_ROUNDING_SHARE = 1e-3
_CUT = 1e-9  # share of delta for the losses beyond the grid
MOMENT_CELLS = 600  # of the losses of an epoch that place a grid
EPOCH_SPACING = 0.15  # of the losses of an epoch, in standard deviations
EPOCH_GROWTH = 0.025  # the same of large ones, as a share of the loss
FEW = 3  # accounts that are searched one by one; more of them share what they find (`many.scales`)
MANY = 32  # sampled releases of all accounts, of which more are searched on coarse grids
CLOSE = 1e-3  # tolerance of a search
SHARED = 0.002  # the same for many accounts, on less fine grids
WIDE = 0.005  # the same for many accounts with epochs, on coarse grids
EPOCH_TOLERANCE = (
    0.0075  # the same for those that share what they find: an epsilon of epochs is not smooth on such grids
)
SIMPLE_MU = 0.8  # of an epoch: below it both directions are too much alike for a simple bound to tell them apart
FAR = 0.85  # of the factor that an account should need: below it a much coarser grid is tried first
SURE = 1e-3  # by which an epsilon on coarse grids must be smaller, because fine ones may be a little less tight
_STEEP = -2.0  # derivative of log epsilon: a guess is not taken to be steeper
_WINDOW_STEPS = np.geomspace(0.3, 30.0, 10)  # of a tilt, in 1 / standard deviation of the loss
_SIMPLE_THETAS = np.geomspace(0.3, 100.0, 24)
_STEP = 1.02  # `path` skips points that grow by less


Array = np.ndarray
Number = float | Array  # of one release; or a column, one entry per row of what is computed from it
Mixture = tuple[tuple[Number, int], ...]  # (weight, mean as a multiple of mu) of unit Gaussians


def epsilon(releases: Iterable[SampledGaussian], delta: float, adjacency: Adjacency, gaussian_mu: float = 0.0) -> float:
    """An epsilon for which all releases together are (epsilon, delta)-DP.

    Args:
      releases: the sampled releases.
      delta: the delta.
      adjacency: which data sets are neighbours.
      gaussian_mu: mu of a Gaussian-DP release beside them.

    Returns:
      An upper bound on epsilon.

    Raises:
      SordinoError: an argument is out of its range.
    """
    parts, mu = _fold(releases, adjacency, gaussian_mu)
    return _epsilon(parts, delta, adjacency, mu)


def delta(releases: Iterable[SampledGaussian], epsilon: float, adjacency: Adjacency, gaussian_mu: float = 0.0) -> float:
    """A delta for which all releases together are (epsilon, delta)-DP.

    Args:
      releases: the sampled releases.
      epsilon: the epsilon.
      adjacency: which data sets are neighbours.
      gaussian_mu: mu of a Gaussian-DP release beside them.

    Returns:
      An upper bound on delta.

    Raises:
      SordinoError: an argument is out of its range.
    """
    parts, mu = _fold(releases, adjacency, gaussian_mu)
    plain = gaussian.delta(_unsampled(parts, adjacency, mu), epsilon)
    if not parts or plain == 0:
        return plain
    if _too_far(parts, adjacency):
        return plain
    rare = gaussian.delta(mu, epsilon) + _ever(parts) * plain  # by convexity: see `_ever`
    worst = 0.0
    for way in _ways(adjacency):
        if epsilon >= _most_loss(parts, mu, way):
            continue
        least, level = 1.0, max(min(plain, 1e-5), 1e-100)
        for _ in range(4):  # until the cut is small compared with the answer; the answer of every grid is a bound
            least = min(least, _delta_at(_curve(parts, mu, way, level, epsilon), epsilon))
            if level / 100 <= least <= level * 100:
                break
            level = max(min(least, 0.5), 1e-100)
        worst = max(worst, least)
    return min(plain, worst, rare * (1 + 1e-9)) / (1 - _overflow(parts))


def suffices(
    releases: Iterable[SampledGaussian],
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    gaussian_mu: float = 0.0,
    *,
    expected: float = 0.0,
    fine: bool = True,
) -> bool:
    """Whether all releases together are (epsilon, delta)-DP. Coarse grids, which are bounds too, often say so.

    Args:
      releases: the sampled releases.
      epsilon: the epsilon.
      delta: the delta.
      adjacency: which data sets are neighbours.
      gaussian_mu: mu of a Gaussian-DP release beside them.
      expected: about the factor on every standard deviation that would be enough, or 0. If it is close to 1, the grid
        that is too coarse to say so is not tried.
      fine: whether a fine grid decides if coarse ones do not.

    Returns:
      Whether it is proved.

    Raises:
      SordinoError: an argument is out of its range.
    """
    parts, mu = _fold(releases, adjacency, gaussian_mu)
    left = delta * (1 - _overflow(parts))
    grids = (_first_grid(expected), COARSE)
    alone = _is_one_epoch(parts, mu)
    if alone and _of_one_epoch(parts, np.array([epsilon * (1 - SURE)]), left, adjacency)[0] <= epsilon * (1 - SURE):
        return True
    for grid in dict.fromkeys(grids) if parts and not alone and not _too_far(parts, adjacency) else ():
        reached = (_one_grid(parts, mu, way, left, epsilon, grid) for way in _ways(adjacency))
        if all(each < epsilon * (1 - SURE) for each in reached):
            return True
    return (fine or not parts) and _epsilon(parts, delta, adjacency, mu) <= epsilon


def _first_grid(expected: float) -> float:
    """The grid that `suffices` tries first."""
    return 10 * COARSE if expected < FAR else COARSE


def prepare(accounts: Iterable[tuple[SampledAccount, float]], delta: float, adjacency: Adjacency) -> None:
    """Compute together what `suffices` needs of many accounts with epochs on the grid that it tries first.

    Args:
      accounts: the accounts, each with `expected`, as of `suffices`.
      delta: the delta.
      adjacency: which data sets are neighbours.
    """
    folded = [
        (_fold(account.releases, adjacency, account.gaussian_mu)[0], _first_grid(expected))
        for account, expected in accounts
    ]
    known = [
        (parts, delta * (1 - _overflow(parts)), grid)
        for parts, grid in folded
        if parts and not _too_far(parts, adjacency)
    ]
    for way in _ways(adjacency):
        allocation.prepare(epoch for parts, level, grid in known for epoch in _epochs(parts, way, level, grid))


def scale(
    releases: Iterable[SampledGaussian],
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    gaussian_mu: float = 0.0,
    *,
    tolerance: float = CLOSE,
    start: float = 0.0,
) -> float:
    """The factor on every standard deviation with which all releases together are (epsilon, delta)-DP.

    The result was itself evaluated. It is stored on disk (`_stored`).

    Args:
      releases: the sampled releases.
      epsilon: the epsilon to keep.
      delta: the delta.
      adjacency: which data sets are neighbours.
      gaussian_mu: mu of a Gaussian-DP release beside them; the factor applies to it too.
      tolerance: the result exceeds the smallest factor by about this share at most. From `SHARED` on, less fine grids
        are enough, which add about 0.1 percent, and from `WIDE` on coarse ones, which add about one percent.
      start: the factor where the search starts; 0 if nothing is known.

    Returns:
      The factor; 0 if epsilon is infinite.

    Raises:
      SordinoError: an argument is out of its range.
    """
    gaussian._check(epsilon=epsilon, delta=delta, tolerance=tolerance)
    parts, mu = _fold(releases, adjacency, gaussian_mu)
    if not parts or math.isinf(epsilon):
        return _search(parts, mu, epsilon, delta, adjacency, tolerance, start)
    facts = [VERSION, _described(parts), float(epsilon), float(delta), str(adjacency), mu, tolerance]
    key = json.dumps([*facts, start] if start else facts)
    factor = _stored(key)
    if factor is None:
        factor = _search(parts, mu, epsilon, delta, adjacency, tolerance, start)
        _store(key, factor)
    return factor


def _described(parts: Sequence[SampledGaussian]) -> list[list[object]]:
    """The parts, for the key of a stored result."""
    return [[*part[:3], str(part.sampler), *([part.span] if part.span else [])] for part in parts]


def limit(account: SampledAccount, delta: float, adjacency: Adjacency) -> float:
    """About the factor on every standard deviation that an account needs, by the central limit; not a bound.

    Args:
      account: the account.
      delta: the delta.
      adjacency: which data sets are neighbours.

    Returns:
      The factor.

    Raises:
      SordinoError: an argument is out of its range.
    """
    parts, mu = _fold(account.releases, adjacency, account.gaussian_mu)
    allowed = _allowed(account.epsilon, delta)
    return _limit_guess(parts, mu, adjacency, allowed) if parts else mu / allowed


def tolerance(accounts: Sequence[SampledAccount]) -> float:
    """The tolerance of searches for these accounts: wider if there are many, and wider still if there are very many or
    some have epochs.

    Args:
      accounts: the accounts.

    Returns:
      The tolerance of `scale`.
    """
    releases = [release for account in accounts for release in account.releases]
    slow = len(releases) > MANY or any(release.sampler is Sampler.ALLOCATION for release in releases)
    return CLOSE if len(accounts) <= FEW else WIDE if slow else SHARED


def multiplier(
    rate: float, times: int, epsilon: float, delta: float, adjacency: Adjacency, sampler: Sampler = Sampler.POISSON
) -> float:
    """The standard deviation divided by the clip, for equal releases.

    Args:
      rate: the chance of a record to take part.
      times: number of releases.
      epsilon: the epsilon to keep.
      delta: the delta.
      adjacency: which data sets are neighbours.
      sampler: how records are drawn.

    Returns:
      The noise multiplier.

    Raises:
      SordinoError: an argument is out of its range.
    """
    return scale([SampledGaussian(rate, 1.0, times, sampler)], epsilon, delta, adjacency)


def path(
    releases: Sequence[SampledGaussian], counts: Array, delta: float, adjacency: Adjacency, gaussian_mus: Array
) -> Array:
    """Epsilon at each point of a run.

    A later point has released everything that an earlier one has, so its epsilon holds for both. A point takes the
    epsilon of the next one if that one has grown by less than a fiftieth.

    Args:
      releases: the sampled releases; `times` is ignored.
      counts: counts[i, k] is how often releases[k] was made until point i.
      delta: the delta.
      adjacency: which data sets are neighbours.
      gaussian_mus: gaussian_mus[i] is mu of the Gaussian-DP releases until point i.

    Returns:
      One epsilon per point.

    Raises:
      SordinoError: counts or gaussian_mus decrease, or another argument is out of its range.
    """
    state = np.column_stack([np.asarray(counts, float), np.square(gaussian_mus)])
    if (np.diff(state, axis=0) < 0).any():
        raise SordinoError(
            "counts: counts and gaussian_mus are cumulative; neither may decrease from one point to the next."
        )
    result = np.zeros(len(state))
    last = math.inf
    evaluated: Array | None = None  # the last state whose epsilon was computed
    for i in reversed(range(len(state))):
        if evaluated is None or (evaluated > state[i] * _STEP).any():
            evaluated = state[i]
            until_now = [release._replace(times=int(n)) for release, n in zip(releases, evaluated, strict=False)]
            last = min(last, epsilon(until_now, delta, adjacency, float(gaussian_mus[i])))
        result[i] = last
    return result


# --------------------------------------------------------------------------------------------------- what is sampled


def _fold(
    releases: Iterable[SampledGaussian], adjacency: Adjacency, mu: float
) -> tuple[tuple[SampledGaussian, ...], float]:
    """The releases in sorted order, equal ones joined. Releases on all data become part of mu (sensitivity 2C or C)."""
    gaussian._check(gaussian_mu=mu)
    whole, parts = [float(mu)], dict[tuple[float, float, Sampler, int], int]()
    for rate, release_mu, times, name, _ in releases:
        sampler = Sampler(name)
        if not 0 < rate <= 1 or (sampler is Sampler.FULL and rate < 1):
            raise SordinoError(f"rate: {rate} must lie in (0, 1], and be 1 for the sampler full.")
        if not release_mu >= 0 or not times >= 0:
            raise SordinoError(f"releases: mu {release_mu} and times {times} must be at least 0.")
        if release_mu == 0 or times == 0:
            continue
        if rate == 1 or math.isinf(release_mu):
            whole.append((1 + (adjacency == Adjacency.REPLACE_ONE)) * float(release_mu) * math.sqrt(times))
        else:
            for span, count in _spans(rate, int(times), sampler):
                # The first minibatch of an epoch by itself is a Poisson sample.
                key = (float(rate), float(release_mu), Sampler.POISSON, 0)
                key = (*key[:2], sampler, span) if span != 1 else key
                parts[key] = parts.get(key, 0) + count
    folded = (SampledGaussian(q, m, parts[q, m, s, span], s, span) for q, m, s, span in sorted(parts))
    return tuple(folded), math.hypot(*whole)


def _spans(rate: float, times: int, sampler: Sampler) -> list[tuple[int, int]]:
    """(minibatches of an epoch, number of such epochs): whole epochs, and the beginning of one; (0, times) if there are
    no epochs."""
    if sampler is not Sampler.ALLOCATION:
        return [(0, times)]
    bins = round(1 / rate)
    if abs(bins * rate - 1) > 1e-9:
        raise SordinoError(f"rate: {rate} must be 1 over a whole number of minibatches under allocation.")
    return [(span, count) for span, count in ((bins, times // bins), (times % bins, 1)) if span and count]


def _unsampled(parts: Sequence[SampledGaussian], adjacency: Adjacency, mu: float) -> float:
    """mu of the same releases on all data: an upper bound, because sampling only mixes in closer pairs."""
    twice = 1 + (adjacency == Adjacency.REPLACE_ONE)
    return math.hypot(mu, *(twice * part.mu * math.sqrt(part.times) for part in parts))


def _ways(adjacency: Adjacency) -> tuple[str, ...]:
    return ("replace",) if adjacency == Adjacency.REPLACE_ONE else ("remove", "add")


def _too_far(parts: Sequence[SampledGaussian], adjacency: Adjacency) -> bool:
    """Whether a pair's means are too far apart for a grid."""
    if any(part.span and part.mu > allocation.MOST_MU for part in parts):
        return True
    pairs = [_pair(part, way) for part in parts for way in _ways(adjacency)]
    return bool(max(max(pair.upper_mu, pair.lower_mu) for pair in pairs) > MOST_MU)


def _overflow(parts: Sequence[SampledGaussian]) -> float:
    """The share of delta that is reserved for a minibatch of random size that overflows its slots."""
    return OVERFLOW if any(part.sampler is not Sampler.FIXED for part in parts) else 0.0


def _most_loss(parts: Sequence[SampledGaussian], mu: float, way: str) -> float:
    """The epsilon at which delta is 0: a record that joins a Poisson sample reduces no output's probability below a
    factor of 1 - q."""
    if mu > 0 or any(_pair(part, way).upper != "add" or part.chance == 1 for part in parts):
        return math.inf
    return -sum(part.times * math.log1p(-part.chance) for part in parts)


def _ever(parts: Sequence[SampledGaussian]) -> float:
    """The chance that a record is in at least one sample, rounded up.

    A record that is in no sample only changes the Gaussian release beside them. The hockey-stick divergence is jointly
    convex, so the sampled releases add at most this chance to delta, for any noise.
    """
    if any(part.chance == 1 for part in parts):
        return 1.0
    return -math.expm1(sum(part.times * math.log1p(-part.chance) for part in parts)) * (1 + 1e-12)


def _rare(parts: Sequence[SampledGaussian], mu: float, delta: float) -> float:
    """An epsilon that holds if delta exceeds the chance that a record is ever sampled; otherwise infinite."""
    rest = (delta - _ever(parts)) * (1 - 1e-12)
    return gaussian.epsilon(mu, rest) if rest > 0 else math.inf


@lru_cache(maxsize=4096)
def _epsilon(parts: tuple[SampledGaussian, ...], delta: float, adjacency: Adjacency, mu: float) -> float:
    delta *= 1 - _overflow(parts)
    plain = gaussian.epsilon(_unsampled(parts, adjacency, mu), delta)
    if not parts or plain == 0 or math.isinf(plain):
        return plain
    if _too_far(parts, adjacency):
        return plain
    rare = _rare(parts, mu, delta)
    if rare == 0:
        return 0.0
    worst = 0.0
    for way in _ways(adjacency):
        if worst < _most_loss(parts, mu, way) and not _is_less(parts, mu, way, delta, worst):
            worst = max(worst, _refined(parts, mu, way, delta))
    return min(plain, worst, rare)


def _is_less(parts: Sequence[SampledGaussian], mu: float, way: str, delta: float, epsilon: float) -> bool:
    """Whether a coarse grid shows that this direction reaches no larger epsilon: then no fine one is needed."""
    if not epsilon or math.isinf(epsilon):
        return False
    return _one_grid(tuple(parts), mu, way, delta, epsilon, COARSE) <= epsilon


def _refined(parts: Sequence[SampledGaussian], mu: float, way: str, delta: float) -> float:
    """The smallest epsilon of up to four grids; each of them is a bound.

    If the result is far from the centre of its grid, or small compared with a cell, the next grid is placed around it.
    If rounding is a visible part of the answer, the next grid is precise.
    """
    if _is_one_epoch(parts, mu):
        return _refined_epoch(parts[0], way, delta)
    epochs = any(part.span for part in parts)  # moments place a grid badly if a few epochs have rare large losses
    least, placing = math.inf, (math.inf, False)  # centre of the grid (inf: placed at delta), and whether it is precise
    tried: list[tuple[float, bool]] = []
    while placing not in tried and len(tried) < 4:
        tried.append(placing)
        near, precise = placing
        curve = _curve(parts, mu, way, delta, None if math.isinf(near) else near, precise=precise)
        before, least = least, min(least, _epsilon_at(curve, delta))
        if least == 0 or math.isinf(least):
            break
        rounding = float(curve.lost[max(0, int((least - curve.start) / curve.h)) :].sum())
        blurred = rounding > _ROUNDING_SHARE * delta and not precise
        sharp = least >= 100 * curve.h and 0.7 * least < curve.centre < 1.1 * least
        if not blurred and not (epochs and len(tried) == 1) and (sharp or (not precise and least > 0.999 * before)):
            break
        placing = (least, blurred)
    return least


def _is_one_epoch(parts: Sequence[SampledGaussian], mu: float) -> bool:
    """Whether one epoch, or the beginning of one, is all that is released: then no losses are added up."""
    return len(parts) == 1 and parts[0].span > 0 and parts[0].times == 1 and mu == 0


def _of_one_epoch(parts: Sequence[SampledGaussian], near: Array, delta: float, adjacency: Adjacency) -> Array:
    """Per part, what one epoch of it by itself spends, from its divergence at one epsilon: below that epsilon if the
    divergence is below delta, and above it otherwise; how far is not known.

    Args:
      parts: each with one epoch.
      near: the epsilon of each part.
      delta: the delta.
      adjacency: which data sets are neighbours.
    """
    fits = np.array([part.mu <= allocation.MOST_MU for part in parts], bool)
    worst, some = np.ones(len(parts)), np.flatnonzero(fits).tolist()
    for k, way in enumerate(_ways(adjacency)):
        epochs = [_one_epoch(parts[n], way, delta) for n in some]
        deltas = [float(bound[0]) for bound in allocation.at_losses(list(zip(epochs, near[some, None], strict=True)))]
        worst[some] = np.maximum(worst[some], deltas) if k else deltas
    with np.errstate(divide="ignore"):
        excess = np.log(worst / delta) / -math.log(delta)
    return np.asarray(near * np.where(fits, np.exp(excess), np.inf))


def _one_epoch(part: SampledGaussian, way: str, delta: float) -> allocation.Epoch:
    """One epoch by itself. Its divergences are the same wherever they are used, so what a search finds is kept."""
    return allocation.Epoch(round(1 / part.rate), part.span, part.mu, way, 1e-4 * delta, 0.0)


def _epoch_epsilon(part: SampledGaussian, way: str, delta: float, near: float, grid: float) -> float:
    """The epsilon of one epoch, from divergences near one; how far they are apart follows from the grid."""
    spacing = min(0.01 * math.sqrt(grid / EXCESS), 0.05)
    return allocation.epsilon_near(_one_epoch(part, way, delta), delta, near, spacing)


def _refined_epoch(part: SampledGaussian, way: str, delta: float) -> float:
    """The smallest epsilon of one epoch that some divergences show, each time nearer to the last one."""
    near, least = 1.0, math.inf
    for _ in range(12):
        found = _epoch_epsilon(part, way, delta, near, EXCESS / 25)
        least = min(least, found)
        if least < 1e-6 or (math.isinf(found) and near > allocation.MOST_LOSS):
            break
        if 0.999 * near < found < 1.001 * near:
            break
        near = found if math.isfinite(found) else 4 * near
    return least


def _search(
    parts: tuple[SampledGaussian, ...],
    mu: float,
    target: float,
    delta: float,
    adjacency: Adjacency,
    tol: float,
    start: float,
) -> float:
    """Search the factor on coarse grids, then on finer ones. The result is evaluated in all directions.

    With a wider tolerance there are no fine grids.
    """
    if math.isinf(target):
        return 0.0
    allowed = _allowed(target, delta)
    if not parts:
        return mu / allowed
    last = _last_grid(tol)
    if last == COARSE:
        target *= 1 - SURE
    level = delta * (1 - _overflow(parts)) if last > EXCESS else delta

    def excess(grid: float, s: float, near: bool) -> float:
        scaled = tuple(part._replace(mu=part.mu / s) for part in parts)
        known = not _too_far(scaled, adjacency)
        if last == COARSE and known and _is_one_epoch(scaled, mu):
            reached = min(_of_one_epoch(scaled, np.array([target]), level, adjacency)[0], _rare(scaled, mu, level))
        elif grid and known:
            first = _one_grid(scaled, mu / s, _ways(adjacency)[0], level, target if near else None, grid)
            reached = min(first, _rare(scaled, mu / s, level))
        elif last > EXCESS and known:
            reached = _grid_epsilon(scaled, mu / s, level, adjacency, target, last)
        else:
            reached = _epsilon(scaled, delta, adjacency, mu / s)
        return (
            math.log(min(max(reached / target, 1e-9), 1e9)) + 1e-6
        )  # the margin covers rounding of mu / s by the caller

    most = _unsampled(parts, adjacency, mu) / allowed * (1 + 1e-5)
    if start:
        factor = min(start, most * (1 - 1e-6))
        slope = moments.derivative(parts, mu, delta, adjacency, factor) if any(part.span for part in parts) else 0.0
    else:
        guess, slope, _ = _expected(parts, mu, target, delta, adjacency)
        factor = min(guess, most * (1 - 1e-6))
    if not slope:
        slope = _limit_slope(parts, mu, adjacency, factor, delta)
    grids = [(COARSE, tol)] if last == COARSE else [(COARSE, max(tol, 0.02)), (last, 0.9 * tol)]
    near = start > 0
    for grid, close in grids:
        factor, slope = _bracket(partial(excess, grid), factor, most, close, slope, near=near)
        near = True
    step = tol / 5
    while (more := excess(0.0, factor, True)) > 0:
        factor, step = factor * (1 + max(step, min(-1.3 * more / slope, 0.05))), 2 * step
    return factor


def _last_grid(tolerance: float) -> float:
    """The finest grid that a search uses."""
    return COARSE if tolerance >= WIDE else MIDDLE if tolerance >= SHARED else EXCESS


def _grid_epsilon(
    parts: tuple[SampledGaussian, ...], mu: float, delta: float, adjacency: Adjacency, near: float, grid: float
) -> float:
    """As `_epsilon`, by one grid per direction, or by a coarse one where that is below `near`; only of the first one if
    that exceeds `near`. A direction needs no grid where a simple bound shows that it is not the worst one."""
    first, *others = _ways(adjacency)
    worst = _one_grid(parts, mu, first, delta, near, grid)
    alone = _is_one_epoch(parts, mu)  # whose own divergences take less time than the simple bound
    for way in others if worst <= near else ():
        if not alone and _simple_epsilon(parts, mu, way, delta) <= worst:
            continue
        coarse = _one_grid(parts, mu, way, delta, near, COARSE)
        enough = coarse <= max(near, worst)
        worst = max(worst, coarse if enough else _one_grid(parts, mu, way, delta, near, min(grid, MIDDLE)))
    return min(worst, _rare(parts, mu, delta))


def _simple_epsilon(parts: Sequence[SampledGaussian], mu: float, way: str, delta: float) -> float:
    """An epsilon of epochs in the direction `add`, by one exponential moment: a bound, and far from tight.

    A grid around a larger epsilon than what is reached has many cells, because the saddle point there is far out. With
    K(theta) = log E exp(theta L), by the largest value of (1 - u) u^theta at u = theta / (1 + theta),

        delta(epsilon) <= exp(K(theta) - theta epsilon) theta^theta / (1 + theta)^(1 + theta) + P(L = infinity).

    The loss of a Poisson sample is at most -log(1 - q) in this direction.
    """
    if way != "add" or not any(part.span and part.mu > SIMPLE_MU for part in parts):
        return math.inf
    laws = _laws(parts, way, delta, COARSE)
    left = delta - sum(part.times * law.infinite for part, law in zip(parts, laws, strict=True) if law)
    if left <= 0:
        return math.inf
    bounded = sum(-part.times * math.log1p(-part.rate) for part, law in zip(parts, laws, strict=True) if not law)
    epochs = [(part.times, law) for part, law in zip(parts, laws, strict=True) if law]

    def reached(theta: Array, shapes: Sequence[tuple[int, Array, Array]]) -> Array:
        k = theta * bounded + theta * (theta + 1) / 2 * mu * mu
        for times, losses, log_masses in shapes:
            exponents = theta[:, None] * losses + log_masses
            top = exponents.max(1)
            k += times * (top + np.log(np.exp(exponents - top[:, None]).sum(1)))
        return np.asarray((k - math.log(left) + theta * np.log(theta) - (1 + theta) * np.log1p(theta)) / theta)

    thetas = _SIMPLE_THETAS
    best = thetas[reached(thetas, [(times, *_epoch_moments(law)) for times, law in epochs]).argmin()][None]
    with np.errstate(divide="ignore"):
        (result,) = reached(best, [(times, law.losses, np.log(law.masses)) for times, law in epochs])
    return max(float(result), 0.0) * (1 + 1e-9)


@lru_cache(maxsize=256)
def _one_grid(
    parts: tuple[SampledGaussian, ...], mu: float, way: str, delta: float, near: float | None, grid: float
) -> float:
    """An epsilon in one direction, by one grid; if no loss is above `near`, without one."""
    if near is not None and (most := _most_loss(parts, mu, way)) <= near:
        return most
    if near is not None and _is_one_epoch(parts, mu):
        return _epoch_epsilon(parts[0], way, delta, near, grid) * (1 + grid / 4)  # not below what finer ones find
    return _epsilon_at(_curve(parts, mu, way, delta, near, grid=grid), delta)


def _bracket(
    excess: Callable[[float, bool], float],
    guess: float,
    high: float,
    tol: float,
    slope: float,
    *,
    near: bool,
) -> tuple[float, float]:
    """A scale without excess, and the slope: secants of the excess as a function of log scale.

    A scale that is next to the root by the slope is enough. The slope that is passed is a guess, and not taken to be
    steep. If the guess is near, so is the target.
    """
    low, f = 0.0, 0.0 if near else 1.0
    nearest_two: list[tuple[float, float]] = []
    while high > low * (1 + tol):
        f = excess(guess, abs(f) < 0.3)
        low, high = (guess, high) if f > 0 else (low, guess)
        nearest_two = sorted([*nearest_two, (math.log(guess), f)], key=lambda pair: abs(pair[1]))[:2]
        if len(nearest_two) == 2 and nearest_two[0][0] != nearest_two[1][0]:
            slope = min(-0.2, (nearest_two[1][1] - nearest_two[0][1]) / (nearest_two[1][0] - nearest_two[0][0]))
        root = math.exp(min(max(nearest_two[0][0] - nearest_two[0][1] / slope, -700.0), 700.0))
        if tol * (slope if len(nearest_two) == 2 else max(slope, _STEEP)) < f <= 0:
            break
        guess = root * (1 + 0.5 * tol)
        if not low * (1 + 0.1 * tol) < guess < high / (1 + 0.1 * tol):
            guess = math.sqrt(low * high) if low > 0 else high / 2
    return high, slope


_allowed = lru_cache(maxsize=4096)(gaussian.mu)


@lru_cache(maxsize=4096)
def _expected(
    parts: tuple[SampledGaussian, ...],
    mu: float,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
) -> moments.Guess:
    """About the factor that is needed; the slope is 0 if there are no epochs."""
    allowed = _allowed(epsilon, delta)
    if not parts:
        return moments.Guess(mu / allowed, 0.0, True)
    factor = _limit_guess(parts, mu, adjacency, allowed)
    if not any(part.span for part in parts):
        return moments.Guess(factor, 0.0, True)
    found = moments.guess(parts, mu, epsilon, delta, adjacency, factor)
    return found if found.close else moments.Guess(factor, 0.0, False)


@lru_cache(maxsize=4096)
def _limit_guess(parts: tuple[SampledGaussian, ...], mu: float, adjacency: Adjacency, allowed: float) -> float:
    """The scale by the central limit (Bu et al. 2020): where the search starts. It is not a bound."""
    high = _unsampled(parts, adjacency, mu) / allowed * (1 + 1e-5)
    low, top = high * 1e-6, high
    for _ in range(20):
        s = math.sqrt(low * top)
        low, top = (s, top) if _limit_mu(parts, mu, adjacency, s) > allowed else (low, s)
    return min(max(top, high * 1e-3), high * (1 - 1e-6))


def _limit_slope(
    parts: tuple[SampledGaussian, ...], mu: float, adjacency: Adjacency, factor: float, delta: float
) -> float:
    """About the derivative of log epsilon in the log of the scale, by the central limit."""
    epsilons = [gaussian.epsilon(_limit_mu(parts, mu, adjacency, s), delta) for s in (factor, 1.02 * factor)]
    if not 0 < epsilons[1] < epsilons[0] < math.inf:
        return -2.0
    return min(max(math.log(epsilons[1] / epsilons[0]) / math.log(1.02), -3.0), -0.5)


def _limit_mu(parts: Sequence[SampledGaussian], mu: float, adjacency: Adjacency, scale: float) -> float:
    """About mu of all releases if every standard deviation is multiplied by `scale`, by the central limit."""
    twice = 1 + (adjacency == Adjacency.REPLACE_ONE)
    total = (mu / scale) ** 2
    for part in parts:
        square = min((part.mu / scale) ** 2, 100.0)
        if part.sampler is not Sampler.FIXED:
            of_one = twice**2 * math.expm1(square) * max(part.span, 1)
        else:  # of remove(2 mu), or of vacate(mu)
            of_one = math.expm1(4 * square) + (0.0 if twice == 2 else math.expm1(square) - 2 * math.expm1(2 * square))
        total += part.times * part.rate**2 * of_one
    return math.sqrt(total)


# ------------------------------------------------------------------------------- the loss of one release, and of all


class _Pair(NamedTuple):
    """The pair that dominates one release: its losses above 0 are those of `upper`, those below 0 are those of `lower`.

    Where both are the same pair, nothing is spliced. The names are those of `_mixtures`.
    """

    upper: str
    upper_mu: Number
    lower: str
    lower_mu: Number


def _pair(part: SampledGaussian, way: str) -> _Pair:
    """The dominating pair of a part, in one direction of the relation."""
    return _pair_of(part.sampler, part.mu, way)


def _pair_of(sampler: Sampler, mu: Number, way: str) -> _Pair:
    if sampler is not Sampler.FIXED:
        return _Pair(way, mu, way, mu)
    pairs = {
        "replace": _Pair("remove", 2 * mu, "add", 2 * mu),
        "remove": _Pair("vacate", mu, "add", mu),
        "add": _Pair("remove", mu, "fill", mu),
    }
    return pairs[way]


def _mixtures(q: Number, way: str) -> tuple[Mixture, Mixture]:
    """P and Q, oriented such that the loss increases with x, at least where it is above 0 (vacate) or below (fill).

    `add` is `remove` exchanged, and `fill` is `vacate` exchanged; both are mirrored.
    """
    with_it, without = ((1 - q, 0), (q, 1)), ((1.0, 0),)
    mirrored = ((1 - q, 0), (q, -1))
    return {
        "remove": (with_it, without),
        "add": (without, mirrored),
        "replace": (with_it, mirrored),
        "vacate": (((1 - q, 0), (q, 2)), with_it),
        "fill": (mirrored, ((1 - q, 0), (q, -2))),
    }[way]


def _loss(x: Array, q: Number, mu: Number, way: str) -> Array:
    """The loss log dP/dQ at x."""

    def against(x: Array, mu: Number = mu) -> Array:  # log of ((1-q) N(0) + q N(mu)) / N(0)
        return np.logaddexp(np.log1p(-q), np.log(q) + mu * x - mu * mu / 2)

    if way == "vacate":
        return np.asarray(against(x, 2 * mu) - against(x))
    if way == "fill":
        return np.asarray(against(-x) - against(-x, 2 * mu))
    ahead = against(x) if way != "add" else np.zeros_like(x)
    return ahead - against(-x) if way != "remove" else ahead


def _where(loss: Array, q: Number, mu: Number, way: str) -> Array:
    """The x at which the loss has this value; infinite if there is none."""
    if way == "replace":  # a quadratic in exp(mu x); with z = exp(mu x - loss/2) it reads z - 1/z = 2 sinh(loss/2) / r
        ratio = (1 - q) / q * np.exp(mu * mu / 2)
        return np.asarray((loss / 2 + np.arcsinh(ratio * np.sinh(loss / 2))) / mu)
    if way == "vacate":
        # A quadratic in v = exp(mu x - mu²): v² = e^loss c v + (e^loss - 1) (1-q) / q with c = exp(mu²/2). With
        # v = e^loss c w it reads w² = w + t.
        t = (1 - q) / q * np.exp(-loss - mu * mu) * -np.expm1(-loss)
        return np.asarray(1.5 * mu + (loss + np.log1p(2 * t / (1 + np.sqrt(1 + 4 * t)))) / mu)
    if way == "fill":
        return -_where(-loss, q, mu, "vacate")
    if isinstance(q, float) and q == 1:
        return np.asarray(loss / mu + mu / 2)
    sign = 1.0 if way == "remove" else -1.0
    with np.errstate(divide="ignore"):
        return np.asarray(sign * (np.log1p(np.maximum(np.expm1(sign * loss) / q, -1.0)) + mu * mu / 2) / mu)


def _ends(mu: Number, way: str, reach: Number) -> tuple[Number, Number]:
    """The ends of x: P has little mass beyond `reach` standard deviations from its means."""
    return {"vacate": (-reach, 2 * mu + reach), "fill": (-mu - reach, reach)}.get(way, (-reach, mu + reach))


def _masses(x: Array, mu: Number, mixtures: Sequence[Mixture]) -> list[tuple[Array, Array]]:
    """Per mixture, the masses of the cells between successive x, each from the smaller tail, and a bound on their
    rounding."""
    means = {mean for mixture in mixtures for _, mean in mixture}
    of_mean = {mean: allocation.normal_masses(x - mean * mu) for mean in means}
    return [
        (
            np.asarray(sum(weight * of_mean[mean][0] for weight, mean in mixture)),
            np.asarray(sum(weight * of_mean[mean][1] for weight, mean in mixture)),
        )
        for mixture in mixtures
    ]


def _cells(q: Number, mu: Number, way: str, h: Number, losses: Array) -> tuple[Array, Array, Array]:
    """P's masses below the first loss, on the losses, and above the last; cells are split to their ends.

    Successive losses along the last axis are h apart, or equal. The other results have one entry there.
    """
    infinite = np.full((*losses.shape[:-1], 1), np.inf)
    x = np.concatenate([-infinite, _where(losses, q, mu, way), infinite], -1)
    (p, p_slack), (r, r_slack) = _masses(x, mu, _mixtures(q, way))
    inner, ratio = (..., slice(1, -1)), np.exp(losses[..., :-1])
    up = (p[inner] - ratio * r[inner] + p_slack[inner] + ratio * r_slack[inner]) / -np.expm1(-h)
    total = p + p_slack
    up = np.clip(up, 0.0, total[inner])
    mass = np.zeros(losses.shape)
    mass[..., :-1] += total[inner] - up
    mass[..., 1:] += up
    return total[..., :1], mass, total[..., -1:]


def _discrete(q: float, pair: _Pair, h: float, low: int, high: int) -> tuple[Array, float]:
    """A dominating pair: P's masses on the losses low·h ... high·h, and at infinity."""
    if pair.upper == pair.lower or low >= 0:  # all losses up to low·h become low·h, whatever they are
        below, mass, beyond = _cells(q, pair.upper_mu, pair.upper, h, h * np.arange(low, high + 1))
        mass[:1] += below
        return mass, float(beyond[0])
    not_above, up, beyond = _cells(q, pair.upper_mu, pair.upper, h, h * np.arange(0, high + 1))
    below, down, not_below = _cells(q, pair.lower_mu, pair.lower, h, h * np.arange(low, 1))
    mass = np.concatenate([down[:-1], down[-1:] + _left_at_zero(not_above, not_below) + up[:1], up[1:]])
    mass[:1] += below
    return mass, float(beyond[0])


def _left_at_zero(not_above: Array, not_below: Array) -> Array:
    """What is left of P, whose mass is 1, for a loss of 0, and what rounding may have taken from it."""
    return np.asarray(np.maximum(0.0, not_above + not_below - 1) + 16 * _UNIT)


def _on_grid(law: allocation.Law, h: float, low: int, high: int) -> tuple[Array, float]:
    """A dominating pair on the losses low·h ... high·h, and at infinity: each mass is split as cells are."""
    place = np.floor(law.losses / h)
    inside = place < high
    place, losses, masses = (each[inside] for each in (place, law.losses, law.masses))
    up = np.where(place >= low, masses * np.clip(np.expm1(h * place - losses) / math.expm1(-h), 0.0, 1.0), 0.0)
    cell = np.maximum(place, low).astype(int) - low
    mass = np.bincount(cell, masses - up, high - low + 1) + np.bincount(cell + 1, up, high - low + 1)
    return mass, law.infinite + float(law.masses[~inside].sum())


def _moments(q: float, pair: _Pair, reach: float) -> tuple[Array, Array]:
    """Losses of one release, and the logarithms of P's masses on them; not a bound."""
    losses, masses = [], []
    for way, mu, sign in ((pair.upper, pair.upper_mu, 1.0), (pair.lower, pair.lower_mu, -1.0)):
        x = np.linspace(*_ends(mu, way, reach), 800)
        density = sum(w * np.exp(-((x - m * mu) ** 2) / 2) for w, m in _mixtures(q, way)[0])
        loss, mass = _loss(x, q, mu, way), density * (x[1] - x[0]) * 0.3989422804
        if pair.upper == pair.lower:
            return loss, np.log(mass + 1e-300)
        losses.append(loss[sign * loss > 0])
        masses.append(mass[sign * loss > 0])
    rest = max(0.0, 1 - sum(float(mass.sum()) for mass in masses))
    return np.concatenate([*losses, [0.0]]), np.log(np.concatenate([*masses, [rest]]) + 1e-300)


class _Curve(NamedTuple):
    """Upper bounds `deltas` at the epsilons start, start + h, ...; in between, chords in exp(epsilon) are bounds."""

    start: float
    h: float
    deltas: Array
    slack: float  # rounding of the grid moves epsilon by at most this much
    lost: Array  # the part of each cell's weight that is the bound on the transform's rounding
    centre: float  # the epsilon near which the curve is tight


def _curve(
    parts: Sequence[SampledGaussian], mu: float, way: str, delta: float, epsilon: float | None = None, *,
    precise: bool = False, grid: float = EXCESS,
) -> _Curve:  # fmt: skip
    """The curve of the composition, tight near the delta, or near the epsilon if there is one."""
    n = sum(part.times for part in parts) + (mu > 0)
    reach = math.sqrt(2 * math.log(n / (_CUT * delta)))
    laws = _laws(parts, way, delta, grid)
    shapes = []
    for part, law in zip(parts, laws, strict=True):  # these moments only place the grid, so they need not be bounds
        of_one = _moments(part.rate, _pair(part, way), reach) if law is None else _epoch_moments(law)
        shapes.append((part.times, *of_one))

    def moments(theta: float) -> tuple[float, float, float]:
        """log E_P exp(theta L), and its first two derivatives."""
        total = np.array([theta * (theta + 1) / 2, theta + 0.5, 1.0]) * mu * mu
        for times, loss, log_p in shapes:
            exponent = theta * loss + log_p
            top = exponent.max()
            weight = np.exp(exponent - top)
            mass = weight.sum()
            mean = weight @ loss / mass
            total += times * np.array([top + math.log(mass), mean, weight @ (loss - mean) ** 2 / mass])
        return float(total[0]), float(total[1]), float(total[2])

    def log_moments(thetas: Array) -> Array:
        """log E_P exp(theta L) for several theta."""
        total = thetas * (thetas + 1) / 2 * mu * mu
        for times, loss, log_p in shapes:
            exponent = thetas[:, None] * loss + log_p
            top = exponent.max(1)
            total += times * (top + np.log(np.exp(exponent - top[:, None]).sum(1)))
        return np.asarray(total)

    def log_delta(theta: float) -> float:
        """log delta at epsilon = the tilted mean, as if the tilted loss were normal."""
        k, mean, variance = moments(theta)
        a = math.sqrt(variance / 2)
        gap = float(scipy.special.erfcx(theta * a) - scipy.special.erfcx((theta + 1) * a)) / 2
        return k - theta * mean + math.log(max(gap, 1e-300))

    if epsilon is None and any(part.span for part in parts):  # a sum of few epochs is not nearly normal
        orders = np.geomspace(0.02, 500.0, 40)
        bounds = (log_moments(orders) - np.log(delta * (orders + 1)) - orders * np.log1p(1 / orders)) / orders
        epsilon = max(float(bounds.min()), 0.0) or None  # where Rényi divergences would place it

    def too_small(theta: float) -> bool:
        return log_delta(theta) > math.log(delta) if epsilon is None else moments(theta)[1] < epsilon

    low, high = math.log(1e-4), math.log(1e7)  # of theta
    for _ in range(16 if grid < COARSE else 11):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(math.exp(middle)) else (low, middle)
    saddle = math.exp((low + high) / 2)
    _, mean, variance = moments(saddle)
    centre = mean if epsilon is None else epsilon
    # Splitting cells adds at most n h² theta (theta + 1) / 8 to K, so at most n h² (theta + 1) / 8 to epsilon.
    fine = math.sqrt(8 * grid * max(centre, 0.1 * math.sqrt(variance)) / (n * (saddle + 1)))

    def window(theta: float) -> tuple[float, float, float, float, float]:
        """Length, first, last, theta and the t of Chernoff's bound: mass beyond `last` is at most exp(K(t) - t last).

        Under the tilt, the mass that wraps around to beyond the centre, from above `top` or below `first`, must be
        small compared with the mass that makes up delta.
        """
        k, _, variance = moments(theta)
        std = max(math.sqrt(variance), 1e-12)
        surplus = k - theta * centre - math.log(delta)
        wrapped = 9.0 + max(0.0, surplus)
        steps = _WINDOW_STEPS / std
        up, down = np.append(steps[:4] / 8, steps), np.append(steps[2:8], [theta / 4, theta / 2, theta])
        values = log_moments(np.append(theta + up, theta - down))
        above, below = values[: len(up)], values[len(up) :]
        lasts = (above - math.log(_CUT * delta)) / (theta + up)
        t = theta + float(up[lasts.argmin()])
        top = float(((above - k + wrapped) / up).min())
        first = min(float(((k - below - wrapped) / down).max()), centre - std)
        last = max(float(lasts.min()), centre + std, first + top - centre)
        # A tilt so low that rounding (about 1e-15 n) is visible is never chosen.
        return last - first + (1e9 if surplus > 20 - math.log(n) else 0.0), first, last, theta, t

    # If rare large losses dominate, the saddle point weighs them so much that the window grows; a lower tilt helps.
    least = LEAST_CELLS if grid < COARSE else COARSE_CELLS
    best = window(saddle)
    if best[2] - best[1] > 2 * LEAST_CELLS * fine:
        best = min([best, *(window(saddle * part) for part in (0.8, 0.6, 0.4))])
    _, first, last, theta, t = best
    if precise:  # the size must be a power of two
        h = max(min(fine, (last - first) / LEAST_CELLS), (last - first) / (PRECISE_CELLS - 4))
        size = 1 << math.ceil((last - first) / h + 2).bit_length()
        start = math.floor(first / h)
    else:
        h = max(min(fine, (last - first) / least), (last - first) / MOST_CELLS)
        start = math.floor(first / h)
        size = scipy.fft.next_fast_len(math.ceil(last / h) - start + 1, real=True)
    last = h * (start + size)
    return _compose(parts, laws, mu, way, theta, t, h, start, size, reach, last, precise, centre)


def _laws(parts: Sequence[SampledGaussian], way: str, delta: float, grid: float) -> list[allocation.Law | None]:
    """The pair of one epoch of each part; None where a part has no epochs."""
    epochs = _epochs(parts, way, delta, grid)
    allocation.prepare(epochs)
    of_epochs = map(allocation.law, epochs)
    return [next(of_epochs) if part.span else None for part in parts]


def _epochs(parts: Sequence[SampledGaussian], way: str, delta: float, grid: float) -> list[allocation.Epoch]:
    """One epoch of each part that has some. Their losses are as far apart as those of all others, so that all are as
    blurred.

    An epoch that few others are like may be more blurred: it adds little to the whole.
    """
    parts = [part for part in parts if part.span]
    if not parts:
        return []
    number = sum(part.times for part in parts)
    stds = [allocation.loss_std(round(1 / part.rate), part.span, part.mu, way) for part in parts]
    usual = math.sqrt(sum(part.times * std**2 for part, std in zip(parts, stds, strict=True)) / number)
    spacing, growth = EPOCH_SPACING * usual * (grid / EXCESS) ** 0.3, EPOCH_GROWTH * math.sqrt(grid / EXCESS)
    width = allocation.WIDTH * (2 if grid >= COARSE else 1)
    cut = float(10.0 ** math.floor(math.log10(1e-3 * delta / number)))  # that may be counted as an infinite loss
    spacings = [spacing * min((number / part.times) ** 0.25, 3.0) for part in parts]
    return [
        allocation.Epoch(round(1 / part.rate), part.span, part.mu, way, cut, own_spacing, growth, width)
        for part, own_spacing in zip(parts, spacings, strict=True)
    ]


def _epoch_moments(law: allocation.Law) -> tuple[Array, Array]:
    """Losses of one epoch on a coarse grid, and the logarithms of P's masses on them; not a bound."""
    likely = law.masses > 1e-14 * law.masses.max()
    losses, masses = law.losses[likely], law.masses[likely]
    if len(losses) > MOMENT_CELLS:
        width = (losses[-1] - losses[0]) / MOMENT_CELLS
        cell = ((losses - losses[0]) / width).astype(int)
        sums = np.bincount(cell, masses)
        losses, masses = np.bincount(cell, masses * losses)[sums > 0] / sums[sums > 0], sums[sums > 0]
    return losses, np.log(masses)


def _compose(
    parts: Sequence[SampledGaussian], laws: Sequence[allocation.Law | None], mu: float, way: str, theta: float,
    t: float, h: float, start: int, size: int, reach: float, last: float, precise: bool, centre: float,
) -> _Curve:  # fmt: skip
    """The curve from tilted masses on a circle of `size` cells.

    Mass that wraps around only increases the result. Two parts are missing: sums of losses beyond `last`, which by
    Chernoff have mass at most exp(K(t) - t last), and losses at infinity.

    Rounding: an entry of a transform is a sum over paths through the butterflies. A butterfly of radix r has a relative
    error of at most 6 u log2(r) (u = 2^-53): r - 1 sums and two products, one of them by a constant. So the error of an
    entry is at most c = 6 u log2(size) times the 1-norm, with or without FMA and in any order. The error of a power of
    z is at most (|z| + c)^times - |z|^times.
    """
    log_k = log_top = 0.0
    infinite, slack, shift = 0.0, 0.0, 0
    half = size // 2 + 1
    spectrum: Array | double_double.Complex = double_double.one(half) if precise else np.ones(half, complex)
    log_most, errors = np.zeros(half), np.zeros(half)
    unit = double_double.UNIT if precise else _UNIT
    c = 3 * unit * math.log2(size)
    pieces = [(part.rate, _pair(part, way), part.times, law) for part, law in zip(parts, laws, strict=True)]
    pieces += [(1.0, _Pair("remove", mu, "remove", mu), 1, None)] if mu > 0 else []
    for q, pair, times, law in pieces:
        if law is not None:
            ends = law.losses[[0, -1]]
        elif q == 1:
            ends = mu * np.array([mu / 2 - reach, mu / 2 + reach])
        else:
            outer = (_ends(pair.lower_mu, pair.lower, reach)[0], _ends(pair.upper_mu, pair.upper, reach)[1])
            ends = np.array(
                [
                    _loss(np.array(outer[0]), q, pair.lower_mu, pair.lower),
                    _loss(np.array(outer[1]), q, pair.upper_mu, pair.upper),
                ]
            )
        high = max(1, math.ceil(min(ends[1], last, MOST_LOSS) / h))
        low = min(max(math.floor(max(ends[0], -MOST_LOSS) / h), high - 2 * size), high - 1)
        mass, beyond = _discrete(q, pair, h, low, high) if law is None else _on_grid(law, h, low, high)
        losses = h * np.arange(low, high + 1)
        infinite += times * beyond
        largest = max(abs(losses[0]), abs(losses[-1]))
        largest += 4 * pair.upper_mu**2 if pair.upper == "vacate" or pair.lower == "fill" else 0.0  # terms of `_where`
        slack += times * 1e-14 * (1 + largest)
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        piece_k = _log_sum(log_mass + theta * losses)
        log_k += times * piece_k
        log_top += times * _log_sum(log_mass + t * losses)
        folded = np.bincount(np.arange(len(mass)) % size, np.exp(log_mass + theta * losses - piece_k), size)
        shift += times * low
        z = double_double.rfft(np.asarray(folded, float)) if precise else scipy.fft.rfft(folded)
        bound = (z.size() if isinstance(z, double_double.Complex) else np.abs(z)) + c
        spectrum = _multiplied(spectrum, z, times, times * np.log(bound) > -200)
        log_most += times * np.log(bound)
        errors += times * (c / bound + 8 * unit) + 8 * unit
    # The spectrum so far counts sums from `shift`; the window counts them from `start`.
    raw = (
        double_double.irfft(spectrum)
        if isinstance(spectrum, double_double.Complex)
        else scipy.fft.irfft(spectrum, size)
    )
    masses = np.roll(raw, (shift - start) % size)
    lost = 2 * float((np.exp(log_most) * (errors + c)).sum()) / size
    masses = np.maximum(masses, 0.0) + lost
    # delta at cell j is the sum over i > j of weight_i (1 - exp(-h (i-j))): one cumulative sum per term, from the top.
    offset = h * (np.arange(size) - size // 2)
    weight = np.minimum(masses * np.exp(np.minimum(log_k - theta * (offset + h * (start + size // 2)), 700.0)), 1e30)
    after = np.append(np.cumsum(weight[:0:-1])[::-1], 0.0)
    decay = np.where(offset < 600, np.exp(-np.clip(offset, -600, 600)), 0.0)  # too small a value is safe
    before = np.append(np.cumsum((weight * decay)[:0:-1])[::-1], 0.0) * np.exp(np.clip(offset, -600, 600))
    missing = infinite + math.exp(min(0.0, log_top - t * last))
    n = sum(times for _, _, times, _ in pieces)  # the rounding of an exponential, about 1e-14, is raised to this power
    deltas = (after - before) * (1 + 1e-9 + 2e-13 * n) + 1e-13 * after + missing
    deltas = np.where(offset < -600, 1.0, np.minimum(np.maximum(deltas, missing), 1.0))  # `before` is too large there
    return _Curve(h * start, h, deltas, slack, lost * weight / masses, centre)


def _multiplied(
    spectrum: Array | double_double.Complex, z: Array | double_double.Complex, times: int, live: Array
) -> Array | double_double.Complex:
    """spectrum * z^times by repeated squaring: relative error 2 u times. Entries that are not live become zero."""
    if isinstance(spectrum, double_double.Complex) and isinstance(z, double_double.Complex):
        product = spectrum.at(live).times(z.at(live).power(times))
        return double_double.spread(product, live)
    result, base = np.where(live, spectrum, 0.0), np.where(live, z, 0.0)
    while times:
        if times & 1:
            result = result * base
        times >>= 1
        base = base * base
    return result


def _epsilon_at(curve: _Curve, delta: float) -> float:
    """The smallest epsilon >= 0 at which the curve, a chord in exp(epsilon) between cells, is at most delta."""
    begin = max(0, math.ceil(-curve.start / curve.h))  # epsilon is at least 0
    small_enough = np.flatnonzero(curve.deltas[begin:] <= delta)
    if not len(small_enough):
        return math.inf
    j = begin + int(small_enough[0])
    if small_enough[0] == 0:
        return max(0.0, curve.start + j * curve.h + curve.slack) if curve.start > 0 else 0.0
    left, right = float(curve.deltas[j - 1]), float(curve.deltas[j])
    part = math.log1p((left - delta) / (left - right) * math.expm1(curve.h))
    return curve.start + (j - 1) * curve.h + part + curve.slack


def _delta_at(curve: _Curve, epsilon: float) -> float:
    """The curve at epsilon; 1 outside the grid."""
    place = (epsilon - curve.slack - curve.start) / curve.h
    if not 0 <= place < len(curve.deltas) - 1:
        return 1.0
    j = int(place)
    share = math.expm1((place - j) * curve.h) / math.expm1(curve.h)
    return float(curve.deltas[j] * (1 - share) + curve.deltas[j + 1] * share)


def _log_sum(exponents: Array) -> float:
    """The logarithm of the sum of exponentials."""
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))


# ------------------------------------------------------------------------------------------------------ stored on disk


def _place(key: str) -> Path:
    configured, shared = os.environ.get("SORDINO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(configured) if configured else Path(shared or "~/.cache").expanduser() / "sordino"
    return folder / "noise" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _seal(key: str, value: str) -> str:
    return hashlib.sha256(f"{key} {value}".encode()).hexdigest()


def _stored(key: str) -> float | None:
    """The result of an earlier search, a number."""
    known = _stored_numbers(key, 1)
    return None if known is None else known[0]


def _stored_numbers(key: str, number: int) -> list[float] | None:
    """The result of an earlier search, so many numbers."""
    try:
        numbers = [float(each) for each in (_stored_text(key) or "").split(",")]
        return numbers if len(numbers) == number else None
    except ValueError:
        return None


def _stored_text(key: str) -> str | None:
    """The result of an earlier search, without spaces; each result has its own file.

    The seal is a hash of key and value, so a damaged file or one with another key is not read. It does not protect
    against somebody who can write to the folder, who could also change the code.
    """
    try:
        value, seal = _place(key).read_text().split()
        return value if seal == _seal(key, value) else None
    except (OSError, ValueError):
        return None


def _store(key: str, value: float) -> None:
    _store_text(key, repr(value))


def _store_text(key: str, text: str) -> None:
    """Store a result atomically. If the folder cannot be written, the result is not stored."""
    place = _place(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write(place, f"{text} {_seal(key, text)}\n".encode(), durable=False)
    except OSError:
        return
