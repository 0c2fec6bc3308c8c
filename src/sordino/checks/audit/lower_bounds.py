"""Lower bounds on epsilon from the scores of an attack. This module holds statistics only; it knows no models.

An attack runs two neighbouring data sets, 0 and 1, and scores what it observes. It guesses 1 if the score exceeds a
threshold. Under (epsilon, delta)-DP its false positive rate a and false negative rate b satisfy

    a + e^epsilon b >= 1 - delta   and   b + e^epsilon a >= 1 - delta          (Kairouz, Oh, Viswanath 2015),

and under mu-Gaussian DP b >= Φ(Φ^-1(1 - a) - mu) (Dong, Roth, Su 2022). The errors of many runs bound a and b from
above with a given confidence (Clopper and Pearson), and so epsilon from below.

- `by_thresholds` assumes only (epsilon, delta)-DP. At small delta it is loose, because it would need rare events.
- `by_gaussian` refutes mu-Gaussian DP. A certificate claims mu-Gaussian DP because every release is Gaussian. So the
  epsilon(delta) of the largest refuted mu can be compared with the certified one, and is nearly tight.
- `by_one_run` needs a single run, with many units whose presence fair coins decide, and only (epsilon, delta)-DP.
- `by_one_run_gaussian` refutes mu-Gaussian DP by the same guesses, and is much tighter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian

CONFIDENCE = 0.95
MIN_SCORES = 20  # per data set
CHOOSING_PART = 0.25  # of the scores chooses the threshold; the bound uses the other scores
CANDIDATES = 400  # thresholds to choose from
MU_GRID, MU_PASSES, MOST_MU = 129, 3, 16.0  # of a search for mu: points at a time, refinements, the first range

Scores = NDArray[np.float64]


class LowerBound(NamedTuple):
    """The errors at a threshold, and the largest epsilon that they refute.

    Attributes:
      epsilon: the largest refuted epsilon.
      mu: the largest refuted mu; None if the bound does not use mu.
      threshold: above which the attack guesses 1.
      false_positive_rate, false_negative_rate: the errors at the threshold.
      runs: per data set, of those that the bound uses.
    """

    epsilon: float
    mu: float | None
    threshold: float
    false_positive_rate: float
    false_negative_rate: float
    runs: int


def by_thresholds(
    zero: ArrayLike, one: ArrayLike, *, delta: float, confidence: float = CONFIDENCE, threshold: float | None = None
) -> LowerBound:
    """A lower bound that assumes only (epsilon, delta)-DP; each error rate is bounded at half the risk.

    Args:
      zero: scores of runs with data set 0.
      one: scores of runs with data set 1.
      delta: the delta at which epsilon is bounded.
      confidence: with which the bound holds.
      threshold: chosen without these scores. By default a part of the scores chooses it, and the bound uses the others.

    Returns:
      The bound.

    Raises:
      SordinoError: there are too few scores, or an argument is out of its range.
    """
    zero, one = _scores(zero, one, delta, confidence)
    if threshold is None:
        (choosing_zero, zero), (choosing_one, one) = _split(zero), _split(one)
        candidates = _candidates(choosing_zero, choosing_one)
        rates = _rates(choosing_zero, choosing_one, candidates)
        threshold = float(candidates[np.argmax(_refuted(*rates, len(choosing_zero), delta, confidence))])
    a, b = _rates(zero, one, np.array([threshold]))
    epsilon = float(_refuted(a, b, len(zero), delta, confidence)[0])
    return LowerBound(max(epsilon, 0.0), None, threshold, float(a[0]), float(b[0]), len(zero))


def best_threshold(mu: float, runs: int, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The best threshold for `by_thresholds` if scores are log likelihood ratios of a mu-GDP pair.

    These have the laws N(-mu²/2, mu²) and N(mu²/2, mu²).

    Args:
      mu: of the pair.
      runs: per data set.
      delta: the delta at which epsilon is bounded.
      confidence: with which the bound holds.

    Returns:
      The threshold.
    """
    candidates = np.linspace(0, 6, 241)  # in standard deviations; negative ones are equivalent
    a, b = ndtr(-mu / 2 - candidates), ndtr(candidates - mu / 2)
    return float(mu * candidates[np.argmax(_refuted(a, b, runs, delta, confidence))])


