"""What the commands share: declaring one, and showing what it found. Results go to stdout, in words or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sordino.errors import SordinoError, nearest
from sordino.foreign import printable

AGAIN = 0.05  # seconds until a signal that came inside a finalizer is sent again


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


@contextmanager
def terminable() -> Iterator[None]:
    """Meanwhile SIGTERM raises `Terminated`, so that a run that is stopped says how to continue it.

    Python ignores what is raised inside a finalizer. A signal that comes there, Ctrl-C too, is sent again a moment
    later.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()
                return
            frame = frame.f_back
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    heard = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job may ignore Ctrl-C
        heard.append(signal.SIGINT)
    try:
        before = [(number, signal.signal(number, stop)) for number in heard]
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
    """Flags are written in full, and a mistake is one line that names the flag and the remedy."""

    usual = ""  # the step, or the command, that is shown to who wrote a file in its place

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **keywords})

    def _steps(self) -> dict[str, Collection[str]]:
        """The steps of each command that has some."""
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {
            name: step.choices
            for action in commands
            for name, parser in action.choices.items()
            for step in parser._actions
            if isinstance(step, argparse._SubParsersAction)
        }

    def error(self, message: str) -> NoReturn:
        where = self.prog.removeprefix("sordino").strip()
        begin, see = f"{where}: " if where else "", f"see {self.prog} --help"
        example = re.search(r"examples:\n\s*(.+?)(?=  |\n)", self.epilog or "")  # the first, without what is said of it
        see = f"for example: {example[1]}; {see}" if example and where else see
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            if steps_of := [name for name, parts in self._steps().items() if wrong[1] in parts]:
                known = " or ".join(f"{self.prog} {name} {wrong[1]}" for name in steps_of)
                raise SordinoError(f"{begin}'{wrong[1]}' is unknown; write {known}.")
            if self.usual and (Path(wrong[1]).suffix or Path(wrong[1]).exists()):
                what = "step" if where else "command"
                raise SordinoError(f"{begin}'{wrong[1]}' is no {what}; write {self.prog} {self.usual} {wrong[1]}.")
            raise SordinoError(
                f"{begin}'{wrong[1]}' is unknown.{nearest(wrong[1], re.findall('[a-z][a-z-]*', wrong[2]))}"
            )
        if wrong := re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message):
            kind = "a whole number" if wrong[2] == "int" else "a number"
            raise SordinoError(f"{wrong[1]}: '{wrong[3]}' must be {kind}.")
        if wrong := re.fullmatch(r"argument (\S+): ('.*' must be .*)", message):
            raise SordinoError(f"{wrong[1]}: {wrong[2]}")
        if wrong := re.fullmatch(r"argument (\S+): expected (one|at least one) argument", message):
            raise SordinoError(f"{wrong[1]}: a value is missing; {see}.")
        if wrong := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
            raise SordinoError(f"{wrong[1]}: {wrong[2]} is given too; leave one out.")
        if wrong := re.fullmatch(r"one of the arguments (.+) is required", message):
            raise SordinoError(f"{begin}give one of {', '.join(wrong[1].split())}; {see}.")
        if wrong := re.fullmatch(r"the following arguments are required: (.+)", message):
            verb = "are" if "," in wrong[1] else "is"
            raise SordinoError(f"{begin}{wrong[1]} {verb} missing; {see}.")
        raise SordinoError(f"{begin}{message}; {see}.")


def command(commands: Any, name: str, act: Any, summary: str, examples: str) -> Parser:
    indented = "\n".join(f"  {line}" for line in examples.splitlines())
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{indented}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=act, command=parser)
    return parser


