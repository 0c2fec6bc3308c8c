"""Calibrated intercepts and slope under attack: the promise holds, too little noise and wrong counts are found."""

import pytest

from sordino.checks.audit import attacks
from sordino.checks.audit.attacks import audit
from sordino.cli import main
from sordino.core import Adjacency, Privacy, Unit
from sordino.methods import entry
from sordino.methods.calibration import calibrated
from sordino.models.linear import Linear

CASES = [(unit, adjacency) for unit in (Unit.RECORD, Unit.PERSON) for adjacency in Adjacency]


def attacked(unit, adjacency, runs, noise_factor=1.0):
    method = calibrated(entry("dp-fedgd").at(unit, clip=0.05), 0.25, 0.25)
    privacy = Privacy(1.0, 1e-5, unit=unit, adjacency=adjacency)
    return audit("calibrate", privacy, runs=runs, seed=1, method=method, noise_factor=noise_factor)


@pytest.mark.soak
@pytest.mark.parametrize(("unit", "adjacency"), CASES)
def test_an_attack_does_not_break_the_promise_and_finds_halved_noise(unit, adjacency):
    honest = attacked(unit, adjacency, 300)
    assert not honest.broken
    assert honest.reach > 0.9
    assert honest.least_claim > 0.9, "the calibration's own claims are reached too"
    assert attacked(unit, adjacency, 1000, noise_factor=0.3).broken


class CountsAgain(Linear):
    """Mutant: every record counts four times in the shares of classes."""

    def calibration_sum(self, theta, shard, clip, differences=False):
        return 4 * super().calibration_sum(theta, shard, clip, differences)


@pytest.mark.soak  # long statistics
def test_a_record_that_counts_again_is_found(monkeypatch):
    monkeypatch.setattr(attacks, "CLASS_MODEL", CountsAgain(3, 2))
    assert attacked(Unit.PERSON, Adjacency.ADD_REMOVE, 500).broken


def test_the_command_line_attacks_calibration(capsys):
    words = ["audit", "calibrate", "--runs", "100", "--seed", "1", "--unit", "record", "--adjacency", "add-remove"]
    assert main(words) == 0
    assert "calibrate" in capsys.readouterr().out
    for wrong in (["--batch", "poisson:4"], ["--unit", "client"]):
        assert main(["audit", "calibrate", "--runs", "100", *wrong]) == 2
        assert "calibrate" in capsys.readouterr().err
