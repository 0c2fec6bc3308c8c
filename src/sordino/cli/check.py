"""`sordino check`: the contracts of a method, tried."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sordino.cli.show import add_json, bar, check_json, command, console, emit, marked, table
from sordino.errors import SordinoError

if TYPE_CHECKING:
    from sordino.checks import Report

CAPTION = (
    "claimed: how far one record or client may move the answer; found: the largest part of that which a search "
    "reached, at most 100 % for a true claim; engines: the largest difference between the two engines"
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "check",
        act,
        "try to break a method's guarantee",
        "sordino check dp-fedsofim\nsordino check mlp hazards\nsordino check evaluation\n"
        "sordino check --all --json checks.json\nsordino check --sums --device cuda\n"
        "sordino check --fuzz 60 --seed 1                     random plans and neighbours for a minute\n"
        "sordino check --fuzz 60 --seed 1 --case 17           one of these cases again",
    )
    parser.add_argument(
        "method",
        nargs="*",
        metavar="METHOD",
        help="methods (see 'sordino methods'), models, adapters, calibrate, clipping, sequences, streams, evaluation, "
        "statistics",
    )
    parser.add_argument("--all", action="store_true", help="check every method, the survival model, and all sums")
    parser.add_argument("--sums", action="store_true", help="check only the sums: float32, up to a million records")
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="where the sums are computed: cpu or cuda (default: cpu)"
    )
    parser.add_argument(
        "--fuzz", type=float, metavar="SECONDS", help="try random methods, options, data and neighbours for so long"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of --fuzz (default: 0)")
    parser.add_argument(
        "--shape", metavar="F,C", help="of models: features and classes to build it with (default: small ones)"
    )
    parser.add_argument("--case", type=int, metavar="K", help="of --fuzz: only the case of this number")
    add_json(parser)


def _fuzz(arguments: argparse.Namespace) -> int:
    """Random cases for a time budget, or one of them again."""
    from sordino.checks.fuzz import fuzz

    if arguments.method or arguments.all or arguments.sums:
        raise SordinoError("--fuzz: it draws methods by chance; leave methods, --all and --sums out.")
    if not arguments.fuzz > 0:
        raise SordinoError(f"--fuzz: {arguments.fuzz:g} seconds must be more than 0.")
    if arguments.seed < 0 or (arguments.case is not None and arguments.case < 0):
        raise SordinoError("--seed, --case: they must be at least 0.")
    only = {} if arguments.case is None else {"first": arguments.case, "most": 1}
    with bar("pairs of neighbours") as progress:
        found = fuzz(arguments.fuzz, seed=arguments.seed, tick=progress, **only)
    violations = [each._asdict() for each in found.violations]
    if not emit(arguments, {**found._asdict(), "violations": violations}):
        page = console()
        page.print(
            f"{found.pairs:,} pairs of neighbours in {found.cases:,} cases, {found.refused:,} of which are refused; "
            f"the furthest moved a release by {found.worst:.6f} of its claim"
        )
        for each in found.violations:
            page.print(
                f"[bold red]violation[/] --seed {each.seed} --case {each.case}, pair {each.pair}: query {each.query}, "
                f"{'infinite' if each.ratio is None else f'{each.ratio:.6g}'} of the claim: {each.where}"
            )
        page.print("[green]no violation[/]" if not found.violations else f"{len(found.violations)} violations")
    return 1 if found.violations else 0


def _shape(text: str) -> tuple[int, int]:
    features, _, classes = text.partition(",")
    if not (features.isdecimal() and classes.isdecimal() and int(features)):
        raise SordinoError(f"--shape: '{text}' must be the numbers of features and of classes, as in 784,10.")
    return int(features), int(classes)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, Sequence[Any]], None]]:
    """Call it with a name and its reports after each check: a bar on stderr, or one line each without a terminal."""
    if sys.stderr.isatty():
        with bar("checking", total) as progress:
            yield lambda name, reports: progress()
        return
    numbers = itertools.count(1)

    def tell(name: str, reports: Sequence[Any]) -> None:
        outcome = "passed" if all(report.passed for report in reports) else "failed"
        line = f"{time.strftime('%H:%M:%S')}  {next(numbers)} of {total}  {name}: {outcome}"
        print(line, file=sys.stderr, flush=True)

    yield tell


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    if arguments.fuzz is not None:
        return _fuzz(arguments)
    if arguments.case is not None:
        raise SordinoError("--case: it names a case of --fuzz; give --fuzz SECONDS too.")
    from sordino import checks, methods, plugins
    from sordino.checks.suites import SEQUENCES, SUITES
    from sordino.checks.tallies import tallies
    from sordino.data.records import check_device
    from sordino.models import registry

    own = {name: plugins.allow(name) for name in arguments.method if ":" in name}
    outside = plugins.found(plugins.MODELS) | plugins.found(plugins.METHODS) | own
    counted = tallies()
    names = [*methods.REGISTRY, *SUITES, "hazards", *counted, *outside] if arguments.all else arguments.method
    if not names and not arguments.sums:
        raise SordinoError("check: name a method, or use --all.")
    check_device(arguments.device)
    known = {*methods.REGISTRY, *plugins.found(plugins.METHODS)}  # "auto" is a method and a model: the method is meant
    models = {*registry.REGISTRY, *plugins.found(plugins.MODELS), *own} - known
    shapes = None if arguments.shape is None else [_shape(arguments.shape)]
    for name in names:
        if name not in counted and name not in SUITES:
            registry.entry(name) if name in models else methods.entry(name)
    causal = [name for name, model in registry.REGISTRY.items() if model.causal]
    by_name: dict[str, Callable[[str], list[Report]]] = {
        **dict.fromkeys(models, partial(checks.check_model, shapes=shapes)),
        **SUITES,
        **dict.fromkeys(causal, SUITES[SEQUENCES]),
        **dict.fromkeys(counted, checks.check_tally),
    }
    sums = arguments.all or arguments.sums
    reports: list[Report] = []
    with _progress(len(names) + sums) as finished:
        if sums:
            reports += checks.check_sums(device=arguments.device)
            finished("sums", reports)
        for name in names:
            results = by_name.get(name, checks.check)(name)
            reports += results
            if name in outside:
                plugins.remember(outside[name], ok=all(report.passed for report in results))
            finished(name, results)
    if not emit(arguments, [report._asdict() for report in reports]):
        _show(reports)
    return 0 if all(report.passed for report in reports) else 1


def _show(reports: Sequence[Report]) -> None:
    table(
        ("method", "unit", "adjacency", "query", "claimed", "found", "engines", ""),
        [
            (
                r.name,
                r.unit,
                r.adjacency,
                r.query.lstrip("0123456789. "),
                f"{r.claimed:.4g}",
                f"{r.worst_found / r.claimed:.2%}" if r.claimed else "",
                f"{r.engines_max_diff:.0e}",
                marked("[green]passed[/]" if r.passed else "[red]failed[/]"),
            )
            for r in reports
        ],
    )
    console().print(CAPTION)
    for report in reports:
        for problem in report.problems:
            console().print(f"{report.name} ({report.unit}, {report.adjacency}): {problem}", markup=False)
