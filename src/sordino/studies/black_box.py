"""Black-box audits of a finished run: what an attacker learns from its models, beside what the certificate allows.

The audit repeats the run many times, on two neighbouring data sets: the records of the run, and the same records after
one change of a canary. The canary is a real record, chosen by a public rule: of the client whose records count most,
the one with the longest features; its label becomes a wrong one. Under replace-one the canary is relabelled in data set
1; under add-remove the mislabelled canary is absent from data set 0. A person or a client is relabelled as a whole.

Two attackers guess which data set a run had. Both know the method, the settings and all other records.

- *final model*: sees the model that the run hands out. It projects the model on the difference that the canary makes to
  a run without noise, with or without whitening, or takes the canary's own loss; a part of the runs chooses.
- *every model*: sees the models of all rounds, and the server's state, which follows from them for most methods. From
  the models of a round it computes the next ones of both data sets without noise, and scores by
  sum over rounds of <model - middle of both, difference of both> / variance, or as the first attacker does.

The results are statements about these two attacks on this canary. Other attacks may be stronger: only the certificate
bounds all of them. The certificate covers more than models (against an untrusted server, every client's messages), and
other records than this canary, so a lower bound far below it does not show that less noise would do.

The audit computes with the records, and nothing hides them in its output: it is as confidential as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.attacks import MAX_TRIES, check_arguments
from sordino.core import Adjacency, Kind, Round, Shard, Tree, Unit, answers
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.models.registry import BuiltModel
from sordino.privacy import spending
from sordino.privacy.accounting import events
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded, SharedDraws, Source
from sordino.privacy.participation import FULL, Sampling
from sordino.privacy.plan import Plan, with_weights_of
from sordino.training.run import PreparedRun

RUNS = 500  # per data set, without the pilot
LEAST_RUNS = 50  # per data set, of a run that takes long: fewer give hardly a bound
SECONDS = 300.0  # that an audit should take if nobody asked for a number of runs
PILOT_RUNS = 64  # per data set at most: they estimate variances, and no bound uses them
LEAST_PILOT_RUNS = 16
RUNS_PER_BATCH = 64
MEASURED_ROUNDS = 4  # that are repeated to estimate the time; the first one of some methods is unlike the others
MOST_WHITENED = 2_000  # parameters of a model whose covariance is estimated
UNCLIPPED = 1e9  # a clip that no gradient of a real record reaches
ROC_POINTS = 50
FINAL, EVERY = "final model", "every model"


class Attacker(NamedTuple):
    """What one attacker achieved.

    Attributes:
      sees: what the attacker sees.
      score: how it scores a run.
      lower_thresholds: lower bound on epsilon that assumes nothing.
      lower_gaussian: the epsilon of the largest refuted mu; None if the certificate does not state Gaussian DP.
      right: share of right guesses at the best threshold, on runs that did not choose it.
      auc: area under the ROC curve.
      roc: points (false positive rate, true positive rate).
    """

    sees: str
    score: str
    lower_thresholds: float
    lower_gaussian: float | None
    right: float
    auc: float
    roc: list[tuple[float, float]]


class BlackBox(NamedTuple):
    """What two attackers learn from the models of a run, beside what its certificate allows.

    Attributes:
      method, unit, adjacency, trust, batch: of the run.
      certified: the certified epsilon.
      delta: at which all epsilons hold.
      mu: the certified mu; None if the certificate does not state Gaussian DP.
      guess: the largest share of right guesses that the certificate allows.
      canary: in words.
      attackers: what each of them achieved.
      runs: runs per data set that the bounds come from.
      rounds: rounds of each run.
      confidence: with which each bound holds.
      tries: how often the bounds were estimated.
      noise_factor: what the noise was multiplied by.
    """

    method: str
    unit: str
    adjacency: str
    trust: str
    batch: str
    certified: float
    delta: float
    mu: float | None
    guess: float
    canary: str
    attackers: tuple[Attacker, ...]
    runs: int
    rounds: int
    confidence: float
    tries: int
    noise_factor: float

    @property
    def lower(self) -> float:
        """The largest lower bound."""
        return max(max(each.lower_thresholds, each.lower_gaussian or 0.0) for each in self.attackers)

    @property
    def broken(self) -> bool:
        """Whether a lower bound exceeds the certified epsilon."""
        return bool(self.lower > self.certified)

    def document(self) -> dict[str, Any]:
        """The result, ready for JSON."""
        attackers = [each._asdict() for each in self.attackers]
        return {**self._asdict(), "attackers": attackers, "broken": self.broken}


def pilot_runs(runs: int) -> int:
    """Runs per data set that the attackers learn the noise from: half as many as are scored, within bounds."""
    return min(PILOT_RUNS, max(LEAST_PILOT_RUNS, runs // 2))


def steps(runs: int) -> int:
    """How many runs one estimate takes: those of both data sets, and the pilot's."""
    return 2 * (runs + pilot_runs(runs))


