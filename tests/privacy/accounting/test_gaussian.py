"""The closed form against tables, quadrature, 60-digit arithmetic and another accountant."""

import csv
import itertools
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent, pld
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian

TABLE = Path(__file__).parents[4] / "shared/spec/tables/calibration_sigma_n20_T70.csv"
DELTA = 1e-5
MU = {0.5: 0.142211, 1: 0.268051, 2: 0.501552, 5: 1.121242, 10: 2.000446}
CLIENTS, ROUNDS = 20, 70
# A few rows of the table: (epsilon, view and adjacency) -> sigma_g.
SIGMA_G = {
    (0.5, "SA_addremove"): 58.832483,
    (1.0, "SA_replace"): 62.425407,
    (2.0, "PC_addremove"): 74.601631,
    (5.0, "PC_replace"): 66.74131,
    (10.0, "PC_replace"): 37.408239,
}


def near(value: float, truth: float, rel: float) -> bool:
    return math.isclose(value, truth, rel_tol=rel)


def sigma_g(epsilon: float, view: str, clients: int = CLIENTS, rounds: int = ROUNDS) -> float:
    """A client's sum of vectors clipped to C carries noise C·sigma_g/sqrt(n); the sum over clients C·sigma_g."""
    sensitivity = 2.0 if view.endswith("_replace") else 1.0
    if view.startswith("PC_"):  # every client's message is read: its own noise must do
        sensitivity *= math.sqrt(clients)
    return gaussian.sigma(epsilon, DELTA, sensitivity=sensitivity, releases=rounds)


def exact_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang's formula as written, in digits enough to survive it."""
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


def hockey_stick(mu: float, epsilon: float) -> float:
    """∫ max(p - e^epsilon q, 0) for p = N(mu, 1), q = N(0, 1), where p wins: y > epsilon/mu + mu/2.

    p is factored out: p - e^epsilon q = p (1 - exp(epsilon - loss)), and loss - epsilon = mu (y - start).
    """
    start = epsilon / mu + mu / 2

    def integrand(y: float) -> float:
        return -math.expm1(-mu * (y - start)) * math.exp(-0.5 * (y - mu) ** 2) / math.sqrt(2 * math.pi)

    peak = max(start, mu)
    edges = sorted({start, peak, peak + 1 / max(1.0, start - mu), peak + 3, peak + 12})
    return sum(quad(integrand, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in itertools.pairwise(edges))


# ------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(("epsilon", "value"), MU.items())
def test_mu_of_the_specification(epsilon, value):
    assert abs(gaussian.mu(epsilon, DELTA) - value) < 6e-7
    assert abs(gaussian.mu(epsilon, DELTA) ** 2 - value) > 6e-7, "mu squared must not pass for mu"
    assert near(gaussian.sigma(epsilon, DELTA), 1 / value, 5e-6)


@pytest.mark.parametrize(("row", "value"), SIGMA_G.items())
def test_sigma_of_the_specification(row, value):
    good = sigma_g(*row)
    assert near(good, value, 1e-7)
    for mutant in (good / 2, good * 2, good**2, good / math.sqrt(2), good / math.sqrt(CLIENTS), good / ROUNDS**0.5):
        assert not near(mutant, value, 1e-7)


def test_every_row_of_the_calibration_table():
    if not TABLE.exists():
        pytest.skip(f"the calibration table is not beside the repository ({TABLE.name})")
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    clip, records, size = 10, 2500, 650
    for row in rows:
        epsilon, n, T = float(row["epsilon"]), int(row["n_clients"]), int(row["rounds"])
        assert float(row["delta"]) == DELTA
        sigma = sigma_g(epsilon, row["trust_model_and_adjacency"], n, T)
        expected = {
            "mu_total": gaussian.mu(epsilon, DELTA),
            "sigma_for_T1_sensitivity1": gaussian.sigma(epsilon, DELTA),
            "sigma_g": sigma,
            "noise_std_on_client_sum_C10": clip * sigma / math.sqrt(n),
            "noise_std_on_client_release_m2500": clip * sigma / math.sqrt(n) / records,
            "noise_std_per_coord_on_G_t": clip * sigma / (n * records),
            "noise_l2_on_G_t_d650": clip * sigma / (n * records) * math.sqrt(size),
        }
        for column, value in expected.items():
            assert near(value, float(row[column]), 1e-7), (column, row)
            assert not near(2 * value, float(row[column]), 1e-7)


@pytest.mark.parametrize("epsilon", MU)
def test_per_client_replace_one_is_the_papers_closed_form(epsilon):
    """mu = 2 sqrt(nT) / sigma_g, and it is what the releases themselves compose to."""
    sigma = sigma_g(epsilon, "PC_replace")
    mu = 2 * math.sqrt(CLIENTS * ROUNDS) / sigma
    assert near(mu, gaussian.mu(epsilon, DELTA), 1e-13)
    clip = 10.0
    composed = gaussian.mu_of([(2 * clip, clip * sigma / math.sqrt(CLIENTS))] * ROUNDS)
    assert near(composed, mu, 1e-13)
    assert not near(mu / 2, composed, 1e-13), "a missing factor 2 must not pass"
    assert not near(gaussian.mu_of([(clip, clip * sigma / math.sqrt(CLIENTS))] * ROUNDS), mu, 1e-13)


# ------------------------------------------------------------------------------------------------------- composition


def test_releases_compose_in_squares():
    assert gaussian.mu_of([(3.0, 1.0), (4.0, 1.0)]) == 5.0
    assert gaussian.mu_of([(1.0, 2.0, 16)]) == 2.0
    assert gaussian.mu_of(iter([(1.0, 2.0, 12), (1.0, 1.0)])) == 2.0
    assert gaussian.mu_of([]) == 0.0
    assert gaussian.mu_of([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0, 0), (2.0, 4.0), (1.0, math.inf)]) == 0.5
    assert gaussian.mu_of([(1.0, 1.0), (1e-9, 0.0)]) == math.inf
    assert gaussian.mu_of([(math.inf, 1.0)]) == math.inf
    assert gaussian.mu_of([(math.inf, math.inf)]) == math.inf, "no bound is no privacy, whatever the noise"
    assert gaussian.mu_of([(1e200, 1.0)] * 3) == pytest.approx(math.sqrt(3) * 1e200)


