"""The independent re-check of a certificate.

Epsilon is recomputed from the raw numbers without the code that calibrated the noise. Where something is sampled, or
the noise is discrete, dp-accounting does it. Where every release is Gaussian and nothing is sampled, a closed form is
exact (`_by_formula`, which needs only Python's own `math`; a test compares it with dp-accounting). The raw numbers must
also follow from the unit, adjacency, trust, clip and noise
that the certificate states. Agreement shows that the numbers are consistent. Only the signature shows who wrote them
and that they belong to an actual run, and only to a reader who knows whose key it is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sordino.core import PERSON_CHOICES, SAMPLED, SEMIDEFINITE, Adjacency, Clipping, Divisor, Kind, Query, Trust, Unit
from sordino.errors import SordinoError
from sordino.evidence import signing, streams
from sordino.evidence.certificate import (
    ALL_TAKE_PART,
    CERTIFICATE_FORMAT,
    DELTAS,
    GUESSABLE,
    MOST_LISTED_CLIENTS,
    MOST_LISTED_ROUNDS,
    NO_AMPLIFICATION,
    OF_MINIBATCHES,
    PUBLIC,
    SECRET,
    TUNING,
    amplification,
    amplifies,
    assumptions_of,
    listed,
    numerics_of,
)
from sordino.evidence.form import misfits
from sordino.evidence.signing import code_sha256
from sordino.lazy import optional, scipy
from sordino.privacy.accounting import events, gaussian
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.mechanisms import discrete_gaussian, mask_graph
from sordino.privacy.mechanisms.quantization import LEAST_STEP_VARIANCE
from sordino.privacy.participation import FULL, Participation, Sampling
from sordino.privacy.plan import MOST_ROUNDS

GUESS_TOLERANCE = 1e-3  # relative, on the chance of a right guess: both grids of losses err upwards
OF_INTEGERS = (events.DiscreteGaussian.name, events.SmoothedDiscreteGaussian.name)
RECOMPUTED = (events.Gaussian.name, *OF_INTEGERS)  # the mechanisms that are recomputed
BY_CLIP, BY_LEMMA = "by clip", "by lemma: "  # what a sensitivity follows from, as certificates say it
MOST_BELOW = 0.005  # relative: how far a claimed epsilon may lie below the other accountant's
NEGLIGIBLE = 1e-12  # with which an honest certificate of a drawn schedule is called too cheap
RUNS = re.compile(r"Tuning: paid for: (\d+) runs within the one budget")  # as `private_tuning` writes it
MOST_SEARCHED_ROUNDS = 100 * MOST_ROUNDS  # a search for settings counts the rounds of all its runs
MOST_MISFITS = 20  # that are told
NOT_SIGNED = "who wrote it: it is not signed"
MOST_ABOVE = 0.01  # relative: how far it may lie above; both are upper bounds
MOST_ABOVE_ALLOCATION = 0.1  # the same for allocation, whose account has wide cells where there is little noise
LEAST_DELTA, MOST_LOSS = 1e-14, 300.0  # where the profile of an epoch of an allocation ends


class Verdict(NamedTuple):
    """The result of `verify`."""

    problems: list[str]
    claimed: float
    recomputed: float
    certified: bool
    assumed: list[str]  # sensitivities that do not follow from a clip: taken from the certificate
    gaps: list[str]  # what could not be checked
    signed: str = ""  # who signed it; empty if nobody did
    known: bool = False  # the reader named this key


def verify(cert: Mapping[str, Any], key: str | None = None) -> Verdict:
    """Recompute every epsilon from the raw numbers with a second accountant, and check the signature.

    Args:
        cert: The contents of certificate.json.
        key: Who must have signed it: a public key, its fingerprint, or a file with either.

    Returns:
        A verdict: whether the certificate holds, and the problems found.

    Raises:
        SordinoError: The certificate has an unknown format, or a field that nothing can be computed from.

    Example:
        >>> import sordino as so
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=5, sizes=(100,) * 4, privacy=so.Privacy(epsilon=2.0))
        >>> verdict = verify(so.certificate(plan, so.source(None), version=so.__version__))
        >>> round(verdict.recomputed, 3)
        2.0
    """
    problems: list[str] = []
    gaps: list[str] = []
    try:
        if cert["format"] != CERTIFICATE_FORMAT:
            raise SordinoError(
                f"certificate: its format is {cert['format']}; this version reads format {CERTIFICATE_FORMAT}."
            )
        problems.extend(itertools.islice(misfits(cert), MOST_MISFITS))
        given, cert = cert, _with_bounds(cert)
        _check_extent(cert)
        delta, claimed = float(cert["delta"]), _limitless(cert["epsilon"])
        recomputed = 0.0
        adjacency = Adjacency(cert["adjacency"])
        deltas = (delta, *map(float, cert["epsilon_at"]))
        above = gaps if _allocates(cert) else None
        epsilons_of_groups = [_epsilons(group["releases"], deltas, adjacency) for group in cert["groups"]]
        for group, (epsilon, *_) in zip(cert["groups"], epsilons_of_groups, strict=True):
            recomputed = max(recomputed, epsilon)
            _compare(f"clients {group['clients']}", _limitless(group["epsilon"]), epsilon, problems, above)
        _compare("the worst client", claimed, recomputed, problems, above)
        for k, (at, value) in enumerate(cert["epsilon_at"].items(), 1):
            worst = max(epsilons[k] for epsilons in epsilons_of_groups)
            _compare(f"epsilon at delta {at}", _limitless(value), worst, problems, above)
        _check_bounds(cert, problems)
        _check_integers(cert, problems)
        _check_claims(cert, claimed, problems)
        _check_ranges(cert, problems)
        _check_site(cert, problems)
        _check_words(cert, problems, gaps)
        by = _check_signature(given, key, problems)
        assumed = _assumed_sensitivities(cert)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SordinoError) and not problems:
            raise
        raise malformed(ValueError(problems[0]) if problems else error) from None
    except MemoryError:
        raise SordinoError("certificate: to compute it again takes more memory than there is.") from None
    gaps += [] if by else [NOT_SIGNED]
    return Verdict(problems, claimed, recomputed, bool(cert["certified"]), assumed, gaps, by, bool(by and key))


def _with_bounds(cert: Mapping[str, Any]) -> Mapping[str, Any]:
    """The certificate with infinite bounds where it has null, as in a run without noise and without a clip."""
    queries = [{**query, "clip": _limitless(query["clip"])} for query in cert["queries"]]
    groups = [
        {**group, "releases": [{**r, "sensitivity": _limitless(r["sensitivity"])} for r in group["releases"]]}
        for group in cert["groups"]
    ]
    return {**cert, "clip": _limitless(cert["clip"]), "queries": queries, "groups": groups}


def _check_extent(cert: Mapping[str, Any]) -> None:
    """Refuse numbers of clients, rounds and releases that no run has: a short text could keep a reader busy for days.

    Raises:
        SordinoError: One of them is too large.
    """
    clients, rounds = int(cert["clients"]), int(cert["rounds"])
    streamed = [int(query["factor"]["rounds"]) for query in cert["queries"] if "factor" in query]
    listed_rounds = clients * rounds if any("rounds" in group for group in cert["groups"]) else 0
    times = [int(release["times"]) for group in cert["groups"] for release in group["releases"]]
    for what, number, most in (
        ("clients", clients, MOST_LISTED_CLIENTS),
        ("rounds", rounds, MOST_SEARCHED_ROUNDS),
        ("rounds of a stream", max(streamed, default=0), MOST_ROUNDS),
        ("clients times rounds", listed_rounds, MOST_LISTED_ROUNDS),
        ("releases of one kind", max(times, default=0), 10 * MOST_SEARCHED_ROUNDS),
    ):
        if number > most:
            raise SordinoError(f"certificate: it has {number:,} {what}; at most {most:,} are read.")


def malformed(error: Exception) -> SordinoError:
    """The error for a document that lacks what a certificate has."""
    remedy = "name a certificate.json that sordino wrote"
    if isinstance(error, KeyError):
        return SordinoError(f"certificate: the field {error} is missing, so this is no certificate; {remedy}.")
    return SordinoError(f"certificate: a field has a wrong value ({error}); {remedy}.")


def _check_signature(cert: Mapping[str, Any], key: str | None, problems: list[str]) -> str:
    """Who signed the certificate; empty if nobody did."""
    about = cert.get("signature")
    if about is None:
        if key is not None:
            problems.append("it is not signed, but --key names who should have signed it")
        return ""
    if why := signing.broken(cert):
        problems.append(why)
    public = str(about["key"])
    print_of_key = signing.fingerprint(public)
    if key is not None and not {public, print_of_key} & set(signing.known_keys(key)):
        problems.append(f"it was signed by {about['signer']} {print_of_key}, but --key names another key")
    return f"{about['signer']} {print_of_key}"


def _compare(what: str, claimed: float, recomputed: float, problems: list[str], gaps: list[str] | None = None) -> None:
    """Note where an epsilon lies too far below or above the other accountant's.

    gaps: of allocation. Its account may be far above the other one where there is little noise, which is no mistake.
    """
    if claimed == recomputed:  # both infinite, or both zero
        return
    apart, unit = claimed - recomputed, max(abs(recomputed), 1e-6)
    told = f"{what}: {claimed:.6g} is claimed, but the raw numbers give {recomputed:.6g}"
    most = MOST_ABOVE if gaps is None else MOST_ABOVE_ALLOCATION
    if not apart >= -MOST_BELOW * unit:
        problems.append(told)
    elif not apart <= most * unit:
        (problems if gaps is None else gaps).append(told)


def _allocates(cert: Mapping[str, Any]) -> bool:
    return any(r["sampler"] == Sampler.ALLOCATION for group in cert["groups"] for r in group["releases"])


def _epsilons(
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


def _right_guess(releases: Sequence[Mapping[str, Any]], delta: float, adjacency: Adjacency) -> float:
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


def _check_bounds(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the releases follow from unit, adjacency, trust, clip and each client's noise."""
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    only_sums_visible = trust is not Trust.UNTRUSTED_SERVER
    several = _clients_of_a_person(cert, problems)
    several = several if only_sums_visible else math.sqrt(several)
    for query in cert["queries"]:
        gather = math.sqrt(_senders(cert, query)) if only_sums_visible else 1.0
        name, kind, clip = query["query"], Kind(query["query"].split()[-1]), float(query["clip"])
        rows = [(g, r) for g in cert["groups"] for r in g["releases"] if r["query"] == name]
        if query["bound"] != BY_CLIP and not str(query["bound"]).startswith(BY_LEMMA):
            problems.append(f"{name}: a bound is '{BY_CLIP}' or '{BY_LEMMA}' and its name, not '{query['bound']}'")
        _check_clipping(query, kind, clip, problems)
        if query["stream"] and streams.stated(cert, query):
            streams.check(cert, query, problems)
            for group in cert["groups"]:
                if (
                    not any(r["query"] == name for r in group["releases"])
                    and streams.factor_of(cert, query, group).times
                ):
                    problems.append(f"clients {group['clients']}: they took part in {name} and paid nothing for it")
        if unit is Unit.CLIENT and kind is not Kind.DELTA:
            problems.append(f"{name}: at client level the whole message must be noised, not an answer")
        if rows and max(int(r["times"]) for _, r in rows) > int(cert["rounds"]) * int(query["calls"]):
            problems.append(f"{name}: it is released more often than {cert['rounds']} rounds allow")
        for group, release in rows:
            low, high = _span(group["influence"][name])
            least_std, most_std = _span(group["own_std"][name])
            std = float(release["std"])
            # In a sum, a client's noise has the same weight as its data, and the noise of the whole cohort adds up.
            weights = (low * gather, high * gather) if only_sums_visible else (1.0, 1.0)
            if not (_near(std, least_std * weights[1]) and _near(std, most_std * weights[0])):
                problems.append(
                    f"{name}: the visible noise under {trust} is not {std:.6g} if a client adds {least_std:.6g}"
                )
            if query["semidefinite"] and kind not in SEMIDEFINITE:
                problems.append(f"{name}: terms of kind {kind} are not semi-definite")
            elif query["bound"] == BY_CLIP and (not query["stream"] or streams.stated(cert, query)):
                bound = Query(kind, clip, psd=query["semidefinite"]).sensitivity(adjacency, unit) * several
                sampled = float(release["rate"]) < 1
                separate = (Sampler.POISSON, Sampler.ALLOCATION)
                apart = sampled and query["semidefinite"] and release["sampler"] in separate
                apart = apart and adjacency is Adjacency.REPLACE_ONE
                joint = (int(query["joint"]) if sampled else 1) * (2 if apart else 1)
                # A sample's terms are rounded one by one, because a replaced one is also compared with none.
                terms = bound / clip if sampled and adjacency is Adjacency.REPLACE_ONE else 1.0
                moved = bound / terms * (high if only_sums_visible else 1.0)
                expected = terms * _after_rounding(cert, query, moved) * math.sqrt(joint)
                factor = streams.factor_of(cert, query, group) if query["stream"] else streams.Factor(1.0, 0.0, 0)
                expected *= factor.value
                if query["stream"] and int(release["times"]) != factor.times:
                    problems.append(f"{name}: it is accounted {release['times']} times, not {factor.times}")
                if not _near(float(release["sensitivity"]), expected, factor.above):
                    problems.append(
                        f"{name}: the sensitivity is {release['sensitivity']:.6g}, but clip {clip:g}, {unit} level and "
                        f"{adjacency} make it {expected:.6g}"
                    )
            _check_rate(cert, query, group, release, problems)
    _check_rounds(cert, problems)
    _check_totals(cert, problems)


