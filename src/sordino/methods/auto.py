"""auto: every step follows from public numbers; nothing is tuned.

The first round releases the mean of u u^T, u = (x, k) with k = CONSTANT radius: each record adds one matrix, clipped to
norm radius^2 + k^2, and replacing it costs sqrt 2 times that, because the matrices are positive semi-definite. It tells
the mean of the records too (`rules.centring`). All other rounds release a gradient about that mean and take Kalman's
steps (`rules.kalman`). A record is centred by itself, by released numbers, so its gradient is clipped and accounted for
as in DP-FedGD. The first EARLY_ROUNDS gradients get a larger part of the budget, so that the model is useful long
before the last round; later rounds still use what they released. Every release is linear, so every trust model is
proved. Records should have one norm, `radius`: a run scales them (`normalize = record`).

The weights of two classes are handed out shorter than the steps left them, so that risks are as sure as they should be
(`rules.confidence`): that costs no privacy, because it follows from releases and public numbers.

A survival model begins with a noised histogram of labels, its life table (`rules.life_table`), which gives the baseline
hazards. A run of fewer rounds than all that needs releases it in the first round (`methods.few_rounds`). A network has
no such matrix: `methods.network`.
"""

from __future__ import annotations

import math

from sordino.core import Ask, Broadcast, Centre, Kind, Local, Method, Query, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.methods.few_rounds import few_round_stages
from sordino.methods.network import network_stage
from sordino.rules import estimate_covariance, kalman
from sordino.rules.basic import check_above_zero
from sordino.rules.life_table import estimate_hazard_curvature, first_hazard, release_life_table

EARLY_ROUNDS, MOST_INTERVALS, MOST_FEW_ROUNDS = 3, 100, 10
CONSTANT = 0.7  # the last feature of u over the radius, where A tells the mean of the records too
SEVERAL_MINIBATCHES = (
    "With several minibatches per round only a client's own noise protects it; nothing is proved about sums of "
    "messages. Use minibatches = 1."
)


