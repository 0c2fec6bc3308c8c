"""Methods that use the covariance of the features instead of the Hessian: DP-FedFC and DP-FedNew-FC.

FedFC releases the covariance in a separate round, and preconditions gradients by its inverse. Each record adds u u^T,
clipped to norm C. Replacing it costs sqrt(2) C, because these matrices are positive semi-definite; so does replacing a
client's clipped covariance. Every release is linear, so every trust model is proved. In FedNew-FC the covariance stays
at the client, which factorises it once; it costs no budget.
"""

from __future__ import annotations

from sordino.core import Ask, Batch, Broadcast, Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.admm import admm, check_rounding
from sordino.methods.fednew import answers, checked
from sordino.rules.basic import stateless
from sordino.rules.matrix import damped, floored_inverse


def fedfc(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    covariance_clip: float = 1.0,
    lr: float = 0.2,
    gamma: float = 0.1,
    covariance_share: float = 0.0,
) -> Method:
    """A = noised mean of u u^T, once; theta <- theta - lr (A + gamma I)^-1 G.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's preconditioned gradient.
        covariance_clip: Bound on the norm of a record's u u^T, or of a client's mean of them.
        lr: Step size of the server.
        gamma: Ridge that is added to A, above 0.
        covariance_share: Part of mu squared for A; 0 gives it as much as any other release.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The noised mean of u u^T in the first round, then one noised gradient per round.
        Sensitivity: Covariance: covariance_clip, or sqrt(2) covariance_clip if a unit is replaced. Gradient: clip, or 2
            clip.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: Every release is linear. Two positive semi-definite matrices of norm C differ by at most sqrt(2) C,
            because their inner product is not negative.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedfc", covariance_clip=2.0)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.8284271247461903
    """
    checked("projection", clip=clip, covariance_clip=covariance_clip, lr=lr, gamma=gamma)
    if not 0 <= covariance_share < 1:
        raise SordinoError(f"covariance_share: {covariance_share} must lie in [0, 1).")
    whole, share = unit is Unit.CLIENT, covariance_share or None

    def release_gram(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return ask.gram().flatten(-2) if whole else ask.gram()

    def invert(theta: Tensor, facts: Facts, A: Tree) -> Tensor:
        eye = torch.eye(rows(facts)).to(theta)
        if isinstance(A, tuple):  # no client took part in the first stage
            return eye
        return floored_inverse(A.reshape(*theta.shape[:-1], *eye.shape) + gamma * eye, gamma)

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Tensor:
        g = ask.gradient(broadcast.theta)
        return times(broadcast.extras, g) if whole else g

    def update(g: Tensor, P: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return -lr * (g if whole else times(P, g)), P

    covariance: tuple[Query, ...]
    gradients: tuple[Query, ...]
    if whole:
        covariance = (Query(Kind.GRAM, noise=None), Query(Kind.DELTA, covariance_clip, share=share, psd=True))
        gradients = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, clip))
    else:
        covariance = (Query(Kind.GRAM, covariance_clip, share=share, psd=True),)
        gradients = (Query(Kind.GRADIENT, clip),)
    store_covariance = Rule(stateless, lambda A, state, theta, t: (torch.zeros_like(theta), A))
    rule = Rule(invert, update, broadcast=lambda P: P) if whole else Rule(invert, update)
    stages = (
        Stage(Local(release_gram), store_covariance, covariance, rounds=1),
        Stage(Local(compute), rule, gradients),
    )
    return Method("dp-fedfc", unit, stages, frozenset((unit, trust) for trust in Trust))


def rows(facts: Facts) -> int:
    """Features, as theta has them."""
    if len(facts.shapes) != 1:
        raise SordinoError("model: the covariance of the features stands for the Hessian of a linear model only.")
    return facts.shapes[0][0]


def times(P: Tensor, g: Tensor) -> Tensor:
    """P times g, read as a matrix with one column per output."""
    return (P @ g.reshape(*g.shape[:-1], P.shape[-1], -1)).flatten(-2)


def dp_fednew_fc(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    covariance_clip: float = 0.1,
    limit: float = 2.0,
    lr: float = 3.0,
    alpha: float = 1.0,
    rho: float = 1.0,
    duals: bool = True,
) -> Method:
    """dp-fednew with the client's own mean of u u^T for its Hessian.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's direction.
        covariance_clip: Bound on the norm of a record's u u^T; record level.
        limit: Bound on the norm of the right side; record level.
        lr: Step size of the server.
        alpha: Damping of the covariance, above 0.
        rho: Weight of the pull towards the common direction, above 0.
        duals: Keep dual variables at the clients.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The direction y_i, noised once per round and client. Gradient and covariance stay at the client
            without noise.
        Sensitivity: Record level: the bound of `admm.shift`, proved for one of m records. Client level: clip if one
            joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server. With duals = False: untrusted-server, secure-aggregation
            and trusted-server.
        Reason: Dual variables are hidden client state; what sums of messages reveal about them is not proved.

    Example:
        >>> from sordino.methods import build
        >>> method = build("dp-fednew-fc", duals=False)
        >>> sorted(str(trust) for _, trust in method.proves)
        ['secure-aggregation', 'trusted-server', 'untrusted-server']
    """
    checked("projection", clip=clip, covariance_clip=covariance_clip, limit=limit, lr=lr, alpha=alpha, rho=rho)

    ratio = covariance_clip / (alpha + rho) if unit is Unit.RECORD else float("inf")

    def factorise(ask: Ask) -> Tensor:
        gram = ask.gram()
        check_rounding(gram.shape[-1], ratio, inverse=True)
        return torch.cholesky_inverse(damped(gram, alpha + rho))

    def solve(ask: Ask, batch: Batch, theta: Tensor, v: Tensor, inverse: Tensor) -> Tensor:
        return times(inverse, v)

    queries = answers(unit, Kind.GRAM, clip, limit, covariance_clip, alpha + rho)
    most = limit if unit is Unit.RECORD else float("inf")
    return admm("dp-fednew-fc", unit, queries, solve, lr=lr, rho=rho, limit=most, duals=duals, prepare=factorise)
