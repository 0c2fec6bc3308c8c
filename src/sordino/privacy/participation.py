"""Which clients take part in which round, and which of a client's records enter a minibatch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from sordino.errors import SordinoError, nearest
from sordino.privacy.mechanisms.random import Address, Secure

FULL = "full"
WORDS = 2**18  # of the draws of several rounds that are ordered at once


@dataclass(frozen=True)
class Participation:
    """Which clients take part: all, a fixed number drawn in each round, each client independently at a rate, or fixed
    cohorts in turn.

    The schedule is drawn before the run and does not depend on data, so each client's number of rounds is known and is
    what it pays for. No amplification is claimed for a schedule that the adversary does not know.

    Args:
        kind: `full`, `fixed`, `poisson` or `cyclic`.
        amount: Clients per round (`fixed`), the rate (`poisson`), or the number of cohorts (`cyclic`).

    Raises:
        SordinoError: The kind is unknown or the amount is out of its range.

    Example:
        >>> Participation.parse("cyclic:4")  # every client takes part in every fourth round
        Participation(kind='cyclic', amount=4.0)
    """

    kind: str = FULL
    amount: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in (FULL, "fixed", "poisson", "cyclic"):
            known = [FULL, "fixed:5", "poisson:0.5", "cyclic:4"]
            raise SordinoError(f"participation: '{self.kind}' is unknown.{nearest(self.kind, known)}")
        if self.kind in ("fixed", "cyclic") and not (1 <= self.amount < 2**31 and self.amount == int(self.amount)):
            what = "clients" if self.kind == "fixed" else "cohorts"
            raise SordinoError(f"participation: {self} needs a whole number of {what} of at least 1.")
        if self.kind == "poisson" and not 0 < self.amount <= 1:
            raise SordinoError(f"participation: {self} needs a rate in (0, 1].")

    @staticmethod
    def parse(text: str) -> Participation:
        kind, _, number = text.partition(":")
        if kind not in ("fixed", "poisson", "cyclic"):
            return Participation(text)
        try:
            return Participation(kind, float(number))
        except ValueError as error:
            if isinstance(error, SordinoError):
                raise
            raise SordinoError(
                f"participation: '{text}' has no number; write fixed:5, poisson:0.5 or cyclic:4."
            ) from None

    def __str__(self) -> str:
        return self.kind if self.kind == FULL else f"{self.kind}:{self.amount!r}".removesuffix(".0")

    def rate(self, clients: int) -> float:
        """The expected fraction of clients in a round: a public constant, unlike the realised one."""
        if self.kind in ("fixed", "cyclic") and self.amount > clients:
            what = "clients" if self.kind == "fixed" else "cohorts"
            raise SordinoError(f"participation: {self} asks for {self.amount:g} {what}; there are {clients} clients.")
        parts = {FULL: 1.0, "fixed": self.amount / clients, "poisson": self.amount, "cyclic": 1 / self.amount}
        return parts[self.kind]

    def schedule(self, rounds: int, clients: int, seed: int) -> list[np.ndarray]:
        """The participants of each round.

        ChaCha20 draws them with a key that is derived from all bits of the seed. So an adversary who sees some cohorts
        but does not know the seed learns nothing about the others.
        """
        if self.kind == FULL:
            return [np.arange(clients)] * rounds
        if self.kind == "cyclic":
            cohorts = int(self.amount)
            return [np.arange(t % cohorts, clients, cohorts) for t in range(rounds)]
        if seed < 0:
            raise SordinoError(f"seed: {seed} must be at least 0 for a schedule.")
        uniforms = Secure(_key(seed))
        if self.kind == "fixed":
            return _subsets(uniforms, rounds, clients, int(self.amount))
        return [_independent(uniforms, t, clients, self.amount) for t in range(rounds)]


def _key(seed: int) -> bytes:
    number = int(seed).to_bytes((int(seed).bit_length() + 7) // 8, "little")  # different seeds give different bytes
    return hashlib.blake2b(number, digest_size=32, person=b"sordino schedule").digest()


def _subsets(uniforms: Secure, rounds: int, clients: int, amount: int) -> list[np.ndarray]:
    """`_subset` of every round, of many rounds at once."""
    subsets, together = list[np.ndarray](), max(1, WORDS // clients)
    for start in range(0, rounds, together):
        some = range(start, min(start + together, rounds))
        words = uniforms.word_rows([Address(0, t, 0) for t in some], clients)
        ordered = np.sort(words, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            subsets += [_subset(uniforms, t, clients, amount) for t in some]
        else:
            chosen = np.nonzero(words <= ordered[:, amount - 1 : amount])[1]
            subsets += list(chosen.reshape(-1, amount))
    return subsets


def _subset(uniforms: Secure, t: int, clients: int, amount: int) -> np.ndarray:
    """The clients with the `amount` smallest words. Distinct words have a uniform order; equal ones are redrawn."""
    for attempt in range(2**16):
        words = uniforms.words(Address(0, t, 0, attempt), clients)
        ordered = np.sort(words)  # of values, which takes a tenth of the time of `argsort`
        if (ordered[1:] != ordered[:-1]).all():
            return np.flatnonzero(words <= ordered[amount - 1])
    raise SordinoError(f"participation: {clients} clients are too many to order by words of 64 bits.")


def _independent(uniforms: Secure, t: int, clients: int, rate: float) -> np.ndarray:
    """Draw each client independently: it takes part if its 128 bits, as a fraction, lie below the rate.

    The probability is exact for rates of at least 2^-75, and at most the rate for smaller ones.
    """
    if rate == 1:
        return np.arange(clients)
    high, low = _bits(rate)
    words = uniforms.words(Address(0, t, 0), 2 * clients).reshape(clients, 2)
    first, second = words[:, 0], words[:, 1]
    return np.flatnonzero((first < high) | ((first == high) & (second < low)))


@lru_cache(maxsize=16)
def _bits(rate: float) -> tuple[np.uint64, np.uint64]:
    """The first and the last 64 of the 128 bits of a rate below 1."""
    high, low = divmod(int(Fraction(rate) * 2**128), 2**64)
    return np.uint64(high), np.uint64(low)


SAMPLING_FIELD = "batch (in a Plan: sampling)"  # its name in a spec and on the command line, and in Python


@dataclass(frozen=True)
class Sampling:
    """Which records of a client enter a minibatch.

    All records (`full`), each record independently at a rate (`poisson:16` expects 16 records, `poisson:0.01` expects 1
    % of them), a fixed number drawn without replacement (`fixed:16`), or those that drew this minibatch
    (`allocation:16`: an epoch has as many minibatches as hold 16 records on average; each record draws one of them).
    Divisors are expected sizes, which are public. Only the client knows how many records a Poisson minibatch, or one of
    an allocation, holds.

    Args:
        kind: `full`, `poisson`, `fixed` or `allocation`.
        amount: Records per minibatch, or a rate below 1 (`poisson`).

    Raises:
        SordinoError: The kind is unknown or the amount is out of its range.
    """

    kind: str = FULL
    amount: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in (FULL, "poisson", "fixed", "allocation"):
            known = [FULL, "poisson:16", "poisson:0.01", "fixed:16", "allocation:16"]
            raise SordinoError(f"{SAMPLING_FIELD}: '{self.kind}' is unknown.{nearest(self.kind, known)}")
        whole = self.amount == int(self.amount) if 1 <= self.amount < 2**31 else False
        if self.kind in ("fixed", "allocation") and not whole:
            raise SordinoError(f"{SAMPLING_FIELD}: {self} needs a whole number of records of at least 1.")
        if self.kind == "poisson" and not (0 < self.amount < 2**31):
            raise SordinoError(f"{SAMPLING_FIELD}: {self} needs an expected number of records, or a rate below 1.")

    @staticmethod
    def parse(text: str) -> Sampling:
        """Parse a text such as `poisson:16`; `16` means the same."""
        kind, colon, number = text.partition(":")
        if kind == FULL and not colon:
            return Sampling()
        kind, number = (kind, number) if colon else ("poisson", kind)
        try:
            return Sampling(kind, float(number))
        except ValueError as error:
            if isinstance(error, SordinoError):
                raise
            raise SordinoError(
                f"{SAMPLING_FIELD}: '{text}' has no number; write full, poisson:16, fixed:16 or allocation:16."
            ) from None

    def __str__(self) -> str:
        return self.kind if self.kind == FULL else f"{self.kind}:{self.amount!r}".removesuffix(".0")

    def rates(self, sizes: np.ndarray) -> np.ndarray:
        """The chance of each client's records to be in a minibatch; 1 if the client has no more records than fit."""
        if self.kind == FULL:
            return np.ones(len(sizes))
        if self.kind == "allocation":
            return np.asarray(1 / np.maximum(sizes // self.amount, 1.0))
        part = self.kind == "poisson" and self.amount < 1
        return np.full(len(sizes), self.amount) if part else np.minimum(self.amount / sizes, 1.0)

    def draw(self, uniforms: np.ndarray, rate: float, place: int = 0) -> np.ndarray:
        """The records of a minibatch, from one uniform per record; the rate follows from the client's public size.

        Uniforms are the midpoints of 2^52 cells, so the rate is first rounded down to whole cells. So no record is
        drawn with a larger probability than the account assumes. Equal uniforms are ordered by place.

        Args:
            uniforms: One per record; under `allocation` the same ones in all minibatches of an epoch.
            rate: Of the client.
            place: Of the minibatch in its epoch, under `allocation`. A record in the cells that are left over by the
                division, fewer than one in 2^52 / minibatches, is in none.

        Returns:
            Their numbers, in order.
        """
        if rate == 1:
            return np.arange(len(uniforms))
        if self.kind == "allocation":
            cells = np.floor(uniforms * 2.0**52).astype(np.int64)
            return np.flatnonzero(cells // (2**52 // round(1 / rate)) == place)
        if self.kind == "poisson":
            return np.flatnonzero(uniforms < math.floor(rate * 2**52) / 2**52)
        return np.sort(np.argsort(uniforms, kind="stable")[: int(self.amount)])
