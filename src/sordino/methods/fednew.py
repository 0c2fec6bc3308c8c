"""FedNew, DP-FedNew and DP-FedNew-FC (PoPETs 2025): Newton directions solved locally, agreed on by ADMM.

A lemma bounds how far a record moves a direction (`admm.shift`); a client's direction is clipped. The Hessian never
leaves the client and is computed in chunks; `solver = cg` never builds it. For networks, `curvature = fisher` takes the
mean of g g^T over gradients g of the last layer, and 0 elsewhere: a mean of semi-definite matrices of bounded norm too,
so the lemma is the same. Minibatches are Poisson samples: gradient and H are about one of them, and the lemma is about
its expected size. FedNew-FC uses the feature covariance instead, which is constant over the run and factorised
once: see `covariance`.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Batch, Kind, Method, Query, Tree, Unit
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor, torch
from sordino.methods.admm import Solve, admm, check_rounding, shift
from sordino.rules.basic import check_above_zero
from sordino.rules.limits import LIMITS
from sordino.rules.matrix import conjugate_gradients, damped, steps_for

SOLVERS, CURVATURES = ("direct", "cg"), ("hessian", "fisher")
MOST_CONDITION = 1e4  # of a damped Hessian
ACCURACY = 1e-9  # of cg, as a part of the longest direction
CG_ASSUMPTION = "Conjugate gradients reach the stated accuracy in float64 too, which is measured and not proved."


def answers(
    unit: Unit, kind: Kind, clip: float, limit: float, curvature_clip: float, gamma: float, cg: int = 0
) -> tuple[Query, ...]:
    """The queries: g and curvature inside the client, the direction noised. cg: steps, if that solves."""
    calls, error = (cg, ACCURACY * limit / gamma) if cg else (1, 0.0)
    if unit is Unit.CLIENT:
        return Query(Kind.GRADIENT, noise=None), Query(kind, calls=calls, noise=None), Query(Kind.DELTA, clip)
    if curvature_clip > MOST_CONDITION * gamma:
        raise SordinoError(
            f"curvature_clip: {curvature_clip:g} is over {MOST_CONDITION:g} times alpha + rho = {gamma:g}, where "
            "rounding would break the bound; lower it, or raise alpha."
        )
    # A covariance is about all records, and the number of steps of cg is too small for a crowded minibatch.
    lemma = shift(clip, limit, curvature_clip, gamma, error, sampled=kind is not Kind.GRAM and not cg)
    inside = Query(Kind.GRADIENT, clip, noise=None), Query(kind, curvature_clip, calls, noise=None)
    return *inside, Query(Kind.DELTA, limit / gamma, bound=lemma)  # no direction is longer: the clip only makes sure


def checked(limit_by: str, solver: str = "direct", **above_zero: float | Tensor) -> None:
    check_above_zero(**above_zero)
    for name, choice, allowed in (("limit_by", limit_by, LIMITS), ("solver", solver, SOLVERS)):
        check_known(name, choice, allowed)


def fednew(*, unit: Unit = Unit.RECORD, lr: float = 1.0, alpha: float = 0.1, rho: float = 1.0) -> Method:
    """theta <- theta - lr y, y one ADMM pass at (mean H_i + alpha I)^-1 mean g_i. No noise: run it with epsilon = inf.

    Args:
        unit: Whose data are protected, one record or one whole client.
        lr: Step size of the server.
        alpha: Damping of the Hessian, above 0.
        rho: Weight of the pull towards the common direction, above 0.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The direction y_i of each client, without noise.
        Sensitivity: Not bounded.
        Proved for: nothing.
        Reason: FedNew is the method that dp-fednew makes private; a plan refuses it unless epsilon is inf.

    Example:
        >>> from sordino.methods import build
        >>> method = build("fednew", lr=0.5)
        >>> method.proves
        frozenset()
    """
    checked("projection", alpha=alpha, rho=rho, lr=lr)
    inside = Query(Kind.GRADIENT, noise=None), Query(Kind.CURVATURE, noise=None)
    method = admm("fednew", unit, (*inside, Query(Kind.DELTA)), direct(alpha + rho), lr=lr, rho=rho)
    return method._replace(proves=frozenset(), caveat="FedNew adds no noise: set epsilon = inf, or use dp-fednew.")


def dp_fednew(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    curvature_clip: float = 0.1,
    limit: float = 2.0,
    lr: float = 3.0,
    alpha: float = 1.0,
    rho: float = 1.0,
    duals: bool = True,
    limit_by: str = "projection",
    solver: str = "direct",
    curvature: str = "hessian",
) -> Method:
    """theta <- theta - lr y, y the noised mean of (H_i + (alpha + rho) I)^-1 (g_i - lambda_i + rho y).

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's direction.
        curvature_clip: Bound on a record's Hessian, or g g^T (Frobenius norm); record level.
        limit: Bound on the norm of the right side; record level.
        lr: Step size of the server.
        alpha: Damping of the Hessian, above 0.
        rho: Weight of the pull towards the common direction, above 0.
        duals: Keep dual variables at the clients.
        limit_by: How the right side stays within the limit: `projection`, or `paper-xi`, which is not private.
        solver: `direct`, or `cg`, which builds no Hessian.
        curvature: H_i is the `hessian`, of linear models, or `fisher`, the mean of g g^T; of a network, for the last
            layer alone.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The direction y_i, noised once per round and client. Gradient and curvature stay at the client without
            noise.
        Sensitivity: Record level: the bound of `admm.shift`, proved for one of m records, or of a Poisson minibatch of
            m expected ones, where a replaced record counts as two that join. Client level: clip if one joins or leaves;
            2 clip if it is replaced.
        Proved for: record and client level; untrusted-server. With duals = False: untrusted-server, secure-aggregation
            and trusted-server.
            With limit_by = paper-xi: nothing. With solver = cg: all records of a client only.
        Reason: Dual variables are hidden client state; what sums of messages reveal about them is not proved.

    Example:
        >>> from sordino.methods import build
        >>> method = build("dp-fednew", duals=False)
        >>> sorted(str(trust) for _, trust in method.proves)
        ['secure-aggregation', 'trusted-server', 'untrusted-server']
    """
    checked(limit_by, solver, clip=clip, curvature_clip=curvature_clip, limit=limit, lr=lr, alpha=alpha, rho=rho)
    check_known("curvature", curvature, CURVATURES)
    if (fisher := curvature == "fisher") and solver == "cg":
        raise SordinoError("solver: cg takes products with Hessians; use curvature = hessian, or solver = direct.")
    gamma = alpha + rho
    most = limit if unit is Unit.RECORD else math.inf
    # At record level the condition number is at most 1 + curvature_clip / gamma, whatever the data: so is cg's error.
    steps = steps_for(1 + curvature_clip / gamma, ACCURACY) if solver == "cg" else 0
    kind, bound = Kind.FISHER if fisher else Kind.CURVATURE, curvature_clip if unit is Unit.RECORD else math.inf
    queries = answers(unit, kind, clip, limit, curvature_clip, gamma, steps)
    solve = conjugate(gamma, steps) if steps else (last_layer if fisher else direct)(gamma, bound)
    method = admm("dp-fednew", unit, queries, solve, lr=lr, rho=rho, limit=most, limit_by=limit_by, duals=duals)
    return method._replace(assumes=(CG_ASSUMPTION,)) if steps and unit is Unit.RECORD else method


def direct(gamma: float, curvature_clip: float = math.inf) -> Solve:
    """Build H_i and factorise it. curvature_clip: inf where the message is clipped instead."""

    def solve(ask: Ask, batch: Batch, theta: Tensor, v: Tensor, cache: Tree) -> Tensor:
        check_rounding(v.shape[-1], batch.crowding * curvature_clip / gamma)
        return torch.cholesky_solve(v.unsqueeze(-1), damped(ask.curvature(theta, on=batch), gamma)).squeeze(-1)

    return solve


def last_layer(gamma: float, curvature_clip: float = math.inf) -> Solve:
    """As `direct`, where H_i is the Fisher matrix of the last parameters, and 0 for all others."""

    def solve(ask: Ask, batch: Batch, theta: Tensor, v: Tensor, cache: Tree) -> Tensor:
        F = ask.fisher(theta, on=batch)
        body, head = v[..., : -F.shape[-1]], v[..., -F.shape[-1] :]
        check_rounding(F.shape[-1], batch.crowding * curvature_clip / gamma)
        return torch.cat([body / gamma, torch.cholesky_solve(head.unsqueeze(-1), damped(F, gamma)).squeeze(-1)], -1)

    return solve


def conjugate(gamma: float, steps: int) -> Solve:
    """Products with H_i only."""

    def solve(ask: Ask, batch: Batch, theta: Tensor, v: Tensor, cache: Tree) -> Tensor:
        return conjugate_gradients(lambda p: ask.curvature_times(theta, p, on=batch) + gamma * p, v, steps)

    return solve
