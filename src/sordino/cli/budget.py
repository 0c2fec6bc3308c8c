"""`sordino budget`: share a limit over several planned runs."""

from __future__ import annotations

import argparse
import math
from typing import Any

from sordino.cli.ledger import costs_of_open_studies, open_ledger
from sordino.cli.show import add_json, check_json, command, console, emit, numbers, table
from sordino.errors import SordinoError
from sordino.federation import sentences

MOST_RUNS = 1000
ABOUT = """
Budgets of runs with Gaussian noise on all records add up as squares of mu, so k runs cost less than k epsilons. The
shares hold whatever the earlier runs showed. A run that spends less leaves more for the others. Minibatches, and the
integer noise of masked federations, cost a little more or less than their share says; the ledger counts what they cost
and refuses what does not fit. In a ledger whose first run has minibatches, a part of delta is set aside for them, so
that less is left to share. After a first run without minibatches, they count as if they held all records, unless
`sordino ledger any-choice` was said.
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "budget",
        act,
        "share a limit over several planned runs",
        "sordino budget --limit 8 --runs 5\n"
        "sordino budget --limit 8 --shares 3,1,1                 the first run gets three fifths of mu squared\n"
        "sordino budget --ledger site-north/ledger.db --runs 4   share what a ledger has left",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument("--limit", type=float, metavar="E", help="epsilon over all runs; by default the ledger's limit")
    parser.add_argument("--delta", type=float, metavar="D", help="delta (default: the ledger's, or 1e-5)")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--runs", type=int, metavar="K", help="number of runs with equal shares")
    either.add_argument("--shares", metavar="A,B,…", help="one number per run: its part of mu squared")
    parser.add_argument("--ledger", metavar="LEDGER.db", help="share what this ledger has left")
    parser.add_argument("--account", metavar="WHO", help="account of the ledger (default: its only or latest one)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    from sordino.privacy import budget

    check_json(arguments)
    weights = _weights(arguments)
    account, limit, delta, spent, promised = _limit(arguments, weights)
    runs = budget.share(limit, delta, weights, spent)
    rows = [run._asdict() for run in runs]
    about = {"account": account, "limit": limit, "delta": delta, "promised": promised, "spent_mu": spent}
    if not emit(arguments, {**about, "runs": rows}):
        page = console()
        page.print(f"limit{f' of {account}' if account else ''}: ε = {limit:g} at δ = {delta:g}", markup=False)
        if promised is not None:
            page.print(f"promised {sentences.promised(promised)}", markup=False)
        table(
            ["run", "share", "ε of the run", "ε of everything up to it"],
            [
                [str(number), f"{run.share:.1%}", _down(run.epsilon), f"{run.epsilon_after:.4f}"]
                for number, run in enumerate(runs, 1)
            ],
        )
    return 0


def _down(epsilon: float) -> str:
    """Rounded down, so that runs with the printed budgets fit into the limit."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}"


def _weights(arguments: argparse.Namespace) -> list[float]:
    """One weight per run."""
    if arguments.runs is not None:
        if not 1 <= arguments.runs <= MOST_RUNS:
            raise SordinoError(f"--runs: {arguments.runs} must lie in [1, {MOST_RUNS}].")
        return [1.0] * arguments.runs
    return numbers("--shares", arguments.shares, "3,1,1")


def _limit(arguments: argparse.Namespace, weights: list[float]) -> tuple[str | None, float, float, float, float | None]:
    """The account, its limit as epsilon and delta, mu of what was spent or promised to the open runs of a site, and the
    epsilon that is spent when these have ended; None without such runs."""
    from sordino.privacy.accounting import gaussian

    if arguments.limit is not None and not arguments.limit >= 0:
        raise SordinoError(f"--limit: {arguments.limit:g} must be an epsilon of at least 0.")
    if arguments.ledger is None:
        if arguments.account is not None:
            raise SordinoError("--account: name its ledger too, with --ledger.")
        if arguments.limit is None:
            raise SordinoError("--limit: give the epsilon over all runs, or a --ledger that has a limit.")
        return None, arguments.limit, 1e-5 if arguments.delta is None else arguments.delta, 0.0, None
    entries = costs_of_open_studies(arguments.ledger)
    with open_ledger(arguments.ledger) as ledger:
        limits, people = ledger.limits(), ledger.people()
        opened = [account.who for account in ledger.accounts()]
        who = arguments.account or (opened or people or [None])[-1]
        if arguments.account is not None and who not in (*opened, *people):
            raise SordinoError(f"--account: '{who}' is not in the ledger; see sordino ledger show.")
        if arguments.account is None and not opened and len(people) > 1:
            raise SordinoError(f"--account: the ledger has {len(people)} of them; name one of sordino ledger show.")
        delta = arguments.delta or min((each for _, each in limits), default=1e-5)
        if arguments.limit is not None:
            limits = [*limits, (arguments.limit, delta)]
        if not limits:
            raise SordinoError("--limit: the ledger has no limit; give the epsilon over all runs.")
        # Limits at several deltas are compared as mu.
        limit = min(gaussian.epsilon(gaussian.mu(*each), delta) for each in limits)
        fine = weights and all(0 < weight < math.inf for weight in weights)  # `share` refuses others
        shares = [weight / math.fsum(weights) for weight in weights] if fine else [1.0]
        promised = [entry for entry in ledger.unpaid(entries) if entry.who == who]
        left = ledger.left(who or "nobody", (limit, delta), shares, promised)
        after = ledger.spent_epsilon(who or "nobody", delta, promised) if promised else None
    square = gaussian.mu(limit, delta) ** 2 - (gaussian.mu(left, delta) ** 2 if left else 0.0)
    return who, limit, delta, max(0.0, square) ** 0.5, after
