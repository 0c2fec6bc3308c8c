"""`sordino run`: train one model, and print the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sordino import files
from sordino.cli.show import add_device, add_json, bar, check_json, check_out, command, console, emit, facts, terminable
from sordino.errors import OverspentError, SordinoError, closest, count
from sordino.foreign import printable

MOST_CLASSES = 10  # of which every one has a line
FEWEST_CLASSES = 5  # that have a line where there are more
DATA_SUFFIXES = (".csv", ".tsv", ".parquet", ".npz", ".xlsx")
RUN_FLAGS = (
    # flag, key of the spec, what it says in --help
    ("--data", "data", "digits, synthetic(1,1), a published set (mnist, a9a …), or an .npz, .csv or .parquet file"),
    ("--data-dir", "data_dir", "folder of published data sets (also: $SORDINO_DATA)"),
    ("--label", "label", "label column of a table"),
    ("--text", "text", "column of text of a table, for models that read text; causal-lora learns to write it"),
    ("--prompt", "prompt", "of causal-lora: column of what comes before each text; only the text is learned"),
    ("--schema", "schema", "a schema.toml: what the columns of a table mean (see 'sordino schema')"),
    (
        "--clients",
        "clients",
        "number of clients among whom records are split (default: 10, or as many as the partition brings; 1 for "
        "a schema that names no clients); a column with the hospital of each record is named by --partition "
        "by-column:NAME, or client in the schema",
    ),
    (
        "--partition",
        "partition",
        "iid, dirichlet[:A], classes:K, by-column:NAME, counts:FILE (default: dirichlet for benchmarks, else iid)",
    ),
    (
        "--model",
        "model",
        "auto (linear), mlp, cnn, minilm-lora, causal-lora …, or your own: package.module:build (docs/deep.md)",
    ),
    ("--method", "method", "see 'sordino methods' (default: auto)"),
    ("--epsilon", "epsilon", "privacy budget (default: 8); inf trains without noise"),
    ("--delta", "delta", "slack of the guarantee (default: 1e-5)"),
    ("--unit", "unit", "record, person or client (default: person with a person column, else record)"),
    ("--person", "person", "column that says whom a record is about: all records of a person are protected together"),
    ("--adjacency", "adjacency", "add-remove or replace-one (default: replace-one)"),
    ("--trust", "trust", "untrusted-server, secure-aggregation or trusted-server (default: untrusted-server)"),
    ("--clip", "clip", "bound on one record's gradient, or on a client's message (default: the method's own)"),
    ("--rounds", "rounds", "number of rounds (default: the method's, mostly 70)"),
    (
        "--participation",
        "participation",
        "clients per round: full, fixed:K, poisson:Q, or cyclic:B for B cohorts in turn (default: full)",
    ),
    (
        "--batch",
        "batch",
        "records per gradient: full, poisson:16, poisson:0.01, fixed:16 or allocation:16 (default: full)",
    ),
    (
        "--public-stats",
        "public_stats",
        "an .npz with mean and cov (or std) of public features, to centre and scale with",
    ),
    (
        "--private-statistics",
        "private_statistics",
        "share of the budget, such as 0.05, that finds the ranges of columns with 'within' in the schema",
    ),
    ("--seed", "seed", "reproducible noise, for experiments; the result is not private"),
)

MANY = 20  # classes: perhaps the labels are numbers
LEAST_SLOPE = 0.8  # of calibration: below it, risks are so sure that people are told
LEAST_TESTS = 500  # fewer test records do not tell a slope
NO_INTERVALS = (
    "WARNING: no coefficient will have an interval, whatever the records say: the noise on the curvature is too large; "
    "more records, fewer features, a larger epsilon or a larger uncertainty helps"
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        act,
        "train one model over many clients",
        "sordino run\n"
        "sordino run --method dp-fedadam --epsilon 2 --set lr=0.1 --out runs/adam\n"
        "sordino run patients.csv --schema schema.toml --trust secure-aggregation\n"
        "sordino run patients.csv --label outcome --partition by-column:hospital\n"
        "sordino run --data mnist --model cnn --method dp-fedadam --batch 64 --set lr=0.02 --set evaluate_every=10\n"
        "sordino run --data answers.csv --text answer --prompt question --model causal-lora --set weights=gpt2 "
        "--method dp-fedadamw --batch 16\n"
        "sordino run spec.toml --json result.json\n"
        "sordino run patients.csv --schema schema.toml --epsilon 1 --ledger patients.db --limit 4\n"
        "sordino run --resume runs/adam\n"
        "torchrun --nproc-per-node 2 -m sordino run spec.toml --distributed",
    )
    parser.add_argument(
        "spec",
        nargs="?",
        metavar="SPEC.toml|DATA",
        help="settings of the run, which flags and --set override; or a table or data set, as --data",
    )
    for flag, key, text in RUN_FLAGS:
        parser.add_argument(flag, dest=f"key_{key}", metavar="X", help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting: lr=0.5, rho=1, divisor=pooled …"
    )
    parser.add_argument(
        "--integers",
        action="store_true",
        help="add up integers with discrete noise, as a federation with secure aggregation does; slower",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="share out each round among the processes that torchrun started; with --device cuda each has a GPU",
    )
    add_device(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory (default: runs/METHOD-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="continue an interrupted run")
    parser.add_argument(
        "--ledger", metavar="FILE.db", help="also charge this ledger, which adds up all runs on the same data"
    )
    parser.add_argument("--limit", metavar="X", help="most epsilon of all runs on the same data in --ledger")
    parser.add_argument(
        "--sign-with", metavar="KEYFILE", help="sign the certificate with this identity.key (default: a key of the run)"
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.engines import distributed

    if not arguments.distributed:
        return _lead(arguments, dataclasses.replace(distributed.ALONE, device=arguments.device))
    team = distributed.join(arguments.device)
    try:
        return _lead(arguments, team) if team.rank == 0 else _follow(arguments, team)
    finally:
        distributed.leave()


def _lead(arguments: argparse.Namespace, team: Any) -> int:
    """The run of one process, or of rank 0."""
    from sordino.secagg.keys import read_signer
    from sordino.training import run
    from sordino.training.folder import RunFolder

    signer = read_signer(arguments.sign_with) if arguments.sign_with else None
    if not arguments.resume:
        check_out(Path(arguments.out or "runs"))
        if arguments.out:
            run.check_new(Path(arguments.out))  # before data are read, which may take minutes
    prepared = _prepare(arguments, team)
    if arguments.resume:
        out = RunFolder.find(Path(arguments.resume)).root
    else:
        out = Path(arguments.out or f"runs/{prepared.resolved.method_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        shared = _join(arguments, prepared)
        run.start(prepared, out, shared)
    if run.no_intervals(prepared):
        print(NO_INTERVALS, file=sys.stderr)
    try:
        with terminable():
            prepared = run.release_statistics(prepared, out)
            history = _train(prepared, out, team)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"continue with: sordino run --resume {out}{_spent(out)}") from None
    except SordinoError as error:
        raise error if team.size == 1 else SordinoError(f"{error} Continue with: --resume {out}") from None
    cert = run.finish(prepared, out, history, signer)
    # Without --json nothing is scored client by client, which takes time.
    if arguments.json is None or not emit(arguments, run.summary(prepared, cert, history, out)):
        _tell(prepared, cert, history, out)
    return 0


def _spent(out: Path) -> str:
    """What the rounds of a stopped run spent, where it is known: the last line of its metrics says so."""
    try:
        last = json.loads((out / "public" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return ""
    if last.get("epsilon") is None:
        return ""
    return (
        f" (the rounds up to {last['round']} spent epsilon = {last['epsilon']:.4g}; the ledger is charged for the "
        "whole run, and continuing adds nothing to that)"
    )


def _follow(arguments: argparse.Namespace, team: Any) -> int:
    """The part of a rank other than 0, which shows nothing but why it ended early."""
    from sordino.training import ranks

    warnings.simplefilter("ignore")
    try:
        ranks.follow(_prepare(arguments, team), team)
    except (SordinoError, OverspentError) as error:
        raise SordinoError(f"rank {team.rank}: {error}") from None
    return 0


def _prepare(arguments: argparse.Namespace, team: Any) -> Any:
    """The run that the command line describes, the same on every rank."""
    from sordino.training import ranks, run
    from sordino.training.spec import Spec

    values = read_keys(arguments)
    if arguments.resume:
        if values:
            raise SordinoError(f"--resume: a resumed run keeps its spec; leave out {', '.join(sorted(values))}.")
        if arguments.out:
            raise SordinoError("--out: a resumed run stays in its directory; leave --out out.")
        if arguments.ledger or arguments.limit:
            raise SordinoError("--ledger: a resumed run keeps its ledger; leave --ledger and --limit out.")
    spec = _resumed(Path(arguments.resume)) if arguments.resume else Spec.of(values)
    if team.size == 1:
        return run.prepare(spec, device=team.device)
    prepared = run.prepare(ranks.joint_spec(spec, team, resumed=bool(arguments.resume)), device=team.device)
    ranks.check(prepared, team)
    return prepared


def _join(arguments: argparse.Namespace, prepared: Any) -> Any:
    """The ledger of several runs, which must be able to pay for this one; None where none is named."""
    from sordino.training import run

    if arguments.ledger is None:
        if arguments.limit is not None:
            raise SordinoError("--limit: it is the limit of a ledger; name one with --ledger mine.db.")
        return None
    try:
        limit = None if arguments.limit is None else float(arguments.limit)
    except ValueError:
        raise SordinoError(f"--limit: '{arguments.limit}' must be a number above 0, such as 4.") from None
    return run.join_ledger(prepared, arguments.ledger, limit)


def read_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys of a run: those of the TOML file, overridden by flags and --set."""
    from sordino import plugins
    from sordino.settings import parse_setting, read_toml

    settings = dict(map(parse_setting, arguments.set))  # first: without its `=`, a value is taken for the spec
    values: dict[str, Any] = {}
    if arguments.spec:
        path = Path(arguments.spec)
        if path.is_dir() and (path / "public" / "spec.toml").is_file():
            raise SordinoError(f"spec: '{path}' is the folder of a run; continue it with --resume {path}.")
        if set(map(str.lower, path.suffixes)) & set(DATA_SUFFIXES):
            values["data"] = str(path)
        elif not path.exists():
            values["data"] = _data_set(arguments.spec)
        else:
            read = read_toml(path)
            if isinstance(read.get("columns"), dict):
                raise SordinoError(
                    f"spec: '{path}' looks like the schema of a table, because it has [columns]; name the table, and "
                    f"write --schema {path}."
                )
            values |= read
    typed: dict[str, Any] = {}
    for _, key, _ in RUN_FLAGS:
        if (flag := getattr(arguments, f"key_{key}")) is not None:
            typed |= dict([parse_setting(f"{key}={flag}")])
    if getattr(arguments, "integers", False):
        typed["integers"] = True
    typed |= settings
    if ":" in str(typed.get("model", "")):  # typed by the user; a file may not name code
        plugins.allow(str(typed["model"]))
    return values | typed


