"""Noise that is correlated over the rounds of a stage, for servers that add releases up.

Let P be the running sum of the decoder's rows. Every builder has P @ encoder = A, the lower triangle of ones. So the
server's running sums carry the noise P @ z, and they are a function of `encoder @ x + z`, which is one Gaussian
release. Release t uses only rows of the encoder that involve rounds up to t. So it can be sent in round t, and clients
may react to it at no further cost (Denisov et al. 2022, Theorem 2.1).

The noise cancels only if one z serves all rounds: the server's, or that of clients who take part in all rounds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from sordino.core import MOST_ERROR, Correlated
from sordino.errors import SordinoError
from sordino.lazy import scipy
from sordino.privacy.accounting import tree_factors
from sordino.privacy.accounting.tree_factors import TreeFactors

MOST_CORRELATED_ROUNDS = 4096  # the matrices are dense
TREE_SLACK = 4e-6  # of a client's own tree: what the rounding of its factors may cost (docs/proofs.md, "Trees")
MOST_INVERTED = 256  # rounds of a client's own banded noise up to which the covariance is inverted
AT_ONCE = 32  # of more rounds, how many are followed together in one window
LEAST_MARGIN = 20  # rounds by which a window reaches beyond them, and two bands more
INVERTED = 64  # rounds of a client's own tree up to which the covariance is inverted, which costs no slack
EXPONENTS = np.arange(1, 33) / 32  # of the weights of earlier rounds, of which `fitted_diagonals` takes the best


@dataclass(frozen=True)
class Structured(Correlated, ABC):
    """Noise whose factors follow from few numbers. The account takes those; matrices are made when somebody asks.

    The factors can be neither given nor replaced, because the account is right for these factors alone. They are square
    and lower triangular, without negative entries in the encoder, and `stretch` bounds how far they are from inverses.

    Attributes:
      rounds: of the stage.
    """

    encoder: np.ndarray = field(init=False, repr=False, compare=False)
    decoder: np.ndarray = field(init=False, repr=False, compare=False)
    rounds: int

    def __post_init__(self) -> None:
        _check(self.rounds)

    def __getattr__(self, name: str) -> np.ndarray:
        """The factors, which nobody has asked for before."""
        if name not in ("encoder", "decoder"):
            raise AttributeError(name)
        for each, factor in zip(("encoder", "decoder"), self._factors(), strict=True):
            factor.flags.writeable = False
            object.__setattr__(self, each, factor)
        return np.asarray(self.__dict__[name])

    @property
    def length(self) -> int:
        return self.rounds

    def stretch(self) -> float:
        """By how much rounding of the factors may stretch the sensitivity of the stream, relatively.

        docs/proofs.md, "Rounding of the factors".
        """
        share = self._residual() * math.sqrt(self.rounds)
        return share / (1 - share) if share < 1 else math.inf

    @abstractmethod
    def _residual(self) -> float:
        """The largest (n |R|)_t / n_t: R = I - decoder @ encoder, and n are the norms of the encoder's columns."""

    @abstractmethod
    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Encoder and decoder."""

    @abstractmethod
    def _row_sums(self) -> np.ndarray:
        """Of the encoder."""

    @cached_property
    def _of_first_rounds(self) -> np.ndarray:
        return np.append(0.0, np.cumsum(self._row_sums() ** 2))


@dataclass(frozen=True)
class Fresh(Structured):
    """Fresh noise in every round, of these standard deviations: diagonal factors.

    Attributes:
      stds: one per round.
    """

    rounds: int = field(init=False)
    stds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", len(self.stds))
        super().__post_init__()
        if not all(0 < std < math.inf for std in self.stds):
            raise SordinoError("stds: each must be a positive finite number.")

    @property
    def separate(self) -> bool:
        return True

    def sensitivity(self, rounds: np.ndarray) -> float:
        return float(np.linalg.norm(self._row_sums()[np.asarray(rounds, dtype=int)]))

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        """As `sensitivity`: the rows of other rounds tell nothing of these."""
        return self.sensitivity(rounds)

    def largest_column(self, rounds: np.ndarray) -> float:
        return float(self._row_sums()[np.asarray(rounds, dtype=int)].max(initial=0.0))

    def _residual(self) -> float:
        return 2.0**-52  # 1 / std has one rounding

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        return np.diag(self._row_sums()), np.diag(np.array(self.stds))

    def _row_sums(self) -> np.ndarray:
        return self._inverse_stds

    @cached_property
    def _inverse_stds(self) -> np.ndarray:
        return 1 / np.array(self.stds)


def independent(rounds: int) -> Fresh:
    """Fresh noise of equal size in every round."""
    _check(rounds)
    return Fresh((1.0,) * rounds)


def schedule(rounds: int) -> Fresh:
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
    return Fresh(tuple(std.tolist()))


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
    *followed, last = _sizes(rounds, restart)
    blocks = [_tree(last, honaker, False)]
    if followed:
        blocks = [_tree(followed[0], honaker, complete)] * len(followed) + blocks
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


@dataclass(frozen=True)
class Banded(Structured):
    """Noise of `banded`, with what its factors follow from.

    Attributes:
      diagonals: of the encoder before its columns are scaled, from the main one down. None may be negative.
      momentum: of the server, to which the diagonals are fitted.
      decay: part of the model that the server takes away in each round, to which they are fitted as well.
    """

    diagonals: tuple[float, ...]
    momentum: float
    decay: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.diagonals or not self.diagonals[0] > 0 or not all(0 <= d < math.inf for d in self.diagonals):
            raise SordinoError("diagonals: the first must be positive, and none may be negative or infinite.")

    @property
    def separate(self) -> bool:
        return not np.any(self._column[1:])

    def sensitivity(self, rounds: np.ndarray) -> float:
        return float(np.linalg.norm(self._sums(rounds)))

    def largest_column(self, rounds: np.ndarray) -> float | None:
        """1, the norm of all columns, if the rounds are as far apart as the band is wide."""
        apart = np.diff(np.sort(np.asarray(rounds, dtype=int)))
        width = int(np.flatnonzero(self._column)[-1]) + 1
        return None if (apart < width).any() else float(len(rounds) > 0)

    def decoder_rows(self, rounds: np.ndarray) -> np.ndarray:
        """These rows; the others are not computed."""
        rounds = np.asarray(rounds, dtype=int)
        backwards = np.append(self._inverse[::-1], np.zeros(self.rounds - 1))
        windows = np.lib.stride_tricks.sliding_window_view(backwards, self.rounds)
        return np.asarray(windows[self.rounds - 1 - rounds] * self._norms[rounds, None])

    def _inverted_sensitivity(self, rounds: np.ndarray) -> float:
        """As `Correlated._inverted_sensitivity`, whose products of rows of the decoder take most of the time.

        Here all clients share one matrix of covariances. Its entries are sums of at most T products of the decoder's
        entries, whose absolute values add up to at most the product of two standard deviations (Cauchy and Schwarz).
        """
        bound = self.sensitivity(rounds)
        if not len(rounds):
            return bound
        if len(rounds) > MOST_INVERTED:
            return min(bound, self.over_windows(rounds))
        norms = self._norms[rounds]
        covariance = self._covariances[np.ix_(rounds, rounds)] * norms * norms[:, None]
        factor, failed = scipy.linalg.lapack.dpotrf(covariance, lower=1, clean=1)
        if failed:
            return bound
        inverse, failed = scipy.linalg.lapack.dpotri(factor, lower=1)
        if failed:
            return bound
        inverse = inverse + np.tril(inverse, -1).T
        sums, stds = np.abs(inverse).sum(1), np.sqrt(covariance.diagonal())
        rounding = 8 * (len(rounds) + self.rounds) * 2.0**-52 * stds * float(stds @ sums)
        residual = covariance @ inverse
        residual[np.diag_indices(len(rounds))] -= 1
        error = float((np.abs(residual, out=residual).sum(1) + rounding).max())
        if not error < MOST_ERROR:
            return bound
        return min(bound, math.sqrt(float(sums.sum()) / (1 - error)))

    def over_windows(self, rounds: np.ndarray) -> float:
        """A bound on `released_sensitivity`, from parts of the stream, for a client with many rounds.

        For moves d of its rounds, its own rows cost the least |C x|^2 over all x with x = d there. So every choice of x
        in the other rounds is a bound. Here x = X d: column s of X is the best choice for a move of round s alone in a
        window around it, and zero elsewhere. What is lost by that decays fast with the length of the window.
        docs/proofs.md, "A client's own stream", has the proof.

        Args:
          rounds: in which the client takes part.

        Returns:
          The bound; infinite if a covariance has no factor.
        """
        rounds, column = np.sort(np.asarray(rounds, dtype=int)), np.trim_zeros(self._column, "b")
        own, moved = _indicator(self.rounds, rounds) > 0, np.zeros(self.rounds)
        parts, margin = list[tuple[int, np.ndarray]](), 2 * len(column) + LEAST_MARGIN
        for first in range(0, len(rounds), AT_ONCE):
            some = rounds[first : first + AT_ONCE]
            start, stop = max(0, some[0] - margin), min(self.rounds, some[-1] + margin + 1)
            others, x = start + np.flatnonzero(~own[start:stop]), np.zeros((stop - start, len(some)))
            x[some - start, np.arange(len(some))] = 1.0
            if len(others):
                later = np.append(others, np.full(len(column) - 1, 2 * self.rounds))
                near = later[np.arange(len(column))[:, None] + np.arange(len(others))]
                factor, failed = scipy.linalg.lapack.dpbtrf(self._products(near, others), lower=1)
                if failed:
                    return math.inf
                x[others - start] = -scipy.linalg.lapack.dpbtrs(factor, self._products(others[:, None], some), lower=1)[
                    0
                ]
            moved[start:stop] += np.abs(x).sum(1)
            encoded = np.zeros((min(self.rounds, stop + len(column) - 1) - start, len(some)))
            x /= self._norms[start:stop, None]
            for lag, weight in enumerate(column):
                encoded[lag : lag + len(x)] += weight * x[: len(encoded) - lag]
            parts.append((start, encoded))
        total = 0.0
        for n, (start, encoded) in enumerate(parts):
            total += float(np.abs(encoded.T @ encoded).sum())
            for later_start, other in parts[n + 1 :]:
                both = min(len(encoded) - (later_start - start), len(other))
                if both <= 0:
                    break
                shared = encoded[later_start - start :][:both].T @ other[:both]
                total += 2 * float(np.abs(shared).sum())
        largest = np.convolve(moved / self._norms, column)[: self.rounds]
        rounding = 4 * (self.rounds + 2 * len(column) + 8) * 2.0**-52 * float(largest @ largest)
        residual = self._residual()
        return math.sqrt(total + rounding) * (1 + 1e-12) + residual / (1 - residual) * float(moved.sum())

    def _products(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """C^T C in these rounds, C the encoder."""
        apart = np.minimum(np.abs(first - second), len(self._gram) - 1)
        return np.asarray(self._gram[apart, np.minimum(first, second)])

    @cached_property
    def _gram(self) -> np.ndarray:
        """Diagonals of C^T C, from the main one down, entry (j + lag, j) in place (lag, j); the last one is zero."""
        column = np.trim_zeros(self._column, "b")
        gram = np.zeros((len(column) + 1, self.rounds))
        for lag in range(len(column)):
            sums = np.cumsum(column[: len(column) - lag] * column[lag:])
            later = np.arange(lag, self.rounds)
            shared = np.minimum(len(sums), self.rounds - later)  # rows of both columns
            gram[lag, : len(later)] = sums[shared - 1] / (self._norms[later] * self._norms[later - lag])
        return gram

    @cached_property
    def _covariances(self) -> np.ndarray:
        """F F^T, F the inverse of the unscaled encoder: a Toeplitz matrix, so entry (i + 1, j + 1) adds one product to
        entry (i, j)."""
        column, result = self._inverse, np.empty((self.rounds, self.rounds))
        result[0] = column[0] * column
        for t in range(1, self.rounds):
            row = column[t] * column
            row[1:] += result[t - 1, :-1]
            result[t] = row
        return result

    def _residual(self) -> float:
        """Entry (i, j) of R is n_i / n_j times that of the unscaled factors, which are Toeplitz: n_i <= n_j for i >= j.

        A computed coefficient of their product is off by at most its terms times 2^-53 of the sum of absolute values,
        and the scaling by another 2^-51.
        """
        column = np.trim_zeros(self._column, "b")
        product, absolute = (np.convolve(column, f)[: self.rounds] for f in (self._inverse, np.abs(self._inverse)))
        product[0] -= 1.0
        return float(np.abs(product).sum() + (len(column) + 8) * 2.0**-52 * absolute.sum()) * (1 + 1e-9)

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        factors = toeplitz(self.rounds, np.array(self.diagonals))
        return factors.encoder, factors.decoder

    def _row_sums(self) -> np.ndarray:
        return self._sums(np.arange(self.rounds))

    def _sums(self, rounds: np.ndarray) -> np.ndarray:
        """The sums of the encoder's columns of these rounds, row by row."""
        moved = _indicator(self.rounds, rounds)
        return np.convolve(moved / self._norms, np.trim_zeros(self._column, "b"))[: self.rounds]

    @cached_property
    def _column(self) -> np.ndarray:
        """The first column of the encoder before it is scaled."""
        return _first_column(self.rounds, np.array(self.diagonals))

    @cached_property
    def _inverse(self) -> np.ndarray:
        """The first column of its inverse."""
        return _inverse_column(self.rounds, np.array(self.diagonals))

    @cached_property
    def _norms(self) -> np.ndarray:
        """Of its columns; those of the last rounds are cut off, and shorter."""
        return np.asarray(np.sqrt(np.cumsum(self._column**2))[::-1])


