"""The command line. Results go to stdout, progress to stderr; a user's mistake gets one line, not a traceback."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.core import Adjacency, OverspentError, SordinoError, Trust, Unit

RUN_FLAGS = (
    # flag, key of the spec, what it says in --help
    ("--data", "data", "digits, synthetic(1,1), or an .npz, .csv or .parquet file (default: digits)"),
    ("--label", "label", "label column of a table"),
    ("--clients", "clients", "number of clients (default: 10, or as many as the partition brings)"),
    ("--partition", "partition", "iid, dirichlet[:A], classes:K, by-column:NAME, counts:FILE (default: dirichlet)"),
    ("--method", "method", "see 'sordino methods' (default: dp-fedsofim)"),
    ("--epsilon", "epsilon", "the promise (default: 8); inf runs without noise"),
    ("--delta", "delta", "its slack (default: 1e-5)"),
    ("--unit", "unit", "record or user (default: record)"),
    ("--adjacency", "adjacency", "add-remove or replace-one (default: replace-one)"),
    ("--trust", "trust", "untrusted-server, secure-aggregation or trusted-server (default: untrusted-server)"),
    ("--clip", "clip", "bound on one record's gradient, or on a user's message (default: 1)"),
    ("--rounds", "rounds", "(default: 70)"),
    ("--participation", "participation", "full, fixed:K or poisson:Q (default: full)"),
    ("--public-stats", "public_stats", "an .npz with mean, and cov or std, of public features, to centre and scale by"),
    ("--seed", "seed", "reproducible noise: for experiments, not private"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without ε shows ? in its place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.act(arguments))
    except (SordinoError, OverspentError) as error:
        print(f"sordino: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sordino: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"sordino: stopped. {stop}".strip(), file=sys.stderr)
        return 130


# ------------------------------------------------------------------------------------------------------------ parsing


def _parser() -> argparse.ArgumentParser:
    import sordino

    parser = argparse.ArgumentParser(
        prog="sordino",
        description="Differentially private federated learning, exactly accounted.",
        epilog="examples:\n"
        "  sordino run                                  train on the embedded digits, over ten clients\n"
        "  sordino privacy --epsilon 1 --rounds 70 --clients 20\n"
        "  sordino check --all                          try to break every method's guarantee\n"
        "  sordino verify runs/mine/certificate.json    recompute a certificate with a second accountant\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sordino {sordino.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _command(
        commands,
        "run",
        _run,
        "train one model over many clients",
        "sordino run\n"
        "sordino run --method dp-fedadam --epsilon 2 --set lr=0.1 --out runs/adam\n"
        "sordino run --data patients.csv --label outcome --partition by-column:hospital --trust secure-aggregation\n"
        "sordino run spec.toml --json result.json\n"
        "sordino run --resume runs/adam",
    )
    run.add_argument("spec", nargs="?", metavar="SPEC.toml", help="keys of the run; flags and --set override them")
    for flag, key, text in RUN_FLAGS:
        run.add_argument(flag, dest=f"key_{key}", metavar="X", help=text)
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key: lr=0.5, rho=1, divisor=pooled …"
    )
    run.add_argument("--out", metavar="DIR", help="run directory (default: runs/METHOD-TIME)")
    run.add_argument("--resume", metavar="DIR", help="go on with a run that was interrupted")
    _json(run)

    predict = _command(
        commands,
        "predict",
        _predict,
        "apply a trained model to a file",
        "sordino predict runs/mine/model.safetensors new.csv",
    )
    predict.add_argument("model", metavar="MODEL", help="model.safetensors of a run, or the run's directory")
    predict.add_argument("file", metavar="FILE", help=".csv or .parquet with the training columns, or .npz with x")
    _json(predict)

    privacy = _command(
        commands,
        "privacy",
        _privacy,
        "epsilon from noise, or noise from epsilon",
        "sordino privacy --epsilon 1 --rounds 70 --clients 20 --records 2500 --clip 10\n"
        "sordino privacy --noise 62.4 --rounds 70 --clients 20 --trust secure-aggregation",
    )
    either = privacy.add_mutually_exclusive_group(required=True)
    either.add_argument("--epsilon", type=float, metavar="E", help="find the noise for this epsilon")
    either.add_argument(
        "--noise", type=float, metavar="S", help="find epsilon for this noise: std of the summed client noise / clip"
    )
    privacy.add_argument("--delta", type=float, default=1e-5, metavar="D", help="(default: 1e-5)")
    privacy.add_argument("--rounds", type=int, default=1, metavar="T", help="releases of each client (default: 1)")
    privacy.add_argument("--clients", type=int, default=1, metavar="N", help="(default: 1)")
    privacy.add_argument("--records", type=int, help="of each client; gives the noise on the aggregate")
    privacy.add_argument("--clip", type=float, default=1.0, metavar="C", help="(default: 1)")
    privacy.add_argument("--unit", default=str(Unit.RECORD), help=", ".join(Unit))
    privacy.add_argument("--adjacency", default=str(Adjacency.REPLACE_ONE), help=", ".join(Adjacency))
    privacy.add_argument("--trust", default=str(Trust.UNTRUSTED_SERVER), help=", ".join(Trust))
    _json(privacy)

    _json(_command(commands, "methods", _methods, "what there is, and what is certified", "sordino methods --json"))

    check = _command(
        commands,
        "check",
        _check,
        "try to break a method's guarantee",
        "sordino check dp-fedsofim\nsordino check --all --json checks.json",
    )
    check.add_argument("method", nargs="*", metavar="METHOD")
    check.add_argument("--all", action="store_true", help="every method there is")
    _json(check)

    verify = _command(
        commands,
        "verify",
        _verify,
        "recompute a certificate with an independent accountant",
        "sordino verify runs/mine/certificate.json",
    )
    verify.add_argument("certificate", metavar="FILE", help="certificate.json of a run, or the run's directory")
    _json(verify)
    return parser


def _command(commands: Any, name: str, act: Any, summary: str, examples: str) -> argparse.ArgumentParser:
    indented = "\n".join(f"  {line}" for line in examples.splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{indented}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=act)
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON document on stdout (or -), or into FILE (.json)"
    )


def _emit(arguments: argparse.Namespace, document: Any) -> bool:
    """Write the JSON document where it was asked for. True if stdout holds it: then nothing else may go there."""
    target = arguments.json
    if target is None:
        return False
    text = json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return True
    Path(target).write_text(text, encoding="utf-8")
    return False


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_json(arguments: argparse.Namespace) -> None:
    """Before any work: `--json spec.toml` would overwrite the spec."""
    if arguments.json in (None, "-"):
        return
    if not arguments.json.endswith(".json"):
        raise SordinoError(f"--json: '{arguments.json}' should end in .json (or be -, for stdout).")
    if not Path(arguments.json).absolute().parent.is_dir():
        raise SordinoError(f"--json: there is no directory for '{arguments.json}'; make it first.")


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, emoji=False)  # a pipe gets whole lines, whatever its width


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Column, Table

    table = Table(
        *(Column(name, no_wrap=True) for name in columns), box=None, padding=(0, 2, 0, 0), header_style="bold"
    )
    for row in rows:
        table.add_row(*row)
    _console().print(table)


# ----------------------------------------------------------------------------------------------------------- commands


def _run(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from sordino.experiments import run
    from sordino.experiments.spec import Spec, parse_setting, read_values

    values: dict[str, Any] = {}
    if arguments.spec:
        values |= read_values(arguments.spec)
    for _, key, _ in RUN_FLAGS:
        if (given := getattr(arguments, f"key_{key}")) is not None:
            values |= dict([parse_setting(f"{key}={given}")])
    values |= dict(map(parse_setting, arguments.set))
    if arguments.resume:
        if values:
            raise SordinoError(f"--resume: the run keeps its own spec; leave out {', '.join(sorted(values))}.")
        if arguments.out:
            raise SordinoError("--out: a resumed run stays in its directory; leave --out away.")
        out = Path(arguments.resume)
        if not (out / "spec.toml").is_file():
            raise SordinoError(f"--resume: '{out}' holds no run (no spec.toml); check the path.")
        job = run.prepare(Spec.read(out / "spec.toml"))
    else:
        job = run.prepare(Spec.of(values))
        out = Path(arguments.out or f"runs/{job.spec.method}-{time.strftime('%Y%m%d-%H%M%S')}")
        run.start(job, out)
    try:
        history = _train(job, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: sordino run --resume {out}") from None
    cert = run.finish(job, out, history)
    if not _emit(arguments, run.summary(job, cert, history, out)):
        _tell(job, cert, history, out)
    return 0


def _train(job: Any, out: Path) -> list[dict[str, Any]]:
    """The rounds, with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sordino.experiments import run

    history = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(job.spec.method, total=job.plan.rounds, shown="")
        for line in run.rounds(job, out):
            history.append(line)
            spent = "no noise" if line["epsilon"] is None else f"ε {line['epsilon']:.3g}"
            progress.update(task, completed=line["round"], shown=f"{_score(line)}  {spent}")
    return history


