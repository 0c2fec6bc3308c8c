"""Keys, certificates and command lines of a Flower federation, and one whole federation on this machine.

Each function stands alone, for a federation of several machines; `Federation` puts them together on loopback.

- One port serves three interfaces. Of these `/v1/control` has no login at all: who reaches it can register a site or
  start a run (and, with `flower-superexec`, any code). It is bound to loopback here. Sites elsewhere must come through
  a proxy which passes `/v1/fleet/` and nothing else; TLS for the sites then ends there, by the proxy's certificate.
- `/v1/runtime` gives the server's task only to who knows the secret file; so does each SuperNode its letters.
- The link keeps its state in memory unless a database is named: a database file holds bytes of letters even after the
  run, so name one only on an encrypted disk. A link that restarts without one has forgotten its sites: register again.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from sordino.errors import SordinoError
from sordino.federation.flower import require
from sordino.federation.flower.keys import LOOPBACK, Tls, certificates, node_key, secret

NAME = "sordino"  # of the connection in Flower's configuration

PYPROJECT = """\
[project]
name = "sordino-shell"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "sordino"

[tool.flwr.app.components]
serverapp = "shell.server:app"
clientapp = "shell.client:app"

[tool.flwr.app.config]
"""
CLIENT = """\
from flwr.clientapp import ClientApp

app = ClientApp()  # answers nothing: sites run sordino.federation.flower.worker
"""


# ------------------------------------------------------------------------------------------------------------ files


def write_connection(home: Path, address: str, authority: Path) -> None:
    """Tell the `flwr` command where the link is."""
    home.mkdir(parents=True, exist_ok=True)
    text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{address}"\n'
    (home / "config.toml").write_text(text + f'root-certificates = "{authority.resolve()}"\n')


def write_app(folder: Path) -> Path:
    """The shell that `flwr run` wants: it starts the installed server app, and holds no code for sites."""
    (folder / "shell").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "shell" / "__init__.py").write_text("")
    (folder / "shell" / "server.py").write_text("from sordino.federation.flower import server\n\napp = server.app\n")
    (folder / "shell" / "client.py").write_text(CLIENT)
    return folder


# --------------------------------------------------------------------------------------------------------- commands


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of every Flower process: its own home, no telemetry, no question after updates."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": path}
    return {**os.environ, **own, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", **(more or {})}


def superlink_command(
    tls: Tls, secret: Path, *, host: str = LOOPBACK, port: int = 8000, database: Path | None = None
) -> list[str]:
    words = ["flower-superlink", "--host", host, "--port", str(port), "--ssl-ca-certfile", str(tls.authority)]
    words += ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    words += ["--disable-runtime-dependency-installation"]
    return words + (["--database", str(database)] if database else [])


def superexec_command(address: str, authority: Path, secret: Path) -> list[str]:
    """Flower's own starter of apps: it runs, as its user, whatever bundle comes through the control API."""
    words = ["flower-superexec", "--runtime-api-address", address, "--root-certificates", str(authority)]
    return [*words, "--superexec-auth-secret-file", str(secret)]


