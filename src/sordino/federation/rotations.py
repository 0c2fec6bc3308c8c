"""New long-term keys without a new roster: the old key signs the new ones, and sites follow the chain.

A link names a site, its old key, its new keys, and has the old key's signature. The site shows its links at the hello,
the terms of a run carry those of all sites, and each site applies them to its own roster.toml. What it has accepted is
in `rotations.toml` of its folder: a second link from the same old key, which only a thief would make, is refused.
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
from sordino.federation import witness
from sordino.federation.config import SiteConfig
from sordino.secagg import Card, Identity, Roster

PURPOSE = b"sordino key rotation, format 1\0"  # none of the other messages that a site signs starts with these bytes
FILE = "rotations.toml"
LONGEST = 1024  # characters of a link
MOST = 64  # links of one site


class Link(NamedTuple):
    """A change of one site's keys, all as hex."""

    name: str
    old: str  # the key for signatures that is given up
    sign: str
    box: str
    signature: str = ""  # by the old key

    def text(self) -> str:
        return canonical(self._asdict()).decode()

    @property
    def content(self) -> bytes:
        return PURPOSE + canonical({key: value for key, value in self._asdict().items() if key != "signature"})


def link(old: Identity, new: Identity) -> Link:
    """The old keys' word for the new ones."""
    unsigned = Link(old.name, old.card.sign, new.card.sign, new.card.box)
    return unsigned._replace(signature=old.sign(unsigned.content).hex())


def parsed(texts: Sequence[str]) -> list[Link]:
    """Links from texts.

    Raises:
      SordinoError: one is not a link.
    """
    try:
        found = [Link(**json.loads(text)) for text in texts if len(text) <= LONGEST]
    except (TypeError, ValueError, RecursionError):
        found = []
    if len(found) != len(texts) or not all(isinstance(part, str) for each in found for part in each):
        raise SordinoError("rotations: they are not texts that name a site, its old key, its new keys and a signature.")
    return found


def applied(roster: Roster, links: Iterable[Link]) -> Roster:
    """The roster after all links that lead on from its keys.

    Raises:
      SordinoError: a link is not signed by the key that it leads on from, or two lead on from one key.
    """
    by_old: dict[tuple[str, str], Link] = {}
    for each in links:
        if by_old.setdefault((each.name, each.old), each) != each:
            raise SordinoError(
                f"rotations: the key {each.old[:16]} of '{each.name}' has signed two successors, so it was stolen or "
                "copied; agree on a new roster."
            )
    cards = []
    for card in roster.sites:
        current, steps = card, 0
        while (step := by_old.get((card.name, current.sign))) is not None:
            _check(step, steps)
            current, steps = Card(card.name, step.sign, step.box), steps + 1
        cards.append(current)
    return Roster(tuple(cards)) if by_old else roster


def _check(step: Link, number: int) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if number >= MOST:
        raise SordinoError(f"rotations: '{step.name}' has more than {MOST}; agree on a new roster.")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(step.old))
        key.verify(bytes.fromhex(step.signature), step.content)
    except (InvalidSignature, ValueError):
        raise SordinoError(f"rotations: the new key of '{step.name}' is not signed by its old one.") from None


def accepted(folder: Path) -> list[Link]:
    """The links that a site has accepted, its own included."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return parsed(tomllib.loads(path.read_text(encoding="utf-8"))["links"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        raise SordinoError(f"{path}: it cannot be read; restore it from a backup, or agree on a new roster.") from None


def accept(folder: Path, links: Iterable[Link]) -> None:
    """Store links beside the accepted ones."""
    known = {each.text(): None for each in [*accepted(folder), *links]}
    files.write(folder / FILE, tomli_w.dumps({"links": list(known)}).encode())


def rotate(config: SiteConfig) -> Link:
    """Make new keys for a site. A kill in between is made good by the next call.

    Args:
      config: the site.

    Returns:
      The link, which the site shows from now on.

    Raises:
      SordinoError: the site has open runs, whose terms name its present keys.
    """
    folder, path = config.folder, config.path(config.identity)
    with files.lock(folder / "lock"):
        if open_runs := sorted(place.parent.name for place in (folder / "runs").glob("[!.]*/secret")):
            raise SordinoError(
                f"rotate: run {open_runs[0]} is open, and its terms name the present keys; let it end first, or delete "
                f"'{folder / 'runs' / open_runs[0]}' if it never will."
            )
        old, new_path, seen = Identity.load(path), path.with_name(path.name + ".new"), witness.witness_path(config)
        if not new_path.exists():
            Identity.make(old.name).save(new_path)
        new = Identity.load(new_path)
        made = link(old, new)
        if config.witness is None and (mark := witness.read(seen)) is not None:  # it is named by the key
            witness.write(witness.state_path(bytes.fromhex(new.card.sign)), mark)
        accept(folder, [made])
        files.move(new_path, path)
    return made
