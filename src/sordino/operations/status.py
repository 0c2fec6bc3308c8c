"""Where a run stands, read from the folder of a coordinator or of a site. Nothing is written, and no data are read."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sordino import files
from sordino.errors import SordinoError
from sordino.federation import sentences
from sordino.federation.progress import COMMAND_LOCK, COORDINATOR_LOCK
from sordino.settings import read_toml

MOST_LINES = 200  # of the log that is shown
# The first of these metrics that a run has is drawn.
CURVES = ("accuracy", "auc", "log_loss", "r2", "concordance", "deviance", "perplexity")


@dataclass
class SiteStatus:
    """One site, as its coordinator sees it."""

    name: str
    state: str = "awaited"  # awaited, here, late, refused or finished
    why: str = ""  # it is late or refused
    rounds: int = 0  # that it answered
    lost: int = 0  # that it did not


@dataclass
class CoordinatorStatus:
    """A run, as its coordinator sees it."""

    state: str = "not begun"  # not begun, waiting, running, stopped, finished or failed
    why: str = ""  # it failed
    run: str = ""
    method: str = ""
    rounds: int = 0
    done: int = 0
    lost: int = 0  # rounds without a result
    epsilon: float = 0.0  # of the rounds so far
    planned_epsilon: float | None = None
    seconds: float = 0.0  # since the process began
    changed: str = ""  # time of the last line
    metric: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)  # (round, metric on the coordinator's test records)
    evaluation: dict[str, Any] | None = None  # on the sites' test records, with intervals
    sites: list[SiteStatus] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


@dataclass
class BudgetStatus:
    """A site's own view: what it spent, and what it answered."""

    name: str
    epsilon: float  # spent by the account that pays now
    limit: float
    delta: float
    left: float  # the largest epsilon of one more run, beside what open runs were promised
    promised: float | None = None  # spent when the open runs have ended; None if nothing is promised
    answered: int = 0  # rounds, in all runs
    runs: int = 0  # that ended
    refusals: int = 0
    failures: int = 0
    caveat: str = ""  # what follows `epsilon` in a sentence where it does not hold for any choice of later runs
    problem: str = ""  # why the site refuses every message, such as a ledger that was put back
    log: list[str] = field(default_factory=list)


def of_folder(folder: Path) -> CoordinatorStatus | BudgetStatus:
    """The status of the coordinator or of the site whose folder this is.

    Raises:
      SordinoError: it is neither.
    """
    if folder.is_file():  # such as site.toml
        folder = folder.parent
    if (folder / "coordinator" / "federation.toml").exists():  # made by `federate up`
        folder = folder / "coordinator"
    if (folder / "federation.toml").exists():
        return of_coordinator(folder)
    if (folder / "site.toml").exists():
        return of_site(folder)
    raise SordinoError(f"status: '{folder}' holds neither federation.toml nor site.toml; name a folder that does.")


def of_coordinator(folder: Path) -> CoordinatorStatus:
    """Read federation.toml, the terms and the progress of the run in a coordinator's folder."""
    status = CoordinatorStatus()
    named = read_toml(folder / "federation.toml").get("sites", [])
    sites = {str(name): SiteStatus(str(name)) for name in named}
    terms = folder / "run" / "terms.json"
    if terms.exists():
        values = json.loads(terms.read_text(encoding="utf-8"))
        status.planned_epsilon = tomllib.loads(values["spec"]).get("epsilon")
    scores: dict[str, list[tuple[int, float]]] = {}
    for line in _lines(folder / "run" / "progress.jsonl"):
        _follow(status, sites, line)
        for name in CURVES:
            if line["what"] == "round" and isinstance(line.get(name), float):
                scores.setdefault(name, []).append((line["t"] + 1, line[name]))
        status.changed = line.get("time", status.changed)
        status.log.append(_logged(line, sentences.of_coordinator(line, status.rounds or None)))
    locked = any(files.held(folder / name) for name in (COMMAND_LOCK, COORDINATOR_LOCK))
    if status.state in ("waiting", "running") and not locked:
        status.state, status.why = "stopped", "no process coordinates this folder; started again, the run continues"
    status.metric = next((name for name in CURVES if name in scores), "")
    status.curve, status.sites, status.log = (
        scores.get(status.metric, []),
        list(sites.values()),
        status.log[-MOST_LINES:],
    )
    return status


