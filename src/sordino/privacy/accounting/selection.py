"""The privacy cost of choosing among several runs on the same records.

*Every run is visible.* Runs compose like releases: k runs, each mu-Gaussian-DP, cost sqrt(k) mu. The score of a run is
a noisy count of the validation records that it predicts correctly. One record moves that count by at most 1, whether it
joins or is replaced. A record is used for training or for validation, never for both, and the choice does not depend on
its values. So it pays for the training of all runs or for all scores, but not for both (parallel composition). This
holds under every trust model.

*Random stopping.* The number of runs K is random and secret, and only the run with the best score is shown. Then the
cost hardly grows with the number of runs (Liu and Talwar 2019; Papernot and Steinke 2022, arXiv 2110.03620). The mu of
a run covers its model and its score: `visible(run, score, 1)` if other records do the scoring. This holds **only** if
the adversary sees nothing of the other runs: neither K nor the models that are broadcast to clients. It can never be
claimed under untrusted-server or secure-aggregation; `assumption` refuses them.

The bounds use one lemma. Let f be the generating function of K. The best of K draws of Q is at most y with probability
f(Q(<= y)), so its weight at y is Q(y) times a mean of f'. Because a^l b^(1-l) is jointly convex,

    exp((l-1) R_l(best of K)) <= P[K = 0] + exp((l-1) R_l(Q)) max f'(q)^l f'(q')^(1-l),

where q and q' are the probabilities of one event under the two data sets. The laws below differ in how they bound that
maximum. Each run is mu-Gaussian-DP: its Rényi divergence of order l is at most l mu^2 / 2.

The same lemma bounds the privacy profile without Rényi divergences, as Koskela, Redberg and Wang (2024) do. Let s be
the maximum of f'(q) / f'(q') over the pairs that mu-Gaussian DP allows, and E[K] = f'(1) the largest f'. Then

    delta(e) of the best of K  =  max over events of  integral Q f'(q) - exp(e) Q' f'(q')
                               <= integral f'(q) (Q - exp(e - log s) Q')_+  <=  E[K] delta(e - log s) of one run.

They take s from one (epsilon, delta) of a run; here it is the maximum over the whole trade-off curve, which is smaller.
`epsilon` is the smaller of the two bounds: the profile for a few runs, Rényi divergences for many.
"""

from __future__ import annotations

import decimal
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from sordino.core import Trust
from sordino.errors import SordinoError
from sordino.lazy import scipy
from sordino.privacy.accounting import gaussian, roots

MOST_MEAN = 500.0  # of a Poisson number of runs: the sum of its law starts at e^-mean
_BITS, _DIGITS = 192, 100  # of the uniform that the number of runs is drawn with, and of the arithmetic
SLOPE_CELLS, SLOPE_PARTS = 1024, 64  # of the search for the largest ratio of slopes
LEAST_GAMMA, MOST_ETA = 1e-12, 10.0  # within these bounds no probability underflows


# ------------------------------------------------------------------------------------------------ every run is visible


def visible(run: float, score: float, runs: int, *, refit: float = 0.0) -> float:
    """mu of a search in which every run is visible, for the record that pays most.

    Args:
      run: mu of each run.
      score: mu of each score.
      runs: number of runs.
      refit: mu of a last run on all records, including those of validation.

    Returns:
      mu of the search and the last run together.

    Raises:
      SordinoError: an argument is out of its range.
    """
    _check(run=run, score=score, refit=refit)
    return math.hypot(math.sqrt(_whole(runs)) * max(run, score), refit)


def each(mu: float, runs: int, *, refit: float = 0.0) -> float:
    """The mu that each run and each score may cost if the whole search may cost mu.

    Args:
      mu: of the whole search.
      runs: number of runs.
      refit: mu of a last run on all records.

    Returns:
      mu of one run.

    Raises:
      SordinoError: an argument is out of its range, or the last run uses all of mu.
    """
    _check(mu=mu, refit=refit)
    if refit >= mu and refit:
        raise SordinoError(f"refit: {refit} must be below {mu}, or nothing remains for the search.")
    return math.sqrt((mu - refit) * (mu + refit) / _whole(runs)) * (1 - gaussian.SLACK)


def score_std(mu: float) -> float:
    """The standard deviation of the noise on a count of correct validation records that costs mu."""
    _check(mu=mu)
    return 1 / mu if mu else math.inf


