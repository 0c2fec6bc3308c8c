"""The files of deploy/: their commands exist, and a federation runs through the proxy that they describe."""

import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sordino.cli import COMMANDS, _parser, main

DEPLOY = Path(__file__).parents[1] / "deploy"
SORDINO = [sys.executable, "-m", "sordino.cli"]
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def parsed(words):
    return _parser(COMMANDS).parse_args(words)


def test_the_commands_of_the_services_are_commands():
    for unit in (DEPLOY / "systemd").iterdir():
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        program, *words = shlex.split(line)
        assert program.endswith("/bin/sordino")
        assert parsed(words).status_port
        assert "ReadWritePaths=/var/lib/sordino\n" in unit.read_text()
        assert "NoNewPrivileges=true\n" in unit.read_text()


def test_the_commands_of_the_containers_are_commands_and_each_site_has_its_own_folder():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"coordinator", "site1", "site2", "site3"}
    assert parsed(services["coordinator"]["command"]).host == ["coordinator"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        if name != "coordinator":
            found = parsed(service["command"])
            assert (found.site, found.link) == ("/data/sites/me/site.toml", "coordinator:8000")
            assert service["volumes"][0] == f"./trial/sites/{name}:/data/sites/me"
            assert service["volumes"][-1].endswith("tls:/tls:ro")  # sites see no other file of the coordinator


def test_prepare_writes_what_the_containers_mount(tmp_path, capsys):
    out = tmp_path / "trial"
    assert main(["federate", "up", "--sites", "3", "--prepare", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == ["site1", "site2", "site3"]
    for name in ("site1", "site2", "site3"):
        assert (out / "sites" / name / "site.toml").is_file()
        assert (out / "coordinator" / "nodes" / f"{name}.pub").is_file()
    assert not (out / "coordinator" / "run").exists()


@pytest.mark.soak  # real processes
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_a_federation_through_the_proxy(tmp_path):
    processes = pytest.importorskip("sordino.federation.flower.processes")
    out = tmp_path / "trial"
    assert main(["federate", "up", "--sites", "3", "--prepare", "--out", str(out), "--set", "rounds=6"]) == 0
    study, (port, outer, *ports) = out / "coordinator", processes.free_ports(5)
    running, env = [], {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*words):
        running.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return running[-1]

    try:
        coordinator = start(*SORDINO, "federate", "coordinate", str(study), "--port", str(port))
        authority = study / "tls" / "authority.pem"
        wait(lambda: (study / "nodes.json").exists(), coordinator)
        start(NGINX, "-p", str(tmp_path), "-c", str(proxy(tmp_path, study, port, outer)))
        trusted = ssl.create_default_context(cafile=authority)
        for path in ("/v1/runtime/", "/v1/control/", "/"):
            with pytest.raises(urllib.error.HTTPError) as error:
                wait_for(f"https://localhost:{outer}{path}", trusted)
            assert error.value.code == 403
            error.value.close()
        for place, own in zip(sorted((out / "sites").iterdir()), ports, strict=True):
            link = ("--link", f"localhost:{outer}", "--authority", str(authority), "--port", str(own))
            start(*SORDINO, "federate", "join", str(place / "site.toml"), *link)
        wait(lambda: coordinator.poll() is not None, seconds=240)
        assert coordinator.returncode == 0, coordinator.stdout.read().decode()
    finally:
        for each in reversed(running):
            each.send_signal(signal.SIGTERM)
            each.communicate(timeout=60)
    certificates = list(out.glob("sites/*/runs/*/certificate.json"))
    assert len(certificates) == 3
    assert all(json.loads(path.read_text())["certified"] for path in certificates)


def proxy(folder, study, port, outer):
    """deploy/nginx.conf with this machine's folder and ports, in a configuration that needs no root."""
    server = (DEPLOY / "nginx.conf").read_text()
    changes = {
        "/srv/study": str(study),
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "listen 443": f"listen 127.0.0.1:{outer}",
    }
    for old, new in {**changes, "coordinator.example.org;": "localhost;"}.items():
        assert old in server
        server = server.replace(old, new)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {places}\n{server}\n}}\n"
    )
    return path


def wait(ready, process=None, seconds=120):
    end = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, process.stdout.read().decode()
        assert time.monotonic() < end
        time.sleep(0.2)


def wait_for(url, trusted):
    """Ask until somebody listens; other answers are the caller's."""
    end = time.monotonic() + 30
    while True:
        try:
            return urllib.request.urlopen(url, context=trusted, timeout=10).read()
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)
