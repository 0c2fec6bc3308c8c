"""The server's side: it calls `sordino.federation.coordinator.serve(transport, folder)` for each run that is started.

    python -m sordino.federation.flower.server --link 127.0.0.1:8000 --authority FILE --secret FILE

takes the runs from the link and calls the installed code. It never unpacks the bundle of a run, so whoever reaches the
control API, which has no login, can start the coordinator but no other code. Flower's own `flower-superexec` works as
well, by `app` below, but it runs any bundle that it is sent.

Both read the environment, never the run's configuration, which anyone at the control API can set:

    SORDINO_FOLDER   where the coordinator keeps its files
    SORDINO_NODES    a JSON file: the number of every site's node at the link
    SORDINO_SERVE    module:function to call instead
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.errors import SordinoError
from sordino.federation.flower import NODES, logs, named, require
from sordino.federation.flower.lifeline import watch
from sordino.federation.flower.supernode import uploads
from sordino.federation.flower.transport import GridTransport
from sordino.federation.progress import NOT_WRITTEN

if TYPE_CHECKING:
    from flwr.serverapp import Grid

SERVE = "sordino.federation.coordinator:serve"

log = logging.getLogger("sordino.federation.flower.server")


def coordinate(grid: Grid) -> None:
    if not (folder := os.environ.get("SORDINO_FOLDER")):
        raise SordinoError(
            "SORDINO_FOLDER is not set; set it to the coordinator's folder in this process's environment."
        )
    named(os.environ.get("SORDINO_SERVE", SERVE), "SORDINO_SERVE")(GridTransport(grid, names()), Path(folder))


def names() -> dict[int, str]:
    """Whose node has which number, as whoever registered the nodes wrote it down; empty if nobody did."""
    path = os.environ.get(NODES)
    if not path or not Path(path).exists():
        return {}
    return {int(number): str(name) for name, number in json.loads(Path(path).read_text(encoding="utf-8")).items()}


def attend(
    address: str,
    *,
    secret: Path,
    authority: Path,
    stop: threading.Event,
    poll: float = 0.2,
    once: bool = False,
) -> int:
    """Coordinate the link's runs, one at a time, until `stop` is set, or only the first one.

    Returns:
      0; with `once`, 1 if the run failed, and `NOT_WRITTEN` if a file could not be written.
    """
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
                status = 1
                with runtime.alive(), closing(runtime.grid()) as grid:
                    try:
                        coordinate(grid)
                        status = 0
                    except OSError:
                        status = NOT_WRITTEN
                        log.exception("The coordinator failed.")
                    except Exception:
                        log.exception("The coordinator failed.")
                runtime.finish(bool(status))
                if once:
                    return status
            except httpx.HTTPStatusError as error:
                if refused(error) and not runtime.token:
                    raise SordinoError("secret: the link refused it; give both the same file.") from None
                log.error("The link refused a request (%d).", error.response.status_code)
                stop.wait(1.0)
            except httpx.TransportError as error:
                log.warning("The link at %s does not answer (%s); trying again.", address, type(error).__name__)
                stop.wait(2.0)
    return 0


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
    parser = argparse.ArgumentParser(prog="python -m sordino.federation.flower.server", description=attend.__doc__)
    parser.add_argument("--link", required=True, metavar="HOST:PORT")
    parser.add_argument("--authority", required=True, type=Path)
    parser.add_argument("--secret", required=True, type=Path)
    parser.add_argument("--once", action="store_true", help="end after one run; the status says whether it failed")
    arguments = parser.parse_args()
    logs()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # interrupts a running coordinator
    watch()
    files = {"secret": arguments.secret, "authority": arguments.authority}
    with suppress(KeyboardInterrupt):
        sys.exit(attend(arguments.link, **files, stop=threading.Event(), once=arguments.once))


if __name__ == "__main__":
    main()
