"""Integer noise under secure aggregation, accounted for as Gaussian noise, or in streams as concentrated DP.

Client i holds a real vector u (its clipped sum times a public scale) and sends, modulo 2^32,

    floor(u + ξ) + x,      ξ uniform in [0, 1)^d,      x a vector of d independent discrete Gaussians N_Z(0, σ²).

The server learns the sum over clients. P[x = k] is proportional to exp(-k²/2σ²) for integers k. No real number is
rounded to get the noise.

`rounded` bounds how far a neighbour moves the integers. `accounting/concentrated.py` has the account of the noise
(Canonne, Kamath, Steinke 2020; Kairouz, Liu, Steinke 2021). The reduction modulo 2^32, noise beyond the counted `terms`
and the server's further steps are post-processing, and cost nothing.

**What may fail.** The bound of `rounded` fails with probability at most 2^-80 over the dither, which is drawn
independently of the data. Fix a pair of neighbours and a past, and call dithers at which the bound fails bad. Consider
a modified run that stops at a bad dither and reveals only this. It is private as accounted, and it equals the
real run if it does not stop. So P[real run in S] <= P[a dither is bad] + P[modified run in S] <= k 2^-80 + e^ε P'[real
run in S] + δ after k releases. The failure probability enters once, without a factor of e^ε.

A sampler whose law has a total variation error η would add (1 + e^ε) η, because both neighbours have the error. No η is
small enough for every ε. `draw` is therefore exact; it only assumes that its words are random. `FAILURE` allows the
dither 2^16 times what it needs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.privacy.accounting.concentrated import ROUND_UP, check
from sordino.privacy.mechanisms.random import Address, Floats, Noiseless, Source, Words

IntegerArray: TypeAlias = NDArray[np.int64]

MODULUS = 2**32

_DITHER = 80 * math.log(2)  # log(1 / probability that `rounded` fails)


# ------------------------------------------------------------------------------------------------------- sensitivity


def rounded(sensitivity: float, dimension: int) -> float:
    """A bound on the L2 distance of floor(u + ξ) and floor(u' + ξ) for all |u - u'| <= sensitivity.

    The bound holds for all ξ except a share of 2^-80. Both neighbours may use the same ξ, and ξ may be public, because
    it is drawn independently of the data. Given ξ, only the noise protects the release.

    Let v = u - u', f = floor(v_j) and p = v_j - f. The difference in coordinate j is f + B, where B = 1 with
    probability p, because it is floor(w + v_j) with w, the fractional part of u'_j + ξ_j, uniform. Its square f² + (2f
    + 1) B has mean v_j² + p(1 - p) and lies in an interval of length |2f + 1|. Coordinates are independent, so by
    Hoeffding

        |difference|² <= |v|² + Σ p(1 - p) + sqrt(2 log 2^80) (Σ (f + 1/2)²)^(1/2),

    where p(1 - p) <= min(1/4, |v_j|) and |f + 1/2| <= |v_j| + 1/2 (Kairouz, Liu, Steinke 2021, Proposition 22, which
    has no |v_j|). The distance never exceeds |v| + sqrt(d), because each coordinate differs from v_j by less than 1.

    Sources give ξ as float64 at the midpoints of a grid of 2^-52. `encode` is then exact for a u that is moved to that
    grid, by less than 2^-52, and the lemma holds exactly for v moved by 2^-51 in each coordinate.

    Args:
      sensitivity: bound on |u - u'|, in steps.
      dimension: number of coordinates.

    Returns:
      The bound on the distance, in steps.

    Raises:
      SordinoError: an argument is out of its range.
    """
    check(sensitivity=sensitivity, dimension=dimension)
    return _rounded(sensitivity + 2.0**-51 * math.sqrt(dimension), dimension, _DITHER) if sensitivity else 0.0


def _rounded(s: float, dimension: int, nats: float) -> float:
    root = math.sqrt(dimension)
    if math.isinf(s * s):
        return math.inf
    likely = s * s + min(root / 4, s) * root + math.sqrt(2 * nats) * (s + root / 2)
    return min(math.sqrt(likely), s + root) * ROUND_UP


# ---------------------------------------------------------------------------------------------------------- integers


def wraps(largest: float, variance: float, terms: int, dimension: int) -> float:
    """An upper bound on the probability that a coordinate of the sum leaves [-2^31, 2^31) and wraps around.

    A discrete Gaussian is sub-Gaussian (Canonne, Kamath, Steinke 2020): with c = tσ², E e^tx is e^(t²σ²/2) times the
    ratio of Σ exp(-(k - c)²/2σ²) and Σ exp(-k²/2σ²). Such a sum is largest for integer c, because its Fourier series
    has no negative coefficient. So a sum of discrete Gaussians is sub-Gaussian too. Chernoff's bound for both sides and
    all coordinates gives the result. A wrap reduces accuracy but not privacy.

    Args:
      largest: bound on |integer| of the sum before noise; the dither moves each client's by less than 1.
      variance: of one discrete Gaussian, in steps.
      terms: number of discrete Gaussians in the sum; all of them, not only those of honest clients.
      dimension: number of coordinates.

    Returns:
      The bound.
    """
    check(largest=largest, variance=variance, terms=terms, dimension=dimension)
    room = MODULUS / 2 - largest
    if room <= 0:
        return 1.0
    nats = math.log(2 * dimension) - room * room / (2 * terms * variance)
    return min(1.0, math.nextafter(math.exp(nats) * ROUND_UP, math.inf)) if nats < 0 else 1.0


def encode(values: Floats, scale: float, dither: Floats) -> IntegerArray:
    """floor(values * scale + dither) without rounding the sum: the fractional part is compared with the dither.

    Multiplication by a power of two is exact. For other scales a product has a relative error of 2^-53, which belongs
    to the sensitivity of the values, like the rounding of their sum.

    Args:
      values: real numbers.
      scale: integer steps per unit.
      dither: one number in [0, 1) per value.

    Returns:
      Integers.

    Raises:
      SordinoError: values are not finite or too large, or the scale or dither is out of its range.
    """
    if not (0 < scale < math.inf):
        raise SordinoError(f"scale: {scale} must be positive and finite.")
    if not bool(np.isfinite(values).all()):
        raise SordinoError("values: not all are finite; clip them, or lower the learning rate.")
    if values.shape != dither.shape or not bool(((dither >= 0) & (dither < 1)).all()):
        raise SordinoError("dither: there must be one number in [0, 1) per value.")
    x = values * scale
    if not bool((np.abs(x) < MODULUS / 2).all()):
        raise SordinoError(f"scale: {scale} makes values exceed 2**31, where they wrap around; choose a smaller scale.")
    whole = np.floor(x)
    return np.asarray(whole.astype(np.int64) + (dither >= 1.0 - (x - whole)), dtype=np.int64)


def modular(values: IntegerArray) -> NDArray[np.uint32]:
    """The integers modulo 2^32."""
    return (values & (MODULUS - 1)).astype(np.uint32)


def decode(total: NDArray[np.uint32], scale: float) -> Floats:
    """The real values of sums modulo 2^32, read as integers in [-2^31, 2^31)."""
    if total.dtype != np.uint32:
        raise SordinoError(f"total: its dtype is {total.dtype}, but sums modulo 2**32 are uint32; use `modular`.")
    return np.asarray(total.view(np.int32) / scale, dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------ noise

_CHUNK = 1 << 13  # proposals per batch, so that their buffers stay in cache
_CELL_BITS = 63  # of the first word choose the cell; the last bit is the sign
_MARGIN = 2.0**-36  # an acceptance closer than this is decided in integers


class ProposalTable(NamedTuple):
    """The table for proposals |k| = cell · 2^shift + rest."""

    variance: float
    shift: int
    edges: Words  # cumulative probabilities of the cells, in units of 2^-63


def draw(source: Source, at: Address, variance: float, shape: tuple[int, ...]) -> IntegerArray:
    """Draw independent discrete Gaussians with exactly P[k] ~ exp(-k²/2 variance), if the source's words are uniform.

    With t = 2^shift, a proposal is |k| = a t + rest. The first 63 bits of the first word choose the cell a with
    probability ~ exp(-(at)²/2v), by inversion. The last bit is the sign. The first bits of the second word choose the
    rest below t. The other bits of the second word accept the proposal with probability
    exp(-((at + rest)² - (at)²)/2v). -0 is never accepted. Accepted proposals have the right law. t is 1 up to σ = 64;
    above, σ is 32 t to 64 t. Then at most 2 % is rejected, and the table has about 600 cells.

    Words are the leading bits of infinitely long uniforms. Nearly always they decide. Two cases stay open: a word on
    the edge of a cell (chance 2^-53), and an acceptance that float64 cannot decide (chance 2^-35; exp is trusted to
    2^-40, a thousand times its error). Then the next words of the stream serve as further bits. They are compared with
    edges and exponentials in integers of as many bits as needed, with bounded errors. So no probability is rounded.

    The stream is read in order, so a longer draw starts with the shorter one. The time depends on what is drawn;
    nothing is claimed against an adversary who can measure it.

    Args:
      source: the source of random words.
      at: the address of the draw.
      variance: σ², in steps.
      shape: of the result.

    Returns:
      Integers.

    Raises:
      SordinoError: the variance is out of its range.
    """
    check(variance=variance)
    size = math.prod(shape)
    if isinstance(source, Noiseless):
        at.pack()
        return np.zeros(shape, dtype=np.int64)
    law = _law(variance)
    width = 2 if law.shift else 1
    rejected = 0.02 if law.shift else float(law.edges[0]) * 2.0**-64
    words = source.words(at, width * (int(size / (1 - rejected) * 1.005) + 64))
    out = np.empty(size, dtype=np.int64)
    filled = position = 0
    while filled < size:
        ahead = min(_CHUNK, int((size - filled) * 1.03) + 64)
        words = _reach(source, at, words, position + width * ahead)
        proposals = words[position : position + width * ahead].reshape(ahead, width)
        values, accepted, undecided = _propose(law, proposals)
        decided = int(undecided.argmax()) if undecided.any() else ahead
        drawn = values[:decided][accepted[:decided]][: size - filled]
        out[filled : filled + drawn.size] = drawn
        filled += drawn.size
        position += width * decided
        if decided < ahead and filled < size:

            def next_word() -> int:
                nonlocal words, position
                words = _reach(source, at, words, position + 1)
                position += 1
                return int(words[position - 1])

            value = _decide(law, next_word)
            if value is not None:
                out[filled] = value
                filled += 1
    return out.reshape(shape)


def _reach(source: Source, at: Address, words: Words, end: int) -> Words:
    """At least `end` words of the stream."""
    return words if end <= words.size else source.words(at, max(end, words.size + words.size // 8))


def _propose(law: ProposalTable, words: Words) -> tuple[IntegerArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """Values, whether they are accepted, and which proposals these words do not decide."""
    first = words[:, 0]
    bits = first >> np.uint64(1)
    cell = np.searchsorted(law.edges, bits)
    undecided = law.edges[cell] == bits
    value = cell.astype(np.int64, copy=False)
    negative = (first & np.uint64(1)).astype(bool)
    if law.shift == 0:
        accepted = ~(negative & (value == 0))
    else:
        second = words[:, 1]
        start = value << law.shift
        rest = (second >> np.uint64(64 - law.shift)).astype(np.int64)
        value = start + rest
        uniform = (second << np.uint64(law.shift)).astype(np.float64)
        uniform *= 2.0**-64
        exponent = (start + value).astype(np.float64)
        exponent *= rest
        exponent *= -0.5 / law.variance
        margin = np.exp(exponent, out=exponent) - uniform
        accepted = (margin > 0) & ~(negative & (value == 0))
        undecided |= np.abs(margin) < _MARGIN
    np.negative(value, out=value, where=negative)
    return value, accepted, undecided


def _decide(law: ProposalTable, next_word: Callable[[], int]) -> int | None:
    """Decide one proposal in integers, word by word; None if it is rejected."""
    word = next_word()
    second = next_word() if law.shift else 0
    bits, u, negative = _CELL_BITS, word >> 1, bool(word & 1)
    edges: Any = _edges(law.variance, law.shift, bits)
    while edges[cell := bisect_left(edges, u)] == u:
        bits, u = bits + 64, u << 64 | next_word()
        edges = _edges(law.variance, law.shift, bits)
    start, bits = cell << law.shift, 64 - law.shift
    rest, u = second >> bits, second & ((1 << bits) - 1)
    if rest:
        numerator, denominator = (2.0 * law.variance).as_integer_ratio()
        above = (2 * start + rest) * rest * denominator
        while (low := _exp(above, numerator, bits)) - 1 < u < low + 2:  # u/2^bits < e^-x if u + 1 <= low
            bits, u = bits + 64, u << 64 | next_word()
        if u >= low + 2:
            return None
    value = start + rest
    return None if negative and value == 0 else -value if negative else value


@lru_cache(maxsize=64)
def _law(variance: float) -> ProposalTable:
    shift = max(0, (math.frexp(variance)[1] - 1) // 2 - 5)  # 4^shift <= variance / 1024
    return ProposalTable(variance, shift, np.array(_edges(variance, shift, _CELL_BITS), dtype=np.uint64))


@lru_cache(maxsize=64)
def _edges(variance: float, shift: int, bits: int) -> tuple[int, ...]:
    """floor(2^bits P[cell <= a]) for a = 0, 1, ... up to the first value 2^bits - 1.

    The weights are q^(a²) with q = exp(-4^shift/2v). There are more cells beyond the last one: a word of ones only is
    undecided, like every word on an edge.

    Fixed-point numbers lie below their true values, by at most the errors that are carried along. The error of a
    product of numbers up to 1 is at most the sum of both errors plus 1. If an error could change an edge, the guard
    bits are doubled.
    """
    numerator, denominator = (2.0 * variance).as_integer_ratio()
    guard = 64
    while True:
        places = bits + guard
        one = 1 << places
        q = _exp(denominator << 2 * shift, numerator, places)
        square, step, weight = q * q >> places, q, one  # q², q^(2a+1), q^(a²)
        step_error, weight_error = 2, 0
        total = total_error = 0
        sums = []
        while weight:
            total, total_error = total + weight, total_error + weight_error
            sums.append((total, total_error))
            weight, weight_error = weight * step >> places, weight_error + step_error + 1
            step, step_error = step * square >> places, step_error + 5 + 1
        # The remaining weights sum to less than a geometric series with the same first two terms.
        total_error += (weight_error << places) // (one - step - step_error) + 1
        last = (1 << bits) - 1
        low = [(s << bits) // (total + total_error) for s, _ in sums]
        high = [min(last, (s + e << bits) // total) for s, e in sums]
        end = next((a for a, edge in enumerate(low) if edge == last), None)
        if end is not None and low[: end + 1] == high[: end + 1]:
            return tuple(low[: end + 1])
        guard *= 2


def _exp(numerator: int, denominator: int, places: int) -> int:
    """An integer n with n <= 2^places exp(-numerator/denominator) <= n + 2.

    exp(-x) = exp(-x/2^halvings)^(2^halvings), and x/2^halvings < 1/2 enters Taylor's alternating series. The error of a
    term is at most 3 units (by induction: half the previous error, plus rounding). There are fewer than `work` terms,
    and a squaring doubles the error and adds 1. The total error is less than 4 work 2^halvings + 2^halvings, which the
    extra places absorb.
    """
    if numerator == 0:
        return (1 << places) - 1  # <= 2^places
    halvings = max(0, numerator.bit_length() - denominator.bit_length() + 2)
    if halvings > places.bit_length() + 2:
        return 0  # x > 2^(halvings - 3) >= places > log(2^places)
    extra = 8 + places.bit_length() + 2 * halvings + 8
    work = places + extra
    x = (numerator << work) // (denominator << halvings)
    term = total = 1 << work
    n = 0
    while term:
        n += 1
        term = (term * x >> work) // n
        total += -term if n % 2 else term
    for _ in range(halvings):
        total = total * total >> work
    return max(0, total - (1 << extra - 1) >> extra)
