"""Faults and attacks over real processes: a link, SuperNodes, site workers and a coordinator on loopback.

One federation of six sites (any two may drop out, any one may collude) runs every scenario of `scenarios.py`, one after
another; whoever died is started again from here. After each, every site's ledger is held against what left it:
`spent >= released`.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "flower"))
import stopped_runs
from eavesdrop import singled_out
from fixtures import LocalFolders
from scenarios import DEADLINE, DROPOUTS, LIMITED, NAMES, SCENARIOS, as_expected
from unknown_sites import try_all

import sordino
from sordino.data.sources import load
from sordino.evidence.charges import charges
from sordino.federation.config import SiteConfig
from sordino.federation.flower import NODES
from sordino.federation.flower.commands import environment, server_command, superlink_command
from sordino.federation.flower.processes import LocalFederation, listening
from sordino.federation.site import Site
from sordino.federation.terms import Terms
from sordino.training.artifacts import load_model

VICTIM = "alpha"  # one of its records is singled out
QUICK = (
    *("uninterrupted", "site-killed-mid-round", "coordinator-killed-mid-round", "three-drop-at-round"),
    *("hostile-server", "open-hostile-server", "random-faults-00", "random-faults-01"),
)


def run(
    folder: Path, names: tuple[str, ...], tell: Callable[[str], None] = lambda text: None, unknown_sites: bool = False
) -> dict[str, Any]:
    """All scenarios in one federation, and unknown sites at its link; what became of each."""
    federation, places, notes = prepared(folder, names)
    paths = f"{Path(__file__).parent}{os.pathsep}{Path(sordino.__file__).parents[1]}"
    here = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FAULTS": str(notes)}
    server = {"SORDINO_FOLDER": str(places), "SORDINO_SERVE": "scenarios:serve", **here}
    site = {"SORDINO_SITES": str(federation.folder), **here}
    restarts: Counter[str] = Counter()
    began = time.monotonic()
    with LocalFederation(folder / "flower", NAMES, handler="scenarios:handle", server=server, site=site) as running:
        started = time.monotonic() - began
        (notes / "link.pid").write_text(str(running.processes["link"].pid))
        for name in NAMES:
            (notes / f"node-{name}.pid").write_text(str(running.processes[f"node-{name}"].pid))
        met = try_all(running, NAMES[0]) if unknown_sites else {}
        running.run()
        known = ""
        while not (places / "done").exists():
            now = (notes / "current").read_text() if (notes / "current").exists() else ""
            if now != known:
                known, since = now, time.monotonic()
                tell(f"{since - began:.0f} s: {now}")
            for name, process in list(running.processes.items()):
                if process.poll() is not None:
                    restarts[name.partition("-")[0]] += 1
                    tell(f"  {name} died; starting it again")
                    restart(running, name, server, notes)
            if (notes / "failed").exists():
                raise RuntimeError((notes / "failed").read_text())
            if time.monotonic() - began > 90 * len(names) + 120:
                raise TimeoutError(f"the scenario {now} did not end")
            time.sleep(0.2)
    found = {name: outcome(federation, places / f"{k:03}-{name}", notes) for k, name in enumerate(names)}
    violations = (notes / "violations.jsonl").read_text() if (notes / "violations.jsonl").exists() else ""
    seen = (notes / "random_faults.jsonl").read_text().splitlines() if (notes / "random_faults.jsonl").exists() else []
    faults = sum((Counter(json.loads(line)) for line in seen), Counter())
    about = {"start_s": started, "seconds": time.monotonic() - began, "restarts": dict(restarts)}
    return {
        **about,
        "random_faults": dict(faults),
        "violations": violations.splitlines(),
        "unknown_sites": met,
        "runs": found,
    }


def prepared(folder: Path, names: tuple[str, ...]) -> tuple[LocalFolders, Path, Path]:
    """The sites' folders, one of a coordinator for each scenario, and one for notes."""
    base = {"method": "dp-fedsofim", "epsilon": 8.0, "delta": 1e-5}
    federation = LocalFolders(
        folder / "federation", base, names=NAMES, tiny=True, dropouts=DROPOUTS, deadline=DEADLINE, patience=120.0
    )
    for name in NAMES:
        federation.configure(name, epsilon=1000.0)
    stopped_runs.LimitedSites(folder / LIMITED).copy(federation)
    places, notes = folder / "coordinators", folder / "notes"
    notes.mkdir()
    (notes / "current").write_text("")
    victim = load(str(federation.place(VICTIM) / "data.npz")).x_train[0]
    for k, name in enumerate(names):
        place, scenario = places / f"{k:03}-{name}", SCENARIOS[name]
        shutil.copytree(federation.coordinator, place)
        spec = {**base, "method": scenario.method, "trust": scenario.trust}
        (place / "spec.toml").write_text(tomli_w.dumps(spec | {"rounds": len(scenario.came) or 3}))
        np.save(place / "victim.npy", victim)
    return federation, places, notes


