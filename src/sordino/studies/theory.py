"""Closed forms: predicted errors of private federated estimates, a lower bound, and the bounds of published theorems.

The designs: x ~ N(0, I_d), labels from a generalised linear model with theta_0 = length * u. By symmetry an average
over the design has one value along u and one across it (d - 1 times), so it is an integral over t = <u, x> and
s = |x - t u|, computed by quadrature. It depends on the design alone, not on data.

The predictions expand to second order around theta_0, for constant steps. Client i's gradient noise has the standard
deviation b_i = 2 B sqrt(K) / (mu n_i) per step, and sum_i w_i^2 b_i^2 = 4 B^2 K m / (mu^2 N^2) whatever the sizes are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit
from scipy.stats import chi, poisson

from sordino.errors import SordinoError
from sordino.models.linear import Linear, Loss

Array: TypeAlias = NDArray[np.float64]
NODES = 1001  # of each of the two integrals
SCORE_PLACES = 61  # grid points of the mean score; 0, theta_0 and their middle are among them
NUDGE = 1e-3  # relative step of a numerical derivative

# ------------------------------------------------------------------------------------------------------- populations


class Population(NamedTuple):
    """Averages over one record of a design, at theta_0: (along theta_0, across it)."""

    times: Array  # how many directions: (1, d - 1)
    slope: Array  # of the mean score: the Hessian that gradient steps meet
    spread: Array  # variance of the score
    curvature: Array  # what a Newton step divides by; equals the slope unless residuals are bounded
    third: Array  # derivative of the slope along theta_0: T_uuu, T_upp
    score: tuple[Array, Array]  # positions on the line through 0 and theta_0, and the mean score there
    fisher: Array  # information of one unbounded record
    length: float  # of theta_0

    @property
    def dim(self) -> int:
        return int(self.times.sum())

    @property
    def root(self) -> float:
        """Where the mean score is 0: theta_0, unless clipping biases it."""
        at, score = self.score
        return float(np.interp(0.0, score, at))

    def walk(self, start: float, lr: float, steps: int) -> float:
        """Position after noiseless gradient steps from a point on the line, relative to the root."""
        at, score = self.score
        for _ in range(steps):
            start -= lr * float(np.interp(start, at, score))
        return start - self.root


def quadratic(slope: Array, times: Array, spread: Array, length: float = 0.0) -> Population:
    """A population whose score is linear, for which the predictions are exact."""
    at = np.array([-1e3, 1e3])
    return Population(times, slope, spread, slope, 0 * slope, (at, slope[0] * (at - length)), spread, length)


@lru_cache(maxsize=64)
def population(model: Linear, length: float) -> Population:
    """The population of `model` (logistic or Poisson, no bias): Gaussian features, labels at |theta_0| = length."""
    if model.kind not in (Loss.LOGISTIC, Loss.POISSON) or model.bias or model.outputs != 1:
        raise SordinoError("model: predictions exist for logistic and Poisson models with one output and no bias.")
    t, weight, inside = _nodes(model.features, model.radius)
    times = np.array([1.0, model.features - 1.0])

    def average(values: Array, power: int) -> Array:
        """Means of values(t) times the record's weight to a power, times t^2 or the square of one coordinate across."""
        along, across = inside[power]
        first, second = weight @ (values * t**2 * along), weight @ (values * across)
        return np.array([first, second if times[1] else first])  # in one dimension there is no direction across

    labels = list(_labels(model.kind, length * t))
    _, square, slope, curve = _residuals(model, length * t, labels)
    step = NUDGE * max(length, 1.0)
    up, broadcast = (average(_residuals(model, (length + s) * t, labels)[2], 1) for s in (step, -step))
    rate = _residuals(Linear(1, 1, model.kind, bias=False, cap=math.inf), length * t, labels)[3]
    line = length * np.linspace(-2.0, 4.0, SCORE_PLACES)
    score = np.array([weight @ (_residuals(model, at * t, labels)[0] * t * inside[1][0]) for at in line])
    return Population(
        times,
        average(slope, 1),
        average(square, 2),
        average(curve, 1),
        (up - broadcast) / (2 * step),
        (line, score),
        average(rate, 0),
        length,
    )