class Pace(NamedTuple):
    """How long an audit takes on this machine.

    Attributes:
      seconds_per_run: of one repetition, from a batch of them that was begun.
    """

    seconds_per_run: float

    def seconds(self, runs: int) -> float:
        """Time of an audit with so many runs per data set."""
        return steps(runs) * self.seconds_per_run

    def runs(self, seconds: float = SECONDS) -> int:
        """Runs per data set that fit into the time: a multiple of 10 from LEAST_RUNS to RUNS."""
        fitting = [runs for runs in range(LEAST_RUNS, RUNS + 1, 10) if self.seconds(runs) <= seconds]
        return max(fitting, default=LEAST_RUNS)


def measure(run: PreparedRun) -> Pace:
    """Estimate the time of an audit: begin a batch of repetitions, and stop after a few rounds.

    Args:
      run: as for `attack`.

    Returns:
      The pace.

    Raises:
      SordinoError: the run cannot be repeated side by side, or promises nothing.
    """
    _check(run)
    rounds = run.plan.rounds
    begun = min(rounds, MEASURED_ROUNDS)
    ends = [time.perf_counter()]
    neighbours = (run.records, run.records)
    for _ in _rounds(run, neighbours, 0, RUNS_PER_BATCH, Secure(), 1.0):
        ends.append(time.perf_counter())
        if len(ends) > begun:
            break
    later = min(np.diff(ends)[1:], default=0.0)  # the least: the first ones also load and compile
    return Pace((ends[-1] - ends[0] + (rounds - begun) * later) / RUNS_PER_BATCH)


def attack(
    run: PreparedRun,
    *,
    runs: int = RUNS,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    tick: Callable[[int], None] = lambda runs: None,
) -> BlackBox:
    """Attack a finished run: repeat it many times with and without a change of one canary.

    Nothing of the run's folder is changed.

    Args:
      run: as `training.run.reopen` and `prepare` read it from its folder; its data must be where the spec says.
      runs: runs per data set.
      confidence: with which each bound holds.
      noise_factor: multiplies the noise without telling the certificate; below 1 the attack is stronger.
      seed: makes the noise reproducible. Without it, noise is secret and fresh.
      tick: called with the number of runs that finished.

    Returns:
      The lower bounds of both attackers, beside the certified epsilon.

    Raises:
      SordinoError: the run cannot be repeated side by side, or promises nothing.
    """
    check_arguments("runs", runs, noise_factor, seed)
    _check(run)
    plan, sources = run.plan, _sources(seed)
    canary = choose_canary(run)
    certified, delta = spending.epsilon(plan), plan.privacy.delta
    gaussian_dp = plan.sampling.kind == FULL and not plan.amplified
    tries: list[tuple[Attacker, ...]] = []
    while len(tries) < MAX_TRIES and (not tries or _largest(tries[-1]) > certified):
        tries.append(tuple(_attackers(run, canary, runs, confidence, noise_factor, sources, gaussian_dp, tick)))
    return BlackBox(
        method=run.resolved.method_name,
        unit=str(plan.privacy.unit),
        adjacency=str(plan.privacy.adjacency),
        trust=str(plan.privacy.trust),
        batch=str(plan.sampling),
        certified=certified,
        delta=delta,
        mu=spending.mu(plan) if gaussian_dp else None,
        guess=events.guess(spending.worst(plan).releases, plan.privacy.adjacency),
        canary=canary.words,
        attackers=min(tries, key=_largest),
        runs=runs,
        rounds=plan.rounds,
        confidence=confidence,
        tries=len(tries),
        noise_factor=noise_factor,
    )


