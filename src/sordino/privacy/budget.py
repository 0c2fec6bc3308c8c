"""Sharing a limit over several planned runs.

Runs with Gaussian noise on all records compose exactly: mu squared adds up. So a limit is shared by sharing its mu
squared, and k equal runs get mu / sqrt k each. That is more than epsilon / k for each. The sum holds when later runs
are chosen after looking at the results of earlier ones, because every run's mu is fixed before it begins
(Smith and Thakurta 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian


class PlannedRun(NamedTuple):
    """The budget of one run.

    Attributes:
      share: its part of mu squared.
      mu: its budget as Gaussian DP.
      epsilon: the same as epsilon, for `sordino run --epsilon`.
      epsilon_after: epsilon of this run, all runs before it, and what was spent before them.
    """

    share: float
    mu: float
    epsilon: float
    epsilon_after: float


def share(epsilon: float, delta: float, weights: Sequence[float], spent: float = 0.0) -> list[PlannedRun]:
    """Share what is left of a limit.

    Args:
      epsilon: epsilon of the limit over all runs.
      delta: delta of the limit, and of every run.
      weights: one number per run; a run gets its part of their sum.
      spent: mu of what was spent before.

    Returns:
      One budget per run, in the order of the weights.

    Raises:
      SordinoError: a weight is not above 0, or nothing is left.

    >>> [round(run.epsilon, 2) for run in share(8.0, 1e-5, [1, 1, 1, 1, 1])]
    [3.12, 3.12, 3.12, 3.12, 3.12]
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise SordinoError(f"shares: {weight:g} must be a finite number above 0.")
    if not weights:
        raise SordinoError("runs: there must be at least one.")
    square = gaussian.mu(epsilon, delta) ** 2 - spent**2
    if square <= 0:
        raise SordinoError(f"limit: nothing is left of epsilon {epsilon:g} at delta {delta:g}; no run fits.")
    runs, whole, total = [], math.fsum(weights), spent**2
    for weight in weights:
        part = weight / whole
        total += part * square
        mu = math.sqrt(part * square)
        after = min(gaussian.epsilon(math.sqrt(total), delta), epsilon)
        runs.append(PlannedRun(part, mu, gaussian.epsilon(mu, delta), after))
    return runs
