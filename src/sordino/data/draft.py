"""The draft of a schema: names and types of a table's columns, and nothing that its cells say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data import tables
from sordino.data.columns import MISSING, TYPES
from sordino.data.schema import BLANK
from sordino.data.tables import Dialect
from sordino.errors import SordinoError

MOST_PUBLIC_LEVELS = 200  # of a column, that a draft takes from public records
# Columns that a draft drops: the word id in one of its forms at the end, or something by which people are addressed.
IDENTIFIERS = re.compile(
    r"(?i:(?:^|[\W_])(?:ids?|uuid|guid|mrn|ssn)$)|[a-z]I[Dd]$"
    r"|(?i:^(?:(?:first|last|family|given|full|patient)[\W_]*)?name$|^(?:surname|e-?mail|phone|telephone|address)$)"
)
# Columns whose name is that of a person's id: a person by a word and by what stands for one, or a usual abbreviation.
PERSONS = re.compile(
    r"(?i:^(?:patient|person)$|^(?:patient|person|subject|participant|proband|member)[\W_]*"
    r"(?:id|uid|uuid|nbr|nr|no|num|number|key|code)$|(?:^|[\W_])(?:mrn|ssn)$)"
)


def draft(
    path: Path, public: Path | None = None, dialect: Dialect | None = None, *, any_names: bool = False
) -> tuple[str, list[str]]:
    """A schema to be completed by people.

    Of the file only the column names and their types are used. Ranges and levels would tell something of the records,
    so they are left blank; or they are taken from a second file with *public* records of the same columns. The types
    come from the cells: one cell that is not a number makes its column a category. So the draft is private until people
    have reviewed it.

    Args:
        path: The table to describe.
        public: A table of public records, whose ranges and levels may be used.
        dialect: How the text file is written.
        any_names: Accept names of columns that are empty, numbers or dates.

    Returns:
        The content of a schema.toml, and what was looked at, for people.

    Raises:
        SordinoError: The file cannot be read, it is `public` itself, or names of its columns look like cells of a
            record.
    """
    import pyarrow as pa
    import tomli_w

    dialect = dialect or Dialect()
    table = tables.open_table(path, dialect)
    tables.check_encoding(table, table.column_names, path)
    if not any_names and (unlikely := tables.unlikely_names(path, table.column_names)):
        raise SordinoError(  # no name is quoted: it may be the cell of a person
            f"data: in the first line of '{path}', {unlikely} of {len(table.column_names)} cells are unlikely names "
            "of columns (empty, a number or a date), so the draft might hold a record; put a line with the names "
            "above the records, or give --any-names if the columns are really called so."
        )
    if public is not None and public.samefile(path):
        raise SordinoError(
            f"--from-public: '{public}' is the table itself, whose cells would stand in the schema; name a file of "
            "public records, or leave it out."
        )
    known = None if public is None else tables.open_table(public, dialect)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        kind = table.column(name).type
        if IDENTIFIERS.search(name) or PERSONS.search(name):
            columns[name] = {"type": "drop"}
        elif pa.types.is_boolean(kind):
            columns[name] = {"type": "boolean"}
        elif pa.types.is_temporal(kind):
            columns[name] = {"type": "date", "range": [BLANK, BLANK]}
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            columns[name] = {"type": "number", "range": [BLANK, BLANK], "fill": BLANK}
        else:
            columns[name] = {"type": "category", "levels": [BLANK]}
        if known is not None and name in known.column_names and columns[name]["type"] != "drop":
            columns[name] |= _from_public(columns[name]["type"], known.column(name), name)
    document: dict[str, Any] = {"client": BLANK, "missing": list(MISSING)}
    if dialect != Dialect():
        document["file"] = {key: value for key, value in dialect._asdict().items() if value is not None}
    document["target"] = {"column": BLANK, "task": "classes", "levels": [BLANK, BLANK]}
    document["columns"] = columns
    looked = [
        f"names and types of the {len(columns)} columns of {path.name}; its first line was taken for the names, and no "
        "cell below it is in the draft. Types come from the cells, so the draft is private until people have reviewed "
        "it"
    ]
    if dropped := [name for name in columns if columns[name]["type"] == "drop"]:
        looked.append(
            f'which names are those of ids or persons: {", ".join(dropped)}, so type = "drop"; make one a category '
            "if it is a code with a meaning"
        )
    person = next(filter(PERSONS.search, columns), None)
    if person is not None:
        looked.append(_repeated(person, table.column(person)))
    if dialect.decimal == "." and (commas := [name for name in table.column_names if _commas(table.column(name))]):
        looked.append(
            f"how numbers are spelt: {', '.join(commas)} would be categories, because a comma separates their "
            "decimals; use --decimal ,"
        )
    if public is not None:
        looked.append(f"ranges and levels of {public.name}, which is declared public")
        if cut := [name for name in columns if len(columns[name].get("levels", ())) == MOST_PUBLIC_LEVELS]:
            looked.append(
                f"of {', '.join(cut)} no more than the {MOST_PUBLIC_LEVELS} levels that are most frequent in "
                f"{public.name}: all others are encoded as one; groups of codes may say more"
            )
    notes = (
        "# A draft: replace every FILL IN by what is publicly known, and remove what is not needed.\n"
        "# Remove [columns.NAME] of the target, the client and the person: they are not features.\n"
        "# client: the column that says which site a record is of; remove the line if all records are of one site.\n"
        '# Ids and names get type = "drop".\n'
        '# If several rows belong to one person, write person = "COLUMN" below the client.\n'
        "# target: task is classes (levels), quantity (range), count (maximum) or survival (column is the time, event\n"
        "# the column that says whether it happened, intervals are edges of time from 0).\n"
        f"# Types of a column: {', '.join(TYPES)}; docs/how-to/describe-a-table.md describes them.\n"
        "# Take ranges and levels from a code book or the literature, never from the records.\n"
        "# Types come from the cells: one cell that is not a number makes its column a category. So this draft is\n"
        "# private until every name and type was compared with the code book.\n\n"
    )
    client, rest = tomli_w.dumps(document).split("\n", 1)
    proposal = "" if person is None else f"# {tomli_w.dumps({'person': person})}"
    return f"{notes}{client}\n{proposal}{rest}", looked


def _repeated(name: str, column: Any) -> str:
    """How many records repeat the id of a person, for the screen of the owner of the records."""
    import pyarrow.compute as pc

    ids = pc.drop_null(tables.texts(column, MISSING))
    again = len(ids) - len(pc.unique(ids))
    if not again:
        return f"the ids in {name}, which is called like a person's: none of {len(ids):,} stands twice"
    return (
        f"the ids in {name}, which is called like a person's: {again:,} of {len(ids):,} records repeat one, so that "
        f"the records of a person should be protected together: remove the # before person = {json.dumps(name)} in "
        "the draft. The two figures come from the records and are not in the draft; do not publish them"
    )


def _commas(column: Any) -> bool:
    """Whether all cells of a column of texts are numbers with decimal commas."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return False
    text = pc.drop_null(tables.texts(column, MISSING))
    plain = pc.all(pc.match_substring_regex(text, r"^[-+]?\d+(,\d+)?$")).as_py()
    return bool(plain and pc.any(pc.match_substring(text, ",")).as_py())


def _from_public(kind: str, column: Any, name: str) -> dict[str, Any]:
    """Ranges and levels of public records."""
    import pyarrow.compute as pc

    if kind == "number":
        values = tables.numbers(column, name, MISSING)
        values = values[~np.isnan(values)]
        if not len(values) or values.min() == values.max():
            return {}
        return {"range": [float(values.min()), float(values.max())], "fill": float(np.median(values))}
    if kind == "category":
        levels = Counter(pc.drop_null(tables.texts(column, MISSING)).to_pylist())
        often = sorted(levels, key=lambda level: (-levels[level], level))[:MOST_PUBLIC_LEVELS]
        return {"levels": sorted(often)} if levels else {}
    return {}
