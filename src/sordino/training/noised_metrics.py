"""Metrics of a model from noised tallies of its scores, with intervals that cover sampling and noise.

The tallies (`models.tally`) arrive as shares of the n test records, with Gaussian noise of a known standard deviation.
Test records are taken as a sample of those that the model will meet, so an interval answers for those: it covers the
sampling of the records and the noise. Everything here is post-processing of what was released.

The shares f of the cells (label and bin) are estimated from two noised views of them, the cells and the totals on each
side of the threshold, and from their sum, which is 1: generalized least squares, with covariance C of the noise. Ratios
(AUC, sensitivity) have intervals of Fieller's kind: all values t for which numerator - t * denominator is within z of
its own standard deviations from 0. So a denominator that may be 0 gives a wide interval instead of a wrong one.

Bins. The AUC of binned scores counts a pair in one bin as one half. The AUC of the scores themselves counts it as 0 or
1, so the two differ by at most half of the share of pairs that fall into one bin; `binning` is an upper confidence
bound on that. In practice the difference is far smaller: within a bin the ROC curve is nearly straight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtri

from sordino.models.tally import (
    ABSOLUTE,
    BRIER,
    CELLS,
    CONFUSION,
    DEVIANCE,
    MOST_DEVIANCE,
    OUTCOMES,
    PREDICTED,
    SQUARED,
    SQUARED_DEVIANCE,
    SQUARED_VALUE,
    VALUE,
)

CONFIDENCE = 0.95
CURVE_GROUPS = 10  # of a calibration curve, at most
LEAST_SIGNAL = 2.0  # standard deviations of a denominator: below, its ratio is not estimated
LEAST_SHARE = 1e-9  # a denominator below it is a rounding error
WIDEST = (-1.0, 2.0)  # an interval of a ratio that noise leaves open
LEAST_SEEN = 0.05  # an edge that fewer records are followed up to has no Brier score: its weights explode
SPREAD = 1.8  # E[v^2] / E[v]^2 for a squared error v of predictions that are even over their range
ROUNDING = 1e-9  # above the rounding error of an estimate, so that a constant never counts as better than itself
DIFFERENCE = 1e-6  # for derivatives


class Released(NamedTuple):
    """A noised tally.

    Attributes:
      parts: by block, shares of the records: sums divided by their number.
      std: by block, of the noise on one number.
      records: that the tally is about; public.
    """

    parts: Mapping[str, np.ndarray]
    std: Mapping[str, float]
    records: int


class Estimate(NamedTuple):
    """A number and its interval; the number is None where the noise leaves it open."""

    value: float | None
    low: float
    high: float

    def document(self) -> dict[str, float | None]:
        return {"estimate": self.value, "low": self.low, "high": self.high}


class Shares(NamedTuple):
    """The estimated shares of the cells, label by label, and the covariance of the noise on them."""

    f: np.ndarray  # 2 x bins, flat
    noise: np.ndarray
    records: int

    @property
    def bins(self) -> int:
        return len(self.f) // 2

    def total(self, weight: np.ndarray) -> tuple[float, float]:
        """A linear function of the shares, and the variance of its noise."""
        return float(weight @ self.f), float(weight @ self.noise @ weight)

    def sampling(self, weight: np.ndarray) -> float:
        """The variance of a linear function from sampling the records."""
        f = np.maximum(self.f, 0.0)
        return max(float(weight**2 @ f - (weight @ f) ** 2), 0.0) / self.records


def estimate_shares(released: Released, below: int) -> Shares:
    """The shares of the cells, by generalized least squares.

    Args:
      released: the noised tally of a `ScoreTally`.
      below: number of bins up to the threshold.
    """
    cells, std = np.asarray(released.parts[CELLS], float).reshape(-1), released.std[CELLS]
    bins = len(cells) // 2
    side = np.zeros((4, 2 * bins))
    for label in range(2):
        side[2 * label, label * bins : label * bins + below] = 1
        side[2 * label + 1, label * bins + below : (label + 1) * bins] = 1
    ratio = (std / released.std[CONFUSION]) ** 2 if std else 1.0
    covariance = np.linalg.inv(np.eye(2 * bins) + ratio * side.T @ side)
    f = covariance @ (cells + ratio * side.T @ np.asarray(released.parts[CONFUSION], float).reshape(-1))
    ones = covariance.sum(1)
    f = f + ones * (1 - f.sum()) / ones.sum()
    covariance = covariance - np.outer(ones, ones) / ones.sum()
    return Shares(f, std**2 * covariance, released.records)


def of_scores(
    released: Released, edges: Sequence[float], threshold: float, *, two_classes: bool, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """Accuracy, AUC, calibration and Brier score of a classifier.

    Args:
      released: the noised tally of a `ScoreTally`.
      edges: of its bins, as log-odds.
      threshold: of its table of decisions, a probability.
      two_classes: the score is the probability of the second class; else it is that of the predicted class, and the
        label says whether that is right.
      confidence: of each interval by itself.

    Returns:
      A document for JSON. Each metric has an estimate, low and high.
    """
    z = float(ndtri((1 + confidence) / 2))
    odds = np.asarray(edges, float)
    below = int(np.searchsorted(odds, math.log(threshold / (1 - threshold)), side="right"))
    shares = estimate_shares(released, below)
    bins = shares.bins
    label, place = np.repeat([0, 1], bins), np.tile(np.arange(bins), 2)
    right = (label == (place >= below)) if two_classes else label == 1
    brier = _mean(released, BRIER)
    predicted = _mean(released, PREDICTED)
    borders = np.concatenate([[0.0], expit(odds), [1.0]])
    centres = (borders[:-1] + borders[1:]) / 2
    found: dict[str, Any] = {
        "records": released.records,
        "confidence": confidence,
        "bins": bins,
        "threshold": threshold,
        "accuracy": proportion(shares, right.astype(float), z).document(),
    }
    if two_classes:
        auc, binning = area(shares, z)
        found["auc"] = {**auc.document(), "binning": binning}
        found["brier_gain"] = gain(released, shares, centres, z).document()
        for name, whose, which in (("sensitivity", 1, place >= below), ("specificity", 0, place < below)):
            found[name] = part_of(shares, (label == whose) & which, label == whose, z).document()
    fourth = _between(float(shares.f @ (centres[place] - label) ** 4), brier**2, abs(brier))
    found["brier"] = _normal(brier, released.std[BRIER] ** 2 + (fourth - brier**2) / released.records, z).document()
    spread = _between(float(shares.f @ centres[place] ** 2) - predicted**2, 0.0, max(predicted * (1 - predicted), 0.0))
    noise = released.std[PREDICTED] ** 2
    found["mean_predicted"] = _normal(predicted, noise + spread / released.records, z).document()
    found["observed"] = proportion(shares, (label == 1).astype(float), z).document()
    observed, observed_noise = shares.total((label == 1).astype(float))
    difference = predicted - observed
    sampling = max(brier - difference**2, 0.0) / released.records if two_classes else 0.25 / released.records
    off = _normal(difference, noise + observed_noise + sampling, z, -1.0)
    found["predicted_minus_observed"] = off.document()
    found["calibration_curve"] = curve(shares, borders, centres, z)
    return found


def of_errors(released: Released, unit: float, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Mean absolute and squared error and R² of a model of quantities.

    Args:
      released: the noised tally of an `ErrorTally`.
      unit: how much 1 in the model's labels is, in the unit of the quantity: half of its public range.
      confidence: of each interval by itself.

    Returns:
      A document for JSON. Each metric has an estimate, low and high.
    """
    z, n, span = float(ndtri((1 + confidence) / 2)), released.records, 2 * unit
    absolute, squared, value, square = (_mean(released, name) for name in (ABSOLUTE, SQUARED, VALUE, SQUARED_VALUE))
    std = released.std
    # The variance of a number in [0, 1] is at most its mean square, and at most mean (1 - mean).
    mae = _normal(absolute, std[ABSOLUTE] ** 2 + max(squared - absolute**2, 0.0) / n, z)
    mse = _normal(squared, std[SQUARED] ** 2 + max(squared * (1 - squared), 0.0) / n, z)
    variance = square - value**2
    of_variance = std[SQUARED_VALUE] ** 2 + 4 * value**2 * std[VALUE] ** 2 + 0.25 / n  # of a square, of a mean, sampled
    numerator_variance = std[SQUARED] ** 2 + max(squared * (1 - squared), 0.0) / n
    ratio = _ratio(squared, variance, numerator_variance, of_variance, 0.0, z)
    r2 = Estimate(None if ratio.value is None else 1 - ratio.value, 1 - ratio.high, min(1 - ratio.low, 1.0))
    return {
        "records": n,
        "confidence": confidence,
        "mae": _times(mae, span).document(),
        "mse": _times(mse, span**2).document(),
        "r2": r2.document(),
    }


