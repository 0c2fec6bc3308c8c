"""A Flower deployment as it comes: its own executables, of whatever version is installed beside this Python."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent


def free_ports(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Deployment:
    """A SuperLink and one SuperNode per entry of `nodes`, which are texts for --node-config; a context manager."""

    def __init__(self, folder, nodes, **env):
        self.folder, self.nodes, self.running = folder, list(nodes), []
        folder.mkdir(parents=True)
        self.env = {**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        self.env |= {"HOME": str(folder / "user"), **env}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self):
        told = subprocess.run([BIN / "flower-superlink", "--help"], env=self.env, capture_output=True, text=True).stdout
        link = [BIN / "flower-superlink", "--insecure"]
        if "--port " in told:  # one port serves all interfaces
            (port,) = free_ports(1)
            self.fleet = self.control = port
            link += ["--host", "127.0.0.1", "--port", str(port)]
        else:
            app, self.fleet, self.control = free_ports(3)
            control = "--control-api-address" if "--control-api-address" in told else "--exec-api-address"
            addresses = {"--serverappio-api-address": app, "--fleet-api-address": self.fleet, control: self.control}
            link += [word for key, port in addresses.items() for word in (key, f"127.0.0.1:{port}")]
        self.start("link", link)
        self.wait(lambda: listening(self.fleet) and listening(self.control), 90)
        told = subprocess.run([BIN / "flower-supernode", "--help"], env=self.env, capture_output=True, text=True).stdout
        for k, (port, config) in enumerate(zip(free_ports(len(self.nodes)), self.nodes, strict=True)):
            own = ["--host", "127.0.0.1", "--port", str(port)]
            own = own if "--port " in told else ["--clientappio-api-address", f"127.0.0.1:{port}"]
            words = [BIN / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.fleet}", *own]
            self.start(f"node{k}", [*words, "--node-config", config])

    def start(self, name, command):
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command], env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.running.append(process)

    def wait(self, ready, seconds):
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, self.logs()
            assert all(process.poll() is None for process in self.running), self.logs()
            time.sleep(0.2)

    def logs(self):
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def flwr_run(self, app, config=""):
        """`flwr run`, where this version of Flower looks for the address: in its home, or in the app."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        at = f'address = "127.0.0.1:{self.control}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{at}')
        text = (app / "pyproject.toml").read_text()
        if "[tool.flwr.federations" not in text:
            from importlib.metadata import version

            if int(version("flwr").split(".")[1]) < 26:
                text += f'\n[tool.flwr.federations]\ndefault = "here"\n\n[tool.flwr.federations.here]\n{at}'
                (app / "pyproject.toml").write_text(text)
        command = [BIN / "flwr", "run", str(app), *(["--run-config", config] if config else [])]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout
