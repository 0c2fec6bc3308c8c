"""Shamir's secret sharing of 32 bytes: any t shares give the secret, and fewer reveal nothing about it.

The secret is the value at 0 of a polynomial of degree t - 1; the shares are its values elsewhere. With t - 1 shares,
every secret fits exactly one polynomial, and all of these are equally likely.
"""

from __future__ import annotations

from collections.abc import Sequence

from sordino.secagg.derive import stream

PRIME = 2**256 + 297  # the smallest prime above 2^256, so that any 32 bytes are an element of the field
SIZE = 33  # bytes of a share
_WIDE = 48  # bytes drawn for a coefficient: modulo PRIME they are uniform to 2^-127


def deal(secret: bytes, threshold: int, points: Sequence[int], key: bytes) -> list[int]:
    """The values of the polynomial at `points`, none of which is 0. Its coefficients are the keystream of `key`."""
    drawn = stream(key, _WIDE * (threshold - 1))
    rest = [int.from_bytes(drawn[i : i + _WIDE], "little") % PRIME for i in range(0, len(drawn), _WIDE)]
    return [_value([int.from_bytes(secret, "little"), *rest], point) for point in points]


def join(shares: Sequence[tuple[int, int]]) -> int:
    """The value at 0 of the polynomial through these (point, value): Lagrange's formula."""
    total = 0
    for x, y in shares:
        above, below = 1, 1
        for other, _ in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    return total % PRIME


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
