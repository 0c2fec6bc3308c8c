"""A federation over several machines: the processes of the coordinator, and the processes of a site."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import files
from sordino.errors import SordinoError
from sordino.federation.flower import NODES
from sordino.federation.progress import COMMAND_LOCK, count_lines, follow, parsed, read_lines

if TYPE_CHECKING:
    from sordino.federation.flower.processes import Processes

HANDLER = "sordino.federation.handler:handle"  # by name: importing it loads the libraries for numbers
TURN_SECONDS = 1.0  # between two looks at the processes of a site
RESTART_SECONDS = 5  # before a process of a site that ended is started again
SILENT_SECONDS = 120  # without an answer of the other side, after which a process of a site is started again
REST_SECONDS = 300  # without a message, after which the worker gives back the memory of what it loaded
LOCK_SECONDS = 10.0  # to wait for an earlier command that is just ending
UNKNOWN_KEY = b"No SuperNode found with the given public key"  # in the log of Flower's link
PORT_SECONDS = 15  # to wait for a port that a killed process leaves


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
      SordinoError: the run is over, the port is taken, another process coordinates this folder, or a file is missing.
    """
    from sordino.federation import counting
    from sordino.federation.config import FederationConfig
    from sordino.federation.flower.app import write_study
    from sordino.federation.flower.commands import (
        environment,
        server_command,
        superlink_command,
        write_connection,
    )
    from sordino.federation.flower.keys import secret
    from sordino.federation.flower.processes import Processes, listening, register
    from sordino.federation.folders import proposed
    from sordino.federation.limits import request_bytes
    from sordino.federation.tls import valid
    from sordino.secagg import Roster

    config = FederationConfig.read(folder / "federation.toml")
    if (folder / "run" / "certificate.json").exists():
        raise SordinoError(f"'{folder}': the run in {folder}/run is over; rename that folder to start another run.")
    terms = proposed(folder, [1000] * len(config.sites))  # refuses a spec that cannot be run before sites connect
    if terms.secure:
        Roster.read(config.path(config.roster))
    nodes = {name: folder / "nodes" / f"{name}.pub" for name in config.sites}
    if missing := [name for name, path in nodes.items() if not path.is_file()]:
        raise SordinoError(f"nodes: {folder}/nodes/{missing[0]}.pub is missing; copy the node.pub of that site to it.")
    other = f"'{folder}' is in use by another `sordino federate coordinate`; stop it, or choose another folder."
    with files.alone(folder / COMMAND_LOCK, other, LOCK_SECONDS), Processes(folder / "logs") as running:
        _free(port, "perhaps by an earlier link; stop it or choose another port")
        tls = valid(folder / "tls", hosts)
        key = folder / "link.secret"
        if not key.exists():
            secret(key)
        home, address, listed = folder / "flower", f"127.0.0.1:{port}", folder / "nodes.json"
        write_connection(home, address, tls.authority)
        own = {"SORDINO_FOLDER": str(folder.resolve()), NODES: str(listed.resolve()), "OMP_NUM_THREADS": "1"}
        env = environment(home, own)
        progress = folder / "run" / "progress.jsonl"
        seen = count_lines(progress)
        counts = sum(counting.cells_of(config.table_schema)) if config.statistics_epsilon else 0
        link = superlink_command(tls, key, host=bind, port=port, most=request_bytes(terms, counts))
        running.start("link", link, env)
        running.wait(lambda: listening(port), 60, "link")
        running.start("server", server_command(address, tls.authority, key, once=True), env)
        write_study(folder, folder / "app")
        register(key, nodes, env, listed, folder / "app")
        unknown = UnknownKeys(running.log("link"))
        yield from follow(progress, running, config.patience + 30 * 86400, seen, unknown.news)


