"""Shares of a limit, and that a ledger takes exactly the runs that were planned."""

import math

import pytest

from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Charge, Ledger
from sordino.privacy import budget
from sordino.privacy.accounting import gaussian


def run_of(number, epsilon, delta):
    """One release of a run with this budget."""
    return Charge("site", 0, "gradient", gaussian.mu(epsilon, delta), 1.0, 1, f"run {number}")


@pytest.mark.parametrize("weights", [[1.0] * 5, [3.0, 1.0, 1.0]])
def test_a_ledger_takes_the_planned_runs_and_no_more(tmp_path, weights):
    limit, delta = 8.0, 1e-5
    runs = budget.share(limit, delta, weights)
    with Ledger(tmp_path / "ledger.db", epsilon=limit, delta=delta) as ledger:
        for number, run in enumerate(runs):
            ledger.charge([run_of(number, run.epsilon, delta)])
            assert ledger.spent_epsilon("site", delta) == pytest.approx(run.epsilon_after, rel=1e-6)
        with pytest.raises(OverspentError):
            ledger.charge([run_of("more", 0.1, delta)])
    assert runs[-1].epsilon_after == pytest.approx(limit, rel=1e-9)


def test_shares_of_epsilon_itself_would_waste_half():
    runs = budget.share(8.0, 1e-5, [1.0] * 5)
    assert min(run.epsilon for run in runs) > 1.9 * 8 / 5


def test_what_was_spent_is_not_shared_again():
    mu = gaussian.mu(8.0, 1e-5)
    runs = budget.share(8.0, 1e-5, [1.0, 1.0], spent=0.6 * mu)
    assert math.sqrt(sum(run.mu**2 for run in runs)) == pytest.approx(0.8 * mu)
    with pytest.raises(SordinoError, match="nothing is left"):
        budget.share(8.0, 1e-5, [1.0], spent=mu)


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [math.inf]])
def test_wrong_weights(weights):
    with pytest.raises(SordinoError):
        budget.share(1.0, 1e-5, weights)
