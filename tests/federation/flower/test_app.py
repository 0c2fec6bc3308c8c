"""A study as a standard Flower app: the same coordinator and sites, by Flower's public interface alone."""

import ast
import logging
import os
import socket
import stat
import struct
import threading
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower-app]")

import torch
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict

from sordino import wire
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation import door, flower, handler
from sordino.federation.flower import app as apps
from sordino.federation.flower.reply import FAILED
from sordino.training.artifacts import load_model

FLOWER = Path(flower.__file__).parent
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
HELLO = wire.encode("hello", {})


class Grid:
    """What a ServerApp sees of Flower; every node runs the ClientApp."""

    def __init__(self, client, configs):
        self.client, self.configs, self.replies, self.pulled = client, configs, {}, []

    def get_node_ids(self):
        return list(self.configs)

    def push_messages(self, messages):
        names = []
        for message in messages:
            names.append(f"m{len(self.replies)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            node = message.metadata.dst_node_id
            self.replies[names[-1]] = self.client(message, context(self.configs[node]))
        return names

    def pull_messages(self, names):
        self.pulled.append(len(list(names)))
        return [self.replies[name] for name in names]


def context(own, **config):
    return Context(run_id=9, node_id=2, node_config=own, state=RecordDict(), run_config=config)


@pytest.fixture(autouse=True)
def logging_as_before():
    """An app sets up the log of its process, which would be that of all later tests."""
    root, own = logging.getLogger(), logging.getLogger("sordino")
    handlers, level = list(root.handlers), own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)


