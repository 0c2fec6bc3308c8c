"""The registered noise laws: which `Mechanism` implements which declared `Noise`.

To add a law, write a `Mechanism` for it and register it, here or with `register`:

    @dataclass(frozen=True)
    class Doubled(Noise):
        ...

    @register(Doubled)
    class DoubledGaussian(Mechanism):
        name = "doubled-gaussian"

        def std(self, sensitivity, mu):
            return 2 * sensitivity / mu

A law whose noise is not Gaussian also needs an accounting event (`accounting.events.register_event`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from sordino.core import Correlated, Independent, Noise, Stream
from sordino.errors import SordinoError
from sordino.lazy import torch
from sordino.privacy.accounting.correlated import MOST_CORRELATED_ROUNDS
from sordino.privacy.accounting.events import EVENTS, DiscreteGaussian, SmoothedDiscreteGaussian
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.correlated import CorrelatedGaussian, InverseRootGaussian, StreamedGaussian
from sordino.privacy.mechanisms.gaussian import Draw
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Address, Floats, Source

MechanismClass = TypeVar("MechanismClass", bound=type[Mechanism])
Build = Callable[[Any], Mechanism]


class DiscreteGaussianNoise(Mechanism):
    """Discrete Gaussian noise on integers, added up by secure aggregation."""

    name = "discrete-gaussian"
    event = DiscreteGaussian

    def __init__(self, noise: Noise, integers: Integers) -> None:
        super().__init__(noise)
        self.integers = integers

    def visible_sensitivity(self, sensitivity: np.ndarray, step: float, terms: np.ndarray) -> np.ndarray:
        return step * self.integers.rounded_terms(sensitivity / step, terms)

    def standard_noise(
        self, source: Source, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Draw:
        raise SordinoError("integers: only the reference engine adds up integers; this engine uses real numbers.")

    def encode(
        self, values: Floats, steps: float, variance: float, source: Source, at: Address, dither_at: Address
    ) -> np.ndarray:
        """Values as noised integers modulo 2^32.

        Args:
          steps: integer steps per unit of the values.
          variance: of the noise, in steps.
          at: address of the noise; `dither_at`: of the random rounding.
        """
        integers = discrete_gaussian.encode(values, steps, source.uniform(dither_at, values.shape))
        integers += discrete_gaussian.draw(source, at, variance, values.shape)
        return discrete_gaussian.modular(integers)

    def decode(self, total: np.ndarray, steps: float) -> Floats:
        """The sum of values, from the sum of integers modulo 2^32."""
        return discrete_gaussian.decode(total, steps)


class SmoothedDiscreteGaussianNoise(DiscreteGaussianNoise):
    """The same noise, fresh for every release, accounted for as the Gaussian noise that it is a function of."""

    name = "smoothed-discrete-gaussian"
    event = SmoothedDiscreteGaussian


class GaussianNoise(Mechanism):
    """Fresh Gaussian noise for every release; under secure aggregation, its discrete form."""

    def with_integers(self, integers: Integers) -> Mechanism:
        return SmoothedDiscreteGaussianNoise(self.noise, integers)


class EncodedDiscreteGaussianNoise(DiscreteGaussianNoise):
    """Fresh integer noise on the rows of `encoder @ x`: clients encode, and the server applies the decoder to the sums.

    Round t sends row t of the encoder times all answers so far, so that no noise is carried from round to round. A unit
    moves row t by at most the row's sum times the sensitivity of an answer, whatever was released before; the squares
    of all rows add up to the squared sensitivity of the stream (adaptive composition of concentrated DP). A release of
    the account is the whole stream: its up to 4,096 roundings fail with probability 2^-68 together, less than FAILURE.
    """

    spans_rounds = True

    def __init__(self, noise: Correlated, integers: Integers) -> None:
        sums = np.abs(noise.encoder).sum(1)
        super().__init__(noise, replace(integers, row_sums=(float(sums.min()), float(sums.max()))))
        self.factors = noise

    def sensitivity_factor(self, rounds: np.ndarray, own: bool) -> float:
        return self.factors.sensitivity(rounds)


class CorrelatedNoise(CorrelatedGaussian):
    """Correlated Gaussian noise; under secure aggregation, fresh integer noise on encoded answers."""

    def with_integers(self, integers: Integers) -> Mechanism:
        encoder = self.factors.encoder
        if encoder.shape[0] != encoder.shape[1] or np.triu(encoder, 1).any():
            raise SordinoError(
                "noise: under secure aggregation a round sends one row of the encoder, and this one has more rows than "
                "rounds, or rows of later rounds; use factors whose encoder is lower triangular, as those of dp-ftrl, "
                "or untrusted-server."
            )
        return EncodedDiscreteGaussianNoise(self.factors, integers)


class InverseRootNoise(InverseRootGaussian):
    """The same noise; under secure aggregation, fresh integer noise on encoded answers."""

    def with_integers(self, integers: Integers) -> Mechanism:
        if self.factors.rounds > MOST_CORRELATED_ROUNDS:
            raise SordinoError(
                f"rounds: under secure aggregation a site keeps its answers of all rounds of a stream, and rounding is "
                f"accounted for up to {MOST_CORRELATED_ROUNDS:,} of them, not {self.factors.rounds:,}; use fewer "
                "rounds, or untrusted-server."
            )
        return EncodedDiscreteGaussianNoise(Correlated(self.factors.encoder, self.factors.decoder), integers)


NOISE_LAWS: dict[type[Noise], Build] = {
    Independent: GaussianNoise,
    Correlated: CorrelatedNoise,
    InverseRoot: InverseRootNoise,
    Stream: StreamedGaussian,
}


def register(declared: type[Noise]) -> Callable[[MechanismClass], MechanismClass]:
    """Register the decorated `Mechanism` as the implementation of a declared law.

    Raises:
      SordinoError: the law has a mechanism already, or the accountant does not know its event.
    """

    def add(kind: MechanismClass) -> MechanismClass:
        if declared in NOISE_LAWS:
            raise SordinoError(f"noise: {declared.__name__} has a mechanism already; declare another class.")
        if EVENTS.get(kind.event.name) is not kind.event:
            raise SordinoError(f"noise: there is no account of {kind.event.name}; use register_event first.")
        NOISE_LAWS[declared] = kind
        return kind

    return add


def mechanism_of(noise: Noise | None) -> Mechanism:
    """The mechanism that implements a declared law.

    Raises:
      SordinoError: none is registered.
    """
    for declared in type(noise).__mro__:
        if declared in NOISE_LAWS:
            return NOISE_LAWS[declared](noise)
    raise SordinoError(
        f"noise: no mechanism is registered for {type(noise).__name__}; "
        "add one with sordino.privacy.mechanisms.laws.register."
    )


def carries(noise: Noise | None) -> bool:
    """Whether noise of one round is used again in later ones."""
    return noise is not None and mechanism_of(noise).carried
