"""`sordino sweep`: many settings of one method, trained side by side and ranked on validation records."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sordino.cli.run import RUN_FLAGS, read_keys
from sordino.cli.show import (
    add_device,
    add_json,
    bar,
    check_json,
    check_out,
    command,
    console,
    emit,
    seed_count,
    table,
    terminable,
)
from sordino.errors import SordinoError

PAY = ("no", "public", "count", "stopping")
WORKER_KEYS = ("at_once", "stale_after")  # of Optuna's search
METRIC_HELP = (
    "rank by accuracy, auc, log_loss or brier; quantities by r2, mse or mae; of a loss the least is best "
    "(default: accuracy or r2)"
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "sweep",
        act,
        "train many settings of one method at once, and rank them",
        "sordino sweep --method dp-fedgd --grid lr=0.5,1,2,4 --grid epsilon=2,4,8 --seeds 3\n"
        "sordino sweep --data features.npz --method dp-fedadam --preset paper-fine --epsilon 1 --device cuda\n"
        "sordino sweep --method dp-fedsofim --grid lr=0.1,10 --grid rho=0.1,10 --search optuna --trials 64\n"
        "sordino sweep --method dp-fedgd --grid lr=0.1,10.0 --search optuna --storage postgresql+psycopg://me@db/sweeps\n"
        "sordino sweep --data patients.csv --label died --method dp-fedgd --grid lr=1,2,4 --metric log_loss\n"
        "sordino sweep --method dp-fedgd --grid lr=1,2,4 --epsilon 8 --charge-tuning count --out runs/paid",
    )
    add_keys(parser)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B,…",
        help="values to try for one key; Optuna takes numbers with a point as a range",
    )
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="paper-coarse or paper-fine: the method's grid in the papers; steps: five step sizes around the default",
    )
    parser.add_argument("--seeds", type=seed_count, default=1, metavar="N", help="runs per setting (default: 1)")
    parser.add_argument("--metric", metavar="NAME", help=METRIC_HELP)
    parser.add_argument("--search", default="grid", metavar="HOW", help="grid, halving or optuna (default: grid)")
    parser.add_argument("--trials", type=int, default=64, metavar="N", help="number of Optuna trials (default: 64)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="database of Optuna's trials, which several workers may share (default: optuna.db in --out)",
    )
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="Optuna trials that this worker takes at a time (default: 16)"
    )
    parser.add_argument(
        "--stale-after",
        type=float,
        metavar="SECONDS",
        help="a trial whose worker was silent for so long is marked failed and replaced (default: 120)",
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.1,
        metavar="PART",
        help="share of the training records used for validation (default: 0.1)",
    )
    add_payment(parser, "how tuning is paid for", "all settings; stopping: 16")
    parser.add_argument(
        "--ledger", metavar="FILE.db", help="charge all runs of a paid search to this ledger, before the first begins"
    )
    parser.add_argument(
        "--limit", type=float, metavar="X", help="most epsilon of all runs on the same data in --ledger"
    )
    add_device(parser)
    parser.add_argument("--out", metavar="DIR", help="folder for sweep.json")
    add_json(parser)


def add_payment(parser: argparse.ArgumentParser, what: str, runs: str) -> None:
    """The flags of a search within the budget."""
    parser.add_argument(
        "--charge-tuning", default="no", metavar="HOW", help=f"{what}: {', '.join(PAY)} (docs/how-to/tune.md)"
    )
    parser.add_argument(
        "--public", metavar="FILE", help="public records that score the settings (with --charge-tuning public)"
    )
    parser.add_argument(
        "--paid-runs",
        type=int,
        metavar="N",
        help="runs of a paid search, with settings drawn at random from the grid; stopping: runs expected "
        f"(default: {runs})",
    )


def check_payment(arguments: argparse.Namespace) -> None:
    """Refuse words and combinations that do not make a paid search, before any work."""
    if arguments.charge_tuning not in PAY:
        raise SordinoError(f"--charge-tuning: '{arguments.charge_tuning}' is unknown; one of {', '.join(PAY)}.")
    if (arguments.charge_tuning == "public") != bool(arguments.public):
        raise SordinoError("--public: give it together with --charge-tuning public, and only then.")
    if arguments.paid_runs is not None and arguments.charge_tuning == "no":
        raise SordinoError("--paid-runs: nothing is paid for; add --charge-tuning, or leave it out.")
    if arguments.paid_runs is not None and arguments.paid_runs < 1:
        raise SordinoError(f"--paid-runs: {arguments.paid_runs} must be at least 1.")


def check_workers(arguments: argparse.Namespace) -> None:
    """Refuse flags that the search would not use."""
    if arguments.charge_tuning != "no" and arguments.search != "grid":
        raise SordinoError(
            f"--search: --charge-tuning {arguments.charge_tuning} tries the settings of the grid, all of them or some "
            "drawn at random, because its price is known before the first run; leave --search out."
        )
    for key in ("storage", *WORKER_KEYS):
        if getattr(arguments, key) is not None and arguments.search != "optuna":
            raise SordinoError(
                f"--{key.replace('_', '-')}: only --search optuna stores and shares trials; add it, or leave this out."
            )


def add_keys(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Add the flags of `sordino run`, for all runs of the command.

    Args:
      parser: of the command.
      hidden: keys that the command sets itself. Their flags are read, so that the refusal says what to use, and --help
        does not list them.
    """
    parser.add_argument(
        "spec",
        nargs="?",
        metavar="SPEC.toml|DATA",
        help="keys of the runs, which flags and --set override; or a table or data set, as --data",
    )
    for flag, key, text in RUN_FLAGS:
        told = argparse.SUPPRESS if key in hidden else text
        parser.add_argument(flag, dest=f"key_{key}", metavar="X", help=told)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the runs")


