"""Noise that is correlated over the rounds of a stage, for servers that add releases up.

Let P be the running sum of the decoder's rows. Every builder has P @ encoder = A, the lower triangle of ones. So the
server's running sums carry the noise P @ z, and they are a function of `encoder @ x + z`, which is one Gaussian
release. Release t uses only rows of the encoder that involve rounds up to t. So it can be sent in round t, and clients
may react to it at no further cost (Denisov et al. 2022, Theorem 2.1).

The noise cancels only if one z serves all rounds: the server's, or that of clients who take part in all rounds.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sordino.core import Correlated
from sordino.errors import SordinoError
from sordino.lazy import scipy

MOST_CORRELATED_ROUNDS = 4096  # the matrices are dense


def independent(rounds: int) -> Correlated:
    """Fresh noise of equal size in every round."""
    _check(rounds)
    return Correlated(np.eye(rounds), np.eye(rounds))


def schedule(rounds: int) -> Correlated:
    """Fresh noise of variance s_t^2 proportional to 1 / sqrt(T - t): optimal under full participation.

    The noise of round t stays in T - t running sums. This choice minimizes the sum of (T - t) s_t^2 for a fixed sum of
    1 / s_t^2. No encoder C is better. Let D^2 = diag(T - t), the diagonal of A^T A. The entries of
    R = D^-1 A^T A D^-1 are sqrt((T - s) / (T - t)) for s >= t, which are also E[sign_s sign_t] of a Markov chain of
    signs. So some signs satisfy |C signs|^2 >= tr(C R C^T) = |A D^-1 C^T|^2. By Cauchy-Schwarz this times |P|^2 is at
    least the square of tr(C D^-1 A^T P) = tr(D^-1 A^T A) = tr D, and the schedule attains (tr D)^2.

    Args:
      rounds: of the stage.

    Returns:
      The noise.

    Raises:
      SordinoError: rounds is out of its range.
    """
    _check(rounds)
    weight = np.sqrt(np.arange(rounds, 0.0, -1.0))  # 1 / s_t^2
    std = np.sqrt(weight.mean() / weight)
    return Correlated(np.diag(1 / std), np.diag(std))


def tree(rounds: int, honaker: bool = True, restart: int = 0, complete: bool = False) -> Correlated:
    """A binary tree: every node noises the sum of its rounds, and a few nodes make up a running sum.

    One round of a unit moves one node per level. Further rounds move the same nodes again: under full participation a
    node of m rounds moves by m, and adds m^2 to the squared sensitivity.

    Args:
      rounds: of the stage.
      honaker: estimate a node also from all nodes below it. This is optimal in its round, because no other finished
        node shares a round with it. `least_squares` is still better.
      restart: rounds after which a new tree starts; 0 for one tree.
      complete: pad every tree except the last with empty rounds to a power of two. Its total is then the value of its
        root. Padded nodes also see data, and are paid for.

    Returns:
      The noise.

    Raises:
      SordinoError: rounds or restart is out of its range.
    """
    _check(rounds)
    if restart < 0:
        raise SordinoError(f"restart: {restart} must be at least 0; 0 means a single tree.")
    size = restart or rounds
    followed, last = divmod(rounds - 1, size)
    blocks = [_tree(size, honaker, complete)] * followed + [_tree(last + 1, honaker, False)]
    return Correlated(
        scipy.linalg.block_diag(*(b.encoder for b in blocks)), scipy.linalg.block_diag(*(b.decoder for b in blocks))
    )


def levels(rounds: int, complete: bool = False) -> list[np.ndarray]:
    """The nodes of a tree from the leaves up, as rows [first round, round after the last]. `complete` as in `tree`."""
    nodes_by_level, size = [], 1
    while size < 2 * rounds if complete else size <= rounds:
        starts = np.arange(0, rounds if complete else rounds - size + 1, size)
        nodes_by_level.append(np.stack([starts, np.minimum(starts + size, rounds)], axis=1))
        size *= 2
    return nodes_by_level


def banded(rounds: int, band: int) -> Correlated:
    """A lower-triangular encoder with `band` constant diagonals, whose columns are scaled to norm 1.

    Columns at least `band` apart share no row. So if the rounds of a unit are at least `band` apart, its squared
    sensitivity is their number, as for independent noise. Units that take part more often pay more.

    The coefficients are those of the square root of A, binom(2k, k) / 4^k, or better ones that a local search finds.

    Args:
      rounds: of the stage.
      band: number of diagonals.

    Returns:
      The noise.

    Raises:
      SordinoError: rounds or band is out of its range.
    """
    _check(rounds)
    if band < 1:
        raise SordinoError(f"band: {band} must be at least 1; 1 means independent noise.")
    k = np.arange(1, min(band, rounds))
    root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    options = [_toeplitz(rounds, root), _toeplitz(rounds, np.array(_improved(rounds, tuple(root))))]
    return min(options, key=lambda noise: prefix_error(noise, np.arange(1)))


def least_squares(noise: Correlated) -> Correlated:
    """Noise of the same sensitivity with the smallest variance of all unbiased decoders.

    This is Honaker's fully efficient estimator. Least squares on all of C @ x + z has the covariance A (C^T C)^-1 A^T,
    but uses rows of later rounds. The lower-triangular factor of the same C^T C has the same covariance and does not
    use them. |C x| is the same for every x. The factor of a tree has no negative entry (C^T C is ultrametric, so its
    inverse is an M-matrix), so `sensitivity` is exact.
    """
    gram = noise.encoder.T @ noise.encoder
    encoder = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T
    return Correlated(encoder, scipy.linalg.solve_triangular(encoder, np.eye(len(encoder)), lower=True))


def prefix_error(noise: Correlated, participation_rounds: np.ndarray) -> float:
    """The mean variance of the running sums' noise if a unit that moves each of these rounds by 1 has mu = 1."""
    prefix = np.cumsum(noise.decoder, axis=0)
    return float(noise.sensitivity(participation_rounds) ** 2 * (prefix**2).sum(1).mean())


