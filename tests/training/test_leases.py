"""One folder of a run continues it: copies and older states of the folder are refused."""

import contextlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sordino import files
from sordino.cli import main
from sordino.errors import LedgerError, RolledBackError
from sordino.evidence.ledger import Lease, Ledger
from sordino.training import leases, run
from sordino.training.folder import RunFolder
from sordino.training.leases import StateRegister
from sordino.training.spec import Spec
from tests.support import forks

ROUNDS = 5


@pytest.fixture(params=["shared ledger", "state directory"])
def begun(request, tmp_path, monkeypatch):
    """Begins a run that is killed after some rounds; the register is a shared ledger, or the state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(int))
    facts = {"data": str(tmp_path / "data.npz"), "method": "dp-fedgd", "rounds": ROUNDS, "clients": 2}
    prepared = run.prepare(Spec.of(facts))
    shared = run.join_ledger(prepared, tmp_path / "mine.db") if request.param == "shared ledger" else None

    def begin(rounds):
        out = tmp_path / "run"
        run.start(prepared, out, shared)
        stream = run.rounds(prepared, out)
        for _ in range(rounds):
            next(stream)
        return prepared, out, stream

    return begin


def copied(out, name="copy"):
    return shutil.copytree(out, out.parent / name)


def register(tmp_path, plan):
    return Ledger(tmp_path / "mine.db") if (tmp_path / "mine.db").exists() else StateRegister(plan)


def shown(out):
    lines = (out / "public" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["round"] for line in lines]


def test_a_killed_run_is_resumed_as_often_as_needed(begun):
    prepared, out, stream = begun(1)
    stream.close()
    for _ in range(3):
        stream = run.rounds(prepared, out)
        for _ in range(len(shown(out)) + 1):
            next(stream)
        stream.close()
    assert len(list(run.rounds(prepared, out))) == ROUNDS
    assert len(list(run.rounds(prepared, out))) == ROUNDS, "a finished run too"


def test_of_a_run_and_its_copy_one_goes_on(begun):
    prepared, out, stream = begun(2)
    stream.close()
    copy, other = copied(out), copied(out, "other")
    assert len(list(run.rounds(prepared, copy))) == ROUNDS
    for late in (out, other):
        with pytest.raises(RolledBackError, match=r"has done 2 rounds, .* counts 5 rounds .* second time"):
            list(run.rounds(prepared, late))
        assert shown(late) == [1, 2]
    assert len(list(run.rounds(prepared, copy))) == ROUNDS


def test_a_copy_of_a_copy_that_did_no_round_is_refused_too(begun):
    """The rounds agree, so that only the token tells them apart."""
    prepared, out, stream = begun(2)
    stream.close()
    copy = copied(out)
    stream = run.rounds(prepared, copy)
    next(stream)  # it has the lease, and did no round
    stream.close()
    with pytest.raises(RolledBackError, match=r"has done 2 rounds, .* counts 2 rounds"):
        list(run.rounds(prepared, out))


def test_a_folder_that_was_put_back_is_refused(begun):
    """While it trains, the token does not change, so that only the rounds tell."""
    prepared, out, stream = begun(2)
    old = copied(out, "backup")
    next(stream)
    stream.close()
    shutil.rmtree(out)
    old.rename(out)
    with pytest.raises(RolledBackError, match=r"has done 2 rounds, .* counts 3 rounds"):
        list(run.rounds(prepared, out))


def test_a_copy_that_is_resumed_stops_the_original(begun):
    """Neither shows a round that the other has shown."""
    prepared, out, stream = begun(2)
    copy = copied(out)
    later = run.rounds(prepared, copy)
    for _ in range(3):
        next(later)
    with pytest.raises(RolledBackError, match="round 3 of it was not shown"):
        next(stream)
    assert shown(out) == [1, 2]
    assert shown(copy) == [1, 2, 3]
    with pytest.raises(RolledBackError):
        list(run.rounds(prepared, out))
    assert [line["round"] for line in later] == [4, 5]


def test_a_finished_run_and_its_copy_are_both_read_again(begun):
    """Nothing more is released, so that neither takes the lease from the other."""
    prepared, out, stream = begun(ROUNDS)
    assert not list(stream)
    copy = copied(out)
    for folder in (copy, out, copy, out):
        assert [line["round"] for line in run.rounds(prepared, folder)] == [*range(1, ROUNDS + 1)]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_kill_while_the_lease_is_passed_locks_nobody_out(begun, tmp_path, monkeypatch, where):
    prepared, out, stream = begun(2)
    stream.close()

    def killed(pass_lease):
        def fall(self, *words, **settings):
            if where == "after":
                assert pass_lease(self, *words, **settings)
            raise KeyboardInterrupt

        return fall

    with monkeypatch.context() as patch:
        for kind in (Ledger, StateRegister):
            patch.setattr(kind, "pass_lease", killed(kind.pass_lease))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                list(run.rounds(prepared, out))
    copy = copied(out)
    assert len(json.loads((out / "private" / "lease.json").read_text())) == 2
    assert len(list(run.rounds(prepared, out))) == ROUNDS
    with pytest.raises(RolledBackError):
        list(run.rounds(prepared, copy))


def test_a_kill_between_checkpoint_and_lease_loses_no_round(begun, monkeypatch):
    prepared, out, stream = begun(2)
    with monkeypatch.context() as patch:
        patch.setattr(leases.HeldLease, "keep", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert len(list(run.rounds(prepared, out))) == ROUNDS


def test_of_parallel_resumes_one_gets_the_lease(begun, tmp_path):
    _, out, stream = begun(1)
    stream.close()
    copies, gate, got = [copied(out, f"c{k}") for k in range(6)], threading.Barrier(6), []
    with np.load(out / "private" / "checkpoint.npz") as archive:
        plan = str(archive["identity"])

    def resume(copy):
        kept = register(tmp_path, plan)
        gate.wait()
        with contextlib.suppress(RolledBackError):
            got.append(leases.take(RunFolder.of(copy), plan, 1, kept))

    threads = [threading.Thread(target=resume, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holders = [each for each in got if register(tmp_path, plan).lease(plan).token == each.token]
    assert len(got) >= 1
    assert len(holders) == 1
    assert len(got) == 1


def test_two_processes_that_resume_copies_at_once_release_one_model(begun, tmp_path):
    _, out, stream = begun(1)
    stream.close()
    folders = [out, copied(out)]
    code = "from sordino.cli import main; exit(main())"

    def resume(folder):
        return forks.run(code, "run", "--resume", str(folder), folder=tmp_path, env=os.environ)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(resume, folders))
    assert sorted(end.returncode for end in ends) == [0, 2], ends
    assert sum((each / "public" / "model.safetensors").exists() for each in folders) == 1
    assert any("was resumed" in end.stderr or "resumed since" in end.stderr for end in ends)


def test_a_run_of_before_gets_a_lease(begun, tmp_path):
    prepared, out, stream = begun(2)
    stream.close()
    (out / "private" / "lease.json").unlink()
    with pytest.raises(RolledBackError):
        list(run.rounds(prepared, copied(out)))  # a copy that lost it on the way
    if (tmp_path / "mine.db").exists():
        with Ledger(tmp_path / "mine.db") as ledger:
            ledger._ask("DROP TABLE leases")
    else:
        shutil.rmtree(tmp_path / "state")
    copy = copied(out, "another")
    assert len(list(run.rounds(prepared, out))) == ROUNDS
    with pytest.raises(RolledBackError):
        list(run.rounds(prepared, copy))


def test_a_register_that_was_put_back(begun, tmp_path):
    """A shared ledger without the lease is refused; another machine has no state of this run, and goes on."""
    prepared, out, stream = begun(2)
    stream.close()
    if (tmp_path / "mine.db").exists():
        with Ledger(tmp_path / "mine.db") as ledger:
            ledger._ask("DELETE FROM leases")
        with pytest.raises(RolledBackError, match="knows no lease"):
            list(run.rounds(prepared, out))
    else:
        shutil.rmtree(tmp_path / "state")
        assert len(list(run.rounds(prepared, out))) == ROUNDS


def test_the_refusal_of_a_copy_at_the_command_line(begun, capsys):
    _, out, stream = begun(2)
    stream.close()
    copy = copied(out)
    assert main(["run", "--resume", str(out)]) == 0
    capsys.readouterr()
    assert main(["run", "--resume", str(copy)]) == 2
    assert "Continue the folder that was resumed last, or start a new run." in capsys.readouterr().err
    assert not (copy / "public" / "certificate.json").exists()


def test_data_that_everybody_may_see_need_no_lease(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    prepared = run.prepare(Spec.of({"data": "digits", "method": "dp-fedgd", "rounds": 1, "clients": 2}))
    run.start(prepared, tmp_path / "run")
    assert len(list(run.rounds(prepared, tmp_path / "run"))) == 1
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "run" / "private" / "lease.json").exists()


def test_the_file_of_a_lease_is_private_and_a_damaged_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kept = StateRegister("a plan")
    assert kept.pass_lease("a plan", [], Lease("first", 0))
    assert files.is_private(kept.path)
    assert not kept.pass_lease("a plan", ["other"], Lease("second", 0))
    assert not kept.pass_lease("a plan", ["first"], Lease("first", -1))
    assert StateRegister("a plan").lease("a plan") == Lease("first", 0)
    assert StateRegister("another").lease("another") is None
    kept.path.write_text("[]")
    with pytest.raises(LedgerError, match="cannot be read"):
        kept.lease("a plan")
    folder = RunFolder.of(tmp_path)
    folder.private.mkdir()
    (folder.private / "lease.json").write_text("3")
    with pytest.raises(LedgerError, match="put it back, or start a new run"):
        leases.take(folder, "another", 0, StateRegister("another"))


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(LedgerError, match="Set XDG_STATE_HOME to a folder outside of the run"):
        StateRegister("a plan")
