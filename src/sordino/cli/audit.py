"""`sordino audit`: lower bounds on epsilon by attack, held against the certified one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sordino.cli.show import (
    add_json,
    bar,
    check_json,
    command,
    console,
    emit,
    marked,
    plain,
    say,
    table,
    waiting,
)
from sordino.core import Adjacency, Method, Privacy, Trust, Unit
from sordino.errors import SordinoError

ABOUT = """
The audit runs the method many times on two neighbouring data sets, which differ in one record (or one whole client):
the canary, which is made so that its influence on the releases is as large as possible. An adversary who knows
everything but the noise guesses, after each run, which of the two data sets it saw. Its error rate gives a lower bound
on epsilon that holds with 95 % confidence.

Columns of the table:
  by account     lower bound that assumes the form of the releases that the certificate states: mu-Gaussian DP, or
                 Gaussian releases of minibatches
  by thresholds  lower bound that assumes nothing; it is loose at small delta
  reach          mu that the canary reaches, as a share of the certified mu
  least claim    the same share for the query whose bound is reached least, each with its best canary

If a lower bound lies above the certified epsilon, the audit repeats it twice with fresh noise. If it stays above, the
guarantee is broken and the exit status is 1.

Given the folder of a finished run, the audit repeats that run on its own data, many times, with and without a change of
one record; here the canary is a real record with a wrong label. One attacker sees the final model, one sees every
model. The results are statements about these two attacks, not about privacy in general, and they are not differentially
private: they are as confidential as the records. They go into the run's private/ (audit.json, audit.png).
"""
SAMPLED = "dp-fedgd"
BATCHES = {SAMPLED: ("poisson:4", "fixed:4", "allocation:4"), "dp-fednew": ("poisson:20",)}  # that --all adds
AUDIT_DTYPES = ("float32", "float64")
# Calibrated intercepts and slope: a quarter of the budget each, so that all is seen, and a clip that gradients reach.
CALIBRATE, CALIBRATION_SHARE, CALIBRATION_CLIP = "calibrate", 0.25, 0.05
INTEGERS = "integers"  # discrete noise under secure aggregation
ADAPTIVE = ("dp-fedgd quantile=0.5", {"quantile": 0.5})  # an adaptive clip, which --all adds
CLIPPINGS = ("per-layer", "automatic")  # laws of clipping of networks, which --all adds
# Forms for networks that --all adds, at record level: options and minibatches, by method.
NETWORKS: dict[str, tuple[dict[str, Any], str]] = {
    "auto": ({"network": True, "minibatches": 5}, "poisson:4"),
    "dp-fednew": ({"curvature": "fisher"}, "full"),
}


CAPTION = (
    "reach: mu that the attack achieves over the certified mu, 100 % where no attack can be stronger; least claim: the "
    "same for the query whose bound the attack reaches least"
)
ONE_RUN_CAPTION = (
    "by any DP: lower bound that assumes only (ε, δ)-DP; by Gaussian DP, which the certificate claims: the ε of the "
    "largest mu that the guesses refute"
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
        "sordino audit runs/auto-20260101-120000              a finished run: what its models reveal of one record\n"
        "sordino audit integers                               discrete noise under secure aggregation\n"
        "sordino audit --all --json audit.json",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument(
        "method",
        nargs="*",
        metavar="METHOD|RUN_DIR",
        help="names from 'sordino methods', calibrate, integers, evaluation, statistics; or the folder of a run",
    )
    parser.add_argument("--all", action="store_true", help="audit every method")
    parser.add_argument(
        "--epsilon", type=float, default=1.0, metavar="E", help="epsilon to certify and attack (default: 1)"
    )
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of the guarantee (default: 1e-5)")
    parser.add_argument("--unit", metavar="X", help=f"{', '.join(Unit)} (default: every unit of the method)")
    parser.add_argument("--adjacency", metavar="X", help=f"{', '.join(Adjacency)} (default: both)")
    parser.add_argument(
        "--trust", metavar="X", help=f"{', '.join(Trust)} (default: the first that is proved; --all adds sums)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="runs per data set (default: 20000 or more, by method; of a finished run up to 500, as many as five "
        "minutes allow, but 50 at least, however long they take); with --one-run: canaries",
    )
    parser.add_argument("--rounds", type=int, metavar="T", help="number of rounds (default: up to 5)")
    parser.add_argument(
        "--batch",
        metavar="X",
        help="minibatches: poisson:16, fixed:16, allocation:16 (default: full; --all adds some)",
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
    if any(map(is_folder, arguments.method)):
        return _act_on_a_run(arguments)
    for name in arguments.method:
        if Path(name).name != name:
            raise SordinoError(f"audit: there is no folder '{name}'; name that of a finished run, or a method.")
    jobs = list(_jobs(arguments))
    if not jobs:
        raise SordinoError("audit: no method is certified for these options; change --batch, --unit or --adjacency.")
    rows: list[Any] = []
    runs = 1 if arguments.one_run else 2 * runs_of(arguments)
    with bar("auditing", len(jobs) * runs) as progress:
        for number, job in enumerate(jobs):
            progress.update(shown=f"row {number + 1} of {len(jobs)}, {job.args[0]}")
            rows.append(job() if arguments.one_run else job(tick=progress))
            if arguments.json not in (None, "-"):  # `--all` takes long: what is done must not be lost
                emit(arguments, _documents(rows))
            progress.update(completed=(number + 1) * runs)  # a bound that is estimated again takes more runs
    if not emit(arguments, _documents(rows)):
        (_one_run_table if arguments.one_run else _table)(rows)
        _tell(rows)
    return 1 if any(each.broken for each in rows) else 0


def runs_of(arguments: argparse.Namespace) -> int:
    """Runs per data set."""
    from sordino.checks.audit import attacks

    return attacks.RUNS if arguments.runs is None else int(arguments.runs)


def is_folder(name: str) -> bool:
    """Whether a word names a folder, and no method."""
    from sordino.methods import REGISTRY

    return name not in REGISTRY and Path(name).is_dir()


FOR_METHODS = (
    "all",
    "one_run",
    "unit",
    "adjacency",
    "trust",
    "rounds",
    "batch",
    "set",
)  # flags that a run fixes itself


def _act_on_a_run(arguments: argparse.Namespace) -> int:
    """Audit a finished run on its own data."""
    import json

    from sordino import files
    from sordino.checks.audit.attacks import check_arguments
    from sordino.studies import black_box, black_box_picture
    from sordino.training.folder import RunFolder
    from sordino.training.run import prepare, reopen

    if len(arguments.method) > 1:
        raise SordinoError("audit: name one folder of a run, and nothing else.")
    for name in FOR_METHODS:
        if getattr(arguments, name):
            flag = name.replace("_", "-")
            raise SordinoError(f"--{flag}: a finished run is audited with its own settings; leave --{flag} out.")
    out = Path(arguments.method[0])
    folder = RunFolder.find(out)
    if not (folder.public / "certificate.json").is_file():
        raise missing_certificate(folder)
    run = prepare(reopen(out))
    if arguments.runs is not None:
        check_arguments("runs", arguments.runs, arguments.noise_factor, arguments.seed)
    with waiting("estimating the time"):
        pace = black_box.measure(run)
    runs = pace.runs() if arguments.runs is None else arguments.runs
    say(_effort(pace, runs, run.plan.rounds, asked=arguments.runs is not None), aside=True)
    # The time depends on the records, and so do all figures of this command: it is for their owner alone.
    with bar("repeating the run", black_box.steps(runs), timed=True, left=True) as progress:
        result = black_box.attack(
            run, runs=runs, noise_factor=arguments.noise_factor, seed=arguments.seed, tick=_Repeated(progress, runs)
        )
    document = result.document()
    files.write(folder.private / "audit.json", (json.dumps(plain(document), indent=2) + "\n").encode())
    drawn = black_box_picture.draw(result, folder.private / "audit.png")
    if not emit(arguments, document):
        _tell_of_a_run(result, folder.private, drawn)
    return 1 if result.broken else 0


class _Repeated:
    """Counts the runs of an audit on its bar, which grows where a bound is estimated again."""

    def __init__(self, progress: Any, runs: int) -> None:
        from sordino.studies import black_box

        self._progress, self._done, self._per_try = progress, 0, black_box.steps(runs)

    def __call__(self, runs: int) -> None:
        if self._done and self._done % self._per_try == 0:
            again = "a bound is above the certified ε: once more, with fresh noise"
            self._progress.update(total=self._done + self._per_try, shown=again)
        self._done += runs
        self._progress(runs)


def _effort(pace: Any, runs: int, rounds: int, *, asked: bool) -> str:
    """What the audit of a run is going to do, and how long it takes."""
    from sordino.studies import black_box

    each = f"{rounds:,} {'round' if rounds == 1 else 'rounds'} each"
    line = (
        f"repeats the run {black_box.steps(runs):,} times, {each}: {runs:,} per data set for the bounds, "
        f"{black_box.pilot_runs(runs)} for the attackers to learn the noise from; this takes "
        f"{about(pace.seconds(runs))}"
    )
    if asked or runs == black_box.RUNS:
        return line
    if pace.seconds(runs) > black_box.SECONDS:
        line += f". That is more than five minutes, because fewer than {runs} per data set give hardly a bound"
    full = black_box.RUNS
    return f"{line}. More are sharper: --runs {full} takes {about(pace.seconds(full))}"


def about(seconds: float) -> str:
    """A time in words: 'about 4 minutes'."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        return f"about {max(2, round(seconds / 60))} minutes"
    return f"about {max(2, round(seconds / 3600))} hours"


