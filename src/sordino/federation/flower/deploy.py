"""A federation over several machines: what the coordinator starts, and what a site starts."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.federation.config import Federation, SiteConfig
from sordino.federation.folder import count_lines, follow, proposed
from sordino.federation.handler import HANDLER
from sordino.federation.site import Site
from sordino.secagg import Roster


def coordinate(
    folder: Path, *, hosts: Sequence[str] = (), bind: str = "127.0.0.1", port: int = 8000
) -> Iterator[dict[str, Any]]:
    """Link and coordinator, until the run is over; progress as it comes.

    Sites are those whose public node keys lie in `nodes/`. The link keeps no database: its letters are not left on
    disk, and the run goes on from the coordinator's own files when this is started again.
    """
    from sordino.federation.flower.keys import Tls, certificates, secret
    from sordino.federation.flower.processes import (
        Processes,
        called,
        environment,
        listening,
        register_command,
        run_command,
        server_command,
        superlink_command,
        write_app,
        write_connection,
    )

    config = Federation.read(folder / "federation.toml")
    if (folder / "run" / "certificate.json").exists():
        raise SordinoError(
            f"'{folder}': this run is over, see {folder}/run; for another give that folder another name."
        )
    if listening(port):
        raise SordinoError(f"--port: something listens on {port} already, perhaps a link left over; stop it first.")
    if proposed(folder, [1000] * len(config.sites)).secure:  # what cannot be run is told before anybody is waited for
        Roster.read(config.path(config.roster))
    nodes = {name: folder / "nodes" / f"{name}.pub" for name in config.sites}
    if missing := [name for name, path in nodes.items() if not path.is_file()]:
        raise SordinoError(f"nodes: {folder}/nodes/{missing[0]}.pub is not there; it is that site's node.pub.")
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


def join(path: Path, link: str, authority: Path, *, port: int = 9094) -> None:
    """SuperNode and worker of a site, until stopped; started again when they fail."""
    from sordino.federation.flower.keys import secret
    from sordino.federation.flower.processes import Processes, environment, listening, supernode_command, worker_command

    if not re.fullmatch(r"[^:/\s]+:\d+", link):
        raise SordinoError(f"--link: '{link}' must be HOST:PORT.")
    if listening(port):
        raise SordinoError(f"--port: something listens on {port} already, perhaps another join; name a free one.")
    config = SiteConfig.read(path)
    place = config.folder
    if not (place / "node").exists():
        raise SordinoError(f"node: '{place / 'node'}' is not there; `sordino federate keys` makes it.")
    if not authority.is_file():
        raise SordinoError(f"--authority: there is no file '{authority}'; the coordinator has it as tls/authority.pem.")
    Site(config)  # a limit laxer than the ledger's is told here, and a new one written down
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
    print(f"{config.name}: joining {link}; stop with Ctrl-C", flush=True)
    with Processes(place / "logs") as running:
        while True:
            lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
            for line in lines[seen:]:
                told = {key: value for key, value in json.loads(line).items() if key != "time"}
                print(
                    f"{config.name}: {told.pop('what')} " + ", ".join(f"{k} {v}" for k, v in told.items()), flush=True
                )
            seen = len(lines)
            for name, command in commands.items():
                if name not in running.processes or running.processes[name].poll() is not None:
                    if name in running.processes:
                        log = os.path.relpath(running.log(name))
                        print(f"{name}: the link is gone, or it failed ({log}); trying again", flush=True)
                        time.sleep(5)
                    running.start(name, command, env)
            time.sleep(1)
