"""`sordino privacy`: epsilon from noise, or noise from epsilon."""

from __future__ import annotations

import argparse
import math
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit, facts
from sordino.core import Adjacency, Trust, Unit
from sordino.errors import SordinoError, count

MOST_CLIENTS = 1_000_000
SEEN = {
    Trust.UNTRUSTED_SERVER: "every message",
    Trust.SECURE_AGGREGATION: "only sums of messages",
    Trust.TRUSTED_SERVER: "only the models sent out",
}
WHO = {
    Unit.RECORD: "one record",
    Unit.PERSON: "one person, with all records,",
    Unit.CLIENT: "one whole client",
}
CHANGE = {Adjacency.ADD_REMOVE: "joins or leaves", Adjacency.REPLACE_ONE: "is replaced"}


def add(commands: Any) -> None:
    parser = command(
        commands,
        "privacy",
        act,
        "compute epsilon from noise, or noise from epsilon",
        "sordino privacy --epsilon 1 --rounds 70 --clients 20 --records 2500 --clip 10\n"
        "sordino privacy --noise 62.4 --rounds 70 --clients 20 --trust secure-aggregation\n"
        "sordino privacy --noise 1 --rounds 2000 --records 1000 --batch 16 --adjacency add-remove",
    )
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--epsilon", type=float, metavar="E", help="find the noise for this epsilon")
    either.add_argument(
        "--noise", type=float, metavar="S", help="find epsilon for this noise: std of the summed client noise / clip"
    )
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of the guarantee (default: 1e-5)")
    parser.add_argument("--rounds", type=int, default=1, metavar="T", help="releases per client (default: 1)")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="number of clients (default: 1)")
    parser.add_argument("--records", type=int, help="records per client; with it, the noise on the aggregate is shown")
    parser.add_argument(
        "--batch",
        default="full",
        help="records per release: full, poisson:16, poisson:0.01, fixed:16, allocation:16 (default: full)",
    )
    parser.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="C",
        help="bound on one record's gradient, or on a client's message (default: 1)",
    )
    parser.add_argument("--unit", default=str(Unit.RECORD), help=f"{', '.join(Unit)} (default: record)")
    parser.add_argument(
        "--adjacency", default=str(Adjacency.REPLACE_ONE), help=f"{', '.join(Adjacency)} (default: replace-one)"
    )
    parser.add_argument(
        "--trust", default=str(Trust.UNTRUSTED_SERVER), help=f"{', '.join(Trust)} (default: untrusted-server)"
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.core import Privacy
    from sordino.methods import build
    from sordino.privacy import calibration, spending
    from sordino.privacy.accounting import events
    from sordino.privacy.participation import FULL, Sampling
    from sordino.privacy.plan import Plan

    for name in ("clients", "rounds", "records"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise SordinoError(f"--{name}: {value} must be at least 1.")
    if arguments.clients > MOST_CLIENTS:
        raise SordinoError(f"--clients: {arguments.clients} must be at most {MOST_CLIENTS:,}.")
    privacy = Privacy(
        arguments.epsilon if arguments.noise is None else 1.0,
        arguments.delta,
        arguments.unit,
        arguments.adjacency,
        arguments.trust,
    )
    sizes = (arguments.records or 1,) * arguments.clients
    method = build("dp-fedgd", privacy.unit, clip=arguments.clip)
    sampling = Sampling.parse(arguments.batch)
    if sampling.kind != FULL and arguments.records is None and sampling.amount >= 1:
        raise SordinoError("--records: a minibatch is a part of a client's records; give their number.")
    plan = Plan(method, arguments.rounds, sizes, privacy, noise=arguments.noise, sampling=sampling)
    noise, client_noise = calibration.summed_noise(plan)
    counted = privacy.unit is Unit.CLIENT or arguments.records is not None
    document = {
        "mu": spending.mu(plan),
        "noise": noise,
        "client_noise": client_noise,
        "aggregate_std": calibration.aggregate_std(plan, 0) if counted else None,
        "epsilon": spending.epsilon(plan),
        "guess": events.guess(spending.worst(plan).releases, plan.privacy.adjacency),
        "batch": str(sampling),
        "delta": privacy.delta,
        "unit": str(privacy.unit),
        "adjacency": str(privacy.adjacency),
        "trust": str(privacy.trust),
    }
    if not emit(arguments, document):
        _tell(plan, document)
    return 0


def _rounds(number: int) -> str:
    return "the one round releases" if number == 1 else f"the {number:,} rounds release"


def _tell(plan: Any, account: dict[str, Any]) -> None:
    from sordino.privacy import spending

    privacy, epsilon = plan.privacy, account["epsilon"]
    mu = "" if spending.samples(plan) else f" (μ = {account['mu']:.4g})"
    rows = [
        ("ε", f"{epsilon:.6g} at δ = {privacy.delta:g}{mu}"),
        ("noise", f"{account['noise']:.6g} × clip on the sum of {count(plan.clients, 'client')}"),
        ("client noise", f"{account['client_noise']:.6g} × clip on each client's message"),
    ]
    if account["aggregate_std"] is not None:
        rows.append(("aggregate std", f"{account['aggregate_std']:.4g} per coordinate of the averaged gradient"))
    facts(rows)
    console().print(
        f"In words: nothing that {_rounds(plan.rounds)} becomes more than e^ε = "
        f"{math.exp(min(epsilon, 700)):.3g} times as likely if {WHO[privacy.unit]} {CHANGE[privacy.adjacency]}, up to "
        f"a slack of δ. An adversary who sees {SEEN[privacy.trust]} and guesses whether that happened, both cases "
        f"being equally likely, is right at most {100 * account['guess']:.3g} % of the time.",
        markup=False,
    )