def restart(running: LocalFederation, name: str, server: dict[str, str], notes: Path) -> None:
    """As whoever looks after the machine would."""
    nodes = running.folder / "keys" / "nodes.json"
    if name == "server":
        command = server_command(running.address, running.tls.authority, running.secret)
        running.start("server", command, environment(running.folder / "home", {NODES: str(nodes), **server}))
        running.run()
    elif name.startswith("worker-"):
        running.start_worker(name.removeprefix("worker-"))
    elif name.startswith("node-"):
        running.start_node(name.removeprefix("node-"))
        (notes / f"{name}.pid").write_text(str(running.processes[name].pid))
    else:  # a link without a database has forgotten its sites
        port = int(running.address.rpartition(":")[2])
        link = running.start("link", superlink_command(running.tls, running.secret, port=port), running.env)
        (notes / "link.pid").write_text(str(link.pid))
        running.wait(lambda: listening(port), 60, "link")
        running.register()
        running.run()


# ---------------------------------------------------------------------------------------------------- what came of it


def outcome(federation: LocalFolders, place: Path, notes: Path) -> dict[str, Any]:
    """What a scenario came to, and whether the invariant holds."""
    scenario = SCENARIOS[place.name.partition("-")[2]]
    sites = stopped_runs.LimitedSites(notes.parent / LIMITED) if scenario.do == "stop" else federation
    terms = Terms.read((place / "run" / "terms.json").read_text())
    certs = [sites.place(n) / "runs" / terms.run / "certificate.json" for n in terms.names]
    epsilons = [json.loads(path.read_text())["epsilon"] for path in certs if path.exists()]
    about = {"what": scenario.what, "trust": scenario.trust, "site_certificates": len(epsilons)}
    about |= {"epsilon": max(epsilons, default=None)}
    about |= {"unpaid": sum(unpaid(sites, terms, name, notes) for name in terms.names)}
    if isinstance(sites, stopped_runs.LimitedSites):
        stopped = stopped_runs.stopped_terms(place)
        about["unpaid"] += sum(unpaid(sites, stopped, name, notes) for name in terms.names)
        about["wrong"] = stopped_runs.problems(sites, place)
    if scenario.do == "attack":
        return about | attacked(federation, place, terms)
    lines = [json.loads(line) for line in (place / "run" / "progress.jsonl").read_text().splitlines()]
    rounds = {line["t"]: line for line in lines if line["what"] == "round"}
    _, theta, *_ = load_model(place / "run" / "model.safetensors")
    ended = [line["sites"] for line in lines if line["what"] == "finished"]
    return about | {
        "finished": len(ended[-1]) if ended else 0,  # sites that told the coordinator that they have their certificate
        "came": [len(rounds[t]["came"]) for t in sorted(rounds)],
        "abandoned": sorted({line["t"] for line in lines if line["what"] == "abandoned"}),
        "seconds": rounds[max(rounds)]["seconds"],
        "model": float(theta.double().norm()),
    }


