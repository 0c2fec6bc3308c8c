"""`sordino schema`: draft a public schema of a table, and check what a record becomes."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import files
from sordino.cli.show import add_json, check_json, command, console, emit, say, steps, table
from sordino.errors import SordinoError, count
from sordino.foreign import printable

if TYPE_CHECKING:
    from sordino.data.schema import Schema

MOST_CELLS, MOST_LETTERS = 5, 40  # of cells that are none of a column's levels, and of each


def add(commands: Any) -> None:
    parts = steps(
        commands,
        "schema",
        "describe a table by public rules, without looking at its records",
        "sordino schema draft patients.csv --out schema.toml\nsordino schema check schema.toml patients.csv",
        "draft",
    )
    draft = command(
        parts,
        "draft",
        _draft,
        "write a draft from column names and types only, for people to complete",
        "sordino schema draft patients.csv --out schema.toml\n"
        "sordino schema draft patients.csv --from-public published.csv --out schema.toml",
    )
    draft.add_argument("file", metavar="FILE", help="a .csv, .tsv, .parquet or .xlsx file; text may be compressed")
    draft.add_argument("--from-public", metavar="FILE", help="public records: ranges and levels are taken from them")
    draft.add_argument("--encoding", default="utf-8", metavar="X", help="of a text file, such as latin-1")
    draft.add_argument("--delimiter", metavar="X", help="of a text file (default: found in the heading)")
    draft.add_argument("--decimal", default=".", metavar="X", help="what separates decimals: . or ,")
    draft.add_argument(
        "--any-names", action="store_true", help="columns are really called like numbers or dates, or have no name"
    )
    draft.add_argument("--out", metavar="SCHEMA.toml", help="(default: stdout)")
    check = command(
        parts,
        "check",
        _check,
        "show what each column becomes, and whether a table fits",
        "sordino schema check schema.toml\nsordino schema check schema.toml patients.csv\n"
        "sordino schema check patients.csv --schema schema.toml   the same",
    )
    check.add_argument("schema", nargs="?", metavar="SCHEMA.toml", help="the schema to check")
    check.add_argument("file", nargs="?", metavar="FILE", help="a table that must fit")
    check.add_argument("--schema", dest="named", metavar="SCHEMA.toml", help="the schema, as `sordino run` names it")
    add_json(check)


def _draft(arguments: argparse.Namespace) -> int:
    from sordino.data.draft import draft
    from sordino.data.tables import Dialect, WrongEncodingError

    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and out.exists():
        raise SordinoError(f"--out: '{out}' exists already; name another file, so that no completed schema is lost.")
    if out is not None:
        files.check_writable(out)
    paths = [Path(name) if name else None for name in (arguments.file, arguments.from_public)]
    for path in paths:
        if path is not None and not path.is_file():
            raise files.absent("schema", path)
    dialect = Dialect(arguments.delimiter, arguments.decimal, arguments.encoding)
    try:
        text, looked = draft(Path(arguments.file), paths[1], dialect, any_names=arguments.any_names)
    except WrongEncodingError as error:
        raise SordinoError(
            f"--encoding: {error.path} is not {arguments.encoding} text; name its encoding, such as --encoding latin-1 "
            "(Windows, Western Europe) or --encoding utf-16."
        ) from None
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
    for line in looked:
        say(f"looked at: {line}", aside=True)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.data.schema import Schema

    if arguments.named:
        if arguments.file:
            raise SordinoError(
                f"--schema: '{arguments.named}' is a third file; write sordino schema check SCHEMA.toml FILE, or FILE "
                "--schema SCHEMA.toml."
            )
        arguments.schema, arguments.file = arguments.named, arguments.schema
    if not arguments.schema:
        raise SordinoError("schema check: SCHEMA.toml is missing; see sordino schema check --help.")
    if arguments.file and arguments.file.endswith(".toml") and not arguments.schema.endswith(".toml"):
        arguments.schema, arguments.file = arguments.file, arguments.schema  # the table came first
    schema, constant = Schema.read(arguments.schema), list[str]()
    unlisted: dict[str, dict[str, int]] = {}
    if arguments.file:
        path = Path(arguments.file)
        if not path.is_file():
            raise files.absent("data", path)
        read = schema.at_its_widest if schema.unknown else schema
        try:
            constant, unlisted = read.constant(read.open(path)), read.unlisted(path)
        except SordinoError:
            if arguments.json is None:
                with suppress(SordinoError):  # say which cells before what is wrong with them
                    _list(schema, read.unlisted(path))
            raise
    document = {
        "features": schema.features,
        "columns": [{"column": n, "becomes": says, "features": made} for n, says, made in schema.explain()],
        "target": None if schema.target is None else schema.values()["target"],
        "client": schema.client,
        "person": schema.person,
        "sha256": schema.sha256(),
        "to_find": schema.unknown,
        "fits": bool(arguments.file) or None,
        "constant": constant,
        "unlisted": unlisted,
    }
    if not emit(arguments, document):
        from rich.markup import escape

        table(
            ("column", "features", "becomes"),
            [(name, str(len(made)), says) for name, says, made in schema.explain()],
        )
        page = console()
        page.print()
        if schema.target is not None:
            page.print(f"target     {schema.target.column} ({schema.target.says()})", markup=False)
        size = "" if schema.expansion.rff else ", each between -1 and 1"
        page.print(f"features   {len(schema.features)} numbers per record{size}", markup=False)
        page.print("privacy    applied to each record by itself: it costs nothing", markup=False)
        if schema.unknown:
            page.print(
                f"to find    {', '.join(schema.unknown)}: not known yet. Give range or levels, or spend a part of the "
                "budget: sordino run --private-statistics 0.05",
                markup=False,
            )
        if arguments.file:
            page.print(f"fits       {arguments.file}: every column is there and every cell can be read", markup=False)
        _list(schema, unlisted)
        if constant:
            page.print(
                f"[bold yellow]constant[/]   {escape(', '.join(constant))}: every record becomes the same. Are the "
                "levels or the range right, and in the unit of the table? (This line comes from the records: do not "
                "publish it.)",
            )
    return 0


def _list(schema: Schema, unlisted: dict[str, dict[str, int]]) -> None:
    """Show the owner of the records which cells are none of the levels or words of their columns."""
    from rich.markup import escape

    for name, cells in unlisted.items():
        column: Any = schema.columns.get(name) or schema.target
        some = ", ".join(f"{printable(cell, MOST_LETTERS)} {n:,}" for cell, n in [*cells.items()][:MOST_CELLS])
        more = f" and {len(cells) - MOST_CELLS:,} others" if len(cells) > MOST_CELLS else ""
        total = count(sum(cells.values()), "cell is none of its levels", "cells are none of its levels")
        said = escape(f"{name}: {total} ({some}{more}); each {column.unlisted}.")
        console().print(f"[bold yellow]unlisted[/]   {said} (This line comes from the records: do not publish it.)")
