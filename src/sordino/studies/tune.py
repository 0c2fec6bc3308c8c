"""Choose settings by a metric on validation records: a grid, successive halving, or Optuna.

A record is used for training or for validation, never for both, and test records are not used. Records are held out by
position, those of a person together, so the choice does not depend on their content. `private_tuning` computes what
such a search costs in privacy. A grid whose best value lies on its edge is extended on request, and the result says so:
a method whose best step lies outside its grid would be judged by the grid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sordino.data.sources import Dataset
from sordino.data.splits import generator, hold_out, hold_out_persons
from sordino.errors import SordinoError, check_known
from sordino.methods import entry
from sordino.studies import shared_study
from sordino.studies.grids import Grid, around, beyond, product
from sordino.training.batch import run_many
from sordino.training.evaluate import task_of_data
from sordino.training.metrics import goodness, ranking_metric
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

SEARCHES = ("grid", "halving", "optuna")
KEEP, RUNGS = 3, 3  # halving keeps one third at each rung: after one ninth and after one third of the rounds


class TuningCase(NamedTuple):
    """One method under one budget: the keys of its run, and the values to try for some of them."""

    values: dict[str, Any]
    grid: Grid


class Tuned(NamedTuple):
    values: dict[str, Any]  # keys of the run, with the best setting
    options: dict[str, Any]  # the best setting alone
    score: float  # its metric on validation records
    tried: int
    added: Mapping[str, list[Any]] = MappingProxyType({})  # by option: values tried beyond the edge of the grid
    edge: tuple[str, ...] = ()  # options whose best value still lies on the edge of what was tried


Tick = Callable[[int], None]


def validated(dataset: Dataset, fraction: float = 0.1) -> Dataset:
    """A data set of the training records only, with a part of them as test records; persons stay whole."""
    if not 0 < fraction < 1:
        raise SordinoError(
            f"validation: {fraction} must lie between 0 and 1; it is the share held out, and 0.1 is usual."
        )
    x, y, site, person, weight = dataset.x_train, dataset.y_train, dataset.site, dataset.person, dataset.weight
    whose, rng = np.zeros(len(y), int), generator(0, "validation")
    out = hold_out(whose, fraction, rng) if person is None else hold_out_persons(whose, person, fraction, rng)
    return dataset._replace(
        x_train=x[~out],
        y_train=y[~out],
        x_test=x[out],
        y_test=y[out],
        site=None if site is None else site[~out],
        person=None if person is None else person[~out],
        person_test=None if person is None else person[out],
        tested=None,  # these are for validation
        weight=None if weight is None else weight[~out],
    )


class _Trial(NamedTuple):
    case: int
    options: dict[str, Any]
    score: float


def tune(
    cases: Sequence[TuningCase],
    dataset: Dataset,
    *,
    how: str = "grid",
    trials: int = 64,
    storage: str | None = None,
    at_once: int = shared_study.AT_ONCE,
    stale_after: float = shared_study.STALE_AFTER,
    metric: str | None = None,
    tune_round: int | None = None,
    extensions: int = 0,
    device: str = "cpu",
    tick: Tick = lambda runs: None,
) -> list[Tuned]:
    """The best setting of every case, by one round's metric on `dataset`'s test part (see `validated`).

    Args:
        cases: What to tune.
        dataset: Training records, and validation records as its test part.
        how: `grid`, `halving` or `optuna`.
        trials: Number of Optuna's trials per case.
        storage: Optuna's storage. A study that it already holds is continued, and shared with other workers.
        at_once: Optuna's trials that this worker takes at a time.
        stale_after: Seconds without a sign of life after which a trial has lost its worker (`shared_study`).
        metric: accuracy, auc, log_loss …; of a loss the least is best (default: accuracy for classes, r2 for
            quantities).
        tune_round: The round whose metric decides (default: the last). The noise is always that of a whole run.
        extensions: How often a `grid` may be extended where its best value lies on an edge.
        device: `cpu` or `cuda`.
        tick: Called with the number of runs that finished; those of Optuna include the trials of other workers.

    Returns:
        One result per case, in order.

    Raises:
        SordinoError: The search, the metric or the round is unknown.
    """
    check_known("search", how, SEARCHES)
    if tune_round is not None and tune_round < 1:
        raise SordinoError(f"tune_round: {tune_round} must be at least 1; leave it out to choose by the last round.")
    metric = ranking_metric(metric, task_of_data(dataset))
    if how == "optuna":
        return [
            _optuna(case, dataset, metric, trials, storage, at_once, stale_after, tune_round, device, tick)
            for case in cases
        ]

    def score(settings: Sequence[tuple[int, dict[str, Any]]], stop: int | None) -> list[_Trial]:
        specs = [Spec.of({**cases[number].values, **options}) for number, options in settings]
        scores = _scores(specs, dataset, metric, device, stop, tick)
        return [_Trial(number, options, value) for (number, options), value in zip(settings, scores, strict=True)]

    def best(done: Sequence[_Trial], number: int) -> _Trial:
        mine = [trial for trial in done if trial.case == number]
        return max(mine, key=lambda trial: goodness(metric, trial.score))  # among equals the first one listed

    todo = [(number, options) for number, case in enumerate(cases) for options in product(case.grid)]
    tried, done = list(todo), list[_Trial]()
    for stop in _rungs([case.values for case in cases], tune_round) if how == "halving" else [tune_round]:
        done = score(todo, stop)
        todo = _survivors(done, metric, len(cases))
    grids, added = [dict(case.grid) for case in cases], [dict[str, list[Any]]() for _ in cases]
    for _ in range(extensions if how == "grid" else 0):
        more: list[tuple[int, dict[str, Any]]] = []
        for number, grid in enumerate(grids):
            centre = best(done, number).options
            new = {key: beyond(key, values, centre[key]) for key, values in grid.items()}
            for key, value in new.items():
                if value is not None:
                    more += [(number, options) for options in around(grid, centre, key, value)]
            for key, value in new.items():
                if value is not None:
                    grid[key] = (*grid[key], value)
                    added[number].setdefault(key, []).append(value)
        if not more:
            break
        done, tried = [*done, *score(more, tune_round)], [*tried, *more]
    results = []
    for number, case in enumerate(cases):
        options, value = best(done, number)[1:]
        edge = tuple(key for key, values in grids[number].items() if beyond(key, values, options[key]) is not None)
        runs = sum(each == number for each, _ in tried)
        results.append(Tuned({**case.values, **options}, options, value, runs, added[number], edge))
    return results


def _survivors(done: Sequence[_Trial], metric: str, cases: int) -> list[tuple[int, dict[str, Any]]]:
    """The best third of every case's trials, in the order in which they were listed."""
    kept = set[int]()
    for number in range(cases):
        mine = [i for i, trial in enumerate(done) if trial.case == number]
        ranked = sorted(mine, key=lambda i: -goodness(metric, done[i].score))
        kept |= set(ranked[: math.ceil(len(mine) / KEEP)])
    return [(trial.case, trial.options) for i, trial in enumerate(done) if i in kept]