def banded(rounds: int, band: int, momentum: float = 0.0, decay: float = 0.0) -> Banded:
    """A lower-triangular encoder with `band` constant diagonals, whose columns are scaled to norm 1.

    Columns at least `band` apart share no row. So if the rounds of a unit are at least `band` apart, its squared
    sensitivity is their number, as for independent noise. Units that take part more often pay more.

    Args:
      rounds: of the stage.
      band: number of diagonals.
      momentum: heavy-ball momentum of the server, to which the diagonals are fitted (`fitted_diagonals`).
      decay: part of the model that the server takes away in each round, to which they are fitted as well.

    Returns:
      The noise.

    Raises:
      SordinoError: an argument is out of its range.
    """
    _check(rounds)
    if band < 1:
        raise SordinoError(f"band: {band} must be at least 1; 1 means independent noise.")
    for name, value in (("momentum", momentum), ("decay", decay)):
        if not 0 <= value < 1:
            raise SordinoError(f"{name}: {value} must lie in [0, 1).")
    return Banded(rounds, fitted_diagonals(rounds, band, momentum, decay), momentum, decay)


def toeplitz(rounds: int, diagonals: np.ndarray) -> Correlated:
    """The noise whose encoder has these diagonals, from the main one down, and columns that are scaled to norm 1."""
    above = np.zeros(rounds)
    encoder = scipy.linalg.toeplitz(_first_column(rounds, diagonals), above)
    inverse = scipy.linalg.toeplitz(_inverse_column(rounds, diagonals), above)
    norms = np.linalg.norm(encoder, axis=0)
    return Correlated(encoder / norms, norms[:, None] * inverse)


