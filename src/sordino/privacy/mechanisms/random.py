"""Where randomness comes from, and how it is added to a number that leaves.

Every draw has an address, (client, round, query, index), and a source is a function of addresses: the same address
gives the same draw again (a resumed round and correlated noise need that), two addresses never share a stream.

What `Secure` protects against: someone who sees any number of draws, or knows all addresses, learns nothing about
the others without the key. What it does not: a key used for two runs gives both the same noise, and the difference of
their releases is then bare; take a fresh key for each run. A `Seeded` stream can be recomputed, or guessed, by anyone
who knows or tries the seed: it is for simulation and for tests, and says so (`private = False`).

What is exact. Element i of a `Secure` draw is the ideal normal N = Phi^-1(U) of a uniform U with infinitely many bits,
of which only as many are read as the question at hand needs. `Secure.normal` returns a float64 approximation of N:
63 bits after the sign, and further bits in the tails, so that there is no largest draw. `Secure.bounds` returns an
interval that contains N, proved in integer arithmetic, and as narrow as wanted. `settle` releases

    grid * round((value + ideal noise) / grid)

with the sum and the rounding as in real arithmetic: in float64 where the error bounds settle the rounding, and by
`Secure.bounds` where they do not. A release is thus the Gaussian mechanism of real arithmetic, rounded to a public
grid. Rounding is post-processing: the account of the Gaussian mechanism holds as it is, with no truncated tail and no
statement about low bits.

What is assumed. (1) ChaCha20 under keys derived with keyed BLAKE2b is a pseudorandom function, so that its bits are
as good as uniform. (2) scipy's `ndtri` and `ndtri_exp` are accurate enough for `ERROR`: every number z that
`Secure.normal` returns satisfies |z - N| <= 2^-40 max(1, |N|). The tests compare them with mpmath and find an error of
about 2^-50. (3) The time that a release takes is not observed: a sum that lies close to the middle between two points
of the grid takes longer.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtri, ndtri_exp

from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint64]

EVERYONE = 2**32 - 1  # in a simulation, where nobody reads the shares: the summed noise of a cohort
GRID_BITS = 14  # a rounding error of std / 2^15 is lost in the noise
ERROR = 2.0**-40  # a normal z of `Secure.normal` and its ideal N: |z - N| <= ERROR * max(1, |N|)

_LAYOUT = struct.Struct("<IIHH")  # 12 bytes, a ChaCha20 nonce to the byte: distinct addresses, distinct nonces
_BITS = (32, 32, 16, 16)
_CHUNK = 1 << 13  # words; the 64 KiB buffers of one chunk stay in cache
_ZEROS = bytes(8 * _CHUNK)
_NONE = np.empty(0, dtype=np.intp)
_BLOCK = 8  # words of one ChaCha20 block
_RARE = 1 << 44  # a tail probability below _RARE / 2^64 = 2^-20 is read to more bits
_DEEP = 2048  # bits; beyond a logarithm of -2048 `ndtri_exp` loses some of its accuracy
_FAR = 2.0**51  # grid points: up to there float64 holds the halves between them
_MOST = 1 << 35  # words of one nonce: 2^32 blocks of 64 bytes, then the counter would run into the nonce


class Address(NamedTuple):
    """Of one draw. `index` counts the releases of one query in one round."""

    client: int
    round: int
    query: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which no address needs

    def pack(self) -> bytes:
        """Twelve bytes, one to one with valid addresses; every source begins here, so none accepts another."""
        try:
            return _LAYOUT.pack(*self)
        except struct.error:
            for name, value, bits in zip(self._fields, self, _BITS, strict=True):
                if not (hasattr(value, "__index__") and 0 <= value < 2**bits):
                    raise SordinoError(f"{name}: {value!r} must be an integer from 0 to 2**{bits} - 1.") from None
            raise


class Source(Protocol):
    """A function of addresses. A longer draw begins with the shorter one."""

    @property
    def private(self) -> bool:
        """May its noise carry a promise?"""
        ...

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Independent standard normals."""
        ...

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Independent uniforms in (0, 1), from a stream of their own."""
        ...

    def words(self, at: Address, count: int) -> Words:
        """Independent words of 64 bits, from a stream of their own: what integer noise is made of."""
        ...

    def fresh(self) -> Source:
        """For one run. Noise used in two runs would cancel in their difference: a secret stream is used in one."""
        ...


class Exact(Source, Protocol):
    """A source whose normals are known to any precision."""

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        """An interval that contains the ideal normal at this place of the (flat) draw; narrower with more words."""
        ...


def is_exact(source: Source) -> TypeGuard[Exact]:
    return hasattr(source, "bounds")  # `isinstance` of a protocol takes longer than a small draw


class Secure:
    """The ChaCha20 keystream (RFC 8439) of a secret key, the address as nonce; fresh from the system by default."""

    private = True

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != 32:
            raise SordinoError(f"key: {len(key)} bytes given, 32 are needed; leave it out for a fresh one.")
        _chacha20()  # fail here, not in the first round
        master = secrets.token_bytes(32) if key is None else bytes(key)
        self._normal_key = _derive(master, b"sordino normal")
        self._uniform_key = _derive(master, b"sordino uniform")
        self._words_key = _derive(master, b"sordino words")
        self._more_key = _derive(master, b"sordino more")

    def __repr__(self) -> str:
        return "Secure(key=<hidden>)"

    def fresh(self) -> Secure:
        return Secure(_derive(self._normal_key + secrets.token_bytes(32), b"sordino run"))

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Within ERROR of the ideal normals."""

        def convert(words: Words, out: Floats, start: int) -> None:
            for i in _to_normal(words, out):
                sign, tail, bits = self._tail(at, start + int(i), 1, _RARE)
                out[i] = sign * (_approximate_quantile(tail, bits) if bits <= _DEEP else _quantile(tail, bits)[0])

        return _draw(self._normal_key, at, shape, convert)

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        """An interval that contains the ideal normal, from at least 64 + 64 `words` bits."""
        sign, tail, bits = self._tail(at, element, words, 1)
        low, high = _quantile(tail, bits)
        return (low, high) if sign > 0 else (-high, -low)

    def _tail(self, at: Address, element: int, words: int, least: int) -> tuple[int, int, int]:
        """(sign, tail, bits): P(|N| > |this normal|) / 2 lies between tail / 2^bits and (tail + 1) / 2^bits.

        The first word holds the sign and 63 bits. Word i of every further stream belongs to element i, which so is a
        function of key, address and i. At least `words` further ones are read, and more while tail < least.
        """
        if not 0 <= element < _MOST:
            raise SordinoError(f"element: {element} must be an integer from 0 to 2**35 - 1.")
        first = _word_at(self._normal_key, at, element)
        sign, tail = (1, first) if first < 2**63 else (-1, 2**64 - 1 - first)
        level = 0
        while level < words or tail < least:
            level += 1
            key = _derive(self._more_key, b"sordino level", struct.pack("<Q", level))
            tail = tail << 64 | _word_at(key, at, element)
        return sign, tail, 64 + 64 * level

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return _draw(self._uniform_key, at, shape, _to_uniform)

    def words(self, at: Address, count: int) -> Words:
        return _draw(self._words_key, at, (count,), _to_words).view("<u8").astype(np.uint64, copy=False)


