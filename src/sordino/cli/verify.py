"""`sordino verify`: a certificate, recomputed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit, facts, waiting
from sordino.errors import SordinoError


def add(commands: Any) -> None:
    parser = command(
        commands,
        "verify",
        act,
        "recompute a certificate with an independent accountant",
        "sordino verify runs/mine\nsordino verify certificate.json --key site-north.card",
    )
    parser.add_argument("certificate", metavar="FILE", help="a run's directory, its public/, or a certificate.json")
    parser.add_argument(
        "--key", metavar="KEY", help="who must have signed it: a public key, its fingerprint, or a file with either"
    )
    parser.add_argument(
        "--complete",
        action="store_true",
        help="exit with 1 if anything public was not compared, such as a missing file",
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.evidence.verify import MOST_ABOVE, MOST_BELOW
    from sordino.training.folder import RunFolder
    from sordino.training.verify_run import LEDGER_STAYS, verify_run

    path, key = Path(arguments.certificate), Path(arguments.key or "")
    verified = RunFolder.find(path).named(path, "certificate.json")
    if key.is_file() and verified.is_file() and key.samefile(verified):
        raise SordinoError(
            "--key: this is the certificate that is verified, and it cannot vouch for itself; give the fingerprint "
            "that its owner told you, or a file that you had from them before."
        )
    with waiting("recomputing the account"):  # seconds, where much was sampled
        verdict = verify_run(path, arguments.key, against_terms=_against_terms)
    not_compared = [*verdict.assumed, *verdict.gaps]
    complete, holds = not {*not_compared} - {LEDGER_STAYS}, not verdict.problems
    document = {
        "ok": holds and verdict.certified,
        "consistent": holds,
        "problems": verdict.problems,
        "epsilon_claimed": verdict.claimed,
        "epsilon_recomputed": verdict.recomputed,
        "certified": verdict.certified,
        "signed_by": verdict.signed or None,
        "key_known": verdict.known,
        "complete": complete,
        "not_compared": not_compared,
    }
    if not emit(arguments, document):
        facts(
            [
                ("ε claimed", f"{verdict.claimed:.6g}"),
                (
                    "ε recomputed",
                    f"{verdict.recomputed:.6g} (from the raw numbers, by a second accountant; a claim may "
                    f"be up to {MOST_BELOW:.1%} below and {MOST_ABOVE:.0%} above)",
                ),
                ("claims", "certified" if verdict.certified else "not certified"),
                ("signed by", verdict.signed or "nobody"),
                *(("mismatch", problem) for problem in verdict.problems),
                *(("not compared", missing) for missing in not_compared),
            ]
        )
        page = console()
        if verdict.problems:
            count = len(verdict.problems)
            page.print(f"[bold red]FAILED[/]: {count} mismatch{'es' if count > 1 else ''}")
        elif not verdict.certified:
            page.print(f"[bold red]NOT CERTIFIED[/]: the run promises nothing, although {_whose(verdict)}")
        elif arguments.complete and not complete:
            page.print(
                f"[bold red]FAILED[/] (--complete): not everything public was compared, although {_whose(verdict)}"
            )
        elif not_compared:
            things = f"{len(not_compared)} thing was" if len(not_compared) == 1 else f"{len(not_compared)} things were"
            page.print(f"[bold yellow]holds, but {things} not compared[/]: {_whose(verdict)}")
        else:
            page.print(f"[bold green]holds[/]: {_whose(verdict)}")
    return 0 if holds and verdict.certified and (complete or not arguments.complete) else 1


def _against_terms(cert: dict[str, Any], path: Path) -> Iterator[str]:
    """How a federation's certificate is rebuilt: it needs torch, which other certificates do not."""
    from sordino.federation.terms import against_terms

    return against_terms(cert, path)


def _whose(verdict: Any) -> str:
    """What the signature adds: anybody can invent files whose numbers agree."""
    if not verdict.signed:
        return "the numbers agree. Nobody signed the certificate, so anybody could have made files that agree."
    if verdict.known:
        return "the numbers agree, and the key that --key names signed them."
    return "the numbers agree. Pass --key to check who signed them."
