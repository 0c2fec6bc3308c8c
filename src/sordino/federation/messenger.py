"""Letters to sites by their names, and what came back in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from sordino import wire
from sordino.errors import WireError

POLL = 1.0  # seconds between looks for sites


class Transport(Protocol):
    """Letters to numbered nodes; who failed or was late is missing from the replies."""

    def sites(self) -> list[int]:
        """Nodes that are connected now; one that died may be listed for another minute."""

    def exchange(
        self, letters: dict[int, bytes], seconds: float, enough: Callable[[dict[int, bytes]], bool] | None = None
    ) -> dict[int, bytes]:
        """The replies, once all are there, or `enough` says so, or `seconds` are over; later ones are dropped."""


class Messenger:
    """tell: where what went wrong is written down."""

    def __init__(self, transport: Transport, deadline: float, tell: Callable[..., None]) -> None:
        self.transport, self.deadline, self.tell = transport, deadline, tell
        self.nodes: dict[str, int] = {}
        self.unknown_sites: set[str] = set()  # who answered that they know nothing of the run

    def ask(self, letters: dict[str, bytes], kind: str) -> dict[str, wire.Message]:
        """Replies by name: of the kind asked for, or refusals (told, and left out but for terms)."""
        if not letters:
            return {}
        replies = self._exchange({self.nodes[name]: letter for name, letter in letters.items()})
        found = {}
        for name in letters:
            message = read(replies.get(self.nodes[name], b""), kind)
            if message is None:
                self.tell("missing", site=name, kind=kind)
            elif message.kind == "refused":
                self.tell("refused", site=name, kind=kind, reason=str(message.fields.get("reason"))[:200])
                if message.fields.get("code") == "unknown-run":
                    self.unknown_sites.add(name)
                if kind == "agreed":
                    found[name] = message
            else:
                found[name] = message
        return found

    def _exchange(self, letters: dict[int, bytes]) -> dict[int, bytes]:
        """Until the deadline; a site that left the link is waited for, and asked again when it is back."""
        until = time.monotonic() + self.deadline
        replies = self.transport.exchange(letters, self.deadline)
        while True:
            here = set(self.transport.sites())
            away = [node for node in letters if node not in replies and node not in here]
            if not away or time.monotonic() + POLL > until:
                return replies
            time.sleep(POLL)
            back = {node: letters[node] for node in away if node in self.transport.sites()}
            if back:
                replies |= self.transport.exchange(back, max(POLL, until - time.monotonic()))


def read(reply: bytes, kind: str) -> wire.Message | None:
    """A message of this kind, or a refusal."""
    try:
        message = wire.decode(reply)
    except WireError:
        return None
    return message if message.kind in (kind, "refused") else None


def about(terms: Any, **fields: Any) -> dict[str, Any]:
    """What every letter of a run says first."""
    return {"run": terms.run, "terms": terms.sha256(), **fields}
