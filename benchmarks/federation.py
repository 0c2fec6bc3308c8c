"""What a round costs, by the number of sites: computing at a site and at the server, and bytes; results/federation.md.

Measured in one process, without a network: `secagg` as it is, and the coordinator's reading and adding of plain
messages, with 10, 30 and 100 sites. In the open, 1,000 and 100,000 sites are derived: the server reads one message per
site. With more than 256 sites under secure aggregation, see secagg.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from provenance import provenance
from sordino import secagg, wire

RESULTS = Path(__file__).resolve().parents[1] / "results"
DIMENSION = 10_000
MEASURED, DERIVED = (10, 30, 100), (1000, 100_000)


def secure(sites: int, dimension: int) -> dict[str, float]:
    """Seconds and bytes of one site, and of the server, in a round in which a tenth drops out."""
    rng = np.random.default_rng(0)
    names = [f"s{k}" for k in range(sites)]
    identities = [secagg.Identity.make(name) for name in names]
    roster = secagg.Roster(tuple(identity.card for identity in identities))
    session = secagg.Session.of("bench", roster, "0" * 64, sites // 10, 1)
    members = [secagg.Member(identity, session, rng.bytes(32)) for identity in identities]
    vectors = [rng.integers(0, 2**32, dimension, dtype=np.uint32) for _ in names]
    clock = Clock()
    offers = {m.name: clock("offer", lambda m=m: secagg.offer(m, 0)) for m in members}
    alive = members[: session.threshold]
    few = alive[:3]  # timed; the others are masked all the same
    masked = {
        m.name: (clock if m in few else Clock())("masked", lambda m=m, v=v: secagg.masked(m, 0, offers, v))
        for m, v in zip(alive, vectors, strict=False)
    }
    seals, survivors = secagg.seals(session, 0, masked), sorted(masked)
    agreed = {
        m.name: (clock if m in few else Clock())("confirm", lambda m=m: secagg.confirm(m, 0, offers, survivors, seals))
        for m in alive
    }
    reveals = {
        m.name: (clock if m in few else Clock())("reveal", lambda m=m: secagg.reveal(m, 0, offers, survivors, agreed))
        for m in alive
    }
    total = clock("server", lambda: secagg.open_sum(session, 0, offers, masked, reveals))
    expected = np.sum(vectors[: session.threshold], 0, dtype=np.uint32)
    assert (total == expected).all()
    mean = {key: float(np.mean(values)) for key, values in clock.seconds.items()}
    sent = len(offers["s0"]) + len(masked["s0"]) + len(reveals["s0"])
    got = 4 * dimension + sum(map(len, offers.values()))
    site = mean["offer"] + mean["masked"] + mean["confirm"] + mean["reveal"]
    return {"site_s": site, "server_s": mean["server"], "sent_bytes": sent, "received_bytes": got}


def plain(sites: int, dimension: int) -> dict[str, float]:
    """The server reads and adds; a site sends its message as it is."""
    message_bytes = wire.encode("said", {"t": 0}, {"said0": np.zeros(dimension, np.float32)})
    began, total = time.perf_counter(), torch.zeros(dimension)
    for _ in range(sites):
        message = wire.to_tree(0, wire.decode(message_bytes).arrays, "said")
        assert bool(torch.isfinite(message).all())
        total += 0.5 * message
    return {
        "site_s": 0.0,
        "server_s": time.perf_counter() - began,
        "sent_bytes": len(message_bytes),
        "received_bytes": 4 * dimension,
    }


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, what: str, compute: Any) -> Any:
        began = time.perf_counter()
        result = compute()
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)
        return result


def report(document: dict[str, Any]) -> str:
    lines = [
        "# What a round costs, by the number of sites",
        "",
        f"`python benchmarks/federation.py`: {document['dimension']:,} numbers on one core. Under secure aggregation a "
        "tenth of the sites drops out, and all pairs share masks. Above 256 sites they mask along a graph, which "
        "`python benchmarks/secagg.py --many` measures. Not counted: a site's gradients, and the network.",
        "",
        "| sites | trust | computing at a site | at the server | sent by a site | received by a site |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in document["runs"]:
        derived = " (derived)" if row["derived"] else ""
        lines.append(
            f"| {row['sites']:,}{derived} | {row['trust']} | {row['site_s']:.3g} s | {row['server_s']:.3g} s "
            f"| {row['sent_bytes'] / 1e3:,.0f} kB | {row['received_bytes'] / 1e3:,.0f} kB |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=list(MEASURED))
    parser.add_argument("--out", type=Path, default=RESULTS / "federation.json")
    words = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for sites in words.sites:
        for trust, measure in (("untrusted-server", plain), ("secure-aggregation", secure)):
            runs.append({"sites": sites, "trust": trust, "derived": False, **measure(sites, DIMENSION)})
            print(runs[-1], flush=True)
    last = [run for run in runs if run["trust"] == "untrusted-server"][-1]
    for sites in DERIVED:
        runs.append({**last, "sites": sites, "derived": True, "server_s": last["server_s"] * sites / last["sites"]})
    out = {"provenance": provenance("python benchmarks/federation.py"), "dimension": DIMENSION, "runs": runs}
    words.out.write_text(json.dumps(out, indent=1) + "\n")
    words.out.with_suffix(".md").write_text(report(out))
    print(report(out))


if __name__ == "__main__":
    main()