# -------------------------------------------------------------------------------------------------- random stopping


@dataclass(frozen=True)
class NegativeBinomial:
    """A truncated negative binomial law: P[K = k] ~ (1 - gamma)^k Π_{i<k} (i + eta) / (i + 1), k >= 1.

    eta = 1 is geometric, eta = 0 is logarithmic. A smaller eta costs less, but spreads K more.
    """

    gamma: float
    eta: float = 1.0
    least = 1

    def __post_init__(self) -> None:
        if not LEAST_GAMMA <= self.gamma < 1:
            raise SordinoError(f"gamma: {self.gamma} must lie in [{LEAST_GAMMA:g}, 1); a small one means many runs.")
        if not -1 < self.eta <= MOST_ETA:
            raise SordinoError(f"eta: {self.eta} must lie in (-1, {MOST_ETA:g}]; 1 is geometric, 0 logarithmic.")

    @staticmethod
    def of(mean: float, eta: float = 1.0) -> NegativeBinomial:
        """The law with this expected number of runs."""
        if not 1 < mean < math.inf:
            raise SordinoError(f"mean: {mean} must be above 1, because there is at least one run.")
        NegativeBinomial(0.5, eta)  # refuses a bad eta

        def excess(length: float) -> float:
            return _log_mean(length, eta) - math.log(mean)

        ends = (1e-12, -math.log(LEAST_GAMMA))
        if excess(ends[0]) > 0 or excess(ends[1]) < 0:
            raise SordinoError(f"mean: {mean} runs are not possible with eta = {eta}; use eta = 0 or 1.")
        return NegativeBinomial(math.exp(-roots.root(excess, *ends, 1e-15)), eta)

    @property
    def mean(self) -> float:
        return math.exp(_log_mean(-math.log(self.gamma), self.eta))

    @property
    def first(self) -> float:
        """P[K = least]."""
        length = -math.log(self.gamma)
        return (1 - self.gamma) * (self.eta / math.expm1(self.eta * length) if self.eta else 1 / length)

    def ratio(self, k: int) -> float:
        """P[K = k + 1] / P[K = k]."""
        return (1 - self.gamma) * (k + self.eta) / (k + 1)

    def exact_first(self) -> decimal.Decimal:
        gamma, eta = decimal.Decimal(self.gamma), decimal.Decimal(self.eta)
        length = -gamma.ln()
        return (1 - gamma) * (eta / ((eta * length).exp() - 1) if eta else 1 / length)

    def exact_ratio(self, k: int) -> decimal.Decimal:
        return (1 - decimal.Decimal(self.gamma)) * (k + decimal.Decimal(self.eta)) / (k + 1)

    def rdp(self, mu: float, order: float) -> float:
        """The Rényi divergence of the best of K runs, by Theorem 2 with the best h >= 1:

            l mu²/2 + (1 + eta) ((1 - 1/h) h mu²/2 + log(1/gamma)/h) + log E[K] / (l - 1).

        Here f'(q) = E[K] (gamma / (gamma + (1 - gamma)(1 - q)))^(1 + eta), and h is the order that bounds 1 - q' by
        1 - q.
        """
        rho, length = mu * mu / 2, -math.log(self.gamma)
        other = 2 * math.sqrt(rho * length) - rho if rho < length else length  # h = sqrt(length / rho), or 1
        return order * rho + (1 + self.eta) * other + _log_mean(length, self.eta) / (order - 1)

    def log_slopes(self, mu: float) -> float:
        """log of the largest f'(q) / f'(q'), from above.

        It is 1 + eta times the maximum over z of g(z) = log F(z + mu) - log F(z), F = gamma + (1 - gamma) Φ, because
        1 - q = Φ(z), and 1 - q' is at most Φ(z + mu). F increases, so g in a cell [a, b] is at most
        log F(b + mu) - log F(a). Cells that may hold the maximum are divided, and between the points of the finer grid
        g exceeds the larger of its neighbours by at most step^2 / 8 times a bound on its second derivative. With
        w = max(1, -z) at Φ(z) = gamma, and because the normal density is at most (1 + |z|) Φ(z) for z < 0, that is
        2 (w (w + 1) + (w + 1)^2).
        """

        def log_f(z: np.ndarray) -> np.ndarray:
            return np.asarray(np.log(self.gamma + (1 - self.gamma) * scipy.special.ndtr(z)))

        edges = np.linspace(float(scipy.special.ndtri(1e-16 * self.gamma)) - mu, 10.0, SLOPE_CELLS + 1)
        g, step = log_f(edges + mu) - log_f(edges), edges[1] - edges[0]
        below, above = log_f(edges[:1] + mu) - math.log(self.gamma), -log_f(edges[-1:])  # beyond the grid
        live = log_f(edges[1:] + mu) - log_f(edges[:-1]) > g.max()
        fine = np.linspace(edges[:-1][live], edges[1:][live], SLOPE_PARTS + 1)
        w = max(1.0, -float(scipy.special.ndtri(self.gamma)))
        curved = 2 * (w * (w + 1) + (w + 1) ** 2) * (step / SLOPE_PARTS) ** 2 / 8
        highest = (log_f(fine + mu) - log_f(fine)).max(initial=float(g.max())) + curved
        return (1 + self.eta) * max(float(highest), float(below[0]), float(above[0])) * (1 + 1e-12)


