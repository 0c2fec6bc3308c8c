"""The second accountant: epsilon from the raw numbers of a certificate, without the code that calibrated the noise.

Where something is sampled, or the noise is discrete, dp-accounting does it. Where every release is Gaussian and nothing
is sampled, a closed form is exact (`_by_formula`, which needs only Python's own `math`; a test compares it with
dp-accounting).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.lazy import optional, scipy
from sordino.privacy.accounting import events
from sordino.privacy.accounting.samplers import Sampler

OF_INTEGERS = (events.DiscreteGaussian.name, events.SmoothedDiscreteGaussian.name)
RECOMPUTED = (events.Gaussian.name, *OF_INTEGERS)  # the mechanisms that are recomputed
LEAST_DELTA, MOST_LOSS = 1e-14, 300.0  # where the profile of an epoch of an allocation ends


class Step(NamedTuple):
    """One entry of a certificate's releases, as numbers."""

    std: float
    moved: float
    times: int
    rate: float
    sampler: Sampler
    mechanism: str

    @staticmethod
    def of(release: Mapping[str, Any]) -> Step:
        rate, sampler = float(release["rate"]), Sampler(release["sampler"])
        mechanism = str(release.get("mechanism", events.Gaussian.name))
        numbers = float(release["std"]), float(release["sensitivity"]), int(release["times"])
        step = Step(*numbers, rate, sampler, mechanism)
        if mechanism not in RECOMPUTED or release.get("integers"):
            raise SordinoError(f"certificate: there is no independent account of mechanism '{mechanism}'.")
        if not (step.std >= 0 and step.moved >= 0 and step.times >= 0 and 0 < rate <= 1):
            raise SordinoError("certificate: a release has a negative or undefined number.")
        if rate < 1 and sampler is Sampler.FULL:
            raise SordinoError(f"certificate: there is no account of sampler {sampler} at rate {rate:g}.")
        return step

    def rough(self, adjacency: Adjacency) -> float:
        """About the mu squared of the releases; it only serves to choose a grid."""
        square = (self.moved / self.std) ** 2 if self.moved else 0.0
        if self.sampler is Sampler.FIXED and self.rate < 1:
            square = math.expm1(min(square if adjacency is Adjacency.REPLACE_ONE else 4 * square, 50.0))
        return self.times * self.rate**2 * square


def epsilons(
    releases: Sequence[Mapping[str, Any]], deltas: tuple[float, ...], adjacency: Adjacency
) -> tuple[float, ...]:
    steps = tuple(map(Step.of, releases))
    return _accounted(steps, deltas, adjacency)


@lru_cache(256)  # for equal clients, and for a certificate that is read again
def _accounted(steps: tuple[Step, ...], deltas: tuple[float, ...], adjacency: Adjacency) -> tuple[float, ...]:
    """The epsilons by the formula where it is exact, and by dp-accounting elsewhere, which composes once for several
    deltas if one grid serves them."""
    if any(step.std == 0 and step.moved > 0 and step.times for step in steps):
        return (math.inf,) * len(deltas)
    rough = sum(step.rough(adjacency) for step in steps)
    if not rough:
        return (0.0,) * len(deltas)
    guesses = [_rough_epsilon(rough, delta) for delta in deltas]
    if any(step.mechanism == events.DiscreteGaussian.name for step in steps):
        return _by_concentration(steps, deltas)
    if any(step.mechanism in OF_INTEGERS for step in steps):
        # Integer noise is a function of Gaussian noise with a slightly smaller standard deviation.
        failure = sum(step.times for step in steps if step.mechanism in OF_INTEGERS) * 2.0**-64
        if min(deltas) <= failure:
            return (math.inf,) * len(deltas)
        steps, deltas = tuple(_smoothed(step) for step in steps), tuple(delta - failure for delta in deltas)
    if all(step.rate == 1 for step in steps):
        mu = math.sqrt(sum(step.times * (step.moved / step.std) ** 2 for step in steps if step.moved and step.times))
        return tuple(_by_formula(mu, delta) for delta in deltas)
    return tuple(
        float(_composed(steps, _interval(steps, guess), adjacency).epsilon(delta))
        for delta, guess in zip(deltas, guesses, strict=True)
    )