def check_device(name: str) -> None:
    """Before any work. Of several GPUs the commands use the first."""
    from sordino.data import records

    if name not in ("cpu", "cuda"):
        raise SordinoError(f"--device: '{name}' is unknown; use cpu or cuda.")
    records.check_device(name, "--device")


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    check_device(arguments.device)
    from sordino.studies import grids, sweep

    values, out = read_keys(arguments), Path(arguments.out) if arguments.out else None
    check_payment(arguments)
    if arguments.search == "optuna" and arguments.trials < 1:
        raise SordinoError(f"--trials: {arguments.trials} must be at least 1.")
    check_workers(arguments)
    if arguments.ledger and arguments.charge_tuning == "no":
        raise SordinoError("--ledger: nothing is paid for; add --charge-tuning, or leave it out.")
    if arguments.limit is not None and not arguments.ledger:
        raise SordinoError("--limit: it is the limit of a ledger; name one with --ledger mine.db.")
    if arguments.storage and not re.match(r"[a-z0-9+]+://", arguments.storage):
        raise SordinoError(f"--storage: '{arguments.storage}' is not the URL of a database; write sqlite:///FILE.db.")
    grid = sweep.grid_of(arguments.grid, arguments.preset, values)
    if out:
        check_out(out, "sweep.json")
        out.mkdir(parents=True, exist_ok=True)
    size = grids.size(grid)
    shared = {key: value for key in WORKER_KEYS if (value := getattr(arguments, key)) is not None}
    total = {"grid": min(arguments.paid_runs or size, size) * arguments.seeds, "optuna": arguments.trials}.get(
        arguments.search
    )
    hidden = arguments.charge_tuning == "stopping"  # the number of runs is a secret
    with terminable(), nullcontext(lambda runs: None) if hidden else bar("settings", total) as tick:
        if arguments.charge_tuning == "no":
            results = sweep.sweep(
                values,
                grid,
                seeds=arguments.seeds,
                how=arguments.search,
                trials=arguments.trials,
                storage=arguments.storage or (f"sqlite:///{out / 'optuna.db'}" if out else None),
                **shared,
                validation=arguments.validation,
                metric=arguments.metric,
                device=arguments.device,
                tick=tick,
            )
        else:
            results = sweep.paid(
                values,
                grid,
                arguments.charge_tuning,
                public=arguments.public,
                validation=arguments.validation,
                metric=arguments.metric,
                runs=arguments.paid_runs,
                ledger=Path(arguments.ledger) if arguments.ledger else None,
                limit=arguments.limit,
                device=arguments.device,
                out=out,
                tick=tick,
            )
    if out:
        sweep.keep(results, out)
    if not emit(arguments, results):
        _tell(results, out)
    return 0


def _tell(results: dict[str, Any], out: Path | None) -> None:
    from sordino.training.metrics import NAMES, written

    page = console()
    if "rows" in results:
        varied, metric = results["varied"], results["metric"]
        rows = [
            [
                *(_shown(row["setting"].get(key, ""), results) for key in varied),
                written(metric, row["mean"], row["std"]),
            ]
            for row in results["rows"][: results["shown"]]
        ]
        table([*varied, f"validation {NAMES[metric]}"], rows)
        if len(results["rows"]) > results["shown"]:
            page.print(f"… and {len(results['rows']) - results['shown']} more; --json or --out keeps all", markup=False)
        if results["tried"] > len(results["rows"]):
            page.print(f"tried: {results['tried']} settings; {results['search']} shows the best", markup=False)
    best = ", ".join(f"{key} = {_shown(value, results)}" for key, value in results["best"].items())
    page.print(f"best: {best}", markup=False)
    for key, value in results.get("beyond", {}).items():
        page.print(
            f"note: {key} = {results['best'][key]} is at the edge of what was tried; try {value} too", markup=False
        )
    page.print(f"tuning: {results['paid']}", markup=False)
    if "certificate" in results:
        cert = results["certificate"]
        verdict = f"certified: ε = {cert['epsilon']:.4g} at δ = {cert['delta']:g}, all runs of the search together"
        page.print(verdict if cert["certified"] else f"not certified: {'; '.join(cert['reasons'])}", markup=False)
    if results.get("command"):
        page.print(f"train it: {results['command']}", markup=False)
    if out:
        page.print(f"written to {out}", markup=False)


def _shown(value: Any, results: dict[str, Any]) -> str:
    """A setting for people. Optuna proposes numbers with 16 digits; files and the command keep all of them."""
    return f"{value:.4g}" if isinstance(value, float) and results["search"] == "optuna" else f"{value}"
