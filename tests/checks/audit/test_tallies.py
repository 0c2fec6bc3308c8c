"""Many releases of a tally have the noise that the engine adds to one."""

import pytest
import torch

from sordino.checks.audit import tallies as attack
from sordino.checks.tallies import tallies
from sordino.core import Broadcast, Privacy, Trust
from sordino.engines import reference
from sordino.engines.schedule import round_plans
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.plan import Plan


@pytest.mark.parametrize("trust", [Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION])
def test_the_first_of_many_releases_is_the_engines_own(trust):
    checked, privacy = tallies()["evaluation"], Privacy(1.0, trust=trust)
    tally = checked.models[0]
    plan = Plan(checked.at(privacy.unit), 1, attack.SIZES, privacy)
    round_plan, theta = next(round_plans(plan, tally)), tally.init().double()
    _, records = attack._neighbours(tally, theta, privacy)
    mean = attack._before_noise(plan, round_plan, tally, theta, records)
    std = attack._std(plan, round_plan)
    released = attack.released_often(plan, round_plan, mean, std, Seeded(5), 50)
    if plan.only_sums_visible:
        messages = [attack._answer(round_plan, tally, theta, records, i, None) for i in range(plan.clients)]
        engines = reference.noised_sum(round_plan, messages, list(plan.weights), [0], Seeded(5), theta)
    else:
        ask = reference.oracle(tally, records, round_plan, attack.VICTIM, Seeded(5))
        engines = round_plan.stage.local.compute(ask, Broadcast(theta), (), ())
    assert torch.allclose(released[0], engines, atol=1e-3 * std)
    assert not torch.allclose(released[1], engines, atol=1e-3 * std), "every release has noise of its own"
