"""The contract of correlated noise: true claims hold and are reached, and every mutant is found for what it is."""

import pytest

from sordino import checks
from sordino.checks.streams import CLAIMS, DRAWS, MECHANISMS, missed_mutants, streams, with_claim
from sordino.core import Unit
from sordino.methods import build


@pytest.mark.parametrize("mechanism", ["banded", "banded, fitted"])
def test_wrong_banded_noise_is_rejected(mechanism):
    method = build("dp-ftrl", **MECHANISMS[mechanism])
    found = streams(method)
    assert found.problems == []
    assert found.worst == pytest.approx(found.claimed, rel=1e-9), "the claim is reached"
    for claim in CLAIMS:
        assert any("a unit moves the stream" in each for each in streams(with_claim(method, claim)).problems), claim
    for draw in DRAWS:
        assert any("another covariance" in each for each in streams(method, source=draw).problems), draw


@pytest.mark.parametrize("mechanism", sorted(set(MECHANISMS) - {"banded", "banded, fitted"}))
@pytest.mark.soak
def test_mutants_of_other_mechanisms_are_rejected(mechanism):
    assert missed_mutants(build("dp-ftrl", **MECHANISMS[mechanism])) == []


@pytest.mark.soak
def test_every_mechanism_passes():
    reports = checks.check_streams()
    assert len(reports) == len(MECHANISMS) * len(Unit)
    assert all(report.passed for report in reports), reports
