"""Streams of randomness.

Every draw has an address (client, round, query, index), and a source is a function of addresses. The same address gives
the same draw again, which resumed rounds and correlated noise need. Two addresses never share a stream.

`Secure` protects against an adversary who sees any number of draws and knows all addresses: without the key they reveal
nothing about other draws. It does not protect against a key that is used for two runs: both get the same noise, which
cancels in the difference of their releases. So take a new key for each run. A process that is forked during a run holds
the key too, so a source draws in the process in which it was made alone. Anybody who knows or guesses the seed can
recompute a `Seeded` stream. It is for simulations and tests (`private = False`).

Element i of a `Secure` draw is the ideal normal N = Phi^-1(U) of a uniform U with infinitely many bits, of which only
as many are read as necessary. `Secure.normal` returns a float64 approximation of N: 63 bits after the sign, and further
bits in the tails, so that there is no largest draw. `Secure.bounds` returns an interval of any width that contains N,
proved in integer arithmetic (`normal_quantile`). `gaussian.settle` needs both.

Assumptions: (1) ChaCha20 under keys derived with keyed BLAKE2b is a pseudorandom function, so its bits cannot be
distinguished from uniform ones. (2) scipy's `ndtri` and `ndtri_exp`, and CUDA's `normcdfinv`, are accurate enough for
`ERROR`: every number z that `Secure.normal` and `Secure.normal_on` return satisfies |z - N| <= 2^-40 max(1, |N|). The
tests compare them with mpmath and find an error of about 2^-50. Before its first draw a GPU is compared with scipy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import secrets
import struct
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.lazy import Tensor, scipy, torch
from sordino.privacy.mechanisms.normal_quantile import approximate_quantile, quantile

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint64]

COHORT = 2**32 - 1  # the client number for the summed noise of a cohort, if it is drawn once
ERROR = 2.0**-40  # for a normal z of `Secure.normal` and its ideal N: |z - N| <= ERROR * max(1, |N|)

_LAYOUT = struct.Struct("<IIHH")  # 12 bytes, exactly a ChaCha20 nonce: different addresses have different nonces
_BITS = (32, 32, 16, 16)
_CHUNK = 1 << 13  # words; the 64 KiB buffers of one chunk stay in cache
_ZEROS = bytes(8 * _CHUNK)
_NONE = np.empty(0, dtype=np.intp)
_BLOCK = 8  # words of one ChaCha20 block
_RARE = 1 << 44  # for a tail probability below _RARE / 2^64 = 2^-20 more bits are read
_RARE_FROM = 4.75  # the quantile of _RARE / 2^64 is -4.763
_DEEP = 2048  # bits; beyond a logarithm of -2048 `ndtri_exp` loses some of its accuracy
_MOST = 1 << 35  # words of one nonce: 2^32 blocks of 64 bytes, then the counter would run into the nonce


class Address(NamedTuple):
    """The address of one draw. `index` counts the releases of one query in one round."""

    client: int
    round: int
    query: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which is not used

    def pack(self) -> bytes:
        """Twelve bytes, different for different addresses. Every source calls this, so it refuses invalid ones."""
        try:
            return _LAYOUT.pack(*self)
        except struct.error:
            for name, value, bits in zip(self._fields, self, _BITS, strict=True):
                if not (hasattr(value, "__index__") and 0 <= value < 2**bits):
                    raise SordinoError(f"{name}: {value!r} must be an integer from 0 to 2**{bits} - 1.") from None
            raise


class Source(Protocol):
    """A source of randomness: a function of addresses. A longer draw starts with the shorter one."""

    @property
    def private(self) -> bool:
        """Whether its noise can give a privacy guarantee."""
        ...

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Independent standard normals."""
        ...

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Independent uniforms in (0, 1), from a separate stream."""
        ...

    def words(self, at: Address, count: int) -> Words:
        """Independent words of 64 bits, from a separate stream, for integer noise."""
        ...

    def fresh(self) -> Source:
        """The source for one run. A secret stream serves one run, because noise of two runs would cancel."""
        ...


class Exact(Source, Protocol):
    """A source whose normals are known to any precision."""

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        """An interval that contains the ideal normal at this place of the (flat) draw; narrower with more words."""
        ...


def is_exact(source: Source) -> TypeGuard[Exact]:
    """Whether the source has `bounds`."""
    return hasattr(source, "bounds")  # `isinstance` of a protocol takes longer than a small draw


class Secure:
    """The secure source: the ChaCha20 keystream (RFC 8439) of a secret key, with the address as nonce.

    Args:
        key: 32 secret bytes; by default new ones from the operating system.

    Raises:
        SordinoError: the key has another length, or the package `cryptography` is missing.
    """

    private = True

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != 32:
            raise SordinoError(f"key: it has {len(key)} bytes, but 32 are needed; omit it for a new key.")
        self._process = os.getpid()
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

    def _check_process(self) -> None:
        """Refuse to draw in a copy of the process, whose noise would cancel that of the original."""
        if os.getpid() != self._process:
            raise SordinoError(
                "source: a run does not go on in another process than the one it began in (os.fork, multiprocessing), "
                "because both would draw the same noise; begin a run in each process."
            )

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        """Normals within ERROR of the ideal ones."""
        self._check_process()

        def convert(words: Words, out: Floats, start: int) -> None:
            for i in _to_normal(words, out):
                out[i] = self._far(at, start + int(i))

        return _draw(self._normal_key, at, shape, convert)

    def normal_on(self, at: Address, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
        """`normal` on a device. A GPU reads the same keystream, so the ideal normals are the same ones."""
        if not gpu_draws(where := torch.device(device)):
            return torch.from_numpy(self.normal(at, shape)).to(where)
        self._check_process()
        z = _normals_on_gpu(self._normal_key, at, _counted_numbers(shape), where)
        rare = torch.nonzero(z.abs() >= _RARE_FROM).flatten()
        z[rare] = torch.tensor([self._far(at, i) for i in rare.tolist()], dtype=z.dtype, device=where)
        return z.view(shape)

    def _far(self, at: Address, element: int) -> float:
        """One normal for which 63 bits are not enough."""
        sign, tail, bits = self._tail(at, element, 1, _RARE)
        return sign * float(approximate_quantile(tail, bits) if bits <= _DEEP else quantile(tail, bits)[0])

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        """An interval that contains the ideal normal, from at least 64 + 64 `words` bits."""
        sign, tail, bits = self._tail(at, element, words, 1)
        low, high = quantile(tail, bits)
        return (low, high) if sign > 0 else (-high, -low)

    def _tail(self, at: Address, element: int, words: int, least: int) -> tuple[int, int, int]:
        """(sign, tail, bits): P(|N| > |this normal|) / 2 lies between tail / 2^bits and (tail + 1) / 2^bits.

        The first word holds the sign and 63 bits. Word i of every further stream belongs to element i, which is
        therefore a function of key, address and i. At least `words` further words are read, and more while tail <
        least.
        """
        self._check_process()
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
        self._check_process()
        return _draw(self._uniform_key, at, shape, _to_uniform)

    def words(self, at: Address, count: int) -> Words:
        self._check_process()
        return _draw(self._words_key, at, (count,), _to_words).view("<u8").astype(np.uint64, copy=False)

    def word_rows(self, addresses: Sequence[Address], count: int) -> Words:
        """As `words`, one row per address. The cipher is set up once, which takes longer than a short draw."""
        self._check_process()
        begin, rows = _chacha20(), np.empty((len(addresses), count), dtype="<u8")
        stream = None
        for at, row in zip(addresses, rows, strict=True):
            if stream is not None and hasattr(stream, "reset_nonce"):  # since cryptography 43
                stream.reset_nonce(struct.pack("<I", 0) + at.pack())
            else:
                stream = begin(self._words_key, at.pack())
            for start in range(0, count, _CHUNK):
                _keystream(stream, row[start : start + _CHUNK])
        return rows.astype(np.uint64, copy=False)


class Seeded:
    """A source that is reproducible from a seed, and therefore not private."""

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
    """A source that is reproducible from a seed, not private, and fast on a GPU.

    Number i of a stream is a hash of its place, equal on every device up to rounding. So `counted` can draw for many
    runs and rounds at once.
    """

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
        return np.asarray(_fractions(_mix(start), _offsets(math.prod(shape)))[0].numpy()).reshape(shape)

    def words(self, at: Address, count: int) -> Words:
        start = torch.tensor([self.keys[2] ^ _word(at.pack())])
        return np.asarray(_hashes(_mix(start), _offsets(count))[0].numpy()).view(np.uint64)


def counted(
    sources: Sequence[Counted],
    at: Sequence[Address],
    size: int,
    device: str = "cpu",
    through: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda f: f,
) -> Tensor:
    """Standard normals, addresses x sources x size: the draw of each source at each address. `through` may compile."""
    keys, places = (
        _sent(words, device) for words in ([source.keys[0] for source in sources], [_word(a.pack()) for a in at])
    )
    return through(_normals)(places.unsqueeze(-1) ^ keys, _offsets(2 * size, keys.device))


def _sent(words: list[int], device: str) -> Tensor:
    """The words on a device. A copy from pinned memory does not wait for what the device still computes."""
    here = torch.tensor(words)
    return here.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else here.to(device)


class Noiseless:
    """A source without noise. Minibatches and participants are still drawn, from a seed."""

    private = False

    def __init__(self, seed: int = 0) -> None:
        self._seeded = Seeded(seed)

    def __repr__(self) -> str:
        return f"Noiseless({self._seeded.seed})"

    def fresh(self) -> Noiseless:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        at.pack()
        return np.zeros(shape)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self._seeded.uniform(at, shape)

    def words(self, at: Address, count: int) -> Words:
        return self._seeded.words(at, count)


class SharedDraws:
    """One draw of a source for all runs, cut into rows: as independent as separate draws, and much faster.

    As a source it draws for all runs by one call: the first axis of a shape holds the runs.

    Args:
        source: Where all draws come from.
        runs: How many rows a draw has.
        factor: Multiplies normals; only an audit takes another one than 1.
    """

    def __init__(self, source: Source, runs: int, factor: float = 1.0) -> None:
        self._source, self._runs, self._factor = source, runs, factor
        self._drawn: dict[tuple[str, Address, tuple[int, ...]], Floats] = {}
        self._sizes: dict[Address, int] = {}
        self.private = source.private

    def rows(self) -> list[SharedDrawsRow]:
        """One source per run."""
        return [SharedDrawsRow(self, run) for run in range(self._runs)]

    def fresh(self) -> SharedDraws:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self._factor * self._source.normal(at, shape)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self._source.uniform(at, shape)

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        """Bounds on the ideal normal of an element of the draw for all runs."""
        assert is_exact(self._source)
        low, high = self._source.bounds(at, element, words)
        return Fraction(self._factor) * low, Fraction(self._factor) * high

    def words(self, at: Address, count: int) -> Words:
        return self._source.words(at, count)

    def row(self, name: str, at: Address, shape: tuple[int, ...], run: int) -> Floats:
        """The row of one run, of a draw for all of them."""
        key = (name, at, shape)
        if key not in self._drawn:
            self._sizes[at] = math.prod(shape)
            self._drawn[key] = getattr(self, name)(at, (self._runs, *shape))
        return np.asarray(self._drawn[key][run])

    def row_bounds(self, at: Address, element: int, words: int, run: int) -> tuple[Fraction, Fraction]:
        """Bounds on the ideal normal of an element of one run's row."""
        return self.bounds(at, run * self._sizes[at] + element, words)

    def row_words(self, at: Address, count: int, run: int) -> Words:
        """One column per run, so that a longer draw of a run starts with the shorter one."""
        return self._source.words(at, self._runs * count).reshape(count, self._runs)[:, run]


