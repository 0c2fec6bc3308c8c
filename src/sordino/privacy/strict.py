"""How much clients with a stricter epsilon count where records enter minibatches and only sums are visible.

Without minibatches a client that counts less, by the ratio of the mu that both epsilons allow, spends exactly what it
allows. Minibatches hide a record the better, the more noise there is, so the same ratio leaves a strict client far
below its epsilon. Here its weight is the largest one on a grid with which its own account stays below its epsilon, at
the noise that the other clients need.

Weights follow from public numbers alone, and no guarantee rests on them: `calibration` computes the noise for the
weights that a plan has, client by client. A weight that is too large would only cost everybody noise. Because of the
grid, machines that differ in the last bits of an account agree on the weights.
"""

from __future__ import annotations

import math

import numpy as np

from sordino.core import Adjacency
from sordino.privacy.accounting import events, many, subsampled
from sordino.privacy.accounting.samplers import SampledAccount, SampledGaussian, Sampler

Array = np.ndarray
STEPS = 64  # of the grid, per factor of two
ROOM = 0.005  # below what the account allows, for the tolerance of searches
MOST_RATES = 8  # of strict clients with the same epsilon, whose rates are rounded up; under allocation FEW_RATES
FEW_RATES = 4
MOST_ALONE = 16  # accounts of strict clients that are searched one by one
MOST_COMPARED = 40  # of the other clients, as to who needs most noise


def factors(
    moved: Array, rates: Array, times: Array, sampler: Sampler, epsilons: Array, delta: float, adjacency: Adjacency
) -> Array:
    """The factors on the weights of clients; 1 for those with the largest epsilon.

    Args:
      moved: how far one record of each client moves the sum, in any unit, if all factors are 1.
      rates: of each client's minibatches.
      times: each client's number of releases.
      sampler: of the minibatches.
      epsilons: of each client.
      delta: the delta.
      adjacency: which data sets are neighbours.

    Returns:
      One factor per client, in (0, 1].

    Raises:
      SordinoError: an argument is out of its range.
    """
    few = sampler is Sampler.ALLOCATION
    lenient = epsilons == epsilons.max()

    def account(rate: float, number: float, epsilon: float) -> SampledAccount:
        return SampledAccount([SampledGaussian(float(rate), 1.0, int(number), sampler)], 0.0, float(epsilon))

    def needed(asked: list[SampledAccount]) -> list[float]:
        if len(asked) > MOST_ALONE:
            return many.scales(asked, delta, adjacency)
        tolerance = subsampled.WIDE if few else subsampled.CLOSE
        return [subsampled.scale(a.releases, a.epsilon, delta, adjacency, tolerance=tolerance) for a in asked]

    others = np.unique(np.stack([rates, moved, times], 1)[lenient], axis=0)
    others = others[np.unique(np.linspace(0, len(others) - 1, MOST_COMPARED).astype(int))]
    compared = [(account(rate, number, epsilons.max()), reach) for rate, reach, number in others]
    most, reach = max(compared, key=lambda each: subsampled.limit(each[0], delta, adjacency) * each[1])
    noise = needed([most])[0] * reach
    groups, accounts = list[Array](), list[SampledAccount]()
    for epsilon in sorted(set(epsilons[~lenient].tolist())):
        asked = np.flatnonzero(epsilons == epsilon)
        rounded = events.coarse(rates[asked], FEW_RATES if few else MOST_RATES, attained=few)
        for rate in sorted(set(rounded.tolist())):
            groups.append(asked[rounded == rate])
            accounts.append(account(rate, times[groups[-1]].max(), epsilon))
    result = np.ones(len(moved))
    for clients, least in zip(groups, needed(accounts), strict=True):
        result[clients] = noise / np.maximum(least * moved[clients], 1e-300)
    steps = np.ceil(-np.log2(np.maximum(result * (1 - ROOM), math.ulp(0.0))) * STEPS)
    return np.asarray(np.where(lenient, 1.0, np.exp2(-np.clip(steps, 0.0, STEPS * 1000.0) / STEPS)))
