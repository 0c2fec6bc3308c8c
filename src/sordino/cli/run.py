"""`sordino run`: train, with a bar on stderr, and tell the outcome."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, check_json, command, console, emit
from sordino.errors import SordinoError

RUN_FLAGS = (
    # flag, key of the spec, what it says in --help
    ("--data", "data", "digits, synthetic(1,1), a published set (mnist, a9a …), or an .npz, .csv or .parquet file"),
    ("--data-dir", "data_dir", "where published sets are looked for first (also: $SORDINO_DATA)"),
    ("--label", "label", "label column of a table"),
    ("--clients", "clients", "number of clients (default: 10, or as many as the partition brings)"),
    ("--partition", "partition", "iid, dirichlet[:A], classes:K, by-column:NAME, counts:FILE (default: dirichlet)"),
    ("--model", "model", "auto (linear), mlp, cnn, resnet18-gn, minilm-lora, vit-base-lora … (docs/deep.md)"),
    ("--method", "method", "see 'sordino methods' (default: auto, for linear models)"),
    ("--epsilon", "epsilon", "the promise (default: 8); inf runs without noise"),
    ("--delta", "delta", "its slack (default: 1e-5)"),
    ("--unit", "unit", "record or user (default: record)"),
    ("--adjacency", "adjacency", "add-remove or replace-one (default: replace-one)"),
    ("--trust", "trust", "untrusted-server, secure-aggregation or trusted-server (default: untrusted-server)"),
    ("--clip", "clip", "bound on one record's gradient, or on a user's message (default: the method's own)"),
    ("--rounds", "rounds", "(default: the method's own, mostly 70)"),
    (
        "--participation",
        "participation",
        "full, fixed:K clients, poisson:Q, or cyclic:B cohorts in turn (default: full)",
    ),
    ("--batch", "batch", "records a gradient is asked of: full, poisson:16, poisson:0.01, fixed:16 (default: full)"),
    ("--public-stats", "public_stats", "an .npz with mean, and cov or std, of public features, to centre and scale by"),
    ("--seed", "seed", "reproducible noise: for experiments, not private"),
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        act,
        "train one model over many clients",
        "sordino run\n"
        "sordino run --method dp-fedadam --epsilon 2 --set lr=0.1 --out runs/adam\n"
        "sordino run --data patients.csv --label outcome --partition by-column:hospital --trust secure-aggregation\n"
        "sordino run --data mnist --model cnn --method dp-fedadam --batch 64 --set lr=0.02 --set evaluate_every=10\n"
        "sordino run spec.toml --json result.json\n"
        "sordino run --resume runs/adam",
    )
    parser.add_argument("spec", nargs="?", metavar="SPEC.toml", help="keys of the run; flags and --set override them")
    for flag, key, text in RUN_FLAGS:
        parser.add_argument(flag, dest=f"key_{key}", metavar="X", help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key: lr=0.5, rho=1, divisor=pooled …"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--out", metavar="DIR", help="run directory (default: runs/METHOD-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a run that was interrupted")
    parser.add_argument(
        "--sign-with", metavar="KEYFILE", help="sign the certificate with this identity.key (default: a key of the run)"
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.secagg.keys import read_signer
    from sordino.settings import parse_setting, read_toml
    from sordino.training import run
    from sordino.training.artifacts import RunFolder
    from sordino.training.spec import Spec

    signer = read_signer(arguments.sign_with) if arguments.sign_with else None
    values: dict[str, Any] = {}
    if arguments.spec:
        values |= read_toml(arguments.spec)
    for _, key, _ in RUN_FLAGS:
        if (given := getattr(arguments, f"key_{key}")) is not None:
            values |= dict([parse_setting(f"{key}={given}")])
    values |= dict(map(parse_setting, arguments.set))
    if arguments.resume:
        if values:
            raise SordinoError(f"--resume: the run keeps its own spec; leave out {', '.join(sorted(values))}.")
        if arguments.out:
            raise SordinoError("--out: a resumed run stays in its directory; leave --out away.")
        out = RunFolder.find(Path(arguments.resume)).root
        job = run.prepare(run.reopen(Path(arguments.resume)), device=arguments.device)
    else:
        job = run.prepare(Spec.of(values), device=arguments.device)
        out = Path(arguments.out or f"runs/{job.resolved.method_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        run.start(job, out)
    try:
        history = _train(job, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: sordino run --resume {out}") from None
    cert = run.finish(job, out, history, signer)
    if not emit(arguments, run.summary(job, cert, history, out)):
        _tell(job, cert, history, out)
    return 0


def _train(job: Any, out: Path) -> list[dict[str, Any]]:
    """The rounds, with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sordino.training import run

    history, shown = [], ""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        *([TimeElapsedColumn()] if job.resolved.source.open else []),  # time tells of private records
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(job.resolved.method_name, total=job.plan.rounds, shown="")
        for line in run.rounds(job, out):
            history.append(line)
            spent = "no noise" if line["epsilon"] is None else f"ε {line['epsilon']:.3g}"
            shown = f"{_score(line)}  {spent}" if {"mse", "accuracy"} & line.keys() else shown
            progress.update(task, completed=line["round"], shown=shown)
    return history


