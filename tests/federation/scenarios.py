"""Faults inflicted from within, at an exact step: what runs in the workers and in the coordinator of `fault_trials.py`.

A worker or the coordinator kills itself with SIGKILL, hangs, answers rubbish, or finds its disk full; the coordinator
kills the link, breaks the protocol (`attacks.py`), or sends its messages through random faults (`random_faults.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino import wire

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
DROPOUTS = 2
DEADLINE, ROUNDS = 15.0, 3
SITES = os.environ.get("SORDINO_SITES", "")
LIMITED = "limited"  # the folder of the sites of `stopped_runs.py`
BACK = -1  # with the one that died, if it is back in time, or without


class Scenario(NamedTuple):
    """at: the messages that the fault befalls, at `sites`; exchange: of the coordinator, where the fault is its own."""

    what: str
    do: str = ""
    at: tuple[tuple[str, int | None], ...] = (("round", 1),)
    sites: tuple[str, ...] = ("beta",)
    exchange: int = -1
    trust: str = "secure-aggregation"
    method: str = "dp-fedsofim"
    certificates: int = 6  # sites that end with one
    came: tuple[int, ...] = (6, 6, 6)  # sites in each round's sum; 0: not opened; (): as the random faults decide


PLAIN: dict[str, Any] = {"trust": "untrusted-server", "method": "dp-scaffold"}
REVEAL, OFFER = (("reveal", 1),), (("reveal", 1), ("offer", 2))
BOTH = (("round", 1), ("offer", 2))
TWO, THREE = ("beta", "gamma"), ("beta", "gamma", "delta")
SECURE = {
    "uninterrupted": Scenario("nothing happens"),
    "site-killed-mid-round": Scenario("kill -9 of a site as a round's message comes", "kill", came=(6, 5, BACK)),
    "site-killed-after-charge": Scenario("kill -9 between charge and reply", "kill-after", came=(6, 5, BACK)),
    "site-killed-before-reveal": Scenario("kill -9 before the shares are revealed", "kill", REVEAL),
    "site-hangs": Scenario("a site answers after the deadline", "hang", came=(6, 5, 6)),
    "site-hangs-at-reveal": Scenario("a site reveals after the deadline", "hang", REVEAL),
    "one-drops-at-terms": Scenario("one site silent at the first offer", "silent", (("terms", None),)),
    "two-drop-at-terms": Scenario("two sites silent at the first offer", "silent", (("terms", None),), TWO),
    "three-drop-at-terms": Scenario("three sites silent at the first offer", "silent", (("terms", None),), THREE),
    "one-drops-at-round": Scenario("one site silent in a round", "silent", came=(6, 5, 6)),
    "two-drop-at-round": Scenario("two sites silent in a round", "silent", sites=TWO, came=(6, 4, 6)),
    "three-drop-at-round": Scenario("more silent than planned", "silent", sites=THREE, came=(6, 0, 6)),
    "one-drops-at-reveal": Scenario("one site silent before revealing", "silent", REVEAL),
    "two-drop-at-reveal": Scenario("two sites silent before revealing", "silent", REVEAL, TWO),
    "three-drop-at-reveal": Scenario(
        "more silent than planned before revealing", "silent", REVEAL, THREE, came=(6, 0, 6)
    ),
    "one-drops-at-offer": Scenario("one site's offer for the next round is missing", "silent", OFFER, came=(6, 6, 5)),
    "two-drop-at-offer": Scenario("two sites' offers are missing", "silent", OFFER, TWO, came=(6, 6, 4)),
    "three-drop-at-offer": Scenario("more offers missing than planned", "silent", OFFER, THREE, came=(6, 0, 0)),
    "one-drops-at-finish": Scenario("one site silent at the end", "silent", (("finish", None),)),
    "two-drop-at-finish": Scenario("two sites silent at the end", "silent", (("finish", None),), TWO),
    "disk-full": Scenario("the ledger cannot be written", "full", came=(6, 5, 6)),
    "clock-skew": Scenario("a site's clock goes a year back", "skew"),
    "rubbish": Scenario("bytes that are no message", "rubbish", came=(6, 5, 6)),
    "oversized": Scenario("a message ten times too long", "oversized", came=(6, 5, 6)),
    "replayed": Scenario("the last round's message once more", "replayed", came=(6, 5, 6)),
    "forged": Scenario("a masked vector that its site did not sign", "forged", came=(6, 5, 6)),
    "coordinator-killed-mid-round": Scenario("kill -9 of the coordinator in a round", "kill-after", exchange=3),
    "coordinator-killed-between": Scenario("kill -9 of the coordinator between two rounds", "kill", exchange=4),
    "link-killed": Scenario("kill -9 of the link in a round", "kill-link", exchange=5),
    "coordinator-disk-full": Scenario("the coordinator's disk is full for a round", "full", exchange=5),
    "two-coordinators": Scenario("a second coordinator in the same folder", "second", exchange=5),
    "partition": Scenario("a site is cut off for longer than the deadline", "cut", exchange=5, came=(6, BACK, BACK)),
    "clock-jump": Scenario(
        "a site's clock jumps by a day: it refuses what comes after", "jump", came=(6, 6, 5), certificates=5
    ),
    "restored-backup": Scenario(
        "an old backup of a site is put in its place, then the newest files", "restore", BOTH, came=(6, 6, 5, 6)
    ),
    "restored-backup-ftrl": Scenario(
        "the same with one stream of noise (dp-ftrl)", "restore", BOTH, method="dp-ftrl", came=(6, 6, 5, 6)
    ),
    "ftrl-killed-after-charge": Scenario(
        "kill -9 between charge and reply with one stream of noise (dp-ftrl)",
        "kill-after",
        method="dp-ftrl",
        came=(6, 5, BACK),
    ),
    "stopped-midway": Scenario(
        "a run with minibatches is stopped midway and stays charged as a whole: a second run is refused, a smaller one "
        "is trained",
        "stop",
        exchange=0,
        method="dp-fedgd",
    ),
    "hostile-server": Scenario("a server that breaks the protocol of masks", "attack"),
}
OPEN = {
    "open-uninterrupted": Scenario("nothing happens", **PLAIN),
    "open-nan": Scenario("NaN for a message", "nan", (("round", 2),), came=(6, 6, 5, 6), **PLAIN),
    "open-wrong-shape": Scenario("a message of another shape", "shape", (("round", 2),), came=(6, 6, 5, 6), **PLAIN),
    "open-coordinator-killed": Scenario("kill -9 of the coordinator in a round", "kill-after", exchange=3, **PLAIN),
    "open-hostile-server": Scenario("a server that breaks the terms", "attack", trust="untrusted-server"),
}
STORMS = {  # two of five in the open
    f"random-faults-{k:02}": Scenario("random faults", "random-faults", came=(), **(PLAIN if k % 5 in (1, 3) else {}))
    for k in range(100)
}
SCENARIOS = {**SECURE, **OPEN, **STORMS}


def as_expected(name: str, came: list[int]) -> bool:
    expected = SCENARIOS[name].came
    if not expected:
        return True
    return len(came) == len(expected) and all(
        found == wanted or (wanted == BACK and found >= len(NAMES) - 1)
        for found, wanted in zip(came, expected, strict=True)
    )


def notes() -> Path:
    return Path(os.environ["FAULTS"])


def once(name: str) -> bool:
    """True the first time, over all processes and their restarts."""
    try:
        os.close(os.open(notes() / f"once-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def current() -> tuple[str, Scenario]:
    name = (notes() / "current").read_text()
    return name, SCENARIOS.get(name, Scenario("nothing"))


# ------------------------------------------------------------------------------------------------- in a site's worker


def handle(request: bytes) -> bytes:
    from sordino.federation import handler

    name, scenario = current()
    me = os.environ["SORDINO_SITE"]
    os.environ["SORDINO_SITES"] = str(notes().parent / LIMITED) if scenario.do == "stop" else SITES
    message = (
        wire.decode(request) if request[:4] == wire.MAGIC and scenario.do not in ("attack", "random-faults") else None
    )
    if message is None:  # what comes may be rubbish
        return record(me, dying(me, lambda: handler.handle(request)))
    about = message.kind, message.fields.get("t")
    due = scenario.exchange < 0 and me in scenario.sites and about in scenario.at and bool(scenario.do)
    if not due or not once(f"{name}-{me}-{message.kind}-{about[1]}"):
        return record(me, handler.handle(request))
    return record(me, FAULTS[scenario.do](lambda: handler.handle(request)))


def dying(me: str, answer: Callable[[], bytes]) -> bytes:
    """As the random faults decide: at once, or about a charge; not at all if nothing is charged."""
    path = notes() / f"dying-{me}"
    if not path.exists():
        return answer()
    how = path.read_text()
    path.unlink()
    if how == "site restarted":
        return die(answer)
    from sordino.evidence.ledger import Ledger

    charge = Ledger.charge

    def charged(*args: Any) -> None:
        if how == "killed after its charge":
            charge(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    Ledger.charge = charged  # type: ignore[method-assign, assignment]
    try:
        return answer()
    finally:
        Ledger.charge = charge  # type: ignore[method-assign]


def record(me: str, reply: bytes) -> bytes:
    """What is about to leave the site, for the invariant."""
    found = wire.decode(reply) if reply[:4] == wire.MAGIC else wire.Message("rubbish", {}, {})
    line = {"kind": found.kind, "run": found.fields.get("run"), "t": found.fields.get("t")}
    with open(notes() / f"left-{me}.jsonl", "a") as file:
        file.write(json.dumps(line | {"digest": hashlib.sha256(reply).hexdigest()}) + "\n")
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


def noiseless(answer: Callable[[], bytes]) -> bytes:
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
    from sordino.evidence import ledger

    ledger._now = lambda: "2025-01-01T00:00:00+00:00"  # type: ignore[assignment]
    return answer()


def jump(answer: Callable[[], bytes]) -> bytes:
    """For the rest of this scenario, the process's own clock is a day ahead."""
    real, current = time.time, notes() / "current"
    scenario = current.read_text()
    time.time = lambda: real() + (86_400.0 if current.read_text() == scenario else 0.0)
    return answer()


