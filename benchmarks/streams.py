"""The noise on running sums under factors of correlated noise, at equal privacy: `python benchmarks/streams.py`.

Prints a table of docs/accounting.md: the standard deviation of the noise on the last running sum, and the root of its
mean square over all of them, as parts of those of independent noise. A unit takes part in every b-th round of a stream
that all add to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from sordino.core import Correlated
from sordino.privacy.accounting import correlated
from sordino.privacy.accounting.inverse_root import InverseRoot

SHORT, LONG = 2_000, 10_000
SEPARATIONS = (1, 10, 100, SHORT)
Factors = Correlated | InverseRoot


def tree(rounds: int) -> Correlated:
    return correlated.least_squares(correlated.tree(rounds, honaker=False))


def variances(noise: Factors) -> np.ndarray:
    """Of the noise on each running sum."""
    if isinstance(noise, InverseRoot):
        return noise.prefix_variances()
    return np.asarray((np.cumsum(noise.decoder, 0) ** 2).sum(1))


def errors(noise: Factors, rounds: int, separation: int) -> tuple[float, float]:
    """(last, root mean square), relative to independent noise of the same mu."""
    worst = max(noise.sensitivity(np.arange(first, rounds, separation)) for first in {0, min(separation, rounds) - 1})
    fresh = np.arange(1, rounds + 1) * len(np.arange(0, rounds, separation))
    squares = worst**2 * variances(noise)
    return float(np.sqrt(squares[-1] / fresh[-1])), float(np.sqrt(squares.mean() / fresh.mean()))


def table() -> list[str]:
    builders: list[tuple[str, int, Callable[[int], Factors]]] = [
        ("`tree`", SHORT, tree),
        ("`banded`, 10", SHORT, partial(correlated.banded, band=10)),
        ("`banded`, 100", SHORT, partial(correlated.banded, band=100)),
        *[(f"`inverse-root`, {b}", SHORT, partial(InverseRoot, b)) for b in (10, 128, 1024)],
        *[(f"`inverse-root`, {b}", LONG, partial(InverseRoot, b)) for b in (10, 128, 1024)],
    ]
    heads = ["every round", *(f"every {s}th" for s in SEPARATIONS[1:-1]), "one round"]
    lines = [f"| noise | rounds | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for name, rounds, build in builders:
        noise = build(rounds)
        cells = [errors(noise, rounds, rounds if s == SHORT else s) for s in SEPARATIONS]
        lines.append(f"| {name} | {rounds:,} | " + " | ".join(f"{last:.3f}, {mean:.3f}" for last, mean in cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
