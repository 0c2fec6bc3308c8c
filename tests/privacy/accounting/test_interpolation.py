"""Where searches for many accounts start: sets of places, and values between them."""

import numpy as np
import pytest

from sordino.privacy.accounting import interpolation


def test_every_place_is_in_one_set_and_the_first_sets_are_far_apart():
    places = np.random.default_rng(0).uniform(size=(100, 2))
    sets = interpolation.spread_out(places, 3)
    assert [len(rows) for rows in sets] == [12, 36, 52]
    assert sorted(np.concatenate(sets).tolist()) == list(range(100))
    first = places[sets[0]]
    apart = np.sqrt(np.square(first[:, None] - first).sum(2)) + np.eye(12)
    assert apart.min() > 0.2


@pytest.mark.parametrize("number", [1, 5, 12, 13, 49])
def test_few_places_and_equal_ones_are_taken_once(number):
    sets = interpolation.spread_out(np.ones((number, 2)), 1)
    assert sorted(np.concatenate(sets).tolist()) == list(range(number))


def test_smooth_values_are_found_between_few_places():
    """Mutant: the nearest value."""
    places = np.random.default_rng(1).uniform(size=(200, 2))
    values = np.column_stack([np.sin(2 * places[:, 0]) * places[:, 1], 3 + places @ [1.0, -2.0]])
    sets = interpolation.spread_out(places, 3)
    known = np.concatenate(sets[:2])
    found = interpolation.interpolated(places[known], values[known], places[sets[2]])
    np.testing.assert_allclose(found[:, 0], values[sets[2], 0], atol=0.02)
    np.testing.assert_allclose(found[:, 1], values[sets[2], 1], atol=1e-9)


def test_places_on_a_line_are_enough():
    places = np.linspace(0, 1, 15)[:, None] * [1.0, 2.0]
    found = interpolation.interpolated(places[::2], places[::2, :1] ** 2, places[1::2])
    np.testing.assert_allclose(found, places[1::2, :1] ** 2, atol=5e-3)
