"""`sordino audit`: lower bounds on epsilon by attack, held against the certified one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sordino.cli.show import add_json, bar, check_json, command, console, emit, table
from sordino.core import Adjacency, Method, Privacy, Trust, Unit
from sordino.errors import SordinoError

ABOUT = """
Two worlds that differ in one record (or user) are run many times, and an adversary who knows all but the noise tells
them apart as well as anybody can. How often it errs refutes every epsilon below a bound, with 95 % confidence.
'by account' tests what the certificate claims, that all releases together are mu-Gaussian DP, or that they are Gaussian
releases of minibatches drawn as declared; 'by thresholds' assumes nothing, and is loose at small delta. A bound above
the certified epsilon is looked for again twice, with fresh noise; if it stays there, the guarantee is broken and the
exit status is 1. 'reach' is the canary's mu over the certified one; 'least claim' is that of the query whose bound
is reached least, each query by the canary that suits it best.
"""
SAMPLED, BATCHES = "dp-fedgd", ("poisson:4", "fixed:4")  # what --all audits of minibatches
AUDIT_DTYPES = ("float32", "float64")


def add(commands: Any) -> None:
    parser = command(
        commands,
        "audit",
        act,
        "attack a method: a lower bound on epsilon",
        "sordino audit dp-fedgd\n"
        "sordino audit dp-fedgd --noise-factor 0.5            half the noise: the attack must win\n"
        "sordino audit dp-fedavg --set steps=3 --epsilon 4 --adjacency add-remove\n"
        "sordino audit dp-fedgd --batch poisson:4             minibatches\n"
        "sordino audit dp-fedgd --one-run                     one run, thousands of canaries\n"
        "sordino audit --all --json results/audit.json",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument("method", nargs="*", metavar="METHOD")
    parser.add_argument("--all", action="store_true", help="every method there is")
    parser.add_argument("--epsilon", type=float, default=1.0, metavar="E", help="to certify and attack (default: 1)")
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="(default: 1e-5)")
    parser.add_argument("--unit", metavar="X", help=f"{', '.join(Unit)} (default: each that the method has)")
    parser.add_argument("--adjacency", metavar="X", help=f"{', '.join(Adjacency)} (default: both)")
    parser.add_argument("--trust", metavar="X", help=f"{', '.join(Trust)} (default: the first that is proved)")
    parser.add_argument(
        "--runs", type=int, metavar="N", help="of each world (default: 10000); with --one-run: canaries"
    )
    parser.add_argument("--rounds", type=int, metavar="T", help="of the stage whose length is open (default: up to 5)")
    parser.add_argument(
        "--batch",
        metavar="X",
        help="minibatches: poisson:16, fixed:16 (default: full; --all adds poisson:4 and fixed:4 of dp-fedgd)",
    )
    parser.add_argument("--dtype", default="float32", metavar="X", help="of the runs: float32 (default) or float64")
    parser.add_argument("--one-run", action="store_true", help="many canaries in one run (record level; default: 2000)")
    parser.add_argument(
        "--noise-factor", type=float, default=1.0, metavar="F", help="multiply the noise, not the certificate: a drill"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the method")
    parser.add_argument("--seed", type=int, help="reproducible noise (default: the secret noise that ships)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    jobs = list(_jobs(arguments))
    if not jobs:
        raise SordinoError("audit: no method is certified for these options; change --batch, --unit or --adjacency.")
    found: list[Any] = []
    with bar("auditing", len(jobs)) as progress:
        for job in jobs:
            found.append(job())
            progress()
    if not emit(arguments, [{**each._asdict(), "broken": each.broken} for each in found]):
        (_one_run_table if arguments.one_run else _table)(found)
        _tell(found)
    return 1 if any(each.broken for each in found) else 0


def _jobs(arguments: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    """Everything that is asked for, checked before the first of it runs."""
    import torch

    from sordino.checks.audit import attacks
    from sordino.methods import REGISTRY

    names = list(REGISTRY) if arguments.all else arguments.method
    if not names:
        raise SordinoError("audit: name a method, or use --all.")
    if arguments.dtype not in AUDIT_DTYPES:
        raise SordinoError(f"dtype: '{arguments.dtype}' is unknown; use {' or '.join(AUDIT_DTYPES)}.")
    if arguments.one_run and arguments.batch:
        raise SordinoError("batch: an audit in one run uses all records; leave --batch away.")
    call, counted = (attacks.one_run, "canaries") if arguments.one_run else (attacks.audit, "runs")
    count = attacks.RUNS if arguments.runs is None else arguments.runs
    attacks.check_arguments(counted, count, arguments.noise_factor, arguments.seed)
    given = {counted: arguments.runs, "rounds": arguments.rounds, "seed": arguments.seed}
    rest = {key: value for key, value in given.items() if value is not None} | {"noise_factor": arguments.noise_factor}
    rest["dtype"] = getattr(torch, arguments.dtype)
    for name in names:
        for privacy, method in _targets(arguments, name):
            for batch in _batches(arguments, name, privacy, method):
                attacks.plan_for(name, privacy, rounds=arguments.rounds, method=method, batch=batch)
                how = rest if arguments.one_run else rest | {"batch": batch}
                yield partial(call, name, privacy, method=method, **how)


def _batches(arguments: argparse.Namespace, name: str, privacy: Privacy, method: Method) -> list[str]:
    """The minibatches asked for; --all leaves out what is not certified or not audited."""
    from sordino.checks.audit.attacks import unattacked
    from sordino.privacy.participation import FULL, Sampling

    asked = [arguments.batch or FULL]
    if not arguments.all:
        return asked
    if name == SAMPLED and not arguments.batch and not arguments.one_run:
        asked += BATCHES
    return [batch for batch in asked if not unattacked(method, Sampling.parse(batch), privacy.adjacency)]


def _targets(arguments: argparse.Namespace, name: str) -> Iterator[tuple[Privacy, Method]]:
    """Units and adjacencies, against the strongest adversary that is proved against. --all leaves out the unproved."""
    from sordino.methods import build, entry
    from sordino.settings import parse_setting

    chosen = {key: getattr(arguments, key) for key in ("unit", "adjacency", "trust") if getattr(arguments, key)}
    asked = Privacy(arguments.epsilon, arguments.delta, **chosen)
    if arguments.one_run and asked.unit is Unit.USER:
        raise SordinoError("unit: an audit in one run hides many records in a client; leave --unit user away.")
    units = [asked.unit] if arguments.unit or arguments.one_run else list(entry(name).units)
    for unit in units if not arguments.all else [unit for unit in units if unit in entry(name).units]:
        method = build(name, unit, **_options(name, dict(map(parse_setting, arguments.set))))
        proved = [trust for trust in Trust if (unit, trust) in method.proves]
        trust = asked.trust if arguments.trust else (proved or list(Trust))[0]
        if arguments.all and trust not in proved:
            continue
        for adjacency in [asked.adjacency] if arguments.adjacency else Adjacency:
            yield replace(asked, unit=unit, adjacency=adjacency, trust=trust), method


def _options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of a method, read as a run reads them; `build` refuses what is unknown."""
    from sordino.methods import entry
    from sordino.training.spec import Spec

    known = {key: value for key, value in given.items() if key in entry(name).options}
    return given | Spec.of({"method": name, **known}).options