def auto(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 5.0,
    radius: float = 10.0,
    prior: float = 1.0,
    doubt: float = 10.0,
    early_share: float = 0.3,
    covariance_share: float = 0.05,
    intervals: int = 0,
    few_rounds: int = 0,
    centred: bool = True,
    network: bool = False,
    minibatches: int = 1,
) -> Method:
    """A = noised mean of u u^T, once; theta <- theta - K G, with K derived from A, the noise and the rounds.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message; half of radius.
        radius: Norm to which records are scaled.
        prior: Standard deviation of a logit before training.
        doubt: Doubt about the curvature; 0 averages all rounds equally.
        early_share: Part of mu squared for the first three gradients; 0 gives them as much as any others.
        covariance_share: Part of mu squared for A; of survival, as much again for the life table.
        intervals: Of survival, the number of public intervals; a run takes it from its schema. 0 for other tasks.
        few_rounds: Of a run with fewer rounds than `least_rounds`, their number; a run sets it. 0 for other runs.
        centred: Of classes, gradients are about the mean of the records, which A tells; a run whose labels are numbers
            sets it to false, because nothing is gained there. Nothing is centred with `intervals` or `few_rounds`.
        network: The model is a network; a run sets it. Gradients are normalised, and only `clip` and `minibatches` have
            a meaning.
        minibatches: Of a network, gradients per round, each of one minibatch; a run that has minibatches and an
            untrusted server sets 5.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The noised mean of u u^T, u = (x, 0.7 radius), in the first round, then one noised gradient per round.
            Of survival, before these, the noised histogram of labels by interval. With few_rounds, all three together
            in the first round. Of a network, only noised gradients: `minibatches` per round, each of one minibatch, or
            of all records where a run has no minibatches.
        Sensitivity: Covariance: 1.49 radius^2, or sqrt(2) times that if a unit is replaced; where nothing is centred,
            1 + radius^2. Gradient: clip, or 2 clip. Histogram: 1, or sqrt(2). With few_rounds at client level, a
            client's first message: 1, or 2.
        Proved for: record and client level (networks: record and person level); untrusted-server, secure-aggregation
            and trusted-server. With several minibatches per round, untrusted-server only.
        Reason: Every release is linear, and the steps are computed from releases and public numbers. A mean of several
            releases is not one release, which is what sums are counted by.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("auto", radius=4.0, clip=2.0)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        33.71485132697459
    """
    check_above_zero(clip=clip, radius=radius, prior=prior)
    proves = frozenset((unit, trust) for trust in Trust)
    if network:
        untrusted_only = frozenset({(unit, Trust.UNTRUSTED_SERVER)})
        stage = network_stage(unit, clip, minibatches)
        return Method("auto", unit, (stage,), proves if minibatches == 1 else untrusted_only, SEVERAL_MINIBATCHES)
    if not 0 <= doubt < math.inf:
        raise SordinoError(f"doubt: {doubt} must be a finite number, 0 or more.")
    if not (covariance_share > 0 and early_share >= 0 and covariance_share + early_share < 1):
        raise SordinoError(
            f"covariance_share, early_share: {covariance_share} and {early_share} must be above 0, and 0 or more, and "
            "leave something for other rounds."
        )
    if not 0 <= intervals <= MOST_INTERVALS:
        raise SordinoError(f"intervals: {intervals} must lie in [0, {MOST_INTERVALS}]; a schema sets it.")
    if not 0 <= few_rounds <= MOST_FEW_ROUNDS:
        raise SordinoError(f"few_rounds: {few_rounds} must lie in [0, {MOST_FEW_ROUNDS}]; a run sets it.")
    whole, constant = unit is Unit.CLIENT, CONSTANT * radius if centred and not (intervals or few_rounds) else 1.0
    most = constant**2 + radius**2
    if few_rounds:
        few = few_round_stages(unit, few_rounds, intervals, clip=clip, most=most, prior=prior, doubt=doubt)
        return Method("auto", unit, few, proves)
    spent = covariance_share * (2 if intervals else 1)
    if spent + early_share >= 1:
        raise SordinoError(f"covariance_share: {covariance_share} leaves nothing for gradients; choose less.")

    def release_gram(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return ask.gram(constant).flatten(-2) if whole else ask.gram(constant)

    def released(kind: Kind, bound: float, share: float | None, psd: bool = False) -> tuple[Query, ...]:
        if whole:
            return Query(kind, noise=None), Query(Kind.DELTA, bound, share=share, psd=psd)
        return (Query(kind, bound, share=share, psd=psd),)

    def steps(share: float | None, rounds: int | None, part: float | None) -> Stage:
        rule = kalman(clip=clip, most=most, prior=prior, doubt=doubt, part=part)
        return Stage(Local(centred_gradient), rule, released(Kind.GRADIENT, clip, share), rounds)

    def release_histogram(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        return ask.tally(broadcast.theta)

    gram = released(Kind.GRAM, most, covariance_share, psd=True)
    first: tuple[Stage, ...]
    if intervals:
        table = release_life_table(intervals, first_hazard(intervals))
        cells = released(Kind.TALLY, 1.0, covariance_share, psd=True)
        first = (
            Stage(Local(release_histogram), table, cells, rounds=1),
            Stage(Local(release_gram), estimate_hazard_curvature(clip, most, prior), gram, rounds=1),
        )
    else:
        rule = estimate_covariance(most, constant if centred else None)
        first = (Stage(Local(release_gram), rule, gram, rounds=1),)
    if early_share:
        part = early_share / (1 - spent)
        stages: tuple[Stage, ...] = (*first, steps(early_share, EARLY_ROUNDS, part), steps(None, None, None))
    else:
        stages = (*first, steps(None, None, 1.0))
    return Method("auto", unit, stages, proves, fewer="build('auto', few_rounds=ROUNDS)")


def centred_gradient(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
    """The gradient about the centre that the server found, if it looked for one."""
    centre = broadcast.extras
    return ask.gradient(broadcast.theta, centre=centre if isinstance(centre, Centre) else None)


def least_rounds(intervals: int, early_share: float) -> int:
    """The fewest rounds without `few_rounds`."""
    return (2 if intervals else 1) + (EARLY_ROUNDS if early_share else 0) + 1