def _check_clipping(query: Mapping[str, Any], kind: Kind, clip: float, problems: list[str]) -> None:
    """Check that the law of clipping, if one is named, is known, is for gradients, and keeps to the clip."""
    if "clipping" not in query:
        return
    try:
        law = Clipping.parse(str(query["clipping"]))
    except SordinoError as error:
        problems.append(f"{query['query']}: {error}")
        return
    length = math.hypot(*law.bounds(clip, len(law.layers) or 1))
    if kind is not Kind.GRADIENT or query["bound"] != BY_CLIP or not _near(length, clip):
        problems.append(f"{query['query']}: {law} is no way to bound it by a clip")


def _clients_of_a_person(cert: Mapping[str, Any], problems: list[str]) -> float:
    """The declared number of clients of one person; 1 where persons are not the unit."""
    person = cert.get("person")
    if (person is not None) != (cert["unit"] == Unit.PERSON):
        problems.append("the field person must be there at person level, and only there")
    if person is None:
        return 1.0
    if not (int(person["records"]) >= 1 and int(person["clients"]) >= 1):
        problems.append("person: the numbers of records and clients must be at least 1")
    sampled = any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"])
    if int(person["clients"]) > 1 and (sampled or cert.get("secure")):
        problems.append("person: there is no account of minibatches, or of integers, for a person at several clients")
    return float(person["clients"])


