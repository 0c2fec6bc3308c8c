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
from typing import Any, TypeVar

import numpy as np

from sordino.core import Correlated, Independent, Noise, Stream
from sordino.errors import SordinoError
from sordino.privacy.accounting.events import EVENTS, DiscreteGaussian, SmoothedDiscreteGaussian
from sordino.privacy.mechanisms import discrete_gaussian
from sordino.privacy.mechanisms.correlated import CorrelatedGaussian, StreamedGaussian
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

    def standard_noise(self, source: Source, at: Address, first: int, shape: tuple[int, ...]) -> Draw:
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
    """The same noise in a plan with minibatches, which has another account."""

    name = "smoothed-discrete-gaussian"
    event = SmoothedDiscreteGaussian


class GaussianNoise(Mechanism):
    """Fresh Gaussian noise for every release; under secure aggregation, its discrete form."""

    def with_integers(self, integers: Integers, sampled: bool = False) -> Mechanism:
        return (SmoothedDiscreteGaussianNoise if sampled else DiscreteGaussianNoise)(self.noise, integers)


NOISE_LAWS: dict[type[Noise], Build] = {
    Independent: GaussianNoise,
    Correlated: CorrelatedGaussian,
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
