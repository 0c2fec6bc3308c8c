"""Rounds of several runs on a GPU as one CUDA graph: the sums, their noise, and the server's steps."""

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


class CapturedRounds:
    """One graph for a few rounds in a row, which serves all later ones of their stage.

    Its rounds share the copies into and out of the graph, which are more kernels than a plain step has.

    Args:
        noised_sum: The aggregate, a function of theta and of standard noise.
        rule: The server's rule.
        theta: Parameters, runs x numbers.
        state: The rule's state.
        noise: Standard noise of each round, rounds x runs x numbers.
        step: The number of the first round, as the rule counts.

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
        if any(part.dtype is not theta.dtype for part in self._parts(theta, state)):
            raise TypeError("the state has another type than the parameters")
        self.rounds = len(noise)
        self._theta, self._state, self._next = theta, state, _flat(self._parts(theta, state))
        self._ahead: list[tuple[Tensor, Tensor, Tree]] = []  # computed, but not asked for yet; the next one is last

        def whole(flat: Tensor, noise: Tensor) -> Tensor:
            (at, now), parts = self._tree(flat), list[Tensor]()
            for standard in noise.unbind():
                total = noised_sum(at, standard)
                move, now = preconditions.update(rule, total, now, at, later)  # type: ignore[arg-type]
                at = at + move
                parts += [total, *self._parts(at, now)]
            return _flat(parts)

        self._graph = CapturedGraph(whole, [self._next, noise], autograd=False)

    def __call__(self, theta: Tensor, state: Tree, noise: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tree]:
        """The aggregate, and theta and the state after the round. Noise is asked for if the graph has to be replayed:
        that of this round and of those after it."""
        known = theta is self._theta and state is self._state
        if not (known and self._ahead):
            out = self._graph([self._next if known else _flat(self._parts(theta, state)), noise()])
            each, size = out.view(self.rounds, -1), theta.numel()
            self._next = each[-1, size:]
            self._ahead = [(row[:size].view_as(theta), *self._tree(row[size:])) for row in reversed(each.unbind())]
        aggregate, self._theta, self._state = self._ahead.pop()
        return aggregate, self._theta, self._state

    def _parts(self, theta: Tensor, state: Tree) -> list[Tensor]:
        """What changes from round to round."""
        return [theta, *(leaf for leaf, changes in zip(leaves(state), self._changes, strict=True) if changes)]

    def _tree(self, flat: Tensor) -> tuple[Tensor, Tree]:
        changes, start = iter(self._changes), self._theta.numel()

        def part(leaf: Tensor) -> Tensor:
            nonlocal start
            if not next(changes):
                return leaf
            start += leaf.numel()
            return flat[start - leaf.numel() : start].view_as(leaf)

        return flat[: self._theta.numel()].view_as(self._theta), tree_map(part, self._state)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