@lru_cache
def fitted_diagonals(rounds: int, band: int, momentum: float, decay: float) -> tuple[float, ...]:
    """The diagonals of an encoder with little noise on the iterates: a closed form with one exponent.

    An iterate adds releases up with the coefficients of w = 1 / ((1 - a x) (1 - m x)) as weights, where a = 1 - decay
    and m is the momentum. If the encoder has the diagonals c, the noise of an iterate has those of w / c as weights.
    The root of w is nearly the best c if nothing of it is cut off. Here c is the beginning of
    (1 - a x)^-p (1 - m x)^(-1/2), and p is the best of `EXPONENTS` for the variance on the last iterate, which is the
    model, times its mean over all iterates, where gradients are taken. benchmarks/streams.py compares it with searches.

    All computers find the same numbers. Every operation is one sum, product or quotient of two floats per entry, in a
    fixed order, and IEEE 754 says what these are. The results of BLAS and of a numerical search depend on the computer.

    Args:
      rounds: of the stage.
      band: number of diagonals, of which at most `rounds` are needed.
      momentum: heavy-ball momentum of the server, in [0, 1).
      decay: part of the model that the server takes away in each round, in [0, 1).

    Returns:
      The diagonals from the main one down.
    """
    keep, width = 1 - decay, min(band, rounds)
    k = np.arange(1.0, width)[:, None]
    powers = np.cumprod(np.concatenate([np.ones((1, len(EXPONENTS))), keep * ((k - 1 + EXPONENTS) / k)]), axis=0)
    root = np.cumprod(np.concatenate([[1.0], momentum * ((k[:, 0] - 0.5) / k[:, 0])]))
    diagonals = np.zeros_like(powers)
    for j in np.flatnonzero(root):
        diagonals[j:] += root[j] * powers[: width - j]
    errors = _iterate_errors(diagonals, rounds, momentum, keep)
    best = int(np.argmin(np.where(np.isfinite(errors), errors, np.inf)))
    return tuple(diagonals[:, best].tolist())