def missing_certificate(folder: Any) -> SordinoError:
    """The error for a folder that holds no finished run."""
    from sordino.training.folder import missing

    return missing(folder.public / "certificate.json", "audit")


def _tell_of_a_run(result: Any, private: Path, drawn: bool) -> None:
    page = console()
    table(
        ("attacker sees", "right guesses", "allowed", "AUC", "certified ε", "by thresholds", "under Gaussian DP", ""),
        [
            (
                *(each.sees, f"{each.right:.1%}", f"{result.guess:.1%}", f"{each.auc:.3f}", f"{result.certified:.4g}"),
                f"{each.lower_thresholds:.3f}",
                "" if each.lower_gaussian is None else f"{each.lower_gaussian:.3f}",
                _verdict(result),
            )
            for each in result.attackers
        ],
    )
    page.print(
        f"lower bounds on ε at {result.confidence:.0%} confidence, δ = {result.delta:g}, {result.runs:,} runs per data "
        f"set; canary: {result.canary}",
        markup=False,
    )
    if result.noise_factor != 1:
        page.print(f"the noise was multiplied by {result.noise_factor:g} on purpose; the certificate does not know it")
    page.print(
        "These are results of two attacks on one canary. They say nothing about other attacks or other records: only "
        "the certificate does."
    )
    page.print(
        "They are computed from the records without protection: as confidential as the records, for their owner alone."
    )
    page.print(f"files  {private / 'audit.json'}{', audit.png' if drawn else ''}: must not be published", markup=False)