def _table(found: list[Any]) -> None:
    columns = ("method", "unit", "adjacency", "trust", "batch", "certified ε", "by thresholds", "by account", "reach")
    table(
        (*columns, "least claim", ""),
        [
            (
                *(r.method, r.unit, r.adjacency, r.trust, r.batch, f"{r.certified:.4g}"),
                *(f"{r.lower_thresholds:.3f}", f"{_by_account(r):.3f}", f"{r.reach:.1%}", f"{r.least_claim:.1%}"),
                _verdict(r),
            )
            for r in found
        ],
    )


def _one_run_table(found: list[Any]) -> None:
    columns = ("method", "unit", "adjacency", "trust", "certified ε", "lower bound", "right guesses", "canaries", "")
    table(
        columns,
        [
            (
                *(r.method, r.unit, r.adjacency, r.trust, f"{r.certified:.4g}"),
                *(f"{r.lower:.3f}", f"{r.right} of {r.guesses}", str(r.canaries)),
                _verdict(r),
            )
            for r in found
        ],
    )


def _by_account(row: Any) -> float:
    found: float = row.lower_gaussian if row.lower_account is None else row.lower_account
    return found


def _verdict(row: Any) -> str:
    return "[bold red]broken[/]" if row.broken else "[green]holds[/]"


def _tell(found: list[Any]) -> None:
    first = found[0]
    runs = f"{first.canaries:,} canaries in one run" if hasattr(first, "canaries") else f"{first.runs:,} runs a world"
    console().print(f"lower bounds at {first.confidence:.0%} confidence, δ = {first.delta:g}, {runs}, {first.dtype}")
    if first.noise_factor != 1:
        console().print(
            f"the noise was multiplied by {first.noise_factor:g} on purpose, and the certificate was not told"
        )
    for row in found:
        if row.broken:
            console().print(
                f"[bold red]the guarantee is broken[/]: {row.method}, {row.unit} level, {row.adjacency}, {row.trust}: "
                f"certified ε = {row.certified:.4g}, and ε is above {row.lower:.4g}"
            )
