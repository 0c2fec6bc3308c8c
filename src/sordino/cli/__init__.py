"""The command line. Results go to stdout, progress to stderr; a user's mistake gets one line, not a traceback.

One module per command, which has the command's name: `add` declares its arguments, `act` does it and returns the exit
status. What is heavy is imported where it is used.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module

from sordino.cli.show import Parser, Terminated, say
from sordino.errors import OverspentError, SordinoError, nearest

COMMANDS = (
    "sordino.cli.run",
    "sordino.cli.sweep",
    "sordino.cli.compare",
    "sordino.cli.predict",
    "sordino.cli.export",
    "sordino.cli.privacy",
    "sordino.cli.methods",
    "sordino.cli.check",
    "sordino.cli.audit",
    "sordino.cli.verify",
    "sordino.cli.estimate",
    "sordino.cli.evaluate",
    "sordino.cli.advise",
    "sordino.cli.features",
    "sordino.cli.schema",
    "sordino.cli.federate",
    "sordino.cli.ledger",
    "sordino.cli.budget",
)


def main(argv: Sequence[str] | None = None, commands: Sequence[str] = COMMANDS) -> int:
    """Entry point; returns the exit status. Where the reader of stdout went away (`| head`), it ends quietly.

    Args:
      argv: the words of the command line.
      commands: the modules of the commands. If `argv` begins with the name of one, only that one is imported.
    """
    try:
        try:
            return _main(argv, commands)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with suppress(OSError):  # what is still in the buffer goes nowhere, or Python complains when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1


def _main(argv: Sequence[str] | None, commands: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal without ε shows ? in its place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else argv
    named = tuple(module for module in commands if words and module == f"{__name__}.{words[0]}")
    try:
        arguments, rest = _parser(named or tuple(commands)).parse_known_args(words)
        if rest:
            raise _unknown(arguments.command, rest)
        return int(arguments.act(arguments))
    except (SordinoError, OverspentError) as error:
        say(f"sordino: {error}", aside=True)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"sordino: {error.filename or 'file'}: {error.strerror or error}", aside=True)
        return 2
    except Exception as error:
        from sordino import plugins

        if not (fault := plugins.fault_of(error)):
            raise
        say(f"sordino: {fault}", aside=True)
        return 2
    except KeyboardInterrupt as stop:
        say(f"sordino: stopped. {stop}".strip(), aside=True)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def _unknown(command: argparse.ArgumentParser, rest: Sequence[str]) -> SordinoError:
    """The error for words that the command does not know. A key of a run without a flag is set with --set."""
    flags = [flag for flag in vars(command)["_option_string_actions"] if flag.startswith("--")]
    where, (word, equals, value) = command.prog.removeprefix("sordino "), rest[0].partition("=")
    if word.startswith("--") and "--set" in flags:
        from sordino.methods import REGISTRY
        from sordino.models import registry
        from sordino.training.spec import RUN_KEYS

        key = word.removeprefix("--").replace("-", "_")
        an_option = any(key in entry.options for entry in REGISTRY.values())
        an_option |= any(key in entry.options for entry in registry.REGISTRY.values())
        if key in RUN_KEYS or (an_option and not any(flag.startswith(word) for flag in flags)):
            value = value if equals else rest[1] if len(rest) > 1 else "VALUE"
            return SordinoError(f"{where}: '{word}' is unknown; write --set {key}={value}.")
    if word in ("--client", "--site", "--hospital") and "--partition" in flags:
        name = value or "COLUMN"
        return SordinoError(
            f"{where}: '{word}' is unknown. The column that says which hospital a record is of is named by --partition "
            f'by-column:{name}, or by client = "{name}" in a schema; --clients N splits the records at random.'
        )
    if where in ("run", "sweep", "compare", "schema draft", "schema check") and os.path.isfile(rest[0]):
        return SordinoError(
            f"{where}: '{rest[0]}' is one file too many, because it reads one table. Join the files of several "
            "hospitals into one, with a column that names the hospital (client in the schema), or keep them apart and "
            "train over a network: sordino federate."
        )
    if not word.startswith("-"):
        return SordinoError(f"{where}: '{rest[0]}' is one word too many; see {command.prog} --help.")
    longer = [flag for flag in flags if len(word) > 2 and flag.startswith(word)]
    hint = f" Did you mean '{longer[0]}'?" if longer else nearest(word, flags)
    return SordinoError(f"{where}: '{rest[0]}' is unknown.{hint}")


@cache
def _parser(modules: tuple[str, ...]) -> argparse.ArgumentParser:
    from sordino.version import __version__

    parser = Parser(
        prog="sordino",
        description="Differentially private federated learning, exactly accounted.",
        epilog="examples:\n"
        "  sordino run                                  train on the embedded digits, over ten clients\n"
        "  sordino privacy --epsilon 1 --rounds 70 --clients 20\n"
        "  sordino check --all                          try to break every method's guarantee\n"
        "  sordino audit dp-fedgd                       attack it, for a lower bound on epsilon\n"
        "  sordino federate up --sites 3                a federation on this machine, with secure aggregation\n"
        "  sordino verify runs/mine                     recompute a certificate with a second accountant\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.usual = "run"
    parser.add_argument("--version", action="version", version=f"sordino {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in modules:
        import_module(module).add(commands)
    return parser