def _resumed(out: Path) -> Any:
    """The spec of a run that can be continued: its private folder is there."""
    from sordino.training import run
    from sordino.training.folder import RunFolder

    spec = run.reopen(out)
    if not RunFolder.find(out).private.is_dir():
        raise SordinoError(
            f"--resume: '{out}' has no private/, which holds checkpoint, ledger and keys; put it back, or start anew."
        )
    return spec


def _data_set(word: str) -> str:
    """The word, if `--data` knows it as a data set.

    Raises:
      SordinoError: it is none, and no file either; the message says what was probably meant.
    """
    from sordino.data import catalog
    from sordino.data.synthetic import BUILT_IN
    from sordino.methods import REGISTRY

    if re.split("[(:]", word, maxsplit=1)[0] in BUILT_IN or word in catalog.NAMES:
        return word
    if meant := closest(word, REGISTRY, cutoff=files.SPELT_ALIKE):
        raise SordinoError(
            f"spec: '{word}' is no file and no data set; for the method write --method {meant} (compare: --methods "
            f"{meant},…, with commas)."
        )
    if meant := closest(word, (*BUILT_IN, *catalog.NAMES), cutoff=files.SPELT_ALIKE):
        raise SordinoError(f"spec: '{word}' is no file and no data set. Did you mean the data set '{meant}'?")
    raise files.absent("spec", word)


