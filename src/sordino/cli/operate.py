"""Steps of `sordino federate` for operators: watch a run, approve studies, back a site up."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, emit, facts, say, table
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
    add_site(parser)
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


def add_studies(parts: Any) -> None:
    parser = command(
        parts,
        "studies",
        _studies,
        "show the studies that are open at a site and those that wait; take a place away",
        "sordino federate studies site-north/site.toml\nsordino federate studies site-north/site.toml --drop 3f9c21ab",
    )
    add_site(parser)
    parser.add_argument(
        "--drop",
        metavar="RUN",
        help="let the next study begin: this one loses its place. What it was promised of the budget is free again",
    )
    add_json(parser)


def _studies(arguments: argparse.Namespace) -> int:
    from sordino import files
    from sordino.federation.config import SiteConfig
    from sordino.federation.study_queue import StudyQueue
    from sordino.federation.terms import Terms

    check_json(arguments)
    config = SiteConfig.read(site_file(arguments.site))
    queue = StudyQueue(config.folder, config.most_studies, config.study_idle)
    with files.lock(config.folder / "lock"):
        running, waiting = queue.open_studies(), [each.run for each in queue.waiting()]
        if arguments.drop is not None:
            fitting = [run for run in (*running, *waiting) if run.startswith(arguments.drop)]
            if len(fitting) != 1 or len(arguments.drop) < 8:
                what = "no study that is open or waits begins so" if not fitting else "give at least 8 digits of one"
                raise SordinoError(
                    f"--drop: '{arguments.drop}': {what}; `sordino federate studies SITE.toml` lists them."
                )
            queue.leave(fitting[0])
    if arguments.drop is not None:
        print(f"run {fitting[0][:8]} loses its place; its rounds are still answered, as far as the budget goes")
        return 0
    found = [{"run": run, "state": "open"} for run in running]
    found += [{"run": run, "state": f"place {k + 1}"} for k, run in enumerate(waiting)]
    for each in found:
        path = config.folder / "runs" / each["run"] / "terms.json"
        each["method"] = Terms.read(path.read_text(encoding="utf-8")).resolved.method_name if path.exists() else ""
    if emit(arguments, found):
        return 0
    if found:
        table(["run", "state", "method"], [[each["run"][:8], each["state"], each["method"] or "-"] for each in found])
    else:
        print("no study is open, and none waits")
    return 0


def add_serve(parts: Any) -> None:
    parser = command(
        parts,
        "serve",
        _serve,
        "answer a site's messages at a socket of this machine, for a Flower app that may not read the data",
        "sordino federate serve site-north/site.toml --socket /run/sordino/north.sock --group flower",
    )
    add_site(parser)
    parser.add_argument("--socket", required=True, metavar="FILE", help="where to listen; the folder must exist")
    parser.add_argument(
        "--group", metavar="NAME", help="group whose members may send messages (default: the group of this user)"
    )


def _serve(arguments: argparse.Namespace) -> int:
    from sordino.federation import door, handler
    from sordino.federation.config import SiteConfig
    from sordino.federation.site import Site

    path = site_file(arguments.site).resolve()
    config = SiteConfig.read(path)
    Site(config)  # refuses a limit above the ledger's, and stores a new one
    print(f"{config.name} answers at {arguments.socket}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        door.serve(Path(arguments.socket), lambda request: handler.answer(path, request), group=arguments.group)
    return 0


def add_app(parts: Any) -> None:
    parser = command(
        parts,
        "app",
        _app,
        "write a study as a standard Flower app, for a SuperLink and SuperNodes that already run",
        "sordino federate app study\nsordino federate app study --out study-app",
    )
    parser.add_argument("folder", metavar="DIR", help="the coordinator's folder, made by 'sordino federate init'")
    parser.add_argument("--out", metavar="DIR", help="folder of the app (default: app in the coordinator's folder)")


def _app(arguments: argparse.Namespace) -> int:
    from sordino.federation.flower.app import write_study

    out = Path(arguments.out or Path(arguments.folder) / "app")
    for path in write_study(Path(arguments.folder), out):
        print(f"written  {path}")
    print(f"next     read {out}/README.md, then: flwr run {out}")
    return 0


def add_rotate(parts: Any) -> None:
    parser = command(
        parts,
        "rotate",
        _rotate,
        "give a site new keys, signed by its old ones; the other sites need no new roster",
        "sordino federate rotate site-north/site.toml",
    )
    add_site(parser)


def _rotate(arguments: argparse.Namespace) -> int:
    from sordino.federation import rotations
    from sordino.federation.config import SiteConfig
    from sordino.federation.site_data import SiteData

    config = SiteConfig.read(site_file(arguments.site))
    link = rotations.rotate(config)
    SiteData(config).note("rotated", site=link.name, old=link.old, new=link.sign)
    print(f"old key  {link.old}")
    print(f"new key  {link.sign}")
    print("next     nothing: the other sites follow the old key's signature in the next run")
    return 0


def add_vote(parts: Any) -> None:
    parser = command(
        parts,
        "vote",
        _vote,
        "vote to leave a site out of the next runs; more than half of the other sites are enough",
        "sordino federate vote site-north/site.toml --against west\n"
        "sordino federate vote site-north/site.toml --withdraw west\n"
        "sordino federate vote site-north/site.toml",
    )
    add_site(parser)
    parser.add_argument("--against", action="append", default=[], metavar="NAME", help="a site to leave out")
    parser.add_argument("--withdraw", action="append", default=[], metavar="NAME", help="take a vote back")


def _vote(arguments: argparse.Namespace) -> int:
    from sordino.errors import nearest
    from sordino.federation import votes
    from sordino.federation.config import SiteConfig
    from sordino.federation.site_data import SiteData

    config = SiteConfig.read(site_file(arguments.site))
    data = SiteData(config)
    roster, before = data.roster, set(votes.stored(config.folder))
    for name in (*arguments.against, *arguments.withdraw):
        if name not in roster.names or name == config.name:
            raise SordinoError(f"vote: '{name}' is not another site of roster.toml.{nearest(name, roster.names)}")
    after = (before | set(arguments.against)) - set(arguments.withdraw)
    if after != before:
        votes.store(config.folder, after)
        data.note("voted", against=sorted(after))
    print(f"votes   against {', '.join(sorted(after)) or 'nobody'}")
    print(f"needed  {votes.needed(roster)} of {len(roster) - 1} other sites, for runs that begin from now on")
    return 0


def add_site(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("site", metavar="SITE.toml", help="the site's settings, or the site's folder")


def site_file(text: str) -> Path:
    """The site.toml that a user named, by itself or by its folder."""
    from sordino.training.folder import missing

    path = Path(text)
    if not path.is_dir():
        return path
    if not (path / "site.toml").exists():
        raise missing(path / "site.toml", "site.toml")
    return path / "site.toml"


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
    from sordino.operations.backups import backup

    names = backup(Path(arguments.folder), Path(arguments.out))
    print(f"{sentences.count(len(names), 'file')} in {arguments.out}; tables and the witness are not among them")
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
    from sordino.operations.backups import restore

    problem = restore(Path(arguments.archive), Path(arguments.folder))
    if problem:
        say(f"the site refuses to work with this backup: {problem}")
        return 1
    print(
        f"{arguments.folder} is restored; put the records in their place. The site takes part in new runs, and in none "
        "that was open"
    )
    return 0


def add_audit_copy(parts: Any) -> None:
    parser = command(
        parts,
        "audit-copy",
        _audit_copy,
        "copy what an auditor may read: certificates, the state of the ledger, the log without private figures",
        "sordino federate audit-copy site-north --out north-for-audit\n"
        "sordino verify north-for-audit/runs/*/certificate.json",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of a site or of a coordinator")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")


def _audit_copy(arguments: argparse.Namespace) -> int:
    from sordino.operations.audit_copy import audit_copy

    names = audit_copy(Path(arguments.folder), Path(arguments.out))
    print(f"{sentences.count(len(names), 'file')} in {arguments.out}; docs/files.md says of every field why it is safe")
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
        from sordino.operations.status_page import StatusServer

        print(f"status: {StatusServer(folder, _checked_port(port)).url}", file=sys.stderr, flush=True)


def _checked_port(port: int) -> int:
    if not 0 <= port <= 65_535:
        raise SordinoError(f"--status-port, --serve: {port} must lie between 0 and 65535.")
    return port


def _status(arguments: argparse.Namespace) -> int:
    from sordino.operations import status

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
                        ("spent", f"ε = {found.epsilon:.4g} of {found.limit:g} at δ = {found.delta:g}{found.caveat}"),
                        *([] if found.promised is None else [("promised", sentences.promised(found.promised))]),
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
        [[s.name, s.state, str(s.rounds), str(s.lost), s.why] for s in found.sites],
    )
    return 0