def _check_integers(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check the fields about sums of integers: all or none, enough noise, and the figures beside epsilon."""
    secure, releases = cert.get("secure"), [r for g in cert["groups"] for r in g["releases"]]
    marks = [r.get("mechanism") in OF_INTEGERS for r in releases] + [
        float(q.get("step", 0)) > 0 for q in cert["queries"]
    ]
    if any(mark != bool(secure) for mark in marks):
        problems.append("some fields describe sums of integers and others do not")
        return
    by_group = [listed(group["releases"]) for group in cert["groups"]]
    adjacency = Adjacency(cert["adjacency"])
    recomputed = max(_right_guess(group["releases"], float(cert["delta"]), adjacency) for group in cert["groups"])
    least = max(events.guess(releases, adjacency) for releases in by_group) * (1 - 1e-6)
    if float(cert["guess"]) < max(least, recomputed * (1 - GUESS_TOLERANCE)):
        problems.append(f"the chance {cert['guess']:.4g} of a right guess does not follow from the releases")
    if not secure:
        return
    if cert["trust"] != Trust.SECURE_AGGREGATION:
        problems.append(f"integers need the trust model secure-aggregation, not {cert['trust']}")
    _check_masks(cert, secure, problems)
    more = math.sqrt((int(cert["clients"]) - int(secure["dropouts"])) / int(secure["honest"]))
    without_colluders = [[{**r, "std": more * float(r["std"])} for r in g["releases"]] for g in cert["groups"]]
    against_server = max(_epsilons(each, (float(cert["delta"]),), adjacency)[0] for each in without_colluders)
    _compare("epsilon against the server alone", _limitless(secure["epsilon_server"]), against_server, problems)
    for query in cert["queries"]:
        name, step = query["query"], float(query["step"])
        least = min(_span(g["own_std"][name])[0] * _span(g["influence"][name])[0] for g in cert["groups"])
        if not (least / step) ** 2 >= LEAST_STEP_VARIANCE * (1 - 1e-6):
            problems.append(f"{name}: noise of {least / step:.3g} steps is too small for its account")


def _check_masks(cert: Mapping[str, Any], secure: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the graph of masks, where there is one, is as dense as the dropouts and colluders need it."""
    sites = int(cert["clients"])
    if not mask_graph.ALL_PAIRS < sites <= mask_graph.MOST_SITES:
        if "masks" in secure:
            problems.append(f"{sites} sites share masks with all others, and a graph of masks is named")
        return
    try:
        needed = asdict(mask_graph.parameters(sites, int(secure["dropouts"]), int(secure["colluders"])))
    except SordinoError as error:
        problems.append(str(error))
        return
    if secure.get("masks") != needed:
        problems.append(f"the graph of masks is {secure.get('masks')}, and {needed} is needed")


def _after_rounding(cert: Mapping[str, Any], query: Mapping[str, Any], moved: float) -> float:
    """The sensitivity after random rounding to integers; the bound fails with chance at most 2^-80."""
    secure, step = cert.get("secure"), float(query.get("step", 0.0))
    if secure is None:
        return moved
    if not step > 0 or any(r.get("mechanism") not in OF_INTEGERS for g in cert["groups"] for r in g["releases"]):
        raise SordinoError("certificate: sums of integers need a step above 0 and a mechanism of integers.")
    row = streams.least_row(query) if query["stream"] else 1.0  # what is rounded are rows of the encoded stream
    return step * discrete_gaussian.rounded(row * moved / step, int(query["dimension"])) / row


class _Paid(NamedTuple):
    """The rounds that each client of a group paid for."""

    least: int
    exact: bool  # a stream is one release of all rounds of its stage, so that their number is at least one


def _check_rounds(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check how often each client pays against the rounds of the run and who takes part in them.

    All rounds count for every client where all take part, or where sampling hides who did. Under `cyclic` they follow
    from a client's number. A drawn schedule is not in the certificate: under `fixed` as many clients as stated pay for
    each round, and no client, nor all together under `poisson`, may have paid for far fewer rounds than are likely.
    """
    runs, rounds, clients = _runs(cert), int(cert["rounds"]), int(cert["clients"])
    law, hidden = Participation.parse(cert["sampler"]["clients"]), _hides_clients(cert)
    if rounds % runs:
        problems.append(f"{rounds} rounds are not the same number in each of {runs} runs")
    total, members, exact = 0, 0, True
    for group in cert["groups"]:
        who, paid = f"clients {group['clients']}", _paid(cert, group, runs, problems)
        total, members = total + int(group["count"]) * paid.least, members + int(group["count"]) * bool(paid.least)
        exact &= paid.exact
        if hidden or law.kind == FULL:
            due = {rounds}
        elif law.kind == "cyclic":
            phases = _phases(_spans_of(group["clients"]), int(law.amount))
            due = {runs * len(range(phase, rounds // runs, int(law.amount))) for phase in phases}
        else:
            rate, chance = law.rate(clients), NEGLIGIBLE / clients
            if paid.exact and _unlikely(paid.least / runs, rounds // runs, rate, chance):
                problems.append(
                    f"{who}: they paid for {paid.least} rounds of {rounds}, too few for {law} participation"
                )
            continue
        if any(paid.least > each or (paid.exact and paid.least < each) for each in due):
            problems.append(
                f"{who}: they paid for {paid.least} rounds of {rounds}, but {law} participation makes it "
                f"{' or '.join(map(str, sorted(due)))}"
            )
    if hidden or law.kind not in ("fixed", "poisson"):
        return
    told = f"all clients together paid for {total} places in {rounds} rounds"
    if law.kind == "fixed":
        due_in_all = int(law.amount) * rounds
        if (exact and total < due_in_all) or (rounds and members < law.amount):  # to pay for more is no loss of privacy
            problems.append(f"{told}, but {law} participation makes it {due_in_all}")
    elif exact and _unlikely(total / runs, clients * (rounds // runs), law.amount, NEGLIGIBLE):
        problems.append(f"{told}, too few for {law} participation")


def _paid(cert: Mapping[str, Any], group: Mapping[str, Any], runs: int, problems: list[str]) -> _Paid:
    """What each client of a group paid for. All queries of a stage are asked in the same rounds."""
    stages: dict[str, tuple[set[int], set[int]]] = {}
    for query in cert["queries"]:
        name = query["query"]
        counted, streamed = stages.setdefault(name.split(".")[0], (set(), set()))
        rows = [r for r in group["releases"] if r["query"] == name]
        if len(rows) > 1:
            problems.append(f"clients {group['clients']}: query {name} has {len(rows)} entries, and one is needed")
        times, drawn = sum(int(r["times"]) for r in rows), any(float(r["rate"]) < 1 for r in rows)
        if query["stream"] and not drawn:
            streamed.add(times)
            continue
        each = max(int(query["calls"]) // (int(query["joint"]) if drawn else 1), 1)
        counted.add(times // each)
        if times % each:
            problems.append(f"clients {group['clients']}: {times} releases of {name} are no whole number of rounds")
    for stage, (counted, streamed) in stages.items():
        if len({bool(times) for times in counted | streamed}) > 1 or len(counted) > 1 or not streamed <= {0, runs}:
            problems.append(f"clients {group['clients']}: they did not pay alike for all queries of stage {stage}")
    least = sum(min(counted) if counted else max(streamed) for counted, streamed in stages.values())
    exact = all(counted or streamed == {0} for counted, streamed in stages.values())
    if unknown := {r["query"] for r in group["releases"]} - {query["query"] for query in cert["queries"]}:
        problems.append(f"clients {group['clients']}: they paid for {min(unknown)}, which is no query of this run")
    return _Paid(least, exact)


def _spans_of(text: str) -> list[tuple[int, int]]:
    """The first and last client of each part of '0-4, 7'."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ") if part]
    return [(span[0], span[-1]) for span in spans]


