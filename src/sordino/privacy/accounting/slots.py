"""The number of slots of a Poisson minibatch.

An answer must be computed from a tensor of the same shape for any drawn records, because the shape of a matrix product
determines how its rows are rounded (docs/numerics.md). So a minibatch has a public number of slots. Records take slots
at random, and empty slots are masked. More records than slots are drawn so rarely that over a whole run it costs at
most a share OVERFLOW of delta, which the account of Poisson sampling reserves. The chance per minibatch is at most
MOST_OVERFLOW in every run, so a ledger of several runs can reserve it for each of their minibatches.

The chance enters delta once, without a factor of e^epsilon (docs/proofs.md, "Slots"). So neither the epsilon of a run
nor that of several runs matters here.
"""

from __future__ import annotations

import math

import numpy as np

from sordino.lazy import scipy

OVERFLOW = 1e-6  # of delta, over a whole run
MOST_OVERFLOW = 2.0**-56  # the largest probability with which one minibatch may overflow, whatever delta is
_ROUNDING = 1e-6  # of a log probability: more than the errors of gammaln for any number of records


def tail(delta: float, draws: int) -> float:
    """The largest log probability with which one of `draws` minibatches may overflow."""
    return min(math.log(OVERFLOW * delta / draws), math.log(MOST_OVERFLOW))


def slots(sizes: np.ndarray, rates: np.ndarray, tail: float) -> np.ndarray:
    """The smallest number m of slots such that m or more of the n - 1 other records are drawn with log probability at
    most `tail`.

    Then there is a slot for each drawn record of either neighbour. P[Bin(n-1, q) >= m] is at most P[Bin(n-1, q) = m] /
    (1 - r), where r < 1 is the ratio of the next term to this one, because the ratios of later terms are smaller.
    """
    pairs, which = np.unique(np.stack([sizes, rates], 1), axis=0, return_inverse=True)
    numbers = [_slots(int(n), float(q), tail) for n, q in pairs]
    return np.array(numbers)[which.reshape(-1)]


def _slots(n: int, q: float, tail: float) -> int:
    m = np.arange(math.floor(n * q) + 1, n)  # above the mean, so that the terms decrease
    if q >= 1 or not len(m):
        return n
    others = n - 1
    chosen = scipy.special.gammaln(n) - scipy.special.gammaln(m + 1) - scipy.special.gammaln(others - m + 1)
    ratio = (others - m) * q / ((m + 1) * (1 - q))
    log_tail = chosen + m * math.log(q) + (others - m) * math.log1p(-q) - np.log1p(-ratio)
    enough = np.flatnonzero(log_tail + _ROUNDING <= tail)
    return int(m[enough[0]]) if len(enough) else n
