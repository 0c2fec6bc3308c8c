"""An attack on real runs of a method: how much epsilon is there, at least?

Two worlds differ in one unit of one client, the victim: a canary that moves what is released as far as its clip allows.
Both are run many times, with the engine and the noise that ship. The adversary knows everything but the noise and the
world: all other records, the models sent out, and what the trust model shows it. So it can work out what either world
would have released next, given what was released before, and scores a run by

    log p_1 / p_0 = sum over releases of <released - (a + b) / 2, b - a> / std^2,

a and b being the releases of world 0 and 1 before noise. No test is more powerful (Neyman and Pearson). Against an
untrusted server it sees each of the victim's noised answers, or messages where those carry the noise: all that the
certificate counts as released, which may be more than what crosses the wire.

Where no canary at hand reaches a query's bound (a lemma's, say), the attack is weaker than the certificate allows for;
`reach` says how much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import core
from sordino.core import Adjacency, Correlated, Method, Privacy, SordinoError, Unit
from sordino.engines.client import MATRICES
from sordino.experiments.watch import VICTIM, Attack, World, watched
from sordino.methods import REGISTRY, build
from sordino.models.linear import Linear, Loss
from sordino.privacy import audit as statistics
from sordino.privacy.noise import Address, Secure, Seeded, Source
from sordino.privacy.noise import source as noise_from
from sordino.privacy.plan import Plan

RUNS, ROUNDS = 10_000, 5  # a world; of the stage whose length is open
BATCH = 10_000  # runs at once
CANARIES = 2_000  # of an audit in one run
MATRIX_CANARIES = 300  # where a release has an entry for every pair of them
PILOT = 8  # runs that choose the canary
TRIES = 3  # a bound above the certificate is looked for again, with fresh noise, before anybody is accused
SIZES = (4, 3, 3)  # the victim is the largest client: where only sums are seen, it moves them most
LONG, SHORT, LABEL = 10.0, 0.01, 1e6  # of canaries: every gradient is far beyond its clip
MODEL = Linear(3, 1, Loss.SQUARES, bias=False)


class Audit(NamedTuple):
    """Lower bounds on epsilon, to be held against the certified one."""

    method: str
    unit: str
    adjacency: str
    trust: str
    certified: float
    delta: float
    lower_thresholds: float
    lower_gaussian: float
    mu_certified: float
    mu_lower: float
    false_positive_rate: float
    false_negative_rate: float
    reach: float  # the canary's mu over the certified one
    canary: str
    runs: int
    rounds: int
    confidence: float
    tries: int
    noise_factor: float

    @property
    def broken(self) -> bool:
        return max(self.lower_thresholds, self.lower_gaussian) > self.certified


class OneRun(NamedTuple):
    """A lower bound on epsilon from one run with many canaries."""

    method: str
    unit: str
    adjacency: str
    trust: str
    certified: float
    delta: float
    lower: float
    canaries: int
    guesses: int
    right: int
    rounds: int
    confidence: float
    tries: int
    noise_factor: float

    @property
    def broken(self) -> bool:
        return self.lower > self.certified


def audit(
    name: str,
    privacy: Privacy | None = None,
    *,
    runs: int = RUNS,
    rounds: int | None = None,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    method: Method | None = None,
) -> Audit:
    """Attack a registered method, or the `method` given, with `runs` runs of each world.

    Each bound holds with `confidence`, so at 0.95 one in twenty may exceed the truth: one that exceeds the certificate
    is looked for again with fresh noise, and the smallest is kept. `noise_factor` multiplies the noise behind the
    certificate's back; below 1 the attack should win. Noise is secret and fresh, or with a seed reproducible.
    """
    plan = plan_for(name, privacy, rounds=rounds, method=method)
    check_arguments("runs", runs, noise_factor, seed)
    sources, certified, delta = _sources(seed, plan), plan.epsilon(), plan.privacy.delta
    attack, information = _best(plan, MODEL, sources)
    threshold = statistics.best_threshold(math.sqrt(information), runs, delta=delta, confidence=confidence)
    found: list[tuple[statistics.Bound, statistics.Bound]] = []
    while len(found) < TRIES and (not found or max(bound.epsilon for bound in found[-1]) > certified):
        zero, one = (scores(attack, world, runs, sources, noise_factor) for world in (0, 1))
        plain = statistics.by_thresholds(zero, one, delta=delta, confidence=confidence, threshold=threshold)
        sharp = statistics.by_gaussian(zero, one, delta=delta, confidence=confidence, threshold=0.0)
        found.append((plain, sharp))
    thresholds, gaussian = (min(bounds, key=lambda bound: bound.epsilon) for bounds in zip(*found, strict=True))
    return Audit(
        *_names(name, plan),
        lower_thresholds=thresholds.epsilon,
        lower_gaussian=gaussian.epsilon,
        mu_certified=plan.mu(),
        mu_lower=gaussian.mu or 0.0,
        false_positive_rate=gaussian.false_positive_rate,
        false_negative_rate=gaussian.false_negative_rate,
        reach=math.sqrt(information) / plan.mu(),
        canary=attack.name,
        runs=runs,
        rounds=plan.rounds,
        confidence=confidence,
        tries=len(found),
        noise_factor=noise_factor,
    )


def one_run(
    name: str,
    privacy: Privacy | None = None,
    *,
    canaries: int = CANARIES,
    rounds: int | None = None,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    method: Method | None = None,
) -> OneRun:
    """Attack one run in which the victim holds many canaries, each in a state that a coin of its own decides: there or
    not (add-remove), as it is or mirrored (replace-one). Every canary has a coordinate of the model to itself."""
    privacy = Privacy() if privacy is None else privacy
    if privacy.unit is not Unit.RECORD:
        raise SordinoError("unit: an audit in one run hides many records in a client; it exists at record level only.")
    method = build(name) if method is None else method
    if any(query.kind in MATRICES for stage in method.stages for query in stage.queries):
        canaries = min(canaries, MATRIX_CANARIES)
    check_arguments("canaries", canaries, noise_factor, seed)
    plan = plan_for(name, privacy, rounds=rounds, method=method, sizes=(canaries, *SIZES[1:]))
    attack, sources, certified, delta = _crowded(plan, canaries), _sources(seed, plan), plan.epsilon(), privacy.delta
    guesses = statistics.best_guesses(canaries, plan.mu(), delta=delta, confidence=confidence)
    found: list[tuple[float, int]] = []
    while len(found) < TRIES and (not found or found[-1][0] > certified):
        coins = torch.from_numpy(next(sources).uniform(Address(VICTIM, 0, 0), (canaries,)) < 0.5)
        told = _told(attack, coins, next(sources), noise_factor)
        sure = told.abs().argsort(descending=True)[:guesses]
        right = int(((told[sure] > 0) == coins[sure]).sum())
        found.append((statistics.by_one_run(canaries, guesses, right, delta=delta, confidence=confidence), right))
    lower, right = min(found)
    rest = (plan.rounds, confidence, len(found), noise_factor)
    return OneRun(*_names(name, plan), lower, canaries, guesses, right, *rest)


def plan_for(
    name: str,
    privacy: Privacy | None = None,
    *,
    rounds: int | None = None,
    method: Method | None = None,
    sizes: tuple[int, ...] = SIZES,
) -> Plan:
    """What is attacked: a short run. `rounds` is the length of the stage whose length is open. What is not proved is
    refused."""
    privacy = Privacy() if privacy is None else privacy
    method = build(name, privacy.unit) if method is None else method
    if privacy.epsilon == math.inf:
        raise SordinoError("epsilon: inf promises nothing; give a finite one to audit.")
    if rounds is not None and rounds < 1:
        raise SordinoError(f"rounds: {rounds} must be at least 1.")
    fixed = sum(stage.rounds or 0 for stage in method.stages)
    usual = REGISTRY[name].rounds - fixed if name in REGISTRY else ROUNDS
    streams = [len(q.noise.decoder) for s in method.stages for q in s.queries if isinstance(q.noise, Correlated)]
    length = min([rounds or max(1, min(ROUNDS, usual)), *streams])
    return Plan(method, fixed + length * any(stage.rounds is None for stage in method.stages), sizes, privacy)


def check_arguments(name: str, count: int, noise_factor: float, seed: int | None) -> None:
    """Of an audit: how many runs or canaries, and which noise."""
    if count < statistics.FEWEST:
        raise SordinoError(f"{name}: {count} tell nothing; use at least {statistics.FEWEST}, better 1,000.")
    if not 0 < noise_factor < math.inf:
        raise SordinoError(f"noise_factor: {noise_factor} must be a number above 0; 1 is the noise that ships.")
    noise_from(seed)


def scores(attack: Attack, world: int, runs: int, sources: Iterator[Source], noise_factor: float = 1.0) -> np.ndarray:
    """The log likelihood ratio of many runs of one world."""
    counts = [min(BATCH, runs - start) for start in range(0, runs, BATCH)]
    parts = [watched(attack, world, next(sources), count, noise_factor).score() for count in counts]
    return torch.cat(parts).numpy()


def attacks(plan: Plan, model: core.Model) -> Iterator[Attack]:
    """Canaries to choose from: long or short records, mirrored, turned, taken away; in quiet or hostile company."""
    one, two, three = torch.eye(3, dtype=torch.float64)
    records = {
        "long": (LONG * one, LABEL),
        "long mirrored": (LONG * one, -LABEL),
        "short": (SHORT * one, LABEL),
        "short mirrored": (SHORT * one, -LABEL),
        "turned": (LONG * two, LABEL),
    }
    joins, whole = plan.privacy.adjacency is Adjacency.ADD_REMOVE, plan.privacy.unit is Unit.USER
    pairs = [("absent", name) for name in records] if joins else list(itertools.combinations(records, 2))
    companies = {"": None} if whole else {"": (SHORT * three, 0.0), ", hostile company": (LONG * one, -LABEL / 10)}
    for (before, after), (kind, others) in itertools.product(pairs, companies.items()):
        pair = [records[after if joins else before], records[after]]
        there, here = (_world(record, record if others is None else others) for record in pair)
        if joins and not whole:
            there = _without_first(there)
        yield Attack(f"{before} / {after}{kind}", plan, model, (there, here), leaves=joins and whole)


# ------------------------------------------------------------------------------------------------------------ inside


def _names(name: str, plan: Plan) -> tuple[str, str, str, str, float, float]:
    privacy = plan.privacy
    return name, str(privacy.unit), str(privacy.adjacency), str(privacy.trust), plan.epsilon(), privacy.delta


def _sources(seed: int | None, plan: Plan) -> Iterator[Source]:
    """One for every use: fresh keys, or streams of a seed that no two audits share."""
    words = "/".join(map(str, _names(plan.method.name, plan))).encode()
    for number in itertools.count():
        if seed is None:
            yield Secure()
        else:
            state = np.random.SeedSequence([seed, number, *words]).generate_state(1, np.uint64)
            yield Seeded(int(state[0]))


def _best(plan: Plan, model: core.Model, sources: Iterator[Source]) -> tuple[Attack, float]:
    """The canary that tells most, and the square of its mu, both by a short pilot of its own."""
    best: tuple[Attack, float] | None = None
    for attack in attacks(plan, model):
        pilots = [watched(attack, world, next(sources), PILOT).information().mean() for world in (0, 1)]
        information = float(sum(pilots)) / 2
        if math.isfinite(information) and (best is None or information > best[1]):
            best = attack, information
            if information > 0.999 * plan.mu() ** 2:
                break
    if best is None:
        raise SordinoError(f"method: {plan.method.name} releases nothing finite of any canary; it cannot be audited.")
    return best


def _world(first: tuple[Tensor, float], others: tuple[Tensor, float]) -> World:
    """The victim holds `first` and copies of `others`; the other clients hold small records of their own."""
    rows = [first, *[others] * (SIZES[VICTIM] - 1)]
    rest = torch.linspace(-1, 1, 3 * sum(SIZES[1:]), dtype=torch.float64).view(-1, 3)
    x = torch.cat([torch.stack([x for x, _ in rows]), rest])
    y = torch.cat([x.new_tensor([y for _, y in rows]), rest.sum(-1)])
    return World(x, y, np.cumsum([0, *SIZES]))


def _without_first(world: World) -> World:
    """The victim's first record is absent, and nothing of it is left behind the mask."""
    x, y, present = world.x.clone(), world.y.clone(), torch.ones(SIZES[VICTIM], dtype=torch.float64)
    x[0], y[0], present[0] = 0, 0, 0
    return World(x, y, world.starts, present)


