"""Hold new figures against the committed ones of the same architecture.

Only ratios are compared: seconds and rates tell about the machine of the day. A ratio may grow by 15 %. Beyond that the
benchmark exits with status 1, leaves the committed file as it is, and writes the new samples to a temporary file,
unless it was told to `--accept` them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import compact

ROOT = Path(__file__).parents[1]
GROWTH = 0.15  # of a ratio, that is not yet a regression
SAME = {"arm64": "aarch64", "amd64": "x86_64"}  # names of one architecture on other systems


def architecture() -> str:
    name = platform.machine().lower()
    return SAME.get(name, name)


def cpu_model() -> str:
    """As lscpu or the kernel names it."""
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        lines = done.stdout.splitlines()
    except OSError:
        lines = []
    cpuinfo = Path("/proc/cpuinfo")
    lines += cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip() not in ("", "-"):
            return value.strip()
    return platform.processor() or "unknown"


def machine() -> dict[str, str]:
    """For a result's provenance."""
    return {"machine": architecture(), "cpu": cpu_model()}


def place(name: str) -> Path:
    """Of a benchmark's figures on this architecture."""
    return ROOT / "results" / name / f"{architecture()}.json"


def committed(path: Path) -> dict[str, Any] | None:
    """The figures in the last commit, so that several runs do not creep up by less than the limit each.

    Without git, the figures in the file; None where there are none.
    """
    text = path.read_text() if path.exists() else None
    try:
        git = ["git", "-C", str(next(each for each in path.parents if each.is_dir()))]
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
        if top.returncode == 0:
            name = path.resolve().relative_to(Path(top.stdout.strip()).resolve()).as_posix()
            done = subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, text=True, check=False)
            text = done.stdout if done.returncode == 0 else None
    except OSError:  # no git
        pass
    return None if text is None else dict(json.loads(text))


class Compared(NamedTuple):
    name: str
    old: float | None
    new: float | None

    @property
    def limit(self) -> float | None:
        return None if self.old is None else self.old * (1 + GROWTH)

    @property
    def grew(self) -> bool:
        """Past the limit; a ratio that is not measured any more, or is not a number, counts as one that grew."""
        return self.limit is not None and (self.new is None or not self.new <= self.limit)


def compare(old: Mapping[str, float], new: Mapping[str, float]) -> list[Compared]:
    return [Compared(name, old.get(name), new.get(name)) for name in dict.fromkeys([*new, *old])]


def show(rows: list[Compared], where: str) -> None:
    table = Table("ratio", "committed", "new", f"limit (+{GROWTH:.0%})", "")
    for row in rows:
        numbers = ("" if value is None else f"{value:.4g}" for value in (row.old, row.new, row.limit))
        verdict = "[bold red]grew[/]" if row.grew else "new" if row.old is None else "[green]holds[/]"
        table.add_row(row.name, *numbers, verdict)
    console = Console()
    console.width = max(console.width, 100)
    console.print(f"against {where}", markup=False)
    console.print(table)


def settle(
    path: Path, document: dict[str, Any], old: Mapping[str, float], new: Mapping[str, float], accept: bool
) -> int:
    """Compare, print, and write `document` where it belongs; the exit status."""
    rows = compare(old, new)
    show(rows, f"the committed figures of {path.stem}" if old else f"nothing: {path.stem} has no committed figures")
    worse = [row.name for row in rows if row.grew]
    text = compact.text(document)
    if worse and not accept:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"{path.parent.name}-{path.stem}-", suffix=".json", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Console(soft_wrap=True).print(
            f"grew by more than {GROWTH:.0%}: {', '.join(worse)}. {path.name} stays as it is; the new samples are in "
            f"{file.name}. With --accept (make bench ACCEPT=--accept) they take its place.",
            markup=False,
        )
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0


def ratios_of(document: Mapping[str, Any] | None, names: tuple[str, ...]) -> dict[str, float]:
    """Those of `names` that a document of bench.py holds."""
    return {name: float(document[name]) for name in names if name in document} if document else {}


def together_over_one_by_one(document: Mapping[str, Any] | None) -> dict[str, float]:
    """Of a document of many.py: times_faster, turned over so that growth is slower, as it is of all ratios here."""
    faster = document.get("times_faster", {}) if document else {}
    return {f"{name} together over one by one": 1 / value if value else math.inf for name, value in faster.items()}
