"""The loss of an epoch of random allocation: each record is in exactly one of `bins` minibatches, drawn at random.

A record draws its bin anew for every epoch, uniformly and independently of all others. Let the first `rounds` of the
`bins` minibatches of an epoch be released with Gaussian noise, the record's term being at most mu standard deviations
long. Against the releases without the record, the likelihood ratio is

    A = ((bins - rounds) + W_1 + ... + W_rounds) / bins,    W = exp(mu z - mu² / 2),

where z are independent standard normals without the record. No shorter term, and none that depends on earlier releases,
is worse (docs/proofs.md, "Random allocation"). The law of A is that of a mean of lognormals. B is the same for a record
in its place, with W' = exp(-mu z - mu² / 2). The divergence at alpha is E[(A - alpha)_+] (remove), E[(1 - alpha A)_+]
(add) and E[(A - alpha B)_+] (replace). All are expectations of a convex function of a sum of independent terms

    D = W - alpha,    1 - alpha W',    W - alpha W'.

Spreading a term over the two ends of its cell, with its mean kept, increases such an expectation, and so does raising a
term. A term may be cut at `top` if E[(D - top)_+] is added for each term, because (x + y)_+ is at most x_+ + y_+. The
terms then lie on a grid, and one Fourier transform and a power give the law of their sum. What is wrapped around or
lost to rounding is added. Replace-one uses tilted masses, so that a small divergence is not lost in rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sordino.lazy import scipy

Array = np.ndarray
MOST_MU = 3.5  # of a shift: above it an epoch counts as one release on all data
_UNIT = 2.0**-52
_LEAST = (
    4.3  # standard deviations: a term that is smaller than here, under the measure that it weighs most in, is raised
)


class Law(NamedTuple):
    """A pair that dominates an epoch: its losses, P's masses on them, and P's mass at an infinite loss."""

    losses: Array
    masses: Array
    infinite: float


@lru_cache(maxsize=64)
def law(bins: int, rounds: int, mu: float, way: str, cut: float, share: float, cells: int) -> Law:
    """The pair that dominates one epoch.

    Args:
      bins: minibatches of an epoch.
      rounds: how many of them are released, at most `bins`.
      mu: the largest length of a record's term, in standard deviations of the noise.
      way: `remove`, `add` or `replace`.
      cut: probability that may be counted as an infinite loss.
      share: width of a cell, in standard deviations of one term, and a part of the distance of two alphas, in those of
        the loss.
      cells: at most; if they are too few, cells are wider.

    Returns:
      The pair.
    """
    if way == "replace":
        return _from_profile(bins, rounds, mu, cut, share, cells)
    return _from_sum(bins, rounds, mu, way, cut, share, cells)


# --------------------------------------------------------------------------------------- a record joins or leaves


def _from_sum(bins: int, rounds: int, mu: float, way: str, cut: float, share: float, cells: int) -> Law:
    """The law of the likelihood ratio: under the data set with the record (remove), or without it (add).

    With the record, a sum has one term from the shifted normal, which by symmetry is the first one, or no such term if
    the record is in a minibatch that is not released.
    """
    std = math.sqrt(math.expm1(mu * mu))
    level = cut / 4 if way == "remove" else 1e-9
    top = math.exp(mu * ((mu if way == "remove" else 0.0) - float(scipy.special.ndtri(level))) - mu * mu / 2)
    reach = rounds + 12 * std * math.sqrt(rounds) + 1.2 * top
    if way == "add":  # larger ratios are rare, and may be rounded down
        reach = min(reach, max(8.0 * bins, share * std * cells))
        top = min(top, reach)
    h = max(share * std, reach / cells)
    values = h * np.arange(math.ceil(top / h) + 1)
    with np.errstate(divide="ignore"):
        z = (np.log(values) + mu * mu / 2) / mu
    q, q_slack = _cells(np.append(z, np.inf))
    p, p_slack = _cells(np.append(z, np.inf) - mu)
    sign = 1.0 if way == "remove" else -1.0  # rounding must raise the ratio, or lower it
    up = np.clip((p - values * q + sign * (p_slack + values * q_slack))[:-1] / h, 0.0, (q + q_slack)[:-1])
    mass = q + q_slack  # what lies above `top` is moved to it
    mass[:-1] -= up
    mass[1:] += up
    size = scipy.fft.next_fast_len(math.ceil(reach / h) + 1, real=True)
    others, other_lost = _power(mass, rounds - 1, size)
    first = ((bins - rounds) + rounds * values) / bins * mass if way == "remove" else mass
    spectrum = scipy.fft.rfft(np.bincount(np.arange(len(first)) % size, first, size))
    norm, c = float(first.sum()), 3 * _UNIT * math.log2(size)
    lost = 2 * float(((np.abs(spectrum) + c * norm) * other_lost + np.abs(others) * c * norm * 2).sum()) / size
    masses = np.maximum(scipy.fft.irfft(spectrum * others, size), 0.0) + lost + 4 * c * norm / size
    ratios = ((bins - rounds) + h * np.arange(size)) / bins
    if way == "add":
        infinite = float(masses[0]) if rounds == bins else 0.0
        keep = ratios > 0
        return Law(-np.log(ratios[keep])[::-1], masses[keep][::-1], infinite)
    infinite = rounds / bins * float(scipy.special.ndtr(mu - z[-1])) + _beyond(values, first, mass, rounds, h * size)
    keep = ratios > 0
    return Law(np.log(ratios[keep]), masses[keep], infinite)


def _beyond(values: Array, first: Array, mass: Array, rounds: int, last: float) -> float:
    """The mass of sums above `last`, by Chernoff: they would wrap around to smaller ones."""
    best = 0.0
    for t in np.geomspace(3.0, 300.0, 12) / last:
        exponent = t * values - t * last
        weight = math.log(float(first @ np.exp(exponent)) + 1e-300)
        weight += (rounds - 1) * math.log(float(mass @ np.exp(t * values)))
        best = min(best, weight)
    return math.exp(best)


def _cells(z: Array) -> tuple[Array, Array]:
    """The standard normal's masses between successive z, each from the smaller tail, and a bound on their rounding."""
    below, above = scipy.special.ndtr(z), scipy.special.ndtr(-z)
    right = z[:-1] > -z[1:]
    mass = np.where(right, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.maximum(mass, 0.0), 8 * _UNIT * np.where(right, above[:-1], below[1:])


def _power(mass: Array, times: int, size: int) -> tuple[Array, Array]:
    """The transform of `times` equal terms on a circle, and a bound on the rounding of each entry.

    `mass` adds up to 1, up to rounding. The bounds are those of `subsampled._compose`.
    """
    z = scipy.fft.rfft(np.bincount(np.arange(len(mass)) % size, mass, size))
    c = 3 * _UNIT * math.log2(size)
    bound = np.abs(z) + c
    most = np.exp(times * np.log(bound))
    result, base, left = np.ones_like(z), np.where(most > 1e-80, z, 0.0), times
    while left:
        if left & 1:
            result = result * base
        left >>= 1
        base = base * base
    return result, most * (times * (c / bound + 8 * _UNIT) + 8 * _UNIT)


# ---------------------------------------------------------------------------------------------- a record is replaced


def _from_profile(bins: int, rounds: int, mu: float, cut: float, share: float, cells: int) -> Law:
    """The pair whose divergence is the chords between divergences at some alpha, which are above the convex function.

    The pair is symmetric: exchanged, it has the same divergences. So those at alpha < 1 follow from those above.
    """
    std = 2 * math.sqrt(math.log1p(rounds * math.expm1(mu * mu) / bins**2))
    epsilons, deltas, epsilon = [0.0], [replaced(1.0, bins, rounds, mu, cut / 4, share, cells)], 0.0
    step = share * std
    while deltas[-1] > cut and len(epsilons) < 400:
        epsilon += step * max(1.0, epsilon / (3 * std))
        epsilons.append(epsilon)
        deltas.append(min(replaced(math.exp(epsilon), bins, rounds, mu, cut / 4, share, cells), deltas[-1]))
    above, at = np.exp(epsilons), np.array(deltas)
    below = 1 - 1 / above[:0:-1] + at[:0:-1] / above[:0:-1]
    alphas = np.concatenate([[0.0], 1 / above[:0:-1], above])
    values = np.concatenate([[1.0], below, at]) * (1 + 4 * _UNIT)
    kept = _hull(alphas, values)
    alphas, values = alphas[kept], values[kept]
    # -slope is Q's mass above alpha. P's mass on a corner is alpha times the change of the slope.
    slopes = np.append(np.diff(values) / np.diff(alphas), 0.0)
    slack = 8 * _UNIT * (np.append(values[:-1] / np.diff(alphas), 0.0))
    masses = alphas[1:] * (np.maximum(np.diff(slopes), 0.0) + slack[1:] + slack[:-1])
    return Law(np.log(alphas[1:]), masses, float(values[-1]))


def _hull(x: Array, y: Array) -> list[int]:
    """The corners of the largest convex function that is nowhere above the points: it is above any convex function
    that is nowhere above them."""
    kept: list[int] = []
    for n in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[n] - x[a]) < (y[n] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(n)
    return kept


def replaced(alpha: float, bins: int, rounds: int, mu: float, cut: float, share: float, cells: int) -> float:
    """An upper bound on E[(A - alpha B)_+] for alpha >= 1.

    Args:
      alpha: the factor, exp(epsilon).
      bins: minibatches of an epoch.
      rounds: how many of them are released.
      mu: the largest length of a record's term, in standard deviations of the noise.
      cut: what may be added to the divergence.
      share: width of a cell, in standard deviations of one term.
      cells: at most.

    Returns:
      The bound.
    """
    constant = (bins - rounds) * (1 - alpha)
    ends = (-mu - _LEAST, mu - float(scipy.special.ndtri(cut)))
    low, top = (float(_term(np.array(end), alpha, mu)) for end in ends)
    z = np.linspace(*ends, 500)  # of a quadrature that only places the grid
    log_p, d = -z * z / 2 + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi)), _term(z, alpha, mu)
    std = math.sqrt(max(float(np.exp(log_p) @ d**2) - (1 - alpha) ** 2, 1e-300))

    def log_moment(t: float) -> float:
        return rounds * _log_sum(log_p + t * d) + t * constant

    tilts = np.geomspace(1e-3, 40.0, 24) / (std * math.sqrt(rounds))
    moments = [log_moment(float(t)) for t in tilts]
    n = int(np.argmin(moments))
    theta, goal = float(tilts[n]), math.log(cut * bins)
    last, t_last = max(top, 2 * std), 0.0
    for _ in range(2):
        last, t_last = min(((k - goal + math.log(last)) / t, t) for k, t in zip(moments, tilts, strict=True))
        last = max(last, 2 * std)
    lower = np.geomspace(0.1, 10.0, 8) / (std * math.sqrt(rounds))
    start = max((moments[n] - log_moment(theta - float(u)) - 12.0) / u for u in lower)
    start = min(start, -std)
    h = max(share * std, (last - start) / cells, (top - low) / cells)
    return _replaced_on_grid(alpha, bins, rounds, mu, (low, top), (start, last), h, theta, float(t_last))


