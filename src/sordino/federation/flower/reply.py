"""A site's reply to a message of Flower, by Flower's public interface alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sordino.federation.flower.transport import FIELD, RECORD, opened

if TYPE_CHECKING:
    from flwr.app import Message

FAILED = "The site could not answer."  # all that a server ever reads of a failure

log = logging.getLogger("sordino.federation.flower")


def failure(message: Message) -> Message:
    from flwr.app import Error, Message

    return Message(Error(code=2, reason=FAILED), reply_to=message)  # 2: "the app raised an exception"


def answer(handle: Callable[[bytes], bytes], message: Message, slack: float) -> Message:
    from flwr.app import ConfigRecord, Message, RecordDict

    request, code = opened(message)
    if request is None:
        log.error("A message without content was refused (%s).", code)
        return failure(message)
    if time.time() > message.metadata.created_at + message.metadata.ttl + slack:
        log.error("A message past its deadline was refused; if this repeats, compare this clock with the server's.")
        return failure(message)
    try:
        reply = handle(request)
        if not isinstance(reply, bytes):
            raise TypeError(f"the handler returned {type(reply).__name__}, not bytes")
    except Exception:
        log.exception("The handler failed; the server reads: %s", FAILED)
        return failure(message)
    return Message(RecordDict({RECORD: ConfigRecord({FIELD: reply})}), reply_to=message)