def pld_epsilon(event, delta: float = DELTA) -> float:
    return pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)


def agrees_with_pld(epsilon: float, other: float) -> bool:
    """Its discretisation is pessimistic: it may lie above by a step or two, and below by nothing but rounding."""
    return epsilon * (1 - 1e-6) <= other <= epsilon + 3e-3


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.5, 1), (1.0, 70), (5.0, 10), (10.0, 300)])
def test_equal_steps_against_another_accountant(epsilon, rounds):
    noise = gaussian.sigma(epsilon, DELTA, releases=rounds)
    other = pld_epsilon(SelfComposedDpEvent(GaussianDpEvent(noise), rounds))
    assert agrees_with_pld(epsilon, other)
    for mutant in (noise**2, noise / 2, noise * math.sqrt(2)):
        assert not agrees_with_pld(gaussian.epsilon(gaussian.mu_of([(1.0, mutant, rounds)]), DELTA), other)


@pytest.mark.parametrize("steps", [[(1.0, 3.0), (2.0, 4.0, 5), (0.1, 1.0, 30)], [(1.0, 0.7), (0.5, 10.0, 100)]])
def test_unequal_steps_against_another_accountant(steps):
    events = [SelfComposedDpEvent(GaussianDpEvent(s[1] / s[0]), s[2] if len(s) == 3 else 1) for s in steps]
    other = pld_epsilon(ComposedDpEvent(events))
    assert agrees_with_pld(gaussian.epsilon(gaussian.mu_of(steps), DELTA), other)
    linear = sum(s[0] / s[1] * (s[2] if len(s) == 3 else 1) for s in steps)
    assert not agrees_with_pld(gaussian.epsilon(linear, DELTA), other), "ratios add in squares, not as they are"


# ---------------------------------------------------------------------------------------------------------- accuracy

log_epsilons = st.floats(math.log(1e-3), math.log(500)).map(math.exp)
log_mus = st.floats(math.log(1e-4), math.log(60)).map(math.exp)
log_deltas = st.floats(math.log(1e-15), math.log(0.5)).map(math.exp)


