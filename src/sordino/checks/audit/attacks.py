"""Attacks on real runs of a method: lower bounds on its epsilon.

Two neighbouring data sets, 0 and 1, differ in one unit of one client, the victim: a canary that moves the releases as
far as its clip allows. Both are run many times, with the engine and the noise that ship. The adversary knows
everything except the noise and which data set was used: all other records, the broadcast models, and what the trust
model shows. So it can compute what either data set would release next, given the earlier releases. It scores a run by

    log p_1 / p_0 = sum over releases of <released - (a + b) / 2, b - a> / std^2,

where a and b are the releases of data sets 0 and 1 before noise. No test is more powerful (Neyman and Pearson). Against
an untrusted server the adversary sees each noised answer of the victim, or each message if messages carry the noise.
This is everything that the certificate counts as released, which may be more than what is sent. Runs use the dtype that
ships, float32, or the requested one; scores are computed in float64.

Poisson minibatches: all records except the canary have a gradient of zero. So a release is noise alone unless the
canary is in the minibatch, which happens with chance q. The adversary does not see whether it is:

    log p_1 / p_0 = sum over releases of log (1 - q + q e_b) / (1 - q + q e_a),   e_c = exp((<released, c> - |c|^2 / 2)
    / std^2).

If minibatches have a fixed size, all other records have the gradient that is opposite to the canary's: a canary that is
drawn takes the place of one of them, and moves the sum by twice the clip. Data set 0 has one more of them instead of
the canary (replace-one), or an empty place (add-remove). <released, c> and |c|^2 are then relative to a minibatch of
these records.

If messages are noised, and a lemma bounds them, a message is not zero without the canary. e_c is then relative to that
message. The other clients' records push the common direction, so that it grows at the victim too.

This mechanism is not Gaussian, so the attack refutes noise instead of a mu. It guesses "data set 1" if the score is
above 0. The share of right guesses bounds the noise at which the account of sampling would allow so many right guesses,
and with it the account's epsilon(delta). Thresholds assume nothing about the mechanism, and are looser at small delta.

Methods for networks are attacked on a small network (`audited_network`) with the same records. Of several minibatches
per round, the adversary sees every noised gradient, though only their mean is sent.

For some queries (a lemma's, for example) no available canary reaches the bound. Then the attack is weaker than the
certificate allows. `reach` states how much of the certified mu the canary reaches over all releases together.
`least_claim` states it for the query whose bound is reached least, with the best canary for each query. They differ if
no single record can reach two bounds at once: a mirrored gradient has the same outer product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from sordino import core
from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.observer import VICTIM, Attack, AttackedRecords, watched
from sordino.checks.fixtures import most_rounds
from sordino.checks.mutants import network_form
from sordino.core import Adjacency, Kind, Method, Privacy, Unit
from sordino.engines.preconditions import MATRICES
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.torch_model import TorchModel
from sordino.models.trees import Trees
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import events, gaussian
from sordino.privacy.accounting.events import Release
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.mechanisms.random import Address, Secure, Seeded, Source
from sordino.privacy.mechanisms.random import source as noise_from
from sordino.privacy.participation import FULL, Sampling
from sordino.privacy.plan import Plan

RUNS = 30_000  # per data set
LEMMA_RUNS = 20_000  # the same where a lemma bounds a message: clients hold more records, so that runs take longer
SAMPLED_RUNS = 60_000  # the same with minibatches: bounds by their account scatter more
FAR_REACH, MORE_RUNS = 0.9, 3  # a canary that reaches less than this part of mu gets so many times the runs
ROUNDS = 5  # of the stage whose length is open
LEMMA_ROUNDS = 2  # the same where a lemma bounds a message, and where risks are calibrated
RUNS_PER_BATCH = 10_000
CANARIES = 2_000  # of an audit in one run
MATRIX_CANARIES = 300  # if a release has one entry per pair of canaries
PILOT_RUNS = 8  # that choose the canary
SUFFICIENT_SHARE = 0.99  # of every claim: then no other canary is tried
MAX_TRIES = 3  # a lower bound above the certificate is estimated again with fresh noise
CLIENT_RECORDS = (4, 3, 3)  # the victim is the largest client, because it moves sums most
LEMMA_SIZES = (100, 100, 100)  # if a lemma bounds a message: with fewer records noise fills its ball
NETWORK_LEMMA_SIZES = (16,)  # the same for networks: as many as one pass takes of many runs, and the victim alone
FIRST_LAYER, LAST_LAYER = 100.0, 0.1  # weights: gradients lie in the last layer, which alone has a Fisher matrix
SAMPLED_RECORDS = 8  # records of the victim if minibatches are drawn at a rate
RECORDS_IN_MEMORY = 300_000  # of all runs together
LONG_CANARY, SHORT_CANARY, CANARY_LABEL = 13.0, 0.01, 1e6  # every gradient is far longer than its clip
FAR_CANARY = 1000.0  # features of a class, whose score any noised model makes certain
DRIVEN = 0.25  # of the length of a canary, along the direction that its company drives the model in
DRIVEN_SIZES = (150,)  # the victim alone, with so many records that their gradients stand out from the noise
LEANING = -0.75, math.sqrt(1 - 0.75**2)  # neither mirrored nor turned: moves a gradient and its outer product at once
OPPOSED = ", opposite company"
MOST_REACH = 1.001  # more than rounding adds to a claim that is reached
AUDITED_MODEL = Linear(3, 1, Loss.SQUARES, bias=False)
SURVIVAL_MODEL = Hazards(3, (0.0, 1.0, 2.0, 3.0))  # for methods that ask for a tally: `auto` with intervals = 3
CLASS_MODEL = Linear(3, 2)  # for methods that calibrate intercepts
TREES_MODEL = Trees(3, 1, Loss.SQUARES, trees=2, depth=1)  # for methods that ask for sums by leaf
NETWORK_CHUNK = 2**14  # rows per pass of a small network
EVENT_LABEL = 0.5  # an event in the first interval, whose gradient is opposite to that of a late or absent one


Example = tuple[Tensor, float]  # features and label of a record


class Audit(NamedTuple):
    """Lower bounds on epsilon from many runs, beside the certified epsilon.

    Attributes:
      method, unit, adjacency, trust: what was attacked.
      certified: the certified epsilon.
      delta: at which both epsilons hold.
      lower_thresholds: the bound that assumes nothing about the mechanism.
      lower_gaussian: the bound under Gaussian DP; None with minibatches, because that mechanism is not Gaussian.
      lower_account: the bound by the account of sampling; None without minibatches.
      mu_certified: the certified mu; with minibatches, as if each held all records.
      mu_lower: the largest refuted mu; None with minibatches.
      false_positive_rate, false_negative_rate: errors of the attack at its threshold.
      reach: the canary's mu divided by the certified one.
      least_claim: the same for the query whose claim is reached least, with the best canary for each query.
      canary: the chosen canary.
      runs: runs per data set.
      rounds: rounds of each run.
      confidence: with which each bound holds.
      tries: how often the bound was estimated.
      noise_factor: what the noise was multiplied by.
      batch: the minibatches.
      dtype: of the runs.
    """

    method: str
    unit: str
    adjacency: str
    trust: str
    certified: float
    delta: float
    lower_thresholds: float
    lower_gaussian: float | None
    lower_account: float | None
    mu_certified: float
    mu_lower: float | None
    false_positive_rate: float
    false_negative_rate: float
    reach: float
    least_claim: float
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
        """The largest of the lower bounds."""
        return max(self.lower_thresholds, self.lower_gaussian or 0.0, self.lower_account or 0.0)

    @property
    def broken(self) -> bool:
        """Whether the lower bound exceeds the certified epsilon, or the canary the certified mu."""
        return bool(self.lower > self.certified or self.reach > MOST_REACH)


class OneRun(NamedTuple):
    """Lower bounds on epsilon from one run with many canaries.

    Attributes:
      method, unit, adjacency, trust: what was attacked.
      certified: the certified epsilon.
      delta: at which both epsilons hold.
      lower_dp: the bound that assumes only (epsilon, delta)-DP.
      lower_gaussian: the bound under Gaussian DP.
      mu_lower: the largest refuted mu.
      canaries: how many the victim holds.
      guesses: on how many canaries the attack bets for `lower_dp`.
      right: how many of these guesses are right.
      guesses_gaussian, right_gaussian: the same for `lower_gaussian`.
      rounds, confidence, tries, noise_factor, dtype: as in `Audit`.
    """

    method: str
    unit: str
    adjacency: str
    trust: str
    certified: float
    delta: float
    lower_dp: float
    lower_gaussian: float
    mu_lower: float
    canaries: int
    guesses: int
    right: int
    guesses_gaussian: int
    right_gaussian: int
    rounds: int
    confidence: float
    tries: int
    noise_factor: float
    dtype: str

    @property
    def lower(self) -> float:
        """The larger lower bound."""
        return max(self.lower_dp, self.lower_gaussian)

    @property
    def broken(self) -> bool:
        """Whether the lower bound exceeds the certified epsilon."""
        return bool(self.lower > self.certified)


def audit(
    name: str,
    privacy: Privacy | None = None,
    *,
    runs: int | None = None,
    rounds: int | None = None,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    method: Method | None = None,
    model: TorchModel | None = None,
    batch: str = FULL,
    dtype: torch.dtype = torch.float32,
    tick: Callable[[int], None] = lambda runs: None,
) -> Audit:
    """Attack a method with many runs of each of two neighbouring data sets.

    Each bound holds with `confidence`, so at 0.95 one bound in twenty may exceed the truth. A bound that exceeds the
    certificate is therefore estimated again with fresh noise, and the smallest one counts.

    Args:
      name: the method's name in the registry, or the name that the result shows.
      privacy: the promise to attack.
      runs: runs per data set; by default `default_runs`, and three times as many if the canary reaches little.
      rounds: length of the stage whose length is open.
      confidence: with which each bound holds.
      noise_factor: multiplies the noise without telling the certificate; below 1 the attack should win.
      seed: makes the noise reproducible. Without it, noise is secret and fresh.
      method: the method to attack; by default the registered one.
      model: the network on which it runs; by default the `audited_model` of the method.
      batch: minibatches, as in a run (`poisson:4`, `fixed:4`). The victim holds twice as many records.
      dtype: of the runs.
      tick: called with the number of runs that finished.

    Returns:
      The lower bounds, beside the certified epsilon.

    Raises:
      SordinoError: an argument is out of its range, or this combination cannot be audited.
    """
    plan = plan_for(name, privacy, rounds=rounds, method=method, batch=batch)
    check_arguments("runs", RUNS if runs is None else runs, noise_factor, seed)
    sources = sources_of(seed, plan)
    attack, information, least = _best(plan, model or audited_model(plan.method), sources, dtype)
    reach = math.sqrt(information) / spending.mu(plan)
    if runs is None:
        runs = default_runs(plan) * (MORE_RUNS if reach < FAR_REACH else 1)
    count = runs

    def scored(side: int) -> np.ndarray:
        return scores(attack, side, count, sources, noise_factor, tick)

    found = estimate(plan, scored, information, runs, confidence, _by_account if _samples(plan) else None)
    return Audit(
        *named(name, plan),
        **found,
        reach=reach,
        least_claim=least,
        canary=attack.name,
        runs=runs,
        rounds=plan.rounds,
        confidence=confidence,
        noise_factor=noise_factor,
        batch=str(plan.sampling),
        dtype=_dtype_name(dtype),
    )


def estimate(
    plan: Plan,
    scored: Callable[[int], np.ndarray],
    information: float,
    runs: int,
    confidence: float,
    by_account: Callable[[Plan, statistics.LowerBound], float] | None = None,
) -> dict[str, Any]:
    """The lower bounds from fresh scores of both data sets, as the fields of an `Audit`.

    A bound above the certified epsilon is estimated again, and the smallest one counts.

    Args:
      plan: what is attacked.
      scored: fresh scores of data set 0 or 1, log likelihood ratios.
      information: the squared mu of the canary, which fixes the threshold before the runs.
      runs: per data set.
      confidence: with which each bound holds.
      by_account: the epsilon of a refuted mu, if the mechanism is not Gaussian. Then a part of the scores chooses the
        threshold.

    Returns:
      The bounds, the certified and the refuted mu, the errors, and the number of tries.
    """
    certified, delta, threshold = spending.epsilon(plan), plan.privacy.delta, None
    if by_account is None:
        threshold = statistics.best_threshold(math.sqrt(information), runs, delta=delta, confidence=confidence)
    tries: list[tuple[float, float, statistics.LowerBound]] = []
    while len(tries) < MAX_TRIES and (not tries or max(tries[-1][:2]) > certified):
        zero, one = scored(0), scored(1)
        plain = statistics.by_thresholds(zero, one, delta=delta, confidence=confidence, threshold=threshold)
        sharp = statistics.by_gaussian(zero, one, delta=delta, confidence=confidence, threshold=0.0)
        tries.append((plain.epsilon, by_account(plan, sharp) if by_account else sharp.epsilon, sharp))
    _, model_based, sharp = min(tries, key=lambda bounds: bounds[1])
    return {
        "lower_thresholds": min(bounds[0] for bounds in tries),
        "lower_gaussian": None if by_account else model_based,
        "lower_account": model_based if by_account else None,
        "mu_certified": spending.mu(plan),
        "mu_lower": None if by_account else sharp.mu or 0.0,
        "false_positive_rate": sharp.false_positive_rate,
        "false_negative_rate": sharp.false_negative_rate,
        "tries": len(tries),
    }


def default_runs(plan: Plan) -> int:
    """Runs per data set, of an audit of this plan."""
    if plan.sizes == NETWORK_LEMMA_SIZES:  # the canary reaches little more than FAR_REACH, and runs are short
        return MORE_RUNS * RUNS
    if _samples(plan):
        return RUNS if network_form(plan.method)[0] else SAMPLED_RUNS
    return LEMMA_RUNS if _proved_by_lemma(plan.method) else RUNS


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
    """Attack one run in which the victim holds many canaries.

    Two bounds come from the same run: one assumes only (epsilon, delta)-DP, the other one the Gaussian DP that the
    certificate states. Each bets on the number of canaries that suits it best.

    A fair coin per canary decides its state: present or absent (add-remove), unchanged or mirrored (replace-one). Each
    canary has its own coordinate of the model.

    Args:
      name: the method's name in the registry, or the name that the result shows.
      privacy: the promise to attack; at record level only.
      canaries: how many canaries the victim holds; fewer for methods that release matrices.
      rounds: length of the stage whose length is open.
      confidence: with which the bound holds.
      noise_factor: multiplies the noise without telling the certificate; below 1 the attack should win.
      seed: makes the noise reproducible. Without it, noise is secret and fresh.
      method: the method to attack; by default the registered one.
      dtype: of the run.

    Returns:
      The lower bound, beside the certified epsilon.

    Raises:
      SordinoError: an argument is out of its range, or this combination cannot be audited.
    """
    privacy = Privacy() if privacy is None else privacy
    if privacy.unit is not Unit.RECORD:
        raise SordinoError("unit: an audit in one run hides many single records in one client; use unit = record.")
    method = build(name) if method is None else method
    if any(query.kind in MATRICES for stage in method.stages for query in stage.queries):
        canaries = min(canaries, MATRIX_CANARIES)
    check_arguments("canaries", canaries, noise_factor, seed)
    plan = plan_for(name, privacy, rounds=rounds, method=method, sizes=(canaries, *CLIENT_RECORDS[1:]))
    attack, sources = _many_canaries(plan, canaries, dtype), sources_of(seed, plan)
    certified, delta = spending.epsilon(plan), privacy.delta
    counts = [
        statistics.best_guesses(
            canaries, spending.mu(plan), delta=delta, confidence=confidence, gaussian_dp=assumes_gaussian
        )
        for assumes_gaussian in (False, True)
    ]
    results: list[tuple[float, float, int, int]] = []
    while len(results) < MAX_TRIES and (
        not results or results[-1][0] > certified or gaussian.epsilon(results[-1][1], delta) > certified
    ):
        coins = torch.from_numpy(next(sources).uniform(Address(VICTIM, 0, 0), (canaries,)) < 0.5)
        canary_scores = _canary_scores(attack, coins, next(sources), noise_factor)
        surest = canary_scores.abs().argsort(descending=True)
        correct = ((canary_scores > 0) == coins)[surest]
        right, right_gaussian = (int(correct[:count].sum()) for count in counts)
        plain = statistics.by_one_run(canaries, counts[0], right, delta=delta, confidence=confidence)
        mu = statistics.one_run_mu(canaries, counts[1], right_gaussian, confidence=confidence)
        results.append((plain, mu, right, right_gaussian))
    return OneRun(
        *named(name, plan),
        lower_dp=min(plain for plain, *_ in results),
        lower_gaussian=gaussian.epsilon(min(mu for _, mu, *_ in results), delta),
        mu_lower=min(mu for _, mu, *_ in results),
        canaries=canaries,
        guesses=counts[0],
        right=min(right for *_, right, _ in results),
        guesses_gaussian=counts[1],
        right_gaussian=min(right for *_, right in results),
        rounds=plan.rounds,
        confidence=confidence,
        tries=len(results),
        noise_factor=noise_factor,
        dtype=_dtype_name(dtype),
    )


def plan_for(
    name: str,
    privacy: Privacy | None = None,
    *,
    rounds: int | None = None,
    method: Method | None = None,
    sizes: tuple[int, ...] | None = None,
    batch: str = FULL,
) -> Plan:
    """The plan of a short run to attack.

    Args:
      name: the method's name in the registry.
      privacy: the promise to attack.
      rounds: length of the stage whose length is open.
      method: the method to attack; by default the registered one.
      sizes: records per client.
      batch: minibatches.

    Returns:
      The plan.

    Raises:
      SordinoError: the method is not proved for this promise, or cannot be audited.
    """
    privacy = Privacy() if privacy is None else privacy
    method = build(name, privacy.unit) if method is None else method
    if privacy.epsilon == math.inf:
        raise SordinoError("epsilon: inf promises nothing; an audit needs a finite epsilon.")
    if rounds is not None and rounds < 1:
        raise SordinoError(f"rounds: {rounds} must be at least 1.")
    fixed = sum(stage.rounds or 0 for stage in method.stages)
    usual = REGISTRY[name].rounds - fixed if name in REGISTRY else ROUNDS
    sampling = Sampling.parse(batch)
    short = _calibrates(method) or (_proved_by_lemma(method) and sampling.kind == FULL)
    most = LEMMA_ROUNDS if short else ROUNDS
    length = int(min(rounds or max(1, min(most, usual)), most_rounds(method)))
    if why := unattacked(method, sampling):
        raise SordinoError(f"batch: {sampling} of {method.name} is not audited: {why}.")
    return Plan(
        method,
        fixed + length * any(stage.rounds is None for stage in method.stages),
        _sizes(method, sampling) if sizes is None else sizes,
        privacy,
        sampling=sampling,
    )


def audited_model(method: Method) -> Linear | Hazards | Trees | TorchModel:
    """The model that a method is attacked on."""
    kinds = {query.kind for stage in method.stages for query in stage.queries}
    if network_form(method)[0]:
        return audited_network()
    if _calibrates(method):
        return CLASS_MODEL
    if Kind.LEAVES in kinds:
        return TREES_MODEL
    return SURVIVAL_MODEL if Kind.TALLY in kinds else AUDITED_MODEL


@cache
def audited_network() -> TorchModel:
    """Two layers without biases, for labels that are numbers. A record of zeros has no gradient.

    The gradient of a record is its residual times a vector that both neighbours know. So a mirrored label mirrors it,
    and a large label makes it far longer than its clip, whatever the noise makes of the model.
    """
    first, last = audited_layers()
    return on_numbers(torch.nn.Sequential(first, torch.nn.LeakyReLU(), last))


def audited_layers() -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """The first and the last layer of `audited_network`."""
    first, last = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(FIRST_LAYER * torch.eye(2, 3))
        last.weight.fill_(LAST_LAYER)
    return first, last


def on_numbers(module: torch.nn.Module) -> TorchModel:
    """A network for records of three features and a number, under half the squared error."""

    def squares(z: Tensor, y: Tensor) -> Tensor:
        return (z[:, 0] - y).square() / 2

    return TorchModel(module, loss=squares, labels="numbers", chunk=NETWORK_CHUNK, shape=(3,))


def unattacked(method: Method, sampling: Sampling) -> str:
    """Why minibatches of this method cannot be audited; empty if they can, or if there are none."""
    if sampling.kind == FULL:
        return ""
    if method.unit is Unit.CLIENT:
        return "at client level nothing is claimed for minibatches; use batch = full"
    noised = [query for stage in method.stages for query in stage.queries if query.noise is not None]
    lemmas = [query.bound for query in noised if query.bound is not None]
    if any(not lemma.sampled for lemma in lemmas) or any(mechanism_of(query.noise).spans_rounds for query in noised):
        return "its bound or its noise is proved only for all records of a client; use batch = full"
    if not any(query.sampled for query in noised):
        return "the method noises no gradients, so nothing is claimed for minibatches; use batch = full"
    if lemmas and sampling.kind != "poisson":
        return "its bound is a lemma about Poisson minibatches; use batch = poisson:20"
    if any(query.kind is Kind.COUNT or query.joint > 1 for query in noised):
        return "one minibatch answers several queries, which the attack does not support; use batch = full"
    return ""


def check_arguments(name: str, count: int, noise_factor: float, seed: int | None) -> None:
    """Check the number of runs or canaries, the factor on the noise, and the seed of an audit."""
    if count < statistics.MIN_SCORES:
        raise SordinoError(f"{name}: {count} are too few; use at least {statistics.MIN_SCORES}, better 1,000.")
    if not 0 < noise_factor < math.inf:
        raise SordinoError(
            f"noise_factor: {noise_factor} must be a number above 0; 1 keeps the noise of the certificate."
        )
    noise_from(seed)


def scores(
    attack: Attack,
    side: int,
    runs: int,
    sources: Iterator[Source],
    noise_factor: float = 1.0,
    tick: Callable[[int], None] = lambda runs: None,
) -> np.ndarray:
    """The log likelihood ratios of many runs of one data set. After each batch of runs, `tick` gets their number."""
    most = max(1, min(RUNS_PER_BATCH, RECORDS_IN_MEMORY // sum(attack.plan.sizes)))
    counts = [min(most, runs - start) for start in range(0, runs, most)]
    parts = []
    for count in counts:
        parts.append(watched(attack, side, next(sources), count, noise_factor).score())
        tick(count)
    return torch.cat(parts).numpy()


def attacks(plan: Plan, model: core.Model, dtype: torch.dtype = torch.float32) -> Iterator[Attack]:
    """The canaries to choose from: long or short records, mirrored, turned or absent, beside other records of several
    kinds, which are those of the other clients too, or different ones.

    "Company that pushes" means short records with large labels at every client. Each gradient is as long as its clip
    and has almost no curvature. So the right side of a Newton system grows to its limit, and all clients agree on it. A
    long canary in the opposite direction then moves both the right side and the matrix. "Others push" means that the
    other clients alone hold such records. Then the victim's matrix stays zero without the canary, and its right side
    grows from round to round.

    "Company that drives" means many records that make the model of classes grow along one direction. Two canaries point
    nearly the same way, but to either side of that direction, and each has the class that is then predicted for the
    other one. So their gradients are opposite, and their labels and predictions as well. As predicted, they have no
    gradient, and move what a slope is calibrated by.
    """
    one, two, three = torch.eye(3, dtype=torch.float64)
    label = EVENT_LABEL if isinstance(model, Hazards) else CANARY_LABEL
    records = {
        "long": (LONG_CANARY * one, label),
        "long mirrored": (LONG_CANARY * one, -CANARY_LABEL),
        "short": (SHORT_CANARY * one, label),
        "short mirrored": (SHORT_CANARY * one, -CANARY_LABEL),
        "turned": (LONG_CANARY * two, label),
    }
    if any(query.kind in MATRICES and query.noise is not None for stage in plan.stages for query in stage.queries):
        records["leaning"] = (LONG_CANARY * (LEANING[0] * one + LEANING[1] * two), label)
    if any(query.kind is Kind.COUNT for stage in plan.stages for query in stage.queries):
        records["short gradient"] = (0 * one, 0.0)  # counts as shorter than an adaptive clip
    if model is CLASS_MODEL:
        records = {
            "long": (LONG_CANARY * one, 1.0),
            "long of the other class": (LONG_CANARY * one, 0.0),
            "driven up": (FAR_CANARY * (one + DRIVEN * two), 0.0),
            "driven down": (FAR_CANARY * (one - DRIVEN * two), 1.0),
            "driven up, as predicted": (FAR_CANARY * (one + DRIVEN * two), 1.0),
            "driven down, as predicted": (FAR_CANARY * (one - DRIVEN * two), 0.0),
        }
    joins, whole = plan.privacy.adjacency is Adjacency.ADD_REMOVE, plan.privacy.unit is Unit.CLIENT
    pairs = [("absent", name) for name in records] if joins else list(itertools.combinations(records, 2))
    lemma, sampled = _proved_by_lemma(plan.method), _samples(plan)
    zero, push = (0 * one, 0.0), (SHORT_CANARY * one, -CANARY_LABEL)
    companies: dict[str, tuple[Example | None, Example | None]]
    if sampled:
        companies = {", others push": (zero, push)} if lemma else {", company of zeros": (zero, zero)}
    elif model is CLASS_MODEL:
        driving = LONG_CANARY * two, 1.0
        companies = {", company that drives": (driving, driving)}
    elif whole:
        companies = {"": (None, None)}
    else:
        companies = {
            "": ((SHORT_CANARY * three, 0.0), None),
            ", hostile company": ((LONG_CANARY * one, -CANARY_LABEL / 10), None),
            ", company that pushes": (push, push),
        }
        if lemma:
            companies = {", others push": (zero, push)} | dict(reversed(companies.items()))
    choices = list(itertools.product(companies.items(), pairs))
    if plan.sampling.kind == "fixed" and (model is AUDITED_MODEL or isinstance(model, TorchModel)):
        mirrored = records["long mirrored"]
        choices.insert(0, ((OPPOSED, (mirrored, mirrored)), ("absent" if joins else "long mirrored", "long")))
    for (kind, (others, elsewhere)), (before, after) in choices:
        pair = [records[after if joins else before], records[after]]
        there, here = (_records(plan, record, others or record, elsewhere, dtype) for record in pair)
        if model is CLASS_MODEL:
            there, here = (replace(each, y=(each.y > 0).long()) for each in (there, here))
        without = _without_first(there) if sampled and lemma else None
        if joins and not whole:
            there = _without_first(there)
        name = f"{before} / {after}{kind}"
        yield Attack(name, plan, model, (there, here), joins and whole, opposed=kind == OPPOSED, without=without)


# --------------------------------------------------------------------------------------------------------- internals


def one_release(
    name: str,
    plan: Plan,
    scored: Callable[[int], np.ndarray],
    information: float,
    *,
    canary: str,
    runs: int,
    confidence: float,
    noise_factor: float,
    dtype: str,
) -> Audit:
    """The lower bounds from many draws of one release of all records.

    Args:
      name: as the result shows it.
      plan: what is attacked.
      scored: fresh scores of data set 0 or 1, log likelihood ratios.
      information: the squared mu of the canary.
      canary: in words.
      runs: releases per data set.
      confidence: with which each bound holds.
      noise_factor: what the noise was multiplied by.
      dtype: of the releases.

    Returns:
      The bounds, beside the certified epsilon.
    """
    reach = math.sqrt(information) / spending.mu(plan)
    return Audit(
        *named(name, plan),
        **estimate(plan, scored, information, runs, confidence),
        reach=reach,
        least_claim=reach,
        canary=canary,
        runs=runs,
        rounds=1,
        confidence=confidence,
        noise_factor=noise_factor,
        batch="full",
        dtype=dtype,
    )


def named(name: str, plan: Plan) -> tuple[str, str, str, str, float, float]:
    """What was attacked: the first fields of a result."""
    privacy = plan.privacy
    return name, str(privacy.unit), str(privacy.adjacency), str(privacy.trust), spending.epsilon(plan), privacy.delta


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _samples(plan: Plan) -> bool:
    return plan.sampling.kind != FULL


def _proved_by_lemma(method: Method) -> bool:
    return any(query.bound is not None for stage in method.stages for query in stage.queries)


def _calibrates(method: Method) -> bool:
    return any(query.kind is Kind.CALIBRATION for stage in method.stages for query in stage.queries)


def _sizes(method: Method, sampling: Sampling) -> tuple[int, ...]:
    """Records per client. With minibatches of a fixed size, the canary is in every second one on average."""
    if _calibrates(method):
        return DRIVEN_SIZES
    if sampling.kind == FULL and _proved_by_lemma(method):
        return NETWORK_LEMMA_SIZES if network_form(method)[0] else LEMMA_SIZES
    if sampling.kind == FULL:
        return CLIENT_RECORDS
    return (2 * math.ceil(sampling.amount) if sampling.amount >= 1 else SAMPLED_RECORDS,) * 2


def sources_of(seed: int | None, plan: Plan) -> Iterator[Source]:
    """One source per use: with fresh keys, or seeded with streams that no two audits share."""
    words = "/".join(map(str, named(plan.method.name, plan))).encode()
    for number in itertools.count():
        if seed is None:
            yield Secure()
        else:
            state = np.random.SeedSequence([seed, number, *words]).generate_state(1, np.uint64)
            yield Seeded(int(state[0]))


def _best(plan: Plan, model: core.Model, sources: Iterator[Source], dtype: torch.dtype) -> tuple[Attack, float, float]:
    """The strongest canary, the square of its mu, and the share of the claim that is reached least.

    A short pilot of each canary measures them.
    """
    best: tuple[Attack, float] | None = None
    claimed = _claimed(plan)
    reached = dict.fromkeys(claimed, 0.0)
    for attack in attacks(plan, model, dtype):
        pilots = [watched(attack, side, next(sources), PILOT_RUNS).informations() for side in (0, 1)]
        squares = {key: sum(float(pilot[key].mean()) for pilot in pilots) / 2 for key in claimed}
        if not all(map(math.isfinite, squares.values())):
            continue
        reached = {key: max(reached[key], math.sqrt(squares[key] / claimed[key])) for key in claimed}
        information = sum(squares.values())
        if best is None or information > best[1]:
            best = attack, information
        if best[1] > 0.999 * spending.mu(plan) ** 2 and min(reached.values()) > SUFFICIENT_SHARE:
            break
    if best is None:
        raise SordinoError(f"method: no canary makes {plan.method.name} release finite numbers; it cannot be audited.")
    return *best, min(reached.values())


def _by_account(plan: Plan, refuted: statistics.LowerBound) -> float:
    """The account's epsilon at the largest noise that would allow so many right guesses.

    If both data sets are equally likely, mu-Gaussian DP allows a share of Φ(mu / 2) of the guesses to be right. So the
    refuted mu states the share of right guesses that is proved, for any mechanism.
    """
    right = float(ndtr((refuted.mu or 0.0) / 2))
    releases, adjacency = _victim_releases(plan), plan.privacy.adjacency

    def with_noise(factor: float) -> list[Release]:
        return [release._replace(std=factor * release.std) for release in releases]

    low, high = 2.0**-6, 2.0**6  # factors on the noise between which the answer lies
    if events.guess(with_noise(high), adjacency) >= right:
        return 0.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if events.guess(with_noise(middle), adjacency) < right else (middle, high)
    return events.epsilon(with_noise(high), plan.privacy.delta, adjacency)


def _victim_releases(plan: Plan) -> tuple[Release, ...]:
    """The releases that the certificate counts for the victim."""
    (group,) = [group for group in spending.groups(plan) if VICTIM in group.clients]
    return group.releases


def _claimed(plan: Plan) -> dict[tuple[int, int], float]:
    """The mu² that the certificate counts for the victim, by noised query: (stage, number) -> mu²."""
    releases = {release.query: release for release in _victim_releases(plan)}
    squares = {}
    for level in calibration.query_noises(plan):
        if (release := releases.get(level.name)) is not None:
            squares[level.stage, level.number] = release.times * (release.sensitivity / release.std) ** 2
    return squares


def _records(
    plan: Plan, first: Example, others: Example, elsewhere: Example | None, dtype: torch.dtype
) -> AttackedRecords:
    """The records of an attack. The victim holds `first` and copies of `others`.

    The other clients hold copies of `elsewhere`; if it is None, they hold different small records.
    """
    rows = [first, *[others] * (plan.sizes[VICTIM] - 1)]
    rest = torch.linspace(-1, 1, 3 * sum(plan.sizes[1:]), dtype=torch.float64).view(-1, 3)
    labels = rest.sum(-1)
    if elsewhere is not None:
        rest, labels = elsewhere[0].expand_as(rest), torch.full_like(labels, elsewhere[1])
    x = torch.cat([torch.stack([x for x, _ in rows]), rest])
    y = torch.cat([x.new_tensor([y for _, y in rows]), labels])
    starts = np.cumsum([0, *plan.sizes])
    if plan.privacy.unit is Unit.PERSON:  # every person, the canary among them, has as many records as are used
        k = plan.privacy.person_records
        x, y = x.repeat_interleave(k, 0), y.repeat_interleave(k, 0)
        return AttackedRecords(x.to(dtype), y.to(dtype), k * starts, torch.ones(len(y), dtype=torch.bool), k)
    return AttackedRecords(x.to(dtype), y.to(dtype), starts)


def _without_first(records: AttackedRecords) -> AttackedRecords:
    """The records without the victim's first record or person; nothing of it remains behind the mask."""
    if records.filled is not None:
        x, y, filled = records.x.clone(), records.y.clone(), records.filled.clone()
        x[: records.per_person], y[: records.per_person], filled[: records.per_person] = 0, 0, False
        return replace(records, x=x, y=y, filled=filled)
    x, y, present = records.x.clone(), records.y.clone(), torch.ones(records.sizes[VICTIM], dtype=torch.float64)
    x[0], y[0], present[0] = 0, 0, 0
    return replace(records, x=x, y=y, present=present)