def _nodes(dim: int, radius: float) -> tuple[Array, Array, dict[int, tuple[Array, Array]]]:
    """t with its weights; with a record's weight w = min(1, R^2/|x|^2), by power p: E[w^p|t], E[w^p s^2/(d-1)|t]."""
    grid = np.linspace(-8, 8, NODES)
    weight = np.exp(-(grid**2) / 2)
    weight /= weight.sum()
    levels = (np.arange(NODES) + 0.5) / NODES
    across = chi.ppf(levels, dim - 1) ** 2 if dim > 1 else np.zeros(1)
    squared = grid[:, None] ** 2 + across
    w = np.minimum(1.0, radius**2 / np.maximum(squared, 1e-300))
    each = across / max(dim - 1, 1)
    inside = {p: ((w**p).mean(1), (w**p * each).mean(1)) for p in (0, 1, 2)}
    return grid, weight, inside


def _residuals(model: Linear, z: Array, labels: list[tuple[int, Array]]) -> tuple[Array, Array, Array, Array]:
    """Mean, mean square and slope of the bounded residual at logits z, and the model's own second derivative."""
    if model.kind is Loss.LOGISTIC:
        value = expit(z)
        curve = inner = value * (1 - value)
    else:
        value = np.exp(np.minimum(z, model.cap))
        curve, inner = value, np.where(z < model.cap, value, 0.0)
    mean, square, slope = np.zeros_like(z), np.zeros_like(z), np.zeros_like(z)
    for y, chance in labels:
        raw = value - y
        r = np.clip(raw, -model.residual, model.residual)
        mean += chance * r
        square += chance * r**2
        slope += chance * inner * (np.abs(raw) < model.residual)
    return mean, square, slope, curve


def _labels(kind: Loss, logit: Array) -> Iterator[tuple[int, Array]]:
    if kind is Loss.LOGISTIC:
        yield from ((0, expit(-logit)), (1, expit(logit)))
        return
    rate = np.exp(np.minimum(logit, 6.0))  # the design has no weight beyond
    for y in range(int(poisson.isf(1e-12, rate.max())) + 1):
        yield y, poisson.pmf(y, rate)


# ------------------------------------------------------------------------------------------------ predicted errors


class ErrorTerms(NamedTuple):
    """The parts of E|theta - theta_0|^2."""

    statistical: float
    privacy: float
    bias: float
    optimisation: float
    cross: float = 0.0  # of bias and missing steps: negative if they point in opposite directions

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def cautious(self) -> float:
        """The total error if bias and missing steps did not cancel."""
        return self.total - min(self.cross, 0.0)


@dataclass(frozen=True)
class Scenario:
    """A federation: client sizes, mu, a population, and the bounds and step of the methods."""

    sizes: tuple[int, ...]
    mu: float
    world: Population
    bound: float  # of one record's gradient
    curvature_bound: float  # of one record's Hessian, in the Frobenius norm
    lr: float

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise SordinoError("clients: every client needs at least one record.")
        if not self.mu > 0:
            raise SordinoError(f"mu: {self.mu} must be above 0 (inf: no noise).")

    @property
    def records(self) -> int:
        return sum(self.sizes)

    def client_noise(self, steps: int, part: float = 1.0) -> Array:
        """b_i^2: variance of each of `steps` noisy gradients of client i, with `part` of mu squared."""
        return np.asarray(4 * self.bound**2 * steps / (part * self.mu**2 * np.asarray(self.sizes, float) ** 2))

    def noise(self, steps: int, part: float = 1.0) -> float:
        """Variance of the averaged gradient: 4 B^2 K m / (mu^2 N^2), whatever the sizes of clients."""
        weight = np.asarray(self.sizes) / self.records
        return float((weight**2 * self.client_noise(steps, part)).sum())


class State(NamedTuple):
    """An estimate's error: bias and remaining distance along theta_0, and variances along and across it."""

    bias: float
    way: float  # what more steps would remove
    sampling: Array
    noise: Array
    rest: float = 0.0  # squared error that remains of the stage before

    @property
    def variance(self) -> Array:
        return self.sampling + self.noise

    @property
    def square(self) -> Array:
        """Second moments of the error."""
        return np.asarray(self.variance + np.array([(self.bias + self.way) ** 2, 0.0]))