def _check(rounds: int) -> None:
    if not 1 <= rounds <= MOST_CORRELATED_ROUNDS:
        raise SordinoError(
            f"rounds: {rounds} must lie between 1 and {MOST_CORRELATED_ROUNDS} for correlated noise with dense "
            "factors; mechanism = inverse-root serves more."
        )


def _tree(rounds: int, honaker: bool, complete: bool) -> Correlated:
    """One tree. A running sum is the largest node that ends with it, plus the running sum before that node."""
    nodes = levels(rounds, complete)
    spans = np.concatenate(nodes)
    t = np.arange(rounds)
    encoder = ((spans[:, :1] <= t) & (t < spans[:, 1:])).astype(float)

    count = len(spans)
    measured = np.split(np.eye(count), np.cumsum([len(level) for level in nodes])[:-1])
    estimates = measured[:1]  # by level: rows of weights on the nodes' noisy values
    for row in measured[1:]:
        pair = np.zeros((2 * len(row), count))
        children = estimates[-1][: len(pair)]
        pair[: len(children)] = children  # in a completed tree the second child of a node may be empty
        below = pair.reshape(len(row), 2, count).sum(1)
        variance = (below**2).sum(1, keepdims=True)
        # The measured value of a node has variance 1. Weights are inversely proportional to variances.
        estimates.append((variance * row + below) / (variance + 1) if honaker else row)

    prefix = np.zeros((rounds + 1, count))
    for stop in range(1, rounds + 1):
        height = (stop & -stop).bit_length() - 1
        if complete and stop == rounds:
            height = len(nodes) - 1
        number = (stop - 1) >> height
        prefix[stop] = prefix[nodes[height][number, 0]] + estimates[height][number]
    return Correlated(encoder, np.diff(prefix, axis=0))


def _toeplitz(rounds: int, coefficients: np.ndarray) -> Correlated:
    """The noise whose encoder has these diagonals and columns of norm 1."""
    from scipy.signal import lfilter  # slow to import, and few methods need it

    impulse = np.eye(1, rounds)[0]
    encoder = scipy.linalg.toeplitz(lfilter(coefficients, [1.0], impulse), 0 * impulse)
    inverse = scipy.linalg.toeplitz(lfilter([1.0], coefficients, impulse), 0 * impulse)
    norms = np.linalg.norm(encoder, axis=0)
    return Correlated(encoder / norms, norms[:, None] * inverse)


@lru_cache
def _improved(rounds: int, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """Coefficients c with a smaller |c|^2 times the sum of (T - t) g_t^2, where g = (1, 1, ...) / c as power series.

    This is the error up to the norms of the last columns. Further digits do not matter, and differ between computers.
    """
    from scipy.signal import lfilter

    remaining = np.arange(rounds, 0.0, -1.0)

    def error(tail: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], tail])
        g = lfilter([1.0], c, np.ones(rounds))
        slope = lfilter([1.0], c, g)  # minus the derivative of g by c_k, up to a shift by k
        total = float(remaining @ g**2)
        shifted = np.array([(remaining * g)[k:] @ slope[: rounds - k] for k in range(1, len(c))])
        return c @ c * total, 2 * tail * total - 2 * (c @ c) * shifted

    if len(coefficients) == 1:
        return coefficients
    best = scipy.optimize.minimize(
        error, np.array(coefficients[1:]), jac=True, method="L-BFGS-B", options={"ftol": 1e-14}
    )
    return (1.0, *np.round(best.x, 4).tolist())
