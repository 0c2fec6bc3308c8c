"""Settings to try: the coarse and fine grids of the papers, and a default grid for other methods.

The grids are table 2 of the DP-FedSOFIM paper, under the names of this library. The table does not state the local step
of DP-FedAvg (0.1 here). Its steps for DP-FTRL are far too large under fully accounted noise, so the grid also has those
of DP-FedGD.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from sordino.errors import SordinoError, nearest
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
    "dp-fedgd": {"lr": (0.03, 0.05, 0.08, 0.1, 0.3)},
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

PRESETS = {"paper-coarse": COARSE, "paper-fine": FINE}
UNTUNED = ("auto",)  # its settings follow from public facts


def preset(name: str, method: str) -> Grid:
    """A method's grid: that of the papers, or else multiples of its default step size."""
    if name not in PRESETS:
        raise SordinoError(f"preset: '{name}' is unknown.{nearest(name, PRESETS)}")
    if method in UNTUNED:
        return {}
    if method in PRESETS[name]:
        return PRESETS[name][method]
    known = entry(method)
    steps = [key for key in ("lr", "local_lr") if key in known.options][:1]
    return {key: tuple(known.options[key] * 4.0**k for k in (-2, -1, 0, 1, 2)) for key in steps}


def product(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination of the grid's values."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def size(grid: Grid) -> int:
    return math.prod(map(len, grid.values()))