def _follow(status: CoordinatorStatus, sites: dict[str, SiteStatus], line: dict[str, Any]) -> None:
    """Take one line of the progress into account."""
    site = sites.get(str(line.get("site")))
    match line["what"]:
        case "waiting":  # the coordinator began, or began again
            status.state, status.why = "waiting", ""
            for each in sites.values():
                each.state, each.why = "awaited", ""
        case "joined":
            for name in line["sites"]:
                sites.setdefault(name, SiteStatus(name)).state = "here"
        case "begun":
            status.state, status.run, status.method = "running", line["run"], line["method"]
            status.rounds, status.done = line["rounds"], line["start"]
        case "round":
            status.done, status.epsilon, status.seconds = line["t"] + 1, line["epsilon"], line["seconds"]
            status.lost += not line["came"]
            for each in sites.values():
                if each.name in line["came"]:
                    each.state, each.why, each.rounds = "here", "", each.rounds + 1
                else:
                    each.lost += 1
        case "missing" | "away" | "misfit" if site is not None:
            site.state, site.why = "late", sentences.of_coordinator(line, None)
        case "queued" if site is not None:
            site.state, site.why = "late", sentences.of_coordinator(line, None)
        case "refused" if site is not None:
            site.state, site.why = "refused", str(line["reason"])
        case "evaluation":
            status.evaluation = line
        case "finished":
            status.state, status.epsilon = "finished", line["epsilon"]
            for name in line["sites"]:
                sites[name].state = "finished"
        case "failed":
            status.state, status.why = "failed", str(line["why"])


def of_site(folder: Path) -> BudgetStatus:
    """Read site.toml, the ledger and the log in a site's folder."""
    from sordino.evidence.ledger import Ledger
    from sordino.federation import promises, witness
    from sordino.federation.config import SiteConfig

    config = SiteConfig.read(folder / "site.toml")
    status = BudgetStatus(config.name, 0.0, config.epsilon, config.delta, config.epsilon)
    path, seen = config.path(config.ledger), witness.witness_path(config)
    if not path.exists() and seen.exists():
        status.problem = f"ledger {path}: it is missing, and its witness knows of one; restore the newest ledger."
    if path.exists():
        entries = promises.of_open_studies(config)
        with Ledger(path, read_only=True) as ledger:
            status.problem = witness.older(ledger, seen)
            if accounts := ledger.accounts():
                who = accounts[-1].who
                status.epsilon = ledger.spent_epsilon(who, config.delta)
                promised = ledger.unpaid(entries)
                after = ledger.spent_epsilon(who, config.delta, promised)
                status.promised = after if after > status.epsilon else None
                status.left = ledger.left(who, (config.epsilon, config.delta), promised=promised) or 0.0
                status.caveat = ledger.caveat(who)
            status.answered = sum(1 for row in ledger.rows() if row.key and row.is_release)
    for line in _lines(folder / "events.jsonl"):
        status.runs += line["what"] == "finished"
        status.refusals += line["what"] == "refused"
        status.failures += line["what"] == "failed"
        status.log.append(_logged(line, sentences.of_site(line)))
    status.log = status.log[-MOST_LINES:]
    if status.problem:  # what was spent is not known from here
        status.epsilon, status.left, status.promised, status.caveat = config.epsilon, 0.0, None, ""
    return status


def document(status: CoordinatorStatus | BudgetStatus) -> dict[str, Any]:
    """The status as JSON."""
    return asdict(status)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be growing."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _logged(line: dict[str, Any], sentence: str) -> str:
    return f"{line['time']}  {sentence}" if "time" in line else sentence
