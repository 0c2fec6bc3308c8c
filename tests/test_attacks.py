"""benchmarks/attacks.py in small sizes: the classes of attack that no other test runs, and its own mutants."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.core import Shard
from sordino.models.linear import Linear, Loss

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def attacks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("attacks", ROOT / "benchmarks" / "attacks.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", ["minibatch", "zero-record", "terms", "tail", "cohort", "timing-files"])
def test_the_attack_fails(attacks, name):
    for finding in attacks.ATTACKS[name](True):
        assert finding.verdict == attacks.FAILED, finding


def test_beyond_the_old_end_of_the_noise_draws_go_on(attacks):
    (furthest, *_) = [finding.details["furthest"] for finding in attacks.tail(True)]
    assert furthest > attacks.END + 0.1


class RoundsByCount(Linear):
    """Mutant: how many records came decides how each is rounded."""

    def clipped_sum(self, theta, shard, clip, scale=None):
        here = shard.mask > 0
        theta = theta * (1 - 2.0**-18 * (int(here.sum()) % 2))
        return super().clipped_sum(theta, Shard(shard.x[here], shard.y[here], shard.mask[here]), clip)


def test_a_minibatch_whose_shape_is_that_of_the_draw_is_found(attacks):
    with attacks.compiled(False):
        assert max(attacks.toggled(RoundsByCount(64, 1, Loss.LOGISTIC), 1e-7, seed) for seed in range(4)) > 1.5
        assert max(attacks.toggled(Linear(64, 1, Loss.LOGISTIC), 1e-7, seed) for seed in range(4)) <= 1


class Overflows(Linear):
    """Mutant: the factor of a gradient is the clip over its length."""

    def clipped_sum(self, theta, shard, clip, scale=None):
        length = shard.x.norm(dim=-1, keepdim=True)
        return (clip * shard.x / length * shard.mask.unsqueeze(-1)).sum(0)


def test_a_sum_that_a_record_of_zeros_makes_nan_is_found(attacks):
    moved = attacks.moved_by_third(Loss.LOGISTIC, torch.float64, False, 1.0, 0.0, model=Overflows)
    assert moved["gradient"] == np.inf
    assert moved["gram"] == 0


def test_low_bits_that_tell_of_the_cohort_are_found(attacks):
    """Noise of each client on a grid of its own, weighted and added up; and all on the grid, but coarser for one."""
    chance = np.random.default_rng(0)
    cohorts = chance.binomial(7, 0.3, 200).tolist()
    grid, weight = 2.0**-12, 1 / 2.1
    own = [[grid * chance.integers(-9999, 9999, 100) for _ in range(max(size, 1))] for size in cohorts]
    off, _ = attacks.low_bits([weight * sum(parts) for parts in own], cohorts, grid * weight)
    assert off > 100
    on_grid = [parts[0] * (2 if size == 1 else 1) for parts, size in zip(own, cohorts, strict=True)]
    off, p = attacks.low_bits(on_grid, cohorts, grid)
    assert off == 0
    assert p < 1e-10
    assert attacks.low_bits([parts[0] for parts in own], cohorts, grid) > (0, 1e-4)


def test_the_table_and_the_exit_status(attacks, tmp_path, monkeypatch):
    out = tmp_path / "attacks.json"
    assert attacks.main(["--quick", "--only", "drift", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["provenance"]["command"] == "python benchmarks/attacks.py --quick"
    assert "| 1 | failed |" in out.with_suffix(".md").read_text()
    for verdict in (attacks.SUCCEEDED, attacks.TOO_WEAK):
        finding = attacks.Finding("drift", "", "", "", "1", verdict, {})
        monkeypatch.setitem(attacks.ATTACKS, "drift", lambda quick, found=finding: [found])
        assert attacks.main(["--quick", "--only", "drift", "--out", str(out)]) == 1
        assert f"**{verdict}**" in out.with_suffix(".md").read_text()
