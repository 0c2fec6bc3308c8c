"""`sordino audit`: lower bounds on epsilon by attack, held against the certified one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sordino.cli.show import add_json, bar, check_json, command, console, emit, table
from sordino.core import Adjacency, Method, Privacy, Trust, Unit
from sordino.errors import SordinoError

ABOUT = """
The audit runs the method many times on two neighbouring data sets, which differ in one record (or one whole client). An
adversary who knows everything but the noise guesses, after each run, which of the two it saw. Its error rate gives a
lower bound on epsilon that holds with 95 % confidence.

Columns of the table:
  by account     lower bound that assumes the form of the releases that the certificate states: mu-Gaussian DP, or
                 Gaussian releases of minibatches
  by thresholds  lower bound that assumes nothing; it is loose at small delta
  reach          mu that the canary reaches, as a share of the certified mu
  least claim    the same share for the query whose bound is reached least, each with its best canary

If a lower bound lies above the certified epsilon, the audit repeats it twice with fresh noise. If it stays above, the
guarantee is broken and the exit status is 1.
"""
SAMPLED, BATCHES = "dp-fedgd", ("poisson:4", "fixed:4")  # audits with minibatches that --all adds
AUDIT_DTYPES = ("float32", "float64")
# Calibrated intercepts and slope: a quarter of the budget each, so that all is seen, and a clip that gradients reach.
CALIBRATE, CALIBRATION_SHARE, CALIBRATION_CLIP = "calibrate", 0.25, 0.05


CAPTION = (
    "reach: mu that the attack achieves over the certified mu, 100 % where no attack can be stronger; least claim: the "
    "same for the query whose bound the attack reaches least"
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "audit",
        act,
        "attack a method, for a lower bound on epsilon",
        "sordino audit dp-fedgd\n"
        "sordino audit dp-fedgd --noise-factor 0.5            half the noise: the attack must win\n"
        "sordino audit dp-fedavg --set steps=3 --epsilon 4 --adjacency add-remove\n"
        "sordino audit dp-fedgd --batch poisson:4             minibatches\n"
        "sordino audit dp-fedgd --one-run                     one run, thousands of canaries\n"
        "sordino audit evaluation --trust secure-aggregation  the noised counts of a private evaluation\n"
        "sordino audit --all --json results/audit.json",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument(
        "method", nargs="*", metavar="METHOD", help="names from 'sordino methods', calibrate, evaluation, statistics"
    )
    parser.add_argument("--all", action="store_true", help="audit every method")
    parser.add_argument(
        "--epsilon", type=float, default=1.0, metavar="E", help="epsilon to certify and attack (default: 1)"
    )
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of the guarantee (default: 1e-5)")
    parser.add_argument("--unit", metavar="X", help=f"{', '.join(Unit)} (default: every unit of the method)")
    parser.add_argument("--adjacency", metavar="X", help=f"{', '.join(Adjacency)} (default: both)")
    parser.add_argument("--trust", metavar="X", help=f"{', '.join(Trust)} (default: the first that is proved)")
    parser.add_argument(
        "--runs", type=int, metavar="N", help="runs per data set (default: 10000); with --one-run: canaries"
    )
    parser.add_argument("--rounds", type=int, metavar="T", help="number of rounds (default: up to 5)")
    parser.add_argument(
        "--batch",
        metavar="X",
        help="minibatches: poisson:16, fixed:16 (default: full; --all adds poisson:4 and fixed:4 of dp-fedgd)",
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="X", help="arithmetic of the runs: float32 (default) or float64"
    )
    parser.add_argument("--one-run", action="store_true", help="many canaries in one run (record level; default: 2000)")
    parser.add_argument(
        "--noise-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="multiply the noise but not the certificate, to test the audit",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the method")
    parser.add_argument("--seed", type=int, help="reproducible noise (default: secret noise, as in a real run)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    jobs = list(_jobs(arguments))
    if not jobs:
        raise SordinoError("audit: no method is certified for these options; change --batch, --unit or --adjacency.")
    rows: list[Any] = []
    with bar("auditing", len(jobs)) as progress:
        for job in jobs:
            rows.append(job())
            if arguments.json not in (None, "-"):  # `--all` takes an hour: what is done must not be lost
                emit(arguments, _documents(rows))
            progress()
    if not emit(arguments, _documents(rows)):
        (_one_run_table if arguments.one_run else _table)(rows)
        _tell(rows)
    return 1 if any(each.broken for each in rows) else 0


def _documents(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**each._asdict(), "broken": each.broken} for each in rows]


def _jobs(arguments: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    """All requested audits. Their arguments are checked before the first one runs."""
    import torch

    from sordino.checks.audit import attacks
    from sordino.checks.tallies import tallies
    from sordino.methods import REGISTRY

    names = list(REGISTRY) if arguments.all else arguments.method
    if not names:
        raise SordinoError("audit: name a method, or use --all.")
    if arguments.dtype not in AUDIT_DTYPES:
        raise SordinoError(f"dtype: '{arguments.dtype}' is unknown; use {' or '.join(AUDIT_DTYPES)}.")
    if arguments.one_run and arguments.batch:
        raise SordinoError("batch: an audit in one run uses all records; leave out --batch.")
    call, counted = (attacks.one_run, "canaries") if arguments.one_run else (attacks.audit, "runs")
    count = attacks.RUNS if arguments.runs is None else arguments.runs
    attacks.check_arguments(counted, count, arguments.noise_factor, arguments.seed)
    options = {counted: arguments.runs, "rounds": arguments.rounds, "seed": arguments.seed}
    rest = {key: value for key, value in options.items() if value is not None} | {
        "noise_factor": arguments.noise_factor
    }
    rest["dtype"] = getattr(torch, arguments.dtype)
    if arguments.all and not arguments.one_run and not arguments.batch:
        names += [CALIBRATE, *tallies()]
    for name in names:
        if name == CALIBRATE:
            yield from _calibration_jobs(arguments, rest)
            continue
        if name in tallies():
            yield from _tally_jobs(arguments, name, rest)
            continue
        for privacy, method in _targets(arguments, name):
            for batch in _batches(arguments, name, privacy, method):
                attacks.plan_for(name, privacy, rounds=arguments.rounds, method=method, batch=batch)
                how = rest if arguments.one_run else rest | {"batch": batch}
                yield partial(call, name, privacy, method=method, **how)


def _tally_jobs(arguments: argparse.Namespace, name: str, rest: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Audits of a release that trains nothing, such as an evaluation."""
    from sordino.checks.audit import tallies as attack
    from sordino.checks.tallies import tallies
    from sordino.methods.tally import UNITS

    if arguments.one_run or arguments.batch or arguments.set or arguments.rounds:
        raise SordinoError(
            f"audit: {name} is one release of all records; leave --one-run, --batch, --set, --rounds out."
        )
    chosen = {"trust": arguments.trust} if arguments.trust else {}
    options = {key: value for key, value in rest.items() if key != "dtype"}
    for unit in [arguments.unit] if arguments.unit else UNITS:
        for adjacency in [arguments.adjacency] if arguments.adjacency else Adjacency:
            privacy = Privacy(arguments.epsilon, arguments.delta, unit=unit, adjacency=adjacency, **chosen)
            if privacy.unit not in UNITS:
                raise SordinoError(f"unit: {name} protects records and persons, not a {unit}; leave --unit out.")
            yield partial(attack.audit, name, tallies()[name], privacy, **options)


