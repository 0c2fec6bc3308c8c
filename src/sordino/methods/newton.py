"""Federated M-estimation under Gaussian DP: FedSGD, FedAvg, FedHybrid and FedNewton (arXiv 2605.18656).

All releases are noised per client. FedSGD releases one linear query per round, so sums hide as much as in DP-FedGD.
Local steps and the inverse of a client's Hessian are not linear, so the other methods are proved against an untrusted
server only. Hessians are positive semi-definite, so replacing a record moves their sum by sqrt(2) times the clip. Their
noise is symmetric, and eigenvalues that it makes too small are raised to a floor, which is post-processing.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.fedavg import LOCAL_STEPS_CAVEAT, local_sgd
from sordino.methods.fedgd import gradient, server_gradient
from sordino.methods.local import LocalSteps
from sordino.rules import chain, scale
from sordino.rules.matrix import floored_solve

NONLINEAR = "Local steps and local Newton steps are not linear in their noise, so nothing is proved about their sums."


def fedsgd(*, unit: Unit = Unit.RECORD, clip: float = 1.0, lr: float = 2.0, tail: float = 0.0) -> Method:
    """theta <- theta - lr sum_i w_i g_i, w_i = n_i / N: dp-fedgd with the pooled divisor.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        lr: Step size of the server, below 2 over the largest curvature.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of clipped per-record gradients.
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model, and the server only post-processes
            sums of releases.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("fedsgd", clip=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.0
    """
    return server_gradient("fedsgd", unit, clip, lr, (), tail)


def fedavg_gdp(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 10,
    decay: float = 0.0,
    schedule: str = "constant",
) -> Method:
    """y <- y - local_lr (g + decay y), K times at each client; theta <- sum_i w_i y_i.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        local_lr: Step size of the local steps.
        steps: Local steps per round, K. Few rounds with many steps bias the estimate by about m^2 d^2 / N^2 in squared
            error.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The K noised gradients of each round and client.
        Sensitivity: clip if a record joins or leaves; 2 clip if it is replaced; per gradient.
        Proved for: record level; untrusted-server. With steps = 1: untrusted-server, secure-aggregation and
            trusted-server.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("fedavg-gdp", steps=5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    return local_sgd("fedavg-gdp", unit, clip, LocalSteps(steps, local_lr, schedule, decay), "per-step", scale(1.0))


def local_round(clip: float, local_lr: float, steps: int, share: float) -> Stage:
    """One round of local steps, whose mean is where the next stage begins."""
    if not 0 < share < 1:
        raise SordinoError(f"local_share: {share} must lie in (0, 1), the part of mu squared spent on local steps.")
    (stage,) = local_sgd("", Unit.RECORD, clip, LocalSteps(steps, local_lr), "per-step", scale(1.0)).stages
    (query,) = stage.queries
    return stage._replace(queries=(Query(query.kind, query.clip, query.calls, share),), rounds=1)


def gradient_share(local_share: float, curvature_share: float) -> float:
    """The part of mu squared that local steps and curvature leave for the gradients of Newton's steps."""
    rest = 1 - local_share - curvature_share
    if not (curvature_share > 0 and rest > 1e-6):
        raise SordinoError(f"curvature_share: {curvature_share} and local_share leave {rest:g} of mu squared for g.")
    return rest


def fedhybrid(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 2.0,
    local_lr: float = 2.0,
    local_steps: int = 10,
    local_share: float = 0.5,
) -> Method:
    """One round of K local steps with half of mu squared, then gradient steps with the other half.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        lr: Step size of the gradient steps.
        local_lr: Step size of the local steps.
        local_steps: Local steps of the first round, K.
        local_share: Part of mu squared for the first round, in (0, 1).

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The K noised gradients of the first round, then one noised gradient per round.
        Sensitivity: clip if a record joins or leaves; 2 clip if it is replaced; per gradient.
        Proved for: record level; untrusted-server. With local_steps = 1: untrusted-server, secure-aggregation and
            trusted-server.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("fedhybrid", local_steps=5)
        >>> method.stages[1].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    start = local_round(clip, local_lr, local_steps, local_share)
    rest = Stage(Local(gradient), chain(scale(-lr)), (Query(Kind.GRADIENT, clip, share=1 - local_share),))
    proves = frozenset((unit, trust) for trust in Trust if local_steps == 1 or trust is Trust.UNTRUSTED_SERVER)
    return Method("fedhybrid", unit, (start, rest), proves, LOCAL_STEPS_CAVEAT)


def fednewton(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    curvature_clip: float = 1.0,
    local_lr: float = 2.0,
    local_steps: int = 10,
    local_share: float = 0.5,
    curvature_share: float = 0.25,
    floor: float = 0.2,
    step_cap: float = 0.0,
) -> Method:
    """One round of K local steps, then theta_i = theta - H_i^-1 g_i at each client, averaged by w_i.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        curvature_clip: Bound on a record's Hessian (Frobenius norm).
        local_lr: Step size of the local steps.
        local_steps: Local steps of the first round, K.
        local_share: Part of mu squared for the first round, in (0, 1).
        curvature_share: Part of mu squared for the Hessians; the gradients of the Newton rounds get the rest.
        floor: Lower bound of the eigenvalues of H_i, above 0.
        step_cap: Longest Newton step of a client; 0 for any.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The K noised gradients of the first round, then a noised gradient and a noised Hessian per round.
        Sensitivity: Gradient: clip, or 2 clip if a record is replaced. Hessian: curvature_clip, or sqrt(2)
            curvature_clip, because Hessians are positive semi-definite.
        Proved for: record level; untrusted-server.
        Reason: Local steps and the inverse of a noised matrix are not linear in the noise; what their sums hide is not
            proved.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("fednewton", floor=0.1)
        >>> method.stages[1].queries[1].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.4142135623730951
    """
    rest = gradient_share(local_share, curvature_share)
    if not floor > 0 or not curvature_clip > 0 or step_cap < 0:
        raise SordinoError("floor, curvature_clip: must be above 0, and step_cap 0 or more.")

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        g, H = ask.gradient(broadcast.theta), ask.curvature(broadcast.theta)
        step = floored_solve(H, g, floor)
        if step_cap:
            step = step * (step_cap / step.norm(dim=-1, keepdim=True).clamp_min(step_cap))
        return -step

    curvature = Query(Kind.CURVATURE, curvature_clip, share=curvature_share, psd=True)
    newton = Stage(Local(compute), chain(scale(1.0)), (Query(Kind.GRADIENT, clip, share=rest), curvature))
    start = local_round(clip, local_lr, local_steps, local_share)
    return Method("fednewton", unit, (start, newton), frozenset({(unit, Trust.UNTRUSTED_SERVER)}), NONLINEAR)
