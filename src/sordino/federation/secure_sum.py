"""The coordinator's part of secure aggregation: it carries offers, masked vectors and shares, and sees the sum alone.

Each round has two exchanges. The answer to a round's letter is a masked vector; the answer to who survived is shares of
their masks, and keys for the next round with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files, secagg, wire
from sordino.errors import SordinoError, WrongShareError
from sordino.federation.messenger import Messenger, about
from sordino.federation.terms import Terms

Arrays = dict[str, np.ndarray]


class Sums:
    def __init__(self, terms: Terms, roster: secagg.Roster, folder: Path, post: Messenger) -> None:
        self.terms, self.post, self.path = terms, post, folder / "offers.json"
        self.session = secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        self.offers: dict[str, bytes] = {}  # for the round to come

    def gather(self, t: int) -> None:
        """Offers for round t from all who have not sent theirs: who was away may be back."""
        self.offers = {
            name: offer for name, offer in self.offers.items() if self._reads(secagg.read_offer, t, name, offer)
        }
        missing = [name for name in self.post.nodes if name not in self.offers]
        if missing and t < self.terms.plan.rounds:
            letter = wire.encode("offer", about(self.terms, t=t))
            self.offers |= parts(self.post.ask(dict.fromkeys(missing, letter), "offered"), "offer")

    def round(self, t: int, letter: Callable[[Arrays], bytes]) -> tuple[np.ndarray | None, list[str]]:
        """The sum and whose it is, if as many as planned are in it; letter(offers) is what sites are sent."""
        try:
            total, came = self._round(t, letter)
        except Abandoned as why:
            self.post.tell("abandoned", t=t, why=str(why), came=why.came)
            total, came = None, []
        self.gather(t + 1)
        return total, came

    def _round(self, t: int, letter: Callable[[Arrays], bytes]) -> tuple[np.ndarray, list[str]]:
        offers, self.offers = self._begun(t), {}
        if len(offers) < self.session.threshold:
            raise Abandoned("too few offers", offers)
        sent = {f"offer:{name}": np.frombuffer(offer, np.uint8) for name, offer in sorted(offers.items())}
        said = self.post.ask(dict.fromkeys(offers.keys() & self.post.nodes.keys(), letter(sent)), "said")
        masked = {name: data for name, data in parts(said, "masked").items() if self._fits(t, name, data, offers)}
        if len(masked) < self.session.threshold:
            raise Abandoned("too few survivors", masked)
        fields = about(self.terms, t=t, survivors=sorted(masked), seals=secagg.seals(self.session, t, masked))
        found = self.post.ask(dict.fromkeys(sorted(masked), wire.encode("reveal", fields, sent)), "revealed")
        self.offers, reveals = parts(found, "offer"), parts(found, "reveal")
        reveals = {name: data for name, data in reveals.items() if self._answers(t, name, data, offers, masked)}
        try:
            return self._open(t, offers, masked, reveals), sorted(masked)
        except SordinoError as error:
            raise Abandoned(str(error), masked) from None

    def _open(
        self, t: int, offers: dict[str, bytes], masked: dict[str, bytes], reveals: dict[str, bytes]
    ) -> np.ndarray:
        """The sum; whoever sent a wrong share is left out while enough are left."""
        while True:
            try:
                return secagg.open_sum(self.session, t, offers, masked, reveals)
            except WrongShareError as error:
                self.post.tell("misfit", site=error.site, t=t)
                reveals = {name: data for name, data in reveals.items() if name != error.site}

    def _begun(self, t: int) -> dict[str, bytes]:
        """Offers of round t: those on disk, where it was begun already."""
        if self.path.exists():
            known = json.loads(self.path.read_text())
            if known["t"] == t:
                return {name: bytes.fromhex(offer) for name, offer in known["offers"].items()}
        kept = {name: offer.hex() for name, offer in sorted(self.offers.items())}
        files.write(self.path, json.dumps({"t": t, "offers": kept}).encode())
        return self.offers

    def _reads(self, read: Callable[..., Any], t: int, name: str, data: bytes) -> Any:
        try:
            return read(self.session, t, name, data)
        except SordinoError as error:
            self.post.tell("misfit", site=name, t=t, why=str(error)[:200])
            return None

    def _fits(self, t: int, name: str, data: bytes, offers: dict[str, bytes]) -> bool:
        """Signed by its site, of the model's size, and masked with the offers that were sent out."""
        size = self.terms.model.size
        found = self._reads(partial(secagg.read_masked, dimension=size), t, name, data)
        return bool(found and (found.vector.size, found.offers_sha256) == (size, secagg.offers_sha256(offers)))

    def _answers(self, t: int, name: str, data: bytes, offers: dict[str, bytes], masked: dict[str, bytes]) -> bool:
        """Signed by its site, and about these offers and survivors."""
        found = self._reads(secagg.read_reveal, t, name, data)
        if not found:
            return False
        said = found.offers_sha256, found.seeds.keys(), found.keys.keys()
        if said == (secagg.offers_sha256(offers), masked.keys(), offers.keys() - masked.keys()):
            return True
        self.post.tell("misfit", site=name, t=t, why="its reveal is about other offers or survivors")
        return False


def parts(replies: dict[str, wire.Message], key: str) -> dict[str, bytes]:
    """One array of each reply that has it."""
    return {name: found.arrays[key].tobytes() for name, found in replies.items() if key in found.arrays}


class Abandoned(Exception):  # noqa: N818
    """A round that is not opened, and stays paid for."""

    def __init__(self, why: str, came: dict[str, bytes]) -> None:
        super().__init__(why)
        self.came = sorted(came)