def _phases(spans: Sequence[tuple[int, int]], step: int) -> set[int]:
    """The remainders of the clients' numbers."""
    return {number % step for low, high in spans for number in range(low, min(high, low + step - 1) + 1)}


def _runs(cert: Mapping[str, Any]) -> int:
    """How many runs a certificate counts together, with the same schedule: more than one for a search for settings."""
    told = [RUNS.search(fact) for fact in cert["assumes"]]
    return max([int(found.group(1)) for found in told if found and cert.get("epsilon_asked") is None], default=1)


def _hides_clients(cert: Mapping[str, Any]) -> bool:
    """Whether sampling hides which clients took part, so that all of them pay for every round."""
    return any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"]) and cert["unit"] == Unit.CLIENT


def _unlikely(count: float, draws: int, rate: float, chance: float) -> bool:
    """Whether so few of independent draws succeed with a smaller probability than `chance`.

    By the bound of Chernoff: P[Bin(n, p) <= k] <= e^(-n KL(k/n, p)) for k below np. So an honest number is called
    unlikely with a smaller probability than `chance`.
    """
    if count >= draws * rate:
        return False
    if rate >= 1:
        return True
    part = count / draws
    divergence = (1 - part) * (math.log1p(-part) - math.log1p(-rate))
    divergence += part * math.log(part / rate) if part else 0.0
    return draws * divergence > -math.log(chance)


