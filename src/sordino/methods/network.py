"""The stage of `auto` for a network: one normalised gradient per round, and steps that follow from public numbers.

A record's gradient g becomes g clip / (|g| + 0.01) (AUTO-S), so no clip has to be tuned: the server measures the
aggregate in units of the clip (`rules.public_step`).
"""

from __future__ import annotations

from sordino.core import Clipping, Kind, Local, Query, Stage, Unit
from sordino.errors import SordinoError
from sordino.methods.fedgd import gradient
from sordino.rules import public_step

NORMALISED = Clipping.parse("automatic")


def network_stage(unit: Unit, clip: float) -> Stage:
    """One gradient per round, each record's brought to norm `clip`.

    Args:
        unit: Whose data are protected; records, or persons by `MethodEntry.at`.
        clip: Norm of a record's gradient. It changes nothing but the unit of what is sent.

    Returns:
        The only stage.

    Raises:
        SordinoError: The unit is a client.
    """
    if unit is Unit.CLIENT:
        raise SordinoError(
            "network: auto normalises gradients of records, which says nothing of a client's whole message; use "
            "unit = record, or a method such as dp-fedadam."
        )
    return Stage(Local(gradient), public_step(clip), (Query(Kind.GRADIENT, clip, clipping=NORMALISED),))
