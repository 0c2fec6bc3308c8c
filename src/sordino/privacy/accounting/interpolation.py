"""Numbers at some places from those at others: where searches for many like accounts start. Nothing here is a bound.

What an account needs, relative to the central limit, is a smooth function of the logarithms of its numbers. So the
answers of a few accounts that are far apart tell those of all others to about a part in a thousand.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
STEPS = 2**20  # of logarithms, per unit: distances of whole numbers are the same on every machine
FIRST = 12  # places of the first set
_LEAST_PART = 1e-12  # of the largest singular value: a smaller one counts as 0


def rounded_logs(columns: Array) -> Array:
    """The logarithms of positive numbers, as multiples of 1 / STEPS."""
    return np.asarray(np.rint(np.log(columns) * STEPS) / STEPS)


def spread_out(places: Array, growth: int) -> list[Array]:
    """All places, in sets of which each has `growth` times as many as the one before; those of a set lie far from each
    other and from those of earlier sets.

    Args:
      places: one row per place.
      growth: from one set to the next.

    Returns:
      The rows of each set.
    """
    chosen, far = list[int](), np.square(places - places.mean(0)).sum(1)
    sets, size, begin = list[Array](), FIRST, 0
    near = np.full(len(places), np.inf)
    while begin + size < len(places):
        for _ in range(size):
            place = int(np.argmax(near if chosen else far))
            chosen.append(place)
            near = np.minimum(near, np.square(places - places[place]).sum(1))
            near[place] = -1.0
        sets.append(np.array(chosen[begin:]))
        begin, size = begin + size, size * growth
    return [*sets, np.setdiff1d(np.arange(len(places)), chosen)]


def interpolated(known: Array, values: Array, places: Array) -> Array:
    """Values at some places from those at others: a sum of cubed distances and a linear function.

    In one dimension this is the natural cubic spline.

    Args:
      known: places with known values, one per row.
      values: the values there; each column is interpolated by itself.
      places: where values are wanted.

    Returns:
      The values, one row per place.
    """

    def terms(at: Array) -> Array:
        cubes = np.sqrt(np.square(at[:, None] - known).sum(2)) ** 3
        return np.column_stack([cubes, np.ones(len(at)), at])

    above = terms(known)
    size, linear = len(known), above[:, len(known) :]
    system = np.block([[above], [linear.T, np.zeros((linear.shape[1],) * 2)]])
    right = np.concatenate([values, np.zeros((len(system) - size, values.shape[1]))])
    return np.asarray(terms(places) @ np.linalg.lstsq(system, right, rcond=_LEAST_PART)[0])