def _check_rate(
    cert: Mapping[str, Any],
    query: Mapping[str, Any],
    group: Mapping[str, Any],
    release: Mapping[str, Any],
    problems: list[str],
) -> None:
    """Check a rate below 1: it must be the rate of the sampler for the smallest client of the group, and sampling must
    give privacy at all. A whole message is about a minibatch only by a lemma, which is proved for Poisson sampling."""
    rate, sampler, unit = float(release["rate"]), str(release["sampler"]), Unit(cert["unit"])
    if rate == 1:
        return
    name, kind = query["query"], Kind(query["query"].split()[-1])
    by_lemma = kind is Kind.DELTA and query["bound"].endswith(OF_MINIBATCHES) and sampler == Sampler.POISSON
    if unit.sizes_public and (kind in SAMPLED or by_lemma):
        law = Sampling.parse(cert["sampler"]["records"])
        least, ran = float(law.rates(np.array([float(group["records"][0])]))[0]), law.kind
    elif unit is Unit.CLIENT and cert["trust"] == Trust.TRUSTED_SERVER:
        least, ran = float(cert["cohort"]) / int(cert["clients"]), cert["sampler"]["clients"].partition(":")[0]
        lightest = min(_span(each["influence"][name])[0] for each in cert["groups"])
        if sampler == Sampler.FIXED and not _near(lightest, 1.0):
            problems.append(f"{name}: there is no account of cohorts of a fixed size whose clients weigh differently")
    else:
        problems.append(
            f"{name}: a rate below 1 is claimed, but sampling gives no privacy at {unit} level under {cert['trust']}"
        )
        return
    if sampler != ran:
        problems.append(f"{name}: the account is for {sampler} sampling, but the run used {ran} sampling")
    if rate < least * (1 - 1e-9):
        problems.append(f"{name}: a rate of {rate:.6g} is claimed, but the sampler draws at {least:.6g}")


