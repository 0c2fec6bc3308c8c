"""What it costs to choose among several runs on the same records.

*Every run is seen.* Runs compose like releases: k of them, each mu-Gaussian-DP, are sqrt(k) mu. A run's score is a
noisy count of the validation records it gets right. One record, joining or replaced, moves that count by at most 1. A
record trains or validates, never both, and which of the two was settled without looking at it; so it pays for the
training of all runs or for all scores, not for both (parallel composition). This holds under every trust model.

*Random stopping.* The number of runs K is drawn at random and kept secret, and only the run that scores best is shown.
The price then hardly grows with the number of runs (Liu and Talwar 2019; Papernot and Steinke 2022, arXiv 2110.03620).
A run's mu covers its model and its score: `seen(run, score, 1)` where other records do the scoring. This holds **only**
where nothing of the other runs ever meets the adversary's eye, neither K nor the models broadcast to clients during
them. It can never be claimed under untrusted-server or secure-aggregation (`assumption` refuses to).

The bounds rest on one lemma. Let f be the generating function of K. The best of K draws of Q is at most y with
probability f(Q(<= y)), so it has weight Q(y) times a mean of f' at y, and as a^l b^(1-l) is jointly convex,

    exp((l-1) R_l(best of K)) <= P[K = 0] + exp((l-1) R_l(Q)) max f'(q)^l f'(q')^(1-l),

q and q' being the chances of one event under the two data sets. The laws below differ in how they bound that maximum.
The base is mu-Gaussian-DP throughout: its Renyi divergence of order l is at most l mu^2 / 2.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sordino.core import Trust
from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian, roots

MOST_MEAN = 500.0  # of a Poisson number of runs: its law is summed up from e^-mean
LEAST_GAMMA, MOST_ETA = 1e-12, 10.0  # within these no probability of a K underflows


# ------------------------------------------------------------------------------------------------ every run is seen


def seen(run: float, score: float, runs: int, *, refit: float = 0.0) -> float:
    """mu of a search whose runs cost `run` and whose scores cost `score` each, to the record worst off.

    refit: mu of a last run on all records, those of the validation included; they pay for it beside the rest.
    """
    _check(run=run, score=score, refit=refit)
    return math.hypot(math.sqrt(_whole(runs)) * max(run, score), refit)


def each(mu: float, runs: int, *, refit: float = 0.0) -> float:
    """The mu that one run, and one score, may cost for `runs` of them to cost mu in all."""
    _check(mu=mu, refit=refit)
    if refit >= mu and refit:
        raise SordinoError(f"refit: {refit} leaves nothing of {mu} for the search; lower it.")
    return math.sqrt((mu - refit) * (mu + refit) / _whole(runs)) * (1 - gaussian.SLACK)


def score_std(mu: float) -> float:
    """Of the noise on a count of correct validation records that is to cost mu."""
    _check(mu=mu)
    return 1 / mu if mu else math.inf


# -------------------------------------------------------------------------------------------------- random stopping


@dataclass(frozen=True)
class NegativeBinomial:
    """Truncated: P[K = k] ~ (1 - gamma)^k Π_{i<k} (i + eta) / (i + 1), k >= 1.

    eta = 1 is geometric, eta = 0 logarithmic. A smaller eta is cheaper, and its K more spread out.
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
        """With `mean` runs in expectation."""
        if not 1 < mean < math.inf:
            raise SordinoError(f"mean: {mean} runs; K is at least 1, so that its mean must be above 1.")
        NegativeBinomial(0.5, eta)  # refuses a bad eta

        def excess(length: float) -> float:
            return _log_mean(length, eta) - math.log(mean)

        ends = (1e-12, -math.log(LEAST_GAMMA))
        if excess(ends[0]) > 0 or excess(ends[1]) < 0:
            raise SordinoError(f"mean: {mean} runs are out of reach with eta = {eta}; take eta = 0 or 1.")
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

    def rdp(self, mu: float, order: float) -> float:
        """Theorem 2: l mu²/2 + (1 + eta) ((1 - 1/h) h mu²/2 + log(1/gamma)/h) + log E[K] / (l - 1), by the best h >= 1.

        Here f'(q) = E[K] (gamma / (gamma + (1 - gamma)(1 - q)))^(1 + eta), and h is the order by which 1 - q' is
        bounded from 1 - q.
        """
        rho, length = mu * mu / 2, -math.log(self.gamma)
        other = 2 * math.sqrt(rho * length) - rho if rho < length else length  # h = sqrt(length / rho), or 1
        return order * rho + (1 + self.eta) * other + _log_mean(length, self.eta) / (order - 1)


