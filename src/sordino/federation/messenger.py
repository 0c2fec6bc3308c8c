"""Messages to sites by their names, and the replies that came in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sordino import wire
from sordino.errors import WireError
from sordino.federation import limits
from sordino.federation.witness import Receipts
from sordino.foreign import printable

REASON = 200  # characters of a reason that a site gives
POLL = 1.0  # seconds between two looks for connected sites


class Transport(Protocol):
    """Carries bytes to numbered nodes and back. A node that failed or was late is missing from the replies.

    A transport that admits nodes by their keys also has `names`: whose node has which number (see `names_of`).
    """

    def sites(self) -> list[int]:
        """Nodes that are connected now. One that died may be listed for another minute."""

    def exchange(
        self, requests: dict[int, bytes], seconds: float, enough: Callable[[dict[int, bytes]], bool] | None = None
    ) -> dict[int, bytes]:
        """The replies, once all are there, or `enough` is satisfied, or `seconds` are over. Later ones are dropped."""


def names_of(transport: Transport) -> dict[int, str]:
    """The sites by the numbers of their nodes, where the transport knows whose key a node has; otherwise empty."""
    return dict(getattr(transport, "names", {}))


class Messenger:
    """Sends messages to sites by name.

    tell: called with each reply that is missing or refused.
    receipts: keeps what sites sign about their ledgers.
    """

    def __init__(
        self, transport: Transport, deadline: float, tell: Callable[..., None], receipts: Receipts | None = None
    ) -> None:
        self.transport, self.deadline, self.tell, self.receipts = transport, deadline, tell, receipts
        self.nodes: dict[str, int] = {}
        self.most = limits.SMALL  # bytes of a reply; the terms say how long an update may be
        self.unknown_sites: set[str] = set()  # sites that answered that they do not know the run

    def ask(self, requests: dict[str, bytes], kind: str) -> dict[str, wire.Message]:
        """Replies of the kind asked for, by site. A refusal is reported; it is returned only if kind is "agreed"."""
        if not requests:
            return {}
        replies = self._exchange({self.nodes[name]: request for name, request in requests.items()})
        answers = {}
        for name in requests:
            message = read(replies.get(self.nodes[name], b""), kind, self.most)
            if message is None:
                self.tell("missing", site=name, kind=kind)
            elif message.fields.get("code") == "queued" and message.kind == "refused" and kind == "agreed":
                answers[name] = message  # the coordinator asks again
            elif message.kind == "refused":
                self.tell("refused", site=name, kind=kind, reason=reason_of(message))
                if message.fields.get("code") == "unknown-run":
                    self.unknown_sites.add(name)
                if kind == "agreed":
                    answers[name] = message
            else:
                answers[name] = message
        self.keep_receipts({name: answer for name, answer in answers.items() if answer.kind != "refused"})
        return answers

    def keep_receipts(self, messages: Mapping[str, wire.Message]) -> None:
        """Store what sites signed about their ledgers, to show it at the next hello."""
        if self.receipts is not None:
            fields = {name: message.fields for name, message in messages.items()}
            self.receipts.keep_all({name: own["receipt"] for name, own in fields.items() if "receipt" in own})

    def _exchange(self, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Wait until the deadline. A site that left the link is asked again when it is back."""
        until, told = time.monotonic() + self.deadline, False
        replies = self.transport.exchange(requests, self.deadline)
        while True:
            connected = set(self.transport.sites())
            away = [node for node in requests if node not in replies and node not in connected]
            if not away or time.monotonic() + POLL > until:
                return replies
            for name in [] if told else sorted(name for name, node in self.nodes.items() if node in away):
                self.tell("away", site=name, seconds=round(until - time.monotonic()))
            told = True
            time.sleep(POLL)
            back = {node: requests[node] for node in away if node in self.transport.sites()}
            if back:
                replies |= self.transport.exchange(back, max(POLL, until - time.monotonic()))


def read(reply: bytes, kind: str, most: int = limits.SMALL) -> wire.Message | None:
    """A message of this kind, or a refusal, of at most so many bytes; None for anything else."""
    try:
        message = wire.decode(reply, most)
    except WireError:
        return None
    return message if message.kind in (kind, "refused") else None


def reason_of(refusal: wire.Message) -> str:
    """Why a site refused, safe to print."""
    return printable(str(refusal.fields.get("reason")), REASON)


def about(terms: Any, **fields: Any) -> dict[str, Any]:
    """The fields that every message of a run has, and some more."""
    return {"run": terms.run, "terms": terms.sha256(), **fields}
