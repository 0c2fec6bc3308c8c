"""Several studies at one site: how many are open at a time, and in which order the others wait.

A study is open from its agreement to its end. While `most_studies` are open, the site answers the terms of another one
with its place in the queue, and the coordinator asks again. A study of which nothing was heard for `study_idle` seconds
loses its place, but not its agreement: if its coordinator comes back, its rounds are answered while the budget lasts.

Two sites may give their places to two studies in opposite order, so that each study waits for the other. So the answer
names the study that is ahead. A coordinator that waits for a study with a smaller number gives back the places that it
has not used yet (`withdraw`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from sordino import files
from sordino.errors import Refused, SordinoError

FILE = "queue.json"  # in the site's folder
ACTIVE = "active"  # in the folder of a run: its time is that of the last message
ASKED_AGAIN = 5.0  # seconds between two questions of a coordinator that waits
FORGOTTEN = 120.0  # seconds without a question after which a study leaves the queue
MOST_WAITING = 16


class Waiting(NamedTuple):
    """A study in the queue."""

    run: str
    since: float  # seconds since 1970
    seen: float  # when its coordinator asked last
    place: int = 0  # that it was told last; 1 is the next
    terms: str = ""  # SHA-256 of its terms, which its own coordinator knows


class Place(NamedTuple):
    """What a study that must wait is told."""

    number: int
    ahead: str  # the smallest number of a study that is open or waits before it
    news: bool  # whether it was told another place before


class StudyQueue:
    """The studies of one site. The caller holds the site's lock.

    Args:
      folder: the site's folder.
      most: how many studies may be open at a time.
      idle: seconds without a message after which a study loses its place.
    """

    def __init__(self, folder: Path, most: int, idle: float) -> None:
        self.folder, self.most, self.idle = folder, most, idle

    def heard(self, run: str) -> None:
        """Note that a message of an open study came."""
        (self.folder / "runs" / run / ACTIVE).touch(mode=0o600)

    def open_studies(self) -> list[str]:
        """Studies that have a place: agreed, not over, and not idle."""
        now = time.time()
        places = (self.folder / "runs").glob(f"[!.]*/{ACTIVE}")
        return sorted(
            path.parent.name
            for path in places
            if (path.parent / "secret").exists() and now - path.stat().st_mtime <= self.idle
        )

    def waiting(self) -> list[Waiting]:
        """Studies that wait, in their order, without those whose coordinators do not ask any more."""
        path = self.folder / FILE
        try:
            stored = [Waiting(**each) for each in json.loads(path.read_text())] if path.exists() else []
        except (ValueError, TypeError):
            raise SordinoError(f"{path}: it cannot be read; delete it, and coordinators that wait ask again.") from None
        now = time.time()
        return [each for each in stored if now - each.seen <= FORGOTTEN]

    def enter(self, run: str, terms: str = "") -> Place | None:
        """Take a place, or wait for one.

        Args:
          run: the study.
          terms: SHA-256 of its terms.

        Returns:
          None if the study may begin now; otherwise its place in the queue.

        Raises:
          Refused: too many studies wait already.
        """
        taken, queue, now = [each for each in self.open_studies() if each != run], self.waiting(), time.time()
        mine = next((k for k, each in enumerate(queue) if each.run == run), len(queue))
        free = max(0, self.most - len(taken))
        if mine < free:
            self._store([each for each in queue if each.run != run])
            return None
        if mine == len(queue):
            if mine >= MOST_WAITING:
                raise Refused("queue-full", f"{MOST_WAITING} studies wait already")
            queue.append(Waiting(run, now, now, terms=terms))
        number, before = mine + 1, queue[mine].place
        queue[mine] = queue[mine]._replace(seen=now, place=number)
        self._store(queue)
        return Place(number, min([*taken, *(each.run for each in queue[:mine])]), number != before)

    def give_up(self, run: str, terms: str) -> bool:
        """Take a study that waits out of the queue, if these are its terms. Returns whether it was there.

        The number of a study is not enough: coordinators that wait behind it are told its number."""
        if not any((each.run, each.terms) == (run, terms) for each in self.waiting()):
            return False
        return self.leave(run)

    def leave(self, run: str) -> bool:
        """Take a study out of the queue, or its place away. Returns whether it was there."""
        queue = self.waiting()
        rest = [each for each in queue if each.run != run]
        self._store(rest)
        held = run in self.open_studies()
        (self.folder / "runs" / run / ACTIVE).unlink(missing_ok=True)
        return held or len(rest) < len(queue)

    def _store(self, queue: list[Waiting]) -> None:
        path = self.folder / FILE
        if queue or path.exists():
            files.write(path, json.dumps([each._asdict() for each in queue]).encode(), durable=False)
