"""Random plans: no claim is broken, mutants are found, and a case is reproduced by its seed and number."""

import json

import numpy as np
import pytest

from sordino.checks.fuzz import _network, fuzz, run_case
from sordino.checks.mutants import half_claimed, some_unclipped
from sordino.checks.streams import OneRound, with_claim
from sordino.cli import main
from sordino.core import Unit
from sordino.methods import REGISTRY
from sordino.models.torch_model import TorchModel
from sordino.tree import tree_map

HOUR = 3600  # these tests end by a number of cases, not by time


def leaks(method, model):
    """Mutant: every message carries a sum of raw features beside the noised answers."""

    def change(stage):
        def compute(ask, broadcast, memory, cache):
            message = stage.local.compute(ask, broadcast, memory, cache)
            raw = ask._all().x.clamp(-1, 1).sum((-1, -2))
            return tree_map(lambda leaf: leaf + raw.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1)), message)

        return stage._replace(local=stage.local._replace(compute=compute))

    return method._replace(stages=tuple(map(change, method.stages))), model


def test_random_plans_keep_their_claims():
    found = fuzz(HOUR, seed=1, most=25, pairs=100)
    assert found.violations == []
    assert found.cases == 25
    assert found.pairs > 2000
    assert 0.99 < found.worst <= 1 + 1e-9, "some pair comes near a claim"


def test_a_law_that_only_networks_serve_is_tried_on_a_network():
    method = REGISTRY["auto"].at(Unit.RECORD, network=True)
    for seed in range(5):
        _, model = _network(np.random.default_rng(seed), method)
        assert isinstance(model, TorchModel)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_many_random_plans_keep_their_claims(seed):
    found = fuzz(HOUR, seed=100 + seed, most=1000)
    assert found.violations == []
    assert found.pairs > 100_000


@pytest.mark.parametrize("mutant", [half_claimed, some_unclipped, leaks])
def test_a_mutant_is_found_and_reproduced(mutant):
    found = fuzz(HOUR, seed=2, most=6, pairs=60, mutant=mutant)
    assert found.violations
    first = found.violations[0]
    again = run_case(first.seed, first.case, pairs=60, mutant=mutant)
    assert first in again.violations
    assert run_case(first.seed, first.case, pairs=60).violations == [], "the mutant alone is to blame"


def test_a_wrong_claim_about_correlated_noise_is_found():
    def mutant(method, model):
        return with_claim(method, OneRound), model

    found = run_case(1, 4, pairs=20, mutant=mutant)
    assert found.where.startswith("dp-ftrl")
    assert {each.query for each in found.violations} == {"stream"}


def test_the_command(capsys):
    assert main(["check", "--fuzz", "9", "--seed", "1", "--case", "3"]) == 0
    assert "no violation" in capsys.readouterr().out
    assert main(["check", "--fuzz", "9", "--seed", "1", "--case", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cases"], document["violations"]) == (1, [])
    for wrong, message in (
        (["check", "--fuzz", "1", "dp-fedgd"], "--fuzz: it draws methods by chance"),
        (["check", "--fuzz", "0"], "--fuzz: 0 seconds"),
        (["check", "--case", "3"], "--case: it names a case of --fuzz"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
