"""Processes that end with the one that started them, or when they hear nothing more."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from sordino.federation.flower import commands, keys, lifeline, processes, supernode
from sordino.federation.tls import certificates

pytestmark = [
    pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower]'"),
    pytest.mark.filterwarnings("ignore:.*Click 9.0:DeprecationWarning"),  # of what flwr imports
]

STARTER = """
import json, os, sys, time
from pathlib import Path
from sordino.federation.flower.processes import Processes

with Processes(Path(sys.argv[1])) as running:
    print(running.start("child", json.loads(sys.argv[2]), os.environ).pid, flush=True)
    time.sleep(600)
"""
CHILD = """
import time
from sordino.federation.flower.lifeline import watch
watch()
print("up", flush=True)
time.sleep(600)
"""


def lives(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{number}/stat").read_text().split()[2] if Path("/proc/self").exists() else True


def wait(ready, seconds):
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.05)
    return ready()


def orphan(tmp_path, command, up):
    """Kill the process that started a command; return the number of the command's process."""
    import json

    words = [sys.executable, "-c", STARTER, str(tmp_path), json.dumps(command)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        number = int(starter.stdout.readline())
        log = tmp_path / "child.log"
        assert wait(lambda: log.exists() and up in log.read_text(), 60), log.read_text()
        assert lives(number)
        starter.send_signal(signal.SIGKILL)
    return number


def test_a_process_ends_when_its_starter_is_killed(tmp_path):
    number = orphan(tmp_path, [sys.executable, "-c", CHILD], "up")
    assert wait(lambda: not lives(number), 20)


def test_a_process_that_nobody_holds_by_a_pipe_goes_on():
    words = [sys.executable, "-c", CHILD]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(0.3)
        assert child.poll() is None
        child.kill()


@pytest.mark.soak  # real processes: each takes seconds to start
def test_the_processes_of_a_federation_end_when_their_starter_is_killed(tmp_path):
    tls, secret = certificates(tmp_path / "tls"), keys.secret(tmp_path / "secret")
    keys.node_key(tmp_path / "node")
    link, node = processes.free_ports(2)
    started = {
        "uvicorn running": commands.superlink_command(tls, secret, port=link),
        "does not answer": commands.server_command(f"127.0.0.1:{link}", tls.authority, secret),
        "Starting Flower SuperNode": commands.supernode_command(
            f"127.0.0.1:{link}", tls.authority, tmp_path / "node", secret, port=node
        ),
        "SuperNode at": commands.worker_command("os:getpid", f"127.0.0.1:{node}", secret, tmp_path / "claim"),
    }
    for k, (up, command) in enumerate(started.items()):
        (tmp_path / str(k)).mkdir()
        number = orphan(tmp_path / str(k), command, "Uvicorn running" if k == 0 else up)
        assert wait(lambda number=number: not lives(number), 12), command
    assert not processes.listening(link)


LOOP = """
import sys, threading, time, types
import httpx

def activate(status):
    with httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status))) as client:
        client.post("https://link/v1/fleet/activate-node")

cli = types.ModuleType("flwr.supernode.cli")

def flower_supernode():
    threading.Thread(target=time.sleep, args=(600,)).start()  # as Flower's, which serves the worker
    {what}

cli.flower_supernode = flower_supernode
sys.modules["flwr.supernode.cli"] = cli
from sordino.federation.flower import supernode
supernode.idle = supernode.uploads = supernode.keep_time = lambda *_: None
supernode.main()
"""


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("return", supernode.DEAF),
        ("raise OSError('ssl')", supernode.DEAF),
        ("sys.exit(1)", 1),
        ("activate(412); sys.exit(1)", supernode.NOT_ACCEPTED),
        ("activate(412); activate(200); sys.exit(1)", 1),
        ("threading.Thread(target=int, args=('x',)).start(); time.sleep(60)", supernode.DEAF),  # the heartbeat fails
    ],
)
def test_a_node_ends_with_its_loop_though_it_still_serves_its_worker(what, status):
    done = subprocess.run([sys.executable, "-c", LOOP.format(what=what)], timeout=30, check=False, capture_output=True)
    assert done.returncode == status, done.stderr