# ----------------------------------------------------------------------------------------------------------- the canary


@dataclass(frozen=True)
class Canary:
    """A real record, person or client, and the two neighbouring data sets that differ in it.

    Attributes:
      words: a description without values of the records.
      rows: its rows in the records.
      neighbours: data sets 0 and 1.
      finals: the final models of both without noise.
    """

    words: str
    rows: np.ndarray
    neighbours: tuple[Records, Records]
    finals: tuple[Tensor, Tensor]


def choose_canary(run: PreparedRun) -> Canary:
    """The unit with the longest features, of the client whose units count most, with the least likely label."""
    records, plan = run.records, run.plan
    client = int(np.argmax(plan.weights / np.asarray(plan.sizes)))
    start, stop = int(records.starts[client]), int(records.starts[client + 1])
    rows = np.arange(start, stop)
    if plan.privacy.unit is not Unit.CLIENT:
        longest = start + int(records.length[start:stop].argmax())
        first = longest - (longest - start) % records.per_person
        rows = np.arange(first, first + records.per_person)
    if records.filled is not None:
        rows = rows[records.filled[rows].numpy()]
    plain = _noiseless_final(run, records)
    relabelled = replace(records, y=_wrong_labels(run.model, plain, records, rows))
    zero, final = records, plain
    if plan.privacy.adjacency is Adjacency.ADD_REMOVE:
        zero = _without(relabelled, rows)
        final = _noiseless_final(run, zero)
    words = f"{plan.privacy.unit} {'absent / ' if zero is not records else 'as it is / '}with a wrong label"
    finals = final, _noiseless_final(run, relabelled)
    return Canary(words, rows, (zero, relabelled), finals)


def _wrong_labels(model: BuiltModel, theta: Tensor, records: Records, rows: np.ndarray) -> Tensor:
    """All labels, those of the rows replaced: by the least likely class, or by the number that is furthest away."""
    y = records.y.clone()
    if y.is_floating_point():
        for row in rows:
            y[row] = records.y[(records.y - records.y[row]).abs().argmax()]
        return y
    if model.outputs == 1:
        y[rows] = 1 - y[rows]
        return y
    logits = model.logits(theta.to(records.x), records.x[rows]).clone()
    logits[torch.arange(len(rows)), records.y[rows]] = math.inf
    y[rows] = logits.argmin(-1)
    return y


def _without(records: Records, rows: np.ndarray) -> Records:
    """The records with these rows empty; the declared sizes stay the same."""
    x, y = records.x.clone(), records.y.clone()
    x[rows], y[rows] = 0, 0
    if records.filled is not None:
        filled = records.filled.clone()
        filled[rows] = False
        return replace(records, x=x, y=y, filled=filled)
    weight = torch.ones(len(y), dtype=x.dtype) if records.weight is None else records.weight.clone()
    weight[rows] = 0
    return replace(records, x=x, y=y, weight=weight)


def _noiseless_final(run: PreparedRun, records: Records) -> Tensor:
    """The model that a run without noise hands out."""
    for this_round in simulate.run(_whole(run.plan), run.model, records, Noiseless(), every_model=False):
        final = this_round.model
    return final


# -------------------------------------------------------------------------------------------------------- the attackers


class _Batch(NamedTuple):
    """What the attackers see of a batch of runs of one data set.

    Attributes:
      finals: the final models.
      squares: by round, the mean square of every parameter's residual.
      score: of every run over all rounds; zeros where no variances were given.
    """

    finals: Tensor
    squares: list[Tensor]
    score: Tensor


