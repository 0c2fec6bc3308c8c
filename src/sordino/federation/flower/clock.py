"""The link's time at a site, whatever the clock of the site's machine says.

Flower refuses a node whose signed time stamp is more than 5 s ahead of the link's clock or 5 minutes behind it, and a
reply whose time is over by the site's clock. Here the node reads the link's time from the `Date` of its answers, over
TLS, and counts on with a clock that cannot be set. It writes the difference to the machine's clock into a file for the
worker.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from sordino import files

MOST_WRONG = 1.5  # seconds by which the stored difference may be wrong; `Date` is in whole seconds


class LinkClock:
    """The link's time.

    Args:
      path: a file for the difference in seconds; None for none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._ahead: float | None = None  # of time.monotonic(); None: the link has said nothing yet
        self._written: float | None = None

    def heard(self, date: str | None) -> None:
        """Take the link's time from the header of its answer. What is not a date is ignored."""
        try:
            said = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, TypeError):
            return
        self._ahead = said - time.monotonic()
        if self.path is not None and (self._written is None or abs(self.difference - self._written) > MOST_WRONG):
            with contextlib.suppress(OSError):
                files.write(self.path, f"{self.difference:.1f}\n".encode(), durable=False)
                self._written = self.difference

    @property
    def time(self) -> float:
        """Seconds since 1970, as the link counts them."""
        return time.time() if self._ahead is None else time.monotonic() + self._ahead

    @property
    def difference(self) -> float:
        """Seconds by which the link's clock is ahead of this machine's."""
        return self.time - time.time()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time, UTC)


def difference(path: Path | None) -> float:
    """What the node wrote; 0 if it wrote nothing."""
    try:
        return float(path.read_text()) if path is not None else 0.0
    except (OSError, ValueError):
        return 0.0
