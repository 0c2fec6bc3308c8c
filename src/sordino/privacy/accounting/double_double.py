"""Double-double arithmetic: a number is the unevaluated sum of two float64, about 104 bits, equal on all machines.

It uses only float64 additions, multiplications and square roots, which IEEE 754 rounds correctly. Each is a separate
NumPy call, so no compiler joins a multiplication and an addition into one FMA. The width of `long double` and libm do
not matter. Error-free transformations: Dekker (1971), Knuth's TwoSum.

With u = 2^-53, the error of a sum is at most 4 u² (|a| + |b|), that of a product 8 u² |a| |b|, and so that of a complex
product 17 u². The roots of unity come from at most 24 complex products of square roots, so their error is below 2^9 u².
UNIT covers all of this: relative to the sum of absolute values of its inputs, no operation here has an error above
UNIT = 2^-96.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
UNIT = 2.0**-96
_SPLITTER = 2.0**27 + 1


class Real(NamedTuple):
    """high + low, with |low| at most half a unit in the last place of high."""

    high: Array
    low: Array

    def plus(self, other: Real) -> Real:
        total, error = _two_sum(self.high, other.high)
        return _normal(total, error + (self.low + other.low))

    def minus(self, other: Real) -> Real:
        return self.plus(Real(-other.high, -other.low))

    def times(self, other: Real) -> Real:
        product, error = _two_product(self.high, other.high)
        return _normal(product, error + (self.high * other.low + self.low * other.high))

    def scaled(self, power_of_two: float) -> Real:
        """The product with a power of two, which is exact."""
        return Real(self.high * power_of_two, self.low * power_of_two)

    def root(self) -> Real:
        """The square root of positive numbers: one Newton step from the float64 root."""
        first = np.sqrt(self.high)
        rest = self.minus(Real(*_two_product(first, first)))
        return _normal(first, (rest.high + rest.low) / (2 * first))


class Complex(NamedTuple):
    """Complex numbers in double-double arithmetic."""

    real: Real
    imag: Real

    def at(self, where: Any) -> Complex:
        """The entries that NumPy's indexing selects."""
        return Complex(*(Real(part.high[where], part.low[where]) for part in self))

    def plus(self, other: Complex) -> Complex:
        return Complex(self.real.plus(other.real), self.imag.plus(other.imag))

    def minus(self, other: Complex) -> Complex:
        return Complex(self.real.minus(other.real), self.imag.minus(other.imag))

    def times(self, other: Complex) -> Complex:
        return Complex(
            self.real.times(other.real).minus(self.imag.times(other.imag)),
            self.real.times(other.imag).plus(self.imag.times(other.real)),
        )

    def conjugate(self) -> Complex:
        return Complex(self.real, Real(-self.imag.high, -self.imag.low))

    def negative(self) -> Complex:
        return self.scaled(-1.0)

    def turned(self) -> Complex:
        """The product with -i."""
        return Complex(self.imag, Real(-self.real.high, -self.real.low))

    def scaled(self, power_of_two: float) -> Complex:
        return Complex(self.real.scaled(power_of_two), self.imag.scaled(power_of_two))

    def squared(self) -> Complex:
        return Complex(
            self.real.plus(self.imag).times(self.real.minus(self.imag)), self.real.times(self.imag).scaled(2.0)
        )

    def power(self, exponent: int) -> Complex:
        """The power by repeated squaring: at most 2 exponent products contribute to the result."""
        result, base = one(len(self.real.high)), self
        while exponent:
            if exponent & 1:
                result = result.times(base)
            exponent >>= 1
            base = base.squared() if exponent else base
        return result

    def size(self) -> Array:
        """The absolute value, in float64."""
        return np.asarray(np.hypot(self.real.high, self.imag.high))


def one(length: int) -> Complex:
    """An array of ones."""
    zeros = np.zeros(length)
    return Complex(Real(np.ones(length), zeros), Real(zeros, zeros))


def spread(numbers: Complex, places: NDArray[np.bool_]) -> Complex:
    """The numbers at these places, and zero elsewhere."""

    def placed(part: Array) -> Array:
        whole = np.zeros(len(places))
        whole[places] = part
        return whole

    return Complex(*(Real(*(placed(part) for part in number)) for number in numbers))


