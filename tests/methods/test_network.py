"""`auto` for networks: what it releases, under which law, and where it is refused."""

import math

import numpy as np
import pytest
import torch

from sordino import checks
from sordino.checks import mutants, small_network
from sordino.core import Adjacency, Kind, Privacy, Trust, Unit
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import REGISTRY, build
from sordino.methods.network import USUAL_MINIBATCHES
from sordino.privacy import spending
from sordino.privacy.calibration import aggregate_std
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Sampling
from sordino.privacy.plan import Plan
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from tests.support import tiers

ROUNDS = 3


def records():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    return Records.of(x, (x[:, 0] > 0).astype(np.int64), np.repeat(np.arange(3), 20))


def plan(trust=Trust.UNTRUSTED_SERVER, method="auto", batch="poisson:8", **options):
    options = {"network": True, **options} if method == "auto" else options
    privacy, sampling = Privacy(8.0, trust=trust), Sampling.parse(batch)
    return Plan(build(method, **options), ROUNDS, records().sizes, privacy, sampling=sampling)


def test_one_gradient_per_round_is_released_whose_norm_is_the_clip():
    (stage,) = build("auto", network=True, clip=3.0).stages
    (query,) = stage.queries
    assert (query.kind, query.clip, query.clipping.law, query.psd) == (Kind.GRADIENT, 3.0, "automatic", False)
    assert query.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == 6.0
    assert build("auto", "person", network=True).proves == {(Unit.PERSON, trust) for trust in Trust}


@pytest.mark.parametrize("trust", Trust)
def test_the_account_is_that_of_dp_fedadam(trust):
    assert spending.epsilon(plan(trust)) == pytest.approx(spending.epsilon(plan(trust, "dp-fedadam")), rel=1e-12)


@pytest.mark.soak
def test_the_clip_changes_nothing_but_the_unit():
    model, ends = small_network(), []
    for clip in (5.0, 0.01):
        *_, last = simulate.run(plan(batch="full", clip=clip), model, records(), Seeded(4))
        ends.append(last.model)
    assert torch.isfinite(ends[0]).all()
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("unit", "minibatches"), tiers([(Unit.RECORD, 2), (Unit.RECORD, 1), (Unit.PERSON, 1), (Unit.PERSON, 2)], 1)
)
def test_it_keeps_its_contracts_and_both_engines_agree(unit, minibatches):
    method = REGISTRY["auto"].at(unit, network=True, minibatches=minibatches)
    reports = checks.check("auto", trials=checks.LEAST_TRIALS, method=method)
    assert {report.adjacency for report in reports} == set(Adjacency)
    for report in reports:
        assert report.passed, report.problems
        assert checks.REQUIRED_SHARE * report.claimed <= report.worst_found <= report.claimed


def test_several_minibatches_are_several_releases_and_are_proved_against_an_untrusted_server_alone():
    five = build("auto", network=True, minibatches=5)
    assert (five.stages[0].queries[0].calls, five.proves) == (5, {(Unit.RECORD, Trust.UNTRUSTED_SERVER)})
    steps = plan(method="dp-fedavg", steps=5)
    assert spending.epsilon(plan(minibatches=5)) == pytest.approx(spending.epsilon(steps), rel=1e-12)
    with pytest.raises(SordinoError, match="minibatches = 1"):
        plan(Trust.SECURE_AGGREGATION, minibatches=5)
    with pytest.raises(SordinoError, match="minibatches: 0 must be at least 1"):
        build("auto", network=True, minibatches=0)


def test_the_mean_of_several_minibatches_has_less_noise_than_one():
    std = [aggregate_std(plan(batch="poisson:1", minibatches=k), 0) / math.sqrt(k) for k in (1, 5)]
    assert std[1] < 0.9 * std[0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"batch": "poisson:8"}, USUAL_MINIBATCHES),
        ({"batch": "poisson:8", "minibatches": 2}, 2),
        ({"batch": "poisson:8", "trust": "secure-aggregation"}, 1),
        ({}, 1),
    ],
)
def test_a_run_chooses_the_number_of_minibatches(keys, expected):
    resolved = resolve(Spec.of({"data": "digits", "model": "cnn", "method": "auto", "clients": 2, **keys}))
    assert resolved.options["minibatches"] == expected


def test_a_check_of_auto_covers_networks_with_one_minibatch_per_round_and_with_two():
    forms = [(method.unit, mutants.network_form(method)[0]) for method in checks.subjects("auto")]
    assert forms[: len(Unit)] == [(unit, "") for unit in Unit]
    assert forms[len(Unit) :] == [
        (unit, form) for form in ("automatic", "automatic, 2 minibatches") for unit in (Unit.RECORD, Unit.PERSON)
    ]
    assert [method.unit for method in checks.subjects("dp-fedadamw")] == [Unit.RECORD, Unit.PERSON]


@pytest.mark.parametrize(
    ("mutant", "refusal"),
    [
        (mutants.declares_a_call_less, "declares 2 calls per round and was asked once more"),
        (mutants.asks_one_minibatch_again, "a minibatch was asked about more often than joint=1"),
    ],
)
def test_minibatches_that_are_not_paid_for_are_rejected(mutant, refusal):
    method = build("auto", network=True, minibatches=3)
    assert checks.asks(method, small_network()) == []
    problems = checks.asks(*mutant(method, small_network()))
    assert len(problems) == 2, "both engines refuse"
    for problem in problems:
        assert refusal in problem
    assert not mutants.breaks(mutant, build("auto", network=True)), "one gradient per round cannot be wrong so"


def test_client_level_is_refused():
    with pytest.raises(SordinoError, match=r"network: auto normalises gradients of records.*unit = record"):
        build("auto", "client", network=True)
