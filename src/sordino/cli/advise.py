"""`sordino advise`: which estimator to use, and what error to expect."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit, table
from sordino.errors import SordinoError

ABOUT = """
Closed forms for a reference design: features of mean 0 and variance 1 with little correlation, clients that draw from
one law. The promise is for one record of a client, against a server that sees every message.
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "advise",
        act,
        "which estimator to use, and what error to expect",
        "sordino advise --clients 20 --records 2000 --dim 5 --epsilon 4\n"
        "sordino advise --clients 200 --records 100 --dim 5 --mu 3       FedNewton is unsafe here\n"
        "sordino advise --records 900,1200,450 --dim 8 --epsilon 8 --model poisson --json",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument("--clients", type=int, metavar="M", help="how many (default: as many as --records names)")
    parser.add_argument("--records", required=True, metavar="N", help="of each client, or one number a client: 900,450")
    parser.add_argument("--dim", type=int, required=True, metavar="D", help="number of parameters")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--epsilon", type=float, metavar="E", help="the promise")
    either.add_argument("--mu", type=float, metavar="MU", help="the promise as Gaussian DP")
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="(default: 1e-5)")
    parser.add_argument("--model", default="logistic", help="logistic or poisson (default: logistic)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.studies.advise import advise

    found = advise(
        _sizes(arguments.records, arguments.clients),
        arguments.dim,
        mu=arguments.mu,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        model=arguments.model,
    )
    if not emit(arguments, found):
        _tell(found)
    return 0


def _sizes(records: str, clients: int | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in records.split(","))
    except ValueError:
        raise SordinoError(f"--records: '{records}' should be a number, or one a client as in 900,1200,450.") from None
    if min(sizes) < 1:
        raise SordinoError("--records: every client needs at least one record.")
    if len(sizes) == 1:
        clients = 1 if clients is None else clients
        if not 1 <= clients <= 1_000_000:
            raise SordinoError(f"--clients: {clients} must lie between 1 and 1,000,000.")
        return sizes * clients
    if clients not in (None, len(sizes)):
        raise SordinoError(f"--clients: {clients}, but --records names {len(sizes)}; leave --clients away.")
    return sizes


def _tell(found: dict[str, Any]) -> None:
    from sordino.studies.estimation import LABELS
    from sordino.studies.estimation_report import short

    page = console()
    page.print(
        f"{found['clients']} clients, {found['records']:,} records, {found['dim']} parameters, {found['model']}; "
        f"ε = {found['epsilon']:.4g} at δ = {found['delta']:g} (μ = {found['mu']:.4g})",
        markup=False,
    )
    if found["learnt"]:
        page.print(f"[bold green]use {LABELS[found['recommended']]}[/] ({found['recommended']})")
    else:
        page.print(
            f"[bold yellow]none of them learns much[/]: the best, {LABELS[found['recommended']]}, errs by "
            f"{short(found['expected_error'])}, and 0 by {found['theta_squared']:g}. More records, or a larger budget"
        )
    for line in found["why"]:
        page.print("  " + line, markup=False)
    rows = []
    for name, entry in found["methods"].items():
        unsafe = name == "fednewton" and not found["fednewton_safe"]
        terms, settings = entry["terms"], ", ".join(f"{k} {v}" for k, v in entry["settings"].items())
        parts = ("statistical", "privacy", "bias", "optimisation")
        shown = ["[red]unsafe[/]" if unsafe else short(entry["error"]), *(short(terms[part]) for part in parts)]
        rows.append((name, str(entry["rounds"]), settings, *shown))
    table(("method", "rounds", "settings", "error", "sampling", "privacy", "bias", "steps missing"), rows)
    page.print(
        f"below {short(found['information_bound'])} no method stays (information bound of the reference design); the "
        f"rate d / Σ min(n, n²μ²/d) is {short(found['rate'])}: a rate, not a certificate"
    )
