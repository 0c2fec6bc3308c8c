"""The sensitivity of a stream of correlated noise, computed again from what a certificate states of it.

Nothing here uses the code that calibrated the noise. For `inverse-root` a certificate states the number of bands, for
`banded` the diagonals of the encoder and what they are fitted to. Who takes part in which round follows from the
participation, or is listed. Trees, schedules, and streams beside other stages are not computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sordino.core import Trust
from sordino.errors import SordinoError
from sordino.evidence.certificate import numbers_of
from sordino.lazy import scipy
from sordino.privacy.participation import FULL

EXPONENTS = 32  # the exponent of banded noise is a whole number of parts of this size
MOST_ERROR = (
    1e-3  # relative: by how much a claim of a client's own rows may exceed what they move; it pays for rounding
)
_Cert = Mapping[str, Any]


class Factor(NamedTuple):
    """What a stream makes of the sensitivity of one answer.

    Attributes:
      value: the factor on the sensitivity.
      above: relative: by how much a claim may exceed it.
      times: releases of the account: one for the whole stream, or one per round where minibatches are drawn.
    """

    value: float
    above: float
    times: int


def stated(cert: _Cert, query: _Cert) -> bool:
    """Whether the certificate tells enough of a stream to compute its sensitivity: factors, and who comes when.

    A stage must be the whole run. For `inverse-root` the rounds of a client must follow from its number, all rows that
    it moves must be visible (those of sums, or its own of every round), and there are no integers or minibatches.
    """
    factor, clients = query.get("factor"), cert["sampler"]["clients"]
    if not factor or len({q["query"].split(".")[0] for q in cert["queries"]}) > 1:
        return False
    known = clients == FULL or clients.startswith("cyclic:")
    if "diagonals" in factor:
        return int(cert["rounds"]) <= int(factor["rounds"]) and (known or all("rounds" in g for g in cert["groups"]))
    if cert.get("secure") or _drawn(cert, query):
        return False
    common = cert["trust"] != Trust.UNTRUSTED_SERVER
    return int(factor["rounds"]) == int(cert["rounds"]) and (clients == FULL or (common and known))


def factor_of(cert: _Cert, query: _Cert, group: _Cert) -> Factor:
    """By how much the stream multiplies the sensitivity of the group's clients.

    Raises:
      SordinoError: the clients of the group have different factors.
    """
    of = _banded_factor if "diagonals" in query["factor"] else _inverse_root_factor
    factors = [of(cert, query, attended) for attended in _attended(cert, group)]
    if max(each.value for each in factors) > min(each.value for each in factors) * (1 + 1e-6):
        raise SordinoError("certificate: clients of one group have streams of different sensitivities.")
    return max(factors)


def least_row(query: _Cert) -> float:
    """The least sum of a row of the encoder, in absolute values: rounding stretches this row most."""
    factor = query["factor"]
    return float(_sum_of_columns(tuple(factor["diagonals"]), int(factor["rounds"]), range(int(factor["rounds"]))).min())


def check(cert: _Cert, query: _Cert, problems: list[str]) -> None:
    """Check that the diagonals are fitted to momentum and decay, and that the listed rounds fit the participation."""
    factor, name = query["factor"], query["query"]
    if "diagonals" not in factor:
        return
    diagonals = np.array(factor["diagonals"], dtype=float)
    expected = _fitted(diagonals, float(factor["momentum"]), float(factor["decay"]))
    if not 1 <= len(diagonals) <= int(factor["rounds"]) or not np.allclose(diagonals, expected, rtol=1e-6, atol=1e-12):
        problems.append(f"{name}: the diagonals are not fitted to the stated momentum and decay")
    kind, _, amount = cert["sampler"]["clients"].partition(":")
    if kind == "fixed":
        counts = np.zeros(int(cert["rounds"]), dtype=int)
        for group in cert["groups"]:
            for text in group["rounds"]:
                counts[numbers_of(text, len(counts))] += 1
        if (counts != int(amount)).any() or any(len(g["rounds"]) != int(g["count"]) for g in cert["groups"]):
            problems.append(f"{name}: the listed rounds do not have {amount} clients each")


def _drawn(cert: _Cert, query: _Cert) -> bool:
    """Whether minibatches are drawn for the query."""
    releases = [r for g in cert["groups"] for r in g["releases"] if r["query"] == query["query"]]
    return any(float(release["rate"]) < 1 for release in releases)


def _attended(cert: _Cert, group: _Cert) -> list[tuple[int, ...]]:
    """The different sets of rounds in which clients of the group took part."""
    clients, rounds = str(cert["sampler"]["clients"]), int(cert["rounds"])
    if clients == FULL:
        return [tuple(range(rounds))]
    if clients.startswith("cyclic:"):
        step = int(clients.partition(":")[2])
        phases = {number % step for number in numbers_of(group["clients"], int(cert["clients"]))}
        return [tuple(range(phase, rounds, step)) for phase in phases]
    return [tuple(numbers_of(text, rounds)) for text in sorted(set(group["rounds"])) or [""]]


# ------------------------------------------------------------------------------------------------------------ banded


def _banded_factor(cert: _Cert, query: _Cert, attended: tuple[int, ...]) -> Factor:
    diagonals, rounds = tuple(map(float, query["factor"]["diagonals"])), int(query["factor"]["rounds"])
    if _drawn(cert, query):
        # A minibatch per round is a release of its own only if no two rounds of a client share a row of the encoder.
        if any(later - earlier < len(diagonals) for earlier, later in itertools.pairwise(attended)):
            raise SordinoError("certificate: rounds with minibatches are closer than the band of their noise.")
        return Factor(1.0, 0.0, len(attended))
    moved, times = _sum_of_columns(diagonals, rounds, attended), int(len(attended) > 0)
    if cert["trust"] != Trust.UNTRUSTED_SERVER:
        return Factor(_length(moved), 0.0, times)
    if attended == tuple(range(len(attended))):  # later rows were not released
        return Factor(_length(moved[: len(attended)]), 0.0, times)
    return Factor(min(_length(moved), _of_own_rows(diagonals, rounds, attended)), MOST_ERROR, times)


def _sum_of_columns(diagonals: tuple[float, ...], rounds: int, attended: Any) -> np.ndarray:
    """The sum of the encoder's columns of these rounds, in absolute values: column s is diagonals / norm from row s."""
    total, column, norms = np.zeros(rounds), np.abs(diagonals), _norms(diagonals, rounds)
    for s in attended:
        total[s : s + len(column)] += column[: rounds - s] / norms[s]
    return total


