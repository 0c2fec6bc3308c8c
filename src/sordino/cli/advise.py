"""`sordino advise`: recommend an estimator, and predict its error."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit, marked, table
from sordino.errors import SordinoError

ABOUT = """
The prediction uses closed forms for a reference design: features have mean 0, variance 1 and little correlation, and
all clients draw from the same distribution. The guarantee is for one record of a client, against a server that sees
every message.
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "advise",
        act,
        "recommend an estimator, and predict its error",
        "sordino advise --clients 20 --records 2000 --dim 5 --epsilon 4\n"
        "sordino advise --clients 200 --records 100 --dim 5 --mu 3       FedNewton is unsafe here\n"
        "sordino advise --records 900,1200,450 --dim 8 --epsilon 8 --model poisson --json",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument(
        "--clients", type=int, metavar="M", help="number of clients (default: one per number in --records)"
    )
    parser.add_argument(
        "--records",
        required=True,
        metavar="N",
        help="records per client: one number for all, or one per client: 900,450",
    )
    parser.add_argument("--dim", type=int, required=True, metavar="D", help="number of parameters")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--epsilon", type=float, metavar="E", help="privacy budget")
    either.add_argument("--mu", type=float, metavar="MU", help="privacy budget as Gaussian DP")
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of the guarantee (default: 1e-5)")
    parser.add_argument("--model", default="logistic", help="logistic or poisson (default: logistic)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.studies.advise import advise

    advice = advise(
        _sizes(arguments.records, arguments.clients),
        arguments.dim,
        mu=arguments.mu,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        model=arguments.model,
    )
    if not emit(arguments, advice):
        _tell(advice)
    return 0


def _sizes(records: str, clients: int | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in records.split(","))
    except ValueError:
        raise SordinoError(f"--records: '{records}' should be a number, or one per client: 900,1200,450.") from None
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


def _tell(advice: dict[str, Any]) -> None:
    from sordino.studies.estimation import LABELS
    from sordino.studies.estimation_report import short

    page = console()
    page.print(
        f"{advice['clients']} clients, {advice['records']:,} records, {advice['dim']} parameters, {advice['model']}; "
        f"ε = {advice['epsilon']:.4g} at δ = {advice['delta']:g} (μ = {advice['mu']:.4g})",
        markup=False,
    )
    if advice["learnt"]:
        page.print(f"[bold green]use {LABELS[advice['recommended']]}[/] ({advice['recommended']})")
    else:
        page.print(
            f"[bold yellow]none of them learns much[/]: the best, {LABELS[advice['recommended']]}, has an error of "
            f"{short(advice['expected_error'])}, and the estimate 0 has {advice['theta_squared']:g}. Use more records, "
            "or a larger budget"
        )
    for line in advice["why"]:
        page.print("  " + line, markup=False)
    rows = []
    for name, entry in advice["methods"].items():
        unsafe = name == "fednewton" and not advice["fednewton_safe"]
        terms, settings = entry["terms"], ", ".join(f"{k} {v}" for k, v in entry["settings"].items())
        parts = ("statistical", "privacy", "bias", "optimisation")
        shown = [marked("[red]unsafe[/]") if unsafe else short(entry["error"]), *(short(terms[part]) for part in parts)]
        rows.append((name, str(entry["rounds"]), settings, *shown))
    table(("method", "rounds", "settings", "error", "sampling", "privacy", "bias", "steps missing"), rows)
    page.print(
        f"no method has an error below {short(advice['information_bound'])} (information bound of the reference "
        f"design); the rate d / Σ min(n, n²μ²/d) is {short(advice['rate'])}: a rate, not a certificate"
    )