def _train(prepared: Any, out: Path, team: Any) -> list[dict[str, Any]]:
    """Train, with a bar on stderr."""
    from sordino.training import run

    history, shown = [], ""
    # Time tells of private records.
    with bar(prepared.resolved.method_name, prepared.plan.rounds, timed=prepared.resolved.source.open) as progress:
        for line in run.rounds(prepared, out, team):
            history.append(line)
            spent = "no noise" if line["epsilon"] is None else f"ε {line['epsilon']:.3g}"
            shown = f"{_score(line)}  {spent}" if line.keys() - {"round", "epsilon"} else shown
            progress.update(completed=line["round"], shown=shown)
    return history


def _score(line: dict[str, Any]) -> str:
    """The first metric of the task. A model that diverged has no number."""
    from sordino.training.evaluate import shown_metric

    name = shown_metric(line)
    value = line[name]
    return f"{name} {'nan' if value is None else f'{value:.1%}' if name == 'accuracy' else f'{value:.4g}'}"


def quality(metrics: dict[str, Any], constant: float | None) -> list[tuple[str, str]]:
    """Lines on the metrics beside the first. constant: the loss of a constant guess, of classes and counts."""

    def number(name: str) -> str:
        return "not defined" if metrics[name] is None else f"{metrics[name]:.4g}"

    def share(name: str) -> str:
        return "not defined" if metrics[name] is None else f"{metrics[name]:.1%}"

    if "perplexity" in metrics:
        return [("before", f"perplexity {number('perplexity_before')} without training")]
    if "r2" in metrics:
        return [("fit", f"R² {number('r2')}, mean absolute error {number('mae')}")]
    if "d2" in metrics:
        explained = f"{number('d2')} of it explained ({constant:.4g} from the mean alone)"
        counts = f"{number('mean_predicted')} predicted on average, {number('observed')} observed"
        return [("fit", f"{explained}, mean absolute error {number('mae')}"), ("counts", counts)]
    if "survival_curve" in metrics:
        return [("scores", f"Brier score {number('brier')}, mean over edges"), *_survival(metrics["survival_curve"])]
    if "log_loss" not in metrics:
        return []
    loss = f"log loss {number('log_loss')} ({constant:.4g} from prevalence alone)"
    if "classes" in metrics:
        means = f"balanced accuracy {share('balanced_accuracy')}, mean AUC {number('macro_auc')}"
        return [("scores", f"{means}, {loss}"), *_classes(metrics["classes"])]
    fit = f"calibration slope {number('calibration_slope')}, intercept {number('calibration_intercept')}"
    return [
        ("scores", f"AUC {number('auc')}, {loss}, Brier score {number('brier')}"),
        ("risks", f"{share('mean_predicted')} predicted on average, {share('observed')} observed; {fit}"),
        (
            "threshold",
            f"above {metrics['threshold']:g}: sensitivity {share('sensitivity')}, specificity {share('specificity')}",
        ),
    ]


