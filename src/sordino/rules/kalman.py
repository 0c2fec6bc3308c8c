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
1, make the signal smaller and leave the noise as it is: nu is divided by the mean weight of a record. (h is not
multiplied by it, because the clip makes steps of 1 / h overshoot then.)

For classes, two corrections count where there is little noise. The curvature between two of c classes reaches A / 2,
far above A / c, and steps of 1 / h oscillate there. Differences of released gradients show it (`measured`); as far as
they do with certainty, steps are shorter. And a ridge (`pull_of`) keeps few records from being fitted exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.baseline import Baseline, recalibrated

FLOOR = 1e-3  # of the mean eigenvalue: keeps curvature above zero if features are constant
MOST_RAISED, RAISING_STEPS = 40.0, 50  # of the prior: the logarithm of the largest factor, and steps of its search
SECANT_ERROR, SECANT_MEMORY = 0.1, 0.5  # relative error of a measured curvature; what a round leaves of earlier ones
TRAINED_LOGIT = 4.0  # standard deviation of a logit of a trained model, which the ridge follows from
LABEL = 0.5  # typical size of a label in [-1, 1]
DAMPING = 2.0  # of rates and hazards: a third of Newton's step
LEAST_LOGIT, MOST_LOGIT = -2.0, 10.0  # of a rate that the curvature is taken at; the model caps it there too
MIN_VARIANCE = 1e-20  # of P, which converges to 0 without noise


class Setting(NamedTuple):
    """Public numbers that the first curvature and prior depend on beside A."""

    covariance_std: Tensor  # of the noise on A
    outputs: Tensor  # columns of theta
    residual: Tensor  # |p - y| at zero
    careful: Tensor  # 1 where nothing corrects a step that goes too far: of quantities, and in the first of few rounds
    numeric: Tensor  # 1 if labels are quantities or counts, else 0
    mean_noise: Tensor  # variance of the noise on the mean of all gradients
    pull: Tensor  # the ridge over |u|^2


class SurvivalSetting(NamedTuple):
    """The same where a survival model is trained."""

    cells_std: Tensor  # of the noise on a cell of the life table
    covariance_std: Tensor  # of the noise on A


class Secant(NamedTuple):
    """The curvature along steps, as a multiple of h, from differences of released gradients."""

    theta: Tensor  # in the round before
    gradient: Tensor  # that was released there
    noise: Tensor  # the variance of its noise
    bias: Tensor  # what that noise adds to the inner product of the step that followed and the next difference
    ratio: Tensor  # the estimate
    information: Tensor  # 1 / its variance


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