def _rough_epsilon(square: float, delta: float) -> float:
    """An upper bound, mu^2/2 + mu sqrt(2 log 1/delta), which is accurate enough to choose a grid."""
    return square / 2 + math.sqrt(2 * square * math.log(1 / delta))


class _Composition(NamedTuple):
    """What dp-accounting says of all releases together."""

    epsilon: Callable[[float], float]  # as a function of delta
    delta: Callable[[float], float]  # as a function of epsilon


@lru_cache(8)
def _composed(steps: tuple[Step, ...], interval: float, adjacency: Adjacency) -> _Composition:
    drawn = {step.sampler for step in steps if step.rate < 1}
    by_losses = _by_profiles if drawn & {Sampler.FIXED, Sampler.ALLOCATION} else _by_losses
    return by_losses(steps, interval, adjacency)


def right_guess(releases: Sequence[Mapping[str, Any]], delta: float, adjacency: Adjacency) -> float:
    """The largest chance of a right guess between two equally likely cases, by formulas of this file.

    It is (1 + TV) / 2. The total variation TV of N(mu, 1) and N(0, 1) is 2 Phi(mu/2) - 1. That of samples is delta at
    epsilon 0, which dp-accounting composes. Concentrated DP bounds it by Pinsker, and by Bretagnolle and Huber. It is
    not computed for allocation (0): the epsilons of an epoch's profile are chosen for small deltas.
    """
    steps = tuple(step for step in map(Step.of, releases) if step.moved and step.times)
    return _guessed(steps, delta, adjacency)


@lru_cache(256)  # as of `_accounted`
def _guessed(steps: tuple[Step, ...], delta: float, adjacency: Adjacency) -> float:
    if any(step.rate < 1 and step.sampler is Sampler.ALLOCATION for step in steps):
        return 0.0
    if any(step.std == 0 for step in steps):
        return 1.0
    failure = sum(step.times for step in steps if step.mechanism in OF_INTEGERS) * 2.0**-64
    square = sum(step.times * (step.moved / step.std) ** 2 for step in steps)
    if any(step.mechanism == events.DiscreteGaussian.name for step in steps):
        variation = min(math.sqrt(square) / 2, math.sqrt(-math.expm1(-square / 2)))
        return min(1.0, (1 + variation + failure) / 2)
    rough = sum(step.rough(adjacency) for step in steps)
    steps = tuple(_smoothed(step) for step in steps)
    if all(step.rate == 1 for step in steps):
        mu = math.sqrt(sum(step.times * (step.moved / step.std) ** 2 for step in steps))
        return min(1.0, math.erfc(-mu / math.sqrt(8)) / 2 + failure / 2)
    interval = _interval(steps, _rough_epsilon(rough, delta))
    return min(1.0, (1 + float(_composed(steps, interval, adjacency).delta(0.0)) + failure) / 2)


