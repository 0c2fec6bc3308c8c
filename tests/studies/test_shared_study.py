"""Optuna's search by several workers on one storage: no trial counts twice, and a worker that dies is replaced."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sordino.errors import SordinoError
from sordino.studies import shared_study
from sordino.studies.shared_study import _opened, search
from sordino.studies.sweep import sweep

optuna = pytest.importorskip("optuna")

GRID = {"lr": (0.1, 10.0)}
WORKER = """
import json, sys, time
from sordino.studies.shared_study import search

def score(settings):
    print("claimed", flush=True)
    time.sleep(float(sys.argv[2]))
    return [-abs(each["lr"] - 1) for each in settings]

found = search("study", {"lr": (0.1, 10.0)}, score, trials=8, storage=sys.argv[1], at_once=2)
print(json.dumps(found))
"""


def score(settings):
    return [-abs(each["lr"] - 1) for each in settings]


def start(storage, pause):
    words = [sys.executable, "-c", WORKER, storage, str(pause)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def listed(storage):
    """All trials of the study."""
    with _opened("study", storage) as study:
        return study.get_trials()


def states(storage):
    """Numbers of trials by their state."""
    found = [trial.state.name for trial in listed(storage)]
    return {state: found.count(state) for state in set(found)}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A file with Optuna's tables, which take long to create."""
    file = tmp_path_factory.mktemp("tables") / "empty.db"
    optuna.storages.RDBStorage(f"sqlite:///{file}").engine.dispose()
    return file


@pytest.fixture
def storage(tmp_path, tables):
    shutil.copy(tables, tmp_path / "study.db")
    return f"sqlite:///{tmp_path}/study.db"


def test_progress_counts_the_trials_of_all_workers(storage):
    """Another worker's trials and those of a study that is continued count too, so that the bar ends at the total."""
    search("study", GRID, score, trials=3, storage=storage)
    ticks = []

    def shared(settings):
        with _opened("study", storage) as study:  # another worker, while this one computes
            study.tell(study.ask(), -1.0)
        return score(settings)

    found = search("study", GRID, shared, trials=5, storage=storage, at_once=1, stale_after=1.0, tick=ticks.append)
    assert (ticks, found.complete) == ([3, 2], 5)


