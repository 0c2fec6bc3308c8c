"""The stage of `auto` for a network: normalised gradients, and steps that follow from public numbers.

A record's gradient g becomes g clip / (|g| + 0.01) (AUTO-S), so no clip has to be tuned: the server measures the
aggregate in units of the clip (`rules.public_step`). A round may take several minibatches, all at the broadcast model.
Because a minibatch hides who is in it, the noise per gradient grows by less than the root of their number, so the mean
of them has less noise than one alone.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Clipping, Kind, Local, Query, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.fedgd import gradient
from sordino.rules import public_step

NORMALISED = Clipping.parse("automatic")
USUAL_MINIBATCHES = 5  # per round, where a run has minibatches and an untrusted server


def network_stage(unit: Unit, clip: float, minibatches: int) -> Stage:
    """The mean of some gradients per round, each record's brought to norm `clip`.

    Args:
        unit: Whose data are protected; records, or persons by `MethodEntry.at`.
        clip: Norm of a record's gradient. It changes nothing but the unit of what is sent.
        minibatches: Gradients per round and client, each of one minibatch.

    Returns:
        The only stage.

    Raises:
        SordinoError: The unit is a client, or there are no minibatches.
    """
    if unit is Unit.CLIENT:
        raise SordinoError(
            "network: auto normalises gradients of records, which says nothing of a client's whole message; use "
            "unit = record, or a method such as dp-fedadam."
        )
    if minibatches < 1:
        raise SordinoError(f"minibatches: {minibatches} must be at least 1.")

    def mean_gradient(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        total = ask.gradient(broadcast.theta)
        for _ in range(minibatches - 1):
            total = total + ask.gradient(broadcast.theta)
        return total / minibatches

    local = Local(gradient if minibatches == 1 else mean_gradient)
    query = Query(Kind.GRADIENT, clip, calls=minibatches, clipping=NORMALISED)
    return Stage(local, public_step(clip, minibatches), (query,))