def by_gaussian(
    zero: ArrayLike, one: ArrayLike, *, delta: float, confidence: float = CONFIDENCE, threshold: float | None = None
) -> LowerBound:
    """The largest mu for which the errors refute mu-Gaussian DP, and its epsilon(delta).

    Under mu-GDP the mean of both error rates is at least Φ(-mu/2). The number of errors is a sum of coins of two kinds.
    Values below its mean are no likelier than for coins with the mean chance (Hoeffding 1956, Theorem 4), so the
    Clopper-Pearson bound of one binomial holds.

    Args:
      zero: scores of runs with data set 0.
      one: scores of runs with data set 1.
      delta: the delta at which epsilon is reported.
      confidence: with which the bound holds.
      threshold: 0 if the scores are log likelihood ratios. By default a part of the scores chooses it.

    Returns:
      The bound, with its mu.

    Raises:
      SordinoError: there are too few scores, or an argument is out of its range.
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
    """The largest epsilon that the guesses about the canaries of one run refute.

    A fair coin per canary decides its state. Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), section 5, appendix D.

    Args:
      canaries: how many there are.
      guesses: for how many the attack guesses the state.
      right: how many guesses are right.
      delta: the delta at which epsilon is bounded.
      confidence: with which the bound holds.

    Returns:
      The lower bound on epsilon.

    Raises:
      SordinoError: the counts or the other arguments are out of their range.
    """
    _check_guesses(canaries, guesses, right)
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
    """An upper bound on the chance of so many right guesses under (epsilon, delta)-DP.

    Under epsilon-DP each guess is right with chance at most q = 1 / (1 + e^-epsilon), given all others. So
    B ~ Binomial(guesses, q) dominates the number of right guesses. With v right guesses, delta adds
    2 canaries delta P(v - i <= B < v) / i for the worst i.
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, q))
    if not delta or not right:
        return min(tail, 1.0)
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    worst = float((below / np.arange(1, right + 1)).max())
    return min(tail + 2 * canaries * delta * worst, 1.0)


