"""Parts of the budget where the schedule draws nobody for a stage."""

import numpy as np
import pytest

from sordino import Plan, Privacy, SordinoError, build
from sordino.privacy import calibration, releases, spending
from sordino.privacy.calibration import _shares
from sordino.privacy.participation import Participation


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_auto_is_calibrated_whomever_poisson_participation_draws(trust, rate):
    empty = 0
    for seed in range(12):
        participation = Participation.parse(f"poisson:{rate}")
        privacy = Privacy(2.0, trust=trust)
        plan = Plan(build("auto"), 6, (30,) * 4, privacy, participation, schedule_seed=seed)
        counts = [
            releases.release_counts(plan, level.stage, level.query)[0].max() for level in calibration.query_noises(plan)
        ]
        empty += min(counts) == 0
        assert spending.epsilon(plan) <= 2 * (1 + 1e-9), (
            "an empty stage never makes the others cost more than is promised"
        )
        assert np.isfinite([level.std for level in calibration.query_noises(plan)]).all()
        if sum(count > 0 for count in counts) == 1:  # one query is left, and the whole budget is its own
            assert spending.epsilon(plan) == pytest.approx(2.0)
    assert empty > 3, "this test is about empty stages"


def test_the_parts_that_are_spent_add_up_to_one():
    assert _shares([0.1, None, None], np.array([1.0, 1.0, 3.0])) == pytest.approx([0.1, 0.225, 0.675])
    assert _shares([0.1, None, None], np.array([0.0, 1.0, 3.0])) == pytest.approx([0, 0.25, 0.75])
    assert _shares([0.1, None, None], np.array([1.0, 0.0, 0.0])) == pytest.approx([1, 0, 0])
    assert _shares([0.25, 0.75], np.array([2.0, 0.0])) == pytest.approx([1, 0])
    assert len(_shares([], np.array([]))) == 0


@pytest.mark.parametrize("releases", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("given", [(0.5, 0.6), (0.5, 0.3), (1.0, None), (1.5, None)])
def test_a_wrong_declaration_is_refused_whatever_the_schedule_drew(given, releases):
    with pytest.raises(SordinoError, match="share: the parts of the budget add up to"):
        _shares(list(given), np.array(releases))
