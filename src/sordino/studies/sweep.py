"""A sweep: settings of one method, ranked by a metric on validation records. The search is paid for if requested."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.evidence.certificate import finite
from sordino.evidence.signing import sha256
from sordino.evidence.statement import issue
from sordino.methods import entry
from sordino.settings import parse_setting
from sordino.studies import private_tuning, shared_study
from sordino.studies.compare import as_command
from sordino.studies.grids import Grid, beyond, preset, product
from sordino.studies.tune import TuningCase, tune, validated
from sordino.training.artifacts import save_model
from sordino.training.batch import run_many
from sordino.training.evaluate import task_of_data
from sordino.training.metrics import goodness, ranking_metric
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.version import __version__

SHOWN = 20
Tick = Callable[[int], None]


def grid_of(texts: Sequence[str], name: str | None, values: dict[str, Any]) -> Grid:
    """The grid from `key=a,b,c` and a preset. Explicit keys replace those of the preset."""
    grid = preset(name, values.get("method", Spec.method), float(values.get("epsilon", Spec.epsilon))) if name else {}
    for text in texts:
        key, equals, listed = text.partition("=")
        if not equals or not listed.strip():
            raise SordinoError(f"--grid: '{text}' must have the form key=a,b,c, as in --grid lr=0.5,1,2.")
        grid[key.strip()] = tuple(_typed(values, *parse_setting(f"{key}={part}")) for part in listed.split(","))
    if not grid:
        raise SordinoError("--grid: nothing to try; give --grid lr=0.5,1,2, or --preset paper-fine.")
    for key, tried in grid.items():
        if key in ("seed", "split_seed", "data", "method"):
            raise SordinoError(
                f"--grid: {key} cannot be in a grid; --seeds repeats runs, and `sordino compare` takes several methods."
            )
        if len(set(map(str, tried))) < len(tried):
            raise SordinoError(f"--grid: {key} lists a value twice; list each value once.")
    if "epsilon" in values and "epsilon" in grid:
        raise SordinoError("--grid: epsilon is set in the grid and beside it; leave out one of the two.")
    return grid


def _typed(values: dict[str, Any], key: str, value: Any) -> Any:
    """Parse a value as a run parses it."""
    return Spec.of({**values, key: value}).values().get(key)


def sweep(
    values: dict[str, Any],
    grid: Grid,
    *,
    seeds: int = 1,
    how: str = "grid",
    trials: int = 64,
    storage: str | None = None,
    at_once: int = shared_study.AT_ONCE,
    stale_after: float = shared_study.STALE_AFTER,
    validation: float = 0.1,
    metric: str | None = None,
    device: str = "cpu",
    tick: Tick = lambda runs: None,
) -> dict[str, Any]:
    """Every setting's metric on validation records, mean over seeds, best first. Test records are not used.

    metric: accuracy, auc, log_loss …; of a loss the least is best (default: accuracy for classes, r2 for quantities).
    """
    if seeds < 1:
        raise SordinoError(f"--seeds: {seeds} must be at least 1.")
    first = int(values.get("seed", 1))
    base = {**values, "seed": first, "split_seed": values.get("split_seed", 0)}
    dataset = validated(resolve(Spec.of({**base, **next(product(grid))})).read_data(), validation)
    metric = ranking_metric(metric, task_of_data(dataset))
    if how != "grid":
        if seeds > 1:
            raise SordinoError("--seeds: halving and optuna use one seed; use --search grid, or leave it out.")
        cases = [TuningCase(base, grid)]
        (best,) = tune(
            cases,
            dataset,
            how=how,
            trials=trials,
            storage=storage,
            at_once=at_once,
            stale_after=stale_after,
            metric=metric,
            device=device,
            tick=tick,
        )
        row = {"setting": best.options, "mean": best.score, "std": None, "scores": [best.score]}
        return _found(values, grid, [row], best.tried, how, metric)
    settings = list(product(grid))
    specs = [Spec.of({**base, **setting, "seed": first + k}) for setting in settings for k in range(seeds)]
    trained = run_many(specs, dataset, device=device, at=(), metric=metric, tick=tick)
    scores = [each.scores[max(each.scores)] for each in trained]
    rows: list[dict[str, Any]] = []
    for i, setting in enumerate(settings):
        mine = scores[i * seeds : (i + 1) * seeds]
        defined = all(map(math.isfinite, mine))
        std = statistics.pstdev(mine) if seeds > 1 and defined else None
        shown = {key: finite(value) if isinstance(value, float) else value for key, value in setting.items()}
        mean = statistics.fmean(mine) if defined else None
        rows.append({"setting": shown, "mean": mean, "std": std, "scores": [finite(value) for value in mine]})
    rows.sort(key=lambda row: -goodness(metric, row["mean"]))
    return _found(values, grid, rows, len(settings), how, metric)


def _found(
    values: dict[str, Any], grid: Grid, rows: list[dict[str, Any]], tried: int, how: str, metric: str
) -> dict[str, Any]:
    best = rows[0]["setting"]
    spec = Spec.of({**values, **{key: math.inf if value is None else value for key, value in best.items()}})
    options = entry(spec.method).options.keys() & grid.keys()
    return {
        "sordino": __version__,
        "search": how,
        "metric": metric,
        "tried": tried,
        "varied": list(grid),
        "rows": rows,
        "shown": SHOWN,
        "best": best,
        "beyond": {key: value for key in sorted(options) if (value := beyond(key, grid[key], best[key])) is not None},
        "paid": private_tuning.UNPAID,
        "command": as_command(spec),
    }


def paid(
    values: dict[str, Any],
    grid: Grid,
    how: str,
    *,
    public: str | None = None,
    validation: float = 0.1,
    metric: str | None = None,
    runs: int | None = None,
    ledger: Path | None = None,
    limit: float | None = None,
    device: str = "cpu",
    out: Path | None = None,
    tick: Tick = lambda runs: None,
) -> dict[str, Any]:
    """Tune privately within the budget. With `out`, write the chosen run's model, certificate and statement there.

    runs: see `private_tuning.search`. ledger, limit: charge all runs first (`private_tuning.charge`).
    """
    base = resolve(Spec.of({**values, **next(product(grid))}))
    base.check_certifiable()
    dataset = private_tuning.scoring(base, base.read_data(), public, validation)
    if ledger is not None:
        private_tuning.charge(values, grid, dataset, how, ledger, limit, metric=metric, runs=runs)
    chosen = private_tuning.search(values, grid, dataset, how, metric=metric, runs=runs, device=device, tick=tick)
    cert = private_tuning.certificate_of(chosen)
    if out:
        path = out / "model.safetensors"
        save_model(path, chosen.trained.resolved, dataset, chosen.trained.model, chosen.trained.theta)
        cert, text = issue(cert | {"model_sha256": sha256(path)})
        (out / "certificate.json").write_text(json.dumps(cert, indent=2) + "\n", encoding="utf-8")
        (out / "statement.md").write_bytes(text.encode())
        (out / "chosen.toml").write_text(chosen.trained.resolved.spec.toml(), encoding="utf-8")
    return {
        "sordino": __version__,
        "search": how,
        "varied": list(grid),
        "best": chosen.options,
        "paid": chosen.account["sentence"],
        "account": chosen.account,
        "certificate": cert,
    }


def keep(results: dict[str, Any], out: Path) -> None:
    (out / "sweep.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
