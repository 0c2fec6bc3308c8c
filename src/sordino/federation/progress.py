"""The coordinator's progress.jsonl, read while it is written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sordino.errors import SordinoError


class Running(Protocol):
    """The processes of a transport."""

    def ended(self, name: str) -> int | None:
        """The exit status of a process that ended, or None."""

    def log(self, name: str) -> Path:
        """The log file of a process."""


def count_lines(path: Path) -> int:
    """Lines of a file; 0 if there is no file."""
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def follow(path: Path, running: Running, seconds: float, seen: int = 0) -> Iterator[dict[str, Any]]:
    """Lines of the progress after the first `seen`, until the run finished or failed.

    Raises:
      SordinoError: the coordinator or the link ended, or the run took more than `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for text in lines[seen:]:
            line = json.loads(text)
            yield line
            if line["what"] in ("finished", "failed"):
                return
        seen = len(lines)
        for name, what in (("server", "coordinator"), ("link", "link")):
            if (status := running.ended(name)) is not None:
                raise SordinoError(
                    f"the {what} ended with status {status}; see {running.log(name)}. Started again, the run continues."
                )
        time.sleep(0.2)
    raise SordinoError(f"the federation took more than {seconds:g} s; see {running.log('server').parent}.")
