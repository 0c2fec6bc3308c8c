"""Streams: what they look like, that none is shared, and that the secure one is ChaCha20."""

import itertools
import math
import sys

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import kstest

from sordino.core import SordinoError
from sordino.privacy import noise
from sordino.privacy.noise import EVERYONE, Address, Secure, Seeded, Silent, source

KEY = bytes(range(32))
HERE = Address(client=3, round=5, query=1)
BOTH = pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7)], ids=["secure", "seeded"])
SIZE = 200_000


# --------------------------------------------------------------------------------------------------------- the law


def looks_normal(z: np.ndarray) -> bool:
    """Four moments within 4.5 standard errors of a standard normal's, and Kolmogorov–Smirnov at p > 1e-4."""
    # Var(z) = 1, Var(z²) = 2, Var(z³) = 15, Var(z⁴) = 96
    powers = [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
    moments = all(abs(np.mean(z**p) - mean) <= 4.5 * math.sqrt(var / z.size) for p, mean, var in powers)
    return bool(moments and kstest(z, ndtr).pvalue > 1e-4)


def looks_uniform(u: np.ndarray) -> bool:
    mean = abs(u.mean() - 0.5) <= 4.5 * math.sqrt(1 / 12 / u.size)
    square = abs((u**2).mean() - 1 / 3) <= 4.5 * math.sqrt(4 / 45 / u.size)
    return bool(mean and square and u.min() > 0 and u.max() < 1 and kstest(u, "uniform").pvalue > 1e-4)


@BOTH
def test_normals_are_normal(stream):
    z = stream.normal(HERE, (SIZE,))
    assert looks_normal(z)
    u = stream.uniform(HERE, (SIZE,))
    for mutant in (1.02 * z, z + 0.02, z**2, np.abs(z), np.sqrt(12) * (u - 0.5), ndtri(0.98 * u), np.clip(z, -2, 2)):
        assert not looks_normal(mutant)


@BOTH
def test_uniforms_are_uniform(stream):
    u = stream.uniform(HERE, (SIZE,))
    assert looks_uniform(u)
    for mutant in (0.98 * u, u**1.02, 2 * u - 0.5, 1 - 0.5 * u):
        assert not looks_uniform(mutant)


def test_every_word_gives_a_finite_normal_of_the_right_law():
    words = np.array([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**62, 3 * 2**62], dtype=np.uint64)
    z = np.empty(words.size)
    noise._to_normal(words.copy(), z)
    assert np.isfinite(z).all()
    assert np.abs(z).max() == pytest.approx(9.0802, abs=1e-4)
    assert z[1] == -z[5], "the law is symmetric to the bit"
    assert z[6] == pytest.approx(-z[7])
    assert z[6] == pytest.approx(-ndtri(0.25))


def test_no_word_gives_a_uniform_of_zero_or_one():
    words = np.array([0, 2**63, 2**64 - 1], dtype=np.uint64)
    u = np.empty(words.size)
    noise._to_uniform(words.copy(), u)
    assert 0 < u[0] == 1 - u[2] < u[1] < u[2] < 1
    top = float(np.uint64(2**64 - 1) >> np.uint64(11))
    assert (top + 0.5) * 2.0**-53 == 1.0, "which is why 53 bits would be one too many"


# ---------------------------------------------------------------------------------------------------------- addresses

GRID = [
    Address(*at) for at in itertools.product([0, 1, 2, 3, 255, 256, 65536, EVERYONE - 1, EVERYONE], *[range(7)] * 3)
]
GRID += [Address(0, r, 0) for r in (256, 65536, 2**32 - 1)] + [Address(0, 0, 256), Address(0, 0, 0, 256)]


def all_distinct(draws: list[float]) -> bool:
    return len(set(draws)) == len(draws)


@BOTH
def test_no_two_addresses_share_a_stream(stream):
    normals = np.array([stream.normal(at, (2,)) for at in GRID])
    uniforms = np.array([stream.uniform(at, (2,)) for at in GRID])
    # Also between kinds: mapped back to uniforms, and folded or mirrored, no first draw is another's.
    back = ndtr(normals)
    draws = np.concatenate([back, 1 - back, uniforms, 1 - uniforms]).round(12)
    assert all_distinct(draws.ravel().tolist())
    forgetful = [stream.normal(at._replace(index=0), (1,)).item() for at in GRID]
    assert not all_distinct(forgetful), "a source that ignored the index must be caught"


@BOTH
def test_neighbouring_streams_are_uncorrelated(stream):
    size = 20_000
    neighbours = [HERE, *(HERE._replace(**{name: getattr(HERE, name) + 1}) for name in Address._fields)]
    rows = [stream.normal(at, (size,)) for at in neighbours] + [ndtri(stream.uniform(at, (size,))) for at in neighbours]

    def uncorrelated(rows: list[np.ndarray]) -> bool:
        off = np.corrcoef(rows) - np.eye(len(rows))
        return bool(np.abs(off).max() <= 4.5 / math.sqrt(size))

    assert uncorrelated(rows)
    assert not uncorrelated([*rows, rows[0] + 20 * rows[1]])


@BOTH
def test_the_same_address_gives_the_same_draw(stream):
    first = stream.normal(HERE, (1000,)), stream.uniform(HERE, (1000,))
    stream.normal(Address(0, 0, 0), (17,))  # nothing is remembered between draws
    assert np.array_equal(first[0], stream.normal(HERE, (1000,)))
    assert np.array_equal(first[1], stream.uniform(HERE, (1000,)))


@BOTH
@pytest.mark.parametrize("size", [1, 7, noise._CHUNK - 1, noise._CHUNK, noise._CHUNK + 1, 2 * noise._CHUNK + 3])
def test_a_longer_draw_begins_with_the_shorter(stream, size):
    for draw in (stream.normal, stream.uniform):
        long = draw(HERE, (3 * noise._CHUNK,))
        assert np.array_equal(draw(HERE, (size,)), long[:size])
        assert all_distinct(long.tolist())


def test_the_size_of_a_chunk_does_not_matter(monkeypatch):
    expected = Secure(KEY).normal(HERE, (1000,))
    for chunk in (1, 3, 64, 999, 1000):
        monkeypatch.setattr(noise, "_CHUNK", chunk)
        assert np.array_equal(Secure(KEY).normal(HERE, (1000,)), expected)


@pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7), Silent(7)], ids=["secure", "seeded", "silent"])
def test_shapes(stream):
    for shape in ((), (0,), (5,), (2, 3), (2, 0, 3), (4, 1, 2)):
        for draw in (stream.normal, stream.uniform):
            out = draw(HERE, shape)
            assert out.shape == shape
            assert out.dtype == np.float64
            assert out.flags.writeable
            assert np.array_equal(out.ravel(), draw(HERE, (out.size,)))


