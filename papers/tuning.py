"""The settings of a DP-FedSOFIM table: those of a file, the committed ones, or those of a search on its own data.

`published/` holds settings for the features of CIFAR-10 by ResNet-20. A table of other data searches as `sordino
compare --only-tune` does: over the same grids, extended at their edges, separately for each noise and each round, by
accuracy on a tenth of the training records. Settings are kept in a file as soon as they are found, so that another
call, or another table of the same data, does not search again. `--settings` takes that file, or the JSON of a table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.tables import TableRequest, chosen
from sordino import files
from sordino.errors import SordinoError
from sordino.evidence.certificate import finite
from sordino.studies import compare
from sordino.studies.private_tuning import UNPAID
from sordino.version import __version__

GRID = "paper-fine"
COMMITTED = "cifar10_resnet20.npz"  # the data of the settings in published/
TUNED = (
    "settings: chosen on validation records (seed 0) under the noise of the row, over the paper's fine grid, with "
    "steps between 0.1 and 0.3 for DP-FedGD"
)
OWN_DATA = (
    "the search was made on {data} itself: a tenth of its training records was held out by position, and no test "
    "record was read. Grids were extended where the best value lay on an edge. The settings are in {where}, which "
    "--settings takes"
)


class Part(NamedTuple):
    """What settings are chosen for."""

    world: dict[str, str]  # the noise, as keys of a run
    round: int  # whose accuracy decides
    committed: str  # the file in published/

    @property
    def marks(self) -> dict[str, Any]:
        """Tell the settings of this part from those of others in the same file."""
        return {"noise": self.world["trust"], "round": self.round}

    def of(self, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in settings if {key: each.get(key) for key in self.marks} == self.marks]


class Settled(NamedTuple):
    """The settings of a table."""

    parts: list[tuple[Part, dict[str, Any]]]  # those that have settings, with them
    tuning: dict[str, Any]  # for the document
    notes: list[str]  # how they were chosen

    @property
    def grids(self) -> list[str]:
        """The grids of each part, and which of them were extended."""
        about = "tuning under {} for round {}: {}"
        return [about.format(part.world["trust"], part.round, tuning["how"]) for part, tuning in self.parts]


def settle(
    request: TableRequest,
    parts: Sequence[Part],
    methods: Sequence[str],
    base: dict[str, Any],
    budgets: Sequence[float],
) -> Settled:
    """Find the settings of a table.

    Args:
      request: the table, its data, and a file of settings if one is named.
      parts: what to tune for. A file without marks has settings for the first one.
      methods: as `sordino compare --methods` takes them; only a search reads this.
      base: the keys that all runs share; only a search reads this.
      budgets: those that a search tunes for, unless the request names others.

    Returns:
      The settings.

    Raises:
      SordinoError: the file has no settings, or none for these parts.
    """
    if request.settings:
        return _of_file(request, parts)
    if request.table.needs == COMMITTED:
        known = [(part, request.tuning(part.committed)) for part in parts]
        return Settled(known, known[0][1], [TUNED])
    return _searched(request, parts, methods, base, request.epsilons or budgets)


def _of_file(request: TableRequest, parts: Sequence[Part]) -> Settled:
    whole, name = request.tuning(), Path(str(request.settings)).name
    chosen(whole)  # refuses what has no settings
    if any("noise" in each for each in whole["settings"]):
        known = [(part, {**whole, "settings": mine}) for part in parts if (mine := part.of(whole["settings"]))]
    else:
        parts = parts[:1]
        known = [(parts[0], whole)]
    has = [part for part, _ in known]
    lacking = " or ".join(f"{part.world['trust']} and round {part.round}" for part in parts if part not in has)
    if not known:
        raise SordinoError(
            f"settings: '{name}' has none for {lacking}; give the JSON file that this table wrote, or leave out "
            "--settings to search again."
        )
    notes = [f"left out, because {name} has no settings for them: {lacking}"] if lacking else []
    return Settled(known, whole, [f"settings: those of {name}, not tuned again", *notes])


# ------------------------------------------------------------------------------------------------------------ search


def _searched(
    request: TableRequest, parts: Sequence[Part], methods: Sequence[str], base: dict[str, Any], budgets: Sequence[float]
) -> Settled:
    """Search for what no earlier call has found on these data."""
    base = {**base, **request.shortened, "data": request.source}
    path = _kept(request, base)
    found = compare.frozen(path) if path is not None and path.exists() else {"settings": []}
    known = list[tuple[Part, dict[str, Any]]]()
    for part in parts:
        at = {**base, **part.world}
        tune_round = part.round if part.round < base["rounds"] else None
        who = compare.contestants(methods, at)
        for each in who:
            has = {(one["method"], one["epsilon"]) for one in part.of(found["settings"])}
            if lacking := [epsilon for epsilon in budgets if (each.label, finite(epsilon)) not in has]:
                result = compare.settle(
                    [each],
                    at,
                    lacking,
                    grid=GRID,
                    tune_round=tune_round,
                    most=request.most_settings,
                    data=request.dataset,
                    device=request.device,
                    tick=request.tick,
                )
                settings = [*found["settings"], *({**part.marks, **one} for one in result["settings"])]
                found = _document(settings, result["validation"], request)
                _keep(path, found)
        labels = {each.label for each in who}
        mine = [
            one
            for one in part.of(found["settings"])
            if one["method"] in labels and one["epsilon"] in set(map(finite, budgets))
        ]
        how = compare.in_words(mine, "grid", GRID, tune_round)
        known.append((part, {**found, "how": how, "settings": mine}))
    used = [one for _, tuning in known for one in tuning["settings"]]
    tuning = _document(used, found["validation"], request)
    where = "the JSON file of this table" if path is None else f"{path.parent.name}/{path.name} beside it"
    return Settled(known, tuning, [TUNED, OWN_DATA.format(data=tuning["data"], where=where)])


def _document(settings: Sequence[dict[str, Any]], validation: str, request: TableRequest) -> dict[str, Any]:
    return {
        "how": f"grid over {GRID}, for each noise and round separately",
        "paid": UNPAID,
        "validation": validation,
        "data": Path(request.source).name,
        "settings": list(settings),
    }


def _kept(request: TableRequest, base: dict[str, Any]) -> Path | None:
    """The file for these data and these runs; None where nothing is kept."""
    if request.keep is None:
        return None
    with Path(request.source).open("rb") as file:
        data = hashlib.file_digest(file, "sha256").hexdigest()
    runs = {key: value for key, value in base.items() if key != "data"}
    facts = json.dumps([data, runs, GRID, request.most_settings, __version__], sort_keys=True)
    return request.keep / f"{Path(request.source).stem}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def _keep(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n  ".join(map(json.dumps, found["settings"]))
        head = json.dumps({**found, "settings": []}, indent=1).removesuffix("]\n}")
        files.write(path, f"{head}\n  {rows}\n ]\n}}\n".encode())
