"""The server's side: one message to each site, and the replies that came in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sordino.errors import SordinoError

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

RECORD, FIELD = "message", "bytes"  # where Flower's message holds the bytes
LINK_POLL = 0.15  # seconds between two requests to the link, and more with many sites


class GridTransport:
    """Messages over Flower's Grid: the `Transport` of `federation.messenger`.

    names: whose node has which number. The link admits a node by its key, so this binds a site's name to its key.
    together: ask for all replies in one request, which is faster for a thousand virtual sites in one process. Over a
    network, a reply whose bytes never arrive would then block the others.
    failures: one code per site missing from the last exchange: "late", "unsent", "error <Flower's number>" or
    "malformed". It never holds a text that a site wrote.
    """

    def __init__(self, grid: Grid, names: Mapping[int, str] | None = None, *, together: bool = False) -> None:
        self.grid, self.names, self.together = grid, dict(names or {}), together
        self.failures: dict[int, str] = {}
        self._count = 0

    def sites(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def exchange(
        self, requests: dict[int, bytes], seconds: float, enough: Callable[[dict[int, bytes]], bool] | None = None
    ) -> dict[int, bytes]:
        from flwr.app import ConfigRecord, Message, RecordDict

        if not seconds > 0:
            raise SordinoError(f"seconds: {seconds} must be above 0.")
        self._count += 1
        end = time.monotonic() + seconds
        nodes = list(requests)
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord({FIELD: requests[node]})}),
                dst_node_id=node,
                message_type="query",
                ttl=seconds,
                group_id=str(self._count),
            )
            for node in nodes
        ]
        sent = list(self.grid.push_messages(messages)) or [""] * len(nodes)

        replies: dict[int, bytes] = {}
        self.failures = failures = {node: "late" if name else "unsent" for node, name in zip(nodes, sent, strict=True)}
        changed, over = threading.Condition(), threading.Event()

        def fetch(group: dict[str, int]) -> None:
            while group and not over.wait(pause):
                try:
                    found = list(self.grid.pull_messages(list(group)))
                except Exception as error:
                    if self.together:
                        continue
                    found = []
                    note(group.popitem()[1], None, f"error {type(error).__name__}")
                for reply in found[: len(group)]:
                    name = reply.metadata.reply_to_message_id if self.together else next(iter(group))
                    if (node := group.pop(name, None)) is not None:
                        note(node, *opened(reply))

        def note(node: int, answer: bytes | None, code: str) -> None:
            with changed:
                if not over.is_set():
                    if answer is None:
                        failures[node] = code
                    else:
                        replies[node] = answer
                        del failures[node]
                waiting.discard(node)
                changed.notify()

        names = {name: node for node, name in zip(nodes, sent, strict=True) if name}
        waiting = set(names.values())
        # Otherwise each site has its own thread, so that a reply whose bytes never arrive blocks no other site.
        groups = [names] if self.together else [{name: node} for name, node in names.items()]
        pause = max(LINK_POLL, 0.02 * len(groups), 0.001 * len(names))
        for group in groups:
            threading.Thread(target=fetch, args=(dict(group),), daemon=True).start()
        with changed:
            try:
                while waiting and (left := end - time.monotonic()) > 0:
                    if enough is not None and replies and enough(dict(replies)):
                        break
                    changed.wait(left)
            finally:
                over.set()
        return replies


def opened(message: Message) -> tuple[bytes | None, str]:
    """The bytes of a message, or None and a code."""
    if message.has_error():
        return None, f"error {message.error.code}"
    try:
        value = message.content.config_records[RECORD][FIELD]
    except KeyError:
        value = None
    return (value, "") if isinstance(value, bytes) else (None, "malformed")
