"""FedNewton for the last layer of a network (arXiv 2605.18656, algorithm 5): blocks of local steps on all parameters,
each followed by a damped Newton step on the head.

The curvature is the mean of g g^T over clipped per-record gradients of the head, which come last in theta: its clip is
the square of the gradient's clip. Every block is paid for. Like FedNewton, it is proved against an untrusted server.
"""

from __future__ import annotations

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.newton import NONLINEAR, gradient_share, local_round
from sordino.rules import chain, scale
from sordino.rules.matrix import floored_solve, identity_like


def newton_head(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    local_lr: float = 2.0,
    local_steps: int = 10,
    local_share: float = 0.5,
    curvature_share: float = 0.25,
    ridge: float = 0.1,
    damping: float = 0.1,
    blocks: int = 1,
) -> Method:
    """K local steps, then theta_i = theta - damping (F_i + ridge I)^-1 g_i on the last layer; that, `blocks` times.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        local_lr: Step size of the local steps.
        local_steps: Local steps of a block, K.
        local_share: Part of mu squared for all local steps, in (0, 1).
        curvature_share: Part of mu squared for all Fisher matrices; the gradients of the Newton steps get the rest.
        ridge: Added to the Fisher matrix F, whose negative eigenvalues count as 0; above 0.
        damping: Length of the Newton step, above 0.
        blocks: Repetitions of both; rounds beyond 2 blocks are Newton steps.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per block: the K noised gradients of its first round, then a noised gradient and a noised Fisher
            matrix of the last layer per round.
        Sensitivity: Gradient: clip, or 2 clip if a record is replaced. Fisher matrix: clip^2, or sqrt(2) clip^2,
            because g g^T is positive semi-definite.
        Proved for: record level; untrusted-server.
        Reason: Local steps and the inverse of a noised matrix are not linear in the noise; what their sums hide is not
            proved.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("fednewton-head", blocks=2)
        >>> method.stages[1].queries[1].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.4142135623730951
    """
    rest = gradient_share(local_share, curvature_share)
    if not (ridge > 0 and damping > 0 and blocks >= 1):
        raise SordinoError("ridge, damping: must be above 0, and blocks at least 1.")

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        g, F = ask.gradient(broadcast.theta), ask.fisher(broadcast.theta)
        body, head = g[..., : -F.shape[-1]], g[..., -F.shape[-1] :]
        step = floored_solve(F + ridge * identity_like(F), head, ridge)
        return torch.cat([0 * body, -damping * step], -1)

    start = local_round(clip, local_lr, local_steps, local_share / blocks)
    fisher = Query(Kind.FISHER, clip**2, share=curvature_share / blocks, psd=True)
    refine = Stage(Local(compute), chain(scale(1.0)), (Query(Kind.GRADIENT, clip, share=rest / blocks), fisher))
    early = (start, refine._replace(rounds=1)) * (blocks - 1)
    proves = frozenset({(unit, Trust.UNTRUSTED_SERVER)})
    return Method("fednewton-head", unit, (*early, start, refine), proves, NONLINEAR)
