"""Accounting events: nested descriptions of releases, and their privacy cost.

An event is a noise event (`Gaussian`, `DiscreteGaussian`, or a class added by `register_event`), sampling around one
(`Sampled`), repetition (`Repeated`), or several events (`Composed`). A `Release` is the flat form of one of them, as
certificates and ledgers store it. Every function here takes releases and events, and refuses unknown ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from sordino.core import Adjacency
from sordino.errors import SordinoError, nearest
from sordino.privacy.accounting import concentrated, gaussian, subsampled
from sordino.privacy.accounting.concentrated import FAILURE
from sordino.privacy.accounting.subsampled import SampledGaussian, Sampler


@dataclass(frozen=True)
class NoiseEvent:
    """One release of noised data. Subclasses state which bounds hold.

    Attributes:
      ratio: sensitivity divided by standard deviation.
      name: as certificates and ledgers write it.
      is_gaussian: the release is exactly `mu`-Gaussian DP. Only then may it be sampled.
      may_fail: its bound fails with probability at most FAILURE.
    """

    ratio: float
    name: ClassVar[str]
    is_gaussian: ClassVar[bool] = False
    may_fail: ClassVar[bool] = False

    @property
    def mu(self) -> float:
        """The mu for which the release is mu^2 / 2-concentrated DP."""
        return self.ratio


class Gaussian(NoiseEvent):
    """Real-valued Gaussian noise."""

    name = "gaussian"
    is_gaussian = True


class DiscreteGaussian(NoiseEvent):
    """Discrete Gaussian noise on a sum of integers, accounted for as concentrated DP."""

    name = "discrete-gaussian"
    may_fail = True


@dataclass(frozen=True)
class Sampled:
    """A noise event about a random part of the data."""

    sampler: Sampler
    rate: float
    event: NoiseEvent


@dataclass(frozen=True)
class Repeated:
    """The same event several times, with fresh noise and fresh samples."""

    times: int
    event: Event


@dataclass(frozen=True)
class Composed:
    """Several events; each may depend on the outcomes of earlier ones."""

    events: tuple[Event, ...]


EVENTS: dict[str, type[NoiseEvent]] = {Gaussian.name: Gaussian, DiscreteGaussian.name: DiscreteGaussian}


def register_event(kind: type[NoiseEvent]) -> type[NoiseEvent]:
    """Register a noise event with the accountant; usable as a decorator.

    Args:
      kind: the class of the event.

    Returns:
      The same class.

    Raises:
      SordinoError: another event has this name.
    """
    if EVENTS.setdefault(kind.name, kind) is not kind:
        raise SordinoError(f"mechanism: an event named '{kind.name}' is registered already; choose another name.")
    return kind


def noise_event(name: str, sensitivity: float, std: float) -> NoiseEvent:
    """The registered event of this name.

    Raises:
      SordinoError: the name is unknown, or a number is negative.
    """
    if name not in EVENTS:
        raise SordinoError(f"mechanism: there is no account of '{name}'.{nearest(name, EVENTS)}")
    return EVENTS[name](gaussian.mu_of([(sensitivity, std)]))


class Release(NamedTuple):
    """`times` equal releases as the adversary sees them, each about a part of the data that is drawn at `rate`."""

    query: str
    sensitivity: float
    std: float
    times: int
    rate: float = 1.0
    sampler: Sampler = Sampler.FULL
    mechanism: str = Gaussian.name

    @property
    def event(self) -> Repeated:
        noise = noise_event(self.mechanism, self.sensitivity, self.std)
        return Repeated(self.times, Sampled(self.sampler, self.rate, noise) if self.rate < 1 else noise)


Event: TypeAlias = NoiseEvent | Sampled | Repeated | Composed
Account: TypeAlias = Iterable[Release | Event]


class _Part(NamedTuple):
    """One noise event of the nested ones, how often it happens, and its sampling, if any."""

    times: int
    noise: NoiseEvent
    sampled: Sampled | None


def _parts(account: Account, times: int = 1) -> Iterator[_Part]:
    for fact in account:
        event = fact.event if isinstance(fact, Release) else fact
        if isinstance(event, Repeated):
            yield from _parts([event.event], times * event.times)
        elif isinstance(event, Composed):
            yield from _parts(event.events, times)
        elif isinstance(event, Sampled) and EVENTS.get(getattr(event.event, "name", "")) is type(event.event):
            yield _Part(times, event.event, event)
        elif isinstance(event, NoiseEvent) and EVENTS.get(event.name) is type(event):
            yield _Part(times, event, None)
        else:
            raise SordinoError(f"mechanism: there is no account of {event!r}; register it with register_event.")


def mu(account: Account) -> float:
    """mu of the releases as if they were about all of the data.

    Without sampling it is exact. Otherwise it is an upper bound, because a mixture is no easier to distinguish than its
    worst part.
    """
    return gaussian.mu_of((part.noise.mu, 1.0, part.times) for part in _parts(account))


def epsilon(account: Account, delta: float, adjacency: Adjacency) -> float:
    """The smallest proved epsilon; infinite if nothing is proved.

    If some noise is not Gaussian, everything is accounted for as concentrated DP.

    Args:
      account: the releases or events.
      delta: the delta.
      adjacency: which data sets are neighbours.

    Returns:
      The epsilon.

    Raises:
      SordinoError: an event is unknown, or a sampler has no account under this adjacency.
    """
    parts = [part for part in _parts(account) if part.times]
    total = _mu(parts)
    if not all(part.noise.is_gaussian for part in parts):
        if any(part.sampled for part in parts) or math.isinf(total):
            return math.inf
        return concentrated.epsilon(total**2 / 2, delta, sum(part.times for part in parts if part.noise.may_fail))
    sampled, rest = _split(parts, adjacency)
    if not sampled or math.isinf(total):
        return gaussian.epsilon(total, delta)
    return subsampled.epsilon(sampled, delta, adjacency, rest)


def allowed_mu(kinds: Sequence[type[NoiseEvent]], epsilon: float, delta: float, releases: int) -> float:
    """The largest mu of all releases together that keeps (epsilon, delta).

    Args:
      kinds: of the noise events.
      releases: how many of them may fail.
    """
    if all(kind.is_gaussian for kind in kinds):
        return gaussian.mu(epsilon, delta)
    return math.sqrt(2 * concentrated.rho_of(epsilon, delta, releases)) * (1 - 1e-11)


def epsilon_of_mu_squared(kinds: Sequence[type[NoiseEvent]], square: float, delta: float, releases: int) -> float:
    """The smallest proved epsilon of unsampled releases with this total mu squared.

    Args:
      kinds: of the noise events.
      releases: how many of them may fail.
    """
    if all(kind.is_gaussian for kind in kinds):
        return gaussian.epsilon(square**0.5, delta)
    return concentrated.epsilon(square / 2, delta, releases)


def guess(account: Account, adjacency: Adjacency) -> float:
    """The largest probability of a right guess between two equally likely cases: (1 + delta at epsilon 0) / 2."""
    parts = [part for part in _parts(account) if part.times]
    total = _mu(parts)
    if not all(part.noise.is_gaussian for part in parts):
        failures = sum(part.times for part in parts if part.noise.may_fail)
        return min(1.0, concentrated_guess(total) + failures * FAILURE / 2)
    sampled, rest = _split(parts, adjacency)
    if not sampled or math.isinf(total):
        return (1 + gaussian.delta(total, 0.0)) / 2
    return (1 + subsampled.delta(sampled, 0.0, adjacency, rest)) / 2


def concentrated_guess(mu: float) -> float:
    """`guess` for concentrated DP with rho = mu^2 / 2, by the bounds of Pinsker and of Bretagnolle and Huber."""
    rho = mu**2 / 2
    return (1 + min(math.sqrt(rho / 2), math.sqrt(-math.expm1(-rho)))) / 2


def split(account: Account, adjacency: Adjacency) -> tuple[list[SampledGaussian], float]:
    """The sampled releases, in units of one term of a sum, and the mu of the others."""
    return _split(list(_parts(account)), adjacency)


def _mu(parts: Iterable[_Part]) -> float:
    return gaussian.mu_of((part.noise.mu, 1.0, part.times) for part in parts)


def _split(parts: Iterable[_Part], adjacency: Adjacency) -> tuple[list[SampledGaussian], float]:
    terms = 1.0 if adjacency is Adjacency.ADD_REMOVE else 0.5  # replacing moves a sum by two terms
    sampled, rest = [], []
    for part in parts:
        if part.sampled and part.noise.mu and part.times:
            if not part.noise.is_gaussian:
                raise SordinoError(
                    f"mechanism: there is no account of {part.noise.name} noise on a sample; use Gaussian noise."
                )
            ratio = terms * part.noise.mu
            sampled.append(SampledGaussian(part.sampled.rate, ratio, part.times, part.sampled.sampler))
        else:
            rest.append(part)
    return sampled, _mu(rest)


def coarse(rates: np.ndarray, most: int = 8) -> np.ndarray:
    """Rates rounded up to a few values, so that many different clients need few accounts. A larger rate costs more."""
    if len(np.unique(rates)) <= most:
        return rates
    edges = np.geomspace(rates.min(), rates.max(), most + 1)[1:]
    edges[-1] = rates.max()
    return edges[np.minimum(np.searchsorted(edges, rates), most - 1)]
