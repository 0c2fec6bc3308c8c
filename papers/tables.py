"""What all tables share: their description, their runs, and the comparison with published figures.

`published/` holds the figures that the papers print, and settings tuned for them. A table is a list of `Want`s: runs,
and what the paper prints of them by round. Our features come from other pre-training than those of the papers, so
levels differ: compare orders, gaps and shapes. `sofim`, `fednew` and `adamw` define the tables; `catalog` lists them.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sordino
from papers.picture import drawn, word
from sordino.data import catalog, fetch, glue
from sordino.data.fetch import Folder, cache
from sordino.data.sources import Dataset, load
from sordino.errors import SordinoError
from sordino.studies.compare import frozen
from sordino.training.batch import MAX_RUNS_PER_BATCH, Trained, Watch, run_many
from sordino.training.spec import Spec

PUBLISHED = Path(__file__).with_name("published")
FILES = ("data", "weights")  # keys of a run that may be paths of this machine
Tick = Callable[[int], None]
PrintedFigures = dict[int, tuple[float | None, float | None]]  # by round: mean and standard deviation, in percent


def published(name: str) -> list[dict[str, str]]:
    """The rows of one table as printed."""
    with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------------------ tables


class PaperTable(NamedTuple):
    name: str
    about: str
    make: Callable[[TableRequest], TableResult]
    needs: str | None = None  # a file or a set that must be on this machine
    source: str = ""  # where that comes from

    def where(self, data_dir: str | Path | None) -> str | None:
        """The path or set name of `needs` on this machine; None if it is missing."""
        if self.needs is None:
            return ""
        if self.needs in catalog.SETS and on_this_machine(self.needs, data_dir):
            return self.needs
        for root in roots(data_dir):
            if self.needs.endswith(".npz"):
                if (root / self.needs).is_file():
                    return str(root / self.needs)
            elif Folder(root).has(self.needs) or Folder(root / self.needs).has(self.needs):
                return self.needs
        return None


def roots(data_dir: str | Path | None) -> list[Path]:
    """Folders to search."""
    return [*(Path(folder).expanduser() for folder in (data_dir, os.environ.get("SORDINO_DATA")) if folder), cache()]


def on_this_machine(data: str, data_dir: str | Path | None) -> bool:
    """Whether the set is on this machine. Nothing is downloaded."""
    known, members = set_files(data)
    stores = [store for root in roots(data_dir) for store in fetch._stores(known, root)]
    return any(isinstance(store, fetch.Archive) or all(map(store.has, members)) for store in stores)


def set_files(data: str) -> tuple[fetch.Published, tuple[str, ...]]:
    """Where a set is published, and the members that it is read from."""
    if data in glue.TASKS:
        task = glue.TASKS[data]
        return task.published, (task.parts["train"], task.parts["dev"])
    return catalog.SETS[data].published, tuple(catalog.SETS[data].members)


class Want(NamedTuple):
    """One line: its labels, the keys of its runs without the seed, and the published figures."""

    labels: dict[str, Any]
    values: dict[str, Any]
    printed: PrintedFigures


class TableResult(NamedTuple):
    lines: list[dict[str, Any]]
    across: str  # the label whose values are the columns
    notes: Sequence[str]
    tuning: dict[str, Any] | None = None
    estimated: dict[str, Any] | None = None  # points of `sordino.studies.estimation`, which has a figure for them


@dataclass(frozen=True)
class TableRequest:
    """A request for a table."""

    table: PaperTable
    data_dir: str | None = None
    seeds: int | None = None  # the table's own
    epsilons: tuple[float, ...] | None = None  # the table's own
    clients: tuple[int, ...] | None = None  # of tables that vary them
    device: str = "cpu"
    settings: str | None = None  # a file; the table's own
    tick: Tick = lambda runs: None
    rounds: int | None = None  # of every run; the table's own
    most_settings: int | None = None  # of a grid that are tried; all
    methods: tuple[str, ...] | None = None  # of the tables of DP-FedNew; all
    keep: Path | None = None  # a folder where searches keep the settings that they found

    @cached_property
    def source(self) -> str:
        """The keys of the data, for a spec."""
        where = self.table.where(self.data_dir)
        if where is None:
            raise SordinoError(f"data: {self.table.needs} is not on this machine; {self.table.source}.")
        return where

    @property
    def shortened(self) -> dict[str, Any]:
        """The number of rounds, where the request names one."""
        return {} if self.rounds is None else {"rounds": self.rounds}

    @cached_property
    def dataset(self) -> Dataset:
        return load(self.source, data_dir=self.data_dir)

    def tuning(self, name: str = "") -> dict[str, Any]:
        """Requested settings, or those of `published/` by this name."""
        return frozen(Path(self.settings) if self.settings else PUBLISHED / f"{name}.json")


def of_table(request: TableRequest, clients: Sequence[int]) -> list[int]:
    """The requested numbers of clients that the table has."""
    counts = [n for n in clients if n in (request.clients or clients)]
    if not counts:
        asked, known = (", ".join(map(str, part)) for part in (request.clients or (), clients))
        raise SordinoError(f"clients: {asked}, but the table has {known}; choose from these.")
    return counts


def chosen(tuning: dict[str, Any]) -> dict[tuple[str, float | None], dict[str, Any]]:
    """By label and budget (None: without noise)."""
    try:
        return {(each["method"], each["epsilon"]): dict(each["options"]) for each in tuning["settings"]}
    except (KeyError, TypeError, ValueError):
        raise SordinoError(
            "settings: each needs method, epsilon and options; give settings.json or compare.json of a comparison, or "
            "the JSON file of a table."
        ) from None


# ----------------------------------------------------------------------------------------------------------- running


def train(request: TableRequest, wants: Sequence[Want], seeds: int, **how: Any) -> list[dict[str, Any]]:
    """Every want with every seed: its line for the document. how: see `attempt`."""
    runs = attempt(request, wants, range(1, seeds + 1), **how)
    return [line(want, runs[k * seeds : (k + 1) * seeds]) for k, want in enumerate(wants)]


def attempt(
    request: TableRequest,
    wants: Sequence[Want],
    seeds: Sequence[int],
    *,
    most: int = MAX_RUNS_PER_BATCH,
    split: int | None = None,
    own_data: bool = False,
    stop: int | None = None,
    watch: Watch | None = None,
) -> list[Trained]:
    """split: one partition for all seeds, so that they fit one batch. own_data: each seed has its own data. stop: train
    only so many rounds. watch: figures of each run at the printed rounds."""
    specs = [
        Spec.of({**want.values, **request.shortened, "seed": seed, "split_seed": seed if split is None else split})
        for want in wants
        for seed in seeds
    ]
    printed = sorted({t for want in wants for t in want.printed})
    dataset = None if own_data else request.dataset
    return run_many(
        specs, dataset, device=request.device, at=printed, stop=stop, most=most, tick=request.tick, watch=watch
    )


def line(want: Want, runs: Sequence[Trained]) -> dict[str, Any]:
    """Our figures by round over the seeds, in percent, and the published ones."""
    last = max(runs[0].scores)
    rounds = {
        str(t): against([100 * run.scores[t] for run in runs], *want.printed.get(t, (None, None)))
        for t in sorted({*(t for t in want.printed if t in runs[0].scores), last})
    }
    return _line(want, runs, want.labels, rounds)


def watched_line(want: Want, runs: Sequence[Trained], name: str, labels: dict[str, Any], digits: int) -> dict[str, Any]:
    """A figure that was watched, by round over the seeds. The papers at hand print none of them."""
    rounds = {
        str(t): {**against([run.watched[t][name] for run in runs]), "digits": digits} for t in sorted(runs[0].watched)
    }
    return _line(want, runs, labels, rounds)


def _line(want: Want, runs: Sequence[Trained], labels: dict[str, Any], rounds: dict[str, Any]) -> dict[str, Any]:
    values = {**want.values, **{key: Path(str(want.values[key])).name for key in FILES if key in want.values}}
    plan = runs[0].plan
    certified = "no: no noise" if plan.noiseless else "yes" if plan.proved else "no"
    return {
        "labels": {**labels, "certified": certified},
        "rounds": rounds,
        "settings": {key: value for key, value in values.items() if key != "data_dir"},
        "seconds": round(sum(run.seconds for run in runs), 2),
    }


def against(samples: Sequence[float], published: float | None = None, spread: float | None = None) -> dict[str, Any]:
    """Our mean and standard deviation, the published ones, and the difference of the means; no samples: not run."""
    mean = float(np.mean(samples)) if samples else None
    return {
        "ours": None if mean is None else round(mean, 4),
        "std": round(float(np.std(samples, ddof=1)), 4) if len(samples) > 1 else None,
        "samples": [round(float(sample), 4) for sample in samples],
        "published": published,
        "published_std": spread,
        "difference": None if published is None or mean is None else round(mean - published, 4),
    }


def document(request: TableRequest, command: str) -> dict[str, Any]:
    """Everything about one table."""
    content = request.table.make(request)
    return {
        "table": request.table.name,
        "about": request.table.about,
        "command": command,
        "device": request.device,
        "python": platform.python_version(),
        "versions": {"sordino": sordino.__version__, **{name: version(name) for name in ("torch", "numpy", "scipy")}},
        "notes": list(content.notes),
        "across": content.across,
        "tuning": content.tuning,
        "lines": content.lines,
        **({} if content.estimated is None else {"estimated": content.estimated}),
    }


# ----------------------------------------------------------------------------------------------------------- writing

Grid = tuple[list[str], list[list[str]]]  # head and rows


def pivot(lines: Sequence[dict[str, Any]], across: str, at: str | None = None) -> Grid:
    """One row for all lines that differ in `across` alone, at the last round or at `at`."""
    columns = list(dict.fromkeys(each["labels"][across] for each in lines))
    columns = sorted(columns) if all(isinstance(column, float) for column in columns) else columns
    names = list(dict.fromkeys(key for each in lines for key in each["labels"] if key != across))
    names = [key for key in names if len({str(each["labels"].get(key, "")) for each in lines}) > 1] or names[:1]
    rows: dict[tuple[str, ...], dict[Any, str]] = {}
    for each in lines:
        row = tuple(word(each["labels"].get(key, "")) for key in names)
        figures = each["rounds"]
        if at is None or at in figures:
            rows.setdefault(row, {})[each["labels"][across]] = cell(figures[at or list(figures)[-1]])
    head = [*names, *(f"{across} {word(column)}" for column in columns)]
    return head, [[*row, *(cells.get(column, "") for column in columns)] for row, cells in rows.items()]


def cell(figure: dict[str, Any]) -> str:
    """Ours ± std (printed, difference)."""
    digits = figure.get("digits", 1)
    if figure["ours"] is None:
        return f"not run ({figure['published']:.{digits}f})"
    ours = f"{figure['ours']:z.{digits}f}" + (f" ± {figure['std']:.{digits}f}" if figure["std"] is not None else "")
    ours += str(figure.get("mark", ""))
    if figure["published"] is None:
        return ours
    printed = f"{figure['published']:z.{digits}f}{figure.get('published_mark', '')}"
    return f"{ours} ({printed}, {figure['difference']:+z.{digits}f})"


def markdown(document: dict[str, Any]) -> str:
    """The document as a page: the last round, and earlier ones if the paper prints them."""
    parts = [f"# {document['table']}: {document['about']}", f"`{document['command']}` ({document['device']})"]
    parts += [f"- {note}" for note in document["notes"]]
    parts.append("Cells: ours ± standard deviation (published, difference).")
    rounds = list(dict.fromkeys(t for each in document["lines"] for t in each["rounds"]))
    if len(rounds) < 2:
        parts.append(_table(pivot(document["lines"], document["across"])))
    for t in sorted(rounds, key=int, reverse=True) if len(rounds) > 1 else ():
        parts += [f"## After round {t}", _table(pivot(document["lines"], document["across"], t))]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"


def _table(grid: Grid) -> str:
    head, rows = grid
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write(document: dict[str, Any], out: Path) -> list[Path]:
    """Write the page, the figures as JSON, and, where matplotlib is installed, a picture."""
    texts = {"md": markdown(document), "json": json.dumps(_plain(document), indent=1) + "\n"}
    if (svg := drawn(document)) is not None:
        texts["svg"] = svg
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for ending, text in texts.items():
        files.append(out / f"{document['table']}.{ending}")
        files[-1].write_text(text, encoding="utf-8")
    return files


def _plain(value: Any) -> Any:
    """Replace infinity by a string, because JSON has none."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
