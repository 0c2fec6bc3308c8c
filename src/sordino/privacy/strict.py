"""How much clients with a stricter epsilon count where records enter minibatches and only sums are visible.

Without minibatches a client that counts less, by the ratio of the mu that both epsilons allow, spends exactly what it
allows. Minibatches hide a record the better, the more noise there is, so the same ratio leaves a strict client far
below its epsilon. Here its weight is the largest one on a grid with which its own account stays below its epsilon, at
the noise that the other clients need.

If there are many strict clients, some are searched. What the others need lies between, relative to the central limit.

Weights follow from public numbers alone, and no guarantee rests on them: `calibration` computes the noise for the
weights that a plan has, client by client. A weight that is too large would only cost everybody noise. Because of the
grid, machines that differ in the last bits of an account agree on the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
MOST_ACCOUNTS = 64  # of strict clients that are all searched; if there are more, about so many are
FEW_ACCOUNTS = 8  # the same under allocation
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
    if not noise:  # the others are never drawn
        return np.ones(len(moved))
    result, strict = np.ones(len(moved)), np.flatnonzero(~lenient)
    groups, accounts = list[Array](), list[SampledAccount]()
    for epsilon in sorted(set(epsilons[strict].tolist())):
        asked = np.flatnonzero(epsilons == epsilon)
        rounded = events.coarse(rates[asked], FEW_RATES if few else MOST_RATES, attained=few)
        for rate in sorted(set(rounded.tolist())):
            groups.append(asked[rounded == rate])
            accounts.append(account(rate, times[groups[-1]].max(), epsilon))
    if len(accounts) <= (FEW_ACCOUNTS if few else MOST_ACCOUNTS):
        for clients, least in zip(groups, needed(accounts), strict=True):
            result[clients] = noise / np.maximum(least * moved[clients], 1e-300)
    else:
        own = [account(*each) for each in zip(rates[strict], times[strict], epsilons[strict], strict=True)]
        limits = np.array([subsampled.limit(each, delta, adjacency) for each in own])
        rounded = events.coarse(rates[strict], FEW_RATES // 2 if few else MOST_RATES // 2)
        alike = np.column_stack([rounded, np.ceil(np.log2(np.maximum(times[strict], 1)))])
        most_searched = FEW_ACCOUNTS if few else MOST_ACCOUNTS
        needs = _between(limits, alike, most_searched, lambda n: many.scales([own[k] for k in n], delta, adjacency))
        result[strict] = noise / np.maximum(needs * moved[strict], 1e-300)
    steps = np.ceil(-np.log2(np.maximum(result * (1 - ROOM), math.ulp(0.0))) * STEPS)
    return np.asarray(np.where(lenient, 1.0, np.exp2(-np.clip(steps, 0.0, STEPS * 1000.0) / STEPS)))


def _between(limits: Array, alike: Array, most: int, needed: Callable[[list[int]], list[float]]) -> Array:
    """About what each account needs: some are searched, and the ratio to the limit lies between theirs for others.

    Args:
      limits: what each account needs by the central limit.
      alike: facts of each account, one row each; those with equal rows are compared.
      most: about how many accounts are searched.
      needed: what these accounts need.
    """
    logs, chosen, result = np.log(np.maximum(limits, 1e-300)), list[Array](), np.zeros(len(limits))
    kinds = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1)
    groups = [np.flatnonzero((kinds == kind) & (limits > 0)) for kind in range(int(kinds.max()) + 1)]
    groups = [group[np.argsort(limits[group], kind="stable")] for group in groups if len(group)]
    for group in groups:
        places = np.linspace(logs[group[0]], logs[group[-1]], max(2, most // len(groups)))
        nearest = np.searchsorted(logs[group], places).clip(max=len(group) - 1)
        chosen.append(group[sorted({0, *nearest.tolist(), len(group) - 1})])
    found = iter(needed([n for some in chosen for n in some.tolist()]))
    for group, some in zip(groups, chosen, strict=True):
        ratios = np.array([next(found) for _ in some]) / limits[some]
        result[group] = limits[group] * np.interp(logs[group], logs[some], ratios)
    return result