def problems(name: str, run: dict[str, Any]) -> list[Any]:
    """What is otherwise than it must be."""
    found = list(run.get("wrong", []))
    if run["unpaid"]:
        found.append(f"{run['unpaid']} unpaid")
    # Random faults may hit every attempt to tell a site that the run is over. Then it has no certificate, and the
    # coordinator does not count it among those that have.
    fewest = run.get("finished", 0) if SCENARIOS[name].do == "random-faults" else SCENARIOS[name].certificates
    if not fewest <= run["site_certificates"] <= SCENARIOS[name].certificates:
        found.append(f"{run['site_certificates']} certificates")
    if "came" in run and not as_expected(name, run["came"]):
        found.append(f"came {run['came']}, not {SCENARIOS[name].came}")
    return found


def charged(federation: LocalFolders | stopped_runs.LimitedSites, terms: Terms, name: str) -> list[tuple[Any, ...]]:
    book = sqlite3.connect(federation.place(name) / "ledger.db")
    words = "SELECT round, query, sensitivity, std, times FROM entries WHERE plan = ? ORDER BY seq"
    rows = book.execute(words, (terms.run,)).fetchall()
    book.close()
    return rows


def unpaid(federation: LocalFolders | stopped_runs.LimitedSites, terms: Terms, name: str, notes: Path) -> int:
    """Rounds that left a site without standing in its ledger once and as planned, or that were charged twice."""
    path = notes / f"left-{name}.jsonl"
    left = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    released = {line["t"] for line in left if line["kind"] == "update" and line["run"] == terms.run}
    rows, bad = charged(federation, terms, name), 0
    for t in released:
        planned = charges(terms.plan, terms.names.index(name), t, terms.run)
        bad += sorted(r[1:] for r in rows if r[0] == t) != sorted(
            (e.query, e.sensitivity, e.std, e.times) for e in planned
        )
    return bad + (len({row[:2] for row in rows}) != len(rows))


def attacked(federation: LocalFolders, place: Path, terms: Terms) -> dict[str, Any]:
    """What was tried, how often it was answered otherwise than it must be, and how far a record moved an answer."""
    found = json.loads((place / "attacks.json").read_text())
    wrong = [one for one in found["tries"] if one["answer"] != one["expected"]]
    paid = {name: sorted({row[0] for row in charged(federation, terms, name)}) for name in NAMES}
    wrong += [
        {"what": "charges", "site": n, "answer": rounds}
        for n, rounds in paid.items()
        if rounds != found["seen"]["charged"]
    ]
    out = {"tries": len(found["tries"]), "kinds": len({one["what"] for one in found["tries"]}), "wrong": wrong}
    if requests := found["seen"]["messages"]:
        asked = [bytes.fromhex(request) for request, _ in requests]
        answers = [bytes.fromhex(said[VICTIM]) for _, said in requests]
        moved = singled_out(federation, VICTIM, terms, asked, answers, neighbour(federation, place))
        out |= {"moved_of_sensitivity": moved, "wrong": wrong + [m for m in moved if not m <= 1 + 1e-3]}
    return out


def neighbour(federation: LocalFolders, place: Path) -> Site:
    """The victim's site with another record in its place."""
    here, there = federation.place(VICTIM), place / VICTIM
    there.mkdir()
    for name in ("site.toml", "identity.key", "roster.toml"):
        shutil.copy(here / name, there / name)
    with np.load(here / "data.npz") as stored:
        x, y = stored["x"], stored["y"]
    row = int(np.flatnonzero((x == np.load(place / "victim.npy")).all(1))[0])
    x[row], y[row] = -100 * x[row], (y[row] + 1) % 3
    np.savez(there / "data.npz", x=x, y=y)
    with (there / "site.toml").open(
        "a", encoding="utf-8"
    ) as file:  # the site's own witness would refuse an empty ledger
        file.write('\nwitness = "witness.json"\n')
    return Site(SiteConfig.read(there / "site.toml"))