def by_one_run_gaussian(
    canaries: int, guesses: int, right: int, *, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The epsilon(delta) of the largest mu for which the guesses of one run refute mu-Gaussian DP.

    Args:
      canaries: how many there are.
      guesses: for how many the attack guesses the state.
      right: how many guesses are right.
      delta: the delta at which epsilon is reported.
      confidence: with which the bound holds.

    Returns:
      The lower bound on epsilon.

    Raises:
      SordinoError: the counts or the other arguments are out of their range.
    """
    _check(delta, confidence)
    mu = one_run_mu(canaries, guesses, right, confidence=confidence)
    return gaussian.epsilon(mu, delta) if delta else (math.inf if mu else 0.0)


def one_run_mu(canaries: int, guesses: int, right: int, *, confidence: float = CONFIDENCE) -> float:
    """The largest mu for which the guesses about the canaries of one run refute mu-Gaussian DP.

    The bound is that of Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235), derived here for fair coins. Write m
    for the canaries, k for the guesses, X for the right ones, and F(x) = Φ(Φ^-1(x) + mu): under mu-GDP an event of
    chance x has at most chance F(x) under a neighbour. Fix a canary i, the coins of the others, and t. That i is
    guessed to be 1 while at least t - 1 other guesses are right is an event of the output, so its chances for both
    states of i obey F; the same holds for a guess of 0. F is concave, so the inequality survives the mean over coins
    and over the m canaries:

        E[X; X >= t] / m  <=  F(E[k - X; X >= t - 1] / m)        for every t.

    In terms of P_j = P(X >= j), with S = P_t + P_{t+1} + ..., this says

        (k - t + 1) P_{t-1}  >=  m F^-1((S + (t - 1) P_t) / m) + S.

    The right side grows with every P_j. So if P(X >= right) were 1 - confidence or more, the recursion from
    P_right = 1 - confidence down to P_0, with P_{t-1} >= P_t, would give lower bounds on all P_j. If one of them
    exceeds 1, the observed number of right guesses refutes mu at this confidence. At mu = 0 the recursion is the tail
    of a binomial with chance 1/2.

    Args:
      canaries: how many there are.
      guesses: for how many the attack guesses the state; fixed before the run.
      right: how many guesses are right.
      confidence: with which the bound holds.

    Returns:
      The largest refuted mu, rounded down; 0 if none is.

    Raises:
      SordinoError: the counts or the confidence are out of their range.
    """
    _check_guesses(canaries, guesses, right)
    _check(0.0, confidence)
    low, high = 0.0, MOST_MU
    while _one_run_refutes(canaries, guesses, right, np.array([high]), confidence)[0]:
        low, high = high, 2 * high
    for _ in range(MU_PASSES):
        grid = np.linspace(low, high, MU_GRID)
        refuted = _one_run_refutes(canaries, guesses, right, grid, confidence)
        if not refuted[0]:
            return 0.0
        last = int(np.argmin(refuted)) - 1  # the last point is not refuted
        low, high = float(grid[last]), float(grid[last + 1])
    return low


def best_guesses(
    canaries: int, mu: float, *, delta: float, confidence: float = CONFIDENCE, gaussian_dp: bool = False
) -> int:
    """For how many canaries, those with the largest |score|, to guess if each score has the law of mu-GDP.

    Args:
      canaries: how many there are.
      mu: of each canary's score.
      delta: the delta at which epsilon is bounded.
      confidence: with which the bound holds.
      gaussian_dp: choose for `by_one_run_gaussian` instead of `by_one_run`.

    Returns:
      The number of guesses for which the expected number of right ones gives the largest bound.
    """
    bound: Callable[[int, int, int], float] = (
        partial(one_run_mu, confidence=confidence)
        if gaussian_dp
        else partial(by_one_run, delta=delta, confidence=confidence)
    )
    best, most = canaries, -1.0
    for guesses in np.unique(np.geomspace(max(1, canaries // 200), canaries, 25).round().astype(int)):
        cut = _cut(mu, guesses / canaries)
        correct, wrong = float(ndtr(mu / 2 - cut)), float(ndtr(-mu / 2 - cut))
        expected = bound(canaries, int(guesses), int(guesses * correct / (correct + wrong)))
        if expected > most:
            best, most = int(guesses), expected
    return best


def upper(count: ArrayLike, total: int, alpha: float) -> Scores:
    """The Clopper-Pearson upper bound on a rate: it lies above the true rate with chance at least 1 - alpha."""
    count = np.asarray(count, dtype=float)
    with np.errstate(invalid="ignore"):
        end = betaincinv(np.minimum(count, total - 1) + 1, np.maximum(total - count, 1), 1 - alpha)
    return np.where(count >= total, 1.0, end)


def _one_run_refutes(canaries: int, guesses: int, right: int, mus: Scores, confidence: float) -> NDArray[np.bool_]:
    """Whether so many right guesses refute each mu: the recursion of `one_run_mu`."""
    tail = np.full(len(mus), 1 - confidence)  # the lower bound on P(X >= i + 1)
    total = tail.copy()  # its sum over larger numbers
    refuted = np.zeros(len(mus), dtype=bool)
    for i in range(right - 1, -1, -1):
        rate = np.minimum((total + i * tail) / canaries, 1.0)  # F^-1(1) = 1
        tail = np.maximum(tail, (canaries * ndtr(ndtri(rate) - mus) + total) / (guesses - i))
        refuted |= tail > 1
        if refuted.all():
            break
        tail = np.minimum(tail, 1.0)
        total = total + tail
    return refuted


def _refuted(a: Scores, b: Scores, runs: int, delta: float, confidence: float) -> Scores:
    """The refuted epsilon, from observed false positive and false negative rates."""
    alpha = (1 - confidence) / 2
    a, b = upper(a * runs, runs, alpha), upper(b * runs, runs, alpha)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(np.maximum(1 - delta - a, 0) / b, np.maximum(1 - delta - b, 0) / a))


def _candidates(zero: Scores, one: Scores) -> Scores:
    return np.unique(np.quantile(np.concatenate([zero, one]), np.linspace(0, 1, CANDIDATES)))


def _cut(mu: float, part: float) -> float:
    """The value that |score| exceeds in this part of the cases, for a score of mean ±mu/2 and variance 1."""
    if part >= 1:
        return 0.0
    return float(brentq(lambda cut: ndtr(mu / 2 - cut) + ndtr(-mu / 2 - cut) - part, 0.0, mu / 2 + 40))


def _rates(zero: Scores, one: Scores, thresholds: Scores) -> tuple[Scores, Scores]:
    """False positive and false negative rate at each threshold; a score equal to it counts as 0."""
    zero, one = np.sort(zero), np.sort(one)
    above = len(zero) - np.searchsorted(zero, thresholds, side="right")
    return above / len(zero), np.searchsorted(one, thresholds, side="right") / len(one)


def _split(scores: Scores) -> tuple[Scores, Scores]:
    first = int(CHOOSING_PART * len(scores))
    return scores[:first], scores[first:]


def _scores(zero: ArrayLike, one: ArrayLike, delta: float, confidence: float) -> tuple[Scores, Scores]:
    """The scores as arrays, equally many for both data sets."""
    _check(delta, confidence)
    both = [np.asarray(scores, dtype=float).ravel() for scores in (zero, one)]
    runs = min(map(len, both))
    if runs < MIN_SCORES:
        raise SordinoError(f"runs: {runs} per data set are too few; use at least {MIN_SCORES}, better 1,000.")
    if not all(np.isfinite(scores).all() for scores in both):
        raise SordinoError("scores: some are not finite; the attack must give every run a finite score.")
    return both[0][:runs], both[1][:runs]


def _check_guesses(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries:
        raise SordinoError(
            f"guesses: {right} right of {guesses} for {canaries} canaries; need 0 <= right <= guesses <= canaries."
        )


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise SordinoError(f"delta: {delta} must lie in [0, 1); 1e-5 is usual.")
    if not 0.75 < confidence < 1:
        raise SordinoError(f"confidence: {confidence} must lie in (0.75, 1); 0.95 is usual.")