def restore_old(answer: Callable[[], bytes]) -> bytes:
    """Answer, and put a backup from before in the place of the folder's files. The next time, put the newest back."""
    from sordino.federation import handler
    from sordino.operations import backups

    folder = handler.file().parent
    aside = notes() / f"newest-{os.environ['SORDINO_SITE']}"
    if aside.exists():
        try:
            return answer()  # a site whose ledger was put back does not start, so this raises
        finally:
            _swap(aside, folder)
            shutil.rmtree(aside)
            handler.site.cache_clear()
    old, archive = notes() / "restored", notes() / "backup.tar"
    backups.backup(folder, archive)
    reply = answer()
    shutil.copytree(folder, aside)
    backups.restore(archive, old)
    _swap(old, folder)
    shutil.rmtree(old)
    archive.unlink()
    handler.site.cache_clear()
    return reply


def _swap(source: Path, folder: Path) -> None:
    """Put the ledger and the runs of one folder in the place of another's."""
    for path in folder.glob("ledger.db*"):
        path.unlink()
    shutil.rmtree(folder / "runs")
    for path in source.glob("ledger.db*"):
        shutil.copy(path, folder / path.name)
    shutil.copytree(source / "runs", folder / "runs")


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
    "silent": noiseless,
    "full": full,
    "skew": skew,
    "jump": jump,
    "restore": restore_old,
    "rubbish": lambda answer: (answer(), b"\x93NUMPY rubbish" * 100)[1],
    "oversized": changed(other_arrays(lambda data: np.tile(data, 10))),
    "replayed": changed(lambda message: message._replace(fields={**message.fields, "t": 0}, arrays={})),
    "forged": changed(other_arrays(flipped)),
    "nan": changed(other_arrays(lambda data: data * np.nan)),
    "shape": changed(other_arrays(lambda data: data[:3] if data.ndim else data)),
}


# --------------------------------------------------------------------------------------------- in the coordinator's


class Counting:
    """A transport that kills its process or the link at a given exchange, before or after it; or fills its disk, cuts
    a site off, or starts another coordinator."""

    def __init__(self, transport: Any, name: str, scenario: Scenario, place: Path) -> None:
        self.transport, self.name, self.scenario, self.count, self.place = transport, name, scenario, 0, place

    def sites(self) -> list[int]:
        return list(self.transport.sites())

    def exchange(self, requests: Any, seconds: float, enough: Any = None) -> Any:
        self.count += 1
        due = self.count == self.scenario.exchange and once(f"{self.name}-coordinator")
        if due and self.scenario.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if due and self.scenario.do == "full":  # until it ends
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if due and self.scenario.do == "second":
            self._second()
        if due and self.scenario.do == "cut":
            self._cut("beta")
        if due and self.scenario.do == "kill-link":
            os.kill(int((notes() / "link.pid").read_text()), signal.SIGKILL)
        found = self.transport.exchange(requests, seconds, enough)
        if due and self.scenario.do == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def _second(self) -> None:
        """Start another coordinator in this folder, as a process: it must be refused."""
        code = "import sys; from pathlib import Path; from sordino.federation import coordinator as c"
        code += "; c.LOCK_SECONDS = 0.5; c.serve(None, Path(sys.argv[1]))"
        done = subprocess.run(
            [sys.executable, "-c", code, str(self.place)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 or "in use by another coordinator" not in done.stderr:
            raise RuntimeError(f"a second coordinator was not refused: {done.stderr}")

    def _cut(self, site: str) -> None:
        """Stop the node of a site for longer than the deadline, as a partition does."""
        number = int((notes() / f"node-{site}.pid").read_text())
        os.kill(number, signal.SIGSTOP)
        timer = threading.Timer(DEADLINE + 5, os.kill, (number, signal.SIGCONT))
        timer.daemon = True
        timer.start()


def serve(transport: Any, folder: Path) -> None:
    """All the runs in `folder`, one after another, from wherever they stand."""
    for place in sorted(path for path in folder.iterdir() if (path / "federation.toml").exists()):
        if not ((place / "run" / "certificate.json").exists() or (place / "attacks.json").exists()):
            name = place.name.partition("-")[2]
            (notes() / "current").write_text(name)
            try:
                undergo(transport, place, name)
            except OSError:
                if SCENARIOS[name].do != "full" or SCENARIOS[name].exchange < 0:
                    (notes() / "failed").write_text(f"{name}: {traceback.format_exc()}")
                    raise
                os._exit(74)  # as `server.py` ends the coordinator of a folder
            except Exception:
                if SCENARIOS[name].do != "kill-link":
                    (notes() / "failed").write_text(f"{name}: {traceback.format_exc()}")
                raise
    (folder / "done").touch()


def undergo(transport: Any, place: Path, name: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import stopped_runs
    from eavesdrop import attack
    from random_faults import run_with_faults

    from sordino.federation import coordinator

    if SCENARIOS[name].do == "attack":
        attack(transport, place)
    elif SCENARIOS[name].do == "random-faults":
        run_with_faults(transport, place, name, notes(), [place.parents[1] / "federation" / site for site in NAMES])
    elif SCENARIOS[name].do == "stop":
        stopped_runs.undergo(transport, place, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        coordinator.serve(Counting(transport, name, SCENARIOS[name], place), place)