def gathered(slope: Array | float, lr: float, steps: int) -> Array:
    """Variance of an iterate per unit variance of a step's noise: lr^2 sum_k (1 - lr h)^2k, k < steps."""
    keep = (1 - lr * np.asarray(slope, float)) ** 2
    near = np.isclose(keep, 1)
    return np.asarray(lr**2 * np.where(near, steps, (1 - keep**steps) / np.where(near, 1, 1 - keep)))


def bent(case: Scenario, variance: Array, steps: int) -> float:
    """Shift of an iterate's mean by the curvature of the score at these variances; it tends to -T : C / 2h."""
    world = case.world
    grown = 1 - (1 - case.lr * world.slope[0]) ** steps
    return float(-0.5 * grown * (world.third * world.times * variance).sum() / world.slope[0])


def fedsgd(case: Scenario, steps: int) -> ErrorTerms:
    """K noisy gradient steps from 0."""
    return _terms(case, gradient_state(case, steps))


def gradient_state(case: Scenario, steps: int, part: float = 1.0, start: State | None = None) -> State:
    """The state after noisy gradient steps from 0, or from the end of the stage before."""
    world = case.world
    sampling = world.spread / (world.slope**2 * case.records)
    noise = case.noise(steps, part) * gathered(world.slope, case.lr, steps)
    bias = bent(case, sampling + noise, steps) + world.root - world.length
    if start is None:
        return State(bias, world.walk(0.0, case.lr, steps), sampling, noise)
    keep = (1 - case.lr * world.slope) ** (2 * steps)
    way = world.walk(world.length + start.bias + start.way, case.lr, steps)
    return State(bias, way, sampling, noise, float(keep @ (world.times * start.noise)))


def local_state(case: Scenario, steps: int, rounds: int = 1, part: float = 1.0) -> State:
    """R rounds of K noisy local steps, averaged: the noise of FedSGD, and the mean of the clients' biases."""
    world, sizes = case.world, np.asarray(case.sizes, float)
    average = gradient_state(case, steps * rounds, part)
    client_noise = case.client_noise(steps * rounds, part)[:, None] * gathered(world.slope, case.lr, steps)
    each = [
        bent(case, world.spread / (world.slope**2 * n) + noise, steps)
        for n, noise in zip(sizes, client_noise, strict=True)
    ]
    bias = float(sizes @ np.array(each)) / case.records + world.root - world.length
    return average._replace(bias=bias)


def fedavg(case: Scenario, steps: int, rounds: int) -> ErrorTerms:
    """R rounds of K local steps."""
    return _terms(case, local_state(case, steps, rounds))


def fedhybrid(case: Scenario, local_steps: int, steps: int) -> ErrorTerms:
    """K1 local steps with half of mu^2, then K2 gradient steps with the other half."""
    return _terms(case, gradient_state(case, steps, 0.5, local_state(case, local_steps, 1, 0.5)))


def fednewton(case: Scenario, local_steps: int) -> ErrorTerms:
    """K1 local steps with half of mu^2, then one local Newton step with a quarter on g and a quarter on H.

    Second order in the noise of the Hessian: valid if `safe` holds, and far too low otherwise.
    """
    world, sizes = case.world, np.asarray(case.sizes, float)
    weight, start = sizes / case.records, local_state(case, local_steps, 1, 0.5)
    h, times = world.curvature, world.times
    sampling = world.spread / (h**2 * case.records)
    gradient = case.noise(1, 0.25) / h**2
    s2 = hessian_noise(case) ** 2
    # The Hessian's noise W meets e + H^-1 (g_i + noise); E[W W^T v] has entries (|v|^2 + v_l^2) / 2.
    client_square = start.square + (world.spread / sizes[:, None] + case.client_noise(1, 0.25)[:, None]) / h**2
    hessian = ((weight**2 * s2)[:, None] * ((client_square @ times)[:, None] + client_square)).sum(0) / (2 * h**2)
    shrink = float(weight @ s2) * ((times / h).sum() + 1 / h) / (2 * h)
    left = (1 - world.slope / h + shrink) ** 2 * start.square
    bias = _newton_bend(world, start) + world.root - world.length
    return ErrorTerms(
        float(times @ sampling),
        float(times @ (gradient + hessian)),
        bias**2 + _newton_scatter(world, start) + float(times @ left),
        0.0,
    )


def _newton_bend(world: Population, start: State) -> float:
    """A Newton step from e ends at H^-1 T[e, e] / 2: its mean along theta_0."""
    return float(0.5 * (world.third * world.times * start.square).sum() / world.slope[0])


