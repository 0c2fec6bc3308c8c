"""How records are drawn for a release, and Gaussian releases about them. `subsampled` has their account."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Sampler(StrEnum):
    """Which records take part in a release: all, each independently at a rate, a fixed number drawn at random, or those
    that drew this minibatch among those of an epoch."""

    FULL = "full"
    POISSON = "poisson"
    FIXED = "fixed"
    ALLOCATION = "allocation"


class SampledGaussian(NamedTuple):
    """`times` equal Gaussian releases, each on a fresh random part of the data.

    Attributes:
      rate: the chance of a record to take part.
      mu: the clip divided by the standard deviation, for either adjacency.
      times: number of releases; under allocation they are minibatches in a row, from the first one of an epoch on.
      sampler: how records are drawn.
      span: 0, or, inside `subsampled`, the minibatches of one epoch that are released; `times` then counts epochs.
    """

    rate: float
    mu: float
    times: int
    sampler: Sampler = Sampler.POISSON
    span: int = 0

    @property
    def chance(self) -> float:
        """The chance of a record to be in one release, or in those of one epoch."""
        return min(1.0, self.rate * max(self.span, 1))


class SampledAccount(NamedTuple):
    """What one client releases, and the epsilon that it must keep.

    Attributes:
      releases: the sampled releases.
      gaussian_mu: mu of a Gaussian-DP release beside them.
      epsilon: the epsilon.
    """

    releases: Sequence[SampledGaussian]
    gaussian_mu: float
    epsilon: float
