"""The contracts that every method must keep. `sordino check` runs them, also for methods from other packages.

- `sensitivity`: no neighbour found by an adversarial search moves a release further than its query claims.
- `apart`: no record changes how other records are computed, not even how they are rounded.
- `sums`: one record among a million moves no sum further than its query claims, rounding included.
- `asks`: a round asks the data no more than the method declares, and one more question is refused; some round asks
  as often as declared, because every declared call is paid for.
- `replay`: server and clients only post-process messages. With the same messages, other data change nothing.
- `streams`: noise that is correlated over rounds, as it is drawn, hides what the account of all rounds claims.
- `engines`: the fast engine computes the same as the reference engine.

A contract that cannot fail proves nothing. `check` therefore also runs each contract on `MUTANTS` of the method under
test, which are deliberately wrong, and reports every mutant that passes. A contract takes any `Method`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from sordino import core
from sordino.checks.contracts import TOLERANCE, apart, asks, engines, replay, unasked
from sordino.checks.mutants import MUTANT_RATE, MUTANTS, network_form
from sordino.checks.report import LEAST_TRIALS, Report, apart_engines, missed_mutant, rejecting, reports_of, searched
from sordino.checks.search import REQUIRED_SHARE, TRIALS, Found, sensitivity
from sordino.checks.streams import streams
from sordino.checks.suites import (
    CHECKED_MODELS,
    SUITES,
    check_adapters,
    check_calibration,
    check_clipping,
    check_sequences,
    check_streams,
    check_uncertainty,
    check_weights,
    in_bfloat16,
    small_network,
)
from sordino.checks.sums import ROWS, OneAccumulator, sums
from sordino.checks.tallies import tallies
from sordino.core import Adjacency, Kind, Method, Unit
from sordino.errors import SordinoError, nearest
from sordino.methods import entry
from sordino.models import registry
from sordino.models.hazards import Hazards
from sordino.models.linear import Loss
from sordino.models.torch_model import TorchModel
from sordino.models.trees import Trees

MINIBATCHES = f"poisson:{MUTANT_RATE:g}"  # for which bounds about minibatches are checked
MODEL_SHAPES = ((3, 3), (3, 2), (64, 10), (784, 10), (3072, 10), (3, 0))  # features, classes: the first that fits
MODEL_OPTIONS: dict[str, dict[str, Any]] = {"hazards": {"edges": (0.0, 1.0, 2.0, 3.0)}}  # that have no default
# Options that make another method of one, for networks, and the units for which that is proved.
NETWORK_OPTIONS: tuple[tuple[dict[str, Any], tuple[Unit, ...]], ...] = (
    ({"network": True}, (Unit.RECORD, Unit.PERSON)),
    ({"network": True, "minibatches": 2}, (Unit.RECORD, Unit.PERSON)),
    ({"curvature": "fisher"}, (Unit.RECORD, Unit.CLIENT)),
)
# Of methods with local steps whose defaults have neither: at every level they change the message of two steps, and for
# one step at record level the server's rule alone.
OF_SCHEDULES: dict[str, Any] = {"schedule": "cosine", "decay": 0.1}
CHECKED_TREES = (Trees(3, 3, trees=2, depth=2), Trees(3, 1, Loss.SQUARES, trees=3, depth=2, columns=2))


def check(
    name: str,
    *,
    trials: int = TRIALS,
    seed: int = 0,
    models: Sequence[core.Model] | None = None,
    method: Method | None = None,
) -> list[Report]:
    """Run all contracts, and their mutants, on a method.

    Args:
      name: the method's name in the registry, or the name that reports show.
      trials: restarts of the search for one query, at least `LEAST_TRIALS`.
      seed: seed of the search.
      models: the models on which the method runs; by default small ones that it can train.
      method: the method to check. By default it is the registered one, for each of its units.

    Returns:
      One report per noised query and adjacency.

    Raises:
      SordinoError: no method has this name, or the trials are too few.
    """
    if trials < LEAST_TRIALS:
        raise SordinoError(
            f"trials: {trials} must be at least {LEAST_TRIALS}; a shorter search misses mutants and proves nothing."
        )
    return [
        report
        for form, subject in (_named(subjects(name)) + scheduled(name) if method is None else _named([method]))
        for checked in (_checked, _with_minibatches)
        for report in checked(f"{name} {form}".rstrip(), subject, models or models_of(subject), trials, seed)
    ]


def _named(methods: Sequence[Method]) -> list[tuple[str, Method]]:
    """Methods with what makes them ones for networks, in words."""
    return [(network_form(method)[0], method) for method in methods]


def scheduled(name: str) -> list[tuple[str, Method]]:
    """A registered method with a schedule and weight decay, and words for it; none if its defaults have them."""
    known = entry(name)
    if known.options.get("schedule") != "constant":
        return []
    steps = [(1, Unit.RECORD), *((2, unit) for unit in known.units)]
    return [(f"cosine, decay, K = {k}", known.at(unit, steps=k, **OF_SCHEDULES)) for k, unit in steps]


def subjects(name: str) -> list[Method]:
    """A registered method for each of its units, and for networks where that is another method."""
    # Use the factory: `build` removes all claims from an external method that was not checked yet.
    known = entry(name)
    networks = [
        known.at(unit, **options)
        for options, units in NETWORK_OPTIONS
        if options.keys() <= known.options.keys()
        for unit in known.protects
        if unit in units
    ]
    return [known.at(unit) for unit in known.protects] + networks


def models_of(method: Method) -> Sequence[core.Model]:
    """Small models that a method can train."""
    if network_form(method)[0]:
        return (small_network(),)
    queries = [query for stage in method.stages for query in stage.queries]
    return CHECKED_TREES if any(query.kind is Kind.LEAVES for query in queries) else CHECKED_MODELS


def _checked(name: str, method: Method, models: Sequence[Any], trials: int, seed: int) -> Iterator[Report]:
    """The reports of a method; of one for networks, also against the mutant that it has because of that."""
    mutant = network_form(method)[1]
    if mutant is None:
        return reports_of(name, method, models, trials, seed)
    return rejecting(mutant, name, method, models[0], trials, seed)


def _with_minibatches(name: str, method: Method, models: Sequence[Any], trials: int, seed: int) -> Iterator[Report]:
    """The reports of a method whose lemma also speaks of minibatches, on one model; none for other methods.

    The search compares a sample with the same one without a record. Under replace-one the account compares both records
    with none, and claims twice as much. The mutant takes all records for the expected number of those drawn.
    """
    lemmas = [query.bound for stage in method.stages for query in stage.queries if query.bound is not None]
    if not lemmas or not all(lemma.sampled for lemma in lemmas):
        return
    difference = engines(method, models[0], seed=seed, sampling=MINIBATCHES)
    adjacency = Adjacency.ADD_REMOVE
    for worst, missed in searched(method, models[:1], adjacency, trials, seed, MINIBATCHES):
        problems = [*apart_engines(difference), *worst.problems, *missed]
        numbers = (worst.claimed, worst.worst, difference)
        yield Report(f"{name} {MINIBATCHES}", method.unit, adjacency, worst.query, *numbers, not problems, problems)


def check_model(
    name: str,
    *,
    trials: int = TRIALS,
    seed: int = 0,
    units: Sequence[Unit] = tuple(Unit),
    shapes: Sequence[tuple[int, int]] | None = None,
) -> list[Report]:
    """Run all contracts on DP-FedGD at record level with a registered model; of survival, on `auto` at every level.

    A network is searched in bfloat16 too, if it serves it: if not, a run in bfloat16 is refused.

    Args:
      name: the model's name in the registry.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: of survival, the levels at which `auto` is checked.
      shapes: features and classes to try, in order; by default `MODEL_SHAPES`.

    Returns:
      One report per noised query and adjacency.

    Raises:
      SordinoError: the model accepts none of the shapes.
    """
    errors = []
    for features, classes in shapes or MODEL_SHAPES:
        try:
            model = _built(name, features, classes)
        except SordinoError as error:
            errors.append(str(error))
            continue
        methods = [entry("dp-fedgd").factory(unit=Unit.RECORD)]
        if isinstance(model, Hazards):  # `auto` asks it for a tally, which no other model has
            methods += [entry("auto").at(unit, intervals=model.outputs) for unit in units]
        reports = [report for method in methods for report in reports_of(name, method, [model], trials, seed)]
        if isinstance(model, TorchModel):
            with suppress(SordinoError):
                half = _built(name, features, classes, autocast=torch.bfloat16)
                reports += in_bfloat16(name, methods[0], half, trials, seed)
        return reports
    raise SordinoError(f"model: '{name}' accepts no shape that can be checked: {errors[0]} --shape names another.")


def _built(name: str, features: int, classes: int, **how: Any) -> Any:
    return registry.build(name, features, classes, **how, **MODEL_OPTIONS.get(name, {}))


def check_sums(*, rows: Sequence[int] = ROWS, device: str = "cpu") -> list[Report]:
    """Check the float32 sums that all methods use. The mutant keeps each sum in one float32 accumulator.

    Args:
      rows: numbers of records to try.
      device: `cpu` or `cuda`. On a CPU the sums run with one thread and with two.

    Returns:
      One report per kind of sum, adjacency and number of threads.
    """
    before, reports = torch.get_num_threads(), []
    try:
        for threads in (1, 2) if device == "cpu" else (before,):
            torch.set_num_threads(threads)
            where = f"{device}, {threads} threads" if device == "cpu" else device
            for finding in sums(rows=tuple(rows), device=device):
                problems = finding.problems
                numbers = (1.0, finding.reached, 0.0, not problems, problems)
                reports.append(Report(f"sums ({where})", "record", finding.adjacency, finding.query, *numbers))
    finally:
        torch.set_num_threads(before)
    rejected = {finding.query for finding in sums(OneAccumulator, rows=(10_000,), device=device) if finding.problems}
    missed = [missed_mutant("sums", OneAccumulator)]
    return [r if r.query in rejected else r._replace(passed=False, problems=[*r.problems, *missed]) for r in reports]


def check_tally(
    name: str, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts, and their mutants, on a release that trains nothing: `tallies` lists them.

    Args:
      name: the tally's name.
      trials: restarts of the search.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit and adjacency.

    Raises:
      SordinoError: no tally has this name.
    """
    known = tallies()
    if name not in known:
        raise SordinoError(f"check: '{name}' is not a tally.{nearest(name, known)}")
    if trials < LEAST_TRIALS:
        raise SordinoError(f"trials: {trials} must be at least {LEAST_TRIALS}.")
    methods, models = [known[name].at(unit) for unit in units], known[name].models
    return [report for each in methods for report in reports_of(name, each, models, trials, seed)]


__all__ = [
    "MUTANTS",
    "REQUIRED_SHARE",
    "SUITES",
    "TOLERANCE",
    "Found",
    "Report",
    "apart",
    "asks",
    "check",
    "check_adapters",
    "check_calibration",
    "check_clipping",
    "check_model",
    "check_sequences",
    "check_streams",
    "check_sums",
    "check_tally",
    "check_uncertainty",
    "check_weights",
    "engines",
    "replay",
    "sensitivity",
    "streams",
    "unasked",
]