class Seeded:
    """Reproducible from a seed, and therefore not private."""

    private = False

    def __init__(self, seed: int) -> None:
        if not (hasattr(seed, "__index__") and 0 <= seed < 2**64):
            raise SordinoError(f"seed: {seed!r} must be an integer from 0 to 2**64 - 1.")
        self.seed = int(seed)
        self._normal_prefix = struct.pack("<QI", self.seed, 0)
        self._uniform_prefix = struct.pack("<QI", self.seed, 1)
        self._words_prefix = struct.pack("<QI", self.seed, 2)

    def __repr__(self) -> str:
        return f"Seeded({self.seed})"

    def fresh(self) -> Seeded:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return np.random.Generator(_bits(self._normal_prefix, at)).standard_normal(shape)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        out = np.empty(shape)
        _to_uniform(_bits(self._uniform_prefix, at).random_raw(out.size).reshape(shape), out)
        return out

    def words(self, at: Address, count: int) -> Words:
        return np.asarray(_bits(self._words_prefix, at).random_raw(count), dtype=np.uint64)


class Counted:
    """Reproducible from a seed, and not private: number i of a stream is a hash of its place, the same on every device
    to rounding, so that `counted` draws for many runs and rounds at once."""

    private = False

    def __init__(self, seed: int) -> None:
        self.seed = Seeded(seed).seed
        self.keys = [_word(struct.pack("<QI", self.seed, purpose), b"sordino key") for purpose in (0, 1, 2)]

    def __repr__(self) -> str:
        return f"Counted({self.seed})"

    def fresh(self) -> Counted:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return np.asarray(counted([self], [at], math.prod(shape))[0, 0].numpy()).reshape(shape)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        start = torch.tensor([self.keys[1] ^ _word(at.pack())])
        return np.asarray(_fractions(_mix(start), math.prod(shape))[0].numpy()).reshape(shape)

    def words(self, at: Address, count: int) -> Words:
        start = torch.tensor([self.keys[2] ^ _word(at.pack())])
        return np.asarray(_hashes(_mix(start), count)[0].numpy()).view(np.uint64)


