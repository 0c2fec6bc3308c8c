"""Gaussian noise that is correlated over the rounds of a stage: trees and banded matrices."""

from __future__ import annotations

import numpy as np

from sordino.core import Correlated, Noise, Stream
from sordino.errors import SordinoError
from sordino.privacy.mechanisms.gaussian import Draw, draw
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.mechanisms.random import Address, Source


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
        return len(self.factors.decoder)

    def over(self, rounds: int) -> Noise:
        """The same factors, checked: each release is a function of what is known by then, and all is accounted for."""
        factors = self.factors
        if min(factors.encoder.shape[1], len(factors.decoder)) < rounds:
            raise SordinoError(f"rounds: the noise was factorised for {len(factors.decoder)} rounds, not {rounds}.")
        encoder, decoder = factors.encoder[:, :rounds], factors.decoder[:rounds]
        if not np.allclose(decoder @ encoder, np.eye(rounds), atol=1e-8):
            raise SordinoError(
                "noise: decoder @ encoder must be the identity, or the stream costs more than is counted."
            )
        uses, holds = ((np.abs(factor) > 1e-9).astype(float) for factor in (decoder, encoder))
        if np.triu(uses @ holds, 1).any():
            raise SordinoError("noise: a release uses noise of rounds that come after it; make the factors causal.")
        return factors

    def mixing(self, rounds: int) -> np.ndarray:
        return self.factors.decoder[:rounds]

    def sensitivity_factor(self, rounds: np.ndarray, own: bool) -> float:
        return self.factors.released_sensitivity(rounds) if own else self.factors.sensitivity(rounds)

    def separate_factor(self, rounds: np.ndarray) -> float | None:
        return self.factors.largest_column(rounds)

    def standard_noise(self, source: Source, at: Address, first: int, shape: tuple[int, ...]) -> Draw:
        row = self.factors.decoder[at.round - first]
        return draw(source, [(row[j], at._replace(round=first, index=int(j))) for j in np.flatnonzero(row)], shape)


class StreamedGaussian(Mechanism):
    """Correlated noise whose factors follow from the number of rounds; `over` gives them."""

    name = CorrelatedGaussian.name
    spans_rounds = True

    def __init__(self, noise: Stream) -> None:
        super().__init__(noise)
        self.stream = noise

    def over(self, rounds: int) -> Noise:
        return CorrelatedGaussian(self.stream.over(rounds)).over(rounds)

    def standard_noise(self, source: Source, at: Address, first: int, shape: tuple[int, ...]) -> Draw:
        raise SordinoError("noise: the factors of a stream follow from its rounds; take the plan's stages.")
