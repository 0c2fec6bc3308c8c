"""Lower bounds on epsilon from an attack: statistics alone, which know nothing of models.

An attack plays two worlds that differ in one unit, and scores what it sees: high scores speak for world 1. Above a
threshold it says 1. Under (epsilon, delta)-DP its false positive rate a and false negative rate b obey

    a + e^epsilon b >= 1 - delta   and   b + e^epsilon a >= 1 - delta          (Kairouz, Oh, Viswanath 2015),

under mu-Gaussian DP b >= Φ(Φ^-1(1 - a) - mu) (Dong, Roth, Su 2022). Errors counted over many runs hold a and b
from above with a given confidence (Clopper and Pearson), and so epsilon from below.

- `by_thresholds` assumes nothing but (epsilon, delta). At small delta it is loose: it would have to see rare events.
- `by_gaussian` refutes "what is seen is mu-Gaussian DP". That is what a certificate claims, for every release is
  Gaussian, so an epsilon(delta) read off the mu that is left is a fair rival to the certified one, and nearly tight.
- `by_one_run` needs a single run, with many units whose presence was decided by coins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian

CONFIDENCE = 0.95
MIN_SCORES = 20  # scores a world
CHOOSING_PART = 0.25  # the part of the scores that chooses the threshold; the bound comes from the others
CANDIDATES = 400  # thresholds to choose from

Scores = NDArray[np.float64]


class LowerBound(NamedTuple):
    """What was seen at a threshold, and the largest epsilon (and mu, where it was the way there) that it refutes."""

    epsilon: float
    mu: float | None
    threshold: float
    false_positive_rate: float
    false_negative_rate: float
    runs: int  # a world, of those that the bound comes from


def by_thresholds(
    zero: ArrayLike, one: ArrayLike, *, delta: float, confidence: float = CONFIDENCE, threshold: float | None = None
) -> LowerBound:
    """From scores under world 0 and world 1: both error rates at once, each at half the risk.

    The threshold must not be chosen by the scores that the bound comes from: it is given, or a part of them chooses it.
    """
    zero, one = _scores(zero, one, delta, confidence)
    if threshold is None:
        (choosing_zero, zero), (choosing_one, one) = _split(zero), _split(one)
        candidates = _candidates(choosing_zero, choosing_one)
        rates = _rates(choosing_zero, choosing_one, candidates)
        threshold = float(candidates[np.argmax(_refuted(*rates, len(choosing_zero), delta, confidence))])
    a, b = _rates(zero, one, np.array([threshold]))
    found = float(_refuted(a, b, len(zero), delta, confidence)[0])
    return LowerBound(max(found, 0.0), None, threshold, float(a[0]), float(b[0]), len(zero))


def best_threshold(mu: float, runs: int, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """For `by_thresholds`, if the score is the log likelihood ratio of a mu-GDP pair: N(-mu²/2, mu²), N(mu²/2, mu²)."""
    candidates = np.linspace(0, 6, 241)  # in standard deviations; the other side of 0 tells as much
    a, b = ndtr(-mu / 2 - candidates), ndtr(candidates - mu / 2)
    return float(mu * candidates[np.argmax(_refuted(a, b, runs, delta, confidence))])


def by_gaussian(
    zero: ArrayLike, one: ArrayLike, *, delta: float, confidence: float = CONFIDENCE, threshold: float | None = None
) -> LowerBound:
    """The largest mu for which "mu-Gaussian DP" is refuted, by errors of either kind together, and its epsilon(delta).

    Under mu-GDP the mean of both error rates is at least Φ(-mu/2). The number of errors is a sum of coins of two kinds;
    below its mean it is no likelier than with coins of the mean kind (Hoeffding 1956, Theorem 4), so the
    Clopper-Pearson end of one binomial holds. A score that is a log likelihood ratio has its `threshold`, 0, by nature;
    for any other a part of the scores chooses it.
    """
    zero, one = _scores(zero, one, delta, confidence)
    if threshold is None:
        (choosing_zero, zero), (choosing_one, one) = _split(zero), _split(one)
        candidates = _candidates(choosing_zero, choosing_one)
        threshold = float(candidates[np.argmin(sum(_rates(choosing_zero, choosing_one, candidates)))])
    a, b = (float(rate[0]) for rate in _rates(zero, one, np.array([threshold])))
    errors = round((a + b) * len(zero))
    most = float(upper(np.array([errors]), 2 * len(zero), 1 - confidence)[0])
    mu = max(-2 * float(ndtri(most)), 0.0)
    return LowerBound(gaussian.epsilon(mu, delta), mu, threshold, a, b, len(zero))


def by_one_run(canaries: int, guesses: int, right: int, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon refuted by `right` of `guesses`; the other canaries were abstained from.

    Each of `canaries` was put into one of two states by a fair coin of its own, in one run. Steinke, Nasr, Jagielski
    2023 (arXiv 2305.08846), section 5 and appendix D.
    """
    if not 0 <= right <= guesses <= canaries:
        raise SordinoError(
            f"guesses: {right} right of {guesses} among {canaries} canaries; need 0 <= right <= guesses <= canaries."
        )
    _check(delta, confidence)

    def refutes(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon=epsilon, delta=delta) <= 1 - confidence

    low, high = 0.0, 1.0
    if not refutes(low):
        return 0.0
    while refutes(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low


def one_run_p_value(canaries: int, guesses: int, right: int, *, epsilon: float, delta: float) -> float:
    """The chance, at most, of so many right guesses under (epsilon, delta)-DP.

    Under epsilon-DP each guess is right with chance q = 1 / (1 + e^-epsilon) at most, whatever the others are: the
    number of right ones is dominated by B ~ Binomial(guesses, q). delta adds 2 canaries delta P(v - i <= B < v) / i for
    the worst i, v being the number of right ones.
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, q))
    if not delta or not right:
        return min(tail, 1.0)
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    worst = float((below / np.arange(1, right + 1)).max())
    return min(tail + 2 * canaries * delta * worst, 1.0)


def best_guesses(canaries: int, mu: float, *, delta: float, confidence: float = CONFIDENCE) -> int:
    """How many canaries to guess, those of the most telling scores, if each is told apart as by mu-GDP."""
    best, most = canaries, -1.0
    for guesses in np.unique(np.geomspace(max(1, canaries // 200), canaries, 25).round().astype(int)):
        cut = _cut(mu, guesses / canaries)
        correct, wrong = float(ndtr(mu / 2 - cut)), float(ndtr(-mu / 2 - cut))
        expected = by_one_run(
            canaries,
            int(guesses),
            int(guesses * correct / (correct + wrong)),
            delta=delta,
            confidence=confidence,
        )
        if expected > most:
            best, most = int(guesses), expected
    return best


def upper(count: ArrayLike, total: int, alpha: float) -> Scores:
    """The Clopper-Pearson upper end of a rate: it lies above the true one with chance 1 - alpha at least."""
    count = np.asarray(count, dtype=float)
    with np.errstate(invalid="ignore"):
        end = betaincinv(np.minimum(count, total - 1) + 1, np.maximum(total - count, 1), 1 - alpha)
    return np.where(count >= total, 1.0, end)


def _refuted(a: Scores, b: Scores, runs: int, delta: float, confidence: float) -> Scores:
    """epsilon, from observed false positive and false negative rates."""
    alpha = (1 - confidence) / 2
    a, b = upper(a * runs, runs, alpha), upper(b * runs, runs, alpha)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(np.maximum(1 - delta - a, 0) / b, np.maximum(1 - delta - b, 0) / a))


def _candidates(zero: Scores, one: Scores) -> Scores:
    return np.unique(np.quantile(np.concatenate([zero, one]), np.linspace(0, 1, CANDIDATES)))


def _cut(mu: float, part: float) -> float:
    """|score| exceeds it in this part of the cases, for a score of mean ±mu/2 and variance 1."""
    if part >= 1:
        return 0.0
    return float(brentq(lambda cut: ndtr(mu / 2 - cut) + ndtr(-mu / 2 - cut) - part, 0.0, mu / 2 + 40))


def _rates(zero: Scores, one: Scores, thresholds: Scores) -> tuple[Scores, Scores]:
    """False positive and false negative rate at each threshold; a score on it speaks for world 0."""
    zero, one = np.sort(zero), np.sort(one)
    above = len(zero) - np.searchsorted(zero, thresholds, side="right")
    return above / len(zero), np.searchsorted(one, thresholds, side="right") / len(one)


def _split(scores: Scores) -> tuple[Scores, Scores]:
    first = int(CHOOSING_PART * len(scores))
    return scores[:first], scores[first:]


def _scores(zero: ArrayLike, one: ArrayLike, delta: float, confidence: float) -> tuple[Scores, Scores]:
    """As many of one world as of the other."""
    _check(delta, confidence)
    worlds = [np.asarray(scores, dtype=float).ravel() for scores in (zero, one)]
    runs = min(map(len, worlds))
    if runs < MIN_SCORES:
        raise SordinoError(f"runs: {runs} a world tell nothing; use at least {MIN_SCORES}, better 1,000.")
    if not all(np.isfinite(scores).all() for scores in worlds):
        raise SordinoError("scores: some are not finite; the attack must give every run a number.")
    return worlds[0][:runs], worlds[1][:runs]


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise SordinoError(f"delta: {delta} must lie in [0, 1); 1e-5 is usual.")
    if not 0.75 < confidence < 1:
        raise SordinoError(f"confidence: {confidence} must lie in (0.75, 1); 0.95 is usual.")
