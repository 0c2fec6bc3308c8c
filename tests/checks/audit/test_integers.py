"""Sums of integers under attack: the promise holds, too little noise is found, and sites encode what is attacked."""

import itertools

import numpy as np
import pytest
import torch

from sordino.checks.audit.attacks import AUDITED_MODEL
from sordino.checks.audit.integers import audit, integer_plan, opened
from sordino.cli import main
from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.engines.oracle import decode_sum, encode_integers
from sordino.engines.schedule import round_plans
from sordino.privacy.mechanisms.random import Seeded
from tests.support import tiers

SUMS = Privacy(1.0, 1e-5, trust=Trust.SECURE_AGGREGATION)


@pytest.mark.parametrize(
    ("unit", "adjacency"),
    tiers(
        itertools.product(Unit, Adjacency), [(Unit.RECORD, Adjacency.REPLACE_ONE), (Unit.CLIENT, Adjacency.ADD_REMOVE)]
    ),
)
def test_the_promise_is_reached_and_holds_and_halved_noise_is_found(unit, adjacency):
    privacy = Privacy(1.0, 1e-5, unit, adjacency)
    honest = audit("integers", privacy, runs=5000, seed=1)
    assert honest.reach == pytest.approx(1.0, abs=1e-3)
    assert honest.trust == Trust.SECURE_AGGREGATION
    assert not honest.broken
    assert honest.lower_gaussian > 0.4
    assert audit("integers", privacy, runs=5000, seed=1, noise_factor=0.5).broken


def test_an_opened_sum_is_what_the_clients_of_a_federation_encode():
    plan = integer_plan(SUMS)
    round_plan = next(round_plans(plan, AUDITED_MODEL))
    messages = [torch.tensor([0.3, -0.2, 0.1]), torch.tensor([0.0, 0.5, -0.4])]
    source = Seeded(3)
    total = sum(encode_integers(plan, round_plan, i, message, [0], source) for i, message in enumerate(messages))
    weighted = np.stack([plan.weights[i] * message.double().numpy() for i, message in enumerate(messages)])
    assert opened(plan, weighted, source, 1)[0] == pytest.approx(decode_sum(plan, round_plan, total).numpy(), abs=1e-12)


def test_the_command_attacks_integers(capsys):
    assert main(["audit", "integers", "--runs", "500", "--seed", "1", "--unit", "record"]) == 0
    assert capsys.readouterr().out.count("dp-fedgd integers") == 2
    for wrong in (["--batch", "poisson:4"], ["--trust", "untrusted-server"]):
        assert main(["audit", "integers", "--runs", "100", *wrong]) == 2
        assert "integers" in capsys.readouterr().err
