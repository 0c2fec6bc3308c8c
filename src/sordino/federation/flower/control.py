"""Commands of `flwr` at a link whose control interface has a login (`superlink.py`), several in one process.

    python -m sordino.federation.flower.control --login FILE --register a.pub --register b.pub --run APP

It prints one JSON object: the numbers of the registered nodes, by file, and the number of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sordino.federation.flower.commands import CONNECTION
from sordino.federation.flower.superlink import CONTROL, HEADER, login


def with_login(token: str) -> None:
    """Send the header with every request of this process to a control interface."""
    import httpx

    plain: Callable[..., httpx.Response] = httpx.Client.send

    def send(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        if request.url.path.startswith(CONTROL):
            request.headers[HEADER] = token
        return plain(client, request, **options)

    httpx.Client.send = send  # type: ignore[method-assign, assignment]


def flwr(*words: str) -> str:
    """Run one command of `flwr` and return what it printed."""
    from flwr.cli.app import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            app(list(words), standalone_mode=False)
        except SystemExit as request:
            if request.code:
                raise
    return printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sordino.federation.flower.control", description=__doc__)
    parser.add_argument("--login", type=Path, required=True)
    parser.add_argument("--register", type=Path, action="append", default=[], metavar="KEY.pub")
    parser.add_argument("--run", type=Path, metavar="APP")
    arguments = parser.parse_args()
    with_login(login(arguments.login.read_bytes()))
    nodes, run = {}, None
    for path in arguments.register:
        printed = flwr("supernode", "register", str(path), CONNECTION)
        if (match := re.search(r"SuperNode (\d+)", printed)) is None:
            sys.exit(f"flwr supernode register did not print the number of the node: {printed.strip()[-500:]}")
        nodes[str(path)] = match[1]
    if arguments.run is not None:
        printed = flwr("run", str(arguments.run), CONNECTION)
        if (match := re.search(r"run (\d+)", printed)) is None:
            sys.exit(f"flwr run did not print the number of its run: {printed.strip()[-500:]}")
        run = match[1]
    print(json.dumps({"nodes": nodes, "run": run}))


if __name__ == "__main__":
    main()