def _newton_scatter(world: Population, start: State) -> float:
    """Variance of that end point, for Gaussian e."""
    (a, b), c, across = world.third, start.variance, world.times[1]
    shift = (start.bias + start.way) ** 2
    along = (0.5 * ((a * c[0]) ** 2 + across * (b * c[1]) ** 2) + a**2 * shift * c[0]) / world.slope[0] ** 2
    return float(along + across * b**2 * (c[0] + shift) * c[1] / world.slope[1] ** 2)


def hessian_noise(case: Scenario) -> Array:
    """s_H of every client: 2 sqrt(2) C_H / (mu n_i), for positive semi-definite Hessians and a quarter of mu^2."""
    return 2 * math.sqrt(2) * case.curvature_bound / (case.mu * np.asarray(case.sizes, float))


def needed_records(case: Scenario) -> float:
    """The least number of records per client for which FedNewton is safe: 8 sqrt(d) Delta_H / (mu lambda_min)."""
    smallest = float(case.world.curvature[case.world.times > 0].min())
    return 8 * math.sqrt(case.world.dim) * math.sqrt(2) * case.curvature_bound / (case.mu * smallest)


def safe(case: Scenario) -> bool:
    """Whether the noise on every client's Hessian stays below half of its smallest eigenvalue."""
    return min(case.sizes) >= needed_records(case)


def _terms(case: Scenario, state: State) -> ErrorTerms:
    times = case.world.times
    sampling, noise = float(times @ state.sampling), float(times @ state.noise)
    return ErrorTerms(sampling, noise, state.bias**2, state.way**2 + state.rest, 2 * state.bias * state.way)


# --------------------------------------------------------------------------------------------------- lower bounds


def rate(dim: int, sizes: Sequence[int], mu: float, *, log: bool = False) -> float:
    """d / sum_i min(n_i, n_i^2 mu^2 / d), or with mu^2 log(1/mu): a rate with constant 1, not a certificate."""
    if log and not mu < 1:
        raise SordinoError(f"mu: {mu}; the form with log(1/mu) needs mu below 1.")
    n = np.asarray(sizes, float)
    return dim / float(np.minimum(n, n**2 * mu**2 * (math.log(1 / mu) if log else 1.0) / dim).sum())


def information_bound(sizes: Sequence[int], mu: float, fisher: Array, times: Array) -> float:
    """The information bound d^2 / sum_i min(n_i tr F, n_i^2 (e^(mu^2) - 1) lambda_max(F)).

    No estimate has a smaller worst-case error near theta_0.

    With T_i = E[score of client i | transcript], the transcript's information has trace sum_i E|T_i|^2: clients are
    independent, and stay so given the transcript. E|T_i|^2 <= n_i tr F. Swapping record j for a fresh one changes the
    transcript by a mu-GDP step, of chi-square divergence at most e^(mu^2) - 1, so by Cauchy-Schwarz
    E<s_j, T_i> <= sqrt((e^(mu^2) - 1) lambda_max(F) E|T_i|^2); the sum over j is E|T_i|^2. Van Trees' inequality turns
    the trace into a bound on the worst error over a neighbourhood, large against the error itself, of theta_0.
    """
    n, most = np.asarray(sizes, float), float(fisher[times > 0].max())
    information = np.minimum(n * float(times @ fisher), n**2 * (math.expm1(mu**2) if mu < 26 else math.inf) * most)
    return float(times.sum()) ** 2 / float(information.sum())


# ------------------------------------------------------------------------- convergence theorems of four methods


class Descent(NamedTuple):
    """The constants in DP-FedSOFIM's theorems."""

    clip: float
    rho: float
    lr: float
    beta: float
    dim: int
    noise: float  # nu: std per coordinate of the aggregate
    smooth: float  # L
    convex: float  # mu of strong convexity
    steepest: float  # G_max: bound on the gradient along the trajectory
    clipping: float = 0.0  # zeta_max: bias from clipping

    @property
    def momentum(self) -> float:
        """The bound on E|M|^2."""
        return self.clip**2 + (1 - self.beta) * self.dim * self.noise**2


class BoundCheck(NamedTuple):
    """A theorem's bound, the trivial bound, and the factor by which one term alone exceeds the trivial bound."""

    bound: float
    trivial: float
    coupling: float

    @property
    def vacuous(self) -> bool:
        return self.bound >= self.trivial


