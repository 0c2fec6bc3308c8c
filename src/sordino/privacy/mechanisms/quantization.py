"""Sums of integers under secure aggregation: whose noise counts, how fine the integers are, and what rounding costs.

Client i sends floor(u_i + dither) + discrete Gaussian noise, modulo 2^32, where u_i is its weighted clipped sum in
steps of a public size. Several answers of one round stand one after another, each with its own steps and noise. Of n
clients `dropouts` may fail and `colluders` may reveal their noise. The noise of the h = n - dropouts - colluders others
gives the protection, so each client adds 1/h of the variance that is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sordino.core import Correlated, Method, Stage, Stream, keep
from sordino.errors import SordinoError, count
from sordino.privacy.accounting.concentrated import LEAST_SMOOTHED_VARIANCE
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.mechanisms import discrete_gaussian, mask_graph

MOST_WRAP_PROBABILITY = 1e-9  # per round, that a coordinate of the sum leaves the range; it harms only accuracy
MOST_ROUNDING_FACTOR = 1.1  # by which rounding may increase a sensitivity
FINEST_STD = 2.0**20  # of one client's noise, in steps: finer steps gain nothing
# Of one client's noise, in steps. At least two are in a sum: it is a discrete Gaussian, and a function of a Gaussian,
# up to e^-500 (`concentrated.SMOOTHING`).
LEAST_STEP_VARIANCE = LEAST_SMOOTHED_VARIANCE / 2


class Answer(NamedTuple):
    """One noised answer of a message, as it is sent.

    Args:
      query: number of its query within the stage.
      shape: of the answer: one axis for a vector, two for a symmetric matrix.
    """

    query: int
    shape: tuple[int, ...]

    @property
    def dimension(self) -> int:
        """Integers that are sent: of a symmetric matrix, those on and above its diagonal."""
        rows = self.shape[0]
        return rows if len(self.shape) == 1 else rows * (rows + 1) // 2

    def flat(self, values: np.ndarray) -> np.ndarray:
        """The answer as a vector of the same norm: of a symmetric matrix A, a_ii and sqrt(2) a_ij for i < j.

        |A|² = Σ a_ii² + Σ_{i<j} 2 a_ij² in the Frobenius norm, so the vector has the sensitivity of the matrix. Equal
        noise on its numbers is noise of half the variance off the diagonal, as `Draw.symmetric` has it.
        """
        if len(self.shape) == 1:
            return values
        above = np.triu_indices(self.shape[0])
        return np.asarray(values[above] * np.where(above[0] == above[1], 1.0, math.sqrt(2)))

    def unflat(self, vector: np.ndarray) -> np.ndarray:
        """The answer, from what `flat` returns."""
        if len(self.shape) == 1:
            return vector
        above = np.triu_indices(self.shape[0])
        matrix = np.zeros(self.shape)
        matrix[above] = vector / np.where(above[0] == above[1], 1.0, math.sqrt(2))
        return np.asarray(matrix + np.triu(matrix, 1).T)


@dataclass(frozen=True)
class Integers:
    """The parameters of a secure sum of integers.

    Args:
      messages: per stage, the noised answers of one message, in their order (`engines.trace.sent_answers`); a number
        stands for one vector of so many numbers in every round.
      dropouts: sites that may fail in a round.
      colluders: sites that may reveal their noise to the server.
      row_sums: the least and the largest sum of a row of a stream's encoder, in absolute values; 1 where answers are
        sent as they are.
    """

    messages: int | tuple[tuple[Answer, ...], ...]
    dropouts: int = 0
    colluders: int = 1
    row_sums: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        sizes = [self.messages] if isinstance(self.messages, int) else [a.dimension for m in self.messages for a in m]
        for name, least, values in (
            ("dimension", 1, sizes),
            ("dropouts", 0, [self.dropouts]),
            ("colluders", 0, [self.colluders]),
        ):
            if not values or min(values) < least:
                raise SordinoError(f"{name}: {min(values, default=0)} must be at least {least}.")

    @property
    def dimension(self) -> int:
        """Numbers of the only answer.

        Raises:
          SordinoError: there are several; `of` says which one is meant.
        """
        if not isinstance(self.messages, int):
            raise SordinoError("dimension: the answers differ in length; say which one is meant.")
        return self.messages

    def of(self, stage: int, number: int) -> Integers:
        """The parameters for one query's answers alone."""
        if isinstance(self.messages, int):
            return self
        (dimension,) = (answer.dimension for answer in self.messages[stage] if answer.query == number)
        return replace(self, messages=dimension)

    def honest(self, clients: int) -> int:
        """The number of clients whose noise is in every opened sum and unknown to the coalition."""
        honest = clients - self.dropouts - self.colluders
        if honest < 2:
            verb = "is" if clients == 1 else "are"
            raise SordinoError(
                f"colluders: secure aggregation needs at least {self.dropouts + self.colluders + 2} sites where "
                f"{self.dropouts} may drop out and {self.colluders} may collude, and there {verb} "
                f"{count(clients, 'site')}: this is no better than untrusted-server. Add sites, or allow fewer of them "
                "to drop out or collude."
            )
        return honest

    def graph(self, clients: int) -> mask_graph.Parameters | None:
        """The graph of masks; None where all pairs share masks, or no roster holds so many sites.

        It does not change `honest`: what opens holds the honest sites of a whole list of survivors, or nothing.

        Raises:
          SordinoError: no graph withstands so many dropouts and colluders.
        """
        sparse = mask_graph.ALL_PAIRS < clients <= mask_graph.MOST_SITES
        return mask_graph.parameters(clients, self.dropouts, self.colluders) if sparse else None

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

    def rounded_terms(self, moved: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Sensitivities in steps after rounding, of changes that are made of `terms` terms of equal length each.

        A release about a Poisson sample compares each of two replaced terms with no term at all, so that the bound must
        hold for both of them: twice the rounded length of one. Rounding the difference of two would be less.

        Of a stream, round t sends a row of `encoder @ x`, which moves by at most a_t times as much as x, a_t the row's
        sum. What rounding makes of a length, over the length, falls with the length. So no row is stretched by more
        than the shortest one, and the stream of all rows by no more than that.
        """
        shortest = terms / self.row_sums[0]
        return np.asarray(shortest * self.rounded(moved / shortest))

    def lengthened(self, moved: np.ndarray, needed: np.ndarray, terms: np.ndarray) -> float:
        """The factor by which rounding increases the noise, so that it is enough for every client.

        Args:
          moved: sensitivities in steps.
          needed: the noise that each client needs without rounding.
          terms: of which each client's change is made; see `rounded_terms`.
        """
        most = float(moved.max())
        longer = self.rounded_terms(moved, terms)
        factor = float((needed * longer / moved).max() / needed.max()) if moved.min() > 0 else math.inf
        if not factor <= MOST_ROUNDING_FACTOR:
            raise SordinoError(
                f"records: one record is only {most:.3g} integer steps long; rounding would multiply the noise by "
                f"{factor:.3g}. Use untrusted-server, or fewer records."
            )
        return factor


def check(method: Method, integers: Integers) -> None:
    """Check that every noised answer is sent once per round, as it is, with fresh noise.

    Raises:
      SordinoError: the method sends something else, for which no integer noise is proved.
    """
    for number, stage in enumerate(method.stages):
        if why := _unproved(stage):
            raise SordinoError(
                f"method: {method.name} {why}. Use auto, dp-fedsofim, dp-fedgd or dp-fedadam, or untrusted-server."
            )
        noised = [k for k, query in enumerate(stage.queries) if query.noise is not None]
        sent = noised if isinstance(integers.messages, int) else sorted(a.query for a in integers.messages[number])
        if sent != noised or (isinstance(integers.messages, int) and len(noised) != 1):
            raise SordinoError(
                f"method: {method.name} releases queries {noised} in stage {number}, and its messages hold {sent}; "
                "secure aggregation needs every noised answer exactly once."
            )


def _unproved(stage: Stage) -> str:
    """Why the stage cannot be summed as integers; empty if it can."""
    if stage.local.update_memory is not keep:
        return (
            "has clients that store their own message with its noise. Under masks a message has no noise of its own: "
            "only the sum has enough, so what a client stores would not be private"
        )
    for query in stage.queries:
        if query.noise is None:
            continue
        if query.calls != 1:
            return (
                f"asks {query.calls} times per round, each time about a point that depends on the answer before. Under "
                "masks that answer has only a part of the noise, and the sum of all messages is not linear in it"
            )
    streams = [query for query in stage.queries if isinstance(query.noise, Correlated | InverseRoot | Stream)]
    if streams and sum(query.noise is not None for query in stage.queries) > 1:
        return "releases other answers beside a stream of correlated noise, whose rows are not sent as they are"
    return ""