def counted(sources: Sequence[Counted], at: Sequence[Address], size: int, device: str = "cpu") -> Tensor:
    """Standard normals, addresses x sources x size: each source's own draw at each address."""
    keys = torch.tensor([source.keys[0] for source in sources], device=device)
    places = torch.tensor([_word(a.pack()) for a in at], device=device)
    u = _fractions(_mix(places.unsqueeze(-1) ^ keys), 2 * size)
    return (-2 * u[..., 0::2].log()).sqrt() * (2 * math.pi * u[..., 1::2]).cos()  # Box and Muller


class Noiseless:
    """No noise at all; minibatches and participants are still drawn, from a seed."""

    private = False

    def __init__(self, seed: int = 0) -> None:
        self._seeded = Seeded(seed)

    def __repr__(self) -> str:
        return f"Silent({self._seeded.seed})"

    def fresh(self) -> Noiseless:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        at.pack()
        return np.zeros(shape)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self._seeded.uniform(at, shape)

    def words(self, at: Address, count: int) -> Words:
        return self._seeded.words(at, count)


# ------------------------------------------------------------------------------------------------------- what leaves


class Term(NamedTuple):
    """coefficient * N, for the ideal normal N of one element of the (flat) draw at an address."""

    coefficient: Fraction
    source: Exact
    at: Address
    element: int