def _documents(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**each._asdict(), "broken": each.broken} for each in rows]


def _jobs(arguments: argparse.Namespace) -> Iterator[partial[Any]]:
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
    attacks.check_arguments(counted, runs_of(arguments), arguments.noise_factor, arguments.seed)
    options = {counted: arguments.runs, "rounds": arguments.rounds, "seed": arguments.seed}
    rest = {key: value for key, value in options.items() if value is not None} | {
        "noise_factor": arguments.noise_factor
    }
    rest["dtype"] = getattr(torch, arguments.dtype)
    if arguments.all and not arguments.one_run and not arguments.batch:
        names += [CALIBRATE, INTEGERS, *tallies()]
    for name in names:
        if name == CALIBRATE:
            yield from _calibration_jobs(arguments, rest)
            continue
        if name == INTEGERS:
            yield from _integer_jobs(arguments, rest)
            continue
        if name in tallies():
            yield from _tally_jobs(arguments, name, rest)
            continue
        for privacy, method in _targets(arguments, name):
            for batch in _batches(arguments, name, privacy, method):
                attacks.plan_for(name, privacy, rounds=arguments.rounds, method=method, batch=batch)
                how = rest if arguments.one_run else rest | {"batch": batch}
                yield partial(call, name, privacy, method=method, **how)
        if arguments.all and not arguments.one_run and not arguments.batch:
            if name == SAMPLED:
                yield from _adaptive_jobs(arguments, rest)
                yield from _clipping_jobs(arguments, rest)
                yield from _adapter_jobs(arguments, rest)
            if name in NETWORKS:
                yield from _network_jobs(arguments, name, rest)


