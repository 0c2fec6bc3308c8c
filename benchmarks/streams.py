"""The noise under factors of correlated noise, at equal privacy. Writes results/streams.{json,md}.

    OMP_NUM_THREADS=1 python benchmarks/streams.py           # about half a minute
    OMP_NUM_THREADS=1 python benchmarks/streams.py --sums    # only prints the table of docs/accounting.md

`--sums`: the standard deviation of the noise on the last running sum, and the root of its mean square over all of them,
as parts of those of independent noise. A unit takes part in every b-th round of a stream that all add to.

The page has the same two figures for the iterates of a server with heavy-ball momentum and weight decay. The factors
are the diagonals that `mechanism = banded` fits to this server, those that L-BFGS finds for running sums, for the last
iterate, for all of them and for the product that `banded` looks at, the beginning of the square root of the server's
weights, banded inverse roots, and buffered linear Toeplitz noise (BLT, fitted to all iterates). CPU seconds are those
of the diagonals alone, without dense factors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from provenance import provenance
from sordino.core import Correlated
from sordino.privacy.accounting import correlated
from sordino.privacy.accounting.inverse_root import InverseRoot

ROOT = Path(__file__).parents[1]
SHORT, LONG = 2_000, 10_000
SEPARATIONS = (1, 10, 100, SHORT)
SERVERS = ((0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01))  # momentum, weight decay
INVERSE_BANDS, BUFFERS = 128, 3
SEARCHES = {"search, last": (1.0, 0.0), "search, all": (0.0, 1.0), "search, both": (1.0, 1.0)}  # powers
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
    fresh = np.arange(1, rounds + 1) * len(np.arange(0, rounds, separation))
    squares = worst(noise, rounds, separation) ** 2 * variances(noise)
    return float(np.sqrt(squares[-1] / fresh[-1])), float(np.sqrt(squares.mean() / fresh.mean()))


def worst(noise: Factors, rounds: int, separation: int) -> float:
    """The sensitivity of a unit in every `separation`-th round, from the first or the latest possible one on."""
    return max(noise.sensitivity(np.arange(first, rounds, separation)) for first in {0, min(separation, rounds) - 1})


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


# ------------------------------------------------------------------------------- servers with momentum and weight decay


def served(releases: np.ndarray, momentum: float, decay: float) -> np.ndarray:
    """The iterates, up to a factor, of a server that gets these releases."""
    return np.asarray(lfilter([1.0], np.convolve([1.0, decay - 1.0], [1.0, -momentum]), releases, axis=0))


def root(rounds: int, band: int, momentum: float, decay: float) -> np.ndarray:
    """The first coefficients of the square root of the weights."""
    k = np.arange(1, min(band, rounds))
    of_sums = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    powers = np.arange(len(of_sums))
    return np.convolve(of_sums * (1 - decay) ** powers, of_sums * momentum**powers)[: len(of_sums)]


def searched(start: np.ndarray, w: np.ndarray, powers: tuple[float, float]) -> np.ndarray:
    """Diagonals c from 1 on with the least variance on the last iterate and its mean over all, to these powers.

    The last iterate has the noise y = (n w) / c with n_k the norm of the first k + 1 diagonals, because the encoder's
    columns are scaled to norm 1. For all iterates it is |c| (w / c), up to the last rounds.
    """
    rounds, bands = len(w), len(start)
    remaining = np.arange(rounds, 0.0, -1.0)

    def shifted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.array([x[k:] @ y[: rounds - k] for k in range(1, bands)])

    def error(tail: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], tail])
        lengths = np.sqrt(np.cumsum(c**2))
        n = np.concatenate([lengths, np.full(rounds - bands, lengths[-1])])
        y, g = lfilter([1.0], c, np.stack([n * w, w]))
        squares = np.array([y @ y, lengths[-1] ** 2 * (remaining @ g**2)])
        back = np.cumsum((lfilter([1.0], c, y[::-1])[::-1] * w / n)[::-1])[::-1]
        of_last = 2 * (tail * back[1:bands] - shifted(y, lfilter([1.0], c, y))) / squares[0]
        of_all = 2 * tail / (c @ c) - 2 * shifted(remaining * g, lfilter([1.0], c, g)) / (remaining @ g**2)
        value = float(np.dot(powers, np.log(squares)))
        return (value, powers[0] * of_last + powers[1] * of_all) if np.isfinite(value) else (1e3, 0 * tail)

    with np.errstate(all="ignore"):
        best = minimize(error, start[1:], jac=True, method="L-BFGS-B", options={"ftol": 1e-12, "maxiter": 500})
    return np.concatenate([[1.0], best.x])


def buffered(w: np.ndarray, separation: int) -> tuple[np.ndarray, float]:
    """(the noise's weights on the last iterate, sensitivity) of BLT: c_0 = 1 and c_k the sum of a_i b_i^(k - 1).

    The 2 `BUFFERS` numbers are fitted to all iterates, by L-BFGS with numerical derivatives. The earliest rounds are
    the worst, because c falls.
    """
    taken = np.zeros(len(w))
    taken[::separation] = 1.0
    remaining = np.arange(len(w), 0.0, -1.0)

    def factors(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shares, rates = np.exp(numbers[:BUFFERS]), 1 / (1 + np.exp(-numbers[BUFFERS:]))
        below = np.poly(rates)  # c = above / below
        above = below.copy()
        for i, share in enumerate(shares):
            above[1:] += share * np.poly(np.delete(rates, i))
        return above, below

    def parts(numbers: np.ndarray) -> tuple[np.ndarray, float]:
        above, below = factors(numbers)
        with np.errstate(all="ignore"):
            return lfilter(below, above, w), float(np.linalg.norm(lfilter(above, below, taken)))

    def error(numbers: np.ndarray) -> float:
        g, moved = parts(numbers)
        total = float(remaining @ np.square(g))
        return float(np.log(total) + 2 * np.log(moved)) if np.isfinite(total) else 1e3

    best = minimize(error, np.array([-2.0, -2.0, -2.0, 0.0, 3.0, 5.0]), method="L-BFGS-B")
    return parts(best.x)


def relative(g: np.ndarray, moved: float, w: np.ndarray, rounds: int, separation: int) -> list[float]:
    """(last, root mean square) of Toeplitz noise with the weights g, relative to independent noise of the same mu."""
    counts = np.arange(rounds, 0.0, -1.0)
    least = np.sqrt(len(np.arange(0, rounds, separation)))
    return [float(moved / least * np.sqrt(c @ g**2 / (c @ w**2))) for c in (np.ones(rounds), counts)]


def iterates(noise: Correlated, momentum: float, decay: float, separation: int) -> list[float]:
    """As `relative`, for dense factors."""
    rounds = len(noise.decoder)
    squares = worst(noise, rounds, separation) ** 2 * (served(noise.decoder, momentum, decay) ** 2).sum(1)
    fresh = (served(np.eye(rounds), momentum, decay) ** 2).sum(1) * len(np.arange(0, rounds, separation))
    return [float(np.sqrt(squares[-1] / fresh[-1])), float(np.sqrt(squares.mean() / fresh.mean()))]


def row(rounds: int, band: int, momentum: float, decay: float) -> dict[str, Any]:
    """All factors for one server, for units in every `band`-th round."""
    w = served(np.eye(1, rounds)[0], momentum, decay)  # the weights of a release on its own and later iterates
    ways: dict[str, Callable[[], np.ndarray]] = {
        "fitted": lambda: np.array(correlated.fitted_diagonals(rounds, band, momentum, decay)),
        "search, sums": lambda: searched(fitted, np.ones(rounds), SEARCHES["search, all"]),
        "square root": lambda: root(rounds, band, momentum, decay),
        **{name: partial(lambda powers: searched(fitted, w, powers), powers) for name, powers in SEARCHES.items()},
    }
    correlated.fitted_diagonals.cache_clear()
    found: dict[str, Any] = {}
    seconds = {}
    for name, way in ways.items():
        began = time.process_time()
        diagonals = way()
        seconds[name] = time.process_time() - began
        if name == "fitted":
            fitted = diagonals
        found[name] = iterates(correlated.toeplitz(rounds, diagonals), momentum, decay, band)
    inverse = InverseRoot(INVERSE_BANDS, rounds)
    g = lfilter(inverse.coefficients, [1.0], w)
    found["inverse-root"] = relative(g, inverse.worst_sensitivity(band), w, rounds, band)
    began = time.process_time()
    found["BLT"] = relative(*buffered(w, band), w, rounds, band)
    seconds["BLT"] = time.process_time() - began
    shape = {"rounds": rounds, "band": band, "momentum": momentum, "weight_decay": decay}
    rounded = {name: [round(x, 4) for x in pair] for name, pair in found.items()}
    return shape | {"noise": rounded, "seconds": {name: round(s, 3) for name, s in seconds.items()}}


HEADS = {
    "fitted": "`banded`",
    "search, sums": "L-BFGS, all running sums",
    "square root": "square root, cut off",
    "search, last": "L-BFGS, last iterate",
    "search, all": "L-BFGS, all iterates",
    "search, both": "L-BFGS, both",
    "inverse-root": f"`inverse-root`, {INVERSE_BANDS}",
    "BLT": f"BLT, {BUFFERS} buffers",
}


def page(document: dict[str, Any]) -> str:
    rows = document["rows"]
    products = [[np.sqrt(np.prod(r["noise"][name])) for r in rows] for name in ("fitted", "search, both")]
    behind = max(mine / best - 1 for mine, best in zip(*products, strict=True))
    most = {name: max(r["seconds"][name] for r in rows) for name in ("fitted", *SEARCHES, "BLT")}
    lines = [
        "# Noise that is fitted to the server",
        "",
        f"`{document['provenance']['command']}`. Standard deviation of the noise on the last iterate, and the root of "
        "its mean square over all iterates, as parts of those of independent noise at equal privacy. Less is better. "
        "Every unit takes part in every b-th round of a stream that all clients add to, and banded factors have b "
        "diagonals.",
        "",
        "| rounds | b | momentum | weight decay | " + " | ".join(HEADS.values()) + " |",
        "|---" * (4 + len(HEADS)) + "|",
    ]
    for r in rows:
        cells = [f"{r['rounds']:,}", str(r["band"]), f"{r['momentum']:g}", f"{r['weight_decay']:g}"]
        cells += [", ".join(f"{x:.3f}" for x in r["noise"][name]) for name in HEADS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [
            *lines,
            "",
            f"The geometric mean of the two figures, which `banded` looks at, is at most {100 * behind:.1f} % above "
            f"that of a search by L-BFGS. At most {most['fitted']:.2f} CPU seconds go into its diagonals, "
            f"{max(most[name] for name in SEARCHES):.2f} into those of a search and {most['BLT']:.2f} "
            "into BLT.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", action="store_true", help="only print the table of running sums")
    if parser.parse_args().sums:
        print("\n".join(table()))
        return
    rows = [row(rounds, band, *server) for rounds in (200, SHORT) for band in (10, 100) for server in SERVERS]
    document = {"provenance": provenance("OMP_NUM_THREADS=1 python benchmarks/streams.py"), "rows": rows}
    (ROOT / "results" / "streams.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (ROOT / "results" / "streams.md").write_text(page(document))


if __name__ == "__main__":
    main()