def _score(line: dict[str, Any]) -> str:
    return f"mse {line['mse']:.4g}" if "mse" in line else f"accuracy {line['accuracy']:.1%}"


def _tell(job: Any, cert: dict[str, Any], history: list[dict[str, Any]], out: Path) -> None:
    from sordino.experiments import run

    console = _console()
    sizes = sorted(job.plan.sizes)
    shown = f", {sum(sizes):,} records ({sizes[0]:,} to {sizes[-1]:,} each)" if cert["records"] is not None else ""
    console.print(
        f"{job.spec.method} on {job.dataset.name}: {job.plan.clients} clients{shown}, "
        f"{job.plan.rounds} rounds, {history[-1]['seconds']:.1f} s",
        markup=False,
    )
    if unlike := run.heterogeneity(job):
        console.print(
            f"partition {job.spec.partition}: a client's labels have KL {unlike['kl_from_uniform']:.2f} from uniform "
            f"and lack {unlike['absent_classes']:.1f} classes, on average",
            markup=False,
        )
    console.print(f"final {_score(history[-1])} on {len(job.dataset.y_test):,} test records")
    if not run.beats_guessing(job, history[-1]):
        console.print(
            "[bold yellow]warning[/]: that is no better than a constant guess. More noise than signal, or features of "
            "very different scale: see --public-stats and --set normalize=l2 in 'sordino run --help'"
        )
    if 0 < len(job.names) <= 20:
        console.print("clients: " + "; ".join(f"{i} {name}" for i, name in enumerate(job.names)), markup=False)
    epsilon = "∞" if cert["epsilon"] is None else f"{cert['epsilon']:.4g}"
    promise = f"ε = {epsilon} at δ = {cert['delta']:g}, {cert['unit']} level, {cert['adjacency']}, {cert['trust']}"
    if cert["certified"]:
        console.print(f"[bold green]certified[/]: {promise}")
    else:
        console.print(f"[bold red]not certified[/]: {'; '.join(cert['reasons'])} ({promise})")
    files = ("statement.md", "certificate.json", "model.safetensors", "curve.png", "metrics.jsonl", "spec.toml")
    console.print(f"written to {out}: {', '.join(files)}", markup=False)


