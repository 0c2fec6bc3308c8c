"""Steps that follow from public numbers only: the noise, the rounds, the model's shape, and one noised mean of u u^T.

Near zero the gradient of a softmax over c classes is linear in theta: G = H (theta - theta*) + noise of variance nu^2,
where H = A (x) (I - 1 1^T / c) / c and A is the mean of u u^T. If theta* is known up to a variance P along an
eigenvector of A, and h is the curvature there, the best linear step is Kalman's:

    theta <- theta - K G,   K = P h / (h^2 P + nu^2),   P <- P - (P h)^2 / ((1 + doubt) h^2 P + nu^2)

Without noise this is Newton's step, 1 / h. With much noise it is gradient descent with step P h / nu^2, which decreases
with P as releases are averaged. For least squares of labels in [-1, 1] the same holds everywhere, with H = A. There
nothing saturates, and too small an h makes steps that overshoot, so h is at least the edge of the noise on A. `doubt`
concerns h, which decreases as the model fits: it keeps P and the steps above 0. The curvature of a Poisson rate grows
with it, so h is multiplied by the rate of the mean record where that is above 1. Weights of classes, whose largest is
1, are in A, and so in h. P follows from A over the mean weight of a record, so that a logit has the same variance.

For classes, two corrections count where there is little noise. The curvature between two of c classes reaches A / 2,
far above A / c, and steps of 1 / h oscillate there. Differences of released gradients show it (`measured`); as far as
they do with certainty, steps are shorter. And a ridge (`pull_of`) keeps few records from being fitted exactly. Where
some classes are rare, the first gradient sets the intercepts alone (`rare_classes`). The curvature there is lower by
the impurity i of the classes; h is multiplied by i, and P by sqrt(i).

The steps are here; `estimates` has what they need to know: noise, curvature, prior and ridge.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Centre, Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.baseline import Baseline, recalibrated
from sordino.rules.centring import find_centre, no_centre, seen_along, with_one
from sordino.rules.confidence import Spread, moved, tempered, unspread
from sordino.rules.estimates import (
    MIN_VARIANCE,
    Secant,
    Setting,
    along,
    edge_of,
    grown,
    matrix_of,
    measured,
    noise_variance,
    raised,
    setting_of,
    spectrum,
    std_of,
    unmeasured,
)
from sordino.rules.rare_classes import intercepts_of
from sordino.tree import tree_map

DAMPING = 2.0  # of rates and hazards: a third of Newton's step
TRAINED = 0.5  # the curvature of classes as they are fitted over that at zero; where it is more, `measured` shows it


class SurvivalSetting(NamedTuple):
    """As `Setting`, where a survival model is trained."""

    cells_std: Tensor  # of the noise on a cell of the life table
    covariance_std: Tensor  # of the noise on A


class KalmanState(NamedTuple):
    """The state of `estimate_covariance` and `kalman`, along the eigenvectors of A."""

    vectors: Tensor  # V, the eigenvectors of A
    curvature: Tensor  # h; after `estimate_covariance`, the eigenvalues of A
    variance: Tensor  # P, the remaining uncertainty about theta*
    noise: Tensor  # variance of the noise on G; after `estimate_covariance`, the std of the noise on A
    growth: Tensor  # 1 if the curvature grows with the rate, exp(logit); 0 if it does not
    damping: Tensor  # how much of h^2 P the gain doubts, because steps change the curvature
    shift: Tensor  # of the constants of a survival model while it is trained, because its events are clipped
    cells: Tensor  # of a survival model, the noised histogram of its life table; else empty
    baseline: Baseline | tuple[()] = ()  # of a survival model, what its constants follow from at the end
    setting: Setting | SurvivalSetting | tuple[()] = ()  # of `rules.first_round`, public numbers that it needs
    ridge: Tensor | tuple[()] = ()  # of classes, what pulls weights towards 0 per unit of them
    secant: Secant | tuple[()] = ()  # of classes, the curvature that released gradients show
    factor: Tensor | tuple[()] = ()  # of classes, by which the clip cuts the first gradient of a record; later ()
    centre: Centre | tuple[()] = ()  # that gradients are about; () if features stay as they are
    level: Tensor | tuple[()] = ()  # the expected mean weight of a record, until A is known
    spread: Spread | tuple[()] = ()  # of two classes, what is known of the errors in the weights


def estimate_covariance(most: float, constant: float | None = None) -> Rule:
    """Store the spectrum of the noised covariance A for `kalman`, and the centre of the records.

    Args:
        most: Bound on |u|^2.
        constant: The last feature of u, if records shall be centred; those with numbers for labels are not. None if it
            is 1, and they stay as they are.

    Returns:
        A rule that leaves theta unchanged. If no client takes part, its vectors stay a 1 x 1 placeholder.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> KalmanState:
        one, std = theta.new_ones(1), std_of(theta, facts)
        zero, secant = 0 * one, unmeasured(theta, facts)
        centre = () if constant is None or facts.numeric else no_centre(theta, facts)
        state = KalmanState(one.view(1, 1), one, one, std, zero, zero, zero, one[:0], secant=secant)
        spread = Spread(*[zero] * len(Spread._fields)) if centre != () and has_risks(facts) else ()
        return state._replace(centre=centre, level=facts.mean_weight * one, spread=spread)

    def update(A: Tensor, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        rows, centre = math.isqrt(A[(0,) * (theta.dim() - 1)].numel()), state.centre
        A = A.reshape(*theta.shape[:-1], rows, rows)
        if constant is not None and isinstance(centre, Centre) and isinstance(state.level, Tensor):
            centre, value, V = find_centre(A, state.noise, most, constant, state.level)
        else:
            value, V = spectrum(A if constant is None else with_one(A, constant), state.noise, most)
        value, V, centre = tree_map(lambda part: part.to(theta), (value, V, centre))
        after = state._replace(vectors=V, curvature=value, variance=value.reciprocal(), centre=centre, level=())
        if isinstance(state.spread, Spread) and isinstance(centre, Centre) and constant is not None:
            seen = seen_along(A, state.noise, V, value[..., -1:], centre, constant)
            noised, std, weight = (part.to(theta) for part in seen)
            after = after._replace(spread=state.spread._replace(noised=noised, std=std, weight=weight))
        return torch.zeros_like(theta), after

    return Rule(init, update)


def kalman(*, clip: float, most: float, prior: float, doubt: float, part: float | None = 1.0) -> Rule:
    """The steps of this module, for a model of one matrix, after a stage of `estimate_covariance`.

    Args:
        clip: Clip of a record's gradient.
        most: Bound on |u|^2.
        prior: Standard deviation of a logit before training; every eigenvector contributes equally. `raised` makes it
            larger where there is much noise.
        doubt: Uncertainty of the curvature; 0 averages all rounds equally.
        part: This stage's part of the budget of all gradients; None for a stage that continues another.

    Returns:
        The rule.

    Raises:
        SordinoError: The stage before is not `estimate_covariance` or `kalman`, or the model is not one matrix.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> KalmanState:
        before = getattr(before, "kalman", before)
        if not isinstance(before, KalmanState):
            raise SordinoError("stages: kalman must follow estimate_covariance or kalman.")
        V, value, (rows, _) = before.vectors, before.curvature, matrix_of(facts)
        variance = noise_variance(theta, facts)
        if part is None or facts.intervals:
            return before._replace(noise=variance, factor=())
        if V.shape[-1] != rows:  # no client took part in the stage before
            value, V = spectrum(theta.new_zeros(*theta.shape[:-1], rows, rows), before.noise, most)
        setting = setting_of(theta, facts, clip, before.noise, variance * (part / facts.rounds))
        growth, damping = growth_of(theta, facts)
        before = before._replace(noise=variance, growth=growth, damping=damping)
        trained = TRAINED if isinstance(before.secant, Secant) else 1.0
        state = begun(before, value, V, setting, clip=clip, prior=prior, trained=trained)
        records = float(facts.sizes.sum())  # at client level sizes are not public
        if isinstance(state.spread, Spread):
            seen, known = state.spread, V is before.vectors and records > 0
            seen = seen if facts.persons else seen._replace(weight=torch.ones_like(seen.weight))
            state = state._replace(spread=unspread(value, seen, clip, records) if known else ())
        whole = facts.same_records and facts.mean_weight == 1 and not (facts.numeric or facts.persons)
        return state._replace(factor=cut_of(value, setting, clip) if whole and facts.sizes.sum() else ())

    def update(g: Tensor, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        theta = state.centre.parameters(theta) if isinstance(state.centre, Centre) else theta
        shift = torch.zeros_like(theta)
        if t < 1 and isinstance(state.factor, Tensor):
            shift, g, state = started(g, state, theta)
            theta = theta + shift
        V, h, P, variance = state[:4]
        h, damping, secant = h * grown(V, h, theta, state.growth), state.damping, state.secant
        if isinstance(secant, Secant):
            secant = measured(secant, g, theta, V, h, variance)
            damping = damping + (secant.ratio - 2 * secant.information.rsqrt() - 1).clamp_min(0)
        if isinstance(state.ridge, Tensor):
            g, damping = g + state.ridge * weights_of(theta, V), damping + state.ridge / h
        noise = noise_over_signal(h, P, variance)
        K = 1 / (h * (1 + damping + noise))
        if isinstance(state.spread, Spread):
            state = state._replace(spread=moved(state.spread, K, h, variance))
        step = -(V @ (K.unsqueeze(-1) * along(V, g))).flatten(-2)
        if isinstance(secant, Secant):
            outputs = theta.shape[-1] // V.shape[-1]
            secant = secant._replace(bias=outputs * variance * K.sum(-1, keepdim=True))
        step = state.centre.step(shift + step) if isinstance(state.centre, Centre) else shift + step
        return step, state._replace(variance=P * (1 - 1 / (1 + doubt + noise)), secant=secant)

    def model(theta: Tensor, state: KalmanState) -> Tensor:
        if isinstance(state.spread, Spread) and isinstance(state.centre, Centre):
            return tempered(theta, state.vectors, state.spread, state.centre)
        return unshifted(theta, state)

    return Rule(init, update, broadcast=lambda state: state.centre, model=model)


def noise_over_signal(h: Tensor, P: Tensor, variance: Tensor) -> Tensor:
    """The variance of the noise on G over that of what it says of theta."""
    return variance / (h.square() * P.clamp_min(MIN_VARIANCE))


def has_risks(facts: Facts) -> bool:
    """Whether the model is of two classes whose risks should be right: class weights change them on purpose."""
    return len(facts.shapes) == 1 and facts.shapes[0][-1] == 2 and not facts.numeric and facts.mean_weight == 1


def growth_of(theta: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
    """`growth` and `damping` of a KalmanState."""
    rates = float(facts.rates) * torch.ones_like(theta[..., :1])
    return rates, DAMPING * rates


def begun(
    state: KalmanState,
    value: Tensor,
    vectors: Tensor,
    setting: Setting,
    *,
    clip: float,
    prior: float,
    trained: float = 1.0,
) -> KalmanState:
    """The state before the first step.

    Args:
        state: What else it holds.
        value: Eigenvalues of A, as `spectrum` estimates them.
        vectors: Its eigenvectors.
        setting: Public numbers.
        clip: Clip of a record's gradient.
        prior: Standard deviation of a logit before training.
        trained: The curvature over that at zero.

    Returns:
        The state with the curvature and the prior along the eigenvectors, and the ridge.
    """
    rows, outputs = value.shape[-1], setting.outputs
    length = value.sum(-1, keepdim=True).sqrt()  # root mean square of |u|
    # An eigenvalue below the edge may be as large as it: where it must, a step goes no further.
    edge = edge_of(setting.covariance_std.to(value), rows)
    certain = value.maximum(setting.careful * edge)
    h = trained * certain / outputs * cut_of(value, setting, clip)  # clipping lowers the curvature
    P = prior**2 * setting.weight / (rows * value)
    larger = raised(h, P, setting.mean_noise, setting.weight)
    P = torch.where(setting.numeric > 0, P, larger)  # of numbers, a larger model is wrong
    return state._replace(vectors=vectors, curvature=h, variance=P, ridge=setting.pull * length.square())


def cut_of(value: Tensor, setting: Setting, clip: float) -> Tensor:
    """The factor by which the clip cuts a record's gradient at zero, if all records have one norm."""
    return clip / (setting.residual * value.sum(-1, keepdim=True).sqrt()).clamp_min(clip)


def started(g: Tensor, state: KalmanState, theta: Tensor) -> tuple[Tensor, Tensor, KalmanState]:
    """How far the first gradient moves the intercepts of rare classes; what is left of it, and the state there.

    Nothing changes if theta is not 0.
    """
    assert isinstance(state.factor, Tensor)
    outputs = theta.shape[-1] // state.vectors.shape[-1]
    found = intercepts_of(g[..., -outputs:], state.noise.sqrt(), state.factor)
    at_zero = (theta == 0).all(-1, keepdim=True)
    impurity = torch.where(at_zero, found.impurity, 1.0)
    shift = torch.nn.functional.pad(found.shift * at_zero, (theta.shape[-1] - outputs, 0))
    left = torch.where(impurity < 1, 0.0, g)
    h, P = state.curvature * impurity, state.variance * impurity.sqrt()
    state = state._replace(curvature=h, variance=P)
    if isinstance(state.secant, Secant):
        state = state._replace(secant=state.secant._replace(theta=state.secant.theta + shift))
    return shift, left, state


def weights_of(theta: Tensor, V: Tensor) -> Tensor:
    """theta with 0 for the intercepts, its last row."""
    outputs = theta.shape[-1] // V.shape[-1]
    return torch.cat([theta[..., :-outputs], torch.zeros_like(theta[..., -outputs:])], -1)


def unshifted(theta: Tensor, state: KalmanState) -> Tensor:
    """The model to hand out: of survival, with the constants that fit the life table, which no clip has changed."""
    intervals = (state.cells.shape[-1] - 1) // 2
    if intervals < 1:
        return theta
    weight, constant = theta[..., :-intervals], theta[..., -intervals:] - state.shift
    if state.baseline:
        constant = recalibrated(weight, constant, state.baseline)
    return torch.cat([weight, constant], -1)
