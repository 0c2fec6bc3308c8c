"""What a check reports: one row per noised query and adjacency, from all contracts and their mutants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from sordino.checks.contracts import TOLERANCE, apart, asks, engines, gaps, replay, unasked
from sordino.checks.fixtures import claims
from sordino.checks.mutants import MUTANTS, OF_MINIBATCHES, breaks, concerns, noticed_stages
from sordino.checks.search import REQUIRED_SHARE, Found, sensitivity
from sordino.core import Adjacency, Method
from sordino.privacy.participation import FULL

LEAST_TRIALS = 8  # with fewer, the search may miss a mutant of a correct method
MAX_SEARCHES = 3  # at most, if a search does not come near enough to the claim
MUTANT_TRIALS = 4  # restarts of the search for a mutant, over those for the method


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


def reports_of(name: str, method: Method, models: Sequence[Any], trials: int, seed: int) -> Iterator[Report]:
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
        problems += apart_engines(difference)
    rejects: dict[str, Callable[..., bool]] = {
        "apart": lambda *wrong: bool(apart(*wrong, seed=seed)),
        "asks": lambda *wrong: bool(asks(*wrong, seed=seed)),
        "replay": lambda *wrong: bool(replay(*wrong, seed=seed)),
        "engines": lambda *wrong: any(gap > TOLERANCE for gap in gaps(*wrong, seed=seed)),
    }
    for contract, reject in rejects.items():
        mutants = [mutant for mutant in MUTANTS[contract] if breaks(mutant, method)]
        problems += [missed_mutant(contract, mutant) for mutant in mutants if not reject(*mutant(method, model))]
    if not claims(method):
        yield Report(name, method.unit, "", "no-privacy", 0.0, 0.0, difference, not problems, problems)
        return
    for adjacency in Adjacency:
        for worst, missed in searched(method, models, adjacency, trials, seed):
            all_problems = [*problems, *worst.problems, *missed]
            numbers = (worst.claimed, worst.worst, difference)
            yield Report(name, method.unit, adjacency, worst.query, *numbers, not all_problems, all_problems)


def rejecting(
    mutant: Callable[..., Any], name: str, method: Method, model: Any, trials: int, seed: int
) -> Iterator[Report]:
    """The reports of one model, and a problem for each adjacency under which one more mutant passes."""
    wrong, its_model = mutant(method, model)
    every = range(sum(query.noise is not None for stage in wrong.stages for query in stage.queries))
    for report in reports_of(name, method, [model], trials, seed):
        found = sensitivity(wrong, its_model, Adjacency(report.adjacency), trials=trials, seed=seed, rejects=every)
        missed = [] if all(each.beyond for each in found) else [missed_mutant("sensitivity", mutant)]
        problems = [*report.problems, *missed]
        yield report._replace(passed=not problems, problems=problems)


def searched(
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
    noticed = noticed_stages(method, models[0], seed=seed)
    mutants = MUTANTS["sensitivity"] if sampling == FULL else OF_MINIBATCHES
    for mutant in (mutant for mutant in mutants if breaks(mutant, method)):
        changed = [k for k, (_, found) in enumerate(worst) if concerns(mutant, found.query, *noticed)]
        for best in {worst[k][0] for k in changed}:
            here = [k for k in changed if worst[k][0] == best]
            wrong = mutant(method, models[best % len(models)])
            found = search(*wrong, trials=MUTANT_TRIALS * trials, rejects=here)  # most end in the first few
            for k in here:
                missed[k] += [] if found[k].beyond else [missed_mutant("sensitivity", mutant)]
    yield from zip((found for _, found in worst), missed, strict=True)


def apart_engines(difference: float) -> list[str]:
    """The problem of engines that differ; none if they agree."""
    if difference <= TOLERANCE:
        return []
    return [f"engines: the engines differ by {difference:.2g}; at most {TOLERANCE:g} is allowed"]


def missed_mutant(contract: str, mutant: Callable[..., Any]) -> str:
    return f"{contract}: the contract did not reject the mutant '{mutant.__name__}'"
