"""Processes of a Flower federation: named processes with logs, and a whole federation on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from sordino import files
from sordino.errors import SordinoError
from sordino.federation.flower import NODES, require
from sordino.federation.flower.commands import (
    MOST_BYTES,
    control_command,
    environment,
    server_command,
    superexec_command,
    superlink_command,
    supernode_command,
    worker_command,
    write_app,
    write_connection,
)
from sordino.federation.flower.keys import node_key, secret
from sordino.federation.flower.lifeline import VARIABLE
from sordino.federation.tls import LOOPBACK, certificates

CONNECT_SECONDS = 60.0  # until every site must be connected


class Processes:
    """Named processes that end together, sites first; a context manager. Each has a log `<name>.log` in `folder`.

    SIGTERM counts as Ctrl-C meanwhile, so a service that is stopped leaves no process behind. If this process is
    killed, the others notice it by themselves (`lifeline`).
    """

    def __init__(self, folder: Path) -> None:
        require()
        self.logs = folder.resolve()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _start(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process in its own group, so that Ctrl-C here does not reach it before `stop`."""
        if name in self.processes:
            _hang_up(self.processes[name])
        env = {**env, VARIABLE: "stdin"}
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        return self.processes[name]

    def end(self, name: str, seconds: float = 10.0) -> None:
        """End one process with its group."""
        end_processes([self.processes[name]], seconds)

    def ended(self, name: str) -> int | None:
        """The exit status of a process that ended, or None."""
        return self.processes[name].poll()

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def wait(self, ready: Callable[[], bool], seconds: float, *needed: str) -> None:
        """Wait until `ready`.

        Raises:
          SordinoError: a needed process ended first, or the time is over.
        """
        end = time.monotonic() + seconds
        while not ready():
            for name in needed:
                if (code := self.processes[name].poll()) is not None:
                    tail = self.log(name).read_text()[-1500:]
                    raise SordinoError(f"{name} ended with status {code}; its log ends: {tail}")
            if time.monotonic() > end:
                raise SordinoError(f"{' or '.join(needed)} took more than {seconds:g} s; see {self.logs}.")
            time.sleep(0.1)

    def stop(self, seconds: float = 10.0) -> None:
        """End all processes: the sites first, so that the link removes them from its list, then server and link."""
        last = ("server", "link")
        for names in ([name for name in self.processes if name not in last], *([name] for name in last)):
            end_processes([self.processes[name] for name in names if name in self.processes], seconds)
        self.processes.clear()


