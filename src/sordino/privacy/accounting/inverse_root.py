"""Correlated noise of any number of rounds: a banded inverse root of the running sums.

Running sums are A = 1 / (1 - x) as a power series. Its inverse root (1 - x)^(1/2) has the coefficients 1, -1/2, -1/8,
..., and the decoder keeps the first `bands` of them: release t carries d_0 z_t + d_1 z_(t-1) + ... . So a round needs
the last `bands` draws, and no matrix is stored. The decoder's floats are its coefficients, without any error. Its
inverse C, the encoder, is Toeplitz with coefficients c = 1 / d that are positive and never increase (docs/proofs.md,
"Streams of any length"). Nothing below needs C itself: C x = v is the recurrence v_t = x_t - d_1 v_(t-1) - ... .

Kalinin, McKenna, Upadhyay and Lampert (2025), "Back to Square Roots", have these factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.core import MOST_ERROR, Noise
from sordino.errors import SordinoError
from sordino.lazy import scipy
from sordino.privacy.accounting.correlated import MOST_CORRELATED_ROUNDS

MOST_BANDS = 4096
MOST_COVARIANCES = 2**22  # of a client's own rows that are computed; beyond, the bound of the whole stream counts
MOST_BAND_ENTRIES = 2**21  # of a banded system: 16 MiB
MOST_FIRST_COVARIANCES = 2**18  # of rounds that have fewer earlier draws than bands, which are computed one by one
MOST_TABLE = 512  # draws of a release up to which all covariances of early rounds are tabulated
MOST_RECURRENCE = 2**16  # products of a recurrence; beyond, Fourier transforms take its place
SMALL_ERROR = 1e-9  # of the square of a client's own rows: then the larger bound of the whole stream is not needed
UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class InverseRoot(Noise):
    """Release t carries the sum over j < bands of d_j z_(t-j), d the coefficients of (1 - x)^(1/2).

    Args:
      bands: draws that a release combines; 1 is independent noise.
      rounds: of the stage.

    Raises:
      SordinoError: bands or rounds is out of its range.
    """

    bands: int
    rounds: int

    def __post_init__(self) -> None:
        if not 1 <= self.bands <= MOST_BANDS:
            raise SordinoError(f"inverse_band: {self.bands} must lie between 1 and {MOST_BANDS:,}.")
        if self.rounds < 1:
            raise SordinoError(f"rounds: {self.rounds} must be at least 1.")

    @cached_property
    def coefficients(self) -> np.ndarray:
        """d_0, d_1, ...: as many as bands or rounds."""
        k = np.arange(1, min(self.bands, self.rounds))
        return np.cumprod(np.concatenate([[1.0], (2 * k - 3) / (2 * k)]))

    @cached_property
    def _band(self) -> np.ndarray:
        """The decoder in LAPACK's lower banded form."""
        return np.asfortranarray(np.repeat(self.coefficients[:, None], self.rounds, axis=1))

    @property
    def decoder(self) -> np.ndarray:
        """The dense decoder, for few rounds."""
        return self._dense(np.pad(self.coefficients, (0, self.rounds - len(self.coefficients))))

    @property
    def encoder(self) -> np.ndarray:
        """The dense encoder, for few rounds."""
        return self._dense(self.solve(np.eye(1, self.rounds)[0]))

    def solve(self, x: np.ndarray) -> np.ndarray:
        """C @ x, by the recurrence. No term is negative if x is not, so every entry keeps its digits."""
        if len(self.coefficients) * self.rounds <= MOST_BAND_ENTRIES:
            solution, _ = scipy.linalg.lapack.dtbtrs(self._band[:, : len(x)], x, uplo="L", diag="U")
            return np.asarray(solution).reshape(len(x))
        from scipy.signal import lfilter  # takes a second to import, but little memory for long streams

        return np.asarray(lfilter([1.0], self.coefficients, x))

    def _convolved(self, taken: np.ndarray) -> np.ndarray:
        """Upper bounds on the entries of C @ taken for zeros and ones, by Fourier transforms.

        An entry of a transform is off by at most c times the sum of absolute values (`subsampled._compose`). Two of
        them, their product and the transform back are off by at most 4 c times the product of both sums.
        """
        column, spectrum, size = self._column
        rounding = 12 * 2.0**-52 * math.log2(size) * float(taken.sum() * column.sum())
        moved = scipy.fft.irfft(scipy.fft.rfft(taken, size) * spectrum, size)[: self.rounds]
        return np.asarray(np.maximum(moved, 0.0) + rounding)

    @cached_property
    def _column(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The first column of C, and its transform on a circle of so many places that nothing wraps around."""
        column = self.solve(np.eye(1, self.rounds)[0])
        size = scipy.fft.next_fast_len(2 * self.rounds, real=True)
        return column, scipy.fft.rfft(column, size), size

    def squares(self, attended: np.ndarray) -> np.ndarray:
        """Squared sensitivities of the whole stream: entry k after the first k of the rounds that a unit takes part in.

        Of C @ x + z, row r moves by v_r = (C 1_S)_r at most. Rows between two rounds of the unit are paid for in the
        first of the two, so entry k holds all rows before round k + 1 of the unit: what is seen if the run stops there.

        Args:
          attended: the rounds in which the unit takes part, in increasing order.

        Returns:
          Upper bounds, also of rounding (`_slack`).
        """
        if not len(attended):
            return np.zeros(1)
        taken = np.zeros(self.rounds)
        taken[attended] = 1.0
        convolved = len(self.coefficients) * self.rounds > MOST_RECURRENCE
        total = np.cumsum((self._convolved(taken) if convolved else self.solve(taken)) ** 2)
        return np.concatenate([[0.0], total[np.append(attended[1:], self.rounds) - 1]]) * (1 + self._slack)

    def released_squares(self, attended: np.ndarray) -> np.ndarray:
        """As `squares`, of a stream that nobody else adds to and whose other rows nobody sees.

        The noise of these rows has a covariance S whose other entries than the diagonal are negative, so S^-1 has none
        that is negative, and equal moves are the worst: 1^T S^-1 1 = |L^-1 1|^2 with S = L L^T. The first k entries
        of L^-1 1 belong to the first k rows.
        """
        if not len(attended):
            return np.zeros(1)
        if np.array_equal(attended, np.arange(len(attended))):  # L is the decoder
            moved = self.solve(np.ones(len(attended)))
            return np.concatenate([[0.0], np.cumsum(moved**2)]) * (1 + self._slack)
        lower = self._covariances(attended)
        if lower is None:
            return self.squares(attended)
        width, bands = len(lower) - 1, len(self.coefficients)
        # docs/proofs.md: the error of S, of L and of the solution, over the least eigenvalue of S.
        least = 0.98 * float(self.coefficients.sum()) ** 2
        error = 1.5 * (2 * width + 1) * (bands + 3 * width + 7) * UNIT_ROUNDOFF / least
        factor, failed = scipy.linalg.lapack.dpbtrf(lower, lower=1)
        if failed or not error < MOST_ERROR:
            return self.squares(attended)
        moved, _ = scipy.linalg.lapack.dtbtrs(factor, np.ones(len(attended)), uplo="L")
        own = np.concatenate([[0.0], np.cumsum(moved.reshape(-1) ** 2)]) * (1 + self._slack) / (1 - error)
        return own if error < SMALL_ERROR else np.asarray(np.minimum(own, self.squares(attended)))

    def sensitivity(self, rounds: np.ndarray) -> float:
        """The sensitivity to a unit that takes part in exactly `rounds`: by at most 1 each time, in any direction."""
        return math.sqrt(float(self.squares(np.asarray(rounds))[-1]))

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        """As `sensitivity`, of a stream that nobody else adds to and whose other rows nobody sees."""
        return math.sqrt(float(self.released_squares(np.asarray(rounds))[-1]))

    def worst_sensitivity(self, separation: int, most: int | None = None) -> float:
        """The largest sensitivity of a unit whose rounds are at least `separation` apart, at most `most` of them.

        The earliest rounds are the worst: 0, separation, 2 separation, ... (docs/proofs.md, lemma 26).
        """
        if separation < 1 or (most is not None and most < 1):
            raise SordinoError(f"separation, most: {separation} and {most} must be at least 1.")
        return self.sensitivity(np.arange(0, self.rounds, separation)[:most])

    def prefix_variances(self) -> np.ndarray:
        """The variance of the noise on each running sum: the sums of d, the last of which stays."""
        sums = np.cumsum(self.coefficients)
        return np.cumsum(np.pad(sums, (0, self.rounds - len(sums)), mode="edge") ** 2)

    @property
    def _slack(self) -> float:
        """By how much rounding may shorten a square, relatively.

        An entry of the recurrence is a sum of products of at most `rounds` coefficients, none negative, and each factor
        comes with at most bands + 1 roundings. Squares double that, and adding them up costs one rounding per round.
        """
        return 4 * (len(self.coefficients) + 3) * (self.rounds + 2) * UNIT_ROUNDOFF

    def _covariances(self, attended: np.ndarray) -> np.ndarray | None:
        """S in LAPACK's lower banded form; None if it is too large, or if a sign is in doubt."""
        d, count = self.coefficients, len(attended)
        bands = len(d)
        width = int((np.searchsorted(attended, attended + bands) - np.arange(count)).max()) - 1
        if count * (width + 1) > MOST_COVARIANCES or bands * (width + 1) > MOST_FIRST_COVARIANCES:
            return None
        padded = np.append(attended, np.full(width, attended[-1] + bands))  # too far from all others
        gaps = padded[np.arange(width + 1)[:, None] + np.arange(count)] - attended
        lower = np.asarray(self._steady[np.minimum(gaps, bands)])
        early = int(np.searchsorted(attended, bands))
        lags, places = np.nonzero(gaps[:, :early] + attended[:early] < bands - 1)
        if bands <= MOST_TABLE:
            lower[lags, places] = self._early[gaps[lags, places], attended[places]]
        else:
            for lag, i in zip(lags, places, strict=True):
                start, gap = int(attended[i]), int(gaps[lag, i])
                lower[lag, i] = d[: start + 1] @ d[gap : start + gap + 1]
        if (lower[1:][gaps[1:] < bands] >= -2 * (bands + 3) * UNIT_ROUNDOFF).any():
            return None
        return lower

    @cached_property
    def _early(self) -> np.ndarray:
        """The covariance of rounds start and start + gap in place (gap, start); those that are not early are wrong."""
        d = self.coefficients
        later = np.lib.stride_tricks.sliding_window_view(np.append(d, np.zeros(len(d) - 1)), len(d))
        return np.asarray(np.cumsum(later * d, axis=1))

    @cached_property
    def _steady(self) -> np.ndarray:
        """The covariances of releases that are 0, 1, ... rounds apart, both with `bands` draws; the last one is 0."""
        return np.append(np.correlate(self.coefficients, self.coefficients, "full")[len(self.coefficients) - 1 :], 0.0)

    def _dense(self, column: np.ndarray) -> np.ndarray:
        if self.rounds > MOST_CORRELATED_ROUNDS:
            raise SordinoError(
                f"rounds: {self.rounds} rounds have no dense factors; at most {MOST_CORRELATED_ROUNDS:,} have."
            )
        return np.asarray(scipy.linalg.toeplitz(column, np.zeros(self.rounds)))