def server_command(address: str, authority: Path, secret: Path) -> list[str]:
    """Instead of the executor, and safer: it runs the installed coordinator for whatever run somebody starts."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "sordino.federation.flower.server",
        "--link",
        address,
        "--authority",
        str(authority),
    ]
    return [*words, "--secret", str(secret)]


def supernode_command(
    address: str, authority: Path, key: Path, secret: Path, *, port: int = 9094, idle: float | None = 0.2
) -> list[str]:
    """idle: seconds it sleeps when there is no work; None for Flower's own `flower-supernode`, which sleeps 3."""
    words = ["flower-supernode"]
    if idle is not None:  # by path, with no module of ours beside it on the path: it starts without importing sordino
        words = [sys.executable, "-P", str(Path(__file__).with_name("supernode.py")), "--idle", str(idle)]
    words += ["--superlink", address, "--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    return [*words, "--host", LOOPBACK, "--port", str(port)]


def worker_command(handler: str, runtime: str, secret: Path, claim: Path) -> list[str]:
    words = [sys.executable, "-P", "-m", "sordino.federation.flower.worker", "--runtime", runtime, "--handler", handler]
    return [*words, "--secret", str(secret), "--claim", str(claim)]


def register_command(public: Path) -> list[str]:
    return ["flwr", "supernode", "register", str(public), NAME]


def run_command(app: Path) -> list[str]:
    return ["flwr", "run", str(app), NAME]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; another process may be faster."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def called(command: list[str], env: Mapping[str, str], seconds: float = 180.0) -> str:
    """What a short command printed."""
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise SordinoError(f"{' '.join(command[:3])} did not end in {seconds:g} s; see the link's log.") from None
    if done.returncode:
        raise SordinoError(f"{' '.join(command[:3])} failed: {done.stdout.strip()[-1000:]}")
    return done.stdout


# ------------------------------------------------------------------------------------------------- on this machine


class Processes:
    """Named processes which end together, sites first; a context manager. Each has its log `<name>.log` in `folder`.

    SIGTERM counts as Ctrl-C meanwhile: a service that is stopped leaves none of them behind.
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
        """A process in a group of its own, which Ctrl-C here does not reach before `stop`."""
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self.processes[name]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def wait(self, ready: Callable[[], bool], seconds: float, *needed: str) -> None:
        """Until `ready`; an error if a needed process ends first or time is over."""
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
        """End everything: sites first, so that the link strikes them off its list, then the server and the link."""
        last = ("server", "link")
        for names in ([name for name in self.processes if name not in last], *([name] for name in last)):
            end_processes([self.processes[name] for name in names if name in self.processes], seconds)
        self.processes.clear()


class Federation(Processes):
    """A link, its executor and `sites` SuperNodes on loopback, over TLS and with keys; a context manager.

        with Federation(folder, ["a", "b"], handler="package.module:handle") as federation:
            federation.run()

    folder: new; keys, logs (`logs/<process>.log`) and Flower's homes go there.
    handler: "module:function" for a worker at each site; None where workers are started by somebody else.
    server, site: variables for the environment of the server's process and of the workers.
    executor: Flower's `flower-superexec` in place of our own `server`.
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
    ) -> None:
        super().__init__(folder / "logs")
        self.folder, self.sites, self.handler = folder.resolve(), list(sites), handler
        self.server, self.site, self.database, self.idle = dict(server or {}), dict(site or {}), database, idle
        self.executor = executor
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
        self.start("link", superlink_command(self.tls, self.secret, port=port, database=self.database), self.env)
        self.wait(lambda: listening(port), 60, "link")
        own = {"SORDINO_FOLDER": str(self.folder / "coordinator"), **self.server}
        command = superexec_command if self.executor else server_command
        executor = command(self.address, self.tls.authority, self.secret)
        self.start("server", executor, environment(self.folder / "home", own))
        for name in self.sites:
            secret(keys / f"{name}.secret")
        with ThreadPoolExecutor(4) as pool:  # the command takes seconds to start
            list(pool.map(lambda name: called(register_command(node_key(keys / name)), self.env), self.sites))
        for name in self.sites:
            self.start_node(name)
            if self.handler:
                self.start_worker(name)
        for name in self.sites:
            self.wait_node(name)

    def start_node(self, name: str) -> subprocess.Popen[bytes]:
        keys = self.folder / "keys"
        words = (self.address, self.tls.authority, keys / name, keys / f"{name}.secret")
        command = supernode_command(*words, port=self.ports[name], idle=self.idle)
        return self.start(f"node-{name}", command, environment(self.folder / f"home-{name}"))

    def start_worker(self, name: str) -> subprocess.Popen[bytes]:
        keys, runtime = self.folder / "keys", f"{LOOPBACK}:{self.ports[name]}"
        command = worker_command(self.handler or "", runtime, keys / f"{name}.secret", self.folder / f"{name}.claim")
        more = {"SORDINO_SITE": name, **self.site}
        return self.start(f"worker-{name}", command, environment(self.folder / f"home-{name}", more))

    def wait_node(self, name: str, seconds: float = 60.0) -> None:
        """Until the site is connected."""
        log, needed = self.log(f"node-{name}"), [f"node-{name}"] + [f"worker-{name}"] * bool(self.handler)
        self.wait(lambda: "SuperNode ID:" in log.read_text(), seconds, *needed)
        self.nodes[name] = int(re.findall(r"SuperNode ID: (\d+)", log.read_text())[-1])

    def run(self) -> str:
        """Start the server's app; the number of the run."""
        app = self.folder / "app"
        said = called(run_command(app if app.exists() else write_app(app)), self.env)
        if not (found := re.search(r"run (\d+)", said)):
            raise SordinoError(f"flwr run did not name its run: {said.strip()[-500:]}")
        return found[1]


def listening(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((LOOPBACK, port)) == 0


def end_processes(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Ask, wait, then kill; each with the group it leads."""
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
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
