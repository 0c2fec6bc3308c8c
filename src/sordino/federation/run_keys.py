"""Box keys for one run: whoever steals a site's long-term keys later reads nothing that was recorded before.

Under secure aggregation, sites encrypt shares of their masks to each other. At its hello a site draws a fresh X25519
key, and signs it with its long-term key. The terms of the run name these keys for all sites. The private half lies in
`box_keys/` of the site's folder and in the folder of the run, and both copies are deleted when the run ends, with the
secret of the run.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sordino import files
from sordino.errors import Refused, SordinoError
from sordino.evidence.signing import canonical
from sordino.federation.terms import Terms
from sordino.secagg import Identity, Roster
from sordino.secagg.derive import public

PURPOSE = b"sordino run key, format 1\0"  # none of the other messages that a site signs starts with these bytes
FOLDER = "box_keys"  # in the site's folder
FILE = "box"  # in the folder of a run
MOST_WAITING = 64  # keys that no run has used yet
OLDEST = 30 * 24 * 3600.0  # seconds after which such a key is deleted
TEXT = re.compile(r"[0-9a-f]{192}", re.ASCII)  # a public key and a signature


def fresh(folder: Path, identity: Identity) -> str:
    """Draw and store a key for a run.

    Args:
      folder: the site's folder.
      identity: the site, which signs the key.

    Returns:
      The public key and the signature, as hex.
    """
    place, private = folder / FOLDER, X25519PrivateKey.generate().private_bytes_raw()
    place.mkdir(mode=0o700, exist_ok=True)
    kept = sorted(place.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for number, path in enumerate(kept):
        if number >= MOST_WAITING - 1 or time.time() - path.stat().st_mtime > OLDEST:
            path.unlink()
    box = public(private).hex()
    files.create(place / box, private)
    return box + identity.sign(_content(identity.name, box)).hex()


def waiting(folder: Path, text: str, run: str) -> bytes:
    """The private half of a key that this site drew for a run.

    Args:
      folder: the site's folder.
      text: what `fresh` returned.
      run: the run whose terms name the key.

    Raises:
      Refused: it is not there, or another run took it.
    """
    path = folder / FOLDER / text[:64]
    if not TEXT.fullmatch(text) or not path.is_file():
        raise Refused(
            "policy",
            "the terms name a run key that this folder does not have: it was copied or restored from before the run, "
            "or the run is over here. Use the original folder, or begin a new run with this one alone",
        )
    stored = path.read_bytes()
    private, taken = stored[:32], stored[32:].decode()
    if taken not in ("", run):  # it would stay here when one of the two has ended, and open what was recorded of it
        raise Refused("policy", f"the terms name the run key of run {taken}, and every run has a key of its own")
    return private


def take(folder: Path, text: str, run: str) -> bytes:
    """The private half of a key, which is from now on that of this run. See `waiting`."""
    private, path = waiting(folder, text, run), folder / FOLDER / text[:64]
    if path.stat().st_size == len(private):
        files.append(path, run)  # in place: a kill leaves no copy of the key
    return private


def erase(folder: Path, text: str) -> None:
    """Delete the private half of a key, because its run is over."""
    if TEXT.fullmatch(text):
        (folder / FOLDER / text[:64]).unlink(missing_ok=True)


def roster_of_run(roster: Roster, terms: Terms) -> Roster:
    """The roster with the box keys of this run.

    Args:
      roster: the sites' long-term keys.
      terms: of the run.

    Raises:
      SordinoError: a key is missing, or not signed by its site.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if len(terms.run_keys) != len(roster.names):
        raise SordinoError(f"run_keys: the terms name {len(terms.run_keys)}, and the roster has {len(roster)} sites.")
    cards = []
    for card, text in zip(roster.sites, terms.run_keys, strict=True):
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(card.sign))
            key.verify(bytes.fromhex(text[64:]), _content(card.name, text[:64]))
        except InvalidSignature:
            raise SordinoError(
                f"run_keys: that of '{card.name}' is not signed by its key in the roster; begin a new run, and do not "
                "trust the coordinator if this is repeated."
            ) from None
        cards.append(card._replace(box=text[:64]))
    return Roster(tuple(cards))


def _content(name: str, box: str) -> bytes:
    return PURPOSE + canonical({"name": name, "box": box})
