"""`sordino verify`: a certificate, recomputed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit


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
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from rich.console import Console

    from sordino.training.verify_run import AGAINST_TERMS, verify_run

    AGAINST_TERMS[:] = [_against_terms]

    with Console(stderr=True).status("recomputing the account"):  # seconds, where much was sampled
        verdict = verify_run(Path(arguments.certificate), arguments.key)
    document = {
        "ok": not verdict.problems,
        "problems": verdict.problems,
        "epsilon_claimed": verdict.claimed,
        "epsilon_recomputed": verdict.recomputed,
        "certified": verdict.certified,
        "signed_by": verdict.signed or None,
        "key_known": verdict.known,
        "not_compared": verdict.gaps,
    }
    if not emit(arguments, document):
        page = console()
        page.print(
            f"claimed ε {verdict.claimed:.6g}, recomputed from the raw numbers {verdict.recomputed:.6g} (dp-accounting)"
        )
        for problem in verdict.problems:
            page.print("mismatch: " + problem, style="red", markup=False)
        for missing in verdict.gaps:
            page.print(f"not compared: {missing}", markup=False)
        if not verdict.problems:
            says = "certified" if verdict.certified else "it says of itself: not certified"
            page.print(f"[green]holds[/] ({says}). {_whose(verdict)}", soft_wrap=True)
    return 0 if not verdict.problems else 1


def _against_terms(cert: dict[str, Any], path: Path) -> Iterator[str]:
    """How a federation's certificate is rebuilt: it needs torch, which other certificates do not."""
    from sordino.federation.terms import against_terms

    return against_terms(cert, path)


def _whose(verdict: Any) -> str:
    """What the signature adds: numbers that agree can be made up by anybody, all files together."""
    if not verdict.signed:
        return "The numbers agree, but it is not signed: anybody can make up spec, certificate and ledger that agree"
    if verdict.known:
        return f"The numbers agree, and {verdict.signed} signed them: the key that --key names"
    return f"The numbers agree; signed by {verdict.signed}; pass --key to check whose it is"