def _predict(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from sordino.experiments.outcome import predict

    found = predict(arguments.model, arguments.file)
    document = {"predictions": found.labels}
    if found.classes:
        document |= {"classes": found.classes, "probabilities": found.probabilities}
    if not _emit(arguments, document):
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(["row", "prediction", *(f"p({name})" for name in found.classes)])
        for row, label in enumerate(found.labels):
            chances = [f"{p:.4f}" for p in found.probabilities[row]] if found.classes else []
            out.writerow([row, label, *chances])
    return 0


def _privacy(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from scipy.special import ndtr

    from sordino.core import Privacy
    from sordino.methods import build
    from sordino.privacy.plan import Plan

    for name in ("clients", "rounds", "records"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise SordinoError(f"--{name}: {value} must be at least 1.")
    privacy = Privacy(
        arguments.epsilon if arguments.noise is None else 1.0,
        arguments.delta,
        arguments.unit,
        arguments.adjacency,
        arguments.trust,
    )
    sizes = (arguments.records or 1,) * arguments.clients
    method = build("dp-fedgd", privacy.unit, clip=arguments.clip)
    plan = Plan(method, arguments.rounds, sizes, privacy, noise=arguments.noise)
    noise, own = plan.summed_noise()
    counted = privacy.unit is Unit.USER or arguments.records is not None
    document = {
        "mu": plan.mu(),
        "noise": noise,
        "client_noise": own,
        "aggregate_std": plan.aggregate_std(0) if counted else None,
        "epsilon": plan.epsilon(),
        "delta": privacy.delta,
        "unit": str(privacy.unit),
        "adjacency": str(privacy.adjacency),
        "trust": str(privacy.trust),
    }
    if not _emit(arguments, document):
        console = _console()
        epsilon = plan.epsilon()
        console.print(f"ε = {epsilon:.6g} at δ = {privacy.delta:g}   (μ = {plan.mu():.6g})")
        console.print(f"noise          {noise:.6g} × clip on the sum of {arguments.clients} clients")
        console.print(f"client noise   {own:.6g} × clip on each client's own message")
        if counted:
            console.print(f"aggregate std  {plan.aggregate_std(0):.6g} per coordinate of the averaged gradient")
        seen = {
            Trust.UNTRUSTED_SERVER: "every message",
            Trust.SECURE_AGGREGATION: "only sums of messages",
            Trust.TRUSTED_SERVER: "only the models sent out",
        }[privacy.trust]
        unit = {Unit.RECORD: "one record", Unit.USER: "one whole client"}[privacy.unit]
        change = {Adjacency.ADD_REMOVE: "joins or leaves", Adjacency.REPLACE_ONE: "is replaced"}[privacy.adjacency]
        right = 100 * float(ndtr(plan.mu() / 2))
        console.print(
            f"In words: whether {unit} {change} makes no outcome of the {arguments.rounds} rounds more than "
            f"e^ε = {math.exp(min(epsilon, 700)):.3g} times as likely, but for a slack of δ. An adversary who sees "
            f"{seen} and must guess between two equally likely cases is right at most {right:.3g} % of the time."
        )
    return 0


def _methods(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from sordino.methods import REGISTRY, build

    rows: list[dict[str, Any]] = []
    for name, entry in REGISTRY.items():
        built = {str(unit): build(name, unit) for unit in entry.units}
        rows.append(
            {
                "name": name,
                "family": entry.family,
                "paper": entry.paper,
                "summary": entry.summary,
                "units": list(built),
                "certified": {unit: sorted(str(trust) for _, trust in m.proves) for unit, m in built.items()},
                "releases_per_round": {
                    unit: [sum(q.calls for q in stage.queries if q.noise is not None) for stage in m.stages][-1]
                    for unit, m in built.items()
                },
                "options": entry.options,
            }
        )
    if not _emit(arguments, rows):
        every = {str(trust) for trust in Trust}
        for row in rows:
            certified = {
                "every trust model" if set(trusts) == every else ", ".join(trusts) or "nothing"
                for trusts in row["certified"].values()
            }
            releases = {str(count) for count in row["releases_per_round"].values()}
            _console().print(
                f"[bold]{row['name']}[/]  {row['summary']}\n"
                f"    {row['family']}; {' and '.join(row['units'])} level; certified under "
                f"{'; '.join(sorted(certified))}; {', '.join(sorted(releases))} release a round\n"
                f"    {row['paper']}"
            )
        _console().print("Options of each: sordino methods --json")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from rich.console import Console
    from rich.progress import track

    from sordino.checks import check
    from sordino.methods import REGISTRY, entry

    names = list(REGISTRY) if arguments.all else arguments.method
    if not names:
        raise SordinoError("check: name a method, or use --all.")
    for name in names:
        entry(name)
    reports = [r for name in track(names, "checking", console=Console(stderr=True)) for r in check(name)]
    if not _emit(arguments, [report._asdict() for report in reports]):
        _table(
            ("method", "unit", "adjacency", "query", "claimed", "found", "engines", ""),
            [
                (
                    r.name,
                    r.unit,
                    r.adjacency,
                    r.query.split()[-1] if r.query else "",
                    f"{r.claimed:.4g}",
                    f"{r.worst_found / r.claimed:.2%}" if r.claimed else "",
                    f"{r.engines_max_diff:.0e}",
                    "[green]passed[/]" if r.passed else "[red]failed[/]",
                )
                for r in reports
            ],
        )
        for report in reports:
            for problem in report.problems:
                _console().print(f"{report.name} ({report.unit}, {report.adjacency}): {problem}")
    return 0 if all(report.passed for report in reports) else 1


def _verify(arguments: argparse.Namespace) -> int:
    _check_json(arguments)
    from sordino.experiments.outcome import verify_run

    verdict = verify_run(Path(arguments.certificate))
    document = {
        "ok": not verdict.problems,
        "problems": verdict.problems,
        "epsilon_claimed": verdict.claimed,
        "epsilon_recomputed": verdict.recomputed,
        "certified": verdict.certified,
        "not_compared": verdict.gaps,
    }
    if not _emit(arguments, document):
        console = _console()
        console.print(
            f"claimed ε {verdict.claimed:.6g}, recomputed from the raw numbers {verdict.recomputed:.6g} (dp-accounting)"
        )
        for problem in verdict.problems:
            console.print("mismatch: " + problem, style="red", markup=False)
        for missing in verdict.gaps:
            console.print(f"not compared: there is no {missing} beside it")
        if not verdict.problems:
            says = "certified" if verdict.certified else "it says of itself: not certified"
            console.print(f"[green]holds[/] ({says}). The numbers agree; nothing is signed, so not who wrote them")
    return 0 if not verdict.problems else 1


if __name__ == "__main__":
    sys.exit(main())