def least_squares(noise: Correlated) -> Correlated:
    """Noise of the same sensitivity with the smallest variance of all unbiased decoders.

    This is Honaker's fully efficient estimator. Least squares on all of C @ x + z has the covariance A (C^T C)^-1 A^T,
    but uses rows of later rounds. The lower-triangular factor of the same C^T C has the same covariance and does not
    use them. |C x| is the same for every x. The factor of a tree has no negative entry (C^T C is ultrametric, so its
    inverse is an M-matrix), so `sensitivity` is exact.
    """
    return Correlated(*_lower(noise.encoder.T @ noise.encoder))


class _Restarting(Structured, ABC):
    """The noise of trees, one after another: a new one starts after `restart` rounds."""

    restart: int

    def __post_init__(self) -> None:
        _sizes(self.rounds, self.restart)

    @property
    def separate(self) -> bool:
        return self.rounds == 1 or self.restart == 1


@dataclass(frozen=True)
class EfficientTree(_Restarting):
    """`least_squares` of `tree`. What it costs is a sum over nodes: no matrix is inverted or multiplied.

    Args:
      rounds: of the stage.
      restart: rounds after which a new tree starts; 0 for one tree.

    Raises:
      SordinoError: rounds or restart is out of its range.

    Example:
      >>> noise = EfficientTree(4)
      >>> round(noise.sensitivity(np.arange(4)) ** 2)  # four leaves, two pairs and the root: 4 + 2 * 4 + 16
      28
    """

    restart: int = 0

    def sensitivity(self, rounds: np.ndarray) -> float:
        """As `Correlated.sensitivity`: a node adds the square of the number of its rounds."""
        square = 0.0
        for counts in self._taken(rounds):
            while len(counts):
                square += float(counts @ counts)
                counts = _pairs(counts)
        return math.sqrt(square)

    def largest_column(self, rounds: np.ndarray) -> float | None:
        """As `Correlated.largest_column`. Two rounds of a complete tree always share a row."""
        rounds, heights = np.asarray(rounds), list[int]()
        for first, height in self._complete():
            inside = np.count_nonzero((rounds >= first) & (rounds < first + 2**height))
            if inside > 1:
                return None
            heights += [height] * inside
        return math.sqrt(max(heights) + 1) if heights else 0.0

    def decoder_rows(self, rounds: np.ndarray) -> np.ndarray:
        """These rows; the others are not computed."""
        trees, rows = self._complete(), np.zeros((len(rounds), self.rounds))
        for row, t in zip(rows, rounds, strict=True):
            first, height = max(each for each in trees if each[0] <= t)
            row[first : first + 2**height] = _tree_factors(height).inverse_row(int(t) - first)
        return rows

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        """As `Correlated.released_sensitivity`, by a sum over nodes where an inverse would take long."""
        if len(rounds) <= INVERTED or np.array_equal(rounds, np.arange(len(rounds))):
            return super().released_sensitivity(rounds)
        return min(self.over_nodes(rounds), self.sensitivity(rounds))

    def over_nodes(self, rounds: np.ndarray) -> float:
        """A bound on `released_sensitivity`: the least |C x| over all x that are 1 in these rounds.

        docs/proofs.md, "Trees", has the proof. Within a node, the least square for a sum s of its rounds is
        c + (s - m)^2 / w. Two nodes together add up c, m and w, and the value of their parent adds s^2. No term is
        negative, so all digits are kept.
        """
        square = 0.0
        for taken in self._taken(rounds):
            w, m, c = 1 - taken, taken, taken  # of leaves: those of other rounds are free
            while len(m):
                square += float(c[-1]) if len(m) % 2 else 0.0  # it has no parent
                w, m, c = (_pairs(part) for part in (w, m, c))
                w, m, c = w / (1 + w), m / (1 + w), c + m**2 / (1 + w)
        return math.sqrt(square) * (1 + TREE_SLACK)

    def _taken(self, rounds: np.ndarray) -> Iterator[np.ndarray]:
        """For each tree: 1 for each of these rounds, and 0 for others."""
        return _per_tree(_indicator(self.rounds, rounds), self.rounds, self.restart)

    def _complete(self) -> list[tuple[int, int]]:
        return _complete_trees(self.rounds, self.restart)

    def _residual(self) -> float:
        """Each entry of the decoder is off by at most ERROR of itself, and all columns of a tree have one norm."""
        largest = [_tree_factors(height).times_absolute(np.ones(2**height)).max() for _, height in self._complete()]
        return 1.1 * tree_factors.ERROR * float(max(largest))

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        encoder, decoder = (np.zeros((self.rounds, self.rounds)) for _ in range(2))
        for first, height in self._complete():
            own = slice(first, first + 2**height)
            _tree_factors(height).write(encoder[own, own], decoder[own, own])
        return encoder, decoder

    def _row_sums(self) -> np.ndarray:
        return np.concatenate([_tree_factors(height).row_sums() for _, height in self._complete()])