@dataclass(frozen=True, eq=False)
class Draw:
    """Noise as it was computed, a bound on its error, and the ideal noise.

    The ideal noise of (flat) number i is the sum of `terms(i)`; `error`, broadcast, bounds its distance from `z`.
    Always error >= ERROR |z|, so that one rounding in float64, an error of at most 2^-53 |z|, adds less than 2^-12 of
    `error` to it: that is how the methods below keep the bound. `terms` is None where the source is not private.
    """

    z: Tensor
    error: Tensor
    terms: Callable[[int], list[Term]] | None

    @classmethod
    def plain(cls, z: Tensor) -> Draw:
        """Noise that keeps no secret."""
        return cls(z, z.new_zeros((1,) * z.dim()), None)

    def to(self, device: torch.device | str) -> Draw:
        return Draw(self.z.to(device), self.error.to(device), self.terms)

    def scaled(self, std: Tensor | float) -> Draw:
        """std * z; a tensor broadcasts over z."""
        width = torch.as_tensor(std, dtype=torch.float64, device=self.z.device)
        each = width.expand(self.z.shape)
        terms = self.terms

        def scaled(i: int) -> list[Term]:
            assert terms is not None
            factor = Fraction(float(each[tuple(int(k) for k in np.unravel_index(i, each.shape))]))
            return [term._replace(coefficient=factor * term.coefficient) for term in terms(i)]

        error = self.error * width.abs() * (1 + 2.0**-12)
        return Draw(self.z * width, error, None if terms is None else scaled)

    def symmetric(self) -> Draw:
        """(z + z^T) / 2, in the last two axes."""
        shape, terms = self.z.shape, self.terms

        def symmetric(i: int) -> list[Term]:
            assert terms is not None
            *lead, row, column = np.unravel_index(i, shape)
            j = int(np.ravel_multi_index((*lead, column, row), shape))
            return [term._replace(coefficient=term.coefficient / 2) for term in terms(i) + terms(j)]

        error = (self.error + self.error.mT) / 2 * (1 + 2.0**-12)
        return Draw((self.z + self.z.mT) / 2, error, None if terms is None else symmetric)

    def summed(self, axis: int) -> Draw:
        """The sum over one axis."""
        shape, terms = list(self.z.shape), self.terms
        axis %= len(shape)
        count = shape.pop(axis)

        def summed(i: int) -> list[Term]:
            assert terms is not None
            place = [int(k) for k in np.unravel_index(i, shape)]
            parts = ((*place[:axis], k, *place[axis:]) for k in range(count))
            return [term for part in parts for term in terms(int(np.ravel_multi_index(part, self.z.shape)))]

        each = self.error.expand(*(count if k == axis else n for k, n in enumerate(self.error.shape)))
        error = each.sum(axis) * (1 + count * 2.0**-12)
        return Draw(self.z.sum(axis), error, None if terms is None else summed)


def draw(source: Source, parts: Sequence[tuple[float, Address]], shape: tuple[int, ...]) -> Draw:
    """The sum of coefficient * normal(address), as for correlated noise; [(1.0, at)] is one normal per number."""
    if source.private and not is_exact(source):
        raise SordinoError(f"source: {source!r} is private and has no `bounds`; pass one that has, such as Secure().")
    parts = [(float(coefficient), at) for coefficient, at in parts]
    z, error = np.zeros(shape), 0.0
    for coefficient, at in parts:
        normal = source.normal(at, shape)
        furthest = float(max(normal.max(), -normal.min(), 1.0)) if normal.size else 1.0
        error += abs(coefficient) * ERROR * furthest
        if len(parts) == 1 and coefficient == 1:
            z = normal
        else:
            z += coefficient * normal
    if not is_exact(source):
        return Draw.plain(torch.from_numpy(z))
    exact = source

    def terms(i: int) -> list[Term]:
        return [Term(Fraction(coefficient), exact, at, i) for coefficient, at in parts]

    # |N| is up to 1 + ERROR times `furthest`; a product and as many additions as there are parts round once each.
    error *= 1 + (len(parts) + 2) * 2.0**-12
    return Draw(torch.from_numpy(z), torch.full((1,) * len(shape), error, dtype=torch.float64), terms)


def stack(draws: Sequence[Draw]) -> Draw:
    """Draws of one shape along a new first axis: one row per client, say."""
    each = [one.terms for one in draws]
    if len({terms is None for terms in each}) > 1:
        raise SordinoError("draws: some are of a private source and some are not; settle them apart.")
    size = draws[0].z.numel()

    def stacked(i: int) -> list[Term]:
        row, place = divmod(i, size)
        terms = each[row]
        assert terms is not None
        return terms(place)

    common = np.broadcast_shapes(*(tuple(one.error.shape) for one in draws))
    error = torch.stack([one.error.expand(common) for one in draws])
    return Draw(torch.stack([one.z for one in draws]), error, None if each[0] is None else stacked)


def grid_of(std: Tensor | float) -> Tensor:
    """The public grid of a release: the power of two from std / 2^15 (not reached) to std / 2^14."""
    width = torch.as_tensor(std, dtype=torch.float64)
    if not bool(((width >= 2.0**-880) & (width <= 2.0**880)).all()):
        raise SordinoError(f"std: {std!r} must be a number from 2^-880 to 2^880 to give a grid.")
    return width / torch.frexp(width).mantissa * 2.0 ** -(GRID_BITS + 1)  # x / mantissa is a power of two, exactly


