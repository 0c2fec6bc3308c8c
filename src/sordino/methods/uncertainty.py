"""Standard errors of coefficients: three more rounds, which release gradients and Hessians near the trained model.

Training clips gradients, which biases a model, and its steps end before they converge. So intervals are not centred on
the trained coefficients w but on Newton steps from them, w - H^-1 g, with gradients g and Hessians H of their own.
Records have norm at most `radius`, so the bounds of these rounds cut nothing: g and H are unbiased, and their noise is
known. The first two steps remove what the clip did. Risks that are too sure have a small H, and a whole step from them
goes too far, so these two are shortened (`rules.newton_steps`). The last one, a whole step, leaves little.
`training.intervals` makes standard errors of the last round's releases; the trained model stays as it is.

One record adds a gradient of norm at most residual sqrt(1 + radius^2) and a positive semi-definite Hessian of Frobenius
norm at most curvature (1 + radius^2), with `Terms` of its task. Both are clipped there, so the bounds hold for any
record. Replacing a record costs 2 times the first and sqrt 2 times the second. A person adds at most as much as so many
records, and is clipped there.

The spread of a number around its prediction does not follow from the prediction, as that of a class does. So of
quantities and counts, the last round also releases the mean of g g^T over records, which is positive semi-definite and
clipped to the square of the gradient's bound. Its trace over that of H is the dispersion.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Ask, Broadcast, Kind, Local, Method, Query, Rule, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.rules.newton_steps import Curve, SpreadCurve, newton_steps

MOST_SHARE, SHARES = 0.5, (0.15, 0.15, 0.7)  # the second of the budget, for each of the rounds
SPREAD_SHARE = 0.1  # of the last round's budget, for the spread of numbers
GRADIENT, HESSIAN, SPREAD = 0, 1, 2  # queries of the stage
UNCERTAINTY_ROUNDS = len(SHARES)


class Terms(NamedTuple):
    """What one record adds at most, in units of its features."""

    residual: float  # of |d loss / d logits|
    curvature: float  # of its derivative
    numeric: bool  # whether labels are numbers, whose spread is released too


OF_CLASSES = Terms(math.sqrt(2), 0.5, numeric=False)  # |p - y|, and |diag p - p p^T|
OF_QUANTITIES = Terms(2.0, 1.0, numeric=True)  # of labels and predictions in -1 … 1


def of_counts(most: float) -> Terms:
    """Terms of a Poisson model whose labels and rates are at most `most`."""
    return Terms(most, most, numeric=True)


def with_uncertainty(
    method: Method, share: float, radius: float, terms: Terms = OF_CLASSES, records: int = 1
) -> Method:
    """The method, followed by rounds that each release a gradient and a Hessian, at its model and one step on each.

    Args:
        method: A method for records or persons.
        share: Part of mu squared for these rounds; 0 returns the method unchanged.
        radius: Bound on the norm of a record.
        terms: What one record adds at most.
        records: The most records of one protected unit.

    Returns:
        The method with three more stages.

    Raises:
        SordinoError: The share is out of range, or the method protects whole clients.
    """
    if not share:
        return method
    if not 0 < share <= MOST_SHARE:
        raise SordinoError(f"uncertainty: {share} must lie in (0, {MOST_SHARE}], a part of the budget; 0.2 is usual.")
    if method.unit is Unit.CLIENT:
        raise SordinoError("uncertainty: it is derived for records and persons, not for unit = client; leave it out.")
    last, squared = method.stages[-1].rule, 1 + radius**2
    bounds = (records * terms.residual * math.sqrt(squared), records * terms.curvature * squared)

    def part(number: int) -> float:
        """The share of the gradient, and of the Hessian, in a round."""
        return share * SHARES[number] / 2 * (1 - SPREAD_SHARE if spreads(number) else 1)

    def spreads(number: int) -> bool:
        return terms.numeric and number == len(SHARES) - 1

    def compute(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> Curve:
        return Curve(ask.gradient(broadcast.extras), ask.curvature(broadcast.extras))

    def compute_spread(ask: Ask, broadcast: Broadcast[Tensor], memory: Tree, cache: Tree) -> SpreadCurve:
        return SpreadCurve(*compute(ask, broadcast, memory, cache), ask.fisher(broadcast.extras))

    def rule(number: int) -> Rule:
        if not number:
            return newton_steps(last, 0.0, damped=False)
        factor = bounds[HESSIAN] / bounds[GRADIENT] * math.sqrt(part(number) / part(number - 1))
        return newton_steps(None, factor, damped=not terms.numeric)

    def stage(number: int) -> Stage:
        queries: tuple[Query, ...] = (
            Query(Kind.GRADIENT, bounds[GRADIENT], share=part(number)),
            Query(Kind.CURVATURE, bounds[HESSIAN], share=part(number), psd=True),
        )
        if not spreads(number):
            return Stage(Local(compute), rule(number), queries, rounds=1)
        rest, bound = share * SHARES[number] * SPREAD_SHARE, records * terms.residual**2 * squared
        queries += (Query(Kind.FISHER, bound, share=rest, psd=True),)
        return Stage(Local(compute_spread), rule(number), queries, rounds=1)

    stages = (*(each.with_part(1 - share) for each in method.stages), *map(stage, range(len(SHARES))))
    registered = None if method.by_hand else (stages, method.proves)
    return method._replace(stages=stages, registered=registered)
