"""Texts and JSON of somebody else: how they are shown, and how they are read.

A name in a received certificate can hold control characters, which erase lines of a terminal or write new ones. A JSON
object can hold a key twice, so that a reader sees one value and a program another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.errors import SordinoError

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what a formula of a program of tables begins with
COMPUTED = re.compile(r"""[\d(|!=@\[\]'"\x00-\x1f]""")  # what a formula has beyond a sign and words


def printable(text: str, most: int | None = None) -> str:
    """A text of somebody else on one line: control characters, which would steer a terminal, are spelt out.

    Args:
      text: the text.
      most: characters that are kept; None keeps all.

    Returns:
      The text, safe to print.

    >>> printable("\x1b[2Jgone ε", 20)
    '\\\\x1b[2Jgone ε'
    >>> printable("long" * 9, 8)
    'longlon…'
    """
    text = text if most is None or len(text) <= most else f"{text[: most - 1]}…"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_parts(document: Any) -> Any:
    """A JSON document whose texts, keys included, are all `printable`.

    Args:
      document: what JSON knows.

    Returns:
      A copy with other texts.

    >>> printable_parts({"signer": ["site\\n", 1]})
    {'signer': ['site\\\\n', 1]}
    """
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, Mapping):
        return {printable_parts(key): printable_parts(part) for key, part in document.items()}
    if isinstance(document, Sequence):
        return [printable_parts(part) for part in document]
    return document


def cell(text: str) -> str:
    """A text of somebody else as a cell of a CSV file: a program of tables must not compute it.

    Programs take a cell for a formula that begins with =, +, -, @, a tab or a line break, and it may start programs or
    send what is in other cells. An apostrophe before it makes it a text.

    Texts that begin with =, @, a tab or a line break always get one. Those that begin with + or - only if what follows
    can be computed: it holds a digit, as references to cells do, or one of `( | ! = @ [ ] ' "` or a control character,
    as calls of functions and of other programs do. Labels such as "+", "-", "-ve" and "+ve" stay as they are, so that
    they match those of the table, and so do numbers.

    >>> cell("=HYPERLINK(A1)"), cell("+A1"), cell("-1"), cell("-ve"), cell("age")
    ("'=HYPERLINK(A1)", "'+A1", '-1', '-ve', 'age')
    """
    signed = text.startswith(("+", "-"))
    if not text.startswith(FORMULA) or (signed and not COMPUTED.search(text)):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def comment(text: str) -> str:
    """A text of somebody else within a comment of a CSV file: on its line, and no part between separators a formula.

    >>> comment("yes,=HYPERLINK(A1)")
    "yes,'=HYPERLINK(A1)"
    """
    return re.sub(r"([,;]\s*)(?=[=+@-])", r"\1'", printable(text))


def read_json(text: str | bytes) -> Any:
    """The document of a JSON text in which no object has a key twice.

    Args:
      text: the JSON.

    Returns:
      The document.

    Raises:
      SordinoError: an object has a key twice.
      ValueError: it is not JSON. A `SordinoError` is a ValueError too.

    >>> read_json('{"epsilon": 0.01, "epsilon": 4}')
    Traceback (most recent call last):
    sordino.errors.SordinoError: JSON: the key 'epsilon' is there twice, so that readers may see different values; ...
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise SordinoError(
            f"JSON: the key '{printable(twice, 60)}' is there twice, so that readers may see different values; get the "
            "file again from its owner."
        )
    return found
