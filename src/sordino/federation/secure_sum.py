"""The coordinator's part of secure aggregation: it carries offers, masked vectors and shares, and sees only the sum.

Each round has three exchanges. A site answers the round's message, which holds all offers, with a masked vector. It
answers the list of survivors with its confirmation, and enough confirmations with shares of the survivors' masks and
with its keys for the next round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sordino import files, secagg, wire
from sordino.errors import SordinoError, WireError, WrongShareError
from sordino.federation import masks, run_keys
from sordino.federation.messenger import Messenger, about
from sordino.federation.terms import Terms
from sordino.secagg import sparse
from sordino.secagg.messages import read_sparse_offer, shown_present

Arrays = dict[str, np.ndarray]


class SecureSum:
    """One sum per round, over the sites of a run."""

    def __init__(self, terms: Terms, roster: secagg.Roster, folder: Path, messenger: Messenger) -> None:
        self.terms, self.messenger, self.path = terms, messenger, folder / "offers.json"
        roster = run_keys.roster_of_run(roster, terms)
        self.session = secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        self.sparse = masks.is_sparse(self.session)
        self._read_offer: Callable[..., Any] = read_sparse_offer if self.sparse else secagg.read_offer
        self.offers: dict[str, bytes] = {}  # for the next round
        self.dimension = terms.dimension  # numbers of a masked vector: the coordinator sets it for every round

    def gather(self, t: int) -> None:
        """Collect the missing offers for round t. A site that was away may be back."""
        self.offers = {
            name: offer
            for name, offer in self.offers.items()
            if not _of_another_round(offer, t) and self._reads(self._read_offer, t, name, offer)
        }
        missing = [name for name in self.messenger.nodes if name not in self.offers]
        if missing and t < self.terms.exchanges:
            request = wire.encode("offer", about(self.terms, t=t))
            self.offers |= parts(self.messenger.ask(dict.fromkeys(missing, request), "offered"), "offer")

    def round(self, t: int, request: Callable[[Arrays], bytes]) -> tuple[np.ndarray | None, list[str]]:
        """The sum and the sites in it, or None if fewer than the threshold are left.

        request: makes the round's message from the offers.
        """
        try:
            total, came = self._round(t, request)
        except Abandoned as reason:
            self.messenger.tell("abandoned", t=t, why=str(reason), came=reason.came)
            total, came = None, []
        self.gather(t + 1)
        return total, came

    def _round(self, t: int, request: Callable[[Arrays], bytes]) -> tuple[np.ndarray, list[str]]:
        offers, self.offers = self._begun(t), {}
        if len(offers) < self.session.threshold:
            raise Abandoned("too few offers", offers)
        present = offers.keys() & self.messenger.nodes.keys()
        messages, asked, shown = self._requests(t, offers, present, request)
        updates = self.messenger.ask(messages, "update")
        masked = {name: data for name, data in parts(updates, "masked").items() if self._fits(t, name, data, shown)}
        masked = self._survivors(t, masked)
        given = secagg.seals(self.session, t, masked)
        confirmations = self._confirmed(t, masked, given, shown)
        answers = self.messenger.ask(self._reveal_requests(t, masked, given, confirmations), "revealed")
        self.offers, reveals = parts(answers, "offer"), parts(answers, "reveal")
        reveals = {name: data for name, data in reveals.items() if self._answers(t, name, data, shown, offers, masked)}
        try:
            return self._open(t, offers, masked, reveals, asked), sorted(masked)
        except SordinoError as error:
            raise Abandoned(str(error), masked) from None

    def _requests(
        self, t: int, offers: dict[str, bytes], present: Iterable[str], request: Callable[[Arrays], bytes]
    ) -> tuple[dict[str, bytes], str, str]:
        """The round's messages by site, the hash of what all are asked alike, and the hash of what all are shown."""
        if not self.sparse:
            message = request({f"offer:{n}": np.frombuffer(data, np.uint8) for n, data in sorted(offers.items())})
            asked = hashlib.sha256(message).hexdigest()
            return dict.fromkeys(present, message), asked, secagg.shown_sha256(offers, asked)
        common = {masks.PRESENT: masks.present_bits(self.session, offers)}
        asked = hashlib.sha256(request(common)).hexdigest()
        verified = {name: read_sparse_offer(self.session, t, name, data) for name, data in offers.items()}
        messages = {
            name: request(common | {masks.SLIPS: sparse.slips(self.session, t, verified, name).reshape(-1)})
            for name in present
        }
        return messages, asked, shown_present(offers, asked)

    def _reveal_requests(
        self, t: int, masked: dict[str, bytes], given: dict[str, str], confirmations: dict[str, str]
    ) -> dict[str, bytes]:
        fields = about(self.terms, t=t, survivors=sorted(masked), confirmations=confirmations)
        if not self.sparse:
            return dict.fromkeys(sorted(masked), wire.encode("reveal", fields))
        near = {name: self.session.neighbours(name) for name in sorted(masked)}
        return {
            name: wire.encode("reveal", {**fields, "seals": {n: given[n] for n in near[name] if n in given}})
            for name in near
        }

    def _survivors(self, t: int, masked: dict[str, bytes]) -> dict[str, bytes]:
        """The masked vectors to add up. The list is on disk before a site sees it: no site agrees to a second one."""
        stored = json.loads(self.path.read_text())
        able = sparse.survivors(self.session, masked) if self.sparse else masked
        listed = stored.setdefault("survivors", sorted(able))
        if len(listed) < self.session.threshold:
            raise Abandoned("too few survivors", masked)
        if not set(listed) <= masked.keys():
            raise Abandoned("a site of the list of survivors is gone", masked)
        files.write(self.path, json.dumps(stored).encode())
        return {name: masked[name] for name in listed}

    def _confirmed(self, t: int, masked: dict[str, bytes], seals: dict[str, str], shown: str) -> dict[str, str]:
        """The sites' signatures over the list of survivors; along a graph as many of the committee's as are needed."""
        fields = about(self.terms, t=t, survivors=sorted(masked), seals={} if self.sparse else seals)
        asked = sorted(masked.keys() & self.session.committee)
        answers = self.messenger.ask(dict.fromkeys(asked, wire.encode("confirm", fields)), "confirmed")
        given = {name: reply.fields.get("confirmation") for name, reply in answers.items()}
        good = {n: str(g) for n, g in given.items() if secagg.confirms(self.session, t, n, shown, masked, g)}
        for name in given.keys() - good.keys():
            self.messenger.tell("misfit", site=name, t=t, why="its confirmation is not signed")
        needed = self.session.graph.quorum if self.session.graph is not None else self.session.threshold
        if len(good) < needed:
            raise Abandoned("too few sites confirmed the survivors", masked)
        return dict(list(good.items())[:needed]) if self.sparse else good

    def _open(
        self, t: int, offers: dict[str, bytes], masked: dict[str, bytes], reveals: dict[str, bytes], asked: str
    ) -> np.ndarray:
        """The sum. A site that sent a wrong share is left out as long as enough shares remain."""
        while True:
            try:
                open_sum = sparse.open_sum if self.sparse else secagg.open_sum
                return open_sum(self.session, t, offers, masked, reveals, asked)
            except WrongShareError as error:
                self.messenger.tell("misfit", site=error.site, t=t)
                reveals = {name: data for name, data in reveals.items() if name != error.site}

    def _begun(self, t: int) -> dict[str, bytes]:
        """Offers of round t. If the round was begun before a restart, these are the ones on disk."""
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored["t"] == t:
                return {name: bytes.fromhex(offer) for name, offer in stored["offers"].items()}
        as_hex = {name: offer.hex() for name, offer in sorted(self.offers.items())}
        files.write(self.path, json.dumps({"t": t, "offers": as_hex}).encode())
        return self.offers

    def _reads(self, read: Callable[..., Any], t: int, name: str, data: bytes) -> Any:
        try:
            return read(self.session, t, name, data)
        except SordinoError as error:
            self.messenger.tell("misfit", site=name, t=t, why=str(error)[:200])
            return None

    def _fits(self, t: int, name: str, data: bytes, shown: str) -> bool:
        """Signed by its site, of the model's size, and masked with the offers that were sent out."""
        size = self.dimension
        masked = self._reads(partial(secagg.read_masked, dimension=size), t, name, data)
        return bool(masked and (masked.vector.size, masked.shown_sha256) == (size, shown))

    def _answers(
        self, t: int, name: str, data: bytes, shown: str, offers: dict[str, bytes], masked: dict[str, bytes]
    ) -> bool:
        """Signed by its site, and about these offers and survivors."""
        if self.sparse:
            read = partial(sparse.read_reveal, present=offers, survivors=masked)
            told = self._reads(read, t, name, data)
            return bool(told and told.shown_sha256 == shown)
        reveal = self._reads(secagg.read_reveal, t, name, data)
        if not reveal:
            return False
        subject = reveal.shown_sha256, reveal.seeds.keys(), reveal.keys.keys()
        if subject == (shown, masked.keys(), offers.keys() - masked.keys()):
            return True
        self.messenger.tell("misfit", site=name, t=t, why="its reveal is about other offers or survivors")
        return False


def _of_another_round(offer: bytes, t: int) -> bool:
    """Whether a site offers keys for another round than t. Honest sites do after lost rounds, and where the coordinator
    began again in a round that they have answered; they are asked again."""
    try:
        round_of_offer = wire.decode(offer).fields.get("round")
    except WireError:
        return False
    return type(round_of_offer) is int and round_of_offer >= 0 and round_of_offer != t


def parts(replies: dict[str, wire.Message], key: str) -> dict[str, bytes]:
    """The array `key` of every reply that has it."""
    return {name: reply.arrays[key].tobytes() for name, reply in replies.items() if key in reply.arrays}


class Abandoned(Exception):  # noqa: N818
    """A round whose sum cannot be opened. What sites released in it stays charged."""

    def __init__(self, why: str, came: dict[str, bytes]) -> None:
        super().__init__(why)
        self.came = sorted(came)
