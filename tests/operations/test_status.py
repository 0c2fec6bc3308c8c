"""Where a run stands: read from the folders, on the console, on a page and as metrics; no figure of a record in any."""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fixtures import Loopback

from sordino import files, wire
from sordino.cli import main
from sordino.errors import SordinoError, StoppedError
from sordino.federation.coordinator import Coordinator, serve
from sordino.federation.progress import COORDINATOR_LOCK
from sordino.operations.status import of_coordinator, of_folder, of_site
from sordino.operations.status_page import COORDINATOR_METRICS, SITE_METRICS, StatusServer, metrics, page

NORTH, SOUTH = "north", "south"
BROWSER = os.environ.get("SORDINO_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
STRANGE = '<script>alert("x")</script>'


@pytest.fixture
def server():
    """A server of a folder's status, closed at the end."""
    opened = []

    def make(folder):
        opened.append(StatusServer(folder, 0))
        return opened[-1]

    yield make
    for each in opened:
        each.shutdown()
        each.server_close()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode(), dict(reply.headers)


def silent(federation, name, rounds):
    """A fault: this site does not answer these rounds."""
    node = 100 + federation.names.index(name)

    def fault(asked, request, answer):
        message = wire.decode(request)
        lost = asked == node and message.kind == "round" and message.fields["t"] in rounds
        return None if lost else answer(request)

    return fault


def test_a_run_from_beginning_to_end(tiny, tmp_path):
    federation = tiny(rounds=3)
    before = of_folder(federation.coordinator)
    assert before.state == "not begun"
    assert {site.state for site in before.sites} == {"awaited"}
    coordinator, _ = federation.run(fault=silent(federation, NORTH, {1}))
    status = of_coordinator(federation.coordinator)
    assert (status.state, status.done, status.rounds, status.lost) == ("finished", 3, 3, 0)
    assert status.run == coordinator.terms.run
    assert status.planned_epsilon == coordinator.terms.resolved.privacy.epsilon
    assert 0 < status.epsilon <= status.planned_epsilon * (1 + 1e-9)
    counts = {site.name: (site.rounds, site.lost, site.state) for site in status.sites}
    assert counts[NORTH] == (2, 1, "finished")
    assert counts[SOUTH] == (3, 0, "finished")
    assert any("north did not answer in time" in line for line in status.log)
    assert status.log[0].startswith("20")  # a time


def test_who_is_late_and_why_while_it_runs(tiny):
    federation = tiny(rounds=3)
    seen = {}

    class Watched(Coordinator):
        def tell(self, what, **fields):
            super().tell(what, **fields)
            if what == "missing":
                seen.update({site.name: site for site in of_coordinator(federation.coordinator).sites})

    Watched(Loopback(federation.sites(), silent(federation, SOUTH, {1})), federation.coordinator).run()
    assert seen[SOUTH].state == "late"
    assert "did not answer in time" in seen[SOUTH].why
    assert seen[NORTH].state == "here"


def test_a_failed_run_says_why(tiny):
    federation = tiny(rounds=3)
    federation.configure(NORTH, methods=["dp-fedgd"])
    with pytest.raises(StoppedError):
        serve(Loopback(federation.sites()), federation.coordinator)
    status = of_folder(federation.coordinator)
    assert status.state == "failed"
    assert "refused by north" in status.why
    assert 'sordino_run_state{state="failed"} 1' in metrics(status)


def test_a_run_that_nobody_coordinates_is_stopped(tiny):
    federation = tiny(rounds=3)

    def killed(asked, request, answer):
        if wire.decode(request).kind == "round" and wire.decode(request).fields["t"] == 1:
            raise KeyboardInterrupt
        return answer(request)

    with pytest.raises(KeyboardInterrupt):
        federation.run(fault=killed)
    status = of_coordinator(federation.coordinator)
    assert (status.state, status.done) == ("stopped", 1)
    with files.lock(federation.coordinator / COORDINATOR_LOCK):
        assert of_coordinator(federation.coordinator).state == "running"


def test_a_ledger_that_is_missing_or_older_is_told_without_figures(tiny, capsys):
    federation = tiny(rounds=2)
    federation.configure(NORTH, witness="../witness-of-north.json")
    federation.run()
    folder = federation.place(NORTH)
    assert of_site(folder).problem == ""
    (folder / "ledger.db").unlink()
    assert "it is missing" in of_site(folder).problem
    assert of_site(folder).left == 0
    assert main(["federate", "status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "REFUSES" in shown
    assert "left" not in shown
    assert "refuses every message" in page(of_site(folder))


def test_a_site_sees_its_budget(tiny):
    federation = tiny(rounds=2)
    folder = federation.place(NORTH)
    untouched = of_site(folder)
    assert (untouched.epsilon, untouched.answered) == (0.0, 0)
    assert not (folder / "ledger.db").exists()  # looking creates nothing
    federation.run()
    status = of_folder(folder / "site.toml")
    assert (status.answered, status.runs, status.refusals) == (2, 1, 0)
    assert 0 < status.epsilon <= status.limit
    assert status.left < status.limit


def test_the_page_the_metrics_and_the_json(tiny, server):
    federation = tiny(rounds=3)
    federation.run()
    shown = server(federation.coordinator)
    html, headers = get(shown.url)
    assert all(word in html for word in ("finished", "3 of 3", *federation.names, "<h2>Sites</h2>"))
    assert "<script" not in html
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    text, headers = get(shown.url + "metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'sordino_site_rounds{site="north"} 3' in text
    assert set(names_of(text)) == set(COORDINATOR_METRICS)
    assert json.loads(get(shown.url + "status.json")[0])["state"] == "finished"
    text, _ = get(server(federation.place(NORTH)).url + "metrics")
    assert set(names_of(text)) == set(SITE_METRICS)
    assert "sordino_rounds_answered 3" in text


def test_every_metric_is_on_the_page_of_the_documentation():
    listed = (Path(__file__).parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")
    for table, whose in ((COORDINATOR_METRICS, "coordinator"), (SITE_METRICS, "site")):
        for name, meaning in table.items():
            assert f"| `{name}` | {whose} | {meaning} |" in listed


def names_of(text):
    return [line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")]


def test_only_this_machine_reads_it_and_nobody_writes(tiny, server):
    shown = server(tiny(rounds=2).coordinator)
    assert shown.url.startswith("http://127.0.0.1:")
    stranger = urllib.request.Request(shown.url, headers={"Host": "attacker.example:80"})
    for request, code in ((stranger, 403), (shown.url + "private", 404), (post(shown.url), 501)):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=10)
        assert error.value.code == code
        error.value.close()


def post(url):
    return urllib.request.Request(url, data=b"x")


def test_texts_of_sites_are_escaped(tiny):
    federation = tiny(rounds=2)
    status = of_coordinator(federation.coordinator)
    status.sites[0].name = status.sites[0].why = status.why = STRANGE
    status.log.append(STRANGE)
    assert "<script" not in page(status)
    status.sites[0].name = 'a"\n'
    assert r'{site="a\"\n"}' in metrics(status)


def test_the_command(tiny, tmp_path, capsys):
    federation = tiny(rounds=2)
    federation.run()
    assert main(["federate", "status", str(federation.coordinator)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2" in shown
    assert "finished" in shown
    assert main(["federate", "status", str(federation.coordinator), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    assert main(["federate", "status", str(federation.place(NORTH))]) == 0
    assert "answered  2 rounds" in capsys.readouterr().out
    assert main(["federate", "status", str(tmp_path / "nothing")]) == 2
    assert "neither federation.toml nor site.toml" in capsys.readouterr().err
    assert main(["federate", "status", str(federation.coordinator), "--serve", "70000"]) == 2
    assert "must lie between 0 and 65535" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(tiny, server):
    folder = tiny(rounds=2).coordinator
    first = server(folder)
    with pytest.raises(SordinoError, match="cannot be used on loopback"):
        StatusServer(folder, first.server_address[1])


@pytest.mark.soak
@pytest.mark.skipif(not BROWSER, reason="no Chromium: set SORDINO_CHROMIUM, or put chromium on PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(tiny, server, tmp_path, width):
    federation = tiny(rounds=3)
    federation.run()
    shown, picture = server(federation.coordinator), tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    size = f"--window-size={width},900"
    done = subprocess.run(
        [BROWSER, *options, size, "--dump-dom", shown.url], capture_output=True, text=True, timeout=120, check=True
    )
    assert "<td>north</td>" in done.stdout
    subprocess.run(
        [BROWSER, *options, size, f"--screenshot={picture}", shown.url], capture_output=True, timeout=120, check=True
    )
    assert picture.stat().st_size > 5_000