class LocalFederation(Processes):
    """A link, its executor and one SuperNode per site on loopback, over TLS and with keys; a context manager.

        with LocalFederation(folder, ["a", "b"], handler="package.module:handle") as federation:
            federation.run()

    folder: new; keys, logs (`logs/<process>.log`) and Flower's homes go there.
    handler: "module:function" for a worker at each site; None if workers are started elsewhere.
    server, site: environment variables of the server's process and of the workers.
    executor: Flower's `flower-superexec` in place of our own `server`.
    once: our own `server` ends with its first run.
    most: bytes of the largest request that the link reads.
    """

    def __init__(
        self,
        folder: Path,
        sites: Iterable[str],
        *,
        handler: str | None = None,
        server: Mapping[str, str] | None = None,
        site: Mapping[str, str] | None = None,
        database: Path | None = None,
        idle: float | None = 0.2,
        executor: bool = False,
        once: bool = False,
        most: int = MOST_BYTES,
    ) -> None:
        super().__init__(folder / "logs")
        self.folder, self.sites, self.handler = folder.resolve(), list(sites), handler
        self.server, self.site, self.database, self.idle = dict(server or {}), dict(site or {}), database, idle
        self.executor, self.once, self.most = executor, once, most
        self.nodes: dict[str, int] = {}  # site -> number at the link
        port, *ports = free_ports(1 + len(self.sites))
        self.address = f"{LOOPBACK}:{port}"
        self.ports = dict(zip(self.sites, ports, strict=True))

    def _start(self) -> None:
        for part in ("keys", "logs", "home", "coordinator"):
            (self.folder / part).mkdir(parents=True)
        keys = self.folder / "keys"
        self.tls = certificates(keys / "tls")
        self.secret = secret(keys / "link.secret")
        self.env = environment(self.folder / "home")
        write_connection(self.folder / "home", self.address, self.tls.authority)
        port = int(self.address.rpartition(":")[2])
        self.start("link", self._link(port), self.env)
        self.wait(lambda: listening(port), 60, "link")
        settings = {"SORDINO_FOLDER": str(self.folder / "coordinator"), NODES: str(keys / "nodes.json"), **self.server}
        link = (self.address, self.tls.authority, self.secret)
        command = superexec_command(*link) if self.executor else server_command(*link, once=self.once)
        self.start("server", command, environment(self.folder / "home", settings))
        for name in self.sites:
            secret(keys / f"{name}.secret")
            node_key(keys / name)
        self.register()
        for name in self.sites:
            self.start_node(name)
            if self.handler:
                self.start_worker(name)
        for name in self.sites:
            self.wait_node(name)

    def _link(self, port: int) -> list[str]:
        return superlink_command(self.tls, self.secret, port=port, database=self.database, most=self.most)

    def register(self) -> None:
        """Register the keys of all sites at the link. A link that was started again has forgotten them."""
        keys = self.folder / "keys"
        register(self.secret, {name: keys / f"{name}.pub" for name in self.sites}, self.env, keys / "nodes.json")

    def start_node(self, name: str) -> subprocess.Popen[bytes]:
        keys = self.folder / "keys"
        connection = (self.address, self.tls.authority, keys / name, keys / f"{name}.secret")
        command = supernode_command(*connection, port=self.ports[name], idle=self.idle)
        return self.start(f"node-{name}", command, environment(self.folder / f"home-{name}"))

    def start_worker(self, name: str) -> subprocess.Popen[bytes]:
        keys, runtime = self.folder / "keys", f"{LOOPBACK}:{self.ports[name]}"
        command = worker_command(self.handler or "", runtime, keys / f"{name}.secret", self.folder / f"{name}.claim")
        more = {"SORDINO_SITE": name, **self.site}
        return self.start(f"worker-{name}", command, environment(self.folder / f"home-{name}", more))

    def wait_node(self, name: str) -> None:
        """Wait until the site is connected."""
        log, needed = self.log(f"node-{name}"), [f"node-{name}"] + [f"worker-{name}"] * bool(self.handler)
        self.wait(lambda: "SuperNode ID:" in log.read_text(), CONNECT_SECONDS, *needed)
        self.nodes[name] = int(re.findall(r"SuperNode ID: (\d+)", log.read_text())[-1])

    def run(self) -> str:
        """Start the server's app.

        Returns:
          The run's number at the link.
        """
        app = self.folder / "app"
        command = control_command(self.secret, run=app if app.exists() else write_app(app))
        return controlled(command, self.env).run


def register(
    secret: Path, publics: Mapping[str, Path], env: Mapping[str, str], listed: Path, run: Path | None = None
) -> str:
    """Register sites by their public keys, write down whose node is whose, and start a run.

    Args:
      secret: the link's secret file.
      publics: files of public keys, by site.
      env: environment of the command.
      listed: a file for the sites' numbers at the link, which the server reads.
      run: the app to run; None for none.

    Returns:
      The run's number at the link.
    """
    answer = controlled(control_command(secret, register=publics.values()), env) if publics else Controlled({}, "")
    files.write(listed, json.dumps({name: answer.nodes[str(path)] for name, path in publics.items()}).encode())
    return "" if run is None else controlled(control_command(secret, run=run), env).run


class Controlled(NamedTuple):
    """What the control interface answered."""

    nodes: dict[str, int]  # by the file of the public key
    run: str


def controlled(command: list[str], env: Mapping[str, str]) -> Controlled:
    """Run a `control_command`."""
    told = json.loads(called(command, env).strip().splitlines()[-1])
    return Controlled({path: int(number) for path, number in told["nodes"].items()}, str(told["run"]))


def listening(port: int) -> bool:
    """Whether a process on this machine listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def end_processes(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM, wait, then kill; each process with its group."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    while any(group_lives(process.pid) for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        _hang_up(process)
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the lifeline of a process."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. Another process may take one before it is used."""
    servers = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def called(command: list[str], env: Mapping[str, str], seconds: float = 180.0) -> str:
    """Run a short command.

    Returns:
      What it printed.

    Raises:
      SordinoError: it failed, or took more than `seconds`.
    """
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise SordinoError(f"{' '.join(command[:3])} did not end in {seconds:g} s; see the link's log.") from None
    if done.returncode:
        raise SordinoError(f"{' '.join(command[:3])} failed: {done.stdout.strip()[-1000:]}")
    return done.stdout