@settings(deadline=None, max_examples=200)
@given(mu=log_mus, epsilon=log_epsilons)
def test_delta_to_twelve_digits(mu, epsilon):
    truth = exact_delta(mu, epsilon)
    assume(truth > 1e-40)
    assert near(gaussian.delta(mu, epsilon), truth, 1e-12)
    assume(truth < 0.99)
    assert not near(gaussian.delta(1.001 * mu, epsilon), truth, 1e-12)


@settings(deadline=None, max_examples=100)
@given(mu=log_mus, epsilon=log_epsilons)
def test_delta_is_the_hockey_stick_divergence(mu, epsilon):
    truth = hockey_stick(mu, epsilon)
    assume(truth > 1e-18)
    assert near(gaussian.delta(mu, epsilon), truth, 1e-9)


@settings(deadline=None, max_examples=100)
@given(mu=log_mus, delta=log_deltas)
def test_epsilon_in_reach_of_its_delta(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    if epsilon == 0:
        assert exact_delta(mu, 0.0) <= delta * (1 + 1e-12)
    else:
        assert gaussian.delta(mu, epsilon) <= delta
        assert near(exact_delta(mu, epsilon), delta, 1e-9)


@settings(deadline=None, max_examples=200)
@given(epsilon=log_epsilons, delta=log_deltas, sensitivity=st.floats(1e-3, 1e3), releases=st.integers(1, 1000))
def test_calibration_is_safe_and_tight(epsilon, delta, sensitivity, releases):
    mu = gaussian.mu(epsilon, delta)
    assert gaussian.delta(mu, epsilon) <= delta
    assert near(gaussian.mu(epsilon, gaussian.delta(mu, epsilon)), mu, 1e-11)
    std = gaussian.sigma(epsilon, delta, sensitivity=sensitivity, releases=releases)
    spent = gaussian.mu_of([(sensitivity, std)] * releases)
    assert gaussian.delta(spent, epsilon) <= delta * (1 + 1e-9)
    assert gaussian.epsilon(spent, delta) <= epsilon, "what was calibrated must not be found overspent"
    assert near(gaussian.epsilon(spent, delta), epsilon, 1e-6)
    assert gaussian.delta(gaussian.mu_of([(sensitivity, 0.99 * std, releases)]), epsilon) > delta * (1 + 1e-9)


@pytest.mark.parametrize("delta", [1e-15, 1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1.0, 500.0])
def test_mu_is_exact_at_the_corners_of_its_range(epsilon, delta):
    mu = gaussian.mu(epsilon, delta)
    assert near(exact_delta(mu, epsilon), delta, 1e-8)
    assert abs(gaussian.epsilon(mu, delta) - epsilon) <= 1e-9 * max(epsilon, 1e-3)


def test_steps_of_newton_find_the_root_of_a_bracket(monkeypatch):
    """Over the whole range, and from below: mu is never above the root."""
    corners = [(e, d) for d in (1e-2, 1e-5, 1e-10, 1e-100, 1e-300) for e in (0.0, 1e-8, 1e-3, 0.1, 1.0, 20.0, 1e4)]
    fast = [gaussian._mu.__wrapped__(*corner) for corner in corners]
    monkeypatch.setattr(gaussian, "_newton", lambda *a: None)
    slow = [gaussian._mu.__wrapped__(*corner) for corner in corners]
    np.testing.assert_allclose(fast, slow, rtol=1e-12)
    assert all(gaussian._log_delta(mu, e) <= math.log(d) for mu, (e, d) in zip(fast, corners, strict=True))


def test_far_corners_neither_overflow_nor_warn():
    assert gaussian.delta(1e-4, 500) == 0.0
    assert gaussian.delta(5e-324, 500) == 0.0
    assert gaussian.delta(60, 1e-3) == pytest.approx(1.0)
    assert gaussian.delta(1e200, 1.0) == 1.0
    assert gaussian.epsilon(1e200, 1e-5) == math.inf
    assert near(gaussian.mu(1e6, 1e-5), 1409.955808485495, 1e-9)
    assert 0 < gaussian.mu(1e-12, 1e-30) < 1e-12


def test_an_epsilon_that_rounding_hides_is_a_bound():
    """At mu = 1e20 the rounding of epsilon / mu - mu / 2 is larger than what decides."""
    for mu in (1e14, 1e16, 1e20, 1e100):
        found = gaussian.epsilon(mu, 1e-5)
        assert mu * mu / 2 * (1 - 1e-9) <= found <= mu * (mu / 2 + 5) * (1 + 1e-9)


def test_the_naive_difference_would_fail():
    """Why the code does not simply subtract: at these values the textbook line loses most of its digits."""
    from scipy.special import ndtr

    mu, epsilon = 1e-4, 5e-4
    naive = float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))
    truth = exact_delta(mu, epsilon)
    assert not near(naive, truth, 1e-12)
    assert near(gaussian.delta(mu, epsilon), truth, 1e-12)


