"""Keys, the shell, and the two ends of an exchange without any process."""

import os
import sys
import threading
import time
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

from sordino.errors import SordinoError
from sordino.federation import flower
from sordino.federation import tls as tls_files
from sordino.federation.flower import commands, keys

pytestmark = pytest.mark.filterwarnings("ignore:.*Click 9.0:DeprecationWarning")  # of what flwr imports
needs_flwr = pytest.mark.skipif(
    find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower]'"
)


def mode(path):
    return path.stat().st_mode & 0o777


def test_private_files_are_private_and_never_overwritten(tmp_path):
    public = keys.node_key(tmp_path / "site")
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    assert mode(tmp_path / "site") == mode(keys.secret(tmp_path / "secret")) == 0o600
    with pytest.raises(FileExistsError):
        keys.node_key(tmp_path / "site")


def test_commands_keep_messages_in_memory_and_telemetry_off(tmp_path):
    tls = tls_files.Tls(Path("ca"), Path("crt"), Path("key"))
    link = commands.superlink_command(tls, Path("s"))
    assert "--enable-supernode-auth" in link
    assert "--database" not in link  # messages stay in memory
    assert link[link.index("--host") + 1] == "127.0.0.1"
    assert commands.supernode_command("x:1", Path("ca"), Path("k"), Path("s"), idle=None)[0] == "flower-supernode"
    own = commands.environment(tmp_path, {"A": "b"})
    assert own["PYTHONUNBUFFERED"] == "1"  # logs that are files grow line by line
    assert (own["FLWR_TELEMETRY_ENABLED"], own["FLWR_HOME"], own["A"]) == ("0", str(tmp_path), "b")


def test_a_wrong_or_missing_flower_is_named(monkeypatch):
    monkeypatch.setattr(flower, "version", lambda _: "1.42.0")
    with pytest.raises(SordinoError, match=r"1\.42\.0"):
        flower.require()

    def missing(_):
        raise flower.PackageNotFoundError

    monkeypatch.setattr(flower, "version", missing)
    with pytest.raises(SordinoError, match=r"pip install 'sordino\[flower\]'"):
        flower.require()


def test_a_handler_is_found_by_name_or_refused():
    assert flower.named("os:getpid", "handler") is os.getpid
    for wrong in ("os:nothing", "nothing_at_all:x", "os", ""):
        with pytest.raises(SordinoError, match="handler"):
            flower.named(wrong, "handler")


