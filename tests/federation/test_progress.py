"""Following a coordinator that runs, or does not."""

import json
import sys
from subprocess import Popen
from types import SimpleNamespace

import pytest

from sordino.errors import SordinoError
from sordino.federation.progress import NOT_WRITTEN, count_lines, follow, parsed, read_lines


@pytest.fixture
def running(tmp_path):
    """What `follow` looks at: processes by name, and their logs."""
    sleepers = {name: Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for name in ("server", "link")}
    ended = lambda name: sleepers[name].poll()  # noqa: E731
    yield SimpleNamespace(processes=sleepers, ended=ended, log=lambda name: tmp_path / f"{name}.log")
    for process in sleepers.values():
        process.kill()
        process.wait()


def progress(path, *whats):
    path.write_text("".join(json.dumps({"what": what}) + "\n" for what in whats))
    return path


def test_a_coordinator_that_failed_before_is_followed_from_its_next_word_on(tmp_path, running):
    path = progress(tmp_path / "p", "waiting", "failed", "waiting", "round", "finished")
    assert [line["what"] for line in follow(path, running, 5.0)] == ["waiting", "failed"]
    seen = count_lines(progress(tmp_path / "q", "waiting", "failed"))
    assert [line["what"] for line in follow(path, running, 5.0, seen)] == ["waiting", "round", "finished"]


@pytest.mark.parametrize("name", ["server", "link"])
def test_a_process_that_dies_is_told_and_not_waited_for(tmp_path, running, name):
    running.processes[name].kill()
    running.processes[name].wait()
    with pytest.raises(SordinoError, match=rf"ended with status -9; see .*{name}.log.*continues"):
        list(follow(progress(tmp_path / "p", "waiting"), running, 30.0))


def test_it_is_not_followed_for_ever(tmp_path, running):
    with pytest.raises(SordinoError, match=r"more than 0\.3 s"):
        list(follow(tmp_path / "none", running, 0.3))


def test_a_coordinator_that_could_not_write_is_told_so(tmp_path, running):
    ended = lambda name: NOT_WRITTEN if name == "server" else None  # noqa: E731
    full = SimpleNamespace(ended=ended, log=running.log)
    with pytest.raises(
        SordinoError, match=r"could not write to .* \(is the disk full\?\); see .*server.log.*continues"
    ):
        list(follow(progress(tmp_path / "p", "waiting"), full, 30.0))


def test_a_run_that_finished_is_not_an_error_though_its_processes_ended(tmp_path, running):
    over = SimpleNamespace(ended=lambda name: 0, log=running.log)
    path = progress(tmp_path / "p", "waiting", "finished")
    assert [line["what"] for line in follow(path, over, 5.0)] == ["waiting", "finished"]


def test_a_line_that_a_full_disk_cut_off_is_left_out(tmp_path):
    path = tmp_path / "p"
    path.write_text('{"what": "waiting"}\n{"what": "rou\n{"what": "round"}\n{"what": "fini')
    assert [line["what"] for line in parsed(read_lines(path))] == ["waiting", "round"]
    assert count_lines(path) == 3


def test_a_refusal_that_ends_a_run_is_printed_once(capsys):
    from sordino.cli.federate import _shown

    refused = {"what": "refused", "kind": "agreed", "site": "north", "reason": "the limit is spent"}
    other = {**refused, "site": "west", "reason": "busy"}
    failed = {"what": "failed", "why": "terms: refused by north: the limit is spent. The log of each site states more."}
    assert list(_shown([refused, failed])) == [refused, failed]
    assert capsys.readouterr().err == "", "the command ends in an error that says it"
    away = {"what": "missing", "site": "west", "kind": "agreed"}
    list(_shown([other, away, refused, failed]))
    told = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in told] == ["west refused: busy", "west did not answer in time (agreed)"]
    list(_shown([other, {"what": "failed", "why": "the disk is full"}]))
    assert "west refused: busy" in capsys.readouterr().err