@dataclass(frozen=True)
class Poisson:
    """A Poisson law of K. If K is 0, nothing runs, and the result is the initial model, which reads no data."""

    mean: float
    least = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean <= MOST_MEAN:
            raise SordinoError(f"mean: {self.mean} must lie in (0, {MOST_MEAN:g}].")

    @property
    def first(self) -> float:
        """P[K = least]."""
        return math.exp(-self.mean)

    def ratio(self, k: int) -> float:
        """P[K = k + 1] / P[K = k]."""
        return self.mean / (k + 1)

    def exact_first(self) -> decimal.Decimal:
        return (-decimal.Decimal(self.mean)).exp()

    def exact_ratio(self, k: int) -> decimal.Decimal:
        return decimal.Decimal(self.mean) / (k + 1)

    def rdp(self, mu: float, order: float) -> float:
        """The Rényi divergence of the best of K runs: Theorem 6, l mu²/2 + mean d + log(mean) / (l - 1), plus P[K = 0].

        Without P[K = 0] the theorem fails for means below one run.
        Here f'(q) = mean e^(mean (q - 1)), and d is the delta of the base at epsilon = log(l / (l - 1)).
        """
        d = gaussian.delta(mu, math.log1p(1 / (order - 1)))
        selected = math.log(self.mean) + (order - 1) * (order * mu * mu / 2 + self.mean * d)
        return float(np.logaddexp(-self.mean, selected)) / (order - 1)

    def log_slopes(self, mu: float) -> float:
        """log of the largest f'(q) / f'(q'): mean times the largest q - q', which is 2 Φ(mu / 2) - 1."""
        return self.mean * gaussian.delta(mu, 0.0) * (1 + 1e-12)


StoppingLaw: TypeAlias = NegativeBinomial | Poisson


def epsilon(law: StoppingLaw, mu: float, delta: float) -> float:
    """Epsilon of the best of K runs, each mu-Gaussian-DP: the smallest over all Rényi orders, and by the profile.

    Order l and divergence r give r + log((l-1)/l) - (log delta + log l)/(l-1) (Canonne, Kamath and Steinke 2020,
    Proposition 12). Every order gives a valid bound, so the minimum need not be exact.

    Args:
      law: the law of the number of runs.
      mu: of each run, with its score.
      delta: the delta.

    Returns:
      An upper bound on epsilon.

    Raises:
      SordinoError: an argument is out of its range.
    """
    _check(mu=mu)
    if not 0 < delta < 1:
        raise SordinoError(f"delta: {delta} must lie between 0 and 1; 1e-5 is usual.")
    return mu if mu == 0 or math.isinf(mu) else _cost(law, mu, delta)


def _cost(law: StoppingLaw, mu: float, delta: float) -> float:
    """Epsilon without checks of the arguments: the smaller of the two bounds."""
    return min(_by_profile(law, mu, delta), _by_renyi(law, mu, delta))


def _by_profile(law: StoppingLaw, mu: float, delta: float) -> float:
    """Epsilon by the privacy profile of one run."""
    part = delta / max(law.mean, 1e-300)
    if part >= 1:
        return math.inf  # a mean far below one run; the other bound serves
    return gaussian.epsilon(mu, part) + law.log_slopes(mu)


