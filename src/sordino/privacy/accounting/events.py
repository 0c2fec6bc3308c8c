"""Accounting events: nested descriptions of releases, and their privacy cost.

An event is a noise event (`Gaussian`, `DiscreteGaussian`, or a class added by `register_event`), sampling around one
(`Sampled`), repetition (`Repeated`), or several events (`Composed`). A `Release` is the flat form of one of them, as
certificates and ledgers store it. Every function here takes releases and events, and refuses unknown ones. The account
of samples is imported where something is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from sordino.core import Adjacency
from sordino.errors import SordinoError, nearest
from sordino.privacy.accounting import concentrated, gaussian, normal
from sordino.privacy.accounting.concentrated import FAILURE
from sordino.privacy.accounting.samplers import SampledGaussian, Sampler


@dataclass(frozen=True)
class NoiseEvent:
    """One release of noised data. Subclasses state which bounds hold.

    Attributes:
      ratio: sensitivity divided by standard deviation.
      name: as certificates and ledgers write it.
      is_gaussian: the release is exactly `mu`-Gaussian DP.
      may_fail: its bound fails with probability at most FAILURE.
      gaussian_factor: the release is a function of a Gaussian one whose ratio is this factor times its own, also where
        it is about a sample; 0 if nothing like that is proved. Only then may it be sampled.
      is_concentrated: it is accounted for as concentrated DP, unless something is sampled.
    """

    ratio: float
    name: ClassVar[str]
    is_gaussian: ClassVar[bool] = False
    may_fail: ClassVar[bool] = False
    gaussian_factor: ClassVar[float] = 0.0
    is_concentrated: ClassVar[bool] = True

    @property
    def mu(self) -> float:
        """The mu for which the release is mu^2 / 2-concentrated DP."""
        return self.ratio


class Gaussian(NoiseEvent):
    """Real-valued Gaussian noise."""

    name = "gaussian"
    is_gaussian = True
    gaussian_factor = 1.0
    is_concentrated = False


class DiscreteGaussian(NoiseEvent):
    """Discrete Gaussian noise on a sum of integers, accounted for as concentrated DP, as rows of a stream are."""

    name = "discrete-gaussian"
    may_fail = True
    gaussian_factor = concentrated.SMOOTHING


class SmoothedDiscreteGaussian(DiscreteGaussian):
    """The same noise, accounted for as the Gaussian noise that it is a function of.

    `concentrated.SMOOTHING` has the proof.
    """

    name = "smoothed-discrete-gaussian"
    is_concentrated = False


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


EVENTS: dict[str, type[NoiseEvent]] = {
    event.name: event for event in (Gaussian, DiscreteGaussian, SmoothedDiscreteGaussian)
}


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

    If some noise is not Gaussian, everything is accounted for as concentrated DP; if something is sampled as well, as
    the Gaussian noise that each release is a function of.

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
    if math.isinf(total) or (
        any(part.sampled for part in parts) and not all(part.noise.gaussian_factor for part in parts)
    ):
        return math.inf
    failures = sum(part.times for part in parts if part.noise.may_fail)
    if any(part.noise.is_concentrated for part in parts) and not any(part.sampled for part in parts):
        return concentrated.epsilon(total**2 / 2, delta, failures)
    sampled, rest = _split(parts, adjacency)
    left = concentrated.remaining(delta, failures)
    if left <= 0:
        return math.inf
    if not sampled:
        return gaussian.epsilon(rest, left)
    from sordino.privacy.accounting import subsampled

    return subsampled.epsilon(sampled, left, adjacency, rest)


def mu_up_to(account: Account, delta: float, adjacency: Adjacency, may_fail: float = 0.0) -> float:
    """A mu for which the releases of a run together are mu-Gaussian up to delta; infinite if nothing is proved.

    Args:
      account: the releases or events.
      delta: the part of delta that the run may use beside its mu.
      adjacency: which data sets are neighbours.
      may_fail: the probability of a failure that the events do not know of, such as a minibatch without room.
    """
    parts = [part for part in _parts(account) if part.times]
    if math.isinf(_mu(parts)) or not all(part.noise.gaussian_factor for part in parts):
        return math.inf
    failures = sum(part.times for part in parts if part.noise.may_fail)
    sampled, rest = _split(parts, adjacency)
    may_fail += delta - concentrated.remaining(delta, failures)
    from sordino.privacy.accounting import cover

    return cover.mu_up_to(sampled, delta, adjacency, rest, may_fail=may_fail)


def remaining_delta(account: Account, delta: float) -> float:
    """What is left of delta beside the releases whose bound may fail; 0 or less if nothing is."""
    return concentrated.remaining(delta, sum(part.times for part in _parts(account) if part.noise.may_fail))


def allowed_mu(kinds: Sequence[type[NoiseEvent]], epsilon: float, delta: float, releases: int) -> float:
    """The largest mu of all releases together that keeps (epsilon, delta).

    Args:
      kinds: of the noise events.
      releases: how many of them may fail.
    """
    if not any(kind.is_concentrated for kind in kinds):
        return gaussian.mu(epsilon, concentrated.remaining(delta, releases)) / _largest_factor(kinds)
    return math.sqrt(2 * concentrated.rho_of(epsilon, delta, releases)) * (1 - 1e-11)


def epsilon_of_mu_squared(kinds: Sequence[type[NoiseEvent]], square: float, delta: float, releases: int) -> float:
    """The smallest proved epsilon of unsampled releases with this total mu squared.

    Args:
      kinds: of the noise events.
      releases: how many of them may fail.
    """
    if not any(kind.is_concentrated for kind in kinds):
        left = concentrated.remaining(delta, releases)
        return gaussian.epsilon(square**0.5 * _largest_factor(kinds), left) if left > 0 else math.inf
    return concentrated.epsilon(square / 2, delta, releases)


def _largest_factor(kinds: Sequence[type[NoiseEvent]]) -> float:
    return max((kind.gaussian_factor for kind in kinds), default=1.0)


def guess(account: Account, adjacency: Adjacency) -> float:
    """The largest probability of a right guess between two equally likely cases: (1 + delta at epsilon 0) / 2."""
    parts = [part for part in _parts(account) if part.times]
    total = _mu(parts)
    failure = sum(part.times for part in parts if part.noise.may_fail) * FAILURE
    if any(part.noise.is_concentrated for part in parts):
        return min(1.0, concentrated_guess(total) + failure / 2)
    sampled, rest = _split(parts, adjacency)
    if math.isinf(total):
        return 1.0
    if not sampled:
        return min(1.0, normal.upper_tail(-rest / 2) + failure / 2)
    from sordino.privacy.accounting import subsampled

    return min(1.0, (1 + subsampled.delta(sampled, 0.0, adjacency, rest) + failure) / 2)


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
            poisson = part.sampled.sampler is Sampler.POISSON
            if not (part.noise.gaussian_factor and (poisson or part.noise.is_gaussian)):
                raise SordinoError(
                    f"mechanism: there is no account of {part.noise.name} noise on a {part.sampled.sampler} sample; "
                    "use Gaussian noise."
                )
            ratio = terms * part.noise.mu * part.noise.gaussian_factor
            sampled.append(SampledGaussian(part.sampled.rate, ratio, part.times, part.sampled.sampler))
        else:
            rest.append(part)
    if sampled and not all(part.noise.gaussian_factor for part in rest if part.noise.mu):
        raise SordinoError("mechanism: beside releases about samples, there is an account of Gaussian noise only.")
    factors = ((part.noise.mu * (part.noise.gaussian_factor or 1.0), 1.0, part.times) for part in rest)
    return sampled, gaussian.mu_of(factors)


def coarse(rates: np.ndarray, most: int, *, attained: bool = False) -> np.ndarray:
    """Rates rounded up to a few values, so that many different clients need few accounts. A larger rate costs more.

    Args:
      rates: one rate per client.
      most: number of values.
      attained: each value is the largest of the rates that are rounded to it.

    Returns:
      One rate per client, none below its own.
    """
    if len(set(rates.tolist())) <= most:
        return rates
    edges = np.geomspace(rates.min(), rates.max(), most + 1)[1:]
    edges[-1] = rates.max()
    place = np.minimum(np.searchsorted(edges, rates), most - 1)
    if attained:
        edges = np.zeros(most)
        np.maximum.at(edges, place, rates)
    return np.asarray(edges[place])