def _mu(releases: Sequence[Mapping[str, Any]]) -> float:
    moved = [(float(r["sensitivity"]), float(r["std"]), int(r["times"])) for r in releases]
    return gaussian.mu_of(moved)


def _check_totals(cert: Mapping[str, Any], problems: list[str]) -> None:
    groups, first = cert["groups"], cert["queries"][0]
    for group in groups:
        if not _near(_limitless(group["mu"]), _mu(group["releases"])):
            problems.append(f"clients {group['clients']}: mu {group['mu']} does not follow from the releases")
    worst = max(groups, key=lambda group: _limitless(group["epsilon"]))
    if not _near(_limitless(cert["mu"]), _mu(worst["releases"])):
        problems.append(f"mu {cert['mu']} is not the mu of the worst client")
    if sum(int(g["count"]) for g in groups) != int(cert["clients"]):
        problems.append("the groups do not add up to the number of clients")
    _check_members(cert, problems)
    cohort = Participation.parse(cert["sampler"]["clients"]).rate(int(cert["clients"])) * int(cert["clients"])
    if not _near(float(cert["cohort"]), cohort):
        problems.append(
            f"a cohort of {cert['cohort']:.6g} is claimed, but {cert['sampler']['clients']} makes it {cohort:.6g}"
        )
    for name in (query["query"] for query in cert["queries"]):
        if not _near(max(_span(g["influence"][name])[1] for g in groups), 1.0):
            problems.append(f"{name}: no client has the influence 1, which all others are measured by")
    sizes = [g["records"] for g in groups]
    if cert["records"] is not None:
        low, high = (sum(int(g["count"]) * size[k] for g, size in zip(groups, sizes, strict=True)) for k in (0, 1))
        if not low <= int(cert["records"]) <= high:
            problems.append(f"{cert['records']} records are claimed, but the groups have {low} to {high}")
    if float(cert["clip"]) != float(first["clip"]):
        problems.append(f"clip {cert['clip']:g} is claimed, but the first query has {first['clip']:g}")
    spans = [_span(g["own_std"][first["query"]]) for g in groups]
    most = max(high for _, high in spans) / float(first["clip"])
    if not _near(float(cert["client_noise"]), most):
        problems.append(f"client noise {cert['client_noise']:.6g} is claimed, but the groups have {most:.6g}")
    low, high = (
        math.sqrt(
            _senders(cert, first)
            * sum(int(g["count"]) * s[k] ** 2 for g, s in zip(groups, spans, strict=True))
            / int(cert["clients"])
        )
        / float(first["clip"])
        for k in (0, 1)
    )
    if not low * (1 - 1e-6) <= float(cert["noise"]) <= high * (1 + 1e-6):
        problems.append(f"noise {cert['noise']:.6g} is claimed, but the groups have {high:.6g}")


