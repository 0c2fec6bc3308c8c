"""`sordino evaluate`: how good a model is on test records that are protected themselves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sordino.cli.show import add_json, add_weights, check_json, check_out, command, console, emit, facts, say
from sordino.core import Privacy
from sordino.errors import SordinoError

NUMBERS = (
    # flag, option, type, what it says in --help
    ("--epsilon", "epsilon", float, "privacy budget of this evaluation, such as 0.5 (required)"),
    ("--delta", "delta", float, "slack of the guarantee (default: 1e-6, because several evaluations add up)"),
    ("--bins", "bins", int, "bins of the score (default: 16, 32 or 64, as many as the noise allows)"),
    ("--threshold", "threshold", float, "a record counts as positive above this probability (default: 0.5)"),
    ("--confidence", "confidence", float, "of each interval (default: 0.95)"),
    ("--person-records", "person_records", int, "records of one person that each client uses (default: 4)"),
    ("--person-clients", "person_clients", int, "at most so many clients hold records of one person (default: 1)"),
    ("--seed", "seed", int, "reproducible noise, for experiments; the result is not private"),
)
WORDS = (
    (
        "--trust",
        "trust",
        "untrusted-server, secure-aggregation or trusted-server (default: untrusted-server, not the run's)",
    ),
    ("--adjacency", "adjacency", "add-remove or replace-one (default: replace-one)"),
    ("--label", "label", "label column of a table, for a model without a schema"),
    ("--client", "client", "column that says whose a record is, for a model without a schema"),
    ("--person", "person", "column that says whom a record is about, for a model without a schema"),
    ("--person-ids", "person_ids", "global, or per-client: equal ids at two clients are two persons (default: global)"),
    ("--person-choice", "person_choice", "which records of a person are used: first or random (default: first)"),
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "evaluate",
        act,
        "test a trained model on protected records, with noise",
        "sordino evaluate runs/mine test.csv --epsilon 0.5\n"
        "sordino evaluate runs/mine --data test.csv --epsilon 0.5 --trust secure-aggregation --json\n"
        "sordino evaluate runs/mine --data test.csv --epsilon 0.5 --ledger tests.db --limit 2",
    )
    parser.add_argument("model", metavar="RUN", help="a run's directory, its public/, or a model.safetensors")
    parser.add_argument("table", nargs="?", metavar="FILE", help="labelled test records, which training did not use")
    parser.add_argument("--data", metavar="FILE", help="the same as FILE")
    for flag, _, kind, text in NUMBERS:
        parser.add_argument(flag, type=kind, metavar="X", required=flag == "--epsilon", help=text)
    for flag, _, text in WORDS:
        parser.add_argument(flag, metavar="X", help=text)
    parser.add_argument("--out", metavar="DIR", help="folder of the evaluation (default: RUN/evaluation-1, -2 …)")
    parser.add_argument(
        "--ledger", metavar="FILE.db", help="also charge this ledger, which adds up all evaluations on the same file"
    )
    parser.add_argument("--limit", type=float, metavar="X", help="most epsilon of one file's records in --ledger")
    parser.add_argument(
        "--sign-with", metavar="KEYFILE", help="sign the certificate with this identity.key (default: a fresh key)"
    )
    add_weights(parser)
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from sordino.secagg.keys import read_signer
    from sordino.training import noised_metrics, private_evaluation

    if (arguments.table is None) == (arguments.data is None):
        what = (
            "the test records are missing" if arguments.data is None else "FILE and --data name the test records twice"
        )
        raise SordinoError(f"evaluate: {what}; write sordino evaluate RUN test.csv --epsilon 0.5.")
    arguments.data = arguments.data or arguments.table
    if arguments.limit is not None and arguments.ledger is None:
        raise SordinoError("--limit: it is the limit of a ledger; name one with --ledger tests.db.")
    out = Path(arguments.out) if arguments.out else default_folder(Path(arguments.model))
    check_out(out)
    signer = read_signer(arguments.sign_with) if arguments.sign_with else None
    names = [name for _, name, *_ in (*NUMBERS, *WORDS)]
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    prepared = private_evaluation.prepare(arguments.model, arguments.data, weights=arguments.weights, **options)
    if trained_on(Path(arguments.model), arguments.data):
        print(
            f"WARNING: the run was trained on '{arguments.data}', so most of these records are not a test: scores are "
            "too good, and what the model and this evaluation tell of a record adds up.",
            file=sys.stderr,
        )
    if differs := unlike_the_run(Path(arguments.model), options, prepared.plan.privacy):
        say(f"note: {differs}", aside=True)
    shared = None
    if arguments.ledger is not None:
        shared = private_evaluation.join_ledger(prepared, arguments.ledger, arguments.limit)
    found, cert = private_evaluation.evaluate_into(prepared, out, shared, signer)
    document = {**found, "certified": cert["certified"], "reasons": cert["reasons"], "out": str(out)}
    if not emit(arguments, document):
        lines = [*rows(found), *_privacy(found, cert)]
        if shared is not None:
            total = shared.summary()
            limit = "" if total["limit"] is None else f" of {total['limit']:g}"
            text = f"ε = {total['epsilon']:.4g}{limit} at δ = {total['delta']:g} over {total['runs']} uses of this file"
            lines.append(("ledger", f"{text}{total['caveat']} ({shared.path.name})"))
        may = "public/ may be published, private/ may not" if cert["certified"] else "nothing here may be published"
        facts([*lines, ("files", f"{out}: {may} (README.txt)")])
        if why := noised_metrics.doubt(found):
            console().print(why, markup=False)
    return 0


def trained_on(model: Path, data: str) -> bool:
    """Whether a file has the records that the run was trained on, as far as the run's folder tells."""
    from sordino.data.identity import records_digest
    from sordino.training.folder import RunFolder

    try:
        source = Path(str(RunFolder.find(model).settings().get("data", "")))
        if not (source.is_file() and Path(data).is_file()):
            return False
        return source.samefile(data) or records_digest(str(source)) == records_digest(data)
    except (SordinoError, OSError):
        return False


