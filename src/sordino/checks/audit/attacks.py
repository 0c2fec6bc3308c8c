"""An attack on real runs of a method: how much epsilon is there, at least?

Two worlds differ in one unit of one client, the victim: a canary that moves what is released as far as its clip allows.
Both are run many times, with the engine and the noise that ship. The adversary knows everything but the noise and the
world: all other records, the models sent out, and what the trust model shows it. So it can work out what either world
would have released next, given what was released before, and scores a run by

    log p_1 / p_0 = sum over releases of <released - (a + b) / 2, b - a> / std^2,

a and b being the releases of world 0 and 1 before noise. No test is more powerful (Neyman and Pearson). Against an
untrusted server it sees each of the victim's noised answers, or messages where those carry the noise: all that the
certificate counts as released, which may be more than what crosses the wire. Runs use the dtype that ships, float32,
or the one asked for; scores are computed in float64.

Minibatches: all records but the canary have a gradient of zero, so a release is noise alone unless the canary's coin,
of rate q, came up. The adversary does not see that coin either:

    log p_1 / p_0 = sum over releases of log (1 - q + q e_b) / (1 - q + q e_a),   e_c = exp((<released, c> - |c|^2 / 2)
    / std^2).

That mechanism is not Gaussian. Instead of a mu, the attack refutes noise: how often the guess "world 1 if the score is
above 0" is right bounds the noise for which the account of sampling would allow that many right guesses, and with it
the account's epsilon(delta). Thresholds assume nothing of the mechanism, and are looser at small delta.

Where no canary at hand reaches a query's bound (a lemma's, say), the attack is weaker than the certificate allows for.
`reach` says how much, for all releases together; `least_claim` says it of the query whose bound is reached least, each
query by the canary that suits it best. The two differ where no single record can reach two bounds at once: a mirrored
gradient has the same outer product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from sordino import core
from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.observer import VICTIM, Attack, AttackedRecords, watched
from sordino.core import Adjacency, Correlated, Kind, Method, Privacy, Unit
from sordino.engines.oracle import MATRICES
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import events
from sordino.privacy.accounting.events import Release
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.mechanisms.random import Address, Secure, Seeded, Source
from sordino.privacy.mechanisms.random import source as noise_from
from sordino.privacy.participation import FULL, Sampling
from sordino.privacy.plan import Plan

RUNS, ROUNDS = 10_000, 5  # a world; of the stage whose length is open
RUNS_PER_BATCH = 10_000  # runs at once
CANARIES = 2_000  # of an audit in one run
MATRIX_CANARIES = 300  # where a release has an entry for every pair of them
PILOT = 8  # runs that choose the canary
SUFFICIENT_SHARE = 0.99  # of every claim: no other canary is tried
MAX_TRIES = 3  # a bound above the certificate is looked for again, with fresh noise, before anybody is accused
CLIENT_RECORDS = (4, 3, 3)  # the victim is the largest client: where only sums are seen, it moves them most
LEMMA_SIZES = (100, 100, 100)  # where a lemma bounds a message: with fewer records noise fills its ball
SAMPLED_RECORDS = 8  # records of the victim, of which a minibatch at a rate holds a part
RUNS_IN_MEMORY = 300_000  # records of all runs at once
LONG_CANARY, SHORT_CANARY, CANARY_LABEL = 10.0, 0.01, 1e6  # of canaries: every gradient is far beyond its clip
AUDITED_MODEL = Linear(3, 1, Loss.SQUARES, bias=False)


class Audit(NamedTuple):
    """Lower bounds on epsilon, to be held against the certified one."""

    method: str
    unit: str
    adjacency: str
    trust: str
    certified: float
    delta: float
    lower_thresholds: float
    lower_gaussian: float | None  # None where minibatches are drawn: that mechanism is not Gaussian
    lower_account: float | None  # None where none are drawn
    mu_certified: float  # of minibatches, as if each held all records
    mu_lower: float | None
    false_positive_rate: float
    false_negative_rate: float
    reach: float  # the canary's mu over the certified one
    least_claim: float  # the same of the query whose claim is reached least, each by the canary that suits it best
    canary: str
    runs: int
    rounds: int
    confidence: float
    tries: int
    noise_factor: float
    batch: str
    dtype: str

    @property
    def lower(self) -> float:
        return max(self.lower_thresholds, self.lower_gaussian or 0.0, self.lower_account or 0.0)

    @property
    def broken(self) -> bool:
        return self.lower > self.certified


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
    dtype: str

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
    batch: str = FULL,
    dtype: torch.dtype = torch.float32,
) -> Audit:
    """Attack a registered method, or the `method` given, with `runs` runs of each world.

    Each bound holds with `confidence`, so at 0.95 one in twenty may exceed the truth: one that exceeds the certificate
    is looked for again with fresh noise, and the smallest is kept. `noise_factor` multiplies the noise behind the
    certificate's back; below 1 the attack should win. Noise is secret and fresh, or with a seed reproducible.
    `batch`: minibatches, as in a run (`poisson:4`, `fixed:4`); the victim holds twice as many records.
    """
    plan = plan_for(name, privacy, rounds=rounds, method=method, batch=batch)
    check_arguments("runs", runs, noise_factor, seed)
    sources, certified, delta = _sources(seed, plan), spending.epsilon(plan), plan.privacy.delta
    attack, information, least = _best(plan, AUDITED_MODEL, sources, dtype)
    drawn, threshold = _samples(plan), None  # of a mixture, a part of the scores chooses the threshold
    if not drawn:
        threshold = statistics.best_threshold(math.sqrt(information), runs, delta=delta, confidence=confidence)
    found: list[tuple[float, float, statistics.LowerBound]] = []
    while len(found) < MAX_TRIES and (not found or max(found[-1][:2]) > certified):
        zero, one = (scores(attack, world, runs, sources, noise_factor) for world in (0, 1))
        plain = statistics.by_thresholds(zero, one, delta=delta, confidence=confidence, threshold=threshold)
        sharp = statistics.by_gaussian(zero, one, delta=delta, confidence=confidence, threshold=0.0)
        found.append((plain.epsilon, _by_account(plan, sharp) if drawn else sharp.epsilon, sharp))
    _, model_based, sharp = min(found, key=lambda bounds: bounds[1])
    return Audit(
        *_names(name, plan),
        lower_thresholds=min(bounds[0] for bounds in found),
        lower_gaussian=None if drawn else model_based,
        lower_account=model_based if drawn else None,
        mu_certified=spending.mu(plan),
        mu_lower=None if drawn else sharp.mu or 0.0,
        false_positive_rate=sharp.false_positive_rate,
        false_negative_rate=sharp.false_negative_rate,
        reach=math.sqrt(information) / spending.mu(plan),
        least_claim=least,
        canary=attack.name,
        runs=runs,
        rounds=plan.rounds,
        confidence=confidence,
        tries=len(found),
        noise_factor=noise_factor,
        batch=str(plan.sampling),
        dtype=_called(dtype),
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
    dtype: torch.dtype = torch.float32,
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
    plan = plan_for(name, privacy, rounds=rounds, method=method, sizes=(canaries, *CLIENT_RECORDS[1:]))
    attack, sources = _crowded(plan, canaries, dtype), _sources(seed, plan)
    certified, delta = spending.epsilon(plan), privacy.delta
    guesses = statistics.best_guesses(canaries, spending.mu(plan), delta=delta, confidence=confidence)
    found: list[tuple[float, int]] = []
    while len(found) < MAX_TRIES and (not found or found[-1][0] > certified):
        uniforms = torch.from_numpy(next(sources).uniform(Address(VICTIM, 0, 0), (canaries,)) < 0.5)
        told = _told(attack, uniforms, next(sources), noise_factor)
        sure = told.abs().argsort(descending=True)[:guesses]
        right = int(((told[sure] > 0) == uniforms[sure]).sum())
        found.append((statistics.by_one_run(canaries, guesses, right, delta=delta, confidence=confidence), right))
    lower, right = min(found)
    rest = (plan.rounds, confidence, len(found), noise_factor, _called(dtype))
    return OneRun(*_names(name, plan), lower, canaries, guesses, right, *rest)


def plan_for(
    name: str,
    privacy: Privacy | None = None,
    *,
    rounds: int | None = None,
    method: Method | None = None,
    sizes: tuple[int, ...] | None = None,
    batch: str = FULL,
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
    sampling = Sampling.parse(batch)
    if why := unattacked(method, sampling, privacy.adjacency):
        raise SordinoError(f"batch: {sampling} of {method.name} is not audited: {why}.")
    return Plan(
        method,
        fixed + length * any(stage.rounds is None for stage in method.stages),
        _sizes(method, sampling) if sizes is None else sizes,
        privacy,
        sampling=sampling,
    )


def unattacked(method: Method, sampling: Sampling, adjacency: Adjacency) -> str:
    """Why minibatches of this method are not audited; empty where they are, or none are drawn."""
    if sampling.kind == FULL:
        return ""
    if method.unit is Unit.USER:
        return "at user level nothing is claimed for them, audit it with batch = full"
    noised = [query for stage in method.stages for query in stage.queries if query.noise is not None]
    if not any(query.kind is Kind.GRADIENT for query in noised):
        return "it noises no gradients, and nothing is claimed for minibatches; audit it with batch = full"
    if any(query.bound is not None or mechanism_of(query.noise).spans_rounds for query in noised):
        return "its bound or its noise is proved for all of a client's records; audit it with batch = full"
    if sampling.kind == "fixed" and adjacency is Adjacency.ADD_REMOVE:
        return "nothing is proved of minibatches of a fixed size under add-remove; use replace-one, or poisson"
    if any(query.kind is Kind.COUNT or query.joint > 1 for query in noised):
        return "one minibatch answers several questions, which the attack does not follow"
    return ""


def check_arguments(name: str, count: int, noise_factor: float, seed: int | None) -> None:
    """Of an audit: how many runs or canaries, and which noise."""
    if count < statistics.MIN_SCORES:
        raise SordinoError(f"{name}: {count} tell nothing; use at least {statistics.MIN_SCORES}, better 1,000.")
    if not 0 < noise_factor < math.inf:
        raise SordinoError(f"noise_factor: {noise_factor} must be a number above 0; 1 is the noise that ships.")
    noise_from(seed)


def scores(attack: Attack, world: int, runs: int, sources: Iterator[Source], noise_factor: float = 1.0) -> np.ndarray:
    """The log likelihood ratio of many runs of one world."""
    most = max(1, min(RUNS_PER_BATCH, RUNS_IN_MEMORY // sum(attack.plan.sizes)))
    counts = [min(most, runs - start) for start in range(0, runs, most)]
    parts = [watched(attack, world, next(sources), count, noise_factor).score() for count in counts]
    return torch.cat(parts).numpy()


def attacks(plan: Plan, model: core.Model, dtype: torch.dtype = torch.float32) -> Iterator[Attack]:
    """Canaries to choose from: long or short records, mirrored, turned, taken away; in company of several kinds.

    Company that pushes: short records with large labels, at every client. Each gradient is as long as its clip and has
    next to no curvature. So the right side of a Newton system grows to its limit, clients agree on it, and a long
    canary that points the other way moves both the right side and the matrix.
    """
    one, two, three = torch.eye(3, dtype=torch.float64)
    records = {
        "long": (LONG_CANARY * one, CANARY_LABEL),
        "long mirrored": (LONG_CANARY * one, -CANARY_LABEL),
        "short": (SHORT_CANARY * one, CANARY_LABEL),
        "short mirrored": (SHORT_CANARY * one, -CANARY_LABEL),
        "turned": (LONG_CANARY * two, CANARY_LABEL),
    }
    joins, whole = plan.privacy.adjacency is Adjacency.ADD_REMOVE, plan.privacy.unit is Unit.USER
    pairs = [("absent", name) for name in records] if joins else list(itertools.combinations(records, 2))
    companies: dict[str, tuple[Tensor, float] | None]
    if _samples(plan):
        companies = {", company of zeros": (0 * one, 0.0)}
    elif whole:
        companies = {"": None}
    else:
        companies = {
            "": (SHORT_CANARY * three, 0.0),
            ", hostile company": (LONG_CANARY * one, -CANARY_LABEL / 10),
            ", company that pushes": (SHORT_CANARY * one, -CANARY_LABEL),
        }
        if _proved_by_lemma(plan.method):
            companies = dict(reversed(companies.items()))
    for (kind, others), (before, after) in itertools.product(companies.items(), pairs):
        pair = [records[after if joins else before], records[after]]
        alike = others is not None and (_samples(plan) or others[1] == -CANARY_LABEL)
        there, here = (_world(plan, record, record if others is None else others, alike, dtype) for record in pair)
        if joins and not whole:
            there = _without_first(there)
        yield Attack(f"{before} / {after}{kind}", plan, model, (there, here), leaves=joins and whole)


# ------------------------------------------------------------------------------------------------------------ inside


def _names(name: str, plan: Plan) -> tuple[str, str, str, str, float, float]:
    privacy = plan.privacy
    return name, str(privacy.unit), str(privacy.adjacency), str(privacy.trust), spending.epsilon(plan), privacy.delta


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _samples(plan: Plan) -> bool:
    return plan.sampling.kind != FULL


def _proved_by_lemma(method: Method) -> bool:
    return any(query.bound is not None for stage in method.stages for query in stage.queries)


def _sizes(method: Method, sampling: Sampling) -> tuple[int, ...]:
    """Of the clients. Of minibatches the victim's canary is in every second one, or in as many as the rate says."""
    if sampling.kind == FULL:
        return LEMMA_SIZES if _proved_by_lemma(method) else CLIENT_RECORDS
    return (2 * math.ceil(sampling.amount) if sampling.amount >= 1 else SAMPLED_RECORDS,) * 2


