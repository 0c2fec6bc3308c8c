"""The second accountant: its closed form. Samples are compared where their accounts are tested."""

import itertools

import pytest

from sordino.evidence import second_account
from sordino.privacy.accounting import gaussian


@pytest.mark.parametrize(
    ("mu", "delta"), [(0.05, 1e-3), (0.3, 1e-6), (1.0, 1e-5), (1.0, 1e-10), (4.0, 1e-2), (20.0, 1e-5)]
)
def test_the_formula_is_what_dp_accounting_computes(mu, delta):
    """Its distributions are discretised, and rounded upwards."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    found = second_account._by_formula(mu, delta)
    accountant = PLDAccountant(value_discretization_interval=1e-4 * mu)
    accountant.compose(GaussianDpEvent(2 / mu), 4)
    assert accountant.get_epsilon(delta) == pytest.approx(found, rel=1e-3)
    assert second_account._by_formula(1.01 * mu, delta) > 1.001 * found > 0


def test_the_formula_holds_at_its_ends():
    assert second_account._by_formula(1e-6, 1e-5) == 0.0
    assert second_account._by_formula(1e-3, 0.5) == 0.0
    for mu, delta in itertools.product((1e-5, 0.1, 3.0, 100.0, 300.0), (0.3, 1e-9, 1e-200)):
        assert second_account._by_formula(mu, delta) == pytest.approx(gaussian.epsilon(mu, delta), rel=1e-8, abs=1e-12)