def _by_formula(mu: float, delta: float) -> float:
    """Epsilon of Gaussian releases whose squared ratios of sensitivity to noise add up to mu^2.

    They tell as much as one N(mu, 1) against N(0, 1) (Dong, Roth, Su 2022, corollary 3.3), for which delta =
    Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) exactly (Balle, Wang 2018, theorem 8). With
    t = epsilon/mu - mu/2 it is e^(-t^2/2) (W(t) - W(t + mu)), where W(t) = e^(t^2/2) Phi(-t) neither overflows nor
    underflows. Bisection finds epsilon, which is rounded up.
    """

    def scaled_tail(t: float) -> float:
        if t < 30:
            return math.exp(t * t / 2) * math.erfc(t / math.sqrt(2)) / 2
        return (1 - 1 / t**2 + 3 / t**4 - 15 / t**6) / (t * math.sqrt(2 * math.pi))  # the next term is below 2e-10

    def delta_at(epsilon: float) -> float:
        t = epsilon / mu - mu / 2
        if t < 0:  # the first term alone may underflow its scale
            return math.erfc(t / math.sqrt(2)) / 2 - math.exp(-t * t / 2) * scaled_tail(t + mu)
        return math.exp(-t * t / 2) * (scaled_tail(t) - scaled_tail(t + mu))

    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def _smoothed(step: Step) -> Step:
    """The Gaussian release that a release of integers is a function of: docs/secure-aggregation.md."""
    if step.mechanism not in OF_INTEGERS:
        return step
    if step.sampler is Sampler.FIXED:
        raise SordinoError("certificate: there is no account of integers on a sample of fixed size.")
    return step._replace(std=step.std / (1 + 2.0**-12), mechanism=events.Gaussian.name)


def _interval(steps: Sequence[Step], guess: float) -> float:
    """The step of the grid of losses: finer for small epsilon, because the relative error counts."""
    sampled = any(step.rate < 1 for step in steps)
    single = min(step.rate * step.moved / step.std for step in steps if step.moved)  # a small loss needs a finer grid
    interval = min(1e-2, max(1e-6, guess * 1e-4), single / 10 if sampled else 1e-2)
    # The grid must not have too many cells: one loss reaches about mu^2 / 2 + 10 mu.
    reach = max(step.moved / step.std for step in steps)
    return max(1e-6, interval, (reach**2 / 2 + 10 * reach) / 1e5)


def _by_losses(steps: Sequence[Step], interval: float, adjacency: Adjacency) -> _Composition:
    """By an accountant that composes privacy loss distributions."""
    dp = optional("dp_accounting", "verify", "sordino verify")
    from dp_accounting.pld import PLDAccountant

    sampled = any(step.rate < 1 for step in steps)
    # Its replace-one pair for sampled Gaussians is N(0) mixed with N(+1), against N(0) mixed with N(-1), per clip.
    replaced = sampled and adjacency is Adjacency.REPLACE_ONE
    relation = dp.NeighboringRelation.REPLACE_ONE if replaced else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    for step in steps:
        if step.moved and step.times:
            term = step.moved / 2 if replaced else step.moved
            event: Any = dp.GaussianDpEvent(step.std / term)
            if sampled:
                event = dp.PoissonSampledDpEvent(step.rate, event)
            accountant.compose(event, step.times)
    return _Composition(accountant.get_epsilon, accountant.get_delta)


def _by_profiles(steps: Sequence[Step], interval: float, adjacency: Adjacency) -> _Composition:
    """For samples of a fixed size, and for allocation: dp-accounting composes.

    A release is given by its privacy profile, delta at every epsilon. At epsilon >= 0 the profile is that of `one`
    pair, and at epsilon < 0 it follows from that of the `other` direction at -epsilon, because delta(epsilon) of (P, Q)
    is 1 - e^epsilon + e^epsilon delta(-epsilon) of (Q, P).
    """
    optional("dp_accounting", "verify", "sordino verify")
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    composed = None
    for step in steps:
        if not (step.moved and step.times):
            continue
        mu = step.moved / step.std
        if step.rate == 1:
            release = privacy_loss_distribution.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)
        elif step.sampler is Sampler.ALLOCATION:
            for rounds, epochs in _epochs(step):
                epoch = _of_epoch(step, rounds, interval, adjacency).self_compose(epochs)
                composed = epoch if composed is None else composed.compose(epoch)
            continue
        elif step.sampler is Sampler.POISSON:
            raise SordinoError("certificate: there is no account of two samplers in one run.")
        else:
            far = mu if adjacency is Adjacency.REPLACE_ONE else 2 * mu
            # The losses of points up to 12 standard deviations away; beyond them is far less mass than any delta.
            reach = math.log1p(step.rate * math.expm1(min(far * far / 2 + 12 * far, 700.0)))
            last = math.ceil(reach / interval)
            at = interval * np.arange(1, last + 1)
            profiles = [_profile(step.rate, far, 0.0)]  # replace-one: mu is the distance between two terms
            if adjacency is Adjacency.ADD_REMOVE:
                profiles = [_profile(step.rate, far, mu), _profile(step.rate, mu, 0.0)]
            values = [(profile(np.zeros(1)), profile(at)) for profile in profiles]
            pmfs = []
            for (at_zero, above), (_, other) in zip(values, reversed(values), strict=True):
                below = -np.expm1(-at) + np.exp(-at) * other
                deltas = np.clip(np.concatenate([below[::-1], at_zero, above]), 0.0, 1.0)
                pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas))
            release = privacy_loss_distribution.PrivacyLossDistribution(*pmfs)
        release = release.self_compose(step.times)
        composed = release if composed is None else composed.compose(release)
    assert composed is not None
    return _Composition(composed.get_epsilon_for_delta, composed.get_delta_for_epsilon)