@dataclass(frozen=True)
class NodeTree(_Restarting):
    """The noise of `tree` with as many draws as rounds: release t carries the estimate of the node that ends with it.

    Of a tree, only nodes that end a running sum are seen: one per round, the largest that ends with it. Their estimates
    are functions of fresh noise for each of them, with the same covariance as in `tree`. So row t of the encoder lies
    in the rounds of its node, and is the same for all nodes of a height (`_Rows`; docs/proofs.md, "Trees").

    Args:
      rounds: of the stage.
      honaker: estimate a node also from all nodes below it.
      restart: rounds after which a new tree starts; 0 for one tree.

    Raises:
      SordinoError: rounds or restart is out of its range.

    Example:
      >>> noise = NodeTree(4, honaker=False)
      >>> round(noise.sensitivity(np.arange(4)) ** 2)  # two of the leaves, one of the pairs and the root: 2 + 4 + 16
      22
    """

    honaker: bool = True
    restart: int = 0

    def sensitivity(self, rounds: np.ndarray) -> float:
        return float(np.linalg.norm(self._encoded(_indicator(self.rounds, rounds))))

    def largest_column(self, rounds: np.ndarray) -> float | None:
        """As `Correlated.largest_column`. Two rounds of a complete tree always share the row of its root."""
        rounds = np.sort(np.asarray(rounds, dtype=int))
        trees = [first for first, _ in _complete_trees(self.rounds, self.restart)]
        if (np.diff(np.searchsorted(trees, rounds, side="right")) == 0).any():
            return None
        return float(self._norms[rounds].max(initial=0.0))

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        """As `Correlated.released_sensitivity`, by a sum over nodes; of the first rounds, by the sums of their rows."""
        if np.array_equal(rounds, np.arange(len(rounds))):
            return super().released_sensitivity(rounds)
        return min(self.over_nodes(rounds), self.sensitivity(rounds))

    def over_nodes(self, rounds: np.ndarray) -> float:
        """A bound on `released_sensitivity`: the least |C x| over all x that are 1 in these rounds.

        docs/proofs.md, "Trees": x in the other rounds is as if normal with the covariance of the noise, and each row of
        C is one observation of it. A node is followed by the means and covariances of two numbers, `a` and `d`. Its sum
        is a + d, and its row is (d + v a) over a standard deviation. No term is negative.
        """
        free, whole = 1 - _indicator(self.rounds, rounds), self._followed * (self.restart or self.rounds)
        square = self._least(free[whole:])
        if whole:  # all trees but the last have one size
            square += self._least(free[:whole].reshape(-1, self.restart))
        return math.sqrt(square) * (1 + TREE_SLACK)

    def _least(self, free: np.ndarray) -> float:
        """The least |C x|^2 over trees of one size, whose rounds are the last axis: x is 1 where `free` is 0."""
        square, open_ = 0.0, free > 0  # the last round of a node is free: so is d
        mean_a, (mean_d, var_a, var_d, cov, det) = 1 - free, np.zeros((5, *free.shape))
        for height in range(free.shape[-1].bit_length()):
            v, keep, fresh = _node_weights(height, self.honaker)
            spread = fresh + var_d + 2 * v * cov + v**2 * var_a
            moved = mean_d + v * mean_a
            square += float(np.where(open_, 0.0, moved**2 / spread)[..., ::2].sum())
            mean = mean_a * (fresh + keep * (var_d + v * cov)) + mean_d * (fresh - keep * (cov + v * var_a))
            mean = np.where(open_, keep * mean_a, mean / spread)
            var = (fresh * (var_a + 2 * cov + var_d) + keep**2 * det) / spread
            var = np.where(open_, keep**2 * var_a + fresh, var)
            pairs = var.shape[-1] // 2
            left, right = (..., slice(0, 2 * pairs, 2)), (..., slice(1, 2 * pairs, 2))
            mean_d = mean_d[right] + v * mean_a[right]
            var_d = (var_d + 2 * v * cov + v**2 * var_a)[right]
            cov = keep * (cov + v * var_a)[right]
            det = keep**2 * det[right] + var[left] * var_d
            mean_a, var_a = mean[left] + keep * mean_a[right], var[left] + keep**2 * var_a[right]
            open_ = open_[right]
        return square

    @property
    def _followed(self) -> int:
        """The number of trees that another one follows."""
        return len(_sizes(self.rounds, self.restart)) - 1

    def _residual(self) -> float:
        """Each entry of the decoder D is off by at most ERROR of itself. D = t - N with a diagonal t, and neither N nor
        its inverse C has negative entries, so |D| |C| = 2 t C - 1."""
        row_norms, total = np.zeros(self.rounds), -self._norms
        for rows, nodes in self._nodes:
            row_norms[nodes[:, -1]] = 2 * rows.fresh * self._norms[nodes[:, -1]]
        for rows, nodes in self._nodes:
            total[nodes] += row_norms[nodes[:, -1], None] * rows.encoder
        return 1.1 * tree_factors.ERROR * float((total / self._norms).max())

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        encoder, decoder = (np.zeros((self.rounds, self.rounds)) for _ in range(2))
        for rows, nodes in self._nodes:
            for node in nodes:
                own = node[-1], slice(node[0], node[-1] + 1)
                encoder[own], decoder[own] = rows.encoder, rows.decoder
        return encoder, decoder

    def _row_sums(self) -> np.ndarray:
        return self._encoded(np.ones(self.rounds))

    def _encoded(self, x: np.ndarray) -> np.ndarray:
        """C @ x."""
        moved = np.zeros(self.rounds)
        for rows, nodes in self._nodes:
            moved[nodes[:, -1]] = x[nodes] @ rows.encoder
        return moved

    @cached_property
    def _norms(self) -> np.ndarray:
        """Of the encoder's columns."""
        squares = np.zeros(self.rounds)
        for rows, nodes in self._nodes:
            squares[nodes] += rows.encoder**2
        return np.asarray(np.sqrt(squares))

    @cached_property
    def _nodes(self) -> list[tuple[_Rows, np.ndarray]]:
        """By height: the rows of nodes that end a running sum, and the rounds of each such node."""
        found = []
        for height in range(self.rounds.bit_length()):
            of_trees = _per_tree(np.arange(self.rounds), self.rounds, self.restart)
            nodes = [tree[: len(tree) >> height << height].reshape(-1, 2**height)[::2] for tree in of_trees]
            if len(of_height := np.concatenate(nodes)):
                found.append((_rows_of(height, self.honaker), of_height))
        return found