def _classes(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Recall and AUC of each class; of many classes those that are found least."""
    some = [row for row in rows if row["recall"] is not None]
    if len(rows) > MOST_CLASSES:
        some = sorted(some, key=lambda row: row["recall"])[:FEWEST_CLASSES]
    lines = []
    for row in some:
        area = "not defined" if row["auc"] is None else f"{row['auc']:.4g}"
        lines.append(("class", f"{printable(str(row['class']))}: recall {row['recall']:.1%}, AUC {area}"))
    if left := len(rows) - len(some):
        lines.append(("class", f"{left} more, which --json lists, are found more often or have no test records"))
    return lines


def _survival(curve: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Survival at the edge in the middle and at the last that the test records reach."""
    known = [edge for edge in curve if edge["brier"] is not None]
    some = {edge["time"]: edge for edge in (known[len(known) // 2], known[-1])} if known else {}
    parts = [f"by {t:g} {e['predicted']:.1%} predicted, {e['observed']:.1%} observed" for t, e in some.items()]
    return [("survival", "; ".join(parts))] if parts else []


def slope_note(measured: dict[str, Any], tests: int | None) -> str:
    """What helps if risks are too sure on enough test records; else empty. With a slope of 0 or less nothing does."""
    slope = measured.get("calibration_slope")
    if slope is None or not 0 < slope < LEAST_SLOPE or tests is None or tests < LEAST_TESTS:
        return ""
    return (
        f"note: the calibration slope is {slope:.4g}: risks are too sure, high ones too high and low ones too low; "
        "--set calibrate=0.1 --set calibrate_slope=0.05 spends a part of the budget of a run on it"
    )


ANOTHER_RUN = "Another run on the same data adds to the epsilon that is spent on them."


def remedy(prepared: Any) -> str:
    """What helps a model that is no better than a constant guess."""
    from sordino.core import Trust
    from sordino.methods import entry

    resolved, plan = prepared.resolved, prepared.plan
    if resolved.model.entry.network:
        return f"Try more rounds, another lr or another clip (docs/deep.md). {ANOTHER_RUN}"
    if resolved.model.options.get("class_weights"):
        return "Class weights move risks away from what is observed; read the AUC instead."
    if plan.noiseless:
        return "There is no noise to blame: try another method, more rounds, another lr or another clip."
    if entry(resolved.method_name).fixed:
        return (
            f"{resolved.method_name} is a recipe of {count(plan.rounds, 'round')}, which may be no better without "
            f"noise, so a larger epsilon may not help: try --method auto. {ANOTHER_RUN}"
        )
    if resolved.source.schema is None:
        classes = len(prepared.dataset.classes)
        numbers = f" Each of {classes} labels counts as a class; a schema may declare a quantity." * (classes > MANY)
        return (
            "The noise may exceed the signal (raise epsilon), or features differ in scale: describe the table by a "
            f"schema (sordino schema draft), try --public-stats FILE, or --set normalize=l2.{numbers} {ANOTHER_RUN}"
        )
    helps = ["raise epsilon", "gather more records"]
    if plan.privacy.trust is Trust.UNTRUSTED_SERVER and plan.clients > 1:
        helps.append("use --trust secure-aggregation")
    other = "another lr, clip or method" if "lr" in entry(resolved.method_name).options else "another one"
    return (
        f"The noise may exceed the signal: {', '.join(helps[:-1])} or {helps[-1]}. Or the method reaches no further: "
        f"try {other}. {ANOTHER_RUN}"
    )


def _tell(prepared: Any, cert: dict[str, Any], history: list[dict[str, Any]], out: Path) -> None:
    """The result. `evidence.public` lists every line that may be printed here."""
    from sordino.training.run import final_metrics

    measured = final_metrics(prepared, out)
    facts(_facts(prepared, cert, measured, history[-1], out))
    for line in _remarks(prepared, cert, measured, {**measured, **history[-1]}):
        console().print(line, markup=False)


def _facts(
    prepared: Any, cert: dict[str, Any], measured: dict[str, Any], last: dict[str, Any], out: Path
) -> list[tuple[str, str]]:
    """What a run did, what its model is worth, what is promised, and what may be published."""
    from sordino.evidence.signing import fingerprint
    from sordino.evidence.statement import unit_plural
    from sordino.training.artifacts import total_seconds
    from sordino.training.evaluate import of_constant, task_of_data
    from sordino.training.folder import RunFolder, publishable, shown_name, tested_on
    from sordino.training.intervals import told
    from sordino.training.metrics import Task
    from sordino.training.model_card import read_header
    from sordino.training.run import shared_of

    settings, plan = prepared.resolved.spec, prepared.plan
    sizes, sizes_public = sorted(plan.sizes), cert["records"] is not None
    each = f" ({sizes[0]:,} to {sizes[-1]:,} each)" if plan.clients > 1 else ""
    clients = f"{plan.clients} with {sum(sizes):,} {unit_plural(cert)}{each}"
    took = f" in {total_seconds(RunFolder.find(out)):.1f} s" if prepared.resolved.source.open else ""
    tested = "" if cert["test_records"] is None else f" on {cert['test_records']:,} test records"
    rows = [
        ("run", f"{settings.method} on {prepared.dataset.name}, {count(plan.rounds, 'round')}{took}"),
        ("clients", clients if sizes_public else str(plan.clients)),
    ]
    if unlike := prepared.heterogeneity:
        rows.append(
            (
                "labels",
                f"partition {settings.partition}: on average, a client's labels have a KL divergence of "
                f"{unlike['kl_from_uniform']:.2f} from uniform and {unlike['absent_classes']:.1f} classes are missing",
            )
        )
    if 0 < len(cert["client_names"]) <= 20:
        rows.append(("names", "; ".join(f"{i} {name}" for i, name in enumerate(cert["client_names"]))))
    rows.append(("error" if {"mse", "deviance"} & last.keys() else "result", _score(last) + tested))
    task, y = task_of_data(prepared.dataset), prepared.dataset.y_test
    rows += quality(measured, of_constant(task, y * prepared.dataset.unit if task is Task.COUNTS else y))
    if settings.uncertainty:
        rows.append(("intervals", told(read_header(RunFolder.find(out).public / "model.safetensors")["intervals"])))
    epsilon = "∞" if cert["epsilon"] is None else f"{cert['epsilon']:.4g}"
    promise = f"ε = {epsilon} at δ = {cert['delta']:g}, {cert['unit']} level, {cert['adjacency']}, {cert['trust']}"
    verdict = "certified" if cert["certified"] else f"NOT certified: {'; '.join(cert['reasons'])}"
    rows += [
        ("privacy", promise),
        ("verdict", verdict),
        ("signed by", f"{cert['signature']['signer']} {fingerprint(cert['signature']['key'])}"),
    ]
    if (shared := shared_of(prepared, out)) is not None:
        total = shared.summary()
        limit = "" if total["limit"] is None else f" of {total['limit']:g}"
        runs = f"{total['runs']} run{'s' if total['runs'] > 1 else ''}"
        spent = f"ε = {total['epsilon']:.4g}{limit} at δ = {total['delta']:g}"
        name = shown_name(prepared.identity(RunFolder.find(out).keys().identity))
        rows.append(
            ("ledger", f"{spent} over {runs} on these data{total['caveat']} ({shared.path.name}; this run: {name})")
        )
    if cert["certified"]:
        rows.append(("exposed", f"{tested_on(cert)}: no noise hides them, and their score is published"))
    allowed = publishable(cert, prepared.resolved.source.open)
    why = "" if cert["certified"] else " because its data are public"
    what = f"public/ may be published{why}, private/ may not" if allowed else "nothing here may be published"
    rows.append(("files", f"{out}: {what} (README.txt)"))
    return rows


def _remarks(prepared: Any, cert: dict[str, Any], measured: dict[str, Any], scores: dict[str, Any]) -> Iterator[str]:
    """Warnings about the model and the settings, and what could be better."""
    from sordino.core import Kind, answers
    from sordino.evidence.certificate import ranges
    from sordino.evidence.statement import WEAK
    from sordino.privacy import calibration
    from sordino.training.evaluate import beats_constant_guess, hardly_better, no_better
    from sordino.training.private_statistics import rough

    settings, plan = prepared.resolved.spec, prepared.plan
    if not beats_constant_guess(prepared.dataset, scores):
        why = f"{no_better(prepared.dataset, scores)}. {remedy(prepared)}"
        than = "before training" if prepared.dataset.sequences else "a constant guess"
        yield f"WARNING: the model is no better than {than}: {why}"
    elif chance := hardly_better(prepared.dataset, scores):
        yield (
            f"WARNING: the test records do not show that the model is better than a constant guess: {chance}. "
            f"{remedy(prepared)}"
        )
    if cert["certified"] and cert["epsilon"] > WEAK:
        yield (
            f"WARNING: ε = {cert['epsilon']:.4g} is above {WEAK:g}, a weak promise: public/statement.md says how often "
            "a guess about a record may be right (docs/how-to/choose-epsilon.md)."
        )
    changeable = answers(prepared.model, Kind.SLOPE) and not settings.calibrate_slope
    if changeable and (note := slope_note(measured, cert["test_records"])):
        yield note
    if settings.private_statistics is not None:
        std = calibration.aggregate_std(plan, 0)
        if (doubt := rough(prepared.resolved.statistics, std, sum(plan.sizes))) is not None:
            yield f"WARNING: {doubt}"
    whole = [i for i, rate in enumerate(plan.rates) if rate == 1]
    if settings.batch != "full" and whole and cert["records"] is not None:
        yield (
            f"note: batch {settings.batch} is every record of clients {ranges(whole)}, so sampling adds no privacy "
            "for them"
        )