def _score(line: dict[str, Any]) -> str:
    return f"mse {line['mse']:.4g}" if "mse" in line else f"accuracy {line['accuracy']:.1%}"


def _tell(job: Any, cert: dict[str, Any], history: list[dict[str, Any]], out: Path) -> None:
    """What `privacy.public` lists under console, and nothing else."""
    from sordino.privacy.evidence.certificate import ranges
    from sordino.privacy.evidence.signing import fingerprint
    from sordino.training.artifacts import RunFolder, total_seconds
    from sordino.training.evaluate import beats_constant_guess

    page, settings = console(), job.resolved.spec
    sizes = sorted(job.plan.sizes)
    shown = f", {sum(sizes):,} records ({sizes[0]:,} to {sizes[-1]:,} each)" if cert["records"] is not None else ""
    took = f", {total_seconds(RunFolder.find(out)):.1f} s" if job.resolved.source.open else ""
    page.print(
        f"{settings.method} on {job.dataset.name}: {job.plan.clients} clients{shown}, {job.plan.rounds} rounds{took}",
        markup=False,
    )
    if unlike := job.heterogeneity:
        page.print(
            f"partition {settings.partition}: a client's labels have KL {unlike['kl_from_uniform']:.2f} from uniform "
            f"and lack {unlike['absent_classes']:.1f} classes, on average",
            markup=False,
        )
    tested = "" if cert["test_records"] is None else f" on {cert['test_records']:,} test records"
    page.print(f"final {_score(history[-1])}{tested}")
    if not beats_constant_guess(job.dataset, history[-1]):
        page.print(
            "[bold yellow]warning[/]: that is no better than a constant guess. "
            + (
                "Try more rounds, another lr or another clip (docs/deep.md)"
                if job.resolved.model.entry.network
                else "More noise than signal, or features of unlike scales: --public-stats, or --set normalize=l2"
            )
        )
    whole = [i for i, rate in enumerate(job.plan.rates) if rate == 1]
    if settings.batch != "full" and whole and cert["records"] is not None:
        page.print(
            f"note: batch {settings.batch} is all that clients {ranges(whole)} hold; sampling hides nothing of theirs",
            markup=False,
        )
    if 0 < len(cert["client_names"]) <= 20:
        names = enumerate(cert["client_names"])
        page.print("clients: " + "; ".join(f"{i} {name}" for i, name in names), markup=False)
    epsilon = "∞" if cert["epsilon"] is None else f"{cert['epsilon']:.4g}"
    promise = f"ε = {epsilon} at δ = {cert['delta']:g}, {cert['unit']} level, {cert['adjacency']}, {cert['trust']}"
    if cert["certified"]:
        page.print(f"[bold green]certified[/]: {promise}")
    else:
        page.print(f"[bold red]not certified[/]: {'; '.join(cert['reasons'])} ({promise})")
    by = cert["signature"]
    page.print(f"signed by {by['signer']} {fingerprint(by['key'])}", markup=False)
    page.print(f"written to {out}: public/ may be published, private/ may not (README.txt)", markup=False)
