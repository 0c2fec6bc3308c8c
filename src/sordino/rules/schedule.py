"""Schedules of step sizes over the rounds, and a step with decoupled weight decay."""

from __future__ import annotations

import math

from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor

SCHEDULES = ("cosine", "constant")


def schedule_factor(schedule: str, t: float, rounds: float) -> float:
    """What the step size is multiplied by in round t: 1 in the first; `cosine` falls towards 0 after the last.

    >>> [round(schedule_factor("cosine", t, 4), 3) for t in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return (1 + math.cos(math.pi * t / rounds)) / 2 if schedule == "cosine" else 1.0


def descend(y: Tensor, direction: Tensor, rate: float | Tensor, decay: float) -> Tensor:
    """One step and decoupled weight decay: (1 - rate decay) y - rate direction."""
    return y - rate * (direction + decay * y if decay else direction)


def check_schedule(schedule: str, decay: float) -> None:
    """Raise SordinoError unless a schedule is known and a weight decay is finite and at least 0."""
    check_known("schedule", schedule, SCHEDULES)
    if not 0 <= decay < math.inf:
        raise SordinoError(f"decay: {decay} must be a finite number, 0 or more.")