class SharedDrawsRow(NamedTuple):
    """The source of one run: a row of the shared draws."""

    common: SharedDraws
    run: int

    @property
    def private(self) -> bool:
        return self.common.private

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self.common.row("normal", at, shape, self.run)

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self.common.row("uniform", at, shape, self.run)

    def bounds(self, at: Address, element: int, words: int = 1) -> tuple[Fraction, Fraction]:
        return self.common.row_bounds(at, element, words, self.run)

    def words(self, at: Address, count: int) -> Words:
        return self.common.row_words(at, count, self.run)

    def fresh(self) -> SharedDrawsRow:
        return self


def joint_source(sources: Sequence[Source]) -> SharedDraws | None:
    """The shared draws of which these sources are all rows, in order; None if they are not."""
    rows = [each for each in sources if isinstance(each, SharedDrawsRow)]
    if len(rows) < len(sources) or any(each.common is not rows[0].common for each in rows):
        return None
    return rows[0].common if [each.run for each in rows] == list(range(len(rows))) else None


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
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), in signed words. Shifts must not extend the sign."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def _offsets(size: int, device: torch.device | None = None) -> Tensor:
    """What SplitMix64 adds to its start, word by word."""
    return torch.arange(1, size + 1, device=device) * _GOLDEN


def _hashes(start: Tensor, offsets: Tensor) -> Tensor:
    """Words of SplitMix64 from `start`, one stream per row."""
    return _mix(start.unsqueeze(-1) + offsets)


