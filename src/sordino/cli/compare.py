"""`sordino compare`: methods under equal budgets, tuned alike, tested for significance, drawn."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.cli.run import read_keys
from sordino.cli.show import (
    add_device,
    add_json,
    bar,
    check_json,
    check_out,
    command,
    console,
    emit,
    numbers,
    seed_count,
    table,
)
from sordino.cli.sweep import add_keys, add_payment, check_device, check_payment
from sordino.core import Privacy
from sordino.errors import SordinoError

if TYPE_CHECKING:
    from sordino.studies.compare import Contestant

OWN_KEYS = ("method", "epsilon", "seed", "noise")  # that a comparison sets for every run


def add(commands: Any) -> None:
    parser = command(
        commands,
        "compare",
        act,
        "compare methods under exactly equal budgets, and write a report",
        "sordino compare --methods dp-fedgd,dp-fedsofim,auto --epsilons 2,8 --seeds 3\n"
        "sordino compare --data features.npz --methods paper,auto --epsilons 0.5,1,5,10 --tune --device cuda\n"
        "sordino compare --methods auto,dp-fedgd,dp-fedadam --epsilons 1,4 --tune --charge-tuning count --paid-runs 8\n"
        "sordino compare --methods dp-fedsofim,dp-fedsofim:apply_to=momentum --epsilons 8 --ablation --sensitivity\n"
        "sordino compare --methods all --epsilons 4,inf --settings results/settings.json --out runs/all\n"
        "sordino compare --data stays.csv --schema schema.toml --methods auto,dp-fedadam --metric mae",
    )
    add_keys(parser, OWN_KEYS)
    parser.add_argument(
        "--methods",
        default="paper",
        metavar="A,B,…",
        help="paper, all, or names: dp-fedgd,dp-fedsofim:rho=1 (default: paper)",
    )
    parser.add_argument(
        "--epsilons", default="8", metavar="A,B,…", help="privacy budgets; inf trains without noise (default: 8)"
    )
    parser.add_argument(
        "--seeds",
        type=seed_count,
        default=3,
        metavar="N",
        help="number of seeds; each changes the noise, and the partition of public records (default: 3)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="rank by it: accuracy, auc, log_loss, brier; balanced_accuracy, macro_auc; r2, mse, mae; d2, deviance; "
        "concordance (default: by task)",
    )
    parser.add_argument("--tune", action="store_true", help="tune each method once per budget, on validation records")
    parser.add_argument("--search", default="grid", metavar="HOW", help="grid, halving or optuna (default: grid)")
    parser.add_argument(
        "--trials",
        type=int,
        default=64,
        metavar="N",
        help="number of Optuna trials per method and budget (default: 64)",
    )
    parser.add_argument(
        "--preset",
        default="paper-fine",
        metavar="NAME",
        help="grid to tune over: paper-coarse, paper-fine or steps (default: paper-fine)",
    )
    parser.add_argument(
        "--tune-round", type=int, metavar="N", help="choose settings by the metric after round N (default: the last)"
    )
    add_payment(parser, "add rows that are tuned within the budget, and how that is paid for", "8")
    parser.add_argument(
        "--one-party",
        action="store_true",
        help="add a row for one trusted party that holds all records: objective perturbation, not certified",
    )
    parser.add_argument("--settings", metavar="FILE", help="settings.json of an earlier comparison, instead of tuning")
    parser.add_argument(
        "--only-tune", action="store_true", help="stop after tuning; the chosen settings are in settings.json"
    )
    parser.add_argument(
        "--pairs",
        metavar="A/B,…",
        help="pairs of labels for McNemar's test (default: the last method against each other)",
    )
    parser.add_argument("--of", metavar="LABEL", help="method for --ablation and --sensitivity (default: dp-fedsofim)")
    parser.add_argument(
        "--ablation", action="store_true", help="also run DP-FedSOFIM without its parts, at equal effective step"
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="also vary lr, rho and beta around the chosen setting"
    )
    add_device(parser)
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/compare-TIME)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    check_device(arguments.device)
    from sordino.studies import compare, report

    base = read_keys(arguments)
    out = Path(arguments.out or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    _check(arguments, base)
    metric = compare.check_metric(arguments.metric, base)
    who = compare.contestants(arguments.methods.split(","), base)
    epsilons, seeds = budgets(arguments.epsilons), range(1, arguments.seeds + 1)
    if not seeds:
        raise SordinoError(f"--seeds: {arguments.seeds} must be at least 1.")
    paid: list[compare.PaidSearch] = []
    if arguments.charge_tuning != "no":
        paid = compare.paid_lineup(
            who,
            base,
            epsilons,
            seeds,
            arguments.charge_tuning,
            grid=arguments.preset,
            runs=arguments.paid_runs or compare.PAID_RUNS,
            public=arguments.public,
            metric=metric,
        )
    if arguments.one_party:
        compare.one_party_lineup(base, epsilons, seeds)  # refuses what has no such row
    tuned = ["settings.json"] if arguments.tune or arguments.only_tune else []
    check_out(out, *tuned, *([] if arguments.only_tune else ["compare.json"]))
    out.mkdir(parents=True, exist_ok=True)
    tuning = compare.UNTOUCHED
    if arguments.settings:
        tuning = compare.frozen(Path(arguments.settings))
    elif tuned:
        tuning = _tuned(arguments, who, base, epsilons, metric)
        (out / "settings.json").write_text(json.dumps(tuning, indent=1) + "\n", encoding="utf-8")
    if arguments.only_tune:
        console().print(f"settings chosen: {out / 'settings.json'} ({tuning['how']})", markup=False)
        return 0
    runs = compare.lineup(who, base, epsilons, seeds, tuning)
    of = arguments.of or next((each.label for each in reversed(who) if each.method == "dp-fedsofim"), "")
    for wanted, more in ((arguments.ablation, compare.ablation), (arguments.sensitivity, compare.sensitivity)):
        if wanted:
            added = more(runs, of)
            if not added:
                raise SordinoError(f"--of: '{of}' is not among the methods; name a label such as {who[0].label}.")
            runs = [*runs, *added]
    alone = compare.one_party_lineup(base, epsilons, seeds, tuning) if arguments.one_party else []
    labels = [each.label for each in who]
    labels[:-1] += dict.fromkeys(search.label for search in paid)
    with bar("runs", len(runs) + len(paid) + len(alone)) as tick:
        document = compare.document(
            runs,
            base=base,
            tuning=tuning,
            command="sordino " + " ".join(map(shlex.quote, sys.argv[1:])),
            pairs=_pairs(arguments.pairs, labels),
            paid=paid,
            alone=alone,
            metric=metric,
            device=arguments.device,
            tick=tick,
        )
    (out / "compare.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    written = report.write(document, out)
    if not emit(arguments, document):
        _show(document)
        console().print(f"written to {out}: compare.json, {', '.join(path.name for path in written[:2])}", markup=False)
    return 0


def _check(arguments: argparse.Namespace, base: dict[str, Any]) -> None:
    """Refuse flags that contradict each other, and keys that a comparison sets itself."""
    for key in OWN_KEYS:
        if key in base:
            raise SordinoError(f"{key}: a comparison sets it for every run; use --methods, --epsilons and --seeds.")
    if arguments.tune and arguments.settings:
        raise SordinoError("--tune: --settings names the settings already; leave out one of the two.")
    if arguments.tune_round is not None and not (arguments.tune or arguments.only_tune):
        raise SordinoError("--tune-round: nothing is tuned; add --tune or --only-tune, or leave it out.")
    if arguments.tune_round is not None and arguments.tune_round < 1:
        raise SordinoError(f"--tune-round: {arguments.tune_round} must be at least 1.")
    if arguments.search == "optuna" and arguments.trials < 1:
        raise SordinoError(f"--trials: {arguments.trials} must be at least 1.")
    check_payment(arguments)
    if arguments.charge_tuning != "no" and (arguments.only_tune or arguments.tune_round is not None):
        other = "only-tune" if arguments.only_tune else "tune-round"
        raise SordinoError(
            f"--{other}: a search within the budget chooses by the last round and hands out its model; leave out "
            f"--{other} or --charge-tuning."
        )


def _tuned(
    arguments: argparse.Namespace,
    who: Sequence[Contestant],
    base: dict[str, Any],
    epsilons: list[float],
    metric: str | None,
) -> dict[str, Any]:
    """The best settings of each method at each budget, on validation records."""
    from sordino.studies import compare

    with bar("settings") as tick:
        return compare.settle(
            who,
            base,
            epsilons,
            how=arguments.search,
            trials=arguments.trials,
            grid=arguments.preset,
            metric=metric,
            tune_round=arguments.tune_round,
            alone=arguments.one_party,
            device=arguments.device,
            tick=tick,
        )


def _show(document: dict[str, Any]) -> None:
    from sordino.studies import report

    page, last = console(), report.by_metric(document) or report.final(document)
    table(last.head, [[cell.text for cell in row] for row in last.rows])
    if last.note:
        page.print(f"{last.note.partition(';')[0]}. Noise is seeded, so no run is certified.", markup=False)
    page.print(f"tuning: {document['tuning']['paid']}", markup=False)
    if document["exposed"]:
        page.print(f"exposed: {document['exposed']}", markup=False)
    for sentence, methods in report.within_budget(document).items():
        page.print(f"tuned within the budget ({', '.join(methods)}): {sentence}", markup=False)


def budgets(text: str) -> list[float]:
    """The budgets of --epsilons, checked as a run checks its own."""
    epsilons = numbers("--epsilons", text, "0.5,1,inf")
    for epsilon in epsilons:
        Privacy(epsilon)
    return epsilons


def _pairs(text: str | None, labels: list[str]) -> list[tuple[str, str]]:
    if text is None:
        return [(labels[-1], other) for other in labels[:-1]]
    pairs = [tuple(part.split("/")) for part in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or not set(pair) <= set(labels):
            raise SordinoError(f"--pairs: '{'/'.join(pair)}' should be two labels, as in {labels[0]}/{labels[-1]}.")
    return [(pair[0], pair[1]) for pair in pairs]
