"""The contract `streams`: noise that is correlated over rounds, as it is drawn, against the claimed sensitivity.

The draws of all rounds are a matrix N times independent normals. A source whose draws are unit vectors tells N exactly.
A unit that moves the rounds S by at most 1 each, in directions of its own choice, has mu^2 = signs^T (N N^T)^-1 signs
at least, for any signs: over all rounds where sums are visible, and over the releases of S where a client has noise of
its own. All signs are tried. No value may exceed the factor that the account uses, and some value must reach 90 % of
it. N N^T must also be the covariance that the plan states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sordino.checks.search import REQUIRED_SHARE
from sordino.core import Correlated, Method, Privacy, Query, Stream, Trust
from sordino.errors import SordinoError
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.mechanisms.random import Address, Floats, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.privacy.releases import participation_table, release_counts

ROUNDS = 7
SIZES = (3, 5, 4, 2)  # of the clients; the cohorts of cyclic:2, 3 and 4 differ in their first round
PATTERNS = ("full", "cyclic:2", "cyclic:3", "cyclic:4", "fixed:2")
SLACK = 1e-9  # relative: rounding of the inverse
MECHANISMS: dict[str, dict[str, Any]] = {
    "tree": {"mechanism": "tree"},
    "tree, restarted": {"mechanism": "tree", "restart": 4, "honaker": "none"},
    "inverse-root": {"mechanism": "inverse-root", "inverse_band": 3},
    "banded": {"mechanism": "banded", "band": 3},
    "banded, fitted": {"mechanism": "banded", "band": 4, "momentum": 0.9, "weight_decay": 0.1},
    "schedule": {"mechanism": "schedule"},
}


class UnitDraws(Seeded):
    """A source whose k-th new address draws the k-th unit vector."""

    def __init__(self) -> None:
        super().__init__(0)
        self.known: dict[Any, int] = {}

    def number(self, at: Address) -> int:
        return self.known.setdefault(at, len(self.known))

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        unit = np.zeros(shape)
        unit[self.number(at)] = 1.0
        return unit


class DrawnAfresh(UnitDraws):
    """A mutant: a draw that is needed again, in a later round, is another one."""

    def number(self, at: Address) -> int:
        return self.known.setdefault((at, len(self.known)), len(self.known))


class DrawnOnce(UnitDraws):
    """A mutant: all rounds have the same draw, so that it cancels in their differences."""

    def number(self, at: Address) -> int:
        return 0


class StreamFound(NamedTuple):
    """The result of `streams`: the claim that was reached best, what was found there, and problems.

    Attributes:
      claimed: the factor on the sensitivity of one answer that the account uses.
      worst: the factor that was found.
      broken: claims that do not hold.
      loose: claims that the search does not reach.
    """

    claimed: float
    worst: float
    broken: list[str]
    loose: list[str]

    @property
    def problems(self) -> list[str]:
        return self.broken + self.loose


def streams(method: Method, *, source: type[UnitDraws] = UnitDraws) -> StreamFound:
    """Check the sensitivity of every stream of a method, for several participations and all trust models.

    Args:
      method: the method, whose noise spans rounds.
      source: of the draws; mutants give another one.

    Returns:
      The claim that was reached best, and what is broken, one sentence per problem.
    """
    best, broken, loose = (math.inf, 0.0), list[str](), list[str]()
    for participation, trust in itertools.product(PATTERNS, Trust):
        privacy = Privacy(2.0, unit=method.unit, trust=trust)
        try:
            plan = Plan(method, ROUNDS, SIZES, privacy, Participation.parse(participation), schedule_seed=1)
            for claimed, worst in _compared(plan, source):
                best = max(best, (claimed, worst), key=lambda pair: pair[1] / pair[0])
                if not worst <= claimed * (1 + SLACK):
                    broken.append(
                        f"streams: under {participation} and {trust} a unit moves the stream by {worst:.4g} times its "
                        f"answer, and {claimed:.4g} is claimed"
                    )
        except SordinoError as error:
            broken.append(f"streams: {error}")
    if not best[1] >= REQUIRED_SHARE * best[0]:
        loose.append(f"streams: the search reached {best[1] / best[0]:.0%} of the claim; at least 90 % is required")
    return StreamFound(*best, broken, loose)


def _compared(plan: Plan, source: type[UnitDraws]) -> list[tuple[float, float]]:
    """Per client that takes part: the factor that the account uses, and the largest one that was found."""
    pairs = []
    for stage, number, query in _spanning(plan):
        mechanism, draws = mechanism_of(query.noise), source()
        size = (ROUNDS * (ROUNDS + 1) * 2,)  # more than a stage draws
        addresses = [Address(0, t, number) for t in range(ROUNDS)]
        noise = np.stack([mechanism.standard_noise(draws, at, 0, size).z.numpy() for at in addresses])
        covariance, mixing = noise @ noise.T, mechanism.mixing(ROUNDS)
        if mixing is not None and not np.allclose(covariance, mixing @ mixing.T, rtol=1e-9, atol=1e-9):
            raise SordinoError("the noise as it is drawn has another covariance than the plan states.")
        table = participation_table(plan, stage)
        for client, claimed in enumerate(release_counts(plan, stage, query)[1]):
            attended = np.flatnonzero(table[:, client])
            if len(attended):
                pairs.append((float(claimed), _moved(covariance, attended, own=not plan.only_sums_visible)))
    return pairs


def _spanning(plan: Plan) -> list[tuple[int, int, Query]]:
    """Stage, number and query of all streams."""
    queries = [(s, k, q) for s, stage in enumerate(plan.stages) for k, q in enumerate(stage.queries)]
    return [(s, k, q) for s, k, q in queries if q.noise is not None and mechanism_of(q.noise).spans_rounds]


def _moved(covariance: np.ndarray, attended: np.ndarray, own: bool) -> float:
    """The largest distance in units of the noise, over all signs of the changes."""
    seen = covariance[np.ix_(attended, attended)] if own else covariance
    if np.linalg.cond(seen) > 1e12:
        return math.inf
    inverse = np.linalg.inv(seen)
    inverse = inverse if own else inverse[np.ix_(attended, attended)]
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(attended))))
    return math.sqrt(float(np.einsum("ij,jk,ik->i", signs, inverse, signs).max()))


# ----------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class OneRound(Correlated):
    """Claims the sensitivity of one round for a unit that takes part in several."""

    def sensitivity(self, rounds: np.ndarray) -> float:
        return max((super(OneRound, self).sensitivity(rounds[k : k + 1]) for k in range(len(rounds))), default=0.0)

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        return self.sensitivity(rounds)


@dataclass(frozen=True)
class AsIfApart(Correlated):
    """Claims that no two rounds share a row of the encoder, however close they are."""

    def sensitivity(self, rounds: np.ndarray) -> float:
        return math.sqrt(sum(super(AsIfApart, self).sensitivity(np.array([t])) ** 2 for t in rounds))

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        return self.sensitivity(rounds)


@dataclass(frozen=True)
class LastDiagonalLeftOut(Correlated):
    """Claims the sensitivity of an encoder without its last diagonal."""

    def sensitivity(self, rounds: np.ndarray) -> float:
        offset = min(offset for offset in range(-len(self.encoder), 1) if self.encoder.diagonal(offset).any())
        return Correlated(np.triu(self.encoder, offset + 1), self.decoder).sensitivity(rounds)

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        return self.sensitivity(rounds)


def with_claim(method: Method, claim: Callable[[np.ndarray, np.ndarray], Correlated]) -> Method:
    """The method with the same factors, and a claim of its own about their sensitivity."""

    def changed(query: Query) -> Query:
        if not isinstance(query.noise, Stream):
            return query
        over = query.noise.over

        def factors(rounds: int) -> Correlated:
            noise: Any = over(rounds)
            return claim(noise.encoder, noise.decoder)

        return replace(query, noise=Stream(query.noise.name, factors))

    stages = (stage._replace(queries=tuple(map(changed, stage.queries))) for stage in method.stages)
    return method._replace(stages=tuple(stages))


CLAIMS = (OneRound, AsIfApart, LastDiagonalLeftOut)
DRAWS = (DrawnAfresh, DrawnOnce)


def missed_mutants(method: Method) -> list[type]:
    """The mutants that the contract does not reject; where no noise is carried, only the first one is wrong."""
    carried = any(mechanism_of(query.noise).carried for query in _queries(method))
    claims, draws = (CLAIMS, DRAWS) if carried else (CLAIMS[:1], ())
    missed: list[type] = [claim for claim in claims if not streams(with_claim(method, claim)).problems]
    return missed + [draw for draw in draws if not streams(method, source=draw).problems]


def _queries(method: Method) -> list[Query]:
    """The queries whose noise spans rounds, factorised for `ROUNDS` of them."""
    noised = [q for stage in method.stages for q in stage.queries if q.noise is not None]
    return [replace(q, noise=mechanism_of(q.noise).over(ROUNDS)) for q in noised if mechanism_of(q.noise).spans_rounds]
