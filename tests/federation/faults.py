"""Faults and attacks over real processes: a link, SuperNodes, site workers and a coordinator on loopback.

One federation of four sites (any one may drop out, any one may collude) runs every scenario after another. Faults are
inflicted from within, at an exact step: a worker or the coordinator kills itself with SIGKILL, hangs, answers rubbish,
or finds its disk full; whoever died is started again from outside. After each scenario every site's ledger is held
against what left it: `spent >= released`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import wire

NAMES = ("alpha", "beta", "gamma", "delta")
DEADLINE, ROUNDS = 15.0, 3
BACK = -1  # with the one that died, if it is back in time, or without


class Scenario(NamedTuple):
    """kind, t: the letter that the fault befalls, at `site`; or the exchange of the coordinator."""

    what: str
    do: str = ""
    kind: str = "round"
    t: int = 1
    sites: tuple[str, ...] = ("beta",)
    exchange: int = -1  # of the coordinator's own
    trust: str = "secure-aggregation"
    method: str = "dp-fedsofim"
    came: tuple[int, ...] = (4, 4, 4)  # sites in each round's sum; 0: not opened


SECURE = {
    "uninterrupted": Scenario("nothing happens"),
    "site-killed-mid-round": Scenario("kill -9 of a site as a round's letter comes", "kill", came=(4, 3, BACK)),
    "site-killed-after-charge": Scenario("kill -9 between charge and reply", "kill-after", came=(4, 3, BACK)),
    "site-killed-before-reveal": Scenario("kill -9 before the shares are revealed", "kill", "reveal"),
    "site-hangs": Scenario("a site answers after the deadline", "hang", came=(4, 3, 4)),
    "site-hangs-at-reveal": Scenario("a site reveals after the deadline", "hang", "reveal"),
    "two-drop-out": Scenario("more sites fail than planned", "silent", sites=("beta", "gamma"), came=(4, 0, 4)),
    "two-drop-out-at-reveal": Scenario(
        "more fail before revealing", "silent", "reveal", sites=("beta", "gamma"), came=(4, 0, 4)
    ),
    "disk-full": Scenario("the ledger cannot be written", "full", came=(4, 3, 4)),
    "clock-skew": Scenario("a site's clock goes a year back", "skew"),
    "rubbish": Scenario("bytes that are no message", "rubbish", came=(4, 3, 4)),
    "oversized": Scenario("a message ten times too long", "oversized", came=(4, 3, 4)),
    "replayed": Scenario("the last round's message once more", "replayed", came=(4, 3, 4)),
    "forged": Scenario("a masked vector that its site did not sign", "forged", came=(4, 3, 4)),
    "coordinator-killed-mid-round": Scenario("kill -9 of the coordinator in a round", "kill-after", exchange=3),
    "coordinator-killed-between": Scenario("kill -9 of the coordinator between two rounds", "kill", exchange=4),
}
PLAIN = {
    "plain-uninterrupted": Scenario("nothing happens", trust="untrusted-server", method="dp-scaffold"),
    "plain-nan": Scenario(
        "NaN for a message", "nan", trust="untrusted-server", method="dp-scaffold", t=2, came=(4, 4, 3, 4)
    ),
    "plain-wrong-shape": Scenario(
        "a message of another shape", "shape", trust="untrusted-server", method="dp-scaffold", t=2, came=(4, 4, 3, 4)
    ),
    "plain-coordinator-killed": Scenario(
        *("kill -9 of the coordinator in a round", "kill-after"),
        **{"exchange": 3, "trust": "untrusted-server", "method": "dp-scaffold"},
    ),
}
SCENARIOS = {**SECURE, **PLAIN}
QUICK = ("uninterrupted", "site-killed-mid-round", "coordinator-killed-mid-round", "two-drop-out")


def as_expected(name: str, came: list[int]) -> bool:
    return len(came) == len(SCENARIOS[name].came) and all(
        found == expected or (expected == BACK and found >= 3)
        for found, expected in zip(came, SCENARIOS[name].came, strict=True)
    )


def once(name: str) -> bool:
    """True the first time, over all processes and their restarts."""
    try:
        os.close(os.open(Path(os.environ["FAULTS"]) / f"once-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def current() -> tuple[str, Scenario]:
    name = (Path(os.environ["FAULTS"]) / "current").read_text()
    return name, SCENARIOS.get(name, Scenario("nothing"))


# ------------------------------------------------------------------------------------------------- in a site's worker


def handle(letter: bytes) -> bytes:
    from sordino.federation import handler

    name, scenario = current()
    me, message = os.environ["SORDINO_SITE"], wire.decode(letter)
    due = scenario.exchange < 0 and me in scenario.sites and message.kind == scenario.kind
    due = due and message.fields.get("t") == scenario.t and bool(scenario.do)
    if not due or not once(f"{name}-{me}"):
        return record(me, message, handler.handle(letter))
    return record(me, message, FAULTS[scenario.do](lambda: handler.handle(letter)))


def record(me: str, asked: wire.Message, reply: bytes) -> bytes:
    """What left the site, for the invariant."""
    found = wire.decode(reply) if reply[:4] == wire.MAGIC else wire.Message("rubbish", {}, {})
    line = {"asked": asked.kind, "t": asked.fields.get("t"), "run": asked.fields.get("run"), "kind": found.kind}
    with open(Path(os.environ["FAULTS"]) / f"left-{me}.jsonl", "a") as file:
        file.write(json.dumps(line | {"code": found.fields.get("code")}) + "\n")
    return reply


def die(answer: Callable[[], bytes]) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def die_after(answer: Callable[[], bytes]) -> bytes:
    answer()
    return die(answer)


def hang(answer: Callable[[], bytes]) -> bytes:
    time.sleep(DEADLINE + 4)
    return answer()


def silent(answer: Callable[[], bytes]) -> bytes:
    time.sleep(DEADLINE + 1)
    raise RuntimeError("says nothing")


def full(answer: Callable[[], bytes]) -> bytes:
    """No file may grow: what a full disk does to a ledger."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        return answer()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def skew(answer: Callable[[], bytes]) -> bytes:
    from sordino.privacy import ledger

    ledger._now = lambda: "2025-01-01T00:00:00+00:00"  # type: ignore[assignment]
    return answer()


