"""`coordinate` and `join`: one of each per folder, and processes that are started again."""

import inspect
import sys
import time

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino import files
from sordino.errors import SordinoError, StoppedError
from sordino.federation import flower, sentences
from sordino.federation.flower import commands, deploy, keys, processes, reach, supernode
from sordino.federation.folders import init, make_site
from sordino.federation.tls import certificates
from sordino.secagg import Identity

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def study(tmp_path):
    init(tmp_path / "study", ["a", "b"], features=4, classes=["0", "1"], trust="untrusted-server")
    for name in "ab":
        (tmp_path / "study" / "nodes" / f"{name}.pub").write_text("a key")
    return tmp_path / "study"


@pytest.fixture
def place(tmp_path):
    make_site(tmp_path / "a", "a", data="data.csv", epsilon=8.0, classes=["0", "1"], label="y")
    with open(tmp_path / "a" / "site.toml", "a") as file:
        file.write(f'witness = "{tmp_path}/witness.json"\n')
    keys.ensure_node_key(tmp_path / "a" / "node")
    (tmp_path / "a" / "data.csv").write_text("x,y\n" + "1,0\n2,1\n" * 10)
    tls = certificates(tmp_path / "tls")
    tls.authority.rename(tmp_path / "authority.pem")
    return tmp_path / "a"


def test_two_coordinators_of_one_folder_are_refused(study, monkeypatch):
    monkeypatch.setattr(deploy, "LOCK_SECONDS", 0.1)
    with files.lock(study / "coordinate.lock"), pytest.raises(StoppedError, match="another `sordino federate coord"):
        next(deploy.coordinate(study))


def test_a_coordinator_without_its_authority_makes_no_other(study):
    tls = certificates(study / "tls")
    tls.authority.unlink()
    (port,) = processes.free_ports(1)
    with pytest.raises(SordinoError, match=r"restore it from a backup .*renew .*study --new-authority"):
        next(deploy.coordinate(study, port=port))
    assert not tls.authority.exists()


def test_two_joins_of_one_site_are_refused(place, monkeypatch):
    monkeypatch.setattr(deploy, "LOCK_SECONDS", 0.1)
    with files.lock(place / "join.lock"), pytest.raises(StoppedError, match="another `sordino federate join`"):
        next(deploy.join(place / "site.toml", "host:1", place.parent / "authority.pem"))


def test_a_port_that_a_killed_process_still_has_is_waited_for(monkeypatch):
    monkeypatch.setattr(deploy, "PORT_SECONDS", 5.0)
    taken = iter([True, True, False])
    monkeypatch.setattr(processes, "listening", lambda port: next(taken))
    deploy._free(8000, "by somebody")
    monkeypatch.setattr(deploy, "PORT_SECONDS", 0.1)
    monkeypatch.setattr(processes, "listening", lambda port: True)
    with pytest.raises(SordinoError, match="8000 is in use, by somebody"):
        deploy._free(8000, "by somebody")


