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

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sordino import core
from sordino.checks.contracts import TOLERANCE, apart, asks, engines, gaps, replay, unasked
from sordino.checks.fixtures import claims
from sordino.checks.language import clips_every_token, small_language
from sordino.checks.mutants import (
    MUTANT_RATE,
    MUTANTS,
    OF_CLIPPINGS,
    OF_MINIBATCHES,
    blended_stages,
    breaks,
    concerns,
    network_form,
    refactors_by_records,
    sends_the_frozen_factor,
    weighed_records,
    weighs_beyond_the_clip,
)
from sordino.checks.search import REQUIRED_SHARE, TRIALS, Found, sensitivity
from sordino.checks.streams import MECHANISMS, missed_mutants, streams
from sordino.checks.sums import ROWS, OneAccumulator, sums
from sordino.checks.tallies import tallies
from sordino.core import Adjacency, Clipping, Kind, Method, Unit
from sordino.errors import SordinoError, nearest
from sordino.methods import entry
from sordino.methods.adapters import with_adapters
from sordino.methods.calibration import calibrated
from sordino.methods.clipping import with_clipping
from sordino.methods.uncertainty import OF_CLASSES, OF_QUANTITIES, of_counts, with_uncertainty
from sordino.models import registry
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.lora import adapt
from sordino.models.torch_model import TorchModel
from sordino.models.trees import Trees
from sordino.privacy.participation import FULL


class Report(NamedTuple):
    """The result for one noised query of a method, one unit and one adjacency.

    Attributes:
      name: the method.
      unit: the protected unit.
      adjacency: the adjacency; empty where nothing is noised.
      query: the stage, the number and the kind of the query.
      claimed: the sensitivity that the query claims.
      worst_found: the largest change of a release that the search found.
      engines_max_diff: the largest difference between the two engines.
      passed: whether all contracts hold.
      problems: what is broken, one sentence per problem. Every report of a method repeats the problems that concern
        the whole method.
    """

    name: str
    unit: str
    adjacency: str
    query: str
    claimed: float
    worst_found: float
    engines_max_diff: float
    passed: bool
    problems: list[str]


MINIBATCHES = f"poisson:{MUTANT_RATE:g}"  # for which bounds about minibatches are checked
MODEL_SHAPES = ((3, 3), (3, 2), (64, 10), (784, 10), (3072, 10), (3, 0))  # features, classes: the first that fits
MODEL_OPTIONS: dict[str, dict[str, Any]] = {"hazards": {"edges": (0.0, 1.0, 2.0, 3.0)}}  # that have no default
LEAST_TRIALS = 8  # with fewer, the search may miss a mutant of a correct method
# The names of `SUITES` in reports and for `sordino check`.
ADAPTERS = "adapters"  # the variants of low-rank adapters
CALIBRATE = "calibrate"  # calibrated intercepts
CLIPPING = "clipping"  # the laws of clipping of networks
SEQUENCES = "sequences"  # causal language models
STREAMS = "streams"  # noise that is correlated over rounds
UNCERTAINTY = "uncertainty"  # the releases for standard errors
WEIGHTS = "weights"  # weights of classes and of records
CHECKED_CLIPPINGS = ("per-layer", "per-layer:1,2", "automatic")
CHECKED_VARIANTS = ("freeze-a", "alternating", "fedsvd")
# Options that make another method of one, for networks, and the units for which that is proved.
NETWORK_OPTIONS: tuple[tuple[dict[str, Any], tuple[Unit, ...]], ...] = (
    ({"network": True}, (Unit.RECORD, Unit.PERSON)),
    ({"network": True, "minibatches": 2}, (Unit.RECORD, Unit.PERSON)),
    ({"curvature": "fisher"}, (Unit.RECORD, Unit.CLIENT)),
)
MAX_SEARCHES = 3  # at most, if a search does not come near enough to the claim
# A claim must hold on every model; the search must come near it on at least one.
MUTANT_TRIALS = 4  # restarts of the search for a mutant, over those for the method
CHECKED_MODELS = (Linear(3, 3), Linear(3, 1, Loss.SQUARES, bias=False))
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
        for subject in (subjects(name) if method is None else [method])
        for checked in (_checked, _with_minibatches)
        for report in checked(
            f"{name} {network_form(subject)[0]}".rstrip(), subject, models or models_of(subject), trials, seed
        )
    ]


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
        return _reports(name, method, models, trials, seed)
    return _rejecting(mutant, name, method, models[0], trials, seed)


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
    for worst, missed in _searched(method, models[:1], adjacency, trials, seed, MINIBATCHES):
        problems = [*_apart_engines(difference), *worst.problems, *missed]
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
            model = registry.build(name, features, classes, **MODEL_OPTIONS.get(name, {}))
        except SordinoError as error:
            errors.append(str(error))
            continue
        methods = [entry("dp-fedgd").factory(unit=Unit.RECORD)]
        if isinstance(model, Hazards):  # `auto` asks it for a tally, which no other model has
            methods += [entry("auto").at(unit, intervals=model.outputs) for unit in units]
        return [report for method in methods for report in _reports(name, method, [model], trials, seed)]
    raise SordinoError(f"model: '{name}' accepts no shape that can be checked: {errors[0]} --shape names another.")


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
    missed = [_missed("sums", OneAccumulator)]
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
        raise SordinoError(f"check: '{name}' is no tally.{nearest(name, known)}")
    if trials < LEAST_TRIALS:
        raise SordinoError(f"trials: {trials} must be at least {LEAST_TRIALS}.")
    methods, models = [known[name].at(unit) for unit in units], known[name].models
    return [report for each in methods for report in _reports(name, each, models, trials, seed)]


