"""A whole federation on loopback: real processes, TLS, keys. One test, since it takes half a minute to start."""

import os
import pickle
import re
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import unknown_sites
from trainings import FEW, Trainings

from sordino.errors import SordinoError
from sordino.federation.flower import commands, processes, worker

pytestmark = [
    pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower]'"),
    pytest.mark.filterwarnings("ignore:.*Click 9.0:DeprecationWarning"),  # of what flwr imports
]

HERE = Path(__file__).parent
MARK = "import pathlib\n\npathlib.Path({!r}).write_text('ran')\n"


def variables(**more):
    """Environment variables of a process that imports what lies beside this file and one folder above."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


class Bench:
    """The federation under test, and a way to ask its server."""

    def __init__(self, federation, marks, trainings):
        self.federation, self.marks, self.trainings, self.number = federation, marks, trainings, 0
        self.folder = federation.folder / "coordinator"
        self.begun = federation.folder / "begun"

    def ask(self, requests, seconds=45.0, enough=0):
        """Ask for an exchange; `told` has its outcome."""
        self.number += 1
        nodes = self.federation.nodes
        question = ({nodes[name]: request for name, request in requests.items()}, seconds, enough)
        (self.folder / "ask").write_bytes(pickle.dumps(question))
        (self.folder / "ask").rename(self.folder / f"{self.number}.ask")

    def told(self):
        file = self.folder / f"{self.number}.told"
        self.federation.wait(file.exists, 60, "link", "server")
        replies, failures, sites = pickle.loads(file.read_bytes())
        names = {node: name for name, node in self.federation.nodes.items()}
        return {names[n]: v for n, v in replies.items()}, {names[n]: v for n, v in failures.items()}, sites

    def exchange(self, requests, seconds=45.0, enough=0):
        self.ask(requests, seconds, enough)
        return self.told()[:2]

    def wait_begun(self, name):
        self.federation.wait((self.begun / name).exists, 45, "link")
        (self.begun / name).unlink()


@pytest.fixture
def bench(tmp_path):
    folder = tmp_path / "federation"
    marks = [tmp_path / "client-ran", tmp_path / "server-ran"]
    begun = folder / "begun"
    app = commands.write_app(folder / "app")  # a bundle with code of a stranger's, for both sides
    for mark, part in zip(marks, ("client", "server"), strict=True):
        with open(app / "shell" / f"{part}.py", "a") as file:
            file.write(MARK.format(str(mark)))
    begun.mkdir()
    trainings = Trainings(tmp_path / "trainings", FEW, tuple("abc"), rounds=2)
    server = variables(SORDINO_SERVE="parts:serve", COORDINATORS=str(trainings.folder), OMP_NUM_THREADS="1")
    site = {**trainings.site, **variables(BEGUN=str(begun))}
    own = {"handler": "parts:handle", "server": server, "site": site, "most": 8 * 2**20}
    with processes.LocalFederation(folder, "abc", **own) as federation:
        federation.run()
        yield Bench(federation, marks, trainings)


def the_models_are_the_simulators(bench):
    """Without masks and with them; `make soak` trains more methods (../test_processes.py)."""
    bench.trainings.compare(bench.federation)


def echoes(bench):
    requests = {"a": b"", "b": os.urandom(5_000_000), "c": bytes(range(256))}
    replies, failures = bench.exchange(requests)
    assert replies == {name: request[::-1] for name, request in requests.items()}
    assert failures == {}
    same = dict.fromkeys("abc", b"the same for all")
    assert bench.exchange(same)[0] == bench.exchange(same)[0] == dict.fromkeys("abc", b"the same for all"[::-1])


def an_exception_stays_at_the_site(bench):
    replies, failures = bench.exchange({"a": b"raise Xenia", "b": b"ab"})
    assert replies == {"b": b"ba"}
    assert failures == {"a": "error 2"}
    assert "patient Xenia" in bench.federation.log("worker-a").read_text()
    for name in ("link", "server", "node-a"):
        assert "Xenia" not in bench.federation.log(name).read_text()  # no number: logs are full of digits


def late_replies_are_dropped(bench):
    replies, failures = bench.exchange({"a": b"sleep 3", "b": b"ab", "c": b"cd"}, enough=2)
    assert replies == {"b": b"ba", "c": b"dc"}
    assert failures == {"a": "late"}
    bench.wait_begun("a")
    replies, failures = bench.exchange({"a": b"new", "b": b"ab"})
    assert replies == {"a": b"wen", "b": b"ba"}
    assert failures == {}


def a_killed_worker_costs_its_own_reply(bench):
    federation = bench.federation
    bench.ask({"a": b"sleep 600", "b": b"sleep 1", "c": b"cd"}, seconds=8)
    bench.wait_begun("a")
    os.kill(federation.processes["worker-a"].pid, signal.SIGKILL)
    federation.processes["worker-a"].wait()
    assert (federation.folder / "a.claim").stat().st_mode & 0o777 == 0o600
    federation.start_worker("a")
    replies, failures, _ = bench.told()
    assert replies == {"b": b"1 peels", "c": b"dc"}
    assert failures in ({"a": "late"}, {"a": "error 2"})  # whichever comes first: the deadline, or the next worker
    replies, _ = bench.exchange({"a": b"again", "b": b"ab"})
    assert replies == {"a": b"niaga", "b": b"ba"}


def a_restarted_supernode_is_found_again(bench):
    federation = bench.federation
    processes.end_processes([federation.processes["node-c"]], 10)
    federation.log("node-c").unlink()
    before = federation.nodes["c"]
    federation.start_node("c")
    federation.wait_node("c")
    assert federation.nodes["c"] == before  # the key keeps its number
    assert bench.exchange({"c": b"cd"}) == ({"c": b"dc"}, {})


def unknown_sites_are_refused(bench):
    federation = bench.federation
    found = unknown_sites.try_all(federation, "a")
    assert found == dict.fromkeys(("unknown-key", "wrong-certificate", "no-key", "plain-http"), "refused")
    bench.ask({"a": b"ab"})
    replies, _, sites = bench.told()
    assert replies == {"a": b"ba"}
    assert sites == sorted(federation.nodes.values())


def tasks_need_the_secret(bench):
    import httpx

    federation, keys = bench.federation, bench.federation.folder / "keys"
    authority = federation.tls.authority.read_bytes()
    node = f"127.0.0.1:{federation.ports['a']}"
    for address, trusted in ((federation.address, authority), (node, None)):
        for known in (None, b"guess"):
            runtime = worker.Runtime(address, known, trusted)
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                runtime.acquire(server=trusted is not None)
            runtime.client.close()
    with pytest.raises(SordinoError, match="secret"):
        worker.serve(bytes, node, secret=keys / "b.secret", stop=threading.Event())


def strangers_control_nothing(bench):
    import ssl

    import httpx

    trusted = ssl.create_default_context(cafile=bench.federation.tls.authority)
    with httpx.Client(verify=trusted, base_url=f"https://{bench.federation.address}") as stranger:
        for name in ("start-run", "stop-run", "list-runs", "register-node", "list-nodes"):
            assert stranger.post(f"/v1/control/{name}", content=b"").status_code == 401, name
        assert stranger.get("/openapi.json").status_code == 404
    assert bench.exchange({"a": b"ab"}) == ({"a": b"ba"}, {})


def a_reply_that_is_too_long_stops_at_the_link(bench):
    federation, before = bench.federation, memory(bench.federation.processes["link"].pid)
    replies, failures = bench.exchange({"a": b"long %d" % (24 * 2**20), "b": b"ab"}, enough=1)
    assert replies == {"b": b"ba"}
    assert failures == {"a": "late"}
    federation.wait(lambda: "413" in federation.log("node-a").read_text(), 30, "node-a")
    assert memory(federation.processes["link"].pid) < before + 16 * 2**20
    assert bench.exchange({"a": b"ab"}) == ({"a": b"ba"}, {})


def memory(number):
    """Bytes that a process held at most; 0 where the system does not tell."""
    path = Path(f"/proc/{number}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return int(found[1]) * 1024 if found else 0


def no_code_of_the_bundle_ran(bench):
    assert "get-fab" in bench.federation.log("link").read_text()
    assert not any(mark.exists() for mark in bench.marks)


def nothing_is_left(bench):
    federation = bench.federation
    groups = [process.pid for process in federation.processes.values()]
    assert len(groups) == 8
    assert all(map(processes.group_lives, groups))
    federation.stop()
    assert not any(map(processes.group_lives, groups))
    assert not any(map(processes.listening, federation.ports.values()))


WORKS = (
    the_models_are_the_simulators,
    echoes,
    an_exception_stays_at_the_site,
    unknown_sites_are_refused,
    tasks_need_the_secret,
    strangers_control_nothing,
    a_reply_that_is_too_long_stops_at_the_link,
)
FAULTS = (late_replies_are_dropped, a_killed_worker_costs_its_own_reply, a_restarted_supernode_is_found_again)


@pytest.mark.parametrize("several", [WORKS, pytest.param(FAULTS, marks=pytest.mark.soak)], ids=["works", "faults"])
def test_a_federation(bench, several):
    for check in (*several, no_code_of_the_bundle_ran, nothing_is_left):
        began = time.perf_counter()
        try:
            check(bench)
        finally:
            print(f"{check.__name__}: {time.perf_counter() - began:.1f} s")


def test_an_interrupt_leaves_nothing(tmp_path):
    groups = []

    def interrupted():
        with processes.LocalFederation(tmp_path / "new", [], server=variables()) as federation:
            groups.extend(process.pid for process in federation.processes.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(groups) == 2
    assert not any(map(processes.group_lives, groups))


def test_a_failed_start_leaves_nothing(tmp_path):
    federation = processes.LocalFederation(tmp_path / "new", ["a"])
    federation.tls = None
    started = []
    plain = federation.start
    federation.start = lambda name, command, env=None: started.append(plain(name, ["sleep", "60"], env)) or started[-1]
    federation.wait = lambda *_: (_ for _ in ()).throw(SordinoError("link took too long"))
    with pytest.raises(SordinoError, match="too long"), federation:
        pass
    assert started
    assert not processes.group_lives(started[0].pid)
