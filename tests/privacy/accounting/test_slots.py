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
    assert binom.sf(found, n, q) <= tail
    assert found == n or found <= n * q + 2 * math.sqrt(-2 * n * q * math.log(tail)) - math.log(tail) + 2
    if found < n:
        assert binom.sf(found - math.ceil(0.4 * (found - n * q)) - 1, n, q) > tail, "not far from the least"


def test_the_chance_of_an_overflow_over_a_run_is_a_small_part_of_delta():
    privacy = Privacy(4.0, 1e-6)
    plan = Plan(build("dp-fedavg", steps=5), 100, (1000, 40), privacy, sampling=Sampling.parse("poisson:16"))
    chance = sum(100 * 5 * binom.sf(m, n, q) for m, n, q in zip(plan.slots, plan.sizes, plan.rates, strict=True))
    assert (1 + math.exp(4.0)) * chance < slots.OVERFLOW * 1e-6


def test_all_records_and_fixed_numbers_need_no_room():
    for batch, want in (("full", (1000, 40)), ("fixed:16", (16, 16))):
        plan = Plan(build("dp-fedgd"), 5, (1000, 40), Privacy(4.0), sampling=Sampling.parse(batch))
        assert tuple(plan.slots) == want
