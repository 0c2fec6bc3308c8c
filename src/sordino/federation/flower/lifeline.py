"""Processes that end with the process that started them, and that say whether they still work.

The starter keeps the write end of a pipe, which is the standard input of the process it starts. When the starter ends,
by `kill -9` too, the pipe is closed and the process ends itself. Linux could send a signal instead (PR_SET_PDEATHSIG),
but it sends it when the thread that started the process ends, and other systems have nothing like it.

A process also touches a file whenever the other side answered it. The file's age says how long nothing came: `join`
starts a process again that lives but hears nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import httpx

VARIABLE = "SORDINO_LIFELINE"  # set by `Processes` for the processes that it starts
_ON = {"watching": False}
END_SECONDS = 5.0  # between SIGTERM and SIGKILL
BUSY_SECONDS = 60.0  # after a message in which the next one is expected soon
IDLE_SECONDS = 2.0  # between two looks for messages when none is expected soon
TOUCH_SECONDS = 2.0  # at most one touch in this time


def watch() -> None:
    """End this process when the one that started it is gone. Without `VARIABLE` in the environment, do nothing."""
    if os.environ.pop(VARIABLE, None) is not None:
        _ON["watching"] = True
        threading.Thread(target=_wait, args=(0,), daemon=True).start()


def _wait(descriptor: int) -> None:
    while True:
        try:
            if not os.read(descriptor, 4096):
                break
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


def start_anew() -> NoReturn:
    """Start the program of this process again, in the same process: it keeps its number and loses what it loaded."""
    if _ON["watching"]:
        os.environ[VARIABLE] = "stdin"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Pace:
    """How long to wait before the next look for work: short for a while after there was some, then longer.

    Args:
      short: seconds to wait while there is work.
      busy: seconds after the last piece of work in which the wait stays short.
    """

    def __init__(self, short: float, busy: float = BUSY_SECONDS) -> None:
        self.short, self.busy, self.last = short, busy, time.monotonic()

    def worked(self) -> None:
        """There was work just now."""
        self.last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last piece of work."""
        return time.monotonic() - self.last

    @property
    def wait(self) -> float:
        return self.short if self.idle < self.busy else max(self.short, IDLE_SECONDS)


class Pulse:
    """A file that is touched while a process works.

    Args:
      path: the file; None to do nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._next = path, 0.0

    def beat(self) -> None:
        """Touch the file. A full disk does not matter: the file exists already."""
        if self.path is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + TOUCH_SECONDS
            try:
                self.path.touch(mode=0o600)
            except OSError:
                return


def hears(pulse: Pulse, most: int, heard: Callable[[httpx.Response], None] = lambda _: None) -> None:
    """Beat whenever a request of this process succeeds, and refuse responses of more than `most` bytes unread.

    A process that calls this talks to one HTTP server alone. `heard` is called with the head of every response.
    """
    import httpx

    plain: Callable[..., httpx.Response] = httpx.Client.send

    def send(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        streamed = options.pop("stream", False)
        response = plain(client, request, stream=True, **options)
        heard(response)
        try:
            if int(response.headers.get("content-length", 0)) > most:
                raise ValueError(f"a response of {response.headers['content-length']} bytes; the limit is {most:,}")
            if not streamed:
                response.read()
        except BaseException:
            response.close()
            raise
        if response.is_success:
            pulse.beat()
        return response

    httpx.Client.send = send  # type: ignore[method-assign, assignment]
