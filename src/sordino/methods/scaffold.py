"""DP-SCAFFOLD: local steps corrected by control variates, which clients store.

Everything that a client sends and stores is a function of zeta = theta - y, which is a sum of noised gradients (record
level) or noised itself (client level). The control variates are not released, so sums of messages depend on more than
what was released. So the method is proved against an untrusted server only. A warm start (one noised gradient per
client) is a stage of one round and is paid for.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Stage, Tree, Trust, Unit
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import local_steps
from sordino.methods.fedgd import gradient
from sordino.methods.local import LocalSteps, Pace, paced, unpaced

CONTROL_VARIATES_CAVEAT = "Control variates are hidden client state, so nothing is proved about sums of messages."


class ControlState(NamedTuple):
    """The server's state."""

    control: Tensor  # c, the mean of all c_i
    rate: Tensor  # expected part of the clients in a round
    pace: Pace


def zero_control(theta: Tensor, before: Tree) -> Tensor:
    """Every c_i starts at zero."""
    return torch.zeros_like(theta)


def carried(theta: Tensor, before: Tree) -> Tensor:
    """c_i (or c) is what the warm start left; zero where no client took part in it."""
    return before if isinstance(before, Tensor) else torch.zeros_like(theta)


def scaffold(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 1,
    decay: float = 0.0,
    schedule: str = "constant",
    warm_start: bool = False,
) -> Method:
    """y <- y - local_lr (g - c_i + c + decay y), K times; c_i <- c_i - c + (theta - y) / (K local_lr); c <- mean c_i.

    local_lr is the round's step size. With decay, theta - y excludes the part that decay alone makes of it, and the sum
    of the steps' weights replaces K.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        steps: Local steps per round, K.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        warm_start: Start with a noised gradient as c_i, which is one more release.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level: the K noised gradients of each round. Client level: the clipped theta - y, noised once
            per round. With a warm start, one more noised gradient.
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced; per release.
        Proved for: record and client level; untrusted-server.
        Reason: Control variates follow from noised messages, so they cost nothing. They are hidden client state, and
            what sums of messages reveal about them is not proved.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-scaffold", warm_start=True)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """

    walk = LocalSteps(steps, local_lr, schedule, decay)

    def compute(ask: Ask, broadcast: Broadcast[Tree], c_i: Tensor, cache: Tree) -> Tensor:
        c, factor = unpaced(broadcast.extras)
        return -walk.update(broadcast.theta, factor, lambda y: ask.gradient(y) - c_i + c)

    def direction(zeta: Tensor, factor: Tree) -> Tensor:  # the mean of g - c_i + c; zeta is in units of the factor
        return zeta / (walk.total(factor) * local_lr)

    def update_memory(zeta: Tensor, broadcast: Broadcast[Tree], c_i: Tensor) -> Tensor:
        c, factor = unpaced(broadcast.extras)
        changed: Tensor = c_i - c + direction(zeta, factor)
        return changed

    def init(theta: Tensor, facts: Facts, before: Tree) -> ControlState:
        control = carried(theta, before) if warm_start else torch.zeros_like(theta)
        return ControlState(control, torch.tensor(facts.cohort / facts.clients), walk.start(theta, facts))

    def update(zeta: Tensor, state: ControlState, theta: Tensor, t: int) -> tuple[Tensor, ControlState]:
        c, rate, pace = state  # participants change their c_i by zeta / (K local_lr) - c
        c = c + rate * (direction(zeta, pace.factor) - c)
        return walk.received(-zeta, theta, pace.factor, lr=lr), ControlState(c, rate, walk.following(pace, t))

    queries, _ = local_steps(unit, clip, steps, "per-step")
    local = Local(compute, update_memory, carried if warm_start else zero_control)
    main = Stage(local, Rule(init, update, broadcast=lambda state: paced(state.control, state.pace.factor)), queries)
    stages = (warm(unit, clip), main) if warm_start else (main,)
    return Method("dp-scaffold", unit, stages, frozenset({(unit, Trust.UNTRUSTED_SERVER)}), CONTROL_VARIATES_CAVEAT)


def warm(unit: Unit, clip: float) -> Stage:
    """One round in which c_i becomes a noised gradient at theta, and c their mean; the model stays."""

    def update_memory(g: Tensor, broadcast: Broadcast, memory: Tree) -> Tensor:
        return g

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return ()

    def update(g: Tensor, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        return torch.zeros_like(theta), g

    queries, _ = local_steps(unit, clip, 1, "per-step")
    return Stage(Local(gradient, update_memory, zero_control), Rule(init, update), queries, rounds=1)