def _sources(seed: int | None, plan: Plan) -> Iterator[Source]:
    """One for every use: fresh keys, or streams of a seed that no two audits share."""
    words = "/".join(map(str, _names(plan.method.name, plan))).encode()
    for number in itertools.count():
        if seed is None:
            yield Secure()
        else:
            state = np.random.SeedSequence([seed, number, *words]).generate_state(1, np.uint64)
            yield Seeded(int(state[0]))


def _best(plan: Plan, model: core.Model, sources: Iterator[Source], dtype: torch.dtype) -> tuple[Attack, float, float]:
    """The canary that tells most, and the square of its mu, both by a short pilot of its own; and how far the claim is
    reached that is reached least, each by the best of its canaries."""
    best: tuple[Attack, float] | None = None
    claimed = _claimed(plan)
    reached = dict.fromkeys(claimed, 0.0)
    for attack in attacks(plan, model, dtype):
        pilots = [watched(attack, world, next(sources), PILOT).informations() for world in (0, 1)]
        told = {key: sum(float(pilot[key].mean()) for pilot in pilots) / 2 for key in claimed}
        if not all(map(math.isfinite, told.values())):
            continue
        reached = {key: max(reached[key], math.sqrt(told[key] / claimed[key])) for key in claimed}
        information = sum(told.values())
        if best is None or information > best[1]:
            best = attack, information
        if best[1] > 0.999 * spending.mu(plan) ** 2 and min(reached.values()) > SUFFICIENT_SHARE:
            break
    if best is None:
        raise SordinoError(f"method: {plan.method.name} releases nothing finite of any canary; it cannot be audited.")
    return *best, min(reached.values())


