"""DP-FedAdamW: AdamW steps at each client, with noise on every gradient.

Moments are computed from noised gradients, so sending them costs nothing. Clients of different sizes add different
noise: the part of the noise in v is tracked as b, by the same recursion as v. Clients send the changes of v and b, so a
round with few participants changes them little.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import local_steps
from sordino.rules.adaptive import denoised
from sordino.rules.basic import check_decay, moving
from sordino.rules.blocks import block_means, count, expand
from sordino.rules.schedule import check_schedule, descend, schedule_factor

ADAMW_CAVEAT = "AdamW's steps are not linear in a client's noise: that sums of messages hide more is not proved."
ADAMW_CHOICES = {
    "aggregate": ("block", "none"),
    "align": ("additive", "convex", "none"),
}


class AdamWMessage(NamedTuple):
    """What a client sends."""

    delta: Tensor  # y - theta
    moments: Tree  # change of the block means of v; () if v starts from zero every round
    noise: Tree  # change of the noise's part of v; () likewise


EMPTY_ADAMW_MESSAGE = AdamWMessage((), (), ())  # type: ignore[arg-type]


class AdamWExtras(NamedTuple):
    """What the server sends beside theta."""

    rate: Tensor  # the step size of this round
    direction: Tensor  # Delta_G, the mean update of the last round per step
    moments: Tensor  # block means of v
    noise: Tensor  # the noise's part of v
    steps_done: Tensor  # J, local steps that v has averaged


class AdamWState(NamedTuple):
    """The server's state."""

    extras: AdamWExtras
    rounds: Tensor


def fedadamw(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.1,
    steps: int = 3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.1,
    decay: float = 0.01,
    schedule: str = "cosine",
    aggregate: str = "block",
    correct: bool = True,
    v_floor: float = 0.0,
    align: str = "additive",
    gamma: float = 0.5,
) -> Method:
    """y <- y - lr (m^ / (sqrt(max(v^ - Phi, v_floor)) + tau) + decay y + gamma Delta_G), K times; v by block means.

    Delta_G is the last round's -mean(y - theta) / (K lr).

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        lr: Step size of the local steps.
        steps: Local steps per round, K.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Added to the root of v^; bounds the steps.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        aggregate: `block` continues v from the last round's block means; `none` starts from zero.
        correct: Subtract Phi, the variance of the noise, from v^.
        v_floor: Lower bound of v^ - Phi; 0 stands for 1e-8, or for Phi if that is less. Noise alone takes half of v^ to
            the floor, so let tau bound the steps.
        align: `additive`, `convex` (the step weighs 1 - gamma) or `none`.
        gamma: Weight of Delta_G, in [0, 1).

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The K noised gradients of each round and client; the update and the moments follow from them.
        Sensitivity: clip if a record joins or leaves; 2 clip if it is replaced; per gradient.
        Proved for: record level; untrusted-server.
        Reason: AdamW's steps are not linear in a client's noise, so the noise of other clients in the sum cannot be
            counted.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedadamw", gamma=0.2)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    check_schedule(schedule, decay)
    for name, value in (("aggregate", aggregate), ("align", align)):
        check_known(name, value, ADAMW_CHOICES[name])
    for name, number, least in (("lr", lr, 1e-12), ("tau", tau, 0), ("v_floor", v_floor, 0)):
        if not least <= number < math.inf:
            raise SordinoError(f"{name}: {number} must be a finite number, {least:g} or more.")
    for name, part in (("beta1", beta1), ("beta2", beta2), ("gamma", gamma)):
        check_decay(name, part)  # each in [0, 1): Delta_G is heavy-ball momentum from round to round
    step_weight, pull_weight = {"additive": (1.0, gamma), "convex": (1 - gamma, gamma), "none": (1.0, 0.0)}[align]

    def eta(t: float, rounds: float) -> float:
        return lr * schedule_factor(schedule, t, rounds)

    def compute(ask: Ask, broadcast: Broadcast[AdamWExtras], memory: Tree, cache: Tree) -> AdamWMessage:
        (rate, pull, means, noise, J), y, blocks = broadcast.extras, broadcast.theta, ask.facts.blocks
        m, v, b, phi = torch.zeros_like(y), expand(means, blocks), noise, ask.std(Kind.GRADIENT).square()
        for k in range(1, steps + 1):
            g = ask.gradient(y)
            m, v, b = moving(m, g, beta1), moving(v, g.square(), beta2), moving(b, phi, beta2)
            gathered = (1 - beta2 ** (J.double() + k)).to(v)
            second = denoised(v / gathered, b / gathered, v_floor or phi.clamp(max=1e-8)) if correct else v / gathered
            step = m / (1 - beta1**k) / (second.sqrt() + tau)
            y = descend(y, step_weight * step + pull_weight * pull, rate, decay)
        if aggregate == "none":
            return AdamWMessage(y - broadcast.theta, (), ())
        return AdamWMessage(y - broadcast.theta, block_means(v, blocks) - means, b - noise)

    def init(theta: Tensor, facts: Facts, before: Tree) -> AdamWState:
        zero, rounds = torch.zeros_like(theta[..., :1]), torch.tensor(facts.rounds)
        means = zero.expand(*theta.shape[:-1], count(facts.blocks))
        extras = AdamWExtras(zero + eta(0, facts.rounds), torch.zeros_like(theta), means, zero, zero)
        return AdamWState(extras, rounds)

    def update(mean: AdamWMessage, state: AdamWState, theta: Tensor, t: int) -> tuple[Tensor, AdamWState]:
        rate, _, moments, noise, J = state.extras
        if isinstance(mean.moments, Tensor) and isinstance(mean.noise, Tensor):
            moments, noise = (moments + mean.moments).clamp_min(0), (noise + mean.noise).clamp_min(0)
            J = J + steps
        direction, rate = -mean.delta / (steps * rate), 0 * rate + eta(t + 1, float(state.rounds))
        return mean.delta, AdamWState(AdamWExtras(rate, direction, moments, noise, J), state.rounds)

    queries, _ = local_steps(unit, clip, steps, "per-step")
    local = Local(compute, message=EMPTY_ADAMW_MESSAGE)
    stage = Stage(local, Rule(init, update, broadcast=lambda state: state.extras), queries)
    return Method("dp-fedadamw", unit, (stage,), frozenset({(unit, Trust.UNTRUSTED_SERVER)}), ADAMW_CAVEAT)
