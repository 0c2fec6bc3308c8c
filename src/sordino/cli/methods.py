"""`sordino methods`: the registry."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit, say
from sordino.core import Trust
from sordino.errors import SordinoError, check_known


def add(commands: Any) -> None:
    parser = command(
        commands,
        "methods",
        act,
        "list the methods, and what is certified of each",
        "sordino methods --json\nsordino methods dp-fednew    with its options",
    )
    parser.add_argument("name", nargs="*", metavar="METHOD", help="only these (default: all)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino import plugins
    from sordino.methods import REGISTRY, build
    from sordino.methods import entry as entry_of

    rows: list[dict[str, Any]] = []
    outside = {name: plugin for name, plugin in plugins.found(plugins.METHODS).items() if name not in REGISTRY}
    for name in arguments.name:
        check_known("method", name, (*REGISTRY, *outside))
    for name in arguments.name or (*REGISTRY, *outside):
        try:
            entry = entry_of(name)
            built = {str(unit): build(name, unit) for unit in entry.protects}
        except SordinoError as error:
            if name in REGISTRY:
                raise
            say(f"sordino: {error}", aside=True)  # a broken package must not hide other methods
            continue
        rows.append(
            {
                "name": name,
                "kind": "method",
                "family": entry.family,
                "paper": entry.paper,
                "summary": entry.summary,
                "units": list(built),
                "certified": {unit: sorted(str(trust) for _, trust in m.proves) for unit, m in built.items()},
                "releases_per_round": {  # one number per stage
                    unit: [sum(q.calls for q in stage.queries if q.noise is not None) for stage in m.stages]
                    for unit, m in built.items()
                },
                "options": entry.options,
                "package": outside[name].about if name in outside else None,  # None: this one
                "checked": plugins.passed(outside[name]) if name in outside else True,
            }
        )
    others = {} if arguments.name else plugins.found(plugins.MODELS)
    models = [_model_row(name, plugin) for name, plugin in others.items()]
    if not emit(arguments, [*rows, *models]):
        every = {str(trust) for trust in Trust}
        for row in rows:
            console().print(f"[bold]{row['name']}[/]  {row['summary']}")
            console().print(f"    {row['family']}; {row['paper']}")
            if row["package"]:
                state = "passed `sordino check` here" if row["checked"] else f"run `sordino check {row['name']}` first"
                console().print(f"    from {row['package']}; {state}")
            for unit, trusts in row["certified"].items():
                certified = "every trust model" if set(trusts) == every else ", ".join(trusts) or "no trust model"
                count = ", then ".join(map(str, row["releases_per_round"][unit]))
                console().print(f"    {unit} level: certified under {certified}; releases per round: {count}")
            if arguments.name:
                options = ", ".join(f"{key} = {value}" for key, value in row["options"].items())
                console().print(f"    options: {options}", markup=False)
        for row in models:
            state = "passed `sordino check` here" if row["checked"] else f"run `sordino check {row['name']}` first"
            console().print(f"[bold]{row['name']}[/]  {row['summary']}")
            console().print(f"    a model, from {row['package']}; {state}")
        if arguments.name:
            console().print("What they mean, and what is proved: docs/methods.md")
            return 0
        console().print("Start with auto: it takes every step from public facts, and nothing needs tuning.")
        console().print("With default options; all of them: sordino methods --json, docs/methods.md")
    return 0


def _model_row(name: str, plugin: Any) -> dict[str, Any]:
    """One model of another package, for `--json`."""
    from sordino import plugins
    from sordino.models import registry

    try:
        known = registry.entry(name)
        summary, options = known.summary, {key: option.default for key, option in known.options.items()}
    except SordinoError as error:
        say(f"sordino: {error}", aside=True)
        summary, options = "cannot be imported", {}
    checked = plugins.passed(plugin)
    return {
        "name": name,
        "kind": "model",
        "summary": summary,
        "options": options,
        "package": plugin.about,
        "checked": checked,
    }
