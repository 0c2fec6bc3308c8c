"""Federated M-estimation under Gaussian DP: FedSGD, FedAvg, FedHybrid and FedNewton (arXiv 2605.18656).

All releases are noised per client. FedSGD's is one linear query a round, so that sums hide as much as they do in
DP-FedGD; local steps and the inverse of a client's own Hessian are not linear: proved against an untrusted server only.
Hessians are positive semi-definite, so replacing a record moves their sum by sqrt(2) of the clip; their noise is
symmetric, and eigenvalues that it pushed too low are raised to a floor, which is post-processing.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.fedavg import CAVEAT, local_sgd
from sordino.methods.fedgd import gradient, server_gradient
from sordino.rules import chain, scale
from sordino.rules.matrix import floored_solve

NONLINEAR = "Local steps and local Newton steps are not linear in their noise; what their sums hide is not proved."


def fedsgd(*, unit: Unit = Unit.RECORD, clip: float = 1.0, lr: float = 2.0, tail: float = 0.0) -> Method:
    """theta <- theta - lr sum_i w_i g_i, w_i = n_i / N: dp-fedgd with the pooled divisor.

    lr: below 2 over the largest curvature. tail: as in dp-fedgd.
    """
    return server_gradient("fedsgd", unit, clip, lr, (), tail)


def fedavg_gdp(*, unit: Unit = Unit.RECORD, clip: float = 1.0, local_lr: float = 2.0, steps: int = 10) -> Method:
    """y <- y - local_lr g, K times at each client; theta <- sum_i w_i y_i.

    steps: K. Few rounds and many steps bias the estimate by about m^2 d^2 / N^2 in squared error.
    """
    return local_sgd("fedavg-gdp", unit, clip, local_lr, steps, "per-step", scale(1.0))


def local_round(clip: float, local_lr: float, steps: int, share: float) -> Stage:
    """One round of local steps, whose mean is where the next stage begins."""
    if not 0 < share < 1:
        raise SordinoError(f"local_share: {share} must lie in (0, 1), the part of mu squared spent on local steps.")
    (stage,) = local_sgd("", Unit.RECORD, clip, local_lr, steps, "per-step", scale(1.0)).stages
    (query,) = stage.queries
    return stage._replace(queries=(Query(query.kind, query.clip, query.calls, share),), rounds=1)


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

    lr, local_lr: of the gradient and the local steps. local_steps: K. local_share: of mu squared, for the local round.
    """
    start = local_round(clip, local_lr, local_steps, local_share)
    rest = Stage(Local(gradient), chain(scale(-lr)), (Query(Kind.GRADIENT, clip, share=1 - local_share),))
    proves = frozenset((unit, trust) for trust in Trust if local_steps == 1 or trust is Trust.UNTRUSTED_SERVER)
    return Method("fedhybrid", unit, (start, rest), proves, CAVEAT)


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

    curvature_clip: bound on one record's Hessian (Frobenius). local_share, curvature_share: of mu squared, the gradient
    gets the rest. floor: smallest eigenvalue of H_i. step_cap: longest local Newton step; 0: any.
    """
    rest = 1 - local_share - curvature_share
    if not (curvature_share > 0 and rest > 1e-6):
        raise SordinoError(f"curvature_share: {curvature_share} and local_share leave {rest:g} of mu squared for g.")
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
