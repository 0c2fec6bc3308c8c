"""Two coordinators and three sites as processes: both studies finish, one after the other, within one limit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino.cli import main
from sordino.evidence.ledger import Ledger
from sordino.federation.flower.processes import free_ports
from sordino.federation.terms import against_terms
from sordino.operations.status import of_coordinator
from sordino.training.verify_run import verify_run

SITES = ("site1", "site2", "site3")
pytestmark = pytest.mark.soak  # 22 processes


def start(*words):
    command = [sys.executable, "-m", "sordino.cli", "federate", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_studies_share_the_sites(tmp_path):
    out = tmp_path / "trial"
    about = ["--rounds", "20", "--method", "dp-fedsofim", "--out", str(out), "--prepare"]
    assert main(["federate", "up", "--sites", "3", *about]) == 0
    studies = [out / "coordinator", out / "second"]
    shutil.copytree(*studies)
    for site in SITES:
        path = out / "sites" / site / "site.toml"
        path.write_text(path.read_text().replace("epsilon = 16.0", "epsilon = 13.0"))
    links, running = free_ports(2), []
    try:
        coordinators = [start("coordinate", study, "--port", port) for study, port in zip(studies, links, strict=True)]
        running += coordinators
        end = time.monotonic() + 300
        while not all((study / "nodes.json").exists() for study in studies):
            assert time.monotonic() < end
            time.sleep(0.2)
        for site in SITES:  # both studies are complete at nearly the same time, so one of them waits for the other
            for study, link in zip(studies, links, strict=True):
                own = ("--link", f"localhost:{link}", "--authority", study / "tls" / "authority.pem")
                running.append(start("join", out / "sites" / site, *own, "--port", free_ports(1)[0]))
                time.sleep(1)  # until it has its port
        told = [coordinator.communicate(timeout=400)[0] for coordinator in coordinators]
        assert [coordinator.returncode for coordinator in coordinators] == [0, 0], told
        assert [of_coordinator(study).state for study in studies] == ["finished", "finished"]
        assert sum("is busy with another study; this one waits at place 1" in text for text in told) >= 1
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=90)
    for site in SITES:
        place = out / "sites" / site
        found = list((place / "runs").glob("*/certificate.json"))
        assert len(found) == 2
        assert all(json.loads(path.read_text())["certified"] for path in found)
        assert [verify_run(path, against_terms=against_terms).problems for path in found] == [[], []]
        with Ledger(place / "ledger.db", read_only=True) as ledger:
            assert 8 < ledger.spent_epsilon(ledger.accounts()[-1].who, 1e-5) <= 13