class _Rows(NamedTuple):
    """The rows of a node's last round, in the rounds of the node."""

    encoder: np.ndarray
    decoder: np.ndarray
    estimate: np.ndarray  # of the noise of the node: weights of the draws
    fresh: float  # standard deviation of what the node adds to the estimates of earlier ones

    @classmethod
    def of(cls, height: int, honaker: bool) -> _Rows:
        """Of nodes of 2^height rounds. The largest earlier nodes within one have the heights height - 1, ..., 0."""
        fresh = math.sqrt(_node_weights(height, honaker)[2])
        encoder, decoder, estimate = np.full(2**height, 1 / fresh), np.zeros(2**height), np.zeros(2**height)
        decoder[-1] = estimate[-1] = fresh
        for below in range(height):
            inside = slice(2**height - 2 ** (below + 1), 2**height - 2**below)
            part = (2 ** (below + 1) - 1) / (2 ** (height + 1) - 1) if honaker else 0.0
            earlier = _rows_of(below, honaker).estimate
            rest = (2 ** (height + 1) - 2 ** (below + 1)) / (2 ** (height + 1) - 1) if honaker else 1.0
            encoder[inside], decoder[inside], estimate[inside] = rest / fresh, -rest * earlier, part * earlier
        return cls(encoder, decoder, estimate, fresh)


