"""Parts of theta where low-rank adapters train one factor, and the re-factorisation of B A on the server.

A rule's state holds tensors alone, and a stored state is float32. So the places of the factors are kept as a table of
small numbers (`table`), one row per tensor of theta: rows, columns, and which factor it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

OTHER, DOWN, UP = 0, 1, 2  # neither; A, which maps down to the rank; B, which maps up from it


class Piece(NamedTuple):
    """One tensor of theta."""

    start: int
    rows: int
    columns: int
    factor: int  # OTHER, DOWN or UP

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.rows * self.columns)

    def of(self, theta: Tensor) -> Tensor:
        """The tensor as a matrix, in float64."""
        return theta[..., self.where].reshape(*theta.shape[:-1], self.rows, self.columns).double()


class PartState(NamedTuple):
    """The state of `part_rule`."""

    layout: Tensor  # of theta: its `table`
    inner: Tree  # of the method's own rule, for the part that is trained now
    other: Tree  # of the same rule, for the part that was trained before; () if there is none


def table(facts: Facts) -> Tensor:
    """Rows, columns and factor of every tensor of theta.

    Args:
      facts: with the shapes of theta's tensors, and which of them are factors.

    Returns:
      A matrix of tensors x 3.

    Raises:
      SordinoError: the model has no adapters of which both factors are trained.
    """
    if not facts.adapters:
        raise SordinoError(
            "lora_variant: the model has no low-rank adapters whose A and B are both parameters; build it by "
            "lora.adapt with its variant, or use the method without one."
        )
    factors = dict.fromkeys(range(len(facts.shapes)), OTHER)
    factors |= {a: DOWN for a, _ in facts.adapters} | {b: UP for _, b in facts.adapters}
    sizes = [(shape[0] if shape else 1, math.prod(shape[1:])) for shape in facts.shapes]
    return torch.tensor([(*size, factors[k]) for k, size in enumerate(sizes)], dtype=torch.float64)


def pieces(layout: Tensor) -> list[Piece]:
    """The tensors of theta, in order, from their `table`."""
    found, start = [], 0
    for rows, columns, factor in layout.tolist():
        found.append(Piece(start, int(rows), int(columns), int(factor)))
        start = found[-1].where.stop
    return found


def without(tensors: Sequence[Piece], factor: int) -> Tensor:
    """The numbers of all entries of theta except those of one factor."""
    return torch.cat([torch.arange(p.where.start, p.where.stop) for p in tensors if p.factor != factor])


def facts_without(facts: Facts, factor: int, rounds: int | None = None) -> Facts:
    """The facts as a rule reads them that trains all of theta except one factor.

    Args:
      facts: of the whole theta.
      factor: the frozen one.
      rounds: of the rule; by default those of the facts.

    Returns:
      Facts whose shapes and blocks are those of the part. Blocks keep their order and are numbered from 0.
    """
    tensors = pieces(table(facts))
    shapes = tuple(shape for shape, p in zip(facts.shapes, tensors, strict=True) if p.factor != factor)
    blocks = facts.blocks
    if blocks is not None:
        blocks = torch.unique(blocks[without(tensors, factor)], return_inverse=True)[1]
    return replace(facts, shapes=shapes, blocks=blocks, adapters=(), rounds=rounds or facts.rounds)


def refactored(theta: Tensor, tensors: Sequence[Piece]) -> Tensor:
    """theta with the same products B A, where A has orthonormal rows and B orthogonal columns of falling length.

    With A^T = Q R and the singular value decomposition B R^T = U S W, the new factors are W Q^T and B R^T W^T. It is
    a function of theta alone, and costs O((inputs + outputs) rank^2).

    Args:
      theta: the parameters; leading axes are runs.
      tensors: the tensors of theta.

    Returns:
      The new theta.

    Raises:
      SordinoError: A has more rows than columns, so they cannot be orthonormal.
    """
    theta = theta.clone()
    downs, ups = ([p for p in tensors if p.factor == factor] for factor in (DOWN, UP))
    for a, b in zip(downs, ups, strict=True):
        if a.rows > a.columns:
            raise SordinoError(
                f"lora_rank: {a.rows} rows of A with {a.columns} entries each cannot be orthonormal (fedsvd); lower it."
            )
        q, r = torch.linalg.qr(a.of(theta).mT)
        product = b.of(theta) @ r.mT
        # The decomposition of the small triangular factor has the same W; it has all rows of W if the rank is high.
        w = torch.linalg.svd(torch.linalg.qr(product, mode="r").R)[2]
        theta[..., a.where] = (w @ q.mT).flatten(-2).to(theta)
        theta[..., b.where] = (product @ w.mT).flatten(-2).to(theta)
    return theta


def part_rule(
    inner: Rule, frozen: int, *, refactor: bool = False, before: int = 0, done: int = 0, total: int | None = None
) -> Rule:
    """A rule for all of theta that leaves one factor as it is and trains the rest by another rule.

    Args:
      inner: the rule of the part; it sees nothing else.
      frozen: the factor that no step changes.
      refactor: re-factor B A after each step, which reads theta alone.
      before: stages of the method before this one. From the second on, the state of a part goes on from the stage
        before the last.
      done: rounds of these stages that trained this part.
      total: rounds of all stages that train this part; by default those of the stage.

    Returns:
      The rule.
    """

    def init(theta: Tensor, facts: Facts, earlier: Tree) -> PartState:
        layout = table(facts).to(theta.device)
        other = earlier.inner if before and isinstance(earlier, PartState) else ()
        if before > 1 and isinstance(earlier, PartState):
            return PartState(layout, earlier.other, other)
        at = without(pieces(layout), frozen).to(theta.device)
        return PartState(layout, inner.init(theta.index_select(-1, at), facts_without(facts, frozen, total), ()), other)

    def update(mean: Tree, state: PartState, theta: Tensor, t: int) -> tuple[Tensor, PartState]:
        tensors = pieces(state.layout)
        at = without(tensors, frozen).to(theta.device)
        step, after = inner.update(mean, state.inner, theta.index_select(-1, at), t + done)
        whole = torch.zeros_like(theta).index_copy(-1, at, step.to(theta))
        if refactor:
            whole = refactored(theta + whole, tensors) - theta
        return whole, state._replace(inner=after)

    return Rule(init, update, broadcast=lambda state: inner.broadcast(state.inner))
