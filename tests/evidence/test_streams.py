"""The sensitivity of banded noise, computed again from a certificate, and certificates whose numbers were changed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sordino.core import Divisor, Privacy, Trust, Unit
from sordino.evidence import streams
from sordino.evidence import verify as verify_module
from sordino.evidence.certificate import certificate
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.privacy.accounting import correlated
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Secure
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from tests.support import tiers

SIZES = (40, 10, 25, 25)
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}
CASES = [
    ("record", "untrusted-server", "full", {}, None),
    ("record", "untrusted-server", "full", MOMENTUM, 5),
    ("record", "untrusted-server", "cyclic:2", MOMENTUM, None),
    ("record", "untrusted-server", "fixed:2", MOMENTUM, 7),
    ("record", "secure-aggregation", "full", MOMENTUM, 7),
    ("record", "secure-aggregation", "cyclic:4", MOMENTUM, None),
    ("record", "trusted-server", "cyclic:2", {"momentum": 0.5}, 5),
    ("client", "secure-aggregation", "fixed:2", {"weight_decay": 0.01}, None),
    ("client", "trusted-server", "fixed:1", MOMENTUM, 6),
    ("person", "secure-aggregation", "cyclic:2", {}, None),
]


def plan_for(unit="record", trust="secure-aggregation", participation="cyclic:4", rounds=9, band=3, **options):
    method = build("dp-ftrl", unit, mechanism="banded", band=band, **options)
    promise = Privacy(2.0, unit=Unit(unit), trust=Trust(trust), adjacency="add-remove")
    return Plan(method, rounds, SIZES, promise, Participation.parse(participation), Divisor.POOLED, schedule_seed=5)


def made(plan, done=None):
    return json.loads(json.dumps(certificate(plan, Secure(), version="0", done=done), allow_nan=False))


def changed(cert, change):
    """A copy of the certificate with a change."""
    forged = json.loads(json.dumps(cert))
    change(forged)
    return forged


def scaled(factor):
    """The sensitivity of every release, with the mu that follows from it."""

    def change(cert):
        cert["mu"] *= factor
        for group in cert["groups"]:
            group["mu"] *= factor
            for release in group["releases"]:
                release["sensitivity"] *= factor

    return change


def diagonal(k, factor):
    def change(cert):
        cert["queries"][0]["factor"]["diagonals"][k] *= factor

    return change


def setting(name, value):
    def change(cert):
        cert["queries"][0]["factor"][name] = value

    return change


FORGERIES = [scaled(0.99), scaled(1.01), setting("momentum", 0.2), setting("decay", 0.3)]
FORGERIES += [diagonal(k, factor) for k in range(3) for factor in (0.99, 1.01)]


def problems_of(cert):
    """Those about the stream, without the accounts, which take long for minibatches."""
    problems = []
    verify_module._check_bounds(cert, problems)
    return [each for each in problems if "sensitivity" in each or "diagonals" in each or "accounted" in each]


@pytest.mark.parametrize(("unit", "trust", "participation", "options", "done"), tiers(CASES, CASES[1:9]))
def test_the_sensitivity_of_banded_noise_is_computed_again(unit, trust, participation, options, done):
    cert = made(plan_for(unit, trust, participation, **options), done)
    verdict = verify(cert)
    assert verdict.problems == []
    assert [each for each in verdict.assumed if "was drawn" not in each] == []  # who came when is taken as listed
    for number, forgery in enumerate(FORGERIES):
        assert problems_of(changed(cert, forgery)), number


def test_a_stream_of_integers_is_computed_again():
    plan = replace(plan_for(participation="full", **MOMENTUM), integers=Integers(30, 0, 1))
    cert = made(plan)
    assert verify(cert).problems == verify(cert).assumed == []
    assert all(problems_of(changed(cert, forgery)) for forgery in FORGERIES)


def test_minibatches_of_banded_noise_are_one_release_per_round():
    """Mutants: fewer releases, a sensitivity that was changed, and a band that is wider than the rounds are apart."""
    plan = replace(plan_for(**MOMENTUM), sampling=Sampling.parse("poisson:2"))
    cert = made(plan)
    assert problems_of(cert) == verify_module._assumed_sensitivities(cert) == []
    assert all(problems_of(changed(cert, forgery)) for forgery in FORGERIES)

    def fewer(cert):
        cert["groups"][0]["releases"][0]["times"] -= 1

    assert any("it is accounted" in problem for problem in problems_of(changed(cert, fewer)))
    wide = list(correlated.fitted_diagonals(9, 5, 0.9, 0.1))
    with pytest.raises(ValueError, match="closer than the band"):
        problems_of(changed(cert, setting("diagonals", wide)))


def test_rounds_that_were_listed_wrongly_are_rejected():
    """Mutants: a client's rounds are left out, or moved to another round."""
    cert = made(plan_for(participation="fixed:2"))

    def leaves_out(cert):
        cert["groups"][0]["rounds"].pop()

    def moves(cert):
        rounds = cert["groups"][-1]["rounds"]
        rounds[0] = "0-2" if rounds[0] != "0-2" else "1-3"

    for change in (leaves_out, moves):
        assert any("listed rounds" in problem for problem in verify(changed(cert, change)).problems)


def test_factors_against_the_columns_of_the_encoder():
    """The mutant is the sensitivity of one round, for clients that come again within the band."""
    for band, momentum, decay in ((1, 0.0, 0.0), (4, 0.9, 0.0), (7, 0.5, 0.05), (20, 0.99, 0.5)):
        noise = correlated.banded(12, band, momentum, decay)
        assert streams._fitted(np.array(noise.diagonals), momentum, decay) == pytest.approx(noise.diagonals, rel=1e-9)
        for attended in ((0,), (11,), (0, 1, 2), (3, 5, 11), tuple(range(12))):
            columns = noise.encoder[:, list(attended)]
            total = streams._sum_of_columns(noise.diagonals, 12, attended)
            assert total == pytest.approx(columns.sum(1), rel=1e-12)
            own = streams._of_own_rows(noise.diagonals, 12, attended)
            assert min(own, streams._length(total)) == pytest.approx(
                noise.released_sensitivity(np.array(attended)), rel=1e-6
            )
            if len(attended) > 1 and band > 2:
                assert streams._length(total) > 1.1 * np.sqrt(len(attended))