def _fractions(start: Tensor, offsets: Tensor) -> Tensor:
    """Uniforms in (0, 1) from these words."""
    words = _hashes(start, offsets)
    return (((words >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


def _normals(place: Tensor, offsets: Tensor) -> Tensor:
    """Standard normals from pairs of uniforms (Box and Muller)."""
    u = _fractions(_mix(place), offsets)
    return (-2 * u[..., 0::2].log()).sqrt() * (2 * math.pi * u[..., 1::2]).cos()


# ---------------------------------------------------------------------------------------------------- secure streams


def _chacha20() -> Callable[..., Any]:
    """A function (key, 12-byte nonce, block counter = 0) -> encryptor."""
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
    """Numbers from one keystream, converted in chunks of whole words."""
    out = np.empty(_counted_numbers(shape))
    stream = _chacha20()(key, at.pack())
    buffer = np.empty(min(_CHUNK, out.size), dtype="<u8")
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        words = buffer[: part.size]
        _keystream(stream, words)
        convert(words, part, start)
    return out.reshape(shape)


def _counted_numbers(shape: tuple[int, ...]) -> int:
    if (size := math.prod(shape)) > _MOST:
        raise SordinoError(f"shape: {size} numbers at one address are too many; a stream has 2**35.")
    return size


@cache
def gpu_draws(device: torch.device) -> bool:
    """Whether `Secure` computes its normals on this device: a GPU with Triton, whose numbers are those of the host.

    The comparison covers 2^17 words of a public key. A GPU that fails it gets its noise from the host.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    check, at = Secure(bytes(32)), Address(0, 0, 0)
    host = torch.from_numpy(check.normal(at, (1 << 17,)))
    plain = host.abs() < _RARE_FROM
    try:
        found = _normals_on_gpu(check._normal_key, at, len(host), device).cpu()
    except Exception as error:  # Triton without a compiler, or for another kind of GPU, ends in many ways
        reason = f"{device} cannot compute normals ({type(error).__name__})"
    else:
        if bool(((found - host).abs() <= ERROR / 4)[plain].all() & (found.abs() >= _RARE_FROM)[~plain].all()):
            return True
        reason = f"{device} computes other normals than the host"
    warnings.warn(f"{reason}, so the host draws all noise, which is slower.", stacklevel=2)
    return False


def _normals_on_gpu(key: bytes, at: Address, count: int, device: torch.device) -> Tensor:
    """Normals from the first 63 bits and a sign, as `_to_normal` computes them."""
    from sordino.privacy.mechanisms import gpu_normals  # needs Triton

    out = torch.empty(count, dtype=torch.float64, device=device)
    words = [int(word) for word in np.frombuffer(key + at.pack(), dtype="<i4")]
    if count:
        with torch.cuda.device(device):
            gpu_normals.normals[-(-count // (_BLOCK * gpu_normals.BLOCKS)),](out, count, *words)
    return out


def _keystream(stream: Any, words: Words) -> None:
    """Write the next words of the stream, little-endian. The keystream is what zeros are encrypted to."""
    stream.update_into(memoryview(_ZEROS)[: words.nbytes], words.view(np.uint8).data)


def _to_normal(words: Words, out: Floats) -> NDArray[np.intp]:
    """Write normals by the inverse cdf: one bit is the sign, and 63 bits are a tail probability k / 2^64 in (0, 1/2].

    The law is exactly symmetric. The 63 bits leave an interval from k to k + 1 open, of which the odd end is used,
    which is never 0. For tails of at least 2^-20 this interval is less than 2^-46 wide in N.

    Returns:
        The places where 63 bits are not enough.
    """
    np.bitwise_or(words, 1, out=words)
    np.multiply(words.view("<i8"), 2.0**-64, out=out)
    tail = np.abs(out)
    few = _RARE * 2.0**-64
    rare = _NONE if tail[tail.argmin()] >= few else np.flatnonzero(tail < few)  # one pass if none is rare
    np.copysign(scipy.special.ndtri(tail, out=tail), out, out=out)
    return rare


def _to_uniform(words: Words, out: Floats, start: int = 0) -> None:
    """(k + 1/2) / 2^52: the finest even grid whose midpoints are all float64 (with 53 bits the last rounds to 1)."""
    np.right_shift(words, 12, out=words)
    np.add(words, 0.5, out=out)
    np.multiply(out, 2.0**-52, out=out)


def _to_words(words: Words, out: Floats, start: int = 0) -> None:
    """Store the bits of the words in the memory of the result."""
    out.view("<u8")[:] = words
