"""The interface of a noise law.

A method declares a law (`Query.noise`, a `core.Noise`). The `Mechanism` registered for it in `laws` is everything that
calibration, engines, accountant and certificate need to know of it.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from sordino.core import Noise
from sordino.errors import SordinoError
from sordino.lazy import torch
from sordino.privacy.accounting.events import Gaussian, NoiseEvent
from sordino.privacy.mechanisms.gaussian import Draw, draw
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Address, Source


class Mechanism:
    """Fresh Gaussian noise for every release; the base class of every law.

    Attributes:
      name: as certificates write it.
      event: the accounting event of one release.
      spans_rounds: all rounds of a stage are accounted for as one release.
      carried: noise of one round is used again in later ones.
      most_rounds: the longest stage that the law can serve; inf if there is no limit.
    """

    name: ClassVar[str] = "gaussian"
    event: ClassVar[type[NoiseEvent]] = Gaussian
    spans_rounds: ClassVar[bool] = False

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    @property
    def carried(self) -> bool:
        return False

    @property
    def most_rounds(self) -> float:
        return math.inf

    @property
    def is_plain(self) -> bool:
        """The standard noise is one fresh normal per number, so that engines may draw many at once."""
        return type(self).standard_noise is Mechanism.standard_noise

    def over(self, rounds: int) -> Noise:
        """The law for a stage of so many rounds.

        Raises:
          SordinoError: the law cannot serve so many rounds.
        """
        return self.noise

    def sensitivity_factor(self, rounds: np.ndarray, own: bool) -> float:
        """Where the law spans rounds: by how much it multiplies the sensitivity of a unit that took part in these.

        Args:
          rounds: of the stage, in which the unit took part.
          own: every client has noise of its own, and only the releases of these rounds are seen.
        """
        return 1.0

    def squared_factors(self, rounds: np.ndarray, own: bool) -> np.ndarray | None:
        """The squares of `sensitivity_factor`: entry k once the unit has taken part in the first k of its rounds.

        None if the law has no quick way to all of them; then they are computed one by one, when they are needed.
        """
        return None

    def separate_factor(self, rounds: np.ndarray) -> float | None:
        """Where the law spans rounds: the factor on the sensitivity of each round, if every one of these rounds is a
        release by itself; None if they are not."""
        return 1.0

    def mixing(self, rounds: int) -> np.ndarray | None:
        """The matrix D if the releases of a stage carry noise `std * D @ z` with independent z; None for identity."""
        return None

    def std(self, sensitivity: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Calibrate: the standard deviation with which a release of this sensitivity spends at most mu."""
        return np.asarray(sensitivity / mu)

    def visible_sensitivity(self, sensitivity: np.ndarray, step: float, terms: np.ndarray) -> np.ndarray:
        """The sensitivity of what is sent; larger where it is rounded to steps.

        Args:
          terms: of a sum that make up each client's change, where they are bounded one by one.
        """
        return sensitivity

    def standard_noise(
        self, source: Source, at: Address, first: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Draw:
        """Noise that `std` is a multiple of, for one release.

        Args:
          first: the first round of the stage.
          device: where the release is.
        """
        return draw(source, [(1.0, at)], shape, device)

    def with_integers(self, integers: Integers) -> Mechanism:
        """The law that takes this one's place where secure aggregation adds up integers.

        Raises:
          SordinoError: there is none.
        """
        raise SordinoError(
            f"noise: {self.name} noise has no integer form for secure aggregation; use untrusted-server."
        )