def _crowded(plan: Plan, canaries: int) -> Attack:
    """All canaries in one state, against all of them in the other."""
    x = torch.zeros(sum(plan.sizes), canaries, dtype=torch.float64)
    x[:canaries] = LONG * torch.eye(canaries, dtype=torch.float64)
    y = torch.zeros(len(x), dtype=torch.float64)
    y[:canaries] = LABEL
    here = World(x, y, np.cumsum([0, *plan.sizes]))
    there = _in_states(here, plan, torch.zeros(canaries, dtype=torch.bool))
    return Attack("crowd", plan, Linear(canaries, 1, Loss.SQUARES, bias=False), (there, here))


def _in_states(here: World, plan: Plan, coins: Tensor) -> World:
    """Canaries whose coin is 0 leave, or are mirrored."""
    x, y, count = here.x.clone(), here.y.clone(), len(coins)
    if plan.privacy.adjacency is Adjacency.REPLACE_ONE:
        y[:count] *= 2.0 * coins - 1
        return World(x, y, here.starts)
    x[:count] *= coins.unsqueeze(-1)
    y[:count] *= coins
    return World(x, y, here.starts, coins.double())


def _told(attack: Attack, coins: Tensor, source: Source, noise_factor: float) -> Tensor:
    """What one run tells of every canary: the terms of the likelihood ratio that lie on its own coordinate."""
    records = _in_states(attack.worlds[1], attack.plan, coins)
    watch = watched(attack, 1, source, 1, noise_factor, records=records)
    own = [terms[0] if terms.dim() == 2 else terms[0].diagonal() for terms, _ in watch.terms()]
    return torch.stack(own).sum(0)