_rows_of = lru_cache(maxsize=64)(_Rows.of)


def _node_weights(height: int, honaker: bool) -> tuple[float, float, float]:
    """Of a node: the weight of its own value in its estimate, that of the nodes below it, and the variance that its
    estimate adds to those of earlier nodes."""
    if not honaker:
        return 1.0, 0.0, 1.0
    count = 2 ** (height + 1)
    return 2**height / (count - 1), (2**height - 1) / (count - 1), (count + 1) / (3 * (count - 1))


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


def _sizes(rounds: int, restart: int) -> list[int]:
    """The rounds of each tree."""
    _check(rounds)
    if restart < 0:
        raise SordinoError(f"restart: {restart} must be at least 0; 0 means a single tree.")
    followed, last = divmod(rounds - 1, restart or rounds)
    return [restart] * followed + [last + 1]


def _per_tree(numbers: np.ndarray, rounds: int, restart: int) -> Iterator[np.ndarray]:
    """One number per round, for each tree."""
    start = 0
    for size in _sizes(rounds, restart):
        yield numbers[start : start + size]
        start += size


def _complete_trees(rounds: int, restart: int) -> list[tuple[int, int]]:
    """(first round, height) of the complete trees, which share no node."""
    trees, start = [], 0
    for size in _sizes(rounds, restart):
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                trees.append((start, height))
                start += 2**height
    return trees


