"""Optuna's search, by one worker or by several that share a storage.

A worker is a process that calls `search`, on any machine that reaches the storage. Workers do not talk to each other.

- A trial changes its state once, from running to complete or to failed. So no result counts twice, and a study never
  has more complete trials than requested (`_claim`).
- A worker writes a growing number, the beat, to its running trials. If a beat stands still for `stale_after` seconds,
  the trial has lost its worker: it is marked failed, and a new trial takes its place. Each worker measures these
  seconds with its own clock, because the clocks of machines differ.
- If a lost worker goes on after all, its result is discarded.
- The proposal of a trial is seeded by the number of the trial, so that workers do not propose the same settings.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from sordino.errors import SordinoError
from sordino.studies.grids import Grid

AT_ONCE = 16  # trials that a worker trains side by side
STALE_AFTER = 120.0  # seconds
LONGEST_SILENCE = 86_400  # seconds; the most that may be given
BEATS = 4  # in `stale_after` seconds
LONGEST_PAUSE = 2.0  # seconds between two looks at the trials of others
BUSY_TIMEOUT = 60  # seconds that a worker waits for a locked SQLite file
BEAT = "beat"
Options = dict[str, Any]


class Found(NamedTuple):
    """The best trial of a study."""

    options: Options
    value: float
    complete: int  # trials of all workers


def search(
    name: str,
    grid: Grid,
    score: Callable[[Sequence[Options]], Sequence[float]],
    *,
    trials: int,
    storage: str | None = None,
    at_once: int = AT_ONCE,
    stale_after: float = STALE_AFTER,
    tick: Callable[[int], None] = lambda trials: None,
) -> Found:
    """Take part in a study until it has its trials.

    Args:
        name: The study. Workers that give the same name and storage share it.
        grid: The range of each option.
        score: The values of some settings; the greatest is best.
        trials: Complete trials of all workers together.
        storage: URL of a database; None keeps the study in memory.
        at_once: Trials that this worker takes at a time.
        stale_after: Seconds without a beat after which a trial has lost its worker.
        tick: Called with the number of trials, of any worker, that were completed since it was called last; also with
            those that the study had before.

    Returns:
        The best of all complete trials, the same for every worker.

    Raises:
        SordinoError: Optuna is missing, or the storage cannot be used.

    Example:
        >>> def score(settings):
        ...     return [-abs(each["lr"] - 1) for each in settings]
        >>> found = search("demo", {"lr": (0.1, 10.0)}, score, trials=20)
        >>> found.complete, 0.5 < found.options["lr"] < 2
        (20, True)
    """
    if at_once < 1:
        raise SordinoError(f"--at-once: {at_once} must be at least 1.")
    if not 0 < stale_after <= LONGEST_SILENCE:
        raise SordinoError(
            f"--stale-after: {stale_after:g} must lie in (0, {LONGEST_SILENCE}]; it is a number of seconds."
        )
    with _opened(name, storage) as study:
        return _take_part(study, grid, score, trials, at_once, stale_after, tick)


def _take_part(
    study: Any,
    grid: Grid,
    score: Callable[[Sequence[Options]], Sequence[float]],
    trials: int,
    at_once: int,
    stale_after: float,
    tick: Callable[[int], None],
) -> Found:
    watch, told = _Watch(stale_after), 0
    while True:
        complete, running = _listed(study, "COMPLETE"), _listed(study, "RUNNING")
        if len(complete) > told:
            tick(len(complete) - told)
            told = len(complete)
        if len(complete) >= trials:
            break
        lost = watch.lost(running)
        for number in lost:
            _finish(study, number, None)
        free = trials - len(complete) - len(running) + len(lost)
        mine = _claim(study, min(at_once, free), trials) if free > 0 else []
        if not mine:
            time.sleep(min(LONGEST_PAUSE, stale_after / BEATS))
            continue
        try:
            with _beating(mine, stale_after / BEATS):
                values = score([_propose(study, trial, grid) for trial in mine])
        except BaseException:
            for trial in mine:
                _finish(study, trial.number, None)
            raise
        for trial, value in zip(mine, values, strict=True):
            _finish(study, trial.number, value)
    best = max(complete, key=lambda trial: (trial.value, -trial.number))  # among equals the first
    return Found(dict(best.params), float(best.value), len(complete))


def _listed(study: Any, *states: str) -> list[Any]:
    from optuna.trial import TrialState

    return list(study.get_trials(deepcopy=False, states=[TrialState[state] for state in states]))


def _numbers(study: Any, *states: str) -> list[int]:
    return sorted(trial.number for trial in _listed(study, *states))


def _claim(study: Any, count: int, most: int) -> list[Any]:
    """New trials for this worker, of which it keeps those among the first `most` that did not fail.

    Workers may ask at the same time. The storage numbers trials in order, and a trial that failed stays failed. So when
    the last of the complete trials was claimed, all others already counted before it: they are never more than `most`.
    """
    asked = [study.ask() for _ in range(count)]
    kept = set(_numbers(study, "COMPLETE", "RUNNING")[:most])
    for trial in asked:
        if trial.number not in kept:
            _finish(study, trial.number, None)
    return [trial for trial in asked if trial.number in kept]


def _propose(study: Any, trial: Any, grid: Grid) -> Options:
    """A setting between the ends of the grid: steps on a log scale, momentum linear; integers and names as listed."""
    from optuna.samplers import TPESampler

    study.sampler = TPESampler(seed=trial.number)
    for key, values in grid.items():
        if len(values) < 2 or not all(isinstance(value, float) for value in values):
            trial.suggest_categorical(key, values)
        else:
            low, high = min(values), max(values)
            trial.suggest_float(key, low, high, log=low > 0 and high / low > 3)
    return dict(trial.params)


def _finish(study: Any, number: int, value: float | None) -> None:
    """Mark a trial complete, or failed if there is no value. Does nothing if another worker marked it before."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    state = TrialState.FAIL if value is None else TrialState.COMPLETE
    with suppress(UpdateFinishedTrialError):
        study.tell(number, value, state=state, skip_if_finished=True)


