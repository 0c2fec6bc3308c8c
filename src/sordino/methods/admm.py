"""One ADMM pass per round on the Newton system, which FedNew and its private forms share (DP-FedNew, PoPETs 2025).

    v_i = g_i - lambda_i + rho y,   y_i = (H_i + (alpha + rho) I)^-1 v_i,   y = mean y_i,   theta <- theta - lr y
    lambda_i <- lambda_i + rho (y_i - y), with y_i as it was sent

Client level: y_i is clipped and noised. Record level: `shift` bounds how far one record moves y_i. The duals are hidden
client state, so sums of messages depend on more than what was released. So the method is proved against an untrusted
server only; without duals it is proved under every trust model. A client that was absent updates its dual with the y
that it receives when it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sordino.core import (
    Adjacency,
    Ask,
    Batch,
    Broadcast,
    Lemma,
    Local,
    Method,
    Query,
    Rule,
    Stage,
    Tree,
    Trust,
    Unit,
    nothing,
)
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.basic import zeros
from sordino.rules.limits import LIMITS

DUALS_CAVEAT = "Duals are hidden client state, so nothing is proved about sums of messages; duals = false avoids them."
UNSOUND = "Rescaling by xi changes without bound with the data near |g| = limit; use limit_by = projection."
ROUNDING_SLACK = 1e-6  # of the longest message: what the rounding of the two solutions may add to their difference


def shift(
    clip: float, limit: float, curvature_clip: float, gamma: float, error: float = 0.0, *, sampled: bool = False
) -> Lemma:
    """How far one of m records moves (H + gamma I)^-1 v, with |v| <= limit and mean Hessian H >= 0.

    A record moves v by clip / m (a projection is 1-Lipschitz), twice that if replaced; the inverse divides by gamma. It
    moves H by P >= 0, |P| <= h = curvature_clip / m: then 0 <= A^-1 - (A + P)^-1 <= h / (gamma (gamma + h)) I for A >=
    gamma I. Two matrices of that interval differ by no more than its width: once, even if replaced. A solver that is
    off by `error` adds it once for either neighbour. m is only a divisor: sums over any number of records may stand
    for the means, so that m may be the expected size of a minibatch (`sampled`) if v and H are about the same one. The
    proof is in docs/proofs.md, "DP-FedNew's direction".
    """

    def bound(m: float, adjacency: Adjacency) -> float:
        h, times = curvature_clip / m, 1 if adjacency is Adjacency.ADD_REMOVE else 2
        slack = 2 * error + ROUNDING_SLACK * limit / gamma
        return times * clip / (gamma * m) + limit * h / (gamma * (gamma + h)) + slack

    return Lemma("one record moves a damped Newton direction", bound, sampled)


def check_rounding(dimension: int, ratio: float, *, inverse: bool = False) -> None:
    """Refuse a system of equations whose solution float64 may round by more than ROUNDING_SLACK allows.

    With d equations, ratio = |H|_F / gamma at most and trace(A) <= gamma (d + sqrt(d) ratio), Cholesky's solution is
    off by at most (3 d + 2) u (d + sqrt(d) ratio) of the longest one, u = 2^-53 (Higham 2002, Theorems 10.3 and 10.4:
    the norm of |R^T| |R| is at most trace(A)). An inverse that is computed first adds 2 d^2 u sqrt(d + sqrt(d) ratio)
    (his Lemma 14.1, and |R^-1|_F^2 <= d / gamma). Two neighbours have twice that.

    Args:
        dimension: Number of equations.
        ratio: Bound on the curvature over gamma: that of one record, times the crowding of a minibatch; inf where the
            message is clipped, so that nothing is needed.
        inverse: The inverse matrix is computed, and multiplied by the right side.

    Raises:
        SordinoError: The bound exceeds nine tenths of the slack.
    """
    if math.isinf(ratio):
        return
    trace = dimension + math.sqrt(dimension) * ratio
    error = (3 * dimension + 2) * trace + inverse * 2 * dimension**2 * math.sqrt(trace)
    if 2 * error * 2.0**-53 > 0.9 * ROUNDING_SLACK:
        raise SordinoError(
            f"curvature_clip: {ratio:.3g} times alpha + rho with {dimension} parameters: rounding could move a "
            "direction by more than its bound allows; lower it, or raise alpha."
        )


class DualMemory(NamedTuple):
    """What a client stores."""

    dual: Tensor  # lambda_i
    sent: Tensor  # y_i as it was last sent


Solve = Callable[[Ask, Batch, Tensor, Tensor, Any], Tensor]  # (ask, batch, theta, v, cache) -> (H + gamma I)^-1 v


def admm(
    name: str,
    unit: Unit,
    queries: tuple[Query, ...],
    solve: Solve,
    *,
    lr: float,
    rho: float,
    limit: float = math.inf,
    limit_by: str = "projection",
    duals: bool = True,
    prepare: Callable[[Ask], Tree] = nothing,
) -> Method:
    """One ADMM pass per round: clients receive y and send y_i.

    Args:
        name: The method's name.
        unit: Record or client level.
        queries: What a client asks: gradient and curvature without noise, and the noised direction.
        solve: Solves for the direction.
        lr: Step size of the server.
        rho: Weight of the pull towards the common direction.
        limit: Bound on the norm of the right side v_i.
        limit_by: How v_i stays within the limit, a key of `LIMITS`.
        duals: Keep dual variables at the clients.
        prepare: Builds a client's cache.

    Returns:
        The method.
    """

    def dual(broadcast: Broadcast[Tensor], memory: DualMemory) -> Tensor:
        if not duals:
            return torch.zeros_like(broadcast.theta)
        return memory.dual + rho * (memory.sent - broadcast.extras)

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: DualMemory, cache: Tree) -> Tensor:
        batch = ask.sample()  # gradient and curvature are about the same records, as the account assumes
        g = ask.gradient(broadcast.theta, on=batch)
        v = LIMITS[limit_by](g, rho * broadcast.extras - dual(broadcast, memory), limit)
        return solve(ask, batch, broadcast.theta, v, cache)

    def update_memory(sent: Tensor, broadcast: Broadcast[Tensor], memory: DualMemory) -> DualMemory:
        return DualMemory(dual(broadcast, memory), sent)

    def update(y: Tensor, last: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return -lr * y, y

    def start(theta: Tensor, before: Tree) -> DualMemory:
        return DualMemory(torch.zeros_like(theta), torch.zeros_like(theta))

    rule = Rule(zeros, update, broadcast=lambda y: y)
    trusts = [t for t in Trust if not duals or t is Trust.UNTRUSTED_SERVER] if limit_by == "projection" else []
    local = Local(compute, update_memory, start, prepare) if duals else Local(compute, prepare=prepare)
    caveat = DUALS_CAVEAT if limit_by == "projection" else UNSOUND
    return Method(name, unit, (Stage(local, rule, queries),), frozenset((unit, t) for t in trusts), caveat)
