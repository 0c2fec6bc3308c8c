"""Methods that put the covariance of the features in the place of the Hessian: DP-FedFC and DP-FedNew-FC.

FedFC spends one release on the covariance, in a round of its own, and preconditions gradients by its inverse. Each
record adds u u^T, cut to norm C: replacing it costs sqrt(2) C, for these are positive semi-definite; so does replacing
a user's clipped covariance. Every release is linear, so every trust model is proved.
FedNew-FC keeps the covariance at the client, where it is factorised once; nothing is spent on it.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.admm import admm
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

    clip: of a record's gradient, or of a user's preconditioned one. covariance_clip: of a record's u u^T, or of a
    user's mean of them. gamma: ridge. covariance_share: of mu squared; 0: as much as any other release.
    """
    checked("projection", clip=clip, covariance_clip=covariance_clip, lr=lr, gamma=gamma)
    if not 0 <= covariance_share < 1:
        raise SordinoError(f"covariance_share: {covariance_share} must lie in [0, 1).")
    user, share = unit is Unit.USER, covariance_share or None

    def look(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return ask.gram().flatten(-2) if user else ask.gram()

    def invert(theta: Tensor, facts: Facts, A: Tree) -> Tree:
        eye = torch.eye(rows(facts)).to(theta)
        if isinstance(A, tuple):  # nobody came
            return eye
        return floored_inverse(A.reshape(*theta.shape[:-1], *eye.shape) + gamma * eye, gamma)

    def walk(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        g = ask.gradient(broadcast.theta)
        return times(broadcast.extras, g) if user else g

    def update(g: Tree, P: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        return -lr * (g if user else times(P, g)), P

    seen: tuple[Query, ...]
    asked: tuple[Query, ...]
    if user:
        seen = (Query(Kind.GRAM, noise=None), Query(Kind.DELTA, covariance_clip, share=share, psd=True))
        asked = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, clip))
    else:
        seen = (Query(Kind.GRAM, covariance_clip, share=share, psd=True),)
        asked = (Query(Kind.GRADIENT, clip),)
    keep_it = Rule(stateless, lambda A, state, theta, t: (torch.zeros_like(theta), A))
    rule = Rule(invert, update, broadcast=lambda P: P) if user else Rule(invert, update)
    stages = (Stage(Local(look), keep_it, seen, rounds=1), Stage(Local(walk), rule, asked))
    return Method("dp-fedfc", unit, stages, frozenset((unit, trust) for trust in Trust))


def rows(facts: Facts) -> int:
    """Features, as theta has them."""
    if len(facts.shapes) != 1:
        raise SordinoError("model: the covariance of the features stands for the Hessian of a linear model only.")
    return facts.shapes[0][0]


def times(P: Tensor, g: Tensor) -> Tensor:
    """P times g, read as one column an output."""
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

    covariance_clip: of a record's u u^T, at record level. Others as in dp-fednew.
    """
    checked("projection", clip=clip, covariance_clip=covariance_clip, limit=limit, lr=lr, alpha=alpha, rho=rho)

    def factorise(ask: Ask) -> Tree:
        return torch.cholesky_inverse(damped(ask.gram(), alpha + rho))

    def solve(ask: Ask, theta: Tensor, v: Tensor, inverse: Tree) -> Tensor:
        return times(inverse, v)

    queries = answers(unit, Kind.GRAM, clip, limit, covariance_clip, alpha + rho)
    most = limit if unit is Unit.RECORD else float("inf")
    return admm("dp-fednew-fc", unit, queries, solve, lr=lr, rho=rho, limit=most, duals=duals, prepare=factorise)