@pytest.mark.parametrize("stream", [Secure(KEY), Seeded(7), Silent(7)], ids=["secure", "seeded", "silent"])
@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, top in zip(Address._fields, (2**32, 2**32, 2**16, 2**16), strict=True) for v in (-1, top, 0.5)],
)
def test_an_address_out_of_range_is_refused(stream, field, value):
    at = HERE._replace(**{field: value})
    for draw in (stream.normal, stream.uniform):
        with pytest.raises(SordinoError, match=field):
            draw(at, (1,))


def test_an_address_is_a_nonce():
    assert len({at.pack() for at in GRID}) == len(GRID)
    assert {len(at.pack()) for at in GRID} == {12}
    assert Address(np.int64(3), np.int64(5), 1).pack() == HERE.pack()


# ------------------------------------------------------------------------------------------------------------ sources


def keystream(key: bytes, nonce: bytes, size: int) -> bytes:
    words = np.empty(size // 8, dtype="<u8")
    noise._keystream(noise._chacha20()(key, nonce), words)
    return words.tobytes()


def test_the_keystream_is_rfc_8439():
    """Section 2.3.2 (the block with counter 1 is the second here), and appendix A.1, vectors 1 and 2."""
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert keystream(KEY, nonce, 128)[64:] == expected
    assert keystream(KEY, nonce, 128)[:64] != expected
    assert keystream(bytes(32), bytes(12), 128) == bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def test_draws_come_from_that_keystream():
    stream = Secure(KEY)
    words = np.frombuffer(keystream(noise._derive(KEY, b"sordino normal"), HERE.pack(), 800), dtype="<i8")
    z = stream.normal(HERE, (100,))
    assert np.allclose(np.sign(words) * ndtr(-np.abs(z)), words / 2.0**64, rtol=1e-12)
    words = np.frombuffer(keystream(noise._derive(KEY, b"sordino uniform"), HERE.pack(), 800), dtype="<u8")
    assert np.allclose(stream.uniform(HERE, (100,)), words / 2.0**64, rtol=0, atol=2.0**-52)


def test_fresh_secure_sources_differ():
    draws = np.array([Secure().normal(HERE, (4,)) for _ in range(8)])
    assert all_distinct(draws.ravel().tolist())


def test_seeds_differ_also_in_their_high_bits():
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**33, 2**64 - 1]
    assert all_distinct([Seeded(s).normal(HERE, (1,)).item() for s in seeds])


