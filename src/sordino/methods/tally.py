"""One noised tally: the release of evaluations and of private statistics.

Guarantee: each client sends the noised sum of one bounded vector per record (`models.tally`), once. A record moves the
sum by at most `Tally.bound`, which is proved there. There is one release, which depends on the data of a client through
this sum alone, and the server adds the releases up: proved at record level under every trust model.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Facts, Kind, Lemma, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.lazy import Tensor, torch
from sordino.models.tally import Tally

STATISTICS = "statistics"
LEMMA = "one cell per block, and numbers from 0 to 1"
CAVEAT = "A tally bounds what one record adds; a person or client with several records adds more."


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


def tally_method(name: str, of: Tally) -> Method:
    """A method that releases one tally and trains nothing.

    Args:
      name: as certificates state it.
      of: what is counted.
    """
    proves, stages = frozenset((Unit.RECORD, trust) for trust in Trust), (stage(of),)
    return Method(name, Unit.RECORD, stages, proves, CAVEAT, registered=(stages, proves))
