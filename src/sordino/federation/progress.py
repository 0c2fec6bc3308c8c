"""The coordinator's progress.jsonl, read while it is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from sordino.errors import SordinoError

NOT_WRITTEN = 74  # exit status of a coordinator that could not write a file


COMMAND_LOCK = "coordinate.lock"  # in the coordinator's folder, held by `sordino federate coordinate`
COORDINATOR_LOCK = "coordinator.lock"  # there too, held by the process that runs the rounds


class Running(Protocol):
    """The processes of a transport."""

    def ended(self, name: str) -> int | None:
        """The exit status of a process that ended, or None."""

    def log(self, name: str) -> Path:
        """The log file of a process."""


def read_lines(path: Path) -> list[str]:
    """Whole lines of a file; none if there is no file. A line that is still being written is left for later."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def count_lines(path: Path) -> int:
    """Whole lines of a file; 0 if there is no file."""
    return len(read_lines(path))


def parsed(lines: list[str]) -> Iterator[dict[str, Any]]:
    """What the lines hold. A line that a full disk cut off is left out."""
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "what" in line:
            yield line


def follow(
    path: Path,
    running: Running,
    seconds: float,
    seen: int = 0,
    other: Callable[[], Iterable[dict[str, Any]]] = tuple,
) -> Iterator[dict[str, Any]]:
    """Lines of the progress after the first `seen`, and those of `other`, until the run finished or failed.

    Raises:
      SordinoError: the coordinator or the link ended, or the run took more than `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended = {name: status for name in ("server", "link") if (status := running.ended(name)) is not None}
        lines = read_lines(path)  # after `ended`, so that no line of a process that ended is missed
        for line in parsed(lines[seen:]):
            yield line
            if line["what"] in ("finished", "failed"):
                return
        seen = len(lines)
        yield from other()
        for name, status in ended.items():
            why = f"with status {status}"
            if status == NOT_WRITTEN:
                why = f"because it could not write to {path.parent} (is the disk full?)"
            raise SordinoError(
                f"the {'coordinator' if name == 'server' else name} ended {why}; see {running.log(name)}. Started "
                "again, the run continues."
            )
        time.sleep(0.2)
    raise SordinoError(f"the federation took more than {seconds:g} s; see {running.log('server').parent}.")