def _by_account(plan: Plan, seen: statistics.LowerBound) -> float:
    """Epsilon, by the account, of the most noise that would allow as many right guesses as were seen.

    Of guesses between two equally likely worlds, mu-Gaussian DP allows a part of Φ(mu / 2) to be right. So the mu that
    was refuted tells how many right guesses were proved, whatever the mechanism.
    """
    right = float(ndtr((seen.mu or 0.0) / 2))
    releases, adjacency = _of_victim(plan), plan.privacy.adjacency

    def with_noise(factor: float) -> list[Release]:
        return [release._replace(std=factor * release.std) for release in releases]

    low, high = 2.0**-6, 2.0**6  # the noise that is refuted lies above the one that is looked for
    if events.guess(with_noise(high), adjacency) >= right:
        return 0.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if events.guess(with_noise(middle), adjacency) < right else (middle, high)
    return events.epsilon(with_noise(high), plan.privacy.delta, adjacency)


def _of_victim(plan: Plan) -> tuple[Release, ...]:
    (mine,) = [group for group in spending.groups(plan) if VICTIM in group.clients]
    return mine.releases


def _claimed(plan: Plan) -> dict[tuple[int, int], float]:
    """The square of mu that the certificate counts for the victim, of each noised query: (stage, number) -> mu^2."""
    releases = {release.query: release for release in _of_victim(plan)}
    found = {}
    for level in calibration.query_noises(plan):
        if (release := releases.get(level.name)) is not None:
            found[level.stage, level.number] = release.times * (release.sensitivity / release.std) ** 2
    return found