def of_counts(released: Released, unit: float, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Mean absolute and squared error, R², deviance, and mean prediction of a model of counts.

    Args:
      released: the noised tally of a `CountTally`.
      unit: the root of the public maximum of a count.
      confidence: of each interval by itself.

    Returns:
      A document for JSON. Each metric has an estimate, low and high. A deviance above 10 counts as 10.
    """
    found, z, n = of_errors(released, unit**2 / 2, confidence), float(ndtri((1 + confidence) / 2)), released.records
    std = released.std
    deviance, square = _mean(released, DEVIANCE), _mean(released, SQUARED_DEVIANCE)
    # The square has much noise. Deviances spread about as widely as they are large, or wider.
    spread = _between(square - deviance**2, deviance**2, max(deviance * (1 - deviance), 0.0))
    found["deviance"] = _times(_normal(deviance, std[DEVIANCE] ** 2 + spread / n, z), MOST_DEVIANCE).document()
    found["most_deviance"] = MOST_DEVIANCE
    predicted, value, squared = (_mean(released, name) for name in (PREDICTED, VALUE, SQUARED))
    noise, own = std[PREDICTED] ** 2, max(_mean(released, SQUARED_VALUE) - value**2, 0.0)
    # Predictions vary less than labels do, unless they are worse than a constant.
    found["mean_predicted"] = _times(_normal(predicted, noise + own / n, z), unit**2).document()
    found["observed"] = _times(_normal(value, std[VALUE] ** 2 + own / n, z), unit**2).document()
    sampling = max(squared - (predicted - value) ** 2, 0.0) / n
    off = _normal(predicted - value, noise + std[VALUE] ** 2 + sampling, z, -1.0)
    found["predicted_minus_observed"] = _times(off, unit**2).document()
    return found


def of_survival(released: Released, intervals: int, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Concordance, Brier score, and predicted against observed risk of a survival model.

    Concordance is that of grouped times: a pair counts if the event of one record happens in an interval that the other
    leaves without it; pairs whose order within an interval decides are left out. Risks in one bin count as one half.
    The Brier score is the mean over the edges that enough records are followed up to, weighted for censoring, with
    actuarial shares in place of Kaplan-Meier's.

    Args:
      released: the noised tally of a `SurvivalTally`.
      intervals: number of intervals of time.
      confidence: of each interval by itself.

    Returns:
      A document for JSON. Each metric has an estimate, low and high.
    """
    z, n, outcomes = float(ndtri((1 + confidence) / 2)), released.records, 2 * intervals + 1
    cells = np.asarray(released.parts[CELLS], float).reshape(-1)
    bins = len(cells) // outcomes
    predicted = _mean(released, PREDICTED)
    shares = np.asarray(released.parts[OUTCOMES], float).reshape(-1)
    shares = shares + (1 - shares.sum()) / outcomes  # they add up to 1
    risk, risk_noise, risk_sampling = _by_differences(lambda f: 1 - _survival(f), shares, released.std[OUTCOMES])
    observed = _normal(risk, risk_noise + risk_sampling / n, z)
    # A risk between 0 and 1 varies by p (1 - p) at most; predictions vary far less than outcomes do.
    own = max(predicted * (1 - predicted), 0.0) / 4
    noise = released.std[PREDICTED] ** 2
    off = _normal(predicted - risk, noise + risk_noise + risk_sampling / n, z, -1.0)
    return {
        "records": n,
        "confidence": confidence,
        "bins": bins,
        "concordance": _grouped_concordance(cells, released.std[CELLS], n, outcomes, z).document(),
        "brier": _survival_brier(released, shares, intervals, z).document(),
        "mean_predicted": _normal(predicted, noise + own / n, z).document(),
        "observed": observed.document(),
        "predicted_minus_observed": off.document(),
    }


def _grouped_concordance(cells: np.ndarray, std: float, records: int, outcomes: int, z: float) -> Estimate:
    """A ratio of two quadratic forms of the shares of cells (bin of the risk, outcome)."""
    bins = len(cells) // outcomes
    later = np.triu(np.ones((outcomes, outcomes)), 1) * (np.arange(outcomes) % 2 == 1)[:, None]
    above = np.tri(bins, k=-1) + np.eye(bins) / 2
    f = cells + (1 - cells.sum()) / len(cells)
    noise = std**2 * (np.eye(len(f)) - 1 / len(f))
    values, gradients = [], []
    for order in (above, np.ones((bins, bins))):
        pairs = np.kron(order, later)
        values.append(float(f @ pairs @ f - (pairs * noise).sum()))
        gradients.append((pairs + pairs.T) @ f)
    g, held = np.stack(gradients), np.maximum(f, 0.0)
    held = held / max(held.sum(), LEAST_SHARE)
    m = g @ noise @ g.T + ((g * held) @ g.T - np.outer(g @ held, g @ held)) / records
    found = _ratio(values[0], values[1], m[0, 0], m[1, 1], m[0, 1], z)
    value = None if found.value is None else _inside(found.value)
    return Estimate(value, _inside(found.low), _inside(found.high))


def _life(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At risk at the start of each interval, censored and with the event in it."""
    censored, events = shares[0:-1:2], shares[1::2]
    at_risk = shares.sum() - np.concatenate([[0.0], (censored + events).cumsum()[:-1]])
    return np.maximum(at_risk, LEAST_SHARE), censored, events


def _survival(shares: np.ndarray) -> float:
    """The actuarial share without the event by the last edge."""
    at_risk, censored, events = _life(shares)
    hazard = events / np.maximum(at_risk - censored / 2, LEAST_SHARE)
    return float(np.prod(1 - np.clip(hazard, 0.0, 1.0)))


def _seen(shares: np.ndarray) -> np.ndarray:
    """The actuarial share that is not censored by each edge, from 1 at time 0."""
    at_risk, censored, events = _life(shares)
    hazard = censored / np.maximum(at_risk - events / 2, LEAST_SHARE)
    return np.concatenate([[1.0], np.cumprod(1 - np.clip(hazard, 0.0, 0.99))])


def _survival_brier(released: Released, shares: np.ndarray, intervals: int, z: float) -> Estimate:
    """The mean Brier score over edges, with an interval by linearisation."""
    parts = [np.asarray(released.parts[f"{BRIER} {k + 1}"], float).reshape(-1) for k in range(intervals)]
    used = [k for k in range(intervals) if _seen(shares)[k + 1] >= LEAST_SEEN]
    if not used:
        return Estimate(None, 0.0, 1.0)

    def score(f: np.ndarray) -> float:
        weights = _weights(f, intervals)
        return float(np.mean([weights[k] @ parts[k] for k in used]))

    value = score(shares)
    slopes = _slopes(score, shares)
    weights = _weights(shares, intervals)
    noise = released.std[OUTCOMES] ** 2 * float(((slopes - slopes.mean()) ** 2).sum())
    noise += sum(released.std[f"{BRIER} {k + 1}"] ** 2 * float((weights[k] ** 2).sum()) for k in used) / len(used) ** 2
    first = second = 0.0  # moments of what one record adds to the linearised score
    for outcome, share in enumerate(np.maximum(shares, 0.0)):
        mean = deviation = 0.0
        for k in used:
            interval, happened = divmod(outcome, 2)
            cell = 0 if interval > k else interval + 1 if happened else None
            if cell is None:
                continue
            mass = shares[2 * (k + 1) :].sum() if cell == 0 else shares[2 * (cell - 1) + 1]
            typical = _between(float(parts[k][cell] / max(mass, LEAST_SHARE)), 0.0, 1.0)
            weight = float(weights[k][cell]) / len(used)
            mean += weight * typical
            deviation += weight * math.sqrt(max(min(typical, SPREAD * typical**2) - typical**2, 0.0))
        mean += float(slopes[outcome])
        first, second = first + share * mean, second + share * (mean**2 + deviation**2)
    return _normal(value, noise + max(second - first**2, 0.0) / released.records, z)


def _weights(shares: np.ndarray, intervals: int) -> list[np.ndarray]:
    """For each edge the weights of its cells: 1 / G at the edge, and in the middle of each earlier interval."""
    seen = np.maximum(_seen(shares), LEAST_SEEN)
    middle = np.sqrt(seen[:-1] * seen[1:])
    return [np.concatenate([[1 / seen[k + 1]], 1 / middle[: k + 1]]) for k in range(intervals)]


def _slopes(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    steps = DIFFERENCE * np.eye(len(at))
    return np.array([(function(at + step) - function(at - step)) / (2 * DIFFERENCE) for step in steps])


def _by_differences(
    function: Callable[[np.ndarray], float], shares: np.ndarray, std: float
) -> tuple[float, float, float]:
    """A function of shares of cells: its value, and its variance by noise and (times the records) by sampling."""
    slopes = _slopes(function, shares)
    held = np.maximum(shares, 0.0)
    sampling = max(float(slopes**2 @ held - (slopes @ held) ** 2), 0.0)
    return function(shares), std**2 * float(((slopes - slopes.mean()) ** 2).sum()), sampling


# ------------------------------------------------------------------------------------------ against a constant guess

BETTER, NO_BETTER, OPEN, NOT_COMPARED = "better", "no better", "open", "not compared"
CHANCE: Mapping[str, Sequence[tuple[str, float, str]]] = {  # by task: a metric, its value for a constant, its name
    "two classes": (
        ("auc", 0.5, "its AUC"),
        ("brier_gain", 0.0, "the Brier score of the prevalence less that of the model"),
    ),
    "quantities": (("r2", 0.0, "its R²"),),
    "counts": (("r2", 0.0, "its R²"),),
    "survival times": (("concordance", 0.5, "its concordance"),),
}


def against_constant(found: Mapping[str, Any]) -> str:
    """How the model compares with a constant guess, by the metrics that were found.

    Two classes are compared by AUC and by Brier score with the constant that knows the prevalence; a log loss has no
    bound, so none is released. Quantities and counts are compared by R², survival by concordance. Of many classes the
    counts do not hold how common each class is, so no constant is known.

    Returns:
      `better` if every interval lies above the constant; `no better` if an estimate does not; else `open`.
    """
    if found["task"] not in CHANCE:
        return NOT_COMPARED
    parts = [(found[key]["estimate"], found[key]["low"], chance) for key, chance, _ in CHANCE[found["task"]]]
    if any(value is not None and value <= chance + ROUNDING for value, _, chance in parts):
        return NO_BETTER
    return BETTER if all(value is not None and low > chance + ROUNDING for value, low, chance in parts) else OPEN


def doubt(found: Mapping[str, Any]) -> str:
    """A sentence for people if the model is not shown to be better than a constant guess; else empty.

    It begins with WARNING where the estimates are no better than a constant's, and with note where the intervals decide
    nothing.
    """
    verdict = against_constant(found)
    if verdict not in (NO_BETTER, OPEN):
        return ""
    told, certain = [], False
    for key, chance, name in CHANCE[found["task"]]:
        value, low, high = (found[key][part] for part in ("estimate", "low", "high"))
        reach = float(found[key].get("binning", 0.0))
        certain |= high + reach <= chance
        if value is None or low <= chance + ROUNDING:
            shown = "open" if value is None else f"{value:.4g}"
            bins = f", and bins may hide {reach:.3f}" if reach >= 0.01 else ""
            told.append(f"{name} is {shown} ({low:.4g} to {high:.4g}{bins}), and {chance:g} is a constant's")
    why = "; ".join(told)
    if verdict == OPEN:
        return (
            f"note: these counts do not show that the model is better than a constant guess: {why}. More test "
            "records, or a larger epsilon of the evaluation, narrow the interval."
        )
    sure = "" if certain else ". The interval does not exclude that it is slightly better"
    return f"WARNING: the model is no better than a constant guess: {why}{sure}."


# ----------------------------------------------------------------------------------------------------------- estimates


def proportion(shares: Shares, weight: np.ndarray, z: float) -> Estimate:
    """The share of the records in some cells (weights 0 and 1): Wilson's interval with the variance of the noise."""
    share, noise = shares.total(weight)
    n = shares.records
    # All p with (share - p)^2 <= z^2 (p (1 - p) / n + noise).
    a, b, c = 1 + z**2 / n, 2 * share + z**2 / n, share**2 - z**2 * noise
    root = math.sqrt(max(b**2 - 4 * a * c, 0.0))
    return Estimate(_inside(share), _inside((b - root) / (2 * a)), _inside((b + root) / (2 * a)))


def part_of(shares: Shares, some: np.ndarray, all_of: np.ndarray, z: float) -> Estimate:
    """The share of the records in some cells among those in others, which hold them."""
    both = np.stack([some, all_of]).astype(float)
    a, whole = both @ shares.f
    (part_noise, common), (_, whole_noise) = both @ shares.noise @ both.T
    sampling = max(float(whole), 0.0) / shares.records  # times t (1 - t), for a true share of t
    known = whole > LEAST_SIGNAL * math.sqrt(max(whole_noise, 0.0)) + LEAST_SHARE
    # All t with (a - t whole)^2 <= z^2 (noise of a - t whole, and t (1 - t) times the above).
    low, high = _below_zero(
        whole**2 - z**2 * (whole_noise - sampling),
        -2 * a * whole + z**2 * (2 * common - sampling),
        a**2 - z**2 * part_noise,
        (0.0, 1.0),
    )
    return Estimate(_inside(float(a / whole)) if known else None, low, high)


def area(shares: Shares, z: float) -> tuple[Estimate, float]:
    """The area under the ROC curve of the binned scores, and an upper bound on what binning alone may change."""
    bins = shares.bins
    above = np.tri(bins, k=-1) + np.eye(bins) / 2  # of (positive bin, negative bin)
    everyone = np.ones((bins, bins))
    auc = _ratio_of_pairs(shares, above, everyone, z)
    ties = _ratio_of_pairs(shares, np.eye(bins) / 2, everyone, z)
    clipped = None if auc.value is None else _inside(auc.value)
    return Estimate(clipped, _inside(auc.low), _inside(auc.high)), min(max(ties.high, 0.0), 0.5)


def gain(released: Released, shares: Shares, centres: np.ndarray, z: float) -> Estimate:
    """The Brier score p (1 - p) of the constant prediction p, the share of positive records, less the model's.

    Above 0 the model is better than that constant. One record moves the difference by (1 - 2 p) label - (score -
    label)^2, whose spread is taken from the cells; p is an estimate, whose noise of variance v lowers p (1 - p) by v.
    """
    bins = shares.bins
    label, score = np.repeat([0.0, 1.0], bins), np.tile(centres, 2)
    p, noise = shares.total(label)
    slope = 1 - 2 * p
    variance = released.std[BRIER] ** 2 + slope**2 * noise + shares.sampling(slope * label - (score - label) ** 2)
    return _normal(p * (1 - p) + noise - _mean(released, BRIER), variance, z, -1.0)


def _ratio_of_pairs(shares: Shares, some: np.ndarray, of: np.ndarray, z: float) -> Estimate:
    """f_1' some f_0 / f_1' of f_0 for the shares f_1 of positive and f_0 of negative records."""
    bins = shares.bins
    negative, positive = shares.f[:bins], shares.f[bins:]
    cross = shares.noise[bins:, :bins]  # what noise adds to the mean of a product of two estimates
    values, gradients = [], []
    for pairs in (some, of):
        values.append(float(positive @ pairs @ negative - (pairs * cross).sum()))
        gradients.append(np.concatenate([pairs.T @ positive, pairs @ negative]))
    g = np.stack(gradients)
    noise = g @ shares.noise @ g.T
    f = np.maximum(shares.f, 0.0)
    centred = (g * f) @ g.T - np.outer(g @ f, g @ f)
    m = noise + centred / shares.records
    return _ratio(values[0], values[1], m[0, 0], m[1, 1], m[0, 1], z)


def _ratio(a: float, b: float, var_a: float, var_b: float, cov: float, z: float) -> Estimate:
    """a / b by Fieller: all t with (a - t b)^2 <= z^2 var(a - t b)."""
    known = b > LEAST_SIGNAL * math.sqrt(max(var_b, 0.0)) + LEAST_SHARE
    ends = _below_zero(b**2 - z**2 * var_b, -2 * a * b + 2 * z**2 * cov, a**2 - z**2 * var_a, WIDEST)
    return Estimate(a / b if known else None, *ends)


def _below_zero(a: float, b: float, c: float, widest: tuple[float, float]) -> tuple[float, float]:
    """Where a t^2 + b t + c <= 0, within the widest interval; all of that where the set is not one interval."""
    if not a > 0:
        return widest
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    low, high = (_between((-b + sign * root) / (2 * a), *widest) for sign in (-1, 1))
    return low, high


def curve(shares: Shares, borders: np.ndarray, centres: np.ndarray, z: float) -> list[dict[str, float | None]]:
    """Predicted and observed shares in groups of adjacent bins, each large enough to stand out from the noise."""
    bins = shares.bins
    groups, start = [], 0
    everyone = np.zeros(2 * bins)
    for stop in range(1, bins + 1):
        everyone[:] = 0
        everyone[start:stop] = everyone[bins + start : bins + stop] = 1
        mass, noise = shares.total(everyone)
        if mass >= max(1 / CURVE_GROUPS, 4 * math.sqrt(noise)):
            groups.append((start, stop))
            start = stop
    if groups:
        groups[-1] = groups[-1][0], bins  # what is left is too small to stand alone
    result: list[dict[str, float | None]] = []
    place = np.tile(np.arange(bins), 2)
    positive = np.repeat([False, True], bins)
    for start, stop in groups:
        inside = (place >= start) & (place < stop)
        mass, _ = shares.total(inside.astype(float))
        sum_of_scores, _ = shares.total(np.where(inside, centres[place], 0.0))
        predicted = min(max(sum_of_scores / mass, borders[start]), borders[stop]) if mass > 0 else None
        observed = part_of(shares, inside & positive, inside, z)
        result.append(
            {
                "from": float(borders[start]),
                "to": float(borders[stop]),
                "share": _inside(mass),
                "predicted": predicted,
                "observed": observed.value,
                "low": observed.low,
                "high": observed.high,
            }
        )
    return result


def _mean(released: Released, name: str) -> float:
    return float(np.asarray(released.parts[name]).reshape(-1)[0])


def _normal(value: float, variance: float, z: float, least: float = 0.0) -> Estimate:
    reach = z * math.sqrt(max(variance, 0.0))
    ends = [_between(end, least, 1.0) for end in (value, value - reach, value + reach)]
    return Estimate(*ends)


def _times(estimate: Estimate, factor: float) -> Estimate:
    value = None if estimate.value is None else factor * estimate.value
    return Estimate(value, factor * estimate.low, factor * estimate.high)


def _inside(value: float) -> float:
    return _between(value, 0.0, 1.0)


def _between(value: float, low: float, high: float) -> float:
    return float(min(max(value, low), max(low, high)))