def _descent(c: Descent) -> tuple[float, float]:
    """(c_nabla, Gamma / lr) with the Young parameters that make Gamma / c_nabla least.

    For tau_1 + tau_2 = s the best split gives (sqrt(a_1) + sqrt(a_2))^2 / s, which leaves one number to choose.
    """
    variance = c.dim * c.noise**2
    fixed = c.steepest**2 * c.momentum / c.rho**2 + c.smooth * c.lr * (c.clip**2 + variance) / (2 * c.rho**2)
    young = (c.clipping + math.sqrt(variance)) ** 2 / (2 * c.rho**2)

    def pair(s: float) -> tuple[float, float]:
        return 1 / c.rho - s / 2, fixed + young / s

    def cost(share: float) -> float:
        descent, gamma = pair(2 * share / c.rho)
        return gamma / descent

    if young == 0:
        return 1 / c.rho, fixed
    return pair(2 * float(minimize_scalar(cost, bounds=(1e-9, 1 - 1e-9), method="bounded").x) / c.rho)


def sofim_convex(c: Descent, rounds: int, gap: float) -> BoundCheck:
    """Theorem 4.21, on E F(theta_T) - F*. Trivial bound: F - F* <= G_max^2 / (2 mu) wherever |grad F| <= G_max."""
    descent, gamma = _descent(c)
    r = 1 - 2 * c.convex * c.lr * descent
    if not 0 < r < 1:
        raise SordinoError(f"lr: {c.lr} is outside the theorem's range; use lr < {1 / (2 * c.convex * descent):.3g}.")
    bound = r**rounds * gap + (1 - r**rounds) * gamma / (2 * c.convex * descent)
    return BoundCheck(bound, c.steepest**2 / (2 * c.convex), c.momentum / c.rho)


def sofim_stationary(c: Descent, rounds: int, gap: float) -> BoundCheck:
    """Theorem 4.31, on the mean squared gradient of T rounds. Trivial bound: G_max^2, by assumption."""
    descent, gamma = _descent(c)
    return BoundCheck(gap / (c.lr * descent * rounds) + gamma / descent, c.steepest**2, c.momentum / c.rho)


class FloorCheck(NamedTuple):
    """A bound after some rounds, its limit for many rounds, and the gap before the first round."""

    bound: float
    floor: float
    start: float

    @property
    def vacuous(self) -> bool:
        """The floor is no better than not training."""
        return self.floor >= self.start


def fedgd_convex(c: Descent, rounds: int, gap: float) -> FloorCheck:
    """Theorem 4.26, DP-FedGD's floor, on E F(theta_T) - F*, with the Young parameter tau that makes the floor least.

    rho, beta and G_max play no part. The floor is (a / tau + b) / (2 mu (1 - tau / 2)) with a = zeta^2 / 2 and
    b = L lr (C^2 + d nu^2) / 2. The part with C^2 does not vanish with the noise: it stands for the squared gradient.
    """
    a, b = c.clipping**2 / 2, c.smooth * c.lr * (c.clip**2 + c.dim * c.noise**2) / 2
    tau = (math.sqrt(a**2 + 2 * a * b) - a) / b
    descent = 1 - tau / 2
    keep = 1 - 2 * c.convex * c.lr * descent
    if not 0 < keep < 1:
        raise SordinoError(f"lr: {c.lr} is outside the theorem's range; use lr < {1 / (2 * c.convex * descent):.3g}.")
    floor = ((a / tau if a else 0.0) + b) / (2 * c.convex * descent)
    return FloorCheck(keep**rounds * gap + floor, floor, gap)


def fedgd_sharper_floor(c: Descent) -> float:
    """The floor with E|G|^2 <= |grad F|^2 + d nu^2 in place of C^2 + d nu^2; no clipping bias, lr < 2 / L.

    The smoothness term then costs part of the descent: c = 1 - L lr / 2.
    """
    if c.clipping > 0 or not c.lr < 2 / c.smooth:
        raise SordinoError("fedgd_sharper_floor: needs gradients that no clip cuts, and lr below 2 / L.")
    return c.smooth * c.lr * c.dim * c.noise**2 / (4 * c.convex * (1 - c.smooth * c.lr / 2))