def rfft(values: Array) -> Complex:
    """The first n/2 + 1 entries of the Fourier transform of n real numbers; n is a power of two, at least 4.

    Even and odd places are transformed together, as real and imaginary parts.
    """
    zeros = np.zeros(len(values) // 2)
    both = _fft(Complex(Real(values[0::2], zeros), Real(values[1::2], zeros))).at(_around(len(zeros)))
    even, odd = _parted(both)
    return even.plus(odd.turned().times(_half_turn(2 * len(zeros)))).scaled(0.5)


def irfft(half: Complex) -> Array:
    """The inverse of `rfft`, in float64."""
    size = 2 * (len(half.real.high) - 1)
    even, odd = _parted(half)
    both = even.plus(odd.times(_half_turn(size).conjugate()).turned().negative()).at(slice(0, -1))
    real, imag = _fft(both.conjugate())
    return np.stack([real.high, -imag.high], axis=1).reshape(-1) / size


def _parted(numbers: Complex) -> tuple[Complex, Complex]:
    """z_k + conj(z_-k) and z_k - conj(z_-k), for numbers whose last entry repeats the first."""
    mirrored = numbers.at(slice(None, None, -1)).conjugate()
    return numbers.plus(mirrored), numbers.minus(mirrored)


def _around(length: int) -> NDArray[np.int64]:
    """All places, followed by the first one again."""
    return np.append(np.arange(length), 0)


def _half_turn(size: int) -> Complex:
    """exp(-2 pi i k / size) for k up to size / 2 inclusive."""
    roots = _roots(size).at(_around(size // 2))
    roots.real.high[-1] = -1.0
    return roots


def _fft(values: Complex) -> Complex:
    """Stockham's transform, radix 2: each stage takes sums of halves, and differences times a root of unity."""
    size = len(values.real.high)
    if size & (size - 1):
        raise ValueError(f"size: {size} must be a power of two.")
    roots, stride = _roots(size), 1
    while stride < size:
        half = size // (2 * stride)
        values = Complex(*(Real(*(part.reshape(2 * half, stride) for part in number)) for number in values))
        first, second = values.at(slice(0, half)), values.at(slice(half, None))
        turned = first.minus(second).times(roots.at((slice(0, None, stride), None)))
        summed = first.plus(second)
        values = Complex(
            *(
                Real(*(np.stack([a, b], axis=1).reshape(-1) for a, b in zip(plus, minus, strict=True)))
                for plus, minus in zip(summed, turned, strict=True)
            )
        )
        stride *= 2
    return values


@lru_cache(maxsize=2)
def _roots(size: int) -> Complex:
    """exp(-2 pi i k / size) for k < size / 2; size is a power of two.

    Angles are halved by cos² (x/2) = (1 + cos x) / 2 and sin² (x/2) = sin² x / (4 cos² (x/2)), without cancellation.
    """
    angles = [Complex(Real(np.array([-1.0]), np.zeros(1)), Real(np.zeros(1), np.zeros(1)))]  # half a turn
    angles.append(Complex(Real(np.zeros(1), np.zeros(1)), Real(np.array([-1.0]), np.zeros(1))))  # a quarter
    while 2 ** len(angles) < size:
        cosine, sine = angles[-1]
        half = cosine.plus(Real(np.ones(1), np.zeros(1))).scaled(0.5).root()
        angles.append(Complex(half, _quotient(sine, half.scaled(2.0))))
    table = one(1)
    for angle in reversed(
        angles[1:][: max(size.bit_length() - 2, 0)]
    ):  # the finest angle first: each doubles the table
        turned = table.times(angle)
        table = Complex(
            *(
                Real(*(np.concatenate(pair) for pair in zip(a, b, strict=True)))
                for a, b in zip(table, turned, strict=True)
            )
        )
    return table


def _quotient(a: Real, b: Real) -> Real:
    first = a.high / b.high
    rest = a.minus(b.times(Real(first, np.zeros_like(first))))
    return _normal(first, (rest.high + rest.low) / b.high)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _normal(a: Array, b: Array) -> Real:
    """The normalized sum, if |a| >= |b| or a is 0."""
    total = a + b
    return Real(total, b - (total - a))


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Array) -> tuple[Array, Array]:
    """Two halves of 26 bits each, so that their products are exact."""
    scaled = _SPLITTER * a
    high = scaled - (scaled - a)
    return high, a - high
