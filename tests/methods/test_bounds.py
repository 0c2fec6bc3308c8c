"""Every method declares what its options are, and its defaults lie in the declared ranges."""

import math

import pytest

from sordino.methods import REGISTRY
from sordino.methods.bounds import CHOICE, CLIP, COUNT, STEP_SIZE, WEIGHT, declare


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_is_declared_once_and_its_default_is_allowed(name):
    entry = REGISTRY[name]
    assert entry.bounds.keys() == entry.options.keys()
    assert [key for key, value in entry.options.items() if not entry.bounds[key].allows(value)] == []


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_called_a_clip_is_declared_as_one(name):
    named = {key for key in REGISTRY[name].options if "clip" in key}
    assert {key: REGISTRY[name].bounds[key] for key in named} == dict.fromkeys(named, CLIP)


@pytest.mark.parametrize(
    ("bound", "value", "allowed"),
    [
        (CLIP, 1e-6, True),
        (CLIP, 1e-7, False),
        (CLIP, 1e7, False),
        (CLIP, math.nan, False),
        (CLIP, math.inf, False),
        (CLIP, "1", False),
        (CLIP, True, False),
        (COUNT, 10_000, True),
        (COUNT, 10_001, False),
        (COUNT, -1, False),
        (STEP_SIZE, 0.5, True),
        (STEP_SIZE, -0.5, False),
        (WEIGHT, 0, True),
        (WEIGHT, None, False),
        (CHOICE, "tree", True),
        (CHOICE, False, True),
        (CHOICE, 1.0, False),
    ],
)
def test_a_value_is_of_the_kind_and_in_the_range(bound, value, allowed):
    assert bound.allows(value) is allowed


def test_a_declaration_lists_names():
    assert declare(clips="a b", choices="c") == {"a": CLIP, "b": CLIP, "c": CHOICE}