def _norms(diagonals: tuple[float, ...], rounds: int) -> np.ndarray:
    """The norms of the columns before they are scaled; the last ones are shorter, because they end with the stage."""
    squares = np.cumsum(np.square(diagonals))
    return np.asarray(np.sqrt(squares[np.minimum(len(squares), np.arange(rounds, 0, -1)) - 1]))


def _of_own_rows(diagonals: tuple[float, ...], rounds: int, attended: tuple[int, ...]) -> float:
    """The sensitivity of a client's own rows, if nobody sees others.

    The noise of these rows is D z, D their rows of the encoder's inverse. With D^T = Q R the covariance is R^T R. Its
    inverse has the entries of R^-1 R^-T, whose absolute values add up to the square of the sensitivity.
    """
    bands, norms = np.zeros((len(diagonals), rounds)), _norms(diagonals, rounds)
    for k, diagonal in enumerate(diagonals):  # of the transposed encoder, in LAPACK's form
        bands[len(diagonals) - 1 - k, k:] = diagonal / norms[: rounds - k]
    chosen = np.zeros((rounds, len(attended)))
    chosen[list(attended), range(len(attended))] = 1.0
    rows = scipy.linalg.solve_banded((0, len(diagonals) - 1), bands, chosen)
    triangle = scipy.linalg.qr(rows, mode="r")[0][: len(attended)]
    inverse = scipy.linalg.solve_triangular(triangle, np.eye(len(attended)))
    return math.sqrt(float(np.abs(inverse @ inverse.T).sum()))


def _fitted(diagonals: np.ndarray, momentum: float, decay: float) -> np.ndarray:
    """The first coefficients of (1 - a x)^-p (1 - m x)^(-1/2), a = 1 - decay, by the gamma function and a convolution.

    The coefficient of x is a p + m / 2, which tells p. It must be a whole number of parts.
    """
    keep, count = 1 - decay, len(diagonals)
    if count == 1:
        return np.ones(1)
    if not (0 < keep <= 1 and 0 <= momentum < 1):
        return np.full(count, np.nan)
    parts = round(EXPONENTS * (diagonals[1] - momentum / 2) / keep) if np.isfinite(diagonals[1]) else 0
    if not 1 <= parts <= EXPONENTS:
        return np.full(count, np.nan)
    return np.convolve(_power(keep, parts / EXPONENTS, count), _power(momentum, 0.5, count))[:count]


def _power(base: float, exponent: float, count: int) -> np.ndarray:
    """The first coefficients of (1 - base x)^-exponent."""
    from scipy.special import gammaln

    k = np.arange(count)
    size = np.exp(gammaln(k + exponent) - gammaln(exponent) - gammaln(k + 1.0))
    return np.asarray(size * base**k)


def _length(vector: np.ndarray) -> float:
    return math.sqrt(math.fsum(vector * vector))


# ------------------------------------------------------------------------------------------------------ inverse root


def _inverse_root_factor(cert: _Cert, query: _Cert, attended: tuple[int, ...]) -> Factor:
    """The norm of the sum of the encoder's columns of a client's rounds, by convolution with its first column."""
    from scipy.signal import fftconvolve

    bands, rounds = int(query["factor"]["inverse_band"]), int(query["factor"]["rounds"])
    taken = np.zeros(rounds)
    taken[list(attended)] = 1.0
    norm = float(np.linalg.norm(fftconvolve(_first_column(bands, rounds), taken)[:rounds]))
    return Factor(norm, 0.0, int(len(attended) > 0))


@lru_cache
def _first_column(bands: int, rounds: int) -> np.ndarray:
    """1 / d as a power series, d the first coefficients of (1 - x)^(1/2), by Newton's iteration.

    The accountant computes d as a running product, and the encoder by a recurrence. Here d_k = -Gamma(k - 1/2) / (2
    sqrt(pi) k!), and the number of right terms of y <- y (2 - d y) doubles with every step.
    """
    from scipy.signal import fftconvolve
    from scipy.special import gammaln

    k = np.arange(1, min(bands, rounds))
    root = np.concatenate([[1.0], -np.exp(gammaln(k - 0.5) - gammaln(k + 1.0)) / (2 * math.sqrt(math.pi))])
    column = np.ones(1)
    while len(column) < rounds:
        size = min(2 * len(column), rounds)
        rest = -fftconvolve(root[:size], column)[:size]
        rest = np.pad(rest, (0, size - len(rest)))
        rest[0] += 2.0
        column = fftconvolve(column, rest)[:size]
    return column