def unlike_the_run(model: Path, given: Mapping[str, Any], privacy: Privacy) -> str:
    """Where the defaults of an evaluation differ from the run's promise, for people; empty if nothing differs."""
    from sordino.training.folder import RunFolder
    from sordino.training.spec import Spec

    try:
        settings = RunFolder.find(model).settings()
    except (SordinoError, OSError):
        return ""
    notes, trust, delta = [], str(settings.get("trust", Spec.trust)), float(settings.get("delta", Spec.delta))
    if "trust" not in given and trust != privacy.trust:
        notes.append(
            f"the run assumed {trust}, this evaluation assumes {privacy.trust} (the default), which needs more noise; "
            f"--trust {trust} is right if the test records are counted in the same way."
        )
    if "delta" not in given and delta != privacy.delta:
        notes.append(f"δ is {privacy.delta:g} (the default), and that of the run is {delta:g}; --delta sets it.")
    return " ".join(notes)


def default_folder(model: Path) -> Path:
    """The first free folder evaluation-1, evaluation-2, … in the run."""
    from sordino.training.folder import RunFolder

    root = RunFolder.find(model).root
    return next(path for k in range(1, 1_000_000) if not (path := root / f"evaluation-{k}").exists())


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What an evaluation found, line by line."""
    from sordino.federation.sentences import interval_text

    level = f"{found['confidence']:.0%}"
    tested = "persons, whose records share one count" if found["unit"] == "person" else "test records"
    lines = [("evaluation", f"{found['records']:,} {tested}; intervals of {level} cover sampling and noise")]

    def line(name: str, key: str, text: str = "") -> None:
        if key in found:
            lines.append((name, interval_text(found[key], key, found["task"] == "counts") + text))

    line("accuracy", "accuracy", f" (threshold {found['threshold']:g})" if found["task"] == "two classes" else "")
    if "auc" in found:
        line("AUC", "auc", f"; bins alone change it by at most {found['auc']['binning']:.3f}")
    line("sensitivity", "sensitivity")
    line("specificity", "specificity")
    line("Brier score", "brier")
    line("Brier gain", "brier_gain", "; above 0 is better than the prevalence as every risk")
    line("predicted", "mean_predicted", " on average")
    line("observed", "observed", "")
    line("difference", "predicted_minus_observed", ", predicted minus observed")
    line("concordance", "concordance", ", of times in intervals")
    line("deviance", "deviance", f"; one above {found.get('most_deviance')} counts as that much")
    line("abs. error", "mae")
    line("sq. error", "mse")
    line("R²", "r2")
    for group in found.get("calibration_curve", ()):
        where = f"score {group['from']:.3f} to {group['to']:.3f}"
        observed = "open" if group["observed"] is None else f"{group['observed']:.1%}"
        lines.append(("calibration", f"{where}: observed {observed} ({group['low']:.1%} to {group['high']:.1%})"))
    return lines


def _privacy(found: dict[str, Any], cert: dict[str, Any]) -> list[tuple[str, str]]:
    promise = f"ε = {cert['epsilon']:.4g} at δ = {cert['delta']:g}, {found['unit']} level, {found['adjacency']}"
    return [
        ("privacy", f"{promise}, {found['trust']}"),
        (
            "noise",
            f"{found['noise']:.4g} on each count; one {found['unit']} moves the counts by at most "
            f"{found['sensitivity_of_counts']:.4g} ({found['adjacency']})",
        ),
        ("verdict", "certified" if cert["certified"] else f"NOT certified: {'; '.join(cert['reasons'])}"),
    ]
