"""Keys and keystream."""

import numpy as np
import pytest

from sordino.errors import SordinoError
from sordino.secagg import derive as d

KEY = bytes(range(32))


def test_joined_is_one_to_one():
    assert d.joined("ab", "c") != d.joined("a", "bc") != d.joined("abc")
    assert d.joined("", "a") != d.joined("a", "")


def test_keys_differ_with_purpose_and_salt():
    assert len({d.derive(KEY, "a"), d.derive(KEY, "b"), d.derive(KEY, "a", 1), d.derive(KEY, "a", salt=b"1")}) == 4


def test_the_stream_is_chacha20():
    """RFC 8439, appendix A.1, first vector: zero key, zero nonce, block 0."""
    assert d.stream(bytes(32), 16).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


@pytest.mark.parametrize("size", [1, 5, 2**14, 2**14 + 3, 50_000])
def test_streams_are_added_and_taken_off(size):
    start = np.arange(size, dtype=np.uint32)
    total = start.copy()
    d.add_stream(total, KEY, 1)
    words = np.frombuffer(d.stream(KEY, 4 * size), "<u4")
    assert np.array_equal(total, (start.astype(np.uint64) + words) % 2**32)
    d.add_stream(total, KEY, -1)
    assert np.array_equal(total, start)


def test_two_keys_agree():
    a, b = KEY, KEY[::-1]
    assert d.agree(a, d.public(b)) == d.agree(b, d.public(a)) != d.agree(a, d.public(a))


EIGHTHS = sorted(d._LOW_ORDER)[2:4]


@pytest.mark.parametrize("point", [0, 1, *EIGHTHS, 2**255 - 20, 2**255 - 19, 2**255 - 18])
@pytest.mark.parametrize("ignored", [0, 2**255])
def test_low_order_keys_are_refused(point, ignored):
    key = (point + ignored).to_bytes(32, "little")
    assert d.low_order(key)
    with pytest.raises(SordinoError, match="low order"):
        d.agree(KEY, key)


def test_no_other_key_is_of_low_order():
    """Doubling takes u to (u² - 1)² / 4u(u² + Au + 1), with A = 486662. Points of order 2 have u = 0. Those of order 4
    are doubled to 0, so u² = 1. Those of order 8 are doubled to 1 or -1, which with w = u + 1/u is w² - 4w = 4 + 4A or
    w² + 4w = 4 - 4A. The second has no root. Of the two roots of the first, one belongs to the keys that are listed,
    and to the other one belongs no u, because u² - wu + 1 has none."""
    p, a, (one, two) = d.FIELD, 486662, EIGHTHS

    def square(number):
        return pow(number, (p - 1) // 2, p) == 1

    w = one + two
    assert one * two % p == 1
    assert (w * w - 4 * w - 4 - 4 * a) % p == 0
    assert not square((4 - w) ** 2 - 4)
    assert not square(8 - 4 * a)
    assert not d.low_order(d.public(KEY))