def _indicator(rounds: int, chosen: np.ndarray) -> np.ndarray:
    """1 for each of the chosen rounds, and 0 for others."""
    taken = np.zeros(rounds)
    taken[np.asarray(chosen, dtype=int)] = 1.0
    return taken


_tree_factors = lru_cache(maxsize=16)(TreeFactors.of)


def _pairs(parts: np.ndarray) -> np.ndarray:
    """Sums of two neighbours; the last one without a neighbour is left out."""
    even = len(parts) // 2 * 2
    return np.asarray(parts[:even:2] + parts[1:even:2])


def _lower(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower triangular encoder with this Gram matrix, and its inverse."""
    encoder = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T
    return encoder, scipy.linalg.solve_triangular(encoder, np.eye(len(encoder)), lower=True)


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


def _iterate_errors(diagonals: np.ndarray, rounds: int, momentum: float, keep: float) -> np.ndarray:
    """For each column of diagonals: the variance of the noise on the last iterate, times its sum over all iterates.

    Release t is scaled by the norm of column t of the encoder, which is shorter for the last ones. The first factor is
    exact, and the second one takes the norm of the whole column for all.
    """
    weights, velocity, weight = np.empty((rounds, 1)), 1.0, 0.0
    for t in range(rounds):
        weight = keep * weight + velocity
        velocity = momentum * velocity
        weights[t] = weight
    norms = np.sqrt(np.cumsum(diagonals * diagonals, axis=0))
    norms = np.concatenate([norms, np.repeat(norms[-1:], rounds - len(norms), axis=0)])
    remaining = np.arange(rounds, 0.0, -1.0)[:, None]
    with np.errstate(all="ignore"):  # some columns have inverses that grow without bound
        last, every = (_quotient(weights * scale, diagonals) for scale in (norms, norms[-1]))
        total = np.cumsum(remaining * (every * every), axis=0)[-1]
        return np.asarray(np.cumsum(last * last, axis=0)[-1] * total)


def _first_column(rounds: int, diagonals: np.ndarray) -> np.ndarray:
    """Of a lower triangular Toeplitz matrix with these diagonals."""
    return np.pad(diagonals[:rounds], (0, max(rounds - len(diagonals), 0)))


def _inverse_column(rounds: int, diagonals: np.ndarray) -> np.ndarray:
    """The first column of the inverse of that matrix. `scipy.signal.lfilter` would take a second to import."""
    impulse = np.eye(rounds, 1)
    return np.asarray(_quotient(impulse / diagonals[0], diagonals[:, None] / diagonals[0])[:, 0])


def _quotient(numerator: np.ndarray, diagonals: np.ndarray) -> np.ndarray:
    """The first coefficients of numerator / diagonals as power series, column by column."""
    quotient = numerator.copy()
    for t in range(len(quotient) - 1):
        later = quotient[t + 1 : t + len(diagonals)]
        later -= quotient[t] * diagonals[1 : 1 + len(later)]
    return quotient