def settle(value: Tensor, noise: Draw, grid: Tensor | float) -> Tensor:
    """grid * round((value + ideal noise) / grid) in float64, rounded as in real arithmetic.

    `value` is taken as the exact number that it is. `grid` is a public power of two and broadcasts. In float64,
    t = (value + z) / grid is off by at most error / grid + 2^-53 |t|. Where this leaves the rounding open, which is
    where t lies as close as that to the middle of two integers, the sum is computed exactly. About one number in 2^22
    is open where the grid is `grid_of(std)` and value is of the size of the noise.
    """
    if value.shape != noise.z.shape:
        raise SordinoError(f"noise: of shape {tuple(noise.z.shape)}, and value has {tuple(value.shape)}.")
    step = torch.as_tensor(grid, dtype=torch.float64, device=value.device)
    if not bool(((torch.frexp(step).mantissa == 0.5) & (step >= 2.0**-900) & (step <= 2.0**900)).all()):
        raise SordinoError(f"grid: {grid!r} must be a power of two from 2^-900 to 2^900; grid_of(std) is.")
    noise = noise.to(value.device)
    t = (value.double() + noise.z).div_(step)
    points = t.round()
    size = points.abs()
    if points.numel() and not float(size.amax()) < _FAR:  # also where one is not a number
        raise SordinoError(f"value: not finite, or beyond {_FAR:g} grid points; clip it, or take a coarser grid.")
    if noise.terms is not None and points.numel():
        # |t| <= size + 1/2. The factor 1.001 and 2^-51 are for the roundings of these lines themselves.
        reach = t.sub_(points).abs_().add_(size, alpha=2.0**-52).add_(noise.error / step * 1.001)
        middle = 0.5 - 2.0**-51
        if float(reach.amax()) >= middle:
            for i in (reach >= middle).reshape(-1).nonzero().reshape(-1).tolist():
                place = tuple(int(k) for k in np.unravel_index(i, value.shape))
                width = float(step.expand(value.shape)[place])
                points[place] = _round_exactly(float(value[place]), noise.terms(i), width)
    return points.mul_(step)


def _round_exactly(value: float, terms: Sequence[Term], grid: float) -> int:
    """round((value + sum of the terms) / grid), by intervals that are narrowed until both ends agree."""
    factors: dict[tuple[Exact, Address, int], Fraction] = {}  # the same normal may come twice
    for term in terms:
        normal = (term.source, term.at, term.element)
        factors[normal] = factors.get(normal, Fraction(0)) + term.coefficient
    for words in itertools.count(1):
        low = high = Fraction(value)
        for (source, at, element), factor in factors.items():
            ends = sorted(factor * end for end in source.bounds(at, element, words))
            low, high = low + ends[0], high + ends[1]
        point = math.floor(low / Fraction(grid) + Fraction(1, 2))
        if point == math.floor(high / Fraction(grid) + Fraction(1, 2)):
            return point
    raise AssertionError("unreachable")


def source(seed: int | None) -> Source:
    """The source of all randomness of a run: noise, minibatches, dropout.

    Args:
        seed: None for the secure source, whose key comes from the operating system. A number makes the run
            reproducible, and not private.

    Returns:
        The source.

    Example:
        >>> type(source(None)).__name__, type(source(1)).__name__
        ('Secure', 'Seeded')
    """
    return Secure() if seed is None else Seeded(seed)


# ---------------------------------------------------------------------------------------------------- seeded streams


def _bits(prefix: bytes, at: Address) -> np.random.SFC64:
    entropy = np.frombuffer(prefix + at.pack(), dtype="<u4").astype(np.uint32, copy=False)
    return np.random.SFC64(np.random.SeedSequence(entropy))


# --------------------------------------------------------------------------------------------------- counted streams

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as signed words


