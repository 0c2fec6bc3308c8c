"""Attacks on sums of integers: discrete noise under secure aggregation, as a federation adds it up.

The adversary is the server with the colluders that the plan allows for. It opens the sum of all clients' integers
modulo 2^32, and subtracts what the colluders sent. What remains are the integers of the honest clients, the victim
among them, with as much noise as the certificate counts. The clients' own code encodes a message: weights, random
rounding and discrete Gaussian noise. A message of the first round does not depend on noise, so it is computed once and
encoded many times.

The certificate accounts for this noise as the Gaussian noise that it is a function of. `lower_gaussian` assumes such
Gaussian noise; many steps per standard deviation make the two alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sordino.checks.audit import lower_bounds as statistics
from sordino.checks.audit.attacks import (
    AUDITED_MODEL,
    RUNS,
    Audit,
    attacks,
    check_arguments,
    one_release,
    plan_for,
    sources_of,
)
from sordino.checks.audit.observer import VICTIM, Attack
from sordino.core import Broadcast, Privacy, Trust
from sordino.engines import reference
from sordino.engines.schedule import ROUNDING, round_plans
from sordino.engines.trace import sent_answers
from sordino.privacy import calibration
from sordino.privacy.mechanisms.laws import DiscreteGaussianNoise
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Address, Noiseless, Source
from sordino.privacy.plan import Plan, plan_mechanism

METHOD, COLLUDERS = "dp-fedgd", 1


def audit(
    name: str,
    privacy: Privacy | None = None,
    *,
    runs: int = RUNS,
    confidence: float = statistics.CONFIDENCE,
    noise_factor: float = 1.0,
    seed: int | None = None,
    tick: Callable[[int], None] = lambda runs: None,
) -> Audit:
    """Attack the sum of one round of DP-FedGD, as integers.

    Args:
      name: as the result shows it.
      privacy: the promise to attack; its trust model becomes secure aggregation.
      runs: sums per data set.
      confidence: with which each bound holds.
      noise_factor: multiplies the noise without telling the certificate; below 1 the attack should win.
      seed: makes the noise reproducible. Without it, noise is secret and fresh.
      tick: called with the number of sums that finished.

    Returns:
      The lower bounds, beside the certified epsilon.

    Raises:
      SordinoError: an argument is out of its range.
    """
    check_arguments("runs", runs, noise_factor, seed)
    privacy = replace(Privacy() if privacy is None else privacy, trust=Trust.SECURE_AGGREGATION)
    plan = integer_plan(privacy)
    std = _std(plan)
    attack, means = max(_moved(plan), key=lambda moved: float(np.linalg.norm(moved[1][1] - moved[1][0])))
    gap, middle = (means[1] - means[0]).sum(0), (means[0] + means[1]).sum(0) / 2
    information = float(gap @ gap) / std**2
    sources = sources_of(seed, plan)

    def scored(side: int) -> np.ndarray:
        released = opened(plan, means[side], next(sources), runs, noise_factor)
        tick(runs)
        return np.asarray((released - middle) @ gap / std**2)

    return one_release(
        name,
        plan,
        scored,
        information,
        canary=attack.name,
        runs=runs,
        confidence=confidence,
        noise_factor=noise_factor,
        dtype="integers",
    )


def integer_plan(privacy: Privacy) -> Plan:
    """One round of DP-FedGD whose sums are integers."""
    plan = plan_for(METHOD, privacy, rounds=1)
    messages = sent_answers(plan, AUDITED_MODEL, AUDITED_MODEL.features, torch.float32)
    return replace(plan, integers=Integers(messages, colluders=COLLUDERS))


def opened(plan: Plan, messages: np.ndarray, source: Source, runs: int, noise_factor: float = 1.0) -> np.ndarray:
    """What the adversary sees of the honest clients: sums of their integers, decoded.

    Args:
      plan: with integers.
      messages: of the honest clients, weighted: clients x numbers.
      source: of all noise and rounding.
      runs: how many sums.
      noise_factor: multiplies the standard deviation of the noise.

    Returns:
      runs x numbers.
    """
    (noise,), mechanism = calibration.query_noises(plan), plan_mechanism(plan, 0, _number(plan))
    assert isinstance(mechanism, DiscreteGaussianNoise)
    variance = noise_factor**2 * calibration.integer_variance(plan, noise)
    total = np.zeros((runs, messages.shape[1]), np.uint32)
    for i, values in enumerate(messages):
        at, dither_at = Address(i, 0, noise.number), Address(i, 0, ROUNDING, 0)
        often = np.ascontiguousarray(np.broadcast_to(values, total.shape))
        total += mechanism.encode(often, _steps(plan), variance, source, at, dither_at)
    return mechanism.decode(total, _steps(plan))


def _moved(plan: Plan) -> list[tuple[Attack, np.ndarray]]:
    """Every canary, with the weighted messages of the honest clients: data sets x clients x numbers."""
    assert plan.integers is not None
    honest = plan.integers.honest(plan.clients)
    round_plan = next(round_plans(plan, AUDITED_MODEL))
    local, theta = round_plan.stage.local, AUDITED_MODEL.init()
    found = []
    for attack in attacks(plan, AUDITED_MODEL):
        means = np.zeros((2, honest, AUDITED_MODEL.size))
        for side, records in enumerate(attack.neighbours):
            for i in range(honest):
                ask = reference.oracle(AUDITED_MODEL, records, round_plan, i, Noiseless(), add_noise=False)
                message = ask.finish(local.compute(ask, Broadcast(theta.to(records.x)), (), ()))
                absent = attack.leaves and side == 0 and i == VICTIM
                means[side, i] = 0 if absent else plan.weights[i] * message.double().numpy()  # type: ignore[union-attr]
        found.append((attack, means))
    return found


def _number(plan: Plan) -> int:
    (noise,) = calibration.query_noises(plan)
    return noise.number


def _steps(plan: Plan) -> float:
    """Integer steps per unit of the aggregate."""
    (noise,) = calibration.query_noises(plan)
    return float(1 / (noise.step * noise.weight.max()))


def _std(plan: Plan) -> float:
    """The standard deviation of the honest noise in the sum."""
    assert plan.integers is not None
    (noise,) = calibration.query_noises(plan)
    variance = plan.integers.honest(plan.clients) * calibration.integer_variance(plan, noise)
    return math.sqrt(variance) / _steps(plan)