@dataclass(frozen=True)
class Poisson:
    """K is Poisson. Where it is 0 nothing is run, and what is handed out must not depend on data: the initial model."""

    mean: float
    least = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean <= MOST_MEAN:
            raise SordinoError(f"mean: {self.mean} runs must lie in (0, {MOST_MEAN:g}].")

    @property
    def first(self) -> float:
        """P[K = least]."""
        return math.exp(-self.mean)

    def ratio(self, k: int) -> float:
        """P[K = k + 1] / P[K = k]."""
        return self.mean / (k + 1)

    def rdp(self, mu: float, order: float) -> float:
        """Theorem 6, l mu²/2 + mean d + log(mean) / (l - 1), with P[K = 0] added: without it, it fails below one run.

        Here f'(q) = mean e^(mean (q - 1)), and d is the delta of the base at epsilon = log(l / (l - 1)).
        """
        d = gaussian.delta(mu, math.log1p(1 / (order - 1)))
        selected = math.log(self.mean) + (order - 1) * (order * mu * mu / 2 + self.mean * d)
        return float(np.logaddexp(-self.mean, selected)) / (order - 1)


StoppingLaw: TypeAlias = NegativeBinomial | Poisson


def epsilon(law: StoppingLaw, mu: float, delta: float) -> float:
    """Of the best of K runs, each mu-Gaussian-DP: the least over all Renyi orders, converted tightly.

    Order l and divergence r give r + log((l-1)/l) - (log delta + log l)/(l-1) (Canonne, Kamath and Steinke 2020,
    Proposition 12). Every order gives a true bound: that the least is found to a few digits only costs those digits.
    """
    _check(mu=mu)
    if not 0 < delta < 1:
        raise SordinoError(f"delta: {delta} must lie between 0 and 1; 1e-5 is usual.")
    return mu if mu == 0 or math.isinf(mu) else _cost(law, mu, delta)


def _cost(law: StoppingLaw, mu: float, delta: float) -> float:
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
    """The mu that each run may have for the best of K to be (epsilon, delta)-DP."""
    if not epsilon > 0:
        raise SordinoError(f"epsilon: {epsilon} must be above 0.")
    high = gaussian.mu(epsilon, delta)
    if math.isinf(high):
        return high
    while _cost(law, high, delta) <= epsilon:  # often no run at all
        high *= 2
    low = high / 2
    while _cost(law, low, delta) > epsilon:
        low /= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _cost(law, middle, delta) <= epsilon else (low, middle)
    return low


def draw(law: StoppingLaw, rng: np.random.Generator | None = None) -> int:
    """K; by default from the system's secure randomness. A generator is for experiments: whoever knows its seed knows
    K, and K is secret."""
    u = (secrets.randbits(52) + 0.5) / 2**52 if rng is None else float(rng.random())  # below 1 without rounding
    k, weight = law.least, law.first
    below = weight
    while below <= u and below + weight > below:
        weight *= law.ratio(k)
        below += weight
        k += 1
    return k


def assumption(trust: Trust) -> str:
    """What random stopping rests on, for a certificate; refused where the adversary sees more than the chosen run."""
    if trust != Trust.TRUSTED_SERVER:
        raise SordinoError(
            f"trust: under {trust} the runs that are not chosen are seen too, and random stopping hides nothing; let "
            "every run pay its share (--charge-tuning count), or search under trusted-server."
        )
    return (
        "Of the runs that were tried only the best was shown: their number, their scores and the models sent out in "
        "the others stayed with parties that are trusted."
    )


# ------------------------------------------------------------------------------------------------------------ inside


def _log_mean(length: float, eta: float) -> float:
    """log E[K] of the negative binomial, gamma = e^-length: E[K] = (1/gamma - 1) eta / (1 - gamma^eta)."""
    tail = eta / -math.expm1(-eta * length) if eta else 1 / length
    return length + math.log(-math.expm1(-length) * tail)


def _whole(runs: int) -> int:
    if isinstance(runs, bool) or int(runs) != runs or runs < 1:
        raise SordinoError(f"runs: {runs} must be a whole number, at least 1.")
    return int(runs)


def _check(**arguments: float) -> None:
    for name, value in arguments.items():
        if not value >= 0:
            raise SordinoError(f"{name}: {value} must not be negative.")
