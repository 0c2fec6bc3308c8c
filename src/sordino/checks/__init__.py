"""The contracts every method keeps, shipped so that whoever adds a method can run them: `sordino check`.

- `sensitivity`: no neighbour found by an adversarial search moves a release further than its query claims.
- `apart`: no record changes how others are computed, not even how they are rounded.
- `sums`: rounding included, one of a million records moves no sum further than its query claims.
- `asks`: a round asks no more of the data than was declared, and one question more is refused.
- `replay`: server and clients post-process what was said; given the same messages, other data change nothing.
- `engines`: the fast engine computes what the readable one means.

A contract that cannot fail proves nothing: `check` also holds each of them against `MUTANTS` of the very method
under test, and reports a twin that passes. No method is named here; each contract takes any `Method`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sordino import core
from sordino.checks.contracts import TOLERANCE, apart, asks, engines, gaps, replay
from sordino.checks.fixtures import claims
from sordino.checks.mutants import MUTANTS, breaks
from sordino.checks.search import REQUIRED_SHARE, TRIALS, Found, sensitivity
from sordino.checks.sums import ROWS, OneAccumulator, sums
from sordino.core import Adjacency, Method, Unit
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, entry
from sordino.models import registry
from sordino.models.linear import Linear, Loss


class Report(NamedTuple):
    """One noised query of a method, for one unit and adjacency. Problems of the whole method stand in each of them."""

    name: str
    unit: str
    adjacency: str
    query: str
    claimed: float
    worst_found: float
    engines_max_diff: float
    passed: bool
    problems: list[str]


MODEL_SHAPES = ((3, 3), (3, 2), (64, 10), (784, 10), (3072, 10), (3, 0))  # features, classes: the first that fits
RETRIES = 3  # of a search that did not come near enough
CHECKED_MODELS = (Linear(3, 3), Linear(3, 1, Loss.SQUARES, bias=False))  # a claim holds for any, and is reached on one


def check(
    name: str,
    *,
    trials: int = TRIALS,
    seed: int = 0,
    models: Sequence[core.Model] = CHECKED_MODELS,
    method: Method | None = None,
) -> list[Report]:
    """All contracts, and their wrong twins, for each unit of a registered method, or for the `method` given."""
    # From the factory, not by `build`, which takes all claims from an external method that was not checked yet.
    subjects = [entry(name).factory(unit=unit) for unit in entry(name).units] if method is None else [method]
    return [report for subject in subjects for report in _reports(name, subject, models, trials, seed)]


def check_model(name: str, *, trials: int = TRIALS, seed: int = 0) -> list[Report]:
    """All contracts of DP-FedGD at record level, with a registered model instead of those that methods are checked on.

    Raises:
        SordinoError: The model accepts none of `MODEL_SHAPES`.
    """
    errors = []
    for features, classes in MODEL_SHAPES:
        try:
            model = registry.build(name, features, classes)
        except SordinoError as error:
            errors.append(str(error))
            continue
        method = entry("dp-fedgd").factory(unit=Unit.RECORD)
        return list(_reports(name, method, [model], trials, seed))
    raise SordinoError(f"model: '{name}' accepts no shape that can be checked: {errors[0]}")


def check_sums(*, rows: Sequence[int] = ROWS, device: str = "cpu") -> list[Report]:
    """The sums that all methods are made of, in float32, with up to so many records; on a CPU by one thread and by two.

    Its wrong twin keeps them in one float32 accumulator.
    """
    before, reports = torch.get_num_threads(), []
    try:
        for threads in (1, 2) if device == "cpu" else (before,):
            torch.set_num_threads(threads)
            where = f"{device}, {threads} threads" if device == "cpu" else device
            for found in sums(rows=tuple(rows), device=device):
                mine = found.problems
                numbers = (1.0, found.reached, 0.0, not mine, mine)
                reports.append(Report(f"sums ({where})", "record", found.adjacency, found.query, *numbers))
    finally:
        torch.set_num_threads(before)
    seen = {found.query for found in sums(OneAccumulator, rows=(10_000,), device=device) if found.problems}
    unseen = [_unseen("sums", OneAccumulator)]
    return [r if r.query in seen else r._replace(passed=False, problems=[*r.problems, *unseen]) for r in reports]


def check_all(*, trials: int = TRIALS, seed: int = 0) -> list[Report]:
    """Every registered method, and the sums they are made of."""
    return [*check_sums(), *(report for name in REGISTRY for report in check(name, trials=trials, seed=seed))]


def _reports(name: str, method: Method, models: Sequence[Any], trials: int, seed: int) -> Iterator[Report]:
    model = models[0]
    if problems := asks(method, model, seed=seed):  # then there may be no round to look at
        yield Report(name, method.unit, "", "", 0.0, 0.0, 0.0, False, problems)
        return
    problems = replay(method, model, seed=seed)
    problems += [problem for each in models for problem in apart(method, each, seed=seed)]
    difference = max(engines(method, each, seed=seed) for each in models)
    if not difference <= TOLERANCE:
        problems.append(f"engines: they differ by {difference:.2g}, and {TOLERANCE:g} is allowed")
    rejects: dict[str, Callable[..., bool]] = {
        "apart": lambda *wrong: bool(apart(*wrong, seed=seed)),
        "asks": lambda *wrong: bool(asks(*wrong, seed=seed)),
        "replay": lambda *wrong: bool(replay(*wrong, seed=seed)),
        "engines": lambda *wrong: any(gap > TOLERANCE for gap in gaps(*wrong, seed=seed)),
    }
    for contract, reject in rejects.items():
        mutants = [twin for twin in MUTANTS[contract] if breaks(twin, method)]
        problems += [_unseen(contract, twin) for twin in mutants if not reject(*twin(method, model))]
    if not claims(method):
        yield Report(name, method.unit, "", "no-privacy", 0.0, 0.0, difference, not problems, problems)
        return
    for adjacency in Adjacency:
        for found, unseen in _searched(method, models, adjacency, trials, seed):
            mine = [*problems, *found.problems, *unseen]
            numbers = (found.claimed, found.worst, difference)
            yield Report(name, method.unit, adjacency, found.query, *numbers, not mine, mine)


def _searched(
    method: Method, models: Sequence[Any], adjacency: Adjacency, trials: int, seed: int
) -> Iterator[tuple[Found, list[str]]]:
    """For each query, the worst that was found on any model, and the twins that passed on the model where it was."""
    search = partial(sensitivity, adjacency=adjacency, trials=trials, seed=seed)
    by_model = [search(method, model) for model in models]
    for again in range(1, RETRIES):  # elsewhere, where no model's search came near enough
        if all(max(found.reached for found in query) >= REQUIRED_SHARE for query in zip(*by_model, strict=True)):
            break
        by_model += [search(method, model, seed=seed + again) for model in models]
    mutants = [twin for twin in MUTANTS["sensitivity"] if breaks(twin, method)]
    seen: dict[int, list[list[Found]]] = {}
    for k, found in enumerate(zip(*by_model, strict=True)):
        best = max(range(len(found)), key=lambda m: found[m].reached)
        if best not in seen:
            seen[best] = [search(*twin(method, models[best % len(models)])) for twin in mutants]
        passed = [twin for twin, wrong in zip(mutants, seen[best], strict=True) if not wrong[k].beyond]
        yield found[best], [_unseen("sensitivity", twin) for twin in passed]


def _unseen(contract: str, twin: Callable[..., Any]) -> str:
    return f"{contract}: the contract did not see that its wrong twin '{twin.__name__}' is wrong"


__all__ = [
    "MUTANTS",
    "REQUIRED_SHARE",
    "TOLERANCE",
    "Found",
    "Report",
    "apart",
    "asks",
    "check",
    "check_all",
    "check_model",
    "check_sums",
    "engines",
    "replay",
    "sensitivity",
]