def _scores(
    specs: Sequence[Spec], dataset: Dataset, metric: str, device: str, stop: int | None, tick: Tick
) -> list[float]:
    trained = run_many(specs, dataset, device=device, at=(), stop=stop, metric=metric, tick=tick)
    return [each.scores[max(each.scores)] for each in trained]


def _rungs(cases: Sequence[dict[str, Any]], last: int | None) -> Iterator[int]:
    """Number of rounds at each rung. The noise is always that of a whole run."""
    all_resolved = [resolve(Spec.of(values)) for values in cases]
    free = {each.rounds for each in all_resolved if not entry(each.method_name).fixed}
    rounds = free or {each.rounds for each in all_resolved}
    if len(free) > 1:
        raise SordinoError("search: halving needs the same number of rounds for all methods; set rounds.")
    whole = min(last or max(rounds), max(rounds))
    for rung in range(RUNGS - 1, -1, -1):
        yield max(1, whole // KEEP**rung)


def _optuna(
    case: TuningCase,
    dataset: Dataset,
    metric: str,
    trials: int,
    storage: str | None,
    at_once: int,
    stale_after: float,
    stop: int | None,
    device: str,
    tick: Tick,
) -> Tuned:
    def score(settings: Sequence[dict[str, Any]]) -> list[float]:
        specs = [Spec.of({**case.values, **options}) for options in settings]
        return [goodness(metric, value) for value in _scores(specs, dataset, metric, device, stop, lambda runs: None)]

    name = _study_name(case, dataset, metric, stop)
    found = shared_study.search(
        name, case.grid, score, trials=trials, storage=storage, at_once=at_once, stale_after=stale_after, tick=tick
    )
    return Tuned({**case.values, **found.options}, found.options, goodness(metric, found.value), found.complete)


def _study_name(case: TuningCase, dataset: Dataset, metric: str, stop: int | None) -> str:
    """What people look for in a storage, and a hash of all that scores depend on: other runs are another study."""
    values = case.values
    name = " ".join(str(values[key]) for key in ("method", "epsilon", "trust", "divisor") if key in values)
    spec = Spec.of({**values, **next(product(case.grid))}).toml()
    facts = [spec, sorted(case.grid.items()), len(dataset.y_train), len(dataset.y_test), metric, stop]
    return f"{name} {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
