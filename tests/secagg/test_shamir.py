"""Any t shares give the secret; t - 1 fit every secret alike."""

import itertools
import random

import pytest

from sordino.secagg.shamir import PRIME, SIZE, deal, join

SECRET, KEY = bytes(range(32)), bytes(32)


def test_the_field_holds_every_secret():
    d, r = PRIME - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    rng = random.Random(0)
    for _ in range(40):  # Miller and Rabin: a composite passes with probability at most 4^-40
        x = pow(rng.randrange(2, PRIME - 1), d, PRIME)
        assert x in (1, PRIME - 1) or any((x := x * x % PRIME) == PRIME - 1 for _ in range(r - 1))
    assert PRIME > 2**256
    assert PRIME <= 2 ** (8 * SIZE)


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, SECRET], ids=["zero", "ones", "some"])
def test_any_t_shares_give_the_secret(secret):
    for n in range(2, 7):
        for t in range(2, n + 1):
            shares = list(zip(range(1, n + 1), deal(secret, t, range(1, n + 1), KEY), strict=True))
            for chosen in itertools.combinations(shares, t):
                assert join(chosen).to_bytes(32, "little") == secret
            assert join(shares) == join(shares[:t])  # more do no harm


def test_fewer_shares_fit_every_secret():
    """Lagrange: with any other secret at 0, t - 1 shares still lie on one polynomial of degree t - 1 — whose remaining
    values then are other ones. So they say nothing of which secret it is."""
    n, t, rng = 6, 4, random.Random(1)
    values = deal(SECRET, t, range(1, n + 1), KEY)
    for some in itertools.combinations(range(1, n + 1), t - 1):
        shares = [(x, values[x - 1]) for x in some]
        assert join(shares) != int.from_bytes(SECRET, "little")
        other = rng.randrange(2**256)
        x = next(x for x in range(1, n + 1) if x not in some)
        # the value at x of the polynomial through (0, other) and the shares, by moving the origin to x
        moved = [((at - x) % PRIME, y) for at, y in [(0, other), *shares]]
        share = join(moved)
        assert share != values[x - 1]
        assert join([*shares, (x, share)]) == other


def test_shares_spread_over_the_field():
    """Single shares of one fixed secret under many keys: a uniform mean and second moment, to 4.5 standard errors."""
    u = [deal(SECRET, 3, [1], key.to_bytes(32, "little"))[0] / PRIME for key in range(4000)]
    assert abs(sum(u) / len(u) - 1 / 2) < 4.5 * (1 / 12 / len(u)) ** 0.5
    assert abs(sum(v * v for v in u) / len(u) - 1 / 3) < 4.5 * (4 / 45 / len(u)) ** 0.5


def test_the_same_key_deals_the_same():
    assert deal(SECRET, 3, range(1, 6), KEY) == deal(SECRET, 3, range(1, 6), KEY)
    assert deal(SECRET, 3, range(1, 6), KEY) != deal(SECRET, 3, range(1, 6), b"\1" + bytes(31))