def _attackers(
    run: PreparedRun,
    canary: Canary,
    runs: int,
    confidence: float,
    noise_factor: float,
    sources: Iterator[Source],
    gaussian_dp: bool,
    tick: Callable[[int], None],
) -> Iterator[Attacker]:
    """Both attackers, from fresh runs."""
    pilots = []
    for side in (0, 1):
        pilots.append(_observed(run, canary, side, pilot_runs(runs), next(sources), noise_factor, None))
        tick(pilot_runs(runs))
    variances = [(a + b) / 2 for a, b in zip(pilots[0].squares, pilots[1].squares, strict=True)]
    finals: list[list[Tensor]] = [[], []]
    scores: list[list[Tensor]] = [[], []]
    for first in range(0, runs, RUNS_PER_BATCH):
        count = min(RUNS_PER_BATCH, runs - first)
        for side in (0, 1):
            seen = _observed(run, canary, side, count, next(sources), noise_factor, variances)
            finals[side].append(seen.finals)
            scores[side].append(seen.score)
            tick(count)
    models = [torch.cat(parts) for parts in finals]
    candidates = {
        name: [(part @ direction).numpy() for part in models]
        for name, direction in _directions(run, canary, [pilot.finals for pilot in pilots]).items()
    }
    finals_only = dict(candidates)
    candidates["steps of all rounds"] = [torch.cat(parts).numpy() for parts in scores]
    for sees, seen_by in ((FINAL, finals_only), (EVERY, candidates)):
        scored_by = max(seen_by, key=lambda name: _auc(*(scored[: runs // 4] for scored in candidates[name])))
        zero, one = seen_by[scored_by]
        plain = statistics.by_thresholds(zero, one, delta=run.plan.privacy.delta, confidence=confidence)
        sharp = statistics.by_gaussian(zero, one, delta=run.plan.privacy.delta, confidence=confidence)
        yield Attacker(
            sees,
            scored_by,
            plain.epsilon,
            sharp.epsilon if gaussian_dp else None,
            1 - (sharp.false_positive_rate + sharp.false_negative_rate) / 2,
            _auc(zero, one),
            _roc(zero, one),
        )


def _observed(
    run: PreparedRun,
    canary: Canary,
    side: int,
    count: int,
    source: Source,
    noise_factor: float,
    variances: list[Tensor] | None,
) -> _Batch:
    """Train runs of one data set side by side, and score every step against what both data sets would lead to."""
    score, squares = torch.zeros(count, dtype=torch.float64), []
    for this_round, either in _rounds(run, canary.neighbours, side, count, source, noise_factor):
        residual = this_round.checkpoint.theta.double() - (either[0] + either[1]) / 2
        squares.append(residual.square().mean(0))
        if variances is not None:
            noise = variances[this_round.t]
            weighed = (either[1] - either[0]) / noise.clamp_min(1e-30)
            score += (residual * weighed.masked_fill(noise == 0, 0)).sum(-1)
        final = this_round.model
    return _Batch(final.double(), squares, score)


def _rounds(
    run: PreparedRun,
    neighbours: tuple[Records, Records],
    side: int,
    count: int,
    source: Source,
    noise_factor: float,
) -> Iterator[tuple[Round, list[Tensor]]]:
    """The rounds of runs side by side, each with the models that both data sets lead to without noise."""
    sources = SharedDraws(source.fresh(), count, noise_factor).rows()
    theta = run.model.init().to(run.records.x).expand(count, -1).clone()
    either = [_next(run, records, 0, theta, ()) for records in neighbours]
    for this_round in simulate.run(run.plan, run.model, neighbours[side], sources, theta=theta, every_model=False):
        yield this_round, either
        theta = this_round.checkpoint.theta
        if this_round.t + 1 < run.plan.rounds:
            t, stored = this_round.t + 1, this_round.checkpoint
            either = [_next(run, records, t, theta, stored) for records in neighbours]


def _next(run: PreparedRun, records: Records, t: int, theta: Tensor, checkpoint: Tree) -> Tensor:
    """The models after round t if it adds no noise."""
    quiet = [Noiseless()] * len(theta)
    plan = _whole(run.plan)
    rounds = simulate.run(
        plan, run.model, records, quiet, theta=theta, start=t, checkpoint=checkpoint, every_model=False
    )
    return next(rounds).checkpoint.theta.double()


def _whole(plan: Plan) -> Plan:
    """The plan with all records in place of minibatches: its step is the expected one."""
    if plan.sampling.kind == FULL:
        return plan
    return with_weights_of(replace(plan, sampling=Sampling(), uncertified=True), plan)


def _directions(run: PreparedRun, canary: Canary, pilots: list[Tensor]) -> dict[str, Tensor]:
    """Directions to project a final model on. None uses the runs that are scored."""
    zero, one = (final.double() for final in canary.finals)
    spread = torch.cat([pilot - pilot.mean(0) for pilot in pilots])
    variance = spread.square().mean(0)
    floor = 1e-12 * variance.max().clamp_min(1e-300)
    found = {
        "change by the canary": one - zero,
        "change by the canary, scaled": (one - zero) / variance.clamp_min(floor),
    }
    if answers(run.model, Kind.GRADIENT):
        found["canary's loss"] = -_gradient_gap(run, canary).double()
    if len(zero) <= MOST_WHITENED:
        share = len(zero) / (len(zero) + len(spread))  # shrunk towards the diagonal
        covariance = (1 - share) * spread.T @ spread / len(spread) + share * torch.diag(variance.clamp_min(floor))
        found["change by the canary, whitened"] = torch.linalg.solve(covariance, one - zero)
    return found


def _gradient_gap(run: PreparedRun, canary: Canary) -> Tensor:
    """The canary's gradient in data set 1 less that in data set 0, at the model without noise."""
    theta = canary.finals[0].to(run.records.x)

    def gradient(records: Records) -> Tensor:
        rows = canary.rows
        mask = torch.ones(len(rows), dtype=records.x.dtype)
        if records.filled is not None:
            mask = records.filled[rows].to(mask)
        if records.weight is not None:
            mask = records.weight[rows]
        shard = Shard(records.x[rows], records.y[rows], mask, records.length[rows], 1)
        total: Tensor = run.model.clipped_sum(theta, shard, UNCLIPPED)
        return total

    zero, one = map(gradient, canary.neighbours)
    return one - zero


# --------------------------------------------------------------------------------------------------------- internals


def _check(run: PreparedRun) -> None:
    plan, resolved = run.plan, run.resolved
    if plan.noiseless:
        raise SordinoError("epsilon: inf promises nothing; an audit needs a run with a finite epsilon.")
    if plan.integers is not None:
        raise SordinoError("integers: runs that add up integers are simulated one by one, which takes too long here.")
    if run.unscaled is not None:
        raise SordinoError("private_statistics: the ranges are part of what is released; audit a run without them.")
    if not resolved.model.entry.shared_batch:
        raise SordinoError(
            f"model: runs of '{resolved.model.name}' are not trained side by side; the audit serves linear models."
        )


def _sources(seed: int | None) -> Iterator[Source]:
    number = 0
    while True:
        if seed is None:
            yield Secure()
        else:
            state = np.random.SeedSequence([seed, number, *b"black box"]).generate_state(1, np.uint64)
            yield Seeded(int(state[0]))
        number += 1


def _largest(attackers: tuple[Attacker, ...]) -> float:
    return max(max(each.lower_thresholds, each.lower_gaussian or 0.0) for each in attackers)


def _auc(zero: np.ndarray, one: np.ndarray) -> float:
    """The chance that a run of data set 1 has the larger score."""
    order = np.sort(zero)
    below = np.searchsorted(order, one, side="left") + np.searchsorted(order, one, side="right")
    return float(below.mean() / (2 * len(zero)))


def _roc(zero: np.ndarray, one: np.ndarray) -> list[tuple[float, float]]:
    """Points of the ROC curve, from (1, 1) to (0, 0)."""
    cuts = np.quantile(np.concatenate([zero, one]), np.linspace(0, 1, ROC_POINTS))
    rates = [(float((zero > cut).mean()), float((one > cut).mean())) for cut in cuts]
    return [(1.0, 1.0), *rates]
