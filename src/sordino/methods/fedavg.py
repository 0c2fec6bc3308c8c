"""DP-FedAvg: K local steps, then the average of the clients' updates.

`per-step` (record level) noises every local gradient; the update is post-processing of K releases. Each client is
protected by its own noise. For K = 1 the update is linear in the only release, so sums hide as much as in DP-FedGD.
`final` takes the local steps without noise, clips the update and noises it once: a client moves it by the clip, and a
record may move it anywhere in the ball.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor
from sordino.methods.fedgd import gradient
from sordino.methods.local import LocalSteps
from sordino.rules import average, chain, scale, smooth
from sordino.rules.basic import check_above_zero

NOISE = ("per-step", "final")
LOCAL_STEPS_CAVEAT = (
    "With K > 1 noisy local steps only a client's own noise protects it; nothing is proved about sums of messages."
)


def local_steps(
    unit: Unit, clip: float, steps: int, noise: str, joint: int = 1
) -> tuple[tuple[Query, ...], frozenset[tuple[Unit, Trust]]]:
    """The queries of K local steps, of `joint` gradients each, and what is proved of them."""
    if steps < 1:
        raise SordinoError(f"steps: {steps} must be at least 1.")
    check_known("noise_at", noise, NOISE)
    check_above_zero(clip=clip)
    everyone, calls = frozenset((unit, trust) for trust in Trust), steps * joint
    if noise == "final" or unit is Unit.CLIENT:
        return (Query(Kind.GRADIENT, noise=None, calls=calls, joint=joint), Query(Kind.DELTA, clip)), everyone
    untrusted_only = frozenset({(unit, Trust.UNTRUSTED_SERVER)})
    return (Query(Kind.GRADIENT, clip, calls=calls, joint=joint),), everyone if calls == 1 else untrusted_only


def sends_gradient(queries: tuple[Query, ...]) -> bool:
    """One noised gradient per round: it is sent as it is, and the server takes the step, so that sums of messages are
    sums of releases to the last bit."""
    return len(queries) == 1 and queries[0].calls == 1


def local_sgd(name: str, unit: Unit, clip: float, steps: LocalSteps, noise_at: str, *rules: Rule) -> Method:
    """K local steps; `rules` turn the mean update into the server's step."""
    queries, proves = local_steps(unit, clip, steps.count, noise_at)
    one = sends_gradient(queries)

    def compute(ask: Ask, broadcast: Broadcast[Tree], memory: Tree, cache: Tree) -> Tensor:
        return steps.update(broadcast.theta, broadcast.extras, ask.gradient)

    rule = chain(steps.rule(one), *rules)
    rule = rule if one else rule._replace(broadcast=lambda states: states[0].factor)
    return Method(name, unit, (Stage(Local(gradient if one else compute), rule, queries),), proves, LOCAL_STEPS_CAVEAT)


def fedavg(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 1,
    decay: float = 0.0,
    schedule: str = "constant",
    noise_at: str = "per-step",
    tail: float = 0.0,
) -> Method:
    """y <- y - local_lr (g + decay y), K times from theta; theta <- theta + lr mean(y - theta).

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        steps: Local steps per round, K.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        noise_at: `per-step` noises every local gradient (record level only); `final` clips and noises the update once.
            At client level the update is always noised once.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level, per-step: the K noised gradients of each round (the update follows from them).
            Otherwise: the clipped update, noised once per round.
        Sensitivity: Per noised gradient: clip if a record joins or leaves, 2 clip if it is replaced. Noised update:
            clip or 2 clip for a client; always 2 clip for a record, which may move the update anywhere in the ball.
        Proved for: untrusted-server at both levels; secure-aggregation and trusted-server too with steps = 1, noise_at
            = final or at client level.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedavg", steps=3)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    last = [average(tail)] if tail else []
    walk = LocalSteps(steps, local_lr, schedule, decay)
    return local_sgd("dp-fedavg", unit, clip, walk, noise_at, scale(lr), *last)


def fedavg_ls(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 1,
    decay: float = 0.0,
    schedule: str = "constant",
    noise_at: str = "per-step",
    strength: float = 1.0,
) -> Method:
    """dp-fedavg, the mean update smoothed by (I - strength L)^-1 on the server.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        steps: Local steps per round, K.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        noise_at: `per-step` noises every local gradient (record level only); `final` clips and noises the update once.
            At client level the update is always noised once.
        strength: Strength of the smoothing; 0 is dp-fedavg.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level, per-step: the K noised gradients of each round (the update follows from them).
            Otherwise: the clipped update, noised once per round.
        Sensitivity: Per noised gradient: clip if a record joins or leaves, 2 clip if it is replaced. Noised update:
            clip or 2 clip for a client; always 2 clip for a record, which may move the update anywhere in the ball.
        Proved for: untrusted-server at both levels; secure-aggregation and trusted-server too with steps = 1, noise_at
            = final or at client level.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted. Smoothing is post-processing.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedavg-ls", strength=2.0)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    walk = LocalSteps(steps, local_lr, schedule, decay)
    return local_sgd("dp-fedavg-ls", unit, clip, walk, noise_at, smooth(strength), scale(lr))
