"""The root finder, beside scipy's and at the ends of the range of floats."""

import math

import pytest
from scipy.optimize import brentq

from sordino.errors import SordinoError
from sordino.privacy.accounting.roots import root

FUNCTIONS = [
    (lambda x: x * x - 2, 0.0, 2.0),
    (lambda x: math.exp(x) - 1e6, 0.0, 100.0),
    (lambda x: math.log(x) + 600, 1e-300, 1.0),
    (lambda x: (x - 1) ** 3, 0.0, 3.0),
    (lambda x: math.atan(x - 0.3), -50.0, 1e4),
    (lambda x: -1.0 if x < 1e-200 else 1.0, 0.0, 1.0),
    (lambda x: -math.inf if x < 0.1 else x - 0.5, 0.0, 1.0),
]


@pytest.mark.parametrize(("f", "low", "high"), FUNCTIONS)
def test_it_agrees_with_brents_method(f, low, high):
    expected = brentq(f, low, high, xtol=1e-300, rtol=1e-14, maxiter=2000)
    assert root(f, low, high, 1e-14) == pytest.approx(expected, rel=1e-5 if f(1.0) == 0 else 3e-14)


def test_a_smooth_function_takes_few_steps():
    calls = []
    assert root(lambda x: calls.append(x) or math.cos(x) - x, 0.0, 1.0, 1e-14) == pytest.approx(0.7390851332151607)
    assert len(calls) < 15


def test_the_ends_may_be_roots_and_may_come_in_either_order():
    assert root(lambda x: x, 0.0, 1.0, 1e-14) == 0.0
    assert root(lambda x: x - 1, 1.0, 0.25, 1e-14) == 1.0


def test_equal_signs_are_refused():
    with pytest.raises(SordinoError, match="must differ in sign"):
        root(lambda x: x * x + 1, -1.0, 1.0, 1e-14)
