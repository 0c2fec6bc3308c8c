"""Seconds for one exchange of 10 kB with three sites over Flower, four ways, on this machine: results/flower.json.

    python benchmarks/flower.py

- send_and_receive: Flower as it comes, an app that returns what it got
- own polling: the same, but the server looks for replies every 0.15 s
- worker: our warm worker at each site, Flower's own SuperNode
- ours: our worker, and the SuperNode that sleeps 0.2 s when idle instead of 3 s

All over TLS with node keys. The setups take turns, each twice, in opposite orders; the first exchange of a run, which
also carries the app bundle, is kept apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.federation.flower import commands, processes

ROOT = Path(__file__).parents[1]
SIZE = 10_000
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    return Message(message.content, reply_to=message)
"""


def handle(request: bytes) -> bytes:
    return request


def serve(transport: Any, folder: Path) -> None:
    """What the server's process does: exchanges, timed."""
    from flwr.app import ConfigRecord, Message, RecordDict

    def plain(requests: dict[int, bytes]) -> int:
        messages = [
            Message(RecordDict({"message": ConfigRecord({"bytes": b})}), dst_node_id=n, message_type="query", ttl=120.0)
            for n, b in requests.items()
        ]
        return len(list(transport.grid.send_and_receive(messages, timeout=120)))

    def polled(requests: dict[int, bytes]) -> int:
        return len(transport.exchange(requests, 120.0))

    seconds: dict[str, list[float]] = {}
    for way in os.environ["WAYS"].split(","):
        for _ in range(1 + int(os.environ["EXCHANGES"])):
            requests = {node: os.urandom(SIZE) for node in transport.sites()}
            began = time.perf_counter()
            replies = (plain if way == "send_and_receive" else polled)(requests)
            seconds.setdefault(way, []).append(round(time.perf_counter() - began, 3))
            if replies != 3:
                raise RuntimeError(f"{way}: {replies} replies")
    (folder / "part").write_text(json.dumps(seconds))
    (folder / "part").rename(folder / "found.json")


class Stock(processes.LocalFederation):
    """Flower's SuperNode as it comes: it starts a process for each message and runs the app it was sent."""

    def start_node(self, name: str) -> subprocess.Popen[bytes]:
        keys = self.folder / "keys"
        words = [self.address, self.tls.authority, keys / name, keys / f"{name}.secret"]
        command = commands.supernode_command(*words, port=self.ports[name], idle=None)
        at = command.index("--isolation")
        del command[at : at + 4]
        return self.start(f"node-{name}", command, commands.environment(self.folder / f"home-{name}"))


SETUPS: dict[str, tuple[type[processes.LocalFederation], dict[str, Any]]] = {
    "own polling,send_and_receive": (Stock, {}),
    "worker": (processes.LocalFederation, {"handler": "flower_bench:handle", "idle": None}),
    "ours": (processes.LocalFederation, {"handler": "flower_bench:handle"}),
}


def measure(ways: str, exchanges: int, place: Path) -> dict[str, list[float]]:
    kind, words = SETUPS[ways]
    (place / "modules").mkdir(parents=True)
    (place / "modules" / "flower_bench.py").symlink_to(Path(__file__).resolve())  # not "flower": too common a name
    more = {"PYTHONPATH": os.pathsep.join([str(place / "modules"), str(Path(__file__).resolve().parent)])}
    more["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    server = more | {"SORDINO_SERVE": "flower_bench:serve", "WAYS": ways, "EXCHANGES": str(exchanges)}
    folder = place / "federation"
    app = commands.write_app(folder / "app")
    (app / "shell" / "client.py").write_text(CLIENT)
    with kind(folder, "abc", server=server, site=more, **words) as federation:
        time.sleep(5)  # workers finish their imports
        federation.run()
        done = folder / "coordinator" / "found.json"
        federation.wait(done.exists, 600, "link", "server")
        return json.loads(done.read_text())


def main(exchanges: int, out: Path) -> None:
    samples: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    load = [os.getloadavg()[0]]
    for ways in [*SETUPS, *reversed(SETUPS)]:
        with tempfile.TemporaryDirectory() as place:
            for way, seconds in measure(ways, exchanges, Path(place)).items():
                first.setdefault(way, []).append(seconds[0])
                samples.setdefault(way, []).extend(seconds[1:])
                print(f"{way:18} median {statistics.median(seconds[1:]):.2f} s  {seconds}", flush=True)
        load.append(os.getloadavg()[0])
    document = {
        "provenance": provenance("python benchmarks/flower.py")
        | {"flwr": version("flwr"), "cores": os.cpu_count(), "machine": platform.machine(), "load": load},
        "bytes": SIZE,
        "sites": 3,
        "median_seconds": {way: round(statistics.median(values), 3) for way, values in samples.items()},
        "seconds": samples,
        "first_seconds": first,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{out}: {document['median_seconds']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "flower.json")
    words = parser.parse_args()
    main(words.exchanges, words.out)
