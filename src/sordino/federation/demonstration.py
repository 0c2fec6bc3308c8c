"""A whole federation on this machine, with real processes: `sordino federate up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files
from sordino.data.partition import split
from sordino.data.sources import Dataset, load
from sordino.errors import SordinoError
from sordino.federation import readmes
from sordino.federation.config import FederationConfig
from sordino.federation.folders import init, make_site
from sordino.federation.handler import HANDLER
from sordino.federation.progress import count_lines, follow
from sordino.federation.terms import federated
from sordino.secagg import Roster

DEFAULTS = {"method": "dp-fedsofim", "rounds": 10, "epsilon": 8.0, "trust": "secure-aggregation"}


def prepare(
    folder: Path,
    count: int,
    *,
    spec: dict[str, Any],
    data: str = "digits",
    label: str | None = None,
    dropouts: int = 0,
    evaluation: float | None = None,
) -> Path:
    """Write the folders of a coordinator and of `count` sites, each with its part of the data.

    Args:
      folder: where they go.
      count: number of sites.
      spec: keys of spec.toml that differ from `DEFAULTS`.
      data: a data set, as in `sordino run`.
      label: the label's column, if data is a table.
      dropouts: sites that may fail in a round.
      evaluation: epsilon of the evaluation on the sites' test records at the end; None for none.

    Returns:
      The coordinator's folder.

    Raises:
      SordinoError: the spec cannot be run. Nothing is written then.
    """
    from sordino.federation.flower.keys import ensure_node_key

    if count < 2:
        raise SordinoError(f"sites: {count}; a federation needs at least 2, and 3 for secure aggregation.")
    whole = load(data, label=label)
    names = [f"site{k + 1}" for k in range(count)]
    owner = split(whole, "dirichlet:5" if whole.classes else "iid", count, sizes="equal", seed=0)
    coordinator = folder / "coordinator"
    values: dict[str, Any] = DEFAULTS | spec
    federated(values)  # refuses a wrong key or value before anything is written
    shape: dict[str, Any] = {"features": whole.x_train.shape[1], "classes": whole.classes}
    rest = {key: value for key, value in values.items() if key not in DEFAULTS}
    init(coordinator, names, **shape, **{key: values[key] for key in DEFAULTS}, dropouts=dropouts, more=rest)
    files.write(folder / "README.txt", readmes.FEDERATION.encode())
    _save(coordinator / "test.npz", whole.x_test, _labels(whole, whole.y_test))
    with open(coordinator / "federation.toml", "a", encoding="utf-8") as file:
        file.write('test = "test.npz"   # the coordinator\'s own test records\n')
        if evaluation is not None:
            file.write(f"evaluation_epsilon = {evaluation!r}\n")
    FederationConfig.read(coordinator / "federation.toml")  # refuses a wrong epsilon
    limit = 2 * float(values["epsilon"])
    cards = []
    for k, name in enumerate(names):
        place, mine = folder / "sites" / name, owner == k
        cards.append(make_site(place, name, data="data.npz", classes=whole.classes, epsilon=limit).card)
        with open(place / "site.toml", "a", encoding="utf-8") as file:
            file.write(f'witness = "../../witness/{name}.json"   # by default in the state directory of this user\n')
        if evaluation is not None:
            with open(place / "site.toml", "a", encoding="utf-8") as file:
                file.write(f"evaluation_epsilon = {2 * evaluation!r}   # limit over all evaluations on test records\n")
        ensure_node_key(place / "node")
        _save(place / "data.npz", whole.x_train[mine], _labels(whole, whole.y_train[mine]))
    roster = Roster(tuple(cards))
    for place in (coordinator, *(folder / "sites" / name for name in names)):
        roster.write(place / "roster.toml")
    return coordinator


def _save(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write records into a file that only its owner can read."""
    with files.replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, x=x, y=y)


def _labels(whole: Dataset, y: np.ndarray) -> np.ndarray:
    """Labels as in the source: names of classes, or numbers."""
    return np.array(whole.classes)[y] if whole.classes else y


def up(folder: Path, seconds: float = 1800.0) -> Iterator[dict[str, Any]]:
    """Start link, coordinator and sites on loopback, over TLS.

    Yields:
      The lines of the coordinator's progress, until the run finished or failed.

    Raises:
      SordinoError: a process ended, or the run took more than `seconds`.
    """
    from sordino.federation.flower.processes import LocalFederation

    coordinator = folder / "coordinator"
    names = FederationConfig.read(coordinator / "federation.toml").sites
    threads = {"OMP_NUM_THREADS": "1"}
    server = {"SORDINO_FOLDER": str(coordinator.resolve()), **threads}
    site = {"SORDINO_SITES": str((folder / "sites").resolve()), **threads}
    progress = coordinator / "run" / "progress.jsonl"
    seen = count_lines(progress)
    place = next(p for k in range(10_000) if not (p := folder / f"flower{k or ''}").exists())
    with LocalFederation(place, names, handler=HANDLER, server=server, site=site) as running:
        running.run()
        yield from follow(progress, running, seconds, seen)
