"""The server's side: `sordino.federation.coordinator.serve(transport, folder)` for each run that somebody starts.

    python -m sordino.federation.flower.server --link 127.0.0.1:8000 --authority FILE --secret FILE

takes the runs from the link and calls what is installed here; the bundle sent with a run is never unpacked, so who
reaches the control API, which has no login, can start the coordinator and not code of their own. Flower's own
`flower-superexec` works as well, by `app` below, but it runs whatever bundle it is sent.

Both read the environment, never the run's own configuration, which anyone at the control API can set:

    SORDINO_FOLDER   where the coordinator keeps its files
    SORDINO_SERVE    module:function to call instead
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.errors import SordinoError
from sordino.federation.flower import logs, named, require
from sordino.federation.flower.supernode import uploads
from sordino.federation.flower.transport import GridTransport

if TYPE_CHECKING:
    from flwr.serverapp import Grid

SERVE = "sordino.federation.coordinator:serve"

log = logging.getLogger("sordino.federation.flower.server")


def coordinate(grid: Grid) -> None:
    if not (folder := os.environ.get("SORDINO_FOLDER")):
        raise SordinoError("SORDINO_FOLDER is not set: name the coordinator's folder where this process is started.")
    named(os.environ.get("SORDINO_SERVE", SERVE), "SORDINO_SERVE")(GridTransport(grid), Path(folder))


def attend(address: str, *, secret: Path, authority: Path, stop: threading.Event, poll: float = 0.2) -> None:
    """Coordinate the link's runs, one at a time, until `stop` is set."""
    require()
    import httpx

    from sordino.federation.flower.worker import Runtime, refused

    uploads(0.1)
    with Runtime(address, secret.read_bytes(), authority.read_bytes()) as runtime:
        while not stop.is_set():
            try:
                if not runtime.acquire(server=True):
                    stop.wait(poll)
                    continue
                failed = True
                with runtime.alive(), closing(runtime.grid()) as grid:
                    try:
                        coordinate(grid)
                        failed = False
                    except Exception:
                        log.exception("The coordinator failed.")
                runtime.finish(failed)
            except httpx.HTTPStatusError as error:
                if refused(error) and not runtime.token:
                    raise SordinoError("secret: the link refused it; give both the same file.") from None
                log.error("The link refused a request (%d).", error.response.status_code)
                stop.wait(1.0)
            except httpx.TransportError as error:
                log.warning("The link at %s does not answer (%s); trying on.", address, type(error).__name__)
                stop.wait(2.0)


def __getattr__(name: str) -> Any:
    """`app`, for flower-superexec."""
    if name != "app":
        raise AttributeError(name)
    require()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: object) -> None:
        uploads(0.1)
        coordinate(grid)

    return app


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m sordino.federation.flower.server", description=attend.__doc__)
    words.add_argument("--link", required=True, metavar="HOST:PORT")
    words.add_argument("--authority", required=True, type=Path)
    words.add_argument("--secret", required=True, type=Path)
    given = words.parse_args()
    logs()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a coordinator in its work is interrupted
    with suppress(KeyboardInterrupt):
        attend(given.link, secret=given.secret, authority=given.authority, stop=threading.Event())


if __name__ == "__main__":
    main()