def _world(
    plan: Plan, first: tuple[Tensor, float], others: tuple[Tensor, float], alike: bool, dtype: torch.dtype
) -> AttackedRecords:
    """The victim holds `first` and copies of `others`; the other clients hold copies too where clients are `alike`,
    else small records of their own."""
    rows = [first, *[others] * (plan.sizes[VICTIM] - 1)]
    rest = torch.linspace(-1, 1, 3 * sum(plan.sizes[1:]), dtype=torch.float64).view(-1, 3)
    labels = rest.sum(-1)
    if alike:
        rest, labels = others[0].expand_as(rest), torch.full_like(labels, others[1])
    x = torch.cat([torch.stack([x for x, _ in rows]), rest])
    y = torch.cat([x.new_tensor([y for _, y in rows]), labels])
    return AttackedRecords(x.to(dtype), y.to(dtype), np.cumsum([0, *plan.sizes]))


def _without_first(world: AttackedRecords) -> AttackedRecords:
    """The victim's first record is absent, and nothing of it is left behind the mask."""
    x, y, present = world.x.clone(), world.y.clone(), torch.ones(world.sizes[VICTIM], dtype=torch.float64)
    x[0], y[0], present[0] = 0, 0, 0
    return AttackedRecords(x, y, world.starts, present)