@needs_flwr
class TestGrid:
    """`GridTransport` over a grid of ours."""

    @pytest.fixture(autouse=True)
    def identity(self, monkeypatch):
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_task_id", "_run_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, 1)

    def transport(self, answer, **keys):
        from sordino.federation.flower.transport import GridTransport

        class Grid:
            def __init__(self):
                self.sent = {}

            def get_node_ids(self):
                return [3, 1]

            def push_messages(self, messages):
                for number, message in enumerate(messages):
                    message.metadata.__dict__["_message_id"] = f"m{len(self.sent) + number}"
                self.sent.update({m.metadata.message_id: m for m in messages})
                return [m.metadata.message_id if m.metadata.dst_node_id != 9 else None for m in messages]

            def pull_messages(self, names):
                return [r for name in names if (r := answer(self.sent[name])) is not None]

        return GridTransport(Grid(), **keys)

    def test_replies_and_codes(self):
        from flwr.app import ConfigRecord, Error, Message, RecordDict

        def answer(message):
            node = message.metadata.dst_node_id
            assert message.metadata.ttl == 0.6
            if node == 2:
                return Message(Error(code=2, reason="patient 4711"), reply_to=message)
            if node == 3:
                return Message(RecordDict({"message": ConfigRecord({"bytes": "text"})}), reply_to=message)
            if node == 4:
                raise RuntimeError("patient 4711")
            return Message(message.content, reply_to=message) if node == 1 else None

        transport = self.transport(answer)
        assert transport.sites() == [1, 3]
        assert transport.exchange({node: bytes([node]) for node in (1, 2, 3, 4, 5, 9)}, 0.6) == {1: b"\x01"}
        codes = {2: "error 2", 3: "malformed", 4: "error RuntimeError", 5: "late", 9: "unsent"}
        assert transport.failures == codes
        with pytest.raises(SordinoError, match="seconds"):
            transport.exchange({1: b""}, 0.0)

    def test_replies_that_are_asked_for_together(self):
        from flwr.app import ConfigRecord, Message, RecordDict

        calls = []

        def answer(message):
            node = message.metadata.dst_node_id
            calls.append(node)
            if len(calls) == 1:
                raise RuntimeError("once")
            if node == 3:
                return Message(RecordDict({"message": ConfigRecord({"bytes": 4.0})}), reply_to=message)
            return Message(message.content, reply_to=message) if node in (1, 2) else None

        transport = self.transport(answer, together=True)
        replies = transport.exchange({node: bytes([node]) for node in (1, 2, 3, 5, 9)}, 0.8)
        assert replies == {1: b"\x01", 2: b"\x02"}
        assert transport.failures == {3: "malformed", 5: "late", 9: "unsent"}
        assert calls[:5] == [1, 1, 2, 3, 5]
        assert set(calls[5:]) == {5}  # nobody is asked again who answered

    def test_a_reply_that_hangs_delays_nobody(self):
        from flwr.app import Message

        release = threading.Event()

        def answer(message):
            if message.metadata.dst_node_id == 2:
                release.wait(10)
            return Message(message.content, reply_to=message)

        transport = self.transport(answer)
        assert transport.exchange({1: b"a", 2: b"b", 3: b"c"}, 1.0) == {1: b"a", 3: b"c"}
        release.set()
        time.sleep(0.2)
        assert transport.failures == {2: "late"}  # what comes later changes nothing
        assert transport.exchange({1: b"d"}, 1.0) == {1: b"d"}


@needs_flwr
def test_a_site_answers_or_fails_in_one_sentence(monkeypatch, logged):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from sordino.federation.flower import worker
    from sordino.federation.flower.reply import FAILED

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    def request(value, ttl=10.0):
        content = RecordDict({"message": ConfigRecord({"bytes": value})})
        return Message(content, dst_node_id=2, message_type="query", ttl=ttl)

    def raises(_):
        raise ValueError("patient 4711")

    fine = worker.answer(bytes.upper, request(b"abc"), 60)
    assert fine.content["message"]["bytes"] == b"ABC"
    late = request(b"abc", ttl=0.01)
    time.sleep(0.05)
    called = []
    for reply in (
        worker.answer(raises, request(b"abc"), 60),
        worker.answer(lambda _: "not bytes", request(b"abc"), 60),
        worker.answer(called.append, request("not bytes"), 60),
        worker.answer(called.append, late, 0),
        worker.answer(called.append, Message(RecordDict(), dst_node_id=2, message_type="query"), 60),
    ):
        assert (reply.error.code, reply.error.reason) == (2, FAILED)
    assert called == []
    assert "patient 4711" in str(logged)


@needs_flwr
def test_the_server_reads_the_environment_alone(monkeypatch, tmp_path):
    from sordino.federation.flower import server

    seen = []
    module = types.ModuleType("serves_for_a_test")
    module.serve = lambda transport, folder: seen.append((transport.grid, folder))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("SORDINO_SERVE", f"{module.__name__}:serve")
    monkeypatch.delenv("SORDINO_FOLDER", raising=False)
    with pytest.raises(SordinoError, match="SORDINO_FOLDER"):
        server.coordinate("grid")
    monkeypatch.setenv("SORDINO_FOLDER", str(tmp_path))
    server.coordinate("grid")
    assert seen == [("grid", tmp_path)]
    assert server.app is not None
    with pytest.raises(AttributeError):
        _ = server.nothing