def _calibration_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Audits of DP-FedGD with calibrated intercepts and slope, on a model of two classes."""
    from sordino.checks.audit import attacks
    from sordino.methods import entry
    from sordino.methods.calibration import calibrated
    from sordino.methods.tally import UNITS

    if arguments.one_run or arguments.batch or arguments.set:
        raise SordinoError(f"audit: {CALIBRATE} is attacked with all records; leave --one-run, --batch, --set out.")
    chosen = {"trust": arguments.trust} if arguments.trust else {}
    for unit in [arguments.unit] if arguments.unit else UNITS:
        for adjacency in [arguments.adjacency] if arguments.adjacency else Adjacency:
            privacy = Privacy(arguments.epsilon, arguments.delta, unit=unit, adjacency=adjacency, **chosen)
            if privacy.unit not in UNITS:
                raise SordinoError(f"unit: {CALIBRATE} protects records and persons, not a {unit}; leave --unit out.")
            shares = CALIBRATION_SHARE, CALIBRATION_SHARE
            method = calibrated(entry(SAMPLED).at(privacy.unit, clip=CALIBRATION_CLIP), *shares)
            yield partial(attacks.audit, CALIBRATE, privacy, method=method, **rest)


def _batches(arguments: argparse.Namespace, name: str, privacy: Privacy, method: Method) -> list[str]:
    """The minibatches asked for; --all leaves out what is not certified or not audited."""
    from sordino.checks.audit.attacks import unattacked
    from sordino.privacy.participation import FULL, Sampling

    asked = [arguments.batch or FULL]
    if not arguments.all:
        return asked
    if name == SAMPLED and not arguments.batch and not arguments.one_run:
        asked += BATCHES
    return [batch for batch in asked if not unattacked(method, Sampling.parse(batch))]


def _targets(arguments: argparse.Namespace, name: str) -> Iterator[tuple[Privacy, Method]]:
    """Units and adjacencies, against the strongest adversary that is proved against. --all leaves out the unproved."""
    from sordino.methods import build, entry
    from sordino.settings import parse_setting

    chosen = {key: getattr(arguments, key) for key in ("unit", "adjacency", "trust") if getattr(arguments, key)}
    asked = Privacy(arguments.epsilon, arguments.delta, **chosen)
    if arguments.one_run and asked.unit is not Unit.RECORD:
        raise SordinoError(f"unit: an audit in one run hides many records in a client; leave --unit {asked.unit} away.")
    units = [asked.unit] if arguments.unit or arguments.one_run else list(entry(name).protects)
    for unit in units if not arguments.all else [unit for unit in units if unit in entry(name).protects]:
        method = build(name, unit, **_options(name, dict(map(parse_setting, arguments.set))))
        proved = [trust for trust in Trust if (unit, trust) in method.proves]
        trust = asked.trust if arguments.trust else (proved or list(Trust))[0]
        if arguments.all and trust not in proved:
            continue
        for adjacency in [asked.adjacency] if arguments.adjacency else Adjacency:
            yield replace(asked, unit=unit, adjacency=adjacency, trust=trust), method


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a method, parsed as a run parses them. `build` refuses unknown ones."""
    from sordino.methods import entry
    from sordino.training.spec import Spec

    known = {key: value for key, value in options.items() if key in entry(name).options}
    return options | Spec.of({"method": name, **known}).options