def changed(change: Callable[[wire.Message], wire.Message]) -> Callable[[Callable[[], bytes]], bytes]:
    return lambda answer: wire.encode(*change(wire.decode(answer())))


def other_arrays(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[wire.Message], wire.Message]:
    return lambda message: message._replace(arrays={key: make(value) for key, value in message.arrays.items()})


def flipped(data: np.ndarray) -> np.ndarray:
    data = data.copy()
    data[-100] ^= 1
    return data


FAULTS: dict[str, Callable[[Callable[[], bytes]], bytes]] = {
    "kill": die,
    "kill-after": die_after,
    "hang": hang,
    "silent": silent,
    "full": full,
    "skew": skew,
    "rubbish": lambda answer: (answer(), b"\x93NUMPY rubbish" * 100)[1],
    "oversized": changed(other_arrays(lambda data: np.tile(data, 10))),
    "replayed": changed(lambda message: message._replace(fields={**message.fields, "t": 0}, arrays={})),
    "forged": changed(other_arrays(flipped)),
    "nan": changed(other_arrays(lambda data: data * np.nan)),
    "shape": changed(other_arrays(lambda data: data[:3] if data.ndim else data)),
}


# --------------------------------------------------------------------------------------------- in the coordinator's


class Counting:
    """A transport that kills its process at a given exchange, before or after it."""

    def __init__(self, transport: Any, name: str, scenario: Scenario) -> None:
        self.transport, self.name, self.scenario, self.count = transport, name, scenario, 0

    def sites(self) -> list[int]:
        return list(self.transport.sites())

    def exchange(self, letters: Any, seconds: float, enough: Any = None) -> Any:
        self.count += 1
        due = self.count == self.scenario.exchange and once(f"{self.name}-coordinator")
        if due and self.scenario.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        found = self.transport.exchange(letters, seconds, enough)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def serve(transport: Any, folder: Path) -> None:
    from sordino.federation import coordinator

    for place in sorted(path for path in folder.iterdir() if (path / "federation.toml").exists()):
        if (place / "run" / "certificate.json").exists():
            continue
        name = place.name.partition("-")[2]
        (Path(os.environ["FAULTS"]) / "current").write_text(name)
        coordinator.serve(Counting(transport, name, SCENARIOS[name]), place)
    (folder / "done").touch()


# ------------------------------------------------------------------------------------------------------- from outside


