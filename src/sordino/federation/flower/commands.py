"""Files and command lines of a Flower federation. Each function stands alone, for several machines or one.

- One port serves three interfaces. `/v1/control` has no login in Flower: whoever reaches it can register a site or
  start a run (and, with `flower-superexec`, run any code). Our `superlink` asks for a header that only `control` sends,
  which reads the secret file. The port is bound to loopback here. Sites on other machines come through a proxy that
  passes `/v1/fleet/` and nothing else; TLS for the sites then ends at the proxy, with its certificate.
- `/v1/runtime` gives the server's task only to a process that knows the secret file. Each SuperNode does the same with
  its messages.
- The link keeps its state in memory unless a database is named. A database file holds bytes of messages even after the
  run, so name one only on an encrypted disk. A link that restarts without one has lost its list of sites: register them
  again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from sordino.federation.tls import LOOPBACK, Tls

CONNECTION = "sordino"  # of the connection in Flower's configuration
MOST_BYTES = 2**30  # of a request to the link, where no terms say less

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
from sordino.federation.flower.app import client_app

app = client_app()  # where sites run sordino.federation.flower.worker, it is never loaded
"""


# ------------------------------------------------------------------------------------------------------------ files


def write_connection(home: Path, address: str, authority: Path) -> None:
    """Write the address of the link for the `flwr` command."""
    home.mkdir(parents=True, exist_ok=True)
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n'
    (home / "config.toml").write_text(text + f'root-certificates = "{authority.resolve()}"\n')


def write_app(folder: Path) -> Path:
    """Write the app that `flwr run` needs, without a study: both halves call the installed package."""
    (folder / "shell").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "shell" / "__init__.py").write_text("")
    (folder / "shell" / "server.py").write_text("from sordino.federation.flower import server\n\napp = server.app\n")
    (folder / "shell" / "client.py").write_text(CLIENT)
    return folder


# --------------------------------------------------------------------------------------------------------- commands


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of every Flower process: its own home, no telemetry, no update check."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    settings = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": path}
    settings |= {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", "PYTHONUNBUFFERED": "1"}  # logs grow line by line
    return {**os.environ, **settings, **(more or {})}


def superlink_command(
    tls: Tls,
    secret: Path,
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    database: Path | None = None,
    most: int = MOST_BYTES,
) -> list[str]:
    """most: bytes of the largest request that the link reads."""
    command = [*_module("superlink"), "--login", str(secret), "--most", str(most)]
    command += ["--host", host, "--port", str(port), "--ssl-ca-certfile", str(tls.authority)]
    command += ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    command += ["--disable-runtime-dependency-installation"]
    return command + (["--database", str(database)] if database else [])


def _module(name: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"sordino.federation.flower.{name}"]


def superexec_command(address: str, authority: Path, secret: Path) -> list[str]:
    """Flower's own executor. It runs, as its user, any bundle that comes through the control API."""
    command = ["flower-superexec", "--runtime-api-address", address, "--root-certificates", str(authority)]
    return [*command, "--superexec-auth-secret-file", str(secret)]


def server_command(address: str, authority: Path, secret: Path, *, once: bool = False) -> list[str]:
    """Our replacement for the executor: it runs the installed coordinator, whatever bundle a run comes with.

    once: the process ends with its first run, and its exit status tells whether the run failed.
    """
    command = [*_module("server"), "--link", address, "--authority", str(authority), "--secret", str(secret)]
    return command + ["--once"] * once


def supernode_command(
    address: str,
    authority: Path,
    key: Path,
    secret: Path,
    *,
    port: int = 9094,
    idle: float | None = 0.2,
    pulse: Path | None = None,
    clock: Path | None = None,
) -> list[str]:
    """Command of a site's node.

    idle: seconds it sleeps when there is no work; None for Flower's own `flower-supernode`, which sleeps 3.
    pulse: a file that it touches whenever the link answers.
    clock: a file into which it writes the link's time, for the worker.
    """
    command = ["flower-supernode"]
    if idle is not None:
        command = [*_module("supernode"), "--idle", str(idle), *(["--pulse", str(pulse)] if pulse else [])]
        command += ["--clock", str(clock)] if clock else []
    command += ["--superlink", address, "--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    return [*command, "--host", LOOPBACK, "--port", str(port)]


def worker_command(
    handler: str,
    runtime: str,
    secret: Path,
    claim: Path,
    *,
    pulse: Path | None = None,
    clock: Path | None = None,
    rest: float | None = None,
) -> list[str]:
    """Command of a site's worker.

    pulse: a file that it touches whenever the node answers.
    clock: the file that the node writes the link's time into.
    rest: seconds without a message after which it starts itself anew, without what it has loaded.
    """
    command = [*_module("worker"), "--runtime", runtime, "--handler", handler]
    command += ["--secret", str(secret), "--claim", str(claim)]
    command += ["--pulse", str(pulse)] if pulse else []
    command += ["--clock", str(clock)] if clock else []
    return command + (["--rest", str(rest)] if rest else [])


def control_command(secret: Path, *, register: Iterable[Path] = (), run: Path | None = None) -> list[str]:
    """Register nodes by their public keys, and start a run of an app, at the link of the connection `CONNECTION`."""
    command = [*_module("control"), "--login", str(secret)]
    for path in register:
        command += ["--register", str(path)]
    return command + (["--run", str(run)] if run else [])
