"""`sordino ledger`: what was spent, when, for whom."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.cli.show import add_json, check_json, command, console, emit, steps, table
from sordino.federation import sentences
from sordino.foreign import cell

if TYPE_CHECKING:
    from sordino.evidence.ledger import Ledger
    from sordino.evidence.spent import Charge

WARNING = (
    "records that earlier runs used too are protected by neither limit alone: what both accounts spend on them adds "
    "up, and no ledger counts the sum."
)

STATED = {
    "any choice": "minibatches count as such after a first run without them",
    "fixed plan": (
        "ASSUMPTION, stated by a person: rate, noise and rounds of all runs were fixed before the first result was seen"
    ),
}


def add(commands: Any) -> None:
    parts = steps(
        commands,
        "ledger",
        "show or export what was spent, by which run and when; open an account",
        "sordino ledger show site-north/ledger.db\nsordino ledger export site-north/ledger.db --json ledger.json",
        "show",
    )
    show = command(
        parts,
        "show",
        _show,
        "show the account of every data set, and what each run spent",
        "sordino ledger show patients.db\nsordino ledger show site-north",
    )
    export = command(
        parts, "export", _export, "write every row as CSV or JSON", "sordino ledger export patients.db > rows.csv"
    )
    new = command(
        parts,
        "new-account",
        _new_account,
        "let a site's next runs pay from a new account with the full limit; the reason stays in the ledger",
        'sordino ledger new-account site-north/ledger.db --why "only patients of 2027, who are in no earlier data"',
    )
    new.add_argument("--why", required=True, metavar="TEXT", help="why these data may spend a budget of their own")
    choice = command(
        parts,
        "any-choice",
        _any_choice,
        "count minibatches as such also after a first run without them; best before the first run, never taken back",
        "sordino ledger any-choice patients.db",
    )
    fixed = command(
        parts,
        "fixed-plan",
        _fixed_plan,
        "state that rate, noise and rounds of all runs were fixed before the first result was seen; it costs less, and "
        "the reason stays in the ledger",
        'sordino ledger fixed-plan patients.db --reason "protocol of 3 March, section 2"',
    )
    fixed.add_argument("--reason", required=True, metavar="TEXT", help="where these numbers were fixed, and when")
    compact = command(
        parts,
        "compact",
        _compact,
        "delete the stored answers of a site's finished runs, and give the space back; charges and hashes stay",
        "sordino ledger compact site-north/ledger.db",
    )
    for parser in (show, export, new, choice, fixed, compact):
        parser.add_argument("file", metavar="LEDGER.db", help="a ledger.db, or a run's directory")
        add_json(parser)


def open_ledger(file: str) -> Any:
    """The ledger at this path, or of this run, to read."""
    from sordino.evidence.ledger import Ledger

    path = _path(file)
    if not path.is_file():
        from sordino.training.folder import missing

        raise missing(path, "ledger")
    return Ledger(path, read_only=True)


def costs_of_open_studies(file: str) -> list[Charge]:
    """What all rounds of the open studies of a site cost whose ledger this is; nothing for any other ledger."""
    path = _path(file)
    if not (path.parent / "site.toml").is_file():
        return []
    from sordino.federation import promises

    return promises.of_owner(path)


def _open(arguments: argparse.Namespace) -> Any:
    check_json(arguments)
    return open_ledger(arguments.file)


def _new_account(arguments: argparse.Namespace) -> int:
    from sordino.evidence.ledger import Ledger

    with _open(arguments):  # a path without a ledger must not become one
        pass
    with Ledger(_path(arguments.file)) as ledger:
        before = ledger.accounts()
        who = ledger.new_account(arguments.why)
        opened = ledger.accounts()[-1]
    spent_before = [account.who for account in before]
    document = {"account": who, "time": opened.time, "why": opened.why, "earlier": spent_before, "warning": WARNING}
    if not emit(arguments, document):
        page = console()
        page.print(f"new runs of this site are paid from {who}", markup=False)
        page.print(f"WARNING: {WARNING}", markup=False)
    return 0


def _any_choice(arguments: argparse.Namespace) -> int:
    return _stated(arguments, lambda ledger: ledger.allow_any_choice())


def _fixed_plan(arguments: argparse.Namespace) -> int:
    return _stated(arguments, lambda ledger: ledger.state_fixed_plan(arguments.reason))


def _stated(arguments: argparse.Namespace, state: Callable[[Ledger], None]) -> int:
    """Write a statement into the ledger, and show what every account spent by it."""
    from sordino.evidence.ledger import Ledger

    path = _path(arguments.file)
    check_json(arguments)
    new = not path.exists()  # a statement costs least before the first run, which makes the ledger otherwise
    if not new:
        open_ledger(arguments.file).close()
    with Ledger(path) as ledger:
        state(ledger)
        statements = _statements(ledger)
        delta = min((d for _, d in ledger.limits()), default=1e-5)
        spent = {who: ledger.spent_epsilon(who, delta) for who in ledger.people()}
        caveats = {who: ledger.caveat(who) for who in spent}
    if not emit(arguments, {"statements": statements, "delta": delta, "spent": spent, "assumes": caveats}):
        if new:
            console().print(f"new ledger: {path}", markup=False)
        for each in statements:
            console().print(f"{_time(each['time'])} {_sentence(each['kind'], each['text'])}", markup=False)
        for who, epsilon in spent.items():
            console().print(f"{who}: ε = {epsilon:.4g} at δ = {delta:g}{caveats[who]}", markup=False)
    return 0


def _sentence(kind: str, text: str) -> str:
    """What a person stated, with the reason if there is one."""
    reason = text.partition(": ")[2]
    return f"{STATED[kind]} ({reason})" if reason else STATED[kind]


def _compact(arguments: argparse.Namespace) -> int:
    from sordino.evidence.ledger import Ledger
    from sordino.federation.testing import plan_name

    with _open(arguments):  # a path without a ledger must not become one
        pass
    path = _path(arguments.file)
    before, runs = path.stat().st_size, path.parent / "runs"
    over = [run.name for run in sorted(runs.glob("*/")) if (run / "certificate.json").exists()]
    over = [name for name in over if not (runs / name / "secret").exists()]  # until then a site may be asked again
    with Ledger(path) as ledger:
        deleted = ledger.compact([plan for name in over for plan in (name, plan_name(name))])
        ledger.shrink()
    document = {"finished_runs": len(over), "deleted": deleted, "bytes_before": before, "bytes": path.stat().st_size}
    if not emit(arguments, document):
        console().print(
            f"{deleted} answers of {len(over)} finished runs deleted; the file has {document['bytes']:,} bytes, "
            f"{before:,} before",
            markup=False,
        )
    return 0


def _path(file: str) -> Path:
    """The ledger at this path, or of the run whose directory or public file this is."""
    from sordino.training.folder import RunFolder

    named = Path(file)
    place = RunFolder.find(named)
    return place.private / "ledger.db" if named.is_dir() or named.parent == place.public != place.private else named


def _witness(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Head and length of the ledger according to the run's certificate; None if no certificate is beside the ledger."""
    from sordino.foreign import read_json
    from sordino.training.folder import RunFolder

    path = RunFolder.find(_path(arguments.file)).public / "certificate.json"
    try:
        head = read_json(path.read_text(encoding="utf-8"))["ledger"]
        return {"head": str(head["head"]), "rows": int(head["rows"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seen(counted: bool, witness: dict[str, Any] | None) -> str:
    """What was compared, and what nobody can see from here."""
    if witness is not None:
        return f"the chain is unbroken and holds the {witness['rows']} rows that certificate.json names"
    if counted:
        return (
            "the chain is unbroken and has as many rows as the file records; whoever can write the file could have cut "
            "both, so compare the head with a certificate"
        )
    return (
        "the chain is unbroken; the file does not record its number of rows, so rows cut from its end cannot be "
        "noticed here: compare the head with a certificate"
    )


def _show(arguments: argparse.Namespace) -> int:
    entries = costs_of_open_studies(arguments.file)
    with _open(arguments) as ledger:
        document = _document(ledger, _witness(arguments), ledger.unpaid(entries))
    if not emit(arguments, document):
        _print(document)
    return 0 if document["whole"] else 1


def _document(ledger: Ledger, witness: dict[str, Any] | None, promised: Sequence[Charge] = ()) -> dict[str, Any]:
    """What a ledger holds: its limits, accounts and runs, what people stated, and whether its chain is whole."""
    from sordino.evidence.ledger import NOTES

    problems = ledger.audit() if witness is None else ledger.audit(witness["head"], witness["rows"])
    limits = ledger.limits()
    delta = min((d for _, d in limits), default=1e-5)
    runs: dict[tuple[str, str], list[Any]] = {}
    for row in ledger.rows():
        if row.query not in NOTES:
            runs.setdefault((row.who, row.plan), []).append(row)
    paying = {entry.who for entry in promised}
    return {
        "limits": [{"epsilon": e, "delta": d} for e, d in limits],
        "whole": not problems,
        "seen": _seen(ledger.witnessed(), witness) if not problems else None,
        "problems": problems,
        "head": ledger.head(),
        "rows": len(ledger),
        "opened": [account._asdict() for account in ledger.accounts()],
        "statements": _statements(ledger),
        "delta": delta,
        "accounts": [
            {
                "who": who,
                "epsilon": ledger.spent_epsilon(who, delta),
                "promised": ledger.spent_epsilon(who, delta, promised) if who in paying else None,
                "left": ledger.left(who, promised=promised),
                "runs": sum(name == who for name, _ in runs),
                "assumes": ledger.caveat(who).removeprefix(", "),
                "epsilon_any_choice": ledger.adaptive_epsilon(who, delta),
            }
            for who in dict.fromkeys([*ledger.people(), *sorted(paying)])
        ],
        "runs": [
            {
                "who": who,
                "run": run,
                "rounds": len({r.round for r in rows if r.is_release}),
                "releases": sum(r.times for r in rows if r.is_release),
                "reserved": sum(r.times for r in rows if not r.is_release) or None,
                "first": rows[0].time,
                "last": rows[-1].time,
            }
            for (who, run), rows in runs.items()
        ],
    }


def _print(document: dict[str, Any]) -> None:
    from sordino.training.folder import shown_name

    page, accounts, delta = console(), document["accounts"], document["delta"]
    for limit in document["limits"]:
        page.print(f"limit over all runs: ε = {limit['epsilon']:g} at δ = {limit['delta']:g}", markup=False)
    table(
        ["account", f"ε at δ = {delta:g}", "runs", "left for one more run"],
        [
            [a["who"], f"{a['epsilon']:.4g}", str(a["runs"]), "" if a["left"] is None else f"{a['left']:.4g}"]
            for a in accounts
        ],
    )
    for account in accounts:
        if account["promised"] is not None:
            page.print(f"{account['who']}: promised {sentences.promised(account['promised'])}", markup=False)
    page.print()
    table(
        ["account", "run", "releases", "first", "last"],
        [
            [str(r["who"]), shown_name(str(r["run"])), _releases(r), _time(r["first"]), _time(r["last"])]
            for r in document["runs"]
        ],
    )
    for account in accounts:
        if account["assumes"]:
            page.print()
            page.print(f"{account['who']}: ε = {account['epsilon']:.4g}, {account['assumes']}.", markup=False)
        if account["epsilon_any_choice"] > account["epsilon"]:
            page.print(f"However they were chosen, ε is at most {account['epsilon_any_choice']:.4g}.", markup=False)
    for each in document["statements"]:
        page.print(f"{_time(each['time'])} {_sentence(each['kind'], each['text'])}", markup=False)
    page.print()
    for account in document["opened"][1:]:
        page.print(f"{_time(account['time'])} a person opened {account['who']}: {account['why']}", markup=False)
        page.print(f"WARNING: {WARNING}", markup=False)
    page.print(f"{document['rows']} rows, head {document['head'][:16]}", markup=False)
    page.print(document["seen"] or f"BROKEN: {document['problems'][0]}", markup=False)


def _statements(ledger: Ledger) -> list[dict[str, str]]:
    return [{"time": time, "kind": kind, "text": text} for time, kind, text in ledger.statements()]


def _releases(run: dict[str, Any]) -> str:
    """The number of releases, and of how many the run reserved at its start."""
    return f"{run['releases']} of {run['reserved']} reserved" if run["reserved"] else str(run["releases"])


def _time(text: Any) -> str:
    """Date and time to the minute."""
    return str(text)[:16].replace("T", " ")


def _export(arguments: argparse.Namespace) -> int:
    with _open(arguments) as ledger:
        rows = [row._asdict() for row in ledger.rows()]
    if not emit(arguments, rows) and arguments.json is None:
        if not rows:
            return 0
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: cell(part) if isinstance(part, str) else part for key, part in row.items()})
    return 0