def _many_canaries(plan: Plan, canaries: int, dtype: torch.dtype) -> Attack:
    """An attack whose data sets hold all canaries in one state, and all of them in the other."""
    x = torch.zeros(sum(plan.sizes), canaries, dtype=dtype)
    x[:canaries] = LONG_CANARY * torch.eye(canaries, dtype=dtype)
    y = torch.zeros(len(x), dtype=dtype)
    y[:canaries] = CANARY_LABEL
    here = AttackedRecords(x, y, np.cumsum([0, *plan.sizes]))
    there = _in_states(here, plan, torch.zeros(canaries, dtype=torch.bool))
    return Attack("many canaries", plan, Linear(canaries, 1, Loss.SQUARES, bias=False), (there, here))


def _in_states(records: AttackedRecords, plan: Plan, coins: Tensor) -> AttackedRecords:
    """The records after each canary whose coin is 0 is removed, or mirrored."""
    x, y, count = records.x.clone(), records.y.clone(), len(coins)
    if plan.privacy.adjacency is Adjacency.REPLACE_ONE:
        y[:count] *= 2.0 * coins - 1
        return AttackedRecords(x, y, records.starts)
    x[:count] *= coins.unsqueeze(-1)
    y[:count] *= coins
    return AttackedRecords(x, y, records.starts, present=coins.double())


def _canary_scores(attack: Attack, coins: Tensor, source: Source, noise_factor: float) -> Tensor:
    """The score of every canary in one run: the terms of the log likelihood ratio on its own coordinate."""
    records = _in_states(attack.neighbours[1], attack.plan, coins)
    watch = watched(attack, 1, source, 1, noise_factor, records=records)
    by_canary = [terms[0] if terms.dim() == 2 else terms[0].diagonal() for terms, _ in watch.terms()]
    return torch.stack(by_canary).sum(0)
