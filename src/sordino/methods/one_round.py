"""dp-class-means and dp-statistics: recipes of one round, to compare other methods with.

Both release the mean gradient at the first theta, which is zero: per class, the mean of (1/K - indicator of the class)
times the record. Class means take a multiple of its negative as the model. Noised statistics also release A, the mean
of u u^T, and regress on indicators of the classes; of a quantity, this is ridge regression.

The multiple K (a logistic model with one output: 4, least squares: 1) makes the regression Newton's first step, because
the Hessian at zero is A / K. It does not change which class is predicted, only how sure the probabilities are.
"""

from __future__ import annotations

from sordino.core import Facts, Kind, Local, Method, Query, Rule, Stage, Tree, Trust, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.covariance import times
from sordino.methods.fedgd import gradient
from sordino.methods.few_rounds import gradient_and_gram
from sordino.rules.basic import check_above_zero
from sordino.rules.estimates import matrix_of
from sordino.rules.first_round import FirstAnswers, unpacked


def class_means(*, unit: Unit = Unit.RECORD, clip: float = 5.0, scale: float = 1.0) -> Method:
    """theta = -scale K G, G the noised mean gradient at zero of K classes, released once.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        scale: How sure the probabilities are.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Once per client, the noised sum of clipped per-record gradients at zero (record level), or the
            client's clipped mean gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: There is one release, and the server only post-processes sums of it.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-class-means", clip=1.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        3.0
    """
    check_above_zero(clip=clip, scale=scale)

    def update(G: Tensor, K: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return -scale * K * G, K

    queries: tuple[Query, ...] = (Query(Kind.GRADIENT, clip),)
    if unit is Unit.CLIENT:
        queries = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, clip))
    stage = Stage(Local(gradient), Rule(newton_factor, update), queries, rounds=1)
    return Method("dp-class-means", unit, (stage,), frozenset((unit, trust) for trust in Trust))


def statistics(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 5.0,
    radius: float = 10.0,
    share: float = 0.2,
    ridge: float = 1.0,
    scale: float = 1.0,
) -> Method:
    """theta = -scale K (A + ridge I)^-1 G, from the noised mean A of u u^T and gradient G at zero, released once.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient; at client level, its unit in a client's message.
        radius: Norm to which records are scaled; u u^T has norm radius^2 + 1 at most.
        share: Part of mu squared for A.
        ridge: Added to the eigenvalues of A, of which negative ones count as 0; above 0.
        scale: How sure the probabilities are.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Once per client, the noised mean of u u^T and the noised sum of clipped per-record gradients at zero
            (record level), or both means as one clipped vector with noise (client level).
        Sensitivity: Covariance: 1 + radius^2, or sqrt(2) times that if a record is replaced. Gradient: clip, or 2 clip.
            A client's message: 1, or 2.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: Both are linear and asked at the first model, which is public, and the server only post-processes sums.
            Two positive semi-definite matrices of norm C differ by at most sqrt(2) C.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> queries = build("dp-statistics", radius=3.0).stages[0].queries
        >>> [query.sensitivity(Adjacency.ADD_REMOVE, Unit.RECORD) for query in queries]
        [5.0, 10.0]
    """
    check_above_zero(clip=clip, radius=radius, ridge=ridge, scale=scale)
    if not 0 < share < 1:
        raise SordinoError(f"share: {share} must lie in (0, 1), the part of mu squared for the matrix; 0.2 is usual.")
    local, queries, units = gradient_and_gram(unit, clip, radius**2 + 1, 1 - share, share)

    def update(answers: FirstAnswers | Tensor, K: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        G, A = unpacked(answers, theta, units)
        values, V = torch.linalg.eigh((A + A.transpose(-1, -2)).double() / 2)
        inverse = (V / (values.clamp_min(0) + ridge).unsqueeze(-2)) @ V.transpose(-1, -2)
        return -scale * K * times(inverse.to(G), G), K

    stage = Stage(local, Rule(newton_factor, update), queries, rounds=1)
    return Method("dp-statistics", unit, (stage,), frozenset((unit, trust) for trust in Trust))


def newton_factor(theta: Tensor, facts: Facts, before: Tree) -> Tensor:
    """K, such that the Hessian at zero is A / K along differences of classes: the state of both rules."""
    _, outputs = matrix_of(facts)
    if facts.rates:
        raise SordinoError("method: a model of rates has no such step from zero; use auto, or dp-fedadam.")
    if facts.numeric:
        return theta.new_ones(1)
    return theta.new_full((1,), 4.0 if outputs == 1 else float(outputs))
