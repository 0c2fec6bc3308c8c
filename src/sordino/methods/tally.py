"""One noised tally: the release of evaluations and of private statistics.

Guarantee: each client sends the noised sum of one bounded vector per record, or per person (`models.tally`), once. A
record, or a person with all of its records, moves the sum by at most `Tally.bound`, which is proved there. There is one
release, which depends on the data of a client through this sum alone, and the server adds the releases up: proved at
record and person level under every trust model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.core import Ask, Broadcast, Facts, Kind, Lemma, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.lazy import Tensor, torch

if TYPE_CHECKING:  # it needs torch
    from sordino.models.tally import Tally

LEMMA = "one cell per block, and numbers from 0 to 1"
CAVEAT = "A tally bounds what one record or one person adds; a client with several adds more."
UNITS = (Unit.RECORD, Unit.PERSON)


def tally(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
    return ask.tally(broadcast.theta)


def stage(of: Tally, share: float | None = None) -> Stage:
    """One round of a tally. The parameters stay as they are; what the stage hands out is the noised tally itself.

    Args:
      of: what is counted.
      share: of mu squared; None for all of it.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return theta.new_zeros(*theta.shape[:-1], of.dimension)

    def update(total: Tensor, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        return torch.zeros_like(theta), total

    def handed_out(theta: Tensor, state: Tree) -> Tensor:
        assert isinstance(state, Tensor)
        return state

    query = Query(Kind.TALLY, of.clip, share=share, bound=Lemma(LEMMA, of.bound))
    return Stage(Local(tally), Rule(init, update, model=handed_out), (query,), rounds=1)


def tally_method(name: str, of: Tally, unit: Unit = Unit.RECORD) -> Method:
    """A method that releases one tally and trains nothing.

    Args:
      name: as certificates state it.
      of: what is counted.
      unit: whose presence is hidden; nothing is proved for clients.
    """
    proves, stages = frozenset((unit, trust) for trust in Trust if unit in UNITS), (stage(of),)
    return Method(name, unit, stages, proves, CAVEAT, registered=(stages, proves))


def after_tally(method: Method, of: Tally, share: float) -> Method:
    """The method, with a tally as its first stage that spends a share of mu squared.

    The tally is a release of its own, on which the rest of the run depends through what it released alone: adaptive
    composition. What the method proves for records and persons stays proved; nothing is proved for clients.

    Args:
      method: what trains.
      of: what is counted.
      share: of mu squared; the method's queries divide the rest as they would have divided all of it.
    """

    def fresh(stage: Stage) -> Stage:
        """The stage begins as if nothing came before it."""

        def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
            state: Tree = stage.rule.init(theta, facts, ())
            return state

        return stage._replace(rule=stage.rule._replace(init=init))

    first, *rest = (stage.with_part(1 - share) for stage in method.stages)
    proves = frozenset(pair for pair in method.proves if pair[0] in UNITS)
    caveat = f"{method.caveat} {CAVEAT}".strip()
    stages = (stage(of, share), fresh(first), *rest)
    registered = None if method.by_hand else (stages, proves)
    return method._replace(stages=stages, proves=proves, caveat=caveat, registered=registered)
