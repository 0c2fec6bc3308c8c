"""Settings to try: the coarse and fine grids of the papers, and a default grid of five step sizes for most others.

The preset `steps` is the default grid for all methods: few settings, which a search within the budget can afford.
The grids are table 2 of the DP-FedSOFIM paper, under the names of this library. The table does not state the local step
of DP-FedAvg (0.1 here). Its steps for DP-FTRL are far too large under fully accounted noise, so the grid also has those
of DP-FedGD. The fine grid of DP-FedGD also has steps between 0.1 and 0.3, where the printed one has none. For small
budgets the paper adds parts to DP-FedSOFIM; its grid tries them with and without (`SMALL_BUDGETS`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sordino.errors import check_known
from sordino.methods import entry

Grid = dict[str, tuple[Any, ...]]

COARSE: dict[str, Grid] = {
    "dp-fedgd": {"lr": (1e-4, 1e-3, 0.01, 0.1, 1.0, 5.0, 10.0)},
    "dp-fedavg": {"lr": (1e-3, 0.01, 0.1, 0.5, 1.0), "steps": (1, 3, 5, 10, 20), "local_lr": (0.1,)},
    "dp-fedfc": {"lr": (1e-4, 1e-3, 0.01, 0.1, 1.0, 5.0), "gamma": (0.01, 0.1, 1.0, 10.0, 100.0)},
    "dp-scaffold": {
        "lr": (0.01, 0.1, 0.5, 1.0, 5.0),
        "local_lr": (0.001, 0.01, 0.1, 0.5),
        "steps": (1, 5, 10),
    },
    "dp-fedadam": {
        "lr": (1e-4, 1e-3, 0.01, 0.1, 1.0),
        "beta1": (0.0, 0.8, 0.9),
        "beta2": (0.8, 0.9, 0.999),
        "tau": (1e-5, 1e-3, 0.01, 0.1),
    },
    "dp-fedyogi": {
        "lr": (1e-4, 1e-3, 0.01, 0.1, 1.0),
        "beta1": (0.0, 0.5, 0.9),
        "beta2": (0.5, 0.9, 0.999),
        "tau": (1e-5, 1e-3, 0.01, 0.1),
    },
    "dp-ftrl": {"lr": (1e-3, 0.01, 0.1, 0.5, 1.0, 3.0, 5.0, 7.0, 10.0)},
    "dp-adafedprox": {
        "lr": (0.1, 0.3, 0.5, 1.0, 3.0),
        "local_lr": (0.001, 0.01, 0.05, 0.1, 0.5),
        "mu": (0.001, 0.01, 0.1, 0.5, 1.0),
        "steps": (1, 3, 5, 7),
    },
    "dp-fedsofim": {
        "lr": (1e-3, 0.01, 0.1, 1.0, 5.0),
        "rho": (0.01, 0.1, 1.0, 5.0, 10.0),
        "beta": (0.8, 0.9, 0.99),
    },
}

FINE: dict[str, Grid] = {
    "dp-fedgd": {"lr": (0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3)},
    "dp-fedavg": {"lr": (0.3, 0.5, 0.6, 0.8, 1.0), "steps": (1, 2, 5, 7, 10), "local_lr": (0.1,)},
    "dp-fedfc": {"lr": (0.1, 0.15, 0.3, 0.4, 0.5, 2.0), "gamma": (0.5, 1.0, 2.0, 5.0, 10.0)},
    "dp-scaffold": {
        "lr": (0.3, 0.5, 0.7, 1.0, 2.0),
        "local_lr": (0.05, 0.1, 0.2, 0.3),
        "steps": (1, 3, 5, 7, 10),
    },
    "dp-fedadam": {
        "lr": (0.01, 0.02, 0.05, 0.1),
        "beta1": (0.8, 0.9, 0.95),
        "beta2": (0.8, 0.999, 0.9999),
        "tau": (1e-5, 0.01, 0.05, 0.1),
    },
    "dp-fedyogi": {
        "lr": (0.01, 0.02, 0.05, 0.1, 0.2),
        "beta1": (0.5, 0.9, 0.95),
        "beta2": (0.5, 0.9, 0.999),
        "tau": (1e-5, 0.01, 0.05, 0.1),
    },
    "dp-ftrl": {"lr": (0.03, 0.05, 0.08, 0.1, 0.3, 3.0, 3.5, 5.0, 7.0, 8.0, 9.0)},
    "dp-adafedprox": {
        "lr": (0.5, 0.6, 0.8, 1.0, 1.5),
        "local_lr": (0.05, 0.1, 0.2, 0.3),
        "mu": (0.01, 0.05, 0.1, 0.2),
        "steps": (1, 3, 5),
    },
    "dp-fedsofim": {
        "lr": (0.1, 0.2, 0.5, 1.0, 3.0, 4.0),
        "rho": (0.5, 1.0, 5.0, 10.0, 20.0),
        "beta": (0.8, 0.85, 0.9, 0.95),
    },
}

PRESETS: dict[str, dict[str, Grid]] = {"paper-coarse": COARSE, "paper-fine": FINE, "steps": {}}
SCALED: Grid = {"lr": (0.01, 0.03, 0.1, 0.3, 1.0), "w": (0.5, 0.9), "tau": (1e-3, 0.01)}
RIDGES: Grid = {"ridge": (0.01, 0.1, 1.0, 10.0, 100.0)}
OWN: dict[str, dict[str, Grid]] = {  # of methods that no paper tunes here, by preset
    "dp-fedadam-scaled": {"paper-coarse": SCALED, "paper-fine": SCALED},
    "dp-statistics": {
        "paper-coarse": RIDGES,
        "paper-fine": {
            "share": (0.05, 0.2, 0.5),
            "ridge": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        },
        "steps": RIDGES,
    },
}
UNTUNED = ("auto", "dp-class-means")  # settings follow from public facts, or do not change which class is predicted
SMALL_BUDGETS: dict[str, tuple[tuple[float, Grid], ...]] = {  # parts that a paper adds up to an epsilon
    "dp-fedsofim": (
        (1.0, {"bias_correction": (False, True)}),
        (0.5, {"ema_rounds": (0, 20), "warm_start": (0, 20)}),  # the two readings of its warm-up of 20 rounds
    ),
}
MEMORIES = ("beta", "beta1", "beta2", "share", "w")  # decays and parts in [0, 1)
MOST_COUNT = {"steps": 20}  # no grid of the papers has more; other counts are never extended


def preset(name: str, method: str, epsilon: float = math.inf) -> Grid:
    """A method's grid: that of the papers, one of its own (`OWN`), or else multiples of its default step size.

    Args:
        name: Which grid, of `PRESETS`.
        method: The name of the method.
        epsilon: The budget; for small ones a paper may add parts to its method.

    Returns:
        The values to try for each option.

    Raises:
        SordinoError: There is no such grid or method.

    Example:
        >>> preset("paper-fine", "dp-fedsofim", 1.0)["bias_correction"]
        (False, True)
        >>> preset("steps", "dp-fedgd")
        {'lr': (0.125, 0.5, 2.0, 8.0, 32.0)}
    """
    check_known("preset", name, PRESETS)
    if method in UNTUNED:
        return {}
    if name in OWN.get(method, {}):
        return dict(OWN[method][name])
    if method in PRESETS[name]:
        grid = dict(PRESETS[name][method])
        for most, parts in SMALL_BUDGETS.get(method, ()):
            grid |= parts if epsilon <= most else {}
        return grid
    known = entry(method)
    steps = [key for key in ("lr", "local_lr") if key in known.options][:1]
    return {key: tuple(known.options[key] * 4.0**k for k in (-2, -1, 0, 1, 2)) for key in steps}


def cut(grid: Grid, most: int) -> Grid:
    """The first values of each option, so few that there are at most `most` settings.

    Args:
        grid: The values to try.
        most: How many settings may be left, at least 1.

    Returns:
        The smaller grid.

    Example:
        >>> cut({"lr": (1, 2, 3), "rho": (5, 6)}, 4), cut({"lr": (1, 2, 3), "rho": (5, 6)}, 1)
        ({'lr': (1, 2, 3), 'rho': (5,)}, {'lr': (1,), 'rho': (5,)})
    """
    kept: Grid = {}
    for key, values in grid.items():
        kept[key] = values[: max(1, most)]
        most //= max(1, len(kept[key]))
    return kept


def product(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination of the grid's values."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def beyond(key: str, values: Sequence[Any], best: Any) -> Any | None:
    """The next value outside a grid on the side of its best value: half or twice as much.

    Args:
        key: The option. For a decay (`MEMORIES`) 1 - value is halved or doubled.
        values: The values that were tried.
        best: The best of them.

    Returns:
        The value to try next; None if the best is inside the grid, or if nothing valid lies beyond it.

    Example:
        >>> beyond("lr", (0.1, 0.3), 0.3), beyond("beta", (0.8, 0.9), 0.8), beyond("lr", (0.1, 0.2, 0.3), 0.2)
        (0.6, 0.6, None)
    """
    numbers = sorted(value for value in set(values) if isinstance(value, int | float) and not isinstance(value, bool))
    if len(numbers) < 2 or len(numbers) < len(set(values)) or best not in (numbers[0], numbers[-1]):
        return None
    factor = 2 if best == numbers[-1] else 0.5
    if key in MEMORIES:
        decay = round(1 - (1 - best) / factor, 6)
        return decay if 0 <= decay < 1 and (decay or key != "share") else None
    if isinstance(best, int):
        return int(best * factor) if 1 <= int(best * factor) <= MOST_COUNT.get(key, 0) else None
    return float(f"{best * factor:.6g}") if best > 0 else None


def around(grid: Grid, best: dict[str, Any], key: str, value: Any) -> Iterator[dict[str, Any]]:
    """A new value of one option, with the other options at their best value or next to it in the grid.

    Args:
        grid: The values that were tried.
        best: The best setting.
        key: The option with the new value.
        value: The new value.

    Yields:
        The settings to try.

    Example:
        >>> list(around({"lr": (1, 2), "rho": (1, 5, 9, 11)}, {"lr": 2, "rho": 1}, "lr", 4))
        [{'lr': 4, 'rho': 1}, {'lr': 4, 'rho': 5}]
    """
    near: Grid = {}
    for option, values in grid.items():
        ordered = sorted(values)
        at = ordered.index(best[option])
        near[option] = (value,) if option == key else tuple(ordered[max(0, at - 1) : at + 2])
    yield from product(near)


def size(grid: Grid) -> int:
    return math.prod(map(len, grid.values()))