def _profile(rate: float, far: float, near: float) -> Callable[[np.ndarray], np.ndarray]:
    """delta at every epsilon >= 0 of (1-q) N(0) + q N(far) against (1-q) N(0) + q N(near), where 0 <= near < far.

    The likelihood ratio exceeds e^epsilon beyond one point, which bisection finds to 1e-8. Delta is the largest value
    over all points, so its error is of second order.
    """

    def delta(epsilon: np.ndarray) -> np.ndarray:
        low, high = np.full(len(epsilon), (near + far) / 2), np.full(len(epsilon), far + 60.0 + 800.0 / far)
        for _ in range(36):
            x = (low + high) / 2
            first, second = (
                np.logaddexp(math.log1p(-rate), math.log(rate) + shift * x - shift * shift / 2) for shift in (far, near)
            )
            low, high = np.where(first - second < epsilon, x, low), np.where(first - second < epsilon, high, x)
        tails = [
            rate * scipy.special.ndtr(far - low),
            (1 - rate) * scipy.special.ndtr(-low),
            rate * scipy.special.ndtr(near - low),
        ]
        return np.asarray(tails[0] - np.expm1(epsilon) * tails[1] - np.exp(epsilon) * tails[2])

    return delta


def _epochs(step: Step) -> list[tuple[int, int]]:
    """(minibatches, number of epochs with so many): whole epochs, and the beginning of one."""
    bins = round(1 / step.rate)
    if abs(bins * step.rate - 1) > 1e-9:
        raise SordinoError(f"certificate: a rate of {step.rate:g} is not 1 over a whole number of minibatches.")
    return [(rounds, n) for rounds, n in ((bins, step.times // bins), (step.times % bins, 1)) if rounds and n]


def _of_epoch(step: Step, rounds: int, interval: float, adjacency: Adjacency) -> Any:
    """The privacy loss distribution of an epoch of an allocation, from its privacy profile."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    bins, replace = round(1 / step.rate), adjacency is Adjacency.REPLACE_ONE
    mu = step.moved / step.std / (2 if replace else 1)
    known = [_profile_of_epoch(bins, rounds, mu, way) for way in (("replace",) if replace else ("remove", "add"))]
    last = math.ceil(max(at[-1] for at, _ in known) / interval)
    at = interval * np.arange(last + 1)
    profiles = []
    for losses, deltas in known:
        ends = losses[-1] < MOST_LOSS and deltas[-1] < 1e-3 * LEAST_DELTA  # abruptly, where a spline would swing
        between = scipy.interpolate.PchipInterpolator if ends else scipy.interpolate.CubicSpline
        log_deltas = between(losses, np.log(np.maximum(deltas, 1e-40)))
        found = np.exp(log_deltas(np.minimum(at, losses[-1])))
        found *= max(values[0] for _, values in known) / deltas[0]  # both ways agree at 0, where a step would be mass
        profiles.append(np.where(at < losses[-1] + interval, found, 0.0))
    pmfs = []
    for own, other in zip(profiles, reversed(profiles), strict=True):
        below = -np.expm1(-at[1:]) + np.exp(-at[1:]) * other[1:]
        values = np.minimum.accumulate(np.clip(np.concatenate([below[::-1], own]), 0.0, 1.0))
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, values))
    return privacy_loss_distribution.PrivacyLossDistribution(*pmfs)


@lru_cache(256)  # for every delta, and for clients that differ in other releases
def _profile_of_epoch(bins: int, rounds: int, mu: float, way: str) -> tuple[list[float], list[float]]:
    """Epsilons from 0 on, and delta there. Its logarithm is smooth, so that few of them determine it everywhere.

    Chords between those few would be too high, by several percent of epsilon where it is large.
    """
    spread = math.sqrt(math.log1p(rounds * math.expm1(min(mu * mu, 50.0)) / bins**2)) * (1 + (way == "replace"))
    joins = way == "add" and rounds < bins
    end = math.log(bins / (bins - rounds)) if joins else MOST_LOSS  # of the losses
    at, deltas = [0.0], [_allocated(0.0, bins, rounds, mu, way)]
    while deltas[-1] > LEAST_DELTA and at[-1] < end:
        at.append(min(at[-1] + max(min(spread / 8, end / 16), at[-1] / 24), end))
        deltas.append(_allocated(at[-1], bins, rounds, mu, way))
    return at, deltas


def _allocated(epsilon: float, bins: int, rounds: int, mu: float, way: str) -> float:
    """delta at epsilon of an epoch: the mean positive part of a sum of one term per minibatch, over their number.

    An outcome has one number z per minibatch. P's density over that of standard normals is the mean over minibatches of
    exp(mu z - mu^2/2), or 1 (add), and Q's that of exp(-mu z - mu^2/2), or 1 (remove); minibatches that are not
    released count as 1. A term is P's share minus e^epsilon times Q's, under standard normals.

    Terms reach over many orders of magnitude, and a small delta is the mean of a sum that is rarely positive. Sums
    therefore lie on the cells s sinh(k h), which are even near 0 and in equal ratios elsewhere. The law of a sum of 2n
    terms comes from that of n by adding each pair of cells, without a Fourier transform, whose rounding errors are as
    large as 1e-16 e^epsilon. The last pair is not rounded to cells.
    """
    factor = math.exp(epsilon)
    ahead, behind = (mu if way != "add" else 0.0), (mu if way != "remove" else 0.0)
    z = np.linspace(-8.5 - behind, 8.5 + ahead, 1 << 13)
    weights = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    terms = np.exp(np.minimum(ahead * z - ahead**2 / 2, 600.0))
    terms = terms - factor * np.exp(np.minimum(-behind * z - behind**2 / 2, 600.0 - epsilon))
    rest = (bins - rounds) * (1 - factor)
    if rounds == 1:
        return min(1.0, float(weights @ np.maximum(terms + rest, 0.0)) / bins)
    # A term that exceeds what the others can take away, or take up, may be cut, and what is cut from its top added.
    most = {"remove": 30 * factor, "add": 2.0, "replace": 100 * factor}[way] * bins
    beyond = float(weights @ np.maximum(terms - most, 0.0))
    terms = np.clip(terms, -most, most)
    h = max(0.04, min(0.1, 0.05 * mu), 0.03 * mu)
    # The median of a share, or a share of P's that is hardly ever smaller: no finer cells are needed.
    usual = math.exp(max(-mu * mu / 2, mu * mu / 2 - 10 * mu))
    if way == "remove":
        spacing = max(min(mu, 1.0) * usual / 10, 0.2 * h * (factor - 1))
    elif way == "add":
        h, spacing = h / 2, min(mu, 1.0) * min(1.0, factor * usual) / 40
    else:
        spacing = 2 * min(mu, 1.0) * math.exp(epsilon / 2) * usual / 10
    scale = spacing / h
    top = 2 * (max(abs(terms[0]), abs(terms[-1])) + math.sqrt(rounds) * (factor - 1))
    half = 48 * math.ceil((math.asinh(top / scale) / h + 3) / 48)
    cells = 2 * half + 1
    places, shares = _shared(np.arcsinh(terms / scale) / h + half, cells)
    one = np.asarray(sum(np.bincount(places + k, weights * share, cells) for k, share in enumerate(shares)))
    few, more = np.eye(1, cells, half)[0], one  # the laws of sums of n and n + 1 terms, at first of none and one
    for bit in f"{rounds // 2:b}":
        between, same = _added(few, more, half, h), few if bit == "0" else more
        doubled = _added(same, same, half, h)
        few, more = (doubled, between) if bit == "0" else (between, doubled)
        scale *= math.sqrt(2)
    sums = scale * np.sinh(h * np.arange(-half, half + 1))
    total = float(few @ np.maximum(np.add.outer(sums, sums) + rest, 0.0) @ (more if rounds % 2 else few))
    return min(1.0, max(0.0, total + rounds * beyond) / bins)


def _added(law: np.ndarray, other: np.ndarray, half: int, h: float) -> np.ndarray:
    """The law of the sum of two numbers on cells, on cells whose scale is larger by the square root of 2."""
    first, second = _used(law, half, h), _used(other, half, h)
    places, shares = _pairs(half, h)
    masses = np.outer(law[first], other[second]).ravel()
    at = places[first, second].ravel()
    each = (np.bincount(at + k, masses * share[first, second].ravel(), len(law)) for k, share in enumerate(shares))
    return np.asarray(sum(each))


def _used(law: np.ndarray, half: int, h: float) -> slice:
    """The cells outside of which are too little mass, and too small a mean, for any delta."""
    sizes = np.abs(law) * np.maximum(1.0, np.sinh(h * np.arange(-half, half + 1)))
    kept = np.flatnonzero(sizes > 1e-6 * LEAST_DELTA)
    return slice(int(kept[0]), int(kept[-1]) + 1)


@lru_cache(4)
def _pairs(half: int, h: float) -> tuple[np.ndarray, np.ndarray]:
    """Per pair of cells, the first of the four cells around their sum, and the shares of the four."""
    values, cells = np.sinh(h * np.arange(-half, half + 1)), 2 * half + 1
    return _shared(np.arcsinh(np.add.outer(values, values) / math.sqrt(2)) / h + half, cells)


def _shared(at: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """The first of the four cells around each place, and their shares, which interpolate cubic functions exactly."""
    first = np.clip(np.floor(at).astype(np.int32) - 1, 0, cells - 4)
    t = np.clip(at - first, 0.0, 3.0)
    shares = [(1 - t) * (2 - t) * (3 - t) / 6, t * (2 - t) * (3 - t) / 2, t * (t - 1) * (3 - t) / 2]
    return first, np.stack([*shares, t * (t - 1) * (t - 2) / 6])


def _by_concentration(steps: Sequence[Step], deltas: Sequence[float]) -> tuple[float, ...]:
    """Epsilons for discrete noise: zero-concentrated DP, and 2^-64 of delta per release for bounds that may fail."""
    dp = optional("dp_accounting", "verify", "sordino verify")
    from dp_accounting.rdp import RdpAccountant

    if any(step.rate < 1 for step in steps):
        raise SordinoError("certificate: discrete noise on a sample is accounted for as smoothed-discrete-gaussian.")
    rho = sum(step.times * (step.moved / step.std) ** 2 / 2 for step in steps)
    orders = 1 + np.geomspace(1e-3, 1e6, 4000)
    accountant = RdpAccountant(orders)
    accountant.compose(dp.ZCDpEvent(rho))
    failure = sum(step.times for step in steps) * 2.0**-64
    return tuple(float(accountant.get_epsilon(d - failure)) if d > failure else math.inf for d in deltas)