def _by_renyi(law: StoppingLaw, mu: float, delta: float) -> float:
    """Epsilon by Rényi divergences."""

    def bound(log_above: float) -> float:
        above = math.exp(log_above)
        order = 1 + above
        return law.rdp(mu, order) - math.log1p(1 / above) - (math.log(delta) + math.log1p(above)) / above

    centre = math.log((math.log(1 / delta) + max(math.log(law.mean), 0.0)) / (mu * mu / 2)) / 2
    grid = np.linspace(centre - 7, centre + 7, 57)
    values = [bound(at) for at in grid]
    best = int(np.argmin(values))
    ends = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
    from scipy.optimize import minimize_scalar  # 0.4 s to import, and only private tuning needs it

    least = minimize_scalar(bound, bounds=ends, method="bounded", options={"xatol": 1e-7})
    return max(0.0, min(values[best], float(least.fun)))


def calibrate(law: StoppingLaw, epsilon: float, delta: float) -> float:
    """The mu that each run may have if the best of K runs must be (epsilon, delta)-DP.

    Args:
      law: the law of the number of runs.
      epsilon: the epsilon to keep.
      delta: the delta.

    Returns:
      mu of each run, with its score.

    Raises:
      SordinoError: an argument is out of its range.
    """
    if not epsilon > 0:
        raise SordinoError(f"epsilon: {epsilon} must be above 0.")
    high = gaussian.mu(epsilon, delta)
    if math.isinf(high):
        return high
    while _cost(law, high, delta) <= epsilon:  # usually false at once
        high *= 2
    low = high / 2
    while _cost(law, low, delta) > epsilon:
        low /= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _cost(law, middle, delta) <= epsilon else (low, middle)
    return low


def draw(law: StoppingLaw, rng: np.random.Generator | None = None) -> int:
    """Draw K.

    Args:
      law: the law of the number of runs.
      rng: for experiments only, because K is secret and the seed reveals it. By default K comes from the system's
        secure randomness.

    Returns:
      The number of runs.
    """
    if rng is None:
        return _draw_exactly(law)
    return _inverted(float(rng.random()), law.least, law.first, law.ratio)


def _draw_exactly(law: StoppingLaw) -> int:
    """K by inversion of a uniform of 192 bits, in decimal arithmetic.

    The bounds above hold for the exact law. A law that differs from it in total variation by eta costs (1 + e^epsilon)
    eta of delta; here eta is below 2^-190. Of 53 bits it would be a tenth of a delta of 1e-5 at epsilon = 20.
    """
    with decimal.localcontext(prec=_DIGITS):
        u = decimal.Decimal(secrets.randbits(_BITS)) / 2**_BITS
        return _inverted(u, law.least, law.exact_first(), law.exact_ratio)


_Number = TypeVar("_Number", float, decimal.Decimal)


def _inverted(u: _Number, k: int, weight: _Number, ratio: Callable[[int], _Number]) -> int:
    """The smallest K whose cumulative chance exceeds u, from the chance of the least k and ratios of neighbours."""
    below = weight
    while below <= u and below + weight > below:
        weight *= ratio(k)
        below += weight
        k += 1
    return k


def assumption(trust: Trust) -> str:
    """The assumption of random stopping, for a certificate.

    Args:
      trust: the trust model of the runs.

    Returns:
      A sentence.

    Raises:
      SordinoError: under this trust model the adversary sees more than the chosen run.
    """
    if trust != Trust.TRUSTED_SERVER:
        raise SordinoError(
            f"trust: under {trust} the adversary also sees the other runs, so random stopping gives no privacy. Let "
            "every run pay its share (--charge-tuning count), or use trusted-server."
        )
    return (
        "Only the best of all runs was shown: the number of runs, their scores and the models that the others sent out "
        "stayed with trusted parties."
    )


# ------------------------------------------------------------------------------------------------------------ internals


def _log_mean(length: float, eta: float) -> float:
    """log E[K] of the negative binomial, gamma = e^-length: E[K] = (1/gamma - 1) eta / (1 - gamma^eta)."""
    tail = eta / -math.expm1(-eta * length) if eta else 1 / length
    return length + math.log(-math.expm1(-length) * tail)


def _whole(runs: int) -> int:
    if isinstance(runs, bool) or int(runs) != runs or runs < 1:
        raise SordinoError(f"runs: {runs} must be a whole number of at least 1.")
    return int(runs)


def _check(**arguments: float) -> None:
    for name, value in arguments.items():
        if not value >= 0:
            raise SordinoError(f"{name}: {value} must be at least 0.")