def run(folder: Path, names: tuple[str, ...], tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All scenarios in one federation; what became of each."""
    import tomli_w

    from sordino.engines.flower.processes import Federation

    sys.path.insert(0, str(Path(__file__).parent))
    from worlds import World

    base = {"method": "dp-fedsofim", "rounds": ROUNDS, "epsilon": 8.0, "delta": 1e-5, "trust": "secure-aggregation"}
    world = World(folder / "world", base, names=NAMES, dropouts=1, deadline=DEADLINE, patience=120.0)
    for name in NAMES:
        world.configure(name, epsilon=1000.0)
    places, notes = folder / "coordinators", folder / "notes"
    notes.mkdir()
    for k, name in enumerate(names):
        place, scenario = places / f"{k:02}-{name}", SCENARIOS[name]
        shutil.copytree(world.coordinator, place)
        spec = {**base, "method": scenario.method, "trust": scenario.trust}
        (place / "spec.toml").write_text(tomli_w.dumps(spec | {"rounds": len(scenario.came)}))
    here = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "FAULTS": str(notes)}
    server = {"SORDINO_FOLDER": str(places), "SORDINO_SERVE": "faults:serve", **here}
    site = {"SORDINO_SITES": str(world.folder), **here}
    restarts, began = [], time.monotonic()
    with Federation(folder / "flower", NAMES, handler="faults:handle", server=server, site=site) as running:
        started = time.monotonic() - began
        running.run()
        while not (places / "done").exists():
            for name, process in list(running.processes.items()):
                if process.poll() is not None:
                    restarts.append(name)
                    tell(f"{name} died in {(notes / 'current').read_text()}; starting it again")
                    restart(running, name, server)
            if time.monotonic() - began > 60 * len(names) + 120:
                raise TimeoutError(f"the scenario {(notes / 'current').read_text()} did not end")
            time.sleep(0.2)
    found = {name: outcome(world, places / f"{k:02}-{name}", notes) for k, name in enumerate(names)}
    return {"start_s": started, "seconds": time.monotonic() - began, "restarts": restarts, "runs": found}


def restart(running: Any, name: str, server: dict[str, str]) -> None:
    from sordino.engines.flower.processes import environment, server_command

    if name == "server":
        command = server_command(running.address, running.tls.authority, running.secret)
        running.start("server", command, environment(running.folder / "home", server))
        running.run()
    elif name.startswith("worker-"):
        running.start_worker(name.removeprefix("worker-"))
    else:
        raise RuntimeError(f"{name} died of itself; see {running.log(name)}")


def outcome(world: Any, place: Path, notes: Path) -> dict[str, Any]:
    """What a scenario came to, and whether the invariant holds."""
    from sordino.experiments.outcome import load_model
    from sordino.federation.terms import Terms

    terms = Terms.read((place / "run" / "terms.json").read_text())
    lines = [json.loads(line) for line in (place / "run" / "progress.jsonl").read_text().splitlines()]
    rounds = {line["t"]: line for line in lines if line["what"] == "round"}
    certs = [world.place(n) / "runs" / terms.run / "certificate.json" for n in terms.names]
    epsilons = [json.loads(path.read_text())["epsilon"] for path in certs if path.exists()]
    _, theta, *_ = load_model(place / "run" / "model.safetensors")
    return {
        "what": SCENARIOS[place.name.partition("-")[2]].what,
        "came": [len(rounds[t]["came"]) for t in sorted(rounds)],
        "abandoned": [line["t"] for line in lines if line["what"] == "abandoned"],
        "seconds": lines[-1].get("seconds") or rounds[max(rounds)]["seconds"],
        "site_certificates": len(epsilons),
        "epsilon": max(epsilons, default=None),
        "unpaid": sum(unpaid(world, terms, name, notes) for name in terms.names),
        "model": float(theta.double().norm()),
    }


def unpaid(world: Any, terms: Any, name: str, notes: Path) -> int:
    """Rounds that left a site without standing in its ledger, once and as planned."""
    path = notes / f"left-{name}.jsonl"
    left = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    released = {line["t"] for line in left if line["run"] == terms.run and line["asked"] == "round"}
    released -= {line["t"] for line in left if line["kind"] == "refused" and line["run"] == terms.run}
    site = world.site(name)
    mine = terms.names.index(name)
    with site.ledger() as ledger:
        rows = [row for row in ledger.rows() if row.plan == terms.run]
    bad = 0
    for t in released:
        planned = sorted((e.query, e.sensitivity, e.std, e.times) for e in terms.plan.entries(mine, t, terms.run))
        bad += sorted((r.query, r.sensitivity, r.std, r.times) for r in rows if r.round == t) != planned
    return bad + (len({(r.round, r.query) for r in rows}) != len(rows))