@pytest.fixture(autouse=True)
def a_task(monkeypatch):
    """Later versions of Flower write into a message which task made it."""
    for name in ("SORDINO_SITES", "SORDINO_SITE_FILE", "SORDINO_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("sordino.federation.flower.transport.LINK_POLL", 0.01)


def request(value, kind="query", ttl=60.0):
    about = {"run_id": 9, "message_id": "m", "src_node_id": 1, "dst_node_id": 2, "group_id": ""}
    metadata = Metadata(**about, reply_to_message_id="", created_at=time.time(), ttl=ttl, message_type=kind)
    return Message(metadata=metadata, content=RecordDict({"message": ConfigRecord({"bytes": value})}))


def written(federation, tmp_path):
    place = tmp_path / "app"
    apps.write_study(federation.coordinator, place)
    return place, tomllib.loads((place / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


def run(federation, tmp_path, configs=None, **config):
    """Train with the app as `flwr run` would start it; the coordinator's folder."""
    place, about = written(federation, tmp_path)
    out = tmp_path / "study"
    configs = configs or {100 + k: {apps.SITE: str(federation.place(n))} for k, n in enumerate(federation.names)}
    grid = Grid(apps.client_app(), configs)
    server = apps.server_app(place / apps.PACKAGE)
    server(grid, context({}, **(about["config"] | {"folder": str(out)} | config)))
    return out, grid


def test_the_app_makes_the_same_model_as_the_own_runner(tiny, tmp_path, capsys):
    one, other = tiny(), tiny()
    out, _ = run(one, tmp_path)
    coordinator, _ = other.run()
    left, right = (load_model(place / "model.safetensors")[1] for place in (out / "run", coordinator.out))
    assert torch.equal(left, right)  # the sites' noise is seeded
    assert left.abs().max() > 0
    for name in one.names:
        cert = one.certificate(name)
        assert cert["epsilon"] == pytest.approx(8.0, rel=1e-6)
        assert main(["verify", str(one.folder_of(name) / "certificate.json")]) == 1  # seeded, so not certified
        assert "NOT CERTIFIED" in capsys.readouterr().out


def test_certificates_of_a_run_under_masks_are_verified(tiny, tmp_path, capsys):
    federation = tiny(trust="secure-aggregation", seed=None, rounds=2)
    run(federation, tmp_path)
    for name in federation.names:
        assert federation.certificate(name)["secure"]
        assert main(["verify", str(federation.folder_of(name) / "certificate.json")]) == 0, capsys.readouterr()


def test_the_configuration_of_a_run_changes_the_spec(tiny, tmp_path):
    federation = tiny()
    _, about = written(federation, tmp_path)
    assert about["config"] == {"folder": "", **federation.spec}
    out, _ = run(federation, tmp_path, rounds=2, epsilon=3)
    assert tomllib.loads((out / "spec.toml").read_text())["rounds"] == 2
    assert federation.certificate("north")["epsilon"] == pytest.approx(3.0, rel=1e-6)
    with pytest.raises(SordinoError, match="is over"):
        run(federation, tmp_path, rounds=2, epsilon=3)


def test_a_stopped_run_continues_in_its_folder_and_another_study_is_refused(tiny, tmp_path, monkeypatch):
    federation = tiny()
    with monkeypatch.context() as patched:
        patched.setattr("sordino.federation.coordinator.Coordinator._finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(federation, tmp_path)
    with pytest.raises(SordinoError, match="another study"):
        run(federation, tmp_path, epsilon=3.0)
    run(federation, tmp_path)
    assert [t for _, t in federation.charged("north")] == [0, 1, 2]


def test_a_study_without_plain_values_keeps_them_in_a_file(tiny, tmp_path):
    federation = tiny("dp-boost", widths=[1, 1, 1, 1])
    place, about = written(federation, tmp_path)
    assert "widths" not in about["config"]
    folder = apps.prepare(place / apps.PACKAGE, about["config"] | {"folder": str(tmp_path / "s")}, 1)
    assert tomllib.loads((folder / "spec.toml").read_text())["widths"] == [1, 1, 1, 1]


def test_the_app_holds_no_data_and_no_key(tiny, tmp_path):
    federation = tiny(trust="secure-aggregation")
    place, about = written(federation, tmp_path)
    assert about["components"] == {"serverapp": "sordino_study.server:app", "clientapp": "sordino_study.client:app"}
    names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    files = ["__init__.py", "client.py", "federation.toml", "roster.toml", "server.py"]
    assert names == {"README.md", "pyproject.toml", *(f"{apps.PACKAGE}/{name}" for name in files)}
    for part, want in (("client", "client_app"), ("server", "server_app")):
        tree = ast.parse((place / apps.PACKAGE / f"{part}.py").read_text())
        (line,) = (node for node in tree.body if isinstance(node, ast.Assign))
        assert line.value.func.id == want


def test_only_public_parts_of_flower_are_imported():
    for name in ("app", "mod", "reply", "transport"):
        for node in ast.walk(ast.parse((FLOWER / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                assert node.module in PUBLIC, f"{name}.py:{node.lineno}"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("flwr") for alias in node.names), f"{name}.py:{node.lineno}"


def test_virtual_nodes_are_the_sites_of_a_folder(tiny, tmp_path, monkeypatch):
    federation = tiny()
    monkeypatch.setenv("SORDINO_SITES", str(federation.folder))
    monkeypatch.setenv("SORDINO_FOLDER", str(federation.coordinator))
    grid = Grid(apps.client_app(), {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)})
    apps.server_app(tmp_path)(grid, context({}))
    assert (federation.coordinator / "run" / "certificate.json").exists()
    assert max(grid.pulled) == 3  # all replies in one request
    assert [t for _, t in federation.charged("west")] == [0, 1, 2]


def test_the_server_reads_one_sentence_when_a_site_fails(tiny, tmp_path, monkeypatch, logged):
    federation = tiny()
    client = apps.client_app()
    monkeypatch.setattr(handler, "answer", lambda *_: 1 / 0)
    paths = [str(federation.place("north")), str(tmp_path / "patient 17")]
    owns = [{apps.SITE: paths[0]}, {apps.SITE: paths[1]}, {}, {apps.SOCKET: str(tmp_path / "none.sock")}]
    for own in owns:
        reply = client(request(HELLO), context(own))
        assert (reply.error.code, reply.error.reason) == (2, FAILED)
    assert "--node-config" in str(logged)
    assert client(request("no bytes"), context(owns[0])).error.reason == FAILED


def test_what_a_run_says_does_not_choose_the_site(tiny, tmp_path):
    federation = tiny()
    told = {apps.SITE: str(federation.place("north")), apps.SOCKET: "x"}
    assert apps.client_app()(request(HELLO), context({}, **told)).has_error()


def test_an_old_flower_is_refused(monkeypatch):
    monkeypatch.setattr(flower, "version", lambda _: "1.20.0")
    with pytest.raises(SordinoError, match=r"1\.21 or later"):
        apps.client_app()
    monkeypatch.setattr(flower, "version", lambda _: "1.100.0")
    apps.client_app()


# ----------------------------------------------------------------------------------------------------------- the door


@pytest.fixture
def served(fast):
    """Starts a door; its path, and what it was asked."""
    stop, threads = threading.Event(), []

    def start(handle, **keys):
        path = Path(fast) / "site.sock"
        threads.append(threading.Thread(target=door.serve, args=(path, handle), kwargs={"stop": stop, **keys}))
        threads[-1].start()
        end = time.monotonic() + 10
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return path

    yield start
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_site_behind_a_socket_takes_part(tiny, tmp_path, served):
    federation = tiny()
    path = served(lambda asked: handler.answer(federation.place("north") / "site.toml", asked))
    configs = {100 + k: {apps.SITE: str(federation.place(name))} for k, name in enumerate(federation.names)}
    configs[100] = {apps.SOCKET: str(path), apps.SITE: "not read"}
    run(federation, tmp_path, configs)
    assert [t for _, t in federation.charged("north")] == [0, 1, 2]


def test_the_socket_is_for_its_user_and_group_alone(served):
    path = served(bytes.upper)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert door.ask(path, b"abc") == b"ABC"
    assert door.ask(path, bytes(3 * door.CHUNK)) == bytes(3 * door.CHUNK)
    with pytest.raises(SordinoError, match="another process listens"):
        door.serve(path, bytes.upper)
    assert door.ask(path, b"still") == b"STILL"


def test_a_failure_a_lie_and_silence_hold_nobody_up(served, monkeypatch, logged):
    monkeypatch.setattr(door, "READ_SECONDS", 0.2)
    calls = []

    def handle(asked):
        calls.append(asked)
        if asked == b"fail":
            raise ValueError("patient 17")
        return asked

    path = served(handle)
    with pytest.raises((SordinoError, OSError)):
        door.ask(path, b"fail")
    assert "patient 17" in str(logged)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(struct.pack(">Q", door.MOST_BYTES + 1))
        assert line.recv(1) == b""
    held = [socket.socket(socket.AF_UNIX) for _ in range(door.CONNECTIONS + 3)]
    for line in held:
        line.connect(str(path))
    time.sleep(0.5)  # they are closed for their silence
    assert door.ask(path, b"abc") == b"abc"
    for line in held:
        line.close()
    assert calls == [b"fail", b"abc"]


def test_a_path_that_is_no_socket_stays_and_a_left_one_is_replaced(fast, served):
    path = Path(fast) / "site.sock"
    path.write_text("data")
    with pytest.raises(SordinoError, match="not a socket"):
        door.serve(path, bytes.upper)
    assert path.read_text() == "data"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
    assert path.exists()
    served(bytes.upper)
    time.sleep(0.3)
    assert door.ask(path, b"a") == b"A"
    with pytest.raises(SordinoError, match="more than 100 bytes"):
        door.serve(Path("/" + "x" * 101), bytes.upper)
    with pytest.raises(SordinoError, match="cannot be made"):
        door.serve(Path(fast) / "none" / "site.sock", bytes.upper)


def test_the_command_line_serves_a_site(tiny, monkeypatch, capsys):
    federation = tiny()
    seen = []
    monkeypatch.setattr(door, "serve", lambda path, handle, group: seen.append((path, handle(HELLO), group)))
    folder = federation.place("north")
    assert main(["federate", "serve", str(folder), "--socket", "/run/x.sock", "--group", "flower"]) == 0
    ((path, reply, group),) = seen
    assert (path, group) == (Path("/run/x.sock"), "flower")
    assert wire.decode(reply).fields["name"] == "north"
    assert "north answers at /run/x.sock" in capsys.readouterr().out


def test_the_command_line_writes_the_app(tiny, tmp_path, capsys):
    federation = tiny()
    assert main(["federate", "app", str(federation.coordinator)]) == 0
    assert (federation.coordinator / "app" / "pyproject.toml").exists()
    assert "flwr run" in capsys.readouterr().out
    secure = tiny(trust="secure-aggregation")
    os.unlink(secure.coordinator / "roster.toml")
    assert main(["federate", "app", str(secure.coordinator)]) == 2
    assert "roster.toml" in capsys.readouterr().err
