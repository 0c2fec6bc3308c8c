"""How dense a graph of masks must be where secure aggregation has too many sites for masks between all pairs.

Every pair of sites is an edge with probability p, independently (Bell et al. 2020 use graphs of logarithmic degree).
Masks and shares exist only between neighbours (`secagg/graph.py`, `secagg/sparse.py`). `parameters` computes p, the
number t of shares that open a secret, and a committee that confirms the survivors, such that

- honest sites have at most `near` < t colluders among their neighbours,
- the honest sites of every list of survivors on which each site has t neighbours are connected, whichever sites the
  server leaves out after it has seen the graph,
- no two lists of survivors get enough signatures of the committee,

up to a probability of 2^-66 over the graph, also for an adversary who tries 2^64 sessions and keeps the best one for
itself. What may fail is then less than the account allows each release (`accounting.concentrated.FAILURE`), so neither
the noise nor delta changes. The tails are those of the exact laws or bounds that hold for every n; none is asymptotic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SordinoError

ALL_PAIRS = 256  # most sites that all share masks with all others; more sites share them along a graph
MOST_SITES = 4096  # of a roster
PARTS = 2**16  # an edge exists if 16 bits of the keystream are below `edge`
TRIES = 64  # log2 of the sessions that an adversary may try
SECURITY = 66  # -log2 of the probability that a session has less than the stated protection
CORRECTNESS = 40  # -log2 of the probability that a round fails although at most `dropouts` random sites did
_EVENTS = 3  # that may fail: colluders near a site, a split, and two lists of survivors


@dataclass(frozen=True)
class Parameters:
    """A graph of masks.

    Args:
      edge: probability of an edge, in 1/65536.
      shares: how many neighbours' shares open a secret, and how many neighbours each survivor needs.
      near: most colluders among the neighbours of an honest site.
      committee: how many sites, drawn by the session's hash, confirm the survivors.
      quorum: how many of them must.
    """

    edge: int
    shares: int
    near: int
    committee: int
    quorum: int

    @property
    def probability(self) -> float:
        """The probability of an edge."""
        return self.edge / PARTS

    def degree(self, sites: int) -> float:
        """Mean number of neighbours."""
        return self.probability * (sites - 1)


@lru_cache(64)
def parameters(sites: int, dropouts: int, colluders: int) -> Parameters:
    """The sparsest graph that is found to be good enough.

    Args:
      sites: number of sites.
      dropouts: sites that may vanish in a round. The server may choose them, which can cost no privacy; that the round
        succeeds is computed for random ones.
      colluders: sites that work with the server. They are fixed before the session is known.

    Raises:
      SordinoError: no graph with fewer edges than all pairs is good enough.
    """
    if not (min(dropouts, colluders) >= 0 and dropouts + colluders <= sites - 2 and sites <= MOST_SITES):
        raise SordinoError(
            f"dropouts, colluders: {dropouts} and {colluders} of {sites} sites; two must remain, and {MOST_SITES} are "
            "the most."
        )
    bits = TRIES + SECURITY + math.log2(_EVENTS)
    group = _committee(sites, dropouts, colluders, bits)
    degree, found = 4.0, None
    while group and degree < sites - 1:  # in steps of 5 %, because the least degree is not worth a longer search
        edge = math.ceil(degree / (sites - 1) * PARTS)
        if edge < PARTS and (found := _thresholds(sites, dropouts, colluders, edge / PARTS, bits)):
            shares, near = found
            return Parameters(edge, shares, near, *group)
        degree *= 1.05
    raise SordinoError(
        f"dropouts, colluders: {dropouts} and {colluders} of {sites} sites; no graph of masks withstands both; allow "
        "fewer."
    )


def _thresholds(sites: int, dropouts: int, colluders: int, p: float, bits: float) -> tuple[int, int] | None:
    """Shares that open a secret, and most colluders among an honest site's neighbours; None if p is too small."""
    from scipy.stats import binom

    few = np.arange(sites)
    correct = sites * binom.cdf(few - 1, sites - dropouts - 1, p) <= 2.0**-CORRECTNESS
    shares = int(few[correct].max())
    near = next(k for k in range(colluders + 1) if sites * binom.sf(k, colluders, p) <= 2.0**-bits)
    if shares - near < 1 or log_split(sites - colluders, dropouts, p, shares - near) > -bits * math.log(2):
        return None
    return shares, near


def log_split(honest: int, dropouts: int, p: float, inner: int) -> float:
    """Log of a bound on the probability that honest survivors can be split.

    It is a sum over sets K of s honest sites, and sets of d honest sites that are left out: that all within K have
    `inner` neighbours in K (so K has at least s inner / 2 edges: Chernoff's bound), and that no edge leads from K to
    the honest - s - d others. The two are about different edges, so they are independent. K is the smaller side.
    """
    from scipy.special import logsumexp

    s = np.arange(inner + 1, honest // 2 + 1, dtype=np.float64)[:, None]
    d = np.arange(dropouts + 1, dtype=np.float64)[None, :]
    if not s.size:
        return -math.inf
    rest = honest - s - d
    chosen = log_choose(np.full_like(s, honest), s) + log_choose(honest - s, np.minimum(d, honest - s))
    terms = chosen + log_tail(s * (s - 1) / 2, p, np.ceil(s * inner / 2)) + s * rest * math.log1p(-p)
    return float(logsumexp(np.where(s <= rest, terms, -np.inf)))


def log_tail(trials: NDArray[np.float64], p: float, least: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chernoff: log P(Bin(trials, p) >= least) <= -trials KL(least/trials | p) where least/trials > p."""
    from scipy.special import rel_entr

    share = np.minimum(least / trials, 1.0)
    entropy = rel_entr(share, p) + rel_entr(1 - share, 1 - p)
    return np.where(least > trials, -np.inf, np.where(share > p, -trials * entropy, 0.0))


def log_choose(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of the binomial coefficient."""
    from scipy.special import gammaln

    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def _committee(sites: int, dropouts: int, colluders: int, bits: float) -> tuple[int, int] | None:
    """The least committee, and its quorum r: 2 r exceeds its members and its colluders, and r of them are there."""
    from scipy.stats import hypergeom

    size, last = 8, False
    while not last:
        size, last = min(size, sites), size >= sites
        drawn = np.arange(size + 1)
        # sf(k) = P(more than k). Of all sites the numbers are certain.
        bad = int(drawn[hypergeom.sf(drawn, sites, colluders, size) <= 2.0**-bits].min())
        here = int(drawn[hypergeom.cdf(drawn - 1, sites, sites - dropouts, size) <= 2.0**-CORRECTNESS].max())
        if 2 * here > size + bad:
            return size, (size + bad) // 2 + 1
        size = math.ceil(1.05 * size)
    return None
