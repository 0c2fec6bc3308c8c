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


@pytest.mark.parametrize("point", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
def test_low_order_keys_are_refused(point):
    key = point.to_bytes(32, "little")
    assert d.low_order(key)
    with pytest.raises(SordinoError, match="low order"):
        d.agree(KEY, key)
    assert not d.low_order(d.public(KEY))
