"""Clients that train a part of theta: their rule runs unchanged on the part, and asks about it alone."""

from __future__ import annotations

from functools import cached_property
from typing import cast

from sordino.core import Ask, Batch, Blend, Broadcast, Facts, Kind, Local, Tree
from sordino.lazy import Tensor, torch
from sordino.rules.adapters import facts_without, pieces, table, without


class PartAsk:
    """Answers about a part of theta; its other entries are those of the broadcast."""

    def __init__(self, ask: Ask, theta: Tensor, frozen: int) -> None:
        self._ask, self._theta, self._frozen, self.records = ask, theta, frozen, ask.records
        self._part = without(pieces(table(ask.facts)), frozen).to(theta.device)

    @cached_property
    def facts(self) -> Facts:
        return facts_without(self._ask.facts, self._frozen)

    def gradient(
        self, theta: Tensor, on: Batch | None = None, scale: Tensor | None = None, blend: Blend | None = None
    ) -> Tensor:
        scale = None if scale is None else self._put(torch.zeros_like(self._theta), scale)
        blend = None if blend is None else blend._replace(theta=self._put(self._theta, blend.theta))
        return self._ask.gradient(self._put(self._theta, theta), on, scale, self._part, blend=blend)

    def count(self, theta: Tensor, scale: Tensor) -> Tensor:
        scale = self._put(torch.zeros_like(self._theta), scale)
        return self._ask.count(self._put(self._theta, theta), scale)

    def std(self, kind: Kind) -> Tensor:
        return self._ask.std(kind)

    def sample(self) -> Batch:
        return self._ask.sample()

    def taken(self) -> Tensor:
        """The part of the broadcast theta."""
        return self._theta.index_select(-1, self._part)

    def _put(self, whole: Tensor, part: Tensor) -> Tensor:
        return whole.expand(*part.shape[:-1], -1).index_copy(-1, self._part, part)


def part_local(local: Local, frozen: int) -> Local:
    """The clients' rule, for all of theta except one factor of low-rank adapters.

    Args:
        local: The rule of the part, of clients that store nothing.
        frozen: The factor that clients leave as it was broadcast: `rules.adapters.DOWN` or `UP`.

    Returns:
        The rule. Its messages hold nothing of the factor.
    """

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
        part = PartAsk(ask, broadcast.theta, frozen)
        message: Tree = local.compute(cast(Ask, part), broadcast._replace(theta=part.taken()), memory, cache)
        return message

    return Local(compute, message=local.message)