def check_calibration(
    name: str = CALIBRATE, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with calibrated intercepts and slope, on a model of two classes.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, noised query and adjacency.
    """
    methods = [calibrated(entry("dp-fedgd").at(unit), 0.1, 0.1) for unit in units]
    return [report for each in methods for report in _reports(name, each, [Linear(3, 2)], trials, seed)]


def check_uncertainty(
    name: str = UNCERTAINTY, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with the releases for standard errors: of classes, quantities and counts.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, kind of labels, noised query and adjacency.
    """
    reports: list[Report] = []
    counts = (Linear(3, 1, Loss.POISSON),)
    kinds = ((OF_CLASSES, CHECKED_MODELS), (OF_QUANTITIES, CHECKED_MODELS), (of_counts(3.0), counts))
    for unit, (terms, models) in itertools.product(units, kinds):
        method = with_uncertainty(entry("dp-fedgd").at(unit), 0.2, 0.5, terms, 1 if unit is Unit.RECORD else 2)
        reports += _reports(name, method, models, trials, seed)
    return reports


def check_weights(
    name: str = WEIGHTS, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with class weights and, for records, with weights of single records.

    One more mutant weighs terms beyond the clip.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, kind of weights, noised query and adjacency.
    """
    classes = Linear(3, 3, class_weights=torch.tensor([0.5, 2.0, 2.0]))
    reports: list[Report] = []
    for unit in units:
        method = entry("dp-fedgd").at(unit)
        for model in (classes, weighed_records(Linear(3, 3))) if unit is Unit.RECORD else (classes,):
            reports += _rejecting(weighs_beyond_the_clip, name, method, model, trials, seed)
    return reports


def check_clipping(
    name: str = CLIPPING, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with each law of clipping other than flat, on a small network.

    Each law has one more mutant: every layer has the whole clip, or a gradient is divided by the norm of one layer.

    Args:
      name: the name that reports show, before the law.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, law, noised query and adjacency.
    """
    model = small_network()
    reports: list[Report] = []
    for unit in units:
        for law in CHECKED_CLIPPINGS:
            clipping = Clipping.parse(law)
            method = with_clipping(entry("dp-fedgd").at(unit), clipping)
            reports += _rejecting(OF_CLIPPINGS[clipping.law], f"{name} {law}", method, model, trials, seed)
    return reports


def check_sequences(
    name: str = SEQUENCES, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with a small causal language model, whose records may begin with a prompt.

    There is one more mutant: every token that counts is clipped by itself.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, noised query and adjacency.
    """
    model, methods = small_language(), [entry("dp-fedgd").at(unit) for unit in units]
    return [report for each in methods for report in _rejecting(clips_every_token, name, each, model, trials, seed)]


def check_streams(name: str = STREAMS, *, seed: int = 0, units: Sequence[Unit] = tuple(Unit)) -> list[Report]:
    """Check the correlated noise of DP-FTRL with each mechanism: the contracts `streams` and `engines`.

    The mutants claim the sensitivity of one round, of rounds that are apart, or of an encoder without its last
    diagonal; or they draw noise afresh that must be carried, or the same noise in every round.

    Args:
      name: the name that reports show, before the mechanism.
      seed: seed of the records on which the engines are compared.
      units: the protected units.

    Returns:
      One report per unit and mechanism. Claims are factors on the sensitivity of one answer.
    """
    reports = []
    for unit, (mechanism, options) in itertools.product(units, MECHANISMS.items()):
        method = entry("dp-ftrl").at(unit, **options)
        found, difference = streams(method), engines(method, CHECKED_MODELS[0], seed=seed)
        missed = [_missed("streams", mutant) for mutant in missed_mutants(method)]
        problems = [*found.problems, *missed, *_apart_engines(difference)]
        numbers = (found.claimed, found.worst, difference, not problems, problems)
        reports.append(Report(f"{name} {mechanism}", unit, "", "0.0 stream", *numbers))
    return reports


def check_adapters(
    name: str = ADAPTERS, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with each variant of low-rank adapters other than `lora`, on a small network.

    Where a round trains a part of theta there are two more mutants: the frozen factor is sent too, outside of the clip,
    and the server's step depends on records.

    Args:
      name: the name that reports show, before the variant.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, variant, noised query and adjacency.
    """
    reports: list[Report] = []
    for unit in units:
        for variant in CHECKED_VARIANTS:
            model, named, always = small_adapters(variant), f"{name} {variant}", list[str]()
            method = with_adapters(entry("dp-fedgd").at(unit), variant, rounds=2)
            if variant == "freeze-a":
                reports += _reports(named, method, [model], trials, seed)
                continue
            if not replay(*refactors_by_records(method, model), seed=seed):
                always = [_missed("replay", refactors_by_records)]
            for report in _rejecting(sends_the_frozen_factor, named, method, model, trials, seed):
                reports.append(report._replace(passed=report.passed and not always, problems=report.problems + always))
    return reports


class _Adaptable(torch.nn.Module):
    """Two layers for records of three features and two classes; the first is adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.nn.functional.leaky_relu(self.query(x)))
        return scores


def small_adapters(variant: str) -> TorchModel:
    """A small network with an adapter of rank 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(adapt(_Adaptable(), rank=2, dropout=0.0, variant=variant), shape=(3,))


def small_network() -> TorchModel:
    """Two layers, for records of three features and two classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LeakyReLU(), torch.nn.Linear(2, 2)))


# What `sordino check` tries beside methods, models and tallies, by the names that reports show.
SUITES: dict[str, Callable[[str], list[Report]]] = {
    CALIBRATE: check_calibration,
    WEIGHTS: check_weights,
    UNCERTAINTY: check_uncertainty,
    CLIPPING: check_clipping,
    SEQUENCES: check_sequences,
    STREAMS: check_streams,
    ADAPTERS: check_adapters,
}


def _reports(name: str, method: Method, models: Sequence[Any], trials: int, seed: int) -> Iterator[Report]:
    model = models[0]
    if problems := asks(method, model, seed=seed):  # a method that overspends may not finish a round
        yield Report(name, method.unit, "", "", 0.0, 0.0, 0.0, False, problems)
        return
    problems = [*unasked(method, model, seed=seed), *replay(method, model, seed=seed)]
    problems += [problem for each in models for problem in apart(method, each, seed=seed)]
    refusals: list[str] = []
    difference = max(engines(method, each, seed=seed, refusals=refusals) for each in models)
    if refusals:
        problems.append(
            f"engines: an engine refuses the method under {refusals[0]} Local steps, memory, and messages other than "
            "plain answers are proved for untrusted-server only; leave the other pairs out of `proves`."
        )
    else:
        problems += _apart_engines(difference)
    rejects: dict[str, Callable[..., bool]] = {
        "apart": lambda *wrong: bool(apart(*wrong, seed=seed)),
        "asks": lambda *wrong: bool(asks(*wrong, seed=seed)),
        "replay": lambda *wrong: bool(replay(*wrong, seed=seed)),
        "engines": lambda *wrong: any(gap > TOLERANCE for gap in gaps(*wrong, seed=seed)),
    }
    for contract, reject in rejects.items():
        mutants = [mutant for mutant in MUTANTS[contract] if breaks(mutant, method)]
        problems += [_missed(contract, mutant) for mutant in mutants if not reject(*mutant(method, model))]
    if not claims(method):
        yield Report(name, method.unit, "", "no-privacy", 0.0, 0.0, difference, not problems, problems)
        return
    for adjacency in Adjacency:
        for worst, missed in _searched(method, models, adjacency, trials, seed):
            all_problems = [*problems, *worst.problems, *missed]
            numbers = (worst.claimed, worst.worst, difference)
            yield Report(name, method.unit, adjacency, worst.query, *numbers, not all_problems, all_problems)


def _rejecting(
    mutant: Callable[..., Any], name: str, method: Method, model: Any, trials: int, seed: int
) -> Iterator[Report]:
    """The reports of one model, and a problem for each adjacency under which one more mutant passes."""
    wrong, its_model = mutant(method, model)
    for report in _reports(name, method, [model], trials, seed):
        found = sensitivity(wrong, its_model, Adjacency(report.adjacency), trials=trials, seed=seed)
        missed = [] if all(each.beyond for each in found) else [_missed("sensitivity", mutant)]
        problems = [*report.problems, *missed]
        yield report._replace(passed=not problems, problems=problems)


def _searched(
    method: Method, models: Sequence[Any], adjacency: Adjacency, trials: int, seed: int, sampling: str = FULL
) -> Iterator[tuple[Found, list[str]]]:
    """For each query: the worst case over all models, and a problem for each mutant that passes on that model."""
    search = partial(sensitivity, adjacency=adjacency, trials=trials, seed=seed, sampling=sampling)
    by_model = [search(method, model) for model in models]
    for again in range(1, MAX_SEARCHES):  # with another seed, if no search came near enough
        if all(max(worst.reached for worst in query) >= REQUIRED_SHARE for query in zip(*by_model, strict=True)):
            break
        by_model += [search(method, model, seed=seed + again, further=True) for model in models]
    worst = [max(enumerate(results), key=lambda result: result[1].reached) for results in zip(*by_model, strict=True)]
    missed: list[list[str]] = [[] for _ in worst]
    blended = blended_stages(method, models[0], seed=seed)
    mutants = MUTANTS["sensitivity"] if sampling == FULL else OF_MINIBATCHES
    for mutant in (mutant for mutant in mutants if breaks(mutant, method)):
        changed = [k for k, (_, found) in enumerate(worst) if concerns(mutant, found.query, blended)]
        for best in {worst[k][0] for k in changed}:
            here = [k for k in changed if worst[k][0] == best]
            wrong = mutant(method, models[best % len(models)])
            found = search(*wrong, trials=MUTANT_TRIALS * trials, rejects=here)  # most end in the first few
            for k in here:
                missed[k] += [] if found[k].beyond else [_missed("sensitivity", mutant)]
    yield from zip((found for _, found in worst), missed, strict=True)


def _apart_engines(difference: float) -> list[str]:
    """The problem of engines that differ; none if they agree."""
    if difference <= TOLERANCE:
        return []
    return [f"engines: the engines differ by {difference:.2g}; at most {TOLERANCE:g} is allowed"]


def _missed(contract: str, mutant: Callable[..., Any]) -> str:
    return f"{contract}: the contract did not reject the mutant '{mutant.__name__}'"


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
