"""Steps of `sordino federate` for operators: watch a run, approve studies, back a site up."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, emit, facts, table
from sordino.errors import SordinoError
from sordino.federation import sentences


def add_approve(parts: Any) -> None:
    parser = command(
        parts,
        "approve",
        _approve,
        "list the studies that a site with `ask = true` was asked about; approve or decline one",
        "sordino federate approve site-north/site.toml\n"
        "sordino federate approve site-north/site.toml --yes 3f9c21ab77d0\n"
        "sordino federate approve site-north/site.toml --no 3f9c21ab77d0",
    )
    parser.add_argument("site", metavar="SITE.toml", help="the site's settings, or the site's folder")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--yes", metavar="STUDY", help="approve one run of this study")
    answers.add_argument("--no", metavar="STUDY", help="decline this study")
    add_json(parser)


def _approve(arguments: argparse.Namespace) -> int:
    from sordino.federation import approvals
    from sordino.federation.config import SiteConfig

    check_json(arguments)
    config = SiteConfig.read(site_file(arguments.site))
    if begins := arguments.yes or arguments.no:
        found = [approvals.answer(config.folder, begins, approved=arguments.yes is not None)]
    else:
        found = approvals.studies(config.folder)
    if emit(arguments, [study._asdict() for study in found]):
        return 0
    if not config.ask:
        print("note: site.toml has no `ask = true`, so this site asks nobody", file=sys.stderr)
    rows = [
        [
            study.digest[:12],
            study.state,
            f"{study.facts['method']}, {sentences.count(study.facts['rounds'], 'round')}",
            f"ε = {study.facts['epsilon']:g}, one {study.facts['unit']}",
            f"{sentences.count(len(study.facts['sites']), 'site')}, {study.facts['trust']}",
        ]
        for study in found
    ]
    if rows:
        table(["study", "state", "what", "privacy", "with whom"], rows)
    else:
        print("no study was proposed yet")
    return 0


def site_file(text: str) -> Path:
    """The site.toml that a user named, by itself or by its folder."""
    path = Path(text)
    return path / "site.toml" if path.is_dir() else path


def add_backup(parts: Any) -> None:
    parser = command(
        parts,
        "backup",
        _backup,
        "write a backup of a site, also while it works: settings, keys, ledger, certificates; no records",
        "sordino federate backup site-north --out north-2027-01-31.tar",
    )
    parser.add_argument("folder", metavar="DIR", help="the site's folder")
    parser.add_argument(
        "--out", required=True, metavar="FILE.tar", help="the file to write; keep it as secret as the keys"
    )


def _backup(arguments: argparse.Namespace) -> int:
    from sordino.federation.backups import backup

    names = backup(Path(arguments.folder), Path(arguments.out))
    print(f"{sentences.count(len(names), 'file')} in {arguments.out}; the records and the witness are not among them")
    return 0


def add_restore(parts: Any) -> None:
    parser = command(
        parts,
        "restore",
        _restore,
        "unpack a backup of a site into a new folder, and say whether the site works with it",
        "sordino federate restore north-2027-01-31.tar site-north",
    )
    parser.add_argument("archive", metavar="FILE.tar", help="made by 'sordino federate backup'")
    parser.add_argument("folder", metavar="DIR", help="the folder to make")


def _restore(arguments: argparse.Namespace) -> int:
    from sordino.federation.backups import restore

    problem = restore(Path(arguments.archive), Path(arguments.folder))
    if problem:
        print(f"the site refuses to work with this backup: {problem}")
        return 1
    print(
        f"{arguments.folder} is restored; put the records in their place. The site takes part in new runs, and in none "
        "that was open"
    )
    return 0


# -------------------------------------------------------------------------------------------------------------- status


def add_status(parts: Any) -> None:
    parser = command(
        parts,
        "status",
        _status,
        "show where a run stands, or what a site spent; on request as a web page with Prometheus metrics",
        "sordino federate status study\n"
        "sordino federate status site-north --json -\n"
        "sordino federate status study --serve 8080",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of a coordinator or of a site")
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="serve a page and /metrics on loopback until stopped (0: a free port)"
    )
    add_json(parser)


def add_status_port(parser: Any) -> None:
    parser.add_argument(
        "--status-port", type=int, metavar="N", help="also serve a read-only status page and /metrics, on loopback"
    )


def serve_status(folder: Path, port: int | None) -> None:
    """Serve the status of a folder in the background."""
    if port is not None:
        from sordino.federation.status_page import StatusServer

        print(f"status: {StatusServer(folder, _checked_port(port)).url}", file=sys.stderr, flush=True)


def _checked_port(port: int) -> int:
    if not 0 <= port <= 65_535:
        raise SordinoError(f"--status-port, --serve: {port} must lie between 0 and 65535.")
    return port


def _status(arguments: argparse.Namespace) -> int:
    from sordino.federation import status

    check_json(arguments)
    found = status.of_folder(Path(arguments.folder))
    if arguments.serve is not None:
        serve_status(Path(arguments.folder), arguments.serve)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        return 0
    if emit(arguments, status.document(found)):
        return 0
    if isinstance(found, status.BudgetStatus):
        facts(
            [
                ("site", found.name),
                *(
                    [("REFUSES", found.problem)]
                    if found.problem
                    else [
                        ("spent", f"ε = {found.epsilon:.4g} of {found.limit:g} at δ = {found.delta:g}"),
                        ("left", f"ε = {found.left:.4g} for one run"),
                    ]
                ),
                ("answered", sentences.count(found.answered, "round")),
                ("runs", f"{found.runs} ended; {found.refusals} refusals, {found.failures} failures"),
            ]
        )
        return 0
    planned = "" if found.planned_epsilon is None else f" of {found.planned_epsilon:g}"
    lost = f", {found.lost} without a result" if found.lost else ""
    facts(
        [
            ("state", found.state + (f": {found.why}" if found.why else "")),
            ("round", f"{found.done} of {found.rounds}{lost}"),
            ("spent", f"ε = {found.epsilon:.4g}{planned}"),
            ("changed", found.changed or "-"),
            *([(found.metric, f"{found.curve[-1][1]:.4g} on the coordinator's test records")] if found.curve else []),
        ]
    )
    table(
        ["site", "state", "answered", "missed", "why"],
        [[s.name, s.state, str(s.rounds), str(s.lost), s.why.replace("[", "\\[")] for s in found.sites],
    )
    return 0