def _tally_jobs(arguments: argparse.Namespace, name: str, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of a release that trains nothing, such as an evaluation."""
    from sordino.checks.audit import tallies as attack
    from sordino.checks.tallies import tallies
    from sordino.methods.tally import UNITS

    if arguments.one_run or arguments.batch or arguments.set or arguments.rounds:
        raise SordinoError(
            f"audit: {name} is one release of all records; leave --one-run, --batch, --set, --rounds out."
        )
    options = {key: value for key, value in rest.items() if key != "dtype"}
    for privacy in _promises(arguments, name, UNITS):
        yield partial(attack.audit, name, tallies()[name], privacy, **options)


def _adaptive_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of DP-FedGD with a clip that follows a quantile of the gradients' norms."""
    from sordino.checks.audit import attacks
    from sordino.methods import build

    label, options = ADAPTIVE
    for privacy, _ in _targets(arguments, SAMPLED):
        if privacy.unit is not Unit.CLIENT:
            yield partial(attacks.audit, label, privacy, method=build(SAMPLED, privacy.unit, **options), **rest)


def _clipping_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of DP-FedGD on a network with other laws of clipping, of records and against an untrusted server."""
    from sordino.checks.audit import attacks
    from sordino.core import Clipping
    from sordino.methods.clipping import with_clipping
    from sordino.privacy.participation import FULL

    for law in CLIPPINGS:
        for privacy, method in _targets(arguments, SAMPLED):
            if privacy.unit is Unit.RECORD and privacy.trust is Trust.UNTRUSTED_SERVER:
                method, label = with_clipping(method, Clipping.parse(law)), f"{SAMPLED} clipping={law}"
                yield partial(attacks.audit, label, privacy, method=method, **rest | {"batch": FULL})


def _adapter_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of DP-FedGD on low-rank adapters, of records and against an untrusted server."""
    from sordino.checks.audit import adapters
    from sordino.models.pretrained import LORA_VARIANTS

    for variant in LORA_VARIANTS:
        for privacy, _ in _targets(arguments, SAMPLED):
            if privacy.unit is Unit.RECORD and privacy.trust is Trust.UNTRUSTED_SERVER:
                yield partial(adapters.audit, variant, privacy, **rest)


def _network_jobs(arguments: argparse.Namespace, name: str, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of a form for networks, of records and against an untrusted server."""
    from sordino.checks.audit import attacks
    from sordino.methods import build

    options, batch = NETWORKS[name]
    shown = {key: str(value).lower() for key, value in options.items()}
    label = " ".join([name, *(f"{key}={value}" for key, value in shown.items())])
    for privacy, _ in _targets(arguments, name):
        if privacy.unit is Unit.RECORD and privacy.trust is Trust.UNTRUSTED_SERVER:
            method = build(name, privacy.unit, **options)
            yield partial(attacks.audit, label, privacy, method=method, **rest | {"batch": batch})


def _integer_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of DP-FedGD as sums of integers."""
    from sordino.checks.audit import integers

    if arguments.one_run or arguments.batch or arguments.set or arguments.rounds:
        raise SordinoError(
            f"audit: {INTEGERS} is one round of dp-fedgd; leave --one-run, --batch, --set, --rounds out."
        )
    if arguments.trust not in (None, Trust.SECURE_AGGREGATION):
        raise SordinoError(f"trust: sums of integers need secure-aggregation; leave --trust {arguments.trust} out.")
    options = {key: value for key, value in rest.items() if key != "dtype"}
    for privacy in _promises(arguments, INTEGERS, tuple(Unit)):
        yield partial(integers.audit, f"{integers.METHOD} {INTEGERS}", privacy, **options)


def _calibration_jobs(arguments: argparse.Namespace, rest: dict[str, Any]) -> Iterator[partial[Any]]:
    """Audits of DP-FedGD with calibrated intercepts and slope, on a model of two classes."""
    from sordino.checks.audit import attacks
    from sordino.methods import entry
    from sordino.methods.calibration import calibrated
    from sordino.methods.tally import UNITS

    if arguments.one_run or arguments.batch or arguments.set:
        raise SordinoError(f"audit: {CALIBRATE} is attacked with all records; leave --one-run, --batch, --set out.")
    for privacy in _promises(arguments, CALIBRATE, UNITS):
        shares = CALIBRATION_SHARE, CALIBRATION_SHARE
        method = calibrated(entry(SAMPLED).at(privacy.unit, clip=CALIBRATION_CLIP), *shares)
        yield partial(attacks.audit, CALIBRATE, privacy, method=method, **rest)


def _promises(arguments: argparse.Namespace, name: str, units: Sequence[Unit]) -> Iterator[Privacy]:
    """The promises asked for: of the named unit and adjacency, or of all that there are."""
    chosen = {"trust": arguments.trust} if arguments.trust else {}
    for unit in [arguments.unit] if arguments.unit else units:
        for adjacency in [arguments.adjacency] if arguments.adjacency else Adjacency:
            privacy = Privacy(arguments.epsilon, arguments.delta, unit=unit, adjacency=adjacency, **chosen)
            if privacy.unit not in units:
                raise SordinoError(f"unit: {name} protects records and persons, not a {unit}; leave --unit out.")
            yield privacy


def _batches(arguments: argparse.Namespace, name: str, privacy: Privacy, method: Method) -> list[str]:
    """The minibatches asked for; --all leaves out what is not certified or not audited."""
    from sordino.checks.audit.attacks import unattacked
    from sordino.privacy.participation import FULL, Sampling

    asked = [arguments.batch or FULL]
    if not arguments.all:
        return asked
    first = privacy.trust is Trust.UNTRUSTED_SERVER or bool(arguments.trust)
    if first and not arguments.batch and not arguments.one_run:
        asked += BATCHES.get(name, ())
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
        trusts = [asked.trust] if arguments.trust else (proved or list(Trust))[:1]
        if arguments.all and not arguments.trust and not arguments.one_run:  # a trusted server sees the same sums
            trusts += [Trust.SECURE_AGGREGATION] * (Trust.SECURE_AGGREGATION in proved[1:])
        for trust in trusts:
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
    columns = ("method", "unit", "adjacency", "trust", "certified ε", "by any DP", "right", "by Gaussian DP", "right")
    table(
        (*columns, "canaries", ""),
        [
            (
                *(r.method, r.unit, r.adjacency, r.trust, f"{r.certified:.4g}"),
                *(f"{r.lower_dp:.3f}", f"{r.right} of {r.guesses}"),
                *(f"{r.lower_gaussian:.3f}", f"{r.right_gaussian} of {r.guesses_gaussian}"),
                str(r.canaries),
                _verdict(r),
            )
            for r in rows
        ],
    )


def _by_account(row: Any) -> float:
    bound: float = row.lower_gaussian if row.lower_account is None else row.lower_account
    return bound


def _verdict(row: Any) -> Any:
    return marked("[bold red]broken[/]" if row.broken else "[green]holds[/]")


def _tell(rows: list[Any]) -> None:
    first = rows[0]
    console().print(ONE_RUN_CAPTION if hasattr(first, "canaries") else CAPTION)
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
