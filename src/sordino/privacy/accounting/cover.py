"""The Gaussian release that stands for a run with samples in a ledger of several runs.

A run is *mu-Gaussian up to d* if both of its directions satisfy, for all epsilon >= 0,

    delta(epsilon) <= (1 - d) G(epsilon) + d,        G the delta of one mu-Gaussian release.

Runs of this kind compose however later ones are chosen: mu squared and d add up (docs/proofs.md, lemma 21).

The delta of the run is computed at some epsilons. It is convex in exp(epsilon), so the chords between them are above
it. Both sides fall with epsilon, so they are compared on a finer grid: the chord at the left end of each cell with the
right side at its right end. Beyond the epsilon at which delta is at most d there is nothing to compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.lazy import scipy
from sordino.privacy.accounting import subsampled
from sordino.privacy.accounting.samplers import SampledGaussian

VERSION = 1  # of the algorithm: cached results of other versions are not read
POINTS = 33  # epsilons at which the delta of the run is computed
CELLS = 32  # of the finer grid, between two of them
MOST_EPSILON = 600.0  # above it exp(epsilon) is too large; nothing is covered
TOLERANCE = 1e-4  # mu exceeds the smallest one that passes the comparison by at most this share
_ROUNDING = 1e-11  # more than the error of the Gaussian delta, as a share of its larger term


def mu_up_to(
    releases: Iterable[SampledGaussian],
    delta: float,
    adjacency: Adjacency,
    gaussian_mu: float = 0.0,
    *,
    may_fail: float = 0.0,
) -> float:
    """A mu for which the releases together are mu-Gaussian up to delta.

    Args:
      releases: the sampled releases of one run.
      delta: the part of delta that the run may use beside its mu.
      adjacency: which data sets are neighbours.
      gaussian_mu: mu of the Gaussian-DP releases of the run on all data.
      may_fail: the probability that a bound of the run fails; it is a part of delta.

    Returns:
      The mu, at most that of the same releases on all data; infinite if nothing is proved.

    Raises:
      SordinoError: an argument is out of its range.
    """
    if not 0 < delta < 1:
        raise SordinoError(f"delta: {delta} must lie between 0 and 1; 1e-6 is usual.")
    parts, mu = subsampled._fold(releases, adjacency, gaussian_mu)
    if may_fail >= delta:
        return np.inf
    key = json.dumps([VERSION, subsampled.VERSION, parts, delta, str(adjacency), mu, may_fail])
    found = subsampled._stored(key)
    if found is None:
        found = _search(parts, delta, adjacency, mu, may_fail)
        subsampled._store(key, found)
    return found


@lru_cache(maxsize=1024)
def _search(
    parts: tuple[SampledGaussian, ...], delta: float, adjacency: Adjacency, mu: float, may_fail: float
) -> float:
    most = subsampled._unsampled(parts, adjacency, mu)
    top = subsampled.epsilon(parts, delta - may_fail, adjacency, mu)
    if not parts or not 0 < top < MOST_EPSILON:
        return 0.0 if top == 0 else most
    width = top / (POINTS - 1)
    deltas = [subsampled.delta(parts, k * width, adjacency, mu) for k in range(POINTS - 1)]
    run = np.minimum.accumulate([*deltas, delta - may_fail]) + may_fail
    share = np.expm1(width * np.arange(CELLS) / CELLS) / np.expm1(width)
    chords = (run[:-1, None] * (1 - share) + run[1:, None] * share).ravel()
    epsilons = width / CELLS * np.arange(1, len(chords) + 1)
    low, high = 0.0, most
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        covered = (chords <= (1 - delta) * _gaussian_delta(middle, epsilons) + delta).all()
        low, high = (low, middle) if covered else (middle, high)
    return high


def _gaussian_delta(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """The delta of one mu-Gaussian release, rounded down."""
    above = scipy.special.log_ndtr(mu / 2 - epsilons / mu)
    below = epsilons + scipy.special.log_ndtr(-mu / 2 - epsilons / mu)
    return np.asarray(np.exp(above) * (-np.expm1(np.minimum(below - above, 0.0)) - _ROUNDING))
