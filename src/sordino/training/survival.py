"""Metrics of survival predictions, in float64: concordance, and the Brier score at the public edges of time.

Labels are signed times (`data.target.Target`): positive where the event happened, negative where the record was last
seen then (censored).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_ERRORS = 2.0  # a concordance that is fewer standard errors above 0.5 may be chance
BY_CHANCE = "within two standard errors of 0.5, which is chance"
LEAST_SHARE_SEEN = 0.05  # an edge that fewer records are followed up to has no Brier score: its weights explode


class StepFunction(NamedTuple):
    """A share that falls at some times: at times[k] to values[k], from 1 before the first."""

    times: np.ndarray
    values: np.ndarray

    def at(self, time: np.ndarray) -> np.ndarray:
        return np.append(1.0, self.values)[np.searchsorted(self.times, time, side="right")]

    def before(self, time: np.ndarray) -> np.ndarray:
        """Just before each time."""
        return np.append(1.0, self.values)[np.searchsorted(self.times, time, side="left")]


def kaplan_meier(time: np.ndarray, event: np.ndarray) -> StepFunction:
    """The share without the event, by time; who is last seen at a time is at risk until then.

    >>> kaplan_meier(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, False])).values.tolist()
    [0.75, 0.75, 0.375, 0.375]
    """
    times, place = np.unique(time, return_inverse=True)
    leaving = np.bincount(place.reshape(-1), minlength=len(times)).astype(np.float64)
    events = np.bincount(place.reshape(-1), weights=event.astype(np.float64), minlength=len(times))
    at_risk = leaving[::-1].cumsum()[::-1]
    return StepFunction(times, np.cumprod(1 - events / at_risk))


def concordance(y: np.ndarray, risk: np.ndarray) -> float:
    """Harrell's index: the share of comparable pairs in which who has the event first has the higher risk.

    A pair is comparable if the event of one record happens while the other is still seen without it (also at the same
    time). Equal risks count as one half. NaN where no pair is comparable, or a risk is NaN.

    >>> concordance(np.array([1.0, 2.0, -3.0]), np.array([0.9, 0.1, 0.5]))
    0.6666666666666666
    """
    if np.isnan(risk).any():
        return math.nan
    time, event = np.abs(y), y > 0
    order = np.lexsort((event, -time))  # latest first; at one time, those who are only seen first
    time, event = time[order], event[order]
    _, rank = np.unique(risk[order], return_inverse=True)
    # Comparable to an event are all later times, and who is only seen at its time: a prefix of the order.
    later = np.searchsorted(-time, -time[event], side="left")
    same = np.searchsorted(-time, -time[event], side="right")
    seen = np.concatenate([[0], np.cumsum(~event)])
    prefix = later + seen[same] - seen[later]
    below, equal = _ranks_in_prefix(rank.reshape(-1), prefix, rank.reshape(-1)[event])
    pairs = prefix.sum()
    return float((below.sum() + equal.sum() / 2) / pairs) if pairs else math.nan


def chance_error(y: np.ndarray, person: np.ndarray | None = None) -> float:
    """The standard error of the concordance of risks that say nothing of these times: about one half.

    With risks in random order, the number of ordered pairs has the variance (sum of (f - l)² + pairs) / 12, where f and
    l count the comparable pairs in which a record has the event first and in which it comes later. If all
    events come at one time, this is the error of Mann and Whitney. Equal risks make it smaller. The records of one
    person may be alike in any way, so the variance is multiplied by the most records of a person.

    Args:
      y: signed times.
      person: whom each record is about; None where each is about another one.

    Returns:
      The standard error; NaN where no pair is comparable.

    >>> chance_error(np.array([1.0, -2.0]))
    0.5
    """
    time, event = np.abs(y), y > 0
    times, events, censored = np.sort(time), np.sort(time[event]), np.sort(time[~event])
    after = len(y) - np.searchsorted(times, time, side="right")
    beside = np.searchsorted(censored, time, side="right") - np.searchsorted(censored, time, side="left")
    first = np.where(event, after + beside, 0).astype(np.float64)
    before = np.searchsorted(events, time, side="left")
    later = np.where(event, before, np.searchsorted(events, time, side="right")).astype(np.float64)
    pairs = first.sum()
    most = 1 if person is None or not len(person) else int(np.unique(person, return_counts=True)[1].max())
    return math.sqrt(most * (np.square(first - later).sum() + pairs) / 12) / pairs if pairs else math.nan


def _ranks_in_prefix(rank: np.ndarray, prefix: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each query, how many of the first `prefix` ranks are below its value, and how many equal it.

    A wavelet matrix: one stable partition of the ranks per bit, from the highest, and one step of all queries.
    """
    first, last, below = np.zeros_like(prefix), prefix, np.zeros_like(prefix)
    for bit in reversed(range(int(rank.max(initial=0)).bit_length())):
        one = (rank >> bit) & 1 == 1
        zeros = np.concatenate([[0], np.cumsum(~one)])
        up = (value >> bit) & 1 == 1
        below = below + np.where(up, zeros[last] - zeros[first], 0)
        first, last = (np.where(up, zeros[-1] + place - zeros[place], zeros[place]) for place in (first, last))
        rank = np.concatenate([rank[~one], rank[one]])
    return below, last - first


def brier_by_edge(y: np.ndarray, survival: np.ndarray, edges: Sequence[float]) -> list[float]:
    """The Brier score of the predicted survival at each edge, weighted for censoring (Graf et al. 1999).

    Records that were last seen before an edge are left out there, and those that remain weigh 1 / G, where G is the
    Kaplan-Meier share of records that are not yet censored: just before the event, or at the edge. That is unbiased if
    censoring does not depend on the risk. NaN at an edge that few records are followed up to.

    Args:
      y: signed times.
      survival: predicted probability of no event by each edge, records by edges.
      edges: the edges, without 0.
    """
    time, event = np.abs(y).astype(np.float64), y > 0
    if not len(y):
        return [math.nan] * len(edges)
    seen = kaplan_meier(time, ~event)
    scores = []
    for k, edge in enumerate(edges):
        dead, alive = event & (time <= edge), time >= edge
        alive &= ~dead
        share = float(seen.before(np.array([edge]))[0])
        if share < LEAST_SHARE_SEEN:
            scores.append(math.nan)
            continue
        weight = np.where(dead, 1 / np.maximum(seen.before(time), share), alive / share)
        scores.append(float((weight * np.square(alive - survival[:, k])).mean()))
    return scores


def brier(y: np.ndarray, survival: np.ndarray, edges: Sequence[float]) -> float:
    """The mean of the Brier scores at the edges where it is defined."""
    scores = [score for score in brier_by_edge(y, survival, edges) if not math.isnan(score)]
    return float(np.mean(scores)) if scores else math.nan


def constant_survival(y: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """The Kaplan-Meier survival of the records themselves at the edges: the best prediction without features."""
    return kaplan_meier(np.abs(y).astype(np.float64), y > 0).at(np.asarray(edges, np.float64) * (1 - 1e-12))


def survival_of(logits: np.ndarray) -> np.ndarray:
    """Survival by the end of each interval, from log-odds of hazards."""
    return np.asarray(np.exp(np.cumsum(-np.logaddexp(0.0, logits), -1)))
