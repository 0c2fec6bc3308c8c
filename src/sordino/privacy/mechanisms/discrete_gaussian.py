"""Integer noise under secure aggregation, paid for as concentrated DP.

Client i holds a real vector u (its clipped sum times a public scale) and sends, modulo 2^32,

    floor(u + ξ) + x,      ξ uniform in [0, 1)^d,      x of d independent discrete Gaussians N_Z(0, σ²),

of which the server learns the sum over clients. P[x = k] is proportional to exp(-k²/2σ²), for integers k. Nothing here
is a rounded real number.

`rounded` bounds what a neighbour moves in the integers; `accounting/concentrated.py` has the account of the noise
(Canonne, Kamath, Steinke 2020; Kairouz, Liu, Steinke 2021). The sum modulo 2^32, noise beyond the `terms` that
are counted, and what the server does next come after the release, and cost nothing.

**What may fail.** The bound of `rounded` fails with probability 2^-80 at most, over a dither that is drawn without a
look at the data. For one pair of neighbours and one past, call such dithers bad, and think of a run that stops, and
says only that, at a bad one: it is concentrated DP as accounted, its answers are those of the real run where it does
not stop, and so P[real run in S] <= P[a dither is bad] + P[thought run in S] <= k 2^-80 + e^ε P'[real run in S] + δ
after k releases. The failure enters once, and without a factor of e^ε.

A sampler within η of its law in total variation would enter as (1 + e^ε) η, for both neighbours have it: no η would do
for every ε. `draw` is therefore exact, and adds nothing but the assumption that its words are random. `FAILURE` leaves
the dither 2^16 times what it needs.
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
    """L2 distance of floor(u + ξ) and floor(u' + ξ) for any |u - u'| <= sensitivity, but for 2^-80 of all ξ.

    One ξ may be used for both, and may be told to everyone: it is drawn without a look at the data, and given ξ, the
    release is the noise's affair alone.

    With v = u - u', f = floor(v_j) and p = v_j - f, the difference in coordinate j is f + B, B = 1 with probability p:
    for floor(w + v_j) is that where w, the fraction of u'_j + ξ_j, is uniform. Its square f² + (2f + 1) B has mean
    v_j² + p(1 - p), and lies in an interval of length |2f + 1|; coordinates are independent, and Hoeffding says

        |difference|² <= |v|² + Σ p(1 - p) + sqrt(2 log 2^80) (Σ (f + 1/2)²)^(1/2),

    where p(1 - p) <= min(1/4, |v_j|) and |f + 1/2| <= |v_j| + 1/2 (Kairouz, Liu, Steinke 2021, Proposition 22, but for
    the |v_j|). Never is it more than |v| + sqrt(d), a coordinate moving by less than 1 from v_j.

    A ξ of float64, as sources give, sits at the middles of a grid of 2^-52: `encode` is then exact for a u snapped to
    that grid, less than 2^-52 away, and the lemma holds to the letter for v moved by 2^-51 in each coordinate.
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
    """Probability, at most, that a coordinate leaves [-2^31, 2^31): of a sum whose integers are within ±largest before
    noise (dither moves a client's by less than 1), under `terms` discrete Gaussians: of all, not of the honest alone.

    A discrete Gaussian is sub-Gaussian (Canonne, Kamath, Steinke 2020): E e^tx is e^(t²σ²/2) times Σ exp(-(k - c)²/2σ²)
    over Σ exp(-k²/2σ²) for c = tσ², and such a sum is largest for whole c, its Fourier series having no negative
    coefficient. So is a sum of them; then Chernoff, both sides, and every coordinate. A wrap harms accuracy alone.
    """
    check(largest=largest, variance=variance, terms=terms, dimension=dimension)
    room = MODULUS / 2 - largest
    if room <= 0:
        return 1.0
    nats = math.log(2 * dimension) - room * room / (2 * terms * variance)
    return min(1.0, math.nextafter(math.exp(nats) * ROUND_UP, math.inf)) if nats < 0 else 1.0


def encode(values: Floats, scale: float, dither: Floats) -> IntegerArray:
    """floor(values * scale + dither), the sum never rounded: the fraction is compared with the dither.

    A scale that is a power of two multiplies without error. With any other, products are off by 2^-53 of themselves,
    which belongs to the sensitivity of the values, as the rounding of their sum does.
    """
    if not (0 < scale < math.inf):
        raise SordinoError(f"scale: {scale} must be positive and finite.")
    if not bool(np.isfinite(values).all()):
        raise SordinoError("values: not all are finite; clip them, or lower the learning rate.")
    if values.shape != dither.shape or not bool(((dither >= 0) & (dither < 1)).all()):
        raise SordinoError("dither: one number in [0, 1) for each value is needed.")
    x = values * scale
    if not bool((np.abs(x) < MODULUS / 2).all()):
        raise SordinoError(f"scale: {scale} takes values beyond 2**31, where they wrap; choose a smaller one.")
    whole = np.floor(x)
    return np.asarray(whole.astype(np.int64) + (dither >= 1.0 - (x - whole)), dtype=np.int64)


def modular(values: IntegerArray) -> NDArray[np.uint32]:
    """Modulo 2^32."""
    return (values & (MODULUS - 1)).astype(np.uint32)


def decode(total: NDArray[np.uint32], scale: float) -> Floats:
    """The number in [-2^31, 2^31) that is meant, on the scale of the values."""
    if total.dtype != np.uint32:
        raise SordinoError(f"total: {total.dtype} given; sums modulo 2**32 are uint32 (`modular` makes them).")
    return np.asarray(total.view(np.int32) / scale, dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------ noise

_CHUNK = 1 << 13  # proposals at a time: their buffers stay in cache
_CELL_BITS = 63  # of the first word, for the cell; the last one is the sign
_MARGIN = 2.0**-36  # acceptance nearer than this is decided in integers


class ProposalTable(NamedTuple):
    """|k| = cell · 2^shift + rest."""

    variance: float
    shift: int
    edges: Words  # of the cells, in 2^-63


def draw(source: Source, at: Address, variance: float, shape: tuple[int, ...]) -> IntegerArray:
    """Independent discrete Gaussians, P[k] ~ exp(-k²/2 variance), exactly, if the source's words are uniform.

    |k| is proposed as cell · t + rest for t = 2^shift: a cell a with probability ~ exp(-(at)²/2v), from the first
    word's 63 bits by inversion; a sign, its last bit; a rest below t, from the second word's first bits. It is accepted
    with probability exp(-((at + rest)² - (at)²)/2v), by the second word's other bits, and -0 never: what remains has
    the law. t is 1 up to σ = 64, and 32 to 64 of it are a σ above: at most 2 % is rejected there, and a table has some
    600 cells.

    Words are the leading bits of uniforms that go on. Nearly always they decide; where they do not (a word on the edge
    of a cell, 2^-53 of all; an acceptance that float64 leaves open, 2^-35, its exp trusted to 2^-40, a thousand times
    its error), the words that follow in the stream are read as further bits, and compared with edges and exponentials
    in integers of as many bits as it takes, their errors bounded: no probability is rounded anywhere.

    The stream is read in order, so a longer draw begins with the shorter. How long it takes depends on what is drawn;
    against someone who can time it nothing is claimed.
    """
    check(variance=variance)
    size = math.prod(shape)
    if isinstance(source, Noiseless):
        at.pack()
        return np.zeros(shape, dtype=np.int64)
    law = _law(variance)
    width = 2 if law.shift else 1
    missed = 0.02 if law.shift else float(law.edges[0]) * 2.0**-64
    words = source.words(at, width * (int(size / (1 - missed) * 1.005) + 64))
    out = np.empty(size, dtype=np.int64)
    filled = position = 0
    while filled < size:
        ahead = min(_CHUNK, int((size - filled) * 1.03) + 64)
        words = _reach(source, at, words, position + width * ahead)
        proposals = words[position : position + width * ahead].reshape(ahead, width)
        values, accepted, open_ = _propose(law, proposals)
        decided = int(open_.argmax()) if open_.any() else ahead
        kept = values[:decided][accepted[:decided]][: size - filled]
        out[filled : filled + kept.size] = kept
        filled += kept.size
        position += width * decided
        if decided < ahead and filled < size:

            def more() -> int:
                nonlocal words, position
                words = _reach(source, at, words, position + 1)
                position += 1
                return int(words[position - 1])

            value = _decide(law, more)
            if value is not None:
                out[filled] = value
                filled += 1
    return out.reshape(shape)


def _reach(source: Source, at: Address, words: Words, end: int) -> Words:
    return words if end <= words.size else source.words(at, max(end, words.size + words.size // 8))


def _propose(law: ProposalTable, words: Words) -> tuple[IntegerArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """Values, whether they are accepted, and where that or the value is open."""
    first = words[:, 0]
    bits = first >> np.uint64(1)
    cell = np.searchsorted(law.edges, bits)
    open_ = law.edges[cell] == bits
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
        open_ |= np.abs(margin) < _MARGIN
    np.negative(value, out=value, where=negative)
    return value, accepted, open_


def _decide(law: ProposalTable, more: Callable[[], int]) -> int | None:
    """One proposal, word by word, in integers; None where it is rejected."""
    word = more()
    second = more() if law.shift else 0
    bits, u, negative = _CELL_BITS, word >> 1, bool(word & 1)
    edges: Any = _edges(law.variance, law.shift, bits)
    while edges[cell := bisect_left(edges, u)] == u:
        bits, u = bits + 64, u << 64 | more()
        edges = _edges(law.variance, law.shift, bits)
    start, bits = cell << law.shift, 64 - law.shift
    rest, u = second >> bits, second & ((1 << bits) - 1)
    if rest:
        numerator, denominator = (2.0 * law.variance).as_integer_ratio()
        above = (2 * start + rest) * rest * denominator
        while (low := _exp(above, numerator, bits)) - 1 < u < low + 2:  # u/2^bits < e^-x if u + 1 <= low
            bits, u = bits + 64, u << 64 | more()
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
    """floor(2^bits P[cell <= a]) for a = 0, 1, ... up to the first that is 2^bits - 1, for weights q^(a²),
    q = exp(-4^shift/2v). Beyond that one are cells too: a word of ones alone is open, like any on an edge.

    Fixed-point numbers below their true values, by at most the errors carried along: of a product of numbers up to 1,
    the sum of both errors and 1. If an error could change an edge, there are too few guard bits.
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
        # What is left is below the geometric series of its first two terms.
        total_error += (weight_error << places) // (one - step - step_error) + 1
        last = (1 << bits) - 1
        low = [(s << bits) // (total + total_error) for s, _ in sums]
        high = [min(last, (s + e << bits) // total) for s, e in sums]
        end = next((a for a, edge in enumerate(low) if edge == last), None)
        if end is not None and low[: end + 1] == high[: end + 1]:
            return tuple(low[: end + 1])
        guard *= 2


def _exp(numerator: int, denominator: int, places: int) -> int:
    """n with n <= 2^places exp(-numerator/denominator) <= n + 2.

    exp(-x) is exp(-x/2^halvings)^(2^halvings) for x/2^halvings < 1/2, by Taylor's alternating series. A term is off by
    3 units at most (by induction: half the error before, and roundings), there are fewer than `work`, and a squaring
    doubles the error and adds 1: less than 4 work 2^halvings + 2^halvings in all, which the extra places hold.
    """
    if numerator == 0:
        return (1 << places) - 1  # <= 2^places, as promised
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