def test_a_pulse_tells_when_the_other_side_last_answered(tmp_path, monkeypatch):
    import httpx

    answers = iter([200, 503, 200])
    monkeypatch.setattr(httpx.Client, "send", httpx.Client.send)  # put back afterwards
    pulse = lifeline.Pulse(tmp_path / "pulse")
    lifeline.hears(pulse, 100)
    monkeypatch.setattr(lifeline, "TOUCH_SECONDS", 0.0)

    def answer(request):
        return httpx.Response(next(answers), content=b"x" * (101 if request.url.path == "/long" else 100))

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert client.get("http://link/").content == b"x" * 100
        assert pulse.path.exists()
        os.utime(pulse.path, (0, 0))
        client.get("http://link/")
        assert pulse.path.stat().st_mtime == 0
        with pytest.raises(ValueError, match="the limit is 100"):
            client.get("http://link/long")
        assert pulse.path.stat().st_mtime == 0


def test_looks_for_work_become_rare_when_there_is_none():
    pace = lifeline.Pace(0.1, busy=60.0)
    assert pace.wait == 0.1
    pace.last -= 61
    assert pace.wait == lifeline.IDLE_SECONDS
    pace.worked()
    assert pace.wait == 0.1


ANEW = """
import os, sys
from pathlib import Path
from sordino.federation.flower import lifeline

path = Path(sys.argv[1])
path.write_text(path.read_text() + f"{os.getpid()} {os.environ.get(lifeline.VARIABLE)}\\n")
lifeline.watch()
if path.read_text().count("\\n") == 1:
    lifeline.start_anew()
"""


def test_a_process_that_starts_anew_keeps_its_number_and_its_lifeline(tmp_path):
    path = tmp_path / "starts"
    path.touch()
    env = {**os.environ, lifeline.VARIABLE: "stdin"}
    words = [sys.executable, "-c", ANEW, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=env) as process:
        assert process.wait(30) == 0
    assert path.read_text() == f"{process.pid} stdin\n" * 2


def test_a_worker_rests_after_messages_and_not_before(tmp_path, monkeypatch):
    from sordino.federation.flower import worker

    class Runtime:
        def __init__(self, *_):
            self.token = ""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    found = iter([False, False, True, False])
    monkeypatch.setattr(worker, "Runtime", Runtime)
    monkeypatch.setattr(worker, "uploads", lambda seconds: None)
    monkeypatch.setattr(worker, "_one", lambda *_: next(found))
    worker.serve(bytes, "node:1", poll=0.001, rest=0.0)
    assert list(found) == []  # it went on until there was a message, and then returned


def test_the_processes_of_a_site_that_waits_load_no_library_for_numbers():
    parts = ("deploy", "supernode", "worker", "superlink", "control", "clock")
    code = "import sys\n" + "".join(f"import sordino.federation.flower.{part}\n" for part in parts)
    code += "from sordino.federation.transports import deployment\ndeployment()\n"
    code += "assert not {'torch', 'scipy', 'sklearn'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Forwarder:
    """A way to the link that can be broken: what flows back is then no TLS."""

    def __init__(self, port):
        self.server, self.port, self.broken = socket.create_server(("127.0.0.1", 0)), port, False
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.server.accept()
            far = socket.create_connection(("127.0.0.1", self.port))
            for one, other, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self.pump, args=(one, other, back), daemon=True).start()

    def pump(self, one, other, back):
        try:
            while data := one.recv(65536):
                other.sendall(b"x" * len(data) if back and self.broken else data)
        except OSError:
            pass
        finally:
            one.close()
            other.close()


@pytest.mark.soak  # real processes
def test_a_node_ends_at_a_broken_tls_connection(tmp_path):
    with processes.LocalFederation(tmp_path / "federation", ["a"]) as federation:
        federation.end("node-a")
        way = Forwarder(int(federation.address.rpartition(":")[2]))
        federation.log("node-a").unlink()
        federation.address = way.address
        federation.start_node("a")
        federation.wait_node("a")
        way.broken = True
        assert wait(lambda: federation.ended("node-a") is not None, 60)
        assert federation.ended("node-a") == supernode.DEAF
