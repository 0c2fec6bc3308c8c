"""Many trainings on one machine: jobs (the same keys, several seeds) go to worker processes, which share a device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

_here: dict[str, Any] = {}


def _start(load: Callable[..., Any], words: tuple[Any, ...], device: str, judge: Callable[..., float] | None) -> None:
    import torch

    torch.set_num_threads(1)
    _here.update(load=load, words=words, device=device, judge=judge)


def _train(number: int, values: dict[str, Any], seeds: list[int], at: list[int], part: str) -> tuple[int, Any]:
    from sordino.training.batch import run_many
    from sordino.training.spec import Spec

    if part not in _here:
        _here[part] = _here["load"](part, *_here["words"])
    began = time.perf_counter()
    specs = [Spec.of({**values, "seed": seed}) for seed in seeds]
    runs = run_many(specs, _here[part], device=_here["device"], at=at)
    scores = [run.scores for run in runs]
    if _here["judge"]:
        scores = [{run.plan.rounds: _here["judge"](run, *_here["words"], _here["device"])} for run in runs]
    return number, {"scores": scores, "seconds": time.perf_counter() - began}


def train(
    jobs: list[dict[str, Any]],
    load: Callable[..., Any],
    words: tuple[Any, ...],
    *,
    device: str,
    workers: int,
    judge: Callable[..., float] | None = None,
) -> Iterator[tuple[int, Any]]:
    """(number, scores by seed and round, seconds) of each job as it ends; a job that fails says why.

    A job: values (keys of a run), seeds, at (rounds to evaluate after) and part (given to `load(part, *words)`).
    judge: scores a finished run, `judge(run, *words, device)`, instead of its accuracy along the way. workers: 0 trains
    in this process, where few short jobs do not pay for another.
    """
    if not workers:
        _here.clear()
        _here.update(load=load, words=words, device=device, judge=judge)
        for k, j in enumerate(jobs):
            yield _train(k, j["values"], j["seeds"], j["at"], j["part"])
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (load, words, device, judge)) as pool:
        futures = {pool.submit(_train, k, j["values"], j["seeds"], j["at"], j["part"]): k for k, j in enumerate(jobs)}
        for future in as_completed(futures):
            try:
                yield future.result()
            except Exception as error:
                yield futures[future], {"error": f"{type(error).__name__}: {error}"}
