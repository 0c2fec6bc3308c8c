"""Audits of DP-FedGD on low-rank adapters."""

import pytest

from sordino.checks.audit.adapters import adapted_network, audit
from sordino.core import Adjacency, Privacy
from sordino.models.pretrained import LORA_VARIANTS
from tests.support import tiers

RUNS = 500


def test_the_adapters_are_trained_and_the_layer_below_them_is_not():
    for variant in LORA_VARIANTS:
        names = set(adapted_network(variant).trained)
        assert any("head" in name for name in names)
        assert len(names) == (2 if variant == "freeze-a" else 3), names


@pytest.mark.parametrize("variant", tiers(LORA_VARIANTS, ["alternating", "fedsvd"]))
@pytest.mark.parametrize("adjacency", tiers(Adjacency, 1))
def test_half_the_noise_is_found_on_adapters(variant, adjacency):
    privacy = Privacy(1.0, 1e-5, adjacency=adjacency)
    honest = audit(variant, privacy, runs=RUNS, rounds=2, seed=3)
    assert honest.rounds == 2
    assert honest.reach > 0.999, "the canary reaches the clip in both rounds"
    assert not honest.broken
    assert audit(variant, privacy, runs=RUNS, rounds=2, seed=3, noise_factor=0.4).broken
