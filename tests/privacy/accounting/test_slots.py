"""Minibatches have a public number of places, and more records than places practically never come."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from sordino.core import Privacy
from sordino.methods import build
from sordino.privacy.accounting import slots
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan


@pytest.mark.parametrize(("n", "q"), [(1, 0.5), (20, 0.8), (1000, 0.016), (1000, 0.5), (50_000, 0.001)])
@pytest.mark.parametrize("tail", [1e-6, 1e-12, 1e-20])
def test_an_overflow_is_as_rare_as_asked_for_and_few_slots_are_wasted(n, q, tail):
    (found,) = slots.slots(np.array([n]), np.array([q]), math.log(tail))
    assert n * q <= found <= n
    assert found == n or binom.sf(found - 1, n - 1, q) <= tail, "of the other records, so that there is room for each"
    assert found == n or found <= n * q + 2 * math.sqrt(-2 * n * q * math.log(tail)) - math.log(tail) + 2
    if found < n:
        assert binom.sf(found - math.ceil(0.4 * (found - n * q)) - 1, n, q) > tail, "not far from the least"


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-12])
def test_the_chance_of_an_overflow_over_a_run_is_a_small_part_of_delta(delta):
    """It enters delta once, whatever epsilon is; a plan with a fixed noise may reach a larger one than it names."""
    options = {"rounds": 100, "sizes": (1000, 40), "sampling": Sampling.parse("poisson:16")}
    plan = Plan(build("dp-fedavg", steps=5), privacy=Privacy(4.0, delta), **options)
    chance = max(
        binom.sf(m - 1, n - 1, q) * (m < n) for m, n, q in zip(plan.slots, plan.sizes, plan.rates, strict=True)
    )
    assert 500 * chance < slots.OVERFLOW * delta
    assert chance < slots.MOST_OVERFLOW, "so that a ledger knows it without the delta of each run"
    noised = Plan(build("dp-fedavg", steps=5), privacy=Privacy(1.0, delta), noise=0.5, **options)
    assert tuple(noised.slots) == tuple(plan.slots)


def test_all_records_and_fixed_numbers_need_no_room():
    for batch, want in (("full", (1000, 40)), ("fixed:16", (16, 16))):
        plan = Plan(build("dp-fedgd"), 5, (1000, 40), Privacy(4.0), sampling=Sampling.parse(batch))
        assert tuple(plan.slots) == want
