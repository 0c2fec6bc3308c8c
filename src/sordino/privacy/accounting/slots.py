"""The number of slots of a Poisson minibatch.

An answer must be computed from a tensor of the same shape for any drawn records, because the shape of a matrix product
determines how its rows are rounded (docs/numerics.md). So a minibatch has a public number of slots. Records take slots
at random, and empty slots are masked. More records than slots are drawn so rarely that it costs at most a share
OVERFLOW of delta, which the account of Poisson sampling reserves.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import rel_entr

OVERFLOW = 1e-6  # of delta, over a whole run


def tail(epsilon: float, delta: float, draws: int) -> float:
    """The largest log probability with which one of `draws` minibatches may overflow.

    If records that do not fit are dropped, the law of the run changes by at most p, the chance that this ever happens.
    So delta changes by at most (1 + e^epsilon) p.
    """
    return math.log(OVERFLOW * delta / draws) - math.log1p(math.exp(min(epsilon, 700.0)))


def slots(sizes: np.ndarray, rates: np.ndarray, tail: float) -> np.ndarray:
    """The smallest number of slots that Poisson sampling exceeds with log probability at most `tail`.

    By Chernoff's bound, more than m of n records are drawn at rate q with probability at most
    exp(-n KL((m + 1) / n, q)).
    """
    pairs, which = np.unique(np.stack([sizes, rates], 1), axis=0, return_inverse=True)
    numbers = []
    for n, q in pairs:
        least = math.floor(n * q)
        part = np.arange(least + 1, n) / n  # (m + 1) / n, above q and below 1
        enough = np.flatnonzero(-n * (rel_entr(part, q) + rel_entr(1 - part, 1 - q)) <= tail)
        numbers.append(least + int(enough[0]) if q < 1 and len(enough) else int(n))
    return np.array(numbers)[which.reshape(-1)]
