"""What the tests share: tiers of parameters, and the list of the longest tests."""

import inspect
import itertools
import json
import re

import pytest
from hypothesis import strategies as st

from tests.conftest import DURATIONS
from tests.support import covering, fuzzed, tiers


def soaked(cases):
    return [bool(getattr(case, "marks", ())) for case in cases]


def test_tiers_keep_every_case_and_mark_all_but_the_quick_ones():
    cases = tiers([(1, "a"), (2, "b"), (3, "c")], [(2, "b")])
    assert soaked(cases) == [True, False, True]
    assert [getattr(case, "values", case) for case in cases] == [(1, "a"), (2, "b"), (3, "c")]
    assert soaked(tiers("abc", 2)) == [False, False, True]


@pytest.mark.parametrize("quick", [0, [], ["d"]])
def test_make_test_keeps_at_least_one_case(quick):
    with pytest.raises(ValueError, match="make test needs at least one"):
        tiers("abc", quick)


def test_covering_combinations_hold_every_pair():
    axes = (range(4), "abc", [True, False])
    cases = covering(*axes)
    assert len(cases) == len(set(cases)) == 12
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(one, other))


def test_a_property_is_tried_with_the_examples_of_its_tier():
    seen = []

    @fuzzed(5, 9, st.integers(0, 10**6))
    def collected(fixture, number):
        """What it says."""
        assert fixture == "given"
        seen.append(number)
        assert 0 <= number <= 10**6

    assert list(inspect.signature(collected).parameters) == ["examples", "fixture"]
    assert (collected.__name__, collected.__doc__) == ("collected", "What it says.")
    (mark,) = collected.pytestmark
    assert soaked(mark.args[1]) == [False, True]
    collected(5, fixture="given")
    assert len(seen) == 5

    @fuzzed(200, 300, number=st.integers())
    def wrong(number):
        assert number < 100

    with pytest.raises(AssertionError):
        wrong(200)


def test_the_longest_tests_exist():
    for name, seconds in json.loads(DURATIONS.read_text()).items():
        path, _, function = name.partition("::")
        text = (DURATIONS.parents[2] / path).read_text()
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), name
        assert seconds > 0
