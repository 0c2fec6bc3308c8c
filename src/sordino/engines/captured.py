"""A round of several runs on a GPU as one CUDA graph: the sum, its noise, and the server's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from sordino.core import Rule, Tree
from sordino.engines import preconditions
from sordino.models.cuda_graphs import CapturedGraph
from sordino.tree import leaves, tree_map


class RoundMattersError(Exception):
    """The server's step depends on the number of the round."""


class AnyLaterRound:
    """Stands in for the number of round t and of every later one.

    It can be compared where the outcome is the same for all of them; anything else raises RoundMattersError or
    TypeError.
    """

    def __init__(self, t: int) -> None:
        self._t = t

    def __lt__(self, other: int) -> bool:
        return not self >= other

    def __ge__(self, other: int) -> bool:
        if self._t >= other:
            return True
        raise RoundMattersError

    def __le__(self, other: int) -> bool:
        return not self > other

    def __gt__(self, other: int) -> bool:
        if self._t > other:
            return True
        raise RoundMattersError

    def __eq__(self, other: object) -> NoReturn:
        raise RoundMattersError

    def __bool__(self) -> NoReturn:
        raise RoundMattersError

    __hash__ = None  # type: ignore[assignment]


class CapturedRound:
    """One graph for a round and all later ones of its stage.

    Args:
        noised_sum: The aggregate, a function of theta and of standard noise.
        rule: The server's rule.
        theta: Parameters, runs x numbers.
        state: The rule's state.
        noise: Standard noise.
        step: The number of the round, as the rule counts.

    Raises:
        RoundMattersError, TypeError: The rule's step depends on the number of the round, or its state changes shape.
    """

    def __init__(
        self,
        noised_sum: Callable[[Tensor, Tensor], Tensor],
        rule: Rule,
        theta: Tensor,
        state: Tree,
        noise: Tensor,
        step: int,
    ) -> None:
        later, before = AnyLaterRound(step), leaves(state)
        _, changed = preconditions.update(rule, torch.zeros_like(theta), state, theta, later)  # type: ignore[arg-type]
        after = leaves(changed)
        if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in after]:
            raise TypeError("the state changes its shape")
        self._changes = [new is not old for new, old in zip(after, before, strict=True)]
        self._theta, self._state, self._next = theta, state, self._flat(theta, state)

        def whole(flat: Tensor, noise: Tensor) -> Tensor:
            at, old = self._tree(flat)
            total = noised_sum(at, noise)
            move, new = preconditions.update(rule, total, old, at, later)  # type: ignore[arg-type]
            return torch.cat([total.flatten(), self._flat(at + move, new)])

        self._graph = CapturedGraph(whole, [self._next, noise], autograd=False)

    def __call__(self, theta: Tensor, state: Tree, noise: Tensor) -> tuple[Tensor, Tensor, Tree]:
        """The aggregate, and theta and the state after the round."""
        known = theta is self._theta and state is self._state
        out = self._graph([self._next if known else self._flat(theta, state), noise])
        self._next = out[theta.numel() :]
        self._theta, self._state = self._tree(self._next)
        return out[: theta.numel()].view_as(theta), self._theta, self._state

    def _flat(self, theta: Tensor, state: Tree) -> Tensor:
        parts = [leaf for leaf, changes in zip(leaves(state), self._changes, strict=True) if changes]
        if any(part.dtype is not theta.dtype for part in parts):
            raise TypeError("the state has another type than the parameters")
        return torch.cat([part.flatten() for part in (theta, *parts)])

    def _tree(self, flat: Tensor) -> tuple[Tensor, Tree]:
        changes, start = iter(self._changes), self._theta.numel()

        def part(leaf: Tensor) -> Tensor:
            nonlocal start
            if not next(changes):
                return leaf
            start += leaf.numel()
            return flat[start - leaf.numel() : start].view_as(leaf)

        return flat[: self._theta.numel()].view_as(self._theta), tree_map(part, self._state)