class UnknownKeys:
    """Tells once that a node whose key is not registered tried to connect, by what is added to the link's log."""

    def __init__(self, log: Path) -> None:
        self.log, self.told, self._read = log, False, log.stat().st_size

    def news(self) -> Iterator[dict[str, Any]]:
        if self.told:
            return
        with open(self.log, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        if UNKNOWN_KEY in whole:
            self.told = True
            yield {"what": "unknown-key"}


def _free(port: int, who: str) -> None:
    """Wait until nobody listens on the port: what a killed process left behind ends by itself.

    Raises:
      SordinoError: somebody still listens.
    """
    from sordino.federation.flower.processes import listening

    end = time.monotonic() + PORT_SECONDS
    while listening(port):
        if time.monotonic() > end:
            raise SordinoError(f"--port: {port} is in use, {who}.")
        time.sleep(0.2)


def join(path: Path, link: str, authority: Path, *, port: int = 9094) -> Iterator[dict[str, Any]]:
    """Start the SuperNode and the worker of a site, and start them again when they fail. It never ends by itself.

    A process that lives but has heard nothing for `SILENT_SECONDS` is started again too: the node hears from the link,
    the worker from the node.

    Args:
      path: the site's site.toml.
      link: HOST:PORT of the coordinator's link.
      authority: the coordinator's tls/authority.pem.
      port: a free port on this machine's loopback.

    Yields:
      `{"what": "joining"}`, then the lines of the site's own log, one line per process that is started again, and
      `{"what": "link"}` with what `reach` says. It says "connected" only when the link accepted the key of the node,
      and "refused" when it did not.

    Raises:
      SordinoError: a file is missing, the port is taken, another process joins this site, or the limit is above the
        ledger's.
    """
    from sordino.federation.flower.commands import environment, supernode_command, worker_command
    from sordino.federation.flower.keys import secret
    from sordino.federation.flower.processes import Processes
    from sordino.federation.flower.reach import Reach
    from sordino.federation.flower.supernode import NOT_ACCEPTED

    if not re.fullmatch(r"[^:/\s]+:\d+", link):
        raise SordinoError(f"--link: '{link}' must be HOST:PORT.")
    if not path.is_file():
        raise SordinoError(f"{path.name}: '{path}' does not exist; `sordino federate keys` writes one.")
    place = path.resolve().parent
    if not (place / "node").exists():
        raise SordinoError(f"node: '{place / 'node'}' is missing; `sordino federate keys` creates it.")
    if not authority.is_file():
        raise SordinoError(f"--authority: '{authority}' does not exist; the coordinator has it as tls/authority.pem.")
    other = f"'{place}' is in use by another `sordino federate join` to {link}; stop it first."
    mark = _mark(place, link)
    with files.alone(place / f"join{mark}.lock", other, LOCK_SECONDS), Processes(place / f"logs{mark}") as running:
        _free(port, "perhaps by another join; choose a free port")
        site = _checked(path, authority)
        key = place / "node.secret"
        if not key.exists():
            secret(key)
        env = environment(place / f"flower{mark}", {"SORDINO_SITE_FILE": str(path.resolve()), "OMP_NUM_THREADS": "1"})
        connection = (link, authority.resolve(), (place / "node").resolve(), key.resolve())
        pulses = {name: running.logs / f"{name}.pulse" for name in ("node", "worker")}
        claim = (place / f"worker{mark}.claim").resolve()
        own: dict[str, Any] = {"clock": running.logs / "link.clock"}
        commands = {
            "node": supernode_command(*connection, port=port, pulse=pulses["node"], **own),
            "worker": worker_command(
                HANDLER, f"127.0.0.1:{port}", key.resolve(), claim, pulse=pulses["worker"], rest=REST_SECONDS, **own
            ),
        }
        heard = {name: Silence(path) for name, path in pulses.items()}
        events = place / "events.jsonl"
        seen = count_lines(events)
        reached = Reach(link, authority)
        told, connected = "", False
        yield {"what": "joining", "site": site, "link": link}
        while True:
            lines = read_lines(events)
            yield from parsed(lines[seen:])
            seen = len(lines)
            started = False
            for name, command in commands.items():
                if why := _needs_start(running, name, heard[name]):
                    if name in running.processes:
                        refused = running.ended(name) == NOT_ACCEPTED
                        running.end(name)
                        if refused and told != "refused":
                            told = "refused"
                            yield {"what": "link", "state": told, "link": link, "site": site, "file": str(path)}
                        elif not refused and not (name == "node" and told == "silent"):  # it waits for a coordinator
                            yield {
                                "what": "restarted",
                                "process": name,
                                "why": why,
                                "log": os.path.relpath(running.log(name)),
                            }
                        time.sleep(RESTART_SECONDS)
                    heard[name].begin()
                    running.start(name, command, env)
                    started |= name == "node"
            connected &= not started
            if (state := reached.news(started)) and state != "connected" and (state, told) != ("silent", "silent"):
                told = state
                yield {"what": "link", "state": state, "link": link}
            if not connected and heard["node"].answered:
                told, connected = "connected", True
                yield {"what": "link", "state": told, "link": link}
            time.sleep(TURN_SECONDS)


def _mark(place: Path, link: str) -> str:
    """What distinguishes the files of this link from those of other coordinators: nothing for the first link that the
    site joined, then -2, -3 …"""
    path = place / "links.json"
    with files.lock(place / "links.lock"):
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if link not in known:
            known.append(link)
            files.write(path, json.dumps(known).encode())
    number = known.index(link) + 1
    return "" if number == 1 else f"-{number}"


def _checked(path: Path, authority: Path) -> str:
    """The name of the site, whose files are checked, and whose limit is stored if it is new.

    A short process does it: this one then waits for months, without the libraries that the check needs.

    Raises:
      SordinoError: site.toml or the ledger is wrong, or the authority has ended.
    """
    command = [sys.executable, "-P", "-m", "sordino.federation.flower.admission", str(path), str(authority)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SordinoError(done.stderr.strip()[-2000:] or f"{path}: the check of the site failed.")
    return done.stdout.strip().splitlines()[-1]


class Silence:
    """How long a file was not touched, by a clock that nobody sets.

    Args:
      path: a file of `lifeline.Pulse`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        """Count from now."""
        self._last, self._since = self._touched(), time.monotonic()
        self._first = self._last

    @property
    def answered(self) -> bool:
        """Whether the file was touched since `begin`."""
        return self._touched() != self._first

    def _touched(self) -> int:
        return self.path.stat().st_mtime_ns if self.path.exists() else 0

    @property
    def seconds(self) -> float:
        if (touched := self._touched()) != self._last:
            self._last, self._since = touched, time.monotonic()
        return time.monotonic() - self._since


def _needs_start(running: Processes, name: str, heard: Silence) -> str:
    """Why a process of a site must be started; an empty text if it works."""
    if name not in running.processes:
        return "new"
    if (status := running.ended(name)) is not None:
        from sordino.federation.flower.supernode import DEAF

        over = "its connection to the link ended, as it does when the coordinator is done or stops"
        return over if name == "node" and status == DEAF else f"it ended with status {status}"
    return f"it heard nothing for {heard.seconds:.0f} s" if heard.seconds > SILENT_SECONDS else ""
