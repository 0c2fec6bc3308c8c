"""Which methods run where: in a simulation, under masks, and in the open, for records, persons and whole clients.

Every cell is tried: the terms of a federation are made, and the plan that follows from them is calibrated. The table in
docs/secure-aggregation.md is made from this module, and a test compares it:

    python -m sordino.federation.served
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sordino.core import Privacy, Trust, Unit
from sordino.errors import SordinoError
from sordino.federation.terms import Terms, federated, public_sizes, written
from sordino.methods import REGISTRY, build, entry
from sordino.privacy import calibration
from sordino.privacy.accounting.correlated import MOST_CORRELATED_ROUNDS
from sordino.privacy.plan import Plan

WAYS = ("simulated", "masked", "open")
SIZES, FEATURES, CLASSES = (80, 90, 100, 110), 4, ("a", "b", "c")
OTHER_OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = MappingProxyType(
    {  # options and rounds under which a method is certified, or releases something else, than by default
        "dp-fedgd": ({"quantile": 0.5},),
        "dp-fedavg": ({"steps": 3}, {"steps": 3, "noise_at": "final"}),
        "dp-ftrl": (
            {"mechanism": "banded"},
            {"mechanism": "inverse-root"},
            {"rounds": 5000},
        ),
        "dp-fednew": ({"duals": False},),
        "dp-fednew-fc": ({"duals": False},),
    }
)
# Why a cell is not yes, by what the refusal says.
REASONS = (
    ("level", r"exists at .* level", "The method is not defined for this unit."),
    (
        "unproved",
        r"is not proved private|bounds nothing",
        "Not certified under this trust model, in a simulation either.",
    ),
    (
        "long",
        r"a site keeps its answers of all rounds of a stream",
        f"Rounding of a stream is accounted for up to {MOST_CORRELATED_ROUNDS:,} rounds; use fewer, or "
        "`untrusted-server`.",
    ),
)


class Row(NamedTuple):
    """One method with its options, and a cell per way and unit: `yes`, or the name of a reason."""

    method: str
    options: Mapping[str, Any]
    cells: Mapping[tuple[str, Unit], str]


def table() -> list[Row]:
    """Every registered method, as it is and with other options, tried in every way for every unit."""
    rows = []
    for method, options in _candidates():
        cells = {(way, unit): _tried(method, options, way, unit) for way in WAYS for unit in Unit}
        rows.append(Row(method, options, cells))
    return rows


def page() -> str:
    """The table in Markdown, with its reasons."""
    head = [f"{way}, {unit}" for way in WAYS for unit in Unit]
    lines = ["| method | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    rows = table()
    for row in rows:
        options = "".join(f", `{key} = {str(value).lower()}`" for key, value in row.options.items())
        lines.append(f"| {row.method}{options} | " + " | ".join(row.cells.values()) + " |")
    used = {cell for row in rows for cell in row.cells.values()}
    return "\n".join([*lines, "", *(f"- *{name}*: {text}" for name, _, text in REASONS if name in used)]) + "\n"


def _candidates() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for method in REGISTRY:
        yield method, {}
        yield from ((method, options) for options in OTHER_OPTIONS.get(method, ()))


def _tried(method: str, options: Mapping[str, Any], way: str, unit: Unit) -> str:
    trust = Trust.UNTRUSTED_SERVER if way == "open" else Trust.SECURE_AGGREGATION
    try:
        plan = _simulated(method, options, unit) if way == "simulated" else _terms(method, options, trust, unit).plan
        calibration.query_noises(plan)
    except SordinoError as error:
        for name, pattern, _ in REASONS:
            if re.search(pattern, str(error)):
                return name
        raise
    return "yes"


def _rounds(method: str) -> int:
    stages = build(method).stages
    return sum(stage.rounds or 2 for stage in stages)


def _simulated(method: str, options: Mapping[str, Any], unit: Unit) -> Plan:
    _check_unit(method, options, unit)
    own = {key: value for key, value in options.items() if key != "rounds"}
    privacy = Privacy(8.0, unit=unit, trust=Trust.SECURE_AGGREGATION)
    return Plan(build(method, unit, **own), options.get("rounds", _rounds(method)), SIZES, privacy)


def _terms(method: str, options: Mapping[str, Any], trust: Trust, unit: Unit) -> Terms:
    _check_unit(method, options, unit)
    persons = unit is Unit.PERSON  # a schema names them; here the terms alone are wanted
    values = {
        "method": method,
        "unit": str(Unit.RECORD if persons else unit),
        "trust": str(trust),
        "epsilon": 8.0,
        "rounds": _rounds(method),
    }
    normalize = entry(method).normalize
    spec = federated({**values, **options, "calibrate": 0.0, "schedule_seed": 1, "normalize": normalize})
    text = written(spec).replace('unit = "record"', f'unit = "{unit}"')
    secure = trust is Trust.SECURE_AGGREGATION
    return Terms(
        run="0" * 32,
        spec=text,
        names=tuple(f"site{k}" for k in range(len(SIZES))),
        sizes=public_sizes(spec, SIZES),
        requested_epsilons={},
        features=FEATURES,
        classes=CLASSES,
        roster="0" * 64 if secure else "",
        schema="0" * 64 if persons else "",
    )


def _check_unit(method: str, options: Mapping[str, Any], unit: Unit) -> None:
    """Refuse a unit that the method does not have, with the words of a build."""
    if unit is Unit.CLIENT and options.get("quantile"):
        raise SordinoError(f"unit: {method} with a quantile exists at record and person level, not 'client'.")
    build(method, unit)


if __name__ == "__main__":
    print(page(), end="")