def _table(rows: list[Any]) -> None:
    columns = ("method", "unit", "adjacency", "trust", "batch", "certified ε", "by thresholds", "by account", "reach")
    table(
        (*columns, "least claim", ""),
        [
            (
                *(r.method, r.unit, r.adjacency, r.trust, r.batch, f"{r.certified:.4g}"),
                *(f"{r.lower_thresholds:.3f}", f"{_by_account(r):.3f}", f"{r.reach:.1%}", f"{r.least_claim:.1%}"),
                _verdict(r),
            )
            for r in rows
        ],
    )


def _one_run_table(rows: list[Any]) -> None:
    columns = ("method", "unit", "adjacency", "trust", "certified ε", "lower bound", "right guesses", "canaries", "")
    table(
        columns,
        [
            (
                *(r.method, r.unit, r.adjacency, r.trust, f"{r.certified:.4g}"),
                *(f"{r.lower:.3f}", f"{r.right} of {r.guesses}", str(r.canaries)),
                _verdict(r),
            )
            for r in rows
        ],
    )


def _by_account(row: Any) -> float:
    bound: float = row.lower_gaussian if row.lower_account is None else row.lower_account
    return bound


def _verdict(row: Any) -> str:
    return "[bold red]broken[/]" if row.broken else "[green]holds[/]"


def _tell(rows: list[Any]) -> None:
    first = rows[0]
    if not hasattr(first, "canaries"):
        console().print(CAPTION)
    runs = (
        f"{first.canaries:,} canaries in one run" if hasattr(first, "canaries") else f"{first.runs:,} runs per data set"
    )
    console().print(f"lower bounds at {first.confidence:.0%} confidence, δ = {first.delta:g}, {runs}, {first.dtype}")
    if first.noise_factor != 1:
        console().print(
            f"the noise was multiplied by {first.noise_factor:g} on purpose; the certificate does not know it"
        )
    for row in rows:
        if row.broken:
            console().print(
                f"[bold red]the guarantee is broken[/]: {row.method}, {row.unit} level, {row.adjacency}, {row.trust}: "
                f"certified ε = {row.certified:.4g}, and ε is above {row.lower:.4g}"
            )
