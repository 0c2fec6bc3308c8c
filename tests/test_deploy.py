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
from sordino.version import __version__

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


HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
CHART = DEPLOY / "helm" / "sordino"
OF_SITE = {
    "link.address": "coordinator:443",
    "link.authoritySecret": "authority",
    "folder.secret": "north",
    "data.existingClaim": "records",
    "proxy.https": "http://proxy:3128",
}
OF_COORDINATOR = {
    "role": "coordinator",
    "coordinator.host": "coordinator.example.org",
    "folder.secret": "study",
    "ingress.enabled": "true",
    "ingress.tlsSecret": "study-tls",
}


def helm(*words, values):
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return subprocess.run([HELM, *words, str(CHART), *sets], capture_output=True, text=True, check=False)


def rendered(values):
    yaml = pytest.importorskip("yaml")
    done = helm("template", "north", values=values)
    assert done.returncode == 0, done.stderr
    return {part["kind"]: part for part in yaml.safe_load_all(done.stdout) if part}


def test_the_chart_has_the_package_s_version_and_its_values_are_read():
    yaml = pytest.importorskip("yaml")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [key for key in values if f".Values.{key}" not in texts] == []


@pytest.mark.skipif(HELM is None, reason="needs helm")
def test_the_chart_is_linted_and_refuses_missing_values():
    for values in (OF_SITE, OF_COORDINATOR):
        assert helm("lint", "--strict", values=values).returncode == 0
    for values, why in (
        ({}, "link.address"),
        ({"role": "coordinator"}, "coordinator.host"),
        (OF_SITE | {"role": "other"}, "must be site or coordinator"),
    ):
        done = helm("template", "north", values=values)
        assert done.returncode != 0
        assert why in done.stderr


@pytest.mark.skipif(HELM is None, reason="needs helm")
def test_a_site_of_the_chart_joins_with_folder_and_witness_apart():
    pod = rendered(OF_SITE)["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = parsed(container["args"])
    assert (found.site, found.link, found.authority) == (
        "/data/site.toml",
        "coordinator:443",
        "/authority/authority.pem",
    )
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
    }
    assert claims == {"folder": "north-site", "witness": "north-site-witness", "records": "records"}
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["XDG_STATE_HOME"] == "/witness"
    assert environment["HTTPS_PROXY"] == "http://proxy:3128"


@pytest.mark.skipif(HELM is None, reason="needs helm")
def test_a_coordinator_of_the_chart_is_a_job_behind_one_path():
    parts = rendered(OF_COORDINATOR)
    (container,) = parts["Job"]["spec"]["template"]["spec"]["containers"]
    found = parsed(container["args"])
    assert (found.folder, found.host, found.port) == ("/data", ["coordinator.example.org"], 8000)
    (rule,) = parts["Ingress"]["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1/fleet/"]
    assert parts["Ingress"]["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"] == "0"
    assert parts["PersistentVolumeClaim"]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


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
