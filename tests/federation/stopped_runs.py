"""A run with minibatches that its coordinator stops midway, and two more on the same sites, which have a small limit.

The first run stays charged as a whole. So a second one that would fit beside the rounds that took place is refused, and
a smaller one, which fits beside the whole first run, is trained.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from sordino import wire
from sordino.errors import StoppedError
from sordino.evidence.charges import whole_run
from sordino.evidence.ledger import Ledger
from sordino.evidence.spent import SpentByRuns
from sordino.federation import coordinator
from sordino.federation.refusal import REASONS
from sordino.federation.terms import Terms

LIMIT, DELTA = 11.0, 1e-5
DONE = 2  # rounds of the first run
IDLE = 2.0  # seconds after which a study that is silent loses its place
FIRST = {"method": "dp-fedgd", "epsilon": 8.0, "rounds": 4, "batch": "poisson:4"}
LARGER = FIRST | {"epsilon": 6.0, "rounds": 3}
SMALLER = FIRST | {"epsilon": 3.0, "rounds": 3}
STOPPED, REFUSED = "run-stopped", "refused.txt"


class LimitedSites:
    """Sites with the keys and records of a federation, and ledgers of their own. A study loses its place soon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, name: str) -> Path:
        return self.folder / name

    def copy(self, federation: Any) -> LimitedSites:
        for name in federation.names:
            here, there = federation.place(name), self.place(name)
            there.mkdir(parents=True)
            for file in ("identity.key", "roster.toml", "data.npz"):
                shutil.copy(here / file, there / file)
            own = {"epsilon": LIMIT, "delta": DELTA, "most_studies": 1, "study_idle": IDLE, "witness": "witness.json"}
            (there / "site.toml").write_text(tomli_w.dumps(tomllib.loads((here / "site.toml").read_text()) | own))
        return self


class StopsBefore:
    """A transport that ends the coordinator's work before a round is asked."""

    def __init__(self, transport: Any, t: int, end: Callable[[], None]) -> None:
        self.transport, self.t, self.end = transport, t, end

    def sites(self) -> list[int]:
        return list(self.transport.sites())

    def exchange(self, requests: Any, seconds: float, enough: Any = None) -> Any:
        for request in requests.values():
            message = wire.decode(request)
            if message.kind == "round" and message.fields["t"] == self.t:
                self.end()
        return self.transport.exchange(requests, seconds, enough)


def undergo(transport: Any, place: Path, end: Callable[[], None]) -> None:
    """The three runs in the coordinator's folder; called again after `end`, which does not return."""
    if not (place / "run").exists() and not (place / STOPPED).exists():
        _propose(place, FIRST)
        coordinator.serve(StopsBefore(transport, DONE, end), place)
    if not (place / STOPPED).exists():
        (place / "run").rename(place / STOPPED)  # as whoever wants another run does
    if not (place / REFUSED).exists():
        _propose(place, LARGER)
        time.sleep(IDLE + 0.5)  # from then on nothing is promised to the first run, and its charge alone counts
        try:
            coordinator.serve(transport, place)
        except StoppedError as error:
            (place / REFUSED).write_text(str(error))
        else:
            raise RuntimeError("the second run was admitted beside a first one that was charged as a whole")
    _propose(place, SMALLER)
    coordinator.serve(transport, place)


def _propose(place: Path, spec: dict[str, Any]) -> None:
    before = tomllib.loads((place / "spec.toml").read_text())
    (place / "spec.toml").write_text(tomli_w.dumps(before | spec))


def stopped_terms(place: Path) -> Terms:
    """The terms of the run that was stopped."""
    return Terms.read((place / STOPPED / "terms.json").read_text())


def problems(sites: LimitedSites, place: Path) -> list[str]:
    """What is otherwise than it must be: the refusal, and what the ledgers hold of the first run and of the last."""
    first, last = stopped_terms(place), Terms.read((place / "run" / "terms.json").read_text())
    reason = (place / REFUSED).read_text()
    found = [] if REASONS["budget"] in reason else [f"refused for another reason: {reason}"]
    for name in first.names:
        with Ledger(sites.place(name) / "ledger.db", read_only=True) as ledger:
            who, mine = ledger.accounts()[-1].who, first.names.index(name)
            rounds = {row.round for row in ledger.rows() if row.plan == first.run and row.is_release}
            whole = SpentByRuns()
            for entry in (*whole_run(first.plan, mine, first.run), *whole_run(last.plan, mine, last.run)):
                whole.add(entry)
            spent = ledger.spent_epsilon(who, DELTA)
            if ledger.audit() or not ledger.reserved(first.run, who) or rounds != set(range(DONE)):
                found.append(f"{name}: the ledger has rounds {sorted(rounds)} of the first run")
            if not whole.epsilon(DELTA) * (1 - 1e-6) <= spent <= LIMIT:
                found.append(f"{name}: ε = {spent:g} was charged, not {whole.epsilon(DELTA):g}")
    return found