def _crowded(plan: Plan, canaries: int, dtype: torch.dtype) -> Attack:
    """All canaries in one state, against all of them in the other."""
    x = torch.zeros(sum(plan.sizes), canaries, dtype=dtype)
    x[:canaries] = LONG_CANARY * torch.eye(canaries, dtype=dtype)
    y = torch.zeros(len(x), dtype=dtype)
    y[:canaries] = CANARY_LABEL
    here = AttackedRecords(x, y, np.cumsum([0, *plan.sizes]))
    there = _in_states(here, plan, torch.zeros(canaries, dtype=torch.bool))
    return Attack("crowd", plan, Linear(canaries, 1, Loss.SQUARES, bias=False), (there, here))


def _in_states(here: AttackedRecords, plan: Plan, uniforms: Tensor) -> AttackedRecords:
    """Canaries whose coin is 0 leave, or are mirrored."""
    x, y, count = here.x.clone(), here.y.clone(), len(uniforms)
    if plan.privacy.adjacency is Adjacency.REPLACE_ONE:
        y[:count] *= 2.0 * uniforms - 1
        return AttackedRecords(x, y, here.starts)
    x[:count] *= uniforms.unsqueeze(-1)
    y[:count] *= uniforms
    return AttackedRecords(x, y, here.starts, uniforms.double())


def _told(attack: Attack, uniforms: Tensor, source: Source, noise_factor: float) -> Tensor:
    """What one run tells of every canary: the terms of the likelihood ratio that lie on its own coordinate."""
    records = _in_states(attack.worlds[1], attack.plan, uniforms)
    watch = watched(attack, 1, source, 1, noise_factor, records=records)
    own = [terms[0] if terms.dim() == 2 else terms[0].diagonal() for terms, _ in watch.terms()]
    return torch.stack(own).sum(0)