def steps(commands: Any, name: str, summary: str, examples: str, usual: str) -> Any:
    """A command that has steps, to which `command` adds each of them. Without a step it says which there are.

    Args:
      commands: what holds the command.
      name: of the command.
      summary: one line of help.
      examples: one per line.
      usual: the step that is shown to who wrote a file in its place.
    """

    def act(arguments: argparse.Namespace) -> int:
        *others, last = parts.choices
        raise SordinoError(f"{name}: name a step: {', '.join(others)} or {last}.")

    parser = command(commands, name, act, summary, examples)
    parser.usual = usual
    parts = parser.add_subparsers(title="steps", metavar="STEP")
    return parts


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON document on stdout (or -), or into FILE (.json)"
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", metavar="FOLDER", help="of a transformer: what it was trained from (default: as private/ says)"
    )


def seed_count(text: str) -> int:
    """The value of --seeds: how many seeds there are. A list of seeds is refused with the number to write instead."""
    if re.fullmatch(r"\d+(,\d+)+", text):
        count = text.count(",") + 1
        raise argparse.ArgumentTypeError(
            f"'{text}' must be the number of seeds; for {count} of them write --seeds {count}."
        )
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number.") from None


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


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


def numbers(flag: str, text: str, example: str) -> list[float]:
    """The numbers of an option, which stand between commas.

    Args:
      flag: the option.
      text: what the user wrote.
      example: what an error shows.

    Raises:
      SordinoError: a part is not a number.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SordinoError(f"{flag}: '{text}' should be a number, or several as in {example}.") from None


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


def waiting(what: str) -> AbstractContextManager[Any]:
    """Meanwhile a terminal shows what is being done; stderr that is not a terminal gets nothing."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


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
        self._progress.console.print(printable(text), markup=False)


@contextmanager
def bar(what: str, total: int | None = None, *, timed: bool = True, left: bool = False) -> Iterator[Bar]:
    """A progress bar on stderr.

    Args:
      what: the text before it.
      total: things to do; None where that is not known yet.
      timed: show the time that has passed. It depends on the records, so private data have no time.
      left: show an estimate of the time that is left, too.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        *([TimeElapsedColumn()] if timed else []),
        *([TextColumn("left"), TimeRemainingColumn()] if left else []),
    ]
    # A batch of repetitions may take minutes, so what is left is estimated from half an hour.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=1800 if left else 30) as progress:
        task = progress.add_task(what, total=total, shown="")
        try:
            yield Bar(progress, task)
        except SordinoError:
            if not progress.tasks[0].completed:  # refused before anything was done: an empty bar says nothing
                progress.update(task, visible=False)
            raise


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, aligned in two columns."""
    page, width = console(), max(len(name) for name, _ in rows)
    for name, value in rows:
        page.print(f"{name:<{width}}  {value}", markup=False)


def say(text: str, *, aside: bool = False) -> None:
    """Print one line at once.

    Args:
      text: the line, whoever wrote parts of it.
      aside: to stderr, where no results go.
    """
    print(printable(text), file=sys.stderr if aside else sys.stdout, flush=True)


def console() -> Any:
    """Where results are printed: lines, in which control characters are spelt out, and tables."""
    from rich.console import Console

    class Page(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            """One line per call: a text with a line break, or with what moves the cursor, could forge others."""
            super().print(*(printable(part) if isinstance(part, str) else part for part in objects), **how)

        def on_broken_pipe(self) -> None:
            """`main` ends the command quietly; rich would exit with status 1, which means a failed check here."""
            raise BrokenPipeError

    return Page(highlight=False, soft_wrap=True, emoji=False)  # a pipe gets whole lines, whatever its width


def marked(text: str) -> Any:
    """A cell of a table in colour.

    Args:
      text: with the markup of rich, which other cells do not have.
    """
    from rich.text import Text

    return Text.from_markup(text)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Whole words, whatever the width.

    Args:
      columns: the headings.
      rows: of each row its cells: texts, whoever wrote them, or what `marked` made.
    """
    from rich.table import Column, Table
    from rich.text import Text

    page = console()
    lines = Table(
        *(Column(name, no_wrap=True) for name in columns), box=None, padding=(0, 2, 0, 0), header_style="bold"
    )
    for row in rows:
        lines.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    page.width = max(page.width, page.measure(lines, options=page.options.update(width=1000)).maximum)
    page.print(lines)
