"""What the commands share: declaring one, and showing what it found. Results go to stdout, in words or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError


def command(commands: Any, name: str, act: Any, summary: str, examples: str) -> argparse.ArgumentParser:
    indented = "\n".join(f"  {line}" for line in examples.splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{indented}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=act, command=parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON document on stdout (or -), or into FILE (.json)"
    )


def check_json(arguments: argparse.Namespace) -> None:
    """Before any work: `--json spec.toml` would overwrite the spec."""
    if arguments.json in (None, "-"):
        return
    if not arguments.json.endswith(".json"):
        raise SordinoError(f"--json: '{arguments.json}' should end in .json (or be -, for stdout).")
    path = Path(arguments.json)
    if not path.absolute().parent.is_dir():
        raise SordinoError(f"--json: there is no directory for '{path}'; make it first.")
    if path.is_dir():
        raise SordinoError(f"--json: '{path}' is a directory; name a file that ends in .json.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise SordinoError(f"--json: this user cannot write '{path}'; name a file in another folder.")


def check_out(out: Path, *results: str) -> None:
    """Before any work: a folder that cannot be made, or that already holds one of these results, is refused.

    Args:
      out: the folder that --out names, or its default.
      results: files that the command would overwrite.

    Raises:
      SordinoError: what is wrong with the folder, and what to name instead.
    """
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    shown = out if there == out.absolute() else there
    if not there.is_dir():
        raise SordinoError(f"--out: '{shown}' is a file, not a folder; name a folder that does not exist yet.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SordinoError(
            f"--out: '{out}' cannot be written, because this user cannot write into '{there}'; name another folder "
            "with --out DIR."
        )
    for name in results:
        if (out / name).exists():
            raise SordinoError(f"--out: '{out}' already holds {name}; name another folder, or move that one away.")


def emit(arguments: argparse.Namespace, document: Any) -> bool:
    """Write the JSON document where it was asked for. True if stdout holds it: then nothing else may go there."""
    target = arguments.json
    if target is None:
        return False
    text = json.dumps(plain(document), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return True
    Path(target).write_text(text, encoding="utf-8")
    return False


def plain(value: Any) -> Any:
    """Only what JSON knows: infinity becomes null, numbers of numpy become Python's."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "item") and not isinstance(value, str):  # a number of numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Bar:
    """A progress bar on stderr. Call it with the number of things done since the last call."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int = 1) -> None:
        self._progress.advance(self._task, done)

    def update(self, **fields: Any) -> None:
        """Set `description`, `total`, `completed`, or `shown`: a text after the bar."""
        self._progress.update(self._task, **fields)

    def print(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, markup=False)


@contextmanager
def bar(what: str, total: int | None = None, *, timed: bool = True) -> Iterator[Bar]:
    """A progress bar on stderr.

    Args:
      what: the text before it.
      total: things to do; None where that is not known yet.
      timed: show the time that has passed. It depends on the records, so private data have no time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        *([TimeElapsedColumn()] if timed else []),
    ]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task(what, total=total, shown=""))


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, aligned in two columns."""
    page, width = console(), max(len(name) for name, _ in rows)
    for name, value in rows:
        page.print(f"{name:<{width}}  {value}", markup=False)


def console() -> Any:
    from rich.console import Console

    class Page(Console):
        def on_broken_pipe(self) -> None:
            """`main` ends the command quietly; rich would exit with status 1, which means a failed check here."""
            raise BrokenPipeError

    return Page(highlight=False, soft_wrap=True, emoji=False)  # a pipe gets whole lines, whatever its width


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Whole words, whatever the width."""
    from rich.table import Column, Table

    page = console()
    lines = Table(
        *(Column(name, no_wrap=True) for name in columns), box=None, padding=(0, 2, 0, 0), header_style="bold"
    )
    for row in rows:
        lines.add_row(*row)
    page.width = max(page.width, page.measure(lines, options=page.options.update(width=1000)).maximum)
    page.print(lines)