def fedgd_quadratic(curves: Array, start: Array, noise: float, lr: float, rounds: int) -> float:
    """E F(theta_T) - F* of DP-FedGD on a quadratic: exact. start: the distance to the minimiser in each eigenvector."""
    left = (1 - lr * curves) ** (2 * rounds) * start**2
    return float(0.5 * curves @ (left + noise**2 * gathered(curves, lr, rounds)))


class PathConstants(NamedTuple):
    """What DP-FedSOFIM's sharper comparison assumes of a path, measured: see `constants.path_constants`."""

    alpha: float  # alpha_H
    sigma: float  # sigma_H^2
    sigma_plain: float  # the same constant for H = I
    coupling: float  # B_H
    flatness: float  # mu: Polyak and Lojasiewicz's on the path

    @property
    def gain(self) -> float:
        """(alpha_H^2 / sigma_H^2) over that of H = I: above 1, H lowers the noise floor at equal descent."""
        return self.alpha**2 * self.sigma_plain / self.sigma


def sofim_sharper_floor(p: PathConstants, lr: float, smooth: float, second: float) -> float:
    """The schematic floor (lr B_H + L lr^2 sigma_H^2 (C^2 + d nu^2)) / (2 mu lr alpha_H). second: C^2 + d nu^2."""
    if not (p.alpha > 0 and p.flatness > 0):
        return math.inf
    return (p.coupling + smooth * lr * p.sigma * second) / (2 * p.flatness * p.alpha)


class AdamWTerms(NamedTuple):
    """The terms of DP-FedAdamW's Theorem 3, with the hidden constant set to 1."""

    sampling: float  # sqrt(L Delta sigma_l^2 / (S K R tau^2))
    start: float  # L Delta / R
    noise_by_batch: float  # sigma^2 G_g^2 / b^2: s R is the expected minibatch, as where the noise is added
    noise_by_rounds: float  # sigma^2 G_g^2 / (s R)^2: R rounds, as in the other terms

    @property
    def total(self) -> float:
        """With the reading of the algorithm, in which s R is the minibatch."""
        return self.sampling + self.start + self.noise_by_batch


@dataclass(frozen=True)
class AdamWSetting:
    """The constants in DP-FedAdamW's Theorem 3."""

    smooth: float  # L
    gap: float  # Delta
    sampling: float  # sigma_l^2: variance of a minibatch's gradient
    largest: float  # G_g: largest entry of a gradient
    tau: float
    clients: int  # S per round, of as many
    steps: int  # K
    noise: float  # sigma, the noise multiplier
    batch: float  # expected records of a minibatch
    records: int  # of a client

    def terms(self, rounds: int) -> AdamWTerms:
        first = self.smooth * self.gap * self.sampling / (self.clients * self.steps * rounds * self.tau**2)
        spread = (self.noise * self.largest) ** 2
        part = self.batch / self.records  # s
        return AdamWTerms(
            math.sqrt(first), self.smooth * self.gap / rounds, spread / self.batch**2, spread / (part * rounds) ** 2
        )

    def largest_gamma(self, rounds: int) -> float:
        """The gamma of the theorem: at most 1, 1 / (24 L G_g) and sqrt(S K L Delta tau^2 / (sigma_l^2 R)).

        0 if L > 1/6: the theorem also asks for gamma <= gamma / (6 L).
        """
        if self.smooth > 1 / 6:
            return 0.0
        first = self.clients * self.steps * self.smooth * self.gap * self.tau**2 / max(self.sampling * rounds, 1e-300)
        return min(1.0, 1 / (24 * self.smooth * self.largest), math.sqrt(first))

    def largest_lr(self, gamma: float, rounds: int, gradients: float) -> float:
        """The largest local step of the theorem, with its hidden constant set to 1. gradients: G_0."""
        limits = [1.0, 1 / (gamma**2 * self.smooth * rounds), (gamma * self.clients) ** -0.5]
        limits += [(gamma**3 * self.clients * self.steps) ** -0.25]
        if gradients > 0:
            limits.append(math.sqrt(self.smooth * self.gap / (gradients * gamma**3 * rounds)))
        return float(min(limits)) / (self.steps * self.smooth)


