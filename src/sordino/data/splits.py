"""Seeded streams, and the division of records into parts."""

from __future__ import annotations

import math

import numpy as np

from sordino.errors import SordinoError


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A separate random stream per purpose, so that one seed serves all purposes."""
    if seed < 0:
        raise SordinoError(f"seed: {seed} must not be negative; use 0 or more.")
    return np.random.default_rng([seed, *purpose.encode()])


def parse_number(text: str, field: str, otherwise: str, *, whole: bool = False) -> float:
    """A finite number (`whole`: an int), or the error `field: otherwise`."""
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SordinoError(f"{field}: {otherwise}.")
    return number


def by_appearance(values: np.ndarray) -> np.ndarray:
    """A number per entry, equal for equal entries, in the order in which they appear first.

    Numbers in sorted order would depend on what all entries say: with another name for one unit, others would get
    another number, and with it another client, another minibatch or another side of a split.

    >>> by_appearance(np.array(["b", "a", "b", "c"])).tolist()
    [0, 1, 0, 2]
    """
    _, first, index = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[index.reshape(-1)])


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """`total` divided in proportion to `weights`, by largest remainders; at least one each."""
    exact = total * (weights / weights.sum())
    sizes: np.ndarray = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    for empty in np.flatnonzero(sizes == 0):
        sizes[sizes.argmax()] -= 1
        sizes[empty] = 1
    return sizes


def hold_out(strata: np.ndarray, fraction: float, rng: np.random.Generator, *, some: bool = True) -> np.ndarray:
    """Mask of test records: `fraction` of each stratum to within one record, and never a whole stratum; with `some`,
    at least one record in all."""
    sizes = np.bincount(strata)
    ends = sizes.cumsum()
    # The running total is rounded, because many small strata would each round to 0.
    quota = np.minimum(np.diff(np.rint(ends * fraction), prepend=0), np.maximum(sizes - 1, 0))
    order = np.lexsort((rng.random(len(strata)), strata))
    chosen = np.zeros(len(strata), bool)
    chosen[order] = np.arange(len(strata)) - np.repeat(ends - sizes, sizes) < np.repeat(quota, sizes)
    if some and not chosen.any():
        raise SordinoError(f"test_fraction: {fraction} of {len(strata)} records leaves no test part; raise it.")
    return chosen


def hold_out_persons(
    whose: np.ndarray, person: np.ndarray, fraction: float, rng: np.random.Generator, *, some: bool = True
) -> np.ndarray:
    """Mask of test records: all records of about `fraction` of each client's persons.

    A person at several clients counts for the client of its first record, and is held out at all of them. Who is held
    out depends on the order in which persons appear, and not on their numbers.
    """
    index = by_appearance(person)
    _, first = np.unique(index, return_index=True)
    return np.asarray(hold_out(whose[first], fraction, rng, some=some)[index])


def hold_out_clients(whose: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Mask of test records: all records of about `fraction` of the clients, at least of one."""
    clients = len(np.bincount(whose))
    chosen = max(1, round(fraction * clients))
    if clients - chosen < 2:
        raise SordinoError(
            f"test_fraction: {fraction:g} of {clients} clients, held out as a whole, leaves {clients - chosen} to "
            "train on, and 2 are needed; lower it, bring more clients, or bring a test part (x_test, y_test)."
        )
    return np.isin(whose, rng.permutation(clients)[:chosen])