@pytest.fixture
def quick(monkeypatch):
    """A join looks at its processes at once and again and again. Its files are checked elsewhere, in a process of their
    own."""
    monkeypatch.setattr(deploy, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(deploy, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(deploy, "_checked", lambda path, authority: path.parent.name)


@pytest.mark.parametrize("state", ["unsigned", "silent"])
def test_a_process_that_hears_nothing_or_ended_is_started_again(place, quick, monkeypatch, state):
    (port,) = processes.free_ports(1)
    for name in ("supernode_command", "worker_command"):
        monkeypatch.setattr(commands, name, lambda *_, **__: SLEEP)
    for name in ("SILENT_SECONDS", "TURN_SECONDS"):  # at the second look both were silent for long enough
        monkeypatch.setattr(deploy, name, 0.5)
    monkeypatch.setattr(reach, "reach", lambda link, authority: state)
    started = []
    plain = processes.Processes.start
    monkeypatch.setattr(
        processes.Processes, "start", lambda *words: (started.append(words[1]), plain(*words))[1], raising=True
    )
    lines = deploy.join(place / "site.toml", "host:1", place.parent / "authority.pem", port=port)
    try:
        assert next(lines)["what"] == "joining"
        began = time.monotonic()
        assert next(lines) == {"what": "link", "state": state, "link": "host:1"}
        if state != "silent":  # else the node waits for a coordinator that is not there, and that was told
            first = next(lines)  # neither of them touches its pulse
            assert (first["what"], first["process"]) == ("restarted", "node")
            assert "heard nothing" in first["why"]
            assert time.monotonic() - began >= 0.5
        second = next(lines)  # the worker comes before the link is tried again
        assert (second["what"], second["process"]) == ("restarted", "worker")
        assert started[:3] == ["node", "worker", "node"]
        third = next(lines)  # that nobody answers is told once
        assert third["what"] == ("restarted" if state == "silent" else "link")
    finally:
        lines.close()


@pytest.fixture
def joined(place, quick, monkeypatch):
    """The lines of a join whose node runs this Python code, in a link that is reached. `pulse` is the node's file."""
    (port,) = processes.free_ports(1)
    monkeypatch.setattr(commands, "worker_command", lambda *_, **__: SLEEP)
    monkeypatch.setattr(reach, "reach", lambda link, authority: "connected")
    lines = []

    def join(code):
        def command(*_, pulse, **__):
            return [sys.executable, "-c", f"pulse = {str(pulse)!r}\n{code}"]

        monkeypatch.setattr(commands, "supernode_command", command)
        lines.append(deploy.join(place / "site.toml", "host:1", place.parent / "authority.pem", port=port))
        assert next(lines[0])["what"] == "joining"
        return lines[0]

    yield join
    lines[0].close()


def test_a_site_is_connected_when_the_link_accepts_its_node(joined):
    began = time.monotonic()
    lines = joined("import time; time.sleep(0.5); open(pulse, 'w').close(); time.sleep(60)")
    assert next(lines) == {"what": "link", "state": "connected", "link": "host:1"}
    assert time.monotonic() - began >= 0.5


def test_a_site_whose_node_is_not_accepted_is_told_once_what_to_compare(joined, place):
    code = f"""
from pathlib import Path
tries = Path(pulse + ".tries")
number = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (number + 1))
if number < 2:
    raise SystemExit({supernode.NOT_ACCEPTED})
Path(pulse).touch()
import time
time.sleep(60)
"""
    lines = joined(code)
    refused = next(lines)
    assert (refused["what"], refused["state"]) == ("link", "refused")
    told = sentences.of_site(refused)
    assert "nodes/a.pub" in told
    assert f"`sordino federate doctor {place / 'site.toml'}`" in told
    assert next(lines)["state"] == "connected"  # the second refusal is not told again


def test_a_site_with_the_key_of_another_one_is_refused_before_anything_is_written(place):
    (place / "identity.key").unlink()
    Identity.make("b").save(place / "identity.key")
    with pytest.raises(SordinoError, match=r"identity.key: it is the key of b, and site.toml names a"):
        next(deploy.join(place / "site.toml", "host:1", place.parent / "authority.pem"))
    assert not (place / "ledger.db").exists()


def test_a_coordinator_tells_once_that_a_node_with_an_unknown_key_tried(tmp_path):
    from flwr.superlink.servicer.fleet import fleet_handlers

    assert deploy.UNKNOWN_KEY.decode() in inspect.getsource(fleet_handlers.activate_node)
    log = tmp_path / "link.log"
    log.write_bytes(b"exception: No SuperNode found with the given public key.\n")  # before the keys were registered
    unknown = deploy.UnknownKeys(log)
    assert list(unknown.news()) == []
    with open(log, "ab") as file:
        file.write(b"INFO\n" + deploy.UNKNOWN_KEY)
        file.flush()
        assert list(unknown.news()) == []  # the line is not whole
        file.write(b".\n")
    (line,) = unknown.news()
    assert "compare it with nodes/NAME.pub" in sentences.of_coordinator(line, None)
    assert list(unknown.news()) == []


class Runtime:
    """A link with one run for the server."""

    finished = None

    def __init__(self, *_):
        self.token = "t"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def acquire(self, server):
        return True

    def alive(self):
        return self

    def grid(self):
        return self

    def close(self):
        pass

    def finish(self, failed):
        Runtime.finished = failed


@pytest.mark.parametrize(
    ("error", "status"), [(None, 0), (SordinoError("no"), 1), (OSError(28, "No space left on device"), 74)]
)
def test_a_server_for_one_run_says_by_its_status_how_it_ended(tmp_path, monkeypatch, error, status):
    import threading

    from sordino.federation.flower import server, worker

    def coordinate(grid):
        if error:
            raise error

    monkeypatch.setattr(worker, "Runtime", Runtime)
    monkeypatch.setattr(server, "coordinate", coordinate)
    monkeypatch.setattr(server, "uploads", lambda seconds: None)
    (tmp_path / "f").write_bytes(b"")
    own = {"secret": tmp_path / "f", "authority": tmp_path / "f"}
    assert server.attend("link:1", **own, stop=threading.Event(), once=True) == status
    assert Runtime.finished is bool(status)


def test_the_server_knows_whose_node_is_whose(tmp_path, monkeypatch):
    from sordino.federation.flower import server

    monkeypatch.delenv(flower.NODES, raising=False)
    assert server.names() == {}
    monkeypatch.setenv(flower.NODES, str(tmp_path / "nodes.json"))
    assert server.names() == {}
    told = processes.Controlled({"a.pub": 17}, "")
    monkeypatch.setattr(processes, "controlled", lambda command, env: told)
    processes.register(tmp_path / "s", {"a": "a.pub"}, {}, tmp_path / "nodes.json")
    assert server.names() == {17: "a"}


def test_a_site_joins_several_coordinators_and_each_once(place, monkeypatch):
    monkeypatch.setattr(deploy, "LOCK_SECONDS", 0.1)
    assert [deploy._mark(place, link) for link in ("one:1", "two:1", "one:1", "three:1")] == ["", "-2", "", "-3"]
    with files.lock(place / "join-2.lock"):
        with pytest.raises(StoppedError, match="another `sordino federate join` to two:1; stop it first"):
            next(deploy.join(place / "site.toml", "two:1", place.parent / "authority.pem"))
        (port,) = processes.free_ports(1)
        for name in ("supernode_command", "worker_command"):
            monkeypatch.setattr(commands, name, lambda *_, **__: SLEEP)
        lines = deploy.join(place / "site.toml", "one:1", place.parent / "authority.pem", port=port)
        assert next(lines)["what"] == "joining"
        lines.close()
