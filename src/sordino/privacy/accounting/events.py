"""What a list of releases amounts to: the releases are facts, and each is read by the sampler it was drawn with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sordino.core import Adjacency
from sordino.privacy.accounting import gaussian, subsampled
from sordino.privacy.accounting.subsampled import Sampled, Sampler
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.discrete_gaussian import FAILURE


class Release(NamedTuple):
    """`times` equal Gaussian releases, as the adversary sees them, each about a part of the data drawn at `rate`.

    `integers`: of sums of integers with discrete Gaussian noise.
    """

    query: str
    sensitivity: float
    std: float
    times: int
    rate: float = 1.0
    sampler: Sampler = Sampler.FULL
    integers: bool = False


def mu(releases: Iterable[Release]) -> float:
    """Of the same releases about all of the data: exact where nothing was sampled, and else never too small, for a
    mixture tells its parts no better apart than its worst part."""
    return gaussian.mu_of((r.sensitivity, r.std, r.times) for r in releases)


def epsilon(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """The least that is proved. Discrete noise is accounted for as concentrated DP, and what stands beside it too."""
    if whole_numbers := sum(r.times for r in releases if r.integers):
        if any(r.rate < 1 for r in releases) or math.isinf(mu(releases)):
            return math.inf
        return discrete_gaussian.epsilon(mu(releases) ** 2 / 2, delta, whole_numbers)
    drawn, whole = split(releases, adjacency)
    if not drawn or math.isinf(mu(releases)):
        return gaussian.epsilon(mu(releases), delta)
    return subsampled.epsilon(drawn, delta, adjacency, whole)


def guess(releases: Sequence[Release], adjacency: Adjacency) -> float:
    """How often a guess between two equally likely cases is right, at most: (1 + delta at epsilon 0) / 2."""
    if whole_numbers := sum(r.times for r in releases if r.integers):
        return min(1.0, tv_of(mu(releases)) + whole_numbers * FAILURE / 2)
    drawn, whole = split(releases, adjacency)
    if not drawn or math.isinf(mu(releases)):
        return (1 + gaussian.delta(mu(releases), 0.0)) / 2
    return (1 + subsampled.delta(drawn, 0.0, adjacency, whole)) / 2


def tv_of(mu: float) -> float:
    """The same of concentrated DP with rho = mu^2 / 2: total variation by Pinsker, and by Bretagnolle and Huber."""
    rho = mu**2 / 2
    return (1 + min(math.sqrt(rho / 2), math.sqrt(-math.expm1(-rho)))) / 2


def split(releases: Iterable[Release], adjacency: Adjacency) -> tuple[list[Sampled], float]:
    """Those that were sampled, in units of one term of a sum, and the mu of the others."""
    parts = 1.0 if adjacency is Adjacency.ADD_REMOVE else 0.5  # replacing moves a sum by two terms
    drawn, whole = [], []
    for release in releases:
        if release.rate < 1 and release.sensitivity and release.times:
            ratio = parts * release.sensitivity / release.std if release.std else math.inf
            drawn.append(Sampled(release.rate, ratio, release.times, release.sampler))
        else:
            whole.append(release)
    return drawn, mu(whole)


def coarse(rates: np.ndarray, most: int = 8) -> np.ndarray:
    """Rates rounded up to a few values, so that many unlike clients need few accounts: a larger rate costs more."""
    if len(np.unique(rates)) <= most:
        return rates
    edges = np.geomspace(rates.min(), rates.max(), most + 1)[1:]
    edges[-1] = rates.max()
    return edges[np.minimum(np.searchsorted(edges, rates), most - 1)]
