"""Choose settings by a metric on validation records: a grid, successive halving, or Optuna.

A record is used for training or for validation, never for both, and test records are not used. Records are held out by
position, so the choice does not depend on their content. `private_tuning` computes what such a search costs in privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sordino.data.sources import Dataset
from sordino.data.splits import generator, hold_out
from sordino.errors import SordinoError, nearest
from sordino.studies.grids import Grid, product, size
from sordino.training.batch import run_many
from sordino.training.evaluate import task_of_data
from sordino.training.metrics import goodness, ranking_metric
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

SEARCHES = ("grid", "halving", "optuna")
KEEP, RUNGS = 3, 3  # halving keeps one third at each rung: after one ninth and after one third of the rounds
RUNS_PER_BATCH = 16  # trials that Optuna proposes at once


class TuningCase(NamedTuple):
    """One method under one budget: the keys of its run, and the values to try for some of them."""

    values: dict[str, Any]
    grid: Grid


class Tuned(NamedTuple):
    values: dict[str, Any]  # keys of the run, with the best setting
    options: dict[str, Any]  # the best setting alone
    score: float  # its metric on validation records
    tried: int


Tick = Callable[[int], None]


def validated(dataset: Dataset, fraction: float = 0.1, seed: int = 0) -> Dataset:
    """A data set of the training records only, with a part of them as test records."""
    if not 0 < fraction < 1:
        raise SordinoError(
            f"validation: {fraction} must lie between 0 and 1; it is the share held out, and 0.1 is usual."
        )
    whose = np.zeros(len(dataset.y_train), int)
    out = hold_out(whose, fraction, generator(seed, "validation"))
    x, y, site = dataset.x_train, dataset.y_train, dataset.site
    return dataset._replace(
        x_train=x[~out], y_train=y[~out], x_test=x[out], y_test=y[out], site=None if site is None else site[~out]
    )


def tune(
    cases: Sequence[TuningCase],
    dataset: Dataset,
    *,
    how: str = "grid",
    trials: int = 64,
    storage: str | None = None,
    metric: str | None = None,
    device: str = "cpu",
    tick: Tick = lambda runs: None,
) -> list[Tuned]:
    """The best setting of every case, by the last round's metric on `dataset`'s test part (see `validated`).

    metric: accuracy, auc, log_loss …; of a loss the least is best (default: accuracy for classes, r2 for quantities).
    trials, storage: for Optuna. A study that `storage` already holds is continued.
    """
    if how not in SEARCHES:
        raise SordinoError(f"search: '{how}' is unknown.{nearest(how, SEARCHES)}")
    metric = ranking_metric(metric, task_of_data(dataset))
    if how == "optuna":
        return [_optuna(case, dataset, metric, trials, storage, device, tick) for case in cases]
    trials_left = [(number, options) for number, case in enumerate(cases) for options in product(case.grid)]
    for stop in _rungs([case.values for case in cases]) if how == "halving" else [None]:
        specs = [Spec.of({**cases[number].values, **options}) for number, options in trials_left]
        scores = _scores(specs, dataset, metric, device, stop, tick)
        good = [goodness(metric, score) for score in scores]
        ranked = sorted(range(len(trials_left)), key=lambda i: -good[i])  # stable: among equals the first one listed
        best = [next(i for i in ranked if trials_left[i][0] == number) for number in range(len(cases))]
        winners = [(trials_left[i][1], scores[i]) for i in best]
        places = {number: math.ceil(sum(n == number for n, _ in trials_left) / KEEP) for number in range(len(cases))}
        survivors = set()
        for i in ranked:
            if places[trials_left[i][0]]:
                places[trials_left[i][0]] -= 1
                survivors.add(i)
        trials_left = [each for i, each in enumerate(trials_left) if i in survivors]
    return [
        Tuned({**case.values, **options}, options, score, size(case.grid))
        for case, (options, score) in zip(cases, winners, strict=True)
    ]


def _scores(
    specs: Sequence[Spec], dataset: Dataset, metric: str, device: str, stop: int | None, tick: Tick
) -> list[float]:
    trained = run_many(specs, dataset, device=device, at=(), stop=stop, metric=metric, tick=tick)
    return [each.scores[max(each.scores)] for each in trained]


def _rungs(cases: Sequence[dict[str, Any]]) -> Iterator[int | None]:
    """Number of rounds at each rung. The noise is always that of a whole run."""
    rounds = {resolve(Spec.of(values)).rounds for values in cases}
    if len(rounds) > 1:
        raise SordinoError("search: halving needs the same number of rounds for all methods; set rounds.")
    (whole,) = rounds
    for rung in range(RUNGS - 1, 0, -1):
        yield max(1, whole // KEEP**rung)
    yield None


def _optuna(
    case: TuningCase, dataset: Dataset, metric: str, trials: int, storage: str | None, device: str, tick: Tick
) -> Tuned:
    try:
        import optuna
    except ImportError:
        raise SordinoError(
            "search: optuna is not installed; pip install 'sordino[search]', or search = grid."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values = case.values
    name = " ".join(str(values[key]) for key in ("method", "epsilon", "trust", "divisor") if key in values)
    name += "" if metric == "accuracy" else f" by {metric}"  # a stored study holds the scores of one metric
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
    )
    space = {key: _distribution(options) for key, options in case.grid.items()}
    done = len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE]))
    while done < trials:
        asked = [study.ask(space) for _ in range(min(RUNS_PER_BATCH, trials - done))]
        specs = [Spec.of({**values, **trial.params}) for trial in asked]
        for trial, score in zip(asked, _scores(specs, dataset, metric, device, None, tick), strict=True):
            study.tell(trial, goodness(metric, score))
        done += len(asked)
    best = study.best_trial
    return Tuned({**values, **best.params}, dict(best.params), goodness(metric, float(best.values[0])), done)


def _distribution(values: tuple[Any, ...]) -> Any:
    """The range between the ends of a grid: log scale for steps, linear for momentum; integers and names as listed."""
    from optuna import distributions

    if len(values) < 2 or not all(isinstance(value, float) for value in values):
        return distributions.CategoricalDistribution(values)
    log = min(values) > 0 and max(values) / min(values) > 3
    return distributions.FloatDistribution(min(values), max(values), log=log)
