"""What the tests share: tiers of parameters, and the list of the longest tests."""

import json
import re

import pytest

from tests.conftest import DURATIONS
from tests.support import tiers


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


def test_the_longest_tests_exist():
    for name, seconds in json.loads(DURATIONS.read_text()).items():
        path, _, function = name.partition("::")
        text = (DURATIONS.parents[2] / path).read_text()
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), name
        assert seconds > 0
