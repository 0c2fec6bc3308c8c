"""`python -m papers`: run the tables of the papers, and compare them with the published figures."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino import cli
from sordino.cli.compare import budgets
from sordino.cli.show import add_json, bar, check_json, command, console, emit, table
from sordino.cli.sweep import check_device
from sordino.errors import SordinoError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    return cli.main(["papers", *arguments], commands=(__name__,))


def add(commands: Any) -> None:
    parser = command(
        commands,
        "papers",
        act,
        "run a table of the papers and set it beside the published figures",
        "python -m papers\n"
        "python -m papers sofim-3 --data-dir data\n"
        "python -m papers sofim-12 --data-dir data --epsilons 5 --seeds 1 --out runs/paper\n"
        "python -m papers fednew-8 --data-dir data --device cuda\n"
        "python -m papers all --smoke",
    )
    parser.prog = "python -m papers"
    parser.add_argument("table", nargs="?", metavar="TABLE", help="such as sofim-3; without it, all are listed")
    parser.add_argument(
        "--smoke", action="store_true", help="two rounds on made-up files, to see that it runs; all means every table"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="where features and sets lie (or $SORDINO_DATA, or the cache)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="partitions and noises (default: the table's)")
    parser.add_argument("--epsilons", metavar="A,B,…", help="budgets; inf is without noise (default: the table's)")
    parser.add_argument("--clients", metavar="A,B,…", help="of tables that vary them (default: all of the table's)")
    parser.add_argument(
        "--methods", metavar="A,B,…", help="of the tables of DP-FedNew, in all variants (default: all of the table's)"
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="of an earlier search (default: the committed ones, or a search where the table's data are others)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="results/paper",
        help="where TABLE.md, TABLE.json and TABLE.svg go, and settings/ of searches (default: results/paper)",
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    check_device(arguments.device)
    from papers import catalog, tables

    known = catalog.tables()
    if arguments.smoke:
        return _smoke(arguments, known)
    if arguments.table is None:
        return _list(arguments, list(known.values()))
    if arguments.table not in known:
        raise SordinoError(f"table: '{arguments.table}' is unknown.{nearest(arguments.table, known)}")
    if arguments.seeds is not None and arguments.seeds < 1:
        raise SordinoError(f"--seeds: {arguments.seeds} must be at least 1.")
    epsilons = tuple(budgets(arguments.epsilons)) if arguments.epsilons else None
    clients = _clients(arguments.clients) if arguments.clients else None
    chosen = known[arguments.table]
    if arguments.methods and not chosen.name.startswith("fednew-"):
        raise SordinoError(f"--methods: {chosen.name} takes none; only the tables of DP-FedNew do.")
    if chosen.where(arguments.data_dir) is None:
        missing = f"missing data: {chosen.name} needs {chosen.needs}, {chosen.source}. Name its folder by --data-dir."
        if not emit(arguments, {"table": chosen.name, "missing": missing}):
            console().print(missing, markup=False)
        return 0
    with bar("runs") as tick:
        request = tables.TableRequest(
            chosen,
            arguments.data_dir,
            arguments.seeds,
            epsilons,
            clients,
            arguments.device,
            arguments.settings,
            tick,
            methods=tuple(arguments.methods.split(",")) if arguments.methods else None,
            keep=Path(arguments.out) / "settings",
        )
        document = tables.document(request, _command(arguments))
    written = tables.write(document, Path(arguments.out))
    if not emit(arguments, document):
        table(*tables.pivot(document["lines"], document["across"]))
        page = console()
        page.print("ours ± standard deviation (published, difference)", markup=False)
        for note in document["notes"]:
            page.print(f"- {note}", markup=False)
        page.print(f"written to {arguments.out}: {', '.join(path.name for path in written)}", markup=False)
    return 0


def _smoke(arguments: argparse.Namespace, known: dict[str, Any]) -> int:
    """Every table, or one, for two rounds on stand-in files."""
    from papers import smoke

    if arguments.table not in (*known, "all"):
        raise SordinoError(f"table: '{arguments.table}' is unknown.{nearest(str(arguments.table), [*known, 'all'])}")
    names = list(known) if arguments.table == "all" else [arguments.table]
    with bar("tables", len(names)) as tick:
        rows = smoke.run([known[name] for name in names], tick)
    if not emit(arguments, rows):
        table(
            ["table", "lines", "runs", "seconds", "outcome"],
            [
                [row["table"], str(row["lines"]), str(row["runs"]), f"{row['seconds']:.1f}", row["outcome"]]
                for row in rows
            ],
        )
    return 0 if all(row["outcome"] == "ran" for row in rows) else 1


def _clients(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise SordinoError(f"--clients: '{text}' must be integers above 0, as in 100,500.")
    return counts


def _command(arguments: argparse.Namespace) -> str:
    """The command, without the path of the data on this machine."""
    command = ["python", "-m", "papers", arguments.table]
    command += ["--data-dir", "DIR"] if arguments.data_dir else []
    for flag in ("seeds", "epsilons", "clients", "methods", "settings"):
        if (value := getattr(arguments, flag)) is not None:
            command += [f"--{flag}", shlex.quote(str(value))]
    return " ".join(command + (["--device", arguments.device] if arguments.device != "cpu" else []))


def _list(arguments: argparse.Namespace, known: list[Any]) -> int:
    rows = [
        {
            "table": each.name,
            "about": each.about,
            "needs": each.needs,
            "at_hand": each.where(arguments.data_dir) is not None,
        }
        for each in known
    ]
    if not emit(arguments, rows):
        words = {True: "yes", False: "no"}
        table(
            ["table", "what", "needs", "at hand"],
            [[row["table"], row["about"], row["needs"] or "nothing", words[row["at_hand"]]] for row in rows],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
