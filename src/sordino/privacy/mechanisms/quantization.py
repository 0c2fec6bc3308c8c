"""Sums of integers under secure aggregation: whose noise counts, how fine the integers are, and what rounding costs.

Client i sends floor(u_i + dither) + discrete Gaussian noise, modulo 2^32, where u_i is its weighted clipped sum in
steps of a public size. Of n clients `dropouts` may fail and `colluders` may reveal their noise. The noise of the
h = n - dropouts - colluders others gives the protection, so each client adds 1/h of the variance that is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sordino.core import Correlated, Kind, Method, Stream, keep, nothing
from sordino.errors import SordinoError
from sordino.privacy.mechanisms import discrete_gaussian

MOST_WRAP_PROBABILITY = 1e-9  # per round, that a coordinate of the sum leaves the range; it harms only accuracy
MOST_ROUNDING_FACTOR = 1.1  # by which rounding may increase a sensitivity
FINEST_STD = 2.0**20  # of one client's noise, in steps: finer steps gain nothing
# Of one client's noise, in steps: a sum of such noises is a discrete Gaussian up to e^-900.
LEAST_STEP_VARIANCE = 100.0


@dataclass(frozen=True)
class Integers:
    """The parameters of a secure sum of integers.

    Args:
      dimension: numbers per message.
      dropouts: sites that may fail in a round.
      colluders: sites that may reveal their noise to the server.
    """

    dimension: int
    dropouts: int = 0
    colluders: int = 1

    def __post_init__(self) -> None:
        for name in ("dimension", "dropouts", "colluders"):
            if getattr(self, name) < (name == "dimension"):
                raise SordinoError(f"{name}: {getattr(self, name)} must be at least {int(name == 'dimension')}.")

    def honest(self, clients: int) -> int:
        """The number of clients whose noise is in every opened sum and unknown to the coalition."""
        honest = clients - self.dropouts - self.colluders
        if honest < 2:
            raise SordinoError(
                f"colluders: of {clients} sites {self.dropouts} may drop out and {self.colluders} may collude; only "
                f"{max(honest, 0)} remain, which is no better than untrusted-server. Allow fewer, or add sites."
            )
        return honest

    def steps(self, reach: float, std: float, clients: int) -> float:
        """The number of integer steps per unit of the aggregate: as many as fit, but no more than are useful.

        Args:
          reach: bound on a coordinate of the sum without noise.
          std: of the honest noise in the sum.
          clients: number of clients.
        """
        honest = self.honest(clients)
        tail = math.sqrt(2 * math.log(2 * self.dimension / MOST_WRAP_PROBABILITY))
        spread = MOST_ROUNDING_FACTOR * std * math.sqrt(clients / honest)
        fit = (1 - 2.0**-10) * discrete_gaussian.MODULUS / 2 / (reach + tail * spread)
        return min(fit, FINEST_STD * math.sqrt(honest) / std)

    def rounded(self, moved: np.ndarray) -> np.ndarray:
        """Sensitivities in steps after rounding."""
        # Rounded up to a grid, so that equal clients stay equal if the last bits of their weights differ.
        values, which = np.unique(np.ceil(moved * 2**20) / 2**20, return_inverse=True)
        return np.array([discrete_gaussian.rounded(float(v), self.dimension) for v in values])[which.reshape(-1)]

    def lengthened(self, moved: np.ndarray, needed: np.ndarray) -> float:
        """The factor by which rounding increases the noise, so that it is enough for every client.

        Args:
          moved: sensitivities in steps.
          needed: the noise that each client needs without rounding.
        """
        most = float(moved.max())
        factor = float((needed * self.rounded(moved) / moved).max() / needed.max()) if moved.min() > 0 else math.inf
        if not factor <= MOST_ROUNDING_FACTOR:
            raise SordinoError(
                f"records: one record is only {most:.3g} integer steps long; rounding would multiply the noise by "
                f"{factor:.3g}. Use untrusted-server, or fewer records."
            )
        return factor


def check(method: Method) -> None:
    """Check that each round releases one noised vector, sent unchanged.

    Raises:
      SordinoError: the method sends something else.
    """
    for stage in method.stages:
        noised = [query for query in stage.queries if query.noise is not None]
        single = len(noised) == 1 and noised[0].calls == 1 and not isinstance(noised[0].noise, Correlated | Stream)
        bare = (
            stage.local.update_memory is keep and stage.local.prepare is nothing
        )  # a memory depends on a single message
        if not (single and bare) or noised[0].kind not in (Kind.GRADIENT, Kind.TALLY, Kind.DELTA):
            raise SordinoError(
                f"method: {method.name} does not send one noised vector per round, which secure aggregation adds up; "
                "use dp-fedsofim, dp-fedgd, dp-fedadam or another with one gradient per round, or untrusted-server."
            )