def adamw_error(
    curves: Array, start: Array, gamma: float, lr: float, setting: AdamWSetting, clip: float, rounds: int, seed: int
) -> float:
    """Measured mean of |grad f(theta_t)|^2 over R rounds of the recursion that the proof of Theorem 3 analyses.

    f is a quadratic that all clients share, so only noise is random. Local steps follow (1 - gamma) Delta_G + gamma g /
    (sqrt(v) + tau); the server steps by gamma Delta_G. (The algorithm itself steps by the mean update: K lr Delta_G.)
    """
    rng, shape = np.random.default_rng(seed), (setting.clients, len(curves))
    theta, direction, v = start.copy(), np.zeros_like(start), np.zeros(shape)
    noise, total = setting.noise * clip / setting.batch, 0.0
    for _ in range(rounds):
        total += float(((curves * theta) ** 2).sum())
        y = np.tile(theta, (setting.clients, 1))
        for _ in range(setting.steps):
            g = curves * y + noise * rng.standard_normal(shape)
            v = 0.999 * v + 0.001 * g**2
            y = y - lr * ((1 - gamma) * direction + gamma * g / (np.sqrt(v) + setting.tau))
        direction = (theta - y).mean(0) / (setting.steps * lr)
        theta = theta - gamma * direction
    return total / rounds


def adamw_noise_floor(curve: float, gamma: float, setting: AdamWSetting, clip: float) -> float:
    """What `adamw_error` tends to per coordinate, for K = 1, tau far above sqrt(v), and many rounds: exact.

    theta_t+1 = (2 - gamma - gamma^2 h / tau) theta_t - (1 - gamma) theta_t-1 - gamma^2 noise / tau, whose stationary
    variance is that of an autoregression of order two.
    """
    one, two = 2 - gamma - gamma**2 * curve / setting.tau, -(1 - gamma)
    variance = (gamma**2 / setting.tau * setting.noise * clip / setting.batch) ** 2 / setting.clients
    return curve**2 * (1 - two) * variance / ((1 + two) * ((1 - two) ** 2 - one**2))


def fednew_rate(alpha: float, rho: float, clients: int, lipschitz: float) -> float:
    """The largest beta_2 that Lemmas 25 and 26 of DP-FedNew leave: 2 (alpha - 2.5 rho - 8 L^2 n / rho - L^2 / rho)."""
    return 2 * (alpha - 2.5 * rho - (8 * clients + 1) * lipschitz**2 / rho)


def fednew_bound(sigma: float, alpha: float, rho: float, dim: int, clients: int, lipschitz: float) -> float:
    """Theorem 8, on E|y - y*|^2; inf if no beta_2 > 0 exists, because the theorem then does not apply."""
    left = fednew_rate(alpha, rho, clients, lipschitz)
    return sigma**2 * (alpha + rho) * dim / (clients * left) if left > 0 else math.inf


def fednew_least_alpha(clients: int, lipschitz: float) -> float:
    """The infimum of the alpha that Lemma 25 asks for, over rho: sqrt(80 n) L_q.

    Condition (F.1) at equal theta says L_q >= |H_i + alpha I| >= alpha. So alpha > sqrt(80 n) alpha would be needed: no
    alpha, rho and n satisfy the hypotheses together.
    """
    return math.sqrt(80 * clients) * lipschitz


def fednew_error(
    sigma: float, alpha: float, rho: float, hessians: Array, gradients: Array, rounds: int, seed: int
) -> float:
    """Measured E|y - y*|^2 of noisy FedNew passes at a frozen model, over the last half of the rounds."""
    clients, dim = gradients.shape
    rng, eye = np.random.default_rng(seed), np.eye(dim)
    inverse = np.linalg.inv(hessians + (alpha + rho) * eye)
    target = np.linalg.solve(hessians.mean(0) + alpha * eye, gradients.mean(0))
    dual, y, errors = np.zeros((clients, dim)), np.zeros(dim), list[float]()
    for _ in range(rounds):
        each = np.einsum("nij,nj->ni", inverse, gradients - dual + rho * y)
        each += sigma / math.sqrt(clients) * rng.standard_normal(each.shape)
        y = each.mean(0)
        dual += rho * (each - y)
        errors.append(float(((y - target) ** 2).sum()))
    return float(np.mean(errors[rounds // 2 :]))


def plain(terms: ErrorTerms) -> dict[str, Any]:
    """The terms as a dict, for JSON."""
    return {**terms._asdict(), "total": terms.total}
