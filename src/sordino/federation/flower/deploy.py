"""A federation over several machines: the processes of the coordinator, and the processes of a site."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.folders import proposed
from sordino.federation.handler import HANDLER
from sordino.federation.progress import count_lines, follow
from sordino.federation.site import Site
from sordino.secagg import Roster

RESTART_SECONDS = 5  # before a process of a site that ended is started again


def coordinate(
    folder: Path, *, hosts: Sequence[str] = (), bind: str = "127.0.0.1", port: int = 8000
) -> Iterator[dict[str, Any]]:
    """Start link and coordinator.

    The sites are those whose public node keys are in `nodes/`. The link has no database, so no message stays on disk;
    a restarted run continues from the coordinator's own files.

    Args:
      folder: the coordinator's folder.
      hosts: names by which sites reach the link, for its certificate.
      bind: the address on which the link listens.
      port: its port.

    Yields:
      The lines of the coordinator's progress, until the run finished or failed.

    Raises:
      SordinoError: the run is over, the port is taken, or a file is missing.
    """
    from sordino.federation.flower.commands import (
        environment,
        register_command,
        run_command,
        server_command,
        superlink_command,
        write_app,
        write_connection,
    )
    from sordino.federation.flower.keys import Tls, certificates, secret
    from sordino.federation.flower.processes import Processes, called, listening

    config = FederationConfig.read(folder / "federation.toml")
    if (folder / "run" / "certificate.json").exists():
        raise SordinoError(f"'{folder}': the run in {folder}/run is over; rename that folder to start another run.")
    if listening(port):
        raise SordinoError(f"--port: {port} is in use, perhaps by an earlier link; stop it or choose another port.")
    if proposed(folder, [1000] * len(config.sites)).secure:  # refuses a spec that cannot be run before sites connect
        Roster.read(config.path(config.roster))
    nodes = {name: folder / "nodes" / f"{name}.pub" for name in config.sites}
    if missing := [name for name, path in nodes.items() if not path.is_file()]:
        raise SordinoError(f"nodes: {folder}/nodes/{missing[0]}.pub is missing; copy the node.pub of that site to it.")
    where = folder / "tls"
    tls = Tls(where / "authority.pem", where / "link.pem", where / "link.key")
    if not tls.authority.exists():
        tls = certificates(where, hosts=hosts, days=365)
    key = folder / "link.secret"
    if not key.exists():
        secret(key)
    home, address = folder / "flower", f"127.0.0.1:{port}"
    write_connection(home, address, tls.authority)
    env = environment(home, {"SORDINO_FOLDER": str(folder.resolve()), "OMP_NUM_THREADS": "1"})
    progress = folder / "run" / "progress.jsonl"
    seen = count_lines(progress)
    with Processes(folder / "logs") as running:
        running.start("link", superlink_command(tls, key, host=bind, port=port), env)
        running.wait(lambda: listening(port), 60, "link")
        running.start("server", server_command(address, tls.authority, key), env)
        for path in nodes.values():
            called(register_command(path), env)
        called(run_command(write_app(folder / "app")), env)
        yield from follow(progress, running, config.patience + 30 * 86400, seen)


def join(path: Path, link: str, authority: Path, *, port: int = 9094) -> Iterator[dict[str, Any]]:
    """Start the SuperNode and the worker of a site, and start them again when they fail. It never ends by itself.

    Args:
      path: the site's site.toml.
      link: HOST:PORT of the coordinator's link.
      authority: the coordinator's tls/authority.pem.
      port: a free port on this machine's loopback.

    Yields:
      `{"what": "joining"}`, then the lines of the site's own log, and one line per process that is started again.

    Raises:
      SordinoError: a file is missing, the port is taken, or the limit is above the ledger's.
    """
    from sordino.federation.flower.commands import environment, supernode_command, worker_command
    from sordino.federation.flower.keys import secret
    from sordino.federation.flower.processes import Processes, listening

    if not re.fullmatch(r"[^:/\s]+:\d+", link):
        raise SordinoError(f"--link: '{link}' must be HOST:PORT.")
    if listening(port):
        raise SordinoError(f"--port: {port} is in use, perhaps by another join; choose a free port.")
    config = SiteConfig.read(path)
    place = config.folder
    if not (place / "node").exists():
        raise SordinoError(f"node: '{place / 'node'}' is missing; `sordino federate keys` creates it.")
    if not authority.is_file():
        raise SordinoError(f"--authority: '{authority}' does not exist; the coordinator has it as tls/authority.pem.")
    Site(config)  # refuses a limit above the ledger's, and stores a new one
    key = place / "node.secret"
    if not key.exists():
        secret(key)
    env = environment(place / "flower", {"SORDINO_SITE_FILE": str(path.resolve()), "OMP_NUM_THREADS": "1"})
    commands = {
        "node": supernode_command(link, authority.resolve(), (place / "node").resolve(), key.resolve(), port=port),
        "worker": worker_command(HANDLER, f"127.0.0.1:{port}", key.resolve(), (place / "worker.claim").resolve()),
    }
    events = place / "events.jsonl"
    seen = count_lines(events)
    yield {"what": "joining", "site": config.name, "link": link}
    with Processes(place / "logs") as running:
        while True:
            lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
            yield from map(json.loads, lines[seen:])
            seen = len(lines)
            for name, command in commands.items():
                if name not in running.processes or running.ended(name) is not None:
                    if name in running.processes:
                        yield {"what": "restarted", "process": name, "log": os.path.relpath(running.log(name))}
                        time.sleep(RESTART_SECONDS)
                    running.start(name, command, env)
            time.sleep(1)