def spectrum(A: Tensor, std: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a mean of u u^T, |u|^2 at most `most`, estimated from its noised value.

    Symmetric noise of this std (on the diagonal; std / sqrt 2 off it) has eigenvalues up to edge = std sqrt(2 rows),
    and turns an eigenvalue v into v + edge^2 / 4 v. Eigenvalues above the edge are corrected to v. The others cannot be
    distinguished, and share the rest of the trace.
    """
    rows = A.shape[-1]
    noised, vectors = torch.linalg.eigh((A + A.transpose(-1, -2)).double() / 2)
    std = std.to(noised)
    edge = edge_of(std, rows)
    trace = noised.sum(-1, keepdim=True).maximum(std * math.sqrt(rows)).clamp(FLOOR**3 * most, most)
    above = noised > edge
    value = torch.where(above, (noised + (noised.square() - edge.square()).clamp_min(0).sqrt()) / 2, 0.0).minimum(trace)
    rest = (trace - value.sum(-1, keepdim=True)).maximum(std) / (~above).sum(-1, keepdim=True).clamp_min(1)
    value = torch.where(above, value, rest.minimum(trace / rows)).maximum(FLOOR * trace / rows)
    return value.to(A.dtype), vectors.to(A.dtype)


def edge_of(std: Tensor, rows: int) -> Tensor:
    """The largest eigenvalue of symmetric noise with this std on its diagonal."""
    return std * math.sqrt(2 * rows)


def estimate_covariance(most: float) -> Rule:
    """Store the spectrum of the noised covariance A for `kalman`.

    Args:
        most: Bound on |u|^2.

    Returns:
        A rule that leaves theta unchanged. If no client takes part, its vectors stay a 1 x 1 placeholder.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> KalmanState:
        one, std = theta.new_ones(1), std_of(theta, facts)
        zero, secant = 0 * one, unmeasured(theta, facts)
        return KalmanState(one.view(1, 1), one, one, std, zero, zero, zero, one[:0], secant=secant)

    def update(A: Tensor, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        rows = math.isqrt(A[(0,) * (theta.dim() - 1)].numel())
        value, V = spectrum(A.reshape(*theta.shape[:-1], rows, rows), state.noise, most)
        after = state._replace(vectors=V, curvature=value, variance=value.reciprocal())
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
            return before._replace(noise=variance)
        if V.shape[-1] != rows:  # no client took part in the stage before
            value, V = spectrum(theta.new_zeros(*theta.shape[:-1], rows, rows), before.noise, most)
        setting = setting_of(theta, facts, clip, before.noise, variance * (part / facts.rounds))
        growth, damping = growth_of(theta, facts)
        before = before._replace(noise=variance, growth=growth, damping=damping)
        return begun(before, value, V, setting, clip=clip, prior=prior)

    def update(g: Tensor, state: KalmanState, theta: Tensor, t: int) -> tuple[Tensor, KalmanState]:
        V, h, P, variance = state[:4]
        h, damping, secant = h * grown(V, h, theta, state.growth), state.damping, state.secant
        noise = variance / (h.square() * P.clamp_min(MIN_VARIANCE))  # relative to the signal
        if isinstance(secant, Secant):
            secant = measured(secant, g, theta, V, h, variance)
            damping = damping + (secant.ratio - 2 * secant.information.rsqrt() - 1).clamp_min(0)
        if isinstance(state.ridge, Tensor):
            g, damping = g + state.ridge * weights_of(theta, V), damping + state.ridge / h
        K = 1 / (h * (1 + damping + noise))
        step = -(V @ (K.unsqueeze(-1) * along(V, g))).flatten(-2)
        if isinstance(secant, Secant):
            outputs = theta.shape[-1] // V.shape[-1]
            secant = secant._replace(bias=outputs * variance * K.sum(-1, keepdim=True))
        return step, state._replace(variance=P * (1 - 1 / (1 + doubt + noise)), secant=secant)

    def model(theta: Tensor, state: KalmanState) -> Tensor:
        return unshifted(theta, state)

    return Rule(init, update, model=model)


def setting_of(theta: Tensor, facts: Facts, clip: float, covariance_std: Tensor, mean_noise: Tensor) -> Setting:
    """The setting of a stage of gradients; `Setting` says what the arguments are."""
    _, outputs = matrix_of(facts)
    one = theta.new_ones(1)
    residual = LABEL if facts.numeric else math.sqrt(1 - 1 / outputs)
    kinds = float(facts.numeric and not facts.rates) * one, float(facts.numeric) * one
    pull = pull_of(theta, facts, clip, mean_noise)
    return Setting(covariance_std, outputs * one, residual * one, *kinds, mean_noise, pull)


def noise_variance(theta: Tensor, facts: Facts, number: int = 0, unit: float = 1.0) -> Tensor:
    """The variance of the noise on a gradient, relative to what weights of classes leave of it.

    Args:
        theta: Parameters, whose type the result has.
        facts: Of the stage.
        number: Of the gradient among the noised queries of the stage.
        unit: That the gradient is released in.
    """
    return (std_of(theta, facts, number) * (unit / facts.mean_weight)).square()


def std_of(theta: Tensor, facts: Facts, number: int = 0) -> Tensor:
    """The std of the noise on an answer of the stage."""
    std = facts.query_stds[number] if number else facts.aggregate_std
    return torch.as_tensor(std, dtype=torch.float64).to(theta)


def growth_of(theta: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
    """`growth` and `damping` of a KalmanState."""
    rates = float(facts.rates) * torch.ones_like(theta[..., :1])
    return rates, DAMPING * rates


def pull_of(theta: Tensor, facts: Facts, clip: float, mean_noise: Tensor) -> Tensor:
    """`pull` of a setting.

    A Gaussian prior of the weights under which a logit has the variance TRAINED_LOGIT^2 is a ridge of
    |u|^2 / (TRAINED_LOGIT^2 N) on the mean loss of N records. It counters what is particular to these records, so it
    fades where noise hides that: `sampling` is the variance of a mean gradient over N records, per parameter.
    """
    records = float(facts.sizes.sum())
    if facts.numeric or not records:  # at client level sizes are not public
        return 0 * mean_noise
    sampling = clip**2 / (theta.shape[-1] * records)
    return sampling / (sampling + mean_noise) / (TRAINED_LOGIT**2 * records)


def unmeasured(theta: Tensor, facts: Facts) -> Secant | tuple[()]:
    """`secant` before the first step. () if labels are numbers, or where gradients are about different records."""
    if facts.numeric or not facts.same_records:
        return ()
    zero = torch.zeros_like(theta[..., :1])
    return Secant(theta, torch.zeros_like(theta), zero, zero, zero + 1, zero)


def begun(
    state: KalmanState, value: Tensor, vectors: Tensor, setting: Setting, *, clip: float, prior: float
) -> KalmanState:
    """The state before the first step.

    Args:
        state: What else it holds.
        value: Eigenvalues of A, as `spectrum` estimates them.
        vectors: Its eigenvectors.
        setting: Public numbers.
        clip: Clip of a record's gradient.
        prior: Standard deviation of a logit before training.

    Returns:
        The state with the curvature and the prior along the eigenvectors, and the ridge.
    """
    rows, outputs = value.shape[-1], setting.outputs
    length = value.sum(-1, keepdim=True).sqrt()  # root mean square of |u|
    # An eigenvalue below the edge may be as large as it: where it must, a step goes no further.
    edge = edge_of(setting.covariance_std.to(value), rows)
    certain = torch.where(setting.careful > 0, value.maximum(edge), value)
    h = certain / outputs * (clip / (setting.residual * length).clamp_min(clip))  # clipping lowers the curvature
    P = prior**2 / (rows * value)
    P = torch.where(setting.numeric > 0, P, raised(h, P, setting.mean_noise))  # of numbers, a larger model is wrong
    return state._replace(vectors=vectors, curvature=h, variance=P, ridge=setting.pull * length.square())


def measured(secant: Secant, g: Tensor, theta: Tensor, V: Tensor, h: Tensor, noise: Tensor) -> Secant:
    """What the gradient of this round shows of the curvature.

    The difference of two gradients is H times the step between them, and noise. The inner product of both with the
    step, over that of h times the step, is the mean of H / h along the step. The noise of the earlier gradient is in
    the step too, which adds `bias`.
    """
    step = along(V, theta - secant.theta)
    predicted = (h.unsqueeze(-1) * step.square()).sum((-1, -2)).unsqueeze(-1)
    seen = (step * along(V, g - secant.gradient)).sum((-1, -2)).unsqueeze(-1) - secant.bias
    variance = step.square().sum((-1, -2)).unsqueeze(-1) * (noise + secant.noise)
    moved = predicted > MIN_VARIANCE
    predicted = torch.where(moved, predicted, 1.0)
    new = torch.where(moved, 1 / (variance / predicted.square() + SECANT_ERROR**2), 0.0)
    old = secant.information * SECANT_MEMORY
    information = (old + new).clamp_min(MIN_VARIANCE)
    ratio = (old * secant.ratio + new * seen / predicted) / information
    return secant._replace(theta=theta, gradient=g, noise=noise, ratio=ratio, information=information)


def along(V: Tensor, g: Tensor) -> Tensor:
    """A vector of parameters along the eigenvectors: rows by outputs."""
    return V.transpose(-1, -2) @ g.reshape(*g.shape[:-1], V.shape[-1], -1)


def weights_of(theta: Tensor, V: Tensor) -> Tensor:
    """theta with 0 for the intercepts, its last row."""
    outputs = theta.shape[-1] // V.shape[-1]
    return torch.cat([theta[..., :-outputs], torch.zeros_like(theta[..., -outputs:])], -1)


def raised(h: Tensor, P: Tensor, noise: Tensor) -> Tensor:
    """P times the factor at which the noise of all steps moves a logit as far as it does without much noise.

    The predicted class does not depend on the scale of the logits, so a small model gains nothing where the gradients
    are mostly noise, and larger steps learn more. Steps of P h / nu^2 add up to P h / noise. Later gradients correct
    earlier noise, so along an eigenvector it keeps P h (1 - exp(-2 h^2 P / noise)) / 2 h of variance. With P = s P_0 it
    moves a logit by s mean(1 - exp(-2 s h^2 P_0 / noise)) / 2 of variance, in units of the prior's. Without much noise
    that is s / 2, and s is 1. With more noise s is the root of s mean(1 - exp(…)) = 1.

    Args:
        h: Curvature along the eigenvectors of A.
        P: Variance of theta* along them, before training.
        noise: Variance of the noise on the mean of all gradients.

    Returns:
        s P.
    """
    rate = 2 * h.double().square() * P.double() / noise.double()
    low = torch.zeros_like(rate[..., :1])
    high = low + MOST_RAISED
    for _ in range(RAISING_STEPS):  # bisect log s
        middle = (low + high) / 2
        s = middle.exp()
        enough = s * -torch.expm1(-s * rate).mean(-1, keepdim=True) >= 1
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (high.exp() * P.double()).to(P)


def unshifted(theta: Tensor, state: KalmanState) -> Tensor:
    """The model to hand out: of survival, with the constants that fit the life table, which no clip has changed."""
    intervals = (state.cells.shape[-1] - 1) // 2
    if intervals < 1:
        return theta
    weight, constant = theta[..., :-intervals], theta[..., -intervals:] - state.shift
    if state.baseline:
        constant = recalibrated(weight, constant, state.baseline)
    return torch.cat([weight, constant], -1)


def grown(V: Tensor, h: Tensor, theta: Tensor, growth: Tensor) -> Tensor:
    """How much larger the curvature of a rate model is than at zero: exp of the mean logit.

    The last feature of u is 1. So the last row of A, whose last entry is 1, is the mean of u.
    """
    last = V[..., -1, :] * h
    mean = last / (last * V[..., -1, :]).sum(-1, keepdim=True).clamp_min(MIN_VARIANCE)
    logit = (mean * (V.transpose(-1, -2) @ theta.reshape(*theta.shape[:-1], V.shape[-1], -1))[..., 0]).sum(-1)
    return (growth * logit.unsqueeze(-1).clamp(LEAST_LOGIT, MOST_LOGIT)).exp()


def matrix_of(facts: Facts) -> tuple[int, int]:
    """Rows and columns of the only parameter of a linear model."""
    if len(facts.shapes) != 1 or len(facts.shapes[0]) != 2:
        raise SordinoError("model: these steps need a linear model with one matrix of parameters; use dp-fedadam.")
    rows, outputs = facts.shapes[0]
    return rows, outputs