def test_a_key_is_hidden_and_checked():
    stream = Secure(KEY)
    assert repr(stream) == "Secure(key=<hidden>)"
    assert KEY not in vars(stream).values()
    with pytest.raises(SordinoError, match="key"):
        Secure(b"short")


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1"])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(SordinoError, match="seed"):
        Seeded(seed)


def test_who_may_promise():
    assert Secure().private is True
    assert Seeded(1).private is False
    assert Silent().private is False
    assert isinstance(source(None), Secure)
    assert isinstance(source(0), Seeded)
    assert np.array_equal(source(4).normal(HERE, (3,)), Seeded(4).normal(HERE, (3,)))


def test_silence():
    assert not Silent().normal(HERE, (3, 4)).any()
    assert np.array_equal(Silent(5).uniform(HERE, (9,)), Seeded(5).uniform(HERE, (9,)))


def test_words():
    """Of 64 fair bits, and from a stream of their own."""
    for stream in (Secure(KEY), Seeded(7), noise.Counted(7), Silent(7)):
        words = stream.words(HERE, SIZE)
        assert words.dtype == np.uint64
        assert words.shape == (SIZE,)
        assert words.flags.writeable
        assert all_distinct(words.tolist())
        bits = np.unpackbits(words.view(np.uint8)).reshape(SIZE, 64)
        assert np.abs(bits.mean(0) - 0.5).max() <= 4.5 * math.sqrt(0.25 / SIZE)
        for size in (0, 1, 7, noise._CHUNK + 1):
            assert np.array_equal(stream.words(HERE, size), words[:size])
        firsts = [stream.words(at, 1).item() for at in GRID]
        assert all_distinct(firsts)
        tops = (words[:1000] >> np.uint64(12)).tolist()
        uniforms = stream.uniform(HERE, (1000,)) * 2.0**52 - 0.5
        assert not {*tops} & {*uniforms.astype(np.uint64).tolist()}
        with pytest.raises(SordinoError, match="round"):
            stream.words(HERE._replace(round=-1), 1)
    raw = keystream(noise._derive(KEY, b"sordino words"), HERE.pack(), 800)
    assert Secure(KEY).words(HERE, 100).tobytes() == raw
    assert raw != keystream(noise._derive(KEY, b"sordino normal"), HERE.pack(), 800)
    assert np.array_equal(Silent(7).words(HERE, 9), Seeded(7).words(HERE, 9))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(SordinoError, match=r"pip install cryptography.*seed"):
        Secure()
    with pytest.raises(SordinoError, match="cryptography"):
        source(None)
    assert Seeded(1).normal(HERE, (2,)).shape == (2,)


def test_a_stream_that_would_wrap_is_refused(monkeypatch):
    monkeypatch.setattr(noise, "_MOST", 10)
    assert Secure(KEY).normal(HERE, (10,)).size == 10
    with pytest.raises(SordinoError, match="shape"):
        Secure(KEY).normal(HERE, (11,))


def test_counted_streams_differ_between_seeds_and_clients():
    """A key made like a place would let client 2 of seed 1 draw what client 1 of seed 2 draws."""
    from sordino.privacy.noise import Counted

    draws = [
        Counted(seed).normal(Address(client, 0, query, index), (4,))
        for seed, client, query, index in itertools.product(range(5), range(5), range(2), range(2))
    ]
    draws += [
        Counted(seed).uniform(Address(client, 0, 0), (4,)) for seed, client in itertools.product(range(5), repeat=2)
    ]
    assert len({tuple(draw) for draw in draws}) == len(draws)


def test_counted_normals_are_standard_and_begin_alike():
    from sordino.privacy.noise import Counted, counted

    z = counted([Counted(seed) for seed in range(4)], [Address(0, t, 0) for t in range(10)], 20_000)
    assert z.shape == (10, 4, 20_000)
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / z.numel())
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / z.numel())
    assert abs(float((z[..., 1:] * z[..., :-1]).mean())) < 4 / math.sqrt(z.numel())
    assert abs(float((z[1:] * z[:-1]).mean())) < 4.5 / math.sqrt(z.numel())
    short = Counted(2).normal(Address(0, 3, 0), (5,))
    assert np.array_equal(short, z[3, 2, :5].numpy())
