"""Votes to leave a site out: sites sign them, and more than half of the other sites are enough.

Under masks nobody sees a single message, so a site that sends garbage is found by other means, such as runs with and
without it. `sordino federate vote` stores a site's vote, which it shows at every hello. The terms of a run carry all
votes that count. A site refuses terms that leave out its own vote or show one that it has withdrawn, that name a site
with enough votes against it, or that leave out a site without them. The noise is planned for the sites that remain.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w

from sordino import files
from sordino.errors import SordinoError
from sordino.evidence.signing import canonical
from sordino.secagg import Identity, Roster

PURPOSE = b"sordino vote, format 1\0"  # none of the other messages that a site signs starts with these bytes
FILE = "votes.toml"  # in the site's folder
LONGEST = 512  # characters of a vote


class Vote(NamedTuple):
    """One site's vote against another."""

    voter: str
    against: str
    signature: str = ""

    def text(self) -> str:
        return canonical(self._asdict()).decode()

    @property
    def content(self) -> bytes:
        return PURPOSE + canonical({"voter": self.voter, "against": self.against})


def signed(identity: Identity, against: str) -> Vote:
    """A vote of this site."""
    vote = Vote(identity.name, against)
    return vote._replace(signature=identity.sign(vote.content).hex())


def parsed(texts: Sequence[str]) -> list[Vote]:
    """Votes from texts.

    Raises:
      SordinoError: one is not a vote.
    """
    try:
        found = [Vote(**json.loads(text)) for text in texts if len(text) <= LONGEST]
    except (TypeError, ValueError, RecursionError):
        found = []
    if len(found) != len(texts) or not all(isinstance(part, str) for vote in found for part in vote):
        raise SordinoError("votes: they are not texts that name a voter, whom it is against, and a signature.")
    return found


def is_signed(vote: Vote, roster: Roster) -> bool:
    """Whether the voter's key in the roster signed it, and both are sites of the roster."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if vote.voter not in roster.names or vote.against not in roster.names or vote.voter == vote.against:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(roster.card(vote.voter).sign))
        key.verify(bytes.fromhex(vote.signature), vote.content)
    except (InvalidSignature, ValueError):
        return False
    return True


def needed(roster: Roster) -> int:
    """Votes that are enough: more than half of the other sites."""
    return (len(roster) - 1) // 2 + 1


def excluded(roster: Roster, votes: Iterable[Vote]) -> dict[str, list[str]]:
    """Sites with enough votes against them, and who voted.

    Raises:
      SordinoError: a vote is not signed by its site.
    """
    against: dict[str, set[str]] = {}
    for vote in votes:
        if not is_signed(vote, roster):
            raise SordinoError(f"votes: that of '{vote.voter[:64]}' is not signed by its key in the roster.")
        against.setdefault(vote.against, set()).add(vote.voter)
    return {name: sorted(by) for name, by in against.items() if len(by) >= needed(roster)}


def reduced(roster: Roster, out: Iterable[str]) -> Roster:
    """The roster without some sites."""
    gone = set(out)
    return Roster(tuple(card for card in roster.sites if card.name not in gone)) if gone else roster


# ---------------------------------------------------------------------------------------------------------- at a site


def stored(folder: Path) -> list[str]:
    """Whom a site votes against."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [str(name) for name in tomllib.loads(path.read_text(encoding="utf-8"))["against"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        raise SordinoError(f"{path}: it cannot be read; it must hold against = [names].") from None


def own(folder: Path, identity: Identity) -> list[Vote]:
    """A site's votes, signed by its present key."""
    return [signed(identity, name) for name in stored(folder)]


def store(folder: Path, against: Iterable[str]) -> None:
    """Replace a site's votes."""
    files.write(folder / FILE, tomli_w.dumps({"against": sorted(set(against))}).encode())


def check_own(folder: Path, identity: Identity, texts: Sequence[str]) -> None:
    """Check that terms carry this site's votes, and no others of its.

    Raises:
      SordinoError: they do not.
    """
    mine = {vote.text() for vote in own(folder, identity)}
    shown = {vote.text() for vote in parsed(texts) if vote.voter == identity.name}
    if mine != shown:
        problem = "leave out a vote of this site" if mine - shown else "show a vote that this site has withdrawn"
        raise SordinoError(f"votes: the terms {problem}; the coordinator must ask this site again before it proposes.")