@pytest.mark.soak
def test_workers_that_start_at_once_share_the_trials(tmp_path):
    """On a new file, whose tables both create. Together they complete as many trials as one worker would."""
    storage = f"sqlite:///{tmp_path}/new.db"
    workers = [start(storage, 0.02) for _ in range(2)]
    found = [json.loads(worker.communicate(timeout=300)[0].splitlines()[-1]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    counts = states(storage)
    assert counts["COMPLETE"] == 8
    assert "RUNNING" not in counts
    complete = [trial for trial in listed(storage) if trial.state.name == "COMPLETE"]
    assert len({trial.params["lr"] for trial in complete}) == 8, "workers propose settings of their own"
    best = max(complete, key=lambda trial: trial.value)
    assert best.value == score([best.params])[0]
    assert found[0] == found[1] == [best.params, best.value, 8]


def test_the_trials_of_a_killed_worker_fail_and_are_replaced(storage):
    victim = start(storage, 600)
    assert victim.stdout.readline() == "claimed\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert states(storage) == {"RUNNING": 2}
    found = search("study", GRID, score, trials=8, storage=storage, at_once=2, stale_after=0.5)
    assert found.complete == 8
    assert states(storage) == {"COMPLETE": 8, "FAIL": 2}


def test_a_result_that_comes_too_late_is_discarded(storage):
    with _opened("study", storage) as study:
        late = study.ask()
        found = search("study", GRID, score, trials=3, storage=storage, stale_after=0.1)
        shared_study._finish(study, late.number, 100.0)
        assert found.value < 0
        assert study.best_value == found.value
    assert states(storage) == {"COMPLETE": 3, "FAIL": 1}


def test_two_workers_that_ask_at_the_same_time_agree_on_who_gives_up(storage):
    with _opened("study", storage) as one, _opened("study", storage) as other:
        first, second = shared_study._claim(one, 3, 4), shared_study._claim(other, 3, 4)
    assert [trial.number for trial in first + second] == [0, 1, 2, 3]
    assert states(storage) == {"RUNNING": 4, "FAIL": 2}


def test_a_wrong_claim_completes_too_many_trials(storage, monkeypatch):
    """The mutant keeps what it asked for, while another worker claims the same places."""

    def greedy(study, count, most):
        shared_study._finish(study, study.ask().number, -9.0)  # another worker
        return [study.ask() for _ in range(count)]

    right = shared_study._claim

    def careful(study, count, most):
        shared_study._finish(study, study.ask().number, -9.0)
        return right(study, count, most)

    counted = []
    for name, claim in (("greedy", greedy), ("careful", careful)):
        monkeypatch.setattr(shared_study, "_claim", claim)
        counted.append(search(name, GRID, score, trials=3, storage=storage).complete)
    assert counted == [4, 3]


def test_a_worker_that_is_interrupted_leaves_its_trials_at_once(storage):
    def interrupted(settings):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search("study", GRID, interrupted, trials=3, storage=storage)
    assert states(storage) == {"FAIL": 3}


def test_a_trial_is_lost_when_its_beat_stands_still(monkeypatch):
    """By the clock of the one who watches, also if there never was a beat."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch, lost = shared_study._Watch(10.0), []
    with _opened("study", None) as study:
        beats, dies, _never = (study.ask() for _ in range(3))
        dies.set_user_attr("beat", 5)
        for now in (0.0, 6.0, 12.0, 18.0):
            beats.set_user_attr("beat", int(now))
            lost.append(watch.lost(shared_study._listed(study, "RUNNING")))
    assert lost == [[], [], [1, 2], [1, 2]]


def test_a_running_trial_has_beats(storage):
    beats = []

    def slow(settings):
        deadline = time.monotonic() + 60
        while len(set(beats)) < 3 and time.monotonic() < deadline:
            beats.extend(trial.user_attrs["beat"] for trial in listed(storage) if "beat" in trial.user_attrs)
            time.sleep(0.05)
        return score(settings)

    search("study", GRID, slow, trials=1, storage=storage, stale_after=0.2)
    assert len(set(beats)) >= 3


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("foo://x", "--storage: this is not the URL of a database"),
        ("sqlite:////nowhere/x.db", "--storage: the database cannot be used: unable to open database file"),
        ("oracle://me:secret@db/x", "--storage: the driver of this database is not installed; for PostgreSQL: pip"),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused_without_its_password(storage, message, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SordinoError, match="^" + message) as refused:
        search("study", GRID, score, trials=1, storage=storage)
    assert "secret" not in str(refused.value)


def test_options_of_workers_have_bounds():
    with pytest.raises(SordinoError, match="--at-once: 0 must be at least 1"):
        search("study", GRID, score, trials=1, at_once=0)
    with pytest.raises(SordinoError, match=r"--stale-after: 0 must lie in \(0, 86400\]"):
        search("study", GRID, score, trials=1, stale_after=0.0)


# ------------------------------------------------------------------------------------------------------ whole processes

VALUES = {"method": "dp-fedgd", "clients": 4, "rounds": 60, "epsilon": 8.0}
TRIALS = 12
LONGEST = 1200  # seconds
SWEEP = (
    *(sys.executable, "-m", "sordino", "sweep", "--method", "dp-fedgd", "--set", "clients=4", "--set", "rounds=60"),
    *("--epsilon", "8", "--grid", "lr=0.05,5.0", "--search", "optuna", "--trials", str(TRIALS), "--at-once", "2"),
    *("--stale-after", "20", "--json"),
)


def programs():
    """The folder of PostgreSQL's server programs."""
    found = shutil.which("initdb")
    folders = [str(Path(found).resolve().parent)] if found else sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    if not folders:
        pytest.skip("no PostgreSQL server: initdb is neither on the PATH nor in /usr/lib/postgresql/*/bin")
    return Path(folders[-1])


@contextmanager
def postgres():
    """A server in a temporary folder, which listens on a Unix socket there. Yields the URL of its database."""
    pytest.importorskip("psycopg", reason="no PostgreSQL driver: pip install 'sordino[postgres]'")
    binaries = programs()
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a short path, as sockets need
    owner = {"user": "nobody"} if os.geteuid() == 0 else {}  # the server refuses to run as root
    if owner:
        shutil.chown(folder, **owner)

    def call(program, *words):
        subprocess.run(
            [binaries / program, *words], check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=LONGEST, **owner
        )

    data = folder / "data"
    try:
        call("initdb", "-D", data, "-A", "trust", "-U", "sordino", "-N")
        call("pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", f"-c listen_addresses= -k {folder}", "start")
        try:
            yield f"postgresql+psycopg://sordino@/postgres?host={folder}"
        finally:
            call("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def served(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/study.db"
    else:
        with postgres() as url:
            yield url


@contextmanager
def trials_of(storage):
    """A function that lists all trials of the one study."""
    tables = optuna.storages.RDBStorage(
        storage, engine_kwargs={"connect_args": {"timeout": 60}} if "sqlite" in storage else {}
    )

    def listed():
        names = optuna.get_all_study_names(tables)
        return optuna.load_study(study_name=names[0], storage=tables).get_trials() if names else []

    try:
        yield listed
    finally:
        tables.engine.dispose()


def sweeping(storage):
    return subprocess.Popen([*SWEEP, "--storage", storage], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_in_a_trial(storage, listed):
    """Start a worker, and kill it while its trials run. Returns their numbers."""

    def running():
        """Trials whose settings are complete, so that they are being trained."""
        return [t.number for t in listed() if t.state.name == "RUNNING" and t.params and "beat" in t.user_attrs]

    deadline = time.monotonic() + LONGEST
    for _ in range(4):  # a trial may end before the signal arrives
        worker = sweeping(storage)
        while not running() and worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.send_signal(signal.SIGKILL)
        told = worker.communicate()[1]
        if died := running():
            return died
    raise AssertionError(f"no worker was killed in a trial: {told}")


@pytest.mark.soak
@pytest.mark.parametrize("workers", [2, 4])
def test_a_study_of_several_workers_survives_a_kill(served, workers):
    """`sordino sweep` in processes of their own, one of which is killed in the middle of a trial."""
    storage = served
    with trials_of(storage) as listed:
        died = killed_in_a_trial(storage, listed)
        started = [sweeping(storage) for _ in range(workers)]
        told = [worker.communicate(timeout=LONGEST) for worker in started]
        assert [worker.returncode for worker in started] == [0] * workers, told
        trials = listed()
    by_state = {name: [t for t in trials if t.state.name == name] for name in ("COMPLETE", "FAIL", "RUNNING")}
    complete = by_state["COMPLETE"]
    assert not by_state["RUNNING"]
    assert set(died) <= {trial.number for trial in by_state["FAIL"]}
    assert len(complete) == TRIALS
    assert len({trial.params["lr"] for trial in complete}) == TRIALS, "no setting is tried twice"
    best = max(complete, key=lambda trial: trial.value)
    for out, _ in told:
        result = json.loads(out)
        assert result["best"] == best.params
        assert result["tried"] == TRIALS
        assert result["rows"][0]["mean"] == best.value
    alone = sweep(VALUES, {"lr": (best.params["lr"],)})
    assert alone["rows"][0]["mean"] == pytest.approx(best.value), "one process finds the same"
