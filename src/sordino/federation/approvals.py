"""Approval of studies by a person at the site: `ask = true` in site.toml.

A site that asks refuses a study that its rules allow until a person approved it. An approval is for one run of one
study: the terms without what differs from run to run. So a coordinator that proposes it again after the refusal is
accepted, and a second run of the same study is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sordino import files
from sordino.errors import Refused, SordinoError
from sordino.federation.terms import Terms

FOLDER = "approvals"  # in the site's folder
OF_A_RUN = (
    "run",
    "version",
    "derived",
    "format",
    "spec",
    "run_keys",
    "rotations",
)  # parts of the terms that differ from run to run
MOST_ASKED = 100  # studies that wait; a coordinator that proposes more is refused without a question


class Study(NamedTuple):
    """A study that was proposed, as a person sees it."""

    digest: str
    state: str  # asked, approved, declined or used
    time: str
    facts: dict[str, Any]


def digest_of(terms: Terms) -> str:
    """A hash of the study: all of the terms but for the run."""
    spec = {key: value for key, value in tomllib.loads(terms.spec).items() if key != "schedule_seed"}
    rest = {key: value for key, value in asdict(terms).items() if key not in OF_A_RUN}
    return hashlib.sha256(json.dumps([spec, rest], sort_keys=True).encode()).hexdigest()


def check(folder: Path, terms: Terms) -> None:
    """Refuse a study that nobody approved.

    Args:
      folder: the site's folder.
      terms: what the coordinator proposes.

    Raises:
      Refused: nobody approved it. The question is stored for `sordino federate approve`.
    """
    place, digest = folder / FOLDER, digest_of(terms)
    path = place / f"{digest}.json"
    stored = _read(path) if path.exists() else None
    if stored is not None and stored.state == "approved":
        return
    if stored is not None and stored.state == "declined":
        raise Refused("approval", f"study {digest[:12]} was declined by a person of this site")
    if stored is None or stored.state == "used":
        place.mkdir(mode=0o700, exist_ok=True)
        if sum(study.state == "asked" for study in studies(folder)) >= MOST_ASKED:
            raise Refused("approval", f"{MOST_ASKED} studies wait for an answer; approve or decline them first")
        _write(path, Study(digest, "asked", _now(), facts_of(terms)))
    raise Refused("approval", f"study {digest[:12]} waits for a person: sordino federate approve {folder}/site.toml")


def use(folder: Path, terms: Terms) -> None:
    """Use up the approval of this study, which `check` found: it is for one run."""
    _change(folder, terms, "approved", "used")


def give_back(folder: Path, terms: Terms) -> None:
    """Let the approval count again, because the run that used it was withdrawn before its first round."""
    _change(folder, terms, "used", "approved")


def _change(folder: Path, terms: Terms, before: str, after: str) -> None:
    path = folder / FOLDER / f"{digest_of(terms)}.json"
    if path.exists() and (stored := _read(path)).state == before:
        _write(path, stored._replace(state=after))


def facts_of(terms: Terms) -> dict[str, Any]:
    """What a person should know before answering."""
    resolved, privacy = terms.resolved, terms.resolved.privacy
    return {
        "method": resolved.method_name,
        "model": resolved.model.name,
        "rounds": resolved.rounds,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "unit": str(privacy.unit),
        "trust": str(privacy.trust),
        "evaluation_epsilon": terms.evaluation,
        "sites": list(terms.names),
        "features": terms.features,
    }


def studies(folder: Path) -> list[Study]:
    """All studies that this site was asked about, in the order of the questions."""
    found = [_read(path) for path in (folder / FOLDER).glob("*.json")]
    return sorted(found, key=lambda study: (study.time, study.digest))


def answer(folder: Path, begins: str, approved: bool) -> Study:
    """Approve or decline the study whose hash begins like this.

    Raises:
      SordinoError: no study that waits begins so, or several do.
    """
    fitting = [
        s for s in studies(folder) if s.digest.startswith(begins) and s.state in ("asked", "approved", "declined")
    ]
    if len(fitting) != 1 or len(begins) < 8:
        what = "no study that waits begins so" if not fitting else "give at least 8 digits of one study"
        raise SordinoError(f"study: '{begins}': {what}; `sordino federate approve SITE.toml` lists them.")
    study = fitting[0]._replace(state="approved" if approved else "declined")
    _write(folder / FOLDER / f"{study.digest}.json", study)
    return study


def _read(path: Path) -> Study:
    try:
        return Study(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise SordinoError(f"{path}: it cannot be read; delete it, and the study is asked for again.") from None


def _write(path: Path, study: Study) -> None:
    files.write(path, json.dumps(study._asdict()).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
