"""Gaussian noise that is correlated over the rounds of a stage: trees, banded matrices and banded inverses."""

from __future__ import annotations

import numpy as np

from sordino.core import Correlated, Noise, Stream
from sordino.errors import SordinoError
from sordino.lazy import torch
from sordino.privacy.accounting.correlated import Banded, EfficientTree, Fresh, NodeTree
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.mechanisms.gaussian import Draw, draw
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.mechanisms.random import Address, Source

# By how much rounding of the factors may stretch the sensitivity of a stream. Clips are enforced with a margin
# (`core.SAFETY`), of which sums use all but 8e-6 (docs/proofs.md).
MOST_STRETCH = 1e-6
PROVED = (Fresh, Banded, EfficientTree, NodeTree)  # factors whose formulas docs/proofs.md proves


class CorrelatedGaussian(Mechanism):
    """Release t carries `decoder[t] @ z`; the stream is accounted for as one release of `encoder @ x + z`."""

    name = "correlated-gaussian"
    spans_rounds = True

    def __init__(self, noise: Correlated) -> None:
        super().__init__(noise)
        self.factors = noise

    @property
    def carried(self) -> bool:
        return not self.factors.separate

    @property
    def most_rounds(self) -> float:
        return self.factors.length

    def over(self, rounds: int) -> Noise:
        """The same factors, checked: each release is a function of what is known by then, and all is accounted for."""
        factors = self.factors
        if isinstance(factors, PROVED):
            if type(factors) not in PROVED:  # what is derived from them may have other matrices than the formulas
                factors = Correlated(factors.encoder, factors.decoder)
            elif factors.length == rounds and factors.stretch() <= MOST_STRETCH:
                return factors
        if min(factors.encoder.shape[1], len(factors.decoder)) < rounds:
            raise SordinoError(f"rounds: the noise was factorised for {len(factors.decoder)} rounds, not {rounds}.")
        encoder, decoder = _causal(factors.encoder[:, :rounds], factors.decoder[:rounds])
        if _stretch(encoder, decoder) > MOST_STRETCH:
            raise SordinoError(
                "noise: decoder @ encoder must be the identity, or the stream costs more than is counted."
            )
        same = all(map(np.array_equal, (encoder, decoder), (factors.encoder, factors.decoder)))
        return factors if same else Correlated(encoder, decoder)

    def mixing(self, rounds: int) -> np.ndarray:
        return self.factors.decoder[:rounds]

    def sensitivity_factor(self, rounds: np.ndarray, own: bool) -> float:
        return self.factors.released_sensitivity(rounds) if own else self.factors.sensitivity(rounds)

    def separate_factor(self, rounds: np.ndarray) -> float | None:
        return self.factors.largest_column(rounds)

    def standard_noise(
        self, source: Source, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Draw:
        row = self.factors.decoder[at.round - first]
        return draw(
            source, [(row[j], at._replace(round=first, index=int(j))) for j in np.flatnonzero(row)], shape, device
        )


class InverseRootGaussian(Mechanism):
    """Release t carries a combination of the draws of the last rounds, which are derived again."""

    name = CorrelatedGaussian.name
    spans_rounds = True

    def __init__(self, noise: InverseRoot) -> None:
        super().__init__(noise)
        self.factors = noise

    @property
    def carried(self) -> bool:
        return self.factors.bands > 1

    @property
    def most_rounds(self) -> float:
        return self.factors.rounds

    def over(self, rounds: int) -> Noise:
        if rounds > self.factors.rounds:
            raise SordinoError(f"rounds: the noise was factorised for {self.factors.rounds} rounds, not {rounds}.")
        same = type(self.factors) is InverseRoot and rounds == self.factors.rounds
        return self.factors if same else InverseRoot(self.factors.bands, rounds)

    def mixing(self, rounds: int) -> np.ndarray:
        return InverseRoot(self.factors.bands, rounds).decoder

    def sensitivity_factor(self, rounds: np.ndarray, own: bool) -> float:
        return self.factors.released_sensitivity(rounds) if own else self.factors.sensitivity(rounds)

    def squared_factors(self, rounds: np.ndarray, own: bool) -> np.ndarray:
        return self.factors.released_squares(rounds) if own else self.factors.squares(rounds)

    def separate_factor(self, rounds: np.ndarray) -> float | None:
        # No column of the encoder ends, so two rounds always share rows.
        return self.factors.sensitivity(rounds[:1]) if len(rounds) <= 1 or not self.carried else None

    def standard_noise(
        self, source: Source, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Draw:
        # A draw has the address of its round: an index has 16 bits, which are too few for all rounds of a stage.
        row = self.factors.coefficients[: at.round - first + 1]
        return draw(source, [(d, at._replace(round=at.round - j, index=0)) for j, d in enumerate(row)], shape, device)


class StreamedGaussian(Mechanism):
    """Correlated noise whose factors follow from the number of rounds; `over` gives them."""

    name = CorrelatedGaussian.name
    spans_rounds = True

    def __init__(self, noise: Stream) -> None:
        super().__init__(noise)
        self.stream = noise

    def over(self, rounds: int) -> Noise:
        factors = self.stream.over(rounds)
        if isinstance(factors, InverseRoot):
            return InverseRootGaussian(factors).over(rounds)
        if not isinstance(factors, Correlated):
            raise SordinoError(f"noise: the factors of a stream are Correlated, not {type(factors).__name__}.")
        return CorrelatedGaussian(factors).over(rounds)

    def standard_noise(
        self, source: Source, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Draw:
        raise SordinoError("noise: the factors of a stream follow from its rounds; take the plan's stages.")


def _causal(encoder: np.ndarray, decoder: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors, with zeros where an inverse has left rounding errors: release t must not use later rounds.

    Raises:
      SordinoError: a release uses noise of rounds that come after it.
    """
    columns = np.arange(encoder.shape[1])
    last = np.where(_visible(encoder), columns, -1).max(1)  # the last round of each row
    early = last > columns[:, None]  # release t cannot know these rows yet
    if (early & _visible(decoder)).any():
        raise SordinoError("noise: a release uses noise of rounds that come after it; make the factors causal.")
    return np.where(columns <= last[:, None], encoder, 0.0), np.where(early, 0.0, decoder)


def _visible(factor: np.ndarray) -> np.ndarray:
    """Which entries are more than rounding errors of their row."""
    return np.asarray(np.abs(factor) > 1e-12 * np.abs(factor).max(1, keepdims=True))


def _stretch(encoder: np.ndarray, decoder: np.ndarray) -> float:
    """By how much the sensitivity of a stream may exceed that of `encoder @ x`, relatively, for any set of rounds.

    With R = I - decoder @ encoder, the stream is exactly that of the encoder C (I - R)^-1 = C + C R + ... . The norm of
    column t of |C| |R| is at most the sum over s of |R_st| times the norm of column s of C. A sum of T columns has at
    least 1 / sqrt(T) of the sum of their norms, because |C| has no negative entry (docs/proofs.md, "Streams").
    """
    rounds = encoder.shape[1]
    lengths = np.linalg.norm(encoder, axis=0)
    if not lengths.all():
        return np.inf
    computed = lengths @ np.abs(np.eye(rounds) - decoder @ encoder)
    rounding = len(encoder) * 2.0**-53 * (lengths @ np.abs(decoder) @ np.abs(encoder))
    share = float(((computed + rounding) / lengths).max()) * np.sqrt(rounds)
    return share / (1 - share) if share < 1 else np.inf
