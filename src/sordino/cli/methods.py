"""`sordino methods`: the registry."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit
from sordino.core import Trust


def add(commands: Any) -> None:
    add_json(command(commands, "methods", act, "what there is, and what is certified", "sordino methods --json"))


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.methods import REGISTRY, build

    rows: list[dict[str, Any]] = []
    for name, entry in REGISTRY.items():
        built = {str(unit): build(name, unit) for unit in entry.units}
        rows.append(
            {
                "name": name,
                "family": entry.family,
                "paper": entry.paper,
                "summary": entry.summary,
                "units": list(built),
                "certified": {unit: sorted(str(trust) for _, trust in m.proves) for unit, m in built.items()},
                "releases_per_round": {  # of each stage in turn
                    unit: [sum(q.calls for q in stage.queries if q.noise is not None) for stage in m.stages]
                    for unit, m in built.items()
                },
                "options": entry.options,
            }
        )
    if not emit(arguments, rows):
        every = {str(trust) for trust in Trust}
        for row in rows:
            console().print(f"[bold]{row['name']}[/]  {row['summary']}\n    {row['family']}; {row['paper']}")
            for unit, trusts in row["certified"].items():
                certified = "every trust model" if set(trusts) == every else ", ".join(trusts) or "no trust model"
                count = ", then ".join(map(str, row["releases_per_round"][unit]))
                console().print(f"    {unit} level: certified under {certified}; releases a round: {count}")
        console().print("With default options; all of them: sordino methods --json, docs/methods.md")
    return 0
