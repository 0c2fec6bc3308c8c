"""Flower's own SuperLink, with a login for its control interface and a limit on the size of requests.

    python -m sordino.federation.flower.superlink --login FILE --most BYTES <the arguments of flower-superlink>

Flower serves three interfaces on one port. `/v1/fleet/` is for nodes with registered keys, and `/v1/runtime/` for
processes with the secret file. `/v1/control/`, by which runs are started and stopped, is open to everybody who reaches
the port; here a request to it needs a header that is derived from the secret file (`control.py` sends it). All other
pages are closed. A longer request than `--most` is refused before it is read: Flower would keep it in memory, several
times.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sordino.federation.flower.lifeline import watch

HEADER = "x-sordino-control"
OPEN = ("/v1/fleet/", "/v1/runtime/")
CONTROL = "/v1/control/"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


def login(secret: bytes) -> str:
    """What the header must hold. The secret itself does not travel."""
    return hmac.new(secret, b"sordino control", hashlib.sha256).hexdigest()


class Guard:
    """An ASGI application before Flower's.

    Args:
      app: Flower's application.
      token: of the control interface.
      most: bytes of a request.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str, most: int) -> None:
        self.app, self.token, self.most = app, token, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (status := self._refusal(scope)):
            await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] in ("http", "lifespan"):
            await self.app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope) -> int:
        """The status with which a request is refused by its head alone; 0 if it is not."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path = str(scope["path"])
        if path.startswith(CONTROL):
            if not hmac.compare_digest(headers.get(HEADER, "").encode(), self.token.encode()):
                return 401
        elif not path.startswith(OPEN):
            return 404
        length = headers.get("content-length", "0")
        return 413 if not length.isdecimal() or int(length) > self.most else 0

    def _limited(self, receive: Receive) -> Receive:
        """The body of a request that does not tell its length: it is cut off at the limit."""
        read = 0

        async def limited() -> Scope:
            nonlocal read
            event = await receive()
            read += len(event.get("body", b""))
            return event if read <= self.most else {"type": "http.disconnect"}

        return limited


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sordino.federation.flower.superlink", add_help=False)
    parser.add_argument("--login", type=Path, required=True)
    parser.add_argument("--most", type=int, required=True)
    arguments, rest = parser.parse_known_args()
    token = login(arguments.login.read_bytes())
    watch()
    from flwr.superlink.cli import flower_superlink

    module = sys.modules[flower_superlink.__module__]
    run = vars(module)["uvicorn"].run
    # The module uses `uvicorn` only to run its application. Its own name is replaced; the module stays as it is.
    vars(module)["uvicorn"] = SimpleNamespace(
        run=lambda app, **options: run(Guard(app, token, arguments.most), **options)
    )
    sys.argv = ["flower-superlink", *rest]
    flower_superlink()


if __name__ == "__main__":
    main()
