"""`kill -9` of the commands themselves: what they started ends with them, and they can be started again at once."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino.cli import main
from sordino.federation.flower.processes import free_ports

SORDINO = [sys.executable, "-m", "sordino", "federate"]


def prepared(folder, capsys):
    """A coordinator's folder and three sites, by the commands of the documentation."""
    words = ["federate", "init", str(folder / "study"), "--sites", "a,b,c", "--features", "4", "--classes", "0,1"]
    assert main([*words, "--trust", "untrusted-server", "--rounds", "3", "--method", "dp-fedsofim"]) == 0
    cards = ""
    for number, name in enumerate("abc"):
        x = np.random.default_rng(number).normal(size=(60, 4))
        rows = "".join(f"{','.join(f'{v:.4f}' for v in row)},{int(row[0] > 0)}\n" for row in x)
        (folder / f"{name}.csv").write_text("p,q,r,s,y\n" + rows)
        capsys.readouterr()
        keys = ["federate", "keys", name, str(folder / name), "--data", str(folder / f"{name}.csv")]
        assert main([*keys, "--label", "y", "--classes", "0,1"]) == 0
        cards += capsys.readouterr().out
        with open(folder / name / "site.toml", "a") as file:
            file.write(f'witness = "{folder}/{name}.witness"\n')
        (folder / "study" / "nodes" / f"{name}.pub").write_bytes((folder / name / "node.pub").read_bytes())
    (folder / "study" / "roster.toml").write_text(cards)


def wait(ready, seconds=120):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.2)


def children(number):
    found = subprocess.run(["pgrep", "-P", str(number)], capture_output=True, text=True, check=False).stdout.split()
    return [int(child) for child in found]


def lives(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.soak  # a minute of real processes
def test_commands_that_are_killed_can_be_started_again_at_once(tmp_path, capsys):
    prepared(tmp_path, capsys)
    link, *ports = free_ports(4)
    authority, progress = tmp_path / "study" / "tls" / "authority.pem", tmp_path / "study" / "run" / "progress.jsonl"
    running = {}

    def start(name):
        words = ["coordinate", str(tmp_path / "study"), "--port", str(link)]
        if name != "study":
            port = ports["abc".index(name)]
            words = ["join", str(tmp_path / name / "site.toml"), "--link", f"localhost:{link}", "--port", str(port)]
            words += ["--authority", str(authority)]
        with open(tmp_path / f"{name}.log", "a") as log:
            running[name] = subprocess.Popen([*SORDINO, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def told(what, **fields):
        lines = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
        return [line for line in lines if line["what"] == what and fields.items() <= line.items()]

    def kill(name):
        below = children(running[name].pid)
        assert len(below) == 2
        running[name].send_signal(signal.SIGKILL)
        running[name].wait()
        return below

    try:
        start("study")
        wait(authority.exists)
        start("a")
        start("b")
        wait(lambda: {site for line in told("joined") for site in line["sites"]} == {"a", "b"})
        orphans = kill("study") + kill("a")
        start("study")
        start("a")
        wait(lambda: not any(map(lives, orphans)), 15)
        assert told("failed") == []
        start("c")
        assert running["study"].wait(180) == 0
        assert told("failed") == []
        assert len(told("finished")) == 1
        assert told("finished")[0]["sites"] == ["a", "b", "c"]
        assert "in use" not in (tmp_path / "a.log").read_text() + (tmp_path / "study.log").read_text()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(30)