# ------------------------------------------------------------------------------------------------- shape and refusals


def test_every_figure_is_monotone():
    epsilons = np.geomspace(1e-3, 500, 40)
    assert np.all(np.diff([gaussian.mu(e, DELTA) for e in epsilons]) > 0)
    assert np.all(np.diff([gaussian.delta(1.0, e) for e in epsilons[:28]]) < 0)
    assert np.all(np.diff([gaussian.epsilon(m, DELTA) for m in np.geomspace(1e-3, 60, 40)]) > 0)
    assert np.all(np.diff([gaussian.mu(1.0, d) for d in np.geomspace(1e-15, 0.5, 40)]) > 0)
    for view in ("PC_replace", "PC_addremove"):
        assert np.all(np.diff([sigma_g(1.0, view, clients=n) for n in range(1, 50)]) > 0)
    assert np.all(np.diff([sigma_g(1.0, "SA_replace", rounds=T) for T in range(1, 50)]) > 0)


def test_zero_and_infinity_have_their_limits():
    assert gaussian.mu(math.inf, DELTA) == math.inf
    assert gaussian.sigma(math.inf, DELTA) == 0.0
    assert gaussian.sigma(math.inf, DELTA, sensitivity=math.inf) == 0.0
    assert gaussian.sigma(1.0, DELTA, sensitivity=0.0) == 0.0
    assert gaussian.epsilon(0.0, DELTA) == 0.0
    assert gaussian.epsilon(1e-6, DELTA) == 0.0, "delta alone covers so small a mu"
    assert gaussian.epsilon(math.inf, DELTA) == math.inf
    assert gaussian.delta(0.0, 1.0) == 0.0
    assert gaussian.delta(math.inf, 1.0) == 1.0
    assert gaussian.delta(1.0, math.inf) == 0.0
    # At epsilon = 0 delta is the total variation distance, 2Φ(mu/2) - 1 = erf(mu / sqrt 8).
    assert near(gaussian.delta(0.7, 0.0), math.erf(0.7 / math.sqrt(8)), 1e-14)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gaussian.mu(-1.0, DELTA), "epsilon"),
        (lambda: gaussian.mu(math.nan, DELTA), "epsilon"),
        (lambda: gaussian.mu(1.0, 0.0), "delta"),
        (lambda: gaussian.mu(1.0, 1.0), "delta"),
        (lambda: gaussian.mu(1.0, math.nan), "delta"),
        (lambda: gaussian.epsilon(-1.0, DELTA), "mu"),
        (lambda: gaussian.epsilon(1.0, -1e-5), "delta"),
        (lambda: gaussian.delta(1.0, -1.0), "epsilon"),
        (lambda: gaussian.delta(math.nan, 1.0), "mu"),
        (lambda: gaussian.sigma(1.0, DELTA, sensitivity=-1.0), "sensitivity"),
        (lambda: gaussian.sigma(1.0, DELTA, sensitivity=math.inf), "sensitivity"),
        (lambda: gaussian.sigma(1.0, DELTA, releases=0), "releases"),
        (lambda: gaussian.mu_of([(-1.0, 1.0)]), "sensitivity"),
        (lambda: gaussian.mu_of([(1.0, math.nan)]), "std"),
        (lambda: gaussian.mu_of([(1.0, 1.0, -1)]), "count"),
    ],
)
def test_a_refusal_names_the_argument(call, name):
    with pytest.raises(SordinoError, match=name):
        call()
