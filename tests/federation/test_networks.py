"""Four network namespaces as four hosts: a slow link that drops packets, and a partition in the middle of a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

import sordino
from sordino.cli import main
from sordino.federation.terms import against_terms
from sordino.operations.status import of_coordinator, of_site
from sordino.training.verify_run import verify_run

SORDINO = [sys.executable, "-m", "sordino.cli"]
SLOW = "tbf rate 3mbit burst 16kb limit 24kb"  # a queue of 24 kB: delays, and drops when it is full
CUT = 8.0  # seconds


def ip(*words, check=True):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


def works():
    """Whether this machine lets us make namespaces, with queues on their links."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        return False
    name = f"sordino{uuid.uuid4().hex[:6]}"
    made = ip("netns", "add", name, check=False).returncode == 0
    queue = made and ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *SLOW.split(), check=False)
    if made:
        ip("netns", "del", name)
    return bool(queue) and queue.returncode == 0


pytestmark = [
    pytest.mark.soak,  # real processes, and a cut that must be waited for
    pytest.mark.skipif(not works(), reason="needs root, ip and tc with network namespaces"),
]


class Hosts:
    """One namespace per party. Each site has a link of its own to the coordinator, which it knows by name."""

    def __init__(self, sites):
        self.tag, self.sites = uuid.uuid4().hex[:5], sites
        self.running = []

    def name(self, party):
        return f"{party}-{self.tag}"

    def build(self):
        ip("netns", "add", self.name("hub"))
        for k, site in enumerate(self.sites):
            here, there, place = f"h{k}{self.tag}", f"s{k}{self.tag}", self.name(site)
            ip("netns", "add", place)
            ip("link", "add", here, "netns", self.name("hub"), "type", "veth", "peer", "name", there, "netns", place)
            for space, device, last in ((self.name("hub"), here, 1), (place, there, 2)):
                ip("-n", space, "address", "add", f"10.77.{k}.{last}/24", "dev", device)
                ip("-n", space, "link", "set", device, "up")
                ip("-n", space, "link", "set", "lo", "up")
                ip("netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *SLOW.split())
            hosts = Path("/etc/netns") / place / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.77.{k}.1 coordinator\n")

    def remove(self):
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=90)
        for party in ("hub", *self.sites):
            ip("netns", "del", self.name(party), check=False)
            shutil.rmtree(Path("/etc/netns") / self.name(party), ignore_errors=True)

    def start(self, party, *words):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(sordino.__file__).parents[1]),
        }
        command = ["ip", "netns", "exec", self.name(party), *SORDINO, *words]
        pipe = subprocess.DEVNULL
        self.running.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe))
        return self.running[-1]

    def link(self, site, state):
        k = self.sites.index(site)
        ip("-n", self.name(site), "link", "set", f"s{k}{self.tag}", state)


@contextmanager
def hosts(sites):
    made = Hosts(sites)
    with ExitStack() as stack:
        stack.callback(made.remove)
        made.build()
        yield made


def wait(ready, seconds, *processes):
    end = time.monotonic() + seconds
    while not ready():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "operate.md"
TUTORIAL_SITES = ("north", "south", "west")


def blocks(page):
    """The commands of a page, in their order."""
    return re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def clean_up():
    for site in TUTORIAL_SITES:
        ip("netns", "del", site, check=False)
        shutil.rmtree(Path("/etc/netns") / site, ignore_errors=True)


def test_the_operator_s_tutorial_runs_as_it_is_written(tmp_path):
    if any(site in ip("netns", "list").stdout.split() for site in TUTORIAL_SITES):
        pytest.skip("this machine has namespaces of these names")
    commands = blocks(PAGE)
    assert len(commands) >= 9
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
    here = {"PATH": beside, "PYTHONPATH": str(Path(sordino.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **here, "XDG_STATE_HOME": str(tmp_path / "state"), "NO_COLOR": "1"}
    place = tmp_path / "empty"
    place.mkdir()
    script = "set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "\n".join(commands)
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=560,
            check=False,
        )
    finally:
        clean_up()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("holds: the numbers agree") == 3
    assert "holds, but 1 thing was not compared: the numbers agree" in done.stdout  # a copy has no ledger
    assert (of_coordinator(place / "study").state, of_coordinator(place / "study").done) == ("finished", 8)
    for site in TUTORIAL_SITES:
        assert of_site(place / site / "folder").epsilon <= 4
    names = ip("netns", "list").stdout.split()
    assert not any(site in names for site in TUTORIAL_SITES), "the page removes what it made"


def test_a_run_goes_on_after_a_partition(tmp_path):
    out, rounds = tmp_path / "trial", 12
    words = ["federate", "up", "--sites", "3", "--prepare", "--out", str(out)]
    more = ["--set", f"rounds={rounds}", "--set", "epsilon=8", "--dropouts", "0"]
    assert main([*words, *more]) == 0
    study, sites = out / "coordinator", ["site1", "site2", "site3"]
    with hosts(sites) as network:
        coordinate = ("federate", "coordinate", str(study), "--host", "coordinator", "--bind", "0.0.0.0")
        coordinator = network.start("hub", *coordinate)
        wait(lambda: (study / "nodes.json").exists(), 120, coordinator)
        for site in sites:
            link = ("--link", "coordinator:8000", "--authority", str(study / "tls" / "authority.pem"))
            network.start(site, "federate", "join", str(out / "sites" / site / "site.toml"), *link)
        wait(lambda: of_coordinator(study).done >= 3, 240, *network.running)
        network.link("site2", "down")
        time.sleep(CUT)
        network.link("site2", "up")
        wait(lambda: coordinator.poll() is not None, 420)
    status = of_coordinator(study)
    assert (coordinator.returncode, status.state, status.done) == (0, "finished", rounds)
    assert status.lost <= 3  # of the rounds that the cut may have hit, none is repeated
    for site in sites:
        (certificate,) = (out / "sites" / site / "runs").glob("*/certificate.json")
        assert json.loads(certificate.read_text())["certified"]
        assert verify_run(certificate, against_terms=against_terms).problems == []
        assert of_site(out / "sites" / site).answered >= rounds - status.lost