def _word(data: bytes, person: bytes = b"sordino place") -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=person).digest(), "little", signed=True)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), in signed words; shifts must not carry the sign along."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def _hashes(start: Tensor, size: int) -> Tensor:
    """Words: SplitMix64 from `start`, one stream a row."""
    index = torch.arange(1, size + 1, device=start.device)
    return _mix(start.unsqueeze(-1) + index * _GOLDEN)


def _fractions(start: Tensor, size: int) -> Tensor:
    """Uniforms in (0, 1) of those words."""
    words = _hashes(start, size)
    return (((words >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


# ---------------------------------------------------------------------------------------------------- secure streams


def _chacha20() -> Callable[..., Any]:
    """(key, 12-byte nonce, block counter = 0) -> an encryptor that starts there."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as missing:
        raise SordinoError(
            "secure noise needs the package 'cryptography': pip install cryptography, or pass a seed (not private)."
        ) from missing

    def begin(key: bytes, nonce: bytes, block: int = 0) -> Any:
        return Cipher(algorithms.ChaCha20(key, struct.pack("<I", block) + nonce), mode=None).encryptor()

    return begin


def _derive(master: bytes, purpose: bytes, data: bytes = b"") -> bytes:
    return hashlib.blake2b(data, key=master, person=purpose, digest_size=32).digest()


def _word_at(key: bytes, at: Address, i: int) -> int:
    """Word i of a stream."""
    words = np.empty(_BLOCK, dtype="<u8")
    _keystream(_chacha20()(key, at.pack(), i // _BLOCK), words)
    return int(words[i % _BLOCK])


def _draw(key: bytes, at: Address, shape: tuple[int, ...], convert: Callable[[Words, Floats, int], None]) -> Floats:
    """One keystream, converted chunk by chunk into the answer; a chunk's edge falls between words."""
    out = np.empty(math.prod(shape))
    if out.size > _MOST:
        raise SordinoError(f"shape: {out.size} numbers at one address, and a stream ends after 2**35.")
    stream = _chacha20()(key, at.pack())
    buffer = np.empty(min(_CHUNK, out.size), dtype="<u8")
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        words = buffer[: part.size]
        _keystream(stream, words)
        convert(words, part, start)
    return out.reshape(shape)


def _keystream(stream: Any, words: Words) -> None:
    """The next bytes of the stream, as little-endian words: encrypted zeros are the keystream itself."""
    stream.update_into(memoryview(_ZEROS)[: words.nbytes], words.view(np.uint8).data)


def _to_normal(words: Words, out: Floats) -> NDArray[np.intp]:
    """Inverse cdf, folded: a sign, and 63 bits for a tail probability k / 2^64 in (0, 1/2]. -> where these are too few.

    Folding keeps the law exactly symmetric. Of the two ends k and k + 1 of the interval that the 63 bits leave open,
    the odd one is taken, which is never 0. At a tail of 2^-20 or more the open interval is less than 2^-46 wide in N.
    """
    np.bitwise_or(words, 1, out=words)
    np.multiply(words.view("<i8"), 2.0**-64, out=out)
    tail = np.abs(out)
    few = _RARE * 2.0**-64
    rare = _NONE if tail[tail.argmin()] >= few else np.flatnonzero(tail < few)  # one pass where none is rare
    np.copysign(ndtri(tail, out=tail), out, out=out)
    return rare


def _to_uniform(words: Words, out: Floats, start: int = 0) -> None:
    """(k + 1/2) / 2^52: the finest even grid whose midpoints are all float64 (with 53 bits the last rounds to 1)."""
    np.right_shift(words, 12, out=words)
    np.add(words, 0.5, out=out)
    np.multiply(out, 2.0**-52, out=out)


def _to_words(words: Words, out: Floats, start: int = 0) -> None:
    """As they are: the answer's memory holds their bits."""
    out.view("<u8")[:] = words


# ------------------------------------------------------------------- the normal's quantiles, proved in whole numbers


def _approximate_quantile(tail: int, bits: int) -> float:
    """x with Q(x) = (tail + 1/2) / 2^bits, for the normal's upper tail Q; however small, by its logarithm."""
    return max(0.0, -float(ndtri_exp(math.log(2 * tail + 1) - (bits + 1) * math.log(2))))


def _quantile(tail: int, bits: int) -> tuple[Fraction, Fraction]:
    """Bounds on every x with tail / 2^bits <= Q(x) <= (tail + 1) / 2^bits, for the normal's upper tail Q.

    Newton's method finds the middle, from scipy's float64 value and slope. Neither is trusted: the answer is what
    `_upper_tail` proves, Q(low) >= (tail + 1) / 2^bits and Q(high) <= tail / 2^bits. Here tail >= 1.
    """
    fraction = bits + 8  # x counts 2^-fraction, and Q counts 2^-(bits + 16)
    middle = (2 * tail + 1) << 15
    start = _approximate_quantile(tail, bits)
    mills = int(math.sqrt(math.pi / 2) * float(erfcx(start / math.sqrt(2))) * 2**60)  # Q / density, as 2^-60

    def width(change: int) -> int:
        """Of x, for this change of Q."""
        return ((change * mills) << fraction) // (middle << 60)

    x = int(Fraction(start) * 2**fraction)
    while abs(miss := sum(_upper_tail(x, fraction, bits + 16)) // 2 - middle) >= 1 << 12:
        x = max(0, x + width(miss))
    reach = width((1 << 15) + (1 << 13)) + 1
    low = high = x
    while low > 0 and _upper_tail(low, fraction, bits + 16)[0] < (tail + 1) << 16:
        low, reach = max(0, low - reach), 2 * reach
    while _upper_tail(high, fraction, bits + 16)[1] > tail << 16:
        high, reach = high + reach, 2 * reach
    return Fraction(low, 1 << fraction), Fraction(high, 1 << fraction)


def _upper_tail(x: int, fraction: int, bits: int) -> tuple[int, int]:
    """Integers low <= 2^bits Q(x / 2^fraction) <= high, for x >= 0.

    Q(x) = 1/2 - S / sqrt(2 pi), and S is the alternating sum of a_n / (2 n + 1) with a_n = x y^n / n!, y = x^2 / 2. In
    units of 2^-scale, t is a_n rounded down. Its error grows from e to at most e y / n + 1 in step n and is therefore
    at most e^y <= 2^growth throughout. Every term adds this and 1 for its own division. The remainder of the series
    is at most its first term, because terms fall once n > y; with t = 0 this is at most 2^growth as well.
    """
    square = x * x
    growth = (3 * square >> (2 * fraction + 2)) + 1  # 3/2 > 1 / ln 2
    scale = bits + 16 + growth
    t, n, total = x << max(0, scale - fraction) >> max(0, fraction - scale), 0, 0
    while t or n <= growth:
        total += -(t // (2 * n + 1)) if n % 2 else t // (2 * n + 1)
        n += 1
        t = (t * square >> (2 * fraction + 1)) // n
    error = (n + 2) << (growth + 1)
    low, high = max(0, total - error), total + error
    root = bits + 16
    least, most = _root_of_two_pi(root)
    half = 1 << (bits - 1)
    return half + (-high << (bits + root)) // (least << scale), half - (low << (bits + root)) // (most << scale)


@lru_cache(maxsize=64)
def _root_of_two_pi(bits: int) -> tuple[int, int]:
    """Integers low <= 2^bits sqrt(2 pi) <= high, by Machin's pi / 4 = 4 arctan(1 / 5) - arctan(1 / 239)."""
    scale = 2 * bits

    def arctan(k: int) -> int:
        """Of 1 / k, in units of 2^-scale: every term is off by less than 2, and the remainder by less than 2."""
        t, n, total = (1 << scale) // k, 0, 0
        while t:
            total += -(t // (2 * n + 1)) if n % 2 else t // (2 * n + 1)
            n += 1
            t //= k * k
        return total

    pi, error = 16 * arctan(5) - 4 * arctan(239), 64 * scale  # at most scale / 4.6 + 1 terms, each off by 2, 20 times
    return math.isqrt(2 * (pi - error)), math.isqrt(2 * (pi + error)) + 1
