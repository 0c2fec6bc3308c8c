"""The density of a graph of masks: each inequality that it relies on, computed another way."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from sordino.errors import SordinoError
from sordino.privacy.accounting.concentrated import FAILURE
from sordino.privacy.mechanisms import mask_graph
from sordino.privacy.mechanisms.mask_graph import CORRECTNESS, SECURITY, TRIES, log_split, log_tail, parameters

CASES = [(257, 0, 1), (300, 30, 10), (1000, 50, 20), (1000, 100, 50)]


def exact_tail(n, p, least):
    """P(Bin(n, p) >= least) of a rational p."""
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(least, n + 1))


def exact_drawn(n, marked, drawn, least):
    """P(at least so many of the drawn are marked)."""
    ways = sum(math.comb(marked, k) * math.comb(n - marked, drawn - k) for k in range(least, min(drawn, marked) + 1))
    return Fraction(ways, math.comb(n, drawn))


@pytest.mark.parametrize(("n", "dropouts", "colluders"), CASES)
def test_exact_tails(n, dropouts, colluders):
    """With rational numbers: few neighbours, many colluders near, and a committee that is short or bought."""
    found = parameters(n, dropouts, colluders)
    p, most = Fraction(found.edge, mask_graph.PARTS), Fraction(1, 3 * 2 ** (TRIES + SECURITY))
    assert n * (1 - exact_tail(n - dropouts - 1, p, found.shares)) <= Fraction(1, 2**CORRECTNESS) * Fraction(1001, 1000)
    assert n * exact_tail(colluders, p, found.near + 1) <= most * Fraction(1001, 1000)
    assert found.near < found.shares
    bought = 2 * found.quorum - found.committee  # colluders that could sign two lists
    assert exact_drawn(n, colluders, found.committee, bought) <= most * Fraction(1001, 1000)
    late = found.committee - found.quorum + 1
    assert exact_drawn(n, dropouts, found.committee, late) <= Fraction(1001, 1000 * 2**CORRECTNESS)
    assert log_split(n - colluders, dropouts, float(p), found.shares - found.near) <= math.log(most)


def test_failures_fit_into_the_account():
    """One graph per run and one stream's roundings (2^-68) stay below what the account allows one release."""
    assert 2.0**-SECURITY + 2.0**-68 < FAILURE


@pytest.mark.parametrize("p", [0.05, 0.3, 0.7])
def test_chernoff_bounds_the_tail(p):
    for n, least in itertools.product((1, 3, 10, 45), range(46)):
        bound = float(log_tail(np.array([float(n)]), p, np.array([float(least)]))[0])
        tail = float(exact_tail(n, Fraction(p), least))
        assert tail <= math.exp(bound) * (1 + 1e-12)


def _split(edges, n, dropouts, inner):
    """Whether some sites can be left out so that the rest, each with `inner` neighbours, falls apart."""
    near = [{j for i, j in edges if i == v} | {i for i, j in edges if j == v} for v in range(n)]
    for d in range(dropouts + 1):
        for out in itertools.combinations(range(n), d):
            left = set(range(n)) - set(out)
            if any(len(near[v] & left) < inner for v in left):
                continue
            seen, new = set(), {min(left)}
            while new:
                seen |= new
                new = set().union(*(near[v] & left for v in new)) - seen
            if seen != left:
                return True
    return False


@pytest.mark.parametrize(("n", "dropouts", "inner"), [(5, 0, 1), (5, 1, 1), (6, 0, 2)])
@pytest.mark.parametrize("p", [0.3, 0.6])
def test_split_is_bounded(n, dropouts, inner, p):
    """The exact probability over all graphs of a few sites, whichever sites the server leaves out."""
    pairs = list(itertools.combinations(range(n), 2))
    exact = 0.0
    for marks in itertools.product((0, 1), repeat=len(pairs)):
        edges = [pair for pair, mark in zip(pairs, marks, strict=True) if mark]
        if _split(edges, n, dropouts, inner):
            exact += p ** len(edges) * (1 - p) ** (len(pairs) - len(edges))
    assert 0 < exact <= math.exp(log_split(n, dropouts, p, inner))


def test_degree_grows_slowly():
    degrees = [parameters(n, n // 20, n // 50).degree(n) for n in (300, 1000, 3000)]
    assert degrees[2] / degrees[0] < 3  # 10 times the sites
    assert all(degree < n / 4 for degree, n in zip(degrees, (300, 1000, 3000), strict=True))


@pytest.mark.parametrize(("dropouts", "colluders"), [(140, 20), (299, 1), (0, 299), (-1, 0)])
def test_too_many_dropouts_or_colluders_are_refused(dropouts, colluders):
    with pytest.raises(SordinoError, match="dropouts, colluders"):
        parameters(300, dropouts, colluders)