def _check_members(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the groups name each client once, and state sizes and a worst client that fit."""
    groups = cert["groups"]
    spans = sorted(span for group in groups for span in _spans_of(group["clients"]))
    ends = [-1, *(high for _, high in spans)]
    follow = all(low == before + 1 and high >= low for (low, high), before in zip(spans, ends, strict=False))
    counts = [sum(high - low + 1 for low, high in _spans_of(group["clients"])) for group in groups]
    if not follow or ends[-1] != int(cert["clients"]) - 1 or counts != [int(group["count"]) for group in groups]:
        problems.append(f"the groups do not name each of {cert['clients']} clients once")
    for group, count in zip(groups, counts, strict=True):
        if (sizes := group.get("sizes")) is None:
            continue
        if list(map(int, group["records"])) != [min(sizes), max(sizes)] or len(sizes) not in (1, count):
            problems.append(f"clients {group['clients']}: {group['records']} records do not follow from their sizes")
    if cert["records"] is not None and all(group.get("sizes") for group in groups):
        total = sum(
            sum(g["sizes"]) * (count if len(g["sizes"]) == 1 else 1) for g, count in zip(groups, counts, strict=True)
        )
        if total != int(cert["records"]):
            problems.append(f"{cert['records']} records are claimed, but the sizes add up to {total}")
    most = max(_limitless(group["epsilon"]) for group in groups)
    named = int(cert["worst_client"])
    of_it = [g for g in groups if any(low <= named <= high for low, high in _spans_of(g["clients"]))]
    if not of_it or _limitless(of_it[0]["epsilon"]) < most * (1 - 1e-6):
        problems.append(f"client {named} is called the worst one, but another one has a larger epsilon")


def _senders(cert: Mapping[str, Any], query: Mapping[str, Any]) -> float:
    """The number of clients whose noise a round adds up; all clients for a common stream."""
    if secure := cert.get("secure"):
        honest = int(cert["clients"]) - int(secure["dropouts"]) - int(secure["colluders"])
        if honest != int(secure["honest"]) or honest < 2 or min(secure["dropouts"], secure["colluders"]) < 0:
            raise SordinoError(
                "certificate: the number of honest sites does not follow from clients, dropouts and colluders."
            )
        return float(honest)
    common = query.get("carried", query["stream"]) and cert["trust"] != Trust.UNTRUSTED_SERVER
    return float(cert["clients"] if common else cert["cohort"])


def _assumed_sensitivities(cert: Mapping[str, Any]) -> list[str]:
    """The sensitivities that do not follow from a clip, which this check takes from the certificate."""
    of_schedule = {q["query"] for q in cert["queries"] if q["stream"] and not streams.stated(cert, q)}
    law = Participation.parse(cert["sampler"]["clients"])
    drawn = law.kind in ("fixed", "poisson") and law.rate(int(cert["clients"])) < 1 and not _hides_clients(cert)
    schedule = [f"how often each client took part: {law} participation was drawn, and its seed is not in it"] * drawn
    return schedule + [
        f"the sensitivity of query {name}, which follows from "
        + ("a schedule" if name in of_schedule else query["bound"].removeprefix("by "))
        for name, query in ((query["query"], query) for query in cert["queries"])
        if name in of_schedule or query["bound"] != BY_CLIP
    ]


def _span(value: Any) -> tuple[float, float]:
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def _near(a: float, b: float, above: float = 0.0) -> bool:
    """Whether the numbers agree up to rounding; a may lie `above` b by this part of it."""
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) or b < a <= b * (1 + above)


def _check_claims(cert: Mapping[str, Any], claimed: float, problems: list[str]) -> None:
    if cert["certified"] and (cert["reasons"] or cert["noise_source"] != "secure" or not math.isfinite(claimed)):
        problems.append(
            "it says certified, but its noise is not secret, its epsilon is infinite, or it names reasons why not"
        )
    if not cert["certified"] and not cert["reasons"]:
        problems.append("it says not certified but gives no reason")


def _check_ranges(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check settings that nothing is computed from, and that they fit the unit."""
    if not 0 < float(cert["delta"]) < 1:
        problems.append(f"delta is {cert['delta']:g}, which is no probability between 0 and 1")
    if not 0.5 <= float(cert["guess"]) <= 1:
        problems.append(f"the chance {cert['guess']:g} of a right guess does not lie between 1/2 and 1")
    if {*cert["epsilon_at"]} != {f"{at:g}" for at in DELTAS}:
        problems.append("epsilon_at does not list the epsilons at the usual deltas")
    if (asked := cert["epsilon_asked"]) is not None and _limitless(cert["epsilon"]) > asked * (1 + MOST_BELOW):
        problems.append(f"epsilon is {_limitless(cert['epsilon']):.6g}, more than the {asked:.6g} that was asked for")
    bounds = [cert["clip"], *(query["clip"] for query in cert["queries"])]
    bounds += [release["sensitivity"] for group in cert["groups"] for release in group["releases"]]
    if cert["certified"] and math.inf in bounds:
        problems.append("it says certified, although a clip or a sensitivity is infinite")
    names, public = [query["query"] for query in cert["queries"]], Unit(cert["unit"]).sizes_public
    if len({*names}) < len(names):
        problems.append("a query is listed twice")
    told = [cert["records"], *(group[part] for group in cert["groups"] for part in ("records", "sizes"))]
    if any((part is not None) != public for part in told):
        problems.append(f"the numbers of records are {'missing' if public else 'private'} at {cert['unit']} level")
    if len(cert["client_names"]) not in ((0, int(cert["clients"])) if public else (0,)):
        problems.append(f"{len(cert['client_names'])} clients are named, and there are {cert['clients']}")
    if cert["divisor"] not in ([*Divisor] if public else [Divisor.CLIENT_MEAN]):
        problems.append(f"the divisor '{cert['divisor']}' is none of a run at {cert['unit']} level")
    if cert["noise_source"] not in ("secure", "seeded", "noiseless"):
        problems.append(f"the source of the noise '{cert['noise_source']}' is unknown")
    if (person := cert.get("person")) and person.get("choice") not in PERSON_CHOICES:
        problems.append(f"person: records are chosen in the way '{person.get('choice')}', which is unknown")
    for query in (query for query in cert["queries"] if "factor" in query):
        factor = query["factor"]
        bands = len(factor["diagonals"]) if "diagonals" in factor else int(factor["inverse_band"])
        if min(bands, int(factor["rounds"])) > 1 and not query["carried"]:
            problems.append(f"{query['query']}: its noise is carried over {bands} rounds, and it says that none is")
    laws = {query["query"]: query["mechanism"] for query in cert["queries"]}
    for release in (r for group in cert["groups"] for r in group["releases"]):
        law, own = laws.get(release["query"]), release.get("mechanism")
        if law != own and {law, own} & {*OF_INTEGERS}:
            problems.append(f"{release['query']}: its releases are not of the mechanism {law}")
            break


def _check_site(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check the site that a certificate says it is of: its number, which tells the epsilon of its own data."""
    if (site := cert.get("site")) is None:
        return
    if not int(site["client"]) < int(cert["clients"]):
        problems.append(f"site {site['client']} is none of {cert['clients']} clients")
    elif cert["client_names"] and cert["client_names"][site["client"]] != site["name"]:
        problems.append(f"the site is '{site['name']}', and client {site['client']} has another name")
    if int(site["rounds"]) > int(cert["rounds"]):
        problems.append(f"the site answered {site['rounds']} of {cert['rounds']} rounds")


def _check_words(cert: Mapping[str, Any], problems: list[str], gaps: list[str]) -> None:
    """Check the sentences that follow from other fields: without an assumption, a statement promises more."""
    if (cert["unit"] == Unit.PERSON) != bool(cert.get("person")):
        return  # a problem already
    law, drawn = Participation.parse(cert["sampler"]["clients"]), amplifies(cert)
    records, told = cert["sampler"]["records"], cert["sampler"]["amplification"]
    kind = law.kind if drawn else FULL if records == "all" else Sampling.parse(records).kind
    sampled = any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"])
    by = Unit.CLIENT if drawn else cert["unit"]
    if not (told == NO_AMPLIFICATION and not sampled) and (
        kind == FULL or told != amplification(by, kind, Adjacency(cert["adjacency"]))
    ):
        problems.append(f"amplification by sampling is claimed as '{told}', which does not follow from the sampler")
    schedules = [ALL_TAKE_PART] if law.kind == FULL else [SECRET, GUESSABLE] if drawn else [PUBLIC]
    if cert["sampler"]["schedule"] not in schedules:
        problems.append(f"the schedule is called '{cert['sampler']['schedule']}', and it is {' or '.join(schedules)}")
    if cert["certified"] and cert["sampler"]["schedule"] == GUESSABLE:
        problems.append("it says certified, although the schedule that hides clients can be guessed")
    if cert["certified"] and law.kind == Sampler.POISSON and any(query["carried"] for query in cert["queries"]):
        problems.append(f"it says certified, but nothing is proved for correlated noise under {law}")
    needed, present = [*assumptions_of(cert), *numerics_of(cert)], {*cert["assumes"], *cert["numerics"]}
    lost = [words for words in needed if words not in present]
    wrong = {words for unit in Unit for words in numerics_of(cert, unit)} & present - {*needed}
    if cert["code_sha256"] != code_sha256():  # earlier versions say "one record", whatever is protected
        before = dict(zip(numerics_of(cert), numerics_of(cert, Unit.RECORD), strict=True))
        lost = [words for words in lost if before.get(words) not in present]
        wrong -= {*before.values()}
    problems.extend(f"it protects a {cert['unit']}, and says: {words}" for words in sorted(wrong))
    if not any(words.startswith(TUNING) for words in cert["assumes"]):
        lost.append(f"{TUNING}…")
    if lost and cert["code_sha256"] == code_sha256():
        problems.extend(f"an assumption that follows from the other fields is missing: {words}" for words in lost)
    elif lost:
        gaps.append("the words of the assumptions: sordino with other sources wrote them")


def _limitless(value: Any) -> float:
    """The number; null stands for infinity."""
    return math.inf if value is None else float(value)
