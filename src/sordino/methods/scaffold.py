"""DP-SCAFFOLD: local steps corrected by control variates, which live at the clients.

Everything a client sends and remembers is a function of zeta = theta - y, which is made of noised gradients (record
level) or noised itself (user level). The control variates are not released, so sums of messages depend on more than
what was seen: proved against an untrusted server only. A warm start (one noised gradient a client) is a stage of one
round and is paid for.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Stage, Tree, Trust, Unit
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import local_steps

CAVEAT = "Control variates are hidden client state: what sums of messages tell of it is not proved."


def nothing_yet(theta: Tensor, before: Tree) -> Tensor:
    return torch.zeros_like(theta)


def carried(theta: Tensor, before: Tree) -> Tree:
    return before


def scaffold(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 1,
    warm_start: bool = False,
) -> Method:
    """y <- y - local_lr (g - c_i + c), K times; c_i <- c_i - c + (theta - y) / (K local_lr); c <- mean c_i.

    steps: K. warm_start: begin with c_i a noised gradient, one extra release.
    """

    def compute(ask: Ask, broadcast: Broadcast, c_i: Tree, cache: Tree) -> Tensor:
        y, c = broadcast.theta, broadcast.extras
        for _ in range(steps):
            y = y - local_lr * (ask.gradient(y) - c_i + c)
        return broadcast.theta - y

    def update_memory(zeta: Tree, broadcast: Broadcast, c_i: Tree) -> Tree:
        return c_i - broadcast.extras + zeta / (steps * local_lr)

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return (before if warm_start else torch.zeros_like(theta)), torch.tensor(facts.cohort / facts.clients)

    def update(zeta: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        c, rate = state  # those who came change their c_i by zeta / (K local_lr) - c
        return -lr * zeta, (c + rate * (zeta / (steps * local_lr) - c), rate)

    queries, _ = local_steps(unit, clip, steps, "per-step")
    local = Local(compute, update_memory, carried if warm_start else nothing_yet)
    walk = Stage(local, Rule(init, update, broadcast=lambda state: state[0]), queries)
    stages = (warm(unit, clip), walk) if warm_start else (walk,)
    return Method("dp-scaffold", unit, stages, frozenset({(unit, Trust.UNTRUSTED_SERVER)}), CAVEAT)


def warm(unit: Unit, clip: float) -> Stage:
    """One round in which c_i becomes a noised gradient at theta, and c their mean; the model stays."""

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return ask.gradient(broadcast.theta)

    def update_memory(g: Tree, broadcast: Broadcast, memory: Tree) -> Tree:
        return g

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return ()

    def update(g: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        return torch.zeros_like(theta), g

    queries, _ = local_steps(unit, clip, 1, "per-step")
    return Stage(Local(compute, update_memory, nothing_yet), Rule(init, update), queries, rounds=1)
