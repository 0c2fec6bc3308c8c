"""Seconds for one exchange with three sites over Flower, on this machine: results/flower.json.

    python benchmarks/flower.py
    python benchmarks/flower.py --bytes 5000000 --out results/flower_adapters.json     # as large as an adapter

- send_and_receive: Flower's own round by its public interface: an app that returns what it got, stock SuperNodes
- app: our standard Flower app on stock SuperNodes, each site behind a socket that returns what it got
- ours: the own runner, our worker and node at each site

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
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import provenance
from sordino.federation import door
from sordino.federation.flower import commands, processes
from sordino.federation.flower.app import CLIENT, SOCKET

ROOT = Path(__file__).parents[1]
ECHO = """
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

    way, seconds = os.environ["WAY"], []
    for _ in range(1 + int(os.environ["EXCHANGES"])):
        requests = {node: os.urandom(int(os.environ["BYTES"])) for node in transport.sites()}
        began = time.perf_counter()
        replies = (plain if way == "send_and_receive" else polled)(requests)
        seconds.append(round(time.perf_counter() - began, 3))
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
        return self.start(f"node-{name}", command + self.config(name), commands.environment(self.folder / f"h-{name}"))

    def config(self, name: str) -> list[str]:
        return []


class App(Stock):
    """The same SuperNodes with our app, whose sites answer at sockets."""

    def config(self, name: str) -> list[str]:
        path = Path(tempfile.mkdtemp()) / "site.sock"
        threading.Thread(target=door.serve, args=(path, handle), daemon=True).start()
        return ["--node-config", f'{SOCKET}="{path}"']


SETUPS: dict[str, tuple[type[processes.LocalFederation], dict[str, Any], str]] = {
    "send_and_receive": (Stock, {}, ECHO),
    "app": (App, {}, CLIENT),
    "ours": (processes.LocalFederation, {"handler": "flower_bench:handle"}, CLIENT),
}


def measure(way: str, exchanges: int, size: int, place: Path) -> list[float]:
    kind, words, client = SETUPS[way]
    (place / "modules").mkdir(parents=True)
    (place / "modules" / "flower_bench.py").symlink_to(Path(__file__).resolve())  # not "flower": too common a name
    more = {"PYTHONPATH": os.pathsep.join([str(place / "modules"), str(Path(__file__).resolve().parent)])}
    more["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    server = more | {"SORDINO_SERVE": "flower_bench:serve", "WAY": way, "EXCHANGES": str(exchanges)}
    server["BYTES"] = str(size)
    folder = place / "federation"
    app = commands.write_app(folder / "app")
    (app / "shell" / "client.py").write_text(client)
    with kind(folder, "abc", server=server, site=more, **words) as federation:
        time.sleep(5)  # workers finish their imports
        federation.run()
        done = folder / "coordinator" / "found.json"
        federation.wait(done.exists, 600, "link", "server")
        return json.loads(done.read_text())


NAMES = {
    "send_and_receive": "Flower's own round: `send_and_receive`, an app that returns what it got, stock SuperNodes",
    "app": "our Flower app on stock SuperNodes, sites behind sockets",
    "ours": "the own runner, `coordinate` and `join`",
}


def page(document: dict[str, Any]) -> str:
    """What the site shows of it."""
    rows = []
    for way, values in document["seconds"].items():
        median, times = document["median_seconds"][way], document["times_of_flower"][way]
        rows.append(f"| {NAMES[way]} | {median:.2f} s | {min(values):.2f} to {max(values):.2f} s | {times} |")
    about = document["provenance"]
    head = ["| | median | range | relative to Flower's own |", "|---|---|---|---|"]
    said = (
        f"One exchange of {document['bytes'] // 1000} kB with {document['sites']} sites over TLS on loopback, "
        f"{about['cores']} cores, flwr {about['flwr']} (`{about['command']}`)."
    )
    return "\n".join([said, "", *head, *rows, ""])


def main(exchanges: int, size: int, out: Path) -> None:
    samples: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    load = [os.getloadavg()[0]]
    for way in [*SETUPS, *reversed(SETUPS)]:
        with tempfile.TemporaryDirectory() as place:
            seconds = measure(way, exchanges, size, Path(place))
        first.setdefault(way, []).append(seconds[0])
        samples.setdefault(way, []).extend(seconds[1:])
        print(f"{way:18} median {statistics.median(seconds[1:]):.2f} s  {seconds}", flush=True)
        load.append(os.getloadavg()[0])
    document = {
        "provenance": provenance(f"python benchmarks/flower.py --exchanges {exchanges} --bytes {size}")
        | {"flwr": version("flwr"), "cores": os.cpu_count(), "machine": platform.machine(), "load": load},
        "bytes": size,
        "sites": 3,
        "median_seconds": {way: round(statistics.median(values), 3) for way, values in samples.items()},
        "times_of_flower": {
            way: round(statistics.median(values) / statistics.median(samples["send_and_receive"]), 3)
            for way, values in samples.items()
        },
        "seconds": samples,
        "first_seconds": first,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(document))
    print(f"{out}: {document['median_seconds']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "flower.json")
    words = parser.parse_args()
    main(words.exchanges, words.bytes, words.out)
