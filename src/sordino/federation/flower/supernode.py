"""Flower's own SuperNode, polling for work more often, and ending when it hears nothing more.

    python -m sordino.federation.flower.supernode --idle 0.2 --pulse FILE <the arguments of flower-supernode>

By itself it sleeps 3 s when there is nothing to do, 0.5 s while it waits for its worker, and at least 1 s for an object
that is still being uploaded. This file shortens only these three waits: an exchange then takes about 1 s, not 4 s.

Flower's SuperNode ends its loop at the first broken TLS connection, and its heartbeat at the first answer that it does
not expect, but its process lives on because it also serves the worker. Here the process ends in both cases, so that
whoever looks after it starts it again. Plain `flower-supernode` works as well, but stays deaf after a
broken connection.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

from sordino.federation.flower.clock import LinkClock
from sordino.federation.flower.lifeline import Pace, Pulse, hears, watch

if TYPE_CHECKING:
    import httpx

MAX_RESPONSE_BYTES = 2**30 + 2**20  # the largest message that a site reads, and what Flower adds
FLOWER_IDLE = 3.0  # seconds that Flower's main loop sleeps when there is no message
DEAF = 75  # exit status: the loop or the heartbeat ended, and a new start may help
NOT_ACCEPTED = 76  # exit status: the link does not know the key of the node, or a node with this key is connected
ACTIVATION = "/activate-node"  # end of the path of the first request that needs a known key


def uploads(seconds: float) -> None:
    """Poll every `seconds`, at most twice that, for an object that is still being uploaded."""
    from flwr.supercore.inflatable import inflatable_utils as pulls

    for pull in (pulls.pull_objects, pulls.pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__ or {}
        tries = int(defaults["max_time"] / seconds)  # the time limit stays as it is
        defaults.update(initial_backoff=seconds, backoff_cap=2 * seconds, max_tries_per_object=tries)


def idle(seconds: float) -> None:
    """Limit the sleeps of the SuperNode's main loop to `seconds`, and to more if no message came for a while."""
    from flwr.supernode import start_client_internal as loop

    pace = Pace(seconds)

    def sleep(wanted: float) -> None:
        if wanted < FLOWER_IDLE:  # it waits for its worker, which has a message
            pace.worked()
        time.sleep(min(wanted, pace.wait))

    # The module uses `time` only to sleep. Its own name `time` is replaced; the module `time` stays as it is.
    vars(loop)["time"] = SimpleNamespace(sleep=sleep)


def keep_time(clock: LinkClock, rest: list[str]) -> None:
    """Sign the link's time instead of this machine's, and ask for it once before the node connects."""
    import ssl

    import httpx
    from flwr.supernode import node_auth_http_interceptor as stamps

    vars(stamps)["now"] = clock.now
    link, authority = (rest[rest.index(name) + 1] for name in ("--superlink", "--root-certificates"))
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=authority), timeout=10.0) as client:
            client.get(f"https://{link}/v1/fleet/")
    except (httpx.HTTPError, OSError):
        return  # Flower tries again, and says what is wrong


class Accepted:
    """Whether the link accepted the key of the node when it was asked last."""

    def __init__(self) -> None:
        self.refused = False

    def heard(self, response: httpx.Response) -> None:
        if response.request.url.path.endswith(ACTIVATION):
            self.refused = response.status_code == HTTPStatus.PRECONDITION_FAILED


def leave(status: int) -> NoReturn:
    """End the process, with the thread that serves the worker."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """The heartbeat is a thread: without it, the link takes the site for gone."""
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    leave(DEAF)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sordino.federation.flower.supernode", add_help=False)
    parser.add_argument("--idle", type=float, default=0.2)
    parser.add_argument("--pulse", type=Path)
    parser.add_argument("--clock", type=Path)
    arguments, rest = parser.parse_known_args()
    from importlib.metadata import version

    if not version("flwr").startswith("1.41."):
        sys.exit(f"flwr {version('flwr')} is installed and 1.41.* is needed: pip install 'sordino[flower]'.")
    watch()
    from flwr.supernode.cli import flower_supernode

    idle(arguments.idle)
    uploads(arguments.idle)
    clock, key = LinkClock(arguments.clock), Accepted()

    def heard(response: httpx.Response) -> None:
        clock.heard(response.headers.get("date"))
        key.heard(response)

    hears(Pulse(arguments.pulse), MAX_RESPONSE_BYTES, heard)
    keep_time(clock, rest)
    threading.excepthook = _thread_failed
    sys.argv = ["flower-supernode", *rest]
    try:
        flower_supernode()
    except SystemExit as request:
        leave(NOT_ACCEPTED if key.refused else request.code if isinstance(request.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    print("The connection to the link ended; this process ends, to be started again.", file=sys.stderr)
    leave(DEAF)


if __name__ == "__main__":
    main()
