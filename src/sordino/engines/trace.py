"""Find out what a local rule asks by running it once with a probe in place of its data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sordino.core import Broadcast, Kind, Stage, forget, keep, nothing


class _AsksMoreError(Exception):
    """The rule asked something other than one gradient at theta."""


class _GradientProbe:
    """Stands in for `ask`: answers one gradient query at theta and rejects every other question."""

    def __init__(self, theta: Tensor) -> None:
        self._theta, self._asked = theta, False
        self.answer = torch.zeros_like(theta)

    def gradient(self, theta: Tensor, on: Any = None, scale: Any = None) -> Tensor:
        if theta is not self._theta or on is not None or scale is not None or self._asked:
            raise _AsksMoreError
        self._asked = True
        return self.answer

    def __getattr__(self, name: str) -> Any:
        raise _AsksMoreError


def only_asks_for_the_gradient(stage: Stage, broadcast: Broadcast) -> bool:
    """Whether every client of the stage sends its gradient at the broadcast theta, unchanged, and nothing else.

    Args:
        stage: The stage whose local rule is traced.
        broadcast: What the server sends at the start of a round.

    Returns:
        True if the engine may replace the local rules by one sum over all records.
    """
    local = stage.local
    if local.init is not forget or local.update_memory is not keep or local.prepare is not nothing:
        return False
    if [query.kind for query in stage.queries] != [Kind.GRADIENT]:
        return False
    probe = _GradientProbe(broadcast.theta)
    try:
        return local.compute(probe, broadcast, (), ()) is probe.answer
    except _AsksMoreError:
        return False
