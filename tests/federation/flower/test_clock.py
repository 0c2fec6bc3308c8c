"""Clocks of sites that are wrong, or are set while a run goes on."""

import os
import pickle
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from sordino.federation.flower import clock as clocks
from sordino.federation.flower import deploy, processes

pytestmark = pytest.mark.filterwarnings("ignore:.*Click 9.0:DeprecationWarning")  # of what flwr imports
needs_flwr = pytest.mark.skipif(
    find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower]'"
)


def header(seconds):
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


def test_the_link_s_time_counts_on_when_the_machine_s_clock_is_set(tmp_path, monkeypatch):
    clock = clocks.LinkClock(tmp_path / "clock")
    assert abs(clock.time - time.time()) < 5
    assert clocks.difference(tmp_path / "clock") == 0.0
    for nothing in (None, "", "yesterday"):
        clock.heard(nothing)
    clock.heard(header(-3600))
    before = clock.time
    assert abs(clocks.difference(tmp_path / "clock") + 3600) <= 5
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() + 7200)
    assert abs(clock.time - before) < 60
    assert abs(clock.now().timestamp() - before) < 60
    clock.heard(header(-3600))  # the header is the link's; the machine is now two hours further ahead
    assert abs(clocks.difference(tmp_path / "clock") + 3 * 3600) <= 5


def test_silence_is_measured_by_a_clock_that_nobody_sets(tmp_path, monkeypatch):
    path = tmp_path / "pulse"
    path.touch()
    heard, plain = deploy.Silence(path), time.time
    for jump in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda jump=jump: plain() + jump)
        assert heard.seconds < 60
    heard._since -= 100
    assert heard.seconds >= 100
    os.utime(path, (0, 0))  # touched, by a machine whose clock went back to 1970
    assert heard.seconds < 60


@needs_flwr
def test_a_deadline_is_the_link_s_and_not_the_site_s(monkeypatch, tmp_path):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.app.message import message as module
    from flwr.supercore.task_identity import TaskIdentity

    from sordino.federation.flower import worker

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(module, "now", module.now)  # put back afterwards
    content = RecordDict({"message": ConfigRecord({"bytes": b"abc"})})
    request = Message(content, dst_node_id=2, message_type="query", ttl=30.0)
    request.metadata.__dict__["_created_at"] -= 3600  # the site's clock is an hour ahead
    assert worker.answer(bytes.upper, request, 60).has_error()
    path = tmp_path / "clock"
    path.write_text("-3600.0")
    worker.keep_time(path)
    reply = worker.answer(bytes.upper, request, 60 - clocks.difference(path))
    assert reply.content["message"]["bytes"] == b"ABC"
    assert reply.metadata.ttl > 20
    request.metadata.__dict__["_created_at"] -= 100  # and this one is late
    assert worker.answer(bytes.upper, request, 60 - clocks.difference(path)).has_error()


SKEWED = """
import sys, time, runpy
from datetime import timedelta
from flwr.supercore import date
shift, plain, now = float(sys.argv[1]), time.time, date.now
time.time = lambda: plain() + shift
date.now = lambda: now() + timedelta(seconds=shift)
module = sys.argv[2]
sys.argv[1:3] = []
runpy.run_module(module, run_name="__main__")
"""


class Skewed(processes.LocalFederation):
    """Sites whose processes have other clocks than the link."""

    shifts = {"ahead": 3600.0, "behind": -3600.0}  # noqa: RUF012

    def start(self, name, command, env):
        site = name.partition("-")[2]
        if site:
            module, rest = command[3], command[4:]
            command = [sys.executable, "-P", "-c", SKEWED, str(self.shifts[site]), module, *rest]
            command[6:6] = ["--clock", str(self.folder / f"{site}.clock")]
        return super().start(name, command, env)


@pytest.mark.soak  # real processes
@needs_flwr
def test_sites_whose_clocks_are_an_hour_off_take_part(tmp_path):
    here = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
    server = {"SORDINO_SERVE": "parts:serve", **here}
    with Skewed(tmp_path / "f", Skewed.shifts, handler="parts:handle", server=server, site=here) as federation:
        federation.run()
        folder = federation.folder / "coordinator"
        question = (dict.fromkeys(federation.nodes.values(), b"abc"), 30.0, 0)
        (folder / "1").write_bytes(pickle.dumps(question))
        (folder / "1").rename(folder / "1.ask")
        federation.wait((folder / "1.told").exists, 60, "link", "server")
        replies, failures, _ = pickle.loads((folder / "1.told").read_bytes())
        assert replies == dict.fromkeys(federation.nodes.values(), b"cba")
        assert failures == {}
