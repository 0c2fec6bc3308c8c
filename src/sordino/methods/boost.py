"""DP-Boost: gradient-boosted trees with public splits, one tree per round."""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import (
    Ask,
    Broadcast,
    Facts,
    Kind,
    Local,
    Method,
    Query,
    Rule,
    Stage,
    Tree,
    Trust,
    Unit,
    leaf_curvature_unit,
)
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.basic import check_above_zero

LEAST_CURVATURE = 1e-6  # per record: of a leaf that hardly any record falls into
MOST_STEP = 1.0  # of a leaf in one round: log-odds, or half of a quantity's range


class BoostState(NamedTuple):
    """What the next round needs."""

    tree: Tensor  # that the next round fits
    std: Tensor  # of the noise on one number of the aggregate
    unit: Tensor  # in which curvatures are sent


def leaf_sums(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Tensor:
    return ask.leaves(broadcast.theta, broadcast.extras)


def boost(*, unit: Unit = Unit.RECORD, clip: float = 0.7, lr: float | Tensor = 0.5, damping: float = 1.0) -> Method:
    """Boosted trees with public splits: v_leaf <- v_leaf - lr G_leaf / (H_leaf + damping sigma), one tree per round.

    It trains the model `trees`. Round t fits tree t (after the last tree the first one again): G and H are the noised
    sums of residuals and curvatures per leaf. `damping` weighs the noise's standard deviation sigma against the
    curvature, so a leaf with few records hardly moves.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's residuals and curvatures, or of a client's message.
        lr: Part of Newton's step that is taken.
        damping: Standard deviations of the noise that are added to the curvature of a leaf.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sums of residuals and curvatures by leaf of one tree (record level),
            or their clipped mean with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced. A record is in one leaf, and its vector
            is clipped; the splits are public.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model and the number of the tree, and the
            server only post-processes sums of releases.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> build("dp-boost").stages[0].queries[0].sensitivity(Adjacency.ADD_REMOVE, Unit.RECORD)
        0.7
    """
    check_above_zero(clip=clip)
    if not isinstance(lr, Tensor) and not lr > 0:
        raise SordinoError(f"lr: {lr} must be above 0.")
    if not damping >= 0:
        raise SordinoError(f"damping: {damping} must be at least 0.")

    def init(theta: Tensor, facts: Facts, before: Tree) -> BoostState:
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        return BoostState(
            theta.new_zeros(*theta.shape[:-1], 1), std, theta.new_tensor(leaf_curvature_unit(facts.numeric))
        )

    def update(sums: Tensor, state: BoostState, theta: Tensor, t: int) -> tuple[Tensor, BoostState]:
        residual, curvature = sums.chunk(2, -1)
        size = residual.shape[-1]  # numbers of one tree: leaves x outputs
        noise = state.std / state.unit
        value = -lr * residual / (torch.maximum(curvature / state.unit, noise) + damping * noise + LEAST_CURVATURE)
        step, first = torch.zeros_like(theta), int(state.tree.flatten()[0]) % (theta.shape[-1] // size) * size
        step[..., first : first + size] = value.clamp(-MOST_STEP, MOST_STEP)
        return step, state._replace(tree=state.tree + 1)

    queries = (
        (Query(Kind.LEAVES, clip),)
        if unit is Unit.RECORD
        else (Query(Kind.LEAVES, math.inf, noise=None), Query(Kind.DELTA, clip))
    )
    rule = Rule(init, update, broadcast=lambda state: state.tree)
    return Method(
        "dp-boost", unit, (Stage(Local(leaf_sums), rule, queries),), frozenset((unit, trust) for trust in Trust)
    )
