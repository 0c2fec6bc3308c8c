"""DP-FedAdamW, and DP-LocalAdamW, which it mends: AdamW inside each client, every gradient of it noised.

Moments are made of noised gradients alone, so that sending them costs nothing. Clients of unlike sizes have unlike
noise: its part of v is carried as b by v's own recursion, and is Phi (its weight divided out) where all are alike. What
is sent of v and b are changes, so that a round to which few came changes them little.
"""

from __future__ import annotations

import math
from typing import Any

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError, nearest
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import local_steps
from sordino.rules.adaptive import denoised
from sordino.rules.basic import check_decay, moving
from sordino.rules.blocks import block_means, count, expand

CAVEAT = "AdamW's local steps are not linear in a client's own noise; that sums of messages hide more is not proved."
WORDS = {"schedule": ("cosine", "constant"), "aggregate": ("block", "none"), "align": ("additive", "convex", "none")}


def localadamw(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.3,
    steps: int = 3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.1,
    decay: float = 0.01,
    schedule: str = "cosine",
) -> Method:
    """y <- y - lr (m^ / (sqrt(v^) + tau) + decay y), K times from theta; theta <- theta + mean(y - theta).

    m^, v^: Adam's moments, from zero in every round. steps: K. tau: bounds steps. schedule: of lr, cosine or constant.
    """
    own: dict[str, Any] = {"lr": lr, "steps": steps, "beta1": beta1, "beta2": beta2, "tau": tau, "decay": decay}
    bare = fedadamw(unit=unit, clip=clip, schedule=schedule, aggregate="none", correct=False, align="none", **own)
    return bare._replace(name="dp-localadamw")


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

    aggregate: v goes on from last round's block means, or from zero (none). correct: take off Phi, the noise's variance
    (v_floor 0: 1e-8, or Phi if less; noise alone takes half of v^ there, so let tau bound steps). align: additive, none
    or convex (the step weighs 1 - gamma). Delta_G: last round's -mean(y - theta) / (K lr). Others as in dp-localadamw.
    """
    for name, word in (("schedule", schedule), ("aggregate", aggregate), ("align", align)):
        if word not in WORDS[name]:
            raise SordinoError(f"{name}: '{word}' is unknown.{nearest(word, WORDS[name])}")
    for name, number, least in (("lr", lr, 1e-12), ("tau", tau, 0), ("decay", decay, 0), ("v_floor", v_floor, 0)):
        if not least <= number < math.inf:
            raise SordinoError(f"{name}: {number} must be a finite number, {least:g} or more.")
    for name, part in (("beta1", beta1), ("beta2", beta2), ("gamma", gamma)):
        check_decay(name, part)  # each in [0, 1): Delta_G is heavy-ball momentum from round to round
    own, weight = {"additive": (1.0, gamma), "convex": (1 - gamma, gamma), "none": (1.0, 0.0)}[align]

    def eta(t: float, rounds: float) -> float:
        return lr * (1 + math.cos(math.pi * t / rounds)) / 2 if schedule == "cosine" else lr

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tree:
        (rate, pull, means, noise, J), y, blocks = broadcast.extras, broadcast.theta, ask.facts.blocks
        m, v, b, phi = torch.zeros_like(y), expand(means, blocks), noise, ask.std(Kind.GRADIENT).square()
        for k in range(1, steps + 1):
            g = ask.gradient(y)
            m, v, b = moving(m, g, beta1), moving(v, g.square(), beta2), moving(b, phi, beta2)
            gathered = (1 - beta2 ** (J.double() + k)).to(v)
            second = denoised(v / gathered, b / gathered, v_floor or phi.clamp(max=1e-8)) if correct else v / gathered
            step = m / (1 - beta1**k) / (second.sqrt() + tau)
            y = y - rate * (own * step + weight * pull + decay * y)
        kept = (block_means(v, blocks) - means, b - noise)
        return y - broadcast.theta, *(kept if aggregate == "block" else ())

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        zero, rounds = torch.zeros_like(theta[..., :1]), torch.tensor(facts.rounds)
        means = zero.expand(*theta.shape[:-1], count(facts.blocks))
        return zero + eta(0, facts.rounds), torch.zeros_like(theta), means, zero, zero, rounds

    def update(said: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        (delta, *changes), (rate, _, *carried, J, rounds) = said, state
        if aggregate == "block":
            carried, J = [(old + new).clamp_min(0) for old, new in zip(carried, changes, strict=True)], J + steps
        return delta, (0 * rate + eta(t + 1, float(rounds)), -delta / (steps * rate), *carried, J, rounds)

    queries, _ = local_steps(unit, clip, steps, "per-step")
    stage = Stage(Local(compute), Rule(init, update, broadcast=lambda state: state[:-1]), queries)
    return Method("dp-fedadamw", unit, (stage,), frozenset({(unit, Trust.UNTRUSTED_SERVER)}), CAVEAT)