@contextmanager
def _beating(trials: Sequence[Any], every: float) -> Iterator[None]:
    """Write beats to running trials, from a thread. If the storage fails, the next beat tries again."""
    from optuna.exceptions import OptunaError

    stop = threading.Event()

    def beat() -> None:
        for count in itertools.count():
            for trial in trials:
                with suppress(OptunaError):
                    trial.set_user_attr(BEAT, count)
            if stop.wait(every):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _Watch:
    """When the beats of running trials changed last, by the clock of this worker."""

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after
        self._changed: dict[int, tuple[int | None, float]] = {}  # by trial: its beat, and since when

    def lost(self, running: Sequence[Any]) -> list[int]:
        """Numbers of the trials that lost their worker."""
        now = time.monotonic()
        for trial in running:
            beat = trial.user_attrs.get(BEAT)  # None: the worker died before its first beat, or is about to beat
            if self._changed.get(trial.number, (-1, now))[0] != beat:
                self._changed[trial.number] = beat, now
        return [trial.number for trial in running if now - self._changed[trial.number][1] > self._stale_after]


# ------------------------------------------------------------------------------------------------------------ storages


@contextmanager
def _opened(name: str, storage: str | None) -> Iterator[Any]:
    """The study, which is created if it does not exist. Connections are closed at the end."""
    try:
        import optuna
    except ImportError:
        raise SordinoError(
            "search: optuna is not installed; pip install 'sordino[search]', or search = grid."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    database = None if storage is None else _database(storage)
    try:
        yield optuna.create_study(study_name=name, storage=database, load_if_exists=True, direction="maximize")
    finally:
        if database is not None:
            database.engine.dispose()


def _database(url: str) -> Any:
    """Optuna's tables in a database. They are created again if another worker creates them at the same moment."""
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy import event
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    file = url.startswith("sqlite")
    options = {"connect_args": {"timeout": BUSY_TIMEOUT}} if file else {"pool_pre_ping": True}
    for attempt in itertools.count(1):
        try:
            storage = RDBStorage(url, engine_kwargs=dict(options))
            break
        except ImportError:
            raise SordinoError(
                "--storage: the driver of this database is not installed; for PostgreSQL: pip install "
                "'sordino[postgres]', and write postgresql+psycopg://USER@HOST/DATABASE."
            ) from None
        except ArgumentError:
            raise SordinoError("--storage: this is not the URL of a database; write sqlite:///FILE.db.") from None
        except (SQLAlchemyError, StorageInternalError) as error:
            if attempt == 5:
                raise SordinoError(f"--storage: the database cannot be used: {_reason(error)}.") from None
            time.sleep(0.2 * attempt)
    if file:  # A SQLite transaction that reads and then writes is not atomic unless it locks the file first.
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _reason(error: Exception) -> str:
    """The first line that the database's driver says, which has no password."""
    cause = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
    return str(cause).strip().splitlines()[0].rstrip(".")