def _replaced_on_grid(
    alpha: float, bins: int, rounds: int, mu: float, term: tuple[float, float], window: tuple[float, float], h: float,
    theta: float, t_last: float,
) -> float:  # fmt: skip
    """The divergence, from tilted masses on a circle of cells that holds the sums in `window`."""
    low, high = math.floor(term[0] / h), math.ceil(term[1] / h)
    values = h * np.arange(low, high + 1)
    z = (math.log(alpha) / 2 + np.arcsinh(values * (math.exp(mu * mu / 2) / (2 * math.sqrt(alpha))))) / mu
    z[0] = -np.inf  # what lies below is raised
    (m, m_slack), (p, p_slack), (q, q_slack) = (_cells(z - shift) for shift in (0.0, mu, -mu))
    left = values[:-1]
    slack = p_slack + alpha * q_slack + np.abs(left) * m_slack + 16 * _UNIT * (p + alpha * q)
    up = np.clip((p - alpha * q - left * m + slack) / h, 0.0, m + m_slack)
    mass = np.zeros(len(values))
    mass[:-1] += m + m_slack - up
    mass[1:] += up
    mass[-1] += float(scipy.special.ndtr(-z[-1]))
    beyond = float(scipy.special.ndtr(mu - z[-1]))  # at least E[(D - top)_+]
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    k = _log_sum(log_mass + theta * values)
    constant = (bins - rounds) * (1 - alpha)
    start = math.floor((window[0] - constant) / h)
    size = scipy.fft.next_fast_len(math.ceil((window[1] - window[0]) / h) + 2, real=True)
    power, errors = _power(np.exp(log_mass + theta * values - k), rounds, size)
    c = 3 * _UNIT * math.log2(size)
    lost = 2 * float((errors + c * np.abs(power)).sum()) / size
    sums = np.maximum(scipy.fft.irfft(power, size), 0.0) + lost
    place = start + (rounds * low + np.arange(size) - start) % size
    above = h * place + constant
    positive = above > 0
    above = above[positive]
    weights = np.exp(np.minimum(rounds * k + theta * (constant - above), 600.0)) * above
    # Sums beyond the window: E[S; S > last] is at most last exp(K(t) - t last) for t >= 1 / last.
    last = h * (start + size) + constant
    t_last = max(t_last, 1 / last)
    wrapped = last * math.exp(min(rounds * _log_sum(log_mass + t_last * values) + t_last * (constant - last), 600.0))
    total = float(sums[positive] @ weights) * (1 + 1e-9 + 1e-12 * rounds) + wrapped
    return min(1.0, float(total + rounds * beyond) / bins)


def _term(z: Array, alpha: float, mu: float) -> Array:
    """W - alpha W' at z."""
    return np.asarray(np.exp(mu * z - mu * mu / 2) - alpha * np.exp(-mu * z - mu * mu / 2))


def _log_sum(exponents: Array) -> float:
    """The logarithm of the sum of exponentials."""
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))
